"""Names and what they stand for, apart from what is heavy to import."""

from __future__ import annotations

__all__ = ["POLICIES"]

# In the order of tl_policy (tinyllm/replay.h).
POLICIES = {
    "lru": "least recently used: the pool's own",
    "fifo": "oldest computed, whatever was hit since",
    "lfu": "least often used since it is there",
    "position": "deepest in its prompt, then least recently used: beginnings have priority",
    "s3-fifo": "a small queue, a main queue, a memory of what just left",
    "tinylfu": "a window, and admission to the rest by frequency",
    "optimal": "Belady: knows the future; no order does better",
}
