"""Parameters that change behind the runtime's back: written to, given other memory, frozen or moved away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor, nn

from twinflow.offload.bucket import Bucket, Options, Param, Updater
from twinflow.offload.plan import HOST
from twinflow.offload.weight_guard import plain


def check_flags(frozen: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that were frozen at the start and now require a gradient: they have no state."""
    for name, tensor in frozen.items():
        if tensor.requires_grad:
            raise RuntimeError(
                f"{name} now requires a gradient, but it was frozen when the optimizer was built and has no state. "
                f"Build a "
                "new optimizer after unfreezing, or freeze parameters only after building it"
            )


def check_memory(params: Iterable[Param]) -> None:
    """Refuse two parameters on one memory: each would have a master of its own."""
    with plain():
        spans = sorted((p.local.data_ptr(), p.local.numel() * p.local.element_size(), p.name) for p in params)
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
        for bucket in (bucket for bucket in buckets if not bucket.is_parked):
            pairs = zip(bucket.params, bucket.addresses, strict=True)
            found.update(dict.fromkeys(param for param, address in pairs if param.local.data_ptr() != address))
    return list(found)


def find_moved(params: Sequence[Param], buckets: Iterable[Bucket]) -> list[Param]:
    """Parameters that somebody gave other memory; their buckets follow.

    In another dtype, or on another device, they are no longer what the buckets were planned for.
    """
    buckets = [bucket for bucket in buckets if not bucket.is_parked]
    found = moved(buckets)
    if not found:
        return []
    check_memory(param for param in params if not any(bucket.is_parked for bucket in param.buckets))
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
    if has_moved or written(params):
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

    `given` has the values of parked parameters, which have none themselves; those without are left alone.
    """
    for param in params:
        if param.tensor not in given and any(bucket.is_parked for bucket in param.buckets):
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
    assert not bucket.added and not bucket.parts
    old, plan = bucket.updater, replace(bucket.plan, place=place)
    try:
        store = updater.new_store(plan)
    except RuntimeError as error:  # torch's way to say that memory is full
        raise MemoryError(str(error)) from error
    moved = replace(bucket, plan=plan, updater=updater, store=store, steps=list(bucket.steps))
    if old.is_all_in_store:
        _copy_store(bucket, moved)
    else:
        _copy_numbers(bucket, moved, options)
    old.forget(bucket)
    bucket.plan, bucket.updater, bucket.store, bucket.total = plan, updater, store, None
    for param in bucket.members:  # where it is part of the state, it was written to
        param.note_write()


def _copy_store(old: Bucket, new: Bucket) -> None:
    """Buffer by buffer; where the parameters were part of the state and are no more, from them."""
    pairs = zip((*old.store.states, *old.store.scales), (*new.store.states, *new.store.scales), strict=True)
    for source, into in pairs:
        if source is not None and into is not None:
            into.copy_(source)
    for source, into in ((old.store.master, new.store.master), (old.store.weight, new.store.weight)):
        if into is not None and not into.is_meta:
            if source is not None and not source.is_meta:
                into.copy_(source)
            else:
                for piece, target in zip(old.slices, old.targets, strict=True):
                    into[piece.offset : piece.offset + piece.numel] = target.reshape(-1)


def _copy_numbers(old: Bucket, new: Bucket, options: Sequence[Options]) -> None:
    """Slice by slice, as for a checkpoint."""
    values = [old.updater.read(old, i) for i in range(len(old.slices))]
    for i, value in enumerate(values):  # an optimizer of the user's may look at the weights when it starts
        new.updater.write_master(new, i, value["master"], keep=False)
    if new.slices:
        new.updater.start(new, options)
    for i, value in enumerate(values):
        new.updater.write(new, i, value)
