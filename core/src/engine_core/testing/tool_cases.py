"""The cases of :mod:`engine_core.testing.tool_corpus`, written in any markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from engine_core.testing.tool_corpus import Case, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_core.testing.tool_corpus import Markup

__all__ = ["cases"]

CODE: Final = '    def f(x):\n        if x < 3 and x > 1:\n            return {"a": [1, 2]}\n'
TEXTS: Final = {
    "digits": "12345",
    "the word null": "null",
    "the word true": "true",
    "a negative number": "-1.50",
    "JSON": '{"a": [1, true, null]}',
    "a list": "[1, 2]",
    "indented code": CODE,
    "leading space": "  x",
    "a final newline": "x\n",
    "tabs": "\tx\ty",
    "quotes": "say \"hi\" and 'bye' \\ done",
    "braces": "}}]{[",
    "angle brackets": "a < b > c </b> <c>",
    "several scripts": "naïve 日本 🦙 \u0301",
    "a comma and colon": "a,b:c,d",
    "entities": "&lt;tag&gt; &amp;",
    "a code fence": '```json\n{"name": "ping"}\n```',
    "reasoning markers": "<think>no</think>",
    "an empty text": "",
}
"""Texts for a parameter that is declared as a string; each must come out unchanged."""


def cases(markup: Markup) -> list[Case]:
    """Write every case in a markup.

    Args:
        markup: How calls are written.

    Returns:
        The cases; names are unique.
    """
    found = [*_values(markup), *_refusals(markup), *_broken(markup), *_options(markup)]
    if markup.markers[0]:
        found += [*_between(markup), *_markers(markup)]
    else:
        found += list(_whole(markup))
    return found


def _accepted(name: str, markup: Markup, function: str, **arguments: Any) -> Case:
    """A reply that is one call and comes out as it is."""
    reply = markup.call(function, **arguments)
    return Case(name=name, reply=reply, calls=[(function, arguments)], text="")


def _refused(name: str, reply: str, **fields: Any) -> Case:
    """A reply that stays text as a whole."""
    return Case(name=name, reply=reply, **fields)


def _values(markup: Markup) -> Iterator[Case]:
    yield _accepted("one call", markup, "get_weather", city="Oslo", days=3)
    yield _accepted("no arguments", markup, "ping")
    yield _accepted("an enum", markup, "get_weather", city="Oslo", unit="kelvin")
    yield _accepted("a boolean", markup, "set_flag", flag=True)
    yield _accepted("a fraction", markup, "set_flag", level=0.5)
    yield _accepted("a list of texts", markup, "set_flag", tags=["a", "12", ""])
    yield _accepted("an object", markup, "set_flag", options={"a": 1, "b": -2})
    yield _accepted("an empty list and object", markup, "set_flag", tags=[], options={})
    yield _accepted("null where allowed", markup, "get_weather", city="Oslo", note=None)
    for title, text in TEXTS.items():
        yield _accepted(f"text of {title}", markup, "run_code", code=text)
    huge = 10**998 + 7
    for title, number in (("beyond doubles", 9007199254740993), ("of 999 digits", huge)):
        yield Case(
            name=f"an integer {title}",
            reply=markup.call("get_weather", city="Oslo", days=Literal(str(number))),
            calls=[("get_weather", {"city": "Oslo", "days": number})],
            text="",
        )
    yield Case(
        name="a whole number written as a fraction",
        reply=markup.call("get_weather", city="Oslo", days=Literal("3.0")),
        calls=[("get_weather", {"city": "Oslo", "days": 3.0})],
        text="",
    )


def _refusals(markup: Markup) -> Iterator[Case]:
    def refused(name: str, function: str, **arguments: Any) -> Case:
        return _refused(name, markup.call(function, **arguments))

    yield refused("an unknown function", "get_wether", city="Oslo")
    yield refused("another case of the name", "Get_Weather", city="Oslo")
    yield refused("a missing argument", "get_weather", days=3)
    yield refused("no arguments at all", "get_weather")
    yield refused("an unknown argument", "get_weather", city="Oslo", country="NO")
    yield refused("an argument of no parameters", "ping", host="x")
    yield refused("a word for a number", "get_weather", city="Oslo", days="three")
    yield refused("a fraction for an integer", "get_weather", city="Oslo", days=3.5)
    yield refused("a number below its minimum", "get_weather", city="Oslo", days=-1)
    yield refused("a value outside its enum", "get_weather", city="Oslo", unit="rankine")
    yield refused("yes for true", "set_flag", flag="yes")
    yield refused("1 for true", "set_flag", flag=1)
    for word in ("True", "False"):
        reply = markup.call("set_flag", flag=Literal(word))
        name = f"{word} as Python writes it"
        if word in markup.literals:
            calls = [("set_flag", {"flag": markup.literals[word]})]
            yield Case(name=name, reply=reply, calls=calls, text="")
        else:
            yield _refused(name, reply)
    yield refused("TRUE for true", "set_flag", flag=Literal("TRUE"))
    yield refused("None for null", "set_flag", level=Literal("None"))
    yield refused("null for a number", "set_flag", level=None)
    yield refused("a text for a list", "set_flag", tags="a")
    yield refused("a number in a list of texts", "set_flag", tags=["a", 1])
    yield refused("a text in an object of integers", "set_flag", options={"a": "1"})
    for literal in ("1e999", "NaN", "-Infinity", "0x10", "007", "1" * 1001, "1,5", "+3"):
        title = literal if len(literal) < 20 else "an integer of 1,001 digits"
        yield refused(f"{title} for a number", "set_flag", level=Literal(literal))
    if markup.is_typed:
        yield refused("a number for a text", "get_weather", city=12345)
        yield refused("null for a text", "get_weather", city=None)
        yield refused("true for a text", "get_weather", city=True)
        yield refused("a quoted number", "get_weather", city="Oslo", days="3")
    yield _refused(
        "a repeated argument", markup.write("get_weather", [("city", "Oslo"), ("city", "Rome")])
    )
    yield _refused(
        "a repeated equal argument",
        markup.write("get_weather", [("city", "Oslo"), ("city", "Oslo")]),
    )
    nested = Literal("[" * 70 + "]" * 70)
    yield refused("a value nested too deep", "set_flag", tags=nested)
    many = {f"a{number}": number for number in range(300)}
    yield refused("too many entries", "set_flag", options=many)
    yield _refused("an empty name", markup.call("", city="Oslo"))
    yield _refused("a name with a space", markup.call("get weather", city="Oslo"))
    yield _refused("a name too long", markup.call("f" * 65))


def _broken(markup: Markup) -> Iterator[Case]:
    whole = markup.call("get_weather", city="Oslo", days=3)
    for part in range(1, 9):
        cut = len(whole) * part // 9
        yield _refused(f"cut after {part} ninths", whole[:cut])
    yield _refused("cut before its last character", whole[:-1])
    middle = len(whole) // 2
    for junk in ("\x00", "}", "{", '"', "<", "</"):
        broken = f"{whole[:middle]}{junk}{junk}{whole[middle:]}"
        if junk in ("}", "{", '"', "</"):
            yield Case(name=f"{junk!r} in the middle", reply=broken, options={"tools": [PING]})
    yield _refused("no text", "")
    yield _refused("white space", " \n\t ")
    yield _refused("plain prose", "The weather in Oslo is fine; get_weather says so.")
    yield _refused("prose that names arguments", 'city="Oslo" days=3 {"name": "get_weather"} call')


PING: Final[dict[str, Any]] = {
    "name": "ping",
    "parameters": {"type": "object", "additionalProperties": False},
}


def _options(markup: Markup) -> Iterator[Case]:
    whole = markup.call("get_weather", city="Oslo", days=3)
    arguments = ("get_weather", {"city": "Oslo", "days": 3})
    yield _refused("a call without tools", whole, options={"tools": []})
    yield _refused("a call although none is wanted", whole, options={"tool_choice": "none"})
    yield _refused(
        "a call of a tool that is not advertised",
        whole,
        options={"tool_choice": {"type": "function", "function": {"name": "ping"}}},
    )
    yield Case(
        name="a call of the named tool",
        reply=whole,
        calls=[arguments],
        text="",
        options={"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    )
    yield Case(
        name="a required call",
        reply=whole,
        calls=[arguments],
        text="",
        options={"tool_choice": "required"},
    )
    yield _refused("a required call not made", "No.", options={"tool_choice": "required"})
    yield Case(
        name="a call after reasoning",
        reply=f"<think>I need it.</think>{whole}",
        reasoning="I need it.",
        calls=[arguments],
        text="",
    )
    yield Case(
        name="a call inside reasoning",
        reply=f"<think>Maybe {whole}</think>No.",
        reasoning=f"Maybe {whole}",
        text="No.",
    )
    yield Case(
        name="a call inside unclosed reasoning",
        reply=f"<think>Maybe {whole}",
        reasoning=f"Maybe {whole}",
        text="",
    )
    yield Case(
        name="a call inside reasoning that the prompt opened",
        reply=f"Maybe {whole}</think>{whole}",
        reasoning=f"Maybe {whole}",
        calls=[arguments],
        text="",
        options={"thinking": True},
    )
    yield _refused("a call cut by the budget", whole[: len(whole) * 3 // 4], is_cut=True)


def _whole(markup: Markup) -> Iterator[Case]:
    """Cases of a markup without markers: nothing may stand beside the call."""
    whole = markup.call("get_weather", city="Oslo", days=3)
    arguments = ("get_weather", {"city": "Oslo", "days": 3})
    yield Case(name="space around", reply=f" \n{whole}\n ", calls=[arguments], text="")
    yield _refused("prose before", f"Sure: {whole}")
    yield _refused("prose after", f"{whole} Done.")
    yield _refused("two calls", f"{whole}{whole}")
    yield _refused("two calls between semicolons", f"{whole}; {whole}")
    yield _refused("a list of calls", f"[{whole}]")
    yield _refused("a fenced call", f"```json\n{whole}\n```")
    yield _refused("JSON that is no call", '{"city": "Oslo"}')
    yield _refused("an unbalanced brace", "{ and so on")
    open_end = '{"city": "Oslo ENDS", "note": "b"'
    yield Case(
        name="a stop text in JSON that is no call",
        reply=open_end,
        text='{"city": "Oslo ',
        options={"stop": ["ENDS"]},
    )
    yield Case(
        name="a stop text in a call",
        reply=markup.call("run_code", code="ENDS"),
        calls=[("run_code", {"code": "ENDS"})],
        text="",
        options={"stop": ["ENDS"]},
    )
    yield _refused("a call in a call", f'{{"name": "ping", "parameters": {{"x": {whole}}}}}')


def _between(markup: Markup) -> Iterator[Case]:
    """Cases with several spans and with text around them."""
    oslo = markup.call("get_weather", city="Oslo", days=3)
    rome = markup.call("get_weather", city="Rome")
    bad = markup.call("get_wether", city="Rome")
    first = ("get_weather", {"city": "Oslo", "days": 3})
    second = ("get_weather", {"city": "Rome"})

    def mixed(name: str, reply: str, calls: list[Any], text: str, **options: Any) -> Case:
        return Case(name=name, reply=reply, calls=calls, text=text, options=options)

    yield mixed("text before", f"Let me see. {oslo}", [first], "Let me see. ")
    yield mixed("text after", f"{oslo} There.", [first], " There.")
    yield mixed("text around", f"a {oslo} b {rome} c", [first, second], "a  b  c")
    yield mixed("two calls", f"{oslo}\n{rome}", [first, second], "\n")
    yield mixed("two calls without a gap", f"{oslo}{rome}", [first, second], "")
    yield mixed("the same call twice", f"{oslo}{oslo}", [first, first], "")
    yield mixed("a refused call between", f"{oslo} {bad} {rome}", [first, second], f" {bad} ")
    yield mixed("a refused call first", f"{bad}{oslo}", [first], bad)
    yield mixed("a refused call last", f"{oslo}{bad}", [first], bad)
    yield mixed("an empty span first", f"{''.join(markup.markers)}{oslo}", [first],
                "".join(markup.markers))  # fmt: skip
    yield mixed("space around", f"\n\n {oslo} \n", [first], "\n\n  \n")
    yield Case(
        name="a complete call before the budget's cut",
        reply=f"{oslo}{rome[: len(rome) // 2]}",
        calls=[first],
        text=rome[: len(rome) // 2],
        is_cut=True,
    )
    yield mixed("a stop text after a call", f"{oslo} ENDS here", [first], " ", stop=["ENDS"])
    stopped = f"{oslo} and ENDS {rome}"
    yield mixed("a stop text between calls", stopped, [first], " and ", stop=["ENDS"])
    inside = markup.call("run_code", code="ENDS")
    yield mixed(
        "a stop text inside a call", inside, [("run_code", {"code": "ENDS"})], "", stop=["ENDS"]
    )
    # A refused call is text, so a stop text in it ends the reply, later calls included.
    lost = markup.call("run_cod", code="a ENDS b")
    before = lost[: lost.index("ENDS")]
    for name, reply, calls, text in (
        ("a stop text inside a refused call", f"well {lost} c", [], f"well {before}"),
        ("a stop text in a refused call between", f"{oslo}{lost}{rome}", [first], before),
        ("a stop text in a refused call, then after it", f"{lost} ENDS {rome}", [], before),
        ("a stop text in a span without an end", f"{lost[:-1]} d", [], before),
    ):
        finish = "tool_calls" if calls else "stop"
        yield attrs.evolve(mixed(name, reply, calls, text, stop=["ENDS"]), finish=finish)
    border = [f"{markup.markers[1]} and"]
    yield mixed("a stop text over the border of a refused call", f"{bad} and", [],
                bad[: -len(markup.markers[1])], stop=border)  # fmt: skip
    yield mixed("a stop text over the border of a call", f"{oslo} and", [first], " and",
                stop=border)  # fmt: skip
    yield mixed("65 calls", markup.call("ping") * 65, [("ping", {})] * 64, markup.call("ping"))


def _markers(markup: Markup) -> Iterator[Case]:
    """Cases about the markers themselves."""
    open_, close = markup.markers
    whole = markup.call("get_weather", city="Oslo", days=3)
    arguments = ("get_weather", {"city": "Oslo", "days": 3})
    yield _refused("an empty span", f"{open_}{close}")
    yield _refused("prose in a span", f"{open_}just call get_weather for Oslo{close}")
    yield _refused("a name alone in prose", f"{open_}get_weather please{close}")
    yield _refused("an opener alone", open_)
    yield _refused("a closer alone", f"well{close}")
    yield _refused("a closer first", f"{close}{open_}")
    yield _refused("markers in prose", f"Write {open_} and {close} around a call.")
    yield _refused("300 openers", open_ * 300)
    yield _refused("300 closers", close * 300)
    yield _refused("300 empty spans", f"{open_}{close}" * 300)
    yield _refused("a call without its closer", whole[: -len(close)])
    yield _refused("a call without its opener", whole[len(open_) :])
    yield _refused("the span doubled", f"{open_}{open_}x{close}{close}")
    yield _refused("markers without tools", f"Write {open_}x{close}.", options={"tools": []})
    yield _refused(
        "a reasoning marker later in prose",
        "Use the <think> tag. Then answer.",
    )
    yield Case(
        name="a closer inside a text",
        reply=markup.call("run_code", code=f"a {close} b"),
        calls=[("run_code", {"code": f"a {close} b"})],
        text="",
    )
    yield Case(
        name="an opener inside a text",
        reply=markup.call("run_code", code=f"a {open_} b"),
        calls=[("run_code", {"code": f"a {open_} b"})],
        text="",
    )
    yield Case(
        name="an unfinished call before a whole one",
        reply=f"{open_}\n{whole}",
        calls=[arguments],
        text=f"{open_}\n",
    )
    yield Case(name="junk after a call", reply=f"{whole}{close}", calls=[arguments], text=close)
