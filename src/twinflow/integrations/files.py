# SPDX-License-Identifier: Apache-2.0
"""The state of a TwinOptimizer in a folder of another library's checkpoint. It is written one parameter at a time, and
not pickled.

Training loops save `optimizer.state_dict()` in one file. This needs a second copy of the whole state in memory if the
optimizer stores it in another format (split masters, or states in bf16 or int8). `StreamedState` has the methods that
loops call. It writes the state to a folder, and the file of the loop contains only a reference to the folder. If ranks
share the state, each of them writes its part to this folder, and any number of ranks can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from twinflow.checkpoint import open_checkpoint, save
from twinflow.checkpoint.load import Checkpoint
from twinflow.checkpoint.plain import JSON, put_together, take_apart
from twinflow.checkpoint.shards import join_marks, stored_name, to_mark
from twinflow.checkpoint.together import agree
from twinflow.engine.ranks import deal, ranks_of_team
from twinflow.engine.restore import FileSource, checking
from twinflow.engine.state import sharded_leaves, whole_shape
from twinflow.integrations.torch_state import load_torch_state
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel.shard import TensorShard, shard_of
from twinflow.state_dict import Entry, StateDict

KIND: Final = "twinflow.StreamedState"
TAG: Final = "twinflow"  # name of the folder


class StreamedState:
    """Replaces an optimizer while a checkpoint in `folder` is written or read. `number`: its number among the
    optimizers in this folder.
    """

    def __init__(self, optimizer: TwinOptimizer, folder: Path, number: int = 0) -> None:
        self._optimizer = optimizer
        self._folder = folder
        self._tag = f"{TAG}_{number}" if number else TAG
        self._ranks = ranks_of_team(optimizer.team)

    def write(self) -> dict[str, Any]:
        """Write the state to the folder and return a reference to it. All ranks must call this method.

        With these files and the weights of the model, training can resume exactly.
        """
        (files, head), said = agree(self._ranks, self._collect)
        state = {name: entry for one in reversed(said) for name, entry in one["state"].items()}
        meta = {"optimizer": head, "optimizer_state": state}
        if shards := join_marks([one["shards"] for one in said]):
            meta["shards"] = shards
        save(self._folder, self._tag, files, meta, save_latest=False, together=self._ranks)
        return self.state_dict()

    def _collect(self) -> tuple[tuple[dict[str, list[Entry]], JSON], dict[str, Any]]:
        """The tensors that this rank writes with the options of the optimizer, and the other values of its entries with
        the marks of those that have only the experts of this rank.
        """
        ranks = self._ranks
        head, entries = self._optimizer.stream_state()
        stripped_head, rest = take_apart(head, "optimizer")
        state: dict[str, JSON] = {}
        leaves: list[Entry] = []
        shards: dict[str, TensorShard] = {}
        params = {param.name: param.tensor for param in self._optimizer.runtime.params}
        for name, entry in entries:
            state[name], found = take_apart(entry, name)
            shards |= sharded_leaves(found, params[name])
            leaves += found
        own: list[Entry] = []
        marks: dict[str, JSON] = {}
        for leaf in leaves if ranks.are_partitioned else deal(leaves, ranks, shards):
            shard = shards.get(leaf.name)
            if shard is not None:
                marks[leaf.name] = to_mark(shard, whole_shape(leaf))
            own.append(leaf if shard is None else replace(leaf, name=stored_name(leaf.name, shard.rank)))
        files = {"optimizer": own, "rest": rest if ranks.rank == 0 else []}
        return (files, stripped_head), {"state": state, "shards": {"optimizer": marks} if marks else {}}

    def state_dict(self) -> dict[str, Any]:
        """A reference to the state that `write` has written."""
        return {"kind": KIND, "folder": self._tag}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state from the folder if `state_dict` is a reference, else from a state dict of a TwinOptimizer, or
        of the torch optimizer that the loop would use without it.

        Load the weights of the model first. Raises ValueError before any change if the state does not fit. All ranks
        must call this method.
        """
        if "kind" not in state_dict and {"state", "param_groups"} <= set(state_dict):
            load_torch_state(self._optimizer, state_dict)
            return
        if state_dict.get("kind") != KIND:
            self._optimizer.load_state_dict(state_dict)
            return
        (head, source), _ = agree(self._ranks, lambda: (self._open(), None))
        self._optimizer.load_state_dict(head, source)

    def _open(self) -> tuple[StateDict, FileSource]:
        found: Checkpoint | None = open_checkpoint(self._folder, self._tag)
        if found is None or not {"optimizer", "optimizer_state"} <= set(found.meta):
            text = f"{self._folder / self._tag} does not contain the state of a TwinOptimizer"
            raise ValueError(f"{text}. Resume from a checkpoint that was saved with a TwinOptimizer.")
        found.verify(share=(self._ranks.rank, self._ranks.world))
        with checking(found):
            head: StateDict = put_together(found.meta["optimizer"], lambda name: found.tensor("rest", name))
            shards = {param.name: shard_of(param.tensor) for param in self._optimizer.runtime.params}
            source = FileSource(found, found.meta["optimizer_state"], shards)
            source.check()
            self._optimizer.check_state(head, source)
        return head, source
