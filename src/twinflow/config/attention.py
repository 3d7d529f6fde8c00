"""The section `sparse_attention` of the config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from twinflow.config.fields import Allowed, Positive, Section, Whole, honoured

_FIXED = "mode fixed: "
_LISTED = "modes variable and bslongformer: "


def _listed(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Widths = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    Field(min_length=1),
    BeforeValidator(_listed),
    Allowed("a list of whole numbers >= 1"),
]
Indices = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_listed), Allowed("a list of whole numbers >= 0")
]


class SparseAttention(Section):
    """`sparse_attention`: the sparsity pattern of the attention layers. A key of another mode must have its default."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local"] = honoured(
        "fixed", "the pattern; dense: the model's own attention; local (ours): only a sliding window"
    )
    block: Literal[16, 32, 64, 128] = honoured(16, "number of tokens in a block of queries or keys")
    different_layout_per_head: bool = honoured(False, "whether heads may have different patterns")
    num_local_blocks: Positive = honoured(4, _FIXED + "width of a local window")
    num_global_blocks: Positive = honoured(
        1, "mode fixed: global blocks in each window; mode bigbird: global blocks in all"
    )
    attention: Literal["unidirectional", "bidirectional"] = honoured(
        "bidirectional", "unidirectional: a token attends to no later token, as in decoders"
    )
    horizontal_global_attention: bool = honoured(
        False, "modes fixed and variable: global blocks also attend to all blocks"
    )
    num_different_global_patterns: Positive = honoured(
        1, _FIXED + "number of different choices of global blocks among the heads"
    )
    num_random_blocks: Whole = honoured(0, "modes variable and bigbird: number of random blocks in each row")
    local_window_blocks: Widths = honoured((4,), "mode variable: widths of the windows; the last one repeats")
    global_block_indices: Indices = honoured((0,), _LISTED + "global blocks, or the starts of ranges of global blocks")
    global_block_end_indices: Indices | None = honoured(None, _LISTED + "the ends of these ranges")
    num_sliding_window_blocks: Positive = honoured(3, "modes bigbird, bslongformer and local: width of the window")
    seed: Whole = honoured(0, "modes variable and bigbird: seed of the random blocks", ours=True)

    def given(self) -> dict[str, Any]:
        """The mode and all values that differ from the defaults. A config may spell out the defaults of other modes, as
        DeepSpeed's docs do.

        Mode local has another default for `attention`. With this mode, a value of `attention` counts if the config
        gives it.
        """
        found = {name: getattr(self, name) for name in type(self).model_fields}
        changed = {name for name, value in found.items() if value != type(self).model_fields[name].default}
        if self.mode == "local":
            changed |= {"attention"} & self.model_fields_set
        return {name: value for name, value in found.items() if name == "mode" or name in changed}
