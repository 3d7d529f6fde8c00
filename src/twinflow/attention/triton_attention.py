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
from twinflow.attention.direct_launch import Slot
from twinflow.attention.extras import Extras, check_call
from twinflow.attention.launch import (
    SCRATCH_SLOTS,
    Call,
    Launch,
    Reduction,
    is_interpreting,
    on_device,
    other_box,
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

TUNED = {"forward": "forward", "query_gradients": "queries", "key_gradients": "keys"}  # by kernel: field of Tunings

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
    # Hooks for saved tensors may return them with other strides.
    grad, out, lse = with_dense_rows(grad), with_dense_rows(out), lse.contiguous()
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
        _form(extras.documents),
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
    names = ("key_padding", "documents", "mask", "bias", "relative")
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
    _run("forward", {"q": q, "k": k, "v": v, "out": out, "lse": lse}, call, extras, None)
    return out, lse


def query_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, call: Call, extras: Extras | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of q, and delta, the sum of out * grad of each query."""
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad": grad, "delta": delta, "dq": dq}
    _run("query_gradients", tensors, call, extras, (_form(out), _form(lse), _form(grad)))
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
    _run("key_gradients", tensors, call, extras, (_form(lse), _form(grad)))
    if not is_whole:
        grouped = (sizes.batch, sizes.num_kv_heads, sizes.group, sizes.num_keys, sizes.head_dim)
        dk, dv = (tensor.view(grouped).sum(2).to(k.dtype) for tensor in (dk, dv))
    return dk, dv


def _run(name: str, tensors: dict[str, Tensor], call: Call, extras: Extras | None, more: Hashable) -> None:
    """Run a kernel. `more`: the forms of tensors on which the key of the call does not depend."""
    kernel: Kernel | None = call.kernels.get((name, more))
    if kernel is None:
        kernel = call.kernels[name, more] = Kernel(name, tensors, call)
    kernel(tensors, call.extras if extras is None else extras)


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
        if plan is not None:
            self._launch: Launch | hopper.HopperLaunch = hopper.HopperLaunch(name, tensors, call, plan)
        else:
            self._launch, plan = _triton_launch(name, tensors, call, num_heads)
        self._plan: TilePlan = plan
        self._flags = {"has_second": by_keys, "has_weights": name == "forward"}
        self._no_scratch = scratch_for(call, plan, **self._flags) if plan.num_slots == 0 else None
        self._reduction: Reduction | None = None
        if plan.num_slots:
            reduce = kernels.reduce_outputs if name == "forward" else kernels.reduce_gradients
            self._reduction = Reduction(reduce, num_heads, call, plan, *_reduced(name, tensors, call))

    def __call__(self, tensors: dict[str, Tensor], extras: Extras) -> None:
        scratch = self._no_scratch or scratch_for(self._call, self._plan, **self._flags)
        given: dict[str, Tensor | int] = {**tensors, **scratch, **self._call.given(extras)}
        self._launch(given, self._call.device)
        if self._reduction is not None:
            self._reduction(given)


def _reduced(name: str, tensors: Mapping[str, Tensor], call: Call) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """Arguments of the launch that combines pieces: the results with their strides, and the rows of a gradient."""
    if name == "forward":
        return (Slot("out"), Slot("lse"), strides_of(out=tensors["out"])), ()
    if name == "query_gradients":
        return (Slot("dq"), None, (strides_of_rows(tensors["dq"]), None)), (call.sizes.num_queries, call.extras.q_start)
    strides = (strides_of_rows(tensors["dk"]), strides_of_rows(tensors["dv"]))
    return (Slot("dk"), Slot("dv"), strides), (call.sizes.num_keys, 0)


def _triton_launch(name: str, tensors: Mapping[str, Tensor], call: Call, num_heads: int) -> tuple[Launch, TilePlan]:
    """The launch of a kernel of kernels.py, and its plan."""
    from twinflow.attention import kernels

    others = hopper.TENSORS[name][1]
    tuning = getattr(call.tunings, TUNED[name])
    tuning, plan, shape = call.prepare(tuning, [tensors[other] for other in others], name == "key_gradients")
    args = (
        *(other_box(key, tensor, shape) if key in others else Slot(key) for key, tensor in tensors.items()),
        strides_of(**{key: tensor for key, tensor in tensors.items() if tensor.dim() == 4}),
        plan.tables,
        SCRATCH_SLOTS if plan.num_slots else None,
        call.extra_args,
        call.drop_args,
        call.size_args(plan.max_items, plan.num_slots, plan.num_long),
        shape,
    )
    return Launch(getattr(kernels, name), plan.max_items * call.sizes.batch * num_heads, tuning.options, args), plan
