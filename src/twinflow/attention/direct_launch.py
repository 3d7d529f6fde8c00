# SPDX-License-Identifier: Apache-2.0
"""Launches of compiled kernels through the CUDA driver, without Triton's launcher.

Triton's launcher inspects every argument again, and encodes every TMA descriptor again. This takes longer than a kernel
for a short sequence runs. A `DirectLaunch` has the arguments of a kernel in the form that the driver wants. A call only
writes the addresses of its tensors, and numbers such as the seed of dropout.

Arguments are declared by tuples with a `Slot` or a `Box` in place of each tensor that is different in each call.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

MAP_BYTES = 128  # of a TMA descriptor (CUtensorMap), which must be aligned to 64 bytes
OBJECT_HEAD = 16  # bytes of a Python object before its own data
# Codes of struct for the types of a kernel's scalars.
SCALARS = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip

Given = Mapping[str, "Tensor | int"]  # the tensors and numbers of a call, by name


class Slot(NamedTuple):
    """The place of a tensor or a number of the call in the arguments of a kernel."""

    name: str


@dataclass(frozen=True)
class Box:
    """The place of a TMA descriptor of a tensor of the call: shape and strides of the matrix, shape of a copy, and its
    layout in shared memory, which is None for kernels in plain Triton.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any  # an NVMMASharedLayout of Gluon, which has no types


def filled(args: Any, given: Given) -> Any:
    """The arguments for Triton's own launch, with tensors and descriptors in their places."""
    if isinstance(args, Slot):
        return given[args.name]
    if isinstance(args, Box):
        return _descriptor(args, given[args.name])
    if type(args) is tuple:
        return tuple(filled(arg, given) for arg in args)
    if isinstance(args, tuple):
        return type(args)(*(filled(arg, given) for arg in args))  # a NamedTuple
    return args


def _descriptor(box: Box, tensor: Tensor | int) -> Any:
    # imported here, because Triton is optional
    if box.layout is None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(tensor, list(box.shape), list(box.strides), list(box.block))
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SwizzledDescriptor

    return SwizzledDescriptor(tensor, list(box.shape), list(box.strides), list(box.block), box.layout)


@dataclass(frozen=True)
class _Param:
    """A parameter of a compiled kernel: its bytes, and the name of the value that a call writes into it."""

    value: bytes
    name: str | None = None
    is_map: bool = False


def direct_launch(compiled: Any, num_programs: int, args: tuple[Any, ...], given: Given) -> DirectLaunch | None:
    """The launch of a kernel that Triton has compiled for these arguments. None if Triton or the driver is of a version
    whose form of parameters is not known: the sizes of all parameters must be those that the driver knows.
    """
    driver = _driver()
    if driver is None:
        return None
    params: list[_Param] = []
    try:
        if not _is_plain(compiled.metadata):
            return None
        maps = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for kind, arg in zip(compiled.src.signature.values(), args, strict=True):
            _add_params(params, kind, arg, given, maps)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError, struct.error):  # another Triton
        return None
    if not all(driver.has_address(param.value, _address(given, param)) for param in params if param.is_map):
        return None
    params += [_Param(bytes(8)), _Param(bytes(8))]  # scratch memory of kernels and of profiles, which are not used
    if not driver.has_params(compiled.function, [len(param.value) for param in params]):
        return None
    return DirectLaunch(driver, compiled, num_programs, params)


def _is_plain(metadata: Any) -> bool:
    """Whether a kernel is launched without clusters, without a wait for other kernels, and without scratch memory."""
    is_special = metadata.num_ctas != 1 or metadata.launch_pdl or metadata.launch_cooperative_grid
    return not (is_special or metadata.global_scratch_size or metadata.profile_scratch_size)


def _add_params(params: list[_Param], kind: Any, arg: Any, given: Given, maps: Any) -> None:
    """Append the parameters of one argument, whose type in the signature of the kernel is `kind`."""
    if isinstance(kind, tuple):
        for part, value in zip(kind, arg, strict=True):
            _add_params(params, part, value, given, maps)
    elif kind.startswith("tensordesc"):
        from triton.backends.nvidia.driver import make_tensordesc_arg

        found = make_tensordesc_arg(_descriptor(arg, given[arg.name]), next(maps))
        params.append(_Param(_bytes_of_map(found[0]), arg.name, is_map=True))
        params += [_Param(struct.pack("i", size)) for size in arg.shape]
        params += [_Param(struct.pack("q", stride)) for stride in arg.strides]
    elif kind != "constexpr":
        name = arg.name if isinstance(arg, Slot) else None
        value = given[name] if name is not None else arg
        code = "Q" if kind.startswith("*") else SCALARS[kind]
        params.append(_Param(struct.pack(code, value.data_ptr() if isinstance(value, Tensor) else value), name))


def _address(given: Given, param: _Param) -> int:
    assert param.name is not None
    value = given[param.name]
    return value if isinstance(value, int) else value.data_ptr()


def _bytes_of_map(descriptor: Any) -> bytes:
    """The CUtensorMap in an object of Triton's driver, which has it at the first multiple of its size after the head of
    the object."""
    address = -(-(id(descriptor) + OBJECT_HEAD) // MAP_BYTES) * MAP_BYTES
    return ctypes.string_at(address, MAP_BYTES)


class DirectLaunch:
    """A launch of a kernel whose arguments are prepared. Only for tensors of the same forms, on the same device."""

    def __init__(self, driver: _Driver, compiled: Any, num_programs: int, params: Sequence[_Param]) -> None:
        names = dict.fromkeys(param.name for param in params if param.name is not None)
        self.names = tuple(names)
        places = {name: place for place, name in enumerate(names)}
        self._pack = struct.Struct(f"{len(names)}q").pack_into
        # Values of the call come first, one after the other, so that one statement writes all of them.
        sizes = [8] * len(names) + [MAP_BYTES if param.is_map else 8 for param in params]
        self._memory = ctypes.create_string_buffer(sum(sizes) + 2 * MAP_BYTES)
        first = -(-ctypes.addressof(self._memory) // MAP_BYTES) * MAP_BYTES
        at = first + -(-8 * len(names) // MAP_BYTES) * MAP_BYTES
        addresses = []
        self._maps: list[tuple[ctypes.c_void_p, int]] = []
        for param in sorted(params, key=lambda param: not param.is_map):  # maps first, because of their alignment
            if param.name is not None and not param.is_map:
                addresses.append((param, first + 8 * places[param.name]))
                continue
            if param.is_map and param.name is not None:
                self._maps.append((ctypes.c_void_p(at), places[param.name]))
            ctypes.memmove(at, param.value, len(param.value))
            addresses.append((param, at))
            at += MAP_BYTES if param.is_map else 8
        by_param = {id(param): address for param, address in addresses}
        self._params = (ctypes.c_void_p * len(params))(*(by_param[id(param)] for param in params))
        self._offset = first - ctypes.addressof(self._memory)
        self._lock = threading.Lock()  # for `_memory`, which the driver reads during a launch
        self._replace = driver.replace
        self._launch = driver.launch
        one, threads = ctypes.c_uint(1), ctypes.c_uint(32 * compiled.metadata.num_warps)
        function, shared = ctypes.c_void_p(compiled.function), ctypes.c_uint(compiled.metadata.shared)
        self._before = (function, ctypes.c_uint(num_programs), one, one, threads, one, one, shared)
        self._compiled = compiled  # keeps the function loaded

    def __call__(self, given: Given, stream: int) -> None:
        """Launch the kernel on a CUDA stream of the current context."""
        values = [value if isinstance(value, int) else value.data_ptr() for value in map(given.__getitem__, self.names)]
        with self._lock:
            self._pack(self._memory, self._offset, *values)
            error = 0
            for address, place in self._maps:
                error |= self._replace(address, values[place])
            error |= self._launch(*self._before, stream, self._params, None)
        if error:
            raise RuntimeError(
                f"The CUDA driver could not launch a kernel of attention. Its error has the code {error}."
            )


class _Driver:
    """The functions of the CUDA driver that launches need."""

    def __init__(self, library: ctypes.CDLL, quick: ctypes.CDLL) -> None:
        self.launch = library.cuLaunchKernel
        self.launch.argtypes = [
            ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self.replace = quick.cuTensorMapReplaceAddress  # it keeps the interpreter lock, because it takes no time
        self.replace.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        self._param_info = library.cuFuncGetParamInfo
        pointer = ctypes.POINTER(ctypes.c_size_t)
        self._param_info.argtypes = [ctypes.c_void_p, ctypes.c_size_t, pointer, pointer]

    def has_address(self, tensor_map: bytes, address: int) -> bool:
        """Whether these bytes are a TMA descriptor of memory at this address: writing the address changes nothing.

        `_bytes_of_map` depends on how Triton's driver stores descriptors. Other bytes would be seen here.
        """
        memory = ctypes.create_string_buffer(2 * MAP_BYTES)
        place = -(-ctypes.addressof(memory) // MAP_BYTES) * MAP_BYTES
        ctypes.memmove(place, tensor_map, MAP_BYTES)
        error: int = self.replace(ctypes.c_void_p(place), address)
        return error == 0 and ctypes.string_at(place, MAP_BYTES) == tensor_map

    def has_params(self, function: int, sizes: Sequence[int]) -> bool:
        """Whether a function has parameters of exactly these sizes in bytes."""
        found: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while self._param_info(function, len(found), offset, size) == 0 and len(found) <= len(sizes):
            found.append(size.value)
        return found == list(sizes)


@lru_cache
def _driver() -> _Driver | None:
    """The driver, or None if there is none or if it is too old (before CUDA 12.4)."""
    try:
        return _Driver(ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None
