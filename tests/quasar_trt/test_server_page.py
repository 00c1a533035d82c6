"""The page at / in headless Chromium: what it shows is what the server said."""

from __future__ import annotations

import re
import shutil
import time

import numpy as np
import pytest
from server_thread import ChatTokenizer, ServerThread
from stubs import ByteTokenizer, StubDrafter, StubEngine

from quasar_trt.runner import Runner

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="the page's test needs Chromium: apt-get install chromium")
VOCAB = 257
ANSWER = list("é is\n<b>bold</b> 🙂!".encode())
PROMPT = "user: hi\nassistant:"


def logits(prefix: tuple[int, ...]):
    """The answer, after whatever was asked last."""
    text = bytes(token for token in prefix if token < 256)
    num_emitted = len(text) - text.rindex(b"\nassistant:") - len(b"\nassistant:")
    row = np.zeros(VOCAB, np.float32)
    row[ANSWER[num_emitted] if num_emitted < len(ANSWER) else 256] = 100.0
    return row


def drafts(context, limit: int) -> list[int]:
    """Right, wrong after the first, or nothing, by the length of the context."""
    num_emitted = len(context) - len(PROMPT)
    right = ANSWER[num_emitted : num_emitted + 2]
    return {0: right, 1: [], 2: right, 3: [*right[:1], 1]}[num_emitted % 4]


def make_runner() -> Runner:
    engine = StubEngine(logits, VOCAB, max_seq_len=512)
    return Runner(engine, drafter=StubDrafter(drafts, 3), tokenizer=ByteTokenizer())


@pytest.fixture(scope="module")
def server():
    with ServerThread(make_runner(), ChatTokenizer(), drafter="stub", api_key="secret") as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


def test_page_is_whole_in_itself(server):
    _, headers, page = server.request("/")
    assert headers["content-security-policy"] == "default-src 'self'"
    assert b"http" not in page.replace(b"http-equiv", b"")
    for name in ("page.js", "answer.js", "events.js", "page.css"):
        status, _, text = server.request(f"/page/{name}")
        assert status == 200 and b"https:" not in text


@needs_chromium
def test_tokens_are_coloured_and_figures_shown(server, browser):
    from playwright.sync_api import expect

    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "return_token_ids": True}
    _, _, answer = server.request("/v1/chat/completions", body, headers={"Authorization": "Bearer secret"})
    choice = answer["choices"][0]
    page = browser.new_page(color_scheme="light")
    errors = []
    page.on("pageerror", lambda error: errors.append(error))  # noqa: PLW0108 (playwright marks its handlers)
    page.goto(server.url)
    figures = page.locator("#figures")
    expect(figures).to_contain_text("the API key is missing or wrong")
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    expect(page).to_have_title("tiny")
    assert page.locator("#drafter option").all_inner_texts() == ["stub", "none"]

    page.fill("#temperature", "0")
    page.fill("#message", "hi")
    page.press("#message", "Enter")
    spans = page.locator(".assistant span")
    expect(spans).to_have_count(len(choice["token_origins"]))
    expect(page.locator("body")).to_have_attribute("data-state", "idle")
    assert page.locator(".user").all_inner_texts() == ["hi"]
    assert page.locator(".assistant").text_content() == choice["message"]["content"] == bytes(ANSWER).decode()
    origins = [span.get_attribute("class") for span in spans.all()]
    assert origins == choice["token_origins"] and {*origins} == {"accepted", "recovered", "bonus", "plain"}
    for origin, colour in (("accepted", "201, 236, 208"), ("recovered", "251, 213, 207"), ("bonus", "211, 227, 251")):
        expect(page.locator(f".assistant .{origin}").first).to_have_css("background-color", f"rgb({colour})")
    speculation = answer["usage"]["speculation"]
    expect(figures).to_contain_text(f"{len(origins)} tokens, {speculation['num_accepted_tokens']} accepted")
    expect(figures).to_contain_text(f"mean acceptance length {speculation['mean_acceptance_length']:.2f}")
    expect(figures).to_contain_text(f"({speculation['num_accepted_tokens']} of {speculation['num_draft_tokens']})")

    page.select_option("#drafter", "none")
    page.fill("#message", "again")
    page.click("#send")
    second = page.locator(".assistant").nth(1)
    expect(second).to_have_text(bytes(ANSWER).decode(), use_inner_text=False)
    assert {span.get_attribute("class") for span in second.locator("span").all()} == {"plain"}

    page.fill("#max-tokens", "0")
    page.fill("#message", "more")
    page.click("#send")
    expect(page.locator(".failure")).to_have_text(re.compile("^max_tokens is 0; allowed"))
    page.click("#reset")
    expect(page.locator("#conversation")).to_be_empty()
    assert not errors
    page.close()


@needs_chromium
def test_answer_can_be_stopped(browser):
    from playwright.sync_api import expect

    row = np.zeros(VOCAB, np.float32)
    row[ord("a")] = 100.0

    def slowly(prefix: tuple[int, ...]):
        time.sleep(0.005)
        return row

    runner = Runner(StubEngine(slowly, VOCAB, max_seq_len=100_000), tokenizer=ByteTokenizer())
    with ServerThread(runner, ChatTokenizer()) as server:
        page = browser.new_page()
        page.goto(server.url)
        expect(page).to_have_title("tiny")
        page.fill("#max-tokens", "90000")
        page.fill("#message", "hi")
        page.press("#message", "Enter")
        expect(page.locator(".assistant span").first).to_have_text("a")
        page.click("#stop")
        expect(page.locator("body")).to_have_attribute("data-state", "idle")
        assert {*page.locator(".assistant").text_content()} == {"a"} and page.locator(".failure").count() == 0
        page.close()
    assert runner.service.num_finished == 1 and runner.stats.num_emitted_tokens < 90_000
