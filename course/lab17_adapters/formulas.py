"""Lab 17's arithmetic: adapters of published models, 70B fine-tuned on one node, 1,000 tenants on four cards."""

from collections.abc import Sequence
from dataclasses import dataclass

from course.shared.step_cost import H100_8B
from minillm.model import ModelConfig
from minillm.predict.model import forward_flops
from minillm.predict.planner.architectures import architecture
from minillm.predict.training import adapters as predict
from minillm.predict.training.adapters import LAYERS, Adapters

CARD, NODE, ADAPTER_ROOM = 80e9, 8, 10**10
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)


def of_model(name: str, rank: int, layers: Sequence[str] = LAYERS) -> Adapters:
    """Adapters on these layers of a published model."""
    return Adapters(shape_of(name), rank, layers)


def shape_of(name: str) -> ModelConfig:
    """A published dense model, as the formulas of training read one."""
    model = architecture(name)
    sizes = (model.vocab_size, model.hidden_size, model.intermediate_size, model.num_layers)
    return ModelConfig(*sizes, model.num_heads, model.num_kv_heads, head_dim=model.head_dim)


def step_share(adapters: Adapters, context: float) -> float:
    """FLOPs of a LoRA step over those of training all weights, 3 times forward."""
    return adapters.training_flops(context).total / (3 * forward_flops(adapters.shape, context).total)


def token_bytes(name: str = "llama-3-70b", rank: int = 16, tokens: int = 1024) -> float:
    """Activations that all blocks keep for backward, in 16 bits and without recomputation: bytes per token."""
    adapters = of_model(name, rank)
    blocks = (adapters.block_activation_bytes(tokens, block == 0, 2) for block in range(adapters.shape.num_layers))
    return sum(blocks) / tokens


@dataclass(frozen=True)
class FineTune:
    """Bytes on each card. frozen: weights that do not learn; trained: those that do, their gradients, masters and
    moments; left: for activations and the rest."""

    name: str
    frozen: float
    trained: float
    left: float

    @property
    def states(self) -> float:
        return self.frozen + self.trained


def fine_tunes(name: str = "llama-3-70b", rank: int = 16, cards: int = NODE, free: float = 0.1) -> list[FineTune]:
    """Three ways to train a model, states sharded over the cards; 18 bytes a trained number: weight in 16 bits,
    gradient, master and two moments in 32 (lab 02). In NF4 the base is whole on every card."""
    model = architecture(name)
    trained = 18 * of_model(name, rank).parameters / cards
    tables = 2 * model.table  # embedding and head, which stay in 16 bits
    codes = (model.parameters - tables) * NF4_BITS / 8 + tables * 2
    room = CARD * (1 - free)
    ways = (
        ("all weights", 0.0, 18 * model.parameters / cards),
        (f"LoRA, rank {rank}, base sharded", 2 * model.parameters / cards, trained),
        (f"QLoRA, rank {rank}, codes on every card", codes, trained),
    )
    return [FineTune(what, frozen, own, room - frozen - own) for what, frozen, own in ways]


@dataclass(frozen=True)
class Tenancy:
    """1,000 adapters beside one model. adapter: bytes of one; all: of all of them; fit: how many fit into the room for
    them; different: expected among the sequences of a step; step: seconds of a decode step with so many, base_step
    without, merged: of as many merged models, one after the other."""

    adapter: int
    all: int
    fit: int
    different: float
    step: float
    base_step: float
    merged: float


def tenancy(name: str = "llama-3-8b", tenants: int = 1000, rank: int = 16, sequences: int = 64) -> Tenancy:
    """Llama 3 8B on one H100, 16 bits, contexts of 1,024 tokens, 10 GB for adapters."""
    adapter = of_model(name, rank).nbytes(2)
    different = different_adapters(tenants, sequences)
    base = H100_8B.step([(1024, 1)] * sequences)
    alone = H100_8B.step([(1024, 1)] * round(sequences / different))
    return Tenancy(
        adapter=adapter,
        all=tenants * adapter,
        fit=predict.adapters_that_fit(ADAPTER_ROOM, adapter),
        different=different,
        step=base + different * adapter / H100_8B.bandwidth,
        base_step=base,
        merged=different * alone,
    )


def different_adapters(tenants: int, sequences: int) -> float:
    """Expected number of different adapters among so many sequences, if every tenant is equally likely."""
    return tenants * (1 - (1 - 1 / tenants) ** sequences)
