"""Reports of a debugging round: each decides its questions, read here by a second program from what is printed."""

import json
import re
from collections import Counter
from random import Random

import pytest

from course.lab24_interview import in_notebook, mock, readings, results, rounds
from course.lab24_interview import session as sessions
from course.shared.decisions import judge

SEEDS = range(25)


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))


def values(kind, seed):
    its = readings.reading(f"{kind}:{seed}")
    return its.report, [decision.value for decision in its.decisions]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trace_decides_the_slow_rank_and_what_it_costs(seed):
    report, said = values("trace", seed)
    slices = [json.loads(line) for line in report.splitlines()[1:]]
    waits = {}
    for each in slices:
        if each["cat"] == "comm":
            compute = [(one["ts"], one["ts"] + one["dur"]) for one in slices if _computes(one, each["pid"])]
            alone = sum(
                not any(begin <= tick < end for begin, end in compute)
                for tick in range(each["ts"], each["ts"] + each["dur"], 500)
            )
            assert alone / 2 == each["args"]["waited_ms"], "what runs beside nothing is waited for"
            waits[each["pid"]] = waits.get(each["pid"], 0) + alone / 2
    slow = min(waits, key=waits.get)
    assert f"on rank {0 if slow else 1}?" in readings.reading(f"trace:{seed}").decisions[1].question
    assert said == [slow, waits[0 if slow else 1], waits[slow]] and list(waits.values()).count(waits[slow]) == 1


def _computes(one, rank):
    return one["cat"] == "compute" and one["pid"] == rank


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hang_report_decides_the_cause_and_its_direct_victims(seed):
    report, said = values("hang", seed)
    waits = {}
    for line in report.splitlines()[3:]:
        whom = re.search(r"rank (\d+)$", line)
        waits[int(line.split()[0])] = int(whom[1]) if whom else None
    ends = set()
    for rank in waits:
        while waits[rank] is not None:
            rank = waits[rank]
        ends.add(rank)
    (cause,) = ends
    direct = [rank for rank, whom in waits.items() if whom == cause]
    assert said == [cause, len(direct)] and len(direct) < len(waits) - 1, "and some wait for another victim"
    longest = max(
        (float(re.search(r"([\d.]+) s", line)[1]), int(line.split()[0]))
        for line in report.splitlines()[3:]
        if "rank" in line
    )
    assert longest[1] != cause, "who has waited longest is not the cause"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_log_of_connections_decides_the_line_and_the_size_of_a_node(seed):
    report, said = values("transport", seed)
    lines = {int(number): text for number, text in re.findall(r"^ *(\d+)  (n0.*)$", report, re.MULTILINE)}
    causes = [number for number, text in lines.items() if "IB_DISABLE" in text or "No device found" in text]
    away = re.search(r"(\d+)\[(\d+)\] -> (\d+)\[0\] \[send\] via NET/Socket", report)
    assert causes == [said[0]] and int(away[3]) == int(away[2]) + 1 == said[1]
    assert causes[0] < next(number for number, text in lines.items() if "Using network Socket" in text)
    assert f"nranks {2 * said[1]}" in report and readings.EXAMPLE in report


@pytest.mark.parametrize("seed", SEEDS)
def test_a_log_of_calls_decides_the_rank_that_differs(seed):
    report, said = values("calls", seed)
    text = re.sub(r"\n {6}", " ", report)
    calls = re.findall(r"\[(\d)\] NCCL INFO (\w+): opCount (\w+) .* count (\d+) datatype (\d)", text)
    kinds = Counter((call[1], call[3]) for call in calls)
    (usual, many), (odd, one) = kinds.most_common(2)
    assert many == 3 and one == 1 and len(calls) == 4 and len({call[2] for call in calls}) == 1
    assert said[0] == next(int(call[0]) for call in calls if (call[1], call[3]) == odd)
    assert said[1] == int(usual[1]) * {"7": 4, "9": 2}[calls[0][4]]


WRONG = {  # kind: (question, what is answered from the right values, what is said)
    "trace": (
        (0, lambda said: 3 - said[0], "waits for another one"),
        (1, lambda said: said[2], ""),
        (1, lambda said: 1000 * said[1], "A thousand times"),
        (2, lambda said: said[1] - said[2], "Those are the milliseconds that would go"),
        (2, lambda said: said[1], ""),
        (1, lambda said: f"{said[1]} s", "A thousand times"),
    ),
    "hang": (
        (0, lambda said: said[0] + 1, "follow the last column"),
        (0, lambda said: said[0] ^ 1, "follow the last column"),
        (0, lambda said: said[0] + 2, "follow the last column"),
        (1, lambda said: 2 * said[1] - 1, "some of them for its partner"),
        (1, lambda said: said[1] - 1, "too small"),
        (1, lambda said: said[1] + 1, "too large"),
    ),
    "transport": (
        (0, lambda said: said[0] + 1, "a consequence"),
        (0, lambda said: said[0] + 4, "a consequence"),
        (0, lambda said: said[0] - 1, "the same where InfiniBand works"),
        (1, lambda said: 2 * said[1], "That is nranks"),
        (1, lambda said: said[1] - 1, "too small"),
        (1, lambda said: said[1] + 1, "too large"),
    ),
    "calls": (
        (0, lambda said: said[0] + 1, "does what most of them do"),
        (0, lambda said: said[0] + 2, "does what most of them do"),
        (0, lambda said: said[0] + 0.5, "does what most of them do"),
        (1, lambda said: said[1] * 8, "That many bits"),
        (1, lambda said: said[1] // 2, ""),
        (1, lambda said: f"{said[1]} MB", "A million times"),
    ),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("seed", range(8))
def test_wrong_readings_are_refused_and_right_ones_accepted_as_they_may_be_written(kind, seed):
    its = readings.reading(f"{kind}:{seed}")
    said = [decision.value for decision in its.decisions]
    for question, answer, sentence in WRONG[kind]:
        verdict = judge(its.decisions[question], answer(said))
        assert verdict.kind in ("far", "slip") and sentence in verdict.sentence, (question, answer(said), verdict)
    for decision in its.decisions:
        written = [decision.value, f" {decision.value} ", float(decision.value)]
        written += [f"{decision.value} ms", f"{decision.value / 1e3} s"] if decision.unit == "ms" else []
        written += [f"{decision.value / 1e6:.5f} MB"] if decision.unit == "B" else []
        assert all(judge(decision, each).kind == "right" for each in written), decision.question


def test_a_reading_is_asked_in_a_debugging_round_and_counts_for_its_topic(tmp_path):
    items = rounds.items("debugging", "", 45, "", Random(1))
    assert [kind for kind, _ in items].count("reading") == 2
    session = sessions.Session(1, "", 10, [["reading", "hang:3"], ["reading", "hang:3"]])
    right = iter([*(str(decision.value) for decision in readings.reading("hang:3").decisions), "", "9", "x", "9", ""])
    said: list[str] = []
    mock.run(session, lambda _: next(right), said.append, tmp_path)
    assert [outcome for *_, outcome in session.done] == ["right", "far"] and any(
        "is no number" in line for line in said
    )
    assert results.results() == {"debugging": (1, 2)} and "readings: 1 of 2 well" in said[-1]
    assert readings.reading("hang:3").strong in said


def test_the_same_reading_in_a_notebook(capsys, monkeypatch):
    session = sessions.Session(1, "", 10, [["reading", "trace:2"]] * 3, kept=False)
    monkeypatch.setattr(sessions, "start", lambda *_, **__: session)
    interview = in_notebook.Interview(trial=True)
    interview.ask()
    interview.answer(1)
    interview.answer(["a", 1, 1])
    assert not session.done
    interview.answer([decision.value for decision in readings.reading("trace:2").decisions])
    interview.answer([1, 2, 3])
    interview.skip()
    out = capsys.readouterr().out
    assert "answer([3 numbers])" in out and "a list of 3 numbers" in out and "is no number" in out
    assert [outcome for *_, outcome in session.done] == ["right", "far", "skipped"] and "are exposed on rank" in out
