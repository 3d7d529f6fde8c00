"""What an update takes besides buffers: the rule's numbers for a step, the factor, the key of the rounding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from twinflow.gpu.update import Numbers, Rows
from twinflow.offload.bucket import Bucket
from twinflow.offload.job import Task
from twinflow.rules import Rule
from twinflow.rules.formats import rounding_key
from twinflow.rules.rule import Hyper, Options

# As rounding_key of rules/formats.py has them.
_OF_STEP = np.uint64(0x9E3779B97F4A7C15)
_OF_PARAM = np.uint64(0xD1B54A32D192ED03)
_START = np.uint64(0x8CB92BA72F3D8DD7)


class _Slices(NamedTuple):
    """What does not change from step to step, of each slice of a bucket."""

    groups: np.ndarray[tuple[int], np.dtype[np.int64]]
    keys: np.ndarray[tuple[int], np.dtype[np.uint64]]  # the part of the rounding key that the parameter makes


class Hypers:
    """A rule's numbers, worked out once for all slices of a job that share them."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._slices: dict[Bucket, _Slices] = {}

    def of(self, task: Task, i: int, factor: float) -> Numbers:
        """For one slice of a task."""
        param, step = task.bucket.params[i], task.bucket.steps[i] + 1
        options = task.job.options[param.group]
        return Numbers(self._rule.hyper(options, step), _signed(factor, options), rounding_key(step, param.index))

    def rows(self, task: Task, factor: float) -> Rows:
        """For all slices of a task, those without a gradient left out."""
        bucket = task.bucket
        static = self._slices.get(bucket) or self._add(bucket)
        rows = Rows(len(bucket.slices))
        rows.is_updated[task.present] = 1
        steps = np.array(bucket.steps, dtype=np.int64) + 1
        for group, step in {*zip(static.groups.tolist(), steps.tolist(), strict=True)}:
            options = task.job.options[group]
            hyper: Hyper = self._rule.hyper(options, step)
            own = (static.groups == group) & (steps == step)
            rows.factors[own] = _signed(factor, options)
            rows.hypers[own, : len(hyper)] = hyper
        z = steps.astype(np.uint64) * _OF_STEP + static.keys
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        rows.keys[:, 0] = z & np.uint64(0xFFFFFFFF)
        rows.keys[:, 1] = z >> np.uint64(32)
        return rows

    def _add(self, bucket: Bucket) -> _Slices:
        groups = np.array([param.group for param in bucket.params], dtype=np.int64)
        params = np.array([param.index for param in bucket.params], dtype=np.uint64)
        self._slices[bucket] = found = _Slices(groups, params * _OF_PARAM + _START)
        return found


def _signed(factor: float, options: Options) -> float:
    return -factor if options.get("maximize") else factor
