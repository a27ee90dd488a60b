# %% [markdown]
# # 10 · Fault tolerance
#
# **A checkpoint exists when it has been restored elsewhere; a job survives when it has been killed often.** You build the
# files, the state and the accounting, and the checks do the killing.
# Stands on labs 02 (what a step holds), 03 (replicas) and 04 (sharded state).
#
# About 4 hours; the core path of two is the exercises (105 minutes) with the cells beside them. Run All takes about a
# minute. At the end you can answer:
#
# 1. In which order is a checkpoint written, so that a kill at any instant leaves the one before or the one after?
# 2. What has to be in it for the next loss to be equal in every bit, and what if the number of ranks is another?
# 3. How often do you save, how do you find the rank that is to blame, and what share of the hours is left?
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import copy
import hashlib
import inspect
import json
import math
import random
import zlib
from statistics import median

import torch

from course.kit import check, finish, hint, show, sliders
from course.lab10_fault_tolerance import experiments, experiments_breaks, figures, receipts
from course.lab10_fault_tolerance import experiments_production as production
from course.lab10_fault_tolerance.loop import Loop, Order

# %% [markdown]
# ## How often does something fail?
#
# Meta trained Llama 3 405B on 16,384 GPUs and counted 419 unexpected interruptions in 54 days ([Llama Team
# 2024](https://arxiv.org/abs/2407.21783), §3.3.4).
#
# ## Predict
#
# **How many hours lay between two interruptions?** Write down your guess. (The default is a day.)

# %%
guess_hours = 24.0  # your guess

# %%
receipts.interruptions(guess_hours)

# %% [markdown]
# Nothing in such a job is unreliable. There is just a lot of it, and any part stops the whole job. By the percentages of
# the paper's table (its counts give 64 %) 59 % of the interruptions came from GPUs and their memory; 6 of the 419 were
# silent data corruption. So "a GPU fails every 5.8 years" below means its share of all causes.
#
# ### Common claims
#
# | Claim | What is true |
# |---|---|
# | "Rank 0 saves the metadata, then all ranks meet in a barrier." | The metadata is the promise that everything is there. It is written *after* the barrier; else a kill in between leaves a checkpoint that looks complete. You will count how often. |
# | "Save when all ranks have completed the current microbatch." | Gradients of half a step are in no checkpoint. Finish the optimizer step. |
# | "Rank 0 saves the model and the optimizer." | With a sharded optimizer rank 0 has 1/N of it ([transformers #23034](https://github.com/huggingface/transformers/issues/23034), [#48569](https://github.com/huggingface/transformers/issues/48569), [nanotron #106](https://github.com/huggingface/nanotron/issues/106)). |
# | "Elastic training rebalances the work." | torchrun [stops and restarts all workers](https://docs.pytorch.org/docs/stable/elastic/run.html). Restoring, resharding and keeping the global batch are your program's task. |
# | "Asynchronous saves are free." | They take a copy of the state in host memory, and a failure also undoes the time of the write. |
# | "A health check keeps a bad GPU from stalling the job." | It tells you which one it is. The collective hangs until something ends it. |
#
# ## Build it
#
# ### 1. When does it count? (20 minutes)
#
# Each rank writes its shard. Between two of these writes anything can happen: a rank is killed, or the power fails. After
# a power cut the disk may have kept all unflushed data, none of it, or names without contents: a file that was being
# written or replaced comes back cut in half. Find an order in which `load` always finds a whole checkpoint.
#
# The check plays your `save` on 3 ranks with a disk of its own, stops it after every single operation, kills every rank
# at every point, and lets `load` look at what is left. Then a restarted job, with one rank fewer, saves over the remains.
# `disk` has `write(path, bytes)`, `flush(path)`, `rename(old, new)`, `remove(path)`, `read(path)`, `exists(path)` (of
# a file or a folder) and `list(folder)`, which gives names without their folder, and nothing for a folder that is not
# there. `flush` of a file makes its contents last, and the name that it was written under. `rename` moves a file or a
# whole folder at once; the new name is an entry of the folder above, which `flush` of that folder makes last. `"."` is
# the folder of all. `group` has `rank`, `world_size` and `barrier()`.


# %%
def save(step, shard, group, disk):
    """Every rank calls it with its own shard (bytes).
    When it has returned on all ranks, the checkpoint is safe."""
    # BEGIN SOLUTION
    draft = f"draft-{step}"
    disk.write(f"{draft}/{group.rank}", shard)
    disk.flush(f"{draft}/{group.rank}")
    group.barrier()  # all shards are on the disk
    if group.rank == 0:
        disk.write(f"{draft}/manifest", str(group.world_size).encode())
        disk.flush(f"{draft}/manifest")
        disk.rename(draft, f"step-{step}")  # from here on it counts
        disk.flush(".")
    group.barrier()
    # END SOLUTION


def load(disk):
    """-> (step, [shard of rank 0, shard of rank 1, ...]) of the latest checkpoint that is whole;
    None if there is none."""
    # BEGIN SOLUTION
    steps = [int(name.removeprefix("step-")) for name in disk.list() if name.startswith("step-")]
    if not steps:
        return None
    folder = f"step-{max(steps)}"
    ranks = int(disk.read(f"{folder}/manifest"))
    return max(steps), [disk.read(f"{folder}/{rank}") for rank in range(ranks)]
    # END SOLUTION


save, load = check("atomic-commit", (save, load))

# %% [markdown]
# (`rename` refuses a name that is there: a run that goes back removes the later checkpoints first.)
#
# The order that many texts give, beside the one above. Its reader is given every benefit of the doubt: it ignores folders
# without metadata. How many of all kills leave a folder that it takes for whole and that is not?

# %%
print(inspect.getsource(experiments_breaks.metadata_first))
receipts.torn()

# %% [markdown]
# ### 2. Is it still what was written? (15 minutes)
#
# Disks and networks lose bits, copies end early, people mix up files. Nothing of that raises an error: weights with one
# wrong exponent load very well. So a checkpoint carries its own description. It is kept outside the
# folder; files that it does not name are no damage.


# %%
def describe(folder):
    """folder: a pathlib.Path with files
    -> a text that says what is in each, good enough to find any damage later."""
    # BEGIN SOLUTION
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = [path.stat().st_size, zlib.crc32(path.read_bytes())]
    text = json.dumps(files)
    return f"{hashlib.sha256(text.encode()).hexdigest()} {text}"
    # END SOLUTION


def damaged(folder, manifest):
    """manifest: what `describe` said once -> names of the files that are not what they were;
    [] if all are.

    The text itself may have suffered: then ["manifest"].
    """
    # BEGIN SOLUTION
    digest, _, text = manifest.partition(" ")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return ["manifest"]
    found = []
    for name, (size, checksum) in json.loads(text).items():
        path = folder / name
        changed = not path.is_file() or path.stat().st_size != size
        if changed or zlib.crc32(path.read_bytes()) != checksum:
            found.append(name)
    return found
    # END SOLUTION


describe, damaged = check("checkpoint-manifest", (describe, damaged))

# %% [markdown]
# ### 3. Another number of ranks (15 minutes)
#
# Eight ranks saved, six are left. Nobody should have to read the whole tensor: each rank reads the bytes that it will
# hold, and they may lie in several files, however the tensor was cut. Rank $r$ of $N$ holds elements $\lfloor rS/N \rfloor$ to
# $\lfloor (r+1)S/N \rfloor$ of the $S$ elements of the flattened tensor.
#
# `part.start` and `part.stop` say which elements a saved part has, `part.file` and `part.offset` where they are (offset
# in bytes); the parts come in no order. `read(file, offset, nbytes)` returns bytes, and the check counts them.


# %%
def load_part(read, parts, numel, itemsize, rank, world_size):
    """-> the bytes of this rank's elements, in order. itemsize: bytes of an element."""
    # BEGIN SOLUTION
    first, last = numel * rank // world_size, numel * (rank + 1) // world_size
    found = []
    for part in sorted(parts, key=lambda part: part.start):
        begin, end = max(first, part.start), min(last, part.stop)
        if begin < end:
            found.append(
                read(
                    part.file,
                    part.offset + (begin - part.start) * itemsize,
                    (end - begin) * itemsize,
                )
            )
    return b"".join(found)
    # END SOLUTION


load_part = check("reshard", load_part)

# %% [markdown]
# minillm's checkpoints do this for every layout: tensors have the names and shapes of the whole model, and a part is a
# list of runs in the flattened tensor (`minillm/train/checkpoint/runs.py`), whether cut by rows, by columns or flat. Here ZeRO 3
# on 4 ranks saves, and three other layouts restore weights and Adam's moments:

# %%
layouts = experiments.reshard()
receipts.reshard(layouts)

# %% [markdown]
# ### 4. The same bits (15 minutes)
#
# A resumed run should give the very losses of a run that nobody stopped. That is worth having: any difference is then a
# bug. Read this loop and find everything that the next step depends on.

# %%
print(inspect.getsource(Order), "\n\nclass Loop:", sep="")
for method in (Loop.__init__, Loop.step):
    print(inspect.getsource(method))

# %% [markdown]
# `loop.order` has the attributes `seed`, `epoch` and `position`. What you return is written to disk *later*, while
# training goes on, and is read back with `torch.load(..., weights_only=True)`: tensors, numbers, texts, tuples, lists and
# dicts.


# %%
def capture(loop):
    """-> all that `restore` needs to go on as if nothing had happened."""
    # BEGIN SOLUTION
    state = {
        "model": loop.model.state_dict(),
        "optimizer": loop.optimizer.state_dict(),
        "scheduler": loop.scheduler.state_dict(),
        "order": vars(loop.order),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }
    return copy.deepcopy(state)
    # END SOLUTION


def restore(loop, state):
    """loop: a new one, with other weights, another order and other generators.
    `state` may be restored more than once."""
    # BEGIN SOLUTION
    state = copy.deepcopy(state)
    loop.model.load_state_dict(state["model"])
    loop.optimizer.load_state_dict(state["optimizer"])
    loop.scheduler.load_state_dict(state["scheduler"])
    vars(loop.order).update(state["order"])
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    # END SOLUTION


capture, restore = check("resume-state", (capture, restore))

# %% [markdown]
# What if one of them is forgotten? No error, and the loss looks like a loss:

# %%
forgotten = experiments.forgotten()
receipts.forgotten(forgotten)

# %% [markdown]
# On a GPU add `torch.cuda.get_rng_state()`, with numpy `numpy.random.get_state()`, with data workers the state of each;
# and every *rank* has its own. minillm needs neither scheduler nor order: its learning rate is a function of the step
# and its windows of the seed and a position, so a step number and a position are all there is to save.
#
# ### 5. Where the hours go (20 minutes)
#
# A save costs time, and so does a failure: the work since the last save, and the restart. Play such a job. Work goes in
# intervals with a save after each (also after the last, which may be shorter). A failure stops everything at once; an
# unfinished save is worth nothing. Then a restart takes `restart_s`, begins anew if another failure falls into it, and the
# job goes on from its last save.


# %%
def play(work_s, interval_s, save_s, restart_s, failures):
    """failures: a tuple of instants in seconds since the start, ascending
    -> seconds by use, as a dict.

    "useful": work that counts, work_s in the end; "saving": saves, the unfinished part of one too;
    "lost": work that was undone; "restarting": restarts, unfinished ones too.
    """
    # BEGIN SOLUTION
    spent = dict.fromkeys(("useful", "saving", "lost", "restarting"), 0.0)
    upcoming = iter([*failures, math.inf])
    fails, now = next(upcoming), 0.0
    while spent["useful"] < work_s:
        work = min(interval_s, work_s - spent["useful"])
        if now + work + save_s <= fails:
            now += work + save_s
            spent["useful"] += work
            spent["saving"] += save_s
            continue
        worked = min(work, fails - now)
        spent["lost"] += worked
        spent["saving"] += fails - now - worked
        now, fails = fails, next(upcoming)
        while fails < now + restart_s:
            spent["restarting"] += fails - now
            now, fails = fails, next(upcoming)
        spent["restarting"] += restart_s
        now += restart_s
    return spent
    # END SOLUTION


play = check("goodput", play)

# %% [markdown]
# Your job, played with random failures for many intervals, beside the two formulas: saving costs $C/t$, a failure half an
# interval and a restart. The sum is smallest at $t = \sqrt{2\,C \cdot \text{MTBF}}$ ([Young
# 1974](https://doi.org/10.1145/361147.361115); [Daly 2006](https://doi.org/10.1016/j.future.2004.11.016) has the next
# terms).

# %%
played = experiments.intervals(play)
show(figures.draw_intervals, found=played)

# %%
receipts.intervals(played)

# %% [markdown]
# The minimum is flat: twice or half the interval costs little. What is worth work is the cost of a save, and of a restart.
# By the number of GPUs, with a save of 60 s (a model of 405 billion parameters needs 57 at 100 GB/s):

# %%
show(figures.goodput_by_gpus)

# %%
sliders(figures.goodput_by_gpus, save_s=(1, 300, 1), restart_min=(1, 60))

# %%
receipts.llama()

# %% [markdown]
# ### 6. Who is slow? (10 minutes)
#
# One slow rank slows all: they meet in the all-reduce, so step times are equal and say nothing. What is a rank's own?


# %%
def slow_ranks(steps, factor=2.0):
    """steps[s][r]: (seconds of step s on rank r, seconds of these that it waited for others)
    -> the slow ranks.

    A rank is slow if its usual step takes more than `factor` times the work that is usual among the
    *other* ranks. A step that something held up once says nothing about a rank.
    """
    # BEGIN SOLUTION
    ranks = range(len(steps[0]))
    own = [median(step[rank][0] - step[rank][1] for step in steps) for rank in ranks]
    others = [median(own[other] for other in ranks if other != rank) for rank in ranks]
    return [rank for rank in ranks if own[rank] > factor * others[rank]]
    # END SOLUTION


slow_ranks = check("straggler", slow_ranks)

# %% [markdown]
# On 4 real ranks, of which rank 2 sleeps three times as long:

# %%
steps = experiments.slow_rank()
receipts.slow(steps, slow_ranks(steps))

# %% [markdown]
# And steps that are late now and then? Of 100 steps, every tenth saves, and one waits for a slow read:

# %%
receipts.late_steps()

# %% [markdown]
# The median says what is usual, p99 what one step in a hundred costs. A late step's cause is the part that exceeds its *own*
# median most.
#
# ## Measure: what a save costs
#
# A trainer under ZeRO 3 on 2 ranks saves in the foreground, then in the background. Each rank writes what it alone holds.

# %%
saves = experiments.saves()
receipts.saves(saves)

# %% [markdown]
# In the background training waits for the copy and for the Python that lists the tensors. Ranks meet only before the next
# save, to hear of this one. The copy grows with what the rank writes, with Adam 12 to 14 bytes per parameter of its shard
# in host memory.
#
# ## A job that is killed
#
# 3 ranks train and save every 4 steps. After step 7 one of them gets a SIGKILL, after step 14 another. A supervisor of
# eight lines starts the job again with the ranks that are left. Beside it: the same run on one rank, undisturbed.

# %%
print(inspect.getsource(experiments.supervise))

# %%
whole, killed = experiments.run(()), experiments.run()
show(figures.draw_run, found=killed, whole=whole)

# %%
receipts.killed(whole, killed)

# %% [markdown]
# The losses agree to the last digits of float32, because a step has the same 12 windows on any number of ranks (3 · 4,
# 2 · 6, 1 · 12): microbatches make up for lost ranks (`minillm/train/fault_tolerance/elastic.py`), and the position in the
# data is saved. Only the order of additions changes. Resumed on as many ranks, the bits are the same.
#
# The bar is made from `time.jsonl`. *Lost* are steps that were made again.
#
# ## Break it
#
# ### A rank that goes its own way
#
# A loss is not a number, and a careful colleague skips that batch. On one rank it happens, on the others not
# ([torchaudio #3749](https://github.com/pytorch/audio/issues/3749): a NaN on one rank, a return before the all-gather).

# %%
print(inspect.getsource(experiments_breaks.skip_bad_batch))
table, seconds = experiments_breaks.hang()
print(table)

# %%
receipts.hang((table, seconds))

# %% [markdown]
# Nobody fails, everybody waits, and the time until somebody knows is the timeout that you have set (NCCL's is 10 minutes
# unless `init_process_group(timeout=...)` says otherwise).
#
# A timeout says that something is wrong; a heartbeat says what. A thread of each rank notes every few seconds that it
# lives, how far it is and whether it waits for others (`minillm/train/fault_tolerance/heartbeat.py`). Here processes are
# killed and stopped for real, and a neighbour is asked half a minute later, by a clock that is set forward:

# %%
receipts.health()

# %% [markdown]
# *Waiting* is never to blame. *Silent* is all that can be known of another machine: it may be dead, or cut off and still
# training, so it must be shut out before others take its place.
#
# ### 7. Find the bug, and mend it (10 minutes)
#
# Which line is to blame? Write the function so that no rank is ever left alone: 3 ranks, several batches, some of which
# have a loss that is not finite on one rank.


# %%
def skip_together(loss, gradient, group):
    """loss, gradient of this rank -> the mean gradient over the ranks;
    None on every rank if any loss is not finite."""
    # BEGIN SOLUTION
    bad = torch.tensor(0.0 if torch.isfinite(loss) else 1.0)
    if group.all_reduce(bad) > 0:
        return None
    return group.all_reduce(gradient) / group.world_size
    # END SOLUTION


skip_together = check("same-branch", skip_together)

# %% [markdown]
# ### Half of the state
#
# Two bugs that training survives, so that nobody looks. Under ZeRO rank 0 saves `optimizer.state_dict()`:

# %%
receipts.rank_0()

# %% [markdown]
# And the learning rate: a scheduler that is stepped once per microbatch (4 of them) is at its end after a quarter of the
# steps, and one whose state was not saved warms up again.

# %%
show(figures.draw_schedules)

# %% [markdown]
# ### Silently wrong
#
# A device computes a wrong bit now and then and reports nothing ([Dixit et al.
# 2021](https://arxiv.org/abs/2102.11245)). In 3 replicas one bit of one weight of rank 1 is flipped:

# %%
receipts.corruption()

# %% [markdown]
# Replicas must be equal in every bit, so a hash of each weight tells, and among three or more the majority says who is
# wrong. minillm compares before every save, so that replicas which differ are not saved.
# A wrong *gradient* passes this test: the all-reduce hands it to all replicas alike. So does a weight that only one rank
# holds, as under ZeRO 3. What such errors do to a training run: [Ma et al. 2025](https://arxiv.org/abs/2502.12340).
#
# A loss that is no number, or far above the recent ones, can be refused before its update: the run goes back to its last
# snapshot, and on past the batches since (`--spike-nats`). Here the weights of the last norm become NaN, and later a thousand
# times too large:

# %%
receipts.rollback()

# %% [markdown]
# ## Where it loses
#
# Saves on an *emulated* disk that takes 80 ms for a file, while a step takes 20 ms:

# %%
often = experiments.too_often()
receipts.too_often(often)

# %% [markdown]
# Saving after every step is ruinous in the background too: the next save has to wait until the last one is written.
#
# - *Slow disks*: the interval grows with the root of the cost, and so does the waste: a twentieth of the bandwidth costs
#   4.5 times as much (the first two rows of design question B).
# - *Few GPUs*: on 8 of them a failure comes once in nine months, and an hour between saves is good enough.
# - *Elastic*: fewer ranks keep the batch by more microbatches, so each step takes longer. A spare node is faster.
#
# ## The same in production
#
# [torch.distributed.checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html) saves DTensors by parts
# and reads them on any mesh. Live: `async_save` on 2 ranks that go on at once, `load` on 3; then one bit of a file is
# flipped; then `.metadata`, which is written last, is taken away.

# %%
theirs = production.distributed_checkpoint()
receipts.distributed_checkpoint(theirs)

# %% [markdown]
# The same idea as in exercises 1 and 3, without the one of exercise 2: there are no checksums of the contents.
#
# [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) watches its workers and starts *all* of them again when
# one fails. Live: 2 workers count to 10 and save every 4, the first is killed after 6.

# %%
agent = production.elastic()
receipts.elastic(agent)

# %% [markdown]
# | | restart | save | reshard | hang |
# |---|---|---|---|---|
# | here | `supervise`; `minillm train` under torchrun | `--save-every`, `--save-in-background` | `--resume` in any layout | `launch(timeout=)`, heartbeats |
# | torch | `torchrun --nnodes 3:4 --max-restarts` | `dcp.async_save` | `dcp.load` | `init_process_group(timeout=)`, `TORCH_NCCL_ASYNC_ERROR_HANDLING`, [flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html) |
# | [torchft](https://github.com/meta-pytorch/torchft) | a replica group at a time, without a restart of all | live from a peer | | quorum per step |
# | [Megatron Core](https://github.com/NVIDIA/Megatron-LM/tree/main/megatron/core/dist_checkpointing) | by the scheduler | `--async-save` | `dist_checkpointing` | [nvidia-resiliency-ext](https://github.com/NVIDIA/nvidia-resiliency-ext) |
#
# What large jobs do about the hours that are left:
#
# - *Lost work*: [GEMINI](https://doi.org/10.1145/3600006.3613145) copies checkpoints into a neighbour's memory, up to one
#   per step. [MegaScale](https://arxiv.org/abs/2402.15627) copies to the host in seconds and writes later; after a failure
#   one rank reads what a group shares and hands it on.
# - *Restarts*: [Bamboo](https://arxiv.org/abs/2204.12013) lets each stage compute its neighbour's layers too, and
#   [Oobleck](https://arxiv.org/abs/2309.08125) has pipelines of several lengths ready; the others go on.
#
# ## On a cluster
#
# `labs/torchrun/10_fault_tolerance.py` saves and reshards on any number of processes. After solving it:
# `torchrun --nproc-per-node 8 labs/torchrun/10_fault_tolerance.py`. A training run that goes on with the nodes that are
# left, under torchrun, Slurm and Kubernetes: [docs/runs.md](../docs/runs.md).
#
# ## Design questions
#
# Work each one out on paper, then run the cell below it.
#
# **A. A 70B model (14 bytes per parameter in a checkpoint) on 2,048 GPUs, each of which fails as often as Meta's. The
# storage takes 100 GB/s in all, a GPU's copy to the host 20 GB/s, a restart 8 minutes. How often do you save, in the
# foreground and in the background, and what does each leave?**

# %%
receipts.design_interval()

# %% [markdown]
# <details><summary>Answer</summary>
#
# The checkpoint has 980 GB, 480 MB per GPU, so a write takes 9.8 s and a copy 24 ms. A job of 2,048 GPUs fails every 25
# hours. In the foreground √(2 · 9.8 s · 25 h) is 22 minutes and wastes 2 %, of which half a percent are restarts. In the
# background the stall is 24 ms, and Young's formula would save every minute, which a write of 10 s allows; but then the
# storage is busy a sixth of the time. Every 5 minutes costs 0.1 % more and needs a thirtieth. So: in the background
# every 5 minutes, and then work on the restart, which is most of what is left.
# </details>
#
# **B. The same job on 16,384 GPUs with a 405B model. Which of these three helps most: storage of 2 TB/s instead of 100
# GB/s, saves in the background, or restarts of 2 minutes instead of 8?**

# %%
receipts.design_lever()

# %% [markdown]
# <details><summary>Answer</summary>
#
# Saves in the background. 5.7 TB at 100 GB/s take 57 s, with a failure every 3.1 hours: 10 % for saves and lost work,
# 4 % for restarts. The background takes most of the 10 %, twenty times the bandwidth nearly as much. It costs host memory
# (350 MB per GPU) and no new storage, but at this interval the storage writes all the time. Then the restart is the
# largest part, and the third lever the next. Meta reports more than 90 % of effective training time, with storage of
# 2 TB/s.
# </details>
#
# ## Capstone (*open*)
#
# 1,024 GPUs in nodes of 8, 4 spare nodes, a 70B model, nodes that come back after an hour of repair. Choose: where a
# checkpoint goes first (host memory, local disk, a neighbour, shared storage), how often each, what restarts, what is
# replaced, what happens to the batch meanwhile. Defend it with `minillm.predict.faults` (formulas and simulation), and name
# the drill that would prove it: who pulls which plug, and how often.
#
# ## Interview corner
#
# Say your answer aloud before you open one.
#
# **1. Why is the manifest written last?**
# <details><summary>Answer</summary>
#
# It is the promise that the rest is there. Shards and their flush, a barrier, manifest and its flush, a rename, a flush of
# the folder: a kill anywhere leaves the old checkpoint or the new one.
# </details>
#
# **2. What does a flush before a rename buy?**
# <details><summary>Answer</summary>
#
# A file system may keep the new name and lose the contents: then a checkpoint has its final name and zeros in it. The
# process alone being killed cannot do that, a power cut can.
# </details>
#
# **3. What has to be saved besides weights?**
# <details><summary>Answer</summary>
#
# Optimizer state, step (or scheduler), loss scale, position in the data and its seed, generators of every rank, the
# configuration and the tokenizer's fingerprint. And float32 masters if weights have 16 bits.
# </details>
#
# **4. You saved on 512 GPUs and have 480. What changes?**
# <details><summary>Answer</summary>
#
# Each rank reads the ranges that it will hold. The global batch stays if microbatches make up for the ranks (480 must
# divide it), else learning rate and curve change. Generators per rank have no exact counterpart: dropout differs.
# </details>
#
# **5. A step suddenly takes twice as long. Which rank is it?**
# <details><summary>Answer</summary>
#
# Step times are equal everywhere. Compare own work, that is time minus waiting in collectives, by rank and phase, over
# some steps, among ranks of the same pipeline stage. The slow one is the one that does not wait.
# </details>
#
# **6. All GPUs at 100 % and no progress?**
# <details><summary>Answer</summary>
#
# A collective that spins. Find the rank that is *not* in it (flight recorder: sequence numbers, last entered operation);
# it took another branch, died, or waits for data. Until the timeout nothing ends it, and after it the communicator is
# dead: end the processes and start from the last checkpoint.
# </details>
#
# **7. The loss jumps and stays up. What do you do?**
# <details><summary>Answer</summary>
#
# First compare replicas and the ranks' gradient norms, since a device that computes wrongly looks the same. Otherwise go
# back to a checkpoint before the jump and on past the batches that led to it: PaLM began about 100 steps earlier and
# skipped 200 to 500 batches ([Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311), §5.1; here
# `minillm/train/fault_tolerance/loss_spike.py`).
# </details>
#
# ## Can you answer them now?
#
# 1. In which order is a checkpoint written, so that a kill at any instant leaves the one before or the one after?
# 2. What has to be in it for the next loss to be equal in every bit, and what if the number of ranks is another?
# 3. How often do you save, how do you find the rank that is to blame, and what share of the hours is left?
#
# Next: [11 · The data pipeline](11_data_pipeline.ipynb) feeds all these ranks, each with its own part of the text.

# %%
finish("10_fault_tolerance")
