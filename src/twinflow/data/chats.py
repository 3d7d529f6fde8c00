# SPDX-License-Identifier: Apache-2.0
"""Data for fine-tuning: chats, prompts with answers, instructions, pairs of answers, and plain text.

`read_examples` reads a JSONL or JSON file, `check_rows` rows of any other origin. Both detect the form of the data by
the names of the fields, check every row, and return rows in the forms that TRL's trainers take. Rows that cannot be
used raise one error that names their lines and the reasons, before anything else is done.

    form          fields of a row                                                   becomes
    messages      messages: [{"role": ..., "content": ...}, ...]                    messages
                  conversations: [{"from": ..., "value": ...}, ...]
    prompt        prompt and completion (or response): texts or lists of messages   prompt, completion
    instruction   instruction and output (or response); input and system, if any    prompt, completion
    preference    chosen and rejected, and prompt, if any: texts or messages        prompt, chosen, rejected
    text          text                                                              text
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twinflow.data.files import FINGERPRINT_BYTES, missing_path, reading
from twinflow.errors import invalid_value
from twinflow.files import open_regular, parse_json

JSONL: Final = (".jsonl", ".ndjson")
ROLES: Final = ("system", "user", "assistant")
# Names of roles in data of other projects.
ROLE_NAMES: Final = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
NUM_SHOWN: Final = 10  # problems that an error lists

Row = dict[str, Any]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Examples:
    """Checked rows of one form."""

    form: str
    rows: Sequence[Row]
    places: Sequence[str]  # where each row comes from, for errors: "line 7"
    fingerprint: str  # a checksum of the rows


def read_examples(path: Path, as_chat: bool) -> Examples:
    """The examples of a JSONL or JSON file. `as_chat`: prompts and answers that are texts become turns of a chat."""
    if path.suffix.lower() not in (*JSONL, ".json"):
        remedy = "Convert the data to JSONL, with one JSON object on each line."
        raise invalid_value("DATA", str(path), "a .jsonl or .json file, or the name of a dataset", remedy)
    if not path.exists():
        raise missing_path("DATA", path, "a .jsonl or .json file, or the name of a dataset")
    with reading(path), open_regular(path) as file:
        raw = file.read()
    if not raw.strip():
        raise ValueError(f"{path} is empty. Write one JSON object on each line.")
    found = _lines(raw) if path.suffix.lower() in JSONL else _array(raw, path)
    return check_rows(found, str(path), as_chat)


Found = tuple[str, Row | str]  # the place of a row, and the row or the reason why it cannot be read


def _lines(raw: bytes) -> Iterable[Found]:
    """The rows of a JSONL file. Blank lines are left out."""
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", _parse(line)


def _array(raw: bytes, path: Path) -> Iterable[Found]:
    """The rows of a JSON file: an array of objects, or JSON lines under another name."""
    rows = _parse(raw.removeprefix(b"\xef\xbb\xbf"), list)
    if isinstance(rows, list):
        return [(f"row {number}", _checked_object(row)) for number, row in enumerate(rows, start=1)]
    lines = list(_lines(raw))
    if len(lines) > 1 and not isinstance(lines[0][1], str):
        return lines
    raise ValueError(f"{path} cannot be used: {rows}. It must be an array of JSON objects, or have the suffix .jsonl.")


def _parse(raw: bytes, kind: type = dict) -> Any:
    """The JSON value of a line or file, or the reason why it has none."""
    try:
        value = parse_json(raw.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 text (byte {error.start + 1})"
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if kind is dict else f"line {error.lineno}, column {error.colno}"
        return f"it is not JSON: {error.msg[0].lower()}{error.msg[1:]} ({where})"
    except ValueError as error:
        text = str(error)
        return f"{text[0].lower()}{text[1:]}"
    return _checked_object(value) if kind is dict else value if isinstance(value, kind) else "it is no JSON array"


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    """Refuses a field that occurs twice: json would keep the last one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} occurs twice in an object")
    return made


def _checked_object(value: Any) -> Row | str:
    return value if isinstance(value, dict) else f"it is {_kind(value)}, but must be a JSON object"


def check_rows(found: Iterable[Found], source: str, as_chat: bool) -> Examples:
    """The rows in the form that the first usable row has. Raises a ValueError with the places and reasons of all rows
    that cannot be used.
    """
    form = ""
    rows: list[Row] = []
    places: list[str] = []
    problems: list[str] = []
    state = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for place, row in found:
        if isinstance(row, str):
            problems.append(f"{place}: {row}")
            continue
        try:
            own = detect_form(row)
            form = form or own
            if own != form:
                raise ValueError(
                    f"its fields are those of the form {own!r}, but the rows before have the form {form!r}"
                )
            made = FORMS[form](row, as_chat)
        except ValueError as error:
            problems.append(f"{place}: {error}")
            continue
        state.update(json.dumps(made, sort_keys=True).encode())
        rows.append(made)
        places.append(place)
    if problems:
        raise _unusable(source, problems)
    if not rows:
        raise ValueError(f"{source} has no rows. Write one JSON object on each line.")
    return Examples(form, rows, places, state.hexdigest())


def _unusable(source: str, problems: Sequence[str]) -> ValueError:
    more = f"\n  and {len(problems) - NUM_SHOWN:,} more" if len(problems) > NUM_SHOWN else ""
    many = "1 row" if len(problems) == 1 else f"{len(problems):,} rows"
    listed = "".join(f"\n  {problem}" for problem in problems[:NUM_SHOWN])
    them = "it" if len(problems) == 1 else "them"
    return ValueError(f"{source} has {many} that cannot be used:{listed}{more}\nCorrect or remove {them}.")


def detect_form(row: Mapping[str, Any]) -> str:
    """The form of a row, by the names of its fields."""
    has = row.keys()
    if "chosen" in has or "rejected" in has:
        return "preference"
    if "messages" in has or "conversations" in has:
        return "messages"
    if "instruction" in has:
        return "instruction"
    if "prompt" in has or "completion" in has:
        return "prompt"
    if "text" in has:
        return "text"
    names = ", ".join(map(repr, has)) or "none"
    raise ValueError(
        f"its fields ({names}) are those of no known form: messages; prompt and completion; instruction and output; "
        "prompt, chosen and rejected; or text"
    )


def _messages_row(row: Row, as_chat: bool) -> Row:
    name = "messages" if "messages" in row else "conversations"
    messages = _messages(row[name], name)
    _check_chat(messages, name)
    return {"messages": messages}


def _prompt_row(row: Row, as_chat: bool) -> Row:
    prompt, answer = _field(row, "prompt"), _field(row, "completion", "response")
    return {"prompt": _side(prompt, "prompt", as_chat), "completion": _side(answer, "completion", as_chat)}


def _instruction_row(row: Row, as_chat: bool) -> Row:
    asked = _text(_field(row, "instruction"), "instruction")
    if row.get("input") not in (None, ""):
        asked = f"{asked}\n\n{_text(row['input'], 'input')}"
    answer = _text(_field(row, "output", "response"), "output")
    if not as_chat:
        return {"prompt": f"{asked}\n\n", "completion": answer}
    system = [{"role": "system", "content": _text(row["system"], "system")}] if row.get("system") else []
    return {"prompt": [*system, _turn("prompt", asked)], "completion": [_turn("completion", answer)]}


def _preference_row(row: Row, as_chat: bool) -> Row:
    chosen, rejected, prompt = _field(row, "chosen"), _field(row, "rejected"), row.get("prompt")
    if chosen == rejected:
        raise ValueError("chosen and rejected are equal")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(f"chosen is {_kind(chosen)} and rejected is {_kind(rejected)}, but both must be of one kind")
    if isinstance(chosen, str):
        given = _side(_field(row, "prompt"), "prompt", as_chat)
        is_chat = not isinstance(given, str)
        return {"prompt": given, **{name: _side(row[name], name, is_chat) for name in ("chosen", "rejected")}}
    sides = {name: _messages(row[name], name) for name in ("chosen", "rejected")}
    for name, messages in sides.items():
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"the last message of {name} is from {messages[-1]['role']!r}, but must be an answer")
    if all(messages[0]["role"] == "assistant" for messages in sides.values()):
        return {"prompt": _side(_field(row, "prompt"), "prompt", True), **sides}
    # Both contain the whole chat. Its beginning is the prompt; a text in `prompt` repeats it.
    num_same = next((i for i, (a, b) in enumerate(zip(*sides.values(), strict=False)) if a != b), 0)
    if not num_same or sides["chosen"][:num_same][-1]["role"] != "user":
        raise ValueError("chosen and rejected must be the same chat up to the last answer")
    if isinstance(prompt, list) and _messages(prompt, "prompt") != sides["chosen"][:num_same]:
        raise ValueError("prompt differs from the beginning of chosen")
    return {"prompt": sides["chosen"][:num_same], **{name: sides[name][num_same:] for name in sides}}


def _text_row(row: Row, as_chat: bool) -> Row:
    return {"text": _text(row["text"], "text")}


FORMS: Final[Mapping[str, Callable[[Row, bool], Row]]] = {
    "messages": _messages_row,
    "prompt": _prompt_row,
    "instruction": _instruction_row,
    "preference": _preference_row,
    "text": _text_row,
}


def _field(row: Row, *names: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"the field {names[0]!r} is {'null' if names[0] in row else 'missing'}")


def _side(value: Any, name: str, as_chat: bool) -> str | Messages:
    """A prompt or an answer: a text, or messages."""
    if isinstance(value, list):
        messages = _messages(value, name)
        wanted = "user" if name == "prompt" else "assistant"
        if messages[-1]["role"] != wanted:
            raise ValueError(
                f"the last message of {name} is from {messages[-1]['role']!r}, but must be from {wanted!r}"
            )
        return messages
    text = _text(value, name)
    return [_turn(name, text)] if as_chat else text


def _turn(name: str, text: str) -> dict[str, str]:
    return {"role": "user" if name == "prompt" else "assistant", "content": text}


def _messages(value: Any, name: str) -> Messages:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_kind(value)}, but must be a list of messages")
    if not value:
        raise ValueError(f"{name} is an empty list")
    return [_message(one, f"{name}[{index}]") for index, one in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_kind(value)}, but must be an object with role and content")
    if value.get("tool_calls") or value.get("role") in ("tool", "function"):
        raise ValueError(f"{name} calls a tool. Use TRL's SFTTrainer with TwinMixin for such chats")
    role = _field_of(value, name, "role", "from")
    if not isinstance(role, str):
        raise ValueError(f"the role of {name} is {_kind(role)}, but must be a text")
    role = ROLE_NAMES.get(role, role)
    if role not in ROLES:
        raise ValueError(f"the role of {name} is {role!r}, but must be one of {', '.join(map(repr, ROLES))}")
    content = _field_of(value, name, "content", "value")
    if isinstance(content, list):
        raise ValueError(f"the content of {name} is a list of parts, but must be a text: images are not supported")
    return {"role": role, "content": _text(content, f"the content of {name}")}


def _field_of(value: Row, where: str, *names: str) -> Any:
    try:
        return _field(value, *names)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_chat(messages: Messages, name: str) -> None:
    """A chat to learn from has questions and answers, and ends with an answer."""
    roles = [message["role"] for message in messages]
    if "system" in roles[1:]:
        raise ValueError(f"{name}[{roles.index('system', 1)}] is from 'system', but only the first message may be")
    if "assistant" not in roles:
        raise ValueError(f"{name} has no message from 'assistant', so there is no answer to learn")
    if "user" not in roles or roles.index("user") > roles.index("assistant"):
        raise ValueError(f"{name} has an answer from 'assistant' before the first message from 'user'")
    if roles[-1] != "assistant":
        raise ValueError(f"the last message of {name} is from {roles[-1]!r}, but must be an answer from 'assistant'")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_kind(value)}, but must be a text")
    if not value.strip():
        raise ValueError(f"{name} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"\\u{ord(value[error.start]):04x}"
        raise ValueError(f"{name} has the character {code}, which is half of a pair and no text") from None
    return value


def _kind(value: Any) -> str:
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)
