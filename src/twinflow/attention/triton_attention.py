# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout (the kept blocks of scores) with Triton: forward, and gradients of q, k, v, bias and relative
positions.

Forward launches one kernel, or two if long rows are cut. Backward launches up to four kernels, and more for gradients
of bias and relative positions. Sinks change no kernel: they only scale the results of forward.

Everything about a call that does not depend on the values of its tensors is prepared once: checks, plans, tables on the
device, grids and the arguments of the kernels. `call_for` finds it by one key. The host waits only when it copies
tables to the device: those of a new plan, and those for the gradients of bias and relative positions.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twinflow.attention import hopper
from twinflow.attention.bias_gradients import bias_gradient, relative_gradient
from twinflow.attention.extras import Extras, check_call
from twinflow.attention.launch import (
    NO_EXTRAS,
    Call,
    Drop,
    ExtraArgs,
    Launch,
    Reduction,
    Scratch,
    drop_args,
    is_interpreting,
    on_device,
    other_rows,
    scratch_for,
    strides_of,
    strides_of_rows,
    with_dense_rows,
)
from twinflow.attention.layout import Layout
from twinflow.attention.tiles import TilePlan
from twinflow.attention.tuning import Tunings, tunings_for
from twinflow.errors import invalid_value

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
CACHED_CALLS = 64
LOG2E = 1.4426950408889634

# By kernel: the tensors whose rows it reads as other tiles, and the field of Tunings.
OTHERS = {"forward": ("k", "v"), "query_gradients": ("k", "v"), "key_gradients": ("q", "grad")}
TUNED = {"forward": "forward", "query_gradients": "queries", "key_gradients": "keys"}

_CALLS: dict[Hashable, Call] = {}
_LOCK = threading.Lock()  # for changes of _CALLS


def forward_pass(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, extras: Extras, tunings: Tunings | None = None
) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of each row in base 2, [B, H, queries] in fp32. q, k and v must be on a GPU,
    except in Triton's interpreter. `tunings` is for benchmarks and tests.
    """
    q, k, v = with_dense_rows(q), with_dense_rows(k), with_dense_rows(v)
    call = call_for(q, k, v, layout, extras, tunings)
    with on_device(q.device):
        out, lse = forward(q, k, v, call, extras)
        if extras.sinks is not None:
            _add_sinks(out, lse, extras.sinks)
        return out, lse


def backward_pass(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    extras: Extras,
    wants: Sequence[bool],
    tunings: Tunings | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, bias, relative and sinks. `wants` says which are needed; the others may be None."""
    q, k, v = (with_dense_rows(tensor) for tensor in inputs)
    grad = with_dense_rows(grad)
    call = call_for(q, k, v, layout, extras, tunings)
    with on_device(q.device):
        dq, delta = query_gradients(q, k, v, out, lse, grad, call, extras)
        dk, dv = None, None
        if wants[1] or wants[2]:
            dk, dv = key_gradients(q, k, v, lse, grad, delta, call, extras)
        tensors = (q, k, v, lse, grad, delta)
        dbias = bias_gradient(tensors, call, extras) if wants[3] else None
        drelative = relative_gradient(tensors, call, extras) if wants[4] else None
        dsinks = None
        if wants[5]:
            assert extras.sinks is not None
            # The probability of a sink times the gradient of its score. The value of a sink is zero.
            share = torch.exp2(extras.sinks.detach().float()[:, None] * LOG2E - lse)
            dsinks = -(share * delta).sum((0, 2)).to(extras.sinks.dtype)
    return dq, dk, dv, dbias, drelative, dsinks


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add the sinks to the sums of weights of all rows. Backward then needs no change, because it computes
    probabilities from `lse`. Rows without a key stay zero with an infinite `lse`.
    """
    logits = sinks.detach().float()[:, None] * LOG2E
    total = torch.logaddexp2(lse, logits)
    out.copy_(out * torch.exp2(lse - total).nan_to_num(0.0)[..., None])
    lse.copy_(total)


def call_for(q: Tensor, k: Tensor, v: Tensor, layout: Layout, extras: Extras, tunings: Tunings | None = None) -> Call:
    """The call with its prepared kernels. The arguments are checked if there is none for these shapes yet."""
    key = (
        layout.handle,
        tunings,
        extras.scale,
        extras.dropout,
        extras.q_start,
        extras.softcap,
        _form(q),
        _form(k),
        _form(v),
        _form(extras.key_padding),
        _form(extras.mask),
        _form(extras.bias),
        _form(extras.relative),
    )
    call = _CALLS.get(key)
    if call is None:
        call = _new_call(q, k, v, layout, extras, tunings)
        with _LOCK:
            if len(_CALLS) >= CACHED_CALLS:
                _CALLS.pop(next(iter(_CALLS)))
            _CALLS[key] = call
    return call


def _form(tensor: Tensor | None) -> Hashable:
    """Everything about a tensor for which a kernel is chosen and compiled. Triton compiles other code for pointers that
    are not aligned to 16 bytes."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


def _new_call(q: Tensor, k: Tensor, v: Tensor, layout: Layout, extras: Extras, tunings: Tunings | None) -> Call:
    sizes = check_call(q, k, v, layout, extras)
    if q.dtype not in DTYPES:
        raise invalid_value("q.dtype", q.dtype, DTYPES, 'Convert the tensors, or use backend="torch".')
    if sizes.head_dim > MAX_HEAD_DIM:
        raise invalid_value("head_dim", sizes.head_dim, f"at most {MAX_HEAD_DIM}", 'Use backend="torch".')
    if not q.is_cuda and not is_interpreting():
        raise invalid_value(
            "q.device", str(q.device), "a CUDA device", 'Move q, k and v to a GPU, or use backend="torch".'
        )
    names = ("key_padding", "mask", "bias", "relative")
    # A cached call must not keep the memory of tensors.
    forms: dict[str, Any] = {name: _without_memory(getattr(extras, name)) for name in names}
    tunings = tunings or tunings_for(sizes.head_dim, q.dtype)
    return Call(layout, replace(extras, seed=0, sinks=None, **forms), sizes, q.dtype, q.device, tunings)


def _without_memory(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, extras: Extras | None = None) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of each row in base 2. Without `extras`, the tensors are those of the call."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    kernel = _kernel("forward", tensors, call, None)
    pieces = kernel.scratch()
    kernel(tensors, pieces, extras)
    if kernel.reduction is not None:
        kernel.reduction((out, lse, strides_of(out=out)), pieces)
    return out, lse


def query_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, call: Call, extras: Extras | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of q, and delta, the sum of out * grad of each query."""
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad": grad, "delta": delta, "dq": dq}
    kernel = _kernel("query_gradients", tensors, call, (_form(out), _form(grad)))
    pieces = kernel.scratch()
    kernel(tensors, pieces, extras)
    if kernel.reduction is not None:
        kernel.reduction((dq, None, (strides_of_rows(dq), None)), pieces, (dq.shape[2], call.extras.q_start))
    return dq, delta


def key_gradients(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, delta: Tensor, call: Call, extras: Extras | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v.

    If query heads that share keys have different patterns, the gradients of each head are computed in fp32 and summed.
    """
    sizes, is_whole = call.sizes, call.in_program == call.sizes.group
    if is_whole:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    else:
        whole = (sizes.batch, sizes.num_heads, sizes.num_keys, sizes.head_dim)
        dk, dv = (torch.empty(whole, dtype=torch.float32, device=k.device) for _ in range(2))
    tensors = {"q": q, "k": k, "v": v, "lse": lse, "grad": grad, "delta": delta, "dk": dk, "dv": dv}
    kernel = _kernel("key_gradients", tensors, call, _form(grad))
    pieces = kernel.scratch()
    kernel(tensors, pieces, extras)
    if kernel.reduction is not None:
        kernel.reduction((dk, dv, (strides_of_rows(dk), strides_of_rows(dv))), pieces, (sizes.num_keys, 0))
    if not is_whole:
        grouped = (sizes.batch, sizes.num_kv_heads, sizes.group, sizes.num_keys, sizes.head_dim)
        dk, dv = (tensor.view(grouped).sum(2).to(k.dtype) for tensor in (dk, dv))
    return dk, dv


class Kernel:
    """A kernel that is prepared for a call, and the launch that combines the pieces of cut rows. The forms of the
    tensors do not change.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor], call: Call) -> None:
        from twinflow.attention import kernels

        self._call = call
        by_keys = name == "key_gradients"
        num_heads = call.sizes.num_heads // (call.in_program if by_keys else 1)
        plan = hopper.plan_for(name, tensors, call)
        self._run: hopper.HopperKernel | TritonKernel
        if plan is not None:
            self._run = hopper.HopperKernel(name, tensors, call, plan)
        else:
            self._run = TritonKernel(name, tensors, call, num_heads)
            plan = self._run.plan
        self.plan: TilePlan = plan
        self._flags = {"has_second": by_keys, "has_weights": name == "forward"}
        self._no_scratch = scratch_for(call, plan, **self._flags) if plan.num_slots == 0 else None
        self.reduction: Reduction | None = None
        if plan.num_slots:
            reduce = kernels.reduce_outputs if name == "forward" else kernels.reduce_gradients
            self.reduction = Reduction(reduce, num_heads, call, plan)

    def scratch(self) -> Scratch:
        """Scratch memory for the pieces of cut rows."""
        return self._no_scratch or scratch_for(self._call, self.plan, **self._flags)

    def __call__(self, tensors: Mapping[str, Tensor], pieces: Scratch, extras: Extras | None) -> None:
        extras = extras or self._call.extras
        args = NO_EXTRAS if self._call.has_no_tensors else self._call.extra_args(extras)
        self._run(tensors, pieces, args, drop_args(extras))


def _kernel(name: str, tensors: Mapping[str, Tensor], call: Call, more: Hashable) -> Kernel:
    """The prepared kernel of a call. `more`: the forms of tensors on which the key of the call does not depend."""
    kernel: Kernel | None = call.kernels.get((name, more))
    if kernel is None:
        kernel = call.kernels[name, more] = Kernel(name, tensors, call)
    return kernel


class TritonKernel:
    """A kernel of kernels.py with the arguments that do not change."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], call: Call, num_heads: int) -> None:
        from twinflow.attention import kernels

        others = OTHERS[name]
        by_keys = name == "key_gradients"
        tuning = getattr(call.tunings, TUNED[name])
        tuning, plan, shape = call.prepare(tuning, [tensors[other] for other in others], by_keys)
        self.plan = plan
        self._described = others if shape.TMA else ()
        strides = strides_of(**{name: tensor for name, tensor in tensors.items() if tensor.dim() == 4})
        self._before = (strides, plan.tables)
        self._after = (call.size_args(plan.max_items, plan.num_slots, plan.num_long), shape)
        num_programs = plan.max_items * call.sizes.batch * num_heads
        self._launch = Launch(getattr(kernels, name), num_programs, tuning.options)

    def __call__(self, tensors: Mapping[str, Tensor], pieces: Scratch, extras: ExtraArgs, drop: Drop) -> None:
        given: Mapping[str, Any] = tensors
        if self._described:
            given = {**tensors, **{name: other_rows(tensors[name], self._after[1]) for name in self._described}}
        scratch = pieces if self.plan.num_slots else None
        self._launch(*given.values(), *self._before, scratch, extras, drop, *self._after)
