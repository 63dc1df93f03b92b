"""Permutes routed slots into rows grouped by expert, and back. Plain torch, without device-to-host syncs.

Shape letters: T tokens, K top-k, R rows, E local experts, H hidden.
"""

import torch


def local_ids(ids_TK: torch.Tensor, owned: range) -> torch.Tensor:
    """Global expert ids to local ones; -1 for experts of other ranks and for no expert."""
    is_local = (ids_TK >= owned.start) & (ids_TK < owned.stop)
    return torch.where(is_local, ids_TK - owned.start, -1)


def count_slots(ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 [E]: number of slots per local expert."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_TK.device)
    flat = _with_dump(ids_TK, num_experts)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


def permute_rows(ids_TK: torch.Tensor, first_row_E: torch.Tensor) -> torch.Tensor:
    """int64 [T, K]: row of every slot, -1 without expert. An expert's rows are in token order from its first row."""
    num_experts = first_row_E.shape[0]
    expert = _with_dump(ids_TK, num_experts)
    order = torch.argsort(expert, stable=True)
    counts = torch.cat((count_slots(ids_TK, num_experts), first_row_E.new_zeros(1)))
    start_of_expert = torch.cumsum(counts, 0) - counts  # positions in `order`
    first_row = torch.cat((first_row_E, first_row_E.new_zeros(1)))
    sorted_expert = expert[order]
    position = torch.arange(expert.shape[0], device=expert.device)
    row_of_sorted = first_row[sorted_expert] + position - start_of_expert[sorted_expert]
    row = torch.empty_like(row_of_sorted)
    row[order] = row_of_sorted
    return torch.where(ids_TK >= 0, row.view(ids_TK.shape), -1)


def token_of_row(row_TK: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int64 [R]: the token that each row is a copy of; rows without a slot read token 0."""
    source = torch.zeros(num_rows + 1, dtype=torch.int64, device=row_TK.device)
    tokens_TK = torch.arange(row_TK.shape[0], device=row_TK.device)[:, None].expand_as(row_TK)
    source[torch.where(row_TK >= 0, row_TK, num_rows)] = tokens_TK
    return source[:num_rows]


def masked_rows(masked_m: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing that treats each low-latency row as a token with one expert: int64 local ids [E * num_rows, 1], -1 for
    rows past the expert's count, and fp32 weights of one.
    """
    is_real_EM = torch.arange(num_rows, device=masked_m.device) < masked_m[:, None]
    expert_E1 = torch.arange(masked_m.shape[0], device=masked_m.device)[:, None]
    ids_R1 = torch.where(is_real_EM, expert_E1, -1).view(-1, 1)
    return ids_R1, torch.ones(ids_R1.shape, device=masked_m.device)


def take_rows(x_TH: torch.Tensor, source_R: torch.Tensor) -> torch.Tensor:
    """[R, H] of any dtype. FP8 rows are indexed as bytes, because not every device can index FP8."""
    if x_TH.element_size() == 1:
        return x_TH.view(torch.uint8).index_select(0, source_R).view(x_TH.dtype)
    return x_TH.index_select(0, source_R)


def unpermute_sum(y_RH: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """fp32 [T, H]: weighted sum of every token's rows. A slot with row -1 adds exactly zero."""
    out_TH = torch.zeros((row_TK.shape[0], y_RH.shape[1]), dtype=torch.float32, device=y_RH.device)
    for row_T, weight_T in zip(row_TK.unbind(1), weights_TK.unbind(1), strict=True):
        y_TH = y_RH[row_T.clamp_min(0)].float() * weight_T[:, None]
        out_TH += y_TH.masked_fill(row_T[:, None] < 0, 0.0)
    return out_TH


def _with_dump(ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Flat int64 ids, with -1 replaced by the id of an extra expert at the end."""
    return torch.where(ids_TK >= 0, ids_TK, num_experts).flatten().to(torch.int64)
