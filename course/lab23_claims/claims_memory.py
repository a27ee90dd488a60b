"""Statements about what training holds: states, precision, activations, recomputation."""

import torch

from course.kit.receipts import Row, formula, row
from course.shared.statement import at, claim, computed
from minillm.model import ModelConfig
from minillm.predict.model import ADAM_FP32, ADAM_MIXED, ADAM_MIXED_FP32_GRADIENTS, training_flops
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import memory

MEGATRON = "Narayanan et al. 2021: https://arxiv.org/abs/2104.04473"
ZERO = "Rajbhandari et al. 2020: https://arxiv.org/abs/1910.02054"


@claim(
    "memory",
    "With TP 8, PP 2 and ZeRO-1 over 4 replicas a 70B model holds 8.75 GB of 16-bit weights per GPU.",
    "true",
    "140 GB over 16 ranks: stage 1 divides the optimizer's states among the replicas, and no weights.",
    "with stage 3 the replicas divide them too, and 2.19 GB are left",
    at(ZERO, "section 5.1"),
)
def zero_one_keeps_eight_gigabytes() -> list[Row]:
    own = 70e9 / 16
    held = {stage: ADAM_MIXED.parameter * own / (4 if stage == 3 else 1) for stage in (1, 3)}
    everything = {stage: ADAM_MIXED.per_rank(int(own), 4, stage) for stage in (1, 3)}
    return [
        computed("weights per GPU, stage 1", 8.75e9, held[1], "B"),
        computed("weights per GPU, stage 3", 140e9 / 64, held[3], "B"),
        formula("all states (16 bytes per parameter), stage 1", everything[1], "B"),
        formula("    stage 3", everything[3], "B"),
    ]


@claim(
    "memory",
    "A 7B model takes 14 GB, so it can be trained on one card of 24 GB.",
    "false",
    "Training holds gradients, a master copy and two moments besides the 16-bit weights.",
    "with frozen weights and small adapters, or with gradients of low rank (GaLore 2024, "
    "https://arxiv.org/abs/2403.03507)",
    at(ZERO, "section 3.1"),
)
def seven_billion_in_fourteen() -> list[Row]:
    held = ADAM_MIXED.total * 7e9
    return [formula("weights in 16 bits", 14e9, "B"), computed("all states: more than 24 GB", 112e9, held, "B")]


@claim(
    "memory",
    "Mixed precision halves the memory of the model's states.",
    "false",
    "2 + 2 + 4 + 8 bytes are as many as 4 + 4 + 8. What it saves is activations and time.",
    "pure 16-bit states, which need stochastic rounding to go on learning",
    "Micikevicius et al. 2018, section 3.1: https://arxiv.org/abs/1710.03740",
)
def mixed_precision_halves_states() -> list[Row]:
    return [computed("bytes per parameter, mixed against 32 bits", ADAM_FP32.total, ADAM_MIXED.total, "B")]


@claim(
    "memory",
    "Adam in 32 bits costs 8 bytes per parameter on top of 16-bit weights.",
    "false",
    "The 8 are the moments; the 32-bit master copy belongs to the optimizer too.",
    "with 32-bit weights, which are their own master copy",
    at(ZERO, "section 3.1"),
)
def adam_costs_eight() -> list[Row]:
    beside = ADAM_MIXED.master + ADAM_MIXED.moments
    total = ADAM_MIXED.total * 70e9
    return [
        computed("bytes per parameter beside weights and gradients", 12, beside, "B"),
        formula("70B, all states", total, "B"),
    ]


@claim(
    "memory",
    "bf16 weights need no master copy, because bf16 has the range of fp32.",
    "false",
    "Range is not precision: an update below 1/512 (0.2 %) of a weight is always rounded away, "
    "and one below 1/256 (0.4 %) often.",
    "with stochastic rounding, or updates that are large against the weights",
    "Kalamkar et al. 2019: https://arxiv.org/abs/1905.12322",
)
def bf16_needs_no_master() -> list[Row]:
    narrow, wide = torch.ones((), dtype=torch.bfloat16), torch.ones(())
    for _ in range(1000):
        narrow, wide = narrow + 1e-3, wide + 1e-3
    return [
        row("1 + 1,000 updates of 0.001 in 32 bits", 2.0, wide.item(), tolerance=1e-3),
        row("the same in bf16 has moved", False, narrow.item() != 1.0),
    ]


@claim(
    "memory",
    "fp16 training needs loss scaling.",
    "depends",
    "Gradients below 3e-8 become zero; scaling by 2^16 lifts them. Where gradients are larger nothing is lost: "
    "some networks of the paper itself trained without.",
    "small gradients, as large language models have; bf16, which has the range of fp32, needs none",
    "Micikevicius et al. 2018, section 3.2: https://arxiv.org/abs/1710.03740",
)
def fp16_needs_scaling() -> list[Row]:
    def lost(smallest: int, dtype: torch.dtype, scale: float = 1.0) -> float:
        """Share of gradients from 10^smallest to 0.01 that become zero."""
        gradients = 10 ** torch.linspace(smallest, -2, 1000)
        return ((gradients * scale).to(dtype) == 0).float().mean().item()

    return [
        row("gradients from 1e-12: some vanish in fp16", True, lost(-12, torch.half) > 0.3),
        row("    share that vanishes", None, lost(-12, torch.half)),
        row("    scaled by 2^16", 0.0, lost(-12, torch.half, 2**16)),
        row("    in bf16", 0.0, lost(-12, torch.bfloat16)),
        row("gradients from 1e-6: share that vanishes in fp16", 0.0, lost(-6, torch.half)),
    ]


@claim(
    "memory",
    "Recomputing all activations costs a third more FLOPs.",
    "true",
    "One forward pass more on top of a forward and a backward of twice its size; a little less, since the last matrix "
    "product, the head, is not computed again.",
    "selective recomputation costs far less; torch stops early when the last needed tensor is back",
    "Chen et al. 2016: https://arxiv.org/abs/1604.06174",
)
def recomputation_costs_a_third() -> list[Row]:
    def more(vocab: int, *widths: int) -> float:
        plain, again = (training_flops(ModelConfig(vocab, *widths), 1, recompute=each).total for each in (False, True))
        return again / plain

    return [
        computed(
            "FLOPs with full recomputation / without, almost no head",
            4 / 3,
            more(8, 512, 2048, 8, 8),
            tolerance=0.01,
        ),
        computed("    with the shape of Llama 3 8B", 1.312, more(128256, 4096, 14336, 32, 32), tolerance=0.001),
    ]


@claim(
    "memory",
    "Pipeline parallelism divides the activation memory of every rank by the number of stages.",
    "false",
    "The first stage has 1/n of the layers and n microbatches in flight.",
    "never for every rank; the last stage alone holds one microbatch only",
    at(MEGATRON, "section 2.2.1"),
)
def pipeline_divides_activations() -> list[Row]:
    model = architecture("llama-3-70b")
    alone = memory(model, Layout(), 8192).activations
    first = memory(model, Layout(pp=8, microbatches=64), 8192).activations
    return [computed("activations of stage 0 of 8 / of one device", 1.0, first / alone, tolerance=0.01)]


@claim(
    "memory",
    "70B can be trained on 64 cards of 80 GB with ZeRO-3 alone.",
    "true",
    "States take 20 GB per card, and full recomputation leaves room for one sequence of 8,192 tokens.",
    "sequences of 32,768 tokens without context parallelism, or fewer sequences than ranks",
    at(ZERO, "section 5.3"),
)
def seventy_fits_with_zero_alone() -> list[Row]:
    machine = cluster("h100", 64)
    held = memory(architecture("llama-3-70b"), Layout(dp=64, zero=3, recompute="full"), 8192)
    states = ADAM_MIXED_FP32_GRADIENTS.total * architecture("llama-3-70b").parameters / 64
    longer = memory(architecture("llama-3-70b"), Layout(dp=64, zero=3, recompute="full"), 32768)
    return [
        formula("states per GPU (18 bytes per parameter: gradients in 32 bits)", states, "B"),
        computed("GB of everything, one sequence of 8,192 tokens", 49.7, held.total / 1e9, tolerance=0.01),
        computed("    fit into the usable memory", True, held.total <= machine.usable),
        computed("GB with 32,768 tokens: too many", 107.6, longer.total / 1e9, tolerance=0.01),
        formula("GB that are usable", machine.usable / 1e9),
    ]
