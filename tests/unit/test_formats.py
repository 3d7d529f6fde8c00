# SPDX-License-Identifier: Apache-2.0
"""State formats: exactness of the split master, nearest and stochastic rounding, and what they do over many steps."""

from __future__ import annotations

import pytest
import torch
from support import OPTIONS

from twinflow import native
from twinflow.rules import RULES
from twinflow.rules.formats import (
    decode_e5m3,
    encode_e4m3,
    encode_e5m3,
    join,
    random_bits,
    rounding_key,
    rounds_to,
    split,
    to_bf16,
    to_bf16_stochastic,
)
from twinflow.rules.segment import Segment, decode_master, decode_state, new_store


def assert_split_is_exact(bits: torch.Tensor) -> None:
    values = bits.view(torch.float32)
    upper, lower = native.split(values)
    back = native.join(upper, lower)
    nan = values.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], bits[~nan])
    assert back[nan].isnan().all()
    assert upper[nan].isnan().all()
    finite = values.abs() < 3.38e38
    assert torch.equal(upper[finite].isfinite(), torch.ones(int(finite.sum()), dtype=torch.bool))


def test_split_master_is_exact_on_every_upper_half() -> None:
    lowers = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234, 0xABCD], dtype=torch.int64)
    patterns = (torch.arange(2**16)[:, None] << 16 | lowers).flatten()
    assert_split_is_exact(torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32))


@pytest.mark.slow
def test_split_master_is_exact_for_all_patterns() -> None:
    step = 2**24
    for start in range(-(2**31), 2**31, step):
        assert_split_is_exact(torch.arange(start, start + step, dtype=torch.int64).to(torch.int32))


def test_split_reference_equals_the_kernel() -> None:
    bits = torch.randint(-(2**31), 2**31, (1_000_001,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = bits.view(torch.float32)
    for a, b in zip(split(values), native.split(values), strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
    assert torch.equal(join(*split(values)).view(torch.int32), native.join(*native.split(values)).view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adopted_values_are_those_of_the_reference(dtype: torch.dtype) -> None:
    """Every upper half with lower halves around ties, beside values that are equal, next to them, or anything."""
    lowers = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    patterns = (torch.arange(2**16)[:, None] << 16 | lowers).flatten()
    master = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)
    shuffled = master[torch.randperm(len(master), generator=torch.Generator().manual_seed(0))]
    for values in (master, split(master)[0].float(), master.nextafter(torch.tensor(0.0)), -master, shuffled):
        given = values.to(dtype)
        wanted = torch.where(rounds_to(master, given), master, given.float())
        found = master.clone()
        native.adopt(found, given)
        same = (found.view(torch.int32) == wanted.view(torch.int32)) | (found.isnan() & wanted.isnan())
        assert same.all()
    assert not torch.equal(found.nan_to_num(), master.nan_to_num())  # the shuffled values are not the old ones


def test_upper_half_is_the_nearest_bf16() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    upper, _ = split(values)
    assert ((upper.float() - values).abs() <= (values.to(torch.bfloat16).float() - values).abs()).all()


def test_bf16_nearest_equals_torch() -> None:
    values = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = values[~values.isnan()]
    assert torch.equal(to_bf16(values).view(torch.int16), values.to(torch.bfloat16).view(torch.int16))
    assert to_bf16(torch.tensor([float("nan")])).isnan().all()


def test_random_bits_are_uniform_and_independent_of_the_cut() -> None:
    key = rounding_key(3, 4)
    bits = random_bits(0, 1 << 20, key)
    assert bits.min() >= 0
    assert bits.max() <= 0xFFFF
    counts = torch.bincount(bits >> 8, minlength=256).double()
    chi2 = ((counts - 4096) ** 2 / 4096).sum().item()
    assert chi2 < 400, chi2  # 255 degrees of freedom: mean 255, standard deviation 23
    assert torch.equal(random_bits(1280, 256, key), bits[1280 : 1280 + 256])
    over_steps = torch.stack([random_bits(0, 512, rounding_key(step, 9)) for step in range(3000)]).double() / 65536
    assert (over_steps.mean(0) - 0.5).abs().max() < 0.03  # 5.7 standard deviations of a mean of 3000
    centred = over_steps - 0.5
    neighbours = (centred[:, 1:] * centred[:, :-1]).mean(0) * 12
    in_time = (centred[1:] * centred[:-1]).mean(0) * 12
    assert neighbours.abs().max() < 0.12
    assert in_time.abs().max() < 0.12


def test_stochastic_bf16_keeps_the_mean_and_leaves_exact_numbers_alone() -> None:
    exact = torch.rand(1000, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).float()
    assert torch.equal(to_bf16_stochastic(exact, 0, (1, 2)).float(), exact)
    value = torch.full((100_096,), 1.0 + 1.0 / 512)  # a quarter of the way to the next bf16
    rounded = to_bf16_stochastic(value, 0, rounding_key(1, 1)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 1.0 / 128}
    assert rounded.mean().item() == pytest.approx(value[0].item(), abs=1e-4)
    largest = torch.tensor([3.4e38, float("inf"), float("nan")])
    assert to_bf16_stochastic(largest, 0, (0xFFFF, 0xFFFF)).float().isfinite().tolist() == [True, False, False]


def test_e4m3_is_one_of_the_two_numbers_of_torchs_float8_around_it() -> None:
    values = torch.randn(128 * 50, generator=torch.Generator().manual_seed(3)).view(50, 128)
    values = (values * torch.logspace(-12, 12, 50)[:, None]).flatten()
    codes, scales = encode_e4m3(values, 0, rounding_key(1, 2))
    ratio = (values.double() / scales.double().repeat_interleave(128)).clamp(-448, 448)
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    upper = torch.bucketize(ratio.abs() - 1e-5, numbers).clamp(max=126)
    lower = torch.where(numbers[upper] > ratio.abs() + 1e-5, upper - 1, upper)
    found = (codes & 0x7F).long()
    assert ((found == lower) | (found == upper)).all()
    assert (found != upper).float().mean() > 0.3
    assert torch.equal((codes >> 7).bool(), values.signbit())
    assert (codes & 0x7F).max() == 126  # 448, the largest


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6, 1e-8])
def test_e5m3_keeps_the_mean(spread: float) -> None:
    """Within a block, values down to 1e-8 of the largest keep their mean; no positive value becomes zero."""
    block = torch.full((128 * 2000,), spread)
    block[::128] = 1.0
    codes, scales = encode_e5m3(block, 0, rounding_key(1, 2))
    decoded = decode_e5m3(codes, scales)
    others = decoded[torch.arange(block.numel()) % 128 != 0]
    assert others.mean().item() == pytest.approx(spread, rel=0.01)
    assert codes.min() >= 1
    assert codes.max() <= 247


def test_e5m3_zero_stays_zero_and_tiny_stays_positive() -> None:
    values = torch.zeros(128)
    values[0], values[1], values[2] = 1.0, 1e-30, 1e-14
    codes, scales = encode_e5m3(values, 0, (5, 6))
    assert codes[1] == 1
    assert codes[3:].max() == 0
    assert decode_e5m3(codes, scales)[0].item() == pytest.approx(1.0, rel=0.07)
    empty_codes, empty_scales = encode_e5m3(torch.zeros(300), 0, (5, 6))
    assert empty_codes.max() == 0
    assert empty_scales.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_variance_follows_a_falling_gradient(format: str) -> None:
    """b2 = 0.999, gradients fall 10x after 1,500 steps: after 6,000 steps v is within 5% of float64.

    Rounded to nearest, v would stay where it was (its decay is below half a unit in the last place): 100x too large.
    """
    rule, numel = RULES["adamw"], 128 * 64
    options = {**OPTIONS, "betas": (0.9, 0.999), "lr": 0.0}
    store = new_store(rule, format, torch.ones(numel), torch.ones(numel, dtype=torch.bfloat16))
    truth = torch.zeros(numel, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(numel, generator=generator) + 0.5
    signs = [(torch.randint(0, 2, (numel,), generator=generator) * 2 - 1).float() for _ in range(16)]
    for step in range(1, 6001):
        grad = base * signs[step % 16] * (1.0 if step <= 1500 else 0.1)
        native.update([Segment(rule, rule.hyper(options, step), grad, store, 1.0, rounding_key(step, 0))])
        truth.mul_(0.999).addcmul_(grad.double(), grad.double(), value=0.001)
        if step in (1500, 3000, 6000):
            v = decode_state(store, 1)
            assert v is not None
            assert v.double().mean().item() == pytest.approx(truth.mean().item(), rel=0.05), step
            # the denominators that the update divides by, element by element
            ratio = (v.double().sqrt() / truth.sqrt()).mean().item()
            assert ratio == pytest.approx(1.0, abs=0.05), step


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.95, 0.999)])
@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_an_element_that_loses_its_gradient_stops_moving(format: str, betas: tuple[float, float]) -> None:
    """As in fp32. Rounded to nearest, an int8 momentum would stop decaying while its variance goes on, and the weight
    would move by about the learning rate in each step for ever.
    """
    rule, lost = RULES["adamw"], torch.arange(128 * 4) % 8 == 0  # others of each block keep their gradient
    moved = {}
    for kind in ("fp32", format):
        store = new_store(rule, kind, torch.ones(len(lost)), torch.ones(len(lost), dtype=torch.bfloat16))
        options = {**OPTIONS, "betas": betas, "lr": 1e-3, "weight_decay": 0.0}
        for step in range(1, 801):
            grad = torch.where(lost & torch.tensor(step > 20), 0.0, 1.0)
            native.update([Segment(rule, rule.hyper(options, step), grad, store, 1.0, rounding_key(step, 0))])
        moved[kind] = (decode_master(store) - 1.0)[lost].abs().mean().item()
    assert moved[format] == pytest.approx(moved["fp32"], rel=0.5)


def test_rounding_to_nearest_would_freeze() -> None:
    """The same experiment with nearest rounding fails: what the test above would catch."""
    v, truth = torch.full((128,), 1.0).to(torch.bfloat16), 1.0
    for _ in range(4500):
        v = (v.float() * 0.999 + 0.001 * 0.01).to(torch.bfloat16)
        truth = truth * 0.999 + 0.001 * 0.01
    assert v.float().mean().item() > 10 * truth
