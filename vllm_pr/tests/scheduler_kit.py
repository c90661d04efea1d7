# SPDX-License-Identifier: Apache-2.0
"""A real ``Scheduler`` and a worker whose memory says what every slot holds.

The scheduler, its KV cache manager and the scheduler's half of a KV connector are
vLLM's own. The worker stands for the hardware: it keeps block tables as a model runner
does, and in place of keys and values it writes, slot by slot, which prefix of which
tokens a slot belongs to. Before a step it reads all that attention would read. So a
block that was handed out twice, reused too early or filled from the wrong place is
found by what it holds, whoever is to blame.
"""

import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from proof_kit import check_pool, workload

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager
from vllm_pr.driver import DEFAULT, _spec, block_sizes, default_interval
from vllm_pr.engine.models import model_folder
from vllm_pr.scenarios import Geometry, token_ids

PROTECTED = 1 << 8  # above every level
PAGE = 1024  # bytes of a block, as far as connectors do sums with it


@lru_cache
def _config(max_model_len: int) -> VllmConfig:
    """The configuration of a tiny model; no file but its own is read."""
    return EngineArgs(
        model=str(model_folder("gemma3-tiny")),
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        enable_prefix_caching=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        dtype="float32",
    ).create_engine_config()


@dataclass(frozen=True)
class Setup:
    """What a scheduler is built with.

    Attributes:
        geometry: KV cache groups.
        blocks: size of the pool.
        interval: retention interval in tokens, None, or ``DEFAULT``.
        asynchronous: schedule a step while the one before is in flight.
        connector: keyword arguments of ``KVTransferConfig``, or None.
        chunked: whether a prompt may be prefilled in several steps.
        events: keyword arguments of ``KVEventsConfig``, or None.
        step_tokens: most tokens of a step.
        sequences: most requests that run at once.
    """

    geometry: Geometry
    blocks: int
    interval: int | None | str = DEFAULT
    asynchronous: bool = False
    connector: dict[str, Any] | None = field(default=None, hash=False)
    events: dict[str, Any] | None = field(default=None, hash=False)
    chunked: bool = True
    step_tokens: int = 128
    sequences: int = 6
    max_model_len: int = 4096


def make_scheduler(setup: Setup) -> Scheduler:
    """A real scheduler for the groups of a geometry."""
    from vllm.config import KVEventsConfig, KVTransferConfig

    base = _config(setup.max_model_len)
    block, hash_block = block_sizes(setup.geometry)
    interval = default_interval() if setup.interval == DEFAULT else setup.interval
    config = replace_config(
        base,
        scheduler_config=dict(
            max_num_batched_tokens=setup.step_tokens,
            max_num_scheduled_tokens=setup.step_tokens,
            max_num_seqs=setup.sequences,
            async_scheduling=setup.asynchronous,
            enable_chunked_prefill=setup.chunked,
            disable_hybrid_kv_cache_manager=len(setup.geometry.groups) == 1,
            watermark=0.0,
        ),
        cache_config=dict(
            block_size=block,
            num_gpu_blocks=setup.blocks,
            prefix_cache_retention_interval=interval,
            mamba_cache_mode="align",
        ),
    )
    config.kv_transfer_config = setup.connector and KVTransferConfig(**setup.connector)
    config.kv_events_config = setup.events and KVEventsConfig(**setup.events)
    register_all_kvcache_specs(config)
    kv_cache_utils.init_none_hash(sha256)
    kind = AsyncScheduler if setup.asynchronous else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=kv_cache_config(setup.geometry, setup.blocks, interval),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
        hash_block_size=hash_block,
        log_stats=True,
    )


def replace_config(base: VllmConfig, **parts: dict[str, Any]) -> VllmConfig:
    """A shallow copy of a configuration with some values set anew."""
    import copy

    config = copy.copy(base)
    for part, values in parts.items():
        section = copy.copy(getattr(base, part))
        for name, value in values.items():
            setattr(section, name, value)
        setattr(config, part, section)
    return config


def kv_cache_config(
    geometry: Geometry, blocks: int, interval: int | None
) -> interface.KVCacheConfig:
    names = [f"layer.{i}" for i in range(len(geometry.groups))]
    return interface.KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[
            interface.KVCacheTensor(
                size=blocks * PAGE,
                layers=[name],
                layer_stride=blocks * PAGE,
                block_stride=PAGE,
            )
            for name in names
        ],
        kv_cache_groups=[
            interface.KVCacheGroupSpec([name], _spec(group))
            for name, group in zip(names, geometry.groups, strict=True)
        ],
        prefix_cache_retention_interval=interval,
    )


class Row:
    """What the worker knows of a request."""

    def __init__(self, tokens: Sequence[int], tables: Iterable[Sequence[int]]) -> None:
        self.tables = [list(table) for table in tables]
        self.tokens: list[int] = []
        self.prefixes: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            before = self.prefixes[-1] if self.prefixes else 0
            self.tokens.append(token)
            self.prefixes.append(hash((before, token)))


def next_token(row: Row) -> int:
    """What the model samples: it depends on all that was before."""
    return row.prefixes[-1] % 100_000


class WrongContent(AssertionError):
    """A slot that a step reads does not hold what the request needs."""


class Worker:
    """Executes steps in order on a memory that knows what it holds."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.rows: dict[str, Row] = {}
        self.memory: dict[int, dict[tuple[int, int], int]] = {}
        self.counts: Counter = Counter()
        self.offload: Any = None

    def execute(self, step: Any) -> ModelRunnerOutput:
        """Run one step and sample a token where a prompt is complete."""
        for name in step.finished_req_ids:
            self.rows.pop(name, None)
        self.counts["preempted"] += len(step.preempted_req_ids or ())
        self._learn(step)
        for copy in step.kv_cache_block_copies or ():
            self.memory[copy.dst_block_id] = dict(self.memory[copy.src_block_id])
        connector_output = self.offload and self.offload.begin(step)
        names, sampled = list(step.num_scheduled_tokens), []
        starts = {
            new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs
        }
        cached = step.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        invalid = connector_output.invalid_block_ids if connector_output else set()
        for name in names:
            if self.touches(name, invalid):
                sampled.append([])  # what a failed load makes of it is not used
                continue
            sampled.append(
                self._forward(name, starts[name], step.num_scheduled_tokens[name])
            )
        if self.offload is not None:
            self.offload.end(step)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output or None,
        )

    def touches(self, name: str, blocks: set[int]) -> bool:
        """Whether a request has one of these blocks."""
        return any(not blocks.isdisjoint(table) for table in self.rows[name].tables)

    def _learn(self, step: Any) -> None:
        """Bring the block tables up to date."""
        for new in step.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.rows[new.req_id] = Row(tokens, new.block_ids)
        cached = step.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.rows[name] = Row(cached.all_token_ids[name], blocks)
            elif blocks is not None:
                for table, more in zip(self.rows[name].tables, blocks, strict=True):
                    table.extend(more)

    def _forward(self, name: str, start: int, count: int) -> list[int]:
        """Read what attention reads, write the new slots, sample at the end."""
        row = self.rows[name]
        end = start + count
        for index, group in enumerate(self.geometry.groups):
            if group.kind == "mamba":
                continue  # its states live at block boundaries, not in slots
            for position in range(self._oldest(group, start), start):
                self._expect(row, index, position, name)
            for position in range(start, end):
                block, slot = self._slot(row, index, position)
                self.memory.setdefault(block, {})
                held = self.memory[block]
                if held and next(iter(held))[0] != index:
                    held.clear()
                held[index, slot] = row.prefixes[position]
        self.counts["tokens"] += count
        if end < len(row.tokens):
            return []
        token = next_token(row)
        row.extend([token])
        return [token]

    def _oldest(self, group: Any, start: int) -> int:
        """First position that the next token's attention reads."""
        if group.kind in ("sliding", "sliding_mla"):
            return max(0, start - group.window + 1)
        if group.kind == "chunked_local":
            return start // group.window * group.window
        return 0

    def _slot(self, row: Row, index: int, position: int) -> tuple[int, int]:
        size = self.geometry.groups[index].block_size
        return row.tables[index][position // size], position % size

    def _expect(self, row: Row, index: int, position: int, name: str) -> None:
        block, slot = self._slot(row, index, position)
        held = self.memory.get(block, {}).get((index, slot))
        self.counts["slots read"] += 1
        if held != row.prefixes[position]:
            raise WrongContent(
                f"{name}: group {index}, position {position}: block {block} holds "
                f"{'nothing' if held is None else 'something else'}"
            )


class OffloadEngine:
    """The copies of `SimpleCPUOffloadConnector`, at the worst times allowed.

    A load writes as soon as its step is scheduled, ahead of steps still in flight. A
    store reads some steps later, just before it is reported, and must find what its
    blocks held when its step ended.
    """

    def __init__(self, worker: Worker, delay: int) -> None:
        self.worker = worker
        self.delay = delay
        self.host: dict[int, dict] = {}
        self.queue: deque[Copy] = deque()
        self.clock = 0
        self.counts: Counter = Counter()
        self.log: list[tuple] = []  # what was copied, in order

    def scheduled(self, step: Any) -> None:
        """Carry out the loads of a step that has just been scheduled."""
        meta = step.kv_connector_metadata
        for target, source in zip(meta.load_gpu_blocks, meta.load_cpu_blocks):
            self.worker.memory[target] = dict(self.host[source])
        self.counts["blocks loaded"] += len(meta.load_gpu_blocks)
        self.log += [
            (kind, *pair)
            for kind, *sides in (
                ("load", meta.load_gpu_blocks, meta.load_cpu_blocks),
                ("store", meta.store_gpu_blocks, meta.store_cpu_blocks),
            )
            for pair in zip(*sides, strict=True)
        ]

    def begin(self, step: Any) -> KVConnectorOutput | None:
        """Take up what a step wants copied; report what is due."""
        self.clock += 1
        meta, due = step.kv_connector_metadata, self.clock + self.delay
        if meta.load_event >= 0:
            requests = meta.load_event_to_reqs[meta.load_event]
            self.queue.append(Copy(due, meta.load_event, requests=requests))
        done = [copy for copy in self.queue if copy.due <= self.clock]
        if meta.need_flush:
            done = list(self.queue)
        if meta.store_event >= 0:
            pairs = list(zip(meta.store_gpu_blocks, meta.store_cpu_blocks, strict=True))
            self.queue.append(Copy(due, meta.store_event, pairs))
        return self._report(done)

    def end(self, step: Any) -> None:
        """Note what the blocks of a step's stores hold."""
        memory = self.worker.memory
        for copy in self.queue:
            if copy.held is None:
                copy.held = [dict(memory[source]) for source, _ in copy.pairs]

    def _report(self, done: list["Copy"]) -> KVConnectorOutput | None:
        received, stores = set(), {}
        for copy in done:
            self.queue.remove(copy)
            if copy.requests:
                received.update(copy.requests)
                continue
            stores[copy.event] = 1
            for (source, target), held in zip(copy.pairs, copy.held, strict=True):
                if self.worker.memory[source] != held:
                    raise WrongContent(f"block {source} was reused while being copied")
                self.host[target] = held
            self.counts["blocks stored"] += len(copy.pairs)
        if not received and not stores:
            return None
        return KVConnectorOutput(
            finished_recving=received or None,
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stores)
            if stores
            else None,
        )


@dataclass(eq=False)
class Copy:
    """A store or a load on its way.

    Attributes:
        due: when it is reported.
        event: its number.
        pairs: GPU and host block of each block stored.
        requests: those that wait for a load.
        held: what the blocks to store hold.
    """

    due: int
    event: int
    pairs: Sequence[tuple[int, int]] = ()
    requests: Sequence[str] = ()
    held: list[dict] | None = None


class Engine:
    """Scheduler and worker in the engine's loop, checked after every step.

    Args:
        setup: what to build.
        copy_steps: steps that a copy of the host offload takes.
    """

    def __init__(self, setup: Setup, copy_steps: int = 2) -> None:
        self.setup = setup
        self.copy_steps = copy_steps
        self.scheduler = make_scheduler(setup)
        self.worker = Worker(setup.geometry)
        if setup.connector is not None:
            self.worker.offload = OffloadEngine(self.worker, copy_steps)
        block, hash_block = block_sizes(setup.geometry)
        self.hasher = kv_cache_utils.get_request_block_hasher(hash_block, sha256)
        self.in_flight: deque = deque()
        self.counts: Counter = Counter()
        self.prompts: dict[str, Sequence[int]] = {}
        self.cached: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ids = itertools.count()
        self.after_update: Callable[[Engine], None] | None = None

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, prompt: Sequence[int], output: int) -> str:
        """Queue a request that samples ``output`` tokens."""
        name = f"request-{next(self.ids)}"
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        params.update_from_generation_config({}, None)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        self.prompts[name] = prompt
        self.outputs[name] = []
        self.scheduler.add_request(request)
        return name

    def step(self) -> None:
        """Schedule a step; execute the oldest one in flight when it is due."""
        step = self.scheduler.schedule()
        self.in_flight.append(step)
        self.counts["steps"] += 1
        if self.worker.offload is not None:
            self.worker.offload.scheduled(step)
        for new in step.scheduled_new_reqs:
            self.cached.setdefault(new.req_id, new.num_computed_tokens)
        if len(self.in_flight) > self.setup.asynchronous:
            self.settle_one()
        self.check()

    def settle_one(self) -> None:
        step = self.in_flight.popleft()
        result = self.worker.execute(step)
        for outputs in self.scheduler.update_from_output(step, result).values():
            for output in outputs.outputs:
                self.outputs[output.request_id] += output.new_token_ids
        if self.after_update is not None:
            self.after_update(self)

    def settle(self) -> None:
        """Execute all steps in flight."""
        while self.in_flight:
            self.settle_one()

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.counts["aborted"] += 1
        self.counts["deferred frees"] += bool(self.scheduler.deferred_frees)

    def reset(self, running: bool) -> bool:
        """``reset_prefix_cache``, with or without the requests that run."""
        try:
            done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        except RuntimeError:
            # Requests are preempted, but copies or steps in flight hold blocks.
            assert running and (self.worker.offload or self.scheduler.deferred_frees)
            done = False
        self.counts[f"reset {'with' if running else 'without'} running: {done}"] += 1
        return done

    def evict(self, blocks: set[int]) -> None:
        """What a failed load does: no hash of these blocks may be hit again."""
        self.scheduler.kv_cache_manager.evict_blocks(blocks)
        for block in blocks:
            assert self.pool.blocks[block].block_hash is None
        self.counts["evicted"] += len(blocks)

    def check(self) -> None:
        """No block leaked, none free and held at once, all free ones in order."""
        check_pool(self.pool)
        queue = self.pool.free_block_queue
        if levels := getattr(queue, "_levels", None):
            free = queue.get_all_free_blocks()
            classes = [
                0 if block.block_hash is None else levels[block.block_id] or PROTECTED
                for block in free
            ]
            assert classes == sorted(classes), "a block that is missed goes too early"
        held = self.holders()
        for block in self.pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == held[block.block_id], block

    def holders(self) -> Counter:
        """How often each block is held, by whoever may hold one."""
        manager, held = self.scheduler.kv_cache_manager, Counter()
        tables = [one.req_to_blocks for one in manager.coordinator.single_type_managers]
        for blocks in (blocks for table in tables for blocks in table.values()):
            held.update(block.block_id for block in blocks)
        for _, blocks in self.scheduler.deferred_frees:
            held.update(block.block_id for block in blocks)
        for step in self.in_flight:
            for copy in step.kv_cache_block_copies or ():
                held.update([copy.src_block_id, copy.dst_block_id])
        offload = getattr(self.scheduler.connector, "scheduler_manager", None)
        if offload is not None:
            transfers = [
                *offload._store_event_to_blocks.values(),
                *offload._abandoned_store_event_to_blocks.values(),
                *offload._pending_finished_stores,
                *(load.transfer_meta for load in offload._reqs_to_load.values()),
                *(load.transfer_meta
                  for load in offload._abandoned_reqs_to_load.values()),
            ]  # fmt: skip
            for transfer in transfers:
                held.update(transfer.gpu_block_ids)
        return held

    def drain(self) -> None:
        """Run until nothing is left; then every block must be free."""
        for _ in range(10_000):
            if not self.scheduler.has_requests():
                break
            self.step()
        assert not self.scheduler.requests, "a request does not end"
        for _ in range(1_000):  # a lazy offload goes on copying
            if self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1:
                break
            self.step()
        self.settle()
        self.check()
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        for name, prompt in self.prompts.items():
            row = Row(prompt, ())
            for token in self.outputs[name]:
                assert token == next_token(row), f"{name} got a wrong token"
                row.extend([token])


def run_random(
    engine: Engine,
    seed: int,
    requests: int,
    aborts: float = 0.02,
    resets: float = 0.01,
    evictions: float = 0.0,
) -> None:
    """Requests of random sessions at random times, aborts and resets in between.

    Args:
        engine: where they run.
        seed: of everything random.
        requests: number of requests.
        aborts: chance of an abort in a step.
        resets: chance of a ``reset_prefix_cache`` in a step.
        evictions: chance that some blocks, free or in use, are evicted in a step.
    """
    rng = random.Random(f"arrivals {seed}")
    unit = block_sizes(engine.setup.geometry)[0]
    coming = deque(
        (token_ids(*prompt), step.output)
        for step in workload(seed, requests, unit)
        for prompt in step.prompts
    )
    while coming or engine.scheduler.has_requests():
        while coming and rng.random() < 0.3:
            engine.add(*coming.popleft())
        if rng.random() < aborts and engine.scheduler.requests:
            name = rng.choice(sorted(engine.scheduler.requests))
            request = engine.scheduler.requests[name]
            if not request.is_finished():
                kind = "mid-prefill" if request.is_prefill_chunk else "other"
                engine.counts[f"aborted {kind}"] += 1
                engine.abort(name)
        if rng.random() < resets:
            engine.reset(running=rng.random() < 0.5)
        if rng.random() < evictions:
            engine.evict(set(rng.sample(range(1, engine.pool.num_gpu_blocks), 5)))
        engine.step()
    engine.drain()


def pool_blocks(geometry: Geometry, units: int) -> int:
    block = math.lcm(*(group.block_size for group in geometry.groups))
    return units * sum(block // group.block_size for group in geometry.groups)
