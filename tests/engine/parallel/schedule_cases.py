"""Random schedules, and the dependencies of a pipeline written down a second time, by part of the model."""

from hypothesis import strategies as st

from minillm.parallel.pipeline_parallel.schedule import schedules
from minillm.parallel.pipeline_parallel.schedule.schedules import Schedule

NAMES = [*schedules.SCHEDULES, "pipedream"]


@st.composite
def cases(draw, names: list[str] = NAMES) -> Schedule:
    name = draw(st.sampled_from(names))
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    if name == "interleaved":
        return schedules.interleaved(stages, stages * draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    if name == "dualpipe":
        return schedules.dualpipe(2 * ((stages + 1) // 2), microbatches + 1)
    return getattr(schedules, {"1f1b": "one_f_one_b"}.get(name, name))(stages, microbatches)


def part(schedule: Schedule, rank: int, chunk: int) -> int:
    """Which part of the model a rank's chunk is, from the schedule's name alone."""
    ranks = schedule.ranks
    if schedule.name == "zero_bubble_v" and chunk:
        return 2 * ranks - 1 - rank
    if schedule.name == "dualpipe" and chunk:
        return ranks - 1 - rank
    return chunk * ranks + rank


def parts(schedule: Schedule) -> int:
    return {"zero_bubble_v": 2 * schedule.ranks, "interleaved": schedule.num_parts}.get(schedule.name, schedule.ranks)


def products(kind: str) -> str:
    return "IW" if kind == "B" else kind


def wants(kind: str, microbatch: int, at: int, last: int) -> set[tuple[str, int, int]]:
    """The (product, microbatch, part) an action waits for."""
    if kind == "F":
        return {("F", microbatch, at - 1)} if at else set()
    if kind in "BI":
        return {("F", microbatch, at)} | ({("I", microbatch, at + 1)} if at < last else set())
    return {("I" if kind == "W" else "W", microbatch, at)}
