# SPDX-License-Identifier: Apache-2.0
"""LayerSpec and TiedLayerSpec: an embedding that is the output layer too, with recomputed blocks and a checkpoint."""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from small import BASE, Block, get_args, report, shared_folder
from torch import nn

CONFIG = {
    **BASE,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 0},
}
TOKENS = 11


class Logits(nn.Embedding):
    """Looks tokens up, or multiplies with the table."""


def to_logits(layer, x):
    return nn.functional.linear(x, layer.weight)


def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits.reshape(-1, TOKENS), targets.reshape(-1))


def sequences(start):
    while True:
        draw = torch.Generator().manual_seed(start)
        tokens = torch.randint(TOKENS, (4, 6), generator=draw)
        yield tokens, (3 * tokens + 1) % TOKENS
        start += 1


def build():
    specs = [
        TiedLayerSpec("table", Logits, TOKENS, 16),
        LayerSpec(Block),
        LayerSpec(Block),
        LayerSpec(nn.LayerNorm, 16),
        TiedLayerSpec("table", Logits, TOKENS, 16, forward_fn=to_logits),
    ]
    topology = PipeDataParallelTopology(num_pp=torch.distributed.get_world_size(), num_dp=1)
    net = PipelineModule(
        layers=specs,
        topology=topology,
        loss_fn=loss_fn,
        partition_method="uniform",
        seed_layers=True,
        base_seed=1234,
        activation_checkpoint_interval=1,
        checkpointable_layers=["Block"],
    )
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)[0]


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = shared_folder(args.folder)
    engine = build()
    data = sequences(0)
    losses = []
    if args.load is None:
        losses = [float(engine.train_batch(data_iter=data)) for _ in range(args.steps)]
        engine.save_checkpoint(folder, tag="pipe")
        losses += [float(engine.train_batch(data_iter=data)) for _ in range(2)]
    else:
        data = sequences(2 * (args.steps + 2))
    path, _ = engine.load_checkpoint(args.load or folder, tag="pipe")
    assert path is not None
    after = [float(engine.train_batch(data_iter=data)) for _ in range(2)]
    report([*losses, *after], resumed=len(after))


if __name__ == "__main__":
    main()
