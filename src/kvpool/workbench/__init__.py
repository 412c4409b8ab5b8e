"""The workbench of the chapter rt.04, behind the console command ``ol``.

Imports nothing else of kvpool, except when L8.3 is checked: the planted bugs and the parity suite
are about the C library and the format, and ``scripts/mutants.py`` runs them without a built
package.
"""

from __future__ import annotations

from .app import main

__all__ = ["main"]
