# %% [markdown]
# # 08 · Expert parallelism
#
# **Capacity grows, FLOPs per token do not; the price is two all-to-alls.** You build the router, the exchange and the
# gradients of a layer of experts, watch a router collapse, and cure it twice.
# Stands on labs 01 (all-to-all) and 03 (averaged gradients).
#
# About 4 hours; the core path of two is the exercises (85 minutes) with the figures beside them. Run All takes about a
# minute. At the end you can answer:
#
# 1. What does a mixture of experts make larger, what does it leave alone, and what moves between ranks for it?
# 2. Which tokens does an expert see, and over which ranks is its gradient summed, divided by what?
# 3. What happens when experts are not chosen equally often: to the time, to the tokens, to the loss?
#
# In labs 03 to 07 a token met every weight. Here it meets a few, and which ones is decided while it runs.
#
# The calls of `group`, and what each returns: [docs/group.md](../docs/group.md).

# %%
import inspect

import torch
import torch.nn.functional as F

from course.kit import check, finish, hint, show, sliders
from course.lab08_expert_parallel import experiments, figures, receipts
from course.lab08_expert_parallel import experiments_links as links
from course.lab08_expert_parallel import experiments_training as training

# %% [markdown]
# ## Parameters without FLOPs
#
# A mixture of experts puts $E$ MLPs where a block had one, and a *router* that chooses $k$ of them for each token
# ([Shazeer et al. 2017](https://arxiv.org/abs/1701.06538)):
#
#         ┌ router ─ weights ──────────────────────────────┐
#     x ──┼ sort by expert ─ dispatch ─ experts ─ sort back ┴ weighted sum ─ y
#         └ shared experts ─────────────────────────────────────(+)
#
# ## Predict
#
# **Mixtral 8x7B has 8 experts per layer and chooses 2 of them. How many billion parameters does it have?** Write down
# your guess.

# %%
guess_billion = 8 * 7  # your guess

# %%
receipts.two_models(guess_billion)

# %% [markdown]
# Only MLPs are multiplied; attention, norms and embeddings are shared. And the FLOPs? A small model, counted by torch,
# with more and more experts:

# %%
receipts.flops()

# %% [markdown]
# The counter sees two experts per token, however many there are, and a router that grows by one column per expert.
#
# ### Common claims
#
# | Claim | What is true |
# |---|---|
# | "A mixture of experts is cheaper." | Its *FLOPs per token* are. All experts have to be held in memory, and at large batches all are read. |
# | "8 experts of 7B are 56B." | 46.7B: attention and embeddings exist once ([Jiang et al. 2024](https://arxiv.org/abs/2401.04088) round to 47B). A token activates 12.9B. |
# | "Every decode step reads all the weights." | It reads those experts that a token of the batch chose: with 8 of 256 and choices at random less than half of them up to 21 tokens, nearly all from 128 (slider below). |
# | "One all-to-all per layer." | Two forward, to the experts and back, and two backward. |
# | "4D parallelism multiplies GPUs: dp · tp · pp · ep." | Expert groups are usually cut out of the data-parallel ranks: dp 64 with ep 8 is 64 GPUs. |
# | "Experts specialise in topics." | Mixtral's authors found no such pattern; routing follows syntax more than topic ([Jiang et al. 2024](https://arxiv.org/abs/2401.04088), §5). |

# %%
show(figures.weights_read)

# %%
sliders(figures.weights_read, experts=[8, 16, 64, 128, 256], top_k=[1, 2, 4, 8])

# %% [markdown]
# ## Build it
#
# ### 1. The router (10 minutes)
#
# A linear layer gives each token a *logit* per expert. Softmax makes scores of them, the $k$ highest win, and their
# scores, divided by their sum, weigh the experts' answers. The choice itself has no gradient: the router learns through
# the weights alone.
#
# Two details. Scores may tie, since 16-bit logits take few values: every copy of the router, on another rank or in a
# recomputed block, must then choose alike. (minillm's router takes `topk`: its copies run the same kernel on the
# same scores.) And a *bias* may move the choice without moving the weights, for a reason that comes later.


# %%
def choose(logits, k, bias=None):
    """logits: [tokens, experts] -> (experts, weights), both [tokens, k].

    experts: those with the highest score + bias, highest first; ties: the smaller number
    first. Scores are a softmax over all experts, in float32 or wider. bias: [experts] or None.
    weights: the scores of the chosen experts, without bias, divided by their sum.
    """
    # BEGIN SOLUTION
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    ranked = scores if bias is None else scores + bias
    experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    return experts, weights / weights.sum(1, keepdim=True)
    # END SOLUTION


choose = check("top-k-router", choose)

# %% [markdown]
# ### 2. Sort by expert, and back (15 minutes)
#
# Experts are matrices, and matrices want their rows together. Number the pairs: choice $j$ of token $t$ is pair $tk +
# j$.
#
#     pairs (token, choice)    0a 0b  1a 1b  2a 2b
#     their experts             2  0   0  2   1  0
#     order                    0b 1a 2b | 2a | 0a 1b      rows by expert, each expert's in the order of the tokens
#     counts                       3       1      2


# %%
def dispatch(x, experts, num_experts):
    """x: [tokens, hidden]; experts: [tokens, k] -> (rows, order, counts).

    rows: [tokens * k, hidden], a copy of its token for every pair, by expert. order: [tokens * k],
    the pair in each row; pairs of one expert in ascending order. counts: [num_experts], rows of
    each.
    """
    # BEGIN SOLUTION
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    return x[order // experts.shape[1]], order, torch.bincount(flat, minlength=num_experts)
    # END SOLUTION


def combine(rows, order, weights):
    """rows: [tokens * k, hidden], the experts' answers in that order;
    weights: [tokens, k] -> [tokens, hidden], in the dtype of rows."""
    # BEGIN SOLUTION
    pairs = torch.zeros_like(rows).index_copy(0, order, rows)
    return (pairs.unflatten(0, weights.shape) * weights[..., None]).sum(1)
    # END SOLUTION


dispatch, combine = check("sort-by-expert", (dispatch, combine))

# %% [markdown]
# ### 3. Capacity (10 minutes)
#
# A kernel with fixed shapes gives every expert $C = \lceil c \cdot Tk / E \rceil$ places, $c$ being the *capacity
# factor*, and drops what does not fit; a token that no expert takes passes through the residual alone. Which are
# dropped? GShard ([Lepikhin et al. 2020](https://arxiv.org/abs/2006.16668)) serves all first choices before any second
# one. [Megatron Core](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/moe/README.md) drops
# nothing by default; given a capacity factor, it keeps the highest probabilities (`--moe-token-drop-policy probs`). In
# both, a later token can take an earlier one's place, which a model that generates must not allow. So here: in the order
# of tokens, within a token of its choices.


# %%
def drop_beyond(experts, num_experts, capacity):
    """experts: [tokens, k] -> the same, in its dtype,
    with -1 where the expert has already been given `capacity` pairs."""
    # BEGIN SOLUTION
    flat = experts.flatten()
    # [pairs, experts]: asked for so far, this pair included
    queue = F.one_hot(flat, num_experts).cumsum(0)
    place = queue.gather(1, flat[:, None])[:, 0]
    return torch.where(place <= capacity, flat, -1).view_as(experts)
    # END SOLUTION


drop_beyond = check("capacity-drops", drop_beyond)

# %% [markdown]
# How much is lost even if a router is fair? A router that chooses at random gives each expert the same load *on
# average*, and a finite batch is not an average:

# %%
show(figures.drops_by_chance)

# %%
sliders(figures.drops_by_chance, tokens=[16, 64, 256, 1024], experts=[8, 16, 64], top_k=[1, 2, 4])

# %% [markdown]
# ### 4. The balance loss (15 minutes)
#
# [Fedus et al. 2021](https://arxiv.org/abs/2101.03961) (§2.2) add a loss (theirs for top 1 and times 0.01, here for top
# $k$ and times 0.05) that is 1 for an even load and up to $E/k$ for the worst:
#
# $$\ell = E \sum_e f_e P_e$$
#
# $f_e$: share of all (token, choice) pairs that went to $e$. $P_e$: mean over tokens of the probability $p_{t,e}$.
# Counts have no gradient, so $f$ is a constant, and the loss pushes down the probability of those that are full. Find
# its gradient with respect to the *logits* by hand. The check compares with finite differences in float64.


# %%
def balance(probabilities, experts):
    """probabilities: [tokens, E], a softmax of logits;
    experts: [tokens, k] -> (loss, its gradient with respect to the logits, a tensor)."""
    # BEGIN SOLUTION
    tokens, num_experts = probabilities.shape
    counts = torch.bincount(experts.flatten(), minlength=num_experts)
    share = counts.to(probabilities) / experts.numel()
    loss = num_experts * (share * probabilities.mean(0)).sum()
    upstream = num_experts * share / tokens  # by each probability
    inner = (probabilities * upstream).sum(1, keepdim=True)
    return loss, probabilities * (upstream - inner)
    # END SOLUTION


balance = check("balance-loss", balance)

# %% [markdown]
# ## A router collapses
#
# An expert that is chosen learns; one that learns is chosen. A model of 2 layers with 8 experts each, top 2, learns the
# bytes of Python's standard library for 80 steps, three times: with nothing, with the balance loss, and with DeepSeek-V3's bias ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), §2.1.2). The bias needs no
# loss (DeepSeek-V3 keeps a tiny one): after a step it rises a little for each expert that had fewer tokens than
# the mean and falls for the others.
#
# The training loop:

# %%
print(inspect.getsource(training.train))

# %%
trainings = training.trainings()
show(figures.draw_loads, found=trainings)

# %%
receipts.collapse(trainings)

# %% [markdown]
# Four times the mean is the worst there is for top 2 of 8. Without balancing the router comes close to it within a few
# steps: two experts take most pairs. Both cures bring all experts back. They differ in
# cost: the loss pulls on the router's weights and so could compete with the task; the bias pulls on nothing, but
# overshoots when its step is large (the flicker in the picture; DeepSeek's step is 0.001 over a few hundred thousand
# steps, the one here 0.01 over 80). The second row says what balance costs in the loss: no more than another seed
# changes, in either direction.
#
# What would these routers drop? Cured ones drop several times what chance would, most of it because balance over a batch
# is not balance within each of its sequences: the third row lets the whole batch share its places.

# %%
show(figures.draw_drops, found=trainings)

# %%
receipts.drops(trainings)

# %% [markdown]
# *Balance over what?* A loss per sequence asks every sequence to use all experts evenly, code and prose alike. Counting
# $f$ over all ranks' tokens asks less, and models come out better ([Qiu et al.
# 2025](https://arxiv.org/abs/2501.11873)). minillm's loss is per sequence, and at this strength it drops about as much as
# the bias, which looks at the whole batch.
#
# ## Tokens to experts on other ranks
#
# Now $N$ ranks hold $E/N$ experts each, and all the rest of the model whole: data parallelism outside, experts spread
# inside. Every rank has its own tokens, and their experts are elsewhere.
#
#     rank 0's rows by expert     a a b | c d d       experts a b live on rank 0, c d on rank 1
#       ── all-to-all ──▶         a a b   a b b       this rank's part of both ranks' rows, by source
#     by own expert               a a a | b b b       sorted once more
#       experts
#       ◀── all-to-all ──         a a b | c d d       both permutations back
#
# ### 5. There and back (20 minutes)
#
# `group.all_to_all(x, output_splits=..., input_splits=...)` sends `input_splits[j]` rows of x to rank $j$, the first
# ones to rank 0, and returns the rows from all ranks in rank order, `output_splits[i]` from rank $i$. Both are lists of
# whole numbers, and the receiver has to know its own beforehand. Without splits all parts are equal. The check counts
# the bytes of rows: only those travel that another rank's experts need.


# %%
def to_experts(rows, counts, group):
    """rows: [n, hidden] of this rank's tokens, by expert;
    counts: [E], int64, how many of these rows go to each of the E experts.

    Rank r has experts r * E / N to (r + 1) * E / N - 1. -> (rows for this rank's experts, by expert
    and then by source rank; counts: [E / N], rows of each; plan: whatever from_experts needs).
    """
    # BEGIN SOLUTION
    n, each = group.world_size, len(counts) // group.world_size
    received = group.all_to_all(counts).view(n, each)  # [from, expert here]
    sent, come = counts.view(n, each).sum(1).tolist(), received.sum(1).tolist()
    arrived = group.all_to_all(rows, input_splits=sent, output_splits=come)
    expert = torch.arange(each, device=rows.device).repeat(n)
    order = expert.repeat_interleave(received.flatten()).argsort(stable=True)
    return arrived[order], received.sum(0), (order, sent, come)
    # END SOLUTION


def from_experts(rows, plan, group):
    """rows: the experts' answers, in the order that to_experts gave
    -> [n, hidden], in the order that it was given."""
    # BEGIN SOLUTION
    order, sent, come = plan
    by_source = torch.empty_like(rows).index_copy(0, order, rows)
    return group.all_to_all(by_source, input_splits=come, output_splits=sent)
    # END SOLUTION


to_experts, from_experts = check("tokens-to-experts", (to_experts, from_experts))

# %% [markdown]
# ## Measure: what a layer sends
#
# From here on minillm's own (`minillm/parallel/expert_parallel`). Each all-to-all is the other one's backward, so a
# step has four per layer. 4 ranks, 64 tokens each, top 2, experts chosen equally often:

# %%
receipts.traffic()

# %% [markdown]
# $T \cdot k \cdot H \cdot b \cdot (N-1)/N$ bytes, four times. The experts' *weights* never move: ZeRO-3 brings weights
# to tokens, expert parallelism brings tokens to weights.
#
# ### Two levels
#
# Between nodes links are slow, and a token with four experts on another node crosses four times. It need not: send it
# once per *node*, and let a rank there pass it on. On two emulated nodes of two ranks, top 4 of 8:

# %%
receipts.two_levels()

# %%
show(figures.rows_that_cross)

# %%
sliders(figures.rows_that_cross, experts=[64, 128, 256], top_k=[2, 4, 8, 16])

# %% [markdown]
# Fewer bytes cross, more go inside, and forward has five all-to-alls instead of two. A whole model trains so with
# `train --experts 8 --dp 4 --ep 4 --ep-nodes 2`. DeepSeek-V3's router goes further and chooses experts of at most four
# nodes ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), §2.1.2).
#
# ### Shared experts hide the journey
#
# Experts that every token meets need no exchange, so they can be computed while rows travel. On an *emulated* link (80
# ms each way), with emulated work of 60 ms for the shared experts and 20 ms for the routed ones:

# %%
receipts.shared_experts()

# %% [markdown]
# ## The fullest rank sets the pace
#
# No rank has all its rows back before the last one is done. Always 128 rows on 4 ranks, dealt out more and more
# unevenly. The experts' work is *emulated*, 2 ms per row; the exchange is real.

# %%
fullest = links.by_load()
show(figures.draw_fullest, found=fullest)

# %%
receipts.fullest(fullest)

# %% [markdown]
# The mean load is the same in all four; the gap between points and line is the exchange. Watch max / mean, per rank and
# per layer. There are three remedies: balance the router (above), pack experts to ranks by load, or hold hot experts
# twice. Servers do the last two, since their routers are trained already:
# [DeepSeek's EPLB](https://github.com/deepseek-ai/EPLB) packs, and gives a further slot to whichever expert has the most
# load per slot.
#
# ## Break it: whose average?
#
# A colleague averages gradients like this. Each rank's loss is the mean over its own tokens, and all ranks have equally
# many.

# %%
print(inspect.getsource(experiments.average_over_replicas))

# %% [markdown]
# dp is 4. With ep 2, ranks 0 and 1 share one set of experts, ranks 2 and 3 another; `replicas` is then ranks 0 and 2,
# or 1 and 3. Measured beside one process that has all tokens:

# %%
broken = experiments.expert_gradient_bug_on_ranks()
receipts.expert_gradient_bug(broken)

# %% [markdown]
# Adam hides the bug: it divides every gradient by its own size, so a factor disappears. It shows in SGD, in the norm that
# is logged, and in clipping: gradients of experts that are too large scale those of all other weights
# down, and ep 4 trains differently from ep 1.
#
# ### 6. Find the bug (15 minutes)
#
# *Whose tokens* has an expert's gradient on this rank seen before anything is reduced? And by what must the sum over
# `replicas` be divided, so that every token of the batch counts once? Then write it right.


# %%
def average_gradients(router, experts, data, replicas):
    """-> (router, experts): gradients of the mean over all tokens of `data`,
    from those of each rank's mean over its own tokens.

    router: its gradient on this rank; every rank has the whole router. experts: that of the experts
    this rank holds. data: the group of all ranks that share the batch. replicas: the group of those
    that hold the same experts.
    """
    # BEGIN SOLUTION
    router = data.all_reduce(router) / data.world_size
    # the tokens of all of data are in this sum
    experts = replicas.all_reduce(experts) / data.world_size
    return router, experts
    # END SOLUTION


average_gradients = check("expert-gradients", average_gradients)

# %% [markdown]
# <details><summary>Answer</summary>
#
# An expert sees the tokens of its whole expert group, so its gradient is a *sum over ep ranks' means* before any
# reduction. The sum over the replicas then holds all dp ranks' means, and has to be divided by dp. Dividing by dp / ep,
# the number of replicas, is what every data-parallel wrapper does when it is handed the replicas' group: ep times too
# large.
#
# It shipped in [torchtitan](https://github.com/pytorch/pytorch/issues/160285) (fixed with FSDP2's
# [`set_gradient_divide_factor`](https://github.com/pytorch/torchtitan/pull/1551)), in DeepSpeed
# ([bf16 optimizer](https://github.com/deepspeedai/DeepSpeed/pull/5259), then again in
# [ZeRO](https://github.com/deepspeedai/DeepSpeed/issues/6545)) and in
# [MegaBlocks](https://github.com/databricks/megablocks/pull/20); Megatron-FSDP v2 found it by a
# [test](https://github.com/NVIDIA/Megatron-LM/pull/5956) before its trainer allowed ep. Such a test compares ep 2 with
# ep 1, gradient by gradient: `python -m minillm oracle --dp 2 --ep 2`.
# </details>
#
# ## Break it again: a neighbour in the batch
#
# Capacity is shared by whoever is counted together. If that is the whole batch, a sequence's experts depend on what
# somebody else sent ([Puigcerver et al. 2023](https://arxiv.org/abs/2308.00951) name it among the faults of sparse
# routers). The same sequence beside two different neighbours:

# %%
receipts.neighbours()

# %% [markdown]
# In training that is noise. In serving an answer would depend on the batch, so servers drop nothing; minillm drops only
# in training, and per sequence.
#
# ## Experts beside a dense model
#
# Equal active FLOPs: an MLP of 96 columns, or 8 experts of 48 of which a token activates 2. Same data, same 80 steps.
# Seconds are the CPU time of one thread, which other processes disturb least.

# %%
show(figures.draw_losses, found=trainings)

# %%
receipts.beside_dense(trainings)

# %% [markdown]
# Eighty steps are no verdict: an expert has seen a quarter of the tokens. Per FLOP experts are level with the
# dense model or a little ahead. Per second they are behind, because eight small matrices are slower than one and sorting
# costs time. In runs of real length the first gap is large
# ([Fedus et al. 2021](https://arxiv.org/abs/2101.03961) report up to 7 times faster training at equal FLOPs per token);
# the second is what kernels and all-to-alls are tuned for.
#
# ## Where it loses
#
# Few tokens per expert. A layer of 32 experts with top 2 beside a dense MLP of the same FLOPs per token, really
# computed on one core of this machine (CPU time):

# %%
receipts.few_tokens()

# %% [markdown]
# With 64 tokens all 32 experts are touched, each for 4 rows: 16 times the weights are read for the same FLOPs. With
# 1,024 tokens there are 64 rows for each. So servers of such models want large batches, and ep helps them: it brings more
# tokens to each expert.
#
# Small messages lose, too: sent flat, a decode step's all-to-all is $N-1$ messages per rank, twice per layer. Question
# A's table has their sizes: the smaller they are, the more their number costs beside their bytes.
#
# ## The same in production
#
# | | spread experts | balance | drop | hide |
# |---|---|---|---|---|
# | here, `train --experts 8 --top-k 2` | `--ep N`, over nodes `--ep-nodes M` | `balance_loss`, `bias_update_rate` | `capacity_factor` | shared experts |
# | [Megatron Core](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/moe/README.md) | `--expert-model-parallel-size N`, `--moe-token-dispatcher-type alltoall` | `--moe-router-load-balancing-type aux_loss`, `--moe-router-enable-expert-bias` | `--moe-expert-capacity-factor`, `--moe-token-drop-policy` | `--moe-shared-expert-overlap` |
# | [DeepSpeed](https://www.deepspeed.ai/tutorials/mixture-of-experts/) `deepspeed.moe.layer.MoE` | `ep_size=N` | `l_aux`, the second output, which you add to the loss | `capacity_factor`, `drop_tokens` | |
# | [torchtitan](https://github.com/pytorch/torchtitan) | `--parallelism.expert_parallel_degree N` | a bias per expert, `load_balance_coeff` | | |
# | [vLLM](https://docs.vllm.ai/en/latest/serving/expert_parallel_deployment/) | `--enable-expert-parallel`: over all tp · dp ranks | `--enable-eplb`: replicas of hot experts | never | [`--enable-dbo`](https://docs.vllm.ai/en/stable/design/dbo/): half of the batch computes while the other half's rows travel |
#
# NCCL's own all-to-all ([since 2.28](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/colls.html)) takes
# equal parts: for unequal ones torch's `all_to_all_single` sends and receives in one group call. Its splits are lists on
# the host, so the host waits for the counts in every layer.
# [DeepEP V1](https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md) sends fp8 and does both levels in one
# kernel, and its host still waits. Its low-latency kernels avoid that with fixed buffers and one level.
#
# ## On a cluster
#
# `labs/torchrun/08_expert_parallel.py` runs the exchange and the average on any number of processes. After solving it:
# `torchrun --nproc-per-node 8 labs/torchrun/08_expert_parallel.py`. A whole training run:
# `torchrun --nproc-per-node 4 -m minillm train --experts 8 --dp 4 --ep 4`.
#
# ## Design questions
#
# **A. Serve DeepSeek-V3 (671B, of which a token meets 37B beside its embedding: 58 expert layers, 256 experts and 1
# shared, top 8, hidden 7,168, fp8) on H100s of 80 GB in nodes of 8: 3.35 TB/s of memory, 450 GB/s inside a node, 50 GB/s
# across. 128 sequences decode on each GPU, attention is data-parallel. Which ep? What moves per token?**

# %%
receipts.design_serving()

# %% [markdown]
# <details><summary>Answer</summary>
#
# Per token and layer 8 rows of 7,168 bytes go there (fp8) and 8 of 14,336 come back (bf16): 10 MB over 58 layers. ep 8
# does not fit: 82 GB of experts alone on GPUs of 80 GB (8 H200s of 141 GB hold them). ep 32 leaves room for the cache,
# gives each expert 128 rows, and reads its 8 experts in 105 µs instead of 421; but now rows cross nodes, and 150 µs of
# links per layer are worth hiding behind another half of the batch. Above that, experts are read ever less and rows
# cross ever more: ep pays while the weights it saves reading take longer than the rows it sends, which by this table
# ends at 32 (to 64 it saves 53 µs and costs 106; links are counted with two levels). A router limited to 4 nodes caps
# the rows that cross at 4. DeepSeek serves with ep 32 for prefill and, since ever larger batches and a second
# half-batch to hide behind move the balance, ep 144 for decode, with redundant experts ([DeepSeek
# 2025](https://github.com/deepseek-ai/open-infra-index/blob/main/202502OpenSourceWeek/day_6_one_more_thing_deepseekV3R1_inference_system_overview.md)).
# </details>
#
# **B. Train Mixtral 8x7B (hidden 4,096, 8 experts of 14,336, top 2, bf16) with 4,096 tokens per GPU: 400 TFLOP/s, 400
# GB/s inside a node of 8, 50 GB/s across. Cut every expert over tp 8, or spread experts over ep 8, inside a node or
# across?**

# %%
receipts.design_training()

# %% [markdown]
# <details><summary>Answer</summary>
#
# ep 8 inside a node: a quarter of the bytes of tensor parallelism, whole matrices of 14,336 columns instead of slices
# of 1,792, and 3 % of the work on the way. Across nodes it would still be a fifth, which overlap can hide. All of that
# is less than what one expert with 1.5 times the mean costs: 11 ms per layer. So spend the effort on balance first. tp
# cuts every expert alike and so never waits for a full one, which is its use in the first steps of a run, when routers
# are not yet even ([Megatron
# Core](https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/moe/README.md) recommends it against
# running out of memory there).
# </details>
#
# ## Capstone (*open*)
#
# You have 256 H100s and three months. Choose a model: dense, or how many experts of which width, top how many, shared
# ones or not; then ep, tp, pp and dp for it. Defend it with `minillm.predict.training.moe`, `python -m minillm plan` and one
# training of your own with `--experts`, and name the load curve that would make you stop the run.
#
# ## Interview corner
#
# **1. What does a mixture of experts save, and what not?**
# <details><summary>Answer</summary>
#
# FLOPs per token: those of k experts and the shared ones. Not memory: all experts are held. Not reads at large batches:
# all are touched.
# </details>
#
# **2. How many all-to-alls per layer, and of how many bytes?**
# <details><summary>Answer</summary>
#
# Two forward, two backward, each T·k·H·b·(N-1)/N per rank if balanced. Before them a small exchange of counts, because
# the receiver has to know its splits.
# </details>
#
# **3. Over which ranks are gradients of experts summed, and by what are they divided?**
# <details><summary>Answer</summary>
#
# Over the dp / ep replicas, divided by dp (for means over each rank's tokens): each holds the sum over its expert group
# already. Router and attention: over all dp.
# </details>
#
# **4. Why does a router collapse, and what are the cures?**
# <details><summary>Answer</summary>
#
# Chosen experts learn and are chosen more. A loss E·Σ f·P on the probabilities, or a bias on the choice that follows
# the load without a gradient. Noise, and experts that choose their tokens (which sees the future), are older ones.
# </details>
#
# **5. The mean load is perfect, and still the layer is slow. Why?**
# <details><summary>Answer</summary>
#
# All wait for the fullest rank in this step and this layer. Averages over steps hide it: log max / mean per step.
# </details>
#
# **6. What does a capacity factor of 1 drop with a perfectly fair router?**
# <details><summary>Answer</summary>
#
# What chance puts above the mean: loads are binomial, so 9 % with 64 tokens and top 2 of 8, and 2 % with
# 1,024 tokens.
# </details>
#
# ## Can you answer them now?
#
# 1. What does a mixture of experts make larger, what does it leave alone, and what moves between ranks for it?
# 2. Which tokens does an expert see, and over which ranks is its gradient summed, divided by what?
# 3. What happens when experts are not chosen equally often: to the time, to the tokens, to the loss?
#
# Next: [09 · Four dimensions](09_four_dimensions.ipynb) puts all axes together, and asks which of them belongs on which link.

# %%
finish("08_expert_parallel")
