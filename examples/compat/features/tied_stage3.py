# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3 with a tied embedding: initialised and read while whole, saved, and rebuilt from its parts."""

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from small import BASE, Block, get_args, report, shared_folder, sums
from torch import nn

TOKENS = 13
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
CONFIG = {**BASE, "zero_optimization": ZERO}


class Tied(nn.Module):
    """A language model whose output layer is the embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, TOKENS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ((3 * tokens + 1) % TOKENS).flatten())


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        draw = torch.Generator().manual_seed(100 * step + engine.global_rank)
        loss = engine(torch.randint(TOKENS, (4, 6), generator=draw).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = shared_folder(args.folder)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Tied()
    with deepspeed.zero.GatheredParameters([model.table.weight, model.blocks[0].linear.weight], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            nn.init.constant_(model.blocks[0].linear.weight, 0.01)
            model.table.weight.data.mul_(2.0)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    losses = train(engine, 0, 4)
    figures = {}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        figures["whole"] = [float(param.detach().abs().sum()) for param in model.parameters()]
    engine.save_checkpoint(folder, tag="tied")
    engine.save_16bit_model(folder, "tied.bin")
    losses += train(engine, 4, 6)
    engine.load_checkpoint(folder, tag="tied")
    losses += train(engine, 4, args.steps)
    torch.distributed.barrier()
    figures["rebuilt"] = sums(get_fp32_state_dict_from_zero_checkpoint(folder, "tied"))
    report(losses, **figures)


if __name__ == "__main__":
    main()
