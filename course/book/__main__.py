"""`python -m course.book`: build the website into build/book/html; a warning of Sphinx fails the build."""

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from sphinx.cmd.build import build_main

from course.book.pages import write_pages
from course.kit import course


def command(
    out: Annotated[Path, typer.Option(help="Folder for the pages' sources (source/) and the website (html/).")] = Path(
        "build/book"
    ),
) -> None:
    """Write the pages, then let Sphinx make the website of them."""
    source, html, doctrees = out / "source", out / "html", out / "doctrees"
    for folder in (source, html, doctrees):  # nothing of an older book stays
        shutil.rmtree(folder, ignore_errors=True)
    write_pages(course.home(), source)
    options = ["--builder", "html", "--quiet", "--fail-on-warning", "--keep-going", "--jobs", "2"]
    folders = ["--conf-dir", str(Path(__file__).parent), "--doctree-dir", str(doctrees), str(source), str(html)]
    status = build_main([*options, *folders])
    if status == 0:
        print(f"The book: {(html / 'index.html').resolve()}")
    sys.exit(status)


if __name__ == "__main__":
    typer.run(command)
