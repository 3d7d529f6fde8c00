# SPDX-License-Identifier: Apache-2.0
"""A loop as Hugging Face's libraries write it: they scale losses, clip by the config, and step their own schedule."""

import deepspeed
import torch
from small import BASE, Model, batch, build_model, get_args, report
from torch.optim.lr_scheduler import LambdaLR

PARTS = 3


def groups_of(model):
    """Biases have no weight decay."""
    decays = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if n.endswith("bias")]
    return [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def run(args, stage):
    config = {
        **{key: value for key, value in BASE.items() if key != "optimizer"},
        "gradient_accumulation_steps": PARTS,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model: Model = build_model()
    adamw = torch.optim.AdamW(groups_of(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = LambdaLR(adamw, lambda step: 1.0 / (1 + step))
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=adamw, lr_scheduler=schedule, config=config
    )
    losses, norms, rates, evaluated = [], [], [], []
    for number in range(args.steps * PARTS):
        engine.train()
        x, y = (value.to(engine.device) for value in batch(number))
        loss = engine(x, y) + 0.5 * engine(x + 1.0, y)  # two forwards and one backward
        engine.backward(loss)
        losses.append(loss.item())
        is_last = engine.is_gradient_accumulation_boundary()
        assert is_last == ((number + 1) % PARTS == 0)
        engine.step()
        if is_last:
            norms.append(float(engine.get_global_grad_norm()) if stage else 0.0)
            rates.append([group["lr"] for group in optimizer.param_groups])
        engine.eval()
        with torch.no_grad():  # between the micro-batches of a step too
            evaluated.append(engine(*(value.to(engine.device) for value in batch(900 + number))).item())
    return losses, [norms, rates, scheduler.get_last_lr(), engine.global_steps, engine.global_samples], evaluated


def main():
    args = get_args()
    losses, figures, evaluated = [], [], []
    for stage in (0, 1, 2, 3):
        found, others, more = run(args, stage)
        losses += found
        figures.append(others)
        evaluated += more
    report([*losses, *evaluated], figures=figures)


if __name__ == "__main__":
    main()
