# SPDX-License-Identifier: Apache-2.0
"""The same bits on other CPUs: the kernels built for x86-64 and aarch64 (SVE included), run under emulation."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = [
    "-O3 -std=c++17 -fno-math-errno -fno-trapping-math -ffp-contract=off -fvisibility=hidden -DTF_BUILDING",
    "-pthread -static-libstdc++ -static-libgcc",
]
VARIANTS = {
    "x86_64": {
        "baseline": "",
        "avx2": "-mavx2 -mfma -mf16c",
        "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512",
    },
    "aarch64": {"neon": "", "sve": "-march=armv8.2-a+sve"},
}


def compiler(machine: str) -> str | None:
    names = ["g++"] if machine == platform.machine() else []
    return next((path for name in [*names, f"{machine}-linux-gnu-g++"] if (path := shutil.which(name))), None)


def emulator(machine: str) -> list[str] | None:
    """How to run a program of that machine with every feature that can be had; None: it cannot be run here."""
    path = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    if path:
        libraries = [] if machine == platform.machine() else ["-L", f"/usr/{machine}-linux-gnu"]
        return [path, "-cpu", "max", *libraries]
    return [] if machine == platform.machine() else None


def run_program(machine: str, folder: Path) -> tuple[dict[str, list[str]], bool]:
    """What tests/native/bits.cpp prints, by variant, and whether fp16 conversions can be trusted where it ran."""
    command, run = compiler(machine), emulator(machine)
    if command is None or run is None:
        pytest.skip(f"needs a C++ compiler and qemu for {machine}")
    flags = " ".join(FLAGS).split()
    objects = []
    for name, extra in VARIANTS[machine].items():
        objects.append(folder / f"{machine}-{name}.o")
        kernels = ["-c", ROOT / "csrc/kernels.cpp", f"-DTF_ISA={name}", *extra.split(), "-o", objects[-1]]
        subprocess.run([command, *flags, *kernels], check=True)
    sources = [ROOT / "csrc/dispatch.cpp", ROOT / "csrc/pool.cpp", ROOT / "tests/native/bits.cpp"]
    program = folder / f"bits-{machine}"
    subprocess.run([command, *flags, *sources, *objects, "-o", program], check=True)
    first, *output = subprocess.run([*run, program], check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, list[str]] = {}
    for line in output:
        isa, rest = line.split(" ", 1)
        found.setdefault(isa, []).append(rest)
    return found, first == "fp16 right"


def uses_f16(line: str) -> bool:
    """Whether fp16 is the gradient's or the weight's dtype, or codes are decoded through it (int8 states)."""
    _, format, grad, weight, *_ = line.split()
    return format == "2" or "3" in (grad, weight)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", sorted(VARIANTS))
def test_every_variant_gives_the_same_bits(machine: str, tmp_path: Path) -> None:
    reference = next(iter(run_program(platform.machine(), tmp_path)[0].values()))
    assert len(reference) == len(set(reference)) > 400
    there, trust_f16 = run_program(machine, tmp_path)
    for isa, found in there.items():
        pairs = list(zip(reference, found, strict=True))
        if not trust_f16 and isa != "baseline":  # an emulator whose F16C does not follow the manual: leave it out
            pairs = [(a, b) for a, b in pairs if not uses_f16(a)]
        wrong = [(a, b) for a, b in pairs if a != b]
        assert not wrong, f"{isa}: {len(wrong)} of {len(pairs)} cells differ, first {wrong[0]}"
        print(f"{machine} {isa}: {len(pairs)} cells agree")
