# SPDX-License-Identifier: Apache-2.0
"""Files of tokens. They are memory-mapped, and identified by a fingerprint."""

from __future__ import annotations

import difflib
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twinflow.errors import invalid_value
from twinflow.files import open_regular, parse_json, read_bytes

TOKEN_SUFFIXES: Final = (".bin", ".npy")
SIDE_DTYPES: Final = ("uint8", "uint16", "uint32", "int32", "int64")
# Header of Megatron's index: magic, version, dtype code, number of sequences, number of documents.
INDEX_HEADER: Final = struct.Struct("<9sQBQQ")
INDEX_MAGIC: Final = b"MMIDIDX\0\0"
INDEX_DTYPES: Final = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
MAX_VOCAB: Final = 2**31
NPY_MAGIC: Final = b"\x93NUMPY"
WHOLE_HASH_BYTES: Final = 2**26  # the fingerprint of a larger file is computed from samples
NUM_SAMPLES: Final = 256
SAMPLE_BYTES: Final = 2**14
FINGERPRINT_BYTES: Final = 8

Array = npt.NDArray[Any]


def open_tokens(path: Path) -> tuple[Array, int | None]:
    """The memory-mapped tokens of a .bin or .npy file, and the vocabulary size in the JSON file beside it, if any."""
    side = read_side_file(path)
    tokens = _open_npy(path) if path.suffix == ".npy" else _open_bin(path, side.get("dtype", "uint16"))
    return tokens, side.get("vocab_size")


def is_there(path: Path) -> bool:
    """Whether there is a file of any kind. If it is not a regular file, reading it is an error."""
    return path.exists() and not path.is_dir()


def read_side_file(path: Path) -> dict[str, Any]:
    """The description of a file in `NAME.json` or `NAME.bin.json`: {"dtype": "uint16", "vocab_size": 50257}."""
    side = next((p for p in (path.with_suffix(".json"), path.with_name(path.name + ".json")) if is_there(p)), None)
    if side is None:
        return {}
    with reading(side):
        raw = read_bytes(side)
    try:
        content = parse_json(raw)
    except ValueError as error:
        raise ValueError(f"{side} describes {path.name}, but is not JSON ({error}). Correct or remove it.") from error
    if not isinstance(content, dict):
        raise invalid_value(str(side), content, 'an object like {"dtype": "uint16", "vocab_size": 50257}')
    dtype = content.get("dtype", "uint16")
    if not isinstance(dtype, str) or dtype not in SIDE_DTYPES:
        raise invalid_value(f"dtype in {side}", dtype, SIDE_DTYPES)
    vocab_size = content.get("vocab_size")
    if vocab_size is not None and (type(vocab_size) is not int or not 1 <= vocab_size <= MAX_VOCAB):
        raise invalid_value(f"vocab_size in {side}", vocab_size, f"a whole number >= 1 and <= {MAX_VOCAB}")
    return content


def _open_bin(path: Path, dtype_name: str) -> Array:
    """The tokens of a file of little-endian numbers. For Megatron's files the index gives the dtype, and all documents
    are read as one stream.
    """
    dtype = np.dtype(_index_dtype(path.with_suffix(".idx")) or dtype_name).newbyteorder("<")
    with reading(path), open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes % dtype.itemsize:
        raise invalid_value(
            f"The size of {path}",
            num_bytes,
            f"a multiple of {dtype.itemsize}, because its dtype is {dtype}",
            f'Copy the file again. If it has no .idx file, set its "dtype" in {path.stem}.json in the same folder.',
        )
    with reading(path):
        return np.memmap(path, dtype=dtype, mode="r") if num_bytes else np.empty(0, dtype)


def _index_dtype(index: Path) -> str | None:
    if not is_there(index):
        return None
    with reading(index), open_regular(index) as file:
        header = file.read(INDEX_HEADER.size)
    if len(header) < INDEX_HEADER.size or not header.startswith(INDEX_MAGIC):
        return None
    _, version, code, _, _ = INDEX_HEADER.unpack(header)
    if version != 1:
        raise invalid_value(f"The format version of {index}", version, [1], "Write the file again with Megatron-LM.")
    if code not in INDEX_DTYPES:
        raise invalid_value(f"The dtype code in {index}", code, INDEX_DTYPES, "Write the file again with Megatron-LM.")
    return INDEX_DTYPES[code]


def _open_npy(path: Path) -> Array:
    with reading(path), open_regular(path) as file:
        magic = file.read(len(NPY_MAGIC))
    if magic != NPY_MAGIC:
        raise ValueError(f"{path} has a name with .npy, but is not a .npy file. Save it with numpy.save.")
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy evaluates the header as a Python literal, and raises many kinds of errors
        raise ValueError(f"{path} is a .npy file that cannot be mapped ({error}). Save it with numpy.save.") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path} has an array of {array.dtype} with the shape {array.shape}, but must have integers in one "
            "dimension. Save the flat array of token ids with numpy.save."
        )
    return array


def hash_tokens(tokens: Array) -> str:
    """Fingerprint of the tokens. For a large file it is computed from the length and from evenly spread samples, so
    that only these are read.
    """
    state = hashlib.blake2b(f"{tokens.dtype} {len(tokens)}".encode(), digest_size=FINGERPRINT_BYTES)
    if tokens.nbytes <= WHOLE_HASH_BYTES:
        state.update(tokens.tobytes())
    else:
        length = SAMPLE_BYTES // tokens.dtype.itemsize
        for i in range(NUM_SAMPLES):
            start = (len(tokens) - length) * i // (NUM_SAMPLES - 1)
            state.update(tokens[start : start + length].tobytes())
    return state.hexdigest()


def hash_text(files: Iterable[Path], *how: str) -> str:
    """Fingerprint of all bytes of the files, in their order, and of `how`, which describes the encoding."""
    state = hashlib.blake2b("\0".join(how).encode(), digest_size=FINGERPRINT_BYTES)
    for path in files:
        with reading(path), open_regular(path) as file:
            state.update(f"\0{path.suffix} {path.stat().st_size}\0".encode())
            while block := file.read(2**20):
                state.update(block)
    return state.hexdigest()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError while reading `path` into a ValueError with a remedy."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"twinflow cannot read {path} ({error.strerror}). Make it readable or remove it.") from error


def missing_path(key: str, path: Path, allowed: str) -> ValueError:
    """The error for a path that does not exist. It names a similar path in the folder, or the missing folder."""
    path = path.absolute()
    remedy = f"There is no file or folder at {path}"
    if not path.parent.is_dir():
        remedy += f", nor is there a folder {path.parent}."
    else:
        try:
            near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
        except OSError:
            near = []
        remedy += f"; there is {near[0]!r} in that folder." if near else "."
    return invalid_value(key, str(path), allowed, remedy)
