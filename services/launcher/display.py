"""What a person sees of a local cluster: how far its start is, its log lines, and the line to try it with."""

import json
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from services.launcher.child import Phase

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
_STAGES = {
    "fetch": "fetching the model",
    "wait": "waiting for another process that prepares it",
    "digest": "reading the model",
    "weights": "preparing weights",
    "text": "preparing the tokenizer",
}
_WORDS: dict[Phase, str] = {
    "start": "starting",
    "load": "loading",
    "ready": "ready",
    "restart": "died",
    "ended": "ended",
}


class ModelProgress:
    """A bar while a model is prepared; nothing at all where it was prepared already."""

    def __init__(self, console: Console, model: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=console
        )
        self._console = console
        self._model = model
        self._stage = ""
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            text = f"{self._model}: {_STAGES.get(stage, stage)}"
            if self._console.is_terminal:
                self._progress.start()
                self._task = self._progress.add_task(text, total=None)
            else:
                self._console.print(text, soft_wrap=True)
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total if total > 1 else None)


class Display:
    """Rows of what is starting, on a terminal; else one line for each step. Log lines go above the rows."""

    def __init__(self, console: Console, names: list[str]) -> None:
        self._console = console
        self._width = max(map(len, names), default=0)
        self._color = {name: _COLORS[k % len(_COLORS)] for k, name in enumerate(names)}
        self._rows: dict[str, tuple[Phase, str, float]] = {name: ("start", "", time.monotonic()) for name in names}
        self._spinner = Spinner("dots")
        self._began = time.monotonic()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=True)

    def start(self) -> None:
        if self._live is not None:
            self._live.start()

    def stop(self) -> None:
        """Ends the rows; log lines go on. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self, name: str, text: str) -> None:
        """One log line of a process."""
        prefix = f"{name:<{self._width}} │ "
        self._say(Text.assemble((prefix, self._color.get(name, "white")), text))

    def phase(self, name: str, phase: Phase, detail: str) -> None:
        self._rows[name] = (phase, detail, time.monotonic())
        if detail:
            self.line(name, f"{_WORDS[phase]}: {detail}")
        elif self._live is None and phase in ("load", "ready"):
            self.line(name, f"{_WORDS[phase]} ({time.monotonic() - self._began:.1f} s)")

    def ready(self, url: str, model: str, summary: str, *, wants_key: bool = False) -> None:
        """The URL, and one line to paste into a shell."""
        self.stop()
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": model, "temperature": 0, "max_tokens": 64, "messages": messages}
        took = time.monotonic() - self._began
        self._say(Text(f"Ready  {url}/v1  {model}  ({summary}, {took:.1f} s)", style="bold green"))
        key = " -H 'authorization: Bearer YOUR_KEY'" if wants_key else ""
        kind = "-H 'content-type: application/json'"
        self._say(Text(f"  curl {url}/v1/chat/completions{key} {kind} -d '{json.dumps(body)}'"))
        self._say(Text("  Ctrl-C ends it.", style="dim"))

    def say(self, text: str) -> None:
        self._say(Text(text))

    def _say(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for name, (phase, _, since) in self._rows.items():
            mark: RenderableType = Text("✓", style="green") if phase == "ready" else self._spinner
            took = "" if phase == "ready" else f"{now - since:.0f} s"
            table.add_row(mark, Text(name, style=self._color[name]), _WORDS[phase], Text(took, style="dim"))
        return Group(table)
