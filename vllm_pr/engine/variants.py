# SPDX-License-Identifier: Apache-2.0
"""What an engine process is started with: engine arguments and environment.

A *variant* is a setting of vLLM under test: stock with dense checkpoints,
stock as it ships, the changed tree, and the two that the doctor must recognise.
"""

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_pr.engine.models import BUILD, TinyModel

FIRST_WITH_OPTION = (0, 29)


@dataclass(frozen=True)
class Variant:
    """One setting of vLLM.

    Attributes:
        name: Name on the command line and in results.
        changed: Whether the changed tree goes first on PYTHONPATH.
        engine_args: Keyword arguments of ``vllm.EngineArgs`` on top of the model's.
        smallest_pool: Whether the pool is the smallest that the engine accepts.
    """

    name: str
    changed: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)
    smallest_pool: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("stock-none", engine_args={"prefix_cache_retention_interval": None}),
        Variant("stock-default"),
        Variant("changed", changed=True),
        Variant("caching-off", engine_args={"enable_prefix_caching": False}),
        Variant("tiny-pool", smallest_pool=True),
    )
}


def variant_named(name: str) -> Variant:
    """The variant called ``name``.

    Raises:
        ValueError: There is none; the message lists those there are.
    """
    if name not in VARIANTS:
        raise ValueError(f"unknown variant {name!r}: there is {', '.join(VARIANTS)}")
    return VARIANTS[name]


@dataclass(frozen=True)
class Launch:
    """Everything that differs between two engine processes.

    Attributes:
        engine_args: Keyword arguments of ``vllm.EngineArgs``.
        env: The complete environment.
        release: The release that runs, as ``0.32.0``.
    """

    engine_args: dict[str, Any]
    env: dict[str, str]
    release: str


def plan_launch(
    model: TinyModel,
    variant: Variant,
    tree: Path | None = None,
    blocks: int | None = None,
    env: dict[str, str] | None = None,
) -> Launch:
    """Put together what ``variant`` of ``model`` is started with.

    Args:
        model: The tiny model.
        variant: The setting.
        tree: Folder with the ``vllm`` package to run; None for the installed one, or
            its changed copy where the variant is changed.
        blocks: Blocks of the pool; None for the model's own number.
        env: Environment variables on top.

    Raises:
        ValueError: ``tree`` holds no vLLM.
    """
    if variant.changed and tree is None:
        from vllm_pr.patching.trees import changed_tree

        tree = changed_tree()
    release = tree_release(tree)
    arguments = model.engine_args() | variant.engine_args
    if variant.smallest_pool:
        arguments["num_gpu_blocks_override"] = model.smallest_pool
    if blocks is not None:
        arguments["num_gpu_blocks_override"] = blocks
    if _numbers(release) < FIRST_WITH_OPTION:
        arguments.pop("prefix_cache_retention_interval", None)
    folders = [tree] if tree else []
    folders += [*model.sites, _metadata_site(release)]
    return Launch(
        arguments,
        {
            **_inherited(),
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "NO_COLOR": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            **model.env,
            **(env or {}),
        },
        release,
    )


def command_line(engine_args: dict[str, Any]) -> list[str]:
    """``vllm serve`` arguments for keyword arguments of ``vllm.EngineArgs``."""
    words = [engine_args["model"]]
    for name, value in engine_args.items():
        flag = name.replace("_", "-")
        if name == "model":
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def tree_release(tree: Path | None) -> str:
    """Release of the vLLM in ``tree``, or of the installed one, as ``0.32.0``.

    Raises:
        ValueError: There is no vLLM there.
    """
    folders = [Path(tree)] if tree else [Path(entry) for entry in sys.path if entry]
    for folder in folders:
        version = folder / "vllm" / "_version.py"
        if version.is_file():
            found = re.search(r"version = '([0-9.]+)", version.read_text("utf-8"))
            if found:
                return found.group(1).rstrip(".")
    raise ValueError(f"no vLLM in {tree or 'this environment'}: no vllm/_version.py")


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _inherited() -> dict[str, str]:
    """This process's environment without what would change how vLLM runs."""
    dropped = ("VLLM_", "PYTHONPATH", "TRITON_", "COV_CORE_", "LD_PRELOAD")
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)}


def _metadata_site(release: str) -> Path:
    """Folder with the metadata of a distribution ``vllm``, which the command needs."""
    site = BUILD / "engine" / "metadata" / release
    info = site / f"vllm-{release}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    return site
