"""`twinflow launch`: a script as many processes, on this machine or on those of a hostfile."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from twinflow.errors import invalid_value
from twinflow.launch.commands import LOOPBACK, Meeting, NodeCommand, Program, master_address, node_commands
from twinflow.launch.environment import DEFAULT_PORT
from twinflow.launch.hosts import Host, choose_hosts, parse_hostfile
from twinflow.launch.run import run_and_restart

# Options end at the script: what follows is the script's own, whatever it looks like.
CONTEXT = {"allow_interspersed_args": False}


def _option(name: str, help: str) -> Any:
    """DeepSpeed's spelling with underscores, and the usual one with dashes."""
    dashed = f"--{name.replace('_', '-')}"
    return typer.Option(*dict.fromkeys((f"--{name}", dashed)), help=help)


def launch(
    script: Annotated[str, typer.Argument(help="The Python script, or with --module the module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own, handed on unchanged.")] = None,
    num_gpus: Annotated[
        int | None, _option("num_gpus", "Processes on each machine. Default: its GPUs, or 1 without any.")
    ] = None,
    num_procs: Annotated[
        int | None, _option("num_procs", "The same for CPU machines: any number, whatever GPUs there are.")
    ] = None,
    num_nodes: Annotated[int | None, _option("num_nodes", "Only the first so many hosts.")] = None,
    hostfile: Annotated[
        Path | None, _option("hostfile", "The machines, a line each: HOST slots=N. Default: this one.")
    ] = None,
    include: Annotated[str, _option("include", "Only these: HOST@HOST:SLOT,SLOT.")] = "",
    exclude: Annotated[str, _option("exclude", "All but these: HOST@HOST:SLOT,SLOT.")] = "",
    master_addr: Annotated[
        str | None, _option("master_addr", "Where the others reach the first host. Default: its name.")
    ] = None,
    master_port: Annotated[
        int | None,
        _option("master_port", f"The port there. Default: {DEFAULT_PORT}; a free one where all is on this machine."),
    ] = None,
    module: Annotated[bool, _option("module", "The script is a module, as in python -m.")] = False,
    compat: Annotated[
        bool, _option("compat", "The script is for DeepSpeed: `import deepspeed` gives it twinflow.")
    ] = False,
    no_local_rank: Annotated[
        bool, _option("no_local_rank", "With --compat: without the --local_rank=N that DeepSpeed gives to scripts.")
    ] = False,
    max_restarts: Annotated[int, _option("max_restarts", "Start all ranks again after a failure, so many times.")] = 0,
    dry_run: Annotated[bool, _option("dry_run", "Print the commands, one a line, and start nothing.")] = False,
) -> None:
    """Start a script as many processes with torchrun: one for each GPU, here or over ssh on the hosts of a file.

    The first rank that fails ends all of them, is named, and gives the exit code.
    """
    try:
        if no_local_rank and not compat:
            raise invalid_value(
                "--no_local_rank", True, "nothing without --compat", "Scripts are told by LOCAL_RANK alone."
            )
        program = make_program(script, tuple(arguments or ()), module)
        program = replace(program, compat=compat, tells_local_rank=not no_local_rank)
        check_counts(num_gpus, num_procs, num_nodes, hostfile)
        if hostfile is None:
            pool = local_pool(num_gpus, num_procs, torch.cuda.device_count())
        else:
            pool = read_hostfile(hostfile)
        hosts = choose_hosts(pool, include, exclude, num_nodes, num_gpus)
        meeting = make_meeting(hosts, master_addr, master_port, max_restarts)
        names = local_names()

        def commands_of(attempt: int) -> list[NodeCommand]:
            return node_commands(hosts, program, replace(meeting, attempt=attempt), os.environ, names)

        commands = commands_of(0)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if dry_run:
        for command in commands:
            typer.echo(command.shell_line())
        return
    run(commands_of, max_restarts if len(hosts) > 1 else 0)


def run(commands_of: Callable[[int], list[NodeCommand]], max_restarts: int) -> None:
    """Run the nodes, again where they may, and leave with the code of the first failure."""
    outcome = run_and_restart(commands_of, max_restarts)
    if outcome.message:
        typer.echo(f"error: {outcome.message}", err=True)
    raise typer.Exit(outcome.exit_code)


def make_program(script: str, arguments: tuple[str, ...], module: bool) -> Program:
    """What every rank runs, in this directory."""
    if not module and not Path(script).is_file():
        raise invalid_value("script", script, "a file that is there", "For a module add --module before it.")
    return Program(script, arguments, module, sys.executable, os.getcwd())


def check_counts(num_gpus: int | None, num_procs: int | None, num_nodes: int | None, hostfile: Path | None) -> None:
    """Counts that can be meant together."""
    for option, count in (("--num_gpus", num_gpus), ("--num_procs", num_procs), ("--num_nodes", num_nodes)):
        if count is not None and count < 1:
            raise invalid_value(option, count, "a whole number >= 1")
    if num_procs is not None and num_gpus is not None:
        raise invalid_value("--num_procs", num_procs, "nothing beside --num_gpus", "Give one of the two.")
    if num_procs is not None and hostfile is not None:
        raise invalid_value("--num_procs", num_procs, "nothing beside --hostfile", "Its slots say how many.")


def local_pool(num_gpus: int | None, num_procs: int | None, gpus_here: int) -> Mapping[str, int]:
    """This machine's slots: its GPUs; without any, as many as are asked for."""
    return {"localhost": num_procs or gpus_here or num_gpus or 1}


def read_hostfile(path: Path) -> dict[str, int]:
    """The hosts of a file."""
    if not path.is_file():
        raise invalid_value("--hostfile", str(path), "a file that is there")
    return parse_hostfile(path.read_text(), str(path))


def make_meeting(hosts: list[Host], address: str | None, port: int | None, max_restarts: int) -> Meeting:
    """Where the nodes meet. On one machine any free port will do, so that two runs do not collide."""
    if max_restarts < 0:
        raise invalid_value("--max_restarts", max_restarts, "a whole number >= 0")
    if port is not None and not 1 <= port <= 65535:
        raise invalid_value("--master_port", port, "1 to 65535")
    here = len(hosts) == 1 and hosts[0].name in LOOPBACK
    if port is None:
        port = free_port() if here else DEFAULT_PORT
    return Meeting(master_address(hosts, address), port, max_restarts)


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def local_names() -> set[str]:
    """Names in a hostfile that need no ssh."""
    return {*LOOPBACK, socket.gethostname(), socket.gethostname().split(".")[0]}
