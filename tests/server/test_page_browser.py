"""The page in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.live_server import LiveServer

from twostep.contracts.live_view import (
    BlockMap,
    LaneSpan,
    LiveUpdate,
    PlannedRequest,
    PlanView,
    RequestEvent,
)

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

SHOTS = os.environ.get("TWOSTEP_SCREENSHOTS")
"""A folder for pictures of what the tests saw."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """One page; what went wrong on it is an error of the test."""

    def __init__(self, browser: Any, server: LiveServer, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1100, "height": 800}, **options)
        self.page = self.context.new_page()
        self.server = server
        self.bodies: list[Any] = []
        self.problems: list[str] = []
        self.expected = ""
        """Words of a problem that is none."""
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._note_request)
        self.page.goto(server.url)

    def _note_console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not (
            self.expected and self.expected in message.text
        ):
            self.problems.append(message.text)

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith((self.server.url, "blob:")):
            self.problems.append(f"asked {request.url}")
        if request.method == "POST":
            self.bodies.append(json.loads(request.post_data))

    def say(self, text: str) -> None:
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def answer(self, number: int = -1) -> Any:
        """The body of an assistant's message."""
        return self.page.locator(".message.assistant .body").nth(number)

    def wait_ended(self) -> None:
        self.page.wait_for_selector("#stop", state="hidden")
        self.page.wait_for_selector(".message.assistant .figures button")

    def shoot(self, name: str) -> None:
        if SHOTS:
            self.page.screenshot(path=Path(SHOTS, f"{name}.png"))

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def visit(browser: Any, server: LiveServer) -> Iterator[Visit]:
    visit = Visit(browser, server)
    visit.page.wait_for_selector("#status.ready")
    yield visit
    visit.close()
    assert visit.problems == []


def test_an_answer_grows_token_by_token(visit: Visit) -> None:
    core = visit.server.core
    core.reply = lambda request: "One two three four five six."
    core.stall_after = 6
    visit.say("Count, please.")
    expect_text(visit, "One")
    first = visit.answer().inner_text()
    assert "six" not in first
    assert visit.page.is_visible("#stop")
    visit.server.call(core.go)
    visit.wait_ended()
    assert visit.answer().inner_text() == "One two three four five six."
    figures = visit.page.locator(".message.assistant .figures").inner_text()
    assert "first token" in figures
    assert "tok/s" in figures
    assert "ended by stop" in figures
    assert visit.bodies[-1]["messages"] == [{"role": "user", "content": "Count, please."}]
    assert visit.page.locator(".message.user .body").inner_text() == "Count, please."
    visit.shoot("chat")


def expect_text(visit: Visit, text: str) -> None:
    visit.page.wait_for_function(
        "text => [...document.querySelectorAll('.message.assistant .body')].at(-1)"
        "?.innerText.includes(text)",
        arg=text,
    )


def test_stop_aborts_the_request(visit: Visit) -> None:
    core = visit.server.core
    core.reply = lambda request: "Never to be finished at all."
    core.stall_after = 3
    visit.say("Go on for ever")
    visit.server.wait_until(lambda: len(core.running) == 1)
    expect_text(visit, "N")
    visit.page.click("#stop")
    visit.server.wait_until(lambda: not core.running and len(core.aborted) == 1)
    visit.wait_ended()
    assert "stopped" in visit.page.locator(".message.assistant .figures").inner_text()


def test_edit_and_regenerate(visit: Visit) -> None:
    core = visit.server.core
    core.reply = lambda request: "first answer"
    visit.say("A question")
    visit.wait_ended()
    core.reply = lambda request: "second answer"
    visit.page.click(".message.assistant >> text=Regenerate")
    expect_text(visit, "second answer")
    visit.wait_ended()
    assert visit.page.locator(".message").count() == 2
    visit.page.click(".message.user >> text=Edit")
    assert visit.page.input_value("#input") == "A question"
    assert visit.page.locator(".message").count() == 0
    visit.say("Another one")
    visit.wait_ended()
    assert visit.bodies[-1]["messages"] == [{"role": "user", "content": "Another one"}]


def test_what_a_model_says_is_never_markup(visit: Visit) -> None:
    evil = (
        "<img src=x onerror=\"document.title='owned'\"> <script>document.title='owned'</script>\n\n"
        "[a](javascript:alert(1)) [b](https://example.org/x) **bold**\n\n"
        "```html\n<b>code</b>\n```\n"
        "```\nopen"
    )
    visit.server.core.reply = lambda request: evil
    visit.say("Be evil")
    visit.wait_ended()
    assert visit.page.title() == "twostep"
    body = visit.answer()
    assert body.locator("img, script").count() == 0
    links = body.locator("a")
    assert [links.nth(i).get_attribute("href") for i in range(links.count())] == [
        "https://example.org/x"
    ]
    assert links.nth(0).get_attribute("rel") == "noopener noreferrer"
    assert body.locator("strong").inner_text() == "bold"
    assert body.locator("pre").nth(0).inner_text() == "<b>code</b>"
    assert body.locator("pre").nth(1).inner_text() == "open"


def test_letters_that_come_in_pieces(visit: Visit) -> None:
    visit.server.core.reply = lambda request: "Grüße 世界 👩‍🚀 e\u0301!"
    visit.say("Unicode")
    visit.wait_ended()
    assert visit.answer().inner_text() == "Grüße 世界 👩‍🚀 e\u0301!"


def test_controls_say_exactly_what_is_sent(visit: Visit) -> None:
    page = visit.page
    page.wait_for_selector("#field-temperature[placeholder='1']")
    page.fill("#field-temperature", "0.5")
    page.fill("#field-top_k", "7")
    page.fill("#field-stop", "END")
    page.click("summary:has-text('System prompt')")
    page.fill("#system", "Be brief.")
    visit.say("Hi")
    visit.wait_ended()
    body = visit.bodies[-1]
    assert body == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_k": 7,
        "stop": ["END"],
    }
    assert "temperature=0.5" in page.url
    page.fill("#field-temperature", "9")
    assert page.locator("#field-temperature ~ .hint").inner_text() == "0 to 2"
    sent = len(visit.bodies)
    page.fill("#input", "Hi again")
    page.press("#input", "Enter")
    page.wait_for_selector("#toast.shown")
    assert len(visit.bodies) == sent


def test_a_schema_with_a_mistake_is_not_sent(visit: Visit) -> None:
    page = visit.page
    page.click("summary:has-text('JSON schema')")
    page.fill("#schema", '{"type": "object"')
    visit.say("Hi")
    page.wait_for_selector("#toast.shown")
    assert page.locator("#schema-problem").inner_text() != ""
    assert visit.bodies == []


def test_tokens_show_their_chances(visit: Visit) -> None:
    page = visit.page
    page.fill("#field-top_logprobs", "3")
    visit.server.core.reply = lambda request: "Hello there."
    visit.say("Hi")
    visit.wait_ended()
    page.click(".message.assistant button:text-is('Tokens')")
    tokens = page.locator(".tokens .token")
    assert tokens.count() > 2
    tokens.nth(0).hover()
    assert "%" in tokens.nth(0).locator(".top").inner_text()
    assert len(tokens.nth(0).locator(".top").inner_text().splitlines()) >= 4
    visit.shoot("tokens")
    page.mouse.move(0, 0)
    page.click(".message.assistant button:text-is('Tokens')")
    assert visit.answer().inner_text() == "Hello there."


def test_conversations_are_kept_and_deleted(visit: Visit) -> None:
    page = visit.page
    visit.say("Remember this")
    visit.wait_ended()
    page.reload()
    page.wait_for_selector("#status.ready")
    page.click("summary:has-text('Conversations')")
    page.click("#history >> text=Remember this")
    assert page.locator(".message").count() == 2
    page.click("#history [aria-label='Delete Remember this']")
    page.wait_for_selector("#history >> text=Remember this", state="detached")
    assert page.locator(".message").count() == 0
    page.reload()
    page.wait_for_selector("#status.ready")
    assert page.locator("#history li").count() == 0


def test_copy_as_something_that_runs(visit: Visit) -> None:
    page = visit.page
    page.evaluate(
        "() => { window.copied = []; Object.defineProperty(navigator, 'clipboard',"
        " { value: { writeText: async (text) => { window.copied.push(text); } } }); }"
    )
    page.fill("#input", "It's a test")
    page.fill("#field-min_p", "0.1")
    for button in ("#copy-curl", "#copy-python", "#copy-json"):
        page.click(button)
    page.wait_for_function("window.copied.length === 3")
    curl, python, text = page.evaluate("window.copied")
    assert curl.startswith(f"curl {visit.server.url}/v1/chat/completions")
    assert "It'\\''s a test" in curl
    compile(python, "copied", "exec")
    assert f'base_url="{visit.server.url}/v1"' in python
    assert '"min_p": 0.1' in python
    assert json.loads(text)["messages"] == [{"role": "user", "content": "It's a test"}]


def test_a_key_is_asked_for_and_used(browser: Any) -> None:
    server = LiveServer(api_keys=("secret",))
    visit = Visit(browser, server)
    try:
        visit.page.wait_for_selector("#status.bad")
        assert visit.page.inner_text("#status") == "API key needed"
        visit.page.click("#key-button")
        visit.page.fill("#key-input", "secret")
        visit.page.click("#key-dialog >> text=Use it")
        visit.page.wait_for_selector("#status.ready")
        visit.say("Hi")
        visit.wait_ended()
        assert visit.answer().inner_text() == "Hello there."
        assert visit.page.evaluate("localStorage.length") == 0
        assert all("401" in problem for problem in visit.problems)
    finally:
        visit.close()
        server.stop()


def test_errors_are_told(visit: Visit) -> None:
    core = visit.server.core
    visit.expected = "400"
    core.fail_after = 2
    visit.say("Break")
    visit.page.wait_for_selector(".message .error:visible")
    core.fail_after = None
    visit.page.fill("#field-max_tokens", "9999999")
    visit.say("Hi " * 400)
    visit.page.wait_for_selector(".message .error:visible >> nth=1")
    assert (
        "maximum context length"
        in visit.page.locator(".message .error:visible").nth(1).inner_text()
    )


def test_loading_is_shown_until_it_is_done(browser: Any) -> None:
    server = LiveServer(load_at_once=False)
    visit = Visit(browser, server)
    try:
        visit.page.wait_for_function("document.querySelector('#status').innerText.includes('42 %')")
        server.finish_loading()
        visit.page.wait_for_selector("#status.ready")
        assert all("503" in problem for problem in visit.problems)
    finally:
        visit.close()
        server.stop()


def update(step: int, *, block_state: int = 2) -> LiveUpdate:
    start = step * 0.01
    return LiveUpdate(
        time=start + 0.01,
        token_budget=512,
        max_num_seqs=4,
        plans=[
            PlanView(
                step_id=step, time=start, num_tokens=301, num_requests=2, num_new_blocks=1,
                preempted=["old"] if step == 3 else [],
                planned=[
                    PlannedRequest("chat-a", 1, 20 + step, "decode"),
                    PlannedRequest("chat-b", 300, 300 * step, "prefill" if step else "new"),
                ],
            )
        ],
        spans=[
            LaneSpan(step, "planning", "planning", start, start + 0.001),
            LaneSpan(step, "launch", "launch", start + 0.001, start + 0.002),
            LaneSpan(step, "device", "forward", start + 0.002, start + 0.009),
        ],
        events=[RequestEvent(start, "chat-b", "arrived", 3000)] if step == 0 else [],
        running=["chat-a", "chat-b"],
        waiting=["chat-c"],
        num_waiting=1,
        kv_cache_usage=0.25,
        prefix_cache_queries=100,
        prefix_cache_hits=25,
        num_preemptions=1 if step == 3 else 0,
        blocks=BlockMap(
            num_blocks=300, cell=1, owners=["chat-a", "chat-b"],
            runs=[(0, -1, 100), (1, -1, 50), (2, 0, 40), (2, 1, 60), (3, 1, 50)],
        ),
    )  # fmt: skip


def test_the_engine_at_work(visit: Visit) -> None:
    core, page = visit.server.core, visit.page
    assert not core.is_watched
    page.click("#tab-engine")
    visit.server.wait_until(lambda: core.is_watched)
    for step in range(12):
        visit.server.call(lambda step=step: core.show(update(step)))  # type: ignore[misc]
    page.wait_for_selector("#requests >> text=chat-c")
    assert page.locator(".tile").nth(0).inner_text().startswith("2 / 4")
    page.wait_for_function("document.body.innerText.includes('25 %')")
    assert "held 100, shared 50" in page.inner_text("#view-engine")
    page.click("#requests >> text=chat-b")
    life = page.inner_text("#view-engine")
    assert "arrived" in life
    assert "started" in life
    assert "preempted" in life
    canvases = page.locator("canvas")
    for number in range(canvases.count()):
        assert canvases.nth(number).evaluate(
            "canvas => new Set(canvas.getContext('2d')"
            ".getImageData(0, 0, canvas.width, canvas.height).data).size > 4"
        )
    visit.shoot("engine")
    page.click("#tab-chat")
    visit.server.wait_until(lambda: not core.is_watched)


def test_a_narrow_screen_and_the_keyboard(browser: Any, server: LiveServer) -> None:
    visit = Visit(browser, server, color_scheme="dark")
    page = visit.page
    page.set_viewport_size({"width": 360, "height": 700})
    page.wait_for_selector("#status.ready")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.focus("#input")
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    visit.wait_ended()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"
    visit.shoot("narrow")
    visit.close()
    assert visit.problems == []
