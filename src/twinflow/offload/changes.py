"""Parameters that change behind the runtime's back: written to, given other memory, frozen or moved away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor, nn

from twinflow.offload.bucket import Bucket, Param, Updater
from twinflow.offload.plan import HOST, BucketPlan
from twinflow.offload.weight_guard import plain
from twinflow.rules.rule import Options
from twinflow.rules.segment import Store
from twinflow.state_dict import tensor_of


def check_flags(frozen: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that were frozen at the start and now require a gradient: they have no state."""
    for name, tensor in frozen.items():
        if tensor.requires_grad:
            raise RuntimeError(
                f"{name} now requires a gradient, but it was frozen when the optimizer was built and has no state. "
                f"Build a "
                "new optimizer after unfreezing, or freeze parameters only after building it"
            )


def check_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse two parameters on one memory: each would have a master of its own."""
    with plain():
        spans = sorted((t.data_ptr(), t.numel() * t.element_size(), name) for name, t in named if not t.is_meta)
    for (start, nbytes, name), (other_start, other_bytes, other) in pairwise(spans):
        if nbytes and other_bytes and start + nbytes > other_start:
            raise ValueError(
                f"{name} and {other} are two parameters on one memory, and each would have a master and state of its "
                f"own. "
                "Use one nn.Parameter in both places"
            )


def moved(buckets: Iterable[Bucket]) -> list[Param]:
    """Parameters that somebody gave other memory: `p.data = x` does not count as a write."""
    found: dict[Param, None] = {}
    with plain():
        for bucket in (bucket for bucket in buckets if not bucket.offloads_params):
            for param, address in zip(bucket.params, bucket.addresses, strict=True):
                local = param.local if param.is_sharded else param.tensor
                if local.data_ptr() != address:
                    found[param] = None
    return list(found)


def find_moved(params: Sequence[Param], buckets: Iterable[Bucket]) -> list[Param]:
    """Parameters that somebody gave other memory; their buckets follow.

    In another dtype, or on another device, they are no longer what the buckets were planned for.
    """
    buckets = [bucket for bucket in buckets if not bucket.offloads_params]
    found = moved(buckets)
    if not found:
        return []
    here = [param for param in params if not any(bucket.offloads_params for bucket in param.buckets)]
    check_memory((param.name, param.local) for param in here)
    for bucket in buckets:
        for i, param in enumerate(bucket.params):
            before, now = bucket.targets[i], param.local
            if param in found and (now.dtype, now.device) != (before.dtype, before.device):
                raise RuntimeError(
                    f"{param.name} was moved from {before.dtype} on {before.device} to {now.dtype} on {now.device}. "
                    "Convert and move the model before building the optimizer"
                )
        bucket.find_targets()
        if bucket.plan.place != HOST and bucket.plan.can_alias and any(t.dim() != 1 for t in bucket.targets):
            raise RuntimeError(
                f"{found[0].name} is no longer contiguous, but its state on the device lies beside it. Choose the "
                "memory format before building the optimizer"
            )
    return found


def written(params: Iterable[Param]) -> list[Param]:
    """Parameters that were written to since our last write."""
    return [param for param in params if param.is_written]


def find_changed(params: Sequence[Param], buckets: Iterable[Bucket], wait: Callable[[], None]) -> list[Param]:
    """Parameters with other values, or other memory, than we left them with."""
    has_moved = find_moved(params, buckets)
    if not has_moved and not written(params):
        return []
    wait()  # it may have been us: weights that no forward has waited for
    return list(dict.fromkeys([*has_moved, *written(params)]))


def check_changed(params: Sequence[Param], has_unsent: bool) -> None:
    """Refuse to go on after somebody has written to weights that will be written over."""
    if has_unsent:
        raise RuntimeError(
            f"{params[0].name} was written to while a delayed update of it was still to come. Load the model before "
            "the optimizer's state, and change weights only before the first step"
        )


def adopt(params: Sequence[Param], keep: bool, given: Mapping[nn.Parameter, Tensor]) -> None:
    """Masters from the parameters' values; with `keep`, a master that rounds to its parameter stays as it is.

    `given` has the values of offloaded parameters, which have none themselves; those without are left alone.
    """
    for param in params:
        if param.tensor not in given and any(bucket.offloads_params for bucket in param.buckets):
            continue
        with plain():
            values = given.get(param.tensor, param.local).detach().reshape(-1)
        on_host = values if all(bucket.is_on_device for bucket in param.buckets) else values.cpu()
        for bucket in param.buckets:
            source = values if bucket.is_on_device else on_host
            for i, piece in enumerate(bucket.slices):
                if piece.param == param.index:
                    bucket.updater.write_master(bucket, i, source[piece.start : piece.start + piece.numel], keep)
        param.note_write()


def move(bucket: Bucket, place: str, updater: Updater, options: Sequence[Options]) -> None:
    """Take a bucket's state to another place; MemoryError where that is full, with nothing changed."""
    assert not bucket.added
    old, before, plan = bucket.updater, bucket.store, replace(bucket.plan, place=place)
    try:
        store = updater.new_store(plan)
    except RuntimeError as error:  # torch's way to say that memory is full
        raise MemoryError(str(error)) from error
    if old.is_all_in_store:
        _copy_store(bucket, before, store)
        _switch(bucket, plan, updater, store)
    else:
        values = [old.read(bucket, i) for i in range(len(bucket.slices))]
        _switch(bucket, plan, updater, store)
        _write(bucket, values, options)
    for param in bucket.members:  # where it is part of the state, it was written to
        param.note_write()


def _switch(bucket: Bucket, plan: BucketPlan, updater: Updater, store: Store) -> None:
    bucket.updater.forget(bucket)
    bucket.move(plan, updater, store)


def _copy_store(bucket: Bucket, old: Store, new: Store) -> None:
    """Buffer by buffer; where the parameters were part of the state and are no more, from them."""
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
    """Slice by slice, as for a checkpoint."""
    updater, steps = bucket.updater, list(bucket.steps)
    for i, value in enumerate(values):  # an optimizer of the user's may look at the weights when it starts
        updater.write_master(bucket, i, tensor_of(value, "master"), keep=False)
    if bucket.slices:
        updater.start(bucket, options)
    for i, value in enumerate(values):
        updater.write(bucket, i, value)
    bucket.steps[:] = steps
