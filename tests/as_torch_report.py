# SPDX-License-Identifier: Apache-2.0
"""Prints how twinflow does on every case of as_torch_cases.py: equal to torch, refused, DIFFERENT or CRASHED.

PYTHONPATH=src:tests python tests/as_torch_report.py                 the whole matrix
PYTHONPATH=src:tests python tests/as_torch_report.py --quick         the subset of `make test`
PYTHONPATH=src:tests python tests/as_torch_report.py --cases gan write_    cases whose names contain one of these
PYTHONPATH=src:tests python tests/as_torch_report.py --only engine early host    combinations with all of these words
PYTHONPATH=src:tests python tests/as_torch_report.py --each          one line for each combination that is not equal
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import warnings
from collections import Counter

from as_torch_cases import CASES, LIMITS, is_allowed, is_limit
from as_torch_support import Case, Combination, Outcome, attempt, chosen
from twin_support import quick_torch

PATIENCE_S = 30.0
ORDER = ("HUNG", "CRASHED", "DIFFERENT", "refused", "equal")


def patiently(case: Case, combination: Combination) -> Outcome:
    """In a thread: a loop that waits for ever must not stop the report."""
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(attempt(case, combination)), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return found[0] if found else Outcome("HUNG", f"nothing came back in {PATIENCE_S:.0f} s")


def selected(options: argparse.Namespace) -> list[tuple[Case, Combination]]:
    cells = chosen(CASES) if options.quick else [(case, cell) for case in CASES for cell in case.combinations]
    if options.cases:
        cells = [(case, cell) for case, cell in cells if any(part in case.name for part in options.cases)]
    cells = [(case, cell) for case, cell in cells if not is_limit(case, cell)]
    return [(case, cell) for case, cell in cells if all(word in str(cell).split("-") for word in options.only)]


def line(name: str, outcomes: list[tuple[Combination, Outcome]]) -> str:
    """The worst verdict of a case, how many combinations have each, and what the first of the worst ones says."""
    counts = Counter(outcome.verdict for _, outcome in outcomes)
    worst = next(verdict for verdict in ORDER if counts[verdict])
    text = f"{worst:9}  {name:48} " + ", ".join(f"{counts[v]} {v}" for v in ORDER if counts[v])
    if worst == "equal":
        return text
    cell, first = next((cell, outcome) for cell, outcome in outcomes if outcome.verdict == worst)
    return f"{text}\n{'':11}{cell}: {first.first_sentence[:200]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--each", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    by_case: dict[str, list[tuple[Combination, Outcome]]] = {}
    refusals: dict[tuple[str, str], list[str]] = {}
    runs: Counter[str] = Counter()
    num_failed = 0
    cells = selected(options)
    with quick_torch():
        for index, (case, cell) in enumerate(cells):
            outcome = patiently(case, cell)
            by_case.setdefault(case.name, []).append((cell, outcome))
            runs[outcome.verdict] += 1
            num_failed += not is_allowed(case, cell, outcome)
            if outcome.verdict == "refused":
                refusals.setdefault((case.name, outcome.first_sentence), []).append(str(cell))
            if options.each and outcome.verdict != "equal":
                print(f"{outcome.verdict:9}  {case.name} [{cell}]: {outcome.detail}", flush=True)
            is_last = index + 1 == len(cells) or cells[index + 1][0] is not case
            if is_last and not options.each:
                print(line(case.name, by_case[case.name]), flush=True)
    worst = Counter(
        next(verdict for verdict in ORDER if any(outcome.verdict == verdict for _, outcome in outcomes))
        for outcomes in by_case.values()
    )
    print("\nRefusals:")
    for (name, text), where in refusals.items():
        print(f"  {name} ({len(where)} combinations, {where[0]} the first): {text}")
    print(f"\nNot run, because docs/as-torch.md names them as limits: {', '.join(LIMITS)}")
    print(f"\n{len(by_case)} cases: " + ", ".join(f"{worst[v]} {v}" for v in ORDER))
    print(f"{len(cells)} runs: " + ", ".join(f"{runs[v]} {v}" for v in ORDER))
    print(f"{num_failed} runs are neither equal nor a refusal of the table; {time.perf_counter() - started:.0f} s")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
