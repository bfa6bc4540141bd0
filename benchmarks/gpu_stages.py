"""Stages of a check that has only so much time: in order of importance, each run whole or left out by name."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from benchmarks.report import Row


@dataclass
class Findings:
    """rows: figures. wrong: what is not as it must be; one is enough for the check to fail. skipped: what was left out,
    and why."""

    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stage:
    """expected_s: what it takes on a large GPU, kernels being compiled included. run fills what it is given."""

    name: str
    expected_s: float
    run: Callable[[Findings], None]


def run_stages(
    stages: Sequence[Stage],
    ends_at: float,
    console: Console,
    after_each: Callable[[Findings], None],
    now: Callable[[], float] = time.monotonic,
) -> Findings:
    """Stages that would end after `ends_at` are left out. One that raises counts as wrong, and the others go on."""
    findings = Findings()
    for stage in stages:
        left = ends_at - now()
        if stage.expected_s > left:
            findings.skipped.append(
                f"{stage.name}: takes about {stage.expected_s:.0f} s, {max(0.0, left):.0f} s are left"
            )
            console.print(f"{stage.name}: left out", style="yellow")
            continue
        began = now()
        console.print(f"{stage.name} …")
        try:
            stage.run(findings)
        except Exception as error:
            console.print_exception()
            findings.wrong.append(f"{stage.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        console.print(f"{stage.name}: {now() - began:.1f} s")
        after_each(findings)
    return findings
