# SPDX-License-Identifier: Apache-2.0
"""A small vLLM and a small change for it, and children that get killed."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

from vllm_pr.patching.sources import Sources
from vllm_pr.patching.support import supported_releases
from vllm_pr.patching.tree import Tree, open_tree

RELEASE = supported_releases()[-1]

POOL = '''\
"""A pool."""
from vllm.blocks import (
    Alpha,
    gamma,
)
from vllm.queue import Queue


class Pool:
    """Holds blocks."""

    def __init__(self, blocks):
        # The queue of all.
        self.queue = Queue(blocks)  # a list
        self.size = len(blocks)

    def touch(self, blocks):
        """Touch blocks.

        Args:
            blocks: What to touch.

        """
        for block in blocks:
            block.count += 1

    @property
    def usage(self):
        return 1 - self.queue.free / self.size


def touch(blocks):
    for block in blocks:
        block.count += 1
'''

POOL_RULES = """\
edits: vllm/v1/core/pool.py
rules:
  - id: import-segmented
    why: the new queue
    match: from vllm.queue import Queue
    before: from vllm.v1.core.segmented import Segmented
  - id: make-segmented
    why: the new queue is used
    in: Pool.__init__
    match: self.queue = Queue($BLOCKS)
    replace: self.queue = Segmented($BLOCKS)
  - id: promote
    part: default
    why: a hit counts
    in: Pool.touch
    match: block.count += 1
    before: |
      if block.waits:
          self.queue.promote(block)
"""

PAGE = """\
# Pages

Text of the page.

## Queue

One list.

- first
- second

### Details

```python
## not a heading
```

## End

Nothing.
"""

PAGE_RULES = """\
edits: docs/design/page.md
rules:
  - id: say-segments
    why: there are segments now
    section: "## Queue"
    block: {kind: paragraph}
    replace: Three segments in one list.
"""

FILES = {
    "PKG-INFO": f"Metadata-Version: 2.4\nName: vllm\nVersion: {RELEASE}\n",
    "pyproject.toml": "[project]\nname = 'vllm'\n",
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/v1/core/__init__.py": "",
    "vllm/v1/core/pool.py": POOL,
    "vllm/queue.py": "class Queue(list):\n    free = 0\n",
    "vllm/blocks.py": "Alpha = gamma = None\n",
    "tests/v1/test_pool.py": "",
    "docs/design/page.md": PAGE,
}

SOURCES = {
    "vllm/v1/core/pool.rules.yaml": POOL_RULES,
    "vllm/v1/core/segmented.py": "from vllm.queue import Queue\n\n\n"
    "class Segmented(Queue):\n    free = 1\n",
    "tests/v1/segments/test_segmented.py": "def test_it():\n    pass\n",
    "docs/design/page.rules.yaml": PAGE_RULES,
    "vllm_pr/patching/new_files.yaml": "vllm/v1/core/segmented.py: {part: queue}\n"
    "tests/v1/segments/test_segmented.py: {part: queue}\n",
}


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def make_tree(root: Path, **files: str | bytes) -> Tree:
    """The small vLLM, old enough that a new file shows, one of its files odd."""
    write(root, FILES | files)
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(10**18 + 123, 10**18 + 123))
    (root / "vllm/v1/core/pool.py").chmod(0o640)
    return open_tree(root)


def make_sources(root: Path, **files: str) -> Sources:
    return Sources(write(root, SOURCES | files))


def rules(*items: str, edits: str = "vllm/v1/core/pool.py") -> dict[str, str]:
    """A rules file from its rules, each as YAML without ``- ``."""
    source = edits.rsplit(".", 1)[0] + ".rules.yaml"
    body = "".join(
        "  - " + dedent(item).strip().replace("\n", "\n    ") + "\n" for item in items
    )
    return {source: f"edits: {edits}\nrules:\n{body}"}


def snapshot(root: Path, times: bool = True) -> dict[str, tuple]:
    """Everything below a folder: kind, mode, content and modification time."""
    found = {}
    for path in root.rglob("*"):
        about = path.lstat()
        mode = stat.S_IMODE(about.st_mode)
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            found[name] = ("folder", mode)
        else:
            mtime = about.st_mtime_ns if times else None
            found[name] = ("file", mode, path.read_bytes(), mtime)
    return found


def child(function: Callable[[], object]) -> int:
    """Run in a forked child: its exit status, negative the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


_CALLS = [
    "chmod",
    "chown",
    "fsync",
    "link",
    "mkdir",
    "open",
    "rename",
    "replace",
    "rmdir",
    "unlink",
    "utime",
]


def kill_at(step: int) -> None:
    """Let this process be killed by SIGKILL before its n-th file-system call.

    What is written but not yet synced may be lost: half of it is.
    """
    left = [step]

    def counted(name: str, call: Callable) -> Callable:
        def run(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                if name == "fsync" and stat.S_ISREG(os.fstat(args[0]).st_mode):
                    os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return run

    for name in _CALLS:
        setattr(os, name, counted(name, getattr(os, name)))
