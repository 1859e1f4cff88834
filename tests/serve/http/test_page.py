"""The page at `/`: served with what it needs; driven in headless Chromium where that is asked for."""

import re
import shutil

import httpx
import pytest

from serve.http.app import STATIC
from tests.serve.http.fake import Fake, client
from tests.serve.http.test_server import serving

CALL = (
    'Hm.<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="lookup" index="1"<|sep|>'
    '<|open|>argument key="q" type="string"<|sep|><b>x</b><|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|><|close|>message<|sep|>"
)
TOOLS = '[{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]'


@pytest.mark.anyio
async def test_the_page_and_its_files(tok):
    async with client(Fake(tok), api_key="k") as c:
        page = await c.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        linked = re.findall(r'(?:href|src)="(static/[^"]+)"', page.text)
        imported = re.findall(r'from "\./([^"]+)"', (STATIC / "page.js").read_text())
        wanted = {*linked, *(f"static/{name}" for name in imported)}
        assert wanted == {f"static/{path.name}" for path in STATIC.iterdir() if path.name != "index.html"}
        for path in wanted:
            assert (await c.get(f"/{path}")).status_code == 200
        assert not re.search(r"<script>|<style>|style=|\son\w+=|https?://", page.text)  # what the policy forbids


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.browser
def test_chat_and_dashboard_in_chromium(tok, browser):
    def script(request):
        text = tok.decode(request.prompt)
        if text.count('tool="lookup"') > 1:  # the call and its result
            return "Done.<|close|>think<|sep|><|open|>response<|sep|>It is <i>42</i>.<|close|>response<|sep|>"
        return CALL

    fake = Fake(tok, script=script, pause=0.001, cached=3)
    problems = []
    with serving(fake, api_key="k") as url:
        page = browser.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        page.locator("#status.error").wait_for()
        assert "API key" in page.inner_text("#status")
        page.fill("#key", "k")
        page.locator("#key").blur()
        page.locator("#status:not(.error)").wait_for()
        problems.clear()  # the refused requests

        assert page.inner_text("#model") == "nano"
        assert page.inner_text("#hits") == "25 %"
        state, gap, end = (page.locator(f"#pool-{name}").bounding_box() for name in ("state", "gap", "page"))
        assert state["x"] < gap["x"] < end["x"]
        whole = state["width"] + gap["width"] + end["width"]
        widths = [box["width"] / whole for box in (state, gap, end)]
        assert widths == pytest.approx([0.3, 0.2, 0.5], abs=0.01)
        assert page.inner_text("#state-text") == "300 B (30.0 %)"

        page.click("summary")
        page.fill("#tools", TOOLS)
        page.fill("#input", "What is <x>?")
        page.press("#input", "Enter")
        page.locator(".call input").wait_for()
        assert page.inner_text(".message.user") == "What is <x>?"
        assert page.inner_text(".thoughts") == "Hm."
        assert page.inner_text(".call strong") == "lookup"
        assert page.inner_text(".call code") == '{"q": "<b>x</b>"}'
        page.fill(".call input", "42")
        page.press(".call input", "Enter")
        page.locator(".answer").wait_for()
        page.locator("#send:not([disabled])").wait_for()
        assert page.inner_text(".answer") == "It is <i>42</i>."
        assert "3 cached" in page.locator(".note").last.inner_text()
        page.locator("#rate", has_text=re.compile("[1-9]")).wait_for()

        fake.script, fake.pause = (lambda request: "word " * 10_000), 0.002
        page.fill("#input", "Go on")
        page.click("#send")
        page.locator(".thoughts", has_text="word word").wait_for()
        page.click("#stop")
        page.locator(".error", has_text="stopped").wait_for()
        page.locator("#running", has_text=re.compile("^0$")).wait_for()
        assert fake.running == 0
        assert httpx.get(f"{url}/server_info", headers={"Authorization": "Bearer k"}).json()["http"]["active"] == 0
        page.click("#clear")
        assert page.locator(".message").count() == 0
        page.fill("#input", "Hi")
        fake.error = ValueError("nothing fits")
        page.click("#send")
        page.locator(".error", has_text="nothing fits").wait_for()
    assert [text for text in problems if "400" not in text] == []
