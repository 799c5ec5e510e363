"""What the kernels of sampling share: a row's record in a `DrawTable`, its scores, their order, weights and noise."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import draw_table
from ..draw_table import word

RECORD = tl.constexpr(draw_table.RECORD_WORDS)
MODE, TEMPERATURE, COPY = (tl.constexpr(word(name)) for name in ("mode", "temperature", "copy"))
TOP_K, CUT, MIN_P = (tl.constexpr(word(name)) for name in ("top_k", "cut", "min_p"))
TYPICAL_P = tl.constexpr(word("typical_p"))
DRAWS, FILTERED, EDITED = (tl.constexpr(bit) for bit in (draw_table.DRAWS, draw_table.FILTERED, draw_table.EDITED))
TOP_P, TYPICAL = tl.constexpr(draw_table.TOP_P), tl.constexpr(draw_table.TYPICAL)
NO_PEAK, NO_TOKEN = tl.constexpr(draw_table.NO_PEAK), tl.constexpr(draw_table.NO_TOKEN)
NO_SCORE = tl.constexpr(draw_table.NO_SCORE)

PARTS = tl.constexpr(5)  # numbers that each share of a row leaves: see _scan in sampling.py
BEYOND = tl.constexpr(2**31 - 1)  # an id after all others
INFINITY = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a token at -inf is out already
_GAMMA, _MIX_1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def record_of(words, row, rows):
    """Where the record of a row begins."""
    return words + 2 * rows + row * RECORD


@triton.jit
def read_float(place):
    return tl.load(place).to(tl.float32, bitcast=True)


@triton.jit
def scores_of(logits, copies, record, row, mode, vocab, stride, EDITS: tl.constexpr):
    """Where the scores of a row begin: among the logits, or among the copies of edited rows."""
    source = logits + row * stride
    if EDITS:
        if (mode & EDITED) != 0:
            source = copies + tl.load(record + COPY).to(tl.int64) * vocab
    return source


@triton.jit
def load_scores(source, i, vocab):
    """Scores before temperature; what is no number counts as too large."""
    x = tl.load(source + i, mask=i < vocab, other=-INFINITY).to(tl.float32)
    return tl.where(x != x, INFINITY, x)


@triton.jit
def is_finite(x):
    return tl.abs(x) < INFINITY


@triton.jit
def order_key(x):
    """Whole numbers in the order of floats; both zeros are one number."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight(x):
    """exp(x) for x <= 0, to about a bit of float32: the hardware's own is less exact the farther x is from 0."""
    x = tl.maximum(x, -120.0)
    whole = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - whole * 0.693359375) + whole * 2.12194440e-4
    return tl.exp(rest) * tl.exp2(whole)


@triton.jit
def noise_bits(key, ids):
    """SplitMix64 of a key and token ids, as in kvilt/sampling/noise.py."""
    bits = (ids + 1).to(tl.uint32).to(tl.uint64) * tl.full([], _GAMMA, tl.uint64) + key.to(tl.uint64, bitcast=True)
    bits = (bits ^ (bits >> 30)) * tl.full([], _MIX_1, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full([], _MIX_2, tl.uint64)
    return bits ^ (bits >> 31)


@triton.jit
def gumbel(bits):
    """Noise in float64 from 52 of 64 bits."""
    uniform = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def best_draw(x, ids, key, temperature):
    """The largest x / temperature plus noise, in float64, its id, and its score; among equals the lower id.

    For a uniform u and c = 1 - u the noise -log(-log(u)) is at most -log(c), and close to it where it is large. The
    exponent and the fraction of c bound its logarithm without computing it. So a bound in float32 names the few tokens
    that can win, mostly one, and only these get their noise in float64.
    """
    complement = (0x7FFFFFFF - (noise_bits(key, ids) >> 33).to(tl.int32)).to(tl.float32)  # times 2 ** 31, rounded down
    low_log = complement.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920929e-7 - 158.0  # not above log2(c)
    bounds = tl.where(x > -INFINITY, x * (1.0 / temperature) - low_log * 0.6931472, -INFINITY)
    bound = tl.max(bounds, 0)
    best, place = tl.full([], -INFINITY, tl.float64), tl.full([], BEYOND, tl.int32)
    score = tl.full([], -INFINITY, tl.float32)
    while (bound > -INFINITY) & (bound.to(tl.float64) + 1e-3 + 1e-6 * tl.abs(bound).to(tl.float64) >= best):
        own = tl.min(tl.where(bounds == bound, ids, BEYOND), 0)
        its = tl.div_rn(tl.max(tl.where(ids == own, x, -INFINITY), 0), temperature)
        value = its.to(tl.float64) + gumbel(noise_bits(key, own))
        better = (value > best) | ((value == best) & (own < place))
        place, best, score = tl.where(better, own, place), tl.where(better, value, best), tl.where(better, its, score)
        bounds = tl.where(ids == own, -INFINITY, bounds)
        bound = tl.max(bounds, 0)
    return best, place, score
