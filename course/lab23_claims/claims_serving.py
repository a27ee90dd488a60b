"""Statements about decoding, batching, speculation, faults and cost, and what decides them."""

import random

import torch

from course.kit.receipts import Row, formula, row
from course.shared.statement import claim, computed
from minillm.comm import RankError, launch
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import KVCache
from minillm.predict import faults
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import DEVICES
from minillm.predict.serving import queueing, speculation
from minillm.serve import LLM, SamplingParams

POPE = "Pope et al. 2022: https://arxiv.org/abs/2211.05102"
PAGED = "Kwon et al. 2023: https://arxiv.org/abs/2309.06180"
LEVIATHAN = "Leviathan et al. 2023: https://arxiv.org/abs/2211.17192"


@claim(
    "decoding",
    "70B in 16 bits on 3.35 TB/s cannot decode one sequence faster than 24 tokens per second.",
    "true",
    "Every step reads every weight once: 140 GB over the bandwidth. The 2 of 2 FLOPs per weight is no second read.",
    "several tokens per pass (speculation), or several sequences, of which each still has 24",
    POPE,
)
def decode_reads_weights_once() -> list[Row]:
    speed = DEVICES["h100"].bandwidth / (2 * 70e9)
    return [computed("70B in 16 bits on 3.35 TB/s, tokens/s", 23.9, speed, tolerance=0.005)]


@claim(
    "decoding",
    "The cache of a 70B model takes 2.6 MB per token.",
    "depends",
    "With all 64 heads it would; grouped attention keeps 8: 0.33 MB.",
    "multi-head attention",
    "Ainslie et al. 2023: https://arxiv.org/abs/2305.13245",
)
def cache_of_seventy() -> list[Row]:
    return [
        computed("bytes per token, 8 kv heads", 2 * 80 * 8 * 128 * 2, architecture("llama-3-70b").kv_bytes(), "B"),
        formula("with 64", 2 * 80 * 64 * 128 * 2, "B"),
    ]


@claim(
    "decoding",
    "After n generated tokens the cache holds prompt + n - 1 entries.",
    "true",
    "The last token has been chosen and has not gone through the model.",
    "after one more pass",
    POPE,
)
def cache_lacks_the_last() -> list[Row]:
    config = ModelConfig(64, 16, 32, 2, 2)
    model = Transformer(config, seed=0).eval()
    cache, prompt, answer = KVCache(config, 16), [1, 2, 3], 4
    with torch.no_grad():
        tokens, start, made = prompt, 0, 0
        while made < answer:
            logits = model(torch.tensor([tokens]), torch.arange(start, start + len(tokens)), attention=cache)
            start, tokens, made = start + len(tokens), [int(logits[0, -1].argmax())], made + 1
    return [row("positions put through the model", len(prompt) + answer - 1, start)]


@claim(
    "decoding",
    "Throughput grows with the batch for ever.",
    "false",
    "Until reading caches or arithmetic takes longer than reading weights.",
    "small batches and short contexts",
    POPE,
)
def throughput_for_ever() -> list[Row]:
    model, device = architecture("llama-3-8b"), DEVICES["h100"]

    def speed(batch: int, context: int) -> float:
        read = 2 * model.parameters + batch * context * model.kv_bytes()
        return batch / max(read / device.bandwidth, 2 * model.parameters * batch / (device.flops * device.achievable))

    return [
        computed("8 sequences give nearly 8 times", True, speed(8, 1024) / speed(1, 1024) > 7),
        computed("512 give 512 times", False, speed(512, 1024) / speed(1, 1024) > 500),
    ]


@claim(
    "paging",
    "A paged cache never needs defragmentation.",
    "true",
    "Blocks need not be contiguous: any free block serves.",
    "caches that are allocated as one piece per sequence",
    PAGED,
)
def paging_needs_no_defragmentation() -> list[Row]:
    llm = LLM(Transformer(ModelConfig(64, 16, 32, 2, 2), seed=0).eval(), block_size=4, num_blocks=16)
    params = SamplingParams(max_tokens=6, temperature=0)
    for size in (3, 9, 5):
        llm.generate([[1 + i % 60 for i in range(size + shift)] for shift in range(3)], params)
    output = llm.generate([[7] * 40], params)[0]
    return [row("tokens of a long prompt after many short ones", 6, len(output.answers[0].tokens))]


@claim(
    "paging",
    "Blocks of equal tokens can be shared wherever they stand.",
    "false",
    "Keys and values depend on position and on everything before: only equal prefixes can be shared.",
    "the same prefix",
    PAGED,
)
def blocks_shared_anywhere() -> list[Row]:
    llm = LLM(Transformer(ModelConfig(64, 16, 32, 2, 2), seed=0).eval(), block_size=4, num_blocks=32)
    block, other = [5, 6, 7, 8], [9, 10, 11, 12]
    params = SamplingParams(max_tokens=1, temperature=0)
    llm.generate([block + other + [1]], params)
    hits = [llm.generate([prompt], params)[0].hit for prompt in (block + other + [2], other + block + [2])]
    return [row("cached tokens with the same prefix", 8, hits[0]), row("with the same blocks exchanged", 0, hits[1])]


@claim(
    "paging",
    "Paging wastes less than 5 %.",
    "depends",
    "Less than one block per sequence: little for long ones, much for short ones.",
    "long sequences",
    PAGED,
)
def paging_wastes_five() -> list[Row]:
    wasted = [(-length % 16) / (length + -length % 16) for length in (56, 2040)]
    return [
        computed("56 tokens in blocks of 16, below 5 %", False, wasted[0] < 0.05),
        computed("2,040 tokens, below 5 %", True, wasted[1] < 0.05),
    ]


@claim(
    "batching",
    "Continuous batching is always faster than static batches.",
    "depends",
    "It gains what static batches wait for their longest; with equal lengths that is nothing.",
    "lengths or arrival times that differ",
    "Yu et al. 2022: https://www.usenix.org/conference/osdi22/presentation/yu",
)
def continuous_is_faster() -> list[Row]:
    draw, batch = random.Random(0), 8
    rows = []
    for name, lengths in (
        ("equal lengths", [100] * 4000),
        ("exponential lengths", [max(1, round(draw.expovariate(1 / 100))) for _ in range(4000)]),
    ):
        static = sum(max(lengths[i : i + batch]) for i in range(0, len(lengths), batch))
        expected = 1.0 if name.startswith("equal") else sum(1 / i for i in range(1, batch + 1))
        rows.append(
            row(
                f"{name}: static steps / continuous steps",
                expected,
                static * batch / sum(lengths),
                tolerance=0.05,
                kind="simulated",
            )
        )
    return rows


@claim(
    "batching",
    "At 85 % load a server has 15 % of slack, so waits are short.",
    "false",
    "The mean wait is 5.7 service times, the 99th percentile 30.",
    "regular arrivals and equal services",
    "Lindley 1952: https://doi.org/10.1017/S0305004100027638",
)
def slack_at_eighty_five() -> list[Row]:
    draw, count = random.Random(2), 100_000
    waits = queueing.waits(
        (draw.expovariate(0.85) for _ in range(count)), [draw.expovariate(1.0) for _ in range(count)]
    )
    return [row("mean wait, in service times", 0.85 / 0.15, sum(waits) / count, tolerance=0.15, kind="simulated")]


@claim(
    "speculation",
    "Speculative sampling leaves the distribution of the target's text exactly as it is.",
    "true",
    "A draft token stays with probability min(1, p/q), and the rest comes from max(0, p - q).",
    "typical acceptance and other lossy rules",
    LEVIATHAN,
)
def speculation_is_exact() -> list[Row]:
    torch.manual_seed(0)
    p, q = torch.rand(2, 7, dtype=torch.float64).softmax(-1)
    accepted = q * torch.minimum(torch.ones_like(p), p / q)
    rest = (p - q).clamp(min=0)
    out = accepted + (1 - accepted.sum()) * rest / rest.sum()
    return [computed("largest difference from p, enumerated, below 1e-12", True, (out - p).abs().max().item() < 1e-12)]


@claim(
    "speculation",
    "The speedup is K times the acceptance rate.",
    "false",
    "The sum is geometric, and drafting costs: there is a best K.",
    "never",
    LEVIATHAN,
)
def speedup_is_k_alpha() -> list[Row]:
    return [
        computed("K = 4, acceptance 0.8, draft 0.1", 2.40, speculation.speedup(0.8, 0.1, 4), tolerance=0.005),
        computed(
            "K = 8 is twice as fast as K = 4",
            False,
            speculation.speedup(0.8, 0.1, 8) > 1.9 * speculation.speedup(0.8, 0.1, 4),
        ),
    ]


@claim(
    "speculation",
    "The expected number of accepted tokens is the sum of i times the chance to accept the first i.",
    "false",
    "Without the factor i: the sum of the chances. The claimed sum exceeds K.",
    "with the chance of *exactly* i it is right",
    LEVIATHAN,
)
def expected_accepted() -> list[Row]:
    draw, alpha, k, total = random.Random(0), 0.8, 4, 0
    for _ in range(50_000):
        for _ in range(k):
            if draw.random() >= alpha:
                break
            total += 1
    claimed = sum(i * alpha**i for i in range(1, k + 1))
    return [
        row(
            "accepted of 4, simulated",
            speculation.tokens_per_pass(alpha, k) - 1,
            total / 50_000,
            tolerance=0.02,
            kind="simulated",
        ),
        computed("the claimed sum exceeds K", True, claimed > k),
    ]


@claim(
    "speculation",
    "Speculation helps most on a busy server.",
    "depends",
    "It spends spare arithmetic. A full batch of short contexts has none; with long contexts even a full batch "
    "waits for the reads of its caches.",
    "few streams, or contexts so long that a full batch is bound by memory (Chen et al. 2024, MagicDec: "
    "https://arxiv.org/abs/2408.11049)",
    LEVIATHAN,
)
def speculation_when_busy() -> list[Row]:
    model, device = architecture("llama-3-8b"), DEVICES["h100"]

    def seconds(batch: int, context: int, tokens: int) -> float:
        """One pass over so many new tokens of every sequence."""
        read = 2 * model.parameters + batch * context * model.kv_bytes()
        return max(read / device.bandwidth, 2 * model.parameters * batch * tokens / (device.flops * device.achievable))

    def gain(batch: int, context: int) -> float:
        check = seconds(batch, context, 5) / seconds(batch, context, 1)
        return speculation.speedup(0.7, 0.1, 4, verify=check)

    return [
        computed("8 sequences of 500 tokens: faster with K = 4", True, gain(8, 500) > 1),
        computed("256 sequences of 500 tokens", False, gain(256, 500) > 1),
        computed("256 sequences of 32,000 tokens", True, gain(256, 32000) > 1),
    ]


@claim(
    "quantisation",
    "4-bit weights make serving four times faster.",
    "depends",
    "Where reading weights is the limit, up to 3.6 times with scales; at large batches not at all.",
    "small batches",
    "Frantar et al. 2022: https://arxiv.org/abs/2210.17323",
)
def four_bits_four_times() -> list[Row]:
    model, device = architecture("llama-3-8b"), DEVICES["h100"]

    def seconds(batch: int, bits: float) -> float:
        flops = 2 * model.parameters * batch / device.matmul_rate(model.hidden_size)
        return max(model.parameters * bits / 8 / device.bandwidth, flops)

    return [
        computed("batch 1", 16 / 4.5, seconds(1, 16) / seconds(1, 4.5), tolerance=0.01),
        computed("batch 512", 1.0, seconds(512, 16) / seconds(512, 4.5), tolerance=0.01),
    ]


@claim(
    "faults",
    "Save every 1,000 steps.",
    "depends",
    "The best interval follows from the cost of a save and the rate of failures: √(2 · cost · MTBF).",
    "when that happens to be the interval",
    "Young 1974: https://doi.org/10.1145/361147.361115",
)
def save_every_thousand() -> list[Row]:
    rows = []
    for gpus in (64, 16384):
        mtbf = faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, gpus)
        best = faults.young_interval(30, mtbf)
        worse = min(faults.wasted_share(best * f, 30, 600, mtbf) for f in (0.5, 2.0))
        rows.append(
            computed(
                f"{gpus:,} GPUs: half or twice the interval wastes more",
                True,
                worse > faults.wasted_share(best, 30, 600, mtbf),
            )
        )
        rows.append(computed("    best interval", None, best, "s"))
    return rows


@claim(
    "faults",
    "Writing the manifest before the barrier is fine, as all ranks write anyway.",
    "false",
    "A crash between the two leaves a checkpoint that looks complete.",
    "if readers verify every shard",
    "torch.distributed.checkpoint: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
)
def manifest_before_barrier() -> list[Row]:
    looks_whole = {}
    for name, order in (("manifest first", ["manifest", 0, 1, 2]), ("manifest last", [0, 1, 2, "manifest"])):
        torn = 0
        for killed_after in range(len(order) + 1):
            there = set(order[:killed_after])
            torn += "manifest" in there and not {0, 1, 2} <= there
        looks_whole[name] = torn
    return [
        row(
            "instants at which a torn checkpoint looks whole, manifest first",
            3,
            looks_whole["manifest first"],
            kind="simulated",
        ),
        row("    manifest last", 0, looks_whole["manifest last"], kind="simulated"),
    ]


@claim(
    "faults",
    "Elastic training rebalances work when a node is lost.",
    "false",
    "All workers are stopped and restarted with a new world size; state, data and batch are the script's job.",
    "services that keep state outside the workers",
    "torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html",
)
def elastic_rebalances() -> list[Row]:
    return [
        row("3 real ranks, one is lost: the others finish their step", False, _finish_without_one()),
        computed("a batch of 64 in microbatches of 4 divides over 4 ranks", True, 64 % (4 * 4) == 0),
        computed("    over the 3 that are left", False, 64 % (4 * 3) == 0),
    ]


def _finish_without_one() -> bool:
    try:
        launch(_step_of_three, 3)
    except RankError:
        return False
    return True


def _step_of_three(group) -> float:
    if group.rank == 1:
        raise RuntimeError("this rank is lost")
    return group.all_reduce(torch.ones(1)).item()


@claim(
    "cost",
    "100 % GPU utilisation means that the GPU computes all the time.",
    "false",
    "It means that some kernel was resident; one that waits for a message counts too.",
    "never",
    "NVML, nvmlUtilization_t: https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html",
)
def utilisation_is_compute() -> list[Row]:
    from minillm.predict.planner import published
    from minillm.predict.planner.step import step

    run = next(each for each in published.RUNS if each.name.startswith("Llama 3 405B, 16,384 GPUs, 8k"))
    time = step(run.architecture, run.layout, run.cluster, run.seq)
    return [
        computed(
            "share of the peak while every GPU is busy, as published, below half",
            True,
            published.compare(run).reported < 0.5,
        ),
        formula("seconds of a step in tensor-parallel collectives", time.tp, "s"),
    ]


@claim(
    "cost",
    "A model called 8x7B has fewer than 56 billion parameters.",
    "true",
    "The experts are MLPs; attention and embeddings are shared: 46.7B, of which a token activates 12.9B.",
    "if the experts were whole models",
    "Jiang et al. 2024: https://arxiv.org/abs/2401.04088",
)
def fewer_than_eight_times_seven() -> list[Row]:
    model = architecture("mixtral-8x7b")
    return [
        computed("parameters", 46.7e9, model.parameters, tolerance=0.002),
        computed("active", 12.9e9, model.active_parameters, tolerance=0.005),
    ]


@claim(
    "cost",
    "Training FLOPs are 6 per parameter and token.",
    "depends",
    "Attention comes on top and grows with the sequence; recomputation makes it 8 for the hardware.",
    "short sequences, no recomputation",
    "Kaplan et al. 2020: https://arxiv.org/abs/2001.08361",
)
def six_per_parameter() -> list[Row]:
    model = architecture("llama-3-8b")
    short, long = (model.training_flops(context) / (6 * model.parameters) for context in (1024, 65536))
    return [
        computed("1,024 keys per query: within 10 %", True, abs(short - 1) < 0.1),
        computed("65,536: within 10 %", False, abs(long - 1) < 0.1),
    ]
