"""Every way to make a template cost too much ends in a typed error while it renders.

All bombs run in one child process, which reports each one's error code, processor time and the
growth of the process's peak memory.
"""

import json
import subprocess  # noqa: TID251 - time and memory of a bomb are those of its own process
import sys

import pytest

TWICE = "{% for a in range(100000) %}{% for b in range(100000) %}"
END = "{% endfor %}{% endfor %}"
GROW = "{% set ns = namespace(x=[]) %}" + TWICE
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
NEST = "{% set ns = namespace(x=[], y=[]) %}{% for i in range(60) %}"

BUDGET = {
    "nested_loops": TWICE + END,
    "loop_output": TWICE + "some text" + END,
    "loop_variable": TWICE + "{{ loop.index }}{{ loop.last }}" + END,
    "loop_condition": "{% for a in range(100000) if a < 0 %}{% endfor %}" * 100,
    "repetition": "{{ 'x' * 100000000 }}",
    "repetition_reversed": "{{ 1000000000000 * 'x' }}",
    "repetition_of_list": "{{ ([1] * 100000000)|length }}",
    "repetition_huge_count": "{{ 'x' * 10**30 }}",
    "doubling_plus": DOUBLE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling_tilde": DOUBLE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling_join": DOUBLE + "{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    "doubling_method_join": DOUBLE + "{% set ns.x = ','.join([ns.x, ns.x]) %}{% endfor %}",
    "doubling_replace": DOUBLE + "{% set ns.x = ns.x|replace('a', ns.x) %}{% endfor %}",
    "doubling_replace_method": DOUBLE + "{% set ns.x = ns.x.replace('', ns.x) %}{% endfor %}",
    "doubling_percent": DOUBLE + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubling_percent_names": DOUBLE
    + "{% set ns.x = '%(a)s%(a)s%(a)s' % {'a': ns.x} %}{% endfor %}",
    "doubling_format_method": DOUBLE + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "doubling_format_filter": DOUBLE + "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}{% endfor %}",
    "doubling_set_block": DOUBLE + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "doubling_list": NEST + "{% set ns.x = ns.x + ns.x + [1] %}{% endfor %}",
    "doubling_shared_text": NEST + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling_shared_json": NEST + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "doubling_shared_equal": NEST
    + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "doubling_shared_in": NEST
    + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x in [ns.y] }}",
    "doubling_shared_sort": NEST
    + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
    + "{{ [ns.x, ns.y]|sort }}",
    "pad_center_filter": "{{ 'x'|center(300000000) }}",
    "pad_center": "{{ 'x'.center(300000000) }}",
    "pad_ljust": "{{ 'x'.ljust(300000000) }}",
    "pad_rjust": "{{ 'x'.rjust(300000000) }}",
    "pad_zfill": "{{ 'x'.zfill(300000000) }}",
    "expand_tabs": "{{ ('\\t' * 1000).expandtabs(1000000) }}",
    "indent": "{{ ('a\\n' * 100000)|indent(100000) }}",
    "indent_text": "{{ 'a\\nb'|indent('x' * 40000000) }}",
    "wordwrap": "{{ ('ab ' * 1000000)|wordwrap(2) }}",
    "wordwrap_string": "{{ ('ab ' * 10000)|wordwrap(2, True, 'x' * 100000) }}",
    "truncate_loop": "{% set s = 'ab ' * 1000000 %}" + TWICE + "{{ s|truncate(9) }}" + END,
    "split": "{{ ('a ' * 20000000).split() }}",
    "split_separator": "{{ ('a,' * 20000000).split(',')|length }}",
    "splitlines": "{{ ('a\\n' * 20000000).splitlines()|length }}",
    "list_of_text": "{{ ('日' * 10000000)|list|length }}",
    "spread_text": "{{ 'x'.join(*('日' * 10000000)) }}",
    "batch": "{{ [1]|batch(1000000000, 0) }}",
    "slice_filter": "{{ [1]|slice(1000000000, 0) }}",
    "slicing": "{% set s = 'x' * 10000000 %}" + TWICE + "{% set y = s[1:] %}" + END,
    "reverse": "{% set s = 'x' * 10000000 %}" + TWICE + "{% set y = s|reverse %}" + END,
    "upper": "{% set s = 'ß' * 4000000 %}" + TWICE + "{% set y = s|upper %}" + END,
    "strip": "{{ ('a' * 10000000).strip('b' * 100000 ~ 'a') }}",
    "substring": "{% set s = 'a' * 20000 %}" + TWICE + "{{ ('a'*40 ~ 'b' ~ 'a'*40) in s }}" + END,
    "namespace_growth": GROW + "{% set ns.x = [ns.x, {}, {'a': {}}] %}" + END,
    "namespace_objects": GROW + "{% set ns.x = [ns.x, namespace(), namespace(a=1)] %}" + END,
    "namespace_macros": GROW + "{% macro f() %}{% endmacro %}{% set ns.x = [ns.x, f] %}" + END,
    "list_literals": TWICE + "{% set x = [[], [[], []], {}, (1, 2)] %}" + END,
    "macro_calls": "{% macro f(a=1) %}{{ a }}{% endmacro %}" + TWICE + "{{ f() }}" + END,
    "call_blocks": "{% macro f() %}{{ caller() }}{% endmacro %}"
    + TWICE
    + "{% call f() %}x{% endcall %}"
    + END,
    "set_blocks": TWICE + "{% set x %}abc{% endset %}" + END,
    "filter_blocks": TWICE + "{% filter upper %}abc{% endfilter %}" + END,
    "integer_text": "{% set n = 7 ** 1400 %}" + TWICE + "{% set x = n|string %}" + END,
    "integer_product": "{% set n = 7 ** 700 %}" + TWICE + "{% set x = n * n %}" + END,
    "integer_power": "{{ 10**(10**8) }}",
    "integer_squares": "{% set ns = namespace(x=7) %}{% for i in range(40) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "integer_from_text": "{{ ('f' * 1000000)|int(0, 16) }}",
    "format_width": "{{ '%1000000000d' % 1 }}",
    "format_precision": "{{ '%.1000000000f' % 1 }}",
    "format_star": "{{ '%*d' % (1000000000, 1) }}",
    "format_filter_width": "{{ '%1000000000d'|format(1) }}",
    "format_method_width": "{{ '{:1000000000}'.format(1) }}",
    "format_many_fields": "{{ ('%4000d' * 2000) % 1 }}",
    "json_indent_growth": "{{ ([[1]] * 400000)|tojson(indent=4) }}",
    "json_escapes": "{{ ('\\x01' * 20000000)|tojson }}",
    "dates": TWICE + "{{ strftime_now('%d %b %Y') }}" + END,
    "sorting": TWICE + "{% set x = [3, 2, 1]|sort %}" + END,
    "mapping": TWICE + "{% set x = [3, 2, 1]|map('string')|list %}" + END,
    "macro_recursion_growing": "{% macro f(s) %}{{ f(s ~ s) }}{% endmacro %}{{ f('x') }}",
    "undefined_values": TWICE + "{% set x = [messages[0].a, messages[0].b] %}" + END,
}
NESTING = {
    "macro_recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loop_recursion": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "deep_parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep_lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep_not": "{{ " + "not " * 20000 + "1 }}",
    "long_sum": "{{ 1" + "+1" * 20000 + " }}",
    "deep_values": GROW + "{% set ns.x = [ns.x] %}{{ ns.x if b == 500 }}" + END,
    "deep_json": GROW + "{% set ns.x = {'a': ns.x} %}{{ ns.x|tojson if b == 500 }}" + END,
}
FORBIDDEN = {
    "class": "{{ messages.__class__ }}",
    "class_item": "{{ messages['__class__'] }}",
    "class_of_text": "{{ ''.__class__.__mro__ }}",
    "class_of_macro": "{% macro f() %}{% endmacro %}{{ f.__class__ }}",
    "class_of_namespace": "{{ namespace().__class__ }}",
    "class_of_loop": "{% for a in [1] %}{{ loop.__class__ }}{% endfor %}",
    "class_of_method": "{{ ''.join.__self__ }}",
    "class_of_undefined_item": "{{ messages[0]['__init__'] }}",
    "globals_of_function": "{{ range.__globals__ }}",
    "class_in_format": "{{ '{0.__class__}'.format(1) }}",
    "class_in_map": "{{ [1]|map(attribute='__class__')|list }}",
    "loop_internals": "{% for a in [1] %}{{ loop._iterator }}{% endfor %}",
    "include": "{% include 'x' %}",
    "import": "{% import 'x' as y %}",
    "from_import": "{% from 'x' import y %}",
    "extends": "{% extends 'x' %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "autoescape": "{% autoescape true %}{% endautoescape %}",
    "key_tuple": "{{ {(1, (2, 3)): 4} }}",
}
FAILED = {
    "exception_in_macro": "{% macro f() %}{{ 1 // 0 }}{% endmacro %}{{ f() }}",
    "exception_of_undefined": "{{ missing.attribute.other }}",
    "changing_a_list": "{{ messages.append(1) }}",
    "changing_a_dict": "{{ messages[0].update({}) }}",
    "range_too_long": "{{ range(10**9)|list }}",
    "range_of_loops": "{% for a in range(100001) %}{% endfor %}",
    "float_overflow": "{{ 2.0 ** 100000 }}",
    "complex_number": "{{ (-8) ** 0.5 }}",
    "printed_object": "{{ range }}",
    "printed_namespace": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}",
    "unknown_filter": "{% if true %}{{ 1|attr('__class__') }}{% endif %}",
    "lone_surrogate": "{{ '\\ud800' }}",
}
REFUSED = {
    "raise_exception": "{{ raise_exception('no') }}",
    "raise_exception_in_macro": "{% macro f() %}{{ raise_exception('no') }}{% endmacro %}{{ f() }}",
}
SYNTAX = {
    "unclosed": "{% for a in b %}",
    "unknown_tag": "{% do messages %}",
    "unknown_filter_at_once": "{{ 1|urlize }}",
    "too_many_blocks": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "long_integer": "{{ " + "9" * 5000 + " }}",
}
TOO_LARGE = {
    "source": "x" * (256 * 1024 + 1),
    "output": "{% set s = 'x' * 9000000 %}{{ s }}{{ s }}",
    "integer_literal": "{{ " + "9" * 2000 + " }}",
    "nodes": "{{a.b}}" * 36000,
}
BOMBS = {
    f"{name}": (source, code)
    for group, code in (
        (BUDGET, "template.budget"),
        (NESTING, "template.nesting"),
        (FORBIDDEN, "template.forbidden"),
        (FAILED, "template.failed"),
        (REFUSED, "template.refused"),
        (SYNTAX, "template.syntax"),
        (TOO_LARGE, "template.too_large"),
    )
    for name, source in group.items()
}
# Processor time of a bomb over that of parsing a plain template of 4,000 expressions, which takes
# 0.13 to 0.3 s: machines differ, and one machine with its load.
MAX_COST = 16
MAX_BYTES = 256 * 2**20

CHILD = """
import json, resource, sys, time
import jinja2
from datetime import datetime, timezone
from engine_core.errors import TemplateError
from engine_core.template.environment import CompiledTemplate

unit = 1 if sys.platform == "darwin" else 1024
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

def parse_plain():
    start = time.process_time()
    jinja2.Environment().parse("{{ a.b }}" * 4000)
    return time.process_time() - start

yardstick = min(parse_plain() for _ in range(3))
base = peak()
variables = {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": True}
for name, source in json.load(sys.stdin).items():
    start = time.process_time()
    try:
        template = CompiledTemplate.compile(source)
        template.render(variables, units=2_000_001, clock=datetime.now(timezone.utc))
        code = "rendered"
    except TemplateError as exc:
        code = exc.code
    spent = time.process_time() - start
    print(json.dumps([name, code, spent / yardstick, peak() - base]), flush=True)
"""


@pytest.fixture(scope="module")
def reports():
    child = subprocess.run(  # noqa: S603
        [sys.executable, "-c", CHILD],
        input=json.dumps({name: source for name, (source, _) in BOMBS.items()}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    rows = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, child.stderr[-2000:]
    return {name: (code, cost, growth) for name, code, cost, growth in rows}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_any_kind_is_a_cheap_typed_error(reports, name):
    code, cost, growth = reports[name]
    assert code == BOMBS[name][1]
    assert cost < MAX_COST
    assert growth < MAX_BYTES
