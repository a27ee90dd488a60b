# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 17 · Adapters
#
# **A model fine-tuned with LoRA is its base plus r(d + k) numbers for each matrix of d x k, so one frozen copy of the base
# can be trained for, and shared by, everybody who needs another behaviour.**
# Stands on lab 02 (memory of a step), lab 05 (a layer cut over ranks), lab 13 (keys of cached blocks) and lab 16 (NF4).
#
# The core path, the seven exercises, takes two hours; with the measurements and the questions at the end plan three.
# Running the notebook from top to bottom takes about a minute. At the end you can answer:
#
# 1. What does an adapter save in training, in numbers, bytes and FLOPs, and what does it not save?
# 2. How do requests with different adapters share a batch and a cache?
# 3. When is a low rank not enough, and when are merged models better than a shared base?
#
# > **Common claims**
# >
# > - *"LoRA can reduce the number of trainable parameters by 10,000 times and the GPU memory requirement by 3 times"*
# >   ([Hu et al. 2021](https://arxiv.org/abs/2106.09685), abstract). Of GPT-3, with rank 4 on two matrices, and of the
# >   memory of Adam's states. FLOPs fall by about a third (section 1). In section 3's model activations fall by a seventh
# >   with adapters on all layers, and by a third with adapters on q and v alone.
# > - *"... no additional inference latency"* (the same abstract). Of a merged adapter. One that is to be shared by a batch
# >   with others stays apart, and costs two thin products per layer (section 5).
# > - *"LoRA performs on-par or better than fine-tuning in model quality"* (the same abstract). Near the base. Far from it
# >   a low rank learns less, and forgets less ([Biderman et al. 2024](https://arxiv.org/abs/2405.09673)); see *Where it
# >   loses*.

# %%
import hashlib

import torch

from course.kit import check, finish, hint, show, sliders
from course.lab17_adapters import experiments, figures, rank_programs, receipts
from course.lab17_adapters import receipts_design as design
from minillm.comm import launch

# %% [markdown]
# ## Predict
#
# Write down five guesses; they come back beside the answers.

# %%
guess_numbers = 1e6  # numbers of an adapter of rank 16 beside a matrix of 4,096 x 4,096
# FLOPs of a step with adapters on all layers, as a share of a step that trains all weights
guess_share = 0.1
# how many times fewer bytes a LoRA step takes: a model of 3.4 million parameters, 128 tokens
guess_less = 10.0
guess_fit = 1000  # adapters of rank 16, on all layers of Llama 3 8B, in 10 GB
guess_states = 40.0  # GB on each of 8 cards for Llama 3 70B with adapters, without activations

# %% [markdown]
# ## 1 · Beside the layer
#
#                ┌── W, frozen, [out, in] ──────────────┐
#         x ─────┤                                      (+)──▶ y = W x + alpha/r · B (A x)
#                └── A [r, in] ──▶ h ──▶ B [out, r] ────┘
#
# Fine-tuning changes weights by an update ΔW. LoRA learns it as a product of two thin matrices, ΔW = alpha/r · B A, and
# leaves W alone. B begins as zeros, so training begins at the base. A begins random: were both zero, neither would
# ever have a gradient. alpha/r keeps the size of the update when you change the rank.
#
# ### Exercise 1 · a LoRA layer (15 minutes)


# %%
class LoRA(torch.nn.Module):
    """base, a torch.nn.Linear that is frozen from here on, with an adapter: self.A, [rank, in],
    uniform within ±1/√in, and self.B, [out, rank], zeros, both in the base's dtype."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        # BEGIN SOLUTION
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        outputs, inputs = base.weight.shape
        start = base.weight.new_empty(rank, inputs).uniform_(-1, 1) / inputs**0.5
        self.A = torch.nn.Parameter(start)
        self.B = torch.nn.Parameter(base.weight.new_zeros(outputs, rank))
        # END SOLUTION

    def forward(self, x):
        """x: [..., in] -> [..., out]."""
        # BEGIN SOLUTION
        return self.base(x) + self.scale * ((x @ self.A.T) @ self.B.T)
        # END SOLUTION


LoRA = check("lora-layer", LoRA)

# %% [markdown]
# Forward costs a little more than before. Backward still passes every layer on its way down; the other half of its work,
# the gradients of the frozen weights, is gone.

# %%
receipts.numbers(guess_numbers, guess_share)

# %% [markdown]
# ### Exercise 2 · merge, and take out again (10 minutes)
#
# W + alpha/r · B A is one matrix of W's size: merged, the model costs what the base costs. Weights are usually in 16 bits.
# Compute product and sum in float32, and round once.


# %%
def merged(weight, A, B, alpha):
    """weight: [out, in]; A: [rank, in]; B: [out, rank] -> a new tensor of weight's dtype."""
    # BEGIN SOLUTION
    update = alpha / len(A) * (B.float() @ A.float())
    return (weight + update).to(weight.dtype)  # update is in float32, so the sum is
    # END SOLUTION


def unmerged(weight, A, B, alpha):
    """What was `weight` before it was merged, to rounding."""
    # BEGIN SOLUTION
    return merged(weight, A, -B, alpha)
    # END SOLUTION


merged, unmerged = check("merge", (merged, unmerged))

# %% [markdown]
# The receipt says how many weights come back bit for bit. Whoever swaps adapters by merging and unmerging in place drifts
# away from the base: keep a copy of it, or keep the adapters apart.
#
# ## 2 · Where adapters belong: the stages of training
#
# | stage | text | loss | usually trained |
# |---|---|---|---|
# | pre-training | trillions of tokens, windows of anything (lab 11) | every token | all weights |
# | supervised fine-tuning | conversations, thousands to millions | tokens of the answers | all weights, or adapters |
# | preference optimisation | pairs of answers, one preferred | -log σ(β · margin) | the same |
#
# A prompt is given, so fine-tuning counts answers only. *Direct preference optimization*
# ([Rafailov et al. 2023](https://arxiv.org/abs/2305.18290)) makes the preferred answer more likely *than it was*: its margin
# is the difference of the two answers' log-likelihoods, minus the same under a frozen reference. With adapters the
# reference is the model with them switched off, so no second copy is held. And as B = 0, the first margin is 0: the loss
# begins at ln 2.

# %%
receipts.stages()

# %% [markdown]
# The loss compares the two answers and nothing else. Here the preferred answer became more likely and the other less.
# Often *both* become less likely ([Pal et al. 2024](https://arxiv.org/abs/2402.13228)): watch the likelihoods beside it.
#
# ## 3 · Memory, and a base in 4 bits
#
# A frozen weight has no gradient, no moments and no master copy, and its layer need not keep its input. What is left is
# the weight itself. QLoRA ([Dettmers et al. 2023](https://arxiv.org/abs/2305.14314)) keeps it as NF4 codes and decodes it
# whenever it is multiplied. That is only a gain if nobody holds on to what was decoded.
#
# ### Exercise 3 · backward through codes (20 minutes)


# %%
class Through4Bits(torch.autograd.Function):
    """x @ weight.T with a frozen weight that is kept as codes."""

    @staticmethod
    def forward(ctx, x, codes):
        """x: [tokens, in], float32; codes.weight() decodes: [out, in], float32, a new tensor each
        time -> [tokens, out]. Until backward, no floats are kept: neither weight nor x."""
        # BEGIN SOLUTION
        ctx.codes = codes
        return x @ codes.weight().T
        # END SOLUTION

    @staticmethod
    def backward(ctx, dy):
        """dy: [tokens, out] -> the gradients of x and of codes (None)."""
        # BEGIN SOLUTION
        return dy @ ctx.codes.weight(), None
        # END SOLUTION


Through4Bits = check("nf4-backward", Through4Bits)

# %%
steps = experiments.step_bytes()


def memory_of_a_step():
    """Bytes of a step of a small model with all weights, LoRA and QLoRA, by part and measured."""
    return figures.draw_memory(steps)


show(memory_of_a_step)

# %%
receipts.step_memory(steps, guess_less)

# %% [markdown]
# With all weights the fullest moment comes in the first block, the last that backward visits: most gradients are there, and
# few activations. LoRA's comes at the loss, QLoRA's in backward, while the largest layer is decoded. Activations hardly
# depend on a small rank. They are two fifths of a LoRA step and more than half of a QLoRA step: recomputation (lab 02)
# shrinks them. How far adapters shrink them depends on where adapters are: a frozen layer without one keeps no input.
#
# Weights and states outweigh them in a large model that sees few tokens. Move the sliders:

# %%
show(figures.states_on_a_card)

# %%
ranks, cards = [4, 16, 64, 256], [1, 2, 4, 8, 16]
sliders(figures.states_on_a_card, model=["8B", "70B"], rank=ranks, cards=cards)

# %% [markdown]
# ## 4 · On ranks
#
# Under data parallelism and ZeRO, adapters are parameters like any others, only fewer: P in lab 03's 2P(N-1)/N is what
# is trained. A pipeline stage has the adapters of its layers. Tensor parallelism cuts A and B as their layer is cut,
# codes too:
#
#     column layer   W, B: rows of each rank       A: whole on every rank
#     row layer      W, A: columns of each rank    B: whole on every rank
#
# ### Exercise 4 · whose gradient is a share? (15 minutes)
#
# Backward has run on each rank, as lab 05's layers do it: x of a column layer and dy of a row layer are the same on all
# ranks. Finish the gradients.


# %%
def finish_gradients(kind, grad_A, grad_B, group):
    """kind: "column" or "row". -> the gradients of what this rank holds of A and B, for the loss of
    all ranks together. As little as possible is sent."""
    # BEGIN SOLUTION
    if kind == "column":
        return group.all_reduce(grad_A.clone()), grad_B
    return grad_A, group.all_reduce(grad_B.clone())
    # END SOLUTION


finish_gradients = check("adapter-gradients", finish_gradients)

# %% [markdown]
# The whole matrices are thin, so the messages are small: r · in or r · out numbers a layer, whatever the batch.
#
# ## 5 · Many adapters, one base
#
# A server with a thousand customers, each with an adapter. Merged, every one is a model of its own, with its own weights to
# store and to read. Apart, a batch may mix them: the base's product is the same for all tokens, and each adapter adds its
# own to its tokens (Punica, [Chen et al. 2023](https://arxiv.org/abs/2310.18547); S-LoRA,
# [Sheng et al. 2023](https://arxiv.org/abs/2311.03285)).
#
# ### Exercise 5 · grouped adapters (20 minutes)


# %%
def grouped(x, weight, adapters, which):
    """x: [tokens, in]; weight: [out, in]; adapters: a list of (A, B, scale), of any ranks; which:
    [tokens], int64, the number of each token's adapter, -1 for none -> [tokens, out].

    One product with weight for all tokens, and two thin ones for each adapter in the batch."""
    # BEGIN SOLUTION
    y = x @ weight.T
    order = which.argsort()  # the tokens of an adapter, side by side
    numbers, counts = which[order].unique_consecutive(return_counts=True)
    for number, rows in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
        if number >= 0:
            A, B, scale = adapters[number]
            y[rows] += scale * ((x[rows] @ A.T) @ B.T)
    return y
    # END SOLUTION


grouped = check("grouped-adapters", grouped)

# %%
receipts.products(grouped)

# %% [markdown]
# Ranks differ, and no product is padded to the largest. Many adapters fit, so the hot ones stay on the device and the
# others come from disk or host memory:

# %%
receipts.fits(guess_fit)

# %% [markdown]
# ### Exercise 6 · what the keys begin with (15 minutes)
#
# Lab 13's keys began with the adapter's *name*. A name is not enough: a customer uploads a better adapter under the old
# name, and gets keys and values of the old one ([vLLM#42125](https://github.com/vllm-project/vllm/issues/42125)). So begin
# with what the adapter *is*. Two customers with equal weights may then share, as blocks depend on nothing else.


# %%
def adapter_key(adapter):
    """adapter: None, or (scale, {name of a layer: (A, B)}), scale a float -> bytes that begin a
    key: b"" for None, else a hash of 64 bits or more. Equal exactly if scale, names of layers,
    and dtypes, shapes and values of all matrices are equal."""
    # BEGIN SOLUTION
    if adapter is None:
        return b""
    scale, layers = adapter
    digest = hashlib.sha256(repr(float(scale)).encode())
    for name in sorted(layers):
        for matrix in layers[name]:
            digest.update(repr((name, tuple(matrix.shape), matrix.dtype)).encode())
            digest.update(matrix.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
    # END SOLUTION


adapter_key = check("adapter-key", adapter_key)

# %% [markdown]
# `LLM(model, adapters={"red": FOLDER, ...})` reads peft's folders into a store with a byte budget
# (`minillm/adapters/store.py`), and `generate(prompts, adapter=[...])` mixes them in a batch. Keys begin with a digest of
# the adapter, and with its number: here two names share nothing even if their weights are equal, as one of them may fail to
# load. Three adapters and the base, two requests each, all with the same 40 tokens at the beginning:

# %%
receipts.served()

# %% [markdown]
# ## Break it
#
# ### The adapter is missing in the keys
#
# The same requests once more, with one line changed: blocks are keyed by their tokens alone
# ([vLLM#3264](https://github.com/vllm-project/vllm/issues/3264) was this bug).

# %%
receipts.forgotten_key()

# %% [markdown]
# It looks like a success: more hits, no error. The first request, red's, leaves its blocks to all others. Six of the eight
# continue on keys and values that another adapter computed, and answers change.
#
# ### Gradients that are finished twice
#
# Two ranks, one column layer, AdamW. The second run calls `finish_gradients` twice in each step, as happens when a hook
# and the training loop both do it.

# %%
ranks = launch(rank_programs.train_twice, 2, finish_gradients, device="cpu")
receipts.reduced_twice(ranks[0])

# %% [markdown]
# The losses agree. Adam divides each gradient by its own size, so a factor on A disappears. It shows in the gradient's norm,
# and in whatever reads that: clipping, spike guards, SGD.
#
# ### Exercise 7 · which bug? (20 minutes)
#
# Six programs, A to F, logged what they computed, in the order of the docstring. Four have a bug each:
#
# - B not zero at the start
# - alpha / r forgotten after merge
# - adapter missing in the hash
# - gradients reduced twice
#
# Outputs are in 16 or 32 bits, so right ones are not equal. A prompt may begin with tokens from the cache, if an earlier
# request *with its own adapter* began with the same.


# %%
def verdict(seen):
    """seen.base, seen.first: outputs of the frozen layer, and with the adapter before training;
    seen.adapted, seen.merged: after training, apart and merged, all in seen.dtype; seen.requests: a
    list of (adapter, tokens, how many of them came from the cache), in their order; seen.norms:
    {"A": (gradient's norm in one process, over all ranks), "B": ...}

    -> "right", "B not zero at the start", "alpha / r forgotten after merge",
       "adapter missing in the hash", "gradients reduced twice"."""

    # BEGIN SOLUTION
    def far(one, other):
        one, other = one.double(), other.double()
        return (one - other).norm() > 20 * torch.finfo(seen.dtype).eps * other.norm()

    if far(seen.first, seen.base):
        return "B not zero at the start"
    if far(seen.merged, seen.adapted):
        return "alpha / r forgotten after merge"
    known = set()
    for adapter, tokens, hit in seen.requests:
        if hit and (adapter, tokens[:hit]) not in known:
            return "adapter missing in the hash"
        known |= {(adapter, tokens[:end]) for end in range(1, len(tokens) + 1)}
    if any(abs(ranks / alone - 1) > 0.01 for alone, ranks in seen.norms.values()):
        return "gradients reduced twice"
    return "right"
    # END SOLUTION


verdict = check("which-bug", verdict)

# %%
receipts.programs(verdict)

# %% [markdown]
# Before you open this: which of the four would the training loss have shown?
#
# <details><summary>Answer</summary>
#
# F's in its first step: training begins somewhere else than at the base, and learns nevertheless. E's from the second step
# on: here B is summed as well, so every rank's B moves in a wrong direction. B's loss is right, and the model that is
# shipped is another one. C trained nothing wrong.
#
# - **A** and **D** are right: half a step of rounding in the outputs, and hits on their own blocks only.
# - **B: alpha / r forgotten after merge.** With alpha = r it would be right by luck: test with another alpha.
# - **C: adapter missing in the hash.** A request gets tokens from the cache, and none before it had its adapter.
# - **E: gradients reduced twice.** A's norm is the right one times the number of ranks; B's is another.
# - **F: B not zero at the start.**
# </details>
#
# ## Where it loses
#
# ### Far from the base
#
# The target has read Python's standard library. Two texts that are new to it: such code indented with tabs, and such code in
# rot13, in which hardly a token is as before. The same number of steps for adapters of three ranks, on all layers, and
# for all weights:

# %%
tuned = experiments.rank_against_loss()


def loss_by_rank():
    """Loss of the target on text that is new to it, after equally many steps, by rank."""
    return figures.draw_rank(tuned)


show(loss_by_rank)

# %%
receipts.last_ranks(tuned)

# %% [markdown]
# Near the base rank 64 adds little to rank 8. Far from it the loss goes on falling with the rank. In both texts all weights
# stay ahead after thirty steps; one reason may be the embeddings, which have no adapter here. Thirty steps measure how fast
# each learns as much as what it could learn.
#
# ### Every request its own adapter
#
# Sixteen requests through one layer. With one adapter among them the update is two thin products of sixteen rows; with
# sixteen it is 32 products of one row each.

# %%
costs = experiments.batch_costs(grouped)


def cost_by_adapters():
    """Time of a batch through one layer by the number of different adapters in it."""
    return figures.draw_costs(costs)


show(cost_by_adapters)

# %%
receipts.batch_costs(costs)

# %% [markdown]
# Grouped costs more the more adapters there are, and merged weights cost more still, since each is read for one row. But with
# *one* adapter in the batch, merging is the cheapest of all: a tenant with much traffic gets merged weights of its own.
# On a GPU the small products are launches; one kernel for all groups (Punica's SGMV) takes them together.
# `python -m minillm bench adapters` compares whole models, and peft.
#
# ## The same in production
#
# `train --export` writes [peft](https://github.com/huggingface/peft)'s folder. Here it reads three of ours and runs a batch
# in which each row has its own adapter (`adapter_names`), where it is installed:

# %%
receipts.peer()

# %% [markdown]
# | what | here | elsewhere |
# |---|---|---|
# | a LoRA layer, rsLoRA | `LoraConfig(16, ("q", "v"), rslora=True)` | peft 0.21 `LoraConfig(r=16, target_modules=["q_proj", "v_proj"], use_rslora=True)` |
# | QLoRA | `train --base DIR --lora 16 --qlora` | transformers 5 `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")` and peft 0.21 |
# | answers only, preferences | `--data CHATS.jsonl`, `--dpo 0.1` | TRL 0.26 `SFTConfig(assistant_only_loss=True)`, `DPOTrainer` |
# | many adapters | `LLM(model, adapters={...})` | vLLM 0.8.5 `--enable-lora --lora-modules red=DIR --max-loras 16 --max-lora-rank 64 --max-cpu-loras 256` |
#
# Sources: [peft's LoRA guide](https://huggingface.co/docs/peft/developer_guides/lora),
# [TRL's SFT trainer](https://huggingface.co/docs/trl/sft_trainer),
# [vLLM 0.8.5's page on LoRA adapters](https://docs.vllm.ai/en/v0.8.5/features/lora.html), of 2025; the three limits are
# still there in [0.11.0](https://docs.vllm.ai/en/v0.11.0/api/vllm/config/lora.html). `--max-lora-rank` bounds the rank of
# every adapter: set it to the largest rank you serve and not higher.
#
# ## On a cluster
#
# Exercise 4 is a script as well: `torchrun --nproc-per-node 4 labs/torchrun/17_adapters.py`. Adapters train under every
# layout of ranks:
#
# ```bash
# torchrun --nproc-per-node 8 -m minillm train --base $DIR --lora 16 --target all --zero 3 --export adapter
# torchrun --nproc-per-node 8 -m minillm train --base $DIR --lora 16 --tp 2 --sp --pp 2 --dp 2 --export adapter
# ```
#
# ## Interview corner
#
# The numbers behind the answers, computed by formula:

# %%
design.interview()

# %% [markdown]
# Say your answer aloud before you open one.
#
# **1. What does LoRA save in training, and what not?**
# <details><summary>Answer</summary>
#
# Gradients, masters and moments of the frozen weights: of 18 bytes a parameter (16-bit weight 2, 32-bit gradient 4,
# master 4, moments 8) all but the 2 of the weight. About a third of the FLOPs: the gradients of frozen weights. Not the
# weights, and of activations only the inputs of layers without an adapter: backward passes every layer above the first.
#
# *Follow-up: and QLoRA?* The weights, from 16 bits to 4.127, for decoding each of them twice in a step.
# </details>
#
# **2. Why is B zero at the start, and not A?**
# <details><summary>Answer</summary>
#
# Training is to begin at the base, so one of them is zero. With A random, B learns from the first step on, and A once B
# has left zero.
# </details>
#
# **3. Merge or keep apart?**
# <details><summary>Answer</summary>
#
# Merged costs nothing per token and a copy of the weights. Apart costs two thin products a layer and can be exchanged,
# mixed in a batch and switched off. A quantized base cannot take an update smaller than its steps: merge into the wide
# weights and quantize anew, or keep it apart.
# </details>
#
# **4. How does a batch with 16 adapters run?**
# <details><summary>Answer</summary>
#
# Tokens sorted by adapter, the base's product once, two thin products for each different adapter. Bytes read grow by one
# adapter each, not by one model each. The scheduler bounds how many different ones are in a step.
# </details>
#
# **5. What must the prefix cache know?**
# <details><summary>Answer</summary>
#
# The adapter's values, by a digest of them: a name may get new weights. And the tenant, by a salt, if who shares is to be
# hidden.
# </details>
#
# **6. Which rank?**
# <details><summary>Answer</summary>
#
# Train two to the end, with the learning rate found for each. If doubling the rank gains nothing, the task is near the
# base. If the loss goes on falling, take a larger rank, more layers, or all weights.
# </details>
#
# ### Design questions
#
# **D1. Llama 3 70B is to be fine-tuned on one node of 8 cards of 80 GB. Which way, which layout, what is left for
# activations, and what would make you take more nodes?**
#
# **D2. 1,000 tenants, each with an adapter of rank 16 for Llama 3 8B, on four H100. Where are the adapters, what do 64
# requests in a step cost, and which tenants get something else?**

# %%
design.design_node(guess_states)

# %%
design.design_tenants()

# %% [markdown]
# <details><summary>D1 and D2: a worked answer</summary>
#
# D1: all weights with Adam take 158.7 GB on each card and do not fit. LoRA with the base sharded (ZeRO-3) takes 18.1 GB and
# leaves 53.9 GB for activations: about 1,900 tokens on each card at 27.9 MB a token, so longer windows need recomputation.
# Its price is gathering 141 GB of weights over NVLink, twice in a step, so take large microbatches, or tensor parallelism
# over the eight cards, which sends activations instead.
# QLoRA takes 40.0 GB, gathers nothing, and would train on a single card as well; it decodes each weight twice in a step
# and starts from a rounded base. More nodes: if two ranks show that the loss goes on falling, and all weights have to learn.
#
# D2: one adapter is 83.9 MB, all of them 83.9 GB: 119 fit into 10 GB beside base and cache, the rest waits in host
# memory, 1.3 ms away over PCIe at 64 GB/s. If every card serves all tenants, equally busy, 64 requests have 62
# different adapters, and a step takes 8.6 ms instead of 7.0; 62 merged models in turn would take 280 ms, were there
# room for their 996 GB. Better send tenants to cards by a hash of their name. Then a card has 250 of them with 21.0 GB
# of adapters: 119 stay, 131 wait in host memory, and 64 requests have 57 different ones, 8.5 ms a step. A tenant with a
# fifth of the traffic gets a merged model on a card of its own. Limit different adapters per step, and count quotas per
# tenant.
# </details>
#
# ### Capstone (open)
#
# An adapter on the last block's MLP changes no key and no value of any layer. So its requests could share the prefix cache
# with the base, and with each other. Which adapters share what, in general? Change `adapter_key` so that as much as possible
# is shared and nothing wrong, prove it on the target, and say what you would have to train differently for a whole prompt to
# be shared (start from [Greenewald et al. 2025](https://arxiv.org/abs/2504.12397), whose adapters switch on only after it).
#
# ## Can you answer them now?
#
# 1. What does an adapter save in training, in numbers, bytes and FLOPs, and what does it not save?
# 2. How do requests with different adapters share a batch and a cache?
# 3. When is a low rank not enough, and when are merged models better than a shared base?
#
# Next: [18 · Distributed serving](18_distributed_serving.ipynb) serves a model on several ranks, and hands keys over.

# %%
finish("17_adapters")
