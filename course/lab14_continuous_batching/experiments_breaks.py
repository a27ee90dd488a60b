"""Lab 14's broken schedulers: four that are nearly right, and recorded runs of each to be told apart."""

import random

from course.lab14_continuous_batching.experiments import Flight, play, requests
from course.shared.faults import Fault, planted
from course.shared.faults import serving as faults

HEALTHY = "healthy"
FAULTS: dict[str, tuple[Fault, ...]] = {
    HEALTHY: (),
    "phases never mixed": (faults.PROMPTS_FIRST,),
    "place in the queue lost": (faults.BACK_OF_THE_QUEUE,),
    "livelock": (faults.LIVELOCK,),
    "tokens that do not exist": (faults.COUNTED_TOO_EARLY,),
}


def case(fault: str, seed: int, sound: bool = False) -> Flight:
    """A flight of 8 requests through a scheduler with this fault, on a pool and a trace where it shows.

    sound: the same without the fault.
    """
    draw = random.Random(f"{fault} {seed}")
    where = fault if fault != HEALTHY else list(FAULTS)[1 + seed % 4]  # healthy ones fly everywhere
    lengths = [(draw.randint(18, 30), draw.randint(14, 24)) for _ in range(8)]
    options = {"num_blocks": 26, "block_size": 4, "token_budget": 12, "max_num_seqs": 4, "chunk": 8, "reserve": 0}
    every = 0.0
    if where == "phases never mixed":  # prompts come while others decode
        options["num_blocks"], every = 80, 0.012
    if where == "livelock":  # no two fit at once
        lengths = [(draw.randint(29, 34), draw.randint(14, 20)) for _ in range(8)]
        options |= {"num_blocks": 14, "prefix_cache": False}
    if where == "tokens that do not exist":  # a whole return fits one step
        options |= {"token_budget": 64, "chunk": None}
    with planted(() if sound else FAULTS[fault]):
        return play(requests(lengths, every=every), **options)
