"""Lab 08's figures: load per expert over steps, drops, the fullest rank, losses; and three with sliders."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from course.lab08_expert_parallel import experiments
from course.lab08_expert_parallel import experiments_links as links
from course.lab08_expert_parallel import experiments_training as training
from course.lab08_expert_parallel.experiments_training import FACTORS, NUM_EXPERTS, SEQ, TOP_K, Training
from minillm.drawing import headline, subplots
from minillm.palette import PALETTE, look
from minillm.predict.training import moe

ROUTERS = ("no balancing", "balance loss", "bias")

# Pure functions of parameters, for sliders.


def drops_by_chance(tokens: int = 64, experts: int = 8, top_k: int = 2) -> Figure:
    """Share of pairs that are dropped when a router chooses at random, by capacity factor (formula): for a quarter of
    `tokens`, for as many and for 16 times as many."""
    factors = [0.5 + 0.125 * step for step in range(21)]
    figure, axes = subplots(width=7.5, height=3.2)
    for index, size in enumerate((tokens // 4, tokens, 16 * tokens)):
        shares = [moe.expected_dropped_share(size, top_k, experts, factor) for factor in factors]
        drawn = look(index)
        axes.plot(factors, shares, color=drawn.color, linestyle=drawn.linestyle, label=f"{size:,} tokens")
    axes.axvline(1, color=PALETTE["black"], linestyle=":", linewidth=1)
    axes.set(xlabel="capacity factor", ylabel="pairs dropped", ylim=(0, None))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    setting = (
        f"Formula: top {top_k} of {experts}, chosen at random; a quarter of {tokens:,} tokens, all, 16 times as many"
    )
    headline(axes, "A router that is balanced on average still drops pairs", setting)
    axes.legend(title="tokens that share the places")
    return figure


def weights_read(experts: int = 256, top_k: int = 8) -> Figure:
    """Share of the experts whose weights a decode step reads, by the tokens of the step (formula)."""
    tokens = [2**power for power in range(11)]
    shares = [1 - (1 - top_k / experts) ** count for count in tokens]
    figure, axes = subplots(width=7.5, height=3.2)
    axes.plot(tokens, shares, color=look(0).color, marker=look(0).marker, label="experts read, by at least one token")
    each = [min(1.0, count * top_k / experts) for count in tokens]
    axes.plot(tokens, each, color=look(1).color, linestyle="--", label="if no two tokens chose the same")
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, tokens)
    axes.set(xlabel="tokens in the step", ylabel="experts read", ylim=(0, 1.05))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    half = next(count for count in range(1, 1 + experts) if 1 - (1 - top_k / experts) ** count >= 0.5)
    setting = f"Formula: top {top_k} of {experts}, chosen at random"
    headline(axes, f"A step of {half} tokens already reads half of the experts", setting)
    axes.legend()
    return figure


def rows_that_cross(experts: int = 256, top_k: int = 8) -> Figure:
    """Rows per token that leave its node, flat and in two levels, by the number of nodes (formula)."""
    nodes = [count for count in (1, 2, 4, 8, 16, 32) if experts % count == 0]
    figure, axes = subplots(width=7.5, height=3.2)
    for index, name in enumerate(("a row per expert (flat)", "a row per node (two levels)")):
        rows = [moe.crossing_rows(experts, top_k, count)[index] for count in nodes]
        drawn = look(index)
        axes.plot(nodes, rows, color=drawn.color, marker=drawn.marker, linestyle=drawn.linestyle, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, nodes)
    axes.set(xlabel="nodes the experts are spread over", ylabel="rows per token", ylim=(0, top_k * 1.05))
    setting = f"Formula: rows that cross between nodes; top {top_k} of {experts}, chosen at random"
    headline(axes, "Two levels send a token once to each node, not once to each expert", setting)
    axes.legend()
    return figure


# Drawn from measurements.


def draw_loads(found: dict[str, Training]) -> Figure:
    """Share of the load of each of 8 experts, step by step: without balancing, with a balance loss, with a bias."""
    figure, panels = subplots(len(ROUTERS), 1, width=8, height=5.2, sharex=True)
    for axes, name in zip(panels, ROUTERS, strict=True):
        shares = found[name].loads.T.numpy()
        image = axes.imshow(shares, aspect="auto", cmap="cividis", vmin=0, vmax=1 / TOP_K, interpolation="nearest")
        axes.set(ylabel="expert")
        axes.set_yticks(range(0, NUM_EXPERTS, 2))
        axes.set_title(
            f"{name.capitalize()}: fullest expert {found[name].imbalance:.1f} times the mean in the last ten steps"
        )
        axes.grid(False)
    panels[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=list(panels), label="share of all (token, choice) pairs", shrink=0.8)
    bar.ax.axhline(1 / NUM_EXPERTS, color="white", linewidth=2)
    bar.ax.text(1.4, 1 / NUM_EXPERTS, " even", va="center", fontsize=9, transform=bar.ax.get_yaxis_transform())
    bar.set_ticks([0, 0.25, 0.5])
    headline(figure, "Without balancing a few experts take most of the load")
    return figure


def draw_drops(found: dict[str, Training]) -> Figure:
    """Share of pairs dropped by capacity factor: of the three trained routers, and by chance (formula)."""
    figure, axes = subplots(width=7.5, height=3.4)
    for index, name in enumerate(ROUTERS):
        drawn = look(index)
        shares = [training.dropped(found[name], factor) for factor in FACTORS]
        axes.plot(FACTORS, shares, color=drawn.color, marker=drawn.marker, label=f"{name}, after training")
    chance = [moe.expected_dropped_share(SEQ, TOP_K, NUM_EXPERTS, factor) for factor in FACTORS]
    axes.plot(FACTORS, chance, color=PALETTE["black"], linestyle="--", marker="", label="chosen at random (formula)")
    axes.set(xlabel="capacity factor", ylabel="pairs dropped", ylim=(0, None))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    setting = f"Top {TOP_K} of {NUM_EXPERTS}; the places are those of each sequence of {SEQ} tokens"
    headline(axes, "Balanced routers drop few pairs, but need more room than chance does", setting)
    axes.legend()
    return figure


def draw_fullest(found: Sequence[links.Load]) -> Figure:
    """Seconds of a layer on 4 ranks by the fullest rank's load, the number of rows being the same; work emulated."""
    figure, axes = subplots(width=7.5, height=3.2)
    at = [load.fullest for load in found]
    axes.plot(at, [1e3 * load.measured_s for load in found], "o", color=look(0).color, label="measured, work emulated")
    due = [1e3 * load.predicted_s for load in found]
    axes.plot(at, due, "--", marker="", color=look(1).color, label="max(load) · time per row")
    mean = 1e3 * links.ROW_S * links.ROWS_PER_RANK
    axes.axhline(mean, color=PALETTE["black"], linestyle=":", label="mean(load) · time per row")
    axes.set(xlabel="rows of the fullest rank / mean", ylabel="layer, until all are done (ms)", ylim=(0, None))
    setting = f"{links.WORLD} ranks, always {links.WORLD * links.ROWS_PER_RANK} rows in all"
    headline(axes, "The fullest rank sets the time of a layer, not the mean", setting)
    axes.legend()
    return figure


def draw_losses(found: dict[str, Training]) -> Figure:
    """Loss of a dense model and of one with experts and as many active FLOPs: by FLOPs, and by seconds."""
    figure, panels = subplots(1, 2, width=9, height=3.2, sharey=True)
    for index, name in enumerate(("dense", "balance loss")):
        run, drawn = found[name], look(index)
        smooth = [sum(run.losses[max(0, i - 4) : i + 1]) / len(run.losses[max(0, i - 4) : i + 1])
                  for i in range(len(run.losses))]  # fmt: skip
        label = "dense" if name == "dense" else f"{NUM_EXPERTS} experts, top {TOP_K}"
        for axes, total in zip(panels, (run.flops * len(smooth) / 1e9, run.seconds), strict=True):
            x = [total * (i + 1) / len(smooth) for i in range(len(smooth))]
            axes.plot(x, smooth, color=drawn.color, linestyle=drawn.linestyle, marker="", label=label)
    panels[0].set(xlabel="training FLOPs so far (GFLOP)", ylabel="loss (nats per byte)")
    panels[0].set_title("At the same FLOPs")
    panels[1].set(xlabel="CPU time so far (s)")
    panels[1].set_title("At the same seconds of one core")
    panels[0].legend()
    headline(figure, "By FLOPs the experts keep up with the dense model, by seconds of one core they fall behind")
    return figure


# Committed figures.


def _figure_loads() -> tuple[Figure, dict[str, Any]]:
    found = training.trainings()
    numbers = {name: {"imbalance": found[name].imbalance, "loss": found[name].final_loss} for name in ROUTERS}
    return draw_loads(found), {"steps": training.STEPS, "routers": numbers}


def _figure_drops() -> tuple[Figure, dict[str, Any]]:
    found = training.trainings()
    shares = {name: [training.dropped(found[name], factor) for factor in FACTORS] for name in ROUTERS}
    return draw_drops(found), {"factors": FACTORS, "dropped_share": shares}


def _figure_fullest() -> tuple[Figure, dict[str, Any]]:
    found = links.by_load()
    return draw_fullest(found), {"emulated": True, "rows": [vars(load) for load in found]}


def _figure_losses() -> tuple[Figure, dict[str, Any]]:
    found = training.trainings()
    keep = {name: found[name] for name in ("dense", "balance loss")}
    numbers = {
        n: {"loss": run.final_loss, "seconds": run.seconds, "flops_per_step": run.flops} for n, run in keep.items()
    }
    return draw_losses(found), {"steps": training.STEPS, "runs": numbers}


def _figure_crossing() -> tuple[Figure, dict[str, Any]]:
    ranks = experiments.flat_and_two_levels()
    across = {name: [rank[name].across for rank in ranks] for name in ranks[0]}
    return rows_that_cross(), {"bytes_to_other_nodes_by_rank": across, "formula": experiments.crossing_formula()}


FIGURES = {
    "loads": _figure_loads,
    "drops": _figure_drops,
    "fullest": _figure_fullest,
    "losses": _figure_losses,
    "crossing": _figure_crossing,
}
