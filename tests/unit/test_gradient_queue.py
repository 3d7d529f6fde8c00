# SPDX-License-Identifier: Apache-2.0
"""When the gradients of a block are taken, and the views of buffers that they go to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, repeat

import pytest
import torch
from torch import Tensor, nn

from twinflow.offload import pack_gradients
from twinflow.offload.bucket import Param
from twinflow.offload.hooks import GradientQueue, take_gradients
from twinflow.offload.plan import Slice


class Block:
    """Three parameters; notes which gradients are taken together."""

    def __init__(self, streams: Iterator[int] | None = None) -> None:
        self.params = [Param(i, str(i), nn.Parameter(torch.zeros(2)), 0) for i in range(3)]
        self.queue = GradientQueue()
        self.queue.size = self.queue.num_expected = 3
        self.taken: list[list[tuple[int, int]]] = []
        take_gradients(self.params, [self.queue] * 3, streams or repeat(0), self)  # type: ignore[arg-type]

    def take_queue(self, queue: GradientQueue) -> None:
        self.taken.append(list(queue.arrived))
        queue.arrived.clear()

    def backward(self, order: Sequence[int]) -> list[list[int]]:
        """What is taken when gradients come in this order."""
        self.taken.clear()
        for index in order:
            tensor = self.params[index].tensor
            torch.autograd.backward(tensor, torch.ones_like(tensor))
        return [[index for index, _ in taken] for taken in self.taken]

    @property
    def counting(self) -> list[int]:
        """Parameters with a hook in Python."""
        hooks = [next(iter(param.tensor._post_accumulate_grad_hooks.values())) for param in self.params]  # type: ignore[attr-defined]
        return [i for i, hook in enumerate(hooks) if not isinstance(hook, partial)]


def test_the_last_gradient_takes_all() -> None:
    block = Block()
    assert block.counting == [0, 1, 2]
    for _ in range(3):
        assert block.backward([1, 2, 0]) == [[1, 2, 0]]
        assert block.counting == [0]


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0]])
def test_another_order_is_noticed(order: list[int]) -> None:
    block = Block()
    block.backward([1, 2, 0])
    for _ in range(2):
        assert block.backward(order) == [order]
        assert block.counting == [order[-1]]


def test_a_second_gradient_of_a_parameter_does_not_count() -> None:
    block = Block()
    assert block.backward([0, 0, 1, 2]) == [[0, 0, 1, 2]]
    assert block.backward([1, 1, 2, 0, 0]) == [[1, 1, 2, 0]]


def test_a_gradient_that_does_not_come_leaves_the_others_in_the_queue() -> None:
    block = Block()
    block.backward([0, 1, 2])
    assert block.backward([0, 1]) == []
    assert [index for index, _ in block.queue.arrived] == [0, 1]
    block.queue.arrived.clear()
    block.queue.num_expected = 2  # as the runtime does when backward is over
    block.queue.count_all()
    assert block.backward([0, 1]) == [[0, 1]]


def test_each_gradient_of_a_late_parameter_is_taken_at_once() -> None:
    block = Block()
    block.backward([0, 1, 2])
    block.queue.set_late(1)
    assert block.counting == [1, 2]
    assert block.backward([0, 1, 1, 2]) == [[0, 1], [1]]


def test_the_stream_of_each_gradient_is_noted() -> None:
    block = Block(count())
    for start in (0, 3):
        block.backward([0, 1, 2])
        assert block.taken == [[(0, start), (1, start + 1), (2, start + 2)]]


def test_hooks_keep_no_parameter_and_go_with_their_listener() -> None:
    block = Block()
    block.backward([0, 1])
    tensor = block.params[0].tensor
    other = weakref.ref(block.params[1].tensor)
    del block
    gc.collect()
    assert other() is None
    assert not tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def test_views_are_made_once_and_go_with_their_buffer() -> None:
    views = pack_gradients.Views()
    shapes = {4: torch.Size([2, 3]), 7: torch.Size([300])}
    slices = [Slice(4, 0, 6, 0), Slice(7, 128, 172, 128)]
    wholes = [pack_gradients.Whole(slices, shapes, views) for _ in range(2)]
    flat = torch.zeros(384)
    targets = wholes[0].targets(flat)
    assert targets is wholes[1].targets(flat)
    grads = {4: torch.rand(3, 2).t(), 7: torch.rand(300)}
    torch._foreach_copy_(targets, wholes[0].parts(grads))
    expected = torch.zeros(384)
    expected[:6] = grads[4].reshape(-1)
    expected[128:300] = grads[7][128:]
    assert torch.equal(flat, expected)
    view = weakref.ref(targets[0])
    del targets, flat
    assert view() is None


def test_parts_of_a_gradient_with_a_graph_have_none() -> None:
    whole = pack_gradients.Whole([Slice(0, 0, 4, 0)], {0: torch.Size([4])}, pack_gradients.Views())
    grads: dict[int, Tensor] = {0: torch.rand(4, requires_grad=True) * 2}
    assert not whole.parts(grads)[0].requires_grad
