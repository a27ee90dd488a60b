"""Training runs whose layout and speed are public, to hold the planner against.

`reported` is the model-FLOP share of the 16-bit peak as printed, or computed from printed TFLOP/s per GPU as `basis`
says. `fitted` marks the two runs from which `Device.achievable` was taken; the others were not looked at for it.
"""

from dataclasses import dataclass

from minillm.predict.planner.architectures import ARCHITECTURES, Architecture
from minillm.predict.planner.clusters import Cluster, cluster
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import memory
from minillm.predict.planner.step import mfu, step


@dataclass(frozen=True)
class Run:
    """basis "model": reported is a model-FLOP utilisation; "hardware": recomputation is counted as work too.

    full_attention: the source counts attention FLOPs of the whole score matrix, not of its causal half.
    """

    name: str
    model: str
    cluster: Cluster
    layout: Layout
    seq: int
    reported: float
    basis: str
    source: str
    full_attention: bool = True
    fitted: bool = False
    note: str = ""

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.model]


@dataclass(frozen=True)
class Comparison:
    run: str
    reported: float
    predicted: float
    memory: float
    usable: float
    note: str

    @property
    def off(self) -> float:
        """Relative error of the predicted utilisation."""
        return self.predicted / self.reported - 1


def compare(run: Run) -> Comparison:
    """The run's utilisation by its own way of counting, and the bytes of its fullest rank."""
    model, layout = run.architecture, run.layout
    seconds = step(model, layout, run.cluster, run.seq).seconds
    share = mfu(model, layout, run.cluster, run.seq, seconds)
    causal = model.training_flops((run.seq + 1) / 2)
    counted = model.training_flops(run.seq) if run.full_attention else causal
    if run.basis == "hardware" and layout.recompute == "full":
        context = run.seq if run.full_attention else (run.seq + 1) / 2
        counted += 2 * model.num_layers * model.active_layer + model.num_layers * model.attention_flops(context)
    held = memory(model, layout, run.seq).total
    return Comparison(run.name, run.reported, share * counted / causal, held, run.cluster.usable, run.note)


_KORTHIKANTI = "Korthikanti et al. 2022, tables 3 and 5: https://arxiv.org/abs/2205.05198"
_NARAYANAN = "Narayanan et al. 2021, table 2: https://arxiv.org/abs/2104.04473"
_LLAMA = "Llama Team 2024, table 4: https://arxiv.org/abs/2407.21783"
_A100 = "a100-80"
_TOKENS_PER_GPU_SECOND = 1e12 / (180e3 * 3600)  # 180,000 GPU hours per 10^12 tokens
_OMNI_PATH = 6.25e9  # bytes/s of a GPU: four 100 Gbit/s cards for eight

RUNS = (
    Run(
        "Megatron 22B, 8 GPUs",
        "megatron-22b",
        cluster(_A100, 8),
        Layout(dp=1, tp=8, micro_batch=4, microbatches=1),
        2048,
        0.415,
        "model",
        _KORTHIKANTI,
    ),
    Run(
        "Megatron 175B, 64 GPUs",
        "gpt-3-175b",
        cluster(_A100, 64),
        Layout(tp=8, pp=8, chunks=3, microbatches=64),
        2048,
        0.514,
        "model",
        _KORTHIKANTI,
    ),
    Run(
        "Megatron 530B, 280 GPUs",
        "megatron-530b",
        cluster(_A100, 280),
        Layout(tp=8, pp=35, chunks=3, microbatches=280),
        2048,
        0.560,
        "model",
        _KORTHIKANTI,
        fitted=True,
    ),
    Run(
        "Megatron 530B, 2,240 GPUs",
        "megatron-530b",
        cluster(_A100, 2240),
        Layout(dp=8, tp=8, pp=35, chunks=3, microbatches=280),
        2048,
        0.542,
        "model",
        _KORTHIKANTI,
    ),
    Run(
        "Megatron 1T, 512 GPUs",
        "megatron-1t",
        cluster(_A100, 512),
        Layout(tp=8, pp=64, microbatches=512),
        2048,
        0.563,
        "model",
        _KORTHIKANTI,
    ),
    Run(
        "GPT-3 175B, 768 GPUs",
        "gpt-3-175b",
        cluster(_A100, 768),
        Layout(dp=8, tp=8, pp=12, microbatches=192, recompute="full", sequence=False),
        2048,
        149 / 312,
        "hardware",
        _NARAYANAN,
    ),
    Run(
        "GPT-3 175B, 1,024 GPUs",
        "gpt-3-175b",
        cluster(_A100, 1024),
        Layout(dp=8, tp=8, pp=16, microbatches=192, recompute="full", sequence=False),
        2048,
        140 / 312,
        "hardware",
        "Narayanan et al. 2021, §5.1: https://arxiv.org/abs/2104.04473",
        note="The paper prints the speed for 1,024 GPUs without a layout; this one is the nearest in its table 2.",
    ),
    Run(
        "BLOOM 176B, 384 GPUs",
        "bloom-176b",
        cluster(_A100, 384, network=_OMNI_PATH),
        Layout(dp=8, zero=1, tp=4, pp=12, micro_batch=2, microbatches=128, recompute="full", sequence=False),
        2048,
        150 / 312,
        "hardware",
        "BigScience 2022, model card: https://huggingface.co/bigscience/bloom",
    ),
    Run(
        "Llama 3 405B, 8,192 GPUs, 8k tokens",
        "llama-3-405b",
        cluster("h100", 8192),
        Layout(dp=64, zero=2, tp=8, pp=16, chunks=8, microbatches=32),
        8192,
        0.43,
        "model",
        _LLAMA,
        full_attention=False,
        fitted=True,
    ),
    Run(
        "Llama 3 405B, 16,384 GPUs, 8k tokens",
        "llama-3-405b",
        cluster("h100", 16384),
        Layout(dp=128, zero=2, tp=8, pp=16, chunks=8, microbatches=16),
        8192,
        0.41,
        "model",
        _LLAMA,
        full_attention=False,
    ),
    Run(
        "Llama 3 405B, 16,384 GPUs, 128k tokens",
        "llama-3-405b",
        cluster("h100", 16384),
        Layout(dp=8, zero=2, tp=8, cp=16, pp=16, chunks=8, microbatches=16),
        131072,
        0.38,
        "model",
        _LLAMA,
        full_attention=False,
    ),
    Run(
        "DeepSeek-V3 671B, 2,048 GPUs",
        "deepseek-v3",
        cluster("h800", 2048),
        Layout(dp=128, zero=1, pp=16, ep=64, schedule="dualpipe", recompute="light", microbatches=120),
        4096,
        _TOKENS_PER_GPU_SECOND * ARCHITECTURES["deepseek-v3"].training_flops(2048.5) / 989e12,
        "model",
        "DeepSeek-AI 2024, §3.1 and table 1: https://arxiv.org/abs/2412.19437",
        full_attention=False,
        note="Trained in 8 bits, here predicted in 16: kept activations would take half as much, and then it fits.",
    ),
)
