"""What an update takes besides buffers: the rule's numbers for a step, the factor, the key of the rounding."""

from __future__ import annotations

from typing import Any

from twinflow.gpu.update import Numbers
from twinflow.offload.bucket import Options, Task
from twinflow.rules import Rule
from twinflow.rules.formats import rounding_key
from twinflow.rules.rule import Hyper


class Hypers:
    """A rule's numbers, worked out once for all slices of a job that share them."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._last: dict[str, Any] = {}

    def of(self, task: Task, i: int, factor: float) -> Numbers:
        """For one slice of a task."""
        param, step = task.bucket.params[i], task.bucket.steps[i] + 1
        options = task.job.options[param.group]
        signed = -factor if options.get("maximize") else factor
        return Numbers(self._hyper(options, step), signed, rounding_key(step, param.index))

    def _hyper(self, options: Options, step: int) -> Hyper:
        key = (id(options), step)
        if self._last.get("key") != key:
            self._last = {"key": key, "value": self._rule.hyper(options, step), "options": options}
        value: Hyper = self._last["value"]
        return value
