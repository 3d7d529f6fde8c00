"""Update rules and state formats as pure torch functions. The native and Triton kernels are tested against them."""

from twinflow.rules.adagrad import ADAGRAD
from twinflow.rules.adam import ADAM, ADAMW
from twinflow.rules.lion import LION
from twinflow.rules.rule import Rule
from twinflow.rules.sgd import SGD

RULES: dict[str, Rule] = {rule.name: rule for rule in (ADAMW, ADAM, ADAGRAD, LION, SGD)}

__all__ = ["ADAGRAD", "ADAM", "ADAMW", "LION", "RULES", "SGD", "Rule"]
