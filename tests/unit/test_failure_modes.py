"""`docs/failure-modes.md` names a test for each fault: they must exist, and no fault may be listed twice or nowhere."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
DOCUMENT = (REPO / "docs" / "failure-modes.md").read_text()
KNOWN = {
    *(1, 2, 6, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 23, 25, 26, 28, 29, 30, 34, 36, 37, 38, 39, 40, 42, 43, 44),
    *(45, 46, 47, 48, 50, 51, 53, 54, 55, 56, 58, 59, 61, 62, 64, 65, 66, 69, 70, 71, 72, 73, 75),
}
"""The faults of the list that the document goes through."""


def rows() -> list[tuple[str, list[str]]]:
    """(id, names of tests) of each line of the table."""
    table = DOCUMENT.split("| id | what must hold | tests |")[1].split("\n\n")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    return [(line[0].strip(), [name.strip() for name in line[2].split(",")]) for line in cells]


@cache
def functions_of(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("name", sorted({name for _, names in rows() for name in names}))
def test_a_named_test_exists(name: str) -> None:
    path, _, test = name.partition("::")
    assert (REPO / path).is_file(), path
    assert test.startswith("test_")
    assert test in functions_of(REPO / path)


def test_every_fault_has_a_test_or_a_reason_why_not() -> None:
    tested = [int(id[1:]) for id, names in rows() if id != "-" and names]
    later = [int(number) for number in re.findall(r"C(\d+)", DOCUMENT.split("### Not yet")[1])]
    assert sorted(tested + later) == sorted(KNOWN)


def test_every_counter_that_is_named_is_counted_somewhere() -> None:
    """Plain ones; those with a part in angle brackets are made of two."""
    prose = DOCUMENT.split("## Which test")[0]
    source = "".join(file.read_text() for top in ("services", "shared") for file in (REPO / top).rglob("*.py"))
    cells = [line.split("|")[4] for line in prose.splitlines() if line.startswith("| ") and line.count("|") == 6]
    names = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert len(names) > 20
    known = {"draining", "starting", "pages", "queues"}
    missing = []
    for name in sorted(names - known):
        stem = re.sub(r"^(bus|tickets|failed|events)_", "", name)
        if f'"{name}"' not in source and f'"{stem}"' not in source and f" {stem}: int" not in source:
            missing.append(name)
    assert missing == []
