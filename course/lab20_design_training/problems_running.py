"""Problems of a job that runs: network, failures, stragglers, spikes, starving input, scaling and what it costs."""

from dataclasses import replace
from functools import cache

from course.lab20_design_training.problems import DAY
from course.shared.cases import DesignCase
from course.shared.decisions import Decision, shown
from minillm.predict import faults
from minillm.predict.model import bill, causal_context
from minillm.predict.planner import published, search
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.compute import MODERN
from minillm.predict.planner.layout import Layout, axis_path
from minillm.predict.planner.step import step

INTERRUPTIONS, DAYS, GPUS = faults.LLAMA3_INTERRUPTIONS, faults.LLAMA3_DAYS, faults.LLAMA3_GPUS
TOKENS = 15.6e12  # Llama Team 2024, §3.2
WATTS = 700  # of an H100 SXM, NVIDIA's data sheet
GPU_HOURS = 30.84e6  # of the 405B model, its model card
RESTART_S, SAVE_S = 600.0, 30.0


@cache
def slower_on_two_nodes() -> DesignCase:
    """A step that became 50 % slower when the job went from one node to two."""
    model, network = architecture("llama-3-8b"), 12.5e9
    one, two = cluster("a100-80", 8), cluster("a100-80", 16, network=network)
    inside, across = Layout(tp=8, microbatches=16), Layout(tp=16, microbatches=16)
    moved = Layout(dp=2, tp=8, microbatches=8)
    waits = replace(MODERN, overlap=False)  # the job's code waits for every collective
    cases = ((inside, one), (across, two), (moved, two))
    times = [step(model, layout, machine, 4096, waits) for layout, machine in cases]
    overlapped = step(model, moved, two, 4096)
    rates = [axis_path(machine, layout, "tp").bandwidth for layout, machine in ((inside, one), (across, two))]
    numbers = {
        "one": shown(times[0].seconds, "s"),
        "two": shown(times[1].seconds, "s"),
        "grew": f"{times[1].seconds / times[0].seconds - 1:.0%}",
        "moved": shown(times[2].seconds, "s"),
        "exposed": shown(times[2].dp, "s"),
        "overlapped": shown(overlapped.seconds, "s"),
        "ratio": f"{rates[0] / rates[1]:.1f}",
        "tp": shown(times[1].tp, "s"),
        "tp_one": shown(times[0].tp, "s"),
    }
    return DesignCase(
        {
            "ratio": Decision(
                "times slower: a 16-rank tensor-parallel ring over two nodes of A100 with 100 Gb/s per GPU against 8 "
                "ranks inside one",
                rates[0] / rates[1],
                "",
                f"{one.device.link / 1e9:.0f} GB/s of NVLink against 8 cards of {network / 1e9:g} GB/s, which the ring "
                "can use together.",
                slips={
                    8: "All 8 network cards of a node work for the ring, not one.",
                    1 / 8: "100 Gb/s are 12.5 GB/s per card: a byte has 8 bits.",
                },
                tolerance=0.2,
            ),
        },
        numbers,
    )


@cache
def checkpoint_interval() -> DesignCase:
    """How often to save on 16,384 GPUs, from the published number of interruptions."""
    mtbf = DAYS * DAY / INTERRUPTIONS
    device = mtbf * GPUS
    best = faults.young_interval(SAVE_S, mtbf)
    hourly, least = (faults.wasted_share(each, SAVE_S, RESTART_S, mtbf) for each in (3600.0, best))
    small = faults.job_mtbf(device, 64)
    numbers = {
        "mtbf": f"{mtbf / 3600:.1f} hours",
        "device": f"{device / DAY / 365:.1f} years",
        "best": f"{best / 60:.0f} minutes",
        "hourly": f"{hourly:.0%}",
        "least": f"{least:.0%}",
        "restart": f"{RESTART_S / mtbf:.0%}",
        "exact": f"{1 - faults.goodput(best, SAVE_S, RESTART_S, mtbf):.1%}",
        "small": f"{small / DAY:.0f} days",
        "small_best": f"{faults.young_interval(SAVE_S, small) / 3600:.1f} hours",
    }
    return DesignCase(
        {
            "mtbf": Decision(
                "seconds between interruptions: 419 in 54 days",
                mtbf,
                "s",
                f"54 · 86,400 / 419: {numbers['mtbf']}, on {GPUS:,} GPUs. One GPU alone: {numbers['device']}.",
                gpus=GPUS,
            ),
            "interval": Decision(
                "seconds between saves that waste least, if a save stops training for 30 s",
                best,
                "s",
                f"√(2 · 30 s · {mtbf:,.0f} s) = {numbers['best']}.",
                slips={
                    2**-0.5: "The 2 belongs under the root: a failure costs half an interval on average, not a whole."
                },
                tolerance=0.1,
            ),
        },
        numbers,
    )


@cache
def a_hang() -> DesignCase:
    """What a hang costs until the timeout ends it."""
    timeout = 600.0
    lost = GPUS * timeout / 3600
    numbers = {"lost": f"{lost:,.0f}", "share": f"{timeout / (DAYS * DAY / INTERRUPTIONS):.0%}"}
    return DesignCase(
        {
            "lost": Decision(
                "GPU-hours lost if a hang on 16,384 GPUs is found by a timeout of ten minutes",
                lost,
                "GPU-hours",
                "16,384 GPUs wait for 1/6 hour: all of them, as a collective ends for nobody before it ends for all.",
                slips={1 / GPUS: "All GPUs wait, not one."},
                tolerance=0.1,
            ),
        },
        numbers,
    )


@cache
def a_straggler() -> DesignCase:
    """One slow GPU among 1,024."""
    slow = 1.2
    lost = 1 - 1 / slow
    numbers = {"lost": f"{lost:.0%}", "gpus": f"{1024 * lost:.0f}", "pays": f"{RESTART_S / lost / 60:.0f} minutes"}
    return DesignCase(
        {
            "lost": Decision(
                "share of throughput lost if one of 1,024 GPUs takes 20 % longer for its part of a step",
                lost,
                "",
                "A synchronous step ends with its slowest rank: 1 - 1/1.2.",
                slips={
                    0.2 / 1024 / lost: "That spreads the loss over all ranks, but all of them wait for the slow one.",
                    0.2 / lost: "The time grows by 20 %; throughput falls by 1 - 1/1.2.",
                },
                tolerance=0.05,
            ),
        },
        numbers,
    )


@cache
def a_loss_spike() -> DesignCase:
    """Rolling back after a loss spike."""
    seconds = 7.0  # as the question says: about a step of 405B on 16,384 H100
    back, skipped = 100, 200  # OPT and PaLM restarted some hundred steps earlier and skipped batches
    lost = GPUS * back * seconds / 3600
    numbers = {"lost": f"{lost:,.0f}", "seconds": shown(seconds, "s"), "back": str(back), "skipped": str(skipped)}
    return DesignCase(
        {
            "lost": Decision(
                f"GPU-hours of a rollback by {back} steps on 16,384 GPUs, at {numbers['seconds']} a step",
                lost,
                "GPU-hours",
                f"{back} steps of {numbers['seconds']} on {GPUS:,} GPUs.",
                slips={1 / GPUS: "All GPUs repeat the steps, not one."},
                tolerance=0.15,
            ),
        },
        numbers,
    )


@cache
def starving_input() -> DesignCase:
    """Does the loader keep up?"""
    model, machine = architecture("llama-3-8b"), cluster("h100", 8)
    best = search.rank(model, machine, 8192, 128).best
    per_worker, tokens_per_byte = 1.0e6, 0.25  # tokens/s of one process that tokenises; a token is about four bytes
    workers = best.tokens_per_s / per_worker
    text = best.tokens_per_s / tokens_per_byte
    stored = best.tokens_per_s * 4
    numbers = {
        "speed": shown(best.tokens_per_s, "tokens/s"),
        "workers": f"{workers:.0%}",
        "text": shown(text, "B/s"),
        "stored": shown(stored, "B/s"),
    }
    return DesignCase(
        {
            "read": Decision(
                "bytes per second that a node reads if tokens are stored as 4-byte ids",
                stored,
                "B/s",
                f"8 GPUs train 8B at {numbers['speed']} (the planner's best layout), 4 bytes each.",
                slips={1 / 4: "Those are tokens; an id takes 4 bytes.", 1 / 8: "All 8 GPUs of the node read."},
                tolerance=0.3,
            ),
        },
        numbers,
    )


@cache
def scaling() -> DesignCase:
    """Strong and weak scaling of 8B from 8 to 1,024 GPUs."""
    model = architecture("llama-3-8b")

    def speed(gpus: int, batch: int) -> float:
        return search.rank(model, cluster("h100", gpus), 8192, batch).best.tokens_per_s / gpus

    base = speed(8, 256)
    strong, weak = speed(1024, 256) / base, speed(1024, 256 * 128) / base
    before, after = (published.compare(run) for run in published.RUNS if run.name.endswith("GPUs, 8k tokens"))
    numbers = {
        "strong": f"{strong:.0%}",
        "weak": f"{weak:.0%}",
        "each": f"{256 / 1024:.2g}",
        "worth": f"{1024 * strong:.0f}",
        "idle": f"{1024 * (1 - strong):.0f}",
        "before": f"{before.reported:.0%}",
        "after": f"{after.reported:.0%}",
    }
    return DesignCase(
        {
            "busy": Decision(
                "share of 1,024 GPUs with something to compute, for 256 sequences per step and data parallelism alone",
                256 / 1024,
                "",
                "256 sequences, one per GPU: the others get work only from axes that divide a sequence or a layer "
                "(tensor, context, pipeline), which exchange activations.",
                slips={
                    4: "Only if other axes share each sequence's work.",
                    1 / 32: "8 GPUs are where it started.",
                    1024: "That is the number of GPUs with work; the question asks for their share.",
                },
                tolerance=0.05,
            ),
        },
        numbers,
    )


@cache
def money_and_energy() -> DesignCase:
    """What the 405B run costs."""
    model = architecture("llama-3-405b")
    flops = TOKENS * model.training_flops(causal_context(8192))
    attention = flops / (TOKENS * model.training_flops(0)) - 1
    effective = 0.9  # Llama Team 2024, §3.3.4: more than 90 % of the time
    actual = bill(flops, GPUS, 989e12, 0.41, watts=WATTS, pue=1.1, price_per_hour=2.0)
    ideal = bill(flops, GPUS, 989e12, 1.0, watts=WATTS, pue=1.1, price_per_hour=2.0)
    numbers = {
        "flops": f"{flops:.2g}".replace("e+", "e"),
        "days": f"{actual.days:.0f}",
        "hours": f"{actual.device_hours / 1e6:.0f} million",
        "money": f"{actual.money / 1e6:.0f} million",
        "energy": f"{actual.energy_mwh / 1e3:.0f} GWh",
        "percent": f"{actual.money / 1e8:.2g} million",
        "with_failures": f"{actual.days / effective:.0f}",
        "published": f"{GPU_HOURS / 1e6:.1f} million",
        "off": f"{actual.device_hours / GPU_HOURS - 1:+.0%}",
        "peak": f"{ideal.days:.0f}",
        "pue": f"{1.5 / 1.1 - 1:.0%}",
    }
    return DesignCase(
        {
            "flops": Decision(
                "FLOPs to train 405B on 15.6 trillion tokens",
                flops,
                "FLOP",
                f"6 per parameter and token, and {attention:.0%} more for attention at 8,192 tokens; 3.8e25 are "
                "published.",
                tolerance=0.12,
            ),
            "days": Decision(
                "days on 16,384 H100 at 41 % MFU",
                actual.days,
                "days",
                f"{numbers['flops']} FLOPs / (16,384 · 989 TFLOP/s · 0.41); {numbers['with_failures']} if 90 % of the "
                "time is effective, and as right if you say so.",
                also=(actual.days / effective,),
                slips={ideal.days / actual.days: "That is at the peak.", 24: "Those are hours."},
                tolerance=0.15,
            ),
            "energy": Decision(
                "energy in MWh at 700 W per GPU and a PUE of 1.1",
                actual.energy_mwh,
                "MWh",
                f"{numbers['hours']} GPU-hours · 700 W · 1.1.",
                also=(actual.energy_mwh / effective,),
                slips={1e3: "Those are kWh.", 1e-3: "Those are GWh.", 1 / 1.1: "Cooling is missing: a PUE of 1.1."},
                tolerance=0.08,
            ),
        },
        numbers,
    )
