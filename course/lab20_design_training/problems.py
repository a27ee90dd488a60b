"""The problems of lab 20: decisions whose values the planner computes, and answers filled with the same numbers."""

from dataclasses import replace
from functools import cache

from course.shared.cases import DesignCase
from course.shared.decisions import Decision, shown
from minillm.predict.model import ADAM_MIXED, causal_context
from minillm.predict.planner import published, search
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import GIB, cluster
from minillm.predict.planner.layout import RECOMPUTE, Layout, axis_path
from minillm.predict.planner.memory import STATE, memory
from minillm.predict.planner.step import mfu, step
from minillm.predict.training.pipeline import idle_share

DAY = 86400.0


@cache
def seventy_on_64() -> DesignCase:
    """Train 70B from scratch on 64 H100 with 8,192-token sequences, 512 per step."""
    model, machine = architecture("llama-3-70b"), cluster("h100", 64)
    states = STATE.total * model.parameters
    ranking = search.rank(model, machine, 8192, 512)
    best, flat = ranking.best, Layout(dp=64, zero=3, microbatches=8, recompute="full")
    flat_bytes, flat_time = memory(model, flat, 8192).total, step(model, flat, machine, 8192)
    days = 15e12 / best.tokens_per_s / DAY
    often = (Layout(dp=4, zero=1, tp=8, pp=2, microbatches=128, recompute=each) for each in RECOMPUTE)
    quoted = next(layout for layout in often if memory(model, layout, 8192).total <= machine.usable)
    same_device = (run for run in published.RUNS if run.cluster.device.name == machine.device.name)
    reported = sorted(run.reported for run in same_device if not run.stack.fp8)
    careful = 15e12 * model.training_flops(causal_context(8192)) / (64 * machine.device.flops * reported[0]) / DAY
    recipe = next(run for run in published.RUNS if run.name == "NeMo 70B, 64 GPUs")
    numbers = {
        "why": reasons(best.layout),
        "low": f"{reported[0]:.0%}",
        "high": f"{reported[-1]:.0%}",
        "careful": f"{careful:,.0f} days",
        "recipe": f"{recipe.reported:.0%}",
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
        "usable": f"{machine.usable / GIB:.0f} GiB",
        "gpus": f"{64 * days / 90:,.0f}",
        "quoted_recompute": quoted.recompute if quoted.recompute != "none" else "no",
        "quoted_held": f"{memory(model, quoted, 8192).total / GIB:.0f} GiB",
        "quoted_seconds": shown(step(model, quoted, machine, 8192).seconds, "s"),
        "quoted_weights": shown(STATE.parameter * 70e9 / 16, "B"),
        "quoted_third": shown(STATE.parameter * 70e9 / 64, "B"),
    }
    return DesignCase(
        {
            "states": Decision(
                "bytes of all training states of 70B parameters, all GPUs together",
                states,
                "B",
                f"{model.parameters / 1e9:.1f} billion parameters times {STATE.total} bytes: 2 for the 16-bit weight, "
                "4 for its 32-bit gradient, 4 for the master copy, 8 for Adam's two moments.",
                slips={
                    2 / STATE.total: "That is the weights alone, which is what serving needs. Training adds gradients, "
                    "a master copy and two moments.",
                    ADAM_MIXED.total / STATE.total: "That is 16 bytes per parameter, with gradients in 16 bits; the "
                    "question keeps them in 32, as large runs do.",
                    4 / STATE.total: "That is weights and gradients in 16 bits, without the optimizer.",
                },
                tolerance=0.1,
                gpus=64,
            ),
            "days": Decision(
                "days for 15 trillion tokens",
                days,
                "days",
                f"{best.tokens_per_s:,.0f} tokens per second at an MFU of {best.mfu:.0%}, or {careful:,.0f} days at "
                f"the {reported[0]:.0%} that published runs reach at least: 6 FLOPs per parameter and "
                f"token, and {64 * machine.device.flops / 1e15:.0f} PFLOP/s of peak.",
                slips={
                    best.mfu: "That assumes every GPU at its peak; plan with 40 to 50 % of it.",
                    1 / 3: "Count backward too: 6 FLOPs per parameter and token, not 2.",
                    2 / 3: "That counts 4 FLOPs per parameter and token, where forward takes 2 and backward 4; or it "
                    "takes a larger share of the peak than any published 16-bit run.",
                },
                tolerance=0.16,  # from the planner's best to the careful number, and a little on both sides
                also=(careful,),
            ),
        },
        numbers,
    )


def reasons(layout: Layout) -> str:
    """What speaks for each axis of a layout, in the words of the question: what crosses which link."""
    found = []
    if layout.tp == 1:
        found.append("without tensor parallelism no layer waits for a collective, and products stay wide")
    else:
        found.append(f"tensor parallelism of {layout.tp} keeps its collectives on NVLink")
    if layout.cp > 1:
        way = "inside a node" if layout.tp * layout.cp <= 8 else "over the network"
        found.append(
            f"context parallelism of {layout.cp} divides activations and passes on the few kv heads' keys and values "
            f"{way}, which hide behind attention"
        )
    if layout.pp > 1:
        found.append(f"{layout.pp} pipeline stages across nodes send the fewest bytes, and chunks shorten their bubble")
    if layout.zero == 3:
        found.append(
            "ZeRO-3 beside them is affordable because few replicas gather what each stage holds; with many "
            "microbatches per gather ZeRO-1 is the usual choice"
        )
    elif layout.zero:
        found.append(f"ZeRO-{layout.zero} shards what need not be whole in a step")
    return "; ".join(found)


@cache
def seven_on_8() -> DesignCase:
    """Train 7B on one node of 8 A100 with 40 GB."""
    model, machine = architecture("llama-2-7b"), cluster("a100-40", 8)
    best = search.rank(model, machine, 4096, 64).best
    replicas = memory(model, Layout(dp=8, microbatches=8), 4096)
    fits = {zero: memory(model, Layout(dp=8, zero=zero, microbatches=8), 4096).total for zero in range(4)}
    two_full = memory(model, Layout(dp=8, zero=2, microbatches=8, recompute="full"), 4096).total
    a100 = (run for run in published.RUNS if "A100" in run.cluster.device.name and run.basis == "model")
    reported = sorted(run.reported for run in a100)
    lowest = min(zero for zero, held in fits.items() if held <= machine.usable)
    numbers = {
        "states": f"{STATE.total * model.parameters / GIB:.0f} GiB",
        "replica": f"{replicas.total / GIB:.0f} GiB",
        "usable": f"{machine.usable / GIB:.0f} GiB",
        "lowest": str(lowest),
        "held": f"{fits[lowest] / GIB:.0f} GiB",
        "two_full": f"{two_full / GIB:.0f} GiB",
        "zero1": f"{fits[1] / GIB:.0f} GiB",
        "zero2": f"{fits[2] / GIB:.0f} GiB",
        "zero3": f"{fits[3] / GIB:.0f} GiB",
        "best": str(best.layout),
        "mfu": f"{best.mfu:.0%}",
        "low": f"{reported[0]:.0%}",
        "high": f"{reported[-1]:.0%}",
    }
    return DesignCase(
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
                "the lowest ZeRO stage that fits with microbatches of one sequence, nothing recomputed",
                lowest,
                "",
                f"Stage 1: {numbers['zero1']}, stage 2: {numbers['zero2']}, stage 3: {numbers['zero3']} per GPU, of "
                f"{numbers['usable']} that are usable.",
                tolerance=0.01,
            ),
        },
        numbers,
    )


@cache
def four_hundred_on_16k() -> DesignCase:
    """405B on 16,384 H100: Meta's published layout, checked."""
    first, run, long = (each for each in published.RUNS if each.name.startswith("Llama 3 405B"))
    row, far = published.compare(run), published.compare(long)
    model, machine, layout = run.architecture, run.cluster, run.layout
    time, held = step(model, layout, machine, run.seq), memory(model, layout, run.seq)
    states = held.weights + held.gradients + held.optimizer
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
        "long_mfu": f"{far.predicted:.0%}",
        "long_reported": f"{far.reported:.0%}",
        "usable": f"{machine.usable / GIB:.0f} GiB",
        "tp8": shown(axis_path(machine, layout, "tp").bandwidth, "B/s"),
        "tp16": shown(axis_path(machine, replace(layout, tp=16, dp=layout.dp // 2), "tp").bandwidth, "B/s"),
        "held": f"{held.total / GIB:.0f} GiB",
        "states": f"{states / GIB:.0f} GiB",
        "activations": f"{held.activations / GIB:.0f} GiB",
        "seconds": shown(time.seconds, "s"),
        "tokens": shown(layout.batch * run.seq / time.seconds, "tokens/s"),
    }
    return DesignCase(
        {
            "bubble": Decision(
                "share of the step that is bubble: 16 stages, 16 microbatches, 8 chunks per stage",
                bubble,
                "",
                "(pp - 1) / (chunks · microbatches + pp - 1) = 15 / (8 · 16 + 15).",
                slips={
                    plain / bubble: "That is without interleaving: 8 chunks make the bubble 8 times shorter.",
                    15 / 128 / bubble: "That is bubble over useful time; the share of the whole step is smaller.",
                },
                tolerance=0.05,
            ),
            "states": Decision(
                "bytes of states on one GPU: TP 8, PP 16, optimizer and gradients sharded over 128",
                states,
                "B",
                "405 billion / (8 · 16) parameters per rank: 2 bytes each for the weights, the other 16 divided by "
                "128.",
                slips={STATE.total * model.parameters / 128 / states: "That leaves out what sharding saves."},
                tolerance=0.2,
                gpus=16384,
            ),
        },
        numbers,
    )


@cache
def gpt3_on_1024() -> DesignCase:
    """GPT-3 on 1,024 A100 with Megatron's axes."""
    run = next(each for each in published.RUNS if each.name.startswith("GPT-3 175B, 1,024"))
    row, model = published.compare(run), run.architecture
    time = step(model, run.layout, run.cluster, run.seq, run.stack)
    speed = run.layout.batch * run.seq / time.seconds
    days = 300e9 / speed / DAY
    estimated = 8 * 300e9 * 175e9 / (1024 * 140e12) / DAY  # Narayanan et al. 2021, §5.1: 8TP/(nX) at 140 TFLOP/s
    share = mfu(model, run.layout, run.cluster, run.seq, time.seconds)
    numbers = {
        "layout": str(run.layout),
        "days": f"{days:.0f}",
        "hfu": f"{row.predicted:.0%}",
        "mfu": f"{share:.0%}",
        "reported": f"{row.reported:.0%}",
        "tp": f"{time.tp / time.seconds:.0%}",
        "bubble": f"{time.bubble / time.seconds:.0%}",
        "held": f"{row.memory / GIB:.0f} GiB",
        "usable": f"{row.usable / GIB:.0f} GiB",
    }
    return DesignCase(
        {
            "days": Decision(
                "days for 300 billion tokens",
                days,
                "days",
                f"{speed:,.0f} tokens per second: 6 · 175 billion FLOPs per token, and a third more for recomputation, "
                f"at {row.predicted:.0%} of 1,024 · 312 TFLOP/s.",
                slips={
                    row.predicted: "That is at the peak; no step reaches it.",
                    3 / 4: "Full recomputation adds a forward pass.",
                },
                tolerance=0.2,
                also=(estimated,),
            ),
        },
        numbers,
    )


@cache
def fine_tune_on_a_node() -> DesignCase:
    """Fine-tune 70B on 8 H100."""
    model, machine = architecture("llama-3-70b"), cluster("h100", 8)
    states, room = STATE.total * model.parameters, 8 * machine.usable
    short = ADAM_MIXED.total * model.parameters - room  # with gradients in 16 bits
    rank, weights = 16, 2 * model.parameters
    hidden, kv = model.hidden_size, model.num_kv_heads * model.head_dim
    attention = rank * (2 * (hidden + hidden) + 2 * (hidden + kv))
    per_layer = attention + 3 * rank * (hidden + model.intermediate_size)
    adapters = model.num_layers * per_layer
    without_kv = 2 * rank * (hidden + kv) / per_layer  # share of k's and v's adapters
    as_wide = 2 * rank * (hidden - kv) / per_layer  # what is added if k and v are as wide as q
    numbers = {
        "states": shown(states, "B"),
        "room": shown(room, "B"),
        "weights": shown(weights, "B"),
        "each": shown(weights / 8, "B"),
        "four": shown(weights / 4 / 8, "B"),
        "adapters": f"{adapters / 1e6:.0f} million",
        "share": f"{adapters / model.parameters:.2%}",
        "adapter_states": shown(STATE.total * adapters, "B"),
        "usable": shown(machine.usable, "B"),
    }
    return DesignCase(
        {
            "missing": Decision(
                "bytes missing for full fine-tuning on 8 GPUs of 80 GB, states alone",
                states - room,
                "B",
                f"{numbers['states']} of states against {numbers['room']} usable. With gradients in 16 bits, 16 bytes "
                f"per parameter, {shown(short, 'B')} are missing.",
                slips={states / (states - room): "That is all of them; the question asks for what does not fit."},
                tolerance=0.13,
                also=(short,),
            ),
            "adapters": Decision(
                "trainable parameters of LoRA with rank 16 on all seven matrices of every layer of Llama 3 70B",
                adapters,
                "",
                f"r · (inputs + outputs) per matrix: 4 of the attention (k and v are {kv:,} wide), 3 of the MLP, 80 "
                "layers.",
                slips={
                    1 / 80: "That is one layer's.",
                    attention / per_layer: "The MLP's matrices have adapters too.",
                    0.5 * attention / per_layer: "Each matrix has two factors, and the MLP's have adapters too.",
                    1 / rank: "Rank 16: each matrix has r · (inputs + outputs) numbers.",
                    1 + as_wide: f"k and v have 8 heads of 128: their outputs are {kv:,} wide, not {hidden:,}.",
                    1 - without_kv: "That leaves out k and v: all seven matrices have adapters.",
                },
                tolerance=0.04,
            ),
        },
        numbers,
    )
