"""Writes the golden files with the Python transcription, or checks that they are what it writes.

    python conformance/golden.py            writes conformance/cases, formats/golden{,-errors}
    python conformance/golden.py --check    exit code 1 when a file is not the one it would write

A case is made here once and then is data: other implementations read the JSON, not this file.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "drivers"))

import kvwire  # noqa: E402
from kvwire import Block, Shape, seal, u16, u32, u64, write  # noqa: E402

FORMATS = HERE.parent / "formats"

# ---- the cases ----------------------------------------------------------------------------------


def patterns(seed: int, n: int) -> list[int]:
    """n float16 patterns that look like activations: finite, both signs, all different runs."""
    state, out = seed, []
    for _ in range(n):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 63) << 15 | 0x2C00 + (state >> 33) % 0x1800)  # 0.0625 to 8
    return out


def case(
    name: str, why: str, shape: tuple[int, int, int, int], tokens: list[int], values: Any = None
) -> dict[str, Any]:
    B, L, H, D = shape
    n_values = len(tokens) * L * 2 * H * D
    if values is None:
        values = patterns(len(tokens) * 1000 + B * 100 + L * 10 + H + D, n_values)
    elif len(values) < n_values:
        values = [values[i % len(values)] for i in range(n_values)]
    assert len(values) == n_values, name
    return {
        "name": name,
        "why": why,
        "block_tokens": B,
        "n_layers": L,
        "n_kv_heads": H,
        "head_dim": D,
        "tokens": tokens,
        "values": values,
    }


# [position][layer][K, V][head][dim]: position 0 has K 1 2 and V 0.5 -1, position 1 K 3 4, V 0 0.25.
EXAMPLE = [0x3C00, 0x4000, 0x3800, 0xBC00, 0x4200, 0x4400, 0x0000, 0x3400]
SPECIALS = [
    0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0xFC01, 0x7FFF, 0xFFFF, 0x7DFF, 0x0001, 0x8001, 0x03FF,
    0x0400, 0x7BFF, 0xFBFF, 0x8000, 0x0000, 0x3C00,
]  # fmt: skip
WIDTHS = [0, 1, 255, 256, 65535, 65536, 2**24 - 1, 2**24, 2**31, 2**32 - 1]


def cases() -> list[dict[str, Any]]:
    small = (4, 1, 1, 4)
    return [
        case("worked_example", "the 60 bytes of the format page", (2, 1, 1, 2), [1, 2], EXAMPLE),
        case("worked_sequence", "tokens 1 to 5: two names, a tail", (2, 1, 1, 2), [1, 2, 3, 4, 5]),
        case("partial_tail", "a tail of 3 of 4 positions", small, list(range(7))),
        case("several_layers", "layers are the outermost dimension", (4, 3, 1, 4), list(range(9))),
        case("several_heads", "head_dim odd, no dimension equal to another", (4, 2, 3, 5),
             [50_000 + i for i in range(10)]),
        case("layers_heads_and_a_tail", "the usual block_tokens of 16", (16, 2, 2, 8),
             [i * i for i in range(37)]),
        case("block_tokens_1", "every block is full, a name for each token", (1, 2, 1, 3),
             [9, 8, 7, 6, 5]),
        case("one_token", "the shortest sequence: one block, no name", (16, 1, 2, 4), [42]),
        case("exact_multiple", "no tail", small, list(range(100, 112))),
        case("tail_of_all_but_one", "a tail of B - 1 has no name yet", (8, 1, 1, 2),
             list(range(15))),
        case("token_ids_0_and_max", "0 and 2^32 - 1 are tokens like others", small,
             [0, 2**32 - 1, 0, 0, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1, 0, 0, 0, 0]),
        case("token_ids_of_every_width", "where the bytes of an id begin to count", (2, 1, 1, 1),
             WIDTHS),
        case("all_zeros", "tokens and values all zero", small, [0] * 9, [0]),
        case("nan_infinity_subnormal", "patterns pass unchanged, signaling NaNs too", (4, 1, 2, 3),
             list(range(10)), SPECIALS),
        case("negative_zero", "0x8000 is not 0x0000", small, list(range(6)), [0x8000]),
        case("hundred_blocks", "a chain of a hundred names", (2, 1, 1, 2),
             [(i * 7919) % 50_257 for i in range(200)]),
        case("head_dim_64", "payloads long enough for a checksum's fast form", (16, 1, 1, 64),
             [(i * 31) % 1000 for i in range(40)]),
        case("repeated_tokens", "equal tokens after other prefixes: other names", small,
             [5, 6, 7, 8] * 4),
    ]  # fmt: skip


# ---- good envelopes -----------------------------------------------------------------------------

SHAPE = Shape(4, 2, 1, 3)  # of the envelopes below; P is 96


def payload(seed: int, shape: Shape = SHAPE) -> bytes:
    return b"".join(u16(v) for v in patterns(seed, shape.payload_bytes // 2))


def full(seed: int) -> Block:
    return Block(0x0123456789ABCDEF + seed, SHAPE.block_tokens, payload(seed))


def entry(
    name: str, data: bytes, status: str, reason: str, shape: Shape = SHAPE, **more: Any
) -> tuple[dict[str, Any], bytes]:
    pool = {
        "n_blocks": more.pop("n_blocks", 128),
        "block_tokens": shape.block_tokens,
        "n_layers": shape.n_layers,
        "n_kv_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
    }
    record = {"file": f"{name}.tlkv", "status": status, "reason": reason, "pool": pool, **more}
    return record, data


def raw_record(block: Block) -> bytes:
    """A record as it stands: nothing is zeroed."""
    return u64(block.block_hash) + u32(block.n_tokens) + block.payload


def good() -> Iterator[tuple[dict[str, Any], bytes]]:
    for c in cases():
        shape = kvwire.shape_of(c)
        data = write(shape, kvwire.blocks_of(c))
        yield entry(c["name"], data, "TL_OK", c["why"], shape, canonical=True)
    yield entry(
        "no_blocks", write(SHAPE, []), "TL_OK", "an empty envelope is valid", canonical=True
    )
    unnamed = [Block(0, 4, payload(1)), full(2)]
    yield entry(
        "full_without_a_name",
        write(SHAPE, unnamed),
        "TL_OK",
        "a full block need not be registered",
        canonical=True,
    )
    twice = [full(1), Block(full(1).block_hash, 4, payload(2))]
    yield entry(
        "two_of_one_name",
        write(SHAPE, twice),
        "TL_OK",
        "the first holder keeps the name, the second block is private",
        canonical=False,
    )
    stale = kvwire.header(SHAPE, 1) + raw_record(Block(0, 3, payload(3)))
    yield entry(
        "values_past_n_tokens",
        seal(stale),
        "TL_OK",
        "a reader takes them as they are; its own export has zeros there",
        canonical=False,
    )


# ---- bad envelopes ------------------------------------------------------------------------------


def body(blocks: list[Block], head: bytes | None = None) -> bytes:
    """An envelope without its trailer, whatever the header says."""
    head = kvwire.header(SHAPE, len(blocks)) if head is None else head
    return head + b"".join(raw_record(b) for b in blocks)


def patched(data: bytes, at: int, new: bytes) -> bytes:
    """Bytes replaced, the checksum made right again."""
    return seal(data[:at] + new + data[at + len(new) : -4])


def sized(n: int, shape: Shape, n_bytes: int) -> bytes:
    """A header that announces n blocks of a shape, zeros up to n_bytes in all, a right checksum."""
    return seal((kvwire.header(shape, n) + bytes(n_bytes))[: n_bytes - 4])


def bad() -> Iterator[tuple[dict[str, Any], bytes]]:
    ok = write(SHAPE, [full(1), Block(0, 3, payload(2))])
    P = SHAPE.payload_bytes
    second = 28 + 12 + P  # the offset of record 1
    other_crc = {
        "crc_zero": (bytes(4), "no checksum"),
        "crc_big_endian": (ok[:-5:-1], "its bytes reversed"),
        "crc_without_final_xor": (
            u32(kvwire.crc32c(ok[:-4]) ^ 0xFFFFFFFF),
            "not inverted at the end",
        ),
        "crc_of_the_payload": (u32(kvwire.crc32c(ok[28:-4])), "the header left out"),
        "crc_32_of_zip": (u32(zlib.crc32(ok[:-4])), "another polynomial"),
    }

    def rule(n: int, name: str, data: bytes, reason: str, **more: Any) -> Any:
        status = {5: "TL_ESHAPE", 0: "TL_EFULL"}.get(n, "TL_EFORMAT")
        return entry(name, data, status, reason, rule=n, **more)

    yield rule(1, "no_bytes", b"", "0 bytes")
    yield rule(1, "magic_only", b"TLKV", "4 bytes")
    yield rule(1, "header_only", ok[:28], "28 bytes, no trailer")
    yield rule(1, "one_byte_short_of_an_empty_one", write(SHAPE, [])[:31], "31 bytes")
    yield rule(1, "last_byte_missing", ok[:-1], "cut by one byte")
    yield rule(1, "last_record_missing", seal(ok[:second]), "n_blocks says 2, there is 1")
    yield rule(1, "half_a_record", seal(ok[: second + 6]), "cut inside a record's fields")
    yield rule(1, "one_byte_more", ok + b"\0", "a byte after the trailer")
    yield rule(1, "one_byte_more_sealed", seal(ok[:-4] + b"\0"), "a byte before the trailer")
    yield rule(1, "n_blocks_one_more", patched(ok, 8, u32(3)), "n_blocks 3, two records")
    yield rule(1, "n_blocks_max", patched(ok, 8, u32(2**32 - 1)), "n_blocks 2^32 - 1")
    yield rule(1, "dimensions_max", patched(ok, 12, b"\xff" * 16), "B, L, H, D all 2^32 - 1")
    yield rule(
        1,
        "payload_wraps_at_64_bits",
        sized(1, Shape(2**31, 2**31, 1, 1), 44),
        "P is 2^64: 0 for who multiplies without looking",
    )
    yield rule(
        1,
        "payload_wraps_at_32_bits",
        sized(1, Shape(2**15, 2**15, 1, 1), 44),
        "P is 2^32: 0 in 32 bits",
    )
    yield rule(
        1,
        "length_wraps_at_64_bits",
        sized(2**30, Shape(1, 1, 1, 2**32 - 3), 32),
        "n * (12 + P) is 2^64",
    )
    yield rule(1, "length_wraps_at_32_bits", sized(2**30, SHAPE, 32), "n * (12 + P) is 27 * 2^32")
    yield rule(1, "big_endian_header", patched(ok, 8, bytes(reversed(u32(2)))), "n_blocks 2^25")
    yield rule(2, "magic_reversed", patched(ok, 0, b"VKLT"), "the magic as a big-endian word")
    yield rule(2, "magic_lower_case", patched(ok, 0, b"tlkv"), "tlkv")
    yield rule(2, "magic_of_zeros", patched(ok, 0, bytes(4)), "no magic")
    yield rule(3, "bit_of_the_version_flipped", ok[:4] + b"\0" + ok[5:], "one bit, same checksum")
    yield rule(3, "bit_of_a_name_flipped", ok[:28] + bytes([ok[28] ^ 1]) + ok[29:], "one bit")
    yield rule(
        3, "bit_of_the_payload_flipped", ok[:-5] + bytes([ok[-5] ^ 128]) + ok[-4:], "one bit"
    )
    for name, (crc, reason) in other_crc.items():
        yield rule(3, name, ok[:-4] + crc, reason)
    yield rule(4, "version_0", patched(ok, 4, u16(0)), "version 0")
    yield rule(4, "version_2", patched(ok, 4, u16(2)), "a later version")
    yield rule(4, "version_big_endian", patched(ok, 4, b"\0\1"), "version 256")
    yield rule(4, "dtype_f32", patched(ok, 6, u16(0)), "dtype 0")
    yield rule(4, "dtype_bf16", patched(ok, 6, u16(2)), "dtype 2")
    yield rule(
        4,
        "version_and_dtype_swapped_for_2_and_1",
        patched(ok, 4, u16(2) + u16(1)),
        "as a writer of version 2 would begin",
    )
    for name, shape in {
        "block_tokens": Shape(2, 2, 1, 6),
        "n_layers": Shape(4, 1, 2, 3),
        "n_kv_heads": Shape(4, 2, 3, 1),
        "head_dim": Shape(4, 2, 1, 5),
        "block_tokens_alone": Shape(3, 2, 1, 3),
        "n_layers_alone": Shape(4, 3, 1, 3),
        "n_kv_heads_alone": Shape(4, 2, 2, 3),
    }.items():
        data = write(shape, [Block(0, 1, bytes(shape.payload_bytes))])
        yield rule(
            5, f"shape_{name}", data, f"{shape}, the pool has another {name.split('_al')[0]}"
        )
    yield rule(5, "shape_of_zeros", sized(0, Shape(0, 0, 0, 0), 32), "no blocks of no shape")
    top = 2**32 - 1
    yield rule(
        5,
        "no_blocks_of_a_giant_shape",
        sized(0, Shape(top, top, top, top), 32),
        "no blocks have no bytes, whatever P is",
    )
    yield rule(
        5,
        "shape_zero_among_giants_1",
        sized(1, Shape(0, top, top, top), 44),
        "P is 0 although a part of the product overflows",
    )
    yield rule(5, "shape_zero_among_giants_2", sized(1, Shape(top, top, top, 0), 44), "the same")
    yield rule(5, "shape_zero_among_giants_3", sized(1, Shape(top, 0, top, top), 44), "the same")
    yield rule(5, "shape_zero_head_dim", sized(2, Shape(4, 2, 1, 0), 56), "payloads of 0 bytes")
    yield rule(6, "n_tokens_0", patched(ok, 36, u32(0)), "an empty block")
    yield rule(6, "n_tokens_above_block_tokens", patched(ok, 36, u32(5)), "5 of 4 tokens")
    yield rule(6, "n_tokens_max", patched(ok, 36, u32(2**32 - 1)), "n_tokens 2^32 - 1")
    yield rule(6, "n_tokens_0_in_the_last_record", patched(ok, second + 8, u32(0)), "record 1")
    yield rule(6, "named_partial_block", patched(ok, second, u64(1)), "a name with 3 of 4 tokens")
    yield rule(
        6, "unnamed_n_tokens_0", patched(patched(ok, 28, u64(0)), 36, u32(0)), "no name, empty"
    )
    # Two faults at once: the earlier rule decides.
    yield rule(1, "length_before_everything", b"KVLT" + ok[4:-5], "length and magic and checksum")
    other = write(Shape(4, 2, 1, 5), [Block(0, 1, bytes(160))])
    yield rule(3, "crc_before_shape", other[:-4] + bytes(4), "checksum and shape")
    yield rule(4, "version_before_shape", patched(other, 4, u16(2)), "version and shape")
    yield rule(5, "shape_before_n_tokens", patched(other, 36, u32(0)), "shape and n_tokens")
    yield rule(
        6, "n_tokens_before_room", patched(ok, 36, u32(9)), "n_tokens, and no room", n_blocks=1
    )
    # Not the envelope's fault.
    yield rule(0, "more_blocks_than_the_pool", ok, "two blocks for a pool of one", n_blocks=1)


# ---- writing and checking -----------------------------------------------------------------------


def files() -> dict[Path, bytes]:
    """Every golden file and what is in it."""
    out: dict[Path, bytes] = {}
    for c in cases():
        shape = kvwire.shape_of(c)
        c["envelope"] = write(shape, kvwire.blocks_of(c)).hex()
        out[HERE / "cases" / f"{c['name']}.json"] = (json.dumps(c) + "\n").encode()
    for folder, entries in (("golden", good()), ("golden-errors", bad())):
        records = []
        for record, data in entries:
            assert FORMATS / folder / record["file"] not in out, record["file"]
            out[FORMATS / folder / record["file"]] = data
            records.append(record)
        lines = ",\n".join("    " + json.dumps(record) for record in records)
        text = f'{{\n  "format": 1,\n  "envelopes": [\n{lines}\n  ]\n}}\n'
        out[FORMATS / folder / "manifest.json"] = text.encode()
    return out


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: golden.py [--check]", file=sys.stderr)
        return 2
    wrong = 0
    wanted = files()
    for path, data in wanted.items():
        if not arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        elif not path.is_file() or path.read_bytes() != data:
            print(f"{path.relative_to(HERE.parent)} is not what golden.py writes")
            wrong += 1
    for folder in {path.parent for path in wanted}:
        for path in folder.glob("*.*"):
            if path not in wanted:
                print(f"{path.relative_to(HERE.parent)} is no golden file")
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
