"""Every published figure, one suite after another: python perf/everything.py [STEP ...] [--list] [--results FOLDER]

On an H200 the ladders, decode, host, profile and timelines take some 12 minutes; bf16 and squares in full, models and
V4's timeline have not run there yet. A step that fails or takes too long does not stop the others; what it measured is
kept, and the same command goes on with it. The last step compares the ladder with a second run of it, and brings the
pages up to date where the results are the project's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script. NOTE: this folder on the path would put profile.py in the standard one's place
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from perf import results


@dataclass(frozen=True)
class Step:
    """A command of this folder, and the seconds after which it hangs."""

    name: str
    command: tuple[str, ...]
    limit_s: int

    def arguments(self, folder: Path) -> list[str]:
        script, *rest = self.command
        return [sys.executable, str(results.ROOT / script), *rest, "--results", str(folder)]


def _suite(name: str, *more: str, limit_s: int = 900) -> Step:
    label = "-".join([name, *(m.lstrip("-") for m in more if m != "--dtype")])
    return Step(label, ("perf/run.py", "--suite", name, *more), limit_s)


STEPS = (
    _suite("ladder", limit_s=600),
    _suite("ladder", "--quick", limit_s=240),
    _suite("ladder", "--dtype", "bf16", limit_s=600),
    _suite("decode"),
    _suite("host"),
    _suite("compile"),
    _suite("precision"),
    _suite("square"),
    _suite("model", limit_s=1800),
    Step("profile", ("perf/profile.py", "v0", "v1", "v2", "v3", "v4", "v5", "v6"), 2400),
    *(Step(f"timeline-{v}", ("perf/timeline.py", v), 360) for v in ("v3", "v4", "v5", "v6")),
)


def agreement(folder: Path) -> list[str] | None:
    """The command that compares the newest full ladder with the newest quick one, where both are there."""
    newest: dict[bool, Path] = {}
    for path, record in results.all_results(folder):
        if record["suite"] == "ladder" and record["complete"] and record["conditions"]["dtype"] == "float16":
            newest[record["quick"]] = path
    if len(newest) < 2:
        return None
    return [sys.executable, str(results.ROOT / "perf/render.py"), "--agree", str(newest[False]), str(newest[True])]


def run(command: Sequence[str], limit_s: int) -> str:
    """Run a command; what to say of it."""
    started = time.monotonic()
    child = subprocess.Popen(command)
    try:
        status = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.terminate()  # a suite then keeps what it has
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:  # not if it waits for a kernel that does not end
            child.kill()
            child.wait()
        return f"stopped after {limit_s} s"
    return f"{'done' if status == 0 else f'exit status {status}'} in {time.monotonic() - started:.0f} s"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="perf/everything.py", description="Every published figure, one after another.")
    top.add_argument("steps", nargs="*", metavar="STEP", help="only these, of those that --list names")
    top.add_argument("--list", action="store_true", help="name the steps and their commands, and run none")
    top.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0: every step was done; 1: some were not; 2: there is no such step."""
    top = parser()
    options = top.parse_args(arguments)
    unknown = sorted(set(options.steps) - {step.name for step in STEPS})
    if unknown:
        print(
            f"perf/everything.py: steps must be of {', '.join(s.name for s in STEPS)}; got {', '.join(unknown)}",
            file=sys.stderr,
        )
        return 2
    wanted = [step for step in STEPS if not options.steps or step.name in options.steps]
    if options.list:
        for step in wanted:
            print(f"{step.name:18} python {' '.join(step.command)}")
        return 0
    said = {}
    for step in wanted:
        print(f"== {step.name}: python {' '.join(step.command)}", flush=True)
        said[step.name] = run(step.arguments(options.results), step.limit_s)
        print(f"== {step.name}: {said[step.name]}", flush=True)
    compare = agreement(options.results)
    if compare and not options.steps:
        said["agreement"] = run(compare, 60)
    if options.results == results.FOLDER:
        said["pages"] = run([sys.executable, str(results.ROOT / "docs/refresh.py")], 600)
    print("\n".join(f"{name:18} {text}" for name, text in said.items()))
    return 0 if all(text.startswith("done") for text in said.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
