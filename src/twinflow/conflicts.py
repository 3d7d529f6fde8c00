# SPDX-License-Identifier: Apache-2.0
"""Features that exclude each other: one table for the errors and for docs/conflicts.md.

Conflicts with pipeline and tensor parallelism are in `twinflow.parallel.support`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from twinflow.errors import incompatible


@dataclass(frozen=True)
class Conflict:
    """Two features that exclude each other. A name in braces stands for a value of the run."""

    option: str
    other: str
    reason: str  # continues "because"
    remedy: str

    def error(self, /, **values: object) -> ValueError:
        texts = (self.option, self.other, self.reason, self.remedy)
        return incompatible(*(text.format(**values) for text in texts))


_LIST: Final = "parameters as the first argument"
_ON_HOST: Final = "offload_params=True"
_PARAM_KEY: Final = "zero_optimization.offload_param"
_COMPRESSED: Final = "compressed communication"
_ONE_BIT: Final = "optimizer.type OneBitAdam"
_REPLICATED: Final = "optimizer.type ZeroOneAdam or OneBitLamb"
_STAGE_3: Final = "zero_optimization.stage 3"
_SEQUENCE: Final = "sequence ranks (sequence_parallel_size)"
_EXPERTS: Final = "expert ranks (expert_parallel_size)"
_RING: Final = 'sequence ranks in the mode "ring"'
_USE_ULYSSES: Final = 'Use the mode "ulysses".'
_GIVE_MODEL: Final = "Pass the model as the first argument."
_NO_STREAMED: Final = "Use tuning.streamed=0."
_ON_DISK: Final = "state on the disk (nvme_path)"
_WEIGHTS_ON_DISK: Final = "weights on the disk (offload_param.device nvme, or tuning.param_nvme_path)"

DIVISIONS: Final = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}  # config keys and their defaults


def _divisions(other: str, reason: str) -> dict[str, Conflict]:
    """Conflicts of the keys that divide gradients before the sum over ranks."""
    return {
        key: Conflict(f"{key}={{{key}}}", other, reason, f"Set {key} to {str(default).lower()}.")
        for key, default in DIVISIONS.items()
    }


CONFLICTS: Final[Mapping[str, Mapping[str, Conflict]]] = {
    "TwinOptimizer": {
        "DistributedDataParallel": Conflict(
            "A model in DistributedDataParallel",
            "TwinOptimizer",
            "TwinOptimizer reads gradients before DistributedDataParallel has reduced them",
            "Pass model.module, the module in the wrapper, and zero=Zero(stage=0), which sums gradients over ranks.",
        ),
        "placement": Conflict(
            "placement={placement!r}",
            'ratio="auto"',
            'ratio="auto" chooses the placement too',
            'Use placement="auto".',
        ),
        "streamed": Conflict(
            "tuning.streamed={streamed}",
            "delayed_update=True",
            "a streamed update writes the weights immediately, without the delay",
            _NO_STREAMED,
        ),
        "delayed_update_start": Conflict(
            "delayed_update_start={start}",
            "delayed_update=False",
            "delayed_update_start is the number of steps before the first delayed update, and no update is delayed",
            "Set delayed_update to True, or leave delayed_update_start out.",
        ),
        "max_grad_value": Conflict(
            "max_grad_value",
            'early=True or early="auto"',
            "the limit applies to the sum of all gradients of a step, and an early update would use a part of it",
            "Use early=False.",
        ),
        "groups of an instance": Conflict(
            "param_groups",
            "an optimizer instance as rule",
            "the instance has its own groups",
            "Pass the groups when you build that optimizer.",
        ),
    },
    "A list of parameters": {
        "param_groups": Conflict(
            "param_groups", _LIST, "both choose the parameters to train", "Pass the groups as the first argument."
        ),
        "ratio": Conflict(
            'ratio="auto"',
            _LIST,
            "the ratio is chosen from the times of forward and backward of the model",
            "Pass the model as the first argument, or a number as ratio.",
        ),
        "early": Conflict("early=True", _LIST, "early updates need hooks on the model", _GIVE_MODEL),
        "delayed_update": Conflict(
            "delayed_update=True", _LIST, "delayed updates need hooks on the model", _GIVE_MODEL
        ),
        "offload_params": Conflict(
            _ON_HOST, _LIST, "the weights of each layer are fetched by hooks on the model", _GIVE_MODEL
        ),
        "compression": Conflict(
            "A list of parameters", _COMPRESSED, "compressed communication needs the model", _GIVE_MODEL
        ),
    },
    "Weights on the host": {
        "parks": Conflict(
            "offload_params=False",
            "Zero(parks=True)",
            "`parks` means that weights are on the host",
            "Use offload_params=True.",
        ),
        "embeddings": Conflict(
            'zero_optimization.offload_param.device "none"',
            "zero_optimization.offload_param.embeddings",
            "the embedding and output layers are on the host only if the blocks are there too",
            'Set the device to "cpu", or leave `embeddings` out.',
        ),
        "offload_embeddings": Conflict(
            "offload_params=False",
            "tuning.offload_embeddings=True",
            "the embedding and output layers are on the host only if the blocks are there too",
            "Use offload_params=True.",
        ),
        "--offload-embeddings": Conflict(
            "weights on the GPU",
            "--offload-embeddings",
            "the embedding and output layers are on the host only if the blocks are there too",
            "Use --offload-params, or leave --offload-embeddings out.",
        ),
        "zero": Conflict(
            _ON_HOST,
            "Zero(parks=False)",
            "ranks divide the weights on the host only with parks=True",
            "Use zero=Zero(stage=3, parks=True).",
        ),
        "rule": Conflict(
            "A user's optimizer as rule",
            _ON_HOST,
            "weights on the host are part of the optimizer state of twinflow's own rules",
            "Use one of the rules {rules}.",
        ),
        "ratio": Conflict(
            'ratio="auto"',
            f"{_ON_HOST} on several ranks (zero)",
            "all ranks must fetch the same blocks, and a rank whose memory is full could not move a block",
            "Use a number as ratio.",
        ),
        "streamed ratio": Conflict(
            "tuning.streamed={streamed}",
            f'{_ON_HOST} with ratio="auto"',
            '"auto" moves whole blocks, whose state is updated where it is stored',
            "Use tuning.streamed=0, or a number as ratio.",
        ),
        "delayed_update": Conflict(
            "delayed_update=True",
            _ON_HOST,
            "a delayed update needs a second copy of the weights, and the host has only one",
            "Use delayed_update=False.",
        ),
        "stage of Zero": Conflict(
            "parks=True (weights on the host)",
            "stage {stage}",
            "only stage 3 partitions weights",
            "Use Zero(stage=3, parks=True).",
        ),
        "stage": Conflict(
            "zero_optimization.stage {stage}",
            _PARAM_KEY,
            "only stage 3 fetches weights block by block",
            "Set stage 3, or leave offload_param out.",
        ),
        "moved state": Conflict(
            "{call}",
            _ON_HOST,
            "the weights of a block are where its state is",
            "Leave the call out: the state is on the host already.",
        ),
        "delayed_update key": Conflict(
            "zero_optimization.offload_optimizer.delayed_update={delayed_update}",
            _PARAM_KEY,
            "a delayed update needs a second copy of the weights, and the optimizer state has only one",
            "Set delayed_update to false.",
        ),
    },
    "State on the disk": {
        "ratio": Conflict(
            'ratio="auto"',
            _ON_DISK,
            "the placement is chosen from times of updates in memory",
            "Use a number as ratio, such as 1.0.",
        ),
        "rule": Conflict(
            "A user's optimizer as rule",
            _ON_DISK,
            "the native executor reads state for the updates of twinflow's own rules",
            "Use one of the rules {rules}, or leave nvme_path out.",
        ),
        "muon": Conflict(
            'rule="muon"',
            _ON_DISK,
            "Muon updates matrices on the GPU, which copies their state from host memory",
            'Use rule="adamw", or leave nvme_path out.',
        ),
        "delayed_update": Conflict(
            "delayed_update=True",
            _ON_DISK,
            "a delayed update keeps its weights in the state until the next step",
            "Use delayed_update=False.",
        ),
        "streamed": Conflict(
            "tuning.streamed={streamed}", _ON_DISK, "streamed state is copied from host memory", _NO_STREAMED
        ),
        "shadow_bytes": Conflict(
            "shadow_bytes={shadow_bytes}",
            _ON_DISK,
            "updates before the clipping decision need a second copy of the state in host memory",
            "Leave shadow_bytes out: these updates wait for the decision.",
        ),
        "compression": Conflict(
            "1-bit Adam",
            _ON_DISK,
            "its ranks exchange differences to weights in the state, which must be in host memory",
            "Use AdamW, or leave nvme_path out.",
        ),
    },
    "Weights on the disk": {
        "offload_params": Conflict(
            _WEIGHTS_ON_DISK,
            "offload_params=False",
            "only weights of blocks that are on the host can be on a disk",
            "Use offload_params=True, or leave param_nvme_path out.",
        ),
        "ratio": Conflict(
            'ratio="auto"',
            _WEIGHTS_ON_DISK,
            "blocks move to the device from memory",
            "Use a number as ratio, such as 1.0.",
        ),
        "streamed": Conflict(
            "tuning.streamed={streamed}",
            _WEIGHTS_ON_DISK,
            "the GPU copies weights that it has updated to host memory",
            _NO_STREAMED,
        ),
        "state": Conflict(
            _WEIGHTS_ON_DISK,
            "optimizer state in host memory, if no block has frozen weights",
            "this state contains the weights, so that a copy of them on a disk would save no memory",
            "Have the state on a disk too (offload_optimizer.device nvme, or tuning.nvme_path), or set "
            "offload_param.device to cpu.",
        ),
    },
    "ZeRO stages 2 and 3": {
        "rule": Conflict(
            "rule={rule}",
            _STAGE_3,
            "each rank has only some rows of a parameter, and a user's optimizer needs whole parameters",
            "Use stage 1 or 2, or one of the rules {rules}.",
        ),
        "modes": Conflict(
            "train() and eval() of {rule}",
            "zero_optimization.stage {stage}",
            "each rank has the state of some parameters only, and the average is made from the state",
            "Use stage 0.",
        ),
        "no dimensions": Conflict(
            "{name}, a parameter without dimensions,",
            _STAGE_3,
            "fully_shard() partitions the first dimension",
            "Make the parameter a tensor with one element, torch.ones(1), or use stage 2.",
        ),
        "quantised": Conflict(
            "{name}, a quantised weight,",
            _STAGE_3,
            "fully_shard() cannot divide the format of another library",
            "Use stage 2, or offload_param: quantised weights are whole on each rank then.",
        ),
        "predivide": Conflict(
            "predivide={predivide}", "stage 3", "fully_shard divides gradients itself", "Use predivide=1."
        ),
        **_divisions(_STAGE_3, "fully_shard divides gradients itself, partly before and partly after the sum"),
        "no_sync": Conflict(
            "no_sync()",
            "zero_optimization.stage {stage_2_or_3}",
            "with these stages ranks sum the gradients of every micro-batch",
            "Remove no_sync(), or use stage 1.",
        ),
        "external": Conflict(
            "register_external_parameter() after initialize()",
            "zero_optimization.stage 3 on several ranks",
            "the weight is partitioned already, and is gathered only for the layer that owns it",
            "Call it before initialize(), for example in the constructor of the module.",
        ),
    },
    "Muon": {
        "offload_params": Conflict(
            'rule="muon"',
            _ON_HOST,
            "Muon updates matrices on the GPU, and the only copy of their weights would be on the host",
            "Use offload_params=False. The optimizer state can be on the host.",
        ),
        "delayed_update": Conflict(
            'rule="muon"',
            "delayed_update=True",
            "an update of a matrix on the GPU writes the weights immediately, without the delay",
            "Use delayed_update=False.",
        ),
        "master": Conflict(
            'rule="muon"',
            'master="none"',
            "the updates of matrices do not round stochastically, so small changes of bf16 weights would be lost",
            'Use master="fp32".',
        ),
        "tensor ranks": Conflict(
            "Muon for {name}",
            "tensor ranks",
            "each of them has a part of the matrix, and an update needs the whole matrix",
            'Use rule="adamw", or ZeRO instead of tensor ranks.',
        ),
        "few rows": Conflict(
            "Muon for {name}, a matrix with {num_rows} rows,",
            "zero_optimization.stage 3 on {world} ranks",
            "fully_shard() would give some ranks no rows",
            'Put the matrix into a param group with "use_muon": False, or use stage 2.',
        ),
    },
    "1-bit Adam": {
        "rule": Conflict("rule={rule!r}", _COMPRESSED, "1-bit Adam is defined for AdamW only", 'Use rule="adamw".'),
        "states": Conflict(
            "states={states!r}",
            _COMPRESSED,
            "the frozen second moment consists of powers of two, which this format cannot store exactly",
            'Use states="fp32" or states="bf16".',
        ),
        "master": Conflict(
            'master="none"',
            _COMPRESSED,
            "the differences between masters and weights are what ranks have not communicated yet",
            'Use master="fp32".',
        ),
        "ratio": Conflict(
            'ratio="auto"',
            _COMPRESSED,
            "the optimizer state must not move between the GPU and the host",
            "Pass a number as ratio.",
        ),
        "delayed_update": Conflict(
            "delayed_update=True",
            _COMPRESSED,
            "ranks send the changes of weights right after the update",
            "Use delayed_update=False.",
        ),
        "streamed": Conflict(
            "tuning.streamed={streamed}",
            _COMPRESSED,
            "compressed communication supports only state that is updated where it is stored",
            _NO_STREAMED,
        ),
        "max_grad_value": Conflict(
            "max_grad_value",
            _COMPRESSED,
            "ranks exchange momenta, and the sum of their gradients is not known",
            "Use max_grad_norm.",
        ),
        "betas": Conflict(
            "Param groups with different betas[0] ({betas})",
            _COMPRESSED,
            "the momenta of parameters in different groups are encoded together",
            "Use the same betas[0] in all groups.",
        ),
        "stage of Zero": Conflict(
            "stage {stage_except_1} of Zero",
            _COMPRESSED,
            "compressed communication always works as stage 1: each rank has all weights and owns a part of the state",
            "Use Zero(stage=1).",
        ),
        "predivide": Conflict(
            "predivide={predivide}",
            _COMPRESSED,
            "compressed communication computes the mean over the ranks itself",
            "Use predivide=1.",
        ),
        "stage": Conflict(
            _STAGE_3,
            _ONE_BIT,
            "ranks send compressed changes of weights, and each rank needs the whole weights",
            "Set stage 0, 1 or 2.",
        ),
        **_divisions(_ONE_BIT, "OneBitAdam always computes the mean of the momenta of the ranks"),
    },
    "0/1 Adam and 1-bit LAMB": {
        "stage": Conflict(
            "zero_optimization.stage {stage}",
            _REPLICATED,
            "every rank needs the whole optimizer state: ranks make steps of their own, or need norms of parameters",
            'Set stage 0, or use the type "OneBitAdam".',
        ),
        "offload": Conflict(
            'zero_optimization.{section}.device "cpu"',
            _REPLICATED,
            "ranks exchange momenta between GPUs during the update, so that the state must be on the GPU",
            'Leave {section} out, or use the type "OneBitAdam" with offload_optimizer.',
        ),
        "axes": Conflict(
            "Pipeline or tensor parallelism",
            _REPLICATED,
            "copies of a parameter on several ranks would get different updates",
            'Use the type "OneBitAdam".',
        ),
        "max_grad_value": Conflict(
            "gradient_clipping_value={limit}",
            _REPLICATED,
            "ranks exchange momenta, and the sum of their gradients is not known",
            "Use gradient_clipping.",
        ),
        "sum": Conflict(
            'gradient_allreduce_op "sum"',
            _REPLICATED,
            "ranks exchange the mean of their momenta",
            'Set gradient_allreduce_op to "mean".',
        ),
        "background": Conflict(
            "checkpoint.background",
            _REPLICATED,
            "an update writes to the state that the thread reads",
            "Set checkpoint.background to false.",
        ),
        "moved state": Conflict(
            "{call}", _REPLICATED, "the optimizer owns its state and cannot move it", "Leave the call out."
        ),
        **_divisions(_REPLICATED, "ranks exchange the mean of their momenta"),
    },
    "Other keys of the config": {
        "precision": Conflict(
            "fp16.enabled",
            "bf16.enabled",
            "a model is trained in one of the two formats",
            "Set one of them to false.",
        ),
        "loss scale": Conflict(
            "fp16.initial_scale_power={power}",
            "fp16.min_loss_scale={least:g}",
            "the first scale is 2**{power}, which is below the lowest scale",
            "Increase initial_scale_power or reduce min_loss_scale.",
        ),
        "tensor ranks": Conflict(
            "tensor_parallel.autotp_size={autotp_size}",
            "tensor_parallel.tp.tp_size={tp_size}",
            "both set the number of tensor-parallel ranks",
            "Set only one of them.",
        ),
        "activations": Conflict(
            "activation_checkpointing.partition_activations",
            "activation_checkpointing.cpu_checkpointing",
            "the saved inputs are either divided among tensor ranks or kept on the host",
            "Set one of them to false.",
        ),
        "partitioned float8": Conflict(
            "activation_checkpointing.partition_activations",
            "activation_checkpointing.float8 or every",
            "the saved inputs of tensor ranks are parts of a tensor",
            "Set partition_activations to false.",
        ),
        "selective groups": Conflict(
            "activation_checkpointing.selective",
            "activation_checkpointing.float8 or every",
            "selective keeps results inside of layers, and not only their inputs",
            "Set selective to false.",
        ),
        "grouped weights": Conflict(
            "activation_checkpointing.every={every}",
            "{option}",
            "a group of layers runs again while only the weights of its last layer are on the device",
            "Set every to 1, or keep the weights on the device.",
        ),
        "selective compiled": Conflict(
            "activation_checkpointing.selective",
            "compile.blocks",
            "the checkpoint is around a compiled block, and cannot see the operations inside",
            "Set one of them to false. `twinflow train` can do both, with --recompute selective --compile.",
        ),
        "sparse compiled": Conflict(
            "sparse_attention",
            "compile.blocks",
            "its kernels cannot be a part of a compiled graph, so that every block would be cut into pieces",
            "Leave one of them out.",
        ),
        "inner compiled": Conflict(
            "activation_checkpointing.layers with {layer}",
            "compile.blocks",
            "a block is compiled as a whole, and this layer is only a part of one",
            "Checkpoint whole blocks: leave layers out.",
        ),
        "given optimizer": Conflict(
            "{own_key}",
            "a TwinOptimizer that is passed to initialize()",
            "a TwinOptimizer has its own states, tuning and loss scale",
            "Remove the key from the config, and pass the option to TwinOptimizer().",
        ),
    },
    "Tiled sequences": {
        "router loss": Conflict(
            "output_router_logits",
            "tile_sequence() of modules with experts",
            "tiles compute the inner results of a module without gradients, so the loss of the router would have none",
            "Set config.output_router_logits to False, or leave these modules out.",
        ),
    },
    "Sequence parallelism": {
        "sum": Conflict(
            'gradient_allreduce_op "sum"',
            _SEQUENCE,
            "the loss is the mean over the tokens of all ranks",
            'Set gradient_allreduce_op to "mean".',
        ),
        "one bit": Conflict(
            "optimizer.type {optimizer}",
            _SEQUENCE,
            "compressed communication assumes that each rank has samples of its own",
            'Use the type "AdamW".',
        ),
        "compiled": Conflict(
            "compile.blocks",
            _SEQUENCE,
            "ranks communicate inside of each block",
            "Set compile.blocks to false.",
        ),
        "given optimizer": Conflict(
            "A TwinOptimizer without zero",
            _SEQUENCE,
            "the gradients of the ranks of a sequence must be summed",
            "Build it with zero=twinflow.zero.Zero(stage=2), or name the optimizer in the config.",
        ),
        "head patterns": Conflict(
            "Sparse attention with a pattern for each head",
            'sequence ranks in the mode "ulysses"',
            "ranks have different heads, but use the same pattern",
            'Set different_layout_per_head to false, or use the mode "ring".',
        ),
        "packed batch": Conflict(
            "Packed sequences in a batch of {batch_size} rows",
            _SEQUENCE,
            "the packed sequences of all rows would have to begin at the same positions",
            "Pack all sequences of the batch into one row.",
        ),
        "packed sparse": Conflict(
            "Packed sequences",
            "sequence ranks and sparse attention",
            "the pattern is made for one sequence",
            "Use dense attention, or do not pack sequences.",
        ),
        "packed window": Conflict(
            "Packed sequences",
            "sequence ranks and a model with a sliding window",
            "the mask of the window is made for one sequence",
            "Do not pack sequences, or use a model without a window.",
        ),
        "packed model": Conflict(
            "Packed sequences",
            "sequence ranks and {name}",
            "this layer does not pass cu_seq_lens_q to its attention function",
            "Do not pack sequences.",
        ),
        "left padding": Conflict(
            "An attention_mask with padding before tokens",
            _SEQUENCE,
            "only padding at the end needs no mask",
            "Pad on the right, and divide the batch with engine.sequence.split(batch).",
        ),
        "cache": Conflict(
            "A cache of keys and values",
            _SEQUENCE,
            "each rank has the keys of its tokens only",
            "Generate after handle.remove() or engine.destroy().",
        ),
        "num_items_in_batch": Conflict(
            "num_items_in_batch",
            _SEQUENCE,
            "the loss is divided by the number of targets of all ranks",
            "Leave it out. The Trainer of transformers cannot split sequences: use twinflow.initialize().",
        ),
        "other model": Conflict(
            "{name}",
            _SEQUENCE,
            "only the loss of causal language models is a mean over tokens",
            "Use a model for causal language modelling.",
        ),
        "router loss": Conflict(
            "output_router_logits",
            _SEQUENCE,
            "the loss of the router is a product of means over the tokens of one rank",
            "Set config.output_router_logits to False.",
        ),
        "own attention": Conflict(
            "{name}",
            _SEQUENCE,
            "its layers do not use transformers' attention interface, or attend to another sequence",
            "Use a decoder-only model that uses the interface.",
        ),
        "mixing layers": Conflict(
            "{name}",
            _SEQUENCE,
            "it has layers ({layers}) that mix tokens outside of the attention interface",
            "Use a model whose layers are attention and MLPs.",
        ),
        "own mask": Conflict(
            "{name}",
            _SEQUENCE,
            "it computes a mask of its own, from the tokens of one rank",
            "Use a model with causal attention.",
        ),
        "own positions": Conflict(
            "{name}",
            _SEQUENCE,
            "it computes the positions of its tokens itself, and does not take them as position_ids that begin at 0",
            "Use a model with position_ids.",
        ),
        "modalities": Conflict(
            "{name}",
            _SEQUENCE,
            "it has other inputs than text, which cannot be divided with the tokens",
            "Use the class of its language model.",
        ),
        "argument": Conflict(
            "The argument {argument} of the shape {shape}",
            _SEQUENCE,
            "only tensors [batch, tokens, ...] can be divided with the tokens, and position_ids are [batch, tokens]",
            "Leave it out.",
        ),
        "length of rope": Conflict(
            'Rotary positions of the kind "{kind}" beyond {limit} tokens, with {total} tokens,',
            _SEQUENCE,
            "their frequencies depend on the number of tokens, and ranks would choose different ones",
            "Use more or fewer tokens, or positions of another kind.",
        ),
        "ring bidirectional": Conflict(
            "{name}, which is not causal,",
            _RING,
            "the ring has blocks of causal attention only",
            _USE_ULYSSES,
        ),
        "ring window": Conflict(
            "{name}, which has layers with a sliding window,",
            _RING,
            "the ring has no mask for windows",
            f"{_USE_ULYSSES} Sparse attention with a window works with both modes.",
        ),
        "ring dropout": Conflict(
            "Dropout {dropout} in attention", _RING, "the ring does not drop scores", f"Set it to 0. {_USE_ULYSSES}"
        ),
        "ring option": Conflict("{option} of {name}", _RING, "the ring computes plain causal attention", _USE_ULYSSES),
    },
    "Expert parallelism": {
        "stage": Conflict(
            _STAGE_3,
            _EXPERTS,
            "fully_shard would divide experts over all ranks, but only some ranks have the same experts",
            "Set zero_optimization.stage to 2, which also partitions the optimizer state.",
        ),
        "compression": Conflict(
            "1-bit Adam, 0/1 Adam and 1-bit LAMB",
            _EXPERTS,
            "they compress the communication of all ranks, but only some ranks have the same experts",
            'Use the type "AdamW".',
        ),
        "Muon": Conflict("Muon", _EXPERTS, "this combination was not tested", 'Use the type "AdamW".'),
        "other optimizer": Conflict(
            "The optimizer {optimizer}",
            _EXPERTS,
            "its update may depend on all experts of a tensor, and a rank has only some of them",
            "Use one of twinflow's update rules, by its name, such as AdamW.",
        ),
        "PipelineModule": Conflict(
            "A PipelineModule", _EXPERTS, "this combination was not tested", "Pass the model itself."
        ),
        "sequence": Conflict(_SEQUENCE, _EXPERTS, "this combination was not tested", "Leave one of the two keys out."),
        "compiled": Conflict(
            "compile.blocks",
            _EXPERTS,
            "ranks communicate inside of each block",
            "Set compile.blocks to false.",
        ),
        "float8": Conflict(
            "float8.enabled", _EXPERTS, "this combination was not tested", "Set float8.enabled to false."
        ),
        "given optimizer": Conflict(
            "A TwinOptimizer that is passed to initialize()",
            _EXPERTS,
            "it was built before the model was split",
            "Name the optimizer in the config, or call twinflow.zero.split_experts(model, size) before building it "
            "and leave expert_parallel_size out.",
        ),
        "no optimizer": Conflict(
            "An engine without an optimizer",
            _EXPERTS,
            "checkpoints use the groups of ranks of the optimizer",
            "Leave expert_parallel_size out.",
        ),
        "adapters": Conflict(
            "A model with adapters of PEFT",
            _EXPERTS,
            "an adapter may change how the experts compute",
            "Merge the adapters, or leave expert_parallel_size out.",
        ),
        "quantised": Conflict(
            "The quantised weight {name}",
            _EXPERTS,
            "only plain tensors can be divided by expert",
            "Load the model without quantisation.",
        ),
        "given weights": Conflict(
            "A state dict with the part {name} for save_pretrained()",
            "weights that ranks have divided",
            "the files would have no whole weights",
            "Call save_pretrained() without state_dict on all ranks, or use engine.save_16bit_model().",
        ),
        "whole weights": Conflict(
            "{call}",
            _EXPERTS,
            "each rank has the weights of its own experts only",
            "Use the methods of the engine of twinflow.initialize(), such as save_16bit_model().",
        ),
    },
    "DeepSpeed's functions": {
        "in backward": Conflict(
            "A read of a gradient, master or state between backward() and step()",
            "updates that start during backward",
            "the update has already used the gradient and may have changed the state",
            "Set gradient_clipping above 0 or bf16.check_grad_overflow to true: updates then wait for the norm.",
        ),
        "taken": Conflict(
            "{call}",
            "ranks that sum gradients during backward",
            "the sum has begun and cannot be undone",
            "Set zero_optimization.offload_optimizer.early to false, and do not use offload_param.",
        ),
    },
    "Hugging Face and Lightning": {
        "twin": Conflict(
            "twin={options}",
            "a TwinOptimizer in optimizers=",
            "this TwinOptimizer already has its options",
            "Pass these options to the TwinOptimizer.",
        ),
        "fsdp": Conflict(
            "TrainingArguments.fsdp or deepspeed",
            "TwinTrainer",
            "TwinOptimizer divides state and weights over processes itself",
            "Remove the argument, and pass zero: 1, 2 or 3 in twin=.",
        ),
        "auto_find_batch_size": Conflict(
            "TrainingArguments.auto_find_batch_size",
            "several processes",
            "a rank that runs out of memory would begin again while the others continue",
            "Set per_device_train_batch_size to a size that fits.",
        ),
        "uneven batches": Conflict(
            "{option}",
            "several processes",
            "all ranks take part in the communication of each step",
            "Use even_batches, which is the default, or drop_last in the data loader.",
        ),
        "save_on_each_node": Conflict(
            "{option}.save_on_each_node",
            "ZeRO stage 3 or expert ranks on several processes",
            "only rank 0 has the whole weights",
            "Save to a folder that all machines share.",
        ),
        "given without zero": Conflict(
            "A TwinOptimizer without zero",
            "{num_ranks} processes",
            "each process would train alone",
            "Build it with zero=twinflow.zero.Zero(stage=2), or pass twin= instead.",
        ),
        "state with stage 3": Conflict(
            "An optimizer that has state ({optimizer})",
            "ZeRO stage 3 or expert ranks on several processes",
            "the state belongs to whole parameters, which ranks divide",
            "Pass a new optimizer, or use stage 1 or 2 without expert ranks.",
        ),
        "clipping by value": Conflict(
            "accelerator.clip_grad_value_()",
            "several processes",
            "gradients are averaged over ranks only in the update",
            "Pass max_grad_value with the same limit, and early=False, to twin_optimizer().",
        ),
        "average": Conflict(
            "The callback {callback}",
            "ZeRO stage 3 on several ranks",
            "the callback averages whole weights, and each rank has a part of them",
            "Use stage 2, or one process.",
        ),
        "clip": Conflict(
            "clip_gradients() in manual optimization",
            "several ranks",
            "gradients are summed over ranks after this call",
            "Set gradient_clipping or gradient_clipping_value in the config of TwinStrategy to the same limit.",
        ),
        "several modules": Conflict(
            "An optimizer of several modules ({names})",
            "ZeRO stage 3 on several ranks",
            "fully_shard() needs one module with a forward",
            "Put these modules into one, or use stage 2, or keep the weights on the host (offload_param).",
        ),
        "optimizers": Conflict(
            "{number} optimizers of configure_optimizers()",
            "fp16",
            "each optimizer has its own loss scale, and a backward passes through the parameters of both",
            "Use bf16.",
        ),
        "scheduler": Conflict(
            "scheduler in the config of TwinStrategy",
            "a scheduler of configure_optimizers()",
            "an optimizer can have only one scheduler",
            "Remove one of them.",
        ),
        "optimizer": Conflict(
            "optimizer in the config of TwinStrategy",
            "an optimizer of configure_optimizers()",
            "an engine can have only one optimizer",
            "Let configure_optimizers() return None, or remove the optimizer from the config.",
        ),
    },
}


def conflict(group: str, name: str, /, **values: object) -> ValueError:
    """The error for the conflict `name` of `group` in the table. `values` replace the names in braces."""
    return CONFLICTS[group][name].error(**values)


def refuse(group: str, found: Mapping[str, object], /, **values: object) -> None:
    """Raises ValueError for the first conflict that occurs. `found`: for each name, whether the conflict occurs."""
    assert found.keys() <= CONFLICTS[group].keys(), "the table does not have all of these conflicts"
    for name, is_found in found.items():
        if is_found:
            raise conflict(group, name, **values)
