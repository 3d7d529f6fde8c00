"""What a key of the config is: its type, its default, and what twinflow does with it.

Every key is declared once, as a field of a `Section`, with one of three functions: `honoured` (it does what it says),
`unused` (accepted; no effect here, for a stated reason) or `refused` (only its "off" values pass, because ignoring the
rest would change a result or the memory needed). The loader, the notes, the JSON Schema and the docs read these
declarations and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.fields import FieldInfo

HONOURED: Final = "honoured"
UNUSED: Final = "no effect"
REFUSED: Final = "refused"


@dataclass(frozen=True)
class Rule:
    """What is done with a key."""

    kind: str  # HONOURED, UNUSED or REFUSED
    text: str  # what it does, why it does nothing, or what to use instead
    off: tuple[object, ...] = ()  # REFUSED: values that pass beside the default; UNUSED: values that need no note
    switch: Callable[[Any], bool] | None = None  # REFUSED: whether the value asks for the feature, where `off` is short
    hints: Mapping[str, str] | None = None  # value -> what to use instead, for values that are not allowed
    ours: bool = False  # a key that DeepSpeed does not have
    for_host: bool = False  # no effect where no optimizer state is on the host

    def __call__(self, schema: dict[str, Any]) -> None:
        """Pydantic calls this with the key's JSON Schema."""
        schema["x-twinflow"] = self.kind


@dataclass(frozen=True)
class Allowed:
    """The values a type takes, in words."""

    text: str


class Section(BaseModel):
    """An object of the config: frozen, strictly typed, with no keys but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


def honoured(
    default: Any, text: str, *, hints: Mapping[str, str] | None = None, ours: bool = False, for_host: bool = False
) -> Any:
    """A key that does what it says."""
    rule = Rule(HONOURED, text, hints=hints, ours=ours, for_host=for_host)
    return Field(default, description=text, json_schema_extra=rule)


def needed(text: str) -> Any:
    """An honoured key that its section cannot do without."""
    return Field(description=text, json_schema_extra=Rule(HONOURED, text))


def unused(default: Any, because: str, *, quiet: tuple[object, ...] = ()) -> Any:
    """A key that is accepted and does nothing here; `quiet` values ask for what happens anyway."""
    rule = Rule(UNUSED, because, quiet)
    return Field(default, description=f"No effect here: {because}", json_schema_extra=rule)


def refused(
    default: Any, instead: str, *, off: tuple[object, ...] = (), switch: Callable[[Any], bool] | None = None
) -> Any:
    """A key that only passes while it is off; `instead` says what to use."""
    rule = Rule(REFUSED, instead, off, switch)
    return Field(default, description=f"Only off: {instead}", json_schema_extra=rule)


def section(kind: type[Section], text: str) -> Any:
    """An object with keys of its own, each with its own rule."""
    return Field(default_factory=kind, description=text)


def maybe_section(text: str) -> Any:
    """The same, where leaving it out is not the same as leaving it empty."""
    return Field(None, description=text)


def rule_of(info: FieldInfo) -> Rule | None:
    """The rule of a key; None for a section."""
    return info.json_schema_extra if isinstance(info.json_schema_extra, Rule) else None


def asks_for(rule: Rule, info: FieldInfo, value: object) -> bool:
    """Whether a refused key is on."""
    if rule.switch is not None:
        return rule.switch(value)
    return value != info.default and value not in rule.off


def is_given(value: object) -> bool:
    """Whether anything is there at all."""
    return value is not None and value != {}


def is_on(section: object) -> bool:
    """Whether a section that is not looked into asks for its feature."""
    return switch_of(section) is not None


def switch_of(section: object) -> tuple[str, ...] | None:
    """The key in it that does: its own `enabled` decides, else that of any part of it."""
    if not isinstance(section, Mapping):
        return None
    if "enabled" in section:
        return None if section["enabled"] is False else ("enabled",)
    for name, part in section.items():
        below = switch_of(part)
        if below is not None:
            return (name, *below)
    return None


def _whole(value: object) -> object:
    """5e8 is how people write 500000000: a float with a whole value stands for it."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _never(value: object) -> object:
    """`steps_per_print: Infinity`, as Accelerate writes it, means never."""
    return None if value == math.inf else _whole(value)


def _sequence(value: object) -> object:
    """JSON has lists, Python has tuples: either will do."""
    return tuple(value) if isinstance(value, list) else value


def _dtype(value: object) -> object:
    """One name for each dtype; what is no name of one is left for the type to refuse."""
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
    for short, names in (("fp32", ("float32", "float")), ("bf16", ("bfloat16",)), ("fp16", ("float16", "half"))):
        if name in (short, *names):
            return short
    return value


def _torch_dtype(value: object) -> object:
    """The same with torch's names."""
    short = _dtype(value)
    return {"bf16": "bfloat16", "fp16": "float16"}.get(short, value) if isinstance(short, str) else value


def _capital(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


_INTEGER: Final = BeforeValidator(_whole)
Whole = Annotated[int, _INTEGER, Field(ge=0), Allowed("a whole number >= 0")]
Positive = Annotated[int, _INTEGER, Field(ge=1, le=2**63 - 1), Allowed("a whole number >= 1")]
AnyWhole = Annotated[int, _INTEGER, Allowed("a whole number")]
Iteration = Annotated[int, _INTEGER, Field(ge=-1), Allowed("a whole number >= -1")]
Stage = Annotated[int, _INTEGER, Field(ge=0, le=3), Allowed("0, 1, 2, 3")]
Power = Annotated[int, _INTEGER, Field(ge=0, le=127), Allowed("a whole number >= 0 and <= 127")]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), Allowed("a finite number >= 0")]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("a finite number > 0")]
Number = Annotated[float, Field(allow_inf_nan=False), Allowed("a finite number")]
Share = Annotated[float, Field(ge=0, le=1), Allowed("a number >= 0 and <= 1")]
Settled = Annotated[float, Field(gt=0, lt=1), Allowed("a number above 0 and below 1")]
Ratio = Annotated[Share | Literal["auto"], Allowed('a number >= 0 and <= 1, or "auto"')]
_Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[_Beta, _Beta], BeforeValidator(_sequence), Allowed("two numbers >= 0 and < 1")]
Threads = Annotated[int, _INTEGER, Field(ge=1, le=1024), Allowed("a whole number from 1 to 1024")]
Single = Annotated[float, Field(ge=0, le=3.4028234663852886e38), Allowed("a number >= 0 that fits fp32")]
Buckets = Annotated[int, _INTEGER, Field(ge=128, multiple_of=128), Allowed("a multiple of 128, at least 128")]
_Rates = tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]
Rates = Annotated[Amount | _Rates, BeforeValidator(_sequence), Allowed("a finite number >= 0, or a list of them")]
Names = Annotated[tuple[str, ...], BeforeValidator(_sequence), Allowed("a list of strings")]
Every = Annotated[
    Annotated[int, Field(ge=1)] | None, BeforeValidator(_never), Allowed("a whole number >= 1, or null for never")
]
Dtype = Annotated[
    Literal["fp32", "bf16", "fp16"],
    BeforeValidator(_dtype),
    WithJsonSchema({"enum": ["fp32", "bf16", "fp16", "float32", "bfloat16", "float16", "float", "half"]}),
    Allowed("'fp32', 'bf16', 'fp16', or torch's names for them"),
]
AutocastDtype = Annotated[
    Literal["bfloat16", "float16"],
    BeforeValidator(_torch_dtype),
    WithJsonSchema({"enum": ["bfloat16", "float16", "bf16", "fp16", "half", "torch.bfloat16", "torch.float16"]}),
    Allowed("'bfloat16', 'float16', or short 'bf16', 'fp16'"),
]
Side = Literal["auto", "device", "host"]  # where something is kept
Tags = Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capital), Allowed("'Ignore', 'Warn', 'Fail'")]
Free = Mapping[str, Any]  # a section whose keys are not looked into
