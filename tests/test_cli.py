from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from cute_matmul import __main__ as cli
from cute_matmul import difference, harness, registry
from cute_matmul.problem import Check, Problem
from cute_matmul.registry import Variant

NAMES = [variant.name for variant in registry.BUILTIN]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens with no GPU")


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_list_has_every_rung_and_marks_the_default(capsys, monkeypatch):
    monkeypatch.setenv(registry.ENVIRONMENT, "v1")
    status, out, _ = call(capsys, "list")
    assert status == 0
    rows = [line.split("  ")[0] for line in out.splitlines()]
    assert [row for row in rows if row.split(" ")[0] in NAMES] == [
        name + " *" if name == "v1" else name for name in NAMES
    ]
    status, out, _ = call(capsys, "list", "--json")
    rows = json.loads(out)
    assert [row["name"] for row in rows] == NAMES
    assert [row["name"] for row in rows if row["default"]] == ["v1"]


def test_inspect_json_of_one_and_of_two(capsys):
    status, out, _ = call(capsys, "inspect", "v2", "--json")
    row = json.loads(out)
    assert status == 0 and row["variant"] == "v2" and row["ptx"]["wgmma"] > 0 and row["threads"] == 128
    status, out, _ = call(capsys, "inspect", "v0", "v1", "--json", "--dtype", "bf16", "--a-major", "m")
    rows = json.loads(out)
    assert [row["variant"] for row in rows] == ["v0", "v1"]
    assert {(row["dtype"], row["a_major"], row["b_major"]) for row in rows} == {("bfloat16", "m", "k")}


def test_inspect_table_and_config(capsys):
    status, out, _ = call(capsys, "inspect", "v2", "--config", "64x128x32,stages=4")
    assert status == 0 and "64x128x32,stages=4" in out and re.search(r"mbarrier init +4 PTX", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "v99"], "variant must be one of v0, "),
        (["inspect", "v99"], "variant must be one of v0, "),
        (["diff", "v0", "v99"], "variant must be one of v0, "),
        (["run", "v2", "--dtype", "fp8"], "dtype must be one of float16"),
        (["run", "v2", "--config", "128by128"], "config must look like 128x128x64"),
        (["run", "v2", "--config", "128x96x64"], "accepted: "),
        (["run", "v2", "--m", "-1"], "m must be an integer of at least 0, got -1"),
        (["run", "v2", "--repeat", "0"], "--repeat must be at least 1, got 0"),
        (["run", "v2", "--backend", "emulator", "--k", "1001"], "a has stride of 2002 bytes"),
        (["trace", "v1", "v2", "--config", "128x128x64"], "--config fits one variant, got 2: v1, v2"),
        (["trace", "v1", "--cta", "4"], "--cta must be one of 0 to 3, got 4"),
        (["trace", "v1", "--m", "0"], "nothing to trace"),
        (["trace", "v1", "--kinds", "load,mma"], "--kinds must be of load,tensor,store,wait; got load,mma"),
        (["diff", "v1", "v2", "--width", "10"], "width must be at least 40"),
    ],
)
def test_refusals_are_a_message_and_status_2(capsys, arguments, message):
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (harness.REFUSED, "")
    assert err.startswith("error: ") and message in err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run"], ["run", "v2", "--a-major", "n"], ["list", "--m", "3"]])
def test_usage_errors_are_argparse_s(capsys, arguments):
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == harness.REFUSED
    assert "usage: " in capsys.readouterr().err


@without_gpu
def test_gpu_backend_without_a_gpu_says_what_it_needs(capsys):
    status, _, err = call(capsys, "run", "v2", "--backend", "gpu")
    assert status == harness.REFUSED
    assert "needs a Hopper GPU" in err and "torch" in err


def test_compile_backend_says_that_nothing_ran(capsys):
    status, out, _ = call(capsys, "run", "v1", "--backend", "compile")
    assert status == 0 and "v1 compiled for sm_90a in" in out and "nothing was executed" in out
    status, out, _ = call(capsys, "run", "v1", "--backend", "compile", "--json", "--m", "8")
    row = json.loads(out)
    assert (row["executed"], row["seconds"], row["check"]) == (False, None, None)
    assert row["problem"]["m"] == 8 and row["inspection"]["ptx"]["wgmma"] > 0


def test_module_of_a_variant_is_the_same_command(capsys):
    done = command("cute_matmul.variants.v1", "--backend", "compile", "--json")
    assert done.returncode == 0
    _, out, _ = call(capsys, "run", "v1", "--backend", "compile", "--json")
    results = [json.loads(text) for text in (done.stdout, out)]
    for result in results:
        del result["compile_seconds"]
    assert results[0] == results[1]
    with pytest.raises(SystemExit) as raised:
        harness.main("v1", ["--config", "1x1x1"])
    assert raised.value.code == harness.REFUSED and capsys.readouterr().err.startswith("error: config ")


@without_gpu
def test_with_no_gpu_auto_runs_the_emulator_and_draws_the_timeline(capsys):
    status, out, err = call(capsys, "run", "v2")
    assert (status, err) == (harness.OK, "")
    row = dict(zip(*(re.split(r"  +", line.strip()) for line in out.splitlines()[0:3:2]), strict=True))
    assert row["m x n x k"] == "256x256x256" and row["backend"] == "emulator"
    assert (row["hazards"], row["result"]) == ("none", "right")
    assert "load stage 1 |" in out and "cycles" in out
    _, plain, _ = call(capsys, "run", "v2", "--no-timeline", "--m", "64")
    assert "load stage" not in plain and "64x256x256" in plain


@without_gpu
def test_auto_refuses_what_the_emulator_would_take_long_for(capsys):
    status, out, err = call(capsys, "run", "v2", "--m", "8192", "--n", "8192", "--k", "8192")
    assert (status, out) == (harness.REFUSED, "")
    assert re.search(r"would take the emulator about \d+ s, .*--backend emulator", err)


def test_emulator_json_and_schedules(capsys):
    arguments = ["run", "v1", "--backend", "emulator", "--m", "128", "--n", "128", "--k", "64", "--json"]
    rows = []
    for schedule in harness.SCHEDULES:
        status, out, err = call(capsys, *arguments, "--schedule", schedule, "--seed", "3", "--repeat", "2")
        assert (status, err) == (harness.OK, "")
        rows.append(json.loads(out))
    assert [row["emulator"]["schedule"] for row in rows] == list(harness.SCHEDULES)
    assert all(row["ok"] and row["check"]["ok"] and row["repeatable"] and row["tflops"] is None for row in rows)
    assert all(row["emulator"]["seed"] == row["problem"]["seed"] == 3 for row in rows)
    assert len({row["check"]["max_abs"] for row in rows}) == 1


@pytest.mark.parametrize("mnk", [("0", "128", "64"), ("128", "128", "0")])
def test_empty_problems(capsys, mnk):
    options = [text for name, value in zip(("--m", "--n", "--k"), mnk, strict=True) for text in (name, value)]
    status, out, err = call(capsys, "run", "v1", "--backend", "emulator", *options)
    assert (status, err) == (harness.OK, "") and "right" in out


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Register V1 with one line of its source replaced."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUTE_MATMUL_CACHE", "0")
    monkeypatch.setattr(registry, "_variants", dict(registry._variants))
    count = itertools.count()

    def make(old: str, new: str) -> str:
        source = Path(registry.get("v1").load().__file__).read_text()
        assert source.count(old) == 1
        name = f"broken{next(count)}_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(source.replace(old, new))
        registry.register(Variant(name, name, "broken", "on purpose"))
        return name

    return make


def test_a_hazard_is_status_1_and_both_sides_are_named(capsys, broken):
    name = broken("cute.arch.mbarrier_wait(full, phase)", "pass")
    status, out, err = call(capsys, "run", name, "--backend", "emulator", "--k", "128")
    assert status == harness.WRONG and f"the emulator found faults in {name}" in err
    assert f"{name}.py:" in out and "hazard" in out
    status, out, err = call(capsys, "run", name, "--backend", "emulator", "--k", "128", "--json")
    row = json.loads(out)
    assert status == harness.WRONG and not row["ok"] and row["emulator"]["hazards"]


def test_a_deadlock_is_status_1_and_shown(capsys, broken):
    never = broken("cute.arch.mbarrier_init(full, 1)", "cute.arch.mbarrier_init(full, 2)")
    status, out, _ = call(capsys, "run", never, "--backend", "emulator", "--k", "64")
    assert status == harness.WRONG and "DEADLOCK" in out and "deadlock in" in out


def test_trace_draws_and_writes(capsys, tmp_path):
    svg, perfetto = tmp_path / "both.svg", tmp_path / "both.json"
    arguments = ["trace", "v1", "v2", "--m", "128", "--n", "256", "--k", "256", "--width", "90"]
    status, out, err = call(capsys, *arguments, "--svg", str(svg), "--perfetto", str(perfetto))
    assert (status, err) == (harness.OK, "")
    assert out.index("V1 128x128x64") < out.index("V2 128x128x64,stages=2")
    assert max(len(line) for line in out.splitlines() if "|" in line) <= 90
    picture = ElementTree.parse(svg).getroot()
    titles = [element.text for element in picture.iter() if element.get("class") == "title"]
    assert titles == ["V1 128x128x64", "V2 128x128x64,stages=2"]
    assert {element.get("class") for element in picture.iter()} >= {"load", "tensor", "store", "wait"}
    events = json.loads(perfetto.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes) == [0, 1, 2, 3]  # two CTAs of each
    assert [processes[pid].split(":")[0] for pid in (0, 2)] == titles
    assert {event["pid"] for event in events} == set(processes)


def test_the_command_in_the_readme_draws_its_picture(capsys, monkeypatch, tmp_path):
    readme = (Path(cli.__file__).parent.parent / "README.md").read_text()
    (line,) = re.findall(r"^python -m cute_matmul (trace .*)$", readme, re.MULTILINE)[-1:]
    *arguments, option, target = line.split()
    assert option == "--svg" and f"]({target})" in readme and (Path(cli.__file__).parent.parent / target).is_file()
    monkeypatch.chdir(tmp_path)
    status, _, err = call(capsys, *arguments, "--svg", "picture.svg")
    assert (status, err) == (harness.OK, "")
    classes = [element.get("class") for element in ElementTree.parse("picture.svg").iter()]
    assert classes.count("load") >= 16 and classes.count("tensor") > 0 and "wait" not in classes


def test_trace_of_a_faulty_variant_is_status_1(capsys, broken):
    name = broken("cute.arch.mbarrier_wait(full, phase)", "pass")
    status, _, err = call(capsys, "trace", "v1", name, "--m", "128", "--n", "128", "--k", "128")
    assert status == harness.WRONG and f"faults in {name}" in err and "faults in v1" not in err


def outcome(**changes) -> harness.Outcome:
    good = Check(0.1, 0.2, 1e-4, 2e-4, 0, (0, 0))
    values = {
        "variant": "v1",
        "problem": Problem(1000, 1000, 1000),
        "config": "128x128x64",
        "backend": "gpu",
        "device": "NVIDIA H200",
        "seconds": 4e-6,
        "cublas_seconds": 3e-6,
        "check": good,
        "repeatable": True,
    }
    return harness.Outcome(**{**values, **changes})


def report(capsys, made: harness.Outcome, *arguments: str) -> tuple[int, str, str]:
    parsed = cli.parser().parse_args(["run", "v1", *arguments])
    status = harness._report(made, parsed)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_table_of_a_right_run(capsys):
    status, out, err = report(capsys, outcome())
    assert (status, err) == (harness.OK, "")
    for cell in ("1000x1000x1000", "float16", "128x128x64", "4 us", "500.0", "75.0", "0.1", "0.2", "right"):
        assert cell in out
    status, out, _ = report(capsys, outcome(), "--json")
    row = json.loads(out)
    assert row["tflops"] == pytest.approx(500) and row["percent_of_cublas"] == pytest.approx(75) and row["ok"]


def test_a_wrong_result_is_status_1_and_an_error(capsys):
    wrong = Check(1.0, 0.2, 1e-4, 2e-4, 0, (3, 4))
    status, out, err = report(capsys, outcome(check=wrong))
    assert status == harness.WRONG and "WRONG" in out
    assert "error: v1 is wrong" in err and "C[3, 4]" in err
    status, out, _ = report(capsys, outcome(check=wrong), "--json")
    assert status == harness.WRONG and not json.loads(out)["ok"]


def test_other_bits_for_the_same_operands_are_status_1(capsys):
    status, out, err = report(capsys, outcome(repeatable=False))
    assert status == harness.WRONG and "NOT REPEATABLE" in out and "different bits" in err


def test_unchecked_is_not_called_right(capsys):
    status, out, _ = report(capsys, outcome(check=None))
    assert status == harness.OK and "not checked" in out and "right" not in out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.0, "2 s"), (0.00212, "2.12 ms"), (3.4e-5, "34 us"), (2.5e-8, "25 ns"), (0.0, "0 ns")],
)
def test_durations(seconds, text):
    assert harness.duration(seconds) == text


def test_same_bits_tells_zeros_and_nans_apart():
    x = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.float16)
    assert harness.same_bits(x, x.clone())
    assert not harness.same_bits(x, torch.tensor([-0.0, float("nan"), 1.0], dtype=torch.float16))


def test_bench_passes_its_arguments_on():
    done = command("cute_matmul", "bench", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: perf/run.py") and "--suite" in done.stdout
    done = command("cute_matmul", "bench", "--suite", "none")
    assert done.returncode == 2 and "--suite: invalid choice: 'none'" in done.stderr


def test_bench_of_an_installed_copy_says_what_it_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "cute_matmul" / "__main__.py"))
    status, _, err = call(capsys, "bench")
    assert status == harness.REFUSED and "bench needs a checkout of the project" in err


def test_tune_passes_its_arguments_on(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["tune", "--help"])
    assert raised.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m cute_matmul tune") and "--shape" in out


# diff

OLD = '''"""V7: one.

Only one.
"""

x = 1
y = some_function(x, first=1)
z = 3


def matmul_v7_kernel():
    pass
'''
NEW = '''"""V8: two.

What changes: there are two.
"""

x = 1
y = some_function(x, second=2)
w = 0
z = 3


def matmul_v8_kernel():
    pass
'''


@pytest.fixture
def pair(tmp_path, monkeypatch) -> tuple[Variant, Variant]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rung_v7.py").write_text(OLD)
    (tmp_path / "rung_v8.py").write_text(NEW)
    return Variant("v7", "rung_v7", "one", "one"), Variant("v8", "rung_v8", "two", "there are two")


def test_diff_shows_the_idea_and_what_changed(pair):
    text = difference.render(*pair, width=120)
    assert text.startswith("v7 -> v8: two\nthere are two\n")
    assert "What changes: there are two." in text and "Only one." not in text
    changed = [line for line in text.splitlines() if "some_function" in line]
    assert len(changed) == 1 and " | " in changed[0] and "first=1" in changed[0] and "second=2" in changed[0]
    (added,) = [line for line in text.splitlines() if "w = 0" in line]
    assert re.search(r" > +8 w = 0$", added)
    assert not re.search(r"matmul_v\d_kernel.*[<>|]", text)
    assert "\x1b" not in text


def test_diff_colours_only_what_changed(pair):
    text = difference.render(*pair, width=120, colour=True)
    (changed,) = [line for line in text.splitlines() if "some_function" in line]
    assert "\x1b[31mfirst\x1b[0m" in changed and "\x1b[32msecond\x1b[0m" in changed
    assert "\x1b[31msome_function" not in changed
    assert re.sub(r"\x1b\[\d+m", "", text) == difference.render(*pair, width=120)


@pytest.mark.parametrize("width", [40, 79, 99, 100, 101, 133])
def test_diff_keeps_to_the_width(pair, width):
    shown = difference.render(*pair, width=width).splitlines()
    assert max(map(len, shown)) <= width
    real = difference.render(registry.get("v1"), registry.get("v2"), width=width, colour=True)
    assert max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in real.splitlines()) <= width


def test_diff_below_each_other_is_a_unified_one(pair):
    lines = difference.render(*pair, width=60).splitlines()
    assert "- y = some_function(x, first=1)" in lines and "+ y = some_function(x, second=2)" in lines
    assert "+ w = 0" in lines and "  x = 1" in lines


@pytest.mark.parametrize(("old", "new"), list(itertools.pairwise(NAMES)))
def test_diff_loses_no_line(old, new):
    """Every line of both sources is in a hunk or unchanged outside of them, in order and once."""
    (_, left), (_, right) = (difference.read_source(registry.get(name)) for name in (old, new))
    hunks = list(difference.changes(left, right, old, new))
    assert hunks
    for side, lines, name in ((0, left, old), (1, right, new)):
        numbers = [p[side].number for hunk in hunks for p in hunk if p[side]]
        assert numbers == sorted(set(numbers))
        hidden = [line for line in lines if line.number not in set(numbers)]
        other, other_name = (right, new) if side == 0 else (left, old)
        keys = {difference._key(line.text, other_name) for line in other}
        assert all(difference._key(line.text, name) in keys for line in hidden)


def test_diff_of_a_variant_with_itself(pair):
    assert "the sources are the same" in difference.render(pair[0], pair[0], width=100)


def test_diff_command_puts_both_inspections_beside_each_other(capsys):
    status, out, _ = call(capsys, "diff", "v1", "v2", "--width", "120")
    assert status == 0 and "\x1b" not in out
    assert out.startswith("v1 -> v2: ")
    assert re.search(r"^ +v1 +v2$", out, re.MULTILINE)
    assert re.search(r"^mbarrier init +1 PTX.* +2 PTX", out, re.MULTILINE)
    status, out, _ = call(capsys, "diff", "v1", "v2", "--color")
    assert "\x1b[32m" in out


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_run_on_the_gpu(capsys, name):
    arguments = ("run", name, "--m", "1000", "--n", "520", "--k", "264", "--b-major", "n", "--repeat", "3")
    status, out, err = call(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    row = json.loads(out)
    assert row["backend"] == "gpu" and row["check"]["ok"] and row["repeatable"] and row["percent_of_cublas"] > 0
    status, out, _ = call(capsys, *arguments)
    assert status == 0 and "right" in out and "TFLOP/s" in out
