"""What all test files share."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Keeps imported modules out of garbage collection, which would look through all of torch's objects every time."""
    gc.collect()
    gc.freeze()
