# SPDX-License-Identifier: Apache-2.0
"""Random multi-session workloads on a real ``KVCacheManager``, stock beside changed.

A workload is made from its seed alone and served by ``vllm_pr.driver``. What a side
found in the cache, and which blocks it handed out, is compared request by request.
``python vllm_pr/tests/proof_kit.py`` is the worker: cases as JSON on standard input,
one JSON line a case on standard output, with the vLLM that is first on the path.
"""

import hashlib
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from vllm_pr.scenarios import DEEPSEEK_V4_FLASH, Geometry, Group, Text, token_ids

GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("full", (Group("full", 16),)),
        Geometry("sliding", (Group("sliding", 16, 96),)),
        Geometry("chunked", (Group("chunked_local", 16, 64),)),
        Geometry("full+sliding", (Group("full", 32), Group("sliding", 16, 128))),
        Geometry("full+chunked", (Group("full", 16), Group("chunked_local", 16, 64))),
        Geometry("full+mamba", (Group("full", 16), Group("mamba", 16))),
        Geometry("windows", (Group("sliding", 16, 48), Group("sliding_mla", 8, 32))),
        Geometry(
            "full+mamba+sliding",
            (Group("full", 32), Group("mamba", 32), Group("sliding", 32, 64)),
        ),
        Geometry(
            "mla+windows",
            (
                Group("mla", 64),
                Group("sliding_mla", 16, 32),
                Group("sliding_mla", 4, 8),
                Group("full", 32),
            ),
        ),
        Geometry("gemma-small", (Group("full", 32), *[Group("sliding", 16, 256)] * 4)),
        DEEPSEEK_V4_FLASH,
    )
}
CROSS = Geometry("full+cross", (Group("full", 16), Group("cross", 16)))
# Two pools: the host's and, beside it, the GPU's with a window of 64 tokens.
HISPARSE = Geometry("hisparse", (Group("full", 16), Group("sliding", 16, 64)))


@dataclass(frozen=True)
class Case:
    """One workload on one pool.

    Attributes:
        geometry: name of the geometry.
        blocks: size of the pool, null block included.
        interval: retention interval in tokens, or None.
        eagle: whether a drafter runs.
        caching: whether prefix caching is on.
        seed: of the workload.
        requests: number of requests.
        moves: "all", or "switch": sessions that only come back as they were, one
            request at a time, so that nothing but replay boundaries is reused.
        fault: name of a deliberate fault in the changed side, or None.
    """

    geometry: str
    blocks: int
    interval: int | None
    eagle: bool = False
    caching: bool = True
    seed: int = 0
    requests: int = 100
    moves: str = "all"
    fault: str | None = None


@dataclass(frozen=True)
class Step:
    """One request, or several at once.

    Attributes:
        what: the move that led to it.
        prompts: pieces of each prompt.
        output: tokens that each samples.
        abort_after: scheduler steps after which the first is aborted, or None.
    """

    what: str
    prompts: tuple[tuple[Text, ...], ...]
    output: int
    abort_after: int | None = None


MOVES = {
    "all": {"new": 3, "turn": 5, "resend": 3, "edit": 2, "branch": 3, "one-off": 2},
    "switch": {"new": 2, "resend": 6, "one-off": 2},
}


def workload(seed: int, requests: int, unit: int, moves: str = "all") -> Iterator[Step]:
    """Sessions that grow, return, branch, are edited, share a prompt and interfere.

    Args:
        seed: of the random choices.
        requests: number of requests.
        unit: tokens of one hit boundary; lengths are random multiples of it, and
            some tokens more or less.
        moves: as in `Case`.
    """
    odds, switch = MOVES[moves], moves == "switch"
    rng = random.Random(seed)
    sessions: list[tuple[Text, ...]] = []
    systems = [Text(f"{seed} system {i}", unit * (3 + 5 * i)) for i in range(2)]

    def some(units: float, key: str) -> Text:
        tokens = max(1, int(unit * units * rng.uniform(0.2, 1.8)) + rng.randint(-2, 2))
        return Text(f"{seed} {key}", tokens)

    served = 0
    while served < requests:
        key = f"{served}"
        what = rng.choices(list(odds), list(odds.values()))[0]
        if not sessions or (what == "new" and len(sessions) < 6):
            what = "new"
            head = [rng.choice(systems)] if not switch and rng.random() < 0.7 else []
            sessions.append((*head, some(4, f"opening {key}")))
            chosen = len(sessions) - 1
        else:
            chosen = rng.randrange(len(sessions))
        prompt = sessions[chosen]
        if what == "turn":
            prompt = (*prompt, some(1.5, f"user {key}"))
        elif what == "edit":
            prompt = (*cut(prompt, rng.randint(1, unit)), some(0.1, f"edit {key}"))
        elif what == "branch":
            length = sum(piece.tokens for piece in prompt)
            kept = cut(prompt, int(length * rng.uniform(0.2, 0.8)))
            prompt = (*kept, some(3, f"branch {key}"))
        elif what == "one-off":
            prompt = (some(14, f"document {key}"),)
        prompts = [prompt]
        if not switch and rng.random() < 0.25:
            prompts.append(sessions[rng.randrange(len(sessions))])
        output = 1 if switch else rng.choice([1, 1, 4, unit // 2 + 3])
        abort = rng.randint(1, 3) if not switch and rng.random() < 0.08 else None
        yield Step(what, tuple(prompts), output, abort)
        if what in ("turn", "edit", "branch"):
            answer = Text(f"answer to {prompt[-1].key}", output)
            grown = (*prompt, answer) if rng.random() < 0.7 else prompt
            if sum(piece.tokens for piece in grown) < 60 * unit:
                sessions[chosen] = grown
        served += len(prompts)


def cut(prompt: Sequence[Text], tokens: int) -> tuple[Text, ...]:
    """A prompt without its last tokens; at least one stays."""
    kept = max(1, sum(piece.tokens for piece in prompt) - tokens)
    pieces = []
    for piece in prompt:
        pieces.append(Text(piece.key, min(kept, piece.tokens), piece.start))
        kept -= pieces[-1].tokens
        if not kept:
            break
    return tuple(pieces)


@dataclass
class Found:
    """What one request got.

    Attributes:
        what: the move, as in `Step`.
        prompt: prompt tokens.
        cached: prompt tokens served from the cache.
        needs: names of the cached blocks without which the hit would be shorter.
        changes: what happened to the hash map since the request before began:
            "cached", "evicted", "evicted on probation" or "not cached on probation",
            and a name.
        blocks: digest of the IDs of all blocks that the request was handed.
    """

    what: str
    prompt: int
    cached: int
    needs: list[str]
    changes: list[tuple[str, str]]
    blocks: str = ""


class Serving:
    """A case's pool, and the requests that run on it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.cache = make_driver(case)
        self.found: list[Found] = []
        self.changes: list[tuple[str, str]] = []
        for pool in pools_of(self.cache):
            self._watch_hash_map(pool)

    def run(self) -> list[Found]:
        """Serve the whole workload; the pool is checked after every step of it."""
        from vllm_pr.driver import block_sizes

        unit = block_sizes(self.cache.geometry)[0]
        steps = workload(self.case.seed, self.case.requests, unit, self.case.moves)
        with self._watch_skipped():
            for step in steps:
                running = [self._serve(step, i) for i in range(len(step.prompts))]
                while running:
                    running = [one for one in running if next(one, None) is not None]
                check_pools(self.cache)
        if hasattr(self.cache, "settle"):
            self.cache.settle()
        assert not any(map(used_blocks, pools_of(self.cache)))
        return self.found

    def _serve(self, step: Step, index: int) -> Iterator[int]:
        """Serve one request of a step, a scheduler step at a time."""
        from vllm_pr.driver import OutOfBlocks

        cache, prompt = self.cache, step.prompts[index]
        request = cache.request(token_ids(*prompt))
        blocks, cached = cache.manager.get_computed_blocks(request)[:2]
        needs = self._needs(request, blocks.blocks, cached)
        found = Found(step.what, request.num_prompt_tokens, cached, needs, self.changes)
        self.changes = []
        self.found.append(found)
        answer = token_ids(Text(f"answer to {prompt[-1].key}", step.output))
        steps = cache.steps(request, answer)
        handed_out = hashlib.sha256()
        try:
            for taken, scheduled in enumerate(steps):
                ids = cache.manager.get_block_ids(request.request_id)
                handed_out.update(repr(ids).encode())
                if index == 0 and taken == step.abort_after:
                    return
                yield scheduled
        except OutOfBlocks:
            pass
        finally:
            steps.close()
            found.blocks = handed_out.hexdigest()[:16]

    def _needs(self, request, blocks, cached: int) -> list[str]:
        """The blocks of a hit, and those past its end that EAGLE matches and drops."""
        from vllm.v1.core import kv_cache_utils

        keys = [
            block.block_hash for group in blocks for block in group if not block.is_null
        ]
        managers = self.cache.manager.coordinator.single_type_managers
        for group, manager in enumerate(managers if cached else ()):
            if not manager.use_eagle:
                continue
            pool, size = manager.block_pool, manager.block_size
            hashes = kv_cache_utils.resolve_block_hashes(
                request.block_hashes, pool.hash_block_size, size
            )
            end = min((cached + manager.scheduler_block_size) // size, len(hashes))
            for past in range(cached // size, end):
                if found := pool.get_cached_block(hashes[past], [group]):
                    keys.append(found[0].block_hash)
        return [name(key) for key in keys]

    def _watch_hash_map(self, pool) -> None:
        hash_map = pool.cached_block_hash_to_block
        insert, pop = hash_map.insert, hash_map.pop
        no_levels = bytes(len(pool.blocks))

        def watched_insert(key, block) -> None:
            self.changes.append(("cached", name(key)))
            insert(key, block)

        def watched_pop(key, block_id):
            levels = getattr(pool.free_block_queue, "_levels", no_levels)
            probation = levels[block_id]
            block = pop(key, block_id)
            if block is not None:
                how = "evicted on probation" if probation else "evicted"
                self.changes.append((how, name(key)))
            return block

        hash_map.insert, hash_map.pop = watched_insert, watched_pop

    @contextmanager
    def _watch_skipped(self) -> Iterator[None]:
        """Note the checkpoints that are not cached, as they would go at once."""
        from vllm.v1.core import kv_cache_utils, single_type_kv_cache_manager

        mark = getattr(single_type_kv_cache_manager, "put_on_probation", None)
        if mark is None:  # stock
            yield
            return

        def watched(manager, request, start, end, boundaries, mask):
            before = [True] * (end - start) if mask is None else list(mask)
            after = mark(manager, request, start, end, boundaries, mask)
            hashes = kv_cache_utils.resolve_block_hashes(
                request.block_hashes,
                manager.block_pool.hash_block_size,
                manager.block_size,
            )
            for i, (wanted, kept) in enumerate(zip(before, after or before)):
                if wanted and not kept:
                    key = kv_cache_utils.make_block_hash_with_group_id(
                        hashes[start + i], manager.kv_cache_group_id
                    )
                    self.changes.append(("not cached on probation", name(key)))
            return after

        single_type_kv_cache_manager.put_on_probation = watched
        try:
            yield
        finally:
            single_type_kv_cache_manager.put_on_probation = mark


def name(key: bytes) -> str:
    """A short name of a block hash with its group, the same on both sides."""
    return hashlib.sha256(key).hexdigest()[:12]


def make_driver(case: Case):
    """The driver of a case's pool, on the vLLM that this process imports."""
    from vllm.utils.hashing import sha256
    from vllm_pr.driver import Driver, block_sizes

    geometry = all_geometries()[case.geometry]
    kind = _hisparse_driver() if geometry is HISPARSE else Driver
    mamba = any(group.kind == "mamba" for group in geometry.groups)
    return kind(
        geometry,
        case.blocks,
        case.interval,
        case.eagle,
        # A state is only kept where a step ends: at every block boundary, then.
        chunk_tokens=(1 if mamba else 8) * block_sizes(geometry)[0],
        hash_function=sha256,  # the same on both sides
        enable_caching=case.caching,
    )


def all_geometries() -> dict[str, Geometry]:
    return GEOMETRIES | {CROSS.name: CROSS, HISPARSE.name: HISPARSE}


def _hisparse_driver():
    """A driver of the two pools of HiSparse; host copies take one step to complete."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.hisparse.coordinator import get_hisparse_coordinator
    from vllm_pr import driver

    roles = interface.KVCacheGroupRole

    class HiSparseDriver(driver.Driver):
        def _manager(self, blocks, **keywords):
            source, sliding = map(driver._spec, self.geometry.groups)
            page = {"block_size": source.block_size, "page_size": 64}
            resident = interface.HiSparseResidentSpec(**page)
            hot = interface.HiSparseHotSpec(**page, blocks_per_request=2)
            group = interface.KVCacheGroupSpec
            config = interface.KVCacheConfig(
                num_blocks=blocks,
                hisparse_host_num_blocks=2 * blocks,
                kv_cache_tensors=[],
                prefix_cache_retention_interval=self.interval,
                kv_cache_groups=[
                    group(["source"], source, role=roles.HISPARSE_SOURCE,
                          host_resident=True),
                    group(["indexer"], source, role=roles.HISPARSE_INDEXER),
                    group(["sliding"], sliding),
                    group(["resident"], resident),
                    group(["hot"], hot, enable_kv_transfer=False),
                ],
            )  # fmt: skip
            keywords |= {
                "kv_cache_config": config,
                "max_model_len": 4096,
                "max_in_flight_tokens": self.chunk_tokens,
            }
            manager = KVCacheManager(**driver.accepted(KVCacheManager, **keywords))
            get_hisparse_coordinator(manager)  # makes the host's pool
            return manager

        def _allocate(self, request, tokens, **keywords):
            coordinator = get_hisparse_coordinator(self.manager)
            super()._allocate(request, tokens, **keywords)
            computed = request.num_computed_tokens
            computed += keywords.get("num_new_computed_tokens", 0)
            total = min(computed + tokens, request.num_tokens)
            coordinator.advance_scheduled([(request.request_id, total)])
            coordinator.build_offload_command()

        def steps(self, request, output=(), served=None):
            for scheduled in super().steps(request, output, served):
                yield scheduled
                self.settle()

        def settle(self):
            """Complete what is being copied to the host: it takes one step."""
            coordinator = get_hisparse_coordinator(self.manager)
            done = {spill: 1 for spill in coordinator.pending_spills}
            coordinator.update_spills(done, done)

    return HiSparseDriver


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Break the changed side in one way; stock has nothing to break."""
    if (
        fault is None
        or importlib.util.find_spec("vllm.v1.core.free_block_queue") is None
    ):
        yield
        return
    from vllm.v1.core import free_block_queue, single_type_kv_cache_manager
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    queue = free_block_queue.SegmentedFreeBlockQueue
    mark = free_block_queue.put_on_probation

    def mark_all(manager, request, start, end, boundaries, mask):
        blocks = [
            block
            for i, block in enumerate(
                manager.req_to_blocks[request.request_id][start:end]
            )
            if mask is None or mask[i]
        ]
        manager.block_pool.free_block_queue.mark_probationary(blocks, [1] * len(blocks))
        return mask

    def mark_always(manager, request, start, end, boundaries, mask):
        return mark(manager, request, start, end, (), mask)

    targets = {
        "one LRU list": (queue, "append_n", FreeKVCacheBlockQueue.append_n),
        "everything on probation": (
            single_type_kv_cache_manager, "put_on_probation", mark_all),
        "replay boundary on probation": (
            single_type_kv_cache_manager, "put_on_probation", mark_always),
        "probation is evicted last": (
            queue, "append_n", lambda self, blocks: self.prepend_n(blocks)),
    }  # fmt: skip
    owner, attribute, broken = targets[fault]
    original = getattr(owner, attribute)
    setattr(owner, attribute, broken)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def pools_of(cache) -> list:
    """The block pools of a driver's manager, each once."""
    managers = cache.manager.coordinator.single_type_managers
    return list(dict.fromkeys(manager.block_pool for manager in managers))


def used_blocks(pool) -> int:
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def check_pools(cache) -> None:
    """Every block is free exactly once or referenced, the links agree."""
    for pool in pools_of(cache):
        check_pool(pool)


def check_pool(pool) -> None:
    queue = pool.free_block_queue
    # A broken chain may have no end.
    free = list(islice(queue.iter_blocks_after(None), pool.num_gpu_blocks))
    assert len({block.block_id for block in free}) == len(free)
    assert len(free) == queue.num_free_blocks
    assert all(block.ref_cnt == 0 for block in free)
    previous = queue.fake_free_list_head
    for block in [*free, queue.fake_free_list_tail]:
        assert block.prev_free_block is previous
        previous = block
    held = sum(block.ref_cnt > 0 for block in pool.blocks if not block.is_null)
    assert held + len(free) == pool.num_gpu_blocks - 1


def run_sides(cases: Iterable[Case]) -> dict[str, list[list[Found]]]:
    """Serve the same cases on stock and on changed, a process each, side by side.

    Returns:
        By side ("stock", "changed"), for each case what each request found.

    Raises:
        RuntimeError: a worker failed; the message has the end of its output.
    """
    from vllm_pr.patching.trees import changed_tree

    text = json.dumps([asdict(case) for case in cases])
    sides = {"stock": "", "changed": str(changed_tree())}
    workers = {side: _worker(path) for side, path in sides.items()}
    for worker in workers.values():
        worker.stdin.write(text)
        worker.stdin.close()
    results = {}
    for side, worker in workers.items():
        lines = worker.stdout.read().splitlines()
        if worker.wait():
            said = [line for line in lines if not line.startswith("[")]
            raise RuntimeError(f"{side} failed:\n" + "\n".join(said[-30:]))
        answers = [json.loads(line) for line in lines if line.startswith("[")]
        results[side] = [[Found(**row) for row in rows] for rows in answers]
    return results


def _worker(path: str) -> subprocess.Popen:
    root = str(Path(__file__).resolve().parents[2])
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [path, root])))
    env |= {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        [sys.executable, __file__],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def drafters(geometry: Geometry) -> tuple[bool, ...]:
    """With and without EAGLE; the releases refuse it beside chunked local layers."""
    kinds = {group.kind for group in geometry.groups}
    return (False,) if "chunked_local" in kinds else (False, True)


def pool_size(geometry: Geometry, units: int) -> int:
    """Blocks of a pool with room for ``units`` hit boundaries in every group."""
    unit = math.lcm(*(group.block_size for group in geometry.groups))
    return units * sum(unit // group.block_size for group in geometry.groups)


def main() -> None:
    for case in json.load(sys.stdin):
        with planted(case["fault"]):
            rows = Serving(Case(**case)).run()
        print(json.dumps([asdict(row) for row in rows]), flush=True)


if __name__ == "__main__":
    main()
