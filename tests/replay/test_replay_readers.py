"""Traces of every format, good and bad, plain and compressed."""

from __future__ import annotations

import contextlib
import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool.replay import Request, TraceError, open_trace
from kvpool.replay.synth import synthesize, to_rows

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 512, "output_length": 7, "hash_ids": [0]},
]
BAILIAN = [
    {"chat_id": 10, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 33,
     "output_length": 9, "type": "text", "turn": 1, "hash_ids": [7, 8, 9]},
    {"chat_id": 11, "parent_chat_id": 10, "timestamp": 2.0, "input_length": 64,
     "output_length": 9, "type": "text", "turn": 2, "hash_ids": [7, 8, 3, 4]},
    {"chat_id": 12, "parent_chat_id": 11, "timestamp": 3.0, "input_length": 16,
     "output_length": 9, "type": "text", "turn": 3, "hash_ids": [7]},
]  # fmt: skip
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:01.5+02:00,10,1
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,0,1087,API log
"""


def jsonl(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(path: Path, **options: object) -> list[Request]:
    with open_trace([str(path)], **options) as trace:
        return [request for batch in trace for request in batch]


def write(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (jsonl(MOONCAKE), "mooncake"),
        (jsonl(BAILIAN), "bailian"),
        (AZURE, "azure"),
        (AZURE_2024, "azure"),
        (BURSTGPT, "burstgpt"),
        ("[1, 2, 3]\n", "tokens"),
        ('{"prompt_token_ids": [1, 2, 3]}\n', "tokens"),
        ('[1.5, [{"type": "BlockRemoved", "block_hashes": [1]}], null]\n', "events"),
        ('{"type": "AllBlocksCleared"}\n', "events"),
    ],
)
def test_formats_are_told_from_the_content(tmp_path: Path, text: str, name: str) -> None:
    with open_trace([str(write(tmp_path, text))]) as trace:
        assert trace.format == name


def test_mooncake(tmp_path: Path) -> None:
    a, b = read(write(tmp_path, jsonl(MOONCAKE)))
    assert a.ids.tolist() == [0, 1, 2]
    assert a.ids.dtype == np.uint64
    assert (a.arrival_s, a.input_length, a.output_length) == (0.0, 1100, 5)
    assert b.arrival_s == 1.5


def test_bailian_follows_a_conversation_to_its_first_chat(tmp_path: Path) -> None:
    requests = read(write(tmp_path, jsonl(BAILIAN)))
    assert [request.session for request in requests] == ["10", "10", "10"]
    assert requests[0].arrival_s == 0.5


def test_a_partial_block_without_a_name_gets_one_of_its_own(tmp_path: Path) -> None:
    rows = [dict(MOONCAKE[0], hash_ids=[0, 1]), dict(MOONCAKE[0], timestamp=9, hash_ids=[0, 1])]
    a, b = read(write(tmp_path, jsonl(rows)))
    assert len(a.ids) == len(b.ids) == 3
    assert a.ids[2] != b.ids[2]


def test_azure_and_burstgpt_share_nothing_unless_told_to(tmp_path: Path) -> None:
    a, b = read(write(tmp_path, AZURE))
    assert b.arrival_s - a.arrival_s == pytest.approx(0.052)
    assert len(a.ids) == 301
    assert not set(a.ids.tolist()) & set(b.ids.tolist())
    c, d = read(write(tmp_path, AZURE_2024))
    assert d.arrival_s - c.arrival_s == pytest.approx(1.49007)
    e, f = read(write(tmp_path, BURSTGPT), synthetic_prefix=100)
    assert (f.output_length, f.arrival_s) == (0, 45.5)
    assert e.ids[:6].tolist() == f.ids[:6].tolist()
    assert e.ids[6] != f.ids[6]


def test_files_of_lengths_do_not_share_ids_with_each_other(tmp_path: Path) -> None:
    paths = [str(write(tmp_path, AZURE, name)) for name in ("a", "b")]
    with open_trace(paths) as trace:
        ids = [id for batch in trace for request in batch for id in request.ids.tolist()]
    assert len(ids) == len(set(ids))


def test_tokens_get_the_formats_hashes(tmp_path: Path) -> None:
    text = '[1, 2, 3, 4, 5]\n{"tokens": [1, 2, 3, 4], "timestamp": 3, "n": 2, "session": 5}\n'
    a, b = read(write(tmp_path, text), block_tokens=2)
    assert a.ids[:2].tolist() == kvpool.block_hashes([1, 2, 3, 4], block_tokens=2).tolist()
    assert a.ids[:2].tolist() == b.ids.tolist()
    assert len(a.ids) == 3
    assert (b.n, b.session, b.arrival_s) == (2, "5", 3.0)


def test_a_log_of_kv_events_becomes_the_prompts_that_were_computed(tmp_path: Path) -> None:
    def stored(hashes: list[object], parent: object) -> dict[str, object]:
        return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
                "token_ids": [], "block_size": 32}  # fmt: skip

    lines = [
        {"ts": 1.0, "events": [stored([11, 12], None)]},
        [2.0, [stored([13], 12), {"type": "BlockRemoved", "block_hashes": [13]}], 0],
        stored(["ab", "cd"], 11),
        {"ts": 4.0, "events": [{"type": "AllBlocksCleared"}, stored([14], 12)]},
    ]
    path = write(tmp_path, "".join(json.dumps(line) + "\n" for line in lines))
    with open_trace([str(path)]) as trace:
        requests = [request for batch in trace for request in batch]
        assert trace.block_tokens == 32  # from the log itself
    assert [request.ids.tolist()[:3] for request in requests[:2]] == [[11, 12], [11, 12, 13]]
    assert requests[2].ids[0] == 11
    assert len(requests[2].ids) == 3
    assert requests[3].ids.tolist() == [12, 14]
    assert requests[1].input_length == 96


def test_our_own_events_are_read_back(tmp_path: Path) -> None:
    import msgspec

    from kvpool.events import EventEncoder, KVEventBatch

    pool = kvpool.Pool(8, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=1)
    manager = kvpool.BlockManager(pool, events=True)
    encoder = EventEncoder(block_tokens=2)
    lines = []
    for prompt in ([1, 2, 3, 4, 9], [1, 2, 5, 6, 9]):
        with manager.allocate(prompt) as sequence:
            sequence.commit()
        batch = KVEventBatch(ts=1.0, events=encoder.encode(manager.drain_events()))
        lines.append(msgspec.json.encode(batch).decode() + "\n")
    a, b = read(write(tmp_path, "".join(lines)))
    assert a.ids.tolist() == kvpool.block_hashes([1, 2, 3, 4], block_tokens=2).tolist()
    assert b.ids.tolist() == kvpool.block_hashes([1, 2, 5, 6], block_tokens=2).tolist()


@pytest.mark.parametrize("kind", ["gz", "zst", "two zst frames"])
def test_compressed_files(tmp_path: Path, kind: str) -> None:
    text = jsonl(MOONCAKE).encode()
    path = tmp_path / "trace.jsonl"
    if kind == "gz":
        path.write_bytes(gzip.compress(text))
    else:
        zstandard = pytest.importorskip("zstandard")
        compress = zstandard.ZstdCompressor().compress
        half = len(text) // 2
        parts = [text] if kind == "zst" else [text[:half], text[half:]]
        path.write_bytes(b"".join(map(compress, parts)))
    assert [request.input_length for request in read(path)] == [1100, 512]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "hash_ids"),
        (json.dumps(dict(MOONCAKE[0], input_length=0)), "input_length is 0"),
        (json.dumps(dict(MOONCAKE[0], input_length=10**12)), "input_length is 10"),
        (json.dumps(dict(MOONCAKE[0], output_length=-1)), "output_length is -1"),
        (json.dumps(dict(MOONCAKE[0], hash_ids=[1])), "hash_ids has 1 blocks, expected 3"),
        (json.dumps(dict(MOONCAKE[0], hash_ids=[1, 2, -3])), "not in 0..2"),
        (json.dumps(dict(MOONCAKE[0], hash_ids=[1, 2, 2**64])), "out of range|not in 0"),
        (json.dumps(dict(MOONCAKE[0], hash_ids=["a", 1, 2])), "Expected `int`"),
        (json.dumps(dict(MOONCAKE[0], timestamp=None)), "timestamp"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
         "timestamp|range"),
        ("\xff\xfe", "."),
    ],
)  # fmt: skip
def test_bad_lines_are_named_by_file_and_line(tmp_path: Path, line: str, why: str) -> None:
    good = jsonl(MOONCAKE)
    path = tmp_path / "bad.jsonl"
    path.write_bytes(good.encode() + line.encode("latin-1") + b"\n\n" + good.encode())
    with pytest.raises(TraceError, match=rf"bad\.jsonl:3: .*({why})"):
        read(path)
    with open_trace([str(path)], skip_bad=True) as trace:
        requests = [request for batch in trace for request in batch]
    assert len(requests) == 4
    assert trace.problems.count == 1
    assert "bad.jsonl:3: " in trace.problems.first[0]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("2023-11-16 18:17:03.97,4808", "2 fields, expected 3"),
        ("yesterday,4808,10", "no date and time"),
        ("2023-99-16 18:17:03,4808,10", "month"),
        ("2023-11-16 18:17:03,many,10", "many"),
        ("2023-11-16 18:17:03,0,10", "ContextTokens is 0"),
        ("2023-11-16 18:17:03,9,-1", "GeneratedTokens is -1"),
        ("2023-11-16 18:17:03,1e999999,1", "."),
    ],
)
def test_bad_lines_of_csv(tmp_path: Path, line: str, why: str) -> None:
    path = write(tmp_path, AZURE + line + "\n")
    with pytest.raises(TraceError, match=rf":4: .*{why}"):
        read(path)
    assert len(read(path, skip_bad=True)) == 2


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"hello\n", "no known format"),
        (b'{"a": 1}\n', "no known format"),
        (b'["a"]\n', "no known format"),
        (b"[" * 100_000 + b"\n", "no known format"),
        (b"\x1f\x8b\x08\x00garbage", "cannot be read"),
        (gzip.compress(jsonl(MOONCAKE).encode())[:-9], "cannot be read"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=why):
        read(path)


def test_a_zstd_file_that_was_cut_is_told_even_at_the_end_of_a_line(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    text = jsonl(MOONCAKE).encode()
    stream = zstandard.ZstdCompressor().compressobj()
    first = stream.compress(text) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    last = stream.compress(text) + stream.flush()
    path = tmp_path / "t.zst"
    path.write_bytes(first + last)
    assert len(read(path)) == 4
    for n in (len(first), len(first) + 1, len(first + last) - 1):
        path.write_bytes((first + last)[:n])
        with pytest.raises(TraceError, match=r":1: cannot be read: .*(ends within|corruption)"):
            read(path, skip_bad=True)


@pytest.mark.parametrize("first", ["5", "null", '"abc"', "{}", "[]", "true", "[1, 2]"])
@pytest.mark.parametrize("name", ["mooncake", "bailian", "azure", "burstgpt", "events", "tokens"])
def test_a_first_line_of_any_kind_is_told(tmp_path: Path, first: str, name: str) -> None:
    path = write(tmp_path, first + "\n")
    with (
        pytest.raises(TraceError, match=":1: ")
        if (first, name) != ("[1, 2]", "tokens")
        else (contextlib.nullcontext())
    ):
        read(path, format=name)


@pytest.mark.parametrize("ts", ['"abc"', "null", "{}", "1" + "0" * 400])
def test_a_batch_of_events_with_a_strange_time_is_told(tmp_path: Path, ts: str) -> None:
    path = write(tmp_path, f"[{ts}, []]\n[1.5, []]\n")
    with pytest.raises(TraceError, match=":1: "):
        read(path, format="events")
    with open_trace(path, format="events", skip_bad=True) as trace:
        assert list(trace) == []
    assert trace.problems.count == 1


def test_a_log_of_events_that_goes_in_circles_ends(tmp_path: Path) -> None:
    def stored(parent: int | None, *hashes: int) -> dict[str, object]:
        return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}

    events = [stored(1, 1), stored(None, 1), stored(1, 2), stored(2, 3, 1), stored(3, 4, 4, 5)]
    path = write(tmp_path, jsonl(events))
    with open_trace(path, block_tokens=16) as trace:
        prompts = [request.ids.tolist() for batch in trace for request in batch]
    assert prompts == [[1, 1], [1], [1, 2], [1, 2, 3, 1], [1, 2, 3, 4, 4, 5]]


def test_prompts_of_millions_of_blocks_come_in_batches_of_few(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + 8 * "2023-11-16 18:17:05,16777216,1\n")
    with open_trace(path) as trace:
        sizes = [len(batch) for batch in trace]
    assert sizes == [3, 1, 1, 1, 1, 1, 1, 1]  # a batch ends with 2**20 blocks or more


def test_quotes_that_are_no_csv_are_told(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + '"' + 200_000 * "x" + '",1,1\n')
    with pytest.raises(TraceError, match=":4: field larger"):
        read(path)
    assert len(read(path, skip_bad=True)) == 2


def test_settings_out_of_range_are_told(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE)
    with pytest.raises(TraceError, match="block_tokens is 0"):
        open_trace(path, block_tokens=0)
    with pytest.raises(TraceError, match="synthetic_prefix is -1"):
        open_trace([path], synthetic_prefix=-1)
    for options in ({"seed": -1}, {"requests": -1}, {"block_tokens": 0}, {"batch": 0}):
        with pytest.raises(TraceError, match=f"{next(iter(options))} is"):
            next(synthesize("chat", **options))


def test_a_missing_file_and_mixed_formats_are_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "none.jsonl")
    paths = [str(write(tmp_path, jsonl(MOONCAKE), "a")), str(write(tmp_path, AZURE, "b"))]
    with pytest.raises(TraceError, match=r"a is mooncake, but .*b azure"):
        open_trace(paths)
    with pytest.raises(TraceError, match=r"a is mooncake, but .*b azure"):
        open_trace([*paths, paths[0]])


def test_lines_longer_than_a_piece_and_a_last_line_without_its_end(tmp_path: Path) -> None:
    n = 300_000
    row = dict(MOONCAKE[0], input_length=512 * n, hash_ids=list(range(n)))
    row["input_length"] = min(row["input_length"], 2**27)
    row["hash_ids"] = list(range(2**27 // 512))
    path = write(tmp_path, jsonl([row]) + json.dumps(MOONCAKE[1]))
    a, b = read(path)
    assert len(a.ids) == 2**18
    assert b.input_length == 512


def test_a_synthetic_trace_is_the_same_from_its_seed_and_reads_back(tmp_path: Path) -> None:
    made = [request for batch in synthesize(seed=5, requests=300) for request in batch]
    again = [request for batch in synthesize(seed=5, requests=300, batch=7) for request in batch]
    assert [r.ids.tolist() for r in made] == [r.ids.tolist() for r in again]
    other = [request for batch in synthesize(seed=6, requests=300) for request in batch]
    assert [r.input_length for r in made] != [r.input_length for r in other]
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(made))
    text = "".join(json.dumps(row) + "\n" for row in to_rows(made))
    back = read(write(tmp_path, text))
    assert [r.ids.tolist() for r in back] == [r.ids.tolist() for r in made]
    assert len({r.session for r in back}) == len({r.session for r in made})


def test_turns_of_a_synthetic_conversation_share_what_was_said() -> None:
    sessions: dict[str, list[Request]] = {}
    for batch in synthesize("chat", seed=2, requests=400):
        for request in batch:
            assert len(request.ids) == -(-request.input_length // 16)
            sessions.setdefault(request.session or "", []).append(request)
    turns = [s for s in sessions.values() if len(s) > 1]
    assert len(turns) > 20
    for first, second, *_ in turns:
        full = first.input_length // 16
        assert first.ids[:full].tolist() == second.ids[:full].tolist()
        assert second.input_length > first.input_length + first.output_length
