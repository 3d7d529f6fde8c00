# SPDX-License-Identifier: Apache-2.0
"""The pure parts of `twinflow launch`: hosts, commands, a rank's environment, first causes."""

from __future__ import annotations

import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch._C._distributed_c10d import HashStore

import twinflow
from twinflow.cli.launch import free_port
from twinflow.dist.group import Group
from twinflow.launch.commands import Host, Meeting, Program, choose_hosts, master_address, node_commands, parse_hostfile
from twinflow.launch.environment import (
    ALONE,
    UNKNOWN,
    RankEnvironment,
    check_outer,
    choose_backend,
    first_host,
    init_distributed,
    rank_environment,
    shared_card,
    tasks_per_node,
)
from twinflow.launch.machines import LocalRank, find_local, found_local, local_ranks, publish
from twinflow.launch.worker import Failure, error_of, first_failure, read_failure

POOL = {"worker-0": 2, "worker-1": 4, "worker-2": 1}


@given(st.dictionaries(st.from_regex(r"[a-z0-9][a-z0-9.-]{0,9}", fullmatch=True), st.integers(1, 99), min_size=1))
def test_a_hostfile_reads_back(pool: dict[str, int]) -> None:
    lines = [f"  {host}\t slots={slots}  # a comment" for host, slots in pool.items()]
    assert parse_hostfile("# hosts\n\n" + "\n".join(lines)) == pool
    assert list(parse_hostfile("\n".join(lines))) == list(pool)


@pytest.mark.parametrize("line", ["worker-1", "worker-1 slots=", "worker-1 slots=0", "a b slots=1", "-oProxy slots=1"])
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"hostfile, line 2 is .*HOST slots=N"):
        parse_hostfile(f"worker-0 slots=1\n{line}\n")


def test_other_bad_hostfiles() -> None:
    with pytest.raises(ValueError, match=r"line 2 .*a is listed twice"):
        parse_hostfile("a slots=1\na slots=2")
    with pytest.raises(ValueError, match="at least one line"):
        parse_hostfile("# nothing\n")


@given(st.data())
def test_include_and_exclude_are_complements(data: st.DataObject) -> None:
    named = {host: data.draw(st.sets(st.integers(0, slots - 1))) for host, slots in POOL.items()}
    named = {host: slots for host, slots in named.items() if slots}
    text = "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in named.items())
    if not text:
        return
    kept = {(host.name, slot) for host in choose_hosts(POOL, include=text) for slot in host.slots}
    assert kept == {(host, slot) for host, slots in named.items() for slot in slots}
    everything = {(host, slot) for host, slots in POOL.items() for slot in range(slots)}
    if kept == everything:
        with pytest.raises(ValueError, match="at least one slot"):
            choose_hosts(POOL, exclude=text)
    else:
        rest = {(host.name, slot) for host in choose_hosts(POOL, exclude=text) for slot in host.slots}
        assert rest == everything - kept


def test_filters_and_counts() -> None:
    chosen = choose_hosts(POOL, include="worker-1:2,0@worker-0")
    assert chosen == [Host("worker-0", (0, 1), 2), Host("worker-1", (0, 2), 4)]
    assert [host.name for host in choose_hosts(POOL, exclude="worker-1")] == ["worker-0", "worker-2"]
    assert choose_hosts(POOL, num_nodes=2, num_gpus=1) == [Host("worker-0", (0,), 2), Host("worker-1", (0,), 4)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"include": "worker-9"},
            "host in --include is 'worker-9', but must be one of 'worker-0', 'worker-1', 'worker-2'",
        ),
        ({"exclude": "worker-1:4"}, "slot of worker-1 in --exclude is '4', but must be a number from 0 to 3"),
        ({"include": "worker-1:"}, "slot of worker-1 in --include is ''"),
        ({"include": "worker-1@worker-1:0"}, "Name the host worker-1 once"),
        ({"include": "worker-0", "exclude": "worker-1"}, "--exclude cannot be used with --include"),
        ({"include": "worker-0", "num_gpus": 1}, "--num_gpus cannot be used with --include"),
        ({"num_nodes": 4}, "--num_nodes is 4, but must be a number from 1 to 3"),
        ({"num_gpus": 2}, "--num_gpus is 2, but must be a number from 1 to 1"),
    ],
)
def test_bad_choices(options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_hosts(POOL, **options)  # type: ignore[arg-type]


def test_the_command_of_each_node() -> None:
    hosts = [Host("here", (0, 1), 2), Host("worker-1", (1, 3), 4)]
    program = Program("my train.py", ("--lr", "1e-3"), python="python3", directory="/a b")
    env = {"PYTHONPATH": "/p q", "NCCL_DEBUG": "INFO", "HF_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "6,7"}
    here, there = node_commands(hosts, program, Meeting("here", 29500), env, {"here"})
    torchrun = (
        "python3 -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --max-restarts=0 --node-rank={} "
        "--master-addr=here --master-port=29500 -m twinflow.launch.worker 'my train.py' --lr 1e-3"
    )
    assert here.shell_line() == torchrun.format(0)
    assert there.argv[:-1] == ("ssh", "-tt", "-o", "BatchMode=yes", "worker-1")
    variables = "NCCL_DEBUG=INFO 'PYTHONPATH=/p q' CUDA_VISIBLE_DEVICES=1,3"
    assert there.argv[-1] == f"cd '/a b' && exec env {variables} {torchrun.format(1)}"
    assert shlex.split(there.shell_line()) == list(there.argv)


def test_slots_of_what_is_visible() -> None:
    hosts = [Host("localhost", (1,), 2)]
    for visible, wanted in (("6,7", "7"), ("", "1")):
        env = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
        (command,) = node_commands(hosts, Program("x"), Meeting("127.0.0.1", 1), env, {"localhost"})
        assert command.argv[:2] == ("env", f"CUDA_VISIBLE_DEVICES={wanted}")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES is '6'"):
        node_commands(hosts, Program("x"), Meeting("a", 1), {"CUDA_VISIBLE_DEVICES": "6"}, {"localhost"})


def test_who_starts_ranks_again() -> None:
    """torchrun on one node, the launcher over several: a torchrun whose machine is gone cannot."""
    hosts = [Host("a", (0,), 1), Host("b", (0,), 1)]
    program, meeting = Program("m", module=True), Meeting("a", 7, max_restarts=3)
    (alone,) = node_commands(hosts[:1], program, meeting, {}, {"a"})
    assert "--max-restarts=3" in alone.argv
    for command in node_commands(hosts, program, replace(meeting, attempt=2), {}, {"a"}):
        words = command.argv[-1] if command.host == "b" else command.shell_line()
        assert "--max-restarts=0" in words
        assert words.endswith("-m twinflow.launch.worker --attempt=2 --module m")
        assert command.is_remote == (command.host == "b")


def test_where_the_nodes_meet() -> None:
    local, other = Host("localhost", (0,), 1), Host("b", (0,), 1)
    assert master_address([local], None) == "127.0.0.1"
    assert master_address([other, local], None) == "b"
    assert master_address([local, other], "a") == "a"
    with pytest.raises(ValueError, match="--master_addr"):
        master_address([local, other], None)


TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"} | {
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1234",
}
BARE = {name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL_")}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NODELIST": "gpu[03-04,09]",
    "SLURM_STEP_TASKS_PER_NODE": "4,2,1",
    "SLURM_JOB_ID": "123456",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "MPI_LOCALRANKID": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({"HOME": "/"}, None),
        (TORCHRUN, RankEnvironment(3, 1, 4, 2, "a", 1234)),
        (SLURM, RankEnvironment(5, 1, 7, 2, "gpu03", 23456)),
        (SLURM | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}, RankEnvironment(5, 1, 7, 2, "b", 7)),
        (OPEN_MPI, RankEnvironment(1, 1, 2, 2, "127.0.0.1", 29500)),
        (MPICH | {"MASTER_ADDR": "c"}, RankEnvironment(1, 0, 2, 1, "c", 29500)),
        # RANK, WORLD_SIZE and MASTER_* alone, as in a pod of a PyTorchJob; PMI without the variables of hydra.
        (BARE, RankEnvironment(3, UNKNOWN, 4, UNKNOWN, "a", 1234)),
        (BARE | {"RANK": "0", "WORLD_SIZE": "1"}, RankEnvironment(0, 0, 1, 1, "a", 1234)),
        (BARE | {"LOCAL_RANK": "1"}, RankEnvironment(3, 1, 4, UNKNOWN, "a", 1234)),
        (BARE | {"LOCAL_WORLD_SIZE": "2"}, RankEnvironment(3, UNKNOWN, 4, 2, "a", 1234)),
        (BARE | {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, RankEnvironment(3, 1, 4, 2, "a", 1234)),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "c"},
            RankEnvironment(1, UNKNOWN, 2, UNKNOWN, "c", 29500),
        ),
        # torchrun inside a Slurm task, mpirun inside a Slurm job, srun with PMI.
        (SLURM | TORCHRUN, RankEnvironment(3, 1, 4, 2, "a", 1234)),
        (SLURM | OPEN_MPI, RankEnvironment(1, 1, 2, 2, "127.0.0.1", 29500)),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}, RankEnvironment(5, 1, 7, 2, "gpu03", 23456)),
        # A batch script itself, before any srun.
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, None),
    ],
)
def test_rank_environments(env: dict[str, str], wanted: RankEnvironment | None) -> None:
    assert rank_environment(env) == wanted


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, "RANK=0 without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK"),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, "without SLURM_STEP_NODELIST.*srun"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "without OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MASTER_ADDR is not set.*or MPI_LOCALNRANKS is not set"),
        (MPICH, "MASTER_ADDR is not set.*mpiexec -genv MASTER_ADDR HOST"),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x', but must be a whole number"),
        (TORCHRUN | {"RANK": "4"}, "RANK is 4, but must be below WORLD_SIZE, which is 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE is 5, but must be at most WORLD_SIZE"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but must be below LOCAL_WORLD_SIZE, which is 2"),
        (BARE | {"LOCAL_RANK": "4"}, "LOCAL_RANK is 4, but must be below WORLD_SIZE, which is 4"),
        (TORCHRUN | {"LOCAL_SIZE": "4"}, "LOCAL_SIZE is '4', but must be equal to LOCAL_WORLD_SIZE, which is 2"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT is 0"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is '', but must be the name or the IP address"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0, but must be a whole number >= 1"),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID is 3"),
    ],
)
def test_half_a_launcher_is_refused(env: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rank_environment(env)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("gpu[007,010-012],login", "gpu007"),
        ("rack[1-2]n[05-08].cluster", "rack1n05.cluster"),
    ],
)
def test_slurm_hosts(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_slurm_lists_that_are_none() -> None:
    assert tasks_per_node("4(x2),3", "TASKS") == [4, 4, 3]
    for bad in ("", "n[1", "n[]", ",n1"):
        with pytest.raises(ValueError, match="SLURM_STEP_NODELIST"):
            first_host(bad)
    with pytest.raises(ValueError, match="TASKS"):
        tasks_per_node("4(x", "TASKS")


def test_one_process_has_no_group() -> None:
    assert twinflow.init_distributed(env={}).world_size == 1
    assert not distributed.is_initialized()
    with pytest.raises(ValueError, match="backend is 'mpi'"):
        init_distributed("mpi", env={})
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            init_distributed("nccl", env=TORCHRUN)


@pytest.mark.parametrize(
    ("cards", "shared"), [(("a", "b", "c"), None), (("a", "b", "a"), "a"), (("a", "", "b"), ""), (("",) * 3, "")]
)
def test_ranks_that_share_a_card_all_know(cards: tuple[str, ...], shared: str | None) -> None:
    store, timeout = HashStore(), timedelta(seconds=30)
    me = [replace(ALONE, rank=rank, world_size=len(cards)) for rank in range(len(cards))]
    for _ in range(2):  # a process that leaves its group may ask again
        with ThreadPoolExecutor(len(cards)) as ranks:
            said = list(ranks.map(lambda i: shared_card(store, me[i], cards[i], timeout), range(len(cards))))
        assert said == [shared] * len(cards)


def test_ranks_that_share_a_card_use_gloo(caplog: pytest.LogCaptureFixture) -> None:
    assert [choose_backend(asked, None) for asked in ("auto", "nccl")] == ["nccl", "nccl"]
    assert choose_backend("auto", "") == "gloo"
    assert not caplog.messages
    assert choose_backend("auto", "GPU-1") == "gloo"
    assert "Several ranks share the GPU GPU-1" in caplog.text
    with pytest.raises(ValueError, match='Several ranks use the GPU GPU-1: start fewer ranks, or use backend="gloo"'):
        choose_backend("nccl", "GPU-1")
    with pytest.raises(ValueError, match='Give every rank a GPU, or use backend="gloo"'):
        choose_backend("nccl", "")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (SLURM | BARE, "WORLD_SIZE is 4, but must be at least SLURM_NTASKS, which is 7. Unset RANK and WORLD_SIZE"),
        (SLURM | BARE | {"WORLD_SIZE": "7"}, "RANK is 3, but must be equal to SLURM_PROCID, which is 5"),
        (OPEN_MPI | BARE | {"WORLD_SIZE": "1", "RANK": "0"}, "at least OMPI_COMM_WORLD_SIZE, which is 2"),
        (MPICH | BARE | {"RANK": "0", "WORLD_SIZE": "2"}, "RANK is 0, but must be equal to PMI_RANK, which is 1"),
        (BARE, ""),
        (SLURM | BARE | {"RANK": "5", "WORLD_SIZE": "7"}, ""),
        (SLURM | BARE | {"WORLD_SIZE": "14"}, ""),  # each task starts two ranks
        (SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, ""),
        (SLURM | OPEN_MPI | TORCHRUN, ""),  # mpirun's daemon is the task of Slurm
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"} | BARE, ""),  # a batch script
    ],
)
def test_variables_of_two_launchers(env: dict[str, str], words: str) -> None:
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if not words:
        check_outer(env, rank, world_size)
        return
    with pytest.raises(ValueError, match=words):
        check_outer(env, rank, world_size)
    with pytest.raises(ValueError, match=words):  # before a process group is created
        init_distributed(env=env)


def test_ranks_are_counted_by_machine() -> None:
    a, b = LocalRank("a 1"), LocalRank("b 2")
    assert local_ranks([a, a, b, a]) == [(0, 3), (1, 3), (0, 1), (2, 3)]
    assert local_ranks([a, LocalRank("a 2")]) == [(0, 1), (0, 1)]  # two machines with one name
    assert local_ranks([replace(a, rank=1), a, replace(b, size=1)]) == [(1, 2), (0, 2), (0, 1)]
    for said, words in (
        ([replace(a, size=1), a], r"LOCAL_WORLD_SIZE of rank 0 is 1, but must be 2, .* on a \(ranks 0, 1\)"),
        ([a, b, replace(a, rank=2)], r"LOCAL_RANK of rank 2 is 2, but must be below 2, .* on a \(ranks 0, 2\)"),
        ([replace(a, rank=0)] * 2, "LOCAL_RANK of rank 1 is 0, but must be different from that of rank 0"),
    ):
        with pytest.raises(ValueError, match=words):
            local_ranks(said)


def test_a_rank_that_is_there_twice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    publish(store, 0, 2, None, None)
    assert found_local(store, 0, 2) is None
    with pytest.raises(TimeoutError, match=r"Rank 1 has not published .* Start 2 processes"):
        find_local(store, 0, 2, 0.05)
    monkeypatch.setattr(os, "getpid", lambda: -7)
    publish(store, 0, 2, None, None)
    with pytest.raises(ValueError, match=r"RANK is 0 in two processes: process \d+ on .*, and process -7 on "):
        find_local(store, 1, 2, 5.0)


def test_slurm_variables_make_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    env = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1"}
    env |= {"SLURM_STEP_TASKS_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name in TORCHRUN:
        monkeypatch.setenv(name, "")  # so that what init_distributed sets is undone
    found = init_distributed("gloo", env=env)
    try:
        assert (found.world_size, distributed.get_world_size(), distributed.get_backend()) == (1, 1, "gloo")
        assert os.environ["LOCAL_RANK"] == "0"
        assert init_distributed(env=env) == found
        assert init_distributed(env={}).world_size == 1
    finally:
        distributed.destroy_process_group()


def test_a_failure_is_a_line() -> None:
    failure = Failure(3, 12.5, 1, 0, "ValueError: two\nlines")
    assert read_failure(f"[host] noise {failure.line()}") == Failure(3, 12.5, 1, 0, "ValueError: two lines")
    assert read_failure("rank 3 failed") is None


def test_the_first_cause() -> None:
    lost = Failure(0, 1.0, 1, 0, "RuntimeError: Connection closed by peer")
    killed = Failure(1, 1.1, 137, 0, "killed by SIGKILL")
    later = Failure(2, 2.0, 1, 0, "ValueError: x")
    assert first_failure([later, lost, killed]) == killed
    assert first_failure([lost]) == lost
    assert first_failure([killed, Failure(2, 9.0, 1, 1, "after a restart")]) == Failure(2, 9.0, 1, 1, "after a restart")
    assert first_failure([]) is None


def test_a_collective_that_is_given_up_is_not_the_first_cause() -> None:
    class Pending:
        def is_completed(self) -> bool:
            return False

    group = object.__new__(Group)
    group.handle = None
    group._gives_up = lambda: True
    with pytest.raises(RuntimeError) as caught:
        group._wait(Pending())
    assert Failure(0, 1.0, 1, 0, f"RuntimeError: {caught.value}").is_lost_peer


def test_errors_in_what_a_rank_wrote() -> None:
    traceback = "Traceback (most recent call last):\n  File x\n    y\nValueError: boom\n"
    assert error_of(f"noise\n{traceback}more noise\n") == "ValueError: boom"
    assert error_of("".join(f"[rank1]: {line}\n" for line in traceback.splitlines())) == "ValueError: boom"
    assert error_of("KeyError: 1\n\nTraceback (most recent call last):\n  File x\nTypeError: 2\n") == "TypeError: 2"
    assert error_of("only a line\n\n") == "only a line"
    assert error_of("") == "no output on stderr"
