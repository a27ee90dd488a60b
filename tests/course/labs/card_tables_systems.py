"""Numbers of the cards on hardware, collectives, faults and planning, computed a second time."""

import itertools
import math

from card_formulas import best_interval, doubling_rounds, makespan, ring, two_level_rounds
from card_numbers import Worked
from card_tables_training import interleaved_idle

P8, P70 = 8.03e9, 70.55e9  # parameters of Llama 3 8B and 70B: their model cards
PEAK, MEMORY, LINK, PORT = 989e12, 3.35e12, 450e9, 50e9  # an H100: NVIDIA's data sheet; a 400 Gb/s port
A100 = 312e12 / 2.039e12  # NVIDIA's data sheet of the 80 GB SXM
MTBF = 54 * 86400 / 419  # Llama Team 2024, section 3.3.4
LAYER7 = 4 * 4096 * 4096 + 3 * 4096 * 11008  # weights of a layer of Llama 2 7B: its config.json


def ring_beats_tree(ranks: int, latency: float, bandwidth: float) -> int:
    """The least message, in kB, that a ring moves sooner than a binomial reduction and broadcast."""
    rounds = doubling_rounds(ranks)

    def of_ring(size: float) -> float:
        return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)

    def of_tree(size: float) -> float:
        return 2 * rounds * (latency + size / bandwidth)

    return next(kb for kb in range(1, 9999) if of_ring(1e3 * kb) <= of_tree(1e3 * kb))


def lost(save: float, restart: float, mtbf: float) -> float:
    every = best_interval(save, mtbf)
    return save / every + every / 2 / mtbf + restart / mtbf


def useful(gpus: int) -> float:
    """Share of the time that is useful at the best interval, found by trying. Failures are exponential and strike
    restarts, too (Daly 2006, equation 13)."""
    mtbf = MTBF * 16384 / gpus
    per_interval = {t: mtbf * math.exp(600 / mtbf) * math.expm1((t + 30) / mtbf) for t in range(10, 6000, 5)}
    return max(t / took for t, took in per_interval.items())


def longest_save(share: float, mtbf: float) -> float:
    """Seconds of a save at whose best interval saves and repeated work cost that share, by halving an interval."""
    low, high = 0.01, 60.0
    for _ in range(20):
        save = (low + high) / 2
        every = best_interval(save, mtbf)
        low, high = (save, high) if save / every + every / 2 / mtbf < share else (low, save)
    return low


MESH = list(itertools.product(range(2), range(4), range(4)))  # pp, dp, tp: rank by rank
OF_21 = MESH[21]
DP_OF_21 = [rank for rank, (pp, _, tp) in enumerate(MESH) if (pp, tp) == (OF_21[0], OF_21[2])]
FULL = 12 + 2  # bytes per parameter of a checkpoint: master and moments, and 16-bit weights

WORKED = {
    # collectives
    "How many bytes does each rank send in a ring all-reduce of P": Worked((1e9 * ring(8)[0] / 840,), chosen=(1e9, 8)),
    "What is a reduce-scatter": Worked((1e9 * ring(8)[0] / 840 / 2,), chosen=(1e9, 8)),
    "How many rounds does a ring all-reduce take on 16": Worked((ring(16)[1], doubling_rounds(16))),
    "When does a tree beat a ring": Worked((1e3 * ring_beats_tree(8, 20e-6, 10e9),), chosen=(20, 10e9, 8)),
    "Why is a parameter server slower": Worked((2 * 63 / (2 * 2 * 63 / 64),), chosen=(64,)),
    "A two-level all-reduce on 16 nodes of 8": Worked((two_level_rounds(16, 8), ring(128)[1])),
    "What crosses a node in a two-level": Worked((ring(8)[0] / 840, ring(64, 6400)[0] / 6400), chosen=(64,)),
    "What does in-network reduction": Worked((ring(64, 6400)[0] / 6400,), chosen=(64,)),
    "What is bus bandwidth": Worked((ring(8)[0] / 840,), chosen=(8,)),
    "What is a process group": Worked(
        (len({rank % 2 for rank in range(8)}), len({rank // 2 for rank in range(8)}), *range(0, 8, 2), 1), chosen=(4, 2)
    ),
    "What is wrong with gloo's": Worked((ring(8)[0] / (ring(8)[0] / 2),)),
    # kernels
    "What does fusing relu": Worked((len("xbtty") / len("xby"), len("xtty") / len("xy"))),
    "Why does a decode step want": Worked((1 + 3 + 8 + 2 + 2 + 1 + 1 + 1 + 2 + 2 + 1 + 1, 25 - 2 - 7 - 1 - 1)),
    "How do you choose the tile": Worked((4096 / 32 / (4096 / 128),)),
    # hardware
    "What are the three numbers that bound": Worked((PEAK, MEMORY, LINK, 900 / 300, 8000 / 2039, 2250 / 312)),
    "What is arithmetic intensity": Worked((PEAK / MEMORY, 2 / 2)),
    "How many FLOPs does a matmul": Worked((sum(2 * 4096 for _ in range(1024)) * 4096,), chosen=(1024, 4096)),
    "A vector of 1 token": Worked((2 * 4096**2 / (2 * 4096**2), PEAK / MEMORY), chosen=(2,)),
    "How many tokens must share": Worked((A100,)),
    "How much slower is a 400 Gb/s": Worked((400e9 / 8, MEMORY, MEMORY / (400e9 / 8), LINK, LINK / (400e9 / 8))),
    "Bits or bytes": Worked((100e9 / 8, 10e9 / (100e9 / 8))),
    "Latency 20 µs, bandwidth 50 GB/s": Worked((20e-6 * 50e9,)),
    "How much memory does an H100": Worked((1024**3 / 1e9 - 1,), chosen=(2, 30)),
    "What is the difference between MFU": Worked(((6 + 2) / 6,)),
    "Eight GPUs of a node": Worked((sum(50e9 for card in range(8)), PORT, 50), chosen=(8,)),
    "What does fusing an addition": Worked((5 / 3, len("aby") + len("yz"), len("abz"))),
    "How long does an H100 need": Worked((2 * P8, MEMORY, 2 * P8 / MEMORY * 1e3)),
    "How much energy": Worked((30e6 * 0.7 * 1.1 / 1e6, 30e6 * 0.7 * 1.1 / 1e6 / 40)),
    # faults
    "How large is a full checkpoint of a 70B": Worked(((4 + 8) * P70, 2 * P70, 12, 12 * P70 / 10e9), chosen=(16,)),
    "What is Young's interval": Worked((best_interval(30, 3 * 3600) / 60,), chosen=(30, 3)),
    "Meta reports 419 unexpected": Worked((MTBF / 3600, MTBF * 16384 / 86400 / 365, MTBF * 16 / 3600)),
    "Save 30 s, restart 10 minutes": Worked((lost(30, 600, 10800), 600 / 10800)),
    "What does an asynchronous save": Worked(
        (FULL * P70 / 64, FULL * P70 / 64 / 25e9), chosen=(64, 25e9)
    ),
    "What does a ten-minute timeout": Worked((16384 * 600 / 3600,)),
    "Saves of 30 s and restarts of 10 minutes": Worked((useful(16384), useful(131072))),
    "Which bandwidth does storage need": Worked(
        (FULL * 70e9, longest_save(0.02, 10800), FULL * 70e9 / longest_save(0.02, 10800))
    ),
    # planning
    "States of a 70B model at 18": Worked((18 * P70, 18 * P70 / 64, (80e9 * 0.95 - 18 * P70 / 64)), (80e9, 0.05)),
    "Days for 1 trillion tokens of a 7B": Worked(
        (6 * 7e9 * 1e12 / (64 * PEAK * 0.4) / 86400, 32768 * 4 * 4096 / 2 / (2 * LAYER7)), chosen=(6, 7e9, 989e12)
    ),
    "A pipeline of 16 stages, 2 microbatches": Worked(
        (16 * 2, makespan(16, 32)[1] / makespan(16, 32)[0], interleaved_idle(16, 32, 4)), chosen=(4,)
    ),
    "Fine-tune 70B fully on 8": Worked((18 * P70, 8 * 80e9)),
    "Rank 21 of a mesh": Worked((*OF_21, *DP_OF_21), chosen=(16,)),
    "Tensor parallelism over 8 GPUs in one node": Worked((450, 450 / 50)),
    "A 70B model, 64 GPUs, TP 8, PP 2": Worked(
        (2 * P70 / 16, 2 * P70, ring(64, 6400)[0] / 6400 / (ring(4)[0] / 840 / 16))
    ),
    "Why is ZeRO-1 the usual companion": Worked((len(("forward", "backward")) * 16,), chosen=(16,)),
    "A Slurm job has 4 nodes": Worked((len(list(itertools.product(range(4), range(8)))),)),
    # quantization
    "Training with matrix products in 8 bits": Worked((128 * 8192 / 9.67 / (128 * 8192 / 12.91),)),
}  # fmt: skip

COUNTS = {
    "Which axis takes which link": {8: "GPUs of an ordinary node"},
    "How do you prove that a parallel": {64: "bits of a double", 1e-10: "a tolerance above its rounding errors"},
    "A bug appears at 512": {1: "the size of an axis that is off", 2: "the least size that is on"},
    "Why is GPU utilisation": {16: "bits of the peak's numbers"},
}
FACTS = {
    "How much memory does an H100": {80e9: "NVIDIA's data sheet of the H100 SXM"},
    "Which MFU do large published": {
        0.41: "Llama Team 2024, table 4", 16384: "Llama Team 2024, table 4",
        0.54: "Korthikanti et al. 2022, section 6.3: 54.2 %", 2240: "Korthikanti et al. 2022, section 6.3",
        0.38: "Llama Team 2024, table 4: 128k tokens", 0.56: "Korthikanti et al. 2022, table 5: 1T, 56.3 %",
    },
    "How close do formulas come": {
        0.0142: "python -m minillm plan --published", 0.0045: "python -m minillm plan --published",
        280: "Korthikanti et al. 2022, table 3", 64: "NVIDIA NeMo, performance summary",
    },
    "Training with matrix products in 8 bits": {
        12.91: "NVIDIA NeMo, performance summary: BF16", 9.67: "NVIDIA NeMo, performance summary: FP8",
    },
}  # fmt: skip
