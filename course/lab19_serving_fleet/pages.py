"""One page of metrics of each incident, as somebody on call would see it."""

from dataclasses import dataclass, replace
from functools import cache

from course.lab19_serving_fleet import incidents
from course.lab19_serving_fleet.incidents import HEALTHY, ttft
from course.lab19_serving_fleet.stage import Staged
from minillm.serve.requests.summary import percentiles

START_S = 30.0  # of a replica, alone


@dataclass(frozen=True)
class Page:
    ttft_p99_s: float
    requests: int
    attempts: int
    preemptions: int
    computed: int
    needed: int
    most_waiting: int
    tenants: dict[str, tuple[int, float]]
    prompts: list[int]
    starting_s: float = 0.0
    start_s: float = START_S

    @property
    def told(self) -> str:
        tenants = ", ".join(f"{name} {count} requests, p99 {p99:.2f} s" for name, (count, p99) in self.tenants.items())
        return (
            f"TTFT p99 {self.ttft_p99_s:.2f} s, {self.requests} requests in {self.attempts} attempts, "
            f"{self.preemptions} preemptions, {self.computed:,} tokens computed of {self.needed:,} needed, longest "
            f"prompt {max(self.prompts):,} of {sum(self.prompts):,} tokens, oldest start {self.starting_s:.0f} s ago "
            f"(alone a start takes {self.start_s:.0f} s); " + tenants
        )


@cache
def page(name: str, seed: int = 0) -> Page:
    if name == "cold-start storm":
        return of_fleet(seed)
    made = {
        "retry storm": lambda: incidents.retry_storm(seed=seed),
        "noisy neighbour": lambda: incidents.neighbours(seed=seed),
        "memory collapse": lambda: incidents.memory(seed=seed),
        "long prompts": lambda: incidents.long_prompts(seed=seed),
        HEALTHY: lambda: incidents.neighbours(noisy=10.0, seed=seed),
    }[name]()
    return of_stage(made)


def sound(name: str) -> list[Page]:
    """Healthy pages that show a little of something else: a restart, some preemptions, one long prompt."""
    calm = page(name)
    few = {"preemptions": 3, "computed": calm.computed + 400, "starting_s": 12.0, "attempts": calm.requests + 5}
    return [Page(**vars(calm) | few), Page(**vars(calm) | {"prompts": [*calm.prompts, 1500], "most_waiting": 40})]


def with_everyday_noise(name: str) -> Page:
    """A few retries, a preemption and a start that goes on do not hide what it is."""
    found = page(name)
    noise = {
        "attempts": max(found.attempts, found.requests + found.requests // 10),
        "preemptions": max(1, found.preemptions),
        "computed": max(found.computed, found.needed + found.needed // 20),
        "starting_s": max(found.starting_s, 0.9 * START_S),
    }
    return Page(**vars(found) | noise)


def with_p99(name: str, p99_s: float) -> Page:
    """The page of an incident with other waits: up to a second it is healthy, whatever else it says."""
    found = page(name)
    tenants = {each: (count, min(p99, p99_s)) for each, (count, p99) in found.tenants.items()}
    return replace(found, ttft_p99_s=p99_s, tenants=tenants)


def variants(name: str) -> list[Page]:
    """The same incident in other fleets: little late, ten times as large, other names, slower and faster starts."""
    found, noisy = page(name), with_everyday_noise(name)
    counts = ("requests", "attempts", "preemptions", "computed", "needed", "most_waiting", "prompts")
    large = replace(noisy, **{each: 10 * getattr(noisy, each) for each in counts})
    names = {f"tenant {n}": (10 * count, p99) for n, (count, p99) in enumerate(found.tenants.values())}
    storm = name == "cold-start storm"
    slow = replace(found, start_s=300.0, starting_s=10 * found.starting_s if storm else 200.0)
    fast = replace(found, start_s=3.0, starting_s=found.starting_s / 10)
    made = [noisy, with_p99(name, 1.1), replace(large, tenants=names), slow, fast]
    if name == "long prompts":
        made.append(replace(found, tenants={"default": (found.requests, found.ttft_p99_s)}))
    if name == "noisy neighbour":
        made.append(replace(found, prompts=[1500, *found.prompts[1:]]))
        made.append(replace(found, preemptions=50, computed=found.needed + found.needed // 33))
    return made


def of_stage(staged: Staged) -> Page:
    tenants = {}
    for name in sorted({story.arrival.tenant for story in staged.stories}):
        mine = [story for story in staged.stories if story.arrival.tenant == name]
        tenants[name or "default"] = (len(mine), ttft(staged, 0.99, name))
    return Page(
        ttft(staged, 0.99),
        len(staged.stories),
        staged.attempts,
        staged.preemptions,
        staged.computed,
        staged.needed,
        max(count for _, count in staged.waiting),
        tenants,
        [len(story.arrival.prompt) for story in staged.stories],
    )


def of_fleet(seed: int) -> Page:
    """A quarter of an hour of it. Every replica that started did so while others did."""
    found = incidents.cold_start_storm(seed=seed)
    p99 = percentiles(found.waits, [0.99])[0]
    starting, longest = None, 0.0
    for sample in found.samples:
        if not sample.starting:
            starting = None
            continue
        starting = sample.at if starting is None else starting
        longest = max(longest, sample.at - starting)
    count = len(found.waits)
    return Page(
        p99, count, count, 0, 55 * count, 55 * count, found.longest, {"default": (count, p99)}, [48] * count, longest
    )
