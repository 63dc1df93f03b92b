"""The triton backend on a card behind DeepEP's layouts, low latency (masked) and normal, against the twin."""

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeRunner, StandardTopK, Topology
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.check.reference import reference_moe
from moe.check.selfcheck import check_layer
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight, Weight
from moe.types import DeepepLlDispatchOutput, DeepepNormalDispatchOutput
from tests.gpu.common import DEVICE, FP8_PLAN, GPT_OSS, TOP_K, WEIGHT_ONLY, experts_of, own_part, relative_error
from tests.moe.configs import rank_config

pytestmark = pytest.mark.gpu
NUM_EXPERTS, NUM_LOCAL, EP_RANK = 16, 8, 1
FIRST = EP_RANK * NUM_LOCAL
KINDS = (Mxfp4Weight, Bf16Weight, Fp8BlockWeight, Nvfp4Weight)
SIZES = ((2880, 1440), (384, 288))
# rows of each local expert, of at most 64: one full, one empty, single rows, and counts on either side of a tile
COUNTS = ((64, 0, 1, 3, 16, 17, 33, 2), (0, 0, 0, 1, 0, 0, 0, 0), (64,) * 8, (0,) * 8)
MAX_ROWS, PADDING = 64, 192
MOST_ROWS = max(map(sum, COUNTS))


def make_layer(
    kind: type[Weight], hidden: int, inter: int
) -> tuple[MoeRunner, TritonMoeQuantInfo, ExpertWeights, Topology]:
    part, topology = own_part(experts_of(kind, NUM_EXPERTS, hidden, inter, True), NUM_EXPERTS // NUM_LOCAL, EP_RANK)
    topology = Topology(device=DEVICE, ep_size=topology.ep_size, ep_rank=topology.ep_rank, a2a=MoeA2ABackend.DEEPEP)
    config = rank_config(
        num_experts=NUM_EXPERTS, hidden_size=hidden, intermediate_size=inter, top_k=TOP_K, activation=GPT_OSS,
        place=topology,
    )  # fmt: skip
    info = TritonBackend().prepare(part, config, topology)
    return MoeRunner(MoeBackend.TRITON, MoeA2ABackend.DEEPEP, config), info, part, topology


def masked_input(counts: tuple[int, ...], hidden: int) -> tuple[DeepepLlDispatchOutput, torch.Tensor]:
    """Received rows, NaN from each expert's count on, and which rows are real [E, M]; padded as DeepEP pads 2880."""
    g = torch.Generator(DEVICE).manual_seed(sum(counts))
    x = (torch.randn(NUM_LOCAL, MAX_ROWS, hidden + PADDING, device=DEVICE, generator=g) * 5).bfloat16()[..., :hidden]
    masked_m = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    is_row = torch.arange(MAX_ROWS, device=DEVICE) < masked_m[:, None]
    x[~is_row] = float("nan")
    senders = torch.zeros(2, TOP_K, dtype=torch.int64, device=DEVICE)  # says nothing of these rows
    return DeepepLlDispatchOutput(x, None, senders, senders.float(), masked_m, 4, MOST_ROWS), is_row


def want_masked(x: torch.Tensor, is_row: torch.Tensor, part: ExpertWeights) -> torch.Tensor:
    """The twin on the real rows, each a token with one expert of weight one."""
    ids = torch.arange(FIRST, FIRST + NUM_LOCAL, device=DEVICE)[:, None].expand_as(is_row)[is_row][:, None].int()
    return reference_moe(x[is_row], StandardTopK(torch.ones_like(ids).float(), ids), part, GPT_OSS, first_expert=FIRST)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inter"), SIZES)
def test_masked_rows(kind: type[Weight], hidden: int, inter: int) -> None:
    runner, info, part, _ = make_layer(kind, hidden, inter)
    for counts in COUNTS:
        dispatched, is_row = masked_input(counts, hidden)
        got = runner.run(dispatched, info).hidden_states
        assert got.shape == dispatched.hidden_states.shape
        assert got.stride() == dispatched.hidden_states.stride(), "else the transport copies them"
        if sum(counts):
            assert relative_error(got[is_row], want_masked(dispatched.hidden_states, is_row, part)) < WEIGHT_ONLY


def test_a_graph_follows_the_counts_of_each_replay() -> None:
    """The host never learns the counts: one captured graph serves them all, with the bits of an eager call."""
    runner, info, _, _ = make_layer(Mxfp4Weight, 384, 288)
    static, _ = masked_input(COUNTS[0], 384)
    runner.run(static, info)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = runner.run(static, info).hidden_states
    for counts in COUNTS:
        dispatched, is_row = masked_input(counts, 384)
        static.hidden_states.copy_(dispatched.hidden_states)
        static.masked_m.copy_(dispatched.masked_m)
        inside.fill_(float("nan"))
        graph.replay()
        assert torch.equal(inside[is_row], runner.run(dispatched, info).hidden_states[is_row])
        assert inside[~is_row].isnan().all(), "rows beyond a count are not written"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inter"), SIZES)
def test_normal_rows(kind: type[Weight], hidden: int, inter: int) -> None:
    """Each received token once, with local ids and -1 for the experts of other ranks; the sum is weighted."""
    runner, info, part, _ = make_layer(kind, hidden, inter)
    for num_tokens in (0, 1, 3, 17, 200):
        g = torch.Generator(DEVICE).manual_seed(num_tokens)
        x = (torch.randn(num_tokens, hidden, device=DEVICE, generator=g) * 5).bfloat16()
        global_ids = torch.rand(num_tokens, NUM_EXPERTS, device=DEVICE, generator=g).argsort(1)[:, :TOP_K]
        global_ids[:, 0] = FIRST + global_ids[:, 0] % NUM_LOCAL  # a token is received where it has an expert
        global_ids[:, 1:][global_ids[:, 1:] == global_ids[:, :1]] = -1
        local_ids = torch.where(global_ids >= FIRST, global_ids - FIRST, -1)
        weights = torch.rand(num_tokens, TOP_K, device=DEVICE, generator=g)
        counts = [int((local_ids == expert).sum()) for expert in range(NUM_LOCAL)]
        got = runner.run(DeepepNormalDispatchOutput(x, None, local_ids, weights, counts), info).hidden_states
        assert got.shape == x.shape
        if num_tokens:
            want = reference_moe(x, StandardTopK(weights, global_ids.int()), part, GPT_OSS, first_expert=FIRST)
            is_fp8 = info.plans.pick(num_tokens).fp8_activations
            assert relative_error(got, want) < (FP8_PLAN if is_fp8 else WEIGHT_ONLY), num_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_self_check_passes_in_both_modes(kind: type[Weight]) -> None:
    runner, info, part, topology = make_layer(kind, 2880, 1440)
    assert len(runner.dispatch_formats) == 2
    report = check_layer(runner, info, part, layer=0, topology=topology)
    assert 0 < report.worst_error <= report.tolerance
