"""Which kernels a layer starts, in which order and with what, seen by recorders in their place; needs no GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeRunner, MoeRunnerConfig, RankPlace
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.backends.triton.plans import PlanTable
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight
from moe.kernels import launch
from moe.kernels.arrivals import counters
from moe.kernels.launch import run_layer
from moe.kernels.plan import Plan
from moe.routing import StandardTopK
from moe.topology import Topology
from moe.types import DeepepLlDispatchOutput, StandardDispatchOutput
from tests.moe.backends import hostile
from tests.moe.configs import ALONE, rank_config
from tests.tables import rows

KERNELS = ("direct_gemm", "grouped_gemm", "group_slots", "unpermute_sum", "quantize_rows")
NUM_EXPERTS, SIZE, TOP_K = 4, 128, 2
DIRECT = Plan(is_direct=True, block_m=8, block_n_1=64, block_n_2=64, split_k=3, pdl=True)
GROUPED = Plan(is_direct=False, block_m=16, block_n_1=64, block_n_2=64, pdl=True)
FP8 = replace(GROUPED, fp8_activations=True)


class Launch(NamedTuple):
    """A kernel that would have run, its grid, and its arguments by name."""

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    seen: list[Launch] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name, self.arg_names = name, getattr(launch, name).arg_names

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **keywords: seen.append(
                Launch(self.name, grid, dict(zip(self.arg_names, arguments, strict=False)) | keywords)
            )

    for name in KERNELS:
        monkeypatch.setattr(launch, name, Recorder(name))
    return seen


def info_of(
    *steps: tuple[int | None, Plan], bias: bool = False, inter: int = SIZE, format_name: str = "fp8_block",
    **topology: Any,
) -> TritonMoeQuantInfo:  # fmt: skip
    """A layer; without `steps` with one plan for all numbers of tokens."""
    experts = hostile.plain_experts(format_name, NUM_EXPERTS, SIZE, inter, has_biases=bias)
    info = TritonBackend().prepare(experts, config_of(inter, Topology(**topology)), Topology(**topology))
    return replace(info, plans=PlanTable(steps or ((None, GROUPED),)))


def config_of(inter: int = SIZE, place: RankPlace = ALONE) -> MoeRunnerConfig:
    return rank_config(num_experts=NUM_EXPERTS, hidden_size=SIZE, intermediate_size=inter, top_k=TOP_K, place=place)


Run = Callable[..., list[Launch]]


@pytest.fixture
def run(launches: list[Launch]) -> Run:
    """Runs a layer by a plan and returns what that launches."""

    def run(plan: Plan, num_tokens: int, info: TritonMoeQuantInfo | None = None, *, stride: int = SIZE) -> list[Launch]:
        launches.clear()
        x = torch.empty_strided((num_tokens, SIZE), (stride, 1), dtype=torch.bfloat16, device="meta")
        ids = torch.empty(num_tokens, TOP_K, dtype=torch.int32, device="meta")
        out, weights = torch.empty(x.shape, device="meta"), torch.empty(ids.shape, device="meta")
        run_layer(x, ids, weights, (info or info_of()).layer, plan, out)
        return list(launches)

    return run


def run_masked(info: TritonMoeQuantInfo, x: torch.Tensor, max_rows: int | None) -> torch.Tensor:
    """A layer of low latency, in which every expert has 6 rows."""
    runner = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.DEEPEP, config_of())
    empty, counts = torch.empty(0, TOP_K), torch.full((NUM_EXPERTS,), 6, dtype=torch.int32)
    dispatched = DeepepLlDispatchOutput(x, None, empty.long(), empty, counts, 6, max_rows)
    return runner.run(dispatched, info).hidden_states


@rows(
    "plan, names",
    (DIRECT, ["direct_gemm", "direct_gemm", "unpermute_sum"]),
    (GROUPED, ["group_slots", "grouped_gemm", "grouped_gemm", "unpermute_sum"]),
    (FP8, ["group_slots", "quantize_rows", "grouped_gemm", "quantize_rows", "grouped_gemm", "unpermute_sum"]),
)
def test_all_kernels_of_a_layer_start_early_or_none(run: Run, plan: Plan, names: list[str]) -> None:
    early = run(plan, 5)
    assert [each.name for each in early] == names
    assert all(each.arguments["launch_pdl"] and each.arguments["USE_PDL"] for each in early)
    for each in run(replace(plan, pdl=False), 5):
        assert "launch_pdl" not in each.arguments
        assert not each.arguments["USE_PDL"]


def test_direct_launches(run: Run) -> None:
    first, second, last = (each.arguments for each in run(DIRECT, 8))
    assert (first["SPLIT_K"], second["SPLIT_K"], last["SPLIT_K"]) == (1, 1, 1), "one step of K has no parts"
    assert first["SLOTS_PAD"] == 0, "every token has a row"
    assert run(DIRECT, 9)[0].arguments["SLOTS_PAD"] == 64


@rows("wanted, got", (1, 1), (2, 2), (3, 2), (9, 2))
def test_the_second_matrix_has_no_more_parts_than_steps(run: Run, wanted: int, got: int) -> None:
    launched = run(replace(DIRECT, split_k=wanted), 5, info_of(inter=256))  # two steps, where the first matrix has one
    assert [each.arguments["SPLIT_K"] for each in launched] == [1, got, got]


NUM_TILES = (2 * SIZE // 64) * (9 * TOP_K) * 2


@rows("wanted, got, num_counters", (1, 1, NUM_TILES), (2, 2, NUM_TILES), (5, 2, NUM_TILES), (2, 1, NUM_TILES - 1))
def test_the_first_matrix_has_no_more_parts_than_steps_or_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, wanted: int, got: int, num_counters: int
) -> None:
    """Tiles that are too many for the counters stay whole, and so does what belongs to the second matrix."""
    monkeypatch.setattr(launch, "MAX_COUNTERS", num_counters)
    info = info_of(format_name="bf16")  # two steps
    (_, grid, first), (_, _, second), _ = run(replace(DIRECT, split_k=1, split_k_1=wanted), 9, info)
    assert grid == (2 * SIZE // 64, 9 * TOP_K, 2 * got)
    assert (first["SPLIT_K"], second["SPLIT_K"]) == (got, 1)
    assert second["parts_ptr"] is second["arrived_ptr"] is None
    if got == 1:
        assert first["parts_ptr"] is first["arrived_ptr"] is None
    else:
        assert first["parts_ptr"].shape == (9 * TOP_K, got, 2 * SIZE)
        assert first["arrived_ptr"] is info.layer.arrived


def test_layers_of_a_device_share_counters_with_nothing_else() -> None:
    first, second = (info_of().layer.arrived for _ in range(2))
    assert first is second
    assert first is not counters(torch.device("cpu"), "fp8 linear")


@rows("tp_rank, has_bias", (0, [True, True]), (1, [True, False]))
def test_one_rank_of_a_sum_adds_the_bias_of_the_second_matrix(run: Run, tp_rank: int, has_bias: list[bool]) -> None:
    *gemms, _ = run(DIRECT, 5, info_of(bias=True, tp_size=2, tp_rank=tp_rank))
    assert [each.arguments["HAS_BIAS"] for each in gemms] == has_bias


@rows("kind", Bf16Weight, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight)
def test_a_rank_without_intermediate_columns_starts_nothing_and_adds_nothing(launches: list[Launch], kind: Any) -> None:
    topology = Topology(tp_size=2, tp_rank=1)
    config = config_of(0, topology)
    w13, w2 = (kind.quantize(w) for w in hostile.dense_experts(NUM_EXPERTS, SIZE, SIZE))
    w13, w2 = w13.narrow(1, 0, 0), w2.narrow(2, 0, 0)
    info = TritonBackend().prepare(ExpertWeights(w13=w13, w2=w2), config, topology)
    runner = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.NONE, config)
    topk = StandardTopK(torch.ones(3, TOP_K), torch.zeros(3, TOP_K, dtype=torch.int32))
    out = runner.run(StandardDispatchOutput(torch.ones(3, SIZE, dtype=torch.bfloat16), topk), info).hidden_states
    assert out.shape == (3, SIZE)
    assert not out.any()
    assert not launches


def test_offsets_are_wide_only_where_32_bits_are_too_few(run: Run) -> None:
    launched = run(GROUPED, 4096) + run(GROUPED, 2**31 // (SIZE * TOP_K)) + run(GROUPED, 9, stride=2**28)
    wide = [each.arguments["WIDE"] for each in launched if each.name == "grouped_gemm"]
    assert wide == [False, False, True, True, True, False]


@rows("max_rows", None, 40)
def test_masked_rows_take_the_grouped_plan_for_as_many_tokens_as_are_likely(
    launches: list[Launch], max_rows: int | None
) -> None:
    launches.clear()
    low, middle, high = (replace(GROUPED, block_m=block_m) for block_m in (16, 32, 64))
    info = info_of((100, DIRECT), (11, low), (12, middle), (None, high), a2a=MoeA2ABackend.DEEPEP)
    run_masked(info, torch.zeros(NUM_EXPERTS, 32, SIZE, dtype=torch.bfloat16), max_rows)
    heights = [each.arguments["BLOCK_M"] for each in launches]
    assert heights == [32] * 3, "6 rows an expert, 4 experts, 2 of them a token: 12 tokens"


@rows("max_rows, num_tiles", (None, 260), (4096, 260), (48, 7))
def test_masked_rows_are_written_by_the_second_gemm_in_no_more_tiles_than_can_have_rows(
    launches: list[Launch], max_rows: int | None, num_tiles: int
) -> None:
    """Few of the slots that low latency reserves are ever used: grids and copies of all of them cost most of the time.

    Four experts with 48 rows among them fill at most 7 tiles of 16: three full ones, and a short one for each expert.
    """
    launches.clear()
    x = torch.zeros(NUM_EXPERTS, 1024, 192, dtype=torch.bfloat16)[..., :SIZE]
    result = run_masked(info_of(a2a=MoeA2ABackend.DEEPEP), x, max_rows)
    assert [(name, grid[0]) for name, grid, _ in launches] == [
        ("group_slots", NUM_EXPERTS),
        ("grouped_gemm", 2 * SIZE // 64 * num_tiles),
        ("grouped_gemm", SIZE // 64 * num_tiles),
    ]
    assert launches[-1].arguments["out_ptr"].data_ptr() == result.data_ptr()
    assert result.stride() == x.stride()
