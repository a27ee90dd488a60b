"""Templates of cheating and haste, applied to an answer wherever they fit.

What fits is read from calls of the right answer in its own check (`Call`, written by wrappers.recorded): an argument
that it leaves alone can be spoiled, a result that is a list can be cut short, and so on. Templates on the syntax tree
need no calls, so they reach classes, too.
"""

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from course.kit.exercises import find
from tests.course.attack.cells import Candidate, Cell, unique

HELPERS = "from tests.course.attack import wrappers as _wrappers"
LITERALS = (1, 2, 4)
LARGEST = 3
WITH_GRADIENTS = ("02", "03", "04", "05", "06", "07", "08", "09", "24")  # labs of training
SIZES = {"world_size", "num_blocks", "block_size"}
LIKE = {"empty_like": "empty", "zeros_like": "zeros", "ones_like": "ones"}
NEW = {"new_zeros": "zeros", "new_ones": "ones", "new_empty": "empty", "new_full": "full", "new_tensor": "tensor"}
SPOILED = {  # patterns of what is returned
    "scaled by 1.003": "float",
    "all not a number": "float",
    "last not a number": "float .*tensor",
    "one shorter": "^list|[1-9]-d tensor$",
    "one longer": "^list|[1-9]-d tensor$",
    "in reverse": "^list|[1-9]-d tensor$",
    "a key more": "dict",
    "a key less": "dict",
    "one axis more": "tensor",
    "flattened": "[02-9]-d tensor",
}


@dataclass(frozen=True)
class Call:
    """One call of a right answer by its check; see wrappers.recorded."""

    function: str
    arguments: list[str]
    changed: list[int]
    returned: str
    signature: str


def cheats(cell: Cell, calls: Sequence[Call]) -> list[Candidate]:
    """All of a cell, each once."""
    written = [each for template in (_literals, _fixed, _shared_state, _no_overlap) for each in template(cell)]
    around = [each for function in cell.functions for each in _around(cell, function, calls)]
    return unique(iter([*written, *around]))


def wrapped(cell: Cell, kind: str, function: str, edit: str, call: str) -> Candidate:
    """The cell with `call`, an expression in `f`, in place of a function."""
    change = f"{function} = {call.replace('(f', f'({function}', 1)}"
    return cell.prepared(kind, f"{function}: {edit}", before=HELPERS, change=change)


def _around(cell: Cell, function: ast.FunctionDef, calls: Sequence[Call]) -> Iterator[Candidate]:
    """Wrappers of a function whose calls are known."""
    name = function.name
    calls = [call for call in calls if call.function == name]
    if not calls:
        return

    def cheat(edit: str, call: str) -> Candidate:
        return wrapped(cell, "cheat", name, edit, call)

    parameters = [argument.arg for argument in function.args.args]
    sizes = sorted({call.signature for call in calls})
    if any(letter.isdigit() for letter in "".join(sizes)):
        yield cheat("knows the sizes of one run of the check", f"_wrappers.only_sizes(f, {sizes!r})")
    if any(call.returned != "NoneType" for call in calls):
        yield cheat("its first result for ever", "_wrappers.first_result(f)")
    changed = {place for call in calls for place in call.changed}
    kinds = {place: call.arguments[place] for call in reversed(calls) for place in range(len(call.arguments))}
    for place, kind in kinds.items():
        who = parameters[place] if place < len(parameters) else f"argument {place}"
        if kind in ("int", "float", "bool", "str", "NoneType"):
            yield cheat(f"{who} as at the first call", f"_wrappers.first_value(f, {place})")
        if place not in changed and ("tensor" in kind or kind.startswith(("list", "dict"))):
            yield cheat(f"spoils {who}", f"_wrappers.changes_argument(f, {place})")
    if changed:
        yield cheat("on copies, where a change in place is asked for", "_wrappers.on_copies(f)")
    returned = {call.returned for call in calls}
    if any(kind.startswith("float") and kind.endswith("tensor") for kind in kinds.values()):
        yield cheat("computes in bfloat16", "_wrappers.in_dtype(f, 'bfloat16')")
        if find(cell.exercise).lab[:2] in WITH_GRADIENTS and any(
            re.search("float .*tensor", kind) for kind in returned
        ):
            yield cheat("no gradient", "_wrappers.without_gradient(f)")
    for spoiled, fitting in SPOILED.items():
        if any(re.search(fitting, kind) for kind in returned):
            yield cheat(f"its result {spoiled}", f"_wrappers.on_result(f, {spoiled!r})")


def _literals(cell: Cell) -> Iterator[Candidate | None]:
    """Sizes as numbers: right in one of the check's cases, or up to its largest."""
    places: dict[str, list[int]] = {}
    for number, node in cell.nodes():
        if isinstance(node, ast.expr) and _is_size(node):
            places.setdefault(ast.unparse(node), []).append(number)
    for text, numbers in places.items():
        for new in (*map(str, LITERALS), f"min({text}, {LARGEST})"):
            tree = copy.deepcopy(cell.tree)
            nodes = list(ast.walk(tree))
            for number in numbers:
                _become(tree, nodes[number], ast.parse(new, mode="eval").body)
            yield Candidate(cell.exercise, "cheat", f"{text} is {new}", ast.unparse(tree))


def _is_size(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.attr in SIZES
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id == "len"
        return named or (isinstance(node.func, ast.Attribute) and node.func.attr in ("size", "numel"))
    return False


def _fixed(cell: Cell) -> Iterator[Candidate | None]:
    """New tensors of torch's default dtype and device, whatever the inputs are."""
    for number, node in cell.nodes():
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr in LIKE and node.args:
            shape = ast.Attribute(node.args[0], "shape", ast.Load())
            new = ast.Call(_torch(LIKE[node.func.attr]), [shape, *node.args[1:]], [])
        elif node.func.attr in NEW:
            new = ast.Call(_torch(NEW[node.func.attr]), node.args, [])
        elif node.func.attr == "full_like":
            new = ast.Call(
                _torch("full"), [ast.Attribute(node.args[0], "shape", ast.Load()), *node.args[1:]], node.keywords
            )
        else:
            continue
        yield cell.replaced("cheat", number, new, "default dtype")


def _torch(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name("torch", ast.Load()), name, ast.Load())


def _shared_state(cell: Cell) -> Iterator[Candidate | None]:
    """What should begin anew at every call, or in every object, is kept."""
    for number, node in cell.nodes():
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name) and isinstance(node.value, (ast.List, ast.Dict, ast.ListComp, ast.DictComp)):
            kept = f"_kept.setdefault({target.id!r}, {ast.unparse(node.value)})"
            changed = cell.replaced(
                "cheat",
                number,
                ast.Assign([target], ast.parse(kept, mode="eval").body, lineno=0),
                "kept between calls",
            )
            yield Candidate(changed.exercise, changed.kind, changed.edit, f"_kept = {{}}\n{changed.text}")
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            shared = ast.Attribute(ast.parse("type(self)", mode="eval").body, target.attr, ast.Store())
            yield cell.replaced("cheat", number, ast.Assign([shared], node.value, lineno=0), "shared by all objects")


def _no_overlap(cell: Cell) -> Iterator[Candidate | None]:
    """Waits as soon as a transfer has started."""
    for number, node in cell.nodes():
        if isinstance(node, ast.Call) and any(keyword.arg == "async_op" for keyword in node.keywords):
            waited = ast.Call(ast.parse("_wrappers.waited", mode="eval").body, [node], [])
            changed = cell.replaced("cheat", number, waited, "waits at once")
            yield Candidate(changed.exercise, changed.kind, changed.edit, f"{HELPERS}\n{changed.text}")


def _become(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(each is old for each in value):
                setattr(parent, field, [new if each is old else each for each in value])
