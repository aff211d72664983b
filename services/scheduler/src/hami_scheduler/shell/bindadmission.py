# SPDX-License-Identifier: Apache-2.0
"""Answers the API server's reviews of Bindings that other schedulers post (ADR 0029).

A Binding of a pod that requests devices gets the allocation, the limits, and the pod's uid and
resourceVersion as preconditions, or is denied with the reason. Reserved annotations that a Binding
brings along are removed: some schedulers copy all annotations of the pod. Everything else is
allowed. Obeys ``admission.k8s.io/v1`` and the API's ``Binding`` (core/v1) as of Kubernetes 1.34.
Seconds throughout.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

import anyio
import msgspec
from msgspec import Struct

from hami_common.admission.review import (
    Code,
    Operation,
    ReviewRequest,
    decode_review,
    decoded,
    encode_answer,
    encode_denial,
)
from hami_common.bounds import Name, Uid, Word
from hami_common.errors import Unavailable
from hami_common.pods import annotations as keys
from hami_common.runtime.httpd import Handler, Request, Response, error_response
from hami_common.runtime.servingcertificate import common_name
from hami_scheduler.settings import Settings
from hami_scheduler.shell.binder import Admitted, Binder, Refused
from hami_scheduler.shell.bindingreports import BindingReports
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.extender_wire import BindArgs
from hami_scheduler.shell.podapi import PodApi

PATH: Final = "/bindings"
_FINAL: Final = ("no-fit", "no-quota", "invalid", "pod-finished")
"""Outcomes that a retry of the same Binding cannot change, as long as nothing else changes."""


class _Metadata(Struct, frozen=True, kw_only=True, rename="camel"):
    name: Name = ""
    uid: Uid = ""
    resource_version: Word = ""
    annotations: dict[str, str] | None = None


class _Target(Struct, frozen=True, kw_only=True):
    kind: Word = ""
    name: Name = ""


class Binding(Struct, frozen=True, kw_only=True):
    """The fields of a Binding that we read."""

    metadata: _Metadata = _Metadata()
    target: _Target = _Target()


_binding_decoder = msgspec.json.Decoder(Binding)


def patch_of(binding: Binding, admitted: Admitted | None = None) -> list[Operation]:
    """Return the changes of a Binding; ``None``: one that the API server will refuse."""
    before = binding.metadata.annotations or {}
    after = {key: value for key, value in before.items() if not keys.is_reserved(key)}
    after |= admitted.annotations if admitted else {}
    operations: list[Operation] = []
    if after != before:
        operations.append({"op": "add", "path": "/metadata/annotations", "value": after})
    if admitted is not None and (pod := admitted.pod) is not None:
        operations.append({"op": "add", "path": "/metadata/uid", "value": pod.uid})
        if admitted.annotations:
            version = pod.resource_version
            operations.append({"op": "add", "path": "/metadata/resourceVersion", "value": version})
    return operations


class BindAdmission:
    """The handler of the reviews."""

    def __init__(
        self, *, binder: Binder, pods: PodApi, reports: BindingReports, settings: Settings
    ) -> None:
        """Decide with ``binder``; read pods that a Binding does not identify from ``pods``."""
        self._binder = binder
        self._pods = pods
        self._reports = reports
        self._settings = settings.bind_admission

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handler by method and path."""
        return {("POST", PATH): self.review}

    async def review(self, request: Request) -> Response:
        """Answer one review."""
        names = self._settings.client_names
        if names and (name := common_name(request.peer_certificate or {})) not in names:
            message = (
                f"client certificate of {name!r}: the name is not among the setting"
                " bind_admission.client_names; add it if it is the API server's"
            )
            return error_response(status=403, code="denied", message=message)
        review = decode_review(request.body)
        if not _is_binding(review):
            return Response(body=encode_answer(review.uid))
        binding = decoded(
            review.object, _binding_decoder, what="request.object", problem="is no Binding"
        )
        return Response(body=await self._answer(review, binding))

    async def _answer(self, review: ReviewRequest, binding: Binding) -> bytes:
        target, metadata = binding.target, binding.metadata
        name = review.name or metadata.name
        if target.kind not in ("", "Node") or not target.name or not name:
            return encode_answer(review.uid, operations=patch_of(binding))
        uid = metadata.uid
        until_s = anyio.current_time() + self._settings.wait_s
        if not uid:
            try:
                with answer_within(self._settings.wait_s, peer="API server"):
                    pod = await self._pods.get(review.namespace, name)
            except Unavailable as error:
                return encode_denial(review.uid, code=503, message=str(error))
            if pod is None:
                # Allowed, it could meet a pod of this name that is created meanwhile.
                message = f'pods "{name}" not found'
                return encode_denial(review.uid, code=404, message=message)
            uid = pod.uid
        args = BindArgs(
            pod_name=name, pod_namespace=review.namespace, pod_uid=uid, node=target.name
        )
        is_dry_run = bool(review.dry_run)
        outcome = await self._reports.run(
            "admit",
            args,
            partial(
                self._admit,
                args,
                resource_version=metadata.resource_version,
                is_dry_run=is_dry_run,
                until_s=until_s,
            ),
            is_recorded=not is_dry_run,
        )
        if isinstance(outcome, Refused):
            code: Code = 403 if outcome.outcome in _FINAL else 503
            return encode_denial(review.uid, code=code, message=str(outcome))
        return encode_answer(review.uid, operations=patch_of(binding, outcome))

    async def _admit(
        self,
        args: BindArgs,
        *,
        resource_version: str,
        is_dry_run: bool,
        until_s: float,
        traceparent: str,
    ) -> Admitted:
        """Admit before ``until_s``, while the API server still waits."""
        with answer_within(max(until_s - anyio.current_time(), 0.0), peer="scheduler"):
            return await self._binder.admit(
                args,
                resource_version=resource_version,
                is_dry_run=is_dry_run,
                traceparent=traceparent,
            )


def _is_binding(review: ReviewRequest) -> bool:
    """Return whether a Binding is created, by ``pods/binding`` or the collection ``bindings``."""
    resource = review.resource
    path = (
        f"{resource.resource}/{review.sub_resource}" if review.sub_resource else resource.resource
    )
    is_create = review.operation == "CREATE" and not resource.group
    return is_create and path in ("pods/binding", "bindings")
