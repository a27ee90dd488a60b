"""The problems of lab 20: decisions whose values the planner computes, and answers filled with the same numbers."""

from functools import cache

from course.shared.cases import Case
from course.shared.decisions import Decision, Problem, shown
from minillm.predict.model import ADAM_MIXED
from minillm.predict.pipeline import idle_share
from minillm.predict.planner import published, search
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import GIB, cluster
from minillm.predict.planner.layout import Layout, axis_path
from minillm.predict.planner.memory import STATE, memory
from minillm.predict.planner.step import mfu, step

DAY = 86400.0


@cache
def seventy_on_64() -> Case:
    """Train 70B from scratch on 64 H100 with 8,192-token sequences, 512 per step."""
    model, machine = architecture("llama-3-70b"), cluster("h100", 64)
    states = STATE.total * model.parameters
    ranking = search.rank(model, machine, 8192, 512)
    best, flat = ranking.best, Layout(dp=64, zero=3, microbatches=8, recompute="full")
    flat_bytes, flat_time = memory(model, flat, 8192).total, step(model, flat, machine, 8192)
    days = 15e12 / best.tokens_per_s / DAY
    numbers = {
        "states": shown(states, "B"),
        "room": shown(64 * machine.device.memory, "B"),
        "share": shown(states / 64, "B"),
        "best": str(best.layout),
        "seconds": shown(best.step.seconds, "s"),
        "mfu": f"{best.mfu:.0%}",
        "held": f"{best.memory.total / GIB:.0f} GiB",
        "activations": f"{best.memory.activations / GIB:.0f} GiB",
        "flat": f"{flat_bytes / GIB:.0f} GiB",
        "flat_seconds": shown(flat_time.seconds, "s"),
        "days": f"{days:,.0f}",
        "tokens": f"{best.tokens_per_s:,.0f}",
    }
    return Case(
        {
            "states": Decision(
                "bytes of all training states of 70B parameters, all GPUs together",
                states,
                "B",
                f"{model.parameters / 1e9:.1f} billion parameters times {STATE.total} bytes: 2 for the 16-bit "
                "weight, 4 for "
                "its 32-bit gradient, 4 for the master copy, 8 for Adam's two moments.",
                slips={
                    2 / STATE.total: "That is the weights alone, which is what serving needs. Training adds gradients, "
                    "a master copy and two moments.",
                    ADAM_MIXED.total / STATE.total: "That is 16 bytes per parameter, with gradients in 16 bits; large "
                    "runs keep them in 32, and 16 is a fair answer if you say so.",
                    4 / STATE.total: "That is weights and gradients in 16 bits, without the optimizer.",
                },
                tolerance=0.1,
                gpus=64,
            ),
            "days": Decision(
                "days for 15 trillion tokens",
                days,
                "days",
                f"{best.tokens_per_s:,.0f} tokens per second at an MFU of {best.mfu:.0%}: 6 FLOPs per parameter and "
                f"token, and {64 * machine.device.flops / 1e15:.0f} PFLOP/s of peak.",
                slips={
                    best.mfu: "That assumes every GPU at its peak; plan with 40 to 50 % of it.",
                    1 / 3: "Count backward too: 6 FLOPs per parameter and token, not 2.",
                    1 / 24: "Those are not days: check hours and days.",
                },
                tolerance=0.35,
            ),
        },
        Problem(
            "70B on 64 GPUs",
            numbers,
            (
                "Size first: {states} of states against {room} of memory: it fits, {share} per GPU, if they are "
                "sharded "
                "over everything. What is left is for activations.",
                "Then the layout. Tensor parallelism stays inside a node; the rest of the axes takes the network. The "
                "planner's best is {best}: {seconds} per step, an MFU of {mfu}, {held} per GPU, of which activations "
                "take {activations}.",
                "The simplest alternative is ZeRO-3 over all 64 with full recomputation: {flat} per GPU and "
                "{flat_seconds} per step. It is one line of configuration. Start there, and change the layout if the "
                "profile shows that it waits.",
                "Name the risk before you are asked: 64 GPUs make {tokens} tokens per second, so 15 trillion tokens "
                "take "
                "{days} days. The hardware fits the model but not the schedule.",
                "Measure first: one node, one microbatch, peak memory by kind, and the time of one all-gather across "
                "nodes. These three numbers decide whether the plan holds.",
            ),
            {
                "Why not TP 8, PP 2, DP 4, as is often quoted?": "It runs. Whether it is best depends on the batch and "
                "on what is recomputed; ask which bytes cross the nodes and how many microbatches fill the pipeline.",
                "What changes with 32,768-token sequences?": "Activations grow four times, so context parallelism or "
                "full recomputation comes in; states do not change at all.",
                "What if the network has a quarter of the bandwidth?": "Pipeline messages are the cheapest bytes per "
                "step and ZeRO-3's gathers the dearest: stages across nodes, shards inside them.",
            },
            "140 GB of weights over 64 GPUs is 2.2 GB each, so pure data parallelism is fine.",
            "It sizes inference: training holds {states}, and replicas do not divide it.",
        ),
    )


@cache
def seven_on_8() -> Case:
    """Train 7B on one node of 8 A100 with 40 GB."""
    model, machine = architecture("llama-2-7b"), cluster("a100-40", 8)
    best = search.rank(model, machine, 4096, 64).best
    replicas = memory(model, Layout(dp=8, microbatches=8), 4096)
    fits = {zero: memory(model, Layout(dp=8, zero=zero, microbatches=8), 4096).total for zero in range(4)}
    lowest = min(zero for zero, held in fits.items() if held <= machine.usable)
    numbers = {
        "states": shown(STATE.total * model.parameters, "B"),
        "replica": f"{replicas.total / GIB:.0f} GiB",
        "usable": f"{machine.usable / GIB:.0f} GiB",
        "lowest": str(lowest),
        "held": f"{fits[lowest] / GIB:.0f} GiB",
        "zero1": f"{fits[1] / GIB:.0f} GiB",
        "zero2": f"{fits[2] / GIB:.0f} GiB",
        "zero3": f"{fits[3] / GIB:.0f} GiB",
        "best": str(best.layout),
        "mfu": f"{best.mfu:.0%}",
    }
    return Case(
        {
            "replica": Decision(
                "bytes on one GPU under plain data parallelism, states alone",
                STATE.total * model.parameters,
                "B",
                f"{STATE.total} bytes times {model.parameters / 1e9:.2f} billion, on every GPU: replicas divide "
                "nothing.",
                slips={1 / 8: "Plain data parallelism keeps everything on every GPU; dividing is what ZeRO does."},
                tolerance=0.15,
            ),
            "stage": Decision(
                "the lowest ZeRO stage that fits with microbatches of one sequence",
                lowest,
                "",
                f"Stage 1: {numbers['zero1']}, stage 2: {numbers['zero2']}, stage 3: {numbers['zero3']} per GPU, of "
                f"{numbers['usable']} that are usable.",
                tolerance=0.01,
            ),
        },
        Problem(
            "7B on 8 GPUs of 40 GB",
            numbers,
            (
                "“The model has 7B parameters, so 14 GB, so it fits on one GPU” is true of serving. Training holds "
                "{states} of states, and a replica with its activations takes {replica} of {usable}.",
                "ZeRO divides in steps: stage 1 leaves {zero1}, stage 2 {zero2}, stage 3 {zero3}. Stage {lowest} is "
                "the "
                "lowest that fits, with {held}.",
                "All 8 GPUs share NVLink, so what each stage sends is hidden behind compute; I would take the "
                "planner's "
                "{best} at an MFU of {mfu} and use what memory is left for larger microbatches.",
            ),
            {
                "When would you use tensor parallelism here?": "When a microbatch of one sequence does not fit, or "
                "when "
                "the batch may not grow with the number of GPUs. It costs four collectives per layer.",
                "What does offloading change?": "It trades the host link for memory: 16 bytes per parameter leave the "
                "card, and the step waits for gradients down and weights up.",
            },
            "A 7B model needs 14 GB, so I would use DDP with a large batch.",
            "It forgets {states} of states; the first step ends out of memory.",
        ),
    )


@cache
def four_hundred_on_16k() -> Case:
    """405B on 16,384 H100: Meta's published layout, checked."""
    first, run, long = (each for each in published.RUNS if each.name.startswith("Llama 3 405B"))
    row = published.compare(run)
    model, machine, layout = run.architecture, run.cluster, run.layout
    time, held = step(model, layout, machine, run.seq), memory(model, layout, run.seq)
    bubble = idle_share(layout.pp, layout.microbatches, layout.chunks)
    plain = idle_share(layout.pp, layout.microbatches)
    numbers = {
        "layout": str(layout),
        "bubble": f"{bubble:.1%}",
        "plain": f"{plain:.0%}",
        "mfu": f"{row.predicted:.0%}",
        "reported": f"{row.reported:.0%}",
        "first": f"{published.compare(first).reported:.0%}",
        "first_batch": f"{first.layout.microbatches}",
        "batch": f"{layout.microbatches}",
        "long": str(long.layout.cp),
        "held": f"{held.total / GIB:.0f} GiB",
        "states": f"{(held.weights + held.gradients + held.optimizer) / GIB:.0f} GiB",
        "activations": f"{held.activations / GIB:.0f} GiB",
        "seconds": shown(time.seconds, "s"),
        "tokens": shown(layout.batch * run.seq / time.seconds, "tokens/s"),
    }
    return Case(
        {
            "bubble": Decision(
                "share of the step that is bubble: 16 stages, 16 microbatches, 8 chunks per stage",
                bubble,
                "",
                "(pp - 1) / (chunks · microbatches + pp - 1) = 15 / (8 · 16 + 15).",
                slips={
                    plain
                    / bubble: "That is without interleaving; with 8 chunks per stage the bubble is 8 times shorter.",
                    15 / 128 / bubble: "That is bubble over useful time; the share of the whole step is smaller.",
                },
                tolerance=0.05,
            ),
            "states": Decision(
                "bytes of states on one GPU: TP 8, PP 16, optimizer and gradients sharded over 128",
                held.weights + held.gradients + held.optimizer,
                "B",
                "405 billion / (8 · 16) parameters per rank: 2 bytes each for the weights, the other 16 divided by "
                "128.",
                slips={
                    STATE.total * model.parameters / 128 / (held.weights + held.gradients + held.optimizer): "That "
                    "leaves out what sharding over the data-parallel ranks saves.",
                },
                tolerance=0.2,
                gpus=16384,
            ),
        },
        Problem(
            "405B on 16,384 GPUs",
            numbers,
            (
                "The published layout is {layout} ([Llama Team 2024](https://arxiv.org/abs/2407.21783), table 4). TP "
                "fills a node; 16 stages leave about 8 layers each; optimizer and gradients are sharded over what "
                "is left.",
                "States take {states} per GPU, activations {activations}: they dominate, because the first stage "
                "has as "
                "many microbatches in flight as there are stages. All that fits into {held}, without recomputation.",
                "Our formulas give {mfu} MFU, {seconds} a step and {tokens}; {reported} were reported. From 8,192 to "
                "16,384 GPUs the batch stays, so microbatches per rank fall from {first_batch} to {batch}, and the "
                "bubble "
                "takes part of the gain ({first} before).",
                "For 128k-token sequences context parallelism of {long} comes in, and data parallelism shrinks by the "
                "same factor, so that the tokens per step stay.",
            ),
            {
                "Why is TP 8 and not 16?": "The 9th GPU is behind the network card: an all-reduce per layer over a "
                "link "
                "nine times slower.",
                "Why interleave?": "16 microbatches on 16 stages without it idle {plain} of the step, with 8 chunks "
                "{bubble}. The price is 8 times as many messages, and more activations in flight.",
            },
            "With 16,384 GPUs I would use ZeRO-3 everywhere; it is simplest.",
            "Each microbatch would gather all weights over the network, and the batch of 2,048 sequences is smaller "
            "than the number of ranks: most would have nothing to compute.",
        ),
    )


@cache
def gpt3_on_1024() -> Case:
    """GPT-3 on 1,024 A100 with Megatron's axes."""
    run = next(each for each in published.RUNS if each.name.startswith("GPT-3 175B, 1,024"))
    row, model = published.compare(run), run.architecture
    time = step(model, run.layout, run.cluster, run.seq)
    speed = run.layout.batch * run.seq / time.seconds
    days = 300e9 / speed / DAY
    share = mfu(model, run.layout, run.cluster, run.seq, time.seconds)
    numbers = {
        "layout": str(run.layout),
        "days": f"{days:.0f}",
        "hfu": f"{row.predicted:.0%}",
        "mfu": f"{share:.0%}",
        "reported": f"{row.reported:.0%}",
        "tp": f"{time.tp / time.seconds:.0%}",
        "bubble": f"{time.bubble / time.seconds:.0%}",
    }
    return Case(
        {
            "days": Decision(
                "days for 300 billion tokens",
                days,
                "days",
                f"{speed:,.0f} tokens per second: 6 · 175 billion FLOPs per token, and a third more for "
                "recomputation, at "
                f"{row.predicted:.0%} of 1,024 · 312 TFLOP/s.",
                slips={
                    row.predicted: "That is at the peak; no step reaches it.",
                    3 / 4: "Full recomputation adds a forward pass.",
                },
                tolerance=0.2,
            ),
        },
        Problem(
            "GPT-3 on 1,024 A100",
            numbers,
            (
                "Megatron's axes for this size are {layout}: TP 8 in the node, pipeline stages across nodes, replicas "
                "outermost ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473)).",
                "With full recomputation the hardware does 8 FLOPs per parameter and token for 6 that count. Say "
                "which you "
                "mean: {hfu} of the peak is used, {mfu} is useful. The paper's {reported} counts recomputation too.",
                "That gives {days} days for 300 billion tokens; the paper estimates 34. Tensor-parallel collectives "
                "take "
                "{tp} of the step and the bubble {bubble}.",
            ),
            {
                "Which of the two would you attack first?": "The recomputation: keeping activations that are cheap to "
                "hold is worth up to a quarter of the step. [Korthikanti et al. "
                "2022](https://arxiv.org/abs/2205.05198) "
                "did just that.",
            },
            "MFU was 45 %.",
            "That is the hardware's share, recomputation included. The useful share is {mfu}.",
        ),
    )


@cache
def fine_tune_on_a_node() -> Case:
    """Fine-tune 70B on 8 H100."""
    model, machine = architecture("llama-3-70b"), cluster("h100", 8)
    states, room = STATE.total * model.parameters, 8 * machine.usable
    rank, weights = 16, 2 * model.parameters
    per_layer = 4 * rank * (2 * model.hidden_size) + 3 * rank * (model.hidden_size + model.intermediate_size)
    adapters = model.num_layers * per_layer
    numbers = {
        "states": shown(states, "B"),
        "room": shown(room, "B"),
        "weights": shown(weights, "B"),
        "each": shown(weights / 8, "B"),
        "four": shown(weights / 4 / 8, "B"),
        "adapters": f"{adapters / 1e6:.0f} million",
        "share": f"{adapters / model.parameters:.2%}",
        "adapter_states": shown(STATE.total * adapters, "B"),
    }
    return Case(
        {
            "missing": Decision(
                "bytes missing for full fine-tuning on 8 GPUs of 80 GB, states alone",
                states - room,
                "B",
                f"{numbers['states']} of states against {numbers['room']} usable.",
                slips={states / (states - room): "That is all of them; the question asks for what does not fit."},
                tolerance=0.2,
            ),
            "adapters": Decision(
                "trainable parameters of LoRA with rank 16 on all seven matrices of a layer (kv heads counted as full)",
                adapters,
                "",
                "r · (inputs + outputs) per matrix: 4 of the attention, 3 of the MLP, 80 layers.",
                slips={1 / 80: "That is one layer's.", 4 / 7: "The MLP's matrices have adapters too."},
                tolerance=0.15,
            ),
        },
        Problem(
            "Fine-tune 70B on one node",
            numbers,
            (
                "Full fine-tuning holds {states}; the node has {room}. So it does not fit, sharded or not. Either the "
                "states leave the cards, or there are fewer of them.",
                "LoRA freezes the weights: {weights} in 16 bits, {each} per GPU when sharded, and {adapters} trainable "
                "parameters ({share}) with {adapter_states} of states. What is left is for activations.",
                "With 4-bit weights the base takes {four} per GPU; then two cards would do, at the price of "
                "dequantising "
                "in every product.",
                "Offloading keeps full fine-tuning possible: 16 bytes per parameter in host memory, and a step that "
                "waits for the host link.",
            ),
            {
                "Does LoRA save FLOPs?": "Hardly: forward and the gradient with respect to activations remain; only "
                "the "
                "weights' own gradients go, about a third of the matmuls.",
                "What else must be in memory?": "Activations, as without LoRA: they depend on tokens, not on what is "
                "trained. Recompute them.",
            },
            "70B in 16 bits is 140 GB and the node has 640, so there is room to spare.",
            "It counts weights only; {states} is what training holds.",
        ),
    )


@cache
def slower_on_two_nodes() -> Case:
    """A step that became 40 % slower when the job went from one node to two."""
    model = architecture("llama-3-8b")
    one, two = cluster("h100", 8), cluster("h100", 16, network=12.5e9)
    inside, across = Layout(tp=8, microbatches=16), Layout(tp=16, microbatches=16)
    moved = Layout(dp=2, tp=8, microbatches=8)
    times = [step(model, layout, machine, 8192) for layout, machine in ((inside, one), (across, two), (moved, two))]
    rates = [axis_path(machine, layout, "tp").bandwidth for layout, machine in ((inside, one), (across, two))]
    numbers = {
        "one": shown(times[0].seconds, "s"),
        "two": shown(times[1].seconds, "s"),
        "moved": shown(times[2].seconds, "s"),
        "ratio": f"{rates[0] / rates[1]:.1f}",
        "tp": shown(times[1].tp, "s"),
        "tp_one": shown(times[0].tp, "s"),
    }
    return Case(
        {
            "ratio": Decision(
                "times slower: a 16-rank tensor-parallel ring over two nodes with 100 Gb/s per GPU against 8 ranks "
                "inside",
                rates[0] / rates[1],
                "",
                "450 GB/s of NVLink against 8 cards of 12.5 GB/s, which the ring can use together.",
                slips={
                    8: "All 8 network cards of a node work for the ring, not one.",
                    36 / (rates[0] / rates[1]): "100 Gb/s is 12.5 GB/s per card, and a node has 8 of them.",
                },
                tolerance=0.2,
            ),
        },
        Problem(
            "40 % slower on two nodes",
            numbers,
            (
                "Ask what changed besides the number of nodes: the global batch, the layout, the input pipeline. "
                "Then look "
                "for the collective that crosses the nodes.",
                "The usual cause is a group that was inside a node. With tensor parallelism over 16 ranks each layer's "
                "all-reduces cross the network, {ratio} times slower: {tp} of a step of {two}, against {tp_one} of "
                "{one} "
                "before.",
                "Cure: TP stays 8, the second node becomes a replica: {moved} for the same batch. Gradients cross "
                "once per "
                "step, behind backward; activations crossed four times per layer.",
                "Prove it before you change anything: a profile of one rank, exposed communication by group, and a "
                "link "
                "test between the nodes. A card that fell back to a lower rate looks the same in the step time.",
            ),
            {
                "GPU utilisation shows 100 %. Does that refute you?": "No: a communication kernel that waits counts as "
                "busy. Ask for exposed communication or tensor-core activity.",
                "What if only data parallelism crosses and it is still slower?": "Then look at bucket size and "
                "overlap, at "
                "which ranks share a network card, and at the input pipeline of the second node.",
            },
            "The network is slow, we need a faster one.",
            "Perhaps, but first move the bytes that need not cross it.",
        ),
    )
