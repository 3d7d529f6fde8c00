# SPDX-License-Identifier: Apache-2.0
"""Data for fine-tuning: every form is read, and a row that cannot be used is refused with its line and the reason."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from twinflow.data.chats import NUM_SHOWN, check_rows, read_examples

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
GOOD = {
    "messages": {"messages": [USER, ANSWER]},
    "prompt": {"prompt": "Hi", "completion": "Hello"},
    "instruction": {"instruction": "Add.", "input": "1 2", "output": "3"},
    "preference": {"prompt": "Hi", "chosen": "Hello", "rejected": "What"},
    "text": {"text": "Once upon a time"},
}


def chats(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def raw(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


# The second line of a file whose first line is good: its form, the line, and the reason in the error.
BROKEN: list[tuple[str, Any, str]] = [
    ("messages", raw('{"messages": [}'), "it is not JSON: expecting value (column 15)"),
    ("messages", raw('{"messages": ["a"'), "it is not JSON"),
    ("messages", raw(b'{"messages": "\xff"}'), "it is not UTF-8 text (byte 15)"),
    ("messages", raw('["a"]'), "it is a list, but must be a JSON object"),
    ("messages", raw('"a"'), "it is a text, but must be a JSON object"),
    ("messages", raw("null"), "it is null, but must be a JSON object"),
    ("messages", raw('{"text": "a", "text": "b"}'), "the field 'text' occurs twice in an object"),
    ("messages", raw("[" * 100_000), "nested more than 100 levels deep"),
    ("messages", {"question": "a", "reply": "b"}, "its fields ('question', 'reply') are those of no known form"),
    ("messages", {}, "its fields (none) are those of no known form"),
    ("messages", {"text": "a"}, "the form 'text', but the rows before have the form 'messages'"),
    ("messages", {"messages": "Hi"}, "messages is a text, but must be a list of messages"),
    ("messages", {"messages": None}, "messages is null, but must be a list of messages"),
    ("messages", chats(), "messages is an empty list"),
    ("messages", chats(USER, "Hello"), "messages[1] is a text, but must be an object with role and content"),
    ("messages", chats(USER, {"content": "Hello"}), "messages[1]: the field 'role' is missing"),
    ("messages", chats(USER, {"role": "assistant"}), "messages[1]: the field 'content' is missing"),
    ("messages", chats(USER, {**ANSWER, "content": None}), "messages[1]: the field 'content' is null"),
    ("messages", chats(USER, {**ANSWER, "content": 3}), "the content of messages[1] is a number, but must be a text"),
    ("messages", chats(USER, {**ANSWER, "content": " "}), "the content of messages[1] is empty"),
    ("messages", chats(USER, {**ANSWER, "content": [{"type": "image"}]}), "images are not supported"),
    ("messages", chats(USER, {**ANSWER, "role": "robot"}), "the role of messages[1] is 'robot', but must be one of"),
    ("messages", chats(USER, {**ANSWER, "role": 1}), "the role of messages[1] is a number, but must be a text"),
    ("messages", chats(USER, {"role": "assistant", "tool_calls": [1]}), "messages[1] calls a tool"),
    ("messages", chats(USER), "messages has no message from 'assistant'"),
    ("messages", chats(USER, ANSWER, USER), "the last message of messages is from 'user'"),
    ("messages", chats(ANSWER), "an answer from 'assistant' before the first message from 'user'"),
    ("messages", chats(USER, {**USER, "role": "system"}, ANSWER), "messages[1] is from 'system', but only the first"),
    ("messages", chats(USER, {**ANSWER, "content": "\ud800"}), "has the character \\ud800"),
    ("prompt", {"prompt": "Hi"}, "the field 'completion' is missing"),
    ("prompt", {"completion": "Hi"}, "the field 'prompt' is missing"),
    ("prompt", {"prompt": "Hi", "completion": ""}, "completion is empty"),
    ("prompt", {"prompt": "Hi", "completion": 3.5}, "completion is a number, but must be a text"),
    ("prompt", {"prompt": [ANSWER], "completion": [ANSWER]}, "prompt is from 'assistant', but must be from 'user'"),
    ("prompt", {"prompt": [USER], "completion": [USER]}, "completion is from 'user', but must be from 'assistant'"),
    ("instruction", {"instruction": "Add."}, "the field 'output' is missing"),
    ("instruction", {"instruction": "Add.", "output": None}, "the field 'output' is null"),
    ("instruction", {"instruction": True, "output": "3"}, "instruction is true or false, but must be a text"),
    ("instruction", {"instruction": "Add.", "input": [1], "output": "3"}, "input is a list, but must be a text"),
    ("preference", {"prompt": "Hi", "chosen": "a"}, "the field 'rejected' is missing"),
    ("preference", {"chosen": "a", "rejected": "b"}, "the field 'prompt' is missing"),
    ("preference", {"prompt": "Hi", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
    ("preference", {"prompt": "Hi", "chosen": [ANSWER], "rejected": "a"}, "but both must be of one kind"),
    ("preference", {"chosen": [USER, ANSWER], "rejected": [USER]}, "the last message of rejected is from 'user'"),
    (
        "preference",
        {"chosen": [USER, ANSWER], "rejected": [{**USER, "content": "Ho"}, ANSWER]},
        "must be the same chat up to the last answer",
    ),
    ("text", {"text": ""}, "text is empty"),
    ("text", {"text": {"a": 1}}, "text is an object, but must be a text"),
]


def test_there_are_more_than_thirty() -> None:
    assert len(BROKEN) >= 30


@pytest.mark.parametrize(("form", "row", "reason"), BROKEN, ids=[f"{i}-{row[0]}" for i, row in enumerate(BROKEN)])
def test_a_broken_row_is_refused_by_line_and_reason(form: str, row: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    path.write_bytes(json.dumps(GOOD[form]).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match="1 row that cannot be used") as error:
        read_examples(path, as_chat=True)
    assert "line 2: " in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("data.jsonl", "", "is empty"),
        ("data.jsonl", "\n \n", "is empty"),
        ("data.json", "{", "is not JSON"),
        ("data.json", "3", "it is no JSON array"),
        ("data.json", "[]", "has no rows"),
        ("data.json", '[{"text": "a"}, 3]', "row 2: it is a number"),
        ("data.csv", "text\na\n", "a .jsonl or .json file, or the name of a dataset"),
        ("data.txt", "a", "a .jsonl or .json file, or the name of a dataset"),
    ],
)
def test_a_broken_file_is_refused(name: str, content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        read_examples(tmp_path / name, as_chat=True)
    assert name in str(error.value)


def test_a_missing_file_is_named_with_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"there is 'chats.jsonl' in that folder"):
        read_examples(tmp_path / "chat.jsonl", as_chat=True)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="regular file"):
        read_examples(path, as_chat=True)


def test_all_broken_rows_are_counted_and_the_first_are_listed() -> None:
    with pytest.raises(ValueError, match="25 rows that cannot be used") as error:
        check_rows(((f"line {i}", "it is bad") for i in range(25)), "data.jsonl", as_chat=True)
    assert str(error.value).count("it is bad") == NUM_SHOWN
    assert "and 15 more" in str(error.value)


@pytest.mark.parametrize("form", GOOD)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_every_form_is_detected(form: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    rows = [GOOD[form]] * 3
    text = json.dumps(rows) if suffix == ".json" else "\n\n".join(map(json.dumps, rows)) + "\n"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    found = read_examples(path, as_chat=True)
    assert found.form == form
    assert len(found.rows) == 3
    assert found.places[1] == ("row 2" if suffix == ".json" else "line 3")


def only(row: dict[str, Any], as_chat: bool = True) -> Any:
    return check_rows([("line 1", row)], "data", as_chat).rows[0]


def test_rows_become_those_of_trl() -> None:
    turns = [USER, ANSWER]
    assert only(GOOD["prompt"]) == {"prompt": [USER], "completion": [ANSWER]}
    assert only(GOOD["prompt"], as_chat=False) == GOOD["prompt"]
    asked = only({**GOOD["instruction"], "system": "Be brief."})
    assert [m["role"] for m in asked["prompt"]] == ["system", "user"]
    assert asked["prompt"][1]["content"] == "Add.\n\n1 2"
    assert only(GOOD["instruction"], as_chat=False) == {"prompt": "Add.\n\n1 2\n\n", "completion": "3"}
    shared = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    assert only(shared) == {"messages": turns}
    other = {**ANSWER, "content": "What"}
    pair = {"prompt": [USER], "chosen": [ANSWER], "rejected": [other]}
    assert only(pair) == pair
    assert only({"chosen": [USER, ANSWER], "rejected": [USER, other]}) == pair
    assert only({"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, other]}) == pair
    assert only(GOOD["preference"]) == pair
    assert only(GOOD["preference"], as_chat=False) == GOOD["preference"]


def test_the_fingerprint_is_that_of_the_rows() -> None:
    one, two = (check_rows([("line 1", {"text": text})], "data", as_chat=True) for text in ("a", "b"))
    assert one.fingerprint != two.fingerprint
