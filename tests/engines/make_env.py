"""Make an environment with another release of transformers on top of the one that runs this script.

``python tests/engines/make_env.py 5.17.0 .venv-tf517`` takes a few seconds: torch and everything else come
from the running interpreter's site-packages, only the wheels that must differ are installed.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HUB = {"5.17.0": "huggingface-hub>=1.5,<2"}
"""Releases that refuse the newest hub client; the others take what is there."""


def make_env(version: str, folder: Path) -> Path:
    """Make or complete the environment; returns its interpreter. Does nothing when it is there already."""
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if python.exists() and _installed(packages) == version:
        return python
    venv.create(folder, with_pip=False, clear=True)
    below = sysconfig.get_paths()["purelib"]
    # The folder's own packages come first on the path; what is below is added whole, its own .pth files too.
    (packages / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    wanted = [f"transformers=={version}"] + ([HUB[version]] if version in HUB else [])
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *wanted]
    subprocess.run(command, check=True)
    return python


def _installed(packages: Path) -> str | None:
    for found in importlib.metadata.distributions(name="transformers", path=[str(packages)]):
        return found.version
    return None


if __name__ == "__main__":
    print(make_env(sys.argv[1], Path(sys.argv[2])))  # noqa: T201
