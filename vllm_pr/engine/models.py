# SPDX-License-Identifier: Apache-2.0
"""The tiny models: their folders, and what an engine needs to run them."""

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_pr.engine.tokenizer import write_tokenizer

BUILD = Path(__file__).resolve().parents[2] / "build"
POOL_BYTES = 512 * 1024**2
_HERE = Path(__file__).resolve().parent
_SITES = _HERE / "sites"


@dataclass(frozen=True)
class TinyModel:
    """A tiny model and its engine settings.

    Attributes:
        name: Name on the command line, also the model name of a server.
        block_size: Tokens per block of the largest group.
        alignment: Prefix-cache hits end at a multiple of this many tokens.
        blocks: Blocks of the pool unless the caller asks for another size.
        smallest_pool: Blocks of the smallest pool that holds one longest request.
        max_model_len: Longest request, prompt and output, in tokens.
        step_tokens: Tokens of prefill per scheduler step.
        first_release: First vLLM release that runs it on a CPU.
        sites: Folders for PYTHONPATH, with the start-up plugins.
        env: Environment of every engine process.
    """

    name: str
    block_size: int
    alignment: int
    blocks: int
    smallest_pool: int
    max_model_len: int
    step_tokens: int
    first_release: str
    sites: tuple[Path, ...] = (_SITES / "tiny_models",)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        path = _HERE / "configs" / f"{self.name}.json"
        return json.loads(path.read_text(encoding="utf-8"))

    def engine_args(self) -> dict[str, Any]:
        """Keyword arguments of ``vllm.EngineArgs``, without the variant's own."""
        return {
            "model": str(model_folder(self.name)),
            "load_format": "seeded",
            "tokenizer_mode": "hf",
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.step_tokens,
            "max_num_seqs": 16,
            "num_gpu_blocks_override": self.blocks,
            "kv_cache_memory_bytes": POOL_BYTES,
            "gpu_memory_utilization": 0.05,
            "enforce_eager": True,
            "seed": 0,
            "dtype": self.config["torch_dtype"],
        }


MODELS = {
    model.name: model
    for model in (
        TinyModel(
            "dsv4-tiny",
            block_size=256,
            alignment=256,
            blocks=438,
            smallest_pool=260,
            max_model_len=4096,
            step_tokens=512,
            first_release="0.30.0",
            sites=(_SITES / "tiny_models", _SITES / "deepseek_v4"),
            env={"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"},
        ),
        TinyModel(
            "gemma3-tiny",
            block_size=32,
            alignment=32,
            blocks=268,
            smallest_pool=172,
            max_model_len=4096,
            step_tokens=512,
            first_release="0.27.1",
        ),
    )
}


def tiny_model(name: str) -> TinyModel:
    """The model called ``name``.

    Raises:
        ValueError: There is none; the message lists those there are.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: there is {', '.join(MODELS)}")
    return MODELS[name]


def model_folder(name: str) -> Path:
    """Folder with ``config.json`` and the tokenizer, written under ``build/`` once."""
    model = tiny_model(name)
    target = BUILD / "models" / name
    with tempfile.TemporaryDirectory(dir=_made(BUILD / "models")) as scratch:
        folder = Path(scratch)
        config = json.dumps(model.config, indent=2) + "\n"
        (folder / "config.json").write_text(config, encoding="utf-8")
        write_tokenizer(folder)
        _made(target)
        for file in folder.iterdir():
            os.replace(file, target / file.name)
    return target


def check_model_folder(folder: str | Path) -> None:
    """Refuse a folder without a model.

    Raises:
        ValueError: There is no such folder, or no ``config.json`` in it.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"no model in {folder}: there is no such folder")
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"no model in {folder}: it has no config.json")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
