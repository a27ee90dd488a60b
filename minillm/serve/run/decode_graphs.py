"""Steps in which every sequence brings one token, as replays of one recorded pass: a CUDA graph for each batch size.

    a step's inputs ──one copy──▶ tokens │ slots │ positions │ what the backend reads   static, [size] each
    block tables, only what changed ────▶ rows of a static table                  ╲
                                                     replay: one launch for the whole model ──▶ logits, static, too

At small batches a GPU is done with a kernel before the host has launched the next one; a graph launches all of them at
once. It repeats the very kernels with the very addresses, so a pass may depend on nothing that the host knows: every
length is read from device memory (`FixedDecode`), and a step of 5 sequences is filled up to the next recorded size.
What fills it up is its shortest sequence again: the copies write the same keys to the same slot, so nothing that is
not finite, and no slot of another sequence, can come in. On the CPU a replay calls the function anew.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minillm.model import Transformer
from minillm.model.paged import PagedAttention
from minillm.model.paged.backend import Backend, FixedDecode
from minillm.model.paged.gather import Gathered
from minillm.model.paged.tables import to_device
from minillm.serve.run.model_runner import InputBuffers, resolved

Replay = Callable[[], Tensor]


@dataclass
class Graph:
    """Of one size. inputs: tokens, slots and positions, [size] each, then the backend's numbers; on the device."""

    size: int
    attention: FixedDecode
    inputs: Tensor
    replay: Replay | None = None


@dataclass(eq=False)
class DecodeGraphs:
    """Of one model and the buffers it reads. largest: sequences of a step, at most. A pass that cannot be recorded,
    because the model reads something back in its middle, is told once in a warning, and all steps run as they come."""

    model: Transformer
    buffers: InputBuffers
    largest: int
    graphs: dict[int, Graph] = field(default_factory=dict)
    memory: object = None  # what the graphs of a GPU share: only one of them runs at a time

    def __post_init__(self):
        sizes = {1, 2, 4, 8, *range(16, self.largest, 16), self.largest}
        self.sizes = sorted(size for size in sizes if size <= self.largest)

    def logits(self, tokens: list[int], rows: np.ndarray, starts: np.ndarray) -> Tensor | None:
        """[sequences, vocab_size], float32, to be read before the next call; None if there is no graph for them.

        tokens: one of each sequence; rows: theirs of the block tables; starts: the tokens' positions.
        """
        size = next((size for size in self.sizes if size >= len(tokens)), None)
        if size is None:
            return None
        graph = self.graphs.get(size) or self._make(size)
        self._fill(graph, np.array(tokens), rows, starts)
        if graph.replay is None:
            try:
                graph.replay = self._record(lambda: self._compute(graph))
            except Exception as failure:
                self.sizes = []
                warnings.warn(f"decoding without CUDA graphs: {type(failure).__name__}: {failure}", stacklevel=2)
                return None
        return graph.replay()[: len(tokens)]

    def _make(self, size: int) -> Graph:
        pool = self.buffers.cache.pool
        attention = self.buffers.backend.fixed(size, pool.shape[-2], pool.device)
        inputs = torch.zeros(3 * size + attention.numbers, dtype=torch.int64, device=pool.device)
        graph = self.graphs[size] = Graph(size, attention, inputs)
        return graph

    def _fill(self, graph: Graph, tokens: np.ndarray, rows: np.ndarray, starts: np.ndarray) -> None:
        """A step's inputs, where the graph reads them."""
        tables, block_size = self.buffers.tables, self.buffers.cache.block_size
        if graph.size > len(tokens):
            filled = np.full(graph.size, starts.argmin())
            filled[: len(tokens)] = np.arange(len(tokens))
            tokens, rows, starts = tokens[filled], rows[filled], starts[filled]
        slots = tables.host[rows, starts // block_size] * block_size + starts % block_size
        numbers = np.concatenate((tokens, slots, starts, graph.attention.plan(rows, starts + 1)))
        inputs, places, blocks = to_device((numbers, *tables.changes()), graph.inputs.device)
        graph.inputs.copy_(inputs)
        if self.buffers.sampled is not None:
            graph.inputs[: graph.size] = resolved(graph.inputs[: graph.size], self.buffers.sampled)
        tables.apply(places, blocks)

    def _compute(self, graph: Graph) -> Tensor:
        """The pass, from what lies on the device alone."""
        size, tables, attention = graph.size, self.buffers.tables, graph.attention
        tokens, slots, positions, numbers = graph.inputs.split([size, size, size, attention.numbers])

        def prepare(q: Tensor, k_pool: Tensor, **options):
            return attention.prepare(q, k_pool, tables.on_device, numbers, **options)

        paged = PagedAttention(self.buffers.cache, slots, prepare)
        return self.model(tokens[None], positions, attention=paged)[0].float()

    def _record(self, compute: Replay) -> Replay:
        """A function that does what `compute` did, with the same tensors."""
        if self.buffers.cache.pool.device.type != "cuda":
            return compute
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # twice for real: kernels are compiled and libraries take their workspaces
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        recorded, self.memory = torch.cuda.CUDAGraph(), self.memory or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(recorded, pool=self.memory):
            logits = compute()
        recorded.replay()
        expected = compute()
        if (logits - expected).abs().max() > 1e-2 * expected.abs().max():  # once per size, so the host may wait
            raise RuntimeError(f"a replay for {len(logits)} sequences gives other logits than the pass it repeats")

        def replay() -> Tensor:
            recorded.replay()
            return logits

        return replay


def wants_graphs(wanted: bool | None, backend: Backend, device: torch.device) -> bool:
    """By default on a CUDA GPU, unless the backend would gather all keys. ValueError if it cannot be replayed."""
    able = hasattr(backend, "fixed")
    if wanted not in (None, True, False):
        raise ValueError(f"graphs {wanted!r} must be True, False or None.")
    if wanted and not able:
        raise ValueError(f"backend {backend!r} cannot be replayed, it takes lengths from the host: use graphs=False.")
    return able and device.type == "cuda" and not isinstance(backend, Gathered) if wanted is None else bool(wanted)
