"""Steps in which every sequence brings one token, as replays of one recorded pass: a CUDA graph for each batch size.

    a step's inputs ──one copy──▶ tokens │ positions │ slots │ the backend's plan       static, [size] each
    block tables, only what changed ────▶ rows of a static table                  ╲
                                                     replay: one launch for the whole model ──▶ logits, static, too

At small batches a GPU is done with a kernel before the host has launched the next one; a graph launches all of them at
once. It repeats the very kernels with the very addresses, so a pass may depend on nothing that the host knows: every
length is read from device memory (`FixedDecode`), and a step of 5 sequences is padded to the next recorded size. The
padding repeats its shortest sequence: the copies write the same keys to the same slot, so no value that is not finite
and no slot of another sequence can come in. On the CPU a replay calls the function anew.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minillm.model import Transformer
from minillm.model.paged import PagedAttention, PagedCache
from minillm.model.paged.backend import Backend, FixedDecode
from minillm.model.paged.by_window import by_window
from minillm.model.paged.gather import Gathered
from minillm.model.paged.tables import BlockTables, to_device
from minillm.serve.run.step_inputs import StepInputs, fill_placeholders

Replay = Callable[[], Tensor]


@dataclass
class Graph:
    """Of one size. inputs: what a pass knows of each token, [size] each, then the backend's plan; on the device."""

    size: int
    attention: FixedDecode
    inputs: Tensor
    replay: Replay | None = None


@dataclass(eq=False)
class DecodeGraphs:
    """Of one model and the memory it reads. caches: by the name of the array that has their slots, see `Runner.caches`;
    each has its share of the rows of the tables. largest: sequences of a step, at most. A pass that cannot be recorded,
    because the model reads something back in its middle, is reported once in a warning, and all steps run as they come.
    """

    model: Transformer
    caches: dict[str, PagedCache]
    backend: Backend
    tables: BlockTables
    largest: int
    graphs: dict[int, Graph] = field(default_factory=dict)
    memory: object = None  # what the graphs of a GPU share: only one of them runs at a time

    def __post_init__(self):
        sizes = {1, 2, 4, 8, *range(16, self.largest, 16), self.largest}
        self.sizes = sorted(size for size in sizes if size <= self.largest)
        self.of_tokens = ("tokens", "positions", *self.caches)  # arrays; placeholders are filled in the first
        self.cache = self.caches["slots"]

    def logits(self, step: StepInputs, of_tokens: dict[str, np.ndarray], sampled: Tensor | None) -> Tensor | None:
        """[sequences, vocab_size], float32, to be read before the next call; None if there is no graph for them.

        step: one token for each sequence. of_tokens: arrays with a number for each token. sampled: what
        placeholders among the tokens stand for; None = there are none.
        """
        count = len(step.tokens)
        size = next((size for size in self.sizes if size >= count), None)
        if size is None:
            return None
        graph = self.graphs.get(size) or self._make(size)
        self._fill(graph, step, of_tokens, sampled)
        return graph.replay()[:count] if self._is_recorded(graph) else None

    @torch.inference_mode()
    def record_all(self) -> None:
        """All sizes, the largest first, which the others share their memory with; see `warm_up.py`."""
        for size in reversed(self.sizes):
            graph = self._make(size)
            plan = torch.from_numpy(graph.attention.plan(np.zeros(size, np.int64), np.ones(size, np.int64)))
            graph.inputs[len(self.of_tokens) * size :].copy_(plan)
            if not self._is_recorded(graph):
                return

    def _is_recorded(self, graph: Graph) -> bool:
        """Records it unless it is. False: it cannot be, which is told once."""
        if graph.replay is None:
            try:
                graph.replay = self._record(lambda: self._compute(graph))
            except Exception as failure:
                self.sizes = []
                warnings.warn(f"decoding without CUDA graphs: {type(failure).__name__}: {failure}", stacklevel=2)
                return False
        return True

    def _make(self, size: int) -> Graph:
        pool = self.cache.pool
        attention = self.backend.fixed(size, pool.shape[-2], pool.device)
        inputs = torch.zeros(len(self.of_tokens) * size + attention.plan_size, dtype=torch.int64, device=pool.device)
        graph = self.graphs[size] = Graph(size, attention, inputs)
        return graph

    def _fill(self, graph: Graph, step: StepInputs, of_tokens: dict[str, np.ndarray], sampled: Tensor | None) -> None:
        """A step's inputs, where the graph reads them."""
        count, rows, context_lens = len(step.tokens), step.rows, step.starts + 1
        columns = [of_tokens[name] for name in self.of_tokens]
        if graph.size > count:
            padded = np.full(graph.size, step.starts.argmin())
            padded[:count] = np.arange(count)
            rows, context_lens = rows[padded], context_lens[padded]
            columns = [column[padded] for column in columns]
        numbers = np.concatenate((*columns, graph.attention.plan(rows, context_lens)))
        arrays = (numbers, step.table_places, step.table_blocks)
        inputs, places, blocks = to_device(arrays, graph.inputs.device)
        graph.inputs.copy_(inputs)
        if sampled is not None:
            tokens = graph.inputs[: graph.size]
            tokens.copy_(fill_placeholders(tokens, sampled))
        self.tables.write_on_device(places, blocks)

    def _compute(self, graph: Graph) -> Tensor:
        """The pass, from what lies on the device alone."""
        size, tables, attention = graph.size, self.tables, graph.attention
        *columns, plan = graph.inputs.split([size] * len(self.of_tokens) + [attention.plan_size])
        of_tokens, each = dict(zip(self.of_tokens, columns, strict=True)), []

        def prepare(q: Tensor, k_pool: Tensor, rows: Tensor, **options):
            return attention.prepare(q, k_pool, rows, plan, **options)

        for (name, cache), rows in zip(self.caches.items(), tables.on_device.chunk(len(self.caches)), strict=True):
            each.append(PagedAttention(cache, of_tokens[name], partial(prepare, rows=rows)))
        paged = by_window(*each)
        return self.model(of_tokens["tokens"][None], of_tokens["positions"], attention=paged)[0].float()

    def _record(self, compute: Replay) -> Replay:
        """A function that does what `compute` did, with the same tensors."""
        if self.cache.pool.device.type != "cuda":
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
