# SPDX-License-Identifier: Apache-2.0
"""Variants of the kernels of attention: tiles that come by descriptors.

`TRITON_INTERPRET=1 python tests/attention_variants_support.py` prints a line of JSON for each: its name, and what went
wrong. It is a process of its own, like attention_support.py, whose cases it runs too where they are named; without the
variable it runs them on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import attention_support as support
from attention_support import Case
from interpreter_support import run_cases

from twinflow.attention.extras import Extras, check_call
from twinflow.attention.launch import Call
from twinflow.attention.operators import attend
from twinflow.attention.reference import dense_attention
from twinflow.attention.tuning import Tuning, Tunings

HEAD_DIM = 16
BY_DESCRIPTORS = Tuning(32, 32, 4, 2, tma=True)


@dataclass(frozen=True)
class Variant:
    """A case with a tuning for all kernels, which they are to use."""

    case: Case
    length: int
    tuning: Tuning


VARIANTS = {
    "descriptors": Variant(Case("random", 32, "fp16", heads=(1, 1), batch=2), 96, BY_DESCRIPTORS),
    "descriptors, shared heads, cut": Variant(
        Case("longformer", 32, "bf16", heads=(2, 1), is_cut=True), 96, BY_DESCRIPTORS
    ),
    "descriptors, cached keys": Variant(Case("dense", 32, "fp16", heads=(1, 1), cached=32), 96, BY_DESCRIPTORS),
    "descriptors, one stage": Variant(
        Case("sliding", 32, "fp16", heads=(2, 2)), 96, replace(BY_DESCRIPTORS, num_stages=1)
    ),
}


def run(variant: Variant, device: str) -> None:
    """The constants are those of the variant, and results those of the truth in float64."""
    case = variant.case
    layout = support.make_layout(case, variant.length)
    inputs = support.make_inputs(case, variant.length, HEAD_DIM, device)
    tunings = Tunings(variant.tuning, variant.tuning, variant.tuning)
    tunings = replace(tunings, min_piece=1) if case.is_cut else tunings
    extras = Extras(**inputs.options)
    q, k, v = inputs.q, inputs.k, inputs.v
    call = Call(layout, extras, check_call(q, k, v, layout, extras), q.dtype, q.device, tunings)
    for others, by_keys in (((k, v), False), ((q, inputs.grad), True)):
        _, plan, shape = call.prepare(variant.tuning, others, by_keys)
        assert shape.TMA
        assert (plan.num_slots > 0) == case.is_cut
    ours = support.results(attend(q, k, v, layout, extras, "triton", tunings), inputs)
    exact = inputs.in_double()
    truth = support.results(dense_attention(exact.q, exact.k, exact.v, layout, **exact.options), exact)
    for name, expected in truth.items():
        error = (ours[name].double() - expected).abs().max().item()
        limit = support.TOLERANCE[case.dtype] * max(expected.abs().max().item(), 0.1)
        assert error <= limit, f"{name}: {error:.2e} > {limit:.2e}"


if __name__ == "__main__":
    cases = {name: partial(support.run_case, case) for name, case in support.CASES.items()}
    run_cases(cases | {name: partial(run, variant) for name, variant in VARIANTS.items()})
