"""On which statements a piece of code stands, across files, found by reading the code and running none of it.

    library = Library(clone)
    start = library.named("course.lab01_collectives.figures", "draw_bytes")
    library.reached(start)      -> {("course.lab01_collectives.figures", 7), ("minillm.drawing", 12), ...}

A node is a top-level statement (a function, a class, an assignment): (module, its number there). Edges are the names
and `module.attribute`s that it reads from its module, through imports and re-exports to where they are bound. Besides:

- a module that is named in a string ("minillm.comm.probe") or handed on as a value counts as a whole, and so does
  every module of a package that f"minillm.serve.speculate.{name}" chooses from;
- what a module does when it is imported (a loop, a call) counts with each of its statements;
- a data file, or a folder of them, that is named in a string ("tokenizer.json", "checkpoints") counts if it lies in
  the code's package or in one around it;
- `answers_of("NN_topic").f` is f in the master of that lab.

Modules of installed packages are no nodes. An object's method is reached with its class, wherever code names that.
"""

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

from course.kit.answers import names_of

Node = tuple[str, int]
Chain = tuple[str, ...]  # a.b.c as ("a", "b", "c")
_UNREAD = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}
_ON_IMPORT = (ast.Expr, ast.For, ast.While, ast.With, ast.Delete)
_MODULE = re.compile(r"\w+(\.\w+)+|(\w+\.)+")  # "minillm.comm.probe", or the beginning of f"minillm.serve.{name}"
_DATA = re.compile(r"[^\W_][\w.-]*(/\w[\w.-]*)*(?<!\.py)")  # the path of a file or a folder, not of __pycache__


def _once(method: Callable) -> Callable:
    """What the method returned for the same arguments, kept as long as its object."""

    @wraps(method)
    def remembered(self: "Library", *arguments: Any) -> Any:
        key = (method.__name__, *arguments)
        if key not in self.memory:
            self.memory[key] = method(self, *arguments)
        return self.memory[key]

    return remembered


class Source:
    """The statements of one file, and the names that they bind. package: the one that relative imports start from."""

    def __init__(self, name: str, text: str, package: str = ""):
        self.name, self.package, self.lines = name, package, text.splitlines()
        self.statements = ast.parse(text).body
        self.binds: dict[str, list[int]] = defaultdict(list)
        self.imports: dict[str, list[Chain]] = defaultdict(list)  # where a name comes from: (module, name) or (module,)
        for number, statement in enumerate(self.statements):
            self._note(number, statement)

    def _note(self, number: int, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound = {statement.name}
        elif isinstance(statement, ast.Assign) and (lab := _named_by("answers_of", statement.value)):
            bound = set()
            for target in (each for each in statement.targets if isinstance(each, ast.Name)):
                self.imports[target.id].append((f"course.lab{lab}.notebook",))
        else:
            bound = names_of(statement, self.text_of(number))[1]
            imported = self.imported(number)
            for name, source in imported:
                self.imports[name].append(source)
            bound -= {name for name, _ in imported if isinstance(statement, (ast.Import, ast.ImportFrom))}
        for name in bound:
            self.binds[name].append(number)

    def text_of(self, number: int) -> str:
        """A statement as it is written, decorators and comments included."""
        statement = self.statements[number]
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
        return "\n".join(self.lines[first - 1 : statement.end_lineno])

    def imported(self, number: int) -> list[tuple[str, Chain]]:
        """(name, where it comes from) for every import in a statement."""
        found = []
        for node in ast.walk(self.statements[number]) if "import" in self.text_of(number) else ():
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module = alias.name if alias.asname else alias.name.split(".")[0]
                    found.append((alias.asname or module, (module,)))
            elif isinstance(node, ast.ImportFrom):
                above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*above, *filter(None, [node.module])])
                found += [(alias.asname or alias.name, (module, alias.name)) for alias in node.names]
        return found

    @cached_property
    def on_import(self) -> list[int]:
        """Statements that bind nothing but do something when the module is imported."""
        return [number for number, s in enumerate(self.statements) if isinstance(s, _ON_IMPORT) and not _is_text(s)]

    def digest(self, number: int) -> str:
        """Of what a statement does: neither comments nor docstrings, annotations and places count."""
        return hashlib.sha1(repr(_meaning(self.statements[number])).encode()).hexdigest()


class Library:
    """The modules under some folders, each read when it is first needed."""

    def __init__(self, *roots: Path):
        self.roots = roots
        self.memory: dict[tuple, Any] = {}

    @_once
    def source(self, module: str) -> Source | None:
        """None for a module that is not under the roots."""
        path = self.path(module)
        if path is None:
            return None
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        return Source(module, path.read_text(encoding="utf-8"), package)

    @_once
    def path(self, module: str) -> Path | None:
        for root in self.roots:
            place = root.joinpath(*module.split("."))
            for path in (place / "__init__.py", place.with_suffix(".py")):
                if path.is_file():
                    return path
        return None

    def modules(self, pattern: str) -> list[str]:
        """Names of the modules whose files match."""
        paths = {path.relative_to(root) for root in self.roots for path in root.glob(pattern)}
        return [".".join(path.with_suffix("").parts) for path in sorted(paths)]

    @_once
    def submodules(self, package: str) -> tuple[str, ...]:
        path = self.path(package)
        if path is None or path.name != "__init__.py":
            return ()
        return tuple(f"{package}.{each.stem}" for each in sorted(path.parent.glob("*.py")) if each != path)

    @_once
    def verifiers(self, module: str) -> dict[str, Node]:
        """The statement of a module in which each of its exercises is registered, by the exercise's name."""
        source, found = self.source(module), {}
        for number, statement in enumerate(source.statements if source else ()):
            if "exercise(" in source.text_of(number):
                names = (_named_by("exercise", node) for node in ast.walk(statement))
                found |= dict.fromkeys(filter(None, names), (module, number))
        return found

    def named(self, module: str, *chain: str) -> set[Node]:
        """What `module.a.b` is: all statements of the module if nothing is asked of it, none if it is not ours."""
        source = self.source(module)
        if source is None:
            return set()
        if not chain:
            return {(module, number) for number in range(len(source.statements))}
        if chain[0] in source.binds or chain[0] in source.imports:
            return self.follow(source, chain)
        if self.path(f"{module}.{chain[0]}"):
            return self.named(f"{module}.{chain[0]}", *chain[1:])
        if "__getattr__" in source.binds:  # imports a submodule when one of its names is first asked for
            parts = filter(None, map(self.source, self.submodules(module)))
            return {(part.name, number) for part in parts for number in part.binds.get(chain[0], ())}
        return set()

    def follow(self, source: Source, chain: Chain) -> set[Node]:
        """What a.b.c is in a module; `source` need not be in the library."""
        head, *rest = chain
        found = {(source.name, number) for number in source.binds.get(head, ())}
        for module, *name in source.imports.get(head, ()):
            if (module, name) == (source.name, [head]):  # a package that imports its submodule by name
                module, name = f"{module}.{head}", []
            found |= self.named(module, *name, *rest)
        return found

    @_once
    def needs(self, node: Node) -> frozenset[Node]:
        """What a statement stands on directly."""
        source = self.source(node[0])
        if source is None:  # a file
            return frozenset()
        return self.needs_of(source, node[1]) | {(source.name, number) for number in source.on_import}

    def needs_of(self, source: Source, number: int) -> frozenset[Node]:
        """What a statement stands on directly; `source` need not be in the library."""
        found = set()
        inner = dict(source.imported(number))
        known = names_of(source.statements[number], source.text_of(number))[0]
        for part in parts(source.statements[number]):
            if isinstance(part, str):
                found |= self._in_text(source, part)
            elif "." in part[0]:  # the master that answers_of("NN_topic") is
                found |= self.named(*part)
            elif part[0] in inner:
                found |= self.named(*inner[part[0]], *part[1:])
            elif part[0] in known:
                found |= self.follow(source, part)
        return frozenset(found)

    def _in_text(self, source: Source, text: str) -> set[Node]:
        if _MODULE.fullmatch(text) and self.path(text.removesuffix(".")):
            modules = self.submodules(text[:-1]) if text.endswith(".") else [text]
            return {node for module in modules for node in self.named(module)}
        path = self.path(source.name)
        return self.data(path.parent, text) if path and _DATA.fullmatch(text) else set()

    @_once
    def data(self, folder: Path, name: str) -> set[Node]:
        """The file called `name`, or all in the folder called so, that lies in a package or in one around it."""
        while (folder / "__init__.py").is_file():
            place = folder / name
            if place.is_dir() and not (place / "__init__.py").exists():
                return {(str(file), -1) for file in place.rglob("*") if file.is_file()}
            if place.is_file():
                return {(str(place), -1)}
            folder = folder.parent
        return set()

    @_once
    def reached(self, start: Node) -> frozenset[Node]:
        """A node and all that it stands on, directly or not."""
        found, waiting = {start}, [start]
        while waiting:
            new = self.needs(waiting.pop()) - found
            found |= new
            waiting += new
        return frozenset(found)

    @_once
    def digest(self, node: Node) -> str:
        source = self.source(node[0])
        return source.digest(node[1]) if source else hashlib.sha1(Path(node[0]).read_bytes()).hexdigest()

    @_once
    def file(self, name: str) -> str:
        """Where a node's module, or its file, lies below its root."""
        path = self.path(name) or Path(name)
        root = next(root for root in self.roots if path.is_relative_to(root))
        return path.relative_to(root).as_posix()


def parts(tree: ast.AST) -> Iterator[Chain | str]:
    """Every name with the attributes that are asked of it, and every text; not those of annotations and docstrings."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Name, ast.Attribute)):
            root, attributes = node, []
            while isinstance(root, ast.Attribute):
                attributes.insert(0, root.attr)
                root = root.value
            if isinstance(root, ast.Name):
                yield (root.id, *attributes)
            elif lab := _named_by("answers_of", root):
                yield (f"course.lab{lab}.notebook", *attributes)
            else:
                waiting.append(root)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        else:
            waiting += (
                child for name, value in ast.iter_fields(node) if name not in _UNREAD for child in _nodes(value)
            )


def _nodes(value: object) -> Iterable[ast.AST]:
    values = value if isinstance(value, list) else [value]
    return (each for each in values if isinstance(each, ast.AST) and not _is_text(each))


def _named_by(call: str, node: ast.AST | None) -> str | None:
    """NN_topic of answers_of("NN_topic"), the exercise of exercise("name", ...): what a call's first argument names."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == call
    return node.args[0].value if is_call and node.args and isinstance(node.args[0], ast.Constant) else None


def _is_text(node: ast.AST) -> bool:
    """A docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _meaning(value: object) -> object:
    """A syntax tree as nested tuples, the same in every Python that minillm runs on."""
    if isinstance(value, list):
        kept = (each for each in value if not _is_text(each) and not _named_by("exercise", each))
        return [_meaning(each) for each in kept]  # without docstrings, and without hints and minutes of exercises
    if not isinstance(value, ast.AST):
        return value
    fields = [(name, _meaning(each)) for name, each in ast.iter_fields(value) if name not in _UNREAD]
    return type(value).__name__, [(name, each) for name, each in fields if each not in (None, [])]
