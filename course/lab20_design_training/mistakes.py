"""Lab 20's wrong answers with the sentence each draws, and other right ones."""

import math

import torch

from course.kit.exercises import KnownAnswers

state_bytes = KnownAnswers("state-bytes")

state_bytes.mistake(
    "weights alone", {"(12, 4, 2)": "(0, 0, 2)"}, says="Those are the 16-bit weights, all that serving holds."
)
state_bytes.mistake(
    "16-bit gradients", {"(12, 4, 2)": "(12, 2, 2)"}, says="Gradients are kept in 32 bits here: 4 bytes, 18 in all."
)
state_bytes.mistake(
    "ZeRO over all ranks",
    {"(dp if": "(dp * tp * pp if"},
    says="ZeRO divides over the data-parallel ranks; tp and pp have done theirs.",
)
state_bytes.mistake(
    "stages in the wrong order",
    {"(12, 4, 2)": "(2, 4, 12)"},
    says="Stage 1 divides the optimizer's states, not the weights.",
)
state_bytes.mistake(
    "stages hold all layers",
    {"(tp * pp)": "tp"},
    says="A pipeline stage holds its own layers only: divide by pp as well.",
)
state_bytes.mistake(
    "everything divided",
    {" if stage < zero else 1": ""},
    says="Before stage 3 something is replicated; here all of it is divided.",
)
state_bytes.mistake(
    "ZeRO inside a node",
    {"(dp if": "(min(dp, 8) if"},
    says="The shards lie on all dp ranks, on however many nodes these are.",
)
state_bytes.mistake(
    "two ranks at least",
    {"(dp if": "(max(dp, 2) if"},
    says="With dp 1 there is nobody to share with: all stages hold what stage 0 holds.",
)


@state_bytes.alternative("written out by stage")
def by_stage(parameters, dp, tp, pp, zero):
    own = parameters // (tp * pp)
    return [18 * own, 6 * own + 12 * own // dp, 2 * own + 16 * own // dp, 18 * own // dp][zero]


@state_bytes.alternative("numbers of 8 bits")
def in_bits(parameters, dp, tp, pp, zero):
    bits = [(96, zero >= 1), (32, zero >= 2), (16, zero >= 3)]
    return sum(each / 8 * parameters / tp / pp / (dp if cut else 1) for each, cut in bits)


save_interval = KnownAnswers("save-interval")

save_interval.mistake(
    "one device's failures",
    {" / devices": ""},
    says="Any of the devices stops the job: its MTBF is one device's / devices.",
)
save_interval.mistake(
    "root without 2",
    {"2 * save_s": "save_s"},
    says="Half an interval is lost on average, not a whole one: √(2 · save · MTBF).",
)
save_interval.mistake(
    "restart in the root",
    {"2 * save_s": "2 * (save_s + restart_s)"},
    says="A restart costs the same whatever the interval: it is not in the root.",
)
save_interval.mistake(
    "a whole interval lost",
    {"interval / 2": "interval"},
    says="The interval is right; a failure falls in its middle on average.",
)
save_interval.mistake(
    "no restart", {" + restart_s": ""}, says="The interval is right; the wasted share has to count the restarts too."
)
save_interval.mistake(
    "interval alone",
    {", save_s / interval + (interval / 2 + restart_s) / mtbf": ""},
    expect="exercise asks for two numbers",
)
save_interval.mistake(
    "ten minutes at least",
    {"interval = (": "interval = max(600, (", "mtbf) ** 0.5": "mtbf) ** 0.5)"},
    says="An interval of less than ten minutes is right where failures are frequent and saves short.",
)
save_interval.mistake(
    "a save a day",
    {"interval = (": "interval = min(86400, (", "mtbf) ** 0.5": "mtbf) ** 0.5)"},
    says="An interval of more than a day is right where failures are rare and saves long.",
)


@save_interval.alternative("exact")
def exact(save_s, restart_s, device_mtbf_s, devices):
    """Daly 2006, equation 20."""
    mtbf = device_mtbf_s / devices
    interval = (2 * save_s * mtbf) ** 0.5
    useful = interval / mtbf * math.exp(-restart_s / mtbf) / math.expm1((interval + save_s) / mtbf)
    return torch.tensor([interval, 1 - useful], dtype=torch.float64)


save_interval.alternative(
    "of the time with restarts",
    {"save_s / interval +": "save_s / interval / (1 + restart_s / mtbf) +", ") / mtbf": ") / (mtbf + restart_s)"},
)
save_interval.alternative("of the time with saves", {"save_s / interval +": "save_s / (interval + save_s) +"})
save_interval.alternative("failures strike saves, too", {"(interval / 2 +": "((interval + save_s) / 2 +"})


@save_interval.alternative("the next order")
def next_order(save_s, restart_s, device_mtbf_s, devices):
    """Daly 2006, equation 37."""
    mtbf = device_mtbf_s / devices
    root = (save_s / (2 * mtbf)) ** 0.5
    interval = (2 * save_s * mtbf) ** 0.5 * (1 + root / 3 + root**2 / 9) - save_s
    return interval, save_s / interval + (interval / 2 + restart_s) / mtbf


@save_interval.alternative("searched")
def searched(save_s, restart_s, device_mtbf_s, devices):
    mtbf = device_mtbf_s / devices

    def waste(interval):
        return save_s / interval + (interval / 2 + restart_s) / mtbf

    low, high = 1e-3, 1e9
    while high / low > 1 + 1e-6:
        third = (high / low) ** (1 / 3)
        low, high = (low, low * third**2) if waste(low * third) < waste(low * third**2) else (low * third, high)
    return low, waste(low)
