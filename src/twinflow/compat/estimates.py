"""Memory estimators with DeepSpeed's names: memory of weights, gradients and optimizer state with twinflow.

The estimates assume bf16 weights and AdamW, as DeepSpeed's do. Host figures are for one machine with all of its ranks.
`additional_buffer_factor` covers the other buffers of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from twinflow.planner.formats import WEIGHT_BYTES, state_bytes

_WIDTH = WEIGHT_BYTES["bf16"]


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes on a host and on a GPU with stage 2: each rank has all weights and a part of gradients and optimizer
    state."""
    world, size = num_gpus_per_node * num_nodes, state_bytes("fp32")
    weights, gradients = _WIDTH * total_params, _WIDTH * total_params / world
    if cpu_offload:
        return int(size.host * total_params / num_nodes * additional_buffer_factor), int(weights + gradients)
    return 0, int(weights + gradients + size.resident * total_params / world)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes on a host and on a GPU with stage 3, and bytes of the layers that are gathered at a time.

    `zero_init` has no effect: a model that was built whole is partitioned when training starts.
    """
    world, size = num_gpus_per_node * num_nodes, state_bytes("fp32")
    gathered = 2 * _WIDTH * largest_layer_params  # the current layer and the next one
    part = total_params / world
    if not cpu_offload:
        return 0, int(gathered + (2 * _WIDTH + size.resident) * part), gathered
    on_gpu = gathered if cpu_offload_params else gathered + 2 * _WIDTH * part
    return int(size.host * total_params / num_nodes * additional_buffer_factor), int(on_gpu), gathered


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the stage 2 estimates for a model."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _count(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the stage 2 estimates for a number of parameters."""
    rows = []
    for offload in (True, False):
        found = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((found[0], found[1], f"offload_optimizer={'cpu' if offload else 'none'}"))
    _show(total_params, num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the stage 3 estimates for a model."""
    largest = max((sum(p.numel() for p in part.parameters(recurse=False)) for part in model.modules()), default=0)
    estimate_zero3_model_states_mem_needs_all_cold(
        _count(model), largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the stage 3 estimates for a number of parameters."""
    rows = []
    for offload, params in ((True, True), (True, False), (False, False)):
        found = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            offload,
            params,
            additional_buffer_factor=additional_buffer_factor,
        )
        options = f"offload_param={'cpu' if params else 'none'}, offload_optimizer={'cpu' if offload else 'none'}"
        rows.append((found[0], found[1], options))
    _show(total_params, num_gpus_per_node, num_nodes, rows)


def _count(model: nn.Module) -> int:
    """Counts parameters. A shared parameter counts once."""
    return sum(param.numel() for param in set(model.parameters()))


def _show(total: int, num_gpus: int, num_nodes: int, rows: Sequence[tuple[int, int, str]]) -> None:
    print(f"weights, gradients and AdamW's state of {total / 1e6:.0f}M parameters with twinflow,")
    print(f"bf16 weights, {num_nodes} machines with {num_gpus} GPUs each:")
    print(f"{'a host':>12}  {'a GPU':>12}  options")
    for host, gpu, options in rows:
        print(f"{host / 2**30:>9.2f} GB  {gpu / 2**30:>9.2f} GB  {options}")
