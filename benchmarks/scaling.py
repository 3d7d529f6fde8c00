# SPDX-License-Identifier: Apache-2.0
"""What the planner says about ZeRO-Offload and ZeRO-2 on 1 to 128 GPUs, beside what was published for 10 B parameters.

Plain arithmetic: no GPU, nothing is measured. Prints tables and one JSON line; `--save` writes a dated file in
benchmarks/results. `twinflow plan --preset gpt2-10b --gpu v100-32 --gpus 16 ... --scaling 128` prints the first table.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from seed_predictions import DEEPSPEED_BYTES, DEEPSPEED_COPY, DGX2, TOKENS, gpt, markdown

from twinflow.cli.plan_scaling import to_dict
from twinflow.planner.costs import Run
from twinflow.planner.machines import GPUS, Machine, rates_of
from twinflow.planner.scaling import (
    OFFLOAD,
    PLAIN,
    RATIOS,
    Ask,
    Cluster,
    Point,
    Row,
    crossover,
    default_network,
    doubling,
    efficiency,
    play,
    scaling,
    used_bytes,
)

TOTAL = 512  # sequences of a step, as the published figures for one GPU have it
MACHINE = Machine(GPUS["v100-32"], DGX2, 16)
CLUSTER = Cluster(MACHINE, default_network(MACHINE))  # 8 x 100 Gb/s, of which 0.8
RUN = Run(gpt(50, 4096), 1, TOKENS, weights="fp16")
WORLDS = doubling(128)
TILE, NUM_SMS = 128, 80  # of a matrix product's output, and of a V100: only for what batches could be worth

TEXT = """# ZeRO-Offload and ZeRO-2 from 1 to 128 GPUs, {date}

- `python benchmarks/scaling.py`: arithmetic of the planner, nothing measured. GPT-2 of 50 x 4096 ({params:.2f} B
  parameters), 1,024 tokens, fp16, checkpointing, at most {total} sequences a step. V100 of 32 GB, 16 in a DGX-2 (48
  cores, 190 GB/s of DRAM); 120 GB/s each way between cards (0.8 of NVLink's 150), 80 GB/s each way between machines
  (0.8 of 8 x 100 Gb/s).
- Published (figure 8 of the DeepSpeed article of September 2020): over 30 TFLOPS a GPU from one GPU on, close to
  linear to 128. ZeRO-2 does not run on 1 to 16 GPUs, is slightly slower on 32, where its batch is smaller, and faster
  on 64 and 128. The article does not name the batch sizes.
- *batch* is sequences x micro-batches of a GPU; *not hidden* is what a step takes beside forward and backward.

## As twinflow is to do it: weights gathered beside forward

{beside}

{beside_verdict}

## As the article describes it: weights gathered before forward, the update still hidden

{before}

{before_verdict}

## Where ZeRO-2 catches up, by assumption

Throughput of ZeRO-Offload beside ZeRO-2's. More than 1.005 is ahead, what is closer counts as equal (`CLOSE`, by which
the planner compares placements as well).

{variants}

## What this says

- **Near-linear: yes**, in both tables. On 32 GPUs each sends {volume:.1f} GB of gradients and as many of weights,
  {talk_ms:.0f} ms each, beside {compute_s:.0f} s of compute. From 16 GPUs on a host has less to update with every
  machine, as a GPU has fewer sequences. 52 TFLOPS where the article says "over 30" are the 70 assumed for a V100's
  matrix products, of which checkpointing leaves 3/4: one number for all rows, it moves none beside another.
- **The crossover between 32 and 64: only with weights gathered before forward, and narrowly.** That leaves a quarter
  of a second in each step that no batch hides, and a batch of {batch_offload} spreads it better than ZeRO-2's
  {batch_plain}: {lead:.2f}% ahead on 32 GPUs, just above what counts as ahead. From 64 on batches are equal, as the
  article has it, and so are the two. With exactly 512 sequences (8 x 2 in both ways) or with 2,048 it is gone.
- **As twinflow is to do it, it lies between 16 and 32**, one doubling earlier: {hidden:.0f} ms of communication are
  not hidden, and all that ZeRO-2 does not hide is {cost:.2f}% of a step on 32 GPUs, so a larger batch has nothing to
  win there. ZeRO-2 is ahead by {behind:.2f}%; from 32 GPUs on the two are never further apart than {most:.2f}%. The
  planner was within 10% of measured steps: it cannot tell them apart, and says that offload costs nothing.
- **ZeRO-2 ahead on 64 and 128: only with the update in series** ({bytes:.0f} bytes of DRAM a parameter after
  backward, then the way back, then gathering, as DeepSpeed's step is modelled elsewhere here). Then ZeRO-2 is ahead
  by {series_64:.0f}%, but on 32 as well: {series_s:.2f} s of a step of {series_step:.1f} s. So no single assumption
  here gives both halves of the figure.
- **What would**: matrix products that are some {series:.0f}% slower in ZeRO-2's batch on 32 GPUs, the article's own
  reason ("GPU computation efficiency"). Whole tiles of 128 x 128 on 80 multiprocessors give {waves} sequences: enough
  only for one or two. Or a ZeRO-2 with less room: {left:.1f} GB of buffers more, and it has two sequences on 32. A
  V100's efficiency by batch and the article's buffers are not known here, so neither is in the model.
- **ZeRO-2 on 16 GPUs fits here**, in the article it does not: weights 20.6 GB, state and gradients 14/16 x 10.3 = 9.0
  GB, two blocks' whole gradients 0.8 GB leave 2.5 of 32.8 GB, for two sequences and no sums over micro-batches. One
  gigabyte of buffers more, and it does not fit.

```json
{line}
```
"""


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    shares = zip(efficiency([r.offload for r in rows]), efficiency([r.plain for r in rows]), strict=True)
    return [
        {
            "GPUs": row.world,
            **cells("offload", row.offload, first),
            **cells("ZeRO-2", row.plain, second),
            "offload / ZeRO-2": f"{row.gain:.4f}" if row.gain is not None else "",
        }
        for row, (first, second) in zip(rows, shares, strict=True)
    ]


def cells(name: str, point: Point | None, share: float | None) -> dict[str, str]:
    keys = [
        f"{name}: batch",
        *(f"{name}: {key}" for key in ("s/step", "not hidden", "TFLOPS a GPU", "total", "linear")),
    ]
    if point is None or share is None:
        return dict.fromkeys(keys, "") | {keys[0]: "does not fit"}
    values = [f"{point.run.batch} x {point.run.micro_batches}", f"{point.step_s:.2f}"]
    values += [f"{1e3 * (point.step_s - point.compute_s):.0f} ms", f"{point.tflops:.2f}"]
    return dict(zip(keys, [*values, f"{point.total_tflops:,.0f}", f"{100 * share:.1f}%"], strict=True))


def in_series(point: Point, cluster: Cluster) -> Point:
    """The same with nothing of the update hidden: forward and backward, update, way back, gathering."""
    run, talk, machine = point.run, point.talk, cluster.local(point.run.world)
    step_s = point.compute_s + talk.tail_s + talk.gather_s
    if point.kind == OFFLOAD:
        step_s += DEEPSPEED_BYTES * run.own_numel * machine.num_gpus / machine.host.dram_rate
        step_s += DEEPSPEED_COPY * run.own_numel / rates_of(machine).in_bytes
    return replace(point, step_s=step_s)


def exactly(kind: str, world: int, total: int) -> Point | None:
    """Micro-batches that make up the total and no less."""
    memory, most = CLUSTER.memory(world), total // world
    for batch in (b for b in range(most, 0, -1) if most % b == 0):
        run = replace(RUN, batch=batch, micro_batches=most // batch, world=world, stage=2 if world > 1 else 0)
        missing = used_bytes(run, RATIOS[kind], memory).missing(memory)
        if not (missing.gpu_bytes or missing.host_bytes):
            return play(kind, run, CLUSTER, gathers_first=True)
    return None


def rows_of(ask: Ask, cluster: Cluster = CLUSTER) -> list[Row]:
    return scaling(RUN, cluster, WORLDS, ask)


def series_rows() -> list[Row]:
    return [
        Row(row.world, *(p and in_series(p, CLUSTER) for p in (row.offload, row.plain)))
        for row in rows_of(Ask(TOTAL, gathers_first=True))
    ]


def variants() -> list[dict[str, Any]]:
    slow = replace(CLUSTER, network_rate=CLUSTER.network_rate / 2)
    made: dict[str, Callable[[], list[Row]]] = {
        f"beside forward, {TOTAL} sequences (twinflow)": lambda: rows_of(Ask(TOTAL)),
        "beside forward, 2,048 sequences": lambda: rows_of(Ask(2048)),
        "beside forward, half the network": lambda: rows_of(Ask(TOTAL), slow),
        f"before forward, {TOTAL} sequences (the article)": lambda: rows_of(Ask(TOTAL, True)),
        f"before forward, exactly {TOTAL} sequences": lambda: [
            Row(world, exactly(OFFLOAD, world, TOTAL), exactly(PLAIN, world, TOTAL)) for world in WORLDS
        ],
        "before forward, 2,048 sequences": lambda: rows_of(Ask(2048, True)),
        "before forward, half the network": lambda: rows_of(Ask(TOTAL, True), slow),
        "before forward, update in series": series_rows,
    }
    return [{"weights gathered": name, **variant(make())} for name, make in made.items()]


def variant(rows: Sequence[Row]) -> dict[str, Any]:
    gains = {f"{r.world}": f"{r.gain:.4f}" if r.gain is not None else "alone" for r in rows if r.world >= 16}
    found = crossover(rows)
    return {**gains, "ZeRO-2 catches up": f"{found[0]} to {found[1]}" if found else "not up to 128"}


def verdict(rows: Sequence[Row]) -> str:
    found, share = crossover(rows), efficiency([row.offload for row in rows])[-1]
    where = f"between {found[0]} and {found[1]} GPUs" if found else "nowhere up to 128 GPUs"
    return f"On 128 GPUs ZeRO-Offload has {100 * (share or 0.0):.1f}% of linear. ZeRO-2 catches up {where}."


def both(rows: Sequence[Row], world: int) -> tuple[Point, Point, float]:
    """A row where both fit, and how many times as fast offload is."""
    row = next(row for row in rows if row.world == world)
    assert row.offload is not None
    assert row.plain is not None
    assert row.gain is not None
    return row.offload, row.plain, row.gain


def room_to_lose(plain: Point, batch: int) -> float:
    """Gigabytes that could be gone before fewer than `batch` sequences fit."""
    memory = CLUSTER.memory(plain.run.world)
    used = used_bytes(replace(plain.run, batch=batch), RATIOS[PLAIN], memory)
    return (memory.gpu_bytes - used.gpu_total) / 1e9


def wave_share(batch: int) -> float:
    """Tiles over multiprocessors, whole rounds only: the share that works in the four products of a block's forward."""
    hidden, rows = RUN.model.hidden, -(-batch * TOKENS // TILE)
    seconds = 0.0
    for width, products in ((3 * hidden, 3), (hidden, 1), (4 * hidden, 4), (hidden, 4)):
        tiles = rows * (width // TILE)
        seconds += products / 12 * -(-tiles // NUM_SMS) * NUM_SMS / tiles
    return 1.0 / seconds


def page(date: str) -> str:
    beside, before, series = rows_of(Ask(TOTAL)), rows_of(Ask(TOTAL, True)), series_rows()
    offload, plain, gain = both(beside, 32)
    serial, _, serial_gain = both(series, 32)
    alone = replace(plain, step_s=plain.compute_s)
    parts = {"beside": table(beside), "before": table(before), "variants": variants()}
    numbers = {"beside": to_dict(RUN, CLUSTER, beside), "before": to_dict(RUN, CLUSTER, before)}
    return TEXT.format(
        date=date,
        params=RUN.model.numel / 1e9,
        total=TOTAL,
        **{name: "\n".join(markdown(rows)) for name, rows in parts.items()},
        beside_verdict=verdict(beside),
        before_verdict=verdict(before),
        volume=offload.talk.gather_s * CLUSTER.ring_rate(32) / 1e9,
        talk_ms=1e3 * offload.talk.gather_s,
        compute_s=offload.compute_s,
        batch_offload=offload.run.batch,
        batch_plain=plain.run.batch,
        lead=100 * (both(before, 32)[2] - 1.0),
        hidden=1e3 * plain.talk.exposed_s,
        cost=100 * (alone.tflops / plain.tflops - 1.0),
        behind=100 * (1.0 / gain - 1.0),
        most=100 * max(abs(both(beside, world)[2] - 1.0) for world in WORLDS if world >= 32),
        bytes=DEEPSPEED_BYTES,
        series=100 * (1.0 / serial_gain - 1.0),
        series_64=100 * (1.0 / both(series, 64)[2] - 1.0),
        series_s=serial.step_s - serial.compute_s - serial.talk.tail_s,
        series_step=serial.step_s,
        waves=", ".join(f"{wave_share(b):.3f} for {b}" for b in (1, 2, 4, plain.run.batch, offload.run.batch)),
        left=room_to_lose(plain, 3),
        line=json.dumps({"date": date, **numbers, "variants": parts["variants"]}),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    given = parser.parse_args()
    date = datetime.date.today().isoformat()
    text = page(date)
    print(text)
    if given.save:
        path = Path(__file__).parent / "results" / f"{date}-scaling.md"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
