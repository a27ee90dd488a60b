"""The mock interview: every number of every card, every drill, tasks that are really run."""

import ast
import builtins
import math
import random
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from course.kit import course, exercises, masters
from course.kit.answers import names_of
from course.lab24_interview import deck, drills, sheet, tasks
from course.shared.decisions import judge
from minillm.__main__ import run

ROOT = Path(__file__).parents[3]
ALLOWED = re.compile(  # digits that are names, not numbers
    r"\b(?:19|20)\d\d\b|H100|A100|Llama [23]|DeepSeek-V3|Mixtral 8x7B|ZeRO-?\s?[123]|1F1B|GPT-3|NF4|int[48]|fp16|fp32|"
    r"UTF-8|LoRA|FSDP2|2\^-?\d+|lab \d\d|\d+-bit|log2|TP \d+|(?:16|32|64) bits|p99|top-\d+"
)


ASSUMED = {  # what an answer supposes, or quotes with its source: nothing computes it
    "25",  # MB of a bucket, torch's default
    "126", "128",  # layers of Llama 3 405B on places of its pipeline
    "80",  # GB on a data sheet, layers of a 70B model
    "100", "1,000",  # lengths of the example of packing
    "10", "0.4", "0.8",  # per cent of bubble that is asked for; two distributions of an example
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))


@pytest.mark.parametrize("seed", range(60))
def test_a_drill_refuses_the_mistake_that_it_drills(seed):
    """Rounds of N or 2N, whole things rounded the other way or not at all."""
    rounds = drills.DRILLS["ring_rounds"](random.Random(seed))
    assert [judge(rounds, rounds.value + more).kind for more in (0, 1, 2)].count("right") == 1
    for name, up in (("blocks", False), ("shared_blocks", True)):
        drill = drills.DRILLS[name](random.Random(seed))
        numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", drill.question)]
        size, count, tokens = numbers if name == "blocks" else (numbers[2], numbers[0] - 1, numbers[1])
        other = -(-tokens // size) if up else tokens // size
        assert judge(drill, count * other).kind != "right", drill.question
        assert tokens % size == 0 or judge(drill, count * tokens / size).kind != "right", drill.question
    for name in ("nodes", "enough_microbatches"):
        drill = drills.DRILLS[name](random.Random(seed))
        assert {judge(drill, drill.value + more).kind for more in (-1, 1)} <= {"far", "slip"}, drill.question


@pytest.mark.parametrize("topic", deck.topics())
def test_every_number_of_a_card_is_computed(topic):
    for card in deck.of_topic(topic):
        answer = card.answer
        assert answer and "{" not in answer and card.follow_ups and card.proof, card.question
        assert all(question.endswith((".", "?")) and reply[-1] in ".:" for question, reply in card.next_asked)
        assert "{" not in str(card)
        written = " ".join([card.template, *dict(card.follow_ups).values()])
        inputs = " ".join(re.findall(r"\{\{.*?\}\}", written))  # what the answer assumes is what it computes with
        given = set(re.findall(r"\d[\d,.]*\d|\d", f"{card.question} {inputs}"))
        given |= {f"{float(each):,.0f}" for each in re.findall(r"[\d.]+e\d+|\d+", inputs)}
        given |= {number for text in dict(card.follow_ups) for number in re.findall(r"\d[\d,.]*\d|\d", text)}
        typed = ALLOWED.sub("", re.sub(r"\{\{.*?\}\}", "", written))
        for number in re.findall(r"\d[\d,.]*\d", typed):  # a single digit is a coefficient of a formula
            whole = number.rstrip(".,")
            assert whole in given | ASSUMED or _is_formula(typed, number), f"{whole} in {card.template!r} is typed"


def _is_formula(text: str, number: str) -> bool:
    """Part of an expression that the sentence spells out: next to an operator."""
    return bool(re.search(rf"[·/+\-−=^(√]\s?{re.escape(number)}|{re.escape(number)}e?\d*\s?[·/+\-−^)e]", text))


def test_the_deck_is_large_and_its_questions_differ():
    cards = deck.deck()
    assert len(cards) >= 250 and len({card.key for card in cards}) == len(cards)
    assert {card.level for card in cards} == set(deck.LEVELS)
    assert set(drills.TOPICS) == set(deck.topics()) and set(tasks.TASKS.values()) <= set(deck.topics())


def test_every_proof_exists():
    for proof in {card.proof for card in deck.deck()}:
        if proof.startswith("lab "):
            assert any((ROOT / "course").glob(f"lab{proof[4:]}_*")), proof
        else:
            assert (ROOT / "minillm" / proof).is_dir() or (ROOT / "minillm" / f"{proof}.py").exists(), proof


@pytest.mark.parametrize("kind", drills.DRILLS)
def test_drills_accept_their_value_and_name_their_slips(kind):
    for seed in range(400):  # all numbers that most kinds can have
        decision = drills.DRILLS[kind](random.Random(seed))
        assert judge(decision, decision.value).kind == "right"
        for factor, sentence in decision.slips.items():
            assert judge(decision, factor * decision.value).sentence == sentence, decision.question


def ring(size, ranks):
    """Bytes that one rank passes on in N-1 rounds of a part of 1/N."""
    return sum(size / ranks for _ in range(ranks - 1))


SECOND = {  # kind: another way to the same number, from the numbers of the question in their order
    "all_reduce": lambda size, ranks: ring(size, ranks) + ring(size, ranks),
    "reduce_scatter": ring,
    "ring_rounds": lambda ranks: len(range(1, ranks)) * 2,
    "two_levels": lambda nodes, each: 2 * (nodes + each) - 4,
    "transfer": lambda gigabytes, gigabits: 8 * gigabytes / gigabits,
    "matmul_flops": lambda m, k, k2, columns: sum(2 * k for _ in range(m)) * columns,
    "message_time": lambda size, micros, rate: (micros * rate * 1e3 + size * 1e6) / (rate * 1e9),
    "half_way": lambda micros, rate: micros * rate * 1e3,
    "checkpoint_size": lambda billions, bits: 3 * billions * bits / 8 * 1e9,
    "save_time": lambda billions, each, rate: billions / (rate / each),
    "job_failures": lambda gpus, years: years * 365 * 24 / gpus,
    "run_cost": lambda gpus, days, price: price * 24 * gpus * days,
    "energy": lambda gpus, watts, days: gpus * (watts / 1e3) * (days * 24) / 1e3,
    "mfu": lambda billions, speed, gpus, tera: speed / (gpus * tera * 1e12 / (billions * 6e9)),
    "logits": lambda tokens, words, bits: tokens * (words * bits) / 8,
    "stage_message": lambda size, seq, hidden, bits: size * seq * (hidden * bits / 8),
    "in_flight": lambda stage, first, stages, schedule, count: min(count, len(range(stage, stages))),
    "enough_tokens": lambda billions: billions * 1e9 * 20,
    "slow_rank": lambda percent: percent / (100 + percent),
    "enough_microbatches": lambda stages, percent: next(
        m for m in range(1, 999) if (stages - 1) * 100 <= percent * (m + stages - 1)
    ),
    "in_service": lambda rate, seconds: sum(rate for _ in range(seconds)),
    "nodes": lambda rate, tokens, node, percent: next(
        m for m in range(1, 9999) if m * node * percent >= 100 * rate * tokens
    ),
    "load_time": lambda billions, bits, rate: billions / 8 * bits / rate,
    "blocks": lambda size, count, tokens: count * len(range(0, tokens, size)),
    "shared_blocks": lambda count, tokens, size: count * (tokens // size) - tokens // size,
    "tail": lambda nth, percent: next(
        t / 1000 for t in range(10**6) if percent / 100 * math.exp(-(1 - percent / 100) * t / 1000) <= 0.01
    ),
    "waiting": lambda percent: sum(k * (percent / 100) ** k * (1 - percent / 100) for k in range(2000)),
    "overlap": lambda p, p2, q, q2: 1 - (abs(p - q) + abs(p2 - q2)) / 2,
    "accepted": lambda alpha, k: sum(alpha**i for i in range(k + 1)),
    "faster": lambda alpha, k, cost: sum(alpha**i for i in range(k + 1)) / (1 + k * cost),
    "group_bits": lambda bits, scale, group: (group * bits + scale) / group,
    "quantized": lambda billions, bits: billions * bits * 1.25e8,
    "layer_cache": lambda tokens, heads, dim, bits: tokens * heads * dim * bits / 4,
    "token_price": lambda price, speed: price / 3.6 / speed * 1e3,
    "kernel_time": lambda millions, bits, terabytes: 3 * millions * bits / 8 / terabytes,
    "passes_saved": lambda kernels: sum(2 for _ in range(kernels)) / 2,
    "launch_bound": lambda layers, kernels, micros: sum(kernels for _ in range(layers)) * micros / 1e3,
    "tile_reads": lambda size, size2, tile, tile2: len(range(0, size, tile)),
    "ridge": lambda tera, bandwidth: tera / bandwidth,
    "adapter": lambda rank, rows, columns: rank * rows + rank * columns,
    "states": lambda billions, each, ranks: billions * 1e9 / ranks * each,
    "save_interval": lambda save, hours: min(range(1, 99999), key=lambda t: save / t + t / 7200 / hours),
}  # what is not here (models by name, several sentences) is computed by minillm.predict and tested there
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def numbers_of(kind, question):
    """As printed; sizes with their prefix where the other formula wants bytes."""
    found = re.findall(r"(?<![\w.-])(\d[\d,]*\.?\d*)(?: ?([kMGT])(?=B|FLOP))?", question.replace("H100", ""))
    scaled = kind in ("all_reduce", "reduce_scatter", "ridge")
    return [
        float(digits.replace(",", "")) * (UNITS.get(prefix, 1) if scaled else 1)
        if "." in digits or prefix
        else int(digits.replace(",", ""))
        for digits, prefix in found
    ]


@pytest.mark.parametrize("kind", SECOND)
def test_a_drill_agrees_with_another_formula(kind):
    for seed in range(12):
        decision = drills.DRILLS[kind](random.Random(seed))
        again = SECOND[kind](*numbers_of(kind, decision.question))
        assert again == pytest.approx(decision.value, rel=2e-3), decision.question


@pytest.mark.parametrize("seed", range(12))
def test_reports_say_what_their_answer_says(seed):
    hang = drills.DRILLS["hang_report"](random.Random(seed))
    behind = re.findall(r"rank (\d+): #\d+ \w+, completed", hang.question)
    assert [int(rank) for rank in behind] == [hang.value]
    assert judge(hang, 0).kind == ("far" if hang.value else "right"), "rank 0 is a guess like any other"
    assert "waits" in judge(hang, hang.value + 1).sentence
    slow = drills.DRILLS["slow_steps"](random.Random(seed))
    waits = [float(wait) for wait in re.findall(r"of it ([\d.]+) s", slow.question)]
    assert min(range(len(waits)), key=waits.__getitem__) == slow.value
    timeline = drills.DRILLS["exposed"](random.Random(seed))
    (_, end), *sent = [(int(a), int(b)) for a, b in re.findall(r"(\d+) to (\d+)", timeline.question)]
    assert sum(moment >= end for first, last in sent for moment in range(first, last)) == timeline.value


def test_there_are_thirty_kinds_and_each_belongs_to_a_topic():
    assert len(drills.DRILLS) >= 30 and len(SECOND) >= 30
    assert {kind for kinds in drills.TOPICS.values() for kind in kinds} == set(drills.DRILLS)
    assert all(len(kinds) >= 3 for kinds in drills.TOPICS.values())


@pytest.mark.full
def test_there_are_twenty_tasks_each_with_mistakes_and_all_can_be_written_down(monkeypatch):
    for kind in ("lab", "solution"):  # several tasks come from one master
        monkeypatch.setattr(masters, kind, cache(getattr(masters, kind)))
    names = tasks.of_topic("")
    assert len(names) >= 20
    for name in names:
        made, known = tasks.task(name), exercises.answers(name)
        assert "check(" not in made.stub and "BEGIN SOLUTION" not in made.stub
        assert sum(answer.wrong for answer in known) >= 3 and not all(answer.wrong for answer in known)
        code = ast.parse(made.stub)
        defined = {node.name for node in code.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert {node.id for node in ast.walk(ast.parse(made.candidate)) if isinstance(node, ast.Name)} <= defined, name
        assert unexplained(made) == set(), name
        reads, binds = names_of(ast.parse(solved(made)))
        assert reads <= binds | set(dir(builtins)), f"{name} leaves out {sorted(reads - binds - set(dir(builtins)))}"


def unexplained(made: tasks.Task) -> set[str]:
    """Arguments of what is to be written that neither the statement nor a docstring speaks of."""
    _, _, code = made.stub.partition(tasks.YOURS)
    asked = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)]
    words = made.statement + " ".join(
        ast.get_docstring(node) or "" for node in ast.walk(ast.parse(code)) if _documents(node)
    )
    names = {argument.arg for node in asked for argument in node.args.args} - {"self", "factor"}
    return {name for name in names if not re.search(rf"\b{name}\b", words)}


def _documents(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)


def solved(made: tasks.Task) -> str:
    """The lab's imports, what the file gives, and the solved cell up to the check: a candidate's file."""
    exercise = exercises.find(made.name)
    cells = masters.solution(course.masters(ROOT)[exercise.lab]).cells
    cell = next(cell.source for cell in cells if made.name in masters.checked(cell))
    first = ast.parse(next(cell.source for cell in cells if cell.cell_type == "code")).body
    imports = "\n".join(ast.unparse(node) for node in first if isinstance(node, ast.Import | ast.ImportFrom))
    given = made.stub.partition(tasks.YOURS)[0]
    return f"{imports}\n{given}" + "\n".join(line for line in cell.split("\n") if "check(" not in line)


@pytest.mark.parametrize(  # a function, a class, one that runs on ranks and stands on an earlier exercise
    "name", ["residual", "block-pool", pytest.param("parallel-mlp", marks=pytest.mark.full)]
)
def test_a_task_accepts_the_reference_written_down_and_rejects_what_stops(name):
    made = tasks.task(name)
    assert made.judge(solved(made)).passed
    assert not made.judge(made.stub).passed
    assert "stopped" in made.judge("raise RuntimeError('no')").said
    assert "SyntaxError" in made.judge("def (").said
    for leaves in ("exit()", "quit()", "import sys; sys.exit(3)"):
        assert "called exit(): leave it out" in made.judge(leaves).said and not sys.stdin.closed
    assert "EOFError" in made.judge("input()").said, "the session's own lines are not the file's"


def test_exit_inside_the_function_ends_no_session():
    made = tasks.task("kv-bytes")
    assert "exit()" in made.judge("def kv_bytes(*_):\n    exit()\n").said and not sys.stdin.closed


def test_what_earlier_exercises_built_is_given():
    stub = tasks.task("parallel-mlp").stub
    assert stub.index(tasks.GIVEN) < stub.index("class Leave") < stub.index(tasks.YOURS) < stub.index("def mlp")
    assert tasks.GIVEN not in tasks.task("kv-bytes").stub


def test_a_sheet_is_a_page_to_print(tmp_path):
    page = tmp_path / "page.html"
    assert run(["interview", "--topic", "pipeline", "--sheet", str(page)]) == 0
    text = page.read_text()
    assert text.count("<div>") == len(deck.of_topic("pipeline")) and text == sheet.page("pipeline")
