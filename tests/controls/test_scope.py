import pytest

from kvdrift.controls.scope import Scope


def test_put_in_place_once_and_taken_away_once():
    log = []

    def enter(stack):
        log.append("in")
        stack.callback(log.append, "out")

    scope = Scope(enter, lambda: log.append("closed"))
    with scope, scope:
        assert log == ["in"]
    assert log == ["in", "out"]
    with scope:
        pass
    scope.close()
    assert log == ["in", "out", "in", "out", "closed"]


def test_taken_away_after_an_error_which_is_handed_on():
    seen = []
    scope = Scope(lambda stack: stack.push(lambda kind, error, trace: seen.append(kind)))
    with pytest.raises(ZeroDivisionError), scope:
        _ = 1 / 0
    assert seen == [ZeroDivisionError]


def test_what_is_half_in_place_goes_again():
    seen = []

    def enter(stack):
        stack.callback(seen.append, "undone")
        raise ValueError("half")

    scope = Scope(enter)
    with pytest.raises(ValueError, match="half"), scope:
        pass
    assert seen == ["undone"]
