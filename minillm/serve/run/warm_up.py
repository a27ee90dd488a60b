"""Before the first request: kernels are compiled and graphs recorded, so that nobody waits for either.

Graphs first, the largest of them first of all, because they share memory: a smaller one fits into what a larger one
took. Then passes as prompts bring them, for a Triton kernel is compiled for each height of a tile of queries and for
each power of two of the splits of a sequence's keys. They write into block 0, which nobody holds yet.
"""

import numpy as np
import torch

from minillm.model.paged.split import MIN_KEYS
from minillm.serve.run.model_runner import Runner
from minillm.serve.run.step_inputs import NOTHING, StepInputs


@torch.inference_mode()
def warm_up(runner: Runner, token_budget: int) -> None:
    """token_budget: tokens of the largest pass."""
    if runner.graphs is not None:
        runner.graphs.record_all()
    slots = runner.tables.host.shape[1] * runner.cache.block_size
    for tokens, keys in passes(token_budget, min(slots, runner.model.config.max_seq_len)):
        runner.execute(pass_of(tokens, keys))


def passes(token_budget: int, longest: int) -> list[tuple[int, int]]:
    """(tokens, keys) of one sequence: pieces of a prompt, the largest first, then one token after ever more keys."""
    longest = min(longest, 1 << 17)
    pieces = {min(tokens, token_budget, longest) for tokens in (2, 16, 128, token_budget)}
    keys, contexts = 1, []
    while keys <= longest:
        contexts.append(keys)
        keys = 2 * max(keys, MIN_KEYS // 2)
    return [(tokens, tokens) for tokens in sorted(pieces, reverse=True)] + [(1, keys) for keys in contexts]


def pass_of(tokens: int, keys: int) -> StepInputs:
    """One sequence's last `tokens` of so many keys, all token 0."""
    return StepInputs(
        tokens=np.zeros(tokens, np.int64),
        starts=np.array([keys - tokens], np.int64),
        counts=np.array([tokens], np.int64),
        rows=np.zeros(1, np.int64),
        moves=NOTHING.reshape(0, 3),
        table_places=NOTHING,
        table_blocks=NOTHING,
        wanted=np.array([tokens - 1], np.int64),
        allowed_rows=NOTHING,
        allowed_ids=NOTHING,
    )
