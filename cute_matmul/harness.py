"""What running one variant from a terminal means: parse, run on a backend, check, time, print.

`python -m cute_matmul.variants.vN` and `python -m cute_matmul run vN` both end here. The exit status is 0 when
everything that was run is right, 1 when a result is wrong or the emulator found a hazard, 2 when the request is
refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cute_matmul import registry

if TYPE_CHECKING:
    import torch

    from cute_matmul.compile import CompiledKernel
    from cute_matmul.emulator import Report
    from cute_matmul.emulator.timeline import Timeline
    from cute_matmul.problem import Check, Problem

OK, WRONG, REFUSED = 0, 1, 2

BACKENDS = ("auto", "gpu", "emulator", "compile")
SCHEDULES = ("round_robin", "random", "adversarial")
GPU_SHAPE = 8192
EMULATOR_SHAPE = 256
TRACE_KINDS = ("load", "tensor", "store", "wait")
TRACE_SHAPE = (256, 256, 512)
"""Few tiles, but k_tiles enough that a ring of stages wraps."""

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
    report: Report | None = None

    @property
    def ok(self) -> bool:
        right = self.check is None or self.check.ok
        return right and self.repeatable is not False and (self.report is None or self.report.ok)

    @property
    def tflops(self) -> float | None:
        """2 m n k over the time; None in the emulator, whose time says nothing about a GPU."""
        return self.problem.flops / self.seconds / 1e12 if self.seconds and self.report is None else None

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
            "emulator": None if self.report is None else self.report.to_dict(),
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
        if self.report is not None:
            row["hazards"] = str(len(self.report.hazards)) if self.report.hazards else "none"
        if self.check is not None:
            row["max error"] = f"{self.check.max_abs:.3g}"
            row["bound"] = f"{self.check.max_abs_bound:.3g}"
        row["result"] = self.verdict()
        return row

    def verdict(self) -> str:
        if self.report is not None and self.report.deadlock is not None:
            return "DEADLOCK"
        if self.check is not None and not self.check.ok:
            return "WRONG"
        if self.repeatable is False:
            return "NOT REPEATABLE"
        if self.report is not None and not self.report.ok:
            return "HAZARDS"
        return "not checked" if self.check is None else "right"


def duration(seconds: float) -> str:
    """Three digits in the unit that fits: "2.12 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what is multiplied, how, and on what."""
    add_problem_arguments(parser)
    how = parser.add_argument_group("how")
    how.add_argument("--config", metavar="TILE", help="such as 128x128x64,stages=3 (default: the variant's)")
    how.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="gpu: run on a Hopper GPU; emulator: run on the CPU and look for hazards; compile: compile for "
        "sm_90a and inspect, run nothing; auto: gpu where there is one, else emulator",
    )
    how.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the result with the float64 reference (default: yes)",
    )
    how.add_argument("--repeat", type=int, metavar="INT", help=f"runs to time (default {GPU_REPEAT} on a GPU, else 1)")
    how.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_emulator_arguments(parser)
    parser.add_argument(
        "--timeline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw what the emulator saw (default: yes, but not with --json)",
    )


def add_problem_arguments(parser: argparse.ArgumentParser, shape: str | None = None) -> None:
    """The options that say what is multiplied."""
    group = parser.add_argument_group("problem, C (m, n) = A (m, k) @ B (k, n)")
    default = shape or f"{GPU_SHAPE} on a GPU, {EMULATOR_SHAPE} in the emulator"
    for name in ("m", "n", "k"):
        group.add_argument(f"--{name}", type=int, metavar="INT", help=f"default {default}")
    group.add_argument("--dtype", default="float16", help="float16 (fp16) or bfloat16 (bf16)")
    group.add_argument("--a-major", default="k", choices=("k", "m"), help="unit stride of A (default k)")
    group.add_argument("--b-major", default="k", choices=("k", "n"), help="unit stride of B (default k)")
    group.add_argument("--seed", type=int, default=0, help="of the random operands, and of the emulator")


def add_emulator_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the emulator alone."""
    group = parser.add_argument_group("emulator")
    group.add_argument(
        "--schedule", choices=SCHEDULES, default=SCHEDULES[0], help=f"default {SCHEDULES[0]}; random uses --seed"
    )


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
        backend = "emulator" if missing else "gpu"
    elif backend == "gpu" and missing:
        raise Refused(f"--backend gpu needs a Hopper GPU (compute capability 9.0): {missing}")
    problem = _problem(arguments, *[EMULATOR_SHAPE if backend == "emulator" else GPU_SHAPE] * 3)
    if backend == "gpu":
        return _report(_on_gpu(variant.name, problem, arguments), arguments)
    if backend == "emulator":
        if arguments.backend == "auto":
            _refuse_long(problem, _kernel(variant.name, problem, arguments), missing)
        trace = arguments.timeline and not arguments.json
        return _report(_on_emulator(variant.name, problem, arguments, trace), arguments)
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


def _problem(arguments: argparse.Namespace, *default: int) -> Problem:
    from cute_matmul.problem import Problem

    asked = (arguments.m, arguments.n, arguments.k)
    m, n, k = (value if value is not None else other for value, other in zip(asked, default, strict=True))
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
        report = outcome.report
        if report is not None and not report.ok:
            print(report)
        if report is not None and report.timeline is not None:
            print(f"\n{report.timeline.gantt(width=shutil.get_terminal_size((100, 24)).columns)}")
    _complain(outcome)
    return OK if outcome.ok else WRONG


def _complain(outcome: Outcome) -> None:
    """Say on standard error what is wrong, if anything is."""
    if outcome.check is not None and not outcome.check.ok:
        print(f"error: {outcome.variant} is wrong: {outcome.check}", file=sys.stderr)
    if outcome.report is not None and not outcome.report.ok:
        print(f"error: the emulator found faults in {outcome.variant}", file=sys.stderr)
    if outcome.repeatable is False:
        print(f"error: {outcome.variant} gave different bits for the same operands", file=sys.stderr)


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


def trace(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Run variants in the emulator, draw what each role and unit did when, and return the exit status."""
    from pathlib import Path

    from cute_matmul.emulator.timeline import stacked_svg

    if arguments.config is not None and len(names) > 1:
        raise Refused(f"--config fits one variant, got {len(names)}: {', '.join(names)}")
    kinds = tuple(arguments.kinds.split(","))
    if not set(kinds) <= set(TRACE_KINDS):
        raise Refused(f"--kinds must be of {','.join(TRACE_KINDS)}; got {arguments.kinds}")
    arguments.repeat, arguments.check = 1, True
    outcomes = [
        _on_emulator(registry.get(name).name, _problem(arguments, *TRACE_SHAPE), arguments, True) for name in names
    ]
    if any(outcome.report is None for outcome in outcomes):
        raise Refused(f"nothing to trace in {outcomes[0].problem}")
    ctas = min(max(outcome.report.timeline.ctas) for outcome in outcomes)
    if not 0 <= arguments.cta <= ctas:
        raise Refused(f"--cta must be one of 0 to {ctas}, got {arguments.cta}")
    panels = [(f"{outcome.variant.upper()} {outcome.config}", outcome.report.timeline) for outcome in outcomes]
    if arguments.svg:
        picture = stacked_svg(panels, cta=arguments.cta, until=arguments.until, kinds=kinds)
        Path(arguments.svg).write_text(picture, encoding="utf-8")
    if arguments.perfetto:
        Path(arguments.perfetto).write_text(json.dumps(_together(panels)), encoding="utf-8")
    width = arguments.width or shutil.get_terminal_size((100, 24)).columns
    for title, timeline in panels:
        print(f"{title}\n{timeline.gantt(width=width, cta=arguments.cta)}\n")
    for path in filter(None, (arguments.svg, arguments.perfetto)):
        print(f"wrote {path}")
    for outcome in outcomes:
        _complain(outcome)
    return OK if all(outcome.ok for outcome in outcomes) else WRONG


def _together(panels: list[tuple[str, Timeline]]) -> dict:
    """One Chrome trace of several timelines: the processes of each are numbered after those before."""
    together: dict = {"traceEvents": []}
    for title, timeline in panels:
        one = timeline.chrome_trace()
        first = 1 + max((event["pid"] for event in together["traceEvents"]), default=-1)
        for event in one["traceEvents"]:
            event["pid"] += first
            if event["name"] == "process_name":
                event["args"] = {"name": f"{title}: {event['args']['name']}"}
        together = {**one, "traceEvents": together["traceEvents"] + one["traceEvents"]}
    return together


def _refuse_long(problem: Problem, kernel: CompiledKernel, missing: str) -> None:
    from cute_matmul import launch

    seconds = launch.estimate_emulator_seconds(problem.m, problem.n, problem.k, kernel.config)
    if seconds > launch.EMULATOR_LIMIT:
        raise Refused(
            f"{problem} would take the emulator about {seconds:.0f} s, and there is no Hopper GPU here ({missing}); "
            "ask for less with --m --n --k, or insist with --backend emulator"
        )


def _on_emulator(name: str, problem: Problem, arguments: argparse.Namespace, trace: bool) -> Outcome:
    from cute_matmul.launch import emulate
    from cute_matmul.problem import check

    kernel = _kernel(name, problem, arguments)
    a, b = problem.operands()
    options = {"schedule": arguments.schedule, "seed": arguments.seed, "trace": trace}
    first = report = None
    seconds, repeatable = [], True
    for _ in range(arguments.repeat or 1):
        out = problem.output()
        _, report = emulate(a, b, out=out, variant=name, config=kernel.config, **options)
        first = out if first is None else first
        repeatable = repeatable and same_bits(out, first)
        if report is not None:
            seconds.append(report.seconds)
        if report is not None and not report.ok:
            break
    return Outcome(
        variant=name,
        problem=problem,
        config=str(kernel.config),
        backend="emulator",
        device=f"emulator, {arguments.schedule} schedule, seed {arguments.seed}",
        seconds=statistics.median(seconds) if seconds else None,
        check=check(first, a, b, accumulator=registry.get(name).accumulator) if arguments.check else None,
        repeatable=repeatable,
        report=report,
    )


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
    checked = check(out, a, b, accumulator=registry.get(name).accumulator) if arguments.check else None
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
