"""One process of a local cluster: started, listened to, started again when it dies, and ended with all it started."""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Literal

from services.launcher.errors import LaunchError
from services.launcher.log_file import LogFile
from services.launcher.plan import ProcessSpec
from shared.runtime.end_with_parent import end_with_parent
from shared.runtime.process import EXIT_CONFIG

Phase = Literal["start", "load", "ready", "restart", "ended"]
OnLine = Callable[[str, str], None]
OnPhase = Callable[[str, Phase, str], None]

_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 10.0
_STEADY_AFTER_S = 30.0
_START_ATTEMPTS = 3
_LAST_LINES = 15
_KILL_TIMEOUT_S = 5.0


class Child:
    """on_line(name, text) gets every line it prints; on_phase(name, phase, detail) every change of its phase.

    `run` supervises and is cancelled last; `stop` ends the process in order. With restart, a process that dies is
    started again after a growing pause, but not one whose settings are wrong or that never became ready in three tries.
    """

    def __init__(self, spec: ProcessSpec, log_file: Path, on_line: OnLine, on_phase: OnPhase, restart: bool) -> None:
        self.spec = spec
        self.phase: Phase = "start"
        self.pid: int | None = None
        self._log_file = log_file
        self._on_line = on_line
        self._on_phase = on_phase
        self._restart = restart
        self._was_ready = False
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        self._gone.set()
        self._last: deque[str] = deque(maxlen=_LAST_LINES)

    def seen(self, state: str, pid: int) -> None:
        """A heartbeat of this name arrived; one of an earlier process is ignored."""
        if pid == self.pid and state != "draining" and self.phase != "ended":
            self._was_ready = self._was_ready or state == "ready"
            self._enter("ready" if state == "ready" else "load")

    async def run(self) -> None:
        """Until stopped, or LaunchError where going on is in vain. Left in any way, nothing of it is left running."""
        backoff_s, attempts = _FIRST_BACKOFF_S, 0
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                self._enter("start")
                status = await self._run_once()
                if self._stopping.is_set():
                    break
                attempts += 1
                steady = time.monotonic() - began > _STEADY_AFTER_S
                backoff_s = _FIRST_BACKOFF_S if steady else min(backoff_s * 2, _LONGEST_BACKOFF_S)
                if not self._goes_on(status, attempts):
                    break
                self._enter("restart", f"{_describe(status)}; starts again in {backoff_s:g} s")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff_s):
                        await self._stopping.wait()
        finally:
            self._kill_group()
            if self.phase != "ended":
                self._enter("ended")

    async def stop(self) -> None:
        """Asks it to end and waits; kills it, and whatever it started, when its time is over. Idempotent."""
        self._stopping.set()
        if self.pid is not None and not self._gone.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        for wait_s in (self.spec.stop_timeout_s, _KILL_TIMEOUT_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._gone.wait()
                    return
            self._kill_group()

    def kill(self) -> None:
        """Ends it at once."""
        self._stopping.set()
        self._kill_group()

    async def _run_once(self) -> int:
        """One life of the process: its exit status."""
        self._last.clear()
        # A pipe of our own: asyncio's would hide the death of the process while what it started holds it open.
        reading_end, writing_end = os.pipe()
        with FileIO(reading_end) as pipe, LogFile(self._log_file) as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.spec.argv,
                    env={**os.environ, **self.spec.env},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=writing_end,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends everything in order
                    preexec_fn=end_with_parent,
                )
            finally:
                os.close(writing_end)
            self.pid = process.pid
            self._gone.clear()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._read(pipe, log))
                    if self._stopping.is_set():
                        process.terminate()
                    status = await process.wait()
                    self._kill_group()
            finally:
                self._kill_group()
                self._gone.set()
                self.pid = None
        return status

    async def _read(self, pipe: FileIO, log: LogFile) -> None:
        stream, rest = asyncio.StreamReader(), b""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        try:
            while chunk := await stream.read(1 << 16):
                log.write(chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
            if rest:
                self._take(rest)
        finally:
            transport.close()

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self._last.append(text)
        self._on_line(self.spec.name, text)

    def _goes_on(self, status: int, attempts: int) -> bool:
        """Whether to start it again; raises LaunchError where that ends the whole cluster."""
        tail = "".join(f"\n    {line}" for line in self._last)
        if status == EXIT_CONFIG and not self._was_ready:
            raise LaunchError(f"{self.spec.name} refuses its settings:{tail}")
        if not self._was_ready and (not self._restart or attempts >= _START_ATTEMPTS):
            raise LaunchError(f"{self.spec.name} does not start ({_describe(status)}):{tail}")
        if not self._restart or status == EXIT_CONFIG:
            self._enter("ended", f"{_describe(status)}; it stays dead")
            return False
        return True

    def _kill_group(self) -> None:
        """Also what it started and left behind: the group has its pid as a name for as long as anybody is in it."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _enter(self, phase: Phase, detail: str = "") -> None:
        if phase != self.phase or detail:
            self.phase = phase
            self._on_phase(self.spec.name, phase, detail)


def _describe(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
