# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 20 · Design a training run
#
# **A design answer is a chain of numbers: size, fit, time, risk. Each of them can be estimated in a minute and defended.**
# Stands on labs 01 to 11 (their formulas).
#
# Thirteen problems as they are asked in interviews, about ten minutes each, and two short exercises: two and a half
# hours in all; the core path of two leaves out problems 11 to 13. You commit to a number, then the cell computes it with the same formulas that the labs have measured,
# names the mistake if yours has a known one, and shows a strong answer, the next questions and a weak answer. Running
# the notebook from top to bottom takes seconds. At the end you can answer:
#
# 1. What does a training run hold, in bytes per GPU and by kind, and which axis divides which kind?
# 2. Where does the time of a step go, and which change attacks the largest part?
# 3. What fails at which rate, and what does each minute of recovery cost?
#
# > **Common claims**
# >
# > - *"A 7B model needs 14 GB, so it trains on one GPU."* Weights in 16 bits are 14 GB; training holds 16 bytes per
# >   parameter before the first activation ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), §3.1), and 18
# >   with gradients in 32 bits.
# > - *"An MFU under 50 % means that something is broken."* 38 to 43 % were reported for Llama 3 405B
# >   ([Llama Team 2024](https://arxiv.org/abs/2407.21783), table 4); on fewer GPUs up to 56 % were
# >   reported on A100 ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), table 5) and 53 % on H100
# >   ([NVIDIA's recipes](https://github.com/NVIDIA/dgxc-benchmarking), 2025).
# > - *"100 % GPU utilisation means that the job is bound by compute."* A communication kernel that waits counts as busy.

# %%
from course.kit import check, finish, hint, show, sliders
from course.lab20_design_training import figures, receipts

# %% [markdown]
# ## How to answer
#
# The same six moves fit every problem, and an interviewer listens for them:
#
# 1. **Clarify**: what is fixed (hardware, batch, deadline), what may change, what counts as done.
# 2. **Size**: bytes of states, FLOPs per step. Say the formula, then the number.
# 3. **Choose**: the simplest layout that fits, and what would make you leave it.
# 4. **Check**: the largest kind of memory, the slowest link, the bubble. Against limits, not against hope.
# 5. **Risk**: what breaks the plan first, and what you would do then.
# 6. **Measure first**: the one or two numbers that decide whether the plan holds.
#
# The calculator behind this lab is `python -m minillm plan`. Its formulas have five fitted constants; everything else
# is arithmetic. Before you trust it, look at what it says about runs whose layout and speed are published:

# %%
receipts.published_runs()

# %%
print(receipts.judges())

# %% [markdown]
# The speed of a *fitted* run helped to choose the constants, so the runs that were not fitted judge the formulas. Where
# recomputation is counted, the share is no MFU: the source took recomputed FLOPs for work. Some rows deserve doubt: the
# layout of the run on 1,024 GPUs is not printed in its paper, the network of the FSDP run is not either; and three hold less
# than our formula for memory says, since NVIDIA keeps gradients in 16 bits and DeepSeek activations in 8.
#
# ### Exercise 1 · bytes of states on one rank (10 minutes)
#
# With 16-bit weights, 32-bit gradients and Adam a parameter costs 2 + 4 + 12 bytes. Tensor and pipeline parallelism
# divide all of them, ZeRO's stages one kind after the other, over the data-parallel ranks.


# %%
def state_bytes(parameters, dp, tp, pp, zero):
    """Bytes of weights, gradients and optimizer states on one of dp · tp · pp ranks.
    zero: stage 0 to 3."""
    # BEGIN SOLUTION
    own = parameters / (tp * pp)
    kinds = (12, 4, 2)  # in the order in which the stages divide them
    return sum(size * own / (dp if stage < zero else 1) for stage, size in enumerate(kinds))
    # END SOLUTION


state_bytes = check("state-bytes", state_bytes)


# %% [markdown]
# ## Problem 1 · 70B on 64 GPUs
#
# *"You have 64 H100 (8 per node, 50 GB/s of network per GPU) and are to pre-train a 70B model on sequences of 8,192
# tokens, 512 of them per step. How do you lay it out?"* Which three questions do you ask before you size?
#
# **How many bytes do all training states take together** (16-bit weights, 32-bit gradients, Adam with master weights)?

# %%
guess_states = 140e9  # your number

# %%
receipts.decide("seventy_on_64", "states", guess_states)

# %% [markdown]
# **How many days do 15 trillion tokens take?**

# %%
guess_days = 100  # your number

# %%
receipts.decide("seventy_on_64", "days", guess_days)

# %%
receipts.answer("seventy_on_64")

# %% [markdown]
# Where the time of a step and the memory of a GPU go, for the planner's best mesh:

# %%
show(figures.where_it_goes)

# %%
sliders(
    figures.where_it_goes,
    model=["llama-3-8b", "llama-3-70b", "llama-3-405b"],
    device=["a100-80", "h100", "h200"],
    nodes=(1, 64),
    seq_k=(2, 64, 2),
    batch=(128, 2048, 128),
)

# %% [markdown]
# The runners-up, each with its largest loss, part of which it wins back elsewhere:

# %%
receipts.best_plans()

# %% [markdown]
# ## Problem 2 · 7B on 8 GPUs of 40 GB
#
# *"Train Llama 2 7B on one node of 8 A100 with 40 GB each, sequences of 4,096 tokens. What do you use?"*
#
# **How many bytes of states does each GPU hold under plain data parallelism?**

# %%
guess_replica = 14e9  # your number

# %%
receipts.decide("seven_on_8", "replica", guess_replica)

# %% [markdown]
# **Which is the lowest ZeRO stage that fits**, with microbatches of one sequence and nothing recomputed?

# %%
guess_stage = 2  # your number

# %%
receipts.decide("seven_on_8", "stage", guess_stage)

# %%
receipts.answer("seven_on_8")

# %% [markdown]
# ## Problem 3 · 405B on 16,384 GPUs
#
# *"You are to train 405B parameters on 16,384 H100, 2,048 sequences of 8,192 tokens per step. Walk me through the axes."*
#
# **What share of the step is bubble** with 16 stages, 16 microbatches and 8 chunks per stage?

# %%
guess_bubble = 0.48  # your number

# %%
receipts.decide("four_hundred_on_16k", "bubble", guess_bubble)

# %% [markdown]
# **How many bytes of states does a GPU hold** (TP 8, PP 16, gradients and optimizer sharded over 128)?

# %%
guess_states = 57e9  # your number

# %%
receipts.decide("four_hundred_on_16k", "states", guess_states)

# %%
receipts.answer("four_hundred_on_16k")

# %% [markdown]
# ## Problem 4 · GPT-3 on 1,024 GPUs
#
# *"175B parameters, 300 billion tokens, 1,024 A100, batches of 1,536 sequences of 2,048 tokens, full recomputation. How
# long?"*
#
# **How many days?**

# %%
guess_days = 15  # your number

# %%
receipts.decide("gpt3_on_1024", "days", guess_days)

# %%
receipts.answer("gpt3_on_1024")

# %% [markdown]
# ## Problem 5 · Fine-tune 70B on one node
#
# *"A customer has one node of 8 H100 and wants to fine-tune Llama 3 70B on its documents. What do you propose?"*
#
# **How many bytes are missing for full fine-tuning, states alone?**

# %%
guess_missing = 0.5e12  # your number

# %%
receipts.decide("fine_tune_on_a_node", "missing", guess_missing)

# %% [markdown]
# **How many trainable parameters does LoRA of rank 16 on all seven matrices of every layer have?**

# %%
guess_adapters = 65e6  # your number

# %%
receipts.decide("fine_tune_on_a_node", "adapters", guess_adapters)

# %%
receipts.answer("fine_tune_on_a_node")

# %% [markdown]
# ## Problem 6 · A step that got 50 % slower on two nodes
#
# *"We doubled the GPUs from one node to two. Each step takes 50 % longer instead of half as long. What happened?"* You ask, and
# learn: an 8B model on A100, sequences of 4,096 tokens, tensor parallelism went from 8 to 16, 100 Gb/s per GPU,
# and the code waits for every collective.
#
# **How many times slower is a ring over both nodes than inside one?**

# %%
guess_ratio = 24  # your number

# %%
receipts.decide("slower_on_two_nodes", "ratio", guess_ratio)

# %%
receipts.answer("slower_on_two_nodes")

# %% [markdown]
# ## Problem 7 · The loss spikes
#
# *"After 300,000 steps on 16,384 GPUs the loss jumps from 1.9 to 4. What do you do?"*
#
# **How many GPU-hours does a rollback by 100 steps cost**, at 7 seconds a step?

# %%
guess_lost = 51  # your number

# %%
receipts.decide("a_loss_spike", "lost", guess_lost)

# %%
receipts.answer("a_loss_spike")

# %% [markdown]
# ## Problem 8 · The job hangs
#
# *"The step counter stands still. All GPUs show 100 % utilisation. What do you do?"*
#
# **How many GPU-hours are lost until a timeout of ten minutes ends it, on 16,384 GPUs?**

# %%
guess_lost = 100  # your number

# %%
receipts.decide("a_hang", "lost", guess_lost)

# %%
receipts.answer("a_hang")

# %% [markdown]
# ## Problem 9 · A straggler
#
# *"One of 1,024 GPUs needs 20 % longer for its part of every step. Does it matter?"*
#
# **What share of the throughput is lost?**

# %%
guess_lost = 0.0002  # your number

# %%
receipts.decide("a_straggler", "lost", guess_lost)

# %%
receipts.answer("a_straggler")

# %% [markdown]
# ### Exercise 2 · when to save (10 minutes)
#
# A job stops when any of its devices fails. Between two saves t seconds apart a failure throws away t/2 on average, and
# every save stops training for a while. So t must be neither too short nor too long.


# %%
def save_interval(save_s, restart_s, device_mtbf_s, devices):
    """(seconds between saves that waste least, share of the time wasted then, to first order).

    First order: saves and restarts are short against the job's time between two failures, so
    shares are added up as if no failure struck a save or a restart. save_s: what a save stops
    training for; restart_s: what each failure costs besides repeated work. Failures are
    independent, device_mtbf_s apart on one device.
    """
    # BEGIN SOLUTION
    mtbf = device_mtbf_s / devices
    interval = (2 * save_s * mtbf) ** 0.5
    return interval, save_s / interval + (interval / 2 + restart_s) / mtbf
    # END SOLUTION


save_interval = check("save-interval", save_interval)

# %% [markdown]
# Does the formula hold? A simulated job with random failures, saving at half, once and twice that interval:

# %%
receipts.save_intervals()

# %% [markdown]
# The minimum is where the formula puts it. The share is up to a tenth too high, mostly because first order does not add
# restarts to the total.
#
# ## Problem 10 · How often to save
#
# *"16,384 GPUs, 419 interruptions in 54 days. A save stops training for 30 s, a restart takes ten minutes. How often do
# you save?"*
#
# **How many seconds lie between two interruptions?**

# %%
guess_mtbf = 3.1  # your number

# %%
receipts.decide("checkpoint_interval", "mtbf", guess_mtbf)

# %% [markdown]
# **How many seconds between two saves?**

# %%
guess_interval = 3600  # your number

# %%
receipts.decide("checkpoint_interval", "interval", guess_interval)

# %%
receipts.answer("checkpoint_interval")

# %%
show(figures.waste)

# %%
sliders(figures.waste, save_s=(1, 120), restart_min=(1, 30), gpus=(64, 65536, 64))

# %% [markdown]
# ## Problem 11 · The input pipeline starves
#
# *"GPU utilisation drops to zero for a moment in every step. Somebody says that storage is too slow. Is it?"* The model
# has 8B parameters and trains on one node of 8 H100.
#
# **How many bytes per second does the node read, as 4-byte token ids?**

# %%
guess_read = 1e9  # your number

# %%
receipts.decide("starving_input", "read", guess_read)

# %%
receipts.answer("starving_input")

# %% [markdown]
# ## What limits this run? (skip on a first reading)
#
# *"How do we make it faster?"* Ask first: faster in which sense? Seconds per step, tokens per second and GPU, cost per token
# and days until the loss is reached are four goals with four answers. Then name the resource that ends it before you name a
# cure. The questions in an order in which each answer ends the search:
#
# 1. **Memory**: does it fit, with room for the largest temporary? If not: shard, recompute, offload, quantize.
# 2. **Input**: which share of a step is spent in `next(batch)`? More workers help only if their CPU time is the limit.
# 3. **Link**: which share waits for messages that nothing hides? Look at placement first, then at overlap, then at bytes.
# 4. **Stages and stragglers**: which share waits for other ranks? More microbatches, better balance, another node.
# 5. **Kernels**: only now. Which share of the peak is reached in the rest, and what would the roofline allow?
#
# Validate with the real run, not with the benchmark: lengths, batch, checkpoints on. Five runs, each with one thing wrong:

# %%
receipts.ledgers()

# %%
# yours: memory, input, link, bubble or kernels
diagnosis = {"A": "?", "B": "?", "C": "?", "D": "?", "E": "?"}

# %%
receipts.limits(diagnosis)

# %% [markdown]
# *100 % utilisation* could be printed for A, B and C alike. Lab 22 has traces in place of such a page.
#
# ## Problem 12 · Strong and weak scaling
#
# *"We have 8 GPUs and get 1,024. Will it be 128 times faster?"* An 8B model, 256 sequences of 8,192 tokens per step.
#
# **If the batch stays and data parallelism is the only axis, which share of the 1,024 GPUs has something to compute?**

# %%
guess_busy = 1.0  # your number

# %%
receipts.decide("scaling", "busy", guess_busy)

# %%
receipts.answer("scaling")

# %% [markdown]
# ## Problem 13 · What it costs
#
# *"Estimate the final run of a 405B model on 15.6 trillion tokens: days, energy, money."*
#
# **How many FLOPs?**

# %%
guess_flops = 1.3e25  # your number

# %%
receipts.decide("money_and_energy", "flops", guess_flops)

# %% [markdown]
# **How many days on 16,384 H100 at 41 % MFU?**

# %%
guess_days = 33  # your number

# %%
receipts.decide("money_and_energy", "days", guess_days)

# %% [markdown]
# **How many MWh at 700 W per GPU and a PUE of 1.1?**

# %%
guess_energy = 11000  # your number

# %%
receipts.decide("money_and_energy", "energy", guess_energy)

# %%
receipts.answer("money_and_energy")

# %% [markdown]
# ## Around the ranks (skip on a first reading)
#
# Ranks are the middle of a training system. What an interviewer draws, with where this course has it:
#
#     object store ─▶ tokenize, deduplicate, mix ─▶ loader ─▶ trainer: ranks ─▶ checkpoints ─▶ evaluation, serving
#       documents          token ids (lab 11)       prefetch   (labs 03 to 09)   (lab 10)        (labs 12 to 19)
#                                                      ▲            │  │
#     launcher: Slurm, Kubernetes, torchrun ───────────┴── restarts ┘  └─▶ metrics, traces, alerts (labs 10 and 22)
#
# | layer | what it decides | examples |
# |---|---|---|
# | framework | autograd, kernels, compiler | [PyTorch](https://docs.pytorch.org/docs/stable/index.html), [JAX](https://docs.jax.dev/en/latest/) |
# | parallel runtime | what is sharded, when it is sent | DDP, FSDP2, DeepSpeed, Megatron Core: the next table |
# | communication | which algorithm over which link | [NCCL](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/index.html), gloo, MPI |
# | orchestration | which nodes, what happens after a failure | [Slurm](https://slurm.schedmd.com/documentation.html), [Kubernetes](https://kubernetes.io/docs/home/), [Ray](https://docs.ray.io/en/latest/train/train.html), [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) |
# | storage | where data and checkpoints lie | object stores (a blob with a key, read whole or by range), parallel file systems |
# | observability | what you know when it is slow or wrong | metrics, logs, traces, flight recorder |
#
# | library | built for | choose it when | what it leaves to you |
# |---|---|---|---|
# | [DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html) | replicas | states and activations fit one GPU: 16 to 18 bytes per parameter | all other axes |
# | [FSDP2](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) | ZeRO-3 on any torch module, block by block | states do not fit, and enough tokens per rank hide ZeRO-3's traffic of three times the parameters (lab 04) | pipeline and tensor parallelism (DTensor, torchtitan) |
# | [DeepSpeed](https://www.deepspeed.ai/getting-started/) | ZeRO 1 to 3 by a JSON file, offload to host and NVMe | GPUs are few and host memory is plenty | a pipeline needs the model as a list of layers |
# | [Megatron Core](https://docs.nvidia.com/megatron-core/developer-guide/latest/index.html) | tp, pp, cp, ep of transformers, with a sharded optimizer (ZeRO-1) | layers or experts are too large, or ranks outnumber sequences | your model in its layers |
#
# A rule such as *"FSDP up to 13B, Megatron above 30B or for experts"* leaves out 13B to 30B, and parameters do not decide:
# problem 3's 405B needs model parallelism because eight GPUs share a sequence, lab 09's 13B on 32 GPUs does not.
#
# Hardware and software are chosen together, in four matches: the axis that talks most to the fastest links; the memory-saving
# technique to the kind of memory that is full; the scheduler to the shape of the load, not to a benchmark; scaling to the time
# that a start takes.
#
# ## Two pages to keep
#
# **Before you design**: Does it fit on one GPU, with states and activations? Is memory or time the problem? Which tensors are
# replicated today? Which messages does every step send, over which link? What is the global batch, exactly? How fast does it
# recover?
#
# **While it runs**: a simple baseline, measured, before anything clever; ranks placed by topology; compute, memory and network
# watched apart; sharded checkpoints, and restores that are *tested* (lab 10); the loader profiled like the model; the formula of
# the batch and of the loss's mean written down, since both change silently with the number of ranks.
#
# **Between teams**, three mistakes that no profiler finds: one team is paid for loss, the other for utilisation, so nobody owns
# time to a given loss; nobody owns the policy of the queue; model, system and product metrics are on three pages, so nobody sees
# that the loss spiked when the loader was restarted.
#
# **For each trade-off one question**: *Memory against communication*: which of them is your wall already? *Throughput against
# latency*: is the work interactive, offline or both? *Simple against fast*: is the gain worth what it adds to operate? *Cost
# against quality*: which metric of quality does the product need?
#
# ## Where these estimates break down
#
# - They assume that layers are alike and experts nearly balanced. A long document on one rank, or one hot expert, sets the
#   pace for all.
# - The matrix-product rate is one fitted curve per device. Another kernel, a lower power limit or short sequences move it by
#   10 to 20 %.
# - Overlap is taken as perfect: what is shorter than the computation beside it costs a twentieth of its time. Code that
#   waits once too often pays all of it.
# - Memory counts what must be there. Allocators lose a few percent more, and the largest temporary decides.
#
# ## On a cluster
#
# The plan is arithmetic and runs anywhere: `python -m minillm plan --model llama-3-70b --cluster h100 --gpus 64 --batch 512
# --show-mesh` prints problem 1's plan and which ranks talk to which. Then run its axes small, on 8 ranks:
# `torchrun --nproc-per-node 8 -m minillm train --tp 2 --cp 2 --pp 2`. `python -m minillm plan --this-machine` holds
# predictions for small layouts against runs of them.
#
# ## Can you answer them now?
#
# 1. What does a training run hold, in bytes per GPU and by kind, and which axis divides which kind?
# 2. Where does the time of a step go, and which change attacks the largest part?
# 3. What fails at which rate, and what does each minute of recovery cost?
#
# **Capstone (open).** Take a model and a cluster you know. Write the design on one page in the six moves, with every number
# computed; then find the run report of a similar model and explain each difference above 15 %.
#
# Next: [21 · Design a serving system](21_design_serving.ipynb) does the same for serving.

# %%
finish("20_design_training")
