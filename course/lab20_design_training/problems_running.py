"""Problems of a job that runs: failures, stragglers, spikes, starving input, scaling and what it costs."""

from functools import cache

from course.lab20_design_training.problems import DAY
from course.shared.cases import Case
from course.shared.decisions import Decision, Problem, shown
from minillm.predict import cost, faults
from minillm.predict.model import causal_context
from minillm.predict.planner import published, search
from minillm.predict.planner.architectures import architecture
from minillm.predict.planner.clusters import cluster
from minillm.predict.planner.step import step

INTERRUPTIONS, DAYS, GPUS = 419, 54, 16384  # Llama Team 2024, §3.3.4, table 5
TOKENS = 15.6e12  # Llama Team 2024, §3.2
WATTS = 700  # of an H100 SXM, NVIDIA's data sheet
GPU_HOURS = 30.84e6  # of the 405B model, its model card
RESTART_S, SAVE_S = 600.0, 30.0


@cache
def checkpoint_interval() -> Case:
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
        "small": f"{small / DAY:.0f} days",
        "small_best": f"{faults.young_interval(SAVE_S, small) / 3600:.1f} hours",
    }
    return Case(
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
                    2**-0.5: "The 2 belongs under the root: a failure costs half an interval in the mean, not a whole."
                },
                tolerance=0.1,
            ),
        },
        Problem(
            "How often to save",
            numbers,
            (
                "Interruptions come every {mtbf} ([Llama Team 2024](https://arxiv.org/abs/2407.21783), §3.3.4), so "
                "one GPU "
                "fails once in {device}. Failure is a property of the job's size, not of a bad device.",
                "Young's interval for a 30 s save is {best}. Then {least} of the time is lost, {restart} of it to "
                "restarts of ten minutes, which no interval changes. With hourly saves it would be {hourly}.",
                "So the next improvement is not the interval. It is a restart that takes less, and a save that only "
                "stalls for the copy to host memory.",
            ),
            {
                "And on 64 GPUs?": "A failure every {small}; save every {small_best}, and spend your time elsewhere.",
                "What makes a save slow?": "One rank that writes everything, or a file system that gets all ranks' "
                "files "
                "at once. Every rank writes what it alone holds; replicas are written once.",
            },
            "Every 1,000 steps, that is the usual.",
            "An interval without a failure rate and the cost of a save is a habit.",
        ),
    )


@cache
def a_hang() -> Case:
    """What a hang costs until the timeout ends it."""
    timeout = 600.0
    lost = GPUS * timeout / 3600
    numbers = {"lost": f"{lost:,.0f}", "share": f"{timeout / (DAYS * DAY / INTERRUPTIONS):.0%}"}
    return Case(
        {
            "lost": Decision(
                "GPU-hours lost if a hang on 16,384 GPUs is found by a timeout of ten minutes",
                lost,
                "GPU-hours",
                "16,384 GPUs wait for 1/6 hour: all of them, as a collective ends for nobody before it ends for all.",
                slips={60: "Those are GPU-minutes.", 1 / GPUS: "All GPUs wait, not one."},
                tolerance=0.1,
            ),
        },
        Problem(
            "The job hangs",
            numbers,
            (
                "A collective that one rank never enters blocks all of them. Ten minutes until the timeout cost {lost} "
                "GPU-hours; at one per interruption that is {share} of the run.",
                "Find out who is missing before you kill anything: the flight recorder says for every rank which "
                "operation "
                "it entered last. The rank with the smallest sequence number is the one to look at; the others are "
                "victims.",
                "Then tell the cases apart: the rank is dead (process gone), silent (no heartbeat), slow "
                "(progressing) or in "
                "another collective (mismatch: another order or another size).",
            ),
            {
                "Why not a timeout of ten seconds?": "A save, a compile or the first batch takes longer. Use short "
                "ones "
                "for the step and long ones for what is known to be long.",
                "How do you reproduce it?": "From the recorder: which rank, which step, which batch. Run that batch on "
                "two ranks with the mismatch check on.",
            },
            "Restart it; it is probably a network glitch.",
            "Without knowing who was missing, the same hang comes back at the same place.",
        ),
    )


@cache
def a_straggler() -> Case:
    """One slow GPU among 1,024."""
    slow = 1.2
    lost = 1 - 1 / slow
    numbers = {"lost": f"{lost:.0%}", "gpus": f"{1024 * lost:.0f}"}
    return Case(
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
        Problem(
            "A straggler",
            numbers,
            (
                "Every synchronous step waits for the slowest rank, so one GPU that is 20 % slower costs {lost} of the "
                "whole job, as much as {gpus} of the 1,024 GPUs.",
                "To find it, measure each rank's own work apart from its waiting: the straggler is the one that waits "
                "*least* in collectives. Step times say nothing, they are alike on all ranks.",
                "Check clock and temperature of that card, its network card's rate and its input worker; if it "
                "stays slow, "
                "replace the node and go on from the checkpoint.",
            ),
            {
                "Could it be the data instead?": "Yes: a rank with longer documents has more attention to compute. "
                "Then "
                "the slow rank changes from step to step.",
            },
            "I look for the rank with the longest step.",
            "All ranks have the same step time; that is what synchronous means.",
        ),
    )


@cache
def a_loss_spike() -> Case:
    """Rolling back after a loss spike."""
    run = next(each for each in published.RUNS if each.name.startswith("Llama 3 405B, 16,384 GPUs, 8k"))
    seconds = step(run.architecture, run.layout, run.cluster, run.seq).seconds
    back, skipped = 100, 200  # OPT and PaLM restarted some hundred steps earlier and skipped batches
    lost = GPUS * back * seconds / 3600
    numbers = {"lost": f"{lost:,.0f}", "seconds": shown(seconds, "s"), "back": str(back), "skipped": str(skipped)}
    return Case(
        {
            "lost": Decision(
                f"GPU-hours of a rollback by {back} steps on 16,384 GPUs, at {numbers['seconds']} a step",
                lost,
                "GPU-hours",
                f"{back} steps of {numbers['seconds']} on {GPUS:,} GPUs.",
                slips={60: "Those are GPU-minutes.", 1 / GPUS: "All GPUs repeat the steps, not one."},
                tolerance=0.15,
            ),
        },
        Problem(
            "The loss spikes",
            numbers,
            (
                "First decide whether it is data, numbers or hardware. The gradient norm before the spike, the "
                "batch of "
                "that step, and whether the same step repeats the spike from the last checkpoint tell the three apart.",
                "If it repeats, roll back about {back} steps and skip some {skipped} batches around it, as "
                "[Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311) did (§5.1): {lost} GPU-hours here.",
                "If it does not repeat, suspect a bit flip: compare replicas' weights across the data-parallel "
                "group. They "
                "must be equal to the bit.",
            ),
            {
                "Would clipping prevent it?": "It bounds one step. A slow drift of attention logits or of the "
                "embedding's "
                "norm passes through it; qk-norm or z-loss act on the cause.",
            },
            "Lower the learning rate and go on.",
            "It hides the cause, and slows down all the steps that were fine.",
        ),
    )


@cache
def starving_input() -> Case:
    """Does the loader keep up?"""
    model, machine = architecture("llama-3-8b"), cluster("h100", 8)
    best = search.rank(model, machine, 8192, 128).best
    per_worker, tokens_per_byte = 1.0e6, 0.25  # tokens/s of one process that tokenises; a token is about four bytes
    workers = best.tokens_per_s / per_worker
    text = best.tokens_per_s / tokens_per_byte
    stored = best.tokens_per_s * 4
    numbers = {
        "speed": shown(best.tokens_per_s, "tokens/s"),
        "workers": f"{workers:.2g}",
        "text": shown(text, "B/s"),
        "stored": shown(stored, "B/s"),
    }
    return Case(
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
        Problem(
            "The input pipeline starves",
            numbers,
            (
                "A language model reads almost nothing: {speed} are {stored} of ids. If input is the bottleneck, "
                "bandwidth "
                "is not; latency, a single process, or work per sample is.",
                "Ask for the share of a step spent in `next(batch)`. With prefetching it is zero or the whole "
                "difference: "
                "the step is the longer of loading and computing, not their sum.",
                "Tokenising on the fly needs {workers} processes here at a million tokens per second each, and "
                "reads {text} "
                "of text. Tokenise once, store ids, read them by memory map.",
            ),
            {
                "GPUs idle for two seconds every few minutes. Why?": "A shard boundary, a shuffle buffer that "
                "refills, or a "
                "worker that restarts. The pattern's period says which.",
            },
            "Add more loader workers.",
            "It helps only if a worker's CPU time is the limit; measure `next(batch)` first.",
        ),
    )


@cache
def scaling() -> Case:
    """Strong and weak scaling of 8B from 8 to 1,024 GPUs."""
    model = architecture("llama-3-8b")

    def speed(gpus: int, batch: int) -> float:
        return search.rank(model, cluster("h100", gpus), 8192, batch).best.tokens_per_s / gpus

    base = speed(8, 256)
    strong, weak = speed(1024, 256) / base, speed(1024, 256 * 128) / base
    numbers = {"strong": f"{strong:.0%}", "weak": f"{weak:.0%}", "each": f"{256 / 1024:.2g}"}
    return Case(
        {
            "strong": Decision(
                "efficiency of 1,024 GPUs against 8 at the same batch of 256 sequences of 8,192 tokens (8B)",
                strong,
                "",
                "Tokens per second and GPU against those of 8 GPUs, each with the planner's best layout.",
                tolerance=0.3,
            ),
        },
        Problem(
            "Strong and weak scaling",
            numbers,
            (
                "Say which one is meant. Weak: the batch grows with the GPUs; {weak} efficiency at 1,024, because each "
                "rank's work stays and gradients hide behind it.",
                "Strong: the batch stays. At 1,024 GPUs there is {each} of a sequence per GPU, so axes that split a "
                "sequence "
                "must come in, work per collective shrinks, and efficiency falls to {strong}.",
                "A larger batch is not free either: beyond the critical batch size more sequences per step stop saving "
                "steps ([McCandlish et al. 2018](https://arxiv.org/abs/1812.06162)).",
            ),
            {
                "Where is the cliff?": "Where a group that used to fit into a node no longer does, and where a "
                "rank's work "
                "becomes shorter than the collective that should hide behind it.",
            },
            "Double the GPUs, halve the time.",
            "Only while work per GPU stays large against what it has to exchange.",
        ),
    )


@cache
def money_and_energy() -> Case:
    """What the 405B run costs."""
    model = architecture("llama-3-405b")
    flops = TOKENS * model.training_flops(causal_context(8192))
    waste = faults.wasted_share(1800.0, SAVE_S, RESTART_S, DAYS * DAY / INTERRUPTIONS)
    found = cost.bill(flops, GPUS, 989e12, 0.41 * (1 - waste), watts=WATTS, pue=1.1, price_per_hour=2.0)
    ideal = cost.bill(flops, GPUS, 989e12, 1.0, watts=WATTS, pue=1.1, price_per_hour=2.0)
    numbers = {
        "flops": f"{flops:.2g}",
        "days": f"{found.days:.0f}",
        "hours": f"{found.device_hours / 1e6:.0f} million",
        "money": f"{found.money / 1e6:.0f} million",
        "energy": f"{found.energy_mwh / 1e3:.0f} GWh",
        "percent": f"{found.money / 1e8:.2g} million",
        "waste": f"{waste:.0%}",
        "published": f"{GPU_HOURS / 1e6:.1f} million",
        "off": f"{found.device_hours / GPU_HOURS - 1:+.0%}",
    }
    return Case(
        {
            "flops": Decision(
                "FLOPs to train 405B on 15.6 trillion tokens",
                flops,
                "FLOP",
                "6 per parameter and token, and 8 % more for attention at 8,192 tokens; 3.8e25 are published.",
                tolerance=0.12,
            ),
            "days": Decision(
                "days on 16,384 H100 at 41 % MFU, failures included",
                found.days,
                "days",
                f"{flops:.2g} FLOPs / (16,384 · 989 TFLOP/s · 0.41), and {numbers['waste']} for failures.",
                slips={ideal.days / found.days: "That is at the peak.", 24: "Those are hours."},
                tolerance=0.15,
            ),
            "energy": Decision(
                "energy in MWh at 700 W per GPU and a PUE of 1.1",
                found.energy_mwh,
                "MWh",
                f"{numbers['hours']} GPU-hours · 700 W · 1.1.",
                slips={1e3: "Those are kWh.", 1e-3: "Those are GWh.", 1 / 1.1: "Cooling is missing: a PUE of 1.1."},
                tolerance=0.08,
            ),
        },
        Problem(
            "What it costs",
            numbers,
            (
                "{flops} FLOPs take {days} days, {hours} GPU-hours, {energy}. At two dollars per GPU-hour that is "
                "{money} dollars.",
                "So one percent of MFU, or of goodput, is worth about {percent} dollars. That is how much "
                "engineering a "
                "percent may cost.",
                "Check against what is published: {published} GPU-hours "
                "([model card](https://huggingface.co/meta-llama/Llama-3.1-405B)), {off} from ours.",
            ),
            {
                "Cheaper: fewer GPUs for longer?": "GPU-hours hardly change; MFU rises a little with fewer GPUs (more "
                "microbatches per rank) and failures become rarer. The calendar decides.",
                "What else is in the bill?": "Experiments before it, evaluation, storage, people. The final run is "
                "often "
                "less than half of the compute.",
            },
            "16,384 GPUs at 989 TFLOP/s: about two weeks.",
            "No run reaches the peak; at 41 % it takes {days} days.",
        ),
    )
