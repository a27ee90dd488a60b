"""python -m minillm.data tokenizer   makes the committed tokenizer.json again"""

import argparse
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

from minillm.data.corpus import corpus
from minillm.data.tokenizer import COMMITTED
from minillm.data.tokenizer_training import train_tokenizer


def make_tokenizer(data: str | None, vocab_size: int, out: Path) -> None:
    """Trains on the corpus' training files and writes `out` and, beside it, where it came from."""
    text = corpus(data)
    train_tokenizer((document.text for document in text.documents("train")), vocab_size).save(out)
    source = {
        "command": f"python -m minillm.data tokenizer --vocab-size {vocab_size}",
        "python": platform.python_version(),
        "corpus": "standard library" if data is None else str(data),
        "split": "train",
        **asdict(text.statistics("train")),
        "sha256": text.fingerprint("train"),
    }
    out.with_suffix(".source.json").write_text(json.dumps(source, indent=2) + "\n", "utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minillm.data", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=["tokenizer"])
    parser.add_argument("--data", help="a folder or file of text (default: the standard library)")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=COMMITTED, help="where the tokenizer goes (default: the package's)")
    options = parser.parse_args(argv)
    try:
        make_tokenizer(options.data, options.vocab_size, options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
