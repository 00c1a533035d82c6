"""Costs of passes: inferred from a few, followed while running, measured on an engine, kept between runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from stubs import StubEngine, random_logits

from quasar_trt import step_cost
from quasar_trt.engines.base import SequenceStep
from quasar_trt.step_cost import StepCost, measure


def test_costs_between_and_beyond_those_measured():
    cost = StepCost({1: 1.0, 2: 1.5, 4: 1.7, 8: 3.7})
    expected = {1: 1.0, 2: 1.5, 3: 1.6, 4: 1.7, 5: 2.2, 7: 3.2, 8: 3.7, 9: 4.2, 20: 9.7}
    assert {rows: cost.seconds(rows) for rows in expected} == pytest.approx(expected)


def test_disturbance_of_one_measurement_is_bounded_by_the_next():
    cost = StepCost({1: 1.0, 2: 9.0, 3: 1.2, 4: 1.1, 5: 2.0})
    assert [cost.seconds(rows) for rows in range(1, 6)] == pytest.approx([1.0, 1.1, 1.1, 1.1, 2.0])


def test_only_plain_passes_could_be_measured():
    cost = StepCost({1: 1.0})
    assert cost.seconds(1) == cost.seconds(2) == 1.0


def test_level_follows_quickly_and_ratios_stay():
    """A pass takes twice as long as before, whatever its rows: 40 of 1 row, 40 of 5."""
    cost = StepCost({1: 1.0, 5: 1.5, 9: 2.0})
    for _ in range(40):
        cost.observe(1, 2.0)
        cost.observe(5, 3.0)
    assert cost.seconds(1) == pytest.approx(2.0, rel=0.05)
    assert cost.seconds(5) / cost.seconds(1) == pytest.approx(1.5, rel=0.05)
    assert cost.seconds(9) / cost.seconds(1) == pytest.approx(2.0, rel=0.35)  # not seen since: it follows the level


def test_ratio_follows_what_is_observed_through_noise_and_interruptions():
    """5 rows really cost 1.2 passes, not 1.5; 5 % noise, every 20th pass takes ten times as long: within 5 % after 600."""
    generator = np.random.default_rng(5)
    cost = StepCost({1: 1.0, 5: 1.5})
    ratios = []
    for number in range(600):
        rows, seconds = (1, 1.0) if number % 3 else (5, 1.2)
        cost.observe(rows, seconds * generator.normal(1, 0.05) * (10 if generator.random() < 0.05 else 1))
        ratios.append(cost.seconds(5) / cost.seconds(1))
    assert np.mean(ratios[300:]) == pytest.approx(1.2, rel=0.05)


def test_one_interrupted_pass_moves_little():
    cost = StepCost({1: 1.0, 5: 1.5})
    cost.observe(5, 1000.0)
    assert cost.seconds(5) / cost.seconds(1) < 1.5 * 1.03 and cost.seconds(1) < 1.06
    cost.observe(100, 1000.0)  # more rows than were measured
    assert cost.seconds(1) < 1.06


# --- measuring


def stub(**options) -> StubEngine:
    return StubEngine(random_logits(3), 3, **options)


def test_measuring_leaves_the_engine_as_it_was():
    engine = stub()
    busy = engine.open()
    engine.step([SequenceStep(busy, [1, 2], needs_logits=False)], None)
    measured, _ = measure(engine, max_draft_len=8)
    assert {*range(1, 10), 17, 24, 32, 48, 64} >= set(measured) >= {1, 2, 3, 5, 9, 17}
    assert all(seconds > 0 for seconds in measured.values())
    assert engine.caches == {busy: [1, 2]}


@pytest.mark.parametrize(
    ("limits", "most"), [({"max_rows": 1}, 1), ({"max_rows": 6}, 6), ({"max_seq_len": 4}, 4), ({"max_seq_len": 1}, 1)]
)
def test_measuring_keeps_to_the_engines_limits(limits, most):
    measured, _ = measure(stub(**limits), max_draft_len=8)
    assert {1, most} <= set(measured) <= set(range(1, most + 1))
    assert StepCost(measured).seconds(1) > 0


class TimedEngine(StubEngine):
    """A pass of n rows takes `cost(n, number of passes before)` on the clock that the module sees."""

    def __init__(self, cost, monkeypatch):
        super().__init__(random_logits(3), 3)
        self.cost, self.now = cost, 0.0
        monkeypatch.setattr(step_cost, "perf_counter", lambda: self.now)

    def step(self, batch, accept):
        self.now += self.cost(1 + len(batch[0].draft), len(self.passes))
        return super().step(batch, accept)


def test_fastest_pass_counts(monkeypatch):
    engine = TimedEngine(lambda rows, number: 0.001 * rows * (3 if number % 7 == 0 else 1), monkeypatch)
    measured, steady = measure(engine, max_draft_len=4)
    assert steady
    assert measured == pytest.approx({rows: 0.001 * rows for rows in measured})


def test_slow_engine_is_measured_at_few_numbers_of_rows(monkeypatch):
    engine = TimedEngine(lambda rows, number: 0.4, monkeypatch)
    measured, steady = measure(engine, max_draft_len=16)
    assert set(measured) == {1, 2, 3, 5, 9, 17} and len(engine.passes) == 12 and steady


def test_unsteady_costs_are_told(monkeypatch):
    engine = TimedEngine(lambda rows, number: 0.001 * rows * 1.2**number, monkeypatch)
    assert not measure(engine, max_draft_len=4)[1]


# --- the cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quasar-trt" / "step-cost"


def opened(names, monkeypatch, cost=lambda rows, number: 0.001 * rows) -> tuple[StepCost, int]:
    """(costs, passes that opening them took)."""
    engine = TimedEngine(cost, monkeypatch)
    return StepCost.open(engine, 4, names), len(engine.passes)


def test_costs_are_measured_once_per_name(cache, monkeypatch):
    first, measured = opened(["engine", 2], monkeypatch)
    assert measured > 0 and len(list(cache.iterdir())) == 1
    again, measured_again = opened(["engine", 2], monkeypatch)
    assert measured_again == 0
    assert [again.seconds(rows) for rows in range(1, 30)] == [first.seconds(rows) for rows in range(1, 30)]
    assert opened(["engine", 3], monkeypatch)[1] == measured and len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[1, 2]", "7", "{}", '{"2": 1.0}', '{"0": 1.0, "1": 1.0}'),
        *('{"1": "fast"}', '{"1": 0}', '{"1": NaN}', '{"1": null}', '{"one": 1.0}'),
    ],
)
def test_damaged_file_is_measured_anew(content, cache, monkeypatch):
    _, measured = opened(["engine"], monkeypatch)
    (file,) = cache.iterdir()
    file.write_text(content)
    assert opened(["engine"], monkeypatch)[1] == measured
    assert json.loads(file.read_text())["1"] == pytest.approx(0.001)


@pytest.mark.parametrize("place", ["XDG_CACHE_HOME", "HOME"])
def test_cache_that_cannot_be_written_is_no_error(place, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv(place, str(tmp_path / "file"))
    for _ in range(2):
        cost, measured = opened(["engine"], monkeypatch)
        assert measured > 0 and cost.seconds(2) == pytest.approx(0.002)


def test_default_place_is_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    opened(["engine"], monkeypatch)
    assert len(list((tmp_path / ".cache" / "quasar-trt" / "step-cost").iterdir())) == 1


def test_costs_of_a_busy_machine_are_not_kept(cache, monkeypatch):
    for _ in range(2):
        assert opened(["engine"], monkeypatch, lambda rows, number: 0.001 * rows * 1.2**number)[1] > 0
    assert not cache.exists()
