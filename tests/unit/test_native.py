# SPDX-License-Identifier: Apache-2.0
"""Loading, variants, threads, the GIL, forks, and bad input."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_support import Ended, run_script
from support import OPTIONS, assert_same_bits, buffers, clone, make_gradient, make_store

from twinflow import native
from twinflow.native.library import find_library, load, open_library
from twinflow.native.threads import default_threads
from twinflow.rules import RULES, reference
from twinflow.rules.segment import Segment, Store

needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not installed")
ADAMW = RULES["adamw"]


def run_forked(code: str, folder: Path, **environment: str) -> Ended:
    """In a process that has torch, but not the library."""
    script = folder / "script.py"
    script.write_text(code)
    return run_script(script, folder, folder, **environment)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


@needs_native
def test_the_library_is_found_beside_the_package() -> None:
    loaded = load()
    assert loaded.problem is None
    assert loaded.path == (find_library({}) if "TWINFLOW_LIBRARY" not in os.environ else find_library(os.environ))
    assert native.isa() in native.isa_names()


MISSING = """
import torch, twinflow
from twinflow import native
from twinflow.optim import HostAdamW
weight = torch.nn.Parameter(torch.ones(300))
weight.grad = torch.ones(300)
HostAdamW([weight], lr=0.1).step()
native.accumulate(torch.zeros(3), torch.ones(3)); native.cast(torch.zeros(3), torch.ones(3))
assert native.sum_squares([torch.ones(3)]) == [3.0]
native.set_threads(2); assert native.get_threads() >= 1
print(native.available(), native.isa(), round(weight[0].item(), 3))
from twinflow.optim.twin import TwinOptimizer
model = torch.nn.Linear(4, 4)
for device in (model, list(model.parameters())):
    try:
        TwinOptimizer(device, early=device is model)
    except RuntimeError as error:
        print(error)
model(torch.ones(1, 4)).sum().backward()  # the model is as it was
torch.optim.SGD(model.parameters(), lr=0.1).step()
assert not model._forward_pre_hooks and type(model.weight) is torch.nn.Parameter
"""


@pytest.mark.parametrize(
    "kind",
    ["another library", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("missing", "not a library"))],
)
def test_without_the_library_only_host_optimizers_work(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "libtwinflow.so"
    if kind == "not a library":
        path.write_text("this is text")
    elif kind == "another library":
        import _ctypes

        path = Path(_ctypes.__file__)
    result = run_forked(MISSING, tmp_path, TWINFLOW_LIBRARY=str(path))
    first, *refused = result.stdout.splitlines()
    assert first.split() == ["False", "torch", "0.899"], result.stderr
    assert len(refused) == 2
    for line in refused:
        assert re.fullmatch(
            r"Offloaded training is not possible, because the native library cannot be used \(.*\)\. .*", line
        )
    lines = [line for line in result.stderr.splitlines() if "twinflow" in line]
    assert len(lines) == 1, result.stderr
    assert "torch functions, and offloaded training is not possible" in lines[0]


def test_a_library_with_another_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = find_library(os.environ)
    if path is None:
        pytest.skip("the native library is not installed")
    monkeypatch.setattr("twinflow.native.library.API_VERSION", 999)
    problem = open_library(path).problem
    assert problem is not None
    assert "ABI" in problem


@needs_native
def test_a_library_with_other_rules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**RULES, "newer": replace(ADAMW, name="newer", code=len(RULES))}
    monkeypatch.setattr("twinflow.native.library.RULES", more)
    loaded = open_library(load().path)
    assert loaded.library is None
    assert re.search("has the update rules adamw, .*, not adamw, .*, newer", str(loaded.problem))


@pytest.mark.matrix
@needs_native
def test_isa_can_be_forced_and_a_wrong_one_is_named() -> None:
    code = "from twinflow import native; print(native.isa())"
    for isa in native.isa_names():
        assert run_python(code, TWINFLOW_ISA=isa).stdout.strip() == isa
    result = run_python(code, TWINFLOW_ISA="mmx")
    assert result.returncode != 0
    assert "TWINFLOW_ISA is 'mmx', but must be" in result.stderr
    with pytest.raises(ValueError, match="isa is 'mmx'"):
        native.set_isa("mmx")


# The first call of each process loads the library and counts; a process that ends at once takes nothing down.
THREADS = """
import os
from twinflow import native

def tell():
    try:
        print(native.get_threads(), flush=True)
    except ValueError as error:
        print(error, flush=True)
    os._exit(0)

for number in ("3", "many"):
    if not os.fork():
        os.environ["TWINFLOW_THREADS"] = number
        tell()
    os.wait()
if not os.fork():
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
    tell()
os.wait()
tell()
"""


@needs_native
@pytest.mark.matrix
def test_threads_come_from_the_process_not_from_omp() -> None:
    result = run_python(THREADS, OMP_NUM_THREADS="1")
    given, wrong, pinned, own = result.stdout.splitlines()
    assert (given, pinned, own) == ("3", "1", str(default_threads({}))), result.stderr
    assert "TWINFLOW_THREADS is 'many'" in wrong


@pytest.mark.parametrize("number", [0, -1, 5000, 1.5, "x"])
def test_a_wrong_number_of_threads_is_named(number: Any) -> None:
    before = native.get_threads()
    with pytest.raises(ValueError, match="num_threads is"):
        native.set_threads(number)
    assert native.get_threads() == before


@needs_native
def test_another_python_thread_runs_while_a_kernel_works() -> None:
    numel = 1 << 24
    store, grad = make_store(ADAMW, "fp32", None, numel), torch.ones(numel)
    segment = Segment(ADAMW, ADAMW.hyper(OPTIONS, 1), grad, store)
    native.update([segment])
    done, ticks = threading.Event(), 0

    def work() -> None:
        for _ in range(5):
            native.update([segment])
        done.set()

    before = native.get_threads()
    native.set_threads(1)  # one core works, one is left for the other Python thread
    try:
        worker = threading.Thread(target=work)
        start = time.perf_counter()
        worker.start()
        while not done.is_set():
            ticks += 1
            time.sleep(0.0005)
        elapsed = time.perf_counter() - start
        worker.join()
    finally:
        native.set_threads(before)
    # Holding the GIL, five calls of some 30 ms each would let this loop turn about once a call.
    assert ticks > 20, f"{ticks} turns in {elapsed:.3f} s"


@needs_native
def test_calls_from_several_threads_take_turns() -> None:
    stores = [make_store(ADAMW, "bf16", torch.bfloat16, 50_001, seed) for seed in range(6)]
    grads = [make_gradient(50_001, torch.bfloat16, seed) for seed in range(6)]
    expected = [clone(store) for store in stores]
    hyper = ADAMW.hyper(OPTIONS, 1)
    for store, grad in zip(expected, grads, strict=True):
        for step in range(5):
            native.update([Segment(ADAMW, hyper, grad, store, 1.0, (step, 1))])

    def work(i: int) -> None:
        for step in range(5):
            native.update([Segment(ADAMW, hyper, grads[i], stores[i], 1.0, (step, 1))])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(expected, stores, strict=True):
        assert_same_bits(a, b)


FORK = """
import os, torch
from twinflow import native
native.set_threads(3)
x = torch.ones(1_000_000)
assert native.sum_squares([x]) == [1e6]
child = os.fork()
if child == 0:
    os._exit(0 if native.sum_squares([x]) == [1e6] and native.get_threads() == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
assert native.sum_squares([x]) == [1e6]
print("ok")
"""


@needs_native
def test_a_forked_child_gets_a_pool_of_its_own(tmp_path: Path) -> None:
    assert run_forked(FORK, tmp_path).stdout.strip() == "ok"


def bad_segments() -> dict[str, tuple[Segment, str]]:
    store, grad = make_store(ADAMW, "fp32", torch.bfloat16, 256), make_gradient(256, torch.bfloat16)
    good = Segment(ADAMW, ADAMW.hyper(OPTIONS, 1), grad, store, name="layer.weight")
    wide = torch.zeros(512)
    half = store.empty_like()

    def with_store(**changes: Any) -> Segment:
        return replace(good, store=replace(store, **changes))

    int8 = make_store(ADAMW, "int8", None, 256)
    return {
        "gradient dtype": (replace(good, grad=grad.double()), "layer.weight: gradient dtype is torch.float64"),
        "gradient device": (replace(good, grad=grad.to("meta")), "gradient device is 'meta', but must be 'cpu'"),
        "gradient strides": (replace(good, grad=wide[::2]), "gradient has the strides (2,), but must be contiguous"),
        "gradient layout": (replace(good, grad=grad.float().to_sparse()), "gradient layout is"),
        "master length": (with_store(master=torch.zeros(255)), "layer.weight: master length is 255, but must be 256"),
        "master dtype": (with_store(master=store.master.double()), "master dtype is torch.float64"),
        "weight dtype": (with_store(weight=torch.zeros(256, dtype=torch.int8)), "weight dtype is torch.int8"),
        "weight of a split master": (
            with_store(master=torch.zeros(256, dtype=torch.int16), weight=torch.zeros(256)),
            "layer.weight: weight dtype is torch.float32, but must be torch.bfloat16. Pass a bf16 weight",
        ),
        "no weight of a split master": (
            with_store(master=torch.zeros(256, dtype=torch.int16), weight=None),
            "layer.weight: weight dtype is None, but must be torch.bfloat16",
        ),
        "target master": (
            replace(good, target=replace(half, master=torch.zeros(256, dtype=torch.int16))),
            "target master is a tensor of torch.int16, but must be a tensor of torch.float32, as in the store",
        ),
        "state missing": (with_store(states=(None, store.states[1])), "exp_avg is None"),
        "state dtype": (with_store(states=(store.states[0].bfloat16(), store.states[1])), "exp_avg dtype"),
        "state strides": (with_store(states=(wide[::2], store.states[1])), "exp_avg has the strides"),
        "format": (with_store(format="fp4"), "states is 'fp4', but must be one of 'fp32', 'bf16', 'int8'"),
        "format of the rule": (
            replace(good, rule=RULES["lion"], store=replace(store, format="int8")),
            "states is 'int8', but must be one of 'fp32', 'bf16'",
        ),
        "scales": (replace(good, store=replace(int8, scales=(torch.zeros(1), int8.scales[1]))), "scales of exp_avg"),
        "factor": (replace(good, factor=float("nan")), "factor is nan"),
        "hyper": (replace(good, hyper=(0.1, 0.9)), "hyper is (0.1, 0.9), but must be a tuple of 7 numbers"),
        "target overlaps": (
            replace(good, store=replace(store, master=wide[:256]), target=replace(half, master=wide[100:356])),
            "target master shares memory with the store",
        ),
        "negative index": (replace(good, first_index=-128), "first_index is -128"),
        "first index": (replace(good, first_index=5), "first_index is 5, but must be a multiple of 128"),
        "target shared": (replace(good, target=replace(half, master=store.master)), "target master shares memory"),
        "target kind": (replace(good, target=replace(half, weight=None)), "target weight is None"),
    }


@pytest.mark.parametrize("case", sorted(bad_segments()))
def test_bad_input_is_named_and_nothing_is_modified(case: str) -> None:
    segment, message = bad_segments()[case]
    other = make_store(ADAMW, "fp32", None, 128)
    good = Segment(ADAMW, ADAMW.hyper(OPTIONS, 1), torch.ones(128), other)
    before = {name: tensor.clone() for name, tensor in buffers(segment.store).items()}
    untouched = clone(other)
    with pytest.raises(ValueError, match=re.escape(message)):
        native.update([good, segment])
    assert_same_bits(untouched, other, "an earlier segment of the same call:")
    for name, tensor in buffers(segment.store).items():
        assert torch.equal(tensor, before[name])


def test_bad_arguments_of_the_other_kernels() -> None:
    with pytest.raises(ValueError, match="into dtype"):
        native.accumulate(torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3))
    with pytest.raises(ValueError, match="values length is 4, but must be 3"):
        native.accumulate(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match=r"tensors\[1\] dtype"):
        native.sum_squares([torch.zeros(3), torch.zeros(3, dtype=torch.int32)])
    with pytest.raises(ValueError, match="values has the strides"):
        native.cast(torch.zeros(3), torch.zeros(6)[::2])


def test_empty_tensors_and_empty_calls_are_fine() -> None:
    native.update([])
    assert native.sum_squares([]) == []
    assert native.sum_squares([torch.zeros(0)]) == [0.0]
    native.accumulate(torch.zeros(0), torch.zeros(0))
    for format in ("fp32", "bf16", "int8"):
        store = make_store(ADAMW, format, torch.bfloat16, 0)
        native.update([Segment(ADAMW, ADAMW.hyper(OPTIONS, 1), torch.zeros(0), store)])


def test_references_are_what_runs_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    store, grad = make_store(ADAMW, "int8", torch.bfloat16, 1000), make_gradient(1000, torch.bfloat16)
    expected = clone(store)
    segment = Segment(ADAMW, ADAMW.hyper(OPTIONS, 1), grad, store)
    reference.update([replace(segment, store=expected)])
    monkeypatch.setattr("twinflow.native.kernels.load", lambda: open_library(None))
    native.update([segment])
    assert_same_bits(expected, store)
    assert isinstance(segment.store, Store)


STARVED = """
import resource, torch
from twinflow import native
x = torch.ones(1_000_000)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), used + (200 << 20)))
native.set_threads(1000)
assert native.sum_squares([x]) == [1e6]
print("ok", native.get_threads())
"""


@needs_native
def test_a_system_that_gives_fewer_threads_than_wanted(tmp_path: Path) -> None:
    result = run_forked(STARVED, tmp_path)
    assert result.stdout.split() == ["ok", "1000"], result.stderr
