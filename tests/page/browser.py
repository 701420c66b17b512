"""Opens the page in Chromium and uses it as a person would. Runs in its own environment, with Playwright.

Its argument is JSON with addresses and folders; it prints JSON with the outcome of each flow, by name.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

GIVEN: dict[str, Any] = json.loads(sys.argv[1])
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 320, "height": 640}
FLOWS: dict[str, Callable[[Browser], None]] = {}
_LIMIT_MS = 60_000
_LONG = "Tell me a very long story about a lighthouse, a fisherman and a storm."
expect.set_options(timeout=_LIMIT_MS)


def flow(run: Callable[[Browser], None]) -> Callable[[Browser], None]:
    FLOWS[run.__name__] = run
    return run


@contextmanager
def opened(browser: Browser, url: str = GIVEN["smollm2"], ready: bool = True, **options: Any) -> Iterator[Page]:
    """Opens the page in a new window. Fails if a script raises or violates the page's policy."""
    with browser.new_context(**{"viewport": DESK, "color_scheme": "light", **options}) as window:
        page, faults = window.new_page(), []
        page.set_default_timeout(_LIMIT_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: "Security Policy" in message.text and faults.append(message.text))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        if ready:
            page.locator("#model:enabled").wait_for()
        yield page
        assert faults == [], faults
        assert [each for each in asked if not each.startswith(url)] == [], "only its own server is asked"


def ask(page: Page, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")


def ended(page: Page, count: int = 1) -> None:
    expect(page.locator(".answer[aria-busy=false]")).to_have_count(count)


def setting(page: Page, name: str, value: str) -> None:
    field = page.locator(f"#settings [name={name}]")
    if not field.is_visible():
        page.locator("#settings summary").click()
    field.fill(value)


def counter(name: str) -> float:
    with urllib.request.urlopen(f"{GIVEN['smollm2']}metrics", timeout=10) as reply:
        found = re.findall(rf"^torch_stream_{name}_total\{{.*\}} (\S+)$", reply.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def scripted(page: Page, status: int, body: str, headers: dict[str, str] | None = None) -> None:
    """Sets the answer to the next chat requests."""

    def answer(route: Route) -> None:
        route.fulfill(status=status, body=body, headers={"content-type": "text/event-stream", **(headers or {})})

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", answer)


def events(*deltas: dict[str, Any], done: bool = True) -> str:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ("data: [DONE]\n\n" if done else "")


@flow
def an_answer_grows_as_its_tokens_come(browser: Browser) -> None:
    with opened(browser) as page:
        seen: list[str] = []
        ask(page, "Explain in three sentences why the sky is blue.")
        while page.locator(".answer[aria-busy=true]").count() and len(seen) < 2000:
            seen.append(page.locator(".answer .text").inner_text())
            page.wait_for_timeout(20)
        ended(page)
        lengths = sorted({len(text) for text in seen})
        whole = page.locator(".answer .text").inner_text()
        assert len(lengths) > 5 and all(whole.startswith(text.strip()) for text in seen), lengths
        figures = page.locator(".figures").inner_text()
        assert re.search(r"first token \d.* · \d+ tokens · [\d.]+ tokens/s", figures), figures


@flow
def the_first_of_the_examples_is_asked_by_a_click(browser: Browser) -> None:
    with opened(browser) as page:
        expect(page.locator("#examples button")).to_have_count(3)
        text = page.locator("#examples button").first.inner_text()
        page.locator("#examples button").first.click()
        expect(page.locator(".prompt-text")).to_have_text(text)
        expect(page.locator("#empty")).to_be_hidden()
        ended(page)


@flow
def escape_stops_an_answer_unless_it_closes_something(browser: Browser) -> None:
    with opened(browser, viewport=PHONE) as page:
        page.locator("#panel-toggle").click()
        setting(page, "max_tokens", "1000")
        setting(page, "more", '{"ignore_eos": true}')
        page.locator("#panel-close").click()
        ask(page, _LONG)
        expect(page.locator(".figures")).to_contain_text("tokens/s")
        page.locator("#panel-toggle").click()
        page.keyboard.press("Escape")
        expect(page.locator("#panel")).to_be_hidden()
        expect(page.locator("#stop")).to_be_visible()
        page.keyboard.press("Escape")
        ended(page)
        expect(page.locator(".figures")).to_contain_text("stopped")


@flow
def stop_ends_the_answer_at_the_server(browser: Browser) -> None:
    with opened(browser) as page:
        before = counter("cancelled_sequences")
        setting(page, "max_tokens", "1000")
        setting(page, "more", '{"ignore_eos": true}')
        ask(page, _LONG)
        expect(page.locator(".figures")).to_contain_text("tokens/s")
        page.locator("#stop").click()
        ended(page)
        expect(page.locator(".figures")).to_contain_text("stopped")
        expect(page.locator("#send")).to_be_visible()
        for _ in range(100):
            if counter("cancelled_sequences") > before:
                break
            page.wait_for_timeout(100)
        assert counter("cancelled_sequences") == before + 1
        assert page.locator(".answer .text").inner_text().strip()
        setting(page, "max_tokens", "8")
        ask(page, "Go on.")  # the conversation goes on after it
        ended(page, 2)


@flow
def regenerate_asks_the_same_again(browser: Browser) -> None:
    with opened(browser) as page:
        bodies: list[Any] = []
        page.on("request", lambda request: request.post_data and bodies.append(json.loads(request.post_data)))
        setting(page, "max_tokens", "8")
        setting(page, "temperature", "2")
        ask(page, "Name a colour.")
        ended(page)
        page.locator(".regenerate").click()
        expect(page.locator(".answer[aria-busy=true]")).to_have_count(1)
        ended(page)
        assert len(bodies) == 2 and bodies[0] == bodies[1] and bodies[0]["temperature"] == 2
        assert page.locator(".turn").count() == 1


@flow
def an_edited_message_replaces_what_came_after_it(browser: Browser) -> None:
    with opened(browser) as page:
        setting(page, "max_tokens", "8")
        for count, text in enumerate(("One?", "Two?", "Three?"), 1):
            ask(page, text)
            ended(page, count)
        page.locator(".edit").nth(1).click()
        area = page.locator(".editing textarea")
        expect(area).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator(".prompt-text")).to_have_text(["One?", "Two?", "Three?"])
        page.locator(".edit").nth(1).click()
        area.fill("Four?")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.keyboard.press("Enter")
        expect(page.locator(".prompt-text")).to_have_text(["One?", "Four?"])
        ended(page, 2)
        said = [each["content"] for each in json.loads(sent.value.post_data or "")["messages"]]
        assert said[0] == "One?" and said[2:] == ["Four?"]


@flow
def what_is_copied_is_the_answer_or_a_command_that_runs(browser: Browser) -> None:
    with opened(browser, permissions=["clipboard-read", "clipboard-write"]) as page:

        def copied(button: str) -> str:
            page.get_by_role("button", name=button, exact=True).click()
            expect(page.get_by_role("button", name="Copied")).to_have_count(1)
            expect(page.get_by_role("button", name="Copied")).to_have_count(0)
            return str(page.evaluate("() => navigator.clipboard.readText()"))

        setting(page, "max_tokens", "8")
        setting(page, "temperature", "0")
        ask(page, 'It\'s "quoted": what is the capital of France?')
        ended(page)
        answer = page.locator(".answer .text").inner_text()
        assert copied("Copy") == answer
        page.locator(".copy-as summary").click()
        printed = subprocess.run(["bash", "-c", copied("curl")], capture_output=True, text=True, timeout=60, check=True)
        chunks = [json.loads(line[6:]) for line in printed.stdout.splitlines() if line.startswith("data: {")]
        pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        assert "".join(pieces) == answer
        command = [sys.executable, "-c", copied("Python")]
        assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == answer
        assert "client.chat.completions.create(" in copied("openai SDK")


@flow
def the_probabilities_of_a_token_are_shown_by_mouse_and_by_keyboard(browser: Browser) -> None:
    with opened(browser, bypass_csp=True) as page:
        setting(page, "max_tokens", "12")
        page.locator("[name=logprobs]").check()
        ask(page, "What is the capital of France?")
        ended(page)
        tip = page.locator("#probabilities")
        expect(tip).to_be_hidden()
        page.locator(".token").nth(3).hover()
        expect(tip).to_be_visible()
        assert tip.locator(".row").count() in (5, 6) and tip.locator(".chosen").count() == 1
        found = Axe().run(page).response["violations"]
        assert found == [], [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
        shares = [float(each.strip("<% \u00a0")) for each in tip.locator(".share").all_inner_texts()]
        assert 0 < sum(shares) <= 101 and shares == sorted(shares, reverse=True)
        page.locator("#prompt").hover()
        expect(tip).to_be_hidden()
        page.locator(".tokens").focus()
        page.keyboard.press("ArrowRight")
        expect(tip).to_be_visible()
        expect(page.locator("#announcer")).to_contain_text("%")
        page.keyboard.press("Escape")
        expect(tip).to_be_hidden()


@flow
def the_load_is_drawn_while_an_answer_runs(browser: Browser) -> None:
    with opened(browser) as page:
        setting(page, "max_tokens", "400")
        setting(page, "more", '{"ignore_eos": true}')
        ask(page, _LONG)
        expect(page.locator("#running")).to_have_text("1")
        expect(page.locator("#rate")).not_to_have_text(re.compile(r"^\D?$|^0\.0$"))
        points = page.locator("#chart-tokens polyline").get_attribute("points") or ""
        assert len(points.split()) > 1
        expect(page.locator("#chart-sequences")).to_have_attribute("aria-label", re.compile("running"))
        page.locator("#stop").click()
        expect(page.locator("#running")).to_have_text("0")


@flow
def the_whole_page_is_used_by_keyboard_alone(browser: Browser) -> None:
    with opened(browser) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        expect(page.locator("#prompt")).to_be_focused()
        page.keyboard.type("Say hello.")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("Twice.")
        page.keyboard.press("Enter")
        expect(page.locator(".prompt-text")).to_have_text("Say hello.\nTwice.")
        expect(page.locator("#prompt")).to_be_focused()
        ended(page)
        names = []
        for _ in range(40):
            page.keyboard.press("Tab")
            names.append(str(page.evaluate("() => (document.activeElement.id || document.activeElement.innerText)")))
            outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
            box = page.evaluate("() => ['prompt', 'BODY', ''].includes(document.activeElement.id)")
            assert outline != "none" or box, names
        order = [names.index(each) for each in ("panel-toggle", "Edit", "Copy", "Regenerate", "Copy as", "prompt")]
        assert sorted(order[1:]) == order[1:], names


@flow
def screen_readers_are_told_at_most_every_few_seconds(browser: Browser) -> None:
    with opened(browser) as page:
        setting(page, "max_tokens", "120")
        setting(page, "more", '{"ignore_eos": true}')
        page.evaluate(
            "() => { window.told = []; const region = document.getElementById('announcer');"
            " new MutationObserver(() => window.told.push(region.textContent))"
            ".observe(region, {childList: true, characterData: true, subtree: true}); }"
        )
        ask(page, "Tell me about the sea.")
        ended(page)
        page.wait_for_timeout(200)
        told = page.evaluate("() => window.told")
        answer = page.locator(".answer .text").inner_text()
        assert told[0] == "The answer begins." and told[-1].endswith("The answer is complete.")
        assert 2 <= len(told) < 30, told
        assert "".join("".join(told).split()).count("".join(answer[-20:].split())) == 1


@flow
def colours_follow_the_system_until_one_chooses(browser: Browser) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    with opened(browser) as page:
        light = page.evaluate(background)
        page.emulate_media(color_scheme="dark")
        dark = page.evaluate(background)
        assert light != dark
        expect(page.locator("#theme")).to_have_attribute("aria-pressed", "true")
        page.locator("#theme").click()
        assert page.evaluate(background) == light
        page.reload()
        assert page.evaluate(background) == light


@flow
def nothing_moves_where_less_motion_is_asked_for(browser: Browser) -> None:
    moving = (
        "() => [...document.querySelectorAll('*')].some((each) => getComputedStyle(each).transitionDuration !== '0s')"
    )
    for motion, expected in (("no-preference", True), ("reduce", False)):
        with opened(browser, reduced_motion=motion) as page:
            assert page.evaluate(moving) == expected, motion


@flow
def a_phone_scrolls_only_up_and_down(browser: Browser) -> None:
    wide = f"() => Math.max(document.documentElement.scrollWidth, innerWidth) - {PHONE['width']}"  # a phone zooms out
    with opened(browser, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        assert page.evaluate(wide) == 0
        word = "x" * 300
        scripted(page, 200, events({"content": f"{word}\n\n```\n{word}\n```\n\n- `{word}`\n"}))
        ask(page, f"{word} {word}")
        ended(page)
        assert page.evaluate(wide) == 0
        scroller = "() => { const s = document.getElementById('scroller'); return s.scrollWidth - s.clientWidth; }"
        assert page.evaluate(scroller) == 0
        page.locator(".copy-as summary").click()
        page.locator("#panel-toggle").click()
        expect(page.locator("#panel-close")).to_be_focused()
        assert page.evaluate(wide) == 0
        page.keyboard.press("Escape")
        expect(page.locator("#panel")).to_be_hidden()
        expect(page.locator("#panel-toggle")).to_be_focused()


@flow
def axe_finds_nothing(browser: Browser) -> None:
    """Checks both colour schemes and both widths, with every part visible."""

    def check(page: Page, where: str) -> None:
        page.wait_for_timeout(400)  # colours change over a moment
        found = Axe().run(page).response["violations"]
        assert found == [], (where, [(each["id"], [node["html"] for node in each["nodes"]]) for each in found])

    for scheme in ("light", "dark"):
        for size in (DESK, PHONE):
            with opened(browser, viewport=size, color_scheme=scheme, bypass_csp=True) as page:
                check(page, f"{scheme} {size} empty")
                shown = {"content": "# Head\n\n1. one `code`\n\n```\ncode\n```\n", "reasoning": "Well."}
                call = {"index": 0, "id": "a", "function": {"name": "add", "arguments": '{"x": 1}'}}
                scripted(page, 200, events(shown, {"tool_calls": [call]}))
                ask(page, "Show all.")
                ended(page)
                scripted(page, 503, "{}", {"retry-after": "3"})
                ask(page, "Fail.")
                ended(page, 2)
                page.unroute("**/v1/chat/completions")
                page.locator("#panel-toggle").click()  # closes it where it was open
                check(page, f"{scheme} {size} answers")


@flow
def markup_of_models_and_people_stays_text(browser: Browser) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(1)</script>**<b>x</b>** [a](javascript:alert(1)) `<i>`"
    with opened(browser) as page:
        scripted(page, 200, events({"content": evil, "reasoning": evil}))
        ask(page, evil)
        ended(page)
        expect(page.locator(".prompt-text")).to_have_text(evil)
        assert page.locator("#turns").locator("img, script, b, a, i").count() == 0
        assert "<img src=x onerror=alert(1)>" in page.locator(".answer .text").inner_text()


@flow
def reasoning_and_tool_calls_are_shown_apart(browser: Browser) -> None:
    with opened(browser) as page:
        calls = [
            {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "add", "arguments": '{"x"'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        ]
        scripted(
            page, 200, events({"reasoning_content": "Let me "}, {"reasoning": "see."}, {"content": "Yes."}, *calls)
        )
        ask(page, "Add.")
        ended(page)
        expect(page.locator(".answer .text")).to_have_text("Yes.")
        expect(page.locator(".reasoning-text")).to_have_text("Let me see.")
        expect(page.locator(".call code")).to_have_text("add")
        expect(page.locator(".call pre")).to_have_text('{\n  "x": 1\n}')


@flow
def errors_are_said_in_plain_words_and_can_be_tried_again(browser: Browser) -> None:
    failure = f"data: {json.dumps({'error': {'message': 'out of memory'}})}\n\n"
    with opened(browser) as page:
        for status, body, said in (
            (503, '{"error": {"message": "draining"}}', "is not ready.*wait 7 s"),
            (200, events({"content": "Half"}, done=False) + failure, "broke off.*out of memory"),
            (200, events({"content": "Half"}, done=False), "connection was lost"),
            (500, "no JSON", "The server failed"),
        ):
            scripted(page, status, body, {"retry-after": "7"} if status == 503 else None)
            ask(page, "Hello?")
            ended(page)
            expect(page.locator(".problem")).to_have_text(re.compile(said))
            assert page.locator(".answer .text").inner_text() == ("Half" if "Half" in body else "")
            page.locator("#new-chat").click()
        page.unroute("**/v1/chat/completions")
        setting(page, "more", '{"temperature": -1}')
        ask(page, "Hello?")
        expect(page.locator(".problem")).to_have_text(re.compile("refused.*temperature"))
        setting(page, "more", '{"max_tokens": 8}')
        page.locator(".problem button").click()
        expect(page.locator(".problem")).to_be_hidden()
        ended(page)
        assert page.locator(".answer .text").inner_text()


@flow
def a_lost_network_is_said_and_the_page_goes_on_after_it(browser: Browser) -> None:
    with opened(browser) as page:
        setting(page, "max_tokens", "8")
        page.context.set_offline(True)
        ask(page, "Hello?")
        expect(page.locator(".problem")).to_contain_text("cannot be reached")
        page.context.set_offline(False)
        page.locator(".problem button").click()
        ended(page)
        expect(page.locator(".problem")).to_be_hidden()
        assert page.locator(".answer .text").inner_text()


@flow
def a_wrong_setting_is_named_and_nothing_is_sent(browser: Browser) -> None:
    with opened(browser) as page:
        setting(page, "top_p", "3")
        expect(page.locator("#settings-error")).to_contain_text("Top p")
        ask(page, "Hello?")
        assert page.locator(".turn").count() == 0 and page.locator("#prompt").input_value() == "Hello?"
        setting(page, "top_p", "")
        page.locator("#prompt").press("Enter")
        ended(page)


@flow
def the_key_is_asked_for_and_kept_for_the_tab(browser: Browser) -> None:
    """The server is below a prefix: the page and its requests use relative addresses."""
    with opened(browser, GIVEN["guarded"], ready=False) as page:
        field, dialog = page.locator("#key"), page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        expect(field).to_be_focused()
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_contain_text("did not take")
        field.fill(GIVEN["key"])
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_be_enabled()
        expect(dialog).to_be_hidden()
        page.locator("#model").select_option("tiny")
        setting(page, "max_tokens", "8")
        ask(page, "Hello?")
        ended(page)
        assert page.locator(".figures").inner_text().startswith("first token")
        assert GIVEN["key"] not in json.dumps(page.context.storage_state())
        assert GIVEN["key"] in page.evaluate("() => Object.values(sessionStorage)")
        expect(page.locator("#running")).to_have_text("0")
        page.reload()
        expect(page.locator("#model")).to_be_enabled()
        page.locator("#forget-key").click()
        expect(dialog).to_be_visible()
        assert GIVEN["key"] not in page.evaluate("() => Object.values(sessionStorage)")
        page.keyboard.press("Escape")
        expect(page.locator("#empty-text")).to_contain_text("needs an API key")
        page.get_by_role("button", name="Try again").click()
        expect(dialog).to_be_visible()


@contextmanager
def with_key(browser: Browser, model: str) -> Iterator[Page]:
    with opened(browser, GIVEN["guarded"], ready=False) as page:
        page.locator("#key").fill(GIVEN["key"])
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_be_enabled()
        page.locator("#model").select_option(model)
        yield page


@flow
def a_model_without_a_chat_template_goes_on_with_the_text(browser: Browser) -> None:
    with with_key(browser, "plain") as page:
        expect(page.locator("#mode-hint")).to_contain_text("no chat template")
        expect(page.locator("[name=system]")).to_be_hidden()
        setting(page, "max_tokens", "12")
        page.locator("[name=logprobs]").check()
        with page.expect_request("**/v1/completions") as sent:
            ask(page, "The capital of France is")
        assert json.loads(sent.value.post_data or "")["prompt"] == "The capital of France is"
        ended(page)
        assert page.locator(".token").count() >= 1


@flow
def a_full_queue_is_said_with_the_seconds_to_wait(browser: Browser) -> None:
    body = {"model": "narrow", "prompt": "x", "max_tokens": 900, "ignore_eos": True}
    request = urllib.request.Request(
        f"{GIVEN['guarded']}v1/completions", json.dumps(body).encode(), {"Authorization": f"Bearer {GIVEN['key']}"}
    )

    def busy() -> None:
        with urllib.request.urlopen(request, timeout=120) as reply:
            reply.read()

    with with_key(browser, "narrow") as page:
        others = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
        others[0].start()
        expect(page.locator("#running")).to_have_text("1")
        others[1].start()
        expect(page.locator("#waiting")).to_have_text("1")
        setting(page, "max_tokens", "4")
        ask(page, "Hello?")
        expect(page.locator(".problem")).to_have_text(re.compile(r"The server is busy.*wait \d+ s"))
        for other in others:
            other.join(120)
        page.locator(".problem button").click()
        ended(page)
        expect(page.locator(".problem")).to_be_hidden()


@flow
def the_pictures_of_the_documentation_are_taken(browser: Browser) -> None:
    stop = threading.Event()

    def others() -> None:
        """Sends requests, so that the charts have something to show."""
        body = {"model": GIVEN["model"], "prompt": "Once", "max_tokens": 60, "ignore_eos": True}
        while not stop.is_set():
            address = f"{GIVEN['smollm2']}v1/completions"
            with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode())) as reply:
                reply.read()
            stop.wait(1.5)

    def conversation(page: Page) -> None:
        setting(page, "temperature", "0")
        setting(page, "max_tokens", "160")
        ask(page, "Give me three short tips for a good night's sleep.")
        ended(page)

    threads = [threading.Thread(target=others, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        folder = Path(GIVEN["images"])
        with opened(browser) as page:
            page.wait_for_timeout(20_000)
            conversation(page)
            page.locator("[name=logprobs]").check()
            ask(page, "What is the capital of France?")
            ended(page, 2)
            page.locator(".token").nth(5).hover()
            page.wait_for_timeout(1500)
            page.screenshot(path=folder / "page-light.png")
            page.locator("#theme").click()
            page.locator(".token").nth(5).hover()
            page.wait_for_timeout(500)
            page.screenshot(path=folder / "page-dark.png")
        with opened(browser, viewport={"width": 390, "height": 760}, is_mobile=True, has_touch=True) as page:
            page.locator("#examples button").first.click()
            ended(page)
            page.wait_for_timeout(500)
            page.screenshot(path=folder / "page-phone.png")
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def main() -> None:
    ends = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=GIVEN["chromium"], args=["--no-sandbox"])
        for name, run in FLOWS.items():
            if name in (GIVEN["only"] or FLOWS):
                try:
                    run(browser)
                    ends[name] = "done"
                except Exception:
                    ends[name] = traceback.format_exc()
        browser.close()
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
