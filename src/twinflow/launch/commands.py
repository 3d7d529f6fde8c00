"""Makes the command of each node from the options of `twinflow launch`: torchrun on this machine, ssh to the others."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from twinflow.errors import invalid_value
from twinflow.launch.hosts import Host

LOOPBACK = frozenset({"localhost", "127.0.0.1"})
# Variables that ssh does not forward. Tokens and keys are left out: all users of a machine can read command lines.
FORWARDED = frozenset({"PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"})
FORWARDED_PREFIXES = ("NCCL_", "TWINFLOW_", "TORCH_")


@dataclass(frozen=True)
class Program:
    """The program that every rank runs."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    python: str = "python"
    directory: str = "."
    compat: bool = False  # a DeepSpeed script, in which `import deepspeed` imports twinflow
    tells_local_rank: bool = True  # with `compat`: pass --local_rank=N to the script


@dataclass(frozen=True)
class Meeting:
    """The address at which the nodes meet, and the number of restarts after a failure.

    On one node, torchrun restarts its ranks. With several nodes, the launcher restarts all of them: torchrun cannot
    restart if the machine of its own rendezvous is down.
    """

    address: str
    port: int
    max_restarts: int = 0
    attempt: int = 0  # number of restarts by the launcher so far


@dataclass(frozen=True)
class NodeCommand:
    """The command that starts all ranks of one host."""

    host: str
    argv: tuple[str, ...]
    is_remote: bool = False  # over ssh

    def shell_line(self) -> str:
        """The command as one line for a shell."""
        return shlex.join(self.argv)


def master_address(hosts: Sequence[Host], asked: str | None) -> str:
    """The address of rank 0: the first host. ValueError if the other hosts cannot reach it by its name."""
    if asked is not None:
        return asked
    first = hosts[0].name
    if first in LOOPBACK and len(hosts) > 1:
        expected = "a name that the other hosts can reach"
        raise invalid_value("The first host", first, expected, "Give such a name as --master_addr.")
    return first if first not in LOOPBACK else "127.0.0.1"


def node_commands(
    hosts: Sequence[Host], program: Program, meeting: Meeting, env: Mapping[str, str], local_names: Collection[str]
) -> list[NodeCommand]:
    """One command for each host. The index of a host in the list is its node rank."""
    commands = []
    for node_rank, host in enumerate(hosts):
        argv = _torchrun(host, node_rank, len(hosts), program, meeting)
        if host.name in local_names:
            full = [*_env(_visible_devices(host, env.get("CUDA_VISIBLE_DEVICES", ""))), *argv]
        else:
            variables = {**_forwarded(env), **_visible_devices(host, "")}
            remote = f"cd {shlex.quote(program.directory)} && exec {shlex.join([*_env(variables), *argv])}"
            # With a terminal (-tt), the remote processes get SIGHUP when the connection closes.
            full = ["ssh", "-tt", "-o", "BatchMode=yes", host.name, remote]
        commands.append(NodeCommand(host.name, tuple(full), host.name not in local_names))
    return commands


def _torchrun(host: Host, node_rank: int, num_nodes: int, program: Program, meeting: Meeting) -> list[str]:
    options: dict[str, int | str] = {
        "--nnodes": num_nodes,
        "--nproc-per-node": len(host.slots),
        "--max-restarts": meeting.max_restarts if num_nodes == 1 else 0,
        "--node-rank": node_rank,
        "--master-addr": meeting.address,
        "--master-port": meeting.port,
    }
    words = [f"{name}={value}" for name, value in options.items()]
    worker = ["-m", "twinflow.launch.worker", *([f"--attempt={meeting.attempt}"] if meeting.attempt else [])]
    compat = [] if not program.compat else ["--compat"] if program.tells_local_rank else ["--compat", "--no_local_rank"]
    worker += [*compat, *(["--module"] if program.module else []), program.script]
    return [program.python, "-m", "torch.distributed.run", *words, *worker, *program.arguments]


def _visible_devices(host: Host, visible: str) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for the chosen slots. Empty if they are the first slots, which are the local ranks
    already."""
    if host.slots == tuple(range(len(host.slots))):
        return {}
    here = visible.split(",") if visible else [str(slot) for slot in range(host.num_slots)]
    if len(here) < host.num_slots:
        expected = f"a list of {host.num_slots} GPUs, one for each slot of {host.name}"
        raise invalid_value("CUDA_VISIBLE_DEVICES", visible, expected, "Change it, or the slots of the hostfile.")
    return {"CUDA_VISIBLE_DEVICES": ",".join(here[slot] for slot in host.slots)}


def _forwarded(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in sorted(env) if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)}


def _env(variables: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
