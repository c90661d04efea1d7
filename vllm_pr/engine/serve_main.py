# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` as a child that does not outlive its parent."""

import sys

from vllm_pr.engine.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
