# SPDX-License-Identifier: Apache-2.0
"""Two sides' outcomes, test by test."""

import re
from collections import Counter
from dataclasses import dataclass, field

from vllm_pr.upstream.runs import Outcome

MISSING = Outcome("missing", "no such test on this side")
# First match wins: what a test would need to say anything here.
_REASONS = (
    (
        "missing package",
        r"No module named|cannot import name|ImportError|PackageNotFoundError"
        r"|could not import|not installed|DLL load|cannot open shared object",
    ),
    (
        "needs network",
        r"LocalEntryNotFound|OfflineMode|HF_HUB_OFFLINE|outgoing traffic"
        r"|ConnectionError|NameResolution|Max retries|not a valid model identifier"
        r"|Cannot find any model weights|does not appear to have a file named"
        r"|couldn't connect|No such file.*models--|Can't load image processor",
    ),
    (
        "needs GPU",
        r"(?i)cuda|nvidia|\bgpus?\b|rocm|\bhip\b|\bxpu\b|triton|nccl|accelerator"
        r"|block size|not supported on cpu|platform cpu|CPUAttention|flash.?attn"
        r"|InductorError",
    ),
    ("timed out", r"(?i)time(d )?-?out"),
)


@dataclass(frozen=True)
class Rerun:
    """A test that was lost at first, run again.

    Attributes:
        stock: Statuses on stock, the first run included.
        changed: The same on changed.
    """

    stock: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def flaky(self) -> bool:
        """Whether the reruns give no ground to blame the change."""
        again = set(self.changed[1:]) == {"passed"}
        return again or set(self.stock) != {"passed"}


@dataclass
class Comparison:
    """Test ids by what became of them.

    Attributes:
        passed_both: Passed on both sides.
        failed_both: Passed on neither, failed on at least one.
        skipped_both: Skipped on both sides.
        lost: Passes on stock, not on changed.
        won: Passes on changed, not on stock.
        flaky: Lost at first; the reruns say why that is not the change.
        classes: Reason class of each test of ``failed_both``.
        reasons: Last line of stock's failure, of each test of ``failed_both``.
    """

    passed_both: list[str] = field(default_factory=list)
    failed_both: list[str] = field(default_factory=list)
    skipped_both: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    won: list[str] = field(default_factory=list)
    flaky: dict[str, Rerun] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def class_counts(self) -> list[tuple[str, int]]:
        """How many tests failed on both sides, by reason class, most first."""
        return Counter(self.classes.values()).most_common()


def compare(stock: dict[str, Outcome], changed: dict[str, Outcome]) -> Comparison:
    """Put every test that either side knows in one list."""
    result = Comparison()
    for test in sorted(stock.keys() | changed.keys()):
        one, other = stock.get(test, MISSING), changed.get(test, MISSING)
        statuses = one.status, other.status
        if statuses == ("passed", "passed"):
            result.passed_both.append(test)
        elif one.status == "passed":
            result.lost.append(test)
        elif other.status == "passed":
            result.won.append(test)
        elif statuses == ("skipped", "skipped"):
            result.skipped_both.append(test)
        else:
            result.failed_both.append(test)
            reason = one.reason if one.status == "failed" else other.reason
            result.classes[test] = reason_class(reason)
            result.reasons[test] = last_line(reason)
    return result


def reason_class(reason: str) -> str:
    """The class of a failure: what the test would need, or "other"."""
    text = "\n".join(_error_lines(reason)) or reason
    for name, pattern in _REASONS:
        if re.search(pattern, text):
            return name
    return "other"


def last_line(reason: str) -> str:
    """The line of a failure's text that names the exception."""
    lines = _error_lines(reason) or [x for x in reason.splitlines() if x.strip()]
    return lines[0].strip()[:300] if lines else ""


def _error_lines(reason: str) -> list[str]:
    lines = reason.splitlines()
    errors = [line[1:].strip() for line in lines if line[:2] == "E "]
    if errors == ["AssertionError"]:  # says nothing: what was asserted does
        errors = [line[1:].strip() for line in lines if line[:2] == "> "][-1:] + errors
    return errors
