"""Measure: python perf/run.py [--suite ladder|square|model|decode|host|compile|precision] ...

README.md beside this says what the figures mean and how each is repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script. NOTE: this folder on the path would put profile.py in the standard one's place
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from perf import measure, results, suites
from perf.device import CudaDevice, Layout, NoGpu, versions

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

NOT_TAKEN = {
    "host": ("peers", "config", "budget", "no_resume"),
    "precision": ("peers", "config", "budget", "no_resume"),
    "compile": ("peers", "config", "budget", "no_resume", "shape", "a_major", "b_major", "simulate"),
}
"""Options that say nothing to a suite."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="perf/run.py", description="Measure the ladder beside other matmuls.")
    top.add_argument("--suite", default="ladder", choices=(*suites.SUITES, "host", "compile", "precision"))
    top.add_argument("--variants", help="names, or 'ladder' for all, 'default' for the one that matmul takes, 'none'")
    top.add_argument("--peers", help="of cublas, cublaslt, quack, triton, operators; or 'all', 'none'")
    top.add_argument("--dtype", default="float16", help="float16 (fp16) or bfloat16 (bf16)")
    top.add_argument("--a-major", default="k", choices=("k", "m"), help="unit stride of A (default k)")
    top.add_argument("--b-major", default="k", choices=("k", "n"), help="unit stride of B (default k)")
    top.add_argument("--shape", action="append", metavar="MxNxK", help="instead of the suite's; may be repeated")
    top.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="vN=TILE",
        help="such as v2=128x128x64,stages=3; may be repeated, also for one variant, to compare its configurations",
    )
    top.add_argument("--quick", action="store_true", help="fewer rounds (for tables, run it without)")
    top.add_argument("--budget", type=float, metavar="S", help="seconds after which no more rounds are begun")
    top.add_argument("--no-resume", action="store_true", help="do not go on with a run of this kind that was stopped")
    top.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    top.add_argument("--simulate", action="store_true", help="rehearse on a made-up board; needs --results")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0: measured; 1: no GPU, or a contender failed; 2: bad arguments; 130: stopped, kept."""
    top = parser()
    options = top.parse_args(arguments)
    command = ["perf/run.py", *(sys.argv[1:] if arguments is None else arguments)]
    try:
        options.dtype = _dtype(options.dtype)
        configs = [_config(text) for text in options.config]
        for name in NOT_TAKEN.get(options.suite, ()):
            if getattr(options, name) != top.get_default(name):
                raise ValueError(f"--{name.replace('_', '-')} is not taken by the suite {options.suite}")
        if options.simulate and options.results == results.FOLDER:
            raise ValueError("--simulate must be given another folder with --results")
        if options.suite == "compile":
            from perf import compile_times

            return compile_times.run(_variants(options.variants or "ladder"), options, command)
        if options.suite == "precision":
            from perf import precision

            return precision.run(_variants(options.variants or "v5,v6"), options, command)
        if options.suite == "host":
            from perf import host

            return host.run(_variants(options.variants or "default"), options, command)
        return _suite(options, configs, command)
    except ValueError as error:
        top.print_usage(sys.stderr)
        print(f"perf/run.py: {error}", file=sys.stderr)
        return USAGE
    except NoGpu as error:
        print(f"perf/run.py: {error}", file=sys.stderr)
        return FAILED


def _suite(options: argparse.Namespace, configs: list[tuple[str, str]], command: list[str]) -> int:
    suite = suites.SUITES[options.suite]
    effort = suite.quick if options.quick else suite.effort
    if options.budget is not None:
        effort = replace(effort, budget_s=options.budget)
    if options.shape:
        suite = replace(suite, shapes=tuple(suites.Shape.parse(text) for text in options.shape))
    layout = Layout(options.dtype, options.a_major, options.b_major)
    variants = _variants(options.variants or ",".join(suite.variants))
    peers = _peers(options.peers or ",".join(suite.peers))
    beside = sorted({name for name, _ in configs} - set(variants))
    if beside:
        raise ValueError(
            f"config must be of variants that are measured ({', '.join(variants)}), got {', '.join(beside)}"
        )
    contenders: list[Any]
    device: Any
    if options.simulate:
        from perf import simulation

        device = simulation.SimulatedDevice()
        contenders = simulation.contenders(device, variants, peers, configs)
    else:
        from perf import peers as adapters

        device = CudaDevice()
        contenders = adapters.build(variants, peers, configs, device.name)
        _compile(contenders, suite, layout)

    started = results.now()
    record = results.begin(
        suite.name,
        started,
        command,
        machine=device.describe(),
        versions=versions(),
        conditions={
            **asdict(layout),
            "data": "standard normal",
            "operand_sets_times_l2": 3,
            "effort": asdict(effort),
        },
        shapes=suite.shapes,
        contenders=[
            {
                "name": c.name,
                "label": c.label,
                "kind": c.kind,
                "accumulate": c.accumulate,
                "asked": getattr(c, "config", None),
            }
            for c in contenders
        ],
        quick=options.quick,
        partial=bool(options.variants or options.shape or configs) or not set(suite.peers) <= set(peers),
        simulated=device.simulated,
    )
    path = None
    if not options.no_resume:
        stopped = results.unfinished(options.results, results.identity(record))
        if stopped:
            path, record = stopped
            record["resumed"] = [*record.get("resumed", []), started.isoformat(timespec="seconds")]
    if path is None:
        path = results.new_path(options.results, started, device.name, suite.name, layout.dtype)
    else:
        print(f"going on with {path}")

    def save() -> None:
        results.write_atomically(path, results.dump(record))

    total = measure.steps_total(suite, effort, len(contenders))
    with _Bar(total, len(record["measurements"])) as bar:
        run = measure.Run(device, suite, effort, contenders, layout, record, save, bar)
        try:
            with _terminated_like_interrupted():
                run.measure()
        except KeyboardInterrupt:
            run.save_time()
            save()
            bar.close()
            print(f"\nstopped; {len(record['measurements'])} measurements kept in {path}\nthe same command goes on")
            return INTERRUPTED
        except BaseException:
            run.save_time()
            save()
            raise
    results.end(record)
    run.save_time()
    save()
    from perf import tables

    print(tables.report(record))
    print(f"\n{path}")
    for failure in record["failed"]:
        print(f"FAILED {failure['contender']} {failure['shape']}: {failure['reason']}", file=sys.stderr)
    return FAILED if record["failed"] else OK


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, as of a batch system at its time limit, stops a run as Ctrl-C does: what it has is kept."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _compile(contenders: Sequence[Any], suite: suites.Suite, layout: Layout) -> None:
    """Compile what will be measured into the disk cache, in processes side by side."""
    from cute_matmul import tuner

    jobs = []
    for contender in contenders:
        if contender.kind == "variant" and contender.takes(layout.dtype):
            wanted = {str(contender.choose(shape, layout)[0]) for shape in suite.shapes}
            majors = (layout.a_major, layout.b_major)
            jobs += [tuner.Job(contender.variant, text, layout.dtype, *majors) for text in sorted(wanted)]
    for job, error in tuner.compile_jobs(jobs).items():
        if error:
            print(f"{job}: does not compile: {error}", file=sys.stderr)


def _dtype(text: str) -> str:
    names = {"fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16"}
    name = names.get(text, text)
    if name not in ("float16", "bfloat16"):
        raise ValueError(f"dtype must be float16 (fp16) or bfloat16 (bf16), got {text!r}")
    return name


def _config(text: str) -> tuple[str, str]:
    name, equals, config = text.partition("=")
    if not equals or not config:
        raise ValueError(f"config must look like v2=128x128x64,stages=3, got {text!r}")
    from cute_matmul.config import TileConfig

    return name, str(TileConfig.parse(config))


def _variants(text: str) -> list[str]:
    from cute_matmul import registry

    if text == "none":
        return []
    if text == "ladder":
        return list(registry.names())
    if text == "default":
        return [registry.default().name]
    return [registry.get(name.strip()).name for name in text.split(",")]


def _peers(text: str) -> list[str]:
    from perf.peers import PEERS

    if text == "none":
        return []
    found = list(PEERS) if text == "all" else [name.strip() for name in text.split(",")]
    unknown = [name for name in found if name not in PEERS]
    if unknown:
        raise ValueError(f"peers must be of {', '.join(PEERS)}, or all, none; got {', '.join(unknown)}")
    return found


class _Bar:
    """A progress bar on standard error; on a pipe, one line a phase and shape instead."""

    def __init__(self, total: int, done: int):
        from tqdm import tqdm

        self._live = sys.stderr.isatty() and not os.environ.get("NO_PROGRESS")
        self._bar = tqdm(total=total, initial=done, unit="", disable=not self._live, leave=False)
        self._said = ""

    def note(self, text: str) -> None:
        if self._live:
            self._bar.set_description(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def step(self, text: str) -> None:
        if self._live:
            self._bar.set_description(text)
            self._bar.total = max(self._bar.total, self._bar.n + 1)  # rounds beyond those wanted
            self._bar.update()
        elif text.rsplit(" ", 1)[0] != self._said:
            self._said = text.rsplit(" ", 1)[0]
            print(self._said, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if __name__ == "__main__":
    sys.exit(main())
