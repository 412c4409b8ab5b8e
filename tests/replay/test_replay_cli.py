"""The commands replay, size and trace, as a user meets them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from replay_support import CEILING, conversation

from kvpool.cli import main

KVPOOL = [sys.executable, "-m", "kvpool"]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{i:02}.0000000,{300 + i},{40 + i}\n" for i in range(60)
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(list(arguments)) == code, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.fixture(name="trace")
def trace_fixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = tmp_path / "chat.jsonl"
    run(capsys, "trace", "synth", "--workload", "chat", "--requests", "400", "--out", str(path))
    return str(path)


def test_without_a_trace_it_replays_the_sample_workload(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "replay", "--limit", "300", "--policies", "none")
    assert "sample workload" in out
    assert "300 requests" in out
    for title in ("replayed, 64 requests in flight", "every size at once", "distributions",
                  "beginnings shared most", "sessions with most requests"):  # fmt: skip
        assert title in out


def test_the_json_document_has_what_the_page_shows(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(run(capsys, "replay", trace, "--blocks", "4000,1000", "--json"))
    assert document["requests"] == 400
    assert [replay["n_blocks"] for replay in document["replays"]] == [1000, 4000]
    assert set(document["policies"]["hit_blocks"]) >= {"lru", "optimal", "s3-fifo"}
    rates = [rate for _, rate in document["curve"]["points"]]
    assert rates == sorted(rates)
    assert rates[-1] == document["ceiling"]["block_hit_rate"]
    assert document["hit_age_s"]["total"] == document["replays"][1]["hit_blocks"]
    assert document["sessions"][0]["requests"] > 1
    assert document["parse"]["bytes"] == Path(trace).stat().st_size


def test_the_ceiling_of_the_conversation_trace(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(
        capsys, "replay", conversation(), "--blocks", "10000", "--match-last", "--json",
        "--policies", "none",
    )  # fmt: skip
    document = json.loads(out)
    assert document["ceiling"]["hit_blocks"] == CEILING
    assert document["replays"][0]["hit_blocks"] == 61_046
    assert document["replays"][0]["block_hit_rate"] == round(61_046 / 288_500, 6)


def test_real_time_shows_waiting_and_preemptions(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ["--prefill-rate", "4000", "--decode-rate", "30"]
    out = run(capsys, "replay", trace, "--real-time", *rates, "--blocks", "3000", "--samples", "2")
    for column in ("waited", "preempted", "wait p99"):
        assert column in out
    document = json.loads(
        run(capsys, "replay", trace, "--real-time", *rates, "--blocks", "600", "--json")
    )
    (replay,) = document["replays"]
    assert replay["waited"] > 0
    assert replay["wait_s"]["total"] + replay["rejected"] >= 400
    assert replay["peak_used"] <= 600


def test_lengths_alone_say_so_and_a_synthetic_prefix_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    out = run(capsys, "replay", str(path))
    assert "has no hashes" in out
    assert "every size at once" not in out
    out = run(capsys, "replay", str(path), "--synthetic-prefix", "160")
    assert "synthetic prefix" in out
    assert "every size at once" in out


def test_bad_lines_are_told_or_counted(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open(trace, "a") as file:
        file.write('{"chat_id": 1}\n')
    assert main(["replay", trace]) == 2
    assert "chat.jsonl:401: " in capsys.readouterr().err
    out = run(capsys, "replay", trace, "--skip-bad")
    assert "1 bad lines left out" in out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--real-time"], "--prefill-rate and --decode-rate"),
        (["--real-time", "--in-flight", "3"], "two clocks"),
        (["--prefill-rate", "3"], "are of --real-time"),
        (["--memory", "80GiB"], "--memory needs --config"),
        (["--policies", "lru,mru"], "'mru'"),
        (["--plot", "x.bmp"], "ends in .png"),
        (["/nowhere/t.jsonl"], "No such file"),
        (["--config", "/nowhere"], "No such file"),
        (["--report", "/nowhere/x.html"], "--report /nowhere/x.html: no such folder"),
        (["--csv", "/tmp"], "--csv /tmp: it is a folder"),
        (["--report", ""], "--report : it is a folder"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) == 2
    err = capsys.readouterr().err
    assert why in err
    assert err.count("\n") == 1


def test_without_the_extra_the_sample_runs_and_json_says_what_is_missing(trace: str) -> None:
    code = (
        "import sys\n"
        "for name in ('msgspec', 'rich', 'zstandard', 'matplotlib'): sys.modules[name] = None\n"
        "from kvpool.cli import main\n"
        "assert main(['replay', '--limit', '200', '--policies', 'none']) == 0\n"
        f"assert main(['replay', {trace!r}]) == 2\n"
        "assert main(['replay', '--limit', '9', '--plot', 'x.png']) == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "200 requests" in done.stdout
    assert "JSON traces need msgspec: pip install 'kvpool[replay]'" in done.stderr
    assert "pictures need matplotlib: pip install 'kvpool[plot]'" in done.stderr


def test_names_in_a_trace_do_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    row = {"tokens": list(range(64)), "session": "a\x1b[2Jb"}
    path.write_text((json.dumps(row) + "\n") * 3)
    out = run(capsys, "replay", str(path))
    assert "a?[2Jb" in out
    assert "\x1b" not in out


def test_names_of_files_do_not_steer_the_terminal(trace: str, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\x1b[2J\xff"
    os.link(trace, name)
    page = tmp_path / "out.html"
    for encoding, command, code in (
        ("utf-8", [b"replay", name, b"--policies", b"none", b"--report", os.fsencode(page)], 0),
        ("ascii", [b"replay", name, b"--policies", b"none"], 0),
        ("utf-8", [b"replay", name + b"none"], 2),
        ("ascii", [b"verify", name], 1),
        ("utf-8", [b"size", b"--config", name], 2),
    ):
        done = subprocess.run(
            [*KVPOOL, *command], capture_output=True, timeout=120, check=False,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert b"?[2J?" in done.stdout + done.stderr
        assert b"\x1b" not in done.stdout + done.stderr
    assert "?[2J?" in page.read_text()


def test_a_terminal_without_block_characters_gets_others(trace: str) -> None:
    done = subprocess.run(
        [*KVPOOL, "replay", trace, "--policies", "none"], capture_output=True, timeout=120,
        check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert b" " + 30 * b"#" + b"\n" in done.stdout


@pytest.mark.parametrize("columns", [20, 80])
def test_a_narrow_terminal_shows_every_number(trace: str, columns: int) -> None:
    pytest.importorskip("rich")
    arguments = ["replay", trace, "--blocks", "1000,4000", "--policies", "none", "--real-time"]
    arguments += ["--prefill-rate", "8000", "--decode-rate", "20"]
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*KVPOOL, *arguments], stdout=slave, stderr=subprocess.DEVNULL,
        env={**os.environ, "TERM": "dumb", "COLUMNS": str(columns)},
    ) as process:  # fmt: skip
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # the other end was closed
            while chunk := os.read(master, 4096):
                shown += chunk
        os.close(master)
        assert process.wait(60) == 0
    plain = subprocess.run([*KVPOOL, *arguments], capture_output=True, timeout=120, check=True)
    assert "…" not in shown.decode()
    for word in plain.stdout.split():
        assert word in shown, word
    bars = [line for line in shown.decode().splitlines() if "█" in line]
    starts = {line.index("█") for line in bars}
    assert len(bars) == 13
    assert len(starts) == 1  # bars grow from one line to the right


@pytest.mark.parametrize("blocks", ["0", "x", "1,,2", "3000000000"])
def test_sizes_that_are_none(blocks: str) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--blocks", blocks])


def test_in_a_pipe_there_is_no_bar_and_on_a_terminal_there_is(trace: str) -> None:
    pytest.importorskip("rich")
    done = subprocess.run([*KVPOOL, "replay", trace], capture_output=True, timeout=120, check=True)
    assert done.stderr == b""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*KVPOOL, "replay", trace, "--json"], stdout=subprocess.DEVNULL, stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
    ) as process:  # fmt: skip
        os.close(slave)
        shown = b""
        try:
            while chunk := os.read(master, 4096):
                shown += chunk
        except OSError:  # the other end was closed
            pass
        os.close(master)
        assert process.wait(60) == 0
    assert b"replaying" in shown
    assert b"requests, " in shown
    assert b"/s" in shown


def test_ctrl_c_prints_the_results_so_far(trace: str) -> None:
    lines = Path(trace).read_bytes().splitlines(keepends=True)
    with subprocess.Popen(
        [*KVPOOL, "replay", "-", "--json", "--blocks", "4000"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"".join(lines) * 20)  # several megabytes: some of it is read
        process.stdin.flush()
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
        assert process.wait(60) == 130
    document = json.loads(out)
    assert document["interrupted"] is True
    assert document["requests"] > 0
    assert b"interrupted after" in err
    assert err.count(b"\n") == 1


def test_memory_stays_flat_for_a_trace_of_millions_of_blocks(tmp_path: Path) -> None:
    """The command on a trace of 2 million blocks, and on three times as many."""
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        for i in range(20_000):
            begin = i * 7919 % 15_000 * 100
            ids = ",".join(map(str, range(begin, begin + 100)))
            file.write(
                f'{{"timestamp":{i},"input_length":51200,"output_length":9,"hash_ids":[{ids}]}}\n'
            )
    code = (
        "import resource, sys; from kvpool.cli import main; code = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)"
    )
    options = ["--blocks", "20000", "--max-blocks", "100000", "--policies", "none", "--json"]
    peaks = []
    for times in (1, 3):
        done = subprocess.run(
            [sys.executable, "-c", code, "replay", *[str(path)] * times, *options],
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        assert json.loads(done.stdout)["blocks"] == 2_000_000 * times
        peaks.append(int(done.stderr))
    assert peaks[1] <= peaks[0] * 1.05 + 6, peaks  # keeping the names alone would take 32 more


@pytest.mark.parametrize("seed", range(20))
def test_tiny_traces_of_odd_lengths_come_through(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One request, prompts that fit no pool, times that fall, the same block twice, no answer."""
    rng = random.Random(seed)
    rows = []
    for i in range(rng.choice([1, 2, 10])):
        length = rng.choice([1, 511, 512, 513, 3000, 100_000])
        n = -(-length // 512) if rng.random() < 0.7 else length // 512
        ids = [rng.choice([0, j, rng.randrange(2**64)]) for j in range(n)]
        at, out = rng.choice([0, i * 1000, 10**9, -5]), rng.choice([0, 1, 600, 50_000])
        rows.append({"timestamp": at, "input_length": length, "output_length": out})
        rows[-1]["hash_ids"] = ids
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    clock = rng.choice(
        [
            ["--real-time", "--prefill-rate", "1", "--decode-rate", "1e6", "--samples", "3"],
            ["--real-time", "--prefill-rate", "1e9", "--decode-rate", "0.5"],
            ["--outputs", "--samples", "2"],
            ["--match-last"],
        ]
    )
    report = str(tmp_path / "t.html")
    blocks = rng.choice(["1", "3", "1,2,300", "1000"])
    out = run(capsys, "replay", str(path), "--blocks", blocks, "--report", report, "--json", *clock)

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    document = json.loads(out, parse_constant=no_constant)
    assert document["requests"] == len(rows)
    assert "</html>" in Path(report).read_text()
    run(capsys, "replay", str(path), "--blocks", blocks, *clock)
