"""Steps that run before the first request, so that no kernel compiles or loads while somebody waits.

What they write to the KV cache is never read by a request.
"""

from engine.batching import make_step
from engine.errors import EngineError
from engine.runner import ModelRunner, Pending
from engine.sequence import Chunk, Sequence
from engine.types import EngineRequest, SamplingParams

_FEWEST_TOKENS = 4


def run_prompt(runner: ModelRunner, num_tokens: int) -> Pending:
    """One prompt of zeros on the first pages, then one token after it, whose step is returned."""
    seq = _sequence(runner, num_tokens, row=0)
    last = _run(runner, Chunk.next_of(seq, num_tokens))
    if num_tokens > 1:
        seq.num_computed = num_tokens - 1
        last = _run(runner, Chunk.next_of(seq, 1))
    return last


def check_logits(step: Pending) -> None:
    """Refuse a model whose requests would fail. Waits for the device.

    Raises:
        EngineError: a logit of the step is NaN or infinite.
    """
    if step.logits_RV is not None and not step.logits_RV.isfinite().all():
        raise EngineError(
            "the first logits are NaN or infinite, so requests would fail: the weights are damaged, a number in "
            "config.json is wrong, or a kernel is; download the model again, or compare with --moe-backend torch"
        )


def run_step_sizes(runner: ModelRunner, max_tokens: int) -> None:
    """Steps of 4, 8, 16, ... tokens: a prompt beside a request that decodes, as they meet under load.

    Then a step in which every place decodes. Kernels differ by the number of tokens, and those of attention by that of
    requests. Needs places for two requests and room for `max_tokens`.
    """
    decoding = _sequence(runner, 2, row=0)
    decoding.num_computed = 1
    size = min(_FEWEST_TOKENS, max_tokens)
    while size > 2:
        prompt = _sequence(runner, size - 1, row=1)
        _run(runner, Chunk.next_of(decoding, 1), Chunk.next_of(prompt, size - 1))
        size = min(2 * size, max_tokens) if size < max_tokens else 0
    decodes = [_sequence(runner, 2, row=row) for row in range(min(len(runner.tokens_M), max_tokens))]
    for seq in decodes:
        seq.num_computed = 1
    _run(runner, *(Chunk.next_of(seq, 1) for seq in decodes))


def _run(runner: ModelRunner, *chunks: Chunk) -> Pending:
    return runner.launch(make_step(list(chunks), runner.page_size))


def _sequence(runner: ModelRunner, num_tokens: int, *, row: int) -> Sequence:
    request = EngineRequest(request_id="warm-up", prompt_ids=[0] * num_tokens, sampling=SamplingParams(max_tokens=1))
    seq = Sequence(request, stop_ids=frozenset(), seed=0)
    seq.row = row
    seq.pages = list(range(-(-num_tokens // runner.page_size)))
    seq.sliding_pages = list(seq.pages) if runner.is_sliding else []
    return seq
