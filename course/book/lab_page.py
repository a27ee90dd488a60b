"""A lab as a page of Markdown: text and code, hints and solution folded under each exercise, the stored outputs."""

import base64
import re
from functools import cache
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course.kit import course, exercises, masters
from course.kit.minutes import core_minutes, lab_title

TORCHRUN = "The script for torchrun"
FENCE = "`" * 6  # longer than any fence inside


class Images:
    """Pictures of the outputs, written beside the page."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.count = folder, name, 0

    def add(self, png: str, alt: str, width: int | None) -> str:
        """Writes the picture (base64) and returns its Markdown. width: in pixels of the screen."""
        self.count += 1
        file = self.folder / "images" / f"{self.name}_{self.count:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(png))
        size = f":width: {width}px\n" if width else ""
        return f"```{{image}} images/{file.name}\n:alt: {' '.join(alt.split())}\n{size}:class: picture\n```"


def lab_page(clone: Path, name: str, names: list[str], folder: Path) -> str:
    """The page of lab `name`. names: of all labs in order. folder: where the page will lie, for its pictures."""
    master = course.masters(clone)[name]
    stubs = {cell.id: cell.source for cell in _lab(master).cells}
    solved = nbformat.read(clone / "solutions" / f"{name}.ipynb", as_version=4)
    images, parts = Images(folder, name), []
    for cell in solved.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            parts += _code(cell, stubs.get(cell.id, cell.source))
            parts += [_output(output, images) for output in cell.outputs]
    title, _, opening = parts[0].partition("\n")
    claim, stands_on, time, rest = split_opening(opening)
    glance = _glance(clone, name, names, stands_on, time)
    return "\n\n".join([title, claim, glance, rest, *parts[1:], *_script(clone, name)]) + "\n"


def split_opening(text: str) -> tuple[str, str, str, str]:
    """The first cell below its title: the claim, what the lab stands on, how long it takes, and what follows."""
    claim, _, rest = text.strip().partition("Stands on ")
    stands_on, _, rest = rest.partition("\n\n")
    time, questions, after = rest.partition("At the end you can answer:")
    sentences = re.split(r"(?<=\.)\s+", " ".join(time.split("\n\n")[0].split()))
    timed = [s for s in sentences if re.search(r"(?<!-)\b(hours?|minutes?|seconds)\b", s)]
    others = "" if len(timed) == len(sentences) else " ".join(s for s in sentences if s not in timed)
    more = "\n\n".join([others, *time.split("\n\n")[1:]]).strip()
    return claim, " ".join(stands_on.split()), " ".join(timed), f"{more} {questions}{after}".strip()


def _glance(clone: Path, name: str, names: list[str], stands_on: str, time: str) -> str:
    """The box at the top: what comes before, how long it takes, what it needs, and the labs beside it."""
    core, later = core_minutes(_lab(course.masters(clone)[name]))
    pages = {lab[:2]: f"[{lab[:2]}]({lab}.md)" for lab in names}
    stands_on = re.sub(r"\b\d\d\b", lambda match: pages.get(match[0], match[0]), stands_on)
    more = f", {later} for those to *skip on a first reading*" if later else ""
    place = names.index(name)
    titles = {lab: lab_title(_lab(course.masters(clone)[lab])) for lab in names}
    beside = [("Previous", names[place - 1])] if place else []
    beside += [("Next", names[place + 1])] if place + 1 < len(names) else []
    needs = "two CPU cores; no GPU, no network"
    if name in course.scripts(clone):
        needs += f". On a node with GPUs: [its script for torchrun](#{slug(TORCHRUN)})"
    return "\n".join(
        [
            f"{FENCE}{{container}} glance",
            f"- **Before it:** {stands_on}",
            f"- **Time:** {core} minutes for the exercises of the core path{more}. {time}",
            f"- **Needs:** {needs}.",
            f"- **Open it:** `python -m minillm lab {name[:2]}`",
            "- " + " · ".join(f"**{which}:** [{titles[lab]}]({lab}.md)" for which, lab in beside),
            FENCE,
        ]
    )


@cache
def _lab(master: Path) -> NotebookNode:
    return masters.lab(master)


def _code(cell: NotebookNode, stub: str) -> list[str]:
    """The cell's code; where the learner is asked for some, the stub, and folded under it hints and solution."""
    if stub == cell.source:
        return [_python(cell.source)] if cell.source.strip() else []
    hints = [hint for name in masters.checked(cell) for hint in exercises.find(name).hints[:2]]
    plain = [re.sub(r"(?<=[\w)\]])\*(?=[\w(\[])", r"\\*", hint) for hint in hints]  # a product is no emphasis
    folds = [_fold(f"Hint {number}", hint) for number, hint in enumerate(plain, 1)]
    return [_python(stub), *folds, _fold("Solution", _python(cell.source))]


def _script(clone: Path, name: str) -> list[str]:
    """The torchrun script of a lab with its solution folded, if it has one."""
    master = course.scripts(clone).get(name)
    if master is None:
        return []
    run = f"torchrun --nproc-per-node 4 labs/torchrun/{name}.py"
    solved = _fold("Solution", _python(masters.script(master, solved=True)))
    return [f"## {TORCHRUN}", f"    {run}", _fold(f"labs/torchrun/{name}.py", _python(masters.script(master))), solved]


def _output(output: NotebookNode, images: Images) -> str:
    """A stored output: a picture, a table or card, Markdown, or text."""
    if output.output_type == "stream":
        return _text(output.text)
    data = output.data
    if "image/png" in data:
        return images.add(data["image/png"], data["text/plain"], output.metadata.get("image/png", {}).get("width"))
    if "text/html" in data:
        return f'{FENCE}{{raw}} html\n<div class="shown">{data["text/html"]}</div>\n{FENCE}'
    return data["text/markdown"] if "text/markdown" in data else _text(data["text/plain"])


def _python(source: str) -> str:
    return f"{FENCE}python\n{source.strip()}\n{FENCE}"


def _text(text: str) -> str:
    return f"{FENCE}{{code-block}} none\n:class: printed\n\n{text.rstrip()}\n{FENCE}"


def _fold(summary: str, content: str) -> str:
    kind = summary.split()[0].lower() if summary.startswith(("Hint", "Solution")) else "script"
    return f'<details class="fold {kind}"><summary>{summary}</summary>\n\n{content}\n\n</details>'


def slug(title: str) -> str:
    return title.lower().replace(" ", "-")
