"""Pages and plots from results: what is generated, that a stale page or plot is found, what is never quoted."""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cute_matmul import registry
from cute_matmul.compile import compile_kernel
from perf import plots, profile, render, results, run, tables, timeline

PAGE = """# A page

<!-- perf:table suite=ladder -->
<!-- /perf -->

<!-- perf:row variant=v1 -->
<!-- /perf -->

<!-- perf:plot name=ladder -->
<!-- /perf -->

Hand-written.
"""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    assert run.main(["--simulate", "--quick", "--results", str(folder)]) == run.OK
    return folder


@pytest.fixture
def root(simulated, tmp_path):
    shutil.copytree(simulated, tmp_path / "perf" / "results")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "v1.md").write_text(PAGE)
    return tmp_path


def rendered(root, *more):
    return render.main(["--simulated", "--root", str(root), "--results", str(root / "perf" / "results"), *more])


def test_a_recording_on_a_gpu_is_shown_and_one_that_is_missing_is_said(tmp_path):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "v3.md"
    pages = render.Pages(tmp_path, results.all_results(results.FOLDER))
    shown = pages.timeline(page, "v3")
    assert (
        shown.startswith("v3 (128x128x64,stages=2), M x N x K = 1024x1024x1024") and "| 0 to 3  | consumer |" in shown
    )
    assert "NVIDIA H200" in shown and "h200-timeline-v3.json" in shown
    assert pages.timeline(page, "v4") == "Not measured yet: `python perf/timeline.py v4`."


@pytest.mark.parametrize(
    "part", [["--variants", "v1"], ["--peers", "none"], ["--config", "v1=64x128x64"], ["--shape", "1024"]]
)
def test_a_run_of_a_part_of_the_suite_takes_no_place_of_the_whole(part, root):
    folder = root / "perf" / "results"
    assert run.main(["--simulate", "--quick", "--results", str(folder), *part]) == run.OK
    pages = render.Pages(root, results.all_results(folder), simulated=True)
    assert len(pages.records) == 2
    _, record = pages.newest("ladder")
    assert not record["partial"] and "--variants" not in record["command"] and part[0] not in record["command"]


def test_pages_and_plots_are_filled_and_then_fresh(root):
    pytest.importorskip("matplotlib")
    assert rendered(root, "--check") == 1
    assert rendered(root) == 0
    page = (root / "docs" / "v1.md").read_text()
    assert "| v1 " in page.replace("|  v1", "| v1") and "Hand-written." in page
    assert "(../perf/figures/ladder.svg)" in page and "(../perf/results/" in page
    assert "v6" in page and "fp16" in page
    assert rendered(root, "--check") == 0
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert rendered(root) == 0
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before


def test_a_figure_changed_by_hand_is_stale(root, capsys):
    pytest.importorskip("matplotlib")
    rendered(root)
    page = root / "docs" / "v1.md"
    page.write_text(page.read_text().replace("0.7", "0.9", 1))
    assert rendered(root, "--check") == 1
    assert "stale: docs/v1.md" in capsys.readouterr().out


def test_a_newer_result_makes_pages_and_plots_stale(root, capsys):
    pytest.importorskip("matplotlib")
    rendered(root)
    (path,) = (root / "perf" / "results").glob("*.json")
    record = json.loads(path.read_text())
    for entry in record["measurements"]:
        if entry["contender"] == "v1":
            entry["samples_s"] = [s * 1.2 for s in entry["samples_s"]]
    record["started"] = "2999-01-01T00:00:00+00:00"
    path.with_name("newer.json").write_text(results.dump(record))
    capsys.readouterr()
    assert rendered(root, "--check") == 1
    said = capsys.readouterr().out
    assert "docs/v1.md" in said and "perf/figures/ladder.svg" in said


def test_plots_come_out_the_same_every_time(root):
    pytest.importorskip("matplotlib")
    records = render.Pages(root, results.all_results(root / "perf" / "results"), simulated=True).by_suite()
    for name in ("ladder", "energy", "burst-sustained"):
        data = plots.PLOTS[name][0](records)
        first = plots.svg(name, data)
        assert first == plots.svg(name, data)
        assert plots.digest(name, data) in first
        assert "fill: #ffffff; opacity: 1" not in first, "no ground of its own"


def test_simulated_results_are_not_put_into_pages(root):
    pages = render.Pages(root, results.all_results(root / "perf" / "results"))
    assert pages.newest("ladder") is None
    assert "Not measured yet" in pages.table(root / "docs" / "v1.md")
    with pytest.raises(SystemExit):
        render.main(["--simulated"])


def test_unfinished_results_are_not_put_into_pages(root):
    (path,) = (root / "perf" / "results").glob("*.json")
    record = json.loads(path.read_text())
    path.write_text(results.dump({**record, "complete": False}))
    assert render.Pages(root, results.all_results(path.parent), simulated=True).newest("ladder") is None


def test_a_full_run_is_preferred_to_a_newer_quick_one(root):
    (path,) = (root / "perf" / "results").glob("*.json")
    record = json.loads(path.read_text())
    path.with_name("full.json").write_text(results.dump({**record, "quick": False, "started": "2000-01-01T00:00:00"}))
    pages = render.Pages(root, results.all_results(path.parent), simulated=True)
    assert pages.newest("ladder")[0].name == "full.json"


@pytest.mark.parametrize(
    "text,said",
    [
        ("<!-- perf:chart name=x -->\n<!-- /perf -->\n", "perf:chart must be of"),
        ("<!-- perf:table suite=ladder -->\n", "1 opening and 0 closing"),
        ("<!-- perf:result file=2026-01-01-nothing -->\n<!-- /perf -->\n", "file must be a whole result, got '2026-"),
        ("<!-- perf:plot name=pie -->\n<!-- /perf -->\n", "plot must be of"),
    ],
)
def test_bad_markers_are_named(root, text, said):
    (root / "docs" / "v1.md").write_text(text)
    with pytest.raises(ValueError, match=said):
        rendered(root)


def test_the_projects_own_pages_are_fresh():
    assert render.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("of_v1", "of_v6", "row", "caption"),
    [
        ("today", "today", "Its kernel is still the same.", "The kernels are still the same."),
        ("another", "today", "Its kernel has changed since.", "Since changed: v1."),
        ("today", "another", "Its kernel is still the same.", "Since changed: v6."),
        (None, "today", None, "The kernels are still the same."),
        (None, None, None, None),
    ],
)
def test_a_table_says_which_kernels_have_changed_since(root, of_v1, of_v6, row, caption):
    """By the fingerprints that the result recorded; where it recorded none it says nothing."""
    (path,) = (root / "perf" / "results").glob("*.json")
    record = results.load(path)
    for check in record["checks"]:
        check["details"].pop("ptx", None)
        fingerprint = {"v1": of_v1, "v6": of_v6}.get(check["contender"])
        if fingerprint:
            config = check["details"]["config"] = str(registry.get(check["contender"]).load().DEFAULT)
            today = compile_kernel(check["contender"], config, "float16", "k", "k").fingerprint
            check["details"]["ptx"] = today if fingerprint == "today" else fingerprint
    path.write_text(results.dump(record))
    rendered(root)
    page = (root / "docs" / "v1.md").read_text()
    for said in ("Its kernel is still the same.", "Its kernel has changed since."):
        assert page.count(said) == (said == row)
    for said in ("The kernels are still the same.", "Since changed: v1.", "Since changed: v6."):
        assert page.count(said) == (said == caption)


def test_a_configuration_that_is_no_more_counts_as_changed(root):
    (path,) = (root / "perf" / "results").glob("*.json")
    record = results.load(path)
    (check,) = [c for c in record["checks"] if c["contender"] == "v1"]
    check["details"] |= {"config": "8x8x8", "ptx": "0123456789abcdef"}
    assert render.since(record, "v1") == "Its kernel has changed since."


def test_two_runs_agree_or_not(root):
    (path,) = (root / "perf" / "results").glob("*.json")
    record = results.load(path)
    _, every = render.agreement(record, record)
    assert every
    other = copy.deepcopy(record)
    for entry in other["measurements"]:
        if entry["contender"] == "v6" and entry["phase"] == "burst":
            entry["samples_s"] = [s * 1.02 for s in entry["samples_s"]]
    text, every = render.agreement(record, other)
    assert not every and "NO" in text
    assert text.endswith("board: the same")


def test_another_configuration_is_shown_and_not_judged(root):
    (path,) = (root / "perf" / "results").glob("*.json")
    record = results.load(path)
    other = copy.deepcopy(record)
    (check,) = [c for c in other["checks"] if c["contender"] == "v6"]
    check["details"]["config"] = "of another raster"
    for entry in other["measurements"]:
        if entry["contender"] == "v6":
            entry["samples_s"] = [s * 1.1 for s in entry["samples_s"]]
    text, every = render.agreement(record, other)
    assert every and text.count("of another raster") == 2  # burst and sustained
    other["machine"]["board"] = "another"
    assert render.agreement(record, other)[0].endswith("board: two")
    del other["machine"]["board"]
    assert render.agreement(record, other)[0].endswith("board: not recorded by both")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"suite": "host"}, "one suite, got ladder and host"),
        ({"machine": {"gpu": "NVIDIA H100", "sm_count": 132}}, "one GPU, got Simulated H200 and NVIDIA H100"),
        ({"conditions": {"dtype": "bfloat16"}}, "one dtype, got float16 and bfloat16"),
        ({"measurements": []}, "no ratio in common"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_compared_is_refused(root, change, said, capsys):
    (path,) = (root / "perf" / "results").glob("*.json")
    record = results.load(path)
    for key, value in change.items():
        record[key] = {**record[key], **value} if isinstance(value, dict) else value
    other = path.with_name("other.json")
    other.write_text(results.dump(record))
    assert render.main(["--agree", str(path), str(other)]) == 2
    assert said in capsys.readouterr().err


def test_runs_of_one_truth_agree_as_often_as_their_intervals_say(simulated):
    """Two results with other noise: a ratio of one lies outside the other's interval more often than they differ."""
    (path,) = simulated.glob("*.json")
    noise, record = random.Random(5), results.load(path)
    wrong = trials = 0
    for _ in range(60):
        pair = []
        for _ in range(2):
            copied = copy.deepcopy(record)
            for entry in copied["measurements"]:
                factor = math.exp(noise.gauss(0, 0.01))
                entry["samples_s"] = [s * factor for s in entry["samples_s"]]
            pair.append(copied)
        verdicts = [line for line in render.agreement(*pair)[0].splitlines() if line.endswith(("yes", "NO"))]
        wrong += sum(line.endswith("NO") for line in verdicts)
        trials += len(verdicts)
    assert wrong / trials < 0.04


def test_a_run_on_other_shapes_does_not_take_over_the_table(root):
    (path,) = (root / "perf" / "results").glob("*.json")
    record = json.loads(path.read_text())
    other = {**record, "quick": False, "shapes": [{"mnk": [512, 512, 512], "name": ""}]}
    path.with_name("other.json").write_text(results.dump(other))
    pages = render.Pages(root, results.all_results(path.parent), simulated=True)
    assert pages.newest("ladder")[0] == path


def test_ties_are_marked(simulated):
    (path,) = simulated.glob("*.json")
    record = results.load(path)
    for entry in record["measurements"]:
        if entry["contender"] == "v6":
            twin = next(
                e
                for e in record["measurements"]
                if e["contender"] == "cublas" and (e["phase"], e["round"]) == (entry["phase"], entry["round"])
            )
            entry |= {"samples_s": twin["samples_s"], "steps_per_sample": twin.get("steps_per_sample", 1)}
    row = next(line for line in tables.ladder(record).splitlines() if line.startswith("v6"))
    assert row.count("tie") == 2


# Nsight Compute's table, and the in-kernel trace

COLLECTED = {
    "ID": ("", "0"),
    "Kernel Name": ("", "kernel_cutlass_matmul_v2_kernel_0"),
    "device__attribute_display_name": ("", "NVIDIA H200"),
    "gpu__time_duration.sum": ("ns", "2,000,000"),
    "smsp__cycles_elapsed.avg.per_second": ("hz", "1,500,000,000"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "61.5"),
    "dram__bytes.sum.per_second": ("byte/second", "900,000,000,000"),
    "launch__registers_per_thread": ("register/thread", "168"),
    "launch__shared_mem_per_block_dynamic": ("byte/block", "66,560"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "1.5"),
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": ("inst", "4.25"),
    "smsp__average_warps_issue_stalled_gmma_not_issued_per_issue_active.ratio": ("inst", "4.25"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "9.0"),
}
NCU = "\n".join(
    [
        "==PROF== Connected to process 1234",
        "128x128x64",
        ",".join(f'"{name}"' for name in COLLECTED),
        ",".join(f'"{unit}"' for unit, _ in COLLECTED.values()),
        ",".join(f'"{value}"' for _, value in COLLECTED.values()),
        "",
    ]
)


def test_nsight_computes_table_is_read():
    (kernel,) = profile.parse(NCU)
    figures = profile.digest(kernel)
    assert figures["duration"]["value"] == pytest.approx(2000) and figures["duration"]["unit"] == "us"
    assert figures["SM clock"]["value"] == pytest.approx(1500)
    assert figures["tensor pipe busy"]["value"] == 61.5
    assert figures["DRAM bytes per second"]["value"] == pytest.approx(900)
    assert figures["shared memory per CTA"]["value"] == pytest.approx(66.56)
    assert figures["L2 hit rate"] is None
    assert figures["stalls"] == {"selected": 9.0, "gmma": 4.25, "barrier": 1.5}
    text = profile.table([{"variant": "v2", "config": "128x128x64", "figures": figures}])
    assert "gmma 4.25" in text and "not collected" in text and "selected" not in text


def test_what_is_not_a_table_of_nsight_compute_is_said():
    with pytest.raises(profile.Unavailable, match="no table"):
        profile.parse("==ERROR== The user does not have permission")


def test_one_variant_that_cannot_be_profiled_does_not_lose_the_others(tmp_path, monkeypatch, capsys):
    def collect(arguments, variant):
        if variant == "v2":
            raise profile.Unavailable("ncu failed on v2 (1)")
        return profile.parse(NCU)

    monkeypatch.setattr(profile.shutil, "which", lambda name, path=None: "true")
    monkeypatch.setattr(profile, "wanted_metrics", lambda ncu: [])
    monkeypatch.setattr(profile, "_collect", collect)
    assert profile.main(["v1", "v2", "v3", "--results", str(tmp_path)]) == 1
    record = results.load(*tmp_path.glob("*.json"))
    assert record["complete"] and [m["variant"] for m in record["measurements"]] == ["v1", "v3"]
    assert [f["contender"] for f in record["failed"]] == ["v2"] and "failed on v2" in capsys.readouterr().err
    assert profile.main(["v2", "--results", str(tmp_path / "none")]) == 1 and not (tmp_path / "none").exists()


def test_ranges_of_a_trace_are_found_by_warp():
    trace = {
        "stringTable": ["consumer", "wait"],
        "locationTable": [{"ctaId": [0, 0, 0], "warpId": 0}, {"ctaId": [0, 0, 0], "warpId": 4}],
        "launches": [
            {
                "kernelName": "k",
                "ranges": [
                    {"rangeNameIdx": 0, "startTs": 0, "endTs": 640, "warpLocIdxs": [0]},
                    {"rangeNameIdx": 1, "startTs": 32, "endTs": 96, "warpLocIdxs": [0, 0]},
                    {"rangeNameIdx": 1, "startTs": 160, "endTs": 320, "warpLocIdxs": [0, 1]},
                ],
            }
        ],
    }
    found = timeline.ranges(trace)
    assert [(r["name"], r["warp"], r["end"] - r["start"]) for r in found] == [
        ("consumer", 0, 640),
        ("wait", 0, 64),
        ("wait", 0, 160),
        ("wait", 4, 160),
    ]
    assert "112" in timeline.table(found)
