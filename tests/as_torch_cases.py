# SPDX-License-Identifier: Apache-2.0
"""All cases of test_as_torch.py, and those that twinflow may refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from as_torch_gradients import GRADIENTS
from as_torch_loops import LOOPS
from as_torch_models import MODELS
from as_torch_reads import READS
from as_torch_support import Case, Combination, Outcome
from as_torch_writes import WRITES

CASES: list[Case] = [*READS, *WRITES, *LOOPS, *GRADIENTS, *MODELS]


@dataclass(frozen=True)
class Refusal:
    """A case that twinflow may refuse with a named error instead of giving torch's result."""

    fragment: str  # of the message
    applies: Callable[[Combination], bool] = lambda _: True


TOO_LATE = "updates of this step have already been made during backward"
USED = "used by step()"
NOT_RESET = "its gradient was not reset after the last step"


def is_written(cell: Combination) -> bool:
    """Updates are written during backward, and cannot be undone: no clipping decision is waited for. The engine makes
    them so only after some steps in which the loop has shown nothing of the kind."""
    return cell.early and not cell.clips


def is_early(cell: Combination) -> bool:
    return cell.early


def is_on_host(cell: Combination) -> bool:
    return cell.on_host


_NO_TRANSFORM = Refusal("inside a transform of torch.func", is_on_host)
# Every refusal that is not in this table fails the test. A case in it that gives torch's result passes.
REFUSALS: dict[str, list[Refusal]] = {
    "add_param_group": [Refusal("takes all its parameters at the start")],
    "unfreeze_later": [Refusal("now requires a gradient")],
    "two_parameters_on_one_memory": [Refusal("two parameters that share memory")],
    "write_swap_tensors": [Refusal("has weakref")],
    "func_grad": [_NO_TRANSFORM],
    "func_grad_of_samples": [_NO_TRANSFORM],
    "func_vmap": [_NO_TRANSFORM],
    "module_dict_and_parameter_list": [Refusal("a member of a ModuleList or Sequential", is_on_host)],
    "callback_in_backward": [Refusal(TOO_LATE, is_written)],
    "gradients_read_after_step": [Refusal(USED, is_early)],
    "zero_grad_never": [Refusal(NOT_RESET, is_early), Refusal(USED, is_early), Refusal(TOO_LATE, is_written)],
    "zero_grad_in_every_other_step": [Refusal(NOT_RESET, is_early)],
    "step_twice": [Refusal(NOT_RESET, is_early)],
}


# What cannot be seen: memory that is read or written by address, and what runs inside a forward. docs/as-torch.md
# names them.
LIMITS: dict[str, Callable[[Combination], bool]] = {
    "read_new_tensors": lambda _: True,  # torch.tensor(p)
    "read_in_two_threads": lambda cell: cell.on_host,  # beside a forward that fetches and gives back the same weights
    "write_numpy": lambda _: True,
    "write_numpy_before_step": lambda _: True,
    "write_in_a_forward_hook": lambda _: True,  # through `.data` of a parameter outside any block
}


def is_limit(case: Case, combination: Combination) -> bool:
    return case.name in LIMITS and LIMITS[case.name](combination)


def is_allowed(case: Case, combination: Combination, outcome: Outcome) -> bool:
    """Whether the outcome is torch's result or a refusal that the table has."""
    if outcome.verdict == "equal":
        return True
    if outcome.verdict != "refused":
        return False
    if case.kind != "read" and is_written(combination) and TOO_LATE in outcome.detail:
        return True  # what comes between backward and step
    return any(it.applies(combination) and it.fragment in outcome.detail for it in REFUSALS.get(case.name, ()))
