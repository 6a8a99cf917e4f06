"""Why a kernel is as fast as it is: python perf/profile.py v2 [v3 ...], by Nsight Compute.

Runs `ncu --clock-control none` on one launch of each variant and prints duration, what the tensor cores, DRAM and L2
were doing, why warps did not issue, bank conflicts, registers and the clock. Saved to perf/results like any result.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if (
    not __package__
):  # run as a script. NOTE: this folder on the path would put this file in the standard profile's place
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from perf import results
from perf.device import Layout, versions
from perf.suites import LADDER_SHAPE, Shape

WARM_LAUNCHES = 2
"""Launches before the profiled one."""

LIMIT_S = 300
"""Of Nsight Compute's run of one variant, a dozen replays of a kernel: beyond it something hangs."""

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)


@dataclass(frozen=True)
class Row:
    """One line of the table: its label, the metrics that may hold it (the first that was collected counts), the unit
    it is printed in, and what the collected value is multiplied by for that."""

    label: str
    metrics: tuple[str, ...]
    unit: str = ""
    digits: int = 1


ROWS = (
    Row("duration", ("gpu__time_duration.sum", "gpu__time_duration.avg"), "us"),
    Row(
        "SM clock",
        (
            "smsp__cycles_elapsed.avg.per_second",
            "sm__cycles_elapsed.avg.per_second",
            "gpc__cycles_elapsed.avg.per_second",
        ),
        "MHz",
        0,
    ),
    Row(
        "tensor pipe busy",
        (
            # WGMMA and mma.sync both; the hmma form counts WGMMA too.
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
            "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        ),
        "%",
    ),
    Row("SM throughput", ("sm__throughput.avg.pct_of_peak_sustained_elapsed",), "%"),
    Row("DRAM throughput", ("dram__throughput.avg.pct_of_peak_sustained_elapsed",), "%"),
    Row("DRAM bytes per second", ("dram__bytes.sum.per_second", "dram__bytes_read.sum.per_second"), "GB/s", 0),
    Row(
        "L2 throughput",
        ("lts__throughput.avg.pct_of_peak_sustained_elapsed", "lts__t_sectors.avg.pct_of_peak_sustained_elapsed"),
        "%",
    ),
    Row("L2 hit rate", ("lts__t_sector_hit_rate.pct",), "%"),
    Row(
        "shared bank conflicts",
        (
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
            "l1tex__data_bank_conflicts_pipe_lsu.sum",
            "smsp__l1tex_data_bank_conflicts_pipe_lsu_mem_shared.sum",
        ),
        "",
        0,
    ),
    Row("registers per thread", ("launch__registers_per_thread",), "", 0),
    Row("shared memory per CTA", ("launch__shared_mem_per_block_dynamic", "launch__shared_mem_per_block"), "KB"),
    Row("CTAs", ("launch__grid_size",), "", 0),
    Row("warps active per SM", ("sm__warps_active.avg.per_cycle_active",), "", 1),
    Row("issue slots used", ("smsp__issue_active.avg.pct", "sm__inst_issued.avg.pct_of_peak_sustained_active"), "%"),
)

STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active(?:\.ratio)?")
NOT_STALLS = ("selected",)
STALLS_SHOWN = 4

SCALE = {
    # unit printed -> units of ncu and their factors
    "us": {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6},
    "MHz": {"hz": 1e-6, "cycle/s": 1e-6, "cycle/us": 1.0, "mhz": 1.0, "cycle/ns": 1e3, "ghz": 1e3},
    "GB/s": {"byte/s": 1e-9, "kbyte/s": 1e-6, "mbyte/s": 1e-3, "gbyte/s": 1.0, "tbyte/s": 1e3, "byte/ns": 1.0},
    "KB": {"byte/block": 1e-3, "kbyte/block": 1.0, "byte": 1e-3, "kbyte": 1.0},
}


class Unavailable(RuntimeError):
    """Nsight Compute cannot be used here, and why."""


def parse(text: str) -> list[dict[str, tuple[float | str, str]]]:
    """Kernels of `ncu --csv --page raw`: for each, metric -> (value, unit).

    The first rows that are not a program's own output are the names, then the units, then a row per kernel.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise Unavailable(f"ncu printed no table; its output ends:\n{text[-2000:]}")
    rows = list(csv.reader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))))
    names, units, kernels = rows[0], rows[1], rows[2:]
    found = []
    for kernel in kernels:
        values: dict[str, tuple[float | str, str]] = {}
        for name, unit, value in zip(names, units, kernel, strict=True):
            try:
                values[name] = (float(value.replace(",", "")), unit)
            except ValueError:
                values[name] = (value, unit)
        found.append(values)
    return found


def digest(kernel: dict[str, tuple[float | str, str]]) -> dict[str, Any]:
    """The rows of the table and the stalls out of one kernel's metrics. A row that was not collected is None."""
    found: dict[str, Any] = {}
    for row in ROWS:
        found[row.label] = None
        for metric in row.metrics:
            value, unit = kernel.get(metric, (None, ""))
            if not isinstance(value, float):
                continue
            factor = 1.0
            if row.unit in SCALE:
                known = unit.lower().replace("/second", "/s").replace("/nsecond", "/ns").replace("/usecond", "/us")
                if known not in SCALE[row.unit]:
                    continue
                factor = SCALE[row.unit][known]
            found[row.label] = {"value": value * factor, "unit": row.unit, "metric": metric}
            break
    stalls = {}
    for metric, (value, _) in kernel.items():
        match = STALL.fullmatch(metric)
        if match and isinstance(value, float) and not match.group(1).endswith("_not_issued"):
            stalls[match.group(1)] = value
    found["stalls"] = dict(sorted(stalls.items(), key=lambda item: -item[1]))
    return found


def table(measurements: Iterable[dict[str, Any]], style: str = "simple") -> str:
    """Variants side by side, one a column."""
    from tabulate import tabulate

    measurements = list(measurements)
    rows = []
    for row in ROWS:
        cells = []
        for m in measurements:
            entry = m["figures"][row.label]
            cells.append("not collected" if entry is None else f"{entry['value']:,.{row.digits}f} {row.unit}".rstrip())
        rows.append([row.label, *cells])
    for place in range(STALLS_SHOWN):
        cells = []
        for m in measurements:
            stalls = [item for item in m["figures"]["stalls"].items() if item[0] not in NOT_STALLS]
            cells.append(f"{stalls[place][0]} {stalls[place][1]:.2f}" if place < len(stalls) else "")
        rows.append(["warps stalled per issue, by reason" if place == 0 else "", *cells])
    headers = ["", *(f"{m['variant']} {m['config']}" for m in measurements)]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def command(ncu: str, variant: str, options: argparse.Namespace) -> list[str]:
    """What is run for one variant."""
    sections = [part for section in SECTIONS for part in ("--section", section)]
    extra = ["--metrics", ",".join(options.metrics)] if options.metrics else []
    return [
        ncu,
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        *sections,
        *extra,
        "--kernel-name",
        f"regex:{options.kernel or f'matmul_{variant}_kernel'}",
        "--launch-skip",
        str(WARM_LAUNCHES),
        "--launch-count",
        "1",
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        variant,
        "--shape",
        options.shape,
        "--dtype",
        options.dtype,
        *(["--config", options.config] if options.config else []),
    ]


def wanted_metrics(ncu: str) -> list[str]:
    """The metrics of ROWS and the stalls that this ncu knows; those it does not know would make it refuse to run."""
    asked = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    known = set(re.findall(r'^"?([a-z0-9_]+__[a-z0-9_]+)"?', asked.stdout, re.M))
    if asked.returncode or not known:
        return []
    metrics = [metric for row in ROWS for metric in row.metrics if metric.partition(".")[0] in known]
    stalls = [name for name in known if STALL.fullmatch(name) and "_not_issued_" not in name]
    return [*metrics, *(f"{name}.ratio" for name in sorted(stalls))]


def launches(variant: str, shape: Shape, layout: Layout, config: str | None, count: int) -> str:
    """Launch a variant `count` times on a GPU, on standard normal operands; the configuration that was used."""
    from cute_matmul.compile import compile_kernel
    from perf.device import CudaDevice

    device = CudaDevice()
    kernel = compile_kernel(variant, config, layout.dtype, layout.a_major, layout.b_major)
    for operands in device.operands(shape, layout, 2) * (count // 2 + 1):
        kernel(operands.a, operands.b, operands.out)
        count -= 1
        if count == 0:
            break
    device.synchronize()
    return str(kernel.config)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="perf/profile.py", description="Nsight Compute's account of variants.")
    top.add_argument("variants", nargs="+", metavar="variant")
    top.add_argument("--shape", default=str(LADDER_SHAPE), metavar="MxNxK")
    top.add_argument("--dtype", default="float16", help="float16 (fp16) or bfloat16 (bf16)")
    top.add_argument("--config", metavar="TILE", help="such as 128x128x64,stages=3 (default: the variant's)")
    top.add_argument("--kernel", metavar="REGEX", help="kernel's name (default: matmul_<variant>_kernel)")
    top.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    top.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0: profiled; 1: Nsight Compute or a GPU is missing, or some variant could not be."""
    options = parser().parse_args(arguments)
    options.dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(options.dtype, options.dtype)
    shape, layout = Shape.parse(options.shape), Layout(options.dtype)
    if options.child:
        print(launches(options.variants[0], shape, layout, options.config, WARM_LAUNCHES + 1))
        return 0
    try:
        return _profile(options, shape, layout)
    except Unavailable as error:
        print(f"perf/profile.py: {error}", file=sys.stderr)
        return 1


def _profile(options: argparse.Namespace, shape: Shape, layout: Layout) -> int:
    from cute_matmul.compile import compile_kernel

    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if not ncu:
        raise Unavailable("Nsight Compute (ncu) is not on the PATH; it comes with the CUDA toolkit")
    options.metrics = wanted_metrics(ncu)
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False).stdout
    started = results.now()
    record = results.begin(
        "profile",
        started,
        ["perf/profile.py", *sys.argv[1:]],
        machine={},
        versions={**versions(), "ncu": (re.findall(r"Version (\S+)", version) or ["unknown"])[0]},
        conditions=asdict(layout),
        shapes=[shape],
    )
    path = None
    for variant in options.variants:
        print(f"profiling {variant}", file=sys.stderr, flush=True)
        try:
            kernel = compile_kernel(variant, options.config, layout.dtype, layout.a_major, layout.b_major)
            kernels = _collect(command(ncu, variant, options), variant)
        except (Unavailable, ValueError) as error:
            print(f"perf/profile.py: {error}", file=sys.stderr)
            record["failed"].append({"contender": variant, "shape": list(shape.mnk), "reason": str(error)[:300]})
            continue
        record["machine"]["gpu"] = str(kernels[0].get("device__attribute_display_name", ("unknown", ""))[0])
        record["measurements"].append(
            {
                "phase": "profile",
                "variant": variant,
                "config": str(kernel.config),
                "ptx": kernel.fingerprint,
                "shape": list(shape.mnk),
                "figures": digest(kernels[0]),
                "raw": {name: list(value) for name, value in kernels[0].items()},
            }
        )
        if path is None:
            path = results.new_path(options.results, started, record["machine"]["gpu"], "profile", layout.dtype)
        results.write_atomically(path, results.dump(record))
    if path is None:
        return 1
    results.end(record)
    results.write_atomically(path, results.dump(record))
    print(table(record["measurements"]))
    print(f"\n{path}")
    return 1 if record["failed"] else 0


def _collect(arguments: Sequence[str], variant: str) -> list[dict[str, tuple[str, str]]]:
    """What Nsight Compute found of the variant's one kernel. Raises Unavailable."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"ncu on {variant} was stopped after {LIMIT_S} s") from error
    if done.returncode:
        raise Unavailable(f"ncu failed on {variant} ({done.returncode}):\n{(done.stdout + done.stderr)[-3000:]}")
    kernels = parse(done.stdout)
    if len(kernels) != 1:
        raise Unavailable(f"expected one kernel of {variant}, ncu saw {len(kernels)}")
    return kernels


if __name__ == "__main__":
    sys.exit(main())
