# SPDX-License-Identifier: Apache-2.0
"""Rates of machines from data sheets and from measurements on other machines. `probe.py` measures the rates of this
machine.

`Gpu.memory_bytes` is the memory that a process can allocate: the memory of the GPU without the 0.6 GB of CUDA. Rates of
matrix products and memory are those of large kernels, not peaks.

Measured: PCIe of the H200: 55 GB/s to the host, 55 GB/s to the GPU, 50 GB/s each way at once. Fitted to training steps
on the H200: 740 TFLOPS of matrix products (outside of a training step they reach 790) and 3.8 TB/s of memory bandwidth.
All other numbers are estimates: 0.55 to 0.85 of the peak for matrix products, 0.8 of the peak for memory. PCIe 5 is as
measured, PCIe 4 and 3 are a half and a quarter of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from twinflow.errors import invalid_value
from twinflow.planner.formats import UPDATE_BYTES

GB: Final = 10**9


@dataclass(frozen=True)
class Rates:
    """Rates per second. Updates are those of AdamW with bf16 gradients and weights. The keys of mappings are state
    formats."""

    out_bytes: float  # copies from the device to page-locked host memory, without other copies
    in_bytes: float  # copies from the host to the device, without other copies
    duplex_bytes: float  # copies in each direction while both directions copy
    host_params: Mapping[str, float]  # updates on the host, without copies
    host_params_copying: Mapping[str, float]  # updates on the host while both directions copy at full rate
    device_bytes: float  # bytes of device memory that the fused update reads and writes
    flops: float  # matrix products in bf16, as in a training step; 0: unknown


@dataclass(frozen=True)
class Gpu:
    title: str
    memory_bytes: int  # memory that a process can allocate
    tflops: float  # matrix products in half precision
    memory_rate: float  # bytes/s
    pcie: int  # generation of PCIe, with 16 lanes
    link_rate: float = 0.0  # bytes/s in each direction to other GPUs; 0: over PCIe
    weights: str = "bf16"  # fp16 if the GPU does not support bf16


@dataclass(frozen=True)
class Host:
    ram_bytes: int
    cores: int
    dram_rate: float  # bytes/s read and written by all cores together


@dataclass(frozen=True)
class Machine:
    """A host with GPUs of one type."""

    gpu: Gpu
    host: Host
    num_gpus: int = 1


GPUS: Final = {
    "b200": Gpu("B200 192 GB", 191 * GB, 1500, 6.4e12, 5, 720e9),
    "h200": Gpu("H200 141 GB", 150 * GB, 740, 3.8e12, 5, 360e9),
    "h100": Gpu("H100 80 GB", 85 * GB, 650, 2.7e12, 5, 360e9),
    "a100-80": Gpu("A100 80 GB", 85 * GB, 240, 1.6e12, 4, 240e9),
    "a100-40": Gpu("A100 40 GB", int(41.9 * GB), 240, 1.25e12, 4, 240e9),
    "v100-32": Gpu("V100 32 GB", int(33.5 * GB), 70, 0.75e12, 3, 120e9, "fp16"),
    "v100-16": Gpu("V100 16 GB", int(16.4 * GB), 70, 0.75e12, 3, 120e9, "fp16"),
    "a40": Gpu("A40 48 GB", int(47.7 * GB), 105, 0.56e12, 4),
    "a30": Gpu("A30 24 GB", int(25.2 * GB), 115, 0.75e12, 4),
    "a10": Gpu("A10 24 GB", int(23.6 * GB), 75, 0.48e12, 4),
    "a10g": Gpu("A10G 24 GB", int(23.6 * GB), 55, 0.48e12, 4),
    "t4": Gpu("T4 16 GB", int(15.4 * GB), 36, 0.26e12, 3, 0.0, "fp16"),
    "l40s": Gpu("L40S 48 GB", int(47.7 * GB), 240, 0.7e12, 4),
    "l40": Gpu("L40 48 GB", int(47.7 * GB), 120, 0.7e12, 4),
    "l4": Gpu("L4 24 GB", int(23.6 * GB), 60, 0.24e12, 4),
    # Workstations.
    "rtxpro6000": Gpu("RTX PRO 6000 Blackwell 96 GB", int(102.4 * GB), 340, 1.4e12, 5),
    "rtx6000ada": Gpu("RTX 6000 Ada 48 GB", int(50.9 * GB), 240, 0.77e12, 4),
    "rtx5000ada": Gpu("RTX 5000 Ada 32 GB", int(33.6 * GB), 180, 0.46e12, 4),
    "rtx4000ada": Gpu("RTX 4000 Ada 20 GB", int(20.8 * GB), 75, 0.29e12, 4),
    "a6000": Gpu("RTX A6000 48 GB", int(50.9 * GB), 110, 0.62e12, 4),
    "a5000": Gpu("RTX A5000 24 GB", int(25.2 * GB), 80, 0.61e12, 4),
    "a4000": Gpu("RTX A4000 16 GB", int(16.5 * GB), 55, 0.36e12, 4),
    # Desktops. Cards with 8 lanes of PCIe have the rate of 16 lanes of the generation before.
    "rtx5090": Gpu("RTX 5090 32 GB", int(33.6 * GB), 180, 1.4e12, 5),
    "rtx5080": Gpu("RTX 5080 16 GB", int(16.5 * GB), 96, 0.77e12, 5),
    "rtx5070ti": Gpu("RTX 5070 Ti 16 GB", int(16.5 * GB), 75, 0.72e12, 5),
    "rtx5070": Gpu("RTX 5070 12 GB", int(12.2 * GB), 52, 0.54e12, 5),
    "rtx5060ti": Gpu("RTX 5060 Ti 16 GB", int(16.5 * GB), 40, 0.36e12, 4),
    "rtx4090": Gpu("RTX 4090 24 GB", int(25.2 * GB), 140, 0.8e12, 4),
    "rtx4080super": Gpu("RTX 4080 SUPER 16 GB", int(16.5 * GB), 88, 0.59e12, 4),
    "rtx4080": Gpu("RTX 4080 16 GB", int(16.5 * GB), 83, 0.57e12, 4),
    "rtx4070tisuper": Gpu("RTX 4070 Ti SUPER 16 GB", int(16.5 * GB), 75, 0.54e12, 4),
    "rtx4070ti": Gpu("RTX 4070 Ti 12 GB", int(12.2 * GB), 68, 0.4e12, 4),
    "rtx4070super": Gpu("RTX 4070 SUPER 12 GB", int(12.2 * GB), 60, 0.4e12, 4),
    "rtx4070": Gpu("RTX 4070 12 GB", int(12.2 * GB), 49, 0.4e12, 4),
    "rtx4060ti": Gpu("RTX 4060 Ti 16 GB", int(16.5 * GB), 37, 0.23e12, 3),
    "rtx4060": Gpu("RTX 4060 8 GB", int(7.9 * GB), 26, 0.22e12, 3),
    "rtx3090ti": Gpu("RTX 3090 Ti 24 GB", int(25.2 * GB), 66, 0.81e12, 4),
    "rtx3090": Gpu("RTX 3090 24 GB", int(25.2 * GB), 58, 0.75e12, 4),
    "rtx3080ti": Gpu("RTX 3080 Ti 12 GB", int(12.2 * GB), 56, 0.73e12, 4),
    "rtx3080": Gpu("RTX 3080 10 GB", int(10.1 * GB), 49, 0.61e12, 4),
    "rtx3070": Gpu("RTX 3070 8 GB", int(7.9 * GB), 33, 0.36e12, 4),
    "rtx3060": Gpu("RTX 3060 12 GB", int(12.2 * GB), 21, 0.29e12, 4),
}
# Other names of these GPUs, with the memory size in the name.
_WITH_SIZE: Final = {"h100-80": "h100", "h200-141": "h200", "b200-192": "b200"}
# Bytes/s: to the host, to the device, in each direction when both run.
_PCIE: Final = {5: (55e9, 55e9, 50e9), 4: (26e9, 26e9, 23e9), 3: (12.8e9, 12.8e9, 11e9)}
PCIE_GENERATIONS: Final = tuple(_PCIE)
# Bandwidth of an update kernel relative to plain reads and writes. Without other work it is 0.92 to 0.97. The value 0.9
# fits training steps.
_OF_DRAM: Final = 0.9
_OF_PEAK: Final = 0.8  # matrix products of a training step relative to the peak
# Updates per second and core if memory is no limit (AVX-512). int8: measured 8.9e9 on 16 cores; others: estimates.
_A_CORE: Final = {"fp32": 0.5e9, "bf16": 0.52e9, "int8": 0.56e9, "4bit": 0.56e9}


def gpu_named(name: str, option: str = "--gpu") -> Gpu:
    """The GPU with this short name. `option`: the name of the option, for the error message."""
    plain = _WITH_SIZE.get(name.lower(), name.lower())
    if plain not in GPUS:
        raise invalid_value(option, name, GPUS)
    return GPUS[plain]


def any_gpu(memory_bytes: int, tflops: float, pcie: int = 4) -> Gpu:
    """A GPU that has no data sheet here. `tflops`: dense matrix products in bf16 as on its data sheet.

    The bandwidth of its memory is estimated. The GPUs above have 2 to 14 GB/s for each TFLOPS, and most about 6.
    """
    reached = _OF_PEAK * tflops
    return Gpu(f"GPU of {tflops:g} TFLOPS, {memory_bytes / GB:g} GB", memory_bytes, reached, reached * 6e9, pcie)


def recognise(title: str) -> Gpu | None:
    """The GPU that a driver calls `title`, for example "NVIDIA A100-SXM4-40GB". Returns None if there is no data sheet
    for it.
    """
    whole = title.lower().replace(" ", "").replace("-", "")
    plain = re.sub(r"[ -]*[0-9]+ ?gb", "", title.lower()).replace(" ", "").replace("-", "")
    for name in sorted(GPUS, key=len, reverse=True):
        model, _, size = name.partition("-")
        # "A10" is not part of "A100", and "A30" is not part of "A3000".
        if re.search(f"{model}(?![0-9])", plain) and (not size or f"{size}gb" in whole):
            return GPUS[name]
    return None


@lru_cache(maxsize=64)
def rates_of(machine: Machine) -> Rates:
    """Rates of one GPU of a machine. The GPUs share the cores and the memory of the host equally."""
    gpu, host, n = machine.gpu, machine.host, machine.num_gpus
    out, back, duplex = _PCIE[gpu.pcie]
    dram = host.dram_rate / n
    alone = {
        states: min(_OF_DRAM * dram / moved, host.cores / n * _A_CORE[states]) for states, moved in UPDATE_BYTES.items()
    }
    # Copies use the same memory. In a measurement with a memory bandwidth of 150 GB/s, copies of 100 GB/s reduced the
    # update rate to 0.5 to 0.6.
    left = max(0.3, 1.0 - 0.6 * 2.0 * duplex / dram)
    return Rates(
        out_bytes=out,
        in_bytes=back,
        duplex_bytes=duplex,
        host_params=alone,
        host_params_copying={states: rate * left for states, rate in alone.items()},
        device_bytes=gpu.memory_rate,
        flops=gpu.tflops * 1e12,
    )


def link_rate(machine: Machine) -> float:
    """Bytes/s in each direction between the GPUs of a machine."""
    # Over PCIe the rate is halved, because a GPU sends and receives at the same time.
    return machine.gpu.link_rate or _PCIE[machine.gpu.pcie][2] / 2.0
