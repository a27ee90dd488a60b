"""Lab 13: what neither a key nor a count sees. Weights that change under a warm cache, a flipped bit in it, and two
threads in one pool."""

import contextlib
import copy
import threading
import zlib
from typing import Any

import torch

from course.kit.answers import answers_of
from course.lab13_paged_attention.experiments import cut, target
from course.shared.measuring import one_thread
from minillm.serve import LLM, Output, SamplingParams

ANSWERS = answers_of("13_paged_attention")


@one_thread()
def new_weights(prompt: int = 64, answer: int = 24) -> dict[str, Any]:
    """The same prompt before and after every weight has changed, its keys cached in between.

    hit: prompt tokens taken from the cache. equal: whether the answer is that of an engine which has only seen the new
    weights; with a salt of their own, too.
    """
    tokens, params = cut(prompt, 1), SamplingParams(answer, ignore_eos=True)
    model = copy.deepcopy(target())
    llm = LLM(model, num_blocks=32)
    _answer(llm, tokens, params)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * weight.std(correction=0) * torch.randn(weight.shape, generator=draw)
    right = _answer(LLM(model, num_blocks=32), tokens, params)
    both = [_answer(llm, tokens, params, salt) for salt in (None, "version 2")]
    equal = tuple(each.answers[0].ids == right.answers[0].ids for each in both)
    return {"hit": tuple(each.hit for each in both), "equal": equal}


def _answer(llm: LLM, tokens: list[int], params: SamplingParams, salt: str | None = None) -> Output:
    llm.add(tokens, params, salt=salt)
    while llm.unfinished:
        ended = llm.step()
    return ended[0]


@one_thread()
def flipped_bits(prompt: int = 64, answer: int = 8, bits: tuple[int, ...] = (0, 20, 26, 30)) -> dict[str, Any]:
    """One bit of one cached key flipped, another each time (30: the exponent's highest).

    changed: how many answers became others. named: how many of the damaged blocks their checksums name, and no other.
    repaired: how many answers are right again after the cache has been emptied.
    """
    tokens, params = cut(prompt, 1), SamplingParams(answer, ignore_eos=True)
    changed, named, repaired = 0, 0, 0
    for bit in bits:
        llm = LLM(target(), num_blocks=32)
        right = _answer(llm, tokens, params).answers[0].ids
        sums, damaged = _checksums(llm), 1  # the prompt's second block: the pool hands out block 0, 1, ...
        keys, _ = llm.cache.layers[len(llm.cache.layers) // 2]
        keys[damaged].view(torch.int32)[3, 0, 5] ^= 1 << bit
        found = _checksums(llm)
        named += [block for block in sums if sums[block] != found[block]] == [damaged]
        changed += _answer(llm, tokens, params).answers[0].ids != right
        llm.pool.reset()
        repaired += _answer(llm, tokens, params).answers[0].ids == right
    return {"changed": changed, "named": named, "of": len(bits), "repaired": repaired}


def _checksums(llm: LLM) -> dict[int, int]:
    """CRC-32 of the keys and values of each block, in all layers."""
    pool = llm.cache.pool  # [keys and values, layers, blocks, block_size, kv_heads, head_dim]
    return {block: zlib.crc32(pool[:, :, block].contiguous().numpy()) for block in range(pool.shape[2])}


class Interleaved(list):
    """Every read waits until a second thread has read as well, for as long as nobody is late: the worst schedule."""

    def __init__(self, values: list, timeout_s: float = 0.1):
        super().__init__(values)
        self.meeting, self.timeout_s = threading.Barrier(2), timeout_s

    def __getitem__(self, place: int) -> Any:
        value = super().__getitem__(place)
        with contextlib.suppress(threading.BrokenBarrierError):  # the other thread waits for a lock
            self.meeting.wait(self.timeout_s)
        return value


def holders(lock: bool) -> int:
    """The count of a block of one holder after two threads have shared it at the same time."""
    pool, guard = ANSWERS.Pool(2), threading.Lock()
    block = pool.allocate()
    pool.references = Interleaved(pool.references)

    def share() -> None:
        if lock:
            with guard:
                pool.share(block)
        else:
            pool.share(block)

    threads = [threading.Thread(target=share) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(pool.references)[block]
