# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the engine: to go on from one is not to have stopped, and a bad one changes nothing."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_checkpoint_support import assert_same, build, everything, halve
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from twin_support import CONFIG, batch, gpt, quick_torch
from twin_support import run_engine as run

import twinflow
from twinflow.checkpoint import save
from twinflow.engine import Engine
from twinflow.models.gpt import GPT

STEPS, MIDDLE = 8, 4


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "schedule": {"scheduler": halve},
    "torch schedule with odd state": {"scheduler": lambda optimizer: MultiStepLR(optimizer, [2, 3, 6], 0.5)},
    "parts": {"gradient_accumulation_steps": 2},
    "bf16 state": {"offload": {"states": "bf16"}},
    "int8 state": {"offload": {"states": "int8"}},
    "delayed": {"offload": {"delayed_update": True}},
    "torch optimizer": {"given": lambda params: torch.optim.RMSprop(params, lr=1e-3)},
    "sgd": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    "stateless": {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    "clipped": {"gradient_clipping": 0.01},
}


@pytest.mark.parametrize("case", CASES)
def test_going_on_is_not_having_stopped(case: str, tmp_path: Path) -> None:
    straight = build(**CASES[case])
    run(straight, range(MIDDLE))
    straight.save_checkpoint(tmp_path, client_state={"best": 1.5, "names": ("a", "b")})
    expected = run(straight, range(MIDDLE, STEPS))
    resumed = build(model=GPT(CONFIG), **CASES[case])  # other weights than those that were saved
    path, client = resumed.load_checkpoint(tmp_path)
    assert path is not None
    assert client == {"best": 1.5, "names": ("a", "b")}
    assert run(resumed, range(MIDDLE, STEPS)) == expected
    assert_same(everything(straight), everything(resumed))
    straight.destroy()
    resumed.destroy()


def test_random_states_and_the_data_position_go_on(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(16.0)[:, None].repeat(1, 8))

    def make() -> Engine:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
        return twinflow.initialize(model=model, training_data=data, config=config)[0]

    def steps(engine: Engine, iterator: Iterator[Any], count: int) -> list[Any]:
        seen = []
        for _ in range(count):
            (x,) = next(iterator)
            loss = engine(x).mean() * random.random() * float(np.random.rand())  # noqa: NPY002
            engine.backward(loss)
            engine.step()
            seen.append((x[:, 0].tolist(), loss.item()))
        return seen

    one = make()
    iterator = iter(one.training_dataloader)
    steps(one, iterator, 3)
    one.save_checkpoint(tmp_path)
    expected = steps(one, iterator, 4)
    two = make()
    torch.manual_seed(99)
    random.seed(99)
    two.load_checkpoint(tmp_path)
    assert steps(two, iter(two.training_dataloader), 4) == expected
    one.destroy()
    two.destroy()


def test_what_to_load_can_be_chosen(tmp_path: Path) -> None:
    one = build(scheduler=halve)
    run(one, range(3))
    one.save_checkpoint(tmp_path, tag="here")
    for options, steps in (
        ({"load_module_only": True}, 0),
        ({"load_optimizer_states": False}, 3),
        ({"load_lr_scheduler_states": False}, 3),
    ):
        two = build(model=GPT(CONFIG), scheduler=halve)
        two.load_checkpoint(tmp_path, tag="here", **options)
        assert two.global_steps == steps, options
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
        two.destroy()
    seen: dict[str, Any] = {}
    three = build()
    three.load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: seen.update(src))
    assert "blocks.0.mlp.up.weight" in seen
    three.destroy()
    one.destroy()


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    engine = build()
    assert engine.load_checkpoint(tmp_path) == (None, {})
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, {})
    engine.destroy()


def test_only_whole_steps_are_saved(tmp_path: Path) -> None:
    engine = build(gradient_accumulation_steps=2)
    engine.backward(engine(*batch(0)).loss)
    engine.step()
    with pytest.raises(RuntimeError, match="after 1 of 2 micro-batches"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.destroy()


def cut(engine: Engine, folder: Path) -> None:
    victim = max(folder.glob("optimizer*.safetensors"), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-7])


def flip(engine: Engine, folder: Path) -> None:
    victim = max(folder.glob("optimizer*.safetensors"), key=lambda p: p.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[-5] ^= 1
    victim.write_bytes(bytes(raw))


def remove(engine: Engine, folder: Path) -> None:
    next(folder.glob("model*.safetensors")).unlink()


@pytest.mark.parametrize("damage", [cut, flip, remove])
def test_a_damaged_checkpoint_changes_nothing(damage: Any, tmp_path: Path) -> None:
    one = build(scheduler=halve)
    run(one, range(2))
    one.save_checkpoint(tmp_path, tag="t")
    run(one, range(2, 4))
    before = everything(one)
    damage(one, tmp_path / "t")
    with pytest.raises(ValueError, match=r"safetensors"):
        one.load_checkpoint(tmp_path)
    assert_same(before, everything(one))
    run(one, range(4, 5))
    one.destroy()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": nn.Sequential(nn.Linear(2, 2))},
            ["the checkpoint has no 0.bias, 0.weight;", "the model has no blocks.0."],
        ),
        ({"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}, ["rule", "adamw", "lion"]),
    ],
    ids=["model", "rule"],
)
def test_a_checkpoint_of_something_else_changes_nothing(changes: Any, words: list[str], tmp_path: Path) -> None:
    one = build()
    run(one, range(2))
    one.save_checkpoint(tmp_path)
    two = build(**changes)
    before = everything(two)
    with pytest.raises(ValueError, match=r".") as caught:
        two.load_checkpoint(tmp_path)
    for word in words:
        assert word in str(caught.value)
    assert_same(before, everything(two))
    one.destroy()
    two.destroy()


def test_a_client_state_that_needs_pickle_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    engine = build()
    run(engine, range(1))
    with pytest.raises(ValueError, match="client_state/what"):
        engine.save_checkpoint(tmp_path, client_state={"what": object()})
    assert not list(tmp_path.iterdir())
    tensor = torch.arange(3.0)
    engine.save_checkpoint(tmp_path, client_state={"values": [tensor, float("inf")], "by number": {1: "one"}})
    _, client = engine.load_checkpoint(tmp_path)
    assert torch.equal(client["values"][0], tensor)
    assert (client["values"][1], client["by number"]) == (float("inf"), {1: "one"})
    engine.destroy()


def test_old_checkpoints_go(tmp_path: Path) -> None:
    engine = build(checkpoint={"keep_last": 2})
    for step in range(4):
        run(engine, range(step, step + 1))
        engine.save_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["global_step3", "global_step4"]
    engine.destroy()


def test_the_weights_alone_for_other_libraries(tmp_path: Path) -> None:
    engine = build()
    run(engine, range(2))
    engine.save_16bit_model(tmp_path, "weights.safetensors")
    found = load_file(tmp_path / "weights.safetensors")
    own = engine.module.state_dict()
    assert set(own) - set(found) == {"head.weight"}  # tied: it is there once
    assert all(torch.equal(value, own[name]) for name, value in found.items())
    engine.destroy()


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    def model() -> GPT:
        made = gpt()
        made.blocks[0].requires_grad_(False)
        return made

    one, two = build(model=model()), build(model=model())
    run(one, range(2))
    one.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    two.load_checkpoint(tmp_path)
    assert run(one, range(2, 4)) == run(two, range(2, 4))
    one.destroy()
    two.destroy()


def test_not_in_the_middle_of_a_step(tmp_path: Path) -> None:
    engine = build()
    run(engine, range(2))
    engine.save_checkpoint(tmp_path)
    engine.backward(engine(*batch(2)).loss)
    with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"):
        engine.load_checkpoint(tmp_path)
    engine.step()
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 2
    engine.destroy()


@pytest.mark.parametrize("early", [True, False])
def test_a_warning_if_gradients_are_not_saved(tmp_path: Path, early: bool) -> None:
    one, two = (build(gradient_clipping=0.5, offload={"early": early}) for _ in range(2))
    for engine in (one, two):
        run(engine, range(2))
    one.backward(one(*batch(2)).loss)
    with pytest.warns(UserWarning, match=r"between backward\(\) and step\(\).* gradients .* after step\(\)"):
        one.save_checkpoint(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.step()
        one.save_checkpoint(tmp_path, "after")
    two.load_checkpoint(tmp_path, "global_step2")
    assert run(one, range(3, 5)) == run(two, range(2, 5))[1:]
    one.destroy()
    two.destroy()


def test_gradients_of_a_step_that_will_not_come_are_forgotten(tmp_path: Path) -> None:
    one = build(gradient_accumulation_steps=2)
    run(one, range(4))
    one.save_checkpoint(tmp_path)
    expected = run(one, range(4, 8))
    one.backward(one(*batch(0)).loss)
    one.step()
    one.load_checkpoint(tmp_path)
    assert run(one, range(4, 8)) == expected
    one.destroy()


def test_weights_alone_into_a_run_with_a_delayed_update(tmp_path: Path) -> None:
    one = build(offload={"delayed_update": True})
    run(one, range(2))
    one.save_checkpoint(tmp_path)
    run(one, range(2, 4))
    one.load_checkpoint(tmp_path, load_module_only=True)
    run(one, range(4, 6))
    one.destroy()


def test_another_scheduler_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    one = build(scheduler=halve)
    run(one, range(2))
    one.save_checkpoint(tmp_path)
    two = build(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer, [halve(optimizer), halve(optimizer)], milestones=[2]
        )
    )
    run(two, range(3))
    before = everything(two)
    with pytest.raises(ValueError, match="SequentialLR"):
        two.load_checkpoint(tmp_path)
    assert_same(before, everything(two))
    run(two, range(3, 4))
    one.destroy()
    two.destroy()


class Counting(nn.Module):
    """Keeps something in its state dict that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.linear(x)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_what_modules_keep_beside_tensors(tmp_path: Path) -> None:
    one = build(model=Counting())
    one.backward(one(torch.ones(3, 4)).mean())
    one.step()
    one.save_checkpoint(tmp_path)
    two = build(model=Counting())
    two.load_checkpoint(tmp_path)
    assert two.module.seen == 3
    one.destroy()
    two.destroy()


def test_a_state_dict_of_copies_is_loaded_too(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 1))

        def copies(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
            for name in list(state):
                state[name] = state[name].clone() if isinstance(state[name], torch.Tensor) else state[name]

        made.register_state_dict_post_hook(copies)
        return made

    one, two = build(model=model()), build(model=model())
    one.save_checkpoint(tmp_path)
    two.load_checkpoint(tmp_path)
    assert torch.equal(one.module[0].weight, two.module[0].weight)
    one.destroy()
    two.destroy()


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
def test_saving_and_loading_need_little_memory(states: str, tmp_path: Path) -> None:
    """Counted: the largest tensor that is made while a parameter of several buckets is written and read."""
    rows = 1 << 15
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor._base is None:
                    largest = max(largest, tensor.numel() * tensor.element_size())
            return out

    model = nn.Sequential(nn.Embedding(rows, 64)).bfloat16()
    engine = build(model=model, offload={"states": states, "bucket_numel": 1 << 20}, gradient_clipping=0.0)
    engine.backward(engine(torch.arange(8)).float().mean())
    engine.step()
    engine.optimizer.wait()  # type: ignore[union-attr]
    with Watch():
        engine.save_checkpoint(tmp_path)
    assert largest <= 4 * rows * 64  # one fp32 parameter
    engine.destroy()


def test_a_data_position_that_does_not_fit_leaves_the_schedule_alone(tmp_path: Path) -> None:
    one = build(scheduler=halve)
    one.training_dataloader = one.deepspeed_io(list(range(8)), batch_size=4)
    run(one, range(2))
    one.save_checkpoint(tmp_path)
    two = build(scheduler=halve)
    two.training_dataloader = two.deepspeed_io(list(range(8)), batch_size=2)
    before = two.lr_scheduler.state_dict()["last_epoch"]
    with pytest.raises(
        ValueError, match=r"position in the data was saved with the batch size .* Set train_micro_batch_size_per_gpu to"
    ):
        two.load_checkpoint(tmp_path)
    assert two.lr_scheduler.state_dict()["last_epoch"] == before
    one.destroy()
    two.destroy()


def test_files_that_no_engine_wrote_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, "t", {"model": []}, {"something": 1})
    engine = build()
    with pytest.raises(ValueError, match=r"is not a checkpoint of an engine: meta.json has no global_steps"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()
