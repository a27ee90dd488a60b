"""Lab 06: why DualPipe's microbatches come from both ends. Two all-to-alls per layer, and what hides behind them.

    one direction   attention │ dispatch │ MLP │ combine        compute and link take turns
    two             F: attention   dispatch    MLP    combine   the link carries F's messages while B computes,
                    B:    combine   MLP   dispatch   attention  and the other way round

A rank has one compute unit and one link. A chunk's parts run in order; each occupies one of the two. (DeepSeek-AI 2024,
section 3.2.1, https://arxiv.org/abs/2412.19437, where computing and messages of a layer take about as long.)
"""

import threading
import time
from collections.abc import Sequence

Part = tuple[str, float]  # what it occupies, and for how long
FORWARD: tuple[Part, ...] = (("compute", 1), ("link", 1), ("compute", 1), ("link", 1))
BACKWARD: tuple[Part, ...] = (("link", 1), ("compute", 2), ("link", 1), ("compute", 2))


def busy(what: str, *chains: Sequence[Part]) -> float:
    """How long the compute unit, or the link, is occupied in all."""
    return sum(length for chain in chains for lane, length in chain if lane == what)


def together(*chains: Sequence[Part]) -> float:
    """When the last of these chains ends, if all begin at once and each part starts as soon as it can."""
    free, ready, following = {"compute": 0.0, "link": 0.0}, [0.0] * len(chains), [0] * len(chains)

    def start(chain: int) -> float:
        return max(ready[chain], free[chains[chain][following[chain]][0]])

    while unfinished := [i for i, chain in enumerate(chains) if following[i] < len(chain)]:
        chosen = min(unfinished, key=start)
        lane, length = chains[chosen][following[chosen]]
        ready[chosen] = free[lane] = start(chosen) + length
        following[chosen] += 1
    return max(ready)


def emulated(*chains: Sequence[Part], unit_s: float = 0.005) -> float:
    """The same on the clock, in units: a thread for each chain, which sleeps while it holds the unit or the link."""
    lanes = {"compute": threading.Lock(), "link": threading.Lock()}

    def run(chain: Sequence[Part]) -> None:
        for lane, length in chain:
            with lanes[lane]:
                time.sleep(length * unit_s)

    threads = [threading.Thread(target=run, args=(chain,)) for chain in chains]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - began) / unit_s
