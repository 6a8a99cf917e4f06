"""The GPU, for the runner: operands, timing by events, graphs, correctness. The only module that calls torch.cuda."""

from __future__ import annotations

import hashlib
import itertools
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from perf.power import Nvml
from perf.suites import Shape

Launch = Callable[[Any, Any, Any], None]
"""Enqueues out (M, N) = a (M, K) @ b (K, N) on the current stream."""

L2_FACTOR = 3
"""Operand sets together hold at least this many times the L2, so that none is still there when it is used again."""

MAX_SETS = 256


@dataclass(frozen=True)
class Operands:
    """a (M, K), b (K, N) in their major orders, and an output (M, N) for them."""

    a: Any
    b: Any
    out: Any


@dataclass(frozen=True)
class Layout:
    """Input type by torch's name, and which dimension of A and of B has unit stride."""

    dtype: str = "float16"
    a_major: str = "k"
    b_major: str = "k"


class Mismatch(Exception):
    """A contender's result is wrong: it is not timed."""


class NoGpu(RuntimeError):
    """There is no Hopper GPU to measure."""


def sets_needed(shape: Shape, l2_bytes: int, element_bytes: int = 2) -> int:
    """Operand sets whose inputs together exceed the L2 by L2_FACTOR; at least 2, at most MAX_SETS."""
    return min(MAX_SETS, max(2, -(-L2_FACTOR * l2_bytes // max(1, shape.input_bytes(element_bytes)))))


class CudaDevice:
    """The current CUDA device. Raises NoGpu where there is none of compute capability 9.0."""

    simulated = False

    def __init__(self) -> None:
        import torch

        self._torch = torch
        if not torch.cuda.is_available():
            raise NoGpu("no CUDA GPU is visible to torch; perf/run.py measures on a Hopper GPU (H100, H200)")
        self._properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = (self._properties.major, self._properties.minor)
        if capability != (9, 0):
            raise NoGpu(f"{self._properties.name} has compute capability {capability}; these kernels need (9, 0)")
        torch.empty(1, device="cuda")
        torch.cuda.synchronize()
        self._uuid = str(getattr(self._properties, "uuid", ""))
        self.sensors = Nvml(self._uuid or None, torch.cuda.current_device())

    @property
    def name(self) -> str:
        return self._properties.name

    @property
    def sm_count(self) -> int:
        return self._properties.multi_processor_count

    @property
    def l2_bytes(self) -> int:
        return self._properties.L2_cache_size

    def describe(self) -> dict[str, Any]:
        """What a result must say of the machine."""
        return {
            "gpu": self.name,
            # Which board, not whose: two boards of one kind differ by more than two runs on one.
            "board": hashlib.sha256(self._uuid.encode()).hexdigest()[:12] if self._uuid else None,
            "sm_count": self.sm_count,
            "l2_bytes": self.l2_bytes,
            "memory_bytes": self._properties.total_memory,
            "cuda": self._torch.version.cuda,
            **self.sensors.limits(),
            "system": platform.platform(),
        }

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def release(self) -> None:
        """Give memory of operands that are no longer used back to the driver."""
        self._torch.cuda.empty_cache()

    def operands(self, shape: Shape, layout: Layout, sets: int, seed: int = 0) -> list[Operands]:
        """Standard normal operands, drawn on the device; outputs filled with nan."""
        torch = self._torch
        dtype = getattr(torch, layout.dtype)
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def draw(rows: int, columns: int, transposed: bool) -> Any:
            size = (columns, rows) if transposed else (rows, columns)
            values = torch.randn(size, generator=generator, device="cuda", dtype=dtype)
            return values.t() if transposed else values

        return [
            Operands(
                draw(shape.m, shape.k, layout.a_major == "m"),
                draw(shape.k, shape.n, layout.b_major == "k"),
                torch.full((shape.m, shape.n), float("nan"), device="cuda", dtype=dtype),
            )
            for _ in range(sets)
        ]

    def check(self, launch: Launch, operands: Operands, accumulate: str) -> dict[str, Any]:
        """Run once into a poisoned output and compare with the reference. Raises Mismatch with the distance.

        The bounds are those of `cute_matmul.problem` for the type the contender adds up in.
        """
        from cute_matmul import problem

        operands.out.fill_(float("nan"))
        launch(operands.a, operands.b, operands.out)
        self.synchronize()
        accumulator = {"fp16": "float16", "fp32": "float32"}[accumulate]
        found = problem.check(operands.out, operands.a, operands.b, accumulator=accumulator)
        if not found.ok:
            raise Mismatch(f"wrong result: {found} (with {accumulate} accumulation)")
        return {"relative": found.relative, "relative_bound": found.relative_bound, "max_abs": found.max_abs}

    def elapsed(self, steps: Sequence[Callable[[], None]]) -> list[float]:
        """Run the steps one after another on the stream; seconds of each between events, without a pause."""
        torch = self._torch
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        events[0].record()
        for step, event in zip(steps, events[1:], strict=True):
            step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph of what `step` enqueues; calling the result replays it."""
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def read_ceiling(self, nbytes: int, sets: int) -> dict[str, Any]:
        """Bytes per second of only reading `nbytes` from memory, in as many places as operands are rotated over."""
        from perf import ceiling

        return ceiling.measure(self, nbytes, sets)

    def words(self, nbytes: int, seed: int = 0) -> Any:
        """`nbytes` of random 32-bit integers on the device."""
        torch = self._torch
        generator = torch.Generator(device="cuda").manual_seed(seed)
        return torch.randint(-(2**31), 2**31, (nbytes // 4,), generator=generator, device="cuda", dtype=torch.int32)


def versions() -> dict[str, str]:
    """Installed versions of what could change a figure."""
    found = {"python": platform.python_version()}
    for package in (
        "cute-matmul",
        "torch",
        "triton",
        "nvidia-cutlass-dsl",
        "apache-tvm-ffi",
        "quack-kernels",
        "nvidia-cutlass-operators",
        "nvmath-python",
        "nvidia-cublas",
        "nvidia-cublas-cu13",
        "nvidia-ml-py",
    ):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
