"""``python -m kvcanary``: the command where no script was installed, or for an interpreter of one's choice."""

from __future__ import annotations

from kvcanary.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
