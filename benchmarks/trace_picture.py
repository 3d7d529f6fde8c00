# SPDX-License-Identifier: Apache-2.0
"""A few training steps as a picture: trains a GPT, records what ran when, and draws it as an SVG.

python benchmarks/trace_picture.py --preset gpt2-1.5b --batch 16 --save    on the GPU, where there is one
python benchmarks/trace_picture.py --draw benchmarks/results/FILE.json     draws a saved trace again

`--save` writes a dated trace (JSON) with its picture (SVG) and facts (Markdown) to benchmarks/results. Without a GPU
model and update share the cores: that shows the order of things, not their proportions.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from twinflow.bench.machine import describe, read_machine
from twinflow.models.gpt import GPT, PRESETS, GPTConfig, count_params
from twinflow.monitor.plot import tick_text, ticks
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.trace import Span, busy_s, overlap_s

CUDA = torch.cuda.is_available()
RESULTS = Path(__file__).parent / "results"
NEVER = 1e3  # a norm that is never exceeded: updates ahead of it are kept
LEFT, WIDTH, ROW, TOP = 128, 1000, 46, 66
ROWS = {"compute": "model", "out": "gradients out", "host": "host update", "in": "weights in", "main": "model waits"}
COLORS = {"forward": "#94a3b8", "backward": "#64748b", "wait": "#dc2626"}
STYLE = "text{font:13px sans-serif;fill:#334155}.title{font-weight:600}.small{font-size:11px;fill:#64748b}"
STYLE += ".light{font-size:11px;fill:#fff}.grid{stroke:#e2e8f0}.gate{stroke:#dc2626;stroke-dasharray:3 3}"


def record(config: GPTConfig, batch: int, bucket_numel: int | None, steps: int = 3) -> tuple[list[Span], int]:
    """Spans of `steps` steps after some that are not recorded, and how many parameters were trained."""
    device = "cuda" if CUDA else "cpu"
    torch.manual_seed(0)
    config = dataclasses.replace(config, recompute="full" if config.hidden >= 1600 else "none")
    model = GPT(config).to(device, torch.bfloat16 if CUDA else torch.float32)
    tuning = Tuning() if bucket_numel is None else Tuning(bucket_numel=bucket_numel)
    optimizer = TwinOptimizer(model, "adamw", lr=1e-4, ratio=1.0, max_grad_norm=NEVER, early=True, tuning=tuning)
    tokens = torch.randint(config.vocab_size, (batch, config.context), device=device)

    def train(count: int) -> None:
        for _ in range(count):
            model(tokens, tokens.roll(-1, 1)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    train(12)  # speculative stores and forward order are there
    optimizer.trace.start()
    train(steps + 1)  # the last shows where the picture ends
    optimizer.wait()
    optimizer.trace.stop()
    spans = [span for span in optimizer.trace.spans() if span.track in (*ROWS, "mover") and span.name != "grad"]
    optimizer.close()
    return spans, count_params(config)


def facts_of(config: GPTConfig, batch: int, num_params: int, spans: Sequence[Span]) -> dict[str, Any]:
    """What was run, where, and what the spans add up to."""
    starts = [span.start_s for span in spans if span.name == "forward"]
    host = [span for span in spans if span.track == "host"]
    model = [span for span in spans if span.name in ("forward", "backward")]
    unit, size = ("B", num_params / 1e9) if num_params >= 1e9 else ("M", num_params / 1e6)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{torch.cuda.get_device_name()}; {describe(read_machine())}" if CUDA else describe(read_machine()),
        "on": torch.cuda.get_device_name() if CUDA else "CPU only",
        "torch": torch.__version__,
        "what": f"{size:.3g} {unit} parameters, {batch} x {config.context} tokens a step",
        "step_s": (starts[-1] - starts[0]) / (len(starts) - 1),
        "host_busy_s": busy_s(host) / len(starts),
        "host_beside_model": overlap_s(host, model) / max(busy_s(host), 1e-9),
        "waits_s": busy_s(span for span in spans if span.track == "main") / len(starts),
        "updates": sum(span.track == "host" for span in spans),
        "updates_ahead_of_the_norm": sum(span.name == "ahead" for span in spans),
    }


def to_json(spans: Iterable[Span], facts: dict[str, Any]) -> str:
    """Facts and spans, a span a line: [name, track, start, end, bucket], in microseconds from the first."""
    spans = list(spans)
    zero = min(span.start_s for span in spans)
    rows = [
        [s.name, s.track, round(1e6 * (s.start_s - zero)), round(1e6 * (s.end_s - zero)), int(s.args.get("bucket", -1))]
        for s in spans
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"facts": {json.dumps(facts)},\n"spans": [\n{lines}\n]}}\n'


def from_json(text: str) -> tuple[list[Span], dict[str, Any]]:
    """What `to_json` wrote."""
    found = json.loads(text)
    return [Span(n, t, a / 1e6, b / 1e6, {"bucket": k}) for n, t, a, b, k in found["spans"]], found["facts"]


def picture(spans: Sequence[Span], facts: dict[str, Any]) -> str:
    """Two steps, a row for each track; buckets coloured by where in the model they are."""
    starts = [span.start_s for span in spans if span.name == "forward"]
    step_s = (starts[3] - starts[1]) / 2
    first, last = starts[1] - 0.04 * step_s, starts[3] + 0.12 * step_s
    num_buckets = 1 + max(int(span.args["bucket"]) for span in spans)
    bottom = TOP + ROW * len(ROWS)

    def x(at_s: float) -> float:
        share = (min(max(at_s, first), last) - first) / (last - first)
        return round(LEFT + share * (WIDTH - LEFT - 12), 1)

    title = f"Two training steps of {facts['what']}: {step_s:.3g} s each. {facts['on']}, {facts['date']}"
    parts = [text(12, 24, title, "title"), *legend(num_buckets)]
    for y_s in ticks(0.0, last - starts[1]):
        at = x(starts[1] + y_s)
        parts.append(f'<path class="grid" d="M{at} {TOP - 6}V{bottom}"/>')
        parts.append(text(at, bottom + 16, f"{tick_text(1e3 * y_s)} ms", "small", "middle"))
    for number, (track, label) in enumerate(ROWS.items()):
        y = TOP + number * ROW
        parts.append(text(12, y + 25, label, "plain"))
        shown = [s for s in spans if s.track == track and s.end_s > first and s.start_s < last]
        parts += [bar(span, x(span.start_s), x(span.end_s), y, num_buckets) for span in shown]
    for span in spans:
        if span.name == "gate" and first < span.start_s < last:
            parts.append(f'<path class="gate" d="M{x(span.start_s)} {TOP - 6}V{bottom}"/>')
    size = f'width="{WIDTH}" height="{bottom + 28}" viewBox="0 0 {WIDTH} {bottom + 28}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    return (
        "\n".join([head, f"<style>{STYLE}</style>", '<rect width="100%" height="100%" rx="8" fill="#fff"/>', *parts])
        + "\n</svg>\n"
    )


def bar(span: Span, start: float, end: float, y: float, num_buckets: int) -> str:
    """One span; what runs ahead of the norm has a mark below it."""
    bucket = int(span.args["bucket"])
    color = COLORS.get(span.name) or shade(bucket, num_buckets)
    width = max(round(end - start, 1), 0.8)
    name = span.name if bucket < 0 else f"{span.name}, bucket {bucket}"
    about = f"<title>{escape(name)}: {1e3 * (span.end_s - span.start_s):.1f} ms</title>"
    drawn = f'<rect x="{start}" y="{y + 6}" width="{width}" height="28" fill="{color}">{about}</rect>'
    if span.name in ("forward", "backward") and width > 50:
        drawn += text(round(start + width / 2, 1), y + 24, span.name, "light", "middle")
    if span.name == "ahead":
        drawn += f'<rect x="{start}" y="{y + 35}" width="{width}" height="3" fill="#dc2626"/>'
    return drawn


def shade(bucket: int, num_buckets: int) -> str:
    """From the input side of the model, amber, to the output side, blue."""
    share = bucket / max(num_buckets - 1, 1)
    ends = ((245, 158, 11), (13, 148, 136), (37, 99, 235))
    low, high, part = (ends[0], ends[1], 2 * share) if share < 0.5 else (ends[1], ends[2], 2 * share - 1)
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(low, high, strict=True))


def legend(num_buckets: int) -> list[str]:
    """What the colours mean."""
    parts = [text(12, 46, "buckets: input side", "small")]
    parts += [f'<rect x="{128 + 9 * i}" y="37" width="9" height="10" fill="{shade(i, 12)}"/>' for i in range(12)]
    parts.append(text(242, 46, f"output side ({num_buckets} buckets)", "small"))
    parts.append('<rect x="400" y="41" width="24" height="3" fill="#dc2626"/>')
    parts.append(text(430, 46, "updated ahead of the gradient norm", "small"))
    parts.append('<path class="gate" d="M640 36V50"/>')
    parts.append(text(648, 46, "norm known: clip, keep or drop", "small"))
    return parts


def text(x: float, y: float, what: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" text-anchor="{anchor}" x="{x}" y="{y}">{escape(what)}</text>'


def page(facts: dict[str, Any], name: str) -> str:
    """The facts as Markdown, with the picture."""
    lines = [
        f"# A timeline of training steps, {facts['date']}",
        "",
        f"- {facts['machine']}",
        f"- torch {facts['torch']}",
    ]
    lines += ["", "| what | |", "|---|---|"]
    lines += [
        f"| {key} | {value:.4g} |" if isinstance(value, float) else f"| {key} | {value} |"
        for key, value in facts.items()
    ]
    return "\n".join(
        [*lines, "", f"![timeline]({name}.svg)", "", f"Drawn by `benchmarks/trace_picture.py` from {name}.json.", ""]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="gpt2-1.5b" if CUDA else "tiny")
    parser.add_argument("--batch", type=int, default=16 if CUDA else 1)
    parser.add_argument("--bucket-numel", type=int, help="elements of a bucket")
    for name in ("num_layers", "hidden", "num_heads", "context", "vocab_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of the preset's")
    parser.add_argument("--save", action="store_true", help="write JSON, SVG and Markdown to benchmarks/results")
    parser.add_argument("--draw", type=Path, help="draw this trace again, and run nothing")
    given = parser.parse_args()
    if given.draw is not None:
        given.draw.with_suffix(".svg").write_text(picture(*from_json(given.draw.read_text())))
        return
    shape = ("num_layers", "hidden", "num_heads", "context", "vocab_size")
    config = dataclasses.replace(PRESETS[given.preset], **{n: v for n in shape if (v := getattr(given, n)) is not None})
    spans, num_params = record(config, given.batch, given.bucket_numel)
    facts = facts_of(config, given.batch, num_params, spans)
    print(page(facts, "trace"))
    if given.save:
        name = f"{facts['date']}-trace-{given.preset if CUDA else 'cpu'}"
        (RESULTS / f"{name}.json").write_text(to_json(spans, facts))
        (RESULTS / f"{name}.svg").write_text(picture(*from_json((RESULTS / f"{name}.json").read_text())))
        (RESULTS / f"{name}.md").write_text(page(facts, name))


if __name__ == "__main__":
    main()
