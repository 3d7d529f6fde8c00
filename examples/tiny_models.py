# SPDX-License-Identifier: Apache-2.0
"""Makes what `twinflow finetune` needs, without a download: a tiny Llama and a tiny Qwen, each with a tokenizer and a
chat template, and questions and answers of a synthetic task.

    python examples/tiny_models.py tiny
    twinflow finetune tiny/qwen tiny/train.jsonl --steps 250 --lr 1e-3 --out runs/tiny

The models are pretrained here, for some seconds, on plain text that counts: "After 41 comes 42." They have never
seen a question. `train.jsonl` has chats that ask for the numbers after a number. `test.jsonl` asks about other numbers.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

for _name in ("torchao", "torch.utils._pytree"):  # on import they report what concerns no user of this script
    logging.getLogger(_name).setLevel(logging.ERROR)
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from twinflow import TwinOptimizer  # noqa: E402

FIRST, LAST = 10, 99  # all numbers
QUESTIONS = {1: "Which number comes after {}?", 3: "Write the three numbers after {}."}
TEST_SHARE = 0.2  # share of the numbers that only test.jsonl asks about
PEAK_LR = 5e-3
LLAMA_TEMPLATE = (
    "{% for message in messages %}<|head|>{{ message['role'] }}<|end_head|>{{ message['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|end_head|>{% endif %}"
)
# It marks the answers, so that a trainer finds all of them in a chat of several turns.
QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Special tokens: padding, the end of an answer or text, and those of the chat template.
SPECIAL = {
    "llama": ("<|pad|>", "<|eot|>", "<|head|>", "<|end_head|>"),
    "qwen": ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
}
TEMPLATES = {"llama": LLAMA_TEMPLATE, "qwen": QWEN_TEMPLATE}


def counting(start: int, num: int) -> str:
    return " ".join(str(number) for number in range(start, start + num))


def sentence(rng: random.Random) -> str:
    """Plain text for pretraining."""
    num = rng.choice((1, 3, 12))
    start = rng.randint(FIRST, LAST - num)
    after = counting(start + 1, num)
    return {1: f"After {start} comes {after}.", 3: f"The three after {start} are {after}.", 12: f"{start} {after}"}[num]


def chat(number: int, num: int) -> dict[str, Any]:
    """A question about the `num` numbers after a number, with its answer."""
    question = {"role": "user", "content": QUESTIONS[num].format(number)}
    return {"messages": [question, {"role": "assistant", "content": counting(number + 1, num)}]}


def all_chats(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Chats for training and for the test, about different numbers."""
    numbers = list(range(FIRST, LAST - max(QUESTIONS)))
    rng.shuffle(numbers)
    num_test = round(TEST_SHARE * len(numbers))
    train, test = (
        [chat(n, num) for n in part for num in QUESTIONS] for part in (numbers[num_test:], numbers[:num_test])
    )
    rng.shuffle(train)
    return train, test


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE, so that it encodes any text. It is trained on the texts of the task."""
    inner = Tokenizer(models.BPE())
    # Spaces are tokens of their own, so that a number is the same token wherever it occurs.
    spaces = pre_tokenizers.Split(" ", "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([spaces, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    special = SPECIAL[kind]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=list(special), initial_alphabet=alphabet)
    trainer.show_progress = False
    rng = random.Random(0)
    texts = [sentence(rng) for _ in range(500)]
    texts += [message["content"] for row in all_chats(rng)[0] for message in row["messages"]]
    inner.train_from_iterator([*texts, *["user assistant system\n"] * 50], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=special[0], eos_token=special[1])
    made.chat_template = TEMPLATES[kind]
    return made


def make_model(kind: str, tokenizer: PreTrainedTokenizerFast, hidden: int = 64) -> torch.nn.Module:
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 256,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    set_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape))
    return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=hidden // 4))


def pretrain(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, num_steps: int) -> float:
    """Trains on sentences, and returns the last loss."""
    rng, loss = random.Random(1), torch.tensor(float("nan"))
    optimizer = TwinOptimizer(model, "adamw", lr=PEAK_LR, max_grad_norm=1.0, early=True)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / 50, 1.05 - step / num_steps)
        texts = [sentence(rng) + tokenizer.eos_token for _ in range(16)]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return loss.item()


def write_data(folder: Path) -> None:
    for name, rows in zip(("train", "test"), all_chats(random.Random(2)), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def exact_share(model: Any, tokenizer: PreTrainedTokenizerFast, rows: Sequence[dict[str, Any]]) -> float:
    """Share of the questions that the model answers with exactly the expected words."""
    right = 0
    tokenizer.padding_side = "left"
    for first in range(0, len(rows), 50):
        part = rows[first : first + 50]
        asked = [row["messages"][:1] for row in part]
        texts = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        written = model.generate(**batch, max_new_tokens=8, do_sample=False)[:, batch.input_ids.shape[1] :]
        for row, tokens in zip(part, written, strict=True):
            right += tokenizer.decode(tokens, skip_special_tokens=True) == row["messages"][1]["content"]
    return right / len(rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes tiny pretrained models and data for `twinflow finetune`.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("tiny"))
    parser.add_argument("--steps", type=int, default=600, help="steps of pretraining (default: 600)")
    given = parser.parse_args()
    disable_progress_bar()
    given.folder.mkdir(parents=True, exist_ok=True)
    write_data(given.folder)
    test = read_rows(given.folder / "test.jsonl")
    for kind in SPECIAL:
        tokenizer = make_tokenizer(kind)
        model = make_model(kind, tokenizer)
        loss = pretrain(model, tokenizer, given.steps)
        model.save_pretrained(given.folder / kind)
        tokenizer.save_pretrained(given.folder / kind)
        share = exact_share(model.eval(), tokenizer, test)
        print(f"{given.folder / kind}: loss {loss:.3f}, answers {share:.0%} of the questions exactly")
    print(f"try: twinflow finetune {given.folder}/qwen {given.folder}/train.jsonl --steps 250 --lr 1e-3")


if __name__ == "__main__":
    main()
