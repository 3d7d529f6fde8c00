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


def sparse_batch(step):
    draw = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
    return sparse_model.batch(draw)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.99), weight_decay=0.0)


def train(model, optimizer, steps, batch_of=batch, limit=None):
    losses = []
    world = torch.distributed.get_world_size()
    for step in range(steps):
        loss = model(*batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            torch.distributed.all_reduce(param.grad)
            param.grad /= world
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
}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    SCRIPTS[sys.argv[1]]()
