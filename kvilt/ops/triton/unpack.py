"""Packed numbers become floats in registers: bytes of KV, and codes of weights.

Words of 16 bits are loaded, since shared memory hands out words to tensor cores, and each gives a number to several
tiles. In assembly two words take one instruction or two for each number; without it, in the interpreter, each takes
some.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def even_odd(words, FLOATS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The low and the high bytes of `words` (int16) as float16, which are float8 or whole numbers."""
    if ASSEMBLY:
        if FLOATS:
            return tl.inline_asm_elementwise(
                """
                {
                .reg .b32 t;
                .reg .b16 low, high;
                prmt.b32 t, $2, 0, 0x3120;
                mov.b32 {low, high}, t;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
                }
                """,
                "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        # 0x6400 with a byte in its low half is 1024 and that byte.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, low, high;
            xor.b32 t, $2, 0x80808080;
            prmt.b32 low, t, 0x64646464, 0x4240;
            prmt.b32 high, t, 0x64646464, 0x4341;
            mov.b32 t, 0x64806480;
            sub.f16x2 $0, low, t;
            sub.f16x2 $1, high, t;
            }
            """,
            "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    low, high = (words << 8).to(tl.int16), words
    return _one(low, FLOATS), _one(high, FLOATS)


@triton.jit
def _one(high, FLOATS: tl.constexpr):
    """The high bytes of words as float16."""
    if FLOATS:  # the exponents of float8 and float16 are eight apart
        bits = (high & -32768) | ((high >> 1) & 0x3F80)
        return (bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(tl.float16)
    return (high >> 8).to(tl.float32).to(tl.float16)


@triton.jit
def float8_halves(words, kind: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The low and the high bytes of `words` (int16), which are float8, as numbers of `kind`; exact.

    In assembly their bits are put into bfloat16, whose exponents are 120 apart from those of float8.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, sign, zero, unit;
            mov.b32 zero, 0x80008000;
            mov.b32 unit, 0x7b807b80;
            shl.b32 t, $2, 8;
            and.b32 sign, t, 0x80008000;
            shl.b32 t, $2, 4;
            lop3.b32 t, t, 0x07f007f0, sign, 0xea;
            fma.rn.bf16x2 $0, t, unit, zero;
            and.b32 sign, $2, 0x80008000;
            shr.b32 t, $2, 4;
            lop3.b32 t, t, 0x07f007f0, sign, 0xea;
            fma.rn.bf16x2 $1, t, unit, zero;
            }
            """,
            "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = even_odd(words, True, False)
        return low.to(kind), high.to(kind)


@triton.jit
def codes_of_words(words, BITS: tl.constexpr, kind: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The codes of words (int16) as tiles of `kind`, one for each slot: of four bits, or of eight in one tile or two.

    In assembly 128 is on top of each half of a byte: the code is put into the mantissa of that number.
    """
    if ASSEMBLY:
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t;
            lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
            shr.b32 t, $4, 4;
            lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
            shr.b32 t, $4, 8;
            lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
            shr.b32 t, $4, 12;
            lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea;
            }
            """,
            "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        if BITS == 4:
            return (a,), (b,), (c,), (d,)
        else:
            return (a, b), (c, d)
    else:
        wide = words.to(tl.int32)
        if BITS == 4:
            return (
                ((wide & 15).to(kind),),
                (((wide >> 4) & 15).to(kind),),
                (((wide >> 8) & 15).to(kind),),
                (((wide >> 12) & 15).to(kind),),
            )
        else:
            return ((wide & 255).to(kind),), (((wide >> 8) & 255).to(kind),)


@triton.jit
def float_of_bits(bits):
    """The float32 of a code that is a float, whose bits are those of a bfloat16 with an exponent 126 too small."""
    exponent, fraction = (bits >> 7) & 3, (bits >> 6) & 1
    doubled = tl.where(exponent == 0, fraction, (2 + fraction) << tl.maximum(exponent - 1, 0))
    return tl.where((bits & 0x8000) == 0, 0.5, -0.5) * doubled.to(tl.float32)


@triton.jit
def last_float_bits(words):
    """The bits of the last code of words (int32), which stand apart."""
    return ((words << 1) & 0x8000) | ((words >> 3) & 0x0180) | ((words >> 7) & 0x0040)


@triton.jit
def floats_of_words(words, kind: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The codes of words (int16) that are floats, as tiles of `kind`; exact. See `packed.py`."""
    if ASSEMBLY:
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, u, zero, unit;
            mov.b32 zero, 0x80008000;
            mov.b32 unit, 0x7e807e80;
            and.b32 t, $4, 0x81c081c0;
            fma.rn.bf16x2 $0, t, unit, zero;
            shl.b32 t, $4, 3;
            and.b32 t, t, 0x81c081c0;
            fma.rn.bf16x2 $1, t, unit, zero;
            shl.b32 t, $4, 6;
            and.b32 t, t, 0x81c081c0;
            fma.rn.bf16x2 $2, t, unit, zero;
            shl.b32 t, $4, 1;
            and.b32 t, t, 0x80008000;
            shr.b32 u, $4, 3;
            lop3.b32 t, u, 0x01800180, t, 0xea;
            shr.b32 u, $4, 7;
            lop3.b32 t, u, 0x00400040, t, 0xea;
            fma.rn.bf16x2 $3, t, unit, zero;
            }
            """,
            "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
        return (a,), (b,), (c,), (d,)
    else:
        wide = words.to(tl.int32)
        return (
            (float_of_bits(wide).to(kind),),
            (float_of_bits(wide << 3).to(kind),),
            (float_of_bits(wide << 6).to(kind),),
            (float_of_bits(last_float_bits(wide)).to(kind),),
        )


@triton.jit
def load_codes(
    at, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, kind: tl.constexpr, ASSEMBLY: tl.constexpr
):  # fmt: skip
    """The codes of a chunk of columns, slot by slot; `at` are its first words. See `packed.py`."""
    words = tl.load(at, eviction_policy="evict_first")
    if FLOATS:
        return floats_of_words(words, kind, ASSEMBLY)
    elif BITS != 6:
        return codes_of_words(words, BITS, kind, ASSEMBLY)
    else:
        more = tl.load(at + GROUP, eviction_policy="evict_first")
        high = tl.load(at + 2 * GROUP, eviction_policy="evict_first")
        a, b, c, d = _six_bits(words, high, kind, ASSEMBLY)
        e, f, g, h = _six_bits(more, high >> 8, kind, ASSEMBLY)
        return (a,), (b,), (c,), (d,), (e,), (f,), (g,), (h,)


@triton.jit
def _six_bits(words, high, kind: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Four codes of each word, whose upper two bits are the low byte of `high`."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, u;
            shl.b32 u, $5, 4;
            lop3.b32 t, $4, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $0, u, 0x00300030, t, 0xea;
            shr.b32 t, $4, 4;
            shl.b32 u, $5, 2;
            lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $1, u, 0x00300030, t, 0xea;
            shr.b32 t, $4, 8;
            lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $2, $5, 0x00300030, t, 0xea;
            shr.b32 t, $4, 12;
            shr.b32 u, $5, 2;
            lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $3, u, 0x00300030, t, 0xea;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r", [words, high],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, up = words.to(tl.int32), high.to(tl.int32)
        return (
            ((low & 15) | ((up & 3) << 4)).to(kind),
            (((low >> 4) & 15) | (((up >> 2) & 3) << 4)).to(kind),
            (((low >> 8) & 15) | (((up >> 4) & 3) << 4)).to(kind),
            (((low >> 12) & 15) | (((up >> 6) & 3) << 4)).to(kind),
        )
