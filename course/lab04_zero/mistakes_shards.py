"""Spoilers of lab 04, second part: norms of a shard, states of one rank, moments that never leave memory."""

import torch

from course.kit import answers_of
from course.kit.exercises import KnownAnswers

ANSWERS = answers_of("04_zero")

# Clipping

clip_across_shards = KnownAnswers("clip-across-shards")

clip_across_shards.mistake(
    "local-norm", {"group.all_reduce(mine.square().sum()).sqrt()": "mine.norm()"}, expect="that is its own shard's norm"
)
clip_across_shards.mistake(
    "adds-norms", {"mine.square().sum()).sqrt()": "mine.norm())"}, expect="norms do not add up, their squares do"
)
clip_across_shards.mistake(
    "padding-counted",
    {"gradient[: max(0, numel - group.rank * len(gradient))]": "gradient"},
    expect="the padding is in it",
)
clip_across_shards.mistake(
    "averages-squares",
    {"mine.square().sum()": 'mine.square().sum(), op="avg"'},
    expect="averaged over the ranks, not added",
)
clip_across_shards.mistake(
    "gathers-the-gradient",
    {"group.all_reduce(mine.square().sum()).sqrt()": "group.all_gather(gradient)[:numel].norm()"},
    expect=r"bytes for it on \d ranks",
)
clip_across_shards.mistake("not-in-place", {"gradient *= (": "gradient = gradient * ("}, expect="in place")
clip_across_shards.mistake(
    "scales-up-too", {"(norm + 1e-6)).clamp(max=1.0)": "norm)"}, expect="asks to multiply the shard by 1.000"
)
clip_across_shards.mistake(
    "multiplies-garbage-by-zero",
    {
        "gradient[: max(0, numel - group.rank * len(gradient))]": (
            "gradient * (torch.arange(len(gradient)) + group.rank * len(gradient) < numel)"
        )
    },
    expect="NaN times 0 is NaN",
)
clip_across_shards.mistake(
    "zero-over-zero",
    {"(max_norm / (norm + 1e-6)).clamp(max=1.0)": "norm.clamp(max=max_norm) / norm"},
    expect="that is 0 / 0",
)
clip_across_shards.alternative(
    "gathers-one-number-each",
    {"group.all_reduce(mine.square().sum()).sqrt()": "group.all_gather(mine.norm().view(1)).norm()"},
)
clip_across_shards.mistake("drops-nan", {"mine.square().sum()": "mine.square().nansum()"}, expect="none may be finite")
clip_across_shards.mistake(
    "norm-after-scaling", {"return norm": "return norm.clamp(max=max_norm)"}, expect="that is the norm after scaling"
)
clip_across_shards.mistake(
    "pickles-the-sum",
    {"group.all_reduce(mine.square().sum()).sqrt()": "sum(group.gather_objects(mine.square().sum())).sqrt()"},
    expect="gather_objects pickles",
)
clip_across_shards.alternative(
    "a-flag-beside-the-sum",
    {
        "norm = group.all_reduce(mine.square().sum()).sqrt()": (
            "broken = (~mine.isfinite()).any().to(mine.dtype)\n"
            "    total, broken = group.all_reduce(torch.stack([mine.square().sum(), broken]))\n"
            "    norm = torch.where(broken > 0, torch.inf, total.sqrt())"
        )
    },
)
clip_across_shards.alternative(
    "largest-element-first",
    {
        "norm = group.all_reduce(mine.square().sum()).sqrt()": (
            "top = group.all_reduce(torch.cat([mine.abs(), mine.new_zeros(1)]).max(), op='max').clamp(min=1e-30)\n"
            "    norm = top * group.all_reduce((mine / top).square().sum()).sqrt()"
        )
    },
)
clip_across_shards.alternative("in-float64", {"mine.square()": "mine.double().square()"})


# The whole state

whole_state = KnownAnswers("whole-state")

whole_state.mistake(
    "rank-0-only", {"group.all_gather(x)[:numel] if x.dim() else x": "x"}, expect=r"1/\d of it, this rank's shard only"
)
whole_state.mistake("padding-saved", {"[:numel]": ""}, expect="cut off the padding")


@whole_state.mistake("one-moment", expect="the exercise asks for a dict with step, exp_avg, exp_avg_sq")
def forgets_the_second_moment(state, numel, group):
    return {"step": state["step"], "exp_avg": group.all_gather(state["exp_avg"])[:numel]}


@whole_state.mistake("pickles", expect="it pickles")
def pickles(state, numel, group):
    everyone = group.gather_objects(state)
    whole = {name: torch.cat([other[name] for other in everyone])[:numel] for name in ("exp_avg", "exp_avg_sq")}
    return {"step": state["step"], **whole}


whole_state.mistake("counts-one-step-more", {"else x for": "else x + 1 for"}, expect="it counts steps")
whole_state.mistake("one-moment-twice", {"all_gather(x)": 'all_gather(state["exp_avg"])'}, expect="is it this moment")
whole_state.mistake("a-column", {"all_gather(x)": "all_gather(x[:, None])"}, expect="has the shape")
whole_state.mistake(
    "drops-the-remainder-first",
    {"all_gather(x)": "all_gather(x[: numel // group.world_size])"},
    expect="gather whole shards",
)
whole_state.alternative("step-as-a-number", {"else x for": "else x.item() for"})


@whole_state.alternative("both-moments-at-once")
def stacked(state, numel, group):
    both = torch.stack([state["exp_avg"], state["exp_avg_sq"]], dim=1)
    whole = group.all_gather(both)[:numel]
    return {"step": state["step"], "exp_avg": whole[:, 0].clone(), "exp_avg_sq": whole[:, 1].clone()}


# Offload

offload_adam = KnownAnswers("offload-adam")


@offload_adam.mistake("reads-everything", expect="read, use and write one chunk before the next")
def all_at_once(weights, gradient, store, step, chunk, lr, betas, eps):
    ANSWERS.stream_adam(weights, gradient, store, step, len(weights), lr, betas, eps)


@offload_adam.mistake("collects-all-chunks", expect="read, use and write one chunk before the next")
def collects_chunks(weights, gradient, store, step, chunk, lr, betas, eps):
    parts = [slice(start, start + chunk) for start in range(0, len(weights), chunk)]
    m, v = (torch.cat([store.read(name, part) for part in parts]) for name in ("m", "v"))
    m.lerp_(gradient, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    for part in parts:
        store.write("m", part, m[part])
        store.write("v", part, v[part])
    weights -= lr * m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)


@offload_adam.mistake("writes-all-at-the-end", expect="read, use and write one chunk before the next")
def writes_at_the_end(weights, gradient, store, step, chunk, lr, betas, eps):
    late = _Late(store, len(weights))
    ANSWERS.stream_adam(weights, gradient, late, step, chunk, lr, betas, eps)
    for name, values in late.kept.items():
        store.write(name, slice(None), values)


offload_adam.mistake(
    "no-bias-correction",
    {"m, v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)": ""},
    expect="the bias correction is missing",
)
offload_adam.mistake(
    "never-writes-back",
    {'store.write("m", part, m)': "", 'store.write("v", part, v)': ""},
    expect="the moments begin at zero in every step",
)


offload_adam.mistake(
    "drops-the-last-chunk",
    {"len(weights), chunk": "len(weights) - chunk + 1, chunk"},
    expect="the last and shorter one too",
)


@offload_adam.mistake("keeps-them-in-memory", expect="kept somewhere else, in memory")
def cached(weights, gradient, store, step, chunk, lr, betas, eps):
    ANSWERS.stream_adam(weights, gradient, _Memory.of(store, len(weights)), step, chunk, lr, betas, eps)


class _Memory:
    def __init__(self, size):
        self.kept = {name: torch.zeros(size) for name in ("m", "v")}

    @classmethod
    def of(cls, store, size):
        store.memory = getattr(store, "memory", None) or cls(size)
        return store.memory

    def read(self, name, part):
        return self.kept[name][part].clone()

    def write(self, name, part, values):
        self.kept[name][part] = values


class _Late(_Memory):
    def __init__(self, store, size):
        super().__init__(size)
        self.read = store.read


offload_adam.mistake(
    "eps-before-the-correction",
    {
        "m, v = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)": (
            "m = m * (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)"
        )
    },
    expect="both stored; then",
)
offload_adam.mistake(
    "stores-corrected-moments",
    {
        '        store.write("m", part, m)\n        store.write("v", part, v)\n': "",
        "        weights[part]": (
            '        store.write("m", part, m)\n        store.write("v", part, v)\n        weights[part]'
        ),
    },
    expect="both stored; then",
)


offload_adam.mistake("a-rate-of-its-own", {"-= lr * m": "-= 0.1 * m"}, expect="both stored; then")


offload_adam.mistake(
    "chunks-of-its-own",
    {"    for start in range": "    chunk = 32\n    for start in range"},
    expect="read, use and write one chunk before the next",
)


@offload_adam.mistake("moves-a-copy", expect="change the weights in place")
def moves_a_copy(weights, gradient, store, step, chunk, lr, betas, eps):
    ANSWERS.stream_adam(weights.clone(), gradient, store, step, chunk, lr, betas, eps)


offload_adam.alternative(
    "in-float64",
    {
        'store.read("m", part), store.read("v", part)': (
            'store.read("m", part).double(), store.read("v", part).double()'
        )
    },
)


@offload_adam.alternative("reads-one-chunk-ahead")
def prefetches(weights, gradient, store, step, chunk, lr, betas, eps):
    parts = [slice(start, start + chunk) for start in range(0, len(weights), chunk)]
    ahead = [store.read(name, parts[0]) for name in ("m", "v")]
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        m, v = ahead
        ahead = [store.read(name, following) for name in ("m", "v")] if following else []
        g = gradient[part]
        m.lerp_(g, 1 - betas[0])
        v.mul_(betas[1]).add_((1 - betas[1]) * g * g)
        store.write("m", part, m)
        store.write("v", part, v)
        update = m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
        weights[part] -= lr * update
