"""How much KV cache does this traffic need? Traces through real pools, and every size at once.

    trace -> requests -> InFlight or RealTime: a real BlockManager   -> Result
                      -> Reuse: depths of reuse, all sizes at once   -> the hit curve
                      -> simulate: other orders of eviction, and the best there could be

``kvpool replay`` puts it together on the command line. Reading JSON traces needs the extra
``replay``: ``pip install 'kvpool[replay]'``.

>>> from kvpool.replay import InFlight, Reuse, synthesize
>>> clock, reuse = InFlight(n_blocks=500, block_tokens=16), Reuse()
>>> for batch in synthesize("chat", seed=1, requests=200):
...     reuse.feed(clock.feed(batch))
>>> clock.result.hit_rate > 0.2, clock.result.hit_blocks <= int(reuse.hits(10**6))
(True, True)
"""

from __future__ import annotations

from kvpool._core import ReuseStack, policy_hits

from ._about import POLICIES
from .errors import MissingPackage, TraceError
from .in_flight import InFlight, Served
from .policies import Plan, make_plan, simulate
from .readers import FORMATS, Trace, open_trace
from .real_time import RealTime
from .request import Request, make_request
from .result import Result
from .reuse import Names, Reuse
from .synth import WORKLOADS, synthesize

__all__ = [
    "FORMATS",
    "POLICIES",
    "WORKLOADS",
    "InFlight",
    "MissingPackage",
    "Names",
    "Plan",
    "RealTime",
    "Request",
    "Result",
    "Reuse",
    "ReuseStack",
    "Served",
    "Trace",
    "TraceError",
    "make_plan",
    "make_request",
    "open_trace",
    "policy_hits",
    "simulate",
    "synthesize",
]
