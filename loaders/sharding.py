"""Which part of a layer's experts one rank holds. Arithmetic only: reads nothing, knows formats by their block size.

Two independent cuts, never both from one number: expert parallelism slices the expert axis, tensor parallelism slices
the intermediate axis of the experts it is left with.

The intermediate axis (I = 2880 elements = 90 blocks of 32, tp 4, so 23 blocks a rank):

    blocks   0 ......... 22 | 23 ........ 45 | 46 ........ 68 | 69 ....... 89 + 2 of zeros
    rank     0                1                2                3

A cut falls on block borders, so no block of scales is ever split, whatever I and tp are. Every rank allocates the same
padded length; a rank may own fewer blocks, or none, and holds zeros there, which add nothing to the layer's output.
"""

from dataclasses import dataclass

from loaders.errors import ShardingError
from moe.formats import Bf16Weight, Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight, Weight

# Elements of the intermediate axis that share one scale: the finest cut. Both w13's rows and w2's columns follow it.
_FORMATS: tuple[type[Weight], ...] = (Bf16Weight, Fp8TensorWeight, Nvfp4Weight, Mxfp4Weight, Fp8BlockWeight)
CUT_BLOCK = {kind.format_name: kind.col_block for kind in _FORMATS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Elements [start, start + length) of an axis, in a buffer of `padded` elements."""

    start: int
    length: int
    padded: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """Place of this rank among the tensor- and expert-parallel ranks. The default is the whole layer."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        for axis, size, rank in (("tp", self.tp_size, self.tp_rank), ("ep", self.ep_size, self.ep_rank)):
            if size < 1:
                raise ShardingError(f"{axis}_size is {size}: it must be at least 1")
            if not 0 <= rank < size:
                raise ShardingError(f"{axis}_rank is {rank}: it must lie in 0..{size - 1}")

    def expert_range(self, num_experts: int) -> range:
        """Global ids of the experts on this rank.

        Raises:
            ShardingError: the ranks cannot share the experts evenly.
        """
        if num_experts % self.ep_size:
            raise ShardingError(f"ep_size is {self.ep_size}: it must divide the number of experts, {num_experts}")
        num_local = num_experts // self.ep_size
        return range(self.ep_rank * num_local, (self.ep_rank + 1) * num_local)

    def cut_intermediate(self, size: int, block: int) -> Cut:
        """This rank's part of an intermediate axis of `size` elements whose scales cover `block` elements each."""
        num_blocks = -(-size // block)
        blocks_per_rank = -(-num_blocks // self.tp_size)
        step = blocks_per_rank * block
        start, end = min(size, self.tp_rank * step), min(size, (self.tp_rank + 1) * step)
        return Cut(start=start, length=end - start, padded=step)

    def padded_intermediate(self, size: int, format_name: str) -> int:
        """Intermediate size of every rank's experts, padding included: whole blocks of the format's scales."""
        return self.cut_intermediate(size, CUT_BLOCK[format_name]).padded
