# SPDX-License-Identifier: Apache-2.0
"""Which rules a version gets: a release that the change is made for, or why none."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from vllm_pr.patching.errors import PatchError
from vllm_pr.releases import (
    changed_releases,
    find_release,
    known_releases,
    nearest_release,
)


def supported_releases() -> list[str]:
    """All releases that the change is made for, oldest first."""
    return [release.version for release in changed_releases()]


def supported(release: str) -> str:
    """A known release that the change is made for, named by the user.

    Raises:
        PatchError: It is not known or not supported.
    """
    return resolve(find_release(release).version)


def resolve(version: str | None, force: str | None = None) -> str:
    """The release whose rules are for a version.

    Args:
        version: What the tree says it is, local part allowed (``0.32.0+cpu``).
        force: A supported release to take instead.

    Raises:
        PatchError: ``force`` or the version is not supported.
    """
    supported = supported_releases()
    if force is not None:
        return _forced(force, supported)
    found = Version(version or "")
    if found.public in supported:
        return found.public
    raise PatchError(_refusal(found))


def _forced(force: str, supported: list[str]) -> str:
    try:
        found = Version(force).public
    except InvalidVersion:
        found = ""
    if found not in supported:
        raise PatchError(
            f"--force-release {force}: the change has no rules for it "
            f"(it has: {', '.join(supported)})"
        )
    return found


def _refusal(version: Version) -> str:
    for release in known_releases():
        if release.version == version.public:
            return f"vLLM {version} is not supported: {release.refusal}"
    newest = supported_releases()[-1]
    if version > Version(newest):
        return (
            f"vLLM {version} is newer than {newest}, the newest release known here: "
            f"`--force-release {newest}` tries its rules and changes all or nothing"
        )
    nearest = nearest_release(str(version))
    if nearest is None or not nearest.change:
        return (
            f"vLLM {version} is no release known here; the change is for "
            f"{supported_releases()[0]} and later"
        )
    return (
        f"vLLM {version} is no release known here: `--force-release "
        f"{nearest.version}` tries the rules of the one before it"
    )
