# SPDX-License-Identifier: Apache-2.0
"""Base classes of the optimizers with compressed communication: groups of ranks, the step, the switch, and saving.

A bucket is a set of flat buffers for some parameters of one param group. `FreezingOptimizer` explains the switch.

Every rank has the whole model and its own batches. `step` communicates, and all ranks must call it equally often.
Gradients must not be summed before (no DistributedDataParallel around the model).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from twinflow.codes import code_named
from twinflow.codes.reference import exponents_of
from twinflow.dist.compressed import Coding, Errors, compressed_all_reduce, own_part
from twinflow.dist.group import Group, alone, backend_for, new_group
from twinflow.errors import invalid_value, wrong_state
from twinflow.optim.closure import loss_of
from twinflow.optim.onebit.bucket import FlatBucket, make_buckets
from twinflow.rules import ADAMW
from twinflow.rules.rule import Hyper, check_betas, number, numbers
from twinflow.rules.rules import adamw_hyper
from twinflow.rules.segment import FLOATS
from twinflow.state_dict import StateDict, check_group_sizes, dict_of, int_of, saved_groups, tensor_of, value_of
from twinflow.zero.compression import THRESHOLD, Compression, VarianceWatch, default_window

LOGGER = logging.getLogger("twinflow")
BUCKET_NUMEL = 1 << 24
Loss = TypeVar("Loss")
_STATES = ("exp_avg", "exp_avg_sq", "worker_error", "server_error", "exponents", "master")


class Shared(TypedDict, total=False):
    """Options of all optimizers with compressed communication."""

    code: str  # code of compressed values: a name of twinflow.codes
    max_grad_norm: float | None  # norm to which gradients are clipped; None: no clipping
    bias_correction: bool  # divide the moments by 1 - beta**step, because they start at zero
    has_feedback: bool  # error feedback; False drops the errors, for experiments
    wire_dtype: torch.dtype | None  # dtype of uncompressed communication; None: that of the gradients
    bucket_numel: int  # largest number of elements of one exchange, unless one parameter is larger
    group: Group | None  # the ranks; None: all ranks


class Freezing(Shared, total=False):
    """Options of the optimizers that freeze the second moment once. `OneBitAdam` describes them."""

    freeze_step: int | None
    freeze_threshold: float
    freeze_window: int | None


class CompressedOptimizer(Optimizer):
    """Runs a step on all ranks. Subclasses implement `_update`, which communicates and changes the weights."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        code: str = "1bit",
        max_grad_norm: float | None = None,
        bias_correction: bool = True,
        has_feedback: bool = True,
        wire_dtype: torch.dtype | None = None,
        bucket_numel: int = BUCKET_NUMEL,
        group: Group | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults["bias_correction"] = bias_correction
        ADAMW.check(defaults)
        if max_grad_norm is not None and not 0.0 < max_grad_norm < math.inf:
            raise invalid_value("max_grad_norm", max_grad_norm, "a number above 0, or None")
        if wire_dtype is not None and wire_dtype not in FLOATS:
            raise invalid_value("wire_dtype", wire_dtype, (None, *FLOATS))
        if bucket_numel < 1:
            raise invalid_value("bucket_numel", bucket_numel, "a whole number >= 1")
        self.max_grad_norm = max_grad_norm
        self.code = code_named(code)
        self.has_feedback = has_feedback
        self.wire_dtype = wire_dtype
        self.num_steps = self.num_skipped = 0
        self.grad_norm: float | None = None  # gradient norm of the last step before clipping
        self._loss_scale = 1.0
        self._buckets: list[FlatBucket] = []
        self._is_built = False
        super().__init__(params, defaults)
        device = next(param.device for given in self.param_groups for param in given["params"])
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.group = group or (alone() if is_alone else new_group(backend_for(device)))
        self._agree = self.group if self.group.is_on_host else new_group("gloo", self.group.ranks)
        with torch.no_grad():
            for given in self.param_groups:
                for param in given["params"]:
                    self.group.broadcast(param)
        for i, given in enumerate(self.param_groups):
            self._buckets += make_buckets(given["params"], i, self.group.world, bucket_numel)
        self._is_built = True

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Raises ValueError after construction, because buffers are planned once.

        Pass all groups to the constructor.
        """
        if getattr(self, "_is_built", False):
            raise ValueError(
                "add_param_group() cannot add parameters, because this optimizer takes all its parameters at the "
                "start. Build a new optimizer with all groups."
            )
        super().add_param_group(param_group)
        for i, param in enumerate(self.param_groups[-1]["params"]):
            if param.dtype not in FLOATS:
                name = f"The dtype of param_groups[{len(self.param_groups) - 1}]['params'][{i}]"
                raise invalid_value(name, param.dtype, FLOATS, "Convert the model before building the optimizer.")

    # The step.

    def set_loss_scale(self, scale: float) -> None:
        """Sets the number by which the losses of the next step are multiplied. `step` divides the gradients by it."""
        self._loss_scale = scale

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Makes one update on all ranks, or on none if a gradient of one or more ranks is not finite."""
        loss = loss_of(closure)
        for given in self.param_groups:
            ADAMW.check(given)
        hits = [bucket.gather() for bucket in self._buckets]
        squares = sum(bucket.sum_squares() for bucket in self._buckets)
        row = torch.tensor([squares, *(hit for own in hits for hit in own)], dtype=torch.float64)
        rows = self._agree.gather_rows(row)
        if not bool(rows[:, 0].isfinite().all()):
            self.num_skipped += 1
            self.grad_norm = math.nan
            return loss
        present = iter(rows[:, 1:].any(dim=0).tolist())
        self.num_steps += 1
        self._update([[next(present) for _ in own] for own in hits], rows[:, 0].sqrt().tolist())
        return loss

    def _update(self, present: list[list[bool]], norms: Sequence[float]) -> None:
        """Updates the parameters with a gradient on one or more ranks (`present`). `norms`: of ranks' gradients."""
        raise NotImplementedError

    # Parts of a step.

    def _mean_gradients(self) -> float:
        """Replaces gradients by the mean over ranks, uncompressed. Returns the factor of `_clip`."""
        for bucket in self._buckets:
            bucket.grads.mul_(1.0 / self.group.world)  # before the sum, which may be too large for fp16
            self.group.all_reduce(bucket.grads, bucket.grads, self.wire_dtype or bucket.grads.dtype)
        self.grad_norm = math.sqrt(sum(bucket.sum_squares() for bucket in self._buckets)) / self._loss_scale
        return self._clip()

    def _bounded_norm(self, norms: Sequence[float]) -> float:
        """Sets the gradient norm to the mean of the ranks' norms. Returns the factor of `_clip`.

        The mean gradient is not known with compressed communication. Its norm is at most the mean of the norms.
        """
        self.grad_norm = sum(norms) / len(norms) / self._loss_scale
        return self._clip()

    def _clip(self) -> float:
        """The factor that undoes the loss scale and clips the gradients."""
        assert self.grad_norm is not None
        if self.max_grad_norm is None or self.grad_norm <= self.max_grad_norm:
            return 1.0 / self._loss_scale
        return self.max_grad_norm / (self.grad_norm + 1e-6) / self._loss_scale

    def _adam_step(self, bucket: FlatBucket, hits: Sequence[bool], factor: float, is_frozen: bool) -> None:
        """An AdamW step from mean gradients, or with a frozen second moment from an exchange of momenta."""
        if is_frozen:
            self._exchange_momenta(bucket, factor)
        bucket.update(self._hypers(bucket, hits, is_frozen), 1.0 if is_frozen else factor)

    def _hypers(self, bucket: FlatBucket, hits: Sequence[bool], is_frozen: bool) -> list[Hyper | None]:
        """The hyperparameters of each parameter that has a gradient, otherwise None. Counts the steps of parameters."""
        found: list[Hyper | None] = []
        for i, hit in enumerate(hits):
            bucket.steps[i] += hit
            bucket.second_steps[i] += hit and not is_frozen
            options = {**self._options(bucket), "second_step": max(1, bucket.second_steps[i]), "is_frozen": is_frozen}
            hyper = adamw_hyper(options, bucket.steps[i]) if hit else None
            # With a frozen second moment exp_avg is the new momentum already, so the factor of the gradient is 0.
            found.append((0.0, *hyper[1:]) if hyper and is_frozen else hyper)
        return found

    def _exchange_momenta(self, bucket: FlatBucket, factor: float) -> None:
        """Sets the momentum to the mean of the ranks' momenta, each updated with the rank's own gradient."""
        b1 = numbers(self._options(bucket), "betas")[0]
        self._exchange(bucket, bucket.grads, (1.0 - b1) * factor, bucket.exp_avg, b1)

    def _exchange(
        self,
        bucket: FlatBucket,
        given: Tensor,
        factor: float = 1.0,
        base: Tensor | None = None,
        base_factor: float = 0.0,
    ) -> None:
        """Sets the momentum to the mean of factor * given + base_factor * base over all ranks, compressed."""
        if bucket.errors is None:
            bucket.errors = Errors.zeros(bucket.weights.numel(), self.group.world, bucket.weights.device)
        coding = Coding(self.code, bucket.exponents, factor, self.has_feedback)
        compressed_all_reduce(self.group, bucket.exp_avg, given, coding, bucket.errors, base, base_factor)

    def _options(self, bucket: FlatBucket) -> dict[str, object]:
        return self.param_groups[bucket.group]

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks have the same weights now."""
        return True

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent, computed from the sizes of messages, without overhead of the backend."""
        groups = {id(one): one for one in (self.group, self._agree)}
        return sum(one.sent_bytes for one in groups.values())

    # Saving.

    def _head(self) -> dict[str, object]:
        """Plain values that a subclass saves beside tensors."""
        raise NotImplementedError

    def _from_head(self, head: Mapping[str, object]) -> dict[str, object]:
        """The attributes of this object that follow from what `_head` has saved, by name. Changes nothing."""
        raise NotImplementedError

    def check_head(self, head: Mapping[str, object]) -> None:
        """Raises an exception if `load_state_dict` cannot load the entry "compression" of a state."""
        if head.get("kind") != type(self).__name__:
            remedy = "Load the state into an optimizer of the class that saved it."
            raise invalid_value("state_dict: kind", head.get("kind"), [type(self).__name__], remedy)
        for name in ("num_steps", "num_skipped"):
            int_of(head, name)
        self._from_head(head)

    def state_dict(self) -> dict[str, object]:
        """This rank's state with its compression errors. Only the same rank of the same number of ranks can load it."""
        return self._dict(is_portable=False)

    def portable_state_dict(self, is_view: bool = False) -> dict[str, object]:
        """The state for any number of ranks. All ranks must call it.

        It contains the mean of the ranks' errors as workers, and the errors of all ranks as owners of parts (servers).
        With `is_view` it has no errors of workers (see `worker_errors`), and tensors that the next step changes.
        """
        return self._dict(is_portable=True, is_view=is_view)

    def _dict(self, is_portable: bool, is_view: bool = False) -> dict[str, object]:
        numbers = {param: i for i, param in enumerate(self._params())}
        state: dict[int, dict[str, object]] = {}
        for bucket in self._buckets:
            flats = {"exp_avg": bucket.exp_avg, "exp_avg_sq": bucket.exp_avg_sq, **bucket.extra}
            if bucket.errors is not None:
                server = torch.zeros_like(bucket.weights)
                assert bucket.errors.server is not None
                own_part(self.group, server).copy_(bucket.errors.server)
                if is_portable:
                    self.group.all_reduce(server, server, torch.float32)  # a part is zero on all ranks but its owner
                flats["server_error"] = server
                if not is_view:
                    worker = bucket.errors.worker.clone()
                    if is_portable:
                        self.group.all_reduce(worker, worker, torch.float32)
                        worker /= self.group.world
                    flats["worker_error"] = worker
            if bucket.exponents is not None:
                flats["exponents"] = bucket.exponents
            if is_view or bucket.params[0].dtype != torch.float32:
                flats["master"] = bucket.weights
            views = {name: bucket.views(flat) for name, flat in flats.items()}
            for i, param in enumerate(bucket.params):
                counts = {"step": bucket.steps[i], "frozen_at": bucket.second_steps[i]}
                own = {name: found[i] if is_view else found[i].clone() for name, found in views.items()}
                state[numbers[param]] = {**counts, **own}
        world, rank = (None, None) if is_portable else (self.group.world, self.group.rank)
        counters = {"num_steps": self.num_steps, "num_skipped": self.num_skipped, "world": world, "rank": rank}
        head = {"kind": type(self).__name__, **counters, **self._head()}
        groups = super().state_dict()["param_groups"]
        return {"state": dict(sorted(state.items())), "param_groups": groups, "compression": head}

    def _params(self) -> list[nn.Parameter]:
        return [param for given in self.param_groups for param in given["params"]]

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Loads a state of `state_dict` or `portable_state_dict`. The state is checked before the optimizer changes."""
        head, state = self._checked(state_dict)
        found = self._from_head(head)
        entries = {param: state[i] for i, param in enumerate(self._params())}
        for bucket in self._buckets:
            self._load_bucket(bucket, [entries[param] for param in bucket.params])
        for given, saved in zip(self.param_groups, saved_groups(state_dict), strict=True):
            given.update({key: value for key, value in saved.items() if key != "params"})
        self.num_steps, self.num_skipped = int_of(head, "num_steps"), int_of(head, "num_skipped")
        vars(self).update(found)

    @property
    def has_errors(self) -> bool:
        """Whether ranks have exchanged compressed values, so that there are compression errors."""
        return any(bucket.errors is not None for bucket in self._buckets)

    def worker_errors(self) -> dict[nn.Parameter, Tensor]:
        """This rank's errors as a worker, in the shapes of the parameters. Writes change the optimizer."""
        found: dict[nn.Parameter, Tensor] = {}
        for bucket in self._buckets:
            if bucket.errors is not None:
                found |= zip(bucket.params, bucket.views(bucket.errors.worker), strict=True)
        return found

    def _checked(self, state_dict: Mapping[str, object]) -> tuple[StateDict, dict[int, StateDict]]:
        head = dict_of(state_dict, "compression")
        state: dict[int, StateDict] = value_of(state_dict, "state", dict) if "state" in state_dict else {}
        self.check_head(head)
        saved = (head["world"], head["rank"])
        if saved not in ((None, None), (self.group.world, self.group.rank)):
            raise ValueError(
                f"state_dict was saved by rank {head['rank']} of {head['world']}, but this is rank {self.group.rank} "
                f"of {self.group.world}. The state contains compression errors, which only the rank that saved them "
                "can load. To load on other ranks, save with portable_state_dict()."
            )
        check_group_sizes(state_dict, self.param_groups)
        for i, param in enumerate(self._params()):
            for name, value in state.get(i, {}).items():
                if isinstance(value, Tensor) and value.shape != param.shape:
                    raise invalid_value(
                        f"state_dict: the shape of state[{i}][{name!r}]",
                        tuple(value.shape),
                        [tuple(param.shape)],
                        "Load the state into an optimizer over the parameters with which it was saved.",
                    )
            if "exp_avg" not in state.get(i, {}):
                keys = sorted(state.get(i, {}))
                raise ValueError(
                    f"state_dict: state[{i}] has the keys {keys}, but must also have 'exp_avg'. "
                    "Pass a dict that state_dict() has returned."
                )
        return head, state

    def _load_bucket(self, bucket: FlatBucket, entries: Sequence[Mapping[str, object]]) -> None:
        def flat_of(name: str, dtype: torch.dtype = torch.float32) -> Tensor | None:
            """A saved state of all parameters as a flat tensor; None if the saved parameters lack it."""
            if not all(name in entry for entry in entries):
                return None
            flat = torch.zeros_like(bucket.weights, dtype=dtype)
            for view, entry in zip(bucket.views(flat), entries, strict=True):
                view.copy_(tensor_of(entry, name))
            return flat

        bucket.steps = [int_of(entry, "step") for entry in entries]
        bucket.second_steps = [int_of(entry, "frozen_at" if "frozen_at" in entry else "step") for entry in entries]
        for own, name in ((bucket.exp_avg, "exp_avg"), (bucket.exp_avg_sq, "exp_avg_sq")):
            if (saved := flat_of(name)) is not None:
                own.copy_(saved)
        bucket.exponents = flat_of("exponents", torch.uint8)
        worker, server = flat_of("worker_error"), flat_of("server_error")
        bucket.errors = None
        if server is not None:
            worker = torch.zeros_like(bucket.weights) if worker is None else worker
            bucket.errors = Errors(worker, own_part(self.group, server).clone())
        names = [name for name in entries[0] if name not in _STATES and isinstance(entries[0][name], Tensor)]
        bucket.extra = {name: saved for name in names if (saved := flat_of(name)) is not None}
        for view, entry, param in zip(bucket.views(bucket.weights), entries, bucket.params, strict=True):
            if param.dtype == torch.float32:
                continue  # the parameter is a view of the weights, and the model's state dict restores it
            master = tensor_of(entry, "master") if entry.get("master") is not None else None
            is_same = master is not None and bool((master.to(param.device, param.dtype) == param).all())
            view.copy_(master if master is not None and is_same else param)


class FreezingOptimizer(CompressedOptimizer):
    """Freezes the second moment after one step (the switch) and compresses communication from the next step on.

    Subclasses implement `_update_bucket`, which makes a step of one bucket before and after the switch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | None = None,
        freeze_threshold: float = THRESHOLD,
        freeze_window: int | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        check_betas(betas)
        Compression("1bit", freeze_step, freeze_threshold, freeze_window)  # checks the options
        self._watch = VarianceWatch(freeze_window or default_window(betas[1]), freeze_threshold)
        self.freeze_step = freeze_step
        self.frozen_step: int | None = None  # the last uncompressed step; None before the switch
        super().__init__(params, lr, betas, eps, weight_decay, **shared)

    @property
    def is_compressed(self) -> bool:
        """Whether the switch has been made."""
        return self.frozen_step is not None

    def _update(self, present: list[list[bool]], norms: Sequence[float]) -> None:
        is_frozen = self.is_compressed
        factor = self._bounded_norm(norms) if is_frozen else self._mean_gradients()
        for bucket, hits in zip(self._buckets, present, strict=True):
            if is_frozen:
                self._warn_of_late(bucket, hits)
            self._update_bucket(bucket, hits, factor)
        if is_frozen:
            return
        if self.freeze_step is not None:
            is_settled = self.num_steps >= self.freeze_step
        else:
            # All ranks use the sum of rank 0.
            totals = self._agree.gather_rows(torch.tensor([self._total()], dtype=torch.float64))
            is_settled = self._watch.see(float(totals[0, 0]), max(float(given["lr"]) for given in self.param_groups))
        if is_settled:
            self.freeze()

    def _update_bucket(self, bucket: FlatBucket, hits: Sequence[bool], factor: float) -> None:
        raise NotImplementedError

    def _total(self) -> float:
        """The bias-corrected sum of the second moment."""
        total = 0.0
        for bucket in self._buckets:
            b2 = numbers(self._options(bucket), "betas")[1]
            steps = max(1, *bucket.steps)
            total += float(bucket.exp_avg_sq.sum(dtype=torch.float64)) / (1.0 - b2**steps)
        return total

    @torch.no_grad()
    def freeze(self) -> None:
        """Freezes the second moment and compresses from the next step on. All ranks must call it."""
        if not self.num_steps:
            raise wrong_state(
                "freeze() cannot run", "there is no second moment before the first step", "Call step() first."
            )
        if self.is_compressed:
            return
        self.frozen_step = self.num_steps
        for bucket in self._buckets:
            self._before_freezing(bucket)
            exponents = exponents_of(bucket.exp_avg_sq, number(self._options(bucket), "eps"))
            self.group.broadcast(exponents)  # different machines may round a square root differently
            bucket.set_exponents(exponents, self.group)
        if self.group.rank == 0:
            LOGGER.info(
                f"{type(self).__name__}: the second moment is frozen, and communication is compressed from step "
                f"{self.frozen_step + 1} on."
            )

    def _before_freezing(self, bucket: FlatBucket) -> None:
        """Hook for a last change of a bucket's second moment, which must be equal on all ranks."""

    def _warn_of_late(self, bucket: FlatBucket, hits: Sequence[bool]) -> None:
        """Warns of parameters that get their first gradient now, after the switch. Only weight decay changes them."""
        num_late = sum(hit and not step for hit, step in zip(hits, bucket.steps, strict=True))
        if num_late and self.group.rank == 0:
            LOGGER.warning(
                f"{type(self).__name__} does not update {num_late} parameters, because their first gradient came after "
                "the second moment was frozen. Use a higher freeze_step, or build a new optimizer."
            )

    def _head(self) -> dict[str, object]:
        return {"frozen_step": self.frozen_step, "watch": self._watch.state_dict()}

    def _from_head(self, head: Mapping[str, object]) -> dict[str, object]:
        watch = VarianceWatch(self._watch.window, self._watch.threshold)
        watch.load_state_dict(dict_of(head, "watch"))
        frozen_step = None if head["frozen_step"] is None else int_of(head, "frozen_step")
        return {"frozen_step": frozen_step, "_watch": watch}
