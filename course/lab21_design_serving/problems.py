"""Problems of lab 21 about size and speed of one model: capacity, context, tenants, devices."""

import math
from functools import cache

from course.shared.cases import DesignCase
from course.shared.decisions import Decision, shown
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import GIB, cluster
from minillm.predict.planner.serving import Replica, rank_serving

LOAD = 0.8  # of what a replica can do: the rest is for bursts


@cache
def chat_70b() -> DesignCase:
    """70B chat: p99 TPOT of 50 ms, 200 requests per second, 1,000 + 300 tokens."""
    model, rate, prompt, output = architecture("llama-3-70b"), 200, 1000, 300
    machine = cluster("h100", 8)
    best = rank_serving(model, machine, prompt, output, tpot=0.05)[0]
    demand = rate * output

    def needed(prompt: int, output: int) -> int:
        """GPUs in nodes of 8 for so many tokens of each request."""
        node = rank_serving(model, machine, prompt, output, tpot=0.05)[0].tokens_per_s
        return 8 * math.ceil(rate * output / (node * LOAD))

    gpus = needed(prompt, output)
    inside = rate * (best.ttft + output * best.tpot)
    replica, replicas = Replica(model, machine, best.tp, best.pp, prompt, output), gpus // (best.tp * best.pp)
    running = next(n for n in range(1, best.sequences) if replicas * n / replica.tpot(n) >= demand)
    calm = replica.tpot(running)  # of the system that is bought, whose batches are not full
    planned = rate * (best.ttft + output * calm)
    narrow = Replica(model, machine, 2, 1, prompt, output)
    numbers = {
        "demand": f"{demand:,}",
        "layout": f"tp {best.tp}, pp {best.pp}",
        "node": f"{best.tokens_per_s:,.0f}",
        "gpus": str(gpus),
        "inside": f"{inside:,.0f}",
        "running": str(running),
        "calm": f"{calm * 1e3:.0f} ms",
        "planned": f"{planned:,.0f}",
        "narrow": f"{narrow.plan(narrow.most_sequences(0.05)).tokens_per_s:,.0f}",
        "weights": shown(best.weights, "B"),
        "cache": shown(best.cache, "B"),
        "sequences": str(best.sequences),
        "ttft": f"{best.ttft * 1e3:.0f} ms",
        "tpot": f"{best.tpot * 1e3:.0f} ms",
        "prompts": str(needed(2 * prompt, output)),
        "answers": str(needed(prompt, 2 * output)),
        "kv": shown(model.kv_bytes(), "B"),
        "single": f"{2 * machine.device.bandwidth / (2 * model.parameters):.0f}",
    }
    return DesignCase(
        {
            "demand": Decision(
                "output tokens per second, all users together",
                demand,
                "tokens/s",
                "200 requests per second times 300 tokens each.",
                slips={
                    1000 / 300: "Those are the prompts' tokens; they are computed in prefill.",
                    1300
                    / 300: "Prompts are read in prefill, many tokens at a time; the question asks for what is written.",
                },
                tolerance=0.05,
            ),
            "inside": Decision(
                "requests in flight at any moment",
                inside,
                "",
                f"Little's law: 200 per second times ({numbers['ttft']} + 300 · {numbers['tpot']}) at the limit. "
                f"On {gpus} GPUs, whose batches are smaller, a token takes {numbers['calm']}: {numbers['planned']}.",
                slips={1 / 200: "That is how long one request takes."},
                also=(planned,),
                tolerance=0.25,
            ),
            "gpus": Decision(
                "H100s for it, with 20 % of headroom",
                gpus,
                "GPUs",
                f"{numbers['demand']} tokens/s against {numbers['node']} per node of 8 ({numbers['layout']}), at "
                f"{100 * LOAD:.0f} % load.",
                slips={
                    8
                    * math.ceil(demand / best.tokens_per_s)
                    / gpus: "That is without headroom: all nodes at their limit.",
                    1 / 8: "Those are nodes; a node has 8 GPUs.",
                },
                tolerance=0.17,
            ),
        },
        numbers,
    )


@cache
def eight_on_24gb() -> DesignCase:
    """8B on one card of 24 GB."""
    model, machine = architecture("llama-3-8b"), cluster("l4", 1)
    weights = 2 * model.parameters
    room = machine.usable - weights
    tokens = room / model.kv_bytes()
    packed = weights * 4.5 / 16  # 4-bit weights with their scales
    single = weights / machine.device.bandwidth
    numbers = {
        "weights": shown(weights, "B"),
        "room": shown(room, "B"),
        "tokens": f"{tokens:,.0f}",
        "sequences": f"{tokens // 4096:.0f}",
        "long": f"{tokens // 8192:.0f}",
        "kv": shown(model.kv_bytes(), "B"),
        "four": f"{(machine.usable - packed) / model.kv_bytes():,.0f}",
        "single": f"{single * 1e3:.0f} ms",
        "single4": f"{packed / machine.device.bandwidth * 1e3:.0f} ms",
    }
    return DesignCase(
        {
            "tokens": Decision(
                "tokens of cache that fit beside 16-bit weights on 24 GiB (3 GiB reserved, 5 % lost)",
                tokens,
                "tokens",
                f"({machine.usable / GIB:.1f} GiB - {numbers['weights']}) / {numbers['kv']} per token.",
                slips={
                    machine.usable / room: "That is what fits without the weights, which take most of the card.",
                    1 / 4: "8 kv heads serve 32 query heads: only the 8 are kept.",
                    0.5: "The cache is in 16 bits: 2 bytes per number.",
                    (21 * GIB - weights) / room: "That leaves out the 5 % that are lost.",
                },
                tolerance=0.15,
            ),
            "tpot": Decision(
                "seconds per token of one sequence alone on 300 GB/s",
                single,
                "s",
                f"All weights are read once per token: {numbers['weights']} / 300 GB/s.",
                slips={2: "A weight is read once; the 2 belongs to FLOPs."},
                tolerance=0.1,
            ),
        },
        numbers,
    )


@cache
def rag_32k() -> DesignCase:
    """Long prompts from retrieval: 32,000 tokens in, 500 out."""
    model, machine, prompt = architecture("llama-3-70b"), cluster("h100", 8), 32000
    plan = next(p for p in rank_serving(model, machine, prompt, 500) if p.tp == 8)
    cached = prompt * model.kv_bytes()
    flops = 2 * model.active_parameters * prompt + model.num_layers * model.attention_flops(prompt / 2) * prompt
    share = model.num_layers * model.attention_flops(prompt / 2) * prompt / flops
    hit = 0.75
    numbers = {
        "cached": shown(cached, "B"),
        "flops": f"{flops / 1e15:.1f} PFLOP",
        "ttft": f"{plan.ttft:.1f} s",
        "share": f"{100 * share:.0f} %",
        "sequences": str(plan.sequences),
        "after": f"{plan.ttft * ((1 - share) * (1 - hit) + share * (1 - hit**2)):.1f} s",
    }
    return DesignCase(
        {
            "cache": Decision(
                "bytes of cache of one 32,000-token prompt (70B)",
                cached,
                "B",
                "2 · 80 layers · 8 kv heads · 128 · 2 bytes = 0.33 MB per token.",
                slips={8: "Only the 8 kv heads are kept, not all 64 heads."},
                tolerance=0.1,
            ),
            "ttft": Decision(
                "seconds until the first token on a node of 8 H100, TP 8",
                plan.ttft,
                "s",
                f"{numbers['flops']}, of which attention {numbers['share']}, on 8 cards at the planner's rates, and "
                "the all-reduces of 80 layers.",
                slips={8: "All 8 cards compute the prompt together."},
                tolerance=0.35,
            ),
        },
        numbers,
    )


@cache
def offline_batch() -> DesignCase:
    """A billion tokens over night."""
    model, machine = architecture("llama-3-70b"), cluster("h100", 8)
    plan = rank_serving(model, machine, 500, 500)[0]
    hours = 1e9 / plan.tokens_per_s / 3600
    price = 2.0 * 8 * hours / 1e9 * 1e6
    alone = rank_serving(model, machine, 500, 500, tpot=0.02)[0]
    halved = Replica(model, machine, plan.tp, plan.pp, 500, 500)
    halved.per_token /= 2  # an 8-bit cache
    twice = halved.plan(halved.most_sequences(None)).tokens_per_s
    numbers = {
        "twice": f"{twice:,.0f}",
        "gain": f"{100 * (twice / plan.tokens_per_s - 1):.1f} %",
        "layout": f"tp {plan.tp}, pp {plan.pp}, {plan.sequences} sequences per replica",
        "speed": f"{plan.tokens_per_s:,.0f}",
        "hours": f"{hours:.0f}",
        "price": f"{price:.2f}",
        "quick": f"{alone.tokens_per_s:,.0f}",
        "ratio": f"{plan.tokens_per_s / alone.tokens_per_s:.1f}",
        "tpot": f"{plan.tpot * 1e3:.0f} ms",
        "nodes": str(math.ceil(hours / 10)),
    }
    return DesignCase(
        {
            "hours": Decision(
                "hours for a billion output tokens on one node (70B, 500 + 500 tokens, no latency limit)",
                hours,
                "hours",
                f"{numbers['speed']} tokens per second with the largest batch that fits.",
                tolerance=0.4,
            ),
        },
        numbers,
    )


@cache
def many_adapters() -> DesignCase:
    """A thousand customers, each with a fine-tuned 8B."""
    model, tenants, rank = architecture("llama-3-8b"), 1000, 16
    h, f, kv = model.hidden_size, model.intermediate_size, model.num_kv_heads * model.head_dim
    adapter = model.num_layers * rank * (2 * (h + h) + 2 * (h + kv) + 3 * (h + f)) * 2
    all_heads = model.num_layers * rank * (4 * (h + h) + 3 * (h + f)) * 2
    copies = tenants * 2 * model.parameters
    numbers = {
        "copies": shown(copies, "B"),
        "adapter": shown(adapter, "B"),
        "all": shown(tenants * adapter, "B"),
        "share": f"{100 * (adapter / (2 * model.parameters)):.2f} %",
        "load": f"{adapter / 25e9 * 1e3:.1f} ms",
        "hot": f"{2 * model.parameters / adapter:.0f}",
    }
    return DesignCase(
        {
            "adapter": Decision(
                "bytes of one LoRA adapter of rank 16 on all matrices of an 8B model, in 16 bits",
                adapter,
                "B",
                "32 layers · 16 · (inputs + outputs of 7 matrices) · 2 bytes; k and v are 1,024 wide.",
                slips={
                    1 / 32: "That is one layer's.",
                    1 / 16: "Rank 16: each matrix has r · (inputs + outputs) numbers.",
                    all_heads / adapter: "That makes k and v as wide as q, which only o is.",
                },
                tolerance=0.06,
            ),
        },
        numbers,
    )


@cache
def at_the_edge() -> DesignCase:
    """A 3B model on a phone."""
    parameters, bandwidth, bits = 3e9, 60e9, 4.5
    size = parameters * bits / 8
    speed = bandwidth / size
    operations = 30e12
    numbers = {
        "size": shown(size, "B"),
        "speed": f"{speed:.0f}",
        "wide": f"{bandwidth / (2 * parameters):.0f}",
        "prefill": f"{1000 * 2 * parameters / operations:.1f} s",
        "naive": f"{operations / (2 * parameters):,.0f}",
    }
    return DesignCase(
        {
            "speed": Decision(
                "tokens per second at most: 3B weights in 4.5 bits on 60 GB/s",
                speed,
                "tokens/s",
                f"Each token reads {numbers['size']} of weights.",
                slips={
                    8: "Bits and bytes: 4.5 bits are 0.56 bytes.",
                    1 / 8: "The bandwidth is in bytes per second.",
                    4.5 / 16: "That is with 16-bit weights.",
                },
                tolerance=0.12,
            ),
        },
        numbers,
    )
