// Docstrings of BlockManager and Sequence. As in docs.hpp: shapes, dtypes, side effects, what is
// raised, where it comes from, and an example that tests/test_doctests.py runs.
#pragma once

namespace kvpool::manager_docs {

constexpr const char *manager =
    R"(Turns prompts into block tables: one call for one request, and no forged hit.

A sequence has tokens and blocks. A new prompt takes the longest prefix of full blocks that is
findable in the manager's index, and new blocks for the rest; ``commit`` makes blocks findable, once
their K and V are written::

    tokens --> proofs, once --> longest prefix held + blocks for the rest     allocate
           --> you compute K and V into the blocks
           --> full blocks become findable                                    commit
           --> next tokens, next blocks, copies of shared ones                append
           --> blocks go back, tail first                                     free

Args:
    pool: the Pool to take blocks from. It has one manager at a time.
    prefix_cache: ``"hash"``, or ``"none"``: nothing is ever findable, every block is private.
    watermark: blocks that ``allocate`` leaves alone, for sequences that are already running.
    events: record what becomes findable and what stops being so, for ``drain_events``.
    tiers: where blocks live on that the pool evicts: a ``kvpool.tiers.TierStack``, or a list of
        tiers and URLs for one, fastest first (``["disk:/var/cache/kv?size=10GiB"]``). ``commit``
        then copies full blocks for them, and ``allocate`` looks there for what the pool does not
        have, up to a deadline. The manager closes them. docs/tiers.md.

Hits are verified. The format's block hash (FNV-1a) can be collided on purpose by whoever chooses a
prompt; here it only names blocks for other processes. Prefixes are found by a keyed 122-bit hash of
everything from the first token on, with a secret of the process: a forged prompt misses, and is
counted in ``stats.collisions``.

Tokens are lists, tuples, ranges or 1-D integer arrays with values from 0 to 2**32 - 1 (a uint32
array is read in place). A call that raises has changed nothing, the order of eviction included.
All methods may be called from many threads at once: they run under the pool's lock, which is waited
for without the GIL. While the manager lives, take blocks from the pool and import into it through
the manager, and do not drop references that its sequences hold; reading, exporting and looking up
directly are fine, and if blocks are evicted behind its back, it notices and forgets what nobody
holds.

The end: ``close`` (or the end of a ``with`` block) frees all sequences; so does closing the pool.
Without either, the manager ends when it and all of its sequences are dropped, in any order.

Raises:
    InvalidArgument: watermark of n_blocks or more, an unknown prefix_cache, a closed pool.
    Busy: the pool has a manager already.
    MemoryError: no memory for 40 bytes a block.

Source: seed sections 2.3 and 6 (L10.2, L10.4); Kwon et al. (SOSP 2023), section 4.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> a = mgr.allocate(range(1, 11))               # 10 tokens: 3 blocks
>>> pool.slab[a.blocks, 0, 0] = 1.0              # compute K and V ...
>>> a.commit()                                   # ... and say so: 2 full blocks are findable
>>> a.free()
>>> b = mgr.allocate([*range(1, 9), 99, 98, 97])
>>> b.n_cached                                   # tokens that need no prefill
8
>>> round(mgr.stats.hit_rate, 3)
0.381
>>> mgr.close()
)";

constexpr const char *allocate =
    R"(A Sequence for a prompt: the longest findable prefix, then new blocks; all or nothing.

At most ``(len(tokens) - 1) // block_tokens`` blocks are taken from the index, since the last token
is always left to compute. Hits are taken before anything is evicted. O(len(tokens)); the GIL is
released for very long prompts.

Args:
    tokens: the prompt. Empty is allowed: a sequence without blocks.
    namespace: the parent of the first block. 0, or a root hash that keeps prompts of another model,
        adapter or tenant apart.
    max_cached_tokens: take at most so many tokens from the index.
    resumed: a preempted request comes back; it does not count in prompt_tokens and hit_tokens.
    match_last: a prompt that ends with a block may hit that block too (nothing left to compute).

Raises:
    PoolFull: hits that are cached + new blocks + watermark exceed the free and cached blocks; the
        text has the numbers.
    InvalidArgument: a token or argument is out of range, or the manager is closed.
    MemoryError: no memory for the sequence's table.

Source: seed section 6 (L10.1, L10.4).

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([5, 6, 7, 8, 9])
>>> seq
Sequence(n_tokens=5, n_cached=0, n_computed=0, n_blocks=2)
>>> seq.blocks
array([0, 1], dtype=uint32)
>>> mgr.allocate(range(100))
Traceback (most recent call last):
kvpool.errors.PoolFull: tl_kv_seq_allocate: 25 blocks needed (25 new, 0 cached hits, watermark 0), \
6 are free or cached
>>> seq.free()
)";

constexpr const char *can_allocate =
    R"(What ``allocate`` would do with a prompt now, changing nothing.

Returns Fit(fits, n_cached, n_new): whether it would succeed, the tokens it would take from the
index and the blocks it would allocate, in both cases. Arguments as for ``allocate``. O(len(tokens)).

Raises:
    InvalidArgument: as ``allocate``.
    MemoryError: as ``allocate``.

Source: seed section 6 (L10.2, admission by free blocks).

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool, watermark=2)
>>> mgr.can_allocate(range(24)), mgr.can_allocate(range(25)).fits
(Fit(fits=True, n_cached=0, n_new=6), False)
)";

constexpr const char *append =
    R"(A decode step: appends ``tokens[i]`` to ``seqs[i]``, for all sequences or for none.

``seqs`` is a list or tuple of sequences, each there once; ``tokens`` a row of as many ids. New
blocks are taken where the last one is full, and a last block that is shared, or registered and
cut, is replaced by a copy: the contents are copied, and the returned list has ``(source,
destination)`` of each copy, for an engine that keeps more than this pool's values in step. Of
several forks that share a block, all but one copy.

Raises:
    PoolFull: not enough blocks; the text has the numbers.
    InvalidArgument: a sequence is freed, another manager's, or there twice; a token is out of
        range; the lengths differ.
    MemoryError: no memory for longer tables.

Source: seed sections 2.2 and 6 (L10.1).

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> parent = mgr.allocate([1, 2])
>>> child = parent.fork()
>>> mgr.append([parent, child], [3, 4])          # one of the two writes into a copy
[(0, 1)]
>>> parent.blocks, child.blocks
(array([1], dtype=uint32), array([0], dtype=uint32))
>>> mgr.free([parent, child])
)";

constexpr const char *commit =
    R"(``Sequence.commit`` for many: ``n_computed[i]`` for ``seqs[i]``, or all tokens of each.

The whole row is checked first.

Raises:
    InvalidArgument: a sequence is freed, another manager's, or there twice; more tokens than a
        sequence has; the lengths differ.

Source: seed section 2.3.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seqs = [mgr.allocate([1, 2, 3, 4, 5]), mgr.allocate([6, 7])]
>>> mgr.commit(seqs)
>>> mgr.stats.n_findable
1
>>> mgr.free(seqs)
)";

constexpr const char *free =
    R"(Frees many sequences, in order: ``Sequence.free`` for each, for all or for none.

Raises:
    InvalidArgument: a sequence is freed, another manager's, or there twice.

Source: seed section 2.1.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seqs = [mgr.allocate([1, 2, 3]), mgr.allocate([4, 5])]
>>> mgr.free(seqs)
>>> pool.stats.used, seqs[0].is_freed
(0, True)
)";

constexpr const char *block_tables =
    R"(The blocks of many sequences as one table, for a kernel: int32 ``(n, columns)``.

Row i has the block ids of ``seqs[i]`` times ``scale``, and -1 behind its last block. Without
``out`` the table is new and as wide as the longest sequence needs. ``out`` is the caller's int32
C-contiguous array with one row for each sequence (a slice of a larger one: ``buffer[:n]``) and at
least as many columns; it is filled and returned. Where a kernel sees the slab as pages of one
layer's K or V, ``scale=2 * n_layers`` gives the page of layer 0's K.

Raises:
    InvalidArgument: ``out`` has too few columns, another number of rows, another dtype or layout; a
        product exceeds int32 or ``scale`` is 0; a sequence is freed or another manager's. What
        ``out`` then holds is undefined.

Source: seed section 6 (L9.4).

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seqs = [mgr.allocate(range(9)), mgr.allocate([1, 2])]
>>> mgr.block_tables(seqs)
array([[ 0,  1,  2],
       [ 3, -1, -1]], dtype=int32)
>>> buffer = np.empty((64, 4), np.int32)         # for any batch of up to 64
>>> mgr.block_tables(seqs, out=buffer[:2])[1]
array([ 3, -1, -1, -1], dtype=int32)
>>> mgr.free(seqs)
)";

constexpr const char *slot_mapping =
    R"(Where the K and V of positions go, for many sequences: int64, one row after the other.

For ``seqs[i]`` the slots of positions ``first[i]`` to ``first[i] + n[i] - 1``: ``block *
block_tokens + offset`` for each, and ``pad`` at and past its length. ``first`` and ``n`` are one
number for all, or one for each. The result has ``sum(n)`` elements.

Raises:
    InvalidArgument: a sequence is freed or another manager's; a number is negative; lengths differ.
    MemoryError: no memory for so many slots.

Source: Kwon et al. (SOSP 2023), section 4.3.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seqs = [mgr.allocate(range(5)), mgr.allocate([1, 2])]
>>> mgr.slot_mapping(seqs, mgr.seq_lens(seqs) - 1, 1)      # of each one's last token
array([4, 9])
>>> mgr.free(seqs)
)";

constexpr const char *seq_lens = R"(The lengths of many sequences: int32 ``(n,)``.

Raises:
    InvalidArgument: a sequence is freed or another manager's, or longer than int32 holds.

Source: seed section 6 (L9.4, ctx_lens).

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate(range(9))
>>> mgr.seq_lens([seq])
array([9], dtype=int32)
>>> seq.free()
)";

constexpr const char *reset =
    R"(Ends all hits on what was computed so far, as after a change of weights.

Sequences that are alive go on, but their later commits do not become findable. Pins end. With
``namespace``, only what was computed under that root. O(n_blocks).

Raises:
    InvalidArgument: ``namespace`` is no integer from 0 to 2**64 - 1, or the manager is closed.

Source: seed section 6 (L10.4).

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
...     seq.commit()
>>> mgr.can_allocate([1, 2, 3, 4, 5]).n_cached
4
>>> mgr.reset()
>>> mgr.can_allocate([1, 2, 3, 4, 5]).n_cached
0
)";

constexpr const char *evict =
    R"(Makes blocks unfindable now: one id or a row; blocks that are not findable are left alone.

A cached block becomes free. One that somebody holds stays with its holders, and becomes free and
not cached when the last one lets go.

Raises:
    InvalidArgument: an id is out of range; no block has changed.

Source: seed section 2.1.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
...     seq.commit()
...     first = seq.blocks[0]
>>> mgr.evict(first)
>>> pool.stats
Stats(free=8, used=0, cached=0, evictions=0)
)";

constexpr const char *import_ =
    R"(``Pool.import_`` for a managed pool: uint32 ``(n,)``, blocks that the caller holds.

They carry names but no proof of what was computed into them: nothing is findable before ``adopt``
has seen the tokens. To drop them instead: ``mgr.pool.unref(ids)``. Where the tokens are at hand,
``import_sequence`` does it all, and checks more.

``named=False`` leaves the names out as well. The blocks are then the caller's alone: nobody can find
one in the pool before ``adopt``, and one that is let go is free and not cached. That is for bytes from
a sender whose word for a name is no proof, while the tokens are still to come.

Raises:
    CorruptEnvelope: the bytes break the format's rules.
    ShapeMismatch: an envelope made for another pool.
    PoolFull: fewer blocks are free or cached than it holds.
    InvalidArgument: no contiguous buffer.

Source: seed sections 2.4 and 6 (L10.6).

>>> pools = [kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8) for _ in "ab"]
>>> a, b = [kvpool.BlockManager(pool) for pool in pools]
>>> with a.allocate([1, 2, 3, 4, 5]) as seq:
...     seq.commit()
...     envelope = seq.export()
>>> ids = b.import_(envelope)
>>> b.can_allocate([1, 2, 3, 4, 9]).n_cached
0
>>> pools[1].unref(ids)
)";

constexpr const char *import_sequence =
    R"(A Sequence from an envelope and the tokens that its blocks were computed from.

The names in the envelope must be those that the tokens give, each block must hold as many positions
as its tokens, and the envelope must keep to the format: all of it is checked before a block is
taken. All tokens count as computed, and the full blocks become findable, as by ``commit``. A block
that the envelope gives no name is taken on trust. The GIL is released.

Raises:
    CorruptEnvelope: the bytes break the format's rules, or are not of these tokens.
    ShapeMismatch: an envelope made for another pool.
    PoolFull: fewer blocks are free or cached than it holds.
    InvalidArgument: a token is out of range, no contiguous buffer.
    MemoryError: no memory for the sequence's table; blocks may have been evicted.

Source: seed sections 2.4 and 6 (L10.6).

>>> pools = [kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8) for _ in "ab"]
>>> a, b = [kvpool.BlockManager(pool) for pool in pools]
>>> with a.allocate([1, 2, 3, 4, 5]) as seq:
...     seq.commit()
...     tokens, envelope = seq.tokens, seq.export()
>>> with b.import_sequence(envelope, tokens) as seq:
...     seq.n_computed
5
>>> b.can_allocate([1, 2, 3, 4, 9]).n_cached
4
>>> b.import_sequence(envelope, [1, 2, 3, 0, 5])
Traceback (most recent call last):
kvpool.errors.CorruptEnvelope: import_sequence: block 0 is named ...
)";

constexpr const char *load =
    R"(A Sequence that ``Sequence.save`` wrote, to go on with where it was.

``tokens`` are those of the sequence: first the ones whose K and V are in the file, all of them, then
any that are still to be computed (the last token that was sampled, usually). The prefix that is
findable here already is taken from the index, the rest from the file, and what is full becomes
findable, as by ``commit``. ``n_computed`` is then what it was.

An envelope does not say which model made it. The file has the namespace that the sequence was
allocated under, and this one must be the same: with one namespace for each model and revision
(``kvpool.namespace``) a file of another model is refused. In namespace 0 only the dimensions tell
models apart.

The file is read twice: the first time everything is checked, and only then a block is taken. What
is refused changes nothing, the order of eviction included.

Raises:
    CorruptEnvelope: no file of ``save``, damaged or cut.
    ShapeMismatch: made for a pool of other dimensions.
    InvalidArgument: other tokens or another namespace than those in the file.
    PoolFull: not enough blocks.
    StorageError: the file cannot be read; or it changed between the two times: then everything is
        given back, though cached blocks may have been evicted.

Source: seed sections 2.4 and 6; docs/envelopes.md.

>>> import os, tempfile
>>> pools = [kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8) for _ in "ab"]
>>> a, b = [kvpool.BlockManager(pool) for pool in pools]
>>> path = os.path.join(tempfile.mkdtemp(), "session.tlks")
>>> with a.allocate([1, 2, 3, 4, 5, 6]) as seq:
...     seq.commit(5)
...     seq.save(path)
>>> with b.load(path, [1, 2, 3, 4, 5, 6]) as seq:
...     seq.n_tokens, seq.n_computed
(6, 5)
>>> b.can_allocate([1, 2, 3, 4, 9]).n_cached
4
>>> b.load(path, [1, 2, 3, 4, 7, 6])
Traceback (most recent call last):
kvpool.errors.InvalidArgument: load: tokens: other than the 5 ...
)";

constexpr const char *find =
    R"(The findable blocks of these names: int64 ``(n,)``, block ids, -1 where there is none.

``hashes`` is a row, as ``block_hashes`` gives it. Only blocks in the prefix index count, those whose
content is proven; a block that merely carries a name (imported and not adopted, of before a reset) is
none, where ``pool.lookup`` would find it. Nothing is changed; with ``take`` each block found has one
more reference, to be given back with ``pool.unref`` or to ``adopt``. A name can be forged by whoever
chose the prompt, so what was taken by name has to be among ``adopt``'s ``proven``.

Raises:
    InvalidArgument: a hash is no integer from 0 to 2**64 - 1, or the manager is closed.

Source: seed section 6 (L10.6).

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
...     seq.commit()
>>> names = kvpool.block_hashes([1, 2, 3, 4, 9, 9, 9, 9], block_tokens=4)
>>> mgr.find(names)
array([ 0, -1])
)";

constexpr const char *adopt =
    R"(A Sequence of blocks that the caller holds and whose K and V are computed.

``ids`` are the ``ceil(len(tokens) / block_tokens)`` blocks of ``tokens``, from ``import_`` or taken
with ``pool.lookup``. The caller's references become the sequence's, all of its tokens count as
computed, and its full blocks become findable, as by ``commit``. A full block must be registered
under the name that the tokens give it, or under none: then the tokens are taken on trust. Each
block must hold at least as many positions as its tokens.

``proven`` are positions in ``ids`` whose blocks were not brought by the caller but taken by name
(``find``): those must be findable as exactly this prefix, now. A forged name does not pass, nor a block
that nobody has proven, or that was reset since.

Raises:
    CorruptEnvelope: the blocks are not of these tokens, not full enough, or not proven.
    InvalidArgument: nobody holds a block, a block is there twice, or their number is wrong.
    MemoryError: no memory for the sequence's table.

    The references stay with the caller when it raises.

Source: seed section 6 (L10.6).

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> with mgr.allocate([1, 2, 3, 4]) as seq:
...     seq.commit()
>>> ids = pool.lookup(kvpool.block_hashes([1, 2, 3, 4], block_tokens=4))
>>> mgr.adopt(ids, [1, 2, 3, 9])
Traceback (most recent call last):
kvpool.errors.CorruptEnvelope: tl_kv_mgr_adopt: ids[0] is block 0, which is registered, but not ...
>>> mgr.adopt(ids, [1, 2, 3, 4]).free()
)";

constexpr const char *drain_events =
    R"(Takes up to ``max`` events out of the queue, oldest first; all of them without ``max``.

Returns a list of BlockEvent(number, type, hash, parent, block, tokens). The queue holds 65,536;
past that the newest are dropped and counted (``stats.events_lost``), which shows as a gap in the
numbers. Replaying all events rebuilds the set of findable hashes.

Raises:
    Unsupported: the manager was made without ``events=True``.
    InvalidArgument: ``max`` is negative, or the manager is closed.

Source: seed section 2.3 (what the prefix index holds).

>>> pool = kvpool.Pool(8, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool, events=True)
>>> with mgr.allocate([1, 2, 3]) as seq:
...     seq.commit()
>>> mgr.reset()
>>> [event.type.name for event in mgr.drain_events()]
['STORED', 'CLEARED']
)";

constexpr const char *check =
    R"(Compares the manager with itself and with its pool, and raises at the first disagreement.

Sequences, blocks and index: holders counted, lengths and tables agreeing, proofs following from
tokens, every index entry where its proof leads, fills; then ``pool.check()``. For tests and
debugging; O(n_blocks + all tokens).

Raises:
    KvPoolError: a disagreement: a bug, or references that were dropped behind its back.
    InvalidArgument: the manager is closed.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> kvpool.BlockManager(pool).check()
)";

constexpr const char *close = R"(Frees all sequences and ends the manager; again does nothing.

What was committed stays cached in the pool under its names, but the proofs are gone: another
manager of the pool does not find it. Closing the pool closes its manager.

Raises:
    Nothing.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([1, 2, 3])
>>> mgr.close()
>>> seq.is_freed, pool.stats.used
(True, 0)
)";

constexpr const char *stats =
    R"(ManagerStats: counters since the manager was made, and what it holds now. O(1).

Raises:
    InvalidArgument: the manager is closed.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> kvpool.BlockManager(pool).stats.hit_rate
0.0
)";

constexpr const char *pool = "The Pool it was made for.";
constexpr const char *closed = "True after ``close``, or after the pool's.";
constexpr const char *prefix_cache = "'hash' or 'none', as it was made.";
constexpr const char *watermark = "Blocks that ``allocate`` leaves alone.";
constexpr const char *meta_bytes =
    "Bytes allocated for blocks (40 each), sequences (as many as there were) and events; those of "
    "the pool are ``pool.meta_bytes``.";

constexpr const char *sequence =
    R"(One request: its tokens, the blocks that hold their K and V, and what is computed of them.

Made by ``BlockManager.allocate``, ``adopt`` and ``fork``. ``len`` is the number of tokens. The end
of a ``with`` block frees it. A sequence that is dropped without being freed gives its blocks back
when it is collected, with a ``ResourceWarning``. It cannot be pickled or copied: fork it, or move
it with ``export``. Sequences keep what they need alive: the pool and the manager may be dropped
before them.

Every operation on a freed sequence raises ``InvalidArgument``.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
...     len(seq), seq.n_blocks
(5, 2)
>>> seq.append(6)
Traceback (most recent call last):
kvpool.errors.InvalidArgument: the sequence is freed
)";

constexpr const char *seq_append =
    R"(Appends one token, or a row of them, and makes their slots writable.

New blocks are taken where the last one is full; a last block that is shared, or registered and cut
by ``truncate``, is replaced by a copy. Returns the copies as a list of ``(source, destination)``:
empty, or one. For a decode step of many sequences: ``BlockManager.append``.

Raises:
    PoolFull: not enough blocks; the text has the numbers.
    InvalidArgument: a token is out of range, or the sequence is freed.
    MemoryError: no memory for a longer table.

Source: seed section 2.2.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([1, 2, 3])
>>> seq.append(4), seq.append([5, 6]), seq.tokens
([], [], array([1, 2, 3, 4, 5, 6], dtype=uint32))
>>> seq.free()
)";

constexpr const char *seq_fork =
    R"(A second Sequence with the same tokens over the same blocks, each with one more reference.

Whoever appends first into a shared last block writes into a copy. O(len).

Raises:
    InvalidArgument: the sequence is freed.
    MemoryError: no memory for another sequence.

Source: seed section 2.2.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([1, 2, 3, 4, 5])
>>> child = seq.fork()
>>> child.append(6), seq.blocks, child.blocks
([(1, 2)], array([0, 1], dtype=uint32), array([0, 2], dtype=uint32))
>>> mgr.free([seq, child])
)";

constexpr const char *seq_truncate =
    R"(Cuts the sequence to its first ``n`` tokens, as when draft tokens were rejected.

Blocks behind the cut are given back, tail first. What was findable stays so. O(what is cut).

Raises:
    InvalidArgument: ``n`` is negative or above the length, or the sequence is freed.

Source: seed section 6 (L10.8).

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([1, 2, 3, 4, 5])
>>> seq.truncate(3)
>>> seq.tokens, seq.n_blocks
(array([1, 2, 3], dtype=uint32), 1)
>>> seq.free()
)";

constexpr const char *seq_commit =
    R"(Says that the K and V of the first ``n_computed`` tokens are written; all, if left out.

Only now do full blocks among them become findable, and immutable. A block whose content is findable
already stays private (``stats.duplicates``), and so does one whose name is held by different
content (``stats.collisions``). Fewer tokens than before change nothing. O(new full blocks).

Raises:
    InvalidArgument: ``n_computed`` is negative or above the length, or the sequence is freed.

Source: seed section 2.3.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([1, 2, 3, 4, 5])
>>> seq.commit(4)
>>> seq.n_computed, mgr.stats.n_findable
(4, 1)
>>> seq.free()
)";

constexpr const char *seq_found =
    R"(Commits K and V that were not computed here but found: in a lower tier, on another machine.

For what ``allocate`` did not find, and the caller has now copied, verified, into the sequence's own
blocks. The first ``n_found`` tokens are committed and count as cached: in ``n_cached`` and, with
``counted`` (False for a request that was resumed), in the manager's hits. The manager's own tiers
do this by themselves.

Raises:
    InvalidArgument: ``n_found`` is not whole blocks, above the length or below ``n_cached``;
        something was computed since ``allocate``; the sequence is freed.

Source: seed section 6 (L10.4).

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([1, 2, 3, 4, 5])
>>> pool.block(seq.blocks[0])[:] = 0.5            # from wherever it was
>>> seq.found(4)
>>> seq.n_cached, seq.n_computed, mgr.stats.hit_tokens
(4, 4, 4)
>>> seq.free()
)";

constexpr const char *seq_free =
    R"(Gives the blocks back, tail first, so that a cached chain loses its end before its beginning.

Findable blocks stay cached until their memory is needed; a sequence that was never committed leaves
nothing findable.

Raises:
    InvalidArgument: the sequence is freed already, or its manager is closed.

Source: seed section 2.1.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([1, 2, 3, 4, 5])
>>> seq.commit()
>>> seq.free()
>>> pool.stats
Stats(free=7, used=0, cached=1, evictions=0)
)";

constexpr const char *seq_pin =
    R"(Keeps the full committed blocks from eviction for so many seconds, also when it is freed.

The blocks are held, as if by a fork, until the first call on the manager after that time, or until
``reset``. They count as used, so that much less fits meanwhile. Several pins on the same blocks are
independent of each other.

Raises:
    InvalidArgument: ``seconds`` is not above 0 or above 1e9, or the sequence is freed.
    MemoryError: no memory for another sequence.

Source: none in the seed; pinned prefixes as other engines know them.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
...     seq.commit()
...     seq.pin(60)
>>> pool.stats.used, mgr.stats.n_pins
(1, 1)
)";

constexpr const char *seq_slot_mapping =
    R"(Where the K and V of ``n`` positions from ``first`` on go: int64 ``(n,)``.

``block * block_tokens + offset`` for each, and ``pad`` at and past the length. ``n`` left out: to
the end.

Raises:
    InvalidArgument: a number is negative, or the sequence is freed.
    MemoryError: no memory for so many slots.

Source: Kwon et al. (SOSP 2023), section 4.3.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([1, 2, 3, 4, 5])
>>> seq.slot_mapping(3), seq.slot_mapping(3, 4)
(array([3, 4]), array([ 3,  4, -1, -1]))
>>> seq.free()
)";

constexpr const char *seq_export =
    R"(An envelope of the computed tokens: bytes that another manager can import and adopt.

All blocks up to ``n_computed``; the last one holds only what this sequence has of it, also where it
was truncated into a longer block that others share. The GIL is released for large ones.

Raises:
    InvalidArgument: the sequence is freed.
    MemoryError: no memory for the bytes.

Source: seed sections 2.4 and 6 (L10.6); formats/kv-block.md.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([1, 2, 3, 4, 5])
>>> seq.commit(4)
>>> len(seq.export()) == pool.export_bytes(1)
True
>>> seq.free()
)";

constexpr const char *seq_export_iter =
    R"(The envelope of ``export`` as an iterator over parts of about ``chunk_bytes`` each.

As ``Pool.export_iter``: a part is bytes and has at least one block, and one exists at a time. The
pool's lock is held for a part, not for the whole. What is computed when it is called is in it,
tokens that are appended or committed meanwhile are not. Until it is done the sequence must neither
be freed nor cut.

Raises:
    InvalidArgument: the sequence is freed, or it was cut meanwhile; here or when a part is made.

Source: seed sections 2.4 and 6 (L10.6); formats/kv-block.md.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
...     seq.commit()
...     parts = list(seq.export_iter(chunk_bytes=150))
...     [len(part) for part in parts], b"".join(parts) == seq.export()
([168, 144], True)
)";

constexpr const char *seq_parts = "The iterator of Sequence.export_iter.";

constexpr const char *seq_save =
    R"(Writes the computed tokens' K and V to a file, for ``BlockManager.load``.

A sealed envelope (formats/kv-seal.md): the tokens' digest, their number and the namespace, then the
envelope of ``export``, a megabyte at a time. The file appears whole or not at all: it is written
under no name, or a temporary one beside ``path``, synced, and then takes the place of what was at
``path``, which the folder's sync makes last. A writer that is killed leaves what was there before.
Other threads may go on with the sequence, but not free or cut it.

Raises:
    StorageError: the file cannot be written: no folder, no permission, no space.
    InvalidArgument: nothing is computed, or the sequence is freed.

Source: docs/envelopes.md.

>>> import os, tempfile
>>> path = os.path.join(tempfile.mkdtemp(), "session.tlks")
>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> with mgr.allocate([1, 2, 3, 4, 5]) as seq:
...     seq.commit()
...     seq.save(path)
>>> os.path.getsize(path) == 80 + pool.export_bytes(2)
True
)";

constexpr const char *seq_export_block =
    R"(The envelope of one computed block, between other bytes: bytes.

``index`` counts the sequence's blocks from 0. The result is ``before``, an envelope with n_blocks 1,
and ``after``: a message of a framing around envelopes is made with one copy of the values. As in
``export``, the last block holds only what this sequence has computed of it. The GIL is released for
large ones.

Raises:
    InvalidArgument: nothing of that block is computed, or the sequence is freed.
    MemoryError: no memory for the bytes.

Source: seed sections 2.4 and 6 (L10.6); formats/kv-block.md.

>>> pool = kvpool.Pool(8, block_tokens=4, n_layers=1, n_kv_heads=1, head_dim=8)
>>> mgr = kvpool.BlockManager(pool)
>>> seq = mgr.allocate([1, 2, 3, 4, 5])
>>> seq.commit()
>>> seq.export_block(1) == pool.export(seq.blocks[1:])
True
>>> seq.export_block(1, before=b"<", after=b">")[:5]
b'<TLKV'
>>> seq.free()
)";
constexpr const char *seq_block_tokens = R"(Token positions in a block.)";
constexpr const char *seq_n_tokens = "Its length in tokens; ``len(seq)`` is the same.";
constexpr const char *seq_n_cached =
    "Tokens that ``allocate`` took from the index: they need no prefill.";
constexpr const char *seq_n_computed = "Tokens whose K and V are written, as committed.";
constexpr const char *seq_n_blocks = "Blocks it holds: ``ceil(n_tokens / block_tokens)``.";
constexpr const char *seq_blocks = "The block ids: uint32 ``(n_blocks,)``, a copy.";
constexpr const char *seq_tokens = "The token ids: uint32 ``(n_tokens,)``, a copy.";
constexpr const char *tiers =
    "The ``kvpool.tiers.TierStack`` it was made with, or None: what the lower tiers hold and did.";
constexpr const char *seq_namespace = "The root hash it was allocated under; 0 by default.";
constexpr const char *seq_is_freed = "True after ``free``, and when its manager or pool is closed.";

} // namespace kvpool::manager_docs
