"""What kernels cost, against numbers worked out by hand (P111) and a layer counted another way."""

import pytest

from minillm.model import ModelConfig
from minillm.predict import kernels
from minillm.predict.model import kv_bytes_per_token, matmul_parameters
from minillm.predict.roofline import matmul_bytes

CONFIG = ModelConfig(100, 64, 160, 1, 8, 2)


@pytest.mark.parametrize(("inputs", "before", "after"), [(2, 5, 3), (1, 4, 2)], ids=["b as large as x", "b one row"])
def test_fusing_bias_and_relu(inputs, before, after):
    n = 1000
    two = [kernels.elementwise(n, inputs, 4), kernels.elementwise(n, 1, 4)]
    one = kernels.fused(two, 4 * n, name="both")
    assert sum(kernel.bytes for kernel in two) == before * 4 * n
    assert one.bytes == after * 4 * n and one.launches == 1 and one.flops == 2 * n


def test_a_kernel_is_bound_by_bytes_or_by_flops_and_a_step_by_its_launches_too():
    slow, quick = kernels.Kernel("a", 80, 20, 10), kernels.Kernel("b", 10, 0, 4000)
    assert slow.seconds(10.0, 1000.0) == 10 and quick.seconds(10.0, 1000.0) == 4
    assert kernels.step_seconds([slow, quick], 10.0, 1000.0, 1.0) == 14
    assert kernels.step_seconds([slow, quick], 10.0, 1000.0, 8.0) == 16


def test_one_tile_reads_each_matrix_once_and_small_tiles_read_them_often():
    assert kernels.tiled_matmul(50, 30, 20, 64, 64, 2).bytes == matmul_bytes(50, 30, 20, 2)
    assert kernels.tiled_matmul(64, 30, 64, 16, 32, 2).read == 2 * (64 * 30 * 2 + 30 * 64 * 4)
    with pytest.raises(ValueError, match="tile_m is 0"):
        kernels.tiled_matmul(64, 30, 64, 0, 32, 2)


@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_reads_its_weights_and_its_cache_once(fused):
    """All weights once; keys and values of every sequence once; FLOPs: two for each weight and sequence, four for each
    key and number of a query."""
    batch, context = 3, 50
    layer = kernels.decode_layer(CONFIG, batch, context, 2, fused=fused)
    products = [k for k in layer if k.name in ("q k v", "output", "gate, up", "down")]
    weights = matmul_parameters(CONFIG) - 100 * 64  # without the head
    small = batch * 2 * (64 * (1 if fused else 3) + 64 + 64 * (1 if fused else 2) + 160)  # their inputs
    assert sum(k.read for k in products) == 2 * weights + small
    assert sum(k.flops for k in products) == 2 * batch * weights
    attention = next(k for k in layer if k.name.startswith("attention"))
    assert attention.read == batch * (context * kv_bytes_per_token(CONFIG, 2) + 2 * 64)
    assert attention.flops == 4 * batch * context * 64
    assert sum(k.launches for k in layer) == (14 if fused else 25)


def test_fusing_a_layer_moves_fewer_bytes_and_no_fewer_flops():
    plain, fused = (kernels.decode_layer(CONFIG, 4, 9, fused=each) for each in (False, True))
    assert sum(k.bytes for k in fused) < sum(k.bytes for k in plain)
    with pytest.raises(ValueError, match="batch is 0"):
        kernels.decode_layer(CONFIG, 0, 9)


def test_every_rung_of_the_ladder_is_slower_than_the_one_above():
    rates = [rung.rate for rung in kernels.LADDER]
    assert rates == sorted(rates, reverse=True) and len({rung.name for rung in kernels.LADDER}) == len(rates)
    assert 30e6 < kernels.LADDER[0].bytes < 40e6  # 256 kB of registers in each of 132 units
