# SPDX-License-Identifier: Apache-2.0
"""Compares config, parameters and versions of all ranks before training. All ranks raise an error if one differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from torch import Tensor
from torch._C._distributed_c10d import Store

from twinflow.launch.store import own_keys, wait_for

PUBLISH_S = 5.0  # time for the other ranks to read the result
LINE_CHARS = 160


def param_lines(named_params: Iterable[tuple[str, Tensor]]) -> str:
    """Names, shapes and dtypes of parameters in order, one line each, as a fact for `check_same`."""
    return "\n".join(f"{name} {tuple(param.shape)} {param.dtype}" for name, param in named_params)


def check_same(store: Store, rank: int, world_size: int, facts: Mapping[str, str], timeout_s: float = 60.0) -> None:
    """Checks that the facts (text by name) of all ranks equal those of rank 0. All ranks call this function. Raises
    ValueError on all ranks if a fact differs, and TimeoutError if a rank does not call in time.

    Ranks compare digests. A rank that differs reads rank 0's text to find the first difference.
    """
    keys = own_keys(store, "same", rank)
    everybody = range(1, world_size)
    if rank == 0:
        for name, text in facts.items():
            keys.set(f"text/{name}", text)
        keys.set("facts", json.dumps({name: _digest(text) for name, text in facts.items()}))
        missing = wait_for(keys, [f"verdict/{other}" for other in everybody], timeout_s)
        verdicts = {key: json.loads(keys.get(key)) for key in (f"verdict/{r}" for r in everybody) if key not in missing}
        keys.set("result", json.dumps({"missing": missing, "different": {k: v for k, v in verdicts.items() if v}}))
    else:
        if wait_for(keys, ["facts"], timeout_s):
            raise _late("Rank 0 has not published its config within", timeout_s)
        keys.set(f"verdict/{rank}", json.dumps(_difference(facts, keys)))
        if wait_for(keys, ["result"], timeout_s + PUBLISH_S):
            raise _late("Rank 0 has not compared the configs of the ranks within", timeout_s)
    result = json.loads(keys.get("result"))
    if result["missing"] or result["different"]:
        keys.set(f"read/{rank}", "1")
        if rank == 0:  # The store may end with the process of rank 0.
            read = [f"read/{other}" for other in everybody if f"verdict/{other}" not in result["missing"]]
            wait_for(keys, read, PUBLISH_S)
        raise _refusal(rank, result["missing"], result["different"], timeout_s)


def _refusal(rank: int, missing: list[str], different: dict[str, list[str]], timeout_s: float) -> Exception:
    ranks = {int(key.split("/")[1]): value for key, value in different.items()}
    if not ranks:
        late = ", ".join(key.split("/")[1] for key in missing)
        return _late(f"Rank {late} has not compared its config with that of rank 0 within", timeout_s)
    who = rank if rank in ranks else min(ranks)
    name, here, there = ranks[who]
    remedy = "Start every rank with the same script, config and versions."
    return ValueError(f"The ranks differ in {name}: rank {who} has {here!r}, and rank 0 has {there!r}. {remedy}")


def _late(what: str, timeout_s: float) -> TimeoutError:
    return TimeoutError(f"{what} {timeout_s:g} s. See the output of that rank for the reason.")


def _difference(facts: Mapping[str, str], keys: Store) -> list[str]:
    """The first fact that differs: its name, its text here, its text on rank 0. Empty if all facts are equal."""
    theirs = json.loads(keys.get("facts"))
    for name in [*theirs, *(name for name in facts if name not in theirs)]:
        if name not in theirs or name not in facts:
            return [name, *("a value" if name in side else "no value" for side in (facts, theirs))]
        if theirs[name] != _digest(facts[name]):
            return [name, *first_difference(facts[name], keys.get(f"text/{name}").decode())]
    return []


def first_difference(here: str, there: str) -> tuple[str, str]:
    """The first line that differs between two texts, as `line N: ...` of each. A long line is shortened around the
    difference.
    """
    for number, (a, b) in enumerate(zip_longest(here.splitlines(), there.splitlines()), 1):
        if a != b:
            pairs = enumerate(zip_longest(a or "", b or ""))
            start = next((place for place, (x, y) in pairs if x != y), 0)
            cut = max(0, start - 60) if max(len(a or ""), len(b or "")) > LINE_CHARS else 0
            return _line(number, a, cut), _line(number, b, cut)
    return "different line ends", "different line ends"


def _line(number: int, text: str | None, cut: int) -> str:
    if text is None:
        return f"no line {number}"
    end = cut + LINE_CHARS
    return f"line {number}: {'...' if cut else ''}{text[cut:end]}{'...' if end < len(text) else ''}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
