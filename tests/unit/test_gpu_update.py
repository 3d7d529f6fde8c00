# SPDX-License-Identifier: Apache-2.0
"""The fused GPU update without a GPU: the kernel in Triton's interpreter has the bits of host kernels and references,
and compiled for a GPU it has no operation that could change them."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gpu_update_support as support
import pytest
import torch
from interpreter_support import in_the_interpreter, needs_triton, wanted_cases
from support import OPTIONS, make_store

from twinflow import gpu
from twinflow.device import Device
from twinflow.gpu import FusedUpdate, Piece
from twinflow.gpu.update import _tile_table
from twinflow.offload.device_updater import DeviceUpdater
from twinflow.offload.plan import RESIDENT
from twinflow.offload.settings import Tuning
from twinflow.optim.twin_build import StateKind
from twinflow.rules import RULES, formats, reference
from twinflow.rules.segment import Segment, new_store


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str]:
    """What went wrong in each case that this session runs, all of them in one process with the interpreter on."""
    return in_the_interpreter(support.__file__, *wanted_cases(request))


@needs_triton
@pytest.mark.parametrize("name", [case.name for case in support.QUICK])
def test_the_kernel_has_the_bits_of_the_truth(name: str, interpreted: dict[str, str]) -> None:
    assert not interpreted[name], interpreted[name]


@needs_triton
@pytest.mark.matrix
@pytest.mark.parametrize("name", [case.name for case in support.CASES.values() if case not in support.QUICK])
def test_the_kernel_has_the_bits_of_the_truth_everywhere(name: str, interpreted: dict[str, str]) -> None:
    assert not interpreted[name], interpreted[name]


@needs_triton
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_programs": 3, "tile": 1024}, marks=pytest.mark.matrix),
        pytest.param({"max_programs": 2}, marks=pytest.mark.matrix),
        pytest.param({"tile": 2048}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_a_bounded_grid_changes_no_bit(options: dict[str, Any]) -> None:
    """Fewer programs than tiles, more than one tile in all: every rule and format, pieces left out in a step."""
    names = [case.name for case in {(case.rule, case.format): case for case in support.DEFAULT}.values()]
    found = in_the_interpreter(__file__, json.dumps(options), *names)
    assert found == dict.fromkeys(names, "")


def run_bounded(options: str, *names: str) -> None:
    """In a process of its own: the same cases with an update that is built so."""
    support.FusedUpdate = partial(FusedUpdate, **json.loads(options))  # type: ignore[misc,assignment]
    sys.argv[1:] = names
    support.main()


@needs_triton
def test_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.update, "is_interpreting", lambda: True)  # or weights on the host would be refused
    pieces = [Piece(torch.zeros(n), offset, n, 0) for n, offset in ((10_000, 0), (5000, 10_240))]
    programs = {n: FusedUpdate(RULES["adamw"], pieces, n)._num_programs for n in (None, 1, 3, 100)}
    assert programs == {None: 15, 1: 1, 3: 3, 100: 5}  # of 1024 elements each, or of up to 4096
    with pytest.raises(AssertionError):
        FusedUpdate(RULES["adamw"], pieces, 0)


def test_the_bound_reaches_the_update() -> None:
    kind = StateKind(RULES["adamw"], None, "fp32", tuning=Tuning(update_programs=33))
    updater = kind.new_updaters(Device(), torch.device("cpu"))[RESIDENT]
    assert isinstance(updater, DeviceUpdater)
    assert updater.max_programs == 33


def test_cases_hold_every_rule_and_format() -> None:
    assert {(case.rule, case.format) for case in support.QUICK} == set(support.RULE_FORMATS)
    assert len(support.CASES) == len(support.DEFAULT) + len(support.REST)


def compiled(
    rule: str, format: str, weight: str, monkeypatch: pytest.MonkeyPatch, cache: Path, is_bounded: bool = False
) -> str:
    """The PTX for an H100 or H200 of a bf16 gradient's update. No GPU is needed for that."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from twinflow.gpu import kernel

    state = {"fp32": "*fp32", "bf16": "*i16", "int8": "*u8", "4bit": "*u8"}[format]
    master = {"split": "*i16", "fp16": "*fp32", "fp32": None, "none": None}[weight]
    names = (RULES[rule].states[0], None) if format == "4bit" else RULES[rule].states
    states = [state if name else None for name in names]
    types = [
        "*i64",
        "*i32",
        "*fp64",
        "*i16",
        master,
        *states,
        *["*fp32" if format in formats.SCALED else None] * 2,
        "i32",
    ]
    constants = [rule, format, weight, 16, 4096 if is_bounded else 1024, is_bounded]
    signature = {
        name: kind or "constexpr"
        for name, kind in zip(kernel.update.arg_names, types + [None] * len(constants), strict=True)
    }
    values = [*([None] * len(types)), *constants]
    constexprs = {(i,): values[i] for i, kind in enumerate(signature.values()) if kind == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types[:-1]) if kind}
    source = ASTSource(kernel.update, signature, constexprs, aligned)
    options = {"num_warps": 32 if is_bounded else 8, "enable_fp_fusion": False}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@needs_triton
@pytest.mark.parametrize(
    ("rule", "format", "weight"),
    [
        ("adamw", "fp32", "split"),
        ("adam", "int8", "split"),
        ("adamw", "4bit", "none"),
        ("adagrad", "bf16", "fp16"),
        ("sgd", "fp32", "fp32"),
    ],
)
def test_compiled_it_neither_fuses_nor_flushes(
    rule: str, format: str, weight: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = compiled(rule, format, weight, monkeypatch, tmp_path)
    assert not re.search(r"\bfma\.|\.ftz|\.approx|\.full\.f32", text)
    if rule != "sgd":
        assert "div.rn.f32" in text
        assert "sqrt.rn.f32" in text


@needs_triton
@pytest.mark.parametrize("is_bounded", [False, True])
def test_compiled_it_reads_and_writes_wide_words(
    is_bounded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Four elements at a time for each thread, and no value crosses to another one."""
    text = compiled("adamw", "fp32", "split", monkeypatch, tmp_path, is_bounded)
    assert (text.count("ld.global.v4.b32"), text.count("st.global.v4.b32")) == (2, 2)  # the states
    assert (text.count("ld.global.v2.b32"), text.count("st.global.v2.b32")) == (3, 2)  # gradient and both halves
    assert "shared" not in re.sub(r"//.*|\.extern.*", "", text)


def test_tiles_cover_each_piece_once() -> None:
    weights = [torch.zeros(n, dtype=torch.bfloat16) for n in (1, 3000, 1024)]
    pieces = [Piece(weights[0], 0, 1, 0), Piece(weights[1], 256, 3000, 1280), Piece(weights[2], 4096, 1024, 0)]
    table = _tile_table(pieces).tolist()
    assert [row[1:] for row in table] == [
        [0, 0, 1, 0],
        [256, 10, 1024, 1],
        [1280, 18, 1024, 1],
        [2304, 26, 952, 1],
        [4096, 0, 1024, 2],
    ]
    assert table[2][0] - weights[1].data_ptr() == 2048


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not gpu.is_available()


@needs_triton
def test_weights_of_the_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(AssertionError, match="cpu"):
        FusedUpdate(RULES["adamw"], [Piece(torch.zeros(128), 0, 128, 0)])


def test_the_truth_asks_for_no_device() -> None:
    """On the meta device any tensor made on the host by mistake is an error."""
    for rule, format in support.RULE_FORMATS:
        for weight in (torch.bfloat16, torch.float16):
            store = make_store(RULES[rule], format, weight, 300, split=weight == torch.bfloat16)
            there = new_store(
                RULES[rule],
                format,
                torch.empty(300, device="meta"),
                torch.empty(300, dtype=weight, device="meta"),
                split=store.is_split,
            )
            assert {t.device.type for t in support.buffers(there).values()} == {"meta"}
            grad = torch.empty(300, dtype=torch.bfloat16, device="meta")
            reference.update([Segment(RULES[rule], RULES[rule].hyper(OPTIONS, 1), grad, there)])
    assert formats.random_bits(0, 8, (1, 2), torch.device("meta")).is_meta


if __name__ == "__main__":
    run_bounded(*sys.argv[1:])
