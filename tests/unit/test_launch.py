# SPDX-License-Identifier: Apache-2.0
"""`twinflow launch` as a command and as real processes on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import twinflow
from twinflow.cli.launch import CONTEXT, free_port, launch
from twinflow.cli.main import app as twinflow_app

ROOT = Path(twinflow.__file__).parents[1]


def run_launch(*words: str) -> Result:
    app = typer.Typer()
    app.command(context_settings=CONTEXT)(launch)
    return CliRunner().invoke(app, list(words))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_worker_kills_a_script_that_does_not_stop(tmp_path: Path) -> None:
    script = write(
        tmp_path / "stubborn.py",
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('ready')\ntime.sleep(60)\n",
    )
    code = (
        "import sys; from twinflow.launch import worker; worker.STOP_GRACE_S = 0.3\n"
        f"sys.exit(worker.run_rank([sys.executable, '-u', {script!r}], 0, 0))"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"ready\n"
    worker.terminate()
    _, errors = worker.communicate(timeout=20)
    assert (worker.returncode, errors) == (137, b"")  # no cause: it was told to stop


def test_dry_run_prints_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.py", "")
    hosts = write(tmp_path / "hosts", "worker-0 slots=4\nworker-1 slots=4\n")
    result = run_launch(
        "--hostfile", hosts, "--include", "worker-0@worker-1:2", "--dry_run", "x.py", "--include", "a b"
    )
    assert result.exit_code == 0, result.output
    lines = [shlex.split(line) for line in result.output.splitlines()]
    assert [line[4] for line in lines] == ["worker-0", "worker-1"]
    assert all(line[-1].startswith(f"cd {tmp_path} && exec ") for line in lines)
    assert all(line[-1].endswith("-m twinflow.launch.worker x.py --include 'a b'") for line in lines)
    assert "CUDA_VISIBLE_DEVICES=2 " in lines[1][-1]
    assert "--nproc-per-node=4 " in lines[0][-1]
    assert "--master-addr=worker-0 --master-port=29500 " in lines[1][-1]


def test_it_is_a_command_of_twinflow() -> None:
    result = CliRunner().invoke(twinflow_app, ["launch", "--dry_run", "--num_procs", "2", "--module", "m", "--module"])
    assert result.exit_code == 0, result.output
    assert result.output.endswith("-m twinflow.launch.worker --module m --module\n")


def test_both_spellings_and_the_script_s_own_words() -> None:
    for words in (
        ("--num_procs", "3", "--master_port", "7", "--max_restarts", "2", "--dry_run"),
        ("--num-procs", "3", "--master-port", "7", "--max-restarts", "2", "--dry-run"),
    ):
        result = run_launch(*words, "--module", "pkg.train", "--", "--dry_run", "--help")
        assert result.exit_code == 0, result.output
        (line,) = result.output.splitlines()
        assert "--nproc-per-node=3 --max-restarts=2 --node-rank=0 --master-addr=127.0.0.1 --master-port=7 " in line
        assert line.endswith("-m twinflow.launch.worker --module pkg.train -- --dry_run --help")


def test_processes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, words, wanted in ((0, (), 1), (2, (), 2), (0, ("--num_gpus", "3"), 3), (2, ("--num_procs", "3"), 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        result = run_launch(*words, "--dry_run", "--module", "m")
        assert f"--nproc-per-node={wanted} " in result.output
    assert "--num_gpus is 3, but must be a number from 1 to 2" in run_launch("--num_gpus", "3", "--module", "m").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nonsense", "x.py"), "No such option: --nonsense"),
        (("no-such-script.py",), "script is 'no-such-script.py', but must be an existing file"),
        (("--hostfile", "no-such-file", "--module", "m"), "--hostfile is 'no-such-file'"),
        (("--num_gpus", "0", "--module", "m"), "--num_gpus is 0"),
        (("--num_gpus", "1", "--num_procs", "1", "--module", "m"), "--num_procs 1 cannot be used with --num_gpus 1"),
        (("--num_nodes", "2", "--module", "m"), "To use more hosts, list them in a --hostfile"),
        (("--master_port", "70000", "--module", "m"), "--master_port is 70000"),
        (("--max_restarts", "-1", "--module", "m"), "--max_restarts is -1"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], message: str) -> None:
    result = run_launch(*words)
    assert result.exit_code != 0
    assert message in result.output


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words in ((), ("--max_nodes", "2")):
            result = run_launch(*words, "--master_port", str(port), "--module", "m")
            assert result.exit_code == 1
            assert f"error: --master_port is {port}, but must be a port that no other process" in result.output
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ValueError, match=f"MASTER_PORT is {port}, but must be a port that no other process"):
            twinflow.init_distributed(timeout_s=5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--min_nodes", "2"), "--max_nodes is None, but must be given with --min_nodes"),
        (("--min_nodes", "3", "--max_nodes", "2"), "--min_nodes is 3, but must be at most 2"),
        (("--max_nodes", "2", "--num_nodes", "1"), "--num_nodes 1 cannot be used with --max_nodes 2"),
        (("--max_nodes", "0"), "--max_nodes is 0"),
    ],
)
def test_numbers_of_nodes_that_are_refused(words: tuple[str, ...], message: str) -> None:
    result = run_launch(*words, "--module", "m")
    assert result.exit_code == 1
    assert message in result.output


def test_commands_of_an_elastic_run(tmp_path: Path) -> None:
    result = run_launch("--min_nodes", "2", "--max_nodes", "3", "--num_procs", "2", "--dry_run", "--module", "m")
    lines = result.output.splitlines()
    assert len(lines) == 3
    assert len(set(lines)) == 1
    assert lines[0].startswith("env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ")
    assert "--nnodes=2:3 --nproc-per-node=2 " in lines[0]
    assert "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:" in lines[0]
    assert lines[0].endswith("-m twinflow.launch.worker --elastic --module m")
    hosts = write(tmp_path / "hosts", "worker-0 slots=4\nworker-1 slots=4\n")
    result = run_launch("--hostfile", hosts, "--max_nodes", "3", "--dry_run", "--module", "m")
    assert "--max_nodes is 3, but must be at most 2, the number of hosts" in result.output
    result = run_launch("--hostfile", hosts, "--max_nodes", "2", "--dry_run", "--module", "m")
    assert result.output.count(f"--rdzv-endpoint={socket.gethostname()}:") == 2


# A run without torch: rank 0 counts steps, saves each of them, and is killed once.
COUNT = """
import json, os, signal, time
from pathlib import Path
saved, rank, world = Path("step.json"), os.environ["RANK"], os.environ["WORLD_SIZE"]
step = json.loads(saved.read_text()) if saved.exists() else 0
print("begins", rank, world, step, flush=True)
while step < 4:
    time.sleep(0.02)
    if rank == "0":
        step += 1
        Path("new").write_text(json.dumps(step))
        os.replace("new", saved)
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    elif saved.exists():
        step = json.loads(saved.read_text())
"""


@pytest.mark.matrix
@pytest.mark.usefixtures("_here_on_the_path")
def test_an_elastic_run_goes_on_after_a_kill(tmp_path: Path) -> None:
    write(tmp_path / "count.py", COUNT)
    result = run_launch("--max_nodes", "2", "count.py")
    assert result.exit_code == 0, result.output
    begun = sorted(line.partition("begins ")[2] for line in result.output.splitlines() if "begins" in line)
    assert begun[:2] == ["0 2 0", "0 2 2"]  # it went on from what it had saved
    assert [line[:3] for line in begun[2:]] == ["1 2", "1 2"]
    assert "failed: killed by SIGKILL (exit code 137); the ranks form a new group (1 of 10)" in result.output


@pytest.mark.matrix
@pytest.mark.usefixtures("_here_on_the_path")
def test_an_elastic_run_ends_after_its_last_restart(tmp_path: Path) -> None:
    write(tmp_path / "fail.py", FAIL)
    result = run_launch("--max_nodes", "2", "--max_restarts", "1", "fail.py", "raise")
    assert result.exit_code == 1
    assert "failed: ValueError: a shape that does not fit (exit code 1). This was failure 2" in result.output


# Node 1 is killed as a whole, and rank 0 loses its connection. Then there is a group of one, and again a group of two.
LEAVE = """
import os, signal, time
from pathlib import Path
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
print("begins", rank, world, flush=True)
alone = Path("alone")
if world == "1":
    alone.touch()
elif not alone.exists():
    if rank == "0":
        time.sleep(1)
        raise RuntimeError("Connection closed by peer")
    else:
        agent = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)
else:
    raise SystemExit
time.sleep(600)
"""


@pytest.mark.matrix
@pytest.mark.usefixtures("_here_on_the_path")
def test_a_group_forms_without_a_node_and_again_when_it_returns(tmp_path: Path) -> None:
    write(tmp_path / "leave.py", LEAVE)
    result = run_launch("--max_nodes", "2", "--return_after", "60", "leave.py")
    assert result.exit_code == 0, result.output
    begun = [line.partition("begins ")[2] for line in result.output.splitlines() if "begins" in line]
    assert [sorted(begun[:2]), begun[2], sorted(begun[3:])] == [["0 2", "1 2"], "0 1", ["0 2", "1 2"]]
    assert "ended with exit code 137; the ranks form a new group (1 of 10)" in result.output


EARLY = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(0.5)
    raise RuntimeError("Connection closed by peer")
"""


@pytest.mark.matrix
@pytest.mark.usefixtures("_here_on_the_path")
@pytest.mark.parametrize("elastic", [False, True])
def test_a_rank_that_ends_before_the_others_is_the_cause(tmp_path: Path, elastic: bool) -> None:
    write(tmp_path / "early.py", EARLY)
    result = run_launch(*(("--max_nodes",) if elastic else ("--num_procs",)), "2", "early.py")
    assert result.exit_code == 1
    assert "error: rank 1 on localhost" in result.output
    assert "ended with exit code 0 before the other ranks, and" in result.output


SUM = """
import sys, torch, twinflow
from torch import distributed
me = twinflow.init_distributed()
total = torch.tensor([me.rank + 1.0])
distributed.all_reduce(total)
print("sum", total.item(), me.rank, me.local_rank, me.world_size, me.local_world_size, *sys.argv[1:])
distributed.destroy_process_group()
"""
# The same without a sum, for which all ranks would have to import torch.
PLACE = """
import os
print("sum 3.0", *(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")))
"""
# Rank 1 fails when the others wait; without torch, so that the tests are quick.
FAIL = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("a shape that does not fit")
time.sleep(100)
"""


@pytest.fixture
def _here_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_here_on_the_path")
def test_two_processes_on_this_machine(tmp_path: Path) -> None:
    write(tmp_path / "sum.py", SUM)
    result = run_launch("--num_procs", "2", "sum.py", "--a", "b c")
    assert result.exit_code == 0, result.output
    lines = sorted(line for line in result.output.splitlines() if line.startswith("sum"))
    assert lines == ["sum 3.0 0 0 2 2 --a b c", "sum 3.0 1 1 2 2 --a b c"]


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two nodes behind an `ssh` that runs the command here."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nwhile [ "$#" -gt 1 ]; do shift; done\nexec sh -c "$1"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    return write(tmp_path / "hosts", "worker-0 slots=1\nworker-1 slots=1\n")


@pytest.mark.usefixtures("_here_on_the_path")
@pytest.mark.parametrize("script", [PLACE, pytest.param(SUM, marks=pytest.mark.matrix)], ids=["place", "sum"])
def test_two_nodes_over_ssh(script: str, tmp_path: Path, hostfile: str) -> None:
    write(tmp_path / "sum.py", script)
    meet = ("--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    result = run_launch("--hostfile", hostfile, *meet, "sum.py")
    assert result.exit_code == 0, result.output
    lines = sorted(line for line in result.output.splitlines() if "] sum" in line)
    assert lines == ["[worker-0] sum 3.0 0 0 2 1", "[worker-1] sum 3.0 1 0 2 1"]


@pytest.mark.matrix
@pytest.mark.usefixtures("_here_on_the_path")
def test_an_exception_ends_all_nodes(tmp_path: Path, hostfile: str) -> None:
    write(tmp_path / "fail.py", FAIL)
    start_s = time.monotonic()
    meet = ("--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    result = run_launch("--hostfile", hostfile, *meet, "fail.py", "raise")
    assert time.monotonic() - start_s < 30
    assert result.exit_code == 1
    cause = "error: rank 1 on worker-1 failed first: ValueError: a shape that does not fit (exit code 1)"
    assert cause in result.output


@pytest.mark.usefixtures("_here_on_the_path")
def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    write(tmp_path / "fail.py", FAIL)
    start_s = time.monotonic()
    result = run_launch("--num_procs", "2", "fail.py", "kill")
    assert time.monotonic() - start_s < 30
    assert result.exit_code == 137
    assert "error: rank 1 on localhost failed first: killed by SIGKILL (exit code 137)" in result.output


@pytest.mark.matrix
@pytest.mark.usefixtures("_here_on_the_path")
def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    script = "import os, time\nopen(f'pid{os.environ[\"RANK\"]}.tmp', 'w').write(str(os.getpid()))\n"
    script += "os.rename(f'pid{os.environ[\"RANK\"]}.tmp', f'pid{os.environ[\"RANK\"]}')\ntime.sleep(100)\n"
    write(tmp_path / "wait.py", script)
    code = (
        "import sys; from twinflow.cli import launch\n"
        "sys.argv[1:] = ['--num_procs', '2', 'wait.py']\n"
        "import typer; app = typer.Typer(); app.command(context_settings=launch.CONTEXT)(launch.launch); app()"
    )
    command = [sys.executable, "-c", code]  # `twinflow` itself without the imports of its other commands
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    deadline_s = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline_s
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert "error: SIGINT has stopped the launch. All ranks have ended." in errors
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.slow
@pytest.mark.usefixtures("_here_on_the_path")
def test_all_nodes_start_again(tmp_path: Path, hostfile: str) -> None:
    once = "import os\nif os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
    fail_after_meeting = SUM.replace("total =", f"{once}    raise ValueError('once')\ntotal =")
    write(tmp_path / "sum.py", fail_after_meeting)
    meet = ("--master_addr", "127.0.0.1", "--master_port", str(free_port()), "--max_restarts", "1")
    result = run_launch("--hostfile", hostfile, *meet, "sum.py")
    assert result.exit_code == 0, result.output
    assert "ValueError: once" in result.output
    assert sum("] sum 3.0" in line for line in result.output.splitlines()) == 2


@pytest.mark.usefixtures("_here_on_the_path")
def test_an_ssh_that_fails_is_named(tmp_path: Path, hostfile: str) -> None:
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\necho cannot connect >&2\nexit 255\n")
    result = run_launch("--hostfile", hostfile, "--module", "m")
    assert result.exit_code == 255
    assert "cannot connect" in result.output
    assert "ended with exit code 255, and no rank gave a reason" in result.output
