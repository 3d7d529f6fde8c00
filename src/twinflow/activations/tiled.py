# SPDX-License-Identifier: Apache-2.0
"""Modules that work on each token alone, run over one tile of the sequence at a time, in forward and backward.

The intermediate results of an MLP for 500,000 tokens take tens of gigabytes. A tiled module keeps only its input. Its
forward runs over tiles of tokens and writes their results into one tensor. Its backward runs each tile again, with
gradients, and sums the gradients of the weights in fp32, or in their own dtype if that is wider. A module with random
numbers, such as dropout, draws the same ones again. If the module ends with a linear operation, its backward does not
compute the result of this operation again (`last_linear`).

A tiled module inside a checkpointed layer: torch stops the recomputation of a layer when the last saved tensor of its
forward exists again. `_Keep` saves the input of the module before the module runs. If the module is the last operation
of the layer that saves tensors, as the MLP of most transformers is, its forward therefore does not run once more than
without tiles.

The weights are saved with the input, as autograd does in an ordinary module. Weights on the host, and weights that
`fully_shard` gathers, are then on the device when the backward of the module runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.func import functional_call
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from twinflow.activations.last_linear import ResultUsedError, find_last, run_without
from twinflow.activations.rerun import Randoms, are_same, autocast_of, randoms_of, with_randoms
from twinflow.activations.wrap import ReplacedForward, class_of
from twinflow.errors import incompatible, invalid_value, wrong_state

TILE: Final = 8192  # tokens of a tile; larger tiles need more memory, and smaller ones keep a GPU less busy
# A tile of a norm has this many times as many tokens. The intermediate results of a norm are narrower than those of an
# MLP, and exist when the larger ones of attention do not. A norm that gets all tokens at once does not run again in
# backward.
NORM_TILES: Final = 4


def tile_modules(modules: Mapping[str, nn.Module], tile: int = TILE) -> TileHandle:
    """Runs modules, given by name, over tiles of at most `tile` tokens from now on, and norms over tiles of four times
    as many.

    The output of a module for one token must depend on this token only. A module gets one tensor [..., tokens, width]
    and returns one tensor with the same tokens. Raises ValueError if a module is tiled already.
    """
    if type(tile) is not int or tile < 1:
        raise invalid_value("tile", tile, "a whole number >= 1")
    for name, module in modules.items():
        if is_tiled(module):
            raise invalid_value(
                "A module to tile", name, "a module that is not tiled yet", "Call remove() of the earlier handle."
            )
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise incompatible(
                f"The tiled module {name}",
                "torch.compile",
                "its backward runs the module again, tile by tile, which a compiled graph cannot do",
                "Tile the sequence or compile the module.",
            )
    names: dict[nn.Module, str] = {}  # each module once, if layers share it
    for name, module in modules.items():
        names.setdefault(module, name)
    return TileHandle([Tiled(name, module, tile) for module, name in names.items()])


def is_tiled(module: nn.Module) -> bool:
    """Whether a module runs over tiles."""
    return isinstance(vars(module).get("forward"), Tiled)


class TileHandle:
    """The tiled modules of a model. `remove` ends the tiling."""

    def __init__(self, modules: Sequence[Tiled]) -> None:
        self._modules = list(modules)

    @property
    def names(self) -> list[str]:
        """The names of the tiled modules."""
        return [module.name for module in self._modules]

    def remove(self) -> None:
        """Restores the forwards of the modules. A backward of an earlier forward stays possible."""
        for module in self._modules:
            module.remove()
        self._modules.clear()


class Tiled(ReplacedForward):
    """The `forward` of a module that runs over tiles."""

    def __init__(self, name: str, module: nn.Module, tile: int) -> None:
        super().__init__(module)
        self.name = name
        self.tile = tile * (NORM_TILES if is_norm(module) else 1)
        self._inner = _Inner(module, self._forward)
        self._is_checked = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        tensors = [value for value in given if isinstance(value, Tensor)]
        if len(tensors) != 1 or len(given) != 1 or tensors[0].dim() < 2:
            raise wrong_state(
                f"{self.name} cannot run over tiles",
                f"it was called with {len(tensors)} tensors and {len(given) - len(tensors)} other arguments, and a "
                "tiled module gets one tensor [..., tokens, width]",
                "Leave this module out of the tiled modules.",
            )
        x = tensors[0]
        num_tokens = x.shape[:-1].numel()
        if num_tokens <= self.tile:
            return self._forward(*args, **kwargs)
        flat = x.reshape(1, num_tokens, x.shape[-1])
        if not self._is_checked:
            self._check_tokens(flat)
            self._is_checked = True
        params = {name: param for name, param in self._module.named_parameters() if not _is_wrapper(param)}
        run = _Run(self._inner, list(params), self.tile, self.name)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (flat, *params.values())):
            kept = _Keep.apply(run, flat, *params.values())  # type: ignore[no-untyped-call]
            out: Tensor = _Tiles.apply(run, kept, *params.values())  # type: ignore[no-untyped-call]
        else:
            out = run.forward(flat)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _check_tokens(self, x: Tensor) -> None:
        """Raises RuntimeError if the output for a token depends on the tokens before it, as in a convolution. Compares
        the outputs of a few tokens of the first call, with and without the tokens before them.
        """
        # Rounding may choose other experts, and random numbers depend on the number of tokens.
        if x.is_meta or has_experts(self._module):
            return
        stop = min(4, x.shape[1])
        start = stop // 2
        before = randoms_of(x.device)
        dropouts = [part for part in self._module.modules() if _is_dropout(part) and part.training]
        for part in dropouts:
            part.training = False
        try:
            with torch.no_grad(), with_randoms(before), autocast_of(x.device.type, has_gradients=False)():
                outs = [self._forward(x[:, rows].clone()) for rows in (slice(stop), slice(start, stop))]
                is_random = not are_same(before, randoms_of(x.device))
        finally:
            for part in dropouts:
                part.training = True
        if is_random or not all(isinstance(y, Tensor) and y.dim() == 3 for y in outs) or outs[0].shape[1] != stop:
            return
        whole, alone = outs[0][:, start:].float(), outs[1].float()
        if bool(((whole - alone).norm(dim=-1) > 0.1 * alone.norm(dim=-1) + 1e-6).any()):
            raise wrong_state(
                f"{self.name} cannot run over tiles",
                "its output for a token depends on other tokens",
                "Leave this module out of the tiled modules.",
            )

    def remove(self) -> None:
        """Restores the forward. If another library has wrapped this object, it stays and runs one tile."""
        self.restore()
        self.tile = 1 << 62


class _Inner(nn.Module):
    """A module whose forward is the original one, for torch.func.functional_call."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._original = forward

    def forward(self, x: Tensor) -> Any:
        return self._original(x)


class _Run:
    """One call of a tiled module, between its forward and its backward."""

    def __init__(self, inner: _Inner, names: Sequence[str], tile: int, name: str) -> None:
        self._inner = inner
        self._names = [f"module.{one}" for one in names]
        self._tile = tile
        self._name = name
        self._randoms: Randoms = []  # states of the generators before the forward, if it draws random numbers
        self._autocast: Callable[[], AbstractContextManager[object]] = nullcontext
        self._last_linear: int | None = None  # the linear operation whose result the module returns
        self.kept: Any = None  # the autograd node that has saved the input and the weights

    def forward(self, x: Tensor) -> Tensor:
        """The results of all tiles in one tensor."""
        is_training = any(part.training for part in self._inner.modules())
        before = randoms_of(x.device) if is_training else []
        self._autocast = autocast_of(x.device.type)
        out: Tensor | None = None
        first: weakref.ref[Tensor] | None = None  # the result of the first tile, until it should be freed
        with autocast_of(x.device.type, has_gradients=False)():
            for rows in self._tiles(x):
                part = x[:, rows]
                if out is None:
                    y, self._last_linear = find_last(self._inner, part)
                else:
                    y = self._inner(part)
                self._check(y, part)
                if out is None:
                    out = y.new_empty(1, x.shape[1], y.shape[-1])
                    first = weakref.ref(y)
                out[:, rows] = y
                del y  # before the next tile makes its own
                if first is not None and first() is not None:
                    self._last_linear = None  # the module keeps its result, and may read it later
                first = None
        assert out is not None
        if before and not are_same(before, randoms_of(x.device)):
            self._randoms = before
        return out

    def backward(self, grad: Tensor, wants: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the input and of the weights. `wants`: which of them are needed."""
        with suppress(ResultUsedError):
            return self._backward(grad, wants)
        self._last_linear = None  # the module runs in another way than in forward: compute all results
        return self._backward(grad, wants)

    def _backward(self, grad: Tensor, wants: Sequence[bool]) -> list[Tensor | None]:
        x, *weights = self.kept.saved_tensors
        totals: list[Tensor | None] = [None] * len(weights)
        grad_x = torch.empty_like(x) if wants[0] else None
        leaves = [weight.detach().requires_grad_(one) for weight, one in zip(weights, wants[1:], strict=True)]
        with with_randoms(self._randoms), torch.enable_grad(), self._autocast():
            for rows in self._tiles(x):
                part = x[:, rows].detach().requires_grad_(wants[0])
                given = dict(zip(self._names, leaves, strict=True))
                y = run_without(self._last_linear, partial(functional_call, self._inner, given, (part,)))
                wanted = [tensor for tensor in (part, *leaves) if tensor.requires_grad]
                found = iter(torch.autograd.grad(y, wanted, grad[:, rows], allow_unused=True))
                if grad_x is not None:
                    one = next(found)
                    grad_x[:, rows] = 0.0 if one is None else one
                for index, is_wanted in enumerate(wants[1:]):
                    share = next(found) if is_wanted else None
                    if share is not None:
                        totals[index] = _add(totals[index], share)
                del y
        sums = [
            (torch.zeros_like(weight) if total is None else total.to(weight.dtype)) if is_wanted else None
            for total, weight, is_wanted in zip(totals, weights, wants[1:], strict=True)
        ]
        return [grad_x, *sums]

    def _tiles(self, x: Tensor) -> Iterator[slice]:
        for start in range(0, x.shape[1], self._tile):
            yield slice(start, start + self._tile)

    def _check(self, y: object, x: Tensor) -> None:
        if not isinstance(y, Tensor) or y.shape[:-1] != x.shape[:-1]:
            got = f"a tensor of the shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise wrong_state(
                f"{self._name} cannot run over tiles",
                f"it returned {got} for an input of the shape {tuple(x.shape)}, and a tiled module returns one tensor "
                "with the tokens of its input",
                "Leave this module out of the tiled modules.",
            )


class _Keep(Function):
    """Saves the input and the weights of a tiled module, and returns the input."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(x, *params)
        ctx.num_params = len(params)
        run.kept = ctx
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, grad, *[None] * ctx.num_params)


class _Tiles(Function):
    """The tiled module. The node of `_Keep` has its saved tensors."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: Tensor, *params: Tensor) -> Tensor:
        ctx.run = run
        return run.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.run.backward(grad, ctx.needs_input_grad[1:]))


def _add(total: Tensor | None, share: Tensor) -> Tensor:
    """The sum of the gradients of a weight so far, in fp32 or wider."""
    if total is not None:
        return total.add_(share)
    return share.to(torch.promote_types(share.dtype, torch.float32), copy=True)  # two weights may share a gradient


def is_norm(module: nn.Module) -> bool:
    """Whether the name of a module says that it is a norm."""
    return class_of(module).endswith("Norm")


def has_experts(module: nn.Module) -> bool:
    """Whether a module has experts, among which it divides tokens."""
    return any("Expert" in type(part).__name__ or "Router" in type(part).__name__ for part in module.modules())


def _is_dropout(module: nn.Module) -> bool:
    return "Dropout" in type(module).__name__


def _is_wrapper(param: Tensor) -> bool:
    """Whether a parameter consists of other tensors, as quantised weights do. It is frozen and is used in place."""
    return is_traceable_wrapper_subclass(param)
