"""Ids that the server chooses: `r-` and a UUIDv7 (RFC 9562), so that names sort by the time of their creation."""

import secrets
import time
import uuid


def new_id() -> str:
    """48 bits of Unix milliseconds, 74 random bits, and the version and variant bits between them."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"r-{uuid.UUID(int=value)}"
