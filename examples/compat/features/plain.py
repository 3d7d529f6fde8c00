# SPDX-License-Identifier: Apache-2.0
"""The scripts whose features DeepSpeed 0.19.8 does not have, or not on a CPU, as plain torch loops.

`python plain.py NAME` prints the losses that the script NAME should print.
"""

import sys

import sparse_model
import torch
from small import batch, build_model, report
from torch import nn


class Lamb(torch.optim.Optimizer):
    """LAMB with the names and defaults of DeepSpeed's options."""

    def __init__(self, params, lr, weight_decay=0.0, max_coeff=10.0, min_coeff=0.01):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.limits = (min_coeff, max_coeff)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                step = state["step"] = state.get("step", 0) + 1
                first = state.setdefault("exp_avg", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                second = state.setdefault("exp_avg_sq", torch.zeros_like(param))
                second.mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
                update = first / (second.sqrt() + 1e-8) + group["weight_decay"] * param
                norms = param.norm(), update.norm()
                coefficient = (norms[0] / norms[1]).clamp(*self.limits) if all(norms) else 1.0
                rate = group["lr"] * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
                param.sub_(rate * coefficient * update)


class ZeroOneAdam(torch.optim.Optimizer):
    """0/1 Adam whose exchanges are not compressed. Gradients are not summed over ranks before `step`."""

    def __init__(self, params, lr, betas, var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper):
        super().__init__(params, {"lr": lr, "betas": betas})
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self.num_steps = self.num_updates = self.num_local = self.since = 0
        self.var_interval = self.local_interval = 1

    @torch.no_grad()
    def step(self):
        self.num_steps += 1
        is_local = self.num_steps > self.var_freeze_step
        has_variance = not is_local and self.num_steps % self.var_interval == 0
        self.since += is_local
        is_exchanged = self.since == self.local_interval
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, group, is_local, has_variance, is_exchanged)
        if has_variance:
            self.num_updates += 1
            self.var_interval *= 1 + (self.num_updates % self.var_update_scaler == 0)
        if is_local:
            self.num_local += 1
            self.since *= not is_exchanged
            longer = 1 + (self.num_local % self.local_step_scaler == 0)
            self.local_interval = min(self.local_interval * longer, self.local_step_clipper)

    def update(self, param, group, is_local, has_variance, is_exchanged):
        state, (b1, b2) = self.state[param], group["betas"]
        first = state.setdefault("exp_avg", torch.zeros_like(param))
        second = state.setdefault("exp_avg_sq", torch.zeros_like(param))
        first.lerp_(param.grad if is_local else mean(param.grad), 1 - b1)
        if has_variance:
            second.mul_(b2).add_(mean(param.grad).square(), alpha=1 - b2)
            state["updates"] = state.get("updates", 0) + 1
        correction = (1 - b2 ** state["updates"]) ** 0.5
        divisor, rate = second.sqrt() + 1e-8 * correction, group["lr"] * correction / (1 - b1**self.num_steps)
        if not is_local:
            param.sub_(rate * first / divisor)
            return
        shared = state.setdefault("shared", param.clone())
        moved = state.setdefault("moved", torch.zeros_like(param)).add_(first, alpha=rate)
        state["rate"] = state.get("rate", 0.0) + rate
        param.sub_(rate * first / divisor)
        if is_exchanged:  # the weights of all ranks become those that the mean of their momenta would have given
            first.copy_(mean(moved) / state["rate"])
            param.copy_(shared.sub_(state["rate"] * first / divisor))
            moved.zero_()
            state["rate"] = 0.0


def mean(tensor):
    total = tensor.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()


def sparse_batch(step):
    draw = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
    return sparse_model.batch(draw)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.99), weight_decay=0.0)


def train(model, optimizer, steps, batch_of=batch, limit=None):
    losses = []
    for step in range(steps):
        loss = model(*batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        if not isinstance(optimizer, ZeroOneAdam):
            for param in model.parameters():
                param.grad = mean(param.grad)
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        losses.append(loss.item())
    return losses


def compressed():
    """Adam. Compressed steps are only near to it."""
    model = build_model()
    losses = train(model, adam(model), 16)
    report(losses[:8], near=sum(losses[8:]) / 8)


def zero_one_adam():
    """Steps until the second moment is updated more rarely are those of Adam. Compressed steps are only near."""
    model = build_model()
    losses = train(model, ZeroOneAdam(model.parameters(), 5e-3, (0.9, 0.99), 12, 8, 4, 2), 16)
    report(losses[:8], near=sum(losses[8:]) / 8)


def fp16():
    """fp32 masters, a loss scale that is static or halved at overflows, and clipping by the norm of all gradients."""
    losses, scales, steps = [], [], []
    for scale, window in ((2.0**7, None), (2.0**24, 4)):
        model = build_model().half()
        masters = [param.detach().float() for param in model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
        taken = since = 0
        for step in range(16):
            loss = model(*batch(step, dtype=torch.float16))
            model.zero_grad()
            (loss.float() * scale).backward()
            for param, master in zip(model.parameters(), masters, strict=True):
                torch.distributed.all_reduce(param.grad)
                master.grad = param.grad.float() / (scale * torch.distributed.get_world_size())
            losses.append(loss.item())
            if all(master.grad.isfinite().all() for master in masters):
                nn.utils.clip_grad_norm_(masters, 1.0)
                optimizer.step()
                if window is not None and since > 0 and since % window == 0:  # DeepSpeed counts the steps before this
                    scale *= 2
                taken, since = taken + 1, since + 1
            elif window is not None:
                scale, since = scale / 2, 0
            for param, master in zip(model.parameters(), masters, strict=True):
                param.data.copy_(master)
            scales.append(scale)
        steps += [16, 16 - taken]
    report(losses, scales=scales, steps=steps)


def lamb():
    model = build_model()
    report(train(model, Lamb(model.parameters(), 1e-2, 0.01, 0.3, 0.01), 8))


def sparse_attention():
    torch.manual_seed(0)
    model = sparse_model.Attention(sparse_model.masked_attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    report(train(model, optimizer, 8, sparse_batch, limit=1.0))


SCRIPTS = {
    "fp16": fp16,
    "onebit_adam": compressed,
    "lamb": lamb,
    "sparse_attention": sparse_attention,
    "zero_one_adam": zero_one_adam,
}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    SCRIPTS[sys.argv[1]]()
