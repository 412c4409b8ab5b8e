"""A pool belongs to the process that made it: a child of fork() gets errors, never a hang."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

# {body} runs in the child, whose exit code is 0 when it got to its end. The fork happens while
# another thread has the pool's mutex: it exports 128 MiB after 128 MiB.
PROGRAM = """
import gc, os, signal, threading, time, warnings
import kvpool

warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: what this is about
pool = kvpool.Pool(1024, block_tokens=16, n_layers=8, n_kv_heads=4, head_dim=64)
mgr = kvpool.BlockManager(pool)
seq = mgr.allocate(range(20))
view = pool.block(seq.blocks[0])
view[:] = 3.0
ids = pool.alloc(1000)
pool.set_fill(ids, 16)
parts = pool.export_iter(ids)
envelope = pool.export(ids[:1])
out = bytearray(pool.export_bytes(1000))
over = False

def export():
    while not over:
        pool.export_into(ids, out)

thread = threading.Thread(target=export)
thread.start()
time.sleep(0.05)

def refused(call):
    try:
        call()
    except kvpool.Unsupported as error:
        assert f"belongs to process {{parent}}: a fork child cannot use it" in str(error), error
    else:
        raise AssertionError(call)

parent = os.getpid()
codes = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang ends by a signal
        code = 1
        try:
{body}
            code = 0
        finally:
            os._exit(code)
    codes.append(os.waitpid(child, 0)[1])
over = True
thread.join()
assert codes == [0] * 5, codes
pool.unref(ids)
seq.free()
mgr.check()
pool.close()
"""

CALLS = """
calls = [
    pool.alloc, lambda: pool.alloc(2), lambda: pool.unref(ids), lambda: pool.refs(0),
    lambda: pool.cow(0), lambda: pool.export(ids), lambda: pool.export_into(ids, out),
    lambda: next(parts), lambda: pool.export_pieces(ids), lambda: pool.import_(envelope),
    lambda: pool.stats, lambda: pool.slab, lambda: pool.block(0), pool.check,
    lambda: kvpool.BlockManager(pool), lambda: mgr.allocate(range(9)), lambda: mgr.stats,
    lambda: mgr.free([seq]), lambda: mgr.append([seq], [1]), lambda: mgr.import_(envelope),
    mgr.check, lambda: seq.append(1), seq.fork, lambda: seq.tokens, lambda: seq.pin(1.0),
]
for call in calls:
    refused(call)
assert pool.closed and mgr.closed and seq.is_freed
assert "closed" in repr(pool) and "closed" in repr(mgr) and "freed" in repr(seq)
assert (view == 3.0).all()
other = kvpool.Pool(4, n_layers=1, n_kv_heads=1, head_dim=2)
with kvpool.BlockManager(other).allocate(range(9)) as own:
    assert len(own.blocks) == 1 and other.stats.used == 1
"""

ENDS = {
    "calls": CALLS,
    "close": "mgr.close(); pool.close(); pool.close(); assert (view == 3.0).all()",
    "with": "with seq, mgr, pool: pass",
    "drop": "del parts, seq, mgr, pool, thread, export; gc.collect(); "
    "assert view[0, 0, 0, 0, 0] == 3; del view; gc.collect()",
}


@pytest.mark.parametrize("what", ENDS)
def test_a_fork_child_is_told_and_does_not_hang(what: str) -> None:
    body = "\n".join(" " * 12 + line for line in ENDS[what].strip().splitlines())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
