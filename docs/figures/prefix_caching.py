"""The figures of docs/prefix-caching.md, drawn from what a real manager does.

    python docs/figures/prefix_caching.py           writes the SVGs beside this file
    python docs/figures/prefix_caching.py --check   fails where a committed one differs

Every block's state, references, fill and name in a figure is read from the pool at that moment, so
a figure cannot show what the code does not do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from svg import MUTED, Drawing

import kvpool

HERE = Path(__file__).resolve().parent
FREE, USED, CACHED, FORGED = "#f1f4f7", "#bcdcff", "#d3efc9", "#ffd9cf"
B, N = 4, 8  # tokens a block, blocks
WIDTH, BOX, GAP, LEFT = 1000, 80, 12, 250


def new_pool() -> tuple[kvpool.Pool, kvpool.BlockManager]:
    pool = kvpool.Pool(N, block_tokens=B, n_layers=1, n_kv_heads=1, head_dim=2)
    return pool, kvpool.BlockManager(pool)


def tokens_by_block(sequence: kvpool.Sequence) -> dict[int, str]:
    tokens = sequence.tokens.tolist()
    return {
        block: " ".join(map(str, tokens[i * B : (i + 1) * B]))
        for i, block in enumerate(sequence.blocks.tolist())
    }


class Film:
    """One row a step: the pool's blocks as they are after it."""

    def __init__(self, title: str, n_steps: int, pool: kvpool.Pool) -> None:
        self.drawing = Drawing(WIDTH, 118 * n_steps + 44, title)
        self.pool, self.at = pool, 12
        self.content: dict[int, str] = {}  # what a block was written with, for the label only

    def write(self, sequence: kvpool.Sequence) -> None:
        """Notes the tokens of a sequence's blocks, as an engine writes their K and V."""
        self.content.update(tokens_by_block(sequence))

    def step(self, title: str, code: str, *lines: str) -> None:
        d, y = self.drawing, self.at
        d.label(20, y + 18, title, bold=True, size=14)
        d.label(20, y + 38, code, mono=True, size=11)
        for i, line in enumerate(lines):
            d.label(20, y + 57 + 16 * i, line, size=12, color=MUTED)
        for block in range(N):
            self.block(block, LEFT + block * (BOX + GAP), y)
        self.at += 118

    def block(self, block: int, x: float, y: float) -> None:
        d, pool = self.drawing, self.pool
        refs, name, fill = pool.refs(block), pool.hash(block), pool.fill(block)
        state = USED if refs else CACHED if name else FREE
        d.box(x, y, BOX, 92, state, dashed=not refs and not name)
        d.label(x + 7, y + 16, f"block {block}", size=11, color=MUTED)
        if refs > 1:
            d.label(x + BOX - 7, y + 16, f"x{refs}", size=12, anchor="end", bold=True)
        if refs or name:
            d.label(x + BOX / 2, y + 42, self.content[block], size=12, anchor="middle", mono=True)
            d.label(x + BOX / 2, y + 62, f"fill {fill}", size=11, anchor="middle", color=MUTED)
            text = f"{name:016X}"[:4] + ".." if name else "no name"
            d.label(x + BOX / 2, y + 81, text, size=11, anchor="middle", mono=True)

    def legend(self) -> str:
        d, y = self.drawing, self.at + 4
        for i, (color, text) in enumerate(
            ((USED, "used: somebody holds it"), (CACHED, "cached: nobody, but findable"))
        ):
            d.box(LEFT + i * 220, y, 16, 16, color, radius=3)
            d.label(LEFT + i * 220 + 24, y + 13, text, size=12, color=MUTED)
        d.box(LEFT + 460, y, 16, 16, FREE, radius=3, dashed=True)
        d.label(LEFT + 484, y + 13, "free", size=12, color=MUTED)
        return d.text()


def walkthrough() -> str:
    """The example of the seed's block manager: A, then B behind the same eight tokens."""
    pool, manager = new_pool()
    film = Film("A prompt, its end, and a prompt that begins the same", 6, pool)

    a = manager.allocate(range(1, 11))
    film.write(a)
    film.step(
        "1. A arrives",
        "a = mgr.allocate(1..10)",
        "Three blocks, no hit.",
        "Nothing can be found yet.",
    )
    a.commit()
    film.step(
        "2. A is computed", "a.commit()", "Full blocks get their names.", "The third is not full."
    )
    a.free()
    film.step("3. A ends", "a.free()", "Named blocks stay, cached;", "the rest is free at once.")
    b = manager.allocate([*range(1, 9), 99, 98, 97])
    assert b.n_cached == 8
    film.write(b)
    film.step(
        "4. B arrives",
        "b = mgr.allocate(1..8 99 98 97)",
        f"{b.n_cached} tokens are there already:",
        "b.n_cached. 3 to compute.",
    )
    b.commit()
    c = b.fork()
    film.step("5. B is forked", "c = b.fork()", "Everything is shared,", "the partial block too.")
    (copy,) = c.append([50])
    film.write(c)
    film.write(b)
    film.step(
        "6. C goes on",
        "c.append(50)",
        "Its last block is copied first:",
        f"block {copy[0]} to block {copy[1]}.",
    )
    return film.legend()


def eviction() -> str:
    """Which block is taken next, read from the pool by taking them one at a time."""
    pool, manager = new_pool()
    old = manager.allocate([1, 2, 3, 4, 5, 6, 7, 8, 9])
    old.commit()
    new = manager.allocate([*range(21, 29), 30])
    new.commit()
    content = {**tokens_by_block(old), **tokens_by_block(new)}
    old.free()
    new.free()
    names = {block: pool.hash(block) for block in range(N)}
    order = [pool.alloc() for _ in range(N)]

    d = Drawing(WIDTH, 206, "The order in which blocks are taken")
    d.label(20, 28, "Two requests have ended, first 1..9, then 21..28 30.", size=14, bold=True)
    d.label(
        20, 48, "Left to right: the order in which the next blocks are taken.", size=12, color=MUTED
    )
    for i, block in enumerate(order):
        x = 20 + i * 122
        name = names[block]
        d.box(x, 66, 106, 76, CACHED if name else FREE, dashed=not name)
        d.label(x + 8, 84, f"block {block}", size=11, color=MUTED)
        if name:
            d.label(x + 53, 110, content[block], anchor="middle", mono=True)
            d.label(x + 53, 130, f"{name:016X}"[:4] + "..", size=11, anchor="middle", mono=True)
        else:
            d.label(x + 53, 112, "free", anchor="middle", color=MUTED)
        if i:
            d.path(f"M{x - 14} 104 L{x - 3} 104")
    n_free = sum(not names[block] for block in order)
    first = 20 + n_free * 122
    d.label(20, 170, "no eviction: nothing findable is lost", size=12, color=MUTED)
    d.label(first, 170, "oldest request: its end,", size=12, color=MUTED)
    d.label(first, 186, "then its beginning", size=12, color=MUTED)
    d.label(first + 244, 170, "newest request: its end,", size=12, color=MUTED)
    d.label(first + 244, 186, "its beginning last of all", size=12, color=MUTED)
    return d.text()


def states() -> str:
    d = Drawing(WIDTH, 250, "The three states of a block")
    places = {"free": (60, FREE), "used": (410, USED), "cached": (760, CACHED)}
    about = {
        "free": ("nobody holds it", "no name"),
        "used": ("at least one holder", "named once it is committed"),
        "cached": ("nobody holds it", "its name can be found"),
    }
    for state, (x, color) in places.items():
        d.box(x, 90, 180, 74, color, dashed=state == "free")
        d.label(x + 90, 116, state, size=16, bold=True, anchor="middle")
        for i, line in enumerate(about[state]):
            d.label(x + 90, 136 + 17 * i, line, size=12, color=MUTED, anchor="middle")
    d.path("M240 110 L408 110")
    d.label(324, 101, "allocate, append", size=12, anchor="middle")
    d.path("M410 144 L242 144")
    d.label(324, 161, "free, never committed", size=12, anchor="middle")
    d.path("M590 110 L758 110")
    d.label(674, 101, "the last holder's free", size=12, anchor="middle")
    d.path("M760 144 L592 144")
    d.label(674, 161, "hit by a new prompt", size=12, anchor="middle")
    d.path("M850 90 C850 18, 500 18, 500 88")
    d.label(675, 30, "evicted: taken for new data, oldest first", size=12, anchor="middle")
    d.path("M850 164 C850 232, 150 232, 150 166", dashed=True)
    d.label(500, 234, "reset, evict", size=12, anchor="middle")
    return d.text()


# Two prompts with one name: 16 token ids below 50,000 each, made by the method of the page.
VICTIM = [1, 734, 29889, 4061, 310, 14991, 278, 3186, 29892, 1438, 338, 278, 5613, 9508, 310, 278]
FORGERY = [*VICTIM[:9], 3724, 7590, 12543, 11406, 4726, 890, 3852]


def forgery() -> str:
    """Two blocks with one name, and why only one of them is found."""
    (name,), (forged,) = (kvpool.block_hashes(t, block_tokens=16) for t in (VICTIM, FORGERY))
    assert name == forged
    pool = kvpool.Pool(4, block_tokens=16, n_layers=1, n_kv_heads=1, head_dim=1)
    manager = kvpool.BlockManager(pool)
    with manager.allocate(VICTIM) as sequence:
        sequence.commit()
    found = [manager.can_allocate([*t, 0]).n_cached for t in (VICTIM, FORGERY)]
    assert found == [16, 0]

    d = Drawing(WIDTH, 292, "A forged name meets the proof")
    rows = (
        (20, "the victim's prompt", VICTIM, USED, "hit: 16 tokens need no prefill", (72, 20)),
        (156, "the attacker's prompt", FORGERY, FORGED, "miss: computed for itself", (20, 72)),
    )
    for y, who, tokens, color, result, (name_at, proof_at) in rows:
        d.label(20, y + 16, who, bold=True)
        d.box(20, y + 28, 320, 64, color)
        for i in range(2):
            text = " ".join(map(str, tokens[8 * i : 8 * i + 8]))
            d.label(180, y + 54 + 22 * i, text, size=11, anchor="middle", mono=True)
        for at, text, value in (
            (name_at, "name: FNV-1a 64, public", f"{name:016X}"),
            (proof_at, "proof: keyed, 2 x 61 bits", "secret"),
        ):
            d.path(f"M342 {y + 60} L418 {y + at + 16}")
            d.box(420, y + at, 320, 32, "#ffffff", radius=4)
            d.label(432, y + at + 21, text, size=12)
            d.label(730, y + at + 21, value, size=11, anchor="end", mono=True)
        d.path(f"M742 {y + proof_at + 16} L778 {y + proof_at + 16}")
        d.label(786, y + proof_at + 20, result, size=12)
    d.path("M580 126 L580 174", arrow=False, dashed=True, color=MUTED)
    d.label(592, 155, "equal, on purpose; decides nothing", size=12, color=MUTED)
    return d.text()


FIGURES: dict[str, Callable[[], str]] = {
    "prefix-states.svg": states,
    "prefix-walkthrough.svg": walkthrough,
    "prefix-eviction.svg": eviction,
    "prefix-forgery.svg": forgery,
}


def main(arguments: list[str]) -> int:
    stale = []
    for name, draw in FIGURES.items():
        path, text = HERE / name, draw()
        if "--check" not in arguments:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            stale.append(name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python docs/figures/prefix_caching.py")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
