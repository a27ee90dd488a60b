"""What serves the same requests in `bench serve`: minillm's engine, and transformers' Llama in two ways.

    Ours         LLM: paged keys and values, continuous batches, prefix cache
    Static       generate: batches of a fixed size in order of arrival, padded on the left, each as long as its longest
    Continuous   ContinuousBatchingManager: the peer's paged engine, with blocks, seats and budget as ours

All are float32 with the same weights, take the same arrivals at once, and start with empty caches. What does not depend
on the requests (pools, threads, warm-up) is made before the clock starts.
"""

import gc
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from minillm.bench.load import Arrival
from minillm.model import Transformer, save_hf
from minillm.serve import LLM
from minillm.serve.requests.summary import Spread, spread, summary


@dataclass(frozen=True)
class Limits:
    """What the two paged engines may use, the same for both."""

    num_blocks: int = 2048
    block_size: int = 16
    token_budget: int = 512
    max_num_seqs: int = 64


@dataclass(frozen=True)
class Served:
    """One run. answers: token ids in order of arrival, as many as were asked for; ttft, tpot in seconds."""

    answers: list[list[int]]
    seconds: float
    ttft: Spread
    tpot: Spread

    @property
    def tokens_per_s(self) -> float:
        """Useful ones only: what a batch computed beyond the end of an answer counts nothing."""
        return sum(map(len, self.answers)) / self.seconds


@dataclass
class Ours:
    """The engine, made anew for each run. threads: of torch, while it runs."""

    model: Transformer
    limits: Limits
    prefix_cache: bool = True
    threads: int = 1

    def engine(self) -> LLM:
        return LLM(self.model, prefix_cache=self.prefix_cache, **asdict(self.limits))

    def serve(self, arrivals: Sequence[Arrival]) -> Served:
        engine = self.engine()
        outputs = engine.generate([each.prompt for each in arrivals], [each.params for each in arrivals])
        if engine.unfinished or engine.pool.used:
            raise RuntimeError(f"{engine.unfinished} requests and {engine.pool.used} blocks are left after all ended")
        found = summary(outputs)
        return Served([output.answers[0].ids for output in outputs], found.seconds, found.ttft, found.tpot)

    def one_by_one(self, arrivals: Sequence[Arrival]) -> list[tuple[list[int], float]]:
        """(tokens, time to first token) of each, sent when the one before it has ended."""
        engine = self.engine()
        outputs = [engine.generate([each.prompt], each.params)[0] for each in arrivals]
        return [(output.answers[0].ids, output.timing.ttft) for output in outputs]


@dataclass
class Static:
    """transformers' `generate`, `batch_size` requests at a time; every batch runs to its longest answer."""

    model: torch.nn.Module
    batch_size: int
    threads: int = 1

    @property
    def title(self) -> str:
        return f"transformers generate, {self.batch_size} at a time"

    def serve(self, arrivals: Sequence[Arrival]) -> Served:
        answers, ttft, tpot, start = [], [], [], time.perf_counter()
        for index in range(0, len(arrivals), self.batch_size):
            batch = arrivals[index : index + self.batch_size]
            tokens, times = self._generate(batch)
            for row, each in enumerate(batch):
                wanted = each.params.max_tokens
                answers.append(tokens[row, :wanted].tolist())
                ttft.append(times[0] - start)
                if wanted > 1:
                    tpot.append((times[wanted - 1] - times[0]) / (wanted - 1))
        return Served(answers, time.perf_counter() - start, spread(ttft), spread(tpot))

    @torch.inference_mode()
    def _generate(self, batch: Sequence[Arrival]) -> tuple[Tensor, list[float]]:
        """New tokens [batch, longest answer], and when each column was ready."""
        width = max(len(each.prompt) for each in batch)
        padding = [width - len(each.prompt) for each in batch]
        ids = torch.tensor([[0] * pad + each.prompt for pad, each in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        clock = _Clock()
        y = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=max(each.params.max_tokens for each in batch),
            generation_config=_greedy(eos_token_id=None),
            streamer=clock,
        )
        return y[:, width:], clock.times[1:]  # the first call brings the prompt


class _Clock:
    """A streamer that only notes when each token of the batch came."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@dataclass
class Continuous:
    """transformers' continuous batching; it must not run in `torch.inference_mode`, which its thread is not in."""

    model: torch.nn.Module
    limits: Limits
    threads: int = 1
    title = "transformers continuous batching"

    def serve(self, arrivals: Sequence[Arrival]) -> Served:
        from transformers import ContinuousBatchingConfig

        manager = self.model.init_continuous_batching(
            generation_config=_greedy(eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=self.limits.block_size,
                num_blocks=self.limits.num_blocks,
                max_batch_tokens=self.limits.token_budget,
                max_requests_per_batch=self.limits.max_num_seqs,
            ),
        )
        manager.warmup()
        manager.start()
        try:
            start = time.perf_counter()
            names = [
                manager.add_request(each.prompt, max_new_tokens=each.params.max_tokens, record_timestamps=True)
                for each in arrivals
            ]
            found = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the manager's thread ended before its requests")
                if result is not None and result.is_finished():
                    found[result.request_id] = result
            seconds = time.perf_counter() - start
        finally:
            manager.stop(block=True)
            manager.destroy()
        results = [found[name] for name in names]
        ttft = [each.timestamps[0] - start for each in results]
        gaps = [(t[-1] - t[0]) / (len(t) - 1) for t in (each.timestamps for each in results) if len(t) > 1]
        return Served([list(each.generated_tokens) for each in results], seconds, spread(ttft), spread(gaps))


def twin(model: Transformer) -> torch.nn.Module:
    """transformers' Llama with the weights of `model`."""
    from transformers import AutoModelForCausalLM

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="minillm-") as folder:
        save_hf(model, folder)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return peer.to(model.embedding.weight.device).eval()


def _greedy(eos_token_id: int | None):
    """Answers that nothing but their length ends: `generate` says that by None, the manager by -1."""
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, eos_token_id=eos_token_id, pad_token_id=0)


def timed(contestant, arrivals: Sequence[Arrival]) -> Served:
    """A run on the contestant's own number of threads, garbage of the last one collected before."""
    before = torch.get_num_threads()
    gc.collect()
    try:
        torch.set_num_threads(contestant.threads)
        return contestant.serve(arrivals)
    finally:
        torch.set_num_threads(before)
