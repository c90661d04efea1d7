# SPDX-License-Identifier: Apache-2.0
"""With a KV connector: what is loaded and stored, and that it is what stock does.

`ExampleConnector` keeps whole prompts on disk. Its scheduler half runs in a real
scheduler, its worker half saves and loads a real tensor, slot by slot; what it loaded
is then read by ``scheduler_kit``. `SimpleCPUOffloadConnector` copies blocks to the
host.

``python vllm_pr/tests/test_proof_connector.py FOLDER`` is the worker that prints the
transfers of the vLLM that is first on the path.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from proof_kit import GEOMETRIES
from scheduler_kit import PAGE, Engine, Setup, WrongContent, pool_blocks, run_random

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.outputs import KVConnectorOutput
from vllm_pr.driver import block_sizes
from vllm_pr.patching.trees import changed_tree
from vllm_pr.scenarios import Text, token_ids

FULL = GEOMETRIES["full"]
SIZE = FULL.groups[0].block_size
LAYER = "layer.0"
NOTHING = -1
OFFLOADED = ("full+sliding", "gemma-small", "mla+windows")


class DiskStore:
    """The worker half of `ExampleConnector`, its tensor and its files."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        scheduler, self.worker, self.folder = engine.scheduler, engine.worker, folder
        self.connector = KVConnectorFactory.create_connector(
            config=scheduler.vllm_config,
            role=KVConnectorRole.WORKER,
            kv_cache_config=scheduler.kv_cache_config,
        )
        layer = torch.nn.Module()
        shape = (engine.setup.blocks, 1, SIZE, 1)
        layer.kv_cache = torch.full(shape, NOTHING, dtype=torch.int64)
        self.slots = layer.kv_cache.view(-1)
        self.tensor = layer.kv_cache
        self.context = ForwardContext({LAYER: layer}, {LAYER: None}, {})
        folder.mkdir(exist_ok=True)
        self.log: list[tuple] = []
        self.counts: Counter = Counter()
        self.asked: list[tuple[int, int]] = []
        self._watch(scheduler.connector)

    def _watch(self, connector) -> None:
        """Record what the scheduler is told: local and external tokens."""
        ask = connector.get_num_new_matched_tokens

        def watched(request, local):
            found = ask(request, local)
            self.asked.append((local, found[0]))
            return found

        connector.get_num_new_matched_tokens = watched

    def scheduled(self, step) -> None:
        for one in step.kv_connector_metadata.requests:
            tokens = hashlib.sha256(one.token_ids.numpy().tobytes()).hexdigest()[:12]
            kind = "store" if one.is_store else "load"
            self.log.append((kind, tokens, one.slot_mapping.tolist()))

    def begin(self, step) -> KVConnectorOutput | None:
        """Load; a file that is gone makes the blocks it was for invalid."""
        meta = step.kv_connector_metadata
        wanted, invalid = list(meta.requests), set()
        for meta.requests in ([one] for one in wanted if not one.is_store):
            slots = meta.requests[0].slot_mapping
            self.connector.bind_connector_metadata(meta)
            try:
                self.connector.start_load_kv(self.context)
            except FileNotFoundError:
                self.forget_lost()
                invalid.update((slots // SIZE).tolist())
                self.counts["failed loads"] += 1
                continue
            for slot in slots.tolist():
                held = self.worker.memory.setdefault(slot // SIZE, {})
                held[0, slot % SIZE] = int(self.slots[slot])
            self.counts["loads"] += 1
        stores = [one for one in wanted if one.is_store]
        meta.requests = [
            one
            for one in stores
            if invalid.isdisjoint((one.slot_mapping // SIZE).tolist())
        ]
        return KVConnectorOutput(invalid_block_ids=invalid) if invalid else None

    def end(self, step) -> None:
        """Save what the step computed."""
        meta = step.kv_connector_metadata
        for one in meta.requests:
            for slot in one.slot_mapping.tolist():
                held = self.worker.memory[slot // SIZE]
                self.slots[slot] = held[0, slot % SIZE]
        self.connector.bind_connector_metadata(meta)
        self.connector.save_kv_layer(LAYER, self.tensor, None)
        self.counts["saves"] += len(meta.requests)

    def lose_files(self) -> None:
        """All that was stored is lost, though it still looks as if it were there."""
        for folder in self.folder.iterdir():
            shutil.rmtree(folder)
            folder.mkdir()

    def forget_lost(self) -> None:
        """Let what was lost be stored again."""
        for folder in self.folder.iterdir():
            if not any(folder.iterdir()):
                folder.rmdir()


def disk_engine(folder: Path, blocks: int, interval=None, policy="recompute") -> Engine:
    """One group, whole prompts in one step: what `ExampleConnector` is made for."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    engine = Engine(
        Setup(FULL, blocks, interval, connector=connector, chunked=False,
              step_tokens=2048, sequences=4)
    )  # fmt: skip
    engine.worker.offload = DiskStore(engine, folder)
    return engine


def prompt(name: str, tokens: int) -> list[int]:
    return list(token_ids(Text(name, tokens)))


def serve(engine: Engine, tokens: list[int]) -> tuple[int, int]:
    """Serve one prompt alone: tokens found locally, and in the store."""
    store = engine.worker.offload
    store.asked.clear()
    engine.add(tokens, 1)
    engine.drain()
    return store.asked[0]


def random_sessions(engine: Engine, loss: float = 0.0, requests: int = 120) -> None:
    """Sessions that come back, two at a time; no prompt of ``n * SIZE + 1`` tokens."""
    rng = random.Random(7)
    lengths = [length for length in range(40, 400) if length % SIZE != 1]
    sessions = [prompt(f"session {i}", rng.choice(lengths)) for i in range(8)]
    for _ in range(requests):
        engine.add(rng.choice(sessions), 1)
        if rng.random() < 0.5:
            engine.step()
        if rng.random() < loss:
            engine.worker.offload.lose_files()
    engine.drain()


def test_switch_hits_locally_and_loads_what_the_pool_lost(tmp_path):
    a, b = prompt("a", 20 * SIZE), prompt("b", 20 * SIZE)
    engine = disk_engine(tmp_path, blocks=30)
    found = [serve(engine, tokens) for tokens in (a, a, b, a)]
    whole = 19 * SIZE  # the last block is computed anew, to sample
    kept = found[3][0]
    assert found == [(0, 0), (whole, 0), (0, 0), (kept, whole - kept)]
    assert 0 < kept < whole, "neither all nor nothing was left in the pool"
    assert engine.worker.offload.counts == {"saves": 2, "loads": 1}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_load(policy, tmp_path):
    """Nothing that was not loaded is read or hit, and the next request is right."""
    a, b = prompt("a", 20 * SIZE), prompt("b", 20 * SIZE)
    engine = disk_engine(tmp_path, blocks=30, policy=policy)
    for tokens in (a, b):
        serve(engine, tokens)
    engine.worker.offload.lose_files()
    local, external = serve(engine, a)
    assert external > 0 and engine.worker.offload.counts["failed loads"] == 1
    failed = list(engine.outputs.values())[-1]
    assert len(failed) == (policy == "recompute")
    if policy == "fail":  # its blocks were evicted, and are the first to be reused
        shutil.rmtree(tmp_path)
        assert serve(engine, a) == (0, 0)
    assert len(serve_all(engine, [a, b])) == 2


def serve_all(engine: Engine, prompts: list[list[int]]) -> list[int]:
    """The tokens sampled for each prompt."""
    shutil.rmtree(engine.worker.offload.folder, ignore_errors=True)
    names = [engine.add(tokens, 1) for tokens in prompts]
    engine.drain()
    return [engine.outputs[name][0] for name in names]


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_random_sessions_load_what_they_need(loss, tmp_path):
    engine = disk_engine(tmp_path, blocks=60)
    random_sessions(engine, loss)
    store = engine.worker.offload
    assert min(external for _, external in store.asked) >= 0
    assert store.counts["loads"] > 10 and engine.worker.counts["slots read"] > 1000
    assert bool(store.counts["failed loads"]) == bool(loss)


def test_negative_count_is_in_stock_too(stock, tmp_path):
    """A prompt of ``n * SIZE + 1`` tokens whose first ``n * SIZE`` were stored.

    The example connector leaves a block out for the token to sample after it left one
    out for alignment. It is upstream's and the same with and without the change.
    """
    tokens = prompt("a", 5 * SIZE + 1)
    engine = disk_engine(tmp_path, blocks=60)
    serve(engine, tokens[:-1])
    engine.add(tokens, 1)
    engine.scheduler.schedule()
    assert engine.worker.offload.asked[-1] == (5 * SIZE, -SIZE)
    assert stock["negative count"] == [5 * SIZE, -SIZE]


def offload_engine(name: str, mode: str, interval) -> Engine:
    geometry = GEOMETRIES[name]
    blocks = pool_blocks(geometry, 25)
    extra = {"cpu_bytes_to_use": 3 * blocks * PAGE, "lazy_offload": mode == "lazy"}
    connector = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    step = 4 * block_sizes(geometry)[0]
    setup = Setup(geometry, blocks, interval, connector=connector, step_tokens=step)
    return Engine(setup)


def offloaded(geometry: str, mode: str, interval, watch=None) -> dict:
    """Blocks that a random run copies to and from the host, as counts and a digest."""
    engine = offload_engine(geometry, mode, interval)
    offload = engine.worker.offload
    if watch is not None:
        watch(engine)
    run_random(engine, seed=3, requests=100, aborts=0.03, resets=0)
    return {**offload.counts, "transfers": digest(offload.log)}


def on_disk(folder: Path, interval) -> dict:
    """What a random run saves and loads, slot by slot, as counts and a digest."""
    engine = disk_engine(folder, blocks=60, interval=interval)
    random_sessions(engine)
    store = engine.worker.offload
    return {**store.counts, "transfers": digest(store.log)}


def digest(log: list) -> str:
    return hashlib.sha256(json.dumps(log).encode()).hexdigest()[:16]


CASES = [(name, mode) for name in OFFLOADED for mode in ("lazy", "eager")]


def transfers(folder: Path) -> dict:
    """All of it, for the vLLM that this process imports."""
    tokens = prompt("a", 5 * SIZE + 1)
    engine = disk_engine(folder / "negative", blocks=60)
    serve(engine, tokens[:-1])
    engine.add(tokens, 1)
    engine.scheduler.schedule()
    found = {"negative count": engine.worker.offload.asked[-1]}
    for interval in (None, 0):
        found[f"disk, {interval}"] = on_disk(folder / f"disk {interval}", interval)
        for name, mode in CASES:
            key = f"{mode} host offload, {name}, {interval}"
            found[key] = offloaded(name, mode, interval)
    return found


def worker(tree: str, folder: Path) -> dict:
    """The transfers of the vLLM in ``tree``, or of the installed one.

    Each side is a process with the same order of sets: schedulers iterate over them.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [tree, root]))
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=dict(os.environ, PYTHONPATH=path, PYTHONHASHSEED="0"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict:
    return worker("", tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> dict:
    return worker(str(changed_tree()), tmp_path_factory.mktemp("changed"))


@pytest.mark.parametrize("interval", [None, 0])
def test_disk_transfers_are_those_of_stock(stock, changed, interval):
    found = changed[f"disk, {interval}"]
    assert found == stock[f"disk, {interval}"]
    assert found["loads"] > 10


@pytest.mark.parametrize("geometry, mode", CASES)
def test_host_transfers_are_those_of_stock(stock, changed, geometry, mode):
    """With an explicit interval, block by block."""
    key = f"{mode} host offload, {geometry}, 0"
    assert changed[key] == stock[key]
    assert min(changed[key]["blocks stored"], changed[key]["blocks loaded"]) > 20


def test_blocks_copied_to_the_host(stock, changed, figure):
    """With interval None fewer than stock's None; the default copies as before."""
    for geometry, mode in CASES:
        none = f"{mode} host offload, {geometry}, None"
        sides = {
            "stock, default": stock[f"{mode} host offload, {geometry}, 0"],
            "changed, default": changed[f"{mode} host offload, {geometry}, 0"],
            "stock, interval None": stock[none],
            "changed, interval None": changed[none],
        }
        copied = {side: found["blocks stored"] for side, found in sides.items()}
        figure(f"blocks copied to the host, {mode}, {geometry}", copied)
        assert copied["changed, default"] == copied["stock, default"]
        assert copied["changed, interval None"] < copied["stock, interval None"]


def test_planted_fault_is_found_in_what_is_loaded(tmp_path):
    """A store that is one slot off."""
    engine = disk_engine(tmp_path, blocks=30)
    store = engine.worker.offload
    save = store.end

    def one_off(step) -> None:
        for one in step.kv_connector_metadata.requests:
            one.slot_mapping = one.slot_mapping.roll(1)
        save(step)

    store.end = one_off
    with pytest.raises(WrongContent):
        random_sessions(engine)


def test_planted_fault_is_found_in_the_transfers(monkeypatch):
    """A queue that hands out hashed blocks in another order."""
    right = offloaded("full+sliding", "eager", 0)
    put = FreeKVCacheBlockQueue.append_n
    monkeypatch.setattr(
        FreeKVCacheBlockQueue,
        "append_n",
        lambda queue, blocks: put(queue, blocks[::-1]),
    )
    assert offloaded("full+sliding", "eager", 0) != right


if __name__ == "__main__":
    print(json.dumps(transfers(Path(sys.argv[1]))))
