"""How N cards are divided between prefill and decode, beside the same cards doing both.

    prefill   requests wait for one server: TTFT = D + r S² / 2(1 - r S)    D: seconds of a prompt, S = D / pp
    hand-over prompt · bytes per token, over as many cards as both sides have; what layers hide of it, they hide
    decode    b = r · output · TPOT sequences run (Little), TPOT is a step of b; as many as memory and limit allow
    both      prompts are computed between steps: TPOT = step / (1 - r D); a prompt waits for half a step as well

r: requests per second of one replica. The waits are those of M/D/1 (Zhong et al. 2024, "DistServe", §3.1,
https://arxiv.org/abs/2401.09670). A split sustains what the lesser of its two pools does. No server is busy
with prompts for more than `BUSY` of the time. Limits hold for means: `gap` is the longest time between two tokens of a
sequence, a whole prompt where both share a card and prompts are not cut into chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from minillm.predict.planner.architectures import Architecture
from minillm.predict.planner.clusters import Cluster
from minillm.predict.planner.serving import ELEMENT, Replica
from minillm.predict.serving.handover import handover_seconds

BUSY = 0.9
SIZES = tuple((tp, pp) for tp in (1, 2, 4, 8, 16) for pp in (1, 2, 4))


@dataclass(frozen=True)
class Pools:
    """prefill, decode: replicas of tp · pp cards each; prefill 0: the decode replicas do both. rate: requests/s;
    ttft, tpot, gap: seconds at that rate; handover: seconds of a hand-over after the last layer of the prompt."""

    prefill: int
    prefill_tp: int
    prefill_pp: int
    decode: int
    decode_tp: int
    decode_pp: int
    rate: float
    ttft: float
    tpot: float
    gap: float
    handover: float

    @property
    def split(self) -> bool:
        return self.prefill > 0

    @property
    def cards(self) -> int:
        return self.prefill * self.prefill_tp * self.prefill_pp + self.decode * self.decode_tp * self.decode_pp


def rank_pools(
    model: Architecture,
    cluster: Cluster,
    prompt: int,
    output: int,
    *,
    rate: float | None = None,
    ttft: float | None = None,
    tpot: float | None = None,
    keep: int = 10,
) -> list[Pools]:
    """Splits of the cluster and the same cards doing both, by the requests/s that they sustain within the limits in
    seconds. With a rate: those that sustain it, by the mean seconds of a request at that rate. The first `keep`, and
    the best split and the best without one in any case.

    ValueError if the weights fit nowhere, or nothing meets limits and rate.
    """
    if prompt < 1 or output < 1:
        raise ValueError(f"a prompt of {prompt} and an output of {output} tokens: give at least 1 of each.")
    if rate is not None and not 0 < rate < float("inf"):
        raise ValueError(f"a rate of {rate} requests per second must be above 0 and finite.")
    servers = [_Server(model, cluster, tp, pp, prompt, output) for tp, pp in SIZES if _fits(model, cluster, tp, pp)]
    servers = [server for server in servers if server.replica.room > 0]
    if not servers:
        raise ValueError(f"the weights of {model.name} fit on no layout of {cluster.gpus} cards: use more of them.")
    found = sorted(_divisions(servers, cluster, ttft, tpot), key=lambda each: -each.most)
    if not found:
        raise ValueError("no division of the cards meets the limits on TTFT and TPOT: relax one of them.")
    if rate is None:
        return [each.at(each.most) for each in _both_kinds(found, found[:keep])]
    if rate > found[0].most:
        most = f"{found[0].most:.3g}"
        raise ValueError(f"{rate:g} requests per second are more than {cluster.gpus} cards sustain, {most}: use more.")
    plans = [each.at(rate) for each in found if each.most >= rate]
    plans.sort(key=lambda plan: plan.ttft + plan.handover + (output - 1) * plan.tpot)
    return _both_kinds(plans, plans[:keep])


def _both_kinds(ranked: list, first: list) -> list:
    """The first of a ranking; where they are all splits, or none is, with the best of the other kind."""
    other = [each for each in ranked if each.split != first[0].split][:1]
    return first if any(each in other for each in first) else first + other


@dataclass(frozen=True)
class _Division:
    """count: replicas of `prefill`, 0 where the replicas of `decode` do both. most: requests/s that it sustains."""

    count: int
    prefill: "_Server | None"
    replicas: int
    decode: "_Server"
    most: float

    @property
    def split(self) -> bool:
        return self.count > 0

    def at(self, rate: float) -> Pools:
        if self.prefill is None:
            return self.decode.together(self.replicas, rate)
        return self.prefill.beside(self.count, self.decode, self.replicas, rate)


def _fits(model: Architecture, cluster: Cluster, tp: int, pp: int) -> bool:
    return cluster.gpus % (tp * pp) == 0 and model.num_heads % tp == 0 and pp <= model.num_layers


def _divisions(
    servers: "list[_Server]", cluster: Cluster, ttft: float | None, tpot: float | None
) -> Iterator[_Division]:
    """Every division that sustains some rate within the limits."""
    decoded = {server: server.most_decoded(tpot) for server in servers}
    for one in servers:
        replicas = cluster.gpus // one.cards
        if most := replicas * one.most_together(ttft, tpot):
            yield _Division(0, None, replicas, one, most)
        for other in servers:
            prompts = one.most_prompts(ttft, other)
            for count in range(1, (cluster.gpus - other.cards) // one.cards + 1):
                decode = (cluster.gpus - count * one.cards) // other.cards
                if most := min(count * prompts, decode * decoded[other]):
                    yield _Division(count, one, decode, other, most)


class _Server:
    """One replica, for prompts, for decoding or for both."""

    def __init__(self, model: Architecture, cluster: Cluster, tp: int, pp: int, prompt: int, output: int) -> None:
        self.replica, self.cluster, self.output = Replica(model, cluster, tp, pp, prompt, output), cluster, output
        self.cards = tp * pp
        self.prompt_s = self.replica.time_to_first()
        self.service_s = self.prompt_s / pp
        self.most = self.replica.most_sequences(None)  # of a stage's turn; pp times as many run

    # Prompts alone.

    def first_token(self, rate: float) -> float:
        """Mean TTFT of one replica that gets `rate` requests per second."""
        return self.prompt_s + wait(rate, self.service_s)

    def most_prompts(self, ttft: float | None, decoder: "_Server") -> float:
        """Requests/s of one replica within the limit, and within what its link hands over."""
        carried = BUSY / max(self.service_s, self.transfer_s(decoder))
        return carried if ttft is None else min(carried, rate_for_wait(ttft - self.prompt_s, self.service_s))

    def transfer_s(self, decoder: "_Server") -> float:
        """Seconds in which a prompt's keys and values pass to the other side, on as many links as both have."""
        replica, cluster = self.replica, self.cluster
        inside = cluster.gpus <= cluster.per_node
        link = (cluster.device.link if inside else cluster.network) * cluster.link_efficiency
        num_bytes = replica.prompt * replica.model.kv_bytes(ELEMENT)
        return cluster.latency[0 if inside else 1] + num_bytes / (link * min(self.cards, decoder.cards))

    # Decoding alone.

    def most_decoded(self, tpot: float | None) -> float:
        """Requests/s whose tokens one replica decodes within the limit."""
        sequences = most_within(self.most, lambda b: self.step(b) * self.replica.pp, tpot)
        return sequences / (self.output * self.step(sequences)) if sequences else 0.0

    def step(self, sequences: float) -> float:
        return self.replica.step(sequences)

    def decode_tpot(self, rate: float) -> float:
        """TPOT where `rate` requests per second run: the b with b · pp = rate · output · step(b) · pp."""
        low, high = 0.0, float(self.most)
        for _ in range(60):
            middle = (low + high) / 2
            enough = middle >= rate * self.output * self.step(max(middle, 1e-9))
            low, high = (low, middle) if enough else (middle, high)
        return self.step(max(high, 1.0)) * self.replica.pp

    def beside(self, count: int, decoder: "_Server", decode: int, rate: float) -> Pools:
        layers = self.replica.model.num_layers
        exposed = handover_seconds(layers, self.prompt_s, self.transfer_s(decoder)) - self.prompt_s
        tpot = decoder.decode_tpot(rate / decode)
        one, other = self.replica, decoder.replica
        sizes = (count, one.tp, one.pp, decode, other.tp, other.pp)
        return Pools(*sizes, rate, self.first_token(rate / count), tpot, tpot, exposed)

    # Both.

    def most_together(self, ttft: float | None, tpot: float | None) -> float:
        """Requests/s of one replica that computes prompts between its steps."""
        sequences = most_within(self.most, self.replica.tpot, tpot)
        if not sequences:
            return 0.0
        most = min(self.rate_of(sequences), BUSY / self.service_s)
        if ttft is None:
            return most
        half = self.step(sequences) * self.replica.pp / 2
        return min(most, rate_for_wait(ttft - self.prompt_s - half, self.service_s))

    def rate_of(self, sequences: int) -> float:
        return self.replica.pp * sequences / (self.output * self.replica.tpot(sequences))

    def together(self, replicas: int, rate: float) -> Pools:
        each, replica = rate / replicas, self.replica
        busy = min(each * self.service_s, BUSY)
        tpot = self.decode_tpot(each / (1 - busy)) / (1 - busy)
        step = tpot * (1 - busy)
        ttft = self.first_token(each) + step / 2
        return Pools(0, 0, 0, replicas, replica.tp, replica.pp, rate, ttft, tpot, self.service_s + step, 0.0)


def wait(rate: float, service_s: float) -> float:
    """Mean seconds in the queue of an M/D/1 server."""
    return rate * service_s**2 / (2 * (1 - rate * service_s))


def rate_for_wait(most_s: float, service_s: float) -> float:
    """The rate at which the mean wait is most_s: r S² = 2 (1 - r S) w; 0 if there is no time to wait."""
    return max(0.0, 2 * most_s / (service_s**2 + 2 * most_s * service_s)) if most_s > 0 else 0.0


def most_within(most: int, seconds, limit: float | None) -> int:
    """The largest number from 1 to `most` whose seconds, which grow with it, are within the limit; 0 if none."""
    if most < 1 or (limit is not None and seconds(1) > limit):
        return 0
    if limit is None or seconds(most) <= limit:
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= limit else (low, middle)
    return low
