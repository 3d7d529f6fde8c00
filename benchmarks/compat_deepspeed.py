"""The scripts of examples/compat, which are written for DeepSpeed, with the real package and with twinflow.compat.

Each runs both ways in processes of its own, on the CPU, and prints its losses; they have to agree to 1e-4. Prints the
machine, a table and one JSON line; `--save` writes a dated file in benchmarks/results. The real package may be in
another environment: give its interpreter with `--deepspeed-python`. It compiles its operations when it first runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinflow.bench.machine import read_machine

LIMIT = 1e-4
TIMEOUT_S = 1800
SCRIPTS = Path(__file__).parents[1] / "examples" / "compat"


@dataclass(frozen=True)
class Case:
    """A script, its arguments and processes; 0: without a launcher."""

    script: str
    num_ranks: int
    arguments: tuple[str, ...] = ()


CASES = (
    Case("cpu_adam.py", 0),
    Case("transformer.py", 1, ("--deepspeed_config", str(SCRIPTS / "transformer.json"))),
    Case("alexnet_pipeline.py", 2, ("-p", "2")),
    Case("hf_causal_lm.py", 1),
)


def with_deepspeed(case: Case, python: str) -> list[str]:
    """The command for the real package; its CPU accelerator needs torchrun, not its own launcher."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.num_ranks}"]
    return [python, *(start if case.num_ranks else []), str(SCRIPTS / case.script), *case.arguments]


def with_twinflow(case: Case) -> list[str]:
    """The same for twinflow."""
    launch = ["-m", "twinflow", "launch", "--compat", "--num_procs", str(case.num_ranks)]
    start = launch if case.num_ranks else ["-m", "twinflow.compat"]
    return [sys.executable, *start, str(SCRIPTS / case.script), *case.arguments]


def losses_of(command: list[str]) -> list[float]:
    """What a script prints as its last line of JSON."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env["PATH"] = os.pathsep.join([str(Path(command[0]).parent), env["PATH"]])  # ninja is there
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"losses"')]
    if ended.returncode or not lines:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    found: list[float] = json.loads(lines[-1])["losses"]
    return found


def compare(case: Case, python: str) -> dict[str, Any]:
    """Both ways, and how far their losses are apart."""
    theirs, ours = losses_of(with_deepspeed(case, python)), losses_of(with_twinflow(case))
    assert len(theirs) == len(ours), f"{case.script}: {len(theirs)} and {len(ours)} losses"
    difference = max(abs(a - b) / abs(a) for a, b in zip(theirs, ours, strict=True))
    return {
        "script": case.script,
        "ranks": max(1, case.num_ranks),
        "deepspeed": theirs,
        "twinflow": ours,
        "difference": difference,
    }


def version_of(python: str) -> str:
    """Of the real package."""
    code = "import importlib.metadata as m; print(m.version('deepspeed'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed-python", default=sys.executable, help="interpreter that has the real package")
    parser.add_argument("--only", nargs="+", choices=[case.script for case in CASES], help="not all scripts")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    given = parser.parse_args()
    cases = [case for case in CASES if given.only is None or case.script in given.only]
    rows = [compare(case, given.deepspeed_python) for case in cases]
    machine, date = read_machine(), datetime.date.today().isoformat()
    version = version_of(given.deepspeed_python)
    lines = [f"# Scripts for DeepSpeed, with DeepSpeed and with twinflow.compat, {date}", ""]
    lines += [f"- {machine.cpu}, {machine.usable_cores} cores, no GPU; torch {torch.__version__}, deepspeed {version}"]
    lines += [f"- losses of every step, their largest relative difference; allowed: {LIMIT:g}", ""]
    lines += ["| script | ranks | steps | first loss | last, DeepSpeed | last, twinflow | largest difference |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        theirs, ours = row["deepspeed"], row["twinflow"]
        lines.append(
            f"| {row['script']} | {row['ranks']} | {len(ours)} | {theirs[0]:.6f} | {theirs[-1]:.6f} | {ours[-1]:.6f} | "
            f"{row['difference']:.1e} |"
        )
    text = "\n".join([*lines, "", "```json", json.dumps({"date": date, "deepspeed": version, "rows": rows}), "```", ""])
    print(text)
    too_far = [row["script"] for row in rows if not row["difference"] <= LIMIT]
    if too_far:
        sys.exit(f"further apart than {LIMIT:g}: {', '.join(too_far)}")
    if given.save:
        (Path(__file__).parent / "results" / f"{date}-compat-deepspeed.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
