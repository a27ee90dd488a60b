"""Training runs whose layout and speed are public, to hold the planner against.

Every second run was used to fit the constants of `clusters.py` (`fitted`, see `fit.py`); the others judge them. They
judge the constants alone: which terms the formulas have, and which `Stack` a source's code counts as, was decided with
all runs in view. So expect more error on a run that is not here. Left out: runs whose layout `Layout` cannot say
(experts cut differently from their attention, some layers recomputed), and ZeRO-3 of Narayanan et al.'s table 2, whose
implementation of that year moved a few per cent of what the links do.
"""

from dataclasses import dataclass, replace

from minillm.predict.planner.architectures import ARCHITECTURES, Architecture
from minillm.predict.planner.clusters import Cluster, cluster
from minillm.predict.planner.compute import MEGATRON_2021, MEGATRON_2022, MODERN, PYTORCH, Stack
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import memory
from minillm.predict.planner.step import mfu, step


@dataclass(frozen=True)
class Run:
    """reported: the share of the 16-bit peak as printed, or from printed TFLOP/s per GPU or `seconds` of a step.

    basis "model": a model-FLOP utilisation; "hardware": recomputation is counted as work, too.

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
    stack: Stack = MODERN
    seconds: float = 0.0
    full_attention: bool = False
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
    fitted: bool
    note: str

    @property
    def off(self) -> float:
        """Relative error of the predicted utilisation."""
        return self.predicted / self.reported - 1


def compare(run: Run) -> Comparison:
    """The run's utilisation by its own way of counting, and the bytes of its fullest rank."""
    model, layout = run.architecture, run.layout
    seconds = step(model, layout, run.cluster, run.seq, run.stack).seconds
    share = mfu(model, layout, run.cluster, run.seq, seconds)
    causal = model.training_flops((run.seq + 1) / 2)
    counted = model.training_flops(run.seq) if run.full_attention else causal
    if run.basis == "hardware" and layout.recompute == "full":
        context = run.seq if run.full_attention else (run.seq + 1) / 2
        counted += 2 * model.num_layers * model.active_layer + model.num_layers * model.attention_flops(context)
    reported = run.reported or mfu(model, layout, run.cluster, run.seq, run.seconds)
    held = memory(model, layout, run.seq).total
    predicted = share * counted / causal
    return Comparison(run.name, reported, predicted, held, run.cluster.usable, run.fitted, run.note)


def errors(fitted: bool) -> list[float]:
    """|predicted / reported - 1| of the runs that were fitted, or of those that judge, in rising order."""
    return sorted(abs(compare(run).off) for run in RUNS if run.fitted == fitted)


_NARAYANAN, _KORTHIKANTI = "https://arxiv.org/abs/2104.04473", "https://arxiv.org/abs/2205.05198"
_MEGASCALE = "Jiang et al. 2024, table 2, Megatron-LM: https://arxiv.org/abs/2402.15627"
_LLAMA = "Llama Team 2024, table 4: https://arxiv.org/abs/2407.21783"
_NVIDIA = "NVIDIA 2025, DGX Cloud Benchmarking recipes: https://github.com/NVIDIA/dgxc-benchmarking"
_FSDP = "https://github.com/foundation-model-stack/fms-fsdp"
_A100, _A100_FLOPS = "a100-80", 312e12
_TOKENS_PER_GPU_SECOND = 1e12 / (180e3 * 3600)  # 180,000 GPU hours per 10^12 tokens
_FOUR_CARDS = 6.25e9  # bytes/s of a GPU: four 100 Gbit/s cards for eight


def _megatron(model: str, gpus: int, tp: int, pp: int, batch: int, teraflops: float, where: str) -> Run:
    """Full recomputation. The microbatch is printed for table 2 only: 1; assumed: 1 in a pipeline, else 4."""
    dp, micro = gpus // tp // pp, 1 if pp > 1 else 4
    layout = Layout(dp, 0, tp, pp=pp, micro_batch=micro, microbatches=batch // dp // micro, recompute="full")
    layout, share = replace(layout, sequence=False), teraflops * 1e12 / _A100_FLOPS
    family = "GPT-3" if model == "gpt-3-175b" else "Megatron 2021"
    name, source = f"{family} {_size(model)}, {gpus:,} GPUs", f"Narayanan et al. 2021, {where}: {_NARAYANAN}"
    machine = cluster(_A100, gpus)
    return Run(name, model, machine, layout, 2048, share, "hardware", source, MEGATRON_2021, full_attention=True)


def _selective(model: str, gpus: int, share: float, layout: Layout) -> Run:
    """Scores are made again in backward, nothing else is."""
    name, source = f"Megatron {_size(model)}, {gpus:,} GPUs", f"Korthikanti et al. 2022, tables 3 and 5: {_KORTHIKANTI}"
    machine = cluster(_A100, gpus)
    return Run(name, model, machine, layout, 2048, share, "model", source, MEGATRON_2022, full_attention=True)


def _megascale(gpus: int, batch: int, seconds: float) -> Run:
    dp = gpus // 64
    layout = Layout(dp, 1, 8, pp=8, chunks=6, microbatches=batch // dp)
    name, machine = f"MegaScale's Megatron 175B, {gpus:,} GPUs", cluster(_A100, gpus)
    return Run(name, "megascale-175b", machine, layout, 2048, 0, "model", _MEGASCALE, MEGATRON_2022, seconds)


def _nemo(model: str, gpus: int, batch: int, seconds: float, seq: int, fp8: float = 0.0, **axes: int) -> list[Run]:
    """fp8: seconds of the same in 8 bits, if it was run."""
    layout = Layout(gpus // (axes.get("tp", 1) * axes.get("pp", 1) * axes.get("cp", 1)), 1, **axes)
    layout = replace(layout, microbatches=batch // layout.dp // layout.micro_batch)
    name, machine = f"NeMo {_size(model)}, {gpus:,} GPUs", cluster("h100", gpus)
    tight = memory(ARCHITECTURES[model], layout, seq).total > machine.usable
    note = "Gradients take 16 bits there, 32 here." if tight else ""
    sixteen = Run(name, model, machine, layout, seq, 0, "model", _NVIDIA, MODERN, seconds, note=note)
    eight = replace(sixteen, name=f"{name}, 8 bits", stack=replace(MODERN, fp8=True), seconds=fp8)
    return [sixteen, eight] if fp8 else [sixteen]


def _fsdp(model: str, micro_batch: int, tokens: float, recompute: str) -> Run:
    """tokens: per second and GPU."""
    layout = Layout(128, 3, micro_batch=micro_batch, recompute=recompute)
    note = "The source prints no network: 400 Gbit/s for a node are assumed."
    note += " Sharded within nodes there, over all ranks here." if recompute == "none" else ""
    seconds, machine = micro_batch * 4096 / tokens, cluster(_A100, 128, network=_FOUR_CARDS)
    name = f"PyTorch FSDP {_size(model)}, 128 GPUs"
    return Run(name, model, machine, layout, 4096, 0, "model", f"IBM 2024: {_FSDP}", PYTORCH, seconds, note=note)


def _llama(gpus: int, seq: int, share: float, layout: Layout) -> Run:
    name, machine = f"Llama 3 405B, {gpus:,} GPUs, {seq >> 10}k tokens", cluster("h100", gpus)
    return Run(name, "llama-3-405b", machine, layout, seq, share, "model", _LLAMA)


def _size(model: str) -> str:
    return model.rsplit("-", 1)[1].upper()


_MEASURED = (
    _megatron("megatron-1.7b", 32, 1, 1, 512, 137, "table 1"),
    _megatron("megatron-3.6b", 64, 2, 1, 512, 138, "table 1"),
    _megatron("megatron-7.5b", 128, 4, 1, 512, 142, "table 1"),
    _megatron("megatron-18b", 256, 8, 1, 1024, 135, "table 1"),
    _megatron("megatron-39b", 512, 8, 2, 1536, 138, "table 1"),
    _megatron("megatron-76b", 1024, 8, 4, 1792, 140, "table 1"),
    _megatron("megatron-146b", 1536, 8, 8, 2304, 148, "table 1"),
    _megatron("megatron-310b", 1920, 8, 16, 2160, 155, "table 1"),
    _megatron("megatron-530b", 2520, 8, 35, 2520, 163, "table 1"),
    _megatron("megatron-1t", 3072, 8, 64, 3072, 163, "table 1"),
    _megatron("gpt-3-175b", 384, 8, 12, 1536, 153, "table 2"),
    _megatron("gpt-3-175b", 768, 8, 12, 1536, 149, "table 2"),
    replace(
        _megatron("gpt-3-175b", 1024, 8, 16, 1536, 140, "§5.1"),
        note="The paper prints the speed for 1,024 GPUs without a layout; this one is near those of its table 2.",
    ),
    _megatron("gpt-3-175b", 1536, 8, 12, 1536, 141, "table 2"),
    _megatron("megatron-530b", 560, 8, 35, 2240, 171, "table 2"),
    _megatron("megatron-530b", 1120, 8, 35, 2240, 167, "table 2"),
    _megatron("megatron-530b", 2240, 8, 35, 2240, 159, "table 2"),
    _selective("megatron-22b", 8, 0.415, Layout(tp=8, micro_batch=4)),
    _selective("gpt-3-175b", 64, 0.514, Layout(tp=8, pp=8, chunks=3, microbatches=64)),
    _selective("megatron-530b", 280, 0.560, Layout(tp=8, pp=35, chunks=3, microbatches=280)),
    _selective("megatron-530b", 2240, 0.542, Layout(8, tp=8, pp=35, chunks=3, microbatches=280)),
    _selective("megatron-1t", 512, 0.563, Layout(tp=8, pp=64, microbatches=512)),
    Run(
        "BLOOM 176B, 384 GPUs",
        "bloom-176b",
        cluster(_A100, 384, network=_FOUR_CARDS),
        Layout(8, 1, 4, pp=12, micro_batch=2, microbatches=128, recompute="full", sequence=False),
        2048,
        150e12 / _A100_FLOPS,
        "hardware",
        "BigScience 2022, model card: https://huggingface.co/bigscience/bloom",
        MEGATRON_2021,
        full_attention=True,
    ),
    *(_megascale(gpus, 768, seconds) for gpus, seconds in ((256, 40.0), (512, 21.2), (768, 15.2), (1024, 11.9))),
    *(
        _megascale(gpus, 6144, seconds)
        for gpus, seconds in ((3072, 29.02), (6144, 14.78), (8192, 12.24), (12288, 8.57))
    ),
    _fsdp("llama-2-7b", 2, 3760, "none"),
    _fsdp("llama-2-34b", 8, 772, "full"),
    _fsdp("llama-2-70b", 6, 380, "full"),
    Run(
        "torchtitan 70B, 64 GPUs",
        "llama-3-70b",
        cluster(_A100, 64),
        Layout(64, 3, recompute="full"),
        8192,
        0,
        "model",
        "torchtitan 2024: https://github.com/pytorch/torchtitan/blob/main/docs/performance.md",
        PYTORCH,
        8192 / 331,
    ),
    *_nemo("llama-3-8b", 8, 128, 12.91, 8192, 9.67, cp=2),
    *_nemo("llama-3-8b", 128, 2048, 13.10, 8192, cp=2),
    *_nemo("nemotron-4-15b", 16, 64, 2.83, 4096, 2.08, tp=4, micro_batch=4),
    *_nemo("nemotron-4-15b", 2048, 8192, 2.96, 4096, tp=4, micro_batch=4),
    *_nemo("llama-3-70b", 64, 128, 14.72, 8192, 11.01, tp=4, pp=4, cp=2, chunks=5),
    *_nemo("llama-3-70b", 2048, 4096, 14.98, 8192, tp=4, pp=4, cp=2, chunks=5),
    *_nemo("gpt-3-175b", 128, 256, 8.91, 2048, 5.92, tp=4, pp=8, chunks=12),
    *_nemo("gpt-3-175b", 2048, 4096, 9.02, 2048, tp=4, pp=8, chunks=12),
    *_nemo("nemotron-4-340b", 128, 32, 4.61, 4096, 3.16, tp=8, pp=8, chunks=12),
    *_nemo("nemotron-4-340b", 2048, 512, 4.84, 4096, tp=8, pp=8, chunks=12),
    *_nemo("llama-3-405b", 576, 252, 17.20, 8192, 11.24, tp=8, pp=9, cp=2, chunks=7),
    *_nemo("llama-3-405b", 2304, 1008, 17.62, 8192, tp=8, pp=9, cp=2, chunks=7),
    _llama(8192, 8192, 0.43, Layout(64, 2, 8, pp=16, chunks=8, microbatches=32)),
    _llama(16384, 8192, 0.41, Layout(128, 2, 8, pp=16, chunks=8, microbatches=16)),
    _llama(16384, 131072, 0.38, Layout(8, 2, 8, 16, 16, chunks=8, microbatches=16)),
    Run(
        "DeepSeek-V3 671B, 2,048 GPUs",
        "deepseek-v3",
        cluster("h800", 2048),
        Layout(128, 1, pp=16, ep=64, schedule="dualpipe", recompute="light", microbatches=120),
        4096,
        _TOKENS_PER_GPU_SECOND * ARCHITECTURES["deepseek-v3"].training_flops(2048.5) / 989e12,
        "model",
        "DeepSeek-AI 2024, §3.1 and table 1: https://arxiv.org/abs/2412.19437",
        replace(MODERN, fp8=True),
        note="Kept activations are predicted in 16 bits: in 8 they take half as much, and then it fits.",
    ),
    _fsdp("llama-2-13b", 1, 1700, "none"),
)
RUNS = tuple(replace(run, reported=compare(run).reported, fitted=place % 2 == 0) for place, run in enumerate(_MEASURED))
CHOSEN = tuple(  # one or more of every source, for a table that fits a page
    next(run for run in RUNS if run.name == name)
    for name in (
        "Megatron 2021 1.7B, 32 GPUs",
        "Megatron 2021 7.5B, 128 GPUs",
        "Megatron 2021 1T, 3,072 GPUs",
        "GPT-3 175B, 1,024 GPUs",
        "Megatron 530B, 280 GPUs",
        "BLOOM 176B, 384 GPUs",
        "MegaScale's Megatron 175B, 12,288 GPUs",
        "PyTorch FSDP 7B, 128 GPUs",
        "NeMo 8B, 8 GPUs",
        "NeMo 70B, 64 GPUs",
        "NeMo 405B, 576 GPUs",
        "Llama 3 405B, 16,384 GPUs, 8k tokens",
        "DeepSeek-V3 671B, 2,048 GPUs",
    )
)
