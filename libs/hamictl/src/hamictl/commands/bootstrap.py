# SPDX-License-Identifier: Apache-2.0
"""``hamictl bootstrap``: creates and renews an installation's keys and certificates.

A Job runs it at installation and a CronJob daily (deploy/kustomize/components/self-signed). It is
idempotent: existing keys stay, and certificates stay until they are about to expire. The signing
key of allocations is never replaced; rotating it is a manual step (docs/install.md). On rotation of
the CA, the old one stays trusted until it expires, and the API server trusts the new one before a
certificate of it is served, so no admission request fails.

For the bus it creates the keys of users that have one, the key that signs all other logins, and the
servers' configuration of accounts and permissions (ADR 0013). The permissions of a new release
apply after its first run.

Agents run in a namespace of their own and mount no Secret. Each run copies their public inputs
there: the keys that verify allocations, and the certificates of the CA.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import anyio
import click
import msgspec
from msgspec import Struct

from hami_common import namespaces
from hami_common.bus import grants, subjects
from hami_common.bus.nkeys import NKey, check_public
from hami_common.certificates import KeyPair, ends, issue, new_authority, serves
from hami_common.errors import Conflict, HamiError, NotFound, Unavailable, WireInvalid
from hami_common.pods.signing import Signer
from hami_common.ports import KubeApi
from hami_common.runtime import kubeio
from hami_common.runtime.clock import SystemClock
from hamictl import options
from hamictl.errors import Absent, InputRefused, Unreachable

START_S = 60.0
SIGNING_KEY = "hami-signing-key"
TRUSTED_KEYS = "hami-trusted-keys"
AUTHORITY = "hami-ca"
SERVING = "hami-webhook-tls"
BUS_SERVING = "hami-nats-tls"
REGISTRY_SERVING = "hami-registry-tls"
SCHEDULER_SERVING = "hami-scheduler-tls"
BIND_ADMISSION_SERVING = "hami-bind-admission-tls"
AUTHORITY_BUNDLE = "hami-ca"
"""ConfigMap with the certificates of the CA, for clients of the services."""
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
"""Secrets with NKey seeds of the bus: user by key of the Secret."""
BUS_REGIONS = "hami-bus-regions"
"""Secret with the seed of the login to the copies of regions, and of a region at its hub."""
_ISSUER = "issuer"
_REGIONS = "regions"
PREVIOUS = "previous.crt"
STRATEGIC = "application/strategic-merge-patch+json"

Document = dict[str, Any]


class Installation(Struct, frozen=True, kw_only=True):
    """Names of an installation's objects, and lifetimes of its certificates."""

    namespace: str
    agents_namespace: str = namespaces.AGENTS
    """Namespace of the agents; empty, or ``namespace``: nothing is copied."""
    service: str
    """Service of the webhook."""
    webhook: str
    """Name of the MutatingWebhookConfiguration; empty if an external CA issues certificates."""
    bus: str = "nats"
    """Service of NATS; empty: NATS is external."""
    registry: str = "hami-registry"
    """Service of the registry."""
    scheduler: str = "hami-scheduler"
    """Service at which the scheduler answers the registry."""
    bind_admission: str = "hami-bind-admission"
    """Service at which the scheduler reviews Bindings, where that component is installed."""
    bus_names: tuple[str, ...] = ()
    """Further names in the certificate of NATS, such as that by which regions reach a hub."""
    region: str = ""
    """Name of this region, whose streams a hub copies; empty: none."""
    hub: str = ""
    """Address of the hub for leaf nodes, with ``region``."""
    leaf_by_region: Mapping[str, str] | None = None
    """In a hub: the public key of each region's login; ``None``: this is no hub."""
    authority_valid: timedelta = timedelta(days=3650)
    serving_valid: timedelta = timedelta(days=90)
    renew_before: timedelta = timedelta(days=30)
    """A certificate that expires within this time is replaced."""


@click.command()
@options.services_namespace_option
@click.option(
    "--agents-namespace",
    default=namespaces.AGENTS,
    show_default=True,
    help="Namespace of the node agents, for copies of the public ConfigMaps; empty: no copies.",
)
@click.option(
    "--service", default="hami-webhook", show_default=True, help="Service of the webhook."
)
@click.option(
    "--webhook",
    default="hami-webhook",
    show_default=True,
    help="MutatingWebhookConfiguration to update; empty: create keys only, no certificates.",
)
@click.option(
    "--bus",
    default="nats",
    show_default=True,
    help="Service of NATS, for its keys and certificate; empty: use an external NATS.",
)
@click.option(
    "--bus-names",
    default="",
    envvar="HAMICTL_BUS_NAMES",
    metavar="HOST,...",
    help="Further names in the certificate of NATS.",
)
@click.option(
    "--region",
    default="",
    envvar="HAMICTL_REGION",
    help="Name of this region, for a hub that copies it; needs --hub.",
)
@click.option(
    "--hub",
    default="",
    envvar="HAMICTL_HUB",
    help="Address of the hub for leaf nodes, tls://HOST:PORT.",
)
@click.option(
    "--leaves",
    # click takes an empty variable for an absent one; here it means a hub without regions yet.
    default=partial(os.environ.get, "HAMICTL_LEAVES"),
    envvar="HAMICTL_LEAVES",
    metavar="REGION=KEY,...",
    help="This is a hub: public keys of the regions' logins; may be empty.",
)
@click.option("--valid-days", default=90, show_default=True, help="Lifetime of a certificate.")
@click.option(
    "--renew-days",
    default=30,
    show_default=True,
    help="Renew a certificate this many days before it expires.",
)
@click.option(
    "--kubeconfig",
    envvar="KUBECONFIG",
    default="",
    help="Kubeconfig of the Kubernetes API; empty: the pod's service account.",
)
def bootstrap(  # noqa: PLR0913 - one argument per option
    *,
    namespace: str,
    agents_namespace: str,
    service: str,
    webhook: str,
    bus: str,
    bus_names: str,
    region: str,
    hub: str,
    leaves: str | None,
    valid_days: int,
    renew_days: int,
    kubeconfig: str,
) -> None:
    """Create or renew an installation's keys and certificates.

    Idempotent: existing keys and valid certificates are kept.
    """
    if not 0 < renew_days < valid_days:
        text = f"--renew-days {renew_days} is not between 0 and --valid-days {valid_days}"
        raise InputRefused(text)
    if bool(region) != bool(hub) or (region and leaves is not None):
        text = "give --region and --hub in a region, --leaves in a hub, and none of them elsewhere"
        raise InputRefused(text)
    if region:
        try:
            subjects.region(region)
        except WireInvalid as error:
            text = f"--region: {error}"
            raise InputRefused(text) from error
    installation = Installation(
        namespace=namespace,
        agents_namespace=agents_namespace,
        service=service,
        webhook=webhook,
        bus=bus,
        bus_names=tuple(filter(None, (one.strip() for one in bus_names.split(",")))),
        region=region,
        hub=hub,
        leaf_by_region=None if leaves is None else _leaves(leaves),
        serving_valid=timedelta(days=valid_days),
        renew_before=timedelta(days=renew_days),
    )
    try:
        done = anyio.run(_bootstrap, installation, kubeconfig)
    except NotFound as error:
        raise Absent(f"{error}; apply deploy/kustomize first") from error
    except Unavailable as error:
        raise Unreachable(str(error)) from error
    except HamiError as error:
        raise InputRefused(str(error)) from error
    for line in done or ["nothing to do"]:
        click.echo(line)


def _leaves(text: str) -> dict[str, str]:
    """Read ``REGION=KEY,...``."""
    found = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, _, key = part.partition("=")
        try:
            check_public(key, kind="user")
            found[subjects.region(name)] = key
        except WireInvalid as error:
            problem = f"--leaves: {part!r} is not REGION=KEY with the public key of the region"
            raise InputRefused(f"{problem}: {error}") from error
    return found


async def _bootstrap(installation: Installation, kubeconfig: str) -> list[str]:
    now = datetime.fromtimestamp(SystemClock().now_s(), tz=UTC)
    async with kubeio.connect(kubeconfig, user_agent="hamictl", start_timeout_s=START_S) as kube:
        return await create_missing(kube, installation, now=now)


async def create_missing(kube: KubeApi, installation: Installation, *, now: datetime) -> list[str]:
    """Create what is missing; return one line per change."""
    done = await _keys(kube, installation.namespace)
    if installation.bus:
        done += await _bus(kube, installation)
    if installation.webhook:
        done += await _certificates(kube, installation, now)
    else:
        done += await _external_authority(kube, installation.namespace)
    if installation.agents_namespace not in {"", installation.namespace}:
        done += await _copies(kube, installation)
    return done


async def _copies(kube: KubeApi, installation: Installation) -> list[str]:
    """Copy the public ConfigMaps to the namespace of the agents."""
    done = []
    for name in AGENTS_COPIES:
        original = await _get(kube, installation.namespace, "configmaps", name)
        if original is None:
            continue
        wanted = _map(installation.agents_namespace, name, original.get("data") or {})
        if what := await _keep_map(kube, wanted):
            done.append(
                f"{what} ConfigMap {installation.agents_namespace}/{name}: the agents' copy"
            )
    return done


async def _bus(kube: KubeApi, installation: Installation) -> list[str]:
    done = []
    namespace = installation.namespace
    public: dict[str, str] = {}
    source = ""
    is_hub = installation.leaf_by_region is not None
    copies = {BUS_REGIONS: {"seed": _REGIONS}} if installation.region or is_hub else {}
    for name, users in {**BUS_SECRETS, **copies}.items():
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
            if user == _REGIONS:
                source = grants.source_token(data[key].decode())
    issuer = public.pop(_ISSUER)
    regions = None
    if key := public.pop(_REGIONS, ""):
        regions = grants.Regions(
            public=key,
            region=installation.region,
            source=source,
            hub=installation.hub,
            leaf_by_region=installation.leaf_by_region or {},
        )
        if installation.region:
            done.append(f"login of region {installation.region} at its hub: {key}")
    text = grants.server_config(issuer=issuer, users=public, regions=regions)
    accounts = _map(namespace, BUS_ACCOUNTS, {"accounts.conf": text})
    if what := await _keep_map(kube, accounts):
        done.append(f"{what} ConfigMap {BUS_ACCOUNTS}: accounts and permissions of the bus")
    return done


def _new_key(user: str) -> NKey:
    return NKey.generate("account" if user == _ISSUER else "user")


async def _external_authority(kube: KubeApi, namespace: str) -> list[str]:
    """Publish the CA that an external issuer keeps in the Secret."""
    secret = await _get(kube, namespace, "secrets", AUTHORITY)
    certificate = _data(secret).get("tls.crt", b"") if secret else b""
    return await _publish_authority(kube, namespace, certificate) if certificate else []


async def _publish_authority(kube: KubeApi, namespace: str, bundle: bytes) -> list[str]:
    what = await _keep_map(kube, _map(namespace, AUTHORITY_BUNDLE, {"ca.crt": bundle.decode()}))
    return [f"{what} ConfigMap {AUTHORITY_BUNDLE}: the CA, for clients"] if what else []


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


async def _certificates(kube: KubeApi, installation: Installation, now: datetime) -> list[str]:
    done = []
    namespace = installation.namespace
    secret = await _get(kube, namespace, "secrets", AUTHORITY)
    known = _data(secret) if secret else {}
    authority = _pair(known)
    previous = known.get(PREVIOUS, b"")
    if authority is None or _ends_soon(authority.certificate, installation, now):
        previous = authority.certificate if authority else b""
        authority = new_authority("hami-ca", now=now, valid=installation.authority_valid)
        made = _secret(namespace, AUTHORITY, authority, {PREVIOUS: previous})
        await _put(kube, made, known=secret)
        done.append(f"made Secret {AUTHORITY}: the CA of the services' certificates")
    still = previous if (at := ends(previous)) is not None and at > now else b""
    done += await _set_ca_bundle(kube, installation.webhook, authority.certificate + still)
    done += await _publish_authority(kube, namespace, authority.certificate + still)
    servings = {SERVING: (installation.service, "the webhook's certificate")}
    if installation.bus:
        servings[BUS_SERVING] = (installation.bus, "the bus servers' certificate")
    if installation.registry:
        servings[REGISTRY_SERVING] = (installation.registry, "the registry's certificate")
    if installation.scheduler:
        servings[SCHEDULER_SERVING] = (installation.scheduler, "the scheduler's certificate")
    if installation.bind_admission:
        what = "the scheduler's certificate for bind admission"
        servings[BIND_ADMISSION_SERVING] = (installation.bind_admission, what)
    for name, (service, what) in servings.items():
        names = [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"]
        # NATS servers connect to each other by pod name, as clients.
        is_bus = name == BUS_SERVING
        names += [*(f"*.{host}" for host in names), *installation.bus_names] if is_bus else []
        secret = await _get(kube, namespace, "secrets", name)
        serving = _pair(_data(secret) if secret else {})
        if (
            serving is None
            or _ends_soon(serving.certificate, installation, now)
            or not serves(serving.certificate, names, authority=authority.certificate)
        ):
            valid = installation.serving_valid
            serving = issue(authority, names, now=now, valid=valid, is_client=is_bus)
            await _put(kube, _secret(namespace, name, serving), known=secret)
            done.append(f"made Secret {name}: {what}")
    return done


async def _set_ca_bundle(kube: KubeApi, webhook: str, bundle: bytes) -> list[str]:
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
    return [f"set the CA bundle of MutatingWebhookConfiguration {webhook}"]


def _ends_soon(certificate: bytes, installation: Installation, now: datetime) -> bool:
    at = ends(certificate)
    return at is None or at - now < installation.renew_before


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
    """Create or update the ConfigMap; return ``made``, ``changed`` or an empty text."""
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
    """Create an object; return false if it exists, for example by a concurrent run."""
    try:
        await kube.create(_path(namespace, resource), msgspec.json.encode(made))
    except Conflict:
        return False
    return True


async def _put(kube: KubeApi, made: Document, *, known: Document | None) -> None:
    """Create or replace the Secret; raises ``Conflict`` if it changed since it was read."""
    namespace, name = made["metadata"]["namespace"], made["metadata"]["name"]
    if known is None:
        await kube.create(_path(namespace, "secrets"), msgspec.json.encode(made))
        return
    known["data"] = made["data"]
    await kube.replace(_path(namespace, "secrets", name), msgspec.json.encode(known))
