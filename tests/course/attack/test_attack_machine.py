"""The machine that attacks exercises: what it makes of an answer, what it finds, and what it does when one hangs."""

import ast

import pytest

from course.kit import exercises
from tests.course.attack import __main__ as command
from tests.course.attack import runner, table
from tests.course.attack.cells import Candidate, Cell, cell_of
from tests.course.attack.cheats import Call, cheats
from tests.course.attack.mutants import mutants
from tests.course.attack.variants import variants

TEXT = '''
def clipped(values, most):
    """values: list of numbers -> the same, none above most."""
    # BEGIN SOLUTION
    kept = []
    for value in values:
        if value > most:
            value = most
        kept.append(value)
    return kept
    # END SOLUTION


clipped = check("clip", clipped)
'''
CELL = Cell("clip", TEXT)
CALL = Call("clipped", ["list of int", "int"], [], "list of int", "((5,1),2)")


def test_a_mutant_changes_one_place_of_the_answer():
    found = mutants(CELL)
    edits = {mutant.edit for mutant in found}
    assert "if value > most: => if value >= most:" in edits
    assert "kept.append(value) => pass" in edits
    assert "for value in values: => for value in list(values)[1:]:" in edits
    assert len(edits) == len(found) == len({mutant.text for mutant in found})
    plain = ast.unparse(CELL.tree)
    assert all(mutant.text != plain and "def clipped(values, most):" in mutant.text for mutant in found)


def test_cheats_fit_what_the_check_hands_in():
    edits = {cheat.edit for cheat in cheats(CELL, [CALL])}
    assert {"clipped: spoils values", "clipped: most as at the first call", "clipped: its result one longer"} <= edits
    assert "clipped: computes in bfloat16" not in edits
    in_place = Call("clipped", ["list of int", "int"], [0], "argument 0", "((5,1),2)")
    assert "clipped: spoils values" not in {cheat.edit for cheat in cheats(CELL, [in_place])}


@pytest.mark.parametrize("variant", variants(CELL, [CALL]), ids=lambda variant: variant.edit)
def test_variants_compute_the_same(variant):
    scope = {"check": lambda name, answer: answer}
    exec(variant.text, scope)
    assert list(scope["clipped"]([5, 1, 3], 2)) == [2, 1, 2]


@pytest.mark.full
def test_a_process_tries_candidates_and_outlives_one_that_hangs(tmp_path):
    cell = cell_of("bits-per-byte")
    hangs = cell.prepared("mutant", "hangs", change="bits_per_byte = lambda *a: [None for _ in iter(int, 1)]")
    dies = cell.prepared("mutant", "dies", change="bits_per_byte = lambda *a: __import__('os')._exit(3)")
    none = cell.prepared("mutant", "returns none", change="bits_per_byte = lambda *a: None")
    right = Candidate(cell.exercise, "mutant", "right", cell.text)
    with runner.Worker() as worker:
        verdicts = {each.edit: runner.verdict_on(each, 5, 1.0, worker) for each in (hangs, dies, none, right)}
    assert {edit: verdict.status for edit, verdict in verdicts.items()} == {
        "hangs": "hangs",
        "dies": "failed",
        "returns none": "failed",
        "right": "passed",
    }
    assert not verdicts["right"].right and verdicts["dies"].message == "the process died"


def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    cell, tried = cell_of("bits-per-byte"), []
    found = mutants(cell)[:3]
    monkeypatch.setattr(runner, "candidates", lambda exercise, worker, seed: (found, 0.1))

    class Refusing:
        def tried(self, exercise, text, seeds, limit_s):
            tried.append(text)
            return {"status": "failed", "message": "wrong", "passes": 0, "seconds": 0.1}

    state = tmp_path / "state.jsonl"

    def run() -> list:
        return list(runner.attack("11_data_pipeline", state, 1, Refusing(), ["bits-per-byte"]))

    first = run()
    cut = state.read_text().splitlines(keepends=True)
    state.write_text("".join(cut[:2]) + cut[2][:20])
    assert run() == first and len(tried) == 4


def test_a_survivor_that_is_not_in_the_table_fails(tmp_path, monkeypatch, capsys):
    survivor = runner.Verdict("bits-per-byte", "cheat", "passes anyway", "0", "passed", "", 3, 0.1)
    monkeypatch.setattr(runner, "attack", lambda *_: iter([survivor]))
    assert command.main(["11"]) == 1
    assert "bits-per-byte\tcheat\tpasses anyway\tpasses 3 of 3" in capsys.readouterr().out
    entry = table.Entry("bits-per-byte", "allowed", "passes anyway", "the text asks for nothing else")
    monkeypatch.setattr(table, "read", lambda: {entry.key: entry})
    assert command.main(["11"]) == 0
    assert not table.excused({entry.key: entry}, "variant", entry.key)  # a right answer is not refused by allowance


def test_table_is_read_strictly(tmp_path):
    path = tmp_path / "table.txt"
    path.write_text("clip\tequivalent\ta => b\tsame numbers\nclip\tequivalent\ta => b\tsame numbers\n")
    with pytest.raises(ValueError, match=r"line 2 of table\.txt repeats"):
        table.read(path)
    path.write_text("clip\tharmless\ta => b\tsame numbers\n")
    with pytest.raises(ValueError, match=r"line 1 .* must be exercise, equivalent\|allowed\|forbidden"):
        table.read(path)


def test_every_line_of_the_table_is_of_an_exercise():
    names = {exercise.name for exercise in exercises.all_exercises()}
    entries = table.read()
    assert {entry.exercise for entry in entries.values()} <= names
    assert len(entries) <= MOST_ENTRIES, "the table may only shrink: mend the check, or say here why it grows"


@pytest.mark.full
def test_mutants_in_the_table_are_still_made():
    """An entry whose answer has changed is out of date: nobody would notice when its place is attacked again."""
    stale = []
    for exercise in {entry.exercise for entry in table.read().values()}:
        cell = cell_of(exercise)
        made = {each.edit for each in mutants(cell)}
        stale += [
            entry.edit
            for entry in table.read().values()
            if entry.exercise == exercise and " => " in entry.edit and ": " not in entry.edit.split(" => ")[0][:24]
            if entry.edit not in made
        ]
    assert not stale


# Most came with labs 17 to 25 and with the attack on labs 00 to 11, each with its reason in the table.
MOST_ENTRIES = 416
