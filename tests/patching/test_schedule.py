"""At which steps a patch is written."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdrift.errors import InputError
from kvdrift.patching.schedule import Schedule

steps = st.integers(1, 60)


@given(steps, steps, st.integers(0, 70))
def test_covers_is_between_first_and_last(one, two, step):
    first, last = sorted((one, two))
    assert Schedule.window(first, last).covers(step) == (first <= step <= last)
    assert Schedule.one_shot(first).covers(step) == (step == first)
    assert Schedule.persistent(first).covers(step) == (step >= first)


@given(steps, st.none() | steps)
def test_a_schedule_reads_its_own_text(first, last):
    schedule = Schedule(first, last if last is None else max(first, last))
    assert Schedule.parse(str(schedule)) == schedule == Schedule.parse(schedule)


@pytest.mark.parametrize(
    ("text", "schedule", "kind"),
    [
        ("one_shot(3)", Schedule(3, 3), "one-shot"),
        (" one-shot(3) ", Schedule(3, 3), "one-shot"),
        ("window(2, 5)", Schedule(2, 5), "window"),
        ("window(2,5)", Schedule(2, 5), "window"),
        ("window(4, 4)", Schedule(4, 4), "one-shot"),
        ("persistent", Schedule(1, None), "persistent"),
        ("persistent(7)", Schedule(7, None), "persistent"),
    ],
)
def test_texts(text, schedule, kind):
    assert Schedule.parse(text) == schedule
    assert schedule.kind == kind
    assert schedule.is_one_shot == (kind == "one-shot")


@pytest.mark.parametrize(
    "text", ["", "always", "one_shot()", "one_shot(-1)", "window(2)", "persistent()", "one_shot(1.5)"]
)
def test_other_texts_are_refused_with_what_would_do(text):
    with pytest.raises(InputError, match=r"one_shot\(3\).*window\(2, 5\).*persistent"):
        Schedule.parse(text)


@pytest.mark.parametrize(
    "make", [lambda: Schedule.one_shot(0), lambda: Schedule.persistent(0), lambda: Schedule(-2, 4)]
)
def test_step_zero_is_refused(make):
    with pytest.raises(InputError, match=r"steps start from 1"):
        make()


@pytest.mark.parametrize("text", ["one_shot(0)", "window(0, 3)", "persistent(0)"])
def test_step_zero_is_refused_as_text(text):
    with pytest.raises(InputError, match=r"step 0.*steps start from 1"):
        Schedule.parse(text)


def test_an_empty_window_is_refused():
    with pytest.raises(InputError, match=r"from step 5 to step 2 is empty"):
        Schedule.window(5, 2)


@pytest.mark.parametrize("step", [1.0, "1", True, None])
def test_steps_are_whole_numbers(step):
    with pytest.raises(InputError, match="whole step numbers"):
        Schedule(step, 3)


def test_numpy_steps_are_steps():
    assert Schedule.one_shot(np.int64(3)) == Schedule.one_shot(3)
