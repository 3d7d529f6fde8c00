"""TwinOptimizer: a torch.optim.Optimizer with state and update on the host, hidden behind forward and backward."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from twinflow import native
from twinflow.device import device_for
from twinflow.errors import invalid_value
from twinflow.native.threads import check_threads, default_threads
from twinflow.offload import reconfigure
from twinflow.offload.changes import check_memory
from twinflow.offload.clipping import Limits
from twinflow.offload.placement import place_by_ratio, stream
from twinflow.offload.plan import plan_buckets
from twinflow.offload.pools import bytes_of_gradients, prepare_speculative_stores
from twinflow.offload.recipe import Recipe
from twinflow.offload.runtime import Runtime
from twinflow.offload.settings import Settings, Tuning
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.offload.torch_state import host_options
from twinflow.offload.weight_guard import check_free, plain
from twinflow.optim import twin_state
from twinflow.optim.auto import AutoPlacement, host_share
from twinflow.optim.loss_scale import LossScale, static
from twinflow.optim.outcomes import Outcomes
from twinflow.optim.saved_errors import Read, SavedErrors
from twinflow.optim.state_kind import StateKind
from twinflow.optim.switch import Switch
from twinflow.optim.switch import check as check_compression
from twinflow.optim.twin_build import (
    Model,
    check_room,
    find_room,
    first_choice,
    fitted,
    materialised,
    own_threads,
    params_of,
    set_aside,
    tensors_of,
)
from twinflow.optim.twin_checks import (
    check_foreign,
    check_group,
    check_groups,
    check_kinds,
    check_model,
    check_param_offload,
    check_params,
    check_ratio,
    check_settings,
    check_tuning,
    groups_of,
)
from twinflow.optim.twin_state_checks import Source
from twinflow.parallel.pipeline import PipelineModule
from twinflow.planner.probe import load_or_measure
from twinflow.rules import RULES, Rule
from twinflow.rules.segment import check_format
from twinflow.state_dict import ParamEntry, StateDict
from twinflow.trace import Trace, write_chrome_trace
from twinflow.zero import Team, Zero
from twinflow.zero.partitioned import forget_gathered, gathered_blocks, gathering_streams
from twinflow.zero.start import own_host_bytes

Loss = TypeVar("Loss")


class TwinOptimizer(Outcomes):
    """An optimizer for a model on a GPU (or CPU), with master weights, states and update on the host.

    `model` is the module to train, or parameters as torch.optim takes them (then `step` waits for the update: without
    the model there is no place to wait in the next forward). `param_groups` chooses parameters of the model and their
    options. `rule` names one of ours, or is any torch.optim.Optimizer: a class, an optimizer built over the model's
    parameters (whose state and options go on from there), or a function from parameters to an optimizer.

    `ratio` is the share of the state that lives on the host and is updated there; the rest stays on the GPU and is
    updated there at the same time; "auto" chooses after the first steps. `placement` is the end of the model that stays
    there: "front", "tail", or "auto", the end that hides most.

    `offload_params`: weights live on the host too, and blocks fetch theirs when they run. The model may come on the
    host; it computes on the GPU, where there is one.

    `early`: gradients are taken and updates start while backward still runs. What a loop does between backward and
    `step` has the effect that it has with torch: what was begun is dropped and done again. Without max_grad_norm and
    skip_nonfinite, updates that were made cannot be dropped, and such a loop gets an error; with "auto", updates then
    start early only after some steps in which nothing of the kind has happened.

    `zero`: the ranks of torch.distributed's world train this model together, each with a batch of its own. All of them
    have to build the same optimizer, and call `step` equally often.
    """

    def __init__(
        self,
        model: Model,
        rule: str | Optimizer | Callable[..., Optimizer] = "adamw",
        *,
        param_groups: Iterable[ParamEntry] | None = None,
        states: str = "fp32",
        ratio: float | str = 1.0,
        placement: str = "auto",
        max_grad_norm: float | None = None,
        skip_nonfinite: bool | None = None,
        loss_scale: LossScale | None = None,
        accumulation_steps: int = 1,
        early: bool | str = False,
        delayed_update: bool = False,
        delayed_update_start: int = 0,
        host_threads: int | None = None,
        zero: Zero | None = None,
        offload_params: bool = False,
        tuning: Tuning | None = None,
        **options: object,
    ) -> None:
        self._runtime: Runtime | None = None
        check_kinds(loss_scale, tuning, zero)
        if host_threads is not None:
            host_threads = check_threads(host_threads, "host_threads")
        made = materialised(model, offload_params)
        self.model = made if isinstance(made, nn.Module) else None
        groups = groups_of(made, param_groups)
        self.rule: Rule | None = None  # one of ours
        self._recipe: Recipe | None = None  # or the user's
        if isinstance(rule, str):
            if rule not in RULES:
                raise invalid_value("rule", rule, RULES)
            self.rule, self.rule_name = RULES[rule], rule
            check_format(self.rule, states)
            defaults = self.rule.with_defaults(options)
            check_group(self.rule, defaults)
        else:
            check_foreign(rule, states, param_groups, zero)
            self._recipe = Recipe(rule, groups, options)
            groups, defaults, self.rule_name = [*self._recipe.groups], self._recipe.defaults, self._recipe.name
        super().__init__(cast(ParamsT, groups), defaults)  # torch refuses what it does not take
        check_groups(self.rule, self.param_groups)
        native.set_threads(host_threads if host_threads is not None else own_threads(default_threads(os.environ)))
        self.states, self.tuning = states, tuning or Tuning()
        check_tuning(self.tuning, delayed_update)
        check_ratio(ratio, placement, self.model)
        self.ratio, self.placement = ratio, placement
        self._auto: AutoPlacement | None = None
        self.trace = Trace()
        self._loss_scale, self._scales_loss = loss_scale or static(1.0), loss_scale is not None
        self._is_stateless = False  # SGD without momentum
        skip = skip_nonfinite if skip_nonfinite is not None else max_grad_norm is not None or loss_scale is not None
        given = Settings(
            limits=Limits(max_grad_norm, skip),
            early=True if early == "auto" else early,  # type: ignore[arg-type]
            watches_first=early == "auto",
            accumulation_steps=accumulation_steps,
            delayed_update=delayed_update,
            delayed_update_start=delayed_update_start,
            offload_params=offload_params,
            tuning=self.tuning,
        )
        self._settings = check_settings(given, self.model)
        check_model(self.model, zero)
        check_param_offload(self._settings, self.model, ratio, self.tuning, zero, self.rule)
        self.zero = zero
        self._switch: Switch | None = None  # to compressed communication
        if zero is not None and zero.compression is not None:
            check_compression(self, delayed_update)
            self._switch = Switch(self, zero.compression)
            self.tuning = replace(self.tuning, sums="device")
        self.team: Team | None = None  # the ranks that share the work
        if self.rule is not None:
            self._is_stateless = not any(self.rule.keeps_states(group) for group in self.param_groups)
        self._runtime = self._build()

    def _build(self) -> Runtime:
        """Plan the buckets, take the weights over, and put hooks on the model."""
        check_free((name, tensor) for name, tensor, _ in self._named())
        aside = None
        if self.model is not None and self._settings.offload_params:
            check_memory((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
            aside = set_aside(self.model, [param for group in self.param_groups for param in group["params"]])
        params, specs, order = params_of(self.model, self._named(), self._recipe is None, aside, self.zero)
        if isinstance(self.model, PipelineModule):
            for param in params:
                param.is_late |= param.name in self.model.reused
        check_params(params, self.zero, aside is not None)
        where = params[0].tensor.device
        if self.zero is not None:
            self.team = Team(self.zero, where)
            if self.zero.shares_buckets:
                given = [p.tensor for p in params] if self.model is None else tensors_of(self.model, aside)
                self.team.broadcast(given)
            if self.zero.stage >= 2 and self.zero.shares_buckets and (self.tuning.sums == "auto" or self.zero.parks):
                # No rank keeps more than its part of the sums of several backwards.
                self.tuning = replace(self.tuning, sums="host")
        device, room = device_for(where, self.trace), find_room(params, self.team)
        kind, ratio = self.kind, self.ratio
        if isinstance(ratio, str):
            self.tuning, ratio = first_choice(kind, self._settings, self.tuning, specs, room)
        parts = place_by_ratio(specs, order, ratio, self.placement)
        plans = stream(plan_buckets(specs, self.tuning.bucket_numel, parts, aside is not None), self.tuning.streamed)
        plans, shards = (plans, None) if self.team is None else self.team.shards(plans, specs)
        sizes = [kind.nbytes(plan) for plan in plans]
        self._settings = fitted(self._settings, self.tuning, plans, sizes, room)
        check_room(plans, sizes, room, self.ratio, bytes_of_gradients(self._settings, plans))
        me = weakref.ref(self)  # the model's hooks hold the runtime, and must not keep the optimizer alive
        runtime = Runtime(
            device,
            kind.new_updaters(device, where),
            params,
            plans,
            self._settings,
            lambda: _held(me)._options_now(),
            lambda: _held(me).loss_scale,
            shards,
            option_names=frozenset(self.defaults) if self.rule is not None else None,
            owner=me,
        )
        if aside is not None:
            runtime.offload_params(
                aside.frozen, aside.values, self.team.fetch if self.team and self.team.world > 1 else None
            )
        # First: an optimizer of the user's may look at the weights when it starts.
        runtime.adopt(params, keep=False, values=aside.values if aside is not None else None)
        if aside is not None:
            aside.values.clear()  # they are in the state: what they took is spare
        for bucket in runtime.buckets:
            if bucket.slices:
                bucket.updater.start(bucket, self.param_groups)
        if self._switch is not None:
            self._switch.reserve(runtime.buckets)
        if self.model is not None:
            reference = weakref.ref(self.model)  # the threads know the device, and must not keep the model alive
            device.set_followers(lambda: gathering_streams(reference()))
            runtime.attach(
                self.model,
                gathered_blocks(self.model),
                in_order=isinstance(self.model, PipelineModule),
                before_gathering=lambda: forget_gathered(reference()),
            )
        if isinstance(self.ratio, str) and room.device_bytes is not None:
            rates = load_or_measure(where)
            # What is spare is known only when the state is where it will stay.
            self._auto = AutoPlacement(
                runtime, self.states, kind.nbytes, rates, self._make_speculative_stores, self.team
            )
        else:
            self._make_speculative_stores(runtime)
        return runtime

    def _make_speculative_stores(self, runtime: Runtime) -> None:
        max_bytes = self._speculative_bytes(runtime.executor.unmade_bytes)
        prepare_speculative_stores(
            runtime.speculative_stores, runtime.executor, runtime.settings, runtime.buckets, max_bytes
        )

    @property
    def kind(self) -> StateKind:
        """What is kept for each parameter."""
        # Parameters are what all ranks know of the weights, which the owners have more exactly.
        keeps_weights = self._settings.delayed_update or self._switch is not None
        return StateKind(
            self.rule,
            self._recipe,
            self.states,
            self._is_stateless,
            keeps_weights,
            self._settings.offload_params,
            self.tuning,
        )

    @property
    def switch(self) -> Switch | None:
        """The switch to compressed communication, where the config asks for one."""
        return self._switch

    @property
    def is_stateless(self) -> bool:
        """Whether nothing but a master is kept: SGD without momentum."""
        return self._is_stateless

    @property
    def delays_updates(self) -> bool:
        """Whether the weights of an update go back one step later."""
        return self._settings.delayed_update

    def _speculative_bytes(self, unmade_bytes: int) -> int:
        """What may be spent on running ahead: asked for, or half of what is spare once all slots are made."""
        if self.tuning.shadow_bytes is not None:
            return self.tuning.shadow_bytes
        return max(0, own_host_bytes() - unmade_bytes) // 2

    def _named(self) -> Iterable[tuple[str, nn.Parameter, int]]:
        names = {p: name for name, p in self.model.named_parameters()} if self.model is not None else {}
        for g, group in enumerate(self.param_groups):
            for i, param in enumerate(group["params"]):
                given = group.get("param_names")
                yield names.get(param, given[i] if given else f"params[{g}][{i}]"), param, g

    @property
    def host_share(self) -> float:
        """The share of the state that lives on the host now."""
        return host_share(self.runtime.buckets)

    @property
    def is_placed(self) -> bool:
        """Whether the state is where it will stay: with ratio "auto", after some steps."""
        return self._auto is None or self._auto.is_settled

    # The loop.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Start what is left of this step's update, and return: the next forward waits where it has to."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        job = self.runtime.step()
        if job is None:
            self._note_no_step()
        else:
            self._read_decision()
            self._unread = job
            self.num_steps += 1
            if self.model is None:
                self.runtime.wait()
            if self._auto is not None:
                self._auto.after_step()
            if self._switch is not None:
                self._switch.after_step()
        return loss

    def _options_now(self) -> list[StateDict]:
        """Of each group, as an update takes them when it begins."""
        rule = self.rule
        for group in self.param_groups if rule is not None else ():
            assert rule is not None
            rule.check(group)
            if self._is_stateless and rule.keeps_states(group):
                option = rule.state_option
                assert option is not None
                remedy = f"The optimizer was built without {option} and keeps no buffer for it: build a new one."
                raise invalid_value(option, group[option], [0.0], remedy)
        return [host_options(group) for group in self.param_groups]

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """`loss.backward()` with the loss scale applied."""
        scale = self.loss_scale
        torch.autograd.backward(loss * scale if scale != 1.0 else loss, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, and what a step in the making has begun with them. Where updates have been written during
        backward (`early` without max_grad_norm and skip_nonfinite), that is an error."""
        self.runtime.forget_gradients()
        with plain():
            for param in (param for group in self.param_groups for param in group["params"]):
                grad = param.grad
                if grad is None or set_to_none:
                    param.grad = None
                elif isinstance(grad, TakenGradient):
                    param.grad = torch.zeros_like(param)
                else:
                    grad.detach_()
                    grad.zero_()

    def add_param_group(self, param_group: StateDict) -> None:
        """Only while the optimizer is built: its buckets are planned once."""
        if self._runtime is not None:
            raise ValueError("a TwinOptimizer takes all its parameters at the start. Build a new one with all groups")
        super().add_param_group(param_group)

    @property
    def max_grad_norm(self) -> float | None:
        """What gradients are clipped to."""
        return self._settings.limits.max_norm

    @property
    def offloads_params(self) -> bool:
        """Whether weights live on the host too."""
        return self._settings.offload_params

    @property
    def accumulation_steps(self) -> int:
        """Backwards that make one step."""
        return self._settings.accumulation_steps

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """From the next step on, so many backwards make one; between a step and the next backward."""
        settings = check_settings(replace(self._settings, accumulation_steps=accumulation_steps), self.model)
        if settings.early:
            reconfigure.change(self.runtime, settings)
        self._settings = settings

    def flush(self) -> None:
        """Put a delayed update that is still to come into the weights: call it before using the model elsewhere."""
        self.runtime.flush()

    def wait(self) -> None:
        """Until every update that has begun is done and the weights are in the parameters."""
        self.runtime.wait()

    def close(self) -> None:
        """Finish, take all hooks off the model, and give memory and threads back."""
        if self._runtime is not None:
            self._runtime.close()

    # Saving.

    def __getstate__(self) -> StateDict:
        """Threads and page-locked memory cannot be copied."""
        raise TypeError(
            "a TwinOptimizer can neither be copied nor pickled. Save its state_dict() and load it into another"
        )

    def state_dict(self) -> StateDict:
        """Everything needed to go on exactly: fp32 masters and states by parameter name, options, counters."""
        if self.team is not None and self.team.is_partitioned:
            raise RuntimeError(
                "state_dict(): this rank has only its part of the state. Save with engine.save_checkpoint(), or take "
                "this rank's part with stream_state()"
            )
        self.runtime.wait()
        self._read_decision()
        return twin_state.collect(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, object], source: Source | None = None) -> None:
        """Take over what `state_dict` gave, from any state format. Everything is checked before anything changes.

        With `source`, what was kept for each parameter comes from there, one at a time.
        """
        if self.runtime.job is not None:
            raise RuntimeError("load_state_dict() between backward() and step(). Call step() first")
        self.runtime.wait()
        self.runtime.wait_for_copies()
        self.runtime.wait_for_readers()
        self.runtime.forget_gradients()
        twin_state.restore(self, state_dict, source)

    def check_state(self, state_dict: Mapping[str, object], source: Source) -> None:
        """Raise what `load_state_dict` would, and change nothing."""
        twin_state.check(self, state_dict, source)

    def stream_state(self) -> tuple[StateDict, Iterator[tuple[str, StateDict]]]:
        """`state_dict` for a model that leaves no room for a copy: its head, and each parameter's entry in turn."""
        self.runtime.wait()
        self._read_decision()
        return twin_state.head(self), twin_state.stream(self)

    @property
    def can_compress(self) -> bool:
        """Whether momenta will travel in few bits some day: with one rank nothing travels."""
        return self._switch is not None and self.team is not None and self.team.world > 1

    @property
    def is_compressed(self) -> bool:
        """Whether momenta travel between ranks in few bits."""
        return self._switch is not None and self._switch.is_made

    def exchange_errors(self) -> SavedErrors:
        """What this rank has not said to the others yet: a part of a checkpoint that is its own."""
        return self._switch.errors() if self._switch is not None else {}

    def load_exchange_errors(self, saved: Sequence[SavedErrors], read: Read) -> None:
        """Those of all ranks that saved, after `load_state_dict`; `read` gives the tensors that are named there."""
        if self._switch is not None:
            self._switch.restore_errors(saved, read)

    def export_trace(self, path: str | Path) -> None:
        """Write the spans recorded since `optimizer.trace.start()` as a Chrome/Perfetto timeline."""
        write_chrome_trace(self.trace.spans(), Path(path))


def _held(me: weakref.ref[TwinOptimizer]) -> TwinOptimizer:
    found = me()
    if found is None:
        raise RuntimeError("the TwinOptimizer of this model is gone. Keep it for as long as the model is trained")
    return found
