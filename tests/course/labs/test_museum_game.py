"""The museum's game, its command, and what --plant writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course.commands import museum as command
from course.lab22_bug_museum import museum
from course.lab22_bug_museum.game import WRONG_ACCUSATION, Case, failure_of, sentence, visit
from course.lab22_bug_museum.plant import PLANTABLE, plant, write_fault
from course.shared.faults.patches import Patch, adopted, code_hash, planted, sound, sound_source

TARGET = "minillm.data.sampler:ShardedSampler.indices"


def culprits(case: Case) -> list[str]:
    return [letter for letter, suspect in case.suspects.items() if suspect.is_culprit]


def innocents(case: Case) -> list[str]:
    return [letter for letter, suspect in case.suspects.items() if not suspect.is_culprit]


def test_measurements_cost_minutes_once():
    case = visit("utilisation", seed=1)
    assert "FLOPs per token" in repr(case.order("implied-flops"))
    case.order("implied-flops")
    assert case.spent == 5
    with pytest.raises(ValueError, match="cannot be ordered: choose from"):
        case.order("horoscope")


def test_minutes_run_out():
    case = visit("utilisation", seed=1)
    case.accuse(*innocents(case)[:2])
    assert case.left == case.exhibit.budget - 2 * WRONG_ACCUSATION
    with pytest.raises(ValueError, match="minutes and 10 are left"):
        case.order("peak")


def test_wrong_accusation_says_why_and_costs():
    case = visit("two-gpus-one-run", seed=1)
    letter = innocents(case)[0]
    assert case.suspects[letter].innocent_because in repr(case.accuse(letter))
    assert not case.solved and case.spent == WRONG_ACCUSATION
    one, other = culprits(case)
    assert "1 of 2 culprits" in repr(case.accuse(one))
    assert case.accuse(other).good and case.solved
    with pytest.raises(ValueError, match="no suspect 'z'"):
        case.accuse("z")


def test_debrief_and_code_open_with_the_culprit():
    case = visit("utilisation", seed=1)
    assert case.exhibit.lesson not in repr(case.debrief())
    with pytest.raises(ValueError, match="accuse first"):
        case.code()
    case.accuse(*culprits(case))
    assert case.exhibit.lesson in repr(case.debrief()) and "def _mfu" in repr(case.code())
    assert case.score == 100


def test_giving_up_scores_nothing():
    case = visit("utilisation", seed=1)
    assert case.exhibit.lesson in repr(case.debrief(give_up=True)) and case.score == 0
    case.accuse(*culprits(case))
    assert case.score == 0


def test_repair_is_judged():
    case = visit("utilisation", seed=1)
    own = sound(case.exhibit.faults[0].target)
    assert case.repair(own).good and case.repaired
    wrong = case.repair(lambda self, tokens, seconds: self.nothing)
    assert not wrong.good and "AttributeError" in repr(wrong)


def test_sentence_of_a_wrong_fix():
    its = museum.exhibit("utilisation")
    fix = its.wrong_fixes[1]
    assert sentence(its, failure_of(its, fix, 3), 3) == fix.says


def test_edit_of_a_text_that_is_gone_is_refused():
    with pytest.raises(ValueError, match="stands 0 times"):
        Patch(TARGET, {"no such text": ""}).replacement()


def test_patches_end_after_an_error_and_nest():
    before = code_hash(TARGET)
    one = Patch(TARGET, {"position + self.rank + self": "position + self"})
    other = one.with_code(lambda self, position: None)
    with pytest.raises(KeyError), planted([one]):
        assert code_hash(TARGET) != before
        with planted([other]):
            assert sound_source(TARGET).strip()
        raise KeyError
    assert code_hash(TARGET) == before


def test_second_patch_that_cannot_be_planted_leaves_nothing_behind():
    before = code_hash(TARGET)
    with pytest.raises(ValueError), planted([Patch(TARGET, {"self.rank + ": ""}), Patch(TARGET, {"nowhere": ""})]):
        pass
    assert code_hash(TARGET) == before


def test_learners_function_knows_the_module_that_it_moves_into():
    namespace: dict = {}
    exec("def indices(self, position):\n    return np.arange(position)", namespace)
    assert list(adopted(namespace["indices"], TARGET)(None, 3)) == [0, 1, 2]
    assert "np" not in namespace


def play(words: list[str], name: str = "utilisation") -> str:
    said, answers = [], iter(words)

    def ask(_prompt: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    command.play(visit(name, seed=1), ask, lambda thing: said.append(str(thing)))
    return "\n".join(said)


def test_played_in_a_terminal(tmp_path):
    file = tmp_path / "fix.py"
    file.write_text(
        f"from __future__ import annotations\n{sound_source(museum.exhibit('utilisation').faults[0].target)}"
    )
    letters = culprits(visit("utilisation", seed=1))
    said = play(
        [
            "card",
            "order by-hand",
            "dance",
            "order 'by",
            "code",
            *[f"accuse {x}" for x in letters],
            f"fix {file}",
            "debrief",
        ]
    )
    for part in ("to all positions", "Type one of", "accuse first", "the trace is gone", "Your score: "):
        assert part in said, part
    assert "No closing quotation" in said


def test_file_without_the_function_is_refused(tmp_path):
    file = tmp_path / "fix.py"
    file.write_text("def other(): ...\n")
    assert "defines no _mfu" in play([f"fix {file}"])
    file.write_text("1 / 0\n")
    assert "ZeroDivisionError" in play([f"fix {file}"])
    assert "is no file" in play([f"fix {tmp_path / 'none.py'}"])


def test_command_lists_and_refuses(capsys):
    assert command.command(exhibit=None, seed=None, fix=None, plant=None, out=None) == 0
    assert "two-gpus-one-run" in capsys.readouterr().out
    with pytest.raises(ValueError, match="did you mean 'utilisation'"):
        command.command(exhibit="utilization", seed=None, fix=None, plant=None, out=None)


@pytest.mark.full
def test_planted_run_repeats_its_log(tmp_path):
    folder, number = tmp_path / "run", 7
    sheet = plant(number, folder)
    assert "The culprit" in sheet.read_text() and sheet.parent == tmp_path
    log = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()[1:]]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "run.py"], cwd=folder, capture_output=True, text=True, env=own)
    losses = [line.split()[3] for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses == [f"{float(row[1]):.6f}" for row in log], done.stderr
    with pytest.raises(ValueError, match="exists"):
        plant(number, folder)


@pytest.mark.parametrize("name", PLANTABLE)
def test_fault_can_be_written_into_a_copy(name, tmp_path):
    for fault in museum.exhibit(name).faults:
        path = Path(sys.modules[fault.target.partition(":")[0]].__file__)
        copy = tmp_path.joinpath(*fault.target.partition(":")[0].split(".")).with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
        write_fault(tmp_path, fault)
        assert all(line.strip() in copy.read_text() for new in fault.code.values() for line in new.splitlines())
        compile(copy.read_text(), str(copy), "exec")


def test_notebook_names_exhibits_that_there_are():
    cells = json.loads((Path(__file__).parents[3] / "labs/22_bug_museum.ipynb").read_text())["cells"]
    named = [line for cell in cells for line in cell["source"] if "visit(" in line and "import" not in line]
    assert named and all(museum.exhibit(line.partition('visit("')[2].partition('"')[0]) for line in named)
