# SPDX-License-Identifier: Apache-2.0
"""What ranks on two hosts do, as a script under `twinflow launch`, and how a test starts and watches them.

python two_hosts_cases.py order.json: the order says what to do, and the folder for what is found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netns_support import NetHost, write_ssh

LIMIT_S = 240.0
SCRIPT = Path(__file__)


def main(order: dict[str, Any]) -> None:
    """On each rank."""
    import torch
    import torch.distributed as dist

    import twinflow

    torch.set_num_threads(1)
    me = twinflow.init_distributed()
    works = {"train": _train, "count": _count, "resume": _resume}
    for name in works:  # the last may be the one that a test puts an end to
        if name in order:
            found = works[name](me.rank, me.world_size, {**order[name], "folder": order["folder"]})
            _write(Path(order["folder"]) / f"{name}.{me.rank}.json", json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


def _train(rank: int, world: int, order: dict[str, Any]) -> Any:
    from zero_cases import train_all

    return train_all(rank, world, order["configs"])


def _resume(rank: int, world: int, order: dict[str, Any]) -> Any:
    """Steps with a checkpoint after each, from the last one on; a file tells of each."""
    from checkpoint_cases import engine_of, steps, weights_of

    folder = Path(order["folder"])
    engine = engine_of(world, order["stage"], {"ratio": 0.5}, rank)
    engine.load_checkpoint(str(folder / "checkpoint"))
    began = engine.global_steps
    while engine.global_steps < order["num_steps"]:
        steps(engine, engine.global_steps, engine.global_steps + 1)
        engine.save_checkpoint(str(folder / "checkpoint"))
        _write(folder / f"rank{rank}.saved", str(engine.global_steps))
        time.sleep(order.get("pause_s", 0.0))
    found = {"weights": weights_of(engine), "began": began, "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"]}
    engine.destroy()
    return found


def _count(rank: int, world: int, order: dict[str, Any]) -> Any:
    """Steps of several configs; before and after, all ranks stand still and the counters can be read."""
    import torch

    import twinflow
    from twinflow.models.gpt import GPT, GPTConfig

    folder, shape, rows = Path(order["folder"]), GPTConfig(**order["shape"]), {}
    for name, config in order["configs"].items():
        torch.manual_seed(0)
        engine, optimizer, *_ = twinflow.initialize(model=GPT(shape), config=config)
        assert optimizer is not None
        batch = torch.zeros(engine.train_micro_batch_size_per_gpu(), shape.context + 1, dtype=torch.int64)

        def steps(count: int, engine: Any = engine, batch: torch.Tensor = batch) -> None:
            for _ in range(count * engine.gradient_accumulation_steps()):
                engine.backward(engine(batch[:, :-1], batch[:, 1:]).loss)
                engine.step()
            engine.optimizer.wait()

        def sent(optimizer: Any = optimizer) -> int:
            return sum(group.sent_bytes for group in optimizer.team.groups.values())

        steps(1)
        before = sent()
        _stand_still(folder, f"{name}.before", rank)
        steps(order["num_steps"])
        _stand_still(folder, f"{name}.after", rank)
        weight_bytes = sum(p.numel() * p.element_size() for p in engine.module.parameters())
        rows[name] = {"weight_bytes": weight_bytes, "sent_bytes": sent() - before}
        engine.destroy()
    return rows


def _stand_still(folder: Path, mark: str, rank: int) -> None:
    """Until the test says to go on."""
    _write(folder / f"{mark}.{rank}", "")
    while not (folder / f"{mark}.go").exists():
        time.sleep(0.01)


def _write(path: Path, text: str) -> None:
    made = path.with_name(f"{path.name}.made")
    made.write_text(text)
    made.rename(path)


# On the side of the test.


@dataclass
class Launch:
    """A running `twinflow launch`."""

    process: subprocess.Popen[str]
    folder: Path

    def wait_for(self, *names: str, limit_s: float = LIMIT_S) -> None:
        """Until these files are there."""
        deadline_s = time.monotonic() + limit_s
        while missing := [name for name in names if not (self.folder / name).exists()]:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                if all((self.folder / name).exists() for name in names):
                    return
                self.process.kill()
                raise AssertionError(f"{missing} did not come:\n{self.output()}")
            time.sleep(0.01)

    def go_on(self, mark: str) -> None:
        """Ranks that stand still may go on."""
        _write(self.folder / f"{mark}.go", "")

    def output(self, limit_s: float = LIMIT_S) -> str:
        """All that it writes up to its end."""
        self.process.wait(limit_s)
        return (self.folder / "output").read_text(errors="replace")

    def found(self, work: str, world: int) -> list[Any]:
        """What each rank found, once it has."""
        names = [f"{work}.{rank}.json" for rank in range(world)]
        self.wait_for(*names)
        return [json.loads((self.folder / name).read_text()) for name in names]


@contextmanager
def launched(
    folder: Path, hosts: Sequence[NetHost], order: Mapping[str, Any], slots: int = 1, options: Sequence[str] = ()
) -> Iterator[Launch]:
    """`twinflow launch` from a third place over both hosts, which it reaches by ssh alone."""
    import twinflow

    folder.mkdir(parents=True, exist_ok=True)
    ssh = write_ssh(folder / "bin", tuple(hosts))
    (folder / "hosts").write_text("".join(f"{host.address} slots={slots}\n" for host in hosts))
    (folder / "order.json").write_text(json.dumps({**order, "folder": str(folder)}))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "TWINFLOW_"))}
    paths = (str(Path(twinflow.__file__).parents[1]), str(SCRIPT.parent))
    env = {**kept, "PATH": f"{ssh.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)}
    env |= {"OMP_NUM_THREADS": "1", "TWINFLOW_THREADS": "1"}
    command = [sys.executable, "-m", "twinflow", "launch", "--num_nodes", "2", "--hostfile", str(folder / "hosts")]
    command += [*options, str(SCRIPT), str(folder / "order.json")]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, text=True, cwd=folder)
        try:
            yield Launch(process, folder)
        finally:
            process.kill()
            process.wait()
            for host in hosts:
                host.kill_all()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
