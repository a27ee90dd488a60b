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
# Stands on labs 00 to 16 (what they measured).
#
# A hundred and one statements of the kind that interviews bring up: some true, some false, and a third that depends. You vote; the
# next cell runs what decides each one, on real ranks, in a simulation or by the course's formulas, and says under which condition
# the verdict flips. The core path, all claims and one exercise, takes two hours; running the notebook from top to bottom takes seconds. At
# the end you can answer:
#
# 1. Which statements about memory and bytes can you refute with one line of arithmetic?
# 2. Which ones are true only under a condition, and what is the condition?
# 3. What would you measure to decide a claim that is not here?
#
# Each statement is quoted as a claim, not as anybody's words; the source beside the verdict is where to read on. What is said
# of torch was checked with torch 2.13.

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
    tokens, losses = [12, 4], [2.0, 4.0]  # 40 / 16 = 2.5 per token, but a mean of means of 3.0
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
    "zero_one_keeps_eight_gigabytes": "depends",
    "seven_billion_in_fourteen": "depends",
    "mixed_precision_halves_states": "depends",
    "adam_costs_eight": "depends",
    "bf16_needs_no_master": "depends",
    "fp16_needs_scaling": "depends",
    "recomputation_costs_a_third": "depends",
    "pipeline_divides_activations": "depends",
    "seventy_fits_with_zero_alone": "depends",
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
    "the_model_is_distributed": "depends",
    "data_parallel_when_it_does_not_fit": "depends",
    "bytes_stay_below_twice": "depends",
    "bytes_do_not_depend_on_batch": "depends",
    "mean_of_means": "depends",
    "averaging_is_stale": "depends",
    "three_collectives_per_layer": "depends",
    "shards_are_reduced": "depends",
    "zero_trades_communication": "depends",
    "optimizer_states_stay": "depends",
    "zero_cuts_four_eight_n": "depends",
    "stage_one_divides_most": "depends",
    "stage_three_scales_linearly": "depends",
    "accumulation_saves": "depends",
    "barrier_moves_weights": "depends",
    "rank_zero_saves_all": "depends",
    "local_clipping": "depends",
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
    "one_f_one_b_and_gpipe_idle_alike": "depends",
    "versions_of_one_f_one_b": "depends",
    "interleaving_is_lean": "depends",
    "two_ranks_four_stages": "depends",
    "three_microbatches_per_stage": "depends",
    "microbatches_leave_the_bytes": "depends",
    "backwards_start_together": "depends",
    "a_middle_stage_sends_as_much": "depends",
    "pipeline_moves_45": "depends",
    "pipelines_are_stale": "depends",
    "all_microbatches_are_kept": "depends",
    "idle_share_formula": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Tensor parallelism

# %%
receipts.statements("tensor parallel")


# %%
votes = {
    "one_all_reduce_each_way": "depends",
    "tensor_sends_activations": "depends",
    "layer_norm_communicates": "depends",
    "bytes_of_sequence_parallelism": "depends",
    "latency_of_tensor_parallelism": "depends",
    "sequence_parallel_all_reduces": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Networks and kernels

# %%
receipts.statements("network", "kernels")


# %%
votes = {
    "infiniband_hdr": "depends",
    "all_to_all_is_all_reduce": "depends",
    "two_levels_send_as_much": "depends",
    "nvlink_six_hundred": "depends",
    "one_card_for_all": "depends",
    "sent_and_as_much_received": "depends",
    "gradients_in_three_seconds": "depends",
    "mostly_memory_bound": "depends",
    "flash_computes_more": "depends",
    "a100_bandwidth": "depends",
    "ratio_proves_bandwidth": "depends",
    "fusion_five_thirds": "depends",
    "compiled_once": "depends",
    "graphs_speed_up_kernels": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Long context, experts, several axes

# %%
receipts.statements("long context", "experts", "several axes")


# %%
votes = {
    "ring_is_exact": "depends",
    "equal_parts_equal_work": "depends",
    "ulysses_sends_less": "depends",
    "experts_decode_like_dense": "depends",
    "capacity_one_drops_nothing": "depends",
    "experts_inside_replicas": "depends",
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
    "four_thousand_tokens_take_21": "depends",
    "five_megabytes_per_token": "depends",
    "twenty_four_per_second": "depends",
    "cache_of_seventy": "depends",
    "cache_entries_after_n": "depends",
    "throughput_for_ever": "depends",
    "forty_thousand_blocks": "depends",
    "paging_needs_no_defragmentation": "depends",
    "blocks_shared_anywhere": "depends",
    "paging_wastes_five": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## Batching, speculation, quantization

# %%
receipts.statements("batching", "speculation", "quantization")


# %%
votes = {
    "continuous_is_faster": "depends",
    "slack_at_eighty_five": "depends",
    "speculation_is_exact": "depends",
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
    "auto_wrap_policy": "depends",
    "shards_without_a_seed": "depends",
    "checkpoint_any_input": "depends",
    "scalers_on_shards": "depends",
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
    "weights_are_enough": "depends",
    "one_slow_gpu_costs_a_sixth": "depends",
    "goodput_scales": "depends",
    "save_every_thousand": "depends",
    "manifest_before_barrier": "depends",
    "elastic_rebalances": "depends",
    "utilisation_is_compute": "depends",
    "fewer_than_eight_times_seven": "depends",
    "six_per_parameter": "depends",
}

# %%
receipts.decide(votes)


# %% [markdown]
# ## What a verdict leaves out
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
# condition, and the ten lines that run it, in the form of `course/lab23_claims/claims_memory.py`.
#
# Next: [24 · The mock interview](24_interview.ipynb) asks for all of it, under a clock.

# %%
finish("23_claims")
