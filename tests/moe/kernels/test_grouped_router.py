"""The router kernel with DeepSeek-V3's rules: numbers in the interpreter, machine code, and a card against torch."""

from dataclasses import replace

import pytest
import torch

from moe.config import RoutingConfig, RoutingMethod
from moe.kernels import router
from moe.routing import route
from tests.interpreter import RunInterpreted, waits_for_interpreter
from tests.moe.kernels.compiling import compile_kernel
from tests.tables import rows

DEEPSEEK = RoutingConfig(
    method=RoutingMethod.SIGMOID_GROUPED, num_experts=256, top_k=8, num_groups=8, num_kept_groups=4,
    routed_scaling_factor=2.5,
)  # fmt: skip


@waits_for_interpreter
def test_numbers_in_the_interpreter(run_interpreted: RunInterpreted) -> None:
    errors = run_interpreted("tests.moe.kernels.interpreted_grouped_router")
    assert len(errors) == 12
    assert {case: error for case, error in errors.items() if not error < 2e-6} == {}


@rows(
    "arch, num_experts, is_split, counts",
    (80, 256, True, True), (90, 64, True, False), (90, 256, False, True), (120, 256, False, False),
)  # fmt: skip
def test_it_compiles(arch: int, num_experts: int, is_split: bool, counts: bool) -> None:
    pointers = dict.fromkeys(("x_ptr", "weight_ptr"), "*bf16") | {"arrived_ptr": "*i32", "ids_ptr": "*i32"}
    pointers |= dict.fromkeys(("bias_ptr", "correction_ptr", "parts_ptr", "weights_ptr"), "*fp32")
    pointers |= {"counts_ptr": "*i64", "table_ptr": "*i32", "live_ptr": "*i32"}
    tile = router._TILE if num_experts == 64 else router._WIDE_TILE
    constants = {
        "H": 7168, "E": num_experts, "E_PAD": num_experts, "K": 8, "K_PAD": 8, "G": 8, "KEPT": 4,
        "BLOCK_T": 16 if is_split else tile.many_tokens, "BLOCK_H": tile.block_h, "IS_SIGMOID": True,
        "NORMALIZE": True, "HAS_BIAS": False, "HAS_CORRECTION": True, "ROUND_TO_BF16": False,
        **dict.fromkeys(("COUNTS", "HAS_LIVE", "PLACES"), counts), "MAX_PARTS": 16 if is_split else 1,
        "CHOSEN_T": 4 if is_split else tile.many_tokens, "STARTS_NEXT": True, "USE_PDL": arch >= 90, "INTERPRET": False,
    }  # fmt: skip
    kernel = compile_kernel(
        router._route, arch, pointers, constants, num_warps=tile.num_warps, num_stages=tile.num_stages
    )
    assert kernel.metadata.shared <= 99 * 1024
    assert "cubin" in kernel.asm


@rows(
    "config, can",
    (DEEPSEEK, True),
    (replace(DEEPSEEK, num_experts=64), True),
    (replace(DEEPSEEK, num_experts=160), False),  # groups of 20
    (replace(DEEPSEEK, num_experts=8, top_k=4), False),  # groups of one have no second best
    (replace(DEEPSEEK, num_experts=512), False),
    (replace(DEEPSEEK, num_experts=160, num_groups=1, num_kept_groups=1), True),
    (replace(DEEPSEEK, method=RoutingMethod.SQRT_SOFTPLUS), False),
)
def test_it_says_which_rules_it_serves(config: RoutingConfig, can: bool) -> None:
    assert router.can_route(config) == can


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 500, 1025])
@pytest.mark.parametrize("num_experts", [64, 256])
def test_a_card_chooses_as_torch_does(num_experts: int, num_tokens: int) -> None:
    """Ids may differ where a rank or a group's sum is that of another but for rounding."""
    config = replace(DEEPSEEK, num_experts=num_experts)
    g = torch.Generator("cuda").manual_seed(num_tokens)
    x = torch.randn(num_tokens, 7168, device="cuda", generator=g).bfloat16()
    weight = (torch.randn(num_experts, 7168, device="cuda", generator=g) * 0.02).bfloat16()
    correction = torch.randn(num_experts, device="cuda", generator=g)
    got = router.route(x, weight, None, config, correction)
    want = route(torch.nn.functional.linear(x.double(), weight.double()), config, correction)
    same_T = (got.ids == want.ids).all(dim=1)
    assert same_T.double().mean() > 0.99
    assert (got.weights - want.weights)[same_T].abs().max() < 1e-4
    again = router.route(x, weight, None, config, correction)
    assert torch.equal(again.ids, got.ids)
    assert torch.equal(again.weights, got.weights)
