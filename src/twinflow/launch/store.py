"""Keys in the store of torch's process group, of which each attempt and each user has its own."""

from __future__ import annotations

import time
from typing import cast

from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from twinflow.launch.environment import attempt


def group_store() -> Store:
    """The store of torch's process group; one of this process alone where there is no group."""
    if not distributed.is_initialized():
        return HashStore()
    return distributed.distributed_c10d._get_default_store()


def own_keys(store: Store, kind: str, rank: int) -> Store:
    """Keys that neither an earlier attempt nor an earlier call on this rank has used, over a connection of their own
    where there can be one."""
    clone = getattr(store, "clone", None)  # torch's types do not know it, and of torch 2.8 not all stores have it
    own = cast(Store, clone()) if clone is not None else store
    prefix = f"twinflow/{kind}/{attempt()}"
    count = own.add(f"{prefix}/count/{rank}", 1)  # every rank makes as many of them
    return PrefixStore(f"{prefix}/{count}", own)


def wait_for(keys: Store, names: list[str], timeout_s: float) -> list[str]:
    """Wait until all are there; those that are not in time."""
    end_s = time.monotonic() + timeout_s
    while names and not keys.check(names):
        if time.monotonic() > end_s:
            return [name for name in names if not keys.check([name])]
        time.sleep(0.05)
    return []
