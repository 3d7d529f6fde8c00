# SPDX-License-Identifier: Apache-2.0
"""A pipeline's construction: every rank's module is made in this process, and values are handed on by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import twinflow
import twinflow.parallel
from twinflow.offload.blocks import find_blocks
from twinflow.parallel import LayerSpec, PipelineModule, TiedLayerSpec, profile_layers
from twinflow.parallel.schedules import make_schedule
from twinflow.parallel.topology import PipeModelDataParallelTopology, ProcessTopology

WIDTH, SYMBOLS = 6, 11
LAYOUTS = [("1f1b", 1, 1), ("1f1b", 2, 1), ("gpipe", 4, 1), ("interleaved", 2, 2), ("zbv", 2, 2), ("zbv", 3, 2)]


def as_logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def tied_layers() -> list[Any]:
    embed = ("embed", nn.Embedding, SYMBOLS, WIDTH)
    blocks = [LayerSpec(nn.Linear, WIDTH, WIDTH)] * 3 + [torch.tanh, LayerSpec(nn.LayerNorm, WIDTH)]
    return [TiedLayerSpec(*embed), *blocks, TiedLayerSpec(*embed, forward_fn=as_logits)]


def all_ranks(
    layers: Callable[[], Sequence[Any]], schedule: str, num_ranks: int, num_chunks: int, **options: Any
) -> list[PipelineModule]:
    return [
        PipelineModule(layers(), num_ranks, index=index, schedule=schedule, num_chunks=num_chunks, **options)
        for index in range(num_ranks)
    ]


def forward(ranks: Sequence[PipelineModule], *inputs: Any) -> Any:
    """All stages, one after the other, each on its rank."""
    owner = {stage: module for module in ranks for stage in module.stages}
    assert sorted(owner) == list(range(ranks[0].num_stages))
    for stage in range(ranks[0].num_stages):
        output = owner[stage](stage, *inputs)
        inputs = output if isinstance(output, tuple) else (output,)
    return inputs[0] if len(inputs) == 1 else inputs


def train(ranks: Sequence[PipelineModule], inputs: Any, target: Any) -> Tensor:
    """A forward and backward, with the sums over ties."""
    last = next(module for module in ranks if module.has_last)
    assert last.loss_fn is not None
    found: Tensor = last.loss_fn(forward(ranks, inputs), target)
    found.backward()
    return found.detach()


def grads(ranks: Sequence[PipelineModule]) -> dict[str, Tensor]:
    """By canonical name; those of ties are summed, as the engine does it."""
    sums: dict[str, Tensor] = {}
    for module in ranks:
        for name, param in module.named_parameters():
            name = module.aliases.get(name, name)
            if param.grad is not None:
                sums[name] = sums[name] + param.grad if name in sums else param.grad
    return sums


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(SYMBOLS, (4, 5), generator=generator)
    return ids, ids.roll(1, 1)


@pytest.mark.parametrize(("schedule", "num_ranks", "num_chunks"), LAYOUTS)
def test_layout_changes_nothing(schedule: str, num_ranks: int, num_chunks: int) -> None:
    whole = all_ranks(tied_layers, "1f1b", 1, 1, loss_fn=loss)
    ranks = all_ranks(tied_layers, schedule, num_ranks, num_chunks, loss_fn=loss)
    assert [module.stages for module in ranks] == [
        make_schedule(schedule, num_ranks, num_ranks, num_chunks).stages_of(i) for i in range(num_ranks)
    ]
    params = {name: param for module in ranks for name, param in module.named_parameters()}
    expected = dict(whole[0].named_parameters())
    assert set(params) == set(expected)
    for module in ranks:  # every copy, of ties too
        for name, param in module.named_parameters():
            torch.testing.assert_close(param, expected[name], rtol=0, atol=0)
    assert train(ranks, *batch()).equal(train(whole, *batch()))
    found, truth = grads(ranks), grads(whole)
    assert set(found) == set(truth)
    for name, grad in truth.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=0, msg=name)


def test_names_and_blocks() -> None:
    first, last = all_ranks(tied_layers, "1f1b", 2, 1, partition_method="uniform", loss_fn=loss)
    assert [name for name, _ in first.named_parameters()] == [
        "layers.0.weight",
        *(f"layers.{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")),
    ]
    assert [name for name, _ in last.named_parameters()] == ["layers.5.weight", "layers.5.bias", "layers.0.weight"]
    assert [block.name for block in find_blocks(last)] == ["layers.5", "layers.0"]
    assert first.bounds == last.bounds == (0, 4, 7)
    assert (first.has_first, first.has_last, last.has_first, last.has_last) == (True, False, False, True)
    assert first.loss_fn is None
    assert last.loss_fn is loss


def test_ties_on_one_rank_and_on_two() -> None:
    (whole,) = all_ranks(tied_layers, "1f1b", 1, 1)
    both, other = all_ranks(tied_layers, "zbv", 2, 2, partition_method="uniform")  # the last stage is on the first rank
    assert whole.ties == both.ties == other.ties == ()
    assert (both.has_first, both.has_last) == (True, True)
    first, _, last = all_ranks(tied_layers, "1f1b", 3, 1)
    for module in (first, last):
        (tie,) = module.ties
        assert (tie.name, tie.local, tie.ranks) == ("layers.0.weight", "layers.0.weight", (0, 2))
        assert module.get_parameter(tie.local) is module.get_parameter("layers.0.weight")
        assert module.aliases == {}


def test_a_tied_parameter_of_which_only_one_rank_has_gradients() -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(8, WIDTH)

        def forward(self, ids: Tensor) -> Any:
            return self.words(ids) + self.positions.weight[: ids.shape[1]]

    def layers() -> list[Any]:
        spec = ("embed", Embed)
        forward_fn: Any = lambda module, x: F.linear(x, module.words.weight)  # noqa: E731
        options = {"tied_weight_attr": "words.weight"}
        return [TiedLayerSpec(*spec, **options), torch.tanh, TiedLayerSpec(*spec, forward_fn=forward_fn, **options)]

    ranks = all_ranks(layers, "1f1b", 2, 1, loss_fn=loss, partition_method="uniform")
    names = ["layers.0.words.weight", "layers.0.positions.weight"]
    assert [[tie.name for tie in module.ties] for module in ranks] == [names, names]
    whole = all_ranks(layers, "1f1b", 1, 1, loss_fn=loss)
    assert train(ranks, *batch()).equal(train(whole, *batch()))
    for name, grad in grads(whole).items():
        torch.testing.assert_close(grads(ranks)[name], grad, rtol=0, atol=0)


def test_forward_fn_runs_as_the_modules_call() -> None:
    (module,) = all_ranks(tied_layers, "1f1b", 1, 1)
    called = []
    module.get_submodule("layers.0").register_forward_hook(lambda *_: called.append(1))
    x = batch()[0]
    assert forward([module], x).shape == (4, 5, SYMBOLS)
    assert forward([module], x).shape == (4, 5, SYMBOLS)  # its own forward is back
    assert len(called) == 4
    assert "forward" not in vars(module.get_submodule("layers.0"))


def test_forward_fn_may_call_the_module_and_fail() -> None:
    def twice(linear: nn.Linear, x: Tensor) -> Any:
        if x.shape[0] > 4:
            raise ArithmeticError
        return 2 * linear(x)

    (module,) = all_ranks(lambda: [TiedLayerSpec("a", nn.Linear, WIDTH, WIDTH, forward_fn=twice)], "1f1b", 1, 1)
    linear, x = module.get_submodule("layers.0"), torch.ones(2, WIDTH)
    assert forward([module], x).equal(2 * linear(x))
    with pytest.raises(ArithmeticError):
        forward([module], torch.ones(5, WIDTH))
    assert forward([module], x).equal(2 * linear(x))


def test_plain_modules_that_share() -> None:
    def layers() -> list[Any]:
        torch.manual_seed(1)
        embed, middle, head = nn.Embedding(SYMBOLS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, SYMBOLS, False)
        head.weight = embed.weight
        return [embed, middle, torch.tanh, middle, head]

    ranks = all_ranks(layers, "1f1b", 2, 1, loss_fn=loss, partition_method="uniform")
    assert [tie.name for tie in ranks[0].ties] == ["layers.0.weight", "layers.1.weight", "layers.1.bias"]
    assert [tie.local for tie in ranks[1].ties] == ["layers.4.weight", "layers.1.weight", "layers.1.bias"]
    assert ranks[1].aliases == {"layers.4.weight": "layers.0.weight"}
    whole = all_ranks(layers, "1f1b", 1, 1, loss_fn=loss)
    assert whole[0].aliases == {"layers.4.weight": "layers.0.weight"}
    assert train(ranks, *batch()).equal(train(whole, *batch()))
    for name, grad in grads(whole).items():
        torch.testing.assert_close(grads(ranks)[name], grad, rtol=1e-6, atol=1e-7)  # another order of three terms


class Pair(nn.Module):
    """Takes and gives a tuple as one value, as DeepSpeed's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return self.linear(x) * mask, mask


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_tuples_travel(num_ranks: int) -> None:
    layers = lambda: [LayerSpec(Pair), LayerSpec(Pair), lambda pair: (pair[0],), LayerSpec(nn.Linear, WIDTH, 1)]  # noqa: E731
    ranks = all_ranks(layers, "1f1b", num_ranks, 1, partition_method="uniform")
    torch.manual_seed(0)
    x, mask = torch.randn(3, WIDTH), torch.tensor([[1.0], [0.0], [1.0]])
    parts: dict[str, Any] = {name: part for module in ranks for name, part in module.named_modules()}
    y = parts["layers.0.linear"](x) * mask
    assert forward(ranks, x, mask).equal(parts["layers.3"](parts["layers.1.linear"](y) * mask))


class Counting(nn.Linear):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.num_calls += 1
        return torch.tanh(super().forward(input))


@pytest.mark.parametrize(
    ("interval", "only", "expected"), [(0, None, 1), (1, None, 2), (2, ["Counting"], 2), (3, ["Linear"], 1)]
)
def test_checkpointing(interval: int, only: list[str] | None, expected: int) -> None:
    options: dict[str, Any] = {"activation_checkpoint_interval": interval, "checkpointable_layers": only}
    layers = lambda: [nn.Identity(), *[LayerSpec(Counting)] * 5, nn.Dropout(0.5)]  # noqa: E731
    ranks = all_ranks(layers, "1f1b", 2, 1, partition_method="uniform", loss_fn=F.mse_loss, **options)
    plain = all_ranks(layers, "1f1b", 1, 1, loss_fn=F.mse_loss)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    losses = []
    for modules in (ranks, plain):
        torch.manual_seed(5)
        losses.append(train(modules, x, torch.zeros(3, WIDTH)))
    assert losses[0].equal(losses[1])
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(ranks)[name], grad, rtol=0, atol=0)
    counted = [m.num_calls for module in ranks for m in module.modules() if isinstance(m, Counting)]
    assert counted == [expected] * 5
    for module in ranks:
        module.eval()
    forward(ranks, x)
    assert [m.num_calls for module in ranks for m in module.modules() if isinstance(m, Counting)] == [expected + 1] * 5


def test_seeded_layers_draw_the_same_in_every_layout() -> None:
    def outputs(num_ranks: int, schedule: str, seed_layers: bool) -> list[Tensor]:
        layers = lambda: [LayerSpec(nn.Linear, WIDTH, WIDTH), nn.Dropout(0.5)] * 3  # noqa: E731
        ranks = all_ranks(layers, schedule, num_ranks, 1, seed_layers=seed_layers, partition_method="uniform")
        torch.manual_seed(num_ranks)
        for module in ranks:
            module.train()
        return [forward(ranks, torch.ones(2, WIDTH)) for _ in range(3)]  # three micro-batches

    truth = outputs(1, "1f1b", True)
    assert not truth[0].equal(truth[1])
    for num_ranks in (2, 3):
        assert all(a.equal(b) for a, b in zip(outputs(num_ranks, "1f1b", True), truth, strict=True))
    assert all(a.equal(b) for a, b in zip(outputs(3, "zbv", True), truth, strict=True))
    assert not all(a.equal(b) for a, b in zip(outputs(2, "1f1b", False), truth, strict=True))


def test_making_layers_leaves_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    all_ranks(tied_layers, "1f1b", 2, 1)
    assert torch.rand(2).equal(expected)


def test_seed_fn_is_asked() -> None:
    seeds: list[int] = []
    PipelineModule([LayerSpec(nn.Linear, 2, 2)] * 3, 1, seed_fn=seeds.append, base_seed=70)
    assert seeds == [70, 71, 72]


def test_nothing_is_made_for_other_ranks() -> None:
    made = []

    class Noted(nn.Linear):
        def __init__(self, name: str) -> None:
            super().__init__(2, 2)
            if not self.weight.is_meta:
                made.append(name)

    PipelineModule([LayerSpec(Noted, name) for name in "abcd"], 2, index=1)
    assert made == ["c", "d"]


def test_a_deep_copy_runs_its_own_layers() -> None:
    (module,) = all_ranks(tied_layers, "1f1b", 1, 1, loss_fn=loss)
    clone = copy.deepcopy(module)
    with torch.no_grad():
        for param in clone.parameters():
            param.zero_()
    assert not forward([clone], batch()[0]).any()
    assert forward([module], batch()[0]).any()


def test_a_loss_with_weights_is_on_the_last_rank() -> None:
    layers = lambda: [LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Linear, 2, 2)]  # noqa: E731
    first, last = (PipelineModule(layers(), 2, index=i, loss_fn=nn.Bilinear(2, 2, 1)) for i in range(2))
    assert not [name for name, _ in first.named_parameters() if name.startswith("loss")]
    assert [name for name, _ in last.named_parameters() if name.startswith("loss")] == ["loss.weight", "loss.bias"]


def test_profile() -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(300):
                x = torch.tanh(x)
            return x

    layers: list[Any] = [Slow(), *[nn.Identity() for _ in range(3)], Slow()]
    seconds = profile_layers(PipelineModule(layers, 1), torch.ones(64, 64))
    assert len(seconds) == 5
    assert min(seconds[0], seconds[4]) > 3 * max(seconds[1:4])
    made = PipelineModule(layers, 2, index=0, partition_method="profile", layer_seconds=[9, 1, 1, 1, 9])
    assert made.bounds == (0, 2, 5)
    with pytest.raises(ValueError, match="num_stages=1"):
        profile_layers(made, torch.ones(1))


def test_describe() -> None:
    text = PipelineModule(tied_layers(), 2, index=0).describe().splitlines()
    assert len(text) == 3
    assert text[1].split()[:4] == ["0", "0", "0-2", "150"]
    assert "Embedding, Linear" in text[1]
    lazy = PipelineModule(tied_layers(), 2, index=0, partition_method="uniform").describe()
    assert "-  Embedding" in lazy  # not counted


def test_topology_and_place() -> None:
    layers = [LayerSpec(nn.Linear, 2, 2)] * 4
    made = PipelineModule(layers, topology=PipeModelDataParallelTopology(2, 2, 2), index=1)
    assert (made.num_ranks, made.index, made.stages) == (2, 1, (1,))
    assert PipelineModule(layers, 1).index == 0


def refused(message: str, *args: Any, **options: Any) -> Any:
    return pytest.param(message, args, options, id=message[:40])


LINEAR = LayerSpec(nn.Linear, 2, 2)
TIED = TiedLayerSpec("a", nn.Linear, 2, 2)


@pytest.mark.parametrize(
    ("message", "args", "options"),
    [
        refused("at least one layer", [], 1),
        refused("Write LayerSpec", [nn.Linear], 1),
        refused("Layer 1 is 3", [LINEAR, 3], 1),
        refused("Pass num_stages or a topology", [LINEAR]),
        refused(r"Call init_distributed\(\) first", [LINEAR] * 2, 2),
        refused("index is 2, but must be a number from 0 to 1", [LINEAR] * 2, 2, index=2),
        refused("at most 1, the number of layers", [LINEAR], 2, index=0),
        refused("at most 3, the number of layers", [LINEAR] * 3, 2, index=0, schedule="zbv"),
        refused("schedule is 'best'", [LINEAR], 1, schedule="best"),
        refused("num_chunks is 2, but must be 1", [LINEAR], 1, num_chunks=2),
        refused("the size of the axis 'pipe' in the topology", [LINEAR] * 2, 2, ProcessTopology(["pipe"], [1])),
        refused("but must be a list with 'pipe'", [LINEAR], None, ProcessTopology(["data"], [1])),
        refused("activation_checkpoint_interval is -1", [LINEAR], 1, activation_checkpoint_interval=-1),
        refused("loss_fn is 3", [LINEAR], 1, loss_fn=3),
        refused("The length of layer_seconds is 2, but must be 1, one", [LINEAR], 1, layer_seconds=[1, 2]),
        refused("tied with the key 'a'", [TIED, TiedLayerSpec("a", nn.Embedding, 2, 2)], 1),
        refused(
            "tied_weight_attr of the TiedLayerSpec 'a'",
            [TIED, TiedLayerSpec("a", nn.Linear, 2, 2, tied_weight_attr="gain")],
            1,
        ),
    ],
)
def test_refusals(message: str, args: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineModule(*args, **options)


def test_calling_it_says_what_to_call() -> None:
    (module,) = all_ranks(tied_layers, "1f1b", 1, 1)
    for wrong in (batch()[0], 1, -1):
        with pytest.raises(ValueError, match=r"engine\.train_batch\(data_iter\) or engine\.eval_batch"):
            module(wrong)


def test_data_that_ends_or_is_no_iterator_is_named() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"},
    }

    def built() -> Any:
        module = PipelineModule([LayerSpec(nn.Linear, 2, 2)], 1, loss_fn=F.mse_loss, index=0)
        return twinflow.initialize(model=module, config=config)[0]

    one = (torch.ones(1, 2), torch.ones(1, 2))
    engine = built()
    remedy = r"Pass a new iterator, or repeat the data, for example with itertools\.cycle\(loader\)\."
    what = r"train_batch\(\) cannot run, because data_iter ended after 1 of 2 micro-batches\."
    with pytest.raises(RuntimeError, match=rf"^{what} {remedy}$"):
        engine.train_batch(iter([one]))
    engine.set_dataiterator(iter([one, one, one]))
    engine.train_batch()
    with pytest.raises(RuntimeError, match=r"because the iterator of set_dataiterator\(\) ended after 1 of 2"):
        engine.train_batch()
    engine.destroy()
    engine = built()
    with pytest.raises(ValueError, match=r"^data_iter is a list, but must be an iterator\. Pass iter\(data\)\.$"):
        engine.train_batch([one, one])
    engine.destroy()


def test_specs_refuse() -> None:
    for wrong in (nn.Linear(1, 1), 3, int, torch.tanh):
        with pytest.raises(ValueError, match=r"a subclass of torch\.nn\.Module"):
            LayerSpec(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key of a TiedLayerSpec"):
        TiedLayerSpec("", nn.Linear)
    with pytest.raises(ValueError, match="forward_fn"):
        TiedLayerSpec("a", nn.Linear, forward_fn=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tied_weight_attr"):
        TiedLayerSpec("a", nn.Linear, tied_weight_attr=[])
    assert repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == "LayerSpec(Linear, 2, 3, bias=False)"


def test_a_layer_that_cannot_be_counted() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(1).item()

    with pytest.raises(ValueError, match="this layer cannot be built on the meta device"):
        PipelineModule([LayerSpec(Stubborn)], 1)
    assert PipelineModule([LayerSpec(Stubborn)], 1, partition_method="uniform").num_stages == 1


def test_exports() -> None:
    for name in twinflow.parallel.__all__:
        assert getattr(twinflow.parallel, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = twinflow.parallel.nothing
