"""Command line: `python -m cute_matmul list | run | inspect | diff | trace | bench | tune`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cute_matmul import harness, registry


def list_variants(arguments: argparse.Namespace) -> int:
    """Print the ladder. The default is marked."""
    default = registry.default().name
    variants = [registry.get(name) for name in registry.names()]
    if arguments.json:
        rows = [
            {
                "name": variant.name,
                "module": variant.module,
                "title": variant.title,
                "change": variant.change,
                "constraints": list(variant.constraints),
                "default": variant.name == default,
            }
            for variant in variants
        ]
        print(json.dumps(rows, indent=2))
        return harness.OK
    from tabulate import tabulate

    table = [[v.name + (" *" if v.name == default else ""), v.title, v.change] for v in variants]
    headers = ["variant", "title", "what it changes"]
    print(tabulate(table, headers=headers, tablefmt="simple", maxcolwidths=[None, 24, 72]))
    print(f"* default ({registry.ENVIRONMENT} or cute_matmul.use(...) changes it)")
    for constraint in dict.fromkeys(c for variant in variants for c in variant.constraints):
        of = [variant.name for variant in variants if constraint in variant.constraints]
        print(f"{', '.join(of)}: {constraint}")
    return harness.OK


def inspect_variants(arguments: argparse.Namespace) -> int:
    """Print what the compiler made of variants."""
    from cute_matmul.inspection import table

    inspections = [_inspection(name, arguments) for name in arguments.variants]
    if arguments.json:
        rows = [inspection.as_dict() for inspection in inspections]
        print(json.dumps(rows[0] if len(rows) == 1 else rows, indent=2))
    else:
        print(table(inspections))
    return harness.OK


def diff_variants(arguments: argparse.Namespace) -> int:
    """Print what changed between two variants: the idea, the source, the compiled kernels."""
    from cute_matmul import difference
    from cute_matmul.inspection import table

    old, new = registry.get(arguments.old), registry.get(arguments.new)
    colour = arguments.color
    if colour is None:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")  # https://no-color.org
    print(difference.render(old, new, width=arguments.width, colour=colour))
    print()
    print(table([_inspection(name, arguments) for name in (old.name, new.name)]))
    return harness.OK


def bench(arguments: argparse.Namespace) -> int:
    """Measure the ladder beside other matmuls: `perf/run.py` of this checkout, with the arguments that follow."""
    runner = Path(__file__).resolve().parent.parent / "perf" / "run.py"
    if not runner.is_file():
        raise harness.Refused(f"bench needs a checkout of the project, which has {runner}; this is an installed copy")
    return subprocess.run([sys.executable, str(runner), *arguments.rest], check=False).returncode


def tune(arguments: argparse.Namespace) -> int:
    """Find and remember the fastest configurations, see `cute_matmul.tuner`."""
    from cute_matmul import tuner

    return tuner.main(arguments.rest)


def _inspection(name: str, arguments: argparse.Namespace):
    from cute_matmul.compile import compile_kernel
    from cute_matmul.inspection import inspect
    from cute_matmul.problem import dtype_name

    config = getattr(arguments, "config", None)
    dtype = dtype_name(arguments.dtype)
    return inspect(compile_kernel(registry.get(name).name, config, dtype, arguments.a_major, arguments.b_major))


def _add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="float16", help="float16 (fp16) or bfloat16 (bf16)")
    parser.add_argument("--a-major", default="k", choices=("k", "m"), help="unit stride of A (default k)")
    parser.add_argument("--b-major", default="k", choices=("k", "n"), help="unit stride of B (default k)")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each subcommand sets `command`."""
    top = argparse.ArgumentParser(prog="python -m cute_matmul", description="A ladder of Hopper matmul kernels.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    sub = commands.add_parser("list", help="the variants, and what each changes")
    sub.add_argument("--json", action="store_true")
    sub.set_defaults(command=list_variants)

    sub = commands.add_parser("run", help="run one variant: check it, time it")
    sub.add_argument("variant", help="a name that `list` shows")
    harness.add_arguments(sub)
    sub.set_defaults(command=lambda arguments: harness.run(arguments.variant, arguments))

    sub = commands.add_parser("trace", help="run variants in the emulator and draw what each role did when")
    sub.add_argument("variants", nargs="+", metavar="variant", help="names that `list` shows; drawn in this order")
    harness.add_problem_arguments(sub, "x".join(map(str, harness.TRACE_SHAPE)))
    sub.add_argument("--config", metavar="TILE", help="such as 128x128x64,stages=3 (default: the variant's)")
    harness.add_emulator_arguments(sub)
    sub.add_argument("--svg", metavar="FILE", help="also write the timelines under one another as an SVG picture")
    sub.add_argument("--perfetto", metavar="FILE", help="also write them as JSON for https://ui.perfetto.dev")
    sub.add_argument("--cta", type=int, default=0, help="which CTA is drawn (default 0)")
    kinds = ",".join(harness.TRACE_KINDS)
    sub.add_argument("--kinds", default=kinds, help=f"rows of the SVG picture (default {kinds})")
    sub.add_argument("--until", type=float, metavar="CYCLES", help="crop the SVG picture there")
    sub.add_argument("--width", type=int, help="columns to use (default: the terminal's)")
    sub.set_defaults(command=lambda arguments: harness.trace(arguments.variants, arguments))

    sub = commands.add_parser("bench", help="measure the ladder beside other matmuls (perf/run.py)", add_help=False)
    sub.set_defaults(command=bench)

    sub = commands.add_parser("tune", help="time a variant's configurations, remember the best", add_help=False)
    sub.set_defaults(command=tune)

    sub = commands.add_parser("inspect", help="registers, shared memory, CTAs per SM, instruction counts")
    sub.add_argument("variants", nargs="+", metavar="variant", help="names that `list` shows")
    sub.add_argument("--config", metavar="TILE", help="such as 128x128x64,stages=3 (default: the variant's)")
    sub.add_argument("--json", action="store_true")
    _add_kernel_arguments(sub)
    sub.set_defaults(command=inspect_variants)

    sub = commands.add_parser("diff", help="what changed from one variant to another")
    sub.add_argument("old")
    sub.add_argument("new")
    sub.add_argument("--width", type=int, help="columns to use (default: the terminal's)")
    sub.add_argument(
        "--color", "--colour", action=argparse.BooleanOptionalAction, help="default: when printing to a terminal"
    )
    _add_kernel_arguments(sub)
    sub.set_defaults(command=diff_variants)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    if arguments.command in (bench, tune):  # these parse their arguments themselves
        arguments.rest = rest
    elif rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return harness.guarded(arguments.command, arguments)


if __name__ == "__main__":
    sys.exit(main())
