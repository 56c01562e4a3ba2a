"""Pages in a headless Chromium, the one of the system or Playwright's own; where there is none their tests are skipped.

`from tests.browser import open_page` makes the fixture a test file's own.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterator

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def open_page() -> Iterator[Callable]:
    """`open_page(address, width=1280, scheme="light")`: the page, loaded, without script errors and messages so far.

    What the page says in its console, every request beyond its own address, and every uncaught error is in `page.complaints`, which
    must be empty when the module ends.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install -e '.[test]'")
    with sync_api.sync_playwright() as playwright:
        program = next(filter(None, map(shutil.which, _NAMES)), None)
        if program is None and not pathlib.Path(playwright.chromium.executable_path).exists():
            pytest.skip("no Chromium here: install the system's, or run `playwright install chromium`")
        browser = playwright.chromium.launch(executable_path=program)
        pages = []

        def open_page(address: str | pathlib.Path, *, width: int = 1280, scheme: str = "light", script: bool = True):
            address = address.as_uri() if isinstance(address, pathlib.Path) else address
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=script)
            page.complaints = []
            page.on("console", lambda message: page.complaints.append(f"console: {message.text}"))
            page.on("pageerror", lambda error: page.complaints.append(f"error: {error}"))
            page.on("requestfailed", lambda request: page.complaints.append(f"failed: {request.url}"))
            origin = address.partition("#")[0] if address.startswith("file:") else "/".join(address.split("/")[:3])
            page.on("request", lambda request: request.url.startswith((origin, "data:")) or page.complaints.append(f"asks {request.url}"))
            page.goto(address)
            pages.append(page)
            return page

        yield open_page
        complaints = [complaint for page in pages for complaint in page.complaints]
        browser.close()
        assert not complaints


def accessibility_faults(page) -> list[str]:
    """What axe-core finds wrong with a page: contrast, headings, names, labels, landmarks. One line for each rule and element."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {rule['help']}: {node['html'][:160]}" for rule in found for node in rule["nodes"]]
