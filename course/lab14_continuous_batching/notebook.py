# %% [markdown]
# # 14 · Continuous batching
#
# **Sequences join and leave at every step.** That one change takes a server from waiting for its longest answer to
# a full batch in every forward pass; the price is a scheduler, and everything a scheduler can get wrong.
#
# About 130 minutes with the exercises; running it top to bottom takes under a minute. At the end you can answer:
#
# 1. How many forward passes do static, timer and continuous batching need for the same answers, and when do they need
#    equally many?
# 2. What happens to those who decode while a long prompt comes in, and what when the blocks run out?
# 3. How do you read from an engine's own records what is wrong with its scheduler?
#
# Lab 13 put keys and values into blocks, so that a sequence may lie anywhere and lose its memory at any time. Here you
# decide, step by step, who computes. A *seat* is a place in the batch; a *step* is one forward pass, which gives every
# sequence in it that has all its earlier tokens computed one token more. TTFT is the time to the first token, counted
# from arrival; TPOT the time per output token after it.

# %%
import heapq
import inspect
import itertools

from course.lab14_continuous_batching import experiments
from course.lab14_continuous_batching import experiments_breaks as breaks
from course.lab14_continuous_batching import experiments_engines as engines
from course.lab14_continuous_batching import figures as pictures
from course.lab14_continuous_batching import figures_flight as flight_pictures
from course.lab14_continuous_batching import formulas as predict
from course.lab14_continuous_batching.experiments_transformers import peer
from course.lab14_continuous_batching.formulas import H100_8B
from minillm.labkit import check, receipt, row, show, sliders
from minillm.labkit.receipts import format_value
from minillm.model import Transformer
from minillm.serve import POLICIES, Scheduler

# %% [markdown]
# ## Predict
#
# 32 requests wait, 8 seats are free. The answers are skewed, as real ones are: the longest has 64 tokens, the mean is
# below 12. **How many forward passes do static batches of 8 need, and how many does continuous batching?** And: 16
# sequences decode, one token every 5 ms, when a prompt of 8,192 tokens arrives, which alone takes 150 ms. **How long
# is the longest pause that a reader notices?** Write down your guesses.

# %%
guess_static = 4 * 64  # your guess: forward passes
guess_continuous = 4 * 12  # your guess
guess_gap_ms = 5  # your guess: ms, with the prompt in pieces of 512 tokens

# %%
lengths = engines.answers(engines.coming("skewed"))
receipt(
    "32 skewed answers, 8 seats: forward passes",
    [
        row("static: your guess", None, guess_static),
        row("    the sum of each batch's longest", None, predict.static_steps(lengths, 8)),
        row("continuous: your guess", None, guess_continuous),
        row("    a seat is taken as soon as it is free", None, predict.continuous_steps(lengths, 8)),
        row("    no schedule can do with fewer than max(longest, sum / 8)", None, predict.least_steps(lengths, 8)),
    ],
)

# %% [markdown]
# Both are closed forms so far (and the longest answer alone needs 64 passes: more seats would not help any more). You
# build it, then count it on a model.
#
# ## Build it
#
# ### 1. Join and leave
#
# A static batch is a bus: it leaves with whoever is there and drives to the last stop of its last passenger.
# Iteration-level scheduling (Yu et al. 2022, Orca) asks again after *every* step who is in.


# %%
def continuous_batches(lengths, max_num_seqs):
    """lengths: tokens that each request needs, in order of arrival -> one list per step: the requests (0, 1, ...) in
    its batch. First come, first served; a free seat is never left empty while somebody waits."""
    # BEGIN SOLUTION
    left, waiting, running, steps = list(lengths), list(range(len(lengths))), [], []
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append(waiting.pop(0))
        steps.append(list(running))
        for request in running:
            left[request] -= 1
        running = [request for request in running if left[request]]
    return steps
    # END SOLUTION


continuous_batches = check("join-and-leave", continuous_batches)

# %%
show(pictures.seats_over_time)

# %%
sliders(pictures.seats_over_time, requests=(4, 64), max_num_seqs=(1, 12), sigma=(0.0, 2.0, 0.25), longest=(8, 96))

# %% [markdown]
# Pull `sigma` to 0: all answers become equally long, and the two pictures are the same, to the last step. In the long
# run static batching takes $E[\max \text{ of } B] / E[n]$ times as many steps, which depends on how lengths are
# distributed, and on nothing else. Counted with your function, 4,000 requests:

# %%
shares = {
    "uniform, 1 to 64": [1 / 64] * 64,
    "geometric, mean 20": [0.05 * 0.95**k for k in range(600)],
    "all 32": [0.0] * 31 + [1.0],
}
rows = []
for name, each in shares.items():
    draws = experiments.draw(each, 4000)
    counted = predict.static_steps(draws, 8) / len(continuous_batches(draws, 8))
    total = sum(each)
    due = predict.static_over_continuous([share / total for share in each], 8)
    rows.append(row(f"{name}: static / continuous, 8 seats", due, counted, "", tolerance=0.05))
receipt("E[max of 8] / mean", rows)

# %% [markdown]
# ### 2. A step under a token budget
#
# A new request brings a prompt, and a prompt is many tokens at once. Engines used to have two phases, *prefill* and
# *decode*, and had to choose. There is no need to: every sequence has `num_tokens` tokens, of which `num_computed` are
# computed. Who decodes lacks one, who has just come lacks its prompt, who comes back from preemption lacks all it ever
# had, who hit the prefix cache lacks less. A step has a *budget* of tokens and hands it out:
#
# 1. one to each that lacks one,
# 2. then to those that have begun their prompt, at most a `chunk` each,
# 3. then to those that wait, strictly in order, while seats last.


# %%
def plan_step(running, waiting, budget, chunk, max_num_seqs):
    """-> a list of (sequence, tokens). running, waiting: sequences in order, each with num_tokens and num_computed.
    The budget is at least the number of seats. Changes nothing: a plan says what the step will compute."""
    # BEGIN SOLUTION
    decoding = [s for s in running if s.num_tokens - s.num_computed == 1]
    prompts = [s for s in running if s.num_tokens - s.num_computed > 1]
    plan = []
    for sequence in [*decoding, *prompts, *waiting[: max(0, max_num_seqs - len(running))]]:
        tokens = min(sequence.num_tokens - sequence.num_computed, chunk, budget)
        if tokens:
            plan.append((sequence, tokens))
            budget -= tokens
    return plan
    # END SOLUTION


plan_step = check("token-budget-step", plan_step)

# %% [markdown]
# Blocks apart, this is the course's own scheduler (`minillm/serve/scheduler.py`):

# %%
print(inspect.getsource(Scheduler.schedule))

# %% [markdown]
# "Prefill benefits from large batches", you may read. What does a pass cost? On a roofline: reading all weights, or
# multiplying with them, whichever takes longer. For an 8B model on one H100 at the peaks of its data sheet:

# %%
rows = []
for tokens in (1, 8, 64, 256, 2048, 8192):
    seconds = H100_8B.step([(0, tokens)])
    rows.append(row(f"{tokens:,} tokens in one pass: time", None, seconds, "s"))
    rows.append(row("    tokens per second", None, tokens / seconds))
receipt("a pass, by its tokens (roofline)", rows)

# %% [markdown]
# One prompt of a few hundred tokens already saturates the compute; a second one in the same pass only makes both wait
# longer for their first token. It is *decode* that needs a batch: a token costs the same pass whether 1 or 200 others
# are in it. So "tokens per second stop rising with batch size beyond a point" is a statement about that point, not
# about decoding below it. And a chunk need not be larger than a few hundred tokens to be efficient.
#
# ### 3. Whom to preempt
#
# An answer's length is not known when it begins, so a full pool is normal, not an accident: every sequence that decodes
# will want another block. When there is none, somebody gives up his. A handbook lists four policies: most recently
# started, longest, lowest priority, least recently used. Each is a number per sequence; the largest goes. But whom
# may a sequence take a block from at all? Look at it from the other side: what does the victim do next?


# %%
def victim(running, needy, policy):
    """-> the sequence of running that gives up its blocks for needy; None if needy has to wait.

    rank: a tuple, smaller is earlier (who is to be served first). policy: "latest" (largest arrival: rank[1]),
    "longest" (num_tokens), "lowest priority" (largest priority: lower is sooner) or "least recently used" (smallest
    last_step). Among equals the one of the largest rank."""
    # BEGIN SOLUTION
    number = {
        "latest": lambda s: s.rank[1],
        "longest": lambda s: s.num_tokens,
        "lowest priority": lambda s: s.priority,
        "least recently used": lambda s: -s.last_step,
    }[policy]
    behind = [s for s in running if s.rank > needy.rank]
    return max(behind, key=lambda s: (number(s), s.rank), default=None)
    # END SOLUTION


victim = check("preemption-victim", victim)

# %% [markdown]
# *Only later ones give way to earlier ones.* That is all it takes against a livelock: whoever is first is never
# preempted, so it ends, and makes the next one first. The policy is then a matter of taste. You will measure what it
# is worth.
#
# ### 4. Preempt, and come back
#
# Two ways to give blocks up. *Recompute*: drop them; the tokens are known, so one prompt-like pass brings the keys and
# values back. *Swap*: copy them to the host, and back later. Tables of policies tend to leave this half out, and it is
# the half where the bookkeeping goes wrong:


# %%
class Preemption:
    """Gives blocks up and wins them back. A sequence has tokens, num_computed, blocks (on the device, one per
    pool.block_size tokens) and host_blocks (copies on the host, empty while it runs).

    The pool: blocks_for(tokens), available, free_host, allocate(count) -> blocks, share(blocks) -> blocks,
    release(blocks), idle(blocks) -> how many of them nobody holds (they count as available),
    swap_out(blocks) -> host_blocks (copies, then releases), swap_in(host_blocks, blocks, skip=n) (copies all but the
    first n back, frees the host blocks)."""

    def preempt(self, sequence, pool, swap):
        """Takes all blocks from the sequence. swap: copies those with something in them to the host, if all of them
        fit there; otherwise what was computed is lost. What was sampled stays."""
        # BEGIN SOLUTION
        held = pool.blocks_for(sequence.num_computed)
        if swap and held <= pool.free_host:
            sequence.host_blocks = pool.swap_out(sequence.blocks[:held])
            pool.release(sequence.blocks[held:])
        else:
            sequence.num_computed = 0
            pool.release(sequence.blocks)
        sequence.blocks = []
        # END SOLUTION

    def resume(self, sequence, pool, hits):
        """Blocks for all its tokens again, those of the prefix cache first (hits: full blocks, not held yet).
        -> True; or False, with nothing taken, if there are too few."""
        # BEGIN SOLUTION
        fresh = pool.blocks_for(sequence.num_tokens) - len(hits)
        if fresh + pool.idle(hits) > pool.available:
            return False
        sequence.blocks = pool.share(hits) + pool.allocate(fresh)
        pool.swap_in(sequence.host_blocks, sequence.blocks, skip=len(hits))
        sequence.host_blocks = []
        sequence.num_computed = max(sequence.num_computed, len(hits) * pool.block_size)
        return True
        # END SOLUTION


Preemption = check("preempt-and-return", Preemption)

# %% [markdown]
# The last rows are an engine with a model that preempts and resumes with your class: its answers are those of the naive
# loop that never heard of blocks. Which one is cheaper? Recomputing costs FLOPs, $2P$ per token and a share that grows
# with length; swapping costs bytes, twice over the link:

# %%
show(pictures.recompute_or_swap)

# %%
sliders(
    pictures.recompute_or_swap,
    link_gb_per_s=(4.0, 64.0, 4.0),
    kv_heads=[8, 32],
    block_size=[1, 4, 16, 64],
    copy_us=(0.0, 40.0, 5.0),
)

# %%
here = engines.preempted_here(experiments.draft())
receipt(
    "256 tokens of the draft model, on this machine, for information",
    [row(name, None, seconds, "s") for name, seconds in here.items()],
)

# %% [markdown]
# Both lines are nearly straight, so it is rarely the length that decides, but the link, the number of kv heads and,
# with small blocks, what it costs to *start* a copy (Kwon et al. 2023, §7.3, found the same). And the picture is not
# fair to recomputation: beside decoding sequences, which leave the arithmetic units idle, part of it is free. (On this
# machine "host" and "device" are the same memory, so a swap is just a copy.)
#
# "Fragmentation: blocks available but not contiguous; handle by defragmentation", says the same handbook's table of
# failures. With block tables there is nothing to defragment: any free block is as good as any other.
#
# ### 5. Patience
#
# Some requests are more important. With strict priorities an endless stream of important ones starves the rest. Let a
# level of priority be worth a *bounded* head start instead: `patience` places in the queue.


# %%
class PatientQueue:
    """The smallest arrival + patience * priority goes first; equal ones in order of arrival. Arrivals count pushes."""

    def __init__(self, patience):
        # BEGIN SOLUTION
        self.patience, self.heap, self.arrivals = patience, [], itertools.count()
        # END SOLUTION

    def push(self, name, priority):
        """priority: a whole number, lower is sooner."""
        # BEGIN SOLUTION
        arrival = next(self.arrivals)
        heapq.heappush(self.heap, (arrival + self.patience * priority, arrival, name))
        # END SOLUTION

    def pop(self):
        """-> the name whose turn it is."""
        # BEGIN SOLUTION
        return heapq.heappop(self.heap)[-1]
        # END SOLUTION


PatientQueue = check("patient-queue", PatientQueue)

# %% [markdown]
# The number is given once, at arrival. That is why a preempted request does not lose its place: it goes back into the
# same heap under the same number.
#
# ## The flight recorder
#
# The engine keeps a record of every step: who was in the batch with which tokens, who was let in or preempted, how many
# blocks were free. Below, 12 requests in a pool of 48 blocks, of 4 tokens each. Above: who holds which block *after*
# the step (×2: two sequences share it, stored once). Below: what each step computed.

# %%
show(flight_pictures.view)

# %%
sliders(
    flight_pictures.view,
    step=(1, 80),
    policy=list(POLICIES),
    preemption=["recompute", "swap"],
    chunk=[4, 12, 24],
)

# %% [markdown]
# Move `step`. Prompts come in as hatched towers, on top of those who decode: one plain token each, in every step. Every
# second request begins with the same 16 tokens, in blocks that two of them hold. In step 14, the one shown, there was
# no free block left, and 5 gave way (grey: what it left behind, cached until somebody needs it). Two steps later it is
# back, and finds 20 of its 32 tokens still in the prefix cache: a hatched piece of 12, then it goes on. Choose `swap`,
# and it comes back with a single plain token.
#
# This flight was *played*: a schedule depends on how long things are, not on what they say, so no model is needed. Is
# that so? The same trace through the engine, with a model:

# %%
llm, outputs = experiments.fly(flight_pictures.trace(), experiments.draft(), **flight_pictures.POOL)
played = flight_pictures.flight()
receipt(
    "one trace, played and flown",
    [
        row("steps", len(played.records), len(llm.records)),
        row(
            "every batch, admission and preemption the same", True, experiments.same_flight(played.records, llm.records)
        ),
        row("preemptions", played.preemptions, sum(output.preemptions for output in outputs)),
        row("tokens computed", played.computed, sum(each.tokens for each in llm.records)),
        row("    of them again, after a preemption", None, played.computed - played.needed),
        row("blocks used afterwards", 0, llm.pool.used),
    ],
)

# %% [markdown]
# ### 6. When did each token come?
#
# What readers feel is in the records, too. Beware: being in a batch is not getting a token.


# %%
def latencies(records, prompts, arrived):
    """-> {name: (ttft, tpot, worst gap)} in seconds. records: one per step, each with batch: (name, first position,
    tokens), started and seconds. prompts: {name: tokens of its prompt}; arrived: {name: when it came}.
    A step's tokens are there when the step is over. Every request here gets two tokens or more."""
    # BEGIN SOLUTION
    held, times = dict(prompts), {name: [] for name in prompts}
    for each in records:
        for name, first, tokens in each.batch:
            if first + tokens == held[name]:  # it computes the last token that the sequence has
                held[name] += 1
                times[name].append(each.started + each.seconds)
    found = {}
    for name, at in times.items():
        gaps = [b - a for a, b in itertools.pairwise(at)]
        found[name] = (at[0] - arrived[name], sum(gaps) / len(gaps), max(gaps))
    return found
    # END SOLUTION


latencies = check("latencies-from-a-flight", latencies)

# %% [markdown]
# TTFT contains the wait in the queue; an engine that reports it from admission on looks splendid under overload. A mean
# TPOT hides pauses, so look at the worst gap as well, and at percentiles over *requests*: p99 of 32 requests is the
# worst one.
#
# ## Measure: three engines, one model
#
# The same 32 requests, the same model, all of them there at the start. Passes are counted. Times are those of a
# *computed* clock, on which a pass takes what the 8B roofline above says, so they are the same on every machine; the
# last line is what it took here.

# %%
at_once = engines.compare()
rows = []
for trace in engines.TRACES:
    wanted = engines.answers(engines.coming(trace))
    due = {"static": predict.static_steps(wanted, 8), "timer": None, "continuous": predict.continuous_steps(wanted, 8)}
    for engine, steps in due.items():
        found = at_once[trace, engine]
        rows.append(row(f"{trace}, {engine}: forward passes", steps, found["passes"]))
        rows.append(row("    rows computed for nobody", None, found["wasted"]))
        rows.append(row("    useful tokens per second, computed clock", None, found["summary"].tokens_per_s))
    same = all(at_once[trace, engine]["ids"] == at_once[trace, "static"]["ids"] for engine in due)
    rows.append(row("    the same tokens from all three", True, same))
rows.append(
    row("seconds here, static / continuous, skewed", None,
        at_once["skewed", "static"]["wall_s"] / at_once["skewed", "continuous"]["wall_s"])
)  # fmt: skip
receipt("32 requests at once, 8 seats", rows)

# %% [markdown]
# Now they arrive one after the other, 60 a second, as requests do:

# %%
trickling = engines.compare(rate=60)
rows = []
for (trace, engine), found in trickling.items():
    summary = found["summary"]
    rows.append(
        row(
            f"{trace}, {engine}: TTFT p50, p99",
            None,
            (format_value(summary.ttft.p50, "s"), format_value(summary.ttft.p99, "s")),
        )
    )
    rows.append(
        row(
            "    end to end p50, p99",
            None,
            (format_value(summary.end_to_end.p50, "s"), format_value(summary.end_to_end.p99, "s")),
        )
    )
    rows.append(row("    forward passes", None, found["passes"]))
receipt("60 requests per second, computed clock", rows)

# %% [markdown]
# With arrivals in between, continuous batching wins on *uniform* lengths as well, not in passes, but in TTFT: nobody
# waits for somebody else's batch.
#
# ### The timer in between
#
# Serving systems for classifiers pool requests until a batch is full or a timer runs out ("adaptive batching"; the
# advice that batches be powers of two is about aligned matrix dimensions, not about batches). Latency is at most timer
# plus batch time, if the server is free; a longer timer makes larger batches:

# %%
rows = []
for numbers in engines.timers(Transformer(experiments.TINY, seed=0), (0.0, 0.02, 0.08, 0.2, 0.4)):
    fits = numbers["longest_s"] <= numbers["bound_s"] + 1e-9
    rows.append(row(f"timer {1e3 * numbers['wait_s']:.0f} ms: within max(timer, batch) + batch + one pass", True, fits))
    rows.append(row("    longest latency", None, numbers["longest_s"], "s"))
    rows.append(row("    mean batch; of an idle server", None, (numbers["batch"], numbers["predicted_batch"])))
receipt("10 requests per second, 8 tokens each, batches of at most 8 (computed clock)", rows)

# %% [markdown]
# For answers of one length that is a fair trade. For text it is the bus again, with a timetable: BentoML's and Triton's
# dynamic batching decide per *request*, an LLM engine per *token*.
#
# ### A long prompt comes in

# %%
chunks = engines.stalls((128, 256, 512, 1024, 2048, 4096, None))
unmixed = engines.unmixed(512)


def chunk_sizes():
    """The worst gap of 16 decoding sequences, and the long prompt's TTFT, by chunk size: predicted and played."""
    return pictures.draw_stalls(chunks, unmixed)


show(chunk_sizes)

# %%
rows = [row("your guess, chunk 512", None, guess_gap_ms / 1e3, "s")]
for numbers in chunks:
    rows.append(
        row(f"chunk {numbers['chunk']:,}: worst gap", numbers["predicted"], numbers["gap"], "s", tolerance=0.01)
    )
    rows.append(row("    its TTFT", numbers["predicted_ttft"], numbers["ttft"], "s", tolerance=0.05))
rows.append(row("chunk 512, but prompts and decodes never in one step", None, unmixed["gap"], "s"))
receipt("8,192 tokens arrive while 16 decode (computed clock)", rows)

# %% [markdown]
# The gap is the time of *one chunk*, not of the prompt (Agrawal et al. 2024, Sarathi-Serve). From 512 tokens up, the
# prompt itself loses next to nothing; below, its passes are memory-bound and the chunk too small to be worth one. And
# the last row: a prompt cut into chunks which are then computed one after the other *without* the decodes in between
# stalls everybody as long as the whole. Chunks alone do nothing. Mixing does.
#
# ### Four policies, two ways back
#
# 120 requests, 60 a second, every fourth one less important, in a pool that is too small for them:

# %%
crowds = engines.crowds()


def latency_distributions():
    """TTFT, TPOT and worst gap of 120 requests under four policies, recomputed and swapped: share that waited less."""
    return pictures.draw_latencies(crowds)


show(latency_distributions)

# %%
rows = []
for (policy, how), found in crowds.items():
    rows.append(row(f"{policy}, {how}: preemptions", None, found.preemptions))
    lost = engines.given_up(found)
    again = sum(lost) if how == "recompute" else 0
    rows.append(row("    tokens computed twice = what victims had", again, found.computed - found.needed))
    blocks = 2 * sum(-(-had // 16) for had in lost) if how == "swap" else 0
    rows.append(row("    blocks moved, out and in", blocks, found.swapped))
    gap, tpot = found.spread("worst_gap"), found.spread("tpot")
    rows.append(row("    worst gap p50, p99", None, (format_value(gap.p50, "s"), format_value(gap.p99, "s"))))
    rows.append(
        row("    TPOT p99; all done after", None, (format_value(tpot.p99, "s"), format_value(found.seconds, "s")))
    )
receipt("one trace, 400 blocks of 16 (computed clock)", rows)

# %% [markdown]
# Policies differ by how *often* they preempt and by how much each victim loses: the longest frees most, so it happens
# least often, and throws away the most. Median TPOT is nearly the same; it is pauses that tell them apart. Swapping
# computes nothing twice and is a little faster here, with a link at its peak. Now look at "least recently used". It
# sounds sensible, and it is, for *cached blocks that nobody holds*. Among running sequences it says nothing:

# %%
recent = crowds["least recently used", "recompute"]
pair = crowds["latest", "recompute"], engines.crowd(reserve=1)
rows = [
    row("victims of 'least recently used' that ran in the step before", None, engines.just_used(recent)),
    row("no block kept free, one per running sequence: preemptions", None, tuple(flown.preemptions for flown in pair)),
    row("    tokens computed twice", None, tuple(sum(engines.given_up(flown)) for flown in pair)),
]
for label, what in (("    worst gap p99", "worst_gap"), ("    TTFT p50", "ttft")):
    spreads = [flown.spread(what) for flown in pair]
    seconds = [spread.p99 if what == "worst_gap" else spread.p50 for spread in spreads]
    rows.append(row(label, None, tuple(format_value(value, "s") for value in seconds)))
rows.append(row("    all done after", None, tuple(format_value(flown.seconds, "s") for flown in pair)))
receipt("used when? and what to do about preemption", rows)

# %% [markdown]
# Nearly all of them had just been used, because every running sequence is used in nearly every step; that is what
# continuous batching *is*. (The others had waited for a block.) And the best preemption is one that no admission
# provoked: let the next one in only if those who run have room to grow. Under a third of the preemptions are left, and
# the pauses shrink. The whole takes as long as before, which shows how much of recomputation hides beside memory-bound
# decodes: it is felt as a *pause*, hardly as throughput.
#
# ## Break it
#
# Four schedulers, each wrong in one place, and each from a real engine's issue tracker. None of them raises. Here they
# are, each on a trace where it shows:

# %%
for fault, kind in breaks.FAULTS.items():
    if fault != breaks.HEALTHY:
        print(f"{fault}: {inspect.getdoc(kind)}\n")

# %%
rows = []
for fault in breaks.FAULTS:
    found = breaks.case(fault, seed=5)
    sound = breaks.case(fault, seed=5, make=Scheduler)
    rows.append(row(f"{fault}: steps (sound scheduler)", None, (len(found.records), len(sound.records))))
    rows.append(row("    ended, of 8", None, sum(len(step.ended) for step in found.records)))
    gaps = [format_value(flown.spread("worst_gap").most, "s") for flown in (found, sound)]
    rows.append(row("    longest gap; with a sound scheduler", None, ("no end" if found.stuck else gaps[0], gaps[1])))
receipt("five flights", rows)

# %% [markdown]
# ### 7. What is wrong with it?
#
# An engine you do not know hands you its flight recorder. Write the doctor. It sees records and prompt lengths, nothing
# else, and must be right about sound schedulers, too: preemption is not a fault.


# %%
def diagnose(records, prompts):
    """-> "healthy", "phases never mixed", "place in the queue lost", "livelock" or "tokens that do not exist".

    records: one per step, each with batch: (name, first position, tokens), admitted, preempted, ended: names, and
    sampled: how many tokens came out. prompts: {name: tokens of its prompt}. Names are "0", "1", ... in order of
    arrival, priorities equal. In a step preemptions come first, then admissions, then the batch."""
    # BEGIN SOLUTION
    held, away, decoding = dict(prompts), set(), set()
    if len(records) > 100 and not any(each.sampled for each in records[-100:]):
        return "livelock"
    for each in records:
        away |= set(each.preempted)
        decoding -= set(each.preempted)
        for name in each.admitted:
            away.discard(name)
            if any(int(other) < int(name) for other in away):
                return "place in the queue lost"
        if decoding and not decoding & {name for name, _, _ in each.batch}:
            return "phases never mixed"
        for name, first, tokens in each.batch:
            if first + tokens > held[name]:
                return "tokens that do not exist"
            if first + tokens == held[name]:
                held[name] += 1
                decoding.add(name)
        decoding -= set(each.ended)
    return "healthy"
    # END SOLUTION


diagnose = check("diagnose-a-flight", diagnose)

# %% [markdown]
# What each of them had got wrong:
#
# - **Phases never mixed.** While any prompt is left, nobody decodes. The log says "chunked prefill enabled".
# - **Place in the queue lost** (vLLM#41951). The preempted request gets a new arrival number. It *was* among the first;
#   now everybody who came since goes first, and the next time blocks are short it is the latest again.
# - **Livelock** (nano-vllm#274). Whoever does not fit throws out who runs. That one does not fit either, in the next
#   step. Utilization is 100 %.
# - **Tokens that do not exist** (nano-vllm PR#211). Preempted, back again, some of its blocks are still in the prefix
#   cache; the number of tokens to compute was taken *before* the hits were. The pass is asked for positions that hold
#   no token yet: at best it fails, at worst it samples from the wrong row.
#
# ## Where it loses
#
# **Uniform lengths, all there at once**: you counted 64 passes for each of the three engines. What continuous
# batching adds is a scheduler. Its cost on this machine, per scheduled sequence, and the pass that it is to be
# compared with:

# %%
passes = engines.step_seconds(experiments.draft())
rows = [
    row(f"schedule + advance, {width} running: per sequence", None, seconds, "s")
    for width, seconds in engines.bookkeeping().items()
]
for width, seconds in passes.items():
    rows.append(row(f"a decode step of the draft model with {width} in it", None, seconds, "s"))
    rows.append(row("    tokens per second", None, width / seconds))
rows.append(
    row(
        "uniform: passes of continuous over static",
        1.0,
        at_once["uniform", "continuous"]["passes"] / at_once["uniform", "static"]["passes"],
    )
)
receipt("on this machine, for information", rows)  # fmt: skip

# %% [markdown]
# Other losses: a batch whose shape changes in every step is hard to capture in CUDA graphs or to compile (engines pad
# to a few sizes for that); with very short answers TTFT is all there is, and a plain queue is as good; and an engine
# that lives on preemption computes much of its work twice. Throughput is bought with TPOT: each sequence in the batch
# makes every other one's step a little longer.
#
# ## The same in production
#
# transformers has continuous batching built in. The same weights, the same requests, seats and budget, live if it is
# installed:

# %%
theirs = peer(engines.coming("skewed"), max_num_seqs=8, token_budget=8 * engines.PROMPT + 8)
ours = at_once["skewed", "continuous"]
rows = [row("transformers is installed", None, theirs is not None)]
if theirs is not None:
    equal = sum(mine == other for mine, other in zip(ours["ids"], theirs["ids"], strict=True))
    times = tuple(format_value(seconds, "s") for seconds in (ours["wall_s"], theirs["seconds"]))
    rows.append(row("answers equal to ours, of 32", None, equal))
    rows.append(row("forward passes: ours, theirs", None, (ours["passes"], theirs["passes"])))
    rows.append(row("seconds: ours, theirs", None, times))
receipt("transformers' continuous batching, skewed answers", rows)

# %% [markdown]
# (Its worker is a thread of its own. Call it inside `torch.inference_mode()` and the thread is outside: tensors made on
# one side are refused on the other.) vLLM, the names of the same things:
#
# | vLLM | here |
# |---|---|
# | `--max-num-seqs` | `max_num_seqs`: seats |
# | `--max-num-batched-tokens` | `token_budget`; smaller: shorter gaps, larger: shorter TTFT |
# | `--enable-chunked-prefill` (on by default in V1) | always on; decodes first, prompts share what is left |
# | `--long-prefill-token-threshold` | `chunk` |
# | `--scheduling-policy fcfs` or `priority` (lower is earlier) | `priority`, bounded by `patience`; theirs is strict |
# | preemption by recomputation (V1's default; V0 could also swap) | `preemption="recompute"` or `"swap"` |
# | `--kv-offloading-size` (keys and values to the host, as a cache) | `num_host_blocks` |
# | the last of the running, or of the lowest priority | `policy="latest"`, `"lowest priority"` |
# | `--gpu-memory-utilization`, `--num-gpu-blocks-override` | `num_blocks` |
# | metrics `vllm:num_requests_running`, `..._waiting`, `vllm:num_preemptions_total` | `llm.records` |
# | `--async-scheduling` | the schedule of step n + 1 while n computes: not here |
#
# (vLLM's configuration reference and "Optimization and Tuning" guide.) Its advice against frequent preemption is what
# you measured: more blocks, or fewer seats.
#
# ## On a cluster
#
# A scheduler is one process per replica; more GPUs mean more of them behind a router, or a model cut by tensor
# parallelism (lab 05) under one. There is nothing to launch with torchrun here:
#
# ```bash
# python -m minillm generate --batch prompts.txt                      # this engine, from the command line
# vllm serve $MODEL --tensor-parallel-size 4 --max-num-seqs 256 \
#      --max-num-batched-tokens 8192 --scheduling-policy priority      # the same ideas on a node
# ```
#
# ## Interview corner
#
# The numbers first, all by the formulas you have just checked:


# %%
def number(name, value, unit=""):
    print(f"{name:<72}{format_value(value, unit):>14}")


number(
    "1. lengths 1 to 1,000 alike often, 32 seats: static / continuous",
    predict.static_over_continuous([1e-3] * 1000, 32),
)
number(
    "   geometric (mean 200)",
    predict.static_over_continuous([0.005 * 0.995**k / (1 - 0.995**4000) for k in range(4000)], 32),
)
number("2. 8B on an H100: decode pass of 1 with 2,000 tokens", H100_8B.step([(1999, 1)]), "s")
number("   of 64 with 2,000 tokens each", H100_8B.step([(1999, 1)] * 64), "s")
number("   tokens per second: 1", 1 / H100_8B.step([(1999, 1)]))
number("   64", 64 / H100_8B.step([(1999, 1)] * 64))
number("3. prompt of 32,768 while 32 decode: gap, whole", predict.worst_gap(H100_8B, 32768, None, [2000] * 32), "s")
number("   in chunks of 1,024", predict.worst_gap(H100_8B, 32768, 1024, [2000] * 32), "s")
number("   its TTFT, whole", predict.chunked_prefill(H100_8B, 32768, None, [2000] * 32), "s")
number("   in chunks", predict.chunked_prefill(H100_8B, 32768, 1024, [2000] * 32), "s")
number("4. preempting a sequence of 4,000 tokens: recompute", H100_8B.recompute(4000), "s")
number("   swap, 64 GB/s each way", 2 * H100_8B.swap(250, 16), "s")
number("5. patience 64, one level of priority: overtaken by at most", predict.overtakers(64, 1))
number("6. timer 50 ms, batch 200 ms, busy server: latency at most", predict.adaptive_latency(0.05, 0.2, 0.2), "s")

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. Why continuous batching?**
# <details><summary>Answer</summary>
#
# Answers differ in length. A static batch runs as long as its longest, so it takes $E[\max \text{ of } B]/E[n]$ times
# the steps: 1.94 for lengths that are uniform and 32 seats, 4.05 for geometric ones. And who arrives waits for a whole
# batch; with continuous batching, for a step.
#
# *Follow-up: when is there no gain?* Equal lengths, all there at once.
# </details>
#
# **2. What is a token budget for?**
# <details><summary>Answer</summary>
#
# It bounds the time of a step, hence the gap between two tokens of everybody. Decodes first, one each; what is left
# goes to prompts, in chunks. At least as large as the number of seats.
# </details>
#
# **3. Chunked prefill: what does it improve, what does it cost?**
# <details><summary>Answer</summary>
#
# The worst gap of those who decode: one chunk instead of one prompt. It costs the long prompt's TTFT a little, a lot if
# chunks are so small that passes become memory-bound. Keys of earlier chunks are read again for each chunk. It does
# nothing unless chunks and decodes share a step.
# </details>
#
# **4. Does prefill benefit from batching?**
# <details><summary>Answer</summary>
#
# Hardly: a few hundred tokens saturate the arithmetic, and one prompt has them. Batching prompts mostly adds to TTFT.
# Decode benefits: its cost is reading weights, once per pass, however many sequences are in it, until the keys and
# values read or the arithmetic take over.
# </details>
#
# **5. The pool is full. What now?**
# <details><summary>Answer</summary>
#
# First evict cached blocks that nobody holds, least recently used first. Then preempt a *later* sequence: drop or swap
# its blocks, keep its tokens, put it back at its own place. If nobody is later, wait a step. A request that can never
# fit is refused on arrival, not preempted for ever.
# </details>
#
# **6. Recompute or swap?**
# <details><summary>Answer</summary>
#
# Recompute: $2P$ FLOPs per token, compute-bound, partly hidden beside decodes, needs no host memory, and hits the
# prefix cache if its blocks were not evicted yet. Swap: $2 \cdot$ KV bytes over the link, in many small copies unless
# blocks are large. For the 8B model above, at peak rates, 69 ms against 16 ms for 4,000 tokens; at a quarter of the
# link they are about equal. vLLM V1 recomputes.
# </details>
#
# **7. Least recently used as a preemption policy?**
# <details><summary>Answer</summary>
#
# Every running sequence is used in every step, so there is nothing to order. It is the right policy one level down, for
# cached blocks without a holder.
# </details>
#
# **8. How do you exclude starvation and livelock?**
# <details><summary>Answer</summary>
#
# One fixed rank per request, given at arrival, with priority as a bounded head start. Admission strictly in rank order
# (no skipping of those that do not fit); preemption only of later ranks. Then the first in rank always makes progress.
#
# *Follow-up: what does strict admission cost?* A large request at the head leaves blocks idle until it fits.
# </details>
#
# **9. p50 TPOT is fine, users complain about stutter. Where do you look?**
# <details><summary>Answer</summary>
#
# At the worst gap per request, against two things in the records: steps with large prompt pieces (lower the budget or
# chunk), and preemptions (more blocks, fewer seats, a reserve).
# </details>
#
# **10. Throughput doubled after an upgrade, TTFT as reported fell, users say it got slower. What happened?**
# <details><summary>Answer</summary>
#
# Ask from when TTFT is counted. From admission, an engine with more queue and fewer seats looks better. Count from
# arrival. Then compare p99, not means.
# </details>
#
# **11. Your engine shows 100 % utilization and no tokens. Name two reasons.**
# <details><summary>Answer</summary>
#
# A livelock of mutual preemption: each prompt is thrown out before it is done. Or one huge prompt with phases that do
# not mix. In the records: the same (sequence, first position) again and again, or the position advances.
# </details>
#
# **12. Which limits does admission need?**
# <details><summary>Answer</summary>
#
# Seats, blocks for the prompt *now* (after prefix hits, counted before anything is taken) and some reserve for growth,
# a bound on the queue (else waits grow without limit once arrivals exceed service), a deadline. Refuse early, with a
# reason.
# </details>
#
# ## Can you answer them now?
#
# 1. How many forward passes do static, timer and continuous batching need for the same answers, and when do they need
#    equally many?
# 2. What happens to those who decode while a long prompt comes in, and what when the blocks run out?
# 3. How do you read from an engine's own records what is wrong with its scheduler?
#
# Next: lab 15 lets a small model guess several tokens, and the large one check them in a single pass.
