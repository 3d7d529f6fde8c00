# SPDX-License-Identifier: Apache-2.0
"""Trains AlexNet as a PipelineModule on generated images, as in DeepSpeed's pipeline tutorial but on a CPU.

With twinflow:  twinflow launch --compat --num_procs 2 examples/compat/alexnet_pipeline.py -p 2
With DeepSpeed: deepspeed --num_gpus 2 examples/compat/alexnet_pipeline.py -p 2
"""

import argparse
import json

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.0,  # off, because DeepSpeed would clip by the norm of the first stage alone
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}},
    "steps_per_print": 1000,
}


class AlexNet(nn.Module):
    """AlexNet for images of 32 x 32 pixels."""

    def __init__(self, num_classes=10, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, kernel_size=3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 3 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(3 * width, 4 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * width, 4 * width, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * width, 128),
            nn.ReLU(inplace=True),
            nn.Linear(128, 64),
            nn.ReLU(inplace=True),
            nn.Linear(64, num_classes),
        )


def join_layers(model):
    return [*model.features, lambda x: torch.flatten(x, 1), *model.classifier]


def fake_images(count, seed=7):
    """Images of ten classes: each image is the pattern of its class plus noise."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draw)
    patterns = torch.randn(10, 3, 32, 32, generator=draw)
    images = patterns[labels] + 0.5 * torch.randn(count, 3, 32, 32, generator=draw)
    return torch.utils.data.TensorDataset(images, labels)


def get_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("-s", "--steps", type=int, default=20)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = PipelineModule(
        layers=join_layers(AlexNet()),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    trained = [p for p in net.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=trained, config=CONFIG)
    loader = torch.utils.data.DataLoader(fake_images(256), batch_size=engine.train_micro_batch_size_per_gpu())
    data = iter(RepeatingLoader(loader))
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(args.steps)]
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
