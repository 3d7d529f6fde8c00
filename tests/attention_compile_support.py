# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of attention for an H100 or H200, which needs no GPU, the way a call on one would.

`python tests/attention_compile_support.py DIM-DTYPE-BLOCK-HEADS-KV_HEADS[-causal][-portable] ...` prints a line of JSON
for each kernel of each call: what was called, the kernel's name, its registers, bytes spilled, shared memory, warps,
and how many products on tensor cores and asynchronous copies it has. It is a process of its own, since it gives Triton
a driver that only knows the target.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from twinflow.attention import launch
from twinflow.attention import triton_attention as ours
from twinflow.attention.extras import Extras, check_call
from twinflow.attention.launch import Call
from twinflow.attention.layout import from_dense
from twinflow.attention.tuning import tunings_for

LENGTH = 512
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Target:
    """As much of a driver as compiling asks for."""

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


def recorder(name: str) -> Callable[..., None]:
    """Instead of a launch."""

    def record(self: launch.Launch, *args: Any) -> None:
        kernel = self.kernel
        compiled = kernel.warmup(*args, grid=(self.num_programs,), **self.options)
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
            "descriptor_copies": text.count("async_tma_copy_global_to_local"),
        }
        print(json.dumps(found), flush=True)

    return record


def compile_call(name: str) -> None:
    """Forward and backward of a call."""
    dim, dtype, block, heads, kv_heads, *flags = name.split("-")
    num_blocks = LENGTH // int(block)
    grid = torch.ones(num_blocks, num_blocks, dtype=torch.bool)
    layout = from_dense(grid, int(block), is_causal="causal" in flags, num_heads=int(heads))
    shape = (1, int(heads), LENGTH, int(dim))
    q = torch.zeros(shape, dtype=DTYPES[dtype])
    k = v = q[:, : int(kv_heads)]
    extras = Extras()
    sizes = check_call(q, k, v, layout, extras)
    tunings = tunings_for(sizes.head_dim, q.dtype)
    tunings = replace(tunings, hopper=tunings.hopper and "portable" not in flags)
    call = Call(layout, extras, sizes, q.dtype, q.device, tunings)
    launch.Launch.__call__ = recorder(name)  # type: ignore[method-assign]
    out, lse = ours.forward(q, k, v, call)
    _, delta = ours.query_gradients(q, k, v, out, lse, out, call)
    ours.key_gradients(q, k, v, lse, out, delta, call)


if __name__ == "__main__":
    triton.runtime.driver.set_active(Target())
    for wanted in sys.argv[1:]:
        compile_call(wanted)
