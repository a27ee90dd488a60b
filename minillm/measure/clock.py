"""When something happened, on a CPU or on a GPU.

A GPU works off a queue: the host's clock around a call tells when work was *queued*. So where this process uses CUDA a
moment is a CUDA event in the current stream: the time at which the device gets there. Nothing waits when it is taken;
`seconds` waits for the event when the number is read. To put both on one time line, `anchor` pairs the two clocks once,
with the device idle. Without CUDA a moment is `time.monotonic()` seconds, one clock for all ranks of a machine.
"""

import sys
import time


class DeviceMoment:
    """A CUDA event just recorded in the current stream."""

    def __init__(self, anchored: "tuple[object, float]") -> None:
        import torch

        self._anchored = anchored
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds(self) -> float:
        """When the device got there, on the scale of `time.monotonic()`. Waits for the device."""
        self._event.synchronize()
        first, host = self._anchored
        return host + first.elapsed_time(self._event) / 1e3


Moment = float | DeviceMoment
ANCHOR_S = 300.0  # for how long two clocks count as running alike
_anchors: dict[int, tuple[object, float]] = {}  # device -> an event and the host's time when it happened


def moment() -> Moment:
    """Now: of the current CUDA stream if this process uses CUDA, else of the host."""
    if not _uses_cuda():
        return time.monotonic()
    import torch

    device = torch.cuda.current_device()
    if device not in _anchors:
        anchor()
    return DeviceMoment(_anchors[device])


def seconds(of: Moment) -> float:
    """A moment as `time.monotonic()` seconds."""
    return of if isinstance(of, float | int) else of.seconds()


def anchor() -> None:
    """Pair the device's clock with the host's, which waits for the device: every few minutes, since they drift."""
    if not _uses_cuda():
        return
    import torch

    _, before = _anchors.get(torch.cuda.current_device(), (None, -ANCHOR_S))
    if time.monotonic() - before < ANCHOR_S:
        return
    torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    _anchors[torch.cuda.current_device()] = event, time.monotonic()


def _uses_cuda() -> bool:
    """False also while a CUDA graph is captured: its events have no time, and nothing may wait."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
