# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 23 · Common claims
#
# **A claim is worth what decides it: vote first, then run it.**
# Stands on labs 00 to 15 (what they measured).
#
# Ninety-nine statements that are often heard, most of them in interviews too. You vote *true*, *false* or *depends*; the next
# cell runs what decides each one, on real ranks, in a simulation or by the course's formulas, and says under which condition
# the verdict flips. About two hours with one exercise; running the notebook from top to bottom takes seconds. At
# the end you can answer:
#
# 1. Which statements about memory and bytes can you refute with one line of arithmetic?
# 2. Which ones are true only under a condition, and what is the condition?
# 3. What would you measure to decide a claim that is not here?
#
# Each statement is quoted as a claim, not as anybody's words; the source beside the verdict is where the right answer can be
# read.

# %%
from course.kit import check, finish, hint
from course.lab23_claims import receipts

# %% [markdown]
# ## How to vote
#
# Change the words in a cell of votes, then run the cell under it. *depends* needs a condition: say it aloud before you look.
# The column *measured* comes from this machine, *simulated* from a model of one, and *computed* is arithmetic with the
# course's formulas.
#
# ### Exercise · refute one yourself (10 minutes)
#
# *"The mean of the ranks' mean losses is the loss of the whole batch."* Give the numbers of tokens per rank and the ranks'
# mean losses (in nats) for which it is wrong by at least 15 %.


# %%
def counterexample():
    """-> (tokens, losses): two lists with an entry per rank."""
    # BEGIN SOLUTION
    tokens, losses = [12, 4], [2.0, 4.0]  # (24 + 16) / 16 = 2.5 per token, but a mean of means of 3.0
    assert len(tokens) == len(losses)
    return tokens, losses
    # END SOLUTION


counterexample = check("counterexample", counterexample)


# %% [markdown]
# ## Memory

# %%
receipts.statements("memory")


# %%
votes = {
    "zero_three_keeps_eight_gigabytes": "depends",
    "seven_billion_in_fourteen": "depends",
    "mixed_precision_halves_states": "depends",
    "adam_costs_eight": "depends",
    "bf16_needs_no_master": "depends",
    "fp16_needs_scaling": "depends",
    "recomputation_costs_a_third": "depends",
    "pipeline_divides_activations": "depends",
    "seventy_needs_three_axes": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Data parallelism and ZeRO

# %%
receipts.statements("data parallel", "ZeRO")


# %%
votes = {
    "seventy_reduces_140": "depends",
    "hundred_collectives": "depends",
    "shards_are_reduced": "depends",
    "data_parallel_when_it_does_not_fit": "depends",
    "communication_grows_with_ranks": "depends",
    "bytes_depend_on_batch": "depends",
    "mean_of_means": "depends",
    "averaging_is_stale": "depends",
    "zero_trades_communication": "depends",
    "zero_sends_optimizer_states": "depends",
    "zero_cuts_four_eight_n": "depends",
    "stage_three_removes_most": "depends",
    "stage_three_scales_linearly": "depends",
    "accumulation_saves": "depends",
    "barrier_moves_weights": "depends",
    "rank_zero_saves_all": "depends",
    "local_clipping": "depends",
    "the_model_is_distributed": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Pipelines

# %%
receipts.statements("pipeline")


# %%
votes = {
    "bubble_over_microbatches": "depends",
    "one_f_one_b_shrinks_the_bubble": "depends",
    "one_f_one_b_keeps_versions": "depends",
    "interleaving_is_lean": "depends",
    "two_ranks_four_stages": "depends",
    "four_n_microbatches": "depends",
    "pipeline_bytes_grow": "depends",
    "backwards_start_together": "depends",
    "pipeline_per_device_grows": "depends",
    "pipeline_moves_45": "depends",
    "pipelines_are_stale": "depends",
    "all_microbatches_are_kept": "depends",
    "negative_bubble": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Tensor parallelism

# %%
receipts.statements("tensor parallel")


# %%
votes = {
    "row_needs_both": "depends",
    "tensor_sends_weights": "depends",
    "layer_norm_communicates": "depends",
    "sequence_costs_more": "depends",
    "tensor_raises_latency": "depends",
    "sequence_uses_all_reduce": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Networks and kernels

# %%
receipts.statements("network", "kernels")


# %%
votes = {
    "infiniband_in_gigabytes": "depends",
    "all_to_all_is_all_reduce": "depends",
    "two_levels_send_less": "depends",
    "nvlink_six_hundred": "depends",
    "one_card_for_all": "depends",
    "mostly_memory_bound": "depends",
    "flash_saves_flops": "depends",
    "sent_and_received": "depends",
    "gradients_in_three_seconds": "depends",
    "a100_bandwidth": "depends",
    "ratio_proves_bandwidth": "depends",
    "fusion_five_thirds": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Long context, experts, several axes

# %%
receipts.statements("long context", "experts", "several axes")


# %%
votes = {
    "ring_is_approximate": "depends",
    "equal_parts_equal_work": "depends",
    "ulysses_sends_less": "depends",
    "experts_decode_like_dense": "depends",
    "capacity_one_drops_nothing": "depends",
    "experts_need_their_own_ranks": "depends",
    "order_does_not_matter": "depends",
    "one_replica_reduces_nothing": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Decoding and the cache

# %%
receipts.statements("decoding", "paging")


# %%
votes = {
    "five_gigabytes_left": "depends",
    "one_megabyte_per_token": "depends",
    "decode_reads_twice": "depends",
    "cache_of_seventy": "depends",
    "cache_holds_all": "depends",
    "throughput_for_ever": "depends",
    "paging_defragments": "depends",
    "blocks_shared_anywhere": "depends",
    "paging_wastes_five": "depends",
    "four_thousand_tokens_take_21": "depends",
    "five_megabytes_per_token": "depends",
    "slots_are_blocks": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Batching, speculation, quantisation

# %%
receipts.statements("batching", "speculation", "quantisation")


# %%
votes = {
    "continuous_is_faster": "depends",
    "slack_at_eighty_five": "depends",
    "speculation_changes": "depends",
    "speedup_is_k_alpha": "depends",
    "expected_accepted": "depends",
    "speculation_when_busy": "depends",
    "four_bits_four_times": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Code that is often copied

# %%
receipts.statements("code")


# %%
votes = {
    "a_policy_without_a_class": "depends",
    "shards_of_different_models": "depends",
    "reentrant_checkpoint": "depends",
    "a_scaler_per_rank": "depends",
    "loading_to_meta": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Faults and cost

# %%
receipts.statements("faults", "cost")


# %%
votes = {
    "save_every_thousand": "depends",
    "manifest_before_barrier": "depends",
    "elastic_rebalances": "depends",
    "weights_are_enough": "depends",
    "one_slow_gpu": "depends",
    "goodput_scales": "depends",
    "utilisation_is_compute": "depends",
    "eight_times_seven": "depends",
    "six_per_parameter": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Where a verdict loses
#
# - A formula decides what it models. Where it leaves something out (contention, stragglers, allocators), only the machine
#   decides.
# - *False* here means false as stated. Most of these statements grew from something true: name it, and the condition under
#   which it holds, before you correct anybody.
#
# ## Can you answer them now?
#
# 1. Which statements about memory and bytes can you refute with one line of arithmetic?
# 2. Which ones are true only under a condition, and what is the condition?
# 3. What would you measure to decide a claim that is not here?
#
# **Design questions.** D1: somebody proposes ZeRO-3 for a 13B model on 8 GPUs with 8 microbatches per step, "since it needs
# less memory". Which three statements above decide it, and with which numbers? D2: a vendor promises four times the throughput
# with 4-bit weights. Which two measurements do you ask for?
#
# **Capstone (open).** Find a claim in a blog post or a talk that none of these decides. Write the statement, the verdict, the
# condition, and the ten lines that run it, in the form of `course/lab23_claims/claims_training.py`.
#
# Next: [24 · The mock interview](24_interview.ipynb) asks for all of it, under a clock.

# %%
finish("23_claims")
