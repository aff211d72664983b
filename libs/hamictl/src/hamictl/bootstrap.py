# SPDX-License-Identifier: Apache-2.0
"""Makes what an installation needs before its first pod: keys and certificates.

Run by a Job at the installation and daily by a CronJob (deploy/kustomize/components/self-signed).
It may run at any time and as often as one likes: what exists is kept until it is about to end. The
signing key of allocations is never replaced; to rotate it is a decision (docs/install.md). An old
authority stays trusted beside a new one until it ends, and the API server is told of a new one
before any certificate of it serves, so no review fails in between.
"""

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct

from hami_common.errors import Conflict, NotFound
from hami_common.ports import KubeApi
from hami_common.signing import Signer
from hamictl.certificates import KeyPair, ends, new_authority, new_server, serves

SIGNING_KEY = "hami-signing-key"
TRUSTED_KEYS = "hami-trusted-keys"
AUTHORITY = "hami-ca"
SERVING = "hami-webhook-tls"
PREVIOUS = "previous.crt"
STRATEGIC = "application/strategic-merge-patch+json"

Document = dict[str, Any]


class Plan(Struct, frozen=True, kw_only=True):
    """Names and times of one installation."""

    namespace: str
    service: str
    """Service of the webhook."""
    webhook: str
    """Name of the MutatingWebhookConfiguration; empty when somebody else keeps its authority."""
    authority_valid: timedelta = timedelta(days=3650)
    serving_valid: timedelta = timedelta(days=90)
    renew_before: timedelta = timedelta(days=30)
    """A certificate that ends within this time is replaced now."""


async def bootstrap(kube: KubeApi, plan: Plan, *, now: datetime) -> list[str]:
    """Make what is missing; returns what was done, a line each (empty: nothing was to be done)."""
    done = await _keys(kube, plan.namespace)
    if plan.webhook:
        done += await _certificates(kube, plan, now)
    return done


async def _keys(kube: KubeApi, namespace: str) -> list[str]:
    done = []
    secret = await _get(kube, namespace, "secrets", SIGNING_KEY)
    if secret is None:
        made = _object(
            "Secret", namespace, SIGNING_KEY, {"signing.pem": Signer.generate().private_pem()}
        )
        if await _create(kube, namespace, "secrets", made):
            done.append(f"made Secret {SIGNING_KEY}: the key that signs allocations")
        secret = await _get(kube, namespace, "secrets", SIGNING_KEY) or made
    signer = Signer.from_pem(_data(secret)["signing.pem"])
    name = f"{signer.key_id}.pub"
    keys = await _get(kube, namespace, "configmaps", TRUSTED_KEYS)
    if keys is None:
        made = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": TRUSTED_KEYS, "namespace": namespace},
            "data": {name: signer.public_pem().decode()},
        }
        if await _create(kube, namespace, "configmaps", made):
            done.append(f"made ConfigMap {TRUSTED_KEYS}: the public half, for the agents")
    elif name not in (keys.get("data") or {}):
        keys["data"] = {**(keys.get("data") or {}), name: signer.public_pem().decode()}
        await kube.replace(_path(namespace, "configmaps", TRUSTED_KEYS), msgspec.json.encode(keys))
        done.append(f"added {name} to ConfigMap {TRUSTED_KEYS}")
    return done


async def _certificates(kube: KubeApi, plan: Plan, now: datetime) -> list[str]:
    done = []
    namespace = plan.namespace
    secret = await _get(kube, namespace, "secrets", AUTHORITY)
    known = _data(secret) if secret else {}
    authority = _pair(known)
    previous = known.get(PREVIOUS, b"")
    if authority is None or _ends_soon(authority.certificate, plan, now):
        previous = authority.certificate if authority else b""
        authority = new_authority("hami-ca", now=now, valid=plan.authority_valid)
        made = _secret(namespace, AUTHORITY, authority, {PREVIOUS: previous})
        await _put(kube, made, known=secret)
        done.append(f"made Secret {AUTHORITY}: the authority of the webhook's certificate")
    still = previous if (at := ends(previous)) is not None and at > now else b""
    done += await _tell_api_server(kube, plan.webhook, authority.certificate + still)
    names = [f"{plan.service}.{namespace}.svc", f"{plan.service}.{namespace}.svc.cluster.local"]
    secret = await _get(kube, namespace, "secrets", SERVING)
    serving = _pair(_data(secret) if secret else {})
    if (
        serving is None
        or _ends_soon(serving.certificate, plan, now)
        or not serves(serving.certificate, names, authority=authority.certificate)
    ):
        serving = new_server(authority, names, now=now, valid=plan.serving_valid)
        await _put(kube, _secret(namespace, SERVING, serving), known=secret)
        done.append(f"made Secret {SERVING}: the webhook's certificate")
    return done


async def _tell_api_server(kube: KubeApi, webhook: str, bundle: bytes) -> list[str]:
    path = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{webhook}"
    text = base64.b64encode(bundle).decode()
    hooks: Sequence[Document] = msgspec.json.decode(await kube.get(path))["webhooks"]
    changed = [
        {"name": hook["name"], "clientConfig": {"caBundle": text}}
        for hook in hooks
        if hook["clientConfig"].get("caBundle") != text
    ]
    if not changed:
        return []
    await kube.patch(path, msgspec.json.encode({"webhooks": changed}), content_type=STRATEGIC)
    return [f"told MutatingWebhookConfiguration {webhook} who signs the certificate"]


def _ends_soon(certificate: bytes, plan: Plan, now: datetime) -> bool:
    at = ends(certificate)
    return at is None or at - now < plan.renew_before


def _pair(data: Mapping[str, bytes]) -> KeyPair | None:
    certificate, key = data.get("tls.crt"), data.get("tls.key")
    return KeyPair(certificate=certificate, key=key) if certificate and key else None


# --- objects -------------------------------------------------------------------------------------


def _path(namespace: str, resource: str, name: str = "") -> str:
    path = f"/api/v1/namespaces/{namespace}/{resource}"
    return f"{path}/{name}" if name else path


def _data(secret: Document) -> dict[str, bytes]:
    return {key: base64.b64decode(text) for key, text in (secret.get("data") or {}).items()}


def _secret(
    namespace: str, name: str, pair: KeyPair, more: Mapping[str, bytes] | None = None
) -> Document:
    data = {"tls.crt": pair.certificate, "tls.key": pair.key, **(more or {})}
    return _object("Secret", namespace, name, data)


def _object(kind: str, namespace: str, name: str, data: Mapping[str, bytes]) -> Document:
    is_pair = "tls.crt" in data
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
        "type": "kubernetes.io/tls" if is_pair else "Opaque",
        "data": {key: base64.b64encode(content).decode() for key, content in data.items()},
    }


async def _get(kube: KubeApi, namespace: str, resource: str, name: str) -> Document | None:
    try:
        raw = await kube.get(_path(namespace, resource, name))
    except NotFound:
        return None
    document: Document = msgspec.json.decode(raw)
    return document


async def _create(kube: KubeApi, namespace: str, resource: str, made: Document) -> bool:
    """False when somebody else made it first: then theirs counts."""
    try:
        await kube.create(_path(namespace, resource), msgspec.json.encode(made))
    except Conflict:
        return False
    return True


async def _put(kube: KubeApi, made: Document, *, known: Document | None) -> None:
    """Create the Secret, or replace what was read; ``Conflict`` when somebody was faster."""
    namespace, name = made["metadata"]["namespace"], made["metadata"]["name"]
    if known is None:
        await kube.create(_path(namespace, "secrets"), msgspec.json.encode(made))
        return
    known["data"] = made["data"]
    await kube.replace(_path(namespace, "secrets", name), msgspec.json.encode(known))
