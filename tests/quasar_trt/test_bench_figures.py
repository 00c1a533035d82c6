"""Figures as text, tables on the terminal and in Markdown, and the interval of a mean ratio."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console

from quasar_trt.bench.figures import median, number, ratio_interval, same_ids, spread
from quasar_trt.tables import Alarm, FigureTable


def test_figures_as_text():
    assert number(None, ".1f") == median([]) == spread([]) == "-"
    assert number(12.34, ".1f") == "12.3"
    assert median([1.0, 3.0, 2.0]) == "2.00x"
    assert spread([1.0]) == "1.00x"
    assert spread([90.2, 81.0, 85.4], ".0f", "%") == "85% (81..90)"


@pytest.mark.parametrize(
    ("drafter", "temperature", "stands_out"),
    [(None, 1.0, True), ("suffix", 1.0, True), ("engine:int8", 0.0, True), ("engine:int8", 1.0, False)],
)
def test_other_ids_stand_out_where_a_drafter_keeps_them(drafter, temperature, stands_out):
    some, all_ = (same_ids(equal, 4, drafter, temperature) for equal in (3, 4))
    assert (some, isinstance(some, Alarm)) == ("3/4", stands_out)
    assert (all_, isinstance(all_, Alarm)) == ("4/4", False)


def test_interval_of_equal_ratios_is_the_ratio():
    assert ratio_interval([1.5, 1.5, 1.5]) == pytest.approx((1.5, 1.5))
    assert ratio_interval([1.5]) is None and ratio_interval([]) is None


def test_interval_is_that_of_the_normal_distribution_for_many_ratios():
    """400 ratios whose logarithms have mean 0.1 and deviation 0.2: 0.1 +- 1.96 * 0.2 / 20, within a tenth of its width."""
    logs = np.random.default_rng(1).normal(0, 1, 400)
    logs = 0.1 + 0.2 * (logs - logs.mean()) / logs.std()
    interval = ratio_interval(list(np.exp(logs)))
    assert [math.log(end) for end in interval] == pytest.approx([0.0804, 0.1196], abs=0.004)
    assert interval == ratio_interval(list(np.exp(logs)))  # the seed is fixed


def test_interval_of_ratios_and_of_their_inverses_mirror_each_other():
    ratios = [0.8, 1.0, 1.1, 1.3, 2.0]
    low, high = ratio_interval(ratios)
    inverse = ratio_interval([1 / ratio for ratio in ratios])
    assert inverse == pytest.approx((1 / high, 1 / low))
    assert 0.8 < low < math.prod(ratios) ** 0.2 < high < 2.0


def figure_table() -> FigureTable:
    return FigureTable("four cells", ("cell", "ids as\nplain"), [("a[b]|c", "2/2"), ("d", Alarm("1/2"))], "a note")


def test_table_as_markdown():
    assert figure_table().markdown() == (
        "### four cells\n\n| cell | ids as plain |\n| --- | --: |\n| a[b]&#124;c | 2/2 |\n| d | **1/2** |\n\na note\n"
    )


def test_table_on_the_terminal():
    console = Console(width=60, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(figure_table().terminal())
    text = console.file.getvalue()
    assert "a[b]|c" in text and "a note" in text
    assert "\x1b[31m1/2" in text.replace(" ", "") and "\x1b[31m2/2" not in text.replace(" ", "")
