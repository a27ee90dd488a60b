"""`bench serve --model FOLDER`: decoding of 1, 16, 64 and 256 sequences against the roofline of the device, and peers.

    roofline    the longer of two times: all weights and all keys and values so far read once at the measured bandwidth,
                or all products computed at the measured peak
    peers       transformers' `generate`, vLLM and nano-vllm, where they are installed: useful tokens per second of
                whole answers, from the same weights, prompts and lengths

The model is in a Hugging Face folder, or drawn at random in one of `shapes.py`. The roofline's rows time a window of
steps in which every sequence decodes; the peers' rows take prompts and answers whole. Random weights have many next
tokens that are about equally likely, so answers may part where two logits are closer than rounding, and only there.
"""

import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from minillm.bench.harness import BenchRow, Comparison, bench_row, check_repeats, side_by_side
from minillm.bench.load import Arrival, uniform
from minillm.bench.serve_installed import VLLM, NanoVLLM, unavailable
from minillm.bench.serve_peers import Limits, Served, Static
from minillm.bench.shapes import model_of
from minillm.data import Tokenizer
from minillm.measure import machine
from minillm.model import Transformer, save_hf
from minillm.predict.model import kv_bytes_per_token, matmul_parameters
from minillm.serve import LLM, SamplingParams
from minillm.serve.requests.summary import summary

STREAMS = (1, 16, 64, 256)
PROMPT, ANSWER = 128, 64  # tokens
WARM_UP, STEPS = 8, 32
BLOCK_SIZE, TOKEN_BUDGET = 16, 8192


def rows(source: str, repeats: int = 5, streams: Sequence[int] = STREAMS, device: str | None = None) -> list[BenchRow]:
    """Of the model in a folder, or of a shape's name; on a GPU in bfloat16, on the CPU in float32."""
    check_repeats(repeats)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    model = model_of(source, where, dtype)
    name = Path(source).name
    engine, found = make_engine(model, max(streams)), []
    for number in streams:
        found.append(roofline_row(f"{name}, {number} sequences decode", engine, number, repeats))
    trace = {number: arrivals(number, model.config.vocab_size) for number in streams}
    for make in (transformers_peer, vllm_peer, nano_vllm_peer):
        try:
            with make(model, max(streams)) as peer:
                if peer is not None:
                    found += [peer_row(name, engine, peer, each, repeats) for each in trace.values()]
        except Exception as error:  # of a peer: the other rows are worth having
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            found.append(BenchRow(f"{name}: {why}", make.__name__, None, None, "tokens/s", None, None, 0, False))
    return found


def make_engine(model: Transformer, sequences: int) -> LLM:
    """With blocks for so many sequences of PROMPT + ANSWER tokens, and no prefix cache: prompts come again."""
    blocks = sequences * -(-(PROMPT + ANSWER + WARM_UP) // BLOCK_SIZE)
    limits = {"max_num_seqs": sequences, "token_budget": max(TOKEN_BUDGET, sequences)}
    return LLM(model, num_blocks=blocks, block_size=BLOCK_SIZE, prefix_cache=False, **limits)


def roofline_row(label: str, engine: LLM, sequences: int, repeats: int) -> BenchRow:
    model = engine.model
    bound = sequences / roofline_s(model, sequences, PROMPT + WARM_UP + STEPS / 2)
    pairs = [(sequences / seconds_per_step(engine, sequences), bound) for _ in range(1 + repeats)][1:]
    rate, peak = rates(model)
    peer = f"roofline: {rate / 1e9:,.0f} GB/s, {peak / 1e12:,.3g} TFLOP/s (measured)"
    return bench_row(label, peer, Comparison(True, tuple(pairs)), "tokens/s", higher_is_better=True)


def seconds_per_step(engine: LLM, sequences: int) -> float:
    """Mean of STEPS steps in which so many sequences decode, each one token."""
    vocab_size, device = engine.model.config.vocab_size, engine.model.embedding.weight.device
    prefill = math.ceil(sequences * PROMPT / TOKEN_BUDGET) + 1
    longest = prefill + WARM_UP + STEPS + 1
    for number in range(sequences):
        prompt = [(7 * number + 3 * place) % vocab_size for place in range(PROMPT)]
        engine.add(prompt, SamplingParams(max_tokens=longest, ignore_eos=True))
    for _ in range(prefill + WARM_UP):
        engine.step()
    settle(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    settle(device)
    seconds = (time.perf_counter() - start) / STEPS
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    if len(outputs) != sequences or any(output.error for output in outputs):
        why = next((output.error for output in outputs if output.error), "some ended too early")
        raise RuntimeError(f"{len(outputs)} of {sequences} sequences ended as they should: {why}")
    return seconds


def roofline_s(model: Transformer, sequences: int, context: float) -> float:
    """The least seconds of a step. context: keys that each sequence attends to."""
    config, itemsize = model.config, model.embedding.weight.element_size()
    rate, peak = rates(model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not config.tie_embeddings:
        weights -= model.embedding.weight.nbytes  # of which a step reads a row for each sequence
    keys = sequences * context * kv_bytes_per_token(config, itemsize)
    return max((weights + keys) / rate, 2 * matmul_parameters(config) * sequences / peak)


def rates(model: Transformer) -> tuple[float, float]:
    """Bytes/s and FLOP/s in the model's dtype, of its device."""
    card, weight = machine(), model.embedding.weight
    if not weight.is_cuda:
        return card.memory_bandwidth_bytes_per_s, card.peak_flops
    peak = card.gpu.peak_flops_bf16 if weight.dtype == torch.bfloat16 else card.gpu.peak_flops_fp32
    return card.gpu.memory_bandwidth_bytes_per_s, peak


def arrivals(number: int, vocab_size: int) -> list[Arrival]:
    return uniform(number, max_tokens=ANSWER, prompt_tokens=PROMPT, vocab_size=vocab_size)


def peer_row(name: str, engine: LLM, peer: "Peer", trace: Sequence[Arrival], repeats: int) -> BenchRow:
    def ours() -> Served:
        outputs = engine.generate([each.prompt for each in trace], [each.params for each in trace])
        found = summary(outputs)
        return Served([output.answers[0].ids for output in outputs], found.seconds, found.ttft, found.tpot)

    found = side_by_side(
        lambda: alike(engine.model, trace, ours(), peer.serve(trace)),
        lambda: ours().tokens_per_s,
        lambda: peer.serve(trace).tokens_per_s,
        repeats,
        warmup=1,
    )
    label = f"{name}, {len(trace)} answers of {ANSWER} tokens to prompts of {PROMPT}"
    return bench_row(label, peer.title, found, "tokens/s", higher_is_better=True)


@torch.no_grad()
def alike(model: Transformer, trace: Sequence[Arrival], mine: Served, other: Served) -> bool:
    """Whether answers have the lengths asked for, and part only where rounding decides between two tokens."""
    rounding = 8 * torch.finfo(model.embedding.weight.dtype).eps
    for arrival, a, b in zip(trace, mine.answers, other.answers, strict=True):
        if not len(a) == len(b) == arrival.params.max_tokens:
            return False
        at = next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is not None:
            tokens = torch.tensor([arrival.prompt + a[:at]], device=model.embedding.weight.device)
            logits = model(tokens)[0, -1].float()
            if float(logits.max() - logits[[a[at], b[at]]].min()) > rounding * float(logits.abs().max()):
                return False
    return True


# Peers: each is made with the same weights, and its memory goes back when its rows are done.


class Peer(Protocol):
    title: str

    def serve(self, arrivals: Sequence[Arrival]) -> Served: ...


@contextmanager
def transformers_peer(model: Transformer, sequences: int) -> Iterator[Peer | None]:
    if unavailable()["transformers"]:
        yield None
        return
    from transformers import AutoModelForCausalLM

    weight = model.embedding.weight
    with saved(model) as folder:
        twin = AutoModelForCausalLM.from_pretrained(folder, dtype=weight.dtype, attn_implementation="sdpa")
    yield Static(twin.to(weight.device).eval(), sequences)
    forget(twin)


@contextmanager
def vllm_peer(model: Transformer, sequences: int) -> Iterator[Peer | None]:
    if unavailable()["vLLM"]:
        yield None
        return
    limits = Limits(None, BLOCK_SIZE, TOKEN_BUDGET, sequences)
    with saved(model) as folder:
        peer = VLLM(folder, limits, PROMPT + ANSWER, dtype="bfloat16", gpu_memory_utilization=0.4)
    yield peer
    forget(peer.engine)


@contextmanager
def nano_vllm_peer(model: Transformer, sequences: int) -> Iterator[Peer | None]:
    if unavailable()["nano-vllm"] or not model.config.qk_norm:  # it reads Qwen3 only
        yield None
        return
    with saved(model) as folder:
        peer = NanoVLLM(folder, sequences, PROMPT + ANSWER)
    yield peer
    forget(peer.engine)


@contextmanager
def saved(model: Transformer) -> Iterator[str]:
    """A folder with the weights, and the course's tokenizer, which some peers insist on."""
    with tempfile.TemporaryDirectory(prefix="minillm-bench-") as folder:
        save_hf(model, folder)
        Tokenizer.load().save(Path(folder, "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(kind))
        yield folder


def forget(engine: object) -> None:
    if hasattr(engine, "exit"):
        engine.exit()
    settle(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
