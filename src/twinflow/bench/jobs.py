# SPDX-License-Identifier: Apache-2.0
"""The jobs of the benchmark. Each job builds contenders (functions that are timed) on its own large buffers. A
contender is a kernel of twinflow, or a rival: an optimizer of torch or DeepSpeed that does the same work. A store has
the buffers of an optimizer state.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from twinflow import native
from twinflow.bench.check import OPTIONS
from twinflow.bench.machine import version_of
from twinflow.rules import ADAGRAD, ADAM, ADAMW, LION, SGD, Rule
from twinflow.rules.formats import BLOCK, rounding_key
from twinflow.rules.segment import Segment, Store, new_states, splits_master

Work = Callable[[], object]
_PATTERN_NUMEL: Final = 1 << 20
FP32_BYTES: Final = 4
MakeOptimizer = Callable[[list[Tensor]], Optimizer]
LR = 1e-3
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
# Bytes per parameter of the largest job: two stores of 14 bytes, two stores of 12, one store of 8 and one of 6, the
# gradient (2), two rivals of 18 each, and the memory pass (12).
PEAK_BYTES: Final = 14 + 14 + 12 + 12 + 8 + 6 + 2 + 18 + 18 + 12


@dataclass(frozen=True)
class Contender:
    """A function to be timed: one of our kernels, or a rival that is compared with a kernel."""

    name: str
    run: Work
    prepare: Work | None = None  # runs before every timed call and is not timed
    bytes_per_param: float | None = None  # only for kernels of twinflow
    rival_of: str | None = None  # name of the kernel that a rival is compared with


def update_bytes(
    rule: Rule, format: str, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None, split: bool | None = None
) -> float:
    """Bytes of memory traffic per parameter in one update, in place or out of place.

    The gradient is read, states and master are read and written, the weight is written (if split, also read).
    """
    store = huge_store(rule, format, BLOCK, weight_dtype, split)  # one block has whole scales
    kept = [tensor.nbytes for tensor in (store.master, *store.states, *store.scales) if tensor is not None]
    weight = store.weight.nbytes if store.weight is not None else 0
    weight_passes = 2 if store.is_split else 1  # the weight of a split master is also read
    return grad_dtype.itemsize + (2 * sum(kept) + weight_passes * weight) / BLOCK


def huge_random(numel: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normally distributed numbers. A pattern is repeated, because drawing a billion numbers would take too long."""
    tensor = native.advise_huge(torch.empty(numel, dtype=dtype))
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(min(numel, _PATTERN_NUMEL), generator=generator).mul_(scale).to(dtype)
    for start in range(0, numel, _PATTERN_NUMEL):
        part = tensor[start : start + _PATTERN_NUMEL]
        part.copy_(pattern[: part.numel()])
    return tensor


def huge_store(
    rule: Rule, format: str, numel: int, weight_dtype: torch.dtype | None, split: bool | None = None
) -> Store:
    """A store for random values as from `rules.segment.new_store`, but on huge pages and without fp32 temporaries."""
    values = huge_random(numel, weight_dtype or torch.float32, scale=0.02)
    store = Store(format, values, None, *new_states(rule, format, numel, native.huge_zeros))
    if weight_dtype is None:
        return store
    # Any pair of halves is a valid master. With a lower half of zero, the master equals the weight.
    is_split = splits_master(format, weight_dtype) if split is None else split
    master = native.huge_zeros(numel, dtype=torch.int16) if is_split else huge_random(numel, scale=0.02)
    return replace(store, weight=values, master=master)


def huge_like(store: Store) -> Store:
    """A target for updates out of place. Its pages are allocated already."""
    target = store.empty_like()
    for tensor in (target.master, target.weight, *target.states, *target.scales):
        if tensor is not None:
            native.advise_huge(tensor).zero_()
    return target


def fill_half_tiny(tensor: Tensor, normal: float, tiny: float) -> None:
    """Fill with alternating blocks of 128 numbers: `tiny` (a subnormal number), then `normal`. The rest is normal."""
    whole = tensor.numel() // (2 * BLOCK) * (2 * BLOCK)
    pairs = tensor[:whole].view(-1, 2, BLOCK)
    pairs[:, 0] = tiny
    pairs[:, 1] = normal
    tensor[whole:] = normal


def torch_optimizer(name: str, **options: Any) -> MakeOptimizer:
    """A function that builds `torch.optim.NAME(params, lr, **options)`."""
    return lambda params: getattr(torch.optim, name)(params, lr=LR, **options)


class TorchJob:
    """A torch optimizer that updates an fp32 parameter in place.

    `grad_in`: a bf16 gradient that each step casts to fp32 first. `scale`: each step first multiplies the fp32 gradient
    by this number, as DeepSpeed does on the host. With one of them, each step also casts the parameter to a bf16
    weight.
    """

    def __init__(
        self, numel: int, make: MakeOptimizer, grad_in: Tensor | None = None, scale: float | None = None
    ) -> None:
        self.param = huge_random(numel, scale=0.02)
        self.grad = self.param.grad = huge_random(numel, seed=1)
        self.grad_in = grad_in
        self.scale = scale
        is_plain = grad_in is None and scale is None
        self.weight = None if is_plain else native.huge_zeros(numel, dtype=torch.bfloat16)
        self.optimizer = make([self.param])
        self.optimizer.step()  # creates the states

    def step(self) -> None:
        if self.grad_in is not None:
            self.grad.copy_(self.grad_in)
        if self.scale is not None:
            self.grad.mul_(self.scale)
        self.optimizer.step()
        if self.weight is not None:
            self.weight.copy_(self.param)

    def other(self, make: MakeOptimizer) -> Work:
        """The step of another optimizer that shares parameter and states with this one, to save memory."""
        optimizer = make([self.param])
        optimizer.state[self.param] = self.optimizer.state[self.param]
        return optimizer.step

    def states(self, *names: str) -> list[Tensor]:
        """The optimizer's state tensors of these names."""
        return [self.optimizer.state[self.param][name] for name in names]


class Lion(Optimizer):
    """Lion in torch operations, because torch.optim has no Lion."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                direction = state["exp_avg"].lerp(p.grad, 1.0 - b1).sign_()
                p.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1.0 - b2)


@dataclass(frozen=True)
class DeepSpeed:
    """`make` builds a DeepSpeedCPUAdam of the version `about`, or is None, and `about` is the reason."""

    make: MakeOptimizer | None
    about: str


def load_deepspeed(threads: int) -> DeepSpeed:
    """Import DeepSpeed and build its operator if necessary. Never raises.

    DeepSpeed's OpenMP runtime may differ from torch's. It reads its number of threads from the environment once.
    """
    version = version_of("deepspeed")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        adam([torch.zeros(8)], lr=LR, adamw_mode=True)  # builds and loads the operator
    except ModuleNotFoundError as error:
        missing = "not installed" if version is None else f"{version}, needs {error.name}"
        return DeepSpeed(None, missing)
    except Exception as error:  # The benchmark continues after any error of the compiler or of DeepSpeed.
        return DeepSpeed(None, f"{version}, does not load: {error}")
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return DeepSpeed(lambda params: adam(params, lr=LR, adamw_mode=True), str(version))


Build = Callable[[int, DeepSpeed], list[Contender]]  # from the number of parameters to the contenders


def update_work(rule: Rule, grad: Tensor, store: Store, target: Store | None = None, factor: float = 1.0) -> Work:
    """A call of our update kernel on one segment."""
    key = rounding_key(STEP, parameter=1)
    segment = Segment(rule, rule.hyper(OPTIONS, STEP), grad, store, factor=factor, key=key, target=target)
    return partial(native.update, [segment])


def kernel(
    name: str, rule: Rule, format: str, run: Work, prepare: Work | None = None, split: bool | None = None
) -> Contender:
    """A contender with the traffic of our update from a bf16 gradient to a bf16 weight."""
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
    rival = TorchJob(numel, torch_optimizer("AdamW", fused=True), grad)
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
        step = TorchJob(numel, deepspeed.make, scale=0.999).step
        scaled = update_work(ADAMW, grad, stores["fp32"], factor=FACTOR)
        contenders[2:2] = [
            kernel(ADAMW_SCALED, ADAMW, "fp32", scaled),
            Contender(DEEPSPEED, step, rival_of=ADAMW_SCALED),
        ]
    return contenders


def subnormal_job(numel: int, deepspeed: DeepSpeed) -> list[Contender]:
    """AdamW with half of the gradients, m and v subnormal. A step sets subnormal numbers to zero, so the tensors are
    filled again before each call.
    """
    store = huge_store(ADAMW, "fp32", numel, torch.bfloat16)
    normal_grad, grad = huge_random(numel, torch.bfloat16), huge_random(numel, torch.bfloat16)
    fill_half_tiny(grad, normal=1e-2, tiny=1e-39)
    rival = TorchJob(numel, torch_optimizer("AdamW", fused=True), grad)
    ours = [state for state in store.states if state is not None]

    def refill(states: Sequence[Tensor], tiny: float) -> Work:
        def work() -> None:
            for state in states:
                fill_half_tiny(state, normal=1e-4, tiny=tiny)

        return work

    return [
        kernel(ADAMW_NORMAL, ADAMW, "fp32", update_work(ADAMW, normal_grad, store), refill(ours, tiny=1e-5)),
        kernel(ADAMW_SUBNORMAL, ADAMW, "fp32", update_work(ADAMW, grad, store), refill(ours, tiny=1e-39)),
        Contender(
            TORCH_MIXED_SUBNORMAL,
            rival.step,
            refill(rival.states("exp_avg", "exp_avg_sq"), tiny=1e-39),
            rival_of=ADAMW_SUBNORMAL,
        ),
    ]


def fp32_job(numel: int, deepspeed: DeepSpeed) -> list[Contender]:
    """Adam against torch's three implementations, AdamW against the fused one, on fp32 parameters in place."""
    grad, store = huge_random(numel), huge_store(ADAMW, "fp32", numel, None)
    num_bytes = update_bytes(ADAMW, "fp32", torch.float32, None)
    rival = TorchJob(numel, torch_optimizer("AdamW", fused=True))
    adams = {
        "loop": torch_optimizer("Adam", foreach=False),
        "foreach": torch_optimizer("Adam", foreach=True),
        "fused": torch_optimizer("Adam", fused=True),
    }
    return [
        Contender(ADAMW_FP32, update_work(ADAMW, grad, store, factor=1.0), bytes_per_param=num_bytes),
        Contender(TORCH_FP32, rival.step, rival_of=ADAMW_FP32),
        Contender(ADAM_FP32, update_work(ADAM, grad, store, factor=1.0), bytes_per_param=num_bytes),
        *(Contender(TORCH_ADAM[kind], rival.other(make), rival_of=ADAM_FP32) for kind, make in adams.items()),
    ]


def rule_job(rule: Rule, title: str, rival_name: str, make: MakeOptimizer) -> Build:
    """A job for `rule` with fp32 state, from bf16 gradients to bf16 weights."""

    def build(numel: int, deepspeed: DeepSpeed) -> list[Contender]:
        grad = huge_random(numel, torch.bfloat16)
        store = huge_store(rule, "fp32", numel, torch.bfloat16)
        name = f"{title} bf16 in/out, fp32 state"
        rival = Contender(f"torch: cast, {rival_name}, cast", TorchJob(numel, make, grad).step, rival_of=name)
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
    return [
        Contender(name, partial(native.accumulate, into, values), bytes_per_param=2.0 * 4 + 2),
        Contender("torch: Tensor.add_", partial(other.add_, values), rival_of=name),
    ]


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
