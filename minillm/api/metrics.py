"""What an operator sees: counts and times by tenant, and the engine's state when Prometheus asks for it."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minillm.measure.start import Start
from minillm.serve.engine import LLM
from minillm.serve.requests.output import Output
from minillm.serve.schedule.fair import FairScheduler

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1)


class Metrics:
    """One registry for each app: two servers in a process do not share theirs."""

    def __init__(self, engines: dict[str, LLM]):
        self.registry = CollectorRegistry()
        own = {"registry": self.registry}
        self.requests = Counter("minillm_requests", "answers by status", ("model", "tenant", "status"), **own)
        self.tokens = Counter("minillm_tokens", "tokens of prompts, cached and answered", ("tenant", "kind"), **own)
        self.ttft = Histogram("minillm_ttft_seconds", "time to first token", ("tenant",), buckets=SECONDS, **own)
        self.tpot = Histogram("minillm_tpot_seconds", "time per token after it", ("tenant",), buckets=PER_TOKEN, **own)
        self.whole = Histogram("minillm_end_to_end_seconds", "of an answer", ("tenant",), buckets=SECONDS, **own)
        gauges = {
            "minillm_waiting_requests": ("requests in the queue", _waiting),
            "minillm_running_sequences": ("sequences in the batch", _running),
            "minillm_kv_blocks_used": ("blocks of keys and values held", lambda llm: llm.pool.used),
            "minillm_kv_blocks": ("blocks there are", lambda llm: llm.pool.total),
        }
        for name, (help_text, read) in gauges.items():
            gauge = Gauge(name, help_text, ("model",), **own)
            for model, llm in engines.items():
                gauge.labels(model).set_function(lambda llm=llm, read=read: float(max(0, read(llm))))
        self.registry.register(Shares(engines))
        self.registry.register(Handed(engines))

    def done(self, tenant: str, output: Output) -> None:
        """Times and tokens of a request that has ended."""
        answered = sum(len(answer.tokens) for answer in output.answers)
        for kind, count in (("prompt", len(output.prompt)), ("cached", output.hit), ("answer", answered)):
            self.tokens.labels(tenant, kind).inc(count)
        longest = max((len(answer.tokens) for answer in output.answers), default=0)
        times = (self.ttft, output.timing.ttft), (self.tpot, output.timing.tpot(longest))
        for histogram, seconds in (*times, (self.whole, output.timing.end_to_end)):
            if seconds is not None:
                histogram.labels(tenant).observe(seconds)

    def started(self, start: Start) -> None:
        """Where the time of this process's start went."""
        gauge = Gauge("minillm_start_seconds", "of this process's start", ("phase",), registry=self.registry)
        for phase, seconds in start.phases.items():
            gauge.labels(phase).set(seconds)

    def text(self, tenant: str | None = None) -> bytes:
        """All of it, or without what belongs to other tenants."""
        return generate_latest(self.registry if tenant is None else OwnRows(self.registry, tenant))


class OwnRows:
    """A registry, as one tenant may read it: its own rows, and those of nobody."""

    def __init__(self, registry: CollectorRegistry, tenant: str):
        self.registry, self.tenant = registry, tenant

    def collect(self) -> Iterator[Metric]:
        for metric in self.registry.collect():
            own = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            own.samples = [each for each in metric.samples if each.labels.get("tenant", self.tenant) == self.tenant]
            yield own


class Shares(Collector):
    """What the schedulers know of each tenant, read when Prometheus asks."""

    def __init__(self, engines: dict[str, LLM]):
        fair = {name: llm.scheduler for name, llm in engines.items() if isinstance(llm.scheduler, FairScheduler)}
        self._schedulers = fair

    def collect(self) -> Iterator[Metric]:
        labels = ("model", "tenant")
        held = CounterMetricFamily("minillm_block_seconds", "blocks of the cache, times seconds held", labels=labels)
        counter = GaugeMetricFamily("minillm_fair_counter", "virtual token counter: the least is next", labels=labels)
        running = GaugeMetricFamily("minillm_tenant_running_sequences", "of each tenant in the batch", labels=labels)
        for model, scheduler in self._schedulers.items():
            shares = list(scheduler.shares.items())  # the engine's thread may add one meanwhile
            for tenant, share in (each for each in shares if each[0]):  # without a name: the server's own warm-up
                held.add_metric((model, tenant), share.block_seconds)
                counter.add_metric((model, tenant), share.counter)
                running.add_metric((model, tenant), share.running)
        yield from (held, counter, running)


class Handed(Collector):
    """What engines with a prefill pool were given, read when Prometheus asks."""

    def __init__(self, engines: dict[str, LLM]):
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        ended = CounterMetricFamily("minillm_handovers", "of keys and values, by outcome", labels=("model", "outcome"))
        tokens = CounterMetricFamily(
            "minillm_handover_tokens", "whose keys came, or were computed here after all", labels=("model", "kind")
        )
        nbytes = CounterMetricFamily("minillm_handover_bytes", "of keys and values that came", labels=("model",))
        for model, handovers in ((name, llm.handovers) for name, llm in self._engines.items() if llm.handovers):
            for outcome, count in list(handovers.outcomes.items()):  # the engine's thread may add one meanwhile
                ended.add_metric((model, outcome), count)
            tokens.add_metric((model, "received"), handovers.received)
            tokens.add_metric((model, "recomputed"), handovers.recomputed)
            nbytes.add_metric((model,), handovers.nbytes)
        yield from (ended, tokens, nbytes)


def _waiting(llm: LLM) -> int:
    """Requests (one with n > 1 stands for all its samples) that no step has begun, and preempted sequences."""
    return llm.scheduler.num_waiting + len(llm.requests.arrived)


def _running(llm: LLM) -> int:
    return len(llm.scheduler.running)
