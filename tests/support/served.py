"""A server in a process of its own, for tests that look at it from inside."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from samebits.rollout.server import SamebitsServer


async def print_seen(server: SamebitsServer, see: Callable[[SamebitsServer], Awaitable[dict[str, Any]]]) -> None:
    """Print as one JSON object what `see` finds; end the engine, whatever happens."""
    try:
        print(json.dumps(await see(server)))
    finally:
        server.engine.shutdown()
