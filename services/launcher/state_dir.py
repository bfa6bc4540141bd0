"""The directory where a local cluster keeps its files, and the port it serves on: both belong to one cluster only."""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.launcher.errors import LaunchError

DEFAULT_ROOT = Path(".baton")
_KEPT = 5
_LONGEST_IPC_PATH = 36
"""A socket's path may have 107 bytes, and names of peers take up to 64 of them."""


@dataclass(frozen=True, slots=True)
class StateDir:
    """ipc_dir: where sockets lie, by a short name. All of it belongs to the holder until the context is left."""

    path: Path
    ipc_dir: Path

    def log_file(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def write_private(self, name: str, text: str) -> None:
        """A file that nobody else on this host can read."""
        file = self.path / name
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(text)


@contextmanager
def open_state_dir(given: Path | None) -> Iterator[StateDir]:
    """Takes the directory for this process; LaunchError if another one has it. None: a new one under `.baton/`, where
    the last few are kept for their logs."""
    path = given or DEFAULT_ROOT / f"up-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    path = path.absolute()
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        (path / "ipc").mkdir(mode=0o700, exist_ok=True)
        lock = (path / "lock").open("a+")
    except OSError as error:
        raise LaunchError(f"cannot use {path} ({error.strerror}); choose another with --state-dir") from error
    with lock, contextlib.ExitStack() as stack:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise LaunchError(
                f"another cluster (process {owner}) runs in {path}; end it, or give this one its own --state-dir"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        if given is None:
            _remove_old(DEFAULT_ROOT.absolute(), keep=path)
        for left in (path / "ipc").iterdir():
            left.unlink()
        yield StateDir(path, stack.enter_context(_short(path / "ipc")))


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. LaunchError where it is taken: told before anything is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"port {port} on {host} is in use; choose another with --port, as --port {port + 1} (0: a free one)"
                ) from error
            raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        return int(probe.getsockname()[1])


@contextmanager
def _short(path: Path) -> Iterator[Path]:
    if len(os.fsencode(path)) <= _LONGEST_IPC_PATH:
        yield path
        return
    holder = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))
    try:
        (holder / "ipc").symlink_to(path, target_is_directory=True)
        yield holder / "ipc"
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def _remove_old(root: Path, keep: Path) -> None:
    """Directories of earlier runs that nobody holds, but for the newest few."""
    for old in sorted(root.glob("up-*"), reverse=True)[_KEPT:]:
        if old == keep:
            continue
        with contextlib.suppress(OSError), (old / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)
