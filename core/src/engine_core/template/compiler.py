"""Template source to Python code that charges a budget for every block and every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension

from engine_core.errors import TemplateError
from engine_core.template.budget import BYTES_PER_UNIT_SHIFT, MAX_INTEGER_BITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jinja2.parser import Parser

__all__ = ["BoundedCodeGenerator", "GenerationBlocks", "check_tree", "node_cost"]

MAX_NODES: Final = 65_536
MAX_TREE_DEPTH: Final = 150
_BLOCK_UNITS: Final = 1
_CONTAINER_UNITS: Final = 4

# A leaf costs nothing beside the node that uses it; a filter or test is a Python call.
_NODE_UNITS: Final[Mapping[type[nodes.Node], int]] = {
    nodes.Const: 0,
    nodes.Name: 0,
    nodes.NSRef: 0,
    nodes.Keyword: 0,
    nodes.Operand: 0,
    nodes.Pair: 0,
    nodes.TemplateData: 0,
    nodes.Filter: 4,
    nodes.Test: 2,
    nodes.Macro: 16,
    nodes.CallBlock: 16,
}

_BLOCK_FIELDS: Final = ("body", "else_")
_ALLOWED: Final = frozenset(
    {
        nodes.Add, nodes.And, nodes.Assign, nodes.AssignBlock, nodes.Break, nodes.Call,
        nodes.CallBlock, nodes.Compare, nodes.Concat, nodes.CondExpr, nodes.Const, nodes.Continue,
        nodes.Dict, nodes.Div, nodes.ExprStmt, nodes.Filter, nodes.FilterBlock, nodes.FloorDiv,
        nodes.For, nodes.Getattr, nodes.Getitem, nodes.If, nodes.Keyword, nodes.List, nodes.Macro,
        nodes.Mod, nodes.Mul, nodes.NSRef, nodes.Name, nodes.Neg, nodes.Not, nodes.Operand,
        nodes.Or, nodes.Output, nodes.Pair, nodes.Pos, nodes.Pow, nodes.Scope, nodes.Slice,
        nodes.Sub, nodes.Template, nodes.TemplateData, nodes.Test, nodes.Tuple, nodes.With,
    }
)  # fmt: skip


class GenerationBlocks(Extension):
    """``{% generation %}`` marks what a trainer scores; rendering passes its body through."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse one block.

        Args:
            parser: Stands on the tag.

        Returns:
            The body in a scope of its own, as the training tag has it.
        """
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def check_tree(tree: nodes.Template) -> None:
    """Refuse a tree that is too large, too deep or uses what no chat template needs.

    Args:
        tree: The parsed template.

    Raises:
        SecurityError: A statement that reaches beyond this one template.
        TemplateError: Size, depth or an integer literal is out of bounds.
    """
    count = 0
    stack: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        count += 1
        if type(node) not in _ALLOWED:
            msg = f"the statement {type(node).__name__.lower()} is not allowed"
            raise SecurityError(msg)
        if count > MAX_NODES:
            _refuse_size(f"have at most {MAX_NODES} syntax nodes")
        if depth > MAX_TREE_DEPTH:
            _refuse_size(f"nest at most {MAX_TREE_DEPTH} levels", code="template.nesting")
        literal = node.value if isinstance(node, nodes.Const) else None
        if type(literal) is int and literal.bit_length() > MAX_INTEGER_BITS:
            _refuse_size(f"have integers of at most {MAX_INTEGER_BITS} bits")
        stack.extend((child, depth + 1) for child in node.iter_child_nodes())


def _refuse_size(rule: str, code: str = "template.too_large") -> None:
    raise TemplateError(f"chat template: its source must {rule}, got more", code=code)


def node_cost(roots: Iterable[nodes.Node]) -> int:
    """Count the units that running some nodes once costs, blocks inside them excluded.

    Args:
        roots: Statements or expressions.

    Returns:
        Work units: one a node that does something, more for what makes an object, and the bytes
        of literal text.
    """
    units = 0
    stack = list(roots)
    while stack:
        node = stack.pop()
        units += _NODE_UNITS.get(type(node), 1)
        exclude: tuple[str, ...] = _BLOCK_FIELDS
        if isinstance(node, nodes.TemplateData):
            units += 4 * len(node.data) >> BYTES_PER_UNIT_SHIFT
        elif isinstance(node, (nodes.Macro, nodes.CallBlock)):
            exclude = (*exclude, "defaults")
        elif isinstance(node, nodes.For):
            exclude = (*exclude, "test")
        elif isinstance(node, nodes.If):
            exclude = (*exclude, "elif_")
        elif isinstance(node, (nodes.List, nodes.Dict, nodes.Tuple)):
            units += _CONTAINER_UNITS + len(node.items)
        stack.extend(node.iter_child_nodes(exclude=exclude))
    return units


class BoundedCodeGenerator(CodeGenerator):
    """Jinja's code generator with every operation routed through the environment.

    Constant expressions are not folded: folding would run them outside any budget.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start a generator; the arguments are Jinja's."""
        super().__init__(*args, **kwargs)
        self._wrapped: dict[int, str] = {}
        self._pending_units = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Write one node, inside a checking call where one was asked for."""
        opening = self._wrapped.pop(id(node), None)
        if opening is None:
            return super().visit(node, *args, **kwargs)
        self.write(f"{opening}(")
        super().visit(node, *args, **kwargs)
        self.write(")")
        return None

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Write a block that first pays for its own nodes."""
        nodes = list(nodes)
        units = node_cost(nodes) + self._pending_units + _BLOCK_UNITS
        self._pending_units = 0
        self.writeline(f"environment.spend({units})")
        super().blockvisit(nodes, frame)

    def macro_body(
        self, node: nodes.Macro | nodes.CallBlock, frame: Frame
    ) -> tuple[Frame, MacroRef]:
        """Write a macro whose body also pays for its defaults."""
        self._pending_units = node_cost(node.defaults) + len(node.args)
        return super().macro_body(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        """Write a loop over a checked iterable; its condition pays per item."""
        self._wrapped[id(node.iter)] = "environment.iterate"
        if node.test is not None:
            units = node_cost([node.test]) + _BLOCK_UNITS
            self._wrapped[id(node.test)] = f"environment.spend({units}) or "
        super().visit_For(node, frame)

    def visit_If(self, node: nodes.If, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        """Write a conditional whose later conditions pay when they are reached."""
        for branch in node.elif_:
            units = node_cost([branch.test]) + _BLOCK_UNITS
            self._wrapped[id(branch.test)] = f"environment.spend({units}) or "
        super().visit_If(node, frame)

    def signature(
        self,
        node: nodes.Call | nodes.Filter | nodes.Test,
        frame: Frame,
        extra_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Write call arguments; spread ones are checked."""
        if node.dyn_args is not None:
            self._wrapped[id(node.dyn_args)] = "environment.spread"
        if node.dyn_kwargs is not None:
            self._wrapped[id(node.dyn_kwargs)] = "environment.spread_mapping"
        super().signature(node, frame, extra_kwargs)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, *_: object) -> None:
        self.write("environment.text(")

    def _output_child_post(self, *_: object) -> None:
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        """Write a comparison, or a chain of them, as one charged call."""
        self.write(f"environment.compare{'_chain' if len(node.ops) > 1 else ''}(")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f", {operand.op!r}, ")
            self.visit(operand.expr, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        """Write ``~`` as one charged call."""
        self.write("environment.join_text((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        """Write a mapping literal with checked keys."""
        self.write("{")
        for pair in node.items:
            self.write("environment.key(")
            self.visit(pair.key, frame)
            self.write("): ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        """Write an item lookup or, as one charged call, a slice."""
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.slice(")
        self.visit(node.node, frame)
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            if bound is None:
                self.write("None")
            else:
                self.visit(bound, frame)
        self.write(")")
