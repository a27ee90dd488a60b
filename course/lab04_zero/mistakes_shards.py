"""Spoilers of lab 04, second part: norms of a shard, states of one rank, moments that never leave memory."""

import torch

from course.kit import answers_of
from course.kit.exercises import alternative, mistake

ANSWERS = answers_of("04_zero")

# Clipping


def _clip(gradient, numel, max_norm, group, norm_of):
    """The reference with another norm; `norm_of` takes this rank's real elements."""
    norm = norm_of(gradient[: max(0, numel - group.rank * len(gradient))])
    gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


@mistake("clip-across-shards", "local-norm", expect="that is its own shard's norm")
def local_norm(gradient, numel, max_norm, group):
    return _clip(gradient, numel, max_norm, group, lambda mine: mine.norm())


@mistake("clip-across-shards", "adds-norms", expect="norms do not add up, their squares do")
def adds_norms(gradient, numel, max_norm, group):
    return _clip(gradient, numel, max_norm, group, lambda mine: group.all_reduce(mine.norm()))


@mistake("clip-across-shards", "padding-counted", expect="the padding is in it")
def counts_padding(gradient, numel, max_norm, group):
    norm = group.all_reduce(gradient.square().sum()).sqrt()
    gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


@mistake("clip-across-shards", "averages-squares", expect="averaged over the ranks, not added")
def averages(gradient, numel, max_norm, group):
    return _clip(gradient, numel, max_norm, group, lambda mine: group.all_reduce(mine.square().sum(), op="avg").sqrt())


@mistake("clip-across-shards", "gathers-the-gradient", expect=r"bytes for it on \d ranks")
def gathers_everything(gradient, numel, max_norm, group):
    norm = group.all_gather(gradient)[:numel].norm()
    gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


@mistake("clip-across-shards", "not-in-place", expect="in place")
def scales_a_copy(gradient, numel, max_norm, group):
    return _clip(gradient.clone(), numel, max_norm, group, lambda mine: group.all_reduce(mine.square().sum()).sqrt())


@mistake("clip-across-shards", "scales-up-too", expect="asks to multiply the shard by 1.000")
def always_scales(gradient, numel, max_norm, group):
    mine = gradient[: max(0, numel - group.rank * len(gradient))]
    norm = group.all_reduce(mine.square().sum()).sqrt()
    gradient *= max_norm / norm
    return norm


@mistake("clip-across-shards", "multiplies-garbage-by-zero", expect="NaN times 0 is NaN")
def masks(gradient, numel, max_norm, group):
    real = torch.arange(len(gradient)) + group.rank * len(gradient) < numel
    norm = group.all_reduce((gradient * real).square().sum()).sqrt()
    gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm


@alternative("clip-across-shards", "gathers-one-number-each")
def gathers_scalars(gradient, numel, max_norm, group):
    return _clip(gradient, numel, max_norm, group, lambda mine: group.all_gather(mine.norm().view(1)).norm())


@alternative("clip-across-shards", "in-float64")
def in_double(gradient, numel, max_norm, group):
    return _clip(gradient, numel, max_norm, group, lambda x: group.all_reduce(x.double().square().sum()).sqrt())


# The whole state


@mistake("whole-state", "rank-0-only", expect=r"1/\d of it, this rank's shard only")
def own_shard(state, numel, group):
    return state


@mistake("whole-state", "padding-saved", expect="cut off the padding")
def with_padding(state, numel, group):
    return {name: group.all_gather(x) if x.dim() else x for name, x in state.items()}


@mistake("whole-state", "one-moment", expect="the exercise asks for a dict with step, exp_avg, exp_avg_sq")
def forgets_the_second_moment(state, numel, group):
    return {"step": state["step"], "exp_avg": group.all_gather(state["exp_avg"])[:numel]}


@mistake("whole-state", "pickles", expect="it pickles")
def pickles(state, numel, group):
    everyone = group.gather_objects(state)
    whole = {name: torch.cat([other[name] for other in everyone])[:numel] for name in ("exp_avg", "exp_avg_sq")}
    return {"step": state["step"], **whole}


@alternative("whole-state", "both-moments-at-once")
def stacked(state, numel, group):
    both = torch.stack([state["exp_avg"], state["exp_avg_sq"]], dim=1)
    whole = group.all_gather(both)[:numel]
    return {"step": state["step"], "exp_avg": whole[:, 0].clone(), "exp_avg_sq": whole[:, 1].clone()}


# Offload


@mistake("offload-adam", "reads-everything", expect="read, use and write one chunk before the next")
def all_at_once(weights, gradient, store, step, chunk, lr, betas, eps):
    ANSWERS.stream_adam(weights, gradient, store, step, len(weights), lr, betas, eps)


@mistake("offload-adam", "no-bias-correction", expect="the bias correction is missing")
def uncorrected(weights, gradient, store, step, chunk, lr, betas, eps):
    ANSWERS.stream_adam(weights, gradient, store, 10**9, chunk, lr, betas, eps)


@mistake("offload-adam", "never-writes-back", expect="the moments begin at zero in every step")
def forgets_to_write(weights, gradient, store, step, chunk, lr, betas, eps):
    ANSWERS.stream_adam(weights, gradient, _ReadOnly(store), step, chunk, lr, betas, eps)


class _ReadOnly:
    def __init__(self, store):
        self.read = store.read

    def write(self, name, part, values):
        pass


@mistake("offload-adam", "drops-the-last-chunk", expect="the last and shorter one too")
def whole_chunks_only(weights, gradient, store, step, chunk, lr, betas, eps):
    whole = len(weights) // chunk * chunk
    ANSWERS.stream_adam(weights[:whole], gradient, store, step, chunk, lr, betas, eps)


@mistake("offload-adam", "keeps-them-in-memory", expect="kept somewhere else, in memory")
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


@mistake("offload-adam", "stores-corrected-moments", expect="both stored; then")
def stores_corrected(weights, gradient, store, step, chunk, lr, betas, eps):
    for start in range(0, len(weights), chunk):
        part = slice(start, start + chunk)
        m = (betas[0] * store.read("m", part) + (1 - betas[0]) * gradient[part]) / (1 - betas[0] ** step)
        v = (betas[1] * store.read("v", part) + (1 - betas[1]) * gradient[part] ** 2) / (1 - betas[1] ** step)
        store.write("m", part, m)
        store.write("v", part, v)
        weights[part] -= lr * m / (v.sqrt() + eps)


@mistake("offload-adam", "moves-a-copy", expect="change the weights in place")
def moves_a_copy(weights, gradient, store, step, chunk, lr, betas, eps):
    ANSWERS.stream_adam(weights.clone(), gradient, store, step, chunk, lr, betas, eps)


@alternative("offload-adam", "reads-one-chunk-ahead")
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
