# SPDX-License-Identifier: Apache-2.0
"""What all test files share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from samples import mark_others

# Collection imports torch and makes thousands of objects that all stay: nothing of this is garbage.
gc.disable()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_others(items)


def pytest_collection_finish() -> None:
    """Keeps imported modules out of garbage collection, which would look through all of torch's objects every time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are quicker with one thread: several only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
