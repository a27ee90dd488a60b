"""What lab 18 measures: an engine on two ranks, a layer over emulated links, a hand-over on a clock; what it simulates.

Links are emulated, and so are layers whose time matters: one that sleeps takes as long on a busy machine as on an idle
one.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from course.kit.answers import answers_of
from course.lab18_distributed_serving.rank_programs import Token
from course.shared.measuring import one_thread, timed
from course.shared.step_cost import FOUR_H100_70B, StepCost
from minillm import measure
from minillm.comm import Group, Link, launch
from minillm.measure.ledger import Ledger
from minillm.model import ModelConfig, load_hf
from minillm.model.generate import folder_of, generate
from minillm.predict import comms
from minillm.predict.serving import handover
from minillm.serve import LLM, SamplingParams, over_ranks

ANSWERS = answers_of("18_distributed_serving")
PROMPT = list(range(300, 324))
TOKENS = 12  # decoded in a measurement
ENGINE = {"num_blocks": 16, "block_size": 16, "prefix_cache": False}


# An engine on two ranks.


@dataclass(frozen=True)
class Served:
    """A prompt answered by the target on two ranks. ids: greedy; parameters that rank 0 holds; per decode step:
    all-reduces, and bytes that rank 0 sent in collectives, to the next stage, and in messages that tell the step."""

    ids: list[int]
    parameters: int
    all_reduces: float
    collectives: float
    hidden: float
    told: float


@dataclass(frozen=True)
class TwoRanks:
    """alone: tokens of a plain loop; shape: of the target; flight: most steps of `pp` under way, with four answers."""

    alone: list[int]
    shape: ModelConfig
    tp: Served
    pp: Served
    flight: int


def answer(llm: LLM, tokens: int, answers: int = 1) -> list[int]:
    return llm.generate([PROMPT], SamplingParams(max_tokens=tokens, n=answers))[0].answers[0].ids


def _serve(group: Group) -> tuple[Served, Served, int] | None:
    def use(llm: LLM) -> tuple[Served, int]:
        with measure.ledger() as first:
            answer(llm, 1)
        with measure.ledger() as whole:
            ids = answer(llm, 1 + TOKENS)
        for number in range(4):
            llm.add(PROMPT[: 8 + number], SamplingParams(max_tokens=4))
        while llm.unfinished:
            llm.step()
        held = sum(each.numel() for each in llm.model.parameters())
        return _per_step(first, whole, ids, held), max(record.in_flight for record in llm.records)

    options = ENGINE | {"dtype": torch.float32}
    tp = over_ranks(group, folder_of("target"), use, **options)
    pp = over_ranks(group, folder_of("target"), use, pp=2, **options)
    return (tp[0], *pp) if group.rank == 0 else None


def _per_step(first: Ledger, whole: Ledger, ids: list[int], held: int) -> Served:
    def more(count: Callable[[Ledger], int]) -> float:
        return (count(whole) - count(first)) / TOKENS

    reduces = more(lambda led: len(led.select("all_reduce")))
    collectives = more(lambda led: led.bytes("all_reduce") + led.bytes("all_gather"))
    hidden = more(lambda led: led.bytes(group="pp"))
    return Served(ids, held, reduces, collectives, hidden, more(Ledger.bytes) - collectives - hidden)


@one_thread()
def two_ranks() -> TwoRanks:
    """The committed target as two tensor-parallel ranks, and as two stages."""
    model = load_hf(folder_of("target"), dtype=torch.float32)
    alone = list(generate(model, PROMPT, max_new_tokens=1 + TOKENS, temperature=0.0))[-1 - TOKENS :]
    tp, pp, flight = launch(_serve, 2, device="cpu")[0]
    return TwoRanks(alone, model.config, tp, pp, flight)


# Over links: a layer's weights take LAYER_S to read, on two ranks half of it, and that is slept.


@dataclass(frozen=True)
class Linked:
    """Seconds per token. link: None for two replicas that know nothing of each other; else two ranks with half of every
    layer each, over it."""

    link: Link | None
    measured: float
    predicted: float


DECODED, DEPTH, READ_S = 1, 4, 0.1  # tokens; layers; seconds to read a layer's weights
LATENCIES = (0.0, 8e-3, 24e-3)  # above the 4 ms to which timers may round
BANDWIDTH = 1e9


def _decode(group: Group, decode_layer: Callable, token: Token, split: bool) -> float:
    """Seconds per token through DEPTH layers. split: over the ranks; else each rank has all of them, and a sequence of
    its own."""
    me = group if split else [group.subgroup([rank], f"replica {rank}") for rank in range(group.world_size)][group.rank]
    _, keys, values, part = (token if split else replace(token, world_size=1)).part(me.rank)
    x = token.x / 10

    def decode() -> None:
        for _ in range(DECODED * DEPTH):
            time.sleep(READ_S / me.world_size)
            decode_layer(x, keys, values, part, me)

    return min(timed(group, decode)[0] for _ in range(3)) / DECODED


def over_links(decode_layer: Callable | None = None) -> list[Linked]:
    """Two replicas, then two ranks of one over links of each latency."""
    decode_layer = decode_layer or ANSWERS.decode_layer
    token = _a_token()
    alone = launch(_decode, 2, decode_layer, token, False, device="cpu")[0]
    found = [Linked(None, alone, token_seconds(None))]
    for latency in LATENCIES:
        link = Link(latency, BANDWIDTH, name="emulated")
        seconds = launch(_decode, 2, decode_layer, token, True, device="cpu", link=link if latency else None)
        found.append(Linked(link, max(seconds), token_seconds(link)))
    return found


def _a_token() -> Token:
    state = random.getstate()
    random.seed(0)
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return Token.draw(2)
    finally:
        random.setstate(state)


def token_seconds(link: Link | None, world_size: int = 2) -> float:
    """Seconds per token: reading the weights, and two all-reduces a layer."""
    if link is None:
        return DEPTH * READ_S
    reduce = comms.ring_all_reduce(_a_token().x.numel(), 8, world_size)
    return DEPTH * (READ_S / world_size + 2 * reduce.time(link.latency_s, link.bandwidth_bytes_per_s))


def slower_from(world_size: int = 2) -> float:
    """The latency in seconds from which two ranks are slower than one: what reading saves over the rounds."""
    rounds = 2 * comms.ring_all_reduce(world_size, 8, world_size).rounds
    return READ_S * (1 - 1 / world_size) / rounds


# A hand-over: its bytes, and its time on a clock.


def slots_of_a_prompt() -> tuple[ModelConfig, int, int]:
    """(shape of the target, tokens of a prompt, bytes of their slots in an engine's pool), in float32."""
    model = load_hf(folder_of("target"), dtype=torch.float32)
    llm = LLM(model, **ENGINE)
    slot = llm.cache.pool[:, :, 0, 0]  # keys and values of every layer, one token of one block
    return model.config, len(PROMPT), len(PROMPT) * slot.nbytes


LAYERS, LAYER_S = 8, 0.02
NUMBERS = 100_000
HAND_LINK = Link(0.0, 4 * NUMBERS / (LAYER_S / 2), name="emulated")  # a layer's keys and values in half of its time


def _hand_over(group: Group, overlap: bool) -> None:
    blocks = [torch.zeros(NUMBERS) for _ in range(LAYERS)]
    if group.rank:
        for layer, block in enumerate(blocks):
            with measure.span(f"{layer}", "comm"):
                group.recv(block, 0)
        return
    sends = []
    for layer, block in enumerate(blocks):
        with measure.span(f"layer {layer}", "compute"):
            time.sleep(LAYER_S)
        if overlap:
            sends.append(group.send(block, 1, async_op=True))
    if not overlap:
        sends = [group.send(block, 1, async_op=True) for block in blocks]
    for send in sends:
        send.wait()


def _hand_over_twice(group: Group) -> dict[str, tuple[float, Ledger]]:
    """The quicker of two runs of each way, which is the same on both ranks."""
    found = {}
    for name in ("at the end", "layer by layer"):
        runs = [timed(group, lambda n=name: _hand_over(group, n == "layer by layer")) for _ in range(2)]
        found[name] = min(runs, key=lambda run: run[0])
    return found


@dataclass(frozen=True)
class Handed:
    """Seconds from the first layer's start until the last one has arrived. ledgers: of the ranks; spans of rank 0 are
    layers, those of rank 1 what it waited for."""

    name: str
    predicted: float
    measured: float
    ledgers: tuple[Ledger, Ledger]

    @property
    def hidden(self) -> float:
        """Share of the transfer's time that passed while layers were computed."""
        compute, transfer = LAYERS * LAYER_S, LAYERS * LAYER_S / 2
        return 1 - (self.measured - compute) / transfer


def handover_on_a_clock() -> list[Handed]:
    ranks_ = launch(_hand_over_twice, 2, link=HAND_LINK, device="cpu")
    compute, transfer = LAYERS * LAYER_S, LAYERS * LAYER_S / 2
    predicted = {"at the end": compute + transfer,
                 "layer by layer": handover.handover_seconds(LAYERS, compute, transfer)}  # fmt: skip
    return [
        Handed(name, predicted[name], ranks_[0][name][0], (ranks_[0][name][1], ranks_[1][name][1]))
        for name in predicted
    ]


# Prompts among decode steps: simulated.


@dataclass(frozen=True)
class Played:
    """One way to serve. boxes: of each step (cards: "decode" or "prefill", start, end, "prompt", "decode" or "both");
    gaps: seconds between two tokens of the sequences that decode; first: TTFT of each prompt, its first token included.
    """

    name: str
    boxes: tuple[tuple[str, float, float, str], ...]
    gaps: tuple[float, ...]
    first: tuple[float, ...]


RUNNING, CONTEXT, LONG, CHUNK = 32, 1000, 8000, 512
ARRIVALS, UNTIL = (0.2, 0.55, 1.6), 3.6
HAND_OVER_S = 8000 * FOUR_H100_70B.kv_bytes / (4 * 50e9)


def interference(cost: StepCost = FOUR_H100_70B) -> list[Played]:
    """The same prompts among the same decode steps: whole, in chunks, and on cards of their own."""
    return [_together("whole prompts", cost, LONG), _together(f"chunks of {CHUNK}", cost, CHUNK), _apart(cost)]


def _together(name: str, cost: StepCost, chunk: int) -> Played:
    now, boxes, gaps, first, last = 0.0, [], [], [], 0.0
    waiting, done = list(ARRIVALS), 0
    running = [(CONTEXT, 1)] * RUNNING
    while now < UNTIL:
        batch, kind = list(running), "decode"
        if waiting and waiting[0] <= now:
            count = min(chunk, LONG - done)
            whole = chunk == LONG
            batch = [(done, count)] if whole else [*running, (done, count)]
            kind, done = ("prompt" if whole else "both"), done + count
        seconds = cost.step(batch)
        boxes.append(("decode", now, now + seconds, kind))
        now += seconds
        if kind != "prompt":
            gaps.append(now - last)
            last = now
        if kind != "decode" and done == LONG:
            first.append(now - waiting.pop(0))
            running, done = [*running, (LONG, 1)], 0
    return Played(name, tuple(boxes), tuple(gaps), tuple(first))


def _apart(cost: StepCost) -> Played:
    """The first token comes of the first decode step after the hand-over: it computes the prompt's last token."""
    boxes, waiting, free = [], [], 0.0
    for arrival in ARRIVALS:
        start = max(arrival, free)
        free = start + cost.step([(0, LONG - 1)])
        boxes.append(("prefill", start, free, "prompt"))
        waiting.append((arrival, free + HAND_OVER_S / 80))  # of the hand-over, layers hide all but the last one's
    now, gaps, first, running = 0.0, [], [], [(CONTEXT, 1)] * RUNNING
    while now < UNTIL:
        joining = [arrival for arrival, handed in waiting if handed <= now]
        waiting = waiting[len(joining) :]
        running += [(LONG - 1, 1)] * len(joining)
        seconds = cost.step(running)
        boxes.append(("decode", now, now + seconds, "decode"))
        now += seconds
        gaps.append(seconds)
        first += [now - arrival for arrival in joining]
    return Played("four more cards prefill", tuple(boxes), tuple(gaps), tuple(first))


def spread(gaps: tuple[float, ...]) -> tuple[float, float]:
    """Median and longest."""
    return statistics.median(gaps), max(gaps)
