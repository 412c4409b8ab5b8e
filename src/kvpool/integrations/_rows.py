"""The rows of a batch in the blocks of a pool: what a PagedCache and its layers share.

transformers sees a batch as a rectangle, every row padded on the left to the same length. Here a
row is a kvpool.Sequence that begins behind its padding:

    column      0   1   2   3   4   5            pads      sequence
    row 0       .   .   a   b   c   d            2         a b c d
    row 1       e   f   g   h   i   j            0         e f g h i j

    position of a token = column - pads

so that padding is in no block, and a prompt is found again whatever it was padded to. A forward
pass goes through ``begin`` (which tokens come: blocks are made for them, or PoolFull raised, before
anything is computed), ``update`` once for each layer, and, with the last of them, the commit: full
blocks become findable when every layer's values are in them.

A row writes positions from its ``first_written`` on: those before it came from the prefix index, or
are written by another row of the same prompt (beams, several return sequences).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool import BlockManager, InvalidArgument, PoolFull, Sequence, ShapeMismatch

from .torch import TorchPool

__all__ = ["Forward", "Rows", "as_prompts"]


@dataclass
class Forward:
    """What a forward pass is given, as far as it matters here. Shapes as in transformers."""

    tokens: NDArray[np.int64] | None  # (rows, n); None when the model is given embeddings
    n_rows: int
    n: int
    mask: NDArray[Any] | None  # (rows, columns), if it is a plain one
    positions: NDArray[np.int64] | None  # (rows or 1, n)
    plain: bool  # the values are a function of tokens, mask and positions alone


@dataclass
class _Plan:
    """Where the values of a forward pass go and are read, as rows of the flat slab."""

    n_columns: int  # afterwards
    read: torch.Tensor  # (rows, heads, columns)
    write: torch.Tensor  # (written positions, heads)
    written: torch.Tensor | None  # which of rows * n positions they are; None: all
    padding: torch.Tensor | None  # (rows, 1, columns, 1), where the rectangle has no token
    lengths_before: list[int]
    layers_done: set[int] = field(default_factory=set)


class Rows:
    """Sequences of one batch; their pool is a TorchPool of the layout HND."""

    def __init__(
        self, pool: TorchPool, manager: BlockManager, namespace: int, shares: bool
    ) -> None:
        self.pool, self.manager, self.namespace, self.shares = pool, manager, namespace, shares
        self.seqs: list[Sequence] = []
        self.pads: list[int] = []
        self.first_written: list[int] = []
        self.n_columns = 0
        self.n_skipped = 0  # columns that came from the prefix index
        self.private = False  # the values are not a function of the tokens: nothing is findable
        self.closed = False
        self._plan: _Plan | None = None
        self._flat = pool.slab.view(-1, pool.head_dim)

    # ---- life ----------------------------------------------------------------------------------

    def open(self, prompts: list[NDArray[np.int64]], pads: list[int], private: bool) -> None:
        """Sequences for prompts, all or none, with what the prefix index has of them."""
        self.private = private
        seqs: list[Sequence] = []
        try:
            for prompt in prompts:
                seq = self.manager.allocate(
                    prompt, namespace=self.namespace, max_cached_tokens=0 if private else None
                )
                seqs.append(seq)
        except PoolFull as e:
            self.manager.free(seqs)
            raise self._full(e, len(prompts), max(map(len, prompts))) from None
        except BaseException:
            self.manager.free(seqs)
            raise
        self.seqs, self.pads = seqs, pads
        self.first_written = [seq.n_cached for seq in seqs]

    def skip_cached(self, n_columns: int) -> None:
        """Begins behind the columns that every row has; the last one is always computed."""
        have = [pad + seq.n_cached for pad, seq in zip(self.pads, self.seqs, strict=True)]
        self.n_columns = self.n_skipped = max(0, min(*have, n_columns - 1)) if have else 0

    def clear(self) -> None:
        """Gives all blocks back."""
        seqs = [seq for seq in self.seqs if not seq.is_freed]  # closing the manager freed them
        if seqs:
            self.manager.free(seqs)
        self.seqs, self.pads, self.first_written = [], [], []
        self.n_columns = self.n_skipped = 0
        self.private = False
        self._plan = None

    def fork(self) -> Rows:
        """The same rows over the same blocks."""
        self._settle()
        rows = Rows(self.pool, self.manager, self.namespace, self.shares)
        rows.seqs = _forks(self.seqs)
        rows.pads, rows.first_written = list(self.pads), list(self.first_written)
        rows.n_columns, rows.n_skipped = self.n_columns, self.n_skipped
        rows.private, rows.closed = self.private, self.closed
        return rows

    def select(self, indices: Iterable[int]) -> None:
        """The batch becomes these rows: forked if there more than once, freed if not at all.

        Raises:
            InvalidArgument: an index is out of range; nothing has changed.
        """
        self._settle()
        wanted = list(indices)
        for i in wanted:
            if not 0 <= i < len(self.seqs):
                raise InvalidArgument(f"row {i} is out of range: the cache has {len(self.seqs)}")
        again = [i for k, i in enumerate(wanted) if i in wanted[:k]]
        forks = iter(_forks([self.seqs[i] for i in again]))
        kept: set[int] = set()
        seqs = [next(forks) if i in kept or kept.add(i) else self.seqs[i] for i in wanted]  # type: ignore[func-returns-value]
        self.manager.free([seq for i, seq in enumerate(self.seqs) if i not in kept])
        self.seqs = seqs
        self.pads = [self.pads[i] for i in wanted]
        self.first_written = [self.first_written[i] for i in wanted]
        if not wanted:
            self.n_columns = self.n_skipped = 0

    def crop(self, n_columns: int) -> None:
        """Cuts every row to its first n_columns columns."""
        self._settle()
        if n_columns >= self.n_columns:
            return
        for i, (seq, pad) in enumerate(zip(self.seqs, self.pads, strict=True)):
            length = max(0, n_columns - pad)
            seq.truncate(min(len(seq), length))
            self.first_written[i] = min(self.first_written[i], length)
        self.n_columns = n_columns
        self.n_skipped = min(self.n_skipped, n_columns)

    # ---- a forward pass ------------------------------------------------------------------------

    def begin(self, forward: Forward) -> None:
        """Blocks for the tokens that come, and where their values go.

        Raises:
            PoolFull: not enough blocks; the rows are as before.
            InvalidArgument: closed; other tokens than the cache was opened for; another number of
                rows; positions or a mask that do not fit a prefix that was taken over.
        """
        if self.closed:
            raise InvalidArgument("the cache is closed")
        self._settle()
        plain = self.shares and forward.plain and forward.tokens is not None
        again = plain and self._begins_again(forward)
        first = 0 if again else self.n_columns
        last = first + forward.n
        if not self.seqs:
            pads = _pads(forward.mask, forward.n_rows, last)
            private = not plain or pads is None or not _canonical(forward, pads, first)
            pads = pads if pads is not None else [0] * forward.n_rows
            self.open([_tokens(forward, i)[pad:] for i, pad in enumerate(pads)], pads, private)
        else:
            self._expand(forward.n_rows)
            pads = _pads(forward.mask, forward.n_rows, last)
            if not (plain and pads == self.pads and _canonical(forward, self.pads, first)):
                self._make_private()
        before = [len(seq) for seq in self.seqs]
        self._append(forward, first)
        if again:  # what is there is computed, not written: others may share it
            for i, (length, pad) in enumerate(zip(before, self.pads, strict=True)):
                there = min(length, max(0, self.n_columns - pad))
                self.first_written[i] = max(self.first_written[i], there)
            self.n_columns = self.n_skipped = 0
        self._plan = self._make_plan(first, last, before)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one layer's new K and V ``(rows, heads, n, head_dim)``; all of its K and V."""
        plan, pool = self._plan, self.pool
        if plan is None or layer in plan.layers_done:
            raise InvalidArgument(
                "the cache was not told what is computed: call the model that its store was made "
                "for, not a part of it, and with cache= or past_key_values="
            )
        n = plan.n_columns - self.n_columns
        expected = (len(self.seqs), pool.n_kv_heads, n, pool.head_dim)
        if keys.shape != expected or values.shape != expected:
            raise ShapeMismatch(
                f"layer {layer}: expected K and V {expected}, found {tuple(keys.shape)} and "
                f"{tuple(values.shape)}"
            )
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise InvalidArgument("a PagedCache has no gradients: run under torch.no_grad()")
        plane = pool.n_kv_heads * pool.block_tokens
        found = []
        for kind, new in enumerate((keys, values)):
            # The plan is for K of layer 0; the others are some flat rows further on.
            flat = self._flat[(2 * layer + kind) * plane :]
            source = new.detach().transpose(1, 2).flatten(0, 1)  # (rows * n, heads, head_dim)
            if plan.written is not None:
                source = source.index_select(0, plan.written.to(source.device))
            source = source.reshape(-1, pool.head_dim).to(flat)
            with torch.no_grad():
                flat.index_copy_(0, plan.write.flatten(), source)
                all_rows = flat.index_select(0, plan.read.flatten()).view(*plan.read.shape, -1)
            if plan.padding is not None:
                all_rows.masked_fill_(plan.padding, 0)  # what lies there may be no number
            found.append(all_rows.to(new))
        plan.layers_done.add(layer)
        if len(plan.layers_done) == pool.n_layers:
            self._finish(plan)
        return found[0], found[1]

    # ---- inside --------------------------------------------------------------------------------

    def _finish(self, plan: _Plan) -> None:
        self.n_columns = plan.n_columns
        self._plan = None
        if not self.private:
            self.manager.commit(self.seqs, [max(0, self.n_columns - pad) for pad in self.pads])

    def _settle(self) -> None:
        """A forward pass that ended half-way leaves nothing."""
        if self._plan is not None:
            for seq, length in zip(self.seqs, self._plan.lengths_before, strict=True):
                seq.truncate(length)
            self._plan = None

    def _begins_again(self, forward: Forward) -> bool:
        """Whether the tokens are those from column 0 on. Assisted and prompt-lookup decoding begin
        with the whole prompt, whatever the cache has of it."""
        return (
            not self.private
            and self.n_columns > 0
            and forward.n_rows == len(self.seqs)
            and forward.positions is not None
            and not _canonical(forward, self.pads, self.n_columns)
            and _canonical(forward, self.pads, 0)
        )

    def _make_private(self) -> None:
        if self.n_skipped or any(seq.n_cached for seq in self.seqs):
            raise InvalidArgument(
                "the cache took a prefix over, which this forward pass does not continue: expected "
                "tokens, their plain attention mask and positions that count them from 0; open the "
                "cache without a prompt for anything else"
            )
        self.private = True

    def _expand(self, n_rows: int) -> None:
        """generate repeats every row for beams and return sequences, before it begins."""
        have = len(self.seqs)
        if n_rows == have:
            return
        if n_rows % have or self.n_columns > self.n_skipped:
            raise InvalidArgument(f"expected {have} rows, found {n_rows}")
        repeats = n_rows // have
        self.select(i // repeats for i in range(n_rows))
        for i in range(n_rows):
            if i % repeats:  # the first of them writes for all
                self.first_written[i] = len(self.seqs[i])

    def _append(self, forward: Forward, first: int) -> None:
        new: list[NDArray[np.int64]] = []
        for i, (seq, pad) in enumerate(zip(self.seqs, self.pads, strict=True)):
            tokens = _tokens(forward, i)[max(0, pad - first) :]
            position = max(0, first - pad)
            known = tokens[:0]
            if position < len(seq):  # of the prompt that it was opened for
                known = seq.tokens[position : position + len(tokens)].astype(np.int64)
            if forward.tokens is not None and not self.private:
                for k in np.flatnonzero(known != tokens[: len(known)])[:1]:
                    raise InvalidArgument(
                        f"row {i}: the cache was opened with token {known[k]} at position "
                        f"{position + k}, found {tokens[k]}"
                    )
            new.append(tokens[len(known) :])
        before = [len(seq) for seq in self.seqs]
        try:
            if all(len(tokens) == 1 for tokens in new):
                self.manager.append(self.seqs, np.concatenate(new))
            else:
                for seq, tokens in zip(self.seqs, new, strict=True):
                    seq.append(tokens)
        except BaseException as e:
            for seq, length in zip(self.seqs, before, strict=True):
                seq.truncate(length)
            if isinstance(e, PoolFull):
                raise self._full(e, len(before), max(before)) from None
            raise

    def _make_plan(self, first: int, last: int, before: list[int]) -> _Plan:
        pool, device = self.pool, self.pool.device
        size, heads = pool.block_tokens, pool.n_kv_heads
        table = self.manager.block_tables(self.seqs).astype(np.int64)
        pads = np.array(self.pads, np.int64)[:, None]
        position = np.arange(last) - pads  # (rows, columns), below 0 where there is padding
        padding = position < 0
        if table.shape[1] == 0:  # nothing but padding so far
            table = np.zeros((len(table), 1), np.int64)
        block = np.take_along_axis(table, np.where(padding, 0, position // size), axis=1)
        block = np.where(padding, 0, block)
        flat = block * (2 * pool.n_layers * heads * size) + np.where(padding, 0, position % size)
        head = torch.arange(heads, device=device) * size
        at = torch.from_numpy(flat).to(device)
        new = position[:, first:]
        writes = (new >= 0) & (new >= np.array(self.first_written, np.int64)[:, None])
        return _Plan(
            n_columns=last,
            read=at[:, None, :] + head[:, None],
            write=at[:, first:][torch.from_numpy(writes).to(device)][:, None] + head,
            written=None if writes.all() else torch.from_numpy(np.flatnonzero(writes)),
            padding=(
                torch.from_numpy(padding).to(device)[:, None, :, None] if padding.any() else None
            ),
            lengths_before=before,
        )

    def _full(self, e: PoolFull, n_rows: int, length: int) -> PoolFull:
        return PoolFull(
            f"{e}; {n_rows} rows of up to {length} tokens in a pool of {self.pool.n_blocks} blocks "
            f"of {self.pool.block_tokens}: it is too small, or caches that are done are still open"
        )


def as_prompts(
    tokens: NDArray[np.int64], mask: NDArray[Any] | None
) -> tuple[list[NDArray[np.int64]], list[int]]:
    """The rows of a batch without their padding, and how much of it each has.

    Raises:
        InvalidArgument: padding that is not on the left.
    """
    pads = _pads(mask, *tokens.shape)
    if pads is None:
        raise InvalidArgument(
            "attention_mask: expected one value for each token, 0 for padding on the left and 1 "
            "behind it (a tokenizer with padding_side='left')"
        )
    return [row[pad:] for row, pad in zip(tokens, pads, strict=True)], pads


def _pads(mask: NDArray[Any] | None, n_rows: int, n_columns: int) -> list[int] | None:
    """Columns of padding on the left of each row; None when the mask is not just that."""
    if mask is None:
        return [0] * n_rows
    if mask.shape != (n_rows, n_columns):
        return None
    kept = mask != 0
    pads = n_columns - kept.sum(axis=1)
    return pads.tolist() if np.array_equal(kept, np.arange(n_columns) >= pads[:, None]) else None


def _canonical(forward: Forward, pads: list[int], first: int) -> bool:
    """Whether tokens are at the positions that count them from 0, whatever the padding."""
    if forward.positions is None:
        return not any(pads)  # a model then counts columns
    expected = np.arange(first, first + forward.n) - np.array(pads, np.int64)[:, None]
    found = forward.positions
    if found.shape not in ((forward.n_rows, forward.n), (1, forward.n)):
        return False
    return bool(np.all((found == expected) | (expected < 0)))


def _tokens(forward: Forward, row: int) -> NDArray[np.int64]:
    tokens: NDArray[np.int64] = (
        np.zeros(forward.n, np.int64) if forward.tokens is None else forward.tokens[row]
    )
    return tokens


def _forks(seqs: list[Sequence]) -> list[Sequence]:
    """A fork of each, or none."""
    forks: list[Sequence] = []
    try:
        for seq in seqs:
            fork = seq.fork()
            forks.append(fork)
    except BaseException:
        for fork in forks:
            fork.free()
        raise
    return forks
