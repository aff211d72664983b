# SPDX-License-Identifier: Apache-2.0
"""Tracks the resource claims of a node's pods, as kubelet's DRA manager does.

Rules: ``pkg/kubelet/cm/dra`` of kubelet 1.37, including the surprising ones:

- a pod's claims are checked first (reserved for the pod, allocated, every driver registered); only
  then are they recorded, and each driver gets one call with all claims that are not prepared yet;
- no lock is held during a call: two pods that start at once on one claim may both prepare it;
- "prepared" is not in the checkpoint, the devices are: after a restart, a pod that needs a sandbox
  has its claims prepared again, while a container that restarts gets the ids of the checkpoint;
- a claim is unprepared when its last pod on the node ends; until then no other pod can join it;
- PodResources lists all devices of a claim, whatever the container requests, and each device of a
  driver with the CDI ids of those before it.

Health is what the driver reported last, or unknown after its timeout. Times are monotonic seconds,
given by the caller's clock. Errors carry kubelet's words, because they end in events.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from hami_common.kubeletapi import dra, drahealth, podresources
from hami_sim.kubelet.objects import Obj, app_containers, key_of, uid_of

CHECKPOINT: Final = "dra_manager_state"
HEALTH_TIMEOUT_S: Final = 30.0
_MESSAGE_MAX: Final = 1024
_HEALTH: Final = {drahealth.HEALTHY: "Healthy", drahealth.UNHEALTHY: "Unhealthy"}
_UNKNOWN: Final = "Unknown"

Key = tuple[str, str]
"""Namespace and name of a claim."""


class ClaimError(Exception):
    """Failure to prepare or unprepare claims, or to find a prepared one; the text is kubelet's."""


class Driver(Protocol):
    """A driver's calls, as the manager makes them; failures arrive as ClaimError."""

    async def prepare(
        self, claims: Sequence[dra.Claim]
    ) -> Mapping[str, dra.NodePrepareResourceResponse]:
        """Call NodePrepareResources; return the answers by the claims' UIDs."""
        ...

    async def unprepare(
        self, claims: Sequence[dra.Claim]
    ) -> Mapping[str, dra.NodeUnprepareResourceResponse]:
        """Call NodeUnprepareResources; return the answers by the claims' UIDs."""
        ...


class _Device(Struct, frozen=True, kw_only=True, rename="pascal"):
    pool_name: str
    device_name: str
    share_id: str | None = msgspec.field(name="ShareID", default=None)
    request_names: tuple[str, ...] | None = ()
    cdi_ids: tuple[str, ...] | None = msgspec.field(name="CDIDeviceIDs", default=())

    def serves(self, request: str) -> bool:
        """Return true if the device belongs to a request; an empty one stands for all."""
        return not request or not self.request_names or request in self.request_names


class _DriverState(Struct, kw_only=True, rename="pascal"):
    devices: tuple[_Device, ...] | None = ()


class _Claim(Struct, kw_only=True, rename="pascal"):
    claim_uid: str = msgspec.field(name="ClaimUID")
    claim_name: str
    namespace: str
    pod_uids: dict[str, Mapping[str, str]] = msgspec.field(name="PodUIDs")
    driver_state: dict[str, _DriverState]

    def devices(self) -> Iterable[tuple[str, _Device]]:
        """List the prepared devices with their drivers."""
        for driver, state in self.driver_state.items():
            for device in state.devices or ():
                yield driver, device

    def request(self) -> dra.Claim:
        """Word the claim for a driver."""
        return dra.Claim(namespace=self.namespace, uid=self.claim_uid, name=self.claim_name)


class _Data(Struct, kw_only=True):
    kind: str = "DRACheckpoint"
    api_version: str = msgspec.field(name="apiVersion", default="checkpoint.dra.kubelet.k8s.io/v1")
    claims: list[_Claim] = msgspec.field(name="ClaimInfoStateList")


class _Checkpoint(Struct, kw_only=True, rename="pascal"):
    data: str
    checksum: int


class _Health(Struct, frozen=True, kw_only=True):
    status: str
    message: str
    timeout_s: float
    reported_s: float

    def is_like(self, other: _Health | None) -> bool:
        """Return true if nothing but the time of the report differs."""
        return other is not None and (self.status, self.message, self.timeout_s) == (
            other.status,
            other.message,
            other.timeout_s,
        )


class ClaimManager:
    """The node's claims."""

    def __init__(
        self,
        directory: Path,
        *,
        fetch: Callable[[str, str], Awaitable[Obj]],
        find_driver: Callable[[str], Driver],
        now_s: Callable[[], float],
    ) -> None:
        """``fetch``: read a claim by namespace and name; ``find_driver``: its connected plugin.

        Both raise ClaimError. The checkpoint lies in ``directory``.
        """
        self._checkpoint = directory / CHECKPOINT
        self._fetch = fetch
        self._find_driver = find_driver
        self._now_s = now_s
        self._claims: dict[Key, _Claim] = {}
        self._prepared: set[Key] = set()
        self._unpreparing: set[Key] = set()
        self._health: dict[str, dict[tuple[str, str], _Health]] = {}

    # -- before a pod's sandbox is made

    async def prepare(self, pod: Obj) -> None:
        """Prepare the pod's claims; ClaimError: the pod cannot start yet."""
        try:
            await self._prepare(pod)
        except ClaimError as error:
            raise ClaimError(f"prepare dynamic resources: {error}") from error

    async def _prepare(self, pod: Obj) -> None:
        checked = [
            await self._checked(pod, name, is_generated=is_generated)
            for name, is_generated in _claim_names(pod).values()
        ]
        calls: dict[str, list[_Claim]] = {}
        fresh: list[_Claim] = []
        for claim in checked:
            known = self._join(claim, uid_of(pod))
            if (known.namespace, known.claim_name) in self._prepared or known in fresh:
                continue
            fresh.append(known)
            for driver in known.driver_state:
                calls.setdefault(driver, []).append(known)
        for driver, claims in calls.items():
            await self._call_prepare(driver, claims)
        self._prepared.update((claim.namespace, claim.claim_name) for claim in fresh)
        self._write_checkpoint()

    async def _checked(self, pod: Obj, name: str, *, is_generated: bool) -> _Claim:
        """Read a claim and check that this pod may use it and that its drivers are registered."""
        namespace, pod_name = key_of(pod)
        claim = await self._fetch(namespace, name)
        metadata, status = claim["metadata"], claim.get("status") or {}
        uid = str(metadata["uid"])
        owners = metadata.get("ownerReferences") or ()
        if is_generated and not any(
            owner.get("controller") and owner["uid"] == uid_of(pod) for owner in owners
        ):
            raise ClaimError(
                f"ResourceClaim {namespace}/{name} was not created for "
                f"Pod {namespace}/{pod_name} (Pod is not owner)"
            )
        if all(user["uid"] != uid_of(pod) for user in status.get("reservedFor") or ()):
            raise ClaimError(
                f"pod {pod_name} ({uid_of(pod)}) is not allowed to use ResourceClaim {name} ({uid})"
            )
        if not status.get("allocation"):
            raise ClaimError(f"ResourceClaim {name}: not allocated")
        results = (status["allocation"].get("devices") or {}).get("results") or ()
        drivers = {str(result["driver"]): _DriverState() for result in results}
        for driver in drivers:
            self._find_driver(driver)
        return _Claim(
            claim_uid=uid, claim_name=name, namespace=namespace, pod_uids={}, driver_state=drivers
        )

    def _join(self, claim: _Claim, pod_uid: str) -> _Claim:
        """Record that a pod uses a claim; return what is known of the claim."""
        key = claim.namespace, claim.claim_name
        known = self._claims.setdefault(key, claim)
        if known.claim_uid != claim.claim_uid:
            raise ClaimError(
                f"old ResourceClaim with same name {claim.claim_name} and different UID "
                f"{known.claim_uid} still exists (previous pod force-deleted?!)"
            )
        if key in self._unpreparing:
            raise ClaimError(f"ResourceClaim {claim.claim_name} is being unprepared")
        known.pod_uids[pod_uid] = {}
        self._write_checkpoint()
        return known

    async def _call_prepare(self, driver: str, claims: Sequence[_Claim]) -> None:
        plugin = self._find_driver(driver)
        try:
            answers = await plugin.prepare([claim.request() for claim in claims])
        except ClaimError as error:
            raise ClaimError(f"NodePrepareResources: {error}") from error
        _check_answers("NodePrepareResources", claims, answers)
        for claim in claims:
            claim.driver_state[driver] = _DriverState(
                devices=tuple(
                    _Device(
                        pool_name=device.pool_name,
                        device_name=device.device_name,
                        share_id=device.share_id if device.HasField("share_id") else None,
                        request_names=tuple(device.request_names),
                        cdi_ids=tuple(device.cdi_device_ids),
                    )
                    for device in answers[claim.claim_uid].devices
                )
            )

    # -- after a pod's containers have ended

    async def unprepare(self, pod_uid: str) -> None:
        """Leave the pod's claims and unprepare those that no other pod uses."""
        calls: dict[str, list[_Claim]] = {}
        ending: list[Key] = []
        for key, claim in self._claims.items():
            if pod_uid not in claim.pod_uids:
                continue
            if len(claim.pod_uids) > 1:
                del claim.pod_uids[pod_uid]
                continue
            ending.append(key)
            self._unpreparing.add(key)
            for driver in claim.driver_state:
                calls.setdefault(driver, []).append(claim)
        for driver, claims in calls.items():
            plugin = self._find_driver(driver)
            try:
                answers = await plugin.unprepare([claim.request() for claim in claims])
            except ClaimError as error:
                raise ClaimError(f"NodeUnprepareResources: {error}") from error
            _check_answers("NodeUnprepareResources", claims, answers)
        for key in ending:
            self._claims.pop(key, None)
            self._prepared.discard(key)
            self._unpreparing.discard(key)
        self._write_checkpoint()

    def has_pod(self, pod_uid: str) -> bool:
        """Return true if a pod has claims that may be prepared."""
        return any(pod_uid in claim.pod_uids for claim in self._claims.values())

    def inactive_pods(self, active: Collection[str]) -> set[str]:
        """List the UIDs of pods that use claims and are not active any more."""
        return {uid for claim in self._claims.values() for uid in claim.pod_uids} - set(active)

    # -- for a pod's containers

    def cdi_devices(self, pod: Obj, container: Obj) -> tuple[str, ...]:
        """List the CDI ids of the requests that a container names, or of its whole claims."""
        found: list[str] = []
        for claim, requests in self._claims_of(pod, container):
            for request in requests:
                for _, device in claim.devices():
                    if device.serves(request):
                        found += device.cdi_ids or ()
        return tuple(found)

    def dynamic_resources(self, pod: Obj, container: Obj) -> list[podresources.DynamicResource]:
        """Word a container's claims for PodResources; none if one of them is unknown."""
        try:
            claims = self._claims_of(pod, container)
        except ClaimError:
            return []
        return [
            podresources.DynamicResource(
                claim_name=claim.claim_name,
                claim_namespace=claim.namespace,
                claim_resources=[
                    entry
                    for driver, state in claim.driver_state.items()
                    for entry in _claim_resources(driver, state.devices or ())
                ],
            )
            for claim, _ in claims
        ]

    def _claims_of(self, pod: Obj, container: Obj) -> list[tuple[_Claim, list[str]]]:
        """List a container's claims, each with the requests it names; an empty one means all."""
        namespace = key_of(pod)[0]
        requests: dict[str, list[str]] = {}
        for used in (container.get("resources") or {}).get("claims") or ():
            requests.setdefault(used["name"], []).append(used.get("request") or "")
        extended = (pod.get("status") or {}).get("extendedResourceClaimStatus") or {}
        for mapping in extended.get("requestMappings") or ():
            if mapping["containerName"] == container["name"]:
                requests.setdefault("", []).append(mapping["requestName"])
        found = []
        for reference, (name, _) in _claim_names(pod).items():
            if reference in requests:
                claim = self._claims.get((namespace, name))
                if claim is None:
                    raise ClaimError(
                        "internal error: unable to get claim info for ResourceClaim "
                        f"{name} in namespace {namespace}"
                    )
                found.append((claim, requests[reference]))
        return found

    # -- health

    def take_health(self, driver: str, devices: Iterable[drahealth.DeviceHealth]) -> set[str]:
        """Take a driver's complete list; return the UIDs of pods whose status it changes."""
        now_s = self._now_s()
        known = self._health.setdefault(driver, {})
        fresh = {
            (entry.device.pool_name, entry.device.device_name): _Health(
                status=_HEALTH.get(entry.health, _UNKNOWN),
                message=_shortened(entry.message),
                timeout_s=float(max(0, entry.health_check_timeout_seconds)) or HEALTH_TIMEOUT_S,
                reported_s=now_s,
            )
            for entry in devices
        }
        changed = {key for key, health in fresh.items() if not health.is_like(known.get(key))}
        stale = {
            key
            for key, health in known.items()
            if key not in fresh and now_s - health.reported_s > health.timeout_s
        }
        for key in stale:
            del known[key]
        known |= fresh
        changed |= stale
        return {
            uid
            for claim in self._claims.values()
            if any(
                name == driver and (device.pool_name, device.device_name) in changed
                for name, device in claim.devices()
            )
            for uid in claim.pod_uids
        }

    def clear_health(self, driver: str) -> None:
        """Forget what a driver reported, because its stream has ended."""
        self._health.pop(driver, None)

    def allocated_resources(self, pod: Obj) -> dict[str, list[Obj]]:
        """Word the health of the pod's devices: container → allocatedResourcesStatus."""
        names = _claim_names(pod, is_lenient=True)
        found: dict[str, list[Obj]] = {}
        for container in app_containers(pod):
            for used in (container.get("resources") or {}).get("claims") or ():
                name, _ = names.get(used["name"], ("", False))
                claim = self._claims.get((key_of(pod)[0], name))
                resources = self._healths(claim, used.get("request") or "") if claim else []
                if resources:
                    path = "/".join(filter(None, (used["name"], used.get("request"))))
                    status = {"name": f"claim:{path}", "resources": resources}
                    found.setdefault(container["name"], []).append(status)
        return found

    def _healths(self, claim: _Claim, request: str) -> list[Obj]:
        healths: dict[str, Obj] = {}
        for driver, device in claim.devices():
            if not device.serves(request):
                continue
            where = f"{driver}/{device.pool_name}/{device.device_name}"
            id_ = device.cdi_ids[0] if device.cdi_ids else where
            entry: Obj = {"resourceID": id_, "health": _UNKNOWN}
            health = self._health.get(driver, {}).get((device.pool_name, device.device_name))
            if health is not None and self._now_s() - health.reported_s <= health.timeout_s:
                entry["health"] = health.status
                if health.message:
                    entry["message"] = health.message
            healths.setdefault(id_, entry)
        return list(healths.values())

    # -- checkpoint

    def _write_checkpoint(self) -> None:
        data = msgspec.json.encode(_Data(claims=list(self._claims.values())))
        stored = _Checkpoint(data=data.decode(), checksum=zlib.crc32(data))
        fresh = self._checkpoint.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(stored))
        fresh.replace(self._checkpoint)

    def read_checkpoint(self) -> None:
        """Take over what an earlier kubelet wrote; kubelet does not start with a damaged file."""
        try:
            stored = msgspec.json.decode(self._checkpoint.read_bytes(), type=_Checkpoint)
        except FileNotFoundError:
            return
        if zlib.crc32(stored.data.encode()) != stored.checksum:
            msg = f"{self._checkpoint}: checkpoint is corrupted; drain the node and remove the file"
            raise ValueError(msg)
        data = msgspec.json.decode(stored.data, type=_Data)
        self._claims = {(claim.namespace, claim.claim_name): claim for claim in data.claims}


def _claim_names(pod: Obj, *, is_lenient: bool = False) -> dict[str, tuple[str, bool]]:
    """Name the pod's claims: reference → (claim, whether it was generated for this pod).

    The claim for extended resources has no reference: its key is empty. References for which no
    claim is needed are left out, and with ``is_lenient`` also those whose claim does not exist yet.
    """
    status = pod.get("status") or {}
    generated = {s["name"]: s for s in status.get("resourceClaimStatuses") or ()}
    found: dict[str, tuple[str, bool]] = {}
    for reference in pod["spec"].get("resourceClaims") or ():
        if reference.get("resourceClaimName"):
            found[reference["name"]] = (reference["resourceClaimName"], False)
        elif reference["name"] in generated:
            if name := generated[reference["name"]].get("resourceClaimName"):
                found[reference["name"]] = (name, True)
        elif not is_lenient:
            raise ClaimError(f'pod "{"/".join(key_of(pod))}": ResourceClaim not created yet')
    extended = status.get("extendedResourceClaimStatus")
    if extended:
        found[""] = (extended["resourceClaimName"], False)
    return found


def _check_answers(
    call: str,
    claims: Sequence[_Claim],
    answers: Mapping[str, dra.NodePrepareResourceResponse]
    | Mapping[str, dra.NodeUnprepareResourceResponse],
) -> None:
    """Check that a driver answered each claim of a call, no other one, and none with an error."""
    names = {claim.claim_uid: claim.claim_name for claim in claims}
    for uid, answer in answers.items():
        if uid not in names:
            raise ClaimError(f"{call} returned result for unknown claim UID {uid}")
        if answer.error:
            raise ClaimError(f"{call} failed for ResourceClaim {names[uid]}: {answer.error}")
    if len(answers) != len(claims):
        raise ClaimError(f"{call} skipped {len(claims) - len(answers)} ResourceClaims")


def _claim_resources(
    driver: str, devices: Sequence[_Device]
) -> Iterable[podresources.ClaimResource]:
    ids: list[str] = []
    for device in devices:
        ids += device.cdi_ids or ()
        yield podresources.ClaimResource(
            cdi_devices=[podresources.CDIDevice(name=id_) for id_ in ids],
            driver_name=driver,
            pool_name=device.pool_name,
            device_name=device.device_name,
            share_id=device.share_id,
        )


def _shortened(message: str) -> str:
    return message if len(message) <= _MESSAGE_MAX else f"{message[: _MESSAGE_MAX - 3]}..."
