"""A FastAPI server under watch: ``GET /ready`` turns 503 once the KV cache was found wrong.

``manager`` is what ``model.init_continuous_batching(...)`` returns. The watch has a thread of its own, so a handler
that blocks the server's loop delays nobody but the server; for the same reason ``remember`` is no coroutine.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Response

import kvcanary


def create_app(manager: Any) -> FastAPI:
    incidents: list[str] = []

    @kvcanary.observer
    def remember(event: kvcanary.IncidentOpened) -> None:
        incidents.append(event.headline)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with kvcanary.watch(manager, mode="log", observers=[remember]):
            manager.start()
            try:
                yield
            finally:
                await asyncio.to_thread(manager.stop)

    app = FastAPI(lifespan=lifespan)
    app.state.incidents = incidents

    @app.get("/ready")
    async def ready(response: Response) -> dict[str, Any]:
        response.status_code = 503 if incidents else 200
        return {"ready": not incidents, "incidents": incidents}

    @app.post("/generate")
    async def generate(prompt: list[int]) -> list[int]:
        answer = asyncio.get_running_loop().create_future()
        name = uuid.uuid4().hex
        manager.register_result_handler(name, answer.set_result)
        if manager.add_request(prompt, request_id=name, max_new_tokens=16) is None:
            raise HTTPException(503, "the engine has stopped")
        output = await answer
        if output.error is not None:
            raise HTTPException(500, output.error)
        return output.generated_tokens

    @app.get("/report")
    async def report() -> str:
        return write_report()  # blocks the whole server, but not the watch

    return app


def write_report() -> str:
    time.sleep(2.0)
    return "all is well"
