"""Stands between a server and who connects to it: cuts, holds back, alters, doubles and replays what passes."""

from __future__ import annotations

import asyncio
import random

from paceline.server.transport.frames import PREFIX


class Proxy:
    """Listens at `at` and passes on to `to`; both are paths of unix sockets.

    Attributes:
        mode: "pass", "hold" (nothing passes, nobody is told), "double" (every frame twice), "replay" (now and then an
            old frame again), "corrupt" (now and then a bit).
    """

    def __init__(self, at: str, to: str, seed: int = 0) -> None:
        self.at, self.to, self.mode, self.draws = at, to, "pass", random.Random(seed)
        self.open = asyncio.Event()
        self.open.set()
        self.tasks: set[asyncio.Task] = set()
        self.writers: list[asyncio.StreamWriter] = []
        self.passed = self.altered = 0

    async def listen(self) -> None:
        self.server = await asyncio.start_unix_server(self._connected, self.at)

    def set(self, mode: str) -> None:
        """From now on."""
        self.mode = mode
        if mode == "hold":
            self.open.clear()
        else:
            self.open.set()

    def cut(self) -> None:
        """End all connections."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def close(self) -> None:
        self.server.close()
        self.cut()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self.to)
        self.writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.get_running_loop().create_task(self._pump(source, sink))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        old: list[bytes] = []
        try:
            while True:
                prefix = await source.readexactly(PREFIX.size)
                *_, header, payload = PREFIX.unpack(prefix)
                frame = prefix + await source.readexactly(header + payload)
                await self.open.wait()
                self.passed += 1
                sink.write(self._treated(frame, old))
                await sink.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            sink.transport.abort()

    def _treated(self, frame: bytes, old: list[bytes]) -> bytes:
        old[:] = [*old[-20:], frame]
        if self.mode == "double" and len(old) > 1:  # the first says who it is, once
            self.altered += 1
            return frame + frame
        if self.mode == "replay" and len(old) > 2 and self.draws.random() < 0.3:
            self.altered += 1
            return frame + self.draws.choice(old[1:])
        if self.mode == "corrupt" and self.draws.random() < 0.02:
            self.altered += 1
            altered = bytearray(frame)
            at = self.draws.randrange(PREFIX.size)  # a payload is the kernel's, and TLS's, to keep whole
            altered[at] ^= 1 << self.draws.randrange(8)
            return bytes(altered)
        return frame
