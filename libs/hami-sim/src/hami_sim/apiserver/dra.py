# SPDX-License-Identifier: Apache-2.0
"""Defaults and validation of the group resource.k8s.io: slices, claims, templates and classes.

Rules: ``pkg/apis/resource/validation`` and the defaults of ``resource.k8s.io/v1`` (Kubernetes
1.37). Checked is what drivers, schedulers and users of shared devices can get wrong; fields of
features that are off by default are stored as they are. Pure functions on copies of objects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import pairwise
from typing import Any, Final

from hami_sim.apiserver.cel import CelError, Program
from hami_sim.apiserver.errors import (
    Cause,
    Obj,
    bad_request,
    bad_value,
    clone,
    duplicate,
    forbidden_field,
    required,
    unsupported,
)
from hami_sim.apiserver.names import label_complaints, qualified_complaints, subdomain_complaints
from hami_sim.apiserver.quantity import canonical, parse_quantity

GROUP: Final = "resource.k8s.io"
CLAIMS: Final = f"resourceclaims.{GROUP}"
TEMPLATES: Final = f"resourceclaimtemplates.{GROUP}"
SLICES: Final = f"resourceslices.{GROUP}"
CLASSES: Final = f"deviceclasses.{GROUP}"

DEVICES_MOST: Final = 128
ADVANCED_DEVICES_MOST: Final = 64
"""Of a slice in which a device has taints or consumes counters."""
COUNTER_SETS_MOST: Final = 8
FIELDS_MOST: Final = 32
"""Attributes and capacities of a device."""
TAINTS_MOST: Final = 16
REQUESTS_MOST: Final = 32
ALTERNATIVES_MOST: Final = 8
RESERVED_MOST: Final = 256
COUNTERS_MOST: Final = 32
_VALUES_MOST: Final = 10
_NAME_MOST: Final = 63
_ID_MOST: Final = 32
_TEXT_MOST: Final = 64
_PARAMETERS_MOST: Final = 10 * 1024
_ONE_OF: Final = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
_ATTRIBUTE_TYPES: Final = ("int", "bool", "string", "version")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SEMVER: Final = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?"
)
_DEVICE: Final = frozenset({"device"})
_STRING: Final = re.compile(r"'[^']*'|\"[^\"]*\"")
_MEMBER: Final = re.compile(r"\bdevice\s*\.\??\s*(\w+)")
_MEMBERS: Final = frozenset({"driver", "attributes", "capacity", "allowMultipleAllocations"})

Items = list[dict[str, Any]]


# ------------------------------------------------------------------------------------ helpers


def _amounts(holder: Obj | None, kind: str) -> None:
    """Rewrite the values of a map of quantities in place."""
    for name, text in (holder or {}).items():
        try:
            holder[name] = canonical(text)  # type: ignore[index] # not empty here
        except ValueError as error:
            msg = f'{kind} in version "v1" cannot be handled as a {kind}: {error}'
            raise bad_request(msg) from error


def _amount(holder: Obj, field: str, kind: str) -> None:
    if field in holder:
        part = {field: holder[field]}
        _amounts(part, kind)
        holder[field] = part[field]


def _value(text: object) -> Decimal:
    return parse_quantity(text).amount


def _each(items: Items | None, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, item in enumerate(items or ()):
        yield f"{path}[{number}]", item


def _too_many(items: object, most: int, path: str) -> list[Cause]:
    count = len(items) if isinstance(items, (list, dict)) else 0
    if count <= most:
        return []
    text = f"Too many: {count}: must have at most {most} items"
    return [Cause(reason="FieldValueTooMany", message=text, field=path)]


def _named(
    items: Items | None, path: str, *, field: str = "name", label: bool = True
) -> list[Cause]:
    """Check that names are there, DNS labels, and unique."""
    found: list[Cause] = []
    seen: set[str] = set()
    for at, item in _each(items, path):
        name = item.get(field, "")
        if not name:
            found.append(required(f"{at}.{field}"))
        elif label:
            found += [bad_value(f"{at}.{field}", name, text) for text in label_complaints(name)]
        if name in seen:
            found.append(duplicate(at, name))
        seen.add(name)
    return found


def _driver(name: str, path: str) -> list[Cause]:
    if not name:
        return [required(path)]
    found = [bad_value(path, name, text) for text in subdomain_complaints(name)]
    if len(name) > _NAME_MOST:
        found.append(bad_value(path, name, f"must be no more than {_NAME_MOST} bytes"))
    return found


def _pool(name: str, path: str) -> list[Cause]:
    if not name:
        return [required(path)]
    parts = name.split("/")
    return [bad_value(path, name, text) for part in parts for text in subdomain_complaints(part)]


def _qualified(name: str, path: str, *, domain: bool = False) -> list[Cause]:
    """Check ``[domain/]identifier``; ``domain``: it must have one."""
    head, slash, tail = name.rpartition("/")
    if domain and not slash:
        return [bad_value(path, name, "must include a domain")]
    found = [bad_value(path, head, text) for text in (subdomain_complaints(head) if slash else ())]
    if not _IDENTIFIER.fullmatch(tail) or len(tail) > _ID_MOST:
        found.append(bad_value(path, tail, "a valid C identifier of at most 32 characters"))
    return found


def _immutable(new: object, old: object, path: str) -> list[Cause]:
    return [] if new == old else [bad_value(path, new, "field is immutable")]


# ------------------------------------------------------------------------------------- slices


def default_slice(obj: Obj) -> None:
    """Fill in and rewrite what the server does when it decodes a slice."""
    spec = obj.setdefault("spec", {})
    for device in spec.get("devices") or ():
        for capacity in (device.get("capacity") or {}).values():
            _amount(capacity, "value", "ResourceSlice")
            policy = capacity.get("requestPolicy") or {}
            _amount(policy, "default", "ResourceSlice")
            if "validValues" in policy:
                policy["validValues"] = [canonical(value) for value in policy["validValues"]]
            for field in ("min", "max", "step"):
                _amount(policy.get("validRange") or {}, field, "ResourceSlice")
        for consumed in device.get("consumesCounters") or ():
            for counter in (consumed.get("counters") or {}).values():
                _amount(counter, "value", "ResourceSlice")
    for counters in spec.get("sharedCounters") or ():
        for counter in (counters.get("counters") or {}).values():
            _amount(counter, "value", "ResourceSlice")


def check_slice(obj: Obj) -> list[Cause]:
    """Validate a slice."""
    spec = obj["spec"]
    pool = spec.get("pool") or {}
    found = _driver(spec.get("driver", ""), "spec.driver")
    found += _pool(pool.get("name", ""), "spec.pool.name")
    if pool.get("resourceSliceCount", 0) <= 0:
        text = "must be greater than zero"
        found.append(
            bad_value("spec.pool.resourceSliceCount", pool.get("resourceSliceCount", 0), text)
        )
    if pool.get("generation", 0) < 0:
        found.append(
            bad_value(
                "spec.pool.generation", pool["generation"], "must be greater than or equal to 0"
            )
        )
    found += _check_place(spec)
    if "sharedCounters" in spec and "devices" in spec:
        found.append(bad_value("spec", "", "only one of `sharedCounters` or `devices` is allowed"))
    devices = spec.get("devices")
    is_advanced = any(d.get("taints") or d.get("consumesCounters") for d in devices or ())
    most = ADVANCED_DEVICES_MOST if is_advanced else DEVICES_MOST
    found += _too_many(devices, most, "spec.devices")
    found += _named(devices, "spec.devices")
    for path, device in _each(devices, "spec.devices"):
        found += _check_device(device, path)
    found += _too_many(spec.get("sharedCounters"), COUNTER_SETS_MOST, "spec.sharedCounters")
    found += _named(spec.get("sharedCounters"), "spec.sharedCounters")
    for path, counters in _each(spec.get("sharedCounters"), "spec.sharedCounters"):
        found += _check_counters(counters.get("counters"), f"{path}.counters")
    return found


def _check_place(spec: Obj) -> list[Cause]:
    chosen = [field for field in _ONE_OF if spec.get(field)]
    text = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is"
    if not chosen:
        return [required("spec", f"{text} required")]
    if len(chosen) > 1:
        shown = ", ".join(f"`{field}`" for field in chosen)
        return [bad_value("spec", f"{{{shown}}}", f"{text} required, but multiple fields are set")]
    return []


def check_slice_update(obj: Obj, old: Obj) -> list[Cause]:
    """Validate a change of a slice; driver, pool and node stay."""
    spec, before = obj["spec"], old["spec"]
    found = _immutable(
        (spec.get("pool") or {}).get("name"), before["pool"]["name"], "spec.pool.name"
    )
    for field in ("driver", "nodeName"):
        found += _immutable(spec.get(field), before.get(field), f"spec.{field}")
    return found + check_slice(obj)


def _check_device(device: Obj, path: str) -> list[Cause]:
    attributes, capacity = device.get("attributes") or {}, device.get("capacity") or {}
    found: list[Cause] = []
    count = len(attributes) + len(capacity)
    if count > FIELDS_MOST:
        text = f"the total number of attributes and capacities must not exceed {FIELDS_MOST}"
        found.append(bad_value(path, count, text))
    for name, attribute in attributes.items():
        at = f"{path}.attributes[{name}]"
        found += _qualified(name, f"{path}.attributes")
        found += _check_attribute(attribute, at)
    shared = bool(device.get("allowMultipleAllocations"))
    for name, amount in capacity.items():
        found += _qualified(name, f"{path}.capacity")
        policy, at = amount.get("requestPolicy"), f"{path}.capacity[{name}].requestPolicy"
        if policy and not shared:
            found.append(forbidden_field(at, "allowMultipleAllocations must be true"))
        elif policy:
            found += _check_policy(policy, _value(amount.get("value", 0)), at)
    found += _check_taints(device.get("taints"), f"{path}.taints")
    consumed = device.get("consumesCounters")
    found += _too_many(consumed, 2, f"{path}.consumesCounters")
    found += _named(consumed, f"{path}.consumesCounters", field="counterSet")
    for at, one in _each(consumed, f"{path}.consumesCounters"):
        found += _check_counters(one.get("counters"), f"{at}.counters")
    return found


def _check_attribute(attribute: Obj, path: str) -> list[Cause]:
    kinds = [kind for kind in _ATTRIBUTE_TYPES if kind in attribute]
    if len(kinds) != 1:
        text = "exactly one value must be specified"
        return [bad_value(path, attribute, text) if kinds else required(path, text)]
    (kind,) = kinds
    value = attribute[kind]
    if kind in ("string", "version") and len(value) > _TEXT_MOST:
        text = f"may not be more than {_TEXT_MOST} bytes"
        return [bad_value(f"{path}.{kind}", value, text)]
    if kind == "version" and not _SEMVER.fullmatch(value):
        return [bad_value(f"{path}.version", value, "must be a string compatible with semver.org")]
    return []


def _check_policy(policy: Obj, capacity: Decimal, path: str) -> list[Cause]:
    values, limits = policy.get("validValues"), policy.get("validRange")
    if values and limits:
        text = (
            "exactly one policy can be specified, cannot specify"
            ' "validValues" and "validRange" at the same time'
        )
        return [forbidden_field(path, text)]
    if not values and not limits:
        return []
    if "default" not in policy:
        name = "validValues" if values else "validRange"
        return [required(f"{path}.default", f"required when {name} is defined")]
    default = _value(policy["default"])
    if values:
        return _check_values([_value(value) for value in values], default, capacity, path)
    return _check_range(limits or {}, default, capacity, f"{path}.validRange")


def _check_values(
    values: list[Decimal], default: Decimal, capacity: Decimal, path: str
) -> list[Cause]:
    at = f"{path}.validValues"
    found = _too_many(values, _VALUES_MOST, at)
    found += [
        bad_value(f"{at}[{number}]", str(value), "values must be sorted in ascending order")
        for number, (before, value) in enumerate(pairwise(values), start=1)
        if value < before
    ]
    found += [
        bad_value(
            f"{at}[{number}]", str(value), f"option is larger than capacity value: {capacity}"
        )
        for number, value in enumerate(values)
        if value > capacity
    ]
    if default not in values:
        text = "default value is not valid according to the requestPolicy"
        found.append(bad_value(at, str(default), text))
    return found


def _check_range(limits: Obj, default: Decimal, capacity: Decimal, path: str) -> list[Cause]:
    if "min" not in limits:
        return [required(f"{path}.min", "required when validRange is defined")]
    least = _value(limits["min"])
    found: list[Cause] = []
    if least > capacity:
        text = f"min is larger than capacity value: {capacity}"
        found.append(bad_value(f"{path}.min", str(least), text))
    if default < least:
        text = f"default is less than min: {least}"
        found.append(bad_value(f"{path}.default", str(default), text))
    most = _value(limits["max"]) if "max" in limits else None
    if most is not None:
        found += [
            bad_value(f"{path}.{field}", str(value), text)
            for field, value, is_wrong, text in (
                ("max", least, least > most, f"min is larger than max: {most}"),
                ("max", most, most > capacity, f"max is larger than capacity value: {capacity}"),
                ("default", default, default > most, f"default is more than max: {most}"),
            )
            if is_wrong
        ]
    step = _value(limits.get("step", 0))
    if step > 0:
        if least + step > (capacity if most is None else most):
            text = "one step above min is larger than the capacity"
            found.append(bad_value(f"{path}.step", str(step), text))
        found += [
            bad_value(f"{path}.{field}", str(value), "value is not a multiple of a given step")
            for field, value in (("default", default), ("max", most))
            if value is not None and (value - least) % step
        ]
    return found


def _check_taints(taints: Items | None, path: str) -> list[Cause]:
    found = _too_many(taints, TAINTS_MOST, path)
    for at, taint in _each(taints, path):
        key = taint.get("key", "")
        found += [bad_value(f"{at}.key", key, text) for text in qualified_complaints(key)]
        if taint.get("effect") not in ("None", "NoSchedule", "NoExecute"):
            allowed = ("NoExecute", "NoSchedule", "None")
            found.append(
                unsupported(f"{at}.effect", taint["effect"], allowed)
                if taint.get("effect")
                else required(f"{at}.effect")
            )
    return found


def _check_counters(counters: Obj | None, path: str) -> list[Cause]:
    if not counters:
        return [required(path)]
    found = _too_many(counters, COUNTERS_MOST, path)
    for name in counters:
        found += [bad_value(path, name, text) for text in label_complaints(name)]
    return found


# ------------------------------------------------------------------------------------- claims


def _default_requests(spec: Obj, kind: str) -> None:
    for request in (spec.get("devices") or {}).get("requests") or ():
        for exact in (request.get("exactly"), *(request.get("firstAvailable") or ())):
            if exact is None:
                continue
            exact.setdefault("allocationMode", "ExactCount")
            if exact["allocationMode"] == "ExactCount":
                exact.setdefault("count", 1)
            _amounts((exact.get("capacity") or {}).get("requests"), kind)
            for toleration in exact.get("tolerations") or ():
                toleration.setdefault("operator", "Equal")


def default_claim(obj: Obj) -> None:
    """Fill in and rewrite what the server does when it decodes a claim."""
    obj.setdefault("spec", {})
    obj.setdefault("status", {})
    _default_requests(obj["spec"], "ResourceClaim")
    allocation = obj["status"].get("allocation") or {}
    for result in (allocation.get("devices") or {}).get("results") or ():
        _amounts(result.get("consumedCapacity"), "ResourceClaim")


def default_template(obj: Obj) -> None:
    """Fill in what the server does when it decodes a template."""
    _default_requests(obj.setdefault("spec", {}).setdefault("spec", {}), "ResourceClaimTemplate")


def prepare_claim_create(obj: Obj) -> None:
    """Take away the status, which only controllers write."""
    obj["status"] = {}


def check_claim(obj: Obj) -> list[Cause]:
    """Validate a new claim."""
    return _check_claim_spec(obj["spec"], "spec")


def check_claim_update(obj: Obj, old: Obj) -> list[Cause]:
    """Validate a change of a claim, whose specification stays."""
    return _immutable(obj["spec"], old["spec"], "spec")


def check_template(obj: Obj) -> list[Cause]:
    """Validate a new template."""
    return _check_claim_spec(obj["spec"]["spec"], "spec.spec")


def check_template_update(obj: Obj, old: Obj) -> list[Cause]:
    """Validate a change of a template, whose specification stays."""
    return _immutable(obj["spec"], old["spec"], "spec")


def _check_claim_spec(spec: Obj, path: str) -> list[Cause]:
    devices = spec.get("devices") or {}
    at = f"{path}.devices"
    requests = devices.get("requests")
    found = _too_many(requests, REQUESTS_MOST, f"{at}.requests")
    found += _named(requests, f"{at}.requests")
    for here, request in _each(requests, f"{at}.requests"):
        found += _check_request(request, here)
    names = set(request_names(spec))
    for field in ("constraints", "config"):
        found += _too_many(devices.get(field), REQUESTS_MOST, f"{at}.{field}")
    for here, constraint in _each(devices.get("constraints"), f"{at}.constraints"):
        found += _check_references(constraint, names, here)
        kinds = [kind for kind in ("matchAttribute", "distinctAttribute") if kind in constraint]
        if len(kinds) != 1:
            found.append(required(here, "exactly one of the constraint types is required"))
        for kind in kinds:
            found += _qualified(constraint[kind], f"{here}.{kind}", domain=True)
    for here, config in _each(devices.get("config"), f"{at}.config"):
        found += _check_references(config, names, here)
        found += _check_config(config, here)
    return found


def request_names(spec: Obj) -> Iterator[str]:
    """Yield the names by which a claim's requests and their alternatives are referred to."""
    for request in (spec.get("devices") or {}).get("requests") or ():
        yield request.get("name", "")
        for alternative in request.get("firstAvailable") or ():
            yield f"{request.get('name', '')}/{alternative.get('name', '')}"


def _check_references(holder: Obj, names: set[str], path: str) -> list[Cause]:
    text = "must be the name of a request in the claim or the name of a request and a subrequest"
    return [
        bad_value(f"{path}.requests[{number}]", name, f"{text} separated by '/'")
        for number, name in enumerate(holder.get("requests") or ())
        if name not in names
    ]


def _check_request(request: Obj, path: str) -> list[Cause]:
    exact, first = request.get("exactly"), request.get("firstAvailable")
    if bool(exact) == bool(first):
        text = "exactly one of `exactly` or `firstAvailable` is required"
        return (
            [bad_value(path, None, f"{text}, but multiple fields are set")]
            if exact
            else [required(path, text)]
        )
    if exact:
        return _check_exact(exact, f"{path}.exactly")
    at = f"{path}.firstAvailable"
    found = _too_many(first, ALTERNATIVES_MOST, at) + _named(first, at)
    for here, alternative in _each(first, at):
        found += _check_exact(alternative, here)
    return found


def _check_exact(exact: Obj, path: str) -> list[Cause]:
    found: list[Cause] = []
    name = exact.get("deviceClassName", "")
    if not name:
        found.append(required(f"{path}.deviceClassName"))
    else:
        found += [
            bad_value(f"{path}.deviceClassName", name, text) for text in subdomain_complaints(name)
        ]
    mode, count = exact.get("allocationMode"), exact.get("count", 0)
    if mode == "ExactCount" and count <= 0:
        found.append(bad_value(f"{path}.count", count, "must be greater than zero"))
    elif mode == "All" and count:
        text = "must not be specified when allocationMode is 'All'"
        found.append(bad_value(f"{path}.count", count, text))
    elif mode not in ("All", "ExactCount"):
        found.append(unsupported(f"{path}.allocationMode", mode, ("All", "ExactCount")))
    found += _check_selectors(exact.get("selectors"), f"{path}.selectors")
    for capacity in (exact.get("capacity") or {}).get("requests") or {}:
        found += _qualified(capacity, f"{path}.capacity.requests")
    return found


def _check_selectors(selectors: Items | None, path: str) -> list[Cause]:
    found = _too_many(selectors, REQUESTS_MOST, path)
    for at, selector in _each(selectors, path):
        expression = (selector.get("cel") or {}).get("expression")
        if not expression:
            found.append(required(f"{at}.cel"))
            continue
        if problem := _problem_of(expression):
            text = f"compilation failed: {problem}"
            found.append(bad_value(f"{at}.cel.expression", expression, text))
    return found


def _problem_of(expression: str) -> str:
    """Return why a selector does not compile, or nothing."""
    try:
        Program(expression, _DEVICE)
    except CelError as error:
        return str(error)
    members = _MEMBER.findall(_STRING.sub('""', expression))
    return next((f"undefined field '{name}'" for name in members if name not in _MEMBERS), "")


def _check_config(config: Obj, path: str) -> list[Cause]:
    opaque = config.get("opaque")
    if not opaque:
        return [required(f"{path}.opaque")]
    found = _driver(opaque.get("driver", ""), f"{path}.opaque.driver")
    parameters = opaque.get("parameters")
    if parameters is None:
        found.append(required(f"{path}.opaque.parameters"))
    elif not isinstance(parameters, dict):
        found.append(bad_value(f"{path}.opaque.parameters", "", "must be a valid JSON object"))
    elif len(str(parameters)) > _PARAMETERS_MOST:
        text = f"may not be more than {_PARAMETERS_MOST} bytes"
        found.append(bad_value(f"{path}.opaque.parameters", "", text))
    return found


# ------------------------------------------------------------------------ a claim's allocation


def prepare_claim_status(obj: Obj, old: Obj) -> None:
    """Keep all but the status; a deallocation drops what devices reported."""
    status = obj.get("status") or {}
    metadata = obj["metadata"]
    obj.clear()
    obj.update(clone(old))
    obj["metadata"] = {**clone(old["metadata"]), **_written(metadata)}
    if "allocation" not in status:
        status.pop("devices", None)
    obj["status"] = status


def _written(metadata: Obj) -> Obj:
    fields = ("labels", "annotations", "resourceVersion", "managedFields")
    return {field: metadata[field] for field in fields if field in metadata}


def check_claim_status(obj: Obj, old: Obj) -> list[Cause]:
    """Validate a change of allocation, consumers or device status."""
    status, before = obj["status"], old.get("status") or {}
    allocation, reserved = status.get("allocation"), status.get("reservedFor") or []
    found = _too_many(reserved, RESERVED_MOST, "status.reservedFor")
    uids = Counter(consumer.get("uid", "") for consumer in reserved)
    for path, consumer in _each(reserved, "status.reservedFor"):
        found += [
            required(f"{path}.{field}")
            for field in ("resource", "name", "uid")
            if not consumer.get(field)
        ]
        if uids[consumer.get("uid", "")] > 1:
            found.append(duplicate(path, consumer.get("uid", "")))
    if reserved and allocation is None:
        text = "may not be specified when `allocated` is not set"
        found.append(forbidden_field("status.reservedFor", text))
    elif obj["metadata"].get("deletionTimestamp"):
        known = {consumer.get("uid") for consumer in before.get("reservedFor") or ()}
        if {consumer.get("uid") for consumer in reserved} - known:
            text = (
                "new entries may not be added while `deallocationRequested` or"
                " `deletionTimestamp` are set"
            )
            found.append(forbidden_field("status.reservedFor", text))
    if allocation is not None and before.get("allocation") is not None:
        found += _immutable(allocation, before["allocation"], "status.allocation")
    elif allocation is not None:
        found += _check_allocation(allocation, set(request_names(obj["spec"])))
    return found + _check_reported(status)


def _check_allocation(allocation: Obj, names: set[str]) -> list[Cause]:
    path = "status.allocation.devices"
    devices = allocation.get("devices") or {}
    found = _too_many(devices.get("results"), REQUESTS_MOST, f"{path}.results")
    for at, result in _each(devices.get("results"), f"{path}.results"):
        if result.get("request") not in names:
            text = (
                "must be the name of a request in the claim or the name of a request and a"
                " subrequest separated by '/'"
            )
            found.append(bad_value(f"{at}.request", result.get("request", ""), text))
        found += _driver(result.get("driver", ""), f"{at}.driver")
        found += _pool(result.get("pool", ""), f"{at}.pool")
        device = result.get("device", "")
        found += [bad_value(f"{at}.device", device, text) for text in label_complaints(device)]
    for at, config in _each(devices.get("config"), f"{path}.config"):
        if config.get("source") not in ("FromClass", "FromClaim"):
            allowed = ("FromClaim", "FromClass")
            found.append(
                unsupported(f"{at}.source", config["source"], allowed)
                if config.get("source")
                else required(f"{at}.source")
            )
        found += _check_config(config, at)
    return found


def _check_reported(status: Obj) -> list[Cause]:
    """Check that statuses are of allocated devices, one for each."""
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
    allocated = {_identity(result) for result in results}
    found: list[Cause] = []
    seen: set[tuple[object, ...]] = set()
    for path, device in _each(status.get("devices"), "status.devices"):
        identity = _identity(device)
        if identity not in allocated:
            shown = "/".join(str(part) for part in identity[:3])
            found.append(bad_value(path, shown, "must be an allocated device in the claim"))
        if identity in seen:
            found.append(duplicate(path, device.get("device", "")))
        seen.add(identity)
    return found


def _identity(item: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(item.get(field) for field in ("driver", "pool", "device", "shareID"))


# ------------------------------------------------------------------------------------ classes


def default_class(obj: Obj) -> None:
    """Give a class its specification."""
    obj.setdefault("spec", {})


def check_class(obj: Obj) -> list[Cause]:
    """Validate a class."""
    spec = obj["spec"]
    found = _check_selectors(spec.get("selectors"), "spec.selectors")
    found += _too_many(spec.get("config"), REQUESTS_MOST, "spec.config")
    for path, config in _each(spec.get("config"), "spec.config"):
        found += _check_config(config, path)
    name = spec.get("extendedResourceName")
    if name:
        found += [
            bad_value("spec.extendedResourceName", name, text)
            for text in qualified_complaints(name)
        ]
    return found


def check_class_update(obj: Obj, old: Obj) -> list[Cause]:
    """Validate a change of a class: anything may change."""
    del old
    return check_class(obj)
