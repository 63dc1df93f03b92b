"""Sizes of one expert layer and of the part that one rank holds. Integers only, no tensors and no formats.

Two independent cuts: expert parallelism splits the expert axis, then tensor parallelism splits the intermediate axis of
the experts that a rank holds.

The intermediate axis (I = 2880 elements = 90 blocks of 32, tp 4, so 23 blocks a rank):

    blocks   0 ......... 22 | 23 ........ 45 | 46 ........ 68 | 69 ....... 89 + 2 of zeros
    rank     0                1                2                3

Cuts fall between blocks, so no scale block is split, whatever I and tp are. Every rank allocates the same padded
length. A rank may own fewer blocks, or none; its padding is zeros, which add nothing to the layer's output.
"""

from dataclasses import dataclass

from moe.errors import MoeConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShape:
    """The experts of a whole layer over all ranks: every token goes to `top_k` of `num_experts`."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    def __post_init__(self) -> None:
        for field in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
            if getattr(self, field) < 1:
                raise MoeConfigError(f"{field} is {getattr(self, field)}: it must be at least 1")
        if self.top_k > self.num_experts:
            raise MoeConfigError(f"top_k is {self.top_k}: it must not exceed num_experts {self.num_experts}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Elements [start, start + length) of an axis, in a buffer of `padded` elements."""

    start: int
    length: int
    padded: int


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A rank's place among the tensor- and expert-parallel ranks. The default is a single rank with everything."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        for axis, size, rank in (("tp", self.tp_size, self.tp_rank), ("ep", self.ep_size, self.ep_rank)):
            if size < 1:
                raise MoeConfigError(f"{axis}_size is {size}: it must be at least 1")
            if not 0 <= rank < size:
                raise MoeConfigError(f"{axis}_rank is {rank}: it must lie in 0..{size - 1}")

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share a layer."""
        return self.tp_size * self.ep_size

    @property
    def place(self) -> "RankPlace":
        """Sizes and ranks only, without what a subclass adds. Equal places mean the same rank."""
        return RankPlace(tp_size=self.tp_size, tp_rank=self.tp_rank, ep_size=self.ep_size, ep_rank=self.ep_rank)

    def expert_range(self, num_experts: int) -> range:
        """Global ids of the experts on this rank.

        Raises:
            MoeConfigError: the ranks cannot share the experts evenly.
        """
        if num_experts % self.ep_size:
            raise MoeConfigError(f"ep_size is {self.ep_size}: it must divide the {num_experts} experts")
        num_local = num_experts // self.ep_size
        return range(self.ep_rank * num_local, (self.ep_rank + 1) * num_local)

    def cut(self, size: int, block: int) -> Cut:
        """This rank's part of an intermediate axis of `size` elements whose scales cover `block` elements each.

        All ranks get the same number of blocks, except that the last ones get fewer or none; `padded` is always equal.
        """
        num_blocks = -(-size // block)
        step = -(-num_blocks // self.tp_size) * block
        start, end = min(size, self.tp_rank * step), min(size, (self.tp_rank + 1) * step)
        return Cut(start=start, length=end - start, padded=step)

    def share(self, axis: str, size: int, unit: int, *, copies: bool = False) -> range:
        """This rank's part of an axis of `size` elements, in whole units (such as heads).

        `copies`: where a multiple of the units' number of ranks shares them, neighbouring ranks have the same unit.

        Raises:
            MoeConfigError: the ranks cannot share the units evenly.
        """
        num_units = size // unit
        if copies and size % unit == 0 and num_units < self.tp_size and self.tp_size % num_units == 0:
            start = self.tp_rank * num_units // self.tp_size * unit
            return range(start, start + unit)
        if size % unit or num_units % self.tp_size:
            raise MoeConfigError(
                f"tp_size is {self.tp_size}: it must divide {axis}, {size} elements in units of {unit}"
            )
        length = size // self.tp_size
        return range(self.tp_rank * length, (self.tp_rank + 1) * length)
