"""Any torch.optim.Optimizer: its update of one bucket, on fp32 copies of the bucket's parameters.

The copies, and with them what the optimizer keeps, live on the host, or for resident buckets on the device.

Each bucket has an optimizer of its own, over whole parameters that are views of the bucket's flat fp32 master. So every
optimizer works whose update of a parameter needs that parameter and its group's options only, as matrix rules (Muon,
Adafactor) do. One that mixes parameters (a line search, a trust ratio over the model) would see one bucket at a time.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow import native
from twinflow.device import Device
from twinflow.errors import bad_value
from twinflow.offload.bucket import Bucket, Options, Task
from twinflow.offload.plan import BucketPlan
from twinflow.offload.updater import hidden_zeros
from twinflow.rules.formats import rounds_to
from twinflow.rules.segment import Store

Hosts = Mapping[Tensor, nn.Parameter]  # what stands for each of the model's parameters
# Not the user's wishes: the lists themselves, and whether a CUDA graph may hold the step, which the host has none of.
_NOT_OPTIONS: Final = ("params", "param_names", "capturable")


class Recipe:
    """How the user's optimizer is made over any of its parameters, and what it is like over all of them.

    `rule` is called with parameters, or groups where `given` has groups, and the options: a class, a partial, any
    function. Or it is an optimizer, whose options, attributes and state are copied. `given` is what torch.optim takes.
    """

    def __init__(
        self, rule: Optimizer | Callable[..., Optimizer], given: Iterable[Any], options: Mapping[str, Any]
    ) -> None:
        self._rule, self._options = rule, dict(options)
        self._given, names = _normal(given)
        known = [param for entry in self._given for param in _params_of(entry)]
        if isinstance(rule, Optimizer):
            _check_instance(rule, known, options)
            whole, back = rule, {param: param for param in known}
        else:
            # Pages nobody writes to: stand-ins cost address space only, where the real ones may not fit twice.
            stands = {p: nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device="cpu")) for p in known}
            whole, back = self._call(stands), {stand: param for param, stand in stands.items()}
        _check_step(whole)
        kind = type(whole)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        self.defaults: dict[str, Any] = dict(whole.defaults)
        self.groups: list[dict[str, Any]] = [_over(group, back, names) for group in whole.param_groups]

    def build(self, hosts: Hosts) -> Optimizer:
        """A fresh optimizer over some of the parameters, as they are on the host."""
        return self._clone(self._rule, hosts) if isinstance(self._rule, Optimizer) else self._call(hosts)

    def _call(self, hosts: Hosts) -> Optimizer:
        assert not isinstance(self._rule, Optimizer)
        made = self._rule(_replaced(self._given, hosts), **self._options)
        if not isinstance(made, Optimizer):
            raise bad_value("rule(params)", made, "a torch.optim.Optimizer")
        if _members(made) != set(hosts.values()):
            raise bad_value(
                "rule(params)",
                f"{type(made).__name__} over other parameters",
                "an optimizer over the parameters it is given, all of them",
                "It is called several times, each time with some of the parameters in host memory.",
            )
        return made

    def _clone(self, source: Optimizer, hosts: Hosts) -> Optimizer:
        """The same optimizer over host parameters, by way of its attributes: few constructors can be called again."""
        memo: dict[int, Any] = {id(p): hosts.get(p, p) for p in _members(source)}  # found in the place of a copy
        inner: Optimizer = object.__new__(type(source))
        others = {k: v for k, v in vars(source).items() if k not in ("state", "param_groups")}
        vars(inner).update(copy.deepcopy(others, memo))
        inner.param_groups = [
            {**{k: on_host(v) for k, v in group.items() if k not in ("params", "param_names")}, "params": params}
            for group in source.param_groups
            if (params := [hosts[p] for p in group["params"] if p in hosts])
        ]
        inner.state = defaultdict(dict)
        for param, host in hosts.items():
            if param in source.state:
                state = {k: _wide(v) for k, v in on_host(source.state[param]).items()}
                inner.state[host] = _beside(host, state, _group_of(inner, host))
        return inner


@dataclass
class Inner:
    """One bucket's optimizer."""

    optimizer: Optimizer
    params: list[nn.Parameter]  # of each slice
    flats: list[Tensor]  # the same memory, flat: each slice of the master
    outer: list[int | None]  # the user's group that each of its groups belongs to; None: it is empty
    seen: dict[int, dict[str, Any]]  # the options of the user's groups when last looked at
    kept: dict[Any, Any] = field(default_factory=dict)  # states on the host, while the optimizer works on the device

    def groups(self) -> list[tuple[dict[str, Any], int]]:
        """Its groups, and the user's that each belongs to."""
        pairs = zip(self.optimizer.param_groups, self.outer, strict=True)
        return [(group, outer) for group, outer in pairs if outer is not None]

    def group_of(self, param: nn.Parameter) -> tuple[dict[str, Any], dict[str, Any]]:
        """The group that a parameter is in, and the user's options for it."""
        return next((group, self.seen[g]) for group, g in self.groups() if any(p is param for p in group["params"]))

    def follow(self, options: Sequence[Options]) -> None:
        """Take over what the user has changed since the last look, and only that: optimizers also count steps and keep
        estimates in their groups, which are not the user's."""
        for group, g in self.groups():
            group.update(on_host(_changes(options[g], self.seen[g])))
        for g, seen in self.seen.items():
            seen.update(on_host(_changes(options[g], seen)))

    def step(self, task: Task, grads: Tensor) -> None:
        """One step with fp32 gradients, for the slices that have one."""
        self.follow(task.job.options)
        for i in task.present:
            piece, param = task.bucket.slices[i], self.params[i]
            param.grad = grads.narrow(0, piece.offset, piece.numel).view(param.shape)
        self.optimizer.step()
        for i in task.present:
            self.params[i].grad = None
            _own(self.optimizer.state.get(self.params[i], {}), grads)


class TorchUpdater:
    """The user's optimizer, one of it for each bucket; with `where`, on that device."""

    can_shadow = False

    def __init__(self, recipe: Recipe, device: Device, where: torch.device | None = None) -> None:
        self.recipe = recipe
        self.is_on_device = where is not None
        self._device, self._where = device, where
        self._inners: dict[int, Inner] = {}
        self._grads = torch.empty(0)  # of the bucket that is updated now: there is one worker

    def new_store(self, plan: BucketPlan) -> Store:
        """A master of zeros, page-locked where weights are sent from it. The optimizer keeps the states."""
        if self._where is not None:
            return Store("fp32", torch.zeros(plan.numel, dtype=torch.float32, device=self._where))
        if plan.dtype == torch.float32:
            return Store("fp32", self._device.pinned(plan.numel, torch.float32).zero_())
        return Store("fp32", hidden_zeros(plan.numel, dtype=torch.float32))

    def start(self, bucket: Bucket, options: Sequence[Options]) -> None:
        """Make the bucket's optimizer. The master must hold the weights by now: some optimizers look at them here."""
        flats = [bucket.store.master.narrow(0, piece.offset, piece.numel) for piece in bucket.slices]
        params = [nn.Parameter(flat.view(p.tensor.shape)) for flat, p in zip(flats, bucket.params, strict=True)]
        hosts: Hosts = {param.tensor: host for param, host in zip(bucket.params, params, strict=True)}
        optimizer = self.recipe.build(hosts)
        outer_of = {host: param.group for param, host in zip(bucket.params, params, strict=True)}
        outer = [_one_group(group["params"], outer_of) for group in optimizer.param_groups]
        seen = {g: host_options(options[g]) for g in set(outer_of.values())}
        inner = self._inners[bucket.plan.index] = Inner(optimizer, params, flats, outer, seen)
        for group, g in inner.groups():
            group.update(on_host(seen[g]))
            if "capturable" in group:
                group["capturable"] = False
        for i, host in enumerate(params):  # an optimizer that was in use goes on counting
            bucket.steps[i] = _num_steps(optimizer.state.get(host, {}))

    def needs_weight_slot(self, plan: BucketPlan) -> bool:
        """Half precision beside the fp32 master, where that is on the host."""
        return plan.dtype != torch.float32 and not self.is_on_device

    def prepare(self, task: Task, factor: float) -> Callable[[], None]:
        """The update; on the device the weights are sent from the master."""
        grads = task.grads
        assert grads is not None
        if self.is_on_device:
            self.publish(task)
            return partial(self._step, task, grads, factor)
        return partial(self.update, task, factor)

    def update(self, task: Task, factor: float) -> None:
        """One step of the bucket's optimizer in the calling thread, and its weights."""
        assert task.shadow is None and task.grads is not None
        if torch.get_num_threads() != native.get_threads():
            torch.set_num_threads(native.get_threads())  # this thread's own number: torchrun would leave it at one
        self._step(task, task.grads, factor)
        self.publish(task)

    def inner(self, bucket: Bucket) -> Inner:
        """The bucket's optimizer."""
        return self._inners[bucket.plan.index]

    def beside(self, bucket: Bucket, param: nn.Parameter) -> dict[str, Any]:
        """Copies of a parameter's state where the parameter is now."""
        inner = self.inner(bucket)
        return _beside(param, inner.optimizer.state[param], inner.group_of(param)[0], copies=True)

    def step_on(self, task: Task, given: Tensor, factor: float) -> None:
        """One step of the bucket's optimizer, wherever its parameters are."""
        inner, wide = self.inner(task.bucket), given.to(torch.float32, copy=True)
        inner.step(task, wide.mul_(factor) if factor != 1.0 else wide)

    def _step(self, task: Task, given: Tensor, factor: float) -> None:
        """One step of the bucket's optimizer, with gradients for the slices that have one."""
        inner = self.inner(task.bucket)
        inner.step(task, self._wide_grads(given, factor))
        for i in task.present:
            param, flat = inner.params[i], inner.flats[i]
            if param.data_ptr() != flat.data_ptr():  # it gave the parameter new memory: take the values back into ours
                param.data = flat.copy_(param.detach().reshape(-1)).view(param.shape)

    def _wide_grads(self, grads: Tensor, factor: float) -> Tensor:
        """The gradients times the factor in fp32: in their own memory, which is free after this, where they are so."""
        if grads.device.type != "cpu":
            wide = grads.float()
            return wide.mul_(factor) if factor != 1.0 else wide
        if grads.dtype != torch.float32:
            if self._grads.numel() < grads.numel():
                self._grads = native.huge_zeros(grads.numel(), dtype=torch.float32)
            wide = self._grads[: grads.numel()]
            native.cast(wide, grads)
            grads = wide
        if factor != 1.0:
            native.scale_in_place(grads, factor)
        return grads

    def read(self, bucket: Bucket, index: int) -> dict[str, Any]:
        """One slice's flat master; under `state` what its optimizer keeps for it, as it is; under `group` what the
        optimizer itself has written into its param group (counters, say)."""
        inner = self._inners[bucket.plan.index]
        param = inner.params[index]
        state = dict(inner.optimizer.state.get(param, {}))
        values: dict[str, Any] = {"master": inner.flats[index].cpu(), "state": _read_back(state)}
        own = _changes(*inner.group_of(param))
        return {**values, "group": own} if own else values

    def write(self, bucket: Bucket, index: int, values: Mapping[str, Any]) -> None:
        """Take over copies of what `read` gave."""
        inner = self._inners[bucket.plan.index]
        param = inner.params[index]
        inner.flats[index].copy_(values["master"])
        group = inner.group_of(param)[0]
        inner.optimizer.state[param] = _beside(param, on_host(values.get("state", {})), group)
        group.update(on_host(values.get("group", {})))

    def clear(self, bucket: Bucket, index: int, options: Sequence[Options]) -> None:
        """Forget what the optimizer keeps for one slice."""
        inner = self._inners[bucket.plan.index]
        inner.optimizer.state.pop(inner.params[index], None)

    def write_master(self, bucket: Bucket, index: int, values: Tensor, keep: bool) -> None:
        """A new master from the parameter's values; with `keep`, only where the old one is not what they round from."""
        piece = bucket.slices[index]
        master = bucket.store.master.narrow(0, piece.offset, piece.numel)
        wide = values.float()
        master.copy_(torch.where(rounds_to(master, values.to(master.device)), master, wide) if keep else wide)

    def publish(self, task: Task) -> None:
        """Weights as they follow from the master: rounded into the slot, or straight from the master."""
        bucket, plan, slot = task.bucket, task.bucket.plan, task.weight_slot
        if slot is not None:
            native.cast(slot.view(plan.dtype, plan.numel), bucket.store.master)
        task.weights = self._inners[plan.index].flats if slot is None else slot.pieces(plan)

    def forget(self, bucket: Bucket) -> None:
        """Its optimizer, and page-locked memory."""
        self._inners.pop(bucket.plan.index, None)
        self._device.release(bucket.store.master)


# Options.


def host_options(group: Options) -> dict[str, Any]:
    """A param group's options as they are now, whatever happens to the group later (schedulers write into tensors)."""
    return {name: on_host(value) for name, value in group.items() if name not in _NOT_OPTIONS}


def _changes(now: Options, seen: Options) -> dict[str, Any]:
    """The options that are not what they were when seen."""
    return {k: v for k, v in now.items() if k not in _NOT_OPTIONS and not (k in seen and _is_same(seen[k], v))}


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool((a.cpu() == b.cpu()).all())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _one_group(params: Iterable[nn.Parameter], outer_of: Mapping[nn.Parameter, int]) -> int | None:
    groups = {outer_of[param] for param in params}
    if len(groups) > 1:
        raise bad_value(
            "rule(params)",
            "an optimizer that groups parameters differently when it gets only some of them",
            "one whose groups depend on each parameter alone",
            "Give the groups as param_groups instead.",
        )
    return groups.pop() if groups else None


# State.


def on_host(value: Any) -> Any:
    """A copy in host memory that shares nothing with the original; tensors may be nested in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {on_host(key): on_host(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_host(item) for item in value)
    return copy.deepcopy(value)


def _wide(value: Any) -> Any:
    """State of a half-precision parameter, as that of its fp32 copy."""
    is_half = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0
    return value.float() if is_half else value


def _beside(param: Tensor, state: dict[str, Any], group: Mapping[str, Any], copies: bool = False) -> dict[str, Any]:
    """State where its parameter is. Counters stay on the host, unless a fused step reads them on the device."""
    is_fused = bool(group.get("fused"))

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            is_there = value.ndim or is_fused
            return value.to(param.device, non_blocking=copies, copy=copies) if is_there else value
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        return type(value)(map(moved, value)) if type(value) in (list, tuple) else value

    return {key: moved(value) for key, value in state.items()}


def _read_back(value: Any) -> Any:
    """State on the host; what is there already is not copied."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _read_back(item) for key, item in value.items()}
    return type(value)(map(_read_back, value)) if type(value) in (list, tuple) else value


def _group_of(optimizer: Optimizer, param: Tensor) -> Mapping[str, Any]:
    return next(group for group in optimizer.param_groups if any(p is param for p in group["params"]))


def _own(state: dict[str, Any], grads: Tensor) -> None:
    """Where an optimizer has kept a gradient instead of a copy, make the copy: the buffer is used again."""
    memory = grads.untyped_storage().data_ptr()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
            state[name] = value.clone()


def _num_steps(state: Mapping[str, Any]) -> int:
    """How many updates a state has seen: at least one unless it says none, as Adagrad's does when it is new."""
    return int(state["step"]) if "step" in state else int(bool(state))


# What the user gave.


def _normal(given: Iterable[Any]) -> tuple[list[Any], dict[Tensor, str]]:
    """Parameters or groups of them, trainable ones only, that can be gone through again; and their names if given."""
    names: dict[Tensor, str] = {}

    def tensors(params: Iterable[Any]) -> list[Tensor]:
        found = []
        for param in params:
            if isinstance(param, tuple):
                names[param[1]] = param[0]
            tensor = param[1] if isinstance(param, tuple) else param
            if tensor.requires_grad:
                found.append(tensor)
        return found

    entries = list(given)
    if not (entries and isinstance(entries[0], dict)):
        return tensors(entries), names
    groups = []
    for entry in entries:
        params = [entry["params"]] if isinstance(entry["params"], Tensor) else list(entry["params"])
        names.update(zip(params, entry.get("param_names", ()), strict=False))
        groups.append({**{k: v for k, v in entry.items() if k != "param_names"}, "params": tensors(params)})
    return groups, names


def _params_of(entry: Any) -> list[Tensor]:
    return entry["params"] if isinstance(entry, dict) else [entry]


def _replaced(given: list[Any], hosts: Hosts) -> list[Any]:
    """What the user gave, with host parameters in the place of the model's, and nothing where there is none."""
    if not (given and isinstance(given[0], dict)):
        return [hosts[param] for param in given if param in hosts]
    groups = [{**group, "params": [hosts[p] for p in group["params"] if p in hosts]} for group in given]
    return [group for group in groups if group["params"]]


def _members(optimizer: Optimizer) -> set[Tensor]:
    return {param for group in optimizer.param_groups for param in group["params"]}


def _over(group: Mapping[str, Any], back: Mapping[Any, Tensor], names: Mapping[Tensor, str]) -> dict[str, Any]:
    """A group of the whole optimizer, over the model's parameters."""
    params = [back[param] for param in group["params"] if param in back]
    own = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    if names and all(param in names for param in params):
        own["param_names"] = [names[param] for param in params]
    return {**own, "params": params}


def _check_instance(source: Optimizer, known: Sequence[Tensor], options: Mapping[str, Any]) -> None:
    kind = type(source).__name__
    if options:
        raise bad_value("options", dict(options), f"none: the {kind} given as rule has its own")
    unknown = [tuple(p.shape) for p in _members(source) - set(known) if p.requires_grad]
    if unknown:
        remedy = "Build the optimizer over the parameters of the model that is given with it."
        raise bad_value(f"parameters of the {kind} given as rule", unknown[:3], "parameters of the model", remedy)
    if any(isinstance(value, Optimizer) for value in vars(source).values()):
        remedy = f"Give a function instead: rule=lambda params: {kind}(...)"
        raise bad_value("rule", kind, "an optimizer that does not wrap another", remedy)
    if hasattr(source.step, "_wrapped_by_lr_sched"):
        remedy = "Make the scheduler after this, over the optimizer that is made here."
        raise bad_value("rule", f"{kind} with an LR scheduler", "an optimizer without one", remedy)
    if source._optimizer_step_pre_hooks or source._optimizer_step_post_hooks:
        remedy = "Register them on the optimizer that is made here."
        raise bad_value("rule", f"{kind} with step hooks", "an optimizer without hooks", remedy)


def _check_step(optimizer: Optimizer) -> None:
    """Refuse here what would fail in the background later."""
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise bad_value("rule", kind.__name__, "optimizers for dense gradients", "Take torch.optim.Adam.")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [
        p.name for p in list(inspect.signature(kind.step).parameters.values())[1:]
        if p.default is p.empty and p.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)
    ]  # fmt: skip
    if wanted:
        remedy = "It evaluates the model inside its step, which cannot run beside the model."
        raise bad_value("rule", kind.__name__, f"optimizers whose step needs no {wanted[0]}", remedy)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise bad_value("differentiable", True, [False], f"The update of {kind.__name__} runs without autograd.")
