"""What lab 15 measures in the engine: how many draft tokens pay, every proposer, where it loses, preemption
meanwhile."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from course.lab15_speculative_decoding.experiments import (
    NEW,
    PROMPT,
    Compared,
    compare,
    distributions,
    generate,
    pair,
    prompts,
)
from course.shared.measuring import one_thread
from minillm.model import Transformer
from minillm.predict.serving import speculation as predict
from minillm.serve import LLM, SamplingParams
from minillm.serve.speculate import AdaptiveK, DraftModel, NGram, Proposer
from minillm.serve.speculate.registry import PROPOSERS, proposer_named

K = {"draft": 3, "ngram": 6, "medusa": 3, "eagle": 3, "lookahead": 4, "early-exit": 2}


def draft_model() -> DraftModel:
    return DraftModel(pair().draft)


@dataclass(frozen=True)
class Sweep:
    """runs: by K. verify: by K, seconds of a pass over K + 1 tokens / over one, measured alone. c and the acceptance
    at each place (alpha): from the run with the largest K."""

    runs: dict[int, Compared]
    c: float
    verify: dict[int, float]
    alpha: list[float]

    def predicted(self, k: int, *, textbook: bool = False) -> float:
        """The speedup; textbook: as if checking K + 1 tokens took no longer than one."""
        return predict.speedup(self.alpha[:k], self.c, verify=1.0 if textbook else self.verify[k])


def sweep(ks: Sequence[int], kind: str = "code", count: int = 2) -> Sweep:
    """The draft model at each K, greedy, one sequence at a time."""
    asked = prompts(kind, count)
    generate(draft_model(), 2, asked[:1], new=4)  # the first run of a process is slow
    plain = generate(None, 1, asked)
    once, *more = pass_seconds([1, *(k + 1 for k in ks)])
    runs = {k: compare(draft_model(), k, plain, asked) for k in ks}
    verify = {k: seconds / once for k, seconds in zip(ks, more, strict=True)}
    longest = runs[max(ks)]
    alpha = longest.run.counts.alpha
    return Sweep(runs, longest.c, verify, alpha + [0.0] * (max(ks) - len(alpha)))


def adaptive(found: Sweep, kind: str = "code") -> Compared:
    """The draft model with a K that follows the acceptance, told what a draft token costs, on the sweep's prompts."""
    plain = next(iter(found.runs.values())).plain
    asked = prompts(kind, len(plain.answers))
    return compare(draft_model(), AdaptiveK(cost=found.c, most=6), plain, asked)


def available() -> Iterator[tuple[str, Proposer | None]]:
    """Every proposer by name; None: its weights are not there."""
    for name in PROPOSERS:
        try:
            yield name, proposer_named(name, pair().target)
        except ValueError:
            yield name, None


def table(kind: str = "code", count: int = 3) -> dict[str, Compared | None]:
    """Every proposer that has its weights, greedy, one sequence at a time."""
    asked = prompts(kind, count)
    plain = generate(None, 1, asked)
    return {name: one and compare(one, K[name], plain, asked) for name, one in available()}


def memory(name: str, proposer: Proposer, tokens: int = PROMPT + NEW) -> dict[str, int]:
    """Bytes that a proposer adds: its own weights (what it shares with the target is not counted), and its keys and
    values for one sequence of so many tokens."""
    target = pair().target
    known = {parameter.data_ptr() for parameter in target.parameters()}
    modules = [x for x in vars(proposer).values() if isinstance(x, torch.nn.Module) and x is not target]
    own = {p.data_ptr(): p.nbytes for module in modules for p in module.parameters() if p.data_ptr() not in known}
    config = getattr(getattr(proposer, "model", None), "config", None)
    layers = config.num_layers if config else 1 if name == "eagle" else 0
    config = config or target.config
    per_token = 2 * layers * config.num_kv_heads * config.head_dim * 4
    return {"weights": sum(own.values()), "keys and values": per_token * tokens}


def by_batch(batches: Sequence[int], k: int = 6) -> dict[int, Compared]:
    """Prompt lookup, greedy, with more and more sequences in a pass (12 at most)."""
    found = {}
    for batch in batches:
        asked = prompts("code", max(2, batch))
        found[batch] = compare(NGram(), k, generate(None, k, asked, batch=batch), asked, batch=batch)
    return found


@torch.no_grad()
def pass_seconds(rows: Sequence[int], repeats: int = 7) -> list[float]:
    """CPU seconds of a pass of the target over so many tokens: least of some repeats."""
    target, found = pair().target, []
    with one_thread():
        for count in rows:
            ids, times = torch.arange(count)[None], []
            for _ in range(repeats):
                started = time.thread_time()
                target(ids)
                times.append(time.thread_time() - started)
            found.append(min(times))
    return found


def replay(tokens: Sequence[int], propose, k: int, start: int = 16) -> int:
    """Passes that write a known text behind its first `start` tokens: each keeps the draft tokens that are right."""
    place, passes = start, 0
    while place < len(tokens):
        drafted = list(propose(list(tokens[:place]), k, 3))[:k]
        right = next((i for i, each in enumerate(drafted) if tokens[place + i : place + i + 1] != [each]), len(drafted))
        place, passes = place + right + 1, passes + 1
    return passes


class Uncached:
    """A model as exercise 3 wants it, all computed anew each time. passes: calls, for one row or more."""

    def __init__(self, model: Transformer, temperature: float = 0.0):
        self.model, self.temperature, self.vocab, self.passes = model, temperature, model.config.vocab_size, 0

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """[vocab], the distribution after tokens."""
        self.passes += 1
        return self._rows(list(tokens), 1)[0]

    def rows(self, tokens: Sequence[int], drafted: Sequence[int] = ()) -> Tensor:
        """[len(drafted) + 1, vocab], in one pass."""
        self.passes += 1
        return self._rows([*tokens, *drafted], len(drafted) + 1)

    @torch.no_grad()
    def _rows(self, tokens: list[int], count: int) -> Tensor:
        logits = self.model(torch.tensor([tokens]))[0, -count:]
        return distributions((logits,), self.temperature)[0]


def preempted(num_blocks: int = 20, k: int = 3) -> dict[str, object]:
    """Four sequences of 8 blocks each in a pool that holds fewer: a sequence that loses its blocks also loses the
    keys of its draft tokens."""
    asked, params = prompts("code", 4), SamplingParams(max_tokens=NEW, ignore_eos=True)
    with one_thread():
        llm = LLM(pair().target, num_blocks=num_blocks, prefix_cache=False, proposer=draft_model(), k=k)
        outputs = llm.generate(asked, params)
    return {
        "answers": [output.answers[0].ids for output in outputs],
        "preemptions": sum(output.preemptions for output in outputs),
        "passes": sum(output.passes for output in outputs),
        "used": llm.pool.used,
    }
