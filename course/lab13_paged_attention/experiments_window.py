"""Lab 13: a sliding window bounds what a sequence holds, if blocks behind it are given back."""

from dataclasses import dataclass

from course.shared.measuring import one_thread
from minillm.model import ModelConfig, Transformer
from minillm.model.generate import generate
from minillm.predict.model import windowed_blocks
from minillm.serve import LLM, SamplingParams

BLOCK = 16


@dataclass(frozen=True)
class Windowed:
    """Blocks that a sequence holds at most, by formula and counted; equal: whether its tokens are the plain loop's."""

    window: int | None
    expected: int
    held: int
    equal: bool


@one_thread()
def most_held(window: int | None, prompt: int = 60, answer: int = 80) -> Windowed:
    """One sequence through a small random model whose layers all have this window (None: they see everything)."""
    config = ModelConfig(61, 32, 64, 2, 4, 2, max_seq_len=512, init_std=0.2, sliding_window=window)
    model, tokens = Transformer(config, seed=0), [7 * place % 61 for place in range(prompt)]
    llm = LLM(model, num_blocks=32, block_size=BLOCK, prefix_cache=False)
    [output] = llm.generate([tokens], SamplingParams(answer, ignore_eos=True))
    written = prompt + answer - 1  # the last token has no key
    expected = -(-written // BLOCK) if window is None else windowed_blocks(window, BLOCK)
    equal = output.answers[0].ids == list(generate(model, tokens, answer))
    return Windowed(window, expected, max(record.used for record in llm.records), equal)
