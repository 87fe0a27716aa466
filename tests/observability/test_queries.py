"""The dashboard and the alerts that are shipped ask for what exists, and the alerts fire when they should."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvcanary.observers.metrics import METRICS
from kvcanary.observers.prometheus import series_names
from tests.observability.queries import (
    ALERTS,
    DASHBOARD,
    SERIES,
    Query,
    alert_queries,
    alert_rules,
    dashboard_queries,
    labels_of,
    program,
)

QUERIES = dashboard_queries() + alert_queries()
BY_SERIES = {name: metric for metric in METRICS.values() for name in series_names(metric)}
FROM_SCRAPE = {"job", "instance"}
GROWS = ("rate(", "increase(")


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_query_names_metrics_and_labels_that_exist(query: Query) -> None:
    series = [found.group(1) for found in SERIES.finditer(query.text)]
    assert series
    assert set(series) <= BY_SERIES.keys()
    known = {label for name in series for label in BY_SERIES[name].labels} | FROM_SCRAPE
    known |= {"le"} if any(name.endswith("_bucket") for name in series) else set()
    assert set(labels_of(query.text)) <= known


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_rates_are_taken_of_what_only_grows_and_of_nothing_else(query: Query) -> None:
    for found in SERIES.finditer(query.text):
        rated = query.text[: found.start()].endswith(GROWS)
        compared = " offset " in query.text  # a rule that looks for series that are new
        assert rated == bool(found["range"])
        assert rated == (BY_SERIES[found.group(1)].kind != "gauge") or compared


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {found.group(1) for query in dashboard_queries() for found in SERIES.finditer(query.text)}
    assert {metric.name for metric in METRICS.values()} == {BY_SERIES[name].name for name in shown}


def test_panels_have_numbers_titles_and_places_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (column, line)
        for panel in panels
        for column in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for line in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24


def test_alerts_say_what_is_wrong_and_how_bad_it_is() -> None:
    for rule in alert_rules():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


@pytest.mark.prometheus
def test_promtool_takes_the_rules() -> None:
    done = subprocess.run([program("promtool"), "check", "rules", ALERTS], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alert_rules())} rules found" in done.stdout


@pytest.mark.prometheus
def test_alerts_fire_when_they_should_and_only_then() -> None:
    cases = Path(__file__).with_name("alerts_test.yml")
    assert {rule["alert"] for rule in alert_rules()} <= set(cases.read_text("utf-8").split())
    done = subprocess.run([program("promtool"), "test", "rules", cases], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
