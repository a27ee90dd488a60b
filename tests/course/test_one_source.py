"""Each answer, each mistake's sentence and each claim of a lab is written once, and citations have links."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from course.kit import course, masters

ROOT = Path(__file__).parents[2]
LABS = tuple(course.folders(ROOT))
MONTHS = "January February March April May June July August September October November December In Since"
WORDS = 6  # as many words in a row are a sentence written twice


def sources(lab: str, *names: str) -> dict[Path, str]:
    """Text of the lab's modules whose name begins with one of `names`, or of all but the master."""
    found = sorted(course.folders(ROOT)[lab].glob("*.py"))
    kept = [path for path in found if path.stem.startswith(names or "")]
    return {path: path.read_text(encoding="utf-8") for path in kept if path.stem not in ("notebook", "torchrun")}


def master(lab: str) -> str:
    return course.masters(ROOT)[lab].read_text(encoding="utf-8")


def bodies(text: str, solved_only: bool) -> Counter:
    """Function and method bodies without docstrings, as text; one-liners are too short to be a copy."""
    found = Counter()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            marked = any("# BEGIN SOLUTION" in line for line in lines)
            kept = node.body[1:] if ast.get_docstring(node) else node.body
            code = "\n".join(map(ast.unparse, kept))
            if code.count("\n") >= 2 and (marked or not solved_only):
                found[code] += 1
    return found


@pytest.mark.parametrize("lab", LABS)
def test_no_reference_is_written_twice(lab):
    answers = bodies(master(lab), solved_only=True)
    assert answers
    for path, text in sources(lab).items():
        copied = set(answers) & set(bodies(text, solved_only=False))
        assert not copied, f"{path.name} repeats an answer of the master; take it from answers_of('{lab}'): {copied}"


def sentences(text: str) -> list[str]:
    """Every says= of the mistakes in a module."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    keywords = [keyword for call in calls for keyword in call.keywords if keyword.arg == "says"]
    return [keyword.value.value for keyword in keywords if isinstance(keyword.value, ast.Constant)]


def runs(text: str) -> set[tuple[str, ...]]:
    """All runs of WORDS words."""
    words = re.findall(r"[\w']+", text.lower())
    return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}


@pytest.mark.parametrize("lab", LABS)
def test_no_mistakes_sentence_is_written_twice(lab):
    said = [sentence for text in sources(lab, "mistakes").values() for sentence in sentences(text)]
    assert [sentence for sentence, count in Counter(said).items() if count > 1] == []
    for path, text in sources(lab, "checks", "judge").items():
        constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        in_checks = set().union(*(runs(value) for value in constants if isinstance(value, str)))
        twice = [sentence for sentence in said if runs(sentence) & in_checks]
        assert not twice, f"{path.name} says again what a mistake says: {twice}"


def claims(text: str) -> list[str]:
    """Names of rows: the first argument of row(...) and formula(...), with every {...} of an f-string alike."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("row", "formula"):
            name = node.args[0]
            if isinstance(name, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "{}" for p in name.values))
            elif isinstance(name, ast.Constant):
                found.append(name.value)
    return [name for name in found if not name.startswith(" ")]  # an indented row is a part of the one above it


@pytest.mark.parametrize("lab", LABS)
def test_no_claim_is_written_twice(lab):
    assert claims(master(lab)) == [], "rows are built in receipts.py; the notebook calls it in one line"
    calls = [node for node in ast.walk(ast.parse(master(lab))) if isinstance(node, ast.Call)]
    built = [call.lineno for call in calls if getattr(call.func, "id", getattr(call.func, "attr", "")) == "receipt"]
    assert built == [], f"{lab}: lines {built} of the master build receipts; a function of receipts.py returns them"
    names = [name for text in sources(lab, "receipts").values() for name in claims(text)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("lab", LABS)
def test_a_check_stands_in_the_cell_that_defines_its_answer(lab):
    for cell in masters.solution(course.masters(ROOT)[lab]).cells:
        for name in masters.checked(cell):
            tree = ast.parse(cell.source)
            defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
            calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "check"]
            asked = {node.id for call in calls for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)}
            assert asked <= defined, f"{lab}: '{name}' is checked in another cell than the one that defines {asked}"


@pytest.mark.parametrize("lab", LABS)
def test_every_citation_is_a_link(lab):
    prose = "\n".join(cell.source for cell in masters.lab(course.masters(ROOT)[lab]).cells if cell.cell_type != "code")
    cited = re.compile(r"(?P<name>[A-Z][\w'-]+(?: et al\.| and [A-Z]\w+|)),? \(?(?P<year>(?:19|20)\d\d)\b")
    linked = " ".join(re.findall(r"\[[^\]]*\]\(https?://[^)\s]+\)", prose))
    bare = [m[0] for m in cited.finditer(prose) if m["name"].split()[0] not in MONTHS.split() and m[0] not in linked]
    assert not bare, f"{lab}: write [{bare[0]}](https://...), and the same for {bare[1:]}"
