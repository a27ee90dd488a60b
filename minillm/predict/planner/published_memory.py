"""Published peaks of memory, to hold the planner's bytes against. Nothing is fitted to them.

    reserved    what PyTorch's allocator took from the device: the planner's bytes and its fragmentation
    device      what nvidia-smi shows: that, and the context, communicators and libraries of the planner's clusters

A source's code may hold more than the planner counts. What is known of it is added by name (`beside`); what is left,
the note says. Left out: runs whose layout `Layout` cannot say (torchtitan's recomputation of every second product), and
sources that print neither the model nor what the number counts.
"""

from dataclasses import dataclass, field

from minillm.predict.planner.architectures import ARCHITECTURES, Architecture
from minillm.predict.planner.clusters import GIB, Cluster, cluster
from minillm.predict.planner.layout import Layout
from minillm.predict.planner.memory import ELEMENT, LOGIT, in_flight, memory, stage_parameters

NEAR = 0.1
EAGER_LOSS = 3 * 4  # bytes per logit of F.cross_entropy in 32 bits: log-softmax, its gradient, that of the logits


@dataclass(frozen=True)
class Peak:
    """reported: bytes of the fullest GPU. logit: see `memory`. beside: bytes per kind that the source's code holds and
    the planner does not count."""

    name: str
    model: str
    cluster: Cluster
    layout: Layout
    seq: int
    reported: float
    basis: str
    source: str
    logit: int = LOGIT
    beside: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    run: str
    layout: str
    reported: float
    predicted: float
    note: str
    source: str

    @property
    def off(self) -> float:
        return self.predicted / self.reported - 1


def compare(peak: Peak) -> Comparison:
    """The bytes by the source's own way of counting."""
    held = memory(ARCHITECTURES[peak.model], peak.layout, peak.seq, peak.logit).total + sum(peak.beside.values())
    predicted = held / (1 - peak.cluster.fragmentation)
    if peak.basis == "device":
        predicted += peak.cluster.reserved
    return Comparison(peak.name, str(peak.layout), peak.reported, predicted, peak.note, peak.source)


def gathered(model: Architecture, layout: Layout, seq: int) -> float:
    """Tensor parallelism by torch's DTensor keeps the gathered inputs of attention and MLP for backward, and makes the
    gradient of one of them; Megatron's gathers them again (Korthikanti et al. 2022, §4.2.2)."""
    tokens = layout.micro_batch * seq / layout.cp
    return 3 * tokens * model.hidden_size * ELEMENT * (1 - 1 / layout.tp)


def outputs(model: Architecture, layout: Layout, seq: int) -> float:
    """Pipelines of torch and DeepSpeed keep what a stage has sent until its backward pass; Megatron frees it."""
    tokens = layout.micro_batch * seq / layout.cp
    split = layout.tp if layout.sequence else 1
    return in_flight(layout, 0) * layout.chunks * tokens * model.hidden_size * ELEMENT / split


_TITAN = (
    "torchtitan 2024, {}: https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
_BLOOM = (
    "BigScience 2022, 'Rebalancing layers', 176B: "
    "https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md"
)
_BREAKDOWN = (
    "Not explained whole: with tensor parallelism it holds more than the gathered inputs, and prints no breakdown."
)
_BF16 = (
    "About 2 bytes per parameter of the stage are missing: DeepSpeed's BF16 optimizer was days old, and what it held "
    "besides 32-bit gradients is not printed."
)


def _titan(what: str, model: str, gpus: int, gib: float, layout: Layout, seq: int, table: str, note: str = "") -> Peak:
    """Full recomputation, the loss in eager mode, the allocator's peak (`max_reserved_gib` of its metrics)."""
    shape = ARCHITECTURES[model]
    beside = {"gathered inputs": gathered(shape, layout, seq)} if layout.tp > 1 else {}
    if layout.pp > 1:
        beside["outputs of stages"] = outputs(shape, layout, seq)
    name = f"torchtitan {model.rsplit('-', 1)[1].upper()}, {gpus} GPUs, {what}"
    machine, source = cluster("h100", gpus), _TITAN.format(table)
    return Peak(name, model, machine, layout, seq, gib * GIB, "reserved", source, EAGER_LOSS, beside, note)


def _bloom(tp: int, dp: int, micro: int, gib: float) -> Peak:
    """nvidia-smi on the first and last nodes; 16-bit gradients of a microbatch lie beside the 32-bit sums."""
    model = ARCHITECTURES["bloom-176b"]
    layout = _full(dp, 1, tp=tp, pp=12, micro_batch=micro, microbatches=2048 // dp // micro, sequence=False)
    beside = {
        "16-bit gradients": ELEMENT * sum(stage_parameters(model, layout, 0)),
        "outputs of stages": outputs(model, layout, 2048),
    }
    name, machine = f"BLOOM 176B, 384 GPUs, tp {tp}, pp 12, microbatch {micro}", cluster("a100-80", 384)
    return Peak(name, "bloom-176b", machine, layout, 2048, gib * GIB, "device", _BLOOM, LOGIT, beside, _BF16)


def _full(dp: int, zero: int, **axes: int) -> Layout:
    """A layout in which every layer keeps its input only."""
    return Layout(dp, zero, recompute="full", **axes)


def _pipelined(what: str, gib: float, dp: int, micro: int, seq: int, table: str, **axes: int) -> Peak:
    """405B. With a pipeline torchtitan keeps the weights whole from step to step, and adds gradients up before it
    scatters them: ZeRO 1 here. Its pipelines have as many microbatches as stages unless they are told otherwise."""
    layout = _full(dp, 1, tp=8, pp=8, micro_batch=micro, microbatches=8, **axes)
    return _titan(what, "llama-3-405b", 512, gib, layout, seq, table, _BREAKDOWN)


_SEVENTY = _full(32, 3, tp=8, micro_batch=16)
PEAKS = (
    _titan("32k tokens", "llama-3-8b", 8, 83.9, _full(8, 3), 1 << 15, "table 2"),
    _titan("64k tokens, cp 2", "llama-3-8b", 8, 84.2, _full(4, 3, cp=2), 1 << 16, "table 2"),
    _titan("128k tokens, cp 4", "llama-3-8b", 8, 84.0, _full(2, 3, cp=4), 1 << 17, "table 2"),
    _titan("256k tokens, cp 8", "llama-3-8b", 8, 84.5, _full(1, 3, cp=8), 1 << 18, "table 2"),
    _titan("tp 8", "llama-3-70b", 256, 71.9, _SEVENTY, 8192, "table 4", _BREAKDOWN),
    _titan("tp 8, asynchronous", "llama-3-70b", 256, 67.6, _SEVENTY, 8192, "table 4", _BREAKDOWN),
    _pipelined("1F1B", 82.5, 8, 4, 8192, "table 5"),
    _pipelined("interleaved", 72.7, 8, 4, 8192, "table 5", chunks=2),
    _pipelined("32k tokens", 75.3, 8, 1, 1 << 15, "table 6"),
    _pipelined("64k tokens, cp 2", 75.9, 4, 1, 1 << 16, "table 6", cp=2),
    _pipelined("128k tokens, cp 4", 77.1, 2, 1, 1 << 17, "table 6", cp=4),
    _pipelined("256k tokens, cp 8", 84.9, 1, 1, 1 << 18, "table 6", cp=8),
    _bloom(8, 4, 2, 40),
    _bloom(4, 8, 2, 59),
    _bloom(4, 8, 4, 73),
)
