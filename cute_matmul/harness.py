"""What running one variant from a terminal means: parse, run on a backend, check, time, print.

`python -m cute_matmul.variants.vN` and `python -m cute_matmul run vN` both end here. The exit status is 0 when
everything that was run is right, 1 when a result is wrong, 2 when the request is refused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cute_matmul import registry

if TYPE_CHECKING:
    import torch

    from cute_matmul.compile import CompiledKernel
    from cute_matmul.problem import Check, Problem

OK, WRONG, REFUSED = 0, 1, 2

BACKENDS = ("auto", "gpu", "compile")
GPU_SHAPE = 8192
GPU_REPEAT = 20
WARM_UP = 3


class Refused(Exception):
    """The request cannot be run; the message says why and what can."""


@dataclass(frozen=True)
class Outcome:
    """One run. Times are seconds of one product (median over the repeats); None for what was not measured."""

    variant: str
    problem: Problem
    config: str
    backend: str
    device: str
    seconds: float | None = None
    cublas_seconds: float | None = None
    check: Check | None = None
    repeatable: bool | None = None

    @property
    def ok(self) -> bool:
        return (self.check is None or self.check.ok) and self.repeatable is not False

    @property
    def tflops(self) -> float | None:
        return self.problem.flops / self.seconds / 1e12 if self.seconds else None

    def as_dict(self) -> dict:
        """Plain values, for JSON."""
        return {
            "variant": self.variant,
            "problem": asdict(self.problem),
            "config": self.config,
            "backend": self.backend,
            "device": self.device,
            "seconds": self.seconds,
            "tflops": self.tflops,
            "cublas_seconds": self.cublas_seconds,
            "percent_of_cublas": 100 * self.cublas_seconds / self.seconds if self.cublas_seconds else None,
            "check": None if self.check is None else {**asdict(self.check), "ok": self.check.ok},
            "repeatable": self.repeatable,
            "ok": self.ok,
        }

    def row(self) -> dict[str, str]:
        """Columns of the printed table."""
        row = {
            "variant": self.variant,
            "m x n x k": f"{self.problem.m}x{self.problem.n}x{self.problem.k}",
            "dtype": self.problem.dtype,
            "majors": f"A {self.problem.a_major}, B {self.problem.b_major}",
            "config": self.config,
            "backend": self.backend,
        }
        if self.seconds is not None:
            row["time"] = duration(self.seconds)
        if self.cublas_seconds is not None and self.tflops is not None:
            row["TFLOP/s"] = f"{self.tflops:.1f}"
            row["% of cuBLAS"] = f"{100 * self.cublas_seconds / self.seconds:.1f}"
        if self.check is not None:
            row["max error"] = f"{self.check.max_abs:.3g}"
            row["bound"] = f"{self.check.max_abs_bound:.3g}"
        row["result"] = self.verdict()
        return row

    def verdict(self) -> str:
        if self.check is not None and not self.check.ok:
            return "WRONG"
        if self.repeatable is False:
            return "NOT REPEATABLE"
        return "not checked" if self.check is None else "right"


def duration(seconds: float) -> str:
    """Three digits in the unit that fits: "2.12 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what is multiplied, how, and on what."""
    shape = parser.add_argument_group("problem, C (m, n) = A (m, k) @ B (k, n)")
    for name in ("m", "n", "k"):
        shape.add_argument(f"--{name}", type=int, metavar="INT", help=f"default {GPU_SHAPE}")
    shape.add_argument("--dtype", default="float16", help="float16 (fp16) or bfloat16 (bf16)")
    shape.add_argument("--a-major", default="k", choices=("k", "m"), help="unit stride of A (default k)")
    shape.add_argument("--b-major", default="k", choices=("k", "n"), help="unit stride of B (default k)")
    shape.add_argument("--seed", type=int, default=0, help="of the random operands")
    how = parser.add_argument_group("how")
    how.add_argument("--config", metavar="TILE", help="such as 128x128x64,stages=3 (default: the variant's)")
    how.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="gpu: run on a Hopper GPU; compile: compile for sm_90a and inspect, run nothing; "
        "auto: gpu where there is one, else compile",
    )
    how.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the result with the float64 reference (default: yes)",
    )
    how.add_argument("--repeat", type=int, metavar="INT", help=f"runs to time (default {GPU_REPEAT} on a GPU)")
    how.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def main(name: str, argv: Sequence[str] | None = None) -> None:
    """`python -m cute_matmul.variants.vN`: parse the arguments, run, and exit with the status."""
    parser = argparse.ArgumentParser(
        prog=f"python -m cute_matmul.variants.{name}", description=registry.get(name).title
    )
    add_arguments(parser)
    sys.exit(guarded(run, name, parser.parse_args(argv)))


def guarded(command, *arguments) -> int:
    """Run a command; what the user asked for in vain is a message and a status, not a traceback."""
    try:
        return command(*arguments)
    except (Refused, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        return OK


def run(name: str, arguments: argparse.Namespace) -> int:
    """Run one variant as the parsed arguments say, print what came of it, and return the exit status."""
    variant = registry.get(name)
    if arguments.repeat is not None and arguments.repeat < 1:
        raise Refused(f"--repeat must be at least 1, got {arguments.repeat}")
    missing = no_hopper_gpu()
    backend = arguments.backend
    if backend == "auto":
        backend = "compile" if missing else "gpu"
    elif backend == "gpu" and missing:
        raise Refused(f"--backend gpu needs a Hopper GPU (compute capability 9.0): {missing}")
    problem = _problem(arguments, GPU_SHAPE)
    if backend == "gpu":
        return _report(_on_gpu(variant.name, problem, arguments), arguments)
    return _compile_only(variant.name, problem, arguments, missing)


def no_hopper_gpu() -> str | None:
    """Why nothing can run on a GPU here, or None if the current CUDA device is a Hopper one."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        return "torch sees no CUDA device" if built else "this torch is built without CUDA"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
    return None


def _problem(arguments: argparse.Namespace, side: int) -> Problem:
    from cute_matmul.problem import Problem

    m, n, k = (side if value is None else value for value in (arguments.m, arguments.n, arguments.k))
    return Problem(m, n, k, arguments.dtype, arguments.a_major, arguments.b_major, arguments.seed)


def _kernel(name: str, problem: Problem, arguments: argparse.Namespace) -> CompiledKernel:
    from cute_matmul.compile import compile_kernel

    return compile_kernel(name, arguments.config, problem.dtype, problem.a_major, problem.b_major)


def _report(outcome: Outcome, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps(outcome.as_dict(), indent=2))
    else:
        from tabulate import tabulate

        print(tabulate([outcome.row()], headers="keys", tablefmt="simple", disable_numparse=True))
        print(f"device: {outcome.device}")
    if outcome.check is not None and not outcome.check.ok:
        print(f"error: {outcome.variant} is wrong: {outcome.check}", file=sys.stderr)
    if outcome.repeatable is False:
        print(f"error: {outcome.variant} gave different bits for the same operands", file=sys.stderr)
    return OK if outcome.ok else WRONG


def _compile_only(name: str, problem: Problem, arguments: argparse.Namespace, missing: str | None) -> int:
    from cute_matmul.inspection import inspect

    kernel = _kernel(name, problem, arguments)
    inspection = inspect(kernel)
    why = f" ({missing})" if missing else ""
    said = f"compiled for sm_90a in {duration(kernel.seconds)}; nothing was executed{why}"
    if arguments.json:
        outcome = Outcome(name, problem, str(kernel.config), "compile", "none")
        extra = {"executed": False, "compile_seconds": kernel.seconds, "inspection": inspection.as_dict()}
        print(json.dumps({**outcome.as_dict(), **extra}, indent=2))
    else:
        print(inspection)
        print(f"{name} {said}")
    return OK


def _on_gpu(name: str, problem: Problem, arguments: argparse.Namespace) -> Outcome:
    import torch

    from cute_matmul.launch import matmul
    from cute_matmul.problem import check

    kernel = _kernel(name, problem, arguments)
    a, b = problem.operands("cuda")
    out = problem.output("cuda")

    def ours() -> None:
        matmul(a, b, out=out, variant=name, config=kernel.config, backend="gpu")

    ours()
    torch.cuda.synchronize()
    checked = check(out, a, b) if arguments.check else None
    first = out.clone()

    theirs_out = torch.empty_like(out)
    repeat = arguments.repeat or GPU_REPEAT
    ours_seconds, theirs_seconds = interleaved(ours, lambda: torch.matmul(a, b, out=theirs_out), repeat)
    return Outcome(
        variant=name,
        problem=problem,
        config=str(kernel.config),
        backend="gpu",
        device=torch.cuda.get_device_name(),
        seconds=statistics.median(ours_seconds),
        cublas_seconds=statistics.median(theirs_seconds),
        check=checked,
        repeatable=same_bits(out, first),
    )


def interleaved(first, second, repeat: int) -> tuple[list[float], list[float]]:
    """Seconds of each call of two GPU functions, taken in turn so that clock and heat are the same for both."""
    import torch

    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(WARM_UP + repeat):
        for function, kept in zip((first, second), times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            if turn >= WARM_UP:
                kept.append(begin.elapsed_time(end) * 1e-3)
    return times


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equality of two 16-bit tensors bit by bit, nans and signed zeros included."""
    import torch

    return torch.equal(x.view(torch.int16), y.view(torch.int16))
