# SPDX-License-Identifier: Apache-2.0
"""TRL's trainer for Direct Preference Optimization with TwinOptimizer: use `TwinDPOTrainer` instead of `DPOTrainer`.

With `precompute_ref_log_probs=True` TRL computes the log probabilities of the untuned model in its constructor. Two
parts of this are replaced here:

- TRL hashes all weights, to name a cache file. This would read a model that was loaded with `twinflow.from_pretrained`
  into memory, before the optimizer has taken its weights. Here nothing is hashed, and the log probabilities become
  columns of the data.
- The cache file is in a folder of rank 0, which other ranks do not find if the data is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from twinflow.integrations import need
from twinflow.integrations.huggingface import TwinMixin

_PACKAGES = "trl datasets"
trl = need("trl", _PACKAGES, "twinflow.integrations.dpo")
datasets = need("datasets", _PACKAGES, "twinflow.integrations.dpo")
dpo_trainer = need("trl.trainer.dpo_trainer", _PACKAGES, "twinflow.integrations.dpo")


class TwinDPOTrainer(TwinMixin, trl.DPOTrainer):  # type: ignore[name-defined,misc]
    """trl.DPOTrainer with a TwinOptimizer. `twin`: the options of the TwinOptimizer.

    With `precompute_ref_log_probs=True`, the constructor builds the TwinOptimizer, because the log probabilities of the
    untuned model need its weights on the device. They are computed again in every process that builds a trainer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _without_hashes():
            super().__init__(*args, **kwargs)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """The data with the log probabilities of the reference as two columns. Each rank computes a part of them."""
        if isinstance(dataset, datasets.IterableDataset):
            return super()._precompute_ref_logps(dataset, name, batch_size)  # raises an error that says what to do
        if self.twin is None:
            self.create_optimizer()
        loader = DataLoader(
            dataset,
            batch_size=batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        chosen, rejected = [], []
        for batch in self.accelerator.prepare(loader):
            found = self.compute_ref_log_probs(self.ref_model or self.model, batch)
            first, second = self.accelerator.gather_for_metrics(found)
            chosen.append(first.cpu())
            rejected.append(second.cpu())
        columns = {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        for column, parts in columns.items():
            dataset = dataset.add_column(column, torch.cat(parts).float().tolist())
        return dataset


@contextmanager
def _without_hashes() -> Iterator[None]:
    """Within this context, a trainer of TRL does not hash the weights of its model."""
    own = dpo_trainer.hash_module

    def hash_module(module: object) -> str:
        return ""  # the name of a cache file, which is not used

    dpo_trainer.hash_module = hash_module
    try:
        yield
    finally:
        dpo_trainer.hash_module = own
