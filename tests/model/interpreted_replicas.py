"""`moe.kernels.replicas` and the router that does the same, compared with `moe.replicas`; prints the faults as JSON."""

import json

import torch

from moe.config import RoutingConfig, RoutingMethod
from moe.kernels import replicas, router
from moe.placement import plan_placement
from moe.replicas import ExpertTables, count_and_place, slot_table
from moe.routing import StandardTopK, drop_padding, route

G = torch.Generator().manual_seed(3)
E = 12
SOFTMAX = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=E, top_k=4)
GROUPED = RoutingConfig(
    method=RoutingMethod.SIGMOID_GROUPED, num_experts=16, top_k=3, num_groups=4, num_kept_groups=2
)  # fmt: skip


def tables(num_experts: int = E, *, counts: bool, places: bool) -> ExpertTables:
    placement = plan_placement([1 + 50 * (expert < 2) for expert in range(num_experts)], 4, num_experts // 4 + 1)
    return ExpertTables(
        torch.zeros(num_experts, dtype=torch.int64) if counts else None,
        slot_table(placement, num_experts, first_row=1) if places else None,
    )


def differs(got: StandardTopK, own: ExpertTables, want: StandardTopK, reference: ExpertTables) -> bool:
    same_loads = own.load_E is None or torch.equal(own.load_E, reference.load_E)
    return not (same_loads and torch.equal(got.ids, want.ids) and got.ids.dtype == torch.int32)


def kernel_fault(num_tokens: int, num_live: int | None, first_token: int, **parts: bool) -> bool:
    ids_TK = torch.stack([torch.randperm(E, generator=G)[:3] for _ in range(num_tokens)]).int()
    ids_TK[::5, 1] = -1
    live = None if num_live is None else torch.tensor([num_live], dtype=torch.int32)
    topk = StandardTopK(torch.rand(ids_TK.shape), ids_TK)
    own, reference = tables(**parts), tables(**parts)
    got = replicas.count_and_place(topk, own, live, first_token)
    return differs(got, own, count_and_place(topk, reference, live, first_token), reference)


def router_fault(
    config: RoutingConfig, num_tokens: int, num_live: int | None, *, drops: bool = False, **parts: bool
) -> bool:
    """Small integers, so that sums are exact; few of them for scores, which else would all be one."""
    num_experts, is_grouped = config.num_experts, config is GROUPED
    x = torch.randint(-2, 3, (num_tokens, 200), generator=G).bfloat16()
    x[:, 8:] *= not is_grouped
    weight = torch.randint(-1, 2, (num_experts, 200), generator=G).bfloat16()
    correction = torch.randint(-3, 4, (num_experts,), generator=G) / 4 if is_grouped else None
    live = None if num_live is None else torch.tensor([num_live], dtype=torch.int32)
    own, reference = tables(num_experts, **parts), tables(num_experts, **parts)
    got = router.route(
        x, weight, None, config, correction, tables=own, num_live=live, first_token=2, drops_padding=drops
    )
    want = route(x.float() @ weight.float().T, config, correction)
    if drops and live is not None:
        want = drop_padding(want, live, 2)
    want = count_and_place(want, reference, live, 2)
    return differs(got, own, want, reference)


def main() -> None:
    faults = {}
    for parts in (
        {"counts": True, "places": False},
        {"counts": True, "places": True},
        {"counts": False, "places": True},
    ):
        name = " and ".join(key for key, is_on in parts.items() if is_on)
        faults[f"kernel {name}, all live"] = kernel_fault(100, None, 0, **parts)
        faults[f"kernel {name}, a slice with padding"] = kernel_fault(100, 90, 40, **parts)
        faults[f"router {name}, in parts"] = router_fault(SOFTMAX, 5, 4, **parts)
        faults[f"router {name}, whole"] = router_fault(SOFTMAX, 1100, None, **parts)
        faults[f"router {name}, without padding"] = router_fault(SOFTMAX, 40, 10, drops=True, **parts)
        faults[f"router with groups {name}, in parts"] = router_fault(GROUPED, 5, 4, **parts)
        faults[f"router with groups {name}, whole"] = router_fault(GROUPED, 1100, 1000, **parts)
    none = {"counts": False, "places": False}
    faults["router without padding, in parts"] = router_fault(SOFTMAX, 5, 4, drops=True, **none)
    faults["router without padding, whole"] = router_fault(GROUPED, 1100, 0, drops=True, **none)
    print(json.dumps(faults))


if __name__ == "__main__":
    main()
