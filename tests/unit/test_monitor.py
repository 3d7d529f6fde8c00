# SPDX-License-Identifier: Apache-2.0
"""Metrics on disk, progress on screen, plots and the report page."""

from __future__ import annotations

import io
import json
import math
import mmap
import re
import shutil
import subprocess
from dataclasses import replace
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
from twinflow.monitor.progress import LiveLine, TrainProgress, duration, live_fields, plain_line
from twinflow.monitor.report import Report, render, spread, write_report


def step_record(step: int, loss: float = 2.0, seconds: float = 0.1) -> StepRecord:
    times = (0.3 * seconds, 0.6 * seconds, 0.1 * seconds)
    return StepRecord(step, loss, 1e-3, 0.5, 100, *times, 300 * 2**20, num_ahead=7, num_dropped=1, num_held=3)


def full_record(step: int, loss: float = 2.0) -> StepRecord:
    """A step on a GPU with everything measured."""
    return replace(
        step_record(step, loss),
        tflops=212.4,
        gpu_bytes=71 * 2**30,
        host_bytes=58 * 2**30,
        host_available_bytes=40 * 2**30,
        cores_busy=10.25,
        host_update_s=0.08,
        wait_s=0.005,
        loss_scale=2.0 ** (16 - step // 20),
        skipped=step % 20 == 0,
        tokens_total=100 * step,
    )


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


def test_every_field_comes_back(tmp_path: Path) -> None:
    records: list[Record] = [full_record(20)]
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(records[0])
    assert read_metrics(tmp_path / "metrics.jsonl") == records
    assert '"skipped": true' in (tmp_path / "metrics.jsonl").read_text()


def test_a_step_is_made_of_parts_that_do_not_overlap() -> None:
    assert full_record(1).step_s == pytest.approx(0.1)  # neither the host's update nor the wait within the update


def test_resuming_drops_the_records_of_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records: list[Record] = [ValidRecord(0, 5.0), *(step_record(i) for i in range(1, 7)), ValidRecord(6, 2.0)]
    with MetricsWriter(path) as writer:
        for record in records:
            writer.write(record)
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    with MetricsWriter(path, resume_after=4) as writer:
        writer.write(step_record(5, loss=1.5))
    assert read_metrics(path) == [*records[:5], step_record(5, loss=1.5)]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("resume_after", [None, 0, 3])
def test_a_metrics_file_may_be_new_or_end_in_half_a_line(tmp_path: Path, resume_after: int | None) -> None:
    with MetricsWriter(tmp_path / "new.jsonl", resume_after) as writer:
        writer.write(step_record(1))
    assert read_metrics(tmp_path / "new.jsonl") == [step_record(1)]
    (tmp_path / "half.jsonl").write_text('{"kind"')
    with MetricsWriter(tmp_path / "half.jsonl", resume_after) as writer:
        writer.write(step_record(1))
    assert read_metrics(tmp_path / "half.jsonl") == [step_record(1)]


def test_a_metrics_file_stays_when_it_cannot_be_cut_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_json(step_record(1)) + "\n" + to_json(step_record(2)) + "\n")
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        MetricsWriter(path, resume_after=1)
    assert path.read_text() == before


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


def test_speed_leaves_the_first_step_out() -> None:
    assert tokens_per_second([step_record(1, seconds=100.0), step_record(2), step_record(3)]) == pytest.approx(1000)
    assert tokens_per_second([step_record(1)]) == pytest.approx(1000)
    assert tokens_per_second([]) == 0.0


def test_a_record_from_before_updates_ahead_were_counted_can_be_read(tmp_path: Path) -> None:
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
    with mmap.mmap(-1, 64 * 2**20) as held:  # new pages: a bytearray may reuse memory that was freed before
        held.write(b"\1" * len(held))
        assert host_memory_bytes() - before > 48 * 2**20


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


@pytest.mark.parametrize(
    ("width", "seen", "dropped"),
    [
        (160, ["loss", "tokens/s", "TFLOPS", "GPU", "host", "cores", "left"], []),
        (120, ["loss", "tokens/s", "TFLOPS", "GPU", "host", "cores", "left"], []),
        (80, ["loss", "tokens/s", "TFLOPS", "left"], ["host", "cores"]),
        (40, ["12/100", "loss"], ["tokens/s", "TFLOPS", "GPU"]),
        (16, ["12/100"], ["loss"]),
    ],
)
def test_the_live_line_drops_what_matters_least(width: int, seen: list[str], dropped: list[str]) -> None:
    out = io.StringIO()
    line = LiveLine(100, 0)
    line.completed, line.fields = 12, live_fields(full_record(12), 100, 61.0)
    Console(file=out, width=width, color_system=None).print(line)
    (text,) = out.getvalue().splitlines()
    assert len(text) <= width
    assert "…" not in text
    assert all(word in text for word in seen), text
    assert not any(word in text for word in dropped), text


def test_a_plain_line_has_everything_that_was_measured() -> None:
    line = plain_line(full_record(20), 100, 61.0)
    for words in (
        "212.4 TFLOPS",
        "GPU 71.0 GiB",
        "host 58.0 GiB",
        "10.2 cores",
        "left 1:01",
        "skipped, loss scale 32768",
    ):
        assert words in line, words
    assert "TFLOPS" not in plain_line(step_record(1), 100, 61.0)


def test_progress_of_a_resumed_run_begins_where_it_resumes() -> None:
    out = io.StringIO()
    with TrainProgress(Console(file=out), total_steps=100, plain_every=40, first_step=61) as progress:
        for step in range(61, 101):
            progress.step(step_record(step))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["61/100", "80/100", "100/100"]
    assert "left 0:04" in lines[0]
    live = io.StringIO()
    with TrainProgress(Console(file=live, force_terminal=True, width=80), 100, 40, first_step=61):
        pass
    assert "60/100" in live.getvalue()


def test_a_step_that_took_no_measurable_time_can_be_shown() -> None:
    assert "- tokens/s" in plain_line(step_record(1, math.nan, seconds=0.0), 2, math.nan)


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


def test_an_area_of_one_step_can_be_seen() -> None:
    svg = figure("t", [Series("a", [(1.0, 2.0)], 1, "area")], from_zero=True, size=(640, 280))
    first, *_ = re.findall(r'<polygon class="area c1" points="([^"]*)"', svg)
    assert [pair.split(",")[0] for pair in first.split()] == ["58.0", "58.0", "626.0", "626.0"]


def test_a_rare_spike_is_cut_and_told() -> None:
    points = [(float(i), 1000.0 if i == 0 else 10.0) for i in range(100)]
    assert value_range([y for _, y in points], from_zero=True, cut_spikes=True)[1] < 20
    assert value_range([y for _, y in points], from_zero=True, cut_spikes=False)[1] > 1000
    assert "single values up to 1,000" in figure("t", [Series("a", points, 1)], cut_spikes=True)
    assert "single values" not in figure("t", [Series("a", points, 1)])


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
    svg = figure("t", [Series("a", [(0, 0), (10, 5), (20, 10)], 1)], size=(640, 280))
    drawn, _ = re.findall(r'<polyline class="line c1" points="([^"]*)"', svg)  # the second one is for a phone
    points = [tuple(float(number) for number in pair.split(",")) for pair in drawn.split()]
    assert [x for x, _ in points] == [58, 342, 626]
    assert points[0][1] > points[1][1] > points[2][1]
    assert points[1][1] == pytest.approx((points[0][1] + points[2][1]) / 2, abs=0.1)


def test_letters_stay_inside_the_drawing() -> None:
    svg = figure("t", [Series("a", [(1.0, 1.0), (1_000_000.0, 2.0)], 1)])
    last = re.findall(r'x="([0-9.]+)" y="[0-9.]+" text-anchor="(\w+)">1,000,000<', svg)
    assert last == [("638.0", "end"), ("348.0", "end")]
    one = re.findall(r'text-anchor="middle">([0-9.,]+)<', figure("t", [Series("a", [(1.0, 1.0)], 1)]))
    assert one == ["1", "2", "1", "2"]  # no step lies between two steps


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
    assert found.tags.count("svg") == 2 * 5  # each plot also for a phone
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
        "updates before the norm",
    ):
        assert words in found.text, words
    for title in ("Loss", "Step time (ms)", "Host memory (MiB)", "Gradient norm", "Learning rate"):
        assert title in found.text, title


def test_the_page_shows_all_that_was_measured() -> None:
    steps = [full_record(i, math.nan if i % 20 == 0 else 5.0 / i) for i in range(1, 51)]
    report = replace(a_report(), steps=steps, config='{"a": 1}', notes=["resumed after step 3"])
    found = check_page(render(report))
    assert found.tags.count("svg") == 2 * 8
    for words in (
        "Host and GPU memory (GiB)",
        "peak 71.0",
        "Host load (cores)",
        "mean 10.2",
        "Speed (TFLOPS)",
        "1,000 tokens/s",
        "host update, overlapped",
        "80.0 ms",
        "Loss scale (power of two)",
        "2 steps skipped",
        '{"a": 1}',
        "resumed after step 3",
        "TFLOPS",
        "32768",
    ):
        assert words in found.text, words
    assert found.tags.count("pre") == 1


def test_what_was_not_measured_has_no_plot_and_no_column() -> None:
    page = render(a_report())
    for words in ("Host load", "Loss scale", "GPU", "TFLOPS", "host update", "<pre>", "Notes"):
        assert words not in page, words


def test_user_text_cannot_become_markup() -> None:
    evil = "<img src=x onerror=alert(1)>&\"'</pre>"
    rows = [(evil, evil)]
    report = Report(evil, "stopped", evil, rows, rows, rows, [], [], config=evil, notes=[evil])
    found = check_page(render(report))
    assert "img" not in found.tags
    assert found.text.count(evil) == 11


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2.0])
def test_a_run_of_one_step_has_a_page(loss: float) -> None:
    steps = [replace(full_record(1, loss), grad_norm=loss)]
    page = render(replace(a_report(), steps=steps, valids=[ValidRecord(0, loss)]))
    check_page(page)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page)


def test_a_run_without_a_step_has_a_page() -> None:
    assert "nothing was measured" in render(a_report(num_steps=0))


def test_a_table_of_a_long_run_stays_short() -> None:
    records = [step_record(i) for i in range(1, 10001)]
    chosen = spread(records, 20)
    assert len(chosen) == 20
    assert (chosen[0].step, chosen[-1].step) == (1, 10000)


@pytest.mark.matrix
def test_the_page_of_a_long_run_stays_light() -> None:
    one = full_record(1)
    steps = [replace(one, step=i, loss=5.0 / i, loss_scale=2.0 ** (i % 9)) for i in range(1, 100_001)]
    valids = [ValidRecord(i, 1.0) for i in range(0, 100_001, 10)]
    assert len(render(replace(a_report(), steps=steps, valids=valids))) < 500_000


@pytest.mark.matrix
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
    assert shown.stdout.count("<svg") == 2 * 5
    assert shown.stdout.count("<polygon") == 2 * 3
    assert shown.stdout.count("<circle") == 2 * 2
