"""FlashInfer's latent attention on a card: against torch in fp32, replayed with other lengths, and in an engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.bench_attention import LATENT, PAGE_SIZE, TOLERANCE, Case, Inputs
from engine.config import EngineConfig
from engine.core import EngineCore
from model.attention.base import Attention, AttentionSpec, make_attention
from model.attention.flashinfer import FlashInferPlan
from model.batch import ForwardBatch, LayerKv
from tests.engine.requests import request, run_all, tokens_of
from tests.gpu.common import no_waiting
from tests.model import checkpoints

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 1000, 4097, 9000)
CASES = (
    Case("decodes of all lengths", (1,) * len(LENGTHS), LENGTHS),
    Case("one long decode", (1,), (9000,)),
    Case("prompts of all lengths", LENGTHS[:13], LENGTHS[:13]),
    Case("chunks and decodes", (1, 300, 1, 17, 2, 1, 129), (4000, 4000, 128, 17, 130, 1, 1000)),
    Case("a chunk late in a long prompt", (500,), (9000,)),
)
NUM_REQUESTS, NUM_TOKENS = 24, 8
MOST_KEYS = 9008  # whole pages, so that all hold numbers
HEADS = (128, 64, 16, 8)  # DeepSeek-V3's, whole and as ranks share them


def worst_error(
    spec: AttentionSpec, batch: ForwardBatch, kv: LayerKv, q_THD: torch.Tensor, k_T1D: torch.Tensor,
    got_THV: torch.Tensor,
) -> float:  # fmt: skip
    """Relative, of the token that is worst, against torch in fp32; infinite for NaN."""
    torch_attention = make_attention("torch", [spec], DEVICE)
    exact = LayerKv(kv.keys.float(), kv.values)
    want_THV = torch_attention.run(
        spec, torch_attention.plan(batch), exact, q_THD.float(), k_T1D.float(), None, None
    )  # fmt: skip
    error_T = (got_THV.float() - want_THV).flatten(1).norm(dim=1) / want_THV.flatten(1).norm(dim=1)
    return float(error_T.nan_to_num(float("inf")).max())


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flashinfer_equals_torch(case: Case, num_heads: int) -> None:
    """Unused slots hold NaN, and pages are shuffled."""
    spec = replace(LATENT, num_heads=num_heads)
    inputs = Inputs(case, spec, seed=len(case.name))
    attention, kv = make_attention("flashinfer", [spec], DEVICE), inputs.caches[0]
    plan = attention.plan(inputs.batch)
    assert isinstance(plan, FlashInferPlan)
    got_THV = attention.run(spec, plan, kv, inputs.q, inputs.k, None, None)
    assert worst_error(spec, inputs.batch, kv, inputs.q, inputs.k, got_THV) < 2 * TOLERANCE


class Captured:
    """A captured step of one layer over buffers that stay, for rows of up to `MOST_KEYS` keys."""

    def __init__(self, attention: Attention, query_lens: tuple[int, ...], seed: int) -> None:
        self.attention = attention
        num_rows, num_tokens = len(query_lens), sum(query_lens)
        # The last row's first page is the spare one: rows and tokens without a request use it.
        self.inputs = Inputs(Case("all", query_lens, (MOST_KEYS,) * num_rows), LATENT, seed)
        self.table_BP = self.inputs.batch.page_table_BP.clone()
        self.kv = self.inputs.caches[0]
        self.spare = int(self.table_BP[-1, 0])
        buffers = self.inputs.batch
        buffers.page_table_BP.fill_(self.spare)
        buffers.slots_T.fill_(self.spare * PAGE_SIZE)
        buffers.seq_lens_B.fill_(1)
        self.plan = attention.plan_for_graph(buffers)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out_THV = self._run()
        self.num_tokens = num_tokens

    def _run(self) -> torch.Tensor:
        inputs = self.inputs
        return self.attention.run(LATENT, self.plan, self.kv, inputs.q, inputs.k, None, None)

    def replay(self, case: Case, padding: tuple[tuple[int, ...], tuple[int, ...]]) -> float:
        """The error of the live tokens of this step; `padding`: query and sequence lengths of rows without a request.

        Each time its requests have other pages.
        """
        num_rows, num_live, buffers = len(case.query_lens), sum(case.query_lens), self.inputs.batch
        self.table_BP[:-1] = (
            self.table_BP[:-1].flatten()[torch.randperm(self.table_BP[:-1].numel())].view_as(self.table_BP[:-1])
        )
        rows_T, positions_T = [], []
        for row, (query_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
            rows_T += [row] * query_len
            positions_T += range(seq_len - query_len, seq_len)
        rows, positions = (torch.tensor(numbers, device=DEVICE) for numbers in (rows_T, positions_T))
        slots_T = self.table_BP[rows, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
        starts = torch.tensor([0, *case.query_lens], device=DEVICE).cumsum(0).int()
        live = replace(
            buffers, input_ids_T=buffers.input_ids_T[:num_live], slots_T=slots_T, query_start_B1=starts,
            seq_lens_B=torch.tensor(case.seq_lens, dtype=torch.int32, device=DEVICE), positions_T=positions,
            page_table_BP=self.table_BP[:num_rows].clone(), query_lens=case.query_lens, seq_lens=case.seq_lens,
        )  # fmt: skip
        with no_waiting():
            buffers.slots_T.fill_(self.spare * PAGE_SIZE)
            buffers.slots_T[:num_live].copy_(slots_T)
            buffers.page_table_BP[:num_rows].copy_(live.page_table_BP)
            self.attention.update_plan(self.plan, case.query_lens + padding[0], case.seq_lens + padding[1])
            self.out_THV.fill_(float("nan"))
            self.graph.replay()
        q_THD, k_T1D = self.inputs.q[:num_live], self.inputs.k[:num_live]
        return worst_error(LATENT, live, self.kv, q_THD, k_T1D, self.out_THV[:num_live])


def test_captured_decodes_follow_lengths_and_pages_without_waiting() -> None:
    """Two sizes take turns; one has rows without a request."""
    attention = make_attention("flashinfer", [LATENT], DEVICE)
    large, small = Captured(attention, (1,) * 17, 1), Captured(attention, (1,) * 4, 2)
    for lengths in (LENGTHS, LENGTHS[::-1], (1,) * 15, (9000,) * 15, LENGTHS):
        assert large.replay(Case("", (1,) * 15, lengths), ((1, 1), (1, 1))) < 2 * TOLERANCE
        assert small.replay(Case("", (1,) * 3, lengths[5:8]), ((1,), (1,))) < 2 * TOLERANCE


def test_captured_steps_with_prompts_follow_how_tokens_are_divided() -> None:
    """The tokens that a step lacks are a row of their own, and further rows have none."""
    captured = Captured(make_attention("flashinfer", [LATENT], DEVICE), (249, *(1,) * 7), 3)
    steps = (
        (Case("", (100, 20, 1), (100, 4000, 9000)), ((135, 0, 0, 0, 0), (135, 1, 1, 1, 1))),
        (Case("", (1, 1, 200, 17, 1), (17, 9000, 5000, 17, 1)), ((36, 0, 0), (36, 1, 1))),
        (Case("", (256,), (300,)), ((0,) * 7, (1,) * 7)),
        (Case("", (1,) * 7, LENGTHS[-7:]), ((249,), (249,))),
    )
    for case, padding in steps:
        assert captured.replay(case, padding) < 2 * TOLERANCE


def chosen_tokens(folder: Path, attention: str, *, is_eager: bool) -> list[list[int]]:
    """Of requests with prompts of 1 to 139 tokens, whose steps mix prompts and decodes."""
    config = EngineConfig(
        model=folder, device="cuda", attention_backend=attention, moe_backend="triton", num_pages=512,
        max_model_len=256, max_num_seqs=NUM_REQUESTS, enforce_eager=is_eager,
    )  # fmt: skip
    core = EngineCore(config)
    assert core._runner.model.attention.name == attention
    prompts = [[(7 * n + 3 * i * i) % checkpoints.VOCAB for i in range(1 + 6 * n)] for n in range(NUM_REQUESTS)]
    answers = run_all(core, [request(str(n), prompt, NUM_TOKENS, ignore_eos=True) for n, prompt in enumerate(prompts)])
    return [tokens_of(answers[str(n)]) for n in range(NUM_REQUESTS)]


def test_an_engine_chooses_the_tokens_of_the_triton_kernels(tmp_path: Path) -> None:
    """Here and there another token may come, since bf16 sums differ and experts change with a last bit."""
    model = checkpoints.make_deepseek(
        kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=16, num_key_value_heads=16, hidden_size=256,
        moe_intermediate_size=128,
    )  # fmt: skip
    checkpoints.write(tmp_path, checkpoints.state_by_file_name(model, tmp_path))
    want = chosen_tokens(tmp_path, "triton", is_eager=False)
    for is_eager in (True, False):
        got = chosen_tokens(tmp_path, "flashinfer", is_eager=is_eager)
        assert sum(a[0] == b[0] for a, b in zip(got, want, strict=True)) >= 0.9 * NUM_REQUESTS
        same = sum(x == y for a, b in zip(got, want, strict=True) for x, y in zip(a, b, strict=True))
        assert same >= 0.7 * NUM_REQUESTS * NUM_TOKENS, (
            "a request keeps its first token and later ones, until one differs"
        )
