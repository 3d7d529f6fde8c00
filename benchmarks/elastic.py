# SPDX-License-Identifier: Apache-2.0
"""An elastic run of `twinflow train` whose ranks and nodes are killed and return, beside a run that nobody disturbs.

    python benchmarks/elastic.py --save        # about half an hour on two cores; writes a dated file
    python benchmarks/elastic.py --tiny        # shows that the script works

Four nodes of one gloo rank each. A killed rank costs a new group of the same size. A killed node returns only after
`--return-after` seconds, so that the others form a smaller group before, and a larger one when it is back. Every loss
is compared with that of the undisturbed run. Needs no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the test kills in the same way

from elastic_support import SAVE_EVERY, Kill, command, draw_kills, last_step, losses, run_with_kills, write_text

from twinflow.bench.machine import describe, read_machine

NEAR = 1e-3
TEXT = """# An elastic run that shrinks and grows, {date}

`{command}` on
{machine}

`twinflow launch --max-nodes {nodes} --return-after {return_after:g} --module twinflow train`, {steps:,} steps of
10 sequences over gloo, a checkpoint every {save_every} steps.

| | |
|---|---:|
| kills | {num_kills}: {num_ranks} of ranks, {num_nodes} of nodes with their rank |
| exit code | {code} |
| resumes | {resumes} |
| steps that were repeated | {repeated} of {steps:,} |
| largest difference of a loss, over all steps | {largest:.1e} |
| difference of the last loss | {last:.1e} |
| seconds, disturbed and undisturbed | {seconds:.0f} and {straight_seconds:.0f} |

Steps that were made first by a group of each size: {sizes}. The groups, one after another, with the step that had
been reached before: {changes}.
"""


class Groups:
    """The sizes of the groups that have trained, from the lines that each start of the run prints."""

    def __init__(self, run: Path, log: Path) -> None:
        self.sizes: dict[int, int] = {}  # by the step that a group was the first to make
        self.changes: list[tuple[int, int]] = []  # the step after which a group began, and its size
        self._run = run
        self._log = log
        self._read = 0
        self._highest = 0

    def look(self, num_killed: int) -> None:
        step = last_step(self._run)
        with self._log.open("rb") as file:
            file.seek(self._read)
            *lines, rest = file.read().split(b"\n")
            self._read = file.tell() - len(rest)
        for line in lines:
            if b"host memory  " in line and b" state" in line:
                found = re.search(rb"on ([0-9]+) ranks", line)
                self.changes.append((step, int(found[1]) if found else 1))
        if step > self._highest and self.changes:
            self.sizes |= dict.fromkeys(range(self._highest + 1, step + 1), self.changes[-1][1])
            self._highest = step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--between", type=int, default=40, help="at most so many steps between two kills")
    parser.add_argument("--return-after", type=float, default=75.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true", help="write a dated file to benchmarks/results")
    given = parser.parse_args()
    if given.tiny:
        given.kills, given.nodes, given.steps, given.between, given.return_after = 1, 2, 60, 20, 60.0
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    data, limit_s = write_text(folder / "text.txt"), 60.0 * given.minutes
    straight, disturbed = folder / "straight", folder / "disturbed"
    begin_s = time.monotonic()
    argv = command(straight, data, given.steps, given.nodes, 0)
    code, _ = run_with_kills(argv, straight, folder / "straight.log", [], limit_s)
    assert code == 0, (folder / "straight.log").read_text()[-4000:]
    straight_s = time.monotonic() - begin_s
    kills = draw_kills(given.seed, given.nodes, given.kills, given.between, 0.5)
    argv = command(disturbed, data, given.steps, given.nodes, 10 * given.kills, given.return_after)
    groups = Groups(disturbed, folder / "disturbed.log")
    begin_s = time.monotonic()
    code, done = run_with_kills(argv, disturbed, folder / "disturbed.log", kills, limit_s, groups.look)
    seconds = time.monotonic() - begin_s
    text = report(given, done, code, (straight, disturbed), groups, (seconds, straight_s))
    print(text)
    print(f"The logs are in {folder}.")
    if given.save:
        date = datetime.date.today().isoformat()
        (Path(__file__).parent / "results" / f"{date}-elastic.md").write_text(text)
    wanted, found = losses(straight), losses(disturbed)
    is_well = code == 0 and found.keys() == wanted.keys() == set(range(1, given.steps + 1))
    sys.exit(not is_well or max(abs(found[step] - wanted[step]) for step in found) >= NEAR)


def report(
    given: argparse.Namespace,
    done: list[Kill],
    code: int,
    runs: tuple[Path, Path],
    groups: Groups,
    seconds: tuple[float, float],
) -> str:
    wanted, found = (losses(run) for run in runs)
    saved = json.loads((runs[1] / "settings.json").read_text())
    counts = Counter(groups.sizes.values())
    return TEXT.format(
        date=datetime.date.today().isoformat(),
        command="python benchmarks/elastic.py" + "".join(f" {word}" for word in sys.argv[1:] if word != "--save"),
        machine=describe(read_machine()),
        nodes=given.nodes,
        return_after=given.return_after,
        steps=given.steps,
        save_every=SAVE_EVERY,
        num_kills=len(done),
        num_ranks=sum(not kill.is_node for kill in done),
        num_nodes=sum(kill.is_node for kill in done),
        code=code,
        resumes=saved["num_resumes"],
        repeated=saved["num_repeated_steps"],
        largest=max(abs(found[step] - wanted[step]) for step in found.keys() & wanted.keys()),
        last=abs(found[max(found)] - wanted[max(wanted)]),
        seconds=seconds[0],
        straight_seconds=seconds[1],
        sizes=", ".join(f"{counts[size]:,} by {size}" for size in sorted(counts, reverse=True)),
        changes=", ".join(f"{size} ranks after {step}" for step, size in groups.changes),
    )


if __name__ == "__main__":
    main()
