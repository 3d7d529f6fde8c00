# SPDX-License-Identifier: Apache-2.0
"""`twinflow launch`: starts a script on several processes, on this machine or on the hosts of a hostfile."""

from __future__ import annotations

import math
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer

from twinflow.cli import check_whole, told_errors
from twinflow.errors import incompatible, invalid_value
from twinflow.files import read_text
from twinflow.launch.commands import (
    HOST_NAMES,
    LOOPBACK,
    MAX_SLOTS,
    Host,
    Meeting,
    NodeCommand,
    Program,
    choose_hosts,
    is_host,
    master_address,
    node_commands,
    parse_hostfile,
)
from twinflow.launch.elastic import RETURN_S, host_store, run_elastic
from twinflow.launch.environment import DEFAULT_PORT, check_port, free_port
from twinflow.launch.run import run_and_restart

ELASTIC_RESTARTS = 10
# Everything after the script's name is passed to the script, even if it looks like an option of this command.
CONTEXT = {"allow_interspersed_args": False}


def _option(default: Any, name: str, help: str) -> Any:
    """An option in DeepSpeed's spelling with underscores and in the usual spelling with dashes."""
    flags = [flag for one in name.split() for flag in (_flag(one), _flag(one.replace("_", "-")))]
    return typer.Option(default, *dict.fromkeys(flags), help=help)


def _flag(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name}"


def _unused(default: Any, names: str, reason: str) -> Any:
    """An option of DeepSpeed's launcher that has no effect. A note says so if it is given."""

    def note(value: Any) -> Any:
        if value != default:
            typer.echo(f"note: {_flag(names.split()[-1])} has no effect, because {reason}.", err=True)
        return value

    return typer.Option(default, *map(_flag, names.split()), hidden=True, callback=note)


def _refused(default: Any, names: str, remedy: str) -> Any:
    """An option of DeepSpeed's launcher that must have its default."""

    def refuse(value: Any) -> Any:
        with told_errors():
            if value != default:
                raise invalid_value(_flag(names.split()[-1]), value, f"{default!r}, its default", remedy)
        return value

    return typer.Option(default, *map(_flag, names.split()), hidden=True, callback=refuse)


def launch(
    script: str = typer.Argument(help="The Python script. With --module: the name of a module."),
    arguments: list[str] | None = typer.Argument(None, help="Arguments of the script, passed on unchanged."),
    num_gpus: int | None = _option(
        None, "num_gpus num_accelerators", "Processes on each machine. Default: one for each GPU, or 1 without GPUs."
    ),
    num_procs: int | None = _option(None, "num_procs", "Processes on this machine, whatever number of GPUs it has."),
    num_nodes: int | None = _option(None, "num_nodes", "Use only the first N hosts."),
    hostfile: Path | None = _option(
        None, "H hostfile", "File with one machine in each line: HOST slots=N. Default: this machine."
    ),
    include: str = _option("", "i include", "Use only these hosts and slots, for example worker-0@worker-1:0,2."),
    exclude: str = _option("", "e exclude", "Use all hosts and slots except these, for example worker-0@worker-1:0,2."),
    master_addr: str | None = _option(
        None,
        "master_addr",
        "Address at which the other hosts reach the first host. Default: the name of the first host.",
    ),
    master_port: int | None = _option(
        None,
        "master_port",
        f"Port on the first host. Default: {DEFAULT_PORT}, or a free port if all ranks are on this machine.",
    ),
    module: bool = _option(False, "module", "Run the script as a module, like python -m."),
    compat: bool = _option(False, "compat", "Run a DeepSpeed script: its `import deepspeed` imports twinflow."),
    no_local_rank: bool = _option(
        False, "no_local_rank", "With --compat: do not pass --local_rank=N to the script as DeepSpeed does."
    ),
    max_restarts: int | None = _option(
        None,
        "max_restarts",
        f"How often to restart all ranks after a failure. Default: 0, or {ELASTIC_RESTARTS} in an elastic run.",
    ),
    min_nodes: int | None = _option(
        None, "min_nodes", "Elastic run: go on while at least this many nodes are there.  [default: 1]"
    ),
    max_nodes: int | None = _option(
        None,
        "max_nodes",
        "Elastic run: train on up to this many nodes. The run goes on when nodes fail and when they come back. "
        "Without --hostfile all nodes are on this machine.",
    ),
    return_after: float | None = _option(
        None,
        "return_after",
        f"Elastic run: seconds until a node that has ended is started again.  [default: {RETURN_S:g}]",
    ),
    dry_run: bool = _option(False, "dry_run", "Print the commands, one in each line, and start nothing."),
    # Options of DeepSpeed's launcher that are accepted or refused by name.
    force_multi: bool = _unused(False, "force_multi", "a run on one host needs no launcher for several hosts"),
    no_ssh_check: bool = _unused(False, "no_ssh_check", "hosts are not checked before the start"),
    bind_cores_to_rank: bool = _unused(False, "bind_cores_to_rank", "ranks on a machine share its cores"),
    save_pid: bool = _unused(False, "save_pid", "this command ends all ranks when it is ended"),
    log_level: str = _unused("info", "log_level", "the launcher prints only errors"),
    quiet: bool = _unused(False, "q quiet", "the launcher prints only errors"),
    launcher: str = _refused("pdsh", "launcher", "Hosts are reached over ssh. With MPI or Slurm, use mpirun or srun."),
    launcher_args: str = _refused("", "launcher_args", "Set options of ssh in ~/.ssh/config."),
    ssh_port: int | None = _refused(None, "ssh_port", "Set Port in ~/.ssh/config."),
    no_ssh: bool = _refused(False, "no_ssh", "Start torchrun on each machine."),
    node_rank: int = _refused(-1, "node_rank", "Start torchrun on each machine."),
    no_python: bool = _refused(False, "no_python", "Give a Python script."),
    autotuning: str = _refused("", "autotuning", "Use `twinflow plan`, which predicts memory and speed before a run."),
    enable_each_rank_log: str = _refused("None", "enable_each_rank_log", "Redirect the output of this command."),
    bind_core_list: str | None = _refused(None, "bind_core_list", "Start this command with taskset or numactl."),
    venv_script: str | None = _refused(None, "venv_script", "Start this command in the virtual environment."),
    elastic_training: bool = _refused(False, "elastic_training", "Use --min_nodes and --max_nodes."),
) -> None:
    """Start a script on several processes with torchrun: one for each GPU, on this machine or over ssh on other hosts.

    If a rank fails, all ranks are ended. The error names the rank that failed first. The exit code of this command is
    the exit code of that rank.
    """
    with told_errors():
        if no_local_rank and not compat:
            reason = "only --compat passes --local_rank=N to the script"
            raise incompatible(
                "--no_local_rank", "a launch without --compat", reason, "Leave --no_local_rank out, or add --compat."
            )
        if not module and not Path(script).is_file():
            raise invalid_value("script", script, "an existing file", "To run a module, add --module before its name.")
        check_counts(num_gpus, num_procs, num_nodes, hostfile)
        check_elastic(min_nodes, max_nodes, num_nodes, return_after)
        pool = _slots_of_hosts(hostfile, num_procs, num_gpus)
        program = Program(
            script, tuple(arguments or ()), module, sys.executable, os.getcwd(), compat, not no_local_rank
        )
        hosts = choose_hosts(pool, include, exclude, num_nodes, num_gpus)
        own_name = socket.gethostname()
        names = {*LOOPBACK, own_name, own_name.split(".")[0]}  # names of this machine, for which ssh is not needed
        if max_nodes is not None:
            hosts = elastic_hosts(hosts, max_nodes, num_procs)
            restarts = ELASTIC_RESTARTS if max_restarts is None else max_restarts
            check_whole("--max_restarts", restarts, least=0)
            check_whole("--master_port", master_port)
            address = master_addr or ("127.0.0.1" if {host.name for host in hosts} <= names else own_name)
            store = None if dry_run else host_store(address, master_port or 0)
            port = master_port or 0 if store is None else store.port
            meeting = Meeting(address, port, restarts, elastic=(min_nodes or 1, max_nodes))
        else:
            meeting = make_meeting(hosts, master_addr, master_port, max_restarts or 0)
            if hosts[0].name in names and not dry_run:
                check_port("--master_port", meeting.port)

        def commands_of(attempt: int) -> list[NodeCommand]:
            return node_commands(hosts, program, replace(meeting, attempt=attempt), os.environ, names)

        commands = commands_of(0)
    if dry_run:
        for command in commands:
            typer.echo(command.shell_line())
        return
    if max_nodes is not None:
        outcome = run_elastic(commands, meeting.max_restarts, RETURN_S if return_after is None else return_after)
    else:
        outcome = run_and_restart(commands_of, meeting.max_restarts if len(hosts) > 1 else 0)
    if outcome.message:
        typer.echo(f"error: {outcome.message}", err=True)
    raise typer.Exit(outcome.exit_code)


def _slots_of_hosts(hostfile: Path | None, num_procs: int | None, num_gpus: int | None) -> dict[str, int]:
    """The number of slots of each host: of the hostfile, or of this machine. A slot runs one process."""
    if hostfile is None:
        # The slots of this machine are its GPUs. Without GPUs: the number of processes that the user asks for.
        return {"localhost": num_procs or torch.cuda.device_count() or num_gpus or 1}
    if not hostfile.is_file():
        remedy = "Correct the path, or leave --hostfile out to run on this machine only."
        raise invalid_value("--hostfile", str(hostfile), "an existing file", remedy)
    return parse_hostfile(read_text(hostfile), str(hostfile))


def check_elastic(
    min_nodes: int | None, max_nodes: int | None, num_nodes: int | None, return_after: float | None
) -> None:
    """Raise a ValueError for options of an elastic run that conflict."""
    check_whole("--min_nodes", min_nodes)
    check_whole("--max_nodes", max_nodes)
    if return_after is not None and not 0.0 <= return_after < math.inf:
        raise invalid_value("--return_after", return_after, "a finite number of seconds >= 0")
    for name, value in (("--min_nodes", min_nodes), ("--return_after", return_after)):
        if value is not None and max_nodes is None:
            raise invalid_value("--max_nodes", max_nodes, f"given with {name}", "Add --max_nodes N.")
    if min_nodes is not None and max_nodes is not None and min_nodes > max_nodes:
        raise invalid_value("--min_nodes", min_nodes, f"at most {max_nodes}, the value of --max_nodes")
    if max_nodes is not None and num_nodes is not None:
        reason = "an elastic run has no fixed number of nodes"
        raise incompatible(f"--num_nodes {num_nodes}", f"--max_nodes {max_nodes}", reason, "Leave --num_nodes out.")


def elastic_hosts(hosts: list[Host], max_nodes: int, num_procs: int | None) -> list[Host]:
    """The hosts of an elastic run. Without a hostfile, the slots of this machine are divided among `max_nodes` nodes.
    `num_procs`: processes of each node on this machine.
    """
    if len(hosts) > 1 or hosts[0].name not in LOOPBACK:
        if max_nodes > len(hosts):
            remedy = "To use more hosts, list them in the --hostfile."
            raise invalid_value("--max_nodes", max_nodes, f"at most {len(hosts)}, the number of hosts", remedy)
        return hosts[:max_nodes]
    num_gpus = torch.cuda.device_count()
    each = num_procs or max(1, num_gpus // max_nodes)
    first = [i * each if each * max_nodes <= num_gpus else 0 for i in range(max_nodes)]  # nodes may share GPUs
    return [Host(hosts[0].name, tuple(range(at, at + each)), max(num_gpus, each)) for at in first]


def check_counts(num_gpus: int | None, num_procs: int | None, num_nodes: int | None, hostfile: Path | None) -> None:
    """Raise a ValueError for counts below 1 and for counts that conflict."""
    check_whole("--num_gpus", num_gpus, most=MAX_SLOTS)
    check_whole("--num_procs", num_procs, most=MAX_SLOTS)
    check_whole("--num_nodes", num_nodes)
    if num_procs is not None and num_gpus is not None:
        reason = "both set the number of processes on a machine"
        raise incompatible(f"--num_procs {num_procs}", f"--num_gpus {num_gpus}", reason, "Leave one of them out.")
    if num_procs is not None and hostfile is not None:
        reason = "the slots in the hostfile set the number of processes on each host"
        raise incompatible(f"--num_procs {num_procs}", f"--hostfile {hostfile}", reason, "Leave one of them out.")


def make_meeting(hosts: list[Host], address: str | None, port: int | None, max_restarts: int) -> Meeting:
    """Rendezvous of the nodes. Without `port`, a run on this machine uses a free one, so that runs do not collide."""
    check_whole("--max_restarts", max_restarts, least=0, most=2**31 - 1)
    if address is not None and not is_host(address):
        raise invalid_value("--master_addr", address, f"the name or the address of a machine: {HOST_NAMES}")
    if port is not None and not 1 <= port <= 65535:
        raise invalid_value("--master_port", port, "a port from 1 to 65535")
    here = len(hosts) == 1 and hosts[0].name in LOOPBACK
    if port is None:
        port = free_port() if here else DEFAULT_PORT
    return Meeting(master_address(hosts, address), port, max_restarts)
