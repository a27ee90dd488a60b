"""A part's CRC-32 from the checksums of its pieces, which different ranks have read.

    a part in a file     [ AAAA | BB | CCCCCC ]       crc32(A B C) is in the manifest
    read by               rank 0  1     0             each rank knows crc32 of its own pieces

CRC-32 is the remainder of a division of polynomials over GF(2), so crc32(A B) = crc32(A) · x^(8 |B|) xor crc32(B). A
piece therefore adds crc32(piece) · x^(8 · bytes after it), and the exclusive or over all pieces is the checksum of the
part. That is zlib's `crc32_combine`. So no rank reads more than it holds, and every byte is still checked. isal's crc32
is zlib's, computed with the processor's instruction for such products.
"""

import functools

import numpy as np
from isal.isal_zlib import crc32

__all__ = ["crc32", "pieces_sum"]

_POLYNOMIAL = np.uint32(0xEDB88320)  # of CRC-32, its bits reversed as in zlib
_ONE = np.uint32(1 << 31)  # the polynomial 1


def pieces_sum(checksums: np.ndarray, bytes_after: np.ndarray) -> np.ndarray:
    """[n] CRC-32 of pieces, [n] bytes of their part that follow each -> [n] what each adds to the part's checksum."""
    shift, power = np.full(len(checksums), _ONE), _powers()
    after = np.asarray(bytes_after, dtype=np.uint64)
    for bit in range(int(after.max(initial=0)).bit_length()):
        is_set = (after >> np.uint64(bit)) & np.uint64(1)
        shift = np.where(is_set == 1, _product(shift, power[bit]), shift)
    return _product(np.asarray(checksums, dtype=np.uint32), shift)


@functools.cache
def _powers() -> list[np.uint32]:
    """x^8, x^16, x^32, ... modulo the polynomial."""
    found = [np.uint32(1 << 23)]
    while len(found) < 64:
        found.append(_product(found[-1], found[-1]))
    return found


def _product(a: np.ndarray | np.uint32, b: np.ndarray | np.uint32) -> np.ndarray | np.uint32:
    """Of polynomials over GF(2), modulo the polynomial, element by element."""
    total = np.zeros_like(np.bitwise_xor(a, b))
    for bit in range(31, -1, -1):
        total = total ^ np.where((a >> np.uint32(bit)) & np.uint32(1), b, np.uint32(0))
        b = (b >> np.uint32(1)) ^ np.where(b & np.uint32(1), _POLYNOMIAL, np.uint32(0))
    return total
