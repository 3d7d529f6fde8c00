# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of whole weights under ZeRO-3: models of several kinds beside the same models whole."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import twinflow
from twinflow.compat.zero import (
    GatheredParameters,
    register_external_parameter,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
    unwrap_model_for_generation,
)
from twinflow.dist import meeting
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.whole import whole_weights
from twinflow.zero import Zero

SYMBOLS, WIDTH = 13, 6


class Plain(nn.Module):
    """Layers of odd sizes, one of them frozen, a buffer, and a weight outside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers[1].requires_grad_(False)
        self.register_buffer("shift", torch.arange(WIDTH) / 10)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        hidden = (hidden + self.shift) * self.scale
        return hidden @ self.embed.weight.T  # a tied head


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=SYMBOLS, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    )


def _llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=SYMBOLS, tie_word_embeddings=tied, bos_token_id=0, **sizes))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=SYMBOLS, max_position_embeddings=16, **sizes))


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    made = {"plain": Plain, "gpt2": _gpt2, "llama": _llama, "llama-tied": lambda: _llama(True), "bert": _bert}[kind]()
    return made.eval()  # without dropout, so that one process and several compute the same


def config(stage: int, place: str, world: int, **more: Any) -> dict[str, Any]:
    """`place`: "device", "host" for weights on the host too, or "none" for no state on the host."""
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "none" if place == "none" else "cpu"}}
    if place == "host":
        zero["offload_param"] = {"device": "cpu"}
    # A large eps, because Adam would amplify the rounding errors of gradients that are zero (biases of keys).
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}}
    return {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 1,
        "optimizer": optimizer,
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        **more,
    }


def tokens_of(step: int, rank: int, world: int) -> Tensor:
    tokens = torch.randint(0, SYMBOLS, (12, 5), generator=torch.Generator().manual_seed(100 + step))
    return tokens.chunk(world)[rank]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    found = model(tokens)
    logits = found if isinstance(found, Tensor) else found.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(engine: Any, steps: range, rank: int, world: int) -> None:
    for step in steps:
        engine.backward(loss_of(engine, tokens_of(step, rank, world)))
        engine.step()


def engine_of(kind: str, stage: int, place: str, world: int, **more: Any) -> Any:
    return twinflow.initialize(model=make(kind), config=config(stage, place, world, **more))[0]


def sums(state: dict[str, Tensor]) -> dict[str, list[float]]:
    """Values of a state dict for a comparison between processes."""
    return {name: value.detach().double().flatten().tolist() for name, value in state.items()}


def weights(rank: int, world: int, kind: str, stage: int, place: str) -> Any:
    """The whole weights after two steps, as `whole_weights` yields them, and whether tied ones are one tensor."""
    engine = engine_of(kind, stage, place, world)
    before = copy.deepcopy(dict(whole_weights(engine.optimizer)))
    train(engine, range(2), rank, world)
    state = dict(whole_weights(engine.optimizer))
    again = []
    for name, _ in whole_weights(engine.optimizer):  # rank 0 stops early
        again.append(name)
        break
    train(engine, range(2, 3), rank, world)
    found = {
        "before": sums(before),
        "after": sums(state),
        "num": len({value.data_ptr() for value in state.values()}),
        "again": len(again),
        "last": sums(dict(whole_weights(engine.optimizer))),
    }
    engine.destroy()
    return found


def _read(params: dict[str, Any]) -> dict[str, list[float]]:
    """Values by several ways to read a parameter."""
    ways = [
        lambda p: p.detach(),
        lambda p: p.data,
        lambda p: p * 1,
        lambda p: p.view(-1)[:],
        copy.deepcopy,
    ]
    return sums(
        {name: ways[i % len(ways)](param).reshape(param.shape) for i, (name, param) in enumerate(params.items())}
    )


def reading(rank: int, world: int, kind: str, stage: int, place: str) -> Any:
    """Whole weights inside GatheredParameters after two steps, by held parameters, by modules and by state dicts; the
    logits of ranks that run different numbers of forwards; a tensor that is kept; then another step."""
    engine = engine_of(kind, stage, place, world)
    train(engine, range(2), rank, world)
    held = dict(engine.module.named_parameters())
    tokens = tokens_of(7, 0, 1)
    with GatheredParameters(held.values()):
        found = {"held": _read(held), "modules": _read(dict(engine.module.named_parameters()))}
        found["state"] = sums(engine.module.state_dict())
        kept = {name: param.data for name, param in held.items()}
        with torch.no_grad():
            for _ in range(1 + rank):
                logits = engine.module(tokens)
            logits = logits if isinstance(logits, Tensor) else logits.logits
        found["logits"] = logits.double().flatten().tolist()
        found["again"] = _read(held)
    found["kept"] = sums(kept)
    with GatheredParameters(list(held.values())[1]), GatheredParameters(engine.module):
        found["nested"] = _read(held)
    with GatheredParameters(held.values(), enabled=False):
        pass
    train(engine, range(2, 3), rank, world)
    last = dict(whole_weights(engine.optimizer))
    with GatheredParameters(list(held.values())[:2]), torch.no_grad():  # a part of the weights, and a forward
        loss = loss_of(engine.module, tokens).item()
    found |= {"loss": [loss], "last": sums(last)}
    engine.destroy()
    return found


def writing(rank: int, world: int, kind: str, stage: int, place: str, modifier: int) -> Any:
    """The weights after writes of one rank to a trained, a frozen and a tied parameter, and after another step."""
    engine = engine_of(kind, stage, place, world)
    train(engine, range(2), rank, world)
    named = dict(engine.module.named_parameters())
    names = list(named)
    held = [named[names[0]], named[names[2]], named[names[3]], named[names[-1]]]
    with GatheredParameters(held, modifier_rank=modifier):
        if rank == modifier:
            with torch.no_grad():
                held[0].mul_(2)
                held[1].data[0] += 0.5
                nn.init.constant_(held[2], 0.25)
            engine.module.get_parameter(names[-1]).data.copy_(torch.full_like(held[3], 0.125))
    after = sums(dict(whole_weights(engine.optimizer)))
    with GatheredParameters(engine.module), GatheredParameters(held[0], modifier_rank=modifier), torch.no_grad():
        held[0].add_(0.5)  # on all ranks: the modifier's values count
    masters = [safe_get_full_fp32_param(p) for p in held]
    found = {"after": after, "masters": [None if m is None else m.flatten().tolist() for m in masters]}
    train(engine, range(2, 4), rank, world)
    found["last"] = sums(dict(whole_weights(engine.optimizer)))
    engine.destroy()
    return found


def said(work: Any) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return ""


def mistakes(rank: int, world: int, place: str) -> Any:
    """Errors of writes that are not kept, of calls on one rank, and of steps inside; then training continues."""
    meeting.PATIENCE_S = 1.0
    engine = engine_of("plain", 3, place, world)
    train(engine, range(2), rank, world)
    weight = engine.module.layers[0].weight

    def write(modifier: int | None, by: int) -> None:
        with GatheredParameters(weight, modifier_rank=modifier):
            if rank == by:
                weight.data.fill_(9.0)

    def fail() -> None:
        with GatheredParameters(weight, modifier_rank=0):
            weight.data.fill_(9.0)
            raise RuntimeError("of the user")

    def step() -> None:
        loss = loss_of(engine, tokens_of(5, rank, world))
        engine.backward(loss)
        with GatheredParameters(weight):
            engine.step()

    errors = [said(lambda: write(None, 1)), said(lambda: write(0, 1)), said(fail), said(step)]
    engine.step()
    one = said(lambda: safe_get_full_fp32_param(weight)) if rank == 0 else ""
    other = said(lambda: write(None, 7)) if rank == 0 else ""
    third = said(lambda: dict(whole_weights(engine.optimizer))) if rank == 0 else ""
    engine.optimizer.team.everyone.gather_rows(torch.zeros(1))
    different = said(lambda: safe_get_full_fp32_param(weight if rank == 0 else engine.module.scale))
    train(engine, range(2, 3), rank, world)
    state = sums(dict(whole_weights(engine.optimizer)))
    engine.destroy()
    return {"errors": errors, "alone": [one, other, third], "different": different, "state": state}


def _values(found: Tensor | None) -> list[float] | None:
    return None if found is None else found.double().flatten().tolist()


def state(rank: int, world: int, kind: str, stage: int, place: str, gas: int, early: Any) -> Any:
    """Masters, states and gradients at every time of three steps; then changed ones, and three more steps."""
    more: dict[str, Any] = {"gradient_accumulation_steps": gas, "train_batch_size": 12 * gas}
    made = config(stage, place, world, **more)
    made["zero_optimization"]["offload_optimizer"]["early"] = early
    engine = twinflow.initialize(model=make(kind), config=made)[0]
    params = dict(engine.module.named_parameters())
    found: list[Any] = []

    def look(get: Any, *args: Any) -> None:
        found.append([_values(get(param, *args)) for param in params.values()])

    def one(step: int, reads: bool) -> None:
        for micro in range(gas):
            engine.backward(loss_of(engine, tokens_of(gas * step + micro, rank, world)))
            if reads:
                look(safe_get_full_grad)
                if micro == gas - 1:
                    look(safe_get_full_fp32_param)
                    look(safe_get_full_optimizer_state, "exp_avg")
                    look(safe_get_full_grad)
            engine.step()

    look(safe_get_full_fp32_param)
    for step in range(3):
        one(step, step != 1)
        look(safe_get_full_grad)
        look(safe_get_full_optimizer_state, "exp_avg_sq")
    name = list(params)[2]
    safe_set_full_fp32_param(params[name], torch.full(params[name].shape, 0.25))
    safe_set_full_optimizer_state(params[name], torch.full(params[name].shape, 0.5), "exp_avg")
    look(safe_get_full_fp32_param)
    for step in range(3, 5):
        one(step, False)
    look(safe_get_full_fp32_param)
    local = [safe_get_local_fp32_param(param) for param in params.values() if param.requires_grad]
    numel = sum(part.numel() for part in local if part is not None)
    for param in params.values():
        part = safe_get_local_optimizer_state(param, "exp_avg")
        if part is not None:
            safe_set_local_optimizer_state(param, part * 2, "exp_avg")
    look(safe_get_full_optimizer_state, "exp_avg")
    one(5, False)
    look(safe_get_full_fp32_param)
    engine.destroy()
    return {"found": found, "numel": numel}


def new_gradients(rank: int, world: int, kind: str, stage: int, place: str, early: Any) -> Any:
    """The masters after steps whose gradients were replaced; or the error."""
    made = config(stage, place, world)
    made["zero_optimization"]["offload_optimizer"]["early"] = early
    engine = twinflow.initialize(model=make(kind), config=made)[0]
    params = [param for param in engine.module.parameters() if param.requires_grad]
    for step in range(3):
        engine.backward(loss_of(engine, tokens_of(step, rank, world)))
        try:
            for param in params[:3]:
                grad = safe_get_full_grad(param)
                assert grad is not None
                safe_set_full_grad(param, 0.5 * grad + 0.01)
        except ValueError as error:
            engine.destroy()
            return str(error)
        engine.step()
    found = [_values(safe_get_full_fp32_param(param)) for param in params]
    engine.destroy()
    return found


def saving(rank: int, world: int, kind: str, stage: int, place: str, folder: str) -> Any:
    """Files and state dicts of the engine on rank 0, what other ranks get, and generated tokens."""
    engine = engine_of(kind, stage, place, world)
    train(engine, range(2), rank, world)
    for name in ("weights.bin", "weights.safetensors"):
        engine.save_16bit_model(folder, name)
    states = [engine.module_state_dict(), engine._zero3_consolidated_16bit_state_dict()]
    engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True)
    found: dict[str, Any] = {"states": [None if state is None else sums(state) for state in states]}
    if hasattr(engine.module, "save_pretrained"):
        engine.module.save_pretrained(f"{folder}/pretrained")
        prompt = torch.tensor([[0, 3, 5]])
        length = 5 + 3 * rank if world > 1 else 11  # ranks generate different numbers of tokens
        options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with unwrap_model_for_generation(engine) as model:
            inside = model.generate(prompt, max_new_tokens=length, **options)[0].tolist()
        alone = engine.module.generate(prompt, max_new_tokens=length, **options)[0].tolist()
        found["tokens"] = [inside, alone]
    train(engine, range(2, 3), rank, world)
    found["last"] = sums(dict(whole_weights(engine.optimizer)))
    engine.save_checkpoint(folder)
    engine.destroy()
    return found


class External(nn.Module):
    """The second layer also uses the weight of the first one, which is a part of another block."""

    class Second(nn.Module):
        def __init__(self, first: nn.Linear) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)
            self.__dict__["first"] = first  # not a submodule
            register_external_parameter(self, first.weight)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.own(hidden) + hidden @ self.first.weight

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([first, External.Second(first), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden)


def external(rank: int, world: int, stage: int, place: str) -> Any:
    """The weights of a model with an external parameter after three steps, and the error for a late call."""
    torch.manual_seed(0)
    engine = twinflow.initialize(model=External(), config=config(stage, place, world))[0]
    train(engine, range(3), rank, world)
    late = ""
    try:
        register_external_parameter(engine.module, engine.module.layers[2].weight)
    except ValueError as error:
        late = str(error)
    register_external_parameter(engine.module, engine.module.head.weight)
    state = sums(dict(whole_weights(engine.optimizer)))
    saved = error_of(lambda: torch.save(engine.module.state_dict(), io.BytesIO()))
    engine.destroy()
    return {"state": state, "late": late, "saved": saved}


def again(rank: int, world: int, stage: int, place: str) -> Any:
    """The weights of a model that a second engine trains after the first one is destroyed. With weights on the hosts:
    the errors of this, and of other uses of the model.
    """
    engine = engine_of("plain", stage, place, world)
    train(engine, range(1), rank, world)
    engine.destroy()
    model = engine.module

    def second() -> Any:
        return twinflow.initialize(model=model, config=config(stage, place, world))[0]

    if place == "host":
        calls: Any = (
            lambda: TwinOptimizer(model.double()),
            second,
            model.state_dict,
            lambda: model(tokens_of(0, 0, 1)),
        )
        return [error_of(call) for call in calls]
    other = second()
    train(other, range(1, 3), rank, world)
    state = sums(dict(whole_weights(other.optimizer)))
    other.destroy()
    return state


def loading(rank: int, world: int, kind: str, stage: int, place: str) -> Any:
    """A user's own load_state_dict() of whole weights, before the first step and between steps."""
    engine = engine_of(kind, stage, place, world)
    torch.manual_seed(1)
    other = copy.deepcopy(make(kind))
    state = {name: value + 0.125 if value.is_floating_point() else value for name, value in other.state_dict().items()}
    found = []
    for first in (0, 2):
        missing = engine.module.load_state_dict(state)
        found.append([list(missing.missing_keys), list(missing.unexpected_keys)])
        loaded = sums(dict(whole_weights(engine.optimizer)))
        train(engine, range(first, first + 2), rank, world)
    part = next(module for name, module in engine.module.named_modules() if isinstance(module, nn.Embedding))
    part.load_state_dict({"weight": torch.full(part.weight.shape, 0.25)})
    master = safe_get_full_fp32_param(part.weight)
    assert master is not None
    train(engine, range(4, 5), rank, world)
    last = sums(dict(whole_weights(engine.optimizer)))
    engine.destroy()
    return {"keys": found, "loaded": loaded, "master": master.flatten().tolist(), "last": last}


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def loading_mistakes(rank: int, world: int, place: str) -> Any:
    """load_state_dict() of different values, with assign=True, with a wrong shape, and on one rank only."""
    meeting.PATIENCE_S = 2.0
    engine = engine_of("plain", 3, place, world)
    state = dict(make("plain").state_dict())  # without metadata, in which torch keeps `assign`
    wrong = {**state, "embed.weight": torch.zeros(SYMBOLS + 1, WIDTH)}
    calls = [
        lambda: engine.module.load_state_dict({name: value + rank for name, value in state.items()}),
        lambda: engine.module.load_state_dict(state, assign=True),
        lambda: engine.module.load_state_dict(wrong),
        lambda: engine.module.load_state_dict(state) if rank == 0 else None,
    ]
    errors = [error_of(call) for call in calls]
    torch.distributed.barrier()  # otherwise the next call of rank 1 would meet the last one of rank 0
    engine.module.load_state_dict(state)
    train(engine, range(1), rank, world)
    engine.destroy()
    return errors


def moving(rank: int, world: int, with_optimizer: bool) -> Any:
    """to(), float(), half() and double() of a module whose rows are divided, during training and after it."""
    more = {} if with_optimizer else {"optimizer": None}
    engine = engine_of("plain", 3, "device", world, **more)
    module = engine.module
    if with_optimizer:
        train(engine, range(1), rank, world)
        for call in (lambda: module.to("cpu"), module.float, module.cpu, lambda: module.layers[0].to(torch.float32)):
            call()
        errors = [error_of(call) for call in (module.half, module.layers[0].double)]
        kept = [str(value.dtype) for value in module.state_dict().values()]
        train(engine, range(1, 2), rank, world)
    else:
        errors, kept = [], []
    before = sums(dict(whole_weights(engine.optimizer if with_optimizer else module)))
    if with_optimizer:
        engine.destroy()
    module.to("cpu")
    if with_optimizer:
        module.float()
    else:  # after the first forward, fully_shard() of torch raises an error in a forward in another precision
        module.double()
    after = dict(whole_weights(module))
    with torch.no_grad():
        logits = module(tokens_of(0, 0, 1))
    module.double()
    with GatheredParameters([module.embed.weight]):
        shape = list(module.embed.weight.shape)
    whole = make("plain").to(logits.dtype)
    if rank == 0:
        whole.load_state_dict(after)
    dtypes = [str(param.dtype) for param in module.parameters()]
    return {
        "errors": errors,
        "kept": kept,
        "same": sums(after) == before,
        "dtypes": sorted(set(dtypes)),
        "is_equal": rank > 0 or bool(torch.allclose(logits, whole(tokens_of(0, 0, 1)))),
        "shape": shape,
        "copied": error_of(lambda: copy.deepcopy(module)),
    }


def writing_rows(rank: int, world: int, stage: int) -> Any:
    """Operations on the parameters themselves, which torch runs on the rows of each rank."""
    engine = engine_of("plain", stage, "device", world)
    train(engine, range(1), rank, world)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.mul_(1.5)
    master = safe_get_full_fp32_param(engine.module.embed.weight)
    assert master is not None
    train(engine, range(1, 3), rank, world)
    last = sums(dict(whole_weights(engine.optimizer)))
    engine.destroy()
    return {"master": master.flatten().tolist(), "last": last}


def own_loop(rank: int, world: int, stage: int) -> Any:
    """A loop that averages weights from the start, clips gradients itself and writes to weights in place."""
    engine = engine_of("plain", stage, "device", world, gradient_clipping=0.0)
    params = list(engine.module.parameters())
    with GatheredParameters(params):  # before the first forward
        average = [param.detach().clone() for param in params]
    norms = []
    for step in range(5):
        engine.backward(loss_of(engine, tokens_of(step, rank, world)))
        norms.append(float(nn.utils.clip_grad_norm_(engine.module.parameters(), 0.2)))
        engine.step()
        with torch.no_grad():
            if step < 4:  # the last weights are those of the optimizer
                for param in params:
                    param.clamp_(-0.3, 0.99)
            with GatheredParameters(params):
                for mean, param in zip(average, params, strict=True):
                    mean.lerp_(param, 0.2)
    last = sums(dict(whole_weights(engine.optimizer)))
    found = {"norms": norms, "average": [mean.double().sum().item() for mean in average], "last": last}
    engine.destroy()
    return found


def own_gradients(rank: int, world: int, stage: int, accumulation: int) -> list[str]:
    """What a rank says to a loop that reads `.grad`: the warning or the error."""
    engine = engine_of("plain", stage, "device", world, gradient_accumulation_steps=accumulation)
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(accumulation):
            engine.backward(loss_of(engine, tokens_of(step, rank, world)[: 12 // accumulation // world]))
            engine.step() if step + 1 < accumulation else None
        try:
            nn.utils.clip_grad_norm_(engine.module.parameters(), 0.2)
        except RuntimeError as error:
            said.append(str(error))
    engine.destroy()
    return [*said, *(str(one.message) for one in caught)]


def left_gradients(rank: int, world: int, max_grad_norm: float | None) -> list[str]:
    """What an optimizer says at its start if the loop gets the gradients of this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TwinOptimizer(nn.Linear(4, 4), lr=1e-2, early=False, max_grad_norm=max_grad_norm, zero=Zero(2)).close()
    return [str(one.message) for one in caught]
