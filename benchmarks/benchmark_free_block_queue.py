# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Cost of the free block queue's operations, with segments and without.

Both queues take turns on the same operations in one run. Times are CPU nanoseconds
per block, medians over the rounds; the ratio is the median of the rounds' ratios.
"""

import gc
import json
import random
from collections.abc import Iterator
from statistics import median
from time import process_time_ns

from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.free_block_queue import (
    NUM_PROBATIONARY_LEVELS,
    SegmentedFreeBlockQueue,
)
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

QUEUES = {"plain": FreeKVCacheBlockQueue, "segmented": SegmentedFreeBlockQueue}


class Bench:
    """One queue whose blocks lie in random order, as in a pool that has served."""

    def __init__(self, queue_class: type[FreeKVCacheBlockQueue], num_blocks: int):
        self.rng = random.Random(num_blocks)
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.queue = queue_class(self.blocks)
        blocks = self.queue.popleft_n(num_blocks)
        self.rng.shuffle(blocks)
        self.queue.append_n(blocks)
        for block in blocks:
            block.set_block_hash(b"", num_tokens=1)

    def round(self, batch: int, calls: int) -> Iterator[tuple[str, int]]:
        """Do each operation on `batch` blocks, `calls` times; yields its time in ns."""
        queue = self.queue
        start = process_time_ns()
        taken = [queue.popleft_n(batch) for _ in range(calls)]
        yield "popleft_n", process_time_ns() - start

        start = process_time_ns()
        for blocks in taken:
            queue.prepend_n(blocks)
        yield "prepend_n", process_time_ns() - start

        taken = [queue.popleft_n(batch) for _ in range(calls)]
        start = process_time_ns()
        for blocks in taken:
            queue.append_n(blocks)
        yield "append_n", process_time_ns() - start

        removed = self.rng.sample(self.blocks, batch * calls)
        start = process_time_ns()
        for block in removed:
            queue.remove(block)
        yield "remove", process_time_ns() - start
        queue.append_n(removed)

        if not isinstance(queue, SegmentedFreeBlockQueue):
            return
        taken = [queue.popleft_n(batch) for _ in range(calls)]
        levels = [1 + i % NUM_PROBATIONARY_LEVELS for i in range(batch)]
        for blocks in taken:
            queue.mark_probationary(blocks, levels)
        start = process_time_ns()
        for blocks in taken:
            queue.append_n(blocks)
        yield "append_n, probationary", process_time_ns() - start
        for blocks in taken:
            for block in blocks:
                queue.remove(block)
            queue.promote(blocks)
            queue.append_n(blocks)


def measure(num_blocks: int, batch: int, rounds: int, sample: int) -> list[dict]:
    """Rows of one pool size and batch size."""
    gc.collect()
    benches = {name: Bench(queue, num_blocks) for name, queue in QUEUES.items()}
    freeze_gc_heap()  # As the engine does.
    calls = max(1, min(sample, num_blocks // 2) // batch)
    times: dict[str, dict[str, list[int]]] = {}
    for round_id in range(rounds + 1):
        for name in list(benches)[:: 1 if round_id % 2 else -1]:
            for operation, ns in benches[name].round(batch, calls):
                if round_id:  # The first one warms up.
                    sides = times.setdefault(operation, {})
                    sides.setdefault(name, []).append(ns)
    gc.unfreeze()
    rows = []
    for operation, sides in times.items():
        # What only one queue does is compared with what the other does instead.
        plain = times[operation.split(",")[0]]["plain"]
        segmented = sides["segmented"]
        rows.append(
            {
                "blocks": num_blocks,
                "batch": batch,
                "plain_ns": median(plain) / (batch * calls),
                "segmented_ns": median(segmented) / (batch * calls),
                "ratio": median(s / p for p, s in zip(plain, segmented)),
                "operation": operation,
            }
        )
    return rows


def main(args):
    rows = [
        row
        for num_blocks in args.num_gpu_blocks
        for batch in args.batch_sizes
        for row in measure(num_blocks, batch, args.num_iteration, args.sample)
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print("".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        *numbers, operation = row.values()
        print("".join(f"{round(number, 2):12,}" for number in numbers), operation)


def invoke_main() -> None:
    parser = FlexibleArgumentParser(
        description="Benchmark the free block queue with and without segments."
    )
    parser.add_argument(
        "--num-gpu-blocks", type=int, nargs="*", default=[10_000, 100_000, 1_000_000]
    )
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 32, 1024])
    parser.add_argument(
        "--num-iteration", type=int, default=30, help="Rounds of both queues in turn"
    )
    parser.add_argument(
        "--sample", type=int, default=8192, help="Blocks per operation and round"
    )
    parser.add_argument("--json", action="store_true", help="Print JSON")
    main(parser.parse_args())


if __name__ == "__main__":
    invoke_main()
