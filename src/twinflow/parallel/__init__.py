"""Pipeline, tensor and data parallelism, and predictions of the memory and time of a layout (sizes of these axes)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinflow.parallel.pipeline import PipelineModule, profile_layers
    from twinflow.parallel.sequence import SequenceRanks
    from twinflow.parallel.sequence_model import SplitSequence, split_sequence
    from twinflow.parallel.specs import LayerSpec, Part, TiedLayerSpec
    from twinflow.parallel.split import split_model
    from twinflow.parallel.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

# Imported on first access, because `twinflow plan` needs neither torch nor a model.
_HOMES = {"LayerSpec": "specs", "Part": "specs", "PipelineModule": "pipeline", "TiedLayerSpec": "specs"}
_HOMES |= {"profile_layers": "pipeline", "split_model": "split"}
_HOMES |= {"SequenceRanks": "sequence", "SplitSequence": "sequence_model", "split_sequence": "sequence_model"}
# All other names are from topology.
__all__ = [
    "LayerSpec",
    "Part",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "ProcessTopology",
    "SequenceRanks",
    "SplitSequence",
    "TiedLayerSpec",
    "profile_layers",
    "split_model",
    "split_sequence",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"twinflow.parallel.{_HOMES.get(name, 'topology')}"), name)
