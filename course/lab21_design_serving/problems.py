"""Problems of lab 21 about size and speed of one model: capacity, context, tenants, devices."""

import math
from functools import cache

from course.shared.cases import Case
from course.shared.decisions import Decision, Problem, shown
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import GIB, cluster
from minillm.predict.planner.serving import rank_serving

LOAD = 0.8  # of what a replica can do: the rest is for bursts


@cache
def chat_70b() -> Case:
    """70B chat: p99 TPOT of 50 ms, 200 requests per second, 1,000 + 300 tokens."""
    model, rate, prompt, output = architecture("llama-3-70b"), 200, 1000, 300
    machine = cluster("h100", 8)
    plans = rank_serving(model, machine, prompt, output, tpot=0.05 * LOAD)
    best = max(plans, key=lambda plan: plan.tokens_per_s)
    demand = rate * output
    gpus = 8 * math.ceil(demand / (best.tokens_per_s * LOAD))
    inside = rate * (best.ttft + output * best.tpot)
    numbers = {
        "demand": f"{demand:,}",
        "layout": f"tp {best.tp}, pp {best.pp}",
        "node": f"{best.tokens_per_s:,.0f}",
        "gpus": str(gpus),
        "inside": f"{inside:,.0f}",
        "weights": shown(best.weights, "B"),
        "cache": shown(best.cache, "B"),
        "sequences": str(best.sequences),
        "ttft": f"{best.ttft * 1e3:.0f} ms",
        "tpot": f"{best.tpot * 1e3:.0f} ms",
        "kv": shown(model.kv_bytes(), "B"),
    }
    return Case(
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
                "requests being answered at any moment",
                inside,
                "",
                f"Little's law: 200 per second times ({numbers['ttft']} + 300 · {numbers['tpot']}).",
                slips={1 / 200: "That is how long one request takes."},
                tolerance=0.25,
            ),
            "gpus": Decision(
                "H100s for it, with 20 % of headroom",
                gpus,
                "GPUs",
                f"{numbers['demand']} tokens/s against {numbers['node']} per node of 8 ({numbers['layout']}), at "
                f"{LOAD:.0%} load.",
                tolerance=0.35,
            ),
        },
        Problem(
            "70B chat at 200 requests per second",
            numbers,
            (
                "Clarify: lengths of prompts and answers (1,000 and 300 here), what p99 refers to (TPOT, 50 ms), "
                "how bursty, "
                "how many prompts share a prefix.",
                "Size: {demand} output tokens per second. By Little's law {inside} requests are inside at any "
                "moment; each "
                "has {kv} of cache per token.",
                "One node: {layout} holds {weights} of weights and up to {cache} of caches per GPU, {sequences} "
                "sequences per "
                "replica, TTFT {ttft}, TPOT {tpot}: {node} tokens per second. So about {gpus} GPUs.",
                "Check the tail, not the mean: prompts are computed between decode steps, so chunked prefill bounds "
                "what one "
                "long prompt adds to everyone's TPOT.",
                "Risk: the prefix hit rate and the length of answers decide the bill; measure both on real traffic "
                "first.",
            ),
            {
                "TP 8 or TP 4?": "TP 8 answers one request sooner, two replicas of TP 4 answer more of them: fewer "
                "ranks wait "
                "for each other. Take the smallest TP that meets the TPOT.",
                "What if half of the prompt is a shared system prompt?": "Its blocks are cached once: half of the "
                "prefill "
                "work goes, and that room is freed for sequences.",
            },
            "70B is 140 GB, so two H100 per replica, and one replica does about 50 tokens per second.",
            "That is one sequence alone; a step reads the weights once for the whole batch.",
        ),
    )


@cache
def eight_on_24gb() -> Case:
    """8B on one card of 24 GB."""
    model, machine = architecture("llama-3-8b"), cluster("l4", 1)
    weights = 2 * model.parameters
    room = machine.usable - weights
    tokens = room / model.kv_bytes()
    quarter = machine.usable - weights / 4
    single = weights / machine.device.bandwidth
    numbers = {
        "weights": shown(weights, "B"),
        "room": shown(room, "B"),
        "tokens": f"{tokens:,.0f}",
        "sequences": f"{tokens / 4096:.0f}",
        "kv": shown(model.kv_bytes(), "B"),
        "four": f"{quarter / model.kv_bytes():,.0f}",
        "single": f"{single * 1e3:.0f} ms",
        "single4": f"{single / 4 * 1e3:.0f} ms",
    }
    return Case(
        {
            "tokens": Decision(
                "tokens of cache that fit beside 16-bit weights on 24 GiB (3 GiB reserved, 5 % lost)",
                tokens,
                "tokens",
                f"({machine.usable / GIB:.1f} GiB - {numbers['weights']}) / {numbers['kv']} per token.",
                slips={
                    4: "8 kv heads serve 32 query heads: only the 8 are kept.",
                    0.5: "The cache is in 16 bits: 2 bytes per number.",
                },
                tolerance=0.25,
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
        Problem(
            "8B on one card of 24 GB",
            numbers,
            (
                "Weights in 16 bits take {weights}; {room} are left, {tokens} tokens of cache at {kv} each: "
                "{sequences} "
                "sequences of 4,096.",
                "One sequence alone gets a token every {single}: the card reads its memory at 300 GB/s and must "
                "read all "
                "weights. 4-bit weights make that {single4} and leave {four} tokens of cache.",
                "So on a small card quantisation is not a trick for speed alone: it is what makes room for a batch.",
            ),
            {
                "What about an 8-bit cache?": "It doubles the tokens that fit and hardly changes a single "
                "sequence's speed.",
                "Would a second card with TP 2 help?": "Weights and cache per card halve, but the link between such "
                "cards is "
                "slow; two replicas with 4-bit weights serve more.",
            },
            "The weights are 16 GB and the card has 24, so it fits.",
            "It leaves out that {room} is all that is left for every user's cache.",
        ),
    )


@cache
def rag_32k() -> Case:
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
        "share": f"{share:.0%}",
        "sequences": str(plan.sequences),
        "after": f"{plan.ttft * (1 - hit):.1f} s",
    }
    return Case(
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
                "the "
                "all-reduces of 80 layers.",
                slips={8: "All 8 cards compute the prompt together."},
                tolerance=0.35,
            ),
        },
        Problem(
            "Long prompts from retrieval",
            numbers,
            (
                "The work is in the prompt: {flops} before the first token, {ttft} on a node, attention {share} of "
                "it. The "
                "answer of 500 tokens is an afterthought.",
                "Each such prompt holds {cached}, so a node carries {sequences} of them: memory, not arithmetic, "
                "limits how "
                "many are answered at a time.",
                "The lever is reuse. If three quarters of the prompt are documents that other requests also use, "
                "and they "
                "come *first* in the prompt, the prefix cache cuts the TTFT to {after}.",
                "Put what changes last: one early timestamp in a system prompt makes every prefix different.",
            ),
            {
                "Why not split prefill and decode?": "It fits here: prefill is compute-bound for seconds. The cache "
                "then "
                "travels once, {cached} per request.",
                "Documents in another order?": "Prefix caches hit from the start only. Sort documents by how often "
                "they are "
                "used, or cache per document and pay the lost cross-attention.",
            },
            "Use a model with a longer context.",
            "It makes 32,000 tokens possible, not quick: the FLOPs and bytes stay.",
        ),
    )


@cache
def offline_batch() -> Case:
    """A billion tokens over night."""
    model, machine = architecture("llama-3-70b"), cluster("h100", 8)
    plan = rank_serving(model, machine, 500, 500)[0]
    hours = 1e9 / plan.tokens_per_s / 3600
    price = 2.0 * 8 * hours / 1e9 * 1e6
    alone = rank_serving(model, machine, 500, 500, tpot=0.02)[0]
    numbers = {
        "layout": f"tp {plan.tp}, pp {plan.pp}, {plan.sequences} sequences per replica",
        "speed": f"{plan.tokens_per_s:,.0f}",
        "hours": f"{hours:.0f}",
        "price": f"{price:.2f}",
        "quick": f"{alone.tokens_per_s:,.0f}",
        "ratio": f"{plan.tokens_per_s / alone.tokens_per_s:.1f}",
        "tpot": f"{plan.tpot * 1e3:.0f} ms",
    }
    return Case(
        {
            "hours": Decision(
                "hours for a billion output tokens on one node (70B, 500 + 500 tokens, no latency limit)",
                hours,
                "hours",
                f"{numbers['speed']} tokens per second with the largest batch that fits.",
                tolerance=0.4,
            ),
        },
        Problem(
            "A billion tokens over night",
            numbers,
            (
                "Without a latency limit take the largest batch: {layout} writes {speed} tokens per second, a "
                "billion in "
                "{hours} hours, {price} dollars per million at two dollars per GPU-hour.",
                "With a TPOT of 20 ms the same node writes {quick}: the limit costs a factor of {ratio}. That "
                "factor is "
                "why batch prices are lower.",
                "Sort by length, keep the queue full, save progress by request: a node that fails must not lose the "
                "night.",
            ),
            {
                "What limits the batch?": "The cache. So grouped heads, an 8-bit cache and shared prefixes are "
                "throughput "
                "here, not only memory.",
            },
            "Run it through the chat endpoint.",
            "It competes with users and pays for a latency that nobody needs.",
        ),
    )


@cache
def many_adapters() -> Case:
    """A thousand customers, each with a fine-tuned 8B."""
    model, tenants, rank = architecture("llama-3-8b"), 1000, 16
    h, f, kv = model.hidden_size, model.intermediate_size, model.num_kv_heads * model.head_dim
    adapter = model.num_layers * rank * (2 * (h + h) + 2 * (h + kv) + 3 * (h + f)) * 2
    copies = tenants * 2 * model.parameters
    numbers = {
        "copies": shown(copies, "B"),
        "adapter": shown(adapter, "B"),
        "all": shown(tenants * adapter, "B"),
        "share": f"{adapter / (2 * model.parameters):.2%}",
        "load": f"{adapter / 25e9 * 1e3:.1f} ms",
    }
    return Case(
        {
            "adapter": Decision(
                "bytes of one LoRA adapter of rank 16 on all matrices of an 8B model, in 16 bits",
                adapter,
                "B",
                "32 layers · 16 · (inputs + outputs of 7 matrices) · 2 bytes; k and v are 1,024 wide.",
                slips={
                    1 / 32: "That is one layer's.",
                    1 / 16: "Rank 16: each matrix has r · (inputs + outputs) numbers.",
                },
                tolerance=0.15,
            ),
        },
        Problem(
            "A thousand customers with adapters",
            numbers,
            (
                "As separate models {copies}; as adapters {adapter} each ({share} of the model), {all} together: "
                "they fit "
                "into host memory, and the hot ones into the card.",
                "One base model serves all: in a batch every sequence adds its own low-rank product, grouped by "
                "adapter. "
                "Loading one takes {load} over PCIe, so a cold adapter costs less than a cold prefill.",
                "Isolation is part of the design: the adapter's name belongs into the prefix hash, quotas and "
                "metrics are "
                "per tenant, and one tenant's burst must not evict everyone's caches.",
            ),
            {
                "Merge the adapter into the weights?": "For one tenant with much traffic, yes: no extra products. "
                "For many, no: "
                "merging makes a copy.",
            },
            "One deployment per customer.",
            "{copies} of weights, most of them idle.",
        ),
    )


@cache
def at_the_edge() -> Case:
    """A 3B model on a phone."""
    parameters, bandwidth, bits = 3e9, 60e9, 4.5
    size = parameters * bits / 8
    speed = bandwidth / size
    numbers = {"size": shown(size, "B"), "speed": f"{speed:.0f}", "wide": f"{bandwidth / (2 * parameters):.0f}"}
    return Case(
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
        Problem(
            "At the edge",
            numbers,
            (
                "A single user has a batch of one, so memory bandwidth alone decides: {size} per token, {speed} "
                "tokens per "
                "second at most; with 16-bit weights {wide}.",
                "4.5 bits are 4-bit weights with a 16-bit scale per 32 of them. Battery and heat follow the same "
                "bytes.",
                "Prefill is the other half: a long prompt is compute-bound, and a phone computes little. Keep "
                "prompts short, "
                "or keep their cache on disk.",
            ),
            {
                "Does speculation help?": "Yes, more than in a data centre: the pass is memory-bound, so checking "
                "four tokens costs about "
                "as much as one, if the draft is small enough."
            },
            "The phone's chip has 30 TOPS, so 3B parameters run at 5,000 tokens per second.",
            "Decoding is bound by bandwidth, not by operations.",
        ),
    )
