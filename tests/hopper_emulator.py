# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels for Hopper on the CPU, in plain Python: their source, with other functions in place of Gluon's.

Triton's interpreter cannot run Gluon. Here each program has a thread for each of its three groups of warps. Barriers
block, with their phases, their arrivals and their bytes. What the GPU does asynchronously is done as late as possible:
a product is computed, and a copy by TMA is done, only when somebody waits for it. A buffer that is given back too early
is then overwritten first, and a result that nobody has waited for cannot be used. Memory is full of NaN before it is
written, and every access through a pointer is checked against the size of its tensor.

`TRITON_INTERPRET=1 python tests/hopper_emulator.py CASE ...` prints a line of JSON for each case, as
attention_support.py does. The pieces of cut rows are combined by Triton's kernels, in the interpreter. Without the
variable, the same cases run on CUDA, with the compiled kernels and without the emulator.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 30.0  # for a barrier; a longer wait is a deadlock
SOURCE: Path | None = None  # other source of the kernels, in tests of the emulator
_LOCAL = threading.local()  # of a thread: the number of its program, and what it has not waited for
_CHANGED = threading.Condition()


class Value(Tensor):
    """A tensor in registers, with the methods that kernels call."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:  # type: ignore[override]
        plain = self.as_subclass(Tensor)
        return (plain.view(dtype) if bitcast else plain.to(dtype)).as_subclass(Value)

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    # Values of a kernel never change.

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self + other

    def __isub__(self, other: Any) -> Any:  # type: ignore[misc]
        return self - other


def value(x: Any) -> Any:
    return torch.as_tensor(x).as_subclass(Value)


@dataclass
class Pointer:
    """Addresses in a tensor."""

    flat: Tensor
    offset: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offset + more)

    def index(self, mask: Any) -> tuple[Tensor, Tensor]:
        offset = torch.as_tensor(self.offset).as_subclass(Tensor).long()
        keep = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask.as_subclass(Tensor)
        offset, keep = torch.broadcast_tensors(offset, keep)
        inside = (offset >= 0) & (offset < self.flat.numel())
        assert bool((inside | ~keep).all()), "an access outside of a tensor"
        return torch.where(keep, offset, 0), keep


def load(pointer: Pointer, mask: Any = None, other: float = 0) -> Any:
    offset, keep = pointer.index(mask)
    found = pointer.flat[offset.clamp(max=pointer.flat.numel() - 1)]
    return torch.where(keep, found, torch.tensor(other, dtype=found.dtype)).as_subclass(Value)


def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    offset, keep = pointer.index(mask)
    x = torch.as_tensor(x).as_subclass(Tensor).to(pointer.flat.dtype).expand(offset.shape)
    pointer.flat[offset[keep]] = x[keep]


@dataclass
class Shared:
    """Blocks in shared memory."""

    data: Tensor

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, number: Any) -> Shared:
        assert 0 <= int(number) < self.data.shape[0]
        return Shared(self.data[int(number)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, layout: object) -> Any:
        return self.data.clone().as_subclass(Value)

    def store(self, x: Any) -> None:
        self.data.copy_(x.as_subclass(Tensor))


@dataclass
class Barrier:
    """A barrier in shared memory. Its phase ends when all have arrived and all bytes are there."""

    count: int = 0
    arrived: int = 0
    num_bytes: int = 0
    phase: int = 0
    copies: list[Callable[[], None]] = field(default_factory=list)  # done when somebody waits

    def change(self, arrivals: int, num_bytes: int) -> None:
        with _CHANGED:
            self.arrived += arrivals
            self.num_bytes += num_bytes
            assert self.arrived <= self.count, "more arrivals than a barrier expects"
            if self.arrived == self.count and self.num_bytes == 0:
                self.phase += 1
                self.arrived = 0
            _CHANGED.notify_all()

    def wait(self, parity: int) -> None:
        with _CHANGED:
            if not _CHANGED.wait_for(lambda: self.has_ended(int(parity)) or _LOCAL.failed, PATIENCE_S):
                raise TimeoutError("a deadlock")
            if _LOCAL.failed:
                raise InterruptedError

    def has_ended(self, parity: int) -> bool:
        copies, self.copies = self.copies, []
        for copy in copies:
            copy()
        return (self.phase & 1) != parity


@dataclass
class Barriers:
    items: list[Barrier]

    def index(self, number: Any) -> Barrier:
        return self.items[int(number)]


@dataclass
class Descriptor:
    """A TMA descriptor: a tensor, and the shape of the blocks that are copied."""

    tensor: Tensor
    block: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def layout(self) -> None:
        return None

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(shape=list(self.block))

    def parts(self, place: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the tensor that a block covers, and the part of the block that lies in the tensor."""
        firsts = [int(first) for first in place]
        assert all(first >= 0 for first in firsts)
        stops = [min(f + n, size) for f, n, size in zip(firsts, self.block, self.tensor.shape, strict=True)]
        counts = [max(0, stop - first) for first, stop in zip(firsts, stops, strict=True)]
        whole = tuple(slice(first, first + count) for first, count in zip(firsts, counts, strict=True))
        return whole, tuple(slice(count) for count in counts)


@dataclass(eq=False)
class Pending:
    """A product that nobody has waited for."""

    compute: Callable[[], Any]
    result: Any = field(default=None)

    @property
    def shape(self) -> Any:
        raise AssertionError("a product is used before anybody has waited for it")


def product(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Pending:
    assert is_async

    def compute() -> Any:
        left = a.data if isinstance(a, Shared) else a.as_subclass(Tensor)
        start = acc.result if isinstance(acc, Pending) else acc
        assert start is not None
        found = left.float() @ b.data.float()
        return (found + start.as_subclass(Tensor) if use_acc else found).as_subclass(Value)

    pending = Pending(compute)
    _LOCAL.products.append(pending)
    return pending


def wait_for_products(num_pending: int, deps: list[Any]) -> Any:
    done, _LOCAL.products = _LOCAL.products, []
    if num_pending:
        done, _LOCAL.products = done[:-num_pending], done[-num_pending:]
    for one in done:
        one.result = one.compute()
    found = tuple(d.result if isinstance(d, Pending) and d.result is not None else d for d in deps)
    return found[0] if len(found) == 1 else found


def copy_in(rows: Descriptor, place: list[Any], bar: Barrier, into: Shared) -> None:
    assert into.data.numel() == math.prod(rows.block)
    # As on an H200, where such a copy is an illegal instruction.
    assert int(place[-1]) * rows.tensor.element_size() % 16 == 0, "a copy that does not begin at 16 bytes"
    whole, inner = rows.parts(place)

    def copy() -> None:
        block = torch.zeros(rows.block, dtype=rows.dtype)
        block[inner] = rows.tensor[whole]
        into.data.view(rows.block).copy_(block)
        bar.change(0, -block.numel() * block.element_size())

    with _CHANGED:
        bar.copies.append(copy)
        _CHANGED.notify_all()


def copy_out(rows: Descriptor, place: list[Any], buf: Shared) -> None:
    whole, inner = rows.parts(place)

    def copy() -> None:
        rows.tensor[whole] = buf.data.view(rows.block)[inner]

    _LOCAL.stores.append(copy)


def wait_for_stores(num_pending: int) -> None:
    assert num_pending == 0
    for copy in _LOCAL.stores:
        copy()
    _LOCAL.stores.clear()


def allocate(dtype: Any, shape: list[int], layout: object) -> Any:
    if layout == "barriers":
        return Barriers([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(tuple(shape), math.nan, dtype=dtype))


def specialize(functions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: object, registers: object) -> None:
    """Run the groups of warps of a program beside each other."""
    problems: list[BaseException] = []
    failed = _Flag()
    program = _LOCAL.program

    def work(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        _LOCAL.program, _LOCAL.products, _LOCAL.stores, _LOCAL.failed = program, [], [], failed
        try:
            function(*args)
            assert not _LOCAL.products
            assert not _LOCAL.stores
        except InterruptedError:
            pass
        except BaseException as problem:  # of a thread, raised below
            problems.append(problem)
            with _CHANGED:
                failed.is_set = True
                _CHANGED.notify_all()

    threads = [threading.Thread(target=work, args=one, daemon=True) for one in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


@dataclass
class _Flag:
    is_set: bool = False

    def __bool__(self) -> bool:
        return self.is_set


def jit(*functions: Any, **options: Any) -> Any:
    return functions[0] if functions else lambda function: function


def nothing(*args: Any, **kwargs: Any) -> None:
    """In place of layouts and fences."""


class _Constexpr:
    def __new__(cls, x: Any) -> Any:
        return x


def language() -> SimpleNamespace:
    """Gluon's language."""
    return SimpleNamespace(
        constexpr=_Constexpr,
        program_id=lambda axis: _LOCAL.program[0],
        num_programs=lambda axis: _LOCAL.program[1],
        static_range=range,
        load=load,
        store=store,
        arange=lambda start, stop, layout: value(torch.arange(start, stop)),
        full=lambda shape, x, dtype, layout: value(torch.full(tuple(shape), x, dtype=dtype)),
        minimum=lambda a, b: value(torch.minimum(torch.as_tensor(a), torch.as_tensor(b))),
        maximum=torch.maximum,
        where=lambda keep, a, b: value(torch.where(*map(torch.as_tensor, (keep, a, b)))),
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2,
        log2=torch.log2,
        convert_layout=lambda x, layout: x,
        allocate_shared_memory=allocate,
        warp_specialize=specialize,
        barrier=nothing,
        SliceLayout=nothing,
        DotOperandLayout=nothing,
        BlockedLayout=nothing,
        NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
    )


def emulated() -> ModuleType:
    """The module of the kernels for Hopper, with the functions above in place of Gluon's."""
    from twinflow import attention

    path = SOURCE or Path(attention.__file__).with_name("kernels_hopper.py")
    tree = ast.parse(path.read_text())
    tree.body = [one for one in tree.body if not (isinstance(one, ast.ImportFrom) and "triton" in str(one.module))]
    module = ModuleType("twinflow.attention.kernels_hopper")

    def init(bar: Barrier, count: int) -> None:
        bar.count = count

    module.__dict__.update(
        gluon=SimpleNamespace(jit=jit),
        gl=language(),
        fence_async_shared=nothing,
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=init,
            wait=lambda bar, phase: bar.wait(phase),
            expect=lambda bar, num_bytes: bar.change(1, int(num_bytes)),
            arrive=lambda bar, count: bar.change(count, 0),
        ),
        tma=SimpleNamespace(
            async_copy_global_to_shared=copy_in, async_copy_shared_to_global=copy_out, store_wait=wait_for_stores
        ),
        warpgroup_mma=product,
        warpgroup_mma_wait=wait_for_products,
    )
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


def launch_args(args: Any, given: Any) -> Any:
    """The arguments of a kernel, with pointers and descriptors in place of slots and boxes."""
    from twinflow.attention.direct_launch import Box, Slot
    from twinflow.attention.hopper import Shape

    if isinstance(args, Slot):
        return Pointer(_memory(given[args.name]))
    if isinstance(args, Box):
        memory = given[args.name]
        assert isinstance(memory, Tensor)
        assert memory.data_ptr() % 16 == 0, "the driver makes no descriptor of this address"
        return Descriptor(torch.as_strided(memory.detach(), args.shape, args.strides), args.block)
    if isinstance(args, Tensor):
        return Pointer(_memory(args))
    if type(args) is tuple:
        return tuple(launch_args(arg, given) for arg in args)
    assert not isinstance(args, tuple) or isinstance(args, Shape), "Triton cannot have this argument"
    return args


def _memory(tensor: Any) -> Tensor:
    """A tensor as one dimension, with the memory between its elements."""
    tensor = tensor.detach()
    numel = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor, (numel if tensor.numel() else 0,), (1,))


@contextlib.contextmanager
def emulation(names: list[str], num_processors: int) -> Any:
    """Within it, calls run the kernels for Hopper here if these support the call. Their names are added to `names`."""
    from twinflow import attention
    from twinflow.attention import hopper, launch, triton_attention

    module, old_call, old_count = emulated(), launch.Launch.__call__, hopper._num_processors
    old_module, old_interpreting = sys.modules.get(module.__name__), hopper.is_interpreting

    def call(self: launch.Launch, given: Any, device: torch.device) -> None:
        if getattr(module, getattr(self.kernel, "__name__", ""), None) is not self.kernel:
            return old_call(self, given, device)
        names.append(self.kernel.__name__)
        args = launch_args(self.args, given)
        for number in range(self.num_programs):
            _LOCAL.program = (number, self.num_programs)
            self.kernel(*args)
        return None

    sys.modules[module.__name__] = module
    attention.kernels_hopper = module  # type: ignore[attr-defined]
    launch.Launch.__call__ = call  # type: ignore[method-assign]
    hopper._num_processors = lambda device: num_processors  # type: ignore[assignment]
    hopper.is_interpreting = lambda: False
    triton_attention._CALLS.clear()
    try:
        yield
    finally:
        launch.Launch.__call__ = old_call  # type: ignore[method-assign]
        hopper._num_processors, hopper.is_interpreting = old_count, old_interpreting
        triton_attention._CALLS.clear()
        if old_module is not None:
            sys.modules[module.__name__] = old_module


@dataclass(frozen=True)
class Case:
    """A forward and a backward."""

    name: str
    width: int
    structure: str = "window"
    block: int = 64
    length: int = 320
    keys: int = 0  # other number of keys
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    is_causal: bool = False
    extra: str = "none"
    is_cut: bool = False
    num_processors: int = 2  # so that a program has several items
    window: int | None = None
    is_fused: bool = False  # heads side by side, in one tensor with others


CASES = [
    Case("128", 128, block=128, length=384),
    Case("128 odd causal", 128, block=128, length=300, is_causal=True, heads=(2, 1)),
    Case("128 padding cut", 128, "longformer", block=64, length=472, batch=2, extra="padding", is_cut=True),
    Case("64", 64, "random", block=128, length=512, heads=(2, 2)),
    Case("64 heads with patterns of their own", 64, "heads", block=64, length=332, heads=(3, 3), batch=2),
    Case("64 causal cut", 64, "longformer", block=128, length=512, is_causal=True, is_cut=True, num_processors=3),
    Case("64 fused", 64, "window", block=128, length=384, heads=(4, 2), batch=2, is_fused=True),
    Case("80", 80, "window", block=64, length=201, extra="documents"),
    Case("96 odd", 96, "window", block=64, length=299, is_causal=True, extra="padding"),
    Case("96 patterns and documents", 96, "heads", block=128, length=388, heads=(2, 2), extra="both", is_cut=True),
    Case("256", 256, "random", block=128, length=256),
    Case("256 causal", 256, "longformer", block=64, length=232, heads=(2, 1), is_causal=True, extra="documents"),
    Case("64 fewer queries", 64, "window", block=64, length=132, keys=300, heads=(2, 1)),
    Case("64 window", 64, "window", block=128, length=472, heads=(2, 1), window=150),
    Case("64 narrow window", 64, "random", block=64, length=200, window=23, extra="softcap"),
    Case("128 causal window", 128, "window", block=64, length=330, is_causal=True, window=128),
    Case("96 softcap and sinks", 96, "window", block=64, length=200, is_causal=True, extra="softcap and sinks"),
    Case("64 nothing kept", 64, "holes", block=64, length=448),
    Case("40 fused", 40, "random", block=128, length=300, heads=(2, 2), is_fused=True),
    Case("72 causal", 72, "window", block=64, length=332, heads=(2, 1), batch=2, is_causal=True),
    Case("104 padding", 104, "window", block=64, length=320, heads=(2, 1), batch=2, extra="padding"),
    Case("192", 192, "random", block=64, length=200),
    Case("64 odd heads", 64, "window", block=64, length=333, heads=(2, 1)),  # lines of lse are not at 16 bytes
]


def layout_of(case: Case) -> Any:
    from twinflow.attention import BSLongformerSparsityConfig, LocalSlidingWindowSparsityConfig, from_dense

    length, num_heads, block = max(case.length, case.keys), case.heads[0], case.block
    side = "unidirectional" if case.is_causal else "bidirectional"
    num = -(-length // block)
    generator = torch.Generator().manual_seed(3)
    if case.structure == "window":
        return LocalSlidingWindowSparsityConfig(num_heads, block, 3, side).layout(length)
    if case.structure == "longformer":
        return BSLongformerSparsityConfig(num_heads, block, False, 1, attention=side).layout(length)
    if case.structure == "heads":
        grid = torch.rand(num_heads, num, num, generator=generator) < torch.linspace(0.3, 1.0, num_heads)[:, None, None]
        return from_dense(grid, block, is_causal=case.is_causal)
    grid = torch.rand(num, num, generator=generator) < 0.6
    if case.structure == "holes":
        grid[:] = False
        grid[2:4], grid[5:, 6:] = True, True
    return from_dense(grid, block, is_causal=case.is_causal, num_heads=num_heads)


@contextlib.contextmanager
def counted(names: list[str]) -> Any:
    """Within it, the names of the kernels for Hopper that are launched on the GPU are added to `names`."""
    from twinflow.attention import launch

    old = launch.Launch.__call__

    def call(self: launch.Launch, given: Any, device: torch.device) -> None:
        if self.kernel.fn.__module__.endswith("kernels_hopper"):
            names.append(self.kernel.fn.__name__)
        old(self, given, device)

    launch.Launch.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        launch.Launch.__call__ = old  # type: ignore[method-assign]


def run_case(case: Case, device: str = "cpu") -> None:
    """Results and gradients are those in float64. On a GPU the kernels run there, otherwise in the emulator."""
    from twinflow.attention import Extras, dense_attention
    from twinflow.attention.operators import attend
    from twinflow.attention.tuning import tunings_for

    generator = torch.Generator().manual_seed(len(case.name))
    (num_heads, num_kv_heads), dtype = case.heads, torch.bfloat16
    num_keys = case.keys or case.length

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(case.batch, heads, tokens, case.width, generator=generator).to(dtype)

    if case.is_fused:
        counts = (num_heads, num_kv_heads, num_kv_heads)
        fused = torch.randn(case.batch, case.length, sum(counts) * case.width, generator=generator).to(dtype)
        split = fused.split([count * case.width for count in counts], dim=2)
        tensors = [part.unflatten(2, (-1, case.width)).transpose(1, 2) for part in split]
        grad = (
            torch.randn(case.batch, case.length, num_heads, case.width, generator=generator).to(dtype).transpose(1, 2)
        )
    else:
        tensors = [random(num_heads, case.length), random(num_kv_heads, num_keys), random(num_kv_heads, num_keys)]
        grad = random(num_heads, case.length)
    options: dict[str, Any] = {"scale": 0.1}
    if case.extra in ("padding", "both"):
        options["key_padding"] = torch.rand(case.batch, num_keys, generator=generator) < 0.8
    if case.extra in ("documents", "both"):
        options["documents"] = torch.rand(case.batch, num_keys, generator=generator).lt(0.02).cumsum(1)
    if "softcap" in case.extra:
        options["softcap"] = 0.9
    if "sinks" in case.extra:
        options["sinks"] = torch.randn(num_heads, generator=generator)
    layout = layout_of(case) if case.window is None else layout_of(case).windowed(case.window)
    tensors, grad = [tensor.to(device) for tensor in tensors], grad.to(device)
    options |= {name: option.to(device) for name, option in options.items() if isinstance(option, Tensor)}
    tunings = replace(tunings_for(case.width, dtype), hopper=True, hopper_tokens=math.inf)
    if case.is_cut:
        tunings = replace(tunings, min_piece=1)
    names: list[str] = []
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    torch.use_deterministic_algorithms(device == "cpu")  # fills new memory with NaN; cuBLAS would refuse it
    with emulation(names, case.num_processors) if device == "cpu" else counted(names):
        out = attend(*inputs, layout, Extras(**options), "triton", tunings)
        found = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    # Lines of log-sum-exp, delta and ids that do not begin at 16 bytes are left to the other kernels.
    has_ids = "key_padding" in options or "documents" in options
    by_queries = num_keys % 4 == 0 or case.batch == 1 or not has_ids
    by_keys = case.length % 4 == 0 or case.batch * num_heads == 1
    wanted = ["forward", "query_gradients"] * by_queries
    wanted += ["key_gradients"] * (2 if case.width > 128 else 1) * by_keys
    assert names == wanted, names
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = dense_attention(*exact, layout, **options)
    expected = [truth.detach(), *torch.autograd.grad(truth, exact, grad.double())]
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = float((one.double() - other).norm() / other.norm().clamp(min=1e-3))
        assert error < 1e-2, f"{name}: {error:.2e}"  # NaN is no less either


def main() -> None:
    device = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
    for case in CASES:
        if sys.argv[1:] and case.name not in sys.argv[1:]:
            continue
        problem = ""
        try:
            run_case(case, device)
        except Exception:
            problem = traceback.format_exc(limit=-6)
        print(json.dumps([case.name, problem]), flush=True)


if __name__ == "__main__":
    main()
