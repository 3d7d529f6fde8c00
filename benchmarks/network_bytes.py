# SPDX-License-Identifier: Apache-2.0
"""Bytes that ZeRO's stages send between two machines, by the counters of their network interfaces, beside the formulas.

Two "machines" are network namespaces joined by a veth pair, started with `twinflow launch --num_nodes 2`. Prints a
table and one JSON line; `--save` writes a dated file in benchmarks/results. Needs Linux and namespaces, no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the test counts in the same way

from netns_support import HEADER_BYTES, two_hosts
from network_cases import NUM_STEPS, SHAPE, Row, formula, measure, order_of
from two_hosts_cases import launched

RUNS: tuple[dict[str, Any], ...] = (
    {"slots": 1, "mtu": 9000, "recompute": False},
    {"slots": 1, "mtu": 9000, "recompute": True},
    {"slots": 1, "mtu": 1500, "recompute": False},
    {"slots": 2, "mtu": 9000, "recompute": False},
)
LIMIT = 0.03

TEXT = """# Bytes between two machines by ZeRO stage, {date}

- `python benchmarks/network_bytes.py`: two network namespaces of one machine, joined by a veth pair, `twinflow launch
  --num_nodes 2` over them; gloo, torch {torch}. A GPT of {params:.2f} M parameters in fp32 ({shape}),
  state on the host, {steps} steps. Counters of the interfaces are read while all ranks stand still, after a first step.
- Formula, per rank and step: 2 (W-1)/W x the weights' bytes at stages 0 and 1; (A+1) (W-1)/W at stage 2, which sends
  gradients after each of A micro-batches; 3 A (W-1)/W at stage 3, which gathers weights for each forward and backward
  too, less what belongs to no block, here 4% of the weights, and is gathered once for both. Recomputed activations
  send nothing more.
- Frames are those of a card: segmentation is off (`gso_max_segs 1`), so none is above the MTU. With 2 ranks a machine
  the bytes of `lo` are in it: ranks of one machine talk over it.
- payload: bytes less {header} for each frame (Ethernet 14, IPv4 20, TCP 32). counted: by the collectives themselves,
  padding of buckets and what ranks agree on included; not at stage 3, where `fully_shard` calls them. gloo: payload
  beyond that: gloo's own messages, the pulses by which ranks watch each other, and what TCP sends a second time.
- All bytes are sums over ranks, a step.

{table}

Largest difference between payload and formula: {worst:.2%}; with headers at an MTU of 9000: {worst_wire:.2%}.
"""
HEAD = "| W | a machine | MTU | recompute | stage | A | formula | MB | payload MB | off | counted | gloo | wire MB |"


def run(slots: int, mtu: int, recompute: bool) -> list[Row]:
    """All stages."""
    world = 2 * slots
    order = order_of(world, recompute)
    with (
        tempfile.TemporaryDirectory() as folder,
        two_hosts(mtu) as hosts,
        launched(Path(folder), hosts, {"count": order}, slots) as launch,
    ):
        rows = measure(launch, hosts, order, world)
        launch.output()
        assert launch.process.returncode == 0
    return rows


def cells(given: dict[str, Any], row: Row) -> list[str]:
    step = 1e6 * NUM_STEPS
    counted = row.counted_bytes / row.formula_bytes - 1.0
    gloo = (row.wire.payload_bytes - row.counted_bytes) / row.formula_bytes
    return [
        f"{row.world} | {given['slots']} | {given['mtu']} | {'yes' if given['recompute'] else 'no'}",
        f"{row.stage} | {row.accumulation} | {formula(row.stage, row.accumulation, row.world):g}",
        f"{row.formula_bytes / step:.3f} | {row.wire.payload_bytes / step:.3f} | {row.payload_excess:+.2%}",
        f"{f'{counted:+.2%} | {gloo:+.2%}' if row.stage < 3 else '- | -'} | {row.wire.bytes / step:.3f}",
        f"{row.wire_excess:+.2%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    given = parser.parse_args()
    found = [(options, row) for options in RUNS for row in run(**options)]
    lines = [f"{HEAD} off |", "|" + "---|" * HEAD.count("|")]
    lines += [f"| {' | '.join(cells(options, row))} |" for options, row in found]
    worst = max(abs(row.payload_excess) for _, row in found)
    assert worst < LIMIT, f"payload is off by {worst:.2%}"
    date, first = datetime.date.today().isoformat(), found[0][1]
    weight_bytes = first.formula_bytes / formula(first.stage, first.accumulation, first.world) / first.world / NUM_STEPS
    text = TEXT.format(
        date=date,
        torch=torch.__version__,
        params=weight_bytes / 4e6,
        shape="{num_layers} x {hidden}, vocabulary {vocab_size}, {context} tokens".format(**SHAPE),
        steps=NUM_STEPS,
        header=HEADER_BYTES,
        table="\n".join(lines),
        worst=worst,
        worst_wire=max(row.wire_excess for options, row in found if options["mtu"] == 9000),
    )
    rows = [{**options, **asdict(row)} for options, row in found]
    text += "\n".join(["", "```json", json.dumps({"date": date, "rows": rows}), "```", ""])
    print(text)
    if given.save:
        (Path(__file__).parent / "results" / f"{date}-network-bytes.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
