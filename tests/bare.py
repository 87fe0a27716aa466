"""An environment that holds kvcanary with its declared dependencies, and nothing else: no torch, no engine."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that the requirements bring here, theirs included."""
    names: set[str] = set()
    pending = [Requirement(text) for text in requirements]
    while pending:
        requirement = pending.pop()
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in names:
            names.add(requirement.name)
            pending += [Requirement(text) for text in importlib.metadata.requires(requirement.name) or ()]
    return names


def copy_distribution(name: str, target: Path) -> None:
    for file in importlib.metadata.files(name) or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target / file)


def make_bare(folder: Path, *extras: str) -> Path:
    """The interpreter of a new environment with the core and some extras, made without a network."""
    venv.EnvBuilder(with_pip=False, symlinks=sys.platform != "win32").create(folder)
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(name for extra in extras for name in project["optional-dependencies"][extra])]
    for name in closure(wanted):
        copy_distribution(name, packages)
    shutil.copytree(ROOT / "kvcanary", packages / "kvcanary", ignore=shutil.ignore_patterns("__pycache__"))
    return Path(sysconfig.get_path("scripts", "venv", paths)) / "python"
