"""The TOML file that `BATON_CONFIG` names, and what is wrong with it. `settings.py` says what its lines mean."""

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

PREFIX = "BATON_"
"""Of all variables that set something."""
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
EXIT_CONFIG = 78
"""Exit status of a process whose settings are wrong: starting it again cannot help."""


class ConfigError(ValueError):
    """A setting is wrong; the message names it, where it came from and how to set it right."""


def read_config(path: str, role: str, fields: Mapping[str, Collection[str]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its sections [common] and [role]. fields: of each role. Unknown sections and keys are errors."""
    if not path:
        return {}, {}
    try:
        content = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{CONFIG_VARIABLE}={path}: {error}") from error
    every_field = {field for known in fields.values() for field in known}
    for section, lines in content.items():
        if section not in fields and section != "common":
            raise ConfigError(f"{path}: no section [{section}]{closest(section, [*fields, 'common'])}")
        if not isinstance(lines, dict):
            raise ConfigError(f"{path}: {section} must be a section, as in [{section}]")
        allowed = every_field if section == "common" else fields[section]
        for key in lines:
            if key not in allowed:
                raise ConfigError(f"{path}: [{section}] has no setting {key!r}{closest(key, allowed)}")
    return content.get("common", {}), content.get(role, {})


def closest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about `word`: what was meant perhaps."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
