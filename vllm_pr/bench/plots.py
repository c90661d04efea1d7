# SPDX-License-Identifier: Apache-2.0
"""Plots of the hit-rate sweep: one picture a workload, one panel a geometry."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from vllm_pr.bench.sweep import Point
from vllm_pr.bench.workers import CHANGED

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402

# The same input gives the same bytes.
_RC = {"svg.hashsalt": "vllm-pr", "svg.fonttype": "none", "font.size": 9}
_COLOURS = {
    "stock 0": "tab:blue",
    "stock 1024": "tab:cyan",
    "stock 4096": "tab:olive",
    "stock 16384": "tab:orange",
    "stock None": "tab:purple",
    "changed None": "tab:red",
}


def write_plots(points: Sequence[Point], folder: Path) -> list[Path]:
    """Write ``<workload>.svg`` for each workload; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    workloads: defaultdict[str, list[Point]] = defaultdict(list)
    for point in points:
        workloads[point.workload].append(point)
    return [_plot(name, found, folder) for name, found in workloads.items()]


def _plot(workload: str, points: Sequence[Point], folder: Path) -> Path:
    geometries = list(dict.fromkeys(point.groups for point in points))
    with plt.rc_context(_RC):
        figure, panels = plt.subplots(
            1, len(geometries), figsize=(4.6 * len(geometries), 3.4), squeeze=False
        )
        for panel, groups in zip(panels[0], geometries, strict=True):
            _panel(panel, [point for point in points if point.groups == groups])
            panel.set_title(f"{workload}, {groups}")
        panels[0][0].set_ylabel("share of prompt tokens from cache")
        panels[0][-1].legend(fontsize=7)
        figure.tight_layout()
        path = folder / f"{workload}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    return path


def _panel(panel: plt.Axes, points: Sequence[Point]) -> None:
    lines: defaultdict[str, list[Point]] = defaultdict(list)
    for point in points:
        if point.variant != CHANGED or point.interval is None:
            lines[point.setting].append(point)
    for setting, line in lines.items():
        panel.plot(
            [point.blocks for point in line],
            [point.hit_rate for point in line],
            label=setting,
            color=_COLOURS[setting],
            marker=".",
            linewidth=2 if setting.startswith(CHANGED) else 1,
        )
    panel.axhline(points[0].bound, color="black", linestyle="--", label="bound")
    panel.set_xscale("log")
    panel.minorticks_off()
    sizes = sorted({point.blocks for point in points})
    panel.set_xticks(sizes, [f"{size / 1000:g}k" for size in sizes])
    panel.set_xlabel("pool, blocks")
    panel.grid(alpha=0.3)
