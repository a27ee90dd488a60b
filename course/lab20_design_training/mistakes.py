"""Lab 20's wrong answers with the sentence each draws, and other right ones."""

from course.kit.exercises import alternative, mistake
from course.lab20_design_training.checks import ANSWERS

mistake("state-bytes", "weights alone", says="Those are the 16-bit weights, all that serving holds.")(
    lambda parameters, dp, tp, pp, zero: 2 * parameters / (tp * pp)
)
mistake("state-bytes", "16-bit gradients", says="Gradients are kept in 32 bits here: 4 bytes, 18 in all.")(
    lambda parameters, dp, tp, pp, zero: (
        ANSWERS.state_bytes(parameters, dp, tp, pp, zero) - 2 * parameters / (tp * pp) / (dp if zero >= 2 else 1)
    )
)
mistake(
    "state-bytes", "ZeRO over all ranks", says="ZeRO divides over the data-parallel ranks; tp and pp have done theirs."
)(
    lambda parameters, dp, tp, pp, zero: sum(
        size * parameters / (tp * pp) / (dp * tp * pp if stage < zero else 1) for stage, size in enumerate((12, 4, 2))
    )
)
mistake("state-bytes", "stages in the wrong order", says="Stage 1 divides the optimizer's states, not the weights.")(
    lambda parameters, dp, tp, pp, zero: sum(
        size * parameters / (tp * pp) / (dp if stage < zero else 1) for stage, size in enumerate((2, 4, 12))
    )
)
mistake(
    "state-bytes", "stages hold all layers", says="A pipeline stage holds its own layers only: divide by pp as well."
)(lambda parameters, dp, tp, pp, zero: pp * ANSWERS.state_bytes(parameters, dp, tp, pp, zero))
mistake("state-bytes", "everything divided", says="Before stage 3 something is replicated; here all of it is divided.")(
    lambda parameters, dp, tp, pp, zero: 18 * parameters / (tp * pp * dp)
)


@alternative("state-bytes", "written out by stage")
def by_stage(parameters, dp, tp, pp, zero):
    own = parameters // (tp * pp)
    return [18 * own, 6 * own + 12 * own // dp, 2 * own + 16 * own // dp, 18 * own // dp][zero]


@alternative("state-bytes", "numbers of 8 bits")
def in_bits(parameters, dp, tp, pp, zero):
    bits = [(96, zero >= 1), (32, zero >= 2), (16, zero >= 3)]
    return sum(each / 8 * parameters / tp / pp / (dp if cut else 1) for each, cut in bits)


def _interval(save_s, restart_s, mtbf, factor=2.0):
    interval = (factor * save_s * mtbf) ** 0.5
    return interval, save_s / interval + (interval / 2 + restart_s) / mtbf


mistake(
    "save-interval",
    "one device's failures",
    says="Any of the devices stops the job: its MTBF is one device's / devices.",
)(lambda save_s, restart_s, device_mtbf_s, devices: _interval(save_s, restart_s, device_mtbf_s))
mistake(
    "save-interval", "root without 2", says="Half an interval is lost in the mean, not a whole one: √(2 · save · MTBF)."
)(lambda save_s, restart_s, device_mtbf_s, devices: _interval(save_s, restart_s, device_mtbf_s / devices, 1.0))
mistake(
    "save-interval",
    "restart in the root",
    says="A restart costs the same whatever the interval: it is not in the root.",
)(
    lambda save_s, restart_s, device_mtbf_s, devices: _interval(
        save_s, restart_s, device_mtbf_s / devices, 2 * (1 + restart_s / save_s)
    )
)


@mistake(
    "save-interval", "a whole interval lost", says="The interval is right; a failure falls in its middle in the mean."
)
def whole_interval(save_s, restart_s, device_mtbf_s, devices):
    mtbf = device_mtbf_s / devices
    interval = (2 * save_s * mtbf) ** 0.5
    return interval, save_s / interval + (interval + restart_s) / mtbf


@mistake("save-interval", "no restart", says="The interval is right; the wasted share has to count the restarts too.")
def no_restart(save_s, restart_s, device_mtbf_s, devices):
    return ANSWERS.save_interval(save_s, 0.0, device_mtbf_s, devices)


mistake("save-interval", "interval alone", expect="exercise asks for two numbers")(
    lambda save_s, restart_s, device_mtbf_s, devices: (2 * save_s * device_mtbf_s / devices) ** 0.5
)


@alternative("save-interval", "searched")
def searched(save_s, restart_s, device_mtbf_s, devices):
    mtbf = device_mtbf_s / devices

    def waste(interval):
        return save_s / interval + (interval / 2 + restart_s) / mtbf

    low, high = 1e-3, 1e9
    while high / low > 1 + 1e-6:
        third = (high / low) ** (1 / 3)
        low, high = (low, low * third**2) if waste(low * third) < waste(low * third**2) else (low * third, high)
    return low, waste(low)
