"""Drawings: what is drawn is where it belongs, and no number that somebody says ends who draws."""

import math
import re

import pytest

from skerry.report.charts import HEIGHT, WIDTH, Line, Mark, bars, heat, lines, rebinned


def drawn(*points, **options):
    return lines("loss", [Line("a", points), Line("b", points, 1)], str, str, **options)


def test_points_are_where_they_belong():
    html = drawn((0.0, 0.0), (5.0, 10.0), (10.0, 20.0), top=20.0)
    (path, _) = re.findall(r'class="line c\d" d="M([^"]*)"', html.split("<figcaption")[0])
    places = [tuple(float(word) for word in pair.split()) for pair in path.split("L")]
    assert [x for x, _ in places] == [0, WIDTH / 2, WIDTH]
    heights = [HEIGHT - y for _, y in places]
    assert heights[0] == 0 and heights[1] == pytest.approx(heights[2] / 2, abs=0.2) and heights[2] < HEIGHT


def test_a_line_is_broken_where_nothing_is_known():
    html = drawn((0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 1.0), (4.0, 2.0))
    (path, _) = re.findall(r'class="line c\d" d="([^"]*)"', html.split("<figcaption")[0])
    assert path.count("M") == 2


@pytest.mark.parametrize(
    "values", [(1e308, 1.0), (math.nan, 2.0), (math.inf, -math.inf), (1e-320, 0.0), (5.0, 5.0), (0.0, 0.0), (2**53, 1)]
)
def test_no_number_ends_who_draws(values):
    points = [(float(x), y) for x, y in enumerate(values)]
    for html in (drawn(*points), drawn(*points, from_zero=False), drawn((1e12, values[0]), (1e12, values[1]))):
        assert "nan" not in html and "inf" not in html
    assert heat("map", [("0", [(0.0, 1.0)])], 1.0, str, "x") and bars("b", [("n", 0.0, "0")])


def test_words_are_escaped():
    html = drawn((0.0, 1.0), (1.0, 2.0), marks=[Mark(0.5, "<b>")])
    html += bars("<t>", [("<n>", 1.0, "<s>")]) + heat("<h>", [("<r>", [(0.0, 1.0)])], 1.0, lambda x: "<x>", "<u>")
    assert not re.search(r"<(b|t|n|s|h|r|x|u)>", html.replace("<b>&lt;s&gt;</b>", "")) and html.count("&lt;") >= 7


def test_neighbours_are_joined_into_few_points():
    xs, ys = list(map(float, range(100))), [float(n) for n in range(100)]
    means = rebinned(xs, ys, 10, "mean")
    assert len(means) == 10 and means[0] == (0.0, 4.5)
    assert sum(y for _, y in rebinned(xs, ys, 7, "sum")) == sum(ys)
    assert rebinned([0.0, 1.0], [None, None], 1, "mean") == [(0.0, None)]
