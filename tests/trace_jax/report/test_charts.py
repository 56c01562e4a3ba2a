"""Charts are plain SVG, drawn of round numbers, with everything escaped."""

import html
import re

import pytest

from trace_jax.report import charts


def test_axis_ticks_are_round_and_cover_the_data():
    assert charts.ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert charts.ticks(0.13, 0.52) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert charts.ticks(3.0, 3.0)[0] <= 3.0 <= charts.ticks(3.0, 3.0)[-1]
    assert all(tick == int(tick) for tick in charts.ticks(0, 2, whole=True))


def test_a_curve_with_gaps_and_a_single_point_is_drawn():
    drawn = charts.lines([charts.Series(name="a", x=[0, 1, 2, 3, 4], y=[1.0, None, 2.0, 3.0, None])], "a", "step")
    assert drawn.count("<circle") == 1 and drawn.count("<polyline") == 1
    assert charts.lines([charts.Series(name="a", x=[0], y=[None])], "a", "step") == ""


def test_labels_of_a_chart_are_escaped():
    drawn = charts.bars([charts.Bar(label='<b x="1">', value=0.5)], 'a "title" <i>')
    assert "<b" not in drawn and "<i>" not in drawn and html.escape('a "title" <i>', quote=False)[:2] in drawn


def test_curves_are_told_apart_by_their_dashes_and_named_in_rows_that_fit():
    names = [f"a name of twenty {n}" for n in range(6)]
    series = [charts.Series(name=name, x=[0, 1], y=[0.1 * n, 0.2], dash=min(n, 3)) for n, name in enumerate(names)]
    drawn = charts.lines(series, "many", "step", size=(400, 200))
    assert [drawn.count(f"dash{n}") for n in (1, 2, 3)] == [2, 2, 6] and all(f">{name}<" in drawn for name in names)
    assert len(set(re.findall(r'<line class="curve[^"]*" x1="[^"]*" y1="([^"]*)"', drawn))) == 3
