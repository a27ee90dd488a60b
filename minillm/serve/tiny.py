"""A serving engine on one page: paged keys and values, a token budget, continuous batching, preemption by recompute.

    add ──▶ waiting ──▶ schedule ──▶ one forward pass over a flat row of tokens ──▶ sample ──▶ finished
                 ▲         │            a prompt piece of a, one token of b, one of c
                 └─────────┘ out of blocks: the latest sequence gives its blocks back and starts over

`minillm.serve.LLM` is this engine with everything that production adds: shared prefixes, swapping, priorities, forks,
cancelling, streaming, speculation, a fast sampler and fast attention. Read this file first; the two give the same
tokens, but that an answer here ends with its `eos`, which `LLM` leaves out. The ideas are those of Orca (Yu et al.
2022, iteration-level scheduling), PagedAttention (Kwon et al. 2023) and Sarathi (Agrawal et al. 2023, prompts in
chunks).
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.model import Transformer
from minillm.model.attention import sdpa
from minillm.model.config import check_generates
from minillm.model.draw import Draw


@dataclass(eq=False)
class Request:
    """A sequence from prompt to answer. `num_computed` of its tokens have keys and values in `block_table`'s blocks.

    max_len: tokens with which it ends at the latest, prompt included. block_table[i]: the block in the pool that holds
    tokens i · block_size to (i + 1) · block_size - 1.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    max_len: int
    temperature: float
    eos: int | None
    draw: Draw
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are missing: the prompt at first, the token sampled last while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.max_len or self.answer[-1:] == [self.eos]


class TinyLLM:
    """`TinyLLM(model).generate(prompts, max_tokens=32)`, or `add` and `step` until what was added comes back.

    num_blocks · block_size tokens of keys and values are kept. token_budget: tokens of one forward pass, at least
    max_num_seqs, so that a decoding sequence never waits for another's prompt.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        token_budget: int = 256,
        max_num_seqs: int = 16,
    ):
        if min(num_blocks, block_size, max_num_seqs) < 1 or token_budget < max_num_seqs:
            raise ValueError(
                f"num_blocks {num_blocks}, block_size {block_size} and max_num_seqs {max_num_seqs} must be at least 1, "
                f"token_budget {token_budget} at least max_num_seqs: every running sequence needs a token a step."
            )
        check_generates(model.config)
        self.model, self.block_size = model, block_size
        self.token_budget, self.max_num_seqs = token_budget, max_num_seqs
        config, weight = model.config, model.embedding.weight
        shape = (2, config.num_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self.kv_pool = torch.zeros(shape, device=weight.device, dtype=weight.dtype)  # [k or v, layer, slot, head, dim]
        self.num_blocks, self.free_blocks = num_blocks, list(range(num_blocks))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.num_requests = 0

    # What a user calls

    def generate(self, prompts: list[list[int]], max_tokens: int = 16, **options) -> list[list[int]]:
        """The answers to prompts of token ids, in order. options: see `add`."""
        ids = [self.add(prompt, max_tokens, **options) for prompt in prompts]
        answers: dict[int, list[int]] = {}
        while self.waiting or self.running:
            answers |= {request.id: request.answer for request in self.step()}
        return [answers[each] for each in ids]

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 16,
        *,
        temperature: float = 0.0,
        eos: int | None = None,
        seed: int = 0,
    ) -> int:
        """Queues a request and returns its id. temperature 0: the likeliest token; eos: a token that ends the answer.

        ValueError if the context or the pool could never hold it.
        """
        context = self.model.config.max_seq_len
        if not 0 < len(prompt) < context or max_tokens < 1 or not temperature >= 0:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens, max_tokens {max_tokens}, temperature {temperature}: give 1 to "
                f"{context - 1} tokens, at least 1 to generate, and a temperature of at least 0."
            )
        max_len = min(len(prompt) + max_tokens, context)
        if self.blocks_for(max_len - 1) > self.num_blocks:  # the last token is sampled, never computed
            raise ValueError(
                f"{max_len} tokens need {self.blocks_for(max_len - 1)} blocks and the pool has {self.num_blocks}: "
                "shorten the request or enlarge the pool."
            )
        self.waiting.append(
            Request(self.num_requests, list(prompt), len(prompt), max_len, temperature, eos, Draw(seed))
        )
        self.num_requests += 1
        return self.num_requests - 1

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One forward pass and one new token for every sequence whose tokens it completes; returns what finished."""
        batch = self.schedule()
        if not batch:
            return []
        logits = self.forward(batch)
        for row, (request, count) in enumerate(batch):
            request.num_computed += count
            if request.num_uncomputed == 0:  # else a piece of a prompt: its last logits predict a token we know
                request.tokens.append(self.sample(logits[row], request))
        finished = [request for request, _ in batch if request.finished]
        for request in finished:
            self.running.remove(request)
            self.release(request)
        return finished

    # Which tokens the pass computes

    def schedule(self) -> list[tuple[Request, int]]:
        """(request, how many of its next tokens), at most token_budget in all.

        Decoding sequences come first, then prompts that have begun, then new ones: one line of arithmetic for all.
        """
        budget, batch = self.token_budget, []
        for request in sorted(self.running, key=lambda request: request.num_uncomputed > 1):
            count = min(request.num_uncomputed, budget)
            if count and request in self.running and self.allocate(request, request.num_computed + count):
                batch.append((request, count))
                budget -= count
        batch = [(request, count) for request, count in batch if request in self.running]  # not preempted since
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            count = min(request.num_uncomputed, budget)
            if self.blocks_for(len(request.tokens)) > len(self.free_blocks):
                break  # strictly in order: a short request does not overtake a long one
            self.running.append(self.waiting.popleft())
            self.allocate(request, len(request.tokens))
            batch.append((request, count))
            budget -= count
        return batch

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Blocks for its first num_tokens tokens, taken from the latest sequences if need be. False: it went itself."""
        while (missing := self.blocks_for(num_tokens) - len(request.block_table)) > len(self.free_blocks):
            victim = self.running.pop()
            self.release(victim)
            victim.num_computed = 0  # its tokens stay: computed again, they give the same keys and values
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        for _ in range(missing):
            request.block_table.append(self.free_blocks.pop())
        return True

    def release(self, request: Request) -> None:
        self.free_blocks += request.block_table
        request.block_table = []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # The pass, and what is sampled from it

    def forward(self, batch: list[tuple[Request, int]]) -> Tensor:
        """[requests, vocab_size], float32 on the CPU: the logits after the last token of each request's piece.

        All pieces stand in one row of tokens without padding. slot_mapping says where in the pool each token's key and
        value go; all are written before any is read, and each sequence reads the slots of its own block table. All its
        slots are worked out anew in each pass, and on a GPU the host waits for each `torch.tensor` of a list: `LLM`
        keeps the tables on the device and copies once (`paged/tables.py`).
        """
        tokens, positions, slot_mapping, pieces = [], [], [], []
        for request, count in batch:
            start, end = request.num_computed, request.num_computed + count
            slots = [self.slot(request, position) for position in range(end)]
            tokens += request.tokens[start:end]
            positions += range(start, end)
            slot_mapping += slots[start:]
            pieces.append((count, torch.tensor(slots, device=self.kv_pool.device)))
        device = self.kv_pool.device
        tokens, positions, written = (torch.tensor(each, device=device) for each in (tokens, positions, slot_mapping))
        last = torch.tensor([count for count, _ in pieces], device=device).cumsum(0) - 1

        def attention(q, k, v, *, layer: int, positions: Tensor, **options) -> Tensor:
            keys, values = self.kv_pool[:, layer]  # [slots, kv_heads, head_dim]; q, k, v: [1, heads, tokens, head_dim]
            keys[written], values[written] = k[0].transpose(0, 1), v[0].transpose(0, 1)
            outputs, start = [], 0
            for count, slots in pieces:
                own = slice(start, start + count)
                key_positions = torch.arange(len(slots), device=device)
                place = {"positions": positions[own], "key_positions": key_positions, **options}
                mine, theirs = keys[slots].transpose(0, 1)[None], values[slots].transpose(0, 1)[None]
                outputs.append(sdpa(q[:, :, own], mine, theirs, **place))
                start += count
            return torch.cat(outputs, dim=2)

        return self.model(tokens[None], positions, attention=attention, rows=last)[0].float().cpu()

    def slot(self, request: Request, position: int) -> int:
        """Where in the pool the key and value of the token at `position` lie: the block table's whole purpose."""
        return request.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def sample(self, logits: Tensor, request: Request) -> int:
        """logits: [vocab_size]. A request has its own random numbers, so its answer does not depend on the batch."""
        if request.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax((logits - logits.max()) / max(request.temperature, 1e-6), dim=-1)
        return request.draw.choose(probabilities)
