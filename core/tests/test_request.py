from __future__ import annotations

import subprocess  # noqa: TID251  a fresh interpreter shows what is imported
import sys
from typing import Any

import attrs
import numpy as np
import pytest

from engine_core.errors import InvalidRequest
from engine_core.events import CancelToken
from engine_core.messages import FinishReason, ToolDecl, Usage
from engine_core.request import GenerateOptions, GenerateReply, Timings, TokenLogprob, ToolChoice

OPTIONS = [
    "tools",
    "tool_choice",
    "schema_annotations",
    "response_schema",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens_to_keep",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logits_processors",
    "seed",
    "stop",
    "logprobs",
    "top_logprobs",
    "thinking",
    "reasoning_budget",
    "template_options",
    "prefill",
    "speculative_tokens",
    "prompt_cache",
    "lookahead",
    "context_tokens",
    "on_token",
    "on_progress",
    "cancel",
    "deadline",
]

NAN = float("nan")
INFINITY = float("inf")


def refused(option, **options):
    with pytest.raises(InvalidRequest) as caught:
        GenerateOptions.parse(**options)
    assert caught.value.code == f"request.{option}"
    return caught.value


def test_options_are_exactly_the_published_ones():
    assert [field.name for field in attrs.fields(GenerateOptions)] == OPTIONS


def test_options_default_to_greedy():
    options = GenerateOptions.parse()
    assert options == GenerateOptions()
    assert (options.max_tokens, options.temperature, options.seed) == (256, 0.0, None)
    assert (options.prompt_cache, options.lookahead, options.speculative_tokens) == (True, True, 0)
    assert options.context_tokens is None
    assert options.tool_choice == ToolChoice()


@pytest.mark.parametrize(
    ("option", "low", "high"),
    [
        ("max_tokens", 1, 1_048_576),
        ("top_k", 0, 2**31 - 1),
        ("min_tokens_to_keep", 1, 2**31 - 1),
        ("repetition_context_size", 1, 16_777_216),
        ("seed", 0, 2**64 - 1),
        ("speculative_tokens", 0, 8),
    ],
)
def test_integer_option_takes_its_range_and_nothing_else(option, low, high):
    for good in (low, high, np.int64(min(high, 7))):
        value = getattr(GenerateOptions.parse(**{option: good}), option)
        assert value == good
        assert type(value) is int
    for bad in (low - 1, high + 1, True, False, 1.0, "1", NAN, [1], 10**5000, np.bool_(True)):
        refused(option, **{option: bad})


@pytest.mark.parametrize("option", OPTIONS)
def test_none_means_the_default_of_every_option(option):
    assert GenerateOptions.parse(**{option: None}) == GenerateOptions()


@pytest.mark.parametrize("option", ["logprobs", "prompt_cache", "lookahead", "thinking"])
def test_flag_takes_a_boolean_of_numpy(option):
    for given in (True, False):
        value = getattr(GenerateOptions.parse(**{option: np.bool_(given)}), option)
        assert value is given
    for bad in (1, 0, "true", np.int64(1), np.array([True])):
        refused(option, **{option: bad})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("temp", "temperature"),
        ("max_length", None),
        ("prompt", None),
        ("device", None),
    ],
)
def test_unknown_option_is_only_taken_for_a_similar_one(written, meant):
    with pytest.raises(InvalidRequest) as caught:
        GenerateOptions.parse(**{written: 1})
    assert caught.value.code == "request.unknown_option"
    expected = f"did you mean {meant!r}?" if meant else f"known: {', '.join(OPTIONS)}"
    assert caught.value.hint == expected


@pytest.mark.parametrize(
    ("option", "low", "high"),
    [
        ("temperature", 0, 2),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("xtc_probability", 0, 1),
        ("xtc_threshold", 0, 0.5),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
    ],
)
def test_number_option_takes_its_range_and_nothing_else(option, low, high):
    for good in (low, high, np.float32(0.25)):
        value = getattr(GenerateOptions.parse(**{option: good}), option)
        assert value == float(good)
        assert type(value) is float
    for bad in (low - 0.001, high + 0.001, True, NAN, INFINITY, -INFINITY, "1", [1], 10**400):
        refused(option, **{option: bad})


@pytest.mark.parametrize(
    ("option", "high"), [("repetition_penalty", 100), ("deadline", 31_536_000)]
)
def test_positive_number_option_refuses_zero(option, high):
    for good in (0.001, high):
        assert getattr(GenerateOptions.parse(**{option: good}), option) == good
    for bad in (0, -1, high * 1.001, NAN, INFINITY, True, "1"):
        refused(option, **{option: bad})


@pytest.mark.parametrize("option", ["logprobs", "prompt_cache", "lookahead", "thinking"])
def test_flag_takes_booleans_only(option):
    for good in (True, False):
        assert getattr(GenerateOptions.parse(**{option: good}), option) is good
    for bad in (1, 0, "yes", []):
        refused(option, **{option: bad})


def test_none_means_not_given_where_an_option_can_be_off():
    nullable = [
        "tools",
        "tool_choice",
        "schema_annotations",
        "response_schema",
        "top_k",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logits_processors",
        "seed",
        "stop",
        "top_logprobs",
        "thinking",
        "reasoning_budget",
        "template_options",
        "prefill",
        "speculative_tokens",
        "context_tokens",
        "on_token",
        "on_progress",
        "cancel",
        "deadline",
    ]
    assert GenerateOptions.parse(**dict.fromkeys(nullable)) == GenerateOptions()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("temp", "temperature"),
        ("max_new_tokens", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("enable_thinking", "thinking"),
        ("num_draft_tokens", "speculative_tokens"),
    ],
)
def test_unknown_option_suggests_the_nearest(name, nearest):
    assert repr(nearest) in refused("unknown_option", **{name: 1}).hint


def test_unknown_option_without_neighbour_lists_the_known():
    assert "max_tokens" in refused("unknown_option", zzz=1).hint


def test_stop_takes_one_or_several_texts():
    assert GenerateOptions.parse(stop="END").stop == ("END",)
    assert GenerateOptions.parse(stop=["a", "b"]).stop == ("a", "b")
    assert GenerateOptions.parse(stop=["é" * 2048] * 64).stop == ("é" * 2048,) * 64
    for bad in ("", ["a", ""], [5], 5, ["a"] * 65, ["é" * 2049], ["\ud800"], {"a": 1}):
        refused("stop", stop=bad)


def test_logit_bias_is_normalised_and_frozen():
    given = {"5": -100, 7: 2.5}
    options = GenerateOptions.parse(logit_bias=given)
    given[8] = 1.0
    assert dict(options.logit_bias) == {5: -100.0, 7: 2.5}
    with pytest.raises(TypeError):
        options.logit_bias[9] = 1.0
    for bad in (
        [5],
        {-1: 1.0},
        {2**31 - 1: 1.0},
        {True: 1.0},
        {"x": 1.0},
        {"-5": 1.0},
        {"\u0665": 1.0},
        {"9" * 100_000: 1.0},
        {5: NAN},
        {5: 101},
        {5: "1"},
        {5: 1.0, "5": 1.0},
        dict.fromkeys(range(4097), 0.0),
    ):
        refused("logit_bias", logit_bias=bad)


def test_logprobs_must_be_on_for_alternatives():
    assert GenerateOptions.parse(logprobs=True, top_logprobs=64).top_logprobs == 64
    refused("top_logprobs", top_logprobs=5)
    for bad in (65, -1, True):
        refused("top_logprobs", logprobs=True, top_logprobs=bad)


def test_reasoning_budget_needs_thinking_and_fits_max_tokens():
    assert GenerateOptions.parse(reasoning_budget=256).reasoning_budget == 256
    assert GenerateOptions.parse(reasoning_budget=9, thinking=True).reasoning_budget == 9
    refused("reasoning_budget", reasoning_budget=9, thinking=False)
    refused("reasoning_budget", reasoning_budget=257)
    refused("reasoning_budget", reasoning_budget=1_048_577, max_tokens=1_048_576)
    refused("reasoning_budget", reasoning_budget=0)


def test_context_tokens_bound_max_tokens():
    assert GenerateOptions.parse(context_tokens=256).context_tokens == 256
    refused("max_tokens", context_tokens=255)
    refused("context_tokens", context_tokens=0)
    refused("context_tokens", context_tokens=16_777_217)


def test_tools_are_parsed_and_the_choice_must_exist():
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = GenerateOptions.parse(tools=tools)
    assert options.tools == (ToolDecl(name="f"),)
    assert attrs.evolve(options, seed=1).tools == options.tools
    named = {"type": "function", "function": {"name": "f"}}
    for choice in (named, {"name": "f"}, {"type": "function", "name": "f"}):
        parsed = GenerateOptions.parse(tools=tools, tool_choice=choice).tool_choice
        assert parsed == ToolChoice(mode="named", name="f")
        assert GenerateOptions.parse(tools=tools, tool_choice=parsed).tool_choice == parsed
    for mode in ("auto", "none", "required"):
        assert GenerateOptions.parse(tools=tools, tool_choice=mode).tool_choice.mode == mode
    assert GenerateOptions.parse(tool_choice="none").tool_choice.mode == "none"
    refused("tool_choice", tool_choice="required")
    refused("tool_choice", tool_choice=named)
    for bad in ("any", "f", 5, {}, {"type": "custom", "name": "f"}, {"name": "g"}, {"name": 5}):
        refused("tool_choice", tools=tools, tool_choice=bad)
    with pytest.raises(InvalidRequest) as caught:
        GenerateOptions.parse(tools=[{"name": "has space"}])
    assert caught.value.code == "request.tools.name"


def test_json_options_are_copied_and_frozen():
    schema = {"type": "object", "properties": {}}
    variables = {"preserve_thinking": True, "list": [1]}
    options = GenerateOptions.parse(response_schema=schema, template_options=variables)
    schema["type"] = "array"
    variables["list"].append(2)
    assert options.response_schema == {"type": "object", "properties": {}}
    assert options.template_options == {"preserve_thinking": True, "list": [1]}
    refused("response_schema", response_schema="object")
    refused("response_schema", response_schema={"a": NAN})
    for bad in ("x", {"a": object()}, {5: 1}, {"messages": []}, {"tools": 1}, {"bos_token": ""}):
        refused("template_options", template_options=bad)
    refused("template_options", template_options={"enable_thinking": True}, thinking=False)
    assert GenerateOptions.parse(template_options={"enable_thinking": True}).thinking is None


def test_prefill_takes_text():
    assert GenerateOptions.parse(prefill="So").prefill == "So"
    for bad in (5, b"x", "\udc00"):
        refused("prefill", prefill=bad)


def test_callbacks_must_be_callable():
    def processor(token_ids, logits):
        return logits

    options = GenerateOptions.parse(
        on_token=print, on_progress=print, logits_processors=[processor], cancel=CancelToken()
    )
    assert options.logits_processors == (processor,)
    for option in ("on_token", "on_progress"):
        refused(option, **{option: "print"})
    for bad in ("print", 5, [5], processor):
        refused("logits_processors", logits_processors=bad)
    refused("cancel", cancel=True)
    refused("cancel", cancel=lambda: True)


def test_options_cannot_be_changed_and_are_checked_on_evolve():
    options = GenerateOptions.parse(temperature=1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        options.temperature = 0.5
    with pytest.raises(InvalidRequest):
        attrs.evolve(options, temperature=-1)
    assert attrs.evolve(options, logit_bias={1: 1.0}) != options


def test_bad_options_are_refused_without_importing_mlx():
    program = """
import sys
from engine_core.errors import InvalidRequest
from engine_core.request import GenerateOptions
try:
    GenerateOptions.parse(temperature=-1, cancel=None)
except InvalidRequest as error:
    print(error.code, "mlx" in sys.modules, "jinja2" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)  # noqa: S603
    assert done.stdout.split() == [b"request.temperature", b"False", b"False"]


def test_timings_give_speeds_over_tokens_really_fed():
    usage = Usage(prompt_tokens=110, cached_tokens=10, completion_tokens=30)
    timings = Timings(load_seconds=1.0, prefill_seconds=0.5, decode_seconds=2.0)
    assert timings.prompt_tokens_per_second(usage) == 200.0
    assert timings.decode_tokens_per_second(usage) == 15.0
    assert Timings().decode_tokens_per_second(usage) == 0.0


def test_reply_defaults_say_nothing_more_than_text():
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
    reply = GenerateReply(text="x", finish_reason=FinishReason.STOP, usage=usage, token_ids=(5,))
    assert (reply.reasoning, reply.tool_calls, reply.logprobs) == (None, (), None)
    assert (reply.truncated, reply.speculation, reply.structured) == (False, None, None)
    assert TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5),)).top[0] == (5, -0.5)


def test_schema_annotations_are_a_closed_list():
    options = GenerateOptions.parse(schema_annotations=["format", "$schema", "format"])
    assert options.schema_annotations == ("$schema", "format")
    for bad in ("format", ["pattern"], [None], {"format": 1}, 3):
        refused("schema_annotations", schema_annotations=bad)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("auto", ["f", "g"]), ("required", ["f", "g"]), ("none", []), ({"name": "g"}, ["g"])],
)
def test_tool_choice_decides_what_is_advertised(choice, expected):
    options = GenerateOptions.parse(tools=[{"name": "f"}, {"name": "g"}], tool_choice=choice)
    assert [tool.name for tool in options.advertised_tools] == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("stop", [np.array(["a", "b"])]),
        ("schema_annotations", [np.array(["a", "b"])]),
        ("tool_choice", {"type": np.array([1, 2])}),
        ("tool_choice", np.array(["auto", "none"])),
        ("logits_processors", np.array(1)),
        ("logits_processors", {len}),
        ("temperature", np.array([0.5, 0.5])),
        ("seed", np.array([1, 2])),
        ("logit_bias", np.array([1, 2])),
        ("tools", np.array([1, 2])),
    ],
)
def test_options_that_are_or_hold_arrays_are_refused(option: str, value: Any) -> None:
    """Comparing an array gives an array, whose truth is an error of NumPy's own."""
    with pytest.raises(InvalidRequest) as caught:
        GenerateOptions.parse(**{option: value})
    assert caught.value.code == f"request.{option}"
