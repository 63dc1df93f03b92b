"""A launch plan: the parameters that set the speed of a layer's kernels. All but `fp8_activations` keep the results."""

from dataclasses import dataclass

from moe.errors import MoeConfigError

MAX_DIRECT_SLOTS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How the kernels of one layer are launched.

    is_direct: every program finds its expert's slots by itself, at most MAX_DIRECT_SLOTS in all; three kernels. Above
        `block_m` tokens they run different code.
    Otherwise a first kernel sorts the slots by expert, and tiles are runs of `block_m` sorted slots; four kernels.
    num_tile_heights: heights of grouped tiles, 1 to 3: `block_m`, then half and a quarter of it for the end of a run.
    fp8_activations: a grouped plan of FP8 block weights rounds the inputs of both GEMMs to E4M3, a scale per row and
        128 columns, and multiplies in FP8 (sm89 and newer): twice the rate, ten times the error.
    tile_group: number of grouped tiles that go through the weights together.
    by_expert: direct plans launch a program per expert instead of per slot.
    split_k: parts into which a direct plan splits the second matrix's reduction axis; `unpermute_sum` adds them up.
    split_k_1: the same of the first matrix, for layers with few programs; the last program of a tile adds them up.
    pdl: programmatic dependent launch: a kernel starts while the one before it drains. Programs of direct plans also
        prefetch their first weights into the L2 while they look up their slots (Hopper and newer).
    """

    is_direct: bool
    block_m: int
    block_n_1: int
    block_n_2: int
    num_warps_1: int = 4
    num_warps_2: int = 4
    num_stages_1: int = 4
    num_stages_2: int = 4
    split_k: int = 1
    split_k_1: int = 1
    by_expert: bool = False
    tile_group: int = 4
    num_tile_heights: int = 1
    fp8_activations: bool = False
    pdl: bool = False

    def __post_init__(self) -> None:
        for field, low in (
            ("block_m", 8),
            ("block_n_1", 64),
            ("block_n_2", 64),
            ("num_warps_1", 1),
            ("num_warps_2", 1),
        ):
            value = getattr(self, field)
            if value < low or value & (value - 1):
                raise MoeConfigError(f"plan {field} is {value}: it must be a power of two and at least {low}")
        for field in ("num_stages_1", "num_stages_2", "split_k", "split_k_1", "tile_group"):
            if getattr(self, field) < 1:
                raise MoeConfigError(f"plan {field} is {getattr(self, field)}: it must be at least 1")
        if not self.is_direct and (self.split_k > 1 or self.split_k_1 > 1 or self.by_expert):
            raise MoeConfigError("plan split_k, split_k_1 and by_expert belong to direct plans")
        if self.is_direct and self.fp8_activations:
            raise MoeConfigError(
                "plan fp8_activations belongs to grouped plans: few tokens are bound by reading weights"
            )
        if not 1 <= self.num_tile_heights <= 3 or self.block_m >> (self.num_tile_heights - 1) < 8:
            raise MoeConfigError(
                f"plan num_tile_heights is {self.num_tile_heights}: 1 to 3, and the lowest tile must hold 8 rows"
            )
        if self.is_direct and self.num_tile_heights > 1:
            raise MoeConfigError(
                f"plan num_tile_heights is {self.num_tile_heights}: tiles of several heights belong to grouped plans"
            )
