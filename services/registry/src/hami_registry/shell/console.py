# SPDX-License-Identifier: Apache-2.0
"""Serves the built console under ``/console/`` (ADR 42).

All files of the directory are read into memory at start and again after ``index.html`` was
replaced. A request looks up its path among the files that were read, so no path of a request
reaches the file system. Any other path is one of the client's router and gets ``index.html``,
except below ``assets/``. The files contain no data and need no login. Sizes in bytes, times in
seconds.
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from msgspec import Struct

from hami_common.errors import NotFound, SettingsInvalid
from hami_common.roles import Route
from hami_common.runtime.httpd import MIB_BYTES, Handler, Request, Response, accepts_gzip

BASE: Final = "/console/"
INDEX: Final = "index.html"
ASSETS: Final = "assets/"
POLL_S: Final = 2.0
"""Interval at which a replaced ``index.html`` is looked for."""
TOTAL_MOST: Final = 64 * MIB_BYTES
"""Maximum size of all files together: they are kept in memory."""

SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; font-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
_OTHER_TYPE: Final = "application/octet-stream"
_HASHED: Final = re.compile(rf"{ASSETS}(.+/)?[^/]+-[0-9A-Z]{{8,}}\.[^/]+")
"""Names of files that change with their content, as esbuild writes them."""

_log = logging.getLogger(__name__)


class _File(Struct, frozen=True):
    plain: bytes
    compressed: bytes | None
    headers: Mapping[str, str]
    content_type: str


class Console:
    """The files of the console."""

    def __init__(self, directory: str) -> None:
        """Read the files of ``directory``; ``SettingsInvalid`` without an ``index.html``."""
        self._directory = Path(directory)
        self._seen = self._fingerprint()
        self._files = self._read()

    def routes(self) -> dict[Route, Handler]:
        """Return the console's routes."""
        return {
            ("GET", "/"): _redirect,
            ("GET", BASE.rstrip("/")): _redirect,
            ("GET", BASE): self._answer,
            ("GET", BASE + "{path...}"): self._answer,
        }

    async def watch(self) -> None:
        """Read the files again after ``index.html`` was replaced, indefinitely."""
        while True:
            await anyio.sleep(POLL_S)
            try:
                if await anyio.to_thread.run_sync(self._reload):
                    _log.info("console reloaded", extra={"directory": str(self._directory)})
            except SettingsInvalid as error:
                _log.warning("console not reloaded", extra={"problem": str(error)})

    async def _answer(self, request: Request) -> Response:
        path = request.params.get("path", INDEX)
        files = self._files
        file = files.get(path)
        if file is None:
            if path.startswith(ASSETS):
                raise NotFound(what=f"file {path} of the console")
            file = files[INDEX]
        known = request.headers.get("If-None-Match", "").split(",")
        if file.headers["etag"] in (tag.strip() for tag in known):
            return Response(status=304, content_type=file.content_type, headers=file.headers)
        if file.compressed is None or not accepts_gzip(request.headers):
            return Response(body=file.plain, content_type=file.content_type, headers=file.headers)
        return Response(
            body=file.compressed,
            content_type=file.content_type,
            headers={**file.headers, "content-encoding": "gzip"},
        )

    def _reload(self) -> bool:
        seen = self._fingerprint()
        if seen == self._seen:
            return False
        self._files = self._read()
        self._seen = seen
        return True

    def _fingerprint(self) -> tuple[int, int, int] | None:
        try:
            stat = (self._directory / INDEX).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _read(self) -> dict[str, _File]:
        bodies: dict[str, bytes] = {}
        total = 0
        try:
            for path in sorted(self._directory.rglob("*")):
                if not path.is_file():
                    continue
                total += path.stat().st_size
                if total > TOTAL_MOST:
                    raise self._invalid(
                        f"has more than {TOTAL_MOST // MIB_BYTES} MiB of files",
                        "name the directory of the built console alone",
                    )
                bodies[path.relative_to(self._directory).as_posix()] = path.read_bytes()
        except OSError as error:
            raise self._invalid(
                f"{error.filename}: {error.strerror}", "make the files readable"
            ) from error
        if INDEX not in bodies:
            raise self._invalid(
                f"has no {INDEX}", "name the directory of the built console, or leave it empty"
            )
        return {name: _file(name, bodies) for name in bodies if not _is_compressed(name, bodies)}

    def _invalid(self, problem: str, fix: str) -> SettingsInvalid:
        return SettingsInvalid(field=f"console_dir {self._directory}", problem=problem, fix=fix)


def _is_compressed(name: str, bodies: Mapping[str, bytes]) -> bool:
    return name.endswith(".gz") and name.removesuffix(".gz") in bodies


def _file(name: str, bodies: Mapping[str, bytes]) -> _File:
    plain = bodies[name]
    is_hashed = _HASHED.fullmatch(name) is not None
    return _File(
        plain=plain,
        compressed=bodies.get(f"{name}.gz"),
        headers={
            **SECURITY_HEADERS,
            "cache-control": "public, max-age=31536000, immutable" if is_hashed else "no-cache",
            "etag": f'W/"{hashlib.sha256(plain).hexdigest()[:32]}"',
            "vary": "accept-encoding",
        },
        content_type=_TYPES.get(Path(name).suffix, _OTHER_TYPE),
    )


async def _redirect(request: Request) -> Response:
    del request
    return Response(status=302, headers={**SECURITY_HEADERS, "location": BASE})
