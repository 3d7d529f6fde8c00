# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of Muon in plain torch: momentum, the Newton-Schulz iteration, and a whole step as the reference.

A Newton-Schulz iteration replaces the singular values of a matrix X by a polynomial of them, without computing them:
X <- a X + (b G + c G G) X, with G = X X^T. After some iterations all singular values are near 1.

On a GPU the products are made in bf16, as in torch.optim.Muon, because fp32 would take many times as long. On a CPU
they are made in fp32, which is as fast there. The norm and everything outside of the iteration is fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinflow.rules.muon import scale
from twinflow.rules.rule import Options, number, numbers
from twinflow.rules.rules import TINY


def products_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the products of the iteration."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def iterate(x: Tensor, num_steps: int, coefficients: Sequence[float]) -> Tensor:
    """Newton-Schulz iterations on a batch of matrices [k, m, n] with m <= n and singular values of 1 at most."""
    a, b, c = coefficients
    is_single = len(x) == 1  # a batch of one matrix is slower than the matrix
    x = x[0] if is_single else x
    multiply = torch.addmm if is_single else torch.baddbmm
    for _ in range(num_steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x[None] if is_single else x


def orthogonalise(directions: Sequence[Tensor], options: Options, dtype: torch.dtype) -> None:
    """Replaces fp32 matrices by orthogonalised ones. They have one shape, or the transposed one."""
    num_rows, num_columns = sorted(directions[0].shape)
    batch = torch.empty(len(directions), num_rows, num_columns, dtype=dtype, device=directions[0].device)
    eps = number(options, "ns_eps")
    wide = [one if one.shape == batch.shape[1:] else one.mT for one in directions]
    for x, one in zip(batch, wide, strict=True):
        torch.div(one, torch.linalg.vector_norm(one).clamp(min=eps), out=x)
    found = iterate(batch, int(number(options, "ns_steps")), numbers(options, "ns_coefficients"))
    for x, one in zip(found, wide, strict=True):
        one.copy_(x)


def momentum_step(old: Tensor, grad: Tensor, options: Options) -> Tensor:
    """The new momentum of a matrix. `grad` becomes the direction that is orthogonalised. All tensors are fp32."""
    momentum = number(options, "momentum")
    new = torch.lerp(old, grad, 1.0 - momentum)
    new.masked_fill_(new.abs() < TINY, 0.0)  # as `flush`, in place
    if options["nesterov"]:
        grad.lerp_(new, momentum)
    else:
        grad.copy_(new)
    return new


@torch.no_grad()
def muon_step(weight: Tensor, momentum: Tensor, grad: Tensor, options: Options, dtype: torch.dtype) -> None:
    """One step of Muon for one matrix, in place. The reference of MuonUpdater (offload/muon.py)."""
    direction = grad.clone()
    momentum.copy_(momentum_step(momentum, direction, options))
    orthogonalise([direction], options, dtype)
    direction *= scale(str(options["adjust_lr_fn"]), *weight.shape)
    lr, decay = number(options, "lr"), number(options, "weight_decay")
    weight.copy_(weight.double() - lr * (direction.double() + decay * weight.double()))
