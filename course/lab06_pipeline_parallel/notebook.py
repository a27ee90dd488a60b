# %% [markdown]
# # 06 · Pipeline parallelism
#
# **Stages idle for $(n-1)/(M+n-1)$ of a step; 1F1B changes the memory, not the bubble.** Here you build both
# schedules, run them on real ranks and hold them to that.
#
# About 130 minutes with the exercises; running it top to bottom takes under a minute. At the end you can answer:
#
# 1. For which share of a step do stages idle, and what does, and does not, change it?
# 2. What does each stage hold at most under GPipe, 1F1B, interleaving, zero bubble and DualPipe, and what do they send?
# 3. Which mistakes at the cut between two stages leave the loss looking right?
#
# ZeRO gathers a layer's weights where they are needed. A pipeline does the opposite: weights stay, *activations*
# travel. $n$ ranks, the *stages*, hold neighbouring layers; a batch is cut into $M$ microbatches, which move through
# the stages forward (F) and back (B): a batch of 10 in 5 microbatches makes 2 *samples* each. How many ranks a
# pipeline has *is* how many stages it has: "PP = 2" cuts a model into two stages, not four.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import inspect
import itertools

import torch

from course.lab06_pipeline_parallel import experiments
from course.lab06_pipeline_parallel import experiments_breaks as breaks
from course.lab06_pipeline_parallel import experiments_stale as stale
from course.lab06_pipeline_parallel import experiments_torch as peers
from course.lab06_pipeline_parallel import figures as pictures
from course.lab06_pipeline_parallel.experiments import FORWARD_S, HANDBOOK, Job
from minillm.comm import launch
from minillm.labkit import check, receipt, row, show, sliders
from minillm.labkit.receipts import format_value
from minillm.parallel.pipeline_parallel import schedules
from minillm.parallel.pipeline_parallel.schedules import Durations, ScheduleError, simulate
from minillm.parallel.pipeline_parallel.stages import ModelPart, layer_costs
from minillm.predict import pipeline as predict

# %% [markdown]
# ## Predict
#
# **4 stages, 8 microbatches, every stage equally fast. For which share of the step does a stage compute nothing?**
# Write down your guess. (The one below is what one often reads: $(n-1)/M$.)

# %%
guess_idle = 3 / 8  # your guess

# %%
n, m = 4, 8
receipt(
    "4 stages, 8 microbatches: idle share of the step",
    [
        row("your guess", None, guess_idle),
        row("one handbook: (n-1)/M", None, predict.overhead(n, m)),
        row("another: (1-M)/(M+n-1)", None, (1 - m) / (m + n - 1)),
        row("a third, both: (n-1)/M and (n-1)/(M+n-1)", None, (predict.overhead(n, m), predict.idle_share(n, m))),
        row("(n-1)/(M+n-1)", None, predict.idle_share(n, m)),
        row("the clock below says", predict.idle_share(n, m), simulate(schedules.gpipe(n, m)).idle_share, "", 1e-9),
        row(
            "4 stages, 4 microbatches: (n-1)/M, and the truth", None, (predict.overhead(4, 4), predict.idle_share(4, 4))
        ),
    ],
)

# %% [markdown]
# $(n-1)/M$ is idle time over *useful* time; it passes 1 when $M < n - 1$, as no share of a step can. The second
# formula is negative. Every stage works $M(F+B)$ and idles $(n-1)(F+B)$: while the first microbatch comes down, and
# while the last gradient goes back up.
#
# ## Build it
#
# ### 1. GPipe
#
# A schedule is *data*: for each stage the order of what it does. Waiting is not written down. A stage does the next
# thing as soon as what it needs is there, so the times follow from the orders. From its F to its B a microbatch is *in
# flight* on a stage, which keeps its activations for so long. GPipe (Huang et al. 2019): all forwards, then all
# backwards.


# %%
def gpipe_order(stage, stages, microbatches):
    """-> what this stage does, in order: a list such as ["F0", "F1", "B0", "B1"] (microbatches count from 0)."""
    # BEGIN SOLUTION
    return [f"F{m}" for m in range(microbatches)] + [f"B{m}" for m in range(microbatches)]
    # END SOLUTION


gpipe_order = check("gpipe-order", gpipe_order)

# %%
print(simulate(schedules.gpipe(4, 8), Durations(F=1, B=1, W=0)))

# %% [markdown]
# Every stage holds the activations of *all* microbatches when the first backward begins. That, not the idle time, is
# what is wrong with GPipe.
#
# ### 2. 1F1B
#
# The last stage can turn each microbatch round at once: F0 B0 F1 B1 ... The stage before it needs one more forward
# until B0 comes back to it, the one before that two more (Narayanan et al. 2021). So stages *differ*: each fills up
# with as few microbatches as keep it busy, then does one forward and one backward in turn, then drains. ("After its
# first forward comes its first backward" is true of the last stage only.)


# %%
def one_f_one_b_order(stage, stages, microbatches):
    """-> what this stage does, in order. It holds min(stages - stage, microbatches) microbatches at most."""
    # BEGIN SOLUTION
    to_fill = min(stages - 1 - stage, microbatches)
    order = [f"F{m}" for m in range(to_fill)]
    for m in range(microbatches - to_fill):
        order += [f"F{to_fill + m}", f"B{m}"]
    return order + [f"B{m}" for m in range(microbatches - to_fill, microbatches)]
    # END SOLUTION


one_f_one_b_order = check("one-f-one-b-order", one_f_one_b_order)

# %%
show(pictures.schedule_on_a_clock)

# %%
sliders(
    pictures.schedule_on_a_clock,
    schedule=["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe", "pipedream"],
    stages=(1, 8),
    microbatches=(1, 24),
    backward=(0.5, 4.0, 0.5),
    message=(0.0, 2.0, 0.25),
)

# %% [markdown]
# Switch between `gpipe` and `1f1b`: the time of a step stays what it is, to the last slot. What changes is the second
# half of the title: in flight 8, 8, 8, 8 or 4, 3, 2, 1. So 1F1B is no *bubble* mitigation, as tables list it. It
# makes *more microbatches* affordable, and those shrink the bubble.

# %%
show(pictures.idle_by_microbatches)

# %%
sliders(pictures.idle_by_microbatches, stages=(2, 16), most_idle=(0.05, 0.5, 0.05))

# %% [markdown]
# "To keep the bubble under 25 % you need $M \ge 4n$" is too careful: $3(n-1)$ are enough. And at a given global batch
# it is the *number* of microbatches that counts; "tune the microbatch *size*" hides that smaller microbatches also
# make slower kernels.
#
# ### A chart that cannot be
#
# A handbook prints 1F1B like this. The checker reads it.

# %%
chart = schedules.parse_chart(HANDBOOK)
broken = schedules.violations(chart)
print(HANDBOOK)
right_chart = simulate(schedules.one_f_one_b(4, 8), Durations(F=1, B=1, W=0))
receipt(
    "the printed chart",
    [
        row("its orders are 1F1B's", True, chart.schedule.orders == schedules.one_f_one_b(4, 8).orders),
        row("gradients that come from another stage", None, sum(e.is_gradient for e in chart.schedule.messages)),
        row("    used before they are made", 24, len(broken)),
        row("    the first of them", None, str(broken[0])),
        row("its length in slots; the right chart's", None, (chart.makespan, right_chart.makespan)),
        row("the idle share it shows; the right one", None, (chart.idle_share, right_chart.idle_share)),
    ],
)

# %%
print(right_chart)

# %% [markdown]
# The orders are right, the times are impossible: B0 runs on all four stages in the same slot, though stage 0 needs
# stage 1's gradient first. Drawn like that a pipeline has no bubble to speak of. (On a profile you recognise a
# bubble by these gaps. "MFU below 50 %" is no symptom of one: well-tuned large runs have 35 to 50 %.)
#
# ### 3. Which layers go where
#
# The slowest stage sets the pace, and layers are not alike: the first stage has the embedding, the last one norm and
# head.


# %%
def balance(costs, parts):
    """costs: of each layer -> a list of ranges, one per stage: neighbouring layers, all of them, at least one each, so
    that the most expensive stage is as cheap as can be."""

    # BEGIN SOLUTION
    def slowest(cuts):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

    cuts = min(itertools.combinations(range(1, len(costs)), parts - 1), key=slowest)
    return [range(a, b) for a, b in itertools.pairwise((0, *cuts, len(costs)))]
    # END SOLUTION


balance = check("balance-stages", balance)

# %% [markdown]
# ### 4. A stage at work
#
# Now for real. Between two stages the graph is cut: autograd does not know that `x` came from another rank. So receive,
# *then* let it require a gradient; on the way back, receive the gradient of `y`, run backward from there, and send on
# what arrived in `x.grad`. The loss: the whole batch's mean is asked for.


# %%
class Stage:
    """One stage of a pipeline, told from outside what to do next."""

    def __init__(self, module, group, like, loss, microbatches):
        """module: this stage's layers; like: a tensor of the shape and dtype that travels between stages;
        loss(y, m): mean loss of microbatch m, to be called on the last stage with what its module returned."""
        self.module, self.group, self.like, self.loss, self.microbatches = module, group, like, loss, microbatches
        self.first, self.last = group.rank == 0, group.rank == group.world_size - 1
        self.kept = {}  # what backward needs, by microbatch
        self.sent = []  # handles of sends that nobody waits for yet

    def forward(self, m, x=None):
        """Microbatch m through this stage. x: on the first stage only, else None. Sends with async_op=True."""
        # BEGIN SOLUTION
        if not self.first:
            x = torch.empty_like(self.like)
            self.group.recv(x, self.group.rank - 1)
            x.requires_grad_()
        y = self.module(x)
        if self.last:
            y = self.loss(y, m) / self.microbatches
        else:
            self.sent.append(self.group.send(y, self.group.rank + 1, async_op=True))
        self.kept[m] = x, y
        # END SOLUTION

    def backward(self, m):
        """Adds microbatch m's gradient to the module's parameters, and lets go of what was kept for it."""
        # BEGIN SOLUTION
        x, y = self.kept.pop(m)
        if self.last:
            y.backward()
        else:
            gradient = torch.empty_like(y)
            self.group.recv(gradient, self.group.rank + 1)
            y.backward(gradient)
        if not self.first:
            self.sent.append(self.group.send(x.grad, self.group.rank - 1, async_op=True))
        # END SOLUTION


Stage = check("stage-step", Stage)

# %% [markdown]
# The gradients are those of one process, to the last bits of float64. Two sentences you may read are therefore wrong
# for every schedule that ends with a flush, as all of them here do: that a pipeline works with *stale* gradients, and
# that 1F1B needs *several versions of the weights*. Both are true of asynchronous PipeDream only, which you will meet
# below.
#
# ### 5. Messages that cannot deadlock
#
# Your sends did not wait. But NCCL carries out the messages of a group in the order in which they were posted, and each
# only when its partner has come to it: a *rendezvous*. Then order alone can deadlock:
#
#     stage 0   F1   send F1 to 1    recv B0 from 1   B0       stage 0 offers F1; stage 1 would first
#     stage 1   B0   send B0 to 0    recv F1 from 0   F1       get rid of B0, which stage 0 does not take yet


# %%
def place_messages(order, stage, stages):
    """order: ["F0", "F1", "B0", ...] of this stage -> the same with its messages: lists such as ["send F0", "recv B0"].

    "recv F0": its activation comes from stage - 1; "send F0": what F0 made goes to stage + 1; "recv B0": the gradient
    that B0 needs comes from stage + 1; "send B0": what B0 made goes to stage - 1. Messages in one list are posted at
    once; the stage goes on when all of them have been delivered.
    """
    # BEGIN SOLUTION
    steps = [[]]
    for action in order:
        source, target = (stage - 1, stage + 1) if action[0] == "F" else (stage + 1, stage - 1)
        if 0 <= source < stages:
            steps[-1].append(f"recv {action}")
        steps += [action, [f"send {action}"] if 0 <= target < stages else []]
    return [step for step in steps if step]
    # END SOLUTION


place_messages = check("rendezvous-messages", place_messages)

# %% [markdown]
# ### 6. A backward in two halves
#
# The stage before you waits for the gradient of your *input*; for the gradient of your *weights* nobody waits. Zero
# bubble (Qi et al. 2023) splits B: I at once, W whenever the stage would idle. (The paper goes on calling the first
# half B; torch says I and W, as here.)


# %%
class SplitLinear(torch.autograd.Function):
    """x @ weight.T with a backward in two halves."""

    @staticmethod
    def forward(ctx, x, weight, later):
        """x: [tokens, inputs], weight: [outputs, inputs], a leaf; later: a list -> [tokens, outputs]."""
        # BEGIN SOLUTION
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight.T
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """The gradient of x (None for the two others). Appends to later a function that adds weight's to its .grad."""
        # BEGIN SOLUTION
        x, weight = ctx.saved_tensors

        def weight_gradient():
            found = gradient.T @ x
            weight.grad = found if weight.grad is None else weight.grad + found

        ctx.later.append(weight_gradient)
        return gradient @ weight, None, None
        # END SOLUTION


SplitLinear = check("split-backward", SplitLinear)

# %% [markdown]
# I and W take as many FLOPs as F each, which is why "backward takes twice as long". And what fills the idle slots:

# %%
print(simulate(schedules.zero_bubble(4, 8)))
rows = []
for n in (4, 8):
    idle = {name: simulate(schedules.SCHEDULES[name](n, 2 * n)).idle[0] for name in ("1f1b", "zero_bubble")}
    rows.append(row(f"{n} stages, F = I = W = 1: idle slots of a stage under 1F1B", 3 * (n - 1), idle["1f1b"]))
    rows.append(row("    under zero bubble: a third", predict.zero_bubble_idle(n, 1, 2, 1), idle["zero_bubble"]))
receipt("what splitting buys", rows)

# %% [markdown]
# ### 7. One embedding on two stages
#
# With tied embeddings the *same* matrix embeds on the first stage and is the head on the last. Each stage has a copy,
# and each copy's gradient is a part of the whole.


# %%
def sum_tied(weight, group):
    """weight: the embedding (a parameter with .grad) on the first and the last stage, None on those between. Afterwards
    both have the gradient that the one embedding would have."""
    # BEGIN SOLUTION
    if weight is None or group.world_size == 1:
        return
    other, theirs = group.world_size - 1 - group.rank, torch.empty_like(weight.grad)
    group.exchange(send=(weight.grad, other), recv=(theirs, other))
    weight.grad += theirs
    # END SOLUTION


sum_tied = check("tied-embedding", sum_tied)

# %% [markdown]
# ## Yours under a transformer
#
# Your balance, order, stage and sum train a small transformer with tied embeddings on 4 stages, and on one.


# %%
def train_with_mine(group, steps=3):
    n, rank, count = group.world_size, group.rank, breaks.MICROBATCHES
    layers = balance(layer_costs(breaks.TIED), n)[rank]
    part = ModelPart(breaks.TIED, layers, first=rank == 0, last=rank == n - 1, seed=0)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.3)
    like = torch.empty(breaks.ROWS, breaks.SEQ, breaks.TIED.hidden_size)
    losses = []
    for step in range(steps):
        batch, seen = breaks.batch(step), []

        def loss(y, m, batch=batch, seen=seen):
            total, tokens = part.loss(y, batch[m, :, 1:])
            seen.append((total / tokens).item())
            return total / tokens

        stage = Stage(part, group, like, loss, count)
        for action in one_f_one_b_order(rank, n, count):
            m = int(action[1:])
            if action[0] == "F":
                stage.forward(m, batch[m, :, :-1] if rank == 0 else None)
            else:
                stage.backward(m)
        for handle in stage.sent:
            handle.wait()
        sum_tied(part.embedding.weight if rank in (0, n - 1) else None, group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(seen) / count)
    return losses


def both(group):
    alone = group.subgroup([0], "alone")
    return train_with_mine(group), train_with_mine(alone) if alone.rank == 0 else None


ranks = launch(both, 4, device="cpu")
four, one = ranks[-1][0], ranks[0][1]
receipt(
    "loss with your pipeline: 4 stages beside 1",
    [
        row(f"step {step}", alone, ours, tolerance=1e-4)
        for step, (ours, alone) in enumerate(zip(four, one, strict=True))
    ],
)

# %% [markdown]
# ## Measure: every schedule on a clock
#
# From here on, minillm's own `Pipeline` (`minillm/parallel/pipeline_parallel/runtime.py`): one interpreter that runs
# any schedule of `schedules.py`. To see *times* on two cores, devices are **emulated**: each action lasts as long as it
# would on a device of known speed (a stage's forward 40 ms, I and W as long), the computing is real, and what remains
# of the time is slept. So four ranks overlap like four devices. (Where something else on this machine got in the way,
# the quicker of two steps counts.) This is the rank program:

# %%
print(inspect.getsource(experiments.step))

# %%
EVERY = [Job(name) for name in pictures.EVERY]
SWEEP = [Job("1f1b", microbatches=m) for m in (1, 2, 4)]
SAME_BATCH = Job("1f1b", microbatches=4, speed=None, rows=2)  # half as many microbatches, twice as large
UNEVEN = {cut: Job("gpipe", speed=speed) for cut, speed in experiments.uneven_stages().items()}
found = experiments.run([*EVERY, *SWEEP, SAME_BATCH, *UNEVEN.values()])


def planned_and_measured():
    """1F1B on 4 emulated devices: planned bars (hollow) above measured ones (solid), rank by rank."""
    return pictures.draw_bars(Job("1f1b"), found[Job("1f1b")])


show(planned_and_measured)

# %%
rows = []
for job in [*EVERY, *SWEEP]:
    line, plan, formula = experiments.measured(job, found[job]), experiments.planned(job), experiments.idle_formula(job)
    name = f"{job.schedule}, {job.microbatches} microbatch{'es' * (job.microbatches > 1)}"
    rows.append(row(f"{name}: one step, emulated", plan.makespan, line.makespan, "s", tolerance=0.3))
    rows.append(row("    share of it computed", 1 - (formula or plan.idle_share), 1 - line.idle_share, "", 0.3))
    rows.append(row("    idle share: predicted, measured", None, (formula or plan.idle_share, line.idle_share)))
receipt("4 stages on emulated devices", rows)


# %%
def idle_of_every_schedule():
    """Idle share and time of a step of six schedules on 4 emulated devices, predicted and measured."""
    return pictures.draw_idle(experiments.rows_of({job: found[job] for job in EVERY}), 4, 8)


show(idle_of_every_schedule)

# %% [markdown]
# - **GPipe and 1F1B idle alike.** What is measured above the prediction is this machine: messages and Python, and on a
#   busy one whatever else runs.
# - **Interleaved** (Megatron): $v = 2$ *chunks* per rank, so that filling takes half as long: $(n-1)/(vM+n-1)$.
#   "Virtual pipeline stages", which tables list beside it, is the same thing under its other name.
# - **Zero bubble**: $(n-1)(F+I-W)$ of idle time against $(n-1)(F+I+W)$, a third if they are equal.
# - **Zero bubble V**: two chunks per rank, on a way there and back, so that the first rank has the loss and starts the
#   backward itself. **DualPipe** (DeepSeek-V3, 2024): microbatches enter at both ends, and every rank holds two stages,
#   its own and its mirror image's.
# - "Async" in front of *communication* (sends that do not wait, as yours) has nothing to do with *asynchronous
#   pipelines*.
#
# ## Measure: what they hold, what they send, what comes out

# %%
rows = []
for job in EVERY:
    ranks, where = found[job], f"{job.schedule}"
    n, m = job.stages, job.microbatches
    due = {
        "gpipe": [predict.in_flight_gpipe(m)] * n,
        "1f1b": [predict.in_flight_1f1b(n, s, m) for s in range(n)],
        "interleaved": [predict.in_flight_interleaved(n, 2, m, s) for s in range(n)],
        "zero_bubble": [predict.in_flight_zero_bubble(n, m)] * n,
        "zero_bubble_v": [predict.in_flight_zero_bubble(n, m)] * n,
        "dualpipe": [predict.in_flight_dualpipe(n)] * n,
    }[job.schedule]
    sends = {"interleaved": predict.sends(n, m, 2), "zero_bubble_v": 4 * m * (n - 1)}
    held = tuple(rank.peak_in_flight for rank in ranks)
    rows.append(row(f"{where}: microbatches in flight, by stage", tuple(map(float, due)), held))
    rows.append(row("    messages", sends.get(where, predict.sends(n, m)), sum(rank.messages for rank in ranks)))
    worst = max(rank.error for rank in ranks)
    rows.append(row("    gradients of one process (within 1e-12)", True, worst < 1e-12))
receipt("4 stages, 8 microbatches", rows)

# %% [markdown]
# Counted in microbatches. In bytes, by a census of every tensor that autograd saves:

# %%
ONE = Job("gpipe", microbatches=1, speed=None, census=True)
HELD = [Job(name, speed=None, census=True) for name in ("gpipe", "1f1b", "interleaved")]
REAL = [Job("1f1b", n, 8, None, experiments.WIDE, 32, 2) for n in (2, 4)]  # for later
census = experiments.run([ONE, *HELD, *REAL])
base = [rank.activation for rank in census[ONE]]
rows = [row("one microbatch: activations held by stages 0 to 3", None, tuple(base), "B")]
for job in HELD:
    for stage in (0, 3):
        due = int(schedules.peak_in_flight(job.built)[stage] * base[stage])
        name = f"{job.schedule}: stage {stage} at its fullest moment"
        expected = None if (job.schedule, stage) == ("interleaved", 3) else due  # of its chunks only one has the loss
        rows.append(row(name, expected, census[job][stage].activation, "B", tolerance=0.1))
receipt("bytes of activations, 4 stages, 8 microbatches", rows)

# %% [markdown]
# Read the rows of *interleaved* twice. It is called memory-efficient; it holds 5.5 stages' worth on the first stage
# where plain 1F1B holds 4, $1 + (n-1)/(nv)$ times as much, and it sends $2M(nv-1)$ messages, 112 instead of 48. It is
# lean beside GPipe only. And *no* schedule cuts the first stage's activations by $n$: 1F1B's first stage holds $n$
# microbatches of $1/n$ of the layers, as much as one process that accumulates.
#
# What the messages weigh:

# %%
width, seq = experiments.MODEL.hidden_size, experiments.SEQ
job = Job("1f1b")
total = sum(rank.bytes for rank in found[job])
whole = sum(rank.parameters for rank in found[job])
receipt(
    "bytes and parameters",
    [
        row("8 microbatches of 1 row: 2(n-1)·B·S·H·b", predict.sent_bytes(4, 8, seq, width, 8), total, "B"),
        row("4 microbatches of 2 rows: the same", total, sum(rank.bytes for rank in found[SAME_BATCH]), "B"),
        row("    sent by stages 0 to 3", None, tuple(rank.bytes for rank in found[job])),
        row("messages: 2M(n-1)", predict.sends(4, 4), sum(rank.messages for rank in found[SAME_BATCH])),
        row(
            "DualPipe: parameters on all ranks / the model's",
            2,
            sum(r.parameters for r in found[Job("dualpipe")]) / whole,
        ),
        row("microbatches for at most 25 % idle, n = 4: 3(n-1)", 9, predict.microbatches_needed(4, 0.25)),
    ],
)

# %% [markdown]
# Neither layers nor the number of microbatches are in it: a pipeline sends its borders' activations, once each way. A
# *middle* stage sends 2·B·S·H·b whatever $n$ is; the factor $n-1$ belongs to the total, which some tables print beside
# per-device numbers. That is why pipelines, of all the ways to divide a model, cross nodes best.
#
# ## Measure: this machine, nothing emulated

# %%
real = {job: census[job] for job in REAL}


def two_stages_as_they_are():
    """1F1B on 2 real ranks without any sleeping, planned with the mean durations that were measured."""
    return pictures.draw_bars(REAL[0], real[REAL[0]])


show(two_stages_as_they_are)

# %%
rows = []
for job, ranks in real.items():
    line = experiments.measured(job, ranks)
    plan = experiments.planned(job, line)
    where = f"{job.stages} ranks on {torch.get_num_threads()} threads of this machine"
    rows.append(row(f"{where}: idle share by the formula", None, predict.idle_share(job.stages, 8)))
    rows.append(row("    planned with the durations that were measured", None, plan.idle_share))
    rows.append(row("    measured", None, line.idle_share))
    rows.append(
        row("    step: planned, measured", None, tuple(format_value(t, "s") for t in (plan.makespan, line.makespan)))
    )
receipt("not emulated", rows)

# %% [markdown]
# With more ranks than cores a "device" gets slower whenever another one works, so idle time and slowness trade places.
# That is why the clock above was emulated, and why the rule of thumb holds on one GPU per stage and not here.
#
# ## Asynchronous pipelines
#
# PipeDream (Narayanan et al. 2019) never flushes: weights move after *every* backward. Then there is no bubble, and the
# two things above become true. Played in one process, in the order in which 4 stages would work:

# %%
late = stale.play(4, 16)
receipt(
    "PipeDream, 4 stages",
    [
        row(
            "weight versions kept, by stage: n - s",
            tuple(predict.weight_versions(4, s) for s in range(4)),
            tuple(late.versions),
        ),
        row(
            "updates a gradient is late: n - 1 - s", tuple(predict.staleness(4, s) for s in range(4)), tuple(late.late)
        ),
        row("gradients off from those of one process, by stage", None, tuple(late.off)),
        row(
            "1F1B: versions",
            (1, 1, 1, 1),
            tuple(v.held for v in schedules.weight_versions(schedules.one_f_one_b(4, 16))),
        ),
    ],
)

# %% [markdown]
# ## Break it
#
# Four accidents at the cut. Only one of them says anything.

# %%
accidents = launch(breaks.all_accidents, 2, device="cpu")

# %% [markdown]
# ### Scaled by microbatches, again and not at all
#
# Losses of microbatches *add up*. Who passes mean losses has to divide by $M$; who uses a runtime that divides as well
# divides twice. (pytorch#144352, torchtitan#800, DeepSpeed#8154 were of this kind.)

# %%
scaled = accidents[0]["scale"]
rows = []
for name, ratio in (("divided", 1), ("not divided", breaks.MICROBATCHES), ("divided twice", 1 / breaks.MICROBATCHES)):
    line = scaled[name]
    rows.append(row(f"loss {name}: gradient / that of one process", ratio, line["ratio"], "", 1e-6))
    rows.append(row("    loss after 6 steps of AdamW", None, line["AdamW"][-1]))
    rows.append(row("    of SGD", None, line["SGD"][-1]))
receipt("one model, three scales", rows)

# %% [markdown]
# AdamW divides by the gradient's own size, so its losses agree to several digits: the bug ships. SGD shows it, and so
# do clipping and every logged gradient norm. Compare *gradients*, with SGD, with one process.
#
# ### The tied embedding, not summed

# %%
tied = accidents[0]["tied"]
receipt(
    "distance of the two copies of one matrix, relative",
    [
        row(f"{name}, after {after} step{'s' * (after > 1)}", 0, apart[after - 1])
        for name, apart in tied.items()
        for after in (1, 6)
    ],
)

# %% [markdown]
# The two off verdicts are the point: after one step the "one" embedding is two (Megatron-LM#299). The loss goes down
# all the same, and the checkpoint stores whichever copy is written last.
#
# ### A norm that misses the others
#
# Clipping needs the norm of the whole gradient. A stage has a part of it, and the tied embedding is in two parts.

# %%
norms = [rank["norm"] for rank in accidents]
receipt(
    "norm of one gradient",
    [
        row("stage 0's own", None, norms[0]["this stage"]),
        row("stage 1's own", None, norms[1]["this stage"]),
        row("root of the sum of both squares", norms[0]["one process"], norms[0]["all stages hold"], "", 1e-6),
        row("    every parameter once", norms[0]["one process"], norms[0]["each parameter once"], "", 1e-6),
    ],
)

# %% [markdown]
# Two wrong ways: every stage clips by its own norm, or everything is added up and the copy is counted twice.
# (NeMo-RL#3788, torchtitan#596 and Megatron-LM#5916 are of this family.)
#
# ### Sends that wait
#
# The naive program: receive, compute, send, each waited for. First the checker, then two real ranks, for two seconds.

# %%
naive = schedules.messages_as_used(schedules.one_f_one_b(2, 4))
try:
    schedules.check(naive, batched=False)
except ScheduleError as error:
    print("the checker:", error)
print("\nthe ranks:")
print(breaks.deadlock())

# %% [markdown]
# ## Where it loses
#
# **Few microbatches.** With $M = 1$ a pipeline of 4 is one device at a time; you measured it above. **Uneven stages**:
# a head that costs as much as two layers, and as many layers on each stage.

# %%
rows = []
for cut, job in UNEVEN.items():
    line, plan = experiments.measured(job, found[job]), experiments.planned(job)
    closed = predict.uneven_makespan(job.speed, [2 * f for f in job.speed], 8)
    rows.append(row(f"{cut}: one step, emulated", closed, line.makespan, "s", tolerance=0.3))
    rows.append(row("    share of it computed", 1 - plan.idle_share, 1 - line.idle_share, "", tolerance=0.3))
alike = predict.makespan(4, 8, FORWARD_S, 2 * FORWARD_S)
rows.append(row("if all stages could be alike", None, alike, "s"))
rows.append(row("4 stages, 1 microbatch: idle share", 0.75, predict.idle_share(4, 1)))
receipt("GPipe on uneven stages, 8 microbatches", rows)

# %% [markdown]
# Not even the best cut is even, because layers are not divisible. A GPipe step takes the sum of the stage times
# and $M-1$ times the slowest: *more microbatches do not help against a slow stage*. Other losses: a global batch
# that cannot be cut into $M \gg n$ pieces (and smaller pieces make slower kernels: microbatching as such does not
# raise utilization, it only fills a pipeline); activations of the first stage, which do not shrink with $n$.
#
# ## The same in production
#
# torch's own pipeline, the same parts of the same model, the same tokens, on 2 ranks:

# %%
theirs = peers.peers()
rows = []
ours = theirs[-1]["minillm"]
for name, last in theirs[-1].items():
    scale = 4 if "False" in name else 1
    rows.append(row(f"{name}: loss", ours["loss"], last["loss"], "", 1e-9))
    rows.append(row("    gradient / that of one process", scale, max(rank[name]["ratio"] for rank in theirs), "", 1e-6))
receipt("torch.distributed.pipelining, 4 microbatches", rows)

# %% [markdown]
# The last torch row is the first accident as an argument: `scale_grads=False` is right for a loss that is a *sum*,
# and 4 times too large for a mean.
#
# | torch, Megatron-LM, DeepSpeed | here |
# |---|---|
# | `PipelineStage(module, index, num_stages, device)` | `ModelPart`, `build_parts` |
# | `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B` | `gpipe`, `one_f_one_b`, `interleaved` |
# | `ScheduleInterleavedZeroBubble` (the split, with several chunks) | `zero_bubble` (with one) |
# | `ScheduleZBVZeroBubble` | `zero_bubble_v` |
# | `ScheduleDualPipeV` (one copy of the parameters) | `dualpipe` (two) |
# | `scale_grads=True` (the default) | divide each loss yourself |
# | Megatron `--pipeline-model-parallel-size 4` | 4 stages |
# | Megatron `--num-layers-per-virtual-pipeline-stage 2` | `interleaved(4, M, chunks)`: 2 layers per chunk |
# | Megatron `send_forward_recv_backward` | your lists of messages posted at once |
# | DeepSpeed `PipelineModule(layers, num_stages, partition_method="parameters")` | `balance(layer_costs(config), n)` |
#
# ## On a cluster
#
# `labs/torchrun/06_pipeline_parallel.py` holds the 1F1B order, the stage and the sum of the tied embedding for any
# number of processes:
#
# ```bash
# python course/lab06_pipeline_parallel/torchrun.py                                   # 4 stages here
# torchrun --nproc-per-node 4 course/lab06_pipeline_parallel/torchrun.py              # the same, under torchrun
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
#          --rdzv-endpoint $HEAD_NODE:29500 course/lab06_pipeline_parallel/torchrun.py   # on each of two nodes
# ```
#
# ## Interview corner
#
# The numbers first, all by the formulas you have just checked:


# %%
def number(name, value, unit=""):
    print(f"{name:<70}{format_value(value, unit):>14}")


number("1. idle share, 8 stages, 32 microbatches", predict.idle_share(8, 32))
number("   the same by (n-1)/M", predict.overhead(8, 32))
number("2. microbatches for at most 10 % idle, 8 stages", predict.microbatches_needed(8, 0.10))
number("3. in flight on stage 0 of 8, 32 microbatches: GPipe", predict.in_flight_gpipe(32))
number("   1F1B", predict.in_flight_1f1b(8, 0, 32))
number("   1F1B on stage 7", predict.in_flight_1f1b(8, 7, 32))
number("4. interleaved, 4 chunks: idle share", predict.idle_share(8, 32, 4))
number("   in flight on stage 0, in stages' worth", predict.in_flight_interleaved(8, 4, 32))
number("   messages, against 1F1B's", predict.sends(8, 32, 4) / predict.sends(8, 32))
number("5. zero bubble, 8 stages: idle slots (F = I = W = 1)", predict.zero_bubble_idle(8, 1, 2, 1))
number("   1F1B", 7 * 3)
number(
    "6. 256 sequences of 4,096 x 8,192 in bf16, 8 stages: bytes sent",
    predict.sent_bytes(8, 256, 4096, 8192, 2) / 1e9,
    "GB",
)
number("   by one middle stage", predict.sent_bytes(2, 256, 4096, 8192, 2) / 1e9, "GB")
slow = predict.uneven_makespan([1, 1, 1, 1.5], [2, 2, 2, 3], 32) / predict.makespan(4, 32, 1, 2)
number("7. one of 4 stages half as slow again, 32 microbatches: step / even step", slow)
number("8. DualPipe: copies of the parameters", predict.parameter_copies("dualpipe"))

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. How large is a pipeline's bubble?**
# <details><summary>Answer</summary>
#
# $(n-1)/(M+n-1)$ of the step, for GPipe and 1F1B alike: 8 stages and 32 microbatches idle 17.9 %. $(n-1)/M$, here
# 21.9 %, is idle over *useful* time. The two agree only when $M \gg n$; at $n = M = 4$ they say 75 % and 43 %.
# </details>
#
# **2. How many microbatches do you need?**
# <details><summary>Answer</summary>
#
# $M = (n-1)(1-x)/x$ for an idle share $x$: 63 for 10 % and 8 stages; $3(n-1)$ for a quarter. What limits it: global
# batch / (data parallel ranks · microbatch size).
#
# *Follow-up: the global batch is fixed. Smaller microbatches?* They raise $M$, until kernels get slow.
# </details>
#
# **3. What does 1F1B buy over GPipe?**
# <details><summary>Answer</summary>
#
# Memory: stage $s$ holds $\min(n-s, M)$ microbatches instead of $M$, 8 instead of 32. Not time. That the memory no
# longer depends on $M$ is what makes a large $M$ possible.
# </details>
#
# **4. And interleaving over 1F1B?**
# <details><summary>Answer</summary>
#
# Time, for memory and messages: with 4 chunks 5.2 % idle instead of 17.9 %, but 9.75 stages' worth of activations in
# flight instead of 8, and 4.4 times the messages. $M$ should be a multiple of $n$: what is left over must be at least
# $n$ in today's Megatron-Core, and had to be nothing before.
# </details>
#
# **5. Where do zero-bubble schedules find their time?**
# <details><summary>Answer</summary>
#
# In the weight gradients, which nobody waits for. I goes back at once, W fills slots that were idle: 7 instead of 21
# at $n = 8$. Price: inputs and output gradients of every layer are kept until W. And where no gap is left at all (zero
# bubble V), ranks come to the optimizer at different times, so a step cannot wait for the norm of the whole gradient:
# the paper steps at once, and takes it back if the norm says so.
# </details>
#
# **6. Pipeline or tensor parallelism across nodes?**
# <details><summary>Answer</summary>
#
# Pipeline. A border carries $B \cdot S \cdot H$ each way per step, whatever the number of layers: 34.4 GB for the
# numbers above by a middle stage, forward and backward; tensor parallelism all-reduces that four times per *layer*.
# And its messages can travel while the stage computes.
# </details>
#
# **7. One stage is 50 % slower. What does that cost?**
# <details><summary>Answer</summary>
#
# Nearly 50 %: the step takes the sum of the stages and $M-1$ times the slowest. More microbatches do not help. Move
# layers; give the last stage fewer, because of the head.
# </details>
#
# **8. What does DualPipe cost?**
# <details><summary>Answer</summary>
#
# Twice the parameters on every rank (each holds two mirrored stages), $n + 1$ microbatches in flight, one more sum of
# gradients. For that, communication of one direction hides behind the other's compute, which matters with expert
# parallelism's all-to-alls.
# </details>
#
# **9. Gradients of your pipeline are 8 times those of one process. Why did nobody notice?**
# <details><summary>Answer</summary>
#
# Mean losses of 8 microbatches were added up without a division, and AdamW is invariant to the scale. Symptoms:
# gradient norms 8 times too large, clipping at every step. Test with SGD, on gradients.
# </details>
#
# **10. Two ranks hang in send. What happened?**
# <details><summary>Answer</summary>
#
# Under rendezvous a send returns when the other side receives. In 1F1B's steady state two neighbours send to each
# other at the same moment. Post send and receive together (`batch_isend_irecv`), or let the activation go first.
# </details>
#
# **11. Does pipelining make gradients stale?**
# <details><summary>Answer</summary>
#
# Not with a flush per step: you compared in float64, to 1e-12. PipeDream without flushes: $n-1-s$ updates late on stage
# $s$, $n-s$ versions of the weights kept so that a microbatch goes back through what it came through.
# </details>
#
# **12. Pipeline and ZeRO together?**
# <details><summary>Answer</summary>
#
# Stage 1. Stages 2 and 3 reduce or gather per *microbatch* (lab 04: $(K+1)P$ and $3KP$), and pipelines have many. And
# gradients are reduced in the last backward of each part only.
# </details>
#
# ## Can you answer them now?
#
# 1. For which share of a step do stages idle, and what does, and does not, change it?
# 2. What does each stage hold at most under GPipe, 1F1B, interleaving, zero bubble and DualPipe, and what do they send?
# 3. Which mistakes at the cut between two stages leave the loss looking right?
#
# Next: lab 07 cuts the one dimension that is still whole, the sequence.
