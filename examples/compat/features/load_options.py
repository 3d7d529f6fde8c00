# SPDX-License-Identifier: Apache-2.0
"""The options of load_checkpoint: a larger model, a function of the script, a new optimizer, and frozen layers."""

import deepspeed
import torch
from small import BASE, INPUTS, WIDTH, Model, batch, get_args, report, shared_folder, sums, train
from torch import nn

CONFIG = {
    **BASE,
    "zero_optimization": {"stage": 1},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "log"}},
}


class Larger(Model):
    """A layer that the checkpoint does not have."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(INPUTS, WIDTH)

    def forward(self, x, y):
        hidden = self.first(x) + 0.1 * self.more(x)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.mse_loss(self.last(hidden), y)


def build(kind, seed, is_frozen=False):
    torch.manual_seed(seed)
    model = kind()
    if is_frozen:
        model.first.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=params, config=CONFIG)[0]


def scaled(src, dst):
    dst.load_state_dict({name: 2 * value for name, value in src.items()})


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = shared_folder(args.folder)
    engine = build(Model, 0)
    losses = train(engine, 4)
    engine.save_checkpoint(folder, tag="small", client_state={"epoch": 2, "seen": [1, 2], "best": {"loss": 0.5}})
    found = {}

    engine = build(Model, 1)
    path, client = engine.load_checkpoint(folder, "small", load_module_only=True)
    losses += train(engine, 2, start=4)
    found["only"] = [path is not None, client.get("epoch"), engine.global_steps, engine.get_lr()]

    engine = build(Model, 2)
    _, client = engine.load_checkpoint(folder, "small", load_optimizer_states=False, load_lr_scheduler_states=False)
    losses += train(engine, 2, start=4)
    found["weights"] = [client["seen"], client["best"]["loss"], engine.global_steps, engine.get_lr()]

    engine = build(Larger, 3)
    before = engine.module.more.weight.detach().clone()
    engine.load_checkpoint(folder, "small", load_module_strict=False, load_module_only=True)
    assert torch.equal(engine.module.more.weight.detach(), before)
    losses += train(engine, 2, start=4)

    engine = build(Model, 4)
    engine.load_checkpoint(folder, "small", load_module_only=True, custom_load_fn=scaled)
    found["scaled"] = sums(engine.module.state_dict())
    losses += train(engine, 2, start=4)

    engine = build(Model, 5, is_frozen=True)
    losses += train(engine, 2)
    engine.save_checkpoint(folder, tag="frozen", exclude_frozen_parameters=True)
    other = build(Model, 6, is_frozen=True)
    first = other.module.first.weight.detach().clone()
    other.load_checkpoint(folder, "frozen", load_module_strict=False)
    assert torch.equal(other.module.first.weight.detach(), first)
    losses += train(other, 2, start=2)
    with torch.no_grad():
        losses.append(other(*batch(99)).item())
    report(losses, **found)


if __name__ == "__main__":
    main()
