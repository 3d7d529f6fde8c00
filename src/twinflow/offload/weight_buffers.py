# SPDX-License-Identifier: Apache-2.0
"""The device buffers of offloaded weights, each with the place of the same weights on the host (`offload_param`).

A block has one buffer for each of its buckets, and others for its frozen weights: one for each dtype, or more if they
are on a disk, where the size of a record is limited. A parameter of an embedding or output layer may be divided over
several buckets. The buffers of these buckets are then parts of one storage, in which the parameter is contiguous.

Trainable weights are part of the optimizer state on the host. Frozen weights have page-locked buffers of their own, or
records of a file (weight_source.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from twinflow.device import Device
from twinflow.offload.bucket import Bucket
from twinflow.offload.disk_updater import DiskUpdater, weights_of
from twinflow.offload.plan import padded
from twinflow.offload.state_file import StateFile
from twinflow.offload.weight_source import InMemory, OnDisk, WeightSource, frozen_groups


@dataclass(eq=False)
class WeightBuffer:
    """Weights of one block that are copied together."""

    block: int
    host: WeightSource  # all of the weights, or this rank's part
    flat: Tensor  # the device buffer; its storage is empty while the block does not run
    bucket: Bucket | None  # the bucket whose state contains the weights; None for frozen weights
    storage_bytes: int  # bytes of the storage, while it has memory
    # The parameters that begin here, and their views in the storage of `flat`.
    views: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether this process has all of the weights, and not only a part of them."""
        return self.host.numel == self.flat.numel()

    @property
    def is_on_disk(self) -> bool:
        return self.host.record >= 0

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that have elements here, also those that begin in another buffer."""
        return [param.tensor for param in self.bucket.members] if self.bucket else [param for param, _ in self.views]

    def add(self, param: nn.Parameter, offset: int) -> None:
        """Adds a parameter that begins at an offset of the storage."""
        contiguous = torch.empty(param.shape, device="meta").stride()
        self.views.append((param, self.flat.as_strided(param.shape, contiguous, offset)))

    def start_of(self, view: Tensor) -> int:
        """The element of this buffer at which a view in its storage begins."""
        return int(view.storage_offset() - self.flat.storage_offset())

    def resize(self, num_bytes: int) -> None:
        """Resizes the storage. Buffers may have one storage together, and `resize_` copies what is there."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() != num_bytes:
            storage.resize_(num_bytes)

    def free_host(self, device: Device) -> None:
        """Frees the host memory of frozen weights. They cannot be fetched after that."""
        if not self.is_on_disk:
            device.release(self.host.read(0, self.host.numel))
        self.host = InMemory(_no_host)


def _no_host() -> Tensor:
    raise AssertionError("the weights were released")


def host_of(bucket: Bucket) -> WeightSource:
    """The weights of a bucket that blocks fetch: in its store, or on a disk."""
    there = bucket.updater.weights_on_disk(bucket) if isinstance(bucket.updater, DiskUpdater) else None
    return there if there is not None else InMemory(lambda: weights_of(bucket.store))


class BufferMaker:
    """Makes buffers with device memory. The caller releases this memory before it asks for the next ones, because all
    buffers together may not fit.
    """

    def __init__(
        self,
        device: Device,
        where: torch.device,
        world: int,
        rank: int,
        file: StateFile | None,
        max_frozen_bytes: int | None,
    ) -> None:
        """`file`: for frozen weights, with records of `max_frozen_bytes`; None: they are in memory."""
        self._device = device
        self._where = where
        self._world = world
        self._rank = rank
        self._file = file
        self._max_frozen_bytes = max_frozen_bytes if file is not None else None
        self._num_records = 0  # of frozen weights

    def of_buckets(self, buckets: Sequence[Bucket]) -> Iterator[WeightBuffer]:
        """The buffers of a block's buckets, in this order."""
        chain: list[Bucket] = []
        for bucket in buckets:
            if chain and chain[-1].gathered.slices[-1].param != bucket.gathered.slices[0].param:
                yield from self._chained(chain)
                chain = []
            chain.append(bucket)
        yield from self._chained(chain)

    def _chained(self, buckets: Sequence[Bucket]) -> list[WeightBuffer]:
        """Buffers in one storage, of buckets whose last parameter continues in the next bucket.

        The padding at the end of a buffer is the beginning of the next one, which is copied later.
        """
        starts = [0]
        for bucket in buckets:
            last = bucket.gathered.slices[-1]
            starts.append(starts[-1] + last.offset + last.numel)
        numel = max(start + bucket.gathered.numel for start, bucket in zip(starts, buckets, strict=False))
        storage = torch.empty(numel, dtype=buckets[0].plan.dtype, device=self._where)
        buffers: list[WeightBuffer] = []
        for start, bucket in zip(starts, buckets, strict=False):
            flat = storage[start : start + bucket.gathered.numel]
            buffer = _new_buffer(bucket.plan.block, host_of(bucket), flat, bucket)
            tensors = {param.index: param.tensor for param in bucket.members}
            for piece in bucket.gathered.slices:
                if piece.start == 0:
                    buffer.add(tensors[piece.param], start + piece.offset)
            buffers.append(buffer)
        return buffers

    def of_frozen(
        self, block: int, params: Sequence[nn.Parameter], values: Mapping[nn.Parameter, Tensor]
    ) -> Iterator[WeightBuffer]:
        """Buffers of a block's frozen weights. Their values are copied to the host, or into the file."""
        for group in frozen_groups(params, self._max_frozen_bytes):
            yield self._frozen(block, group, values)

    def _frozen(
        self, block: int, params: Sequence[nn.Parameter], values: Mapping[nn.Parameter, Tensor]
    ) -> WeightBuffer:
        dtype, starts, used = params[0].dtype, [], 0
        for param in params:
            starts.append(used)
            used += padded(param.numel())
        size = -(-used // self._world)
        whole = torch.zeros(size * self._world, dtype=dtype)
        for param, start in zip(params, starts, strict=True):
            whole[start : start + param.numel()] = values[param].reshape(-1)
        host = self._new_host(size, dtype)
        with host.hold(is_changed=True) as part:
            part.copy_(whole[self._rank * size : (self._rank + 1) * size])
        flat = torch.empty(size * self._world, dtype=dtype, device=self._where)
        buffer = _new_buffer(block, host, flat, None)
        for param, start in zip(params, starts, strict=True):
            buffer.add(param, start)
        return buffer

    def _new_host(self, numel: int, dtype: torch.dtype) -> WeightSource:
        if self._file is None:
            memory = self._device.pinned(numel, dtype)
            return InMemory(lambda: memory)
        self._num_records += 1
        self._file.add(-self._num_records, numel * dtype.itemsize)
        return OnDisk(self._file, -self._num_records, numel, dtype)


def _new_buffer(block: int, host: WeightSource, flat: Tensor, bucket: Bucket | None) -> WeightBuffer:
    return WeightBuffer(block, host, flat, bucket, flat.untyped_storage().nbytes())
