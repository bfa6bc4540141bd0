"""The rows every benchmark writes, the machine they were taken on, and the table a person reads."""

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
_BUSY = 0.5
_LEAST_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what the figures were taken. load: the 1-minute load average when the benchmark began."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    torch: str
    numpy: str
    load: float

    @classmethod
    def here(cls) -> "Machine":
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            torch=_version("torch"),
            numpy=_version("numpy"),
            load=round(os.getloadavg()[0], 2),
        )

    @property
    def busy(self) -> bool:
        """Others were computing when the benchmark began."""
        return self.load > _BUSY * self.cores


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. value: the median of runs. against: what it is compared with, in the same unit. ratio: the larger the
    better: value ÷ against where more is better, against ÷ value where less is. goal: the ratio asked for."""

    name: str
    value: float
    unit: str
    against: float | None
    ratio: float | None
    goal: float | None
    runs: tuple[float, ...]

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None or self.ratio is None else self.ratio >= self.goal


def figure(
    name: str,
    unit: str,
    runs: Sequence[float],
    *,
    less_is_better: bool = True,
    against: float | None = None,
    goal: float | None = None,
) -> Row:
    """A row from its runs, of which there is at least one. Nothing spent counts as infinitely better, and nothing
    gained on either side as equal."""
    value = median(runs)
    ratio = None
    if against is not None:
        above, below = (against, value) if less_is_better else (value, against)
        equal = value == against == 0
        ratio = 1.0 if equal else above / below if below > 0 else math.inf
    return Row(name, value, unit, against, ratio, goal, tuple(runs))


def write_rows(name: str, rows: Sequence[Row], machine: Machine, directory: Path = RESULTS) -> Path:
    """Writes NAME.json, a list with one object for each row, and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    entries = [
        {key: _plain(value) for key, value in asdict(row).items()} | {"machine": asdict(machine)} for row in rows
    ]
    path.write_text(json.dumps(entries, indent=1, allow_nan=False) + "\n")
    return path


def print_rows(console: Console, title: str, rows: Sequence[Row], machine: Machine) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    for column in ("figure", "value", "unit", "against", "ratio", "goal", "from", "to"):
        table.add_column(column, justify="left" if column in ("figure", "unit") else "right", no_wrap=True)
    for row in rows:
        goal = "" if row.goal is None else f"≥ {row.goal:g} {'reached' if row.reached else 'MISSED'}"
        spread = (_short(min(row.runs)), _short(max(row.runs))) if len(row.runs) > 1 else ("", "")
        table.add_row(row.name, _short(row.value), row.unit, _short(row.against), _short(row.ratio), goal, *spread)
    console.width = max(console.width, _LEAST_WIDTH)  # rather lines that a small terminal wraps than cut figures
    console.print(table)
    console.print(
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / (1 << 30):.0f} GiB, Python {machine.python}, "
        f"torch {machine.torch}, numpy {machine.numpy}",
        soft_wrap=True,
    )
    if machine.busy:
        text = f"Provisional: the machine was busy when this began (load {machine.load} on {machine.cores} cores)."
        console.print(text, style="yellow", soft_wrap=True)


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _plain(value: object) -> object:
    """JSON knows no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
