"""The `precision` suite: how far products are from float64, per type of accumulation.

Errors are |C - R| in units of the output's standard deviation, sqrt(K) for standard normal operands, so that they
compare over K. What rounding the output to its dtype costs by itself is a row of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from perf import results, suites
from perf.device import CudaDevice, Layout, versions

SHAPE = suites.Shape(2048, 2048, 8192)


def distances(out: Any, exact: Any, k: int) -> dict[str, float]:
    """Mean, 99th percentile and largest |out - exact| / sqrt(k); out and exact are (M, N), exact in float64."""
    import torch

    error = ((out.double() - exact).abs() / k**0.5).flatten()
    rank = min(error.numel() - 1, round(0.99 * (error.numel() - 1)))
    return {
        "mean": error.mean().item(),
        "p99": torch.sort(error).values[rank].item(),
        "max": error.max().item(),
    }


def run(variants: Sequence[str], options: argparse.Namespace, command: Sequence[str]) -> int:
    """Measure, write the result, print its table."""
    if options.simulate:
        raise ValueError("the precision suite needs the tensor cores' own arithmetic; it cannot be simulated")
    from cute_matmul import matmul, registry
    from cute_matmul.problem import reference, torch_matmul

    device = CudaDevice()
    layout = Layout(options.dtype, options.a_major, options.b_major)
    shapes = tuple(suites.Shape.parse(text) for text in options.shape) if options.shape else (SHAPE,)
    started = results.now()
    measurements = []
    accumulators = {name: registry.get(name).accumulator for name in variants}
    for shape in shapes:
        (o,) = device.operands(shape, layout, 1)
        exact = reference(o.a, o.b)
        products = {name: matmul(o.a, o.b, out=o.out, variant=name).clone() for name in variants}
        products |= {"cublas": torch_matmul(o.a, o.b), "rounded once": exact.to(o.out.dtype)}
        for name, out in products.items():
            measurements.append(
                {
                    "phase": "precision",
                    "shape": list(shape.mnk),
                    "contender": name,
                    "accumulate": accumulators.get(name, {"cublas": "float32"}.get(name, "float64")),
                    **distances(out, exact, shape.k),
                }
            )
    record = results.begin(
        "precision",
        started,
        command,
        machine=device.describe(),
        versions=versions(),
        conditions={**asdict(layout), "data": "standard normal"},
        shapes=shapes,
        quick=options.quick,
        partial=bool(options.variants or options.shape),
    )
    record["measurements"] = measurements
    results.end(record)
    path = results.new_path(options.results, started, device.name, "precision", layout.dtype)
    results.write_atomically(path, results.dump(record))
    from perf import tables

    print(tables.report(record))
    print(f"\n{path}")
    return 0
