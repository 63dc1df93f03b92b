"""The sampling kernels as a launch for GPT-OSS compiles them: types of their pointers, constants."""

import inspect

from engine import gpu_draw, gpu_logits, gpu_rows
from engine.gpu_params import NUM_FLOATS, NUM_INTS
from engine.gpu_sampler import Tiling
from tests.moe.kernels.compiling import compile_kernel

VOCAB_SIZE = 201_088
TILING = Tiling()
NUM_CHUNKS = -(-VOCAB_SIZE // TILING.chunk)
CONSTANTS = {
    "NUM_INTS": NUM_INTS, "NUM_FLOATS": NUM_FLOATS, "CHUNK": TILING.chunk, "GROUP": TILING.group, "S_PAD": 64,
    "G_PAD": 2048, "C": TILING.list_size, "KEEP": True,
}  # fmt: skip
INT32 = {"counts_ptr", "cut_ptr", "num_listed_ptr", "listed_bits_ptr", "listed_ids_ptr"}
FP32 = {"logits_ptr", "maxima_ptr", "groups_ptr", "best_ptr", "chosen_value_ptr", "top_values_ptr"}
FP64 = {"floats_ptr", "values_ptr"}
BLOCKS = {"draw_tokens": TILING.block, "rank_tokens": TILING.block, "add_counts": 256, "add_bias": 256}
KERNELS = {
    kernel.fn.__name__: kernel
    for kernel in (
        gpu_logits.clear_counts, gpu_logits.add_counts, gpu_logits.penalize_and_mask, gpu_logits.add_bias,
        gpu_rows.row_stats, gpu_rows.combine, gpu_rows.collect, gpu_draw.draw_tokens, gpu_draw.rank_tokens,
    )
}  # fmt: skip


def compile_sampling(name, arch):
    """The compiled kernel with its `asm` texts."""
    names = list(inspect.signature(KERNELS[name].fn).parameters)
    kinds = {each: "*i64" for each in names if each.endswith("_ptr")}
    kinds |= {each: "*i32" for each in INT32 & kinds.keys()}
    kinds |= {each: "*fp32" for each in FP32 & kinds.keys()}
    kinds |= {each: "*fp64" for each in FP64 & kinds.keys()}
    if "masks_ptr" in kinds:
        kinds["masks_ptr"] = "*u8"
    if name in ("row_stats", "combine"):
        kinds["ids_ptr"] = "*i32"
    constants = {each: value for each, value in CONSTANTS.items() if each in names}
    if "BLOCK" in names:
        constants["BLOCK"] = BLOCKS[name]
    return compile_kernel(KERNELS[name], arch, kinds, constants, num_warps=8)
