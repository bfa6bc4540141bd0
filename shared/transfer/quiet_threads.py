"""A few threads for what is quiet, which waits long for its turns. Work that waits for one of them can be hurried: then
it waits for the other threads as well, and whichever comes to it first does it."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Threads(Protocol):
    def submit(self, work: Callable[[], T], /) -> Future[T]: ...


class QuietThreads:
    """own: the quiet threads, which this ends. others: those that hurried work may take."""

    def __init__(self, own: ThreadPoolExecutor, others: ThreadPoolExecutor) -> None:
        self._own, self._others = own, others

    def submit(self, work: Callable[[], T], /) -> Future[T]:
        job = _Job(work)
        self._own.submit(job.run)
        return job

    def hurry(self, job: Future[T]) -> None:
        """Of no effect on work that has begun, or is not ours."""
        if isinstance(job, _Job) and not job.running() and not job.done():
            self._others.submit(job.run)

    def shutdown(self) -> None:
        """Waits for nothing."""
        self._own.shutdown(wait=False)


class _Job(Future[T], Generic[T]):
    """Work that may be in several queues."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._left = [work]

    def run(self) -> None:
        try:
            work = self._left.pop()  # atomic
        except IndexError:
            return
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)
