"""The dashboard and the alert rules as tests read them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs" / "observability" / "grafana.json"
ALERTS = ROOT / "docs" / "observability" / "alerts.yml"
FETCHED = ROOT / ".venv-prometheus" / "usr" / "bin"

SERIES = re.compile(r"\b(kvcanary_\w+)(?:\{(?P<matchers>[^}]*)\})?(?P<range>\[[^\]]*\])?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


class Query(NamedTuple):
    """One expression, and where it stands."""

    place: str
    text: str

    def __str__(self) -> str:
        return self.place


def dashboard_queries() -> list[Query]:
    """All expressions of the dashboard: panels and annotations."""
    board: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    found = [
        Query(f"{panel['title']} {target['refId']}", target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
    return found + [Query(note["name"], note["expr"]) for note in board["annotations"]["list"]]


def alert_rules() -> list[dict[str, Any]]:
    """All alert rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"] for rule in group["rules"]]


def alert_queries() -> list[Query]:
    """The conditions of all alerts."""
    return [Query(rule["alert"], rule["expr"]) for rule in alert_rules()]


def labels_of(query: str) -> Iterator[str]:
    """Names of labels that a query matches or groups by."""
    for series in SERIES.finditer(query):
        yield from MATCHER.findall(series["matchers"] or "")
    for grouping in GROUPING.findall(query):
        yield from (name.strip() for name in grouping.split(","))


def program(name: str) -> Path:
    """A program of Prometheus, installed or fetched by ``make prometheus``; skips the test where there is none."""
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), str(FETCHED))))
    if found is None:
        pytest.skip(f"there is no {name}: install Prometheus (Debian: prometheus), or run `make prometheus`")
    return Path(found)
