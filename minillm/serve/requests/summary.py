"""What many requests got: times to first token and per token, as percentiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from minillm.serve.requests.output import Output


@dataclass(frozen=True)
class Spread:
    """Seconds that half, and 99 of 100, do not exceed, and the most; each a value that occurred."""

    p50: float
    p99: float
    most: float


@dataclass(frozen=True)
class Summary:
    """tokens: of the answers, the only useful ones. seconds: from the first arrival to the last end.

    computed, hit, preemptions: sums over the outputs. tpot: of answers of two tokens or more.
    """

    requests: int
    failed: int
    tokens: int
    seconds: float
    ttft: Spread
    tpot: Spread
    end_to_end: Spread
    computed: int
    hit: int
    preemptions: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("nan")


def summary(outputs: Sequence[Output]) -> Summary:
    """What the requests got. Failed ones count as such and their times do not."""
    good = [output for output in outputs if output.error is None and output.timing.first_token is not None]
    if not good:
        raise ValueError(f"none of {len(outputs)} outputs has a token: there is nothing to sum up.")
    times = [output.timing for output in good]
    per_token = [output.timing.tpot(max(len(answer.tokens) for answer in output.answers)) for output in good]
    return Summary(
        requests=len(outputs),
        failed=len(outputs) - len(good),
        tokens=sum(len(answer.tokens) for output in good for answer in output.answers),
        seconds=max(each.ended for each in times) - min(each.arrived for each in times),
        ttft=spread([each.ttft for each in times]),
        tpot=spread([each for each in per_token if each is not None]),
        end_to_end=spread([each.end_to_end for each in times]),
        computed=sum(output.computed for output in outputs),
        hit=sum(output.hit for output in outputs),
        preemptions=sum(output.preemptions for output in outputs),
    )


def spread(values: Sequence[float]) -> Spread:
    """Nearest-rank percentiles; nan of nothing."""
    return Spread(*percentiles(values, (0.5, 0.99, 1.0)))


def percentiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    """For each share the least value that so many of all do not exceed (nearest rank); nan of nothing."""
    ordered = sorted(values) or [float("nan")]
    return [ordered[max(1, ceil(share * len(ordered))) - 1] for share in shares]
