# SPDX-License-Identifier: Apache-2.0
"""The sources of the change: rules files and new files below one root folder."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from vllm_pr.patching.errors import PatchError
from vllm_pr.patching.rules import (
    PARTS,
    SUFFIX,
    FileRules,
    Part,
    Releases,
    _explain,
    fits,
    load_rules,
)

ROOT = Path(__file__).resolve().parents[2]
TOP_FOLDERS = ("vllm", "tests", "benchmarks", "docs")
NEW_FILES = "vllm_pr/patching/new_files.yaml"


class NewFile(BaseModel):
    """A file that upstream does not have: its commit and its releases."""

    model_config = ConfigDict(extra="forbid", strict=True)
    part: Part
    releases: Releases = "all"


class Sources:
    """Everything that makes up the change.

    Args:
        root: Folder with ``vllm/``, ``tests/``, ... and the list of new files;
            by default this repository.

    Raises:
        PatchError: A rules file or the list of new files is not in order.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or ROOT
        self.new_files = self._load_new_files()
        self.edits = self._load_edits()
        self._check_ids()
        self._check_strays()

    def selected_new_files(
        self, release: str, parts: tuple[str, ...] = PARTS
    ) -> dict[str, bytes]:
        """Upstream path to content of the new files for a release."""
        return {
            path: (self.root / path).read_bytes()
            for path, new in sorted(self.new_files.items())
            if new.part in parts and fits(new.releases, release)
        }

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all sources: changes whenever a result might."""
        digest = hashlib.sha256()
        paths = [*self.new_files, *(edit.source for edit in self.edits)]
        if self.new_files:
            paths.append(NEW_FILES)
        for path in sorted(paths):
            content = (self.root / path).read_bytes()
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        return sorted(
            path
            for top in TOP_FOLDERS
            for path in (self.root / top).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        )

    def _load_edits(self) -> list[FileRules]:
        edits, lines = [], []
        for path in self._files():
            if path.name.endswith(SUFFIX):
                try:
                    edits.append(load_rules(self.root, path))
                except PatchError as error:
                    lines += error.lines
        if lines:
            raise PatchError(*lines)
        return edits

    def _load_new_files(self) -> dict[str, NewFile]:
        path = self.root / NEW_FILES
        if not path.exists():
            return {}
        try:
            data: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            new = TypeAdapter(dict[str, NewFile]).validate_python(data)
        except yaml.YAMLError as error:
            raise PatchError(f"{NEW_FILES}: {' '.join(str(error).split())}") from None
        except ValidationError as error:
            raise PatchError(*_explain(NEW_FILES, NewFile, error)) from None
        missing = [name for name in new if not (self.root / name).is_file()]
        if missing:
            raise PatchError(
                *(f"{NEW_FILES}: lists {name}, which is not there" for name in missing)
            )
        return new

    def _check_ids(self) -> None:
        seen: dict[str, str] = {}
        for edit in self.edits:
            for rule in edit.rules:
                if rule.id in seen:
                    raise PatchError(
                        f"{edit.source}: rule {rule.id!r} has the id of a rule in "
                        f"{seen[rule.id]}: ids are unique in the project"
                    )
                seen[rule.id] = edit.source

    def _check_strays(self) -> None:
        for path in self._files():
            name = path.relative_to(self.root).as_posix()
            if (
                name.startswith("vllm/")
                and not name.endswith(SUFFIX)
                and name not in self.new_files
            ):
                raise PatchError(f"{name} is not listed in {NEW_FILES}: add its part")
