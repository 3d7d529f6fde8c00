# SPDX-License-Identifier: Apache-2.0
"""ctypes bindings for the executor (csrc/executor.h) and its events: the structures and functions of csrc/api.h. The
structure CFetchItem is tf_fetch_item in C, and so on.

Functions that cannot block are called with the GIL held. They take about a microsecond, while acquiring the GIL again
after a release could take milliseconds. Functions that may block release the GIL.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint8, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from twinflow.errors import wrong_state
from twinflow.native.library import Signatures, declare, fields, load


class CSettings(Structure):
    _fields_ = fields(
        (c_int32, "device holds_on_host sums_on_host is_external"),
        (c_int64, "slot_bytes"),
        (c_int32, "num_slots num_weight_slots"),
        (c_void_p, "file weights"),
    )


class CFileSettings(Structure):
    _fields_ = fields(
        (c_int32, "fd num_buffers num_threads"),
        (c_int64, "buffer_bytes block_bytes"),
        (c_int32, "num_rings"),
        (c_void_p, "memory"),
    )


class CFileFailure(Structure):
    _fields_ = fields((c_int32, "kind error"), (c_int64, "offset"))


class CFileCounters(Structure):
    _fields_ = fields((c_int64, "bytes_read bytes_written num_updates num_late"))


class CSlice(Structure):
    _fields_ = fields(
        (c_int64, "offset numel first_index"),
        (c_void_p, "target"),
        (c_int32, "group"),
        (c_uint32, "param"),
    )


class CBucket(Structure):
    _fields_ = fields(
        (c_int64, "numel layout"),
        (POINTER(CSlice), "slices"),
        (POINTER(c_int64), "steps"),
        (c_int32, "num_slices type rule format master_kind is_shared has_weight_slots"),
        (c_int64, "weight_record"),
    )


class CPointers(Structure):
    _fields_ = fields((c_void_p, "weight master"), (c_void_p * 2, "state scale"))


class CJob(Structure):
    _fields_ = fields(
        (c_int64, "number"),
        (c_double, "scale max_norm"),
        (c_int32, "skips has_limits is_delayed is_part runs_ahead"),
    )


class CHyper(Structure):
    _fields_ = fields((c_int64, "step"), (c_int32, "group"), (c_float, "sign"), (c_float * 7, "hyper"))


class CSource(Structure):
    _fields_ = fields((c_void_p, "from_"), (c_int64, "offset numel"))


class CDecision(Structure):
    _fields_ = fields((c_double, "norm factor"), (c_int32, "skip clipped num_ahead num_dropped num_waiting"))


class CUpdateTask(Structure):
    _fields_ = fields((c_int64, "task bucket"), (c_double, "factor"), (c_void_p, "grads weight_slot"))


class CFetchItem(Structure):
    _fields_ = fields((c_int64, "bucket record"), (c_void_p, "from_ into"), (c_int64, "num_bytes"))


class CCounters(Structure):
    _fields_ = fields(
        (c_double, "busy_s"),
        (c_int64, "bytes_out bytes_back bytes_fetched num_slots num_weight_slots num_unlocked num_aside"),
    )


class CSpan(Structure):
    _fields_ = fields((c_int32, "kind bucket"), (c_double, "start_s end_s"))


_EXECUTOR = c_void_p
_EVENT = c_void_p
_FILE = c_void_p
_QUICK: Signatures = {
    "tf_event_new": ([], _EVENT),
    "tf_event_signal": ([_EVENT, c_int32], None),
    "tf_event_record": ([c_int32, c_void_p], _EVENT),
    "tf_event_hold": ([_EVENT, c_void_p], None),
    "tf_event_state": ([_EVENT], c_int32),
    "tf_event_free": ([_EVENT], None),
    "tf_has_cuda": ([], c_int32),
    "tf_cuda_failure": ([c_char_p, c_int64], c_int64),
    "tf_executor_new": ([POINTER(CSettings)], _EXECUTOR),
    "tf_executor_fail": ([_EXECUTOR], None),
    "tf_executor_state": ([_EXECUTOR], c_int32),
    "tf_executor_disable": ([_EXECUTOR, c_int32], None),
    "tf_executor_delay": ([_EXECUTOR, c_int32, c_double], None),
    "tf_executor_counters": ([_EXECUTOR, POINTER(CCounters)], None),
    "tf_executor_record_spans": ([_EXECUTOR, c_int32], None),
    "tf_store_new": ([_EXECUTOR, POINTER(CPointers), c_int64, c_int64, c_int64, c_int32], c_int64),
    "tf_store_free": ([_EXECUTOR, c_int64], None),
    "tf_store_add_speculative": ([_EXECUTOR, c_int64, c_int64], None),
    "tf_store_take_speculative": ([_EXECUTOR, c_int64], c_int64),
    "tf_store_missing_speculative": ([_EXECUTOR, POINTER(c_int64), c_int64], c_int64),
    "tf_bucket_set": ([_EXECUTOR, c_int64, POINTER(CBucket), c_int64], None),
    "tf_bucket_store": ([_EXECUTOR, c_int64], c_int64),
    "tf_bucket_set_deadline": ([_EXECUTOR, c_int64, c_int64], None),
    "tf_bucket_set_total": ([_EXECUTOR, c_int64, c_void_p], None),
    "tf_bucket_added": ([_EXECUTOR, c_int64, POINTER(c_uint8)], c_int64),
    "tf_bucket_take_sent": ([_EXECUTOR, c_int64, POINTER(c_uint8)], c_int64),
    "tf_buckets_set_due": ([_EXECUTOR, POINTER(c_int64), c_int64, c_int64], None),
    "tf_bucket_due": ([_EXECUTOR, c_int64], c_int64),
    "tf_bucket_shown": ([_EXECUTOR, c_int64], c_int64),
    "tf_bucket_note_updated": ([_EXECUTOR, c_int64, c_int64], None),
    "tf_bucket_set_unsent": ([_EXECUTOR, c_int64, c_int64], None),
    "tf_bucket_note_sent": ([_EXECUTOR, c_int64, c_int64, _EVENT], None),
    "tf_bucket_note_published": ([_EXECUTOR, c_int64, c_int64, _EVENT], None),
    "tf_bucket_weights_copied_event": ([_EXECUTOR, c_int64], _EVENT),
    "tf_bucket_published_event": ([_EXECUTOR, c_int64], _EVENT),
    "tf_bucket_freeze": ([_EXECUTOR, c_int64, c_int32], None),
    "tf_job_new": ([_EXECUTOR, POINTER(CJob)], c_int64),
    "tf_job_free": ([_EXECUTOR, c_int64], None),
    "tf_job_add_hypers": ([_EXECUTOR, c_int64, POINTER(CHyper), c_int64], None),
    "tf_submit": (
        [_EXECUTOR, c_int64, c_int64, POINTER(CSource), c_int64, POINTER(c_uint8), _EVENT, c_int32, c_int32],
        c_int64,
    ),
    "tf_submit_sum": ([_EXECUTOR, c_int64, c_int64], c_int64),
    "tf_agree": ([_EXECUTOR, c_int64, POINTER(c_uint8)], None),
    "tf_job_close": ([_EXECUTOR, c_int64, c_void_p, _EVENT], None),
    "tf_job_close_sums": ([_EXECUTOR, c_int64, c_void_p, c_int64, _EVENT], None),
    "tf_job_set_norms": ([_EXECUTOR, c_int64, c_void_p], None),
    "tf_job_decide": ([_EXECUTOR, c_int64, c_double, c_double, c_int32, c_int32], None),
    "tf_job_drop": ([_EXECUTOR, c_int64], None),
    "tf_job_release": ([_EXECUTOR, c_int64, _EVENT], None),
    "tf_job_decision": ([_EXECUTOR, c_int64, POINTER(CDecision)], c_int32),
    "tf_job_is_done": ([_EXECUTOR, c_int64], c_int32),
    "tf_forget_sums": ([_EXECUTOR], None),
    "tf_take_unsent": ([_EXECUTOR, c_int64], c_int64),
    "tf_reset": ([_EXECUTOR, c_int64], None),
    "tf_released": ([_EXECUTOR, POINTER(c_int64), POINTER(c_void_p), c_int64], c_int64),
    "tf_will_release": ([_EXECUTOR], c_int32),
    "tf_fetch": ([_EXECUTOR, POINTER(CFetchItem), c_int64, _EVENT], c_int64),
    "tf_finish_update": ([_EXECUTOR, c_int64, POINTER(c_void_p)], None),
    "tf_file_new": ([POINTER(CFileSettings)], _FILE),
    "tf_file_num_rings": ([_FILE], c_int32),
    "tf_ring_error": ([], c_int32),
    "tf_file_free": ([_FILE], None),
    "tf_file_add": ([_FILE, c_int64, c_int64], c_int64),
    "tf_file_release": ([_FILE, c_int64, c_int32], None),
    "tf_file_expect": ([_FILE, POINTER(c_int64), c_int64], None),
    "tf_file_failed": ([_FILE, POINTER(CFileFailure)], None),
    "tf_file_count": ([_FILE, POINTER(CFileCounters)], None),
}
_BLOCKING: Signatures = {
    "tf_event_wait": ([_EVENT], c_int32),
    "tf_executor_close": ([_EXECUTOR], None),
    "tf_executor_free_slots": ([_EXECUTOR], None),
    "tf_executor_free": ([_EXECUTOR], None),
    "tf_executor_spans": ([_EXECUTOR, c_void_p, c_double, POINTER(CSpan), c_int64], c_int64),
    "tf_executor_resize": ([_EXECUTOR, c_int32, c_int32, c_int32, c_int32], None),
    "tf_executor_add_weight_slots": ([_EXECUTOR, c_int32], None),
    "tf_wanted": ([_EXECUTOR, c_double, POINTER(c_int64), c_int64], c_int64),
    "tf_job_wait_decision": ([_EXECUTOR, c_int64], c_int32),
    "tf_job_wait_done": ([_EXECUTOR, c_int64], c_int32),
    "tf_job_wait_summed": ([_EXECUTOR, c_int64], c_int32),
    "tf_wait_sums": ([_EXECUTOR], c_int32),
    "tf_hold_back": ([_EXECUTOR, c_int64, c_int64], c_int64),
    "tf_wait_released": ([_EXECUTOR, c_double], c_int32),
    "tf_task_grads": ([_EXECUTOR, c_int64], c_void_p),
    "tf_hold": ([_EXECUTOR, POINTER(c_int64), c_int64, POINTER(c_void_p), c_int64], c_double),
    "tf_wait_shown": ([_EXECUTOR, POINTER(c_int64), c_int64], c_int32),
    "tf_wait_weights": ([_EXECUTOR, POINTER(c_int64), c_int64], c_int32),
    "tf_wait_sent": ([_EXECUTOR, c_int64, c_int64, c_double], c_int32),
    "tf_fetch_wait": ([_EXECUTOR, c_int64], _EVENT),
    "tf_file_close": ([_FILE], c_int32),
    "tf_file_hold": ([_FILE, c_int64], c_void_p),
    "tf_file_flush": ([_FILE], c_int32),
    "tf_next_update": ([_EXECUTOR, c_double, POINTER(CUpdateTask), POINTER(c_uint8)], c_int32),
}


class ExecutorLibrary:
    """The functions of the executor, as attributes with their C names."""

    def __init__(self, path: Path) -> None:
        for library, functions in ((ctypes.PyDLL(str(path)), _QUICK), (ctypes.CDLL(str(path)), _BLOCKING)):
            declare(library, functions)
            for name in functions:
                setattr(self, name, getattr(library, name))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


@functools.cache
def executor_library() -> ExecutorLibrary:
    """The bindings. Raises RuntimeError if the native library is missing, because offloaded training needs it."""
    loaded = load()
    if loaded.library is None or loaded.path is None:
        raise wrong_state(
            "Offloaded training is not possible",
            f"the native library cannot be used ({loaded.problem})",
            "Reinstall twinflow from a wheel or on a machine with a C++17 compiler. `twinflow doctor` shows the cause.",
        )
    return ExecutorLibrary(loaded.path)
