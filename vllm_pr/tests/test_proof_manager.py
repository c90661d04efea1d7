# SPDX-License-Identifier: Apache-2.0
"""What every request finds in the cache, stock beside changed, and why it differs.

Random multi-session workloads with fixed seeds on real managers with one to five
groups of every kind. What must hold:

* With an explicit interval (0 or N), with caching off, and without a sliding window,
  changed hands out the very blocks that stock does.
* With interval None and a pool that never fills, every hit is as long as stock's.
* With interval None, sessions that only come back as they were find exactly what they
  find with stock's default (interval 0), however full the pool.
* With interval None and a pool that fills, any hit is no shorter than stock's default
  finds, and shorter than stock's None finds only by checkpoints that were still on
  probation, evicted or not even cached: up to the first request on which the sides
  differ, after which they hold different blocks and are not comparable one by one.
"""

from collections import Counter
from dataclasses import replace

import pytest
from proof_kit import (
    CROSS,
    GEOMETRIES,
    HISPARSE,
    Case,
    Found,
    all_geometries,
    drafters,
    pool_size,
    run_sides,
)

from vllm_pr.driver import block_sizes
from vllm_pr.scenarios import DEEPSEEK_V4_FLASH

# Hit boundaries that fit; a prompt has about ten.
FULL, TIGHT, AMPLE = 45, 90, 2000
# Where a prompt's blocks outside of its windows are few, fewer.
FULL_OF = {DEEPSEEK_V4_FLASH.name: 15, "mla+windows": 15}
TIGHT_OF = {DEEPSEEK_V4_FLASH.name: 30, "mla+windows": 30}
SEEDS = (1, 2)
FEWER = {DEEPSEEK_V4_FLASH.name: 30}  # requests: a prompt takes 1,300 blocks
CACHED = sorted({**GEOMETRIES, HISPARSE.name: HISPARSE})


def having(kind: str) -> set[str]:
    """Names of the geometries with a group of this kind."""
    return {
        name
        for name in CACHED
        if any(kind in group.kind for group in all_geometries()[name].groups)
    }


SPARSE = sorted(having("sliding"))
# With interval None, Mamba keeps all its states and changed treats them as stock does;
# its default stays 0, so the comparison with the default is not for it.
SPECULATIVE = sorted(having("sliding") - having("mamba"))


def case(geometry: str, units: int, interval: int | None, **more: object) -> Case:
    """A case of a geometry; ``interval`` is in hit boundaries."""
    shape = all_geometries()[geometry]
    tokens = interval and interval * block_sizes(shape)[0]
    more.setdefault("requests", FEWER.get(geometry, 80))
    return Case(geometry, pool_size(shape, units), tokens, **more)


def tight_of(geometry: str) -> int:
    return TIGHT_OF.get(geometry, TIGHT)


def cases() -> list[Case]:
    found = []
    for name in CACHED:
        for eagle in drafters(all_geometries()[name]):
            for seed in SEEDS:
                tight = case(name, tight_of(name), None, eagle=eagle, seed=seed)
                found += [tight, replace(tight, interval=0)]
            if name in having("sliding") | having("mamba"):
                found.append(case(name, tight_of(name), 4, eagle=eagle, seed=SEEDS[0]))
            found.append(case(name, AMPLE, None, eagle=eagle, seed=SEEDS[0]))
            if name in SPARSE:
                found += switches(name, eagle)
    for name in (*CACHED, CROSS.name):
        off = case(name, TIGHT, 0, seed=SEEDS[0], caching=False)
        found.append(replace(off, requests=off.requests // 2))
    return found


def switches(geometry: str, eagle: bool) -> tuple[Case, Case]:
    """Sessions that only come back: interval None, and stock's default."""
    units = FULL_OF.get(geometry, FULL)
    none = case(geometry, units, None, eagle=eagle, seed=8, moves="switch")
    return none, replace(none, interval=0)


@pytest.fixture(scope="module")
def results(figure) -> dict[Case, tuple[list[Found], list[Found]]]:
    """By case, what each request found on stock and on changed."""
    both = run_sides(cases())
    pairs = zip(both["stock"], both["changed"], strict=True)
    table = dict(zip(cases(), pairs, strict=True))
    figure("workloads compared", len(table))
    figure("requests compared", sum(len(stock) for stock, _ in table.values()))
    return table


def chosen(results, **wanted: object) -> list[tuple[Case, list[Found], list[Found]]]:
    """The results whose case has these values; at least one."""
    rows = [
        (case, *sides)
        for case, sides in results.items()
        if all(getattr(case, key) == value for key, value in wanted.items())
    ]
    assert rows
    return rows


def cached_tokens(found: list[Found]) -> list[int]:
    return [row.cached for row in found]


def same_blocks(stock: list[Found], changed: list[Found]) -> bool:
    """Whether each request found the same and was handed the same blocks."""
    return [(row.cached, row.blocks) for row in stock] == [
        (row.cached, row.blocks) for row in changed
    ]


def first_difference(one: list[Found], other: list[Found]) -> int | None:
    pairs = zip(cached_tokens(one), cached_tokens(other), strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


CHANGE = {"cached": 1, "evicted": -1, "evicted on probation": -1}


def losses(stock: list[Found], changed: list[Found], request: int) -> Counter:
    """How changed lost what stock's hit of a request needs and changed has not."""
    copies, last = Counter(), {}
    for row in changed[: request + 1]:
        for how, block in row.changes:
            copies[block] += CHANGE.get(how, 0)
            last[block] = how
    needed = stock[request].needs
    return Counter(last.get(b, "never cached") for b in needed if copies[b] < 1)


def unexplained(stock: list[Found], changed: list[Found]) -> str | None:
    """A hit below stock's None that no loss of checkpoints on probation explains."""
    request = first_difference(stock, changed)
    if request is None or changed[request].cached > stock[request].cached:
        return None
    lost = losses(stock, changed, request)
    if lost and set(lost) <= {"evicted on probation", "not cached on probation"}:
        return None
    return f"request {request}, {stock[request]}: {dict(lost)}"


def below_default(default: list[Found], changed: list[Found]) -> str | None:
    """The first request on which changed differs from stock's default, if lower."""
    request = first_difference(default, changed)
    if request is None or changed[request].cached > default[request].cached:
        return None
    return f"request {request}: {changed[request].cached}, {default[request]}"


@pytest.mark.parametrize("geometry", CACHED)
def test_explicit_interval_hands_out_the_same_blocks(results, geometry):
    rows = chosen(results, geometry=geometry, caching=True)
    explicit = [row for row in rows if row[0].interval is not None]
    assert explicit
    for case, stock, changed in explicit:
        assert same_blocks(stock, changed), case
        assert sum(cached_tokens(stock)), case


@pytest.mark.parametrize("geometry", [*CACHED, CROSS.name])
def test_caching_off_hands_out_the_same_blocks(results, geometry):
    for case, stock, changed in chosen(results, geometry=geometry, caching=False):
        assert same_blocks(stock, changed), case
        assert not sum(cached_tokens(changed)), case


@pytest.mark.parametrize("geometry", sorted(set(CACHED) - set(SPARSE)))
def test_without_a_sliding_window_nothing_changes(results, geometry):
    for case, stock, changed in chosen(results, geometry=geometry):
        assert same_blocks(stock, changed), case


@pytest.mark.parametrize("geometry", SPARSE)
def test_ample_pool_finds_what_stock_finds(results, geometry):
    blocks = pool_size(all_geometries()[geometry], AMPLE)
    for case, stock, changed in chosen(results, geometry=geometry, blocks=blocks):
        assert cached_tokens(stock) == cached_tokens(changed), case


@pytest.mark.parametrize("geometry", SPECULATIVE)
def test_sessions_come_back_as_with_the_default(results, geometry):
    for eagle in drafters(all_geometries()[geometry]):
        none, default = switches(geometry, eagle)
        assert not worse_switch(results[default][0], results[none][1]), none


def test_sessions_do_not_come_back_to_stock_with_dense_checkpoints(results):
    """The pools above are so full that the test can fail: stock's None does."""
    pairs = [switches(name, eagle) for name in SPECULATIVE for eagle in (False, True)]
    lost = [
        worse_switch(results[default][0], results[none][0]) for none, default in pairs
    ]
    assert sum(lost) > len(lost) / 2


def test_mamba_with_dense_states_is_not_below_stock(results):
    for name in sorted(having("sliding") & having("mamba")):
        for eagle in (False, True):
            stock, changed = map(cached_tokens, results[switches(name, eagle)[0]])
            assert sum(changed) >= sum(stock) > 0


def worse_switch(default: list[Found], changed: list[Found]) -> bool:
    """Whether sessions that only come back find other than stock's default finds."""
    assert sum(cached_tokens(default))
    return cached_tokens(default) != cached_tokens(changed)


def tight_pools(results, geometry: str) -> list[tuple[Case, list, list, list]]:
    """Cases with interval None: stock, stock with interval 0, and changed."""
    blocks = pool_size(all_geometries()[geometry], tight_of(geometry))
    rows = chosen(results, geometry=geometry, blocks=blocks, interval=None, moves="all")
    return [
        (case, stock, results[replace(case, interval=0)][0], changed)
        for case, stock, changed in rows
    ]


@pytest.mark.parametrize("geometry", SPECULATIVE)
def test_full_pool_is_not_below_the_default(results, geometry):
    rows = tight_pools(results, geometry)
    for case, _, default, changed in rows:
        assert below_default(default, changed) is None, case
    total = sum(sum(cached_tokens(changed)) for *_, changed in rows)
    assert total >= sum(sum(cached_tokens(default)) for _, _, default, _ in rows)


@pytest.mark.parametrize("geometry", SPARSE)
def test_full_pool_loses_only_checkpoints_on_probation(results, geometry):
    for case, stock, _, changed in tight_pools(results, geometry):
        assert unexplained(stock, changed) is None, case


def shares(rows) -> dict[str, float]:
    """Shares of the prompt tokens served from the cache, by side."""
    prompt = sum(found.prompt for _, stock, *_ in rows for found in stock)
    sides = ("stock, interval None", "stock, default", "changed")
    return {
        side: round(sum(sum(cached_tokens(row[i])) for row in rows) / prompt, 3)
        for i, side in enumerate(sides, start=1)
    }


def test_sums_over_all_workloads(results, figure):
    """The figures for the docs."""
    rows = {name: tight_pools(results, name) for name in SPARSE}
    for name in SPARSE:
        figure(f"served from full pools, {name}", shares(rows[name]))
    rows = [row for name in SPECULATIVE for row in rows[name]]
    figure("served from full pools, all but Mamba", shares(rows))
    pairs = [pair for _, stock, _, changed in rows for pair in zip(stock, changed)]
    for word, sign in (("lower", 1), ("higher", -1)):
        count = sum(sign * (a.cached - b.cached) > 0 for a, b in pairs)
        figure(f"requests on full pools {word} than stock, interval None", count)
    figure("requests on full pools", len(pairs))
    switched = [
        (none, results[none][0], results[default][0], results[none][1])
        for name in SPECULATIVE
        for none, default in (switches(name, eagle) for eagle in (False, True))
    ]
    figure("served to sessions that come back, all but Mamba", shares(switched))


FAULTS = (
    "one LRU list",
    "everything on probation",
    "replay boundary on probation",
    "probation is evicted last",
)


@pytest.fixture(scope="module")
def faulty_switches():
    """Sessions that only come back: stock's default, changed, and faulty ones."""
    none, default = switches("full+sliding", False)
    faulty = [replace(none, fault=fault) for fault in FAULTS]
    both = run_sides([default, none, *faulty])
    return both["stock"][0], both["changed"][1], dict(zip(FAULTS, both["changed"][2:]))


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(faulty_switches, fault):
    default, changed, faulty = faulty_switches
    assert not worse_switch(default, changed)
    assert worse_switch(default, faulty[fault])
