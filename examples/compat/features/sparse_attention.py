# SPDX-License-Identifier: Apache-2.0
"""SparseSelfAttention with the fixed pattern of a decoder."""

import deepspeed
import torch
from deepspeed.ops.sparse_attention import FixedSparsityConfig, SparseSelfAttention
from small import BASE, get_args, report
from sparse_model import BLOCK, HEADS, LENGTH, LOCAL, Attention, batch

CONFIG = {**BASE, "zero_optimization": {"stage": 2}}


def main():
    args = get_args()
    torch.manual_seed(0)
    pattern = FixedSparsityConfig(
        num_heads=HEADS, block=BLOCK, num_local_blocks=LOCAL, num_global_blocks=1, attention="unidirectional"
    )
    model = Attention(SparseSelfAttention(pattern, max_seq_length=LENGTH))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    losses = []
    for step in range(args.steps):
        draw = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
        x, y = (value.to(engine.device) for value in batch(draw))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report(losses)


if __name__ == "__main__":
    main()
