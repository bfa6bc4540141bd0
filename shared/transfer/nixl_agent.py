"""NIXL as far as the `nixl` backend needs it: agents that read from one peer each, and one that peers read from.

A read that was posted cannot be called back for certain: `release` is only a request. What is certain is the end of the
agent: with it its connections and requests are gone, so `ReadingAgent.destroy` is the proof that nothing lands any
more. An exception that comes out of NIXL would keep the agent alive by its traceback, so only its words are passed on.
"""

import contextlib
import gc
import importlib
import ipaddress
import logging
import os
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np

from shared.runtime.backend_names import NIXL_PACKAGES
from shared.runtime.config_file import ConfigError
from shared.runtime.errors import PeerLost
from shared.transfer.pool import Pool

_log = logging.getLogger(__name__)
_POLL_S = 0.0002
_JOIN_S = 5.0
_NUM_IDLE = 8
_EXIT_UNPROVEN = 70
_DEFAULTS = {
    # Not the two that take memory from /dev/shm or keep segments beyond the process; CMA copies between processes.
    "UCX_TLS": "^posix,sysv",
    # An agent that ends with reads under way says so once for each of them.
    "UCX_LOG_LEVEL": "error",
}
"""For what the environment does not say."""
_coming_and_going = threading.Lock()
"""Agents begin and end one at a time: nobody promises that UCX likes it otherwise."""
T = TypeVar("T")


def load_nixl() -> Any:
    """The NIXL package. Raises ConfigError if there is none, or it does not load."""
    name = next((one for one in NIXL_PACKAGES if one in sys.modules), None)
    name = name or next((one for one in NIXL_PACKAGES if find_spec(one)), None)
    if name is None:
        raise ConfigError("nixl is not installed here: pip install 'baton-serving[nixl]'")
    for variable, value in _DEFAULTS.items():
        os.environ.setdefault(variable, value)
    raises = logging.raiseExceptions
    try:
        found = importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise ConfigError(f"{name} cannot be loaded: {error}") from error
    finally:
        logging.raiseExceptions = raises
    # It brings a handler of its own, to stdout.
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return found


class Region:
    """A pool as NIXL knows it, and where UCX may listen: with a loopback `host` nowhere else."""

    def __init__(self, nixl: Any, pool: Pool, host: str) -> None:
        self._nixl = nixl
        self._array = np.frombuffer(pool.bytes, dtype=np.uint8)  # keeps the mapping
        self.address = int(self._array.ctypes.data)
        self._ucx = {"engine_config": "NET_DEVICES=lo"} if _is_loopback(host) else {}

    def new_agent(self) -> Any:
        """An agent with the pool registered, under a name that nobody had before. Raises PeerLost."""
        # Names of one length and without meaning, because NIXL finds some things by a part of them.
        config = self._nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        with _coming_and_going:
            agent = _worded(lambda: self._nixl.nixl_agent(secrets.token_hex(16), config))
            _worded(lambda: agent.create_backend("UCX", self._ucx))
            _worded(lambda: agent.register_memory([(self.address, self._array.nbytes, 0, "")], "DRAM"))
        return agent


class ReadingAgent:
    """Reads from the one peer that `metadata` describes. Used by one thread at a time; after an error it can only be
    destroyed. Offsets are into the two pools, which begin at `theirs_at` there."""

    def __init__(self, region: Region, metadata: bytes) -> None:
        self.metadata = metadata
        self._region, self._agent = region, region.new_agent()
        self._under_way: deque[Any] = deque()
        try:
            peer: bytes | str = _worded(lambda: self._agent.add_remote_agent(metadata))  # said to be str, and is bytes
            self._peer = peer if isinstance(peer, str) else peer.decode(errors="replace")
        except BaseException:
            self.destroy()
            raise

    def post(self, mine: np.ndarray, theirs: np.ndarray, lengths: np.ndarray) -> None:
        """Starts to read spans at the peer's addresses `theirs` into our pool at the offsets `mine`."""
        local = self._listed(mine + self._region.address, lengths)
        remote = self._listed(theirs, lengths)
        # No handle in a local variable: where this raises, the traceback would keep it, and it the agent.
        self._under_way.append(_worded(lambda: self._agent.initialize_xfer("READ", local, remote, self._peer)))
        if _worded(lambda: self._agent.transfer(self._under_way[-1])) == "ERR":
            raise PeerLost("nixl: a read failed to start")

    def settle(self) -> int:
        """How many of the posted reads are not done yet. Raises PeerLost if one failed."""
        while self._under_way:
            state = _worded(lambda: self._agent.check_xfer_state(self._under_way[0]))
            if state == "ERR":
                raise PeerLost("nixl: a read failed")
            if state != "DONE":
                break
            self._under_way.popleft().release()
        return len(self._under_way)

    def destroy(self) -> None:
        """When it returns no read of this agent writes any more."""
        while self._under_way:
            with contextlib.suppress(PeerLost):
                _worded(self._under_way.popleft().release)
        agent, self._agent = self._agent, None
        if agent is None:
            return
        rest = weakref.ref(agent.agent)
        with _coming_and_going:
            del agent
        if rest() is not None:
            gc.collect()
        if rest() is not None:
            _log.critical("a NIXL agent outlives its end: this process ends, since what it may write cannot be known")
            os._exit(_EXIT_UNPROVEN)

    def _listed(self, addresses: np.ndarray, lengths: np.ndarray) -> Any:
        rows = np.stack((addresses, lengths, np.zeros_like(lengths)), axis=1)
        return self._agent.get_xfer_descs(rows.astype(np.uint64), "DRAM")


class ReadingAgents:
    """Agents that are connected and have nothing to do are kept for the next transfer of the same peer."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._lock = threading.Lock()
        self._idle: list[ReadingAgent] = []
        self._closed = False

    def take(self, metadata: bytes) -> ReadingAgent:
        """One for this very incarnation of the peer: its metadata is never the same again. Raises PeerLost."""
        with self._lock:
            for agent in self._idle:
                if agent.metadata == metadata:
                    self._idle.remove(agent)
                    return agent
        return ReadingAgent(self._region, metadata)

    def keep(self, agent: ReadingAgent) -> None:
        with self._lock:
            self._idle.append(agent)
            surplus = len(self._idle) if self._closed else max(0, len(self._idle) - _NUM_IDLE)
            ending, self._idle = self._idle[:surplus], self._idle[surplus:]
        for one in ending:
            one.destroy()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for agent in idle:
            agent.destroy()


class SourceAgent:
    """What peers read from. Without a thread of NIXL's own (which costs most of the speed where cores are few)
    somebody must ask for its progress while peers connect, and where UCX reads over TCP all the time: a thread of ours
    does, as long as anybody is inside `serving`."""

    def __init__(self, region: Region) -> None:
        self._agent = region.new_agent()
        self.metadata: bytes = _worded(self._agent.get_agent_metadata)
        self._changed = threading.Condition()
        self._users = 0
        self._closing = False
        self._thread = threading.Thread(target=self._progress, name="nixl-progress", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_JOIN_S)
        self._agent = None

    def _count(self, change: int) -> None:
        with self._changed:
            self._users += change
            self._changed.notify()

    def _progress(self) -> None:
        agent, failing = self._agent, False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._users or self._closing)
                if self._closing:
                    return
                self._changed.wait(_POLL_S)
            try:
                agent.get_new_notifs()
                failing = False
            except Exception:
                if not failing:
                    _log.exception("nixl makes no progress")
                failing = True


def _worded(call: Callable[[], T]) -> T:
    """What `call` returns, or its failure as PeerLost, with nothing that holds on to NIXL's objects."""
    try:
        return call()
    except Exception as error:
        said = f"nixl: {type(error).__name__}: {error}"
    raise PeerLost(said)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
