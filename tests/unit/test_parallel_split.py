# SPDX-License-Identifier: Apache-2.0
"""A made model as a pipeline: same names, same losses, same gradients as the model itself, on any number of ranks.

All ranks are in this process; each splits a copy of its own, as processes would. Values are handed on by hand.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinflow.models.gpt import GPT, Block, GPTConfig
from twinflow.offload.blocks import find_blocks
from twinflow.offload.materialize import materialize
from twinflow.parallel import Part, PipelineModule, profile_layers, split_model
from twinflow.parallel.specs import type_name
from twinflow.parallel.split import parts_of

LAYOUTS = [("1f1b", 1, 1), ("1f1b", 2, 1), ("gpipe", 3, 1), ("interleaved", 2, 2), ("zbv", 2, 2)]
layouts = pytest.mark.parametrize(("schedule", "num_ranks", "num_chunks"), LAYOUTS)
VOCAB = 32


def make_gpt(tied: bool = True, again: bool = False, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(VOCAB, 16, 4, 16, 2, dropout=dropout, tied=tied, recompute="full" if again else "none")
    return GPT(config)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (2, 12), generator=generator), torch.randint(VOCAB, (2, 12), generator=generator)


def split(model: nn.Module, schedule: str, num_ranks: int, num_chunks: int, **options: Any) -> list[PipelineModule]:
    options |= {"schedule": schedule, "num_chunks": num_chunks}
    return [split_model(copy.deepcopy(model), num_ranks, index, **options) for index in range(num_ranks)]


def last_of(ranks: Sequence[PipelineModule]) -> PipelineModule:
    return next(module for module in ranks if module.has_last)


def forward(ranks: Sequence[PipelineModule], value: Any) -> Any:
    owner = {stage: module for module in ranks for stage in module.stages}
    for stage in range(ranks[0].num_stages):
        value = owner[stage](stage, value)
    return value


def train(ranks: Sequence[PipelineModule], ids: Tensor, target: Tensor) -> Tensor:
    loss_fn = last_of(ranks).loss_fn
    assert loss_fn is not None
    loss: Tensor = loss_fn(forward(ranks, ids), target)
    loss.backward()
    return loss.detach()


def grads(ranks: Sequence[PipelineModule]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for module in ranks:
        for local, param in module.named_parameters():
            name = module.aliases.get(local, local)
            assert param.grad is not None, local
            sums[name] = sums[name] + param.grad if name in sums else param.grad
    return sums


def check_names(ranks: Sequence[PipelineModule], model: nn.Module) -> None:
    """All of the model's tensors, each on one rank, but for ties."""
    expected, seen = dict(model.named_parameters()), []
    for module in ranks:
        for local, param in module.named_parameters():
            name = module.aliases.get(local, local)
            seen.append(name)
            assert param.equal(expected[name]), local
            assert param.equal(model.get_parameter(local)), "the name here is one that the model knows"
    assert set(seen) == set(expected)
    ties = {tie.name: tie.ranks for module in ranks for tie in module.ties}
    assert len(seen) == len(expected) + sum(len(holders) - 1 for holders in ties.values())
    assert set().union(*(module.state_dict() for module in ranks)) == set(model.state_dict())


def check_training(
    ranks: Sequence[PipelineModule], model: nn.Module, truth: Tensor, target: Tensor, ids: Tensor
) -> None:
    """Losses and gradients of the model, which has had its backward."""
    torch.manual_seed(9)
    assert train(ranks, ids, target).equal(truth)
    found = grads(ranks)
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=0, atol=0, msg=name)


@layouts
@pytest.mark.parametrize("tied", [True, False])
def test_gpt(schedule: str, num_ranks: int, num_chunks: int, tied: bool) -> None:
    model = make_gpt(tied, dropout=0.1)
    ranks = split(model, schedule, num_ranks, num_chunks)
    check_names(ranks, model)
    ids, target = batch()
    torch.manual_seed(9)
    truth = model(ids, target).loss
    truth.backward()
    check_training(ranks, model, truth, target, ids)


@pytest.mark.parametrize("tied", [True, False])
def test_ties_of_a_gpt(tied: bool) -> None:
    first, middle, last = split(make_gpt(tied), "1f1b", 3, 1)
    assert middle.ties == ()
    found = [(tie.name, tie.local, tie.ranks) for module in (first, last) for tie in module.ties]
    name = "token_embedding.weight"
    assert found == ([(name, name, (0, 2)), (name, "head.weight", (0, 2))] if tied else [])
    assert last.aliases == ({"head.weight": name} if tied else {})
    if tied:
        assert last.get_parameter(last.ties[0].local) is last.get_parameter("head.weight")
    both = split(make_gpt(tied), "zbv", 2, 2)[0]  # both ends on one rank: one parameter
    assert both.ties == ()
    assert (both.get_parameter("head.weight") is both.get_parameter(name)) == tied


def test_blocks_of_a_split_gpt_are_blocks_to_offload() -> None:
    ranks = split(make_gpt(), "1f1b", 2, 1)
    found = [[block.name for block in find_blocks(module)] for module in ranks]
    assert [name for names in found for name in names] == [f"blocks.{i}" for i in range(4)]
    assert all(found)


@pytest.mark.parametrize(("interval", "again", "expected"), [(0, False, 1), (1, False, 2), (3, False, 2), (0, True, 2)])
@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("zbv", 2)])
def test_block_forwards(
    monkeypatch: pytest.MonkeyPatch, interval: int, again: bool, expected: int, schedule: str, num_chunks: int
) -> None:
    model = make_gpt(again=again, dropout=0.1)
    ids, target = batch()
    torch.manual_seed(9)
    truth = model(ids, target).loss
    truth.backward()
    ranks = split(model, schedule, 2, num_chunks, activation_checkpoint_interval=interval)
    calls: list[Block] = []
    plain = Block.forward
    monkeypatch.setattr(Block, "forward", lambda block, x: calls.append(block) or plain(block, x))
    check_training(ranks, model, truth, target, ids)
    assert len(calls) == expected * 4
    calls.clear()
    with torch.no_grad():
        forward(ranks, ids)
    assert len(calls) == 4


@layouts
def test_outputs_without_targets(schedule: str, num_ranks: int, num_chunks: int) -> None:
    model = make_gpt().eval()
    ranks = split(model, schedule, num_ranks, num_chunks)
    assert not any(module.training for module in ranks)
    with torch.no_grad():
        assert last_of(ranks).finish(forward(ranks, batch()[0])).equal(model(batch()[0]).logits)


def test_the_loss_runs_under_the_modules_hooks() -> None:
    (module,) = split(make_gpt(), "1f1b", 1, 1)
    runs: list[Any] = []
    module.register_forward_pre_hook(lambda _, args: runs.append(args[0]))
    train([module], *batch())
    assert runs == [0, -1]


def test_what_other_ranks_have_is_let_go() -> None:
    model = make_gpt()
    kept = split_model(model, 2, 0)
    watched = [weakref.ref(param) for param in (*model.blocks[3].parameters(), *model.norm.parameters())]
    assert kept.get_parameter("blocks.0.mlp.up.weight") is model.blocks[0].mlp.up.weight  # no copy
    del model
    gc.collect()
    assert not any(ref() is not None for ref in watched)


def test_a_gpt_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = make_gpt()
    ranks = [split_model(model, 2, index) for index in range(2)]
    for module in ranks:
        materialize(module, "cpu")
    assert not any(param.is_meta for module in ranks for param in module.parameters())
    assert forward(ranks, batch()[0]).isfinite().all()


def test_a_deep_copy_runs_its_own_modules() -> None:
    (module,) = split(make_gpt(), "1f1b", 1, 1)
    clone = copy.deepcopy(module)
    nn.init.zeros_(clone.get_parameter("head.weight"))
    assert not clone.finish(forward([clone], batch()[0])).any()
    assert module.finish(forward([module], batch()[0])).any()


def test_profile_of_a_split_model() -> None:
    (module,) = split(make_gpt(), "1f1b", 1, 1)
    seconds = profile_layers(module, batch()[0])
    assert len(seconds) == 6
    made = split_model(make_gpt(), 2, 0, partition_method="profile", layer_seconds=[9, 1, 1, 1, 1, 9])
    assert made.bounds == (0, 3, 6)
    assert split_model(make_gpt(), 2, 0, partition_method="type:block").bounds[1] == 3


class Strange(nn.Module):
    pass


def loss_part(*names: str) -> Part:
    return Part({name: nn.Linear(1, 1) for name in names}, lambda x, target: x, is_loss=True)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"method pipeline_parts\(\)"):
        split_model(Strange(), 1, 0)
    with pytest.raises(ValueError, match="at most 6, the number of layers"):
        split_model(make_gpt(), 7, 0)
    with pytest.raises(ValueError, match="at most the model's context"):
        forward(split(make_gpt(), "1f1b", 1, 1), torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ValueError, match="Layer 0 is a Part with is_loss=True, which must be the last of the"):
        PipelineModule([loss_part("a"), nn.Linear(1, 1)], 1)
    with pytest.raises(ValueError, match="Layer 1 is a Part with is_loss=True, which must not be used with loss_fn"):
        PipelineModule([nn.Linear(1, 1), loss_part("a")], 1, loss_fn=print)
    with pytest.raises(ValueError, match="Two different modules in the parts have the name 'a'"):
        PipelineModule([Part({"a": nn.Linear(1, 1)}, print), loss_part("a")], 1)


# Models of Hugging Face.

SHAPE = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 24}
TOKENS = {"vocab_size": VOCAB, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
GROUPED = {**SHAPE, **TOKENS, "num_key_value_heads": 2}
MIXED = ["sliding_attention", "full_attention"] * 2
HF: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**TOKENS, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "attention_dropout": 0.1}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4, "pad_token_id": 2}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "layer_types": MIXED},
    ),
}


def make_hf(name: str, attention: str = "sdpa") -> Any:
    transformers = pytest.importorskip("transformers", minversion="5")
    model, config, options = HF[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**options, attn_implementation=attention)
    return getattr(transformers, model)(made)


def hf_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    torch.manual_seed(9)
    loss: Tensor = model(input_ids=ids, labels=labels, use_cache=False).loss
    return loss


@pytest.mark.parametrize("name", HF)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("schedule", "num_ranks", "num_chunks"), [("1f1b", 1, 1), ("1f1b", 3, 1), ("zbv", 2, 2)])
def test_hugging_face(name: str, attention: str, schedule: str, num_ranks: int, num_chunks: int) -> None:
    model = make_hf(name, attention).train()
    options = {"activation_checkpoint_interval": 1} if num_ranks == 3 else {}
    ranks = split(model, schedule, num_ranks, num_chunks, **options)
    check_names(ranks, model)
    ids, labels = batch()
    labels[0, :5] = -100
    truth = hf_loss(model, ids, labels)
    truth.backward()
    check_training(ranks, model, truth, labels, ids)
    tied = name in ("gpt2", "llama-tied")
    assert bool(ranks[0].ties) == (tied and schedule != "zbv" and num_ranks > 1)
    for module in (model, *ranks):
        module.eval()
    with torch.no_grad():
        assert last_of(ranks).finish(forward(ranks, ids)).equal(model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_rank_lets_go_of_a_transformers_model(name: str) -> None:
    model = make_hf(name)
    kept = split_model(model, 2, 0)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    watched = [weakref.ref(param) for param in layers[-1].parameters()]
    first = next(layers[0].parameters())
    assert any(param is first for param in kept.parameters())  # no copy
    assert [block.name.rpartition(".")[2] for block in find_blocks(kept)] == ["0", "1"]
    del model, layers, first
    gc.collect()
    assert not any(ref() is not None for ref in watched)


def test_a_deep_copy_of_a_transformers_model_runs_its_own_modules() -> None:
    (module,) = split(make_hf("llama"), "1f1b", 1, 1)
    clone = copy.deepcopy(module)
    nn.init.zeros_(clone.get_parameter("lm_head.weight"))
    assert not clone.finish(forward([clone], batch()[0])).any()
    assert module.finish(forward([module], batch()[0])).any()


def test_a_subclass_of_a_known_model() -> None:
    model = make_hf("llama")
    base: Callable[..., Any] = type(model)
    mine = type("Mine", (base,), {})(model.config)  # type: ignore[arg-type]
    assert [type_name(part) for part in parts_of(mine)][:2] == ["Embedding", "LlamaDecoderLayer"]


def ten_times(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = super(type(self), self).forward(*args, **kwargs)
    output.loss = 10.0 * output.loss
    return output


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen2"])
def test_a_subclass_with_its_own_forward_is_not_split_as_its_base_class(name: str) -> None:
    model = make_hf(name)
    base: Callable[..., Any] = type(model)
    mine = type("TenTimes", (base,), {"forward": ten_times})(model.config)  # type: ignore[arg-type]
    reason = rf"TenTimes with its own forward\(\) .*pipeline stages.*{type(model).__name__}\.forward\(\) does"
    with pytest.raises(ValueError, match=reason):
        parts_of(mine)
    mine.pipeline_parts = lambda: parts_of(model)  # a recipe of its own
    assert len(parts_of(mine)) == 5
    kind = type(model.base_model)
    inner = model.base_model
    inner.__class__ = type("Inner", (kind,), {"forward": ten_times})
    with pytest.raises(ValueError, match=rf"Inner with its own forward\(\).*{kind.__name__}\.forward\(\) does"):
        parts_of(model)
    inner.__class__ = kind
    assert len(parts_of(model)) == 5
    model.forward = model.forward  # replaced on the instance
    with pytest.raises(ValueError, match="with its own forward"):
        parts_of(model)


class Doubled(GPT):
    """Inherits the parts of GPT, but not its forward."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        return super().forward(tokens, targets)._replace(loss=torch.zeros(()))


class Redone(Doubled):
    """With parts of its own."""

    def pipeline_parts(self) -> list[Part]:
        return super().pipeline_parts()


def test_parts_of_a_base_class() -> None:
    config = make_gpt().config
    with pytest.raises(ValueError, match=r"Doubled with its own forward\(\) cannot be used with pipeline stages"):
        split_model(Doubled(config), 2, 0)
    assert len(parts_of(Redone(config))) == len(parts_of(GPT(config)))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = make_hf(name)
    whole = split_model(copy.deepcopy(model), 1, 0)
    ranks = [split_model(copy.deepcopy(model), 2, index) for index in range(2)]
    for module in (model, whole, *ranks):
        torch.manual_seed(4)
        materialize(module, "cpu")
    for local, param in whole.named_parameters():
        assert param.equal(model.get_parameter(local)), local
    assert not any(param.is_meta for module in ranks for param in (*module.parameters(), *module.buffers()))
    stds = [param.std() for module in ranks for param in module.parameters() if param.dim() > 1]
    assert all(0.001 < std < 0.03 for std in stds)  # as the model's own _init_weights has it


# Models whose own forward cannot be divided.


def run_by_hand(model: Any, *inputs: Any) -> Tensor:
    ranks = split(model, "1f1b", 2, 1)
    loss_fn = last_of(ranks).loss_fn
    assert loss_fn is not None
    loss: Tensor = loss_fn(forward(ranks, inputs if len(inputs) > 1 else inputs[0]), batch()[1])
    return loss


def test_a_layer_that_gets_what_another_one_computed_is_refused() -> None:
    model = make_hf("llama")
    base = model.model
    plain = type(base).forward

    def with_embeddings(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        return plain(self, inputs_embeds=self.embed_tokens(input_ids), noise=self.embed_tokens(input_ids), **kwargs)

    with_embeddings.__module__ = plain.__module__
    kind: Any = type("Model", (type(base),), {"forward": with_embeddings})
    base.__class__ = kind
    with pytest.raises(ValueError, match=r"The argument noise of LlamaDecoderLayer .*on another stage"):
        run_by_hand(model, batch()[0])


def test_a_loss_with_the_embeddings_is_refused() -> None:
    model = make_hf("llama")
    plain = type(model).forward

    def with_embeddings(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        output = plain(self, inputs_embeds=embedded, labels=labels, **kwargs)
        output.loss = output.loss + embedded.square().mean()
        return output

    with_embeddings.__module__ = plain.__module__
    model.__class__ = type("Penalty", (type(model),), {"forward": with_embeddings})
    with pytest.raises(ValueError, match=r"The loss cannot be used with pipeline stages, .*the embeddings"):
        run_by_hand(model, batch()[0])


def test_a_weight_of_another_stage_is_refused() -> None:
    model = make_hf("llama")
    plain = type(model).forward

    def penalty(self: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = plain(self, labels=labels, **kwargs)
        output.loss = output.loss + self.model.embed_tokens.weight.square().mean()
        return output

    penalty.__module__ = plain.__module__
    model.__class__ = type("Penalty", (type(model),), {"forward": penalty})
    with pytest.raises(
        ValueError, match=r"it reads the attribute square of model.embed_tokens.weight, .*another stage"
    ):
        run_by_hand(model, batch()[0])


def test_a_forward_that_needs_a_layer_of_another_stage_is_refused() -> None:
    model = make_hf("llama")
    base = model.model
    plain = type(base).forward

    def reads(self: Any, **kwargs: Any) -> Any:
        assert self.embed_tokens.weight.device.type == "cpu"  # may be read on all stages
        assert self.layers[0].self_attn.is_causal
        return plain(self, **kwargs)

    reads.__module__ = plain.__module__
    base.__class__ = type("Model", (type(base),), {"forward": reads})
    with pytest.raises(ValueError, match=r"forward of LlamaForCausalLM .*self_attn of model.layers.0, .*another stage"):
        run_by_hand(model, batch()[0])


@pytest.mark.parametrize(("name", "value"), [("layerdrop", 0.1), ("output_router_logits", True)])
def test_configs_that_need_all_layers_are_refused(name: str, value: Any) -> None:
    model = make_hf("llama")
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match=f"config.{name}={value!r} cannot be used with pipeline stages, because"):
        parts_of(model)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaModel without an argument labels cannot be used with pipeline stages"):
        parts_of(make_hf("llama").model)


def test_inputs_of_a_transformers_model() -> None:
    ids = batch()[0]
    positions = torch.arange(12).expand(2, 12)
    with pytest.raises(ValueError, match=r"The second input of the model .*attention mask of zeros and ones"):
        run_by_hand(make_hf("llama"), ids, positions)
    with pytest.raises(ValueError, match="The number of inputs is 3, but must be at most 2"):
        run_by_hand(make_hf("llama"), ids, torch.ones_like(ids), ids)
    model = make_hf("gpt2").eval()
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    truth = model(input_ids=ids, attention_mask=mask, labels=batch()[1], use_cache=False).loss
    assert run_by_hand(model, ids, mask).equal(truth)
