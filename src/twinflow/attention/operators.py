# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout for autograd and for torch.compile.

An eager call runs an autograd.Function. `torch.compile` and `torch.export` see two operators instead,
`twinflow::attention` and `twinflow::attention_backward`, which they do not look into. A call through an operator costs
more time on the CPU, because torch's dispatcher converts all arguments twice, so eager calls do not use it. Both ways
run the same two functions, `_forward` and `_backward`.

An operator cannot have a Python object as an argument. Its argument `source` is the handle of a LayoutSource, and the
layout for the lengths of a call is found when the operator runs. A compiled graph can therefore run with other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twinflow.attention import reference, triton_attention
from twinflow.attention.extras import Extras
from twinflow.attention.launch import with_dense_rows
from twinflow.attention.layout import Layout, LayoutSource, source_of
from twinflow.attention.tuning import Tunings
from twinflow.errors import incompatible

_TENSORS = "Tensor? key_padding, Tensor? mask, Tensor? bias, Tensor? relative, Tensor? sinks, "
_TENSORS += "Tensor? seed, Tensor? documents"
_NUMBERS = "str source, str backend, float? scale, float dropout, float softcap, SymInt q_start"
_LIBRARY: Any = torch.library.Library("twinflow", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TENSORS}, {_NUMBERS}, "
    "bool[] wants) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_NUM_INPUTS = 16  # arguments of the operator `attention`
_GRADIENTS = (0, 1, 2, 5, 6, 7)  # positions of q, k, v, bias, relative and sinks among them


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    source: LayoutSource,
    extras: Extras,
    backend: str,
    tunings: Tunings | None = None,
) -> Tensor:
    """Attention with a backend, "triton" or "torch". `tunings` is for benchmarks and tests of the Triton kernels."""
    if torch.compiler.is_compiling() or type(q) not in (Tensor, torch.nn.Parameter):
        seed = extras.seed if isinstance(extras.seed, Tensor) else _seed_tensor(extras)
        tensors = (extras.key_padding, extras.mask, extras.bias, extras.relative, extras.sinks, seed, extras.documents)
        numbers = (source.handle, backend, extras.scale, float(extras.dropout), float(extras.softcap), extras.q_start)
        out: Tensor = torch.ops.twinflow.attention(q, k, v, *tensors, *numbers)[0]
        return out
    if extras.dropout and q.is_cuda and torch.cuda.is_current_stream_capturing():
        reason = "every replay of the graph would drop the same scores"
        raise incompatible("Dropout of attention", "a CUDA graph", reason, "Set the dropout of attention to 0.")
    layout = _layout_of(source, q, k, extras)
    learned = (extras.bias, extras.relative, extras.sinks)
    out = _Attention.apply(q, k, v, *learned, layout, extras, backend, tunings)  # type: ignore[no-untyped-call]
    return out


def block_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Tensor:
    """Attention over the kept blocks, in fp32 or wider, with gradients of q, k, v, bias, relative and sinks. `options`:
    fields of `Extras`."""
    return attend(q, k, v, layout, Extras(**options), "torch")


def _seed_tensor(extras: Extras) -> Tensor | None:
    """The seed of dropout as an int64 tensor, or None without dropout."""
    if not extras.dropout:
        return None
    seed = int(extras.seed)
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed)


def _layout_of(source: LayoutSource, q: Tensor, k: Tensor, extras: Extras) -> Layout:
    if q.dim() != 4 or k.dim() != 4:
        return source.layout_for(1, 1, 0)  # the check of the call raises an error for these shapes
    num_tokens = max(k.shape[2], extras.q_start + q.shape[2])
    return source.layout_for(num_tokens, q.shape[1], extras.q_start)


_SAVED = ("bias", "relative", "sinks", "key_padding", "mask", "documents")  # fields of Extras


class _Attention(torch.autograd.Function):
    """Saves the inputs, the result and the log-sum-exp of each row. Backward recomputes the probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        relative: Tensor | None,
        sinks: Tensor | None,
        layout: Layout,
        extras: Extras,
        backend: str,
        tunings: Tunings | None,
    ) -> Tensor:
        out, lse = _forward(q, k, v, layout, extras, backend, tunings)
        tensors = (bias, relative, sinks, extras.key_padding, extras.mask, extras.documents)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        has_tensors = any(tensor is not None for tensor in tensors)
        nothing: dict[str, Any] = dict.fromkeys(_SAVED)
        ctx.extras = replace(extras, **nothing) if has_tensors else extras
        ctx.rest = (layout, backend, tunings, has_tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        layout, backend, tunings, has_tensors = ctx.rest
        extras = replace(ctx.extras, **dict(zip(_SAVED, tensors, strict=True))) if has_tensors else ctx.extras
        grads = _backward(grad, (q, k, v), out, lse, layout, extras, backend, ctx.needs_input_grad, tunings)
        return (*grads, None, None, None, None)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, extras: Extras, backend: str, tunings: Tunings | None = None
) -> tuple[Tensor, Tensor]:
    """The result and the log-sum-exp of each row, which is empty if the backend does not need it."""
    if backend == "triton":
        return triton_attention.forward_pass(q, k, v, layout, extras, tunings)
    return reference.forward_pass(q, k, v, layout, extras), q.new_empty(0, dtype=torch.float32)


def _backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    extras: Extras,
    backend: str,
    wants: Sequence[bool],
    tunings: Tunings | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, bias, relative and sinks. `wants` says which are needed."""
    if backend == "triton":
        return triton_attention.backward_pass(grad, inputs, out, lse, layout, extras, wants, tunings)
    return reference.backward_pass(grad, inputs, layout, extras, wants)


def _extras(tensors: Sequence[Tensor | None], scale: float | None, *numbers: Any) -> Extras:
    key_padding, mask, bias, relative, sinks, seed, documents = tensors
    dropout, softcap, q_start = numbers
    return Extras(
        scale, key_padding, documents, mask, bias, relative, dropout, 0 if seed is None else seed, q_start, softcap,
        sinks,
    )  # fmt: skip


def _operator(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, *tensors, source, backend, scale, dropout, softcap, q_start = args
    extras = _extras(tensors, scale, dropout, softcap, q_start)
    out, lse = _forward(q, k, v, _layout_of(source_of(source), q, k, extras), extras, backend)
    return out.contiguous() if backend == "torch" else out, lse


def _operator_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, backend = args[0], args[11]
    if backend == "torch":
        return q.new_empty(q.shape), q.new_empty(0, dtype=torch.float32)
    return torch.empty_like(with_dense_rows(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_operator(*args: Any) -> tuple[Tensor, ...]:
    grad, q, k, v, out, lse, *tensors, source, backend, scale, dropout, softcap, q_start, wants = args
    extras = _extras(tensors, scale, dropout, softcap, q_start)
    layout = _layout_of(source_of(source), q, k, extras)
    grads = _backward(grad, (q, k, v), out, lse, layout, extras, backend, wants)
    grads = tuple(x if wanted else None for x, wanted in zip(grads, wants, strict=True))
    if backend == "torch":
        grads = tuple(None if x is None else x.contiguous() for x in grads)
    return tuple(q.new_empty(0) if x is None else x for x in grads)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    _, q, k, v, _, _, _, _, bias, relative, sinks, _, _, _, backend, *_, wants = args
    found: list[Tensor] = []
    for tensor, is_wanted in zip((q, k, v, bias, relative, sinks), wants, strict=True):
        if not is_wanted:
            found.append(q.new_empty(0))
        elif backend == "torch" or len(found) > 2:
            found.append(tensor.new_empty(tensor.shape))
        else:
            found.append(torch.empty_like(with_dense_rows(tensor)))
    return tuple(found)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:10])
    ctx.numbers = inputs[10:]


def _operator_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    wants = [ctx.needs_input_grad[place] for place in _GRADIENTS]
    found = torch.ops.twinflow.attention_backward(grad, *ctx.saved_tensors, *ctx.numbers, wants)
    grads: list[Tensor | None] = [None] * _NUM_INPUTS
    for place, is_wanted, one in zip(_GRADIENTS, wants, found, strict=True):
        grads[place] = one if is_wanted else None
    return tuple(grads)


for _name, _real, _fake in (
    ("attention", _operator, _operator_fake),
    ("attention_backward", _backward_operator, _backward_fake),
):
    _LIBRARY.impl(_name, _real, "CPU")
    _LIBRARY.impl(_name, _real, "CUDA")
    torch.library.register_fake(f"twinflow::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("twinflow::attention", _operator_backward, setup_context=_save, lib=_LIBRARY)
