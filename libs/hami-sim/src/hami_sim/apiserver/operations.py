# SPDX-License-Identifier: Apache-2.0
"""The verbs on objects: create, update, patch, delete, with admission and preconditions.

One write runs: decode → defaults → built-in admission → mutating webhooks → resets and validation →
validating webhooks → commit. Between the last check and the commit nothing is awaited, and the
object must still be the one that was read; otherwise the whole write starts over (or is refused
with 409 when the client named a resourceVersion). A write that changes nothing makes no revision.

Bodies come in as JSON with kind and apiVersion; stored objects are without them. Times are RFC 3339
in UTC, whole seconds.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from hami_sim.apiserver import errors, pod_admission, pods, quota
from hami_sim.apiserver.admission import Attributes, Webhooks
from hami_sim.apiserver.calls import Call, DeleteOptions, parse_rfc3339, rfc3339
from hami_sim.apiserver.errors import Cause, Obj, clone
from hami_sim.apiserver.kinds import rules_for
from hami_sim.apiserver.names import check_metadata, check_string_maps
from hami_sim.apiserver.resources import Resource, ResourceTable, Subresource
from hami_sim.apiserver.settings import Settings
from hami_sim.apiserver.store import Filter, Store, Stored

Produce: TypeAlias = Callable[[Obj], Obj]
"""Current object in full → wanted object in full."""

_ATTEMPTS: Final = 6
_NAME_ATTEMPTS: Final = 8
_NAME_ALPHABET: Final = "bcdfghjklmnpqrstvwxz2456789"
_NAME_BASE_MAX: Final = 58
_EPHEMERAL: Final = "ephemeralcontainers"


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Drop nulls in objects, as the typed decoder does; list elements stay."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def renamed(obj: Obj, renames: Mapping[str, str]) -> Obj:
    """Copy an object with top-level fields renamed."""
    return {renames.get(key, key): value for key, value in obj.items()}


class Operations:
    """All writing verbs over one store."""

    def __init__(
        self, store: Store, table: ResourceTable, settings: Settings, webhooks: Webhooks
    ) -> None:
        self.store = store
        self.table = table
        self.settings = settings
        self.webhooks = webhooks
        self._random = random.Random()

    def now(self) -> str:
        """Return the present as object text."""
        return rfc3339(self.settings.clock())

    # -- bodies

    def decode(self, call: Call, body: object, sub: Subresource | None = None) -> Obj:
        """Check kind and apiVersion of a body and bring it into stored form."""
        kind = sub.kind if sub else call.resource.kind
        api_version = call.resource.api_version
        if sub:
            api_version = f"{sub.group}/{sub.version}" if sub.group else sub.version
        if not isinstance(body, dict):
            raise errors.bad_request(
                "couldn't get version/kind; json parse error: not an object "
                f"({type(body).__name__})"
            )
        if body.get("apiVersion", api_version) != api_version:
            found = body["apiVersion"]
            if not (sub and sub.name == "eviction" and found == "policy/v1beta1"):
                raise errors.bad_request(
                    f"the API version in the data ({found}) does not match the expected API "
                    f"version ({api_version})"
                )
        if body.get("kind", kind) != kind:
            raise errors.bad_request(
                f'{body["kind"]} in version "{api_version.split("/")[-1]}" cannot be handled as a '
                f"{kind}: converting ({body['kind']}) to ({kind}): unknown conversion"
            )
        obj: Obj = without_nulls({k: v for k, v in body.items() if k not in ("kind", "apiVersion")})
        if call.resource.renames and sub is None:
            obj = renamed(obj, {view: stored for stored, view in call.resource.renames.items()})
        metadata = obj.setdefault("metadata", {})
        if not isinstance(metadata, dict):
            msg = f'{kind} in version "v1" cannot be handled as a {kind}: metadata is not an object'
            raise errors.bad_request(msg)
        metadata.pop("selfLink", None)
        for field in ("labels", "annotations", "ownerReferences", "finalizers"):
            if field in metadata and not metadata[field]:
                del metadata[field]
        check_string_maps(kind, call.resource.version, metadata)
        self._check_namespace(call, metadata)
        return obj

    @staticmethod
    def _check_namespace(call: Call, metadata: Obj) -> None:
        if not call.resource.namespaced:
            metadata.pop("namespace", None)
            return
        if metadata.setdefault("namespace", call.namespace) != call.namespace:
            raise errors.bad_request(
                "the namespace of the provided object does not match the namespace sent on the "
                "request"
            )

    def full(self, resource: Resource, obj: Obj) -> Obj:
        """Put kind and apiVersion in front of a stored object, as this row shows it."""
        shown = renamed(obj, resource.renames) if resource.renames else obj
        return {"kind": resource.kind, "apiVersion": resource.api_version, **shown}

    # -- reading

    def get(self, call: Call) -> Stored:
        """Read one object or refuse."""
        stored = self.store.get(call.key, call.namespace, call.name)
        if stored is None:
            raise errors.not_found(call.resource.plural, call.name, group=call.resource.group)
        return stored

    # -- create

    async def create(self, call: Call, body: object) -> Stored:
        """Create an object under its name, or under a generated one."""
        obj = self.decode(call, body)
        metadata = obj["metadata"]
        if metadata.get("resourceVersion"):
            # kube-apiserver has no reason of its own for this one, hence the code.
            why = "resourceVersion should not be set on objects to be created"
            raise errors.ApiError(500, why, reason="")
        if call.name and metadata.setdefault("name", call.name) != call.name:
            raise self._name_mismatch(metadata["name"], call.name)
        self._check_namespace_open(call, metadata.get("name", ""))
        rules = rules_for(call.key)
        rules.default(obj)
        if call.key == "pods":
            pod_admission.admit(self.store, self.settings, call, obj)
        attributes = self._attributes(call, "CREATE", obj=obj, name=metadata.get("name", ""))
        obj = await self._mutate(call, attributes)
        metadata = obj["metadata"]
        metadata.pop("deletionTimestamp", None)
        metadata.pop("deletionGracePeriodSeconds", None)
        generated = "" if metadata.get("name") else metadata.get("generateName", "")
        if generated:
            metadata["name"] = self._generate(generated)
        self._stamp(call.resource, metadata)
        rules.default(obj)
        rules.prepare_create(obj)
        causes = check_metadata(
            metadata, as_label=rules.name_is_label, checks_name=rules.checks_name
        )
        self._refuse_invalid(call, metadata.get("name", ""), causes + rules.check_create(obj))
        attributes.obj = self.full(call.resource, obj)
        attributes.name = metadata["name"]
        await self.webhooks.validate(attributes)
        name = self._free_name(call, metadata, generated)
        used = quota.charge(self.store, call.key, obj, dry_run=call.dry_run)
        if call.dry_run:
            return Stored(obj, 0)
        stored = self.store.put(call.key, obj)
        for update in used:
            self.store.put("resourcequotas", update)
        if call.key == "namespaces":
            self._furnish(name)
        return stored

    def _stamp(self, resource: Resource, metadata: Obj) -> None:
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = self.now()
        metadata.pop("generation", None)
        if resource.tracks_generation:
            metadata["generation"] = 1

    def _free_name(self, call: Call, metadata: Obj, prefix: str) -> str:
        """Return the object's name, generating another while a generated one is taken."""
        name = str(metadata["name"])
        for _ in range(_NAME_ATTEMPTS if prefix else 1):
            if self.store.get(call.key, call.namespace, name) is None:
                return name
            if prefix:
                name = metadata["name"] = self._generate(prefix)
        raise errors.already_exists(call.resource.plural, name, group=call.resource.group)

    def _generate(self, prefix: str) -> str:
        tail = "".join(self._random.choice(_NAME_ALPHABET) for _ in range(5))
        return prefix[:_NAME_BASE_MAX] + tail

    def _check_namespace_open(self, call: Call, name: str) -> None:
        if not call.resource.namespaced:
            return
        namespace = self.store.get("namespaces", "", call.namespace)
        if namespace is None:
            raise errors.not_found("namespaces", call.namespace)
        if namespace.obj["metadata"].get("deletionTimestamp"):
            why = (
                f"unable to create new content in namespace {call.namespace} because it is being "
                "terminated"
            )
            raise errors.forbidden(
                call.resource.plural,
                name,
                why,
                group=call.resource.group,
                causes=[
                    Cause(
                        reason="NamespaceTerminating",
                        message=f"namespace {call.namespace} is being terminated",
                        field="metadata.namespace",
                    )
                ],
            )

    def _furnish(self, namespace: str) -> None:
        """Put into a new namespace what the controllers of a real cluster put there."""
        if not self.settings.controllers:
            return
        for key, obj in (
            ("serviceaccounts", {"metadata": {"name": "default"}}),
            ("configmaps", {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": ""}}),
        ):
            self.seed(key, obj, namespace=namespace)

    def seed(self, key: str, obj: Obj, *, namespace: str = "") -> None:
        """Store an object of the server's own, unless it is there already."""
        obj = clone(obj)
        metadata = obj["metadata"]
        if namespace:
            metadata["namespace"] = namespace
        if self.store.get(key, namespace, metadata["name"]) is not None:
            return
        rules = rules_for(key)
        rules.default(obj)
        rules.prepare_create(obj)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = self.now()
        self.store.put(key, obj)
        if key == "namespaces":
            self._furnish(metadata["name"])

    # -- update

    async def replace(self, call: Call, body: object) -> tuple[Stored, bool]:
        """Serve PUT; the second value is true if the object was created."""
        wanted = self.decode(call, body)
        if wanted["metadata"].setdefault("name", call.name) != call.name:
            raise self._name_mismatch(wanted["metadata"]["name"], call.name)
        if self.store.get(call.key, call.namespace, call.name) is None:
            if call.resource.creates_on_update and not call.subresource:
                if wanted["metadata"].get("resourceVersion"):
                    raise errors.modified(
                        call.resource.plural, call.name, group=call.resource.group
                    )
                return await self.create(call, self.full(call.resource, wanted)), True
            self.get(call)
        if not wanted["metadata"].get("resourceVersion") and not call.resource.unconditional_update:
            self._refuse_invalid(
                call,
                call.name,
                [
                    errors.bad_value(
                        "metadata.resourceVersion", 0, "must be specified for an update"
                    )
                ],
            )
        shown = self.full(call.resource, wanted)
        return await self.update(call, lambda _current: clone(shown), replaces=True), False

    @staticmethod
    def _name_mismatch(found: str, wanted: str) -> errors.ApiError:
        return errors.bad_request(
            f"the name of the object ({found}) does not match the name on the URL ({wanted})"
        )

    async def update(self, call: Call, produce: Produce, *, replaces: bool = False) -> Stored:
        """Change an object by a function of its current state, retrying lost races.

        With ``replaces`` the function gives a whole object of the client's: its UID is then a
        precondition, while a patch that names another UID tries to change what never changes.
        """
        for _ in range(_ATTEMPTS):
            current = self.get(call)
            stored = await self._update_once(call, current, produce, replaces=replaces)
            if stored is not None:
                return stored
        raise errors.modified(call.resource.plural, call.name, group=call.resource.group)

    async def _update_once(
        self, call: Call, current: Stored, produce: Produce, *, replaces: bool
    ) -> Stored | None:
        """Try one update; None means that the object moved meanwhile."""
        rules = rules_for(call.key)
        old = current.obj
        obj = self.decode(call, produce(clone(self.full(call.resource, old))))
        self._check_preconditions(call, obj["metadata"], current, replaces=replaces)
        rules.default(obj)
        attributes = self._attributes(call, "UPDATE", obj=obj, old=old, name=call.name)
        obj = await self._mutate(call, attributes)
        metadata = obj["metadata"]
        _keep_system_fields(metadata, old["metadata"])
        rules.default(obj)
        causes: list[Cause] = []
        if call.subresource == "status":
            rules.prepare_status(obj, old)
            causes += rules.check_status(obj, old)
        elif call.subresource == _EPHEMERAL:
            causes += pods.apply_ephemeral(obj, old)
            causes += pods.validate_pod(obj)
        elif call.subresource == "resize":
            causes += pods.apply_resize(obj, old)
        elif call.subresource == "finalize":
            finalizers = (obj.get("spec") or {}).get("finalizers") or []
            obj = clone(old)
            obj["spec"] = {"finalizers": finalizers} if finalizers else {}
        else:
            rules.prepare_update(obj, old)
            causes += rules.check_update(obj, old)
        metadata = obj["metadata"]
        metadata.pop("resourceVersion", None)
        causes = (
            check_metadata(metadata, as_label=rules.name_is_label, checks_name=rules.checks_name)
            + _finalizer_complaints(metadata, old["metadata"])
            + causes
        )
        self._refuse_invalid(call, call.name, causes)
        if call.resource.tracks_generation and _spec_differs(obj, old):
            metadata["generation"] = old["metadata"].get("generation", 0) + 1
        attributes.obj = self.full(call.resource, obj)
        await self.webhooks.validate(attributes)
        if self.store.get(call.key, call.namespace, call.name) is not current:
            return None
        return self._commit_update(call, obj, current)

    def _commit_update(self, call: Call, obj: Obj, current: Stored) -> Stored:
        metadata = obj["metadata"]
        unchanged = {**metadata, "resourceVersion": current.obj["metadata"]["resourceVersion"]}
        if {**obj, "metadata": unchanged} == current.obj:
            return current
        if call.dry_run:
            return Stored({**obj, "metadata": unchanged}, current.revision)
        stored = self.store.put(call.key, obj)
        if metadata.get("deletionTimestamp") and _may_vanish(call.key, stored.obj):
            return self.store.remove(call.key, call.namespace, call.name)
        return stored

    def _check_preconditions(
        self, call: Call, metadata: Obj, current: Stored, *, replaces: bool
    ) -> None:
        resource = call.resource
        wanted = metadata.get("resourceVersion")
        if wanted and wanted != current.obj["metadata"]["resourceVersion"]:
            raise errors.modified(resource.plural, call.name, group=resource.group)
        if metadata.get("name", call.name) != call.name:
            raise self._name_mismatch(metadata["name"], call.name)
        uid, held = metadata.get("uid"), current.obj["metadata"]["uid"]
        if uid and uid != held:
            if not replaces:
                cause = errors.bad_value("metadata.uid", uid, "field is immutable")
                self._refuse_invalid(call, call.name, [cause])
            raise errors.conflict(
                resource.plural,
                call.name,
                f"Precondition failed: UID in precondition: {uid}, UID in object meta: {held}",
                group=resource.group,
            )

    # -- delete

    async def delete(self, call: Call, options: DeleteOptions) -> tuple[Stored, bool]:
        """Delete or begin to; the second value is true if the object is removed."""
        for _ in range(_ATTEMPTS):
            current = self.get(call)
            self._check_delete(call, options, current)
            attributes = self._attributes(
                call, "DELETE", old=current.obj, name=call.name, options=options.to_json()
            )
            await self.webhooks.mutate(attributes)
            await self.webhooks.validate(attributes)
            call.warnings.extend(attributes.warnings)
            if self.store.get(call.key, call.namespace, call.name) is not current:
                continue
            if call.dry_run:
                return current, True
            return self._begin_delete(call, options, current)
        raise errors.modified(call.resource.plural, call.name, group=call.resource.group)

    def _check_delete(self, call: Call, options: DeleteOptions, current: Stored) -> None:
        metadata = current.obj["metadata"]
        for what, wanted, held, happened in (
            ("UID", options.uid, metadata["uid"], "deleted and then recreated"),
            (
                "ResourceVersion",
                options.resource_version,
                metadata["resourceVersion"],
                "modified",
            ),
        ):
            if wanted is not None and wanted != held:
                why = (
                    f"the {what} in the precondition ({wanted}) does not match the {what} in "
                    f"record ({held}). The object might have been {happened}"
                )
                # Named by kind, not by resource: so says kube-apiserver.
                raise errors.conflict(call.resource.kind, call.name, why, group=call.resource.group)
        if call.key == "namespaces" and call.name in ("default", "kube-system", "kube-public"):
            raise errors.forbidden("namespaces", call.name, "this namespace may not be deleted")

    def _begin_delete(
        self, call: Call, options: DeleteOptions, current: Stored
    ) -> tuple[Stored, bool]:
        obj = clone(current.obj)
        metadata = obj["metadata"]
        _set_propagation(metadata, options.propagation)
        grace_s = _grace(call.key, obj, options)
        before = metadata.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" not in metadata:
            self._mark_deleted(metadata, grace_s)
            if call.key == "namespaces":
                obj["status"] = {**obj.get("status", {}), "phase": "Terminating"}
        elif before is not None and grace_s < before:
            end = parse_rfc3339(metadata["deletionTimestamp"]) - before + grace_s
            metadata["deletionTimestamp"] = rfc3339(end)
            metadata["deletionGracePeriodSeconds"] = grace_s
        if _may_vanish(call.key, obj):
            return self.store.remove(call.key, call.namespace, call.name), True
        if obj == current.obj:
            return current, False
        if call.resource.tracks_generation:
            metadata["generation"] = metadata.get("generation", 0) + 1
        return self.store.put(call.key, obj), False

    def _mark_deleted(self, metadata: Obj, grace_s: int) -> None:
        metadata["deletionTimestamp"] = rfc3339(self.settings.clock() + grace_s)
        metadata["deletionGracePeriodSeconds"] = grace_s

    async def delete_collection(
        self, call: Call, wanted: Filter, options: DeleteOptions
    ) -> list[Stored]:
        """Delete everything selected; objects that vanish meanwhile are skipped."""
        table = self.store.tables[call.key]
        names = [name for name in table.names() if wanted.matches(table.rows[name].obj)]
        gone: list[Stored] = []
        for namespace, name in names:
            one = Call(
                resource=call.resource,
                namespace=namespace,
                name=name,
                user=call.user,
                dry_run=call.dry_run,
                warnings=call.warnings,
            )
            try:
                gone.append((await self.delete(one, options))[0])
            except errors.ApiError as error:
                if error.reason != "NotFound":
                    raise
        return gone

    # -- admission

    def _attributes(
        self,
        call: Call,
        operation: str,
        *,
        obj: Obj | None = None,
        old: Obj | None = None,
        name: str,
        options: Obj | None = None,
    ) -> Attributes:
        resource = call.resource
        kinds = {"CREATE": "CreateOptions", "UPDATE": "UpdateOptions", "DELETE": "DeleteOptions"}
        return Attributes(
            resource=resource,
            subresource=call.subresource,
            kind=resource.kind,
            kind_group=resource.group,
            kind_version=resource.version,
            operation=operation,
            namespace=name if resource.key == "namespaces" else call.namespace,
            name=name,
            obj=None if obj is None else self.full(resource, obj),
            old=None if old is None else self.full(resource, old),
            user=call.user,
            dry_run=call.dry_run,
            options=options or {"kind": kinds[operation], "apiVersion": "meta.k8s.io/v1"},
        )

    async def _mutate(self, call: Call, attributes: Attributes) -> Obj:
        attributes.warnings = call.warnings
        await self.webhooks.mutate(attributes)
        if attributes.obj is None:
            raise errors.internal("admission left no object")
        return self.decode(call, attributes.obj)

    def _refuse_invalid(self, call: Call, name: str, causes: list[Cause]) -> None:
        if causes:
            raise errors.invalid(call.resource.kind, name, causes, group=call.resource.group)


def _keep_system_fields(metadata: Obj, old: Obj) -> None:
    for field in (
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "generateName",
    ):
        if field in old:
            metadata[field] = old[field]
        else:
            metadata.pop(field, None)


def _finalizer_complaints(metadata: Obj, old: Obj) -> list[Cause]:
    if "deletionTimestamp" not in old:
        return []
    fresh = sorted(set(metadata.get("finalizers") or ()) - set(old.get("finalizers") or ()))
    if not fresh:
        return []
    shown = ", ".join(f'"{name}"' for name in fresh)
    return [
        errors.forbidden_field(
            "metadata.finalizers",
            "no new finalizers can be added if the object is being deleted, found new finalizers "
            f"[]string{{{shown}}}",
        )
    ]


def _spec_differs(obj: Obj, old: Obj) -> bool:
    skipped = ("metadata", "status")
    return {k: v for k, v in obj.items() if k not in skipped} != {
        k: v for k, v in old.items() if k not in skipped
    }


def _set_propagation(metadata: Obj, propagation: str | None) -> None:
    if propagation is None:
        return
    if propagation not in ("Background", "Foreground", "Orphan"):
        raise errors.bad_request(f'invalid propagationPolicy "{propagation}"')
    kept = [
        name
        for name in metadata.get("finalizers") or ()
        if name not in ("foregroundDeletion", "orphan")
    ]
    if propagation == "Foreground":
        kept.append("foregroundDeletion")
    elif propagation == "Orphan":
        kept.append("orphan")
    if kept:
        metadata["finalizers"] = kept
    else:
        metadata.pop("finalizers", None)


def _grace(key: str, obj: Obj, options: DeleteOptions) -> int:
    if key != "pods":
        return 0
    spec = obj["spec"]
    grace_s = options.grace_s
    if grace_s is None:
        grace_s = spec.get("terminationGracePeriodSeconds", 30)
    if not spec.get("nodeName") or obj.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    return 1 if grace_s < 0 else int(grace_s)


def _may_vanish(key: str, obj: Obj) -> bool:
    """Say whether an object marked for deletion has nothing left to wait for."""
    metadata = obj["metadata"]
    if metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds", 0) > 0:
        return False
    return not (key == "namespaces" and obj.get("spec", {}).get("finalizers"))
