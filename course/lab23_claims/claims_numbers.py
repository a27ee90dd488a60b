"""Statements about numbers that are often quoted for large models, and what decides them."""

from dataclasses import replace

from course.kit.receipts import Row, formula, row
from course.lab23_claims.programs import traffic_of_stage_1
from course.shared.statement import claim, computed
from minillm.comm import launch
from minillm.equivalence import SPLIT_CASES, ParallelConfig, compare
from minillm.model import ModelConfig, Transformer
from minillm.parallel import NaiveDDP
from minillm.parallel.pipeline_parallel.schedule.check import check
from minillm.parallel.pipeline_parallel.schedule.schedules import SCHEDULES
from minillm.parallel.pipeline_parallel.schedule.simulate import Durations, simulate
from minillm.predict import comms
from minillm.predict.model import ADAM_MIXED
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import DEVICES
from minillm.predict.training import pipeline, sharding
from minillm.serve import LLM, SamplingParams

ZERO = "Rajbhandari et al. 2020: https://arxiv.org/abs/1910.02054"
MEGATRON = "Narayanan et al. 2021: https://arxiv.org/abs/2104.04473"
FSDP = "Zhao et al. 2023: https://arxiv.org/abs/2304.11277"


@claim(
    "memory",
    "With TP 8, PP 2 and ZeRO-1 over 4 replicas a 70B model holds 8.75 GB of 16-bit weights per GPU.",
    "true",
    "140 GB over 16 ranks: stage 1 divides the optimizer's states among the replicas, and no weights.",
    "with stage 3 the replicas divide them too, and 2.19 GB are left",
    ZERO,
)
def zero_one_keeps_eight_gigabytes() -> list[Row]:
    own = 70e9 / 16
    held = {stage: ADAM_MIXED.parameter * own / (4 if stage == 3 else 1) for stage in (1, 3)}
    everything = {stage: ADAM_MIXED.per_rank(int(own), 4, stage) for stage in (1, 3)}
    return [
        computed("weights per GPU, stage 1", 8.75e9, held[1], "B"),
        computed("weights per GPU, stage 3", 140e9 / 64, held[3], "B"),
        formula("all states, stage 1", everything[1], "B"),
        formula("    stage 3", everything[3], "B"),
    ]


@claim(
    "data parallel",
    "Data parallelism over 64 GPUs all-reduces 140 GB of gradients for a 70B model.",
    "depends",
    "Pure data parallelism would, but it cannot hold the model; with TP 8 and PP 2 a rank reduces a sixteenth.",
    "replicas of the whole model",
    MEGATRON,
)
def seventy_reduces_140() -> list[Row]:
    whole, own = 140e9, 140e9 / 16
    seconds = [2 * size * (n - 1) / n / 50e9 for size, n in ((whole, 64), (own, 4))]
    return [
        computed("bytes that a rank reduces in TP 8, PP 2, DP 4", 8.75e9, own, "B"),
        computed("times less than pure data parallelism", 21.0, seconds[0] / seconds[1], tolerance=0.01),
    ]


@claim(
    "decoding",
    "A 70B model in 16 bits on an 80 GB card leaves 5 GB for the cache.",
    "false",
    "70 GB are its weights in 8 bits; in 16 bits they take 141 GB and do not fit.",
    "8-bit weights, and then the 5 GB are for all requests together",
    "Llama Team 2024: https://arxiv.org/abs/2407.21783",
)
def five_gigabytes_left() -> list[Row]:
    model = architecture("llama-3-70b")
    return [
        computed("16-bit weights fit into 80 GB", False, 2 * model.parameters < 80e9),
        computed("tokens in 5 GB, 8 kv heads", 15259, 5e9 // model.kv_bytes(), tolerance=1e-4),
    ]


@claim(
    "decoding",
    "One token of context takes about 1 MB.",
    "depends",
    "It is 2 · layers · kv heads · head_dim · bytes: from 0.13 MB (Llama 3 8B) to 0.82 (Llama 2 13B).",
    "large models with multi-head attention",
    "Touvron et al. 2023: https://arxiv.org/abs/2307.09288",
)
def one_megabyte_per_token() -> list[Row]:
    expected = {"llama-3-8b": 131072, "llama-2-7b": 524288, "llama-2-13b": 819200, "llama-3-70b": 327680}
    return [
        computed(f"{name}: bytes per token", size, architecture(name).kv_bytes(), "B")
        for name, size in expected.items()
    ]


@claim(
    "pipeline",
    "In 1F1B all stages can run their first backward in the same time slot.",
    "false",
    "Stage s needs the gradient that stage s + 1 has just computed: backwards start one after the other, from "
    "the last.",
    "never",
    MEGATRON,
)
def backwards_start_together() -> list[Row]:
    schedule = SCHEDULES["1f1b"](4, 8)
    check(schedule)
    found = simulate(schedule, Durations(F=1, B=1, W=0))
    first = [next(bar.start for bar in bars if bar.action.kind == "B") for bars in found.bars]
    return [
        row("slots of 4 stages and 8 microbatches, F = B = 1", 22.0, found.makespan, kind="simulated"),
        row(
            "slots before the first backward, by stage", [7, 6, 5, 4], [int(start) for start in first], kind="simulated"
        ),
        formula("slots of a step without any idle one", 16),
    ]


@claim(
    "pipeline",
    "The bytes that a stage in the middle of a pipeline sends do not grow with the number of stages.",
    "true",
    "It sends one activation forward and one gradient back per microbatch, however many stages there are.",
    "counted over all stages together, where they grow with the borders",
    MEGATRON,
)
def a_middle_stage_sends_as_much() -> list[Row]:
    per_device = [pipeline.sent_bytes(n, 8, 16, 32, 2) / (n - 1) for n in (4, 16)]
    return [computed("bytes per border with 16 stages / with 4", 1.0, per_device[1] / per_device[0])]


@claim(
    "pipeline",
    "A pipeline of 8 stages over GPT-3's 32 sequences of 2,048 tokens moves 45 GB per step.",
    "false",
    "2 · 7 borders · 32 · 2,048 · 12,288 · 2 bytes are half of that; 45 is with 32-bit activations.",
    "32-bit activations, or counting what is received too",
    MEGATRON,
)
def pipeline_moves_45() -> list[Row]:
    return [computed("bytes in 16 bits", 22.5e9, pipeline.sent_bytes(8, 32, 2048, 12288, 2), "B", tolerance=0.01)]


@claim(
    "ZeRO",
    "FSDP issues about three collectives per layer and microbatch.",
    "true",
    "Two gathers of the weights and a reduce-scatter of the gradients, and three for what is in no block.",
    "without resharding after forward it is two per layer",
    FSDP,
)
def three_collectives_per_layer() -> list[Row]:
    found = sharding.fully_shard_traffic([1000] * 96, 1000, 8)
    return [computed("collectives per microbatch", 3 * 97, found.all_gathers + found.reduce_scatters)]


@claim(
    "ZeRO",
    "In ZeRO-1 every rank contributes its shard of the gradient to an all-reduce.",
    "false",
    "It contributes the whole gradient to a reduce-scatter and keeps the sum of its own part.",
    "never",
    ZERO,
)
def shards_are_reduced() -> list[Row]:
    sent, whole = launch(traffic_of_stage_1, 2)[0]
    return [
        row(
            "bytes of the reduce-scatter on 2 real ranks / of the gradient", 1 / 2, sent["reduce_scatter"] / (4 * whole)
        ),
        row("all-reduces of gradients", 0, sent["all_reduce"]),
    ]


@claim(
    "network",
    "In a ring all-reduce each rank sends 2P(N-1)/N bytes and receives as many.",
    "true",
    "Both phases pass N-1 of N parts on; a full-duplex link does both at once.",
    "where a link is shared by both directions, which doubles its load",
    "Patarasuk and Yuan 2009: https://doi.org/10.1016/j.jpdc.2008.09.002",
)
def sent_and_as_much_received() -> list[Row]:
    cost = comms.ring_all_reduce(4096, 4, 4)
    return [computed("bytes on all links / ranks", 2 * 16384 * 3 / 4, cost.total_bytes / 4, "B")]


@claim(
    "network",
    "350 GB of gradients cross InfiniBand in 3.5 seconds.",
    "false",
    "That takes 200 GB/s per GPU; a port carries 25 to 50.",
    "eight ports that one rank can use alone",
    "NVIDIA Quantum: https://www.nvidia.com/en-us/networking/quantum2/",
)
def gradients_in_three_seconds() -> list[Row]:
    seconds = [2 * 350e9 / rate for rate in (25e9, 50e9)]
    return [
        computed("seconds at 50 GB/s", 14.0, seconds[1], "s"),
        computed("3.5 s are possible at 50 GB/s", False, seconds[1] <= 3.5),
        formula("seconds at 25 GB/s", seconds[0], "s"),
    ]


@claim(
    "kernels",
    "An A100 with 80 GB reads 1,555 GB/s.",
    "false",
    "1,555 GB/s is the 40 GB card; the 80 GB card reads 2,039.",
    "the 40 GB card",
    "NVIDIA's A100 data sheet: https://www.nvidia.com/en-us/data-center/a100/",
)
def a100_bandwidth() -> list[Row]:
    return [
        computed("80 GB card", 2.039e12, DEVICES["a100-80"].bandwidth, "B/s"),
        computed("40 GB card", 1.555e12, DEVICES["a100-40"].bandwidth, "B/s"),
    ]


@claim(
    "kernels",
    "An A100 is 1.73 times a V100, which proves that LLMs are bound by bandwidth.",
    "false",
    "1.73 is the ratio of the two bandwidths itself; a conclusion needs a measured speedup.",
    "if a measured speedup were 1.73 where arithmetic differs by 2.5",
    "Williams et al. 2009: https://doi.org/10.1145/1498765.1498785",
)
def ratio_proves_bandwidth() -> list[Row]:
    return [
        computed("1,555 / 900 GB/s", 1.728, 1555 / 900, tolerance=1e-3),
        computed("312 / 125 TFLOP/s", 2.5, 312 / 125, tolerance=0.01),
    ]


@claim(
    "kernels",
    "Fusing an addition and a ReLU is 1.67 times faster.",
    "depends",
    "5 tensors become 3 if both inputs are large; a bias that stays in cache makes it 4 to 2, twice as fast.",
    "inputs of equal size",
    "Williams et al. 2009: https://doi.org/10.1145/1498765.1498785",
)
def fusion_five_thirds() -> list[Row]:
    n, small = 10**6, 10**3
    both = (2 * n + n + n + n) / (2 * n + n)
    bias = (n + small + n + n + n) / (n + small + n)
    return [computed("equal sizes", 5 / 3, both), computed("with a bias in cache", 2.0, bias, tolerance=0.01)]


@claim(
    "decoding",
    "A 70B model's cache of 4,096 tokens takes 21 GB.",
    "false",
    "That is 64 heads in 32 bits. In 16 bits it is half, and with the 8 kv heads that such models have 1.34 GB.",
    "never in 16 bits",
    "Ainslie et al. 2023: https://arxiv.org/abs/2305.13245",
)
def four_thousand_tokens_take_21() -> list[Row]:
    grouped = architecture("llama-3-70b")
    every = replace(grouped, num_kv_heads=grouped.num_heads)
    return [
        computed("8 kv heads, 16 bits", 1.34e9, 4096 * grouped.kv_bytes(), "B", tolerance=0.01),
        computed("64 heads, 16 bits", 10.7e9, 4096 * every.kv_bytes(), "B", tolerance=0.01),
        computed("64 heads, 32 bits", 21.5e9, 2 * 4096 * every.kv_bytes(), "B", tolerance=0.01),
    ]


@claim(
    "decoding",
    "2 · 80 layers · 64 heads · 128 · 2 bytes make 5.2 MB of cache per token.",
    "false",
    "The product is 2.6 MB: the 2 for keys and values is in it already.",
    "32-bit caches",
    "Ainslie et al. 2023: https://arxiv.org/abs/2305.13245",
)
def five_megabytes_per_token() -> list[Row]:
    every = replace(architecture("llama-3-70b"), num_kv_heads=64)
    return [
        computed("bytes per token", 2_621_440, every.kv_bytes(), "B"),
        computed("32,768 tokens", 85.9e9, 32768 * every.kv_bytes(), "B", tolerance=0.001),
    ]


@claim(
    "paging",
    "Ten sequences of up to 4,096 tokens need 40,960 blocks.",
    "false",
    "Those are token slots. A block holds 16 of them or so, and only what is written needs one.",
    "blocks of one token",
    "Kwon et al. 2023: https://arxiv.org/abs/2309.06180",
)
def slots_are_blocks() -> list[Row]:
    model = Transformer(ModelConfig(64, 16, 32, 2, 2), seed=0).eval()
    llm = LLM(model, block_size=4, num_blocks=12)
    output = llm.generate([[7] * 40], SamplingParams(max_tokens=6, temperature=0))[0]
    return [
        row("tokens written after a prompt of 40, with 12 blocks of 4", 6, len(output.answers[0].tokens)),
        computed("blocks for ten times 4,096 tokens, 16 each", 2560, 10 * 4096 / 16),
    ]


@claim(
    "pipeline",
    "A pipeline trains on stale gradients.",
    "depends",
    "Synchronous ones do not: all microbatches of a step see the same weights, and the step waits for all of them.",
    "asynchronous pipelines, such as PipeDream without a flush",
    "Narayanan et al. 2019: https://arxiv.org/abs/1806.03377",
)
def pipelines_are_stale() -> list[Row]:
    layout = ParallelConfig(pp=2, accumulate=4, schedule="1f1b")
    (result,) = compare(layout, {"plain": SPLIT_CASES["plain"]}, steps=1)
    return [
        row("worst gradient on 2 real stages against one process, below 1e-10", True, result.worst_gradient < 1e-10),
        formula("steps behind on the first of 4 stages, asynchronous PipeDream", pipeline.staleness(4, 0)),
    ]


@claim(
    "pipeline",
    "A pipeline has to keep the activations of all M microbatches.",
    "depends",
    "GPipe does; under 1F1B stage s keeps n - s of them, whatever M.",
    "GPipe, or fewer microbatches than stages",
    MEGATRON,
)
def all_microbatches_are_kept() -> list[Row]:
    peaks = {
        name: [simulate(SCHEDULES[name](4, count)).peak_in_flight[0] for count in (8, 32)] for name in ("gpipe", "1f1b")
    }
    return [
        row("GPipe, in flight on stage 0 for 8 and 32 microbatches", [8, 32], peaks["gpipe"], kind="simulated"),
        row("1F1B", [4, 4], peaks["1f1b"], kind="simulated"),
    ]


@claim(
    "pipeline",
    "The idle share of a pipeline of n stages is (1 - M)/(M + n - 1).",
    "false",
    "That is negative for two microbatches or more; the numerator is n - 1.",
    "never",
    "Huang et al. 2019: https://arxiv.org/abs/1811.06965",
)
def negative_bubble() -> list[Row]:
    idle = simulate(SCHEDULES["gpipe"](2, 4)).idle_share
    return [
        row("idle share of 2 stages and 4 microbatches", 1 / 5, idle, tolerance=1e-6, kind="simulated"),
        computed("claimed, below 0", True, (1 - 4) / (4 + 2 - 1) < 0),
    ]


@claim(
    "data parallel",
    "The idea of data parallelism is to distribute the model over the GPUs.",
    "false",
    "The data are distributed; every rank holds the whole model.",
    "sharded data parallelism does distribute it, between its uses",
    "Li et al. 2020: https://arxiv.org/abs/2006.15704",
)
def the_model_is_distributed() -> list[Row]:
    config = ModelConfig(64, 16, 32, 2, 2)
    whole = sum(parameter.numel() for parameter in Transformer(config, seed=0).parameters())
    held = launch(_held_under_data_parallelism, 2, config)
    return [row("parameters on each of 2 real ranks / of the model", [1.0, 1.0], [count / whole for count in held])]


def _held_under_data_parallelism(group, config: ModelConfig) -> int:
    return sum(parameter.numel() for parameter in NaiveDDP(Transformer(config, seed=0), group).parameters())
