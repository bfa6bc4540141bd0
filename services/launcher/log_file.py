"""A process's log on disk: what came last, in at most two files of bounded size."""

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self

LIMIT_BYTES = 16 << 20


class LogFile:
    """Appends to `path`; when that is full it becomes `path`.1, in place of an older one, and begins anew."""

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """What the disk does not take is left out: a full one must not end the process whose log this is."""
        with contextlib.suppress(OSError):
            if self._file.tell() and self._file.tell() + len(data) > self._limit_bytes:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                full, self._file = self._file, self._path.open("ab", buffering=0)
                full.close()
            self._file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
