# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of `zero.Init`: models that are built in parts, beside the same models whole."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import torch
import zero_whole_cases as whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import twinflow
import twinflow.compat
from twinflow.compat.start import DeepSpeedConfig
from twinflow.compat.zero import GatheredParameters, Init
from twinflow.dist import meeting
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


def engine_of(model: nn.Module, stage: int, place: str, world: int, groups: Any = None) -> Any:
    return twinflow.initialize(model=model, model_parameters=groups, config=whole.config(stage, place, world))[0]


def training(rank: int, world: int, kind: str, stage: int, place: str) -> dict[str, Any]:
    """Initial values, losses and final values. Ranks have different seeds, and the weights are those of the first."""
    with Init(config_dict_or_path=whole.config(3, place, world), enabled=stage == 3):
        model = make(kind) if rank == 0 else _with_other_seed(kind, rank)
        gc.collect()  # a weight stays whole while a tensor that is garbage still uses its memory
    found: dict[str, Any] = {"draws": torch.rand(3).tolist(), "closed": sum(is_closed(model))}
    found["initial"] = values(model)
    found["marks"] = [getattr(param, "mark", None) for param in model.parameters()]
    opened = _count_opened()
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == is_matrix]} for is_matrix in (True, False)]
    engine = engine_of(model, stage, place, world, groups)
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
        self.wide: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.counted: set[tuple[int, ...]] = set()  # shapes of whole weights
        self.most = 0  # the largest number of tensors with these shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and not tensor.is_meta and type(tensor) is not DTensor:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.alive[reference.cdata] = reference
                if tuple(tensor.shape) in self.counted and tensor.untyped_storage().nbytes() >= tensor.nbytes:
                    self.wide[reference.cdata] = reference
        self.alive = {key: it for key, it in self.alive.items() if not it.expired()}
        self.peak = max(self.peak, sum(self.sizes()))
        self.wide = {key: it for key, it in self.wide.items() if key in self.alive}
        self.most = max(self.most, sum(size > 0 for size in self.sizes(self.wide)))
        return result

    def sizes(self, alive: dict[int, StorageWeakRef] | None = None) -> list[int]:
        given = self.alive if alive is None else alive
        found = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in given.values()]
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
    later.counted = {tuple(param.shape) for layer in model.layers for param in layer.parameters() if param.dim() > 1}
    with later:
        engine = engine_of(model, 3, place, world)
    found["most"] = later.most
    engine.destroy()
    return found


def use(rank: int, world: int, stage: int) -> dict[str, Any]:
    """Results of code that a user runs between the context and `initialize`."""
    found: dict[str, Any] = {}
    with Init(enabled=stage == 3):
        torch.manual_seed(0)
        model = Traps().eval()
        built_inside = Traps().to(torch.float64)
        found["inside"] = built_inside.embed.weight.sum().item()
        del built_inside
    tokens = whole.tokens_of(0, 0, 1)
    found["printed"] = repr(model.more[0].weight)
    found["shown"] = repr(model)
    found["sizes"] = [(list(p.shape), p.dim(), list(p.size()), p.numel(), list(p.stride())) for p in model.parameters()]
    found["frozen"] = [name for name, p in model.named_parameters() if not p.requires_grad]
    state = model.state_dict()
    found["state"] = whole.sums(state)
    state["more.1.weight"].zero_()  # the tensors of a state dict are the weights
    found["zeroed"] = float(model.more[1].weight.abs().sum())
    del state
    with torch.no_grad():
        found["logits"] = model(tokens).flatten().tolist()
    loss = whole.loss_of(model, tokens)  # with a graph that uses the weights
    model.more[0].weight.sum().item()
    loss.backward()
    found["grads"] = [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]
    model.zero_grad()
    del loss
    copied = copy.deepcopy(model)
    found["copied"] = values(copied)
    file = io.BytesIO()
    torch.save([model.more, model.embed], file)
    file.seek(0)
    more, embed = torch.load(file, weights_only=False)
    found["saved"] = whole.sums({**more.state_dict(), **embed.state_dict()})
    found["class"] = [type(embed.weight).__name__, type(more[1].bias).__name__]
    found["mapped"] = torch.vmap(lambda row: row.sum())(model.more[1].weight).tolist()
    found["stacked"] = [float(it.sum()) for it in torch._foreach_mul([p.data for p in model.parameters()], 2.0)]
    found["norm"] = float(nn.utils.get_total_norm(model.parameters()))
    found["array"] = model.scale.detach().numpy().tolist()
    found["tensor"] = model.scale.tolist()
    model.load_state_dict({name: value + 1 for name, value in copied.state_dict().items()})
    model.double()
    nn.init.zeros_(model.more[1].bias)
    model.to(torch.float32)
    model.embed.weight.data = model.embed.weight.data * 2
    vector = nn.utils.parameters_to_vector(model.extra.parameters())
    nn.utils.vector_to_parameters(vector + 1, model.extra.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole.loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.new = nn.Linear(2, 2)  # outside of the context
    with GatheredParameters(model.more[1].weight, modifier_rank=world - 1):
        if rank == world - 1:
            model.more[1].weight.data.fill_(0.25)
    with GatheredParameters(model):
        found["whole"] = [type(p).__name__ for p in model.parameters()]
    found["last"] = values(model)
    del found["last"]["new.weight"], found["last"]["new.bias"]
    return found


def pretrained(rank: int, world: int, folder: str, place: str, has_config: bool) -> dict[str, Any]:
    """Models of transformers: built, saved, loaded and trained, in the context or with `HfDeepSpeedConfig`."""
    if has_config:
        twinflow.compat.install()
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=SYMBOLS, bos_token_id=0, **sizes)
    if world == 1:
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    kept = HfDeepSpeedConfig(whole.config(3, place, world)) if has_config else None  # valid as long as it is referenced
    with Init(config_dict_or_path=whole.config(3, place, world), enabled=not has_config):
        torch.manual_seed(2)
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        with Memory() as memory:
            memory.counted = {(24, 16), (16, 24)}
            loaded = AutoModelForCausalLM.from_pretrained(folder)
        found: dict[str, Any] = {"most": memory.most}
    found["whole"] = sum(not one for one in [*is_closed(made), *is_closed(loaded)])
    found["values"] = [values(made), values(loaded)]
    engine = engine_of(loaded, 3, place, world)
    whole.train(engine, range(2), rank, world)
    engine.destroy()
    del kept
    return found


def mistakes(rank: int, world: int) -> dict[str, Any]:
    """Errors of ranks that do different things."""
    with Init():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    found: dict[str, Any] = {"alone": []}
    patience, meeting.PATIENCE_S = meeting.PATIENCE_S, 1.0
    if rank == 0:
        for use in (model[0].weight.sum, model[0].state_dict):
            found["alone"].append(_error(use))
    meeting.PATIENCE_S = patience
    torch.distributed.barrier()
    found["different"] = _error(model[rank].weight.sum)
    begin = nn.Module.__init__

    def fail() -> None:
        with Init():
            nn.Linear(2, 2)
            raise LookupError("of the user")

    found["raised"] = _error(fail)
    found["after"] = [nn.Module.__init__ is begin, type(nn.Linear(2, 2).weight) is nn.Parameter]
    values(model)
    return found


def _error(use: Any) -> str:
    try:
        use()
    except (RuntimeError, LookupError) as error:
        return str(error.args[0])
    return ""


def other_stage(rank: int, world: int, stage: int, place: str) -> list[float]:
    """The weights after training with a stage that needs whole weights."""
    with Init():
        model = make("plain")
    engine = engine_of(model, stage, place, world)
    whole.train(engine, range(2), rank, world)
    found = [float(param.detach().sum()) for param in engine.module.parameters()]
    engine.destroy()
    return found


class Own(nn.Parameter):
    """A class of the user."""


def options(rank: int, world: int) -> dict[str, Any]:
    """Whether models are divided, by the arguments of the context."""
    config = whole.config(3, "device", world)
    tensor = {**config, "tensor_parallel": {"autotp_size": 2}}
    given: dict[str, dict[str, Any]] = {
        "nothing": {},
        "stage 3": {"config_dict_or_path": config},
        "a config object": {"config": DeepSpeedConfig(config)},
        "cpu": {"remote_device": "cpu", "pin_memory": True, "dtype": torch.float32},
        "disabled": {"enabled": False},
        "stage 2": {"config": whole.config(2, "device", world)},
        "tensor ranks": {"config": tensor},
    }
    made = {}
    for name, arguments in given.items():
        with Init(**arguments):
            made[name] = make("plain")
    with Init(), Init():
        made["nested"] = make("plain")
    context = Init()
    for _ in range(2):
        with context, context:
            made["twice"] = make("plain")
    made["a module"] = make("plain")
    Init(made["a module"])
    with Init():
        made["other classes"] = nn.Linear(2, 2)
        made["other classes"].weight = Own(torch.ones(2, 2))
        made["other classes"].bias = nn.Parameter(torch.tensor(1.0))
    closed = {name: all(is_closed(model)) for name, model in made.items()}
    assert all(closed[name] == any(is_closed(model)) for name, model in made.items())
    truth = values(make("plain"))
    return {"closed": closed, "equal": all(values(m) == truth for n, m in made.items() if n != "other classes")}
