"""Numeric drills: mental arithmetic as interviewers ask for it, fresh numbers each time, judged with a tolerance.

A drill is a `Decision`: a number that is off by a known factor is told which (bits for bytes, one GPU for all), and it
may come with its unit. The kinds are in `drills_messages.py`, `drills_training.py`, `drills_serving.py`,
`drills_kernels.py` and `drills_reading.py`, where a report is read.
"""

from collections.abc import Callable
from random import Random

from course.lab24_interview import drills_kernels, drills_messages, drills_reading, drills_serving, drills_training
from course.lab24_interview.deck import topics_of
from course.shared.decisions import Decision

DRILLS: dict[str, Callable[[Random], Decision]] = {
    name: made
    for module in (drills_messages, drills_training, drills_serving, drills_kernels, drills_reading)
    for name, made in vars(module).items()
    if getattr(made, "__module__", "") == module.__name__
}


def drill(name: str) -> Decision:
    """A drill as sessions name it: KIND:SEED."""
    kind, seed = name.split(":")
    return DRILLS[kind](Random(int(seed)))


def different(topic: str, draw: Random, count: int) -> list[str]:
    """Up to so many drills of a topic of the cards ("" for all), all with different questions: kinds take turns."""
    kinds = sorted({kind for each in topics_of(topic) for kind in (TOPICS[each] if each else DRILLS)})
    draw.shuffle(kinds)
    names: dict[str, str] = {}  # by question
    for attempt in range(20 * count):
        if len(names) == count:
            break
        name = f"{kinds[attempt % len(kinds)]}:{draw.randrange(10**6)}"
        names.setdefault(drill(name).question, name)
    return list(names.values())


TOPICS = {  # of the cards: which drills go with them
    "hardware": ("transfer", "tokens_per_second", "ridge", "matmul_flops", "message_time", "half_way"),
    "collectives": ("all_reduce", "transfer", "reduce_scatter", "ring_rounds", "two_levels", "nccl_line"),
    "data parallel and ZeRO": ("states", "all_reduce", "fsdp_bytes", "reduce_scatter", "batch_tokens"),
    "tensor and sequence parallel": ("tensor_bytes", "all_reduce", "weights", "logits"),
    "pipeline parallel": ("bubble", "enough_microbatches", "stage_message", "in_flight"),
    "long context and experts": ("cache_bytes", "layer_cache", "expert_bytes", "experts_read"),
    "memory and precision": ("states", "weights", "logits", "checkpoint_size"),
    "checkpoints and faults": ("save_interval", "checkpoint_size", "save_time", "job_failures", "slow_rank"),
    "data": ("train_days", "enough_tokens", "id_bytes", "batch_tokens"),
    "decoding and the cache": (
        "cache_bytes",
        "tokens_per_second",
        "sequences",
        "blocks",
        "shared_blocks",
        "first_token",
    ),
    "batching and scheduling": ("waiting", "sequences", "tail", "in_service"),
    "speculative decoding": ("accepted", "faster", "overlap"),
    "quantization and adapters": ("adapter", "weights", "group_bits", "quantized"),
    "serving systems": (
        "waiting",
        "sequences",
        "tokens_per_second",
        "nodes",
        "load_time",
        "token_price",
        "first_token",
    ),
    "kernels and compilation": ("kernel_time", "passes_saved", "launch_bound", "tile_reads", "ridge"),
    "debugging": ("hang_report", "slow_steps", "exposed", "nccl_line", "snapshot", "slow_rank", "mfu"),
    "planning": ("train_days", "states", "bubble", "run_cost", "energy", "mfu", "batch_tokens"),
}
