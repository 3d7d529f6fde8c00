# SPDX-License-Identifier: Apache-2.0
"""The machines and slots (GPUs) of a launch, from the hostfile, --include and --exclude, and the command of each node:
torchrun on this machine, ssh to the others.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from twinflow.errors import incompatible, invalid_value

LOOPBACK = frozenset({"localhost", "127.0.0.1"})
MAX_SLOTS = 4096  # no machine has so many GPUs or starts so many ranks
MAX_SHOWN = 200  # characters of a wrong line in an error
HOST_NAMES = "letters, digits, dots, underscores and hyphens, not a hyphen at the start"
# Variables that the launcher passes to other hosts, because ssh does not forward them. Tokens and keys are not passed,
# because all users of a machine can read command lines.
FORWARDED = frozenset({"PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"})
FORWARDED_PREFIXES = ("NCCL_", "TWINFLOW_", "TORCH_")
# An elastic run waits this long for other nodes when the smallest number has come: a node that returns needs some
# seconds for its imports. A node that comes later joins with another restart of all ranks.
LAST_CALL_S = 10
# Agents of torchrun restart their ranks as often as the launcher lets them: it counts failures of the whole run.
UNLIMITED = 1_000_000


@dataclass(frozen=True)
class Host:
    """A machine with the slots that are used. `num_slots`: the number of all its slots."""

    name: str
    slots: tuple[int, ...]
    num_slots: int


def is_host(name: str) -> bool:
    """Whether `name` has only characters of host names and of IPv4 and IPv6 addresses. ssh would treat a name that
    starts with a hyphen as an option.
    """
    return len(name) <= 255 and re.fullmatch(r"[0-9A-Za-z_.:][0-9A-Za-z_.:%-]*", name) is not None


def parse_hostfile(text: str, name: str = "hostfile") -> dict[str, int]:
    """The number of slots of each host, in the order of the file. A line reads `worker-1 slots=4  # comment`."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        where = f"{name}, line {number}"
        match = re.fullmatch(r"(\S+)\s+slots=([0-9]{1,9})", words)
        # The character : separates hosts and slots in --include.
        is_known = match is not None and ":" not in match[1] and is_host(match[1])
        if match is None or not is_known or not 1 <= int(match[2]) <= MAX_SLOTS:
            expected = f"HOST slots=N, with N from 1 to {MAX_SLOTS}, and a HOST of {HOST_NAMES}"
            shown = words if len(words) <= MAX_SHOWN else f"{words[:MAX_SHOWN]}..."
            raise invalid_value(where, shown, expected, "An example is: worker-1 slots=4")
        if match[1] in found:
            remedy = f"The host {match[1]} is listed twice. Add up its slots in one line."
            raise invalid_value(where, words, "the only line of its host", remedy)
        found[match[1]] = int(match[2])
    if not found:
        raise ValueError(f"{name} names no host. Write at least one line HOST slots=N, for example: worker-1 slots=4")
    return found


def parse_filter(option: str, text: str, pool: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Hosts and slots of a filter. `worker-0@worker-1:0,2` means all slots of worker-0 and two slots of worker-1."""
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in pool:
            raise invalid_value(f"A host in {option}", host, pool, f"An example is: {option} worker-0@worker-1:0,2")
        if host in found:
            raise invalid_value(option, text, "a list without duplicate hosts", f"Name the host {host} once.")
        found[host] = _parse_slots(option, host, numbers, pool[host]) if colon else tuple(range(pool[host]))
    return found


def _parse_slots(option: str, host: str, numbers: str, num_slots: int) -> tuple[int, ...]:
    slots = set()
    for word in numbers.split(","):
        if not re.fullmatch(r"[0-9]{1,9}", word) or int(word) >= num_slots:
            raise invalid_value(f"A slot of {host} in {option}", word, f"a number from 0 to {num_slots - 1}")
        slots.add(int(word))
    return tuple(sorted(slots))


def choose_hosts(
    pool: Mapping[str, int],
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> list[Host]:
    """The chosen hosts in the order of `pool`. `num_nodes`: only the first hosts. `num_gpus`: only the first slots."""
    options = {"--include": include, "--exclude": exclude, "--num_nodes": num_nodes, "--num_gpus": num_gpus}
    given = [option for option, value in options.items() if value not in (None, "")]
    if (include or exclude) and len(given) > 1:
        reason = "each of these options selects hosts and slots"
        raise incompatible(given[1], given[0], reason, "Give only one of them.")
    if num_nodes is not None and not 1 <= num_nodes <= len(pool):
        expected = f"a number from 1 to {len(pool)}, the number of hosts"
        raise invalid_value("--num_nodes", num_nodes, expected, "To use more hosts, list them in a --hostfile.")
    chosen = {host: tuple(range(num_slots)) for host, num_slots in list(pool.items())[:num_nodes]}
    if include:
        chosen = parse_filter("--include", include, pool)
    for host, slots in (parse_filter("--exclude", exclude, pool) if exclude else {}).items():
        chosen[host] = tuple(slot for slot in chosen[host] if slot not in slots)
    if num_gpus is not None:
        smallest = min(pool[host] for host in chosen)
        if not 1 <= num_gpus <= smallest:
            expected = f"a number from 1 to {smallest}, the number of slots of the smallest host"
            raise invalid_value("--num_gpus", num_gpus, expected)
        chosen = {host: slots[:num_gpus] for host, slots in chosen.items()}
    hosts = [Host(host, chosen[host], pool[host]) for host in pool if chosen.get(host)]
    if not hosts:
        raise invalid_value("--exclude", exclude, "a list that leaves at least one slot")
    return hosts


@dataclass(frozen=True)
class Program:
    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    python: str = "python"
    directory: str = "."
    compat: bool = False  # a DeepSpeed script, in which `import deepspeed` imports twinflow
    tells_local_rank: bool = True  # with `compat`: pass --local_rank=N to the script


@dataclass(frozen=True)
class Meeting:
    """The address at which the nodes meet, and the largest number of restarts after failures.

    On one node, torchrun restarts its ranks. With several nodes, the launcher restarts all of them: torchrun cannot
    restart if the machine of its own rendezvous is down.
    """

    address: str
    port: int
    max_restarts: int = 0
    attempt: int = 0  # number of restarts by the launcher so far
    elastic: tuple[int, int] | None = None  # smallest and largest number of nodes of an elastic run


@dataclass(frozen=True)
class NodeCommand:
    """The command that starts all ranks of one host."""

    host: str
    argv: tuple[str, ...]
    is_remote: bool = False  # started over ssh

    def shell_line(self) -> str:
        return shlex.join(self.argv)


def master_address(hosts: Sequence[Host], asked: str | None) -> str:
    """The address of rank 0: `asked`, or the name of the first host. Raises ValueError if that is a loopback name and
    there are other hosts.
    """
    if asked is not None:
        return asked
    first = hosts[0].name
    if first in LOOPBACK and len(hosts) > 1:
        expected = "a name that the other hosts can reach"
        raise invalid_value("The first host", first, expected, "Pass such a name: --master_addr NAME.")
    return first if first not in LOOPBACK else "127.0.0.1"


def node_commands(
    hosts: Sequence[Host], program: Program, meeting: Meeting, env: Mapping[str, str], local_names: Collection[str]
) -> list[NodeCommand]:
    """One command for each host. The index of a host in the list is its node rank."""
    commands = []
    is_elastic = meeting.elastic is not None
    # Each group of an elastic run gets a new store: torchrun would keep that of a node that may be gone.
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if is_elastic else {}
    for node_rank, host in enumerate(hosts):
        argv = _torchrun(host, node_rank, len(hosts), program, meeting)
        if host.name in local_names:
            full = [*_env(settings | _visible_devices(host, env.get("CUDA_VISIBLE_DEVICES", ""))), *argv]
        else:
            variables = {**_forwarded(env), **settings, **_visible_devices(host, "")}
            remote = f"cd {shlex.quote(program.directory)} && exec {shlex.join([*_env(variables), *argv])}"
            # With a terminal (-tt), the remote processes get SIGHUP when the connection closes.
            full = ["ssh", "-tt", "-o", "BatchMode=yes", host.name, remote]
        name = f"{host.name}-{node_rank}" if is_elastic and host.name in LOOPBACK else host.name
        commands.append(NodeCommand(name, tuple(full), host.name not in local_names))
    return commands


def _torchrun(host: Host, node_rank: int, num_nodes: int, program: Program, meeting: Meeting) -> list[str]:
    nnodes = num_nodes if meeting.elastic is None else "{}:{}".format(*meeting.elastic)
    options: dict[str, int | str] = {"--nnodes": nnodes, "--nproc-per-node": len(host.slots)}
    if meeting.elastic is None:
        options |= {
            "--max-restarts": meeting.max_restarts if num_nodes == 1 else 0,
            "--node-rank": node_rank,
            "--master-addr": meeting.address,
            "--master-port": meeting.port,
        }
    else:
        options |= {
            "--max-restarts": UNLIMITED,
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"{meeting.address}:{meeting.port}",
            "--rdzv-id": "twinflow",
            "--rdzv-conf": f"is_host=0,last_call_timeout={LAST_CALL_S}",  # the store is in the launcher
        }
        if host.name in LOOPBACK:
            options["--local-addr"] = "127.0.0.1"
    words = [f"{name}={value}" for name, value in options.items()]
    worker = ["-m", "twinflow.launch.worker", *([f"--attempt={meeting.attempt}"] if meeting.attempt else [])]
    worker += ["--elastic"] if meeting.elastic is not None else []
    compat = [] if not program.compat else ["--compat"] if program.tells_local_rank else ["--compat", "--no_local_rank"]
    worker += [*compat, *(["--module"] if program.module else []), program.script]
    return [program.python, "-m", "torch.distributed.run", *words, *worker, *program.arguments]


def _visible_devices(host: Host, visible: str) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for the chosen slots. Empty if the chosen slots are the first ones, because each local rank
    then uses the GPU with its number anyway.
    """
    if host.slots == tuple(range(len(host.slots))):
        return {}
    here = visible.split(",") if visible else [str(slot) for slot in range(host.num_slots)]
    if len(here) < host.num_slots:
        expected = f"a list of {host.num_slots} GPUs, one for each slot of {host.name}"
        remedy = "Change this variable, or the slots in the hostfile."
        raise invalid_value("CUDA_VISIBLE_DEVICES", visible, expected, remedy)
    return {"CUDA_VISIBLE_DEVICES": ",".join(here[slot] for slot in host.slots)}


def _forwarded(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in sorted(env) if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)}


def _env(variables: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
