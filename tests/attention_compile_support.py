# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of attention for an H100 or H200, which needs no GPU, the way a call on one would.

`python tests/attention_compile_support.py DIM-DTYPE-BLOCK-HEADS-KV_HEADS[-FLAG] ...` prints a line of JSON for each
kernel of each call: what was called, the kernel's name, its registers, bytes spilled, shared memory, warps, how many
products on tensor cores and asynchronous copies it has, whether it can be launched through the driver, stale numbers,
and operands whose address may not be written. Flags: causal, odd (length), padding, softcap, window, heads (that
differ), portable (not the kernels for Hopper). It is a process of its own, since it gives Triton a driver that only
knows the target.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from machine_code import disassembled, unwritten_operands
from triton.backends.compiler import GPUTarget

from twinflow.attention import direct_launch, launch
from twinflow.attention import triton_attention as ours
from twinflow.attention.direct_launch import Given, filled
from twinflow.attention.extras import Extras, check_call
from twinflow.attention.launch import Call
from twinflow.attention.layout import from_dense
from twinflow.attention.tuning import tunings_for

LENGTH = 512
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Target:
    """As much of a driver as compiling asks for."""

    def __init__(self) -> None:
        self.utils = NoUtils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def usage(ptx: str) -> tuple[int, int]:
    """Registers of a thread and bytes spilled, by the assembler."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(source), "-o", str(Path(folder) / "out")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = [re.search(pattern, said) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")]
    assert numbers[0] is not None and numbers[1] is not None, said  # noqa: PT018
    return int(numbers[0][1]), int(numbers[1][1])


class NoDriver:
    """In place of the CUDA driver: the sizes of parameters that the compiled code declares, and the last launch."""

    def __init__(self, ptx: str) -> None:
        head = ptx[ptx.index(".entry") :]
        lines = [line for line in head[: head.index(")\n")].splitlines() if ".param" in line]
        self.sizes = [int(found[1]) if (found := re.search(r"\[(\d+)\]", line)) else _bytes(line) for line in lines]
        self.addresses: list[int] = []

    def has_params(self, function: int, sizes: Sequence[int]) -> bool:
        return list(sizes) == self.sizes

    def has_address(self, tensor_map: bytes, address: int) -> bool:
        return True  # the descriptor has no content

    def replace(self, address: ctypes.c_void_p, value: int) -> int:
        ctypes.memmove(address, value.to_bytes(8, "little"), 8)
        return 0

    def launch(self, *args: Any) -> int:
        params = zip(args[9], self.sizes, strict=True)
        self.addresses = [int.from_bytes(ctypes.string_at(at, 8), "little") for at, size in params if size >= 8]
        return 0


def _bytes(line: str) -> int:
    """Size of a scalar parameter."""
    found = re.search(r"\.[usfb](\d+)", line)
    assert found is not None, line
    return int(found[1]) // 8


class NoUtils:
    """In place of the functions of Triton's driver: descriptors that have no content."""

    def fill_tma_descriptor(self, *args: Any) -> bytes:
        return bytes(400)

    fill_tma_descriptor_tiled = fill_tma_descriptor


def stale_numbers(text: str) -> list[str]:
    """Lines in a loop over items that use a number that was loaded before this loop.

    The kernels for Hopper load the numbers of an item before the loop over items, and those of the next item in it. If
    such a number is only the bound of an inner loop, Triton 3.6 and 3.7 do not hand it on from item to item, so that
    the bound is always that of the first item.
    """
    found, lines, stop = [], text.splitlines(), 0
    for at, line in enumerate(lines):
        start = re.match(r"( *)(%[\w:]+ = )?scf\.for ", line)
        if start is None or at < stop:  # no loop, or one in a loop over items
            continue
        indent, stop = start[1], at + 1
        while not lines[stop].startswith(indent + "}"):
            stop += 1
        names: set[str] = set()
        for before in reversed(lines[:at]):
            if not before.startswith(indent):
                break
            load = re.match(rf"{indent}(%\w+) = tt\.load .*: !tt\.ptr<i32>", before)
            names |= {load[1]} if load is not None else set()
        found += [one.strip() for one in lines[at + 1 : stop] if names & set(re.findall(r"%\w+", one))]
    return found


def is_direct(compiled: Any, args: tuple[Any, ...], given: Given) -> bool:
    """Whether a DirectLaunch has all parameters of the compiled code, and writes the addresses of all tensors."""
    driver = NoDriver(compiled.asm["ptx"])
    direct_launch._driver = lambda: driver  # type: ignore[assignment,return-value]
    found = direct_launch.direct_launch(compiled, 1, args, given)
    if found is None:
        return False
    found(given, 0)
    return {given[name].data_ptr() for name in found.names} <= set(driver.addresses)  # type: ignore[union-attr]


def recorder(name: str) -> Callable[..., None]:
    """Instead of a launch."""

    def record(self: launch.Launch, given: Given, device: torch.device) -> None:
        kernel = self.kernel
        compiled = kernel.warmup(*filled(self.args, given), grid=(self.num_programs,), **self.options)
        registers, spilled = usage(compiled.asm["ptx"])
        text = compiled.asm["ttgir"]
        found = {
            "call": name,
            "kernel": kernel.fn.__name__,
            "registers": registers,
            "spilled_bytes": spilled,
            "shared_bytes": compiled.metadata.shared,
            "tensor_products": text.count("warp_group_dot "),
            "warps": compiled.metadata.num_warps,
            "copies": text.count("async_copy_global_to_local"),
            "is_direct": is_direct(compiled, self.args, given),
            "descriptor_copies": text.count("async_tma_copy_global_to_local"),
            "stale_numbers": stale_numbers(text),
            "unwritten_operands": unwritten_operands(disassembled(compiled.asm["ptx"])),
        }
        print(json.dumps(found), flush=True)

    return record


def compile_call(name: str) -> None:
    """Forward and backward of a call."""
    dim, dtype, block, heads, kv_heads, *flags = name.split("-")
    length = LENGTH - 12 if "odd" in flags else LENGTH
    num_blocks = -(-length // int(block))
    grid = torch.ones(num_blocks, num_blocks, dtype=torch.bool)
    grids = grid.expand(int(heads), -1, -1).clone()
    if "heads" in flags:  # a pattern for each head
        grids[1:, 0, 1:] = False
    layout = from_dense(grids, int(block), is_causal="causal" in flags)
    shape = (1, int(heads), length, int(dim))
    q = torch.zeros(shape, dtype=DTYPES[dtype])
    k = v = q[:, : int(kv_heads)]
    padding = torch.ones(1, length, dtype=torch.bool) if "padding" in flags else None
    extras = Extras(key_padding=padding, softcap=30.0 if "softcap" in flags else 0.0)
    layout = layout.windowed(100) if "window" in flags else layout
    sizes = check_call(q, k, v, layout, extras)
    tunings = tunings_for(sizes.head_dim, q.dtype)
    tunings = replace(tunings, hopper="portable" not in flags, hopper_tokens=math.inf)
    call = Call(layout, extras, sizes, q.dtype, q.device, tunings)
    launch.Launch.__call__ = recorder(name)  # type: ignore[method-assign]
    out, lse = ours.forward(q, k, v, call, extras)
    _, delta = ours.query_gradients(q, k, v, out, lse, out, call, extras)
    ours.key_gradients(q, k, v, lse, out, delta, call, extras)


if __name__ == "__main__":
    triton.runtime.driver.set_active(Target())
    for wanted in sys.argv[1:]:
        compile_call(wanted)
