# SPDX-License-Identifier: Apache-2.0
"""The layers of one pipeline rank.

Names and initial values do not depend on the number of ranks: layer i is named "layers.{i}" (a part of a model keeps
its names), and a spec is built from its own seed. So checkpoints load with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from twinflow.errors import invalid_value
from twinflow.parallel import partition, specs
from twinflow.parallel.partition import LayerFacts
from twinflow.parallel.schedules import Schedule, make_schedule
from twinflow.parallel.specs import Chain, Item, Part, TiedLayerSpec
from twinflow.parallel.topology import PIPE, ProcessTopology

LOSS: Final = -1  # used as a stage number: the part with the loss
Seed = Callable[[int], object]


@dataclass(frozen=True)
class Tie:
    """A parameter with copies on several pipeline ranks. Its gradient is the sum over the copies."""

    name: str  # name of its first use, equal on all ranks
    local: str  # name on this rank, which finds the parameter also after ZeRO has replaced it
    ranks: tuple[int, ...]  # pipeline ranks, in order


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of this rank. `call` takes one value, a tensor or a tuple, like the layers of DeepSpeed."""

    index: int
    call: Callable[[Any], Any]
    may_rerun: bool  # it may be recomputed in backward
    chain: Chain | None = None  # runs consecutive layers in one call


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive layers. With `reruns` they are recomputed together in backward."""

    layers: tuple[Layer, ...]
    reruns: bool


class PipelineModule(nn.Module):
    """The layers of one rank, built in the constructor. `engine.train_batch` and `eval_batch` run them.

    `layers`: modules, specs, functions or parts of a model. Each is called with the output of the previous one, a
    tensor or a tuple. `num_stages`: as in DeepSpeed, the number of pipeline ranks. It can also be given by `topology`.
    The attribute `num_stages` counts all stages: with the schedules interleaved and zbv a rank has several.

    Specs are always built from `base_seed` and their index. `seed_layers`: also seed each layer before its forward in
    training, so that dropout is equal for any number of ranks. `loss_fn(output, target)` is kept only on the rank of
    the last stage and is None on others, because a loss may have weights.
    """

    def __init__(
        self,
        layers: Iterable[Item],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Seed | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        checkpointable_layers: Sequence[str] | None = None,
        *,
        schedule: str = "1f1b",
        num_chunks: int = 1,
        index: int | None = None,
        layer_seconds: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        items = specs.checked(layers, loss_fn)
        if activation_checkpoint_interval < 0:
            raise invalid_value("activation_checkpoint_interval", activation_checkpoint_interval, "a whole number >= 0")
        self.num_ranks = _num_ranks(num_stages, topology)
        self.index = _index(index, self.num_ranks, topology)
        shape = _shape(schedule, self.num_ranks, num_chunks)
        self.schedule, self.num_chunks, self.num_stages = schedule, shape.num_chunks, shape.num_stages
        self.stages: tuple[int, ...] = shape.stages_of(self.index)
        self.facts = _facts(items, partition_method, layer_seconds)
        self.bounds = partition.bounds(partition_method, self.facts, self.num_stages)
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed

        ranks = [shape.rank_of(stage) for stage in range(shape.num_stages) for _ in self._layers_of(stage)]
        is_here = [rank == self.index for rank in ranks]
        made = specs.make_layers(items, is_here, base_seed, seed_fn or torch.manual_seed)
        for owned, rank in zip(made, ranks, strict=True):
            for name, module in owned.items() if rank == self.index else ():
                _register(self, name, module)
        # The parameters of this rank with copies on other ranks, in the same order on all ranks.
        self.ties, self.aliases = _find_ties(made, ranks, self.index)
        self.reused = _find_reused(made, ranks, self.index)  # names of parameters that several layers of this rank use
        self._loss_part: Part | None = items[-1] if self.has_last and specs.is_loss(items[-1]) else None
        self.loss = loss_fn if self.has_last else None
        self._runs = {
            stage: _group(
                [
                    _layer(i, items[i], made[i], checkpointable_layers)
                    for i in self._layers_of(stage)
                    if not specs.is_loss(items[i])  # the loss needs a target
                ],
                activation_checkpoint_interval,
            )
            for stage in self.stages
        }
        self._num_runs = dict.fromkeys(self.stages, 0)

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first stage, which needs the inputs."""
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which needs the targets."""
        return self.num_stages - 1 in self.stages

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss of the last stage's output and a target. None on ranks without the last stage."""
        return self.loss if self._loss_part is None else self._run_loss

    def forward(self, stage: int, *inputs: Any) -> Any:
        """Run one stage of this rank. The output of the last stage is the input of `loss_fn` or `finish`."""
        is_number = isinstance(stage, int)
        if is_number and stage == LOSS and self._loss_part is not None:
            return self._loss_part.call(*inputs)
        if not is_number or stage not in self._runs:
            remedy = "To run a pipeline, call engine.train_batch(data_iter) or engine.eval_batch(data_iter)."
            given = f"is {stage}" if is_number else f"is of type {type(stage).__name__}"
            allowed = f"the number of a stage of this rank, one of {list(self.stages)}"
            raise ValueError(f"The first argument of a PipelineModule {given}, but must be {allowed}. {remedy}")
        value: Any = single(inputs)
        seeds = self._seeds(stage)
        for run in self._runs[stage]:
            if run.reruns and self.training and torch.is_grad_enabled():
                value = checkpoint(_call_all, run.layers, seeds, value, use_reentrant=False)
            else:
                value = _call_all(run.layers, seeds, value)
        return value

    def finish(self, output: Any) -> Any:
        """The model's output without targets, from that of the last stage: the logits if the model ends in the loss."""
        return output if self._loss_part is None else self(LOSS, output, None)

    def calls(self) -> list[Callable[[Any], Any]]:
        """The layers of this rank as functions of one value, in the order of the forward."""
        calls = [layer.call for stage in self.stages for run in self._runs[stage] for layer in run.layers]
        return calls if self._loss_part is None else [*calls, self.finish]

    def describe(self) -> str:
        """A table of the stages with their ranks, layers and parameters."""
        shape = _shape(self.schedule, self.num_ranks, self.num_chunks)
        lines = [f"{'stage':>5}  {'rank':>4}  {'layers':>9}  {'parameters':>15}  types"]
        for stage in range(self.num_stages):
            facts = [self.facts[i] for i in self._layers_of(stage)]
            counts = [fact.num_params for fact in facts if fact.num_params is not None]
            params = f"{sum(counts):,}" if len(counts) == len(facts) else "-"
            layers = f"{self.bounds[stage]}-{self.bounds[stage + 1] - 1}"
            types = ", ".join(dict.fromkeys(fact.type_name for fact in facts))
            lines.append(f"{stage:>5}  {shape.rank_of(stage):>4}  {layers:>9}  {params:>15}  {types}")
        return "\n".join(lines)

    def _layers_of(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    def _run_loss(self, output: Any, target: Any = None) -> Any:
        """Runs the loss through `self(...)` like a stage, so that hooks that fetch weights are called."""
        return self(LOSS, output, target)

    def seed_from(self, num_micro_batches: int) -> None:
        """Set the number of micro-batches that were already run. With `seed_layers` the seeds continue from it."""
        self._num_runs = dict.fromkeys(self.stages, num_micro_batches)

    def _seeds(self, stage: int) -> Seed | None:
        """A function that seeds a layer by its index, or None without seeds. Seeds differ between micro-batches and
        from those of the initial values.

        Every schedule runs the micro-batches of a stage in order, so it is sufficient to count them.
        """
        if not (self.seed_layers and self.training):
            return None
        self._num_runs[stage] += 1
        first = self.base_seed + self._num_runs[stage] * len(self.facts)
        seed = self.seed_fn or torch.manual_seed
        return lambda index: seed(first + index)


def _num_ranks(num_stages: int | None, topology: ProcessTopology | None) -> int:
    if topology is None:
        if num_stages is None:
            raise invalid_value("num_stages", None, "a whole number >= 1", "Pass num_stages or a topology.")
        if not isinstance(num_stages, int) or num_stages < 1:
            raise invalid_value("num_stages", num_stages, "a whole number >= 1")
        return num_stages
    found = topology.get_dim(PIPE)
    if found < 1:
        raise invalid_value("The list of axes of topology", topology.get_axis_names(), f"a list with {PIPE!r}")
    if num_stages not in (None, found):
        allowed = f"{found}, the size of the axis {PIPE!r} in the topology"
        raise invalid_value("num_stages", num_stages, allowed, "Remove the argument num_stages.")
    return found


def _index(index: int | None, num_ranks: int, topology: ProcessTopology | None) -> int:
    """Position of this rank in the pipeline. Without a topology, groups of consecutive ranks share a position."""
    if index is not None:
        if not 0 <= index < num_ranks:
            raise invalid_value("index", index, f"a number from 0 to {num_ranks - 1}")
        return index
    if not (dist.is_available() and dist.is_initialized()):
        if num_ranks == 1:
            return 0
        raise ValueError(
            f"The position of this process among the {num_ranks} pipeline ranks is unknown, because there is no "
            f"process group. Call init_distributed() first, or pass index, a number from 0 to {num_ranks - 1}."
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    if topology is not None:
        if topology.world_size() != world:
            name = "The number of ranks of topology"
            raise invalid_value(name, topology.world_size(), f"{world}, the number of processes")
        return int(topology.get_coord(rank).pipe)
    if world % num_ranks:
        remedy = f"Start a multiple of {num_ranks} processes."
        raise invalid_value("num_stages", num_ranks, f"a divisor of {world}, the number of processes", remedy)
    return rank // (world // num_ranks)


def _shape(name: str, num_ranks: int, num_chunks: int) -> Schedule:
    """The assignment of stages to ranks, as a schedule with as many micro-batches as ranks, which is always valid."""
    shape = make_schedule(name, num_ranks, num_ranks, num_chunks)
    if num_chunks not in (1, shape.num_chunks):
        allowed = f"{shape.num_chunks}, the only number for the schedule {name!r}"
        raise invalid_value("num_chunks", num_chunks, allowed, "Remove the argument num_chunks.")
    return shape


def _facts(items: Sequence[Item], method: str, seconds: Sequence[float] | None) -> tuple[LayerFacts, ...]:
    """The properties of the layers for the partition. Parameters of specs are counted only if `method` needs them."""
    if seconds is not None and len(seconds) != len(items):
        raise invalid_value("The length of layer_seconds", len(seconds), f"{len(items)}, one number for each layer")
    counts = method.lower() == partition.PARAMETERS
    return tuple(
        LayerFacts(specs.type_name(item), specs.num_params(item, counts), None if seconds is None else seconds[i])
        for i, item in enumerate(items)
    )


def _register(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register a module under its name. A container of numbered members becomes a ModuleList, because twinflow
    treats the members of a ModuleList as blocks.
    """
    *path, last = name.split(".")
    here = root
    for step, after in zip(path, name.split(".")[1:], strict=True):
        if step not in here._modules:
            here.add_module(step, nn.ModuleList() if after.isdigit() else nn.Module())
        here = here.get_submodule(step)
    known = here._modules.get(last)
    if known is None:
        here.add_module(last, module)
    elif known is not module:
        raise ValueError(f"Two different modules in the parts have the name {name!r}. Give each module its own name.")


def _find_ties(
    made: Sequence[Mapping[str, nn.Module]], ranks: Sequence[int], here: int
) -> tuple[tuple[Tie, ...], dict[str, str]]:
    """The ties, and a dict that maps each further name of a shared parameter on this rank to its first name."""
    uses: dict[nn.Parameter, list[tuple[int, str]]] = {}  # ranks and names of all uses
    for owned, rank in zip(made, ranks, strict=True):
        for name, module in owned.items():
            for inner, param in module.named_parameters(prefix=name, remove_duplicate=False):
                uses.setdefault(param, []).append((rank, inner))
    ties, aliases = [], {}
    for its in uses.values():
        first, names = its[0][1], [name for rank, name in its if rank == here]
        aliases.update({name: first for name in names if name != first})
        holders = tuple(sorted({rank for rank, _ in its}))
        if names and len(holders) > 1:  # also a frozen one: its copies must start equal, and it may be trained later
            ties.append(Tie(first, names[0], holders))
    return tuple(ties), aliases


def _find_reused(made: Sequence[Mapping[str, nn.Module]], ranks: Sequence[int], here: int) -> frozenset[str]:
    """Names of parameters that several layers of this rank use. Each use has a gradient in every micro-batch."""
    names: dict[nn.Parameter, list[str]] = {}
    for owned, rank in zip(made, ranks, strict=True):
        for name, module in owned.items() if rank == here else ():
            for inner, param in module.named_parameters(prefix=name):
                names.setdefault(param, []).append(inner)
    return frozenset(name for its in names.values() if len(its) > 1 for name in its)


def _layer(index: int, item: Item, owned: Mapping[str, nn.Module], reruns: Sequence[str] | None) -> Layer:
    if isinstance(item, Part):
        return Layer(index, partial(_spread, item.call), item.is_block, item.chain)
    module = next(iter(owned.values()), None)
    call: Callable[[Any], Any] = item if module is None else module
    if isinstance(item, TiedLayerSpec) and item.forward_fn is not None:
        assert module is not None
        call = partial(_call_as, module, item.forward_fn)
    has_params = module is not None and next(module.parameters(), None) is not None
    return Layer(index, call, has_params if reruns is None else specs.type_name(item) in reruns)


def _group(layers: Sequence[Layer], interval: int) -> tuple[Run, ...]:
    """Group layers into runs: up to `interval` consecutive layers that may be recomputed, all consecutive layers of a
    chain that are not recomputed, and all others alone.
    """
    runs: list[Run] = []
    for layer in layers:
        reruns = interval > 0 and layer.may_rerun
        is_joined = bool(runs) and runs[-1].reruns == reruns
        if is_joined and (len(runs[-1].layers) < interval if reruns else layer.chain is not None):
            runs[-1] = Run((*runs[-1].layers, layer), reruns)
        else:
            runs.append(Run((layer,), reruns))
    return tuple(runs)


def _call_all(layers: Sequence[Layer], seeds: Seed | None, value: Any) -> Any:
    """Call layers one after the other. A tuple with one element is replaced by the element, as between stages."""
    chain = layers[0].chain
    if chain is not None and seeds is None:
        return _spread(partial(chain.call, layers[0].index, layers[-1].index + 1), value)
    for layer in layers:
        if seeds is not None:
            seeds(layer.index)
        value = layer.call(value)
        if isinstance(value, tuple):
            value = single(value)
    return value


def single(values: tuple[Any, ...]) -> Any:
    """The element of a tuple with one element, else the tuple."""
    return values[0] if len(values) == 1 else values


def _spread(call: Callable[..., Any], value: Any) -> Any:
    return call(*value) if isinstance(value, tuple) else call(value)


def _call_as(module: nn.Module, function: Callable[[nn.Module, Any], Any], value: Any) -> Any:
    """Call `function(module, value)` through the module's `__call__`, so that hooks that fetch its weights run."""
    before = vars(module).get("forward")

    def restore() -> None:
        vars(module).pop("forward", None)
        if before is not None:
            vars(module)["forward"] = before

    def once(given: Any) -> Any:
        restore()  # the function may call the module
        return function(module, given)

    vars(module)["forward"] = once
    try:
        return module(value)
    finally:
        restore()


@torch.no_grad()
def profile_layers(module: PipelineModule, *inputs: Any, repeats: int = 3) -> tuple[float, ...]:
    """Measure the seconds of each layer's forward, as the minimum of some runs. Pass the result as `layer_seconds` with
    partition_method="profile".

    The module must have all layers, so build it with num_stages=1.
    """
    if module.num_ranks > 1:
        remedy = "To measure the module, build it with num_stages=1."
        raise invalid_value("The number of pipeline ranks of the module", module.num_ranks, [1], remedy)
    value, found = single(inputs), []
    for call in module.calls():
        seconds = []
        for _ in range(repeats):
            start = perf_counter()
            output = call(value)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(perf_counter() - start)
        value = single(output) if isinstance(output, tuple) else output
        found.append(min(seconds))
    return tuple(found)
