"""Which changes make which cells of a solution stale: exactly those whose outputs they can change."""

import re
from pathlib import Path

import nbformat
import pytest

from course.kit import course, masters
from course.kit.fingerprint import KEY, changed, fingerprint
from course.kit.reach import Library

ROOT = Path(__file__).parents[3]
FILES = {
    "course/__init__.py": "",
    "course/lab90_a/__init__.py": "",
    "course/lab90_a/figures.py": '''
        from course.shared import scale
        from course.lab90_a.numbers import LIMIT, Clock


        def draw(count: int = 4):
            """A picture
            of two lines.

            Not shown.
            """
            return scale.doubled(count) + LIMIT  # a comment


        def unrelated():
            return 1


        def timed():
            return Clock().now()
    ''',
    "course/lab90_a/numbers.py": """
        from course.lab90_a import registry

        LIMIT = 3
        WEIGHTS = Path(__file__).parents[1] / "weights"
        TABLE = {}
        TABLE["a"] = 1


        class Clock:
            def now(self):
                return 0


        def in_table():
            return TABLE, registry.__name__


        def by_name():
            return "course.lab90_a.registry", open("words.toml"), WEIGHTS, "__pycache__"


        def late():
            from course.lab90_a.registry import chosen as pick

            return pick
    """,
    "course/lab90_a/registry.py": "def chosen():\n    return 5\n",
    "course/lab90_a/words.toml": "a = 1\n",
    "course/weights/large/model.bin": "0",
    "course/__pycache__/made.pyc": "0",
    "course/lab90_a/checks.py": """
        @exercise("double-it", hints=("a", "b", "c"))
        def check_double(learner):
            return _judge(learner)


        def _judge(learner):
            return learner(2) == 4


        @exercise("other", hints=())
        def check_other(learner):
            return True
    """,
    "course/lab90_a/mistakes.py": "def wrong():\n    return 1\n",
    "course/lab90_a/notebook.py": """
        from course.kit import answers_of
        other = answers_of("91_b").solved


        def double(x):
            return 2 * x
    """,
    "course/lab91_b/__init__.py": "",
    "course/lab91_b/notebook.py": "def solved():\n    return 1\n\n\ndef not_solved():\n    return 2\n",
    "course/shared/__init__.py": "",
    "course/shared/scale/__init__.py": "from course.shared.scale.factors import doubled\n",
    "course/shared/scale/factors.py": "FACTOR = 2\n\n\ndef doubled(x):\n    return FACTOR * x\n",
}
CELLS = {
    "imports": "import inspect\nfrom course.lab90_a import figures as pictures, numbers",
    "guess": "guess = 1",
    "figure": "show(pictures.draw, count=3)",
    "value": "pictures.draw()",
    "clock": "def now():\n    return pictures.timed()\n\n\nnow()",
    "later": "now() + guess",
    "table": "numbers.in_table()",
    "string": "numbers.by_name()",
    "inner": "numbers.late()",
    "check": 'now = check("double-it", now)',
    "source": "print(inspect.getsource(pictures.draw))",
    "answer": 'answers_of("91_b").solved()',
}


def write(home, name, text):
    lines = text.strip("\n").split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line[indent:] for line in lines) + "\n")


@pytest.fixture
def home(tmp_path):
    for name, text in FILES.items():
        write(tmp_path, name, text)
    return tmp_path


def notebook(cells=CELLS):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text, id=name) for name, text in cells.items()])


def stale_after(home, file, old, new):
    """Cells whose fingerprint a change of a file changes."""
    before = fingerprint(notebook(), Library(home)).cells
    path = home / "course" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    after = fingerprint(notebook(), Library(home)).cells
    return {name for name in CELLS if before[name] != after[name]}


DRAWN = {"figure", "value", "source"}


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("lab90_a/figures.py", "(count) + LIMIT", "(count) - LIMIT", DRAWN),
        ("lab90_a/figures.py", "count: int = 4", "count: int = 5", DRAWN),
        ("shared/scale/factors.py", "FACTOR * x", "FACTOR + x", DRAWN),
        ("shared/scale/factors.py", "FACTOR = 2", "FACTOR = 3", DRAWN),
        ("shared/scale/__init__.py", "factors import doubled", "halves import doubled", DRAWN),
        ("lab90_a/numbers.py", "LIMIT = 3", "LIMIT = 4", DRAWN),
        ("lab90_a/numbers.py", "return 0", "return 1", {"clock", "later", "check"}),
        ("lab90_a/numbers.py", 'TABLE["a"] = 1', 'TABLE["a"] = 2', {"table"}),
        ("lab90_a/registry.py", "return 5", "return 6", {"string", "inner"}),
        ("lab90_a/words.toml", "1", "2", {"string"}),
        ("weights/large/model.bin", "0", "1", {"string"}),
        ("lab90_a/checks.py", "== 4", "== 5", {"check"}),
        ("lab91_b/notebook.py", "return 1", "return 3", {"answer"}),
    ],
)
def test_a_change_makes_those_cells_stale_that_stand_on_it(home, file, old, new, stale):
    assert stale_after(home, file, old, new) == stale


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("lab90_a/figures.py", "return 1", "return 2", set()),
        ("lab90_a/figures.py", "count: int", "count: float", {"source"}),
        ("lab90_a/figures.py", "a comment", "another one", {"source"}),
        ("lab90_a/figures.py", "A picture", "The picture", {"figure", "source"}),
        ("lab90_a/figures.py", "of two lines", "of 2 lines", {"figure", "source"}),
        ("lab90_a/figures.py", "Not shown", "Hidden", {"source"}),
        ("lab90_a/figures.py", "def draw", "\n\n# moved\ndef draw", set()),
        ("lab90_a/mistakes.py", "return 1", "return 2", set()),
        ("__pycache__/made.pyc", "0", "1", set()),
        ("lab90_a/checks.py", '"a", "b"', '"x", "y"', set()),
        ("lab90_a/checks.py", "return True", "return False", set()),
        ("lab91_b/notebook.py", "return 2", "return 3", set()),
    ],
)
def test_what_a_cell_does_not_show_leaves_it_alone(home, file, old, new, stale):
    assert stale_after(home, file, old, new) == stale


def test_the_sentence_names_the_first_cell_and_the_files(home):
    executed, library = notebook(), Library(home)
    executed.metadata[KEY] = fingerprint(executed, library).to_json()
    assert changed(executed, fingerprint(executed, library)) == ""
    write(home, "course/lab90_a/registry.py", "def chosen():\n    return 7\n")
    said = changed(executed, fingerprint(executed, Library(home)))
    assert said == (
        "was executed before the code of cell 'numbers.by_name()' and 1 more changed in course/lab90_a/registry.py"
    )


def test_an_import_that_is_tried_keeps_what_stands_in_for_it(tmp_path):
    write(tmp_path, "part.py", "try:\n    import absent\nexcept ImportError:\n    absent = 1\n")
    write(tmp_path, "course/__init__.py", "def home():\n    return 1\n")
    write(tmp_path, "other.py", "def home():\n    return 1\n")
    write(tmp_path, "whole.py", "import other as course\nimport part\n\ndef both():\n    course.home(), part.absent\n")
    library = Library(tmp_path)
    (start,) = library.named("whole", "both")
    assert library.reached(start) == {start, ("other", 0), ("part", 0)}


def test_a_call_of_an_earlier_cells_function_stands_on_it():
    first = notebook({"a": "def f():\n    return 1", "b": "f()", "c": "2"})
    second = notebook({"a": "def f():\n    return 2", "b": "f()", "c": "2"})
    before, after = (fingerprint(each, Library()).cells for each in (first, second))
    assert before["b"] != after["b"] and before["c"] == after["c"]


MINE = ("01", "13", "15", "23")


@pytest.fixture(scope="module")
def unedited():
    """Fingerprints of all solutions, by lab."""
    return fingerprints(course.masters(ROOT))


@pytest.mark.full
@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("course/lab01_collectives/figures.py", "def draw_bytes(numbers", "def draw_bytes(figures", ["01"]),
        ("course/lab13_paged_attention/receipts.py", "    return receipt(", "    return  receipt('', ", ["13"]),
        ("course/lab23_claims/claims_memory.py", '"false"', '"true"', ["23"]),
        ("course/lab23_claims/claims_code.py", 'row("bound", True', 'row("bound", False', ["23"]),
        ("minillm/predict/comms.py", "def ring_all_reduce(", "def ring_all_reduce(unused, ", ["01", "23"]),
        ("course/kit/receipts.py", "OPEN_ROWS = 3", "OPEN_ROWS = 4", list(MINE)),
        ("minillm/checkpoints/target/model.safetensors", "__metadata__", "__metadatA__", ["13", "15", "23"]),
    ],
)
def test_an_edit_of_the_course_makes_those_labs_stale_that_stand_on_it(file, old, new, stale, unedited, monkeypatch):
    read_text, read_bytes = Path.read_text, Path.read_bytes
    assert old.encode() in read_bytes(ROOT / file)

    def text(path, **how):
        return read_text(path, **how).replace(old, new) if path == ROOT / file else read_text(path, **how)

    def data(path):
        return read_bytes(path).replace(old.encode(), new.encode()) if path == ROOT / file else read_bytes(path)

    monkeypatch.setattr(Path, "read_text", text)
    monkeypatch.setattr(Path, "read_bytes", data)
    edited = fingerprints({name: path for name, path in course.masters(ROOT).items() if name[:2] in MINE})
    assert [name[:2] for name, made in edited.items() if made.cells != unedited[name].cells] == stale


LEFT_OUT = {  # of the labs' modules and of the data in course/ and minillm/: what no stored output comes from
    r"course/lab\w+/(__init__|notebook)\.py": "no code; the master, which the solution is itself",
    r"course/lab\w+/mistakes(_\w+)?\.py": "run when an answer fails, and no stored answer does",
    r"course/lab\w+/torchrun\.py": "a script with a file of its own under solutions/",
    r"course/lab22_bug_museum/plant\.py": "a folder that only `python -m minillm museum --plant` writes",
    r"course/lab24_interview/sheet\.py": "a page that only `python -m minillm interview --sheet` writes",
    r"minillm/data/tokenizer\.source\.json": "from which text the tokenizer was made; a test reads it",
    r"course/kit/jupyter/.*": "settings of the learner's JupyterLab",
    r"course/book/.*": "how the website looks",
}


@pytest.mark.full
def test_every_module_of_a_lab_and_all_data_are_reached_by_a_solution(unedited):
    """Else an edit of it makes no solution stale: as when importing a module enters something in another's table."""
    paths = [path for top in ("course", "minillm") for path in (ROOT / top).rglob("*") if path.is_file()]
    files = {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}
    unreached = {file for file in files if not file.endswith(".py")}.difference(
        *(each.files for each in unedited.values())
    )
    for lab, folder in course.folders(ROOT).items():
        unreached |= {file for file in files if file.startswith(f"course/{folder.name}/")} - set(unedited[lab].files)
    assert sorted(file for file in unreached if not any(re.fullmatch(known, file) for known in LEFT_OUT)) == []
    assert [known for known in LEFT_OUT if not any(re.fullmatch(known, file) for file in unreached)] == []


def fingerprints(paths):
    library = Library(ROOT)
    return {name: fingerprint(masters.solution(path), library) for name, path in paths.items()}
