# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention on a GPU: every structure, block, dtype and extra against the truth in float64; no two runs
differ; and torch's flex_attention sees the same scores.

Most of the time goes into compiling kernels, so cases run in some processes beside each other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attention_support as support
import pytest
import torch

from twinflow.attention import BigBirdSparsityConfig, Extras, dense_attention, sparse_attention
from twinflow.attention.operators import attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="needs CUDA and Triton"
    ),
]
CASES = list(support.CASES.values())


@pytest.fixture(scope="module")
def problems() -> dict[str, str]:
    """What went wrong in each case. Cases that share kernels share a process."""
    num_processes = max(1, min(14, (os.cpu_count() or 2) - 1))
    groups: dict[object, list[str]] = {}
    for case in CASES:
        key = (case.block, case.dtype, case.is_causal, case.extra, case.head_dim)
        groups.setdefault(key, []).append(case.name)
    order = sorted(groups.values(), key=len, reverse=True)
    parts = [[name for group in order[start::num_processes] for name in group] for start in range(num_processes)]
    with ThreadPoolExecutor(num_processes) as pool:
        return {name: problem for found in pool.map(run_part, parts) for name, problem in found.items()}


def run_part(names: list[str]) -> dict[str, str]:
    paths = [str(Path(support.__file__).parent), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, support.__file__, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("block", support.BLOCKS)
@pytest.mark.parametrize("structure", support.STRUCTURES)
def test_against_the_truth(structure: str, block: int, problems: dict[str, str]) -> None:
    names = [case.name for case in CASES if (case.structure, case.block) == (structure, block)]
    assert {name: problems[name] for name in names if problems[name]} == {}


def test_no_two_runs_differ() -> None:
    """To the last bit, with long rows cut and everything that is summed over heads and batch."""
    case = support.Case("longformer", 64, "bf16", False, "shared relative", heads=(4, 2), batch=2, is_cut=True)
    layout, inputs = support.make_layout(case, 1500), support.make_inputs(case, 1500, 64, "cuda")
    tunings = support.make_tunings(case, 64, is_small=False)
    runs = []
    for _ in range(3):
        out = attend(inputs.q, inputs.k, inputs.v, layout, Extras(**inputs.options), "triton", tunings)
        runs.append(support.results(out, inputs))
    for run in runs[1:]:
        assert all(torch.equal(run[name], runs[0][name]) for name in run)


def test_in_a_thread_that_has_done_nothing_else() -> None:
    """Its memory comes from torch's cache: no other call has given this thread the GPU's context."""
    layout = BigBirdSparsityConfig(4, 128, num_sliding_window_blocks=3).layout(1024)
    q, k, v = (torch.randn(1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def run() -> torch.Tensor:
        return attend(q, k, v, layout, Extras(), "triton")

    here = run().clone()
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(run).result(), here)


def test_a_long_sequence() -> None:
    """Addresses beyond 2**31 elements, and rows of global tokens cut by the table's own numbers: the last rows, and
    the first, are those of a dense attention to what they keep."""
    num_tokens, heads, dim = 2**19, 34, 128
    pattern = BigBirdSparsityConfig(heads, 128, attention="unidirectional")
    q, k, v = (torch.randn(1, heads, num_tokens, dim, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    assert q.numel() > 2**31
    out = sparse_attention(q, k, v, pattern)
    layout = pattern.layout(num_tokens)
    cols = layout.cols[int(layout.row_starts[0, -2]) : int(layout.row_starts[0, -1])].long()
    tokens = (cols[:, None] * 128 + torch.arange(128)).flatten().to("cuda")
    own = slice(num_tokens - 128, num_tokens)
    scores = q[0, -1, own].double() @ k[0, -1, tokens].double().T * dim**-0.5
    scores = scores.masked_fill(tokens > torch.arange(num_tokens - 128, num_tokens, device="cuda")[:, None], -torch.inf)
    expected = scores.softmax(-1) @ v[0, -1, tokens].double()
    assert (out[0, -1, own].double() - expected).abs().max() < 2e-2
    first = dense_attention(*(t[:, -1:, :128].double() for t in (q, k, v)), layout.for_heads(heads - 1, heads))
    assert (out[0, -1, :128].double() - first[0, 0]).abs().max() < 2e-2


@pytest.mark.parametrize("extra", ["none", "padding", "bias"])
def test_flex_sees_the_same_scores(extra: str) -> None:
    case = support.Case("random", 128, "bf16", True, extra, heads=(4, 2), batch=2)
    layout, inputs = support.make_layout(case, 512), support.make_inputs(case, 512, 64, "cuda")
    options = {name: value.detach() if hasattr(value, "detach") else value for name, value in inputs.options.items()}
    found, expected = (
        sparse_attention(inputs.q, inputs.k, inputs.v, layout, backend=backend, **options)
        for backend in ("flex", "triton")
    )
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
