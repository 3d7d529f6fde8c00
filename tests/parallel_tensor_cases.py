# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of tensor parallelism: a model split over them beside the same model whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from twinflow.activations.partitioned import Partition
from twinflow.activations.wrap import Checkpointed
from twinflow.attention import FixedSparsityConfig, sparsify
from twinflow.dist.group import Group, new_group
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.parallel import collectives
from twinflow.parallel.deferral import Deferral, defer
from twinflow.parallel.plans import plan_for
from twinflow.parallel.shard import even_shard, shard_of
from twinflow.parallel.tensor import parallelize, same_randoms, vocab_parallel_cross_entropy

BATCH, TOKENS, VOCAB, HIDDEN, HEADS = 2, 8, 32, 16, 4
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """One model, and how it is split."""

    model: str = "gpt"
    tied: bool = True
    dropout: float = 0.0
    sequence: bool = False
    loss: str = "own"  # by the model, or of its logits
    checkpointing: bool = False
    attention: str = "sdpa"
    num_layers: int = 2
    autocast: bool = False

    @property
    def name(self) -> str:
        """What is not as usual."""
        usual = asdict(Case())
        return " ".join(f"{key}={value}" for key, value in asdict(self).items() if value != usual[key]) or "gpt"


# Models and batches.


def make(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return stirred(_gpt(case) if case.model == "gpt" else _huggingface(case))


def stirred(model: nn.Module) -> nn.Module:
    """Biases too are not zero, and gradients not tiny."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model


def _gpt(case: Case) -> nn.Module:
    again = "full" if case.checkpointing else "none"
    shape = GPTConfig(VOCAB, TOKENS, case.num_layers, HIDDEN, HEADS, case.dropout, case.tied, again)
    return GPT(shape)


def _huggingface(case: Case) -> nn.Module:
    import transformers

    drop = case.dropout
    if case.model in ("llama", "qwen2", "mistral"):
        common: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "intermediate_size": 24}
        common |= {"attention_dropout": drop}
        kinds = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "mistral": "MistralConfig"}
    elif case.model == "gpt2":
        common = {"n_head": HEADS, "n_positions": TOKENS, "attn_pdrop": drop, "resid_pdrop": drop, "embd_pdrop": drop}
        kinds = {"gpt2": "GPT2Config"}
    else:
        common = {"num_attention_heads": HEADS, "intermediate_size": 24, "max_position_embeddings": TOKENS}
        common |= {"hidden_dropout_prob": drop, "attention_probs_dropout_prob": drop}
        kinds = {"bert": "BertConfig"}
    sizes = (
        {"n_embd": HIDDEN, "n_layer": 2} if case.model == "gpt2" else {"hidden_size": HIDDEN, "num_hidden_layers": 2}
    )
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, kinds[case.model])(
        vocab_size=VOCAB, tie_word_embeddings=case.tied, attn_implementation=case.attention, **sizes, **common, **tokens
    )
    auto = transformers.AutoModelForMaskedLM if case.model == "bert" else transformers.AutoModelForCausalLM
    model: nn.Module = auto.from_config(config)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_of(model: Any, case: Case, tokens: Tensor) -> Tensor:
    targets = tokens.roll(-1, 1).clone()
    targets[0, -2:] = -100
    if case.model == "gpt":
        if case.loss == "own":
            return model(tokens, targets).loss
        return F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
    padding = torch.ones_like(tokens)
    padding[1, -3:] = 0
    return model(input_ids=tokens, attention_mask=padding, labels=targets, use_cache=False).loss


# Comparing.


def whole_of(param: Tensor, value: Tensor, group: Group) -> Tensor:
    """All ranks' parts of a parameter's value or gradient, put together as its mark says."""
    shard = shard_of(param)
    if shard is None:
        return value
    rows = group.gather_rows(value.detach().contiguous().view(-1))
    whole = value.new_full(shard.whole_shape(value.shape), float("nan"))
    for rank, row in enumerate(rows):
        theirs = even_shard(shard.dim, shard.full, rank, shard.world, len(shard.ranges))
        start = 0
        for first, last in theirs.ranges:
            part = row.view(value.shape).narrow(shard.dim, start, last - first)
            whole.narrow(shard.dim, first, last - first).copy_(part)
            start += last - first
    return whole


def is_same(value: Tensor, group: Group) -> bool:
    rows = group.gather_rows(value.detach().contiguous().view(-1).view(torch.uint8))
    return bool((rows == rows[0]).all())


def ties_of(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return sorted(found for found in names.values() if len(found) > 1)


@dataclass
class Found:
    """The largest differences to one process."""

    loss: float = 0.0
    grad: float = 0.0
    grad_at: str = ""
    value: float = 0.0
    spread: float = 0.0  # of the losses over steps: what is compared does change
    is_same: bool = True  # what is replicated has the same bits on all ranks
    num_split: int = 0
    ties: bool = True

    def see(self, name: str, gap: float) -> None:
        if not gap <= self.grad:  # also a NaN
            self.grad, self.grad_at = gap, name


def compare(case: Case, group: Group) -> dict[str, Any]:
    """Some steps of SGD, of both."""
    whole = make(case)
    model = copy.deepcopy(whole)
    parallelize(model, plan_for(model), group, sequence=case.sequence)
    found = Found(ties=ties_of(model) == ties_of(whole))
    found.num_split = sum(shard_of(param) is not None for param in model.parameters())
    losses = []
    for step in range(NUM_STEPS):
        tokens = torch.randint(1, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))
        pair = []
        for one in (whole, model):
            torch.manual_seed(50 + step + (group.rank if one is model else 0))
            if one is model:
                same_randoms(group)
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = loss_of(one, case, tokens)
            loss.backward()
            pair.append(loss.detach())
        losses.append(pair[0].item())
        found.loss = max(found.loss, abs(pair[0] - pair[1]).item())
        found.is_same &= is_same(pair[1], group)
        _compare_params(whole, model, group, found)
    found.spread = max(losses) - min(losses)
    return asdict(found)


def _compare_params(whole: nn.Module, model: nn.Module, group: Group, found: Found) -> None:
    """Gradients, and values after a step with them."""
    truth = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        theirs = truth[name]
        assert (param.grad is None) == (theirs.grad is None), name
        if param.grad is not None and theirs.grad is not None:
            found.see(name, abs(whole_of(param, param.grad, group) - theirs.grad).max().item())
            if shard_of(param) is None:
                found.is_same &= is_same(param.grad, group)
            with torch.no_grad():
                param -= 0.1 * param.grad
                theirs -= 0.1 * theirs.grad
        found.value = max(found.value, abs(whole_of(param, param, group) - theirs).max().item())


def compare_all(rank: int, world: int, cases: list[Case]) -> dict[str, Any]:
    group = new_group("gloo")
    return {case.name: compare(case, group) for case in cases}


# Parts.


def parts(rank: int, world: int, cases: list[Case]) -> dict[str, Any]:
    """Everything that does not need transformers, in one start."""
    group = new_group("gloo")
    return {
        "gpt": {case.name: compare(case, group) for case in cases},
        "collectives": collectives_gap(group),
        "half": half_sums(group),
        "odd": refused(lambda: collectives.split_sequence(torch.zeros(1, 2 * world + 1, 2), group)),
        "vocab": {str(dtype)[6:]: vocab_gap(group, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)},
        "vocab_memory": vocab_largest(group),
        "vocab_outside": vocab_outside(group),
        "sparse": sparse_gap(group),
        "partitioned": {str(is_split): partitioned(group, is_split) for is_split in (False, True)},
        "deferred": deferred(group),
        "hooks": seen_by_hooks(group),
        "refusals": refusals(group),
        "meta": on_meta(group),
        "bytes": step_bytes(group),
        "own_plan": own_plan(group),
        "found_dropout": {kind: found_dropout(group, kind) for kind in KINDS},
        "inner": [refused(lambda k=kind: found_dropout(group, k)) for kind in ("inner", "inner reentrant")],  # type: ignore[misc]
        "unsplit_random": refused(lambda: alpha_between(group)),
        "outside": [token_error(group, tokens) for tokens in ([3, VOCAB], [-1, 3], [3, VOCAB - 1])],
    }


def refused(work: Callable[[], object]) -> str:
    """What a refusal says."""
    try:
        work()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def _of_rank(rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def _whole_of_ranks(how: str, tensors: list[Tensor], rank: int, dim: int) -> Tensor:
    """The truth of a collective, from what all ranks have."""
    if how == "same":
        return tensors[rank]
    if how == "join":
        return torch.cat(tensors, dim)
    whole = torch.stack(tensors).sum(0) if "sum" in how else tensors[rank]
    return whole.chunk(len(tensors), dim)[rank] if "part" in how else whole


def collectives_gap(group: Group) -> dict[str, float]:
    """Forward and backward of each against what it is said to be; every rank has another tensor and gradient."""
    pairs = {
        "copy_in": ("same", "sum", None),
        "reduce_out": ("sum", "same", None),
        "gather_sequence": ("join", "sum part", 1),
        "scatter_sequence": ("sum part", "join", 1),
        "split_sequence": ("part", "join", 1),
        "join_sequence": ("join", "part", 1),
        "join_sequence, -1": ("join", "part", -1),
    }
    gaps = {}
    for name, (there, back, dim) in pairs.items():
        shape = (3, 4 * group.world, 4 * group.world)
        xs = [_of_rank(rank, shape) for rank in range(group.world)]
        x = xs[group.rank].requires_grad_()
        call, *dims = name.split(", ")
        y = getattr(collectives, call)(x, group, *map(int, dims))
        wanted = _whole_of_ranks(there, [other.detach() for other in xs], group.rank, dim or 0)
        grads = [_of_rank(100 + rank, tuple(y.shape)) for rank in range(group.world)]
        y.backward(grads[group.rank])
        assert x.grad is not None
        assert y.shape == wanted.shape
        wanted_grad = _whole_of_ranks(back, grads, group.rank, dim or 0)
        gaps[name] = max(abs(y - wanted).max().item(), abs(x.grad - wanted_grad).max().item())
    return gaps


def half_sums(group: Group) -> bool:
    """256 and ones: in bf16 each one is lost, in fp32 their sum is not."""
    mine = torch.full((6,), 256.0 if group.rank == 0 else 1.0, dtype=torch.bfloat16)
    truth = torch.tensor(256.0 + group.world - 1).bfloat16()
    whole = collectives.summed(mine, group)
    part = collectives.summed_part(mine.repeat(group.world)[None], group, 1)
    return bool((whole == truth).all()) and bool((part == truth).all())


def _vocab_inputs(group: Group, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden units, the whole weight, this rank's rows, targets."""
    torch.manual_seed(5)
    hidden, weight = torch.randn(23, 7, dtype=dtype), torch.randn(8 * group.world, 7, dtype=dtype)
    weight[3] *= 20.0  # logits far apart
    targets = torch.randint(0, len(weight), (23,))
    targets[4:7] = -100
    rows = weight.chunk(group.world)[group.rank].clone()
    return hidden.requires_grad_(), weight.requires_grad_(), rows.requires_grad_(), targets


def vocab_gap(group: Group, dtype: torch.dtype) -> dict[str, Any]:
    hidden, weight, rows, targets = _vocab_inputs(group, dtype)
    loss = vocab_parallel_cross_entropy(hidden, rows, targets, group, chunk=5)
    (loss * 3.0).backward()
    wide, wide_weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    truth = F.cross_entropy(wide @ wide_weight.T, targets)
    (truth * 3.0).backward()
    assert None not in (hidden.grad, rows.grad)
    own = wide_weight.grad.chunk(group.world)[group.rank]
    with torch.no_grad():
        unseen = vocab_parallel_cross_entropy(hidden, rows, targets, group, chunk=23)
    return {
        "loss": abs(loss - truth).item(),
        "hidden": (abs(hidden.grad - wide.grad).max() / wide.grad.abs().max()).item(),
        "weight": (abs(rows.grad - own).max() / wide_weight.grad.abs().max()).item(),
        "chunks": (abs(unseen - loss) / loss).item(),  # the loss is about 20: a unit in the last place is 2e-6
        "is_same": is_same(hidden.grad, group) and is_same(loss, group),
        "dtypes": str(loss.dtype)[6:] == ("float64" if dtype == torch.float64 else "float32"),
    }


class _Largest(TorchDispatchMode):
    """The largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, out.numel() if isinstance(out, Tensor) else 0)
        return out


def vocab_largest(group: Group) -> list[int]:
    """Of 64 tokens over 256 symbols: what is made, and a chunk of logits."""
    hidden, rows = torch.randn(64, 2, requires_grad=True), torch.randn(256 // group.world, 2, requires_grad=True)
    with _Largest() as largest:
        vocab_parallel_cross_entropy(hidden, rows, torch.zeros(64, dtype=torch.long), group, chunk=8).backward()
    return [largest.numel, 8 * len(rows)]


def vocab_outside(group: Group) -> bool:
    """A target that nobody has is not passed over."""
    hidden, rows = torch.randn(2, 3), torch.randn(4, 3)
    loss = vocab_parallel_cross_entropy(hidden, rows, torch.tensor([0, 4 * group.world]), group)
    return bool(loss.isinf())


def sparse_gap(group: Group) -> dict[str, Any]:
    """Heads with patterns of their own, split."""
    torch.manual_seed(3)
    whole = stirred(GPT(GPTConfig(VOCAB, 64, 1, HIDDEN, HEADS)))
    dense, model = copy.deepcopy(whole), copy.deepcopy(whole)
    options: dict[str, Any] = {"num_local_blocks": 2, "num_different_global_patterns": 2}
    pattern = FixedSparsityConfig(HEADS, 16, different_layout_per_head=True, attention="unidirectional", **options)
    sparsify(whole, pattern)
    share = HEADS // group.world
    sparsify(model, pattern, heads=(group.rank * share, (group.rank + 1) * share))
    parallelize(model, plan_for(model), group)
    found = Found()
    tokens = torch.randint(0, VOCAB, (BATCH, 64), generator=torch.Generator().manual_seed(1))
    losses = [loss_of(one, Case(), tokens) for one in (whole, model, dense)]
    for loss in losses[:2]:
        loss.backward()
    _compare_params(whole, model, group, found)
    return {"loss": abs(losses[0] - losses[1]).item(), "grad": found.grad, "dense": abs(losses[0] - losses[2]).item()}


def partitioned(group: Group, sequence: bool) -> dict[str, Any]:
    """Checkpointed blocks whose inputs are kept in parts; with the sequence shared they are not the same."""
    case = Case(dropout=0.1)
    whole, model = make(case), make(case)
    parallelize(model, plan_for(model), group, sequence=sequence)
    kept: Any = Partition(group, min_bytes=1, is_checked=True)
    for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
        Checkpointed(f"blocks.{number}", block, kept)
    tokens = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % VOCAB
    if sequence:
        return {"error": refused(lambda: loss_of(model, case, tokens))}
    for one in (whole, model):
        torch.manual_seed(9)
        loss_of(one, case, tokens).backward()
    found = Found()
    _compare_params(whole, model, group, found)
    return {"grad": found.grad, "whole_bytes": kept.whole_bytes, "kept_bytes": kept.kept_bytes}


def deferred(group: Group) -> dict[str, Any]:
    """Weight gradients that come later, as zero-bubble schedules have it."""
    found, case = {}, Case(sequence=True)
    for order in ("before", "after"):
        whole, model, deferral = make(case), make(case), Deferral()
        if order == "before":
            defer(model, deferral)
        parallelize(model, plan_for(model), group, sequence=True)
        if order == "after":
            defer(model, deferral)
        tokens = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % VOCAB
        loss_of(whole, case, tokens).backward()
        with deferral.collecting() as batch:
            loss_of(model, case, tokens).backward()
        num_put_off = len(batch)
        batch.run()
        gaps = Found()
        _compare_params(whole, model, group, gaps)
        found[order] = [num_put_off, gaps.grad]
    return found


def seen_by_hooks(group: Group) -> bool:
    """Whoever takes gradients as they are accumulated, over two backwards, takes sums over the ranks."""
    case = Case(sequence=True, num_layers=1)
    model = make(case)
    parallelize(model, plan_for(model), group, sequence=True)
    seen: list[bool] = []
    for param in model.parameters():
        if shard_of(param) is None:
            param.register_post_accumulate_grad_hook(lambda p: seen.append(is_same(p.grad, group)))
    for step in range(2):
        tokens = (torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) + step) % VOCAB
        loss_of(model, case, tokens).backward()
    return len(seen) == 18 and all(seen)  # two times three norms, two biases and the positions


def _state(model: nn.Module) -> list[Any]:
    """What a refusal must leave alone."""
    params = [(name, id(param), tuple(param.shape)) for name, param in model.named_parameters()]
    return [params, [sorted(vars(module)) for module in model.modules()], repr(model)]


def refusals(group: Group) -> dict[str, Any]:
    """What is said of models that do not divide, and whether they are as they were."""
    good = plan_for(make(Case()))
    plans = {
        "vocabulary": (GPT(GPTConfig(31, 8, 1, 16, 4)), None),
        "heads": (GPT(GPTConfig(32, 8, 1, 18, 3)), None),
        "style": (make(Case()), {**good, "norm": "diagonal"}),
        "pattern": (make(Case()), {**good, "blocks.*.atention": "region"}),
        "kind": (make(Case()), {**good, "norm": "row"}),
        "tie": (make(Case()), {"token_embedding": "vocab"}),
        "attribute": (make(Case()), {**good, "blocks.*.attention": "attention:heads"}),
        "stream": (make(Case()), {key: style for key, style in good.items() if "stream" not in style}),
    }
    found = {}
    for name, (model, plan) in plans.items():
        before, chosen = _state(model), plan or plan_for(model)
        said = refused(lambda m=model, p=chosen: parallelize(m, p, group, sequence=True))  # type: ignore[misc]
        found[name] = [said, _state(model) == before]
    twice = make(Case())
    parallelize(twice, good, group)
    before = _state(twice)
    found["twice"] = [refused(lambda: parallelize(twice, plan_for(twice), group)), _state(twice) == before]
    return found


def on_meta(group: Group) -> bool:
    """Shapes and marks without memory, the same as with it."""
    with torch.device("meta"):
        model = GPT(GPTConfig(VOCAB, TOKENS, 2, HIDDEN, HEADS))
    real = make(Case())
    for one in (model, real):
        next(iter(one.parameters())).requires_grad_(False)
        parallelize(one, plan_for(one), group)
    pairs = zip(model.named_parameters(), real.named_parameters(), strict=True)
    return all(
        name == other_name
        and param.is_meta
        and param.shape == other.shape
        and param.requires_grad == other.requires_grad
        and shard_of(param) == shard_of(other)
        for (name, param), (other_name, other) in pairs
    )


def step_bytes(group: Group) -> list[int]:
    """Sent in a step, and by arithmetic: two sums a layer each way, one each of the embedding and of the head."""
    sent = []
    for case in (Case(), Case(sequence=True)):
        model = make(case)
        parallelize(model, plan_for(model), group, sequence=case.sequence)
        before = group.sent_bytes
        loss_of(model, case, torch.zeros(BATCH, TOKENS, dtype=torch.long)).backward()
        sent.append(group.sent_bytes - before)
    stream, said = 4 * BATCH * TOKENS * HIDDEN, 4 * 3 * BATCH * TOKENS * group.world
    share = (group.world - 1) / group.world
    plain = 2 * stream * (4 * 2 + 2) + said
    # A sum is a scatter and a gather: as many bytes. More: the gradient that leaves and enters, and what is summed of
    # two norms with weight and bias, and of two biases.
    shared = plain + 2 * stream + 2 * 2 * 4 * HIDDEN * (4 + 2)
    return [*sent, int(plain * share), int(shared * share)]


class Own(nn.Module):
    """A model that no plan is known of, with dropout on split features and a layer that is given keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Wide and narrow."""
        return self.down(self.drop(self.up(x).tanh()))


def own_plan(group: Group) -> dict[str, Any]:
    torch.manual_seed(1)
    whole = Own()
    model = copy.deepcopy(whole)
    said = refused(lambda: plan_for(model))
    parallelize(model, {"up": "column", "drop": "dropout", "d*n": "row"}, group)
    x = torch.randn(3, 5, HIDDEN)
    found, outs = Found(), []
    for one in (whole, model):
        torch.manual_seed(2)
        outs.append(one(x))
        outs[-1].square().sum().backward()
    _compare_params(whole, model, group, found)
    return {"out": abs(outs[0] - outs[1]).max().item(), "grad": found.grad, "said": said, "repr": repr(model)}


class Between(nn.Module):
    """Layers with dropout between, of a kind that the plan does not name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(2 * HIDDEN if kind == "halves" else 4 * HIDDEN, HIDDEN)
        self.small = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("inner"):
            return checkpoint(self.run, x, use_reentrant=self.kind.endswith("reentrant"))
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        y = self.up(x).tanh()
        if self.kind == "function":
            y = F.dropout(y, 0.3, self.training)
        elif self.kind == "halves":
            first, second = y.chunk(2, -1)
            y = self.drop(first) * second.sigmoid()
        elif self.kind == "adapter":  # dropout of the whole input, after the column layer
            y = y + self.small(self.drop(x.to(y)))
        elif self.kind == "heads":
            q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) * factor for factor in (1.0, 0.5, 0.1))
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).flatten(2)
        else:
            y = self.drop(y)
        return self.drop(self.down(y))


KINDS = ("module", "function", "halves", "adapter", "heads", "image", "checkpoint")


def found_dropout(group: Group, kind: str) -> dict[str, float]:
    """Dropout between a column and a row layer without a style, beside the same in one process."""
    torch.manual_seed(1)
    whole = nn.ModuleDict({"block": Between(kind)})
    model = copy.deepcopy(whole)
    column = {"*.up": "column:2" if kind == "halves" else "column"}
    parallelize(model, {**column, "*.down": "row", **({"*.small": "column"} if kind == "adapter" else {})}, group)
    x = torch.randn((3, 5, 2, HIDDEN) if kind == "image" else (3, 5, HIDDEN), requires_grad=True)
    found, outs = Found(), []
    for one in (whole, model):
        torch.manual_seed(2)
        outs.append(checkpoint(one["block"], x, use_reentrant=False) if kind == "checkpoint" else one["block"](x))
        outs[-1].square().sum().backward()
    _compare_params(whole, model, group, found)
    return {"out": abs(outs[0] - outs[1]).max().item(), "grad": found.grad}


def alpha_between(group: Group) -> Tensor:
    """A dropout that has no version for split features."""
    model = Own()
    model.drop = nn.AlphaDropout(0.1)
    parallelize(model, {"up": "column", "down": "row"}, group)
    return model(torch.randn(2, HIDDEN))


def token_error(group: Group, tokens: list[int]) -> str:
    """The type of the error of an embedding whose rows are split."""
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN))
    parallelize(model, {"0": "vocab"}, group)
    try:
        model(torch.tensor(tokens))
    except Exception as error:
        return type(error).__name__
    return ""
