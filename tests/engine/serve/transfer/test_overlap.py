"""Keys leave while later layers compute: in what order, and how much of it is hidden on an emulated wire."""

import socket
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minillm.comm import Link
from minillm.model.paged import PagedCache
from minillm.serve.transfer import Layout, Receipt, Sender, send
from minillm.serve.transfer.wire import Frame, Line
from tests.engine.serve.ranks.programs import CONFIG

LAYERS = 8
DEEP = replace(CONFIG, num_layers=LAYERS)
LAYER_BYTES = 2 * 2 * 8 * 4 * 6  # of 6 tokens


class Clock:
    """Time that only the layers take: a second each."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        pass


def step_of(tokens, ticket=3):
    return SimpleNamespace(
        sends=np.array([ticket, 0, 0, 0]), starts=np.array([0]), counts=np.array([tokens]), rows=np.array([1])
    )


@pytest.fixture
def lines():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = Line(socket.create_connection(listener.getsockname()))
        theirs = Line(listener.accept()[0])
    yield mine, theirs
    mine.close()
    theirs.close()


def run(monkeypatch, lines, link, frames_read=lambda layer, line: None):
    """A pass of LAYERS layers over 6 tokens in blocks 4 and 2; its receipt."""
    clock = Clock()
    monkeypatch.setattr(send, "time", clock)
    cache = PagedCache(DEEP, 6, 4)
    sender = Sender(cache, Layout.of(DEEP, cache, "", 1), 0, link)
    outlet = sender.connect(0, lines[0], range(2))

    def attention(q, k, v, *, layer, **options):
        cache.pool[:, layer] = layer + 1.0
        clock.now += 1
        return q

    following = sender.following(attention, step_of(6), np.array([[0, 0], [4, 2]]))
    for layer in range(LAYERS):
        q = torch.zeros(1)
        assert following(q, q, q, layer=layer, positions=None, window=None) is q
        cache.pool[:, layer] = -1.0  # whoever gets the blocks next writes into them at once
        frames_read(layer, lines[1])
    over = []
    sender.after_all(0, lambda: over.append(True))
    sender.disconnect(0, outlet)
    assert over and sender.staged_bytes == 0
    return Receipt.of(3, sender.sent[3], LAYERS)


def read(layer, line):
    frame = Frame.of(line)
    assert frame == Frame(3, layer, 0, 6, 0, 2, LAYER_BYTES)
    content = torch.frombuffer(line.read(frame.nbytes), dtype=torch.float32)
    assert (content == layer + 1.0).all()


def test_a_layer_arrives_before_the_next_one_is_computed(monkeypatch, lines):
    receipt = run(monkeypatch, lines, None, read)
    assert receipt.nbytes == (LAYER_BYTES,) * LAYERS
    assert receipt.began_early


@pytest.mark.parametrize(("share", "hidden"), [(0.5, 7 / 8), (1.0, 7 / 8), (2.0, 7 / 16)])
def test_what_an_emulated_wire_hides_behind_layers(monkeypatch, lines, share, hidden):
    """share: seconds of the wire for each second of a layer."""
    receipt = run(monkeypatch, lines, Link(0.25, LAYER_BYTES / share))
    assert receipt.sending_s == pytest.approx(LAYERS * share)
    assert receipt.hidden_s / receipt.sending_s == pytest.approx(hidden)
    assert receipt.began_early
