"""One forward pass and its sampling: `StepInputs` in, token ids out.

It knows no request and no sequence. Whatever it needs of them is in the arrays, so that several ranks can execute the
same step side by side, each with its part of the model, of the keys and of the values.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from minillm.model import Transformer
from minillm.model.attention.causal import AttentionFunction
from minillm.model.paged import Backend, PagedAttention, PagedCache
from minillm.model.paged.by_window import by_window
from minillm.model.paged.cache import prepare_pass
from minillm.model.paged.tables import BlockTables, slots_of_tokens, to_device
from minillm.serve.run.decode_graphs import DecodeGraphs
from minillm.serve.run.step_inputs import StepInputs, fill_placeholders
from minillm.serve.sample.allowed import rule_out_all_but
from minillm.serve.sample.batch import SampledTokens
from minillm.serve.sample.isolate import sample_isolated
from minillm.serve.sample.seen import SeenTokens
from minillm.serve.schedule.blocks import COPY, FROM_HOST, OF_WINDOWED, RECEIVE, TO_HOST

if TYPE_CHECKING:
    from minillm.serve.transfer.receive import Receiver
    from minillm.serve.transfer.send import Sender


@dataclass(eq=False)
class StepOutputs:
    """logits: [r, vocab_size], float32, of the r wanted tokens, to be read before the next step is executed.

    hidden: [n, hidden_size] after the last block, if it was asked for. sampled: the tokens, if sampling was asked for;
    they are on the device until `sampled.read()`. faults: what sampling raised, by row of `StepInputs.sampling`.
    """

    logits: Tensor | None = None
    hidden: Tensor | None = None
    sampled: SampledTokens | None = None
    faults: dict[int, Exception] = field(default_factory=dict)


class Runner:
    """The model, keys and values, block tables, and the ids that the step before sampled.

    table_rows, table_width: size of the block tables, with windowed of each half: the second is of the blocks in that
    cache, which has the layers with a sliding window where others see everything. graphs: sequences of the largest step
    that is replayed as a CUDA graph (`decode_graphs.py`); 0 = none is. routed: `AdapterStore.routed`, for steps with
    adapters, which are not replayed. moved: how many moves of the last step were carried out. beat_s: seconds after
    which `ready` is to be called again where there is nothing to compute; None = it need not be. stages: steps that can
    be under way at once.
    """

    beat_s: float | None = None
    stages = 1

    def __init__(
        self,
        model: Transformer,
        cache: PagedCache,
        backend: Backend,
        *,
        table_rows: int,
        table_width: int,
        graphs: int = 0,
        routed: Callable[..., AbstractContextManager] = nullcontext,
        windowed: PagedCache | None = None,
    ):
        self.model, self.cache, self.backend, self.routed = model, cache, backend, routed
        self.caches = {"slots": cache} | ({} if windowed is None else {"windowed slots": windowed})
        self.tables, self.rows = BlockTables(table_rows * len(self.caches), table_width, cache.pool.device), table_rows
        self.graphs = DecodeGraphs(model, self.caches, backend, self.tables, graphs) if graphs else None
        self.seen = SeenTokens()
        self.receiver: Receiver | None = None  # of blocks that wait for keys, see `minillm/serve/transfer`
        self.sender: Sender | None = None  # to those who wait
        self.moved = 0
        self._sampled: Tensor | None = None

    def ready(self) -> None:
        """Called before each step, also one without tokens. RuntimeError if none can be executed any more."""

    def execute(self, step: StepInputs) -> StepOutputs:
        """The pass, and the sampling if it is asked for. In inference mode; nobody waits for the device here."""
        before, self._sampled = self._sampled, None
        self.moved = 0
        self._move_blocks(step.moves)
        if not len(step.tokens):
            self._sampled = before
            return StepOutputs()
        outputs = self._forward(step, before)
        if outputs.logits is None:  # another rank has them
            return outputs
        if len(step.allowed_rows):
            rule_out_all_but(outputs.logits, step.allowed_rows, step.allowed_ids)
        if step.sampling is not None:
            outputs.sampled, outputs.faults = sample_isolated(outputs.logits, step.sampling, before, self.seen)
            self._sampled = outputs.sampled.ids
        return outputs

    def _move_blocks(self, moves: np.ndarray) -> None:
        caches = list(self.caches.values())
        for kind, source, target in moves.tolist():
            which, kind = divmod(kind, OF_WINDOWED)
            if kind == COPY:
                caches[which].copy(source, target)
            elif kind == TO_HOST:
                caches[which].to_host([source], [target])
            elif kind == FROM_HOST:
                caches[which].from_host([source], [target])
            elif kind == RECEIVE:
                self.receiver.open(source, target)
            else:
                self.receiver.close(source)
            self.moved += 1
        if self.receiver is not None and len(moves):
            self.receiver.start()

    def _forward(self, step: StepInputs, before: Tensor | None) -> StepOutputs:
        tables = self.tables
        tables.write_on_host(step.table_places, step.table_blocks)
        of_tokens = {"tokens": step.tokens}
        for first, name in zip((0, self.rows), self.caches, strict=False):
            which = (tables.host, step.rows + first, step.starts, step.counts, self.cache.block_size)
            of_tokens["positions"], of_tokens[name] = slots_of_tokens(*which)
        if before is not None and step.tokens.min() >= 0:
            before = None  # without placeholders
        one_each = len(step.tokens) == len(step.rows) == len(step.wanted)
        replayed = one_each and not step.hidden and step.adapters is None and not len(step.sends)
        if self.graphs is not None and replayed:
            logits = self.graphs.logits(step, of_tokens, before)
            if logits is not None:
                return StepOutputs(logits)
        arrays = of_tokens | {"rows": step.rows, "wanted": step.wanted}
        if changed := len(step.table_places) > 0:
            arrays |= {"table_places": step.table_places, "table_blocks": step.table_blocks}
        there = dict(zip(arrays, to_device(list(arrays.values()), self.cache.pool.device), strict=True))
        if changed:
            tables.write_on_device(there["table_places"], there["table_blocks"])
        tokens = fill_placeholders(there["tokens"], before)[None]
        attention, outputs = self._attention(step, there), StepOutputs()
        adapted = nullcontext() if step.adapters is None else self.routed(step.adapters, step.counts)
        with self._keep_hidden(outputs) if step.hidden else nullcontext(), adapted:
            logits = self._compute(tokens, there["positions"], attention, there["wanted"])
        outputs.logits = None if logits is None else logits.float()
        return outputs

    def _compute(self, tokens: Tensor, positions: Tensor, attention: PagedAttention, wanted: Tensor) -> Tensor | None:
        """tokens: [1, n] -> [r, vocab_size], the logits of the wanted ones; None if another rank has them."""
        return self.model(tokens, positions, attention=attention, rows=wanted)[0]

    def _attention(self, step: StepInputs, there: dict[str, Tensor]) -> AttentionFunction:
        """there: slots and rows, on the device."""
        sizes, each = {"query_lens": step.counts.tolist(), "context_lens": (step.starts + step.counts).tolist()}, []
        widest = min(-(-max(sizes["context_lens"]) // self.cache.block_size), self.tables.host.shape[1])
        for first, (name, cache) in zip((0, self.rows), self.caches.items(), strict=False):
            block_table = self.tables.on_device[first:, :widest].index_select(0, there["rows"])
            prepare = partial(prepare_pass, self.backend, block_table=block_table, **sizes)
            each.append(PagedAttention(cache, there[name], prepare))
        attention = by_window(*each)
        return self.sender.following(attention, step, self.tables.host) if len(step.sends) else attention

    def _keep_hidden(self, outputs: StepOutputs):
        def keep(block, inputs, output: Tensor) -> None:
            outputs.hidden = output[0]

        return self.model.blocks[-1].register_forward_hook(keep)
