"""No module imports one that imports it, not even for type checkers: whoever reads one never has to read in a circle."""

import ast
from pathlib import Path

import minillm

ROOT = Path(minillm.__file__).parents[1]


def imports() -> dict[str, set[str]]:
    """module -> the modules of minillm that its top level names, also under `if TYPE_CHECKING`."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.glob("minillm/**/*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    return {name: found(path, set(files)) for name, path in files.items()}


def found(path: Path, modules: set[str]) -> set[str]:
    names, todo = set(), list(ast.parse(path.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom):
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= below & modules or {node.module} & modules
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):  # inside these it happens when called
            todo += ast.iter_child_nodes(node)
    return names


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, in order; none: []."""
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return []
        for other in sorted(graph[name]):
            if other != name and (loop := visit(other, [*path, name])):
                return loop
        finished.add(name)
        return []

    return next((loop for name in sorted(graph) if (loop := visit(name, []))), [])


def test_no_module_is_in_a_circle() -> None:
    assert circle(imports()) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
