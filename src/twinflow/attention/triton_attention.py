"""Attention over a layout (the kept blocks of scores) with Triton: forward, and gradients of q, k, v, bias and relative
positions.

Forward launches one kernel, or two if long rows are cut. Backward launches up to four kernels, and more for gradients
of bias and relative positions. The host waits only when it copies tables to the device: those of a new plan, and those
for the gradients of bias and relative positions. Plans are cached by layout and shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from twinflow.attention import hopper
from twinflow.attention.bias_gradients import bias_gradient, relative_gradient
from twinflow.attention.extras import Extras, check_call
from twinflow.attention.launch import (
    Call,
    Scratch,
    Shape,
    TensorStrides,
    is_interpreting,
    launch,
    on_device,
    other_rows,
    reduce_gradients,
    reduce_outputs,
    scratch_for,
    strides_of,
    with_dense_rows,
)
from twinflow.attention.layout import Layout
from twinflow.attention.tiles import TilePlan
from twinflow.attention.tuning import Tuning, Tunings, tunings_for
from twinflow.errors import invalid_value

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256


def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, extras: Extras, tunings: Tunings | None = None
) -> Tensor:
    """Attention with Triton kernels. q, k and v must be on a GPU, except in Triton's interpreter. `tunings` is for
    benchmarks and tests.
    """
    sizes = check_call(q, k, v, layout, extras)
    if q.dtype not in DTYPES:
        raise invalid_value("q.dtype", q.dtype, DTYPES, 'Convert the tensors, or use backend="torch".')
    if sizes.head_dim > MAX_HEAD_DIM:
        raise invalid_value("head_dim", sizes.head_dim, f"at most {MAX_HEAD_DIM}", 'Use backend="torch".')
    if not q.is_cuda and not is_interpreting():
        raise invalid_value(
            "q.device", str(q.device), "a CUDA device", 'Move q, k and v to a GPU, or use backend="torch".'
        )
    call = Call(layout, extras, sizes, q.dtype, q.device, tunings or tunings_for(sizes.head_dim, q.dtype))
    out: Tensor = _TritonAttention.apply(q, k, v, extras.bias, extras.relative, call)  # type: ignore[no-untyped-call]
    return out


class _TritonAttention(torch.autograd.Function):
    """Saves the inputs, the result and the log-sum-exp of each row."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relative: Tensor | None, call: Call
    ) -> Tensor:
        q, k, v = (with_dense_rows(tensor) for tensor in (q, k, v))
        with on_device(q.device):
            out, lse = forward(q, k, v, call)
        extras = call.extras
        ctx.save_for_backward(q, k, v, out, lse, bias, relative, extras.key_padding, extras.mask)
        ctx.call = replace(call, extras=replace(extras, bias=None, relative=None, key_padding=None, mask=None))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, bias, relative, key_padding, mask = ctx.saved_tensors
        extras = replace(ctx.call.extras, bias=bias, relative=relative, key_padding=key_padding, mask=mask)
        call = replace(ctx.call, extras=extras)
        grad = with_dense_rows(grad)
        with on_device(q.device):
            dq, delta = query_gradients(q, k, v, out, lse, grad, call)
            dk, dv = None, None
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                dk, dv = key_gradients(q, k, v, lse, grad, delta, call)
            tensors = (q, k, v, lse, grad, delta)
            dbias = bias_gradient(tensors, call) if ctx.needs_input_grad[3] else None
            drelative = relative_gradient(tensors, call) if ctx.needs_input_grad[4] else None
        return dq, dk, dv, dbias, drelative, None


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exp of each row in base 2, [B, H, queries] in fp32."""
    from twinflow.attention import kernels

    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    strides = strides_of(q=q, k=k, v=v, out=out)
    plan = hopper.plan_for(call, (q, k, v), by_keys=False, is_forward=True)
    if plan is not None:
        pieces = scratch_for(call, plan, has_weights=True)
        more = (lse, pieces.sums, pieces.tops, pieces.weights)
        hopper.run("forward", (q,), (k, v), (out,), more, call, plan)
    else:
        tuning, plan, shape = call.prepare(call.tunings.forward, (k, v), by_keys=False)
        pieces = scratch_for(call, plan, has_weights=True)
        tensors = (q, other_rows(k, shape), other_rows(v, shape), out, lse)
        _launch(kernels.forward, call.sizes.num_heads, tensors, strides, pieces, call, tuning, plan, shape)
    reduce_outputs(out, lse, strides, call, plan, pieces)
    return out, lse


def query_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """The gradient of q, and delta, the sum of out * grad of each query."""
    from twinflow.attention import kernels

    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    plan = hopper.plan_for(call, (q, k, v, out, grad), by_keys=False)
    if plan is not None:
        pieces = scratch_for(call, plan)
        hopper.run("query_gradients", (q, grad), (k, v), (dq,), (out, lse, delta, pieces.sums), call, plan)
    else:
        tuning, plan, shape = call.prepare(call.tunings.queries, (k, v), by_keys=False)
        pieces = scratch_for(call, plan)
        strides = strides_of(q=q, k=k, v=v, out=out, grad=grad, dq=dq)
        tensors = (q, other_rows(k, shape), other_rows(v, shape), out, lse, grad, delta, dq)
        _launch(kernels.query_gradients, call.sizes.num_heads, tensors, strides, pieces, call, tuning, plan, shape)
    reduce_gradients(dq, None, call.extras.q_start, call, plan, pieces)
    return dq, delta


def key_gradients(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, grad: Tensor, delta: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v.

    If query heads that share keys have different patterns, the gradients of each head are computed in fp32 and summed.
    """
    from twinflow.attention import kernels

    sizes, in_program = call.sizes, call.in_program
    if in_program == sizes.group:
        dk, dv = torch.empty_like(k), torch.empty_like(v)
    else:
        whole = (sizes.batch, sizes.num_heads, sizes.num_keys, sizes.head_dim)
        dk, dv = (torch.empty(whole, dtype=torch.float32, device=k.device) for _ in range(2))
    plan = hopper.plan_for(call, (q, k, v, grad), by_keys=True)
    if plan is not None:
        pieces = scratch_for(call, plan, has_second=True)
        more = (lse, delta, pieces.sums, pieces.second_sums)
        hopper.run("key_gradients", (k, v), (q, grad), (dk, dv), more, call, plan)
    else:
        tuning, plan, shape = call.prepare(call.tunings.keys, (q, grad), by_keys=True)
        pieces = scratch_for(call, plan, has_second=True)
        strides = strides_of(q=q, k=k, v=v, grad=grad, dk=dk, dv=dv)
        tensors = (other_rows(q, shape), k, v, lse, other_rows(grad, shape), delta, dk, dv)
        num_outputs = sizes.num_heads // in_program
        _launch(kernels.key_gradients, num_outputs, tensors, strides, pieces, call, tuning, plan, shape)
    reduce_gradients(dk, dv, 0, call, plan, pieces)
    if in_program != sizes.group:
        grouped = (sizes.batch, sizes.num_kv_heads, sizes.group, sizes.num_keys, sizes.head_dim)
        dk, dv = (tensor.view(grouped).sum(2).to(k.dtype) for tensor in (dk, dv))
    return dk, dv


def _launch(
    kernel: Any,
    num_heads: int,
    tensors: tuple[Any, ...],
    strides: TensorStrides,
    pieces: Scratch,
    call: Call,
    tuning: Tuning,
    plan: TilePlan,
    shape: Shape,
) -> None:
    args = (*tensors, strides, plan.tables, pieces if plan.num_slots else None, call.extra_args(), call.drop())
    size_args = call.size_args(plan.max_items, plan.num_slots, plan.num_long)
    launch(kernel, plan.max_items * call.sizes.batch * num_heads, (*args, size_args, shape), tuning.options)
