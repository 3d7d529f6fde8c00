# SPDX-License-Identifier: Apache-2.0
"""Files as DeepSpeed lays them out, made from a plain torch run: its stages cut and padded by hand."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinflow.checkpoint.importing import import_deepspeed

BETAS, EPS, LR, DECAY = (0.8, 0.99), 1e-6, 1e-2, 0.1


class Net(nn.Module):
    """Odd sizes, a tied weight, a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.tensor([0.5, 1.0, 1.5]), requires_grad=False)
        self.register_buffer("scale", torch.tensor([1.5, 2.5]))
        self.emb = nn.Embedding(7, 5)
        self.a = nn.Linear(5, 11)
        self.norm = nn.LayerNorm(11)
        self.b = nn.Linear(11, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.b(self.norm(self.a(self.emb(tokens)))) * self.frozen.sum() + self.scale.sum()
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def tokens(step: int) -> Tensor:
    return torch.randint(0, 7, (2, 3), generator=torch.Generator().manual_seed(step))


def groups_of(model: nn.Module, split: bool) -> list[dict[str, Any]]:
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not split:
        return [{"params": list(params.values()), "weight_decay": DECAY}]
    matrices = [param for param in params.values() if param.dim() > 1]
    rest = [param for param in params.values() if param.dim() == 1]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(steps: int = 3, split: bool = False) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model, split), lr=LR, betas=BETAS, eps=EPS)
    train(model, optimizer, range(steps))
    return model, optimizer


@contextmanager
def deepspeed_classes() -> Iterator[dict[str, type]]:
    """Classes under DeepSpeed's names, for as long as something is pickled."""
    modules: dict[str, ModuleType] = {}
    made: dict[str, type] = {}
    for where, name, base in (
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler", object),
        ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", object),
        ("deepspeed.utils.tensor_fragment", "fragment_address", object),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum", int),
    ):
        parts = where.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        made[name] = type(name, (base,), {"__module__": where, "__qualname__": name})
        if base is int:
            made[name].__reduce_ex__ = lambda self, protocol: (type(self), (int(self),))  # type: ignore[assignment]
        setattr(modules[where], name, made[name])
    with mock.patch.dict(sys.modules, modules):
        yield made


def write(root: Path, model: Net, optimizer: torch.optim.AdamW, stage: int, ranks: int, **how: Any) -> Path:
    """A checkpoint of `model`, tag global_step3. `how`: dtype, prefix, elastic, shuffled, align, client, changes."""
    folder = root / "global_step3"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step3")
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [[(names[id(p)], p) for p in group["params"]] for group in optimizer.param_groups]
    if how.get("shuffled"):
        groups = [group[::2] + group[1::2] for group in groups]
    dtype = how.get("dtype", torch.float32)
    module = OrderedDict((k, v.to(dtype) if k != "scale" else v) for k, v in model.state_dict().items())
    module["head.weight"] = module["emb.weight"]
    head: dict[str, Any] = {
        "module": module,
        "buffer_names": ["scale"],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, p.shape) for name, p in group) for group in groups],
        "frozen_param_shapes": OrderedDict(frozen=model.frozen.shape) if stage >= 2 else None,
        "frozen_param_fragments": OrderedDict(frozen=model.frozen.data) if stage >= 2 else None,
        "shared_params": {"head.weight": "emb.weight"},
        "lr_scheduler": {"last_batch_iteration": 2},
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 3 * 2 * ranks,
        "ds_config": {"zero_optimization": {"stage": stage, "round_robin_gradients": bool(how.get("shuffled"))}},
        "ds_version": "0.19.5",
        **how.get("client", {"epoch": 1, "best": float("inf")}),
    }
    if stage == 0:
        state: dict[str, Any] = optimizer.state_dict()
        if dtype != torch.float32:
            masters = [[p.detach() for _, p in group] for group in groups]
            state = {"optimizer_state_dict": state, "fp32_groups": masters, "cur_scale": 1.0}
        head |= {"optimizer": state, "param_shapes": None, "shared_params": None}
    per_rank = [] if stage == 0 else [split_row(groups, optimizer, stage, ranks, rank, how) for rank in range(ranks)]
    with deepspeed_classes() as classes:
        for rank, state in enumerate(per_rank):
            state["zero_stage"] = classes["ZeroStageEnum"](stage)
            state["loss_scaler"] = classes[how.get("scaler", "LossScaler")]()
            vars(state["loss_scaler"]).update(how.get("scale", {"cur_scale": 1.0, "dynamic": False}))
            state |= how.get("changes", {})
            name = f"{how.get('prefix', '')}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": state, "ds_version": "0.19.5"}, folder / name)
    for rank in range(ranks if stage == 3 else 1):
        if stage == 3:
            head["module"] = OrderedDict((k, v if k == "scale" else v.new_empty(0)) for k, v in module.items())
            head["frozen_param_fragments"] = OrderedDict(frozen=_part(model.frozen.data, ranks, rank))
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(head, folder / name)
    return root


def _part(value: Tensor, ranks: int, rank: int) -> Tensor:
    """Stage 3: a rank's part of one parameter; what fills up the last one must never be read."""
    size = -(-value.numel() // ranks)
    flat = torch.cat([value.detach().reshape(-1), value.new_full((size * ranks - value.numel(),), float("nan"))])
    return flat[size * rank : size * (rank + 1)].clone()


def _row(values: list[Tensor], paddings: list[int], ranks: int, rank: int) -> tuple[Tensor, int]:
    """Stages 1 and 2: a rank's part of the row of a group, and how much of its end is padding."""
    pieces = [p for v, n in zip(values, paddings, strict=True) for p in (v.detach().reshape(-1), v.new_full((n,), 1e9))]
    row = torch.cat(pieces)
    length = -(-row.numel() // (2 * ranks)) * 2 * ranks
    size = length // ranks
    padded = torch.cat([row, row.new_full((length - row.numel(),), float("nan"))])
    return padded[size * rank : size * (rank + 1)].clone(), min(size, max(0, size * (rank + 1) - row.numel()))


def split_row(
    groups: Any, optimizer: Any, stage: int, ranks: int, rank: int, how: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The optimizer's part of a rank. `groups`: names and parameters of each group."""
    flats: list[Tensor] = []
    entries: list[dict[str, Any]] = []
    paddings = [[how.get("align", 0)] * len(group) for group in groups]
    pads: list[int] = []
    for group, padding in zip(groups, paddings, strict=True):
        entry: dict[str, Any] = {"step": optimizer.state[group[0][1]]["step"]}
        for key in ("master", "exp_avg", "exp_avg_sq"):
            values = [p if key == "master" else optimizer.state[p][key] for _, p in group]
            if stage == 3:
                flat, pad = torch.cat([_part(value, ranks, rank) for value in values]), 0
            else:
                flat, pad = _row(values, padding, ranks, rank)
            if key == "master":
                flats.append(flat[: flat.numel() - pad].clone())
                pads.append(pad)
            else:
                entry[key] = flat[: flat.numel() - pad].clone() if how.get("elastic") else flat
        entries.append(entry)
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    base: Any = {
        "state": dict(enumerate(entries)),
        "param_groups": [{**option, "params": [i]} for i, option in enumerate(options)],
    }
    if stage == 3:
        for flat in flats:
            flat.ds_id = "0_1"  # type: ignore[attr-defined]
        return {"fp32_flat_groups": flats, "optimizer_state_dict": base, "partition_count": ranks}
    return {
        "single_partition_of_fp32_groups": flats,
        "base_optimizer_state": entries if how.get("elastic") else base,
        "partition_count": [ranks] * len(groups),
        "group_paddings": pads,
        "param_alignment_paddings": paddings,
    }


def import_damaged(source: Path, path: Path, num: int, generator: random.Random, out: Path) -> None:
    """Imports the checkpoint `num` times, each time with another wrong byte in the pickle of its file `path`. An error
    must name the file or its folder.
    """
    raw = path.read_bytes()
    for at in generator.sample(range(raw.index(b"byteorder")), num):  # in front of it is the pickle
        path.write_bytes(raw[:at] + bytes([raw[at] ^ generator.randrange(1, 256)]) + raw[at + 1 :])
        try:
            import_deepspeed(source, out)
        except ValueError as error:
            assert "global_step3" in str(error)  # noqa: PT017
    path.write_bytes(raw)
