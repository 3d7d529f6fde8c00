"""The host kernels: a torch-free C++ library bound with ctypes, and torch references where it is missing."""

from twinflow.native.kernels import (
    accumulate,
    advise_huge,
    available,
    cast,
    get_threads,
    huge_zeros,
    isa,
    isa_names,
    join,
    scale_in_place,
    set_isa,
    set_threads,
    split,
    sum_squares,
    update,
)

__all__ = [
    "accumulate",
    "advise_huge",
    "available",
    "cast",
    "get_threads",
    "huge_zeros",
    "isa",
    "isa_names",
    "join",
    "scale_in_place",
    "set_isa",
    "set_threads",
    "split",
    "sum_squares",
    "update",
]
