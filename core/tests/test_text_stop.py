"""Stop strings across borders of pieces."""

from __future__ import annotations

import itertools
import random

import pytest

from engine_core.text.stop import StopMatcher


def run(stops: list[str], pushes: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = ""
    for push in pushes:
        released, matched = matcher.push(push)
        text += released
        assert matched == matcher.matched
    return text + matcher.finish(), matcher.matched


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "abENDcd", "ab"),
        (["END"], "abEND", "ab"),
        (["END"], "abEN", None),
        (["END"], "abENEND", "abEN"),
        (["END"], "END", ""),
        (["b", "ab"], "xabx", "x"),
        (["bc", "abcd"], "xabcd", "x"),
        (["bc", "abcd"], "xabce", "xa"),
        (["bc", "abcd"], "xabc", "xa"),
        (["c", "abcdef", "bcd"], "abcde", "a"),
        (["aab"], "aaab", "a"),
        (["\n\n"], "a\n\n\nb", "a"),
        (["日本"], "x日日本", "x日"),
        (["", "q"], "aq", "a"),
        ([], "abc", None),
        (["zz"], "", None),
    ],
)
def test_stop_earliest_match_wins_at_every_split(
    stops: list[str], text: str, expected: str | None
) -> None:
    wanted = (text, False) if expected is None else (expected, True)
    assert run(stops, [text]) == wanted
    assert run(stops, list(text)) == wanted
    for at in range(len(text) + 1):
        assert run(stops, [text[:at], text[at:]]) == wanted


def test_stop_random_texts_equal_a_search_of_the_whole() -> None:
    rng = random.Random(3)
    for _ in range(6000):
        stops = ["".join(rng.choices("abc", k=rng.randint(1, 5))) for _ in range(rng.randrange(5))]
        text = "".join(rng.choices("abcd", k=rng.randrange(16)))
        starts = [text.find(stop) for stop in stops if stop in text]
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
        pushes = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        expected = (text[: min(starts)], True) if starts else (text, False)
        assert run(stops, pushes) == expected


def test_stop_text_is_withheld_only_while_it_may_begin_a_stop() -> None:
    matcher = StopMatcher(["</s>", "stop"])
    pushes = ["a<", "b", "</", "x s", "t", "ep", "</s", ">more"]
    released = [matcher.push(push)[0] for push in pushes]
    assert released == ["a", "<b", "", "</x ", "", "step", "", ""]
    assert matcher.matched
    assert matcher.push("even more") == ("", True)
    assert matcher.finish() == ""


def test_stop_finish_starts_a_separate_text() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("aEN") == ("a", False)
    assert matcher.finish() == "EN"
    assert matcher.push("Db") == ("Db", False)
    assert matcher.push("END") == ("", True)


def test_stop_repetitive_text_and_many_long_stops_take_linear_work() -> None:
    # Rescanning what is withheld would take billions of steps here.
    stops = ["a" * size + "b" for size in range(1000, 1064)]
    matcher = StopMatcher(stops)
    released = "".join(matcher.push("a")[0] for _ in range(50_000))
    assert matcher.push("b") == ("a" * (50_000 - 1063 - len(released)), True)
