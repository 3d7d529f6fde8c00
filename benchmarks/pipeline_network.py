# SPDX-License-Identifier: Apache-2.0
"""Data, pipeline and both together over a slow network: the seed's Figure 5 for real, scaled down to one machine.

Two "machines" of two ranks are network namespaces of this one. Ranks of a machine are on a bridge of their own, at 50
units in both directions; what leaves a machine goes through one link of 4 units, as the figure's cluster has 50 and 4
Gbit/s. All ways train the same GPT on the same batches, one sequence a micro-batch. Where losses are not finite, do not
fall or differ between ways, nothing is reported. Prints a table, what is wanted, and one JSON line; `--save` writes a
dated file in benchmarks/results, `--tiny` is one batch and few steps. Needs Linux, namespaces, `ip` and `tc`, no GPU.
"""

from __future__ import annotations

import argparse
import datetime
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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from slow_network import Rank, wait_for
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # namespaces are made as in the tests

from netns_support import BRIDGE, BURST_S, LINK, MTU, QUEUE_S, NetHost, Switch, hosts_on_switch, why_no_switch

import twinflow
from twinflow.bench.machine import describe, read_machine, read_versions
from twinflow.models.gpt import GPT, PRESETS, GPTConfig, count_params, flops_per_token
from twinflow.parallel.costs import estimate
from twinflow.parallel.layout import Layout
from twinflow.parallel.shapes import Shape
from twinflow.parallel.wire import HEADER_NUMEL
from twinflow.planner.machines import GB, Gpu, Host, Machine
from twinflow.planner.scaling import Cluster

NUM_MACHINES, PER_MACHINE = 2, 2
WORLD = NUM_MACHINES * PER_MACHINE
INSIDE, BETWEEN = 50, 4  # the figure's, in Gbit/s: their ratio is kept
LR, PORT = 1e-3, 29500
SETTLE_S = 0.3  # for the last acknowledgements
NUM_BEFORE = 2  # steps that are not timed
NUM_ALONE = 12  # sequences that a rank computes to know how long one takes
NEAR = 1e-4  # how far losses of two ways may be from each other
WAYS = {"data": (1, 4), "pipeline": (4, 1), "hybrid": (2, 2)}  # stages, replicas
FIGURE = PRESETS["gpt2-1.5b"]
EACH = 4  # bytes of a weight, gradient or activation: fp32


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    shape: GPTConfig
    batches: tuple[int, ...]  # sequences of a step
    num_steps: int
    between_mbit: float

    @property
    def inside_mbit(self) -> float:
        """Of a rank's link."""
        return self.between_mbit * INSIDE / BETWEEN


SHAPE = GPTConfig(vocab_size=672, context=14, num_layers=4, hidden=256, num_heads=4)
FULL = Scale(SHAPE, (4, 16, 64), 5, 40.0)
TINY = Scale(SHAPE, (4,), 4, 40.0)


# On each rank.


def run_rank(scale: Scale, middle: int) -> None:
    """Train in each way and print what was found, as JSON. `middle`: the process that keeps the links' namespace."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"alone_s": compute_alone(scale)}
    for size in scale.batches:
        for way in WAYS:
            found[f"{way}-{size}"] = train(scale, way, size, middle)
    dist.barrier()
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """Its end is that of standard input: however it ends, nothing stays behind."""
    sys.stdin.read()
    os._exit(1)


def compute_alone(scale: Scale) -> list[float]:
    """A core's seconds for a sequence's forward and backward, several times; other processes' are not in them."""
    torch.manual_seed(0)
    model, row, ended = GPT(scale.shape), tokens(0, 1, scale.shape), [time.process_time()]
    for _ in range(NUM_ALONE):
        model(row[:, :-1], row[:, 1:]).loss.backward()
        ended.append(time.process_time())
    return [late - early for early, late in pairwise(ended)]


def config_of(way: str, size: int) -> dict[str, Any]:
    """As a user would write it."""
    num_pipe, _ = WAYS[way]
    config = {
        "train_batch_size": size,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": 1},
    }
    return config if num_pipe == 1 else {**config, "pipeline": {"stages": num_pipe, "schedule": "1f1b"}}


def train(scale: Scale, way: str, size: int, middle: int) -> dict[str, Any]:
    """Steps: when each has ended, its loss, and what the machines have sent in all of them."""
    torch.manual_seed(0)
    engine: Any = twinflow.initialize(model=GPT(scale.shape), config=config_of(way, size))[0]
    before, ended, losses = stand_still(middle), [], []
    for step in range(scale.num_steps):
        losses.append(one_step(engine, step, size, scale.shape))
        ended.append(time.monotonic())
    engine.optimizer.wait()  # new weights of the last step are part of it
    sent = [late - early for early, late in zip(before, stand_still(middle), strict=True)]
    engine.destroy()
    return {"ended": ended, "losses": losses, "sent": sent}


def one_step(engine: Any, step: int, size: int, shape: GPTConfig) -> float:
    """The loss: of the whole batch in a pipeline, else of this rank's part."""
    batch = micro_batches(engine, tokens(step, size, shape))
    if hasattr(engine, "train_batch"):
        return float(engine.train_batch(batch))
    losses = []
    for inputs, targets in batch:
        loss = engine(inputs, targets).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return statistics.fmean(losses)


def micro_batches(engine: Any, batch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """This replica's, one sequence each."""
    for number in range(engine.gradient_accumulation_steps()):
        row = batch[number * engine.dp_world_size + engine.dp_rank].unsqueeze(0)
        yield row[:, :-1], row[:, 1:]


def tokens(step: int, size: int, shape: GPTConfig) -> Tensor:
    """A batch of all replicas. Each token follows from the one before it, but for a choice of four."""
    generator = torch.Generator().manual_seed(step)
    made = torch.randint(256, (size, shape.context + 1), generator=generator)
    for i in range(1, made.shape[1]):
        made[:, i] = (5 * made[:, i - 1] + made[:, i] % 4) % 256
    return made


def stand_still(middle: int) -> list[int]:
    """Bytes that each machine has sent to others, while none sends."""
    dist.barrier()
    time.sleep(SETTLE_S)
    sent = [NetHost("", middle).sent(f"up{number}").bytes for number in range(NUM_MACHINES)]
    dist.barrier()
    return sent


# On the side that starts them.


@contextmanager
def machines(scale: Scale) -> Iterator[Switch]:
    """Hosts at the rate inside a machine; each machine's on a bridge of their own, with one slow link to the others."""
    with hosts_on_switch(WORLD, scale.inside_mbit) as switch:
        run = switch.middle.run
        for number in range(NUM_MACHINES):
            bridge, up, down = f"node{number}", f"up{number}", f"down{number}"
            run("ip", "link", "add", bridge, "type", "bridge")
            run("ip", "link", "add", up, "type", "veth", "peer", "name", down)
            for port, master in ((up, bridge), (down, BRIDGE)):
                run("ip", "link", "set", port, "mtu", str(MTU), "gso_max_segs", "1", "master", master, "up")
                run("tc", "qdisc", "replace", "dev", port, "root", "tbf", *shaped(scale.between_mbit))
            for host in range(number * PER_MACHINE, (number + 1) * PER_MACHINE):
                run("ip", "link", "set", f"port{host}", "master", bridge)
            run("ip", "link", "set", bridge, "up")
        yield switch


def shaped(mbit: float) -> list[str]:
    """For `tc tbf`, with queues as `Switch.limit` has them."""
    rate = mbit * 1e6 / 8
    burst = max(64_000, round(rate * BURST_S))
    return ["rate", f"{round(mbit * 1e6)}bit", "burst", str(burst), "limit", str(burst + round(rate * QUEUE_S))]


@contextmanager
def started(switch: Switch, scale: Scale) -> Iterator[list[Rank]]:
    """A rank on each host. Each ends when its standard input does."""
    hosts = switch.hosts
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "TWINFLOW_"))}
    env = {**kept, "PYTHONPATH": str(Path(twinflow.__file__).parents[1]), "GLOO_SOCKET_IFNAME": LINK}
    env |= {
        "OMP_NUM_THREADS": "1",
        "TWINFLOW_THREADS": "1",
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(PER_MACHINE),
    }
    env |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
    tiny = ["--tiny"] if scale is TINY else []
    command = [sys.executable, __file__, *tiny, "--rank", str(switch.middle.holder)]
    with ExitStack() as stack:
        ranks = []
        for number, host in enumerate(hosts):
            errors = stack.enter_context(tempfile.TemporaryFile())
            own = {**env, "RANK": str(number), "LOCAL_RANK": str(number % PER_MACHINE)}
            words = [*host.enter(), *command]
            process = subprocess.Popen(words, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(Rank(process, errors))
        yield ranks


@dataclass(frozen=True)
class Row:
    """A way with a batch."""

    way: str
    batch: int
    seconds: float  # of a step, the median
    longest_s: float  # of the steps
    sent_bytes: float  # by the machine that sends more, to the other, in a step
    formula_bytes: float  # the same without headers of any kind
    planned_s: float  # what the planner predicts
    losses: list[float]

    @property
    def throughput(self) -> float:
        """Sequences a second."""
        return self.batch / self.seconds


def measure(scale: Scale) -> tuple[list[Row], float]:
    """All ways with all batches, checked, and how long a sequence takes a rank with its share of the cores."""
    with machines(scale) as switch, started(switch, scale) as ranks:
        found = [json.loads(text.splitlines()[-1]) for text in wait_for(ranks)]  # after lines of the log
    core_s = statistics.median(seconds for rank in found for seconds in rank["alone_s"])
    sequence_s = core_s * max(1.0, WORLD / read_machine().usable_cores)
    make = partial(row_of, scale, sequence_s)
    rows = [make(way, size, [rank[f"{way}-{size}"] for rank in found]) for size in scale.batches for way in WAYS]
    check(rows, scale)
    return rows, sequence_s


def row_of(scale: Scale, sequence_s: float, way: str, size: int, ranks: Sequence[Mapping[str, Any]]) -> Row:
    """What the ranks found."""
    ended = [max(own) for own in zip(*(rank["ended"] for rank in ranks), strict=True)][NUM_BEFORE - 1 :]
    steps = [late - early for early, late in pairwise(ended)]
    losses = [statistics.fmean(own) for own in zip(*(rank["losses"] for rank in ranks), strict=True)]
    sent = max(ranks[0]["sent"]) / scale.num_steps
    planned_s = planned(scale, way, size, sequence_s)
    return Row(way, size, statistics.median(steps), max(steps), sent, formula(scale, way, size), planned_s, losses)


def check(rows: Sequence[Row], scale: Scale) -> None:
    """No figure without the same training in all ways, nor from a link that let more through."""
    for size in scale.batches:
        ways = [row for row in rows if row.batch == size]
        for row in ways:
            if not all(map(math.isfinite, row.losses)) or row.losses[-1] >= row.losses[0]:
                sys.exit(f"no figures are reported: losses of {row.way} are not finite or do not fall: {row.losses}")
            if row.sent_bytes * 8 > 1.1e6 * scale.between_mbit * row.seconds:
                sys.exit(f"no figures are reported: {row.way} sent faster than {scale.between_mbit:g} Mbit/s")
        if (apart := loss_gap(ways)) > NEAR:
            sys.exit(f"no figures are reported: with batches of {size} losses of the ways are {apart:.1e} apart")


def loss_gap(rows: Sequence[Row]) -> float:
    """The largest difference between losses of the same step."""
    gaps: list[float] = [max(own) - min(own) for own in zip(*(row.losses for row in rows), strict=True)]
    return max(gaps)


def formula(scale: Scale, way: str, size: int) -> float:
    """Bytes that one machine sends to the other in a step.

    Data: of all gradients each rank sends a quarter to both ranks over there; weights go round a ring, three quarters
    over each edge. Stages: an activation a sequence one way, its gradient the other way, with a header; and the
    embedding's gradient of each replica, half to be summed and half as sum: it is tied to the head.
    """
    shape, (num_pipe, num_data) = scale.shape, WAYS[way]
    if num_pipe == 1:
        return EACH * count_params(shape) * (1.0 + (WORLD - 1) / WORLD)
    message = EACH * shape.context * shape.hidden + 8 * HEADER_NUMEL
    return size * message + num_data * EACH * shape.vocab_size * shape.hidden


def planned(scale: Scale, way: str, size: int, sequence_s: float) -> float:
    """The planner's step on two machines of two cards that compute as fast as a rank here, with links like these.

    It counts two bytes for what takes four here: so links have half the rate. An update takes next to no time.
    """
    num_pipe, num_data = WAYS[way]
    gpt = scale.shape
    shape = Shape(gpt.num_layers, gpt.hidden, gpt.num_heads, gpt.context, gpt.vocab_size)
    tflops = shape.model_flops(shape.sequence) / sequence_s / 1e12
    inside, between = (mbit * 1e6 / 8 * 2 / EACH for mbit in (scale.inside_mbit, scale.between_mbit))
    card = Gpu("a rank", GB, tflops, 1e12, 3, inside)
    layout = Layout(num_pipe, 1, num_data, size // num_data, checkpointing=False)
    found = estimate(shape, layout, Cluster(Machine(card, Host(8 * GB, 8, 100e9), PER_MACHINE), between))
    return found.seconds.step_s


Limit = tuple[str, float, float]  # what, measured, the least that is wanted


def speedups(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Times data parallelism's throughput."""
    base = {row.batch: row.seconds for row in rows if row.way == "data"}
    return {(row.way, row.batch): base[row.batch] / row.seconds for row in rows}


def limits_of(rows: Sequence[Row]) -> list[Limit]:
    """What is wanted."""
    times, least = speedups(rows), min(row.batch for row in rows)
    found: list[Limit] = [
        (f"{way}, times data, the least", min(times[key] for key in times if key[0] == way), 2.0)
        for way in ("pipeline", "hybrid")
    ]
    return [*found, (f"pipeline, times data, with batches of {least}", times["pipeline", least], 7.0)]


def ring_least(rows: Sequence[Row], scale: Scale) -> float:
    """The least speed-up, had data's gradients gone round a ring: a quarter of them would not have left a machine."""
    spared_s = EACH * count_params(scale.shape) / WORLD * 8e-6 / scale.between_mbit
    base = {row.batch: row.seconds - spared_s for row in rows if row.way == "data"}
    return min(base[row.batch] / row.seconds for row in rows if row.way != "data")


TEXT = """# Pipeline and data parallelism over a slow network, {date}

- {machine}; {versions}
- load averages before: {load}; after: {after:.1f}
- {machines} machines of {per} ranks, as network namespaces: bridges and `tc tbf`, {inside:g} Mbit/s to and from a rank,
  {between:g} to and from a machine, {INSIDE} : {BETWEEN} as in the seed's Figure 5 (queues of {queue:g} s, MTU {mtu},
  no latency added). A gloo rank in each, one thread a rank: {ranks} ranks share the cores.
- A GPT of {numel:.2f} M parameters in fp32 ({shape}), tied; sequences of {tokens} tokens, one a
  micro-batch. Parameters are {ratio:.0f} times what a sequence has between stages (the figure's 1.5 B model:
  {figure:.0f}), the embedding is {share:.1%} of them ({figure_share:.1%}).
- data: ZeRO-1; gradients of micro-batches are summed before they are sent. pipeline: {ranks} stages, 1F1B. hybrid: two
  stages, one a machine, with two replicas each and ZeRO-1. Losses of the three are within {gap:.0e} in every step.
- step: the median of {steps} after {before} others, from the end of one on the slowest rank to that of the next;
  longest: of them. sent: what leaves the machine that sends more in a step, by the counter of its link, beside the
  formula for gradients, weights, activations and their headers.
- With its share of the cores a rank computes a sequence in {sequence:.0f} ms. On the slow link data's bytes take
  {comm:.0f} times as long (the figure's, on a V100 that reaches {v100:g} TFLOPS: {figure_comm:.0f}, round a ring).
- Data's gradients are exchanged directly here. Round a ring a machine would send {spare:.0%} less, and the least
  speed-up would be {ring:.2f}.
- planner: what it predicts for such machines, with rings, and ranks that never have more than their share of a core.
  It leaves out the gradient of what is tied, headers, and what the engine does for a micro-batch beside computing.
"""
HEAD = "| batch | way | step, s | longest | sequences/s | x data | sent, MB | of formula | planner, s | x data | loss |"
V100_TFLOPS = 45.0  # what a V100 reaches in training


def page(rows: Sequence[Row], scale: Scale, sequence_s: float, load: Sequence[float]) -> str:
    """The result as Markdown, one JSON line last."""
    shape, date = scale.shape, datetime.date.today().isoformat()
    gap = max(loss_gap([row for row in rows if row.batch == size]) for size in scale.batches)
    times = speedups(rows)
    text = TEXT.format(
        **{"INSIDE": INSIDE, "BETWEEN": BETWEEN, "machines": NUM_MACHINES, "per": PER_MACHINE, "ranks": WORLD},
        **{"queue": QUEUE_S, "mtu": MTU, "date": date, "load": ", ".join(f"{one:.1f}" for one in load)},
        machine=describe(read_machine()),
        versions=", ".join(f"{name} {version}" for name, version in read_versions().items()),
        after=os.getloadavg()[0],
        **{"inside": scale.inside_mbit, "between": scale.between_mbit, "steps": scale.num_steps - NUM_BEFORE},
        **{"before": NUM_BEFORE, "gap": gap, "sequence": sequence_s * 1e3, "tokens": shape.context},
        numel=count_params(shape) / 1e6,
        shape=f"{shape.num_layers} x {shape.hidden}, vocabulary {shape.vocab_size}",
        **{"ratio": boundary_ratio(shape), "figure": boundary_ratio(FIGURE), "v100": V100_TFLOPS},
        **{"share": embedding_share(shape), "figure_share": embedding_share(FIGURE)},
        comm=formula(scale, "data", 1) * 8e-6 / scale.between_mbit / sequence_s,
        figure_comm=figure_comm(),
        spare=1.0 / (2 * WORLD - 1),
        ring=ring_least(rows, scale),
    )
    lines = ["", HEAD, "|---:|---|" + "---:|" * (HEAD.count("|") - 3)]
    planned_s = {row.batch: row.planned_s for row in rows if row.way == "data"}
    for row in rows:
        cells = [row.batch, row.way, f"{row.seconds:.2f}", f"{row.longest_s:.2f}", f"{row.throughput:.2f}"]
        cells += [f"{times[row.way, row.batch]:.2f}", f"{row.sent_bytes / 1e6:.2f}"]
        cells += [f"{row.sent_bytes / row.formula_bytes:.3f}", f"{row.planned_s:.2f}"]
        cells += [f"{planned_s[row.batch] / row.planned_s:.2f}", f"{row.losses[0]:.2f} to {row.losses[-1]:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| | measured | wanted |", "|---|---:|---:|"]
    for what, found, least in limits_of(rows):
        lines.append(f"| {what} | {found:.2f} | >= {least:g}{'' if found >= least else ', missed'} |")
    facts = {"date": date, "scale": asdict(scale), "inside_mbit": scale.inside_mbit, "sequence_s": sequence_s}
    facts |= {"load": load, "rows": [asdict(row) for row in rows]}
    return text + "\n".join([*lines, "", "```json", json.dumps(facts), "```", ""])


def boundary_ratio(shape: GPTConfig) -> float:
    """Parameters, over what a sequence has between two layers."""
    return count_params(shape) / (shape.context * shape.hidden)


def embedding_share(shape: GPTConfig) -> float:
    """Of all parameters."""
    return shape.vocab_size * shape.hidden / count_params(shape)


def figure_comm() -> float:
    """A step's gradients and weights round a ring of 16 over 4 Gbit/s, over a sequence's forward and backward."""
    ring_s = 2 * 15 / 16 * 2 * count_params(FIGURE) * 8 / (BETWEEN * 1e9)
    return ring_s / (flops_per_token(FIGURE) * FIGURE.context / (V100_TFLOPS * 1e12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--tiny", action="store_true", help="one batch and few steps")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    scale = TINY if given.tiny else FULL
    if given.rank:
        return run_rank(scale, given.rank)
    reason = why_no_switch(WORLD, scale.inside_mbit)
    if reason:
        sys.exit(f"needs network namespaces on a bridge and `tc tbf`, as root or with user namespaces: {reason}")
    load = os.getloadavg()
    rows, sequence_s = measure(scale)
    text = page(rows, scale, sequence_s, load)
    print(text)
    if given.save:
        date = datetime.date.today().isoformat()
        (Path(__file__).parent / "results" / f"{date}-pipeline-network.md").write_text(text, encoding="utf-8")
    missed = [what for what, found, least in limits_of(rows) if found < least]
    if missed and not given.tiny:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
