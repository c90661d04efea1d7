# SPDX-License-Identifier: Apache-2.0
"""The one error a user sees."""


class DoctorError(Exception):
    """The doctor cannot go on; the message is one line: what, where, what to do."""
