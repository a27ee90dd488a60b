"""A sequence on its way through the scheduler, and the plan of a step: how many tokens of which sequence."""

from dataclasses import dataclass, field
from enum import Enum

from minillm.serve.blocks import Prefix, root

State = Enum("State", "WAITING RUNNING FINISHED")


@dataclass(eq=False)
class Sequence:
    """Tokens and the blocks that hold their keys and values.

    limit: tokens it ends with at the latest, prompt included. seats: sequences it will fork into after its prompt.
    priority: lower is sooner. chain: the prefixes of its full blocks, as far as they were needed yet.
    """

    tokens: list[int]
    limit: int
    seats: int = 1
    priority: int = 0
    origin: Prefix = field(default_factory=root)
    name: str = ""
    state: State = State.WAITING
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # on the host, while it is swapped out
    chain: list[Prefix] = field(default_factory=list)
    rank: tuple = ()  # (order, arrival, fork): smaller is earlier
    last_step: int = 0
    preemptions: int = 0
    hit_tokens: int = 0  # found in the cache instead of computed
    wanted: int = 0  # guesses it would like checked in its next step; they are no tokens of it yet

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lacking(self) -> int:
        return len(self.tokens) - self.num_computed

    def prefixes(self, blocks: int, block_size: int) -> list[Prefix]:
        """The keys of its first full blocks in the cache."""
        chain = self.chain
        while len(chain) < blocks:
            start = len(chain) * block_size
            tokens = tuple(self.tokens[start : start + block_size])
            chain.append(Prefix(chain[-1] if chain else self.origin, tokens))
        return chain[:blocks]

    def skip(self, tokens: int) -> None:
        """So many next tokens were found in the cache."""
        self.num_computed += tokens
        self.hit_tokens += tokens


@dataclass
class Plan:
    """One step: how many tokens of which sequence, and what had to happen for it. More than a sequence lacks: the rest
    are guesses."""

    batch: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
