"""A board and contenders that exist only in numbers, so that the whole runner runs with no GPU.

`run.py --simulate` rehearses a suite (order, duration, what is written); the tests run on it. Its results say
"simulated" and render.py takes no figure from them.

The model: calls take flops / speed at the present clock; the clock rises at once under load and falls with a time
constant to a floor when power is at the limit; temperature follows power; the energy counter moves in steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from perf.device import Launch, Layout, Mismatch, Operands
from perf.measure import Prepared, Skip
from perf.peers import named
from perf.power import Reading
from perf.suites import Shape

IDLE_MHZ, TOP_MHZ = 345.0, 1980.0
IDLE_W, LIMIT_W = 75.0, 700.0
IDLE_C = 30.0
ENERGY_STEP_S = 0.05
TICK_S = 0.01


class Board:
    """Time, clock, heat and energy; also the sensors."""

    reason_absent: str | None = None

    def __init__(self, seed: int = 0, noise: float = 0.001):
        self.random = random.Random(seed)
        self.noise = noise
        self.time = 1000.0
        self.clock = IDLE_MHZ
        self.load = 0.0
        self.power = IDLE_W
        self.temperature = IDLE_C
        self.energy = 5e6
        self._logs: list[list[Reading]] = []

    def pass_time(self, seconds: float, watts: float) -> None:
        """Let time go by at a draw of `watts` (at the top clock)."""
        left = seconds
        while left > 0:
            step = min(TICK_S, left)
            busy = watts > IDLE_W
            # Two seconds of load bring the clock to what the limit allows.
            self.load = min(1.0, self.load + step / 2) if busy else max(0.0, self.load - step)
            floor = TOP_MHZ * min(1.0, (LIMIT_W / watts) ** 0.5)
            self.clock = TOP_MHZ + (floor - TOP_MHZ) * self.load if busy else IDLE_MHZ
            self.power = min(watts, LIMIT_W)
            target = IDLE_C + 40 * (self.power - IDLE_W) / (LIMIT_W - IDLE_W)
            self.temperature += (target - self.temperature) * min(1.0, step / 1.5)
            self.energy += self.power * step
            self.time += step
            left -= step
            for log in self._logs:
                log.append(self.read())

    def read(self) -> Reading:
        steps = math.floor(self.time / ENERGY_STEP_S) * ENERGY_STEP_S
        return Reading(
            time=self.time,
            clock_mhz=round(self.clock),
            power_w=round(self.power, 1),
            temperature_c=round(self.temperature),
            energy_j=round(self.energy - self.power * (self.time - steps), 3),  # the counter's unit: 1 mJ
            reasons=0x4 if self.power >= LIMIT_W else (0x1 if self.power <= IDLE_W else 0),
        )

    @contextmanager
    def recorded(self) -> Iterator[list[Reading]]:
        log = [self.read()]
        self._logs.append(log)
        try:
            yield log
        finally:
            self._logs.remove(log)


@dataclass
class SimulatedDevice:
    """What CudaDevice offers, on a Board. interrupt_after: raise KeyboardInterrupt at that call of `elapsed`."""

    seed: int = 0
    noise: float = 0.001
    interrupt_after: int | None = None
    name: str = "Simulated H200"
    sm_count: int = 132
    l2_bytes: int = 60 * 2**20
    simulated: bool = True
    board: Board = field(init=False)

    def __post_init__(self) -> None:
        self.board = Board(self.seed, self.noise)
        self.sensors = self.board
        self._timed = 0

    def describe(self) -> dict[str, Any]:
        return {
            "gpu": self.name,
            "board": "simulated",
            "sm_count": self.sm_count,
            "l2_bytes": self.l2_bytes,
            "driver": "simulated",
        }

    def now(self) -> float:
        return self.board.time

    def sleep(self, seconds: float) -> None:
        self.board.pass_time(seconds, IDLE_W)

    def synchronize(self) -> None: ...

    def release(self) -> None: ...

    def operands(self, shape: Shape, layout: Layout, sets: int, seed: int = 0) -> list[Operands]:
        return [Operands((shape, i), (shape, i), (shape, i)) for i in range(sets)]

    def check(self, launch: Launch, operands: Operands, accumulate: str) -> dict[str, Any]:
        launch(operands.a, operands.b, operands.out)
        if getattr(launch, "keywords", {}).get("wrong"):
            raise Mismatch("wrong result: relative 1.0 (bound 0.001)")
        return {"relative": 2e-4, "relative_bound": 4e-4, "max_abs": 0.1}

    def elapsed(self, steps: Sequence[Callable[[], None]]) -> list[float]:
        self._timed += 1
        if self.interrupt_after is not None and self._timed > self.interrupt_after:
            raise KeyboardInterrupt
        found = []
        for step in steps:
            begin = self.board.time
            step()
            found.append(self.board.time - begin)
        return found

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Runs the step once; a replay takes as long as that did, with noise, at the same mean power."""
        board = self.board
        time, energy = board.time, board.energy
        step()
        seconds, joules = board.time - time, board.energy - energy

        def replay() -> None:
            board.pass_time(seconds * math.exp(board.random.gauss(0, board.noise)), joules / seconds)

        return replay

    def read_ceiling(self, nbytes: int, sets: int) -> dict[str, Any]:
        seconds = nbytes / 4.5e12
        self.board.pass_time(10 * sets * seconds, 400.0)
        return {"bytes_per_s": 4.5e12, "method": "simulated", "read_bytes": nbytes, "sets": sets}


@dataclass
class SimulatedContender:
    """Takes flops / (speed * clock / top clock), at least the bytes' time and a microsecond; draws `watts`."""

    name: str
    label: str
    speed: float
    watts: float
    device: SimulatedDevice
    kind: str = "variant"
    accumulate: str = "fp32"
    config: str | None = None
    skip: str | None = None
    wrong: bool = False

    def prepare(self, shape: Shape, layout: Layout, operands: Operands, seconds: Callable[[Launch], float]) -> Prepared:
        if self.skip:
            raise Skip(self.skip)
        return Prepared(partial(self._call, shape, wrong=self.wrong), {"config": self.config or "simulated"})

    def _call(self, shape: Shape, a: Any, b: Any, out: Any, *, wrong: bool = False) -> None:
        board = self.device.board
        board.clock = max(board.clock, TOP_MHZ * 0.5)
        compute = shape.flops / (self.speed * board.clock / TOP_MHZ)
        seconds = max(compute, shape.bytes() / 4e12, 1e-6) * math.exp(board.random.gauss(0, board.noise))
        board.pass_time(seconds, self.watts)


_LADDER = {
    "v0": (280e12, 520.0),
    "v1": (560e12, 640.0),
    "v2": (590e12, 660.0),
    "v3": (640e12, 760.0),
    "v4": (720e12, 820.0),
    "v5": (770e12, 860.0),
    "v6": (830e12, 850.0),
    "cublas": (780e12, 900.0),
    "quack": (800e12, 850.0),
}


def contenders(
    device: SimulatedDevice, variants: Sequence[str], peers: Sequence[str], configs: Sequence[tuple[str, str]] = ()
) -> list[SimulatedContender]:
    """Contenders as `peers.build` makes them, with made-up speeds."""
    found = []
    for name, variant, config in [*named(variants, configs), *((peer, peer, None) for peer in peers)]:
        speed, watts = _LADDER.get(variant, (500e12, 700.0))
        accumulate = "fp16" if variant == "v6" else "fp32"
        kind = "peer" if variant in peers else "variant"
        found.append(SimulatedContender(name, variant, speed, watts, device, kind, accumulate, config))
    return found
