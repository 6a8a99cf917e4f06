"""The arithmetic behind the figures, against values known from elsewhere or by construction."""

from __future__ import annotations

import itertools
import math
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perf import power, stats


@given(count=st.integers(1, 12), rounds=st.integers(1, 9))
def test_every_round_holds_every_contender_once(count, rounds):
    order = stats.interleave(count, rounds)
    assert len(order) == rounds
    assert all(sorted(row) == list(range(count)) for row in order)


@pytest.mark.parametrize("count", [2, 4, 6, 8, 10])
def test_as_many_rounds_as_contenders_give_every_neighbourhood_once(count):
    pairs = [pair for row in stats.interleave(count, count) for pair in itertools.pairwise(row)]
    assert len(set(pairs)) == len(pairs) == count * (count - 1)


@pytest.mark.parametrize("count,rounds", [(9, 3), (9, 5), (7, 5), (3, 3)])
def test_contenders_do_not_keep_their_place(count, rounds):
    order = stats.interleave(count, rounds)
    for contender in range(count):
        places = {row.index(contender) for row in order}
        assert len(places) == min(rounds, count)


@pytest.mark.parametrize("count,rounds", [(9, 3), (9, 5), (7, 5), (3, 3)])
def test_rounds_beyond_those_wanted_take_the_rows_left_out(count, rounds):
    order = stats.interleave(count, rounds, count)
    assert order[:rounds] == stats.interleave(count, rounds)
    assert len({tuple(row) for row in order}) == count


def test_median_of_even_and_odd_numbers_and_of_none():
    assert stats.median([3, 1, 2]) == 2
    assert stats.median([4, 1, 2, 3]) == 2.5
    with pytest.raises(ValueError, match="no values"):
        stats.median([])


def test_spread_is_over_the_median():
    assert stats.spread([1.0, 1.01, 0.99]) == pytest.approx(0.02)
    assert stats.spread([2.0]) == 0


@pytest.mark.parametrize(
    "probability,degrees,expected",
    [
        # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.995, 2, 9.925),
        (0.995, 4, 4.604),
        (0.995, 30, 2.750),
        (0.9, 7, 1.415),
    ],
)
def test_student_quantiles(probability, degrees, expected):
    assert stats.student_quantile(probability, degrees) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("probability,degrees", [(0.4, 3), (1.0, 3), (0.9, 0)])
def test_student_quantile_refuses(probability, degrees):
    with pytest.raises(ValueError, match="need"):
        stats.student_quantile(probability, degrees)


def rounds_of(values):
    return dict(enumerate(values))


def test_a_drift_that_all_share_does_not_widen_the_interval():
    drift = [1.0, 1.1, 1.2, 1.3, 1.4]
    ratio = stats.ratio_intervals({"cublas": rounds_of(drift), "v5": rounds_of([d / 1.05 for d in drift])}, "cublas")[
        "v5"
    ]
    assert ratio.value == pytest.approx(1.05)
    assert ratio.half_width == pytest.approx(stats.RUN_TO_RUN, rel=0.01)
    assert not ratio.tie


def test_speed_is_the_baselines_time_over_the_contenders():
    ratio = stats.ratio_intervals({"cublas": rounds_of([2.0, 2.0]), "v0": rounds_of([4.0, 4.0])}, "cublas")["v0"]
    assert ratio.value == pytest.approx(0.5)


def test_a_difference_smaller_than_its_interval_is_a_tie():
    base = [1.0, 1.0, 1.0, 1.0]
    near = [1.001, 0.992, 1.006, 0.997]
    assert stats.ratio_intervals({"cublas": rounds_of(base), "x": rounds_of(near)}, "cublas")["x"].tie
    far = [v * 1.1 for v in near]
    assert not stats.ratio_intervals({"cublas": rounds_of(base), "x": rounds_of(far)}, "cublas")["x"].tie


def test_without_noise_a_difference_below_the_run_to_run_floor_is_still_a_tie():
    seconds = {"cublas": rounds_of([1.0] * 5), "x": rounds_of([1 + stats.RUN_TO_RUN / 2] * 5)}
    assert stats.ratio_intervals(seconds, "cublas")["x"].tie


def test_alone_the_interval_is_students_on_the_paired_logarithms():
    base, other = [1.0, 1.02, 0.99], [1.1, 1.15, 1.02]
    ratio = stats.ratio_intervals({"cublas": rounds_of(base), "x": rounds_of(other)}, "cublas", confidence=0.95)["x"]
    logs = [math.log(b / o) for b, o in zip(base, other, strict=True)]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((v - mean) ** 2 for v in logs) / 2)
    half = 4.302653 * deviation / math.sqrt(3)
    assert math.log(ratio.high) == pytest.approx(mean + half, rel=1e-5)
    assert math.log(ratio.low) == pytest.approx(mean - half, rel=1e-5)


def test_rounds_are_paired_by_number_not_by_order():
    seconds = {"cublas": {0: 1.0, 1: 2.0, 2: 4.0}, "x": {1: 2.0, 2: 4.0}}
    ratio = stats.ratio_intervals(seconds, "cublas")["x"]
    assert ratio.value == pytest.approx(1.0)
    assert ratio.rounds == 2


def test_one_common_round_gives_no_ratio():
    assert stats.ratio_intervals({"cublas": {0: 1.0}, "x": {0: 1.0, 1: 1.0}}, "cublas") == {}
    assert stats.ratio_intervals({"x": {0: 1.0, 1: 1.0}}, "cublas") == {}


@pytest.mark.parametrize("rounds,noise", [(3, 0.004), (5, 0.004), (5, 0.01)])
def test_intervals_cover_the_true_ratio_as_often_as_they_say(rounds, noise, monkeypatch):
    monkeypatch.setattr(stats, "RUN_TO_RUN", 0.0)
    random.seed(7)
    true = {"cublas": 1.0, "a": 0.97, "b": 1.0, "c": 1.2, "d": 1.8}
    outside = trials = 0
    for _ in range(400):
        shared = [math.exp(random.gauss(0, 0.03)) for _ in range(rounds)]
        seconds = {
            name: {r: t * shared[r] * math.exp(random.gauss(0, noise)) for r in range(rounds)}
            for name, t in true.items()
        }
        for name, ratio in stats.ratio_intervals(seconds, "cublas", confidence=0.95).items():
            trials += 1
            outside += not ratio.low <= 1 / true[name] <= ratio.high
    assert 0.01 < outside / trials < 0.075


@pytest.mark.parametrize("noisy", [(), ("cublas",), ("a",)])
def test_with_few_contenders_and_uneven_noise_intervals_are_not_much_too_narrow(noisy, monkeypatch):
    monkeypatch.setattr(stats, "RUN_TO_RUN", 0.0)
    random.seed(11)
    outside = trials = 0
    for _ in range(2000):
        seconds = {
            name: {r: math.exp(random.gauss(0, 0.02 if name in noisy else 0.004)) for r in range(3)}
            for name in ("cublas", "a", "b")
        }
        for ratio in stats.ratio_intervals(seconds, "cublas").values():
            trials += 1
            outside += not ratio.low <= 1 <= ratio.high
    assert outside / trials < 0.04  # stated: 0.01


def test_a_burst_is_its_calls_before_the_limiter_without_the_first():
    fast, slow = [0.0015] * 12, [0.0017] * 18
    assert stats.before_the_limiter([0.0020, *fast[:8], *slow]) == [*fast[:8], *slow[:3]]  # 0.0191 s after its begin
    assert stats.before_the_limiter([0.0021, *fast, *slow]) == fast[:11]
    assert stats.before_the_limiter([0.030, 0.020, 0.021, 0.022, 0.040]) == [0.020]
    assert stats.before_the_limiter([0.011, 0.0111, 0.0113, 0.0124]) == [0.0111]  # the third call meets the limiter
    assert stats.before_the_limiter([0.5]) == [0.5]


def test_counter_between_finds_the_power_of_a_counter_that_moves_in_steps():
    watts, step, read_every = 700.0, 0.1, 0.01
    samples = [(i * read_every, watts * step * math.floor(i * read_every / step)) for i in range(300)]
    joules = stats.counter_between(samples, 0.333, 2.471)
    assert joules == pytest.approx(watts * (2.471 - 0.333), rel=0.002)


def test_counter_between_refuses_what_it_cannot_know():
    samples = [(0.0, 1.0), (0.1, 2.0), (0.2, 3.0), (0.3, 4.0)]
    with pytest.raises(ValueError, match="cover"):
        stats.counter_between(samples, 0.1, 2.0)
    with pytest.raises(ValueError, match="did not move"):
        stats.counter_between([(0.0, 1.0), (1.0, 1.0)], 0.0, 1.0)
    with pytest.raises(ValueError, match="after start"):
        stats.counter_between(samples, 0.2, 0.2)


def test_energy_per_flop_with_and_without_the_idle_board():
    energy = stats.energy_per_flop(joules=1400.0, seconds=2.0, flops=1.4e15, idle_watts=70.0)
    assert energy.gross_pj == pytest.approx(1.0)
    assert energy.net_pj == pytest.approx(0.9)
    with pytest.raises(ValueError, match="positive"):
        stats.energy_per_flop(1.0, 1.0, 0.0, 0.0)


def test_tensor_peak_is_the_datasheets():
    assert stats.tensor_peak(132, 1830) == pytest.approx(989.4e12, rel=1e-4)


class Clock:
    """Sensors that cool from a state to another, and the time that goes by."""

    reason_absent = None

    def __init__(self, seconds_to_cool):
        self.time, self.until = 0.0, seconds_to_cool

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds

    def read(self):
        hot = self.time < self.until
        return power.Reading(self.time, 1980 if hot else 345, 75.0, 60 if hot else 31, None, 0)


IDLE = power.Idle(clock_mhz=345, temperature_c=30, power_w=75.0)


def test_waiting_ends_when_the_board_is_at_rest():
    board, waits = Clock(3.0), power.Waits(cap_s=20, total_s=60)
    found = power.wait_idle(board, IDLE, waits, board.now, board.sleep)
    assert found["reached"] and found["waited_s"] == pytest.approx(3.0, abs=0.1)
    assert waits.spent_s == pytest.approx(2.0, abs=0.1)  # the first second is every burst's


def test_waiting_is_capped_each_time_and_in_all():
    board, waits = Clock(1e9), power.Waits(cap_s=20, total_s=30)
    waited = [power.wait_idle(board, IDLE, waits, board.now, board.sleep) for _ in range(4)]
    assert [w["reached"] for w in waited] == [False] * 4
    assert [w["waited_s"] for w in waited] == pytest.approx([20, 12, 1, 1], abs=0.2)


def test_why_the_clock_is_held_is_named():
    readings = [power.Reading(0.0, reasons=0x4), power.Reading(0.1, reasons=0x24)]
    assert power.held_by(readings) == ["power_cap", "sw_thermal"]
    assert power.held_by([power.Reading(0.0)]) == []
