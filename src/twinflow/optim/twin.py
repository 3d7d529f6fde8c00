# SPDX-License-Identifier: Apache-2.0
"""TwinOptimizer: a torch.optim.Optimizer whose state is on the host and whose update overlaps forward and backward."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from twinflow import native
from twinflow.conflicts import conflict
from twinflow.device import device_for
from twinflow.dist.group import alone
from twinflow.dist.meeting import Meeting
from twinflow.errors import invalid_value, wrong_state
from twinflow.native.threads import check_threads, default_threads
from twinflow.offload import reconfigure
from twinflow.offload.bucket import Bucket, local_of, target
from twinflow.offload.changes import check_memory
from twinflow.offload.clipping import Limits, clip_values
from twinflow.offload.lost_weights import check_values
from twinflow.offload.plan import HOST, RESIDENT, ROOT
from twinflow.offload.pools import bytes_of_gradients, prepare_speculative_stores, runs_ahead
from twinflow.offload.recipe import Recipe
from twinflow.offload.refusals import warn_of_own_gradient
from twinflow.offload.runtime import Runtime
from twinflow.offload.settings import Settings, Tuning
from twinflow.offload.state_file import StateFile
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.offload.torch_state import host_options
from twinflow.offload.torch_streamed import StreamedTorchUpdater
from twinflow.offload.torch_updater import TorchUpdater
from twinflow.offload.weight_guard import check_free, plain
from twinflow.optim import muon_groups, twin_state
from twinflow.optim import twin_build as build
from twinflow.optim import twin_checks as checks
from twinflow.optim.auto import AutoPlacement, host_share
from twinflow.optim.closure import loss_of
from twinflow.optim.loss_scale import LossScale, static
from twinflow.optim.outcomes import Outcomes
from twinflow.optim.switch import Read, SavedErrors, Switch
from twinflow.optim.switch import check as check_compression
from twinflow.optim.twin_build import Model, StateKind
from twinflow.optim.twin_state import Source
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.shard import expert_shard
from twinflow.planner.formats import reserved_bytes
from twinflow.planner.placement import shares
from twinflow.planner.probe import load_or_measure
from twinflow.rules import ALL_RULES
from twinflow.rules.segment import check_format, check_master
from twinflow.state_dict import ParamEntry, StateDict
from twinflow.trace import Trace, write_chrome_trace
from twinflow.zero import Team, Zero
from twinflow.zero.building import make_whole
from twinflow.zero.gathered import add_homes
from twinflow.zero.partitioned import forget_gathered, gathered_blocks, gathering_streams, keep_in_place
from twinflow.zero.start import own_host_bytes

Loss = TypeVar("Loss")


class TwinOptimizer(Outcomes):
    """An optimizer for a model on a GPU (or CPU), with master weights, states and update on the host.

    `step()` starts the update and returns. The next forward waits, block by block, for the new weights. A block is a
    member of the model's outermost `ModuleList`s and `Sequential`s, usually a transformer layer.

        optimizer = TwinOptimizer(model, lr=1e-3, max_grad_norm=1.0, early=True)
        for inputs, targets in loader:
            optimizer.backward(loss_fn(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    What to train:

    - `model`: the module to train; a function that builds it; or parameters or param groups as for torch.optim. With
      parameters only, `step()` waits for the update, because there is no module whose forward could wait. A module on
      the meta device is allocated and initialised.
    - `rule`: the update rule. A name such as "adamw" (docs/rules.md lists all), a torch.optim.Optimizer class, an
      optimizer instance over the model's parameters (its options and state are continued), or a function that
      gets parameters and returns an optimizer.
    - `param_groups`: parameters of the model and their options, as for torch.optim. Default: all trainable parameters.
    - `**options`: options of the rule, with torch's names and defaults: `lr`, `betas`, `eps`, `weight_decay`, ...

    Where the state is:

    - `states`: the format of the states, "fp32", "bf16", "int8" or "4bit". A user's optimizer has "fp32".
    - `master`: "none": bf16 weights have no fp32 master, and updates round them stochastically. This changes results.
    - `ratio`: the share of the state on the host, from 0 to 1. The device keeps and updates the rest at the same time.
      "auto" measures the first steps and chooses the fastest placement that fits into memory. The default is "auto" for
      a model on a GPU that is trained by one of twinflow's rules, and 1 if "auto" cannot be used: with parameters only,
      `placement`, `offload_params`, 1-bit Adam or a pipeline. It is also 1 with `tuning.streamed`, and with a user's
      optimizer, whose results depend on the placement in the last bits.
    - `placement`: which part of the model has its state on the device: "front", "tail" (as in DeepSpeed), "spread"
      (evenly distributed blocks), or "auto", the end whose updates would overlap least with forward and backward.
    - `offload_params`: the weights of blocks with state on the host are there too. The weights of a block are copied to
      the GPU before the block runs. The module may be on the CPU; it computes on the GPU if there is one. `ratio` and
      `placement` then place whole blocks.
    - `tuning.nvme_path`: a folder on a disk. The state that would be on the host is in a file there.
    - `tuning.param_nvme_path`: a folder on a disk. With `offload_params`, the weights of blocks are in a file there:
      frozen weights, and those whose state is on a disk too.

    How a step works:

    - `max_grad_norm`: the norm to which gradients are clipped; None: no clipping.
    - `max_grad_value`: the absolute value to which elements of the gradients are clipped, after they were summed over
      ranks. It needs early=False.
    - `skip_nonfinite`: skip steps in which a gradient is not finite. Default: True with `max_grad_norm` or
      `loss_scale`.
    - `loss_scale`: `static(...)` or `dynamic(...)` of twinflow.optim.loss_scale, for fp16. `optimizer.backward(loss)`
      applies it.
    - `early`: start updates while backward still runs. Changes of gradients or options between backward and `step()`
      have the same effect as with torch: the update is repeated. Without `max_grad_norm` and `skip_nonfinite` an update
      cannot be repeated, and such changes raise RuntimeError. "auto" starts updates early only after some steps without
      such changes.
    - `accumulation_steps`: number of backwards in a step. It is needed with `early`, which must know the last backward.
    - `delayed_update`: apply each update one step later, so that it can overlap a whole step. Training results change.
      `delayed_update_start` is the number of ordinary steps before the first delayed one.

    Resources:

    - `host_threads`: threads of updates on the host. Default: TWINFLOW_THREADS, or the CPUs of this process (one less
      if there are 8 or more).
    - `zero`: a `twinflow.zero.Zero`. The ranks of torch.distributed train the model together, each with its own
      batches. All ranks must build the same optimizer and call `step()` equally often.
    - `tuning`: a `Tuning` with options that change speed and memory, but no result.

    Raises ValueError for invalid or conflicting arguments, and MemoryError if the state does not fit into memory.
    `repr(optimizer)` shows rule, states, ratio, placement and memory. `close()` removes the hooks and releases memory
    and threads.
    """

    def __init__(
        self,
        model: Model,
        rule: str | Optimizer | Callable[..., Optimizer] = "adamw",
        *,
        param_groups: Iterable[ParamEntry] | None = None,
        states: str = "fp32",
        master: str = "fp32",
        ratio: float | str | None = None,
        placement: str = "auto",
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
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
        checks.check_kinds(loss_scale, tuning, zero)
        if host_threads is not None:
            host_threads = check_threads(host_threads, "host_threads")
        if isinstance(model, nn.Module):
            check_values(model.named_parameters())
        # With these arguments the placement of blocks is known before the model is built.
        known_ratio = 1.0
        if isinstance(ratio, (int, float)) and param_groups is None and zero is None and isinstance(rule, str):
            checks.check_ratio(ratio, placement, None)
            known_ratio = float(ratio)
        made, self._stays = build.materialised(model, offload_params, known_ratio, placement, tuning)
        self.model = made if isinstance(made, nn.Module) else None
        groups = checks.groups_of(made, param_groups)
        self.rule = None
        self._recipe: Recipe | None = None  # or the user's optimizer
        if isinstance(rule, str):
            if rule not in ALL_RULES:
                raise invalid_value("rule", rule, ALL_RULES)
            self.rule = ALL_RULES[rule]
            self.rule_name = rule
            check_format(self.rule, states)
            if self.rule.elementwise is not None:
                groups, options = muon_groups.split(groups, options, self.model)
            defaults = self.rule.with_defaults(options)
            checks.check_group(self.rule, defaults)
        else:
            checks.check_foreign(rule, states, master, param_groups, zero)
            self._recipe = Recipe(rule, groups, options)
            groups, defaults, self.rule_name = [*self._recipe.groups], self._recipe.defaults, self._recipe.name
        if not isinstance(rule, Optimizer):  # schedulers may have added keys to the groups of an instance
            checks.warn_of_misspelt(groups, defaults)
        super().__init__(cast(ParamsT, groups), defaults)  # torch checks the groups
        checks.check_groups(self.rule, self.param_groups)
        self._num_groups = len(self.param_groups)
        self.matrix_groups = muon_groups.of_matrices(self.rule, self.param_groups)
        native.set_threads(host_threads if host_threads is not None else build.own_threads(default_threads(os.environ)))
        self.states = states
        self.master = check_master(master)
        self.tuning = tuning or Tuning()
        checks.check_tuning(self.tuning, delayed_update)
        self._is_default_ratio = ratio is None
        if ratio is None:
            ratio = checks.default_ratio(placement, self.tuning, self.model, self.rule, zero, offload_params)
        checks.check_ratio(ratio, placement, self.model)
        self.ratio = ratio
        self.placement = placement
        self._auto: AutoPlacement | None = None
        self._saved_bytes: int | None = 0  # see `reserve_for_saves`
        self._moved_away: dict[int, str] = {}  # by bucket: the place of state that `offload_state` has moved
        self.trace = Trace()
        self.scale_rule = loss_scale or static(1.0)
        self.scales_loss = loss_scale is not None
        skip = skip_nonfinite if skip_nonfinite is not None else max_grad_norm is not None or loss_scale is not None
        given = Settings(
            limits=Limits(max_grad_norm, skip, max_grad_value),
            early=True if early == "auto" else early,  # type: ignore[arg-type]
            watches_first=early == "auto",
            accumulation_steps=accumulation_steps,
            delayed_update=delayed_update,
            delayed_update_start=delayed_update_start,
            offload_params=offload_params,
            tuning=self.tuning,
        )
        self._settings = checks.check_settings(given, self.model)
        checks.check_model(self.model, zero)
        trained = [param for group in self.param_groups for param in group["params"]]
        checks.check_experts(self.model, trained, zero, self.rule, self.rule_name)
        if self.matrix_groups:
            checks.check_muon(self._settings, self.master)
        checks.check_param_offload(self._settings, self.model, ratio, zero, self.rule)
        checks.check_disk(self._settings, ratio, zero, self.rule)
        self.zero = zero
        self._switch: Switch | None = None  # switch to compressed communication
        if zero is not None and zero.compression is not None:
            check_compression(self, delayed_update)
            self._switch = Switch(self, zero.compression)
            self.tuning = replace(self.tuning, sums="device")
        if self.rule is not None:
            self.is_stateless = not any(self.rule.keeps_states(group) for group in self.param_groups)
        self._runtime = self._build()

    def _build(self) -> Runtime:
        """Plans the buckets, copies the weights into the state, and registers hooks on the model."""
        check_free((name, tensor) for name, tensor, _ in self._named())
        trained = self._find_trained(self._take_weights())
        self._join_ranks(trained)
        device, room = device_for(trained.where, self.trace), self._find_room(trained)
        self._stays = set()
        kind, ratio = self._choose_ratio(trained, room)
        plans = build.plan_trained(trained, ratio, self.placement, self.tuning, self.team)
        plans, shards = (plans, None) if self.team is None else self.team.shards(plans, trained.specs)
        file, weights = kind.state_file(plans), kind.weights_file(plans, trained.aside, self._world, device)
        sizes = [kind.nbytes(plan) for plan in plans]
        self._settings = build.fitted(self._settings, self.tuning, kind, plans, sizes, room, trained.embeddings)
        others = bytes_of_gradients(self._settings, plans) + _buffers_of(file) + _buffers_of(weights)
        build.check_room(plans, sizes, room, self.ratio, others, trained.aside is not None)
        if trained.aside is not None:
            trained.return_resident(plans)
        exchange = self.team.row_exchange() if trained.has_rows and self.team else None
        me = weakref.ref(self)  # the model's hooks reference the runtime, which must not keep the optimizer alive
        runtime = Runtime(
            device,
            kind.new_updaters(device, trained.where, exchange, file, weights),
            trained.params,
            plans,
            self._settings,
            lambda: _held(me)._options_now(),
            lambda: _held(me).read_scale(),
            shards,
            option_names=frozenset(self.defaults) if self.rule is not None else None,
            owner=me,
            weights=weights,
            on_bucket=trained.aside.fill if trained.aside is not None else None,
        )
        moves_later = isinstance(self.ratio, str) and room.device_bytes is not None  # "auto" on a GPU
        self._fill_state(runtime, trained, moves_later, weights)
        if self.model is not None:
            self._attach(runtime, self.model, trained)
        self._make_speculative_stores(runtime)
        if moves_later:
            measure = partial(load_or_measure, trained.where)
            self._auto = AutoPlacement(
                runtime, self.states, kind.nbytes, measure, self._make_speculative_stores, self.team, kind.weight_bytes
            )
        return runtime

    def _take_weights(self) -> build.Aside | None:
        """Takes the weights of blocks from the model, with `offload_params`. Otherwise gives every parameter all of its
        values.
        """
        if self.model is None or not self._settings.offload_params:
            # Weights that zero.Init has divided over ranks, or that were not read from their files yet.
            frozen = self.model.parameters() if self.model is not None else ()
            make_whole([*(tensor for _, tensor, _ in self._named()), *frozen])
            return None
        check_memory((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        takes_quantised = self.zero is None or not self.zero.parks
        tensors = [tensor for _, tensor, _ in self._named()]
        return build.set_aside(self.model, tensors, takes_quantised, self._stays, self.tuning.offload_embeddings)

    def _find_trained(self, aside: build.Aside | None) -> build.Trained:
        blocks = gathered_blocks(self.model, self.tuning.offload_embeddings) if self.model is not None else []
        params, specs, order = build.params_of(
            self.model, self._named(), self._recipe is None, aside, self.zero, self.matrix_groups, blocks
        )
        if isinstance(self.model, PipelineModule):
            for param in params:
                param.is_late |= param.name in self.model.reused
        checks.check_params(params, self.zero, aside is not None)
        checks.check_no_master(params, self.master)
        has_rows = bool(self.matrix_groups) and params[0].is_sharded
        return build.Trained(params, specs, order, blocks, aside, has_rows)

    def _join_ranks(self, trained: build.Trained) -> None:
        """With `zero`, makes the groups of ranks and gives all ranks the weights of the first one."""
        if self.zero is None:
            return
        tensors = [param.tensor for param in trained.params]
        self.team = Team(
            self.zero, trained.where, expert_shard(tensors if self.model is None else self.model.parameters())
        )
        if not self.zero.shares_buckets:
            return
        if self.team.world > 1 and not self._settings.early and not self._settings.limits.any:
            warn_of_own_gradient("early=False without a limit leaves gradients in .grad for the loop")
        self.team.broadcast(tensors if self.model is None else build.tensors_of(self.model, trained.aside))
        if self.zero.stage >= 2 and (self.tuning.sums == "auto" or self.zero.parks):
            # Each rank keeps only its own part of the sum over several backwards.
            self.tuning = replace(self.tuning, sums="host")

    @property
    def _world(self) -> int:
        """The number of ranks that share the model."""
        return self.team.world if self.team is not None else 1

    def _find_room(self, trained: build.Trained) -> build.Free:
        """The free memory for state and gradients."""
        room = build.find_room(trained.params, self.team)
        if trained.aside is not None and self._recipe is None and self._world == 1:
            whole = trained.aside.values.whole  # without weights that are read from their files later
            on_host = [whole[param.tensor] for param in trained.params if param.tensor in whole]
            room = build.with_weights(room, self._stays, on_host)
        return room

    def _choose_ratio(self, trained: build.Trained, room: build.Free) -> tuple[StateKind, float]:
        """The kind of the state, and the share of it that begins on the host. Sets `ratio` and `tuning`."""
        if self._is_default_ratio and room.device_bytes is None:
            self.ratio = 1.0  # the model is on a CPU, which has no other memory
        kind = self.kind
        if trained.aside is not None:
            kind = replace(kind, weight_bytes=trained.aside.weight_bytes(trained.specs, self._world))
        if not isinstance(self.ratio, str):
            return kind, self.ratio
        self.tuning, ratio = build.first_choice(kind, self._settings, self.tuning, trained.specs, room)
        return kind, ratio

    def _fill_state(
        self, runtime: Runtime, trained: build.Trained, moves_later: bool, weights: StateFile | None
    ) -> None:
        """Copies the weights into the state, and sets the states to their first values. `weights`: the file for them.

        The weights are copied before `start`, because a user's optimizer may read them in its constructor.
        """
        aside = trained.aside
        if aside is not None:
            gather = self.team.fetch if self.team and self.team.world > 1 else None
            runtime.offload_params(aside.frozen, aside.values, gather, moves_later, weights)
        runtime.adopt(trained.params, keep=False, values=aside.values if aside is not None else None)
        if aside is not None:
            aside.clear()  # the state contains the weights now, so this frees their memory
        for bucket in runtime.buckets:
            if bucket.slices:
                bucket.updater.start(bucket, self.param_groups)
        if self._switch is not None:
            self._switch.reserve(runtime.buckets)

    def _attach(self, runtime: Runtime, model: nn.Module, trained: build.Trained) -> None:
        """Registers the hooks on the model."""
        reference = weakref.ref(model)  # threads reference the device, which must not keep the model alive
        runtime.device.set_followers(lambda: gathering_streams(reference()))
        runtime.attach(
            model,
            trained.blocks,
            in_order=isinstance(model, PipelineModule),
            before_gathering=lambda: forget_gathered(reference()),
            handles=keep_in_place(model),
        )
        if self.team is not None:
            add_homes(model, self.team.calls, self.team.meeting, runtime)
            if trained.aside is not None and self.team.world > 1:
                # Marks that fully_shard sets too. generate() of transformers then runs as many forwards on all ranks,
                # because each forward gathers weights.
                vars(model).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
        elif trained.aside is not None:
            add_homes(model, alone(), Meeting(alone()), runtime)

    def _make_speculative_stores(self, runtime: Runtime) -> None:
        """Allocates buffers for updates that run before the clipping decision, within the user's limit of memory."""
        stores, executor = runtime.speculative_stores, runtime.executor
        # Stores made before will be made again or released, so their memory is free.
        left = max(0, own_host_bytes() + stores.num_bytes - executor.unmade_bytes)
        reserve = reserved_bytes(left)
        max_bytes = self.tuning.shadow_bytes
        least_free = reserve // 2 if max_bytes is None else 0
        if max_bytes is None:
            max_bytes = left - reserve
        saved_bytes = self._saved_bytes
        if saved_bytes is None:
            hosted = [bucket for bucket in runtime.buckets if not bucket.is_on_device]
            ahead = sum(map(stores.nbytes, hosted)) if runs_ahead(executor, runtime.settings) else 0
            saved_bytes = max(0, left - reserve - min(ahead, max_bytes)) // 2
        stores.set_limit(max_bytes, saved_bytes, least_free)
        prepare_speculative_stores(stores, executor, runtime.settings, runtime.buckets)

    def reserve_for_saves(self, max_bytes: int | None) -> None:
        """Allocates buffers with which updates beside a background checkpoint need no copies of state.

        `max_bytes`: host memory for these buffers; None: half of the free memory.
        """
        self._saved_bytes = max_bytes
        self._make_speculative_stores(self.runtime)

    @property
    def kind(self) -> StateKind:
        """The optimizer's update rule and the format of its state. The result also computes the size of the state and
        creates the objects that update it.
        """
        # With compressed communication, all ranks have the same rounded weights. The state has more exact ones.
        keeps_weights = self._settings.delayed_update or self._switch is not None
        return StateKind(
            self.rule,
            self._recipe,
            self.states,
            self.is_stateless,
            keeps_weights,
            self._settings.offload_params,
            self.tuning,
            master=self.master,
        )

    def _named(self) -> Iterable[tuple[str, nn.Parameter, int]]:
        names = {p: name for name, p in self.model.named_parameters()} if self.model is not None else {}
        for g, group in enumerate(self.param_groups):
            for i, param in enumerate(group["params"]):
                given = group.get("param_names")
                yield names.get(param, given[i] if given else f"params[{g}][{i}]"), param, g

    @property
    def host_share(self) -> float:
        """The share of the state that is on the host now."""
        return host_share(self.runtime.buckets)

    @property
    def is_placed(self) -> bool:
        """Whether the placement was chosen. Ratio "auto" needs some steps for this. Lack of memory may change it."""
        return self._auto is None or self._auto.is_settled

    @property
    def auto_report(self) -> str:
        """What ratio "auto" has chosen, and the times of all placements that it has measured. Empty before that."""
        return self._auto.report if self._auto is not None else ""

    @property
    def disk_io(self) -> str | None:
        """How state on the disk is read and written: "io_uring" or "threads". None: no state is on a disk."""
        file = self._runtime.executor.file if self._runtime is not None else None
        return file.io if file is not None else None

    def __repr__(self) -> str:
        """Rule, states, ratio, placement and memory, then the param groups as torch shows them."""
        groups = super().__repr__().partition("(\n")[2]
        if self._runtime is None:
            return f"{type(self).__name__}(\n{groups}"
        runtime, kind = self._runtime, self.kind
        plans = [bucket.plan for bucket in runtime.buckets]
        file = runtime.executor.file
        on_host = sum(kind.nbytes(plan) for plan in plans if plan.place != RESIDENT)
        on_device = sum(kind.nbytes(plan) for plan in plans if plan.place == RESIDENT)
        places = f"{build.in_bytes(on_host)} on the host, {build.in_bytes(on_device)} on the device"
        if file is not None:
            places = f"{build.in_bytes(file.sizes.total_bytes)} on the disk ({file.sizes.folder}), {places}"
        lines = [
            f"rule: {self.rule_name}",
            f"states: {self.states}{', without master weights' if self.master == 'none' else ''}",
            f"ratio: {self.ratio} ({self.host_share:.2f} of the state is on the host)",
            f"placement: {self.placement} (buckets: {shares([plan.place for plan in plans])})",
            f"memory of the state: {places}",
            f"memory of gradient slots on the host: {build.in_bytes(bytes_of_gradients(self._settings, plans))}",
            f"memory of speculative stores: {build.in_bytes(runtime.speculative_stores.num_bytes)}",
        ]
        weights = runtime.executor.weights
        files = [one for one in (file, weights) if one is not None]
        if files:
            io = f"{files[0].sizes.num_threads} at the same time, by {files[0].io}"
            lines.append(f"memory of buffers for the disk: {build.in_bytes(sum(map(_buffers_of, files)))}")
            lines.append(f"reads and writes of the disk: {io}")
        if self._settings.offload_params:
            blocks = {bucket.plan.block: bucket.offloads_params for bucket in runtime.buckets}
            blocks.pop(ROOT, None)
            where = "on the host"
            if weights is not None:
                where += f", {build.in_bytes(weights.sizes.total_bytes)} of them on the disk ({weights.sizes.folder})"
            lines.append(f"weights: those of {sum(blocks.values())} of {len(blocks)} blocks are {where}")
        if self.team is not None:
            lines.append(f"rank: {self.team.rank} of {self.team.world}, which share this model; sizes are of this rank")
        return f"{type(self).__name__}(\n" + "".join(f"    {line}\n" for line in lines) + groups

    # The loop.

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Starts the rest of this step's update and returns. The next forward waits for the new weights.

        The result of `closure`, which computes the loss, is returned. Without a module, `step` waits for the update.
        """
        loss = loss_of(closure)
        if self.rule is None and any(updater.is_in_mode(bucket, False) for bucket, updater in self._modal()):
            raise wrong_state(
                "step() cannot run", f"{self.rule_name} is in the mode for evaluation", "Call optimizer.train() first."
            )
        if self.max_grad_value is not None and (self.zero is None or not self.zero.shares_buckets):
            self._clip_values(self.max_grad_value)  # otherwise the reducer does it, after the sum over ranks
        job = self.runtime.step()
        self._read_decision()
        if job is None:  # there were no gradients
            self._was_applied = self._was_skipped = False
        else:
            self._unread = job
            self.num_steps += 1
            self._check_scaled()
            if self.model is None:
                self.runtime.wait()
            if self._auto is not None:
                self._auto.after_step(self._was_clipped)
            if self._switch is not None:
                self._switch.after_step()
        return loss

    def train(self) -> None:
        """Puts a schedule-free optimizer into the mode for training: the weights become those at which gradients are
        taken. Such an optimizer is a user's optimizer with `train` and `eval`. Has no effect with others.
        """
        self._set_mode(is_training=True)

    def eval(self) -> None:
        """Puts a schedule-free optimizer into the mode for evaluation: the weights become their average."""
        self._set_mode(is_training=False)

    @torch.no_grad()
    def _set_mode(self, is_training: bool) -> None:
        # Loops call train() before every micro-batch.
        found = [one for one in self._modal() if not one[1].is_in_mode(one[0], is_training)]
        if not found:
            return
        call = "train()" if is_training else "eval()"
        if self.team is not None and self.team.num_parts > 1:
            raise conflict("ZeRO stages 2 and 3", "modes", rule=self.rule_name, stage=self.team.zero.stage)
        if self.runtime.has_gradients:
            remedy = "Call it after step(), or after zero_grad()."
            raise wrong_state(f"{call} cannot run between backward() and step()", "updates may have begun", remedy)
        self.runtime.flush()
        self.runtime.wait_for_copies()
        self.runtime.wait_for_readers()
        self.runtime.adopt(self.runtime.params, keep=True)  # the user may have written weights
        for bucket, updater in found:
            updater.set_mode(bucket, is_training)
            with plain():
                for param, piece, values in zip(bucket.params, bucket.slices, updater.publish(bucket), strict=True):
                    weight = target(param.local, piece)
                    weight.copy_(values.view(weight.shape))
        for param in self.runtime.params:
            param.note_write()

    def _modal(self) -> Iterator[tuple[Bucket, TorchUpdater]]:
        """The buckets whose optimizers have modes, with their updaters."""
        for bucket in self.runtime.buckets if self.rule is None else ():
            updater = bucket.updater.host if isinstance(bucket.updater, StreamedTorchUpdater) else bucket.updater
            if bucket.slices and isinstance(updater, TorchUpdater) and updater.has_modes(bucket):
                yield bucket, updater

    def _clip_values(self, limit: float) -> None:
        """Clips the elements of the gradients in `.grad`, which are multiplied by the loss scale."""
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None:
                clip_values(local_of(param.grad), limit * self.read_scale())

    def _options_now(self) -> list[StateDict]:
        """The options of each group, checked and copied for an update that begins now."""
        rule = self.rule
        if len(self.param_groups) != self._num_groups:
            raise wrong_state(
                "step() cannot update these param_groups",
                f"there are {len(self.param_groups)} groups, and the optimizer was built with {self._num_groups}",
                "Build a new TwinOptimizer with all groups.",
            )
        muon_groups.check_unchanged(rule, self.param_groups, self.matrix_groups)
        for group in self.param_groups if rule is not None else ():
            assert rule is not None
            checks.check_complete(rule, group)
            rule.check(group)
            if self.is_stateless and rule.keeps_states(group):
                option = rule.state_option
                assert option is not None
                remedy = f"This optimizer was built without {option} and has no buffer for it. Build a new optimizer."
                raise invalid_value(option, group[option], [0.0], remedy)
        return [host_options(group) for group in self.param_groups]

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Calls `loss.backward()` on the loss times the loss scale."""
        checks.check_loss(loss)
        scale = self.loss_scale
        torch.autograd.backward(loss * scale if scale != 1.0 else loss, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, and the updates of this step that have begun with them.

        Raises RuntimeError if updates of this step have already changed weights (`early` without max_grad_norm and
        skip_nonfinite).
        """
        self.runtime.forget_gradients()
        with plain():
            for param in (param for group in self.param_groups for param in group["params"]):
                grad = param.grad
                if grad is None or set_to_none:
                    param.grad = None
                elif isinstance(grad, TakenGradient):
                    param.grad = torch.zeros_like(param)
                else:
                    if grad.grad_fn is not None:
                        grad.detach_()
                    grad.requires_grad_(False).zero_()

    def add_param_group(self, param_group: StateDict) -> None:
        """Raises ValueError after construction, because buffers are planned once.

        Pass all groups to the constructor.
        """
        if self._runtime is not None:
            raise ValueError(
                "add_param_group() cannot add parameters, because a TwinOptimizer takes all its parameters at the "
                "start. Build a new optimizer with all groups. Parameters that are trained later can be frozen "
                "(requires_grad=False) once the optimizer is built."
            )
        super().add_param_group(param_group)

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which gradients are clipped; None: no clipping."""
        return self._settings.limits.max_norm

    @property
    def offloads_params(self) -> bool:
        """Whether the weights of blocks are on the host too."""
        return self._settings.offload_params

    @property
    def accumulation_steps(self) -> int:
        """Number of backwards in a step."""
        return self._settings.accumulation_steps

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """Changes the number of backwards in a step. Call it between `step()` and the next backward."""
        settings = checks.check_settings(replace(self._settings, accumulation_steps=accumulation_steps), self.model)
        if settings.early:
            reconfigure.change(self.runtime, settings)
        self._settings = settings

    def offload_state(self) -> None:
        """Moves the state that is on the device to the host, until `reload_state`, so that other code has the memory.

        Results do not change, and steps may run meanwhile. Raises RuntimeError between backward and `step()`, and
        MemoryError if the host has too little memory.
        """
        found = {bucket.plan.index: RESIDENT for bucket in self.runtime.buckets if bucket.plan.place == RESIDENT}
        self._move_state("offload_state()", dict.fromkeys(found, HOST))
        self._moved_away |= found

    def reload_state(self) -> None:
        """Moves the state back to where it was before `offload_state`. Has no effect without it."""
        self._move_state("reload_state()", self._moved_away)
        self._moved_away = {}

    def _move_state(self, call: str, places: Mapping[int, str]) -> None:
        """Moves buckets, given by their index, to other places."""
        if self._settings.offload_params:
            raise conflict("Weights on the host", "moved state", call=call)
        if self.runtime.has_gradients:
            raise wrong_state(f"{call} cannot run", "updates of this step may have begun", "Call it after step().")
        self.runtime.wait()
        self.runtime.wait_for_copies()
        for bucket in self.runtime.buckets:
            reconfigure.move(self.runtime, bucket, places.get(bucket.plan.index, bucket.plan.place))

    def flush(self) -> None:
        """Writes a pending delayed update into the weights. Call it before other code uses the model."""
        self.runtime.flush()

    def wait(self) -> None:
        """Waits until all updates that have begun are complete and the parameters have the new weights."""
        self.runtime.wait()

    def close(self, keep_weights: bool = True) -> None:
        """Completes running updates, removes all hooks from the model, and releases memory and threads.

        With weights on the host, `keep_weights=False` saves the time and the memory in which they are copied back into
        the model: its use raises an error from then on.
        """
        if self._runtime is not None:
            self._runtime.close(keep_weights)

    # Saving.

    def __getstate__(self) -> StateDict:
        """Raises TypeError, because threads and page-locked memory cannot be copied."""
        raise TypeError(
            "A TwinOptimizer can neither be copied nor pickled. Save its state_dict() and load it into a new one."
        )

    def state_dict(self) -> StateDict:
        """The complete state: fp32 masters and states by parameter name, options and counters.

        Raises RuntimeError if ranks share the state.
        """
        if self.team is not None and not self.team.has_whole_state:
            raise wrong_state(
                "state_dict() cannot return the complete state",
                "this rank has only a part of the state",
                "Save with engine.save_checkpoint(), or read this rank's part with stream_state().",
            )
        self.runtime.wait()
        self._read_decision()
        return twin_state.collect(self, self._switch)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, object], source: Source | None = None) -> None:
        """Loads a state of `state_dict()`, of any state format. The state is checked before the optimizer changes.

        With `source`, the state of each parameter is read from there, one parameter at a time. Raises ValueError for a
        state that does not fit, and RuntimeError between backward and `step()`.
        """
        if self.runtime.steps.job is not None:
            raise wrong_state(
                "load_state_dict() cannot run between backward() and step()",
                "updates of this step may have begun",
                "Call step() first.",
            )
        self.runtime.wait()
        self.runtime.wait_for_copies()
        self.runtime.wait_for_readers()
        self.runtime.forget_gradients()
        twin_state.restore(self, self._switch, state_dict, source)

    def check_state(self, state_dict: Mapping[str, object], source: Source) -> None:
        """Raises ValueError for a state that `load_state_dict` would refuse. Changes nothing."""
        twin_state.check(self, self._switch, state_dict, source)

    def stream_state(self) -> tuple[StateDict, Iterator[tuple[str, StateDict]]]:
        """`state_dict()` without copies of tensors: the dict without parameters, and an iterator over their entries."""
        self.runtime.wait()
        self._read_decision()
        return twin_state.head(self, self._switch), twin_state.stream(self)

    @property
    def is_compressed(self) -> bool:
        """Whether communication is compressed now."""
        return self._switch is not None and self._switch.is_made

    def exchange_errors(self) -> SavedErrors:
        """This rank's rounding errors of compressed communication, for its part of a checkpoint."""
        return self._switch.errors() if self._switch is not None else {}

    def check_exchange_errors(self, saved: Sequence[SavedErrors], read: Read) -> None:
        """Raises an exception if `load_exchange_errors` could not load them. `read`: tensors of the saved shapes."""
        if self._switch is not None:
            self._switch.check_errors(saved, read)

    def load_exchange_errors(self, saved: Sequence[SavedErrors], read: Read) -> None:
        """Loads `exchange_errors` of all ranks. Call it after `load_state_dict`. `read` returns saved tensors."""
        if self._switch is not None:
            self._switch.restore_errors(saved, read)

    def export_trace(self, path: str | Path) -> None:
        """Writes the spans since `optimizer.trace.start()` as a Chrome/Perfetto timeline."""
        write_chrome_trace(self.trace.spans(), Path(path))


def _buffers_of(file: StateFile | None) -> int:
    return file.sizes.memory_bytes if file is not None else 0


def _held(me: weakref.ref[TwinOptimizer]) -> TwinOptimizer:
    found = me()
    if found is None:
        raise wrong_state(
            "The model cannot be trained any more",
            "its TwinOptimizer was deleted",
            "Build a new TwinOptimizer, and keep a reference to it as long as the model is trained.",
        )
    return found
