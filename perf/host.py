"""The `host` suite: microseconds of host time per call, eager, with nothing queued before it.

`matmul(a, b, out=out)` beside torch.mm(a, b, out=out), the compiled function alone and an empty TVM-FFI launch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter_ns
from typing import Any

from perf import results, stats, suites
from perf.device import CudaDevice, Layout, versions

TURN = 100
"""Calls of one contender before it is the next one's turn."""

KEPT = 2000
"""Samples kept in the result, evenly taken from the sorted ones: the percentiles stay."""


def time_calls(
    calls: dict[str, Callable[[], Any]], count: int, synchronize: Callable[[], None]
) -> dict[str, list[float]]:
    """Microseconds of each of `count` calls per contender, in turns of TURN; the queue is empty before each."""
    taken: dict[str, list[int]] = {name: [] for name in calls}
    names = list(calls)
    turns = -(-count // TURN)
    for order in stats.interleave(len(names), turns):
        for which in order:
            call, into = calls[names[which]], taken[names[which]]
            call()
            synchronize()
            for _ in range(TURN):
                begin = perf_counter_ns()
                call()
                end = perf_counter_ns()
                into.append(end - begin)
                synchronize()
    return {name: [ns / 1e3 for ns in values[:count]] for name, values in taken.items()}


def thin(values: Sequence[float], keep: int = KEPT) -> list[float]:
    """At most `keep` of the sorted values, from the smallest to the largest in even steps of rank."""
    ordered = sorted(values)
    if len(ordered) <= keep:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (keep - 1))] for i in range(keep)]


def run(variants: Sequence[str], options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure, write the result, print its table."""
    if options.simulate:
        raise ValueError("the host suite times this machine's host; it cannot be simulated")
    import torch

    from cute_matmul import matmul, registry
    from cute_matmul.compile import compile_kernel
    from perf.empty_kernel import compile_empty

    device = CudaDevice()
    layout = Layout(options.dtype, options.a_major, options.b_major)
    shapes = tuple(suites.Shape.parse(text) for text in options.shape) if options.shape else suites.HOST_SHAPES
    count = suites.HOST_CALLS // 10 if options.quick else suites.HOST_CALLS
    empty = compile_empty(layout.dtype)
    started = results.now()
    labels = {"empty": "empty kernel through TVM-FFI", "torch": "torch.mm(a, b, out=out)"}
    labels |= {f"{name} kernel": f"{name}'s compiled function" for name in variants}
    labels |= {name: f"matmul(a, b, out=out, variant={name!r})" for name in variants}
    if registry.default().name in variants:
        labels["default"] = "matmul(a, b, out=out)"
    record = results.begin(
        "host",
        started,
        command,
        machine=device.describe(),
        versions=versions(),
        conditions={**asdict(layout), "calls": count, "data": "standard normal"},
        shapes=shapes,
        contenders=[{"name": n, "label": t, "kind": "host", "accumulate": "fp32"} for n, t in labels.items()],
        quick=options.quick,
        partial=bool(options.variants or options.shape),
    )
    path = results.new_path(options.results, started, device.name, "host", layout.dtype)
    for shape in shapes:
        (o,) = device.operands(shape, layout, 1)
        a, b, out, b_nk = o.a, o.b, o.out, o.b.t()
        calls: dict[str, Callable[[], Any]] = {"torch": lambda a=a, b=b, out=out: torch.mm(a, b, out=out)}
        if (layout.a_major, layout.b_major) == ("k", "k"):
            calls["empty"] = lambda a=a, b=b_nk, out=out: empty(a, b, out)
        else:
            square = torch.empty((32, 32), device="cuda", dtype=out.dtype)
            calls["empty"] = lambda x=square: empty(x, x, x)
        for name in variants:
            kernel = compile_kernel(name, None, layout.dtype, layout.a_major, layout.b_major).function
            calls[f"{name} kernel"] = lambda f=kernel, a=a, b=b, out=out: f(a, b, out)
            calls[name] = lambda v=name, a=a, b=b, out=out: matmul(a, b, out=out, variant=v)
        if "default" in labels:
            calls["default"] = lambda a=a, b=b, out=out: matmul(a, b, out=out)
        for call in calls.values():
            call()
        device.synchronize()
        taken = time_calls({name: calls[name] for name in labels}, count, device.synchronize)
        for name, values in taken.items():
            record["measurements"].append(
                {"phase": "host", "shape": list(shape.mnk), "contender": name, "samples_us": thin(values)}
            )
        results.write_atomically(path, results.dump(record))
    results.end(record)
    results.write_atomically(path, results.dump(record))
    from perf import tables

    print(tables.report(record))
    print(f"\n{path}", file=sys.stdout)
    return 0
