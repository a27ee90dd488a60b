"""A decode rank's receiver and its engine against a pool that sends what it likes, when it likes."""

import itertools
import socket
import threading
from dataclasses import replace

import pytest
import torch

from minillm.model.paged import PagedCache
from minillm.quantize.kv import KV_FORMATS
from minillm.serve import LLM, SamplingParams
from minillm.serve.transfer import Layout, PrefillAt, Receiver
from minillm.serve.transfer.rows import bytes_of_head, read_layer, to_bytes, write_layer
from minillm.serve.transfer.wire import Frame, Line, address_of
from tests.engine.serve.ranks.programs import CONFIG, alone, model_of
from tests.engine.serve.transfer.pools import PATIENCE_S, until

GREEDY = SamplingParams(8)
LAYERS, HEADS, HEAD_DIM = 2, 2, 8


class PretendedPool:
    """Of one rank: says yes to everybody and computes nothing. asked: what it was asked for."""

    def __init__(self, layout=None):
        self.listener, self.asked, self.layout = socket.create_server(("127.0.0.1", 0)), [], layout
        self.data, self.lines = None, []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self):
        return address_of(self.listener)

    def _accept(self):
        while True:
            try:
                line = Line(self.listener.accept()[0])
            except OSError:
                return
            self.lines.append(line)
            hello = line.hear(PATIENCE_S)
            if hello["kind"] == "data":
                self.data = line
                line.tell(ready=True)
            else:
                line.tell(addresses=[self.address], layout=hello["layout"] | {"ranks": 1})
                threading.Thread(target=self._hear, args=(line,), daemon=True).start()

    def _hear(self, line):
        while (message := line.hear()) is not None:
            self.asked.append(message)

    def send(self, ticket, layer, first, tokens, value=1e4, heads=HEADS):
        nbytes = 2 * tokens * heads * HEAD_DIM * 4
        content = torch.full((nbytes // 4,), value).view(torch.uint8).numpy()
        self.data.send(Frame(ticket, layer, first, tokens, 0, heads, nbytes).to_bytes(), memoryview(content))

    def close(self):
        self.listener.close()
        for line in self.lines:
            line.close()


@pytest.fixture
def pretended():
    pool = PretendedPool()
    yield pool
    pool.close()


def engine(pretended, **options):
    how = {"block_size": 4, "num_blocks": 6, "max_num_seqs": 2, "token_budget": 16, "prefix_cache": False}
    return LLM(model_of("plain"), prefill=PrefillAt(pretended.address, min_tokens=10, **options), **how)


@pytest.mark.parametrize("ended_by", ["cancelled", "timed out", "preempted"])
def test_a_late_frame_writes_into_no_block_of_somebody_else(pretended, ended_by):
    llm = engine(pretended, timeout_s=1e-3 if ended_by == "timed out" else PATIENCE_S)
    prompt, short = list(range(14)), [5, 6, 7, 8, 9]
    name = llm.add(prompt, GREEDY)
    llm.step()
    if ended_by != "timed out":
        assert llm.scheduler.running[0].ticket
    until(lambda: pretended.asked, "nobody asks")
    [ticket] = [message["ask"] for message in pretended.asked[:1]]
    held = set(llm.scheduler.running[0].blocks)
    if ended_by == "cancelled":
        pretended.send(ticket, 0, 0, 8)  # of layer 0 alone: nothing is whole
        until(lambda: llm.handovers.receiver.late or llm.handovers.receiver._opened[ticket].nbytes[0], "lost")
        llm.cancel(name)
    elif ended_by == "preempted":
        sequence = llm.scheduler.running[0]
        llm.scheduler._preempt(sequence)
        llm.cancel(name)
    outputs, taken, number = [], set(), 0
    other = llm.add(short, GREEDY)
    while llm.unfinished:
        outputs += llm.step()
        taken |= {block for each in llm.scheduler.running for block in each.blocks}
        before = llm.handovers.receiver.late
        if ticket not in llm.handovers._waiting:
            pretended.send(ticket, number % 2, 8 * (number % 2), 6)
            number += 1
            until(lambda before=before: llm.handovers.receiver.late > before, "the frame was not seen")
    answers = {each.request_id: each.answers[0].ids for each in outputs}
    right = alone(model_of("plain"), [(short, GREEDY), (prompt, GREEDY)])
    assert answers[other] == right[0][0]
    assert ended_by != "timed out" or answers[name] == right[1][0]
    assert held & taken, "the blocks that the frames were for were nobody else's"
    assert llm.pool.used == 0 and number
    llm.handovers.close()


def test_what_is_whole_is_kept_and_the_rest_is_computed(pretended):
    """Right keys of 8 tokens, and wrong ones of a layer more, which nobody may use."""
    model, prompt = model_of("plain"), list(range(14))
    source = LLM(model, block_size=4, num_blocks=6, prefix_cache=False)
    source.add(prompt, SamplingParams(4))
    source.step()
    blocks = source.scheduler.running[0].blocks
    llm = engine(pretended)
    llm.add(prompt, GREEDY)
    llm.step()
    until(lambda: pretended.asked, "nobody asks")
    ticket = pretended.asked[0]["ask"]
    slots = torch.tensor([blocks[token // 4] * 4 + token % 4 for token in range(8)])
    for layer in range(LAYERS):
        content = to_bytes(read_layer(source.cache, layer, slots))
        pretended.data.send(Frame(ticket, layer, 0, 8, 0, HEADS, 8 * HEADS * 64).to_bytes(), *content)
    pretended.send(ticket, 0, 8, 5)
    until(lambda: llm.handovers._news, "nothing is whole")
    next(line for line in pretended.lines if line is not pretended.data).tell(failed=ticket, why="no more")
    outputs = []
    while llm.unfinished:
        outputs += llm.step()
    [over] = llm.handovers.handed_over
    assert (over.received, over.asked, over.outcome, over.reason) == (8, 13, "refused", "no more")
    assert over.nbytes == (8 * HEADS * 64,) * LAYERS
    assert outputs[0].answers[0].ids == alone(model, [(prompt, GREEDY)])[0][0]
    assert outputs[0].computed == 14 - 8 + 7 and llm.handovers.recomputed == 5
    llm.handovers.close()


@pytest.mark.parametrize(
    "frame",
    [
        Frame(0, 2, 0, 4, 0, HEADS, 4 * HEADS * 64),  # no such layer
        Frame(0, 0, 4, 4, 0, HEADS, 4 * HEADS * 64),  # tokens before it are missing
        Frame(0, 0, 0, 99, 0, HEADS, 99 * HEADS * 64),  # more than there is room for
        Frame(0, 0, 0, 4, 1, HEADS, 4 * HEADS * 64),  # heads of another rank
        Frame(0, 0, 0, 4, 0, HEADS, 4 * HEADS * 32),  # of another size
    ],
)
def test_a_frame_that_does_not_fit_ends_the_line(pretended, frame):
    llm = engine(pretended)
    prompt = list(range(14))
    llm.add(prompt, GREEDY)
    llm.step()
    until(lambda: pretended.asked, "nobody asks")
    frame = replace(frame, ticket=pretended.asked[0]["ask"])
    pretended.data.send(frame.to_bytes(), bytes(frame.nbytes))
    until(lambda: not llm.handovers.ready, "the line goes on")
    outputs = []
    while llm.unfinished:
        outputs += llm.step()
    assert outputs[0].answers[0].ids == alone(model_of("plain"), [(prompt, GREEDY)])[0][0]
    assert llm.handovers.outcomes == {"gone": 1} and llm.pool.used == 0
    llm.handovers.close()


def test_a_frame_before_its_blocks_waits_for_them(pretended):
    cache = PagedCache(CONFIG, 6, 4)
    layout = Layout.of(CONFIG, cache, "", 1)
    reports, lost = [], []
    receiver = Receiver(cache, layout, 0, lambda *told: reports.append(told), lost.append)
    assert receiver.connect(1, 7, [pretended.address], layout) is None
    for layer in range(LAYERS):
        pretended.send(5, layer, 0, 6, value=2.5)
    receiver.open(5, 3)  # one block of two: not yet
    receiver.open(5, 1)
    assert not reports and not cache.pool.any()
    receiver.start()
    until(lambda: reports, "nothing is whole")
    assert reports == [(5, 6, [6 * HEADS * 64] * LAYERS)]
    filled = {tuple(place) for place in (cache.pool[0, 0, :, :, 0, 0] == 2.5).nonzero().tolist()}
    assert filled == {(3, slot) for slot in range(4)} | {(1, 0), (1, 1)}
    receiver.disconnect()
    assert lost == [1]


@pytest.mark.parametrize("ranks", itertools.product([1, 2, 4, 8], [1, 2, 4, 8]))
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_head_comes_once(ranks, kv_heads):
    prefill, decode = (Layout(2, kv_heads, 8, "", "", each) for each in ranks)
    for rank in range(decode.ranks):
        got = []
        for source, heads in decode.sources(rank, prefill):
            assert set(heads) <= set(prefill.heads_of(source))
            got += heads
        assert sorted(got) == list(decode.heads_of(rank))


def test_heads_are_those_that_the_layers_are_cut_by():
    from minillm.parallel.tensor_parallel.plan import part_of
    from minillm.parallel.tensor_parallel.quantized import shard_of

    for kv_heads, ranks in itertools.product([1, 2, 4], [1, 2, 4]):
        config = replace(CONFIG, num_heads=4, num_kv_heads=kv_heads)
        for rank in range(ranks):
            part = shard_of(part_of(config, "blocks.0.attention.k_proj.weight", rank, ranks))
            size = kv_heads // part.num_shards
            mine = Layout(2, kv_heads, 8, "", "", ranks).heads_of(rank)
            assert mine == range(part.index * size, (part.index + 1) * size)


@pytest.mark.parametrize("kv_format", [None, *KV_FORMATS.values()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_cache_travel_as_they_lie(kv_format, dtype):
    from minillm.serve.transfer.rows import from_bytes

    one, other = (PagedCache(CONFIG, 5, 4, dtype=dtype, format=kv_format) for _ in range(2))
    for pool, _ in one.parts:
        pool.view(torch.uint8).copy_(torch.randint(0, 100, pool.view(torch.uint8).shape))
    slots, there = torch.tensor([3, 9, 18]), torch.tensor([0, 19, 4])
    rows = [part[:, :, 1:] for part in read_layer(one, 1, slots)]
    content = bytearray(b"".join(map(bytes, to_bytes(rows))))
    assert len(content) == 3 * bytes_of_head(one)
    write_layer(other, 1, there, slice(1, 2), from_bytes(other, content, 3, 1))
    for mine, theirs in zip(read_layer(one, 1, slots), read_layer(other, 1, there), strict=True):
        assert torch.equal(mine[:, :, 1].float(), theirs[:, :, 1].float())
        assert not theirs[:, :, 0].float().any()
    assert not any(part.float().any() for part in read_layer(other, 0, torch.arange(20)))
