"""The adversarial corpus in the built-in syntax, and what surrounds a call."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core import CapabilityUnavailable, FinishReason, InvalidRequest, Segment, TokenKind
from engine_core.testing.tool_cases import cases
from engine_core.testing.tool_corpus import TOOLS, Corpus, Literal, Markup, joined

if TYPE_CHECKING:
    from collections.abc import Iterator


def write(name, pairs):
    def spell(value):
        return value.text if isinstance(value, Literal) else json.dumps(value, ensure_ascii=False)

    body = ", ".join(f"{json.dumps(key)}: {spell(value)}" for key, value in pairs)
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {{{body}}}}}\n</tool_call>'


HERMES = Markup(
    syntax="hermes",
    write=write,
    render='<tool_call>\n{"name": {{ call.function.name | tojson }}, "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
    is_typed=True,
)
CASES = cases(HERMES)
GO = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Iterator[Corpus]:
    with Corpus.load(tmp_path_factory.mktemp("corpus"), HERMES) as loaded:
        yield loaded


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reply_gives_exactly_the_certain_calls_and_loses_no_text(corpus, case):
    corpus.check(case)


def test_assistant_text_brings_in_its_own_markers_and_no_others(corpus):
    corpus.check_assistant_text()


def test_reply_sent_back_as_history_is_found_in_the_cache(corpus):
    corpus.check_continuation()


def text_of(reply_events):
    return [event for event in reply_events if isinstance(event, Segment)]


WEATHER = write("get_weather", [("city", "Oslo")])


# The ways in which a well-known peer fails (reference B1 to B4).


def test_stop_text_across_tokens_ends_the_reply_and_deletes_nothing_before_it(corpus):
    reply = corpus.playback.answer(corpus.client, GO, "[...,[...,", stop=["..,"])
    assert (reply.text, reply.finish_reason) == ("[.", FinishReason.STOP)
    assert reply.usage.completion_tokens < 11


def test_stop_text_in_a_span_that_the_budget_cuts_ends_the_reply(corpus):
    ids = corpus.playback.encode('so <tool_call>{"name": "ENDS and')
    options = {"tools": TOOLS, "stop": ["ENDS"], "max_tokens": len(ids)}
    reply = corpus.playback.answer(corpus.client, GO, ids, **options)
    assert (reply.text, reply.finish_reason) == (
        'so <tool_call>{"name": "',
        FinishReason.STOP,
    )
    assert not reply.truncated
    assert reply.token_ids == ids


def test_prompt_sent_back_with_its_one_token_completion_is_answered(corpus):
    client, options = corpus.client, {"on_progress": corpus.playback._note_prompt}
    corpus.playback.ids = corpus.playback.encode("tool")
    ids = corpus.playback.encode("hello world the name")
    first = client.complete(ids, max_tokens=1, **options)
    for _ in range(2):
        again = client.complete([*ids, *first.token_ids], max_tokens=1, **options)
        assert again.token_ids == first.token_ids
        assert again.usage.cached_tokens == len(ids)
    assert corpus.playback.answer(client, GO, "fine").text == "fine"


def test_literal_think_marker_in_prose_stays_text(corpus):
    text = "Use the <think> tag and </think> after it. Then answer."
    reply = corpus.playback.answer(corpus.client, GO, text, tools=TOOLS)
    assert (reply.text, reply.reasoning) == (text, None)


def test_literal_call_markers_without_tools_stay_text(corpus):
    text = f"A call looks like this: {WEATHER} and so on."
    reply = corpus.playback.answer(corpus.client, GO, text)
    assert (reply.text, reply.tool_calls) == (text, ())
    assert reply.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("function", "pairs", "expected"),
    [
        ("get_weather", [("city", "x"), ("days", 9007199254740993)], True),
        ("run_code", [("code", "null")], True),
        ("run_code", [("code", "a </parameter> b </tool_call> c")], True),
        ("run_code", [("code", "  indented\n")], True),
        ("set_flag", [("flag", "yes")], False),
        ("raw", [("name", "just"), ("arguments", {"raw": "prose"})], False),
        ("ns.f", [("my-key", 1)], False),
    ],
)
def test_values_that_peers_change_come_out_as_written(corpus, function, pairs, expected):
    text = write(function, pairs)
    reply = corpus.playback.answer(corpus.client, GO, text, tools=TOOLS)
    if expected:
        assert [dict(call.arguments) for call in reply.tool_calls] == [dict(pairs)]
    else:
        assert (reply.tool_calls, reply.text) == ((), text)


def test_arguments_that_are_no_object_are_no_call(corpus):
    for arguments in ("[]", '"x"', "null", "3"):
        text = f'<tool_call>{{"name": "ping", "arguments": {arguments}}}</tool_call>'
        reply = corpus.playback.answer(corpus.client, GO, text, tools=TOOLS)
        assert (reply.tool_calls, reply.text) == ((), text)


# Streaming.


def test_opening_boundary_is_signalled_and_text_is_held_after_it(corpus):
    text = f"a {WEATHER} b <tool_call></tool_call> c"
    events = text_of(corpus.playback.stream(corpus.client, GO, text, tools=TOOLS))
    kinds = [event.kind for event in events]
    first = kinds.index(TokenKind.TOOL_CALL)
    assert events[first].text == ""
    assert joined(events[:first], TokenKind.TEXT) == "a "
    # Everything after the first opener comes in one piece, at the end.
    held = [event for event in events[first:] if event.kind is TokenKind.TEXT]
    assert [event.text for event in held] == [" b <tool_call></tool_call> c"]
    assert events[-1] is held[0]
    assert kinds[first:-1] == [TokenKind.TOOL_CALL] * len(kinds[first:-1])


def test_ids_of_calls_differ_between_replies(corpus):
    ids = set()
    for _ in range(5):
        reply = corpus.playback.answer(corpus.client, GO, WEATHER * 2, tools=TOOLS)
        ids |= {call.id for call in reply.tool_calls}
    assert len(ids) == 10


def test_tool_loop_goes_on_with_the_result(corpus):
    reply = corpus.playback.answer(corpus.client, GO, WEATHER, tools=TOOLS)
    history = [
        *GO,
        {"role": "assistant", "content": None, "tool_calls": reply.tool_calls},
        {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "rain"},
    ]
    final = corpus.playback.answer(corpus.client, history, "It rains.", tools=TOOLS)
    assert (final.text, final.finish_reason) == ("It rains.", FinishReason.STOP)


def test_asyncio_twin_gives_the_same_calls(corpus):
    async def run():
        options = corpus.playback._options(f"x {WEATHER}", {"tools": TOOLS})
        return await corpus.client.agenerate(GO, **options)

    reply = asyncio.run(run())
    assert (reply.text, reply.tool_calls[0].name) == ("x ", "get_weather")


def test_callback_that_ends_the_reply_keeps_complete_calls(corpus):
    whole = f"a {WEATHER} b "
    cut = len(corpus.playback.encode(whole)) - 1

    def stop_late(segment):
        return segment.ordinal < cut

    reply = corpus.playback.answer(
        corpus.client, GO, f"{whole}{WEATHER}", tools=TOOLS, on_token=stop_late
    )
    assert [call.name for call in reply.tool_calls] == ["get_weather"]
    assert (reply.text, reply.finish_reason) == ("a ", FinishReason.TOOL_CALLS)
    early = corpus.playback.answer(
        corpus.client, GO, whole, tools=TOOLS, on_token=lambda segment: segment.ordinal < 4
    )
    assert (early.tool_calls, early.finish_reason) == ((), FinishReason.ABORTED)


# What the request asked for.


def test_tool_choice_that_is_not_met_is_a_typed_result(corpus):
    def ask(text, choice="required"):
        options = {"tools": TOOLS, "tool_choice": choice}
        return corpus.playback.answer(corpus.client, GO, text, **options).tool_choice

    assert ask("no", "auto") is None
    assert ask("no", "none") is None
    assert ask(WEATHER).is_met
    missing, refused = ask("no"), ask(write("get_weather", [("days", 3)]))
    assert (missing.is_met, missing.code) == (False, "tools.not_called")
    assert (refused.is_met, refused.code) == (False, "tools.refused")
    assert "'required'" in refused.reason
    named = ask(WEATHER, {"name": "ping"})
    assert (named.is_met, named.code) == (False, "tools.refused")
    assert "advertised" in named.reason
    assert ask(write("ping", []), {"name": "ping"}).is_met


ANSWER = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "value", "code"),
    [
        ('{"n": 3}', {"n": 3}, ""),
        (' \n{"n": 9007199254740993}\n', {"n": 9007199254740993}, ""),
        ('<think>hm</think>{"n": 3}', {"n": 3}, ""),
        ('{"n": "3"}', {"n": "3"}, "output.schema"),
        ('{"n": 3, "m": 1}', {"n": 3, "m": 1}, "output.schema"),
        ("null", None, "output.schema"),
        ('{"n": 3', None, "output.json"),
        ('```json\n{"n": 3}\n```', None, "output.json"),
        ('{"n": 3, "n": 4}', None, "output.json"),
        ('{"n": NaN}', None, "output.json"),
        ("", None, "output.json"),
        (f"{[0] * 300}", [0] * 300, "output.budget"),
    ],
)  # fmt: skip
def test_response_schema_gives_a_typed_result(corpus, text, value, code):
    reply = corpus.playback.answer(corpus.client, GO, text, response_schema=ANSWER)
    result = reply.structured
    assert (result.is_valid, result.value, result.code) == (not code, value, code)
    assert bool(result.reason) == bool(code)
    assert reply.text == text.removeprefix("<think>hm</think>")


def test_response_schema_of_a_reply_that_calls_is_no_answer(corpus):
    reply = corpus.playback.answer(corpus.client, GO, WEATHER, tools=TOOLS, response_schema=ANSWER)
    assert (reply.structured.is_valid, reply.structured.code) == (False, "output.tool_calls")
    assert corpus.playback.answer(corpus.client, GO, "x").structured is None


@pytest.mark.parametrize(
    "options",
    [
        {"response_schema": {"pattern": "x"}},
        {"response_schema": {"type": "object", "properties": {"a": {"format": "date"}}}},
        {"tools": [{"name": "f", "parameters": {"type": "object", "patternProperties": {}}}]},
        {"tools": [{"name": "f", "parameters": {"$schema": "x", "type": "object"}}]},
        {"tools": [{"name": "f", "parameters": {"type": "array"}}]},
        {"tools": [], "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"name": "other"}},
    ],
)
def test_request_with_a_schema_that_cannot_be_executed_is_refused(corpus, options):
    with pytest.raises(InvalidRequest):
        corpus.client.generate(GO, **options)


def test_annotations_are_accepted_when_the_caller_says_so(corpus):
    tool = {"name": "f", "parameters": {"$schema": "x", "type": "object"}}
    reply = corpus.playback.answer(
        corpus.client, GO, write("f", []), tools=[tool], schema_annotations=["$schema"]
    )
    assert [call.name for call in reply.tool_calls] == ["f"]


def test_history_with_calls_of_undeclared_tools_is_refused(corpus):
    history = [
        *GO,
        {"role": "assistant", "tool_calls": [{"id": "1", "name": "old", "arguments": {}}]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    for tools in ([], TOOLS):
        with pytest.raises(InvalidRequest, match="declared tool"):
            corpus.client.generate(history, tools=tools)


def test_template_without_tools_refuses_them(tmp_path):
    from engine_core import Client
    from engine_core.plugins import Plugins
    from engine_core.testing.playback import Playback
    from engine_core.testing.scripted import CHAT_TEMPLATE
    from engine_core.testing.tokenizers import byte_level_tokenizer_json

    playback = Playback(byte_level_tokenizer_json())
    path = playback.write_checkpoint(tmp_path / "plain", CHAT_TEMPLATE)
    with Client.load(path, plugins=Plugins.load(extra=[playback])) as client:
        for options in ({"tools": TOOLS}, {"thinking": True}):
            with pytest.raises(CapabilityUnavailable) as caught:
                client.generate(GO, **options)
            assert caught.value.capability in ("interaction:tools", "interaction:thinking_toggle")
            assert caught.value.reason
        # Not advertised, so not needed.
        assert playback.answer(client, GO, "hi", tools=TOOLS, tool_choice="none").text == "hi"


# Reasoning budgets; a forced close takes the ordinals of the script that it replaces.


def think(corpus, *pieces, budget, **options):
    """Play single tokens back: words, the markers, or raw pieces."""
    ids = [id_ for piece in pieces for id_ in corpus.playback.encode(piece)]
    options = {"max_tokens": len(ids) + 1, "reasoning_budget": budget, **options}
    events = list(corpus.playback.stream(corpus.client, GO, ids, **options))
    segments, reply = text_of(events), events[-1].reply
    assert joined(segments, TokenKind.TEXT) == reply.text
    assert joined(segments, TokenKind.REASONING) == (reply.reasoning or "")
    return reply


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (["a", "b"], "ab"),
        (["</think>", "a", "b"], "ab"),
        ([" ", " ", "</think>", "a"], "a"),
        (["</think>", "</think>", "a"], "</think>a"),
        ([" "] * 9 + ["</think>", "a"], " " * 9 + "</think>a"),
        (["a", "</think>"], "a</think>"),
        ([" ", "</", "b"], " </b"),
        (["</", "think", ">", "a"], "a"),
        ([" "], " "),
        (["</thi"], "</thi"),
        ([], ""),
    ],
)
def test_forced_close_swallows_one_repetition_only(corpus, after, text):
    # Ordinals: the opener is free, two tokens count, the close replaces the third.
    reply = think(corpus, "<think>", "x", "y", "z", *after, budget=2)
    assert (reply.reasoning, reply.text) == ("xy", text)
    assert reply.token_ids[3] == corpus.playback.encode("</think>")[0]


def test_reasoning_that_ends_in_time_is_left_alone(corpus):
    reply = think(corpus, "<think>", "x", "</think>", "a", "b", "c", "d", budget=2)
    assert (reply.reasoning, reply.text) == ("x", "abcd")
    late = think(corpus, "a", "<think>", "x", "y", "z", budget=2)
    assert (late.reasoning, late.text) == (None, "a<think>xyz")


def test_reasoning_that_the_prompt_opened_counts_from_its_first_token(corpus):
    reply = think(corpus, "x", "y", "z", "a", budget=2, thinking=True)
    assert (reply.reasoning, reply.text) == ("xy", "a")


def test_forced_close_reaches_beyond_max_tokens(corpus):
    reply = think(corpus, "<think>", "x", "y", "z", "a", budget=2, max_tokens=3)
    assert (reply.reasoning, reply.text, reply.truncated) == ("xy", "", True)
    assert reply.usage.completion_tokens == 4


def test_unclosed_reasoning_is_all_reasoning(corpus):
    reply = think(corpus, "<think>", "x", " ", "y", budget=4)
    assert (reply.reasoning, reply.text) == ("x y", "")


def test_budget_without_thinking_is_refused(corpus):
    with pytest.raises(InvalidRequest):
        corpus.client.generate(GO, reasoning_budget=3, thinking=False)


# Properties.

PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", WEATHER, write("ping", []), "é", "日本",
     "🦙", " ", "\n", "x", "<", "</", "{", '{"name": "ping"', "stop", "\ufffd", "\x00"]
)  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), pieces=st.lists(PIECES, max_size=6), opened=st.booleans())
def test_reply_does_not_depend_on_where_tokens_are_cut(corpus, data, pieces, opened):
    text = "".join(pieces)
    data_bytes = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(data_bytes)), max_size=5))
    bounds = [0, *sorted(cuts), len(data_bytes)]
    whole = corpus.playback.encode(text)
    ids: list[int] = []
    for begin, end in pairwise(bounds):
        part = data_bytes[begin:end]
        try:
            ids += corpus.playback.encode(part.decode())
        except UnicodeDecodeError:
            # The first 256 tokens are the bytes, so a cut may fall inside a character.
            ids += part
    options = {"tools": TOOLS, "stop": ["stop"], **({"thinking": True} if opened else {})}
    expected = corpus.playback.answer(corpus.client, GO, whole, **options)
    events = list(corpus.playback.stream(corpus.client, GO, ids, **options))
    segments, reply = text_of(events), events[-1].reply
    assert joined(segments, TokenKind.TEXT) == reply.text == expected.text
    assert joined(segments, TokenKind.REASONING) == (reply.reasoning or "")
    assert reply.reasoning == expected.reasoning
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [
        (c.name, c.arguments) for c in expected.tool_calls
    ]
    assert reply.finish_reason is expected.finish_reason
    assert "stop" not in reply.text
