"""The jobs of the benchmark. Each job builds contenders on its own buffers: our kernels, and rivals
for the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from twinflow import native
from twinflow.bench.buffers import fill_half_tiny, huge_like, huge_random, huge_store, update_bytes
from twinflow.bench.check import OPTIONS
from twinflow.bench.rivals import DeepSpeed, DeepSpeedJob, Fp32Job, Lion, MakeOptimizer, MixedJob, torch_optimizer
from twinflow.bench.timing import Contender, Work
from twinflow.rules import ADAGRAD, ADAM, ADAMW, LION, SGD, Rule
from twinflow.rules.formats import rounding_key
from twinflow.rules.segment import Segment, Store

ADAMW_FP32_STATE: Final = "AdamW bf16 in/out, fp32 state"
ADAMW_SCALED: Final = "AdamW bf16 in/out, fp32 state, gradient scaled"
ADAMW_SPLIT: Final = "AdamW bf16 in/out, fp32 state, split master"
ADAMW_SPLIT_OUT_OF_PLACE: Final = "AdamW bf16 in/out, fp32 state, split master, out of place"
ADAMW_OUT_OF_PLACE: Final = "AdamW bf16 in/out, fp32 state, out of place"
ADAMW_BF16_STATE: Final = "AdamW bf16 in/out, bf16 state"
ADAMW_INT8_STATE: Final = "AdamW bf16 in/out, int8 state"
ADAMW_NORMAL: Final = "AdamW bf16 in/out, refilled, all normal"
ADAMW_SUBNORMAL: Final = "AdamW bf16 in/out, refilled, half subnormal"
ADAMW_FP32: Final = "AdamW fp32"
ADAM_FP32: Final = "Adam fp32"
TORCH_MIXED: Final = "torch: cast, AdamW(fused=True), cast"
TORCH_MIXED_SUBNORMAL: Final = "torch: cast, AdamW(fused=True), cast, half subnormal"
TORCH_FP32: Final = "torch.optim.AdamW(fused=True)"
TORCH_ADAM: Final = {
    "loop": "torch.optim.Adam(foreach=False)",
    "foreach": "torch.optim.Adam(foreach=True)",
    "fused": "torch.optim.Adam(fused=True)",
}
DEEPSPEED: Final = "DeepSpeedCPUAdam: scale, step, cast"
FACTOR: Final = 0.5  # a clip factor other than 1, for jobs in which a rival scales the gradient too
STEP: Final = 10
# Bytes per parameter of the largest job: stores of 14 and 12 (both twice), 8 and 6, the gradient, two rivals of 18, and
# the memory pass.
PEAK_BYTES: Final = 14 + 14 + 12 + 12 + 8 + 6 + 2 + 18 + 18 + 12


Build = Callable[[int, DeepSpeed], list[Contender]]  # from the number of parameters to the contenders


def update_work(rule: Rule, grad: Tensor, store: Store, target: Store | None = None, factor: float = 1.0) -> Work:
    """A call of our update kernel on one segment."""
    key = rounding_key(STEP, parameter=1)
    segment = Segment(rule, rule.hyper(OPTIONS, STEP), grad, store, factor=factor, key=key, target=target)
    return partial(native.update, [segment])


def kernel(
    name: str, rule: Rule, format: str, run: Work, prepare: Work | None = None, split: bool | None = None
) -> Contender:
    """Our update of a bf16 gradient and a bf16 weight."""
    return Contender(name, run, prepare, update_bytes(rule, format, torch.bfloat16, torch.bfloat16, split))


def adamw_job(numel: int, deepspeed: DeepSpeed) -> list[Contender]:
    """AdamW as in offloaded training, from bf16 gradients to bf16 weights, in every state format."""
    grad = huge_random(numel, torch.bfloat16)
    stores = {format: huge_store(ADAMW, format, numel, torch.bfloat16) for format in ADAMW.formats}
    in_place = {format: update_work(ADAMW, grad, store) for format, store in stores.items()}
    in_place["fp32"]()  # An update out of place does not change its store. This step makes its states nonzero.
    out_of_place = update_work(ADAMW, grad, stores["fp32"], huge_like(stores["fp32"]))
    split_store = huge_store(ADAMW, "fp32", numel, torch.bfloat16, split=True)
    split_in_place = update_work(ADAMW, grad, split_store)
    split_in_place()
    split_out_of_place = update_work(ADAMW, grad, split_store, huge_like(split_store))
    rival = MixedJob(grad, torch_optimizer("AdamW", fused=True))
    contenders = [
        kernel(ADAMW_FP32_STATE, ADAMW, "fp32", in_place["fp32"]),
        Contender(TORCH_MIXED, rival.step, rival_of=ADAMW_FP32_STATE),
        kernel(ADAMW_OUT_OF_PLACE, ADAMW, "fp32", out_of_place),
        kernel(ADAMW_SPLIT, ADAMW, "fp32", split_in_place, split=True),
        kernel(ADAMW_SPLIT_OUT_OF_PLACE, ADAMW, "fp32", split_out_of_place, split=True),
        kernel(ADAMW_BF16_STATE, ADAMW, "bf16", in_place["bf16"]),
        kernel(ADAMW_INT8_STATE, ADAMW, "int8", in_place["int8"]),
    ]
    if deepspeed.make is not None:
        step = DeepSpeedJob(numel, deepspeed.make).step
        scaled = update_work(ADAMW, grad, stores["fp32"], factor=FACTOR)
        contenders[2:2] = [
            kernel(ADAMW_SCALED, ADAMW, "fp32", scaled),
            Contender(DEEPSPEED, step, rival_of=ADAMW_SCALED),
        ]
    return contenders


def subnormal_job(numel: int, deepspeed: DeepSpeed) -> list[Contender]:
    """AdamW with subnormal numbers in half of the gradients, m and v. One step flushes them, so they are filled before
    each call.
    """
    store = huge_store(ADAMW, "fp32", numel, torch.bfloat16)
    normal_grad, grad = huge_random(numel, torch.bfloat16), huge_random(numel, torch.bfloat16)
    fill_half_tiny(grad, normal=1e-2, tiny=1e-39)
    rival = MixedJob(grad, torch_optimizer("AdamW", fused=True))
    ours = [state for state in store.states if state is not None]

    def refill(states: Sequence[Tensor], tiny: float) -> Work:
        def work() -> None:
            for state in states:
                fill_half_tiny(state, normal=1e-4, tiny=tiny)

        return work

    contenders = [
        kernel(ADAMW_NORMAL, ADAMW, "fp32", update_work(ADAMW, normal_grad, store), refill(ours, tiny=1e-5)),
        kernel(ADAMW_SUBNORMAL, ADAMW, "fp32", update_work(ADAMW, grad, store), refill(ours, tiny=1e-39)),
        Contender(
            TORCH_MIXED_SUBNORMAL,
            rival.step,
            refill(rival.states("exp_avg", "exp_avg_sq"), tiny=1e-39),
            rival_of=ADAMW_SUBNORMAL,
        ),
    ]
    return contenders


def fp32_job(numel: int, deepspeed: DeepSpeed) -> list[Contender]:
    """Adam and AdamW on fp32 parameters in place, against torch's three implementations."""
    grad, store = huge_random(numel), huge_store(ADAMW, "fp32", numel, None)
    num_bytes = update_bytes(ADAMW, "fp32", torch.float32, None)
    rival = Fp32Job(numel, torch_optimizer("AdamW", fused=True))
    adams = {
        "loop": torch_optimizer("Adam", foreach=False),
        "foreach": torch_optimizer("Adam", foreach=True),
        "fused": torch_optimizer("Adam", fused=True),
    }
    contenders = [
        Contender(ADAMW_FP32, update_work(ADAMW, grad, store, factor=1.0), bytes_per_param=num_bytes),
        Contender(TORCH_FP32, rival.step, rival_of=ADAMW_FP32),
        Contender(ADAM_FP32, update_work(ADAM, grad, store, factor=1.0), bytes_per_param=num_bytes),
        *(Contender(TORCH_ADAM[kind], rival.other(make), rival_of=ADAM_FP32) for kind, make in adams.items()),
    ]
    return contenders


def rule_job(rule: Rule, title: str, rival_name: str, make: MakeOptimizer) -> Build:
    """A job for another rule with fp32 state, from bf16 gradients to bf16 weights."""

    def build(numel: int, deepspeed: DeepSpeed) -> list[Contender]:
        grad = huge_random(numel, torch.bfloat16)
        store = huge_store(rule, "fp32", numel, torch.bfloat16)
        name = f"{title} bf16 in/out, fp32 state"
        rival = Contender(f"torch: cast, {rival_name}, cast", MixedJob(grad, make).step, rival_of=name)
        return [kernel(name, rule, "fp32", update_work(rule, grad, store)), rival]

    return build


def sum_squares_job(numel: int, deepspeed: DeepSpeed) -> list[Contender]:
    """The sum of squares for the gradient norm, against torch's vector_norm."""
    contenders: list[Contender] = []
    for dtype, title in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        values, name = huge_random(numel, dtype), f"sum of squares, {title}"
        contenders += [
            Contender(name, partial(native.sum_squares, [values]), bytes_per_param=float(dtype.itemsize)),
            Contender(
                f"torch.linalg.vector_norm, {title} in, fp32 sum",
                partial(torch.linalg.vector_norm, values, dtype=torch.float32),
                rival_of=name,
            ),
        ]
    return contenders


def accumulate_job(numel: int, deepspeed: DeepSpeed) -> list[Contender]:
    """Gradient accumulation of bf16 gradients into an fp32 buffer."""
    into, other, values = huge_random(numel), huge_random(numel), huge_random(numel, torch.bfloat16, scale=1e-3)
    name = "accumulate fp32 += bf16"
    contenders = [
        Contender(name, partial(native.accumulate, into, values), bytes_per_param=2.0 * 4 + 2),
        Contender("torch: Tensor.add_", partial(other.add_, values), rival_of=name),
    ]
    return contenders


JOBS: Final[dict[str, Build]] = {
    "AdamW, bf16 in and out": adamw_job,
    "AdamW, half subnormal": subnormal_job,
    "Adam and AdamW, fp32": fp32_job,
    "Adam": rule_job(ADAM, "Adam", "Adam(fused=True)", torch_optimizer("Adam", fused=True)),
    "Adagrad": rule_job(ADAGRAD, "Adagrad", "Adagrad(fused=True)", torch_optimizer("Adagrad", fused=True)),
    "Lion": rule_job(LION, "Lion", "Lion in torch operations", Lion),
    "SGD": rule_job(SGD, "SGD", "SGD(fused=True)", torch_optimizer("SGD", momentum=0.9, fused=True)),
    "sum of squares": sum_squares_job,
    "accumulate": accumulate_job,
}
