"""The native library: host kernels and the executor of offloaded training. If the library is missing, torch references
replace the kernels. The library is C++ without torch, bound with ctypes.
"""

from twinflow.native.kernels import (
    Addresses,
    Pointers,
    accumulate,
    advise_huge,
    available,
    cast,
    get_threads,
    huge_zeros,
    isa,
    isa_names,
    join,
    pointers,
    scale_in_place,
    set_isa,
    set_threads,
    split,
    sum_squares,
    update,
    update_at,
)

__all__ = [
    "Addresses",
    "Pointers",
    "accumulate",
    "advise_huge",
    "available",
    "cast",
    "get_threads",
    "huge_zeros",
    "isa",
    "isa_names",
    "join",
    "pointers",
    "scale_in_place",
    "set_isa",
    "set_threads",
    "split",
    "sum_squares",
    "update",
    "update_at",
]
