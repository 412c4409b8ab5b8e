"""Drafts without a second model: what followed the same few tokens the last time.

A text often repeats itself: names, code, quotes of the prompt. The last tokens are looked up among
all earlier ones, and what followed them there is proposed. One pass computes all proposed tokens;
those that the model itself would have picked stay, the rest is cut off again
(``Sequence.truncate``). So the answer is the same, token by token, and only the number of passes
changes.

Source: seed section 6 (L10.8); Saxena, Prompt Lookup Decoding (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PromptLookup"]

_SIZES = (3, 2)  # tokens that must agree; longer ones are asked first


class PromptLookup:
    """The tokens of one sample, and where each run of 2 and 3 of them stood last.

    >>> lookup = PromptLookup([1, 2, 3, 4, 5, 1, 2, 3])
    >>> lookup.propose(4)
    [4, 5, 1, 2]
    >>> lookup.extend([9, 8])
    >>> lookup.propose(4)
    []
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}  # a run -> the position behind it
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens that are certain. O(len(tokens))."""
        known, follows = self._tokens, self._follows
        for token in tokens:
            end = len(known)
            for size in _SIZES:
                if end >= size:
                    follows[tuple(known[end - size :])] = end
            known.append(token)

    def propose(self, n: int) -> list[int]:
        """Up to n tokens that may come next; often none."""
        for size in _SIZES:
            start = self._follows.get(tuple(self._tokens[-size:]))
            if start is not None:
                return self._tokens[start : start + n]
        return []
