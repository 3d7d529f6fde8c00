"""What all test files share."""

from __future__ import annotations

import gc

# Collection imports torch and makes thousands of objects that all stay: nothing of this is garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """Keeps imported modules out of garbage collection, which would look through all of torch's objects every time."""
    gc.collect()
    gc.freeze()
    gc.enable()
