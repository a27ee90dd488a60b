"""Where the course lies on disk and what its labs are called."""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def root(start: Path | None = None) -> Path:
    """The nearest folder from `start` upwards with solutions/NN_topic.py; without `start` from here, else minillm's."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents, *([] if start else [Path(__file__).resolve().parents[2]])):
        if any((folder / "solutions").glob("[0-9][0-9]_*.py")):
            return folder
    raise ValueError(f"no course in or above {here}: name a clone of minillm, or run this inside one")


def masters(course: Path) -> dict[str, Path]:
    """Masters of the labs by name, in order: solutions/NN_topic.py."""
    return _by_name((course / "solutions").glob("*.py"))


def scripts(course: Path) -> dict[str, Path]:
    """Masters of the torchrun scripts by name, in order: solutions/torchrun/NN_topic.py."""
    return _by_name((course / "solutions" / "torchrun").glob("*.py"))


def pick(names: Sequence[str], known: Iterable[str]) -> list[str]:
    """Full lab names for `names`, each a full name or its number (`01` for 01_collectives); no names means all."""
    known = list(known)
    return [_resolve(name, known) for name in names] if names else known


def _resolve(name: str, known: list[str]) -> str:
    asked = name.removesuffix(".ipynb").removesuffix(".py")
    found = [lab for lab in known if lab == asked or lab.split("_")[0] == asked]
    if found:
        return found[0]
    close = difflib.get_close_matches(asked, known, n=1)
    choice = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known) or 'none yet'}"
    raise ValueError(f"no lab is called '{name}'; {choice}")


def _by_name(paths: Iterable[Path]) -> dict[str, Path]:
    return {path.stem: path for path in sorted(paths) if re.fullmatch(r"\d\d_\w+", path.stem)}
