"""Gemma 4's calls: the grammar, its ambiguity, the corpus through a client."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.family import Typed
from engine_core.limits import LIMITS
from engine_core.messages import ToolDecl
from engine_core.testing.tool_cases import cases
from engine_core.testing.tool_corpus import Case, Corpus, Literal, Markup
from engine_core.tools.accept import Toolset, accept_calls
from engine_gemma4.arguments import CLOSE, OPEN
from engine_gemma4.arguments import DELIMITER as D
from engine_gemma4.tools import GEMMA4_SYNTAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def spell(value: Any) -> str:
    if isinstance(value, Literal):
        return value.text
    if isinstance(value, str):
        return f"{D}{value}{D}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spell(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spell, value)) + "]"
    return json.dumps(value)


def write(name: str, pairs: Iterable[tuple[str, Any]]) -> str:
    body = ",".join(f"{key}:{spell(value)}" for key, value in pairs)
    return f"{OPEN}call:{name}{{{body}}}{CLOSE}"


MARKUP = Markup(
    syntax="gemma4",
    write=write,
    render=f"{OPEN}call:{{{{ call.function.name }}}}{{{{ '{{' }}}}"
    "{% for key, value in call.function.arguments.items() %}{% if not loop.first %},{% endif %}"
    f"{{{{ key }}}}:{D}{{{{ value }}}}{D}{{% endfor %}}{{{{ '}}' }}}}{CLOSE}",
    markers=(OPEN, CLOSE),
    tokens=(D,),
    is_typed=True,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    with Corpus.load(tmp_path_factory.mktemp("corpus"), MARKUP) as loaded:
        yield loaded


@pytest.mark.parametrize("case", cases(MARKUP), ids=lambda case: case.name)
def test_reply_gives_exactly_the_certain_calls_and_loses_no_text(
    corpus: Corpus, case: Case
) -> None:
    corpus.check(case)


def test_assistant_text_brings_in_its_own_markers_and_no_others(corpus: Corpus) -> None:
    corpus.check_assistant_text()


def test_reply_sent_back_as_history_is_found_in_the_cache(corpus: Corpus) -> None:
    corpus.check_continuation()


def test_tokens_that_a_tokenizer_hides_stay_part_of_a_call(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    text = MARKUP.call("get_weather", city="Oslo", note="x", days=2)
    calls = [("get_weather", {"city": "Oslo", "note": "x", "days": 2})]
    path = tmp_path_factory.mktemp("special")
    with Corpus.load(path, MARKUP, are_special=True) as corpus:
        corpus.check(Case(name="hidden", reply=f"a{text}b", calls=calls, text="ab"))
        corpus.check(Case(name="refused", reply=f"a{text[:-1]}b"))


def readings(body: str) -> list[dict[str, Any]]:
    """What a call of this body may mean."""
    proposals = GEMMA4_SYNTAX.parse(f"{OPEN}call:f{body}{CLOSE}", ())
    assert len(proposals) < 2
    return [
        {key: value.value for key, value in reading.items()}
        for proposal in proposals
        for reading in proposal.readings
    ]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("{}", {}),
        (" {\n} ", {}),
        (f"{{city:{D}Paris{D},n:3,ok:true}}", {"city": "Paris", "n": 3, "ok": True}),
        (f"{{ city : {D}Paris{D} , n : 3 }}", {"city": "Paris", "n": 3}),
        (f"{{a:{D}x{D},b:{D}y{D}}}", {"a": "x", "b": "y"}),
        (f"{{a:{D}}}{D},b:1}}", {"a": "}", "b": 1}),
        (f"{{a:{D}{D}}}", {"a": ""}),
        (f"{{a:{D} x\n{D}}}", {"a": " x\n"}),
        (f"{{a:{D}say {D}hi{D} now{D},b:2}}", {"a": 'say "hi" now', "b": 2}),
        (
            f"{{code:{D}q({D}{D}{D} SELECT {D}{D}{D}).df(){D},refs:[{D}df_1{D}]}}",
            {"code": 'q(""" SELECT """).df()', "refs": ["df_1"]},
        ),
        (f"{{a:{D}he said {D}hi{D}, then left{D}}}", {"a": 'he said "hi", then left'}),
        (
            f"{{a:{{b:[1,-2.5,{{c:{D}x{D}}}],d:null}},max-results:3}}",
            {"a": {"b": [1, -2.5, {"c": "x"}], "d": None}, "max-results": 3},
        ),
        (f"{{{D}k{D}:1, b c : 2, d.e:3, {D}:,{D}:4}}", {"k": 1, "b c": 2, "d.e": 3, ":,": 4}),
        ('{mode: "fast", list:["x", "\\u00e9\\n"]}', {"mode": "fast", "list": ["x", "é\n"]}),
        ('{"k": {"l": "}"}}', {"k": {"l": "}"}}),
        ("{a:1e3,b:-0.5E-1,c:0}", {"a": 1000.0, "b": -0.05, "c": 0}),
        ("{a:" + "9" * 1000 + "}", {"a": int("9" * 1000)}),
        (f"{{a:{D}a {CLOSE} b{D}}}", {"a": f"a {CLOSE} b"}),
        (f"{{a:{D}a {OPEN} b {CLOSE}{D}}}", {"a": f"a {OPEN} b {CLOSE}"}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_call_is_read_with_the_types_that_the_markup_states(
    body: str, arguments: dict[str, Any]
) -> None:
    (found,) = readings(body)
    assert found == arguments
    assert list(map(type, found.values())) == list(map(type, arguments.values()))


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "{a}",
        "{a:}",
        "{:1}",
        "{a:1,}",
        "{,a:1}",
        "{a:1 b:2}",
        "{a:1,a:2}",
        f"{{a:{D}x{D},a:{D}y{D}}}",
        f"{{a:1,{D}a{D}:1}}",
        "{a:{b:1,b:1}}",
        "{a:[1,]}",
        "{a:[1}",
        "{a:[1)}",
        "{city:Austin}",
        "{a:[x]}",
        "{a:None}",
        "{a:True}",
        "{a:truex}",
        "{a:'x'}",
        "{a=1}",
        "{zip:01234}",
        "{a:+1}",
        "{a:.5}",
        "{a:1.}",
        "{a:1e999}",
        "{a:NaN}",
        "{a:" + "9" * 1001 + "}",
        f"{{a:{D}abc}}",
        f"{{a:{D}x{D}y}}",
        f"{{a:{D}x{D}{D}}}",
        f"{{{D}{D}:1}}",
        "{a<b:1}",
        '{a:"x}',
        '{a:"\\q"}',
        "{a:1}}",
        "{a:1} now",
        "{a:" + "[" * 80 + "]" * 80 + "}",
        "{" + "k" * 129 + ":1}",
        "{" + ",".join(f"k{number}:1" for number in range(257)) + "}",
        "{a:[" + "1," * 256 + "1]}",
    ],
    ids=lambda text: text[:40],
)
def test_broken_call_is_none(body: str) -> None:
    assert readings(body) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"{OPEN}call:a.b-c:d_1{{}}{CLOSE}", ["a.b-c:d_1"]),
        (f"{OPEN} call : f {{ }} {CLOSE}", ["f"]),
        (f"{OPEN}call:f{{}}{CLOSE}{OPEN}call:g{{}}{CLOSE}<|tool_response>", ["f", "g"]),
        (f"{OPEN}call:f g{{}}{CLOSE}", []),
        (f"{OPEN}call:{{}}{CLOSE}", []),
        (f"{OPEN}f{{}}{CLOSE}", []),
        (f"{OPEN}call:f{{}}", []),
        (f"{OPEN}\n{OPEN}call:f{{}}{CLOSE}", ["f"]),
    ],
)
def test_names_and_spans(text: str, names: list[str]) -> None:
    proposals = GEMMA4_SYNTAX.parse(text, ())
    assert [proposal.name for proposal in proposals] == names
    for proposal in proposals:
        span = text[slice(*proposal.span)]
        assert span.startswith(OPEN)
        assert span.endswith(CLOSE)


def test_where_mlx_lm_fails_calls_are_read() -> None:
    """Spaces after commas, keys with ``-`` ``.`` or space, dotted names, interior delimiters."""
    text = f"{OPEN}call:a.b{{x-y:1, p.q:{D}v{D}, r s:{D}say {D}hi{D}{D}}}{CLOSE}"
    (proposal,) = GEMMA4_SYNTAX.parse(text, ())
    assert proposal.name == "a.b"
    assert proposal.readings == ({"x-y": Typed(1), "p.q": Typed("v"), "r s": Typed('say "hi"')},)


def test_where_mlx_vlm_fails_calls_are_read() -> None:
    """A brace in a text truncated the arguments, and only the first of two calls was found."""
    first = f"{OPEN}call:f{{a:{D}}}{D},b:1}}{CLOSE}"
    proposals = GEMMA4_SYNTAX.parse(f"{first}{OPEN}call:g{{{D}k{D}:2}}{CLOSE}", ())
    assert [dict(proposal.readings[0]) for proposal in proposals] == [
        {"a": Typed("}"), "b": Typed(1)},
        {"k": Typed(2)},
    ]


def test_the_fewest_delimiters_in_texts_win_before_any_schema_is_asked() -> None:
    """One text with two quotes in it would satisfy this schema; two texts are what is written."""
    body = f"{{a:{D}x{D},b:{D}y{D}}}"
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "additionalProperties": False,
    }
    toolset = Toolset.compile([ToolDecl(name="f", parameters=schema)])
    reply = f"{OPEN}call:f{body}{CLOSE}"
    assert readings(body) == [{"a": "x", "b": "y"}]
    accepted = accept_calls(reply, GEMMA4_SYNTAX, toolset)
    assert accepted.calls == ()
    assert accepted.text == reply


def test_two_readings_of_one_class_are_left_to_the_schema() -> None:
    body = f"{{a:[{D}{D}{D},{D},{D}a{D}]}}"
    first, second = ['"', ',"a'], ['"",', "a"]
    assert sorted(map(str, readings(body))) == sorted(map(str, [{"a": first}, {"a": second}]))
    reply = f"{OPEN}call:f{body}{CLOSE}"

    def accepted(items: dict[str, Any]) -> list[Any]:
        properties = {"a": {"type": "array", "items": items}}
        tool = ToolDecl(name="f", parameters={"type": "object", "properties": properties})
        return list(accept_calls(reply, GEMMA4_SYNTAX, Toolset.compile([tool])).calls)

    assert accepted({"type": "string"}) == []
    for meant in (first, second):
        (call,) = accepted({"enum": meant})
        assert list(call.arguments["a"]) == meant


def test_a_broken_call_swallows_no_other() -> None:
    good = f"{OPEN}call:g{{b:{D}y{D}}}{CLOSE}"
    for broken in (
        f"{OPEN}call:f{{a:{D}x{D}, n:oops}}{CLOSE}",
        f"{OPEN}call:f{{a:{D}x{D},a:1}}{CLOSE}",
        f"{OPEN}call:f{{a:{D}x}}{CLOSE}",
        f"{OPEN}call:f{{a:x{D}}}{CLOSE}",
    ):
        assert [one.name for one in GEMMA4_SYNTAX.parse(broken + good, ())] == ["g"]
        assert [one.name for one in GEMMA4_SYNTAX.parse(good + broken, ())] == ["g"]
    halves = f"{OPEN}call:f{{a:{D}x}}{CLOSE}{OPEN}call:g{{b:y{D}}}{CLOSE}"
    assert GEMMA4_SYNTAX.parse(halves, ()) == ()


def test_call_quoted_in_an_unfinished_text_is_no_call() -> None:
    inner = f"{OPEN}call:g{{}}{CLOSE}"
    assert GEMMA4_SYNTAX.parse(f"{OPEN}call:f{{a:{D}{inner}", ()) == ()
    assert GEMMA4_SYNTAX.parse(f"{OPEN}call:f{{a:{D}{inner}{D}", ()) == ()


def test_calls_and_openers_are_bounded() -> None:
    call = f"{OPEN}call:f{{}}{CLOSE}"
    assert len(GEMMA4_SYNTAX.parse(call * 100, ())) == LIMITS.reply_calls
    assert GEMMA4_SYNTAX.parse(OPEN * 256 + call, ()) == ()
    assert len(GEMMA4_SYNTAX.parse(OPEN * 255 + call, ())) == 1


HOSTILE = [
    f"{OPEN}call:f{{a:{D}" * 20_000,
    f"{OPEN}call:f{{a:" + "[" * 200_000,
    f"{OPEN}call:f{{" + "a:1," * 100_000,
    f"{OPEN}" + " " * 300_000,
    f"{OPEN}call:f{{a:{D}" + f"{D}," * 50_000,
    f"{OPEN}call:f{{a:[" + f"{D}x{D}," * 50_000,
    f"{OPEN}call:f{{a:[" + f"{D},{D}" * 20_001 + f"]}}{CLOSE}",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_ends_without_a_call(text: str) -> None:
    assert GEMMA4_SYNTAX.parse(text, ()) == ()


# ---------------------------------------------------------------- an exhaustive second opinion


def every_reading(text: str) -> list[tuple[Any, int]]:
    """All grammatical readings of ``text`` by trying everything, with their interior delimiters."""
    return [
        (value, used)
        for value, at, used in values(text, 0)
        if at == len(text) and isinstance(value, dict)
    ]


def run_of(text: str, at: int, letters: str) -> int:
    while at < len(text) and text[at] in letters:
        at += 1
    return at


def texts(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    if not text.startswith(D, at):
        return
    closes = [place for place in range(at + len(D), len(text)) if text.startswith(D, place)]
    for used, close in enumerate(closes):
        yield text[at + len(D) : close].replace(D, '"'), close + len(D), used


def values(text: str, at: int) -> Iterator[tuple[Any, int, int]]:
    yield from texts(text, at)
    end = run_of(text, at, "1")
    if end > at:
        yield int(text[at:end]), end, 0
    for kind, close in (("{", "}"), ("[", "]")):
        if text.startswith(kind, at):
            for entries, end, used in sequence(text, at + 1, close):
                yield (Pairs(entries) if kind == "{" else entries), end, used


class Pairs(dict[str, Any]):
    """An object that remembers whether a key came twice."""

    def __init__(self, pairs: list[Any]) -> None:
        super().__init__(pairs)
        self.is_valid = len(self) == len(pairs) and all(map(bool, self))


def sequence(text: str, at: int, close: str) -> Iterator[tuple[list[Any], int, int]]:
    if text.startswith(close, at):
        yield [], at + 1, 0
        return
    yield from rest(text, at, close)


def rest(text: str, at: int, close: str) -> Iterator[tuple[list[Any], int, int]]:
    for entry, end, used in entries_of(text, at, close):
        if text.startswith(close, end):
            yield [entry], end + 1, used
        elif text.startswith(",", end):
            for more, last, further in rest(text, end + 1, close):
                yield [entry, *more], last, used + further


def entries_of(text: str, at: int, close: str) -> Iterator[tuple[Any, int, int]]:
    if close == "]":
        yield from values(text, at)
        return
    keys = list(texts(text, at))
    bare = run_of(text, at, "a1")
    if bare > at:
        keys.append((text[at:bare], bare, 0))
    for key, end, used in keys:
        if text.startswith(":", end):
            for value, last, further in values(text, end + 1):
                yield (key, value), last, used + further


def is_valid(value: Any) -> bool:
    if isinstance(value, Pairs):
        printable = all(not set(key) & set("<>{}[]") for key in value)
        return value.is_valid and printable and all(map(is_valid, value.values()))
    return all(map(is_valid, value)) if isinstance(value, list) else True


def smallest_class(text: str) -> list[Any]:
    found = every_reading(text)
    least = min((used for _, used in found), default=1)
    return [] if least % 2 else [v for v, used in found if used == least and is_valid(v)]


PIECES = st.sampled_from([D, D, D, ",", ":", "{", "}", "[", "]", "a", "1"])


@settings(max_examples=400)
@given(st.lists(PIECES, max_size=14).map("".join))
def test_readings_equal_those_found_by_trying_everything(inside: str) -> None:
    for body in (f"{{a:{D}{inside}}}", f"{{a:[{D}{inside}{D}]}}", f"{{{inside}}}"):
        expected = smallest_class(body)
        found = readings(body)
        assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, expected))


def test_every_short_body_is_read_like_the_exhaustive_search() -> None:
    for size in range(4):
        for pieces in itertools.product([D, ",", ":", "a", "1", "]"], repeat=size):
            body = f"{{a:[{D}{''.join(pieces)}{D}]}}"
            found = sorted(map(json.dumps, readings(body)))
            assert found == sorted(map(json.dumps, smallest_class(body)))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.from_regex(r"[a-z][a-z_.-]{0,6}", fullmatch=True), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), JSON, max_size=4))
def test_what_a_template_writes_is_read_back(arguments: dict[str, Any]) -> None:
    body = spell(arguments)
    assert readings(body) == [arguments]
