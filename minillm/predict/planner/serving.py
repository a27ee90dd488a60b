"""Serving a model on a cluster: what fits, how many sequences at a time, and the latencies they see.

    weights      2 bytes per parameter / (tp · pp), routed experts / ep too
    KV cache     tokens of all running sequences · bytes per token / (tp · pp); a latent cache is not split by tp
    decode step  the longer of reading weights and cache and of computing, plus 2 all-reduces per layer, a message to
                 the next stage and the kernels too small to last longer than their start: `SMALL_KERNELS` per layer
    TTFT         FLOPs of the prompt / rate, through all stages, without waiting for others
    TPOT         one decode step (times pp stages), and the prompts of other sequences that are computed in between
    wire         of a token: 2 L all-reduces of h numbers over tp ranks, and h numbers over each of pp - 1 boundaries

Prefill and decode on cards of their own: `pools.py`.

A decode step reads every weight once, whatever the batch; so throughput grows with the batch until the cache or the
arithmetic takes longer (Pope et al. 2022, "Efficiently Scaling Transformer Inference", https://arxiv.org/abs/2211.05102).
"""

from dataclasses import dataclass

from minillm.predict.planner.architectures import Architecture
from minillm.predict.planner.clusters import GIB, Cluster
from minillm.predict.planner.layout import Layout, axis_path

ELEMENT = 2  # bytes of a weight, an activation and a cached number
SMALL_KERNELS = 5  # of a layer in decode: two norms, rotary embedding, activation, the write of keys and values
KERNEL_S = 2.5e-6  # the shortest time between two kernels of a CUDA graph


@dataclass(frozen=True)
class ServingPlan:
    """One replica of tp · pp GPUs, `replicas` of them. bytes per GPU, seconds, tokens/s of the whole cluster. wire:
    bytes that the ranks of a replica together send for a decoded token."""

    tp: int
    pp: int
    replicas: int
    weights: float
    cache: float
    sequences: int
    ttft: float
    tpot: float
    tokens_per_s: float
    wire: float

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / (self.tp * self.pp * self.replicas)


def rank_serving(
    model: Architecture,
    cluster: Cluster,
    prompt: int,
    output: int,
    *,
    tpot: float | None = None,
    ttft: float | None = None,
    keep: int = 10,
) -> list[ServingPlan]:
    """Layouts by throughput, each with the largest batch that fits and meets the limits on TPOT and TTFT in seconds.

    ValueError if the weights fit nowhere or no layout meets the limits.
    """
    if prompt < 1 or output < 1:
        raise ValueError(f"a prompt of {prompt} and an output of {output} tokens: give at least 1 of each.")
    plans, best = [], None
    for tp in (1, 2, 4, 8, 16, 32):
        for pp in (1, 2, 4, 8, 16):
            if cluster.gpus % (tp * pp) or model.num_heads % tp or pp > model.num_layers:
                continue
            replica = Replica(model, cluster, tp, pp, prompt, output)
            if replica.room <= 0:
                continue
            fastest = replica.plan(1)
            if best is None or fastest.tpot < best.tpot:
                best = fastest
            sequences = replica.most_sequences(tpot)
            if sequences and (ttft is None or fastest.ttft <= ttft):
                plans.append(replica.plan(sequences))
    if best is None:
        needed = model.parameters * ELEMENT / GIB
        raise ValueError(
            f"the weights of {model.name} take {needed:.0f} GiB in 16 bits; no layout of {cluster.gpus} x "
            f"{cluster.device.name} with {cluster.usable / GIB:.0f} usable GiB each holds them: use more or larger "
            "GPUs."
        )
    if not plans:
        raise ValueError(
            f"no layout meets the limits: one sequence alone has a TPOT of {best.tpot * 1e3:.1f} ms and a TTFT of "
            f"{best.ttft * 1e3:.0f} ms at best (tp {best.tp}, pp {best.pp}): relax a limit, or quantize the weights."
        )
    return sorted(plans, key=lambda plan: -plan.tokens_per_s)[:keep]


def decode_seconds(model: Architecture, cluster: Cluster, tp: int, *, sequences: int = 1, context: int = 1000) -> float:
    """Seconds of one decode step of so many sequences with so many cached tokens each, tensor-parallel over tp ranks:
    what every plan of `rank_serving` counts. `Cluster.latency` says what a small all-reduce takes at least."""
    return Replica(model, cluster, tp, 1, context, 0).step(sequences)


class Replica:
    """tp · pp GPUs that hold the model once."""

    def __init__(self, model: Architecture, cluster: Cluster, tp: int, pp: int, prompt: int, output: int):
        self.model, self.cluster, self.tp, self.pp, self.prompt, self.output = model, cluster, tp, pp, prompt, output
        self.weights = model.parameters * ELEMENT / (tp * pp)
        heads = 1 if model.latent else min(tp, model.num_kv_heads)
        self.per_token = model.kv_bytes(ELEMENT) / pp / heads  # bytes on one rank
        self.room = cluster.usable - self.weights
        self.rate = cluster.device.matmul_rate(model.hidden_size / tp)
        layout = Layout(tp=tp, pp=pp, dp=cluster.gpus // (tp * pp))
        self.way, self.between = axis_path(cluster, layout, "tp"), axis_path(cluster, layout, "pp")

    def plan(self, sequences: int) -> ServingPlan:
        replicas, running = self.cluster.gpus // (self.tp * self.pp), sequences * self.pp
        tpot, cache = self.tpot(sequences), running * self._tokens() * self.per_token
        speed = replicas * running / tpot
        ttft, wire = self.time_to_first(), self.token_bytes(sequences)
        return ServingPlan(self.tp, self.pp, replicas, self.weights, cache, running, ttft, tpot, speed, wire)

    def tpot(self, sequences: int) -> float:
        """Seconds between two tokens of a sequence on average. While it writes its `output` tokens, every other
        running sequence ends once and a new prompt takes its place: pp · sequences of them, 1 / pp on each stage."""
        return self.step(sequences) * self.pp + sequences * self.time_to_first() / self.output

    def most_sequences(self, tpot: float | None) -> int:
        """The most sequences that fit in one of the `pp` groups that take turns through the stages; 0 if not one
        fits."""
        most = int(self.room // (self._tokens() * self.per_token * self.pp))
        if tpot is None or most == 0 or self.tpot(most) <= tpot:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.tpot(middle) <= tpot else (low, middle)
        return low

    def step(self, sequences: int) -> float:
        """Seconds one stage takes for one token of each of `sequences`, and to hand them to the next."""
        model, device = self.model, self.cluster.device
        touched = self.weights
        if model.experts:  # few tokens meet few experts
            share = 1 - (1 - model.top_k / model.experts) ** sequences
            routed = model.expert_layers * model.expert_parameters
            touched *= (model.dense_parameters + share * routed) / model.parameters
        read = touched + sequences * self._tokens() * self.per_token
        flops = 2 * model.active_parameters * sequences / (self.tp * self.pp)
        layers = model.num_layers / self.pp
        talk = layers * 2 * self._all_reduce(sequences * model.hidden_size * ELEMENT)
        talk += self._boundary(sequences) if self.pp > 1 else 0.0
        return max(read / device.bandwidth, flops / self.rate) + talk + layers * SMALL_KERNELS * KERNEL_S

    def time_to_first(self) -> float:
        """Seconds of a prompt that is alone, through all stages."""
        model, device = self.model, self.cluster.device
        matmul = 2 * model.active_parameters * self.prompt / self.tp / self.rate
        attention = model.num_layers * model.attention_flops((self.prompt + 1) / 2) * self.prompt
        attention /= self.tp * device.flops * device.attention
        talk = model.num_layers * 2 * self._all_reduce(self.prompt * model.hidden_size * ELEMENT)
        talk += (self.pp - 1) * self._boundary(self.prompt)
        return max(matmul + attention, self.weights * self.pp / device.bandwidth) + talk

    def token_bytes(self, sequences: int) -> float:
        """Bytes that all ranks send for one token of a step of so many sequences."""
        model, t = self.model, self.tp
        hidden = model.hidden_size * ELEMENT
        copies = t * (t - 1) if self._at_once(sequences * hidden) else 2 * (t - 1)
        return model.num_layers * 2 * copies * hidden + (self.pp - 1) * t * hidden

    def _all_reduce(self, num_bytes: float) -> float:
        """Seconds."""
        if self.tp == 1:
            return 0.0
        if self._at_once(num_bytes):
            return self.way.message((self.tp - 1) * num_bytes)
        return self.way.all_reduce(num_bytes)

    def _at_once(self, num_bytes: float) -> bool:
        """Whether an all-reduce is one exchange, in which every rank gets all others' whole tensors, as in the kernels
        that serving engines have for small messages inside a node, and no ring."""
        way = self.way
        return not way.crosses and way.message((way.size - 1) * num_bytes) < way.all_reduce(num_bytes)

    def _boundary(self, tokens: int) -> float:
        """Seconds in which every rank of a stage sends the hidden states to its peer in the next one."""
        return self.between.message(tokens * self.model.hidden_size * ELEMENT)

    def _tokens(self) -> float:
        """Tokens that a running sequence has cached on average."""
        return self.prompt + self.output / 2
