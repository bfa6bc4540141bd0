"""What is said of a setting that is wrong: which one, where it came from, and how to set it right."""

import os
from collections.abc import Mapping
from typing import Any

from pydantic_settings import BaseSettings

from shared.runtime.config_file import CONFIG_VARIABLE, PREFIX
from shared.runtime.credentials import secret_fields


def explain(cls: type[BaseSettings], role: str, given: Mapping[str, object], item: Mapping[str, Any]) -> str:
    """given: what flags set. item: one of pydantic's errors."""
    problem = str(item["msg"]).removeprefix("Value error, ")
    if not item["loc"]:
        return f"{role}: {problem}"
    field = str(item["loc"][0])
    names = [f"{PREFIX}{role}_{field}".upper(), f"{PREFIX}{field}".upper()]
    flag = f"--{field.replace('_', '-')}"
    found = next((name for name in names if os.environ.get(name)), os.environ.get(CONFIG_VARIABLE, "the default"))
    source = flag if field in given else found
    got = "***" if field in secret_fields(cls) else repr(item["input"])
    return (
        f"{role}: {field}: {problem} (got {got} from {source}). "
        f"Set it by {flag}, {names[0]}, or `{field} = …` under [{role}] in the {CONFIG_VARIABLE} file."
    )
