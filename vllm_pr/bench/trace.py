# SPDX-License-Identifier: Apache-2.0
"""Read a request trace as a workload.

The format is that of the traces published with Mooncake (Qin et al., FAST 2025): one
JSON object a line with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens)
and ``hash_ids``, one id per 512-token block of the prompt, where an equal id means an
equal prefix up to the end of that block.
"""

import json
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_pr.bench.workloads import Workload
from vllm_pr.scenarios import Ask, Text

BLOCK_TOKENS = 512
BLOCKS = {
    "deepseek-v4-flash": (6_000, 12_000, 24_000, 48_000, 150_000, 400_000),
    "gemma": (12_000, 24_000, 60_000, 150_000, 400_000, 1_200_000),
}


class TraceError(ValueError):
    """A trace that cannot be read; the message says which file, line and why."""


def trace_workload(path: Path, requests: int) -> Workload:
    """The first ``requests`` requests of a trace as a workload.

    Raises:
        TraceError: no such file, or a line that is not a request.
    """
    asks = read_trace(path, requests)
    return Workload(
        "trace", f"the first {len(asks)} requests of a trace", lambda: asks, BLOCKS
    )


def read_trace(path: Path, requests: int) -> list[Ask]:
    """The first ``requests`` requests of a trace.

    The last block of a prompt is partial and has an id of its own, also where a later
    turn of the same conversation goes on with a full block. So it gets the tokens of
    the block with which the next later request continues the same full blocks.

    Raises:
        TraceError: no such file, or a line that is not a request.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            rows = [
                _row(path, n, line) for n, line in islice(enumerate(lines, 1), requests)
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    if not rows:
        raise TraceError(f"{path}: no requests")
    asks: list[Ask] = []
    goes_on: dict[int | None, str] = {}
    for index, row in reversed(list(enumerate(rows))):
        asks.append(_ask(index, row, goes_on))
    return asks[::-1]


def _ask(index: int, row: dict[str, Any], goes_on: dict[int | None, str]) -> Ask:
    """One request; later requests are in ``goes_on``: full block to next text."""
    texts = []
    left = row["input_length"]
    previous = None
    for block in row["hash_ids"]:
        key = f"block {block}"
        if left < BLOCK_TOKENS:
            key = goes_on.get(previous, key)
        texts.append(Text(key, min(left, BLOCK_TOKENS)))
        goes_on[previous] = key
        left -= BLOCK_TOKENS
        previous = block
    output = Text(f"output {index}", max(1, row["output_length"]))
    return Ask(f"request {index}", tuple(texts), output)


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        length, blocks = int(row["input_length"]), list(map(int, row["hash_ids"]))
        int(row["output_length"])
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{path}, line {number}: not a request of a trace (wanted an object with "
            f"input_length, output_length and hash_ids): {error!r}"
        ) from error
    if length < 1 or len(blocks) != -(-length // BLOCK_TOKENS):
        raise TraceError(
            f"{path}, line {number}: {len(blocks)} hash_ids for {length} prompt "
            f"tokens, wanted one per {BLOCK_TOKENS}"
        )
    return row
