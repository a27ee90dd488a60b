"""Numbers of the cards on training, computed a second time from data sheets, papers, counting and simulation."""

import math
import random

import torch
from card_formulas import causal_shares, makespan, ring
from card_numbers import Worked
from torch.utils.data import DistributedSampler

P8, P70 = 8.03e9, 70.55e9  # parameters of Llama 3 8B and 70B: their model cards
STATES = 2 + 4 + 4 + 8  # bytes per parameter: weight, 32-bit gradient, master copy, Adam's two moments
LAYER8 = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336  # weights of a layer: Llama Team 2024, table 3
LAYER70 = 2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672

# activation bytes of a layer per token and hidden element (Korthikanti et al. 2022, section 4.1): tensors with their
# bytes, first those inside the two regions, which tensor parallelism divides, then the others
INSIDE = {"q and k": 4, "v": 2, "input of the projection": 2, "input of GeLU": 8, "input of the second product": 8}
OUTSIDE = {"inputs of the regions": 2 + 2, "inputs of the norms": 2 + 2, "two dropout masks": 1 + 1}
LAYER_BYTES = sum(INSIDE.values()) + sum(OUTSIDE.values())


def flow(times: list[float], microbatches: int) -> float:
    """When the last backward of GPipe ends, place by place; a third of a stage's time is forward."""
    done = [0.0] * microbatches
    for share in (1 / 3, 2 / 3):
        start = max(done)
        done = [start] * microbatches
        for time in times if share < 0.5 else times[::-1]:
            free = start
            for microbatch in range(microbatches):
                free = done[microbatch] = max(done[microbatch], free) + share * time
    return max(done)


def interleaved_idle(ranks: int, microbatches: int, chunks: int) -> float:
    """Share of a rank's forward time in which it waits, chunk by chunk; backward is its mirror image."""
    done = {}
    free = [0] * ranks
    order = [
        (first + each, chunk)
        for first in range(0, microbatches, ranks)
        for chunk in range(chunks)
        for each in range(ranks)
    ]
    for microbatch, chunk in order:
        for rank in range(ranks):
            before = done.get((microbatch, chunk, rank - 1) if rank else (microbatch, chunk - 1, ranks - 1), 0)
            free[rank] = done[microbatch, chunk, rank] = max(free[rank], before) + 1
    return 1 - chunks * microbatches / max(free)


def fewest_microbatches(stages: int, share: float) -> int:
    return next(m for m in range(1, 999) if makespan(stages, m)[1] <= share * makespan(stages, m)[0])


def dropped(tokens: int, experts: int, capacity: float) -> float:
    """Expected share above the capacity, over a binomial load."""
    total = 0.0
    for load in range(math.floor(capacity) + 1, tokens + 1):
        ways = math.lgamma(tokens + 1) - math.lgamma(load + 1) - math.lgamma(tokens - load + 1)
        chance = math.exp(ways - load * math.log(experts) + (tokens - load) * math.log(1 - 1 / experts))
        total += chance * (load - capacity)
    return total * experts / tokens


def nodes_reached(experts: int, nodes: int, k: int) -> float:
    """By drawing: nodes on which k different experts lie."""
    draw, each = random.Random(0), experts // nodes
    return sum(len({expert // each for expert in draw.sample(range(experts), k)}) for _ in range(40_000)) / 40_000


def padding_waste() -> float:
    draw = random.Random(0)
    batches = [[draw.uniform(100, 1000) for _ in range(8)] for _ in range(40_000)]
    return 1 - sum(map(sum, batches)) / sum(8 * max(batch) for batch in batches)


def padded_samples(samples: int, ranks: int) -> int:
    return sum(len(list(DistributedSampler(range(samples), ranks, rank))) for rank in range(ranks))


def ulysses_over_ring(kv_heads: int, ranks: int = 8) -> float:
    """Elements per token: queries, keys, values and outputs once, less one's own part; keys and values N-1 times."""
    once = (64 + kv_heads + kv_heads + 64) * (ranks - 1) / ranks
    return once / ((ranks - 1) * (kv_heads + kv_heads))


def lost_update() -> float:
    """The largest share of a weight that bf16 rounds away, by trying."""
    one = torch.ones((), dtype=torch.bfloat16)
    return max(k / 1e5 for k in range(1, 2000) if (one.float() + k / 1e5).bfloat16() == one)


def bits(dtype: torch.dtype) -> int:
    """Of precision, with the leading one."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def least_power(dtype: torch.dtype) -> int:
    """The first power of two downwards that becomes zero."""
    return next(k for k in range(1, 40) if torch.tensor(2.0**-k).to(dtype) == 0)


MIXTRAL = 32 * (2 * 4096 * (4096 + 1024) + 4096 * 8) + 2 * 32000 * 4096, 32 * 3 * 4096 * 14336  # rest, an expert
ATTENTION_V3 = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
EXPERT_V3 = 3 * 7168 * 2048
REST_V3 = 61 * ATTENTION_V3 + 3 * 3 * 7168 * 18432 + 58 * (EXPERT_V3 + 7168 * 256) + 2 * 129280 * 7168
ACTIVE_V3, ALL_V3 = REST_V3 + 58 * 8 * EXPERT_V3, REST_V3 + 58 * 256 * EXPERT_V3
COMPRESSED = 10_000 // 100  # entries of a tensor of 10,000 that 1 % keeps

WORKED = {
    # memory
    "What does a training step hold": Worked((STATES * P8,)),
    "How many training FLOPs per token": Worked((6 * (32 * LAYER8 + 128256 * 4096),)),
    "What does full recomputation cost": Worked(((2 + 2 + 4) / (2 + 4),)),
    "Activation bytes of one GPT layer per token in": Worked((LAYER_BYTES, LAYER_BYTES * 12288), chosen=(12288,)),
    "Logits of 8,192 tokens": Worked((8192 * 128256 * 4,)),
    "bf16 or fp16": Worked(
        (-math.log2(torch.finfo(torch.half).smallest_normal), least_power(torch.half), bits(torch.bfloat16),
         bits(torch.half)), chosen=(2,)
    ),
    "Why do bf16 weights": Worked((lost_update(), bits(torch.bfloat16))),
    "Does mixed precision save": Worked((2 + 2 + 4 + 8, 4 + 4 + 8), chosen=(16, 32)),
    "How large is a 70B model in 16, 8": Worked((2 * P70, P70, P70 / 2, STATES * P70), chosen=(18,)),
    "Does gradient accumulation save": Worked((len(range(64)),), chosen=(64, 1)),
    "How large is Adam's state for a 7B": Worked((7e9 * (4 + 4), 7e9 * (1 + 1))),
    "A 13B model on one 80 GB card": Worked((STATES * 13e9, 2 * 13e9)),
    # data parallel
    "Ranks have 12 and 4": Worked((12 + 4, 0.5 / (4 / 16))),
    "How many bytes does a rank send per step for a 1B": Worked((4e9, 4e9 * ring(8)[0] / 840)),
    "A step takes 100 ms of backward": Worked((100 + 80,)),
    "What does no_sync save": Worked((4 / 1,)),
    "Which bytes per parameter": Worked((STATES, 2 + 2 + 4 + 8, 4 + 4 + 8), chosen=(2, 4, 8, 16)),
    "Bytes per rank of a 7B model's states": Worked(
        (7e9 * 2 + 7e9 * 4 + 7e9 * 12 / 64, 7e9 * 2 + 7e9 * 16 / 64, 7e9 * 18 / 64, 7e9 * 18, 40e9 - 7e9 * 18 / 64)
    ),
    "What is hybrid sharding": Worked((), chosen=(1, 8)),
    "Why may a gradient norm be wrong": Worked((math.dist([0] * 64, [1] * 64) / 1,), chosen=(64,)),
    "Why does accumulation hurt": Worked((), chosen=(4,)),
    "What does a DistributedSampler": Worked((padded_samples(10, 4),)),
    "Top-k compression": Worked(
        (63 * COMPRESSED * 8 / (ring(64, 64 * 625)[0]),
         next(n for n in range(2, 200) if (n - 1) * COMPRESSED * 8 >= 2 * 40_000 * (n - 1) / n)), chosen=(8, 32)
    ),
    "Offloading Adam to the host": Worked((7e9 + 7e9, 14e9 / 25e9), chosen=(2, 25e9)),
    "FSDP or tensor parallelism": Worked(
        (next(t for t in range(1, 99_999) if 4 * 2 * t * 4096 >= 3 * 12 * 4096**2),), chosen=(4096,)
    ),
    # data
    "What does packing save": Worked((padding_waste(),), chosen=(100, 1000, 8)),
    "How many tokens per second does a node": Worked(
        (8 * 400e12 / 6 / 8e9, 4 * 8 * 400e12 / 6 / 8e9), chosen=(6, 8e9, 4)
    ),
    "Step time with loading 30": Worked((30 + 100, 120 + 100)),
    "Bits per byte from a loss": Worked((math.log2(math.e) / 4,), chosen=(2,)),
    "How many bytes are 15 trillion": Worked((15e12 * 4, 15e12 * 2, 256 * 256), chosen=(4, 2)),
    "Chinchilla": Worked((70e9 * 20, 6 * 70e9 * 70e9 * 20), chosen=(20,)),
    # pipeline
    "What share of the step is bubble": Worked((makespan(4, 8)[1] / makespan(4, 8)[0],), chosen=(4, 8)),
    "How many microbatches keep the bubble": Worked(
        (fewest_microbatches(8, 0.25), next(m for m in range(1, 99) if 7 / (2 * m + 7) <= 0.25), 8 + 8)
    ),
    "What does interleaving with v chunks": Worked(
        (interleaved_idle(8, 8, 1), interleaved_idle(8, 8, 4)), chosen=(8, 4)
    ),
    "How many bytes move in a pipeline step": Worked(
        (sum(2 * 64 * 4096 * 4096 * 2 for border in range(8 - 1)),), chosen=(8, 64, 4096, 16)
    ),
    "Stages are uneven": Worked((flow([1, 1, 1, 1.5], 8), flow([4.5 / 4] * 4, 8))),
    "Why are the first and the last": Worked((126 + 1 + 1,)),
    "When do you choose pipeline over tensor": Worked((fewest_microbatches(16, 0.1),), chosen=(16, 0.1)),
    "16 stages, 16 microbatches: what do 8 chunks": Worked((interleaved_idle(16, 16, 1), interleaved_idle(16, 16, 8))),
    "Activations in flight of the first stage": Worked(
        # Megatron's warm-up of rank 0: 2(n-1) + (v-1)n forwards of half a stage, then one more before a backward
        (min(8 - 0, 999), (2 * 7 + 1 * 8 + 1) / 2)
    ),
    # tensor
    "How many all-reduces does a transformer": Worked((len(("attention", "MLP")) * len(("forward", "backward")),)),
    "Bytes per rank of those collectives": Worked((4 * 32 * ring(8)[0] / 840 * 8192 * 4096 * 2,)),
    "Why does tensor parallelism stay": Worked((450 / 50,)),
    "Activation bytes of one GPT layer per token under": Worked(
        (sum(OUTSIDE.values()) + sum(INSIDE.values()) / 8, LAYER_BYTES / 8, sum(OUTSIDE.values()), LAYER_BYTES,
         sum(INSIDE.values())), chosen=(16,)
    ),
    "8 kv heads on 16": Worked((16 / 8,)),
    "How does a vocabulary-parallel": Worked((len(("maximum", "sum", "target")), 3 * 4, 128256 * 4), chosen=(4,)),
    "Gathering logits for 8,192": Worked((7 / 8 * 8192 * 128256 * 4, 8192 * 3 * 4 * ring(8)[0] / 840)),
    "What happens to matmul efficiency": Worked((4096 / 8, 1 / (1 + 82 / 512))),  # 82: the planner's fitted constant
    "How many all-reduces does a decode step": Worked((80 + 80, 32 * 8192 * 2), chosen=(80, 32, 8192)),
    # long context and experts
    "From which length": Worked(
        tuple(math.ceil(2 * layer / (4 * width / 2)) for layer, width in ((LAYER8, 4096), (LAYER70, 8192)))
    ),
    "What does a contiguous cut": Worked((causal_shares(4, "contiguous")[0], causal_shares(4, "contiguous")[-1])),
    "Ring attention or Ulysses": Worked((16 / 8,)),
    "Bytes of keys and values of 1 million": Worked((1e6 * 2 * 8 * 128 * 2, 32 * 1e6 * 2 * 8 * 128 * 2), chosen=(32,)),
    "What does a mixture of experts": Worked(((MIXTRAL[0] + 8 * MIXTRAL[1]), (MIXTRAL[0] + 2 * MIXTRAL[1]) / 1e9)),
    "DeepSeek-V3: which share": Worked((ACTIVE_V3 / 1e9, ALL_V3, ACTIVE_V3 / ALL_V3)),
    "All-to-all bytes per rank": Worked((4096 * 8 * 7168 * 2 * 63 / 64,)),
    "Which bytes does latent": Worked((61 * (512 + 64) * 2, 61 * 128 * (128 + 128) * 2)),
    "Ring or Ulysses: bytes": Worked((ulysses_over_ring(64), ulysses_over_ring(8))),
    "Which share is dropped": Worked((dropped(64, 8, 8), dropped(64, 8, 10), dropped(4096, 8, 512))),
    "256 experts on 8 nodes": Worked((nodes_reached(256, 8, 8), 1 - nodes_reached(256, 8, 8) / 8)),
    "Batch of 16 tokens, top 2 of 8": Worked((8 - 8 * (6 / 8) ** 16,)),
}  # fmt: skip

COUNTS = {
    "Logits of 8,192": {16: "bits of a narrower type"},
    "Does 1F1B change": {64: "bits of a double"},
    "Packed documents": {0: "the first position"},
    "Gradient compression to int8": {32: "bits of a float"},
    "Why does the fullest expert": {1.5: "the load that the sentence supposes: the time is as much longer"},
    "Does mixed precision save": {8: "bits of a narrower moment"},
    "dp is 1 and cp is 8": {64: "bits of a double"},
    "Why does ZeRO-2 or 3 with": {32: "bits of a gradient"},
    "How does a vocabulary-parallel": {3: "numbers of the loss"},
    "How many microbatches keep": {4: "the rule that the card refuses, 4n"},
}
FACTS = {
    "Why buckets": {25e6: "torch's DistributedDataParallel, bucket_cap_mb=25"},
    "Why are the first and the last": {126: "Llama Team 2024, table 3"},
    "256 experts on 8 nodes": {4: "DeepSeek-AI 2024, section 2.1.2: at most 4 nodes per token"},
    "Chinchilla": {20: "Hoffmann et al. 2022, table 3: 1.4 trillion tokens for 67 billion parameters"},
}
