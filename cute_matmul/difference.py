"""What changed from one variant to another, as something to read: the idea, then the sources side by side.

Module docstrings are left out of the comparison (the newer one is shown above it), and a name that differs
only by the variant's own, as `matmul_v1_kernel` and `matmul_v2_kernel`, counts as the same.
"""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path

from cute_matmul.registry import Variant

CONTEXT = 2
"""Unchanged lines kept around a change."""

MIN_SIDE_BY_SIDE = 100
"""Columns below which old and new lines are printed under each other."""

FALLBACK_WIDTH = 140
SIMILAR = 0.55
"""Ratio (difflib) from which two lines count as one line that was changed."""

RED, GREEN, BOLD, DIM, PLAIN = "31", "32", "1", "2", ""

Segments = list[tuple[str, str]]


@dataclass(frozen=True)
class Line:
    number: int
    text: str


Pair = tuple[Line | None, Line | None]


def render(old: Variant, new: Variant, *, width: int | None = None, colour: bool = False) -> str:
    """The comparison as text of at most `width` columns (default: the terminal's)."""
    columns = width if width is not None else shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns
    if columns < 40:
        raise ValueError(f"width must be at least 40 columns, got {columns}")
    paint = _Paint(colour)
    _, old_lines = read_source(old)
    new_docstring, new_lines = read_source(new)
    out = [
        paint(f"{old.name} -> {new.name}: {new.title}", BOLD),
        *textwrap.wrap(new.change, columns),
        "",
        *_prose(new_docstring, columns),
        "",
    ]
    hunks = list(changes(old_lines, new_lines, old.name, new.name))
    if not hunks:
        out.append("the sources are the same")
    side_by_side = columns >= MIN_SIDE_BY_SIDE
    for hunk in hunks:
        out.append(paint(_place(hunk, old.name, new.name), DIM))
        for left, right in hunk:
            out += _row(left, right, old.name, new.name, columns, paint, side_by_side)
    return "\n".join(line.rstrip() for line in out)


def _prose(text: str, columns: int) -> list[str]:
    """A docstring's lines; a paragraph that is too wide is filled anew, what is indented in it is kept."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        own = paragraph.splitlines()
        if all(len(line) <= columns for line in own) or any(line[:1].isspace() for line in own):
            lines += own
        else:
            lines += textwrap.wrap(paragraph, columns)
        lines.append("")
    return lines[:-1]


def read_source(variant: Variant) -> tuple[str, list[Line]]:
    """(docstring, lines of code without it) of a variant's module, which is not imported."""
    spec = find_spec(variant.module)
    if spec is None or spec.origin is None:
        raise ValueError(f"module {variant.module!r} of variant {variant.name!r} has no source file")
    source = Path(spec.origin).read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree) or ""
    end = tree.body[0].end_lineno or 0 if docstring else 0
    return docstring, [Line(i, text) for i, text in enumerate(source.splitlines(), 1) if i > end]


def changes(old: list[Line], new: list[Line], old_name: str, new_name: str) -> Iterator[list[Pair]]:
    """The changed places with their context: pairs of lines, None where a side has no counterpart."""
    old_keys = [_key(line.text, old_name) for line in old]
    new_keys = [_key(line.text, new_name) for line in new]
    matcher = SequenceMatcher(None, old_keys, new_keys, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        hunk: list[Pair] = []
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                hunk += zip(old[i1:i2], new[j1:j2], strict=True)
            else:
                hunk += _aligned(old[i1:i2], new[j1:j2])
        yield hunk


def _key(text: str, name: str) -> str:
    """A line as it would be in any variant: `v2` stands in names and headings, so neither case counts."""
    return re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "\0", text.rstrip(), flags=re.IGNORECASE)


def _aligned(old: list[Line], new: list[Line]) -> list[Pair]:
    """Lines of a changed block, the similar ones beside each other: the alignment of greatest similarity."""
    gain = [[0.0] * (len(new) + 1) for _ in range(len(old) + 1)]
    likeness = [[_likeness(o.text, n.text) for n in new] for o in old]
    for i in reversed(range(len(old))):
        for j in reversed(range(len(new))):
            pair = likeness[i][j] + gain[i + 1][j + 1] if likeness[i][j] else 0.0
            gain[i][j] = max(pair, gain[i + 1][j], gain[i][j + 1])
    pairs: list[Pair] = []
    i = j = 0
    while i < len(old) and j < len(new):
        if likeness[i][j] and gain[i][j] == likeness[i][j] + gain[i + 1][j + 1]:
            pairs.append((old[i], new[j]))
            i, j = i + 1, j + 1
        elif gain[i][j] == gain[i + 1][j]:
            pairs.append((old[i], None))
            i += 1
        else:
            pairs.append((None, new[j]))
            j += 1
    return pairs + [(line, None) for line in old[i:]] + [(None, line) for line in new[j:]]


def _likeness(old: str, new: str) -> float:
    """0 for lines that are not one line changed, else how alike they are."""
    if not old.strip() or not new.strip():
        return float(old.strip() == new.strip())
    ratio = SequenceMatcher(None, old.strip(), new.strip(), autojunk=False).ratio()
    return ratio if ratio >= SIMILAR else 0.0


class _Paint:
    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def __call__(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and code and text else text


def _place(hunk: list[Pair], old_name: str, new_name: str) -> str:
    def span(side: int) -> str:
        numbers = [pair[side].number for pair in hunk if pair[side] is not None]
        return f"{numbers[0]}-{numbers[-1]}" if numbers else "none"

    return f"--- {old_name} lines {span(0)}, {new_name} lines {span(1)}"


def _row(
    left: Line | None,
    right: Line | None,
    old_name: str,
    new_name: str,
    columns: int,
    paint: _Paint,
    side_by_side: bool,
) -> list[str]:
    """One pair as printed lines. The sign in the middle says, without colour too, what happened to it."""
    same = left is not None and right is not None and _key(left.text, old_name) == _key(right.text, new_name)
    if same:
        sign, segments = " ", ([(left.text, PLAIN)], [(right.text, PLAIN)])
    elif left is not None and right is not None:
        sign, segments = "|", _marked(left.text, right.text)
    else:
        sign = "<" if left is not None else ">"
        segments = ([(left.text, RED)] if left else [], [(right.text, GREEN)] if right else [])
    if not side_by_side:
        signed = [(" ", segments[1])] if same else list(zip("-+", segments, strict=True))
        rows = [(mark, _wrapped(part, columns - 2, paint)) for mark, part in signed if part]
        return [f"{mark} {line}" for mark, lines in rows for line, _ in lines]
    cell = (columns - 3) // 2 - 5
    cells = [_wrapped(part, cell, paint) for part in segments]
    numbers = [str(line.number) if line else "" for line in (left, right)]
    out = []
    for i in range(max(1, *map(len, cells))):
        halves = []
        for lines, number in zip(cells, numbers, strict=True):
            text, length = lines[i] if i < len(lines) else ("", 0)
            shown = paint((number if i == 0 else "").rjust(4), DIM)
            halves.append(f"{shown} {text}{' ' * (cell - length)}")
        out.append(f"{halves[0]} {sign} {halves[1]}")
    return out


def _marked(old: str, new: str) -> tuple[Segments, Segments]:
    """Both lines in segments, the words that differ in the side's colour."""
    words = [re.findall(r"\w+|\s+|.", text) for text in (old, new)]
    result: tuple[Segments, Segments] = ([], [])
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        changed = kind != "equal"
        result[0].append(("".join(words[0][i1:i2]), RED if changed else PLAIN))
        result[1].append(("".join(words[1][j1:j2]), GREEN if changed else PLAIN))
    return result


def _wrapped(segments: Segments, width: int, paint: _Paint) -> list[tuple[str, int]]:
    """(text with colour codes, visible length) of each printed line; continuations are indented two more."""
    plain = "".join(text for text, _ in segments)
    indent = min(len(plain) - len(plain.lstrip()) + 2, width // 2)
    lines, start = [], 0
    while start < len(plain) or not lines:
        pad = indent if lines else 0
        end = _break(plain, start, start + width - pad)
        lines.append((" " * pad + _slice(segments, start, end, paint), pad + end - start))
        start = end
    return lines


def _break(text: str, start: int, limit: int) -> int:
    """Where to end a printed line: after the last space or bracket of its second half, else at the limit."""
    if len(text) <= limit:
        return len(text)
    middle = (start + limit) // 2
    places = [match.end() for match in re.finditer(r"[ ,(\[]+", text[:limit]) if match.end() > middle]
    return places[-1] if places else limit


def _slice(segments: Segments, start: int, end: int, paint: _Paint) -> str:
    out, offset = "", 0
    for text, code in segments:
        out += paint(text[max(0, start - offset) : max(0, end - offset)], code)
        offset += len(text)
    return out
