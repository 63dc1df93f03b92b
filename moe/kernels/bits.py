"""Packed weight codes to bf16 numbers, on the device. `layout.py` holds the packing side of every bit pattern here.

A 16-bit word carries four E2M1 codes (or two E4M3 bytes) of four (two) different runs of the K axis, at bit positions
chosen so that few instructions turn a pair of words into bf16 pairs. The exponent field of a code lands in the lowest
exponent bits of a bf16, so the number is too small by 2^126 (E2M1) or 2^120 (E4M3), subnormal codes included; one
multiplication by the scale, which carries that power of two, makes it exact.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from moe.kernels.layout import FRACTION_SCALE_FIELD

FRACTION_SCALE_BITS = tl.constexpr(FRACTION_SCALE_FIELD << 7)

# Bits of the four codes in a word: code 0: sign 15, value 8..6; code 1: 12, 5..3; code 2: 13, 2..0; code 3: 14, 11..9.
# Two neighbouring words fill one 32-bit register; no step moves a bit from one word into a used bit of the other.
_E2M1_CODES = (
    "and.b32 t, {word}, 0x81C081C0;",
    "shl.b32 t, {word}, 3; and.b32 t, t, 0x81C081C0;",
    "and.b32 t, {word}, 0x20072007; mul.lo.u32 t, t, 68; and.b32 t, t, 0x81C081C0;",
    "shr.u32 u, {word}, 3; and.b32 u, u, 0x01C001C0; shl.b32 v, {word}, 1; and.b32 v, v, 0x80008000; or.b32 t, u, v;",
)


def _e2m1_asm(*codes: int) -> tl.constexpr:
    """Operands: a result for each of the codes, the words, then each code's scale."""
    lines = ["{", ".reg .b32 t, u, v, z;", "mov.b32 z, 0x80008000;"]
    for index, code in enumerate(codes):
        lines.append(_E2M1_CODES[code].format(word=f"${len(codes)}"))
        lines.append(f"fma.rn.bf16x2 ${index}, t, ${len(codes) + 1 + index}, z;")
    return tl.constexpr("\n".join([*lines, "}"]))


_E2M1_ASM, _E2M1_FIRST_ASM, _E2M1_SECOND_ASM = _e2m1_asm(0, 1, 2, 3), _e2m1_asm(0, 1), _e2m1_asm(2, 3)

# Low byte: run 0; high byte: run 1. `$3` is 2^120 in both halves.
_E4M3_ASM = tl.constexpr("""
{
.reg .b32 t, u, v, z;
mov.b32 z, 0x80008000;
shl.b32 u, $2, 4;
and.b32 u, u, 0x07F007F0;
shl.b32 v, $2, 8;
and.b32 v, v, 0x80008000;
or.b32 t, u, v;
fma.rn.bf16x2 $0, t, $3, z;
shr.u32 u, $2, 4;
and.b32 u, u, 0x07F007F0;
and.b32 v, $2, 0x80008000;
or.b32 t, u, v;
fma.rn.bf16x2 $1, t, $3, z;
}
""")


@triton.jit
def _as_bf16(bits):
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scaled(bits, scale):
    # Shifted up, the bits of a bf16 are those of the same fp32; the interpreter converts bf16 subnormals wrongly.
    return ((bits << 16).to(tl.float32, bitcast=True) * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def unpack_e2m1_half(words, s0, s1, HALF: tl.constexpr, USE_ASM: tl.constexpr):
    """Two of the four codes in int16 words [N, W], 0 and 1 or 2 and 3, times their bf16 scales: two bf16 [N, W]."""
    if USE_ASM:
        w0, w1 = tl.inline_asm_elementwise(
            _E2M1_FIRST_ASM if HALF == 0 else _E2M1_SECOND_ASM,
            "=r,=r,r,r,r",
            [words, s0, s1],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        h = words.to(tl.int32)
        if HALF == 0:
            w0 = _scaled(h & 0x81C0, s0)
            w1 = _scaled((h << 3) & 0x81C0, s1)
        else:
            w0 = _scaled(((h & 0x2007) * 68) & 0x81C0, s0)
            w1 = _scaled(((h >> 3) & 0x01C0) | ((h << 1) & 0x8000), s1)
    return w0, w1


@triton.jit
def unpack_e2m1(words, s0, s1, s2, s3, USE_ASM: tl.constexpr):
    """All four codes at once: faster than one half after the other where nothing can run between them."""
    if USE_ASM:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _E2M1_ASM,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, s0, s1, s2, s3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        w0, w1 = unpack_e2m1_half(words, s0, s1, 0, USE_ASM)
        w2, w3 = unpack_e2m1_half(words, s2, s3, 1, USE_ASM)
    return w0, w1, w2, w3


@triton.jit
def unpack_e4m3(words, USE_ASM: tl.constexpr):
    """int16 words [N, W] to two bf16 [N, W], the true values of the low and the high bytes."""
    if USE_ASM:
        lift = tl.full(words.shape, 1.329227995784916e36, tl.bfloat16)  # 2^120
        w0, w1 = tl.inline_asm_elementwise(
            _E4M3_ASM,
            "=r,=r,r,r",
            [words, lift],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        lift = tl.full(words.shape, 1.329227995784916e36, tl.float32)  # Triton 3.7's interpreter has no bf16 constants
        h = words.to(tl.int32)
        w0 = _scaled(((h << 4) & 0x07F0) | ((h << 8) & 0x8000), lift)
        w1 = _scaled(((h >> 4) & 0x07F0) | (h & 0x8000), lift)
    return w0, w1


@triton.jit
def exponent_scale(packed, INDEX: tl.constexpr):
    """Byte INDEX of an int32 holds the exponent field of a bf16 power of two."""
    return _as_bf16(((packed >> (8 * INDEX)) & 0xFF) << 7)


@triton.jit
def fraction_scale(packed, INDEX: tl.constexpr):
    """Byte INDEX of an int32 holds 5 exponent and 3 fraction bits of a scale, `layout.pack_fraction_scales`."""
    return _as_bf16((((packed >> (8 * INDEX)) & 0xFF) << 4) + FRACTION_SCALE_BITS)


@triton.jit
def encode_e4m3(values, USE_CAST: tl.constexpr):
    """fp32 of at most 448 to E4M3 bytes (uint8), rounded to nearest even. The interpreter's own cast loses carries."""
    if USE_CAST:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    magnitude = tl.abs(values)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((magnitude * 512.0 + 8388608.0) - 8388608.0).to(tl.int32)
    code = tl.where(magnitude >= 0.015625, normal, subnormal)
    return (code | tl.where(values < 0, 128, 0)).to(tl.uint8)


@triton.jit
def decode_e4m3(codes):
    """E4M3 bytes to fp32, for where no matrix unit takes them as they are."""
    c = codes.to(tl.int32)
    bits = ((c & 0x7F) << 20) | ((c & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
