"""Pages of the reference: what each package exports, from its docstrings, and what each command takes."""

import inspect
import pkgutil
import re
from importlib import import_module
from types import ModuleType

from minillm.__main__ import COMMANDS, GROUPS, parser_of
from minillm.cli.examples import examples_of

PACKAGES = (
    "comm",
    "measure",
    "predict",
    "model",
    "data",
    "quantize",
    "adapters",
    "parallel",
    "train",
    "serve",
    "equivalence",
    "bench",
)


def package_page(package: str) -> str:
    """A package's exported names with their docstrings; of `predict`, whose modules are formulas, all of them."""
    name = f"minillm.{package}"
    module = import_module(name)
    entries = [f".. automodule:: {name}"]
    if package == "predict":
        for info in pkgutil.walk_packages(module.__path__, f"{name}."):
            title = f"{info.name}\n{'-' * len(info.name)}"
            entries.append(f"{title}\n\n.. automodule:: {info.name}\n   :members:")
    else:
        own = [item for item in module.__all__ if _home(module, item).startswith(name)]
        entries += [_entry(f"{name}.{item}", getattr(module, item)) for item in own]
        if others := [item for item in module.__all__ if item not in own]:
            entries.append("Also exported here: " + ", ".join(f":py:obj:`{item}`" for item in others) + ".")
    return f"# `{name}`\n\n``````{{eval-rst}}\n" + "\n\n".join(entries) + "\n``````\n"


def commands_page() -> str:
    """Every command of `python -m minillm` with its arguments and options."""
    parts = ["# Commands", "`python -m minillm COMMAND --help` says the same in the terminal."]
    for group, commands in GROUPS.items():
        parts.append(f"## {group}")
        for name in commands:
            parser = parser_of(name)
            about = inspect.cleandoc(parser.help or COMMANDS[name][1])
            rows = [f"| {_flags(p)} | {_default(p)} | {_cell(getattr(p, 'help', '') or '')} |" for p in parser.params]
            table = ["| option | default | what it does |", "|---|---|---|", *rows] if rows else []
            examples = "\n".join(f"    {example}" for example in examples_of(name))
            parts += [f"### `{name}`", about, "\n".join(table), examples]
    return "\n\n".join(parts) + "\n"


def to_rst(lines: list[str]) -> list[str]:
    """A docstring in plain text, as minillm writes them, in Sphinx's language; pictures and tables stay as they are."""
    result: list[str] = []
    before = ""  # what the line above was
    for line in lines:
        kind = _kind(line, before)
        if kind == "picture" and before != "picture":
            result += ["", "::", ""]
        elif kind != before and kind != "more":
            result.append("")
        result.append({"picture": "    " + line, "blank": "", "more": "  " + _prose(line)}.get(kind, _prose(line)))
        before = "item" if kind == "more" else kind
    return [*result, ""]


def _kind(line: str, before: str) -> str:
    if not line.strip():
        return "blank"
    if re.match(r" {4}|.*\S {2,}\S|.*[│┌└├─╴▁█→]", line):
        return "picture"
    if line.startswith("- "):
        return "item"
    return "more" if before == "item" and line.startswith("  ") else "prose"


def _prose(line: str) -> str:
    """Code between backticks as code, *words* between stars as they are, everything else as it is typed."""
    parts = re.split(r"`([^`]+)`|((?<!\w)\*\w[^*]*\*(?!\w))", line.strip())
    texts, codes, stressed = parts[0::3], parts[1::3], parts[2::3]
    found = [rf"\ ``{code}``\ " if code else star for code, star in zip(codes, stressed, strict=True)]
    escaped = [re.sub(r"([*_|\\`])", r"\\\1", text) for text in texts]
    return "".join(part for pair in zip(escaped, [*found, ""], strict=True) for part in pair)


def _entry(name: str, value: object) -> str:
    if isinstance(value, ModuleType):
        return f".. automodule:: {value.__name__}\n   :members:"
    if inspect.isclass(value):
        return f".. autoclass:: {name}\n   :members:"
    return f".. autofunction:: {name}" if inspect.isroutine(value) else f".. autodata:: {name}\n   :no-value:"


def _home(module: ModuleType, item: str) -> str:
    """Where an exported name is from; constants do not say, so they count as the package's own."""
    value = getattr(module, item)
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or module.__name__


def _flags(parameter) -> str:
    """`--dp, -d`, or an argument's name."""
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name if name.startswith('-') else name.upper()}`" for name in names)


def _default(parameter) -> str:
    if parameter.required:
        return "required"
    told = getattr(parameter, "show_default", None)
    value = told if isinstance(told, str) else parameter.default
    return "" if value in (None, False, ()) or callable(value) else _cell(str(value))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")
