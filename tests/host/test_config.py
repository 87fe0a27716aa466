"""Settings: what is refused, and what the environment says."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from kvcanary.config import CanaryConfig, resolve
from kvcanary.errors import ConfigError


def test_mode_has_no_default() -> None:
    with pytest.raises(TypeError, match="mode"):
        CanaryConfig()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("mode", "loud", "one of 'log', 'off', 'quarantine', 'raise'"),
        ("stats_every", -1, "a whole number from 0"),
        ("stats_every", 1.5, "a whole number from 0"),
        ("ring_capacity", 0, "a whole number from 1"),
        ("scrub_mib_per_step", float("nan"), "a number from 0"),
        ("scrub_mib_per_step", "32", "a number from 0"),
        ("redact", 1, "True or False"),
        ("poison", "always", "one of 'full', 'off', 'sample'"),
        ("log", 3, "a string or None"),
        ("observers", "pkg:name", "a tuple of strings"),
        ("stop_deadline_s", 0, "a number above 0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_and_its_range(field: str, value: object, expected: str) -> None:
    settings: dict[str, Any] = {"mode": "log", field: value}
    with pytest.raises(ConfigError) as caught:
        CanaryConfig(**settings)
    assert str(caught.value).startswith(f"{field} is {value!r}; expected {expected}")


@pytest.mark.parametrize(
    ("name", "hint"), [("jurnal", "did you mean journal\\?"), ("xyz", "known are mode, fingerprint")]
)
def test_an_unknown_setting_is_refused_with_the_nearest_one(name: str, hint: str) -> None:
    settings: dict[str, Any] = {"mode": "log", name: "runs"}
    with pytest.raises(ConfigError, match=f"there is no setting '{name}'; {hint}"):
        CanaryConfig(**settings)


def test_a_configuration_survives_pickling_and_copying() -> None:
    config = CanaryConfig(mode="log", journal="runs")
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_a_quota_above_the_ring_is_refused() -> None:
    with pytest.raises(ConfigError, match="ring_quota_per_kind is 65"):
        CanaryConfig(mode="log", ring_capacity=64, ring_quota_per_kind=65)


def test_poison_without_seals_would_find_nothing_and_is_refused() -> None:
    with pytest.raises(ConfigError, match="poison is 'sample' and fingerprint is 'off'"):
        CanaryConfig(mode="log", poison="sample", fingerprint="off")


def test_an_observer_without_an_attribute_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"observers names 'mine'; expected 'package\.module:attribute'"):
        CanaryConfig(mode="log", observers=("mine",))


def test_the_key_shows_in_no_representation() -> None:
    config = CanaryConfig(mode="log", key=987654321)
    assert "987654321" not in repr(config)
    assert "987654321" not in str(config.describe())
    with pytest.raises(ConfigError) as caught:
        CanaryConfig(mode="log", key=987654321 << 64)
    assert "987654321" not in str(caught.value)


def test_a_replaced_field_is_validated_too() -> None:
    with pytest.raises(ConfigError, match="snapshots is 0"):
        msgspec.structs.replace(CanaryConfig(mode="log"), snapshots=0)


def test_an_empty_environment_is_off() -> None:
    assert CanaryConfig.from_env({}) == CanaryConfig(mode="off")


def test_the_environment_sets_every_kind_of_field() -> None:
    config = CanaryConfig.from_env(
        {
            "KVCANARY_MODE": "Raise",
            "KVCANARY_STATS_EVERY": "7",
            "KVCANARY_SCRUB_MIB_PER_STEP": "0.5",
            "KVCANARY_REDACT": "no",
            "KVCANARY_LOG": "-",
            "KVCANARY_OBSERVERS": "mine:one, mine:two",
            "KVCANARY_KEY": "0xff",
            "KVCANARY_JOURNAL": " ",
            "PATH": "/bin",
        }
    )
    assert config == CanaryConfig(
        mode="raise",
        stats_every=7,
        scrub_mib_per_step=0.5,
        redact=False,
        log="-",
        observers=("mine:one", "mine:two"),
        key=255,
    )


def test_an_unknown_variable_names_its_nearest_neighbour() -> None:
    with pytest.raises(ConfigError, match="KVCANARY_STAT_EVERY is unknown; did you mean KVCANARY_STATS_EVERY"):
        CanaryConfig.from_env({"KVCANARY_STAT_EVERY": "3"})


def test_what_kubernetes_sets_for_services_of_that_name_is_no_setting() -> None:
    links = {
        "KVCANARY_SERVICE_HOST": "10.96.0.7",
        "KVCANARY_SERVICE_PORT": "9464",
        "KVCANARY_SERVICE_PORT_METRICS": "9464",
        "KVCANARY_PORT": "tcp://10.96.0.7:9464",
        "KVCANARY_PORT_9464_TCP": "tcp://10.96.0.7:9464",
        "KVCANARY_PORT_9464_TCP_ADDR": "10.96.0.7",
        "KVCANARY_METRICS_SERVICE_HOST": "10.96.0.8",
        "KVCANARY_METRICS_PORT": "tcp://10.96.0.8:9464",
    }
    assert CanaryConfig.from_env({"KVCANARY_MODE": "log", **links}) == CanaryConfig(mode="log")


@pytest.mark.parametrize("variable", ["KVCANARY_PROMETHEUS_PORT", "KVCANARY_LOG_SERVICES", "KVCANARY_SERVICE"])
def test_what_a_person_may_have_meant_is_an_error_all_the_same(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is unknown"):
        CanaryConfig.from_env({"KVCANARY_MODE": "log", variable: "9464"})


def test_off_switches_off_beside_a_misspelt_variable_however_it_is_written() -> None:
    assert CanaryConfig.from_env({"KVCANARY_MODE": " OFF ", "KVCANARY_NONSENSE": "1"}).mode == "off"


def test_a_variable_of_the_wrong_type_is_named() -> None:
    with pytest.raises(ConfigError, match="environment variable KVCANARY_HEALTH_EVERY is 'often'; expected a whole"):
        CanaryConfig.from_env({"KVCANARY_HEALTH_EVERY": "often"})


def test_a_wrong_secret_is_named_but_not_shown() -> None:
    with pytest.raises(ConfigError, match="KVCANARY_KEY") as caught:
        CanaryConfig.from_env({"KVCANARY_KEY": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_a_given_config_is_taken_whole() -> None:
    config = CanaryConfig(mode="log")
    assert resolve(config, None, {"KVCANARY_MODE": "raise", "KVCANARY_STATS_EVERY": "5"}) is config


def test_off_in_the_environment_always_wins() -> None:
    kill = {"KVCANARY_MODE": " OFF", "KVCANARY_NONSENSE": "must not get in the way"}
    assert CanaryConfig.from_env(kill).mode == "off"
    assert resolve(CanaryConfig(mode="raise", stats_every=3), "raise", kill) == CanaryConfig(mode="off", stats_every=3)
    assert resolve(None, "raise", kill).mode == "off"


def test_a_given_mode_takes_the_other_settings_from_the_environment() -> None:
    resolved = resolve(None, "raise", {"KVCANARY_STATS_EVERY": "5"})
    assert resolved == CanaryConfig(mode="raise", stats_every=5)


def test_a_mode_that_contradicts_the_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode='raise' was given beside a config with mode='log'"):
        resolve(CanaryConfig(mode="log"), "raise", {})
    with pytest.raises(ConfigError, match="mode is 'noisy'"):
        resolve(None, "noisy", {})


def test_the_host_modules_import_neither_torch_nor_numpy_and_leave_logging_alone() -> None:
    program = """
import logging, sys
import kvcanary.config, kvcanary.mailbox, kvcanary.testing, kvcanary.observers.base, kvcanary.observers.log
from kvcanary.config import CanaryConfig
from kvcanary.mailbox import Mailbox
from kvcanary.observers.health import HealthFold
from kvcanary.observers.stats import StatsFold
from kvcanary.observers.violations import ViolationsFold
import structlog
assert not {"torch", "numpy", "triton", "pytest"} & set(sys.modules), sorted(sys.modules)
assert not logging.getLogger().handlers and not structlog.is_configured()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
