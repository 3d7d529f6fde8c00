# SPDX-License-Identifier: Apache-2.0
"""Random faults of one process that are cheap enough for hundreds: damaged files, a disk that fails, wrong numbers.

Every fault has an answer that is known beforehand. A damaged file is refused by name and nothing changes, or the load
gives the bits that were saved. A disk that fails costs a checkpoint, and every checkpoint that was reported as written
has the bits of its step. A number that is not finite costs its step: the weights are those of a run without this step.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from engine_checkpoint_support import everything

import twinflow
from twinflow.engine import Engine

sys.path.insert(0, str(Path(__file__).parent / "unit"))

from test_foreign_files import READERS, error_of, mutate

NUM_STEPS = 6
SAVED = (2, 4)  # steps with a checkpoint
State = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How the engine of a case is built."""

    states: str
    ratio: float
    delayed: bool
    accumulation: int
    background: bool
    rule: str

    def __str__(self) -> str:
        kind = f"{self.rule}, {self.states}, ratio {self.ratio:g}, {self.accumulation} micro-batches"
        return kind + ", delayed" * self.delayed + ", saves in the background" * self.background


@dataclass(frozen=True)
class Result:
    """How a fault ended: `named`, `finished`, or one of the ways that must not happen: `wrong`, `silent`."""

    kind: str
    case: str
    ending: str
    why: str = ""


def draw_settings(dice: random.Random) -> Settings:
    states = dice.choice(("fp32", "bf16", "int8"))
    rule = "AdamW" if states == "int8" else dice.choice(("AdamW", "Adam", "Lion", "SGD"))
    delayed = dice.random() < 0.25
    return Settings(states, dice.choice((1.0, 0.5)), delayed, dice.choice((1, 2)), dice.random() < 0.5, rule)


def build(given: Settings) -> Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.Linear(8, 1))
    offload = {"device": "cpu", "states": given.states, "ratio": given.ratio, "delayed_update": given.delayed}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": given.accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "optimizer": {"type": given.rule, "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 0, "offload_optimizer": offload},
        "checkpoint": {"background": given.background, "keep_last": 2},
    }
    return twinflow.initialize(model=model, config=config)[0]


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def make_step(engine: Engine, step: int, spoil: Callable[[str, Any], Any] = lambda place, value: value) -> None:
    """Step `step`, whose batches depend only on this number. `spoil` may change the value of a place."""
    accumulation = engine.gradient_accumulation_steps()
    for micro in range(accumulation):
        x = spoil("input", batch(100 * step + micro))
        loss = spoil("loss", engine(x).square().mean())
        engine.backward(loss)
        engine.step()


def state_of(engine: Engine) -> State:
    found = {**everything(engine), "torch": torch.get_rng_state()}
    return {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in found.items()}


def is_same(one: State, two: State, but: tuple[str, ...] = ()) -> bool:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)

    return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one if key not in but)


@contextmanager
def said() -> Iterator[list[str]]:
    """The warnings and log lines of a block."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Collect(), logging.getLogger("twinflow")
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            yield lines
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagates
            lines += [str(one.message) for one in found]


# Files.


@cache
def saved_run(given: Settings) -> tuple[Path, dict[int, State]]:
    """A folder with two checkpoints, and the states that they must give."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    engine, states = build(given), {}
    for step in range(1, max(SAVED) + 1):
        make_step(engine, step)
        if step in SAVED:
            engine.save_checkpoint(folder, client_state={"step": step})
            engine.wait_for_checkpoint()
            states[step] = state_of(engine)
    engine.destroy()
    return folder, states


def _flip(path: Path, dice: random.Random, other: Path) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(dice.choice((1, 1, 16))):
        if raw:
            raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
    path.write_bytes(raw)


def _cut(path: Path, dice: random.Random, other: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: dice.randrange(len(raw) + 1)])


def _zero(path: Path, dice: random.Random, other: Path) -> None:
    raw = bytearray(path.read_bytes())
    at = dice.randrange(len(raw) + 1)
    raw[at : at + 512] = bytes(len(raw[at : at + 512]))
    path.write_bytes(raw)


def _append(path: Path, dice: random.Random, other: Path) -> None:
    with path.open("ab") as file:
        file.write(dice.randbytes(dice.randint(1, 64)))


def _mutate(path: Path, dice: random.Random, other: Path) -> None:
    path.write_bytes(mutate(path.read_bytes(), dice))


def _remove(path: Path, dice: random.Random, other: Path) -> None:
    path.unlink()


def _swap(path: Path, dice: random.Random, other: Path) -> None:
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def _copy_over(path: Path, dice: random.Random, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def _become(make: Callable[[Path], object]) -> Callable[[Path, random.Random, Path], None]:
    def damage(path: Path, dice: random.Random, other: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)


DAMAGES: dict[str, Callable[[Path, random.Random, Path], None]] = {
    "bits flipped": _flip,
    "cut": _cut,
    "512 bytes of zeros": _zero,
    "bytes appended": _append,
    "bytes changed": _mutate,
    "removed": _remove,
    "swapped with another file": _swap,
    "another file's content": _copy_over,
    "a folder": _become(lambda path: path.mkdir()),
    "a FIFO": _become(os.mkfifo),
    "a link to nothing": _become(lambda path: path.symlink_to("nothing")),
    "a link to /dev/zero": _become(lambda path: path.symlink_to("/dev/zero")),
    "a sparse file": _become(_sparse),
}


def run_file(dice: random.Random) -> Result:
    if dice.random() < 0.35:
        return _run_reader(dice)
    given = draw_settings(dice)
    root, states = saved_run(given)
    damage = dice.choice(list(DAMAGES))
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "run"
        shutil.copytree(root, copied)
        files = sorted(path for path in copied.rglob("*") if path.is_file())
        last = [path for path in files if path.parent.name != f"global_step{SAVED[0]}"]
        path, other = dice.choice(last if dice.random() < 0.8 else files), dice.choice(files)
        case = f"{path.relative_to(copied)}: {damage} ({other.relative_to(copied)}); {given}"
        raw = path.read_bytes()
        DAMAGES[damage](path, dice, other)
        if path.is_file() and not path.is_symlink() and path.stat().st_size == len(raw) and path.read_bytes() == raw:
            return run_file(dice)  # nothing has changed
        engine = build(given)
        make_step(engine, 1)
        before = state_of(engine)
        try:
            with said() as lines:
                found, client = engine.load_checkpoint(copied)
        except (ValueError, OSError) as error:
            if not is_same(before, state_of(engine)):
                return Result(damage, case, "silent", f"the engine has changed although this was raised: {error}")
            names = {path.name, other.name} if damage.startswith("swapped") else {path.name}
            ending = "named" if any(name in str(error) for name in names) else "wrong"
            return Result(damage, case, ending, "" if ending == "named" else str(error))
        except Exception as error:
            return Result(damage, case, "wrong", repr(error))
        finally:
            engine.wait_for_checkpoint()
        step = next((step for step in SAVED if is_same(states[step], state_of(engine))), None)
        engine.destroy()
        if found is None or step is None or client != {"step": step}:
            return Result(damage, case, "silent", f"loaded {found}, {client}; {lines}")
        if step != max(SAVED):  # an earlier one, which must not happen without a word
            says = any(path.name in line or path.parent.name in line for line in lines)
            return Result(damage, case, "named" if says else "silent", "" if says else f"loaded {found}: {lines}")
        return Result(damage, case, "finished")


def _run_reader(dice: random.Random) -> Result:
    """A damaged file that is not of a checkpoint: configs, data, tokenizers, hostfiles, metrics."""
    reader = dice.choice(READERS)
    damage = dice.choice([name for name in DAMAGES if not name.startswith(("swapped", "another"))])
    if damage == "a sparse file" and reader.name == "text.txt":
        damage = "cut"  # texts may be large
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / reader.name
        path.write_bytes(reader.content(Path(folder)))
        DAMAGES[damage](path, dice, path)
        case = f"{reader.name}: {damage}"
        try:
            text = error_of(reader, path)
        except BaseException as error:
            return Result(damage, case, "wrong", repr(error))
    return Result(damage, case, "named" if text else "finished")


# A disk that fails.

ERRORS = ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "EFBIG", "ESTALE")
# Functions of `os` that a save calls, and about how often.
CALLS = {
    "write": 20,
    "fsync": 9,
    "rename": 2,
    "replace": 2,
    "mkdir": 2,
    "open": 14,
    "unlink": 5,
    "rmdir": 2,
    "scandir": 6,
}


@contextmanager
def failing(folder: Path, call: str, first: int, num: int, number: int) -> Iterator[list[int]]:
    """Calls `first` to `first + num` of os.`call` that concern `folder` fail. The list has one entry for each."""
    failed: list[int] = []
    original, count = getattr(os, call), 0

    def concerns(what: Any) -> bool:
        try:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
        except (OSError, TypeError):
            return False
        return str(path).startswith(str(folder))

    def call_or_fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if args and concerns(args[0]):
            count += 1
            if first <= count < first + num:
                failed.append(count)
                raise OSError(number, os.strerror(number), None if isinstance(args[0], int) else str(args[0]))
        return original(*args, **kwargs)

    setattr(os, call, call_or_fail)
    try:
        yield failed
    finally:
        setattr(os, call, original)


@cache
def undisturbed(given: Settings) -> dict[int, State]:
    engine, states = build(given), {}
    for step in range(1, NUM_STEPS + 1):
        make_step(engine, step)
        states[step] = state_of(engine)
    engine.destroy()
    return states


def run_disk(dice: random.Random) -> Result:
    given = draw_settings(dice)
    wanted = undisturbed(given)
    name, call = dice.choice(ERRORS), dice.choice(list(CALLS))
    first, num = dice.randint(1, CALLS[call]), dice.choice((1, 1, 3, 10, 1000))
    case = f"{call} fails with {name} from call {first}, {num} times; {given}"
    kind, problems, errors, written, num_failed = f"{call}: {name}", [], [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        engine = build(given)
        with said() as lines:
            for step in range(1, NUM_STEPS + 1):
                make_step(engine, step)
                # The disk fails while steps 3 and 4 are saved: before and after that, it works.
                with failing(root, call, first, num if step in (3, 4) else 0, getattr(errno, name)) as failed:
                    try:
                        engine.save_checkpoint(root)
                        engine.wait_for_checkpoint()
                        written = step
                    except OSError as error:
                        errors.append(str(error))
                        if str(root) not in str(error):
                            problems.append(f"no file in {error!r}")
                    except Exception as error:
                        problems.append(f"{error!r}")
                num_failed += len(failed)
                # An error that comes late, such as one in removing old checkpoints, leaves the new one in place.
                problems += _compare(given, root, [wanted[one] for one in range(written, step + 1)])
        if not is_same(state_of(engine), wanted[NUM_STEPS]):
            problems.append("training was changed")
        engine.destroy()
        left = sorted(path.name for path in root.iterdir())
        if left != ["global_step5", "global_step6", "latest"]:
            problems.append(f"left behind: {left}")
    if not num_failed:
        return run_disk(dice)  # this save does not call the function so often
    if problems:
        silent = any("wrong state" in one or "was changed" in one for one in problems)
        return Result(kind, case, "silent" if silent else "wrong", "; ".join([*problems, *lines]))
    return Result(kind, case, "named" if errors else "finished")


def _compare(given: Settings, root: Path, wanted: list[State]) -> list[str]:
    """What is wrong with the last checkpoint, which another engine loads, if it has none of the wanted states."""
    engine = build(given)
    try:
        engine.load_checkpoint(root)
        found = state_of(engine)
    except Exception as error:
        return [f"wrong state: {error!r}"]
    finally:
        engine.destroy()
    return [] if any(is_same(found, one, but=("torch",)) for one in wanted) else ["wrong state"]


# Numbers.

VALUES = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
PLACES = ("input", "loss", "gradient", "activation", "learning rate", "weight decay", "beta", "weight")
COUNTED = ("num_steps", "num_skipped", "num_jobs", "steps", "skipped", "torch")  # what a skipped step changes
OPTIONS = {"learning rate": "lr", "weight decay": "weight_decay"}


def run_number(dice: random.Random) -> Result:
    given = draw_settings(dice)
    value, place, step = dice.choice(list(VALUES)), dice.choice(PLACES), dice.randint(2, NUM_STEPS - 1)
    micro, layer = dice.randrange(given.accumulation), dice.randrange(4)
    if given.rule == "SGD" and place == "beta":
        place = "learning rate"
    kind, case = (
        f"{place}: {value}",
        f"{value} in the {place}, step {step}, micro-batch {micro}, layer {layer}; {given}",
    )
    engine = build(given)
    if place in ("learning rate", "weight decay", "beta"):
        return _run_option(engine, kind, case, VALUES[value], place, step)
    if place == "weight":
        return _run_weight(engine, kind, case, VALUES[value], step, layer)
    found, skipped = _spoiled(engine, VALUES[value], place, step, micro, layer), engine.skipped_steps
    engine.destroy()
    wanted = _without(given, step)
    bad = [key for key in found if key not in COUNTED and not is_same({key: found[key]}, {key: wanted[key]})]
    is_finite = all(bool(one.isfinite().all()) for one in found.values() if isinstance(one, torch.Tensor))
    if skipped == 1 and is_finite and not bad:
        return Result(kind, case, "finished")
    return Result(kind, case, "silent", f"{skipped} steps were skipped; other than without the step: {bad}")


def _spoiled(engine: Engine, value: float, place: str, step: int, micro: int, layer: int) -> State:
    seen = 0

    def spoil(where: str, found: Any) -> Any:
        nonlocal seen
        seen += where == place
        if where == place and seen == micro + 1:
            return found * value if where == "loss" else torch.full_like(found, value)
        return found

    for number in range(1, NUM_STEPS + 1):
        handle = None
        if number == step and place in ("gradient", "activation"):
            handle = _spoil_inside(engine, place, layer, micro, value)
        make_step(engine, number, spoil if number == step else lambda where, found: found)
        if handle is not None:
            handle.remove()
    return state_of(engine)


@cache
def _without(given: Settings, step: int) -> State:
    """The state of a run that leaves out one step. With `delayed_update` the update before it comes one step earlier
    then, so there the wanted state is that of a run with a NaN loss.
    """
    engine = build(given)
    if given.delayed:
        found = _spoiled(engine, math.nan, "loss", step, 0, 0)
    else:
        for number in range(1, NUM_STEPS + 1):
            if number != step:
                make_step(engine, number)
        found = state_of(engine)
    engine.destroy()
    return found


def _spoil_inside(engine: Engine, place: str, layer: int, micro: int, value: float) -> Any:
    calls = 0
    module: Any = engine.module[layer]  # type: ignore[index]

    def spoil(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != micro + 1:
            return None
        return args[-1] * value if place == "activation" else torch.full_like(args[-1], value)

    return module.weight.register_hook(spoil) if place == "gradient" else module.register_forward_hook(spoil)


def _run_option(engine: Engine, kind: str, case: str, value: float, place: str, step: int) -> Result:
    """A setting that is not finite is refused by name, and the weights stay as they were."""
    assert engine.optimizer is not None
    for number in range(1, step):
        make_step(engine, number)
    before, text = state_of(engine), ""
    group: Any = engine.optimizer.param_groups[0]
    key = OPTIONS.get(place, "betas")
    try:
        group[key] = (value, *group[key][1:]) if key == "betas" else value
        make_step(engine, step)
        engine.optimizer.wait()
    except (ValueError, FloatingPointError) as error:
        text = str(error)
    except Exception as error:
        return Result(kind, case, "wrong", repr(error))
    found = {name: param.detach() for name, param in engine.module.named_parameters()}
    if key in text:
        same = all(torch.equal(before[name], one) for name, one in found.items())
        return Result(kind, case, "named" if same else "silent", "" if same else "weights have changed")
    finite = all(bool(one.isfinite().all()) for one in found.values())
    return Result(kind, case, "wrong" if finite else "silent", text or "no error")


def _run_weight(engine: Engine, kind: str, case: str, value: float, step: int, layer: int) -> Result:
    """A weight that the loop itself has spoiled: no step is applied from then on, so that nothing else is spoiled."""
    try:
        for number in range(1, NUM_STEPS + 1):
            if number == step:
                with torch.no_grad():
                    engine.module[layer].weight[0, 0] = value  # type: ignore[index, union-attr]
            make_step(engine, number)
    except RuntimeError as error:  # with `delayed_update` a loop may not write to weights
        engine.destroy()
        ending = "named" if f"{layer}.weight" in str(error) else "wrong"
        return Result(kind, case, ending, "" if ending == "named" else str(error))
    bad = sum(int((~one.detach().isfinite()).sum()) for one in engine.module.parameters())
    skipped, wanted = engine.skipped_steps, NUM_STEPS - step + 1
    engine.destroy()
    if (bad, skipped) == (1, wanted):
        return Result(kind, case, "finished")
    return Result(kind, case, "silent", f"{bad} weights are not finite, {skipped} of {wanted} steps were skipped")


FAMILIES: dict[str, Callable[[random.Random], Result]] = {"files": run_file, "disk": run_disk, "numbers": run_number}
