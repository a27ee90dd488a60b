"""Pools of 8-bit keys and values: bounds of the rounding, all readers against float64, copies in any order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_paged import scattered

from minillm.model import ModelConfig
from minillm.model.paged import PagedCache, block_by_block, gathered, paged_attention
from minillm.model.paged.quantized import QuantizedPool, read_rows, write_rows
from minillm.quantize.kv import KV_FORMATS, rounded_rows

numbers = st.floats(-1e4, 1e4, width=32)


def pool_of(floats, format):
    """A quantized pool with the rows of a pool of floats."""
    codes, scale = format.encode_rows(floats.float())
    return QuantizedPool(codes, scale, format)


@given(rows=st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=1, max_size=4))
def test_the_error_of_a_number_is_at_most_half_a_step(rows):
    rows = torch.tensor(rows)
    error, largest = {}, rows.abs().amax(-1, keepdim=True).double()
    for name, format in KV_FORMATS.items():
        codes, scale = format.encode_rows(rows)
        assert codes.shape == rows.shape and codes.element_size() == 1
        assert scale.shape == rows.shape[:-1] and scale.dtype is torch.float32
        error[name] = (rows.double() - format.decode_rows(codes, scale.double())).abs()
    near = 1 + 2e-5  # the scale itself is rounded to float32
    assert (error["int8"] <= largest / 255 * near + 1e-44).all()  # half of 2 · largest / 255
    step = torch.maximum(rows.abs().double() / 8, largest / 448 * 2**-9)  # 3 bits of mantissa; below 2^-6 even steps
    assert (error["fp8"] <= step / 2 * near + 1e-44).all()


@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(format):
    rows = torch.zeros(3, 4)
    assert torch.equal(rounded_rows(format, rows), rows)
    rows[0, 1], rows[1, 2] = float("nan"), float("inf")
    found = rounded_rows(format, rows)
    assert not found[0].isfinite().any() and not found[1].isfinite().all() and torch.equal(found[2], rows[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_a_row_is_rounded_by_itself(format, dtype):
    """Whatever is written beside it, and in whatever order."""
    rows = torch.randn(12, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    config = ModelConfig(50, 15, 64, 1, 3, 3, head_dim=6)
    together, apart = (PagedCache(config, 4, 3, format=format).layers[0][0] for _ in range(2))
    rows = torch.cat((rows, rows[..., :1]), -1)
    write_rows(together, torch.arange(12), rows)
    for slot in torch.randperm(12, generator=torch.Generator().manual_seed(1)):
        write_rows(apart, slot[None], rows[slot][None])
    for pool in (together, apart):
        assert torch.equal(read_rows(pool, torch.arange(12), dtype), rounded_rows(format, rows))


@settings(max_examples=15)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(
        st.integers(1, 12).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))), min_size=1, max_size=4
    ),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.none() | st.integers(1, 13),
    format=st.sampled_from(sorted(KV_FORMATS)),
)
def test_readers_see_the_rounded_rows(seed, lengths, kv_heads, group, block_size, window, format):
    """Slots that hold no key of a sequence are nan: none may be read."""
    parts, pools, tables = scattered(seed, lengths, kv_heads * group, kv_heads, block_size)
    q, where = torch.cat([part[0] for part in parts]), (tables, *zip(*lengths, strict=True))
    coded = [pool_of(pool, KV_FORMATS[format]) for pool in pools]
    rounded = [rounded_rows(KV_FORMATS[format], pool.float()).double() for pool in pools]
    expected = paged_attention(q, *rounded, *where, window=window)
    for backend in (gathered, block_by_block):
        y = paged_attention(q, *coded, *where, window=window, backend=backend)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)  # scales are of float32


CONFIG = ModelConfig(50, 8, 16, 2, 2, 2, head_dim=4)
BLOCKS, SIZE, HOST = 4, 3, 3


class Cache(RuleBasedStateMachine):
    """Rows written, blocks copied and swapped in any order, beside a dictionary of what each slot holds."""

    def __init__(self):
        super().__init__()
        self.format = KV_FORMATS["int8"]
        self.cache = PagedCache(CONFIG, BLOCKS, SIZE, num_host_blocks=HOST, format=self.format)
        self.device, self.host, self.seed = {}, {}, 0

    @rule(
        slots=st.lists(st.integers(0, BLOCKS * SIZE - 1), min_size=1, max_size=6, unique=True), size=st.integers(-3, 3)
    )
    def write(self, slots, size):
        self.seed += 1
        for layer in range(CONFIG.num_layers):
            for kind, pool in enumerate(self.cache.layers[layer]):
                rows = 10.0**size * torch.randn(len(slots), 2, 4, generator=torch.Generator().manual_seed(self.seed))
                write_rows(pool, torch.tensor(slots), rows)
                for slot, row in zip(slots, rounded_rows(self.format, rows), strict=True):
                    self.device[layer, kind, slot // SIZE, slot % SIZE] = row

    def move(self, source, block, target, into):
        for key in [key for key in target if key[2] == into]:
            del target[key]
        target.update({(*key[:2], into, key[3]): row for key, row in source.items() if key[2] == block})

    @rule(block=st.integers(0, BLOCKS - 1), into=st.integers(0, BLOCKS - 1))
    def copy(self, block, into):
        self.cache.copy(block, into)
        self.move(dict(self.device), block, self.device, into)

    @rule(block=st.integers(0, BLOCKS - 1), slot=st.integers(0, HOST - 1))
    def swap_out(self, block, slot):
        self.cache.to_host([block], [slot])
        self.move(self.device, block, self.host, slot)

    @rule(block=st.integers(0, BLOCKS - 1), slot=st.integers(0, HOST - 1))
    def swap_in(self, block, slot):
        self.cache.from_host([slot], [block])
        self.move(self.host, slot, self.device, block)

    @invariant()
    def reads_what_was_written(self):
        for (layer, kind, block, place), row in self.device.items():
            pool = self.cache.layers[layer][kind]
            assert torch.equal(read_rows(pool, torch.tensor([block * SIZE + place]), torch.float32)[0], row)


Cache.TestCase.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)
TestCache = Cache.TestCase
