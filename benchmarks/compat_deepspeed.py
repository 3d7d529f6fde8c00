# SPDX-License-Identifier: Apache-2.0
"""How much of DeepSpeed works with twinflow.compat: scripts, published configs and methods of the engine.

- The scripts of examples/compat and examples/compat/features are written for DeepSpeed. Each runs on the CPU with the
  real package and with twinflow, on 1 and 2 processes. The losses and the other figures that it prints have to agree,
  and files that the real package saved have to be readable. What the real package does not have, or not on a CPU, is
  compared with plain torch (examples/compat/features/plain.py).
- benchmarks/published_configs.json has the settings of configs that other projects have published. Each loads, or is
  refused with a reason; the same with the real package.
- The public methods of the real package's engines are counted: those that twinflow's engines have.

Prints the machine, the tables and one JSON line. `--save` writes them to a dated file in benchmarks/results, from which
`python docs/tables.py` makes the tables of docs/compat.md. The real package may be in another environment: give its
interpreter with `--deepspeed-python`. It compiles its operations when it first runs, which takes minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from twinflow.bench.machine import read_machine

LIMIT = 1e-4
NEAR = 0.25  # for the mean loss of steps with compressed communication, in comparison with steps without
LIMIT_S = 900
HERE = Path(__file__).parent
OLD = HERE.parent / "examples" / "compat"
SCRIPTS = OLD / "features"
SHARED = ("small", "plain", "sparse_model")  # not scripts of their own
PLAIN = ("fp16", "lamb", "onebit_adam", "sparse_attention", "zero_one_adam")  # compared with plain.py
CONFIGS = HERE / "published_configs.json"
PARTS = ("scripts", "configs", "methods")


@dataclass(frozen=True)
class Case:
    """A script with its arguments. `ranks`: the numbers of processes that it is for."""

    path: Path
    arguments: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (1, 2)

    @property
    def name(self) -> str:
        return self.path.stem


def all_cases() -> list[Case]:
    """The four longer scripts, and one script for each feature."""
    return [
        Case(OLD / "cpu_adam.py", ranks=(1,)),
        Case(OLD / "transformer.py", ("--deepspeed_config", str(OLD / "transformer.json")), ranks=(1,)),
        # Ten steps: later losses depend on how a CPU rounds, and differences of 1e-7 become 1e-3 in 15 steps.
        Case(OLD / "alexnet_pipeline.py", ("-p", "2", "-s", "10"), ranks=(2,)),
        Case(OLD / "hf_causal_lm.py", ranks=(1,)),
        *(Case(path) for path in sorted(SCRIPTS.glob("*.py")) if path.stem not in SHARED),
    ]


@dataclass
class Row:
    """The result of a script: equal, refused, different or failed."""

    script: str
    ranks: int
    status: str
    reference: str  # what twinflow's figures are compared with
    difference: float | None = None
    files: str = ""
    reason: str = ""
    expected: Mapping[str, Any] | None = None  # the figures of the reference


# The scripts.


class Server:
    """A process that has imported one package and runs scripts with it (compat_server.py)."""

    def __init__(self, package: str, python: str, logs: Path) -> None:
        self.package = package
        self.logs = logs
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        env["PATH"] = os.pathsep.join([str(Path(python).parent), env["PATH"]])  # ninja is there
        if package == "deepspeed":
            env.pop("PYTHONPATH", None)
        command = [python, str(HERE / "compat_server.py"), package]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def run(self, path: Path, arguments: Sequence[str], ranks: int) -> tuple[dict[str, Any] | None, str]:
        """The last line of JSON that a script prints, or None and the error."""
        logs = Path(tempfile.mkdtemp(dir=self.logs))
        job = {"script": str(path), "arguments": list(arguments), "ranks": ranks, "limit_s": LIMIT_S, "logs": str(logs)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"The process for {self.package} has ended. Is the package installed in its environment?")
        lines = [line for line in read(logs / "stdout.0").splitlines() if line.startswith('{"losses"')]
        if not any(json.loads(answer)) and lines:
            return json.loads(lines[-1]), ""
        errors = [line for rank in range(ranks) for line in read(logs / f"stderr.{rank}").splitlines()]
        named = [line for line in errors if line.split(":")[0].endswith(("Error", "Exception"))]
        return None, (named or errors or [f"exit codes {answer.strip()}"])[-1]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def servers(deepspeed_python: str, cases: Sequence[Case]) -> Iterator[dict[str, Server]]:
    """The processes that these scripts need."""
    references = {"torch" if case.name in PLAIN else "deepspeed" for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        pythons = {"deepspeed": deepspeed_python, "twinflow": sys.executable, "torch": sys.executable}
        found = {
            package: Server(package, python, Path(folder))
            for package, python in pythons.items()
            if package == "twinflow" or package in references
        }
        yield found
        for server in found.values():
            server.close()


def run_case(case: Case, ranks: int, found: Mapping[str, Server]) -> Row:
    """A script with the reference and with twinflow."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "theirs", Path(folder) / "ours"
        is_plain = case.name in PLAIN
        reference = f"torch {torch.__version__}" if is_plain else "DeepSpeed"
        saved = case.path.parent == SCRIPTS
        if is_plain:
            expected, error = found["torch"].run(SCRIPTS / "plain.py", [case.name], ranks)
        else:
            arguments = [*case.arguments, *(["--folder", str(theirs)] if saved else [])]
            expected, error = found["deepspeed"].run(case.path, arguments, ranks)
        arguments = [*case.arguments, *(["--folder", str(ours)] if saved else [])]
        got, ours_error = found["twinflow"].run(case.path, arguments, ranks)
        if got is None:
            reference += "" if expected is not None else ", which refuses it too"
            status = "refused" if "twinflow" in ours_error or is_refusal(ours_error) else "failed"
            return Row(case.name, ranks, status, reference, reason=ours_error, expected=expected)
        if expected is None:
            return Row(case.name, ranks, "no reference", reference, reason=error)
        difference, reason = compare(expected, got)
        files = compare_files(case, ranks, theirs, ours, expected, found["twinflow"])
        bad_file = next((text for text in files if text.startswith("!")), "")
        status = "equal" if not reason and not bad_file else "different"
        return Row(case.name, ranks, status, reference, difference, "; ".join(files).replace("!", ""), reason, expected)


def is_refusal(error: str) -> bool:
    """Whether an error is one of twinflow's, which say what to do. Those of torch and Python do not."""
    kinds = (
        "ValueError",
        "ModuleNotFoundError",
        "AttributeError",
        "RuntimeError",
        "ImportError",
        "NotImplementedError",
    )
    return error.split(":")[0] in kinds and error.count(". ") >= 1


def numbers(value: Any) -> list[Any]:
    """The leaves of a JSON value, dicts in the order of their keys."""
    if isinstance(value, Mapping):
        return [leaf for key in sorted(value) for leaf in numbers(value[key])]
    if isinstance(value, list):
        return [leaf for one in value for leaf in numbers(one)]
    return [value]


def compare(expected: Mapping[str, Any], got: Mapping[str, Any]) -> tuple[float, str]:
    """The largest relative difference of a loss, and the first figure that is different, as text."""
    worst = 0.0
    for key, value in expected.items():
        these, those = numbers(value), numbers(got.get(key))
        if len(these) != len(those):
            return worst, f"{key} has {len(those)} values instead of {len(these)}"
        for i, (one, other) in enumerate(zip(these, those, strict=True)):
            if isinstance(one, (int, float)) and isinstance(other, (int, float)):
                apart = abs(one - other) / max(abs(one), 1e-8)
                if key == "losses":
                    worst = max(worst, apart)
                if not apart <= (NEAR if key == "near" else LIMIT):
                    return max(worst, apart), f"{key}[{i}] is {other:.6g} instead of {one:.6g}"
            elif one != other:
                return worst, f"{key}[{i}] is {other} instead of {one}"
    return worst, ""


def compare_files(
    case: Case, ranks: int, theirs: Path, ours: Path, expected: Mapping[str, Any], server: Server
) -> list[str]:
    """What of the real package's files was read here; texts that begin with "!" are failures.

    Files of weights must have the same names, dtypes and values on both sides. Checkpoints are converted as `twinflow
    import` does; the weights must be those of twinflow's checkpoint. A script that prints "resumed" continues from them
    with `--load`: as many losses as this number, at the end of each rank's, must be those of the real package.
    """
    from twinflow.checkpoint.importing import import_deepspeed
    from twinflow.compat.zero import get_fp32_state_dict_from_zero_checkpoint as weights_of

    found = []
    for path in sorted([*theirs.rglob("*.bin"), *theirs.rglob("*.safetensors")]):
        other = ours / path.relative_to(theirs)
        values = [
            load_file(one) if one.suffix == ".safetensors" else torch.load(one, weights_only=True)
            for one in (path, other)
        ]
        found.append(f"{'' if is_close(*values) else '!'}{path.name}")
    for path in sorted({path.parent for path in theirs.rglob("*mp_rank_00_model_states.pt")}):
        if path.name.endswith("universal"):
            continue
        into = theirs.parent / "imported"
        try:
            import_deepspeed(theirs, into, path.name)
        except ValueError as error:  # a refusal
            found.append(f"checkpoint {path.name} refused: {str(error).partition(' was ')[2].partition('. ')[0]}")
            continue
        is_same = is_close(weights_of(into, path.name), weights_of(ours, path.name))
        found.append(f"{'' if is_same else '!'}checkpoint {path.name}")
    if "resumed" in expected:
        got, error = server.run(case.path, ["--load", str(theirs.parent / "imported")], ranks)
        length = len(expected["losses"]) // ranks
        first = length - expected["resumed"]
        after = [loss for i, loss in enumerate(expected["losses"]) if i % length >= first]
        reason = error if got is None else compare({"losses": after}, got)[1]
        found.append(f"!continued: {reason}" if reason else "continued")
    return found


def is_close(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype
        and torch.allclose(value.float(), other[name].float(), rtol=LIMIT, atol=LIMIT * float(value.abs().max()))
        for name, value in one.items()
    )


def script_lines(rows: Sequence[Row]) -> list[str]:
    """The table of the scripts, one line for each script."""
    lines = ["| script | 1 process | 2 processes | compared with | files of DeepSpeed that were read |"]
    lines += ["|---|---|---|---|---|"]
    for name in dict.fromkeys(row.script for row in rows):
        own = {row.ranks: row for row in rows if row.script == name}
        cells = [cell(own[ranks]) if ranks in own else "" for ranks in (1, 2)]
        files = next((row.files for row in own.values() if row.files), "")
        lines.append(f"| `{name}` | {cells[0]} | {cells[1]} | {next(iter(own.values())).reference} | {files} |")
    return lines


def cell(row: Row) -> str:
    if row.status == "equal":
        return f"{row.difference:.0e}" if row.difference else "0"
    return f"{row.status}: {row.reason}".replace("|", "/")


# The configs.

_LOAD = """
import json, sys
import deepspeed
for line in sys.stdin:
    try:
        deepspeed.DeepSpeedConfig(json.loads(line))
        reason = ""
    except BaseException as error:
        reason = str(error) or type(error).__name__
    print("@" + json.dumps(reason))
"""


def without_auto(value: Any) -> Any:
    """A config without the values that Hugging Face's libraries fill in."""
    if not isinstance(value, Mapping):
        return value
    return {key: without_auto(one) for key, one in value.items() if one != "auto"}


def for_one_rank(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose batch size one process can have."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu")
    found: dict[str, Any] = without_auto(config)
    if "gradient_accumulation_steps" in found and all(size in found for size in sizes):
        del found["train_batch_size"]
    if not any(size in found for size in sizes):
        found["train_micro_batch_size_per_gpu"] = 1
    return found


def config_rows(python: str) -> list[dict[str, str]]:
    """For each published config the reason why DeepSpeed or twinflow refuses it; empty: it loads."""
    from twinflow.config import load_config

    published = json.loads(CONFIGS.read_text())
    lines = "\n".join(json.dumps(for_one_rank(one["config"])) for one in published)
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("PYTHONPATH", None)
    ended = subprocess.run([python, "-c", _LOAD], env=env, input=lines, capture_output=True, text=True, check=True)
    theirs = [json.loads(line[1:]) for line in ended.stdout.splitlines() if line.startswith("@")]
    rows = []
    for one, reason in zip(published, theirs, strict=True):
        try:
            load_config(one["config"])
            ours = ""
        except ValueError as error:
            ours = str(error)
        name = f"{one['project']}: {one['file']}"
        rows.append({"config": name, "commit": one["commit"], "deepspeed": reason, "twinflow": ours})
    return rows


def config_lines(rows: Sequence[Mapping[str, str]]) -> list[str]:
    lines = ["| config | DeepSpeed | twinflow | reason |", "|---|---|---|---|"]
    for row in rows:
        cells = ["refused" if row[name] else "loads" for name in ("deepspeed", "twinflow")]
        reason = " ".join((row["twinflow"] or row["deepspeed"]).split()).replace("|", "/")
        lines.append(f"| {row['config']} | {cells[0]} | {cells[1]} | {reason[:200]} |")
    return lines


# The methods.

_METHODS = """
import json, types
from deepspeed import DeepSpeedEngine, PipelineEngine
found = {}
for kind in (DeepSpeedEngine, PipelineEngine):
    methods = (types.FunctionType, staticmethod, classmethod, property)
    found[kind.__name__] = [
        name for name, one in vars(kind).items() if not name.startswith("_") and isinstance(one, methods)
    ]
print("@" + json.dumps(found))
"""


def method_rows(python: str) -> dict[str, dict[str, list[str]]]:
    """For both engines the names of the real package's public methods: those that work, have no effect, are refused,
    and those that are missing in the table of engine/deepspeed_api.py.
    """
    from twinflow.engine.deepspeed_api import ENGINE, PIPELINE, NoEffect, Refused

    env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    env.pop("PYTHONPATH", None)
    ended = subprocess.run([python, "-c", _METHODS], env=env, capture_output=True, text=True, check=True)
    theirs = json.loads(next(line[1:] for line in ended.stdout.splitlines() if line.startswith("@")))
    rows: dict[str, dict[str, list[str]]] = {}
    for name, table in (("DeepSpeedEngine", ENGINE), ("PipelineEngine", PIPELINE)):
        rows[name] = {status: [] for status in ("works", "no effect", "refused", "missing")}
        for method in theirs[name]:
            entry = table.get(method)
            status = (
                "no effect" if isinstance(entry, NoEffect) else "refused" if isinstance(entry, Refused) else "works"
            )
            rows[name][status if entry is not None else "missing"].append(method)
    return rows


def method_lines(rows: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    lines = ["| engine | public methods | work | no effect | refused | missing |", "|---|---|---|---|---|---|"]
    for name, own in rows.items():
        counts = [len(names) for names in own.values()]
        lines.append(f"| {name} | {sum(counts)} | {' | '.join(str(count) for count in counts)} |")
    return lines


# The command.


def version_of(python: str) -> str:
    """The version of the real package."""
    code = "import importlib.metadata as m; print(m.version('deepspeed'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def run_scripts(names: Sequence[str] | None, ranks: Sequence[int], python: str) -> list[Row]:
    rows = []
    cases = [case for case in all_cases() if names is None or case.name in names]
    with servers(python, cases) as found:
        for case in cases:
            for count in sorted(set(case.ranks) & set(ranks)):
                rows.append(run_case(case, count, found))
                print(f"{case.name}, {count}: {cell(rows[-1])} {rows[-1].files}", file=sys.stderr, flush=True)
    return rows


def render(result: Mapping[str, Any]) -> str:
    """The page of a result, with the result itself as JSON at its end."""
    lines = [f"# DeepSpeed and twinflow.compat, {result['date']}", ""]
    lines += [f"- {result['machine']}; torch {result['torch']}, deepspeed {result['deepspeed']}"]
    lines += [f"- scripts: the largest relative difference of a loss; allowed: {LIMIT:g}"]
    if "scripts" in result:
        lines += ["", *script_lines([Row(**row) for row in result["scripts"]])]
    if "configs" in result:
        lines += ["", *config_lines(result["configs"])]
    if "methods" in result:
        lines += ["", *method_lines(result["methods"])]
    return "\n".join([*lines, "", "```json", json.dumps(result), "```", ""])


def saved_result(path: Path) -> dict[str, Any]:
    """The result in a page that `render` has made; empty if there is no page."""
    found = path.read_text().rpartition("```json\n")[2].partition("\n```")[0] if path.exists() else "{}"
    return dict(json.loads(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed-python", default=sys.executable, help="interpreter that has the real package")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in all_cases()], help="not all scripts")
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2), help="numbers of processes")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file, into that of the day")
    given = parser.parse_args()
    python, date = given.deepspeed_python, datetime.date.today().isoformat()
    path = HERE / "results" / f"{date}-compat-deepspeed.md"
    machine = read_machine()
    result = saved_result(path) if given.save else {}
    result |= {"date": date, "deepspeed": version_of(python), "torch": torch.__version__}
    result["machine"] = f"{machine.cpu}, {machine.usable_cores} cores, no GPU"
    failed: list[str] = []
    if "scripts" in given.parts:
        rows = run_scripts(given.only, given.ranks, python)
        new = {(row.script, row.ranks) for row in rows}
        old = [row for row in result.get("scripts", []) if (row["script"], row["ranks"]) not in new]
        places = {case.name: place for place, case in enumerate(all_cases())}
        every = [*old, *(asdict(row) for row in rows)]
        every = [row for row in every if row["script"] in places]
        result["scripts"] = sorted(every, key=lambda row: (places[row["script"]], row["ranks"]))
        failed = [f"{row.script} on {row.ranks}" for row in rows if row.status not in ("equal", "refused")]
    if "configs" in given.parts:
        result["configs"] = config_rows(python)
    if "methods" in given.parts:
        result["methods"] = method_rows(python)
    text = render(result)
    print(text)
    if given.save:
        path.write_text(text, encoding="utf-8")
    if failed:
        sys.exit(f"different or failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
