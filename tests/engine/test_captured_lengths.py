"""What a captured step is told of its rows, for attention that plans on the host: the lengths that the device has."""

from tests.engine.requests import request, run_all, tokens_of
from tests.engine.test_cuda_graphs import core_with_graphs
from tests.tables import rows


@rows("num_tokens", 63, 64, 65)
def test_a_prompt_that_fills_a_size_or_leaves_padding_tells_its_lengths(num_tokens, monkeypatch):
    """`Replay.replay` compares them; a size is 64 tokens, and its row of padding may have none."""
    core = core_with_graphs(monkeypatch, max_num_seqs=3)
    before = {size: graph.num_replays for size, graph in core._runner.prompt_graphs._graphs.items()}
    answers = run_all(core, [request("a", range(1, 1 + num_tokens), 2, ignore_eos=True)])
    assert len(tokens_of(answers["a"])) == 2, "a step that fails ends its request"
    replayed = [size for size, graph in core._runner.prompt_graphs._graphs.items() if graph.num_replays > before[size]]
    assert [size.num_tokens for size in replayed] == [64 if num_tokens <= 64 else 128]
