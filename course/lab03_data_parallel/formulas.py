"""Lab 03's closed forms of time: backward and communication, one after the other or overlapped."""

from collections.abc import Sequence


def naive_seconds(backward_s: float, comm_s: float) -> float:
    """All communication after backward: the sum."""
    return backward_s + comm_s


def overlapped_seconds(backward_s: float, comm_s: float, last_bucket_s: float) -> float:
    """max(backward, communication) + last bucket: the last one is ready only when backward ends, whatever was hidden
    before. For equal buckets exact where backward dominates, else too much by the part of a bucket; `reduction_times`
    is exact for buckets of known sizes."""
    return max(backward_s, comm_s) + last_bucket_s


def reduction_times(ready_s: Sequence[float], comm_s: Sequence[float]) -> list[tuple[float, float]]:
    """(start, end) of each bucket's reduction, one at a time and in order: it starts when its gradients are ready and
    the one before has ended. ready_s: since backward began; comm_s: what each takes."""
    ends, times = 0.0, []
    for ready, seconds in zip(ready_s, comm_s, strict=True):
        start = max(ready, ends)
        ends = start + seconds
        times.append((start, ends))
    return times


def hidden_share(step_s: float, backward_s: float, comm_s: float) -> float:
    """Share of the communication that ran behind backward: 0 if the two add up, 1 if it cost no time at all."""
    return 1 - (step_s - backward_s) / comm_s
