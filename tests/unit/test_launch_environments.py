# SPDX-License-Identifier: Apache-2.0
"""One script, started as each launcher starts it: it must train as one process does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fork_support import Ended, run_script

from twinflow.launch.environment import free_port

TRAIN = """
import json, os, socket, sys
if len(sys.argv) > 1:
    name = sys.argv[1]
    socket.gethostname = lambda: name  # as if this rank were on another machine
import torch, twinflow
from torch import distributed

if len(sys.argv) > 2:
    distributed.init_process_group("gloo")  # a group of the script's own
torch.manual_seed(0)
data = [(x, x.sum().reshape(1)) for x in torch.randn(36, 4)]
config = {
    "train_batch_size": 12,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
model = torch.nn.Linear(4, 1)
engine, _, loader, _ = twinflow.initialize(model=model, config=config, training_data=data)
for x, y in loader:
    engine.backward(torch.nn.functional.mse_loss(engine(x), y))
    engine.step()
me = twinflow.init_distributed()
found = [me.rank, me.local_rank, me.world_size, me.local_world_size, model.weight.tolist()[0]]
if me.world_size > 1 and len(sys.argv) < 3:
    assert [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [str(found[1]), str(found[3])]
os.write(1, ("\\n" + json.dumps(found) + "\\n").encode())
engine.destroy()
if distributed.is_initialized():
    distributed.destroy_process_group()
"""


def results(text: str) -> list[list[Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("[")]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def alone(script: Path) -> list[float]:
    """The weights that one process trains."""
    ended = run_script(script, script.parent, script.parent / "alone", TWINFLOW_THREADS="1")
    assert ended.returncode == 0, ended.stderr
    ((*ranks, weights),) = results(ended.stdout)
    assert ranks == [0, 0, 1, 1]
    found: list[float] = weights
    return found


def run_all(script: Path, logs: Path, ranks: Sequence[dict[str, Any]], *words: Sequence[str]) -> list[Ended]:
    """How each rank ends. `words`: the arguments of each rank."""
    given = list(words) or [()] * len(ranks)

    def run(index: int) -> Ended:
        env = {name: str(value) for name, value in ranks[index].items()}
        folder = script.parent
        return run_script(script, folder, logs / str(index), *given[index], TWINFLOW_THREADS="1", **env)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


def start(script: Path, logs: Path, ranks: Sequence[dict[str, Any]], *words: Sequence[str]) -> list[list[Any]]:
    """What each rank finds."""
    ended = run_all(script, logs, ranks, *words)
    assert all(one.returncode == 0 for one in ended), "\n".join(one.stderr for one in ended)
    return [found for one in ended for found in results(one.stdout)]


def bare(rank: int, world_size: int, port: int) -> dict[str, Any]:
    return {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def variables(kind: str, rank: int, port: int) -> dict[str, Any]:
    """The variables of one of two ranks on this machine."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    slurm = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_NTASKS": 2, "SLURM_JOB_ID": 7}
    slurm |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ompi = {f"OMPI_COMM_WORLD_{name}": rank for name in ("RANK", "LOCAL_RANK")}
    ompi |= {f"OMPI_COMM_WORLD_{name}": 2 for name in ("SIZE", "LOCAL_SIZE")}
    hydra = {"MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": 2}
    pod = {"MASTER_ADDR": "localhost"} if rank == 0 else {}
    pet = {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 1, "PET_NODE_RANK": rank, "PYTHONUNBUFFERED": 1}
    return {
        "bare": bare(rank, 2, port),
        "pytorchjob": {**bare(rank, 2, port), **pod, **pet},
        "slurm": {**slurm, "MASTER_PORT": port},
        "slurm-wrapper": {**slurm, **bare(rank, 2, port)},
        "openmpi": {**ompi, "MASTER_PORT": port},
        "mpich": {"PMI_RANK": rank, "PMI_SIZE": 2, **hydra, "MASTER_PORT": port},
        "pmi": {"PMI_RANK": rank, "PMI_SIZE": 2, **address},
    }[kind]


@pytest.mark.parametrize("kind", ["bare", "pytorchjob", "slurm", "slurm-wrapper", "openmpi", "mpich", "pmi"])
def test_two_ranks_train_as_one_process(script: Path, tmp_path: Path, alone: list[float], kind: str) -> None:
    port = free_port()
    found = start(script, tmp_path, [variables(kind, rank, port) for rank in range(2)])
    assert [one[:4] for one in found] == [[0, 0, 2, 2], [1, 1, 2, 2]]
    for one in found:
        assert one[4] == pytest.approx(alone, abs=1e-6)


def test_ranks_on_two_machines_are_counted(script: Path, tmp_path: Path, alone: list[float]) -> None:
    port, hosts = free_port(), ("left", "right", "left")
    found = start(script, tmp_path, [bare(rank, 3, port) for rank in range(3)], *([h] for h in hosts))
    assert [one[:4] for one in found] == [[0, 0, 3, 2], [1, 0, 3, 1], [2, 1, 3, 2]]
    assert found[2][4] == pytest.approx(alone, abs=1e-6)


def test_a_group_of_the_script_counts_machines_too(script: Path, tmp_path: Path, alone: list[float]) -> None:
    port = free_port()
    ranks = [bare(rank, 2, port) for rank in range(2)]
    found = start(script, tmp_path, ranks, ["left", "own"], ["right", "own"])
    assert [one[:4] for one in found] == [[0, 0, 2, 1], [1, 0, 2, 1]]
    assert found[1][4] == pytest.approx(alone, abs=1e-6)


def test_all_ranks_name_a_contradiction(script: Path, tmp_path: Path) -> None:
    port = free_port()
    same = [bare(rank, 2, port) | {"LOCAL_RANK": 0} for rank in range(2)]
    for one in run_all(script, tmp_path / "local", same):
        assert one.returncode == 1
        assert "LOCAL_RANK of rank 1 is 0, but must be different from that of rank 0" in one.stderr
    port = free_port()
    for one in run_all(script, tmp_path / "twice", [bare(rank, 3, port) for rank in (0, 1, 1)]):
        assert one.returncode == 1
        assert "RANK is 1 in two processes: process " in one.stderr


def run_program(command: Sequence[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    """A launcher itself. Its ranks share this machine with others."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env |= {"TWINFLOW_THREADS": "1", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(nodes: Sequence[subprocess.Popen[str]]) -> list[list[Any]]:
    """What the ranks of these launchers find, in the order of ranks."""
    found = []
    for node in nodes:
        out, errors = node.communicate(timeout=240)
        assert node.returncode == 0, errors
        found += results(out)
    return sorted(found)


@pytest.mark.matrix
@pytest.mark.parametrize("program", ["torchrun", "accelerate"])
def test_programs_over_two_nodes(script: Path, tmp_path: Path, alone: list[float], program: str) -> None:
    port = free_port()
    if program == "torchrun":
        words = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
        words += [f"--master-port={port}", "--node-rank={}", str(script)]
    else:
        pytest.importorskip("accelerate")
        words = [
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_machines=2",
            "--num_processes=2",
            "--machine_rank={}",
        ]
        words += ["--main_process_ip=127.0.0.1", f"--main_process_port={port}", "--mixed_precision=no"]
        words += ["--dynamo_backend=no", "--num_cpu_threads_per_process=1", str(script)]
    start = [sys.executable, "-m"]
    found = end([run_program([*start, *(word.format(node) for word in words)], tmp_path) for node in range(2)])
    assert [one[:4] for one in found] == [[0, 0, 2, 1], [1, 0, 2, 1]]
    for one in found:
        assert one[4] == pytest.approx(alone, abs=1e-6)


MPI = {  # programs of Open MPI and of MPICH, and their options for two ranks
    "mpirun.openmpi": ("--allow-run-as-root", "--oversubscribe", "-np", "2"),
    "mpiexec.hydra": ("-n", "2"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("program", list(MPI))
def test_mpi_itself_starts_ranks(script: Path, tmp_path: Path, alone: list[float], program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    command = [program, *MPI[program], sys.executable, str(script)]
    found = end([run_program(command, tmp_path, MASTER_PORT=str(free_port()))])
    assert [one[:4] for one in found] == [[0, 0, 2, 2], [1, 1, 2, 2]]
    for one in found:
        assert one[4] == pytest.approx(alone, abs=1e-6)


# What srun does for a task: it sets these variables and starts the program. The step has two nodes with one task each.
SRUN = """
export SLURM_JOB_ID=7 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_STEP_NODELIST=localhost,localhost
export SLURM_STEP_TASKS_PER_NODE="1(x2)" SLURM_LOCALID=0
for node in 0 1; do
  SLURM_PROCID=$node SLURM_NODEID=$node "$@" &
  pids="$pids $!"
done
for pid in $pids; do wait "$pid" || exit 1; done
"""


@pytest.mark.matrix
def test_a_shell_that_sets_slurms_variables(script: Path, tmp_path: Path, alone: list[float]) -> None:
    command = ["sh", "-c", SRUN, "srun", sys.executable, str(script)]
    found = end([run_program(command, tmp_path, MASTER_PORT=str(free_port()))])
    assert [one[:4] for one in found] == [[0, 0, 2, 1], [1, 0, 2, 1]]
    for one in found:
        assert one[4] == pytest.approx(alone, abs=1e-6)
