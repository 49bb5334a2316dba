"""Which template source wins, and that malformed ones are typed errors."""

import json

import pytest

from engine_core.errors import TemplateError
from engine_core.template.source import select_templates

JSON = json.dumps({"chat_template": "from json"}).encode()


def test_source_without_any_template_is_none():
    assert select_templates({}) is None
    assert select_templates({}, {"bos_token": "<s>"}, {}) is None


def test_source_precedence_follows_the_order_of_files():
    tokenizer, processor = {"chat_template": "tokenizer"}, {"chat_template": "processor"}
    files = {"chat_template.json": JSON, "chat_template.jinja": b"file"}
    assert select_templates(files, tokenizer, processor).default == "processor"
    assert select_templates(files, tokenizer).default == "from json"
    del files["chat_template.json"]
    assert select_templates(files, tokenizer).default == "file"
    chosen = select_templates({}, tokenizer)
    assert (chosen.default, chosen.origin, chosen.tool_use) == (
        "tokenizer",
        "tokenizer_config.json",
        None,
    )


def test_source_tool_file_serves_beside_files_and_tokenizer_config_only():
    tool = {"chat_template_tool_use.jinja": b"tool"}
    assert select_templates({**tool, "chat_template.jinja": b"a"}).tool_use == "tool"
    assert select_templates(tool, {"chat_template": "a"}).tool_use == "tool"
    assert select_templates({**tool, "chat_template.json": JSON}).tool_use is None
    assert select_templates(tool, None, {"chat_template": "a"}).tool_use is None


def test_source_tool_file_overrides_the_named_tool_template():
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "named"}]
    assert select_templates({}, {"chat_template": named}).tool_use == "named"
    tool = {"chat_template_tool_use.jinja": b"file"}
    assert select_templates(tool, {"chat_template": named}).tool_use == "file"


@pytest.mark.parametrize("folder", ["additional_chat_templates", "chat_templates"])
def test_source_template_folder_holds_named_templates(folder):
    files = {f"{folder}/default.jinja": b"d", f"{folder}/tool_use.jinja": b"t"}
    chosen = select_templates(files)
    assert (chosen.default, chosen.tool_use) == ("d", "t")
    assert chosen.named == {"default": "d", "tool_use": "t"}


def test_source_named_list_without_default_needs_one_entry():
    only = [{"name": "chat", "template": "c"}]
    assert select_templates({}, {"chat_template": only}).default == "c"
    two = [*only, {"name": "rag", "template": "r"}]
    with pytest.raises(TemplateError, match="default"):
        select_templates({}, {"chat_template": two})


def test_source_special_tokens_are_texts_or_added_token_records():
    config = {"chat_template": "x", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    assert select_templates({}, config).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    config = {"chat_template": "x", "bos_token": None}
    assert select_templates({}, config).special_tokens == {}
    with pytest.raises(TemplateError, match="bos_token"):
        select_templates({}, {"chat_template": "x", "bos_token": 3})


MALFORMED = {
    "two_defaults": ({"chat_template.jinja": b"a", "chat_templates/default.jinja": b"b"}, {}),
    "two_tool_files": (
        {
            "chat_template.jinja": b"a",
            "chat_template_tool_use.jinja": b"b",
            "additional_chat_templates/tool_use.jinja": b"c",
        },
        {},
    ),
    "folder_and_json": ({"chat_template.json": JSON, "chat_templates/default.jinja": b"b"}, {}),
    "tool_only": ({"chat_template_tool_use.jinja": b"a"}, {}),
    "json_extra_key": ({"chat_template.json": b'{"chat_template": "a", "b": 1}'}, {}),
    "json_duplicate": ({"chat_template.json": b'{"chat_template": "a", "chat_template": "b"}'}, {}),
    "json_invalid": ({"chat_template.json": b"{"}, {}),
    "json_number": ({"chat_template.json": b'{"chat_template": 1}'}, {}),
    "not_utf8": ({"chat_template.jinja": b"\xff"}, {}),
    "too_large": ({"chat_template.jinja": b"x" * (256 * 1024 + 1)}, {}),
    "config_too_large": ({}, {"chat_template": "x" * (256 * 1024 + 1)}),
    "config_number": ({}, {"chat_template": 3}),
    "empty_list": ({}, {"chat_template": []}),
    "list_of_texts": ({}, {"chat_template": ["a"]}),
    "name_with_slash": ({}, {"chat_template": [{"name": "a/b", "template": "x"}]}),
    "name_too_long": ({}, {"chat_template": [{"name": "a" * 129, "template": "x"}]}),
    "name_empty": ({}, {"chat_template": [{"name": "", "template": "x"}]}),
    "name_twice": ({}, {"chat_template": [{"name": "default", "template": "x"}] * 2}),
    "too_many": (
        {},
        {"chat_template": [{"name": f"n{i}", "template": "x"} for i in range(33)]},
    ),
    "text_missing": ({}, {"chat_template": [{"name": "default", "template": None}]}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_source_malformed_is_a_typed_error(name):
    files, config = MALFORMED[name]
    with pytest.raises(TemplateError) as caught:
        select_templates(files, config)
    assert caught.value.code in {"template.source", "template.too_large"}
