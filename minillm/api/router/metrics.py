"""What an operator sees of the router: answers, attempts on each replica, retries, and who is ready."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from minillm.api.metrics import SECONDS, OwnRows

if TYPE_CHECKING:
    from minillm.api.router.fleet import Fleet


class RouterMetrics:
    """One registry for each router. An attempt's outcome: the status that came back, "refused" (nobody listens),
    "lost" (it broke off), "ejected" (it did not answer its checks meanwhile) or "cancelled" (the client went away)."""

    def __init__(self):
        self.registry = CollectorRegistry()
        own = {"registry": self.registry}
        self.requests = Counter("minillm_router_requests", "answers by status", ("tenant", "status"), **own)
        self.attempts = Counter("minillm_router_attempts", "by replica and outcome", ("replica", "outcome"), **own)
        self.retries = Counter("minillm_router_retries", "requests sent once more, by what failed", ("outcome",), **own)
        self.starved = Counter("minillm_router_retries_refused", "retries the budget did not allow", **own)
        self.lost = Counter("minillm_router_lost_streams", "that broke off after their first token", **own)
        self.first = Histogram("minillm_router_ttft_seconds", "to the first event", ("tenant",), buckets=SECONDS, **own)
        self._outstanding = Gauge("minillm_router_outstanding", "open requests", ("replica",), **own)
        self._ready = Gauge("minillm_router_ready", "1: it gets requests", ("replica",), **own)
        self._budget = Gauge("minillm_router_retry_budget", "retries that are allowed now", **own)

    def text(self, fleet: "Fleet", budget: float, tenant: str | None = None) -> bytes:
        """All of it, or without what belongs to other tenants."""
        for gauge in (self._outstanding, self._ready):
            gauge.clear()
        for url, replica in fleet.replicas.items():
            self._outstanding.labels(url).set(replica.outstanding)
            self._ready.labels(url).set(replica.state == "ready")
        self._budget.set(budget)
        return generate_latest(self.registry if tenant is None else OwnRows(self.registry, tenant))
