# SPDX-License-Identifier: Apache-2.0
"""Files of the console: paths, headers, compression, replacement."""

import gzip
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry

from hami_common.errors import NotFound, SettingsInvalid
from hami_common.runtime.httpd import HttpApp, Request, Response
from hami_registry.shell import console
from hami_registry.shell.console import SECURITY_HEADERS, Console

pytestmark = pytest.mark.anyio
INDEX = b"<!doctype html><title>console</title>"
SCRIPT = b"console.log(1)\n" * 100
HASHED = "assets/index-ABCD2345.js"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A built console."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_bytes(INDEX)
    (tmp_path / HASHED).write_bytes(SCRIPT)
    (tmp_path / f"{HASHED}.gz").write_bytes(gzip.compress(SCRIPT))
    (tmp_path / "assets/logo.svg").write_bytes(b"<svg/>")
    return tmp_path


async def fetch(found: Console, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """Answer a GET as the server does."""
    app = HttpApp(found.routes(), registry=CollectorRegistry(), ready=bool)
    outcome = app.find("GET", path)
    if isinstance(outcome, Response):
        return outcome
    handler, params = outcome
    answer = await handler(
        Request(
            method="GET",
            path=path,
            query={},
            headers=CIMultiDict(headers or {}),
            body=b"",
            params=params,
        )
    )
    assert isinstance(answer, Response)
    return answer


async def test_index_answers_for_every_path_of_the_clients_router(site: Path) -> None:
    found = Console(str(site))
    for path in ("/console/", "/console/fleet", "/console/pods/team-a/web.1", "/console/a/b/c"):
        answer = await fetch(found, path)
        assert (answer.status, answer.body) == (200, INDEX), path
        assert answer.content_type == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"


async def test_files_have_their_type_and_age(site: Path) -> None:
    found = Console(str(site))
    script = await fetch(found, f"/console/{HASHED}")
    assert script.body == SCRIPT
    assert script.content_type == "text/javascript; charset=utf-8"
    assert "immutable" in script.headers["cache-control"]
    logo = await fetch(found, "/console/assets/logo.svg")
    assert logo.content_type == "image/svg+xml"
    assert logo.headers["cache-control"] == "no-cache"
    with pytest.raises(NotFound):
        await fetch(found, "/console/assets/index-OLD23456.js")


async def test_every_answer_has_the_security_headers(site: Path) -> None:
    found = Console(str(site))
    for path in ("/", "/console", "/console/", "/console/fleet", f"/console/{HASHED}"):
        answer = await fetch(found, path)
        assert SECURITY_HEADERS.items() <= answer.headers.items(), path
    policy = SECURITY_HEADERS["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


async def test_root_leads_to_the_console(site: Path) -> None:
    for path in ("/", "/console"):
        answer = await fetch(Console(str(site)), path)
        assert (answer.status, answer.headers["location"]) == (302, "/console/")


async def test_compressed_neighbor_is_sent_to_clients_that_accept_it(site: Path) -> None:
    found = Console(str(site))
    small = await fetch(found, f"/console/{HASHED}", {"Accept-Encoding": "br, gzip"})
    assert small.headers["content-encoding"] == "gzip"
    assert gzip.decompress(bytes(small.body)) == SCRIPT
    assert "javascript" in small.content_type
    plain = await fetch(found, f"/console/{HASHED}", {"Accept-Encoding": "gzip;q=0"})
    assert plain.body == SCRIPT
    assert "content-encoding" not in plain.headers
    with pytest.raises(NotFound):
        await fetch(found, f"/console/{HASHED}.gz")


async def test_unchanged_index_is_not_sent_again(site: Path) -> None:
    found = Console(str(site))
    tag = (await fetch(found, "/console/")).headers["etag"]
    again = await fetch(found, "/console/", {"If-None-Match": f'"other", {tag}'})
    assert (again.status, again.body) == (304, b"")
    changed = await fetch(found, "/console/", {"If-None-Match": '"other"'})
    assert changed.body == INDEX


@pytest.mark.parametrize(
    "path",
    ["../secret", "..%2fsecret", "assets/../../secret", "/secret", "//secret", "assets//logo.svg"],
)
async def test_no_path_leaves_the_directory(site: Path, path: str) -> None:
    directory = site / "inner"
    directory.mkdir()
    (directory / "index.html").write_bytes(INDEX)
    (site / "secret").write_bytes(b"secret")
    try:
        answer = await fetch(Console(str(directory)), f"/console/{path}")
    except NotFound:
        return
    assert answer.body == INDEX


async def test_replaced_console_is_served_after_its_index_changed(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "POLL_S", 0.01)
    found = Console(str(site))
    async with anyio.create_task_group() as group:
        group.start_soon(found.watch)
        (site / "index.html").unlink()
        await anyio.sleep(0.05)
        assert (await fetch(found, "/console/")).body == INDEX
        (site / "index.html").write_bytes(b"newer")
        with anyio.fail_after(4):
            while (await fetch(found, "/console/")).body != b"newer":
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()


def test_directory_without_a_console_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SettingsInvalid, match=r"console_dir .* has no index\.html"):
            Console(str(directory))
    monkeypatch.setattr(console, "TOTAL_MOST", 10)
    (tmp_path / "index.html").write_bytes(INDEX)
    with pytest.raises(SettingsInvalid, match="name the directory of the built console"):
        Console(str(tmp_path))
