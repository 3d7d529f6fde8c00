# SPDX-License-Identifier: Apache-2.0
"""Detects changes of parameters by the user (values, memory, dtype, device, requires_grad) and adapts the state.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. The place of a
bucket's state is the host, the device ("resident"), or the host with updates on the device ("streamed"). Master weights
are the fp32 copies of the parameters, to which updates are applied.

The thread that calls the runtime runs these functions, at the start of a step or between steps. They read and write
the state only while no update is under way. `find_changed` calls its argument `wait` to wait for all updates. The
callers of `adopt` and `move` wait before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from torch import Tensor, nn

from twinflow.errors import incompatible, wrong_state
from twinflow.offload.bucket import Bucket, Param, Updater
from twinflow.offload.plan import HOST, BucketPlan
from twinflow.offload.weight_guard import plain
from twinflow.rules.rule import Options
from twinflow.rules.segment import Store
from twinflow.state_dict import tensor_of


def check_flags(frozen: Mapping[str, nn.Parameter]) -> None:
    """Raise RuntimeError if a parameter that was frozen when the optimizer was built now requires a gradient."""
    for name, tensor in frozen.items():
        if tensor.requires_grad:
            raise wrong_state(
                f"{name} now requires a gradient but cannot be trained",
                "it was frozen when the optimizer was built and has no state",
                "Unfreeze the parameter before you build the optimizer. You may freeze it again afterwards.",
            )


def check_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if parameters share memory or one is an expanded tensor, as each element has a master weight."""
    spans: list[tuple[int, int, str]] = []
    with plain():
        for name, t in named:
            if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
                raise ValueError(
                    f"{name} has the strides {t.stride()}, but all strides must be greater than 0, because elements of "
                    "an expanded tensor share memory and cannot be trained one by one. Make the parameter from "
                    "expanded.clone(memory_format=torch.contiguous_format)."
                )
            if not t.is_meta and t.data_ptr():  # weights of zero.Init have no memory here
                spans.append((t.data_ptr(), t.numel() * t.element_size(), name))
    spans.sort()
    for (start, nbytes, name), (other_start, other_bytes, other) in pairwise(spans):
        if nbytes and other_bytes and start + nbytes > other_start:
            raise incompatible(
                f"The parameter {name}",
                f"the parameter {other}",
                "two parameters that share memory would have two different master weights and optimizer states",
                "Use one nn.Parameter in both places.",
            )


def moved(buckets: Iterable[Bucket]) -> list[Param]:
    """Return parameters whose address or shape was changed, as by `p.data = x`, which does not change `p._version`."""
    found: dict[Param, None] = {}
    with plain():
        for bucket in (bucket for bucket in buckets if not bucket.offloads_params):
            for param, address in zip(bucket.params, bucket.addresses, strict=True):
                local = param.local if param.is_sharded else param.tensor
                if local.data_ptr() != address or local.shape != param.shape:
                    found[param] = None
    return list(found)


def resized(param: Param, now: Tensor) -> RuntimeError:
    """Return the error for a parameter that has the shape of `now`, and not that of its state."""
    return wrong_state(
        f"{param.name} cannot be updated",
        f"its shape was changed from {tuple(param.shape)} to {tuple(now.shape)} after the optimizer was built",
        "Build a new optimizer for the changed model.",
    )


def find_moved(params: Sequence[Param], buckets: Iterable[Bucket]) -> list[Param]:
    """Return the parameters whose memory is at another address, and make their buckets refer to the new memory.

    Raises RuntimeError if shape, dtype, device or memory format no longer fit the plan of the buckets, and ValueError
    if parameters now share memory.
    """
    buckets = [bucket for bucket in buckets if not bucket.offloads_params]
    found = moved(buckets)
    if not found:
        return []
    here = [param for param in params if not any(bucket.offloads_params for bucket in param.buckets)]
    check_memory((param.name, param.local) for param in here)
    for bucket in buckets:
        for before, param, piece in zip(bucket.targets, bucket.params, bucket.slices, strict=True):
            if param not in found:
                continue
            now = param.local
            if now.shape != param.shape:
                raise resized(param, now)
            if (now.dtype, now.device) != (before.dtype, before.device):
                raise wrong_state(
                    f"{param.name} cannot be updated",
                    f"it was moved from {before.dtype} on {before.device} to {now.dtype} on {now.device}",
                    "Convert and move the model before building the optimizer",
                )
            needs_contiguous = piece.numel < now.numel() or (bucket.plan.place != HOST and bucket.plan.can_alias)
            if needs_contiguous and not now.is_contiguous():
                raise wrong_state(
                    f"{param.name} cannot be updated",
                    "it is no longer contiguous, but its optimizer state was laid out for a contiguous parameter",
                    "Change the memory format of the model before building the optimizer.",
                )
    for bucket in buckets:
        bucket.find_targets()
    return found


def written(params: Iterable[Param]) -> list[Param]:
    """Return the parameters that the user has written to since the optimizer's last write."""
    return [param for param in params if param.is_written]


def find_changed(params: Sequence[Param], buckets: Iterable[Bucket], wait: Callable[[], None]) -> list[Param]:
    """Return the parameters whose values or memory the user has changed. `wait` blocks until all updates have ended."""
    buckets = list(buckets)
    if not moved(buckets) and not written(params):
        return []
    # The runtime itself may have written: an update whose weights no forward has waited for yet. It must not write any
    # more when the buckets get other memory.
    wait()
    return list(dict.fromkeys([*find_moved(params, buckets), *written(params)]))


def check_changed(params: Sequence[Param], has_unsent: bool) -> None:
    """Raise RuntimeError if a delayed update would overwrite the values that the user has written to these parameters.

    `has_unsent`: the new weights of a delayed update are not yet in the parameters.
    """
    if has_unsent:
        raise wrong_state(
            f"The new values of {params[0].name} cannot be kept",
            f"{params[0].name} was written to, and a delayed update of this parameter would overwrite them",
            "Load the model before the optimizer's state, and call the optimizer's flush() before you change weights.",
        )


def adopt(params: Sequence[Param], keep: bool, given: Mapping[nn.Parameter, Tensor]) -> None:
    """Set the master weights from the values of the parameters.

    `keep`: a master weight that rounds to the value of its parameter is not changed. `given`: the values of offloaded
    parameters, because such a parameter has no values on the device. The master weights of an offloaded parameter that
    is not in `given` are not changed.
    """
    for param in params:
        if param.tensor not in given and any(bucket.offloads_params for bucket in param.buckets):
            continue
        with plain():
            values = given.get(param.tensor, param.local).detach().reshape(-1)
        for bucket, i in param.own_slices():
            piece = bucket.slices[i]
            bucket.updater.write_master(bucket, i, values[piece.start : piece.start + piece.numel], keep)
        param.note_write()


def move(bucket: Bucket, plan: BucketPlan, updater: Updater, options: Sequence[Options]) -> None:
    """Move a bucket's state to the place in `plan`. Raises MemoryError, and changes nothing, if that place is full."""
    assert not bucket.added
    old, before = bucket.updater, bucket.store
    try:
        store = updater.new_store(plan)
    except RuntimeError as error:  # torch reports full memory as a RuntimeError
        raise MemoryError(str(error)) from error
    if old.is_all_in_store and updater.is_all_in_store:
        _copy_store(bucket, before, store)
        _switch(bucket, plan, updater, store)
    else:
        values = [old.read(bucket, i) for i in range(len(bucket.slices))]
        _switch(bucket, plan, updater, store)
        _write(bucket, values, options)
    for param in bucket.members:  # if the parameter is part of the state, the move has written to it
        param.note_write()


def _switch(bucket: Bucket, plan: BucketPlan, updater: Updater, store: Store) -> None:
    bucket.updater.forget(bucket)
    bucket.move(plan, updater, store)


def _copy_store(bucket: Bucket, old: Store, new: Store) -> None:
    """Copy each buffer. A master or weight that `old` does not have is copied from the parameters."""
    pairs = zip((*old.states, *old.scales), (*new.states, *new.scales), strict=True)
    for source, into in pairs:
        if source is not None and into is not None:
            into.copy_(source)
    for source, into in ((old.master, new.master), (old.weight, new.weight)):
        if into is not None and not into.is_meta:
            if source is not None and not source.is_meta:
                into.copy_(source)
            else:
                for piece, target in zip(bucket.slices, bucket.targets, strict=True):
                    into[piece.offset : piece.offset + piece.numel] = target.reshape(-1)


def _write(bucket: Bucket, values: Sequence[Mapping[str, object]], options: Sequence[Options]) -> None:
    updater, steps = bucket.updater, list(bucket.steps)
    for i, value in enumerate(values):  # first, because a user's optimizer may read the weights in `start`
        updater.write_master(bucket, i, tensor_of(value, "master"), keep=False)
    if bucket.slices:
        updater.start(bucket, options)
    for i, value in enumerate(values):
        updater.write(bucket, i, value)
    bucket.steps[:] = steps
