"""Which kernels a layer starts, in which order and with what, seen by recorders in their place; needs no GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeRunner, MoeRunnerConfig, RankPlace
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.backends.triton.plans import PlanTable
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight
from moe.kernels import launch
from moe.kernels.arrivals import counters
from moe.kernels.gemm import direct_gemm
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
Launch = tuple[str, dict[str, Any]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """(name, keywords) of everything that would have run."""
    seen: list[Launch] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **keywords: seen.append((self.name, keywords))

    for name in KERNELS:
        monkeypatch.setattr(launch, name, Recorder(name))
    return seen


def info_of(
    plans: PlanTable, *, bias: bool = False, inter: int = SIZE, format_name: str = "fp8_block", **topology: Any
) -> TritonMoeQuantInfo:
    experts = hostile.plain_experts(format_name, NUM_EXPERTS, SIZE, inter, has_biases=bias)
    info = TritonBackend().prepare(experts, config_of(inter, Topology(**topology)), Topology(**topology))
    return replace(info, plans=plans)


def config_of(inter: int = SIZE, place: RankPlace = ALONE) -> MoeRunnerConfig:
    return rank_config(num_experts=NUM_EXPERTS, hidden_size=SIZE, intermediate_size=inter, top_k=TOP_K, place=place)


def run(plan: Plan, num_tokens: int, info: TritonMoeQuantInfo | None = None, *, stride: int = SIZE) -> None:
    layer = (info or info_of(PlanTable(((None, GROUPED),)))).layer
    x = torch.empty_strided((num_tokens, SIZE), (stride, 1), dtype=torch.bfloat16, device="meta")
    ids = torch.empty(num_tokens, TOP_K, dtype=torch.int32, device="meta")
    run_layer(x, ids, torch.empty(ids.shape, device="meta"), layer, plan, torch.empty(x.shape, device="meta"))


@rows(
    "plan, names",
    (DIRECT, ["direct_gemm", "direct_gemm", "unpermute_sum"]),
    (GROUPED, ["group_slots", "grouped_gemm", "grouped_gemm", "unpermute_sum"]),
    (FP8, ["group_slots", "quantize_rows", "grouped_gemm", "quantize_rows", "grouped_gemm", "unpermute_sum"]),
)
def test_all_kernels_of_a_layer_start_early_or_none(launches: list[Launch], plan: Plan, names: list[str]) -> None:
    launches.clear()
    run(plan, 5)
    assert [name for name, _ in launches] == names
    assert all(keywords["launch_pdl"] and keywords["USE_PDL"] for _, keywords in launches)
    launches.clear()
    run(replace(plan, pdl=False), 5)
    assert not any("launch_pdl" in keywords or keywords["USE_PDL"] for _, keywords in launches)


def test_direct_launches(launches: list[Launch]) -> None:
    run(DIRECT, 8)
    (_, first), (_, second), (_, last) = launches
    assert (first["SPLIT_K"], second["SPLIT_K"], last["SPLIT_K"]) == (1, 1, 1), "one step of K has no parts"
    assert first["SLOTS_PAD"] == 0, "every token has a row"
    launches.clear()
    run(DIRECT, 9)
    assert launches[0][1]["SLOTS_PAD"] == 64


def test_the_second_matrix_has_no_more_parts_than_steps(launches: list[Launch]) -> None:
    info = info_of(PlanTable(((None, GROUPED),)), inter=256)  # two steps, where the first matrix has one
    for wanted, got in ((1, 1), (2, 2), (3, 2), (9, 2)):
        launches.clear()
        run(replace(DIRECT, split_k=wanted), 5, info)
        assert [keywords["SPLIT_K"] for _, keywords in launches] == [1, got, got]


def test_the_first_matrix_has_no_more_parts_than_steps_or_none(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that are too many for the counters stay whole, and so does what belongs to the second matrix."""
    started: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **keywords: started.append(
                (grid, dict(zip(direct_gemm.arg_names, arguments, strict=False)) | keywords)
            )

    monkeypatch.setattr(launch, "direct_gemm", Recorder())
    info = info_of(PlanTable(((None, GROUPED),)), format_name="bf16")  # two steps
    num_tiles = (2 * SIZE // 64) * (9 * TOP_K) * 2
    for wanted, got, num_counters in ((1, 1, num_tiles), (2, 2, num_tiles), (5, 2, num_tiles), (2, 1, num_tiles - 1)):
        monkeypatch.setattr(launch, "MAX_COUNTERS", num_counters)
        started.clear()
        run(replace(DIRECT, split_k=1, split_k_1=wanted), 9, info)
        (grid, first), (_, second) = started
        assert grid == (2 * SIZE // 64, 9 * TOP_K, 2 * got)
        assert (first["SPLIT_K"], second["SPLIT_K"]) == (got, 1)
        assert second["parts_ptr"] is second["arrived_ptr"] is None
        if got == 1:
            assert first["parts_ptr"] is first["arrived_ptr"] is None
        else:
            assert first["parts_ptr"].shape == (9 * TOP_K, got, 2 * SIZE)
            assert first["arrived_ptr"] is info.layer.arrived


def test_layers_of_a_device_share_counters_with_nothing_else() -> None:
    infos = [info_of(PlanTable(((None, GROUPED),))) for _ in range(2)]
    assert infos[0].layer.arrived is infos[1].layer.arrived
    assert infos[0].layer.arrived is not counters(torch.device("cpu"), "fp8 linear")


def test_one_rank_of_a_sum_adds_the_bias_of_the_second_matrix(launches: list[Launch]) -> None:
    for tp_rank, has_bias in ((0, [True, True]), (1, [True, False])):
        info = info_of(PlanTable(((None, GROUPED),)), bias=True, tp_size=2, tp_rank=tp_rank)
        launches.clear()
        run(DIRECT, 5, info)
        assert [keywords["HAS_BIAS"] for name, keywords in launches if name == "direct_gemm"] == has_bias


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


def test_offsets_are_wide_only_where_32_bits_are_too_few(launches: list[Launch]) -> None:
    run(GROUPED, 4096)
    run(GROUPED, 2**31 // (SIZE * TOP_K))
    run(GROUPED, 9, stride=2**28)
    wide = [keywords["WIDE"] for name, keywords in launches if name == "grouped_gemm"]
    assert wide == [False, False, True, True, True, False]


def test_masked_rows_take_the_grouped_plan_for_as_many_tokens_as_are_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [Plan(is_direct=False, block_m=block_m, block_n_1=64, block_n_2=64) for block_m in (16, 32, 64)]
    table = PlanTable(((100, DIRECT), (11, plans[0]), (12, plans[1]), (None, plans[2])))
    runner = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.DEEPEP, config_of())
    info = info_of(table, a2a=MoeA2ABackend.DEEPEP)
    taken: list[Plan] = []
    most: list[int] = []

    def take(x: Any, ids: Any, weights: Any, layer: Any, plan: Plan, out: Any, *, max_rows: int) -> None:
        taken.append(plan)
        most.append(max_rows)

    monkeypatch.setattr(launch, "run_layer", take)
    x = torch.zeros(NUM_EXPERTS, 32, SIZE, dtype=torch.bfloat16)
    empty = torch.empty(0, TOP_K)
    counts = torch.full((NUM_EXPERTS,), 6, dtype=torch.int32)
    for max_rows in (None, 40):
        runner.run(DeepepLlDispatchOutput(x, None, empty.long(), empty, counts, 6, max_rows), info)
    assert taken == [plans[1]] * 2, "6 rows an expert, 4 experts, 2 of them a token: 12 tokens"
    assert most == [NUM_EXPERTS * 32, 40]


@rows("max_rows, num_tiles", (None, 260), (4096, 260), (48, 7))
def test_masked_rows_are_written_by_the_second_gemm_in_no_more_tiles_than_can_have_rows(
    monkeypatch: pytest.MonkeyPatch, max_rows: int | None, num_tiles: int
) -> None:
    """Few of the slots that low latency reserves are ever used: grids and copies of all of them cost most of the time.

    Four experts with 48 rows among them fill at most 7 tiles of 16: three full ones, and a short one for each expert.
    """
    grids: list[tuple[str, int]] = []
    outs: list[torch.Tensor] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append((self.name, grid[0]))
            return lambda *arguments, **keywords: outs.extend(arguments[7:8])  # the GEMMs' out_ptr

    for name in KERNELS:
        monkeypatch.setattr(launch, name, Recorder(name))
    runner = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.DEEPEP, config_of())
    info = info_of(PlanTable(((None, GROUPED),)), a2a=MoeA2ABackend.DEEPEP)
    x = torch.zeros(NUM_EXPERTS, 1024, 192, dtype=torch.bfloat16)[..., :SIZE]
    empty = torch.empty(0, TOP_K)
    counts = torch.full((NUM_EXPERTS,), 6, dtype=torch.int32)
    result = runner.run(DeepepLlDispatchOutput(x, None, empty.long(), empty, counts, 6, max_rows), info)
    num_n = {"first": 2 * SIZE // 64, "second": SIZE // 64}
    assert grids == [
        ("group_slots", NUM_EXPERTS),
        ("grouped_gemm", num_n["first"] * num_tiles),
        ("grouped_gemm", num_n["second"] * num_tiles),
    ]
    assert outs[-1].data_ptr() == result.hidden_states.data_ptr()
    assert result.hidden_states.stride() == x.stride()
