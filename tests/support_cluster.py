"""A real cluster for tests: `baton up` as its own process on free ports, with all the processes it starts.

Everything here is synchronous, so that one cluster can serve a whole test session whatever event loops its tests use.
`async_client` is for tests that keep many requests in flight at once.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import openai
import psutil

from tests.support_client import Answer, Report, answer_of, body_of, complete, is_alive, poll

__all__ = ["Answer", "RealCluster", "Report", "body_of", "complete", "is_alive", "poll"]

REPO = Path(__file__).parents[1]
START_S = 180.0
STOP_S = 60.0
SETTLE_S = 30.0
_TROUBLE = ("Traceback", " ERROR ", " CRITICAL ", "was never retrieved", "was destroyed but it is pending")


class RealCluster:
    """`with RealCluster(tmp_path, prefill=2, settings={"prefill.page_tokens": 64}) as cluster:` is ready inside and
    gone after. Leaving without an error also asserts that the end was in order and that the log shows no trouble
    (unless `expect_trouble`); after a failure the log's end is printed.

    settings: `role.field`, `name.field` or `common.field`, as `--set` takes them. warm: send each pair of workers a
    request first, so that connections which stay open are in the baseline of open files. flags: more of `baton up`;
    without prefill workers they say so themselves, by a --mode or --prefill 0. store: workers use the kvstore, whose
    sidecar comes with the first block. reuse: workers find the state of earlier prompts again; without it the same
    prompt costs and brings the same each time. kvstores: how many there are.
    """

    entry: tuple[str, ...] = ("-m", "services.cli")
    """How python is told to be `baton`."""

    def __init__(
        self,
        directory: Path,
        prefill: int = 1,
        decode: int = 1,
        gateway: int = 1,
        settings: Mapping[str, object] | None = None,
        restart: bool = True,
        warm: bool = True,
        model: str | None = None,
        flags: tuple[str, ...] = (),
        store: bool = False,
        reuse: bool = False,
        kvstores: int = 1,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.state_dir = directory / "state"
        self.log_file = directory / "baton.log"
        self.num_prefill, self.num_decode = prefill, decode
        self.num_kvstore, self.num_gateway = kvstores, gateway
        self.url = ""
        self.expect_trouble = False
        self._warm = warm and model is None
        self._model = model
        self._flags = ["--state-dir", str(self.state_dir)]
        self._flags += [*(["--prefill", str(prefill)] if prefill else []), "--decode", str(decode), *flags]
        self._flags += ["--kvstore", str(kvstores)] if kvstores != 1 else []
        self._flags += ["--model", model] if model else []
        self._flags += ["--gateway", str(gateway)] if gateway > 1 else []
        self._flags += [] if store else ["--set", "common.store=false"]
        self._flags += [] if reuse else ["--set", "common.prefix_cache=false"]
        self._flags += [] if restart else ["--no-restart"]
        self._flags += [part for key, value in (settings or {}).items() for part in ("--set", f"{key}={value}")]
        self._process: subprocess.Popen[bytes] | None = None
        self._family: dict[int, psutil.Process] = {}
        self._open_files: dict[int, int] = {}
        self._http: httpx.Client | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.stop()
            else:
                print(f"--- end of {self.log_file}\n{self.log()[-6000:]}")
        finally:
            self.kill_all()

    def start(self) -> None:
        """Returns once requests are served; AssertionError with the log where that does not come about."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.entry, "up", "--port", "0", *self._flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log_file.parent,
                env=env | {"PYTHONPATH": str(REPO), "COLUMNS": "500"},
            )
        poll(lambda: self._ready_line() or self._ended(), lambda: f"not ready:\n{self.log()}", START_S)
        assert not self._ended(), f"`baton up` ended:\n{self.log()}"
        self.url = self._ready_line().split()[1].removesuffix("/v1")
        self._http = httpx.Client(base_url=self.url, timeout=300.0)
        self._note_family()
        num_processes = self.num_gateway + self.num_kvstore
        num_processes += 2 * (self.num_prefill + self.num_decode)  # a sidecar's first report may come a little later
        poll(lambda: len(self.workers()) == num_processes, lambda: f"not {num_processes}: {self.workers()}", 15.0)
        if self._warm:
            self._warm_up()
        self.mark()

    def stop(self) -> None:
        """Ends it in order and asserts that nothing of it is left. Idempotent."""
        if self._process is None or self._http is None:
            return
        self._note_family()
        self._http.close()
        self._http = None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            status = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there {STOP_S:g} s after SIGINT:\n{self.log()[-6000:]}") from None
        left = [process for process in self._family.values() if is_alive(process)]
        assert not left, f"left behind: {left}\n{self.log()[-3000:]}"
        assert status == 0, f"ended with status {status}:\n{self.log()[-6000:]}"
        sockets = list((self.state_dir / "ipc").iterdir())
        assert self.expect_trouble or not sockets, f"left behind: {sockets}"
        assert self.expect_trouble or not self.trouble(), "\n".join(self.trouble()) + f"\n{self.log()[-6000:]}"

    def kill_all(self) -> None:
        """Without any order; for what failed."""
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._process is not None and self._process.poll() is None:
            self._note_family()
            self._process.kill()
            self._process.wait()
        for process in self._family.values():
            if is_alive(process):
                process.kill()

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def trouble(self) -> list[str]:
        """Lines of the log that no cluster without faults should write."""
        return [line for line in self.log().splitlines() if any(word in line for word in _TROUBLE)]

    def cluster(self) -> Report:
        """GET /cluster."""
        answer = self._client.get("/cluster")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def workers(self, role: str | None = None) -> list[Report]:
        """Reports of every process, or of those with this role, by name."""
        found = [worker for worker in self.cluster()["workers"] if role in (None, worker["role"])]
        return sorted(found, key=lambda worker: (worker["role"], worker["id"]))

    def worker(self, name: str) -> Report | None:
        """The newest report of the process with this name, such as `decode-0` or `prefill-0-sidecar`."""
        found = [worker for worker in self.workers() if worker["id"] == name]
        return max(found, key=lambda worker: -worker["age_s"], default=None)

    def counter(self, role: str, name: str) -> float:
        """Summed over the role's processes. Reports come every 0.5 s: call `settled` first."""
        return float(sum(worker["counters"].get(name, 0.0) for worker in self.workers(role)))

    def health(self) -> int:
        return self._client.get("/health").status_code

    def complete(
        self, *, route: str = "/v1/completions", baton: Mapping[str, object] | None = None, **body: Any
    ) -> Answer:
        """One request, whole answer. Greedy, with token ids, unless `body` says otherwise. `baton` is added to."""
        return answer_of(self._client.post(route, json=body_of(baton=baton, **body)))

    def openai(self) -> openai.OpenAI:
        """The official client; close it, or use it as a context."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300.0)

    def async_client(self, limit: int = 200) -> httpx.AsyncClient:
        """`async with cluster.async_client() as http: await complete(http, prompt=…)`."""
        limits = httpx.Limits(max_connections=limit, max_keepalive_connections=limit)
        return httpx.AsyncClient(base_url=self.url, timeout=300.0, limits=limits)

    def signal(self, name: str, number: signal.Signals) -> int:
        """Sends `number` to the process with this name (`decode-0`, `prefill-0-sidecar`, `gateway`), or to nats-server.
        Returns its pid."""
        self._note_family()
        if name == "nats-server":
            pid = poll(self._nats_pid, "no nats-server", 15.0)
        else:
            pid = poll(lambda: self._live_pid(name), f"no {name} in {self.url}/cluster", 15.0)
            self._note_family()
        os.kill(pid, number)
        return pid

    def kill(self, name: str) -> int:
        """SIGKILL; returns the pid, once nothing runs under it."""
        pid = self.signal(name, signal.SIGKILL)
        poll(lambda: not is_alive(self._family[pid]), f"{name} ({pid}) survives SIGKILL", 10.0)
        return pid

    def wait_ready(self, name: str, other_than: int = 0, within_s: float = 60.0) -> Report:
        """The report of this process once it is ready, under another pid than `other_than`."""

        def ready() -> Report | None:
            found = [w for w in self.workers() if w["id"] == name and w["pid"] != other_than]
            return next((worker for worker in found if worker["state"] == "ready"), None)

        report: Report = poll(ready, lambda: f"{name} is not ready: {self.worker(name)}", within_s)
        return report

    def mark(self) -> None:
        """Takes the open files of each process, once at rest, as what `settled` compares with."""
        self.settled(files=False)
        self._note_family()
        self._open_files = self._count_files()

    def settled(self, within_s: float = SETTLE_S, files: bool = True) -> None:
        """Waits until every page, slot, ticket and queue is back at its start value, by reports that are newer than
        this call, and no process has more open files than at `mark`. AssertionError with what is held."""
        began = time.monotonic()
        held: list[str] = []

        def is_settled() -> bool:
            held[:] = self._held(time.monotonic() - began - 0.1)
            held.extend(self._more_files() if files and not held else ())
            return not held

        poll(is_settled, lambda: f"still held: {held}\n{self.log()[-3000:]}", within_s)

    def _held(self, newer_than_s: float) -> list[str]:
        found = []
        for worker in self.workers():
            name = f"{worker['id']} ({worker['pid']})"
            if worker["age_s"] >= newer_than_s:
                found.append(f"{name}: no report yet")
            kept = worker["tickets"].get("whole", 0) if worker["role"] == "kvstore" else 0  # that is what it is for
            for kind in ("pages", "slots"):
                counts = worker[kind]
                if counts is not None and counts["free"] + kept != counts["total"]:
                    found.append(f"{name}: {kind} {counts}")
            found += [f"{name}: {k} {n} in queue" for k, n in worker["queues"].items() if n and k != "breakers_open"]
            found += [
                f"{name}: {n} tickets {k}" for k, n in worker["tickets"].items() if n and (k, n) != ("whole", kept)
            ]
        return found

    def _count_files(self) -> dict[int, int]:
        return {pid: process.num_fds() for pid, process in self._family.items() if is_alive(process)}

    def _more_files(self) -> list[str]:
        now = self._count_files()
        pairs = [(pid, self._open_files[pid], count) for pid, count in now.items() if pid in self._open_files]
        return [
            f"process {pid} has {count} open files, {before} before" for pid, before, count in pairs if count > before
        ]

    def _note_family(self) -> None:
        """Everything the launcher started so far, also what is gone or was started again."""
        assert self._process is not None
        if self._process.poll() is None:
            launcher = psutil.Process(self._process.pid)
            self._family |= {child.pid: child for child in launcher.children(recursive=True)}

    def _live_pid(self, name: str) -> int | None:
        report = self.worker(name)
        return int(report["pid"]) if report is not None and psutil.pid_exists(report["pid"]) else None

    def _nats_pid(self) -> int | None:
        self._note_family()
        return next((p.pid for p in self._family.values() if is_alive(p) and p.name() == "nats-server"), None)

    def _warm_up(self) -> None:
        """Several at once, so that every pair of workers gets some."""
        paths = ["remote"] * 3 * self.num_prefill * self.num_decode + ["local"] * self.num_decode
        with httpx.Client(base_url=self.url, timeout=60.0) as http, ThreadPoolExecutor(len(paths)) as threads:
            bodies = [body_of(prompt=[1, 2, 3], max_tokens=2, baton={"path": path}) for path in paths]
            for answer in threads.map(lambda body: http.post("/v1/completions", json=body), bodies):
                assert answer.status_code == 200, f"{answer.text}\n{self.log()}"

    def _ready_line(self) -> str:
        return next((line for line in self.log().splitlines() if line.startswith("Ready  ")), "")

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def _client(self) -> httpx.Client:
        assert self._http is not None, "the cluster does not run"
        return self._http
