"""Every MoE layer goes through one `MoeRunner`, once per forward pass, and is checked while loading."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model import moe_layer
from model.config import ModelSettings
from model.linear import GatedMlp, Linear
from model.moe_layer import Gate, MoeLayer
from model.registry import build_model
from moe import MoeBackend, MoeRunner, RoutingConfig, RoutingMethod, SelfCheckError, StandardCombineInput
from moe.config import DispatchDtype, DispatchFormat
from moe.dispatch.deepep import DeepepDispatcher
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
from moe.dispatch.standard import StandardDispatcher
from moe.routing import BypassedTopK, StandardTopK
from tests.model.checkpoints import VOCAB, make_deepseek, make_gpt_oss, pack_mxfp4, state_by_file_name, write
from tests.model.paged import PagedCache, run
from tests.tables import rows

PUBLISHED = {
    "gpt_oss": (make_gpt_oss, {"quant_method": "mxfp4"}, 2),
    "deepseek": (make_deepseek, {"quant_method": "fp8", "weight_block_size": [128, 128]}, 2),
    "deepseek_nvfp4": (make_deepseek, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 2),
    "deepseek_fp8_tensor": (make_deepseek, {"quant_method": "modelopt", "quant_algo": "FP8"}, 2),
    "deepseek_mxfp4": (make_deepseek, {"quant_method": "quark", "exclude": ["*self_attn*"]}, 2),
    "deepseek_plain": (make_deepseek, None, 2),
    "gpt_oss_plain": (make_gpt_oss, None, 2),
}


def dummy_model(folder: Path, kind: str) -> Any:
    """No weights on disk: config.json alone."""
    make, quantization, _ = PUBLISHED[kind]
    make().config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": [make().__class__.__name__]}
    path.write_text(json.dumps(config | ({"quantization_config": quantization} if quantization else {})))
    return build_model(folder, ModelSettings(load_format="dummy", selfcheck="all"))


@rows("kind", *PUBLISHED)
def test_one_run_per_moe_layer_and_nobody_else_computes_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = dummy_model(tmp_path, kind)
    cache = PagedCache(model.kv_specs)
    calls = []

    def zeros(self: MoeRunner, dispatched: Any, quant_info: Any) -> StandardCombineInput:
        calls.append((self, quant_info))
        return StandardCombineInput(torch.zeros_like(dispatched.hidden_states))

    logits = run(model, cache.batch({"a": [1, 2, 3]}), cache.layers)
    assert logits.shape == (1, VOCAB)
    assert logits.isfinite().all()
    monkeypatch.setattr(MoeRunner, "run", zeros)
    run(model, cache.batch({"b": [1, 2, 3], "c": [5]}), cache.layers)
    assert [runner for runner, _ in calls] == [layer.runner for layer in model.moe_layers]
    assert len({id(info) for _, info in calls}) == PUBLISHED[kind][2]

    # With the runner silenced, a MoE layer adds its shared experts and nothing else.
    x = torch.randn(3, model.embedding.weight.shape[1])
    for layer in model.moe_layers:
        want = torch.zeros_like(x) if layer.shared_experts is None else layer.shared_experts(x)
        torch.testing.assert_close(layer(x), want)


CORRECTION_BIAS = torch.tensor([0.0, 9.0, 0.0, 0.0])


def make_layer(
    routes_inside: bool,
    seen: list[Any],
    out_dtype: torch.dtype = torch.float32,
    weight: torch.Tensor | None = None,
    correction_bias: torch.Tensor | None = CORRECTION_BIAS,
) -> MoeLayer:
    class Recorder:
        dispatch_formats = (DispatchFormat.STANDARD,)

        def run(self, dispatched: Any, quant_info: Any) -> StandardCombineInput:
            seen.append((dispatched.topk_output, quant_info))
            return StandardCombineInput(dispatched.hidden_states * 10)

    g = torch.Generator().manual_seed(0)
    routing = RoutingConfig(
        method=RoutingMethod.SIGMOID_GROUPED, num_experts=4, top_k=2, routed_scaling_factor=2.5
    )  # fmt: skip
    return MoeLayer(
        gate=Gate(torch.randn(4, 6, generator=g) if weight is None else weight, None, out_dtype),
        routing=routing,
        routes_inside=routes_inside,
        correction_bias_E=correction_bias,
        dispatcher=StandardDispatcher(),
        runner=Recorder(),  # type: ignore[arg-type]
        quant_info="weights",
        shared_experts=GatedMlp(*(torch.randn(shape, generator=g) for shape in ((3, 6), (3, 6), (6, 3)))),
        description="layer 0",
    )


@rows("is_decode", False, True)
def test_routing_is_scaled_once_and_shared_experts_not_at_all(is_decode: bool) -> None:
    """Section G: shared experts are added in decode, too."""
    seen: list[Any] = []
    layer = make_layer(False, seen)
    x = torch.randn(5, 6)
    out = layer(x, is_decode=is_decode)
    ((topk, quant_info),) = seen
    assert quant_info == "weights"
    assert isinstance(topk, StandardTopK)
    assert (topk.ids == 1).any(dim=1).all()  # the correction bias chose it
    torch.testing.assert_close(topk.weights.sum(1), torch.full((5,), 2.5))
    torch.testing.assert_close(out, x * 10 + layer.shared_experts(x))  # type: ignore[misc]


def test_a_backend_that_routes_inside_gets_logits_in_the_dtype_it_wants() -> None:
    seen: list[Any] = []
    make_layer(True, seen, torch.bfloat16)(torch.randn(5, 6))
    ((topk, _),) = seen
    assert isinstance(topk, BypassedTopK)
    assert topk.logits.dtype == torch.bfloat16
    assert topk.correction_bias.dtype == torch.float32


class FakeRouter:
    """Stands for `moe.kernels.router` on a GPU; sends every token to the experts 0 and 3, or 1 and 3 if corrected."""

    def route(
        self, x: torch.Tensor, weight: torch.Tensor, bias: Any, config: RoutingConfig, correction: torch.Tensor | None,
        *, logits_dtype: torch.dtype, **counting: Any,
    ) -> StandardTopK:  # fmt: skip
        assert weight.dtype == torch.bfloat16
        assert logits_dtype == torch.float32
        ids = torch.tensor([[0 if correction is None else 1, 3]], dtype=torch.int32).expand(len(x), 2)
        return StandardTopK(torch.full((len(x), 2), 0.5), ids)


def test_the_fused_router_is_for_bf16_tokens_and_gets_the_correction_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_layer, "fused_router", lambda gate, topk: FakeRouter())
    weight = torch.full((4, 6), 0.5)
    x = torch.ones(5, 6)

    def ids(layer: MoeLayer, tokens: torch.Tensor) -> Any:
        routed = layer._route(tokens)
        assert isinstance(routed, StandardTopK)
        return routed.ids.tolist()

    fused = make_layer(False, [], weight=weight, correction_bias=None)
    assert ids(fused, x.bfloat16()) == [[0, 3]] * 5
    assert ids(fused, x) == [[0, 1]] * 5, "products of fp32 tokens need fp32 weights"
    corrected = make_layer(False, [], weight=weight)
    assert ids(corrected, x.bfloat16()) == [[1, 3]] * 5
    assert ids(corrected, x) == [[1, 0]] * 5
    inside = make_layer(True, [], weight=weight, correction_bias=None)
    assert isinstance(inside._route(x.bfloat16()), BypassedTopK)
    assert inside.gate.weight_bf16 is None, "a second copy of the weights that nobody reads"


def test_a_layer_can_be_captured_if_its_backend_and_its_transport_can() -> None:
    layer = make_layer(False, [])
    layer.runner = SimpleNamespace(backend=MoeBackend.TORCH)  # type: ignore[assignment]
    assert layer.why_not_capturable(8) == "MoE layer 0"
    layer.runner = SimpleNamespace(backend=MoeBackend.TRITON)  # type: ignore[assignment]
    assert layer.why_not_capturable(8) is None
    buffer = SimpleNamespace(settings=DeepepSettings(mode=DeepepMode.LOW_LATENCY, max_dispatch_tokens=8))
    layer.dispatcher = DeepepDispatcher(buffer, DispatchDtype.BF16)  # type: ignore[arg-type]
    assert layer.why_not_capturable(8) is None
    reason = layer.why_not_capturable(9)
    assert reason is not None
    assert "--deepep-max-dispatch-tokens is 8" in reason


def test_a_model_says_which_part_cannot_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dummy_model(tmp_path, "gpt_oss")
    assert model.why_not_capturable(8) == "attention backend torch"
    monkeypatch.setattr(type(model.attention), "is_capturable", True)
    assert model.why_not_capturable(8) == f"MoE {model.moe_layers[0].description}"
    monkeypatch.setattr(MoeLayer, "why_not_capturable", lambda self, max_num_tokens: None)
    assert model.why_not_capturable(8) is None


def test_experts_that_fail_give_their_batch_up() -> None:
    """F1: between dispatch and combine nothing may be left behind, and the first error is the one to see."""
    layer = make_layer(False, [])
    given_up: list[Any] = []

    def fail(dispatched: Any, quant_info: Any) -> Any:
        raise RuntimeError("no memory")

    def give_up(dispatched: Any, dtype: torch.dtype) -> None:
        given_up.append((dispatched.hidden_states, dtype))
        raise RuntimeError("the transport is broken too")

    layer.runner = SimpleNamespace(  # type: ignore[assignment]
        run=fail, dispatch_formats=(DispatchFormat.STANDARD,), config=SimpleNamespace(dtype=torch.bfloat16)
    )
    layer.dispatcher.abandon = give_up  # type: ignore[method-assign]
    x = torch.randn(5, 6)
    with pytest.raises(RuntimeError, match="no memory"):
        layer(x)
    ((rows, dtype),) = given_up
    assert rows is x
    assert dtype is torch.bfloat16


def test_gate_accumulates_in_fp32() -> None:
    weight = torch.full((1, 4096), 1.0)
    x = torch.full((1, 4096), 1.0 + 2**-7, dtype=torch.bfloat16)
    x[0, 0] = 2**-7
    logits = Gate(weight.bfloat16(), torch.tensor([0.25]), torch.float32)(x)
    assert logits.item() == 4095 * (1 + 2**-7) + 2**-7 + 0.25


@rows("has_bias", False, True)
@rows("num_tokens", 1, 2, 33)
def test_a_bf16_gate_multiplies_bf16_sums_in_fp32_and_rounds_once(num_tokens: int, has_bias: bool) -> None:
    """Sums of integers are exact in fp32; in bf16 they would stick at 256."""
    g = torch.Generator().manual_seed(num_tokens)
    x = torch.randint(-2, 3, (num_tokens, 2880), generator=g).bfloat16()
    weight, bias = torch.randint(-60, 61, (32, 2880), generator=g).float(), torch.randint(-2, 3, (32,), generator=g)
    gate = Gate(weight, bias if has_bias else None, torch.bfloat16)
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    assert (want.abs() > 256).any()
    assert torch.equal(gate(x), want.bfloat16())
    assert torch.equal(gate(x.float()), want.bfloat16()), "tokens in fp32, as on a CPU, are rounded first"


@rows("device", "cpu", "cuda")
def test_the_gemm_of_bf16_logits_reads_bf16(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Half the bytes of the weights, at the rate of bf16; cuBLAS is asked for an fp32 result to round."""
    gate = Gate(torch.randn(4, 8), torch.ones(4), torch.bfloat16)
    assert gate.weight.dtype is torch.bfloat16
    seen: list[Any] = []

    def mm(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((x.dtype, weight.dtype, options))
        return x.float() @ weight.float()

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        seen.append((x.dtype, weight.dtype, {}))
        return (x.float() @ weight.float().T + bias.float()).bfloat16()

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(moe_layer.F, "linear", linear)
    monkeypatch.setattr(moe_layer, "is_on_gpu", lambda tensor: device == "cuda")
    x = torch.randn(3, 8)
    logits = gate(x)
    want = x.bfloat16().float() @ gate.weight.float().T + 1
    assert torch.equal(logits, want.bfloat16())
    options = {"out_dtype": torch.float32} if device == "cuda" else {}
    assert seen == [(torch.bfloat16, torch.bfloat16, options)]


def test_corrupted_preparation_fails_the_self_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, _ = pack_mxfp4(state_by_file_name(make_gpt_oss(), tmp_path))
    write(tmp_path, tensors, {"quantization_config": {"quant_method": "mxfp4"}})
    from moe.backends.torch.backend import TorchBackend

    prepare, layers = TorchBackend.prepare, []

    def swap_halves_of_layer_1(self: Any, experts: Any, config: Any, topology: Any) -> Any:
        layers.append(experts)
        if len(layers) == 2:
            half = experts.intermediate_size
            rows = torch.cat((torch.arange(half, 2 * half), torch.arange(half)))
            w13 = type(experts.w13)(experts.w13.codes[:, rows], experts.w13.scales[:, rows])
            experts = type(experts)(w13=w13, w2=experts.w2, b13=experts.b13, b2=experts.b2)
        return prepare(self, experts, config, topology)

    monkeypatch.setattr(TorchBackend, "prepare", swap_halves_of_layer_1)
    settings = ModelSettings(moe_backend=MoeBackend.TORCH, selfcheck="all")
    with pytest.raises(SelfCheckError, match="layer 1"):
        build_model(tmp_path, settings)
    for selfcheck in ("first", "off"):  # layer 0 is fine, so these let it pass
        layers.clear()
        build_model(tmp_path, ModelSettings(selfcheck=selfcheck))  # type: ignore[arg-type]


def test_linear_is_row_major_at_every_row_count() -> None:
    weight, bias = torch.randn(24, 16), torch.randn(24)
    for dense in (weight, weight.bfloat16().float()):
        linear = Linear(dense, bias)
        for num_rows in (0, 1, 2, 3, 6, 40):
            x = torch.randn(num_rows, 16)
            out = linear(x)
            assert out.is_contiguous()
            torch.testing.assert_close(out, x @ dense.T + bias, rtol=1e-4, atol=1e-5)
