"""`EngineCore`: the step loop's body, in the caller's process. Knows requests and tokens; no sockets, no processes."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.load import LoadedEngine, load_engine
from engine.logprobs import prompt_logprobs
from engine.pages import PageAllocator
from engine.prefix_cache import PrefixCache
from engine.runner import Model, num_logit_rows
from engine.sampler import Sampled, sample
from engine.scheduler import Scheduler
from engine.sequence import Chunk, Sequence
from engine.types import EngineInfo, EngineOutput, EngineRequest, EngineStats, FinishReason, TokenLogprobs
from engine.validate import RequestLimits, check_request, overloaded_output, refusal_output

logger = logging.getLogger(__name__)

_INTERNAL_ERROR = "the engine failed on this request; its log says why"
_NOT_FINITE = "the model's output for this request was not a number"


@dataclass(slots=True)
class _StepResult:
    """What one step found out about one chunk; nothing of it is applied yet."""

    chunk: Chunk
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_entries: list[TokenLogprobs | None] | None = None
    error: str | None = None


class EngineCore:
    """One model, its KV cache and its requests. Not thread-safe; `stats` alone may be called from another thread.

    Every request that was added ends in exactly one output with a finish reason, also when it is refused or aborted.
    An exception in a step is pinned on single requests by running them one at a time; the others go on.
    """

    def __init__(
        self, config: EngineConfig, model: Model | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Load the model of the config, or take the one given, and allocate the KV cache.

        `clock` returns seconds and times the steps.

        Raises:
            ValueError: (of this package, the model's, the loaders') a setting or a file is wrong.
        """
        start_s = time.monotonic()
        self.config = config
        loaded: LoadedEngine = load_engine(config, model)
        self._runner = loaded.runner
        self._pace = loaded.pace
        self._clock = clock
        pages = PageAllocator(loaded.num_pages)
        self._scheduler = Scheduler(
            pages,
            PrefixCache(pages) if config.enable_prefix_caching else None,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=loaded.max_num_batched_tokens,
        )
        self._limits = RequestLimits(
            vocab_size=loaded.runner.model.vocab_size,
            max_model_len=loaded.max_model_len,
            num_kv_tokens=loaded.num_pages * config.page_size,
        )
        self._eos_ids = frozenset(loaded.runner.model.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._early_outputs: list[EngineOutput] = []  # refusals and aborts, handed out by the next step
        self._num_steps = 0
        self._num_generated = 0
        self.info: EngineInfo = loaded.make_info(config, load_seconds=time.monotonic() - start_s)

    @property
    def has_work(self) -> bool:
        """True when the next `step` has something to do."""
        return bool(self._scheduler.sequences or self._early_outputs)

    def stats(self) -> EngineStats:
        """Counters of this moment."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages_used=scheduler.pages.num_used,
            num_pages_total=scheduler.pages.num_pages,
            num_steps=self._num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=self._num_generated,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_preemptions=scheduler.num_preemptions,
        )

    def add(self, request: EngineRequest) -> None:
        """Queue a request; a refusal is an output of the next step. Raises ValueError if its id is in use."""
        scheduler = self._scheduler
        if len(scheduler.sequences) >= self.config.max_requests:
            self._early_outputs.append(overloaded_output(request.request_id, self.config.max_requests))
            return
        try:
            check_request(request, self._limits)
        except RequestError as error:
            self._early_outputs.append(refusal_output(request.request_id, error))
            return
        sampling = request.sampling
        stop_ids = frozenset() if sampling.ignore_eos else self._eos_ids.union(sampling.stop_token_ids)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        scheduler.add(Sequence(request, stop_ids=stop_ids, seed=seed))

    def abort(self, request_id: str) -> None:
        """End a request early; its last output comes with the next step. Does nothing if it is over already."""
        seq = self._scheduler.remove(request_id)
        if seq is not None:
            self._early_outputs.append(_make_output(seq, finish_reason="abort"))

    def step(self) -> list[EngineOutput]:
        """Run the model once on what the scheduler chose; the news of all requests since the last step."""
        outputs, self._early_outputs = self._early_outputs, []
        chunks = self._scheduler.schedule(None if self._pace is None else self._pace.max_prompt_tokens)
        if chunks:
            self._num_steps += 1
            for result in self._compute_timed(chunks):
                output = self._apply(result)
                if output is not None:
                    outputs.append(output)
        return outputs

    def _compute_timed(self, chunks: list[Chunk]) -> list[_StepResult]:
        start_s = self._clock()
        results = self._compute(chunks)
        if self._pace is not None and any(result.token is not None for result in results):  # else it may still run
            num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
            num_prompt_tokens = sum(chunk.num_tokens for chunk in chunks) - num_decodes
            step_s = self._clock() - start_s
            self._pace.observe(num_decodes=num_decodes, num_prompt_tokens=num_prompt_tokens, step_s=step_s)
        return results

    def _compute(self, chunks: list[Chunk]) -> list[_StepResult]:
        try:
            return self._forward(chunks)
        except torch.AcceleratorError:
            raise  # the device's context is gone: nothing can go on in this process
        except Exception as error:  # whatever it is, it must not take the other requests along
            if len(chunks) == 1:
                logger.exception("request %s failed", chunks[0].seq.request_id)
                return [_StepResult(chunks[0], error=_INTERNAL_ERROR)]
            logger.warning("a step of %d requests failed (%s); running them one at a time", len(chunks), error)
        return [result for chunk in chunks for result in self._compute([chunk])]

    @torch.inference_mode()
    def _forward(self, chunks: list[Chunk]) -> list[_StepResult]:
        """One forward pass and the choice of tokens; changes no request, so that it can be repeated."""
        logits_RV = self._runner.run(chunks)
        results = [_StepResult(chunk) for chunk in chunks]
        sampling: list[tuple[int, _StepResult]] = []  # row of the logits, result to fill
        row = 0
        for chunk, result in zip(chunks, results, strict=True):
            num_rows = num_logit_rows(chunk)
            if chunk.seq.wants_prompt_logprobs:
                result.prompt_entries = _prompt_entries(chunk, logits_RV[row : row + num_rows])
            row += num_rows
            if chunk.samples:
                sampling.append((row - 1, result))
        if sampling:
            if len(sampling) < row:
                logits_RV = logits_RV[[index for index, _ in sampling]]
            sampled: Sampled = sample(logits_RV, [result.chunk.seq for _, result in sampling])
            for (_, result), token, logprobs in zip(sampling, sampled.tokens, sampled.logprobs, strict=True):
                result.token, result.logprobs = token, logprobs
                if token is None:
                    result.error = _NOT_FINITE
        return results

    def _apply(self, result: _StepResult) -> EngineOutput | None:
        chunk, seq = result.chunk, result.chunk.seq
        if result.error is not None:
            self._scheduler.remove(seq.request_id)
            return _make_output(seq, finish_reason="error", error=result.error)
        self._scheduler.commit(chunk)
        if result.prompt_entries is not None:
            seq.prompt_logprobs[chunk.start + 1 :] = result.prompt_entries
        if result.token is None:
            return None
        return self._accept(seq, result.token, result.logprobs)

    def _accept(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> EngineOutput:
        with_prompt = seq.wants_prompt_logprobs
        seq.token_ids.append(token)
        self._num_generated += 1
        reason: FinishReason | None = None
        if token in seq.stop_ids:
            reason = "stop"
        elif seq.num_output >= seq.sampling.max_tokens:
            reason = "length"
        if reason is not None:
            self._scheduler.remove(seq.request_id)
        return EngineOutput(
            request_id=seq.request_id,
            token_ids=[token],
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=seq.prompt_logprobs if with_prompt else None,
            finish_reason=reason,
            stop_reason=token if reason == "stop" else None,
            num_cached_tokens=seq.num_cached,
        )


def _prompt_entries(chunk: Chunk, logits_RV: torch.Tensor) -> list[TokenLogprobs | None]:
    """Entries of the prompt tokens after the chunk's tokens; the prompt's last token predicts none of them."""
    seq = chunk.seq
    next_ids = seq.token_ids[chunk.start + 1 : chunk.end + 1]
    if not next_ids:
        return []
    return prompt_logprobs(logits_RV[: len(next_ids)], next_ids, seq.sampling.prompt_logprobs or 0)


def _make_output(seq: Sequence, *, finish_reason: FinishReason, error: str | None = None) -> EngineOutput:
    return EngineOutput(
        request_id=seq.request_id, finish_reason=finish_reason, error=error, num_cached_tokens=seq.num_cached
    )
