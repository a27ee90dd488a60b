"""How the programs of a split-KV kernel share a step's attention: which computes what, and where its result lies.

queries  ── cut_tiles ──▶ tiles of a few tokens each, with all the keys they see
keys     ── count_splits ──▶ each tile cut in as many parts as its own number of keys is worth
         ── share_work ──▶ a row of numbers for each program, and for each token where its partial results lie
"""

from collections.abc import Sequence

import numpy as np

MIN_KEYS = 256  # of a split: fewer are not worth a partial result that is written and read again


def cut_tiles(query_lens: Sequence[int], context_lens: Sequence[int], size: int) -> np.ndarray:
    """[tiles, 4]: the sequence, its first row of q, its number of tokens (at most `size`), the position of the first.

    A tile needs no keys beyond its last token, so causality follows from where the tile ends.
    """
    queries, contexts = np.array(query_lens), np.array(context_lens)
    counts = -(-queries // size)
    sequence = np.arange(len(queries)).repeat(counts)
    done = size * (np.arange(len(sequence)) - (counts.cumsum() - counts)[sequence])  # tokens in tiles before
    left = queries[sequence] - done
    first = (queries.cumsum() - queries)[sequence] + done
    return np.stack((sequence, first, np.minimum(size, left), contexts[sequence] - left), axis=1)


def count_splits(keys: np.ndarray, kv_heads: int, units: int) -> np.ndarray:
    """Splits of each tile, by its number of keys: parts of like size, enough to fill every compute unit twice as long
    as each part has MIN_KEYS keys. A long sequence is cut even if its neighbours are short."""
    size = max(MIN_KEYS, -(-int(keys.sum()) * kv_heads // (2 * units)))
    return np.maximum(1, keys // size)


def share_work(tiles: np.ndarray, splits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([programs, 7], [tokens, 3]) for tiles [n, 4] and the splits of each.

    A program's: its tile, which split of how many, and where the partial results of the tile's tokens begin. A token's:
    where its first partial result lies, how far apart they are, and how many there are. With one split per
    tile no combine is needed: the kernel writes the output directly.
    """
    lengths = tiles[:, 2]
    tile, starts = np.arange(len(tiles)).repeat(splits), (splits * lengths).cumsum() - splits * lengths
    split = np.arange(len(tile)) - (splits.cumsum() - splits)[tile]
    programs = np.column_stack((tiles[tile], split, splits[tile], starts[tile] + split * lengths[tile]))
    of = np.arange(len(tiles)).repeat(lengths)
    place = np.arange(len(of)) - (lengths.cumsum() - lengths)[of]
    return programs, np.column_stack((starts[of] + place, lengths[of], splits[of]))
