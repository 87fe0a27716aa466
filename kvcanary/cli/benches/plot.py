"""The growth series as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcanary.errors import ConfigError


def plot_growth(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel for each row that has a series.

    Raises:
        ConfigError: matplotlib is not installed, no row has a series, or the file's ending is no picture format.
    """
    series = [row for row in rows if row.get("series")]
    if not series:
        raise ConfigError("--plot: no row with a series was measured; add --only growth, on a CUDA device")
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib, which cannot be imported ({error}); pip install 'kvcanary[plot]'"
        ) from error
    figure, axes = pyplot.subplots(1, len(series), figsize=(4.2 * len(series), 3.4), squeeze=False)
    for axis, row in zip(axes[0], series, strict=True):
        points = [point for point in row["series"] if point["x"] > 0]
        axis.plot([point["x"] for point in points], [point["us"] for point in points], marker="o", markersize=3)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel(points[0]["unit"])
        axis.set_ylabel("us a forward")
        axis.set_title(row["name"].partition(".")[2].replace("_", " "), fontsize=10)
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=140)
    except ValueError as error:
        raise ConfigError(f"--plot {str(path)!r}: {error}") from error
    finally:
        pyplot.close(figure)
