"""The board's own sensors through NVML: energy counter, power, clocks, temperature, why the clock is held.

`Recorder` reads them in a thread while something else is timed; `wait_idle` waits for the state at rest.
Times are `time.perf_counter()` seconds, of the host.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from perf import stats

READ_EVERY_S = 0.01
"""Between readings of a recorder. The energy counter moves every 20 to 100 ms; its steps are found to 10 ms."""

IDLE_CLOCK_MARGIN_MHZ = 30
IDLE_POWER_MARGIN_W = 50.0
IDLE_TEMPERATURE_MARGIN_C = 3

REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML API reference, nvmlClocksEventReasons)."""


@dataclass(frozen=True)
class Reading:
    """One look at the board. energy_j counts up since the driver was loaded. None: the board does not say."""

    time: float
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    energy_j: float | None = None
    reasons: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**{k: v for k, v in asdict(self).items() if k not in ("time", "reasons")}, "held_by": held_by([self])}


def held_by(readings: Sequence[Reading]) -> list[str]:
    """Names of the reasons for which the clock was held in any of the readings."""
    bits = 0
    for reading in readings:
        bits |= reading.reasons
    return [name for bit, name in REASONS.items() if bits & bit]


class Sensors(Protocol):
    """What the runner needs of a board's sensors; NVML here, a model of a board in simulation.py."""

    reason_absent: str | None

    def read(self) -> Reading: ...

    def recorded(self) -> Any:
        """Context manager that gives a list which holds the readings of its duration after it."""


class Nvml:
    """Sensors of one GPU. Where NVML is missing, readings hold only None and `reason_absent` says why."""

    def __init__(self, uuid: str | None = None, index: int = 0):
        self.reason_absent: str | None = None
        try:
            import pynvml
        except ImportError:
            self.reason_absent = "NVML not read: the package nvidia-ml-py is not installed"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            only = pynvml.nvmlDeviceGetCount() == 1
            if only or not uuid:
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(0 if only else index)
            else:
                uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            self.reason_absent = f"NVML not read: {error}"
            return
        events = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        handle = self._handle
        self._queries: dict[str, Callable[[], float]] = {
            "clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "energy_j": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
            "reasons": lambda: (events or pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle),
        }
        for name in list(self._queries):
            if self._ask(name) is None:
                del self._queries[name]

    def _ask(self, name: str) -> float | None:
        try:
            return self._queries[name]()
        except self._nvml.NVMLError:
            return None

    def read(self) -> Reading:
        if self.reason_absent:
            return Reading(time.perf_counter())
        values = {name: self._ask(name) for name in self._queries}
        values["reasons"] = int(values.get("reasons") or 0)
        # NOTE: the time after the readings, since the last of them (energy) is the one that is interpolated.
        return Reading(time=time.perf_counter(), **values)  # type: ignore[arg-type]

    def limits(self) -> dict[str, Any]:
        """Driver, power limit in W and highest SM clock in MHz, for the record of a run."""
        if self.reason_absent:
            return {"sensors": self.reason_absent}
        nvml, found = self._nvml, {}
        for name, ask in (
            ("driver", nvml.nvmlSystemGetDriverVersion),
            ("power_limit_w", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3),
            ("max_clock_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM)),
            ("memory_clock_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_MEM)),
        ):
            try:
                found[name] = ask()
            except nvml.NVMLError as error:
                found[name] = f"not read: {error}"
        return found

    @contextmanager
    def recorded(self) -> Iterator[list[Reading]]:
        recorder = Recorder(self)
        recorder.start()
        try:
            yield recorder.readings
        finally:
            recorder.stop()


class Recorder(threading.Thread):
    """Reads the sensors every READ_EVERY_S from `start()` to `stop()`."""

    def __init__(self, sensors: Sensors):
        super().__init__(name="sensors", daemon=True)
        self.readings: list[Reading] = []
        self._sensors = sensors
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.is_set():
            self.readings.append(self._sensors.read())
            self._stop_asked.wait(READ_EVERY_S)

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()


@dataclass(frozen=True)
class Idle:
    """The board at rest, with the process's context open and nothing running."""

    clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    seconds: float = 0.0

    def reached(self, reading: Reading) -> bool:
        """Whether clock, temperature and power are back at these values, within the margins above."""
        pairs = (
            (reading.power_w, self.power_w, IDLE_POWER_MARGIN_W),
            (reading.clock_mhz, self.clock_mhz, IDLE_CLOCK_MARGIN_MHZ),
            (reading.temperature_c, self.temperature_c, IDLE_TEMPERATURE_MARGIN_C),
        )
        return all(a is None or b is None or a <= b + margin for a, b, margin in pairs)


@dataclass
class Waits:
    """How long bursts wait for the idle state: `least_s` to `cap_s` each; beyond `least_s`, `total_s` together."""

    cap_s: float
    total_s: float
    least_s: float = 1.0
    spent_s: float = field(default=0.0, init=False)

    @property
    def used_up(self) -> bool:
        return self.spent_s >= self.total_s

    @property
    def allowed_s(self) -> float:
        return max(self.least_s, min(self.cap_s, self.least_s + self.total_s - self.spent_s))

    def count(self, waited_s: float) -> None:
        """Take a wait off what is left."""
        self.spent_s += max(0.0, waited_s - self.least_s)


def measure_idle(sensors: Sensors, now: Callable[[], float], sleep: Callable[[float], None]) -> Idle:
    """The board's values at rest: waits up to 8 s for the clock to settle, then takes 2 s of readings."""
    if sensors.reason_absent:
        return Idle(None, None, None)
    start, steady_since, last = now(), now(), sensors.read().clock_mhz
    while now() - start < 8 and now() - steady_since < 1.5:
        sleep(0.1)
        clock = sensors.read().clock_mhz
        if clock != last:
            last, steady_since = clock, now()
    with sensors.recorded() as readings:
        begin = now()
        sleep(2.0)
        end = now()
    clocks = [r.clock_mhz for r in readings if r.clock_mhz is not None]
    temperatures = [r.temperature_c for r in readings if r.temperature_c is not None]
    return Idle(
        clock_mhz=statistics.median(clocks) if clocks else None,
        temperature_c=statistics.median(temperatures) if temperatures else None,
        power_w=_idle_power(readings, begin, end),
        seconds=end - start,
    )


def _idle_power(readings: Sequence[Reading], begin: float, end: float) -> float | None:
    """From the energy counter; where it did not move often enough, the mean of the power sensor."""
    energy = [(r.time, r.energy_j) for r in readings if r.energy_j is not None]
    try:
        return stats.counter_between(energy, begin, end) / (end - begin)
    except ValueError:
        return stats.mean_between([(r.time, r.power_w) for r in readings if r.power_w is not None], begin, end)


def wait_idle(
    sensors: Sensors, idle: Idle, waits: Waits, now: Callable[[], float], sleep: Callable[[float], None]
) -> dict[str, Any]:
    """Wait until the board is back at `idle`; says how long it took, whether it got there, and its last reading."""
    allowed, start = waits.allowed_s, now()
    reading = sensors.read()
    if sensors.reason_absent:
        sleep(waits.least_s)
        return {"waited_s": now() - start, "reached": None, **reading.as_dict()}
    # NOTE: the clock reads its idle value milliseconds after work ends, while the power limiter still remembers it:
    # bursts 0.3 s apart came out at two speeds, 20% apart. Its memory shows in the sensor's averaged power.
    while now() - start < waits.least_s or (not idle.reached(reading) and now() - start < allowed):
        sleep(0.05)
        reading = sensors.read()
    waits.count(now() - start)
    return {"waited_s": now() - start, "reached": idle.reached(reading), **reading.as_dict()}


def summary(
    readings: Sequence[Reading],
    begin: float,
    end: float,
    clock: Callable[[Sequence[float]], float] = statistics.fmean,
) -> dict[str, Any]:
    """Clock, mean power and temperature, energy, and what held the clock, from `begin` to `end`.

    clock: the mean under steady load, statistics.median where the first readings are still those of the idle board.
    """
    within = [r for r in readings if begin <= r.time <= end] or list(readings)

    def mean(name: str) -> float | None:
        values = [getattr(r, name) for r in within if getattr(r, name) is not None]
        typical = clock if name == "clock_mhz" else statistics.fmean
        return round(typical(values), 2) if values else None

    energy = [(r.time, r.energy_j) for r in readings if r.energy_j is not None]
    try:
        joules: float | None = stats.counter_between(energy, begin, end)
    except ValueError:
        joules = None
    return {
        "clock_mhz": mean("clock_mhz"),
        "power_w": mean("power_w"),
        "temperature_c": mean("temperature_c"),
        "energy_j": joules,
        "held_by": held_by(within),
        "readings": len(within),
    }
