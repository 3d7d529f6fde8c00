# SPDX-License-Identifier: Apache-2.0
"""Only dist/group.py calls collectives and messages of torch.distributed, and only few modules make streams."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "twinflow"
GROUP = "dist/group.py"
COMMUNICATION = {
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "broadcast_object_list", "barrier"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_gather_coalesced"),
    *("gather", "gather_object", "scatter", "scatter_object_list", "monitored_barrier"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp", "send_object_list", "recv_object_list"),
    *("new_group", "new_subgroups", "split_group"),
}
STREAMS = {"Stream", "ExternalStream", "wait_stream", "record_stream"}
STREAM_MODULES = {
    GROUP: "streams of threads that receive messages",
    "device.py": "the streams of the runtime, by name",
    "activations/offload.py": "the caller's tensors are recorded for the copy stream, which is one of device.py",
}


def distributed_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names under which a module knows torch.distributed, and the functions that it imports from there."""
    modules, functions = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            functions |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.value) == "torch.distributed":
            modules |= {ast.unparse(target) for target in node.targets}
    return modules | {"torch.distributed", "distributed_c10d", "torch.distributed.distributed_c10d"}, functions


def communication_in(source: str) -> set[str]:
    tree = ast.parse(source)
    modules, functions = distributed_names(tree)
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules
    }
    return COMMUNICATION & (used | functions)


def streams_in(source: str) -> set[str]:
    """Streams that a module makes, and tensors or streams that it orders by hand."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return STREAMS & {
        func.attr
        for func in calls
        if isinstance(func, ast.Attribute) and (func.attr not in ("Stream",) or "cuda" in ast.unparse(func.value))
    }


def test_only_one_module_communicates() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted(ROOT.rglob("*.py"))
        if (names := communication_in(path.read_text()))
    }
    assert found.keys() == {GROUP}, "call a method of twinflow.dist.group.Group instead"


def test_few_modules_make_streams() -> None:
    found = {str(path.relative_to(ROOT)) for path in sorted(ROOT.rglob("*.py")) if streams_in(path.read_text())}
    assert found == STREAM_MODULES.keys()


def test_communication_is_found() -> None:
    assert communication_in("import torch.distributed as dist\ndist.all_reduce(x)") == {"all_reduce"}
    assert communication_in("from torch import distributed\ndistributed.barrier()") == {"barrier"}
    assert communication_in("from torch.distributed import isend") == {"isend"}
    assert communication_in("import torch\nd = torch.distributed\nd.new_group([0])") == {"new_group"}
    assert communication_in("import torch\ntorch.distributed.broadcast(x, 0)") == {"broadcast"}
    assert not communication_in("group.all_reduce(x)")
    assert streams_in("torch.cuda.Stream(d)") == {"Stream"}
    assert streams_in("x.record_stream(s)") == {"record_stream"}
    assert not streams_in("Stream('reduce', device)")
