"""fp32 experts over dense weights in [up; gate] or [gate; up] order, as a fused kernel computes them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


def _same(x: torch.Tensor, expert: int) -> torch.Tensor:
    del expert
    return x


@dataclass(kw_only=True)
class DenseExperts:
    """Decoded weights of the local experts; `first` is up or gate, as the kernel has it."""

    w13: torch.Tensor  # [E, 2I, H]
    w2: torch.Tensor  # [E, H, I]
    first_is_up: bool
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    alpha: torch.Tensor | None = None  # [E]
    beta: torch.Tensor | None = None
    limit: torch.Tensor | None = None
    quantize_in: Callable[[torch.Tensor, int], torch.Tensor] = _same
    quantize_mid: Callable[[torch.Tensor, int], torch.Tensor] = _same

    def one(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Rows [R, H] through one local expert."""
        hidden = self.quantize_in(x.float(), expert) @ self.w13[expert].T
        if self.b13 is not None:
            hidden = hidden + self.b13[expert].float()
        up, gate = hidden.chunk(2, dim=-1) if self.first_is_up else hidden.chunk(2, dim=-1)[::-1]
        alpha = 1.0 if self.alpha is None else float(self.alpha[expert])
        beta = 0.0 if self.beta is None else float(self.beta[expert])
        if self.limit is not None:
            limit = float(self.limit[expert])
            gate, up = torch.clamp(gate, max=limit), torch.clamp(up, min=-limit, max=limit)
        mid = gate / (1 + torch.exp(-alpha * gate)) * (up + beta)
        out = self.quantize_mid(mid, expert) @ self.w2[expert].T
        return out if self.b2 is None else out + self.b2[expert].float()

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """fp32 [T, H]: weighted sum over the local experts [offset, offset + E); other ids are skipped."""
        out = torch.zeros(x.shape[0], self.w2.shape[1])
        for expert in range(self.w13.shape[0]):
            rows, slots = torch.where(ids == expert + offset)
            if rows.numel():
                out.index_add_(0, rows, self.one(x[rows], expert) * weights[rows, slots, None].float())
        return out
