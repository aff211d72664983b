# SPDX-License-Identifier: Apache-2.0
"""Answers requests in process, as the HTTP server of the services does."""

from collections.abc import Mapping

from hami_common.errors import HamiError
from hami_common.runtime.httpd import CODES, HttpApp, Request, Response
from tests.attack.fuzz.laws import cause

OK = 200
ERROR = 500


async def post(
    app: HttpApp, path: str, body: bytes, *, certificate: Mapping[str, object] | None = None
) -> tuple[int, bytes]:
    """Return status and body; an exception is HTTP 500, with its cause as body."""
    found = app.find("POST", path)
    if isinstance(found, Response):
        return found.status, bytes(found.body)
    handler, params = found
    request = Request(
        method="POST",
        path=path,
        query={},
        headers={},
        body=body,
        params=params,
        peer_certificate=certificate,
    )
    try:
        answer = await handler(request)
    except HamiError as error:
        for kind, status, _ in CODES:
            if isinstance(error, kind):
                return status, str(error).encode()
        return ERROR, cause(error).encode()
    except Exception as error:  # noqa: BLE001 - as the server
        return ERROR, cause(error).encode()
    assert isinstance(answer, Response)
    return answer.status, bytes(answer.body)
