"""The arithmetic behind the figures: order of measuring, medians, ratios and their intervals, energy.

Plain Python; nothing here knows a GPU, so all of it is tested without one.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.99
"""Of the stated intervals: with some twenty ratios in a table, at 95% one would be outside by chance."""

SHARED_DEGREES = 4
"""Weight, in rounds, of the noise that all contenders show together against a contender's own."""

RUN_TO_RUN = 0.003
"""Least half-width of a ratio's interval: an assumption of what shifts between two runs on one board (temperature,
buffer addresses), constant within one, so that its rounds cannot show it. Two boards differed by up to 2.1% under
sustained load (NOTES.md)."""

BURST_S = 0.02
"""A burst's figure is taken from its calls that end so soon. In about half of the bursts on an H200 calls became 2 to
14% longer, 22 to 51 ms after the load began, presumably by a step of the power limiter; a median across it is one of
neither state."""

TENSOR_FLOP_PER_SM_CLOCK = 4096
"""Dense fp16 or bf16 multiplications and additions of one Hopper SM per clock: 989.4 TFLOP/s over 132 SMs at
1830 MHz (NVIDIA H100 datasheet, SXM)."""


def interleave(count: int, rounds: int, most: int | None = None) -> list[list[int]]:
    """Order of `count` contenders in each of `rounds` rounds, and in those after them up to `most`.

    A Williams design: contenders change places from round to round, and with it who runs just before whom, so
    that the heat or cache contents one leaves behind do not always meet the same one. Rounds are spread over
    the design's rows; later rounds take the rows left out.
    """
    most = rounds if most is None else most
    if count < 1:
        return [[] for _ in range(most)]
    base = [0]
    for i in range(1, count):
        base.append((i + 1) // 2 if i % 2 else count - i // 2)
    step = max(1, count // rounds) if rounds else 1
    lap = -(-count // step)  # rounds after which rows would repeat
    return [[(place + r * step + r // lap) % count for place in base] for r in range(most)]


def median(values: Sequence[float]) -> float:
    """Middle value; the mean of the middle two for an even number. Raises ValueError for none."""
    if not values:
        raise ValueError("median of no values")
    return statistics.median(values)


def before_the_limiter(samples: Sequence[float]) -> list[float]:
    """Of a burst's samples (seconds, in order, without a pause) those that end within BURST_S, but the first.

    The first finds the code cold. Of calls so long that none other ends in time, the second.
    """
    early = sum(end <= BURST_S for end in itertools.accumulate(samples))
    return list(samples[1 : max(early, 2)]) or list(samples)


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median: what repeating the measurement moved it by."""
    return (max(values) - min(values)) / median(values)


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t with a whole number of degrees of freedom, for 0.5 <= probability < 1."""
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"need 0.5 <= probability < 1 and degrees >= 1, got {probability} and {degrees}")
    low, high = 0.0, 1.0
    while _student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0 (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    if degrees == 1:
        return 0.5 + angle / math.pi
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term
    for i in range(3 if odd else 2, degrees - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    central = (2 / math.pi) * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + central / 2


@dataclass(frozen=True)
class Ratio:
    """Speed of a contender over the baseline's, the interval it was measured to, and how many rounds."""

    value: float
    low: float
    high: float
    rounds: int

    @property
    def half_width(self) -> float:
        """Larger distance of a limit from the value, as a fraction of the value."""
        return max(self.high / self.value - 1, 1 - self.low / self.value)

    @property
    def tie(self) -> bool:
        """True where the interval holds 1: the two were not told apart."""
        return self.low <= 1 <= self.high


def ratio_intervals(
    seconds: Mapping[str, Mapping[int, float]], baseline: str, confidence: float = CONFIDENCE
) -> dict[str, Ratio]:
    """Speed of each contender over `baseline`'s, with intervals.

    seconds: for each contender, seconds per call in each round (round number -> seconds). Contenders are
    paired with the baseline by round, which takes out whatever changed from one round to the next. The interval is
    Student's on the logarithms of the paired ratios; since a few rounds say little about their own noise, a
    contender's variance is averaged with the mean variance of the others (as up to SHARED_DEGREES rounds more). It is
    never smaller than RUN_TO_RUN. A contender that shares fewer than two rounds with the baseline is left out.
    """
    base = seconds.get(baseline, {})
    logs = {}
    for name, rounds in seconds.items():
        common = sorted(set(rounds) & set(base))
        if name != baseline and len(common) >= 2:
            logs[name] = [math.log(base[r] / rounds[r]) for r in common]
    variances = {name: statistics.variance(values) for name, values in logs.items()}
    degrees = {name: len(values) - 1 for name, values in logs.items()}
    result = {}
    for name, values in logs.items():
        around = [n for n in logs if n != name]
        theirs = sum(degrees[n] for n in around)
        shared = sum(variances[n] * degrees[n] for n in around) / theirs if theirs else 0.0
        others = min(SHARED_DEGREES, theirs)
        freedom = degrees[name] + others
        variance = (variances[name] * degrees[name] + shared * others) / freedom
        half = student_quantile((1 + confidence) / 2, freedom) * math.sqrt(variance / len(values))
        half = max(half, math.log1p(RUN_TO_RUN))
        mean = statistics.fmean(values)
        result[name] = Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(values))
    return result


def counter_between(samples: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Increase of a running counter from `start` to `end`.

    samples: (time, reading), times ascending. The counter of the board moves in steps of tens of milliseconds:
    only readings at which it moved are used, and between them it is taken to rise evenly. Raises ValueError
    where the samples do not reach from `start` to `end` within one step.
    """
    if end <= start:
        raise ValueError(f"end must be after start, got {start} and {end}")
    moved = [sample for i, sample in enumerate(samples) if i == 0 or sample[1] != samples[i - 1][1]]
    # NOTE: the first reading was taken somewhere inside a step, so as a point on the line it is late.
    moved = moved[1:] if len(moved) > 2 else moved
    if len(moved) < 2:
        raise ValueError("the counter did not move between start and end")
    step = max(b[0] - a[0] for a, b in itertools.pairwise(moved))
    if moved[0][0] > start + step or moved[-1][0] < end - step:
        raise ValueError("the samples do not cover the time from start to end")
    return _at(moved, end) - _at(moved, start)


def _at(points: Sequence[tuple[float, float]], time: float) -> float:
    """Value of the broken line through `points` at `time`, its end pieces made longer."""
    i = min(max(bisect_right([p[0] for p in points], time), 1), len(points) - 1)
    (t0, v0), (t1, v1) = points[i - 1], points[i]
    return v0 + (v1 - v0) * (time - t0) / (t1 - t0)


def mean_between(samples: Sequence[tuple[float, float]], start: float, end: float) -> float | None:
    """Mean of the readings taken from `start` to `end`; None where there is none."""
    values = [value for time, value in samples if start <= time <= end]
    return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class Energy:
    """Energy of one FLOP in picojoules: the board's, and what is left when its idle power is taken off."""

    gross_pj: float
    net_pj: float


def energy_per_flop(joules: float, seconds: float, flops: float, idle_watts: float) -> Energy:
    """joules the board used over `seconds` in which `flops` operations were done; idle_watts its power at rest."""
    if flops <= 0 or seconds <= 0:
        raise ValueError(f"flops and seconds must be positive, got {flops} and {seconds}")
    return Energy(joules / flops * 1e12, (joules - idle_watts * seconds) / flops * 1e12)


def tensor_peak(sm_count: int, clock_mhz: float) -> float:
    """FLOP/s of all tensor cores in fp16 or bf16, dense, at that clock."""
    return sm_count * TENSOR_FLOP_PER_SM_CLOCK * clock_mhz * 1e6
