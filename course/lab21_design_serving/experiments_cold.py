"""Lab 21: the first request and the hundredth, on this machine, in a process that has served nothing yet."""

import random
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from minillm.model import load_hf
from minillm.model.generate import folder_of
from minillm.serve import LLM, SamplingParams

PROMPT, ANSWER, REQUESTS = 200, 4, 100


def served(requests: int = REQUESTS) -> list[float]:
    """Seconds of so many requests, one after the other, then of the last prompt once more. Each prompt is another."""
    torch.set_num_threads(1)
    model, draw = load_hf(folder_of("draft"), dtype=torch.float32), random.Random(21)
    llm, params = LLM(model, num_blocks=16 * requests), SamplingParams(ANSWER, ignore_eos=True)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(PROMPT)] for _ in range(requests)]
    seconds = []
    for prompt in [*prompts, prompts[-1]]:
        start = time.perf_counter()
        llm.generate([prompt], params)
        seconds.append(time.perf_counter() - start)
    return seconds


def in_a_new_process(requests: int = REQUESTS) -> list[float]:
    """`served` in an interpreter of its own, so that nothing is warm."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(served, requests).result()
