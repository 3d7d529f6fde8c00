# SPDX-License-Identifier: Apache-2.0
"""The model, the batches and the printed result that the scripts of this folder share."""

import argparse
import json
import tempfile

import torch
from torch import nn

INPUTS, WIDTH = 8, 16
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.01}}
BASE = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAMW, "gradient_clipping": 1.0, "steps_per_print": 1000}


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """A regression whose forward returns the loss, or the prediction if there are no targets."""

    def __init__(self, layers=2):
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x, y=None):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        return x if y is None else nn.functional.mse_loss(x.float(), y.float())


def build_model(layers=2, seed=0):
    torch.manual_seed(seed)
    return Model(layers)


def batch(step, size=4, rank=None, dtype=torch.float32):
    """Inputs and targets, which are different for each step and each data-parallel rank."""
    rank = torch.distributed.get_rank() if rank is None else rank
    draw = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, INPUTS, generator=draw)
    return x.to(dtype), x.sin().sum(dim=1, keepdim=True)


def get_args():
    import deepspeed  # here, because plain.py uses the model and the batches without DeepSpeed

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", default=None, help="where files are saved; default: a temporary folder")
    parser.add_argument("--load", default=None, help="a folder to read a checkpoint from, instead of the own one")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def shared_folder(folder):
    """One folder for all ranks."""
    found = [folder or tempfile.mkdtemp()]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


def train(engine, steps, start=0, dtype=torch.float32):
    """The loop of most scripts. Returns the losses of this rank."""
    losses = []
    for step in range(start, start + steps):
        x, y = (value.to(engine.device) for value in batch(step, dtype=dtype))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def report(losses, **values):
    """Rank 0 prints the losses of all ranks, one rank after the other, and other figures, as a line of JSON."""
    ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, losses)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"losses": [loss for rank in ranks for loss in rank], **values}), flush=True)


def sums(weights):
    """A figure for each weight of a state dict."""
    return {name: float(value.float().abs().sum()) for name, value in sorted(weights.items())}
