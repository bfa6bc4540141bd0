"""Nothing outlives the process that started it, not even where that one is killed."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """For `preexec_fn`: the kernel kills the child when the *thread* that started it ends. So start children from the
    main thread. It outlives exec, but not a program that changes its user."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
