"""Measured rates as a file, one for each kind of machine.

The file's name holds a hash of everything that moves the numbers: processor, usable cores, the native pool's threads
and ISA, GPU, versions. Its text holds the same in plain words: a file that was copied from elsewhere is not believed. A
file that cannot be read or written never stops anybody: then the machine is measured, as it is without one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import tempfile
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from twinflow import native
from twinflow.native.cgroup import read_text
from twinflow.native.threads import default_threads
from twinflow.planner.rates import Rates
from twinflow.version import __version__

FORMAT_VERSION: Final = 1  # of the file, and of what the probe means by its numbers
Facts = dict[str, str | int]


def machine_facts(device: torch.device) -> Facts:
    """What the rates depend on."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "probe": FORMAT_VERSION,
        "cpu": _cpu_name(read_text(Path("/proc/cpuinfo"))) or platform.processor() or platform.machine(),
        "cores": default_threads({}),  # those this process may use, whatever TWINFLOW_THREADS says
        "threads": native.get_threads(),
        "isa": native.isa(),
        "gpu": gpu.name if gpu is not None else "",
        "gpu_bytes": gpu.total_memory if gpu is not None else 0,
        "twinflow": __version__,
        "torch": str(torch.__version__),
    }


def _cpu_name(cpuinfo: str) -> str:
    """All kinds of cores in /proc/cpuinfo: names on x86, numbers of maker and part on Arm."""
    kinds = re.findall(r"^(?:model name|CPU implementer|CPU part)\s*: (.*)$", cpuinfo, flags=re.MULTILINE)
    return ", ".join(sorted({" ".join(kind.split()) for kind in kinds}))


def rates_file(facts: Facts, folder: Path | None = None) -> Path:
    """Where the rates of such a machine are kept, in `folder` or in the user's cache."""
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return (default_folder(os.environ) if folder is None else folder) / f"rates-{key}.json"


def default_folder(environ: Mapping[str, str]) -> Path:
    """$TWINFLOW_CACHE, else twinflow's part of the user's cache."""
    if environ.get("TWINFLOW_CACHE"):
        return Path(environ["TWINFLOW_CACHE"])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "twinflow"
    home = Path(os.path.expanduser("~"))
    # In a container a user may have no home; a folder called ~ would be worse than one that does not last.
    return (home / ".cache" if home.is_absolute() else Path(tempfile.gettempdir())) / "twinflow"


def read_rates(path: Path, facts: Facts, formats: Sequence[str]) -> Rates | None:
    """The rates in a file; None where it is not there, not of this machine, or not what `write_rates` writes."""
    # ValueError: not JSON, or not UTF-8; RecursionError: JSON nested without end
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["machine"] == facts:
            rates = Rates.from_dict(saved["rates"])
            return rates if is_sane(rates, formats) else None
    return None


def is_sane(rates: Rates, formats: Sequence[str]) -> bool:
    """Whether every rate is a positive number, and the host's are there in every format."""
    hosts = (rates.host_params, rates.host_params_copying)
    if not all(isinstance(host, Mapping) and set(formats) <= set(host) for host in hosts):
        return False
    alone = (rates.out_bytes, rates.in_bytes, rates.duplex_bytes, rates.device_bytes, rates.flops)
    return all(_is_positive(rate) for rate in (*alone, *hosts[0].values(), *hosts[1].values()))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # compared, not converted: an integer may be too large for a float


def write_rates(path: Path, facts: Facts, rates: Rates) -> None:
    """Keep the rates, whole or not at all; where that cannot be done, say so (Python shows a warning's place once)."""
    text = json.dumps({"machine": facts, "rates": rates.to_dict()}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, text)
    except OSError as error:
        warnings.warn(
            f"this machine's rates cannot be kept in {path.parent} ({error}): each start measures them again, which "
            "takes some seconds. Let TWINFLOW_CACHE name a folder that can be written.",
            stacklevel=2,
        )


def _write_whole(path: Path, text: str) -> None:
    """Under another name, then renamed: who reads meanwhile, or writes too, sees one whole file."""
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
