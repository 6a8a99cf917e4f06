"""The pages: links lead somewhere, commands are run by a test, what is generated is fresh."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from functools import cache
from pathlib import Path

import pytest

from cute_matmul import __main__ as cli
from cute_matmul import inspection, registry, tuner
from docs import refresh
from perf import everything, profile, render, run
from perf import timeline as gpu_timeline

ROOT = refresh.ROOT
PAGES = sorted(path for pattern in ("*.md", "docs/*.md", "perf/*.md") for path in ROOT.glob(pattern))
RUNGS = [ROOT / "docs" / f"{name}.md" for name in refresh.RUNGS]
CLI, TUNER, PERF = "tests/test_cli.py", "tests/test_tuner.py", "tests/test_perf_run.py"

COMMANDS = {
    "make run": ".ci/run",
    "make test": ".ci/run",
    "make run TORCH_INDEX=<PyTorch's index of CPU wheels>": ".ci/run",
    "python -m cute_matmul.variants.v0": f"{CLI}::test_module_of_a_variant_is_the_same_command",
    "python -m cute_matmul.variants.v2": ".ci/run",
    "python -m cute_matmul list": f"{CLI}::test_list_has_every_rung_and_marks_the_default",
    "python -m cute_matmul run v2": f"{CLI}::test_with_no_gpu_auto_runs_the_emulator_and_draws_the_timeline",
    "python -m cute_matmul run v2 --schedule adversarial --seed 3 --json": (f"{CLI}::test_emulator_json_and_schedules"),
    "python -m cute_matmul run v2 --backend emulator --schedule adversarial --seed 3 --json": (
        f"{CLI}::test_emulator_json_and_schedules"
    ),
    "python -m cute_matmul trace v1 v2": f"{CLI}::test_trace_draws_and_writes",
    "python -m cute_matmul trace v1 v2 --m 128 --n 128 --k 512 --kinds load,tensor --svg docs/figures/v1-v2.svg": (
        "tests/test_docs.py::test_the_commands_of_pictures_draw_them"
    ),
    "python -m cute_matmul trace v3": f"{CLI}::test_trace_draws_and_writes",
    "python -m cute_matmul trace v3 v4 --m 128 --n 256 --k 256 --svg picture.svg": (
        "tests/test_docs.py::test_the_commands_of_pictures_draw_them"
    ),
    "python -m cute_matmul inspect v2": f"{CLI}::test_inspect_json_of_one_and_of_two",
    "python -m cute_matmul bench": f"{CLI}::test_bench_passes_its_arguments_on",
    "python -m cute_matmul tune": f"{TUNER}::test_without_a_gpu_the_command_says_so",
    "python -m cute_matmul tune v2": f"{TUNER}::test_without_a_gpu_the_command_says_so",
    "python docs/refresh.py": "tests/test_docs.py::test_what_was_changed_by_hand_is_named_and_mended",
    "python docs/refresh.py --check": "tests/test_docs.py::test_figures_and_tables_are_fresh",
    "python perf/render.py": "tests/test_perf_render.py::test_pages_and_plots_are_filled_and_then_fresh",
    "python perf/render.py --agree A.json B.json": "tests/test_perf_render.py::test_two_runs_agree_or_not",
    "python perf/run.py --simulate --results FOLDER": f"{PERF}::test_a_result_says_everything_about_itself",
    # These need a GPU: parsed here, what they do is tested on a simulated board or a stand-in for the device.
    "python perf/everything.py": "tests/test_perf_run.py::test_everything_goes_on_after_a_step_that_fails",
    "python perf/profile.py v2 v3": "tests/test_perf_render.py::test_nsight_computes_table_is_read",
    "python perf/timeline.py v3 --shape 1024x1024x1024": (
        "tests/test_perf_render.py::test_ranges_of_a_trace_are_found_by_warp"
    ),
}
"""What the pages tell a reader to type, and where it, or the same with other values, is run."""

DIFFS = [f"python -m cute_matmul diff {a} {b}" for a, b in zip(refresh.RUNGS, refresh.RUNGS[1:], strict=False)]
COMMANDS |= dict.fromkeys(DIFFS, "tests/test_docs.py::test_a_rung_and_the_one_below_it_can_be_compared")
SUITES = ("ladder", "square", "model", "decode", "host", "compile", "precision")
MEASURE = {
    f"python perf/run.py --suite {name}": f"{PERF}::test_suites_hold_the_shapes_of_the_case_file" for name in SUITES
}
"""A page names these where there is no result yet, so they come and go."""
MEASURE["python perf/profile.py v2"] = "tests/test_perf_render.py::test_nsight_computes_table_is_read"
COMMANDS |= MEASURE

needs_disassembler = pytest.mark.skipif(
    inspection.find_disassembler() is None, reason=f"SASS {inspection.NO_DISASSEMBLER}"
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def written(page: Path) -> str:
    """A rung's page without what is generated."""
    return re.sub(r"<!-- (docs|perf):.*?<!-- /\1 -->", "", prose(page), flags=re.S)


# Links


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    names: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *$", prose(page), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = names.get(name, 0)
        names[name] = count + 1
        found.add(f"{name}-{count}" if count else name)
    return found


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: *(\S+)", text, re.M)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page):
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/\S*)?", link), link
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists() and path.is_relative_to(ROOT), f"{relative(page)}: {link}"
        if anchor:
            assert path.suffix == ".md" and anchor in anchors(path), f"{relative(page)}: {link}"


def test_every_page_and_every_figure_can_be_reached():
    seen, todo = set(), [ROOT / "README.md", ROOT / "docs" / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        if page.suffix == ".md":
            targets = (link.partition("#")[0] for link in links(page) if not re.match(r"[a-z]+:", link))
            todo += ((page.parent / target).resolve() for target in targets if target)
    wanted = {*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "figures").glob("*.svg"), ROOT / "perf" / "README.md"}
    assert {relative(path) for path in wanted - seen} == set()


# Commands


def commands(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    lines = [
        line for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.S | re.M) for line in block.splitlines()
    ]
    lines += re.findall(r"`((?:python|pip|make)\s[^`]*)`", prose(page))
    without_comments = (re.sub(r"\s+#.*", "", line) for line in lines)
    return {" ".join(line.split()) for line in without_comments if line.strip()} - {"python -m"}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_command_is_run_somewhere(page):
    assert {command for command in commands(page) if command not in COMMANDS} == set()


def test_no_command_is_listed_that_no_page_has():
    assert set(COMMANDS) - set(MEASURE) - {command for page in PAGES for command in commands(page)} == set()


@pytest.mark.parametrize("where", sorted({*COMMANDS.values()}))
def test_where_a_command_is_run_exists(where):
    if where == ".ci/run":
        assert {"make run", "make test"} <= set((ROOT / where).read_text(encoding="utf-8").splitlines())
        return
    path, _, name = where.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


PARSERS = {
    "perf/run.py": run.parser,
    "perf/render.py": render.parser,
    "perf/profile.py": profile.parser,
    "perf/everything.py": everything.parser,
    "perf/timeline.py": gpu_timeline.parser,
    "docs/refresh.py": refresh.parser,
}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("python ")])
def test_commands_are_ones_that_their_parsers_accept(command):
    program, *arguments = shlex.split(command)[1:]
    if program != "-m":
        PARSERS[program]().parse_args(arguments)
        assert (ROOT / program).is_file()
        return
    module, *arguments = arguments
    if module != "cute_matmul":
        assert module.rpartition(".")[2] in registry.names() and not arguments
    elif arguments[0] == "tune":
        tuner.parser().parse_args(arguments[1:])
    elif arguments[0] == "bench":
        run.parser().parse_args(arguments[1:])
    else:
        cli.parser().parse_args(arguments)


@pytest.mark.parametrize("command", DIFFS)
def test_a_rung_and_the_one_below_it_can_be_compared(command, capsys):
    old, new = command.split()[-2:]
    assert cli.main([*shlex.split(command)[3:], "--width", "120"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{old} -> {new}: {registry.get(new).title}") and "CTAs per SM" in out
    assert f"`{command}`" in (ROOT / "docs" / f"{new}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--svg" in c])
def test_the_commands_of_pictures_draw_them(command, tmp_path, monkeypatch, capsys):
    *arguments, target = shlex.split(command)[3:]
    drawn = tmp_path / "picture.svg"
    monkeypatch.chdir(ROOT)  # a picture names its places relative to the working directory
    assert cli.main([*arguments, str(drawn)]) == 0
    capsys.readouterr()
    if target.startswith("docs/"):
        assert drawn.read_bytes() == (ROOT / target).read_bytes()
    assert drawn.read_text(encoding="utf-8").startswith("<svg")


# What is generated


@needs_disassembler
def test_figures_and_tables_are_fresh(capsys):
    assert refresh.main(["--check"]) == 0, capsys.readouterr().out


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Path:
    """The pages and what they show, up to date whether the project's own are or not."""
    folder = tmp_path_factory.mktemp("fresh")
    for page in PAGES:
        (folder / relative(page)).parent.mkdir(exist_ok=True)
        shutil.copy(page, folder / relative(page))
    shutil.copytree(ROOT / "docs" / "figures", folder / "docs" / "figures")
    refresh.refresh(folder, check=False)
    return folder


@pytest.fixture
def copy(fresh, tmp_path) -> Path:
    return shutil.copytree(fresh, tmp_path / "copy")


@needs_disassembler
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("docs/v3.md", "| threads                       | 128 ", "| threads                       | 256 "),
        ("docs/v6.md", "| `epi_empty` | 3 ", "| `epi_empty` | 4 "),
        ("docs/README.md", "| warp specialization ", "| warp specialisation "),
        ("docs/figures/v5.svg", 'class="tensor"', 'class="load"'),
    ],
)
def test_what_was_changed_by_hand_is_named_and_mended(copy, name, old, new, capsys):
    path = copy / name
    right = path.read_text(encoding="utf-8")
    assert old in right
    path.write_text(right.replace(old, new, 1), encoding="utf-8")
    arguments = ["--root", str(copy)]
    assert refresh.main([*arguments, "--check"]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [f"stale: {name}"] and refresh.COMMAND in captured.err
    assert path.read_text(encoding="utf-8") != right  # a check writes nothing
    assert refresh.main([*arguments, name]) == 0
    assert capsys.readouterr().out == f"wrote {name}\n"
    assert path.read_text(encoding="utf-8") == right


@needs_disassembler
def test_a_missing_figure_is_drawn_and_a_stray_one_named(copy, fresh, capsys):
    (copy / "docs/figures/v2.svg").unlink()
    (copy / "docs/figures/old.svg").write_text("<svg/>")
    assert refresh.main(["--root", str(copy), "--check"]) == 1
    out = capsys.readouterr().out
    assert "stale: docs/figures/v2.svg\n" in out and "stale: docs/figures/old.svg (nothing draws it)\n" in out
    refresh.main(["--root", str(copy)])
    assert (copy / "docs/figures/v2.svg").read_bytes() == (fresh / "docs/figures/v2.svg").read_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- docs:inspect v9 -->\n<!-- /docs -->\n", "docs:inspect v9"),
        ("<!-- docs:ladder v3 -->\n<!-- /docs -->\n", "docs:ladder v3"),
        ("<!-- docs:size v3 -->\n<!-- /docs -->\n", "docs:size v3"),
        ("<!-- docs:inspect v3 -->\n", "1 opening and 0 closing"),
        ("<!-- docs:inspect v3 -->\n<!-- docs:inspect v3 -->\n<!-- /docs -->\n", "2 opening and 1 closing"),
    ],
)
def test_bad_markers_are_named(tmp_path, text, said):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "v3.md").write_text(text)
    with pytest.raises(ValueError, match=said):
        refresh.refresh(tmp_path, check=True)


def test_a_file_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit) as raised:
        refresh.main(["--check", "docs/v9.md"])
    assert raised.value.code == 2 and "docs/v9.md" in capsys.readouterr().err


def test_without_a_disassembler_nothing_is_written(copy, monkeypatch, capsys):
    refresh.inspected.cache_clear()
    monkeypatch.setattr(inspection, "find_disassembler", lambda: None)
    inspection.disassemble.cache_clear()
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as raised:
        refresh.main(["--root", str(copy), "docs/v3.md"])
    assert raised.value.code == 2 and inspection.DISASSEMBLER_PACKAGE in capsys.readouterr().err
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    refresh.inspected.cache_clear()


def test_a_kernel_with_a_fault_is_not_drawn(monkeypatch):
    class Faulty:
        ok = False

    monkeypatch.setattr(refresh, "emulate", lambda *args, **kwargs: (None, Faulty()))
    with pytest.raises(RuntimeError, match="found faults"):
        refresh.executed.__wrapped__(refresh.Panel("v1", (64, 128, 64)))


# What every rung's page has

SECTIONS = (
    "The idea",
    "The protocol",
    "What the timeline shows",
    "What the compiler made of it",
    "Measured",
    "What is still idle",
)


@pytest.mark.parametrize("page", RUNGS, ids=relative)
def test_a_rung_s_page_is_whole(page):
    name, text = page.stem, page.read_text(encoding="utf-8")
    assert text.startswith(f"# {name.upper()}: {registry.get(name).title}\n")
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert [heading for heading in headings if heading in SECTIONS] == list(SECTIONS)
    for marker in (f"docs:barriers {name}", f"docs:inspect {name}", f"perf:row variant={name}"):
        assert text.count(f"<!-- {marker} -->") == 1
    assert "](figures/" in text and f"](../cute_matmul/variants/{name}.py)" in text


@pytest.mark.parametrize("page", RUNGS, ids=relative)
def test_speeds_come_from_results_only(page):
    assert re.findall(r"[\d.]+ ?(?:TFLOP|TB/s|ms\b|us\b|pJ|x cuBLAS|x of cuBLAS)", written(page)) == []
