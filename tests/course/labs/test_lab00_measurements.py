"""Lab 00's measurements and figures: what they return, not how fast the machine is."""

from matplotlib.figure import Figure

from course.kit import answers_of
from course.lab00_start_here import experiments
from course.lab00_start_here import figures as pictures
from minillm.comm import launch
from minillm.measure.rates import fit_link
from minillm.predict import comms


def test_matmul_rates_cover_every_edge_and_number_of_tokens():
    rates = experiments.matmul_rates([64], sweeps=1)
    assert [tokens for tokens, _ in rates[64]] == list(experiments.TOKENS)
    assert all(rate > 0 for _, rate in rates[64])
    assert isinstance(pictures.draw_roofline(rates, 64, 1e11, 1e10), Figure)


def test_two_witnesses_agree_with_the_formula():
    found = launch(experiments.two_witnesses, 3, answers_of("00_start_here").average, 3 << 20)
    cost = comms.ring_all_reduce(3 << 18, 4, 3)
    assert [sent for sent, _ in found] == list(cost.sent_per_rank)
    assert found[0][1] >= cost.total_bytes


def test_all_reduce_is_timed_on_every_rank():
    seconds = launch(experiments.time_all_reduce, 2, 4096, 5)
    assert [len(runs) for runs in seconds] == [5, 5] and min(map(min, seconds)) > 0


def test_ranks_without_a_turn_do_no_work():
    layouts = [(1, 1), (2, 1)]
    rates = launch(experiments.crowd, 2, layouts, 32, 0.01)
    assert all(first > 0 and second > 0 for first, second in rates[0])
    assert all(first == 0 and second > 0 for first, second in rates[1])
    together = experiments.best_together([[[1.0, 2.0], [3.0, 1.0]], [[1.0, 1.0], [0.0, 5.0]]])
    assert together == [3.0, 6.0]
    assert isinstance(pictures.draw_crowd(layouts, together, together), Figure)


def test_link_figure_names_alpha_and_beta():
    fit = fit_link(2, [(1 << k, 50e-6 + (1 << k) / 2e9) for k in range(10, 24)])
    axes = pictures.draw_link({2: fit}, 2).axes[0]
    assert axes.texts[-1].get_text() == "One round of a ring of 2 ranks: α = 50.0 µs, β = 2.0 GB/s, typically within 0%"
