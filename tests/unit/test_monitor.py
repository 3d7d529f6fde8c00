"""Metrics on disk, progress on screen, plots and the report page."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from twinflow.monitor.metrics import (
    MetricsWriter,
    Record,
    StepRecord,
    ValidRecord,
    host_memory_bytes,
    read_metrics,
    share_ahead,
    to_json,
    tokens_per_second,
)
from twinflow.monitor.plot import Series, figure, smooth, stack, thin, ticks, value_range
from twinflow.monitor.progress import TrainProgress, duration
from twinflow.monitor.report import Report, render, spread, write_report


def step_record(step: int, loss: float = 2.0, seconds: float = 0.1) -> StepRecord:
    times = (0.3 * seconds, 0.6 * seconds, 0.1 * seconds)
    return StepRecord(step, loss, 1e-3, 0.5, 100, *times, 300 * 2**20, num_ahead=7, num_dropped=1, num_held=3)


def a_report(num_steps: int = 50) -> Report:
    return Report(
        title="a run",
        status="finished",
        message="Finished 50 steps.",
        numbers=[("first loss", "5.5000"), ("tokens/s", "1,000")],
        settings=[("--lr", "0.001")],
        machine=[("cores", "2")],
        steps=[step_record(i, 5.0 / i) for i in range(1, num_steps + 1)],
        valids=[ValidRecord(0, 5.5), ValidRecord(50, 1.25)] if num_steps else [],
    )


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records: list[Record] = [ValidRecord(0, 5.5), step_record(1), step_record(2), ValidRecord(2, 1.5)]
    with MetricsWriter(path) as writer:
        for record in records:
            writer.write(record)
    assert read_metrics(path) == records


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_json(step_record(1)) + "\n" + to_json(step_record(2))[:20])
    assert read_metrics(path) == [step_record(1)]


def test_json_is_strict_when_the_loss_is_not_finite(tmp_path: Path) -> None:
    line = to_json(step_record(1, loss=math.nan))
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    (record,) = read_metrics(path)
    assert math.isnan(record.loss)
    assert isinstance(record, StepRecord)
    assert not record.is_finite


def test_speed_leaves_the_first_step_out() -> None:
    assert tokens_per_second([step_record(1, seconds=100.0), step_record(2), step_record(3)]) == pytest.approx(1000)
    assert tokens_per_second([step_record(1)]) == pytest.approx(1000)
    assert tokens_per_second([]) == 0.0


def test_a_record_from_before_the_gate_was_counted_can_be_read(tmp_path: Path) -> None:
    fields = json.loads(to_json(step_record(1)))
    old = {name: value for name, value in fields.items() if name not in ("num_ahead", "num_dropped", "num_held")}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert isinstance(record, StepRecord)
    assert math.isnan(share_ahead([record]))


def test_the_share_of_updates_ahead_counts_those_that_were_kept() -> None:
    assert share_ahead([step_record(1), step_record(2)]) == pytest.approx(0.6)
    assert math.isnan(share_ahead([]))


def test_host_memory_grows_with_what_is_held() -> None:
    before = host_memory_bytes()
    held = bytearray(b"\1") * (64 * 2**20)
    assert host_memory_bytes() - before > 48 * 2**20
    assert len(held) == 64 * 2**20


def test_progress_prints_plain_lines_off_a_terminal() -> None:
    out = io.StringIO()
    with TrainProgress(Console(file=out, width=40), total_steps=100, plain_every=40) as progress:
        for step in range(1, 101):
            progress.step(step_record(step))
        progress.note("a [note] of its own")
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/100", "40/100", "80/100", "100/100"]
    assert "loss  2.0000" in lines[1]
    assert "1,000 tokens/s" in lines[1]
    assert "left 0:06" in lines[1]
    assert lines[-1] == "a [note] of its own"


def test_progress_draws_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with TrainProgress(console, total_steps=3, plain_every=1) as progress:
        for step in range(1, 4):
            progress.step(step_record(step))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "3/3" in text
    assert "loss 2.0000" in text
    assert "1,000 tokens/s" in text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3661, "1:01:01")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 7
    slack = 1e-6 * span + 1e-9 * abs(low)
    assert all(low - slack <= value <= low + span + slack for value in found)


def test_thin_keeps_every_part_of_the_curve() -> None:
    points = [(float(i), 100.0 if i == 777 else 0.0) for i in range(1000)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert max(y for _, y in thinned) == 10.0
    assert thin(points[:100], 100) == points[:100]


def test_smooth_has_no_lag() -> None:
    line = [(float(i), 3.0 * i) for i in range(400)]
    assert [y for _, y in smooth(line)][:390] == pytest.approx([y for _, y in line][:390])
    assert smooth([(0.0, 1.0), (1.0, math.nan), (2.0, 3.0)]) == [(0.0, 1.0), (2.0, 3.0)]
    noise = [(float(i), float(i % 2)) for i in range(800)]
    assert all(0.4 < y < 0.6 for _, y in smooth(noise)[20:])


def test_areas_are_stacked_and_lines_are_not() -> None:
    a, b, c = stack(
        [Series("a", [(0, 1), (1, 2)], 1, "area"), Series("b", [(0, 5), (1, 5)], 2, "area"), Series("c", [(0, 1)], 3)]
    )
    assert (a.points, b.points, c.points) == ([(0, 1), (1, 2)], [(0, 6), (1, 7)], [(0, 1)])


def test_a_rare_spike_is_cut_and_told() -> None:
    points = [(float(i), 1000.0 if i == 0 else 10.0) for i in range(100)]
    assert value_range([y for _, y in points], from_zero=True, cut_spikes=True)[1] < 20
    assert value_range([y for _, y in points], from_zero=True, cut_spikes=False)[1] > 1000
    assert "cut off: up to 1,000" in figure("t", [Series("a", points, 1)], cut_spikes=True)
    assert "cut off" not in figure("t", [Series("a", points, 1)])


@pytest.mark.parametrize(
    "points",
    [[], [(1.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, 7.0), (2.0, 7.0)], [(1.0, math.nan), (2.0, math.inf)]],
    ids=["none", "one", "zeros", "constant", "not finite"],
)
@pytest.mark.parametrize("from_zero", [True, False])
def test_odd_curves_still_make_a_plot(points: list[tuple[float, float]], from_zero: bool) -> None:
    svg = figure("odd", [Series("a", points, 1)], from_zero=from_zero)
    assert "<svg" in svg
    assert "nan" not in svg
    assert "inf" not in svg


def test_the_plot_puts_points_where_they_belong() -> None:
    svg = figure("t", [Series("a", [(0, 0), (10, 5), (20, 10)], 1)], width=640, height=280)
    (drawn,) = re.findall(r'<polyline class="line c1" points="([^"]*)"', svg)
    points = [tuple(float(number) for number in pair.split(",")) for pair in drawn.split()]
    assert [x for x, _ in points] == [58, 342, 626]
    assert points[0][1] > points[1][1] > points[2][1]
    assert points[1][1] == pytest.approx((points[0][1] + points[2][1]) / 2, abs=0.1)


class PageCheck(HTMLParser):
    """Collects tags and text, and fails on a tag that is closed out of turn."""

    VOID = frozenset({"meta", "link", "line", "polyline", "polygon", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_page(page: str) -> PageCheck:
    parser = PageCheck()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_whole_and_needs_nothing_from_outside() -> None:
    page = render(a_report())
    found = check_page(page)
    assert found.tags.count("svg") == 5
    assert "script" not in found.tags
    assert found.links == ["data:,"]
    assert "url(" not in page
    assert "@import" not in page
    for words in (
        "a run",
        "finished",
        "first loss",
        "5.5000",
        "--lr",
        "cores",
        "forward",
        "backward",
        "waiting for the update",
        "updates ahead",
    ):
        assert words in found.text, words
    for title in ("Loss (nats per byte)", "Step time (ms)", "Host memory (MiB)", "Gradient norm", "Learning rate"):
        assert title in found.text, title


def test_user_text_cannot_become_markup() -> None:
    evil = "<img src=x onerror=alert(1)>&\"'"
    report = Report(evil, "stopped", evil, [(evil, evil)], [(evil, evil)], [(evil, evil)], [], [])
    found = check_page(render(report))
    assert "img" not in found.tags
    assert found.text.count(evil) == 9


def test_a_run_without_a_step_has_a_page() -> None:
    assert "nothing was measured" in render(a_report(num_steps=0))


def test_a_table_of_a_long_run_stays_short() -> None:
    records = [step_record(i) for i in range(1, 10001)]
    chosen = spread(records, 20)
    assert len(chosen) == 20
    assert (chosen[0].step, chosen[-1].step) == (1, 10000)
    assert len(render(a_report(20_000))) < 200_000


def test_chromium_shows_the_page(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("chromium is not installed: the report was not opened in a browser")
    write_report(tmp_path / "report.html", a_report())
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    command = [chromium, *flags.split(), "--disable-component-update", "--disable-sync", "--window-size=1240,1700"]
    command.append(f"--user-data-dir={tmp_path / 'profile'}")
    address = (tmp_path / "report.html").as_uri()
    picture = tmp_path / "page.png"
    subprocess.run([*command, f"--screenshot={picture}", address], check=True, capture_output=True, timeout=120)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    shown = subprocess.run([*command, "--dump-dom", address], check=True, capture_output=True, text=True, timeout=120)
    assert shown.stdout.count("<svg") == 5
    assert shown.stdout.count("<polygon") == 3
    assert shown.stdout.count("<circle") == 2
