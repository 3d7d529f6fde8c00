# SPDX-License-Identifier: Apache-2.0
"""Updates of matrices by Muon, on the device.

A bucket holds whole matrices that are copied and updated together. A store has the buffers of one bucket's optimizer
state: the momentum, and the master weights as in device_updater.py. The state is on the device, or it is on the host
and is copied to the device for each update and back (streamed.py). An update always runs on the device, because on a
CPU the Newton-Schulz iteration would take minutes a step.

An update has three parts, all on one stream. First, torch operations compute the new momentum, and from it the
direction of each matrix in fp32. Second, the directions of each unit (plan.py) are orthogonalised as a batch. Third,
the kernel of SGD subtracts the results from the master weights and writes the weights. The first and the third part
read the clipping decision from the memory of the device. In a step that is skipped both write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from twinflow import native
from twinflow.offload.bucket import Bucket
from twinflow.offload.device_updater import DeviceUpdater
from twinflow.offload.job import Task
from twinflow.offload.sharing import MatrixExchange
from twinflow.rules import Rule
from twinflow.rules.formats import BLOCK, Key, encode_e4m3, rounding_key
from twinflow.rules.muon import MUON, MUON_WEIGHTS, scale
from twinflow.rules.newton_schulz import momentum_step, orthogonalise, products_dtype
from twinflow.rules.rule import Options, number
from twinflow.rules.segment import Store, decode_state

BATCH_NUMEL = 1 << 24  # elements of a batch at most, if it has several matrices; larger matrices fill a GPU alone
_CHUNK = 1 << 22  # elements that are encoded at once; it limits the memory of temporary tensors


class Units:
    """Assigns matrices to units (plan.py): matrices of one shape, or of the transposed one, in the same block."""

    def __init__(self) -> None:
        self._open: dict[object, tuple[int, int]] = {}  # by kind: the number of the unit that is not full, its size
        self._num_units = 0

    def of(self, shape: torch.Size, *kind: object) -> int:
        """The unit of the next matrix. Matrices of one unit have equal properties `kind`."""
        key = (tuple(sorted(shape)) if len(shape) == 2 else object(), *kind)
        number, size = self._open.get(key, (-1, 0))
        if number < 0 or size >= batch_size(shape):
            number, size = self._num_units, 0
            self._num_units += 1
        self._open[key] = number, size + 1
        return number


def batch_size(shape: torch.Size) -> int:
    """The number of matrices of this shape in a full batch."""
    return max(1, BATCH_NUMEL // max(1, shape[-2] * shape[-1]))


class MuonUpdater(DeviceUpdater):
    """The `Updater` (bucket.py) of matrices: `DeviceUpdater` with another update."""

    def __init__(
        self,
        rule: Rule,
        format: str,
        device: torch.device,
        max_programs: int | None = None,
        exchange: MatrixExchange | None = None,
    ) -> None:
        """`exchange`: needed if each rank has only some rows of a matrix."""
        super().__init__(rule, format, device, max_programs=max_programs)
        self._exchange = exchange
        # It has no state: it makes a step of SGD without momentum on the masters of the stores that it is given.
        self._weights_updater = DeviceUpdater(MUON_WEIGHTS, "fp32", device, False, max_programs=max_programs)

    def update_of(self, store: Store, task: Task, factor: float, decision: Tensor | None) -> Callable[[], None]:
        grads, bucket, present = task.grads, task.bucket, list(task.present)
        assert grads is not None
        groups = task.job.options
        keys = {i: rounding_key(bucket.steps[i] + 1, bucket.params[i].index) for i in present}
        write = self._weights_updater.writer(_stateless(store), task, 1.0, grads.device)
        turn = self._exchange.take_turn() if self._exchange is not None else 0

        def update() -> None:
            if grads.device.type == "cpu" and torch.get_num_threads() != native.get_threads():
                torch.set_num_threads(native.get_threads())  # the setting applies to this thread only
            directions = torch.empty(bucket.plan.numel, dtype=torch.float32, device=grads.device)
            self._make_directions(bucket, store, grads, directions, factor, decision, groups, keys)
            rows = [_direction(bucket, i, directions) for i in present]
            shapes = [bucket.params[i].tensor.shape for i in present]

            def work(whole: Mapping[int, Tensor]) -> None:
                for unit in units_of(bucket, present, whole):
                    options = groups[bucket.params[present[unit[0]]].group]
                    orthogonalise_unit([whole[k] for k in unit], options)

            if self._exchange is not None:
                self._exchange.orthogonalise(turn, rows, shapes, work)
            else:
                work(dict(enumerate(rows)))
            for i, own, shape in zip(present, rows, shapes, strict=True):
                own *= scale(str(groups[bucket.params[i].group]["adjust_lr_fn"]), *shape[-2:])
            write(directions, _without_factor(decision))

        return update

    def forget(self, bucket: Bucket) -> None:
        super().forget(bucket)
        self._weights_updater.forget(bucket)

    def _make_directions(
        self,
        bucket: Bucket,
        store: Store,
        grads: Tensor,
        directions: Tensor,
        factor: float,
        decision: Tensor | None,
        groups: Sequence[Options],
        keys: Mapping[int, Key],
    ) -> None:
        """Updates the momentum of each matrix, and writes its direction to `directions`."""
        for i in keys:
            piece, options = bucket.slices[i], groups[bucket.params[i].group]
            grad = directions.narrow(0, piece.offset, piece.numel)
            grad.copy_(grads.narrow(0, piece.offset, piece.numel))
            grad *= factor
            if decision is not None:
                grad *= decision[1].float()
            own = self._slice_of(store, bucket, i)
            old = decode_state(own, 0)
            assert old is not None
            _put_momentum(own, momentum_step(old, grad, options), piece.start, keys[i], decision)


def _put_momentum(store: Store, values: Tensor, first_index: int, key: Key, decision: Tensor | None) -> None:
    """Writes the momentum of a matrix. In a step that is skipped its codes and scales stay the same, bit for bit."""
    state, scale = store.states[0], store.scales[0]
    assert state is not None
    if scale is None:
        return _keep_or_copy(state, values.to(state.dtype), decision)
    for at in range(0, values.numel(), _CHUNK):
        part = values[at : at + _CHUNK]
        codes, scales = encode_e4m3(part, first_index + at, key)
        _keep_or_copy(state[at : at + _CHUNK], codes, decision)
        _keep_or_copy(scale.narrow(0, at // BLOCK, scales.numel()), scales, decision)


def _keep_or_copy(old: Tensor, new: Tensor, decision: Tensor | None) -> None:
    old.copy_(new if decision is None else torch.where(decision[2] != 0, old, new))


def update_flops(bucket: Bucket) -> float:
    """FLOPs of the Newton-Schulz iterations of an update of a bucket. 0 for a bucket without matrices."""
    num_steps, total = number(MUON.defaults, "ns_steps"), 0.0  # the default is enough to estimate times
    for param in bucket.params if bucket.plan.is_matrix else ():
        num_rows, num_columns = sorted(param.shape[-2:])
        total += num_steps * (4.0 * num_rows + 2.0 * num_rows**2 / num_columns) * param.shape.numel()
    return total


def units_of(bucket: Bucket, present: Sequence[int], own: Iterable[int]) -> list[list[int]]:
    """The matrices of each unit, by their positions in `present`. `own`: the positions of matrices that are here."""

    def unit_of(k: int) -> int:
        unit = bucket.params[present[k]].unit
        assert unit is not None
        return unit

    return [list(found) for _, found in groupby(sorted(own, key=unit_of), key=unit_of)]


def orthogonalise_unit(parameters: Sequence[Tensor], options: Options) -> None:
    """Orthogonalises the directions of parameters, in place, in batches whose sizes depend on the shapes alone. A
    parameter with three dimensions is a stack of matrices.
    """
    matrices = [matrix for one in parameters for matrix in (one.unbind() if one.dim() == 3 else [one])]
    num_each = batch_size(matrices[0].shape)
    for start in range(0, len(matrices), num_each):
        batch = matrices[start : start + num_each]
        orthogonalise(batch, options, products_dtype(batch[0].device))


def _direction(bucket: Bucket, index: int, directions: Tensor) -> Tensor:
    piece = bucket.slices[index]
    return directions.narrow(0, piece.offset, piece.numel).view(bucket.params[index].shape)


def _stateless(store: Store) -> Store:
    """The master and the weights of a store, without the momentum. Their representation does not depend on a format."""
    return Store("fp32", store.master, store.weight)


def _without_factor(decision: Tensor | None) -> Tensor | None:
    """A clipping decision that skips the same steps, with the factor 1, because the directions contain the factor."""
    if decision is None:
        return None
    norm, _, skip = decision.unbind()
    return torch.stack([norm, torch.ones_like(norm), skip])
