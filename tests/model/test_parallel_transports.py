"""Divided models whose tokens travel over emulated transport libraries: the answers are those of one rank."""

from pathlib import Path

import pytest
import torch

from model.config import ModelSettings
from model.moe_layer import TokenSlices
from model.parallel import ParallelLayout
from model.registry import build_model
from moe import MoeA2ABackend
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
from moe.group import RankGroups
from tests.emulators.deepep import install_deepep
from tests.emulators.low_latency import install_low_latency
from tests.emulators.ranks import Rank, run_ranks
from tests.model.parallel_cases import TOLERANCE, expected, run_steps, worst_error
from tests.model.parallel_checkpoints import write_checkpoint
from tests.model.rank_threads import ThreadGroup, load_rank, run_layout

LIMIT = 20  # tokens of the largest step
DEEPEP, MOONCAKE, NIXL = MoeA2ABackend.DEEPEP, MoeA2ABackend.MOONCAKE, MoeA2ABackend.NIXL
OWN_TOKENS = {"dp_size": 2, "ep_size": 2}
SLICES = {"tp_size": 2, "ep_size": 2}  # of the tokens that both have
BOTH = {"tp_size": 2, "dp_size": 2, "ep_size": 4}
CASES = [("gpt_oss", DEEPEP, DeepepMode.AUTO, SLICES, True), ("deepseek", DEEPEP, DeepepMode.AUTO, BOTH, False)]
MORE_CASES = [
    ("gpt_oss", DEEPEP, DeepepMode.NORMAL, OWN_TOKENS, False),
    ("gpt_oss", DEEPEP, DeepepMode.LOW_LATENCY, BOTH, True),
    ("deepseek", DEEPEP, DeepepMode.LOW_LATENCY, OWN_TOKENS, True),
    ("deepseek", MOONCAKE, DeepepMode.LOW_LATENCY, SLICES, True),
    ("deepseek", NIXL, DeepepMode.LOW_LATENCY, BOTH, True),
]


@pytest.mark.parametrize(
    ("kind", "a2a", "mode", "sizes", "all_ranks_decode"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.ranks) for case in MORE_CASES)],
)
def test_a_transport_equals_one_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    a2a: MoeA2ABackend,
    mode: DeepepMode,
    sizes: dict[str, int],
    all_ranks_decode: bool,
) -> None:
    install_deepep(monkeypatch, wide=True)
    install_low_latency(monkeypatch, wide=True)
    folder = write_checkpoint(kind, tmp_path / kind)

    def work(layout: ParallelLayout, groups: RankGroups) -> dict[str, torch.Tensor]:
        deepep = DeepepSettings(mode=mode, max_dispatch_tokens=LIMIT)
        model = load_rank(folder, layout, groups, moe_a2a_backend=a2a, deepep=deepep, max_num_tokens=LIMIT)
        assert not any(layer.gathers_tokens for layer in model.moe_layers)
        return run_steps(model, layout, all_ranks_decode=all_ranks_decode)

    want = expected(build_model(folder, ModelSettings(selfcheck="off")), sizes.get("dp_size", 1))
    for rank, got in enumerate(run_layout(sizes, work)):
        assert worst_error(got, want[rank // sizes.get("tp_size", 1)]) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 7, 8])
def test_slices_hold_each_token_once_and_join_in_order(num_tokens: int) -> None:
    x_TH = torch.arange(num_tokens * 2.0).view(num_tokens, 2)

    def work(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slices = TokenSlices(ThreadGroup(rank))
        own = slices.own(x_TH)
        return own, slices.join(own * 10, None, num_tokens), slices.join(own * 10, x_TH, num_tokens)

    results = run_ranks(3, work)
    assert torch.equal(torch.cat([own for own, _, _ in results]), x_TH)
    for _, joined, with_parts in results:
        assert torch.equal(joined, x_TH * 10)
        assert torch.equal(with_parts, x_TH * 13), "the parts of three ranks are summed"
