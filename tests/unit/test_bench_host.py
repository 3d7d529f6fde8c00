# SPDX-License-Identifier: Apache-2.0
"""The host benchmark at sizes that take seconds: arithmetic, turns, refusal, output."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from twinflow import native
from twinflow.bench import check, host, jobs, machine
from twinflow.bench.host import take_turns
from twinflow.bench.jobs import Contender, Work, fill_half_tiny, huge_like, huge_random, huge_store, update_bytes
from twinflow.cli import bench as cli
from twinflow.rules import ADAGRAD, ADAM, ADAMW, LION, RULES, SGD, Rule
from twinflow.rules.segment import Segment, check_segment

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TINY = ("--numel", "4096", "--repeats", "1", "--threads", "1")
needs_library = pytest.mark.skipif(not native.available(), reason="the native library is not built")


@pytest.fixture
def quick_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "disagreements", list)  # tested by itself below


@pytest.fixture
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinflow.bench.host.time.sleep", lambda seconds: None)


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A package of that name whose optimizer is torch's."""
    seen = SimpleNamespace(threads=[])

    class DeepSpeedCPUAdam(torch.optim.AdamW):
        def __init__(self, params: list[torch.Tensor], lr: float, adamw_mode: bool) -> None:
            assert adamw_mode
            seen.threads.append(os.environ["OMP_NUM_THREADS"])
            super().__init__(params, lr=lr)

    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.adam"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["deepspeed.ops.adam"], "DeepSpeedCPUAdam", DeepSpeedCPUAdam, raising=False)
    monkeypatch.setattr(jobs, "version_of", lambda name: "0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    yield seen
    assert os.environ["OMP_NUM_THREADS"] == "7"


def bench(*options: str | Path) -> Result:
    return CliRunner().invoke(cli.bench_app, ["host", *(str(option) for option in options)])


@pytest.mark.parametrize(
    ("rule", "format", "grad", "weight", "split", "num_bytes"),
    [
        (ADAMW, "fp32", BF16, BF16, None, 28),
        (ADAMW, "fp32", BF16, BF16, True, 26),
        (ADAMW, "bf16", BF16, BF16, False, 20),
        (LION, "fp32", BF16, BF16, True, 18),
        (ADAM, "fp32", BF16, BF16, None, 28),
        (ADAMW, "fp32", FP32, None, None, 28),
        (ADAMW, "fp32", FP32, FP32, None, 32),
        (ADAMW, "bf16", BF16, BF16, None, 18),
        (ADAMW, "int8", BF16, BF16, None, 14 + 4 * 4 / 128),
        (ADAMW, "bf16", FP16, FP16, None, 20),  # no split master: fp32 read and written, the weight only written
        (ADAGRAD, "fp32", BF16, BF16, None, 20),
        (LION, "fp32", BF16, BF16, None, 20),
        (LION, "bf16", BF16, BF16, None, 14),
        (SGD, "fp32", FP32, None, None, 20),
    ],
)
def test_bytes_per_parameter(
    rule: Rule, format: str, grad: torch.dtype, weight: torch.dtype | None, split: bool | None, num_bytes: float
) -> None:
    assert update_bytes(rule, format, grad, weight, split) == num_bytes


@pytest.mark.parametrize("weight", [None, FP32, BF16, FP16])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_big_stores_are_what_the_kernels_take(rule: Rule, weight: torch.dtype | None) -> None:
    for format in rule.formats:
        for split in (None, True, False) if weight == BF16 else (None,):
            store = huge_store(rule, format, 300, weight, split)
            assert split in (None, store.is_split)
            check_segment(Segment(rule, rule.hyper(check.OPTIONS, 1), torch.zeros(300), store, target=huge_like(store)))


def test_filling() -> None:
    x = huge_random((1 << 20) + 5, scale=2.0)
    assert 1.9 < x.std().item() < 2.1
    assert torch.equal(x[:5], x[1 << 20 :])
    y = torch.empty(600)
    fill_half_tiny(y, normal=1.0, tiny=1e-39)
    assert (y[:128] == 1e-39).all()
    assert (y[128:256] == 1.0).all()
    assert (y == 1.0).sum().item() == 600 - 256


def test_contenders_take_turns() -> None:
    log: list[str] = []
    now = iter(range(1000))

    def work(name: str) -> Work:
        return lambda: log.append(name)

    kernel = Contender("ours", work("ours"), prepare=work("fill"), bytes_per_param=8.0)
    rival = Contender("theirs", work("theirs"), rival_of="ours")
    timings = take_turns([kernel, rival], work("pass"), repeats=2, warmup=1, clock=lambda: next(now), pause_s=0.0)
    assert log == ["fill", "pass", "ours", "pass", "theirs"] * 3
    assert timings["ours"].call_s == timings["ours"].before_s == timings["ours"].after_s == [1, 1]
    assert (timings["theirs"].call_s, timings["theirs"].before_s) == ([1, 1], [])


def result(name: str, seconds: float, rival_of: str | None = None) -> host.Result:
    ours = rival_of is None
    extra = {"bytes_per_param": 28.0, "ceiling_before": 35e9, "ceiling_after": 45e9} if ours else {}
    return host.Result("job", name, rival_of, 10**9, seconds, seconds, **extra)


def test_rates_and_speedups() -> None:
    ours, theirs = result("a", 1.0), result("b", 2.0, rival_of="a")
    assert (ours.params_per_s, ours.bytes_per_s, ours.ceiling, ours.of_ceiling) == (1e9, 28e9, 40e9, 0.7)
    assert (theirs.bytes_per_s, theirs.ceiling, theirs.of_ceiling) == (None, None, None)
    assert host.speedup(theirs, [ours, theirs]) == 2.0
    assert host.speedup(ours, [ours, theirs]) is None


def by_name(figures: list[host.Figure]) -> dict[str, host.Figure]:
    return {figure.name: figure for figure in figures}


@pytest.mark.parametrize(
    ("architecture", "wanted"),
    [
        ("x86_64", [0.90, 1.4, 1.4, 5.0, 0.85, 1.35, 1.5, 0.9]),
        ("aarch64", [1.3, 1.0, 0.9]),
        ("arm64", [1.3, 1.0, 0.9]),
    ],
)
def test_each_architecture_has_its_figures(architecture: str, wanted: list[float]) -> None:
    figures = host.figures([], architecture)
    assert [figure.wanted for figure in figures] == wanted
    assert len(by_name(figures)) == len(wanted)
    assert all(figure.measured is None and figure.met is None for figure in figures)


def test_figures_are_shown_whether_met_or_not() -> None:
    main = jobs.ADAMW_FP32_STATE
    results = [result(main, 1.0), result(jobs.TORCH_MIXED, 1.35, main), result(jobs.ADAMW_OUT_OF_PLACE, 2.0)]
    on_x86, on_arm = by_name(host.figures(results, "x86_64")), by_name(host.figures(results, "aarch64"))
    torch_figure = f"{main} / {jobs.TORCH_MIXED}"
    assert (on_x86[torch_figure].met, on_arm[torch_figure].met) == (False, True)
    assert on_x86["out of place / in place"].measured == 0.5
    assert on_x86[f"{main}: share of the memory's ceiling"].measured == 0.7
    assert on_x86[f"{jobs.ADAMW_SCALED} / {jobs.DEEPSPEED}"].met is None
    assert on_arm[f"{jobs.ADAMW_FP32} / {jobs.TORCH_FP32}"].met is None
    assert cli.figure_row(on_x86["out of place / in place"]) == ("out of place / in place", ">= 0.85x", "0.50x MISSED")
    assert cli.figure_row(on_arm[torch_figure])[2] == "1.35x met"


def test_the_size_fits_the_memory() -> None:
    assert host.fitting_numel(1 << 50, host.LARGEST_NUMEL) == host.LARGEST_NUMEL
    numel = host.fitting_numel(4 << 30, host.LARGEST_NUMEL)
    assert numel * jobs.PEAK_BYTES <= 2 << 30 < 2 * numel * jobs.PEAK_BYTES
    assert host.choose_settings(None, 3, None, False, 1 << 50) == host.Settings(host.LARGEST_NUMEL, 3, host.REPEATS)
    assert host.choose_settings(None, 3, None, True, 1 << 50) == host.Settings(host.QUICK_NUMEL, 3, host.QUICK_REPEATS)


@pytest.mark.parametrize(
    ("option", "value"), [("--numel", "1"), ("--numel", str(10**15)), ("--threads", "0"), ("--repeats", "0")]
)
def test_values_that_cannot_work_are_named(option: str, value: str) -> None:
    answer = bench(option, value)
    assert answer.exit_code == 1
    assert f"error: {option} is {value}, but must be" in answer.output


@needs_library
@pytest.mark.usefixtures("quick_check", "short_pause")
def test_a_run_prints_tables_and_writes_json(tmp_path: Path) -> None:
    threads = torch.get_num_threads(), native.get_threads()
    answer = bench(*TINY, "--json", tmp_path / "out.json")
    assert answer.exit_code == 0, answer.output
    assert (torch.get_num_threads(), native.get_threads()) == threads
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert answer.stdout.strip().splitlines()[-1] == f"All numbers as JSON: {tmp_path / 'out.json'}"
    assert "{" not in answer.stdout
    assert (numbers["numel"], numbers["threads"], numbers["correct"]) == (4096, 1, True)
    names = {row["name"] for row in numbers["results"]}
    assert {jobs.ADAMW_FP32_STATE, jobs.ADAMW_SPLIT, jobs.ADAMW_INT8_STATE, *jobs.TORCH_ADAM.values()} <= names
    assert len(names) == len(numbers["results"])
    assert all(row["rival_of"] in names for row in numbers["results"] if row["rival_of"])
    for words in ("twinflow", "4,096 parameters", "note: so few parameters", "of ceiling", "wanted", *names):
        assert words in answer.stdout, words


@needs_library
@pytest.mark.usefixtures("short_pause")
def test_wrong_kernels_get_no_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check, "disagreements", lambda: ["update: adamw, fp32 state"])
    monkeypatch.setattr(cli, "measure", lambda *args: pytest.fail("measured all the same"))
    answer = bench(*TINY, "--json", tmp_path / "out.json")
    assert answer.exit_code == 1
    assert "update: adamw, fp32 state" in answer.output
    assert answer.stdout == ""
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved == {"benchmark": "host", "correct": False, "disagreements": ["update: adamw, fp32 state"]}
    assert "param/s" not in answer.output


def test_no_library_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    answer = bench(*TINY)
    assert answer.exit_code == 1
    assert "twinflow doctor" in answer.output


def test_the_check_passes_and_sees_one_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.disagreements(numel=1500) == []
    right = native.update

    def wrong(segments: list[Segment]) -> None:
        right(segments)
        store = segments[0].target or segments[0].store
        if segments[0].rule is SGD and store.format == "bf16":
            store.master.view(torch.uint8)[-1] ^= 1

    monkeypatch.setattr(native, "update", wrong)
    found = check.disagreements(numel=1500)
    assert found
    assert all(line.startswith("update: sgd, bf16 state") for line in found)


def test_bits_are_compared_not_numbers() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert check.same_bits(nan, nan.clone())
    assert not check.same_bits(zero, -zero)


@needs_library
@pytest.mark.usefixtures("short_pause")
def test_deepspeed_takes_part_where_it_is(deepspeed: SimpleNamespace) -> None:
    report = host.measure(host.Settings(numel=4096, threads=2, repeats=1))
    assert set(deepspeed.threads) <= {"2", "7"}
    assert deepspeed.threads[0] == "2"  # while its runtime starts
    assert report.deepspeed == "0.1"
    theirs = next(row for row in report.results if row.name == jobs.DEEPSPEED)
    assert theirs.rival_of == jobs.ADAMW_SCALED
    assert host.speedup(theirs, report.results) is not None  # its row says so on every architecture
    on_x86, on_arm = host.figures(report.results, "x86_64"), host.figures(report.results, "aarch64")
    assert all(figure.measured is not None for figure in (*on_x86, *on_arm))
    assert [jobs.DEEPSPEED in figure.name for figure in on_x86].count(True) == 1
    assert not any(jobs.DEEPSPEED in figure.name for figure in on_arm)
    assert report.figures in (on_x86, on_arm)


@pytest.mark.usefixtures("deepspeed")
def test_a_deepspeed_that_does_not_build_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(sys.modules["deepspeed.ops.adam"], "DeepSpeedCPUAdam", fail)
    loaded = jobs.load_deepspeed(threads=1)
    assert loaded.make is None
    assert loaded.about == "0.1, does not load: no compiler"


def test_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(jobs, "version_of", lambda name: None)
    assert jobs.load_deepspeed(threads=1) == jobs.DeepSpeed(None, "not installed")


def test_lion_in_torch_operations_is_our_lion() -> None:
    param, grad = torch.randn(500), torch.randn(500)
    options = {"lr": jobs.LR, "betas": (0.9, 0.99), "weight_decay": 0.01}
    truth, momentum, _ = LION.apply(param.clone(), torch.zeros(500), None, grad, LION.hyper(options, 1))
    param.grad = grad
    optimizer = jobs.Lion([param])
    optimizer.step()
    torch.testing.assert_close(param, truth)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], momentum)


@needs_library
@pytest.mark.usefixtures("quick_check", "short_pause")
def test_the_script_saves_a_dated_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "host_kernels.py"
    spec = importlib.util.spec_from_file_location("host_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    app = typer.Typer()
    app.command()(script.main)
    answer = CliRunner().invoke(app, [*TINY, "--save"])
    assert answer.exit_code == 0, answer.output
    (saved,) = (tmp_path / "results").iterdir()
    assert saved.name.endswith(f"-host-{native.isa()}.md")
    text = saved.read_text()
    assert machine.describe(machine.read_machine()).split(", ")[1] in text
    assert "| figure | wanted | measured |" in text
    assert "↳ torch.optim.Adam(foreach=False)" in text
    numbers = json.loads(text.split("```json\n")[1].split("\n```")[0])
    assert numbers["numel"] == 4096
