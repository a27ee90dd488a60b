"""Where the course lies on disk: a folder per lab, `course/labNN_topic/`, and what is generated from it.

course/lab01_collectives/notebook.py    the master      -> labs/01_collectives.ipynb, solutions/01_collectives.ipynb
course/lab01_collectives/torchrun.py    its script      -> labs/torchrun/..., solutions/torchrun/01_collectives.py
course/lab01_collectives/checks*.py, mistakes*.py, receipts.py, figures.py       found here by name
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = re.compile(r"lab(\d\d_\w+)")


def root(start: Path | None = None) -> Path:
    """The nearest folder from `start` upwards with course/labNN_topic; without `start` from here, else `home()`."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if any((folder / "course").glob("lab[0-9][0-9]_*/")):
            return folder
    if start:
        raise ValueError(f"no course in or above {here}: name a clone of minillm")
    return home()


def home() -> Path:
    """The clone whose course this is."""
    return Path(__file__).resolve().parents[2]


def folders(clone: Path) -> dict[str, Path]:
    """The labs' folders by name (NN_topic), in order."""
    found = ((FOLDER.fullmatch(path.name), path) for path in sorted((clone / "course").glob("lab*/")))
    return {match[1]: path for match, path in found if match}


def masters(clone: Path) -> dict[str, Path]:
    """Masters of the labs by name, in order."""
    return _files(clone, "notebook.py")


def scripts(clone: Path) -> dict[str, Path]:
    """Masters of the torchrun scripts by name, in order."""
    return _files(clone, "torchrun.py")


def modules(kind: str, lab: str = "") -> list[str]:
    """Modules of this process's course called `kind` or `kind_*`, of one lab (NN or NN_topic) or of all."""
    paths = [path for name, folder in folders(home()).items() if name.startswith(lab) for path in folder.glob("*.py")]
    names = {path: path.stem for path in sorted(paths) if re.fullmatch(rf"{kind}(_\w+)?", path.stem)}
    return [f"course.{path.parent.name}.{stem}" for path, stem in names.items()]


def lab_of(module: str) -> str:
    """NN_topic of a module course.labNN_topic.x; "" for any other module."""
    match = re.match(rf"course\.{FOLDER.pattern}\b", module)
    return match[1] if match else ""


def load(kind: str, lab: str) -> ModuleType | None:
    """The module `kind` of a lab, or None if the lab has none."""
    name = next((name for name in modules(kind, lab) if name.endswith(f".{kind}")), None)
    return import_module(name) if name else None


def numbers(kind: str) -> list[str]:
    """Numbers of the labs that have a module `kind`."""
    return [name.split(".")[1][3:5] for name in modules(kind) if name.endswith(f".{kind}")]


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


def _files(clone: Path, name: str) -> dict[str, Path]:
    return {lab: folder / name for lab, folder in folders(clone).items() if (folder / name).exists()}
