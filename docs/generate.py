"""Write the parts of the documentation that the code already says: ``python -m docs.generate``.

Events, settings and commands are described where they are defined; examples are shown as they are run. With
``--check`` nothing is written, and the exit status is 1 if a page is out of date.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvcanary import config, events
from kvcanary.cli import COMMANDS, EXAMPLES
from kvcanary.faults.injectors import FAULTS
from kvcanary.faults.simulated_faults import SIMULATED
from kvcanary.observers.metrics import METRICS
from kvcanary.observers.prometheus import series_names

DOCS = Path(__file__).parent
NOTICE = "<!-- Made by `python -m docs.generate`. Change the source or the script, not this page. -->\n"
INCLUDE = re.compile(
    r"^<!-- example: (?P<name>\S+)(?: (?P<part>\S+))? -->\n```python\n.*?^```$", re.MULTILINE | re.DOTALL
)


class Field(NamedTuple):
    """One annotated attribute of a class, with the docstring beneath it."""

    name: str
    annotation: str
    default: str
    text: str


def fields_of(node: ast.ClassDef) -> Iterator[Field]:
    """The attributes of a class, as its source has them."""
    following = [*node.body[1:], ast.Pass()]
    for statement, after in zip(node.body, following, strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = "" if statement.value is None else ast.unparse(statement.value)
            yield Field(statement.target.id, ast.unparse(statement.annotation), default, _docstring(after))


def _docstring(statement: ast.stmt) -> str:
    value = statement.value if isinstance(statement, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
    return plain(text)


def plain(docstring: str) -> str:
    """A docstring as Markdown on one line a paragraph."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def cell(text: str) -> str:
    """Text that a cell of a table can hold."""
    return text.replace("|", "\\|").replace("\n\n", " ")


def code(text: str) -> str:
    """Text in a cell, set as code; nothing stays nothing."""
    return f"`{cell(text)}`" if text else ""


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table without its empty columns, or nothing where there are no rows."""
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    lines = [*zip(*columns, strict=True)]
    lines[1:1] = [("---",) * len(columns)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n" if rows else ""


# --- events -------------------------------------------------------------------------------------------------

EVENTS_HEAD = """# Events

Every event is a frozen `msgspec.Struct` of `kvcanary.events`. Its tag stands in the field `type` of its JSON form.
Types are named in the past tense, units stand in the names, 64-bit hashes are sixteen hexadecimal digits. A type is
extended only by fields with defaults, so an old reader reads new events. An event of a type that a reader does not know
decodes to `UnknownEvent`, which encodes to the same bytes again. The
[JSON Schema](events.schema.json) of all events is made from the same source.

`kvcanary.events.json_codec()` and `msgpack_codec()` encode and decode; `register_event` adds a type of your own, see
[your own observer](../how-to/observers.md).

Fields that do not apply hold -1, `""`, `null` or an empty list, as their defaults say.

"""
ENVELOPES = ("Event", "Derived", "Fact", "PagesFact")
ENVELOPE_FIELDS = {
    "seq": "number of the event in its run, from 1, without a gap",
    "time_ns": "wall clock where it happened, nanoseconds since 1970",
    "monotonic_ns": "monotonic clock of the same moment",
    "forward": "number of the forward, from 1 in each run",
    "cause": "`seq` of the event that it follows from",
    "by": "name of the fold that concluded it",
    "retired": "last forward that was done on the device when the fact was recorded",
    "group": "name of the attention group",
    "requests": "request ids that the runs point into",
    "runs": "the pages",
}
SECTION = re.compile(r"^# --- (?P<title>.*?) -+$", re.MULTILINE)


def events_page() -> str:
    """The reference of events, in the order of their source."""
    source = inspect.getsource(events)
    sections = [(source.count("\n", 0, found.start()) + 1, found["title"]) for found in SECTION.finditer(source)]
    known = {cls.__name__: cls for cls in events.event_types()}
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    page = [NOTICE, EVENTS_HEAD, "## The envelope\n\n"]
    page += [_struct(node, "") for node in classes if node.name in ENVELOPES]
    for number, (first, title) in enumerate(sections[:-1]):
        members = [node for node in classes if first < node.lineno < sections[number + 1][0]]
        page.append(f"## {title[0].upper()}{title[1:]}\n\n")
        page += [_struct(node, _tag(known.get(node.name))) for node in members if node.name not in ENVELOPES]
    return "".join(page).rstrip() + "\n"


def _tag(cls: type[events.Event] | None) -> str:
    return f"`{events.event_name(cls)}`. " if cls is not None else ""


def _struct(node: ast.ClassDef, tag: str) -> str:
    cls = getattr(events, node.name)
    base = cls.__mro__[1].__name__
    above = f" Has the fields of [{base}](#{base.lower()}) too." if base in ENVELOPES and base != "Event" else ""
    shape = " In JSON it is a list of its fields." if cls.__struct_config__.array_like else ""
    if node.name == "UnknownEvent":
        tag = ""
    words = ENVELOPE_FIELDS if node.name in ENVELOPES else {}
    rows = [
        (code(f.name), code(f.annotation), code(_value(f.default)), cell(f.text or words.get(f.name, "")))
        for f in fields_of(node)
    ]
    text = plain(cls.__doc__ or "")
    return f"### {node.name}\n\n{tag}{text}{shape}{above}\n\n" + table(("field", "type", "default", "meaning"), rows)


def _value(default: str) -> str:
    """A default as it is, not by the name of a constant."""
    return repr(getattr(events, default)) if default.isidentifier() and hasattr(events, default) else default


def schema() -> str:
    """JSON Schema of all events, one definition each."""
    found = events.json_schemas()
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvcanary events",
        "description": f"Events of schema version {events.SCHEMA_VERSION}, told apart by their field `type`.",
        "anyOf": [found["events"][name] for name in sorted(found["events"])],
        "$defs": dict(sorted(found["$defs"].items())),
    }
    return json.dumps(whole, indent=1) + "\n"


# --- settings -----------------------------------------------------------------------------------------------

SETTINGS_HEAD = """# Configuration

`kvcanary.CanaryConfig` holds every setting. It is frozen and checked when it is made: a wrong value is a `ConfigError`
that names the setting, the value and the range.

```python
import kvcanary

config = kvcanary.CanaryConfig(mode="log", log="kvcanary.jsonl", scrub_mib_per_step=64)
```

Each setting has an environment variable. `CanaryConfig.from_env()` reads them, and nothing else does. What holds:

1. `KVCANARY_MODE=off` always wins, whatever the program says.
2. A `config=` that the program passes is taken whole; the environment adds nothing to it. A `mode=` beside it must be
   the same.
3. With `mode=` alone, the mode is the program's and all other settings are the environment's.
4. Without either, the environment's settings hold. Without `KVCANARY_MODE` the mode is `off`.

An empty variable counts as absent. An unknown `KVCANARY_*` variable is an error that names the nearest known one;
what Kubernetes sets in each container for a Service of that name (`KVCANARY_SERVICE_HOST`, `KVCANARY_PORT_9464_TCP`...)
is passed over. [Containers](../how-to/containers.md) has the variables of a deployment.
Booleans are `1`, `true`, `yes`, `on` or `0`, `false`, `no`, `off`; whole numbers may be written `0x400`; lists are
separated by commas.

"""

OWN_WORDS = {
    "mode": "`off`: nothing is wrapped; `log`: report; `raise`: stop the engine at its next step; `quarantine`: take "
    "bad pages and the requests that read them out of service; refused where the engine's adapter cannot",
    "verify_on_reuse": "how much of a prefix hit goes to the front of the scrub: its first 512 slots (`budgeted`) or "
    "all of it (`full`)",
    "track_ownership": "keep the ledger of who holds which page, on the host",
    "check_nonfinite": "report NaN and infinity in the bytes of new tokens",
    "poison": "find writes that never came, see [poison](checks.md#poison): `sample` puts a few bytes into each new "
    "slot, `full` (for CI) also fills pages when they are handed out",
    "log_profile": "names of the fields in the log, see [logs](../how-to/logs.md)",
    "fact_queue": "lifecycle calls that may wait for the drain; what does not fit is lost, counted, and told as "
    "`facts.lost`",
    "sink_queue": "events that a sink may lag behind, where it names no bound of its own",
    "stop_deadline_s": "how long `stop()` goes on delivering",
    "backend": "`auto` is `triton` on CUDA and `reference` elsewhere; an explicit choice never falls back",
}
"""For settings whose source says nothing, or less than a reader needs."""


def settings_page() -> str:
    """The reference of settings."""
    (node,) = (
        node
        for node in ast.parse(inspect.getsource(config)).body
        if isinstance(node, ast.ClassDef) and node.name == "CanaryConfig"
    )
    info = typing.cast("msgspec.inspect.StructType", msgspec.inspect.type_info(config.CanaryConfig))
    kinds = {field.name: field.type for field in info.fields}
    values = config.CanaryConfig(mode="off")
    rows = []
    for field in fields_of(node):
        default = "required" if field.name == "mode" else code(repr(getattr(values, field.name)))
        # The words of its own errors.
        allowed = config._expected(kinds[field.name])  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        text = OWN_WORDS.get(field.name) or field.text
        rows.append((code(field.name), code(config.PREFIX + field.name.upper()), cell(allowed), default, cell(text)))
    head = ("setting", "variable", "value", "default", "meaning")
    return NOTICE + SETTINGS_HEAD + table(head, rows).rstrip() + "\n"


# --- metrics ------------------------------------------------------------------------------------------------

METRICS_HEAD = """# Metrics

What kvcanary exports to Prometheus and OpenTelemetry; [how to](../how-to/metrics.md). For OpenTelemetry, names and
labels have `kvcanary.` before them. Units are in UCUM, with what is counted in braces.

"""


def metrics_page() -> str:
    """The reference of metrics."""
    rows = [
        (
            code(metric.name),
            code(series_names(metric)[0].removesuffix("_bucket")),
            metric.kind,
            code(metric.unit),
            ", ".join(map(code, metric.labels)),
            cell(metric.description),
        )
        for metric in METRICS.values()
    ]
    head = ("metric", "for Prometheus", "kind", "unit", "labels", "meaning")
    return NOTICE + METRICS_HEAD + table(head, rows).rstrip() + "\n"


# --- commands -----------------------------------------------------------------------------------------------

COMMANDS_HEAD = """# Command line

`kvcanary COMMAND` needs the extra `cli`. `kvcanary --help` lists the commands, `kvcanary COMMAND --help` their options.

"""
ARGUMENT = re.compile(r"^(?P<name>\w+): (?P<text>.*?)(?=^\w+: |\Z)", re.MULTILINE | re.DOTALL)


def commands_page() -> str:
    """The reference of commands, from the docstrings that their help is made from."""
    return NOTICE + COMMANDS_HEAD + _exit_statuses() + "".join(map(_command, COMMANDS)).rstrip() + "\n"


def _exit_statuses() -> str:
    lines = EXAMPLES.partition("Exit status:")[2].strip().splitlines()
    rows = [(code(status), text.strip()) for status, _, text in (line.strip().partition(" ") for line in lines)]
    return table(("exit status", "meaning"), rows)


def _command(name: str) -> str:
    command = getattr(importlib.import_module(f"kvcanary.cli.{name}"), name)
    sections = re.split(r"^(?=[A-Z][a-z]+:$)", inspect.getdoc(command) or "", flags=re.MULTILINE)
    parts = {head.strip(): textwrap.dedent(body) for head, _, body in (s.partition(":\n") for s in sections[1:])}
    page = f"## kvcanary {name}\n\n{plain(sections[0]).strip()}\n\n"
    page += f"```text\n{parts['Examples'].strip()}\n```\n\n"
    page += table(("option", "value", "default", "meaning"), list(_options(command, parts["Args"])))
    if name == "demo":
        faults = [(code(f.name), f.description, ", ".join(map(code, f.expects)), _within(f.within)) for f in FAULTS]
        page += "Faults that it plants, in this order:\n\n"
        page += table(("fault", "what is done", "named by one of", "after how many forwards at most"), faults)
    if name == "selftest":
        page += "Faults of the matrix; a report of one in the field where there is one:\n\n"
        page += table(("fault", "what is done", "named by one of", "case"), list(_matrix()))
    return page


def _matrix() -> Iterator[tuple[str, ...]]:
    for name, operation in SIMULATED.items():
        fault = operation.fault
        yield code(name), fault.description, ", ".join(map(code, fault.expects)), operation.case


def _options(command: Any, arguments: str) -> Iterator[tuple[str, ...]]:
    texts = {found["name"]: plain(found["text"]) for found in ARGUMENT.finditer(arguments)}
    hints = typing.get_type_hints(command)
    for name, parameter in inspect.signature(command).parameters.items():
        flag = parameter.default is False
        default = "" if flag or parameter.default in (None, ()) else code(str(parameter.default))
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield code(name.upper()), _kind(hints[name]), "", cell(texts[name])
            continue
        default = "required" if parameter.default is parameter.empty else default
        given = name.upper() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else f"--{name.rstrip('_')}"
        yield code(given), "" if flag else _kind(hints[name]), default, cell(texts[name])


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(code(str(choice)) for choice in typing.get_args(hint))
    plain_types = [kind for kind in typing.get_args(hint) or (hint,) if kind not in (type(None), Ellipsis)]
    names = {int: "whole number", float: "number", str: "text", Path: "file"}
    return names[plain_types[0]]


def _within(forwards: int | None) -> str:
    return "one health period" if forwards is None else str(forwards)


# --- all of it ----------------------------------------------------------------------------------------------


def with_examples(page: str) -> str:
    """The page, with each shown example, or the function or class of it that is named, as its file has it now."""

    def shown(found: re.Match[str]) -> str:
        text = (DOCS / "examples" / found["name"]).read_text("utf-8").rstrip()
        if found["part"]:
            text = part_of(text, found["part"])
        return f"{found[0].partition(chr(10))[0]}\n```python\n{text}\n```"

    return INCLUDE.sub(shown, page)


def part_of(source: str, name: str) -> str:
    """One function or class of a source; ``Class.method`` names a method."""
    body: list[ast.stmt] = ast.parse(source).body
    found: ast.ClassDef | ast.FunctionDef | None = None
    for word in name.split("."):
        known = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        if word not in known:
            raise SystemExit(f"an example has no {name}; there are {', '.join(known)}")
        found, body = known[word], known[word].body
    lines = source.splitlines()
    return textwrap.dedent("\n".join(lines[found.lineno - 1 : found.end_lineno] if found else lines))


def outputs() -> dict[Path, str]:
    """What every made file should hold."""
    made = {
        DOCS / "reference" / "events.md": events_page(),
        DOCS / "reference" / "events.schema.json": schema(),
        DOCS / "reference" / "configuration.md": settings_page(),
        DOCS / "reference" / "metrics.md": metrics_page(),
        DOCS / "reference" / "cli.md": commands_page(),
    }
    pages = {path: path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md")) if path not in made}
    return made | {path: with_examples(text) for path, text in pages.items() if INCLUDE.search(text)}


def main(arguments: list[str]) -> int:
    """Write what is out of date, or with ``--check`` name it."""
    stale = [(path, text) for path, text in outputs().items() if not path.exists() or path.read_text("utf-8") != text]
    for path, text in stale:
        print(path.relative_to(DOCS.parent))
        if "--check" not in arguments:
            path.write_text(text, "utf-8")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
