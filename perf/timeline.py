"""What each warp of a CTA did when, on the GPU: python perf/timeline.py v3 [--shape 1024x1024x1024].

Records the ranges that V3 and above name (`hopper.traced`) with the DSL's own in-kernel event tracing, run-iket. The
ranges are compiled away in every other build. The names are those of the emulator's timeline (`python -m
cute_matmul trace`): producer, consumer, epilogue and V6's store for the roles, wait for an mbarrier inside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:  # run as a script. NOTE: this folder on the path would put profile.py in the standard one's place
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from perf import results, stats
from perf.device import Layout, versions
from perf.suites import Shape

TICK_NS = 32
"""Granularity of the tracing's timestamps (CuTe DSL guide, IKET profiling, Timestamp Semantics)."""

LIMIT_S = 300

WARPS = 4
"""Of a warp group."""


def command(variant: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """run-iket around one launch of a variant, keeping one CTA."""
    return [
        *(sys.executable, "-m", "iket.cli.main", "--output-dir", str(folder), "--clobber", "profile"),
        *("--enabled-cluster", options.cluster, "--postprocess", "all", "--"),
        *(sys.executable, str(Path(__file__).resolve()), "--child", variant, "--shape", options.shape),
        *("--dtype", options.dtype, *(["--config", options.config] if options.config else [])),
    ]


def ranges(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Every range of every launch: name, CTA and warp, start and end in nanoseconds from the first one's start."""
    names, places = trace["stringTable"], trace["locationTable"]
    found: list[dict[str, Any]] = []
    for launch in trace["launches"]:
        for entry in launch.get("ranges", []):
            for place in dict.fromkeys(entry["warpLocIdxs"]):  # where it began and where it ended, mostly one warp
                found.append(
                    {
                        "kernel": launch["kernelName"],
                        "name": names[entry["rangeNameIdx"]],
                        "warp": places[place]["warpId"],
                        "cta": list(places[place]["ctaId"]),
                        "start": entry["startTs"],
                        "end": entry["endTs"],
                    }
                )
    first = min((r["start"] for r in found), default=0)
    return [{**r, "start": r["start"] - first, "end": r["end"] - first} for r in found]


def table(found: Iterable[dict[str, Any]], style: str = "simple") -> str:
    """How often each range occurs on a warp and how long it lasts, by warp group: medians over its warps."""
    from tabulate import tabulate

    warps: dict[tuple, dict[int, list[float]]] = {}  # CTA, warp group, range -> warp -> durations
    for r in found:
        group = warps.setdefault((tuple(r["cta"]), r["warp"] // WARPS, r["name"]), {})
        group.setdefault(r["warp"], []).append(r["end"] - r["start"])
    rows = []
    for (cta, _, name), of in sorted(warps.items()):
        times, sums = ([f(values) for values in of.values()] for f in (len, sum))
        longest = [max(values) for values in of.values()]
        middle = stats.median([value for values in of.values() for value in values])
        named = f"{min(of)} to {max(of)}" if len(of) > 1 else str(min(of))
        figures = (middle, stats.median(longest), stats.median(sums))
        rows.append([str(cta), named, name, f"{stats.median(times):g}", *(f"{figure:,.0f}" for figure in figures)])
    headers = ["CTA", "warps", "range", "times", "median ns", "longest ns", "sum ns"]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def save(options: argparse.Namespace, found: list[dict[str, Any]]) -> Path:
    """Write the ranges as a result, with what the recording was of."""
    import torch

    from cute_matmul.compile import compile_kernel

    layout, started, gpu = Layout(options.dtype), results.now(), torch.cuda.get_device_name()
    kernel = compile_kernel(options.variant, options.config, layout.dtype, layout.a_major, layout.b_major)
    record = results.begin(
        "timeline",
        started,
        ["perf/timeline.py", *sys.argv[1:]],
        machine={"gpu": gpu},
        versions=versions(),
        conditions=asdict(layout),
        shapes=[Shape.parse(options.shape)],
    )
    record["measurements"].append(
        {
            "phase": "timeline",
            "variant": options.variant,
            "config": str(kernel.config),
            "ptx": kernel.fingerprint,  # of the kernel without ranges
            "shape": list(Shape.parse(options.shape).mnk),
            "ranges": found,
        }
    )
    results.end(record)
    path = results.new_path(options.results, started, gpu, f"timeline-{options.variant}", layout.dtype)
    results.write_atomically(path, results.dump(record))
    return path


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="perf/timeline.py", description="An in-kernel timeline of a variant on the GPU.")
    top.add_argument("variant")
    top.add_argument("--shape", default="1024x1024x1024", metavar="MxNxK")
    top.add_argument("--dtype", default="float16", help="float16 (fp16) or bfloat16 (bf16)")
    top.add_argument("--config", metavar="TILE", help="such as 128x128x64,stages=3 (default: the variant's)")
    top.add_argument("--cluster", default="0,0,0", metavar="X,Y,Z", help="the cluster, or CTA, to keep (default 0,0,0)")
    top.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    top.add_argument("--output", type=Path, metavar="FOLDER", help="default build/timeline-<variant>; it is emptied")
    top.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0: recorded; 1: it could not be, or the kernel names no ranges."""
    options = parser().parse_args(arguments)
    options.dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(options.dtype, options.dtype)
    if options.child:
        from perf.profile import launches

        launches(options.variant, Shape.parse(options.shape), Layout(options.dtype), options.config, 1)
        return 0
    folder = (options.output or results.ROOT / "build" / f"timeline-{options.variant}").resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The traced kernel must be compiled in the traced process, not read from the cache.
    environment = {**os.environ, "CUTE_MATMUL_CACHE": "0"}
    try:
        done = subprocess.run(command(options.variant, options, folder), env=environment, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"perf/timeline.py: run-iket was stopped after {LIMIT_S} s", file=sys.stderr)
        return 1
    traces = sorted(folder.glob("*.trace.json"))
    if done.returncode or not traces:
        print(f"perf/timeline.py: run-iket ended with {done.returncode} and {len(traces)} traces", file=sys.stderr)
        return 1
    found = [r for path in traces for r in ranges(json.loads(path.read_text(encoding="utf-8")))]
    if not found:
        print(f"perf/timeline.py: {options.variant} names no ranges; V3 and above do", file=sys.stderr)
        return 1
    path = save(options, found)
    print(table(found))
    print(f"\n{path}")
    print(f"\ntimes to {TICK_NS} ns; open at https://ui.perfetto.dev:")
    for path in sorted(folder.glob("*.pftrace")):
        print(f"  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
