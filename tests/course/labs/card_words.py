"""Shares and multiples that cards say in words, each with its value and the same by another computation.

An entry that is a sentence instead names a word that is no quantity of the card.
"""

import itertools
import re

from card_formulas import zero_traffic

WORD = re.compile(
    r"\b(twice|half|halves|quarters?|thirds?|fifths?|eighths?|sixteenths?|fortieth|tenth|hundredths?|"
    r"(?:two|three|four|five|six|seven|eight|nine|ten|hundred|thousand) times)\b",
    re.IGNORECASE,
)


def nucleus(shares: list[float], p: float) -> int:
    """Fewest tokens, likeliest first, that reach p."""
    sums = itertools.accumulate(sorted(shares, reverse=True))
    return next(count for count, reached in enumerate(sums, 1) if reached >= p - 1e-12)


SAYS_HOW_OFTEN = "how often something is done, as its sentence lists"

IN_WORDS = {
    "Static batches of 8 with exponential": {"between 0 and twice the mean": (2, 1 / 0.5)},
    "Preempt by recomputation": {"over the host link twice": SAYS_HOW_OFTEN},
    "How do you give paying": {"may be a thousand times another": "a possibility: 1 token, or 1,000"},
    "How many bytes does each rank send in a ring all-reduce of P": {
        "tends to twice P": (2, 2 * 9999 / 10000),
        "twice round the ring": SAYS_HOW_OFTEN,
    },
    "What is a reduce-scatter": {"half of an all-reduce": (1 / 2, (7 / 8) / (14 / 8))},
    "What crosses a node": {"nine times as fast": (9, 450 / 50)},
    "What does each stage of ZeRO": {"half as much again": (1.5, zero_traffic(3, 1) / zero_traffic(0, 1))},
    "Bytes per rank of a 7B": {"half as much again": (1.5, zero_traffic(3, 1) / zero_traffic(0, 1))},
    "Bits or bytes": {"eight times too optimistic": (8, 8 / 1)},
    "Why does accumulation hurt": {"gathers the weights twice": SAYS_HOW_OFTEN},
    "What is hybrid sharding": {"eighths instead of hundredths": "the size of a node and of a job of hundreds"},
    "What does a DistributedSampler": {
        "two samples are seen twice": (2, 3 * 4 - 10),
        "count twice": SAYS_HOW_OFTEN,
    },
    "Gradient compression to int8": {"A quarter of 32-bit bytes": (1 / 4, 8 / 32)},
    "Why is the global batch": {"accumulation halves": "an example of a change"},
    "How many bytes per token does the cache": {"an eighth of what": (1 / 8, 8 / 64)},
    "At which batch do caches": {
        "keeps a quarter of the heads": (1 / 4, 8 / 32),
        "a quarter as many sequences": (1 / 4, 1 / (32 / 8)),
    },
    "What is top-p": {"Two: 0.5 and 0.3": (2, nucleus([0.5, 0.3, 0.2], 0.8))},
    "How many sequences of 8,192": {
        "Twice as many": (2, (72e9 - 2 * 8.03e9) // (8192 * 32 * 8 * 128 * 2) / 52),
    },
    "What is Young's interval": {"half an interval": (0.5, sum(k / 1000 for k in range(1001)) / 1001)},
    "Meta reports 419": {"a sixteenth of the GPUs fails a sixteenth as often": (1 / 16, 1024 / 16384)},
    "Saves of 30 s and restarts": {"eight times as often": (8, 131072 / 16384)},
    "How many tokens must share": {
        "Half as many": (1 / 2, 8 / 16),
        "half the bytes": (1 / 2, 8 / 16),
        "with two thirds of it the ridge lies at two thirds": (2 / 3, 2 / 3 * 312 / 2.039 / (312 / 2.039)),
    },
    "Why is GPU utilisation": {  # Llama Team 2024, table 4: 38 to 43 %; Korthikanti et al. 2022: to 56.3 %
        "Two fifths": (0.4, 0.4),
        "somewhat more than half": "56.3 % is the most that a table here has",
    },
    "Why does a large matmul": {  # minillm.predict.planner.clusters: fitted
        "three fifths of the peak on H100": (0.6, 0.59),
        "three quarters on A100": (0.75, 0.741),
    },
    "How much energy": {"a fortieth of it, if MFU is two fifths": (1 / 40, 0.01 / 0.4)},
    "Why does memory reported": {"A tenth or so": "a rule of thumb; the planner's reserve is of this size"},
    "What does torch's CPU offload": {"must cross twice": SAYS_HOW_OFTEN},
    "How many microbatches keep": {"Half as many": (1 / 2, 10.5 / 21)},
    "What is the idea of zero-bubble": {
        # of each stage in front F + B - W are left of F + B + W
        "With equal thirds the bubble falls to a third": (
            1 / 3,
            (1 + 1 - 1) / (1 + 1 + 1),
        ),
        "up to twice as many": (2, (2 * 8 - 1) / 8 + 1 / 8),  # 2n - 1 against n (Qi et al. 2023, ZB-H2), n = 8
    },
    "Fine-tune 70B fully on 8": {"twice the node": (2, 18 * 70.55e9 / 640e9)},
    "A 70B model, 64 GPUs": {"Twice the bytes": (2, 32 / 16)},
    "Name the axis": {"twice per layer": SAYS_HOW_OFTEN},
    "You double the GPUs": {"half as many microbatches": (1 / 2, 8 / 16)},
    "What does 4-bit weight-only": {"at twice the rate": (2, 1979 / 989)},  # H100: dense INT8 TOPS against bf16
    "What does an 8-bit cache buy": {"Twice the tokens": (2, 16 / 8), "half the reads": (1 / 2, 8 / 16)},
    "What does LoRA save": {"About a third": (1 / 3, 2 / (2 + 2 + 2))},
    "Why must stop strings": {"half a UTF-8 character": "a character that is not whole"},
    "What does sequence parallelism change": {"a quarter more": (1.25, (4 * 2 + 2) / (4 * 2))},
}
