"""Adapters of the target in minillm's engine: tokens beside those of merged models, a cache that forgets adapters."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from course.lab17_adapters.experiments import target
from course.shared.faults import planted
from course.shared.faults import serving as faults
from course.shared.measuring import one_thread
from minillm.adapters import LoraConfig, attach, detach, merge
from minillm.adapters.peft_folder import load_peft, save_peft
from minillm.model import Transformer
from minillm.model.generate import generate
from minillm.serve import LLM, SamplingParams

RANKS = {"red": 4, "green": 8, "blue": 16}
BLOCK, ANSWER = 16, 10
BEGINNING = [random.Random(1).randrange(300, 3800) for _ in range(40)]


@contextmanager
def folders() -> Iterator[dict[str, Path]]:
    """Adapters of three ranks beside all layers of the target, in peft's format. Their numbers are random: an adapter
    that learnt little would leave most greedy tokens as they are."""
    with tempfile.TemporaryDirectory() as root:
        found = {}
        for seed, (name, rank) in enumerate(RANKS.items()):
            model, config = target(), LoraConfig(rank, ("all",), alpha=rank / 2, zero_start=False)
            attach(model, config, seed=seed)
            save_peft(model, config, Path(root, name))
            found[name] = Path(root, name)
        yield found


def merged_model(folder: Path | None) -> Transformer:
    model = target()
    if folder is not None:
        load_peft(model, folder)
        merge(model)
        detach(model)
    return model


@dataclass(frozen=True)
class Answered:
    """One request. adapter: its name; hit: tokens of its prompt from the cache; right: whether its tokens are those of
    the merged model in a plain loop."""

    adapter: str | None
    hit: int
    right: bool


def prompts() -> list[tuple[str | None, list[int]]]:
    """Two requests for each adapter and for the base; all begin with the same 40 tokens."""
    draw = random.Random(2)
    names = [*RANKS, None]
    return [(name, BEGINNING + [draw.randrange(300, 3800) for _ in range(6)]) for name in (*names, *names)]


@cache
@one_thread()
def served(forgets: bool = False) -> tuple[tuple[Answered, ...], int, int]:
    """All prompts through one engine: those of the second half come when the first ones are done. forgets: the adapter
    is missing in the keys of the prefix cache. -> (requests, bytes of the adapters, adapters in the largest step)."""
    asked = prompts()
    half = len(asked) // 2
    with folders() as found:
        with planted((faults.NO_ADAPTER,) if forgets else ()):
            llm = LLM(target(), block_size=BLOCK, num_blocks=64, adapters=found)
            params, outputs = SamplingParams(ANSWER, ignore_eos=True), []
            for part in (asked[:half], asked[half:]):
                outputs += llm.generate([list(p) for _, p in part], params, adapter=[name for name, _ in part])
        models = {name: merged_model(found.get(name)) for name in (*RANKS, None)}
    right = [list(generate(models[name], prompt, ANSWER)) for name, prompt in asked]
    answers = tuple(
        Answered(name, output.hit, output.answers[0].ids == ids)
        for (name, _), output, ids in zip(asked, outputs, right, strict=True)
    )
    return answers, llm.adapters.nbytes, len(RANKS)
