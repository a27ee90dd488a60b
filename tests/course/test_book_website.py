"""The book as built: no dead link, nothing from the network; in Chromium, from file://: search, dark mode, folds."""

import contextlib
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from course.kit import course
from tests.browser.jupyterlab import ARTIFACTS, CHROMIUM, FLAGS, REPO, STEP_S, marks, playwright

pytest.importorskip("sphinx", reason="sphinx is not installed: make book")
pytestmark = pytest.mark.drawn(1)  # what costs is the one build of the book
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
LAB = "labs/01_collectives.html"


@dataclass
class Page(HTMLParser):
    """What a page links, what it loads, and the anchors that others may link."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    pictures_without_text: int = 0

    def __post_init__(self):
        super().__init__()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "shortcut icon"):
            self.loads.append(found["href"])
        if found.get(LOADED.get(tag, "")):
            self.loads.append(found[LOADED[tag]])
        self.pictures_without_text += tag == "img" and not found.get("alt")


@cache
def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> Path:
    """The folder of the website, built anew. A warning of Sphinx fails the build."""
    out = tmp_path_factory.mktemp("book")
    built = subprocess.run(
        [sys.executable, "-m", "course.book", "--out", str(out)], cwd=REPO, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-5000:]
    return out / "html"


@contextlib.contextmanager
def browsing(width: int, height: int, scheme: str = "light"):
    """A page of Chromium without a network; at its end nothing but files may have been asked for."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
        page = context.new_page()
        page.set_default_timeout(STEP_S * 1e3)
        asked, complaints = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        yield page
        browser.close()
    assert asked and not [url for url in asked if not url.startswith(("file:", "data:"))]
    assert not complaints


@pytest.mark.full
def test_every_link_and_picture_is_there_and_nothing_is_loaded_from_elsewhere(html):
    pages = sorted(html.rglob("*.html"))
    assert {page.stem for page in pages if page.parent.name == "labs"} == set(course.masters(REPO))
    wrong = []
    for path in pages:
        page = read(path)
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                wrong += [f"{path.name} loads {link}"] if link in page.loads and parts.scheme != "data" else []
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                wrong.append(f"{path.relative_to(html)} links {link}, which is not there")
            elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read(target).anchors:
                wrong.append(f"{path.relative_to(html)} links {link}, an anchor that is not there")
        wrong += [f"{path.name} has a picture without a text"] if page.pictures_without_text else []
    for sheet in html.rglob("*.css"):
        wrong += [f"{sheet.name} loads from elsewhere"] if "url(http" in sheet.read_text(errors="replace") else []
    assert not wrong, "\n".join(sorted(set(wrong)))


@pytest.mark.full
def test_no_markdown_and_no_formula_is_left_as_it_was_typed(html):
    for path in html.glob("labs/*.html"):
        article = path.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        prose = re.sub(r"<[^>]*>", "", re.sub(r"<(pre|code|annotation)\b.*?</\1>", "", article, flags=re.DOTALL))
        assert not re.search(r"\$|\]\(|``|\*\*|^#+ ", prose, re.MULTILINE), path.name


@pytest.fixture
def address(html):
    return html.as_uri()


def in_chromium(test):
    for mark in marks:
        test = mark(test)
    return test


@in_chromium
def test_search_finds_a_word_and_leads_to_its_page(address):
    with browsing(1280, 900) as page:
        page.goto(f"{address}/index.html")
        page.locator("input.sidebar-search").fill("straggler")
        page.keyboard.press("Enter")
        page.locator("#search-results li a").first.wait_for()
        found = page.locator("#search-results li a").all_inner_texts()
        assert any("Fault tolerance" in title for title in found), found
        assert any("Glossary" in title for title in found), found
        page.locator("#search-results li a", has_text="Fault tolerance").first.click()
        page.get_by_role("heading", name="10 · Fault tolerance").wait_for()


@in_chromium
def test_dark_mode_is_the_readers_and_can_be_toggled(address):
    shade = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    with browsing(1280, 900, scheme="dark") as page:
        page.goto(f"{address}/{LAB}")
        assert page.evaluate(shade) < 200
        page.locator("button.theme-toggle:visible").click()  # from the reader's own to light, or to dark
        shades = [page.evaluate(shade)]
        page.locator("button.theme-toggle:visible").click()
        shades.append(page.evaluate(shade))
        assert min(shades) < 200 and max(shades) > 600
        page.screenshot(path=ARTIFACTS / "book-toggled.png")


@in_chromium
def test_a_folded_solution_opens_under_its_stub(address):
    with browsing(1280, 900) as page:
        page.goto(f"{address}/{LAB}")
        answer = page.get_by_text("for s in range(n - 1):").first
        assert not answer.is_visible()
        page.locator("details.solution > summary").first.click()
        assert answer.is_visible()
        assert page.locator("details.hint").first.is_visible()
        before = page.locator("details.solution").first.evaluate(
            "e => e.parentElement.innerText.split('Solution')[0].includes('NotImplementedError')"
        )
        assert before


@in_chromium
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_no_page_is_wider_than_the_screen(html, address, width, scheme):
    ARTIFACTS.mkdir(exist_ok=True)
    with browsing(width, 900, scheme) as page:
        for path in ("index", "labs/01_collectives", "labs/20_design_training", "docs/benchmarks", "reference/comm"):
            page.goto(f"{address}/{path}.html")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            assert not page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).length"), path
            page.screenshot(path=ARTIFACTS / f"book-{path.replace('/', '-')}-{width}-{scheme}.png")
