"""What `python -m minillm train` says when a run has ended."""

import shlex
from pathlib import Path
from typing import Any

from minillm.train.fault_tolerance.goodput import read_goodput


def report(found: dict[str, Any], folder: Path) -> None:
    if peak := found.get("peak_bytes"):
        print("\nmemory of the first step, each kind at its fullest")
        print("\n".join(f"{kind:<10} {size / 2**20:>10.3f} MiB" for kind, size in peak.items()), end="\n\n")
    if skipped := found.get("skipped_windows"):
        ranges = ", ".join(f"{begin} to {end - 1}" for begin, end in skipped)
        print(f"windows skipped after a bad loss: {ranges}")
    if spent := found.get("goodput"):
        print(f"goodput {spent['goodput']:.1%}: {read_goodput(folder)}")
    if found["interrupted"]:
        print(
            f"saved after step {found['steps_done']}: python -m minillm train --resume --run {shlex.quote(folder.name)}"
        )
        return
    loss, bits = found["validation_loss"], found["bits_per_byte"]
    unigram, unigram_bits = found["unigram_entropy"], found["unigram_bits_per_byte"]
    print(f"validation loss {loss:.4f} nats/token, {bits:.4f} bits per byte")
    print(f"unigram entropy {unigram:.4f} nats/token, {unigram_bits:.4f} bits per byte: the best that ignores context")
    if made := found.get("exported"):
        print(_exported(made))


def _exported(made: dict[str, Any]) -> str:
    bits = f"{made['bits_per_byte']:.3f} bits per byte; " if "bits_per_byte" in made else ""
    if made["config"]["lora"] is None:
        return f"exported: {bits}python -m minillm generate --model {made['folder']}"
    alone = f"exported: {bits}{made['folder']} holds the adapters alone"
    if made["base"] is None:
        return f"{alone}, which peft loads beside their base"
    return f"{alone}: python -m minillm generate --model {made['base']} --adapter {made['folder']}"
