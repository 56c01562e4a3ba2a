"""The pages as a person uses them: by mouse and by keyboard, light and dark, wide and narrow."""

import contextlib
import threading
import time

import pytest

from tests.browser import accessibility_faults, open_page  # noqa: F401
from tests.trace_jax.view import made
from trace_jax.config import Config
from trace_jax.serve.listener import bind, url
from trace_jax.view.app import Pages
from trace_jax.view.command import Server
from trace_jax.view.rollouts import Rollouts
from trace_jax.workdir import Workdir


@contextlib.contextmanager
def serving(path):
    """The address of a server over a workdir."""
    with contextlib.closing(Rollouts(Workdir.look(path))) as rollouts, bind("127.0.0.1", 0) as listener:
        server = Server(Pages(rollouts).app(), "")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started or rollouts.now().unread:
            time.sleep(0.01)
        yield url(listener, "127.0.0.1")
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = made.fill(tmp_path_factory.mktemp("browser") / "run")
    with Workdir.open(path, Config(), lock=False) as workdir:
        workdir.write_shard("base", "hostile", 0, [made.hostile()])
        label = {"trajectory": made.HOSTILE, "capability": made.HOSTILE, "value": "LACKING", "message_index": 1}
        workdir.append_jsonl("diagnosis/evidence.jsonl", {**label, "reason": made.HOSTILE, "quote": ""})
    with serving(path) as address:
        yield address


def fits(page):
    """Whether nothing is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_person_filters_sorts_turns_pages_and_reads(open_page, address):  # noqa: F811
    page = open_page(address, script=False)  # needs none
    assert page.locator(".found strong").first.inner_text() == "249"
    page.get_by_label("Policy", exact=True).select_option("adapter:x")
    page.get_by_role("button", name="Show").click()
    assert page.url == f"{address}/?policy=adapter%3Ax" and page.locator(".found strong").first.inner_text() == "230"
    page.get_by_role("link", name="reward", exact=True).click()
    page.get_by_role("link", name="reward ↑").click()
    assert page.locator("tbody tr").first.inner_text().count("success 1.00") == 1
    page.get_by_role("link", name="Next").first.click()
    assert "page 2 of 3" in page.locator("nav.pager").first.inner_text()
    page.locator("tbody a").nth(4).click()
    assert page.locator("nav.pager").inner_text().split("\n")[1].strip() == "105 of 230"
    page.get_by_role("link", name="Next").click()
    assert "106 of 230" in page.locator("nav.pager").inner_text()
    page.go_back()
    page.get_by_role("link", name="Back to the chosen rollouts").click()
    assert "page 2 of 3" in page.locator("nav.pager").first.inner_text()
    page.go_back()
    page.go_back()
    assert page.url.endswith("sort=-reward&page=2")


def test_a_person_looks_at_slots_layer_by_layer_and_sets_policies_side_by_side(open_page, address):  # noqa: F811
    page = open_page(f"{address}/?slots=yes")
    page.locator("tbody a").first.click()
    colours = lambda: page.locator(".tokens i").evaluate_all("all => all.map(i => getComputedStyle(i).borderBottomColor)")  # noqa: E731
    before = colours()
    page.get_by_label("Colour by").select_option("2")
    page.get_by_role("button", name="Colour").click()
    assert "layer=2" in page.url and page.url.endswith("#tokens") and colours() != before and len(set(colours())) == 4
    assert "log-prob" in page.locator(".tokens i.o").first.get_attribute("title")
    page.get_by_role("link", name="this rollout beside trial 0 of base").first.click()
    assert page.locator(".beside > section").count() == 2
    left, right = (page.locator(".beside > section").nth(n).bounding_box() for n in (0, 1))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    page.go_back()
    assert "layer=2" in page.url


def test_the_pages_are_accessible_in_light_and_dark_wide_and_narrow(open_page, address):  # noqa: F811
    pages = ["/?split=train", "/rollout/rollouts/base/train/00000/1", "/rollout/rollouts/composed/heldout/00000/0?policy=composed&layer=1"]
    pages += ["/beside?a=rollouts/base/train/00000/1&b=rollouts/base/odd/00000/0", "/rollout/rollouts/base/hostile/00000/0"]
    for scheme, width, judged in (("light", 1280, (0, 1, 3, 4)), ("dark", 400, (1, 2))):  # a judgement takes a second
        page = open_page(address, scheme=scheme, width=width)
        for number, path in enumerate(pages):
            page.goto(address + path)
            assert fits(page), (path, width)
            assert number not in judged or not accessibility_faults(page), (path, scheme)


def test_the_keyboard_reaches_what_the_mouse_does(open_page, address):  # noqa: F811
    page = open_page(address)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "where"
    page.get_by_label("Part of the id").focus()
    page.keyboard.type("desk:3#1")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?text=desk*")
    assert page.locator("tbody tr").count() == 1


def test_hostile_text_does_nothing(open_page, address):  # noqa: F811
    page = open_page(f"{address}/?split=hostile")
    page.on("dialog", lambda dialog: page.complaints.append(dialog.message))
    page.locator("tbody a").first.click()
    assert page.locator("script, img").count() == 0 and "<script>alert('x')</script>" in page.inner_text("main")
    assert page.locator(".message").count() == 3
    assert page.locator("h1").inner_text().startswith("</table><script>")


def test_a_megabyte_of_tool_output_opens_quickly_and_unfolds(open_page, address):  # noqa: F811
    page = open_page(address)
    began = time.monotonic()
    page.goto(f"{address}/rollout/rollouts/base/odd/00000/0")
    assert time.monotonic() - began < 5  # a tenth of a second where nobody else works
    assert not page.get_by_text("line 2000 of the listing").is_visible()
    page.locator("details.rest summary").click()
    assert page.get_by_text("line 2000 of the listing").is_visible()
    page.get_by_role("link", name="as plain text").click()
    assert "line 44999 of the listing" in page.inner_text("body")
