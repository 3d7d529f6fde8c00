# SPDX-License-Identifier: Apache-2.0
"""0/1 Adam and 1-bit LAMB in an engine: every rank has the whole state, and the optimizer itself communicates.

0/1 Adam makes steps after which ranks have different weights, and LAMB needs norms of whole parameters. Neither is
possible if ranks share buckets, as in 1-bit Adam of an engine (zero/compression.py). `ReplicatedOptimizer` therefore
has a runtime without buckets, which starts no updates, and the optimizer of twinflow.optim.onebit makes the steps. A
step is complete when `step()` returns: nothing overlaps.

Threads: only the user's thread changes state here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import overload

import torch
from torch import Tensor, nn

from twinflow.conflicts import conflict
from twinflow.device import device_for
from twinflow.offload.runtime import Runtime
from twinflow.offload.weight_guard import check_free
from twinflow.optim import loss_scale as scales
from twinflow.optim import twin_build as build
from twinflow.optim import twin_checks as checks
from twinflow.optim import twin_state
from twinflow.optim.closure import loss_of
from twinflow.optim.onebit.base import CompressedOptimizer
from twinflow.optim.switch import Read, Replica, SavedErrors, own_errors, tree_of
from twinflow.optim.twin import Loss, TwinOptimizer
from twinflow.optim.twin_state import Source
from twinflow.rules import ADAMW
from twinflow.state_dict import Entry, ParamEntry, StateDict, dict_of, int_of, mapping_of, saved_groups, value_of
from twinflow.zero import Team, Zero


class ReplicatedOptimizer(TwinOptimizer):
    """Trains `model` with an optimizer of twinflow.optim.onebit, and has the interface that engines use.

    `kind` is the class of that optimizer and `options` are its options. `zero` has stage 0, or is None for one rank.
    A step with a gradient that is not finite is skipped on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: type[CompressedOptimizer],
        options: Mapping[str, object],
        *,
        param_groups: Iterable[ParamEntry] | None = None,
        max_grad_norm: float | None = None,
        loss_scale: scales.LossScale | None = None,
        accumulation_steps: int = 1,
        zero: Zero | None = None,
    ) -> None:
        self._kind = kind
        self._own_options = {name: value for name, value in options.items() if name not in ADAMW.defaults}
        super().__init__(
            model,
            ADAMW.name,  # the options of a param group are those of AdamW
            param_groups=param_groups,
            ratio=0.0,
            max_grad_norm=max_grad_norm,
            skip_nonfinite=True,
            loss_scale=loss_scale,
            accumulation_steps=accumulation_steps,
            zero=zero,
            # The constructor checks the values.
            **{name: value for name, value in options.items() if name in ADAMW.defaults},  # type: ignore[arg-type]
        )
        self.rule_name = kind.__name__

    def _build(self) -> Runtime:
        check_free((name, tensor) for name, tensor, _ in self._named())
        params, _, _ = build.params_of(self.model, self._named(), splits_params=True)
        checks.check_params(params, self.zero)
        where = params[0].tensor.device
        group, wire_dtype = None, None
        if self.zero is not None:
            self.team = Team(self.zero, where)
            group, wire_dtype = self.team.groups["reduce"], self.zero.dtype
        # torch appends these dicts themselves to the groups of the inner optimizer. Both have the same options.
        self._inner = self._kind(
            self.param_groups,
            max_grad_norm=self.max_grad_norm,
            wire_dtype=wire_dtype,
            group=group,
            **self._own_options,  # type: ignore[arg-type]  # the class checks its options
        )
        device = device_for(where, self.trace)
        updaters, me = self.kind.new_updaters(device, where), weakref.ref(self)
        return Runtime(device, updaters, params, [], self._settings, list, lambda: 1.0, owner=me)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Makes one update on all ranks, or on none if a gradient of one or more ranks is not finite."""
        loss = loss_of(closure)
        self.runtime.check()
        tensors = [param.tensor for param in self.runtime.params]
        if self.team is None and all(tensor.grad is None for tensor in tensors):
            self._was_applied = self._was_skipped = False
            return loss
        self._check_scaled()
        self._inner.set_loss_scale(self.scale_rule.scale)
        num_skipped = self._inner.num_skipped
        self._inner.step()
        self._was_skipped = self._inner.num_skipped > num_skipped
        self._was_applied = not self._was_skipped
        self.num_steps += 1
        self.num_skipped += self._was_skipped
        self.scale_rule = scales.after_step(self.scale_rule, self._was_skipped)
        return loss

    @property
    def grad_norm(self) -> float | None:
        """The gradient norm of the last step before clipping; with compressed communication an upper bound of it."""
        return self._inner.grad_norm

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks have the same weights now. Only then can a checkpoint be saved."""
        return self._inner.is_in_step

    @property
    def host_share(self) -> float:
        """0: the state is where the model is."""
        return 0.0

    def _move_state(self, call: str, places: Mapping[int, str]) -> None:
        raise conflict("0/1 Adam and 1-bit LAMB", "moved state", call=call)

    # Saving. The errors of this rank as a worker are saved apart, because each rank has its own.

    def state_dict(self) -> StateDict:
        """The state without this rank's errors as a worker (`exchange_errors`). All ranks must call it."""
        head, entries = self.stream_state()
        read = {name: _values(entry) for name, entry in entries}
        return {**head, "state": read}

    def stream_state(self) -> tuple[StateDict, Iterator[tuple[str, StateDict]]]:
        """`state_dict()` with an `Entry` in place of each tensor. All ranks must call it."""
        self.runtime.check()
        found = self._inner.portable_state_dict(is_view=True)
        state = value_of(found, "state", dict)
        head = {**twin_state.head(self, None), "compression": found["compression"]}
        return head, ((param.name, _streamed(param.name, state[param.index])) for param in self.runtime.params)

    def check_state(self, state_dict: Mapping[str, object], source: Source) -> None:
        """Raises ValueError for a state that `load_state_dict` would refuse. Changes nothing."""
        twin_state.check(self, None, state_dict, source)
        names = set(source.names())
        missing = [param.name for param in self.runtime.params if param.name not in names]
        if missing:
            remedy = "Train the same parameters as when the state was saved."
            raise ValueError(f"state_dict: {missing[0]} has no state, but every trained parameter must. {remedy}")
        self._inner.check_head(mapping_of(state_dict, "compression"))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, object], source: Source | None = None) -> None:
        """Loads a state of `state_dict()`. The state is checked before the optimizer changes."""
        source = twin_state.source_of(self, state_dict) if source is None else source
        self.check_state(state_dict, source)
        state = {}
        for param in self.runtime.params:
            cut = source.cut(param.name, 0, param.tensor.numel())
            tensors = {key: value.view(param.shape) for key, value in cut.items() if isinstance(value, Tensor)}
            state[param.index] = {"step": source.step(param.name), **dict_of(cut, "counts"), **tensors}
        groups, head = saved_groups(state_dict), mapping_of(state_dict, "compression")
        self._inner.load_state_dict({"state": state, "param_groups": groups, "compression": head})
        scale = scales.from_dict(mapping_of(state_dict, "loss_scale"))
        self.restore_outcomes(int_of(state_dict, "num_steps"), int_of(state_dict, "num_skipped"), scale)

    @property
    def is_compressed(self) -> bool:
        """Whether ranks have exchanged compressed values."""
        return self._inner.has_errors

    @property
    def _replica(self) -> Replica:
        return Replica(0, 1) if self.team is None else Replica(self.team.rank, self.team.world)

    def exchange_errors(self) -> SavedErrors:
        """This rank's compression errors as a worker, for its part of a checkpoint."""
        errors = self._inner.worker_errors()
        flats = {param.index: errors[param.tensor].reshape(-1) for param in self.runtime.params}
        return tree_of(self.runtime.params, flats, str, self._replica)

    def check_exchange_errors(self, saved: Sequence[SavedErrors], read: Read) -> None:
        """Raises an exception if `load_exchange_errors` could not load them. `read`: tensors of the saved shapes."""
        self._errors_from(saved, read)

    def load_exchange_errors(self, saved: Sequence[SavedErrors], read: Read) -> None:
        """Loads `exchange_errors` of all ranks: this rank's own ones, or the mean with another number of ranks."""
        errors = self._inner.worker_errors()
        for param, found in self._errors_from(saved, read).items():
            errors[param].copy_(found)

    def _errors_from(self, saved: Sequence[SavedErrors], read: Read) -> dict[nn.Parameter, Tensor]:
        if not saved or not saved[0]:
            return {}
        found = own_errors(saved, self.runtime.params, str, self._replica, read)
        return {param.tensor: found[param.index].view(param.shape) for param in self.runtime.params}


def _streamed(name: str, entry: Mapping[str, object]) -> StateDict:
    """The entry of a parameter in a checkpoint, with an `Entry` for each tensor."""
    found: StateDict = {"step": entry["step"], "counts": {"frozen_at": entry["frozen_at"]}}
    for key, value in entry.items():
        if isinstance(value, Tensor):
            # Exponents are whole numbers below 256. bf16 has them exactly, and all states are floating-point numbers.
            saved = value if value.is_floating_point() else value.bfloat16()
            found[key] = Entry(f"{name}/{key}", saved.dtype, tuple(saved.shape), saved.detach)
    return found


def _values(entry: Mapping[str, object]) -> StateDict:
    return {key: value.tensor().clone() if isinstance(value, Entry) else value for key, value in entry.items()}
