# SPDX-License-Identifier: Apache-2.0
"""An offline hub folder with the models that upstream's tests ask for."""

import json
import shutil
import tomllib
from pathlib import Path

from vllm_pr.engine.tokenizer import write_tokenizer

MODELS = Path(__file__).with_name("models.toml")
_COMMIT = "0" * 40


def write_hub(folder: Path) -> Path:
    """Write the hub's cache layout below ``folder`` (a value for ``HF_HOME``).

    It is written anew when ``models.toml`` changed, and kept otherwise.
    """
    content = MODELS.read_bytes()
    stamp = folder / "models.toml"
    if stamp.is_file() and stamp.read_bytes() == content:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    for name, model in tomllib.loads(content.decode()).items():
        _write_model(folder / "hub" / f"models--{name.replace('/', '--')}", model)
    stamp.write_bytes(content)
    return folder


def _write_model(folder: Path, model: dict) -> None:
    snapshot = folder / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(_COMMIT, encoding="utf-8")
    write_tokenizer(snapshot)
    if model.get("weights"):
        _write_weights(snapshot, model["config"])
    for name, content in _files(model).items():
        text = json.dumps(content, indent=2) + "\n"
        (snapshot / name).write_text(text, encoding="utf-8")


def _files(model: dict) -> dict[str, dict]:
    return {"config.json": model["config"], **model.get("files", {})}


def _write_weights(snapshot: Path, config: dict) -> None:
    """Random weights, the same on every machine."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    kind = AutoConfig.for_model(**config)
    AutoModelForCausalLM.from_config(kind).save_pretrained(snapshot)
