# SPDX-License-Identifier: Apache-2.0
"""Writes the pictures of the docs as SVG files. Their numbers, schedules and file names come from the library's code.

python docs/pictures.py

A picture is 600 units wide, so that text of 16 units is legible on a page of 400 pixels. It has its own background and
follows the reader's light or dark theme. White text is legible on all fill colours.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

import torch

from twinflow.activations.offload import Offload
from twinflow.attention.patterns import MODES, pattern_from_config
from twinflow.checkpoint import Entry, save
from twinflow.checkpoint.save import plan_parts
from twinflow.cli.plan_input import CORES, DRAM_RATE, RAM, PlanOptions, choose_model
from twinflow.codes.code import BLOCK, CODES
from twinflow.dist.group import Group, alone
from twinflow.offload.param_offload import BLOCKS_AHEAD
from twinflow.offload.placement import place_by_ratio
from twinflow.offload.plan import HOST, ParamSpec
from twinflow.parallel.schedules import interleaved, one_f_one_b, zbv
from twinflow.parallel.sequence import SequenceRanks
from twinflow.parallel.simulate import StageTime, simulate
from twinflow.parallel.topology import PipeModelDataParallelTopology
from twinflow.planner.cases import Setting, all_cases
from twinflow.planner.costs import Memory, Run
from twinflow.planner.formats import MOMENT_BYTES, STATES, WEIGHT_BYTES, state_bytes
from twinflow.planner.machines import GPUS, Host, Machine, Rates, rates_of
from twinflow.planner.simulate import ClipDecision, Item, Play, Timing, Ways

FOLDER: Final = Path(__file__).parent / "assets" / "pictures"
WIDTH: Final = 600
EDGE: Final = 14  # margin
SLATE, TEAL, BLUE, AMBER = "#64748b", "#0f766e", "#2563eb", "#b45309"
VIOLET, ROSE = "#7c3aed", "#be185d"
DEPTH: Final = (AMBER, "#c2410c", ROSE, VIOLET, "#4f46e5", BLUE)  # blocks of a model, from input to output
STYLE: Final = (
    ":root{--ink:#1e293b;--soft:#526077;--panel:#f8fafc;--line:#cbd5e1}"
    "@media (prefers-color-scheme:dark){:root{--ink:#e2e8f0;--soft:#a3b1c6;--panel:#1b2330;--line:#475569}}"
    "text{font:16px system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:var(--ink)}"
    ".soft{fill:var(--soft)}.bold{font-weight:600}.on{fill:#fff}.digit{font-size:13px}.code{font-family:monospace}"
    ".panel{fill:var(--panel)}.bare{fill:none}.frame{fill:none;stroke:var(--line);stroke-width:1.5}"
    ".arrow{stroke:var(--soft);stroke-width:2.5;fill:none}.head{fill:var(--soft)}.mark{stroke:#dc2626;stroke-width:2}"
    ".dashed{stroke-dasharray:5 4}.wait{fill:#dc2626;fill-opacity:.16;stroke:#dc2626;stroke-dasharray:5 4}"
)


class Picture:
    """Collects shapes and text. An assertion fails if a text does not fit.

    The first paragraph of the docstring of `draw` is the title, the second is the description for blind readers.
    """

    def __init__(self, draw: Callable[[Picture], None]) -> None:
        self.title, self.description = (" ".join(part.split()) for part in str(inspect.getdoc(draw)).split("\n\n"))
        self.parts: list[str] = []
        self.bottom = 0.0
        draw(self)

    def add(self, part: str, bottom: float) -> None:
        self.parts.append(part)
        self.bottom = max(self.bottom, bottom)

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start", room: float = WIDTH) -> None:
        """A line of text on the baseline `y`. It must not be wider than `room`."""
        width = len(text) * (8 if "digit" in style else 9.6 if "code" in style else 8.7)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        assert width <= min(room, WIDTH - left) and left >= 0, f"{text!r} does not fit in {self.title!r}"  # noqa: PT018
        attributes = f' class="{style}"' if style else ""
        attributes += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.add(f'<text x="{number(x)}" y="{number(y)}"{attributes}>{escape(text)}</text>', y + 5)

    def box(
        self, x: float, y: float, w: float, h: float, fill: str = "", label: str = "", style: str = "", r: float = 3
    ) -> None:
        """A filled box with centred white text, or a frame if there is no `fill`."""
        look = f'fill="{fill}"' if fill else f'class="{style or "frame"}"'
        place = f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}"'
        self.add(f'<rect {place} rx="{number(r)}" {look}/>', y + h)
        lines = label.split("\n") if label else []
        for i, line in enumerate(lines):
            inside = ("on " if fill else "") + ("digit" if w < 26 or h < 20 else "")
            baseline = y + h / 2 + (4.5 if "digit" in inside else 5.5) + 22 * (i - (len(lines) - 1) / 2)
            self.text(x + w / 2, baseline, line, inside.strip(), "middle", room=w)

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = "arrow") -> None:
        place = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self.add(f'<line {place} class="{style}"/>', max(y1, y2))

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a head at its end."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        bx, by = x2 - 11 * dx, y2 - 11 * dy
        self.line(x1, y1, bx, by)
        points = ((x2, y2), (bx - 6 * dy, by + 6 * dx), (bx + 6 * dy, by - 6 * dx))
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.add(f'<polygon points="{path}" class="head"/>', max(y1, y2))

    def bar(self, x: float, y: float, h: float, scale: float, parts: Iterable[tuple[float, str]]) -> float:
        """Draws (amount, fill) as boxes side by side, with amounts where there is room. Returns their right end."""
        for amount, fill in parts:
            label = number(amount) if amount * scale >= 9 * len(number(amount)) + 6 else ""
            if amount > 0:
                self.box(x, y, amount * scale, h, fill, label, r=0)
            x += amount * scale
        return x

    def lane(self, y: float, name: str, spans: Iterable[tuple[float, float, str, str]]) -> None:
        """A row of a timeline: its name, and below the name boxes from (start, end, fill, label)."""
        self.text(EDGE, y + 14, name, "soft")
        self.line(EDGE, y + 35, WIDTH - EDGE, y + 35, "frame")
        for start, end, fill, label in spans:
            self.box(
                start, y + 20, end - start - 1, 30, fill, label if end - start > 9 * len(label) + 5 else "", "wait"
            )

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        """Draws (fill, name) pairs below the picture, in as many lines as needed."""
        x, y = float(EDGE), self.bottom + 10
        for fill, name in entries:
            width = 52 + 9.4 * len(name)
            if x > EDGE and x + width > WIDTH:
                x, y = float(EDGE), y + 26
            self.box(x, y, 18, 18, fill)
            self.text(x + 25, y + 14.5, name)
            x += width

    def note(self, text: str) -> None:
        """Draws sentences below the picture, in as many lines as needed."""
        for i, line in enumerate(wrap(text, int((WIDTH - 2 * EDGE) / 8.7))):
            self.text(EDGE, self.bottom + (18 if i else 26), line, "soft")

    def svg(self) -> str:
        height = number(self.bottom + EDGE)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>\n"
            f'<style>{STYLE}</style>\n<rect width="{WIDTH}" height="{height}" rx="8" class="panel"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def number(value: float) -> str:
    """The value with at most two decimals, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Recorder(Play):
    """The planner's simulation of steps. It records spans: (lane, block, start, end)."""

    def __init__(self, items: Sequence[Item], timing: Timing, rates: Rates) -> None:
        super().__init__(items, timing, rates, "fp32", ClipDecision(clips=False), Ways())
        self.spans: list[tuple[str, int, float, float]] = []
        self.begun = 0.0  # start of the current step

    def _advance(self, limit: float | None) -> float:
        self._start()
        at_work = {unit: block for unit, (_, block) in self.tasks.items()}
        if limit is None:
            at_work["wait"] = 0
        start = self.begun + self.now
        taken = super()._advance(limit)
        for lane, block in at_work.items():
            # A span that starts where the previous span of the block ended extends that span.
            before = next((s for s in self.spans if s[:2] == (lane, block) and abs(s[3] - start) < 1e-6), None)
            self.spans = [span for span in self.spans if span != before]
            self.spans.append((lane, block, before[2] if before else start, start + taken))
        return taken

    def _run(self, seconds: float) -> None:
        start = self.begun + self.now
        super()._run(seconds)
        self.spans.append(("model", -1, start, self.begun + self.now))


def overlap(p: Picture) -> None:
    """One training step: what runs at the same time

    Backward computes gradients from the last block to the first. Each gradient is copied to the host, the host updates
    the weights, and the weights are copied back while the model computes. The next forward waits for the weights of a
    block only when that block runs.
    """
    n, forward, backward, numel = len(DEPTH), 0.8, 1.5, 10**6
    items = [Item(numel, HOST, (n - i) * backward, i * forward) for i in range(n)]
    copy, update = numel * 2 / 0.35, {"fp32": numel / 1.35}
    play = Recorder(items, Timing(n * forward, n * backward), Rates(copy, copy, copy, update, update, 1e12, 0))
    for _ in range(3):
        play.begun += play.step().step_s
    model = [span for span in play.spans if span[0] == "model"][n : 3 * n]  # a backward and the next forward
    start, end = model[0][2], model[-1][3]
    scale = (WIDTH - 2 * EDGE) / (end - start)

    def place(time: float) -> float:
        return EDGE + (time - start) * scale

    def spans(lane: str) -> list[tuple[float, float, str, str]]:
        found = [span for span in play.spans if span[0] == lane and start <= span[2] + 1e-6 and span[2] < end - 1e-6]
        return [(place(a), place(min(b, end)), DEPTH[block], str(block + 1)) for _, block, a, b in found]

    order = [*reversed(range(n)), *range(n)]
    work = [(place(a), place(b), DEPTH[i], str(i + 1)) for i, (_, _, a, b) in zip(order, model, strict=True)]
    waits = [(place(a), place(b), "", "wait") for lane, _, a, b in play.spans if lane == "wait" and start < a < end]
    step = place(model[n - 1][3])
    p.text(EDGE, 24, "backward of this step", "bold")
    p.text(WIDTH - EDGE, 24, "next forward", "bold", "end")
    p.lane(36, "model on the GPU", work + waits)
    p.lane(98, "gradients are copied to the host", spans("out"))
    p.lane(160, "the host updates masters and states", spans("host"))
    p.lane(222, "new weights are copied to the GPU", spans("in"))
    p.line(step, 32, step, 284, "mark dashed")
    p.text(step + 5, 300, "step() returns", anchor="middle")
    p.note(
        "Numbers are blocks, from 1 at the input side. Of the blocks whose gradients have arrived, the host updates "
        "the one that the next forward needs first."
    )


def as_torch(p: Picture) -> None:
    """Reads and writes of a weight between step() and the next forward

    Reads of shapes and options return at once. A read waits until the new weight is on the GPU. A write waits too,
    and then also changes the master on the host. A forward waits for the weights of each block.
    """
    arrives, end = 330.0, WIDTH - EDGE
    rows = (
        ("p.shape, p.grad", 0.0, "returns at once", SLATE),
        ("p.clone(), state_dict()", arrives, "reads the new weight", TEAL),
        ("p.mul_(0.5), p.clamp_()", arrives, "writes weight and master", AMBER),
        ("model(x)", arrives, "runs this block", BLUE),
    )
    p.text(EDGE, 24, "step() returns", "bold")
    p.text(arrives, 24, "this weight is on the GPU", "bold")
    for i, (code, until, what, fill) in enumerate(rows):
        y = 38 + i * 64
        p.text(EDGE + 6, y + 17, code, "code")
        if until:
            p.box(EDGE, y + 24, until - EDGE, 30, label="waits for this weight", style="wait")
        p.box(until or EDGE, y + 24, end - until if until else 200, 30, fill, what)
    p.line(EDGE, 30, EDGE, 290, "mark")
    p.line(arrives, 30, arrives, 290, "mark dashed")
    p.note("Each operation waits only for the weight that it uses, or for the weights of a block.")


def twin_flow(p: Picture) -> None:
    """Where optimizer state is, by ratio

    A model of eight blocks from input to output. The ratio is the share of the state on the host. By default the state
    of the input side stays on the GPU; with placement tail the state of the output side stays there.
    """
    count, left, numel = 8, 150, 1 << 20
    params = [ParamSpec(f"block{i}", numel, i, torch.bfloat16) for i in range(count)]
    cell = (WIDTH - EDGE - left) / count
    p.text(left, 24, "input side", "soft")
    p.text(WIDTH - EDGE, 24, "output side", "soft", "end")
    rows = [(ratio, "auto") for ratio in (1.0, 0.7, 0.4, 0.0)] + [(0.4, "tail")]
    for row, (ratio, placement) in enumerate(rows):
        y = 34 + row * 40
        p.text(EDGE, y + 22, f"ratio {ratio:g}" + (", tail" if placement == "tail" else ""), "bold")
        for i, parts in enumerate(place_by_ratio(params, range(count), ratio, placement)):
            for part in parts:
                x = left + cell * (i + part.start / numel)
                wide = cell * part.numel / numel
                p.box(x, y, wide - 2, 32, TEAL if part.place == HOST else SLATE, str(i + 1) if wide > 20 else "")
    p.legend([(SLATE, "state on the GPU"), (TEAL, "state on the host")])


def offload(p: Picture) -> None:
    """Where weights, gradients, masters and states are

    The GPU has bf16 weights, gradients and activations. The host has 12 bytes for each parameter: the fp32 master,
    momentum and variance. Gradients go to the host, new weights come back.
    """
    weight, moments, state = WEIGHT_BYTES["bf16"], MOMENT_BYTES["fp32"], state_bytes("fp32").host
    gpu = {f"weights, bf16\n{weight} bytes": BLUE, f"gradients, bf16\n{weight} bytes": AMBER, "activations": SLATE}
    host = {f"{name}, fp32\n{moments / 2:g} bytes": VIOLET for name in ("momentum", "variance")}
    host = {f"master, fp32\n{state - moments:g} bytes": TEAL} | host
    for x, name, rows in ((EDGE, "GPU memory", gpu), (340.0, "host memory", host)):
        p.text(x + 123, 25, name, "bold", "middle")
        p.box(x, 34, 246, 240)
        for i, (label, fill) in enumerate(rows.items()):
            p.box(x + 10, 46 + i * 76, 226, 64, fill, label)
    p.arrow(349, 78, 252, 78)
    p.text(300, 68, "weights", "soft", "middle")
    p.arrow(251, 154, 348, 154)
    p.text(300, 144, "gradients", "soft", "middle")
    p.note("Bytes are for one parameter with Adam. With clipping, gradients wait on the GPU until their norm is known.")


def weights_on_host(p: Picture) -> None:
    """Blocks are fetched before they run

    Six blocks in forward and backward. While a block runs, the next two blocks are copied to the GPU. After a block has
    run, its memory is freed. The last block stays on the GPU for backward.
    """
    count, left = 6, 86
    order = [*range(count), *reversed(range(count))]
    cell = (WIDTH - EDGE - left) / len(order)
    p.text(left, 24, "forward", "bold")
    p.text(left + count * cell + 4, 24, "backward", "bold")
    for block in range(count):
        y = 34 + block * 36
        p.text(EDGE, y + 21, f"block {block + 1}")
        for time, running in enumerate(order):
            same_way = order[:count] if time < count else order[count:]
            ahead = same_way[time % count + 1 :][:BLOCKS_AHEAD]
            fill = BLUE if block == running else AMBER if block in ahead else ""
            p.box(left + time * cell, y, cell - 3, 32, fill, "run" if block == running else "")
    p.line(left + count * cell - 1.5, 14, left + count * cell - 1.5, 250, "mark dashed")
    p.legend([(BLUE, "on the GPU, running"), (AMBER, "copied to the GPU")])
    p.note("Frames: the weights of the block are only on the host, as part of the optimizer state.")


def zero(p: Picture) -> None:
    """What each ZeRO stage partitions

    Bytes for each parameter on one of four ranks. Stage 1 partitions the optimizer state, stage 2 also the sums of
    gradients, stage 3 also the weights.
    """
    ranks = 4
    weight, state = WEIGHT_BYTES["bf16"], state_bytes("fp32").host
    kinds = ((weight, 3, BLUE), (weight, 2, AMBER), (state, 1, VIOLET))  # bytes, and the stage that partitions them
    scale = (WIDTH - 2 * EDGE) / (2 * weight + state)
    names = ("nothing is partitioned", "state is partitioned", "state and gradients", "state, gradients and weights")
    for stage, name in enumerate(names):
        y = 10 + stage * 68
        held = [whole / ranks if stage >= first else whole for whole, first, _ in kinds]
        p.text(EDGE, y + 16, f"Stage {stage}: {name}", "bold")
        p.text(WIDTH - EDGE, y + 16, f"{number(sum(held))} bytes", "bold", "end")
        x = float(EDGE)
        for (whole, _, fill), part in zip(kinds, held, strict=True):
            p.box(x, y + 24, whole * scale - 3, 32)
            p.box(x, y + 24, part * scale - 3, 32, fill, number(part) if part > 1 else "")
            x += whole * scale
    p.legend([(BLUE, "weights"), (AMBER, "gradients"), (VIOLET, "optimizer state, on host or GPU")])
    p.note(
        f"Numbers are bytes for each parameter on one of {ranks} ranks. Frames: parts of other ranks. With stage 3 the "
        "GPU also has the whole weights of running blocks."
    )


def grid(p: Picture) -> None:
    """32 ranks as 4 stages x 2 tensor ranks x 4 replicas

    Columns are stages of the pipeline, each on a machine of eight GPUs. Rows are replicas of the model. The two GPUs of
    each pair are tensor ranks, which share every tensor of their layers.
    """
    stages, tensor, data = 4, 2, 4
    topology = PipeModelDataParallelTopology(stages, tensor, data)
    for stage in range(stages):
        x = 98 + stage * 124
        p.text(x + 50, 24, f"stage {stage}", "bold", "middle")
        p.box(x - 4, 32, 108, data * 44 + 4)
        for replica, y in enumerate(range(40, 40 + data * 44, 44)):
            for part in range(tensor):
                rank = topology.get_rank(pipe=stage, data=replica, model=part)
                p.box(x + 2 + part * 50, y, 46, 32, (AMBER, ROSE, VIOLET, BLUE)[stage], str(rank))
            if stage < stages - 1:
                p.arrow(x + 104, y + 16, x + 120, y + 16)
            if not stage:
                p.text(EDGE, y + 21, f"replica {replica}", "soft")
    p.note("Numbers are ranks. The two ranks of a pair share each layer and communicate most.")
    p.note("A column is one machine. Its four replicas of a stage share gradients and optimizer state.")
    p.note("Arrows: activations go to the next stage, and gradients come back.")


def schedules(p: Picture) -> None:
    """Pipeline schedules on four ranks with eight micro-batches

    The planner simulates 1F1B, interleaved with two stages on a rank, and ZBV. Forward, gradient of the input and
    gradient of the weights take equally long. Gaps are bubbles: ZBV has the fewest.
    """
    ranks, micro_batches = 4, 8
    made = (
        ("1F1B", one_f_one_b(ranks, micro_batches)),
        ("interleaved, 2 stages a rank", interleaved(ranks, micro_batches, 2)),
        ("ZBV, zero bubble", zbv(ranks, micro_batches)),
    )
    fills = {"F": BLUE, "B": TEAL, "I": TEAL, "W": AMBER}
    longest = 0.0
    for row, (name, schedule) in enumerate(made):
        times = [StageTime(*[1.0 / schedule.num_chunks] * 3)] * schedule.num_stages
        played = simulate(schedule, times)
        longest = longest or played.makespan_s
        scale = (WIDTH - 2 * EDGE) / longest
        y = 10 + row * 138
        p.text(EDGE, y + 15, name, "bold")
        p.text(WIDTH - EDGE, y + 15, f"idle {played.bubble:.0%} of the time", "soft", "end")
        for rank in range(ranks):
            top = y + 23 + rank * 25
            p.box(EDGE, top, longest * scale, 22, r=0)
            for action, start in zip(schedule.actions[rank], played.starts[rank], strict=True):
                wide = times[action.stage].seconds(action.kind) * scale - 1
                label = str(action.micro_batch + 1) if wide > 12 else ""
                p.box(EDGE + start * scale, top, wide, 22, fills[action.kind], label, r=1)
    p.legend([(BLUE, "forward"), (TEAL, "backward"), (AMBER, "gradients of weights (ZBV)")])
    p.note("Each row is a rank. Numbers are micro-batches. Empty parts are idle time.")


def sparse_attention(p: Picture) -> None:
    """Blocks of the score matrix that each pattern keeps

    Six patterns over 16 blocks of queries and 16 blocks of keys: fixed, variable, BigBird, Longformer, local
    sliding window and dense. Filled blocks are computed.
    """
    blocks, size, cell = 16, 16, 10.4
    options: dict[str, Any] = {"bigbird": {"num_random_blocks": 1}, "variable": {"local_window_blocks": [1, 2, 4]}}
    for i, name in enumerate((*list(MODES)[1:], "dense")):
        layout = pattern_from_config({"mode": name, "block": size} | options.get(name, {}), 1).layout(blocks * size)
        x, y = EDGE + i % 3 * 203, 32 + i // 3 * 212
        p.text(x, y - 8, name, "bold")
        p.text(x + blocks * cell, y - 8, f"{layout.density:.0%}", "soft", "end")
        p.box(x - 1, y - 1, blocks * cell + 1, blocks * cell + 1, r=0)
        for row, kept in enumerate(layout.to_dense()[0].tolist()):
            for col in (col for col in range(blocks) if kept[col]):
                p.box(x + col * cell, y + row * cell, cell - 1, cell - 1, BLUE, r=0)
    p.note(
        "Rows are blocks of queries, columns are blocks of keys. Percentages: share of the blocks that are computed."
    )


def onebit(p: Picture) -> None:
    """An exchange with error compensation

    Each rank adds the error of the previous step to its momentum and sends signs with one scale. The difference between
    this sum and the sent values is the new error. The owner computes the mean and sends it as signs with one scale.
    """
    p.box(EDGE, 12, 168, 48, TEAL, "momentum")
    p.box(EDGE, 100, 168, 48, AMBER, "error")
    p.text(EDGE + 100, 86, "+", "bold", "middle")
    p.box(236, 12, 160, 48, BLUE, "signs, one scale")
    p.box(450, 12, 136, 48, VIOLET, "owner: mean")
    for ends in ((98, 99, 98, 61), (183, 36, 235, 36), (397, 36, 449, 36), (316, 124, 183, 124), (518, 170, 183, 170)):
        p.arrow(*ends)
    p.line(316, 60, 316, 124)
    p.text(324, 84, "difference:", "soft")
    p.text(324, 106, "the next error", "soft")
    p.line(518, 60, 518, 170)
    p.box(EDGE, 156, 168, 48, VIOLET, "mean, on all ranks")
    p.text(200, 194, "signs and one scale, to all ranks", "soft")
    p.text(EDGE, 238, f"Bytes of a message of {BLOCK:,} numbers", "bold")
    sizes = {"bf16": 2 * BLOCK} | {name: CODES[name].row_bytes(BLOCK) for name in ("int8", "int4", "1bit")}
    for i, (name, size) in enumerate(sizes.items()):
        y, wide = 248 + i * 32, 420 * size / (2 * BLOCK)
        p.text(EDGE, y + 19, name)
        p.box(EDGE + 60, y, wide, 26, BLUE if name == "1bit" else SLATE)
        p.text(EDGE + 68 + wide, y + 19, f"{size:,}")


def formats(p: Picture) -> None:
    """Bytes for each parameter on the host, by state format

    Weight and lower half of the master take 2 bytes each in every format. Momentum and variance take 4 bytes each
    with fp32, 2 with bf16, about 1 with int8 and half a byte with 4bit.
    """
    scale = (WIDTH - 2 * EDGE - 130) / state_bytes("fp32").host
    for i, name in enumerate(STATES):
        y, moment = 14 + i * 46, MOMENT_BYTES[name] / 2
        p.text(EDGE, y + 23, name, "bold")
        end = p.bar(EDGE + 54, y, 34, scale, ((2, BLUE), (2, TEAL), (moment, VIOLET), (moment, ROSE)))
        p.text(end + 8, y + 23, f"{state_bytes(name).host:.3g}")
    named = {BLUE: "bf16 weight, upper half of master", TEAL: "lower half", VIOLET: "momentum", ROSE: "variance"}
    p.legend(named.items())


def activations(p: Picture) -> None:
    """Contents of GPU memory when backward runs layer 5 of 8

    Without checkpointing all activations of layers 1 to 5 are on the GPU. With checkpointing, the GPU has the inputs of
    these layers and the activations of layer 5. With cpu_checkpointing, the GPU has only the inputs of layers 3 to 5
    and the activations of layer 5.
    """
    window = inspect.signature(Offload.__init__).parameters["ahead"].default
    count, at, wide = 8, 5, 68
    for row, name in enumerate(("no checkpointing", "checkpointing", "cpu_checkpointing")):
        y = 12 + row * 92
        p.text(EDGE, y + 14, name, "bold")
        for layer in range(1, count + 1):
            x = EDGE + (layer - 1) * (wide + 4)
            p.box(x, y + 22, wide, 50)
            if layer <= at:
                on_host = row == 2 and layer < at - window
                p.box(x + 4, y + 26, 16, 42, TEAL if on_host else BLUE)
                p.box(x + 23, y + 26, wide - 27, 42, AMBER if row == 0 or layer == at else "", str(layer), "bare")
    p.legend([(BLUE, "input, on the GPU"), (AMBER, "activations, on the GPU"), (TEAL, "input, on the host")])
    p.note("Backward has freed layers 6 to 8. Layer 5 runs its backward now.")


def long_sequences(p: Picture) -> None:
    """Tokens and heads of two ranks that share a sequence of 16 tokens

    Rank 0 and rank 1 have the first and the second half of the tokens. With ulysses each rank computes the attention of
    half of the heads over all tokens. With ring each rank has a chunk from the start and one from the end, and keys and
    values travel.
    """
    count, fills = 16, (BLUE, VIOLET)
    wide = (WIDTH - 2 * EDGE) / count

    def tokens(y: float, is_zigzag: bool) -> None:
        ranks = SequenceRanks(_Two(), alone(), alone(), "ring", 0, is_zigzag)
        for rank in range(2):
            for start, stop in ranks.chunks(count, rank):
                for i in range(start, stop):
                    p.box(EDGE + i * wide, y, wide - 3, 34, fills[rank], str(i))

    p.text(EDGE, 24, "ulysses: layers on the tokens of a rank", "bold")
    tokens(34, False)
    p.arrow(WIDTH / 2, 70, WIDTH / 2, 92)
    p.text(WIDTH / 2 + 10, 87, "exchange", "soft")
    for rank, fill in enumerate(fills):
        heads = f"rank {rank}: heads {4 * rank} to {4 * rank + 3}, all tokens"
        p.box(EDGE, 96 + rank * 38, WIDTH - 2 * EDGE, 32, fill, heads)
    p.text(EDGE, 204, "ring: layers on the tokens of a rank", "bold")
    tokens(214, True)
    p.arrow(WIDTH / 2, 250, WIDTH / 2, 272)
    p.text(WIDTH / 2 + 10, 267, "keys and values travel", "soft")
    for rank, fill in enumerate(fills):
        text = f"rank {rank}: its queries, keys of rank {rank}, then of rank {1 - rank}"
        p.box(EDGE, 276 + rank * 38, WIDTH - 2 * EDGE, 32, fill, text)
    p.legend([(BLUE, "rank 0"), (VIOLET, "rank 1")])


class _Two(Group):
    """A group of two ranks that does not communicate."""

    def __init__(self) -> None:
        super().__init__(None, (0, 1), is_on_host=True)


def checkpoints(p: Picture) -> None:
    """How two ranks write one checkpoint

    Each rank writes its own safetensors files into a temporary folder. When all files are on the disk, rank 0
    writes the manifest, renames the folder and then switches the file latest.
    """
    tensor = torch.zeros(2)
    entry = Entry("w", tensor.dtype, (2,), lambda: tensor)
    files = {"model": [entry], "optimizer": [entry]}
    for rank, fill in enumerate((BLUE, VIOLET)):
        p.box(EDGE + rank * 290, 12, 282, 40, fill, f"rank {rank} writes its parts")
        for i, part in enumerate(plan_parts(files, 1 << 30, rank)):
            p.box(EDGE + rank * 290, 84 + i * 38, 282, 32, fill, part.name)
        p.arrow(EDGE + 141 + rank * 290, 53, EDGE + 141 + rank * 290, 82)
    with tempfile.TemporaryDirectory() as folder:
        tag = save(Path(folder), "global_step12", files, {"step": 12})
        others = sorted(path.name for path in tag.iterdir() if path.suffix == ".json")[::-1]
        latest = next(path.name for path in tag.parent.iterdir() if path.is_file())
    steps = (
        f"rank 0 writes {others[0]}, then {others[1]}\nwhen all files are on the disk",
        f"rank 0 renames the temporary folder\nto {tag.name}/",
        f"rank 0 writes {tag.name}\ninto the file {latest}",
    )
    for i, step in enumerate(steps):
        p.arrow(WIDTH / 2, 158 + i * 76, WIDTH / 2, 180 + i * 76)
        p.box(EDGE, 182 + i * 76, WIDTH - 2 * EDGE, 52, TEAL, step)
    p.note("A crash at any time leaves the previous checkpoint unchanged.")


def choosing(p: Picture) -> None:
    """Bytes for each parameter on each side, by ratio

    State is fp32, and weights are bf16. At ratio 1 the GPU has weights and gradients, and the host has all state.
    At ratio 0 all state is on the GPU.
    """
    size, width = state_bytes("fp32"), WEIGHT_BYTES["bf16"]
    middle, scale = 344, 18.2
    p.text(EDGE, 22, "ratio", "bold")
    p.text(middle - 8, 22, "GPU", "bold", "end")
    p.text(middle + 8, 22, "host", "bold")
    for i, ratio in enumerate((1.0, 0.75, 0.5, 0.25, 0.0)):
        y, resident = 30 + i * 38, size.resident * (1 - ratio)
        p.text(EDGE, y + 21, f"{ratio:g}", "bold")
        left = middle - 4 - scale * (resident + 2 * width)
        p.bar(left, y, 32, scale, ((resident, VIOLET), (width, AMBER), (width, BLUE)))
        p.bar(middle + 4, y, 32, scale, ((size.host * ratio, VIOLET),))
    p.line(middle, 10, middle, 218, "frame")
    p.legend([(BLUE, "weights"), (AMBER, "gradients that wait for clipping"), (VIOLET, "state, fp32")])


def plan(p: Picture) -> None:
    """Memory of a GPT with 13 billion parameters on an H200

    The planner's bytes on the GPU and on the host for no offload, full offload and the best ratio. Neither side
    alone has room for fp32 state; the best ratio uses both.
    """
    model, batch = choose_model(PlanOptions(preset="gpt2-13b"))
    machine = Machine(GPUS["h200"], Host(RAM, CORES, DRAM_RATE))
    memory = Memory(machine.gpu.memory_bytes, machine.host.ram_bytes)
    cases = all_cases(Run(model, batch, 1024), Setting(rates_of(machine), memory))
    top = max(max(case.used.gpu_total, case.used.host_total) for case in cases) / 1e9
    scale, right = 276 / top, 310.0
    p.text(EDGE, 22, "GPU", "bold")
    p.text(right, 22, "host", "bold")
    wanted = ("no offload, fp32", "full offload, fp32", "full offload, bf16", "best ratio, fp32", "best ratio, bf16")
    by_name = {f"{case.kind}, {case.run.states}": case for case in cases}
    for i, (name, case) in enumerate((name, by_name[name]) for name in wanted):
        y = 32 + i * 62
        p.text(EDGE, y + 15, name + ("" if case.fits else ": does not fit"), "bold" if case.fits else "")
        for x, used, room in ((EDGE, case.used.gpu, memory.gpu_bytes), (right, case.used.host, memory.host_bytes)):
            named = {"weights": BLUE, "gradients": AMBER, "state": VIOLET}
            rest = sum(bytes_ for part, bytes_ in used.items() if part not in named)
            parts = [(used.get(part, 0), fill) for part, fill in named.items()] + [(rest, SLATE)]
            p.bar(x, y + 22, 30, scale, ((round(bytes_ / 1e9), fill) for bytes_, fill in parts))
            end = x + room / 1e9 * scale
            p.line(end, y + 20, end, y + 54, "mark")
    p.legend([(BLUE, "weights"), (AMBER, "gradients"), (VIOLET, "state"), (SLATE, "activations, buffers")])
    p.note("Numbers are GB. Red lines: memory of the card and of the host.")


PAGES: Final[dict[Callable[[Picture], None], str]] = {  # the page that shows each picture
    overlap: "how-overlap-works.md",
    as_torch: "as-torch.md",
    twin_flow: "twin-flow.md",
    offload: "offload.md",
    weights_on_host: "weights-on-host.md",
    zero: "zero.md",
    grid: "3d.md",
    schedules: "3d.md",
    sparse_attention: "sparse-attention.md",
    onebit: "onebit.md",
    formats: "formats.md",
    activations: "activations.md",
    long_sequences: "long-sequences.md",
    checkpoints: "checkpoints.md",
    choosing: "choosing.md",
    plan: "plan.md",
}


def file_name(draw: Callable[[Picture], None]) -> str:
    return f"{draw.__name__.replace('_', '-')}.svg"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in PAGES:
        (FOLDER / file_name(draw)).write_text(Picture(draw).svg())
