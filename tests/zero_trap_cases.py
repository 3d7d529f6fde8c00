# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of ZeRO's traps."""

from __future__ import annotations

import copy
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero_cases import full

import twinflow
from twinflow.build_optimizer import make_optimizer
from twinflow.checkpoint import Entry
from twinflow.checkpoint.tensors import TensorWriter
from twinflow.config import load_config, resolve_batch
from twinflow.launch.environment import joined
from twinflow.launch.store import group_store
from twinflow.launch.watch import Watch
from twinflow.offload.frozen import Frozen
from twinflow.optim.twin import TwinOptimizer
from twinflow.zero import Zero, partition
from twinflow.zero.start import meet

VOCAB, WIDTH, SAMPLES = 16, 8, 8


class Tied(nn.Module):
    """Embedding and head are one weight in two blocks; a frozen block; parameters with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.Sequential(
            nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), head
        )
        head.weight = self.layers[0].weight  # type: ignore[assignment]
        self.layers[3].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.row = nn.Parameter(torch.zeros(1, VOCAB))
        self.register_buffer("shift", torch.full((VOCAB,), 0.1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(tokens) * self.scale + self.row + self.shift
        return logits


class Plain(nn.Module):
    """No block, no child: parameters of the model itself, one of them never used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, VOCAB))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


class Scalar(Plain):
    """With a parameter that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


MODELS: dict[str, Any] = {"tied": Tied, "plain": Plain}


def config_of(stage: int, kind: str = "SGD", offload: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """Small buckets, no clipping: a wrong factor of the gradients is a wrong result."""
    return {
        "train_batch_size": SAMPLES,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "optimizer": {"type": kind, "params": {"lr": 0.1 if kind == "SGD" else 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "bucket_numel": 128, **(offload or {})},
        },
        **others,
    }


def steps(engine: Any, first: int, last: int) -> list[float]:
    """Losses of the whole batch, of which every rank takes its samples."""
    rank, world, losses = engine.global_rank, engine.world_size, []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (SAMPLES, 5), generator=generator)[rank::world]
        loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / world)
    return losses


def weights_of(engine: Any) -> dict[str, list[float]]:
    """All of them, under every name, on every rank."""
    engine.optimizer.wait()
    named = engine.module.named_parameters(remove_duplicate=False)
    return {name: full(param).float().flatten().tolist() for name, param in named}


def train(rank: int, world: int, model: str, config: dict[str, Any], has_groups: bool = False) -> dict[str, Any]:
    """Losses, and the weights afterwards."""
    torch.manual_seed(0)
    module, groups = MODELS[model](), None
    if has_groups:  # made before anything is partitioned, as scripts do
        named = dict(module.named_parameters())
        groups = [
            {"params": [p for name, p in named.items() if name != "row"]},
            {"params": [named["row"]], "lr": 1.0},
        ]
    engine: Any = twinflow.initialize(model=module, config=config, model_parameters=groups)[0]
    found = {"losses": steps(engine, 0, 4), "weights": weights_of(engine)}
    engine.destroy()
    return found


def train_all(rank: int, world: int, cases: dict[str, Any]) -> dict[str, Any]:
    """Several, one after the other."""
    return {name: train(rank, world, *case) for name, case in cases.items()}


def mistakes(rank: int, world: int) -> dict[str, str]:
    """What is said to each."""
    three = Zero(3)
    calls: dict[str, Callable[[], Any]] = {}

    def sharded() -> nn.Module:
        model = Tied()
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        return model

    def given(stage: int) -> None:
        model, config = Plain(), load_config(config_of(stage))
        optimizer = TwinOptimizer(model, zero=Zero(1))
        try:
            make_optimizer(config, resolve_batch(config, world), model, optimizer, None, joined())
        finally:
            optimizer.close()

    def differently_frozen() -> None:
        model = Plain()
        model.unused.requires_grad_(rank == 0)
        meet(joined(), model, "")

    calls["scalar"] = lambda: partition(Scalar(), three)
    calls["sharded"] = lambda: partition(sharded(), three)
    calls["sharded, stage 2"] = lambda: TwinOptimizer(sharded(), zero=Zero(2))
    calls["whole, stage 3"] = lambda: TwinOptimizer(Tied(), zero=three)
    calls["no parameters"] = lambda: partition(nn.GELU(), three)
    calls["torch's"] = lambda: TwinOptimizer(Tied(), torch.optim.AdamW, zero=three)
    calls["ddp"] = lambda: TwinOptimizer(nn.parallel.DistributedDataParallel(Tied()), zero=Zero(0))
    calls["another stage"] = lambda: given(2)
    calls["world"] = lambda: resolve_batch(load_config(config_of(2, data_parallel_size=world + 1)), world)
    calls["frozen"] = differently_frozen
    return {name: _said(call) for name, call in calls.items()}


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def own_sharding(rank: int, world: int) -> Any:
    """A model that the user has given to fully_shard as one: its blocks are gathered before their turn."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        dist.init_process_group("gloo", store=group_store(), rank=0, world_size=1)
    zero = Zero(3) if world > 1 else None
    optimizer = TwinOptimizer(model, "sgd", lr=0.5, early=True, zero=zero)
    optimizer.runtime.device.delay("in", 0.05)  # weights of all blocks are late
    found = []
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    optimizer.close()
    return found


def slow_disk(seconds: float) -> None:
    """Every tensor takes a while to be read for writing."""
    write = TensorWriter.write

    def slowly(entry: Entry) -> torch.Tensor:
        time.sleep(seconds)
        return entry.read()

    def slow(self: TensorWriter, path: Path, entries: Sequence[Entry], *rest: Any) -> Any:
        return write(self, path, [replace(entry, read=partial(slowly, entry)) for entry in entries], *rest)

    TensorWriter.write = slow  # type: ignore[method-assign]


def files_of(folder: Path) -> dict[str, str]:
    """Digests of all tensors of a checkpoint."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def beside(rank: int, world: int, folder: str, stage: int, offload: dict[str, Any], limit: int) -> dict[str, Any]:
    """A checkpoint written at once and one beside training, after the same steps; the first rank's disk is quick."""
    found: dict[str, Any] = {}
    for name in ("plain", "beside"):
        torch.manual_seed(0)
        checkpoint = {"background": name == "beside", "background_bytes": limit}
        config = config_of(stage, "AdamW", offload, checkpoint=checkpoint)
        engine: Any = twinflow.initialize(model=Tied(), config=config)[0]
        steps(engine, 0, 3)
        if name == "beside" and rank > 0:
            slow_disk(0.02)
        engine.save_checkpoint(Path(folder, name))
        found[f"{name}: is background"] = engine.background is not None
        steps(engine, 3, 6)
        engine.wait_for_checkpoint()
        found[name] = files_of(Path(folder, name, "global_step3"))
        found[f"{name}: weights"] = weights_of(engine)
        engine.destroy()
    return found


def failing(rank: int, world: int, folder: str) -> dict[str, Any]:
    """One rank cannot write; all are told, and go on."""
    torch.manual_seed(0)
    engine: Any = twinflow.initialize(model=Tied(), config=config_of(2, "AdamW", checkpoint={"background": True}))[0]
    steps(engine, 0, 1)
    write, said = TensorWriter.write, ""

    def full_disk(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank == 1:
        TensorWriter.write = full_disk  # type: ignore[method-assign]
    engine.save_checkpoint(folder)
    steps(engine, 1, 2)
    try:
        engine.save_checkpoint(folder)
    except OSError as error:
        said = str(error)
    left = sorted(path.name for path in Path(folder).iterdir()) if rank == 0 else []
    dist.barrier()
    TensorWriter.write = write  # type: ignore[method-assign]
    engine.save_checkpoint(folder)
    steps(engine, 2, 3)
    engine.destroy()
    return {"said": said, "left": left, "then": sorted(path.name for path in Path(folder).iterdir())}


def ties(rank: int, world: int, folder: str, stage: int, is_saved: bool) -> dict[str, Any]:
    """Weights of a tied model that are saved, or loaded over others."""
    torch.manual_seed(0 if is_saved else 1)
    engine: Any = twinflow.initialize(model=Tied(), config=config_of(stage, "AdamW"))[0]
    if is_saved:
        steps(engine, 0, 3)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    found = {"weights": weights_of(engine), "next": steps(engine, 3, 5)}
    engine.destroy()
    return found


def load_elsewhere(rank: int, world: int, folder: str) -> str:
    """A checkpoint that only the first rank sees."""
    engine: Any = twinflow.initialize(model=Tied(), config=config_of(1, "AdamW"))[0]
    steps(engine, 0, 1)
    engine.save_checkpoint(folder)
    said = _said(lambda: engine.load_checkpoint(Path(folder, "none") if rank else folder))
    steps(engine, 1, 2)
    engine.destroy()
    return said


def look_between(rank: int, world: int, stage: int) -> list[float]:
    """Evaluations between steps, before and after a delayed update is put into the weights."""
    torch.manual_seed(0)
    engine: Any = twinflow.initialize(model=Tied(), config=config_of(stage, "SGD", {"delayed_update": True}))[0]
    losses = []
    tokens = torch.arange(VOCAB)[None]
    for step in range(3):
        losses += steps(engine, step, step + 1)
        for _ in range(2):
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens[0])))
            engine.optimizer.flush()
    engine.destroy()
    return losses


def copier_fails(rank: int, world: int, folder: str) -> list[Any]:
    """Copies aside cannot be made: training says so, and the reader does not wait for them."""
    torch.manual_seed(0)
    config = config_of(0, "AdamW", checkpoint={"background": True, "background_bytes": 1 << 20})
    del config["optimizer"]
    model = Tied()
    # Updates of the user's own optimizer wait for copies of what the checkpoint has not read. Our rules need none.
    engine: Any = twinflow.initialize(model=model, optimizer=torch.optim.NAdam(model.parameters()), config=config)[0]
    steps(engine, 0, 1)
    slow_disk(0.05)
    value = Frozen._value

    def no_room(self: Frozen, reading: Any) -> torch.Tensor:
        if threading.current_thread().name == "twinflow-copier":
            time.sleep(0.3)  # the reader comes to wait for it
            raise MemoryError("no room for a copy")
        return value(self, reading)

    Frozen._value = no_room  # type: ignore[method-assign]
    engine.save_checkpoint(folder)
    background, said = engine.background, ""
    try:
        steps(engine, 1, 3)
        engine.optimizer.wait()
    except RuntimeError as error:
        said = str(error)
    assert background is not None
    end = time.monotonic() + 60
    while not background.is_done and time.monotonic() < end:
        time.sleep(0.1)
    return [said, background.is_done, sorted(path.name for path in Path(folder).iterdir())]


def in_between(rank: int, world: int, folder: str) -> list[Any]:
    """What may be done while a checkpoint is written, and what may not."""
    torch.manual_seed(0)
    config = config_of(0, "AdamW", checkpoint={"background": True, "background_bytes": 0})
    engine: Any = twinflow.initialize(model=Tied(), config=config)[0]
    steps(engine, 0, 2)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    state = copy.deepcopy(engine.optimizer.state_dict())
    slow_disk(0.02)
    engine.save_checkpoint(folder)
    steps(engine, 2, 3)
    engine.set_train_batch_size(2 * SAMPLES)
    engine.save_checkpoint(folder, "second")
    engine.optimizer.load_state_dict(state)  # waits, or the second would be torn
    is_done = engine.optimizer.runtime.frozen.current is None
    said = ""
    tokens = torch.zeros(SAMPLES, 5, dtype=torch.int64)
    engine.set_train_batch_size(SAMPLES)
    engine.backward(engine(tokens).square().mean())
    try:
        engine.save_checkpoint(folder, "third")
    except RuntimeError as error:
        said = str(error)
    engine.step()
    engine.load_checkpoint(folder, "global_step2")
    same = all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
    engine.destroy()
    return [is_done, said, same]


def alone_with_stage_3(rank: int, world: int) -> Any:
    """A world of one that is partitioned all the same; a group that a launcher's rank has made on its own."""
    os.environ.update({"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    found = joined()
    torch.manual_seed(0)
    model, zero = Tied(), Zero(3)
    partition(model, zero)
    optimizer = TwinOptimizer(model, "sgd", lr=0.1, early=True, zero=zero)
    tokens = torch.arange(VOCAB)[None]
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens[0])
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    optimizer.close()
    return [found.rank, found.world_size, losses[0] > losses[-1]]


def inherited_variables(rank: int, world: int) -> Any:
    """All ranks have the variables of rank 0, as with `debug_launcher` of Accelerate, which creates the group."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    model = nn.Linear(2, 2)
    meet(joined(timeout_s=20.0), model, "")
    found = joined()
    return [found.rank, found.world_size, found.local_rank, found.local_world_size]


def failing_model() -> nn.Module:
    raise MemoryError("no room for the model")


def fail_to_begin(rank: int, world: int) -> Any:
    """One rank fails inside initialize(); what becomes of the others is the watch's to say."""
    twinflow.initialize(model=failing_model if rank == 1 else Plain(), config=config_of(2))


def hang_beside(rank: int, world: int) -> Any:
    """A watch whose steps wait for work that gets on beside them, for longer than a step may take."""
    watch = Watch(group_store(), 0, 1, hang_timeout_s=1.0)
    watch.beat(1)
    for _ in range(12):
        time.sleep(0.2)
        watch.go_on()
    is_over = watch._pulse().is_over
    time.sleep(0.1)
    watch.close()
    return [is_over, watch.cause is not None]


def zero_between_micro_batches(rank: int, world: int, stages: Sequence[int], whole: bool) -> dict[str, Any]:
    """`module.zero_grad()`, or that of one block, between two micro-batches: the largest difference from torch, or the
    error.
    """

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 1))

    def loss_of(model: Callable[..., Any], seed: int) -> torch.Tensor:
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        loss: torch.Tensor = model(rows).square().mean()
        return loss

    found: dict[str, Any] = {}
    for stage in stages:
        config = config_of(stage) | {"train_batch_size": 8 * world, "gradient_accumulation_steps": 2}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
        engine, *_ = twinflow.initialize(model=build(), config=config)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        try:
            for step in range(2):
                for part in range(2):
                    engine.backward(loss_of(engine, 100 * step + 10 * rank + part))
                    if part == 0:
                        (engine.module if whole else engine.module[1]).zero_grad()
                    engine.step()
                    for other in range(world):
                        (loss_of(model, 100 * step + 10 * other + part) / 2 / world).backward()
                    if part == 0:
                        (model if whole else model[1]).zero_grad()
                optimizer.step()
                optimizer.zero_grad()
            pairs = zip(engine.module.parameters(), model.parameters(), strict=True)
            found[str(stage)] = max(float((full(a) - b).abs().max()) for a, b in pairs)
        except RuntimeError as error:
            found[str(stage)] = str(error)
            assert engine.watch is not None
            engine.watch.close()
    return found
