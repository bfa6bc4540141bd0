"""Names of link backends: ours, and those that installed packages bring under the entry point group `baton.transfer`.

Whether a name can be used is said here, before any process starts; nothing is loaded for it.
"""

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from shared.runtime.config_file import ConfigError, closest

GROUP = "baton.transfer"
OURS = ("shm", "tcp", "nixl")
AUTO = ("shm", "tcp")
NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13")
"""Never both in one process."""


def chosen_names(transfer: str) -> tuple[str, ...]:
    """The backends that a setting `transfer` asks for, the preferred first. Raises ConfigError for one that this
    installation does not have, and if a package brings one under a name of ours: which of the two would run?"""
    for found in entry_points(group=GROUP):
        if found.name in (*OURS, "auto"):
            raise ConfigError(f"{owner(found)} brings a link backend {found.name!r}, and that name is ours")
    names = AUTO if transfer.strip() == "auto" else tuple(name.strip() for name in transfer.split(","))
    if len(set(names)) != len(names) or not all(names):
        raise ConfigError("give names of link backends, each once, with commas between them, or 'auto'")
    for name in names:
        if name not in OURS:
            entry_point(name)
    if "nixl" in names and not any(find_spec(package) for package in NIXL_PACKAGES):
        raise ConfigError("nixl is not installed here: pip install 'baton-serving[nixl]'")
    return names


def entry_point(name: str) -> EntryPoint:
    """The one of the installed packages that has this name. Raises ConfigError if there is none, or more than one."""
    installed = entry_points(group=GROUP)
    found = tuple(installed.select(name=name))
    if not found:
        known = ("auto", *OURS, *sorted(installed.names))
        raise ConfigError(f"no link backend {name!r}, only {', '.join(known)}{closest(name, known)}")
    if len(found) > 1:
        owners = " and ".join(sorted(owner(one) for one in found))
        raise ConfigError(f"{owners} both bring a link backend {name!r}: only one of them may be installed")
    return found[0]


def owner(found: EntryPoint) -> str:
    return found.dist.name if found.dist is not None else found.value
