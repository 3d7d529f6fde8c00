# SPDX-License-Identifier: Apache-2.0
"""Keys in the store of torch's process group, with a prefix for each attempt and each use."""

from __future__ import annotations

import os
import re
import time
from typing import cast

from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, Store


def attempt() -> int:
    """The number of restarts of this run so far."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if re.fullmatch("[0-9]+", count) else 0


def group_store() -> Store:
    """The store of torch's process group. Without a group: a store of this process."""
    if not distributed.is_initialized():
        return HashStore()
    return distributed.distributed_c10d._get_default_store()


def own_keys(store: Store, kind: str, rank: int) -> Store:
    """A store with new keys: no earlier attempt and no earlier call on this rank has used them. The returned store has
    its own connection if the given store can be cloned.
    """
    # torch's type stubs do not have this method, and not all stores of torch 2.8 have it.
    clone = getattr(store, "clone", None)
    own = cast(Store, clone()) if clone is not None else store
    prefix = f"twinflow/{kind}/{attempt()}"
    count = own.add(f"{prefix}/count/{rank}", 1)  # All ranks make the same number of calls.
    return PrefixStore(f"{prefix}/{count}", own)


def wait_for(keys: Store, names: list[str], timeout_s: float) -> list[str]:
    """Waits until all keys exist. Returns the keys that do not exist in time."""
    end_s, pause_s = time.monotonic() + timeout_s, 0.001
    while names and not keys.check(names):
        if time.monotonic() > end_s:
            return [name for name in names if not keys.check([name])]
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return []
