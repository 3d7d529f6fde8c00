# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose checksums are right and whose values are wrong: loading is all or nothing."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_checkpoint_support import assert_same, build, everything, halve
from twin_support import quick_torch
from twin_support import run_engine as run

from twinflow.checkpoint import manifest, open_checkpoint, save
from twinflow.engine import Engine
from twinflow.state_dict import Entry

WRONG: tuple[Any, ...] = (None, True, -1, 10**30, 0.5, "text", [], [[1]], {}, {"a": 1}, {"__tensor__": "nothing"})
Path_ = tuple[Any, ...]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with quick_torch():
        made = build(scheduler=halve)
        made.training_dataloader = made.deepspeed_io(list(range(8)), batch_size=2)
        run(made, range(2))
        yield made
        made.destroy()


@pytest.fixture(scope="module")
def saved(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the engine, which has made another step since."""
    root = tmp_path_factory.mktemp("saved")
    with quick_torch():
        engine.save_checkpoint(root, tag="t", client_state={"best": 1.0, "names": ["a"]})
        run(engine, range(2, 3))
    return root


def forge(root: Path, meta: dict[str, Any]) -> None:
    """Writes `meta` into the checkpoint, with all checksums."""
    folder = root / "t"
    raw = json.dumps(meta).encode()
    (folder / "meta.json").write_bytes(raw)
    found = json.loads((folder / "manifest.json").read_text())
    found |= {"meta_size": len(raw), "meta_crc32": zlib.crc32(raw)}
    found.pop("crc32")
    found["crc32"] = manifest._crc32_of(found)
    (folder / "manifest.json").write_text(json.dumps(found))


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """The paths of all values in `value`. Of a long list only the first and the last item."""
    if at:
        yield at
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
        items = items if len(items) < 4 else [items[0], items[-1]]
    else:
        return
    for key, item in items:
        yield from places(item, (*at, key))


def changed(meta: dict[str, Any], at: Path_, value: Any) -> dict[str, Any]:
    """A copy of `meta` with another value, or with one key less for `...`."""
    made = copy.deepcopy(meta)
    inner: Any = made
    for key in at[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return made


def state(engine: Engine) -> dict[str, Any]:
    """Everything that a load changes."""
    found = everything(engine)  # first, because it waits for the scheduler of the last step
    schedule: Any = engine.lr_scheduler
    loader: Any = engine.training_dataloader
    keys = np.random.get_state()[1]  # noqa: NPY002
    more = {
        "schedule": schedule.state_dict()["last_epoch"],
        "loader": loader.state_dict(),
        "python": random.getstate(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "torch": torch.get_rng_state(),
        "counters": (engine.global_steps, engine.micro_steps, engine.global_samples),
    }
    return found | more


def check(engine: Engine, root: Path, meta: dict[str, Any], original: dict[str, Any]) -> bool:
    """Loads a forged checkpoint. It is loaded, or an error names it and nothing changes. Whether it was loaded."""
    forge(root, meta)
    before = state(engine)
    error = ""
    try:
        engine.load_checkpoint(root)
    except ValueError as raised:
        error = str(raised)
    if error:
        assert str(root) in error
        assert_same(before, state(engine))
        return False
    run(engine, range(3, 4))  # what was loaded can be trained
    forge(root, original)
    engine.load_checkpoint(root)
    return True


CHOSEN: tuple[tuple[Path_, Any], ...] = (
    (("global_steps",), "7"),
    (("global_samples",), -1),
    (("micro_steps",), 2**70),
    (("aliases",), []),
    (("aliases",), {"a": 1}),
    (("excluded",), None),
    (("random",), None),
    (("random", "torch"), {"__tensor__": "nothing"}),
    (("random", "torch"), 1),
    (("random", "python"), {"__tuple__": 3}),
    (("random", "numpy"), {"__tuple__": ["MT19937"]}),
    (("client_state",), []),
    (("extra",), 3),
    (("scheduler",), 3),
    (("scheduler", "last_epoch"), "three"),
    (("scheduler", "last_epoch"), None),
    (("scheduler", "base_lrs"), None),
    (("scheduler", "base_lrs"), []),
    (("scheduler", "base_lrs"), [[1]]),
    (("scheduler", "base_lrs"), [-1.0]),
    (("loader",), []),
    (("loader", "position"), "x"),
    (("loader", "batch_size"), {}),
    (("optimizer",), []),
    (("optimizer", "param_groups"), {}),
    (("optimizer", "param_groups", 0, "params"), [{}]),
    (("optimizer", "num_steps"), 10**400),
    (("optimizer", "loss_scale"), {"a": 1}),
    (("optimizer_state",), []),
    (("shards",), {"model": 3}),
)


@pytest.mark.parametrize(("at", "value"), CHOSEN)
def test_a_forged_meta_changes_nothing(at: Path_, value: Any, engine: Engine, saved: Path) -> None:
    found = open_checkpoint(saved)
    assert found is not None
    original = json.loads((saved / "t" / "meta.json").read_text())
    try:
        assert not check(engine, saved, changed(original, at, value), original)
    finally:
        forge(saved, original)


def test_a_loss_scale_that_is_a_large_whole_number_can_be_used(engine: Engine, saved: Path) -> None:
    original = json.loads((saved / "t" / "meta.json").read_text())
    assert check(engine, saved, changed(original, ("optimizer", "loss_scale", "scale"), 10**30), original)


def test_a_tensor_of_another_kind_is_refused(engine: Engine, saved: Path, tmp_path: Path) -> None:
    found = open_checkpoint(saved)
    assert found is not None
    entries = {}
    for file in found.files():
        values = dict(found.tensors(file))
        if file == "model":
            values = {name: value.to(torch.int32) for name, value in values.items()}
        entries[file] = [Entry(n, v.dtype, tuple(v.shape), lambda v=v: v) for n, v in values.items()]
    save(tmp_path, "t", entries, found.meta)
    before = state(engine)
    with pytest.raises(ValueError, match=r"the dtype of .* is torch.int32, but must be torch.float32"):
        engine.load_checkpoint(tmp_path)
    assert_same(before, state(engine))


def test_options_that_an_optimizer_of_torch_cannot_use_are_refused(tmp_path: Path) -> None:
    engine = build(**VARIANTS["torch"], scheduler=halve)
    engine.training_dataloader = engine.deepspeed_io(list(range(8)), batch_size=2)
    run(engine, range(1))
    engine.save_checkpoint(tmp_path, tag="t")
    original = json.loads((tmp_path / "t" / "meta.json").read_text())
    for key, value in (("lr", None), ("lr", 10**30), ("momentum", None)):
        assert not check(engine, tmp_path, changed(original, ("optimizer", "param_groups", 0, key), value), original)
    engine.destroy()


@pytest.mark.parametrize("value", [{}, {"a": 1}, 3])
def test_scales_that_are_no_tensors_are_refused(value: Any, tmp_path: Path) -> None:
    engine = build(offload={"states": "int8"}, scheduler=halve)
    engine.training_dataloader = engine.deepspeed_io(list(range(8)), batch_size=2)
    run(engine, range(1))
    engine.save_checkpoint(tmp_path, tag="t")
    original = json.loads((tmp_path / "t" / "meta.json").read_text())
    name = next(name for name, entry in original["optimizer_state"].items() if "exp_avg_scale" in entry)
    assert not check(engine, tmp_path, changed(original, ("optimizer_state", name, "exp_avg_scale"), value), original)
    engine.destroy()


VARIANTS: dict[str, dict[str, Any]] = {
    "schedule": {"scheduler": halve},
    "int8": {"offload": {"states": "int8"}},
    "delayed": {"offload": {"delayed_update": True}},
    "torch": {"given": lambda params: torch.optim.RMSprop(params, lr=1e-3)},
}


@pytest.mark.matrix
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_forged_value_loads_half(variant: str, tmp_path: Path) -> None:
    engine = build(**VARIANTS[variant])
    engine.training_dataloader = engine.deepspeed_io(list(range(8)), batch_size=2)
    if engine.lr_scheduler is None:
        engine.lr_scheduler = halve(engine.optimizer)
    run(engine, range(2))
    engine.save_checkpoint(tmp_path, tag="t", client_state={"best": 1.0, "names": ["a"]})
    original = json.loads((tmp_path / "t" / "meta.json").read_text())
    cases = [(at, value) for at in places(original) for value in (..., *WRONG)]
    if variant == "torch":  # only the user's optimizer knows which keys its state needs, and which may be None
        needed = (..., None)
        cases = [(at, v) for at, v in cases if at[0] != "optimizer_state" or (len(at) == 4 and v not in needed)]
    chosen = random.Random(variant).sample(cases, 80)
    for at, value in chosen:
        print(f"{at} is {value!r}")  # pytest shows the last one if it fails
        check(engine, tmp_path, changed(original, at, value), original)
    engine.destroy()
