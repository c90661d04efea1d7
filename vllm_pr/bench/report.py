# SPDX-License-Identifier: Apache-2.0
"""Tables of the benchmarks for a terminal."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from vllm_pr.bench.cost import Cost
from vllm_pr.bench.scale import Scaled
from vllm_pr.bench.sweep import Point
from vllm_pr.bench.ttft import Ttft
from vllm_pr.bench.workers import CHANGED


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def hit_tables(points: Sequence[Point]) -> Iterator[Table]:
    """One table a workload and geometry: pools down, settings across.

    Changed with an explicit interval is left out: it equals stock.
    """
    for (workload, groups), found in groupby(points, lambda p: (p.workload, p.groups)):
        rows = [p for p in found if p.variant != CHANGED or p.interval is None]
        shown = list(dict.fromkeys(point.setting for point in rows))
        table = _table(
            f"{workload}, {groups}: share of prompt tokens from cache",
            "blocks",
            *shown,
            "bound",
        )
        for blocks, line in groupby(rows, lambda p: p.blocks):
            rates = {point.setting: point for point in line}
            best = max(point.hit_rate for point in rates.values())
            table.add_row(
                f"{blocks:,}",
                *(
                    f"[bold]{rates[name].hit_rate:.4f}[/bold]"
                    if rates[name].hit_rate == best
                    else f"{rates[name].hit_rate:.4f}"
                    for name in shown
                ),
                f"{rows[0].bound:.4f}",
            )
        yield table


def cost_table(costs: Sequence[Cost]) -> Table:
    """What the managers take."""
    table = _table(
        "CPU time in the KVCacheManager, µs: median (quartiles), and changed to it",
        "measure",
        "groups",
        "blocks",
        "setting",
        "µs",
        "ratio",
    )
    for cost in costs:
        for side, us in cost.us.items():
            low, high = cost.spread[side]
            ratio = "" if side == CHANGED else f"{cost.ratio[side]:.2f}"
            table.add_row(
                cost.measure,
                cost.groups,
                f"{cost.blocks:,}",
                side,
                f"{us:,.0f} ({low:,.0f}-{high:,.0f})",
                ratio,
            )
        table.add_section()
    return table


def queue_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What the queues take."""
    table = _table(
        "free block queue, CPU ns a block",
        "operation",
        "blocks",
        "at once",
        "stock",
        "changed",
        "ratio",
    )
    for row in rows:
        table.add_row(
            row["operation"],
            f"{row['blocks']:,}",
            f"{row['batch']:,}",
            f"{row['plain_ns']:.0f}",
            f"{row['segmented_ns']:.0f}",
            f"{row['ratio']:.2f}",
        )
    return table


def event_table(rows: Sequence[dict[str, Any]]) -> Table:
    """KV events."""
    names = ("events", "BlockStored", "BlockRemoved")
    table = _table(
        "KV events per 1,000 prompt tokens: events, and the blocks that they name",
        "workload",
        "groups",
        "blocks",
        "setting",
        "events",
        "stored",
        "removed",
    )
    for row in rows:
        table.add_row(
            row["workload"],
            row["groups"],
            f"{row['blocks']:,}",
            row["setting"],
            *(f"{row.get(name, 0):.1f}" for name in names),
        )
    return table


def ttft_table(rows: Sequence[Ttft]) -> Table:
    """Time to first token."""
    table = _table(
        "time to first token, s",
        "model",
        "variant",
        "users",
        "requests",
        "p50",
        "p99",
        "hit rate",
    )
    for row in rows:
        table.add_row(
            row.model,
            row.variant,
            str(row.users),
            str(row.requests),
            f"{row.p50:.2f}",
            f"{row.p99:.2f}",
            f"{row.hit_rate:.3f}",
        )
    return table


def scale_table(rows: Sequence[Scaled]) -> Table:
    """Scale."""
    table = _table(
        "scale, changed: µs of a step of 8,192 prompt tokens, by tenth of first visits",
        "what",
        "blocks",
        "2nd tenth",
        "5th",
        "last",
        "hit rate",
        "bound",
    )
    for row in rows:
        table.add_row(
            row.size.about,
            f"{row.size.blocks:,}",
            *(f"{row.us_per_step[tenth]:,.0f}" for tenth in (1, 4, -1)),
            f"{row.hit_rate:.4f}",
            f"{row.bound:.4f}",
        )
    return table
