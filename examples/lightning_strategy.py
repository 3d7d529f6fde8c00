# SPDX-License-Identifier: Apache-2.0
"""Lightning with TwinStrategy, which changes one argument of the Trainer. A small Llama trains on the source code of
Python's standard library. Needs `pip install lightning transformers`.

python examples/lightning_strategy.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from twinflow.data import load_data
from twinflow.integrations.lightning import TwinStrategy

STEPS, LENGTH = 40, 64
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 176}
CONFIG = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu", "states": "fp32", "ratio": 1.0}}}


class Llama(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **SHAPE)
        )
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """TwinStrategy replaces torch's AdamW by twinflow's AdamW with state on the host."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(folder: str, resume: str | None = None) -> Llama:
    data = load_data("stdlib")
    rows = [data.batch("train", i, 1, LENGTH)[0][0] for i in range(160)]
    module = Llama()
    trainer = pl.Trainer(
        strategy=TwinStrategy(config=CONFIG),
        devices=1,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=20, save_top_k=-1)],
        precision="bf16-true" if torch.cuda.is_available() else "32-true",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4), ckpt_path=resume)  # type: ignore[arg-type]
    return module


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        module = fit(folder)
        resumed = fit(folder, resume=f"{folder}/step=20.ckpt")
    print(f"loss {module.losses[0]:.3f} to {module.losses[-1]:.3f}")
    assert module.losses[-1] < module.losses[0] - 1.0
    one, two = module.state_dict(), resumed.state_dict()
    same = all(torch.equal(one[name], two[name]) for name in one)
    print("the resumed run has the same bits" if same else "the resumed run differs")


if __name__ == "__main__":
    main()
