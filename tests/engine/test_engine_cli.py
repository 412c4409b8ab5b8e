"""``kvpool generate`` and ``kvpool config`` as their users meet them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_support import load
from tiny_llama import TinyLlama

import kvpool
from kvpool.cli import main
from kvpool.cli.generate import SYSTEM
from kvpool.engine.llama import Llama
from kvpool.engine.paged import blocks_needed


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny model with room for answers that do not end by themselves."""
    weights = TinyLlama(n_layers=2, context_length=100_000, eos=False)
    return str(weights.write(tmp_path_factory.mktemp("cli") / "tiny.gguf"))


# Buffered, as at a user's: with PYTHONUNBUFFERED nothing is left to be written at the end.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "kvpool", *args]


@contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running command with pipes; killed at the end if it still runs."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command(*args), stdout=pipe, stderr=pipe, env=BUFFERED) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*args: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=60, check=False, **options
    )


def one_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    return text[:-1]


# ---- what it shows ------------------------------------------------------------------------------


def test_plain_text_in_a_pipe(model) -> None:
    done = run("generate", "--model", model, "--prompt", "one", "--prompt", "two", "--max-tokens=5")
    assert done.returncode == 0, done.stderr
    assert one_line(done.stderr) == f"loading {model} ..."
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert "> one" in lines
    assert "> two" in lines
    (header,) = [line for line in lines if line.startswith("prompt ")]
    assert "from cache" in header
    assert "tokens/s" in header
    (total,) = [line.split() for line in lines if line.startswith("all ")]
    assert int(total[3]) == 10
    (blocks,) = [line for line in lines if line.startswith("blocks: ")]
    assert " 0 used, " in blocks


def test_one_json_document_and_nothing_else(model) -> None:
    first = "a first question that is longer than the second one"
    prompts = [first, "a second question", first]
    args = [part for prompt in prompts for part in ("--prompt", prompt)]
    done = run(
        *("generate", "--model", model, "--json", *args, "--n", "2", "--max-tokens", "7"),
        *("--temperature", "0.9", "--seed", "3", "--block-tokens", "8"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert set(document) == {
        *("kvpool", "model", "settings", "prompts", "total", "pool", "interrupted"),
    }
    assert document["kvpool"] == kvpool.__version__
    assert document["interrupted"] is False
    assert document["settings"]["seed"] == 3
    tokenizer, pool = load(Path(model)).tokenizer, document["pool"]
    for prompt, text in zip(document["prompts"], prompts, strict=True):
        tokens = tokenizer.chat(text, document["settings"]["system"])
        assert prompt["prompt"] == text
        assert prompt["prompt_tokens"] == len(tokens)
        assert len(prompt["samples"]) == 2
        for sample in prompt["samples"]:
            assert sample["finish"] == "length"
            assert sample["text"] == tokenizer.decode(sample["tokens"])
            assert len(sample["tokens"]) == 7
        assert prompt["peak_blocks"] == blocks_needed(len(tokens), 7, 2, 8)
        assert prompt["peak_bytes"] == prompt["peak_blocks"] * pool["block_bytes"]
        positions = len(tokens) + 6
        assert prompt["contiguous_bytes"] == 2 * positions * document["model"]["kv_bytes_per_token"]
    first, second, third = document["prompts"]
    assert first["samples"] == third["samples"]  # a seed gives the same answers anywhere
    assert first["cached_tokens"] == 0
    chats = [tokenizer.chat(text, document["settings"]["system"]) for text in prompts]
    common = next(i for i, ids in enumerate(zip(*chats, strict=False)) if len({*ids}) > 1)
    assert second["cached_tokens"] == common // 8 * 8 > 0
    assert third["cached_tokens"] == (third["prompt_tokens"] - 1) // 8 * 8
    assert document["total"]["cached_tokens"] == second["cached_tokens"] + third["cached_tokens"]
    assert document["total"]["prompt_tokens"] == sum(map(len, chats))
    assert document["total"]["tokens"] == 42
    assert document["total"]["passes"] > 7
    assert document["total"]["preemptions"] == 0
    assert all(prompt["preempted"] == 0 for prompt in document["prompts"])
    assert pool["used"] == 0
    assert pool["free"] + pool["cached"] == pool["n_blocks"]


def test_the_note_on_the_prefix_cache_has_the_hit_rate(model, capsys) -> None:
    assert main(["generate", "--model", model, "--prompt=x", "--prompt=x", "--max-tokens=1"]) == 0
    (note,) = [s for s in capsys.readouterr().out.splitlines() if s.startswith("prefix cache: ")]
    n = len(load(Path(model)).tokenizer.chat("x", SYSTEM))
    hit = (n - 1) // 16 * 16
    assert note == f"prefix cache: {hit} of {2 * n} prompt tokens ({100 * hit / (2 * n):.0f} %)"


def test_the_cache_can_be_switched_off(model, capsys) -> None:
    args = ["generate", "--model", model, "--json", "--prompt=x", "--prompt=x", "--max-tokens=3"]
    documents = []
    for kind in ("hash", "none"):
        assert main([*args, "--prefix-cache", kind]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    on, off = documents
    assert on["total"]["cached_tokens"] > 0
    assert off["total"]["cached_tokens"] == off["pool"]["cached"] == 0
    assert [p["samples"] for p in on["prompts"]] == [p["samples"] for p in off["prompts"]]


def on_a_terminal(*args: str, rows: int = 40) -> tuple[int, str]:
    """Exit code and all that a terminal was sent."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": str(rows)}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        command(*args), stdin=follower, stdout=follower, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(leader)
    return process.returncode, shown.decode()


def test_colors_and_a_table_on_a_terminal(model) -> None:
    code, text = on_a_terminal(
        "generate", "--model", model, "--prompt", "one", "--n", "2", "--max-tokens", "4"
    )
    assert code == 0, text
    assert "loading" in text
    assert "\x1b[" in text
    for word in ("> one", "[1] ", "[2] ", "tokens/s", "contiguous", "prefix cache", " 0 used, "):
        assert word in text


def test_a_live_view_on_a_terminal(model) -> None:
    """Every sequence with its state, the pool's occupancy, hits and speed; answers scroll by."""
    args = ["--model", model, "--max-tokens", "30", "--batch=4", "--draft=2", "--temperature=1"]
    args += ["--block-tokens=4", "--blocks=120", "--chunk=64"]
    code, text = on_a_terminal("generate", *args, *(f"prompt {i}" for i in range(9)), rows=25)
    assert code == 0, text
    for word in ("decode", "prefill", "waiting", "preempted", "used ", "cached ", "free "):
        assert word in text
    for word in ("120 blocks of 4 tokens", "tokens/s", "prefix hits ", " passes", "drafts "):
        assert word in text
    assert "4 more" in text  # nine do not fit the screen
    for i in range(9):
        assert text.count(f"> prompt {i}") == 1
    assert text.rstrip().rpartition("drafts")[2]  # the sums stand at the end


def test_prompts_from_a_file_and_from_stdin(model, tmp_path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two \n", encoding="utf-8")
    for args, options in (([str(path)], {}), (["-"], {"input": "one\ntwo\n"})):
        done = run(
            "generate", "--model", model, "--json", "--max-tokens=2", "--prompts", *args, **options
        )
        assert [prompt["prompt"] for prompt in json.loads(done.stdout)["prompts"]] == ["one", "two"]


def answers(capsys, *args: str) -> list[list[tuple[list[int], str]]]:
    assert main(["generate", "--json", "--max-tokens=12", *args]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pool"]["used"] == 0
    return [[(s["tokens"], s["finish"]) for s in p["samples"]] for p in document["prompts"]]


def test_no_option_of_the_engine_changes_an_answer(model, capsys) -> None:
    prompts = ["one", "two", "three and a half", "one"]
    args = ["--model", model, *prompts, "--n=2", "--temperature=0.9", "--top-k=50", "--top-p=0.9"]
    plain = answers(capsys, *args, "--batch=1")
    assert len(plain) == 4
    assert plain[0] != plain[1]
    for option in (
        "--batch=3", "--chunk=5", "--draft=4", "--threads=1", "--blocks=60", "--block-tokens=4",
        "--prefix-cache=none",
    ):  # fmt: skip
        if option == "--block-tokens=4":
            assert answers(capsys, *args, option, "--blocks=80") == plain
        else:
            assert answers(capsys, *args, option) == plain


def test_prompts_are_arguments_and_then_options(model, capsys) -> None:
    args = ["generate", "--model", model, "--json", "--max-tokens=1", "b", "a", "--prompt", "c"]
    assert main(args) == 0
    shown = json.loads(capsys.readouterr().out)["prompts"]
    assert [prompt["prompt"] for prompt in shown] == ["b", "a", "c"]


def test_beam_search_gives_the_best_with_their_scores(model, capsys) -> None:
    args = ["generate", "--model", model, "--max-tokens=5", "--beams=4", "--n=2", "x", "y"]
    assert main([*args, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for prompt in document["prompts"]:
        scores = [sample["score"] for sample in prompt["samples"]]
        assert len(scores) == 2
        assert scores == sorted(scores, reverse=True)
    kept = [sample["tokens"] for prompt in document["prompts"] for sample in prompt["samples"]]
    assert document["total"]["tokens"] == sum(map(len, kept))  # those that were dropped are not new
    assert main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines if line.startswith("[")] == ["[1]", "[2]"] * 2


def test_a_pool_too_small_for_all_preempts_and_says_so(model, capsys) -> None:
    args = ["generate", "--model", model, "--system=", "--block-tokens=4", "--max-tokens=40"]
    assert main([*args, "--blocks=30", "one", "two", "three", "four"]) == 0
    text = capsys.readouterr().out
    (note,) = [line for line in text.splitlines() if line.startswith("blocks: ")]
    assert " 0 used, " in note
    assert int(note.rpartition(", ")[2].split()[0]) > 0
    assert note.endswith(" requests preempted")


def test_drafts_are_counted(model, capsys) -> None:
    assert main(["generate", "--model", model, "--draft=3", "--max-tokens=30", "x"]) == 0
    (note,) = [s for s in capsys.readouterr().out.splitlines() if s.startswith("drafts: ")]
    right, _, guessed = note.removeprefix("drafts: ").split()[:3]
    assert 0 <= int(right) <= int(guessed)
    assert int(guessed) > 0


def test_answers_come_in_the_order_of_the_prompts(model) -> None:
    """In a pipe: whoever is done first waits for the ones before it."""
    done = run("generate", "--model", model, "--max-tokens=6", "--n=2", *"abcdef")
    assert [line for line in done.stdout.splitlines() if line.startswith("> ")] == [
        f"> {name}" for name in "abcdef"
    ]
    assert sum(line.startswith("[2] ") for line in done.stdout.splitlines()) == 6


def test_output_that_cannot_be_encoded_is_replaced(model) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = run("generate", "--model", model, "--prompt", "é", "--max-tokens=20", env=environment)
    assert done.returncode == 0, done.stderr
    assert "> ?" in done.stdout


# ---- what it refuses ----------------------------------------------------------------------------

REFUSED = {
    "--n 0": "argument --n: 0 is not in 1..4294967295",
    "--n x": "argument --n: 'x' is no whole number",
    "--n 1.5": "argument --n: '1.5' is no whole number",
    "--max-tokens -1": "argument --max-tokens: -1 is not in 1..",
    "--temperature -1": "argument --temperature: -1 is not finite and at least 0",
    "--temperature nan": "argument --temperature: nan is not finite",
    "--temperature inf": "argument --temperature: inf is not finite",
    "--temperature warm": "argument --temperature: 'warm' is no number",
    "--seed -1": "argument --seed: -1 is not in 0..",
    "--blocks 0": "argument --blocks: 0 is not in 1..",
    "--blocks 4294967296": "argument --blocks: 4294967296 is not in 1..",
    "--block-tokens 0": "argument --block-tokens: 0 is not in 1..",
    "--prefix-cache some": "argument --prefix-cache: invalid choice: 'some'",
    "--prompt a --prompts b": "argument --prompts: not allowed with argument --prompt",
    "a --prompts b": "argument PROMPT: not allowed with argument --prompts",
    "--top-k -1": "argument --top-k: -1 is not in 0..",
    "--top-p 0": "argument --top-p: 0 is not above 0 and at most 1",
    "--top-p 1.1": "argument --top-p: 1.1 is not above 0 and at most 1",
    "--top-p x": "argument --top-p: 'x' is no number",
    "--beams -1": "argument --beams: -1 is not in 0..",
    "--beams 2 --n 3": "--n 3: 2 beams have no more answers",
    "--beams 2 --temperature 1": "--temperature: beam search draws nothing",
    "--draft -1": "argument --draft: -1 is not in 0..",
    "--batch 0": "argument --batch: 0 is not in 1..",
    "--chunk 0": "argument --chunk: 0 is not in 1..",
    "--threads 0": "argument --threads: 0 is not in 1..",
    "--prompts no-such-file": "--prompts no-such-file: No such file or directory",
    "--prompts /dev/null": "--prompts /dev/null: no prompts in it",
    "--model no-such-file": "no-such-file: No such file or directory",
    "--model /dev/null": "/dev/null: not a GGUF file",
    "--max-tok 5": "unrecognized arguments: --max-tok",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(line: str, capsys, monkeypatch) -> None:
    monkeypatch.chdir("/")
    try:
        code = main(["generate", "--json", *line.split()])
    except SystemExit as stop:
        code = stop.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert one_line(shown.err).startswith("kvpool")
    assert REFUSED[line] in shown.err


def test_an_empty_prompt_and_a_file_that_is_no_text(model, tmp_path, capsys) -> None:
    assert main(["generate", "--model", model, "--prompt", "  "]) == 2
    assert "--prompt: the text is empty" in one_line(capsys.readouterr().err)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    assert main(["generate", "--model", model, "--prompts", str(tmp_path / "binary")]) == 2
    assert "not UTF-8" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("option", ["--prompt", "--system"])
def test_a_text_that_is_not_utf_8_is_one_line(model, option: str) -> None:
    done = subprocess.run(
        [*command("generate", "--model", model, "--max-tokens=1", option), b"a\xffb"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert one_line(done.stderr).endswith(f"{option}: the text is not UTF-8 (character 2)")


def test_an_empty_path_is_called_empty(capsys) -> None:
    for option in ("--model", "--prompts"):
        assert main(["generate", option, ""]) == 2
        assert f"{option} is empty" in one_line(capsys.readouterr().err)


def test_a_pool_too_small_says_how_many_blocks_it_takes(model, capsys) -> None:
    tokens = len(load(Path(model)).tokenizer.chat("hello"))
    args = ["generate", "--json", "--model", model, "--system", "", "--prompt", "hello"]
    args += ["--block-tokens", "4", "--max-tokens", "9", "--n", "2"]
    needed = tokens // 4 + 2 * (-(-(tokens + 8) // 4) - tokens // 4)
    assert main([*args, "--blocks", str(needed - 1)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    text = one_line(shown.err)
    assert f"prompt 1 needs {needed} blocks of 4 tokens ({tokens} prompt tokens" in text
    assert f"the pool has {needed - 1}" in text
    assert main([*args, "--blocks", str(needed)]) == 0


def test_a_prompt_longer_than_the_context_is_refused(model, capsys) -> None:
    args = ["generate", "--model", model, "--json", "--prompt", "hi", "--max-tokens", "100000"]
    assert main(args) == 2
    assert "longer than the model's context of 100000" in capsys.readouterr().err


def test_a_pool_that_no_memory_can_hold(model, capsys) -> None:
    args = ["generate", "--model", model, "--json", "--prompt", "hi", "--max-tokens", "1"]
    assert main([*args, "--blocks", "4294967295", "--block-tokens", "4294967295"]) == 2
    assert one_line(capsys.readouterr().err)


@pytest.mark.parametrize("package", ["gguf", "tokenizers", "jinja2", "rich"])
def test_a_missing_package_says_how_to_install_it(package: str, model) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from kvpool.cli import main\n"
        f"sys.exit(main(['generate', '--json', '--prompt', 'x', '--model', {model!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    expected = f"the package '{package}' is missing: pip install 'kvpool[model]'"
    assert expected in one_line(done.stderr)


def test_the_command_line_and_config_need_no_optional_package() -> None:
    program = (
        "import sys\n"
        "for name in ('gguf', 'tokenizers', 'jinja2', 'rich'): sys.modules[name] = None\n"
        "from kvpool.cli import main\n"
        "sys.exit(main(['config', '--include']))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


# ---- how it ends --------------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error(model) -> None:
    args = ("generate", "--model", model, "--prompt", "x", "--max-tokens", "50000")
    with started(*args) as process:
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(30) == 141
    assert one_line(errors).startswith("loading")


def test_a_document_that_nobody_reads_is_no_error(model) -> None:
    args = ("generate", "--model", model, "--prompt", "x", "--max-tokens", "2", "--json")
    for call in (args, ("config", "--version")):
        with started(*call) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(60) == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("form", ["text", "json", "config"])
def test_a_full_disk_is_one_line(model, form) -> None:
    args = command("generate", "--model", model, "--prompt", "x", "--max-tokens", "5")
    args = command("config", "--version") if form == "config" else args
    args += ["--json"] if form == "json" else []
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            args, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=BUFFERED
        )
    assert done.returncode == 2
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("form", ["text", "json", "config"])
def test_a_closed_stdout_is_one_line(model, form) -> None:
    args = command("generate", "--model", model, "--prompt", "x", "--max-tokens", "2")
    args = command("config", "--version") if form == "config" else args
    args += ["--json"] if form == "json" else []
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *args]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert one_line(done.stderr).endswith("stdout is closed")


def test_a_closed_stderr_sends_nothing_to_stdout(model) -> None:
    for path, code in ((model, 0), ("no-such-file", 2)):
        args = command("generate", "--model", path, "--prompt", "x", "--max-tokens", "2")
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" 2>&-', "sh", *args],
            stdout=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code
        assert "loading" not in done.stdout
        assert "no-such-file" not in done.stdout


def test_a_closed_stdin_is_one_line(model) -> None:
    args = command("generate", "--model", model, "--prompts", "-")
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *args],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert one_line(done.stderr).endswith("--prompts -: stdin is closed")


def test_ctrl_c_tells_what_was_done(model) -> None:
    args = ("generate", "--model", model, "--prompt", "x", "--max-tokens", "90000")
    with started(*args) as process:
        process.stdout.read(20)  # the answer has begun
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    last = errors.decode().splitlines()[-1]
    assert last.startswith("kvpool generate: interrupted; 0 of 1 prompts answered, ")
    assert last.endswith("tokens generated, 0 blocks in use")
    assert b" 0 used, " in out


def test_ctrl_c_leaves_one_json_document_about_what_was_done(model, capsys, monkeypatch) -> None:
    forward, calls = Llama.forward, 0

    def interrupted(self, batch):
        nonlocal calls
        calls += len(batch.tokens) == 2  # steps of both samples, five for each prompt
        if calls == 7:
            signal.raise_signal(signal.SIGINT)  # in the middle of a pass
        return forward(self, batch)

    monkeypatch.setattr(Llama, "forward", interrupted)
    before = signal.getsignal(signal.SIGINT)
    args = ["generate", "--model", model, "--json", "--system=", "--n=2", "--max-tokens=6"]
    args += ["--batch=2"]  # one prompt at a time
    assert main([*args, "--prompt=a", "--prompt=b", "--prompt=c"]) == 130
    assert signal.getsignal(signal.SIGINT) == before
    document = json.loads(capsys.readouterr().out)
    assert document["interrupted"] is True
    assert document["pool"]["used"] == 0
    finished = [[s["finish"] for s in prompt["samples"]] for prompt in document["prompts"]]
    assert finished == [["length"] * 2, [None] * 2]


def test_ctrl_c_while_the_model_loads(model, capsys, monkeypatch) -> None:
    from kvpool.engine.gguf_file import ModelFile

    weight = ModelFile.weight

    def interrupted(self, name, *shape):
        if name == "blk.0.ffn_up.weight":
            signal.raise_signal(signal.SIGINT)
        return weight(self, name, *shape)

    monkeypatch.setattr(ModelFile, "weight", interrupted)
    assert main(["generate", "--json", "--model", model, "--prompt", "x"]) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert one_line(shown.err) == "kvpool generate: interrupted"


# ---- config -------------------------------------------------------------------------------------


def test_config_prints_paths_that_exist() -> None:
    include = Path(one_line(run("config", "--include").stdout))
    assert (include / "tinyllm" / "kv_pool.h").is_file()
    assert Path(one_line(run("config", "--library").stdout)).is_file()
    assert one_line(run("config", "--version").stdout) == kvpool.__version__
    assert one_line(run("--version").stdout) == f"kvpool {kvpool.__version__}"


def test_config_without_the_files_says_so(monkeypatch, capsys, tmp_path) -> None:
    from kvpool.cli import config

    def no_library() -> str:
        raise FileNotFoundError("no libtinyllm under here")

    monkeypatch.setattr(config, "get_include", lambda: str(tmp_path))
    monkeypatch.setattr(config, "get_library", no_library)
    for flag, text in (("--include", "no C headers"), ("--library", "no libtinyllm")):
        assert main(["config", "--version", flag]) == 2
        shown = capsys.readouterr()
        assert text in one_line(shown.err)
        assert shown.out == ""


def test_config_prints_several_things_in_one_order_and_all_by_default(capsys) -> None:
    include, library, version = kvpool.get_include(), kvpool.get_library(), kvpool.__version__
    for args, lines in (
        ([], [include, library, version]),
        (["--library", "--include"], [include, library]),
        (["--version", "--include"], [include, version]),
    ):
        assert main(["config", *args]) == 0
        assert capsys.readouterr().out.splitlines() == lines


def test_no_command_is_a_mistake_and_help_is_none(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert one_line(capsys.readouterr().err)
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    assert "--prefix-cache" in capsys.readouterr().out
