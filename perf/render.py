"""Put the figures of perf/results into the pages: python perf/render.py [--check].

A page holds pairs of markers; what is between them is generated:

    <!-- perf:table suite=ladder -->  the table of the newest result of a suite, and its conditions
    <!-- perf:result file=NAME -->    the same of the result perf/results/NAME.json, whatever came after it
    <!-- perf:row variant=v3 -->      what the newest ladder says of one rung, as a sentence
    <!-- perf:plot name=ladder -->    a plot
    <!-- perf:profile -->             what Nsight Compute says of the variants, from the newest profiles
    <!-- perf:timeline variant=v5 --> what the warps of a CTA did on a GPU, from the newest recording
    <!-- /perf -->

`dtype=bfloat16` chooses results of that type. `--agree A B` compares the ratios of two results.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script. NOTE: this folder on the path would put profile.py in the standard one's place
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from perf import plots, results, tables
from perf.suites import SUITES

PAGES = ("README.md", "perf/*.md", "docs/**/*.md")
FIGURES = "perf/figures"

BLOCK = re.compile(
    r"(?P<open><!-- perf:(?P<kind>\w+)(?P<options>[^>]*?) -->\n)(?P<body>.*?)(?P<close><!-- /perf -->)", re.S
)


class Pages:
    """The pages under `root`, filled from `records`."""

    def __init__(self, root: Path, records: Sequence[tuple[Path, dict[str, Any]]], simulated: bool = False):
        self.root = root
        self.records = [(p, r) for p, r in records if r["complete"] and r["simulated"] == simulated]
        self.stale: list[str] = []

    def newest(self, suite: str, dtype: str = "float16") -> tuple[Path, dict[str, Any]] | None:
        """The newest whole result of a suite on its own shapes, a full one before a quick one."""
        found = [(p, r) for p, r in self.records if r["suite"] == suite and r["conditions"].get("dtype") == dtype]
        found = [(p, r) for p, r in found if not r.get("partial")]  # as --shape, --variants and --config make them
        if suite in SUITES:
            own = [list(shape.mnk) for shape in SUITES[suite].shapes]
            found = [(p, r) for p, r in found if [s["mnk"] for s in r["shapes"]] == own]
        full = [(p, r) for p, r in found if not r["quick"]]
        return (full or found or [None])[-1]

    def by_suite(self, dtype: str = "float16") -> dict[str, dict[str, Any]]:
        chosen = {suite: self.newest(suite, dtype) for suite in ("ladder", "square", "model", "decode")}
        return {suite: found[1] for suite, found in chosen.items() if found}

    # The kinds of block

    def table(self, page: Path, suite: str = "ladder", dtype: str = "float16") -> str:
        found = self.newest(suite, dtype)
        if not found:
            return _missing(suite, dtype)
        return self._body(page, *found)

    def result(self, page: Path, file: str) -> str:
        """The table of one result, whatever came after it."""
        found = [(p, r) for p, r in self.records if p.stem == file]
        if not found:
            raise ValueError(f"{page}: file must be a whole result, got {file!r}")
        return self._body(page, *found[0])

    def link(self, page: Path, path: Path) -> str:
        """A result's file as a page links to it."""
        return os.path.relpath(self.root / "perf" / "results" / path.name, page.parent)

    def caption(self, page: Path, path: Path, record: dict[str, Any], whole: str = "Raw samples") -> str:
        """What a reader must know before quoting a result's table, and where the whole of it is."""
        said = [tables.conditions(record), since(record), f"[{whole}]({self.link(page, path)})."]
        return " ".join(filter(None, said))

    def _body(self, page: Path, path: Path, record: dict[str, Any]) -> str:
        lines = [tables.body(record, tables.MARKDOWN), "", self.caption(page, path, record)]
        whole = record["suite"] == "ladder"
        skipped = {s["contender"]: s["reason"] for s in record["skipped"] if s["shape"] is None or whole}
        lines += ["", *(f"Not measured: {name}: {reason}." for name, reason in skipped.items())] if skipped else []
        return "\n".join(lines)

    def row(self, page: Path, variant: str, dtype: str = "float16") -> str:
        found = self.newest("ladder", dtype)
        if not found:
            return _missing("ladder", dtype)
        record = found[1]
        shape = tables.shapes_of(record)[0]
        burst, sustained = (tables.figures(record, phase, shape).get(variant) for phase in ("burst", "sustained"))
        if burst is None:
            return f"{variant} is not in the newest ladder ({found[0].name})."
        config = tables.configuration(record, variant, shape)
        text = f"{variant} ({config}) at {shape} {dtype} on {record['machine']['gpu']}: {burst.tflops:.0f} TFLOP/s"
        if burst.ratio:
            text += f", {tables.ratio_text(burst.ratio)} of cuBLAS,"
        text += " in the first calls"
        if sustained:
            text += f"; {sustained.tflops:.0f} TFLOP/s"
            if sustained.ratio:
                text += f", {tables.ratio_text(sustained.ratio)} of cuBLAS,"
            text += " under sustained load"
            if sustained.energy:
                text += f" at {sustained.energy.gross_pj:.2f} pJ/FLOP"
        accumulate = tables.accumulate_of(record, variant)
        sums = "Both add in fp32" if accumulate == "fp32" else f"{variant} adds in {accumulate}, cuBLAS in fp32"
        return " ".join(filter(None, (f"{text}. {sums}. Commit {tables.commit_of(record)}.", since(record, variant))))

    def plot(self, page: Path, name: str, dtype: str = "float16") -> str:
        if name not in plots.PLOTS:
            raise ValueError(f"plot must be of {', '.join(plots.PLOTS)}; got {name!r}")
        data = plots.PLOTS[name][0](self.by_suite(dtype))
        if data is None:
            return "No result yet for this plot."
        link = os.path.relpath(self.figure(name, dtype), page.parent)
        return f"![{plots.PLOTS[name][2]}]({link})"

    def profile(self, page: Path, dtype: str = "float16") -> str:
        from perf import profile

        newest = {}
        for path, record in self.records:
            if record["suite"] == "profile" and record["conditions"]["dtype"] == dtype:
                newest |= {m["variant"]: (m, path) for m in record["measurements"]}
        if not newest:
            return _missing("profile", dtype, "python perf/profile.py v2")
        lines = [profile.table([newest[name][0] for name in sorted(newest)], tables.MARKDOWN), ""]
        for path, record in self.records:
            whose = sorted(name for name, (_, source) in newest.items() if source == path)
            if whose:
                lines.append(f"{', '.join(whose)}: {self.caption(page, path, record, 'Raw figures')}")
        return "\n".join(lines)

    def timeline(self, page: Path, variant: str, dtype: str = "float16") -> str:
        from perf import timeline

        found = [
            (path, record, m)
            for path, record in self.records
            if record["suite"] == "timeline" and record["conditions"]["dtype"] == dtype
            for m in record["measurements"]
            if m["variant"] == variant
        ]
        if not found:
            return _missing("timeline", dtype, f"python perf/timeline.py {variant}")
        path, record, m = found[-1]
        what = f"{variant} ({m['config']}), M x N x K = {'x'.join(map(str, m['shape']))}"
        body = timeline.table(m["ranges"], tables.MARKDOWN)
        return "\n".join([what, "", body, "", self.caption(page, path, record, "Every range")])

    def figure(self, name: str, dtype: str) -> Path:
        return self.root / FIGURES / (f"{name}.svg" if dtype == "float16" else f"{name}-{dtype}.svg")

    # Writing and checking

    def pages(self) -> list[Path]:
        return sorted({path for pattern in PAGES for path in self.root.glob(pattern)})

    def fill(self, page: Path, text: str) -> str:
        kinds: dict[str, Callable[..., str]] = {
            "table": self.table,
            "result": self.result,
            "row": self.row,
            "plot": self.plot,
            "profile": self.profile,
            "timeline": self.timeline,
        }

        def replace(match: re.Match[str]) -> str:
            kind, options = match["kind"], dict(item.split("=", 1) for item in match["options"].split())
            if kind not in kinds:
                raise ValueError(f"{page}: marker perf:{kind} must be of {', '.join(kinds)}")
            return f"{match['open']}\n{kinds[kind](page, **options)}\n\n{match['close']}"

        marks = len(re.findall(r"^<!-- perf:", text, re.M)), len(re.findall(r"^<!-- /perf -->", text, re.M))
        if marks[0] != marks[1]:
            raise ValueError(f"{page}: {marks[0]} opening and {marks[1]} closing perf markers")
        return BLOCK.sub(replace, text)

    def render(self, check: bool) -> list[str]:
        """Write pages and plots; with `check` write nothing. Gives the files that were, or are, stale."""
        stale = []
        for page in self.pages():
            old = page.read_text(encoding="utf-8")
            new = self.fill(page, old)
            if new != old:
                stale.append(str(page.relative_to(self.root)))
                if not check:
                    results.write_atomically(page, new)
        for dtype in ("float16", "bfloat16"):
            records = self.by_suite(dtype)
            for name, (numbers, _, _) in plots.PLOTS.items():
                path, data = self.figure(name, dtype), numbers(records)
                wanted = plots.digest(name, data) if data is not None else None
                if plots.stored_digest(path) == wanted:
                    continue
                stale.append(str(path.relative_to(self.root)))
                if not check and data is None:
                    path.unlink()
                elif not check:
                    results.write_atomically(path, plots.svg(name, data))
        return stale


def _missing(suite: str, dtype: str, command: str | None = None) -> str:
    command = command or f"python perf/run.py --suite {suite}" + ("" if dtype == "float16" else f" --dtype {dtype}")
    return f"Not measured yet: `{command}`."


def since(record: dict[str, Any], variant: str | None = None) -> str:
    """Whether the kernels of a result, or one of them, are those of today's source; "" where it did not record them."""
    state, found = record["conditions"], {}
    rows = [(c["contender"], c["details"]) for c in record["checks"]]
    rows += [(m["variant"], m) for m in record["measurements"] if m["phase"] in ("profile", "timeline")]
    for name, details in rows:
        if "ptx" in details and variant in (None, name):
            today = _fingerprint(name, details["config"], state["dtype"], state["a_major"], state["b_major"])
            found[name] = found.get(name, True) and details["ptx"] == today
    changed = [name for name, same in found.items() if not same]
    if not found:
        return ""
    if variant:
        return "Its kernel has changed since." if changed else "Its kernel is still the same."
    return f"Since changed: {', '.join(changed)}." if changed else "The kernels are still the same."


@functools.cache
def _fingerprint(variant: str, config: str, dtype: str, a_major: str, b_major: str) -> str | None:
    from cute_matmul.compile import compile_kernel

    try:
        return compile_kernel(variant, config, dtype, a_major, b_major).fingerprint
    except ValueError:  # no longer a variant, or a configuration of it
        return None


def agreement(one: dict[str, Any], two: dict[str, Any]) -> tuple[str, bool]:
    """For each ratio of two results of a suite, both values, and whether they differ by more than their intervals
    together allow; and whether none does. A contender that ran in another configuration is shown and not judged. Raises
    ValueError for results that do not measure the same."""
    from tabulate import tabulate

    for what, of in (
        ("suite", lambda r: r["suite"]),
        ("GPU", lambda r: r["machine"].get("gpu")),
        *((key, lambda r, key=key: r["conditions"].get(key)) for key in ("dtype", "a_major", "b_major")),
    ):
        if of(one) != of(two):
            raise ValueError(f"both results must be of one {what}, got {of(one)} and {of(two)}")
    rows, agreed = [], []
    for phase in ("burst", "sustained"):
        for shape in tables.shapes_of(one):
            first, second = (tables.figures(r, phase, shape) for r in (one, two))
            for name in first:
                a, b = first[name].ratio, second[name].ratio if name in second else None
                if a is None or b is None:
                    continue
                # Two independent values, each with its interval: their difference has the root of both squared.
                allowed = math.hypot(math.log(a.high / a.value), math.log(b.high / b.value))
                chosen = [tables.configuration(record, name, shape) for record in (one, two)]
                if chosen[0] != chosen[1]:
                    verdict = f"other configuration: {chosen[0]}, {chosen[1]}"
                else:
                    agreed.append(abs(math.log(b.value / a.value)) <= allowed)
                    verdict = "yes" if agreed[-1] else "NO"
                rows.append(
                    [
                        phase,
                        str(shape),
                        name,
                        tables.ratio_text(a),
                        tables.ratio_text(b),
                        f"{b.value / a.value - 1:+.2%}",
                        f"±{math.expm1(allowed):.1%}",
                        verdict,
                    ]
                )
    if not agreed:
        raise ValueError("the results have no ratio in common")
    headers = ["phase", "shape", "", "first", "second", "second over first", "allowed", "agree"]
    boards = [record["machine"].get("board") for record in (one, two)]
    said = "not recorded by both" if None in boards else "the same" if boards[0] == boards[1] else "two"
    return f"{tabulate(rows, headers=headers, disable_numparse=True)}\nboard: {said}", all(agreed)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="perf/render.py", description="Tables and plots from perf/results.")
    top.add_argument("--check", action="store_true", help="write nothing; exit status 1 if anything is stale")
    top.add_argument("--agree", nargs=2, type=Path, metavar="RESULT", help="compare the ratios of two results")
    top.add_argument("--show", type=Path, metavar="RESULT", help="print one result's table")
    top.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    top.add_argument("--root", type=Path, default=results.ROOT, metavar="FOLDER", help="where the pages are")
    top.add_argument("--simulated", action="store_true", help="use simulated results only; needs another --root")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0: everything is as the results say; 1: something was stale under --check."""
    top = parser()
    options = top.parse_args(arguments)
    if options.show:
        print(tables.report(results.load(options.show)))
        return 0
    if options.agree:
        try:
            text, every = agreement(*(results.load(path) for path in options.agree))
        except ValueError as error:
            print(f"perf/render.py: {error}", file=sys.stderr)
            return 2
        print(text)
        return 0 if every else 1
    root = options.root.resolve()
    if options.simulated and root == results.ROOT:
        top.error("--simulated must be given another folder with --root: no made-up figure goes into these pages")
    stale = Pages(root, results.all_results(options.results), options.simulated).render(options.check)
    for name in stale:
        print(f"stale: {name}" if options.check else f"wrote {name}")
    if options.check and stale:
        print("python perf/render.py brings these up to date", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
