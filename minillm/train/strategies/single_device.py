"""The seam between the training loop and its strategies: all that changes when there is more than one rank.

    build, wrap, updater, then for every step: forward_backward, prepare_gradients, grad_norm, step

`SingleDevice` is one process, where each of these is trivial; `Hybrid` in hybrid.py is several ranks.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minillm.adapters.dropout import numbered
from minillm.adapters.lora import LoraConfig, is_adapter
from minillm.adapters.start import Start
from minillm.comm import Group
from minillm.model import ModelConfig, Transformer
from minillm.model.distillation import Goals
from minillm.parallel.sharding.gather import gather
from minillm.parallel.sharding.optimizer import MakeOptimizer, SlicedOptimizer
from minillm.parallel.sharding.placement import Placement, Replicate, global_norm, gradients_of
from minillm.train.optimizer import Updater

FROM_SEED = Start()
Around = Callable[[str], contextlib.AbstractContextManager]


class Microbatch(NamedTuple):
    """[batch, seq] each, of this rank's positions. weights: of the targets, None = all 1.

    documents: which of several packed documents each token belongs to, of whole sequences; None: one document.
    goals: asks the teacher, when the microbatch is computed; None: there is none.
    keys: [batch], of the rows, for the dropout of adapters; None: there is none.
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor | None = None
    documents: Tensor | None = None
    goals: Callable[[], Goals] | None = None
    keys: Tensor | None = None


def quietly(name: str) -> contextlib.AbstractContextManager:
    """A context for "forward" and "backward" that measures nothing."""
    return contextlib.nullcontext()


def unscaled(loss: Tensor) -> Tensor:
    return loss


class SingleDevice:
    """One process. Every method says what a parallel strategy has to do in its place.

    rank, world_size: of the ranks that share the batch, each with rows of its own.
    stride: of those, how many ranks lie from one to the next.
    averaged_over: ranks whose gradients are averaged: those, times the ranks that share every sequence.
    group: all ranks of the run; None: there is one process.
    sends_inside_blocks: whether a block's forward sends messages, as with tp, cp and ep.
    stepped: what `updater` has returned. lora: with adapters, which alone are then stepped, saved and compared.
    """

    rank = 0
    world_size = 1
    stride = 1
    sends_inside_blocks = False
    group: Group | None = None
    stepped: Updater | SlicedOptimizer
    lora: LoraConfig | None = None

    @property
    def averaged_over(self) -> int:
        return self.world_size

    @property
    def is_root(self) -> bool:
        """Whether this rank writes files and shows progress: one of all ranks does."""
        return self.rank == 0

    @property
    def model(self) -> nn.Module:
        """The bare model, from `wrap` on. A strategy may have one after another."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model
        for of_the_last in ("_parameters", "_buffer_names"):
            self.__dict__.pop(of_the_last, None)

    def build(
        self, config: ModelConfig, *, seed: int, start: Start = FROM_SEED, device: Any = None, **how: Any
    ) -> Transformer:
        """The bare model, before `wrap`, or this rank's parts of it, with the whole model's parameter names.
        start: its initial values, and whether adapters alone are trained; how: dtype, attention."""
        self.lora = start.lora
        model = Transformer(config, seed=None, device="meta", **how)
        start.read_base(model)
        start.add_adapters(model)
        start.fill(model, seed, device or torch.get_default_device())
        return model

    def wrap(self, model: nn.Module, master: bool = False) -> nn.Module:
        """The module that forward is called on: the model, or a wrapper that reduces or gathers.
        master: whether `updater` will be asked for float32 masters."""
        self.model = model
        return model

    def updater(self, module: nn.Module, make: MakeOptimizer, master: bool = False) -> Updater:
        """The object that steps the parameters of `wrap`'s module, or the shards of them that this rank owns."""
        self.stepped = Updater(self.parts().items(), make, master, self.weight_placements)
        return self.stepped

    def positions(self, seq_len: int) -> Tensor | None:
        """Which positions of every sequence this rank has, beyond seq_len those of padding; None: all."""
        return None

    def loss_divisor(self, weight: Tensor) -> Tensor:
        """The number that this rank divides its sum of losses by; `weight`: its tokens of the whole step, all
        microbatches. A strategy that averages gradients returns Σ weight / averaged_over: the average is over tokens,
        not ranks."""
        return self.sum(weight) / self.averaged_over

    def forward_backward(
        self,
        module: nn.Module,
        microbatches: Sequence[Microbatch | tuple],
        loss_divisor: Tensor,
        around: Around = quietly,
        scale: Callable[[Tensor], Tensor] = unscaled,
    ) -> Tensor:
        """Adds the gradients of Σ weight · nll / loss_divisor to `.grad`, reduced; returns Σ weight · nll of this
        rank's rows. around: a context for "forward" and for "backward"; scale: of the loss, for half precision."""
        microbatches = [Microbatch(*each) for each in microbatches]
        total = torch.zeros((), device=microbatches[0].tokens.device)
        for index, (tokens, targets, weights, documents, goals, keys) in enumerate(microbatches):
            with self.accumulating(last=index == len(microbatches) - 1), numbered(self.model, keys):
                with around("forward"):
                    more = {} if weights is None else {"weights": weights}
                    if documents is not None:
                        more["attention"] = functools.partial(self.model.attention, segments=documents)
                    self.model.goals = goals() if goals else None
                    nll, _ = module(tokens, targets=targets, **more)
                    self.model.goals = None
                    loss = nll / loss_divisor
                with around("backward"):
                    scale(loss).backward()
            total = total + nll.detach()
        self.finish_backward()
        return total

    @contextlib.contextmanager
    def within(self, documents: Tensor | None) -> Iterator[None]:
        """A context for a forward pass without gradients, in which tokens see their own document only. documents: as a
        microbatch's."""
        attention = self.model.attention if documents is not None else None
        if attention is not None:
            self.model.attention = functools.partial(attention, segments=documents)
        try:
            yield
        finally:
            if attention is not None:
                self.model.attention = attention

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager:
        """A context for one microbatch: only the last one communicates (`no_sync` in the others)."""
        return contextlib.nullcontext()

    def finish_backward(self) -> None:
        """Waits until the gradients of all microbatches are reduced, but for what `prepare_gradients` does."""

    def prepare_gradients(self) -> None:
        """Gives what the optimizer steps its gradients, once all of them are complete."""
        self.stepped.prepare_gradients()

    def grad_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Norm of the whole model's gradient, float64, the same on every rank."""
        return global_norm(dict(enumerate(gradients_of(parameters))))

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks, for losses and token counts that are reported."""
        return value

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each value over all ranks; their hosts wait for it. Decides whether to go on, and how far."""
        if self.group is None:
            return list(values)
        mine = torch.tensor(values, dtype=torch.int64, device=self.group.device)
        return self.group.all_reduce(mine, "min").tolist()

    # What is saved and compared, see `sharding.state.Weights`.

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the trained parameters by name, after `prepare_gradients`. All ranks call it."""
        gradients = self.stepped.gradients_by_name()
        return gather(gradients, self.stepped.placements, self.group) if self.group else gradients

    def weights(self) -> dict[str, Tensor]:
        """Whole weights by name. All ranks call it."""
        weights = {name: part.detach() for name, part in self.parts().items()}
        return gather(weights, self.weight_placements, self.group) if self.group else weights

    @property
    def names(self) -> list[str]:
        """Names of the whole model's parameters, in its order."""
        return list(self.parts())

    def parts(self) -> dict[str, nn.Parameter]:
        """What this rank holds of the weights, by name; no communication."""
        return self._parameters

    @functools.cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return self.learnt(dict(self.model.named_parameters()))

    def learnt(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """With adapters, theirs alone: the base stays as its folder has it."""
        return {name: each for name, each in named.items() if self.lora is None or is_adapter(name)}

    @property
    def weight_placements(self) -> Mapping[str, Placement]:
        """Where the parts lie in the whole model."""
        here = Replicate(self.group.rank if self.group else 0)
        return {name: Placement(part.shape, (here,)) for name, part in self.parts().items()}

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a checkpoint has, the same on all ranks that have them: the balance biases of routers."""
        return {name: self.model.get_buffer(name) for name in self._buffer_names}

    @functools.cached_property
    def _buffer_names(self) -> list[str]:
        if self.lora is not None:
            return []
        saved = self.model.state_dict()
        return [name for name, _ in self.model.named_buffers() if name in saved]

    @property
    def buffer_placements(self) -> Mapping[str, Placement]:
        """Placements of the buffers: one of all ranks counts each."""
        here = Replicate(self.group.rank if self.group else 0)
        return {name: Placement(buffer.shape, (here,)) for name, buffer in self.buffers().items()}

    def close(self) -> None:
        """Ends the groups of ranks that the strategy made. All ranks call it, after everything else."""

    def __enter__(self) -> "SingleDevice":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
