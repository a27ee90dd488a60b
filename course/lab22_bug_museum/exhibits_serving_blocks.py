"""Exhibits of blocks: a copy that came too late, and a block that left too late."""

import random

from course.kit.receipts import row
from course.lab22_bug_museum import serving_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Suspect, WrongFix
from course.lab22_bug_museum.serving_runs import Asked, Served, Traffic, runs, tokens
from course.shared.faults import serving as faults
from minillm.serve import SamplingParams

# A fast path without copy on write.


def _samples(draw: random.Random) -> Traffic:
    """Prompts that end within a block, one sampled once and two four times."""
    first, second, third = tokens(draw, 21), tokens(draw, 19), tokens(draw, 17)
    once = SamplingParams(12, temperature=1.0, seed=draw.randrange(2**31))
    four = SamplingParams(12, temperature=1.0, n=4, seed=draw.randrange(2**31))
    return Traffic(
        (Asked(first, once), Asked(second, four), Asked(third, four)), {"record_blocks": True, "max_num_seqs": 9}
    )


def _written_together(served: Served) -> int:
    """Steps in which a decoding sequence wrote into a block that others held as well."""
    size = 8
    found = 0
    for record in served.records:
        for name, start, count in record.batch:
            blocks = (record.tables or {}).get(name, ())
            if count == 1 and start // size < len(blocks) and record.references[blocks[start // size]] > 1:
                found += 1
    return found


LATE_COPY = Exhibit(
    name="best-of-four",
    title="Best of four, and no better than one",
    kind="serving",
    symptom=(
        "A decoding step became a little faster last week. Since then best-of-4 hardly beats a single sample: users of "
        "n=4 say that the candidates read as if they interrupted each other. Requests with n=1, nine tenths of the "
        "traffic, are as good as they were."
    ),
    faults=(faults.LATE_COPY,),
    run=runs(_samples),
    looks=seen.plausible,
    trace=lambda served: [
        row("decoded tokens written into a block of several holders", 0, _written_together(served)),
        seen.same_tokens(served),
    ],
    measurements=(seen.ANSWERS, seen.HOLDERS, seen.POOL, seen.STEPS, seen.NO_CACHE, seen.BIG_POOL, seen.THROUGHPUT),
    innocents=(
        Suspect(
            "sampler",
            "the samples of a request share their random numbers",
            "Equal numbers would give equal answers. These differ, and no first token is wrong.",
        ),
        Suspect(
            "scheduler, fork",
            "the other samples get the first one's table and no reference of their own",
            "Every block counts as many holders as tables that hold it: the fork counts right.",
        ),
        Suspect(
            "prefix cache",
            "the samples hit blocks of each other's answers",
            "The answers differ without a prefix cache as well.",
        ),
        Suspect(
            "block pool",
            "it runs out, and a sample takes a block that is in use",
            "The pool is nearly empty, and with eight times the blocks nothing changes.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "two may share",
            "With two samples left in the block, each believes that it is alone enough. One holder is the only number "
            "that permits writing.",
            ({faults.OWN_BLOCK: faults.OWN_BLOCK.replace("== 1", "<= 2")},),
        ),
        WrongFix(
            "as many sequences as the request asked for",
            "After the fork each sample stands for one sequence, so this is always true. Whether a block is shared is "
            "known to the pool alone.",
            ({faults.OWN_BLOCK: "elif 0 < computed % size < size - 1 and sequence.num_seqs == 1:"},),
        ),
        WrongFix(
            "not at the beginning of a block",
            "This looks at where the token goes. Whether the block is shared does not depend on that, and a prompt "
            "may end anywhere in a block.",
            ({faults.OWN_BLOCK: "elif 1 < computed % size < size - 1:"},),
        ),
    ),
    investigation=(
        Clue(
            "answers",
            "n=1 is right and three of every four samples are wrong from one of their first tokens on, the last one "
            "not at all: whoever writes last wins. That is memory, not sampling.",
        ),
        Clue(
            "block-tables",
            "In the steps after the prompt four sequences hold the block that they write, and four holders are "
            "counted. The count is right, so whoever wrote did not ask for it.",
        ),
    ),
    misleading=Clue(
        "pool",
        "Six blocks were copied, as it should be for twice four samples, so copy on write seems to work. It came when "
        "the next block was begun, after the damage.",
    ),
    lesson=(
        "A fast path repeats the conditions of the slow one, all of them. Whoever adds one should write down which "
        "check makes it safe, and a test should hold it to the slow path on the rare case."
    ),
    proof=seen.against_the_loop(_samples),
)


# A block that is overwritten before it has left for the host.


def _swapping(draw: random.Random) -> Traffic:
    """Sequences that grow beyond a pool of 16 blocks, with room for them on the host."""
    engine = {"block_size": 4, "num_blocks": 16, "num_host_blocks": 32, "preemption": "swap", "max_num_seqs": 4}
    asked = tuple(Asked(tokens(draw, draw.randint(14, 20)), SamplingParams(20)) for _ in range(6))
    return Traffic(asked, {**engine, "prefix_cache": False})


def _wrong_by_preemption(served: Served) -> tuple[int, int]:
    """(wrong answers of requests that were never preempted, and of those that were)."""
    found = [0, 0]
    for output, wrong in zip(served.outputs, served.wrong, strict=True):
        found[output is not None and output.preemptions > 0] += wrong > 0
    return found[0], found[1]


LEFT_TOO_LATE = Exhibit(
    name="lost-thread",
    title="Answers that lose their thread under load",
    kind="serving",
    symptom=(
        "Under load, and never otherwise, some answers lose their thread in the middle of a sentence. Preemption by "
        "swapping was switched on a month ago, because recomputing was slow. Swapped blocks come back bit by bit as "
        "they were stored: somebody has already compared them on the host."
    ),
    faults=(faults.MOVED_AFTER,),
    run=runs(_swapping),
    looks=seen.plausible,
    trace=lambda served: [
        row("wrong answers of requests that were preempted", 0, _wrong_by_preemption(served)[1]),
        seen.same_tokens(served),
    ],
    measurements=(seen.ANSWERS, seen.HITS, seen.POOL, seen.RECOMPUTE, seen.BIG_POOL, seen.STEPS, seen.HOLDERS),
    innocents=(
        Suspect(
            "host memory",
            "blocks are damaged while they lie on the host",
            "They come back as they were stored. What was stored was wrong already.",
        ),
        Suspect(
            "scheduler, preemption",
            "a sequence that was preempted restarts at the wrong token",
            "With preemption by recomputing, the same requests are preempted at the same places and are right.",
        ),
        Suspect(
            "block pool",
            "a block has two owners after a swap",
            "No block stands in two tables in any step.",
        ),
        Suspect(
            "attention",
            "short blocks are read wrongly",
            "In a pool in which nobody is preempted the same requests and the same blocks are right.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "only what leaves goes first",
            "What leaves is saved in time now, and what comes back arrives after the pass that needed it.",
            (
                {
                    faults.MOVE + faults.MOVES_ALONE + faults.PASS: (
                        "    out = step.moves[step.moves[:, 0] == TO_HOST]\n"
                        "    back = step.moves[step.moves[:, 0] != TO_HOST]\n"
                        "    self._move_blocks(out)\n"
                        + faults.MOVES_ALONE
                        + faults.PASS
                        + "    self._move_blocks(back)\n"
                    )
                },
            ),
        ),
        WrongFix(
            "only what returns goes first",
            "What returns is there in time, and what leaves is still overwritten by whoever was given its blocks in "
            "this very step.",
            (
                {
                    faults.MOVE + faults.MOVES_ALONE + faults.PASS: (
                        "    out = step.moves[step.moves[:, 0] == TO_HOST]\n"
                        "    back = step.moves[step.moves[:, 0] != TO_HOST]\n"
                        "    self._move_blocks(back)\n"
                        + faults.MOVES_ALONE
                        + faults.PASS
                        + "    self._move_blocks(out)\n"
                    )
                },
            ),
        ),
    ),
    investigation=(
        Clue(
            "large-pool",
            "Without pressure all answers are right. What is wrong happens when a sequence gives its blocks away.",
        ),
        Clue(
            "recompute",
            "The same preemptions without swapping are right. So who is preempted, and when, is sound; what remains is "
            "the way of its keys to the host and back. They return as they were stored, so they were stored too late.",
        ),
    ),
    misleading=Clue(
        "block-tables",
        "No block has two owners in any step, which is true and does not help: in the step of the swap the block has a "
        "new owner, rightly, and the old contents have not left.",
    ),
    lesson=(
        "Giving a block back and saving its contents are two events, and everything that writes has to come after "
        "both. Whenever something is freed, name the last reader and show what makes it earlier than the next writer."
    ),
    proof=seen.against_the_loop(_swapping),
)

EXHIBITS = (LATE_COPY, LEFT_TOO_LATE)
