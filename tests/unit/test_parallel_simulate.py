# SPDX-License-Identifier: Apache-2.0
"""A pipeline played through: bubbles as formulas have them, dependencies that are never broken, circles refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinflow.parallel.schedules import Schedule, gpipe, interleaved, make_schedule, one_f_one_b, zbv
from twinflow.parallel.simulate import Pipeline, StageTime, simulate, step_seconds


def equal(schedule: Schedule, recompute: float = 0.0) -> list[StageTime]:
    """Forward 1, backward 2 for each rank, whatever the number of its chunks."""
    part = 1.0 / schedule.num_chunks
    return [StageTime(part, part, part, recompute * part)] * schedule.num_stages


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 2), (4, 16), (8, 32), (8, 64), (5, 7), (4, 2)])
def test_gpipe_and_1f1b_are_m_of_m_plus_p_minus_1(p: int, m: int) -> None:
    for made in (gpipe(p, m), one_f_one_b(p, m)):
        played = simulate(made, equal(made))
        assert played.makespan_s == pytest.approx(3 * (m + p - 1), rel=1e-12)
        assert played.efficiency == pytest.approx(m / (m + p - 1), rel=1e-12)


def test_the_81_and_90_percent_of_the_article() -> None:
    for times, expected in ((4, 0.81), (8, 0.90)):
        made = one_f_one_b(16, 16 * times)
        assert simulate(made, equal(made)).efficiency == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (4, 16, 4), (8, 32, 2), (8, 64, 4), (2, 8, 3)])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, m: int, v: int) -> None:
    made = interleaved(p, m, v)
    assert simulate(made, equal(made)).makespan_s == pytest.approx(3 * m + 3 * (p - 1) / v, rel=1e-12)


def test_zero_bubble_is_nearly_one() -> None:
    made = zbv(8, 64)
    played = simulate(made, equal(made))
    assert played.efficiency >= 0.94
    assert played.bubble < 0.2 * simulate(one_f_one_b(8, 64), [StageTime(1, 1, 1)] * 8).bubble
    assert played.peak_in_flight == (16,) * 8  # of half stages: what 1F1B's first rank holds


def test_computing_again_is_work_and_comes_before_the_gradient_of_the_input() -> None:
    made = one_f_one_b(4, 8)
    assert simulate(made, equal(made, recompute=1.0)).makespan_s == pytest.approx(4 * (8 + 3))
    two = simulate(zbv(1, 1), [StageTime(1, 2, 4, 8)] * 2)
    assert two.starts == ((0.0, 1.0, 2.0, 12.0, 16.0, 26.0),)
    assert two.busy_s == (30.0,)


def test_sending_takes_time_between_ranks_alone() -> None:
    made = gpipe(3, 1)
    assert simulate(made, equal(made), send_s=0.5).makespan_s == pytest.approx(9 + 4 * 0.5)
    assert simulate(gpipe(1, 4), [StageTime(1, 1, 1)], send_s=9.0).makespan_s == 12.0
    v = zbv(2, 1)  # stages 1 and 2 are on one rank: four sends, not six
    assert simulate(v, [StageTime(1, 1, 0)] * 4, send_s=10.0).makespan_s == pytest.approx(8 + 4 * 10)


def test_the_slowest_stage_sets_the_pace() -> None:
    times = [StageTime(1, 1, 1), StageTime(2, 2, 2), StageTime(1, 1, 1)]
    played = simulate(one_f_one_b(3, 50), times)
    # It waits for its first input (1) and for the first gradient (1); the first stage has the last word (2).
    assert played.makespan_s == pytest.approx(50 * 6 + 1 + 1 + 2, abs=1e-9)
    assert played.busy_s == (150.0, 300.0, 150.0)


SECONDS = st.floats(0.0, 3.0)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)]),
    st.integers(1, 5),
    st.integers(1, 4),
    SECONDS,
    st.data(),
)
def test_nothing_starts_before_its_input_is_there(
    kind: tuple[str, int], p: int, rounds: int, send_s: float, data: st.DataObject
) -> None:
    made = make_schedule(kind[0], p, p * rounds, kind[1])
    stage_time = st.builds(StageTime, SECONDS, SECONDS, SECONDS, SECONDS)
    times = data.draw(st.lists(stage_time, min_size=made.num_stages, max_size=made.num_stages))
    played = simulate(made, times, send_s)
    spans = {}
    for actions, starts in zip(made.actions, played.starts, strict=True):
        end = 0.0
        for action, start in zip(actions, starts, strict=True):
            assert start >= end  # one at a time, in the order of the list
            end = start + times[action.stage].seconds(action.kind)
            spans["B" if action.kind == "I" else action.kind, action.stage, action.micro_batch] = (start, end)
    last = made.num_stages - 1
    for (kind_, stage, i), (start, _) in spans.items():
        if kind_ == "F":
            needed = [("F", stage - 1)] if stage else []
        elif kind_ == "B":
            needed = [("F", stage), *([("B", stage + 1)] if stage < last else [])]
        else:
            needed = [("B", stage)]
        for other_kind, other in needed:
            sent = send_s if made.rank_of(other) != made.rank_of(stage) else 0.0
            assert start >= spans[other_kind, other, i][1] + sent - 1e-9
    assert played.makespan_s == pytest.approx(max(end for _, end in spans.values()), abs=1e-9)
    assert played.efficiency <= 1.0 + 1e-9


def test_lists_that_wait_in_a_circle_are_refused() -> None:
    good = one_f_one_b(2, 2)
    f0, b0, f1, b1 = good.actions[1]
    # The first rank wants the backward of 0 before it makes the forward of 1, the second the other way round.
    first = (good.actions[0][0], good.actions[0][2], good.actions[0][1], good.actions[0][3])
    stuck = Schedule("mine", 2, 2, 1, "loop", (first, (f0, f1, b0, b1)))
    with pytest.raises(ValueError, match="wait for each other: rank 0 at 0B0, rank 1 at 1F1"):
        simulate(stuck, [StageTime(1, 1, 1)] * 2)


def test_times_must_be_there_and_not_below_zero() -> None:
    with pytest.raises(ValueError, match="must be 2, one for each stage"):
        simulate(gpipe(2, 2), [StageTime(1, 1, 1)])
    with pytest.raises(ValueError, match=">= 0"):
        simulate(gpipe(1, 1), [StageTime(-1, 1, 1)])


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_a_long_step_is_not_played_whole_and_as_long(name: str, v: int) -> None:
    p, m = 4, 160
    for times in ([StageTime(1, 1.2, 0.9, 1)] * (p * v), [StageTime(1 + 0.05 * (i % 3), 1, 1) for i in range(p * v)]):
        whole = simulate(make_schedule(name, p, m, v), times, 0.1).makespan_s
        assert step_seconds(Pipeline(name, p, m, v, tuple(times), 0.1)) == pytest.approx(whole, rel=5e-3)
