"""The replay needs the extra of its name; its tests say so where it is missing."""

from __future__ import annotations

import pytest

pytest.importorskip("msgspec", reason="needs kvpool[replay]")
