"""The command line: ``kvcanary COMMAND``. Needs the ``cli`` extra."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcanary._version import __version__
from kvcanary.errors import KVCanaryError

if TYPE_CHECKING:
    from cyclopts import App

HELP = "AddressSanitizer, scrubber and flight recorder for the KV caches of LLM inference engines."

EXAMPLES = """Examples:

  kvcanary demo           clean traffic, then planted faults, each named
  kvcanary demo --json    the same as JSON lines
  kvcanary selftest       do the kernels work on this machine?
  kvcanary simulate DIR   play scenario files: is each fault reported, and nothing else?
  kvcanary bench --list   what can be measured
  kvcanary journal DIR    what runs recorded
  kvcanary replay DIR     the same events through the observers again
  kvcanary demo --help    what a command can be told

Exit status:

  0    all is well
  1    something was found that should not be, or missed
  2    a wrong call, setting or installation
"""

COMMANDS = ("demo", "selftest", "simulate", "bench", "journal", "replay")
"""Each is the function of its own name in the module of that name beside this one; its docstring is its help."""

EXTRAS = {
    "cyclopts": "cli",
    "rich": "cli",
    "torch": "torch",
    "triton": "torch",
    "transformers": "transformers",
    "psutil": "transformers",
}
"""Which extra installs a module that may be missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: the words after ``kvcanary``; those of the process when None.
    """
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KVCanaryError as error:
        return _fail(str(error))
    except ImportError as error:
        missing = _missing(error)
        if missing is None:
            raise
        return _fail(f"{missing!r} is needed and not installed: pip install 'kvcanary[{EXTRAS[missing]}]'")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader is gone, as `head` is; what is still in the buffer must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: Sequence[str]) -> int:
    importlib.import_module("rich")  # cyclopts needs it only for some pages; every command does
    from cyclopts import CycloptsError

    try:
        result = _app()(arguments)
    except CycloptsError:  # it has been printed
        return 2
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _app() -> App:
    from cyclopts import App, Parameter

    app = App(
        name="kvcanary",
        version=__version__,
        help=HELP,
        help_epilogue=EXAMPLES,
        help_format="plaintext",
        default_parameter=Parameter(negative=""),
        result_action="return_value",
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
    )
    for name in COMMANDS:
        command: Callable[..., int] = getattr(importlib.import_module(f"kvcanary.cli.{name}"), name)
        text, examples = _help(command)
        app.command(command, name=name, help=text, help_epilogue=examples)
    return app


def _help(command: Callable[..., int]) -> tuple[str, str]:
    """A command's description, with its lines joined to fit any terminal, and its examples as they stand."""
    sections = re.split(r"^(?=[A-Z][a-z]+:$)", inspect.getdoc(command) or "", flags=re.MULTILINE)
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in sections[0].split("\n\n"))
    return text.strip(), next((section.strip() for section in sections if section.startswith("Examples:")), "")


def _missing(error: BaseException | None) -> str | None:
    """The known optional module whose absence is behind ``error``."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            module = error.name.partition(".")[0]
            return module if module in EXTRAS else None
        error = error.__cause__
    return None


def _fail(message: str) -> int:
    print(f"kvcanary: {message}", file=sys.stderr)
    return 2
