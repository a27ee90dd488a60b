"""Numbers of lab 20's model answers, computed a second time: sizes from data sheets and papers, the rest by hand.

COMPUTED: problem, name of the number in its texts, what it should be (one value for each number of the string). A
sentence instead of a value says where the number is tested, if it is the planner's and no short formula gives it; that
such numbers agree with each other is in test_answer_numbers.py. LITERAL: numbers that texts hold as they are.
"""

import math

from card_formulas import best_interval

GIB, DAY = 2**30, 86400
PEAK, A100_PEAK = 989e12, 312e12  # FLOP/s in 16 bits, dense: NVIDIA's data sheets
MTBF = 54 * DAY / 419  # Llama Team 2024, section 3.3.4
H100_USABLE = (80 - 3) * 0.95  # GiB: 3 reserved, 5 % lost, as the texts suppose

# weights of a layer and of a table (vocabulary · hidden): Llama Team 2024, table 3; Touvron et al. 2023; Brown et al.
# 2020
LAYER70, TABLE70 = 2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672, 128256 * 8192
LAYER405, TABLE405 = 2 * 16384 * (16384 + 1024) + 3 * 16384 * 53248, 128256 * 16384
LAYER7, TABLE7 = 4 * 4096 * 4096 + 3 * 4096 * 11008, 32000 * 4096
LAYER175, TABLE175 = 12 * 12288 * 12288, 51200 * 12288
P70, P405, P7 = 80 * LAYER70 + 2 * TABLE70, 126 * LAYER405 + 2 * TABLE405, 32 * LAYER7 + 2 * TABLE7

# bytes that a layer keeps per token: the norms' inputs and outputs, queries, keys, values, attention's output, and the
# three wide tensors of a gated MLP, 2 bytes each
KEPT70 = 2 * (4 * 8192 + 2 * 8192 + 2 * 1024 + 3 * 28672)
KEPT405 = 2 * (4 * 16384 + 2 * 16384 + 2 * 1024 + 3 * 53248)
KEPT7 = 2 * (4 * 4096 + 4 * 4096 + 3 * 11008)
STAGE70 = 40 * LAYER70 + TABLE70  # half of the model with the embedding
STAGE405 = 7 * LAYER405 + TABLE405  # the first of 16 stages: 126 layers on 128 places
STAGE175 = 6 * LAYER175 + TABLE175


def seven(states: float, layers: float, gathered: float = 0.0) -> float:
    """GiB of 7B on one of 8: bytes per parameter, activations, logits with gradient, gathered layers of ZeRO-3."""
    return (states * P7 + layers + 4096 * 32000 * 6 + gathered) / GIB


ACTIVATIONS7 = 32 * 4096 * KEPT7
RECOMPUTED7 = 32 * 4096 * 4096 * 2 + 4096 * KEPT7  # inputs of all layers, and one layer whole
FLAT70 = 18 * P70 / 64 + 80 * 8192 * 8192 * 2 + 8192 * KEPT70 + 8192 * 128256 * 6 + 2 * P70 / 80 * 6
# of TP 8, PP 2, DP 4: ZeRO-1 over 4; two microbatches in flight; four messages
QUOTED70 = STAGE70 / 8 * (6 + 12 / 4) + 2 * 40 * 8192 * KEPT70 / 8 + 4 * 8192 * 8192 * 2 / 8
# of DP 2, TP 4, CP 4, PP 2, chunks 20: ZeRO-1 over 8, 2,048 tokens; (19 · 2 + 2 + 1) chunks in flight of 20
BEST70_ACTIVATIONS = (19 * 2 + 2 + 1) / 20 * 40 * 2048 * KEPT70 / 4
BEST70 = STAGE70 / 4 * (6 + 12 / 8) + BEST70_ACTIVATIONS + 4 * 2048 * 8192 * 2 / 4
FLOPS70 = 6 * (P70 - TABLE70) + 3 * 80 * 4 * 8192 * 8193 / 2  # of a token, causal attention over 8,192
FLOPS405 = 6 * (P405 - TABLE405) + 3 * 126 * 4 * 16384 * 8193 / 2
RUN405 = 15.6e12 * FLOPS405
HOURS405 = RUN405 / (0.41 * PEAK) / 3600
STATES405 = STAGE405 / 8 * (2 + 16 / 128)
HELD405 = STATES405 + 16 * 7 * 8192 * KEPT405 / 8 + 4 * 8192 * 16384 * 2 / 8
# GPT-3: states of a stage over TP 8, the inputs of 6 layers for 16 microbatches, one layer whole, messages
WHOLE175 = 2048 * 2 * (4 * 12288 + (4 * 12288 + 2 * 4 * 12288) / 8)
HELD175 = STAGE175 / 8 * 18 + 16 * 6 * 2048 * 12288 * 2 + WHOLE175 + 4 * 2048 * 12288 * 2
LORA70 = 80 * 16 * ((8192 + 8192) * 2 + (8192 + 1024) * 2 + (8192 + 28672) * 3)
PLANNER = "tests/engine/predict/planner: the planner's step and search"


def ring_seconds(ranks: int, latency: float, rate: float) -> float:
    """Of the 4 all-reduces of 32 layers of 8B on 16 microbatches of 4,096 tokens, at 80 % of the rate."""
    rounds, size = 2 * (ranks - 1), 4096 * 4096 * 2
    return 4 * 32 * 16 * rounds * (latency + size / ranks / (0.8 * rate))


def useful_share(every: float) -> float:
    """Failures strike a piece of `every` and its save, exponentially; each costs what was done of it and a restart,
    which others strike in turn. Their mean numbers follow from the chance to get through."""
    piece = every + 30
    failures = 1 / math.exp(-piece / MTBF) - 1
    done = sum(t * math.exp(-t / MTBF) for t in range(round(piece))) / sum(
        math.exp(-t / MTBF) for t in range(round(piece))
    )
    again = 1 / math.exp(-600 / MTBF) - 1
    done_of_restart = sum(t * math.exp(-t / MTBF) for t in range(600)) / sum(math.exp(-t / MTBF) for t in range(600))
    return every / (piece + failures * (done + 600 + again * done_of_restart))


BEST = best_interval(30, MTBF)


def lost(every: float) -> float:
    return 30 / every + (every / 2 + 600) / MTBF


COMPUTED = {
    "seventy_on_64": {
        "why": "words for the layout",
        "low": 0.38, "high": 0.53,  # Llama Team 2024, table 4: 128k tokens; NVIDIA NeMo 405B on 576 GPUs
        "careful": 15e12 * FLOPS70 / (64 * PEAK * 0.38) / DAY,
        "recipe": 128 * 8192 * FLOPS70 / (64 * PEAK * 14.72),  # NVIDIA: 14.72 s for 128 sequences
        "states": 18 * P70, "room": 64 * 80 * GIB, "share": 18 * P70 / 64,
        "best": (64, 512), "seconds": PLANNER, "mfu": PLANNER, "days": PLANNER, "tokens": PLANNER, "gpus": PLANNER,
        "held": BEST70 / GIB, "activations": BEST70_ACTIVATIONS / GIB, "flat": FLAT70 / GIB, "flat_seconds": PLANNER,
        "usable": H100_USABLE, "quoted_recompute": "a word", "quoted_held": QUOTED70 / GIB, "quoted_seconds": PLANNER,
        "quoted_weights": 2 * 70e9 / 16, "quoted_third": 2 * 70e9 / 64,
    },
    "seven_on_8": {
        "states": 18 * P7 / GIB, "replica": seven(18, ACTIVATIONS7), "usable": (40 - 3) * 0.95, "lowest": 3,
        "held": seven(18 / 8, ACTIVATIONS7, 2 * P7 / 32 * 6), "two_full": seven(2 + 16 / 8, RECOMPUTED7),
        "zero1": seven(6 + 12 / 8, ACTIVATIONS7), "zero2": seven(2 + 16 / 8, ACTIVATIONS7),
        "zero3": seven(18 / 8, ACTIVATIONS7, 2 * P7 / 32 * 6), "best": (8, 64), "mfu": PLANNER,
        "low": 0.407, "high": 0.563,  # MegaScale on 12,288 (Jiang et al. 2024), 1T of Korthikanti et al. 2022
    },
    "four_hundred_on_16k": {
        "layout": (16384, 2048), "bubble": 15 / (8 * 16 + 15), "plain": 15 / 31, "mfu": PLANNER,
        "reported": 0.41, "first": 0.43, "long": 16, "long_reported": 0.38,  # Llama Team 2024, table 4
        "first_batch": 2048 / (8192 / 128), "batch": 2048 / 128, "long_mfu": PLANNER, "usable": H100_USABLE,
        "tp8": 450e9 * 0.8, "tp16": min(450e9, 8 * 50e9) * 0.8, "held": HELD405 / GIB, "states": STATES405 / GIB,
        "activations": 16 * 7 * 8192 * KEPT405 / 8 / GIB, "seconds": PLANNER, "tokens": PLANNER,
    },
    "gpt3_on_1024": {
        "layout": (1024, 1536), "days": PLANNER, "hfu": PLANNER, "mfu": PLANNER, "tp": PLANNER,
        "reported": 140 / 312,  # Narayanan et al. 2021, table 1 and section 5.1: 140 TFLOP/s
        "bubble": PLANNER, "held": HELD175 / GIB, "usable": H100_USABLE,
    },
    "fine_tune_on_a_node": {
        "states": 18 * P70, "room": 8 * H100_USABLE * GIB, "weights": 2 * P70, "each": 2 * P70 / 8,
        "four": P70 / 2 / 8, "adapters": LORA70, "share": LORA70 / P70, "adapter_states": 18 * LORA70,
        "usable": H100_USABLE * GIB,
    },
    "slower_on_two_nodes": {
        "one": PLANNER, "two": PLANNER, "grew": PLANNER, "moved": PLANNER, "exposed": PLANNER, "overlapped": PLANNER,
        "ratio": 300 / (8 * 100 / 8),
        "tp": ring_seconds(16, 25e-6, 8 * 12.5e9), "tp_one": ring_seconds(8, 8e-6, 300e9) * 1e3,
    },
    "checkpoint_interval": {
        "mtbf": MTBF / 3600, "device": MTBF * 16384 / DAY / 365, "best": BEST / 60, "hourly": lost(3600),
        "least": lost(BEST), "restart": 600 / MTBF, "exact": 1 - useful_share(BEST), "small": MTBF * 256 / DAY,
        "small_best": best_interval(30, 256 * MTBF) / 3600,
    },
    "a_hang": {"lost": 16384 * 600 / 3600, "share": 600 / MTBF},
    "a_straggler": {"lost": 1 - 1 / 1.2, "gpus": 1024 * 0.2 / 1.2, "pays": 600 * 1.2 / 0.2 / 60},
    "a_loss_spike": {  # Chowdhery et al. 2022, section 5.1: about 100 steps back, 200 to 500 batches skipped
        "lost": 16384 * 100 * 7 / 3600, "seconds": 7, "back": 100, "skipped": 200,
    },
    "starving_input": {"speed": PLANNER, "workers": PLANNER, "text": PLANNER, "stored": PLANNER},
    "scaling": {
        "strong": PLANNER, "weak": PLANNER, "each": 256 / 1024, "worth": PLANNER, "idle": PLANNER,
        "before": 0.43, "after": 0.41,
    },
    "money_and_energy": {
        "flops": RUN405, "days": HOURS405 / 16384 / 24, "hours": HOURS405, "money": 2 * HOURS405,
        "energy": HOURS405 * 0.7 * 1.1 / 1e6, "percent": 2 * HOURS405 / 100,
        "with_failures": HOURS405 / 16384 / 24 / 0.9,        "published": 30.84e6,
        "off": 1 - HOURS405 / 30.84e6, "peak": HOURS405 / 16384 / 24 * 0.41, "pue": 1.5 / 1.1 - 1,
    },
}  # fmt: skip

LITERAL = {
    "seventy_on_64": [2 * 70e9, 2 * 70e9 / 64, 90, 32768, 18, 2, 4, 8, 16, 6, 0.50, 40, 32, P70, 64 * PEAK, 2025],
    "seven_on_8": [2 * 7e9, 18, P7],
    "four_hundred_on_16k": [2, 15, 1, 405e9],
    "gpt3_on_1024": [
        6, 8, 300e9, 0.45, 175e9, A100_PEAK, 300e9 * 175e9 * 8 / (1024 * 140e12) / DAY, 104_529, 0.30,
        6 / 8 * 140 / 312,  # the published run's useful share
    ],
    "fine_tune_on_a_node": [640, 2 * 70e9, 12, 16, 16 * P70 - 8 * H100_USABLE * GIB, 4, 128, 1024, 8192, 3, 80],
    "slower_on_two_nodes": [2 * (16 - 1), 2 * (8 - 1), 1.0, 12.5e9, 300e9],
    "checkpoint_interval": [0.90, 1000, 2, DAY, MTBF, 64],
    "a_hang": [6],
    "a_straggler": [1, 1.2],
    "a_loss_spike": [],
    "starving_input": [8],
    "scaling": [8, 128, 512, 8192, 16384, 2025],
    "money_and_energy": [6, 0.90, PEAK, 1.5, RUN405 / (15.6e12 * 6 * (P405 - TABLE405)) - 1, 8192, 3.8e25],
}  # fmt: skip
