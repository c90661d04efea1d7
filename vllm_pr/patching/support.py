# SPDX-License-Identifier: Apache-2.0
"""Which rules a version gets: a supported release, or a reason why none."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from vllm_pr.patching.errors import PatchError

SUPPORTED = ("0.32.0", "0.33.0")


def supported_releases() -> list[str]:
    """All releases that the change is made for, oldest first."""
    return list(SUPPORTED)


def refusal(version: str) -> str:
    """Why a version that is not supported is not, in one line."""
    newest = supported_releases()[-1]
    parsed = Version(version)
    if parsed > Version(newest):
        return (
            f"vLLM {version} is newer than {newest}, the newest release known here: "
            f"--force-release {newest} tries its rules and changes all or nothing"
        )
    return (
        f"vLLM {version} is not supported "
        f"(supported: {', '.join(supported_releases())})"
    )


def resolve(version: str | None, force: str | None = None) -> str:
    """The release whose rules are for a version.

    Args:
        version: What the tree says it is, local part allowed (``0.32.0+cpu``).
        force: A supported release to take instead.

    Raises:
        PatchError: ``force`` or the version is not supported.
    """
    wanted = force if force is not None else version
    try:
        parsed = Version(wanted or "")
    except InvalidVersion:
        raise PatchError(f"--force-release {force!r} is not a version") from None
    for release in supported_releases():
        if parsed.public == Version(release).public:
            return release
    if force is not None:
        known = ", ".join(supported_releases())
        raise PatchError(f"--force-release {force}: no such release here ({known})")
    raise PatchError(refusal(wanted))
