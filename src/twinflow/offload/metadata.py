# SPDX-License-Identifier: Apache-2.0
"""The torch functions that use metadata of a tensor (shape, dtype, device, hooks) and never its values.

Guarded weights (weight_guard.py) and taken gradients (taken_gradient.py) run these functions without waiting.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_PROPERTIES: Final = (
    "_backward_hooks",
    "_base",
    "_cdata",
    "_grad_fn",
    "_post_accumulate_grad_hooks",
    "_version",
    "device",
    "dtype",
    "grad_dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_mkldnn",
    "is_mps",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xpu",
    "itemsize",
    "layout",
    "name",
    "names",
    "nbytes",
    "ndim",
    "output_nr",
    "requires_grad",
    "retains_grad",
    "shape",
)
# `dim` and `size` are not in this list, because torch.vmap calls only these two before it reads the values in C++.
_METHODS: Final = (
    "__hash__",
    "__len__",
    "_is_view",
    "element_size",
    "get_device",
    "has_names",
    "is_complex",
    "is_conj",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_neg",
    "is_pinned",
    "is_same_size",
    "is_shared",
    "is_signed",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
    "storage_offset",
    "stride",
)
_FUNCTIONS: Final = ("is_complex", "is_conj", "is_floating_point", "is_inference", "is_signed", "numel", "is_same_size")


def _found() -> frozenset[object]:
    properties = [getattr(Tensor, name, None) for name in _PROPERTIES]
    getters = [found.__get__ for found in properties if found is not None]
    setters = [Tensor.requires_grad.__set__]  # type: ignore[attr-defined]
    methods = [getattr(Tensor, name, None) for name in _METHODS]
    functions = [getattr(torch, name, None) for name in _FUNCTIONS]
    return frozenset(found for found in [*getters, *setters, *methods, *functions] if found is not None)


METADATA: Final = _found()  # the function objects that __torch_function__ receives
# Access to a parameter's `.grad` does not use its values. torch's stubs give the descriptor the type of its value.
GRAD_ACCESS: Final = frozenset([Tensor.grad.__get__, Tensor.grad.__set__, Tensor.grad.__delete__])  # type: ignore[union-attr]
