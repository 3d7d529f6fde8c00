# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: each rank of a group has a part of the large layers, and together they compute the whole model.

Layers keep their classes and names. Their parameters are replaced by this rank's parts, which are marked. Their
`forward` is replaced on the instance by one with collectives. All other parameters stay whole. Their values and
gradients have equal bits on all ranks, because all ranks do the same arithmetic on the same numbers, and all sums are
equal on all ranks.

With `sequence` the ranks also split the sequence between the split layers. Norms and dropout work on a part of the
sequence, and the activations that they keep for backward are split as well. This applies from the input of the first
layer to the output of the last layer. Embeddings, the last norm and the head get the whole sequence.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from inspect import signature
from itertools import takewhile
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from twinflow.dist.group import Group
from twinflow.errors import incompatible, invalid_value
from twinflow.loss import IGNORE_INDEX, LOSS_CHUNK, Targets, chunked_cross_entropy
from twinflow.parallel import collectives
from twinflow.parallel.collectives import SEQUENCE_DIM
from twinflow.parallel.deferral import is_conv1d, linear
from twinflow.parallel.plans import CUTTING, NAMING, REGIONS, Style, match, plan_for
from twinflow.parallel.shard import TensorShard, even_shard, keep_marks, mark, shard_of

_SUMMED = "_twinflow_summed"  # attribute of a parameter whose gradient is summed over the ranks
# Attributes of layers that are set to the sizes of the rank's part.
_SIZES = ("in_features", "out_features", "nx", "nf", "num_embeddings")
HEADS_DIM = 1  # heads in [batch, heads, queries, keys]


def parallelize(
    model: nn.Module,
    plan: Mapping[str, str],
    group: Group,
    *,
    sequence: bool = False,
    is_part: bool = False,
    finds_dropout: bool = True,
) -> None:
    """Split a model over the ranks of a group, in place. `plan`: from `plan_for`, or with the styles of `plans.py`.

    Every rank passes the same whole model, or one on the meta device. Raises a ValueError before any change if the
    model cannot be split. `sequence`: also split the sequence between the layers with the styles stream:enter and
    stream:leave.
    `is_part`: the model is a stage of a larger one, so patterns of the plan may match no module.
    `finds_dropout`: dropout between a column layer and a row layer gets the mask of one process, also if it has no
    style in the plan. The plans of `plan_for` have a style for each dropout that needs one.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    styles = match(modules, plan, is_part)
    cuts = plan_cuts(modules, styles, group.rank, group.world)
    _check_attributes(modules, styles, group.world)
    if sequence and not is_part and all(style.kind != "stream" for style in styles.values()):
        reason = "the plan does not define between which layers the sequence is split"
        remedy = "In the plan, give the first layer the style stream:enter and the last layer the style stream:leave."
        raise incompatible("sequence=True", "a plan without the styles stream:enter and stream:leave", reason, remedy)
    if group.world == 1:
        return
    _replace(modules.values(), cuts)
    split = Split(group, sequence, SplitTensors() if finds_dropout else None)
    regions = [name for name, style in styles.items() if style.kind in REGIONS]
    for name, style in styles.items():
        is_inside = any(name.startswith(f"{region}.") for region in regions)
        _set_sizes(modules[name], style, group.rank, group.world)
        forward = _forward(modules[name], style, split, is_inside)
        if forward is not None:
            modules[name].forward = forward
    for name in _scopes(styles) - set(regions) if finds_dropout else ():
        forward = modules[name].forward
        # The wrapper keeps the signature, because other libraries read the names of a model's arguments.
        modules[name].forward = update_wrapper(partial(_between, modules[name], forward, split), forward)


def same_randoms(group: Group, device: torch.device | None = None) -> None:
    """Set the random generators of all ranks, of the CPU and of a GPU `device`, to the state of the first rank."""
    state = torch.get_rng_state()
    group.broadcast(state)
    torch.set_rng_state(state)
    if device is not None and device.type == "cuda":
        state = torch.cuda.get_rng_state(device)
        group.broadcast(state)
        torch.cuda.set_rng_state(state, device)


# Splitting of parameters.


@dataclass(frozen=True)
class Cut:
    """A parameter and this rank's part of it."""

    param: nn.Parameter
    shard: TensorShard
    owner: str  # name of the first module with this parameter
    num_units: int  # the number of tensor ranks must divide it


def plan_cuts(modules: Mapping[str, Any], styles: Mapping[str, Style], rank: int, world: int) -> dict[int, Cut]:
    """Every parameter to split, by its id. A shared parameter is listed once.

    Raises a ValueError if a parameter cannot be split.
    """
    cuts: dict[int, Cut] = {}
    for name, style in styles.items():
        if style.kind not in CUTTING:
            continue
        module = modules[name]
        _check_kind(name, module, style)
        for attribute, dim in _split_dims(module, style).items():
            param = getattr(module, attribute)
            if shard_of(param) is not None:
                raise ValueError(f"The layer {name} is already split. Call parallelize only once for a model.")
            fused = replace(style, num_fused=2) if style.kind == "experts" and attribute == style.names[0] else style
            shard = _shard(f"{name}.{attribute}", param.shape[dim], dim, fused, rank, world)
            cut = Cut(param, shard, name, shard.full // (fused.num_fused * fused.unit))
            known = cuts.setdefault(id(param), cut)
            if known.shard != cut.shard:
                allowed = f"a style that splits {attribute} as in {known.owner}, because the two layers share it"
                raise invalid_value(f"The style of {name}", style.kind, allowed)
    _check_ties(modules, styles, cuts)
    return cuts


def tensor_units(model: nn.Module) -> int:
    """A number whose divisors are the numbers of tensor ranks that can split the model. 1 if it has no plan."""
    modules = dict(model.named_modules())
    try:
        cuts = plan_cuts(modules, match(modules, plan_for(model)), 0, 1)
    except ValueError:
        return 1
    return math.gcd(*(cut.num_units for cut in cuts.values()))


def _check_kind(name: str, module: Any, style: Style) -> None:
    if style.kind == "experts":
        sizes: list[Any] = [getattr(getattr(module, attribute, None), "shape", ()) for attribute in style.names]
        if [len(size) for size in sizes] != [3, 3] or sizes[0][1] != 2 * sizes[1][2]:
            allowed = "a module with parameters [experts, 2 x inner, hidden] and [experts, hidden, inner]"
            raise _wrong_kind(name, module, allowed, style)
    elif style.kind != "vocab":
        # The new forward replaces one of a subclass, for example of a quantized layer. A head may compute the loss.
        is_plain = type(module).forward is nn.Linear.forward or "targets" in signature(module.forward).parameters
        if not (isinstance(module, nn.Linear) and is_plain) and not is_conv1d(module):
            raise _wrong_kind(name, module, "an nn.Linear without a forward of its own", style)
    elif not isinstance(module, nn.Embedding):
        raise _wrong_kind(name, module, "an nn.Embedding", style)
    elif module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        allowed = "an nn.Embedding without max_norm, scale_grad_by_freq and sparse for the style 'vocab'"
        raise invalid_value(f"The module {name}", module, allowed, "Remove these options of the embedding.")


def _wrong_kind(name: str, module: Any, allowed: str, style: Style) -> ValueError:
    return ValueError(
        f"The module {name} is of type {type(module).__name__}, but must be {allowed} for the style {style.kind!r}. "
        "Give the module another style in the plan, or none."
    )


def _split_dims(module: Any, style: Style) -> dict[str, int]:
    """The dim along which each parameter of the module is split."""
    if style.kind == "vocab":
        return {"weight": 0}
    if style.kind == "experts":
        return dict(zip(style.names, (1, 2), strict=True))
    is_row = style.kind == "row"
    dims = {"weight": int(is_row != is_conv1d(module))}
    return dims if is_row or module.bias is None else {**dims, "bias": 0}


def _shard(name: str, full: int, dim: int, style: Style, rank: int, world: int) -> TensorShard:
    num_units, rest = divmod(full, style.num_fused * style.unit)
    if rest:
        pieces = f"{style.num_fused} pieces" + (f" of heads of {style.unit} features" if style.unit > 1 else "")
        allowed = f"a multiple of {style.num_fused * style.unit}, because the plan divides it into {pieces}"
        remedy = f"Correct the style column:{style.num_fused}:{style.unit} in the plan."
        raise invalid_value(f"The size of {name} in dim {dim}", full, allowed, remedy)
    if num_units % world:
        part = f"each of the {style.num_fused} pieces of {name}" if style.num_fused > 1 else name
        what = f"size of {part} in dim {dim}"
        allowed = f"a multiple of {world}, the number of tensor ranks"
        remedy = "Use fewer tensor ranks" + ("." if style.kind != "vocab" else ", or pad the vocabulary.")
        if style.unit > 1:
            what = f"number of heads of {style.unit} features in {part}"
            allowed += ", because a head (also of keys and values) cannot be split"
        raise invalid_value(f"The {what}", num_units, allowed, remedy)
    return even_shard(dim, full, rank, world, style.num_fused)


def _check_ties(modules: Mapping[str, Any], styles: Mapping[str, Style], cuts: Mapping[int, Cut]) -> None:
    """Raise a ValueError for a layer that shares a split parameter but is not split: it would compute with a part."""
    for name, module in modules.items():
        is_split = name in styles and styles[name].kind in CUTTING
        if is_split or not (isinstance(module, (nn.Linear, nn.Embedding)) or is_conv1d(module)):
            continue
        owner = next((cuts[id(param)].owner for param in module.parameters(False) if id(param) in cuts), None)
        if owner is not None:
            raise ValueError(
                f"The layer {name} shares a parameter with {owner}, which is split, but has no style in the plan. "
                f"Give {name} one of the styles {', '.join(CUTTING)}."
            )


def _check_attributes(modules: Mapping[str, Any], styles: Mapping[str, Style], world: int) -> None:
    for name, style in styles.items():
        for attribute in style.names if style.kind in NAMING else ():
            value = getattr(modules[name], attribute, None)
            if not isinstance(value, int) or value % world:
                allowed = f"a multiple of {world}, the number of tensor ranks"
                remedy = "Correct this name in the plan." if value is None else "Use fewer tensor ranks."
                raise invalid_value(f"{name}.{attribute}", value, allowed, remedy)


def _replace(modules: Any, cuts: Mapping[int, Cut]) -> None:
    """Replace whole parameters by this rank's parts in all modules. Shared parameters stay shared."""
    made = {}
    for key, cut in cuts.items():
        made[key] = nn.Parameter(cut.shard.cut(cut.param.detach()), requires_grad=cut.param.requires_grad)
        keep_marks(cut.param, made[key])
        mark(made[key], cut.shard)
    for module in modules:
        for name, param in module._parameters.items():
            if id(param) in made:
                module._parameters[name] = made[id(param)]


def _set_sizes(module: Any, style: Style, rank: int, world: int) -> None:
    """Set the attributes of a module to the sizes of this rank's part."""
    names = style.names if style.kind in NAMING else ()
    if style.kind == "vocab" and module.padding_idx is not None:
        # The row of padding, which gets no gradient, is on one rank.
        local = module.padding_idx - rank * (module.num_embeddings // world)
        module.padding_idx = local if 0 <= local < module.num_embeddings // world else None
    if style.kind in CUTTING:
        is_input = style.kind == "row"
        names = tuple(name for name in _SIZES if hasattr(module, name) and (name in ("in_features", "nx")) == is_input)
    for name in names:
        setattr(module, name, getattr(module, name) // world)


# Forwards with collectives.


@dataclass(frozen=True)
class Split:
    """How a tensor enters and leaves a layer that is split by features."""

    group: Group
    sequence: bool
    tensors: SplitTensors | None  # None: the plan has a style for each dropout of split features

    def take_in(self, x: Tensor) -> Tensor:
        """The whole input of a split layer."""
        return collectives.gather_sequence(x, self.group) if self.sequence else collectives.copy_in(x, self.group)

    def give_out(self, x: Tensor) -> Tensor:
        """The sum of the outputs of all ranks. With `sequence`: this rank's part of it."""
        return collectives.scatter_sequence(x, self.group) if self.sequence else collectives.reduce_out(x, self.group)

    def sum_gradient(self, param: Tensor | None, is_partial: bool = False) -> None:
        """With `sequence` or `is_partial`: let backward sum the gradient of a whole parameter over the ranks before it
        is accumulated.

        A whole parameter that is applied to a part of the sequence or of the heads has only a part of its gradient.
        This is called in every forward, because a parameter may be replaced, or may start to require a gradient.
        """
        if param is not None and (self.sequence or is_partial) and param.requires_grad and not hasattr(param, _SUMMED):
            param.register_hook(partial(collectives.summed, group=self.group))  # type: ignore[no-untyped-call]
            setattr(param, _SUMMED, True)


def _forward(module: Any, style: Style, split: Split, is_inside: bool) -> Callable[..., Any] | None:
    """The new forward of a module. `is_inside`: the module is in a region, which has already run the collective on the
    input.
    """
    if style.kind == "column":
        return partial(_column, module, split, is_inside)
    if style.kind == "row":
        return partial(_row, module, split, style.takes_whole)
    if style.kind == "vocab":
        return partial(_vocab, module, module.forward, split.group)
    if style.kind == "experts":
        return partial(_experts, module.forward, split.group)
    if style.kind == "partial":
        return partial(_norm, module, module.forward, split, True)
    if style.kind == "head":
        return partial(_head, module, split.group)
    if style.kind == "dropout":
        return partial(_dropout, module, split.group, -1)
    if style.kind in REGIONS:
        name = _first_name(module.forward)
        return partial(_region, module, module.forward, name, split, style.kind in NAMING)
    if not split.sequence:
        return None
    if style.kind == "stream":
        return partial(_stream, module.forward, _first_name(module.forward), split.group, style.names)
    if isinstance(module, nn.Dropout):
        return partial(_dropout, module, split.group, SEQUENCE_DIM)
    return partial(_norm, module, module.forward, split, False)


def _column(module: Any, split: Split, is_inside: bool, x: Tensor) -> Tensor:
    y = linear(module, x if is_inside else split.take_in(x), module.bias)
    if split.tensors is not None:
        split.tensors.add(y, y.dim())
    return y


def _row(module: Any, split: Split, takes_whole: bool, x: Tensor) -> Tensor:
    if takes_whole:
        x = collectives.split_sequence(x, split.group, dim=-1)
    y = split.give_out(linear(module, x, None))
    if split.tensors is not None:
        split.tensors.remove(y)
    split.sum_gradient(module.bias)
    return y if module.bias is None else y + module.bias.to(y.dtype)


def _vocab(module: Any, forward: Callable[[Tensor], Tensor], group: Group, tokens: Tensor) -> Tensor:
    """Look up tokens in this rank's rows of the embedding. Tokens in rows of other ranks give zeros here, and the sum
    over the ranks adds their values. Tokens that no rank has are looked up too, so that torch raises as in one process.
    """
    num_rows = len(module.weight)
    local = tokens - group.rank * num_rows
    is_elsewhere = ((local < 0) & (tokens >= 0)) | ((local >= num_rows) & (tokens < group.world * num_rows))
    rows = forward(local.masked_fill(is_elsewhere, 0))  # that of a subclass may also scale
    return collectives.reduce_out(rows.masked_fill(is_elsewhere[..., None], 0.0), group)


def _experts(forward: Callable[..., Tensor], group: Group, /, *args: Any, **kwargs: Any) -> Tensor:
    """Activations and routing weights are whole, and get a part of their gradients from each rank."""
    args, kwargs = tree_map(
        lambda one: collectives.copy_in(one, group) if isinstance(one, Tensor) and one.is_floating_point() else one,
        (args, kwargs),
    )
    return collectives.reduce_out(forward(*args, **kwargs), group)


def _head(module: Any, group: Group, x: Tensor, targets: Tensor | None = None) -> Tensor:
    if targets is None:
        return collectives.join_sequence(linear(module, collectives.copy_in(x, group), module.bias), group, dim=-1)
    assert module.bias is None
    return vocab_parallel_cross_entropy(x.flatten(0, -2), module.weight, targets.flatten(), group)


def _dropout(module: nn.Dropout, group: Group, dim: int, x: Tensor) -> Tensor:
    return dropout_part(x, module.p, group, dim) if module.training and module.p > 0.0 else x


def _norm(
    module: nn.Module, forward: Callable[..., Any], split: Split, is_partial: bool, /, *args: Any, **kwargs: Any
) -> Any:
    for param in module.parameters():
        split.sum_gradient(param, is_partial)
    return forward(*args, **kwargs)


def _region(
    module: nn.Module,
    forward: Callable[..., Any],
    first: str,
    split: Split,
    has_heads: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    args, kwargs = _changed(split.take_in, first, args, kwargs)
    with splitting_dropout(split, module.training, has_heads):
        return forward(*args, **kwargs)


def _scopes(styles: Mapping[str, Style]) -> set[str]:
    """Names of the smallest modules around a column layer and the next row layer. Dropout between them runs inside."""
    layers = [(name.split("."), style.kind) for name, style in styles.items() if style.kind in ("column", "row")]
    found = set()
    for i, (column, kind) in enumerate(layers):
        row = next((path for path, other in layers[i:] if other == "row"), None)
        if kind == "column" and row is not None:
            common = takewhile(lambda pair: pair[0] == pair[1], zip(column, row, strict=False))
            found.add(".".join(part for part, _ in common))
    return found


def _between(module: nn.Module, forward: Callable[..., Any], split: Split, /, *args: Any, **kwargs: Any) -> Any:
    with splitting_dropout(split, module.training):
        return forward(*args, **kwargs)


def _stream(
    forward: Callable[..., Any], first: str, group: Group, what: tuple[str, ...], /, *args: Any, **kwargs: Any
) -> Any:
    if "enter" in what:
        args, kwargs = _changed(partial(collectives.split_sequence, group=group), first, args, kwargs)
    result = forward(*args, **kwargs)
    if "leave" not in what:
        return result
    if isinstance(result, tuple):
        return (collectives.join_sequence(result[0], group), *result[1:])
    return collectives.join_sequence(result, group)


def _first_name(forward: Callable[..., Any]) -> str:
    """The name of the first argument of a forward: the activations that pass through the layer."""
    return next(iter(signature(forward).parameters))


def _changed(
    change: Callable[[Tensor], Tensor], first: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the first one changed. It may be given by position or by name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, first: change(kwargs[first])}


# Dropout with the mask that a single process would draw. Every tensor rank draws the mask of all heads or features,
# from generators in the same state, and takes its part. A fused kernel draws a mask only for the heads that it gets. So
# with dropout the attention is computed here step by step, like torch does on the CPU, and needs memory for the square
# of the sequence length. Without dropout nothing changes.


def dropout_part(x: Tensor, p: float, group: Group, dim: int) -> Tensor:
    """Dropout of `x`, this rank's part of a tensor along `dim`, with the mask of the whole tensor."""
    shape = list(x.shape)
    shape[dim] *= group.world
    with torch._C.DisableTorchFunction():  # the modes below must not split this mask again
        mask = F.dropout(x.new_ones(shape), p)
    return x * mask.chunk(group.world, dim)[group.rank].clone()  # the clone prevents that backward keeps the whole mask


def splitting_dropout(split: Split, is_training: bool, has_heads: bool = False) -> AbstractContextManager[object]:
    """Context in which dropout of split tensors equals that of one process. Split are the tensors computed from the
    output of a column layer (if `split.tensors` is set), and with `has_heads` all tensors [batch, heads, ...].
    """
    if not is_training or split.group.world == 1 or not (has_heads or split.tensors is not None):
        return nullcontext()
    return _SplitDropout(split.group, split.tensors, has_heads)


class SplitTensors:
    """The tensors that are computed from the output of a column layer, which has only this rank's features, up to the
    next row layer. The tensors themselves are not kept.
    """

    def __init__(self) -> None:
        # By id: the tensor, and the number of dims of the column layer's output from which it was computed.
        self._found: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, x: Tensor, num_dims: int) -> None:
        self._found[id(x)] = weakref.ref(x, partial(self._forget, id(x))), num_dims

    def remove(self, x: Tensor) -> None:
        self._found.pop(id(x), None)

    def num_dims(self, value: object) -> int | None:
        """The number of dims of the column layer's output from which a tensor, or a tensor of a list, was computed.
        None if it was not computed from one.
        """
        if isinstance(value, tuple | list):
            return next((dims for one in value if (dims := self.num_dims(one)) is not None), None)
        ref, num_dims = self._found.get(id(value), (None, None))
        return num_dims if ref is not None and ref() is value else None

    def _forget(self, key: int, ref: weakref.ref[Tensor]) -> None:
        if key in self._found and self._found[key][0] is ref:
            del self._found[key]


# Random functions for which there is no version with the numbers of one process.
_UNSPLIT_RANDOM: Final = (
    *(F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(torch.rand_like, torch.randn_like, torch.bernoulli),
)
_CASTS: Final = (Tensor.to, Tensor.type_as)  # of their arguments only the first one has values


class _SplitDropout(TorchFunctionMode):
    """Replaces the dropout of split tensors in any function that a model calls."""

    def __init__(self, group: Group, tensors: SplitTensors | None, has_heads: bool) -> None:
        super().__init__()
        self._group = group
        self._tensors = tensors
        self._has_heads = has_heads
        self._checkpoint = _open_checkpoint()  # the checkpoint that runs this module

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        num_dims = None
        if self._tensors is not None:
            num_dims = self._tensors.num_dims((*(args[:1] if func in _CASTS else args), *given.values()))
        is_split = num_dims is not None
        if func is F.scaled_dot_product_attention and (is_split or self._has_heads):
            result = self._attention(*args, **given)
        elif func is F.dropout and (is_split or (self._has_heads and args[0].dim() == 4)):
            result = self._dropout(num_dims, *args, **given)
        elif is_split and func in _UNSPLIT_RANDOM and given.get("training", args[2] if len(args) > 2 else True):
            raise incompatible(
                f"{func.__name__}() of features that are split over tensor ranks",
                "this plan",
                "all ranks would draw the same random numbers for their parts",
                "Use F.dropout or nn.Dropout, or call it after the row layer.",
            )
        else:
            result = func(*args, **given)
        if num_dims is not None and self._tensors is not None:
            for tensor in _tensors_of(result):
                self._tensors.add(tensor, num_dims)
        return result

    def _dropout(
        self,
        num_dims: int | None,
        input: Tensor,  # the name in F.dropout
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        # Attention adds a dim for the heads, which are split then. Otherwise the last dim has the features.
        dim = HEADS_DIM if input.dim() == 4 and num_dims != 4 else -1
        return self._drop(input, p, dim) if training and p > 0.0 else input

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, **options)
        if options.pop("enable_gqa", False):
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        probs = probabilities(q, k, attn_mask, **options)
        return self._drop(probs, dropout_p, HEADS_DIM) @ v

    def _drop(self, x: Tensor, p: float, dim: int) -> Tensor:
        if _open_checkpoint() != self._checkpoint:
            # The function would run again in backward, without this mode.
            raise incompatible(
                "Activation checkpointing of a function inside a module",
                "dropout of features that are split over tensor ranks in that function",
                "backward runs the function again without the module, and would draw another mask",
                "Checkpoint the whole module or the whole layer.",
            )
        return dropout_part(x, p, self._group, dim)


def _open_checkpoint() -> object:
    """Identifies the innermost activation checkpoint whose function is running."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    is_checkpoint = hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__
    # A reentrant checkpoint has no hooks, but disables gradients.
    return (hooks[0] if is_checkpoint else None), torch.is_grad_enabled()


def probabilities(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """The attention probabilities, with the arguments of torch's attention."""
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def _tensors_of(value: object) -> Iterator[Tensor]:
    for one in value if isinstance(value, tuple | list) else (value,):
        if isinstance(one, Tensor):
            yield one


# Cross entropy with the rows of the head's weight split across ranks. Each rank computes the logits of its own symbols,
# a chunk of tokens at a time. For each token the ranks exchange three numbers: the largest logit, the sum of
# exponentials relative to it, and the logit of the target if the rank has it. From these all ranks compute the loss
# with equal bits, and each rank computes the gradient of its own logits.


def vocab_parallel_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, chunk: int = LOSS_CHUNK
) -> Tensor:
    """Mean of `F.cross_entropy(hidden @ whole.T, targets)` in fp32 or wider, where `weight` has this rank's rows.

    `hidden`: [tokens, hidden], replicated. `weight`: [vocab / world, hidden]. `targets`: [tokens]; a token with -100 is
    ignored. A target that is outside of the vocabulary makes the loss infinite. The gradient of `hidden` is replicated:
    each rank computes its share, and the shares are summed.
    """
    return chunked_cross_entropy(collectives.copy_in(hidden, group), weight, targets, chunk, SharedSoftmax(group))


class SharedSoftmax:
    """Softmax over the symbols of all ranks. All ranks have the same number of rows of the head's weight."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def find(self, targets: Tensor, num_rows: int) -> Targets:
        return own_targets(targets, num_rows, self._group.rank)

    def losses_and_probs(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """The losses, equal on all ranks, and the probabilities of this rank's symbols, in the memory of the logits."""
        group, largest = self._group, logits.amax(-1)
        chosen = logits.gather(-1, targets.rows).squeeze(-1).where(targets.is_here, -torch.inf)
        probs = logits.sub_(largest[:, None]).exp_()
        said = torch.stack([largest, probs.sum(-1), chosen])
        heard = said.new_empty((group.world, *said.shape))
        heard[group.rank] = said
        group.all_gather(heard.view(-1))
        top = heard[:, 0].amax(0)
        sums = (heard[:, 1] * (heard[:, 0] - top).exp()).sum(0)
        losses = (sums.log() - (heard[:, 2].amax(0) - top)).where(targets.is_counted, 0.0)
        return losses, probs.mul_(((largest - top).exp() / sums)[:, None])


def own_targets(targets: Tensor, num_rows: int, rank: int) -> Targets:
    """Maps targets to rows of the head's weight on `rank`. Each rank has `num_rows` rows."""
    is_counted = targets != IGNORE_INDEX
    local = targets - rank * num_rows
    is_here = is_counted & (local >= 0) & (local < num_rows)
    return Targets(local.where(is_here, 0)[:, None], is_here, is_counted)
