# SPDX-License-Identifier: Apache-2.0
"""The process that measures one variant: jobs in, results out, one JSON line each.

After each result it waits for the word ``next``, or another word to end the job: so
two processes can take turns, step by step.

Which variant that is depends on the vLLM that is first on ``PYTHONPATH``. A process
lives for many jobs, for importing vLLM takes longer than most of them.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator

NEXT = "next"


def run(job: str, **keywords: object) -> Iterator[object]:
    """Run a job, ``measure_<job>`` in `vllm_pr.bench.meters`.

    Yields:
        What can be written as JSON: its result, or what it yields.
    """
    from vllm_pr.bench import meters

    result = getattr(meters, f"measure_{job}")(**keywords)
    if isinstance(result, Iterator):
        yield from result
    else:
        yield result


def main() -> None:
    """Serve jobs until standard input ends."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What vLLM logs must not come between the results.

    def answer(**values: object) -> None:
        print(json.dumps(values), file=results, flush=True)

    for line in sys.stdin:
        steps = run(**json.loads(line))
        try:
            for result in steps:
                answer(result=result)
                if sys.stdin.readline().strip() != NEXT:
                    break
            else:
                answer(end=True)
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")
        finally:
            steps.close()


if __name__ == "__main__":
    main()
