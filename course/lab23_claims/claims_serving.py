"""Statements about serving: paging, batching, speculation, quantization."""

import random

import torch

from course.kit.receipts import Row, formula, row
from course.shared.statement import at, claim, computed
from minillm.model import ModelConfig, Transformer
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import DEVICES
from minillm.predict.serving import queueing, speculation
from minillm.serve import LLM, SamplingParams

LEVIATHAN = "Leviathan et al. 2023: https://arxiv.org/abs/2211.17192"
PAGED = "Kwon et al. 2023: https://arxiv.org/abs/2309.06180"


@claim(
    "paging",
    "Ten sequences of up to 4,096 tokens need 40,960 blocks.",
    "false",
    "Those are token slots. A block holds 16 of them or so, and only what is written needs one.",
    "blocks of one token",
    "Kwon et al. 2023, section 4.1: https://arxiv.org/abs/2309.06180",
)
def forty_thousand_blocks() -> list[Row]:
    model = Transformer(ModelConfig(64, 16, 32, 2, 2), seed=0).eval()
    llm = LLM(model, block_size=4, num_blocks=12)
    output = llm.generate([[7] * 40], SamplingParams(max_tokens=6, temperature=0))[0]
    return [
        row("tokens written after a prompt of 40, with 12 blocks of 4", 6, len(output.answers[0].tokens)),
        computed("blocks for ten times 4,096 tokens, 16 each", 2560, 10 * 4096 / 16),
    ]


@claim(
    "paging",
    "A paged cache never needs defragmentation.",
    "true",
    "Blocks need not be contiguous: any free block serves.",
    "caches that are allocated as one piece per sequence",
    at(PAGED, "section 3.1"),
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
    at(PAGED, "section 4.4"),
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
    at(PAGED, "section 4.3"),
)
def paging_wastes_five() -> list[Row]:
    wasted = [(-length % 16) / (length + -length % 16) for length in (56, 2040)]
    return [
        computed("share wasted: 56 tokens in blocks of 16", 8 / 64, wasted[0]),
        computed("    2,040 tokens", 8 / 2048, wasted[1]),
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
    waits = sorted(
        queueing.waits((draw.expovariate(0.85) for _ in range(count)), [draw.expovariate(1.0) for _ in range(count)])
    )
    expected, late = queueing.wait_quantile(0.85, 1.0, 0.99), waits[count * 99 // 100]
    return [
        row("mean wait, in service times", 0.85 / 0.15, sum(waits) / count, tolerance=0.15, kind="simulated"),
        row("99th percentile", expected, late, tolerance=0.15, kind="simulated"),
    ]


@claim(
    "speculation",
    "Speculative sampling leaves the distribution of the target's text exactly as it is.",
    "true",
    "A draft token stays with probability min(1, p/q), and the rest comes from max(0, p - q).",
    "typical acceptance and other lossy rules",
    at(LEVIATHAN, "section 2.3"),
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
    at(LEVIATHAN, "section 3.3"),
)
def speedup_is_k_alpha() -> list[Row]:
    return [
        computed("K = 4, acceptance 0.8, draft 0.1", 2.40, speculation.speedup(0.8, 0.1, 4), tolerance=0.005),
        formula("    claimed", 4 * 0.8),
        computed("K = 8", 2.40, speculation.speedup(0.8, 0.1, 8), tolerance=0.005),
        formula("    claimed", 8 * 0.8),
    ]


@claim(
    "speculation",
    "The expected number of accepted tokens is the sum of i times the chance to accept the first i.",
    "false",
    "Without the factor i: the sum of the chances. The claimed sum exceeds K.",
    "with the chance of *exactly* i it is right",
    at(LEVIATHAN, "section 3.1"),
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
    "Speculation makes a busy server faster.",
    "depends",
    "It spends spare arithmetic. A full batch of short contexts has none; with long contexts even a full batch "
    "waits for the reads of its caches.",
    "contexts so long that a full batch is bound by memory (Chen et al. 2024, MagicDec: "
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
        computed("speedup with K = 4: 8 sequences of 500 tokens", 1.98, gain(8, 500), tolerance=0.01),
        computed("    256 sequences of 500", 0.694, gain(256, 500), tolerance=0.01),
        computed("    256 sequences of 1,800", 1.43, gain(256, 1800), tolerance=0.01),
        formula("    their weights and caches", 2 * model.parameters + 256 * 1800 * model.kv_bytes(), "B"),
    ]


@claim(
    "quantization",
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
