"""The web server of `plan --serve`, and the `Planner` that passes questions to a worker process."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from meshwright.errors import ConfigError
from meshwright.parsing import parse_json
from meshwright.serve.conditions import Conditions
from meshwright.serve.plan_page import page, policy
from meshwright.serve.worker import DEEDS

# Bytes of an answer.
_LONGEST: Final = 1 << 24
_MODULE: Final = "meshwright.serve.worker"


class Planner:
    """A worker process for one kind of question, started when needed, also after it was killed."""

    def __init__(self, limit_s: float, conditions: Conditions) -> None:
        self.limit_s, self.conditions = limit_s, conditions
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def ask(
        self, action: str, question: Any, is_gone: Callable[[], Awaitable[bool]]
    ) -> dict[str, Any]:
        """Return the worker's reply, or `{"error": ...}` after more than `limit_s` seconds.

        Questions wait for their turn; one is dropped if `is_gone` says that its browser has
        disconnected.
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
        """Kill the worker, if it runs."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


HOST: Final = "127.0.0.1"
LARGEST_BODY: Final = 1 << 18
LIMIT_S: Final = 60.0
_PLAIN: Final = Conditions()
MISSING: Final = "`plan --serve` needs the extra `ui`: pip install 'meshwright[ui]'"
try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    HAS_UI = True
except ImportError:
    HAS_UI = False


def _refusal(request: Request, port: int) -> tuple[int, str] | None:
    """Return the status and message for a request not from this server's page, else None."""
    names = [f"{name}:{port}" for name in (HOST, "localhost")]
    host, origin = request.headers.get("host"), request.headers.get("origin")
    if host not in names:
        return 421, f"Host {host} is not this server, which is {names[0]}"
    if origin is not None and origin not in [f"http://{name}" for name in names]:
        return 403, f"Origin {origin} may not ask; only pages of {names[0]} may"
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if request.method == "POST" and kind != "application/json":
        return 415, f"Content-Type {kind or 'is missing'}: it must be application/json"
    return None


async def _body(request: Request) -> bytes | None:
    """Return a request's body, or None as soon as it is larger than `LARGEST_BODY`."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > LARGEST_BODY:
        return None
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_BODY:
            return None
    return body


def application(
    port: int,
    arguments: Sequence[str] = (),
    conditions: Conditions = _PLAIN,
    limit_s: float = LIMIT_S,
) -> Starlette:
    """Return the web application for a port; `arguments` are the first question of its page."""
    # The curve over devices takes longer: the next plan does not wait for it.
    planners = {action: Planner(limit_s, conditions) for action in DEEDS}
    first = page(arguments)

    def said(status: int, text: str) -> Response:
        # What is left of a body that is too large is not read.
        return JSONResponse({"error": text}, status, headers={"Connection": "close"})

    def guarded(respond: Callable[[Any], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            refused = _refusal(request, port)
            response = said(*refused) if refused else await respond(request)
            response.headers.update(
                {
                    "Cache-Control": "no-store",
                    "Content-Security-Policy": policy(),
                    "Cross-Origin-Resource-Policy": "same-origin",
                    "Referrer-Policy": "no-referrer",
                    "X-Content-Type-Options": "nosniff",
                    "X-Frame-Options": "DENY",
                }
            )
            return response

        return endpoint

    async def show(request: Request) -> Response:
        return HTMLResponse(first)

    async def ask(request: Request) -> Response:
        action = request.path_params["deed"]
        if action not in DEEDS:
            return said(404, f"/api/{action[:40]} is not one of {', '.join(DEEDS)}")
        body = await _body(request)
        if body is None:
            return said(413, f"the body is larger than {LARGEST_BODY} bytes")
        try:
            question = parse_json(body)
        except ValueError as error:
            return said(400, f"the body is not valid JSON: {error}"[:500])
        reply = await planners[action].ask(action, question, request.is_disconnected)
        return JSONResponse(reply, 200 if "answer" in reply else 422)

    @asynccontextmanager
    async def alive(app: Starlette) -> AsyncIterator[None]:
        yield
        for planner in planners.values():
            await planner.close()

    asked = Route("/api/{deed:str}", guarded(ask), methods=["POST"])
    routes = [Route("/", guarded(show)), asked]
    return Starlette(routes=routes, lifespan=alive)


def serve(
    port: int, arguments: Sequence[str], conditions: Conditions, tell: Callable[[str], None]
) -> None:
    """Serve the page until interrupted; `tell` receives its address. Port 0 means any free port.

    Raises `ConfigError` if the extra `ui` is not installed or the port is not available.
    """
    if not HAS_UI:
        raise ConfigError(MISSING)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
            listening.listen(128)  # who reads the address may ask at once
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} cannot be had on {HOST}: {error}") from None
        port = listening.getsockname()[1]
        config = uvicorn.Config(
            application(port, arguments, conditions),
            log_level="warning",
            limit_concurrency=32,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
            server_header=False,
        )
        tell(f"http://{HOST}:{port}/")
        uvicorn.Server(config).run(sockets=[listening])
