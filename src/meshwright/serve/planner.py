"""`Planner`: passes questions to the planning process one by one, each with a time limit."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from meshwright.serve.conditions import Conditions

# Bytes of an answer.
_LONGEST: Final = 1 << 24
_MODULE: Final = "meshwright.serve.worker"


class Planner:
    """A worker that starts with the first question, and again after it had to be ended."""

    def __init__(self, limit_s: float, conditions: Conditions) -> None:
        self.limit_s, self.conditions = limit_s, conditions
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def ask(
        self, action: str, question: Any, is_gone: Callable[[], Awaitable[bool]]
    ) -> dict[str, Any]:
        """Return the worker's reply, or an error if it takes longer than the limit.

        A waiting question is dropped if `is_gone` says that its browser has disconnected.
        """
        async with self._turn:
            if await is_gone():
                return {"error": "who asked has gone"}
            try:
                return await asyncio.wait_for(self._reply(action, question), self.limit_s)
            except TimeoutError:
                await self.close()
                limit = f"{self.limit_s:g} s"
                return {"error": f"the search took longer than {limit} and was ended; ask for less"}
            except (OSError, ValueError):  # it has died, or its answer is cut off
                await self.close()
                return {"error": "the process that plans has ended; ask again"}

    async def _reply(self, action: str, question: Any) -> dict[str, Any]:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _MODULE,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(self.conditions.as_json()).encode() + b"\n")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([action, question]).encode() + b"\n")
        await process.stdin.drain()
        reply: dict[str, Any] = json.loads(await process.stdout.readline())
        return reply

    async def close(self) -> None:
        """End the worker."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
