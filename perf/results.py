"""Result files: one JSON per run that says everything about itself, written so that it is never half there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

FORMAT = 1
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "perf" / "results"

IDENTITY = ("suite", "dtype", "a_major", "b_major", "quick", "simulated")
"""What must agree for a run to be a continuation of another; besides, commit, board, shapes and contenders."""


def begin(
    suite: str,
    started: datetime,
    command: Sequence[str],
    *,
    machine: dict[str, Any],
    versions: dict[str, str],
    conditions: dict[str, Any],
    shapes: Iterable[Any] = (),
    contenders: Sequence[dict[str, Any]] = (),
    quick: bool = False,
    simulated: bool = False,
    partial: bool = False,
) -> dict[str, Any]:
    """A result with everything but what is measured.

    shapes: `suites.Shape`s. partial: of other contenders, configurations or shapes than the suite's own; no page's
    table of the suite is made from it.
    """
    return {
        "format": FORMAT,
        "suite": suite,
        "complete": False,
        "simulated": simulated,
        "quick": quick,
        "partial": partial,
        "started": started.isoformat(timespec="seconds"),
        "finished": None,
        "command": " ".join(command),
        **repository_state(),
        "machine": machine,
        "versions": versions,
        "conditions": conditions,
        "shapes": [{"mnk": list(s.mnk), "name": s.name} for s in shapes],
        "contenders": list(contenders),
        "skipped": [],
        "failed": [],
        "checks": [],
        "ceilings": [],
        "measurements": [],
    }


def end(record: dict[str, Any]) -> None:
    """Mark a result as whole, now."""
    record["complete"] = True
    record["finished"] = now().isoformat(timespec="seconds")


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`; a reader, or a run that is stopped, sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def dump(record: dict[str, Any]) -> str:
    """JSON with one measurement a line: short, and readable in a diff."""
    lists = {key: value for key, value in record.items() if isinstance(value, list) and value}
    head = {key: (f"@{key}@" if key in lists else value) for key, value in record.items()}
    text = json.dumps(head, indent=1)
    for key, items in lists.items():
        rows = ",\n  ".join(json.dumps(item, separators=(", ", ": ")) for item in items)
        text = text.replace(f'"@{key}@"', f"[\n  {rows}\n ]")
    return text + "\n"


def load(path: Path) -> dict[str, Any]:
    """Read a result. Raises ValueError for another format."""
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    if record.get("format") != FORMAT:
        raise ValueError(f"{path} has format {record.get('format')!r}; this version reads {FORMAT}")
    return record


def all_results(folder: Path = FOLDER) -> list[tuple[Path, dict[str, Any]]]:
    """All results in a folder, oldest run first."""
    found = [(path, load(path)) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda item: (item[1]["started"], item[0].name))


def short_gpu(name: str) -> str:
    """ "NVIDIA H200" -> "h200"; what a file name can hold."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia").strip()).strip("-")
    return text or "none"


def new_path(folder: Path, started: datetime, gpu: str, suite: str, dtype: str) -> Path:
    """<date>-<gpu>-<suite>.json, the type added where it is not float16, a number where the name is taken."""
    stem = f"{started:%Y-%m-%d}-{short_gpu(gpu)}-{suite}" + ("" if dtype == "float16" else f"-{dtype}")
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path


def now() -> datetime:
    return datetime.now(timezone.utc)


def repository_state(root: Path = ROOT) -> dict[str, Any]:
    """Commit, and whether the tree was clean apart from results; both None outside a repository.

    CUTE_MATMUL_COMMIT ("<sha>" or "<sha>-dirty") stands in where the files were copied without their repository.
    """
    override = os.environ.get("CUTE_MATMUL_COMMIT")
    if override:
        return {"commit": override.removesuffix("-dirty"), "clean": not override.endswith("-dirty")}

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    status = git("status", "--porcelain", "--", ".", ":(exclude)perf/results")
    return {"commit": commit, "clean": None if commit is None or status is None else status == ""}


def identity(record: dict[str, Any]) -> dict[str, Any]:
    """What two parts of one run have in common."""
    conditions = record["conditions"]
    found = {key: record.get(key, conditions.get(key)) for key in IDENTITY}
    return {
        **found,
        "commit": record["commit"],
        "gpu": record["machine"].get("gpu"),
        "board": record["machine"].get("board"),
        "shapes": [s["mnk"] for s in record["shapes"]],
        "contenders": [(c["name"], c.get("asked")) for c in record["contenders"]],
    }


def unfinished(folder: Path, wanted: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """The newest run in `folder` that was stopped and has this identity."""
    found = [
        (path, record) for path, record in all_results(folder) if not record["complete"] and identity(record) == wanted
    ]
    return found[-1] if found else None
