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
from pathlib import Path
from typing import Any

if not __package__:  # run as a script. NOTE: this folder on the path would put profile.py in the standard one's place
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from perf import results, stats
from perf.device import Layout
from perf.suites import Shape

TICK_NS = 32
"""Granularity of the tracing's timestamps (CuTe DSL guide, IKET profiling, Timestamp Semantics)."""

LIMIT_S = 300


def command(variant: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """run-iket around one launch of a variant, keeping one CTA."""
    return [
        *(sys.executable, "-m", "iket.cli.main", "--output-dir", str(folder), "--clobber", "profile"),
        *("--enabled-cluster", options.cluster, "--postprocess", "all", "--"),
        *(sys.executable, str(Path(__file__).resolve()), "--child", variant, "--shape", options.shape),
        *("--dtype", options.dtype, *(["--config", options.config] if options.config else [])),
    ]


def ranges(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Every range of every launch: name, warp of its CTA, start and end in the trace's own time."""
    names, places = trace["stringTable"], trace["locationTable"]
    found = []
    for launch in trace["launches"]:
        for entry in launch.get("ranges", []):
            for place in dict.fromkeys(entry["warpLocIdxs"]):  # where it began and where it ended, mostly one warp
                found.append(
                    {
                        "kernel": launch["kernelName"],
                        "name": names[entry["rangeNameIdx"]],
                        "warp": places[place]["warpId"],
                        "cta": tuple(places[place]["ctaId"]),
                        "start": entry["startTs"],
                        "end": entry["endTs"],
                    }
                )
    return found


def table(found: Iterable[dict[str, Any]]) -> str:
    """How often each range occurs on each warp, and how long it lasts."""
    from tabulate import tabulate

    groups: dict[tuple, list[float]] = {}
    for r in found:
        groups.setdefault((r["cta"], r["warp"], r["name"]), []).append(r["end"] - r["start"])
    rows = [
        [str(cta), warp, name, len(values), f"{stats.median(values):,.0f}", f"{sum(values):,.0f}"]
        for (cta, warp, name), values in sorted(groups.items())
    ]
    return tabulate(rows, headers=["CTA", "warp", "range", "times", "median ns", "sum ns"], disable_numparse=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="perf/timeline.py", description="An in-kernel timeline of a variant on the GPU.")
    top.add_argument("variant")
    top.add_argument("--shape", default="1024x1024x1024", metavar="MxNxK")
    top.add_argument("--dtype", default="float16", help="float16 (fp16) or bfloat16 (bf16)")
    top.add_argument("--config", metavar="TILE", help="such as 128x128x64,stages=3 (default: the variant's)")
    top.add_argument("--cluster", default="0,0,0", metavar="X,Y,Z", help="the cluster, or CTA, to keep (default 0,0,0)")
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
    print(table(found))
    print(f"\ntimes to {TICK_NS} ns; open at https://ui.perfetto.dev:")
    for path in sorted(folder.glob("*.pftrace")):
        print(f"  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
