"""A learner's kernel, launched on a case in Triton's interpreter and judged: outside, races, values, bytes."""

import ast
import inspect
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from course.kit.answers import answers_of, checked_exercise
from course.kit.exercises import CheckFailed, KnownAnswers
from course.kit.receipts import Row, row
from course.shared.kernels import INSTALLED, Traced, launch
from minillm.model.kernels import tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {
    torch.float32: 2e-6,
    torch.float16: 6e-4,
    torch.bfloat16: 8e-3,
}  # half a step of the last bit; the interpreter cuts bfloat16 off


def only_with_triton(register: Callable, function: Any) -> None:
    """Registers an exercise where its kernels can run."""
    if INSTALLED:
        register(function)


@dataclass(frozen=True)
class KernelAnswers(KnownAnswers):
    """Edits of the master's kernel, registered where kernels can run."""

    here: bool = INSTALLED

    def _add(self, label: str, edits: dict[str, str], says: str = "", expect: str = "") -> Callable[[Any], Any]:
        return super()._add(label, None, says, expect)(edited(self.exercise, edits) if self.here else None)


def edited(exercise: str, edits: dict[str, str]) -> Any:
    """What the master hands to the check, but for some of the cell's text. Kernels are compiled from their text, so it
    is told to linecache, where inspect.getsource looks for it."""
    cell = answers_of("25_kernels").cell(exercise)
    for old, new in edits.items():
        if cell.count(old) != 1:
            raise ValueError(f"{old!r} stands {cell.count(old)} times in the cell of '{exercise}'; it must stand once")
        cell = cell.replace(old, new)
    file = f"<{exercise}, edited {sha1(cell.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
    tree, names = ast.parse(cell), {"tl": tl, "torch": torch}
    functions = ast.Module([each for each in tree.body if isinstance(each, ast.FunctionDef)], [])
    exec(compile(functions, file, "exec"), names)
    (check,) = (node for node in ast.walk(tree) if checked_exercise(node) == exercise)
    return eval(compile(ast.Expression(check.args[1]), file, "eval"), names)


def two_kernels(learner: Any, names: str) -> tuple[Callable, Callable]:
    if not (isinstance(learner, tuple) and len(learner) == 2 and all(map(callable, learner))):
        raise CheckFailed(f"the exercise asks for two kernels: ({names})")
    return learner


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shifted(x: Tensor, dtype: torch.dtype, gap: int) -> Tensor:
    """The same rows `gap` numbers apart, with NaN between them."""
    wide = torch.full((x.shape[0], x.shape[1] + gap), float("nan"), dtype=dtype)
    wide[:, : x.shape[1]] = x.to(dtype)
    return wide[:, : x.shape[1]]


@dataclass(frozen=True)
class Case:
    """name: what the messages say first."""

    name: str

    def launch(self, kernel: Callable, grid: Sequence[int], *arguments: Any, **constants: Any) -> Traced:
        if "raise NotImplementedError" in inspect.getsource(inspect.unwrap(kernel)):
            raise NotImplementedError
        before = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
        try:
            seen = launch(kernel, grid, *arguments, **constants)
        except ValueError as error:
            raise CheckFailed(f"{self.name}: the kernel stopped in the interpreter: {error}") from None
        if seen.outside:
            said = f"{self.name}: {seen.outside[0]}: mask every load and store that may go past the end"
            raise CheckFailed(said, evidence=("outside", *seen.outside))
        if seen.races:
            raise CheckFailed(f"{self.name}: {seen.races[0]}, so on a GPU the result depends on which comes first",
                              evidence=("race", *seen.races))  # fmt: skip
        for name, given, kept in zip(inspect.signature(kernel).parameters, arguments, before, strict=False):
            if isinstance(given, Tensor) and name not in seen.stored and not _same(given, kept):
                raise CheckFailed(f"{self.name}: {name} changed without a store")
        self._only_outputs(kernel, arguments, before, seen)
        return seen

    def _only_outputs(self, kernel: Callable, arguments: Sequence[Any], before: Sequence[Any], seen: Traced) -> None:
        """What held numbers before the launch is an input, and stays; outputs begin as NaN."""
        for name, given, kept in zip(inspect.signature(kernel).parameters, arguments, before, strict=False):
            if isinstance(given, Tensor) and name in seen.stored and not kept.isnan().all():
                raise CheckFailed(f"{self.name}: the kernel stores to its input {name}")

    def shared_out(
        self,
        kernel: Callable,
        grid: Sequence[int],
        *arguments: Any,
        tiles: dict[str, tuple[int, ...]],
        **constants: Any,
    ) -> None:
        """CheckFailed unless a program computes its own tile and no other: without the last ones, only their tiles are
        missing. tiles: of each output, numbers of a program along the first axes, which are the grid's."""
        names = list(inspect.signature(kernel).parameters)[: len(arguments)]
        given = {name: torch.full_like(each, float("nan")) if name in tiles else each
                 for name, each in zip(names, arguments, strict=True)}  # fmt: skip
        fewer = tuple(max(1, programs - 1) for programs in grid)
        with mock.patch.object(tl, "num_programs", lambda axis: grid[axis]):
            self.launch(kernel, fewer, *given.values(), **constants)
        for name, sizes in tiles.items():
            theirs, found = torch.zeros(given[name].shape, dtype=torch.bool), ~given[name].isnan()
            theirs[tuple(slice(n * size) for n, size in zip(fewer, sizes, strict=False))] = True
            if not torch.equal(found, theirs):
                place = torch.nonzero(found != theirs)[0].tolist()
                done = "is not stored" if theirs[tuple(place)] else "is stored all the same"
                said = f"{self.name}: launched without the last programs, {name}{place} {done}: program_id says which "
                raise CheckFailed(f"{said}numbers a program computes", evidence=(name, place))

    def compare(
        self, what: str, found: Tensor, exact: Tensor, tolerance: float | None = None, scale: float = 0.0
    ) -> None:
        """CheckFailed unless each number is right to the last bit or so of its dtype; scale: of what was added up."""
        tolerance = ROUNDING[found.dtype] if tolerance is None else tolerance
        allowed = tolerance * exact.abs().clamp_min(scale) + 1e-7
        off = (found.double() - exact).abs()
        if bool((off <= allowed).all()):
            return
        place = [int(i) for i in torch.nonzero(~(off <= allowed))[0]]
        value = float(found[tuple(place)])
        said = f"{self.name}: {what}{place} is {value:.6g}; in float64 it is {float(exact[tuple(place)]):.6g}"
        if value != value:
            said = (
                f"{self.name}: {what}{place} is not a number: it was never stored, or computed from what lies outside"
            )
        raise CheckFailed(said, evidence=found.tolist())

    def bytes(
        self,
        seen: Traced,
        *,
        loaded: dict[str, int] | None = None,
        stored: dict[str, int] | None = None,
        at_most: dict[str, int] | None = None,
    ) -> list[Row]:
        """A row for each tensor; CheckFailed with how many times too often. at_most: for what a kernel may
        read less."""
        rows = []
        for verb, expected, found in (("read", loaded or {}, seen.loaded), ("written", stored or {}, seen.stored)):
            for name, right_ in expected.items():
                if found.get(name, 0) != right_:
                    said = (
                        f"{self.name}: {found.get(name, 0):,} B of {name} are {verb}, and the formula says {right_:,} B"
                    )
                    raise CheckFailed(
                        said + self._times(found.get(name, 0), right_), evidence=(name, found.get(name, 0))
                    )
                rows.append(row(f"{self.name}: {name} {verb}", right_, found[name], "B"))
        for name, most in (at_most or {}).items():
            if seen.loaded.get(name, 0) > most:
                said = f"{self.name}: {seen.loaded[name]:,} B of {name} are read, and {most:,} B are enough"
                raise CheckFailed(said, evidence=(name, seen.loaded[name]))
        return rows

    @staticmethod
    def _times(found: int, right_: int) -> str:
        return f": {found / right_:.3g} times as many" if right_ and found > right_ else ""

    def tile(self, seen: Traced, most: int) -> None:
        if seen.tile > most:
            raise CheckFailed(f"{self.name}: a program loads {seen.tile} numbers at once; a tile is to have {most}")


def _same(given: Tensor, kept: Tensor) -> bool:
    return torch.equal(given.nan_to_num(0.0), kept.nan_to_num(0.0))
