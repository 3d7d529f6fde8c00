"""Which rank this process is: under torchrun, Open MPI, MPICH or Intel MPI, and Slurm; and torch's group from that.

MPI comes before Slurm: inside a Slurm job mpirun starts its daemons with srun, and each rank then sees the daemon's
SLURM_ variables as well. PMI_RANK alone does not count as MPI there, since srun sets it too.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from twinflow.errors import invalid_value

LOGGER = logging.getLogger("twinflow")
LOCAL_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 29500
# Of nobody (RFC 5737): the way to it is the way out of this machine.
OUTSIDE = "192.0.2.1"
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class RankEnvironment:
    """This process among all: its rank, its rank on this machine, and where rank 0 listens."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int


ALONE = RankEnvironment(0, 0, 1, 1, LOCAL_ADDRESS, DEFAULT_PORT)  # without a launcher


def rank_environment(env: Mapping[str, str]) -> RankEnvironment | None:
    """What the launcher of this process said; None where there is none."""
    if "RANK" in env or "LOCAL_RANK" in env:
        return _torchrun(env)
    if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        return _open_mpi(env)
    if "MPI_LOCALRANKID" in env:
        return _mpich(env)
    if "SLURM_PROCID" in env or "SLURM_STEP_NODELIST" in env:
        return _slurm(env)
    if "PMI_RANK" in env or "PMI_SIZE" in env:
        return _mpich(env)
    if "WORLD_SIZE" in env:
        return _torchrun(env)
    return None


def _torchrun(env: Mapping[str, str]) -> RankEnvironment:
    local_size = "LOCAL_SIZE" if "LOCAL_SIZE" in env and "LOCAL_WORLD_SIZE" not in env else "LOCAL_WORLD_SIZE"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", local_size)  # DeepSpeed's launcher says LOCAL_SIZE
    _need(env, (*names, "MASTER_ADDR", "MASTER_PORT"), "Start the script with torchrun or `twinflow launch`.")
    return _checked(env, names, env["MASTER_ADDR"], _number(env, "MASTER_PORT"))


def _open_mpi(env: Mapping[str, str]) -> RankEnvironment:
    prefix = "OMPI_COMM_WORLD_"
    names = (f"{prefix}RANK", f"{prefix}LOCAL_RANK", f"{prefix}SIZE", f"{prefix}LOCAL_SIZE")
    _need(env, names, "Start the script with mpirun.")
    return _checked(env, names, _mpi_address(env, names[2], names[3]), _port(env, DEFAULT_PORT))


def _mpich(env: Mapping[str, str]) -> RankEnvironment:
    names = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")
    _need(env, names, "Start the script with mpiexec.")
    return _checked(env, names, _mpi_address(env, names[2], names[3]), _port(env, DEFAULT_PORT))


def _mpi_address(env: Mapping[str, str], size: str, local_size: str) -> str:
    """MPI does not tell where rank 0 is; on one machine nobody has to."""
    if "MASTER_ADDR" not in env and _number(env, size) != _number(env, local_size):
        raise invalid_value(
            "MASTER_ADDR", None, "the address of rank 0's machine", "Hand it on with mpirun -x MASTER_ADDR=HOST."
        )
    return env.get("MASTER_ADDR", LOCAL_ADDRESS)


def _slurm(env: Mapping[str, str]) -> RankEnvironment | None:
    if "SLURM_STEP_NODELIST" not in env and env["SLURM_PROCID"] == "0" and env.get("SLURM_NTASKS", "1") == "1":
        return None  # a batch script itself, with one task: it has a rank, but srun did not start it
    _need(
        env,
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"),
        "Start the script with srun, or unset SLURM_PROCID for one process.",
    )
    counts = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE"))
    if counts is None:
        _need(env, ("SLURM_STEP_TASKS_PER_NODE",), "Start the script with srun.")
    assert counts is not None
    tasks = tasks_per_node(counts)
    node = _number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    if node >= len(tasks):
        raise invalid_value("SLURM_NODEID", node, f"0 to {len(tasks) - 1}, the nodes of {counts!r}")
    values = {**env, "tasks of this node": str(tasks[node])}
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "tasks of this node")
    address = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
    # Two jobs on one node must not meet: the port comes from the job's number, below the ports the system hands out.
    job = _number(env, "SLURM_JOB_ID") if "SLURM_JOB_ID" in env else 0
    return _checked(values, names, address, _port(env, 20000 + job % 10000))


def first_host(nodelist: str) -> str:
    """The first host of Slurm's list: rack1n05 for `rack[1-2]n[05-08,12],login`."""
    match = re.match(r"(?:[^,\[\]]|\[[0-9][0-9,-]*\])+(?=,|$)", nodelist)
    if match is None:
        raise invalid_value("SLURM_STEP_NODELIST", nodelist, "hosts as Slurm writes them, like node[01-04,07]")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[0])


def tasks_per_node(text: str) -> list[int]:
    """Tasks of each node of Slurm's `4(x2),3`: 4, 4, 3."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise invalid_value("SLURM_STEP_TASKS_PER_NODE", text, "counts as Slurm writes them, like 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _need(env: Mapping[str, str], names: Sequence[str], remedy: str) -> None:
    missing = [name for name in names if name not in env]
    if missing:
        there = ", ".join(f"{name}={env[name]}" for name in names if name in env)
        half = f"half of a launcher's variables: {there} without {', '.join(missing)}"
        raise ValueError(f"{half}, but all of them or none must be set. {remedy}")


def _number(env: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]+", env[name]):
        raise invalid_value(name, env[name], "a whole number >= 0")
    return int(env[name])


def _port(env: Mapping[str, str], default: int) -> int:
    return _number(env, "MASTER_PORT") if "MASTER_PORT" in env else default


def _checked(env: Mapping[str, str], names: Sequence[str], address: str, port: int) -> RankEnvironment:
    """A rank below its world's size, on this machine and overall. names: rank, local rank, size, local size."""
    rank, local_rank, world_size, local_size = (_number(env, name) for name in names)
    for name, value, size_name, size in (
        (names[0], rank, names[2], world_size),
        (names[1], local_rank, names[3], local_size),
    ):
        if value >= size:
            raise invalid_value(name, value, f"below {size_name}, which is {size}")
    if local_size > world_size:
        raise invalid_value(names[3], local_size, f"at most {names[2]}, which is {world_size}")
    if not 1 <= port <= 65535:
        raise invalid_value("MASTER_PORT", port, "1 to 65535")
    return RankEnvironment(rank, local_rank, world_size, local_size, address, port)


def init_distributed(
    backend: str = "auto", timeout_s: float = 600.0, env: Mapping[str, str] = os.environ
) -> RankEnvironment:
    """Join torch's process group as the launcher says; a process without a launcher is a world of one, with no group.

    backend: "nccl", "gloo" or "auto": nccl where each rank has a GPU of its own, else gloo. This process takes the GPU
    of its local rank. Where a group is there already it stays as it is.
    """
    import torch
    from torch import distributed

    if backend not in ("auto", "nccl", "gloo"):
        raise invalid_value("backend", backend, ("auto", "nccl", "gloo"))
    if timeout_s <= 0:
        raise invalid_value("timeout_s", timeout_s, "seconds, above 0")
    if distributed.is_available() and distributed.is_initialized():
        return joined(env)
    found = rank_environment(env)
    if found is None:
        return ALONE
    has_cuda = torch.cuda.is_available()
    if backend == "nccl" and not has_cuda:
        raise invalid_value("backend", backend, ("auto", "gloo"), "There is no CUDA here.")
    if has_cuda:
        # Slurm may show each task its own GPU alone, as number 0.
        torch.cuda.set_device(found.local_rank % torch.cuda.device_count())
    os.environ.update(_torchrun_variables(found))  # torch reads some of them, and so do other libraries
    os.environ.update(gloo_variables(found, env))
    timeout = timedelta(seconds=timeout_s)
    store = _attempts_store(found, timeout)
    chosen = backend
    if backend != "gloo":
        card = str(torch.cuda.get_device_properties().uuid) if has_cuda else ""
        chosen = choose_backend(backend, shared_card(store, found, card, timeout))
    distributed.init_process_group(chosen, store=store, timeout=timeout, rank=found.rank, world_size=found.world_size)
    return found


def shared_card(store: Any, rank: RankEnvironment, card: str, timeout: timedelta) -> str | None:
    """A GPU that several ranks have, by its name; "" where a rank has none; None: each has one of its own.

    Every rank asks, with its own card. NCCL would find out in the first step, and not say it well.
    """
    turn = store.add(f"cards of {rank.rank}", 1)  # a process may ask again, when it has left its group
    shared, everyone = f"{turn}: shared card", f"{turn}: all cards"
    if not card or store.add(f"{turn}: card {card}", 1) > 1:
        store.set(shared, card)
    if store.add(f"{turn}: cards", 1) == rank.world_size:
        store.set(everyone, "")
    store.wait([everyone], timeout)
    return store.get(shared).decode() if store.check([shared]) else None


def choose_backend(asked: str, shared: str | None) -> str:
    """What "auto" stands for; NCCL is refused where ranks share a card."""
    if shared is None:
        return "nccl"
    if asked == "nccl":
        why = f"Several ranks have the GPU {shared}: start fewer of them" if shared else "Give every rank a GPU"
        raise invalid_value("backend", asked, ("auto", "gloo"), f"{why}, or use gloo.")
    if shared:
        LOGGER.warning(f"several ranks share the GPU {shared}: they talk over gloo, through the host")
    return "gloo"


def gloo_variables(found: RankEnvironment, env: Mapping[str, str]) -> dict[str, str]:
    """Over several machines, the interface for gloo; nothing where the user names one.

    gloo by itself takes the address to which this machine's name resolves. Often that is none, or loopback, which the
    other machines cannot reach. Groups of NCCL need it too: what they agree on goes over gloo.
    """
    if found.world_size == found.local_world_size or "GLOO_SOCKET_IFNAME" in env:
        return {}
    for address in (found.master_addr, OUTSIDE):
        name = interface_towards(address)
        if name is not None:
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def interface_towards(address: str) -> str | None:
    """The network interface on the way to an address, or that has it; None for loopback, and where that is unknown."""
    if sys.platform != "linux":
        return None
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it chooses the way
        own = socket.inet_aton(probe.getsockname()[0])
        if own[0] == 127:
            return None
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                asked = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24] == own:
                    return name
    return None


def attempt() -> int:
    """How often torchrun has started the run again."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if re.fullmatch("[0-9]+", count) else 0


def _attempts_store(found: RankEnvironment, timeout: timedelta) -> Any:
    """torchrun keeps one store over all its restarts, and gloo would find the addresses of processes that are gone:
    each attempt gets keys of its own. Without torchrun's store rank 0 has one."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.rendezvous import rendezvous

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        kept: Any = TCPStore(found.master_addr, found.master_port, is_master=False, timeout=timeout)
    else:
        kept, _, _ = next(rendezvous("env://", found.rank, found.world_size, timeout=timeout))
    return PrefixStore(f"twinflow/group/{attempt()}", kept)


def joined(env: Mapping[str, str] = os.environ) -> RankEnvironment:
    """This process in the group that the script has made; without one, a world of one."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return ALONE
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    found = rank_environment(env)
    if found is not None and (found.rank, found.world_size) == (rank, world_size):
        return found
    # The script made it without a launcher, or inside one rank of a launcher: all of it counts as on this machine.
    return RankEnvironment(rank, rank, world_size, world_size, LOCAL_ADDRESS, DEFAULT_PORT)


def _torchrun_variables(found: RankEnvironment) -> dict[str, str]:
    return {
        "RANK": str(found.rank),
        "LOCAL_RANK": str(found.local_rank),
        "WORLD_SIZE": str(found.world_size),
        "LOCAL_WORLD_SIZE": str(found.local_world_size),
        "MASTER_ADDR": found.master_addr,
        "MASTER_PORT": str(found.master_port),
    }
