"""Configuration: one frozen struct, validated when built, and the only reader of the settings in the environment.

Plugins that engines load in every process look at ``KVCANARY_MODE`` themselves first: to be off must import nothing.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, inspect

from kvcanary.errors import ConfigError

Mode = Literal["off", "log", "raise", "quarantine"]
Backend = Literal["auto", "triton", "reference"]
PREFIX = "KVCANARY_"
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*|\w+_PORT=(tcp|udp|sctp)://.*"
)
"""What Kubernetes sets in each container for a Service that is called ``kvcanary`` or ``kvcanary-...``."""
SECRET_FIELDS = frozenset({"key"})

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bound = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]

_PLAIN: dict[type[inspect.Type], str] = {
    inspect.BoolType: "True or False",
    inspect.NoneType: "None",
    inspect.VarTupleType: "a tuple of strings",
}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class _Settings(msgspec.StructMeta):
    """Names the nearest setting where an unknown one is given."""

    if not TYPE_CHECKING:  # type checkers know the settings from the fields, and refuse others by themselves

        def __call__(cls, *values: object, **settings: object) -> CanaryConfig:  # noqa: N805 - of a metaclass
            unknown = [name for name in settings if name not in cls.__struct_fields__]
            if unknown:
                raise ConfigError(f"there is no setting {unknown[0]!r}; {_nearest(unknown[0], cls.__struct_fields__)}")
            return super().__call__(*values, **settings)


class CanaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_Settings):
    """Every setting. ``mode`` has no default here; :meth:`from_env` reads an absent one as ``off``.

    Raises:
        ConfigError: an unknown setting (with the nearest known one), or a value of the wrong type or out of range; the
            message names field, value and range.
    """

    mode: Mode
    """``off``: nothing is wrapped; ``log``: report; ``raise``: stop the engine; ``quarantine``: heal or abort"""
    fingerprint: Literal["off", "full"] = "full"
    """seal the bytes of every new token"""
    scrub_mib_per_step: Annotated[float, Meta(ge=0, le=1 << 20)] = 32.0
    """MiB of sealed bytes re-read each step; 0 switches the scrub off"""
    verify_on_reuse: Literal["budgeted", "full"] = "budgeted"
    """bytes of reused pages: within the scrub's budget, or all before the forward that reads them"""
    head_entries_per_forward: Bound = 4 << 20
    """old positions checked per forward; row ends and the newest part always, the rest in rotation"""
    stats_every: Count = 100
    """forwards between ``StatsReported``; 0 = off"""
    health_every: Count = 100
    """forwards between health checks; 0 = off"""
    health_warmup: Count = 100
    """forwards before the first health check counts"""
    gpu_time_every: Count = 100
    """forwards between samples of the canary's own device time (CUDA only); 0 = off"""
    swa_divergence_every: Count = 0
    """forwards between samples of the window's divergence; 0 = off"""
    ring_capacity: Bound = 1024
    """violation rows in the pinned ring"""
    ring_quota_per_kind: Bound = 64
    """rows in flight per kind and group, so that a flood of one cannot hide another"""
    track_ownership: bool = True
    check_nonfinite: bool = True
    poison: Literal["off", "sample", "full"] = "off"
    """find writes that never came: some bytes of each new slot, or (for CI) also whole slots at allotment"""
    redact: bool = True
    """sinks withhold token ids and digests; the error in the process keeps all"""
    log: str | None = None
    """JSON lines to a file path, ``-`` (standard error) or ``stdout``"""
    log_profile: Literal["default", "ecs", "datadog", "otel"] = "default"
    log_service: str = "kvcanary"
    """the service that the ``ecs``, ``datadog`` and ``otel`` profiles name"""
    prometheus: str | None = None
    """serve metrics for Prometheus at this address: a port of this host, or ``address:port``"""
    journal: str | None = None
    """directory for the SQLite journal, made if it is not there"""
    journal_level: Literal["incidents", "all"] = "incidents"
    """what the journal keeps: the events around each finding, or every event"""
    journal_ring_mib: Annotated[float, Meta(gt=0, le=1 << 20)] = 8.0
    """at level ``incidents``: memory for the events before a finding"""
    journal_after_s: Annotated[float, Meta(ge=0, le=86400)] = 5.0
    """at level ``incidents``: seconds that are kept after a finding"""
    journal_queue_mib: Annotated[float, Meta(gt=0, le=1 << 20)] = 32.0
    """memory for events that wait for the disk; beyond it they are given up, counted and told"""
    journal_file_mib: Annotated[float, Meta(gt=0, le=1 << 30)] = 256.0
    """size of a run's file; its oldest events are deleted beyond it"""
    journal_dir_mib: Annotated[float, Meta(gt=0, le=1 << 30)] = 2048.0
    """size of all journals in the directory; the oldest runs that have ended are deleted beyond it"""
    observers: tuple[str, ...] = ()
    """sinks by name, ``package.module:attribute``, for processes that nobody can pass objects into"""
    fact_queue: Bound = 65536
    sink_queue: Bound = 8192
    stop_deadline_s: Seconds = 5.0
    flush_deadline_s: Seconds = 1.0
    """how long `Canary.flush()` waits, a pool's last findings are waited for, and an error waits for its journal"""
    backend: Backend = "auto"
    key: int | None = None
    """secret shared by transfer peers (64 bits); None: random per run"""
    snapshots: Bound = 64
    """headers in the snapshot ring"""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check(name, getattr(self, name))
        if self.ring_quota_per_kind > self.ring_capacity:
            raise ConfigError(
                f"ring_quota_per_kind is {self.ring_quota_per_kind}; expected at most ring_capacity, which is "
                f"{self.ring_capacity}"
            )
        if self.journal_file_mib > self.journal_dir_mib:
            raise ConfigError(
                f"journal_file_mib is {self.journal_file_mib}; expected at most journal_dir_mib, which is "
                f"{self.journal_dir_mib}"
            )
        if self.poison != "off" and self.fingerprint == "off":
            raise ConfigError(
                f"poison is {self.poison!r} and fingerprint is 'off'; it is looked for where new tokens are sealed: "
                "set fingerprint='full'"
            )
        if self.key is not None and not -(1 << 63) <= self.key < 1 << 64:
            raise ConfigError("key does not fit 64 bits; expected a whole number from -2**63 to 2**64 - 1, or None")
        for target in self.observers:
            module, colon, attribute = target.partition(":")
            if not (module and colon and attribute):
                raise ConfigError(f"observers names {target!r}; expected 'package.module:attribute'")

    def __repr__(self) -> str:
        return f"CanaryConfig({', '.join(f'{name}={value!r}' for name, value in self.describe().items())})"

    def describe(self) -> dict[str, Any]:
        """All settings as plain values, without secrets; what ``RunStarted`` carries."""
        plain = cast(
            "dict[str, Any]", msgspec.to_builtins({name: getattr(self, name) for name in self.__struct_fields__})
        )
        return {name: _hidden(value) if name in SECRET_FIELDS else value for name, value in plain.items()}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> CanaryConfig:
        """The settings in ``KVCANARY_*`` variables; an absent mode is ``off``, an empty variable is absent.

        With ``KVCANARY_MODE=off`` nothing else is looked at. Variables that Kubernetes makes for its Services are no
        settings.

        Raises:
            ConfigError: an unknown variable (with the nearest known one), or a value that does not fit.
        """
        environ = os.environ if environ is None else environ
        if _switched_off(environ):  # an emergency switch works beside a misspelt variable
            return cls(mode="off")
        values: dict[str, Any] = {"mode": "off"}
        for variable, text in environ.items():
            if variable.startswith(PREFIX) and not _SERVICE_LINK.fullmatch(f"{variable}={text}"):
                name = _field_of(variable)
                if text.strip():
                    values[name] = _parse(variable, name, text.strip())
        return cls(**values)


def no_quarantine(engine: str) -> ConfigError:
    """The refusal of ``quarantine``; ``watch`` asks before it touches an engine, and a canary when it gets a pool."""
    return ConfigError(
        f"mode 'quarantine': the {engine} adapter can neither heal nor abort a request; use 'log' or 'raise'"
    )


def resolve(
    config: CanaryConfig | None, mode: str | None = None, environ: Mapping[str, str] | None = None
) -> CanaryConfig:
    """What holds, given what a caller passed and the environment.

    ``KVCANARY_MODE=off`` always wins, so that an operator can switch off what code switched on. A given config is
    taken whole; without one, the environment's settings hold, with ``mode`` in place of theirs when it is given.

    Raises:
        ConfigError: ``mode`` and ``config`` contradict each other, or a setting does not fit.
    """
    environ = os.environ if environ is None else environ
    if _switched_off(environ):
        return CanaryConfig(mode="off") if config is None else msgspec.structs.replace(config, mode="off")
    if mode is not None:
        _check("mode", mode)
    if config is None:
        found = CanaryConfig.from_env(environ)
        return found if mode is None else msgspec.structs.replace(found, mode=cast("Mode", mode))
    if mode is not None and mode != config.mode:
        raise ConfigError(
            f"mode={mode!r} was given beside a config with mode={config.mode!r}; a config is taken whole, so give one"
        )
    return config


def _switched_off(environ: Mapping[str, str]) -> bool:
    return environ.get(f"{PREFIX}MODE", "").strip().lower() == "off"


@functools.cache
def _fields() -> dict[str, inspect.Field]:
    info = inspect.type_info(CanaryConfig)
    return {field.name: field for field in cast("inspect.StructType", info).fields}


@functools.cache
def _annotations() -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(CanaryConfig)}


def _check(name: str, value: object) -> None:
    shown = f"a {type(value).__name__}" if name in SECRET_FIELDS else repr(value)
    problem = ConfigError(f"{name} is {shown}; expected {_expected(_fields()[name].type)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise problem
    try:
        msgspec.convert(value, _annotations()[name])
    except msgspec.ValidationError:
        raise problem from None


def _expected(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType(values=values):
            words = "one of " + ", ".join(map(repr, values))
        case inspect.UnionType(types=types):
            words = " or ".join(_expected(option) for option in types)
        case inspect.IntType(ge=low, le=high):
            words = "a whole number" if low is None else f"a whole number from {low} to {high}"
        case inspect.FloatType(gt=above, ge=low, le=high):
            words = f"a number above {above} and up to {high}" if low is None else f"a number from {low} to {high}"
        case _:
            words = _PLAIN.get(type(kind), "a string")
    return words


def _field_of(variable: str) -> str:
    name = variable.removeprefix(PREFIX).lower()
    if name in _fields():
        return name
    known = [PREFIX + field.upper() for field in _fields()]
    raise ConfigError(f"environment variable {variable} is unknown; {_nearest(variable, known)}")


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _parse(variable: str, name: str, text: str) -> object:
    kind = _fields()[name].type
    if isinstance(kind, inspect.VarTupleType):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(kind, inspect.LiteralType):
        value: object = text.lower()
    elif isinstance(kind, inspect.BoolType):
        value = _BOOLEANS.get(text.lower(), text)
    elif isinstance(kind, inspect.IntType) or name in SECRET_FIELDS:
        value = _number(int, text, 0)
    elif isinstance(kind, inspect.FloatType):
        value = _number(float, text)
    else:
        value = text
    try:
        _check(name, value)
    except ConfigError:
        shown = "a value that is not shown" if name in SECRET_FIELDS else repr(text)
        raise ConfigError(f"environment variable {variable} is {shown}; expected {_expected(kind)}") from None
    return value


def _number(make: type, text: str, *base: int) -> object:
    try:
        return make(text, *base)
    except ValueError:
        return text


def _hidden(value: object) -> str | None:
    return None if value is None else "(set)"
