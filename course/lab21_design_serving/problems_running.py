"""Problems of lab 21 about traffic: queues, bursts, blocking, and what pays at which load."""

from functools import cache

from course.lab21_design_serving import experiments
from course.shared.cases import DesignCase
from course.shared.decisions import Decision, shown
from minillm.predict import roofline
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.serving import rank_serving
from minillm.predict.serving import queueing, speculation


@cache
def tail_at_85() -> DesignCase:
    """p99 at 85 % load."""
    service = 1.0
    half, high, higher = (queueing.wait_quantile(load, service, 0.99) for load in (0.5, 0.85, 0.95))
    mean = queueing.mean_wait(0.85, service)
    regular = experiments.simulated_waits(0.85, regular=True)
    bounded, rejected = experiments.bounded(0.85, 10)
    numbers = {
        "half": f"{half:.1f}",
        "high": f"{high:.0f}",
        "higher": f"{higher:.0f}",
        "mean": f"{mean:.1f}",
        "sixty": f"{queueing.wait_quantile(0.6, service, 0.99):.1f}",
        "seventy_five": f"{queueing.wait_quantile(0.75, service, 0.99):.0f}",
        "three": f"{100 * (2 * 0.85 / 3):.0f} %",
        "bounded": f"{bounded:.0f}",
        "rejected": f"{100 * rejected:.0f} %",
        "regular": f"{sum(regular) / len(regular):.1f}",
    }
    return DesignCase(
        {
            "mean": Decision(
                "mean wait at 85 % load, in service times (random arrivals, exponential services)",
                mean,
                "",
                "ρ / (1 - ρ) = 0.85 / 0.15 service times.",
                slips={
                    1 / 0.85: "That includes the service itself; the question asks for the wait.",
                    0.85 / mean: "That is the load.",
                },
                tolerance=0.08,
            ),
            "tail": Decision(
                "p99 of the wait at 85 % load, in service times",
                high,
                "",
                "ln(0.85 / 0.01) / (1 - 0.85). The service itself is not in it; with it, ln(1 / 0.01) / (1 - 0.85).",
                slips={
                    half / high: "That is the tail at half load.",
                    mean / high: "That is the mean; the tail is five times it.",
                },
                tolerance=0.12,
            ),
        },
        numbers,
    )


@cache
def bursts() -> DesignCase:
    """A burst, and replicas that take minutes to start."""
    weights, disk = 2 * architecture("llama-3-70b").parameters, 2e9
    load = weights / disk
    start, arrivals, served = 60 + load, 40.0, 25.0
    backlog = (arrivals - served) * start
    numbers = {
        "load": f"{load:.0f} s",
        "start": f"{start:.0f} s",
        "backlog": f"{backlog:,.0f}",
        "drain": f"{backlog / (2 * served - arrivals):.0f} s",
        "peer": f"{weights / 25e9:.0f} s",
        "load80": f"{100 * (arrivals / (2 * served)):.0f} %",
    }
    return DesignCase(
        {
            "load": Decision(
                "seconds to read the weights of a 70B model in 16 bits at 2 GB/s",
                load,
                "s",
                "141 GB / 2 GB/s.",
                slips={0.5: "16 bits are 2 bytes per parameter."},
                tolerance=0.1,
            ),
            "backlog": Decision(
                "requests waiting when the second replica is ready: 40 per second arrive, one replica does 25, it "
                "starts in 60 s plus the load",
                backlog,
                "",
                f"(40 - 25) per second times {numbers['start']}.",
                slips={40 / 15: "25 of the 40 are served meanwhile."},
                tolerance=0.15,
            ),
        },
        numbers,
    )


@cache
def blocked_by_a_prompt() -> DesignCase:
    """One long prompt between everybody's tokens."""
    model, machine = architecture("llama-3-8b"), cluster("h100", 1)

    def until(tokens: int) -> float:
        """Seconds for the first tokens of the prompt, which attend to each other."""
        return rank_serving(model, machine, tokens, 1)[0].ttft

    whole, chunk, count = until(32000), until(2048), 32000 // 2048
    numbers = {
        "whole": f"{whole:.1f} s",
        "chunk": f"{chunk * 1e3:.0f} ms",
        "last": f"{(until(2048 * count) - until(2048 * (count - 1))) * 1e3:.0f} ms",
        "chunks": str(count),
        "fits_first": f"{max(n for n in range(64, 4096, 64) if until(n) <= 0.05):,}",
        "fits_last": f"{max(n for n in range(64, 4096, 64) if whole - until(32000 - n) <= 0.05):,}",
    }
    return DesignCase(
        {
            "stall": Decision(
                "seconds that all other streams stand still while a 32,000-token prompt is computed whole (8B, one "
                "H100)",
                whole,
                "s",
                "2 FLOPs per parameter and token, and attention over 16,000 tokens on average.",
                tolerance=0.4,
            ),
        },
        numbers,
    )


@cache
def does_speculation_pay() -> DesignCase:
    """Speculation: at one stream, and at a large batch."""
    alpha, ratio, k = 0.7, 0.1, 4
    alone = speculation.speedup(alpha, ratio, k)
    device = cluster("h100", 1).device
    peak = roofline.ridge_point(device.flops, device.bandwidth)
    ridge = peak * device.achievable
    full = speculation.speedup(alpha, ratio, k, verify=k + 1)
    best = speculation.best_k(alpha, ratio)
    numbers = {
        "alone": f"{alone:.2f}",
        "tokens": f"{speculation.tokens_per_pass(alpha, k):.2f}",
        "ridge": f"{ridge:.0f}",
        "peak": f"{peak:.0f}",
        "full": f"{full:.2f}",
        "best": str(best),
        "batch": f"{ridge / (k + 1):.0f}",
    }
    return DesignCase(
        {
            "alone": Decision(
                "speedup of one stream: acceptance 0.7, K = 4, a draft token costs a tenth of a target pass",
                alone,
                "",
                f"{numbers['tokens']} tokens per pass, which costs 1 + 4 · 0.1 passes.",
                slips={
                    1.4: "Drafting costs 0.4 of a pass: divide by 1.4.",
                    3.8 / alone: "Tokens after a rejection are lost: the sum is geometric, not 1 + 4 · 0.7.",
                },
                tolerance=0.06,
            ),
            "ridge": Decision(
                "sequences per step above which a 16-bit model is bound by arithmetic on an H100 (cache ignored)",
                ridge,
                "",
                f"FLOP/s over bytes/s: 2 FLOPs per weight and sequence against 2 bytes per weight. {peak:.0f} at the "
                f"data sheet's peaks, {ridge:.0f} at the rate that matrix products reach; say which you take.",
                also=(peak,),
                tolerance=0.3,
            ),
        },
        numbers,
    )


@cache
def does_quantization_pay() -> DesignCase:
    """4-bit weights at batch 1 and at batch 512."""
    model, device = architecture("llama-3-8b"), cluster("h100", 1).device
    weights, rate = 2 * model.parameters, device.matmul_rate(model.hidden_size)

    def seconds(batch: int, size: float) -> float:
        return max(weights * size / device.bandwidth, 2 * model.parameters * batch / rate)

    one, many = (seconds(batch, 1.0) / seconds(batch, 4.5 / 16) for batch in (1, 512))
    numbers = {
        "one": f"{one:.1f}",
        "many": f"{many:.1f}",
        "weights": shown(weights * 4.5 / 16, "B"),
        "wide": shown(weights, "B"),
        "end": f"{weights / device.bandwidth * rate / (2 * model.parameters):.0f}",
        "cross": f"{weights * 4.5 / 16 / device.bandwidth * rate / (2 * model.parameters):.0f}",
    }
    return DesignCase(
        {
            "one": Decision(
                "speedup of decoding at batch 1 with 4.5-bit weights, cache ignored",
                one,
                "",
                "Bytes per weight: 16 / 4.5 bits.",
                slips={4.5 / 4: "The scales count: 4.5 bits per weight, not 4."},
                tolerance=0.06,
            ),
        },
        numbers,
    )


@cache
def split_prefill_decode() -> DesignCase:
    """Prefill here, decode there."""
    model, machine, prompt = architecture("llama-3-70b"), cluster("h100", 16), 2000
    moved = prompt * model.kv_bytes()
    per_card = machine.network * machine.link_efficiency
    seconds = moved / (8 * per_card)
    plan = next(p for p in rank_serving(model, cluster("h100", 8), prompt, 300) if p.tp == 8)
    numbers = {
        "moved": shown(moved, "B"),
        "efficiency": f"{100 * machine.link_efficiency:.0f} %",
        "one": f"{moved / per_card * 1e3:.0f} ms",
        "eight": f"{seconds * 1e3:.1f} ms",
        "ttft": f"{plan.ttft * 1e3:.0f} ms",
        "share": f"{100 * (seconds / plan.ttft):.0f} %",
    }
    return DesignCase(
        {
            "moved": Decision(
                "bytes of cache that move per request: 2,000 tokens of a 70B model",
                moved,
                "B",
                "2,000 · 0.33 MB.",
                slips={8: "Only the 8 kv heads are kept, not all 64."},
                tolerance=0.1,
            ),
        },
        numbers,
    )
