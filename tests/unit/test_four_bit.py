# SPDX-License-Identifier: Apache-2.0
"""4-bit states and weights without master: rounding without bias, saved states, and what is refused."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from support import OPTIONS, as_integers, assert_same_bits, clone, make_store
from torch import Tensor, nn
from twin_support import assert_same, batch, matrix_but, quick_torch, snapshot

from twinflow.models.gpt import GPT, GPTConfig
from twinflow.offload.materialize import build
from twinflow.optim import twin_build
from twinflow.optim.host import HostAdamW
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.optim.twin_state import weight_reader
from twinflow.rules import RULES, reference
from twinflow.rules.formats import (
    MOMENT4_MAX,
    MOMENT_SALT,
    VARIANCE4_MAX,
    WEIGHT_SALT,
    decode_moment4,
    decode_variance4,
    encode_moment4,
    encode_variance4,
    random_bits,
    rounding_key,
    salted,
    to_bf16_weight,
)
from twinflow.rules.segment import Segment, decode_state, encode_saved, new_store

ADAMW = RULES["adamw"]
KEYS = [rounding_key(step, 3) for step in range(400)]


@pytest.fixture(autouse=True)
def quick() -> Any:
    with quick_torch():
        yield


# Codes.


def test_the_codes_of_both_states_are_their_values() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    moments, variances = decode_moment4(codes, torch.ones(1)), decode_variance4(codes << 4, torch.ones(1))
    positive = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    assert moments.tolist() == [*positive, *(-x for x in positive)]
    assert variances.tolist() == [2.0**i for i in range(8)] + [256, 384, 512, 768, 1024, 1536, 2048, 3072]
    assert (moments.max(), variances.max()) == (MOMENT4_MAX, VARIANCE4_MAX)


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4, 0.1, 1e-2, 1e-3, 1e-4])
def test_rounding_keeps_the_mean(share: float) -> None:
    """Over many steps and elements, the mean of the decoded values is the value, between codes and below the least."""
    block = torch.full((128 * 4,), share)
    block[::128] = 1.0
    pick = torch.arange(block.numel()) % 128 != 0
    moments, variances = [], []
    for key in KEYS:
        codes, scales = encode_moment4(-block, 0, key)
        moments.append(-decode_moment4(codes, scales)[pick])
        codes, scales = encode_variance4(block, 0, key)
        variances.append(decode_variance4(codes << 4, scales)[pick])
    assert torch.stack(moments).mean().item() == pytest.approx(share, rel=0.05)
    least = 1.0 / VARIANCE4_MAX  # there is no 0 below it
    assert torch.stack(variances).mean().item() == pytest.approx(max(share, least), rel=0.03)


def test_zero_stays_zero_and_no_variance_is_zero() -> None:
    values = torch.zeros(128)
    values[0], values[1], values[2] = 1.0, 1e-30, -0.0
    codes, scales = encode_moment4(values, 0, (5, 6))
    assert decode_moment4(codes, scales)[1:].abs().max() == 0
    codes, scales = encode_variance4(values.abs(), 0, (5, 6))
    decoded = decode_variance4(codes << 4, scales)
    assert decoded[1:].tolist() == [decoded[1].item()] * 127
    assert 0 < decoded[1] < 4e-4
    for encode in (encode_moment4, encode_variance4):
        codes, scales = encode(torch.zeros(300), 0, (5, 6))
        assert codes.max() == 0
        assert scales.tolist() == [0.0] * 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite_is_read_as_nan(bad: float) -> None:
    values = torch.ones(256)
    values[3] = bad
    for encode, decode, shift in ((encode_moment4, decode_moment4, 0), (encode_variance4, decode_variance4, 4)):
        codes, scales = encode(values, 0, (1, 2))
        decoded = decode(codes << shift, scales)
        assert decoded[:128].isnan().all()
        assert decoded[128:].isfinite().all()


def test_the_values_of_an_element_are_rounded_independently() -> None:
    keys = [(1234 * i + 5, 99 * i) for i in range(400)]
    rows = [
        torch.cat([random_bits(0, 512, salted(key, salt)) for key in keys]).double() / 65536 - 0.5
        for salt in ((0, 0), MOMENT_SALT, WEIGHT_SALT)
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs((rows[a] * rows[b]).mean() * 12) < 0.01  # 4.5 standard deviations
        assert abs((rows[a][1:] * rows[b][:-1]).mean() * 12) < 0.01


def test_weights_are_rounded_without_bias() -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    assert torch.equal(to_bf16_weight(exact, 0, (1, 2)).float(), exact)
    for sign in (1.0, -1.0):
        value = torch.full((100_096,), sign * (1.0 + 1.0 / 512))  # a quarter of the way to the next bf16
        rounded = to_bf16_weight(value, 0, rounding_key(1, 1)).float()
        assert set(rounded.unique().tolist()) == {sign * 1.0, sign * (1.0 + 1.0 / 128)}
        assert rounded.mean().item() == pytest.approx(value[0].item(), abs=1e-4)
    large = torch.tensor([3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan")])
    rounded = to_bf16_weight(large, 0, (0xFFFF, 0xFFFF))
    assert rounded.isfinite().tolist() == [True, True, False, False, False]
    assert as_integers(rounded)[4] == 0x7FC0


def test_small_updates_are_not_lost() -> None:
    """Steps of a hundredth of the distance between two bf16 numbers: rounded to nearest, no weight would ever move."""
    options = {**OPTIONS, "lr": 1e-5, "weight_decay": 0.0, "betas": (0.9, 0.999)}
    numel, num_steps = 128 * 32, 500
    store = new_store(ADAMW, "4bit", torch.full((numel,), 0.15), torch.empty(numel).bfloat16(), master="none")
    start = store.master.float().mean()
    for step in range(1, num_steps + 1):
        grad = torch.ones(numel)
        reference.update([Segment(ADAMW, ADAMW.hyper(options, step), grad, store, 1.0, rounding_key(step, 0))])
    moved = (start - store.master.float().mean()).item()
    assert moved == pytest.approx(num_steps * 1e-5, rel=0.05)


def test_saved_states_are_loaded_with_the_same_codes() -> None:
    store = make_store(ADAMW, "4bit", torch.bfloat16, 5003, master="none")
    into = clone(store)
    assert into.states[0] is not None
    into.states[0].fill_(0xA5)
    for which in (0, 1):
        values, scale = decode_state(store, which), store.scales[which]
        assert values is not None
        assert scale is not None
        encode_saved(into, which, values, scale)
    assert_same_bits(store, into)


# Training.

CONFIG = GPTConfig(vocab_size=64, context=16, num_layers=2, hidden=36, num_heads=2)  # sizes that are no multiple of 128


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).bfloat16()


def trained(model: Any = None, num_steps: int = 4, **options: Any) -> dict[str, Tensor]:
    with closing(TwinOptimizer(model or gpt(), lr=1e-2, host_threads=1, **options)) as optimizer:
        assert optimizer.model is not None
        run(optimizer.model, optimizer, range(num_steps))
        optimizer.flush()
        return snapshot(optimizer.model, optimizer)


def run(model: nn.Module, optimizer: TwinOptimizer, steps: range) -> None:
    for step in steps:
        model(*batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


WAYS: dict[str, dict[str, Any]] = {
    "resident": {"ratio": 0.0},
    "mixed": {"ratio": 0.4, "placement": "tail"},
    "early": {"early": True},
    "streamed": {"tuning": Tuning(streamed=0.5)},
    "weights on the host": {"offload_params": True},
    "weights on the host, mixed": {"offload_params": True, "ratio": 0.5},
    "small buckets": {"tuning": Tuning(bucket_numel=256)},
    "delayed": {"delayed_update": True},
    "delayed, resident": {"delayed_update": True, "ratio": 0.0},
}


@pytest.mark.parametrize("norm", [None, 0.05], ids=["no clipping", "clipped"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("states", "master"), [("4bit", "none"), ("fp32", "none"), ("int8", "none")])
def test_every_placement_gives_the_same_bits(states: str, master: str, way: str, norm: float | None) -> None:
    """With clipping, updates that began before the decision are repeated, with the same random bits."""
    base: dict[str, Any] = {"states": states, "master": master, "max_grad_norm": norm}
    if "delayed" in way:
        base["delayed_update"] = True
    ours = trained(**{"ratio": 1.0, **base, **WAYS[way]})
    assert_same(ours, trained(ratio=1.0, early=False, **base))


def test_a_step_is_that_of_the_definition() -> None:
    """Without overlap: each parameter is updated by the torch reference."""
    model, mine = gpt(), gpt()
    stores = {}
    with closing(TwinOptimizer(model, lr=1e-2, host_threads=1, ratio=1.0, states="4bit", master="none")) as optimizer:
        for step in range(3):
            run(model, optimizer, range(step, step + 1))
            mine(*batch(step)).loss.backward()
            for i, param in enumerate(mine.parameters()):
                flat, grad = param.detach().view(-1), param.grad
                assert grad is not None
                store = stores.setdefault(i, new_store(ADAMW, "4bit", flat.float(), flat, master="none"))
                hyper = ADAMW.hyper({**ADAMW.defaults, "lr": 1e-2}, step + 1)
                reference.update([Segment(ADAMW, hyper, grad.view(-1), store, 1.0, rounding_key(step + 1, i))])
            mine.zero_grad()
        for ours, theirs in zip(model.parameters(), mine.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("offload_params", [False, True])
def test_training_continues_from_a_saved_state(ratio: float, offload_params: bool) -> None:
    options: dict[str, Any] = {"states": "4bit", "master": "none", "ratio": ratio, "offload_params": offload_params}
    whole = trained(num_steps=4, **options)
    model = gpt()
    with closing(TwinOptimizer(model, lr=1e-2, host_threads=1, **options)) as optimizer:
        run(model, optimizer, range(2))
        state, values = optimizer.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}
        state["state"] = {
            name: {k: torch.as_tensor(v).clone() for k, v in e.items()} for name, e in state["state"].items()
        }
    assert (state["states"], state["master"]) == ("4bit", "none")
    model = gpt()
    model.load_state_dict(values)
    with closing(TwinOptimizer(model, lr=1e-2, host_threads=1, **options)) as optimizer:
        optimizer.load_state_dict(state)
        run(model, optimizer, range(2, 4))
        assert_same(whole, snapshot(model, optimizer))


FORMATS = [(states, master) for states in ("fp32", "bf16", "int8", "4bit") for master in ("fp32", "none")]
_PAIRS = [(source, into) for source in FORMATS for into in FORMATS]
CONVERSIONS = matrix_but([pair for pair in _PAIRS if (pair[0] == FORMATS[-1]) != (pair[1] == FORMATS[-1])], _PAIRS)


@pytest.mark.parametrize(("source", "into"), CONVERSIONS)
def test_states_of_other_formats_are_converted(source: tuple[str, str], into: tuple[str, str]) -> None:
    """Weights stay as they are. The second moment is as near as the wider of both formats allows."""
    model = gpt()
    options: dict[str, Any] = {"lr": 1e-2, "host_threads": 1, "ratio": 1.0}
    with closing(TwinOptimizer(model, states=source[0], master=source[1], **options)) as optimizer:
        run(model, optimizer, range(3))
        state, values = optimizer.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}
        with closing(TwinOptimizer(other := gpt(), states=into[0], master=into[1], **options)) as target:
            other.load_state_dict(values)
            target.load_state_dict(state)
            loaded = target.state_dict()["state"]
            for name, entry in state["state"].items():
                for key in ("exp_avg", "exp_avg_sq"):
                    before, after = entry[key].float(), loaded[name][key].float()
                    assert after.mean().item() == pytest.approx(
                        before.mean().item(), abs=0.3 * before.abs().mean().item()
                    )
            run(other, target, range(3, 4))  # it trains
            for name, value in other.named_parameters():
                assert value.isfinite().all(), name


def test_weights_without_master_are_read_from_the_state() -> None:
    """A checkpoint in the background need not copy them from the GPU."""
    with closing(TwinOptimizer(model := gpt(), states="4bit", master="none", ratio=1.0, host_threads=1)) as optimizer:
        run(model, optimizer, range(2))
        optimizer.wait()
        for param in optimizer.runtime.params:
            read = weight_reader(param)
            assert read is not None, param.name
            assert torch.equal(read(), param.tensor)


def test_what_the_user_writes_is_kept() -> None:
    for ratio in (0.0, 1.0):
        model = gpt()
        options: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.0, "states": "4bit", "master": "none", "ratio": ratio}
        with closing(TwinOptimizer(model, host_threads=1, **options)) as optimizer:
            run(model, optimizer, range(1))
            first = next(model.parameters())
            with torch.no_grad():
                first.mul_(1.5)
            wanted = first.detach().clone()
            run(model, optimizer, range(1, 3))
            assert torch.equal(next(model.parameters()), wanted)


def test_the_state_takes_three_bytes() -> None:
    model = gpt()
    numel = sum(p.numel() for p in model.parameters())
    with closing(TwinOptimizer(model, ratio=1.0, states="4bit", master="none", host_threads=1)) as optimizer:
        nbytes = sum(bucket.nbytes for bucket in optimizer.runtime.buckets)
        planned = sum(optimizer.kind.nbytes(bucket.plan) for bucket in optimizer.runtime.buckets)
        assert "4bit, without master weights" in repr(optimizer)
    padded = sum(-(-p.numel() // 128) * 128 for p in model.parameters())
    assert nbytes == planned == int(3.0625 * padded)
    assert padded < 1.2 * numel


# What is refused.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_not_bf16_need_a_master(dtype: torch.dtype) -> None:
    model = gpt()
    model.blocks[1].to(dtype)
    with pytest.raises(ValueError, match=r"blocks\.1.*cannot be used with master=\"none\".*bfloat16"):
        TwinOptimizer(model, master="none", ratio=1.0)


def test_other_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"master is 'bf16', but must be one of 'fp32', 'none'"):
        TwinOptimizer(gpt(), master="bf16")
    with pytest.raises(ValueError, match=r"master is 'none', but must be 'fp32'"):
        TwinOptimizer(gpt(), torch.optim.AdamW, master="none")
    with pytest.raises(ValueError, match=r"states is '4bit', but must be one of"):
        TwinOptimizer(gpt(), "lion", states="4bit")
    with pytest.raises(ValueError, match=r"states is '4bit', but must be one of .* Use TwinOptimizer"):
        HostAdamW(gpt().parameters(), states="4bit")


# Construction.


@pytest.mark.parametrize(("ratio", "placement"), [(0.0, "auto"), (0.5, "auto"), (0.5, "spread"), (1.0, "auto")])
@pytest.mark.parametrize("is_function", [False, True])
def test_a_model_is_built_into_its_places(
    ratio: float, placement: str, is_function: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks whose state is on the device do not pass through the host, and the host has no weight twice."""
    moved: list[int] = []
    left: list[int] = []
    old = twin_build.take_aside

    def take_aside(model: nn.Module, params: Any, where: torch.device) -> Any:
        moved.append(sum(param.numel() for param in params))
        return old(model, params, where)

    monkeypatch.setattr(twin_build, "take_aside", take_aside)
    fill = twin_build.Aside.fill
    monkeypatch.setattr(
        twin_build.Aside, "fill", lambda aside, bucket: (fill(aside, bucket), left.append(len(aside.values.whole)))
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = GPT(CONFIG).bfloat16()
    made = trained((lambda: GPT(CONFIG).bfloat16()) if is_function else shapes, states="4bit", master="none",
                   ratio=ratio, placement=placement, offload_params=True)  # fmt: skip
    in_blocks = sum(p.numel() for p in shapes.blocks.parameters())
    assert moved == [round(in_blocks * ratio)]
    assert left[-1] == 0
    torch.manual_seed(0)
    whole = build(lambda: GPT(CONFIG).bfloat16(), "cpu")
    assert_same(made, trained(whole, states="4bit", master="none", ratio=ratio, offload_params=True))


def test_weights_that_are_there_already_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has room for the state of the blocks, but not for their weights and their state at the same time."""
    numel = sum(p.numel() for p in gpt().blocks.parameters())
    rest = sum(p.numel() for p in gpt().parameters()) - numel
    free = int(1.3 * numel + 3.3 * rest)  # beside the weights, of 2 bytes; 3.06 bytes are needed
    free += 105_000  # for gradients
    monkeypatch.setattr(twin_build, "own_host_bytes", lambda: free)
    trained(lambda: GPT(CONFIG).bfloat16(), states="4bit", master="none", ratio=1.0, offload_params=True)
    monkeypatch.setattr(twin_build, "own_host_bytes", lambda: free // 2)
    with pytest.raises(MemoryError, match="Not enough host memory"):
        trained(lambda: GPT(CONFIG).bfloat16(), states="4bit", master="none", ratio=1.0, offload_params=True)
