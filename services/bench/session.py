"""`baton bench` from its options to what is printed and written."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.bench.campaign import Campaign, Run, describe, run_campaign
from services.bench.errors import BenchError
from services.bench.options import CampaignOptions
from services.bench.plan.trace import read_trace
from services.bench.show.comparison import print_comparison, print_run
from services.bench.show.plots import check_matplotlib, write_plots
from services.bench.show.tables import print_result


@dataclass(frozen=True, slots=True)
class Outputs:
    """json_file: everything that was seen. plots: a directory."""

    json_file: Path | None = None
    plots: Path | None = None

    def check(self) -> None:
        """BenchError, before minutes are spent on what could then not be kept."""
        try:
            if self.json_file is not None:
                with self.json_file.open("a"):
                    pass
        except OSError as error:
            raise BenchError(f"--json {self.json_file}: {error.strerror}; give a file that can be written") from error
        if self.plots is not None:
            check_matplotlib()
            try:
                self.plots.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BenchError(f"--plots {self.plots}: {error.strerror}; give a directory") from error


def bench(options: CampaignOptions, outputs: Outputs, api_key: str | None, console: Console) -> Campaign:
    """Runs it with a bar on stderr, prints tables and writes files; Ctrl-C ends it with what there is.

    Raises BenchError where no load could be sent. Requests that fail raise nothing: they are figures.
    """
    outputs.check()
    if options.base.trace is not None:
        read_trace(options.base.trace.file)
    campaign = asyncio.run(_run(options, api_key, console))
    if options.is_single:
        print_result(console, campaign.runs[0].result)
    else:
        print_comparison(console, campaign)
    written: list[Path] = []
    if outputs.json_file is not None:
        outputs.json_file.write_text(json.dumps(campaign.as_dict(), indent=1, default=str) + "\n")
        written.append(outputs.json_file)
    if outputs.plots is not None:
        written += write_plots(outputs.plots, campaign)
    for path in written:
        console.print(f"  written to {path}", markup=False, highlight=False, soft_wrap=True)
    return campaign


async def _run(options: CampaignOptions, api_key: str | None, console: Console) -> Campaign:
    def on_run(run: Run) -> None:
        if not options.is_single:
            print_run(console, run, describe(options, run.target, run.rate, run.round))

    stop = asyncio.Event()
    with _interrupt(stop.set):
        return await run_campaign(options, api_key, Console(stderr=True), stop, on_run)


@contextlib.contextmanager
def _interrupt(then: Callable[[], None]) -> Iterator[None]:
    """SIGINT calls `then`, once: another one ends the process as ever."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        then()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
