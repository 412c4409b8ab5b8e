"""``kvpool serve`` and ``kvpool push``: two processes, the same tokens as one."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvpool[transfer]")
pytest.importorskip("gguf", reason="needs kvpool[model]")
from kvpool.cli import main

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/engine"))
ENV = {**os.environ, "PYTHONUNBUFFERED": "1"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """A command in this process, which is the prefill side; the decode side is another one."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in "oe")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(args)
        except SystemExit as end:  # argparse
            code = end.code  # type: ignore[assignment]
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(args, code, *texts)


class Server:
    """``kvpool serve`` on a free port."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.out, self.err = folder / "serve.out", folder / "serve.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvpool", "serve", "--listen", "127.0.0.1:0", *args],
                stdout=out, stderr=err, env=ENV,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while not (found := re.search(r" on (\S+) \(this machine only\)", self.err.read_text())):
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.address = found[1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*args: str) -> Server:
        servers.append(Server(tmp_path, *args))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    from tiny_llama import TinyLlama

    def make(name: str, **options: Any) -> str:
        weights = TinyLlama(n_layers=2, context_length=100_000, eos=False, **options)
        return str(weights.write(tmp_path_factory.mktemp("cli") / f"{name}.gguf"))

    return make


def test_two_processes_answer_as_one_does(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2, greedy and seeded: what the decode side prints, what comes back to the prefill side
    and what ``kvpool generate`` says are the same. And the README's picture is what they print.

    The two processes load the model once each, which is most of the time that this takes."""
    from kvpool.cli import _transfer, generate
    from kvpool.engine.gguf_file import default_model_path

    real, loaded = generate._load, []

    def load(*args: Any) -> Any:
        if not loaded:
            loaded.append(real(*args))
        return loaded[0]

    for module in (generate, _transfer):
        monkeypatch.setattr(module, "_load", load)

    try:
        default_model_path()
    except ValueError as error:
        pytest.skip(str(error))
    panes = (ROOT / "docs/figures/transfer-terminals.txt").read_text().split("====\n")
    prompts = re.findall(r'--prompt "([^"]+)"', panes[1])
    asked = [part for text in prompts for part in ("--prompt", text)]
    seeded = [*asked[2:], "--max-tokens=16", "--temperature=1.1", "--seed=3", "--top-k=40",
              "--top-p=0.95", "--json"]  # fmt: skip

    server = serve()
    greedy_push = run("push", "--to", server.address, *asked)
    assert greedy_push.returncode == 0, greedy_push.stderr
    printed = server.err.read_text() + server.out.read_text()
    for pane, output in zip(panes, (printed, greedy_push.stderr + greedy_push.stdout), strict=True):
        assert plain(pane.partition("\n")[2]).strip() == plain(output).strip()
    seeded_push = run("push", "--to", server.address, *seeded)
    assert seeded_push.returncode == 0, seeded_push.stderr
    assert server.stop() == 0

    alone = run("generate", *asked, "--json")
    for prompt in json.loads(alone.stdout)["prompts"]:
        assert prompt["samples"][0]["text"] in printed
    alone = run("generate", *seeded)
    found = json.loads(seeded_push.stdout)["prompts"]
    expected = [prompt["samples"][0] for prompt in json.loads(alone.stdout)["prompts"]]
    assert [p["tokens"] for p in found] == [p["tokens"] for p in expected]
    assert [p["finish"] for p in found] == [p["finish"] for p in expected]
    for prompt in found:
        assert prompt["text"] in server.out.read_text()
        # The decode side has the full blocks of these prompts by now: only the tails are sent.
        assert prompt["blocks_deduped"] == prompt["prompt_tokens"] // 16
        assert prompt["bytes_sent"] == prompt["blocks_sent"] * (368_640 + 44)


def plain(text: str) -> str:
    return re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", re.sub(r"(?m)^\[\w{8}\]", "[HANDLE]", text))


def test_figures_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs/figures/transfer.py", "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [x for x in done.stderr.splitlines() if not x.startswith("loading")]
    assert done.returncode == 2, done
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_token_of_a_file_and_what_is_wrong_with_it(serve: Any, tiny: Any, tmp_path: Path) -> None:
    model = tiny("token")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("secret\nand a comment\n")
    wrong.write_text("other\n")
    server = serve("--model", model, "--token-file", str(right))
    push = ["push", "--to", server.address, "--model", model, "--prompt", "one", "--max-tokens=3"]
    assert run(*push, "--token-file", str(right)).returncode == 0
    assert "UNAUTHENTICATED" in one_line(run(*push, "--token-file", str(wrong)))
    assert "UNAUTHENTICATED" in one_line(run(*push))
    assert "no-such" in one_line(run(*push, "--token-file", "no-such"))


def test_sides_that_do_not_fit_are_told_so(serve: Any, tiny: Any) -> None:
    model, other = tiny("model"), tiny("other", seed=5)
    server = serve("--model", model)
    push = ["push", "--to", server.address, "--prompt", "one", "--max-tokens=3", "--model"]
    assert "FAILED_PRECONDITION: the blocks are of model" in one_line(run(*push, other))
    assert "DATA_LOSS" in one_line(run(*push, model, "--block-tokens", "8"))
    tokens_that_are_none(server, model)
    assert run(*push, model).returncode == 0
    assert server.stop(signal.SIGINT) == 130
    assert "UNAVAILABLE" in one_line(run(*push, model))


def tokens_that_are_none(server: Server, model: str) -> None:
    """A request with tokens that the model has not got is refused; the server goes on."""
    import kvpool
    from kvpool.engine.gguf_file import ModelFile
    from kvpool.transfer import Handover, KvClient, TransferRefused

    [name] = re.findall(r"serving (.+) on ", server.err.read_text())
    digest = hashlib.blake2b(Path(model).read_bytes(), digest_size=16).digest()
    root = kvpool.namespace(model=name, revision=digest)
    cfg = ModelFile(model).config
    pool = kvpool.Pool(4, block_tokens=16, n_layers=cfg.n_layers, n_kv_heads=cfg.n_kv_heads,
                       head_dim=cfg.head_dim)  # fmt: skip
    manager = kvpool.BlockManager(pool)
    last = 2**32 - 1
    with KvClient(server.address) as client:
        for tokens, picked in (([1, 2], [last]), ([1, last], [3]), ([1, cfg.vocab_size], [3])):
            for max_tokens in (1, 5):  # with 1 nothing is left to generate
                seq = manager.allocate(tokens, namespace=root)
                seq.commit()
                handle = client.push(seq).handle_id
                request = Handover(handle, tokens, root, picked, max_tokens)
                with pytest.raises(TransferRefused) as caught:
                    list(client.hand_over(request))
                assert caught.value.code == "INVALID_ARGUMENT"
                assert "the model has 0 to" in caught.value.details


def test_a_caller_that_waits_for_its_turn_hears_of_it_and_can_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC notices that a caller has gone when something is sent to it. Here others come first."""
    from kvpool.cli import serve
    from kvpool.transfer import Handover
    from kvpool.transfer.handover import Answer

    monkeypatch.setattr(serve, "_SIGN_S", 0.01)
    desk = serve._Desk(7, "model", 100)
    answers = desk.generate(Handover("a", [1], 7, [2]), None)  # type: ignore[arg-type]
    assert [next(answers), next(answers)] == [Answer([]), Answer([])]
    job = desk.inbox.get()
    assert job is not None
    assert not job.cancelled
    job.ended.set()  # as the engine does when it has seen that
    answers.close()  # type: ignore[attr-defined]
    assert job.cancelled


def test_an_answer_with_tokens_that_are_none_is_told(tiny: Any) -> None:
    """The other side may be anything that speaks the protocol."""
    import kvpool
    from kvpool.engine.gguf_file import ModelFile
    from kvpool.transfer import KvReceiver, KvServer
    from kvpool.transfer.handover import Answer

    model = tiny("none")
    cfg = ModelFile(model).config
    pool = kvpool.Pool(16, block_tokens=16, n_layers=cfg.n_layers, n_kv_heads=cfg.n_kv_heads,
                       head_dim=cfg.head_dim)  # fmt: skip
    receiver = KvReceiver(kvpool.BlockManager(pool))
    with KvServer(receiver, handover=lambda *_: iter([Answer([cfg.vocab_size], "stop")])) as server:
        done = run("push", "--to", server.address, "--model", model, "--prompt", "one")
    assert f"the answer has a token {cfg.vocab_size}" in one_line(done)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["serve", "--listen", "0.0.0.0:0"], "or allow anybody to push with insecure=True (--inse"),
        (["serve", "--listen", "localhost"], "expected HOST:PORT"),
        (["serve", "--tls-cert", "x"], "--tls-cert and --tls-key go together"),
        (["serve", "--tls-client-ca", "x"], "goes with --tls-cert"),
        (["serve", "--token-file", "no-such"], "--token-file no-such"),
        (["push", "--tls-key", "x"], "--tls-cert and --tls-key go together"),
        (["push", "--prompt", " "], "the text is empty"),
        # Before the model is loaded, which would say that there is none:
        (["push", "--to", "127.0.0.1:1", "--model", "no-such", "--prompt", "x"], "UNAVAILABLE"),
        (["serve", "--metrics", "here", "--model", "no-such"], "expected HOST:PORT"),
    ],
)
def test_what_is_wrong_with_the_command_line(args: list[str], text: str) -> None:
    assert text in one_line(run(*args))


def test_a_client_that_goes_in_the_middle_of_an_answer_leaves_nothing(
    serve: Any, tiny: Any
) -> None:
    """The engine's blocks come back, and the next request is answered. Seen through the metrics."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        metrics = f"127.0.0.1:{free.getsockname()[1]}"
    model = tiny("gone")
    server = serve("--model", model, "--metrics", metrics)

    def sample(name: str) -> float:
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        [value] = re.findall(rf"(?m)^{re.escape(name)} (\S+)$", text)
        return float(value)

    push = ["push", "--to", server.address, "--model", model, "--prompt", "one"]
    client = subprocess.Popen(
        [sys.executable, "-m", "kvpool", *push, "--max-tokens", "50000"],
        stdout=subprocess.PIPE, env=ENV,
    )  # fmt: skip
    assert client.stdout is not None
    client.stdout.read(200)
    assert sample('tl_engine_kv_blocks{state="used"}') > 0
    client.kill()
    client.wait()
    client.stdout.close()
    deadline = time.monotonic() + 20
    while sample('tl_engine_kv_blocks{state="used"}') > 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert run(*push, "--max-tokens", "3").returncode == 0
    assert sample('tl_kv_transfer_bytes_total{direction="received"}') > 0
    assert server.stop() == 0
