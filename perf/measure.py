"""How a suite is measured: contenders prepared and checked, then bursts, then sustained blocks.

The unit is a round: every contender once, in an order that changes. A run that is stopped keeps its whole
rounds; a resumed one drops the round that was cut and goes on with the next.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from perf import stats, tables
from perf.device import L2_FACTOR, MAX_SETS, Launch, Layout, Mismatch, Operands, sets_needed
from perf.power import Idle, Waits, measure_idle, summary, wait_idle
from perf.suites import MOST_TIMES, Effort, Shape, Suite

SAMPLE_S = 1e-3
"""A sample is one call; where calls are shorter than GRAPH_BELOW_S, a CUDA graph of as many as last this long."""

GRAPH_BELOW_S = 3e-4

CHUNK_S = 0.1
"""Seconds of calls between two events of a sustained block: its raw samples."""

LOAD_MARGIN = 1.05
"""A block's calls are counted beforehand, by the last estimate: so many times more, to last as long as it should."""

LEAST_ROUNDS = 3

SAVE_EVERY_S = 2.0


class Skip(Exception):
    """A contender that cannot take part, and why."""


@dataclass
class Prepared:
    """What a contender runs for one shape, and what is to be said of it (configuration, library's choice)."""

    launch: Launch
    details: dict[str, Any] = field(default_factory=dict)


class Contender(Protocol):
    """A variant or a peer. `accumulate` is the type WGMMA or mma.sync adds up in."""

    name: str
    label: str
    kind: str
    accumulate: str

    def prepare(self, shape: Shape, layout: Layout, operands: Operands, seconds: Callable[[Launch], float]) -> Prepared:
        """Everything that may be done before timing. `seconds` times a candidate. Raises Skip."""
        ...


class Progress(Protocol):
    def note(self, text: str) -> None: ...

    def step(self, text: str) -> None: ...


class Quiet:
    """Progress that says nothing."""

    def note(self, text: str) -> None: ...

    def step(self, text: str) -> None: ...


@dataclass
class _Ready:
    """A contender ready to be timed on one shape: steps of `calls` calls each, rotated over the operand sets."""

    steps: list[Callable[[], None]]
    calls: int
    method: str
    estimate_s: float

    def take(self, count: int) -> list[Callable[[], None]]:
        return [self.steps[i % len(self.steps)] for i in range(count)]


class Run:
    """One run of a suite into `record`, which is written by `save` every few seconds; the caller writes the end."""

    def __init__(
        self,
        device: Any,
        suite: Suite,
        effort: Effort,
        contenders: Sequence[Contender],
        layout: Layout,
        record: dict[str, Any],
        save: Callable[[], None],
        progress: Progress | None = None,
    ):
        self.device, self.suite, self.effort = device, suite, effort
        self.contenders, self.layout = list(contenders), layout
        self.record, self._write, self.progress = record, save, progress or Quiet()
        self.started = self._saved = device.now()
        self._seconds_before = record.get("seconds") or 0.0
        self._prepared: dict[tuple, Prepared] = {}
        drop_cut_rounds(record)

    def save(self) -> None:
        """Write the record, unless it was written just before: a long run's file takes a while to write."""
        if self.device.now() - self._saved >= SAVE_EVERY_S:
            self._write()
            self._saved = self.device.now()

    def save_time(self) -> None:
        """Seconds that the run has taken, those before it was stopped included."""
        self.record["seconds"] = round(self._seconds_before + self.device.now() - self.started, 1)

    # What the record holds

    def _rounds_done(self, phase: str, shape: Shape) -> int:
        return 1 + max(
            (m["round"] for m in self.record["measurements"] if m["phase"] == phase and m["shape"] == list(shape.mnk)),
            default=-1,
        )

    def _fits(self, shape: Shape) -> list[Contender]:
        """Contenders that were not skipped on this shape."""
        out = {s["contender"] for s in self.record["skipped"] if s["shape"] in (None, list(shape.mnk))}
        return [c for c in self.contenders if c.name not in out]

    def _skip(self, contender: Contender, shape: Shape | None, reason: str) -> None:
        mnk = list(shape.mnk) if shape else None
        self.record["skipped"].append({"contender": contender.name, "shape": mnk, "reason": reason})
        self.progress.note(f"{contender.name} skipped{f' on {shape}' if shape else ''}: {reason}")
        self.save()

    # Phases

    def measure(self) -> None:
        """Everything: the board at rest, then bursts on all shapes while it is cool, then sustained blocks."""
        if "idle" not in self.record["conditions"]:
            idle = measure_idle(self.device.sensors, self.device.now, self.device.sleep)
            self.record["conditions"]["idle"] = asdict(idle)
            self.save()
        idle = Idle(**self.record["conditions"]["idle"])
        if self.suite.memory_bound:
            self._ceilings()
        waits = Waits(self.effort.idle_cap_s, self.effort.idle_total_s, self.effort.rest_s)
        wanted = (("burst", self.effort.burst_rounds), ("sustained", self.effort.sustained_rounds))
        phases = [(phase, rounds) for phase, rounds in wanted if rounds]
        for index, (phase, rounds) in enumerate(phases):
            share = (self._left() * 0.5) if index + 1 < len(phases) else self._left()
            deadline = self.device.now() + share
            for place, shape in enumerate(self.suite.shapes):
                left = len(self.suite.shapes) - place
                until = self.device.now() + max(0.0, deadline - self.device.now()) / left
                if self._rounds_done(phase, shape) < min(rounds, LEAST_ROUNDS) or self._left() > 0:
                    self._phase(phase, shape, rounds, until, idle, waits)

    def _ceilings(self) -> None:
        """Read bandwidth over as many bytes as each shape's A and B have, rotated like them."""
        done = {c["bytes"] for c in self.record["ceilings"]}
        for nbytes in sorted({s.input_bytes() for s in self.suite.shapes} - done):
            self.progress.note(f"read ceiling over {nbytes / 1e6:.0f} MB")
            sets = min(MAX_SETS, max(2, -(-L2_FACTOR * self.device.l2_bytes // nbytes)))
            found = self.device.read_ceiling(nbytes, sets)
            self.record["ceilings"].append({"bytes": nbytes, **found})
            self.save()
        self.device.release()

    def _left(self) -> float:
        return self.effort.budget_s - (self.device.now() - self.started)

    def _phase(self, phase: str, shape: Shape, rounds: int, until: float, idle: Idle, waits: Waits) -> None:
        first = self._rounds_done(phase, shape)
        most = rounds * MOST_TIMES if self.effort.goal else rounds
        if first >= rounds and (first >= most or self._narrow(phase, shape)):
            return
        ready = self._prepare(shape, phase)
        names = list(ready)
        order = stats.interleave(len(names), rounds, most)
        if phase == "sustained" and names:
            self._warm(ready)
        longest = 0.0
        for number in range(first, most):
            begin = self.device.now()
            if number >= rounds and (self._narrow(phase, shape) or (phase == "burst" and waits.used_up)):
                break
            if number >= LEAST_ROUNDS and begin + longest > until:
                if number < rounds:
                    self.progress.note(f"{phase} {shape}: {number} of {rounds} rounds fit the time")
                break
            for position, which in enumerate(order[number]):
                name = names[which]
                self.progress.step(f"{phase} {shape} round {number + 1} {name}")
                one = ready[name]
                entry = self._burst(one, idle, waits) if phase == "burst" else self._sustained(one)
                self.record["measurements"].append(
                    {
                        "phase": phase,
                        "shape": list(shape.mnk),
                        "contender": name,
                        "round": number,
                        "position": position,
                        "of": len(names),
                        "method": one.method,
                        "calls_per_sample": one.calls,
                        **entry,
                    }
                )
                self.save()
            longest = max(longest, self.device.now() - begin)
        del ready
        self.device.release()

    def _narrow(self, phase: str, shape: Shape) -> bool:
        """Whether every ratio is known as well as wished."""
        ratios = [f.ratio for f in tables.figures(self.record, phase, shape).values() if f.ratio]
        return all(ratio.half_width <= self.effort.goal for ratio in ratios)

    def _prepare(self, shape: Shape, phase: str) -> dict[str, _Ready]:
        """Operands, and every contender that takes part: prepared, checked (once a shape), made into steps."""
        sets = sets_needed(shape, self.device.l2_bytes)
        operands = self.device.operands(shape, self.layout, sets)
        checked = {(c["contender"], *c["shape"]) for c in self.record["checks"]}
        launches: dict[str, tuple[Launch, float]] = {}
        for contender in self._fits(shape):
            self.progress.note(f"preparing {contender.name} on {shape}")
            seconds = functools.partial(self._quick_seconds, operands)
            try:
                # Once a shape: what was chosen between candidates is the same in bursts and under sustained load.
                key = (contender.name, *shape.mnk)
                if key not in self._prepared:
                    self._prepared[key] = contender.prepare(shape, self.layout, operands[0], seconds)
                prepared = self._prepared[key]
                self._as_before_the_stop(contender, shape, prepared)
                if (contender.name, *shape.mnk) not in checked:
                    distance = self.device.check(prepared.launch, operands[0], contender.accumulate)
                    self.record["checks"].append(
                        {
                            "contender": contender.name,
                            "shape": list(shape.mnk),
                            "accumulate": contender.accumulate,
                            **distance,
                            "details": prepared.details,
                        }
                    )
                launches[contender.name] = prepared.launch, self._quick_seconds(operands, prepared.launch)
            except Exception as error:
                self._failed(contender, shape, error)
                continue
            self.save()
        # One method for all on a shape: what is timed as a graph has no gaps between its calls.
        in_graphs = any(estimate < GRAPH_BELOW_S for _, estimate in launches.values())
        ready = {}
        for contender in (c for c in self.contenders if c.name in launches):
            try:
                ready[contender.name] = self._steps(*launches[contender.name], operands, in_graphs)
            except Exception as error:
                self._failed(contender, shape, error)
        return ready

    def _as_before_the_stop(self, contender: Contender, shape: Shape, prepared: Prepared) -> None:
        """A resumed run must not add another configuration's times to those it has. Raises RuntimeError."""
        before, now = tables.configuration(self.record, contender.name, shape), prepared.details.get("config")
        if before is not None and before != now:
            raise RuntimeError(f"was measured with {before} before the run was stopped, and now it would be {now}")

    def _failed(self, contender: Contender, shape: Shape, error: Exception) -> None:
        """Whatever one contender cannot do or does wrong, the others are still measured."""
        if isinstance(error, Skip):
            self._skip(contender, shape, str(error))
            return
        reason = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
        self.record["failed"].append({"contender": contender.name, "shape": list(shape.mnk), "reason": reason})
        self._skip(contender, shape, f"not timed, {reason}")

    def _quick_seconds(self, operands: Sequence[Operands], launch: Launch) -> float:
        """Median seconds of a few calls after one that is not counted: enough to choose between candidates."""
        calls = [functools.partial(launch, o.a, o.b, o.out) for o in operands]
        self.device.elapsed(calls[:1])
        first = self.device.elapsed(calls[:2])
        count = min(50, max(4, math.ceil(0.02 / max(first[-1], 1e-6))))
        eager = stats.median(self.device.elapsed([calls[i % len(calls)] for i in range(count)]))
        return eager if eager >= GRAPH_BELOW_S else self._graph(calls, eager).estimate_s

    def _steps(self, launch: Launch, estimate: float, operands: Sequence[Operands], in_graphs: bool) -> _Ready:
        calls = [functools.partial(launch, o.a, o.b, o.out) for o in operands]
        return self._graph(calls, estimate) if in_graphs else _Ready(calls, 1, "events", estimate)

    def _graph(self, calls: list[Callable[[], None]], estimate: float) -> _Ready:
        """Calls in a CUDA graph that lasts SAMPLE_S, by the estimate: eager, they would show the host's pace.

        Every operand set comes equally often, so that no call finds in the L2 what the one before it left there.
        """
        count = len(calls) * math.ceil(SAMPLE_S / estimate / len(calls))

        def all_calls() -> None:
            for i in range(count):
                calls[i % len(calls)]()

        replay = self.device.capture(all_calls)
        replays = self.device.elapsed([replay] * 3)
        return _Ready([replay], count, "graph", stats.median(replays[1:]) / count)

    def _burst(self, ready: _Ready, idle: Idle, waits: Waits) -> dict[str, Any]:
        before = wait_idle(self.device.sensors, idle, waits, self.device.now, self.device.sleep)
        with self.device.sensors.recorded() as readings:
            begin = self.device.now()
            samples = self.device.elapsed(ready.take(self.effort.burst_calls))
            end = self.device.now()
        board = summary(readings, begin, end, clock=statistics.median)
        return {"before": before, "samples_s": _short(samples), "board": board}

    def _chunk(self, ready: _Ready) -> int:
        """Steps between two events of a block."""
        return max(1, round(CHUNK_S / (ready.estimate_s * ready.calls)))

    def _load(self, ready: _Ready, seconds: float) -> tuple[list[float], int]:
        """Run for at least `seconds`; seconds of each chunk, and the steps of one chunk."""
        size = self._chunk(ready)
        steps = ready.take(size)

        def chunk() -> None:
            for step in steps:
                step()

        count = max(1, math.ceil(LOAD_MARGIN * seconds / (ready.estimate_s * ready.calls * size)))
        return self.device.elapsed([chunk] * count), size

    def _warm(self, ready: dict[str, _Ready]) -> None:
        """Bring the board to its state under load, with the contenders themselves."""
        self.progress.step("warming")
        for one in ready.values():
            self._load(one, self.effort.warm_s / len(ready))

    def _sustained(self, ready: _Ready) -> dict[str, Any]:
        with self.device.sensors.recorded() as readings:
            lead, size = self._load(ready, self.effort.lead_s)
            # Under load a call takes longer than at first: count the calls of the block by what it takes now.
            ready.estimate_s = lead[-1] / (size * ready.calls)
            begin = self.device.now()
            samples, size = self._load(ready, self.effort.block_s)
            end = self.device.now()
        board = summary(readings, begin, end)
        return {
            "samples_s": _short(samples),
            "steps_per_sample": size,
            "seconds": sum(samples),
            "wall_s": end - begin,
            "board": board,
        }


def _short(samples: Sequence[float]) -> list[float]:
    """To the tenth of a nanosecond: events tell half a microsecond."""
    return [round(s, 10) for s in samples]


def drop_cut_rounds(record: dict[str, Any]) -> int:
    """Take measurements of rounds that were not finished out of a record; how many were dropped."""
    by_round: dict[tuple, list[dict[str, Any]]] = {}
    for entry in record["measurements"]:
        by_round.setdefault((entry["phase"], *entry["shape"], entry["round"]), []).append(entry)
    cut = {key for key, entries in by_round.items() if len(entries) < entries[0]["of"]}
    kept = [e for e in record["measurements"] if (e["phase"], *e["shape"], e["round"]) not in cut]
    dropped = len(record["measurements"]) - len(kept)
    record["measurements"] = kept
    return dropped


def steps_total(suite: Suite, effort: Effort, contenders: int) -> int:
    """Measurements that a whole run makes, for a progress bar."""
    rounds = effort.burst_rounds + effort.sustained_rounds
    return len(suite.shapes) * contenders * rounds + (len(suite.shapes) if effort.sustained_rounds else 0)


def names(contenders: Iterable[Contender]) -> list[str]:
    return [c.name for c in contenders]
