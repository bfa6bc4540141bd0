"""The namespaces that have memory here: opened when the first of their blocks is offered or asked for, and closed, the
longest unused first, when there are too many."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator

from services.kvstore.index import Index
from services.kvstore.namespace import MemorySettings, Namespace, OnLost
from services.kvstore.tier import Tier
from shared.protocol.store_messages import NamespaceSpec
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError, StoreError, StoreFull
from shared.store.namespaces import name_of

_MAX_OPEN = 4
"""Each is another model, or another format of its state: there is seldom more than one, and two while one replaces the
other."""


class Namespaces:
    """on_lost: as in `Namespace.open`."""

    def __init__(self, deps: Deps, index: Index, settings: MemorySettings, on_lost: OnLost) -> None:
        self._deps, self._index, self._settings, self._on_lost = deps, index, settings, on_lost
        self._open: OrderedDict[str, Namespace] = OrderedDict()
        self._opening: dict[str, asyncio.Future[Namespace]] = {}
        self._turn = asyncio.Lock()

    def __iter__(self) -> Iterator[Namespace]:
        return iter(list(self._open.values()))

    def find(self, name: str) -> Namespace | None:
        return self._open.get(name)

    async def open(self, spec: NamespaceSpec) -> Namespace:
        """The namespace, opened if it is not yet. Raises InvalidRequest, StoreFull or PeerLost where it cannot be."""
        name = name_of(spec)
        if (found := self._open.get(name)) is not None:
            self._open.move_to_end(name)
            return found
        self.open_soon(spec)
        return await self.opened(name)

    def open_soon(self, spec: NamespaceSpec) -> None:
        """It is open, or being opened."""
        name = name_of(spec)
        if name not in self._open and name not in self._opening:
            opening = self._opening[name] = asyncio.get_running_loop().create_future()
            self._deps.spawn(self._begin(name, spec, opening), "open-namespace")

    async def opened(self, name: str) -> Namespace:
        """One that is open or being opened. StoreError where it is neither, and what `open` raises."""
        if (opening := self._opening.get(name)) is not None:
            return await asyncio.shield(opening)
        if (found := self._open.get(name)) is None:
            raise StoreError("there is no memory for blocks of that kind")
        return found

    async def close(self) -> None:
        for opening in self._opening.values():
            opening.cancel()
        for namespace in self:
            await namespace.close()
        self._open.clear()

    async def _begin(self, name: str, spec: NamespaceSpec, opening: "asyncio.Future[Namespace]") -> None:
        try:
            async with self._turn:
                if len(self._open) >= _MAX_OPEN:
                    await self._close_idle()
                number = next(k for k in range(_MAX_OPEN) if all(one.number != k for one in self))
                namespace = await Namespace.open(spec, self._settings, number, self._on_lost)
                if opening.cancelled():
                    return await namespace.close()
                num_units = namespace.layout.num_pages
                tier = Tier(num_units, namespace.block_bytes, namespace.block_tokens, self._deps.counters)
                self._index.open_namespace(name, tier)
                self._open[name] = namespace
                self._deps.spawn_vital(namespace.link.run(), "sidecar-link")
                opening.set_result(namespace)
        except BatonError as error:
            opening.set_exception(error)
        except Exception as error:
            opening.set_exception(StoreError(f"no memory for a namespace: {type(error).__name__}"))
            raise
        finally:
            del self._opening[name]
            if not opening.cancel() and not opening.cancelled():
                opening.exception()  # whoever asked may not wait for it any more
            self._deps.changed()

    async def _close_idle(self) -> None:
        for namespace in self:
            try:
                self._index.close_namespace(namespace.name)
            except StoreFull:
                continue
            del self._open[namespace.name]
            self._deps.counters.add("namespaces_closed")
            return await namespace.close()
        raise StoreFull(f"blocks of {_MAX_OPEN} models are in use here")
