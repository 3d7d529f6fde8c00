# SPDX-License-Identifier: Apache-2.0
"""Finds the rank of this process and creates torch's process group. The rank comes from the variables of torchrun, Open
MPI, MPICH, Intel MPI or Slurm, or from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone. If the local rank or the
number of local ranks is not set, the ranks exchange the names of their machines (machines.py).

MPI is checked before Slurm: inside a Slurm job, mpirun starts its daemons with srun, and each rank also has the SLURM_
variables of its daemon. Inside a Slurm job, PMI_RANK alone does not mean that mpirun started the process, because srun
sets it too.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from twinflow.errors import invalid_value
from twinflow.launch.worker import ELASTIC

LOGGER = logging.getLogger("twinflow")
LOCAL_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 29500
# No machine has this address (RFC 5737). The route to this address uses the network interface to other machines.
OUTSIDE = "192.0.2.1"
_SIOCGIFADDR = 0x8915
# The names of the variables for rank, local rank, size and local size.
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
_MPICH = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")
# The variables for rank and size of launchers that may start processes with RANK. MPI comes first, see above.
_OUTER = (_OPEN_MPI[::2], _MPICH[::2], ("SLURM_PROCID", "SLURM_NTASKS"))
UNKNOWN = -1  # a local rank or a number of local ranks that the launcher does not set
_CORRECT = "Correct this environment variable, or unset it and start the ranks with a launcher."


@dataclass(frozen=True)
class RankEnvironment:
    """The rank of this process in the world and on its machine, and the address of rank 0. Only `rank_environment`
    returns local values that are UNKNOWN.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int

    @property
    def knows_machine(self) -> bool:
        return UNKNOWN not in (self.local_rank, self.local_world_size)


ALONE = RankEnvironment(0, 0, 1, 1, LOCAL_ADDRESS, DEFAULT_PORT)  # a process without a launcher


def rank_environment(env: Mapping[str, str]) -> RankEnvironment | None:
    """The rank of this process from its launcher's variables. Returns None without a launcher. Raises ValueError if
    some variables are missing or wrong. Local values that the launcher does not set are UNKNOWN.
    """
    if "RANK" in env or "LOCAL_RANK" in env:
        return _torchrun(env)
    if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        return _mpi(env, _OPEN_MPI, "mpirun")
    if "MPI_LOCALRANKID" in env:
        return _mpi(env, _MPICH, "mpiexec")
    if "SLURM_PROCID" in env or "SLURM_STEP_NODELIST" in env:
        return _slurm(env)
    if "PMI_RANK" in env or "PMI_SIZE" in env:
        return _mpi(env, _MPICH, "mpiexec")
    if "WORLD_SIZE" in env:
        return _torchrun(env)
    return None


def _torchrun(env: Mapping[str, str]) -> RankEnvironment:
    local_size = "LOCAL_SIZE" if "LOCAL_SIZE" in env and "LOCAL_WORLD_SIZE" not in env else "LOCAL_WORLD_SIZE"
    if env.get("LOCAL_SIZE", env.get(local_size)) != env.get(local_size):
        allowed = f"equal to LOCAL_WORLD_SIZE, which is {env[local_size]}"
        raise invalid_value("LOCAL_SIZE", env["LOCAL_SIZE"], allowed, "Unset one of these variables.")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", local_size)  # DeepSpeed's launcher sets LOCAL_SIZE.
    needed = (*names[::2], "MASTER_ADDR", "MASTER_PORT")
    _need(env, needed, "Start the script with torchrun or `twinflow launch`, or set all of these variables.")
    return _checked(env, names, env["MASTER_ADDR"], DEFAULT_PORT)


def check_outer(env: Mapping[str, str], rank: int, world_size: int) -> None:
    """Raises ValueError if RANK and WORLD_SIZE contradict the launcher that started this process. They may come from an
    earlier job, and each process would then train alone, or all would have one rank.

    A process of the launcher may start several ranks, so WORLD_SIZE may be larger than its number of processes. Ranks
    of torchrun (with TORCHELASTIC_RUN_ID) are not checked, because torchrun may order them differently.
    """
    if "RANK" not in env or "TORCHELASTIC_RUN_ID" in env:
        return
    for rank_name, size_name in _OUTER:
        # A batch script of Slurm has these variables too, but is not one of the tasks.
        if rank_name in env and size_name in env and (rank_name != "SLURM_PROCID" or "SLURM_STEP_NODELIST" in env):
            outer_rank, outer_size = _number(env, rank_name), _number(env, size_name)
            remedy = f"Unset RANK and WORLD_SIZE to use {rank_name} and {size_name}, or unset these two."
            if world_size < outer_size:
                raise invalid_value("WORLD_SIZE", world_size, f"at least {size_name}, which is {outer_size}", remedy)
            if world_size == outer_size and rank != outer_rank:
                raise invalid_value("RANK", rank, f"equal to {rank_name}, which is {outer_rank}", remedy)
            return


def _mpi(env: Mapping[str, str], names: Sequence[str], starter: str) -> RankEnvironment:
    """The rank from variables of MPI, which do not include the address of rank 0. One machine does not need it."""
    _need(env, names[::2], f"Start the script with {starter}.")
    is_local = _number(env, names[2]) == _number(env, names[3], UNKNOWN)
    if "MASTER_ADDR" not in env and not is_local:
        setting = "mpirun -x MASTER_ADDR=HOST" if starter == "mpirun" else "mpiexec -genv MASTER_ADDR HOST"
        raise ValueError(
            "MASTER_ADDR is not set, but must be the address of rank 0's machine, because the ranks are on several "
            f"machines, or {names[3]} is not set. Set this environment variable for all ranks with `{setting}`."
        )
    return _checked(env, names, env.get("MASTER_ADDR", LOCAL_ADDRESS), DEFAULT_PORT)


def _slurm(env: Mapping[str, str]) -> RankEnvironment | None:
    if "SLURM_STEP_NODELIST" not in env and env["SLURM_PROCID"] == "0" and env.get("SLURM_NTASKS", "1") == "1":
        return None  # A batch script with one task has a rank, but srun did not start it.
    names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"]
    tasks_name, wider = "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"
    if tasks_name not in env and wider in env:
        tasks_name = wider
    remedy = "Start the script with srun, or unset SLURM_PROCID for one process."
    _need(env, [*names, "SLURM_STEP_NODELIST", tasks_name], remedy)
    tasks = tasks_per_node(env[tasks_name], tasks_name)
    node = _number(env, "SLURM_NODEID", 0)
    if node >= len(tasks):
        allowed = f"from 0 to {len(tasks) - 1}, because {tasks_name}={env[tasks_name]} means {len(tasks)} nodes"
        raise invalid_value("SLURM_NODEID", node, allowed)
    own = f"{tasks_name} of this node"
    address = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
    # Two jobs on one node need different ports. The port depends on the job ID and is below the ephemeral ports.
    port = 20000 + _number(env, "SLURM_JOB_ID", 0) % 10000
    return _checked({**env, own: str(tasks[node])}, [*names, own], address, port)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: rack1n05 for `rack[1-2]n[05-08,12],login`."""
    match = re.match(r"(?:[^,\[\]]|\[[0-9][0-9,-]*\])+(?=,|$)", nodelist)
    if match is None:
        raise invalid_value("SLURM_STEP_NODELIST", nodelist, "a node list of Slurm, such as node[01-04,07]")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[0])


def tasks_per_node(text: str, name: str) -> list[int]:
    """The number of tasks of each node: [4, 4, 3] for Slurm's `4(x2),3`. `name`: the variable, for the error."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise invalid_value(name, text, "a list of counts of Slurm, such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _need(env: Mapping[str, str], names: Sequence[str], remedy: str) -> None:
    missing = [name for name in names if name not in env]
    if missing:
        given = ", ".join(f"{name}={env[name]}" for name in names if name in env)
        raise ValueError(
            f"Only some variables of a launcher are set: {given} without {', '.join(missing)}. "
            f"All of them or none must be set. {remedy}"
        )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    if not re.fullmatch(r"[0-9]+", env[name]):
        raise invalid_value(name, env[name], "a whole number >= 0", _CORRECT)
    return int(env[name])


def _checked(env: Mapping[str, str], names: Sequence[str], address: str, default_port: int) -> RankEnvironment:
    """Checks that the rank is below the world size and the local rank is below the local size. `names`: rank, local
    rank, size, local size. The local ones may be missing.
    """
    rank, local_rank, world_size, local_size = numbers = [_number(env, name, UNKNOWN) for name in names]
    for name, size in zip(names[2:], numbers[2:], strict=True):
        if name in env and size < 1:
            raise invalid_value(name, size, "a whole number >= 1")
    if not address:
        raise invalid_value("MASTER_ADDR", address, "the name or the IP address of the machine of rank 0")
    for i, j in ((0, 2), (1, 3 if names[3] in env else 2)):
        if numbers[i] >= numbers[j]:
            raise invalid_value(names[i], numbers[i], f"below {names[j]}, which is {numbers[j]}", _CORRECT)
    port = _number(env, "MASTER_PORT", default_port)
    if local_size > world_size:
        raise invalid_value(names[3], local_size, f"at most {names[2]}, which is {world_size}", _CORRECT)
    if not 1 <= port <= 65535:
        raise invalid_value("MASTER_PORT", port, "a port from 1 to 65535", _CORRECT)
    if world_size == 1:
        local_rank, local_size = 0, 1
    return RankEnvironment(rank, local_rank, world_size, local_size, address, port)


def init_distributed(
    backend: str = "auto", timeout_s: float = 600.0, env: Mapping[str, str] = os.environ
) -> RankEnvironment:
    """Creates torch's process group from the launcher's variables and returns this process's rank. A process without a
    launcher has world size 1 and no group.

    `backend`: "nccl", "gloo" or "auto". "auto" is nccl if each rank has its own GPU, else gloo. The GPU of the local
    rank becomes the current device. An existing process group is kept.
    """
    import torch
    from torch import distributed

    if backend not in ("auto", "nccl", "gloo"):
        raise invalid_value("backend", backend, ("auto", "nccl", "gloo"))
    if timeout_s <= 0:
        raise invalid_value("timeout_s", timeout_s, "a number of seconds above 0")
    if distributed.is_available() and distributed.is_initialized():
        return joined(env, timeout_s)
    found = rank_environment(env)
    if found is None:
        return ALONE
    check_outer(env, found.rank, found.world_size)
    has_cuda = torch.cuda.is_available()
    if backend == "nccl" and not has_cuda:
        raise invalid_value("backend", backend, ("auto", "gloo"), "This machine has no CUDA device for nccl.")
    # torch and other libraries read some of the variables of torchrun.
    os.environ.update(_variables(found))
    timeout = timedelta(seconds=timeout_s)
    store = _attempts_store(found, timeout)
    found = _find_machine(store, found, timeout_s)
    os.environ.update(_variables(found))
    os.environ.update(gloo_variables(found, env))
    if has_cuda:
        # With Slurm, each task may see only its own GPU, with index 0.
        torch.cuda.set_device(found.local_rank % torch.cuda.device_count())
    if backend != "gloo":
        card = str(torch.cuda.get_device_properties().uuid) if has_cuda else ""
        backend = choose_backend(backend, shared_card(store, found, card, timeout))
    distributed.init_process_group(backend, store=store, timeout=timeout, rank=found.rank, world_size=found.world_size)
    return found


def is_elastic(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank belongs to an elastic run, which goes on with other ranks when this one fails."""
    return env.get(ELASTIC) == "1"


def _variables(found: RankEnvironment) -> dict[str, str]:
    return {name.upper(): str(value) for name, value in asdict(found).items() if value != UNKNOWN}


def _find_machine(store: Any, found: RankEnvironment, timeout_s: float) -> RankEnvironment:
    """The same rank with its local rank and the number of local ranks. All ranks call this function."""
    if found.world_size == 1:
        return found
    from twinflow.launch.machines import find_local

    _publish(store, found)
    if found.knows_machine:
        return found
    local_rank, local_size = find_local(store, found.rank, found.world_size, timeout_s)
    return replace(found, local_rank=local_rank, local_world_size=local_size)


def _publish(store: Any, found: RankEnvironment, is_described: bool = True) -> None:
    """Tells the other ranks the machine of this one. Also a rank with local variables publishes them, because another
    rank may have none.
    """
    from twinflow.launch.machines import publish

    local_rank, local_size = (None if one == UNKNOWN else one for one in (found.local_rank, found.local_world_size))
    publish(store, found.rank, found.world_size, local_rank, local_size, is_described)


def shared_card(store: Any, rank: RankEnvironment, card: str, timeout: timedelta) -> str | None:
    """The UUID of a GPU that several ranks use, "" if a rank has no GPU, or None if each rank has its own GPU.

    Every rank calls this function with its own GPU. NCCL would fail only in the first step, with an unclear message.
    """
    turn = store.add(f"cards of {rank.rank}", 1)  # A process may call this function again after it has left its group.
    shared, everyone = f"{turn}: shared card", f"{turn}: all cards"
    if not card or store.add(f"{turn}: card {card}", 1) > 1:
        store.set(shared, card)
    if store.add(f"{turn}: cards", 1) == rank.world_size:
        store.set(everyone, "")
    store.wait([everyone], timeout)
    return store.get(shared).decode() if store.check([shared]) else None


def choose_backend(asked: str, shared: str | None) -> str:
    """The backend to use if the user asked for `asked`. `shared`: see `shared_card`; not None forbids NCCL."""
    if shared is None:
        return "nccl"
    if asked == "nccl":
        why = f"Several ranks use the GPU {shared}: start fewer ranks" if shared else "Give every rank a GPU"
        raise invalid_value("backend", asked, ("auto", "gloo"), f'{why}, or use backend="gloo".')
    if shared:
        LOGGER.warning(f"Several ranks share the GPU {shared}, so all ranks communicate with gloo, through the host.")
    return "gloo"


def gloo_variables(found: RankEnvironment, env: Mapping[str, str]) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME for runs on several machines. Empty if the user has set it, or if no interface is found.

    By default, gloo uses the address to which the host name resolves. Often there is none, or it is a loopback address
    that other machines cannot reach. Runs with NCCL need the variable too, because ranks exchange small values with
    gloo.
    """
    if found.world_size == found.local_world_size or "GLOO_SOCKET_IFNAME" in env:
        return {}
    name = interface_towards(found.master_addr) or interface_towards(OUTSIDE)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


def interface_towards(address: str) -> str | None:
    """The network interface of the route to an address. None for the loopback interface, or if the interface is
    unknown.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # Selects the route without sending anything.
        own = socket.inet_aton(probe.getsockname()[0])
        if own[0] == 127:
            return None
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # An interface may have no address.
                asked = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24] == own:
                    return name
    return None


@contextmanager
def port_in_use(name: str, port: int) -> Iterator[None]:
    """In this context, torch's error for a port on which another process listens becomes a ValueError that names it."""
    try:
        yield
    except RuntimeError as error:  # a DistNetworkError
        if "EADDRINUSE" not in str(error):
            raise
        raise _in_use(name, port) from None


def check_port(name: str, port: int) -> None:
    """Raises ValueError if another process on this machine listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise _in_use(name, port) from None


def _in_use(name: str, port: int) -> ValueError:
    remedy = "Another process listens on this port. End it, or choose another port."
    return invalid_value(name, port, "a port that no other process on the machine of rank 0 uses", remedy)


def free_port() -> int:
    """A port on which no process listens now."""
    with socket.socket() as made:
        made.bind((LOCAL_ADDRESS, 0))
        return int(made.getsockname()[1])


def _attempts_store(found: RankEnvironment, timeout: timedelta) -> Any:
    """A store with a prefix for this attempt. torchrun keeps one store for all restarts, and gloo would find the
    addresses of processes that have ended. Without torchrun's store, rank 0 creates one.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.rendezvous import rendezvous

    from twinflow.launch.store import attempt

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        kept: Any = TCPStore(found.master_addr, found.master_port, is_master=False, timeout=timeout)
    else:
        with port_in_use("MASTER_PORT", found.master_port):
            kept, _, _ = next(rendezvous("env://", found.rank, found.world_size, timeout=timeout))
    return PrefixStore(f"twinflow/group/{attempt()}", kept)


def joined(env: Mapping[str, str] = os.environ, timeout_s: float | None = None) -> RankEnvironment:
    """The rank of this process in an existing process group. World size 1 without a group.

    If the variables do not say which ranks are on one machine, the ranks exchange the names of their machines. All
    ranks must then call this function with `timeout_s`. Without `timeout_s`, the result of an earlier exchange is used.
    If there was none, all ranks count as local. A rank whose variables describe it does not wait for the others, which
    may say later that theirs do not: call this function again when all ranks have called it.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return ALONE
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    found = rank_environment(env)
    is_described = found is not None and (found.rank, found.world_size) == (rank, world_size)
    if found is None or not is_described:
        # The script created the group without a launcher, or inside one rank of a launcher.
        found = RankEnvironment(rank, UNKNOWN, world_size, UNKNOWN, LOCAL_ADDRESS, DEFAULT_PORT)
    if world_size == 1:
        return found if found.knows_machine else replace(found, local_rank=0, local_world_size=1)
    from twinflow.launch.machines import are_described, find_local, found_local
    from twinflow.launch.store import group_store

    store = group_store()
    if timeout_s is not None:
        _publish(store, found, is_described)
    if found.knows_machine and are_described(store, world_size):
        return found
    if timeout_s is not None:
        local_rank, local_size = find_local(store, rank, world_size, timeout_s)
    else:
        local_rank, local_size = found_local(store, rank, world_size) or (rank, world_size)
    return replace(found, local_rank=local_rank, local_world_size=local_size)
