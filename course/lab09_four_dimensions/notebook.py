# %% [markdown]
# # 09 · Four dimensions
#
# **Which axis goes on which link decides everything: the same layout, seated in another order, sends the same bytes and
# can take twice as long.**
# Stands on labs 03 to 07 (one axis each).
#
# About 4 hours; the core path of two is the exercises (105 minutes) with the figures beside them. Run All takes about a
# minute. At the end you can answer:
#
# 1. Given a rank number, which ranks does it talk to along each axis, and over which link?
# 2. Over which group is each gradient summed, and what goes wrong if an axis is left out or one too many is in it?
# 3. How do you find a layout for a model, a cluster and a memory limit, and how do you know that it is a good one?
#
# Labs 03 to 07 each divided one thing. Large runs combine them, as in Llama 3's 16,384 GPUs = 8 (tensor) x 16
# (pipeline) x 128 (data) ([Llama Team 2024](https://arxiv.org/abs/2407.21783), table 4).
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import inspect

from course.kit import check, finish, hint, show, sliders
from course.lab09_four_dimensions import (
    experiments,
    experiments_breaks,
    experiments_plan,
    figures,
    receipts,
)
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import token_bytes

# %% [markdown]
# ## Two kinds of link
#
# An H100 sends 450 GB/s to the other seven GPUs of its node and 50 GB/s to other nodes. A ring waits for its slowest
# link, so *one* link between nodes slows the whole ring down.
#
# ## Predict
#
# **A 70B model with tensor parallelism over 8 H100s. First the eight sit in one node, then they are spread over eight
# nodes, one in each. How many times longer does a layer wait for its all-reduces?** Write down your guess. (The default
# says that nothing changes, since the bytes are the same.)

# %%
guess_times = 1.0  # your guess

# %%
receipts.wrong_link(guess_times)

# %% [markdown]
# It is less than 9, the ratio of the links: each of a ring's 14 messages also has a latency, for which the planner
# takes 8 µs inside a node and 25 µs between nodes.
#
# ### Common claims
#
# | Claim | What is true |
# |---|---|
# | "The model fits on one GPU, so use data parallelism." | Training holds 16 to 18 bytes per parameter and activations ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), §3.1): 7B parameters are 14 GB of weights, and 126 GB with gradients and optimizer. |
# | "FSDP communicates more than tensor parallelism." | More than plain data parallelism: 3 per microbatch where that sends 2 per step. Against tensor parallelism it depends on the tokens: below about 4.5 · H of them per microbatch it sends more, above it less. You will compute this. |
# | "Tensor parallelism cannot leave the node, so 8 is the limit." | The limit is the fast domain, and that is 72 GPUs in a rack of [GB200 NVL72](https://www.nvidia.com/en-us/data-center/gb200-nvl72/). Beyond it, it works and waits. |
# | "Tensor parallelism is good for large batches." | Its bytes grow with the tokens. It is what you use when the batch cannot be divided any further. |
# | "Data parallelism needs little bandwidth." | It needs the link rarely, once per step, and then for $2P(N-1)/N$ bytes. With 140 GB of gradients and 8 replicas that is 245 GB per rank, less where other axes divide them. |
# | "Ranks 1 and 2 are neighbours in a pipeline" (as drawn in many pictures of 2 x 2 x 2 ranks) | Each rank sends to the rank of the *same* tp index in the next stage. With tp innermost, then pp: 0 to 2, 1 to 3, 4 to 6, 5 to 7. There are four dp groups, (0, 4) (1, 5) (2, 6) (3, 7), as exercise 1 will say. |
# | "InfiniBand carries 200 to 400 GB/s." | Gb/s: 200 Gb/s are 25 GB/s per port. |
#
# ## Build it
#
# ### 1. A mesh from strides (15 minutes)
#
# Ranks are laid out along named axes. In `{"dp": 2, "pp": 2, "tp": 4}` the last axis varies fastest, so ranks 0 to 3
# share a tensor-parallel group, and dp index 1 begins at rank 8:
#
#     rank = (dp_index · 2 + pp_index) · 4 + tp_index
#
# The *group* of a rank along an axis holds the ranks that differ from it in this axis alone. Real meshes have axes of
# one rank, and every order of axes.


# %%
def mesh_groups(rank, axes):
    """(place, groups) of a rank; axes: name -> size, the last one varies fastest.

    place: axis -> index of the rank along it; groups: axis -> ranks of its group, by index.
    An axis of one rank has a group of one.
    """
    # BEGIN SOLUTION
    place, groups, stride = {}, {}, 1
    for axis, size in reversed(axes.items()):
        place[axis] = rank // stride % size
        first = rank - place[axis] * stride
        groups[axis] = [first + index * stride for index in range(size)]
        stride *= size
    return place, groups
    # END SOLUTION


mesh_groups = check("mesh-strides", mesh_groups)

# %% [markdown]
# torch's `DeviceMesh` lays ranks out in the same way. Four ranks made each of these meshes; yours beside theirs:

# %%
receipts.torch_mesh(experiments.meshes(), mesh_groups)

# %% [markdown]
# Which ranks share a node follows from the order. 16 ranks, two nodes of eight; each group has its number:

# %%
show(figures.mesh_on_nodes)

# %%
sliders(
    figures.mesh_on_nodes,
    order=["dp pp cp tp", "pp dp cp tp", "tp dp pp cp", "tp pp dp cp"],
    tp=[1, 2, 4],
    cp=[1, 2],
    pp=[1, 2],
    dp=[1, 2],
    per_node=[4, 8],
    axis=["tp", "cp", "dp", "pp"],
)

# %% [markdown]
# ### 2. Who completes a gradient? (15 minutes)
#
# After backward each rank has *a share* of some gradients. Two ranks that hold the same numbers of a parameter and saw
# other tokens must add up. Two that saw the same tokens have the same gradient already. Two that hold other numbers
# must never add, but both belong in the gradient's norm.
#
# Here dp is split in two, dp = copies x ep: the ep ranks each hold some of the experts and send each other tokens
# (lab 08's all-to-all), the copies hold the same experts. So the axes are `pp`, `copies`, `ep`, `cp` and `tp`.
#
# | kind | what it is |
# |---|---|
# | `matrix` | of a layer, cut by tp (column or row) |
# | `norm` | a norm's weight between two tensor-parallel regions, whole on every tp rank; under sequence parallelism each tp rank sees a part of the sequence there |
# | `router` | of a layer with experts, whole on every tp rank, each of which sees all tokens here (Megatron Core's router works on the shard of the sequence, so there tp belongs in the sum) |
# | `expert` | matrices of one ep rank's experts, cut by tp; they see the tokens of all ep ranks |
# | `tied` | one table for embedding and head, cut by tp, held by the first stage and the last |
# | `loss` | the sum of losses that a rank of the last stage reports; the second set is not looked at: return an empty one |


# %%
def gradient_axes(kind, sequence):
    """(axes over whose ranks it is summed,
    axes along which ranks hold other numbers of this kind), two sets.

    sequence: whether sequence parallelism is on.
    A tied table counts once, though two stages hold it.
    """
    # BEGIN SOLUTION
    tokens = {"copies", "ep", "cp"}
    if kind == "loss":
        return tokens, set()
    if kind == "expert":
        return tokens - {"ep"}, {"pp", "ep", "tp"}
    if kind == "tied":
        return tokens | {"pp"}, {"tp"}
    if kind == "matrix":
        return tokens, {"pp", "tp"}
    return tokens | ({"tp"} if kind == "norm" and sequence else set()), {"pp"}
    # END SOLUTION


gradient_axes = check("gradient-axes", gradient_axes)

# %% [markdown]
# dp and cp appear together nearly everywhere. So frameworks make one *flattened* group of both, here
# `mesh.joined("dp", "cp")`, and shard ZeRO's states over it too: one ring of dp · cp ranks, one reduction.
#
# ### 3. What leaves the node? (15 minutes)
#
# In a ring each rank sends to the next rank of its group, the last to the first. In a pipeline neighbours exchange
# activations and gradients, and nothing goes from the last stage to the first. Count the bytes between nodes.


# %%
def crossing_bytes(axes, per_node, sent):
    """axis -> bytes of a step that go from one node to another, over all ranks.
    Rank r sits on node r // per_node; the last node may be partly filled.

    axes: as in exercise 1. sent: axis -> bytes that each rank sends to the next rank of its group;
    on "pp" each border carries as many forward (activations) and as many back (gradients).
    """
    # BEGIN SOLUTION
    total = dict.fromkeys(axes, 0)
    ranks = 1
    for size in axes.values():
        ranks *= size
    for rank in range(ranks):
        for axis, group in mesh_groups(rank, axes)[1].items():
            at = group.index(rank)
            if axis == "pp" and at + 1 == len(group):
                continue
            if rank // per_node != group[(at + 1) % len(group)] // per_node:
                total[axis] += sent[axis] * (2 if axis == "pp" else 1)
    return total
    # END SOLUTION


crossing_bytes = check("crossing-bytes", crossing_bytes)

# %% [markdown]
# ## Measure: the same ranks on other seats
#
# Now with minillm's trainer on four ranks and two *emulated* nodes (20 MB/s inside, 2 MB/s between). Three layouts,
# each with its inner axis inside a node, and each with the ranks seated the other way round. This is the rank program;
# `linked` puts other links under running ranks and notes which link each message took.

# %%
print(inspect.getsource(experiments.run_layouts))

# %%
runs = experiments.on_links()
receipts.bytes_between_nodes(runs, crossing_bytes)

# %%
receipts.placement(runs)

# %%
show(figures.draw_placement, runs=runs)

# %% [markdown]
# The formula adds the links' seconds to a step measured without them, so a row can be off where ranks share cores. Both
# seatings send the same bytes, which the ledger counts to the last one:

# %%
receipts.by_axis(runs)

# %% [markdown]
# tp sends the layer's activations in every microbatch, dp its gradients once per step: tp goes inside. Gradients over
# dp x cp go round one ring of four. It waits for its slowest link, and some cross in either order, so cp's seat changes
# the seconds less than the bytes between nodes. pp sends least of all.
#
# ### FSDP or tensor parallelism?
#
# Both spread a layer over N ranks. Fully sharded data parallelism gathers its weights twice and reduces its gradients
# once, 3 · 12H² elements. Tensor parallelism makes four all-reduces of T · H, each of which sends its tensor twice: 8 ·
# T · H elements. T counts the tokens of the *whole group's* microbatch. (Both times (N-1)/N; 12H² is a GPT layer.)
#
# $$3 \cdot 12 H^2 = 8\,T H \quad\Longrightarrow\quad T = 4.5\,H$$

# %%
receipts.fsdp_or_tensor(runs)

# %%
show(figures.fsdp_or_tensor)

# %%
sliders(
    figures.fsdp_or_tensor,
    hidden=[2048, 4096, 8192, 12288, 16384],
    ranks=[2, 4, 8, 16],
    squares=(10, 15),
)

# %% [markdown]
# Bytes are half of the comparison. FSDP's gathers can run ahead of the work that needs them. An all-reduce of
# activations cannot: the next layer needs its result. But FSDP needs a sequence or more for *each* of its ranks; tensor
# parallelism divides a single one.
#
# ## Plan it
#
# ### 4. Bytes and seconds of a layout (20 minutes)
#
# A planner tries every layout, drops those that do not fit, and ranks the rest by time. Write its core for dense
# models, 1F1B and no recomputation; call none of its functions but `token_bytes`. `model` and `layout` are those of
# `minillm.predict.planner`:

# %%
receipts.what_there_is()

# %% [markdown]
# **Bytes** of a rank of the *first* stage. Its parameters are its layers and the embedding table; with a single stage
# the head's table too. tp divides all of them. Each parameter takes 2 bytes of weight, 4 of gradient and 12 of Adam's
# state (master weight and two moments). ZeRO divides the 12 from stage 1 on, the 4 from stage 2 on and the 2 in stage
# 3, over dp · cp ranks. A layer keeps `token_bytes(model, layout)` for each token of a microbatch; the number is that
# of one tp rank already, and cp divides the tokens. The first stage holds min(pp, microbatches) microbatches.
#
# **Seconds**: a microbatch costs 6 FLOPs per token and parameter, of the stage's layers and of *one* table, all divided
# by tp, at `rate`; then each layer's four all-reduces of tokens · hidden_size elements of 2 bytes (2(t-1)/t times their
# size each) at `link`. A step is microbatches + pp - 1 of these. Gradients are assumed to hide behind backward.


# %%
def estimate(model, layout, seq, rate, link):
    """(bytes of a rank of the first stage, seconds of a step).

    rate: FLOP/s that a rank reaches; link: bytes/s of a rank to its tensor-parallel neighbours.
    """
    # BEGIN SOLUTION
    layers, t = model.num_layers / layout.pp, layout.tp
    tables = 2 if layout.pp == 1 else 1
    own = (layers * model.active_layer + tables * model.table) / t
    shards = layout.dp * layout.cp
    states = own * (
        2 / (shards if layout.zero == 3 else 1)
        + 4 / (shards if layout.zero >= 2 else 1)
        + 12 / (shards if layout.zero >= 1 else 1)
    )
    tokens = layout.micro_batch * seq / layout.cp
    kept = layers * tokens * token_bytes(model, layout) * min(layout.pp, layout.microbatches)
    compute = 6 * (layers * model.active_layer + model.table) * tokens / t / rate
    wait = layers * 4 * 2 * (t - 1) / t * tokens * model.hidden_size * 2 / link
    return states + kept, (layout.microbatches + layout.pp - 1) * (compute + wait)
    # END SOLUTION


estimate = check("layout-estimate", estimate)

# %% [markdown]
# Your estimate of every simple layout, with tp inside a node, of **Llama 3 70B on 64 A100s of 40 GB** (eight to a node,
# 25 GB/s between nodes, 512 sequences of 4,096 tokens per step):

# %%
receipts.dropped(experiments_plan.estimates(estimate))

# %% [markdown]
# One in twenty-five fits, and the quickest of them is quick only in your estimate: according to the planner its step
# takes more than three times as long. It gathers its weights over the network for each of 64 microbatches, and one
# sequence, which eight GPUs share, is not enough work to hide that. The planner also tries recomputation and
# interleaved stages (*chunks*), which shrink the bubble; each point below is one layout of at most 60 GiB.

# %%
show(figures.all_layouts)

# %% [markdown]
# ### 5. A plan for 64 GPUs (20 minutes)
#
# Give a layout for this problem that fits and takes at most 1.15 times as long as the planner's best. You may use
# `experiments_plan.judge(layout)`, which says what it holds and how long it takes, and the fields of `Layout`:
# dp, zero, tp, cp, pp, chunks (interleaved stages per rank), micro_batch, microbatches, and recompute ("none", "light",
# "full"); the planner's search is not to be called. The check also runs small copies of your layout, with two
# ranks on one or two of its axes at a time, and compares every gradient with one process.


# %%
def my_plan():
    """A Layout of 64 ranks: dp · micro_batch · microbatches = 512 sequences."""
    # BEGIN SOLUTION
    return Layout(tp=4, cp=2, pp=8, zero=2, chunks=10, microbatches=512)
    # END SOLUTION


my_plan = check("plan-for-64", my_plan)

# %%
receipts.plans_table(my_plan())

# %% [markdown]
# tp 8, pp 8 is what many scripts begin with. It fits, and according to the planner it is a twentieth slower than the
# best: the last stage has the head beside its layers, and the more stages there are, the longer the others wait for it.
#
# Your plan in the fastest order of its axes and in the slowest:

# %%
receipts.orders(my_plan())

# %% [markdown]
# How far can such formulas be trusted? These are some of the runs whose authors published layout and speed. Five
# numbers are fitted to every second run of a longer list; `python -m minillm plan --published` prints it, and the error
# of the runs that were not fitted. Where a source prints seconds of a step or tokens per second, *reported* is computed
# from them by one count of FLOPs, so it can differ from the share that the source prints (MegaScale's table has 41.2
# %). Which terms the formulas have was decided with all of them in view, so expect a larger error for a run that is not
# there.

# %%
receipts.published_table()

# %% [markdown]
# Sources, in this order: [Narayanan et al. 2021](https://arxiv.org/abs/2104.04473) (four runs), [Korthikanti et al.
# 2022](https://arxiv.org/abs/2205.05198), [BLOOM](https://huggingface.co/bigscience/bloom), [Jiang et al.
# 2024](https://arxiv.org/abs/2402.15627), [IBM](https://github.com/foundation-model-stack/fms-fsdp),
# [NVIDIA](https://github.com/NVIDIA/dgxc-benchmarking) (three), [Llama Team 2024](https://arxiv.org/abs/2407.21783),
# [DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437). The paper prints no layout for the GPT-3 run on 1,024 GPUs, so
# the row has one near those of table 2. Three seem not to fit: NVIDIA keeps gradients in 16 bits and DeepSeek
# activations in 8, where the formulas have 32 and 16.
#
# Why does a model of 1.7B on single GPUs reach less of the peak than one of 1T, which communicates over three axes?
# In 2021 attention wrote its scores to memory and read them back for each step of the softmax. That traffic grows with
# the hidden size, matrix products with its square: it is 29 % of the small model's time and 2 % of the large one's.
#
# ## Break it
#
# ### 6. A hybrid step (20 minutes)
#
# A colleague combined dp, cp and tp in one step:

# %%
print(inspect.getsource(experiments_breaks.buggy_hybrid_step))

# %% [markdown]
# The loss is right in every mesh. Every gradient against one process, in float64:

# %%
receipts.bug_hunt()

# %% [markdown]
# Find the line and write the step so that it is right in every mesh.


# %%
def hybrid_step(model, microbatch, mesh, shares):
    """Leaves in p.grad the gradient of the mean loss over all targets of all ranks;
    returns that loss, on every rank.

    model(tokens, targets=targets) -> (sum of this rank's losses, how many targets count);
    microbatch: (tokens, targets) of this rank; mesh.dp, mesh.cp, mesh.tp: groups; mesh.joined("dp",
    "cp"): both flattened. shares: names of norms that saw a part of the sequence on each tp rank.
    """
    # BEGIN SOLUTION
    tokens, targets = microbatch
    replicas = mesh.joined("dp", "cp")
    loss, count = model(tokens, targets=targets)
    everywhere = replicas.all_reduce(count.detach().clone())
    (loss / everywhere).backward()
    for name, parameter in model.named_parameters():
        replicas.all_reduce(parameter.grad)  # also where dp is 1: cp ranks saw other tokens
        if name in shares:
            mesh.tp.all_reduce(parameter.grad)
    return replicas.all_reduce(loss.detach().clone()) / everywhere
    # END SOLUTION


hybrid_step = check("hybrid-step", hybrid_step)

# %% [markdown]
# [picotron](https://github.com/huggingface/picotron/blob/main/train.py) shipped this bug: its train.py wraps the model
# only if `dp_world_size > 1`. VeOmni had a relative, a sum over dp alone whatever its size ([issue
# 1059](https://github.com/ByteDance-Seed/VeOmni/issues/1059)). The weights of the cp ranks drift apart, and no
# error is raised. What finds it is a comparison in *every* mesh, axes of one rank included:

# %%
receipts.lattice()

# %% [markdown]
# `python -m minillm oracle --dp 1,2 --cp 1,2 --tp 1,2` prints such a matrix for any layouts.
#
# ## Weak and strong scaling
#
# *Weak*: each rank keeps its microbatch, so the batch grows. *Strong*: all ranks share sixteen microbatches. Data
# parallelism on 1, 2 and 4 ranks, two to an emulated node, extended by the formula:

# %%
points = experiments.scaling()
receipts.scaling(points)

# %%
show(figures.draw_scaling, points=points)

# %% [markdown]
# From 2 to 4 ranks a rank sends 1.5 times the bytes, and the step takes many times as long: the *cliff*. Each of the
# ring's rounds now waits for a link that is ten times slower. Beyond it the bytes, 2P(N-1)/N, hardly grow; what still
# rises are the latencies of 2(N-1) rounds. (This ring does not overlap with backward; lab 03 shows how much of it that
# hides.)
#
# ## Where it loses
#
# Each of these takes eight sequences per step on one fast node. What does cutting the model cost if the model fits?

# %%
receipts.simple_wins(runs)

# %% [markdown]
# The simplest layout reduces gradients once per step and multiplies whole matrices. Every further axis adds collectives
# in every microbatch, a bubble, or both. (The other rows compare with a formula that adds the links' seconds to a step
# measured without them. Where four ranks share fewer cores, one rank computes while another waits for its message, so a
# row can be off.)
#
# ## Choosing, in order
#
# 1. Compute states and activations, not weights. If they fit, use data parallelism alone.
# 2. If states do not fit, shard them (ZeRO 1 costs no extra bytes; with M microbatches ZeRO 2 sends (M+1)/2 times as
#    many, ZeRO 3 3M/2 times), as long as each rank has a sequence and the bytes hide behind its work.
# 3. If activations do not fit, recompute some; if the sequence is what is too long, cp.
# 4. tp for layers that are too large, or for more ranks than sequences; inside the fast domain, no more than needed.
# 5. pp across nodes if the network is too slow for 2, with many more microbatches than stages.
# 6. Compare the few that are left by formula, then on the cluster.
#
# ## The same in production
#
# | | mesh | order, innermost first |
# |---|---|---|
# | here | `Mesh(group, dp=2, pp=2, tp=4)`; `train --dp --pp --cp --tp` | tp, cp, pp, dp |
# | [torch](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh.init_device_mesh) | `init_device_mesh("cuda", (2, 2, 4), mesh_dim_names=("dp", "pp", "tp"))`; `mesh["dp", "cp"]._flatten("dp_cp")` | the last dimension you name |
# | [torchtitan](https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/parallel_dims.py) | `data_parallel_replicate_degree`, `data_parallel_shard_degree`, `tensor_parallel_degree`, `pipeline_parallel_degree`, `context_parallel_degree` | tp, cp, dp_shard, dp_replicate, pp |
# | [Megatron Core](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/parallel_state.py) | `--tensor-model-parallel-size`, `--context-parallel-size`, `--pipeline-model-parallel-size` | tp, cp, ep, dp, pp (`order="tp-cp-ep-dp-pp"`); `--use-tp-pp-dp-mapping` puts dp outermost |
# | [DeepSpeed](https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/pipe/topology.py) | `PipeModelDataParallelTopology(num_pp, num_mp, num_dp)` | model, data, pipe |
# | [accelerate](https://huggingface.co/blog/accelerate-nd-parallel) | `ParallelismConfig(dp_replicate_size=, dp_shard_size=, cp_size=, tp_size=)` | tp, cp, dp_shard, dp_replicate |
#
# ## On a cluster
#
# `labs/torchrun/09_four_dimensions.py` makes the groups and a hybrid step on any number of processes. After solving it:
# `torchrun --nproc-per-node 8 labs/torchrun/09_four_dimensions.py`. The planner for your own cluster:
#
#     python -m minillm plan --model llama-3-70b --cluster a100-40 --gpus 64 --seq 4096 --batch 512 --show-mesh
#     python -m minillm plan --this-machine      # every layout of 2, 4 and 8 CPU ranks, predicted and run
#     python -m minillm plan --placement         # best and worst orders on 2 and 4 emulated nodes
#     python -m minillm scaling --figure scaling.png
#
# ## Design questions
#
# **A. 405B parameters on 16,384 H100s (80 GB, eight to a node, 50 GB/s between nodes), 2,048 sequences of 8,192 tokens
# per step. Which axes, how large, in which order?**

# %%
receipts.design_405b()

# %% [markdown]
# <details><summary>Answer</summary>
#
# States take 18 · 405.9e9 = 7.3 TB. The batch has 2,048 sequences for 16,384 GPUs, so eight GPUs must share each
# sequence whatever else happens: tp 8 fills the node. ZeRO 3 over the rest would then fit, but with one sequence per
# step and group there is too little work to hide 3 · 405.9e9 / 8 parameters of traffic over the network. pp 16 divides
# the parameters before they travel: dp sends 1/128 of the model's gradients per rank, and 16 microbatches with 8 chunks
# keep the bubble near 12 % of the work. tp 16 leaves the node. In the order, what matters is that tp comes first; with
# dp innermost, tp lies across nodes and the step takes twice as long. dp and pp cross in any order. Llama 3
# trained with tp 8, pp 16, dp 128 and reported an MFU of 41 % ([Llama Team 2024](https://arxiv.org/abs/2407.21783),
# table 4).
# </details>
#
# **B. 13B parameters on 4 nodes of 8 A100s (80 GB), with 200 Gb/s per GPU, 256 sequences of 4,096 tokens.**

# %%
receipts.design_13b()

# %% [markdown]
# <details><summary>Answer</summary>
#
# 200 Gb/s are 25 GB/s. States take 18 · 13e9 = 234 GB: not for one GPU, 7.3 GB each if sharded over 32. With eight
# sequences for each of 32 ranks there is enough work to hide ZeRO's traffic, so the answer is sharded data parallelism
# without any model parallelism. ZeRO 2 is enough. ZeRO 3 leaves more room and takes a twelfth longer: each microbatch
# gathers the weights and copies them into place. tp 8 takes a ninth longer than ZeRO 2, with narrow matrices. A
# pipeline of 4 stages idles 3/(M+3) of the time for memory that nobody needed. ZeRO 1 does not fit: weights and
# gradients alone take 78 GB, all that is usable.
# </details>
#
# ## Capstone (*open*)
#
# A 1T-parameter mixture-of-experts model (64 experts, 2 per token, 50B active) on 2,048 GPUs: your choice of B200s in
# racks of 72 or H100s in nodes of 8. Choose every axis and its seat, ep included. Defend it with
# `minillm.predict.planner` and name the two measurements that you would make first.
#
# ## Interview corner
#
# **1. Why does tp go inside the node and dp outside?**
# <details><summary>Answer</summary>
#
# Per layer and microbatch tp sends 8(t-1)/t · T · H elements that the next layer waits for. dp sends its gradients once
# per step, 2(N-1)/N of the rank's parameters, behind backward. Frequency, volume and dependence all say the same.
# </details>
#
# **2. Over which group is a norm's gradient reduced under sequence parallelism?**
# <details><summary>Answer</summary>
#
# dp x cp, as that of every parameter but an expert's, and tp, because each tp rank saw a part of the sequence. Without
# sequence parallelism never over tp: every rank has the whole gradient.
# </details>
#
# **3. And an expert's?**
# <details><summary>Answer</summary>
#
# Over the ranks that hold the same expert: dp · cp / ep of them. Its ep group sent it their tokens, so their shares are
# in its gradient already.
# </details>
#
# **4. What is wrong with "scaling efficiency falls because replicas send more"?**
# <details><summary>Answer</summary>
#
# A ring's bytes per rank saturate at 2P. What changes is the link (the cliff at the node), the number of rounds, and,
# with a fixed batch, the work that is left to hide them behind.
# </details>
#
# **5. A colleague's run with dp 1, cp 8 learns more slowly than dp 8. First suspicion?**
# <details><summary>Answer</summary>
#
# Gradients are not reduced over cp, as the reduction looks at dp alone. Compare a weight on two cp ranks after ten
# steps.
# </details>
#
# ## Can you answer them now?
#
# 1. Given a rank number, which ranks does it talk to along each axis, and over which link?
# 2. Over which group is each gradient summed, and what goes wrong if an axis is left out or one too many is in it?
# 3. How do you find a layout for a model, a cluster and a memory limit, and how do you know that it is a good one?
#
# Next: in [10 · Fault tolerance](10_fault_tolerance.ipynb) some of these ranks are lost, and the job goes on.

# %%
finish("09_four_dimensions")
