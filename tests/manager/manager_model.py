"""What a block manager does, in dicts and lists. Written from the documentation, not from the code;
slow and obvious. Blocks are objects, so no id is ever chosen here."""

from __future__ import annotations

from dataclasses import dataclass, field


class Full(Exception):
    pass


@dataclass(eq=False)
class Block:
    holders: int = 0
    name: tuple[int, tuple[int, ...]] | None = None  # (root, the whole prefix), once registered
    key: tuple[int, int, tuple[int, ...]] | None = None  # (root, epoch, prefix), while findable
    id: int | None = None  # what the real manager calls it, once seen


@dataclass(eq=False)
class Seq:
    root: int
    epoch: int
    tokens: list[int]
    blocks: list[Block] = field(default_factory=list)
    n_cached: int = 0
    n_computed: int = 0


class Model:
    def __init__(self, n_blocks: int, block_tokens: int, watermark: int, caching: bool) -> None:
        self.B, self.watermark, self.caching = block_tokens, watermark, caching
        self.n_blocks = self.free = n_blocks
        self.cached: list[Block] = []  # the next to be evicted first
        self.held: set[Block] = set()
        self.index: dict[tuple[int, int, tuple[int, ...]], Block] = {}
        self.names: dict[tuple[int, tuple[int, ...]], Block] = {}
        self.epochs: dict[int, int] = {}
        self.seqs: list[Seq] = []
        self.stats = dict.fromkeys(
            ("prompt_tokens", "hit_tokens", "hit_blocks", "stored", "removed", "duplicates",
             "collisions", "unproven", "copies", "refused", "events_lost", "evictions",
             "peak_seqs", "peak_used"), 0
        )  # fmt: skip

    # ---- blocks --------------------------------------------------------------------------------

    def room(self) -> int:
        return self.free + len(self.cached)

    def n_blocks_of(self, n_tokens: int) -> int:
        return -(-n_tokens // self.B)

    def unfind(self, block: Block) -> None:
        assert block.key is not None
        del self.index[block.key]
        block.key = None
        self.stats["removed"] += 1

    def unname(self, block: Block) -> None:
        if block.key is not None:
            self.unfind(block)
        if block.name is not None:
            del self.names[block.name]
            block.name = None

    def take(self, n: int) -> list[Block]:
        assert n <= self.room()
        taken = []
        for _ in range(n):
            if self.free:
                self.free -= 1
            else:
                self.unname(self.cached.pop(0))
                self.stats["evictions"] += 1
            taken.append(Block(holders=1))
        self.held.update(taken)
        self.stats["peak_used"] = max(self.stats["peak_used"], len(self.held))
        return taken

    def hold(self, block: Block) -> None:
        if block.holders == 0:
            self.cached.remove(block)
            self.held.add(block)
        block.holders += 1

    def drop(self, block: Block) -> None:
        block.holders -= 1
        if block.holders == 0:
            self.held.remove(block)
            if block.key is not None:
                self.cached.append(block)
            else:
                self.unname(block)
                self.free += 1

    # ---- requests ------------------------------------------------------------------------------

    def epoch(self, root: int) -> int:
        return self.epochs.get(root, 0)

    def hits(self, tokens: list[int], root: int, max_cached: int | None, last: bool) -> list[Block]:
        if not self.caching or not tokens:
            return []
        limit = (len(tokens) if last else len(tokens) - 1) // self.B
        if max_cached is not None:
            limit = min(limit, max_cached // self.B)
        found = []
        for i in range(limit):
            block = self.index.get((root, self.epoch(root), tuple(tokens[: (i + 1) * self.B])))
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(
        self, tokens: list[int], root: int, max_cached: int | None, last: bool
    ) -> tuple[bool, int, int]:
        if self.n_blocks_of(len(tokens)) > self.n_blocks:  # refused unread
            return False, 0, self.n_blocks_of(len(tokens))
        hits = self.hits(tokens, root, max_cached, last)
        new = self.n_blocks_of(len(tokens)) - len(hits)
        leaving = sum(block.holders == 0 for block in hits)
        return new + leaving + self.watermark <= self.room(), len(hits) * self.B, new

    def allocate(
        self, tokens: list[int], root: int, max_cached: int | None, last: bool, resumed: bool
    ) -> Seq:
        self.epochs.setdefault(root, 0)
        fits, n_cached, new = self.can_allocate(tokens, root, max_cached, last)
        if not fits:
            self.stats["refused"] += 1
            raise Full
        hits = self.hits(tokens, root, max_cached, last)
        for block in hits:
            self.hold(block)
        seq = Seq(root, self.epoch(root), list(tokens), hits + self.take(new), n_cached, n_cached)
        if not resumed:
            self.stats["prompt_tokens"] += len(tokens)
            self.stats["hit_tokens"] += n_cached
            self.stats["hit_blocks"] += len(hits)
        return self.alive(seq)

    def alive(self, seq: Seq) -> Seq:
        self.seqs.append(seq)
        self.stats["peak_seqs"] = max(self.stats["peak_seqs"], len(self.seqs))
        return seq

    def must_copy(self, seq: Seq) -> bool:
        """Whether the next token falls into a block that this sequence may not write."""
        if len(seq.tokens) % self.B == 0:
            return False
        return seq.blocks[-1].name is not None or seq.blocks[-1].holders > 1

    def copy_tail(self, seq: Seq, fresh: Block) -> tuple[Block, Block]:
        old, seq.blocks[-1] = seq.blocks[-1], fresh
        self.drop(old)
        self.stats["copies"] += 1
        return old, fresh

    def append(self, seq: Seq, tokens: list[int]) -> list[tuple[Block, Block]]:
        if not tokens:
            return []
        copy = self.must_copy(seq)
        new = self.n_blocks_of(len(seq.tokens) + len(tokens)) - len(seq.blocks)
        if new + copy > self.room():
            self.stats["refused"] += 1
            raise Full
        fresh = self.take(new + copy)
        copies = [self.copy_tail(seq, fresh.pop())] if copy else []
        seq.blocks += fresh
        seq.tokens += tokens
        return copies

    def append_batch(self, seqs: list[Seq], tokens: list[int]) -> list[tuple[Block, Block]]:
        """As if one after the other, but all or nothing."""
        left = {id(s.blocks[-1]): s.blocks[-1].holders for s in seqs if s.blocks}
        copying = []
        new = 0
        for seq in seqs:
            if len(seq.tokens) % self.B == 0:
                new += 1
            elif seq.blocks[-1].name is not None or left[id(seq.blocks[-1])] > 1:
                left[id(seq.blocks[-1])] -= 1
                copying.append(seq)
        if new + len(copying) > self.room():
            self.stats["refused"] += 1
            raise Full
        fresh = self.take(new + len(copying))
        copies = [self.copy_tail(seq, fresh.pop()) for seq in copying]
        for seq, token in zip(seqs, tokens, strict=True):
            if len(seq.tokens) % self.B == 0:
                seq.blocks.append(fresh.pop())
            seq.tokens.append(token)
        return copies

    def commit(self, seq: Seq, n_computed: int) -> None:
        assert n_computed <= len(seq.tokens)
        first, end = seq.n_computed // self.B, n_computed // self.B
        seq.n_computed = max(seq.n_computed, n_computed)
        for i in range(first, end):
            block = seq.blocks[i]
            if block.name is not None or not self.caching or seq.epoch != self.epoch(seq.root):
                continue
            prefix = tuple(seq.tokens[: (i + 1) * self.B])
            if (seq.root, prefix) in self.names:
                known = (seq.root, seq.epoch, prefix) in self.index
                self.stats["duplicates" if known else "unproven"] += 1
                continue
            block.name, block.key = (seq.root, prefix), (seq.root, seq.epoch, prefix)
            self.names[block.name] = self.index[block.key] = block
            self.stats["stored"] += 1

    def fork(self, seq: Seq) -> Seq:
        for block in seq.blocks:
            block.holders += 1
        return self.alive(
            Seq(seq.root, seq.epoch, list(seq.tokens), list(seq.blocks), seq.n_cached,
                seq.n_computed)
        )  # fmt: skip

    def truncate(self, seq: Seq, n: int) -> None:
        while len(seq.blocks) > self.n_blocks_of(n):
            self.drop(seq.blocks.pop())
        del seq.tokens[n:]
        seq.n_cached, seq.n_computed = min(seq.n_cached, n), min(seq.n_computed, n)

    def release(self, seq: Seq) -> None:
        self.truncate(seq, 0)
        self.seqs.remove(seq)

    # ---- the index -----------------------------------------------------------------------------

    def reset(self, root: int | None) -> None:
        for r in self.epochs if root is None else [root]:
            if r in self.epochs:
                self.epochs[r] += 1
        for block in [b for b in self.index.values() if root is None or b.key[0] == root]:
            self.forget(block)

    def forget(self, block: Block) -> None:
        if block.key is not None:
            self.unfind(block)
            if block.holders == 0:
                self.cached.remove(block)
                self.unname(block)
                self.free += 1
