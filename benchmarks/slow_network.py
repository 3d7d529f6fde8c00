# SPDX-License-Identifier: Apache-2.0
"""Training over a slow network: OneBitAdam beside DistributedDataParallel, seconds and bytes on the wire of a step.

Four "machines" are network namespaces of this one, on a bridge, with a rate limit in both directions and one rank in
each. All ways train the same GPT on the same batches. Where a loss is not finite or does not fall, or where weights of
ranks differ, nothing is reported. Prints a table, what is wanted, and one JSON line; `--save` writes a dated file in
benchmarks/results, `--tiny` shows that the script works. Needs Linux, namespaces, `ip` and `tc`, no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # tests count in the same way

from netns_support import HEADER_BYTES, LINK, MTU, QUEUE_S, Counters, NetHost, hosts_on_switch, why_no_switch

import twinflow
from twinflow.bench.machine import describe, read_machine, read_versions
from twinflow.models.gpt import GPT, GPTConfig, count_params
from twinflow.optim.onebit.adam import OneBitAdam

LR, BATCH, RANK, PORT = 3e-4, 2, 4, 29500  # RANK is PowerSGD's
NEVER = 1 << 30
SETTLE_S = 0.3  # for the last acknowledgements
LIMIT_S = 1200.0  # for all ways at one rate
WAYS = {
    "fp32": "DDP, fp32",
    "bf16": "DDP, bf16 hook",
    "powersgd": f"DDP, PowerSGD rank {RANK}",
    "warmup": "OneBitAdam before the switch, bf16",
    "onebit": "OneBitAdam after the switch",
    "whole-bf16": "DDP, bf16 hook, all steps",
    "whole-onebit": "OneBitAdam, all steps",
}
COMPARED = ("fp32", "bf16", "powersgd", "warmup", "onebit")


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    shape: dict[str, int]
    num_hosts: int
    rates: dict[float, tuple[str, ...]]  # what is trained at so many Mbit/s
    num_steps: dict[str, int]  # that are counted
    freeze_step: int

    def num_before(self, way: str) -> int:
        """Steps before those: PowerSGD does not compress the first two."""
        return 0 if way.startswith("whole") else self.freeze_step + 2 if way == "onebit" else 3


FULL = Scale(
    {"vocab_size": 2048, "context": 8, "num_layers": 4, "hidden": 384, "num_heads": 6},
    4,
    {100.0: COMPARED, 780.0: ("bf16",), 1000.0: (*COMPARED, "whole-bf16", "whole-onebit")},
    {"fp32": 7, "bf16": 9, "powersgd": 15, "warmup": 7, "onebit": 25, "whole-bf16": 40, "whole-onebit": 40},
    8,
)
TINY = Scale(
    {"vocab_size": 512, "context": 8, "num_layers": 4, "hidden": 256, "num_heads": 4},
    4,
    {1000.0: (*COMPARED, "whole-bf16", "whole-onebit")},
    dict.fromkeys(WAYS, 5) | {"whole-bf16": 20, "whole-onebit": 20},
    4,
)


# On each rank.


def run_rank(scale: Scale, ways: Sequence[str]) -> None:
    """Train in each way and print what was found, as JSON."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {way: train(scale, way) for way in ways}
    dist.barrier()
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """Its end is that of standard input: however it ends, nothing stays behind."""
    sys.stdin.read()
    os._exit(1)


def train(scale: Scale, way: str) -> dict[str, Any]:
    """Steps, some of which are timed and counted."""
    torch.manual_seed(0)
    model, num_before = GPT(GPTConfig(**scale.shape)), scale.num_before(way)
    module, optimizer = build(way, model, scale)
    losses, seconds, first, counted = [], [], Counters(0, 0), 0
    for step in range(num_before + scale.num_steps[way]):
        if step == num_before:
            first, counted = stand_still(), getattr(optimizer, "sent_bytes", 0)
        tokens = batch(step, scale.shape)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = module(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    sent = stand_still() - first
    weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    return {
        "seconds": seconds[num_before:],
        "losses": losses,
        "sent": asdict(sent),
        "counted_bytes": getattr(optimizer, "sent_bytes", 0) - counted,
        "digest": hashlib.sha256(weights).hexdigest(),
    }


def build(way: str, model: GPT, scale: Scale) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What is called, and what steps."""
    freeze_step = {"warmup": NEVER, "onebit": scale.freeze_step, "whole-onebit": scale.freeze_step}.get(way)
    if freeze_step is not None:
        return model, OneBitAdam(model.parameters(), LR, freeze_step=freeze_step, wire_dtype=torch.bfloat16)
    # PowerSGD's collectives of several buckets come in an order of their own on each rank of gloo: it gets one bucket.
    bucket_mb = 1024 if way == "powersgd" else None
    module = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if way == "powersgd":  # the first two steps are in full precision: the hook allows no fewer
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif way != "fp32":
        module.register_comm_hook(None, bf16_hook)
    return module, torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0, fused=True)


def bf16_hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP cannot read annotations that are text
    """Torch's own under another name: by its name DDP refuses it for gloo, where it works."""
    return default_hooks.bf16_compress_hook(group, bucket)


def batch(step: int, shape: Mapping[str, int]) -> Tensor:
    """Each token follows from the one before it, but for a choice of four."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(256, (BATCH, shape["context"] + 1), generator=generator)
    for i in range(1, tokens.shape[1]):
        tokens[:, i] = (5 * tokens[:, i - 1] + tokens[:, i] % 4) % 256
    return tokens


def stand_still() -> Counters:
    """What this rank's interface has sent, while none sends."""
    dist.barrier()
    time.sleep(SETTLE_S)
    sent = NetHost("", os.getpid()).sent(LINK)
    dist.barrier()
    return sent


# On the side that starts them.


@dataclass(frozen=True)
class Row:
    """A way at a rate."""

    way: str
    mbit: float
    seconds: float  # of a step, the median
    wire_bytes: float  # of a rank and step
    payload_bytes: float  # the same without headers
    counted_bytes: float  # by our collectives themselves; 0 where they are not ours
    losses: list[float]  # mean of the ranks, of each step


@dataclass(frozen=True)
class Rank:
    """A process on a host."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def said(self) -> str:
        """The end of what it wrote beside its result."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-3000:]


def measure(scale: Scale, mbit: float) -> list[Row]:
    """All ways at a rate."""
    ways = scale.rates[mbit]
    with hosts_on_switch(scale.num_hosts, mbit) as switch, started(switch.hosts, scale, ways) as ranks:
        found = [json.loads(text) for text in wait_for(ranks)]
    return [row_of(way, mbit, [rank[way] for rank in found]) for way in ways]


@contextmanager
def started(hosts: Sequence[NetHost], scale: Scale, ways: Sequence[str]) -> Iterator[list[Rank]]:
    """A rank on each host. Each ends when its standard input does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "TWINFLOW_"))}
    env = {**kept, "PYTHONPATH": str(Path(twinflow.__file__).parents[1]), "GLOO_SOCKET_IFNAME": LINK}
    env |= {"OMP_NUM_THREADS": "1", "TWINFLOW_THREADS": "1", "WORLD_SIZE": str(len(hosts))}
    env |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
    command = [sys.executable, __file__, *(["--tiny"] if scale is TINY else []), "--rank", ",".join(ways)]
    with ExitStack() as stack:
        ranks = []
        for number, host in enumerate(hosts):
            errors, own = stack.enter_context(tempfile.TemporaryFile()), {**env, "RANK": str(number)}
            words = [*host.enter(), *command]
            process = subprocess.Popen(words, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(Rank(process, errors))
        yield ranks


def wait_for(ranks: Sequence[Rank]) -> list[bytes]:
    """What all wrote; an error where one fails or is late."""
    deadline_s = time.monotonic() + LIMIT_S
    while any(rank.process.poll() is None for rank in ranks):
        if time.monotonic() > deadline_s or any(rank.process.returncode for rank in ranks):
            break
        time.sleep(0.1)
    failed = [
        f"rank {i} has not ended well:\n{rank.said()}" for i, rank in enumerate(ranks) if rank.process.poll() != 0
    ]
    if failed:
        sys.exit("\n".join(failed))
    return [rank.process.stdout.read() for rank in ranks if rank.process.stdout is not None]


def row_of(way: str, mbit: float, ranks: Sequence[Mapping[str, Any]]) -> Row:
    """What the ranks found, checked."""
    losses = [statistics.fmean(own) for own in zip(*(rank["losses"] for rank in ranks), strict=True)]
    name = f"{WAYS[way]} at {mbit:g} Mbit/s"
    if not all(map(math.isfinite, losses)) or statistics.fmean(losses[-3:]) >= statistics.fmean(losses[:3]):
        sys.exit(f"no figures are reported: losses of {name} are not finite or do not fall: {losses}")
    if len({rank["digest"] for rank in ranks}) > 1:
        sys.exit(f"no figures are reported: after {name} weights of the ranks differ")
    slowest = [max(own) for own in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    sent, num = reduce(add, [Counters(**rank["sent"]) for rank in ranks]), len(ranks) * len(slowest)
    counted = sum(rank["counted_bytes"] for rank in ranks) / num
    row = Row(way, mbit, statistics.median(slowest), sent.bytes / num, sent.payload_bytes / num, counted, losses)
    if row.wire_bytes * 8 / sum(slowest) * len(slowest) > 1.1e6 * mbit:
        sys.exit(f"no figures are reported: {name} was sent faster than that")
    return row


Limit = tuple[str, float, float]  # what, measured, the least that is wanted


def limits_of(rows: Sequence[Row], scale: Scale) -> list[Limit]:
    """What is wanted."""
    at = {(row.way, row.mbit): row for row in rows}
    slow, fast = min(scale.rates), max(scale.rates)
    one, found = at["onebit", slow], []
    if slow < fast:
        found += [
            (f"speed at {slow:g} Mbit/s over DDP fp32", at["fp32", slow].seconds / one.seconds, 5.0),
            (f"speed at {slow:g} Mbit/s over the bf16 hook", at["bf16", slow].seconds / one.seconds, 3.0),
            (f"speed at {slow:g} over the bf16 hook at 780 Mbit/s", at["bf16", 780.0].seconds / one.seconds, 0.9),
        ]
    found.append(
        (f"speed at {fast:g} Mbit/s over the bf16 hook", at["bf16", fast].seconds / at["onebit", fast].seconds, 1.0)
    )
    for way, least in (("bf16", 15.0), ("fp32", 30.0)):
        fewest = min(at[way, mbit].wire_bytes / at["onebit", mbit].wire_bytes for mbit in (slow, fast))
        found.append((f"bytes on the wire after the switch, fewer than {WAYS[way]}", fewest, least))
    fewer, formula = whole_run(at, scale)
    found.append((f"a whole run, fewer bytes, of the formula's {formula:.3f}", 1.0 - abs(fewer / formula - 1.0), 0.97))
    return found


def whole_run(at: Mapping[tuple[str, float], Row], scale: Scale) -> tuple[float, float]:
    """How many times fewer bytes it sends than bf16 gradients do: payload measured, and 1 / (w + (1 - w) / 16 + 1 / 4T)
    for T steps. The last term is the switch, when one byte for each parameter goes to all ranks."""
    num_steps, fast = scale.num_steps["whole-onebit"], max(scale.rates)
    warm = scale.freeze_step / num_steps
    measured = at["whole-bf16", fast].payload_bytes / at["whole-onebit", fast].payload_bytes
    return measured, 1.0 / (warm + (1.0 - warm) / 16.0 + 0.25 / num_steps)


def page(rows: Sequence[Row], scale: Scale, date: str, load: Sequence[float]) -> str:
    """The result as Markdown, one JSON line last."""
    numel, at = count_params(GPTConfig(**scale.shape)), {(row.way, row.mbit): row for row in rows}
    shape = "{num_layers} x {hidden}, vocabulary {vocab_size}".format(**scale.shape)
    ring = 2 * (scale.num_hosts - 1) / scale.num_hosts * numel
    lines = [
        f"# Training over a slow network, {date}",
        "",
        f"- {describe(read_machine())}; " + ", ".join(f"{name} {version}" for name, version in read_versions().items()),
        f"- load averages before: {', '.join(f'{one:.1f}' for one in load)}; after: {os.getloadavg()[0]:.1f}",
        f"- {scale.num_hosts} network namespaces on one bridge, `tc tbf` to and from each (queues of {QUEUE_S:g} s,",
        f"  MTU {MTU}, no latency added), a gloo rank in each, one thread a rank: ranks share the cores.",
        f"- A GPT of {numel / 1e6:.2f} M parameters in fp32 ({shape}), {BATCH} x {scale.shape['context']} tokens each.",
        "- step: the median over steps of the slowest rank, forward to update. DDP with torch's fused AdamW. PowerSGD",
        "  begins with the third step, is measured from the fourth on, and has one bucket: with more gloo fails.",
        "- wire: bytes by the interface's counter, a rank and step; frames are not above the MTU (`gso_max_segs 1`).",
        f"  payload: less {HEADER_BYTES} a frame. formula: 2 (W-1)/W x bits / 8 x parameters. counted: by our",
        "  collectives themselves, padding, scales and what ranks agree on included.",
        "",
        "| Mbit/s | way | step, ms | x DDP fp32 | wire, MB | payload, MB | of the formula | counted, MB | loss |",
        "|---|---|" + "---:|" * 7,
    ]
    bits = {"fp32": 32, "bf16": 16, "warmup": 16, "onebit": 1, "whole-bf16": 16}
    for row in rows:
        base, over = at.get(("fp32", row.mbit)), bits.get(row.way)
        cells = [f"{row.mbit:g}", WAYS[row.way], f"{row.seconds * 1e3:.0f}"]
        cells += [f"{base.seconds / row.seconds:.2f}" if base else "-", f"{row.wire_bytes / 1e6:.3f}"]
        cells += [f"{row.payload_bytes / 1e6:.3f}", f"{row.payload_bytes * 8 / over / ring:.4f}" if over else "-"]
        cells += [f"{row.counted_bytes / 1e6:.3f}" if row.counted_bytes else "-"]
        lines.append("| " + " | ".join([*cells, f"{row.losses[0]:.2f} to {row.losses[-1]:.2f}"]) + " |")
    fewer, formula = whole_run(at, scale)
    lines += ["", f"A whole run of {scale.num_steps['whole-onebit']} steps, {scale.freeze_step} before the switch, has"]
    lines += [f"{fewer:.3f} times fewer bytes of payload than as many of bf16 DDP; 1 / (w + (1 - w) / 16 + 1 / 4T) is"]
    lines += [f"{formula:.3f}.", "", "| | measured | wanted |", "|---|---:|---:|"]
    for what, found, least in limits_of(rows, scale):
        lines.append(f"| {what} | {found:.3f} | >= {least:g}{'' if found >= least else ', missed'} |")
    facts = {"date": date, "numel": numel, "shape": scale.shape, "world": scale.num_hosts, "load": load}
    facts |= {"num_steps": scale.num_steps, "freeze_step": scale.freeze_step, "rows": [asdict(row) for row in rows]}
    return "\n".join([*lines, "", "```json", json.dumps(facts), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument(
        "--tiny", action="store_true", help="a small model and few steps, where no speed means anything"
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    scale = TINY if given.tiny else FULL
    if given.rank:
        return run_rank(scale, given.rank.split(","))
    reason = why_no_switch(scale.num_hosts, max(scale.rates))
    if reason:
        sys.exit(f"needs network namespaces on a bridge and `tc tbf`, as root or with user namespaces: {reason}")
    load, rows = os.getloadavg(), [row for mbit in scale.rates for row in measure(scale, mbit)]
    date = datetime.date.today().isoformat()
    text = page(rows, scale, date, load)
    print(text)
    if given.save:
        (Path(__file__).parent / "results" / f"{date}-slow-network.md").write_text(text, encoding="utf-8")
    missed = [what for what, found, least in limits_of(rows, scale) if found < least]
    if missed and not given.tiny:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
