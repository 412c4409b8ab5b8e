"""What a replay comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .tally import LogHistogram, Series

__all__ = ["Result"]


@dataclass
class Result:
    """One replay through one pool; everything is counted over the requests so far.

    A *block* of a prompt counts as hit when it was taken from the pool's index; tokens are those of
    the blocks, so a partial last block counts with what it has.
    """

    clock: str
    n_blocks: int
    block_tokens: int
    requests: int = 0
    rejected: int = 0
    """Requests that no pool of this size can hold, even alone."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    evictions: int = 0
    freed_early: int = 0
    """In flight: requests that ended early to make room."""
    preemptions: int = 0
    """Real time: running requests that lost their blocks to others, and came again."""
    waited: int = 0
    """Real time: requests that could not start when they came."""
    output_tokens: int = 0
    occupancy: Series = field(default_factory=Series)
    """Blocks in use: by request number in flight, by seconds in real time."""
    waiting: Series = field(default_factory=Series)
    wait_s: LogHistogram = field(default_factory=lambda: LogHistogram(1e-3))
    first_token_s: LogHistogram = field(default_factory=lambda: LogHistogram(1e-3))
    processor_s: float = 0.0
    """What the replay itself took, reading the trace apart."""

    @property
    def hit_rate(self) -> float:
        """hit_tokens / prompt_tokens."""
        return self.hit_tokens / max(self.prompt_tokens, 1)

    @property
    def block_hit_rate(self) -> float:
        """hit_blocks / prompt_blocks."""
        return self.hit_blocks / max(self.prompt_blocks, 1)

    def to_json(self) -> dict[str, Any]:
        """Names and numbers; times in seconds."""
        document = {
            "clock": self.clock,
            "n_blocks": self.n_blocks,
            "block_tokens": self.block_tokens,
            "requests": self.requests,
            "rejected": self.rejected,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": round(self.hit_rate, 6),
            "prompt_blocks": self.prompt_blocks,
            "hit_blocks": self.hit_blocks,
            "block_hit_rate": round(self.block_hit_rate, 6),
            "evictions": self.evictions,
            "peak_used": self.occupancy.peak,
            "mean_used": round(self.occupancy.mean, 1),
            "ns_per_block": round(1e9 * self.processor_s / max(self.prompt_blocks, 1), 1),
        }
        if self.clock == "in flight":
            return {**document, "freed_early": self.freed_early}
        return {
            **document,
            "preemptions": self.preemptions,
            "waited": self.waited,
            "output_tokens": self.output_tokens,
            "peak_waiting": self.waiting.peak,
            "wait_s": self.wait_s.to_json(),
            "first_token_s": self.first_token_s.to_json(),
        }
