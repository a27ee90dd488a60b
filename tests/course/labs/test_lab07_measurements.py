"""Lab 07's formulas and pictures: what its answers claim in words follows from `predict.training.context`."""

import pytest

from course.lab07_long_context import experiments, receipts
from course.lab07_long_context import experiments_links as links
from course.lab07_long_context import figures as pictures
from minillm.predict.training import context
from minillm.predict.training.context import AttentionShape, Hardware


def test_the_numbers_of_the_design_answers():
    shape = AttentionShape(1, 2**20, 32, 8, 128, itemsize=2)
    across = Hardware(receipts.FLOPS, 0, receipts.ACROSS)
    assert context.hiding_length(32, 8, across, 2) == 4000
    assert receipts.attention_share() > 0.9
    assert context.buffer_bytes("gather", shape, 64) == pytest.approx(2 * 4.3e9, rel=0.02)
    with pytest.raises(ValueError, match="do not divide over 64"):
        context.check_variant("ulysses", shape, 64)
    rows = {cells[0]: cells for cells in receipts.design_layout().rows}
    assert rows["cp 64, across nodes"][1] == "2,048" and rows["cp 8, inside a node"][-1] == "500"


def test_short_sequences_lose_and_long_ones_win():
    machine = Hardware(links.DEVICE_FLOPS, links.SHORT.latency_s, links.SHORT.bandwidth_bytes_per_s)
    share = {}
    for seq in links.LENGTHS:
        shape = links.shape_of(seq)
        alone = sum(context.flops("zigzag", shape, 4)) / links.DEVICE_FLOPS
        share[seq] = [context.forward_seconds(name, shape, 4, machine) / alone for name in ("zigzag", "ulysses")]
    assert min(share[256]) > 3 and max(share[4096]) < 0.4


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_pictures_with_sliders_draw(ranks):
    shares, boxes = pictures.causal_work(ranks).axes[1], pictures.causal_work(ranks).axes[0]
    assert len(shares.patches) == ranks and len(boxes.patches) == 2 * ranks
    assert pictures.bytes_by_ranks(8, ranks if ranks != 3 else 4).axes[0].lines
    assert "hidden from" in pictures.where_it_hides(gb_s=5 * ranks).axes[0].get_legend_handles_labels()[1][-1]


def test_one_head_of_128k_tokens():
    found = experiments.one_head_bytes()
    assert found["scores"] / found["tiles"] > 200
