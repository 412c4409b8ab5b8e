"""The examples of kvpool.transfer run, and every public name has a docstring."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

import kvpool.transfer

PLAIN = ("_chunk", "_session", "limits", "receiver", "sender")
WITH_GRPC = ("settings", "handover", "client", "server", "aio_client", "aio_server")


@pytest.mark.parametrize("name", [*PLAIN, *WITH_GRPC])
def test_examples_run(name: str) -> None:
    if name in WITH_GRPC:
        pytest.importorskip("grpc", reason="needs kvpool[transfer]")
    module = importlib.import_module(f"kvpool.transfer.{name}")
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    assert doctest.testmod(module, optionflags=options).failed == 0


def test_public_names_are_documented() -> None:
    pytest.importorskip("grpc", reason="needs kvpool[transfer]")
    for name in kvpool.transfer.__all__:
        value = getattr(kvpool.transfer, name)
        assert (value.__doc__ or "").strip(), name
        if inspect.isclass(value) and not issubclass(value, (tuple, Exception)):
            for attribute, member in vars(value).items():
                if inspect.isroutine(member) and not attribute.startswith("_"):
                    assert (member.__doc__ or "").strip(), f"{name}.{attribute}"


def test_importing_it_needs_no_grpc() -> None:
    import subprocess
    import sys

    code = "import sys; sys.modules['grpc'] = None; import kvpool.transfer as t; t.KvReceiver\n"
    code += "try: t.KvServer\nexcept ImportError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("pip install 'kvpool[transfer]'")
