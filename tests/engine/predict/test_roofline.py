"""The roofline against numbers worked out by hand (P112)."""

import subprocess
import sys

import pytest

from minillm.predict import roofline


def test_roof_and_ridge():
    peak, bandwidth = 989e12, 3.35e12  # H100 SXM, bf16 dense
    ridge = roofline.ridge_point(peak, bandwidth)
    assert ridge == pytest.approx(295.2, abs=0.1)
    assert roofline.attainable(1.0, peak, bandwidth) == bandwidth
    assert roofline.attainable(ridge, peak, bandwidth) == pytest.approx(peak)
    assert roofline.attainable(10 * ridge, peak, bandwidth) == peak
    assert roofline.attainable(0.0, peak, bandwidth) == 0.0


def test_matmul_by_hand():
    """[2048, 8192] @ [8192, 32768] in bf16: 1,560 FLOP/byte to prefill 2048 tokens, 1.0 to decode one."""
    assert roofline.matmul_flops(2, 3, 5) == 60
    assert roofline.matmul_bytes(2, 3, 5, 4) == (6 + 15 + 10) * 4
    assert roofline.matmul_intensity(2048, 8192, 32768, 2) == pytest.approx(1560, abs=1)
    assert roofline.matmul_intensity(1, 8192, 32768, 2) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("tokens, bound", [(1, "memory"), (4096, "compute")])
def test_time_and_speed_are_the_same_roof(tokens, bound):
    peak, bandwidth = 1e12, 1e11
    shape = (tokens, 4096, 4096)
    seconds = max(roofline.matmul_flops(*shape) / peak, roofline.matmul_bytes(*shape, 2) / bandwidth)
    speed = roofline.attainable(roofline.matmul_intensity(*shape, 2), peak, bandwidth)
    assert roofline.matmul_flops(*shape) / seconds == pytest.approx(speed)
    assert (speed == peak) is (bound == "compute")


@pytest.mark.parametrize(
    "call, names",
    [
        (lambda: roofline.attainable(1.0, 0, 1e9), "peak_flops is 0"),
        (lambda: roofline.attainable(-1.0, 1e12, 1e9), "intensity is -1"),
        (lambda: roofline.ridge_point(1e12, -5), "bandwidth is -5"),
        (lambda: roofline.matmul_flops(1, 0, 1), "k is 0"),
        (lambda: roofline.matmul_bytes(1, 1, 1, 0), "itemsize is 0"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, names):
    with pytest.raises(ValueError, match=names):
        call()


def test_predict_needs_neither_torch_nor_numpy():
    code = "import sys, minillm.predict; print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
