# SPDX-License-Identifier: Apache-2.0
"""A pipeline with ZeRO stage 1 and data parallelism: its own iterator, a schedule, evaluation and a checkpoint."""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import RepeatingLoader
from small import BASE, Block, get_args, report, shared_folder
from torch import nn

TOKENS = 11
CONFIG = {
    **BASE,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 1},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
}


def to_logits(layer, x):
    return nn.functional.linear(x, layer.weight)


def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits.reshape(-1, TOKENS).float(), targets.reshape(-1))


def samples(seed, rank):
    draw = torch.Generator().manual_seed(10 * seed + rank)
    batches = [torch.randint(TOKENS, (4, 6), generator=draw) for _ in range(6)]
    return [(tokens, (3 * tokens + 1) % TOKENS) for tokens in batches]


def build(num_stages, seed=0):
    torch.manual_seed(seed)
    specs = [
        TiedLayerSpec("table", nn.Embedding, TOKENS, 16),
        Block(),
        nn.Tanh(),
        LayerSpec(nn.LayerNorm, 16),
        TiedLayerSpec("table", nn.Embedding, TOKENS, 16, forward_fn=to_logits),
    ]
    net = PipelineModule(specs, num_stages, loss_fn=loss_fn, partition_method="uniform", seed_layers=True)
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)[0]


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = shared_folder(args.folder)
    losses, after, rates = [], [], []
    for num_stages in sorted({1, torch.distributed.get_world_size()}):
        engine = build(num_stages)
        rank = torch.distributed.get_rank() % engine.dp_world_size  # ranks of a stage are neighbours
        data = iter(RepeatingLoader(samples(0, rank)))
        if args.load is None:
            losses += [float(engine.train_batch(data_iter=data)) for _ in range(4)]
            engine.save_checkpoint(folder, tag=f"pipe{num_stages}")
        else:
            [next(data) for _ in range(8)]
        engine = build(num_stages, seed=1)
        path, _ = engine.load_checkpoint(args.load or folder, tag=f"pipe{num_stages}")
        assert path is not None
        engine.set_dataiterator(data)
        for _ in range(args.steps):
            after.append(float(engine.train_batch()))
            rates += engine.get_lr()
        after.append(float(engine.eval_batch(data_iter=iter(samples(1, rank)))))
    report([*losses, *after], resumed=len(after), rates=rates)


if __name__ == "__main__":
    main()
