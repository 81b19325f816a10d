"""One monitor per run that somebody looks at, however many do: read once, encoded once, sent to all.

Reading and encoding happen in worker threads, one at a time per run; the event loop only hands out bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from esper.karn.monitor import RunMonitor
from esper.karn.serve import sections
from esper.karn.serve.catalogue import Catalogue

FOLLOW_S = 0.5
"""Between two looks at a run, so no page changes more often than twice a second."""
CATALOGUE_S = 3.0
"""Between two searches of the folder."""
READ_S = 0.4
"""How long one look may read of a long log, before the pages are told how far it is."""
CLOCK_S = 2.0
"""The verdict is judged anew after so long, even if nothing was logged: times pass and processes end."""
IDLE_S = 120.0
"""A run that nobody looks at is forgotten after so long."""
KEEP_ALIVE_S = 15.0
MAX_STREAMS = 256
MAX_RUNS_PER_STREAM = 32
CATALOGUE = "catalogue"

Payload = tuple[int, bytes]
"""Version and JSON of a section."""


def to_json(value: Any) -> bytes:
    """JSON; numbers that are not finite become null."""
    return msgspec.json.encode(value)


class Channel:
    """One run and its sections, as bytes."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self.name = name
        self.monitor = RunMonitor(run_dir)
        self.sections: dict[str, Payload] = {}
        self.error: str | None = None
        self.used_at = time.monotonic()
        self.num_streams = 0
        self._lock = asyncio.Lock()
        self._looked_at = -FOLLOW_S
        self._judged_at = 0.0
        self._seen = (-1, -1)
        """Versions of the monitor that the sections were made from."""

    async def refresh(self) -> bool:
        """Looks at the run, unless that was done just now; True if a section changed."""
        async with self._lock:
            if time.monotonic() - self._looked_at < FOLLOW_S:
                return False
            changed = await asyncio.to_thread(self._look)
            self._looked_at = time.monotonic()
            return changed

    async def host(self, env: int) -> dict[str, Any] | None:
        """One host; None if there is none of that number."""
        async with self._lock:
            return await asyncio.to_thread(sections.host, self.monitor, env)

    def _look(self) -> bool:
        try:
            news = self.monitor.poll(READ_S)
        except (OSError, ValueError) as error:
            changed, self.error = self.error != str(error), str(error)
            return changed | self._put("error", {"error": str(error)})
        now = time.monotonic()
        if not news and now - self._judged_at < CLOCK_S:
            return False
        self._judged_at = now
        found, versions = self.monitor.diagnose(), (self.monitor.version, self.monitor.round_version)
        wanted: dict[str, sections.Section] = {"overview": sections.overview}
        if versions[0] != self._seen[0] and not self.monitor.behind:
            wanted |= sections.BY_EVENT
        if versions[1] != self._seen[1] or "curves" not in self.sections:
            wanted |= sections.BY_ROUND
        if not self.monitor.behind:
            self._seen = versions
        return sum(self._put(name, make(self.monitor, found)) for name, make in wanted.items()) > 0

    def _put(self, name: str, value: Any) -> bool:
        version, before = self.sections.get(name, (0, b""))
        content = to_json(value)
        if content == before:
            return False
        self.sections[name] = (version + 1, content)
        return True


class Channels:
    """The runs that are looked at, the list of all runs, and the streams that carry both.

    Args:
        catalogue: The folder that is served.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._open: dict[str, Channel] = {}
        self._listing: Payload = (0, b"")
        self._searched_at = -CATALOGUE_S
        self._searching = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._generation = 0
        """Grows with every change that streams should hear of."""
        self.num_streams = 0
        self.closing = False

    async def listing(self) -> bytes:
        """Runs and evaluations, at most a few seconds old."""
        async with self._searching:
            if time.monotonic() - self._searched_at >= CATALOGUE_S:
                content = to_json(await asyncio.to_thread(self.catalogue.look))
                self._searched_at = time.monotonic()
                version, before = self._listing
                if content != before:
                    self._listing = (version + 1, content)
            return self._listing[1]

    async def get(self, name: str) -> Channel | None:
        """The channel of a listed run; None if there is no such run."""
        channel = self._open.get(name)
        if channel is None:
            path = await asyncio.to_thread(self.catalogue.run_dir, name)
            if path is None:
                return None
            channel = self._open.setdefault(name, await asyncio.to_thread(Channel, name, path))
        channel.used_at = time.monotonic()
        return channel

    async def follow(self) -> None:
        """Keeps everything that somebody looks at up to date, until cancelled."""
        while True:
            begun = time.monotonic()
            watched = [channel for channel in self._open.values() if channel.num_streams]
            changed = [await channel.refresh() for channel in watched]
            if self.num_streams:
                version, _ = self._listing
                await self.listing()
                changed.append(self._listing[0] != version)
            self._forget()
            if any(changed):
                await self._notify()
            await asyncio.sleep(max(FOLLOW_S - (time.monotonic() - begun), 0.05))

    def _forget(self) -> None:
        now = time.monotonic()
        idle = [n for n, channel in self._open.items() if not channel.num_streams and now - channel.used_at > IDLE_S]
        for name in idle:
            del self._open[name]

    async def stream(self, names: Iterable[str]) -> AsyncIterator[bytes]:
        """Server-sent events: every section of these runs and the list of all, then each again when it has changed.

        A reader that is slow gets the newest version of each, never a backlog.
        """
        found = [channel for name in dict.fromkeys(names) if (channel := await self.get(name)) is not None]
        sent: dict[tuple[str, str], int] = {}
        self.num_streams += 1
        for channel in found:
            channel.num_streams += 1
        try:
            yield b"retry: 2000\n\n"
            await self.listing()
            for channel in found:
                await channel.refresh()
            while not self.closing:
                quiet, seen = True, self._generation
                for name, section, (version, content) in self._payloads(found):
                    if sent.get((name, section)) != version:
                        sent[name, section], quiet = version, False
                        yield message(name, section, content)
                if quiet and not await self._wait(seen):
                    yield b": nothing new\n\n"
        finally:
            self.num_streams -= 1
            for channel in found:
                channel.num_streams -= 1
                channel.used_at = time.monotonic()

    def _payloads(self, found: Iterable[Channel]) -> list[tuple[str, str, Payload]]:
        made: list[tuple[str, str, Payload]] = [("", CATALOGUE, self._listing)]
        made += [(channel.name, section, payload) for channel in found for section, payload in channel.sections.items()]
        return made

    async def _notify(self) -> None:
        self._generation += 1
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, seen: int) -> bool:
        """Waits for a change after the one that was seen; False if there was none for a while."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S), self._changed:
                await self._changed.wait_for(lambda: self._generation != seen)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends all streams."""
        self.closing = True
        await self._notify()


def message(run: str, section: str, content: bytes) -> bytes:
    """One event of a stream. JSON has no line breaks of its own, so one line holds it."""
    head = to_json({"run": run, "section": section})
    return b"data: " + head[:-1] + b',"data":' + content + b"}\n\n"


def whole(sections_of: Mapping[str, Payload]) -> bytes:
    """All sections of a run as one JSON object."""
    return b"{" + b",".join(to_json(name) + b":" + content for name, (_, content) in sections_of.items()) + b"}"
