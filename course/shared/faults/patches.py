"""A patch: other code in the place of one of minillm's functions, for as long as a run lasts.

    target   minillm.parallel.pipeline_parallel.held_parts:HeldParts.run
    code     {"return loss(nll)": "return loss(nll) * count"}       an edit of minillm's own source
             def run(self, step, batch, loss, counted=None): ...    or a function in its place

    with planted(patches):          # on the rank that runs it
        trainer.step()
    # here the function is the old one again, and `code_hash` says so

Edits make a fault as readable as a diff, and they cannot outlive the code that they change: a text that no longer
stands there exactly once is refused.
"""

import contextlib
import functools
import hashlib
import inspect
import linecache
import marshal
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Edits = Mapping[str, str]


@dataclass(frozen=True)
class Patch:
    """target: MODULE:FUNCTION or MODULE:CLASS.METHOD. code: {old: new}, edits of the source, or a function.

    also: other modules' names of the same function, MODULE:NAME, where it was imported by name.
    """

    target: str
    code: Edits | Callable
    also: tuple[str, ...] = ()

    def replacement(self) -> Any:
        """What is put in the place. ValueError if an edit's text does not stand there exactly once."""
        if callable(self.code):
            return _like(_found(self.target), adopted(self.code, self.target))
        return compiled(self.target, self.code)

    def source(self) -> str:
        """The code that is put in the place, as a learner reads it."""
        if callable(self.code):
            return textwrap.dedent(inspect.getsource(self.code))
        return edited(self.target, self.code)

    def with_code(self, code: Edits | Callable) -> "Patch":
        """Other code in the same place."""
        return Patch(self.target, code, self.also)


@dataclass(frozen=True)
class Fault(Patch):
    """A patch that plants a defect which shipped somewhere.

    place, mechanism: what is wrong and where, in half a sentence each. shipped: owner/repository#number, or an address.
    """

    place: str = ""
    mechanism: str = ""
    shipped: tuple[str, ...] = ()

    @property
    def threads(self) -> list[str]:
        """Where it shipped, as links. GitHub leads from an issue's address to a pull request of that number."""
        parts = [thread.partition("#") for thread in self.shipped]
        return [
            f"https://github.com/{where}/issues/{number}" if number else f"https://{where}"
            for where, _, number in parts
        ]


@contextlib.contextmanager
def planted(patches: Iterable[Patch]) -> Iterator[None]:
    """The patches' code runs inside the block; afterwards minillm's own does again, whatever happened."""
    kept: list[tuple[Any, str, Any]] = []
    try:
        for patch in patches:
            new = patch.replacement()
            for place in (patch.target, *patch.also):
                owner, name = _place(place)
                kept.append((owner, name, inspect.getattr_static(owner, name)))
                setattr(owner, name, new)
        yield
    finally:
        for owner, name, before in reversed(kept):
            setattr(owner, name, before)


def code_hash(target: str) -> str:
    """Of the code that runs there now: equal before and after a patch, another while it is planted."""
    function = _function(_found(target))
    return hashlib.sha256(marshal.dumps(function.__code__) + repr(function.__defaults__).encode()).hexdigest()


def sound(target: str) -> Callable:
    """minillm's own function, as `def` made it."""
    return _function(_found(target))


def sound_source(target: str) -> str:
    return textwrap.dedent(inspect.getsource(sound(target)))


def edited(target: str, edits: Edits) -> str:
    """minillm's own source with the edits. ValueError if a text does not stand there exactly once."""
    source = sound_source(target)
    for old, new in edits.items():
        if source.count(old) != 1:
            raise ValueError(
                f"{old!r} stands {source.count(old)} times in {target}; an edit needs a text that is there once"
            )
        source = source.replace(old, new)
    return source


@functools.cache
def _compiled(target: str, edits: tuple[tuple[str, str], ...]) -> Any:
    source = edited(target, dict(edits))
    digest = hashlib.sha1(source.encode()).hexdigest()[:8]
    file = f"<{target} with an edit, {digest}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), vars(sys.modules[_module(target)]), made)
    return next(iter(made.values()))


def compiled(target: str, edits: Edits) -> Any:
    """The edited function, or descriptor, among the names of its own module: the same object for the same edits."""
    _place(target)
    return _compiled(target, tuple(edits.items()))


def adopted(function: Callable, target: str) -> Callable:
    """A learner's function that also knows the names of the module whose function it replaces."""
    if not isinstance(function, types.FunctionType):
        return function
    names = {**vars(import_module(_module(target))), **function.__globals__}
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _module(target: str) -> str:
    return target.partition(":")[0]


def _place(target: str) -> tuple[Any, str]:
    """(module or class, the name that it has there)."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, import_module(module))
    return owner, name


def _found(target: str) -> Any:
    return inspect.getattr_static(*_place(target))


def _function(found: Any) -> Callable:
    """The plain function inside a descriptor or a decorator."""
    if isinstance(found, property):
        found = found.fget
    found = getattr(found, "__func__", found)  # of a static or class method
    found = getattr(found, "func", found) if isinstance(found, functools.cached_property) else found
    return inspect.unwrap(found)


def _like(found: Any, function: Callable) -> Any:
    """The function in the kind of descriptor that it replaces."""
    if isinstance(found, property | staticmethod | classmethod):
        return type(found)(function)
    return function
