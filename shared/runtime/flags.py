"""What a person gave one process: its flags, and variables that nobody reads. `settings.py` says what they mean."""

import argparse
import os
from collections.abc import Sequence

from pydantic import ByteSize

from shared.runtime.config_file import CONFIG_VARIABLE, closest
from shared.runtime.credentials import secret_fields
from shared.runtime.settings import PREFIX, ROLES, CommonSettings


def parse_flags(cls: type[CommonSettings], argv: Sequence[str]) -> dict[str, str]:
    """Flags of one process as overrides; `--help` lists every setting with its names and default, and exits."""
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{cls.role}",
        description=f"{cls.__doc__} Each setting is a flag, BATON_{cls.role.upper()}_<FIELD>, BATON_<FIELD>, or a line "
        f"under [{cls.role}] or [common] of the TOML file that BATON_CONFIG names; the first found counts.",
        epilog=f"No flags, because every user of the host could read them: {', '.join(secret_fields(cls))}. "
        f"example: python -m services.{cls.role} --nats-url nats://127.0.0.1:4222 --log-level debug",
        allow_abbrev=False,
    )
    for field, info in cls.model_fields.items():
        if field in secret_fields(cls):
            continue
        default = info.get_default(call_default_factory=True, validated_data={})
        shown = "" if default in (None, "") else f" [{_human(default)}]"
        text = f"{info.description or ''}{shown}".replace("%", "%%")
        parser.add_argument(f"--{field.replace('_', '-')}", dest=field, metavar="VALUE", help=text)
    return {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}


def unknown_variables() -> list[str]:
    """A line for each BATON_ variable that no role reads: most often a misspelling."""
    known = {CONFIG_VARIABLE}
    for cls in ROLES.values():
        known.update(f"{PREFIX}{field}".upper() for field in cls.model_fields)
        known.update(f"{PREFIX}{cls.role}_{field}".upper() for field in cls.model_fields)
    names = sorted(key for key in os.environ if key.startswith(PREFIX) and key not in known)
    return [f"{name} is set but nothing reads it{closest(name, known)}" for name in names]


def _human(value: object) -> str:
    return value.human_readable() if isinstance(value, ByteSize) else str(value)
