"""kvpool under other people's engines. Each module needs the package it is named after.

``kvpool.integrations.torch``
    Slabs as tensors; a pool whose slab is a tensor of yours, on any device; the tables and views
    that attention kernels take.
``kvpool.integrations.transformers``
    A cache for ``model.generate`` that finds prefixes again.

Nothing here is imported by ``import kvpool``. docs/integrations.md shows how they are used.
"""

__all__: list[str] = []
