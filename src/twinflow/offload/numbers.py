# SPDX-License-Identifier: Apache-2.0
"""Scalar arguments of an update on the device: hyperparameters, gradient factor, key of stochastic rounding.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A job is one
optimizer step, and a task is the work for one bucket in a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from twinflow.gpu.update import Numbers, Rows
from twinflow.offload.bucket import Bucket
from twinflow.offload.job import Task
from twinflow.rules import Rule
from twinflow.rules.formats import rounding_key
from twinflow.rules.rule import Hyper, Options

# The constants of `rounding_key` in rules/formats.py.
_OF_STEP = np.uint64(0x9E3779B97F4A7C15)
_OF_PARAM = np.uint64(0xD1B54A32D192ED03)
_START = np.uint64(0x8CB92BA72F3D8DD7)


Steps = np.ndarray[tuple[int], np.dtype[np.int64]]


class _Slices(NamedTuple):
    """Values of each slice of a bucket that are equal in all steps."""

    has_one_group: bool  # all slices are in one param group
    groups: np.ndarray[tuple[int], np.dtype[np.int64]]
    keys: np.ndarray[tuple[int], np.dtype[np.uint64]]  # the part of the rounding key that depends on the parameter


class Hypers:
    """Computes a rule's hyperparameters. Slices of a job with the same param group and step count share the result."""

    def __init__(self, rule: Rule, has_keys: bool) -> None:
        self._rule = rule
        self._has_keys = has_keys  # False if nothing is rounded stochastically
        self._slices: dict[Bucket, _Slices] = {}
        self._options: Sequence[Options] = ()  # options of the last job
        self._known: dict[tuple[int, int], Hyper] = {}  # by group and step, for `_options`

    def of(self, task: Task, i: int, factor: float) -> Numbers:
        """The scalar arguments of the update of one slice."""
        param, step = task.bucket.params[i], task.bucket.steps[i] + 1
        options = task.job.options[param.group]
        return Numbers(self._rule.hyper(options, step), _signed(factor, options), rounding_key(step, param.index))

    def put(self, rows: Rows, task: Task, factor: float) -> None:
        """Writes a task's scalar arguments, and which slices have a gradient, to the kernel's table `rows`."""
        bucket = task.bucket
        static = self._slices.get(bucket) or self._add(bucket)
        rows.is_updated[:] = len(task.present) == len(bucket.slices)
        rows.is_updated[task.present] = 1
        steps: Steps = np.frombuffer(memoryview(bucket.steps), np.int64) + 1
        is_uniform = static.has_one_group and bool((steps == steps[0]).all())
        num_looked_at = 1 if is_uniform else len(steps)
        for group, step in {*zip(static.groups[:num_looked_at].tolist(), steps[:num_looked_at].tolist(), strict=True)}:
            hyper = self._hyper(task.job.options, group, step)
            own = slice(None) if is_uniform else (static.groups == group) & (steps == step)
            rows.factors[own] = _signed(factor, task.job.options[group])
            rows.hypers[own, : len(hyper)] = hyper
        if self._has_keys:
            _put_keys(rows, steps, static.keys)

    def _hyper(self, options: Sequence[Options], group: int, step: int) -> Hyper:
        if self._options is not options:
            self._options = options
            self._known = {}
        if (group, step) not in self._known:
            self._known[group, step] = self._rule.hyper(options[group], step)
        return self._known[group, step]

    def _add(self, bucket: Bucket) -> _Slices:
        groups = np.array([param.group for param in bucket.params], dtype=np.int64)
        params = np.array([param.index for param in bucket.params], dtype=np.uint64)
        self._slices[bucket] = found = _Slices(len({*groups.tolist()}) == 1, groups, params * _OF_PARAM + _START)
        return found


def _put_keys(rows: Rows, steps: Steps, of_params: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> None:
    """Writes the keys of stochastic rounding to `rows.keys`: `rounding_key` of the step and the parameter, for all
    slices at once."""
    z = steps.astype(np.uint64) * _OF_STEP + of_params
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    rows.keys[:, 0] = z & np.uint64(0xFFFFFFFF)
    rows.keys[:, 1] = z >> np.uint64(32)


def _signed(factor: float, options: Options) -> float:
    return -factor if options.get("maximize") else factor
