# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of engines whose layers are on several stages and whose parameters are on several tensor ranks.

The ranks are threads, each with an engine of its own: what one layout saves, any other loads, to the last bit.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from twin_support import matrix_but, quick_torch

import twinflow
from twinflow.checkpoint import Checkpoint, open_checkpoint
from twinflow.dist.group import alone
from twinflow.engine import Engine, restore, state
from twinflow.engine.ranks import Ranks, unite_groups
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel.shard import TensorShard, even_shard, mark, shard_of

NUM_BLOCKS, WIDTH, VOCAB = 2, 4, 8
ONLY = Ranks(alone(), are_partitioned=False)  # of a process that saves and loads alone


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    with quick_torch():
        yield


# A model, and its parts


class Block(nn.Module):
    """With what can be cut by rows, in three pieces, and by columns, and what cannot; and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(self.norm(x)).chunk(3, -1)
        y: Tensor = self.down(q * k + v) * self.scale
        return x + y

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, seen: dict[str, Any]) -> None:
        self.seen = seen


class Model(nn.Module):
    """Some of the blocks, the embedding or the head that is tied to it, or all of it."""

    def __init__(self, blocks: Sequence[int], has_first: bool, has_last: bool) -> None:
        super().__init__()
        self.aliases: dict[str, str] = {}
        if has_first:
            self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in blocks})
        if has_last:
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if has_first and has_last:
            self.head.weight = self.embed.weight
        elif has_last:
            self.aliases["head.weight"] = "embed.weight"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks.values():
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), ids.roll(1))


def shard_for(name: str, full: int, rank: int, world: int) -> TensorShard | None:
    kinds = {
        "up.weight": (0, 3),
        "up.bias": (0, 3),
        "down.weight": (1, 1),
        "embed.weight": (0, 1),
        "head.weight": (0, 1),
    }
    kind = next((kind for end, kind in kinds.items() if name.endswith(end)), None)
    return None if kind is None or world == 1 else even_shard(kind[0], full, rank, world, kind[1])


def cut_params(module: nn.Module, rank: int, world: int) -> None:
    for name, param in list(module.named_parameters()):
        dim = 1 if name.endswith("down.weight") else 0
        shard = shard_for(name, param.shape[dim], rank, world)
        if shard is not None:
            param.data = shard.cut(param.data)
            mark(param, shard)


class Layout(NamedTuple):
    pipe: int
    tensor: int
    data: int

    @property
    def world(self) -> int:
        return self.pipe * self.tensor * self.data


# Ranks as threads


@dataclass
class Meeting:
    world: int
    rows: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world, timeout=120)
        self.rows = [None] * self.world


@dataclass(frozen=True)
class Seat:
    """A rank's place in a group of threads."""

    rank: int
    world: int
    meeting: Meeting | None = None

    def gather_rows(self, row: Tensor) -> Tensor:
        assert self.meeting is not None
        self.meeting.rows[self.rank] = row.clone()
        self.meeting.barrier.wait()
        rows = torch.stack(self.meeting.rows)
        self.meeting.barrier.wait()
        return rows


@dataclass
class Rank:
    engine: Engine
    ranks: Ranks


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}},
}


def build(module: nn.Module, states: str = "fp32", **given: Any) -> Engine:
    offload = {"stage": 0, "offload_optimizer": {"device": "cpu", "states": states}}
    return twinflow.initialize(model=module, config={**CONFIG, "zero_optimization": offload}, **given)[0]


@contextmanager
def engines(layout: Layout, monkeypatch: pytest.MonkeyPatch, seed: int = 1, **options: Any) -> Iterator[list[Rank]]:
    """An engine for each rank of a layout, with weights of its own; `ranks_of` knows them."""
    meeting, found = Meeting(layout.world), []
    for rank, (pipe, data, tensor) in enumerate(product(*map(range, (layout.pipe, layout.data, layout.tensor)))):
        torch.manual_seed(seed + rank)
        blocks = [i for i in range(NUM_BLOCKS) if i * layout.pipe // NUM_BLOCKS == pipe]
        module = Model(blocks, pipe == 0, pipe == layout.pipe - 1)
        cut_params(module, tensor, layout.tensor)
        group: Any = Seat(rank, layout.world, meeting)
        replicas: Any = Seat(data, layout.data)
        ranks = Ranks(group, False, replicas, pipe, tensor, layout.tensor, module.aliases)
        found.append(Rank(build(module, **options), ranks if layout.world > 1 else ONLY))
    known = {id(one.engine): one.ranks for one in found}
    for where in (state, restore):
        monkeypatch.setattr(where, "ranks_of", lambda engine: known.get(id(engine), ONLY))
    yield found
    for one in found:
        one.engine.destroy()


def on_all(found: Sequence[Rank], act: Callable[[Engine], Any]) -> list[Any]:
    """What `act` returns or raises on each rank."""
    outcomes: list[Any] = [None] * len(found)

    def run(index: int) -> None:
        try:
            outcomes[index] = act(found[index].engine)
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def succeed(outcomes: Sequence[Any]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def save_all(found: Sequence[Rank], folder: Path, **options: Any) -> None:
    succeed(on_all(found, lambda engine: engine.save_checkpoint(folder, client_state={"note": "here"}, **options)))


def load_all(found: Sequence[Rank], folder: Path, **options: Any) -> None:
    for outcome in (outcomes := on_all(found, lambda engine: engine.load_checkpoint(folder, **options))):
        succeed(outcomes)
        assert outcome[1] == {"note": "here"}


# The truth


@dataclass(frozen=True)
class Truth:
    """One process's model and optimizer after some steps."""

    weights: dict[str, Tensor]
    state: dict[str, dict[str, Any]]
    extra: dict[str, Any]


def truth_of(engine: Engine) -> Truth:
    assert engine.optimizer is not None
    kept = engine.module.state_dict()
    weights = {name: value.clone() for name, value in kept.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in kept.items() if not isinstance(value, Tensor)}
    return Truth(weights, engine.optimizer.state_dict()["state"], extra)


def train_one(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Truth:
    """A checkpoint of one process, and what is in it."""
    with engines(Layout(1, 1, 1), monkeypatch, seed=0, **options) as (one,):
        engine = one.engine
        for name, block in engine.module.blocks.items():
            block.seen = {"name": name, "values": torch.rand(3)}
        for step in range(3):
            engine.backward(engine(torch.arange(step, step + 6) % VOCAB))
            engine.step()
        engine.save_checkpoint(folder, client_state={"note": "here"})
        return truth_of(engine)


def assert_same(own: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        assert own.keys() == expected.keys(), what
        for key, value in expected.items():
            assert_same(own[key], value, f"{what} {key}")
    else:
        assert torch.equal(own, expected) if isinstance(expected, Tensor) else own == expected, what


def local(value: Any, shard: TensorShard | None, shape: Sequence[int]) -> Any:
    """A rank's part of what one process keeps for a parameter."""
    if isinstance(value, dict):
        return {key: local(item, shard, shape) for key, item in value.items()}
    is_cut = shard is not None and isinstance(value, Tensor) and value.shape == shard.whole_shape(shape)
    return shard.cut(value) if is_cut and shard is not None else value


def check_rank(engine: Engine, truth: Truth) -> None:
    """A rank has exactly its part of the truth."""
    assert engine.optimizer is not None
    assert engine.global_steps == 3
    own = truth_of(engine)
    aliases, params = engine.module.aliases, dict(engine.module.named_parameters(remove_duplicate=False))
    for name, value in own.weights.items():
        shard = shard_of(params[name]) if name in params else None
        assert_same(value, local(truth.weights[name], shard, value.shape), name)
    for name, entry in own.state.items():
        expected = truth.state[aliases.get(name, name)]
        assert_same(entry, local(expected, shard_of(params[name]), params[name].shape), name)
    assert own.state.keys() == {name for name, _ in engine.module.named_parameters()}
    assert_same(own.extra, {name: truth.extra[name] for name in own.extra}, "extra")


def opened(folder: Path) -> Checkpoint:
    found = open_checkpoint(folder)
    assert found is not None
    return found


LAYOUTS = [Layout(1, 2, 1), Layout(2, 1, 1), Layout(2, 2, 1), Layout(2, 2, 2), Layout(1, 4, 1), Layout(2, 1, 2)]
QUICK = [(Layout(2, 2, 1), Layout(1, 4, 1)), (Layout(2, 2, 2), Layout(2, 1, 1)), (Layout(1, 2, 1), Layout(2, 2, 2))]


@pytest.mark.parametrize(("first", "second"), matrix_but(QUICK, product(LAYOUTS, LAYOUTS)))
def test_saved_by_one_layout_loads_into_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Layout, second: Layout
) -> None:
    truth = train_one(tmp_path / "one", monkeypatch)
    before = tmp_path / "one"
    for i, layout in enumerate((first, second, Layout(1, 1, 1))):
        with engines(layout, monkeypatch) as found:
            load_all(found, before)
            for one in found:
                check_rank(one.engine, truth)
            before = tmp_path / str(i)
            save_all(found, before)
            check_stored(opened(before), opened(tmp_path / "one"), layout)


def check_stored(found: Checkpoint, one: Checkpoint, layout: Layout) -> None:
    """All is there once, under the names and with the values of one process's checkpoint."""
    found.verify()
    for file in ("model", "optimizer"):
        assert sorted(found.names(file)) == sorted(one.names(file))
        for name, value in one.tensors(file):
            assert_same(found.tensor(file, name), value, name)
    for key in ("aliases", "excluded", "optimizer_state", "extra", "global_steps"):
        assert found.meta[key] == one.meta[key], key
    groups, expected = found.meta["optimizer"]["param_groups"], one.meta["optimizer"]["param_groups"]
    assert [{**group, "params": sorted(group["params"])} for group in groups] == [
        {**group, "params": sorted(group["params"])} for group in expected
    ]
    assert len(found.meta.get("ranks", [0])) == layout.world
    cut = {f"blocks.{i}.{end}" for i in range(NUM_BLOCKS) for end in ("up.weight", "up.bias", "down.weight")}
    told = found.meta.get("shards", {})
    assert set(told.get("model", {})) == (cut | {"embed.weight"} if layout.tensor > 1 else set())
    assert len(told.get("optimizer", {})) == 3 * len(told.get("model", {}))  # master and two states of each
    stored = json.loads((found.path / "manifest.json").read_text())["files"]["model"]
    names = [name for part in stored for name in part["tensors"]]
    assert len(names) == len(set(names)) == len(one.names("model")) + len(told.get("model", {})) * (layout.tensor - 1)


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_small_state_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: str) -> None:
    """Blocks of 8-bit state are of another cut: their scales are made anew, and not stored."""
    truth = train_one(tmp_path / "one", monkeypatch, states=states)
    with engines(Layout(2, 2, 1), monkeypatch, states=states) as found:
        load_all(found, tmp_path / "one")
        save_all(found, tmp_path / "four")
    stored = opened(tmp_path / "four")
    assert not [
        name
        for name in stored.names("optimizer")
        if name.endswith("_scale") and "norm" not in name and "down.bias" not in name
    ]
    with engines(Layout(1, 1, 1), monkeypatch, states=states) as (one,):
        load_all([one], tmp_path / "four")
        back = truth_of(one.engine)
        assert_same(back.weights, truth.weights, "weights")
        for name, entry in truth.state.items():
            for key in ("step", "master"):
                assert_same(back.state[name][key], entry[key], f"{name} {key}")
            for key in set(entry) - {"step", "master"}:
                assert torch.allclose(back.state[name][key], entry[key], rtol=0.2, atol=0.02 * entry[key].abs().max())


def test_an_optimizer_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states are cut as the parameters are; a step that is a tensor is the same for all tensor ranks."""
    given: dict[str, Any] = {"optimizer": lambda params: torch.optim.Adam(params, lr=1e-3)}
    truth = train_one(tmp_path / "one", monkeypatch, **given)
    before = tmp_path / "one"
    for i, layout in enumerate((Layout(2, 2, 1), Layout(1, 2, 2), Layout(1, 1, 1))):
        with engines(layout, monkeypatch, **given) as found:
            load_all(found, before)
            for one in found:
                check_rank(one.engine, truth)
            before = tmp_path / str(i)
            save_all(found, before)


def test_state_that_belongs_to_a_whole_parameter_is_refused() -> None:
    leaves = state.take_apart({"row": torch.zeros(3), "count": torch.zeros(1), "mean": torch.zeros(2, 3)}, "w")[1]
    param = nn.Parameter(torch.zeros(2, 3))
    assert state.sharded_leaves(leaves, param) == {}
    shard = even_shard(0, 4, 1, 2)
    mark(param, shard)
    with pytest.raises(ValueError, match=r"shape of w/row.*cannot save"):
        state.sharded_leaves(leaves, param)
    assert state.sharded_leaves(leaves[1:], param) == {"w/mean": shard}


def step_with_any(optimizer: TwinOptimizer) -> None:
    """A step with gradients as a backward would make them."""
    for param in optimizer.runtime.params:
        param.tensor.grad = None
        torch.autograd.backward(param.tensor, torch.rand_like(param.tensor))
    optimizer.step()


def test_a_rank_saves_and_loads_its_own_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint, a rank's state is its own: in its own shapes, scales of 8-bit state included."""
    with engines(Layout(1, 2, 1), monkeypatch, states="int8") as found:
        first = found[0].engine.optimizer
        assert first is not None
        step_with_any(first)
        saved = {**first.state_dict()}
        kept = {
            name: {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
            for name, entry in saved["state"].items()
        }
        step_with_any(first)
        first.load_state_dict({**saved, "state": kept})
        for name, entry in first.state_dict()["state"].items():
            for key in set(entry) - {"master"}:  # the weights are of a later step
                assert torch.equal(torch.as_tensor(entry[key]), torch.as_tensor(kept[name][key])), (name, key)


# What does not fit


def refused(found: Sequence[Rank], folder: Path, *words: str, **options: Any) -> None:
    """All ranks raise the same, and nothing changes."""
    before = [truth_of(one.engine) for one in found]
    outcomes = on_all(found, lambda engine: engine.load_checkpoint(folder, **options))
    for outcome in outcomes:
        assert isinstance(outcome, ValueError), outcome
        assert all(word in str(outcome) for word in words), outcome
    for one, old in zip(found, before, strict=True):
        assert_same(truth_of(one.engine).weights, old.weights, "weights")


def test_what_no_rank_has_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_one(tmp_path, monkeypatch)
    layout = Layout(2, 1, 1)
    monkeypatch.setattr(f"{__name__}.NUM_BLOCKS", 1)
    with engines(layout, monkeypatch) as found:
        refused(found, tmp_path, "the model has no", "blocks.1.down.bias")
        refused(
            found, tmp_path, "state_dict: the parameters of param_groups differ", "blocks.1", load_module_strict=False
        )
        load_all(found, tmp_path, load_module_strict=False, load_optimizer_states=False)


def test_what_the_checkpoint_lacks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_one(tmp_path, monkeypatch)
    monkeypatch.setattr(f"{__name__}.NUM_BLOCKS", 4)
    with engines(Layout(2, 1, 1), monkeypatch) as found:
        refused(found, tmp_path, "rank 1", "the checkpoint has no", "blocks.2.down.bias")


def test_another_width_is_found_on_shards_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_one(tmp_path, monkeypatch)
    monkeypatch.setattr(f"{__name__}.VOCAB", 12)
    with engines(Layout(1, 2, 1), monkeypatch) as found:
        refused(found, tmp_path, "shape of embed.weight", "(8, 4)", "(12, 4)")


def test_a_tensor_rank_alone_cannot_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Model([0], True, True)
    cut_params(module, 0, 2)
    engine = build(module)
    monkeypatch.setattr(state, "ranks_of", lambda engine: ONLY)
    with pytest.raises(AssertionError):  # nothing that a user can do brings this about
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.destroy()


def test_a_rank_that_cannot_save_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engines(Layout(2, 2, 1), monkeypatch) as found:
        last = found[-1].engine
        outcomes = on_all(
            found, lambda engine: engine.save_checkpoint(tmp_path, client_state={"x": {1, 2} if engine is last else 1})
        )
        assert all(isinstance(outcome, ValueError) and "rank 3: client_state/x" in str(outcome) for outcome in outcomes)
        assert not list(tmp_path.iterdir())


def test_stages_must_have_the_same_groups() -> None:
    one, two = {"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.1, "params": ["b", "c"]}
    assert unite_groups([[one], [two]]) == [{"lr": 0.1, "params": ["a", "b", "c"]}]
    for others in ([{**two, "lr": 0.2}], [two, two], []):
        with pytest.raises(ValueError, match="different param_groups"):
            unite_groups([[one], others])
