"""The page of `minillm serve` in Chromium: two turns, a third that is stopped; a model without a chat template."""

import pytest

from tests.browser.jupyterlab import ARTIFACTS, CHROMIUM, FLAGS, STEP_S, marks, playwright
from tests.engine.api.running import engine, running

LONGER = """() => {  // the page asks for more tokens than it would: long enough to be stopped
  const asked = window.fetch;
  window.fetch = (path, how) =>
    asked(path, {...how, body: JSON.stringify({...JSON.parse(how.body), max_tokens: 450, ignore_eos: true})});
}"""


def in_chromium(test):
    for mark in marks:
        test = mark(test)
    return test


@pytest.fixture
def page():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 900, "height": 700})
        page.set_default_timeout(STEP_S * 1e3)
        complaints = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page
        browser.close()
        assert not complaints


@in_chromium
def test_two_turns_stream_and_a_third_is_stopped(page):
    with running(engine()) as found:
        page.goto(found.url)
        page.wait_for_function("document.getElementById('model').value === 'draft'")
        for turn, text in enumerate(("def add(a, b):", "import os"), 1):
            page.fill("#prompt", text)
            page.click("#send")
            page.wait_for_function("document.getElementById('speed').textContent.includes('tokens per second')")
            assert page.locator(".turn").count() == 2 * turn
            assert page.locator(".model").nth(turn - 1).text_content()
            page.evaluate("document.getElementById('speed').textContent = ''")
        ARTIFACTS.mkdir(exist_ok=True)
        page.screenshot(path=ARTIFACTS / "serve_page.png")
        page.evaluate(LONGER)
        page.fill("#prompt", "class A:")
        page.press("#prompt", "Control+Enter")
        page.wait_for_function("document.querySelectorAll('.model')[2]?.textContent.length > 0")
        page.click("#stop")
        page.wait_for_function("document.getElementById('speed').textContent === 'stopped'")
        found.idle()


@in_chromium
def test_a_model_without_a_template_goes_on_from_the_text_and_an_error_is_shown(page):
    llm = engine()
    llm.tokenizer.chat_template = None
    with running(llm) as found:
        page.goto(found.url)
        page.wait_for_function("document.getElementById('speed').textContent.includes('no chat template')")
        page.fill("#prompt", "def ")
        page.click("#send")
        page.wait_for_function("document.getElementById('speed').textContent.includes('tokens per second')")
        page.fill("#temperature", "9")
        page.fill("#prompt", "x")
        page.click("#send")
        page.wait_for_selector(".error")
        assert "temperature" in page.locator(".error").text_content()
