"""Alternative and old names of keys, and their conversion to the current names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from twinflow.config.messages import Path, dotted
from twinflow.errors import invalid_value


@dataclass(frozen=True)
class Rename:
    """A key with another current name."""

    old: Path
    new: Path
    note: bool = True  # Whether `notes` reports the renaming. Plain aliases are not reported.
    convert: Callable[[Path, Any], Any] | None = None  # Makes the new value. The key is not set if it returns None.


@dataclass(frozen=True)
class Renamed:
    """The renamings that were applied to a config."""

    notes: list[str] = field(default_factory=list)
    origins: dict[Path, Path] = field(default_factory=dict)  # current path -> path in the user's config

    def shown(self, path: Path) -> str:
        """The path of a key as the user wrote it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return dotted(self.origins[path[:length]] + path[length:])
        return dotted(path)


def _offload(path: Path, value: Any) -> Any:
    if not isinstance(value, bool):
        raise invalid_value(dotted(path), value, "true or false")
    return {"device": "cpu"} if value else None


_ZERO: Final = "zero_optimization"
_BARE: Final = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
RENAMES: Final = (
    Rename(("bfloat16",), ("bf16",), note=False),
    Rename(("allgather_size",), (_ZERO, "allgather_bucket_size")),
    Rename(("offload_optimizer",), (_ZERO, "offload_optimizer")),
    Rename(("offload_param",), (_ZERO, "offload_param")),
    Rename((_ZERO, "cpu_offload"), (_ZERO, "offload_optimizer"), convert=_offload),
    Rename((_ZERO, "cpu_offload_param"), (_ZERO, "offload_param"), convert=_offload),
    Rename((_ZERO, "stage3_gather_fp16_weights_on_model_save"), (_ZERO, "stage3_gather_16bit_weights_on_model_save")),
    *(Rename((_ZERO, name), (_ZERO, f"stage3_{name}"), note=False) for name in _BARE),
    Rename(("tensor_parallel", "tensor_parallel"), ("tensor_parallel", "tp"), note=False),
    Rename(("tensor_parallel", "kernel_inject"), ("tensor_parallel", "replace_with_kernel_inject"), note=False),
)


def other_names(section: Path) -> list[str]:
    """Names that a section accepts besides its own keys."""
    return [rename.old[-1] for rename in RENAMES if rename.old[:-1] == section]


def modernised(given: dict[str, Any]) -> Renamed:
    """Converts old names in `given` to current ones, in place."""
    done = Renamed()
    if isinstance(given.get(_ZERO), bool):
        stage = int(given[_ZERO])
        given[_ZERO] = {"stage": stage}
        done.notes.append(f"{_ZERO}: a boolean is an old spelling and means stage {stage}")
        done.origins[(_ZERO, "stage")] = (_ZERO,)
    for rename in RENAMES:
        _apply(rename, given, done)
    return done


def _apply(rename: Rename, given: dict[str, Any], done: Renamed) -> None:
    source = given if len(rename.old) == 1 else given.get(rename.old[0])
    if not isinstance(source, dict) or rename.old[-1] not in source:
        return
    target = given if len(rename.new) == 1 else given.setdefault(rename.new[0], {})
    if not isinstance(target, dict):
        return  # The target is not a section, and validation reports that error.
    if rename.new[-1] in target:
        raise ValueError(
            f"{dotted(rename.old)} and {dotted(rename.new)} are two names of one key, and both are given. "
            f"Remove {dotted(rename.old)}."
        )
    value = source.pop(rename.old[-1])
    if rename.convert is not None:
        value = rename.convert(rename.old, value)
    if value is not None or rename.convert is None:
        target[rename.new[-1]] = value
        done.origins[rename.new] = rename.old
    if rename.note:
        done.notes.append(f"{dotted(rename.old)}: an old name of {dotted(rename.new)}")
