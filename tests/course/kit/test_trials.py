"""Trials on ranks: what is noted, how rounds are counted, how a hang is told."""

import pytest
import torch

from course.kit.answers import answers_of
from course.kit.exercises import CheckFailed
from course.shared.trials import CollectiveCall, _say_hang, refuse_ready_made, rounds, try_on_ranks


def ring(world, laps=1):
    return [[([((r + 1) % world, 8)], [(r - 1) % world]) for _ in range(laps * (world - 1))] for r in range(world)]


def star(world):
    return [[([(r, 8)], []) for r in range(1, world)], *([([], [0])] for _ in range(1, world))]


def chain(world):
    steps = [[] for _ in range(world)]
    for r in range(world - 1):
        steps[r].append(([(r + 1, 8)], []))
        steps[r + 1].append(([], [r]))
    return steps


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_rounds_of_known_patterns(world):
    assert rounds(ring(world)) == world - 1
    assert rounds(ring(world, laps=2)) == 2 * (world - 1)
    assert rounds(star(world)) == world - 1
    assert rounds(chain(world)) == world - 1


def test_rounds_of_a_tree_and_of_everything_at_once():
    tree = [[([(1, 8)], []), ([(2, 8)], [])], [([], [0]), ([(3, 8)], [])], [([], [0])], [([], [1])]]
    assert rounds(tree) == 2
    others = [[(r + s) % 4 for s in (1, 2, 3)] for r in range(4)]
    assert rounds([[([(to, 8) for to in peers], peers)] for peers in others]) == 3  # one message per rank and round
    assert rounds([[([(to, 8) for to in sorted(peers)], peers)] for peers in others]) == 5  # all write to rank 0 first
    assert rounds([[], []]) == 0


def test_a_trial_notes_messages_bytes_and_input():
    cases = [CollectiveCall([torch.full((4,), float(r)) for r in range(world)]) for world in (2, 1)]
    two, one = try_on_ranks(answers_of("01_collectives").all_gather, cases)
    assert [t.result.tolist() for t in two] == [[0.0] * 4 + [1.0] * 4] * 2
    assert [(t.bytes, t.messages, dict(t.calls)) for t in two] == [(16, 1, {"exchange": 1})] * 2
    assert two[1].steps == [([(0, 16)], [0])]
    assert torch.equal(two[1].after, cases[0].inputs[1])
    assert (one[0].bytes, one[0].messages) == (0, 0)


def test_ready_made_collectives_are_refused():
    trials = try_on_ranks(lambda x, group: group.all_reduce(x), [CollectiveCall([torch.ones(4)] * 2)])
    with pytest.raises(CheckFailed, match="you called all_reduce, which is what you are to build"):
        refuse_ready_made(trials)
    with pytest.raises(CheckFailed, match="no message at all"):
        refuse_ready_made(try_on_ranks(lambda x, group: x, [CollectiveCall([torch.ones(4)] * 2)]))


@pytest.mark.parametrize(
    ("places", "advice"),
    [
        (("send", "send", "send"), "Deadlock: these ranks are all in send"),
        (("recv", "recv", "finished"), "nobody sends to them"),
        (("send", "recv", "finished"), "until you reach a rank that waits for nobody"),
    ],
)
def test_a_hang_comes_with_advice(places, advice):
    table = "rank  where\n----  -----\n" + "\n".join(f"{rank}     {where}" for rank, where in enumerate(places))
    assert advice in _say_hang(table)


def test_ranks_that_never_started_are_not_blamed_on_the_learner():
    said = _say_hang("rank  where\n----  -----\n0     all_reduce\n1     starting", "Enter every collective.")
    assert "has even started" in said and "wait for each other" not in said and "Enter every" not in said
    assert _say_hang("rank  where\n----  -----\n0     all_reduce", "Enter it.").endswith("Enter it.")
    said = _say_hang("rank  where\n----  -----\n0     in no operation, f, line 7: loop()\n1     finished", "Enter it.")
    assert said.startswith("no rank waits for a message")
