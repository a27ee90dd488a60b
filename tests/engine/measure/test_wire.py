"""The loopback witness: real bytes over a real socket, and one clear error where there is nothing to read."""

import socket
import threading
from types import SimpleNamespace

import psutil
import pytest

from minillm.measure import wire

MEBIBYTE = 2**20


def talk(payload):
    """Sends `payload` bytes through a TCP connection on loopback and waits until they have arrived."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        arrived = []

        def listen():
            connection, _ = server.accept()
            with connection:
                while block := connection.recv(65536):
                    arrived.append(len(block))

        listener = threading.Thread(target=listen)
        listener.start()
        with socket.create_connection(server.getsockname()) as sender:
            sender.sendall(b"x" * payload)
        listener.join()
    return sum(arrived)


@pytest.mark.wire
def test_sees_what_a_socket_sends_and_stands_still_afterwards():
    with wire() as w:
        assert talk(8 * MEBIBYTE) == 8 * MEBIBYTE
        inside = w.sent
    after = w.sent
    assert 8 * MEBIBYTE <= inside <= after
    assert w.packets > 0
    talk(MEBIBYTE)
    assert w.sent == after
    with w:  # used again, it starts again from zero
        talk(MEBIBYTE)
    assert MEBIBYTE <= w.sent < 8 * MEBIBYTE


def test_counts_only_the_named_interface(monkeypatch):
    readings = iter([(100, 1), (100, 1), (1100, 3)])

    def counters(pernic):
        sent, packets = next(readings)
        return {"lo7": SimpleNamespace(bytes_sent=sent, packets_sent=packets)}

    monkeypatch.setattr(psutil, "net_io_counters", counters)
    with wire("lo7") as w:
        pass
    assert (w.interface, w.sent, w.packets) == ("lo7", 1000, 2)


def test_finds_loopback_by_address_not_by_name(monkeypatch):
    address = lambda text: [SimpleNamespace(address=text)]  # noqa: E731
    cards = {"eth0": address("10.0.0.1"), "mac": address("aa:bb:cc:dd:ee:ff"), "odd": address("127.0.0.1")}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(
        psutil, "net_io_counters", lambda pernic: {"odd": SimpleNamespace(bytes_sent=0, packets_sent=0)}
    )
    assert wire().interface == "odd"
    cards.pop("odd")
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1"):
        wire()


def test_errors_are_one_clear_sentence(monkeypatch):
    with pytest.raises(RuntimeError, match="no counters for interface 'nowhere'"):
        wire("nowhere")
    with pytest.raises(RuntimeError, match="inside or after"):
        _ = wire().sent

    def blocked(pernic):
        raise PermissionError("/proc/net/dev")

    monkeypatch.setattr(psutil, "net_io_counters", blocked)
    with pytest.raises(RuntimeError, match="shows no network counters"):
        wire("lo")
