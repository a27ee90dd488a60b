"""Commands, options, files and names of minillm that a text mentions are there; minutes are those of the checks, and
README's program returns what it says."""

import ast
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

from course.kit import course, masters
from course.kit.minutes import SKIP, core_minutes, timed_exercises
from minillm.__main__ import COMMANDS, parser_of
from minillm.bench import BENCHES

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MASTERS = list(course.masters(ROOT).values())
FOLDERS = "minillm|course|labs|solutions|docs|figures|tests"
PACKAGES = [path.parent.name for path in (ROOT / "minillm").glob("*/__init__.py")]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^    \S.*$", re.MULTILINE)


def texts(path: Path) -> list[str]:
    """A page's text, or each text cell of a master."""
    if path.suffix == ".md":
        return [path.read_text(encoding="utf-8")]
    return [cell.source for cell in masters.lab(path).cells if cell.cell_type == "markdown"]


def snippets(text: str) -> list[str]:
    """Inline code and lines of code, each on one line; lines that end in a backslash are joined."""
    text = re.sub(r"\\\n\s*", " ", text)
    blocks = "\n".join([*FENCE.findall(text), *INDENTED.findall(FENCE.sub("", text))])
    inline = re.findall(r"`([^`]+)`", INDENTED.sub("", FENCE.sub("", text)))
    return [" ".join(span.split()) for span in (*blocks.splitlines(), *inline)]


@cache
def options_of(command: str) -> frozenset[str]:
    return frozenset(name for p in parser_of(command).params for name in (*p.opts, *p.secondary_opts)) | {"--help"}


def wrong_commands(text: str) -> list[str]:
    """Commands and options that `python -m minillm`, or a table's row about commands, names and minillm lacks."""
    wrong, asked = [], []  # asked: (commands, the rest of the line)
    for span in snippets(text):
        called = re.search(r"(?:-m minillm|^minillm) ([a-z][\w-]*)(.*)", span)
        bare = re.fullmatch(r"([a-z-]+)( --?\w.*)", span)
        if called:
            own, _, passed_on = called[2].split(" # ")[0].partition(" -- ")
            asked.append(([called[1]], own))
            asked += [(["serve"], passed_on)] if called[1] == "route" else []
        elif bare and bare[1] in COMMANDS:
            asked.append(([bare[1]], bare[2]))
    for row in re.findall(r"^\|(.*)\|$", text, re.MULTILINE):
        named = re.findall(r"`([\w-]+)[^`]*`", row.split("|")[0])
        if named and set(named) <= set(COMMANDS):
            asked.append((named, row))
    for commands, rest in asked:
        if unknown := [name for name in commands if name not in COMMANDS]:
            wrong.append(f"no command {unknown}")
            continue
        known = frozenset().union(*map(options_of, commands))
        wrong += [f"{commands} has no {o}" for o in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", rest) if o not in known]
        bench = re.match(r" ([a-z-]+)", rest) if commands == ["bench"] else None
        wrong += [f"no bench {bench[1]}"] if bench and bench[1] not in BENCHES else []
    return wrong


def is_there(name: str) -> bool:
    """Whether a file, a module without its suffix or a pattern of them is in the clone."""
    return any(ROOT.glob(name)) or any(ROOT.glob(f"{name}.py"))


def wrong_files(text: str, beside: Path) -> list[str]:
    """Paths below the clone's folders, modules written as `serve/engine`, and links that lead nowhere; not a file whose
    text is given, below its path."""
    named = re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*]", text)
    short = [span for span in snippets(text) if re.fullmatch(rf"(?:{'|'.join(PACKAGES)})(?:/[\w.]+)+", span)]
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    given = re.findall(r"^```python\n# (\S+)$", text, re.MULTILINE)
    wrong = [path for path in named if "NN" not in path and path not in given and not is_there(path)]
    wrong += [path for path in short if not is_there(f"minillm/{path}") and not is_there(path)]
    return wrong + [link for link in links if not (beside / link).exists()]


def wrong_names(text: str) -> list[str]:
    """Dotted names below minillm and course, and those of its packages in code, that cannot be resolved."""
    names = set(re.findall(r"\b(?:minillm|course)(?:\.[A-Za-z_]\w*)+", text))
    for span in snippets(text):
        names |= {
            f"minillm.{m}" for m in re.findall(r"(?<![\w./])(?:predict|measure|comm|serve)(?:\.[A-Za-z]\w*)+", span)
        }
    return [name for name in sorted(names) if not name.endswith(".py") and not resolves(name)]


def resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def wrong_in(text: str, beside: Path) -> list[str]:
    return list(dict.fromkeys([*wrong_commands(text), *wrong_files(text, beside), *wrong_names(text)]))


@pytest.mark.parametrize("path", [*PAGES, *MASTERS], ids=lambda p: p.parent.name if p.suffix == ".py" else p.name)
def test_commands_files_and_names_of_a_text_are_there(path):
    beside = path.parent if path.suffix == ".md" else ROOT / "labs"
    wrong = [f"{what} (in: {text[:60]!r})" for text in texts(path) for what in wrong_in(text, beside)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text, what",
    [
        ("run `python -m minillm trian`", "no command ['trian']"),
        ("```\ntorchrun --nnodes 2 -m minillm train --zero 3 \\\n    --sharp\n```", "['train'] has no --sharp"),
        ("    python -m minillm bench nothing --json out.json", "no bench nothing"),
        ("with `generate\n--slowly`", "['generate'] has no --slowly"),
        ("| `train`, `plot` | with `--dp` and `--pd` |", "['train', 'plot'] has no --pd"),
        ("see minillm/comm/nowhere.py, and minillm/comm/group.py.", "minillm/comm/nowhere.py"),
        ("| `serve/motor.py` | `serve/engine.py`, `engine/core.py` |", "serve/motor.py"),
        ("[here](docs/group.md) and [there](docs/none.md)", "docs/none.md"),
        (
            "`predict.training.memory.training_step` or minillm.predict.training.memory.of_a_dream",
            "minillm.predict.training.memory.of_a_dream",
        ),
    ],
)
def test_what_is_not_there_is_found(text, what):
    assert wrong_in(text, ROOT) == [what]


@pytest.mark.parametrize("path", MASTERS, ids=lambda p: p.parent.name)
def test_minutes_in_a_lab_are_those_of_its_checks(path):
    lab = masters.lab(path)
    for each in timed_exercises(lab):
        assert each.heading_minutes in (None, each.minutes), each
    promised = re.search(r"exercises(?: 1 to \d)? \(?(\d+) minutes", lab.cells[0].source)
    assert promised is None or int(promised[1]) == core_minutes(lab)[0]


@pytest.mark.parametrize("path", MASTERS, ids=lambda p: p.parent.name)
def test_a_lab_has_a_way_through_in_two_hours(path):
    lab, most = masters.lab(path), 120
    assert core_minutes(lab)[0] <= most, f"mark exercises '{SKIP}' until those that are left take {most} minutes"
    said = lab.cells[0].source
    short = re.search(r"\b\d\d minutes with the exercises", said)
    assert short or ("core path" in said and "two" in said), "the first cell should say what takes two hours"


def test_the_term_has_every_lab_and_the_minutes_of_its_exercises():
    """docs/teaching.md: in each week, the exercises on the core path of the labs that are read at home."""
    minutes = {path.parent.name[3:5]: core_minutes(masters.lab(path))[0] for path in MASTERS}
    rows = re.findall(r"^\| (\d+) \|(.*?)\|(.*?)\|[^|]*\| ([^|]*) \|", _page("docs/teaching.md"), re.MULTILINE)
    assert [int(week) for week, *_ in rows] == list(range(1, len(rows) + 1))
    taught = set()
    for week, in_class, at_home, said in rows:
        labs = re.findall(r"\[(\d\d)\]", at_home)
        taught |= {*labs, *re.findall(r"\[(\d\d)\]", in_class)}
        alone = " or ".join(str(minutes[lab]) for lab in labs)
        assert said == (alone if " or " in at_home else str(sum(minutes[lab] for lab in labs))), f"week {week}"
    assert taught == set(minutes)


def test_readme_has_the_hours_of_the_exercises():
    core, later = (sum(each) / 60 for each in zip(*map(core_minutes, map(masters.lab, MASTERS)), strict=True))
    said = re.search(
        r"Exercises take (\d+) of them, .*?\*skip on a\s+first reading\* another (\d+)(½?)",
        _page("README.md"),
        re.DOTALL,
    )
    assert int(said[1]) == round(core) and int(said[2]) + bool(said[3]) / 2 == round(2 * later) / 2


def test_readme_says_what_its_program_returns():
    [program] = re.findall(r"^```python\n(.*?)^```", _page("README.md"), re.DOTALL | re.MULTILINE)
    call, returned = re.search(r"^(launch\(.*\))  # (\[.*?\])", program, re.MULTILINE).groups()
    namespace = {}
    exec(program.replace(call, f"returned = {call}"), namespace)
    assert namespace["returned"] == ast.literal_eval(returned)


def _page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
