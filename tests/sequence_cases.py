# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of sequence parallelism: models on parts of sequences, and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import twinflow
from twinflow.attention import BSLongformerSparsityConfig, sparsify
from twinflow.compat import groups
from twinflow.integrations.tiled import tile_sequence
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.parallel import split_sequence

NUM_TOKENS = 32
NUM_HEADS = 4
SHAPE = GPTConfig(vocab_size=64, context=NUM_TOKENS, num_layers=2, hidden=32, num_heads=NUM_HEADS)


def pattern() -> Any:
    return BSLongformerSparsityConfig(
        num_heads=NUM_HEADS, block=16, num_sliding_window_blocks=1, attention="unidirectional"
    )


def rows(num_rows: int, seed: int, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
    """Tokens and targets. The sequences have different numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (num_rows, num_tokens + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(num_rows):
        targets[row, : 3 * row + 2] = -100
    return tokens[:, :-1], targets


def hugging_face(kind: str, **changes: Any) -> Any:
    transformers: Any = __import__("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64}
    sizes |= {"num_attention_heads": NUM_HEADS, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def model_of(case: dict[str, Any]) -> Any:
    """`case`: the kind of the model, with its changes, and what is switched on."""
    torch.manual_seed(0)
    kind = case.get("model", "GPT")
    model = GPT(SHAPE) if kind == "GPT" else hugging_face(kind, **case.get("changes", {}))
    model.to(torch.float32 if case.get("dtype") == 32 else torch.float64)
    if case.get("sparse"):
        sparsify(model, pattern())
    if case.get("tiled"):
        tile_sequence(model, 4)
    return model


def batch_of(case: dict[str, Any], num_rows: int, seed: int) -> Any:
    num_tokens = case.get("tokens", NUM_TOKENS)
    tokens, targets = rows(num_rows, seed, num_tokens)
    if case.get("model", "GPT") == "GPT":
        return tokens, targets
    labels = torch.nn.functional.pad(targets, (1, 0), value=-100)[:, :-1]
    batch = {"input_ids": tokens, "labels": labels}
    if case.get("packed"):
        starts = case["packed"]
        positions = torch.cat([torch.arange(b - a) for a, b in zip(starts, [*starts[1:], num_tokens], strict=True)])
        batch["position_ids"] = positions[None].expand(num_rows, -1)
    if case.get("padded"):
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][:, -5:] = 0
        batch["labels"][:, -5:] = -100
    return batch


def run(model: Any, batch: Any) -> Any:
    return model(*batch) if isinstance(batch, tuple) else model(**batch, use_cache=False)


def gradients(rank: int, world: int, size: int, mode: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Loss and gradients, averaged over ranks, of one batch. Without ranks: of one process with the whole batch."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        model = model_of(case)
        num_rows = 1 if case.get("packed") else 2
        num_data = max(1, world // size) if dist.is_initialized() else case["data"]
        batches = [batch_of(case, num_rows, seed) for seed in range(num_data)]
        if not dist.is_initialized():
            batch = batches[0]
            if num_data > 1:
                batch = (
                    tuple(map(torch.cat, zip(*batches, strict=True)))
                    if isinstance(batch, tuple)
                    else {key: torch.cat([one[key] for one in batches]) for key in batch}
                )
            loss = run(model, batch).loss
            loss.backward()
            grads = [param.grad for param in model.parameters()]
        else:
            handle = split_sequence(model, size, mode)
            batch = handle.ranks.split(batches[handle.ranks.data])
            model.train()
            if case.get("checkpointed"):
                model.gradient_checkpointing_enable()
            loss = run(model, batch).loss
            handle.ranks.check_loss(loss)
            loss.backward()
            with torch.no_grad():
                alone = run(model, batch).loss  # an evaluation
                losses = [torch.zeros_like(alone) for _ in range(world)]
                dist.all_gather(losses, alone)
                assert len({float(one) for one in losses}) <= num_data
            grads = []
            for param in model.parameters():
                grad = param.grad if param.grad is not None else torch.zeros_like(param)
                dist.all_reduce(grad)
                grads.append(grad / world)
            handle.remove()
        found[name] = {"loss": loss.item(), "grads": [grad.flatten()[::7].tolist() for grad in grads]}
    return found


def config_of(size: int, mode: str, num_data: int = 1, stage: int = 2, **zero: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2 // num_data,
        "gradient_clipping": 0.5,
        "sequence_parallel_size": size,
        "sequence_mode": mode,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3}},
        "zero_optimization": {"stage": stage, **zero},
    }


def train(rank: int, world: int, cases: dict[str, dict[str, Any]], first: int = 0, last: int = 3) -> dict[str, Any]:
    """Losses and norms of the steps of the engine from `first` to `last`. A case has a config, and more options."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        torch.manual_seed(1)
        model = GPT(SHAPE)
        if case.get("sparse"):
            sparsify(model, pattern())
        if case.get("tiled"):
            tile_sequence(model, 4)
        engine, *_ = twinflow.initialize(model=model, config=case["config"])
        if case.get("load"):
            assert engine.load_checkpoint(case["load"])[0] is not None
            assert engine.global_steps == first
        micro = engine.train_micro_batch_size_per_gpu()
        assert (engine.train_batch_size(), engine.dp_world_size * micro) == (2, 2)
        losses, norms = [], []
        for step in range(first, last):
            batch: Any = tuple(part[engine.dp_rank * micro : (engine.dp_rank + 1) * micro] for part in rows(2, step))
            if engine.sequence is not None:
                batch = engine.sequence.split(batch)
            loss = engine(*(tensor.to(engine.device) for tensor in batch)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.get_global_grad_norm())
        if case.get("save"):
            engine.save_checkpoint(case["save"])
        found[name] = {"losses": losses, "norms": norms}
        engine.destroy()
    return found


def load_data(rank: int, world: int, size: int) -> dict[str, Any]:
    """The batches of the engine's loader on this rank."""
    config = {**config_of(size, "ulysses", num_data=world // size), "train_batch_size": 2 * world // size}
    config["train_micro_batch_size_per_gpu"] = 2
    data = [rows(1, seed) for seed in range(8)]
    samples = [(tokens[0], targets[0]) for tokens, targets in data]
    engine, _, loader, _ = twinflow.initialize(model=GPT(SHAPE), config=config, training_data=samples)
    assert loader is not None
    batches = [[tensor.tolist() for tensor in batch] for batch in loader]
    found = {"batches": batches, "data": engine.dp_rank, "num_data": engine.dp_world_size, "len": len(loader)}
    found |= groups_of(engine)
    engine.destroy()
    return found


def groups_of(engine: Any) -> dict[str, Any]:
    """The ranks of this engine by DeepSpeed's names, and a sum over those of the sequence."""
    groups.note_engine(engine)
    total = torch.tensor([2.0**engine.global_rank])
    dist.all_reduce(total, group=groups.get_sequence_parallel_group())
    own = [groups.get_sequence_parallel_rank(), groups.get_sequence_parallel_world_size()]
    every = [groups.get_sequence_data_parallel_rank(), groups.get_sequence_data_parallel_world_size()]
    is_world = groups.get_sequence_data_parallel_group() is dist.group.WORLD
    return {"sum": float(total), "own": own, "every": every, "is_world": is_world}


def errors(rank: int, world: int) -> dict[str, str]:
    """What is refused, and the text of the error."""
    found: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)

    def initialize(**config: Any) -> None:
        engine, *_ = twinflow.initialize(model=GPT(SHAPE), config={**config_of(2, "ulysses"), **config})
        engine.destroy()

    note("sum", lambda: initialize(gradient_allreduce_op="sum"))
    note("one bit", lambda: initialize(optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3}}))
    note("compiled", lambda: initialize(compile={"blocks": True}))
    note("tensor", lambda: initialize(tensor_parallel={"autotp_size": 2}, train_batch_size=2))
    note("size", lambda: initialize(sequence_parallel_size=3))
    note("another model", lambda: split_sequence(torch.nn.Sequential(torch.nn.Linear(2, 2)), 2))
    odd = GPTConfig(vocab_size=64, context=NUM_TOKENS, num_layers=1, hidden=30, num_heads=3)
    note("heads", lambda: split_sequence(GPT(odd), 2))
    note("ring dropout", lambda: split_sequence(GPT(GPTConfig(64, 32, 1, 32, 4, dropout=0.1)), 2, "ring"))
    note("window", lambda: split_sequence(hugging_face("Mistral", sliding_window=6), 2, "ring"))
    note("mode", lambda: split_sequence(GPT(SHAPE), 2, "star"))

    engine, *_ = twinflow.initialize(model=GPT(SHAPE), config=config_of(2, "ulysses"))
    assert engine.sequence is not None
    tokens, targets = rows(2, 0)
    note("whole sequences", lambda: engine(tokens[:, :16], targets[:, :16]))
    part, _ = engine.sequence.split((tokens, targets))
    logits = engine(part).logits
    own = logits.float().square().mean() * (rank + 1)
    note("a loss of one rank", lambda: engine.backward(own))
    sparsify(engine.module, pattern())
    note("replaced", lambda: engine(part))
    engine.destroy()

    model = hugging_face("Llama")
    handle = split_sequence(model, 2)
    batch = handle.ranks.split({"input_ids": tokens, "labels": tokens})
    note("no positions", lambda: model(input_ids=batch["input_ids"]))
    note("no shifted labels", lambda: model(**{**batch, "shift_labels": None}))
    left = torch.ones_like(tokens)
    left[:, 0] = 0
    note("left padding", lambda: handle.ranks.split({"input_ids": tokens, "attention_mask": left}))
    packed = torch.arange(16).repeat(2, 2)
    note("packed rows", lambda: handle.ranks.split({"input_ids": tokens, "position_ids": packed}))
    note("image", lambda: model(**batch, pixel_values=torch.zeros(2, 3, 4, 4)))
    note("router", lambda: model(**batch, output_router_logits=True))
    attend = __import__("transformers").AttentionInterface()[model.config._attn_implementation]
    layer, heads, keys = model.model.layers[0].self_attn, torch.zeros(2, 4, 16, 8), torch.zeros(2, 2, 16, 8)
    note("own mask", lambda: attend(layer, heads, keys, keys, torch.zeros(2, 1, 16, 16)))
    with torch.no_grad():
        note("cache", lambda: model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False))
    handle.remove()
    assert model.generate(tokens[:1, :4], max_new_tokens=2, do_sample=False, eos_token_id=None).shape == (1, 6)

    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = hugging_face("Llama", max_position_embeddings=20, rope_parameters=dynamic)
    handle = split_sequence(model, 2)
    note("length of rope", lambda: model(**batch))
    assert model(**handle.ranks.split({"input_ids": tokens[:, :20], "labels": tokens[:, :20]})).loss is not None
    handle.remove()
    with torch.device("meta"):
        others = other_models()
    for name, other in others.items():
        note(name, lambda other=other: split_sequence(other, 2))  # type: ignore[misc]
    return found


def other_models() -> dict[str, Any]:
    """Models of transformers whose results on parts of sequences would be others."""
    transformers: Any = __import__("transformers")
    llama4 = transformers.Llama4TextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
        no_rope_layers=[0],
        num_local_experts=2,
    )
    gemma3 = transformers.Gemma3Config(
        text_config={"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64},
        vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    )
    return {
        "positions of Bart": hugging_face("Bart"),
        "positions of Roberta": hugging_face("Roberta", is_decoder=True),
        "positions of Llama 4": transformers.Llama4ForCausalLM(llama4),
        "short convolution": hugging_face("Lfm2", layer_types=["conv", "full_attention"]),
        "lightning attention": hugging_face("MiniMax", num_local_experts=2),
        "images": transformers.Gemma3ForConditionalGeneration(gemma3),
        "cross attention": transformers.BertLMHeadModel(
            transformers.BertConfig(
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                vocab_size=64,
                is_decoder=True,
                add_cross_attention=True,
            )
        ),
    }
