# SPDX-License-Identifier: Apache-2.0
"""Pretrained models of transformers, without a second copy of their weights in host memory.

transformers loads a checkpoint of tensors that have not been read (zero/unread.py), so that renaming, casts, fused
experts and tied weights are its own. The parameters of the model are closed (zero/building.py): they are read from the
files one at a time when an optimizer copies them into its state, or at their first use. On several ranks each rank
reads its rows of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinflow.build_optimizer import TIMEOUT_S
from twinflow.checkpoint.disk import RESTORE
from twinflow.checkpoint.plain import parse_json
from twinflow.checkpoint.tensors import Header, TensorInfo, read_header, read_range
from twinflow.errors import invalid_value, wrong_state
from twinflow.integrations import need
from twinflow.launch.environment import init_distributed, rank_environment
from twinflow.offload.state_dict_weights import listed
from twinflow.zero.building import take_unread
from twinflow.zero.unread import UnreadTensor, leaves, unread

transformers = need("transformers", "transformers", "twinflow.from_pretrained")
# Arguments that choose the files of a model on the hub.
_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
# Arguments of transformers' loader that place, divide or replace the weights themselves.
_PLACING = ("device_map", "distributed_config", "gguf_file", "state_dict", "tp_plan", "tp_size")
_DOWNLOAD = "Download or copy the model again."
_MAX_NAMED = 5  # tensors that an error names


def from_pretrained(
    cls: Any, model: str | os.PathLike[str], *, dtype: torch.dtype | str = "auto", strict: bool = True, **kwargs: Any
) -> Any:
    """`cls.from_pretrained(model)` of transformers. Weights are read from the safetensors files when they are needed.

        model = twinflow.from_pretrained(AutoModelForCausalLM, "folder or hub id", dtype=torch.bfloat16)
        optimizer = TwinOptimizer(model, lr=1e-5, offload_params=True)

    Each parameter is read when TwinOptimizer, `initialize` or the Trainer copies it into its state, or when it is used
    first. There is never a second copy of the model in host memory. Started with a launcher on several ranks, all ranks
    must call this function, and each of them reads and keeps its rows of the weights until the optimizer is built. The
    files must not change until then.

    - `cls`: a class of transformers, such as AutoModelForCausalLM or LlamaForCausalLM.
    - `model`: a folder, or an id of the Hugging Face hub.
    - `dtype`: the dtype of the weights. "auto": that of the model's config, or else of its files, as in transformers.
    - `strict`: raise ValueError if the files lack tensors of the model, or have more. Otherwise transformers
      initialises missing tensors and ignores others.
    - `kwargs`: other arguments of `from_pretrained` of transformers, such as revision, token, trust_remote_code,
      attn_implementation or quantization_config. Those that place or divide the weights, such as device_map, are
      refused. A model with a quantization config is loaded by transformers alone, because it quantises its weights one
      at a time.

    Raises ValueError, before anything is loaded, for a file that is cut off or damaged, and for a tensor that is
    missing, unknown, or of a wrong shape or dtype.
    """
    _check(cls, kwargs)
    _join_ranks()
    hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
    dtype = kwargs.pop("torch_dtype", dtype)  # the older name in transformers
    allows_other_shapes = kwargs.pop("ignore_mismatched_sizes", False)
    has_generation_config = kwargs.get("generation_config") is not None
    config = kwargs.pop("config", None)
    if not isinstance(config, transformers.PreTrainedConfig):
        config, kwargs = _read_config(cls, model if config is None else config, hub, kwargs)
    quantization = getattr(config, "quantization_config", None) or kwargs.get("quantization_config")
    if quantization is not None:
        given = {**hub, **kwargs, "config": config, "dtype": dtype, "output_loading_info": True}
        made, info = cls.from_pretrained(model, ignore_mismatched_sizes=allows_other_shapes, **given)
        _check_names(info, {}, model, strict, allows_other_shapes)
        return made
    if _file(model, "adapter_config.json", hub) is not None:
        raise ValueError(
            f"{str(model)!r} has an adapter (adapter_config.json), which from_pretrained does not load. Load its base "
            "model, and then the adapter with PeftModel.from_pretrained()."
        )
    tensors = _find_tensors(model, kwargs.pop("variant", None), hub)
    files = {name: leaf.path for name, leaf in tensors.items()}
    given = {name: unread(leaf, leaf.info.shape, leaf.info.dtype) for name, leaf in tensors.items()}
    kind, config = _class_of(cls, config, kwargs)
    made, info = kind.from_pretrained(
        None,
        config=config,
        dtype=dtype,
        state_dict=given,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, with the names of the files
        **kwargs,
    )
    _check_names(info, files, model, strict, allows_other_shapes)
    _check_dtypes(made)
    take_unread(made)
    made.config._name_or_path = made.name_or_path = str(model)
    if made.can_generate() and not has_generation_config:
        _read_generation_config(made, model, hub)
    return made


def saved_weights(model: nn.Module, folder: str) -> Mapping[str, Tensor] | None:
    """The weights in a folder that `save_pretrained` has written, if the names in its files are not those of the model.

    transformers stores each expert of fused ones by itself. Its Trainer ignores tensors with such names when it loads a
    checkpoint. None if the names are those of the model, or if the folder has no such files.
    """
    has_files = any((Path(folder) / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    if not isinstance(model, transformers.PreTrainedModel) or not has_files:
        return None
    if set(_find_tensors(folder, None, {})) <= set(listed(model)):
        return None
    loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    found: Mapping[str, Tensor] = loaded.state_dict()
    return found


def _check(cls: Any, kwargs: Mapping[str, Any]) -> None:
    is_auto = hasattr(cls, "from_config") and hasattr(cls, "from_pretrained")
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if not (is_auto or is_model):
        raise invalid_value("cls", cls, "a class of transformers, such as AutoModelForCausalLM")
    for name in _PLACING:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} must not be given to twinflow.from_pretrained, because the optimizer decides where weights "
                "are. Leave it out, or call from_pretrained of the class of transformers."
            )


def _join_ranks() -> None:
    """Creates torch's process group if a launcher has started several processes."""
    if not dist.is_initialized():
        started = rank_environment(os.environ)
        if started is not None and started.world_size > 1:
            init_distributed(timeout_s=TIMEOUT_S)


def _read_config(cls: Any, source: Any, hub: Mapping[str, Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config, in which `kwargs` replace values, and the arguments that are not values of the config."""
    own = {name: kwargs.pop(name) for name in ("quantization_config", "key_mapping", "variant") if name in kwargs}
    trust = {"trust_remote_code": kwargs["trust_remote_code"]} if "trust_remote_code" in kwargs else {}
    kind = getattr(cls, "config_class", None) or transformers.AutoConfig
    config, left = kind.from_pretrained(source, return_unused_kwargs=True, **hub, **kwargs)
    return config, {**left, **own, **trust}


def _class_of(cls: Any, config: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The class of the model and its config. A class such as AutoModelForCausalLM chooses both by the config."""
    if issubclass(cls, transformers.PreTrainedModel):
        return cls, config
    trust = {"trust_remote_code": kwargs["trust_remote_code"]} if "trust_remote_code" in kwargs else {}
    with torch.device("meta"):
        found = cls.from_config(config, **trust)
    # Of a model for texts and images, some classes are for the texts only.
    return type(found), config if type(found.config) is type(config) else config.get_text_config()


def _read_generation_config(made: Any, model: object, hub: Mapping[str, Any]) -> None:
    try:
        made.generation_config = transformers.GenerationConfig.from_pretrained(model, **hub)
    except OSError:  # the model has none, and keeps the one of its config
        return


# The files.


@dataclass(frozen=True)
class _FileTensor:
    """A tensor in a file of safetensors."""

    path: Path
    header: Header
    info: TensorInfo
    time_ns: int  # of the last change of the file

    def read(self, start: int, into: Tensor) -> None:
        """Fills `into` with the elements from `start` on. Raises RuntimeError if the file was changed or removed."""
        try:
            status = self.path.stat()
            is_same = (status.st_size, status.st_mtime_ns) == (self.header.size, self.time_ns)
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise wrong_state(
                f"The tensor {self.info.name!r} cannot be read",
                f"{self.path} was changed or removed after from_pretrained()",
                "Keep the files until the optimizer is built, and load the model again.",
            )
        read_range(self.path, self.header, self.info, start, into)


def _find_tensors(model: str | os.PathLike[str], variant: str | None, hub: Mapping[str, Any]) -> dict[str, _FileTensor]:
    """All tensors of a model. Raises ValueError for files that are missing or damaged, or do not fit their index."""
    stem = "model.safetensors" if variant is None else f"model.{variant}.safetensors"
    single = _file(model, stem, hub)
    if single is not None:
        return dict(_tensors_in(single))
    index = _file(model, stem + ".index.json", hub)
    if index is None:
        raise ValueError(
            f"{str(model)!r} has no file {stem} and no {stem}.index.json, but the weights must be in files of "
            "safetensors. Save the model with save_pretrained() of transformers, which writes such files."
        )
    parsed = parse_json(index.read_bytes(), index)
    places = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
        raise ValueError(f"{index} has no valid weight_map of names of tensors and files. {_DOWNLOAD}")
    found: dict[str, _FileTensor] = {}
    for name in dict.fromkeys(places.values()):
        path = _file(model, name, hub)
        if path is None:
            raise ValueError(f"The file {name} of {str(model)!r} is missing, but {index.name} names it. {_DOWNLOAD}")
        for tensor, leaf in _tensors_in(path):
            if places.get(tensor) != name:
                said = f"places it in {places[tensor]}" if tensor in places else "does not name it"
                raise ValueError(f"{path} has the tensor {tensor!r}, but {index.name} {said}. {_DOWNLOAD}")
            found[tensor] = leaf
    for tensor, name in places.items():
        if tensor not in found:
            raise ValueError(f"{index.parent / name} has no tensor {tensor!r}, but {index.name} says so. {_DOWNLOAD}")
    return found


def _file(model: str | os.PathLike[str], name: str, hub: Mapping[str, Any]) -> Path | None:
    """The path of a file of a folder or of the hub; None if there is no such file."""
    found = transformers.utils.cached_file(
        str(model),
        name,
        _raise_exceptions_for_gated_repo=True,
        _raise_exceptions_for_missing_entries=False,
        **hub,
    )
    return None if found is None else Path(found)


def _tensors_in(path: Path) -> Iterator[tuple[str, _FileTensor]]:
    try:
        header = read_header(path)
    except ValueError as error:
        raise ValueError(str(error).removesuffix(RESTORE) + _DOWNLOAD) from error
    time_ns = path.stat().st_mtime_ns
    for info in header.infos:
        yield info.name, _FileTensor(path, header, info, time_ns)


# Checks of the loaded model.


def _check_names(
    info: Mapping[str, Any], files: Mapping[str, Path], model: object, strict: bool, allows_other_shapes: bool
) -> None:
    """Raises ValueError for tensors of a wrong shape and, if `strict`, for those that are missing or unknown."""
    for name, found, expected in () if allows_other_shapes else sorted(info.get("mismatched_keys", ())):
        raise ValueError(
            f"The tensor {name!r} in {_where(name, files, model)} has the shape {tuple(found)}, but the model of this "
            f"config has {tuple(expected)}. Use the config that belongs to the files."
        )
    if not strict:
        return
    missing, unknown = (sorted(info.get(key, ())) for key in ("missing_keys", "unexpected_keys"))
    remedy = "Use the class and config that belong to the files, or strict=False, which {}."
    if missing:
        left = remedy.format("initialises missing tensors")
        raise ValueError(f"{model!s} has no tensor {_names(missing)}, which the model of this config needs. {left}")
    if unknown:
        left = remedy.format("ignores such tensors")
        place = _where(unknown[0], files, model)
        raise ValueError(f"{place} has the tensor {_names(unknown)}, which the model does not have. {left}")


def _where(name: str, files: Mapping[str, Path], model: object) -> str:
    """The file of a tensor. transformers may have changed the first parts of its name."""
    near = [path for given, path in files.items() if given == name or f".{given}".endswith(f".{name}")]
    near += [path for given, path in files.items() if f".{name}".endswith(f".{given}")]
    return str(near[0] if near else model)


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMED} others" if len(listed) > _MAX_NAMED else ""
    return ", ".join(map(repr, listed[:_MAX_NAMED])) + more


def _check_dtypes(model: nn.Module) -> None:
    """Raises ValueError for integers in a file that transformers would cast to weights."""
    for name, param in model.named_parameters():
        if isinstance(param, UnreadTensor) and param.is_floating_point():
            for leaf in leaves(param):
                if isinstance(leaf, _FileTensor) and not leaf.info.dtype.is_floating_point:
                    raise ValueError(
                        f"The tensor {leaf.info.name!r} in {leaf.path} has the dtype {leaf.info.dtype}, but the "
                        f"parameter {name} needs a floating-point dtype. Quantised weights need a config with "
                        "quantization_config."
                    )
