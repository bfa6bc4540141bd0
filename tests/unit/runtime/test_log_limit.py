"""Nobody can fill a log from outside: repeats are counted, and files are bounded."""

import logging
from pathlib import Path

import pytest

from services.launcher.log_file import LogFile
from shared.runtime.log_limit import RepeatLimit


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def limited() -> tuple[logging.Logger, Lines, list[float]]:
    now = [0.0]
    handler = Lines()
    handler.addFilter(RepeatLimit(burst=3, period_s=10.0, now=lambda: now[0]))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, handler, now


def test_repeats_are_counted_and_told_with_the_next_one(limited: tuple[logging.Logger, Lines, list[float]]) -> None:
    logger, handler, now = limited

    def complain(about: int) -> None:
        logger.warning("bad message %d", about)

    for about in range(100):
        complain(about)
    logger.warning("of another kind")
    assert handler.lines == ["bad message 0", "bad message 1", "bad message 2", "of another kind"]
    now[0] = 10.0
    complain(100)
    complain(101)
    assert handler.lines[4:] == ["bad message 100 [and 97 times more since]", "bad message 101"]
    now[0] = 20.0
    complain(102)
    assert handler.lines[6:] == ["bad message 102"]


def test_what_is_not_a_warning_is_never_left_out(limited: tuple[logging.Logger, Lines, list[float]]) -> None:
    logger, handler, _ = limited
    for number in range(20):
        logger.info("step %d", number)
    assert len(handler.lines) == 20


def test_a_log_file_is_bounded_and_keeps_what_came_last(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    for start in (0, 500):  # a process that is started again goes on in the same file
        with LogFile(path, limit_bytes=1000) as log:
            for number in range(start, start + 500):
                log.write(b"line %d\n" % number)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["decode-0.log", "decode-0.log.1"]
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    text = (tmp_path / "decode-0.log.1").read_text() + path.read_text()
    lines = text.splitlines()
    assert lines[-1] == "line 999"
    assert lines == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    with LogFile(path, limit_bytes=10) as log:
        log.write(b"one line that is longer than all\n")
    assert path.read_bytes() == b"one line that is longer than all\n"


def test_a_full_disk_ends_nobody_whose_log_it_holds() -> None:
    with LogFile(Path("/dev/full")) as log:
        log.write(b"no space left on device\n" * 1000)
