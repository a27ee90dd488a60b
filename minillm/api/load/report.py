"""What the callers got: percentiles from when each request was due, goodput under limits, errors by kind."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.figure import Figure

from minillm.api.load.send import Call
from minillm.drawing import headline, subplots
from minillm.palette import PALETTE, look
from minillm.serve.requests.summary import percentiles

SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Percentiles:
    """Seconds that so many of a hundred answers do not exceed; nan where there was none."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Limit:
    """The service level that makes an answer a good one: seconds to its first token, and per token after it."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1

    def __post_init__(self):
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} {value} must be above 0 seconds")

    def holds(self, call: Call) -> bool:
        if call.error is not None or call.ttft is None:
            return False
        return call.ttft <= self.ttft_s and (call.tpot is None or call.tpot <= self.tpot_s)


@dataclass(frozen=True)
class Report:
    """rate: requests per second that were due. goodput: answers per second within the limits; good: their share of
    all requests, failed ones included. Percentiles are of whole answers. late: of the generator itself."""

    rate: float
    requests: int
    answered: int
    seconds: float
    tokens_per_s: float
    ttft: Percentiles
    tpot: Percentiles
    end_to_end: Percentiles
    goodput: float
    good: float
    late: Percentiles
    errors: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {key: _finite(value) for key, value in asdict(self).items()}


def report(calls: Sequence[Call], limit: Limit | None = None) -> Report:
    """ValueError without a call."""
    if not calls:
        raise ValueError("no request was sent: there is nothing to report.")
    limit = limit or Limit()
    due = [call.arrival.at for call in calls]
    whole = [call for call in calls if call.error is None]
    seconds = max(call.ended for call in calls) - min(due)
    span = max(due) - min(due)
    good = sum(map(limit.holds, calls))
    return Report(
        rate=(len(calls) - 1) / span if span else float("nan"),
        requests=len(calls),
        answered=len(whole),
        seconds=seconds,
        tokens_per_s=sum(call.tokens for call in whole) / seconds if seconds else float("nan"),
        ttft=_percentiles([call.ttft for call in whole]),
        tpot=_percentiles([call.tpot for call in whole]),
        end_to_end=_percentiles([call.end_to_end for call in whole]),
        goodput=good / seconds if seconds else float("nan"),
        good=good / len(calls),
        late=_percentiles([call.late for call in calls]),
        errors=dict(Counter(call.error for call in calls if call.error is not None)),
    )


def by_tenant(calls: Sequence[Call], limit: Limit | None = None) -> dict[str, Report]:
    names = sorted({call.arrival.tenant for call in calls})
    return {name: report([call for call in calls if call.arrival.tenant == name], limit) for name in names}


def latency_figure(reports: Sequence[Report], limit: Limit | None = None) -> Figure:
    """Time to first token and goodput against the rate of requests."""
    limit = limit or Limit()
    figure, panels = subplots(1, 2, width=9, height=3.4)
    rates = [each.rate for each in reports]
    for place, name in enumerate(("p50", "p90", "p99")):
        values = [getattr(each.ttft, name) for each in reports]
        drawn = look(place)
        panels[0].plot(rates, values, color=drawn.color, marker=drawn.marker, linestyle=drawn.linestyle, label=name)
    panels[0].axhline(limit.ttft_s, color=PALETTE["black"], linewidth=1, linestyle=":", label="limit")
    panels[0].set(xlabel="requests/s", ylabel="time to first token (s)", yscale="log")
    panels[1].plot(rates, rates, "--", marker="", color=look(1).color, label="all that come")
    panels[1].plot(rates, [each.goodput for each in reports], color=look(0).color, label="answered within the limits")
    panels[1].set(xlabel="requests/s", ylabel="answers/s", ylim=(0, None))
    for axes in panels:
        axes.legend()
    served = f"Limits: first token within {limit.ttft_s:g} s, then {limit.tpot_s:g} s per token"
    headline(figure, "Latency counted from when each request was due, by rate", served)
    return figure


def _percentiles(values: Sequence[float | None]) -> Percentiles:
    return Percentiles(*percentiles([value for value in values if value is not None], SHARES))


def _finite(value: Any) -> Any:
    """nan, of which JSON knows nothing, becomes None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and value != value else value
