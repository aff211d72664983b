# SPDX-License-Identifier: Apache-2.0
"""Makes a container's variables, its expanded command, and values of downward-API fields.

Order as in kubelet 1.34: variables of device plugins come first and the pod's own follow, so for
one name the pod's value wins; a `$(NAME)` refers to variables that were declared earlier, `$$` is a
dollar sign, unknown names stay as written. Pure: ConfigMaps and Secrets are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Final

import msgspec
from msgspec import Struct

from hami_sim.apiserver.quantity import parse_quantity
from hami_sim.kubelet.objects import Amounts, Obj, find_container, limits_of, requests_of

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class FieldError(ValueError):
    """Failure to resolve the reference of a variable or volume; the text is kubelet's."""


class NodeFacts(Struct, frozen=True, kw_only=True):
    """Facts of the node that downward-API fields can expose."""

    host_ip: str
    allocatable: Amounts


class Sources(Struct, frozen=True, kw_only=True):
    """ConfigMaps and Secrets by name, as far as the pod refers to them; None: does not exist."""

    config_maps: Mapping[str, Mapping[str, str] | None] = {}
    secrets: Mapping[str, Mapping[str, str] | None] = {}


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)`; unknown names stay as they are written."""
    out: list[str] = []
    at = 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            out.append(text[at])
            at += 1
        elif text[at + 1] == "$":
            out.append("$")
            at += 2
        elif text[at + 1] == "(" and (end := text.find(")", at + 2)) >= 0:
            name = text[at + 2 : end]
            out.append(values.get(name, f"$({name})"))
            at = end + 1
        else:
            out.append(text[at : at + 2])
            at += 2
    return "".join(out)


def format_map(values: Mapping[str, str]) -> str:
    """Render labels or annotations as the downward API does: sorted, quoted, one a line."""
    return "\n".join(f"{key}={msgspec.json.encode(values[key]).decode()}" for key in sorted(values))


def field_value(pod: Obj, path: str) -> str:
    """Read a metadata field that a downward-API volume may project."""
    metadata = pod["metadata"]
    if path.endswith("']") and "['" in path:
        field, _, key = path[:-2].partition("['")
        if field in ("metadata.annotations", "metadata.labels"):
            return str((metadata.get(field.removeprefix("metadata.")) or {}).get(key, ""))
        raise FieldError(f'fieldPath "{path}" does not support subscript')
    if path in ("metadata.annotations", "metadata.labels"):
        return format_map(metadata.get(path.removeprefix("metadata.")) or {})
    if path in ("metadata.name", "metadata.namespace", "metadata.uid"):
        return str(metadata.get(path.removeprefix("metadata."), ""))
    raise FieldError(f"unsupported fieldPath: {path}")


def env_field_value(pod: Obj, path: str, *, pod_ip: str, facts: NodeFacts) -> str:
    """Read a field that a variable may name: those of volumes and some of spec and status."""
    spec = pod["spec"]
    more = {
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.hostIP": facts.host_ip,
        "status.hostIPs": facts.host_ip,
        "status.podIP": pod_ip,
        "status.podIPs": pod_ip,
    }
    return str(more[path]) if path in more else field_value(pod, path)


def resource_value(pod: Obj, container: Obj, selector: Obj, *, facts: NodeFacts) -> str:
    """Read a container's CPU, memory or storage in units of the divisor, rounded up."""
    if selector.get("containerName"):
        named = find_container(pod, selector["containerName"])
        if named is None:
            raise FieldError(f"container {selector['containerName']} not found")
        container = named
    kind, _, name = selector["resource"].partition(".")
    if kind not in ("limits", "requests") or name not in ("cpu", "memory", "ephemeral-storage"):
        raise FieldError(f"unsupported container resource : {selector['resource']}")
    if kind == "limits":
        amount = limits_of(container).get(name) or facts.allocatable.get(name, Decimal(0))
    else:
        amount = requests_of(container).get(name, Decimal(0))
    divisor = parse_quantity(selector.get("divisor") or "0").amount or Decimal(1)
    return str(int((amount / divisor).to_integral_value(ROUND_CEILING)))


def environment(
    pod: Obj,
    container: Obj,
    *,
    plugin_envs: Mapping[str, str],
    sources: Sources,
    pod_ip: str,
    facts: NodeFacts,
) -> dict[str, str]:
    """Make all variables of a container."""
    declared: dict[str, str] = {}
    for origin in container.get("envFrom") or []:
        for kind, objects in (
            ("configMapRef", sources.config_maps),
            ("secretRef", sources.secrets),
        ):
            if kind in origin:
                data = _object(objects, origin[kind], kind.removesuffix("Ref"))
                prefix = origin.get("prefix", "")
                declared.update({prefix + key: value for key, value in (data or {}).items()})
    for variable in container.get("env") or []:
        value: str | None = ""
        if variable.get("value"):
            value = expand(variable["value"], declared)
        elif "valueFrom" in variable:
            value = _value_from(
                variable["valueFrom"],
                sources,
                field=lambda path: env_field_value(pod, path, pod_ip=pod_ip, facts=facts),
                resource=lambda selector: resource_value(pod, container, selector, facts=facts),
            )
        if value is not None:
            declared[variable["name"]] = value
    hostname = pod["spec"].get("hostname") or pod["metadata"]["name"]
    return {"PATH": PATH, "HOSTNAME": hostname[:63], "HOME": "/root", **plugin_envs, **declared}


def _value_from(
    origin: Obj,
    sources: Sources,
    *,
    field: Callable[[str], str],
    resource: Callable[[Obj], str],
) -> str | None:
    if "fieldRef" in origin:
        return field(origin["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in origin:
        return resource(origin["resourceFieldRef"])
    for kind, objects in (
        ("configMapKeyRef", sources.config_maps),
        ("secretKeyRef", sources.secrets),
    ):
        if kind in origin:
            reference = origin[kind]
            data = _object(objects, reference, kind.removesuffix("KeyRef"))
            if data is None:
                return None
            if reference["key"] not in data:
                if reference.get("optional"):
                    return None
                source = f"{kind.removesuffix('KeyRef')} {reference['name']}"
                raise FieldError(f"couldn't find key {reference['key']} in {source}")
            return data[reference["key"]]
    raise FieldError(f"unsupported valueFrom: {', '.join(origin)}")


def _object(
    objects: Mapping[str, Mapping[str, str] | None], reference: Obj, kind: str
) -> Mapping[str, str] | None:
    data = objects.get(reference["name"])
    if data is None and not reference.get("optional"):
        raise FieldError(f'{kind.lower()} "{reference["name"]}" not found')
    return data


def command_line(
    container: Obj,
    values: Mapping[str, str],
    *,
    entrypoint: Sequence[str] = (),
    fallback: Sequence[str],
) -> list[str]:
    """Make the argument list; the image's `entrypoint`, else `fallback`, fills the gaps."""
    command = [expand(word, values) for word in container.get("command") or ()]
    arguments = [expand(word, values) for word in container.get("args") or ()]
    return [*(command or entrypoint), *arguments] or list(fallback)


def referenced(container: Obj) -> tuple[set[str], set[str]]:
    """Name the ConfigMaps and Secrets that a container's variables refer to."""
    config_maps: set[str] = set()
    secrets: set[str] = set()
    for origin in container.get("envFrom") or []:
        config_maps |= {origin["configMapRef"]["name"]} if "configMapRef" in origin else set()
        secrets |= {origin["secretRef"]["name"]} if "secretRef" in origin else set()
    for variable in container.get("env") or []:
        value = variable.get("valueFrom") or {}
        config_maps |= {value["configMapKeyRef"]["name"]} if "configMapKeyRef" in value else set()
        secrets |= {value["secretKeyRef"]["name"]} if "secretKeyRef" in value else set()
    return config_maps, secrets
