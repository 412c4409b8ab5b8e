"""The figures of docs/transfer.md and of the README's section on it.

    python docs/figures/transfer.py           writes the SVGs beside this file
    python docs/figures/transfer.py --check   fails where a committed one differs

transfer-flow.svg is drawn from a push that really happens, between two pools in this process: the
chunks, their sizes and the acknowledgement are what the receiver was given and answered.
transfer-terminals.svg shows transfer-terminals.txt, which tests/transfer/test_transfer_cli.py
compares with what two processes print.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from svg import INK, MUTED, Drawing

import kvpool
from kvpool.transfer import KvReceiver, chunks

HERE = Path(__file__).resolve().parent
LEFT, RIGHT, WIDTH, STEP = 250, 750, 1000, 42
PREFILL, DECODE = "#bcdcff", "#d3efc9"


class Lanes:
    """A sequence diagram of two sides."""

    def __init__(self, title: str, height: int) -> None:
        self.drawing = Drawing(WIDTH, height, title)
        d, self.at = self.drawing, 92
        for x, name, what, fill in (
            (LEFT, "prefill side", "KvClient", PREFILL),
            (RIGHT, "decode side", "KvServer, KvReceiver", DECODE),
        ):
            d.box(x - 95, 14, 190, 46, fill)
            d.label(x, 34, name, anchor="middle", bold=True)
            d.label(x, 51, what, anchor="middle", size=12, color=MUTED)
            d.path(f"M {x} 60 V {height - 14}", color=MUTED, arrow=False, dashed=True)

    def note(self, side: int, *lines: str) -> None:
        """What a side does by itself, beside its line."""
        right = side == RIGHT
        for line in lines:
            x, anchor = (side + 14, "start") if right else (side - 14, "end")
            self.drawing.label(x, self.at, line, size=12, anchor=anchor, color=INK)
            self.at += 17
        self.at += 10

    def arrow(self, text: str, detail: str = "", *, back: bool = False) -> None:
        d, y = self.drawing, self.at
        start, end = (RIGHT - 4, LEFT + 4) if back else (LEFT + 4, RIGHT - 4)
        d.label((LEFT + RIGHT) / 2, y - 6, text, anchor="middle", mono=True, size=12)
        d.path(f"M {start} {y} H {end}", dashed=back)
        if detail:
            d.label((LEFT + RIGHT) / 2, y + 15, detail, anchor="middle", size=11, color=MUTED)
        self.at += STEP


def flow() -> str:
    """The protocol's example: 9 tokens, of which the decode side has the first block."""
    shape = {"block_tokens": 4, "n_layers": 2, "n_kv_heads": 1, "head_dim": 4}
    prefill, decode = (kvpool.BlockManager(kvpool.Pool(8, **shape)) for _ in "ab")
    receiver, tokens = KvReceiver(decode), list(range(1, 10))
    for manager, prompt in ((decode, tokens[:4]), (prefill, tokens)):
        with manager.allocate(prompt) as seq:
            manager.pool.slab[seq.blocks] = 1.0
            seq.commit()
    lanes = Lanes("A push of 9 tokens: one block by its name, two with their values", 590)
    seq = prefill.allocate([*tokens, 0])
    seq.truncate(9)
    seq.commit()
    lanes.note(LEFT, f"{len(seq)} tokens computed:", "2 full blocks, a tail")
    names = kvpool.block_hashes(tokens, 4).tolist()
    present = receiver.has_blocks(names).tolist()
    lanes.arrow(f"HasBlocks({', '.join(f'{n:016x}'[:4] + '..' for n in names)})", "one call")
    lanes.arrow(
        f"present {present}".lower(), "proven blocks only; no reference is taken", back=True
    )
    moved = 0
    with receiver.begin() as push:
        for chunk in chunks("a3f0..", seq, present):
            ack = push.add(chunk)
            moved += len(chunk.payload)
            name = f"{chunk.block_hash:016x}"[:4] + ".." if chunk.block_hash else "0"
            what = f"{len(chunk.payload)} bytes" if len(chunk.payload) else "no payload"
            lanes.arrow(
                f"PushKv: block {chunk.block_index} of {chunk.n_blocks_total}, hash {name}, {what}",
                "checked, then imported without a name" if len(chunk.payload)
                else "you hold it: a reference is taken",
            )  # fmt: skip
            if ack is None:
                continue
            assert chunk.block_index == chunk.n_blocks_total - 1
            lanes.arrow(
                f"KvAck(received {ack.blocks_received}, deduped {ack.blocks_deduped})",
                f"after the last index, and only then; {moved} bytes moved", back=True,
            )  # fmt: skip
    seq.free()
    lanes.note(LEFT, "frees the sequence:", "its blocks stay cached")
    lanes.at -= 44
    [pending] = receiver.pending()
    lanes.note(RIGHT, f"{pending.n_blocks} blocks wait under", "the handle, up to ttl_s")
    lanes.arrow("Continue(handle, tokens, sampling)", "or whatever tells the engine the tokens")
    with receiver.claim("a3f0..", tokens) as mine:
        assert mine.n_computed == 9
        lanes.note(
            RIGHT,
            "claim(handle, tokens):",
            "names are those of the tokens,",
            "block 0 is proven to be this prefix;",
            "then all of it is the engine's",
        )
    lanes.arrow("the answer", "token by token", back=True)
    return lanes.drawing.text()


def terminals() -> str:
    """Two terminals, one over the other."""
    panes = (HERE / "transfer-terminals.txt").read_text().split("====\n")
    rows = [
        [part for line in pane.splitlines() for part in textwrap.wrap(line, 104) or [""]]
        for pane in panes
    ]
    height = sum(58 + 19 * len(lines) for lines in rows) + 6
    d = Drawing(WIDTH, height, "kvpool serve in one terminal, kvpool push in the other")
    y = 10
    for title, lines in zip(("decode side", "prefill side"), rows, strict=True):
        d.box(10, y, WIDTH - 20, 44 + 19 * len(lines), "#1b222c", radius=8)
        for i, color in enumerate(("#ff6b61", "#f7c04a", "#61c554")):
            d.box(24 + 18 * i, y + 11, 10, 10, color, color, radius=5)
        d.label(WIDTH / 2, y + 21, title, anchor="middle", size=12, color="#8b97a5")
        for i, line in enumerate(lines):
            color = (
                "#7fd1ff" if line.startswith("$ ") else "#f0c674" if line[:1] in ">[" else "#dfe6ee"
            )
            d.label(28, y + 48 + 19 * i, line, mono=True, size=13, color=color)
        y += 58 + 19 * len(lines)
    return d.text()


FIGURES = {"transfer-flow.svg": flow, "transfer-terminals.svg": terminals}


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: transfer.py [--check]", file=sys.stderr)
        return 2
    wrong = 0
    for name, draw in FIGURES.items():
        path, text = HERE / name, draw()
        if not arguments:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            print(f"{name} is not what the code draws")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
