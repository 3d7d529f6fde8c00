# SPDX-License-Identifier: Apache-2.0
"""The native kernels against their torch references, bit for bit; and against themselves however they are run."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    CELLS,
    OPTIONS,
    as_integers,
    assert_same_bits,
    buffers,
    cell_name,
    clone,
    make_gradient,
    make_store,
    pairwise,
    poisoned,
)
from twin_support import matrix_but

from twinflow import native
from twinflow.rules import RULES, Rule, formats, reference
from twinflow.rules.formats import rounding_key
from twinflow.rules.rule import Hyper
from twinflow.rules.segment import FLOATS, Segment, Store, new_store

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not installed")
THREADS = sorted({1, 2, 3, os.cpu_count() or 4})


@pytest.fixture(autouse=True)
def _restore() -> object:
    isa, threads = native.isa(), native.get_threads()
    yield
    native.set_isa(isa)
    native.set_threads(threads)


def check_cell(
    cell: tuple[str, str, torch.dtype, torch.dtype | None],
    numel: int,
    seed: int,
    offset: int = 0,
    split: bool | None = None,
    master: str = "fp32",
) -> None:
    """In place and out of place against the reference; `offset` moves every buffer off its alignment."""
    name, format, grad_dtype, weight_dtype = cell
    rule = RULES[name]
    step = 1 + seed % 5
    options = {**OPTIONS, "nesterov": seed % 2 == 1, "weight_decay": 0.1 * (seed % 3)}
    hyper = rule.hyper(options, step)
    factor = (1.0, 0.37, 2.0**-16, 3.0)[seed % 4]
    store = make_store(rule, format, weight_dtype, numel + 128 * offset, seed, split, master).narrow(
        128 * offset, numel
    )
    if offset:  # the same values one element further into larger buffers
        store = shifted(store)
    grad = make_gradient(numel + offset, grad_dtype, seed)[offset:]
    first_index = 128 * (seed % 7)
    key = rounding_key(step, seed)
    expected, in_place, target = clone(store), clone(store), poisoned(store)
    if offset:
        in_place, target = shifted(in_place), shifted(target)
    before = clone(store)
    reference.update([Segment(rule, hyper, grad, expected, factor, key, first_index)])
    native.update([Segment(rule, hyper, grad, in_place, factor, key, first_index)])
    assert_same_bits(expected, in_place, "in place:")
    native.update([Segment(rule, hyper, grad, store, factor, key, first_index, target)])
    assert_same_bits(expected, target, "out of place:")
    assert_same_bits(before, store, "the store of an out-of-place update:")


def shifted(store: Store) -> Store:
    def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        larger = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        larger[1:].copy_(tensor)
        return larger[1:]

    master = move(store.master)
    assert master is not None
    states, scales = ((move(pair[0]), move(pair[1])) for pair in (store.states, store.scales))
    return Store(store.format, master, move(store.weight), states, scales)


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_every_cell_equals_its_reference(cell: tuple[str, str, torch.dtype, torch.dtype | None]) -> None:
    for seed, numel in enumerate((0, 1, 5, 127, 128, 129, 1023, 4096, 40_001)):
        check_cell(cell, numel, seed, offset=seed % 2)


# What no format has by itself: a split master beside fp32 states, a whole one of a bf16 weight beside compact ones.
OTHER_MASTERS = [(cell, cell[1] == "fp32") for cell in CELLS if cell[3] == torch.bfloat16]


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize(("cell", "split"), OTHER_MASTERS, ids=[cell_name(cell) for cell, _ in OTHER_MASTERS])
def test_the_other_master_equals_its_reference(
    cell: tuple[str, str, torch.dtype, torch.dtype | None], split: bool, isa: str
) -> None:
    native.set_isa(isa)
    for seed, numel in enumerate((0, 1, 5, 127, 128, 129, 1023, 1025, 4096, 40_001)):
        check_cell(cell, numel, seed, seed % 2, split)


# Weights without master: every rule and format, with the dtypes of gradients in turn.
NO_MASTERS = [cell for i, cell in enumerate(c for c in CELLS if c[3] == torch.bfloat16) if i % 3 == i // 3 % 3]


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("cell", NO_MASTERS, ids=cell_name)
def test_weights_without_master_equal_their_reference(
    cell: tuple[str, str, torch.dtype, torch.dtype | None], isa: str
) -> None:
    native.set_isa(isa)
    for seed, numel in enumerate((0, 1, 5, 127, 128, 129, 1023, 1025, 4096, 40_001)):
        check_cell(cell, numel, seed, seed % 2, master="none")


@pytest.mark.parametrize("isa", native.isa_names())
def test_weights_without_master_of_any_numbers(isa: str) -> None:
    """NaN, infinities, the largest bf16 numbers and subnormal numbers, with and without a step."""
    native.set_isa(isa)
    for name, rule in RULES.items():
        for format in rule.formats:
            for lr in (0.0, 1e-2):
                store = make_store(rule, format, torch.bfloat16, 5003, 1, master="none")
                store.master.copy_(any_numbers(5003, 7).bfloat16())
                expected, grad = clone(store), make_gradient(5003, torch.bfloat16)
                hyper, key = rule.hyper({**OPTIONS, "lr": lr}, 3), rounding_key(3, 1)
                reference.update([Segment(rule, hyper, grad, expected, 1.0, key)])
                native.update([Segment(rule, hyper, grad, store, 1.0, key)])
                same_but_for_nan(expected, store)
                nan = as_integers(store.master)[store.master.isnan()]
                assert (nan == 0x7FC0).all(), name


@pytest.mark.matrix
@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_matrix(cell: tuple[str, str, torch.dtype, torch.dtype | None], threads: int, isa: str) -> None:
    native.set_isa(isa)
    native.set_threads(threads)

    @settings(max_examples=12, deadline=None)
    @given(st.integers(0, 70_000), st.integers(0, 10_000), st.integers(0, 1))
    def run(numel: int, seed: int, offset: int) -> None:
        check_cell(cell, numel, seed, offset)

    run()
    check_cell(cell, 1_000_000, 3)


PAIRS = pairwise(list(RULES), formats.FORMATS, FLOATS, (None, *FLOATS), THREADS)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_sizes_threads_and_variants(data: st.DataObject) -> None:
    name, format, grad, weight, threads = data.draw(st.sampled_from(PAIRS))
    native.set_isa(data.draw(st.sampled_from(native.isa_names())))
    native.set_threads(threads)
    cell = (name, format if format in RULES[name].formats else "bf16", grad, weight)
    numel = data.draw(st.one_of(st.integers(0, 3000), st.integers(3000, 100_000)))
    split = data.draw(st.sampled_from([None, True, False])) if weight == torch.bfloat16 else None
    check_cell(cell, numel, data.draw(st.integers(0, 10_000)), data.draw(st.integers(0, 1)), split)


@pytest.mark.parametrize("format", formats.FORMATS)
@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("threads", THREADS)
def test_threads_and_variants_change_no_bit(format: str, isa: str, threads: int) -> None:
    rule, numel = RULES["adamw"], 300_001
    grad, start = make_gradient(numel, torch.bfloat16), make_store(rule, format, torch.bfloat16, numel)
    results = []
    for setting in ((isa, threads), (native.isa_names()[-1], 1)):
        native.set_isa(setting[0])
        native.set_threads(setting[1])
        store = clone(start)
        for step in (1, 2, 3):
            native.update([Segment(rule, rule.hyper(OPTIONS, step), grad, store, 0.5, rounding_key(step, 0))])
        results.append(store)
    assert_same_bits(*results)


def test_cutting_a_parameter_changes_no_bit() -> None:
    rule, numel = RULES["adamw"], 10_000
    hyper, key = rule.hyper(OPTIONS, 2), rounding_key(2, 5)
    for format in rule.formats:
        whole = make_store(rule, format, torch.bfloat16, numel)
        cut, grad = clone(whole), make_gradient(numel, torch.bfloat16)
        native.update([Segment(rule, hyper, grad, whole, 1.0, key)])
        pieces = [(0, 128), (128, 3840), (3968, 6032)]
        native.update(
            [Segment(rule, hyper, grad[a : a + n], cut.narrow(a, n), 1.0, key, first_index=a) for a, n in pieces]
        )
        assert_same_bits(whole, cut, format)


def test_many_segments_with_their_own_rules_in_one_call() -> None:
    segments, expected = [], []
    for i, (name, format, grad_dtype, weight) in enumerate(CELLS * 3):
        rule, numel = RULES[name], (i * 37) % 700
        store, grad = make_store(rule, format, weight, numel, i), make_gradient(numel, grad_dtype, i)
        hyper, key = rule.hyper({**OPTIONS, "lr": 1e-3 * (i + 1)}, i + 1), rounding_key(i, i)
        twin = clone(store)
        reference.update([Segment(rule, hyper, grad, twin, 0.5, key)])
        expected.append(twin)
        segments.append(Segment(rule, hyper, grad, store, 0.5, key))
    native.update(segments)
    for segment, twin in zip(segments, expected, strict=True):
        assert_same_bits(twin, segment.store)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50_000), min_size=0, max_size=5), st.sampled_from(FLOATS), st.integers(0, 1000))
def test_sum_of_squares(numels: list[int], dtype: torch.dtype, seed: int) -> None:
    tensors = [make_gradient(n, dtype, seed + i) for i, n in enumerate(numels)]
    expected = reference.sum_squares(tensors)
    for isa in native.isa_names():
        for threads in THREADS:
            native.set_isa(isa)
            native.set_threads(threads)
            assert native.sum_squares(tensors) == expected
    for tensor, value in zip(tensors, expected, strict=True):
        assert value == pytest.approx(tensor.double().square().sum().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_sum_of_squares_reports_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    for at in (0, 17, 16_383, 16_384, 99_999):
        tensor = torch.ones(100_000, dtype=dtype)
        tensor[at] = bad
        first, second = native.sum_squares([tensor, torch.ones(5, dtype=dtype)])
        assert not torch.tensor(first).isfinite()
        assert second == 5.0


def test_a_large_gradient_does_not_overflow_the_sum() -> None:
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    assert torch.tensor(native.sum_squares([largest])[0], dtype=torch.float64).isfinite()


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("isa", native.isa_names())
def test_cast_equals_torch(source: torch.dtype, target: torch.dtype, isa: str) -> None:
    native.set_isa(isa)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    values = (
        patterns.view(source) if source != torch.float32 else torch.arange(-(2**31), 2**31, 65521).int().view(source)
    )
    values = values[~values.isnan()]
    into = torch.empty(values.numel(), dtype=target)
    native.cast(into, values)
    assert torch.equal(as_integers(into), as_integers(values.to(target)))
    native.cast(into[:3], torch.tensor([float("nan")] * 3, dtype=source))
    assert into[:3].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_accumulate_equals_torch(dtype: torch.dtype) -> None:
    for numel in (0, 1, 1000, 70_001):
        total, values = torch.randn(numel), make_gradient(numel, dtype)
        expected = total + values.float()
        native.accumulate(total, values)
        assert torch.equal(total, expected)


def test_nothing_that_is_not_finite_is_lost() -> None:
    """A NaN gradient makes NaN weights in every format and rule: it is never rounded away."""
    for name, format, grad_dtype, weight in CELLS:
        rule = RULES[name]
        store, grad = make_store(rule, format, weight, 300), make_gradient(300, grad_dtype)
        as_integers(grad)[7] = -1  # all ones: the NaN that overflows when it is rounded carelessly
        native.update([Segment(rule, rule.hyper(OPTIONS, 3), grad, store)])
        result = store.weight if store.weight is not None else store.master
        assert result[7].isnan(), cell_name((name, format, grad_dtype, weight))


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
def test_subnormals_in_the_state_are_flushed_like_in_the_reference(format: str) -> None:
    """With flush mode on (ordinary numbers) and off (a step size above 1), the bits are the reference's."""
    for lr in (1e-2, 50.0):
        for name, rule in RULES.items():
            if format not in rule.formats:
                continue
            numel = 2000
            store = make_store(rule, format, torch.float32, numel)
            tiny = torch.tensor(
                [0.0, 1e-45, -1e-45, 1e-40, -1e-39, 2.0**-126, -(2.0**-120), 2.0**-101, 2.0**-100, 1e-3]
            )
            pick = torch.randint(len(tiny), (4, numel), generator=torch.Generator().manual_seed(5))
            store.master.copy_(tiny[pick[0]])
            if format == "fp32":
                for which, state in enumerate(store.states):
                    if state is not None:
                        state.copy_(tiny[pick[1 + which]].abs() if which else tiny[pick[1]])
            grad = tiny[pick[3]]
            for decay in (0.0, 0.1):
                expected, actual = clone(store), clone(store)
                hyper = rule.hyper({**OPTIONS, "lr": lr, "weight_decay": decay}, 7)
                reference.update([Segment(rule, hyper, grad, expected, 0.7)])
                native.update([Segment(rule, hyper, grad, actual, 0.7)])
                assert_same_bits(expected, actual, f"{name} lr {lr} decay {decay}")


def same_but_for_nan(a: Store, b: Store) -> None:
    """Bit for bit, except that any NaN equals any NaN: their sign and payload differ between CPUs."""
    for name, x in buffers(a).items():
        y = buffers(b)[name]
        if x.is_floating_point():
            assert torch.equal(x.isnan(), y.isnan()), name
            x, y = x[~x.isnan()], y[~y.isnan()]
        assert torch.equal(as_integers(x), as_integers(y)), name


@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_gradients_that_are_not_finite_equal_the_reference(
    cell: tuple[str, str, torch.dtype, torch.dtype | None],
) -> None:
    name, format, grad_dtype, weight = cell
    rule = RULES[name]
    store, grad = make_store(rule, format, weight, 700), make_gradient(700, grad_dtype)
    grad[5], grad[200], grad[201], grad[699] = float("nan"), float("inf"), -float("inf"), float("nan")
    expected, actual = clone(store), clone(store)
    for step in (1, 2):
        hyper, key = rule.hyper(OPTIONS, step), rounding_key(step, 1)
        reference.update([Segment(rule, hyper, grad, expected, 1.0, key)])
        native.update([Segment(rule, hyper, grad, actual, 1.0, key)])
        same_but_for_nan(expected, actual)


SPLIT_RULES = [(name, momentum) for name in RULES for momentum in (0.9, 0.0) if name == "sgd" or momentum]


def any_numbers(numel: int, seed: int) -> torch.Tensor:
    """Bits at random: NaN, infinities and subnormals among them, every fourth a tie between two bf16 numbers."""
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(seed)).int()
    bits[::4] = bits[::4] & ~0xFFFF | 0x8000
    numbers = bits.view(torch.float32)
    numbers[1:9] = torch.tensor([math.nan, math.inf, -math.inf, 1e-45, -1e-39, 2.0**-100, -0.0, 3.3895314e38])
    bits[9:12] = torch.tensor([0x7FFFFFFF, -1, 0x7F800001])  # NaN that overflow, and one that looks like infinity
    return numbers


def split_pair(rule: Rule, values: torch.Tensor, momentum: float, seed: int) -> tuple[Store, Store, Hyper]:
    """The same fp32 state with a whole master and with a split one."""
    options = {**OPTIONS, "momentum": momentum, "weight_decay": 0.1 * (seed % 2), "lr": (1e-2, 0.0, 50.0)[seed % 3]}
    pair = []
    for split in (False, True):
        weight = torch.zeros(values.numel(), dtype=torch.bfloat16)
        store = new_store(rule, "fp32", values.clone(), weight, split=split)
        for which, state in enumerate(store.states):
            if state is not None:
                numbers = any_numbers(values.numel(), seed + 1 + which)
                state.copy_(numbers.abs() if which else numbers)
        pair.append(store if momentum else replace(store, states=(None, None)))
    return pair[0], pair[1], rule.hyper(options, 3)


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "momentum"), SPLIT_RULES)
def test_a_split_master_of_any_numbers(name: str, momentum: float, dtype: torch.dtype, isa: str) -> None:
    """In and out of place: the reference's bits, the whole master's numbers, and a weight whose ties go away from 0."""
    native.set_isa(isa)
    rule, numel = RULES[name], 5_003
    for seed in range(6):
        whole, store, hyper = split_pair(rule, any_numbers(numel, seed), momentum, seed)
        grad = make_gradient(numel, dtype, seed)
        grad[2000:2003] = torch.tensor([math.nan, math.inf, -math.inf])
        factor = (1.0, 0.37)[seed % 2]
        expected, target, before = clone(store), poisoned(store), clone(store)
        reference.update([Segment(rule, hyper, grad, expected, factor)])
        native.update([Segment(rule, hyper, grad, store, factor, target=target)])
        assert_same_bits(before, store, "the store of an out-of-place update:")
        native.update([Segment(rule, hyper, grad, store, factor)])
        native.update([Segment(rule, hyper, grad, whole, factor)])
        assert_same_bits(store, target, "in place and out of place:")
        same_but_for_nan(expected, store)
        assert store.weight is not None
        joined = formats.join(store.weight, store.master)
        same_but_for_nan(Store("fp32", whole.master), Store("fp32", joined))
        upper = formats.split(whole.master)[0]
        same_but_for_nan(Store("fp32", upper), Store("fp32", store.weight))
        assert whole.weight is not None
        ties = as_integers(whole.master) & 0xFFFF == 0x8000
        differs = as_integers(whole.weight) != as_integers(store.weight)
        assert not (differs & ~ties & ~joined.isnan()).any()
        if seed == 4:  # neither a step nor decay, so that the ties are still there
            assert differs.any()


@pytest.mark.parametrize("numel", [1, 7, 130, 1024, 3000])
def test_a_nan_in_a_split_master_is_the_only_one(numel: int) -> None:
    """One NaN, at each of some places: its tile is split again, and no other weight changes."""
    for name, momentum in SPLIT_RULES:
        rule = RULES[name]
        for at in {0, numel // 2, numel - 1}:
            store = make_store(rule, "fp32", torch.bfloat16, numel, split=True)
            store = store if momentum else replace(store, states=(None, None))
            hyper = rule.hyper({**OPTIONS, "momentum": momentum}, 3)
            grad, calm = torch.full((numel,), 0.25), clone(store)
            native.update([Segment(rule, hyper, grad, calm)])
            as_integers(grad)[at] = 0x7FFFFFFF
            native.update([Segment(rule, hyper, grad, store)])
            assert store.weight is not None
            assert calm.weight is not None
            assert store.weight.isnan().nonzero().tolist() == [[at]]
            assert store.master[at] == 0
            store.weight[at], store.master[at] = calm.weight[at], calm.master[at]
            assert torch.equal(store.weight, calm.weight)
            assert torch.equal(store.master, calm.master)


def test_flush_mode_is_left_where_it_would_change_a_bit() -> None:
    """Numbers near the flush threshold, and multipliers below the smallest normal number."""

    def check(name: str, changes: dict[str, object], factor: float, p: float, m: float, g: float) -> None:
        rule = RULES[name]
        store = make_store(rule, "fp32", None, 256)
        store.master.fill_(p)
        for state in store.states:
            if state is not None:
                state.fill_(m)
        expected, grad = clone(store), torch.full((256,), g)
        hyper = rule.hyper({**OPTIONS, **changes}, 5)
        reference.update([Segment(rule, hyper, grad, expected, factor)])
        native.update([Segment(rule, hyper, grad, store, factor)])
        assert_same_bits(expected, store, f"{name} {changes}")

    tie = 2.0**-103 + 2.0**-124 - 2.0**-126
    for name in ("sgd", "adam"):
        check(name, {"momentum": 0.5, "weight_decay": 2.0**-27}, 1.0, 1.5 * 2.0**-100, 2 * (2.0**-100 + 2.0**-123), tie)
    check("sgd", {}, 1e-40, 1.0, 1e-3, 1e30)
    check("sgd", {"lr": 1e-40}, 1.0, 1.0, 1e-3, 1e20)
    check("adamw", {"betas": (0.9, 1e-40)}, 1.0, 1.0, 1e35, 1e-3)


@pytest.mark.parametrize("isa", native.isa_names())
@pytest.mark.parametrize("decay", matrix_but([0.1], [0.0, 0.1]))
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("keep", matrix_but([0.7], [1.0, 0.7]))
def test_sgd_of_any_numbers_equals_its_reference(isa: str, decay: float, nesterov: bool, keep: float) -> None:
    """Bits at random, so of every magnitude; then tiny numbers, and a weight that decides between two neighbours."""
    native.set_isa(isa)
    rule, numel = RULES["sgd"], 60_000
    store = make_store(rule, "fp32", None, numel)
    momentum = store.states[0]
    assert momentum is not None
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(-(2**31), 2**31, (3, numel), generator=generator).int().view(torch.float32)
    exponents = torch.randint(-130, -85, (3, numel // 2), generator=generator)
    numbers[:, : numel // 2] = torch.randn(3, numel // 2, generator=generator) * 2.0**exponents
    tie = slice(0, 1000)  # lr * g is halfway between two fp32 numbers, so the subnormal weight decides
    for row, number in enumerate((1e-40, 0.0, 3 * 2.0**-99)):
        numbers[row, tie] = number
    for lr in (1e-3, 1.0 - 2.0**-23, 1.0 + 2.0**-23, 50.0):
        for factor in (1.0, 0.37, 3.0, 1e-40):
            store.master.copy_(numbers[0])
            momentum.copy_(numbers[1])
            expected, actual = clone(store), clone(store)
            options = {**OPTIONS, "lr": lr, "weight_decay": decay, "nesterov": nesterov, "dampening": 1.0 - keep}
            hyper = rule.hyper(options, 2)
            reference.update([Segment(rule, hyper, numbers[2], expected, factor)])
            native.update([Segment(rule, hyper, numbers[2], actual, factor)])
            same_but_for_nan(expected, actual)


def test_the_callers_flush_mode_does_not_matter() -> None:
    total, tiny, into = torch.zeros(1_000_000), torch.full((1_000_000,), 1e-39), torch.empty(1_000_000)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush mode")
    try:
        native.accumulate(total, tiny)
        native.cast(into, tiny)
    finally:
        torch.set_flush_denormal(False)
    assert (total != 0).all()
    assert (into != 0).all()
