"""Cache file of measured rates, one for each kind of machine.

The file name contains a hash of everything that affects the rates: processor, usable cores, threads and ISA of the
native pool, GPU, versions. The file also contains these facts as text, so that a file copied from another machine is
rejected. A file that cannot be read or written is not an error: the machine is measured again.
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

FORMAT_VERSION: Final = 1  # changes with the file format and with the meaning of the rates
Facts = dict[str, str | int]


def machine_facts(device: torch.device) -> Facts:
    """Facts of the machine that affect the rates."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "probe": FORMAT_VERSION,
        "cpu": _cpu_name(read_text(Path("/proc/cpuinfo"))) or platform.processor() or platform.machine(),
        "cores": default_threads({}),  # cores that this process may use, independent of TWINFLOW_THREADS
        "threads": native.get_threads(),
        "isa": native.isa(),
        "gpu": gpu.name if gpu is not None else "",
        "gpu_bytes": gpu.total_memory if gpu is not None else 0,
        "twinflow": __version__,
        "torch": str(torch.__version__),
    }


def _cpu_name(cpuinfo: str) -> str:
    """All types of cores in /proc/cpuinfo: names on x86, numbers of implementer and part on Arm."""
    kinds = re.findall(r"^(?:model name|CPU implementer|CPU part)\s*: (.*)$", cpuinfo, flags=re.MULTILINE)
    return ", ".join(sorted({" ".join(kind.split()) for kind in kinds}))


def rates_file(facts: Facts, folder: Path | None = None) -> Path:
    """Path of the cache file of such a machine, in `folder` or in the user's cache."""
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return (default_folder(os.environ) if folder is None else folder) / f"rates-{key}.json"


def default_folder(environ: Mapping[str, str]) -> Path:
    """$TWINFLOW_CACHE, or the folder `twinflow` in the user's cache."""
    if environ.get("TWINFLOW_CACHE"):
        return Path(environ["TWINFLOW_CACHE"])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "twinflow"
    home = Path(os.path.expanduser("~"))
    # In a container a user may have no home. Then a temporary folder is better than a folder with the name "~".
    return (home / ".cache" if home.is_absolute() else Path(tempfile.gettempdir())) / "twinflow"


def read_rates(path: Path, facts: Facts, formats: Sequence[str]) -> Rates | None:
    """The rates in a file. None if the file is missing, of another machine, or invalid."""
    # ValueError: not JSON or not UTF-8. RecursionError: JSON nested too deeply.
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["machine"] == facts:
            rates = Rates.from_dict(saved["rates"])
            return rates if is_sane(rates, formats) else None
    return None


def is_sane(rates: Rates, formats: Sequence[str]) -> bool:
    """Whether all rates are positive numbers, and the rates of the host exist for every format."""
    hosts = (rates.host_params, rates.host_params_copying)
    if not all(isinstance(host, Mapping) and set(formats) <= set(host) for host in hosts):
        return False
    alone = (rates.out_bytes, rates.in_bytes, rates.duplex_bytes, rates.device_bytes, rates.flops)
    return all(_is_positive(rate) for rate in (*alone, *hosts[0].values(), *hosts[1].values()))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # no conversion to float: an integer may be too large for it


def write_rates(path: Path, facts: Facts, rates: Rates) -> None:
    """Write the rates atomically. A failure is only a warning."""
    text = json.dumps({"machine": facts, "rates": rates.to_dict()}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, text)
    except OSError as error:
        warnings.warn(
            f"The measured rates of this machine cannot be kept in {path.parent} ({error}). Every start measures them "
            "again, which takes some seconds. Set TWINFLOW_CACHE to a folder that can be written.",
            stacklevel=2,
        )


def _write_whole(path: Path, text: str) -> None:
    """Write to a temporary file and rename it, so that concurrent readers and writers see a complete file."""
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
