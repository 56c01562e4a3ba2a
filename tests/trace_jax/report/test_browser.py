"""The report in a browser: quiet, accessible, usable by keyboard, on a narrow screen, without script, and deaf to what trajectories say."""

import pathlib

import pytest

from rl.trajectory import encode_shard
from tests.browser import accessibility_faults, open_page
from tests.trace_jax.example_run import add_all, add_diagnosis, add_environments, add_rollouts, trajectory
from tests.trace_jax.report.pages import HOSTILE
from trace_jax import report
from trace_jax.config import load_config
from trace_jax.report import budgets
from trace_jax.workdir import Workdir

__all__ = ["open_page"]
PLOT = (HOSTILE + " ]]> --> </script></style><svg onload=alert(1)> {{ 7 * 7 }} " + "x" * 500).replace("\ud800", "")


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """Reports of a run whose tools are hostile, and of one that has come to its environments; of few cases, since a checker of
    accessibility looks at every element."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch, Workdir.open(folder / "hostile", load_config("quickstart")) as workdir:
        patch.setattr(budgets, "CASES", 2)
        add_all(workdir, PLOT, iterations=4)
        shown = [trajectory(n, tokens=40, slots=4, hostile=PLOT) for n in range(2)]
        shown[0].messages[3]["content"] = PLOT * 2000  # a megabyte
        workdir.write_bytes("gate/examples.jsonl.zst", encode_shard(shown))
        lines = workdir.read_bytes("diagnosis/evidence.jsonl").replace(b"onerror", b"\\ud800onerror")
        workdir.write_bytes("diagnosis/evidence.jsonl", lines)  # a lone surrogate, which only a JSON escape can bring
        report.write_report(workdir)
    with Workdir.open(folder / "unfinished", load_config("quickstart")) as workdir:
        for add in (add_rollouts, add_diagnosis, add_environments):
            add(workdir)
        report.write_report(workdir)
    return {name: pathlib.Path(folder / name / "report.html") for name in ("hostile", "unfinished")}


def unfold(page):
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")


@pytest.mark.parametrize("name, scheme, width", [("hostile", "light", 1280), ("hostile", "dark", 400), ("unfinished", "dark", 1280)])
def test_the_page_is_accessible_and_fits_its_width(open_page, addresses, name, scheme, width):
    page = open_page(addresses[name], width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    faults = accessibility_faults(page) if width == 400 else []  # folded, since the checker takes a millisecond an element
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert faults + (accessibility_faults(page) if width > 400 else []) == []
    page.close()


def test_what_is_hostile_is_text(open_page, addresses):
    page = open_page(addresses["hostile"])
    page.on("dialog", lambda dialog: page.complaints.append(f"dialog: {dialog.message}"))
    unfold(page)
    said = page.inner_text("#trajectories")
    assert "<script>alert('tool')</script>␀␛[31m\\u202egnp.exe" in said and "{{ 7 * 7 }}" in said and "more characters" in said
    assert "]]> --> </script></style><svg onload=alert(1)>" in page.inner_text("#changes")
    assert "\ufffdonerror=alert(1)>" in page.inner_text("#capabilities")
    assert page.evaluate("[document.scripts.length, document.images.length, document.querySelectorAll('svg[onload]').length]") == [1, 0, 0]
    page.close()


def test_the_keyboard_reaches_the_summary_the_sections_and_the_layers(open_page, addresses):
    page = open_page(addresses["hostile"])
    focused = "[document.activeElement.tagName, document.activeElement.textContent.trim().slice(0, 20)]"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == ["A", "Skip to the summary"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    reached = set()
    for _ in range(200):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName"))
        if page.evaluate("document.activeElement.id") == "layer":
            break
    assert reached >= {"A", "SUMMARY", "DIV", "SELECT"}
    token = page.locator(".tokens i").first
    layers = page.locator(".tokens").first.get_attribute("data-layers").split(" ")
    page.keyboard.press("ArrowDown")
    assert page.locator("#layer").input_value() == "1" and token.get_attribute("class").startswith(f"s{layers[1][0]}")
    page.focus("#trajectories details.card > summary")
    page.keyboard.press("Enter")
    assert page.evaluate("document.querySelector('#trajectories details.card').open") is False
    page.close()


def test_without_script_everything_but_the_choice_of_a_layer_is_there(open_page, addresses):
    page = open_page(addresses["hostile"], script=False)
    assert page.locator("#layer").is_hidden() and page.locator(".tokens").first.is_visible()
    page.locator("#broken ~ details summary").first.click()
    page.close()


def test_two_columns_become_one_on_a_narrow_screen_and_paper_unfolds_what_matters(open_page, addresses):
    def columns(page):
        boxes = [page.locator("#changes .side").nth(n).bounding_box() for n in range(2)]
        return boxes[0]["x"] < boxes[1]["x"] and boxes[0]["y"] == boxes[1]["y"]

    wide, narrow = open_page(addresses["hostile"]), open_page(addresses["hostile"], width=400)
    assert columns(wide) and not columns(narrow)
    assert not narrow.evaluate("[...document.querySelectorAll('figure')].filter(f => f.scrollWidth > f.clientWidth).length")
    assert (
        narrow.locator("#evaluation .chart:visible text.value").count() == wide.locator("#evaluation .chart:visible text.value").count() > 0
    )
    hidden = wide.locator("#changes details.card:not([open]) .side").first
    assert not hidden.is_visible()
    wide.emulate_media(media="print")
    assert hidden.is_visible() and columns(wide)
    assert wide.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    wide.close(), narrow.close()


def test_nothing_moves_once_it_is_there(open_page, addresses):
    page = open_page(addresses["hostile"])
    unsized = "[...document.querySelectorAll('svg')].filter((one) => !one.getAttribute('width') || !one.getAttribute('height')).length"
    assert page.evaluate(unsized) == 0
    moved = """new Promise((resolve) => { let total = 0;
        new PerformanceObserver((list) => list.getEntries().forEach((one) => { total += one.value }))
            .observe({ type: 'layout-shift', buffered: true });
        setTimeout(() => resolve(total), 200) })"""
    assert page.evaluate(moved) < 0.01
    page.close()
