# SPDX-License-Identifier: Apache-2.0
"""Defaults and validation that the server applies to a pod, and which fields may change.

Functions take and change a private copy of a pod's JSON; none of them reads the store or a clock.
Resource amounts come out in canonical notation (see `quantity`). Field paths and texts follow
``pkg/apis/core/{v1/defaults,validation}`` of Kubernetes 1.34. Not covered: constraints between
fields that no part of this system sets (windows options, volume plugins' own fields).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from hami_sim.apiserver.errors import (
    Cause,
    Obj,
    bad_request,
    bad_value,
    clone,
    duplicate,
    forbidden_field,
    required,
    unknown_reference,
    unsupported,
)
from hami_sim.apiserver.names import (
    label_complaints,
    qualified_complaints,
    subdomain_complaints,
)
from hami_sim.apiserver.quantity import canonical, parse_quantity

CONTAINER_LISTS: Final = ("initContainers", "containers", "ephemeralContainers")
_STANDARD_RESOURCES: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
_VOLUME_META: Final = frozenset({"name"})
_DOWNWARD_FIELDS: Final = frozenset(
    {
        "metadata.annotations",
        "metadata.labels",
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
    }
)
_ENV_FIELDS: Final = frozenset(
    {
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "spec.nodeName",
        "spec.serviceAccountName",
        "status.hostIP",
        "status.hostIPs",
        "status.podIP",
        "status.podIPs",
    }
)
_SUBSCRIPT: Final = re.compile(r"(metadata\.(?:annotations|labels))\['(.*)'\]")
_UPDATE_TEXT: Final = (
    "pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
    "additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set "
    "to 1 if it was previously negative)"
)


def is_extended_resource(name: str) -> bool:
    """Say whether a resource name is one that device plugins may serve."""
    if "/" not in name or name.split("/", maxsplit=1)[0].endswith("kubernetes.io"):
        return False
    return not name.startswith("requests.") and not qualified_complaints(f"requests.{name}")


def containers(spec: Obj) -> Iterator[tuple[str, Obj]]:
    """Iterate over all containers with their field paths."""
    for kind in CONTAINER_LISTS:
        for position, container in enumerate(spec.get(kind) or ()):
            yield f"spec.{kind}[{position}]", container


# ---------------------------------------------------------------------------------- defaults


def canonical_amounts(amounts: Obj | None, kind: str = "Pod") -> None:
    """Rewrite a resource list in place; malformed text is refused as the decoder does."""
    for name, value in (amounts or {}).items():
        try:
            amounts[name] = canonical(value)  # type: ignore[index] # amounts is not empty here
        except ValueError as error:
            msg = f'{kind} in version "v1" cannot be handled as a {kind}: {error}'
            raise bad_request(msg) from error


def default_pod(pod: Obj) -> None:
    """Fill in what the server fills in when it decodes a pod."""
    spec = pod.setdefault("spec", {})
    host_network = bool(spec.get("hostNetwork"))
    for kind in CONTAINER_LISTS:
        for container in spec.get(kind) or ():
            _default_container(container, host_network=host_network)
    for volume in spec.get("volumes") or ():
        _default_volume(volume)
    if not spec.get("nodeName", "x"):
        del spec["nodeName"]
    for field, value in (
        ("restartPolicy", "Always"),
        ("terminationGracePeriodSeconds", 30),
        ("dnsPolicy", "ClusterFirst"),
        ("schedulerName", "default-scheduler"),
        ("enableServiceLinks", True),
    ):
        if spec.get(field) in (None, ""):
            spec[field] = value
    if "securityContext" not in spec:
        spec["securityContext"] = {}
    if spec.get("serviceAccountName"):
        spec["serviceAccount"] = spec["serviceAccountName"]
    elif spec.get("serviceAccount"):
        spec["serviceAccountName"] = spec["serviceAccount"]
    canonical_amounts(spec.get("overhead"))


def _default_container(container: Obj, *, host_network: bool) -> None:
    resources = container.setdefault("resources", {})
    for amounts in (resources.get("limits"), resources.get("requests")):
        canonical_amounts(amounts)
    if limits := resources.get("limits"):
        requests = resources.setdefault("requests", {})
        for name, value in limits.items():
            requests.setdefault(name, value)
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    image = container.get("image") or ""
    if not container.get("imagePullPolicy"):
        tail = image.rsplit("/", 1)[-1]
        latest = "@" not in image and (":" not in tail or tail.endswith(":latest"))
        container["imagePullPolicy"] = "Always" if latest else "IfNotPresent"
    for port in container.get("ports") or ():
        port.setdefault("protocol", "TCP")
        if host_network:
            port.setdefault("hostPort", port.get("containerPort"))
    for env in container.get("env") or ():
        _default_field_ref((env.get("valueFrom") or {}).get("fieldRef"))
        _default_resource_ref((env.get("valueFrom") or {}).get("resourceFieldRef"))
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(container.get(probe), dict):
            for field, value in (
                ("timeoutSeconds", 1),
                ("periodSeconds", 10),
                ("successThreshold", 1),
                ("failureThreshold", 3),
            ):
                container[probe].setdefault(field, value)


def _default_field_ref(ref: Obj | None) -> None:
    if ref is not None:
        ref.setdefault("apiVersion", "v1")


def _default_resource_ref(ref: Obj | None) -> None:
    if ref is not None:
        ref["divisor"] = canonical(ref.get("divisor") or 0)


def _default_volume(volume: Obj) -> None:
    if not set(volume) - _VOLUME_META:
        volume["emptyDir"] = {}
    for source in ("secret", "configMap", "downwardAPI", "projected"):
        if isinstance(volume.get(source), dict):
            volume[source].setdefault("defaultMode", 420)
    if isinstance(volume.get("hostPath"), dict):
        volume["hostPath"].setdefault("type", "")
    empty = volume.get("emptyDir")
    if isinstance(empty, dict) and empty.get("sizeLimit") is not None:
        canonical_amounts(empty_size := {"sizeLimit": empty["sizeLimit"]})
        empty["sizeLimit"] = empty_size["sizeLimit"]
    for items in _downward_items(volume):
        for item in items:
            _default_field_ref(item.get("fieldRef"))
            _default_resource_ref(item.get("resourceFieldRef"))


def _downward_items(volume: Obj) -> Iterator[list[Obj]]:
    if isinstance(volume.get("downwardAPI"), dict):
        yield volume["downwardAPI"].get("items") or []
    for source in (volume.get("projected") or {}).get("sources") or ():
        if isinstance(source.get("downwardAPI"), dict):
            yield source["downwardAPI"].get("items") or []


def qos_class(spec: Obj) -> str:
    """Compute status.qosClass from cpu and memory of all but ephemeral containers."""
    guaranteed, some = True, False
    for kind in ("initContainers", "containers"):
        for container in spec.get(kind) or ():
            resources = container.get("resources") or {}
            limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
            for name in ("cpu", "memory"):
                limit = parse_quantity(limits.get(name, 0)).amount
                request = parse_quantity(requests.get(name, 0)).amount
                some = some or limit > 0 or request > 0
                guaranteed = guaranteed and limit > 0 and limit == request
    if not some:
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"


def prepare_pod_create(pod: Obj) -> None:
    """Reset what a client may not set at creation."""
    pod["status"] = {"phase": "Pending", "qosClass": qos_class(pod["spec"])}
    if pod["spec"].get("schedulingGates"):
        pod["status"]["conditions"] = [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "SchedulingGated",
                "message": "Scheduling is blocked due to non-empty scheduling gates",
                "lastProbeTime": None,
                "lastTransitionTime": None,
            }
        ]


# -------------------------------------------------------------------------------- validation


def validate_pod(pod: Obj) -> list[Cause]:
    """Check a whole pod as at creation."""
    spec = pod["spec"]
    found: list[Cause] = []
    volumes = _check_volumes(spec.get("volumes") or [], found)
    if not spec.get("containers"):
        found.append(required("spec.containers"))
    seen: set[str] = set()
    for path, container in containers(spec):
        _check_container(path, container, volumes, found)
        name = container.get("name", "")
        if name and name in seen:
            found.append(duplicate(f"{path}.name", name))
        seen.add(name)
    if spec["restartPolicy"] not in ("Always", "OnFailure", "Never"):
        found.append(
            unsupported(
                "spec.restartPolicy", spec["restartPolicy"], ("Always", "OnFailure", "Never")
            )
        )
    for field in ("nodeName", "serviceAccountName", "runtimeClassName", "priorityClassName"):
        if spec.get(field):
            found += [
                bad_value(f"spec.{field}", spec[field], text)
                for text in subdomain_complaints(spec[field])
            ]
    _check_tolerations(spec.get("tolerations") or [], found)
    _check_gates(spec, found)
    return found


def validate_pod_create(pod: Obj) -> list[Cause]:
    """Check a new pod."""
    found = validate_pod(pod)
    if pod["spec"].get("ephemeralContainers"):
        found.append(forbidden_field("spec.ephemeralContainers", "cannot be set on create"))
    if pod["spec"].get("schedulingGates") and pod["spec"].get("nodeName"):
        found.append(
            forbidden_field(
                "spec.nodeName", "cannot be set until all schedulingGates have been cleared"
            )
        )
    return found


def _check_gates(spec: Obj, found: list[Cause]) -> None:
    seen: set[str] = set()
    for position, gate in enumerate(spec.get("schedulingGates") or ()):
        path = f"spec.schedulingGates[{position}].name"
        name = gate.get("name", "")
        found += [bad_value(path, name, text) for text in qualified_complaints(name)]
        if name in seen:
            found.append(duplicate(path, name))
        seen.add(name)


def _check_tolerations(tolerations: list[Obj], found: list[Cause]) -> None:
    for position, toleration in enumerate(tolerations):
        path = f"spec.tolerations[{position}]"
        operator = toleration.get("operator") or "Equal"
        if operator not in ("Equal", "Exists"):
            found.append(unsupported(f"{path}.operator", operator, ("Equal", "Exists")))
        if not toleration.get("key") and operator != "Exists":
            found.append(
                bad_value(
                    f"{path}.operator",
                    operator,
                    "operator must be Exists when `key` is empty, which means "
                    '"match all values and all keys"',
                )
            )
        effect = toleration.get("effect", "")
        if effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
            found.append(
                unsupported(
                    f"{path}.effect", effect, ("NoSchedule", "PreferNoSchedule", "NoExecute")
                )
            )


def _check_volumes(volumes: list[Obj], found: list[Cause]) -> set[str]:
    names: set[str] = set()
    for position, volume in enumerate(volumes):
        path = f"spec.volumes[{position}]"
        name = volume.get("name", "")
        if not name:
            found.append(required(f"{path}.name"))
        else:
            found += [bad_value(f"{path}.name", name, text) for text in label_complaints(name)]
        if name in names:
            found.append(duplicate(f"{path}.name", name))
        names.add(name)
        sources = sorted(set(volume) - _VOLUME_META)
        found += [
            forbidden_field(f"{path}.{source}", "may not specify more than 1 volume type")
            for source in sources[1:]
        ]
        size = (volume.get("emptyDir") or {}).get("sizeLimit")
        if size is not None and parse_quantity(size).amount < 0:
            found.append(
                forbidden_field(
                    f"{path}.emptyDir.sizeLimit",
                    "SizeLimit field must be a valid resource quantity",
                )
            )
        for items in _downward_items(volume):
            _check_downward_items(f"{path}.downwardAPI", items, found)
    return names


def _check_downward_items(path: str, items: list[Obj], found: list[Cause]) -> None:
    for position, item in enumerate(items):
        target = item.get("path", "")
        if not target:
            found.append(required(f"{path}.path"))
        elif target.startswith("/"):
            found.append(bad_value(f"{path}.path", target, "must be a relative path"))
        elif ".." in target.split("/"):
            found.append(bad_value(f"{path}.path", target, "must not contain '..'"))
        if item.get("fieldRef"):
            _check_field_ref(
                f"{path}[{position}].fieldRef", item["fieldRef"], _DOWNWARD_FIELDS, found
            )
        elif not item.get("resourceFieldRef"):
            found.append(required(f"{path}", "one of fieldRef and resourceFieldRef is required"))


def _check_field_ref(path: str, ref: Obj, allowed: frozenset[str], found: list[Cause]) -> None:
    field = ref.get("fieldPath", "")
    if not field:
        found.append(required(f"{path}.fieldPath"))
    elif match := _SUBSCRIPT.fullmatch(field):
        complaints = qualified_complaints(match[2].lower())
        found += [bad_value(f"{path}.fieldPath", match[2], text) for text in complaints]
    elif field not in allowed:
        found.append(unsupported(f"{path}.fieldPath", field, tuple(sorted(allowed))))


def _check_container(path: str, container: Obj, volumes: set[str], found: list[Cause]) -> None:
    name = container.get("name", "")
    if not name:
        found.append(required(f"{path}.name"))
    else:
        found += [bad_value(f"{path}.name", name, text) for text in label_complaints(name)]
    if not container.get("image"):
        found.append(required(f"{path}.image"))
    if path.startswith("spec.initContainers") and container.get("restartPolicy") not in (
        None,
        "Always",
    ):
        found.append(unsupported(f"{path}.restartPolicy", container["restartPolicy"], ("Always",)))
    for position, env in enumerate(container.get("env") or ()):
        if not env.get("name"):
            found.append(required(f"{path}.env[{position}].name"))
        source = env.get("valueFrom") or {}
        if source.get("fieldRef"):
            _check_field_ref(
                f"{path}.env[{position}].valueFrom.fieldRef", source["fieldRef"], _ENV_FIELDS, found
            )
        if source and env.get("value"):
            found.append(
                bad_value(
                    f"{path}.env[{position}].valueFrom",
                    "",
                    "may not be specified when `value` is not empty",
                )
            )
    _check_mounts(path, container, volumes, found)
    _check_resources(f"{path}.resources", container.get("resources") or {}, found)


def _check_mounts(path: str, container: Obj, volumes: set[str], found: list[Cause]) -> None:
    paths: set[str] = set()
    for position, mount in enumerate(container.get("volumeMounts") or ()):
        field = f"{path}.volumeMounts[{position}]"
        if not mount.get("name"):
            found.append(required(f"{field}.name"))
        elif mount["name"] not in volumes:
            found.append(unknown_reference(f"{field}.name", mount["name"]))
        if not mount.get("mountPath"):
            found.append(required(f"{field}.mountPath"))
        elif mount["mountPath"] in paths:
            found.append(bad_value(f"{field}.mountPath", mount["mountPath"], "must be unique"))
        paths.add(mount.get("mountPath", ""))


def _check_resources(path: str, resources: Obj, found: list[Cause]) -> None:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for kind, amounts in (("limits", limits), ("requests", requests)):
        for name, text in amounts.items():
            _check_amount(f"{path}.{kind}[{name}]", name, text, found)
    for name, text in requests.items():
        limit_text = limits.get(name)
        overcommit = name in _STANDARD_RESOURCES
        if limit_text is None:
            if not overcommit:
                found.append(
                    required(f"{path}.limits", "Limit must be set for non overcommitable resources")
                )
            continue
        request, limit = parse_quantity(text).amount, parse_quantity(limit_text).amount
        if request != limit and not overcommit:
            found.append(
                bad_value(
                    f"{path}.requests", text, f"must be equal to {name} limit of {limit_text}"
                )
            )
        elif request > limit:
            found.append(
                bad_value(
                    f"{path}.requests",
                    text,
                    f"must be less than or equal to {name} limit of {limit_text}",
                )
            )


def _check_amount(path: str, name: str, text: str, found: list[Cause]) -> None:
    complaints = qualified_complaints(name)
    found += [bad_value(path, name, complaint) for complaint in complaints]
    standard = name in _STANDARD_RESOURCES or name.startswith("hugepages-")
    if not complaints and "/" not in name and not standard:
        found.append(bad_value(path, name, "must be a standard resource type or fully qualified"))
        found.append(bad_value(path, name, "must be a standard resource for containers"))
    amount = parse_quantity(text)
    if amount.amount < 0:
        found.append(bad_value(path, text, "must be greater than or equal to 0"))
    if is_extended_resource(name) and not amount.is_integer:
        found.append(bad_value(path, text, "must be an integer"))


# ------------------------------------------------------------------------------------ updates


def prepare_pod_update(pod: Obj, old: Obj) -> None:
    """Keep what an ordinary update may not touch."""
    pod["status"] = clone(old.get("status", {}))


def prepare_pod_status(pod: Obj, old: Obj) -> None:
    """Keep everything a status update may not touch; labels and annotations may change."""
    pod["spec"] = clone(old["spec"])
    for field in ("deletionTimestamp", "deletionGracePeriodSeconds", "ownerReferences"):
        if field in old["metadata"]:
            pod["metadata"][field] = old["metadata"][field]
        else:
            pod["metadata"].pop(field, None)
    status = pod.setdefault("status", {})
    if "qosClass" in old.get("status", {}):
        status.setdefault("qosClass", old["status"]["qosClass"])


def validate_pod_status(pod: Obj, old: Obj) -> list[Cause]:
    """Check a status update."""
    found = []
    before = old.get("status", {}).get("qosClass")
    if before and pod["status"].get("qosClass") != before:
        found.append(
            bad_value("status.qosClass", pod["status"].get("qosClass"), "field is immutable")
        )
    for position, condition in enumerate(pod["status"].get("conditions") or ()):
        if not condition.get("type"):
            found.append(required(f"status.conditions[{position}].type"))
    return found


def validate_pod_update(pod: Obj, old: Obj) -> list[Cause]:
    """Check an ordinary update against the few fields that may change."""
    new_spec, old_spec = clone(pod["spec"]), old["spec"]
    found: list[Cause] = []
    for kind in ("containers", "initContainers"):
        news, olds = new_spec.get(kind) or [], old_spec.get(kind) or []
        if len(news) != len(olds):
            found.append(
                forbidden_field("spec", f"pod updates may not add or remove {kind}")
                if kind == "containers"
                else forbidden_field("spec.initContainers", "may not add or remove containers")
            )
            return found
        for position, (new, before) in enumerate(zip(news, olds, strict=True)):
            if not new.get("image"):
                found.append(required(f"spec.{kind}[{position}].image"))
            new["image"] = before.get("image")
    _allow(new_spec, old_spec, "activeDeadlineSeconds", _deadline_complaint, found)
    _allow(new_spec, old_spec, "tolerations", _toleration_complaint, found)
    gated = bool(old_spec.get("schedulingGates"))
    _allow(new_spec, old_spec, "schedulingGates", _gate_complaint, found)
    if gated:
        for field in ("nodeSelector", "affinity"):
            _allow(new_spec, old_spec, field, _narrowing_complaint, found)
    if (old_spec.get("terminationGracePeriodSeconds") or 0) < 0 and new_spec.get(
        "terminationGracePeriodSeconds"
    ) == 1:
        new_spec["terminationGracePeriodSeconds"] = old_spec["terminationGracePeriodSeconds"]
    if _comparable(new_spec) != _comparable(old_spec):
        found.append(forbidden_field("spec", _UPDATE_TEXT))
    return found


def _comparable(spec: Obj) -> Obj:
    return {key: value for key, value in spec.items() if value not in (None, [], {}, "")}


def _allow(
    new: Obj,
    old: Obj,
    field: str,
    complaint: Callable[[object, object], Cause | None],
    found: list[Cause],
) -> None:
    """Accept a change of one field if its rule does, and hide it from the comparison."""
    if new.get(field) == old.get(field):
        return
    problem = complaint(new.get(field), old.get(field))
    if problem:
        found.append(problem)
    if field in old:
        new[field] = old[field]
    else:
        new.pop(field, None)


def _deadline_complaint(new: object, old: object) -> Cause | None:
    path = "spec.activeDeadlineSeconds"
    if not isinstance(new, int):
        return bad_value(path, new, "must not update from a positive integer to nil value")
    if new <= 0:
        return bad_value(path, new, "must be greater than 0")
    if isinstance(old, int) and new > old:
        return bad_value(path, new, "must be less than or equal to previous value")
    return None


def _toleration_complaint(new: object, old: object) -> Cause | None:
    def identity(toleration: Obj) -> tuple[str, ...]:
        return tuple(str(toleration.get(f, "")) for f in ("key", "operator", "value", "effect"))

    news = {identity(t) for t in new} if isinstance(new, list) else set()
    olds = {identity(t) for t in old} if isinstance(old, list) else set()
    if olds <= news:
        return None
    return forbidden_field(
        "spec.tolerations",
        "existing toleration can not be modified except its tolerationSeconds",
    )


def _gate_complaint(new: object, old: object) -> Cause | None:
    olds = {gate["name"] for gate in old} if isinstance(old, list) else set()
    for gate in new if isinstance(new, list) else ():
        if gate["name"] not in olds:
            return forbidden_field(
                "spec.schedulingGates",
                f"only deletion is allowed, but found new scheduling gate '{gate['name']}'",
            )
    return None


def _narrowing_complaint(new: object, old: object) -> Cause | None:
    if not old or (isinstance(new, dict) and isinstance(old, dict) and old.items() <= new.items()):
        return None
    return bad_value(
        "spec.nodeSelector", new, "only additions are allowed (no mutations/deletions)"
    )


def apply_ephemeral(pod: Obj, old: Obj) -> list[Cause]:
    """Take only ephemeralContainers from `pod`; existing ones may not change or vanish."""
    wanted = pod["spec"].get("ephemeralContainers") or []
    kept = {
        container["name"]: container for container in old["spec"].get("ephemeralContainers") or ()
    }
    found: list[Cause] = []
    names = {container.get("name") for container in wanted}
    found += [
        forbidden_field(
            "spec.ephemeralContainers", f'existing ephemeral containers "{name}" may not be removed'
        )
        for name in kept
        if name not in names
    ]
    for container in wanted:
        before = kept.get(container.get("name"))
        if before is not None and before != container:
            found.append(
                forbidden_field(
                    "spec.ephemeralContainers",
                    f'existing ephemeral containers "{container["name"]}" may not be changed',
                )
            )
    for position, container in enumerate(wanted):
        if (container.get("resources") or {}).get("limits"):
            found.append(
                forbidden_field(
                    f"spec.ephemeralContainers[{position}].resources",
                    "cannot be set for an Ephemeral Container",
                )
            )
    metadata, spec = pod["metadata"], clone(old["spec"])
    spec["ephemeralContainers"] = wanted
    pod.clear()
    pod.update(clone(old))
    pod["metadata"]["resourceVersion"] = metadata.get("resourceVersion", "")
    pod["spec"] = spec
    return found


def apply_resize(pod: Obj, old: Obj) -> list[Cause]:
    """Take only containers' resources from `pod`; only cpu and memory may differ."""
    found: list[Cause] = []
    merged = clone(old)
    olds = {container["name"]: container for container in merged["spec"]["containers"]}
    for position, container in enumerate(pod["spec"].get("containers") or ()):
        target = olds.get(container.get("name"))
        if target is None:
            found.append(forbidden_field("spec", "resize may not add or remove containers"))
            continue
        for kind in ("limits", "requests"):
            new = (container.get("resources") or {}).get(kind) or {}
            before = target["resources"].get(kind) or {}
            changed = {k for k in {*new, *before} if new.get(k) != before.get(k)}
            if changed - {"cpu", "memory"}:
                found.append(
                    forbidden_field(
                        f"spec.containers[{position}].resources.{kind}",
                        "only cpu and memory resources are mutable",
                    )
                )
        target["resources"] = container.get("resources") or {}
    if qos_class(merged["spec"]) != qos_class(old["spec"]):
        found.append(
            bad_value(
                "metadata",
                merged["metadata"]["name"],
                "Pod QOS Class may not change as a result of resizing",
            )
        )
    revision = pod["metadata"].get("resourceVersion", "")
    pod.clear()
    pod.update(merged)
    pod["metadata"]["resourceVersion"] = revision
    return found


def set_condition(status: Obj, type_: str, value: str, now: str, **more: str) -> None:
    """Set one condition; the transition time moves only when the value changes."""
    conditions = list(status.get("conditions") or ())
    fresh: Obj = {"type": type_, "status": value, "lastProbeTime": None, "lastTransitionTime": now}
    fresh.update(more)
    for position, condition in enumerate(conditions):
        if condition.get("type") == type_:
            if condition.get("status") == value:
                fresh["lastTransitionTime"] = condition.get("lastTransitionTime", now)
            conditions[position] = fresh
            break
    else:
        conditions.append(fresh)
    status["conditions"] = conditions
