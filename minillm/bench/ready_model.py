"""An engine whose model costs nothing: what is left is the host's own work. Also a script, for another checkout.

PYTHONPATH=/another/checkout python minillm/bench/ready_model.py

It says `ready`, then reads lines `sequences [prompt [1 for asynchronous scheduling]]`, such as `64 2048`, and prints
the microseconds per step of each.
"""

import statistics
import sys
import time
from types import SimpleNamespace

import torch

from minillm.model import ModelConfig
from minillm.serve import LLM, SamplingParams

PROMPT, STEPS, VOCAB = 32, 60, 64


class ReadyModel:
    """Returns logits that lie there already."""

    def __init__(self, max_seq_len: int = 256):
        self.config = ModelConfig(VOCAB, 8, 8, 1, 1, max_seq_len=max_seq_len)
        self.embedding = SimpleNamespace(weight=torch.zeros(VOCAB, 8))
        attention = SimpleNamespace(k_proj=SimpleNamespace(weight=torch.zeros(8, 8)))
        self.blocks, self.positions_of = [SimpleNamespace(attention=attention)], None  # an engine sees a whole model
        self.ready = torch.zeros(1, 4096, VOCAB)
        self.ready[..., 1] = 1.0

    def parameters(self):
        yield self.embedding.weight

    def __call__(self, tokens, positions=None, *, attention=None, rows=None):
        return self.ready[:, : len(rows)]


def microseconds_per_step(sequences: int, prompt: int = PROMPT, async_scheduling: bool = False, make=LLM) -> float:
    """The median decode step of so many greedy sequences. Time is the thread's own on the processor."""
    longest = prompt + STEPS + 8
    options = {"async_scheduling": True} if async_scheduling else {}  # an older engine does not know it
    llm = make(
        ReadyModel(longest),
        num_blocks=sequences * -(-longest // 16),
        block_size=16,
        max_num_seqs=sequences,
        token_budget=sequences * (prompt + 1),
        **options,
    )
    for number in range(sequences):
        llm.add([number % VOCAB] * prompt, SamplingParams(max_tokens=STEPS + 8))
    for _ in range(4):
        llm.step()
    times = []
    for _ in range(STEPS):
        start = time.thread_time()
        llm.step()
        times.append(time.thread_time() - start)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        print(microseconds_per_step(*map(int, line.split())), flush=True)
