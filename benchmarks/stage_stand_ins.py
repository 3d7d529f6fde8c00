# SPDX-License-Identifier: Apache-2.0
"""What one rank of many needs to run alone: stand-ins for other data ranks and stages, and a count of memory on a CPU.

The count takes memory as a GPU would have it: what operations make and what is still alive, in the order of one stream.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from twinflow.dist.group import Group
from twinflow.engine.pipeline import PipelineEngine
from twinflow.parallel.wire import Key, Value, Wire


class Mirror(Group):
    """Ranks that all have what this one has: sums are multiples, and parts of others are copies of this one's."""

    def __init__(self, world: int) -> None:
        super().__init__(None, range(world), is_on_host=False)

    def reduce_scatter(self, out: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
        """As NCCL: the part, from a whole in the dtype that travels."""
        out.copy_(whole.to(dtype)[: out.numel()]).mul_(self.world)

    def all_reduce(self, out: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
        """As with NCCL, in a copy."""
        out.copy_(whole.to(dtype, copy=True).mul_(self.world))

    def all_gather(self, whole: Tensor) -> None:
        """All parts."""
        parts = whole.view(self.world, -1)
        parts[1:] = parts[0]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """This rank is the first."""

    def gather_rows(self, row: Tensor) -> Tensor:
        """The same row of each."""
        return row.repeat(self.world, 1)


class Void(Wire):
    """Other stages: what they send is there at once, and what is sent to them is gone."""

    def __init__(self, index: int, device: torch.device, shape: tuple[int, ...]) -> None:
        self.sent_bytes, self.device = 0, device
        self._own, self._like = index, torch.empty(shape, dtype=torch.bfloat16, device="meta")
        self._mail: dict[Key, Value] = {}  # from one stage of this rank to the next

    def expect(self, keys: Mapping[int, Sequence[Key]]) -> None:
        """All of it."""

    def send(self, key: Key, value: Value) -> None:
        """Kept only for this rank itself."""
        if key.receiver == self._own:
            self._mail[key] = tuple(None if one is None else one.detach() for one in value)

    def receive(self, key: Key) -> Value:
        """Small random numbers, as activations and gradients are."""
        found = self._mail.pop(key, None)
        if found is None:
            scale = 1.0 if key.kind == "F" else 1e-4
            found = (torch.randn_like(self._like, device=self.device).mul_(scale),)
        return tuple(one.requires_grad_() if one is not None and key.kind == "F" else one for one in found)

    def check(self) -> None:
        """Nothing fails."""

    def fail(self, error: BaseException) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing is open."""


class LiveBytes(TorchDispatchMode):
    """On the CPU: bytes of the tensors that operations of this thread have made and that are still alive, and the most
    of them, from `start` on. Products of half precision are computed in fp32: some CPUs are very slow otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: dict[int, Any] | None = None

    def start(self) -> None:
        """Count from here on."""
        self.now, self.most, self._seen = 0, 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As without, and a look at what comes out."""
        if func in _PRODUCTS and args[0].dtype == torch.bfloat16:
            made = _narrow(func, func(*(_widen(one) for one in args), **(kwargs or {})))
        else:
            made = func(*args, **(kwargs or {}))
        if self._seen is not None:
            given = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
            for storage in (one.untyped_storage() for one in _tensors(made)):
                if storage._cdata not in given:  # not a view
                    self._add(storage)
        return made

    def _add(self, storage: Any) -> None:
        key, nbytes, seen = storage._cdata, storage.nbytes(), self._seen
        assert seen is not None
        if key in seen:
            return

        def gone(_: Any) -> None:
            seen.pop(key, None)
            self.now -= nbytes

        seen[key] = weakref.ref(storage, gone)
        self.now += nbytes
        self.most = max(self.most, self.now)


@contextlib.contextmanager
def counting(live: LiveBytes, engine: PipelineEngine) -> Iterator[None]:
    """Count, with memory as on a GPU: in the order of one stream, and without wide factors in the loss."""
    assert engine.optimizer is not None
    compute = engine.optimizer.runtime.device.compute()
    for param in engine.module.parameters():
        hooked: Any = param  # torch does not type this method
        hooked.register_post_accumulate_grad_hook(lambda _: compute.record().synchronize())
    shared: Any = engine.optimizer.runtime.sharing
    prompt = contextlib.nullcontext() if shared is None else mock.patch.object(shared, "take_flat", _prompt(shared))
    with mock.patch("twinflow.loss._wide_product", _wide_product), prompt, live:
        yield


def _prompt(shared: Any) -> Callable[[Any], Tensor]:
    """Takes a buffer when all reductions have ended: on a GPU the next one waits for them in the order of a stream. The
    thread that reduces on a CPU may be late, and then more buffers are made."""
    take = shared.take_flat

    def taken(bucket: Any) -> Tensor:
        with shared._changed:
            while shared._is_busy or shared._next() is not None:
                shared._changed.wait(0.1)
        found: Tensor = take(bucket)
        return found

    return taken


_ATEN = torch.ops.aten
_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_PRODUCTS = (
    *(_ATEN.mm.default, _ATEN.addmm.default, _ATTENTION),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _narrow(func: Any, made: Any) -> Any:
    if isinstance(made, Tensor):
        return made.to(torch.bfloat16)
    if func is _ATTENTION:  # whose second result is fp32
        return made[0].to(torch.bfloat16), made[1]
    return tuple(one.to(torch.bfloat16) for one in made)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """As a GPU makes it: without wide copies of the factors."""
    made = torch.empty(len(a), b.shape[1], dtype=dtype)
    with _disable_current_modes():
        return torch.mm(a.to(dtype), b.to(dtype), out=made)


def _tensors(value: Any) -> Iterator[Tensor]:
    if type(value) in (Tensor, torch.nn.Parameter):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
