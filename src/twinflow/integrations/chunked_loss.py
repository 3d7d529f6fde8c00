# SPDX-License-Identifier: Apache-2.0
"""The loss of a Hugging Face causal language model without storing all logits.

`chunk_loss(model)` replaces two things on the model object. The output layer returns `LazyLogits`, which has the shape
of the logits and no memory. The model's loss function computes the loss from the inputs of the output layer, one chunk
of tokens at a time (twinflow.loss). Any other operation on `LazyLogits` computes the logits first, so code that reads
them gets the same values as without this module. If the weight of the output layer has changed since the forward, these
values cannot be computed any more, and the operation raises RuntimeError.

The trainers of TRL compute their loss in chunks too, from the weight of the output layer, whose forward they do not
call. `run_fused_head` fetches a weight that is on the host for them, as before a forward of the layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from twinflow.errors import incompatible, invalid_value, wrong_state
from twinflow.loss import IGNORE_INDEX, chunked_cross_entropy
from twinflow.offload.fetch_hooks import LazyOutput, run_inside

# Attributes of LazyLogits that need no values. The meta tensor has them.
_METADATA: Final = frozenset(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout"))
_METADATA_CALLS: Final = frozenset({Tensor.dim, Tensor.size, Tensor.numel, Tensor.element_size, Tensor.__len__})


class LazyLogits(LazyOutput, Tensor):
    """The output of the output layer. The logits are computed when an operation needs their values."""

    inputs: Tensor
    weight: Tensor
    _versions: tuple[int, int]  # of inputs and weight when this object was made
    _computed: Tensor | None

    @classmethod
    def of(cls, inputs: Tensor, weight: Tensor) -> LazyLogits:
        device = inputs.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            inputs = inputs.to(torch.get_autocast_dtype(device))  # as the output layer does
        made = torch.empty(*inputs.shape[:-1], len(weight), dtype=inputs.dtype, device="meta").as_subclass(cls)
        made.inputs = inputs
        made.weight = weight
        made._versions = (inputs._version, weight._version)
        made._computed = None
        return made

    def values(self) -> Tensor:
        """The logits, as the output layer computes them. They are computed once, with their graph."""
        if self._computed is None:
            if (self.inputs._version, self.weight._version) != self._versions:
                raise wrong_state(
                    "The logits of this forward cannot be computed",
                    "the weight of the output layer has changed since then (chunk_loss computes logits when they are "
                    "read)",
                    "Read the logits before optimizer.step(), or train without chunk_loss.",
                )
            # The output layer ran with gradients enabled, and its result is not to depend on who reads it first.
            with torch.enable_grad(), torch.autocast(self.inputs.device.type, enabled=False):
                self._computed = F.linear(self.inputs, self.weight.to(self.inputs.dtype))
        return self._computed

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func in _METADATA or func in _METADATA_CALLS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == _DEVICE:  # torch makes a new object of it for each call
            return args[0].inputs.device
        computed = torch.utils._pytree.tree_map_only(LazyLogits, LazyLogits.values, (args, dict(kwargs or {})))
        return func(*computed[0], **computed[1])


_DEVICE: Final = Tensor.device.__get__


class ChunkedLoss:
    """The replacements on one model. `remove` restores the model."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self._model = cast(Any, model)
        self._head = cast(Any, head)
        self._whole_loss = self._model.loss_function
        self._head.forward = self._lazy
        self._model.loss_function = self._loss

    def remove(self) -> None:
        """Restores the model's own output layer and loss function."""
        del self._head.forward
        self._model.loss_function = self._whole_loss

    def _lazy(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # generation reads the logits at once
            return F.linear(inputs, self._head.weight)
        return LazyLogits.of(inputs, self._head.weight)

    def _mean(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return chunked_cross_entropy(inputs, self._head.weight.to(inputs.dtype), targets)

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        if not isinstance(logits, LazyLogits) or logits._computed is not None or ignore_index != IGNORE_INDEX:
            loss: Tensor = self._whole_loss(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
            return loss
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        inputs = logits.inputs
        targets = shift_labels.reshape(-1).to(inputs.device)
        mean = run_inside(self._head, self._mean, inputs.reshape(-1, inputs.shape[-1]), targets)
        if num_items_in_batch is None:
            return mean
        count = (targets != IGNORE_INDEX).sum()
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(inputs.device)
        # Without targets the mean is NaN, and the sum is 0.
        return torch.where(count > 0, mean, 0.0) * count / num_items_in_batch


def chunk_loss(model: nn.Module) -> ChunkedLoss:
    """Computes the loss of a Hugging Face causal language model in chunks of tokens, from now on.

    The logits of 8,192 tokens and a vocabulary of 128,000 take 4 GB in fp32, and the plain loss needs them three times.
    Values that the model computes from the logits before the loss (logit scaling, soft caps) are computed as before,
    from whole logits. The loss is the same up to the rounding of fp32 sums.

        handle = chunk_loss(model)
        model(input_ids=tokens, labels=tokens).loss.backward()
        handle.remove()

    Raises ValueError if the model has no output layer or another loss than that of causal language models.
    """
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not isinstance(model, PreTrainedModel):
        raise invalid_value("model", type(model).__name__, "a model of transformers")
    head: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or head.bias is not None or "forward" in vars(head):
        raise incompatible(
            "chunk_loss",
            f"the output layer of {type(model).__name__}",
            "the loss in chunks needs an nn.Linear without bias and without a forward of its own",
            "Train without chunk_loss.",
        )
    if model.loss_function is not ForCausalLMLoss:
        raise incompatible(
            "chunk_loss",
            f"the loss function of {type(model).__name__}",
            "only the loss of causal language models can be computed in chunks",
            "Train without chunk_loss.",
        )
    return ChunkedLoss(model, head)


_FUSED: Final = "_ChunkedLogProbFunction"  # in trl.trainer.utils: the autograd function of the loss
_heads: Final = WeakTensorKeyDictionary()  # output layers with weights on the host, by weight


class _FusedHead:
    """Takes the place of TRL's autograd function."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def apply(self, hidden: Tensor, weight: Tensor, *args: object) -> object:
        if weight not in _heads:
            return self._function.apply(hidden, weight, *args)
        return run_inside(_heads[weight], self._function.apply, hidden, weight, *args)


def run_fused_head(model: nn.Module) -> None:
    """Lets TRL's loss, if TRL is imported, use the weight of the model's output layer while it is on the device."""
    trl, get_head = sys.modules.get("trl.trainer.utils"), getattr(model, "get_output_embeddings", None)
    function, head = getattr(trl, _FUSED, None), get_head() if get_head is not None else None
    if function is None or not isinstance(head, nn.Module):
        return
    if not isinstance(function, _FusedHead):
        setattr(trl, _FUSED, _FusedHead(function))
    for weight in head.parameters(recurse=False):
        _heads[weight] = head
