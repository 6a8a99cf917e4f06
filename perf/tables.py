"""From the raw samples of a result to the figures of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from perf import stats
from perf.stats import Energy, Ratio
from perf.suites import Shape

BASELINE = "cublas"

PLAIN, MARKDOWN = "simple", "github"


@dataclass(frozen=True)
class Figures:
    """One contender on one shape in one phase, over its rounds.

    seconds: per call, the median over rounds. spread: (largest - smallest) / median of the rounds. ratio: over the
    baseline. clock_mhz, power_w: means of the board. peak: fraction of the tensor cores' peak at that clock, under
    sustained load only (the sensor does not follow the clock within a burst).
    energy: of one FLOP. idle_reached: bursts that began with the board at rest, and how many there were.
    """

    name: str
    seconds: float
    tflops: float
    bytes_per_s: float
    rounds: int
    spread: float
    ratio: Ratio | None
    clock_mhz: float | None
    power_w: float | None
    peak: float | None
    energy: Energy | None
    idle_reached: tuple[int, int] | None
    method: str


def shapes_of(record: dict[str, Any]) -> list[Shape]:
    return [Shape(*s["mnk"], s["name"]) for s in record["shapes"]]


def label_of(record: dict[str, Any], name: str) -> str:
    return next(c["label"] for c in record["contenders"] if c["name"] == name)


def accumulate_of(record: dict[str, Any], name: str) -> str:
    return next(c["accumulate"] for c in record["contenders"] if c["name"] == name)


def seconds_per_call(entry: dict[str, Any]) -> float:
    """One measurement's seconds per call: a burst's median early sample, or a block's whole time over its calls."""
    per_sample = entry["calls_per_sample"] * entry.get("steps_per_sample", 1)
    if entry["phase"] == "burst":
        return stats.median(stats.before_the_limiter(entry["samples_s"])) / per_sample
    return sum(entry["samples_s"]) / (len(entry["samples_s"]) * per_sample)


def figures(record: dict[str, Any], phase: str, shape: Shape, baseline: str = BASELINE) -> dict[str, Figures]:
    """Every contender's figures on a shape in "burst" or "sustained", in the order of the run's contenders."""
    entries: dict[str, list[dict[str, Any]]] = {}
    for entry in record["measurements"]:
        if entry["phase"] == phase and entry["shape"] == list(shape.mnk):
            entries.setdefault(entry["contender"], []).append(entry)
    by_round = {name: {e["round"]: seconds_per_call(e) for e in found} for name, found in entries.items()}
    ratios = stats.ratio_intervals(by_round, baseline) if baseline in by_round else {}
    order = [c["name"] for c in record["contenders"] if c["name"] in entries]
    return {
        name: _figures(record, name, shape, entries[name], list(by_round[name].values()), ratios.get(name))
        for name in order
    }


def _figures(
    record: dict[str, Any],
    name: str,
    shape: Shape,
    entries: Sequence[dict[str, Any]],
    rounds: list[float],
    ratio: Ratio | None,
) -> Figures:
    seconds = stats.median(rounds)
    clock = _mean([e["board"]["clock_mhz"] for e in entries])
    idle_power = record["conditions"]["idle"]["power_w"]
    energies = []
    for entry in entries:
        joules = entry["board"]["energy_j"]
        if entry["phase"] == "sustained" and joules is not None and idle_power is not None:
            calls = len(entry["samples_s"]) * entry["calls_per_sample"] * entry["steps_per_sample"]
            energies.append(stats.energy_per_flop(joules, entry["wall_s"], calls * shape.flops, idle_power))
    energy = None
    if energies:
        energy = Energy(*(stats.median([getattr(e, f) for e in energies]) for f in ("gross_pj", "net_pj")))
    idle = [e["before"]["reached"] for e in entries if "before" in e]
    peak = stats.tensor_peak(record["machine"]["sm_count"], clock) if clock else None
    return Figures(
        name=name,
        seconds=seconds,
        tflops=shape.flops / seconds / 1e12,
        bytes_per_s=shape.bytes() / seconds,
        rounds=len(rounds),
        spread=stats.spread(rounds),
        ratio=ratio,
        clock_mhz=clock,
        power_w=_mean([e["board"]["power_w"] for e in entries]),
        peak=shape.flops / seconds / peak if peak and entries[0]["phase"] == "sustained" else None,
        energy=energy,
        idle_reached=(sum(map(bool, idle)), len(idle)) if idle else None,
        method=entries[0]["method"],
    )


def _mean(values: Sequence[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else None


# Cells


def ratio_text(ratio: Ratio | None, baseline: bool = False) -> str:
    """ "1.026 ±0.4%", with "tie" where the interval holds 1; "1" for the baseline itself."""
    if baseline:
        return "1"
    if ratio is None:
        return ""
    text = f"{ratio.value:.3f} ±{100 * ratio.half_width:.1f}%"
    return f"{text} tie" if ratio.tie else text


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}%"


def _energy(energy: Energy | None) -> str:
    return "" if energy is None else f"{energy.gross_pj:.3f} / {energy.net_pj:.3f}"


# Tables


def ladder(record: dict[str, Any], style: str = PLAIN) -> str:
    """Contenders of one shape, one a row: burst, sustained, energy. Fastest figures are not reordered."""
    parts = []
    for shape in shapes_of(record):
        burst, sustained = (figures(record, phase, shape) for phase in ("burst", "sustained"))
        headers = ["", "what", "adds in", "burst TFLOP/s", "over cuBLAS"]
        if sustained:
            headers += ["sustained TFLOP/s", "over cuBLAS", "of peak", "MHz", "W", "pJ/FLOP, less idle", "spread"]
        else:
            headers += ["MHz", "spread"]
        rows = []
        for name in [c["name"] for c in record["contenders"]]:
            b, s = burst.get(name), sustained.get(name)
            if b is None and s is None:
                continue
            base = name == BASELINE
            row = [name, label_of(record, name), accumulate_of(record, name)]
            row += [_number(b.tflops), ratio_text(b.ratio, base)] if b else ["", ""]
            if s:
                row += [_number(s.tflops), ratio_text(s.ratio, base), _percent(s.peak), _number(s.clock_mhz)]
                row += [_number(s.power_w), _energy(s.energy), _percent(s.spread, 1)]
            elif not sustained and b:
                row += [_number(b.clock_mhz), _percent(b.spread, 1)]
            rows.append(row)
        text = tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)
        parts.append(f"{_title(shape)}\n\n{text}")
    return "\n\n".join(parts)


def _title(shape: Shape) -> str:
    return f"M x N x K = {shape}" + (f" ({shape.name})" if shape.name else "")


def shapes(record: dict[str, Any], style: str = PLAIN, phase: str = "burst") -> str:
    """Shapes, one a row: TFLOP/s of every contender and its ratio over cuBLAS."""
    names = [c["name"] for c in record["contenders"]]
    headers = ["shape", "", *(f"{n} TFLOP/s" for n in names), *(f"{n} over cuBLAS" for n in names if n != BASELINE)]
    rows = []
    for shape in shapes_of(record):
        found = figures(record, phase, shape)
        if not found:
            continue
        row = [str(shape), shape.name]
        row += [_number(found[n].tflops) if n in found else "" for n in names]
        row += [ratio_text(found[n].ratio) if n in found else "" for n in names if n != BASELINE]
        rows.append(row)
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def decode(record: dict[str, Any], style: str = PLAIN) -> str:
    """Memory-bound shapes, one a row: time, bandwidth and how much of the read ceiling that is."""
    names = [c["name"] for c in record["contenders"]]
    ceilings = {c["bytes"]: c["bytes_per_s"] for c in record["ceilings"]}
    headers = ["shape", "", "MB read", "ceiling TB/s"]
    for n in names:
        headers += [f"{n} us", "TB/s", "of ceiling"]
    headers += [f"{n} over cuBLAS" for n in names if n != BASELINE]
    rows = []
    for shape in shapes_of(record):
        found = figures(record, "burst", shape)
        ceiling = ceilings.get(shape.input_bytes())
        row = [str(shape), shape.name, _number(shape.input_bytes() / 1e6)]
        row.append(_number(ceiling / 1e12 if ceiling else None, 2))
        for n in names:
            f = found.get(n)
            row += [_number(f.seconds * 1e6, 1), _number(f.bytes_per_s / 1e12, 2)] if f else ["", ""]
            row.append(_percent(f.bytes_per_s / ceiling) if f and ceiling else "")
        row += [ratio_text(found[n].ratio) if n in found else "" for n in names if n != BASELINE]
        rows.append(row)
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def host(record: dict[str, Any], style: str = PLAIN) -> str:
    """Microseconds of host time per call."""
    rows = []
    for entry in record["measurements"]:
        values = sorted(entry["samples_us"])
        floor = next(
            stats.median(e["samples_us"])
            for e in record["measurements"]
            if e["contender"] == "empty" and e["shape"] == entry["shape"]
        )
        middle = stats.median(values)
        rows.append(
            [
                str(Shape(*entry["shape"])),
                entry["contender"],
                label_of(record, entry["contender"]),
                _number(middle, 2),
                _number(middle - floor, 2),
                _number(values[len(values) // 10], 2),
                _number(values[len(values) * 9 // 10], 2),
            ]
        )
    headers = ["shape", "", "what", "us per call", "beyond empty", "10th", "90th percentile"]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def compile_times(record: dict[str, Any], style: str = PLAIN) -> str:
    """Seconds until a kernel can be called: compiled anew, and read from the disk cache by another process."""
    rows = [
        [
            e["variant"],
            e["config"],
            _number(stats.median(e["cold_s"]), 2),
            _number(1e3 * stats.median(e["cached_s"]), 1),
            _number(stats.median(e["import_s"]), 2),
        ]
        for e in record["measurements"]
    ]
    headers = ["variant", "config", "compile s", "from the cache ms", "imports before s"]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def precision(record: dict[str, Any], style: str = PLAIN) -> str:
    """Distance to the float64 product, in standard deviations of the output."""
    rows = [
        [str(Shape(*e["shape"])), e["contender"], e["accumulate"], *(f"{e[key]:.3g}" for key in ("mean", "p99", "max"))]
        for e in record["measurements"]
    ]
    headers = ["shape", "", "adds in", "mean error", "99th percentile", "largest"]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def commit_of(record: dict[str, Any]) -> str:
    """The commit measured, and whether the tree was other than it."""
    return (record["commit"] or "unknown")[:10] + ("" if record["clean"] else ", tree not clean")


def conditions(record: dict[str, Any]) -> str:
    """One paragraph: what was measured on what, and what a reader must know before quoting it."""
    machine, state = record["machine"], record["conditions"]
    where = machine["gpu"] if "gpu" in machine else f"No GPU: {machine['cores']} cores of {machine['processor']}"
    text = [f"{where}, {record['started'][:10]}, commit {commit_of(record)}"]
    if "driver" in machine:
        text.append(f"driver {machine['driver']}")
    text += [f"{package} {version}" for package, version in record["versions"].items() if package != "cute-matmul"]
    lines = [", ".join(text) + "."]
    if "dtype" in state:
        data = f" {state['data']}," if "data" in state else ""
        lines.append(f"{state['dtype']} in and out,{data} A {state['a_major']}-major, B {state['b_major']}-major.")
    before = [m["before"] for m in record["measurements"] if "before" in m]
    if before:
        rest, reached = state["idle"], sum(bool(b["reached"]) for b in before)
        at = ", ".join(f"{rest[k]:.0f} {unit}" for k, unit in _UNITS.items() if rest.get(k) is not None)
        began = [b.get("power_w") for b in before]
        power = f"; it read up to {max(began):.0f} W before a burst" if None not in began else ""
        lines.append(f"{reached} of {len(before)} bursts began with the board at rest ({at or 'not read'}{power}).")
    if record["quick"]:
        lines.append("A quick run.")
    if record["simulated"]:
        lines.insert(0, "SIMULATED: none of these figures was measured.")
    return " ".join(lines)


_UNITS = {"clock_mhz": "MHz", "temperature_c": "C", "power_w": "W"}


def body(record: dict[str, Any], style: str = PLAIN) -> str:
    """The table of a result's suite."""
    suite = record["suite"]
    if suite == "ladder":
        return ladder(record, style)
    if suite == "decode":
        return decode(record, style)
    if suite == "host":
        return host(record, style)
    if suite == "compile":
        return compile_times(record, style)
    if suite == "precision":
        return precision(record, style)
    parts = [f"Burst\n\n{shapes(record, style, 'burst')}"]
    if any(m["phase"] == "sustained" for m in record["measurements"]):
        parts.append(f"Sustained\n\n{shapes(record, style, 'sustained')}")
    return "\n\n".join(parts)


def report(record: dict[str, Any]) -> str:
    """What a run prints at its end: table, conditions, who was skipped and why."""
    lines = [body(record), "", conditions(record)]
    for skipped in record["skipped"]:
        where = f" on {'x'.join(map(str, skipped['shape']))}" if skipped["shape"] else ""
        lines.append(f"skipped {skipped['contender']}{where}: {skipped['reason']}")
    for check in record["checks"]:
        config = check["details"].get("config")
        if config:
            shape = "x".join(map(str, check["shape"]))
            lines.append(
                f"{check['contender']} on {shape}: {config} {check['details'].get('config_from', '')}".rstrip()
            )
    return "\n".join(lines)


def configuration(record: dict[str, Any], contender: str, shape: Shape) -> str | None:
    """The configuration that a contender ran with, None if it named none."""
    for check in record["checks"]:
        if check["contender"] == contender and tuple(check["shape"]) == shape.mnk:
            return check["details"].get("config")
    return None
