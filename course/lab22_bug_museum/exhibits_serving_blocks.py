"""Exhibits of blocks: a copy that came too late, a prompt that was there already, a block that left too late."""

import random

from course.kit.receipts import row
from course.lab22_bug_museum import serving_measurements as seen
from course.lab22_bug_museum.exhibit import Clue, Exhibit, Suspect, WrongFix
from course.lab22_bug_museum.patches import Patch
from course.lab22_bug_museum.serving_runs import Asked, Served, Traffic, runs, tokens
from minillm.serve import SamplingParams

SCHEDULE = "minillm.serve.schedule.scheduler:Scheduler.schedule"
OWN_BLOCK = "elif 0 < computed % size < size - 1 and references[sequence.blocks[-1]] == 1:"
FAST_PATH = Patch(SCHEDULE, {OWN_BLOCK: "elif 0 < computed % size < size - 1:"})
WHOLE_PROMPT = Patch(
    "minillm.serve.schedule.scheduler:Scheduler._prefixes",
    {"(sequence.num_tokens - 1) // self.pool.block_size": "sequence.num_tokens // self.pool.block_size"},
)
MOVE, PASS = "    self._move_blocks(step.moves)\n", "    outputs = self._forward(step, before)\n"
MOVED_AFTER = Patch("minillm.serve.run.model_runner:Runner.execute", {MOVE + PASS: PASS + MOVE})


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
    threads=("https://github.com/xLLM-AI/xllm/pull/1984",),
    symptom=(
        "A decoding step became a little faster last week. Since then best-of-4 hardly beats a single sample: users of "
        "n=4 say that the candidates read as if they interrupted each other. Requests with n=1, nine tenths of the "
        "traffic, are as good as they were."
    ),
    faults=(FAST_PATH,),
    run=runs(_samples),
    looks=seen.plausible,
    trace=lambda served: [
        row("decoded tokens written into a block of several holders", 0, _written_together(served)),
        seen.same_tokens(served),
    ],
    measurements=(seen.ANSWERS, seen.HOLDERS, seen.POOL, seen.STEPS, seen.NO_CACHE, seen.BIG_POOL, seen.THROUGHPUT),
    suspects=(
        Suspect("scheduler, decoding within a block", "a shared block is written without being copied first"),
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
            ({OWN_BLOCK: OWN_BLOCK.replace("== 1", "<= 2")},),
        ),
        WrongFix(
            "as many sequences as the request asked for",
            "After the fork each sample stands for one sequence, so this is always true. Whether a block is shared is "
            "known to the pool alone.",
            ({OWN_BLOCK: "elif 0 < computed % size < size - 1 and sequence.num_seqs == 1:"},),
        ),
        WrongFix(
            "not at the beginning of a block",
            "This looks at where the token goes. Whether the block is shared does not depend on that, and a prompt "
            "may end anywhere in a block.",
            ({OWN_BLOCK: "elif 1 < computed % size < size - 1:"},),
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


# A prompt of which everything is cached.


def _prompts_again(draw: random.Random) -> Traffic:
    """Prompts of 24, 25 and 27 tokens, each sent a second time; blocks have 8."""
    prompts = [tokens(draw, length) for length in (24, 25, 27)]
    params = SamplingParams(5)
    return Traffic(tuple(Asked(prompt, params, at=at) for at in (0, 12) for prompt in prompts), steps=60)


NOTHING_LEFT = Exhibit(
    name="never-ends",
    title="A request that waits for nothing",
    kind="serving",
    threads=(
        "https://github.com/GeeeekExplorer/nano-vllm/pull/199",
        "https://github.com/GeeeekExplorer/nano-vllm/issues/144",
    ),
    symptom=(
        "Once or twice a day a request never ends, and its client runs into the timeout. The server is healthy: it "
        "answers all others meanwhile, with free memory, an idle queue and no error. Sent once more, the request hangs "
        "again; with one word more in its prompt it is answered at once."
    ),
    faults=(WHOLE_PROMPT,),
    run=runs(_prompts_again),
    looks=lambda served: [
        row("errors in outputs and records", 0, served.errors),
        row("requests that wait", 0, served.records[-1].waiting),
        seen.same_answers_so_far(served),
    ],
    trace=lambda served: [
        row("requests that did not end", 0, served.unfinished),
        row("tokens hit by the prompt of 24 tokens", 16, served.hit[3]),
        row("tokens hit by the prompt of 25 tokens", 24, served.hit[4]),
        row("tokens hit by the prompt of 27 tokens", 24, served.hit[5]),
    ],
    measurements=(seen.LATENCY, seen.STEPS, seen.SEATS, seen.HITS, seen.NO_CACHE_ENDS, seen.POOL, seen.HOLDERS),
    suspects=(
        Suspect("prefix cache, lookup", "a hit covers the whole prompt, so that there is no query left to compute"),
        Suspect(
            "scheduler, starvation",
            "others are always preferred to it",
            "Nothing else is running in the end, and it still gets no token.",
        ),
        Suspect(
            "scheduler, blocks",
            "it waits for blocks that nobody gives back",
            "It is admitted and holds all blocks that it needs, and most of the pool is free.",
        ),
        Suspect(
            "server, the stream",
            "its tokens are sampled and get lost on their way to the client",
            "No step computed anything of it after it was admitted: there is nothing that could get lost.",
        ),
        Suspect(
            "model",
            "its end token is never sampled",
            "The length of its answer is bounded, and a step that had sampled anything would be in the records.",
        ),
    ),
    wrong_fixes=(
        WrongFix(
            "one block less",
            "It ends now, and every other prompt computes a block that it has: 25 tokens hit 16 and not 24. Only the "
            "last token has to be computed, for its logits.",
            ({"(sequence.num_tokens - 1) // self.pool.block_size": "sequence.num_tokens // self.pool.block_size - 1"},),
        ),
        WrongFix(
            "no hit for whole blocks",
            "A prompt that fills its blocks now hits nothing, although all of it but the last block could be taken "
            "over.",
            (
                {
                    "(sequence.num_tokens - 1) // self.pool.block_size": (
                        "(sequence.num_tokens // self.pool.block_size) * bool(sequence.num_tokens % "
                        "self.pool.block_size)"
                    )
                },
            ),
        ),
        WrongFix(
            "two tokens to compute",
            "One query is enough: the prompt of 25 tokens computes nine here, because a hit covers whole blocks.",
            ({"(sequence.num_tokens - 1)": "(sequence.num_tokens - 2)"},),
        ),
    ),
    investigation=(
        Clue(
            "scheduler-counts",
            "One sequence runs, none waits, and the engine was asked for many more steps than computed anything. So it "
            "has its blocks and its seat, and the plan gives it no token.",
        ),
        Clue(
            "step-records",
            "It was admitted in a step whose batch does not name it. Its prompt has 24 tokens, three whole blocks, and "
            "was sent before: it lacks zero tokens.",
        ),
    ),
    misleading=Clue(
        "latency",
        "All other requests are as fast as ever. A mean leaves out whoever never ends, so the dashboard has no entry "
        "for the one request that matters.",
    ),
    lesson=(
        "A cache gives keys and values; the next token needs logits, and those come from a query. At least one token "
        "is always computed. Alert on the oldest unanswered request, not on the mean of those that were answered."
    ),
    proof=seen.against_the_loop(_prompts_again),
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
    threads=("https://github.com/vllm-project/vllm/issues/52360",),
    symptom=(
        "Under load, and never otherwise, some answers lose their thread in the middle of a sentence. Preemption by "
        "swapping was switched on a month ago, because recomputing was slow. Swapped blocks come back bit by bit as "
        "they were stored: somebody has already compared them on the host."
    ),
    faults=(MOVED_AFTER,),
    run=runs(_swapping),
    looks=seen.plausible,
    trace=lambda served: [
        row("wrong answers of requests that were preempted", 0, _wrong_by_preemption(served)[1]),
        seen.same_tokens(served),
    ],
    measurements=(seen.ANSWERS, seen.HITS, seen.POOL, seen.RECOMPUTE, seen.BIG_POOL, seen.STEPS, seen.HOLDERS),
    suspects=(
        Suspect("runner, the order of a step", "blocks move after the pass, which has written into them by then"),
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
                    MOVE + PASS: (
                        "    out = step.moves[step.moves[:, 0] == TO_HOST]\n"
                        "    back = step.moves[step.moves[:, 0] != TO_HOST]\n"
                        "    self._move_blocks(out)\n" + PASS + "    self._move_blocks(back)\n"
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
                    MOVE + PASS: (
                        "    out = step.moves[step.moves[:, 0] == TO_HOST]\n"
                        "    back = step.moves[step.moves[:, 0] != TO_HOST]\n"
                        "    self._move_blocks(back)\n" + PASS + "    self._move_blocks(out)\n"
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

EXHIBITS = (LATE_COPY, NOTHING_LEFT, LEFT_TOO_LATE)
