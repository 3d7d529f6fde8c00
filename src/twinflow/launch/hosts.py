"""Which machines a launch uses, and which slots (GPUs) of each: DeepSpeed's hostfile, --include and --exclude."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from twinflow.errors import invalid_value


@dataclass(frozen=True)
class Host:
    """A machine and the slots of it that are used, of num_slots it has."""

    name: str
    slots: tuple[int, ...]
    num_slots: int


def parse_hostfile(text: str, name: str = "hostfile") -> dict[str, int]:
    """Slots of each host, in the file's order. A line reads `worker-1 slots=4`; # starts a comment."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        where = f"{name}, line {number}"
        match = re.fullmatch(r"(\S+)\s+slots=([0-9]+)", words)
        # A host that starts with - would reach ssh as an option; : and @ separate hosts in --include.
        if match is None or int(match[2]) < 1 or not re.fullmatch(r"[^-:@,][^:@,]*", match[1]):
            raise invalid_value(where, words, "HOST slots=N with N >= 1", "For example: worker-1 slots=4")
        if match[1] in found:
            raise invalid_value(where, words, f"each host once, and {match[1]} is there already", "Add up its slots.")
        found[match[1]] = int(match[2])
    if not found:
        raise invalid_value(name, "empty", "at least one line HOST slots=N")
    return found


def parse_filter(option: str, text: str, pool: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Hosts and slots of `worker-0@worker-1:0,2`: all of worker-0, two of worker-1."""
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in pool:
            raise invalid_value(f"host in {option}", host, pool, f"{option} reads HOST@HOST:SLOT,SLOT.")
        if host in found:
            raise invalid_value(option, text, f"each host once, and {host} is there twice")
        found[host] = _parse_slots(option, host, numbers, pool[host]) if colon else tuple(range(pool[host]))
    return found


def _parse_slots(option: str, host: str, numbers: str, num_slots: int) -> tuple[int, ...]:
    slots = set()
    for word in numbers.split(","):
        if not re.fullmatch(r"[0-9]+", word) or int(word) >= num_slots:
            raise invalid_value(f"slot of {host} in {option}", word, f"0 to {num_slots - 1}")
        slots.add(int(word))
    return tuple(sorted(slots))


def choose_hosts(
    pool: Mapping[str, int],
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> list[Host]:
    """The hosts and slots to use, in the pool's order; the counts take the first ones."""
    if include and exclude:
        raise invalid_value("--exclude", exclude, "nothing beside --include", "Give one of the two.")
    for option, count in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if count is not None and (include or exclude):
            raise invalid_value(
                option, count, "nothing beside --include or --exclude", "They name the slots themselves."
            )
    if num_nodes is not None and not 1 <= num_nodes <= len(pool):
        raise invalid_value(
            "--num_nodes", num_nodes, f"1 to {len(pool)}, the hosts there are", "More need a --hostfile."
        )
    chosen = {host: tuple(range(num_slots)) for host, num_slots in list(pool.items())[:num_nodes]}
    if include:
        chosen = parse_filter("--include", include, pool)
    for host, slots in (parse_filter("--exclude", exclude, pool) if exclude else {}).items():
        chosen[host] = tuple(slot for slot in chosen[host] if slot not in slots)
    if num_gpus is not None:
        smallest = min(pool[host] for host in chosen)
        if not 1 <= num_gpus <= smallest:
            raise invalid_value("--num_gpus", num_gpus, f"1 to {smallest}, the slots of the smallest host")
        chosen = {host: slots[:num_gpus] for host, slots in chosen.items()}
    hosts = [Host(host, chosen[host], pool[host]) for host in pool if chosen.get(host)]
    if not hosts:
        raise invalid_value("--exclude", exclude, "a choice that leaves at least one slot")
    return hosts
