# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's five learning-rate schedules, and `build_scheduler`, which builds these and PyTorch's by name.

The values of these five depend only on the step, their parameters and the initial learning rates.

Steps are counted as in DeepSpeed. A new schedule is at step -1, and has set the learning rate of the first optimizer
step. The n-th call of `step()` goes to step n - 1. With `WarmupLR` the first two optimizer steps therefore have the
lowest rate: those of step -1 and of step 0. PyTorch's `last_epoch`, the number of `step()` calls, is one larger.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from twinflow.errors import invalid_value

WARMUP_TYPES = ("log", "linear")
# OneCycle sets the second beta to this value of DeepSpeed while it cycles the first.
CYCLE_BETA2 = 0.99


def build_scheduler(name: str, params: Mapping[str, object], optimizer: Optimizer) -> LRScheduler:
    """Builds a schedule by name: one of `SCHEDULES`, or a class of torch.optim.lr_scheduler.

    Raises ValueError for an unknown name and for parameters that the schedule does not accept.
    """
    known = {**_torch_schedules(), **SCHEDULES}
    by_lower = {key.lower(): key for key in known}
    if not isinstance(name, str) or name.lower() not in by_lower:
        raise invalid_value("scheduler.type", name, known)
    name = by_lower[name.lower()]
    _check_params(known[name], params)
    make: Callable[..., LRScheduler] = known[name]
    if name not in SCHEDULES:
        # PyTorch checks few parameters before the first step, so the schedule is tried with another optimizer.
        groups = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**copy.deepcopy(options), "params": [torch.zeros(1)]})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(optimizer=Optimizer(groups, dict(optimizer.defaults)), **params).step()
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise ValueError(
                f"The scheduler {name} cannot be built with scheduler.params {dict(params)}. Correct scheduler.params. "
                f"The error of {name}: {error}"
            ) from error
    return make(optimizer=optimizer, **params)


def warmup_factor(step: int, num_steps: int, warmup_type: str = "log") -> float:
    """Progress of a warm-up: 0 until step 0, 1 from step `num_steps` (at least 2) on. "log" rises faster at first."""
    if step < 0 or step >= num_steps:
        return 0.0 if step < 0 else 1.0
    return step / num_steps if warmup_type == "linear" else 1.0 / math.log(num_steps) * math.log(step + 1)


@dataclass(frozen=True)
class Cycle:
    """The shape of OneCycle: up, down, then a decay. Sizes are in steps. `first_stairs` and `second_stairs` are the
    numbers of levels in which the rate goes up and down; 0: it changes in every step.
    """

    first_size: float
    second_size: float
    first_stairs: int = 0
    second_stairs: int = 0
    decay_step_size: float = 0

    @property
    def size(self) -> float:
        """Number of steps up and down."""
        return self.first_size + self.second_size


def cycle_height(step: int, cycle: Cycle) -> float:
    """Position of OneCycle between its two bounds: 0 at the start, 1 at the peak, 0 at the end and after it."""
    if step >= cycle.size:
        return 0.0
    turns = 1.0 + (step + 1) / cycle.size
    position, peak = turns - math.floor(turns), cycle.first_size / cycle.size
    is_first = position <= peak
    stairs = cycle.first_stairs if is_first else cycle.second_stairs
    if stairs == 0:
        return position / peak if is_first else (position - 1) / (peak - 1)
    # Stairs are computed from whole steps. A slope that is rounded to just below a stair would lose a whole stair.
    done = (step + 1) % cycle.size
    is_first = done <= cycle.first_size
    stair = done * stairs / cycle.first_size if is_first else (cycle.size - done) * stairs / cycle.second_size
    return math.floor(stair) / stairs


def cycle_decay(step: int, cycle: Cycle, rate: float) -> float:
    """The divisor of OneCycle's rate and the factor of its momentum: 1 in the cycle, then linear in the step.

    Without `decay_step_size` it stays 1.
    """
    if step < cycle.size or cycle.decay_step_size == 0:
        return 1.0
    return 1 + rate * ((step - cycle.size + 1) / cycle.decay_step_size)


class StepSchedule(LRScheduler):
    """A schedule whose learning rates depend only on the step.

    Subclasses set their attributes before super().__init__.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        _check_integer("last_batch_iteration", last_batch_iteration, -1)
        for group in optimizer.param_groups:
            # The optimizer's state_dict saves `initial_lr`, so that a schedule made after loading finds it.
            group.setdefault("initial_lr", float(group["lr"]))
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """The present step; -1 before the first `step()`."""
        return self.last_epoch - 1

    def step(self, epoch: int | None = None) -> None:
        """Goes to the next step (or to step `epoch`) and writes its learning rates into the optimizer."""
        # PyTorch's constructor calls this method too, with its argument in `last_epoch`. The call must then go to the
        # step of that number.
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch + 1
        self._step_count = self.last_epoch + 1
        self._write()

    def _write(self) -> None:
        """Writes the values of the present step into the param groups."""
        groups = self.optimizer.param_groups
        for group, lr in zip(groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = [lr.clone() if isinstance(lr, Tensor) else lr for lr in (g["lr"] for g in groups)]

    def state_dict(self) -> dict[str, object]:
        """The step, under DeepSpeed's key. All other values come from the config."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Goes to the saved step, also one that DeepSpeed has saved, and writes its values into the optimizer."""
        self.step(_check_integer("last_batch_iteration", state_dict.get("last_batch_iteration"), -1))


class LRRangeTest(StepSchedule):
    """Raises the learning rate from a low one, smoothly or in stairs, to find the highest rate that still trains."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _check_integer("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = _check_number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.is_staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(interval) if self.is_staircase else interval)
        return [lr * factor for lr in self.min_lrs]


class OneCycle(StepSchedule):
    """One cycle of the learning rate, up and down, then a decay. The momentum changes in the opposite direction.

    The momentum is `betas[0]` if a group has betas (`betas[1]` is then 0.99, as in DeepSpeed), otherwise `momentum` if
    it is not zero. Before the first `step()` it is `cycle_min_mom`, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.cycle = Cycle(
            _check_number("cycle_first_step_size", cycle_first_step_size, 1),
            _check_number("cycle_second_step_size", second_size, 0),
            _check_integer("cycle_first_stair_count", cycle_first_stair_count, 0),
            _check_integer("cycle_second_stair_count", second_stairs, 0),
            _check_number("decay_step_size", decay_step_size, 0),
        )
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = _check_number("decay_lr_rate", decay_lr_rate)
        self.min_moms = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self.decay_mom_rate = _check_number("decay_mom_rate", decay_mom_rate)
        self.momentum_keys = [_momentum_key(group, optimizer) for group in optimizer.param_groups]
        self.cycle_momentum = bool(cycle_momentum) and any(self.momentum_keys)
        for name, moms in (("cycle_min_mom", self.min_moms), ("cycle_max_mom", self.max_moms)):
            if self.cycle_momentum and "betas" in self.momentum_keys and not all(0 <= mom < 1 for mom in moms):
                expected = "one number >= 0 and < 1 for each param group, because the momentum is the first of betas"
                raise invalid_value(name, moms, expected)
        if cycle_momentum and not self.cycle_momentum:
            warnings.warn(
                f"OneCycle changes only the learning rate, because {type(optimizer).__name__} has no momentum. Set "
                "cycle_momentum to False to remove this warning.",
                stacklevel=2,
            )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        height = cycle_height(self.last_batch_iteration, self.cycle)
        decay = cycle_decay(self.last_batch_iteration, self.cycle, self.decay_lr_rate)
        return [(low + (high - low) * height) / decay for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[float]:
        """The momentum of each group at the present step, if `cycle_momentum` is True."""
        if self.last_batch_iteration < 0:
            return self.min_moms
        height = cycle_height(self.last_batch_iteration, self.cycle)
        decay = cycle_decay(self.last_batch_iteration, self.cycle, self.decay_mom_rate)
        return [(high - (high - low) * height) * decay for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def _write(self) -> None:
        super()._write()
        if not self.cycle_momentum:
            return
        for group, key, momentum in zip(self.optimizer.param_groups, self.momentum_keys, self.get_mom(), strict=True):
            if key:
                group[key] = (momentum, CYCLE_BETA2, *group["betas"][2:]) if key == "betas" else momentum


class WarmupLR(StepSchedule):
    """Raises the learning rate from `warmup_min_lr` to `warmup_max_lr` (None: that of the optimizer), then keeps it."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps = max(2, _check_integer("warmup_num_steps", warmup_num_steps, 1))
        self.warmup_type = _check_warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        factor = self._factor()
        return [low + (high - low) * factor for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _factor(self) -> float:
        return warmup_factor(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """The warm-up of `WarmupLR`, then a linear decay to `warmup_min_lr` at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _check_total(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _factor(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._factor()
        num_decay_steps = max(1.0, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / num_decay_steps)


class WarmupCosineLR(StepSchedule):
    """Multiplies initial learning rates by a factor: from `warmup_min_ratio` to 1, then a cosine to `cos_min_ratio`.

    Before the first `step()` the learning rate is 0, whatever `warmup_min_ratio` is, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _check_total(total_num_steps, warmup_num_steps)
        self.warmup_min_ratio = _check_number("warmup_min_ratio", warmup_min_ratio)
        self.warmup_num_steps = max(2, _check_integer("warmup_num_steps", warmup_num_steps, 1))
        self.cos_min_ratio = _check_number("cos_min_ratio", cos_min_ratio)
        self.warmup_type = _check_warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        return [float(lr) * self.get_lr_ratio() for lr in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """The learning rate of the present step divided by the initial one."""
        step, num_steps = self.last_batch_iteration, self.warmup_num_steps
        if step < 0:
            return 0.0
        if step < num_steps:
            low = self.warmup_min_ratio
            return low + warmup_factor(step, num_steps, self.warmup_type) * (1.0 - low)
        low = self.cos_min_ratio
        progress = min(1.0, (step - num_steps + 1) / max(1, self.total_num_steps - num_steps))
        return max(0.0, low + (1.0 - low) * ((1 + math.cos(math.pi * progress)) / 2))


SCHEDULES: Mapping[str, type[StepSchedule]] = MappingProxyType(
    {kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
)


def _torch_schedules() -> dict[str, type[LRScheduler]]:
    """The schedules of the installed PyTorch by class name, without abstract ones."""
    return {
        name: kind
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, LRScheduler) and kind is not LRScheduler and name[0] != "_"
    }


def _check_params(kind: type, params: Mapping[str, object]) -> None:
    """Raises ValueError for parameters that `kind` does not have, and for missing ones."""
    allowed = {name: p for name, p in inspect.signature(kind).parameters.items() if name != "optimizer"}
    for key, value in params.items():
        if key not in allowed:
            near = get_close_matches(key, allowed, 1)
            raise ValueError(
                f"scheduler.params.{key} is not a parameter of {kind.__name__} (its value is {value!r}). Use "
                f"parameters of {kind.__name__}: {', '.join(allowed)}."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
    missing = [name for name, p in allowed.items() if p.default is inspect.Parameter.empty and name not in params]
    if missing:
        raise ValueError(
            f"scheduler.params is {dict(params)!r}, but {kind.__name__} needs {', '.join(missing)}. Add the missing "
            f"parameters. All parameters of {kind.__name__}: {', '.join(allowed)}."
        )


def _momentum_key(group: Mapping[str, object], optimizer: Optimizer) -> str:
    """The option of a group that is its momentum; "" if it has none or the momentum is 0."""
    if "betas" in group and not group.get("use_muon"):  # the betas in a group of matrices are those of AdamW
        return "betas"
    # SGD with momentum 0 has no momentum buffer. A cycle may set the momentum to 0, so the default counts too.
    return "momentum" if group.get("momentum") or optimizer.defaults.get("momentum") else ""


def _per_group(optimizer: Optimizer, name: str, value: object) -> list[float]:
    """One number for each param group, from a single number or a list."""
    num_groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * num_groups
    if len(values) != num_groups:
        raise invalid_value(
            name, value, f"a number, or a list of one number for each param group ({num_groups} in all)"
        )
    return [_check_number(name, item) for item in values]


def _check_number(name: str, value: object, low: float = -math.inf) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= low:
        return float(value)
    raise invalid_value(name, value, "a finite number" if low == -math.inf else f"a finite number >= {low}")


def _check_integer(name: str, value: object, low: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= low:
        return value
    raise invalid_value(name, value, f"an integer >= {low}")


def _check_warmup_type(value: object) -> str:
    if isinstance(value, str) and value in WARMUP_TYPES:
        return value
    raise invalid_value("warmup_type", value, WARMUP_TYPES)


def _check_total(total_num_steps: object, warmup_num_steps: object) -> float:
    total = _check_number("total_num_steps", total_num_steps, 1)
    if isinstance(warmup_num_steps, int) and total < warmup_num_steps:
        warnings.warn(
            f"total_num_steps ({total:g}) is less than warmup_num_steps ({warmup_num_steps}), so the warm-up is not "
            "complete at the end of training. Use fewer warm-up steps.",
            stacklevel=3,
        )
    return total
