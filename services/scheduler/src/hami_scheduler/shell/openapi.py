# SPDX-License-Identifier: Apache-2.0
"""Describes the scheduler's own API as an OpenAPI document, without the calls of kube-scheduler.

The committed copy is docs/openapi/scheduler.json (tools/gen_openapi.py).
"""

from typing import Any, Final

from hami_common.runtime import openapi
from hami_common.runtime.openapi import Operation, Parameter
from hami_core.planning.resizing import ResizeRequest
from hami_scheduler.shell import defrag, moments, podways, policies, whatif
from hami_scheduler.shell.quota import QueueAnswer, QuotaAnswer
from hami_scheduler.shell.resize import Resized

_BY_NAMESPACE = Parameter(name="namespace", place="query", text="Only of this namespace.")

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        path="/v1/queues",
        name="queues",
        text="Every queue and resource with its use, and the pods that wait: position in the "
        "queue, what is ahead, last refusal, and an estimate of the start from the starts of the "
        "last hour. With a namespace: the queues of its pods, and its own pods.",
        answer=QueueAnswer,
        parameters=(_BY_NAMESPACE,),
    ),
    Operation(
        path="/v1/quotas",
        name="quotas",
        text="Every limit of every ResourceQuota of devices, with its use. With a namespace: of "
        "its quotas, and the amounts that quotas and queues still allow its pods.",
        answer=QuotaAnswer,
        parameters=(_BY_NAMESPACE,),
    ),
    Operation(
        path="/v1/resize",
        name="resize",
        method="post",
        text="Change the shares of a running container, or of a ResourceClaim that a user wrote.",
        body=ResizeRequest,
        answer=Resized,
        errors={
            404: "No such pod, claim or container has a share.",
            409: "The share stays as it is: in-use, no-room, no-quota, not-settled, changed, sku "
            "or contended.",
        },
    ),
    *whatif.OPERATIONS,
    *podways.OPERATIONS,
    *defrag.OPERATIONS,
    *moments.OPERATIONS,
    *policies.OPERATIONS,
)


def document() -> dict[str, Any]:
    """Return the whole document."""
    return openapi.document(
        OPERATIONS,
        title="HAMi scheduler",
        text="Quotas, resizes, defragmentation and what-if questions. Memory in MiB, compute in "
        "percent of one device, times in Unix seconds.",
        errors={
            400: "The request is invalid: the message names the field and the fix.",
            401: "The token is missing or invalid.",
            403: "The caller may not read what the answer contains.",
            503: "The replica cannot answer yet, or not any more.",
        },
        headers={},
    )


def encoded() -> bytes:
    """Return the document as it is committed."""
    return openapi.encoded(document())
