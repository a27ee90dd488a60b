"""Speculative decoding: every proposer against minillm without one, and against transformers' assisted generation.

Both sides write the same greedy tokens with the same weights in float32 on one thread; that is checked before anything
is timed. Two kinds of text: code that no model was trained on, and prose, the long docstrings of the same files. Rows:

    draft, code, batch 1          tokens/s with the proposer, and of minillm without: what speculation brings, or costs
    draft and ngram               the same against assisted generation (`assistant_model`, `prompt_lookup_num_tokens`)
    tokens per pass, speedup      measured, beside `minillm.predict.serving.speculation` (`speculate_formulas.py`)

transformers assists one sequence at a time, so its batch of 8 is 8 runs. Answers of one length, no end-of-text.
"""

import ast
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from minillm.bench.harness import BenchRow, Sample, bench_row, check_repeats, side_by_side
from minillm.bench.speculate_formulas import formula_rows
from minillm.data import Tokenizer, corpus
from minillm.model import Transformer, load_hf
from minillm.model.generate import folder_of, generate
from minillm.serve import LLM, Output, SamplingParams
from minillm.serve.speculate.registry import PROPOSERS, proposer_named

KINDS, BATCHES = ("code", "prose"), (1, 8)
K = {"draft": 3, "ngram": 7, "medusa": 3, "eagle": 3, "lookahead": 3, "early-exit": 3}  # 4 and 8 rows suit the CPU
PROMPTS, ALONE, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 96, 64  # ALONE: prompts where the batch is 1
PLAIN = "minillm without guesses"


@dataclass
class Pair:
    """The committed target, in float32, and its tokenizer."""

    target: Transformer
    tokenizer: Tokenizer


def run(
    repeats: int = 5, proposers: Sequence[str] = tuple(PROPOSERS), peers: bool = True, device: str | None = None
) -> list[BenchRow]:
    """For each text and batch: a row per proposer, transformers' two, and the formulas' for the draft model.

    peers: False leaves transformers out. device: None = a GPU if there is one; the peers run on the CPU only.
    """
    check_repeats(repeats)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    peers = peers and device == "cpu"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        folder = folder_of("target")
        pair = Pair(load_hf(folder, device=device, dtype=torch.float32), Tokenizer.load(folder))
        return [row for kind in KINDS for row in _rows(pair, kind, repeats, proposers, peers)]
    finally:
        torch.set_num_threads(threads)


def _rows(pair: Pair, kind: str, repeats: int, proposers: Sequence[str], peers: bool) -> Iterator[BenchRow]:
    texts = prompts(kind, pair.tokenizer)
    right = [list(generate(pair.target, prompt, NEW_TOKENS)) for prompt in texts]
    for batch in BATCHES:
        count = max(batch, ALONE)
        which = (texts[:count], right[:count], repeats, proposers, peers)
        yield from _batch_rows(pair, f"{kind}, batch {batch}", batch, *which)


def _batch_rows(
    pair: Pair,
    where: str,
    batch: int,
    texts: list[list[int]],
    right: list[list[int]],
    repeats: int,
    proposers: Sequence[str],
    peers: bool,
) -> Iterator[BenchRow]:
    plain = _timed(partial(serve, _engine(pair, None), texts, batch), texts)
    groups = [texts[start : start + batch] for start in range(0, len(texts), batch)]
    for name in proposers:
        llm = _engine(pair, name)
        ours = partial(serve, llm, texts, batch)
        check = lambda work=ours: [output.answers[0].ids for output in work()] == right  # noqa: E731
        label = f"{name}, k {K[name]}, {where}"
        found = side_by_side(check, _timed(ours, texts), plain, repeats, warmup=1)
        yield bench_row(label, PLAIN, found, "tokens/s", higher_is_better=True)
        if name == "draft":
            yield from formula_rows(pair.target, llm.speculation.proposer, K[name], groups, NEW_TOKENS, label, found)
        for build in PEERS.get(name, ()) if peers else ():
            peer, theirs = build(texts)
            same = lambda a=check, b=theirs: a() and b() == right  # noqa: E731
            against = side_by_side(same, _timed(ours, texts), _timed(theirs, texts), repeats, warmup=1)
            yield bench_row(label, peer, against, "tokens/s", higher_is_better=True)


def prompts(kind: str, tokenizer: Tokenizer, count: int | None = None) -> list[list[int]]:
    """`count` (None: PROMPTS) pieces of "code" or "prose", PROMPT_TOKENS long, the same ones for the same Python."""
    documents = sorted(corpus().documents("validation"), key=lambda document: document.name)
    texts = [d.text for d in documents] if kind == "code" else [t for d in documents for t in _docstrings(d.text)]
    first = PROMPT_TOKENS if kind == "code" else 0  # behind a file's licence and docstring
    pieces = []
    for text in texts:
        ids = tokenizer.encode(text[: 40 * PROMPT_TOKENS])
        starts = range(first, len(ids) - PROMPT_TOKENS + 1, 4 * PROMPT_TOKENS)
        pieces += [ids[start : start + PROMPT_TOKENS] for start in starts]
    return random.Random(0).sample(pieces, count or PROMPTS)


def serve(llm: LLM, texts: list[list[int]], batch: int) -> list[Output]:
    """The texts' answers, `batch` of them at a time."""
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    groups = [texts[start : start + batch] for start in range(0, len(texts), batch)]
    return [output for group in groups for output in llm.generate(group, params)]


def _engine(pair: Pair, name: str | None) -> LLM:
    """Without prefix cache: a run must not gain from the one before it."""
    if name is None:
        return LLM(pair.target, prefix_cache=False)
    return LLM(pair.target, prefix_cache=False, proposer=proposer_named(name, pair.target), k=K[name])


def _timed(work: Callable[[], list], texts: list[list[int]]) -> Sample:
    """Tokens per second of all answers; prompts are computed on both sides."""

    def sample() -> float:
        start = time.perf_counter()
        work()
        return len(texts) * NEW_TOKENS / (time.perf_counter() - start)

    return sample


def _assisted(texts: list[list[int]]) -> tuple[str, Callable[[], list[list[int]]]]:
    """transformers with the same draft and as many guesses; its own schedule of guesses is switched off."""
    import transformers

    folders = folder_of("target"), folder_of("draft")
    load = transformers.AutoModelForCausalLM.from_pretrained
    target, draft = (load(folder, dtype=torch.float32).eval() for folder in folders)
    draft.generation_config.num_assistant_tokens = K["draft"]
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return "transformers, assistant_model", partial(_theirs, target, texts, assistant_model=draft)


def _looked_up(texts: list[list[int]]) -> tuple[str, Callable[[], list[list[int]]]]:
    import transformers

    target = transformers.AutoModelForCausalLM.from_pretrained(folder_of("target"), dtype=torch.float32).eval()
    return "transformers, prompt lookup", partial(_theirs, target, texts, prompt_lookup_num_tokens=K["ngram"])


PEERS = {"draft": (_assisted,), "ngram": (_looked_up, _assisted)}


@torch.no_grad()
def _theirs(model, texts: list[list[int]], **options) -> list[list[int]]:
    common = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    return [
        model.generate(torch.tensor([text]), attention_mask=torch.ones(1, len(text)), **common, **options)[0].tolist()[
            len(text) :
        ]
        for text in texts
    ]


def _docstrings(text: str) -> Iterator[str]:
    """Docstrings with enough words for a prompt."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            found = ast.get_docstring(node)
            if found and len(found) > 4 * PROMPT_TOKENS:
                yield found
