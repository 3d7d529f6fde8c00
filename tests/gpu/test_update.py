# SPDX-License-Identifier: Apache-2.0
"""The fused update on a GPU: the bits of the references there and of the host kernels here; and the fused gathering."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import gpu_update_support as support
import pytest
import torch
from support import OPTIONS

from twinflow.gpu import FusedUpdate, Numbers, Piece, collect, is_available
from twinflow.offload import pack_gradients
from twinflow.rules import RULES, reference
from twinflow.rules.formats import rounding_key
from twinflow.rules.segment import Segment, Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not is_available(), reason="needs CUDA and Triton"),
]
LARGE = (1, 1_000_003, 128, 127, 1024, 70_000, 333_333)  # pieces 1 and 3 are left out of the second step


@pytest.mark.parametrize("name", [case.name for case in support.DEFAULT])
def test_a_bucket_of_small_pieces(name: str) -> None:
    support.run_case(support.CASES[name], "cuda")


@pytest.mark.parametrize(("rule", "format"), support.RULE_FORMATS)
def test_a_bucket_of_large_pieces(rule: str, format: str) -> None:
    support.run_case(support.Case(rule, format, torch.bfloat16, torch.bfloat16), "cuda", LARGE)


@pytest.mark.parametrize(
    ("rule", "format"), [("adamw", "fp32"), ("adam", "int8"), ("adagrad", "bf16"), ("lion", "bf16")]
)
def test_any_bit_pattern_in_large_pieces(rule: str, format: str) -> None:
    support.run_case(support.Case(rule, format, torch.float32, torch.float32, "bits"), "cuda", LARGE)


@pytest.mark.parametrize("options", [{"max_programs": 7}, {"max_programs": 33, "tile": 1024}, {"tile": 4096}], ids=str)
@pytest.mark.parametrize(("rule", "format"), support.RULE_FORMATS)
def test_a_bounded_grid_changes_no_bit(
    rule: str, format: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "FusedUpdate", partial(FusedUpdate, **options))
    support.run_case(support.Case(rule, format, torch.bfloat16, torch.bfloat16), "cuda", LARGE)


COLLECTED = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "test_gpu_collect.py"))["CASES"]


@pytest.mark.parametrize("name", COLLECTED)
def test_gathered_and_measured_in_one_pass(name: str) -> None:
    """One norm to the last bit however gradients came, within 1e-6 of float64's."""
    COLLECTED[name]("cuda")


def test_rows_of_a_large_bucket() -> None:
    """The kernel's rows have the truth's bits, and the whole norm is that of float64."""
    flat, values = torch.zeros(1 << 26, device="cuda"), torch.randn((1 << 26) - 77, device="cuda") * 1e-3
    rows = collect.new_rows(flat.numel(), flat.device)
    flat[: values.numel()] = values
    collect.put_norms(rows, 0, flat)
    assert torch.equal(rows, collect.row_norms(flat))
    norms = torch.zeros(2, dtype=torch.float64, device="cuda")
    collect.norm_of(norms[0], rows)
    pack_gradients.measure(norms[1], flat)
    assert norms[0] == norms[1]
    torch.testing.assert_close(norms[0], values.double().norm(), rtol=1e-6, atol=0)


def test_an_offset_that_32_bits_do_not_hold() -> None:
    """Sixteen bits for each state and gradient: two buffers of more than 4 GiB."""
    offset, numel, rule = 2**31 + 384, 5000, RULES["lion"]
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of GPU memory")
    grads = torch.empty(offset + numel, dtype=torch.bfloat16, device="cuda")
    state = torch.empty_like(grads)
    grads[offset:].normal_()
    state[offset:].normal_()
    weight = torch.randn(numel, device="cuda")
    numbers = Numbers(rule.hyper(OPTIONS, 1), 0.5, rounding_key(1, 0))
    truth = Store("bf16", weight.clone(), None, (state[offset:].clone(), None))
    reference.update([Segment(rule, numbers.hyper, grads[offset:], truth, numbers.factor, numbers.key)])
    FusedUpdate(rule, [Piece(weight, offset, numel, 0)])(
        Store("bf16", weight, None, (state, None)), grads, {0: numbers}
    )
    support.equal(weight, truth.master, "weight")
    assert truth.states[0] is not None
    support.equal(state[offset:], truth.states[0], "state")


def test_it_runs_on_the_current_stream() -> None:
    """Queued behind slow work of the same stream that makes its gradients, it must wait for them."""
    rule, numel = RULES["adamw"], 1 << 20
    numbers = {0: Numbers(rule.hyper(OPTIONS, 1), 1.0, (1, 2))}
    weights = [torch.ones(numel, device="cuda") for _ in range(2)]
    states = [(torch.zeros(numel, device="cuda"), torch.zeros(numel, device="cuda")) for _ in range(2)]
    stream, grads = torch.cuda.Stream(), torch.full((numel,), float("nan"), device="cuda")
    updates = [FusedUpdate(rule, [Piece(weight, 0, numel, 0)]) for weight in weights]
    updates[0](Store("fp32", weights[0], None, states[0]), torch.ones_like(grads), numbers)  # compiled, and the truth
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        grads.fill_(1.0)
        updates[1](Store("fp32", weights[1], None, states[1]), grads, numbers)
    assert not stream.query()  # nothing waited on the host
    stream.synchronize()
    assert torch.equal(weights[0], weights[1])
