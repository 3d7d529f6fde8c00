# SPDX-License-Identifier: Apache-2.0
"""State that is streamed to the device for its update, with weights on the host: the bits of weights on the device, and
of updates on the host.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from param_offload_support import AWAY, DEVICE, HERE, check_same, gpt, loss_of, places, steps_of, train
from torch import Tensor, nn
from twin_support import matrix_but

import twinflow
from twinflow.offload.plan import STREAMED
from twinflow.optim.twin import Tuning, TwinOptimizer

ALL = Tuning(bucket_numel=4096, streamed=1.0)  # a block has several buckets
SOME = Tuning(bucket_numel=4096, streamed=0.4)
ON_HOST = Tuning(bucket_numel=4096)
STREAMS = ["streamed0", "streamed1", "streamed2", "fetch", "update", "compute"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation_steps": 3, "states": "int8", "tuning": SOME},
        {"max_grad_norm": None, "rule": "sgd", "momentum": 0.9},
        {"ratio": 0.6, "states": "bf16"},
        pytest.param({"max_grad_norm": None, "accumulation_steps": 2}, marks=pytest.mark.matrix),
        pytest.param({"early": False, "states": "bf16", "rule": "lion", "lr": 1e-3}, marks=pytest.mark.matrix),
        pytest.param({"max_grad_norm": 100.0, "tuning": SOME}, marks=pytest.mark.matrix),
        pytest.param({"rule": "sgd", "tuning": SOME}, marks=pytest.mark.matrix),
        pytest.param({"ratio": 0.3, "placement": "tail", "max_grad_norm": None}, marks=pytest.mark.matrix),
        pytest.param({"states": "4bit", "ratio": 0.5, "placement": "spread"}, marks=pytest.mark.matrix),
        pytest.param({"tuning": Tuning(bucket_numel=4096, streamed=1.0, sums="host"), "accumulation_steps": 2}),
    ],
    ids=str,
)
def test_no_bit_changes(options: dict[str, Any]) -> None:
    check_same(gpt(), **{"tuning": ALL, **options})


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": None, "states": "int8"}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.bfloat16, "fp32"), (torch.bfloat16, "none"), (torch.float16, "fp32")]
)
def test_no_bit_changes_in_half_precision(dtype: torch.dtype, master: str, options: dict[str, Any]) -> None:
    check_same(gpt(dtype), steps=3, tuning=ALL, master=master, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_host_gives_the_same_bits(dtype: torch.dtype) -> None:
    losses, weights = train(gpt(dtype), True, steps=3, tuning=ON_HOST)
    found, others = train(gpt(dtype), True, steps=3, tuning=SOME)
    assert found == losses
    assert [name for name, value in weights.items() if not torch.equal(value, others[name])] == []


@pytest.mark.parametrize("max_grad_norm", matrix_but([0.5], [None, 0.5]))
@pytest.mark.parametrize("stream", STREAMS)
def test_no_bit_changes_with_a_slow_stream(stream: str, max_grad_norm: float | None) -> None:
    def slow(optimizer: TwinOptimizer) -> None:
        optimizer.runtime.device.delay(stream, 0.003)

    make = gpt(torch.bfloat16, recompute="full")
    losses, weights = train(make, True, steps=3, tuning=ALL, max_grad_norm=max_grad_norm)
    found, others = train(make, True, steps=3, tuning=ALL, max_grad_norm=max_grad_norm, watch=slow)
    assert found == losses
    assert all(torch.equal(others[name], value) for name, value in weights.items())


def overflowing_loss(model: Any, step: int) -> Tensor:
    """The same value, with gradients that are not finite in one step."""
    found = loss_of(model, step)
    return found + (found - found.detach()).sqrt() if step == 1 else found


def test_a_step_is_skipped() -> None:
    skipped: list[bool] = []

    def watch(optimizer: TwinOptimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: skipped.append(not optimizer.was_applied))

    options: dict[str, Any] = {"loss": overflowing_loss, "steps": 4, "tuning": ALL}
    losses, weights = train(gpt(), False, **options)
    found, others = train(gpt(), True, watch=watch, **options)
    assert skipped == [False, True, False, False]
    assert found == losses
    assert all(torch.equal(others[name], value) and value.isfinite().all() for name, value in weights.items())


class Branch(nn.Module):
    """A block of which each step uses one of two layers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.step = 0
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a(x) if self.step % (2 + self.number) else self.b(x)).tanh()


def branches() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Branch(i) for i in range(4)))


def branch_loss(model: Any, step: int) -> Tensor:
    for block in model:
        block.step = step
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    found: Tensor = model(x).square().mean()
    return found


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_weights_without_a_gradient_keep_their_values(max_grad_norm: float | None) -> None:
    check_same(branches, loss=branch_loss, tuning=ALL, max_grad_norm=max_grad_norm)


def test_embeddings_are_streamed_too() -> None:
    options: dict[str, Any] = {"bucket_numel": 1024, "streamed": 0.7}
    losses, weights = train(gpt(tied=False), False, tuning=Tuning(**options))
    found, others = train(gpt(tied=False), True, tuning=Tuning(**options, offload_embeddings=True))
    assert found == losses
    assert all(torch.equal(others[name], value) for name, value in weights.items())


def test_where_state_and_weights_are() -> None:
    with closing(TwinOptimizer(gpt()(), lr=1e-2, offload_params=True, ratio=0.5, tuning=ALL)) as optimizer:
        assert [*places(optimizer).values()] == [HERE, HERE, {(STREAMED, True)}, {(STREAMED, True)}]
    with closing(TwinOptimizer(gpt()(), lr=1e-2, offload_params=True, tuning=SOME)) as optimizer:
        assert all(found == AWAY | {(STREAMED, True)} for found in places(optimizer).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_bytes_are_those_of_updates_on_the_host(dtype: torch.dtype, states: str) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "offload_params": True, "states": states}
    with closing(TwinOptimizer(gpt(dtype)(), tuning=ON_HOST, **options)) as optimizer:
        expected = {b.plan.index: b.nbytes for b in optimizer.runtime.buckets if b.offloads_params}
    with closing(TwinOptimizer(gpt(dtype)(), tuning=ALL, **options)) as optimizer:
        for bucket in (bucket for bucket in optimizer.runtime.buckets if bucket.offloads_params):
            assert bucket.plan.place == STREAMED
            assert bucket.nbytes == expected[bucket.plan.index]
            assert optimizer.kind.nbytes(bucket.plan) == pytest.approx(bucket.nbytes, abs=512)


def test_weights_are_read_and_written_between_steps() -> None:
    """As with updates on the host, also while the device still updates."""

    def run(tuning: Tuning) -> list[Tensor]:
        model: Any = gpt(torch.bfloat16)()
        seen: list[Tensor] = []
        with closing(TwinOptimizer(model, lr=1e-2, early=True, offload_params=True, tuning=tuning)) as optimizer:
            for stream in STREAMS[:3]:
                optimizer.runtime.device.delay(stream, 0.005)
            weight = next(model.blocks[1].mlp.parameters())
            for step in range(4):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    with torch.no_grad():
                        weight[3] = 0.5
                if step == 2:
                    weight.data.mul_(0.5)
                seen.append(weight.detach().cpu().clone())
                seen += [value.detach().cpu().clone() for value in model.state_dict().values()]
        return seen + [param.detach().cpu().clone() for param in model.parameters()]

    expected, found = run(ON_HOST), run(ALL)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_masters_and_states_are_those_of_the_host() -> None:
    def run(tuning: Tuning) -> dict[str, Any]:
        model = gpt(torch.float16)()
        with closing(TwinOptimizer(model, lr=1e-2, offload_params=True, states="int8", tuning=tuning)) as optimizer:
            for step in range(3):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            found: dict[str, Any] = optimizer.state_dict()["state"]
            return found

    expected, found = run(ON_HOST), run(ALL)
    assert expected.keys() == found.keys()
    for name, entry in expected.items():
        assert entry.keys() == found[name].keys()
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(found[name][key])) for key, value in entry.items()
        )


def engine_of(tuning: Tuning, is_offloaded: bool = True, **options: Any) -> Any:
    model = gpt(torch.bfloat16)()
    given = {"lr": 1e-2, "max_grad_norm": 0.5, "early": True, **options}
    optimizer = TwinOptimizer(
        model if is_offloaded else model.to(DEVICE), offload_params=is_offloaded, tuning=tuning, **given
    )
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        "zero_optimization": zero if is_offloaded else {"stage": 0},
        "checkpoint": {"background": True},
    }
    engine, *_ = twinflow.initialize(model=model, optimizer=optimizer, config=config)
    return engine


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((ALL, True), (ALL, True)),
        ((SOME, True), (ON_HOST, True)),
        ((ON_HOST, True), (ALL, True)),
        ((ALL, False), (ALL, True)),
    ],
    ids=["streamed", "to host", "from host", "from device"],
)
def test_a_checkpoint_in_the_background_goes_on_exactly(
    tmp_path: Path, saved: tuple[Tuning, bool], loaded: tuple[Tuning, bool]
) -> None:
    engine = engine_of(*saved)
    steps_of(engine, 0, 3)
    engine.save_checkpoint(str(tmp_path), tag="three")
    truth = steps_of(engine, 3, 3)
    engine.destroy()
    engine = engine_of(*loaded)
    steps_of(engine, 7, 1)
    engine.load_checkpoint(str(tmp_path), tag="three")
    assert steps_of(engine, 3, 3) == truth
    engine.destroy()


@pytest.mark.parametrize("is_after_backward", [False, True])
def test_closed_in_the_middle_of_a_step_the_weights_are_there(is_after_backward: bool) -> None:
    model = gpt()()
    truth = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = TwinOptimizer(model, lr=1e-2, early=True, max_grad_norm=1.0, offload_params=True, tuning=ALL)
    loss = loss_of(model, 0)
    if is_after_backward:
        loss.backward()
    optimizer.close()
    assert all(torch.equal(value.cpu(), truth[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"delayed_update": True, "early": True}, "delayed_update"),
        ({"ratio": "auto"}, 'streamed.*ratio="auto"'),
        ({"tuning": Tuning(streamed=1.0, param_nvme_path="/nowhere")}, "streamed.*weights on the disk"),
        ({"tuning": Tuning(streamed=1.0, nvme_path="/nowhere")}, "streamed.*state on the disk"),
    ],
    ids=str,
)
def test_what_it_does_not_go_with(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TwinOptimizer(gpt()(), lr=1e-2, offload_params=True, **{"tuning": ALL, **options})
