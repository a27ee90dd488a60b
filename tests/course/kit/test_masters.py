import pytest

from course.kit import masters

MASTER = '''# ---
# jupyter:
#   kernelspec:
#     display_name: Other
#     name: other
# ---

# %% [markdown]
# # Title

# %%
# %matplotlib inline
import os


# %%
def first(x):
    """x: [n]."""
    # BEGIN SOLUTION
    y = x

    # a comment
    return y
    # END SOLUTION


# %%
class Second:
    def one(self):
        # BEGIN SOLUTION
        if True:
            return 1
        # END SOLUTION
        return 0

    def two(self):
        return 2


first = check("first-one", first)

# %%
def third():
    # BEGIN SOLUTION
    return 3
    # END SOLUTION


third, second = check("third-one", third), check("x", 1)

# %% tags=["solution-only"]
print("secret")

# %%
1

# %%
1
'''


@pytest.fixture
def master(tmp_path):
    path = tmp_path / "lab90_demo" / "notebook.py"
    path.parent.mkdir()
    path.write_text(MASTER)
    return path


def sources(notebook):
    return [cell.source for cell in notebook.cells]


def test_lab_keeps_signatures_and_drops_answers(master):
    cells = sources(masters.lab(master))
    assert cells[0] == "# Title" and cells[1] == "%matplotlib inline\nimport os"
    assert cells[2] == 'def first(x):\n    """x: [n]."""\n    raise NotImplementedError'
    assert "    def one(self):\n        raise NotImplementedError\n        return 0\n\n    def two" in cells[3]
    assert "secret" not in "".join(cells) and "SOLUTION" not in "".join(cells)


def test_solution_keeps_answers_without_markers(master):
    text = "\n".join(sources(masters.solution(master)))
    assert "# a comment\n    return y" in text and "secret" in text
    assert "SOLUTION" not in text and "NotImplementedError" not in text


def test_only_one_exercise_solved(master):
    cells = sources(masters.lab(master, solved=["first-one"]))
    assert "return y" in cells[2] and "return 1" in cells[3] and "raise NotImplementedError" in cells[4]
    cells = sources(masters.lab(master, solved=["third-one"]))
    assert "NotImplementedError" in cells[2] and "NotImplementedError" in cells[3] and "return 3" in cells[4]


def test_ids_are_stable_unique_and_shared(master):
    before = {cell.source: cell.id for cell in masters.solution(master).cells}
    ids = [cell.id for cell in masters.solution(master).cells]
    assert len(set(ids)) == len(ids)
    assert {cell.id for cell in masters.lab(master).cells} < set(ids)
    master.write_text(MASTER.replace("# # Title", "# # Other title").replace("# %%\n1\n", "# %%\n2\n\n# %%\n1\n", 1))
    after = {cell.source: cell.id for cell in masters.solution(master).cells}
    kept = set(before) & set(after)
    assert len(kept) >= 5 and all(before[source] == after[source] for source in kept)


def test_metadata_is_minimal_and_says_python3(master):
    notebook = masters.lab(master)
    assert notebook.metadata["kernelspec"]["name"] == "python3" and notebook.metadata["language_info"] == {
        "name": "python"
    }
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert all(cell.metadata == {} for cell in notebook.cells)
    assert masters.write(notebook) == masters.write(masters.lab(master)) and masters.write(notebook).endswith("}\n")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("def f():\n    # BEGIN SOLUTION\n    return 1\n", r"90_demo, cell 'def f\(\):': .* line 2 has no '# END"),
        ("def f():\n    return 1\n    # END SOLUTION\n", "line 3 ends a solution that was never begun"),
        (
            "def f():\n    # BEGIN SOLUTION\n    # BEGIN SOLUTION\n",
            "line 3 begins a solution inside the one begun on line 2",
        ),
        ("# BEGIN SOLUTION\nx = 1\n# END SOLUTION\n", "line 1 begins a solution at column 0"),
        ("def f():\n    # begin\n    # BEGIN SOLUTION: x\n", "line 3 must read exactly"),
    ],
)
def test_unbalanced_markers_are_one_clear_error(master, cell, message):
    master.write_text("# %%\n" + cell)
    for derive in (masters.lab, masters.solution):
        with pytest.raises(ValueError, match=message):
            derive(master)


def test_raw_cells_are_refused(master):
    master.write_text("# %% [raw]\n# text\n")
    with pytest.raises(ValueError, match="90_demo has a raw cell"):
        masters.lab(master)


def test_script_by_the_same_rule(tmp_path):
    path = tmp_path / "lab90_demo" / "notebook.py"
    path.parent.mkdir()
    path.write_text(
        '"""Doc."""\n\n\ndef f():\n    # BEGIN SOLUTION\n    return 1\n    # END SOLUTION\n\n\nprint(f())\n'
    )
    assert masters.script(path) == '"""Doc."""\n\n\ndef f():\n    raise NotImplementedError\n\n\nprint(f())\n'


def test_checks_are_found_in_code_only(master):
    names = [masters.checked(cell) for cell in masters.lab(master).cells]
    assert [n for n in names if n] == [["first-one"], ["third-one", "x"]]
