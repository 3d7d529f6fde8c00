# SPDX-License-Identifier: Apache-2.0
"""A data loader whose position can be saved. After loading, it continues with the next batch of the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from twinflow.engine.values import UserValue
from twinflow.errors import invalid_value


class ResumableLoader:
    """Batches of a dataset. The order of an epoch depends only on `seed` and the number of the epoch.

    `share` = (rank, world): All ranks have the same order of samples. A rank reads every `world`-th sample, starting
    with sample `rank`. If `world` does not divide the number of samples, samples from the start are repeated, or with
    `drop_last` the last samples are dropped. An IterableDataset is not divided over ranks: each rank reads all samples.
    `split` returns this rank's part of a batch that several ranks share.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        batch_size: int,
        collate_fn: Callable[..., object] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        seed: int | None = None,
        pin_memory: bool = False,
        shuffle: bool = True,
        share: tuple[int, int] = (0, 1),
        split: Callable[[UserValue], UserValue] | None = None,
    ) -> None:
        if batch_size < 1:
            raise invalid_value("batch_size", batch_size, "a whole number >= 1")
        if not isinstance(dataset, IterableDataset) and not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            remedy = "Pass a torch.utils.data.Dataset, an IterableDataset or a list of samples."
            kind = type(dataset).__name__
            raise ValueError(f"The dataset is of type {kind}, but must have __getitem__ and __len__. {remedy}")
        if collate_fn is not None and not callable(collate_fn):
            raise invalid_value("collate_fn", collate_fn, "a function of a list of samples, or None")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = torch.initial_seed() % (1 << 63) if seed is None else seed
        self.epoch = 0
        self.position = 0  # number of batches of this epoch that were handed out
        self._collate_fn = collate_fn
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._drop_last = drop_last
        self._shuffle = shuffle
        self._rank, self._world = share
        self._split = split

    def __len__(self) -> int:
        """Number of batches in an epoch on this rank."""
        num_samples = self._num_samples()
        return num_samples // self.batch_size if self._drop_last else -(-num_samples // self.batch_size)

    def __iter__(self) -> Iterator[UserValue]:
        """The rest of this epoch. After its last batch, the next call starts the next epoch."""
        for batch in self._rest():
            self.position += 1  # before `yield`, because a checkpoint that is saved then must count this batch
            yield batch if self._split is None else self._split(batch)
        self.epoch, self.position = self.epoch + 1, 0

    def _num_samples(self) -> int:
        """Number of samples in an epoch on each rank."""
        total = len(self.dataset)  # type: ignore[arg-type]
        return total // self._world if self._drop_last else -(-total // self._world)

    def _rest(self) -> Iterable[object]:
        """The batches of this epoch from the position on."""
        seed = self.seed + self.epoch
        load = partial(
            DataLoader,
            self.dataset,
            generator=torch.Generator().manual_seed(seed),  # seeds the workers, also after resuming
            collate_fn=self._collate_fn,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
        )
        if isinstance(self.dataset, IterableDataset):  # it has no index: batches before the position are read
            return islice(load(batch_size=self.batch_size, drop_last=self._drop_last), self.position, None)
        total = len(self.dataset)  # type: ignore[arg-type]
        order: Sequence[int] = range(total)
        if self._shuffle:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
        if self._world > 1:
            order = [order[(self._rank + i * self._world) % total] for i in range(self._num_samples())]
        batches = BatchSampler(order, self.batch_size, self._drop_last)
        return load(batch_sampler=islice(batches, self.position, None))

    def state_dict(self) -> dict[str, int]:
        """The position: seed, epoch and number of batches, with the batch size and the number of ranks."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "batch_size": self.batch_size,
            "world": self._world,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues from a saved position, also with another number of ranks. Iterators in use are not affected.

        Raises ValueError if only the batch size has changed, or if the position is not a whole number of batches now.
        """
        _check_position(state)
        if state["batch_size"] != self.batch_size and state.get("world", 1) == self._world:
            raise ValueError(
                f"The position in the data was saved with the batch size {state['batch_size']}, but the batch size is "
                f"now {self.batch_size}. Set train_micro_batch_size_per_gpu to {state['batch_size']}."
            )
        num_seen, each = state["position"] * state["batch_size"] * state.get("world", 1), self.batch_size * self._world
        if num_seen % each:
            raise ValueError(
                f"The checkpoint was saved after {num_seen} samples of an epoch, but this number must be a multiple of "
                f"{each} (train_micro_batch_size_per_gpu x ranks). Choose train_micro_batch_size_per_gpu or the number "
                f"of ranks so that their product divides {num_seen}."
            )
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], num_seen // each


def _check_position(state: Mapping[str, object]) -> None:
    """Raises ValueError if `state` is not one that `state_dict` has returned."""
    names = {"batch_size": 1, "position": 0, "seed": -(1 << 63), "epoch": 0, "world": 1}
    if not isinstance(state, Mapping):
        raise ValueError(f"The state of a loader is of type {type(state).__name__}, but must be a dict.")
    for name, least in names.items():
        value = state.get(name, 1 if name == "world" else None)
        if type(value) is not int or not least <= value < 1 << 63:
            raise invalid_value(f"{name} in the state of a loader", value, f"a whole number >= {least}")
