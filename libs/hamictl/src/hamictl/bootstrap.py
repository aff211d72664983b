# SPDX-License-Identifier: Apache-2.0
"""Makes what an installation needs before its first pod: keys and certificates.

Run by a Job at the installation and daily by a CronJob (deploy/kustomize/components/self-signed).
It may run at any time and as often as one likes: what exists is kept until it is about to end. The
signing key of allocations is never replaced; to rotate it is a decision (docs/install.md). An old
authority stays trusted beside a new one until it ends, and the API server is told of a new one
before any certificate of it serves, so no review fails in between.

Of the bus it makes the keys of those users that have one, the key that signs the logins of all
others, and the servers' configuration of accounts and permissions (ADR 0013). A new release's
permissions come into force with its first run.

Agents run in a namespace of their own and mount no Secret. What is public and they need, the keys
that verify allocations and the authority's certificates, is copied there on every run.
"""

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct

from hami_common import namespaces
from hami_common.bus import grants
from hami_common.bus.nkeys import NKey
from hami_common.errors import Conflict, NotFound
from hami_common.pods.signing import Signer
from hami_common.ports import KubeApi
from hamictl.certificates import KeyPair, ends, new_authority, new_server, serves

SIGNING_KEY = "hami-signing-key"
TRUSTED_KEYS = "hami-trusted-keys"
AUTHORITY = "hami-ca"
SERVING = "hami-webhook-tls"
BUS_SERVING = "hami-nats-tls"
REGISTRY_SERVING = "hami-registry-tls"
AUTHORITY_BUNDLE = "hami-ca"
"""ConfigMap with the certificates of the authority, for whoever calls one of ours."""
BUS_ACCOUNTS = "hami-bus-accounts"
"""ConfigMap with the servers' accounts, users and permissions."""
AGENTS_COPIES = (TRUSTED_KEYS, AUTHORITY_BUNDLE)
"""ConfigMaps that the agents mount."""
BUS_SECRETS = {
    "hami-bus-webhook": {"seed": "webhook"},
    "hami-bus-scheduler": {"seed": "scheduler"},
    "hami-bus-registry": {"seed": "registry", "authenticator": "authenticator", "issuer": "issuer"},
    "hami-bus-operator": {"seed": "operator"},
}
"""Secrets with seeds of the bus: by key of the Secret, whose seed it is."""
_ISSUER = "issuer"
PREVIOUS = "previous.crt"
STRATEGIC = "application/strategic-merge-patch+json"

Document = dict[str, Any]


class Plan(Struct, frozen=True, kw_only=True):
    """Names and times of one installation."""

    namespace: str
    agents_namespace: str = namespaces.AGENTS
    """Namespace of the agents; empty, or ``namespace``: nothing is copied."""
    service: str
    """Service of the webhook."""
    webhook: str
    """Name of the MutatingWebhookConfiguration; empty when somebody else issues certificates."""
    bus: str = "nats"
    """Service of the bus; empty: the bus is not ours."""
    registry: str = "hami-registry"
    """Service of the registry."""
    authority_valid: timedelta = timedelta(days=3650)
    serving_valid: timedelta = timedelta(days=90)
    renew_before: timedelta = timedelta(days=30)
    """A certificate that ends within this time is replaced now."""


async def bootstrap(kube: KubeApi, plan: Plan, *, now: datetime) -> list[str]:
    """Make what is missing; returns what was done, a line each (empty: nothing was to be done)."""
    done = await _keys(kube, plan.namespace)
    if plan.bus:
        done += await _bus(kube, plan.namespace)
    if plan.webhook:
        done += await _certificates(kube, plan, now)
    else:
        done += await _others_authority(kube, plan.namespace)
    if plan.agents_namespace not in {"", plan.namespace}:
        done += await _copies(kube, plan)
    return done


async def _copies(kube: KubeApi, plan: Plan) -> list[str]:
    """Keep the agents' copies of what they read equal to the originals."""
    done = []
    for name in AGENTS_COPIES:
        original = await _get(kube, plan.namespace, "configmaps", name)
        if original is None:
            continue
        wanted = _map(plan.agents_namespace, name, original.get("data") or {})
        if what := await _keep_map(kube, wanted):
            done.append(f"{what} ConfigMap {plan.agents_namespace}/{name}: the agents' copy")
    return done


async def _bus(kube: KubeApi, namespace: str) -> list[str]:
    done = []
    public: dict[str, str] = {}
    for name, users in BUS_SECRETS.items():
        secret = await _get(kube, namespace, "secrets", name)
        if secret is None:
            seeds = {key: _new_key(user).seed.encode() for key, user in users.items()}
            made = _object("Secret", namespace, name, seeds)
            if await _create(kube, namespace, "secrets", made):
                done.append(f"made Secret {name}: login to the bus")
            secret = await _get(kube, namespace, "secrets", name) or made
        data = _data(secret)
        for key, user in users.items():
            public[user] = NKey.from_seed(data[key].decode()).public
    issuer = public.pop(_ISSUER)
    text = grants.server_config(issuer=issuer, users=public)
    accounts = _map(namespace, BUS_ACCOUNTS, {"accounts.conf": text})
    if what := await _keep_map(kube, accounts):
        done.append(f"{what} ConfigMap {BUS_ACCOUNTS}: who may say what on the bus")
    return done


def _new_key(user: str) -> NKey:
    return NKey.generate("account" if user == _ISSUER else "user")


async def _others_authority(kube: KubeApi, namespace: str) -> list[str]:
    """Publish the authority that somebody else keeps in the Secret of ours."""
    secret = await _get(kube, namespace, "secrets", AUTHORITY)
    certificate = _data(secret).get("tls.crt", b"") if secret else b""
    return await _publish_authority(kube, namespace, certificate) if certificate else []


async def _publish_authority(kube: KubeApi, namespace: str, bundle: bytes) -> list[str]:
    what = await _keep_map(kube, _map(namespace, AUTHORITY_BUNDLE, {"ca.crt": bundle.decode()}))
    return [f"{what} ConfigMap {AUTHORITY_BUNDLE}: the authority, for callers"] if what else []


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
        made = _map(namespace, TRUSTED_KEYS, {name: signer.public_pem().decode()})
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
    done += await _publish_authority(kube, namespace, authority.certificate + still)
    servings = {SERVING: (plan.service, "the webhook's certificate")}
    if plan.bus:
        servings[BUS_SERVING] = (plan.bus, "the bus servers' certificate")
    if plan.registry:
        servings[REGISTRY_SERVING] = (plan.registry, "the registry's certificate")
    for name, (service, what) in servings.items():
        names = [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"]
        # The servers of the bus call each other by the names of their pods, as clients too.
        is_bus = name == BUS_SERVING
        names += [f"*.{host}" for host in names] if is_bus else []
        secret = await _get(kube, namespace, "secrets", name)
        serving = _pair(_data(secret) if secret else {})
        if (
            serving is None
            or _ends_soon(serving.certificate, plan, now)
            or not serves(serving.certificate, names, authority=authority.certificate)
        ):
            valid = plan.serving_valid
            serving = new_server(authority, names, now=now, valid=valid, is_client=is_bus)
            await _put(kube, _secret(namespace, name, serving), known=secret)
            done.append(f"made Secret {name}: {what}")
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


def _map(namespace: str, name: str, data: Mapping[str, str]) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": dict(data),
    }


async def _keep_map(kube: KubeApi, wanted: Document) -> str:
    """Make the ConfigMap say what is wanted; ``made``, ``changed`` or nothing."""
    namespace, name = wanted["metadata"]["namespace"], wanted["metadata"]["name"]
    known = await _get(kube, namespace, "configmaps", name)
    if known is None:
        return "made" if await _create(kube, namespace, "configmaps", wanted) else ""
    if known.get("data") == wanted["data"]:
        return ""
    known["data"] = wanted["data"]
    await kube.replace(_path(namespace, "configmaps", name), msgspec.json.encode(known))
    return "changed"


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
