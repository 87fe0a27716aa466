from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import kvcanary


def test_there_are_at_most_twenty_five_public_names() -> None:
    assert len(kvcanary.__all__) == len(set(kvcanary.__all__)) <= 25


@pytest.mark.parametrize("name", kvcanary.__all__)
def test_every_public_name_can_be_loaded(name: str) -> None:
    assert getattr(kvcanary, name) is not None
    assert name in dir(kvcanary)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'wacth'"):
        kvcanary.wacth  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_loads_nothing_else() -> None:
    program = """
import sys
before = set(sys.modules)
import kvcanary
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
sys.exit(str(loaded) if loaded != {"kvcanary"} else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_names_are_those_of_the_modules_that_define_them() -> None:
    assert kvcanary.ConfigError is importlib.import_module("kvcanary.errors").ConfigError
