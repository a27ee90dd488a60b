"""First-order mutants of an answer: one node of its syntax tree changed, as a slip of the pen changes it."""

import ast
import itertools
from collections.abc import Iterator
from copy import deepcopy

from tests.course.attack.cells import Candidate, Cell, unique

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
SYMMETRIC = ("max", "min", "maximum", "minimum", "allclose", "equal", "isclose", "logaddexp")
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Assert, ast.Delete, ast.If, ast.For, ast.While)


def mutants(cell: Cell) -> list[Candidate]:
    """All of a cell, each once, in the order of its tree."""
    return unique(_all(cell))


def _all(cell: Cell) -> Iterator[Candidate | None]:
    for number, node in cell.nodes():
        for new in replacements(node):
            yield cell.replaced("mutant", number, new)


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    if isinstance(node, ast.stmt):
        yield from _statement(node)
    elif isinstance(node, ast.Constant):
        yield from map(ast.Constant, _constants(node.value))
    elif isinstance(node, ast.Compare):
        yield from _comparison(node)
    elif isinstance(node, ast.BinOp):
        yield from _operation(node)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        yield from node.values
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse, ast.IfExp(node.test, node.orelse, node.body))
    elif isinstance(node, ast.Subscript):
        yield from _index(node)
    elif isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Load):
        yield from _changed(node, elts=_swaps(node.elts))
    elif isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
        yield from _comprehension(node)


def _statement(node: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, DROPPED):
        yield ast.Pass()
    if isinstance(node, (ast.If, ast.While)):
        yield from _changed(node, test=[ast.UnaryOp(ast.Not(), node.test)])
    if isinstance(node, ast.With):
        yield ast.If(ast.Constant(True), node.body, [])
    if isinstance(node, ast.For):
        listed = ast.Call(ast.Name("list", ast.Load()), [node.iter], [])
        if not (isinstance(node.target, ast.Name) and node.target.id.startswith("_")):
            yield from _changed(node, iter=[ast.Call(ast.Name("reversed", ast.Load()), [listed], [])])
        yield from _changed(node, iter=[ast.Subscript(listed, ast.Slice(lower=ast.Constant(1)), ast.Load())])
        yield from _changed(node, iter=[ast.Subscript(listed, ast.Slice(upper=ast.Constant(-1)), ast.Load())])
    if isinstance(node, ast.AugAssign):
        target = deepcopy(node.target)
        yield ast.Assign([target], node.value, lineno=0)
        if type(node.op) in OPERATORS:
            yield from _changed(node, op=[OPERATORS[type(node.op)]()])
    if isinstance(node, ast.Break):
        yield ast.Continue()
    if isinstance(node, ast.Continue):
        yield ast.Break()
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield ast.Raise(ast.Call(ast.Name("LookupError", ast.Load()), node.exc.args, []))


def _constants(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1)
    elif isinstance(value, float):
        yield from (value * 2, value + 1, 0.0)


def _comparison(node: ast.Compare) -> Iterator[ast.AST]:
    for place, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            yield from _changed(node, ops=[[*node.ops[:place], other(), *node.ops[place + 1 :]]])


def _operation(node: ast.BinOp) -> Iterator[ast.AST]:
    if type(node.op) in OPERATORS:
        yield from _changed(node, op=[OPERATORS[type(node.op)]()])
    yield from (node.left, node.right)
    if not isinstance(node.op, (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr)):
        yield ast.BinOp(node.right, node.op, node.left)


def _call(node: ast.Call) -> Iterator[ast.AST]:
    if ast.unparse(node.func).split(".")[-1] not in SYMMETRIC:
        yield from _changed(node, args=_swaps(node.args))
    if isinstance(node.func, ast.Attribute) and not (
        isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "F", "math", "tl", "nn", "os")
    ):
        yield node.func.value
    elif node.args and not isinstance(node.args[0], ast.Starred):
        yield node.args[0]
    for place in range(len(node.keywords)):
        yield from _changed(node, keywords=[[*node.keywords[:place], *node.keywords[place + 1 :]]])


def _index(node: ast.Subscript) -> Iterator[ast.AST]:
    if isinstance(node.slice, ast.Slice):
        for name in ("lower", "upper"):
            bound = getattr(node.slice, name)
            if bound is not None:
                for other in (None, _plus(bound, ast.Add()), _plus(bound, ast.Sub())):
                    yield from _changed(node, slice=list(_changed(node.slice, **{name: [other]})))
    elif isinstance(node.slice, (ast.Name, ast.Attribute, ast.BinOp)):
        for operator in (ast.Add(), ast.Sub()):
            yield from _changed(node, slice=[_plus(node.slice, operator)])


def _comprehension(node: ast.AST) -> Iterator[ast.AST]:
    for place, generator in enumerate(node.generators):
        others = [
            each
            for number, condition in enumerate(generator.ifs)
            for each in (
                [*generator.ifs[:number], *generator.ifs[number + 1 :]],
                [*generator.ifs[:number], ast.UnaryOp(ast.Not(), condition), *generator.ifs[number + 1 :]],
            )
        ]
        for changed in _changed(generator, ifs=others):
            yield from _changed(node, generators=[[*node.generators[:place], changed, *node.generators[place + 1 :]]])


def _plus(node: ast.expr, operator: ast.operator) -> ast.expr:
    return ast.BinOp(node, operator, ast.Constant(1))


def _swaps(values: list[ast.expr]) -> list[list[ast.expr]]:
    pairs = itertools.pairwise(values)
    return [[*values[:place], b, a, *values[place + 2 :]] for place, (a, b) in enumerate(pairs)]


def _changed(node: ast.AST, **fields: list) -> Iterator[ast.AST]:
    """The node with another value of the field, once for each."""
    for name, values in fields.items():
        for value in values:
            new = type(node)(**{**dict(ast.iter_fields(node)), name: value})
            yield ast.copy_location(new, node)
