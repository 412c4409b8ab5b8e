"""Types and marks of the workbench's tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

Ol = Callable[..., tuple[int, str]]
OlJson = Callable[..., tuple[int, Any]]

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="there is no C compiler"
)
