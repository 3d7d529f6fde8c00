# SPDX-License-Identifier: Apache-2.0
"""Data of `twinflow finetune`: TRL turns rows into tokens (chat template, loss mask, packing). It needs no model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twinflow.data.chats import Examples, Row
from twinflow.errors import invalid_value
from twinflow.files import read_text
from twinflow.integrations import need

EXTRA: Final = '"twinflow[finetune]"'  # what pip installs for the command
NAME: Final = "twinflow finetune"
transformers = need("transformers", EXTRA, NAME)
datasets = need("datasets", EXTRA, NAME)
trl = need("trl", EXTRA, NAME)
templates = need("trl.chat_template_utils", EXTRA, NAME)

IGNORED: Final = -100  # label of a token that is not learned


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and warnings of these libraries: the command has its own."""
    messages = transformers.utils.logging
    had_bars, level, hid_bars = (
        messages.is_progress_bar_enabled(),
        messages.get_verbosity(),
        datasets.are_progress_bars_disabled(),
    )
    messages.disable_progress_bar()
    messages.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if had_bars:
            messages.enable_progress_bar()
        if not hid_bars:
            datasets.enable_progress_bars()


def load_tokenizer(model: str, chat_template: str | None) -> Any:
    """The tokenizer of a model, with a token for padding. Raises a ValueError if there is none."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise no_model(model, error) from None
    if tokenizer.eos_token is None:
        raise ValueError(f"The tokenizer of {model} has no end-of-text token. Set eos_token in tokenizer_config.json.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = read_text(Path(chat_template))
    return tokenizer


def load_config(model: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise no_model(model, error) from None


def no_model(model: str, error: Exception) -> ValueError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    remedy = f"transformers reports: {first}"
    if os.environ.get("HF_HUB_OFFLINE") == "1" and not Path(model).exists():
        remedy = "There is no such folder, it is not in the local cache of the hub, and the hub cannot be reached."
    return invalid_value("MODEL", model, "the folder or the hub name of a causal language model", remedy)


def load_rows(name: str, split: str) -> list[tuple[str, Row | str]]:
    """The rows of a dataset of the hub, or of a folder that `datasets` can load."""
    try:
        found = datasets.load_dataset(name, split=split)
    except Exception as error:  # it raises errors of many packages
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = f"datasets reports: {first}"
        raise invalid_value("DATA", name, "a .jsonl or .json file, or the name of a dataset", remedy) from None
    return [(f"row {index}", dict(row)) for index, row in enumerate(found, start=1)]


class Preparation:
    """Tokenizes examples as TRL's trainers do, before a model is loaded."""

    def __init__(self, tokenizer: Any, method: str, examples: Examples) -> None:
        self._tokenizer = tokenizer
        self._is_dpo = method == "dpo"
        self._template: str | None = None  # with marks of the answers
        self._by_marks = False  # whether a chat is one example, in which the template marks the answers
        if examples.form == "messages":
            self._need_template()
            self._by_marks, self._template = _marking_template(tokenizer)
        elif examples.form != "text" and isinstance(next(iter(examples.rows[0].values())), list):
            self._need_template()

    def _need_template(self) -> None:
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "The data are chats, but the tokenizer of the model has no chat template, as is usual for a model that "
                "was not tuned for chats. Use the version of the model for chats, or give a Jinja file with "
                "--chat-template, or use texts as prompt and completion."
            )

    def rows(self, examples: Examples) -> list[Row]:
        """The rows for TRL. Where the template marks no answers, a chat becomes one row for each answer."""
        if examples.form != "messages" or self._by_marks:
            return list(examples.rows)
        made: list[Row] = []
        for row in examples.rows:
            messages = row["messages"]
            ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            made += [{"prompt": messages[:end], "completion": [messages[end]]} for end in ends]
        return made

    def tokenize(self, examples: Examples) -> Any:
        """A dataset with the columns of TRL. Nothing is cut yet."""
        rows = self.rows(examples)
        try:
            return self._prepared(datasets.Dataset.from_list(rows), None, "completion" in rows[0])
        except Exception:
            self._blame(examples)
            raise

    def cut(self, data: Any, seq_length: int, packing: bool = False) -> Any:
        """Cuts examples to `seq_length` tokens, leaves out those of which nothing to learn remains, and packs several
        examples into one sequence.
        """
        if self._is_dpo:  # the collator of TRL cuts
            return data.filter(lambda row: len(row["prompt_ids"]) < seq_length)
        return self._prepared(data, seq_length, False, packing)

    def _prepared(self, data: Any, seq_length: int | None, completion_only: bool, packing: bool = False) -> Any:
        common: dict[str, Any] = {"output_dir": "unused", "report_to": [], "max_length": seq_length, "bf16": False}
        if self._is_dpo:
            config = trl.DPOConfig(**common)
            return _DPOPreparation(self._tokenizer)._prepare_dataset(data, self._tokenizer, config, "train")
        config = trl.SFTConfig(**common, assistant_only_loss=self._by_marks)
        made = _SFTPreparation(self._tokenizer, self._template, completion_only)
        found = made._prepare_dataset(data, self._tokenizer, config, packing, None, "train")
        return found.select_columns([name for name in ("input_ids", "labels", "seq_lengths") if name in found.features])

    def _blame(self, examples: Examples) -> None:
        """Raises a ValueError that names the row which the chat template refuses, if it is one."""
        for row, place in zip(examples.rows, examples.places, strict=True):
            answers = row.get("completion") or row.get("chosen")
            messages = row.get("messages") or (row["prompt"] + answers if answers else None)
            try:
                if isinstance(messages, list):
                    self._tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception as error:
                raise ValueError(f"{place}: the chat template of the model refuses this chat: {error}") from None

    def show(self, examples: Examples) -> list[tuple[str, str]]:
        """The first example as the model sees it: parts of the text, each with its use."""
        first = Examples(examples.form, examples.rows[:1], examples.places[:1], "")
        row = self.tokenize(first)[0]
        decode = self._tokenizer.decode
        if self._is_dpo:
            names = {"context": "prompt_ids", "chosen": "chosen_ids", "rejected": "rejected_ids"}
            return [(use, decode(row[name])) for use, name in names.items()]
        parts: list[tuple[str, list[int]]] = []
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            use = "context" if label == IGNORED else "learned"
            if not parts or parts[-1][0] != use:
                parts.append((use, []))
            parts[-1][1].append(token)
        return [(use, decode(tokens)) for use, tokens in parts]

    def lengths(self, data: Any) -> list[int]:
        """The number of tokens of each example, prompt included. For a pair of answers, that with the longer answer."""
        if self._is_dpo:
            return [len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in data]
        return [len(tokens) for tokens in data["input_ids"]]

    def learned(self, data: Any) -> int:
        """The number of tokens of all examples that contribute to the loss: those of answers, not of prompts."""
        if self._is_dpo:
            return sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in data)
        return sum(label != IGNORED for labels in data["labels"] for label in labels)


def _marking_template(tokenizer: Any) -> tuple[bool, str | None]:
    """Whether marks in the chat template tell what is answered, and the template, if not the tokenizer's own."""
    template = None
    if not templates.has_generation_markers(tokenizer.chat_template):
        try:
            template = templates.get_training_chat_template(tokenizer)
        except ValueError:  # TRL does not know this template
            return False, None
    # Some templates leave the end of an answer out of the marks. The model would not learn to stop.
    return bool(templates.is_chat_template_stop_token_trained(tokenizer, chat_template=template)), template


class _SFTPreparation(trl.SFTTrainer):  # type: ignore[name-defined,misc]
    """TRL's preparation of data without the rest of its trainer, which needs a model."""

    def __init__(self, tokenizer: Any, chat_template: str | None, completion_only: bool) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.completion_only_loss = completion_only


class _DPOPreparation(trl.DPOTrainer):  # type: ignore[name-defined,misc]
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer


@dataclass(frozen=True)
class Prepared:
    """Tokenized data of a run."""

    train: Any  # datasets.Dataset
    valid: Any  # None without validation
    num_tokens: int  # of the training data
    num_learned: int  # tokens whose loss is learned
    longest: int  # tokens of the longest example, before it is cut
    num_cut: int  # examples that are longer than seq_length
    num_dropped: int  # examples of which nothing to learn is left
    seq_length: int
    shown: Sequence[tuple[str, str]]  # one example: parts of the text, each with its use: context, learned, ...


def prepare(
    preparation: Preparation,
    train: Examples,
    valid: Examples | None,
    choose_length: Callable[[int], int],
    packing: bool,
) -> Prepared:
    """Tokenizes and cuts the data. `choose_length` gets the length of the longest example and returns the length to
    which examples are cut.
    """
    tokens = preparation.tokenize(train)
    lengths = preparation.lengths(tokens)
    seq_length = choose_length(max(lengths))
    cut = preparation.cut(tokens, seq_length)
    if not len(cut):
        raise ValueError(
            f"No example has anything to learn in its first {seq_length} tokens. Use a longer --seq-length."
        )
    kept = preparation.lengths(cut)
    num_learned = preparation.learned(cut)
    held = None if valid is None else preparation.cut(preparation.tokenize(valid), seq_length)
    return Prepared(
        train=preparation.cut(tokens, seq_length, packing=True) if packing else cut,
        valid=held if held is not None and len(held) else None,
        num_tokens=sum(kept),
        num_learned=num_learned,
        longest=max(lengths),
        num_cut=sum(length > seq_length for length in lengths),
        num_dropped=len(lengths) - len(kept),
        seq_length=seq_length,
        shown=preparation.show(train),
    )


def question(tokenizer: Any, row: Row) -> tuple[str, str, str]:
    """A row as a prompt for the model: the prompt as the model gets it, its last question, and the expected answer."""
    if "text" in row:
        words = row["text"].split(" ")
        start = " ".join(words[: max(1, len(words) // 2)])
        return start, start, row["text"][len(start) :]
    if "messages" in row:
        prompt, answers = row["messages"][:-1], row["messages"][-1:]
    else:
        prompt, answers = row["prompt"], row.get("completion", row.get("chosen"))
    if isinstance(prompt, str):
        return prompt, prompt, answers
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text, prompt[-1]["content"], answers[0]["content"]
