"""Decoding on two ranks against one of them alone, and against what is predicted from that one; a thread for each.

    tp 2    half of every layer on each rank: a token waits for half of the weights and two all-reduces a layer
    pp 2    half of the layers on each: a token waits as long as before, and two batches are under way

    predicted   tp   seconds alone · (bytes of a rank's weights / of all) + all-reduces · seconds of one such
                pp   each half of the sequences reads a stage's weights for itself, so for all of them
                     2 · seconds alone of half of them · larger stage's bytes / all; of one sequence, seconds alone

"alone" is the same engine on rank 0, while rank 1 waits for a message. Both give the same greedy tokens before anything
is timed. Where ranks share cores or a memory bus, all of them wait for it, which no prediction here knows. The last row
is what rank 0 pays to tell a step.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, seconds_per_call, side_by_side
from minillm.bench.quantize import TARGET, model_of
from minillm.comm import Group, launch
from minillm.model import ModelConfig
from minillm.predict.serving.ranks import NUMBER, message_bytes, step_calls, step_numbers, weight_bytes
from minillm.serve import LLM, SamplingParams, over_ranks
from minillm.serve.ranks.message import Channel

NEW, PROMPT, BLOCKS = 16, 4, 256  # tokens of an answer and of a prompt; blocks of a cache
SEQUENCES = (1, 16)
LAYOUTS = {"tp 2": 1, "pp 2": 2}  # stages of 2 ranks
CALLS = 50  # all-reduces, of which the median counts, and messages, of which the mean does


def run(repeats: int = 7, sizes: Sequence[int] = (TARGET, 1024), timeout: float = 600.0) -> list[BenchRow]:
    """sizes: hidden sizes of random Llamas, 0 = the committed target."""
    check_repeats(repeats)
    rows = []
    for size in sizes:
        name = model_of(size)[0]
        for layout, pp in LAYOUTS.items():
            found = launch(measure, 2, size, pp, repeats, timeout=timeout, device=None)[0]
            for sequences, (measured, predicted) in found.items():
                title = f"decode, {name}, {sequences} sequence{'s' if sequences > 1 else ''}, {layout}"
                for peer, pairs in (("one rank", measured), ("predicted", predicted)):
                    rows.append(bench_row(title, peer, pairs, "ms/token", scale=1e3 / NEW / sequences))
    told = launch(telling, 2, repeats, timeout=timeout)[0]
    rows.append(bench_row(f"a step of {max(SEQUENCES)} sequences, told and answered", "a broadcast", told, "us", 1e6))
    return rows


def measure(group: Group, size: int, pp: int, repeats: int) -> dict[int, tuple[Comparison, Comparison]] | None:
    """On rank 0, for each number of sequences: beside one rank, and beside the prediction made from it."""
    torch.set_num_threads(1)
    model = model_of(size)[1]
    alone, config = copy.deepcopy(model), model.config
    reduces = {count: seconds_of_all_reduce(group, count * config.hidden_size) for count in SEQUENCES}

    def use(llm: LLM) -> dict[int, tuple[Comparison, Comparison]]:
        one, found = LLM(alone, num_blocks=BLOCKS, max_num_seqs=max(SEQUENCES)), {}
        for count in SEQUENCES:
            prompts = [[1 + (number + place) % 60 for place in range(PROMPT)] for number in range(count)]
            measured = side_by_side(
                lambda p=prompts: answers(llm, p) == answers(one, p),
                *(seconds_per_call(lambda e=each, p=prompts: answers(e, p)) for each in (llm, one)),
                repeats=repeats,
            )
            expected = [theirs for _, theirs in measured.pairs]
            if pp > 1 and count > 1:
                half = seconds_per_call(lambda p=prompts[: count // pp]: answers(one, p))
                expected = [pp * half() for _ in measured.pairs]
            waits = number_of_calls(config, count) * reduces[count] * NEW if pp == 1 else 0.0
            share = share_of_weights(config, pp, count)
            pairs = tuple(
                (ours, share * each + waits) for (ours, _), each in zip(measured.pairs, expected, strict=True)
            )
            found[count] = measured, Comparison(measured.correct, pairs)
        return found

    options = {"num_blocks": BLOCKS, "max_num_seqs": max(SEQUENCES)}  # of all stages together
    return over_ranks(group, model, use, pp=pp, **options)


def telling(group: Group, repeats: int) -> Comparison:
    """Seconds until the other rank has answered a step's message: of the engine's channel, and of a broadcast."""
    torch.set_num_threads(1)
    count = max(SEQUENCES)
    channel, numbers = Channel(group), np.arange(step_numbers(count, count, count))
    whole = torch.from_numpy(np.arange(message_bytes(len(numbers)) // NUMBER))

    def by_message() -> bool:
        if group.rank == 0:
            channel.tell(numbers)
            return channel.answers() == [1.0]
        heard = np.array_equal(channel.hear(), numbers)
        channel.answer(heard)
        return heard

    def by_broadcast() -> None:
        group.broadcast(whole, 0)
        channel.answers() if group.rank == 0 else channel.answer(1.0)

    def often(once: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            once()
        return (time.perf_counter() - start) / CALLS

    return side_by_side(by_message, partial(often, by_message), partial(often, by_broadcast), repeats=repeats)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(NEW, ignore_eos=True))
    return [answer.ids for output in outputs for answer in output.answers]


def share_of_weights(config: ModelConfig, pp: int, sequences: int) -> float:
    """Of all weights: what a rank reads for a step, of two stages the longer one; of one sequence, which passes both
    stages, all."""
    if pp == 1:
        return weight_bytes(config, 2, 4) / weight_bytes(config, 1, 4)
    if sequences == 1:
        return 1.0
    layers = config.num_layers
    head = config.vocab_size * config.hidden_size * 4
    of_layers = weight_bytes(config, 1, 4) - head * (1 if config.tie_embeddings else 2)
    return (of_layers * (layers - layers // 2) / layers + head) / (of_layers + head)


def number_of_calls(config: ModelConfig, sequences: int) -> int:
    calls = step_calls(config, 2, sequences, likeliest=sequences)
    return sum(call.count for call in calls)


def seconds_of_all_reduce(group: Group, numbers: int) -> float:
    x, seconds = torch.ones(numbers, device=group.device), []
    for _ in range(CALLS):
        group.barrier()
        start = time.perf_counter()
        group.all_reduce(x)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
