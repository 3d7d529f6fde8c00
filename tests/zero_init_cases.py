"""What ranks do in the tests of `zero.Init`: models that are built in parts, beside the same models whole."""

from __future__ import annotations

import copy
from typing import Any

import torch
import zero_whole_cases as whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import twinflow
from twinflow.compat.zero import GatheredParameters, Init
from twinflow.optim.whole import whole_weights
from twinflow.zero import building
from twinflow.zero.building import ClosedParameter

SYMBOLS, WIDTH = whole.SYMBOLS, whole.WIDTH


class Traps(nn.Module):
    """Code of constructors that changes weights after they were built, in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))  # filled after other modules were built
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 10, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers  # copies of `layer`
        self.more = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=bool(i % 2)) for i in range(3)])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("shift", torch.randn(WIDTH))
        nn.init.normal_(self.scale, 1.0, 0.1)
        self.apply(self._init_weights)
        view = self.more[0].weight[1:3]
        with torch.no_grad():
            self.more[1].weight.copy_(self.more[2].weight.T + self.embed.weight[:WIDTH])
            view.mul_(3)  # a view that was made before
        self.more[1].bias.data[0] = 5.0
        self.more[2].weight = nn.Parameter(self.more[0].weight)  # shares memory with it
        self.more[2].weight = nn.Parameter(self.more[2].weight.detach().clone())
        self.extra = copy.deepcopy(self.more[1])
        self.extra.load_state_dict({name: value + 1 for name, value in self.extra.state_dict().items()})
        self.more[0].requires_grad_(False)
        for name, param in self.named_parameters():
            param.mark = name  # type: ignore[attr-defined]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.3)
            if module.bias is not None:
                nn.init.uniform_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        for layer in [*self.more, self.normed, self.extra]:
            hidden = hidden + layer(hidden).tanh()
        return self.head((hidden + self.shift) * self.scale)


def make(kind: str) -> nn.Module:
    if kind == "traps":
        torch.manual_seed(0)
        return Traps().eval()
    return whole.make(kind)


def values(model: nn.Module) -> dict[str, list[float]]:
    with GatheredParameters(model):
        return whole.sums({**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())})


def is_closed(model: nn.Module) -> list[bool]:
    return [type(param) is ClosedParameter for param in model.parameters()]


def engine_of(model: nn.Module, stage: int, place: str, world: int, **more: Any) -> Any:
    return twinflow.initialize(model=model, config=whole.config(stage, place, world, **more))[0]


def training(rank: int, world: int, kind: str, stage: int, place: str) -> dict[str, Any]:
    """Initial values, losses and final values. Ranks have different seeds, and the weights are those of the first."""
    with Init(config_dict_or_path=whole.config(3, place, world), enabled=stage == 3):
        model = make(kind) if rank == 0 else _with_other_seed(kind, rank)
    found: dict[str, Any] = {"draws": torch.rand(3).tolist(), "closed": sum(is_closed(model))}
    found["initial"] = values(model)
    found["marks"] = [getattr(param, "mark", None) for param in model.parameters()]
    opened = _count_opened()
    engine = engine_of(model, stage, place, world)
    found["opened"] = len(opened)
    losses = []
    for step in range(3):
        loss = whole.loss_of(engine, whole.tokens_of(step, rank, world))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    found["losses"] = losses
    found["last"] = whole.sums(dict(whole_weights(engine.optimizer)))
    engine.destroy()
    return found


def _with_other_seed(kind: str, rank: int) -> nn.Module:
    seed, torch.manual_seed = torch.manual_seed, lambda _: seed(100 + rank)  # type: ignore[assignment]
    try:
        return make(kind)
    finally:
        torch.manual_seed = seed


def _count_opened() -> list[str]:
    """The labels of parameters that are gathered from now on."""
    found: list[str] = []
    original = building.Site.open

    def counted(self: Any, records: Any) -> None:
        found.extend(record.label for record in records)
        original(self, records)

    building.Site.open = counted  # type: ignore[method-assign]
    return found


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, after each operation of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and not tensor.is_meta and type(tensor) is not DTensor:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.alive[reference.cdata] = reference
        self.alive = {key: it for key, it in self.alive.items() if not it.expired()}
        self.peak = max(self.peak, sum(self.sizes()))
        return result

    def sizes(self) -> list[int]:
        found = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self.alive.values()]
        return [storage.nbytes() for storage in found if storage is not None]


class Large(nn.Module):
    """Layers of different sizes, and a weight outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(31 + i, 32 + i) for i in range(12)])
        self.layers.append(nn.TransformerEncoderLayer(43 + 1, 2, 11, dropout=0.0, batch_first=True))
        self.scale = nn.Parameter(torch.ones(44))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return x


def peak(rank: int, world: int, place: str) -> dict[str, Any]:
    """Bytes on this rank while a model is built, used and taken by `initialize`."""
    with Memory() as memory, Init(enabled=world > 1):
        model = Large()
    found: dict[str, Any] = {"built": memory.peak, "now": sum(memory.sizes())}
    found["total"] = sum(param.nbytes for param in model.parameters())
    found["largest"] = max(
        sum(param.nbytes for param in module.parameters(recurse=False)) for module in model.modules()
    )
    with Memory() as later:
        later.alive = memory.alive
        torch.nn.init.zeros_(model.scale)
        model.to(torch.bfloat16)
        model.float()
    found["used"] = later.peak
    sizes = {param.nbytes for layer in model.layers for param in layer.parameters() if param.dim() > 1}
    later.alive, most = memory.alive, [0]
    original = Memory.sizes

    def whole_weights_now(self: Memory) -> list[int]:
        now = original(self)
        most[0] = max(most[0], sum(size in sizes for size in now))
        return now

    Memory.sizes = whole_weights_now  # type: ignore[method-assign]
    with later:
        engine = engine_of(model, 3, place, world)
    found["most"] = most[0]
    engine.destroy()
    return found
