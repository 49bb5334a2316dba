"""The tool syntax: what is a call, what is text, and where a value ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from engine_core.limits import LIMITS
from engine_qwen35.tools import QWEN_XML

if TYPE_CHECKING:
    from engine_core.family import Proposal


def call(name: str, **values: str) -> str:
    """Write a call as the published templates do."""
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def parse(text: str) -> tuple[Proposal, ...]:
    return QWEN_XML.parse(text, ())


def only(text: str) -> Proposal:
    (proposal,) = parse(text)
    return proposal


def arguments(text: str) -> dict[str, object]:
    (reading,) = only(text).readings
    return dict(reading)


def test_one_call_is_read_with_its_span() -> None:
    written = call("get_weather", city="Oslo", days="3")
    text = f"I will look.\n\n{written}\nbye"
    proposal = only(text)
    assert text[slice(*proposal.span)] == written
    assert proposal.name == "get_weather"
    assert proposal.readings == ({"city": "Oslo", "days": "3"},)


def test_several_calls_keep_their_order() -> None:
    text = call("a", x="1") + "\n" + call("b") + "\n" + call("a", x="2")
    found = [(proposal.name, dict(proposal.readings[0])) for proposal in parse(text)]
    assert found == [("a", {"x": "1"}), ("b", {}), ("a", {"x": "2"})]


@pytest.mark.parametrize(
    "value",
    [
        "null",
        "None",
        "12345",
        "9007199254740993",
        "yes",
        "  indented\n    code\n",
        "\n",
        "",
        '{"a": [1, null]}',
        "a < b > c",
        "ends with newline\n",
        "\ttabs\tand \u2028 separators",
        "windows\r\nlines",
        "emoji 🐳 and 漢字",
    ],
    ids=repr,
)
def test_values_keep_their_text_and_lose_one_newline_a_side(value: str) -> None:
    assert arguments(call("f", x=value)) == {"x": value}


def test_a_value_on_the_tag_s_line_is_read() -> None:
    text = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"
    assert arguments(text) == {"x": "1"}


@pytest.mark.parametrize(
    "value",
    [
        "before </parameter> after",
        "</parameter></parameter>",
        "<parameter=y>",
        "a </function> b",
        "a </tool_call> b",
        "</function>\n</tool_call>",
        "<tool_call>",
        "<function=g>",
        "</parameter>\n<parameter=",
        "</parameter>\n</function>",
        "<think>hm</think>",
        call("nested"),
        call("nested", k="v"),
        "see:\n" + call("one", k="v", l="w") + "\n" + call("two") + "\nand so on",
        "twice " + call("outer", body=call("inner", z="1")),
    ],
    ids=repr,
)
def test_tags_inside_a_value_are_text(value: str) -> None:
    """A parser that ends a value at the first closing tag truncates these."""
    text = call("write", path="a.txt", content=value, mode="w")
    assert arguments(text) == {"path": "a.txt", "content": value, "mode": "w"}
    assert only(text).span == (0, len(text))


def test_markup_that_reads_as_two_parameters_is_two_parameters() -> None:
    """The reading with the fewest tags taken for text wins."""
    text = call("f", a="1\n</parameter>\n<parameter=b>\n2")
    assert arguments(text) == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no call",
        "<tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=f>\n</tool_call>",
        "<tool_call>\n<function=f>\n</function>",
        "<function=f>\n</function>",
        "<tool_call>\nsome prose\n<function=f>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nprose\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\nprose</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=a b>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n</function>\nprose</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=>\n1\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>\n<function={'n' * (LIMITS.tool_name_chars + 1)}>\n</function>\n</tool_call>",
        call("f", **{"a{b": "1"}),
        call("f", **{"k" * 129: "1"}),
        call("f", **{"a\nb": "1"}),
    ],
    ids=repr,
)
def test_anything_else_is_no_call(text: str) -> None:
    assert parse(text) == ()


def test_repeated_parameters_are_refused_and_not_reinterpreted() -> None:
    text = call("f", a="1\n</parameter>\n<parameter=a>\n2")
    assert parse(text) == ()
    assert [one.name for one in parse(text + "\n" + call("g"))] == ["g"]


def test_a_call_after_a_broken_one_is_read() -> None:
    broken = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</tool_call>\n"
    assert [one.name for one in parse(broken + call("g", y="2"))] == ["g"]
    prose = "The tag <tool_call> opens a call.\n"
    assert [one.name for one in parse(prose + call("g"))] == ["g"]


def test_unfinished_call_hides_nothing_that_could_be_run() -> None:
    """A reply cut inside a value must not run a call that the value quotes."""
    quoted = call("delete_all", yes="true")
    assert parse(f"<tool_call>\n<function=write>\n<parameter=content>\n{quoted}\n") == ()


def test_bounds_hold() -> None:
    assert len(parse(call("f") * (LIMITS.reply_calls + 5))) == LIMITS.reply_calls
    many = {f"k{i}": "1" for i in range(LIMITS.checked_entries + 1)}
    assert parse(call("f", **many)) == ()
    del many["k0"]
    assert len(arguments(call("f", **many))) == LIMITS.checked_entries
    long = "x" * LIMITS.arguments_bytes
    assert parse(call("f", a=long)) == ()


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 100_000,
        "<tool_call>\n<function=f>\n<parameter=x>\n" * 30_000,
        "<tool_call>\n<function=f>\n<parameter=x>\n" + "</parameter>" * 80_000,
        "<tool_call>\n<function=f>\n<parameter=x>\n" + "</parameter>\n<parameter=y" * 40_000,
        "<tool_call>" + " " * 1_000_000,
        "<tool_call>\n<function=f>\n<parameter=x>\n</parameter>" + " " * 1_000_000,
    ],
    ids=range(6),
)
def test_hostile_text_is_read_in_linear_time(text: str) -> None:
    start = time.process_time()
    assert parse(text) == ()
    assert time.process_time() - start < 5.0


def test_markers_frame_the_syntax() -> None:
    assert QWEN_XML.markers == (("<tool_call>", "</tool_call>"),)
    assert (QWEN_XML.name, QWEN_XML.probe_rounds) == ("qwen_xml", 2)
