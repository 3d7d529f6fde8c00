# SPDX-License-Identifier: Apache-2.0
"""Watch and check_same with real processes: the ranks of each scenario are forked from one that has torch imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import distributed

import twinflow
from twinflow.launch import watch as watch_module
from twinflow.launch.same import first_difference, param_lines
from twinflow.launch.watch import AwakeClock, Cause, Pulse, Watch, hung_rank
from twinflow.launch.worker import Failure, read_failure

LIMIT_S = 30.0  # in which all ranks have to end
SOURCE = Path(twinflow.__file__).parents[1]

# Ranks run as they would by themselves: an exception goes up to the interpreter, which calls the hooks.
ZYGOTE = """
import dataclasses, json, os, signal, socket, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from twinflow.launch.same import check_same, param_lines
from twinflow.launch.store import group_store
from twinflow.launch.watch import Timing
from twinflow.launch.watch import Watch

def wait_for_all(pids, kill_last, limit_s):
    found, began = {}, time.monotonic()
    while len(found) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in found:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    found[rank] = (os.waitstatus_to_exitcode(status), time.monotonic() - began)
        late = time.monotonic() - began > limit_s
        if late or set(found) | set(kill_last) == set(range(len(pids))):
            for rank, pid in enumerate(pids):
                if rank not in found:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [found[rank] for rank in range(len(pids))]

def fork_ranks():
    for line in sys.stdin:
        order = json.loads(line)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            order["env"].setdefault("MASTER_PORT", str(s.getsockname()[1]))
        pids = []
        for rank in range(order["world_size"]):
            pid = os.fork()
            if pid == 0:
                file = os.open(f"{order['folder']}/{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1)
                os.dup2(file, 2)
                os.environ.update(order["env"], MASTER_ADDR="127.0.0.1", RANK=str(rank), LOCAL_RANK=str(rank))
                os.environ.update(WORLD_SIZE=str(order["world_size"]), LOCAL_WORLD_SIZE=str(order["world_size"]))
                return rank, order
            pids.append(pid)
        print(json.dumps(wait_for_all(pids, order["kill_last"], order["limit_s"])), flush=True)
    sys.exit()

rank, order = fork_ranks()
world_size = order["world_size"]
FAST = Timing(poll_s=0.2, dead_after_s=5.0, suspect_after_s=3.0, grace_s=0.5, hold_s=4.0)

def join():
    if "OUTER_STORE" in os.environ:
        store = dist.TCPStore("127.0.0.1", int(os.environ["OUTER_STORE"]), is_master=False)
        store = dist.PrefixStore("of all attempts", store)
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        store = group_store()
    return store

def watching(times={}, **options):
    return Watch(join(), rank, world_size, timing=dataclasses.replace(FAST, **times), **options)

def total():
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor[0] == world_size

exec(order["body"])
"""


@dataclass(frozen=True)
class End:
    """How a rank ended: exit code (-9 after SIGKILL), seconds, and what it wrote."""

    code: int
    seconds: float
    text: str


@dataclass
class Ranks:
    """Runs scenarios in forks of the zygote."""

    process: subprocess.Popen[str]
    folder: Path
    count: int = field(default=0)

    def run(
        self, body: str, world_size: int = 3, env: dict[str, str] | None = None, kill_last: Sequence[int] = ()
    ) -> list[End]:
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        order: dict[str, Any] = {"body": body, "world_size": world_size, "env": env or {}, "folder": str(folder)}
        order |= {"kill_last": list(kill_last), "limit_s": 2 * LIMIT_S}
        stdin: IO[str] = self.process.stdin  # type: ignore[assignment]
        stdout: IO[str] = self.process.stdout  # type: ignore[assignment]
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()
        codes = json.loads(stdout.readline())
        ends = [End(code, seconds, (folder / str(rank)).read_text()) for rank, (code, seconds) in enumerate(codes)]
        for rank, end in enumerate(ends):
            print(f"--- rank {rank}: {end.code} after {end.seconds:.1f} s\n{end.text}")
        return ends


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RESTART_COUNT"}
    return env | {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    env = environment() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    yield Ranks(process, tmp_path_factory.mktemp("ranks"))
    assert process.stdin is not None
    process.stdin.close()
    process.wait(10)


def check_ends(ends: Sequence[End], words: str, skip: Sequence[int] = ()) -> None:
    """All ended with 1 in time and name this cause, and no other."""
    for rank, end in enumerate(ends):
        if rank not in skip:
            assert end.code == 1
            assert end.seconds < LIMIT_S
            told = [line for line in end.text.splitlines() if line.startswith(f"twinflow: rank {rank} ends: ")]
            assert len(told) == 1
            assert words in told[0]


def failures(end: End) -> list[Failure]:
    return [found for line in end.text.splitlines() if (found := read_failure(line)) is not None]


LOOP = """
watch = watching({options})
for step in range(1, 100):
    watch.beat(step)
    if step == 3:
        at_three()
    total()
watch.close()
"""


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_ends_ranks_that_cannot_raise(ranks: Ranks, failing: int) -> None:
    body = f"""
def at_three():
    if rank == {failing}:
        raise ValueError("a shape\\nthat does not fit")
    if rank == 2:
        time.sleep(600)  # as deaf as a collective of NCCL
"""
    # Polls are so far apart that rank 0 would be gone with its store before the others look.
    options = "{'poll_s': 1.0}, on_failure=lambda cause: print('told of', cause.rank)"
    ends = ranks.run(body + LOOP.format(options=options))
    check_ends(ends, f"rank {failing} failed in step 3: ValueError: a shape that does not fit")
    assert "Traceback" in ends[failing].text
    assert "Traceback" not in ends[2].text
    assert f"told of {failing}" in ends[2].text
    (failure,) = failures(ends[failing])
    assert (failure.rank, failure.exit_code, failure.attempt) == (failing, 1, 0)
    assert failure.error == "in step 3: ValueError: a shape that does not fit"
    # A launcher hears it from the rank itself, and so from its host.
    assert not failures(ends[1 - failing]) + failures(ends[2])


def test_a_killed_rank_is_named_by_those_that_lost_it(ranks: Ranks) -> None:
    body = "def at_three():\n    if rank == 2:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    ends = ranks.run(body + LOOP.format(options=""))
    assert ends[2].code == -signal.SIGKILL
    check_ends(ends, "rank 2 failed in step 3: no heartbeat for ", skip=[2])


@pytest.mark.matrix
def test_a_killed_rank_is_found_where_nobody_loses_a_connection(ranks: Ranks) -> None:
    body = """
def at_three():
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""
    ends = ranks.run(body + LOOP.format(options=""), world_size=2)
    check_ends(ends, "rank 1 failed in step 3: no heartbeat for 5 s", skip=[1])


def test_rank_0_killed_with_its_store(ranks: Ranks) -> None:
    body = "def at_three():\n    if rank == 0:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    ends = ranks.run(body + LOOP.format(options=""))
    assert ends[0].code == -signal.SIGKILL
    check_ends(ends, "rank 0 failed in step 3: the store of rank 0 or of its launcher does not respond", skip=[0])


@pytest.mark.matrix
def test_a_stopped_rank_is_named_with_its_step_and_the_time_of_its_last_heartbeat(ranks: Ranks) -> None:
    body = """
def at_three():
    if rank == 1:
        print("stops at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
"""
    ends = ranks.run(body + LOOP.format(options=""), kill_last=[1])
    check_ends(ends, "rank 1 failed in step 3: no heartbeat for ", skip=[1])
    (failure,) = (failure for end in ends for failure in failures(end))  # one of the others found it
    assert (failure.rank, failure.error.partition(": no heartbeat")[0]) == (1, "in step 3")
    stopped_s = float(ends[1].text.partition("stops at ")[2].split()[0])
    assert abs(failure.time_s - stopped_s) < 2.5


@pytest.mark.matrix
def test_a_store_that_no_longer_answers(ranks: Ranks) -> None:
    body = "def at_three():\n    if rank == 0:\n        os.kill(os.getpid(), signal.SIGSTOP)\n"
    ends = ranks.run(body + LOOP.format(options=""), world_size=2, kill_last=[0])
    words = "rank 0 failed in step 3: the store of rank 0 or of its launcher does not respond (no answer)"
    check_ends(ends, words, skip=[0])


def test_a_hang_with_stacks_of_every_rank(ranks: Ranks) -> None:
    body = """
def oversleep():
    time.sleep(600)

watch = watching(hang_timeout_s=3)
for step in range(1, 100):
    if rank == 1 and step == 4:
        oversleep()
    watch.beat(step, "reduce")
    total()
"""
    ends = ranks.run(body)
    check_ends(ends, "rank 1 hung: no step for ")
    for rank, end in enumerate(ends):
        step = 3 if rank == 1 else 4
        assert f"[rank {rank}] stacks of all threads of rank {rank}, in step {step} (reduce):" in end.text
        stack = [line for line in end.text.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert any(("in oversleep" if rank == 1 else "in all_reduce") in line for line in stack)
        assert any("in _keep_time" in line for line in stack)
        assert ", in step 3 (reduce)" in end.text
    (failure,) = failures(ends[1])
    assert failure.error.startswith("hung: no step for ")


@pytest.mark.matrix
def test_no_false_alarms(ranks: Ranks) -> None:
    body = """
watch = watching({'poll_s': 1.0}, hang_timeout_s=2)
for step in range(1, 4):
    watch.beat(step)
    total()
if rank == 0:
    with watch.pause("saving"):
        time.sleep(3)  # the others wait in the collective below, without a pause of their own
total()
watch.beat(4)
if rank == 0:
    dist.destroy_process_group()
    watch.close()
    hooks = sys.excepthook, __import__("threading").excepthook
    assert "Watch" not in repr(hooks), hooks
if rank == 1:
    time.sleep(1)
    watch.close()
if rank == 2:
    for part in range(12):  # longer than dead_after_s after the end of rank 0 and its store
        watch.beat(5)
        time.sleep(0.5)
    watch.close()
print("end")
"""
    ends = ranks.run(body)
    assert [end.code for end in ends] == [0, 0, 0]
    assert all("twinflow:" not in end.text and "end\n" in end.text for end in ends)
    assert ends[0].seconds < ends[2].seconds - 2


@pytest.mark.matrix
def test_attempts_with_the_same_store(ranks: Ranks) -> None:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    body = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and rank == 1:
    sys.exit(3)  # before it has a watch
watch = watching({"dead_after_s": 3.0})
watch.beat(1)
if attempt == 1 and rank == 1:
    raise ValueError("in the second attempt")
if attempt == 1:
    time.sleep(60)
watch.close()
if attempt == 2:  # a second watch does not take the end of the first for its own, nor an early end for a death
    watch = watching({"dead_after_s": 3.0})
    watch.beat(2)
    time.sleep(0 if rank == 1 else 4.5)
    watch.close()
"""
    env = {"OUTER_STORE": str(store.port)}
    ends = ranks.run(body, 2, env | {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert [end.code for end in ends] == [0, 3]
    ends = ranks.run(body, 2, env | {"TORCHELASTIC_RESTART_COUNT": "1"})
    check_ends(ends, "rank 1 failed in step 1: ValueError: in the second attempt")
    assert failures(ends[1])[0].attempt == 1
    ends = ranks.run(body, 2, env | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert [end.code for end in ends] == [0, 0]


@pytest.mark.parametrize(
    ("how", "words", "code"),
    [
        ("sys.exit(3)", "the process ended before the others, without engine.destroy()", 3),
        ("sys.exit(0)", "the process ended before the others, without engine.destroy()", 0),
        ("try:\n            raise KeyError(7)\n        finally:\n            watch.close()", "KeyError: 7", 1),
        ("threading.Thread(target=lambda: 1 / 0).start(); time.sleep(600)", "ZeroDivisionError: division by zero", 1),
        ("with watch.guard():\n            raise OSError('disk')", "OSError: disk", 1),
    ],
    ids=["exit", "exit-0", "finally", "thread", "guard"],
)
def test_other_ways_to_fail(ranks: Ranks, how: str, words: str, code: int) -> None:
    body = f"import threading\ndef at_three():\n    if rank == 1:\n        {how}\n"
    ends = ranks.run(body + LOOP.format(options=""), world_size=2)
    assert ends[1].code == code
    assert ends[1].seconds < LIMIT_S
    check_ends(ends, f"rank 1 failed in step 3: {words}", skip=[1])
    # A rank that has left cannot report itself. The launcher must name it all the same.
    assert {failure.rank for end in ends for failure in failures(end)} == {1}


SAME = """
store = join()
def check(timeout_s=30, **facts):
    try:
        check_same(store, rank, world_size, facts, timeout_s)
        print(json.dumps("same"))
    except (ValueError, TimeoutError) as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))

model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 5 if rank == 2 else 4))
check(config="lr: 1", parameters=param_lines(torch.nn.Linear(2, 3).named_parameters()))
check(config="lr: 1\\nclip: 1" if rank != 1 else "lr: 1\\nclip: 2")
check(config="lr: 1", parameters=param_lines(model.named_parameters()))
check(**({"version": "1"} if rank == 2 else {}))
if rank != 2:
    check(timeout_s=1, config="x")
"""


def test_ranks_that_differ_are_refused(ranks: Ranks) -> None:
    ends = ranks.run(SAME)
    assert [end.code for end in ends] == [0, 0, 0]
    told = [[json.loads(line) for line in end.text.splitlines() if line.startswith('"')] for end in ends]
    config = (
        "ValueError: The ranks differ in config: rank 1 has 'line 2: clip: 2', and rank 0 has 'line 2: clip: 1'. "
        "Start every rank with the same script, config and versions."
    )
    shape = (
        "ValueError: The ranks differ in parameters: rank 2 has 'line 3: 1.weight (5, 3) torch.float32', "
        "and rank 0 has 'line 3: 1.weight (4, 3) torch."
    )
    for rank in range(3):
        assert told[rank][0] == "same"
        assert told[rank][1] == config
        assert told[rank][2].startswith(shape)
        assert "version: rank 2 has 'a value', and rank 0 has 'no value'" in told[rank][3]
    for rank in range(2):
        expected = (
            "TimeoutError: Rank 2 has not compared its config with that of rank 0 within 1 s. "
            "See the output of that rank for the reason."
        )
        assert told[rank][4] == expected


def test_a_refused_rank_0_stays_until_the_others_know(ranks: Ranks) -> None:
    ends = ranks.run("check_same(join(), rank, world_size, {'config': str(rank == 1)}, 30)")
    for rank, end in enumerate(ends):
        assert end.code == 1
        assert "config: rank 1 has 'line 1: True'" in end.text, rank


TRAINING = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import twinflow
from twinflow.checkpoint import Entry, open_checkpoint, save
from twinflow.launch.same import check_same
from twinflow.launch.store import group_store
from twinflow.launch.watch import Watch

root = Path(sys.argv[1])
me = twinflow.init_distributed("gloo")
watch = Watch(group_store(), me.rank, me.world_size)
check_same(group_store(), me.rank, me.world_size, {"config": "lr: 1"})
weight, begin = torch.zeros(1), 0
if (root / "latest").exists():
    found = open_checkpoint(root)
    begin = found.meta["step"]
    weight.fill_(found.meta["weight"])
os.write(1, f"begins after {begin}\\n".encode())
for step in range(begin + 1, 7):
    watch.beat(step)
    if step == 4 and me.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("once")
    one = torch.ones(1)
    dist.all_reduce(one)
    weight += one
    with watch.pause("saving"):
        if me.rank == 0 and step % 2 == 0:
            save(root, f"step{step}", {}, {"step": step, "weight": weight.item()}, save_latest=True, keep_last=None)
        dist.barrier()
watch.close()
dist.destroy_process_group()
os.write(1, f"weight {weight.item()}\\n".encode())
"""


@pytest.mark.matrix
def test_a_restart_by_torchrun_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    env = environment()
    result = subprocess.run(
        [*command, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=180, env=env
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("begins after 0\n") == 2
    assert result.stdout.count("begins after 2\n") == 2
    assert result.stdout.count("weight 12.0\n") == 2
    assert "with exit code 1 in attempt 0: in step 4: ValueError: once" in result.stderr


@pytest.mark.matrix
def test_twinflow_launch_names_rank_and_step(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "twinflow", "launch", "--num_procs", "2", str(script), str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment())
    assert result.returncode == 1
    assert (
        "rank 1 on localhost failed first: in step 4: ValueError: once (exit code 1)" in result.stdout + result.stderr
    )


ME = Pulse(rank=0, life=9, beats=5, step=7, doing="step", stalled_s=10.0, limit_s=10.0, state="running", place=3)
BEHIND = replace(ME, rank=1, step=6, stalled_s=9.0)


@pytest.mark.parametrize(
    ("others", "blamed"),
    [
        ([], 0),
        ([BEHIND], 1),
        ([replace(BEHIND, step=7, stalled_s=11.0)], 1),  # the other came to this step earlier and went no further
        ([replace(BEHIND, step=7)], 0),
        ([replace(BEHIND, step=7, place=2)], 1),  # it is in the backward, and this rank waits in the step
        ([replace(BEHIND, step=7, stalled_s=11.0, place=4)], 0),
        ([replace(BEHIND, stalled_s=4.0)], None),  # it is at work, and this rank waits for it
        ([replace(BEHIND, step=8, stalled_s=0.0)], 0),  # it went on without this rank
        ([replace(BEHIND, step=8, stalled_s=30.0, limit_s=60.0, state="paused")], None),
        ([replace(BEHIND, step=7, stalled_s=30.0, limit_s=0.0, state="paused")], None),
        ([replace(BEHIND, stalled_s=60.0, limit_s=60.0, state="paused")], 1),
        ([replace(BEHIND, state="closed")], 0),
        ([replace(BEHIND, state="left", stalled_s=0.0)], 1),
        ([replace(BEHIND, beats=0, step=0, stalled_s=1.0)], 1),  # it never came to its first step
    ],
)
def test_whom_to_blame(others: list[Pulse], blamed: int | None) -> None:
    found = hung_rank(ME, others)
    assert (None if found is None else found.rank) == blamed


def test_nothing_hangs_before_the_first_beat_or_without_a_limit() -> None:
    assert ME.is_over
    assert not replace(ME, beats=0).is_over
    assert not replace(ME, limit_s=0.0).is_over
    assert not replace(ME, stalled_s=9.9).is_over


def test_a_rank_that_saves_is_ahead_of_one_that_does_not() -> None:
    watch = Watch(distributed.HashStore(), 0, 1, hang_timeout_s=10.0)
    watch.beat(7, "step")
    behind = watch._pulse()
    with watch.pause("saving"):
        saving = replace(watch._pulse(), stalled_s=60.0)
    watch.close()
    found = hung_rank(saving, [replace(behind, rank=1, stalled_s=60.0)])
    assert found is not None
    assert found.rank == 1


def test_time_stands_still_while_the_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.5, 1000.0, 1000.5])
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: next(moments))
    clock = AwakeClock()
    for _ in range(3):
        clock.tick()
    assert clock.now_s == 0.5 + watch_module.LONGEST_TICK_S + 0.5


@pytest.mark.parametrize(
    ("here", "there", "wanted"),
    [
        ("a\nb", "a\nc", ("line 2: b", "line 2: c")),
        ("a", "a\nc", ("no line 2", "line 2: c")),
        ("a\n\n", "a", ("line 2: ", "no line 2")),
        ("x" * 500 + "1", "x" * 500 + "2", ("line 1: ..." + "x" * 60 + "1", "line 1: ..." + "x" * 60 + "2")),
        ("y" * 500, "z" * 500, ("line 1: " + "y" * 160 + "...", "line 1: " + "z" * 160 + "...")),
        ("a\n", "a", ("different line ends", "different line ends")),
    ],
)
def test_first_difference(here: str, there: str, wanted: tuple[str, str]) -> None:
    assert first_difference(here, there) == wanted


def test_a_cause_as_text_and_for_the_launcher() -> None:
    cause = Cause(3, 7, "error", "ValueError: x", 12.5, 1)
    assert str(cause) == "rank 3 failed in step 7: ValueError: x"
    assert read_failure(cause.failure().line()) == Failure(3, 12.5, 1, 1, "in step 7: ValueError: x")
    assert str(replace(cause, kind="hang", error="no step")) == "rank 3 hung: no step"


def test_bad_options_and_one_process() -> None:
    for options, words in (({"hang_timeout_s": -1.0}, "hang_timeout_s is -1.0"), ({"rank": 1}, "rank is 1")):
        with pytest.raises(ValueError, match=words):
            Watch(**({"store": distributed.HashStore(), "rank": 0, "world_size": 1} | options))
    hook = sys.excepthook
    watch = Watch(distributed.HashStore(), 0, 1)
    watch.beat(1)
    watch.close()
    watch.close()
    assert sys.excepthook is hook
    assert param_lines([("w", torch.zeros(2, 3))]) == "w (2, 3) torch.float32"
