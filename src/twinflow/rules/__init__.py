# SPDX-License-Identifier: Apache-2.0
"""Update rules and state formats as pure torch functions. The native and Triton kernels are tested against them."""

from twinflow.rules.muon import ALL_RULES, MUON
from twinflow.rules.rule import Rule
from twinflow.rules.rules import ADAGRAD, ADAM, ADAMW, LION, RULES, SGD

__all__ = ["ADAGRAD", "ADAM", "ADAMW", "ALL_RULES", "LION", "MUON", "RULES", "SGD", "Rule"]
