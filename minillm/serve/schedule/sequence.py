"""A sequence on its way through the scheduler, and the plan of a step: how many tokens of which sequence."""

from dataclasses import dataclass, field
from enum import Enum

from minillm.serve.schedule.blocks import Prefix, cache_namespace

State = Enum("State", "NEW WAITING RUNNING FINISHED")  # NEW: not queued yet


@dataclass(eq=False, kw_only=True)
class Held:
    """Blocks of one pool that a sequence holds. first_block: the first of `blocks` that it still holds, see
    `BlockPool.window`; any number stands before. host_blocks: those of the host, while it is swapped out."""

    blocks: list[int] = field(default_factory=list)
    first_block: int = 0
    host_blocks: list[int] = field(default_factory=list)

    @property
    def held_blocks(self) -> list[int]:
        return self.blocks[self.first_block :]


@dataclass(eq=False)
class Sequence(Held):
    """Tokens and the blocks that hold their keys and values. One that belongs to a request is its `Sample`.

    limit: tokens it ends with at the latest, prompt included. num_seqs: sequences it will be after its prompt (its
    request's n). priority: lower is sooner. block_hashes: the cache keys of its full blocks, as far as needed yet.
    adapter: its number in the `AdapterStore`; None = the base alone. windowed: its blocks in `BlockPool.windowed`.
    """

    tokens: list[int]
    limit: int
    num_seqs: int = 1
    priority: int = 0
    origin: Prefix = field(default_factory=cache_namespace)
    name: str = ""
    adapter: int | None = None
    state: State = State.NEW
    num_computed: int = 0
    windowed: Held = field(default_factory=Held)
    block_hashes: list[Prefix] = field(default_factory=list)
    rank: tuple = ()  # (order, arrival, fork): smaller is earlier
    last_step: int = 0
    preemptions: int = 0
    hit_tokens: int = 0  # found in the cache instead of computed
    forwarded: int = 0  # put through the model
    num_draft_tokens: int = 0  # draft tokens to check in its next step; they are no tokens of it yet
    ticket: int = 0  # of its hand-over, while it waits for keys that another engine computes (`transfer/`)
    received_tokens: int = 0  # whose keys came so
    num_pending: int = 0  # of its tokens the last ones, if they are placeholders (`async_scheduling.py`)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_certain(self) -> int:
        """Tokens that are computed and stay so: a placeholder may be taken back, the last token if a draft spoils its
        pass."""
        return min(self.num_computed, self.num_tokens - max(1, self.num_pending))

    def wanted(self, piece: int | None, skipped: int = 0) -> int:
        """Tokens to have blocks for: all it has, or (None = all) no more than the next `piece`, so that a long prompt
        holds no more blocks than a window sees. skipped: tokens that it is about to find in the cache."""
        return len(self.tokens) if piece is None else min(len(self.tokens), self.num_computed + skipped + piece)

    def prefixes(self, blocks: int, block_size: int) -> list[Prefix]:
        """The keys of its first full blocks in the cache."""
        hashes = self.block_hashes
        while len(hashes) < blocks:
            start = len(hashes) * block_size
            tokens = tuple(self.tokens[start : start + block_size])
            hashes.append(Prefix(hashes[-1] if hashes else self.origin, tokens))
        return hashes[:blocks]

    def skip(self, tokens: int) -> None:
        """So many next tokens were found in the cache."""
        self.num_computed += tokens
        self.hit_tokens += tokens


@dataclass
class Plan:
    """One step: how many tokens of which sequence, and which sequences were admitted and preempted for it.

    A count above `num_uncomputed` includes draft tokens.
    """

    batch: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
