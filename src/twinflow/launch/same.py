"""What all ranks must have in common before they train: refused at the start, on all of them, with what differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import zip_longest

from torch import Tensor
from torch._C._distributed_c10d import Store

from twinflow.errors import invalid_value
from twinflow.launch.store import own_keys, wait_for

PUBLISH_S = 5.0  # for others to read what they have to know
LINE_CHARS = 160


def param_lines(named_params: Iterable[tuple[str, Tensor]]) -> str:
    """Order, names, shapes and dtypes as a fact for `check_same`, a line each."""
    return "\n".join(f"{name} {tuple(param.shape)} {param.dtype}" for name, param in named_params)


def check_same(store: Store, rank: int, world_size: int, facts: Mapping[str, str], timeout_s: float = 60.0) -> None:
    """Refuse a start where a rank's facts (text by name) are not rank 0's. All ranks call it, and all raise.

    Only digests are compared; a rank that differs reads rank 0's text to name the first difference.
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
            raise TimeoutError(f"rank 0 did not come to check_same within {timeout_s:g} s")
        keys.set(f"verdict/{rank}", json.dumps(_difference(facts, keys)))
        if wait_for(keys, ["result"], timeout_s + PUBLISH_S):
            raise TimeoutError(f"rank 0 did not answer in check_same within {timeout_s:g} s")
    result = json.loads(keys.get("result"))
    if result["missing"] or result["different"]:
        keys.set(f"read/{rank}", "1")
        if rank == 0:  # it may take the store with it
            read = [f"read/{other}" for other in everybody if f"verdict/{other}" not in result["missing"]]
            wait_for(keys, read, PUBLISH_S)
        raise _refusal(rank, result["missing"], result["different"], timeout_s)


def _refusal(rank: int, missing: list[str], different: dict[str, list[str]], timeout_s: float) -> Exception:
    ranks = {int(key.split("/")[1]): value for key, value in different.items()}
    if not ranks:
        late = ", ".join(key.split("/")[1] for key in missing)
        return TimeoutError(f"rank {late} did not come to check_same within {timeout_s:g} s")
    who = rank if rank in ranks else min(ranks)
    name, here, there = ranks[who]
    remedy = "Start every rank with the same script, config and versions."
    error = invalid_value(f"{name} of rank {who}", here, f"{there!r}, as on rank 0", remedy)
    return error if who == rank else ValueError(f"rank {who} differs: {error}")


def _difference(facts: Mapping[str, str], keys: Store) -> list[str]:
    """Name of the first fact that differs, what it is here, what on rank 0; nothing where all are the same."""
    theirs = json.loads(keys.get("facts"))
    for name in [*theirs, *(name for name in facts if name not in theirs)]:
        if name not in theirs or name not in facts:
            return [name, *("given" if name in side else "not given" for side in (facts, theirs))]
        if theirs[name] != _digest(facts[name]):
            return [name, *first_difference(facts[name], keys.get(f"text/{name}").decode())]
    return []


def first_difference(here: str, there: str) -> tuple[str, str]:
    """The first line in which two texts differ, as `line N: ...` of each; of a long line the part around it."""
    for number, (a, b) in enumerate(zip_longest(here.splitlines(), there.splitlines()), 1):
        if a != b:
            pairs = enumerate(zip_longest(a or "", b or ""))
            start = next((place for place, (x, y) in pairs if x != y), 0)
            cut = max(0, start - 60) if max(len(a or ""), len(b or "")) > LINE_CHARS else 0
            return _line(number, a, cut), _line(number, b, cut)
    return "other line ends", "other line ends"


def _line(number: int, text: str | None, cut: int) -> str:
    if text is None:
        return f"{number - 1} lines"
    end = cut + LINE_CHARS
    return f"line {number}: {'...' if cut else ''}{text[cut:end]}{'...' if end < len(text) else ''}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
