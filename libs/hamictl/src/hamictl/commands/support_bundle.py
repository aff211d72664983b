# SPDX-License-Identifier: Apache-2.0
"""``hamictl support-bundle``: collects diagnostics in one archive, without secrets.

Sources that are unavailable are listed in ``problems.txt``. Secrets are never read. In all other
objects, values of keys named like a secret, tokens, keys in PEM, credentials in URLs and values
assigned to such names are replaced by ``REDACTED`` before they are written. The values of
environment variables of pods are removed. Sizes in bytes.
"""

import io
import json
import re
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import click
import msgspec

from hami_common.apipath import api_path
from hami_common.errors import HamiError
from hami_common.ports import KubeApi
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import Bus
from hamictl import client, eventstream, kube, options, output
from hamictl.errors import Absent, InputRefused, Refused, Unreachable

REDACTED = "REDACTED"
LOG_LINES = 2000
EVENTS = 5000
_KEYS = re.compile(
    r"(?i)(pass(word|wd|phrase)?|secret|token|credential|private[-_]?key|api[-_]?key|auth(orization)?"
    r"|seed|bearer|cookie|signing[-_]?key)"
)
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]*-----.*?(-----END [A-Z0-9 ]*-----|\Z)", re.DOTALL)
_JWT = re.compile(r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(\.[A-Za-z0-9_-]*)?")
_SEED = re.compile(r"\bS[UAONCX][A-Z2-7]{54,}\b")
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*://)[^/\s\"'@]+@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{6,}")
_ASSIGNED = re.compile(
    r"""(?ix)(
    (?:[\w.-]*(?:password|passwd|secret|token|credential|private[-_]?key|api[-_]?key|seed))
    ["']?\s*[:=]\s*["']?) ([^\s"',;}\]]{3,})"""
)
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
_NOT_SECRET = re.compile(r"(?i)(file|path|dir|name|_s|ref|mount\w*)$")
_LOCATIONS = re.compile(r"^(/|[\w.-]+\.(pem|crt|key|toml|creds)$|true$|false$|\d+$)")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@options.services_namespace_option
@options.agents_namespace_option
@options.bus_options
@options.registry_option
@options.scheduler_option
@options.kubeconfig_option
def support_bundle(  # noqa: PLR0917 - click passes them by name
    file: Path,
    namespace: str,
    agents_namespace: str,
    registry: str,
    scheduler: str,
    kubeconfig: str,
    **login: str,
) -> None:
    """Collect diagnostics without secrets in one .tar.gz file."""
    now_s = SystemClock().now_s()
    collected = Bundle(output.progress)
    collected.put("versions.json", {"hamictl": version("hamictl"), "python": sys.version})

    async def services() -> None:
        await collect_services(collected, registry=registry, scheduler=scheduler)

    async def stream() -> None:
        async with eventstream.open_bus(**login) as bus:
            await collect_events(collected, bus)

    anyio.run(services)
    try:
        anyio.run(stream)
    except (HamiError, OSError) as error:
        collected.problems.append(f"bus: {error}")
    try:
        kube.with_kube(
            kubeconfig,
            lambda api: collect_kubernetes(
                collected, api, namespace=namespace, agents_namespace=agents_namespace
            ),
        )
    except (Absent, Refused, Unreachable, InputRefused) as error:
        collected.problems.append(f"kubernetes: {error.message}")
    prefix = time.strftime("hami-support-%Y%m%d-%H%M%S", time.gmtime(now_s))
    data = collected.tar(prefix=prefix, now_s=now_s)
    try:
        file.write_bytes(data)
    except OSError as error:
        message = f"{file}: {error.strerror}"
        raise InputRefused(message) from error
    click.echo(f"{file}: {len(collected.files)} files, {len(data)} bytes")
    for problem in collected.problems:
        click.echo(f"not collected: {problem}", err=True)


class Bundle:
    """The files of a bundle as they are collected."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        """Report each name to ``progress`` before it is collected."""
        self.files: dict[str, bytes] = {}
        self.problems: list[str] = []
        self._progress = progress

    def put(self, name: str, value: object) -> None:
        """Add a document, without its secrets."""
        text = json.dumps(redact(value), indent=1, default=str)
        self.files[name] = redact_text(text).encode()

    def put_text(self, name: str, text: str) -> None:
        """Add a text, without its secrets."""
        self.files[name] = redact_text(text).encode()

    async def attempt(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a collector; record its failure in ``problems``."""
        self._progress(name)
        try:
            await work()
        except (HamiError, Absent, Refused, Unreachable) as error:
            self.problems.append(f"{name}: {redact_text(str(error))}")

    def tar(self, *, prefix: str, now_s: float) -> bytes:
        """Return the bundle as a compressed archive."""
        files = {**self.files, "problems.txt": "\n".join(self.problems).encode() + b"\n"}
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, data in sorted(files.items()):
                entry = tarfile.TarInfo(f"{prefix}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(now_s), 0o600
                archive.addfile(entry, io.BytesIO(data))
        return buffer.getvalue()


def redact(value: object) -> object:
    """Replace values of keys named like a secret, and of environment variables."""
    if isinstance(value, dict):
        found: dict[str, object] = {}
        for key, inner in value.items():
            word = str(key)
            if word == "env" and isinstance(inner, list):
                found[word] = [
                    {"name": one.get("name"), "value": REDACTED}
                    for one in inner
                    if isinstance(one, dict)
                ]
            elif word in ("managedFields", "kubectl.kubernetes.io/last-applied-configuration"):
                continue
            elif _KEYS.search(word) and isinstance(inner, str) and not _is_reference(word, inner):
                found[word] = REDACTED
            else:
                found[word] = redact(inner)
        return found
    if isinstance(value, list | tuple):
        return [redact(inner) for inner in value]
    return redact_text(value) if isinstance(value, str) else value


def _is_reference(key: str, text: str) -> bool:
    """Return whether the value is only the location or name of a secret."""
    if not text:
        return True
    if key.lower().endswith("name") and _OBJECT_NAME.fullmatch(text):
        return True
    return bool(_NOT_SECRET.search(key)) and bool(_LOCATIONS.match(text))


def redact_text(text: str) -> str:
    """Replace everything in the text that looks like a secret."""
    text = _PEM.sub(REDACTED, text)
    text = _JWT.sub(REDACTED, text)
    text = _SEED.sub(REDACTED, text)
    text = _ADDRESS.sub(rf"\1{REDACTED}@", text)
    text = _BEARER.sub(REDACTED, text)
    return _ASSIGNED.sub(_assigned, text)


def _assigned(found: re.Match[str]) -> str:
    key, text = found[1], found[2]
    return found[0] if _LOCATIONS.match(text) else f"{key}{REDACTED}"


async def collect_services(bundle: Bundle, *, registry: str, scheduler: str) -> None:
    """Collect inventory, ledger, decisions, usage, checks and metrics of registry and scheduler."""

    async def documents(base: str, path: str, name: str) -> None:
        bundle.put(name, msgspec.json.decode(await client.ask(base, path, {})))

    async def text(base: str, path: str, name: str) -> None:
        data = await client.ask(base, path, {})
        bundle.put_text(name, data.decode(errors="replace"))

    plan: Iterable[tuple[str, str, str]] = (
        (registry, "/v1/nodes", "registry/nodes.json"),
        (registry, "/v1/devices", "registry/devices.json"),
        (registry, "/v1/allocations?released=true", "registry/allocations.json"),
        (registry, "/v1/usage", "registry/usage.json"),
        (registry, "/v1/checks", "registry/checks.json"),
        (registry, "/v1/quarantine", "registry/quarantine.json"),
        (registry, "/v1/config", "registry/config.json"),
        (scheduler, "/v1/snapshot", "scheduler/snapshot.json"),
        (scheduler, "/v1/queues", "scheduler/queues.json"),
        (scheduler, "/v1/quotas", "scheduler/quotas.json"),
    )
    for base, path, name in plan:
        await bundle.attempt(name, partial(documents, base, path, name))
    for base, name in ((registry, "registry"), (scheduler, "scheduler")):
        await bundle.attempt(
            f"{name}/metrics.txt",
            partial(text, base, "/metrics", f"{name}/metrics.txt"),
        )


async def collect_kubernetes(
    bundle: Bundle, api: KubeApi, *, namespace: str, agents_namespace: str
) -> None:
    """Collect objects and events of Kubernetes, and the logs of the services' pods."""
    pods: list[dict[str, Any]] = []

    async def listed(path: str, name: str) -> None:
        pages = await api.list_pages(path)
        items = [item for page in pages for item in msgspec.json.decode(page).get("items") or []]
        if name.endswith("/pods.json"):
            pods.extend(items)
        bundle.put(name, items)

    own = api_path("api", "v1", "namespaces", namespace)
    agents = api_path("api", "v1", "namespaces", agents_namespace)
    plan = {
        "kubernetes/nodes.json": "/api/v1/nodes",
        "kubernetes/pods.json": f"{own}/pods",
        "kubernetes/configmaps.json": f"{own}/configmaps",
        "kubernetes/services.json": f"{own}/services",
        "kubernetes/events.json": f"{own}/events",
        "kubernetes/deployments.json": f"/apis/apps/v1/namespaces/{namespace}/deployments",
        "kubernetes/agents/pods.json": f"{agents}/pods",
        "kubernetes/agents/configmaps.json": f"{agents}/configmaps",
        "kubernetes/agents/events.json": f"{agents}/events",
        "kubernetes/daemonsets.json": f"/apis/apps/v1/namespaces/{agents_namespace}/daemonsets",
        "kubernetes/webhooks.json": (
            "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
        ),
    }
    for name, path in plan.items():
        await bundle.attempt(name, partial(listed, path, name))

    async def log(where: str, pod: str, container: str) -> None:
        path = (
            f"/api/v1/namespaces/{where}/pods/{pod}/log?container={container}&tailLines={LOG_LINES}"
        )
        text = (await api.get(path)).decode(errors="replace")
        bundle.put_text(f"logs/{pod}/{container}.log", text)

    for pod in pods:
        for container in pod["spec"].get("containers") or []:
            where = pod["metadata"].get("namespace", namespace)
            names = (pod["metadata"]["name"], container["name"])
            await bundle.attempt(f"logs/{names[0]}/{names[1]}.log", partial(log, where, *names))


async def collect_events(bundle: Bundle, bus: Bus) -> None:
    """Collect the newest events of the integration stream."""

    async def events() -> None:
        start = max(1, await eventstream.last_sequence(bus) - EVENTS)
        kept = [
            msgspec.to_builtins(event)
            async for event in eventstream.read_events(
                bus, eventstream.Filter(), start=start, follow=False
            )
        ]
        bundle.put("bus/events.json", kept)

    await bundle.attempt("bus/events.json", events)
