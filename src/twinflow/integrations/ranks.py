# SPDX-License-Identifier: Apache-2.0
"""Several processes in the loops of Accelerate and of Hugging Face's Trainer.

The loop gives each rank its own batches and averages metrics. TwinOptimizer averages the gradients (twinflow/zero), so
the model must not be wrapped in DistributedDataParallel. This module chooses the ZeRO stage, compares the ranks before
training, and starts a watch that ends all ranks when one of them dies.

With stage 3 each rank has a part of the weights, and with expert ranks some of the experts. `DividedModel` gathers them
for files of other libraries, and loads such files.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from twinflow.conflicts import conflict, refuse
from twinflow.dist.group import Group
from twinflow.dist.sharded import is_fsdp
from twinflow.errors import invalid_value, wrong_state
from twinflow.launch.environment import init_distributed, joined, rank_environment
from twinflow.launch.watch import Watch
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.whole import whole_weights
from twinflow.parallel.whole import wrap_save_pretrained
from twinflow.zero import Zero, partition, split_experts
from twinflow.zero.experts import expert_ranks
from twinflow.zero.partitioned import Replaced, regroup
from twinflow.zero.shared import STAGES
from twinflow.zero.start import meet, start_watch

STAGE: Final = 2  # of several processes, if the user chooses none
EXPERTS: Final = "expert_parallel_size"  # an option of the user: number of ranks that have all experts together
_TIMEOUT_S: Final = 1800.0


def join_ranks(arguments: Any) -> None:
    """Joins processes that were started with RANK, WORLD_SIZE and MASTER_* alone, or by MPI or Slurm. Accelerate does
    not see them without LOCAL_RANK. `arguments`: TrainingArguments, which may have been built before; or None.
    """
    found = rank_environment(os.environ)
    if found is None or found.world_size == 1 or dist.is_initialized():
        return
    init_distributed(timeout_s=_TIMEOUT_S)
    if arguments is not None:
        vars(arguments).pop("_setup_devices", None)  # cached, for one process
        getattr(arguments, "device")  # computes it again  # noqa: B009


def make_zero(options: Mapping[str, Any], num_ranks: int) -> Zero | None:
    """The `Zero` for `options` of a TwinOptimizer, whose `zero` may be the number of a stage. None for one process,
    so that a script runs unchanged on any number of processes.
    """
    given = options.get("zero")
    is_offloaded = bool(options.get("offload_params"))
    if isinstance(given, Zero):
        return given
    if given is not None and (isinstance(given, bool) or given not in STAGES):
        raise invalid_value("zero", given, STAGES, "It is the ZeRO stage, or a twinflow.zero.Zero.")
    if num_ranks == 1:
        return None
    stage = given if given is not None else 3 if is_offloaded else STAGE
    return Zero(stage=stage, parks=is_offloaded and stage == 3)


def check_given(twin: TwinOptimizer, num_ranks: int) -> None:
    """Raises ValueError for a TwinOptimizer that would train alone, although there are several processes."""
    if (twin.team.world if twin.team is not None else 1) != num_ranks:
        raise conflict("Hugging Face and Lightning", "given without zero", num_ranks=num_ranks)


def check_equal(group: Group, what: str, value: int) -> None:
    """Raises RuntimeError on all ranks if a number differs between them."""
    values = group.gather_rows(torch.tensor([value]))[:, 0].tolist()
    if len(set(values)) > 1:
        raise wrong_state(
            f"{what} differs between ranks",
            f"it is {values} on the ranks in their order",
            "Give all ranks equally many batches, for example with even_batches or drop_last.",
        )


def start_ranks(model: nn.Module, zero: Zero | None, settings: Mapping[str, object]) -> Replaced:
    """Compares the ranks, starts the watch, and partitions the model if the stage requires it. Returns the parameters
    that were replaced. `settings` must be equal on all ranks. Call this before the optimizer is built.
    """
    if zero is None:
        return {}
    watch_ranks()
    meet(
        joined(timeout_s=_TIMEOUT_S),
        model,
        json.dumps({name: repr(value) for name, value in settings.items()}, indent=1),
    )
    if zero.stage < 3:
        return {}
    replaced = partition(model, zero) if not zero.shares_buckets else {}
    for module in model.modules():
        # `generate` of transformers then keeps ranks that are done in the loop until all are, because the forward of
        # each rank gathers weights.
        vars(module)["_is_fsdp_managed_module"] = True
        if is_fsdp(module):
            # transformers compares names of classes, and `fully_shard` has added a prefix. With another name, the
            # Trainer would not shift the labels of a language model in its label smoothing.
            type(module).__name__ = type(module).__name__.removeprefix("FSDP")
    return replaced


def check_experts(options: Mapping[str, Any], num_ranks: int) -> int:
    """The number of ranks that have all experts together, from `options`. 1: each rank has all experts."""
    size = options.get(EXPERTS, 1)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or num_ranks % size:
        remedy = "Start a multiple of it as processes, or use fewer expert ranks."
        raise invalid_value(EXPERTS, size, f"a divisor of {num_ranks}, the number of processes", remedy)
    return size


def divide_experts(model: nn.Module, size: int, zero: Zero | None, device: torch.device, given: Any = None) -> None:
    """Keeps only this rank's experts in the model. Call this after `start_ranks`, and before the optimizer is built.
    `given`: an optimizer of torch that exists already.
    """
    if size == 1:
        return
    assert zero is not None  # there are several ranks
    refuse("Expert parallelism", {"stage": zero.stage == 3})
    if isinstance(given, Optimizer) and given.state:
        raise conflict("Hugging Face and Lightning", "state with stage 3", optimizer=type(given).__name__)
    before = expert_ranks(model)
    if before is None:
        split_experts(model, size, device=device, timeout=timedelta(seconds=_TIMEOUT_S))
    elif before.size != size:
        remedy = "Use this size, leave the option out, or build the model again."
        raise invalid_value(EXPERTS, size, f"{before.size}, by which the model is split", remedy)


@cache
def watch_ranks() -> Watch | None:
    """The watch of this process. It ends with the process, because other processes may need it until then."""
    return start_watch(joined(timeout_s=_TIMEOUT_S), 0.0)


def report_steps(twin: TwinOptimizer) -> None:
    """Tells the watch the number of each step: for its message about a rank that failed, and because a rank that has
    more batches than others would wait for them.
    """
    watch = watch_ranks()
    if watch is not None:

        def beat(optimizer: Any, *_: object) -> None:
            watch.beat(optimizer.num_steps + 1)

        twin.register_step_pre_hook(beat)
        watch.compare_steps()


def waiting(call: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, a function in which ranks wait for each other. The watch sees if another rank is in a step then."""
    watch = watch_ranks()
    if watch is None:
        return original

    def wait(*args: Any, **kwargs: Any) -> Any:
        with watch.waiting(call):
            return original(*args, **kwargs)

    return wait


def replace_params(optimizer: Optimizer, replaced: Replaced) -> None:
    """Gives a new optimizer of torch the parameters that `start_ranks` has made."""
    if not replaced:
        return
    if optimizer.state:
        raise conflict("Hugging Face and Lightning", "state with stage 3", optimizer=type(optimizer).__name__)
    for group in optimizer.param_groups:
        group["params"] = regroup(group["params"], replaced)


class DividedModel:
    """A model of which each rank has only a part of the weights: its rows of them (ZeRO stage 3), or its experts. It
    replaces the model where another library loads a file with whole weights.
    """

    def __init__(self, twin: TwinOptimizer) -> None:
        assert twin.model is not None and twin.team is not None
        self._twin = twin
        self._model = twin.model
        self._experts = expert_ranks(twin.model)
        if self._experts is not None:  # split_experts() has changed `save_pretrained`
            return
        known = weakref.ref(twin)  # the model may live longer than the optimizer
        model = weakref.ref(twin.model)

        def state_dict(call: str, part: nn.Module) -> dict[str, Tensor]:
            source = known() or model()
            assert source is not None
            return dict(whole_weights(source, call=call, part=part))

        wrap_save_pretrained(twin.model, state_dict, writes=twin.team.calls.rank == 0)

    def gather(self, call: str) -> dict[str, Tensor]:
        """The whole weights on rank 0, and an empty dict on other ranks. All ranks must call this method. `call`: the
        user's call, for the error if a rank does not make it.
        """
        if self._experts is not None:
            whole: dict[str, Any] = self._experts.weights.state_dict(call)
            return whole if dist.get_rank() == 0 else {}
        return dict(whole_weights(self._twin, call=call))

    def state_dict(self) -> dict[str, Tensor]:
        """An empty dict. safetensors looks for tensors with shared memory in it, and `load_state_dict` finds these
        itself.
        """
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """`load_state_dict` of the model, with whole weights on each rank. `assign` has no effect. A tied weight may be
        given under one of its names.
        """
        model = self._model
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        given = dict(state_dict)
        for tied in names.values():
            first = next((state_dict[name] for name in tied if name in state_dict), None)
            given.update({name: first for name in tied if first is not None and name not in state_dict})
        if self._experts is not None:
            given = self._experts.weights.cut(given)
        return type(model).load_state_dict(model, given, strict)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within this context `load_state_dict` of the model takes whole weights."""
        vars(self._model)["load_state_dict"] = self.load_state_dict
        try:
            yield
        finally:
            del vars(self._model)["load_state_dict"]


def divided(twin: TwinOptimizer) -> DividedModel | None:
    """The model of this optimizer if ranks have parts of its weights, else None."""
    if twin.zero is None or twin.team is None or twin.team.world == 1:
        return None
    is_divided = twin.zero.stage == 3 or (twin.model is not None and expert_ranks(twin.model) is not None)
    return DividedModel(twin) if is_divided else None
