"""A driver by its name, as it stands in a setting."""

from importlib import import_module

from shared.store.driver import BlockDriver
from shared.store.options import DriverOptions

_CLASSES = {
    "disk": "shared.store.disk:DiskDriver",
    "memory": "shared.store.memory:MemoryDriver",
}
"""Imported when named: what talks to a server needs packages that others do without. Each class has
`from_options(DriverOptions)`, which raises ValueError for options that it cannot use."""
DRIVERS = tuple(_CLASSES)


def make_driver(name: str, options: DriverOptions) -> BlockDriver:
    """Not open yet. Raises ValueError for a name that no driver has or options it cannot use, and ModuleNotFoundError
    where a package that it needs is not installed."""
    if name not in _CLASSES:
        raise ValueError(f"no store driver is called {name!r}; there are {', '.join(DRIVERS)}")
    module, _, cls = _CLASSES[name].partition(":")
    driver: BlockDriver = getattr(import_module(module), cls).from_options(options)
    return driver


async def open_driver(name: str, options: DriverOptions) -> BlockDriver:
    """Open; the caller closes it. Raises what `make_driver` does, and StoreUnavailable."""
    driver = make_driver(name, options)
    try:
        await driver.open()
    except BaseException:
        await driver.close()
        raise
    return driver
