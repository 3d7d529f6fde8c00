"""The state of a TwinOptimizer in a folder of another library's checkpoint. It is written one parameter at a time, and
not pickled.

Training loops save `optimizer.state_dict()` in one file. This needs a second copy of the whole state in memory if the
optimizer stores it in another format (split masters, or states in bf16 or int8). `StreamedState` has the methods that
loops call. It writes the state to a folder, and the file of the loop contains only a reference to the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from twinflow.checkpoint import open_checkpoint, save
from twinflow.checkpoint.plain import put_together, take_apart
from twinflow.engine.restore import FileSource
from twinflow.optim.twin import TwinOptimizer

KIND: Final = "twinflow.StreamedState"
TAG: Final = "twinflow"  # name of the folder


class StreamedState:
    """Replaces an optimizer while a checkpoint in `folder` is written or read."""

    def __init__(self, optimizer: TwinOptimizer, folder: Path) -> None:
        self._optimizer = optimizer
        self._folder = folder

    def state_dict(self) -> dict[str, Any]:
        """Write the state to `folder`/twinflow and return a reference to it.

        With these files and the weights of the model, training can resume exactly.
        """
        head, entries = self._optimizer.stream_state()
        stripped_head, rest = take_apart(head, "optimizer")
        state, leaves = {}, []
        for name, entry in entries:
            state[name], found = take_apart(entry, name)
            leaves += found
        files = {"optimizer": leaves, "rest": rest}
        save(self._folder, TAG, files, {"optimizer": stripped_head, "optimizer_state": state}, save_latest=False)
        return {"kind": KIND, "folder": TAG}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state from the folder if `state_dict` is a reference, else from a state dict of a TwinOptimizer.

        Load the weights of the model first. Raises ValueError before any change if the state does not fit.
        """
        if state_dict.get("kind") != KIND:
            self._optimizer.load_state_dict(state_dict)
            return
        found = open_checkpoint(self._folder, TAG)
        if found is None or not {"optimizer", "optimizer_state"} <= set(found.meta):
            text = f"{self._folder / TAG} does not contain the state of a TwinOptimizer"
            raise ValueError(f"{text}. Resume from a checkpoint that was saved with a TwinOptimizer.")
        found.verify()
        head = put_together(found.meta["optimizer"], lambda name: found.tensor("rest", name))
        self._optimizer.load_state_dict(head, FileSource(found, found.meta["optimizer_state"], {}))
