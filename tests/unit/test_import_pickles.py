# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save are read without running what is pickled in them; what asks for more is refused by name."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files_support import trained, write
from typer.testing import CliRunner

from twinflow.checkpoint.torch_files import RefusedError, load_torch_file
from twinflow.cli.main import app


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Custom:
    pass


def archive(path: Path, raw: bytes) -> Path:
    """A file as torch.save makes it, with any pickle in it."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", raw)
        file.writestr("x/byteorder", "little")
        file.writestr("x/data/0", bytes(16))
    return path


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("where", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_call_is_refused_and_not_made(where: str, depth: int, tmp_path: Path) -> None:
    source = write(tmp_path / "ds", *trained(), 2, 2)
    value: Any = Evil(os.system, f"touch {tmp_path}/ran")
    for _ in range(depth):
        value = {"more": [value], "tensor": torch.zeros(2)}
    torch.save({"module": value, "optimizer_state_dict": value}, source / "global_step3" / where)
    result = CliRunner().invoke(app, ["import", str(source), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert where in result.output
    assert f"{os.system.__module__}.system" in result.output
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_classes_and_functions_are_refused_by_name(tmp_path: Path) -> None:
    rebuild = torch._tensor._rebuild_from_type_v2
    shell = f"touch {tmp_path}/ran"
    for value, name in (
        (Custom(), "test_import_pickles.Custom"),
        (Custom, "test_import_pickles.Custom"),
        ([torch.zeros(1), {"x": Custom()}], "Custom"),
        (Evil(eval, f"__import__('os').system('{shell}')"), "eval"),
        (Evil(getattr, "a", "upper"), "getattr"),
        (Evil(rebuild, os.system, torch.Tensor, (shell,), {}), "system"),
        (nn_module(), "torch.nn.modules"),
    ):
        for protocol in (2, 4):
            torch.save(value, tmp_path / "x.pt", pickle_protocol=protocol)
            with pytest.raises(RefusedError, match=name) as caught:
                load_torch_file(tmp_path / "x.pt")
            assert "x.pt" in str(caught.value)
    assert not (tmp_path / "ran").exists()


def nn_module() -> Any:
    return torch.nn.Linear(2, 2)


def test_instructions_beyond_those_of_torch_are_refused(tmp_path: Path) -> None:
    push = b"\x80\x02"
    system = b"cposix\nsystem\n"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n"
    state = b"}X\x0c\x00\x00\x00__defaults__)s"
    dtype = b"ctorch\nfloat32\n"
    for raw, words in (
        (push + b"(S'touch ran'\niposix\nsystem\n.", "STRING"),
        (push + b"(X\x02\x00\x00\x00lsiposix\nsystem\n.", "INST"),
        (push + b"(" + system + b"X\x02\x00\x00\x00lso.", "posix.system"),
        (push + tensor + state + b"b.", "sets attributes of a Meaning"),
        (push + tensor + b"N" + state + b"\x86b.", "sets attributes of a Meaning"),
        (push + dtype + state + b"b.", "sets attributes of a dtype"),
        (push + b"}X\x01\x00\x00\x00a\x85R.", "calls a dict"),
        (push + dtype + b")\x81.", "calls a dtype"),
        (push + b"\x82\x01.", "EXT1"),
    ):
        with pytest.raises(RefusedError, match=words):
            load_torch_file(archive(tmp_path / "x.pt", raw))


def test_pickles_that_are_not_sound_are_damage(tmp_path: Path) -> None:
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n"
    storage = b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
    rest = b"\x89}t"
    for raw in (
        b"",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02R.",
        b"\x80\x02h\x05.",
        b"\x80\x02]K\x01s.",
        b"\x80\x02}]K\x01s.",
        b"\x80\x02X" + struct.pack("<I", 2**31) + b"a.",
        b"\x80\x02ctorch\nTensor\n)R.",
        b"\x80\x02" + tensor + storage + b"K\x00K\x05\x85K\x01\x85" + rest + b"R.",  # beyond the storage
        b"\x80\x02"
        + tensor
        + storage
        + b"K\x00J\xff\xff\xff\x7f\x85K\x00\x85"
        + rest
        + b"R.",  # any size out of one value
        b"\x80\x02" + tensor + storage + b"J\xff\xff\xff\xffK\x01\x85K\x01\x85" + rest + b"R.",  # a negative offset
        b"\x80\x02" + tensor + storage.replace(b"K\x04", b"K\x05") + b"K\x00K\x01\x85K\x01\x85" + rest + b"R.",
        b"\x80\x02" + storage[1:] + b"K\x00K\x01s.",  # a value of a tensor is set
        b"\x80\x02" + storage[1:] + b"(K\x00K\x01u.",
        b"\x80\x02" + storage[1:] + b"(K\x01\x90.",
        b"\x80\x02cbuiltins\nset\n" + storage[1:] + b"\x85R.",
        b"\x80\x02K\x01r\xff\xff\xff\xffh\x05.",  # a large index of the memo
    ):
        with pytest.raises(ValueError, match=r"x\.pt"):
            load_torch_file(archive(tmp_path / "x.pt", raw))
    good = archive(tmp_path / "x.pt", b"\x80\x02" + tensor + storage + b"K\x00K\x04\x85K\x01\x85" + rest + b"R.")
    assert load_torch_file(good).tolist() == [0.0] * 4


def mapped_file(tensor: torch.Tensor) -> Path | None:
    """The file whose mapping has the tensor's values: they are read when they are used."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return Path(line.split(maxsplit=5)[5])
    return None


def test_tensors_come_back_as_they_were_saved(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    saved = {
        "transposed": base.t(),
        "part": base[1:3, 2:5],
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "uint16": torch.arange(3).to(torch.uint16),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        **{str(d): torch.arange(5).to(d) for d in (torch.int64, torch.uint8, torch.bool, torch.float64, torch.float16)},
    }
    plain = {"n": None, "t": (1, -2, 2**70, 1.5, True), "s": "ü", "b": b"\xff\0", "set": {1}, "size": torch.Size([2])}
    for protocol in (2, 4):
        torch.save({**saved, "plain": plain, "dtype": torch.bfloat16}, tmp_path / "x.pt", pickle_protocol=protocol)
        found = load_torch_file(tmp_path / "x.pt")
        assert found["plain"] == plain
        assert found["dtype"] == torch.bfloat16
        for name, tensor in saved.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor.detach()), name
            if tensor.numel():
                assert mapped_file(found[name]) == tmp_path / "x.pt"
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"old\.pt is not a file of torch.save"):
        load_torch_file(tmp_path / "old.pt")
