"""The tests of kvpool.integrations. Their models are tiny: one thread is fastest."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    import torch

    torch.set_num_threads(1)
