"""Wrong answers of lab 24's own tasks with the sentence each draws, and other right ones."""

import torch

from course.kit.exercises import alternative, mistake
from course.lab24_interview.checks import ANSWERS


def _bucket(
    requests, rate, capacity, refill=min, start=True, charge=lambda ok, cost: cost * ok, fits=lambda c, x: c <= x
):
    level, last, found = float(capacity if start else 0), requests[0][0], []
    for time, cost in requests:
        level, last = refill(capacity, level + (time - last) * rate), time
        found.append(fits(cost, level))
        level -= charge(found[-1], cost)
    return found


mistake("token-bucket", "no ceiling", says="A bucket overflows: it never holds more than its capacity.")(
    lambda requests, rate, capacity: _bucket(requests, rate, capacity, refill=lambda cap, level: level)
)
mistake("token-bucket", "starts empty", says="The bucket is full at the first request.")(
    lambda requests, rate, capacity: _bucket(requests, rate, capacity, start=False)
)
mistake("token-bucket", "rejected ones are charged", says="A request that is refused takes nothing out.")(
    lambda requests, rate, capacity: _bucket(requests, rate, capacity, charge=lambda ok, cost: cost)
)
mistake("token-bucket", "strictly less", says="A cost equal to the level fits.")(
    lambda requests, rate, capacity: _bucket(requests, rate, capacity, fits=lambda cost, level: cost < level)
)


@mistake("token-bucket", "refill only when admitted", says="Time passes for a refused request too: its refill is kept.")
def refills_when_admitted(requests, rate, capacity):
    level, last, found = float(capacity), requests[0][0], []
    for time, cost in requests:
        filled = min(capacity, level + (time - last) * rate)
        found.append(cost <= filled)
        level = filled - cost if found[-1] else level
        last = time
    return found


mistake("token-bucket", "a count", expect="exercise asks for a list")(
    lambda requests, rate, capacity: sum(_bucket(requests, rate, capacity))
)


@alternative("token-bucket", "by debt")
def by_debt(requests, rate, capacity):
    debt, last, found = 0.0, requests[0][0], []
    for time, cost in requests:
        debt, last = max(0.0, debt - (time - last) * rate), time
        found.append(debt + cost <= capacity)
        debt += cost if found[-1] else 0
    return found


mistake(
    "merge-softmax", "mean of both", says="The parts do not count alike: weigh them by their sums of exponentials."
)(lambda out_a, lse_a, out_b, lse_b: ((out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)))
mistake("merge-softmax", "overflows", says="exp of a large score is infinite: subtract the larger logarithm first.")(
    lambda out_a, lse_a, out_b, lse_b: (
        (out_a * lse_a.exp()[..., None] + out_b * lse_b.exp()[..., None]) / (lse_a.exp() + lse_b.exp())[..., None],
        (lse_a.exp() + lse_b.exp()).log(),
    )
)
mistake("merge-softmax", "weights swapped", says="Each output belongs to its own sum; here they are exchanged.")(
    lambda out_a, lse_a, out_b, lse_b: ANSWERS.merge(out_b, lse_a, out_a, lse_b)
)
mistake("merge-softmax", "larger one kept", says="The log of a sum is not the larger of the logs.")(
    lambda out_a, lse_a, out_b, lse_b: (ANSWERS.merge(out_a, lse_a, out_b, lse_b)[0], torch.maximum(lse_a, lse_b))
)
mistake("merge-softmax", "output alone", expect="exercise asks for two tensors")(
    lambda out_a, lse_a, out_b, lse_b: ANSWERS.merge(out_a, lse_a, out_b, lse_b)[0]
)


@alternative("merge-softmax", "by a sigmoid")
def by_sigmoid(out_a, lse_a, out_b, lse_b):
    share = torch.sigmoid(lse_a - lse_b)[..., None]
    return share * out_a + (1 - share) * out_b, torch.stack([lse_a, lse_b]).logsumexp(0)


mistake("dispatch-order", "unstable order", says="Copies for one expert must keep the order of their tokens.")(
    lambda experts, ranks, each: (
        torch.tensor(
            sorted(range(experts.numel()), key=lambda i: (int(experts.reshape(-1)[i]), -i)), dtype=torch.int64
        ),
        ANSWERS.dispatch(experts, ranks, each)[1],
    )
)
mistake("dispatch-order", "counts per expert", says="An all-to-all needs rows per rank, not per expert.")(
    lambda experts, ranks, each: (
        ANSWERS.dispatch(experts, ranks, each)[0],
        torch.bincount(experts.reshape(-1), minlength=ranks * each).tolist(),
    )
)
mistake("dispatch-order", "ranks without rows left out", says="A rank that gets nothing still has a part, of 0 rows.")(
    lambda experts, ranks, each: (
        ANSWERS.dispatch(experts, ranks, each)[0],
        [count for count in ANSWERS.dispatch(experts, ranks, each)[1] if count],
    )
)
mistake(
    "dispatch-order", "experts dealt round", says="Rank r holds experts r · n to r · n + n - 1, not every n-th one."
)(
    lambda experts, ranks, each: (
        ANSWERS.dispatch(experts, ranks, each)[0],
        torch.bincount(experts.reshape(-1) % ranks, minlength=ranks).tolist(),
    )
)
mistake(
    "dispatch-order",
    "inverse order",
    says="That is where each copy goes; the exercise asks for which copy stands where.",
)(
    lambda experts, ranks, each: (
        ANSWERS.dispatch(experts, ranks, each)[0].argsort(),
        ANSWERS.dispatch(experts, ranks, each)[1],
    )
)


@alternative("dispatch-order", "expert by expert")
def expert_by_expert(experts, ranks, each):
    flat = experts.reshape(-1)
    places = [(flat == expert).nonzero()[:, 0] for expert in range(ranks * each)]
    return torch.cat(places), [sum(len(p) for p in places[r * each : (r + 1) * each]) for r in range(ranks)]
