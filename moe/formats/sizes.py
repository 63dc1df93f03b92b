"""Bytes of canonical weights by number format, to plan memory before any weight is read."""

from moe.errors import WeightFormatError

_FP8_BLOCK = 128
_MXFP4_GROUP = 32
_NVFP4_GROUP = 16
_FLOAT = 4  # bytes
_BF16 = 2


def weight_bytes(format_name: str, num_rows: int, num_cols: int) -> int:
    """Bytes of one matrix [N, K] with its scales; static input scales are left out.

    Raises:
        WeightFormatError: an unknown format.
    """
    size = num_rows * num_cols
    match format_name:
        case "bf16":
            return size * _BF16
        case "fp8_block":
            return size + -(-num_rows // _FP8_BLOCK) * -(-num_cols // _FP8_BLOCK) * _FLOAT
        case "fp8_tensor":
            return size + _FLOAT
        case "mxfp4":
            return size // 2 + size // _MXFP4_GROUP
        case "nvfp4":
            return size // 2 + size // _NVFP4_GROUP + _FLOAT
    raise WeightFormatError(f"format {format_name} is unknown")


def expert_bytes(format_name: str, hidden_size: int, intermediate_size: int, bias_itemsize: int = 0) -> int:
    """Bytes of one expert: w13 [2I, H], w2 [H, I], and biases of `bias_itemsize` bytes a number if it has any."""
    weights = weight_bytes(format_name, 2 * intermediate_size, hidden_size)
    weights += weight_bytes(format_name, hidden_size, intermediate_size)
    return weights + bias_itemsize * (2 * intermediate_size + hidden_size)
