"""The bounded engine renders what Jinja's own sandbox, set up as transformers does, renders."""

# ruff: noqa: E501 - template lines

import datetime
import json
from pathlib import Path

import jinja2
import pytest
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_core.errors import TemplateError
from engine_core.template.environment import CompiledTemplate

CLOCK = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
PUBLISHED = sorted(SHARED.glob("*.jinja")) if SHARED.is_dir() else []

# Written for these tests; they use the same constructs as published templates.
OWN = {
    "chatml": """
{%- for message in messages %}
  {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>\\n' }}
  {%- if message.tool_calls is defined and message.tool_calls %}
    {%- for call in message.tool_calls %}
      {{- call.function.name ~ ':' ~ (call.function.arguments | tojson) }}
    {%- endfor %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "scan": """
{%- set ns = namespace(last=messages | length - 1, seen=[]) -%}
{%- for message in messages[::-1] if message.role != 'system' -%}
  {%- set index = messages | length - loop.index -%}
  {%- if loop.first and message.role == 'user' -%}{%- set ns.last = index -%}{%- endif -%}
  {%- set ns.seen = ns.seen + [message.role[:2]] -%}
{%- else -%}nothing{%- endfor -%}
{{ ns.last }}/{{ ns.seen }}/{{ ns.seen | join(',') }}/{{ ns.missing is defined }}
""",
    "macros": """
{% macro show(value, depth=0) %}
  {% if value is mapping %}
    {% for key, entry in value | dictsort %}
      {{ '  ' * depth }}{{ key }}={{ show(entry, depth + 1) }}
    {% endfor %}
  {% elif value is sequence and value is not string %}
    {% for entry in value %}{{ show(entry, depth=depth + 1) }}{{ ',' if not loop.last }}{% endfor %}
  {% elif value is none %}null{% elif value is boolean %}{{ value | lower }}
  {% else %}{{ value }}{% endif %}
{% endmacro %}
{% macro box() %}[{{ caller('in') }}]{% endmacro %}
{{ show(tools) if tools }}
{% call(word) box() %}{{ word | upper }}{{ varargs }}{% endcall %}
""",
    "blocks": """
{% set text %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}
{% filter upper %}{{ text | trim }}{% endfilter %}
{% with first = messages | first, last = messages | last %}{{ first.role }}-{{ last.role }}{% endwith %}
{% generation %}{% set inner = 1 %}{{ inner }}{% endgeneration %}{{ inner is defined }}
{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}
{{- i }}{% endfor %}{% raw %}{{ raw }}{% endraw %}
{% for group in [[1, [2]], []] recursive %}<{{ loop.depth }}{{ loop(group) if group is iterable }}>{% endfor %}
""",
    "values": """
{{ 1 + 2 * 3 - 4 / 5 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ -3 }} {{ +3 }} {{ not 1 }}
{{ 1 < 2 <= 2 < 3 }} {{ 'a' in 'cat' }} {{ 3 not in [1, 2] }} {{ {'a': 1} == {'a': 1.0} }}
{{ 'x' if messages else 'y' }} {{ 'x' if not messages }} {{ missing or 'fallback' }}
{{ [1, 'two', none, true, 1.5, {'k': [1]}] }} {{ (1, 2) }} {{ {'k': 'v'} }} {{ none }} {{ true }}
{{ 'abc'[1] }} {{ 'abc'[-1] }} {{ 'abcdef'[1:5:2] }} {{ [1, 2, 3][:-1] }} {{ 'abc'[9] }}
{{ 'a' ~ 1 ~ none ~ [1] }} {{ 'ab' * 3 }} {{ [1] * 2 + [3] }} {{ messages[0]['nope'] is defined }}
{{ '%s is %05.1f and %-4d|' % ('x', 2.25, 7) }} {{ '%(a)s' % {'a': 1} }} {{ '{} {x:>4}'.format(1, x=2) }}
{{ range(3) | list }} {{ dict(a=1, b=2) }} {{ dict({'z': 1}, y=2) }} {{ strftime_now('%d %b %Y') }}
""",
    "filters": """
{{ ' a b ' | trim }}|{{ 'xxaxx' | trim('x') }}|{{ 'hello wOrld-x' | title }}|{{ 'aB' | capitalize }}
{{ [3, 1, 2] | sort }}{{ ['b', 'A', 'c'] | sort }}{{ ['b', 'A'] | sort(case_sensitive=true, reverse=true) }}
{{ [{'n': 2}, {'n': 1}] | sort(attribute='n') }}{{ [{'n': 2}, {'n': 1}] | map(attribute='n') | list }}
{{ ['a', 'b'] | map('upper') | join('-') }}{{ [1, 2, 3, 4] | select('odd') | list }}{{ [1, 0] | reject | list }}
{{ [{'a': 1}, {'b': 2}] | selectattr('a', 'defined') | list }}{{ [{'a': 1}, {'a': 2}] | rejectattr('a', 'eq', 1) | list }}
{{ 'a,b,,c'.split(',') }}{{ ' a  b '.split() }}{{ 'a-b-c'.rsplit('-', 1) }}{{ 'a\\nb'.splitlines() }}{{ 'a=b'.partition('=') }}
{{ 'aXbX' | replace('X', 'y') }}{{ 'aXbX' | replace('X', 'y', 1) }}{{ 'aXb'.replace('X', '') }}
{{ {'a': 1, 'b': [1, 2]} | tojson }}{{ {'b': 'é<>&', 'a': '"'} | tojson(sort_keys=true, ensure_ascii=true) }}
{{ [1, {'a': []}] | tojson(indent=2) }}{{ [1, 2] | tojson(separators=(',', ':')) }}
{{ 'one two three four' | truncate(9) }}|{{ 'one two three' | truncate(8, true, '!', 0) }}|{{ 'a b c d' | wordwrap(3) }}
{{ 'a\\n\\nb' | indent(2) }}|{{ 'a\\n\\nb' | indent('>', true, true) }}|{{ 'ab' | center(6) }}|{{ 'a b c' | wordcount }}
{{ '42' | int + 1 }}{{ 'x' | int(7) }}{{ '4.5' | float }}{{ '1f' | int(0, 16) }}{{ -4 | abs }}{{ 2.567 | round(1) }}{{ 2.1 | round(0, 'ceil') }}
{{ [1, 2, 3] | sum }}{{ [4, 9, 2] | max }}{{ [] | max is defined }}{{ ['b', 'A'] | min }}{{ [1, 1, 2] | unique | list }}
{{ 'abc' | list }}{{ {'x': 1} | list }}{{ [1, 2] | reverse | list }}{{ 'abc' | reverse }}{{ {'x': 1} | items | list }}{{ missing | items | list }}
{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}{{ [1, 2, 3, 4, 5] | slice(3, 0) | list }}{{ '<a href="x">\\'&' | e }}
{{ none | map(attribute='x') | list }}{{ none | selectattr('x') | list }}{{ [range(2)] }}
{{ missing | default('d') }}{{ '' | default('d', true) }}{{ 'abc' | first }}{{ [1, 2] | last }}{{ 'x' | string }}{{ '<' | safe }}
{{ '%s-%s' | format(1, 'b') }}{{ {'b': 1, 'A': 2} | dictsort }}{{ {'b': 1, 'A': 2} | dictsort(by='value', reverse=true) }}
""",
    "methods": """
{{ 'abc'.upper() }}{{ 'aBc'.lower() }}{{ 'ab'.startswith('a') }}{{ 'ab'.endswith(('x', 'b')) }}{{ ' x '.strip() }}|{{ 'xay'.strip('xy') }}
{{ 'xa'.lstrip('x') }}{{ 'ax'.rstrip('x') }}{{ 'abcabc'.find('c') }}{{ 'abcabc'.rfind('c', 0, 5) }}{{ 'aXa'.count('a') }}{{ 'ab'.index('b') }}
{{ '7'.zfill(3) }}{{ 'a'.ljust(3, '.') }}{{ 'a'.rjust(3) }}{{ 'a'.center(3) }}{{ 'a b'.title() }}{{ 'aB'.swapcase() }}{{ 'prefix'.removeprefix('pre') }}
{{ '12'.isdigit() }}{{ 'ab'.isalpha() }}{{ ' '.isspace() }}{{ ','.join(['a', 'b']) }}{{ 'a\\tb'.expandtabs(4) }}{{ 'x'.isupper() }}
{{ {'a': 1}.get(missing, 'k') }}{{ {'a': 1}[missing] is defined }}{{ {'a': 1}.get('a') }}{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.items() | list }}{{ {'a': 1}.keys() | list }}{{ {'a': 1}.values() | list }}
{% for key, value in {'a': {'items': 3}}.items() %}{{ key }}{{ value['items'] }}{% endfor %}{{ [1, 2, 1].count(1) }}{{ [5, 6].index(6) }}
{% for x in 'abc' %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.length }}{{ loop.cycle('o', 'e') }}{{ loop.changed(x) }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}
""",
    "tests": """
{{ 1 is number }}{{ 1 is integer }}{{ true is integer }}{{ 1.0 is float }}{{ 'a' is string }}{{ [] is sequence }}{{ {} is mapping }}
{{ {} is iterable }}{{ 1 is iterable }}{{ none is none }}{{ false is false }}{{ 1 is true }}{{ 4 is even }}{{ 4 is divisibleby(2) }}
{{ 'a' is lower }}{{ 'A' is upper }}{{ 1 is sameas(1) }}{{ 1 is in([1]) }}{{ 1 is eq(1) }}{{ 1 is gt(2) }}{{ missing is undefined }}
{{ missing is sequence }}{{ missing is iterable }}{{ missing is mapping }}{{ range is callable }}{{ 'trim' is filter }}{{ 'odd' is test }}
""",
}


class Generation(Extension):
    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller):
        return caller()


def oracle(source):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = CLOCK.strftime
    return environment.from_string(source)


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def assistant(content, **extra):
    return {"role": "assistant", "content": content, **extra}


def call(identity, arguments, name="get_weather"):
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def result(identity, content):
    return {"role": "tool", "tool_call_id": identity, "name": "get_weather", "content": content}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Look "up" <weather> é',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City", "enum": ["a", "b"]},
                    "options": {
                        "type": "object",
                        "properties": {
                            "x": {"type": ["array", "null"], "items": {"type": "number"}}
                        },
                    },
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Time",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
DEEP = {"city": "Oslo", "n": None, "b": True, "o": {"x": [1, 2.5, "é<"]}}
CONVERSATIONS = {
    "user": [user("Hi <b> ünï\n日本")],
    "system": [system("  Be nice\n"), user("Hi")],
    "turns": [
        system("s"),
        user("a"),
        assistant("<think>\nhm\n</think>\n\nb"),
        user(" c "),
        assistant("d", reasoning_content="r"),
        user("e"),
    ],
    "tool": [
        user("w?"),
        assistant("", tool_calls=[call("c1", DEEP)], reasoning_content="think"),
        result("c1", "sunny"),
    ],
    "tools": [
        system("s"),
        user("w?"),
        assistant("p", tool_calls=[call("c1", {"city": "Oslo"}), call("c2", {}, "now")]),
        result("c1", "sunny"),
        result("c2", '{"t": 1}'),
        assistant("done"),
        user("ok"),
    ],
    "text_arguments": [
        user("w?"),
        assistant("", tool_calls=[call("c1", '{"city": "Oslo"}')]),
        result("c1", "sunny"),
    ],
    "null_content": [
        user("w?"),
        assistant(None, tool_calls=[call("c1", {"city": "Oslo"})]),
        result("c1", "sunny"),
    ],
    "parts": [user([{"type": "text", "text": "hey"}, {"type": "image"}])],
    "translation": [
        user(
            [
                {
                    "type": "text",
                    "source_lang_code": "en",
                    "target_lang_code": "de-DE",
                    "text": "Hello",
                }
            ]
        )
    ],
}


def variable_sets():
    for messages in CONVERSATIONS.values():
        for tools in (None, TOOLS):
            for thinking in (None, True, False):
                variables = {
                    "messages": messages,
                    "add_generation_prompt": thinking is not True,
                    "bos_token": "<bos>",
                    "eos_token": "<eos>",
                }
                if tools:
                    variables["tools"] = tools
                if thinking is not None:
                    variables["enable_thinking"] = thinking
                yield variables


def outcome(render):
    """The text, or that rendering failed in whatever way."""
    try:
        return render()
    except (
        jinja2.exceptions.TemplateError,
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ):
        return None


def assert_same_renders(source, *, must_render):
    reference, template = oracle(source), CompiledTemplate.compile(source)
    rendered = 0
    for variables in variable_sets():
        units = 2_000_000 + len(variables["messages"]) ** 2
        expected = outcome(lambda v=variables: reference.render(**v))
        got = outcome(lambda v=variables, u=units: template.render(v, units=u, clock=CLOCK))
        assert got == expected
        rendered += got is not None
    assert rendered >= must_render


@pytest.mark.parametrize("name", OWN)
def test_template_own_text_renders_as_plain_jinja(name):
    assert_same_renders(OWN[name], must_render=40)


def test_template_published_texts_render_as_plain_jinja():
    for path in PUBLISHED:
        assert_same_renders(path.read_text(encoding="utf-8"), must_render=6)


def test_template_thousand_messages_fit_the_budget():
    messages = [system("s")]
    for index in range(249):
        identity = f"c{index}"
        messages += [
            user("words " * 300),
            assistant("", tool_calls=[call(identity, DEEP)], reasoning_content="think " * 50),
            result(identity, "words " * 300),
            assistant("words " * 100),
        ]
    messages.append(user("end"))
    variables = {"messages": messages, "tools": TOOLS, "add_generation_prompt": True}
    sources = [OWN["chatml"], *(path.read_text(encoding="utf-8") for path in PUBLISHED[::3])]
    for source in sources:
        template = CompiledTemplate.compile(source)
        try:
            text = template.render(variables, units=2_000_000 + len(messages) ** 2, clock=CLOCK)
        except TemplateError as exc:
            assert exc.code in {"template.refused", "template.failed"}  # noqa: PT017
        else:
            assert len(text) > 100_000


def test_template_clock_is_frozen_within_one_render():
    template = CompiledTemplate.compile("{{ strftime_now('%H:%M:%S') }} {{ strftime_now('%%%q') }}")
    assert template.render({}, units=1000, clock=CLOCK) == "03:04:05 %q"


def test_template_raise_exception_carries_the_message():
    template = CompiledTemplate.compile("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate") as caught:
        template.render({}, units=1000, clock=CLOCK)
    assert caught.value.code == "template.refused"
    assert caught.value.__cause__ is not None


def test_template_one_compiled_template_keeps_no_state_between_renders():
    template = CompiledTemplate.compile(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}"
    )
    for count in (3, 1, 2):
        variables = {"messages": [user("x")] * count}
        assert template.render(variables, units=1000, clock=CLOCK) == str(count)


def test_template_input_is_not_changed_by_a_render():
    variables = {"messages": [user("x")]}
    template = CompiledTemplate.compile("{{ messages[0].setdefault('a', 1) }}")
    with pytest.raises(TemplateError):
        template.render(variables, units=1000, clock=CLOCK)
    assert variables == {"messages": [user("x")]}


def test_template_budget_is_the_same_for_every_render():
    template = CompiledTemplate.compile("{% for a in range(20) %}x{% endfor %}")
    for _ in range(3):
        assert template.render({}, units=60, clock=CLOCK) == "x" * 20
        with pytest.raises(TemplateError) as caught:
            template.render({}, units=30, clock=CLOCK)
        assert caught.value.code == "template.budget"
