"""`deepspeed.utils.zero_to_fp32`: reads fp32 weights from a checkpoint that the engine saved."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from twinflow.checkpoint import exporting
from twinflow.checkpoint.exporting import export_checkpoint, find_checkpoint
from twinflow.errors import invalid_value

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The fp32 weights of a checkpoint, on the host. They come from the fp32 masters if the checkpoint has masters. The
    number of ranks that saved it does not matter.
    """
    _refuse_exclusion(exclude_frozen_parameters)
    if lazy_mode:
        remedy = "Use convert_zero_checkpoint_to_fp32_state_dict(), which has one tensor in memory at a time."
        raise invalid_value("lazy_mode", True, [False], remedy)
    found = find_checkpoint(Path(checkpoint_dir), tag)
    masters = exporting.masters_of(found)
    names = found.names("model")
    weights = {name: exporting.make_entry(found, name, masters.get(name), torch.float32).read() for name in names}
    aliases = found.meta.get("aliases") or {}
    return weights | {name: weights[first] for name, first in aliases.items() if first in weights}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the fp32 weights as safetensors files to a folder, as `twinflow export` does. `safe_serialization` has no
    effect: no pickles are written.
    """
    _refuse_exclusion(exclude_frozen_parameters)
    export_checkpoint(Path(checkpoint_dir), Path(output_dir), tag, shard_bytes=_bytes(max_shard_size))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Moves a model to the host and loads a checkpoint's weights. Parameters that the checkpoint does not have keep
    their values.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _refuse_exclusion(is_asked_for: bool) -> None:
    """Raises ValueError: a checkpoint does not distinguish frozen parameters from buffers, and buffers must stay."""
    if is_asked_for:
        remedy = "Leave them out at saving: engine.save_checkpoint(..., exclude_frozen_parameters=True)."
        raise invalid_value("exclude_frozen_parameters", True, [False], remedy)


def _bytes(size: str | int) -> int:
    if isinstance(size, int):
        return size
    number, unit = size[:-2], size[-2:].upper()
    if unit not in _UNITS or not number.isdigit():
        raise invalid_value("max_shard_size", size, "a number of bytes, or a number with KB, MB, GB or TB, such as 5GB")
    return int(number) * _UNITS[unit]
