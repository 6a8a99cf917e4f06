"""The `compile` suite: seconds until a kernel can be called, compiled anew and from the disk cache.

Each figure is taken in a process of its own with a cache folder of its own; no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf import results
from perf.device import versions

REPEATS = 3

CHILD = """
import json, sys, time
begin = time.perf_counter()
import cutlass.cute, torch, tvm_ffi
from cute_matmul import registry
from cute_matmul.compile import compile_kernel
registry.get(sys.argv[1]).load()
imported = time.perf_counter()
kernel = compile_kernel(sys.argv[1], None, sys.argv[2])
kernel.function
ready = time.perf_counter()
print(json.dumps({"import_s": imported - begin, "ready_s": ready - imported,
                  "from_cache": kernel.from_cache, "config": str(kernel.config)}))
"""


def _child(variant: str, dtype: str, cache: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "CUTE_MATMUL_CACHE": cache,
        "PYTHONPATH": os.pathsep.join([str(results.ROOT), *_path()]),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, variant, dtype], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{variant} did not compile:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _path() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def measure(variant: str, dtype: str, repeats: int = REPEATS) -> dict[str, Any]:
    """Cold and cached seconds of a variant's default configuration, `repeats` times each."""
    entry: dict[str, Any] = {"phase": "compile", "variant": variant, "dtype": dtype}
    entry |= {"cold_s": [], "cached_s": [], "import_s": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="cute_matmul-compile-") as cache:
            cold, cached = _child(variant, dtype, cache), _child(variant, dtype, cache)
        if cold["from_cache"] or not cached["from_cache"]:
            raise RuntimeError(f"{variant}: expected a compile and then a cache hit, got {cold} and {cached}")
        entry["config"] = cold["config"]
        entry["cold_s"].append(cold["ready_s"])
        entry["cached_s"].append(cached["ready_s"])
        entry["import_s"].append(cached["import_s"])
    return entry


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def run(variants: Sequence[str], options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure, write the result, print its table."""
    from cute_matmul import registry

    started = results.now()
    record = results.begin(
        "compile",
        started,
        command,
        machine={"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        versions=versions(),
        conditions={"dtype": options.dtype, "a_major": "k", "b_major": "k"},
        quick=options.quick,
        partial=bool(options.variants or options.shape),
    )
    path = results.new_path(options.results, started, "cpu", "compile", options.dtype)
    for name in variants:
        if options.dtype not in registry.get(name).dtypes:
            record["skipped"].append({"contender": name, "shape": None, "reason": f"does not take {options.dtype}"})
            continue
        print(f"compiling {name}", file=sys.stderr, flush=True)
        record["measurements"].append(measure(name, options.dtype, 1 if options.quick else REPEATS))
        results.write_atomically(path, results.dump(record))
    results.end(record)
    results.write_atomically(path, results.dump(record))
    from perf import tables

    print(tables.report(record))
    print(f"\n{path}")
    return 0
