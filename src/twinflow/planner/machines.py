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
    "l40s": Gpu("L40S 48 GB", int(47.7 * GB), 240, 0.7e12, 4),
    "a6000": Gpu("RTX A6000 48 GB", int(50.9 * GB), 110, 0.62e12, 4),
    "a10g": Gpu("A10G 24 GB", int(23.6 * GB), 55, 0.48e12, 4),
    "l4": Gpu("L4 24 GB", int(23.6 * GB), 60, 0.24e12, 4),
    "rtx5090": Gpu("RTX 5090 32 GB", int(33.6 * GB), 180, 1.4e12, 5),
    "rtx4090": Gpu("RTX 4090 24 GB", int(25.2 * GB), 140, 0.8e12, 4),
    "rtx3090": Gpu("RTX 3090 24 GB", int(25.2 * GB), 58, 0.75e12, 4),
}
# Other names of these GPUs, with the memory size in the name.
_WITH_SIZE: Final = {"h100-80": "h100", "h200-141": "h200", "b200-192": "b200"}
# Bytes/s: to the host, to the device, in each direction when both run.
_PCIE: Final = {5: (55e9, 55e9, 50e9), 4: (26e9, 26e9, 23e9), 3: (12.8e9, 12.8e9, 11e9)}
# Bandwidth of an update kernel relative to plain reads and writes. Without other work it is 0.92 to 0.97. The value 0.9
# fits training steps.
_OF_DRAM: Final = 0.9
# Updates per second and core if memory is no limit (AVX-512). int8: measured 8.9e9 on 16 cores; others: estimates.
_A_CORE: Final = {"fp32": 0.5e9, "bf16": 0.52e9, "int8": 0.56e9}


def gpu_named(name: str, option: str = "--gpu") -> Gpu:
    """The GPU with this short name. `option`: the name of the option, for the error message."""
    plain = _WITH_SIZE.get(name.lower(), name.lower())
    if plain not in GPUS:
        raise invalid_value(option, name, GPUS)
    return GPUS[plain]


def recognise(title: str) -> Gpu | None:
    """The GPU that a driver calls `title`, for example "NVIDIA A100-SXM4-40GB". Returns None if there is no data sheet
    for it.
    """
    plain = title.lower().replace(" ", "").replace("-", "")
    for name in sorted(GPUS, key=len, reverse=True):
        model, _, size = name.partition("-")
        if model in plain and (not size or f"{size}gb" in plain):
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
