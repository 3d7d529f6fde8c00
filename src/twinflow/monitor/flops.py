# SPDX-License-Identifier: Apache-2.0
"""The FLOPs of a model, module by module: DeepSpeed's `flops_profiler`.

How an operation is assigned to a module: torch's `FlopCounterMode` sees every operation and computes its FLOPs. It asks
a tracker for the module to which they are added. In forward this is the module whose `forward` was entered last. In
backward it is the module that created the autograd node which is running. To know this, hooks assign autograd nodes to
modules. When a module is entered, the nodes behind its inputs that have no module yet are assigned to the enclosing
module. When a module is left, the nodes behind its outputs are assigned to the module itself. Each node is visited
once. With activation checkpointing, a forward that runs again in backward counts as backward.

The FLOPs of a module include those of its submodules. Sums follow the names of modules, so that a `ModuleList`, which
is never called, has a row too.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from twinflow.files import write_whole
from twinflow.monitor.timers import Clock
from twinflow.offload.fetch_hooks import tensors_in

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class FlopsRow:
    """FLOPs and time of one module, including all of its submodules."""

    depth: int  # 0 is the model
    name: str  # as in `named_modules`; empty for the model itself
    kind: str  # its class
    num_params: int
    forward_flops: int
    backward_flops: int  # includes recomputed forwards; 0 when backward was not run
    forward_s: float
    share: float  # of the model's FLOPs

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops


@dataclass(frozen=True)
class FlopsReport:
    """Result of one profiled step. Its times include the cost of counting, so a step without profiling is faster."""

    rows: tuple[FlopsRow, ...]  # the model first, then its modules in their order
    seconds: float  # from the start of the profile to its end
    recompute_fwd_factor: float = 0.0  # how often backward runs forward again; used where backward was not run

    @property
    def forward_flops(self) -> int:
        """FLOPs of forward, including operations outside of all modules."""
        return self.rows[0].forward_flops

    @property
    def backward_flops(self) -> float:
        """Counted FLOPs of backward. If it was not run: twice the FLOPs of forward, and the recomputed forwards."""
        counted = self.rows[0].backward_flops
        return counted if counted else (2.0 + self.recompute_fwd_factor) * self.forward_flops

    @property
    def flops_per_second(self) -> float:
        """Counted FLOPs divided by the time of the profiled step."""
        return self.rows[0].flops / self.seconds if self.seconds > 0 else 0.0

    def text(self, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
        """The report as text: totals, the `top_modules` classes with the most FLOPs at each depth, and a table of all
        modules.

        List and table include modules down to `module_depth`; -1 means all depths. `detailed=False` omits the table.
        """
        last = max(row.depth for row in self.rows) if module_depth < 0 else module_depth
        rows = [row for row in self.rows if row.depth <= last]
        parts = [self._totals(), _top(rows, top_modules)]
        if detailed:
            parts.append(_table(rows))
        return "\n\n".join(parts) + "\n"

    def write(
        self, path: str | Path | None = None, module_depth: int = -1, top_modules: int = 1, detailed: bool = True
    ) -> None:
        """Write the text to the file `path`, or to standard output if `path` is None."""
        text = self.text(module_depth, top_modules, detailed)
        if path is None:
            sys.stdout.write(text)
        else:
            write_whole(Path(path), text)

    def _totals(self) -> str:
        model = self.rows[0]
        how = "counted" if model.backward_flops else f"not run; estimated, recompute {self.recompute_fwd_factor:g}"
        rows = [
            ("model", f"{model.kind}, {si(model.num_params).strip()} parameters"),
            ("forward", f"{si(model.forward_flops)}FLOP in {model.forward_s * 1000:.2f} ms"),
            ("backward", f"{si(self.backward_flops)}FLOP ({how})"),
            ("total", f"{si(self.forward_flops + self.backward_flops)}FLOP"),
            ("achieved", f"{si(self.flops_per_second)}FLOPS over {self.seconds * 1000:.2f} ms, counting included"),
        ]
        return "\n".join(f"{name:<8}  {value}" for name, value in rows)


class FlopsProfile:
    """Context manager that counts one step: `with profile(model) as p: model(x).sum().backward()`, then `p.report`.

    Profiling changes no result. FLOPs inside compiled functions cannot be counted: profile the model without
    compilation.
    """

    report: FlopsReport  # exists after the block

    def __init__(self, model: nn.Module, recompute_fwd_factor: float = 0.0) -> None:
        self._model = model
        self._recompute_fwd_factor = recompute_fwd_factor
        self._watch = _Watch(model)
        self._start_s = 0.0

    def __enter__(self) -> FlopsProfile:
        self._start_s = self._now()
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.stop()
        seconds = self._now() - self._start_s
        rows = tuple(_rows(self._model, self._watch.flops(), self._watch.seconds()))
        self.report = FlopsReport(rows, seconds, self._recompute_fwd_factor)

    def _now(self) -> float:
        for device in {param.device for param in self._model.parameters() if param.is_cuda}:
            torch.cuda.synchronize(device)
        return time.perf_counter()


profile = FlopsProfile


class _Watch:
    """Hooks on every module, and the tracker of `FlopCounterMode` for the current module. See the module docstring."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._clock = Clock(next((param.device for param in model.parameters() if param.is_cuda), None))
        self._open: list[tuple[str, Any]] = []  # the modules that are running, with their start times
        # The module of each autograd node. The references keep the Python objects alive, so that nodes are found again.
        self._owners: dict[Any, str] = {}
        self._times: list[tuple[str, Any, Any]] = []
        self._handles: list[Any] = []
        self._counter = FlopCounterMode(display=False)
        formulas: dict[Any, Any] = self._counter.flop_registry
        for kind in ("", "_backward"):  # torch has formulas for the attention kernels of GPUs only
            on_gpu, on_cpu = (f"_scaled_dot_product_flash_attention{where}{kind}" for where in ("", "_for_cpu"))
            formulas[getattr(torch.ops.aten, on_cpu)] = formulas[getattr(torch.ops.aten, on_gpu)]
        self._counter.mod_tracker = self  # type: ignore[assignment]

    def start(self) -> None:
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._counter.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._owners.clear()
        self._open.clear()

    def flops(self) -> dict[tuple[Phase, str], int]:
        counts: Mapping[Any, Mapping[Any, int]] = self._counter.get_flop_counts()
        return {place: sum(by_operation.values()) for place, by_operation in counts.items()}

    def seconds(self) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for name, before, after in self._times:
            total[name] += self._clock.seconds(before, after)
        return total

    @property
    def parents(self) -> set[tuple[Phase, str]]:
        """Phase and module of the current operation. `FlopCounterMode` reads it at every operation with FLOPs."""
        node = torch._C._current_autograd_node()
        inner = self._open[-1][0] if self._open else ""
        if node is None:
            return {("forward", inner)}
        return {("backward", inner if self._open else self._owners.get(node, ""))}

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        """`FlopCounterMode` requires this method of its tracker. There is nothing to do."""

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._own((args, kwargs), self._open[-1][0] if self._open else "")
        self._open.append((self._names[module], self._clock.now()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names[module]
        while self._open:  # After an exception, the hooks of some inner modules may not have been called.
            opened, before = self._open.pop()
            if opened == name:
                break
        else:
            return
        self._own(output, name)
        if torch._C._current_autograd_node() is None:
            self._times.append((name, before, self._clock.now()))

    def _own(self, values: Any, name: str) -> None:
        nodes = [tensor.grad_fn for tensor in tensors_in(values)]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in self._owners:  # Nodes behind a node with an owner have owners already.
                self._owners[node] = name
                nodes += [behind for behind, _ in node.next_functions]


def _rows(model: nn.Module, flops: Mapping[tuple[Phase, str], int], seconds: Mapping[str, float]) -> Iterator[FlopsRow]:
    total: dict[tuple[str, str], int] = defaultdict(int)
    for (phase, name), count in flops.items():
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):  # the module itself, the modules around it, and the model
            total[phase, ".".join(parts[:depth])] += count
    everything = total["forward", ""] + total["backward", ""]
    for name, module in model.named_modules():
        forward, backward = total["forward", name], total["backward", name]
        yield FlopsRow(
            depth=name.count(".") + 1 if name else 0,
            name=name,
            kind=type(module).__name__,
            num_params=sum(param.numel() for param in module.parameters()),
            forward_flops=forward,
            backward_flops=backward,
            forward_s=seconds.get(name, 0.0),
            share=(forward + backward) / everything if everything else 0.0,
        )


def _top(rows: Iterable[FlopsRow], count: int) -> str:
    """A list of the `count` classes with the most FLOPs at each depth."""
    flops: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    shares: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        flops[row.depth][row.kind] += row.flops
        shares[row.depth][row.kind] += row.share
    lines = ["classes with the most FLOPs at each depth"]
    for depth, kinds in sorted(flops.items()):
        best = sorted(kinds, key=lambda kind: -kinds[kind])[: max(0, count)]
        cells = (f"{kind} {si(kinds[kind])}FLOP {100 * shares[depth][kind]:.1f}%" for kind in best)
        lines.append(f"  {depth}: {', '.join(cells)}")
    return "\n".join(lines)


def _table(rows: Iterable[FlopsRow]) -> str:
    cells = [("module", "class", "params", "forward FLOP", "backward FLOP", "forward ms", "share")]
    for row in rows:
        name = "  " * row.depth + (row.name.rpartition(".")[2] or "(model)")
        counts = (si(row.num_params), si(row.forward_flops), si(row.backward_flops))
        cells.append((name, row.kind, *counts, f"{row.forward_s * 1000:.2f}", f"{100 * row.share:.1f}%"))
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for line in cells:
        left = (f"{cell:<{width}}" for cell, width in zip(line[:2], widths[:2], strict=True))
        right = (f"{cell:>{width}}" for cell, width in zip(line[2:], widths[2:], strict=True))
        lines.append("  ".join((*left, *right)))
    return "\n".join(lines)


def si(value: float) -> str:
    """A number with an SI prefix, such as "12.35 G"."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.2f} {prefix}"
    return f"{value:.0f} "
