"""The dashboard in a real browser: live figures, no console errors, nothing fetched from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from .browser import MISSING, chromium
from .test_cache_control import ask, folder, serve

__all__ = ["folder"]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"a browser is needed: no {' and no '.join(MISSING)} here")

KEY = "document.getElementById('key').value = arguments[0]; document.querySelector('#key-form button').click()"
LAYOUT = "return [document.documentElement.scrollWidth, innerWidth]"


def text_of(name: str) -> str:
    return f"document.getElementById('{name}').innerText"


async def test_the_page_shows_live_data(folder: Path, tmp_path: Path) -> None:
    async with serve(folder, admin_key="root", tiers=("dram:1MiB",)) as live, chromium(tmp_path) as browser:
        await browser.show_as(1200)
        await browser.requested()  # the empty tab's own
        await browser.open(f"{live.url}/dashboard")
        await browser.until(f"{text_of('status')} == 'The server asks for a key'")
        refused = await browser.complaints()
        assert [each for each in refused if "401" not in each] == []
        await browser.run(KEY, "root")
        await browser.until(f"{text_of('status')} == 'Live, everything shown'")
        assert await browser.run(f"return {text_of('run')}") == "Nothing is cached yet."
        await ask(live, "At dawn?", control={"type": "ephemeral"})
        await ask(live, "At <b>dusk</b>?", tiers={"max_restored_tokens": 0})  # a tier's speed is another reason to miss
        await browser.until(f"{text_of('tree')}.includes('count the boats') && {text_of('tree')}.includes('<b>dusk')")
        await browser.until(f"{text_of('hit-rate')}.endsWith('%')")
        assert "acme" in await browser.run(f"return {text_of('tenants')}")
        assert "dram" in await browser.run(f"return {text_of('tiers')}")
        assert "the prompt goes on differently" in await browser.run(f"return {text_of('misses')}")
        assert await browser.run("return document.getElementById('map').getAttribute('aria-label')")
        # The tree by keyboard: from the tenant down to its first run.
        await browser.run("document.querySelector('#tree button').focus()")
        down = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}))"
        await browser.run(down)
        assert "hits" in await browser.run(f"return {text_of('run')}")
        for width, scheme in ((1200, "dark"), (360, "light")):
            await browser.show_as(width, scheme=scheme)
            scrolled, inner = await browser.run(LAYOUT)
            assert scrolled <= inner == width
        assert await browser.complaints() == []
        asked = await browser.requested()
        assert f"{live.url}/v1/kv/overview" in asked
        assert [url for url in asked if not url.startswith((live.url, "data:"))] == []


async def test_a_tenant_sees_no_texts_and_the_page_survives_a_restart(folder: Path, tmp_path: Path) -> None:
    async with chromium(tmp_path) as browser:
        async with serve(folder) as live:
            await ask(live, "At dawn?")
            await browser.open(f"{live.url}/dashboard")
            await browser.until(f"{text_of('status')} == 'The server asks for a key'")
            await browser.run(KEY, "sk-a")
            await browser.until(f"{text_of('status')} == 'Live' && {text_of('requests-note')}.includes('1 finished')")
            assert "boats" not in await browser.run("return document.body.innerText")
            port = int(live.url.rsplit(":", 1)[1])
        await browser.until(f"{text_of('status')} == 'No answer, trying again'")
        async with serve(folder, port=port):
            await browser.until(f"{text_of('status')} == 'Live' && {text_of('requests-note')}.includes('0 finished')")
