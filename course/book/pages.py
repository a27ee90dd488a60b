"""Every page of the book, written below one folder that mirrors the repository, so that links between texts hold.

index.md             README           labs/NN_topic.md     a lab with its solution
docs/*.md            as they are      figures.md           every committed figure
CONTRIBUTING.md      as it is         reference/*.md       packages and commands
"""

import inspect
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from course.book.lab_page import TORCHRUN, lab_page, slug
from course.book.reference import PACKAGES, commands_page, package_page
from course.kit import course

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
FIRST = (  # of docs/
    *("faq", "end_to_end", "interview", "teaching", "runs", "serving", "debugging", "cluster", "commands"),
    *("proof", "benchmarks", "models", "group", "glossary"),
)


def contents(clone: Path) -> dict[str, list[str]]:
    """The table of contents: caption -> pages, without suffix."""
    docs = sorted(path.stem for path in (clone / "docs").glob("*.md"))
    ordered = [name for name in FIRST if name in docs] + [name for name in docs if name not in FIRST]
    return {
        "Labs": [f"labs/{name}" for name in course.masters(clone)],
        "Guides": [*(f"docs/{name}" for name in ordered), "figures", "CONTRIBUTING"],
        "Reference": ["reference/commands", *(f"reference/{package}" for package in PACKAGES)],
    }


def write_pages(clone: Path, folder: Path) -> None:
    """Write the sources of all pages into `folder`, which is not there yet."""
    shutil.copytree(clone / "figures", folder / "figures")
    names = list(course.masters(clone))
    pages = {f"labs/{name}": lab_page(clone, name, names, folder / "labs") for name in names}
    for path in [*(clone / "docs").glob("*.md"), clone / "CONTRIBUTING.md"]:
        pages[path.relative_to(clone).with_suffix("").as_posix()] = path.read_text(encoding="utf-8")
    pages["docs/glossary"] = as_glossary(pages["docs/glossary"])
    pages["index"] = (clone / "README.md").read_text(encoding="utf-8") + _toctrees(contents(clone))
    pages["figures"] = figures_page(clone)
    pages["reference/commands"] = commands_page()
    pages |= {f"reference/{package}": package_page(package) for package in PACKAGES}
    for page, text in pages.items():
        target = folder / f"{page}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(linked(text, Path(page).parent, clone, folder), encoding="utf-8")


def linked(text: str, beside: Path, clone: Path, folder: Path) -> str:
    """The text with links to notebooks and scripts leading to pages; other files that it links are copied."""

    def page_of(match: re.Match) -> str:
        path = Path(os.path.normpath(beside / match[1]))
        if path.parts[0] in ("labs", "solutions"):
            name = path.stem if path.suffix else next(iter(course.masters(clone)))
            page = f"labs/{name}.md" + (f"#{slug(TORCHRUN)}" if path.suffix == ".py" else "")
        elif path == Path("README.md"):
            page = "index.md"
        else:
            page = path.as_posix()
            if path.suffix != ".md" and (clone / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(clone / path, folder / path)
        return os.path.relpath(page, beside)

    return LINK.sub(page_of, text)


def as_glossary(text: str) -> str:
    """The items `- **term**: ...` of each letter as a glossary, so that search and index know the terms."""
    item = re.compile(r"^- \*\*(.+?)\*\*: (.*(?:\n  .*)*)\n?", re.MULTILINE)
    entries = re.compile(rf"(?:{item.pattern})+", re.MULTILINE)
    return entries.sub(lambda run: "```{glossary}\n" + item.sub(r"\1\n  \2\n\n", run[0]) + "```\n", text)


def figures_page(clone: Path) -> str:
    """All committed figures, lab by lab, each with what it shows and the file of its numbers."""
    parts = ["# Figures", "Measured or computed by `python -m minillm figures`; each links its lab and its numbers."]
    labs = [(number, course.load("figures", number)) for number in course.numbers("figures")]
    drawings = {f"{number}_{name}": draw for number, lab in labs for name, draw in lab.FIGURES.items()}
    for path in sorted((clone / "figures").glob("[0-9][0-9]_*.png")):
        lab = next(name for name in course.masters(clone) if name.startswith(path.stem[:2]))
        about = caption(drawings[path.stem])
        parts.append(f"## {path.stem[:2]} · {path.stem[3:].replace('_', ' ')}")
        parts.append(about)
        parts.append(f"```{{image}} figures/{path.name}\n:alt: {about}\n:class: picture\n```")
        parts.append(f"[Lab {path.stem[:2]}](labs/{lab}.md) · [its numbers](figures/{path.stem}.json)")
    return "\n\n".join(parts) + "\n"


def caption(draw: Callable) -> str:
    """What a committed figure shows: the first paragraph of the docstring of the view that `draw` calls."""
    called = [draw.__globals__[name] for name in draw.__code__.co_names if name in draw.__globals__]
    called += [getattr(m, n, None) for m in called if isinstance(m, ModuleType) for n in draw.__code__.co_names]
    views = [f for f in called if inspect.isfunction(f) and "Figure" in str(f.__annotations__.get("return"))]
    texts = [inspect.getdoc(view) for view in views if view.__doc__]
    return " ".join(texts[-1].split("\n\n")[0].split()) if texts else ""


def _toctrees(captions: dict[str, list[str]]) -> str:
    trees = []
    for caption_of_tree, pages in captions.items():
        trees += ["```{toctree}", ":hidden:", f":caption: {caption_of_tree}", "", *pages, "```", ""]
    return "\n" + "\n".join(trees)
