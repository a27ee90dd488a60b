"""Exhibits of tokens that depend on their neighbours: a penalty that does, a rounding that may."""

import random
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from course.kit.receipts import Row, row
from course.lab22_bug_museum import serving_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Measurement, Suspect, WrongFix
from course.lab22_bug_museum.serving_runs import SMALL, Asked, Served, Traffic, runs, serve, tokens
from course.shared.faults import serving as faults
from course.shared.measuring import one_thread
from course.shared.table import Table, table
from minillm.model import Transformer
from minillm.serve import SamplingParams

BY_LENGTH = "order = sorted(range(len(seen)), key=lambda s: (query_lens[s], seen[s]))"


# Tokens that somebody else has seen.


def _penalised(draw: random.Random) -> Traffic:
    """Eight requests with a repetition penalty and two without, two at a time."""
    penalty = SamplingParams(12, repetition_penalty=1.5)
    asked = [Asked(tokens(draw, 10 + 8 * number), penalty) for number in range(8)]
    asked += [Asked(tokens(draw, 12), SamplingParams(8)) for _ in range(2)]
    return Traffic(tuple(asked), {"max_num_seqs": 2})


PENALTY = Exhibit(
    name="noon-and-night",
    title="Other answers at noon than at night",
    kind="serving",
    symptom=(
        "A customer who uses a repetition penalty gets other answers at noon than at night, with greedy decoding and "
        "the same prompt. At night, on an idle server, they are the reference's. Requests without a penalty are the "
        "reference's at any hour. A restart helps for some minutes."
    ),
    faults=(faults.STALE_ROW,),
    run=runs(_penalised),
    looks=lambda served: [
        *seen.plausible(served),
        row("wrong tokens of requests without a penalty", 0, sum(served.wrong[8:])),
        row("wrong tokens of the first two requests", 0, sum(served.wrong[:2])),
    ],
    trace=lambda served: [seen.same_tokens(served)],
    measurements=(seen.ANSWERS, seen.ALONE, seen.ONE_SEAT, seen.NO_CACHE, seen.STEPS, seen.HOLDERS, seen.POOL),
    innocents=(
        Suspect(
            "numerics",
            "the composition of the batch changes the rounding of the logits",
            "This runs in float32, and requests without a penalty are right to the last token in the same batches.",
        ),
        Suspect(
            "prefix cache",
            "a hit hands over another prompt's keys",
            "The answers are wrong without a prefix cache as well.",
        ),
        Suspect(
            "sampler, tokens seen",
            "the tokens of the prompt are left out of the penalty",
            "Then the first request on a new server would be wrong, too, and each request alone.",
        ),
        Suspect(
            "scheduler",
            "a preempted sequence has its tokens counted twice",
            "Nobody is preempted, and a token that is seen twice is punished no more than one that is seen once.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "add, and do not clear",
            "The row now gets all tokens of the new sequence and keeps those of the old one.",
            ({"cleared.append(row)": "pass"},),
        ),
        WrongFix(
            "clear, and do not add",
            "The row is empty now, and the tokens that the sequence had before, its prompt among them, are never "
            "written into it.",
            ({"            known = 0\n": ""},),
        ),
        WrongFix(
            "only a row that nobody had",
            "This clears a row when it is used for the first time, the one time when it is empty anyway.",
            ({faults.HOLDER: "if holder is None or known > len(tokens):"},),
        ),
    ),
    investigation=(
        Clue(
            "one-at-a-time",
            "Every request is right on an engine of its own. So it is neither the model nor the penalty's formula, but "
            "something that one request leaves for another.",
        ),
        Clue(
            "one-seat",
            "With one sequence at a time they never meet in a batch, and they are wrong all the same: they meet in "
            "what stays behind. Only penalised requests are wrong, so it is the penalty's own memory.",
        ),
    ),
    misleading=Clue(
        "block-tables",
        "State that one request leaves for another suggests the blocks of keys, and every block is accounted for. An "
        "engine keeps more than blocks for each row: seeds, tokens seen, tables, draft models.",
    ),
    lesson=(
        "Rows that outlive their sequence are a cache. List all state that is kept by row and say for each what clears "
        "it; then test each request alone, after another, and beside another. Three tests, three kinds of leak."
    ),
    proof=seen.against_the_loop(_penalised),
)


# Rounding that depends on the batch.


@cache
def _in(dtype: torch.dtype) -> Transformer:
    """The weights that bfloat16 has, in any precision."""
    return Transformer(replace(SMALL, num_layers=4), seed=2).to(torch.bfloat16).to(dtype)


def _low_precision(draw: random.Random) -> Traffic:
    asked = tuple(Asked(tokens(draw, draw.randint(8, 40)), SamplingParams(40)) for _ in range(10))
    return Traffic(asked, {"num_blocks": 256, "max_num_seqs": 10}, _in(torch.bfloat16))


@dataclass(frozen=True)
class Parting:
    """Where an answer stops to be that of minillm's own grouping. gap: of the two tokens' logits in float64; error: of
    bfloat16's logits there, at most, by the model without any engine."""

    request: int
    place: int
    gap: float
    error: float

    @property
    def is_a_tie(self) -> bool:
        """Each logit may be off by `error`, so that either token may come out the larger one."""
        return self.gap <= 2 * self.error


@lru_cache(maxsize=4)
def _partings(served: Served) -> list[Parting]:
    before, found = serve(served.traffic, ()), []
    for number, asked in enumerate(served.traffic.asked):
        pairs = zip(served.answers(number)[0], before.answers(number)[0], strict=True)
        place, tokens = next(((p, pair) for p, pair in enumerate(pairs) if pair[0] != pair[1]), (0, None))
        if tokens is not None:
            ids = torch.tensor([[*asked.prompt, *served.answers(number)[0][:place]]])
            with one_thread(), torch.inference_mode():
                exact, rounded = (_in(dtype)(ids)[0, -1].double() for dtype in (torch.float64, torch.bfloat16))
            gap = float((exact[tokens[0]] - exact[tokens[1]]).abs())
            found.append(Parting(number, place, gap, float((exact - rounded).abs().max())))
    return found


def _in_float32(served: Served) -> Served:
    return served.again(
        replace(served.traffic, model=_in(torch.float32), asked=tuple(map(_shorter, served.traffic.asked)))
    )


def _shorter(asked: Asked) -> Asked:
    return replace(asked, params=replace(asked.params, max_tokens=6))


def _show_partings(served: Served) -> Table:
    rows = [(str(its.request), its.place, its.gap, its.error) for its in _partings(served)]
    heads = ("request", "token", "gap of the two logits in float64", "largest error of bfloat16's logits there")
    return table("where answers part from last week's", heads, rows)


def _show_float32(served: Served) -> Table:
    again = _in_float32(served)
    rows = [(str(number), wrong) for number, wrong in enumerate(again.wrong)]
    return table("the same requests in float32", ("request", "tokens that differ from the naive loop"), rows)


def _show_counts(served: Served) -> Table:
    before = serve(served.traffic, ())
    numbers = range(len(served.outputs))
    changed = sum(served.answers(number) != before.answers(number) for number in numbers)
    return table("greedy answers in bfloat16", ("", "value"), [(f"other than last week, of {len(numbers)}", changed)])


def _stays_right(served: Served) -> list[Row]:
    partings = _partings(served)
    return [
        seen.same_tokens(_in_float32(served), "float32: tokens that are not the naive loop's"),
        row("bfloat16: answers that part at a tie", len(partings), sum(its.is_a_tie for its in partings)),
    ]


ROUNDING = Exhibit(
    name="other-than-last-week",
    title="Greedy, and another answer than last week",
    kind="serving",
    symptom=(
        "Since a change of how sequences are grouped for attention, some greedy answers in bfloat16 are not last "
        "week's, and some change with what else is in the batch. A regression test compares texts and is red. "
        "Temperature is 0, so it must be a bug. Find it, or say why it is none."
    ),
    faults=(faults.OTHER_GROUPS,),
    verdict="sums in another order round otherwise, and two tokens were nearly equal",
    run=runs(_low_precision),
    looks=lambda served: [
        *seen.plausible(served),
        row("greedy answers have changed", True, len(_partings(served)) > 0),
    ],
    trace=_stays_right,
    measurements=(
        Measurement("texts", 5, "how many answers are other than last week's", _show_counts),
        Measurement("float32", 10, "the same requests in float32, beside the naive loop", _show_float32),
        Measurement("partings", 20, "where answers part, and how close the two tokens are in float64", _show_partings),
        seen.HITS,
        seen.HOLDERS,
        seen.POOL,
    ),
    innocents=(
        Suspect(
            "attention, padding",
            "sequences see the padding of longer ones in their group",
            "In float32 the same groups give the naive loop's answers to the last token; padding would show there, "
            "too.",
        ),
        Suspect(
            "block pool",
            "a block has two owners",
            "No block stands in two tables, and float32 is right with the same tables.",
        ),
        Suspect(
            "sampler",
            "ties are broken at random",
            "The larger logit wins and of equals the lower id: nothing is drawn at temperature 0.",
        ),
        Suspect(
            "prefix cache",
            "cached keys were computed in another batch and are slightly other",
            "No prompt shares a block with another here. (In low precision that effect exists as well.)",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "the order of the batch",
            "The groups need their sequences in order of length; without it some read keys that are not theirs, and "
            "the answers are wrong in float32, too.",
            ({BY_LENGTH: "order = list(range(len(seen)))"},),
        ),
        WrongFix(
            "no mask where a key is missing",
            "It is the mask that keeps padding out. Without it a sequence depends on the longest one beside it, in any "
            "precision.",
            ({'masked_fill_(places < 0, float("-inf"))': "masked_fill_(places < 0, 0.0)"},),
        ),
    ),
    investigation=(
        Clue(
            "float32",
            "In float32 every answer is the naive loop's, whatever the groups: the logic is right, and what is left is "
            "precision.",
        ),
        Clue(
            "partings",
            "Where an answer parts from last week's, float64 sees the two tokens closer together than bfloat16 can "
            "resolve. Both are right roundings of a tie; from there on the texts are different texts.",
        ),
    ),
    misleading=Clue(
        "texts",
        "The number of changed texts says how often a near tie is met in 40 tokens. One tie is enough for a text, so "
        "this counts the length of answers more than the size of an error.",
    ),
    lesson=(
        "Compare logits with a tolerance, and texts only in float32. It is a bug when the difference is larger than "
        "the rounding, or when somebody was promised the same bits in any batch: then every kernel has to keep its "
        "order of summation, and that has a price."
    ),
)

EXHIBITS = (PENALTY, ROUNDING)
