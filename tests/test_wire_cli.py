"""kvpool inspect, verify and diff: what they say, and that hostile files are told in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpool
from kvpool.cli import main
from kvpool.wire import EnvelopeFile, StreamWriter, write_file

FORMATS = Path(__file__).resolve().parent.parent / "formats"
GOLDEN = sorted((FORMATS / "golden").glob("*.tlkv"))
ERRORS = json.loads((FORMATS / "golden-errors/manifest.json").read_text())["envelopes"]
SEQUENCE = str(FORMATS / "golden/worked_sequence.tlkv")  # tokens 1 2 3 4 5

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *argv: object) -> tuple[int, str, str]:
    code = main([str(x) for x in argv])
    out, err = capsys.readouterr()
    return code, out, err


def sealed(path: Path, root: int = 0) -> str:
    pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    pool.slab.reshape(-1)[:] = range(pool.slab.size)
    with kvpool.BlockManager(pool).allocate([1, 2, 3, 4, 5], namespace=root) as seq:
        seq.commit()
        seq.save(path)
    return str(path)


# ---- verify -------------------------------------------------------------------------------------


def test_valid_files_are_passed_over_in_silence(capsys: Capture, tmp_path: Path) -> None:
    assert run(capsys, "verify", *GOLDEN, sealed(tmp_path / "s")) == (0, "", "")


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_hostile_files_are_told_in_a_line_each(capsys: Capture, command: str) -> None:
    wrong = [case for case in ERRORS if case["rule"] not in (0, 5)]
    paths = [FORMATS / "golden-errors" / case["file"] for case in wrong]
    code, out, err = run(capsys, command, *paths)
    assert (code, out) == (1, "")
    for line, path, case in zip(err.splitlines(), paths, wrong, strict=True):
        assert line.startswith(f"kvpool {command}: {path}: ")
        assert line.endswith(f"(rule {case['rule']})")


def test_one_bad_file_among_good_ones(capsys: Capture, tmp_path: Path) -> None:
    bad = FORMATS / "golden-errors/crc_zero.tlkv"
    code, _, err = run(capsys, "verify", SEQUENCE, bad, SEQUENCE)
    assert (code, err.count("\n")) == (1, 1)
    code, _, err = run(capsys, "verify", bad, tmp_path / "none", SEQUENCE)
    assert (code, err.count("\n")) == (2, 2)
    assert err.endswith("none: No such file or directory\n")
    assert run(capsys, "verify", tmp_path)[0] == 2


# ---- inspect ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_json_says_what_numpy_says(capsys: Capture, path: Path) -> None:
    code, out, err = run(capsys, "inspect", "--json", path)
    assert (code, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    envelope = kvpool.wire.Envelope(path.read_bytes())
    assert found["valid"] is True
    assert found["crc32c"] == f"{envelope.header.crc32c:08x}"
    assert found["header"]["n_blocks"] == len(envelope) == len(found["blocks"])
    for block, shown in zip(envelope, found["blocks"], strict=True):
        assert shown["hash"] == (f"{block.hash:016x}" if block.hash else None)
        assert shown["n_tokens"] == block.n_tokens
        for values, summary in ((block.k, shown["k"]), (block.v, shown["v"])):
            numbers = values[~np.isnan(values)].astype(np.float64)
            assert summary["n_nan"] == values.size - numbers.size
            if numbers.size and np.isfinite(numbers).all():
                assert (summary["min"], summary["max"]) == (numbers.min(), numbers.max())
                assert summary["mean"] == pytest.approx(numbers.mean(), rel=1e-6, abs=1e-9)
            elif numbers.size:
                assert float(summary["min"]) == numbers.min()


def test_the_text_has_a_header_and_a_table(capsys: Capture, tmp_path: Path) -> None:
    code, out, err = run(capsys, "inspect", sealed(tmp_path / "s", root=5))
    assert (code, err) == (0, "")
    assert "version 1, float16, 116 bytes" in out
    assert "3 of 2 tokens, 16 bytes each" in out
    assert "1 layers, 1 KV heads, head_dim 2" in out
    assert "right" in out
    assert "seal       tokens 0 to 5, namespace 0x5, digest" in out
    rows = [line.split() for line in out.splitlines()[-3:]]
    assert [row[:3] for row in rows] == [
        [str(i), f"{h:016x}" if h else "-", n]
        for i, h, n in zip(
            range(3), [*kvpool.block_hashes([1, 2, 3, 4], 2, 5).tolist(), 0], "221", strict=True
        )
    ]


def test_long_tables_are_cut_unless_asked(capsys: Capture) -> None:
    path = FORMATS / "golden/hundred_blocks.tlkv"
    code, out, _ = run(capsys, "inspect", path)
    assert code == 0
    assert "60 more blocks (--all shows them)" in out
    assert len(run(capsys, "inspect", "--all", path)[1].splitlines()) == 5 + 2 + 100


def test_the_chain_is_checked_against_the_prompt(capsys: Capture, tmp_path: Path) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text("[1, 2, 3,\n4, 5]\n")
    for tokens in ("1,2,3,4,5", "1 2 3 4 5 6", str(ids)):
        code, out, _ = run(capsys, "inspect", "--tokens", tokens, SEQUENCE)
        assert code == 0
        assert "2 of 3 blocks have the names of these tokens, 1 have none" in out
    for tokens, text in [
        ("1,2,3,7,5", "block 1 is named 03df829571605c60, its tokens give"),
        ("1,2,3", "block 1 is named 03df829571605c60, its tokens give none"),
        ("1,2,3,4", "block 2 ends at token 5, there are 4"),
        ("", "block 0 is named a91ab0c1027b9366, its tokens give none"),
    ]:
        code, out, _ = run(capsys, "inspect", "--tokens", tokens, SEQUENCE)
        assert code == 1
        assert f"WRONG: {text}" in out
    assert run(capsys, "inspect", "--tokens", "1,2,3,4,5", "--namespace", "7", SEQUENCE)[0] == 1
    for tokens, text in [
        ("1,x", "No such file"),
        (
            "1,4294967296",
            "token 1 of the list: expected an id of 0 to 2**32 - 1, found '4294967296'",
        ),
    ]:
        code, out, err = run(capsys, "inspect", "--tokens", tokens, SEQUENCE)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert text in err


def test_a_block_in_the_middle_of_a_prompt_is_found(capsys: Capture, tmp_path: Path) -> None:
    pool = kvpool.Pool(4, block_tokens=2, n_layers=1, n_kv_heads=1, head_dim=2)
    with kvpool.BlockManager(pool).allocate([1, 2, 3, 4, 5]) as seq:
        seq.commit()
        path = tmp_path / "one"
        path.write_bytes(pool.export(seq.blocks[1:2]))
    code, out, _ = run(capsys, "inspect", "--tokens", "1,2,3,4,5", path)
    assert code == 0
    assert "1 of 1 blocks have the names" in out


def test_a_seal_is_checked_against_the_prompt(capsys: Capture, tmp_path: Path) -> None:
    path = sealed(tmp_path / "s", root=9)
    code, out, _ = run(capsys, "inspect", "--tokens", "1,2,3,4,5,6", path)
    assert code == 0
    assert "and the seal is theirs" in out
    code, out, _ = run(capsys, "inspect", "--tokens", "1,2,3,4,6", path)  # the tail has no name
    assert code == 1
    assert "WRONG: the 5 tokens of the seal are others" in out
    code, out, _ = run(capsys, "inspect", "--tokens", "1,2,3,4,5", "--namespace", "0", path)
    assert code == 1
    assert "WRONG: the seal is of namespace 0x9, not 0x0" in out
    document = json.loads(run(capsys, "inspect", "--json", "--tokens", "1,2,3,4,5", path)[1])
    assert document["chain"]["right"] is True
    assert document["seal"]["n_tokens"] == 5


def test_json_of_a_bad_file_is_json(capsys: Capture) -> None:
    bad = FORMATS / "golden-errors/crc_zero.tlkv"
    code, out, err = run(capsys, "inspect", "--json", bad, SEQUENCE)
    first, second = map(json.loads, out.splitlines())
    assert (code, first["valid"], second["valid"]) == (1, False, True)
    assert first["error"].startswith("CRC-32C 00000000 at offset")
    assert err.count("\n") == 1


def test_a_plot_is_drawn(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = FORMATS / "golden/layers_heads_and_a_tail.tlkv"
    for name, start in (("x.png", b"\x89PNG"), ("x.svg", b"<?xml")):
        assert run(capsys, "inspect", "--plot", tmp_path / name, path)[0] == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    strange = os.fsencode(tmp_path) + b"/\xff\x1b[2J"  # the picture's title has it
    os.link(path, strange)
    code, out, _ = run(capsys, "inspect", "--plot", tmp_path / "y.png", os.fsdecode(strange))
    assert (code, out.partition("\n")[0]) == (0, f"{tmp_path}/??[2J")
    for argv, text in [
        ((tmp_path / "x.nothing", path), "expected a name that ends in .png, .svg or .pdf"),
        (("", path), "--plot : expected a name that ends in"),
        ((tmp_path / "no" / "x.png", path), "No such file"),
        ((tmp_path / "x.png", path, path), "expected one FILE, found 2"),
        ((tmp_path / "x.png", FORMATS / "golden/no_blocks.tlkv"), "no blocks"),
    ]:
        code, _, err = run(capsys, "inspect", "--plot", *argv)
        assert (code, err.count("\n")) == (2, 1)
        assert text in err


def test_a_plot_shows_the_means(tmp_path: Path) -> None:
    from kvpool.cli._measure import layer_means

    pool = kvpool.Pool(3, block_tokens=4, n_layers=2, n_kv_heads=2, head_dim=3)
    ids = pool.alloc(3)
    pool.slab[:] = np.random.default_rng(1).normal(size=pool.slab.shape)
    pool.set_fill(ids, [4, 4, 2])
    write_file(tmp_path / "x", pool.export_pieces(ids))
    want = np.abs(pool.slab.astype(np.float64)).mean(axis=(3, 5))  # block, layer, K or V, position
    want = want.transpose(2, 1, 0, 3).reshape(2, 2, 12)[..., :10]
    with EnvelopeFile(tmp_path / "x") as file:
        means, n = layer_means(file, 2000)
        assert n == 10
        np.testing.assert_allclose(means, want)
        means, _ = layer_means(file, 5)
        np.testing.assert_allclose(means, want.reshape(2, 2, 5, 2).mean(-1))


@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (4, 1, 3, 9), (64, 2, 1, 8)])
def test_large_blocks_are_measured_in_spans(
    tmp_path: Path, shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With spans of a few bytes every way to cut a block is gone."""
    from kvpool.cli import _measure

    size, layers, heads, dim = shape
    payload = np.random.default_rng(2).normal(size=(layers, 2, heads, size, dim))
    with open(tmp_path / "x", "wb") as sink, StreamWriter(sink, shape, 1) as writer:
        writer.write(payload.astype(np.float16), size - 1)
    want = payload.astype(np.float16)[:, :, :, : size - 1].astype(np.float64)
    for span in (1 << 22, 2 * heads * size * dim, 2 * size * dim, 2 * dim, 6):
        monkeypatch.setattr(_measure, "_SPAN_BYTES", span)
        with EnvelopeFile(tmp_path / "x") as file:
            both = _measure.summaries(file, 0, size - 1)
        for is_v, summary in enumerate(both):
            values = want[:, is_v]
            assert summary.count == values.size
            assert (summary.minimum, summary.maximum) == (values.min(), values.max())
            assert summary.mean == pytest.approx(values.mean(), abs=1e-6)


# ---- diff ---------------------------------------------------------------------------------------


def test_equal_files_are_equal(capsys: Capture, tmp_path: Path) -> None:
    for path in GOLDEN:
        assert run(capsys, "diff", path, path) == (0, "", "")
    path = sealed(tmp_path / "s")
    assert run(capsys, "diff", path, path) == (0, "", "")


def changed(path: Path, at: int, data: bytes) -> Path:
    whole = bytearray(Path(SEQUENCE).read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)
    return path


@pytest.mark.parametrize(
    ("at", "data", "first", "in_all"),
    [
        (56, b"\xff\xff\xff\xff", "", ""),  # replaced below: the end of block 0
        (
            28,
            bytes(8),
            "block 0, hash (offset 28): a91ab0c1027b9366 and 0000000000000000",
            "1 hash",
        ),
        (36, b"\1", "block 0, n_tokens (offset 36): 2 and 1", "1 n_tokens"),
        (
            40,
            b"\0\x3c",
            "block 0, layer 0, K, head 0, position 0, dim 0 (offset 40): ",
            "1 value in",
        ),
        (
            54,
            b"\0\x3c",
            "block 0, layer 0, V, head 0, position 1, dim 1 (offset 54): ",
            "1 value in",
        ),
        (112, bytes(4), "crc32c: 21bd8d51 and 00000000", "crc32c"),
    ],
)
def test_the_first_difference_is_named(
    capsys: Capture, tmp_path: Path, at: int, data: bytes, first: str, in_all: str
) -> None:
    other = changed(tmp_path / "other", at, data)
    code, out, err = run(capsys, "diff", SEQUENCE, other)
    assert (code, err) == (1, "")
    assert out.startswith(f"first: {first}")
    assert f"in all: {in_all}" in out
    if at == 56:
        assert out == (
            "first: block 1, hash (offset 56): 03df829571605c60 and 03df8295ffffffff\n"
            "in all: 1 hash\n"
        )


def test_differences_are_counted_across_spans(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.cli import diff

    data = bytearray((FORMATS / "golden/hundred_blocks.tlkv").read_bytes())
    (tmp_path / "a").write_bytes(data)
    record = 12 + kvpool.wire.EnvelopeHeader(data).block_bytes
    for i in range(50):
        data[28 + i * record : 40 + i * record] = b"\xfe" * 12
    for i in range(70):
        data[40 + i * record : 44 + i * record] = b"\xfe" * 4
    (tmp_path / "b").write_bytes(data)
    for span in (1 << 20, 64, 6, 2):
        monkeypatch.setattr(diff, "_SPAN_BYTES", span)
        code, out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
        assert code == 1
        assert out.endswith("in all: 50 hashes, 50 n_tokens, 140 values in 70 blocks\n")


def test_headers_and_seals_differ(capsys: Capture, tmp_path: Path) -> None:
    example = FORMATS / "golden/worked_example.tlkv"
    code, out, _ = run(capsys, "diff", SEQUENCE, example)
    assert code == 1
    assert out.startswith("first: n_blocks: 3 and 1\n")
    assert "2 blocks that only A has" in out
    a, b = sealed(tmp_path / "a"), sealed(tmp_path / "b", root=3)
    code, out, _ = run(capsys, "diff", a, b)
    assert out.startswith("first: seal, namespace: 0 and 3\n")
    code, out, _ = run(capsys, "diff", a, SEQUENCE)
    assert out.startswith("first: seal: there and none\n")
    code, out, err = run(capsys, "diff", a, tmp_path / "none")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, err = run(capsys, "diff", FORMATS / "golden-errors/version_2.tlkv", a)
    assert (code, out) == (2, "")
    assert "version 2 at offset 4" in err


# ---- hostile and huge ---------------------------------------------------------------------------


def test_a_terabyte_is_inspected_in_bounded_memory_and_time(tmp_path: Path) -> None:
    """A valid envelope of two blocks of half a terabyte of zeros, nearly all of it a hole."""
    dims = (1 << 9, 1 << 10, 1 << 9, 1 << 9)
    payload = 4 * dims[0] * dims[1] * dims[2] * dims[3]
    size, path = 32 + 2 * (12 + payload), tmp_path / "huge"
    head = b"TLKV\1\0\1\0" + b"".join(x.to_bytes(4, "little") for x in (2, *dims))
    with open(path, "wb") as file:
        file.write(head)
        for i in range(2):
            file.seek(28 + i * (12 + payload) + 8)
            file.write((1 << 9).to_bytes(4, "little"))
        file.truncate(size)
    with EnvelopeFile(path) as envelope:
        crc = envelope.crc()[1]
    with open(path, "r+b") as file:
        file.seek(size - 4)
        file.write(crc.to_bytes(4, "little"))
    if os.stat(path).st_blocks > 1 << 12:
        pytest.skip("this file system has no holes")
    code = "import re, sys; from kvpool.cli import main; code = main(sys.argv[1:]);"
    code += "status = open('/proc/self/status').read();"
    code += "print(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1], file=sys.stderr); sys.exit(code)"
    for argv in (["verify", path], ["inspect", path], ["diff", path, path]):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, argv)],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        assert int(done.stderr) < 100 * 1024  # KiB
        if argv[0] == "inspect":
            assert done.stdout.count("         0         0         0         0") == 4


VALID = [path.read_bytes() for path in GOLDEN if path.stat().st_size < 4096]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_files_are_a_line_and_an_exit_code(
    data: st.DataObject, tmp_path: Path, capsys: Capture
) -> None:
    seal = sealed(tmp_path / "seal")
    valid = [*VALID, Path(seal).read_bytes()]
    content = bytearray(data.draw(st.sampled_from(valid)))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, max(0, min(len(content), 130) - 1)))
        content[at : at + 4] = data.draw(
            st.binary(min_size=1, max_size=4) | st.sampled_from([b"\0" * 4, b"\xff" * 4])
        )
    content = content[: data.draw(st.none() | st.integers(0, len(content)))]
    if data.draw(st.booleans()) and len(content) >= 4:
        content[-4:] = kvpool.crc32c(content[:-4]).to_bytes(4, "little")
    path = tmp_path / "mutated"
    path.write_bytes(content)
    capsys.readouterr()
    code, out, err = run(capsys, "verify", path)
    assert code in (0, 1)
    assert (out, err.count("\n")) == ("", code)
    for argv in (
        ["inspect", "--tokens", "1,2,3,4,5", path],
        ["inspect", "--json", path],
        ["diff", path, seal],
        ["diff", SEQUENCE, path],
    ):
        other, out, err = run(capsys, *argv)
        assert other in (0, 1, 2)
        assert err.count("\n") <= 1
        if code == 0:
            assert not err
        if argv[1] == "--json":
            assert json.loads(out)["valid"] is (code == 0)
