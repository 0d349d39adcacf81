"""Whether a file may hold a secret: every token and key file is judged here, by what the open file says of itself.

One of another user is no secret of this one's, whatever its mode: that user knows what is in it, and may change it.
Root's is as good as one's own, because root reads everything anyway; so is what a cluster hands to its containers.
"""

from __future__ import annotations

import os
import stat

ROOT = 0


def objection(found: os.stat_result, what: str, mend: str, instead: str) -> str:
    """Why not, with the next step: `mend` where others have access, `instead` where it is another's; else empty."""
    if found.st_uid not in (os.geteuid(), ROOT):
        return f"belongs to another user (id {found.st_uid}): {instead}"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"others may read or change {what}: {mend}"
    return ""
