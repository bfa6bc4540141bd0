"""The bar that a person sees while a load runs. It is drawn twice a second: what it costs, the server may lack."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from services.bench.figures.records import RequestRecord

_A_SECOND = 2.0


class RunProgress:
    """A bar on a terminal; nothing elsewhere. By requests where their number is known, else by time."""

    def __init__(self, console: Console, num_requests: int | None, duration_s: float | None, title: str) -> None:
        self._title = f"{title}: " if title else ""
        self._by_time = num_requests is None and duration_s is not None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=_A_SECOND,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(f"{self._title}waiting for the first answer", total=num_requests or duration_s)
        self._began = time.monotonic()
        self._done = self._failed = self._tokens = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, record: RequestRecord) -> None:
        self._done += record.outcome == "ok"
        self._failed += record.outcome == "error"
        self._tokens += record.num_tokens
        elapsed_s = time.monotonic() - self._began
        failed = f", [red]{self._failed} failed[/]" if self._failed else ""
        self._bar.update(
            self._task,
            completed=elapsed_s if self._by_time else self._done + self._failed,
            description=f"{self._title}{self._done} answered{failed}, {self._tokens / elapsed_s:.1f} tokens/s",
        )
