"""The order of windows in an epoch: a permutation that is computed for each index and never stored.

A Feistel network is a permutation of 0 .. 4**k - 1 for any round function. A result that is too large goes through the
network again until it is below the number of windows (cycle walking). The result is again a permutation. Thus the
position of any window in any epoch is known without an array of all windows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

NUM_ROUNDS: Final = 8

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


def epoch_keys(seed: int, stream: int, epoch: int) -> _Words:
    """The round keys for one epoch.

    The keys are raw words of Philox, because numpy guarantees stable results across versions only for bit generators
    and not for `Generator`. After an upgrade of numpy, an index must give the same text.
    """
    words = np.random.Philox(np.random.SeedSequence([seed, stream, epoch])).random_raw(NUM_ROUNDS)
    return np.asarray(words, dtype=np.uint64)


def shuffled(indices: Indices, num: int, keys: _Words) -> Indices:
    """Apply the permutation of 0 .. num - 1 to `indices`, which must be in this range."""
    half_bits = max(1, ((num - 1).bit_length() + 1) // 2)
    places = _feistel(indices.astype(np.uint64), half_bits, keys)
    while (outside := places >= num).any():  # less than three quarters of them each time
        places[outside] = _feistel(places[outside], half_bits, keys)
    return places.astype(np.int64)


def _feistel(values: _Words, half_bits: int, keys: _Words) -> _Words:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    mixed: _Words = (left << shift) | right
    return mixed


def _mix(words: _Words) -> _Words:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = words ^ (words >> np.uint64(31))
    return mixed
