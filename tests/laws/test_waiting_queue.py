"""The waiting queue and the blocks it is kept in, against a list sorted anew after each operation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.policies import sorted_blocks
from simmoe.policies.sorted_blocks import SortedBlocks
from simmoe.policies.views import RequestView
from simmoe.policies.waiting_queue import WaitingQueue, WaitingView
from simmoe.simulator.request import SimRequest

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(("add", "add", "first", "any", "preempt")), st.integers(0, 5), st.integers(0, 50)),
    max_size=60,
)
BLOCKS = st.sampled_from([1, 2, 5, 2048])


@given(
    st.lists(st.tuples(st.sampled_from(("add", "add", "first", "any")), st.integers(0, 5), st.integers(0, 99))), BLOCKS
)
def test_blocks_are_a_sorted_list(operations: list[tuple[str, int, int]], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_blocks, "MOST_IN_BLOCK", most)
        blocks: SortedBlocks[tuple[int, int]] = SortedBlocks()
        expected: list[tuple[int, int]] = []
        for row, (operation, key, number) in enumerate(operations):
            if operation == "add":
                blocks.add((key, row))
                expected = sorted([*expected, (key, row)])
            elif expected and operation == "first":
                blocks.remove_first()
                del expected[0]
            elif expected:
                blocks.remove(expected.pop(number % len(expected)))
            assert list(blocks) == [blocks[i] for i in range(len(expected))] == expected
            assert bool(blocks) == bool(expected)


def test_a_change_moves_one_block_however_many_wait() -> None:
    blocks: SortedBlocks[tuple[int, int]] = SortedBlocks()
    for row in range(20_000):
        blocks.add((row * 7919 % 97, row))
    assert max(map(len, blocks.blocks)) <= sorted_blocks.MOST_IN_BLOCK
    assert len(blocks.blocks) <= 2 * 20_000 / sorted_blocks.MOST_IN_BLOCK + 1


def test_an_entry_that_cannot_be_compared_adds_nothing() -> None:
    blocks: SortedBlocks[tuple[object, int]] = SortedBlocks()
    for row in range(2):
        blocks.add((row, row))
    with pytest.raises(TypeError):
        blocks.add(("high", 2))
    assert list(blocks) == [(0, 0), (1, 1)]


@given(OPERATIONS, st.booleans(), BLOCKS)
def test_the_queue_is_a_sorted_list_with_the_preempted_in_front(
    operations: list[tuple[str, int, int]], has_keys: bool, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_blocks, "MOST_IN_BLOCK", most)
        queue: WaitingQueue[SimRequest] = WaitingQueue(has_keys)
        preempted: list[SimRequest] = []
        rest: list[tuple[int, int, SimRequest]] = []
        running: list[SimRequest] = []
        for row, (operation, key, number) in enumerate(operations):
            waiting = preempted + [request for _, _, request in sorted(rest, key=lambda item: item[:2])]
            if operation == "add":
                request = SimRequest(row, RequestView(str(row), float(row // 3), 10, 0, 1), 5, 1, 0, ())
                queue.add(request, key if has_keys else 0)
                rest.append((key if has_keys else 0, row, request))
            elif operation == "preempt" and running:
                request = running.pop(number % len(running))
                request.num_preemptions += 1
                queue.add_preempted(request)
                preempted.insert(0, request)
            elif operation in ("first", "any") and waiting:
                request = waiting[0 if operation == "first" else number % len(waiting)]
                queue.remove(request)
                preempted = [other for other in preempted if other is not request]
                rest = [item for item in rest if item[2] is not request]
                running.append(request)
            waiting = preempted + [request for _, _, request in sorted(rest, key=lambda item: item[:2])]
            view = WaitingView(queue)
            assert list(queue) == waiting and len(queue) == len(view) == len(waiting)
            assert list(view) == view[:] == [view[i] for i in range(len(view))] == [r.view for r in waiting]
            assert queue.num_preempted == len(preempted)
            assert queue.oldest() is min(waiting, key=lambda r: (r.view.arrival_s, r.row), default=None)
            for index in (len(view), -len(view) - 1):
                with pytest.raises(IndexError):
                    view[index]
