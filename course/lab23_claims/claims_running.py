"""Statements about jobs that run: failures, checkpoints, utilisation and cost."""

import random
import time

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from course.kit.receipts import Row, formula, row
from course.shared.statement import at, claim, computed
from minillm.comm import RankError, launch
from minillm.predict import faults
from minillm.predict.planner.architectures import architecture

LLAMA = "Llama Team 2024: https://arxiv.org/abs/2407.21783"


@claim(
    "faults",
    "A run that restores weights and optimizer continues as if nothing had happened.",
    "false",
    "Dropout, the order of samples and the schedule go on from another state: it is another run.",
    "if random generators, sampler and scheduler are restored too; with deterministic kernels it is then bit-identical",
    "torch.get_rng_state: https://docs.pytorch.org/docs/stable/generated/torch.get_rng_state.html",
)
def weights_are_enough() -> list[Row]:
    def run(restore: bool) -> torch.Tensor:
        """Two steps with a restart between them, in which the generator's state is kept or not."""
        torch.manual_seed(0)
        weight = torch.ones(64)
        weight = weight - 0.1 * F.dropout(weight, 0.5)
        state = torch.get_rng_state()
        torch.manual_seed(1)  # as a new process starts
        if restore:
            torch.set_rng_state(state)
        return weight - 0.1 * F.dropout(weight, 0.5)

    torch.manual_seed(0)
    whole = torch.ones(64)
    for _ in range(2):
        whole = whole - 0.1 * F.dropout(whole, 0.5)
    return [
        row("equal to the run without a restart, weights alone", False, torch.equal(run(False), whole)),
        row("with the generator's state", True, torch.equal(run(True), whole)),
    ]


@claim(
    "faults",
    "One GPU of 1,024 that takes 20 % longer for its part costs the job a sixth of its throughput.",
    "true",
    "A synchronous step ends with its slowest rank: 1 - 1/1.2 is lost everywhere.",
    "asynchronous training, or a rank that can hand its work to others",
    at(LLAMA, "section 3.3.4"),
)
def one_slow_gpu_costs_a_sixth() -> list[Row]:
    draw = random.Random(0)
    healthy = slow = 0.0
    for _ in range(200):
        times = [draw.gauss(1.0, 0.005) for _ in range(1024)]
        healthy += max(times)
        times[17] *= 1.2
        slow += max(times)
    return [row("throughput lost", 1 - 1 / 1.2, 1 - healthy / slow, tolerance=0.1, kind="simulated")]


@claim(
    "faults",
    "Eight times the GPUs give eight times the useful work, if scaling is perfect.",
    "false",
    "Failures come eight times as often, and each costs a restart and half an interval of work.",
    "when restarts and saves become as much faster as failures more frequent",
    at(LLAMA, "section 3.3.4"),
)
def goodput_scales() -> list[Row]:
    def useful(gpus: int) -> float:
        return faults.best_goodput(30, 600, faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, gpus))

    return [
        formula("useful share on 16,384 GPUs (saves of 30 s, restarts of 10 minutes)", useful(16384)),
        formula("    on 131,072", useful(131072)),
        computed(
            "eight times the GPUs do this many times the work", 4.77, 8 * useful(131072) / useful(16384), tolerance=0.01
        ),
    ]


@claim(
    "faults",
    "Save every 1,000 steps.",
    "depends",
    "The best interval follows from the cost of a save and the rate of failures: √(2 · cost · MTBF).",
    "in a job of which that happens to be the best interval",
    "Young 1974: https://doi.org/10.1145/361147.361115",
)
def save_every_thousand() -> list[Row]:
    rows = []
    for gpus in (64, 16384):
        mtbf = faults.job_mtbf(faults.LLAMA3_GPU_MTBF_S, gpus)
        best = faults.young_interval(30, mtbf)
        worse = min(faults.wasted_share(best * f, 30, 600, mtbf) for f in (0.5, 2.0))
        rows.append(
            computed(
                f"{gpus:,} GPUs, a save takes 30 s: half or twice the best interval wastes more",
                True,
                worse > faults.wasted_share(best, 30, 600, mtbf),
            )
        )
        rows.append(computed("    best interval", None, best, "s"))
    return rows


@claim(
    "faults",
    "Writing the manifest before the barrier is fine, as all ranks write anyway.",
    "false",
    "A crash between the two leaves a checkpoint that looks complete.",
    "if readers verify every shard",
    "torch.distributed.checkpoint: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
)
def manifest_before_barrier() -> list[Row]:
    looks_whole = {}
    for name, order in (("manifest first", ["manifest", 0, 1, 2]), ("manifest last", [0, 1, 2, "manifest"])):
        torn = 0
        for killed_after in range(len(order) + 1):
            there = set(order[:killed_after])
            torn += "manifest" in there and not {0, 1, 2} <= there
        looks_whole[name] = torn
    return [
        row(
            "instants at which a torn checkpoint looks whole, manifest first",
            3,
            looks_whole["manifest first"],
            kind="simulated",
        ),
        row("    manifest last", 0, looks_whole["manifest last"], kind="simulated"),
    ]


@claim(
    "faults",
    "Elastic training rebalances work when a node is lost.",
    "false",
    "All workers are stopped and restarted with a new world size; state, data and batch are the script's job.",
    "services that keep state outside the workers",
    "torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html",
)
def elastic_rebalances() -> list[Row]:
    return [
        row("3 real ranks, one is lost: the others finish their step", False, _finish_without_one()),
        computed("a batch of 64 in microbatches of 4 divides over 4 ranks", True, 64 % (4 * 4) == 0),
        computed("    over the 3 that are left", False, 64 % (4 * 3) == 0),
    ]


def _finish_without_one() -> bool:
    try:
        launch(_step_of_three, 3)
    except RankError:
        return False
    return True


def _step_of_three(group) -> float:
    if group.rank == 1:
        raise RuntimeError("this rank is lost")
    return group.all_reduce(torch.ones(1)).item()


@claim(
    "cost",
    "100 % GPU utilisation means that the GPU computes all the time.",
    "false",
    "It means that some kernel was resident; one that waits for a message counts too.",
    "never",
    "NVML, nvmlUtilization_t: https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html",
)
def utilisation_is_compute() -> list[Row]:
    busy, flops = launch(_wait_for_the_other, 2)[0]
    return [
        row("share of a waiting rank's time with an operation under way, above 90 %", True, busy > 0.9),
        row("    FLOPs that it computes meanwhile", 0, flops),
    ]


def _wait_for_the_other(group) -> tuple[float, int]:
    """(share of the time since a barrier in which an all-reduce was under way, its FLOPs); rank 1 comes late."""
    group.barrier()
    start = time.perf_counter()
    if group.rank == 1:
        time.sleep(0.2)
    entered = time.perf_counter()
    with FlopCounterMode(display=False) as counted:
        group.all_reduce(torch.ones(4))
    end = time.perf_counter()
    return (end - entered) / (end - start), counted.get_total_flops()


@claim(
    "cost",
    "A model called 8x7B has fewer than 56 billion parameters.",
    "true",
    "The experts are MLPs; attention and embeddings are shared: 46.7B, of which a token activates 12.9B.",
    "if the experts were whole models",
    "Jiang et al. 2024, section 2: https://arxiv.org/abs/2401.04088",
)
def fewer_than_eight_times_seven() -> list[Row]:
    model = architecture("mixtral-8x7b")
    return [
        computed("parameters", 46.7e9, model.parameters, tolerance=0.002),
        computed("active", 12.9e9, model.active_parameters, tolerance=0.005),
    ]


@claim(
    "cost",
    "Training FLOPs are 6 per parameter and token.",
    "depends",
    "Attention comes on top and grows with the sequence; recomputation makes it 8 for the hardware.",
    "short sequences, no recomputation",
    "Kaplan et al. 2020, section 2.1: https://arxiv.org/abs/2001.08361",
)
def six_per_parameter() -> list[Row]:
    model = architecture("llama-3-8b")
    short, long = (model.training_flops(context) / (6 * model.parameters) for context in (1024, 65536))
    return [
        computed("8B, 1,024 keys per query: FLOPs / 6 per parameter", 0.968, short, tolerance=0.001),
        computed("    65,536 keys", 3.07, long, tolerance=0.01),
    ]
