# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the native library. This module does not import torch.

Environment variables: `TWINFLOW_LIBRARY` is the path of another library file, `TWINFLOW_ISA` selects an ISA variant,
and `TWINFLOW_THREADS` sets the number of threads of the pool.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import os
import sys
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinflow.errors import invalid_value
from twinflow.native.threads import default_threads
from twinflow.rules import RULES

API_VERSION = 9
FILE_NAME = "libtwinflow.so"


def fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """The fields of a ctypes structure. Each group has a type and names, as in a declaration of C."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class CSegment(ctypes.Structure):
    """tf_segment of csrc/api.h, field by field."""

    _fields_ = fields(
        (c_void_p, "grad weight_in weight master_in master"),
        (c_void_p * 2, "state_in state scale_in scale"),
        (c_int64, "numel first_index"),
        (c_int32, "rule format grad_type weight_type master_kind"),
        (c_float, "factor"),
        (c_float * 7, "hyper"),
        (c_uint32 * 2, "key"),
    )


class CPacking(ctypes.Structure):
    """tf_packing of csrc/api.h, field by field."""

    _fields_ = fields(
        (c_void_p, "packed values base error exponents"),
        (c_int64, "num_rows numel"),
        (c_int32, "bits values_type base_type is_scaled is_added"),
        (c_float, "factor base_factor"),
    )


Signatures = dict[str, tuple[list[object], object]]  # by name: types of the arguments and of the result
_SIGNATURES: Signatures = {
    "tf_update": ([POINTER(CSegment), c_int64], None),
    "tf_sum_squares": ([POINTER(c_void_p), POINTER(c_int64), POINTER(c_int32), c_int64, POINTER(c_double)], None),
    "tf_accumulate": ([c_void_p, c_void_p, c_int32, c_int64], None),
    "tf_cast": ([c_void_p, c_int32, c_void_p, c_int32, c_int64], None),
    "tf_adopt": ([c_void_p, c_void_p, c_int32, c_int64], None),
    "tf_split": ([c_void_p, c_void_p, c_void_p, c_int64], None),
    "tf_join": ([c_void_p, c_void_p, c_void_p, c_int64], None),
    "tf_encode": ([POINTER(CPacking)], None),
    "tf_mean": ([POINTER(CPacking)], None),
    "tf_decode": ([POINTER(CPacking)], None),
    "tf_scale_in_place": ([c_void_p, c_float, c_int64], None),
    "tf_set_threads": ([c_int32], None),
    "tf_get_threads": ([], c_int32),
    "tf_isa_available": ([], c_char_p),
    "tf_isa": ([], c_char_p),
    "tf_set_isa": ([c_char_p], c_int32),
    "tf_rules": ([], c_char_p),
    "tf_api_version": ([], c_int32),
    "tf_segment_size": ([], c_int64),
    "tf_packing_size": ([], c_int64),
    "tf_advise_huge": ([c_void_p, c_int64], None),
    "tf_crc32": ([c_uint32, c_void_p, c_int64], c_uint32),
    "tf_gather": ([c_void_p, c_void_p, c_int64], None),
}


@dataclass(frozen=True)
class Loaded:
    """Result of loading: the library, or None and the reason."""

    library: ctypes.CDLL | None
    path: Path | None
    problem: str | None


@functools.cache
def load() -> Loaded:
    """Load the library once per process.

    If it cannot be loaded, this function prints a line to stderr, host optimizers use slower torch functions, and
    offloaded training raises an error (`executor_library`).
    """
    path = find_library(os.environ)
    loaded = open_library(path)
    if loaded.library is None:
        print(
            f"twinflow: the native library cannot be used ({loaded.problem}). Host optimizers use slower torch "
            "functions, and offloaded training is not possible. Reinstall twinflow; `twinflow doctor` shows the cause.",
            file=sys.stderr,
        )
        return loaded
    loaded.library.tf_set_threads(default_threads(os.environ))
    isa = os.environ.get("TWINFLOW_ISA")
    if isa:
        set_isa(loaded.library, isa, option="TWINFLOW_ISA")
    return loaded


def find_library(environ: Mapping[str, str]) -> Path | None:
    """Path of the library: TWINFLOW_LIBRARY, or the file in a folder of this package, or None if there is none."""
    if environ.get("TWINFLOW_LIBRARY"):
        return Path(environ["TWINFLOW_LIBRARY"])
    package = sys.modules[__package__ or "twinflow.native"]
    # An editable install has sources and built files in two folders. `__path__` of the package contains both folders.
    folders = [Path(str(importlib.resources.files("twinflow.native"))), *(Path(p) for p in package.__path__)]
    return next((folder / FILE_NAME for folder in folders if (folder / FILE_NAME).is_file()), None)


def open_library(path: Path | None) -> Loaded:
    """Open the file and check its ABI and its update rules. Never raises."""
    if path is None:
        return Loaded(
            None, None, f"{FILE_NAME} is not installed: reinstall twinflow on a machine with a C++17 compiler"
        )
    try:
        library = ctypes.CDLL(str(path))
        declare(library, _SIGNATURES)
    except (OSError, AttributeError) as error:
        return Loaded(None, path, f"{path.name} does not load: {error}")
    found = library.tf_api_version(), library.tf_segment_size(), library.tf_packing_size()
    wanted = API_VERSION, ctypes.sizeof(CSegment), ctypes.sizeof(CPacking)
    if found != wanted:
        return Loaded(
            None, path, f"{path.name} belongs to another version of twinflow: its ABI is {found}, not {wanted}"
        )
    names = library.tf_rules().decode().split()
    if names != sorted(RULES, key=lambda name: RULES[name].code):
        return Loaded(None, path, f"{path.name} has the update rules {', '.join(names)}, not {', '.join(RULES)}")
    return Loaded(library, path, None)


def declare(library: ctypes.CDLL, signatures: Signatures) -> None:
    """Sets the types of functions. Raises AttributeError if the library lacks one of these functions."""
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = result


def set_isa(library: ctypes.CDLL, name: str, option: str = "isa") -> None:
    """Select the ISA variant of all kernels. `option`: the name for the error message."""
    if library.tf_set_isa(name.encode()) != 0:
        remedy = "Choose one of these variants, which this CPU can run."
        raise invalid_value(option, name, library.tf_isa_available().decode().split(), remedy)
