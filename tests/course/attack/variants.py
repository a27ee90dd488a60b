"""Right answers written in another way: each must pass, and one that is refused shows a check that asks too much."""

import ast
import copy
import re
from collections.abc import Callable, Iterator, Sequence

from tests.course.attack.cells import Candidate, Cell, unique
from tests.course.attack.cheats import HELPERS, Call, wrapped

RESULTS = {  # patterns of what is returned
    "strided": "tensor",
    "cloned": "tensor",
    "list for tuple": "^list|^tuple",
    "an ordered dict": "^dict",
    "numbers of NumPy": r"\bint$|\bfloat$",
}


def variants(cell: Cell, calls: Sequence[Call]) -> list[Candidate]:
    """All of a cell, each once. A Triton kernel has no tensors and is not called by Python: only names change."""
    kernel = "tl." in cell.text
    rewrites = {"other names": _Renamed} if kernel else REWRITES
    written = (_rewritten(cell, edit, rewrite) for edit, rewrite in rewrites.items())
    around = () if kernel else (each for function in cell.functions for each in _around(cell, function, calls))
    return unique(iter([*written, *around]))


def _around(cell: Cell, function: ast.FunctionDef, calls: Sequence[Call]) -> Iterator[Candidate]:
    calls = [call for call in calls if call.function == function.name]
    if not calls:
        return
    changed = {place for call in calls for place in call.changed}
    kinds = {kind for call in calls for kind in call.arguments}
    returned = {call.returned for call in calls}

    def variant(edit: str, call: str) -> Candidate:
        return wrapped(cell, "variant", function.name, edit, call)

    yield variant("a partial function", "__import__('functools').partial(f)")
    yield variant("a lambda", "(lambda f: lambda *a, **k: f(*a, **k))(f)")
    if not changed and not any(kind.startswith("argument") for kind in returned):
        if any("tensor" in kind or kind.startswith(("list", "dict")) for kind in kinds):
            yield variant("on copies", "_wrappers.on_copies(f)")
        if any(re.search("^float .*tensor", kind) for kind in kinds):
            yield variant("computes in float64", "_wrappers.in_dtype(f, 'float64')")
        for altered, fitting in RESULTS.items():
            if any(re.search(fitting, kind) for kind in returned):
                yield variant(f"its result {altered}", f"_wrappers.on_result(f, {altered!r})")


def _rewritten(cell: Cell, edit: str, rewrite: Callable[[], ast.NodeTransformer]) -> Candidate | None:
    """Every function that is handed to the check, or method of a class, put through a rewriting of its tree."""
    tree = copy.deepcopy(cell.tree)
    names = {node.name for node in cell.answered}
    for node in [each for each in tree.body if getattr(each, "name", "") in names]:
        for function in [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]:
            if node is function or function in getattr(node, "body", ()):
                rewrite().visit(function)
    text = ast.unparse(ast.fix_missing_locations(tree))
    if text == ast.unparse(cell.tree):
        return None
    return Candidate(cell.exercise, "variant", edit, f"{HELPERS}\n{text}")


class _Renamed(ast.NodeTransformer):
    """Local variables called otherwise."""

    def visit_FunctionDef(self, function: ast.FunctionDef) -> ast.AST:
        shared = {
            name for node in ast.walk(function) if isinstance(node, (ast.Nonlocal, ast.Global)) for name in node.names
        }
        inner = [node for node in ast.walk(function) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
        given = {each.arg for node in inner for each in [*node.args.args, *node.args.kwonlyargs]}
        given |= {node.args.vararg.arg for node in inner if node.args.vararg}
        given |= {node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler)}
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in stored - given - shared:
                node.id = f"my_{node.id}"
        return function


class _Inner(ast.NodeTransformer):
    """The body in a function of its own."""

    def visit_FunctionDef(self, function: ast.FunctionDef) -> ast.AST:
        body = function.body
        docstring = [body[0]] if ast.get_docstring(function) else []
        if any(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super" for node in ast.walk(function)):
            return function
        given = ast.arguments([], [], None, [], [], None, [])
        inner = ast.FunctionDef("inner", given, body[len(docstring) :], [], lineno=0)
        parameters = {each.arg for each in function.args.args}
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        rebound = sorted(parameters & stored)
        if rebound:
            inner.body.insert(0, ast.Nonlocal(rebound))
        function.body = [*docstring, inner, ast.parse("return inner()").body[0]]
        return function


class _SwappedBranches(ast.NodeTransformer):
    """if not c: b else: a"""

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        return ast.If(ast.UnaryOp(ast.Not(), node.test), node.orelse or [ast.Pass()], node.body)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body)


MIRRORED = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
}


class _Flipped(ast.NodeTransformer):
    """b > a for a < b"""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1 or type(node.ops[0]) not in MIRRORED:
            return node
        return ast.Compare(node.comparators[0], [MIRRORED[type(node.ops[0])]()], [node.left])


class _Called(ast.NodeTransformer):
    """An operation by a helper, for another order of additions."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        helper = {ast.Add: "swapped_sum", ast.MatMult: "other_matmul"}.get(type(node.op))
        return _helper(helper, [node.left, node.right]) if helper else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "sum":
            return ast.Call(_helper("other_sum", []).func, [node.func.value, *node.args], node.keywords)
        return node


class _Listed(ast.NodeTransformer):
    """Loops over lists; list(...) for comprehensions."""

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = ast.Call(ast.Name("list", ast.Load()), [node.iter], [])
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        return ast.Call(ast.Name("list", ast.Load()), [ast.GeneratorExp(node.elt, node.generators)], [])


class _NamedResult(ast.NodeTransformer):
    """result = ...; return result"""

    def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.AST]:
        if node.value is None:
            return node
        name = ast.Name("result", ast.Store())
        return [ast.Assign([name], node.value, lineno=0), ast.Return(ast.Name("result", ast.Load()))]


REWRITES = {
    "other names": _Renamed,
    "the body in an inner function": _Inner,
    "branches swapped": _SwappedBranches,
    "comparisons flipped": _Flipped,
    "another order of additions": _Called,
    "lists for iterators": _Listed,
    "a named result": _NamedResult,
}


def _helper(name: str, args: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name("_wrappers", ast.Load()), name, ast.Load()), args, [])
