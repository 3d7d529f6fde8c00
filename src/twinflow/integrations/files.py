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
from pathlib import Path
from typing import Any, Final

from twinflow.checkpoint import open_checkpoint, save
from twinflow.checkpoint.load import Checkpoint
from twinflow.checkpoint.plain import JSON, put_together, take_apart
from twinflow.checkpoint.together import agree
from twinflow.dist.group import alone
from twinflow.engine.ranks import Ranks, deal
from twinflow.engine.restore import FileSource, checking
from twinflow.integrations.torch_state import load_torch_state
from twinflow.optim.twin import TwinOptimizer
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
        team = optimizer.team
        has_ranks = team is not None and team.everyone.world > 1
        self._ranks = Ranks(team.everyone, team.is_partitioned) if has_ranks and team else Ranks(alone(), False)

    def write(self) -> dict[str, Any]:
        """Write the state to the folder and return a reference to it. All ranks must call this method.

        With these files and the weights of the model, training can resume exactly.
        """
        (files, head), said = agree(self._ranks, self._collect)
        state = {name: entry for one in reversed(said) for name, entry in one.items()}
        meta = {"optimizer": head, "optimizer_state": state}
        save(self._folder, self._tag, files, meta, save_latest=False, together=self._ranks)
        return self.state_dict()

    def _collect(self) -> tuple[tuple[dict[str, list[Entry]], JSON], dict[str, JSON]]:
        """The tensors that this rank writes with the options of the optimizer, and the other values of its entries."""
        ranks = self._ranks
        head, entries = self._optimizer.stream_state()
        stripped_head, rest = take_apart(head, "optimizer")
        state: dict[str, JSON] = {}
        leaves: list[Entry] = []
        for name, entry in entries:
            state[name], found = take_apart(entry, name)
            leaves += found
        own = leaves if ranks.are_partitioned else deal(leaves, ranks)
        return ({"optimizer": own, "rest": rest if ranks.rank == 0 else []}, stripped_head), state

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
            source = FileSource(found, found.meta["optimizer_state"], {})
            source.check()
            self._optimizer.check_state(head, source)
        return head, source
