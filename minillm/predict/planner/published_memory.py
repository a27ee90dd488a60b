"""Published peaks of memory, to hold the planner's bytes against. Nothing is fitted to them.

    reserved    what PyTorch's allocator took from the device: the planner's bytes and its fragmentation
    device      what nvidia-smi shows: that, and the context, communicators and libraries of the planner's clusters

What a source's code holds beside the planner's bytes is derived from that code (`training_codes.py`). Its terms were
found with these rows in view, so no row was held back; no number in them was chosen by a row. What is left, the note
says. Left out: runs whose layout `Layout` cannot say (torchtitan's recomputation of every second product), and sources
that print neither the model nor what the number counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from minillm.predict.planner import training_codes
from minillm.predict.planner.architectures import ARCHITECTURES, Architecture
from minillm.predict.planner.clusters import GIB, Cluster, cluster
from minillm.predict.planner.layout import Layout

NEAR = 0.1


@dataclass(frozen=True)
class Peak:
    """reported: bytes of the fullest GPU. code: bytes of a rank of a stage at each moment, see `training_codes`."""

    name: str
    model: Architecture
    cluster: Cluster
    layout: Layout
    seq: int
    reported: float
    basis: str
    source: str
    code: Callable[[Architecture, Layout, int, int], list[float]]
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
    stages = (peak.code(peak.model, peak.layout, peak.seq, stage) for stage in range(peak.layout.pp))
    predicted = max(map(max, stages)) / (1 - peak.cluster.fragmentation)
    if peak.basis == "device":
        predicted += peak.cluster.reserved
    return Comparison(peak.name, str(peak.layout), peak.reported, predicted, peak.note, peak.source)


_TITAN = (
    "torchtitan 2024, {}: https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
)
_BLOOM = (
    "BigScience 2022, 'Rebalancing layers': "
    "https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md"
)
_LOGITS = (
    "By its tables a GPU holds the tokens, layers and microbatches of the run of 32k tokens, which takes 7 to 10 GiB "
    "less; what differs is not printed. To merge the logits of all microbatches torch needs 7.8 GiB in one piece at "
    "the end of a step; how much of that the allocator had free is not printed."
)
_GIGABYTES = (
    "Printed in whole GB, read here as GiB. If they are thousands of nvidia-smi's MiB, as a run with 80 GB on a card "
    "of 80 GiB suggests, the error is below 10%. The same model with more heads or tokens is within 10%."
)


def _full(dp: int, zero: int, **axes: int) -> Layout:
    """A layout in which every layer keeps its input only."""
    return Layout(dp, zero, recompute="full", **axes)


def _titan(what: str, model: str, gpus: int, gib: float, layout: Layout, seq: int, table: str, note: str = "") -> Peak:
    """Full recomputation; the allocator's peak (`max_reserved_gib` of its metrics)."""
    name = f"torchtitan {model.rsplit('-', 1)[1].upper()}, {gpus} GPUs, {what}"
    machine, source, shape = cluster("h100", gpus), _TITAN.format(table), ARCHITECTURES[model]
    return Peak(name, shape, machine, layout, seq, gib * GIB, "reserved", source, training_codes.torchtitan, note)


def _pipelined(what: str, gib: float, dp: int, micro: int, seq: int, table: str, note: str = "", **axes: int) -> Peak:
    """405B. With a pipeline torchtitan keeps the weights whole from step to step, and adds gradients up before it
    scatters them: ZeRO 1 here. Its pipelines have as many microbatches as stages unless they are told otherwise."""
    layout = _full(dp, 1, tp=8, pp=8, micro_batch=micro, microbatches=8, **axes)
    return _titan(what, "llama-3-405b", 512, gib, layout, seq, table, note)


def _bloom(hidden: int, layers: int, heads: int, tp: int, pp: int, micro: int, gib: float, note: str = "") -> Peak:
    """A model of BLOOM's search on 384 GPUs; nvidia-smi on the first and last nodes."""
    widths = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "head_dim": hidden // heads}
    counts = {"num_layers": layers, "num_heads": heads, "num_kv_heads": heads}
    model, dp = replace(ARCHITECTURES["bloom-176b"], **widths, **counts), 384 // tp // pp
    layout = _full(dp, 1, tp=tp, pp=pp, micro_batch=micro, microbatches=2048 // dp // micro, sequence=False)
    name = f"BLOOM {model.parameters / 1e9:.0f}B, tp {tp}, pp {pp}, microbatch {micro}, {heads} heads"
    machine, code = cluster("a100-80", 384), training_codes.megatron_deepspeed
    return Peak(name, model, machine, layout, 2048, gib * GIB, "device", _BLOOM, code, note)


_SEVENTY = _full(32, 3, tp=8, micro_batch=16)
PEAKS = (
    _titan("32k tokens", "llama-3-8b", 8, 83.9, _full(8, 3), 1 << 15, "table 2"),
    _titan("64k tokens, cp 2", "llama-3-8b", 8, 84.2, _full(4, 3, cp=2), 1 << 16, "table 2"),
    _titan("128k tokens, cp 4", "llama-3-8b", 8, 84.0, _full(2, 3, cp=4), 1 << 17, "table 2"),
    _titan("256k tokens, cp 8", "llama-3-8b", 8, 84.5, _full(1, 3, cp=8), 1 << 18, "table 2"),
    _titan("tp 8", "llama-3-70b", 256, 71.9, _SEVENTY, 8192, "table 4"),
    _titan("tp 8, asynchronous", "llama-3-70b", 256, 67.6, _SEVENTY, 8192, "table 4"),
    _pipelined("1F1B", 82.5, 8, 4, 8192, "table 5", _LOGITS),
    _pipelined("interleaved", 72.7, 8, 4, 8192, "table 5", chunks=2),
    _pipelined("32k tokens", 75.3, 8, 1, 1 << 15, "table 6"),
    _pipelined("64k tokens, cp 2", 75.9, 4, 1, 1 << 16, "table 6", cp=2),
    _pipelined("128k tokens, cp 4", 77.1, 2, 1, 1 << 17, "table 6", cp=4),
    _pipelined("256k tokens, cp 8", 84.9, 1, 1, 1 << 18, "table 6", _LOGITS, cp=8),
    _bloom(14336, 70, 64, 8, 12, 2, 40),
    _bloom(14336, 70, 64, 4, 12, 2, 59),
    _bloom(14336, 70, 64, 4, 12, 4, 73),
    _bloom(14336, 70, 112, 4, 12, 2, 59),
    _bloom(14336, 70, 128, 4, 12, 2, 60),
    _bloom(13312, 82, 64, 8, 12, 4, 52),
    _bloom(13312, 82, 64, 4, 12, 2, 63, _GIGABYTES),
    _bloom(13312, 82, 104, 4, 12, 2, 62),
    _bloom(13312, 82, 128, 4, 12, 2, 60),
    _bloom(13312, 82, 64, 4, 12, 4, 74),
    _bloom(13312, 94, 128, 4, 12, 2, 67),
    _bloom(12288, 100, 64, 8, 6, 2, 61, _GIGABYTES),
    _bloom(12288, 100, 64, 8, 6, 4, 72),
    _bloom(12288, 106, 64, 4, 12, 2, 67),
    _bloom(12288, 106, 96, 4, 12, 2, 65),
    _bloom(12288, 106, 128, 4, 12, 2, 67),
    _bloom(12288, 106, 96, 4, 12, 4, 79),
)
