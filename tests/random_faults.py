# SPDX-License-Identifier: Apache-2.0
"""Draws random faults of five families, runs them one after another, and prints how they ended.

    python tests/random_faults.py --num 1000                             # all families
    python tests/random_faults.py --families files,disk --num 200 --seed 3 --log faults.jsonl
    python tests/random_faults.py --report faults-1.jsonl faults-2.jsonl --save

A fault has ended well as `named` (an error, warning or line names the cause) or `finished` (nothing was lost: the run
ended with the bits of one that nobody disturbed). It must not end as `wrong` (another cause, or a traceback), `silent`
(something was lost without a word) or `hang` (over 60 s). The exit code is 1 if one was silent or a hang, or if more
than 5% of the causes were wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import engine_faults
import process_faults
import train_faults
from engine_faults import Result

from twinflow.bench.machine import describe, read_machine

ENDINGS = ("named", "finished", "wrong", "silent", "hang")
WEIGHTS = {"ranks": 25, "signals": 20, "files": 25, "disk": 15, "numbers": 15}
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TEXT = """# Random faults, {date}

`python tests/random_faults.py`, in slices with the seeds {seeds}, on
{machine}

{num:,} faults, of which {num_different:,} are different cases. None may end as `silent` (something was lost without a
word) or `hang` (more than {limit:g} s), and at most 5% as `wrong` (another cause was named). Wrong: {wrong:.1%}. The
longest case took {longest:.0f} s, with the undisturbed run that it is compared with, and with its resumed runs.

{table}

Faults that were not named, or not as they should:

{bad}

By kind of fault:

{kinds}

- ranks: signals to one of two or three gloo ranks, exits, exceptions, hangs, delays and numbers, in six places of a
  step, with ZeRO stages 0 to 3, three formats of states, accumulation and saves. All other ranks must name the rank and
  the kind.
- signals: one to three signals to `twinflow train`, which is then resumed. The weights, the optimizer state and the
  losses of all steps must be the bits of a run that nobody disturbed.
- files: a file of a checkpoint, a config, a tokenizer, data, metrics or a hostfile is damaged in one of 13 ways. It is
  refused by name and nothing has changed, or it gives the saved bits.
- disk: calls of the system fail during saves. A checkpoint that was reported as written has the bits of its step,
  training is not changed, and nothing is left behind.
- numbers: NaN and infinities in inputs, losses, activations, gradients, weights and options. The step is skipped, and
  the state is that of a run without this step; an option is refused by name.
"""


def run_ranks(dice: random.Random) -> Result:
    fault = process_faults.draw(dice)
    with tempfile.TemporaryDirectory() as folder:
        ending, why = process_faults.run(fault, Path(folder))
    return Result(fault.kind, str(fault), ending, why)


FAMILIES: dict[str, Callable[[random.Random], Result]] = {
    "ranks": run_ranks,
    "signals": train_faults.run_signal,
    **engine_faults.FAMILIES,
}


def draw_and_run(families: list[str], num: int, seed: int, log: Path | None) -> Iterable[dict[str, Any]]:
    dice = random.Random(seed)
    for number in range(num):
        (family,) = dice.choices(families, [WEIGHTS[one] for one in families])
        begin_s = time.monotonic()
        try:
            result = FAMILIES[family](random.Random(f"{family} {seed} {number}"))
        except Exception as error:  # what the family does not expect
            result = Result("an unexpected error", f"{family} {seed} {number}", "wrong", repr(error))
        record = {"family": family, "seed": seed, "number": number, **vars(result)}
        record["seconds"] = round(time.monotonic() - begin_s, 1)
        if result.ending not in ("named", "finished"):
            print(f"{result.ending}: {family}: {result.case}\n{result.why[-3000:]}", flush=True)
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps(record) + "\n")
        yield record


def is_bad(record: dict[str, Any]) -> bool:
    return record["ending"] not in ("named", "finished")


def table(records: list[dict[str, Any]], keys: tuple[str, ...]) -> str:
    found = Counter((*(record[key] for key in keys), record["ending"]) for record in records)
    names = sorted({tuple(record[key] for key in keys) for record in records})
    head = f"| {' | '.join((*keys, *ENDINGS))} |\n|{'---|' * len(keys)}{'---:|' * len(ENDINGS)}"
    rows = [f"| {' | '.join((*name, *(str(found[(*name, ending)]) for ending in ENDINGS)))} |" for name in names]
    total = [str(sum(record["ending"] == ending for record in records)) for ending in ENDINGS]
    rows += [f"| all |{' |' * (len(keys) - 1)} {' | '.join(total)} |"]
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--log", type=Path, help="a file to which a line of JSON is added for each fault")
    parser.add_argument("--report", type=Path, nargs="+", help="draw nothing, and read these files")
    parser.add_argument("--save", action="store_true", help="write a dated file to benchmarks/results")
    given = parser.parse_args()
    if given.report:
        records = [json.loads(line) for path in given.report for line in path.read_text().splitlines()]
    else:
        families = given.families.split(",")
        unknown = sorted(set(families) - set(FAMILIES))
        if unknown:
            parser.error(f"--families must be some of {', '.join(FAMILIES)}, but has {unknown[0]}")
        records = list(draw_and_run(families, given.num, given.seed, given.log))
    print(table(records, ("family",)))
    wrong = sum(record["ending"] == "wrong" for record in records) / max(1, len(records))
    if given.save:
        date = datetime.date.today().isoformat()
        text = TEXT.format(
            date=date,
            machine=describe(read_machine()),
            seeds=", ".join(sorted({f"{record['seed']}" for record in records})),
            num=len(records),
            num_different=len({record["case"] for record in records}),
            limit=process_faults.LIMIT_S,
            wrong=wrong,
            longest=max(record["seconds"] for record in records),
            table=table(records, ("family",)),
            bad="\n".join(f"- {one['ending']}: {one['family']}: {one['case']}" for one in records if is_bad(one))
            or "none",
            kinds=table(records, ("family", "kind")),
        )
        (RESULTS / f"{date}-random-faults.md").write_text(text)
    sys.exit(wrong > 0.05 or any(record["ending"] in ("silent", "hang") for record in records))


if __name__ == "__main__":
    main()
