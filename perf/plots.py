"""Plots of results, as SVG that reads on a light and on a dark page and comes out the same every time.

Colours and text are of middle lightness on a transparent ground. A plot carries the digest of what it shows, so
that it can be told from the file alone, without drawing it, whether it is stale.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perf import stats, tables
from perf.suites import Shape

INK = "#768390"
VARIANT, PEER, SECOND = "#3d8fd1", "#c97b2d", "#9a7fd1"
LINES = ("#3d8fd1", "#c97b2d", "#3f9e5f", "#9a7fd1", "#cc5c7c", "#8a8f3c", "#4aa5a5", "#b0723c", "#7d8aa5")
TOP_MHZ = 1980
"""Highest SM clock of an H200, for a peak line where the board did not tell its own."""

Record = dict[str, Any]
Data = dict[str, Any]


def digest(name: str, data: Data) -> str:
    """Of what a plot shows and of how it is drawn."""
    text = json.dumps([name, data], sort_keys=True) + Path(__file__).read_text(encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stored_digest(path: Path) -> str | None:
    """The digest that an SVG carries; None where there is no file or none in it."""
    try:
        found = re.search(r"digest:([0-9a-f]{32})", path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found.group(1) if found else None


# What each plot shows: plain numbers


def _peak(record: Record, clock: float | None = None) -> float:
    clock = clock or record["machine"].get("max_clock_mhz") or TOP_MHZ
    return round(stats.tensor_peak(record["machine"]["sm_count"], clock) / 1e12, 1)


def _kind(record: Record, name: str) -> str:
    return next(c["kind"] for c in record["contenders"] if c["name"] == name)


def _bars(record: Record) -> list[dict[str, Any]]:
    shape = tables.shapes_of(record)[0]
    burst, sustained = (tables.figures(record, phase, shape) for phase in ("burst", "sustained"))
    rows = []
    for name, b in burst.items():
        s = sustained.get(name)
        note = " (fp16 sums)" if tables.accumulate_of(record, name) == "fp16" else ""
        rows.append(
            {
                "name": name + note,
                "kind": _kind(record, name),
                "burst": round(b.tflops, 4),
                "sustained": round(s.tflops, 4) if s else None,
                "gross": round(s.energy.gross_pj, 6) if s and s.energy else None,
                "net": round(s.energy.net_pj, 6) if s and s.energy else None,
            }
        )
    return rows


def ladder_data(records: dict[str, Record]) -> Data | None:
    record = records.get("ladder")
    if not record:
        return None
    rows = _bars(record)
    cublas = next((r["burst"] for r in rows if r["name"] == tables.BASELINE), None)
    shape = str(tables.shapes_of(record)[0])
    return {"rows": rows, "cublas": cublas, "peak": _peak(record), "shape": shape, "gpu": record["machine"]["gpu"]}


def energy_data(records: dict[str, Record]) -> Data | None:
    data = ladder_data(records)
    rows = [r for r in data["rows"] if r["gross"] is not None] if data else []
    return {**data, "rows": rows} if data and rows else None


def sustained_data(records: dict[str, Record]) -> Data | None:
    data = ladder_data(records)
    rows = [r for r in data["rows"] if r["sustained"] is not None] if data else []
    return {**data, "rows": rows} if data and rows else None


def size_data(records: dict[str, Record]) -> Data | None:
    record = records.get("square")
    if not record:
        return None
    lines: dict[str, list[list[float]]] = {}
    for shape in tables.shapes_of(record):
        for name, f in tables.figures(record, "burst", shape).items():
            lines.setdefault(name, []).append([shape.m, round(f.tflops, 1)])
    return {"lines": lines, "peak": _peak(record), "gpu": record["machine"]["gpu"]}


def roofline_data(records: dict[str, Record]) -> Data | None:
    """All shapes of decode, model and square by their arithmetic intensity, under what the board can do."""
    points: dict[str, list[list[float]]] = {}
    ceiling, peak, gpu = None, None, None
    for suite in ("decode", "model", "square"):
        record = records.get(suite)
        if not record:
            continue
        gpu, peak = record["machine"]["gpu"], _peak(record)
        if record.get("ceilings"):
            ceiling = round(max(c["bytes_per_s"] for c in record["ceilings"]) / 1e12, 3)
        for shape in tables.shapes_of(record):
            for name, f in tables.figures(record, "burst", shape).items():
                points.setdefault(name, []).append([round(_intensity(shape), 2), round(f.tflops, 2)])
    if ceiling is None or not points:
        return None
    return {"points": points, "ceiling": ceiling, "peak": peak, "gpu": gpu}


def _intensity(shape: Shape) -> float:
    return shape.flops / shape.bytes()


# Drawing


def _new(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "svg.hashsalt": "cute_matmul",
            "svg.fonttype": "none",
            "font.family": ["sans-serif"],
            "font.sans-serif": ["DejaVu Sans"],
            "font.size": 10,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
        }
    )
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    return figure, axes


def _grid(axes: Any, axis: str) -> None:
    axes.grid(axis=axis, color=INK, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def _rows(axes: Any, names: Sequence[str]) -> list[int]:
    places = list(range(len(names)))
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    _grid(axes, "x")
    return places


def draw_ladder(data: Data) -> Any:
    rows = data["rows"]
    figure, axes = _new(8, 0.42 * len(rows) + 1.6)
    places = _rows(axes, [r["name"] for r in rows])
    values = [r["burst"] for r in rows]
    axes.barh(places, values, 0.66, color=[VARIANT if r["kind"] == "variant" else PEER for r in rows])
    for place, value in zip(places, values, strict=True):
        over = f"  {value / data['cublas']:.2f}x" if data["cublas"] else ""
        axes.text(value - data["peak"] * 0.01, place, f"{value:.0f}{over}", va="center", ha="right", color="white")
    marks = [(data["peak"], "peak", "--")] + ([(data["cublas"], "cuBLAS", ":")] if data["cublas"] else [])
    for value, text, style in marks:
        axes.axvline(value, color=INK, linestyle=style, linewidth=1, zorder=0.5)  # behind the bars and their figures
        axes.text(value, 1.01, text, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    axes.set_xlim(0, data["peak"] * 1.04)
    axes.set_xlabel(f"TFLOP/s in the first calls, {data['shape']}, {data['gpu']}")
    return figure


def draw_sustained(data: Data) -> Any:
    rows = data["rows"]
    figure, axes = _new(8, 0.42 * len(rows) + 1.6)
    places = _rows(axes, [r["name"] for r in rows])
    for place, r in zip(places, rows, strict=True):
        axes.plot([r["sustained"], r["burst"]], [place, place], color=INK, linewidth=2, alpha=0.5, zorder=1)
        axes.text(r["burst"] + data["peak"] * 0.012, place, f"{r['sustained'] / r['burst'] - 1:+.0%}", va="center")
    axes.scatter([r["burst"] for r in rows], places, color=VARIANT, s=48, zorder=2, label="first calls")
    axes.scatter(
        [r["sustained"] for r in rows], places, color=PEER, s=48, marker="D", zorder=2, label="under sustained load"
    )
    axes.set_xlim(0, max(r["burst"] for r in rows) * 1.12)
    axes.set_xlabel(f"TFLOP/s, {data['shape']}, {data['gpu']}")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def draw_energy(data: Data) -> Any:
    rows = data["rows"]
    figure, axes = _new(8, 0.42 * len(rows) + 1.6)
    places = _rows(axes, [r["name"] for r in rows])
    net = [r["net"] for r in rows]
    idle = [r["gross"] - r["net"] for r in rows]
    axes.barh(places, net, 0.66, color=VARIANT, label="above the idle board")
    axes.barh(places, idle, 0.66, left=net, color=SECOND, label="the idle board's share")
    most = max(r["gross"] for r in rows)
    for place, r in zip(places, rows, strict=True):
        axes.text(r["gross"] + most * 0.01, place, f"{r['gross']:.2f}", va="center")
    axes.set_xlim(0, most * 1.1)
    axes.set_xlabel(f"pJ per FLOP under sustained load, {data['shape']}, {data['gpu']}")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def draw_size(data: Data) -> Any:
    figure, axes = _new(8, 4.4)
    for colour, (name, points) in zip(LINES, data["lines"].items(), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=name)
    axes.axhline(data["peak"], color=INK, linestyle="--", linewidth=1)
    sizes = sorted({size for points in data["lines"].values() for size, _ in points})
    axes.text(sizes[0], data["peak"] * 0.985, "peak", va="top")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(s) for s in sizes], rotation=45)
    axes.minorticks_off()
    axes.set_ylim(0, data["peak"] * 1.05)
    axes.set_xlabel(f"M = N = K, {data['gpu']}")
    axes.set_ylabel("TFLOP/s in the first calls")
    axes.legend(loc="lower right")
    _grid(axes, "both")
    return figure


def draw_roofline(data: Data) -> Any:
    figure, axes = _new(8, 4.8)
    xs = [x for points in data["points"].values() for x, _ in points]
    ys = [y for points in data["points"].values() for _, y in points]
    low, high = min(xs) / 1.5, max(xs) * 1.5
    ridge = data["peak"] / data["ceiling"]
    axes.plot([low, ridge, high], [low * data["ceiling"], data["peak"], data["peak"]], color=INK, linewidth=1.2)
    at = (low * ridge) ** 0.5
    axes.text(at / 1.15, at * data["ceiling"], f"{data['ceiling']:.2f} TB/s read", ha="right", va="bottom")
    axes.text(high, data["peak"] * 1.06, f"{data['peak']:.0f} TFLOP/s", ha="right", va="bottom")
    markers = "osD^vPX*<"
    for colour, marker, (name, points) in zip(LINES, markers, data["points"].items(), strict=False):
        axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=22, alpha=0.85, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(ys) / 2, data["peak"] * 2)
    axes.set_xlabel(f"FLOP per byte of A, B and C, {data['gpu']}")
    axes.set_ylabel("TFLOP/s in the first calls")
    axes.legend(loc="lower right")
    _grid(axes, "both")
    return figure


PLOTS: dict[str, tuple[Callable[[dict[str, Record]], Data | None], Callable[[Data], Any], str]] = {
    "ladder": (ladder_data, draw_ladder, "TFLOP/s of each rung beside cuBLAS and the tensor cores' peak"),
    "size": (size_data, draw_size, "TFLOP/s over the size of a square problem"),
    "roofline": (roofline_data, draw_roofline, "TFLOP/s over arithmetic intensity, under the board's ceilings"),
    "burst-sustained": (sustained_data, draw_sustained, "TFLOP/s in the first calls and under sustained load"),
    "energy": (energy_data, draw_energy, "Energy of one FLOP, with and without the idle board's share"),
}
"""name: (numbers from the results by suite, drawing of them, what it shows)."""


def svg(name: str, data: Data) -> str:
    """The plot as SVG text. Needs matplotlib (the extra `plot`)."""
    from matplotlib import pyplot

    figure = PLOTS[name][1](data)
    out = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Title": PLOTS[name][2], "Description": f"digest:{digest(name, data)}"}
    figure.savefig(out, format="svg", transparent=True, metadata=metadata)
    pyplot.close(figure)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
