"""The machines and slots (GPUs) of a launch, from DeepSpeed's hostfile, --include and --exclude."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from twinflow.errors import incompatible, invalid_value


@dataclass(frozen=True)
class Host:
    """A machine with the slots that are used. `num_slots`: the number of all its slots."""

    name: str
    slots: tuple[int, ...]
    num_slots: int


def parse_hostfile(text: str, name: str = "hostfile") -> dict[str, int]:
    """The number of slots of each host, in the order of the file. A line reads `worker-1 slots=4`. A comment starts
    with #.
    """
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        where = f"{name}, line {number}"
        match = re.fullmatch(r"(\S+)\s+slots=([0-9]+)", words)
        # ssh would take a host that starts with - for an option. The characters : and @ separate hosts in --include.
        if match is None or int(match[2]) < 1 or not re.fullmatch(r"[^-:@,][^:@,]*", match[1]):
            raise invalid_value(where, words, "HOST slots=N with N >= 1", "An example is: worker-1 slots=4")
        if match[1] in found:
            remedy = f"The host {match[1]} is listed twice. Add up its slots in one line."
            raise invalid_value(where, words, "the only line of its host", remedy)
        found[match[1]] = int(match[2])
    if not found:
        raise invalid_value(name, "an empty file", "a file with at least one line HOST slots=N")
    return found


def parse_filter(option: str, text: str, pool: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Hosts and slots of a filter. `worker-0@worker-1:0,2` means all slots of worker-0 and two slots of worker-1."""
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in pool:
            raise invalid_value(f"A host in {option}", host, pool, f"The format of {option} is HOST@HOST:SLOT,SLOT.")
        if host in found:
            raise invalid_value(option, text, "a list without duplicate hosts", f"The host {host} is listed twice.")
        found[host] = _parse_slots(option, host, numbers, pool[host]) if colon else tuple(range(pool[host]))
    return found


def _parse_slots(option: str, host: str, numbers: str, num_slots: int) -> tuple[int, ...]:
    slots = set()
    for word in numbers.split(","):
        if not re.fullmatch(r"[0-9]+", word) or int(word) >= num_slots:
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
    """The hosts and slots to use, in the order of the pool. `num_nodes` and `num_gpus` select the first ones."""
    if include and exclude:
        raise incompatible("--exclude", "--include", "each of them selects the slots", "Give only one of them.")
    for option, count in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if count is not None and (include or exclude):
            other = "--include" if include else "--exclude"
            raise incompatible(option, other, "each of them selects the slots", "Give only one of them.")
    if num_nodes is not None and not 1 <= num_nodes <= len(pool):
        expected = f"a number from 1 to {len(pool)}, the number of hosts"
        raise invalid_value("--num_nodes", num_nodes, expected, "List more hosts in a --hostfile.")
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
