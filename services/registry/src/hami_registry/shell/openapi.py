# SPDX-License-Identifier: Apache-2.0
"""Describes the API as an OpenAPI document, from the table of operations and their Structs.

The committed copy is docs/openapi/registry.json (tools/gen_openapi.py).
"""

from typing import Any

from hami_common.runtime import openapi
from hami_registry.shell import (
    api,
    cordonapi,
    gateway,
    historyapi,
    meteringapi,
    regions,
    session,
    skuapi,
)
from hami_registry.shell.api import DEVICES_SEQ, LEDGER_SEQ, STATE_SEQ

OPERATIONS = (
    *api.OPERATIONS,
    *historyapi.OPERATIONS,
    *meteringapi.OPERATIONS,
    *skuapi.OPERATIONS,
    *regions.OPERATIONS,
    *session.OPERATIONS,
    *cordonapi.OPERATIONS,
)

_FRESHNESS = {
    LEDGER_SEQ: "Newest ledger record that the answer includes.",
    STATE_SEQ: "Newest state record that the answer includes.",
    DEVICES_SEQ: "Newest canonical devices that the answer includes.",
}


def document() -> dict[str, Any]:
    """Return the whole document."""
    return openapi.document(
        OPERATIONS,
        title="HAMi registry",
        text="Devices, who holds them and why. Memory in MiB, compute in percent of one device, "
        "times in Unix seconds.",
        errors={
            400: "A parameter is not known, or has a value that makes no sense.",
            503: "The replica cannot answer yet, or not any more.",
        },
        headers=_FRESHNESS,
        forwarded=[path for _, path in gateway.FORWARDED],
        answered_by="scheduler",
    )


def encoded() -> bytes:
    """Return the document as it is committed and served."""
    return openapi.encoded(document())
