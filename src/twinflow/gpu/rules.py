# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The update rules for Triton, element by element. The operations and their order are those of rules/*.py.

A rule takes the gradient g, the weight p, the states m and v (zeros if the rule has no such state) and the address of
its scalars. Divisions and square roots are correctly rounded. The kernel is compiled without fused multiply-add, so
that a product is rounded before it is added. Subnormal numbers are not flushed to zero by the hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinflow.gpu.codecs import bits, is_nan, value

TINY_BITS = tl.constexpr(27 << 23)  # 2**-100, as in rules/rules.py


@triton.jit
def flush(x):
    """`x` with all values below 2**-100 in magnitude replaced by +0. NaN stays."""
    u = bits(x)
    return value(tl.where((u & 0x7FFFFFFF) < TINY_BITS, 0, u))


@triton.jit
def scalar(hyper, INDEX: tl.constexpr):
    """One of the scalars of the rule. The scalars are stored as fp32 bits in a table of integers."""
    return tl.load(hyper + INDEX).to(tl.float32, bitcast=True)


@triton.jit
def adam(g, p, m, v, hyper, COUPLED: tl.constexpr):
    """Adam (COUPLED: weight decay is added to the gradient) and AdamW (weight decay multiplies the weight)."""
    if COUPLED:
        l2 = scalar(hyper, 6)
        g = tl.where(l2 != 0.0, flush(g + l2 * p), g)
    m = flush(m + (g - m) * scalar(hyper, 0))
    v = flush(scalar(hyper, 1) * v + (scalar(hyper, 2) * g) * g)
    move = scalar(hyper, 4) * tl.math.div_rn(m, tl.math.sqrt_rn(v) + scalar(hyper, 3))
    if not COUPLED:
        p = p * scalar(hyper, 5)
    return flush(p - move), m, v


@triton.jit
def adagrad(g, p, v, hyper):
    """Adagrad with L2 weight decay."""
    g = flush(g + scalar(hyper, 2) * p)
    v = flush(v + g * g)
    return flush(p - scalar(hyper, 1) * tl.math.div_rn(g, tl.math.sqrt_rn(v) + scalar(hyper, 0))), v


@triton.jit
def lion(g, p, m, hyper):
    """Lion. If the direction is NaN, the weight becomes NaN."""
    lr = scalar(hyper, 2)
    difference = g - m
    direction = flush(m + difference * scalar(hyper, 0))
    u = bits(direction)
    move = tl.where(is_nan(u) | (u == 0), direction, tl.where(u < 0, -lr, lr))
    return flush(p * scalar(hyper, 3) - move), flush(m + difference * scalar(hyper, 1))


@triton.jit
def sgd(g, p, m, hyper):
    """SGD. The weight is computed in fp64, and so is the momentum, except in the plain form of SGD (rules/rules.py)."""
    keep, l2, nesterov = scalar(hyper, 1), scalar(hyper, 3), scalar(hyper, 4)
    weight = p.to(tl.float64)
    momentum, lr = scalar(hyper, 0).to(tl.float64), scalar(hyper, 2).to(tl.float64)
    if (keep == 1.0) & (l2 == 0.0) & (nesterov == 0.0):
        m = flush(scalar(hyper, 0) * m + g)
        direction = m.to(tl.float64)
    else:
        grad = g.to(tl.float64) + l2.to(tl.float64) * weight
        exact = momentum * m.to(tl.float64) + keep.to(tl.float64) * grad
        m = flush(exact.to(tl.float32))
        direction = tl.where(nesterov != 0.0, grad + momentum * exact, exact)
    return flush((weight - lr * direction).to(tl.float32)), m


@triton.jit
def apply(g, p, m, v, hyper, RULE: tl.constexpr):
    """One step of the rule with the name RULE. Returns the new weight and states."""
    if RULE == "adamw" or RULE == "adam":
        p, m, v = adam(g, p, m, v, hyper, RULE == "adam")
    elif RULE == "adagrad":
        p, v = adagrad(g, p, v, hyper)
    elif RULE == "lion":
        p, m = lion(g, p, m, hyper)
    else:
        tl.static_assert(RULE == "sgd")
        p, m = sgd(g, p, m, hyper)
    return p, m, v
