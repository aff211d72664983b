# SPDX-License-Identifier: Apache-2.0
"""Replaces the key that signs allocations, while pods start and run, for ``hamictl rotate-key``.

The scheduler and the agents have to trust a key before it signs, so a rotation has these steps,
each of which a repeated run continues:

1. The next key is added to the Secret, and its public half to the ConfigMaps of trusted keys of
   services and agents.
2. The scheduler restarts, since it reads trusted keys at its start, and kubelet is given time to
   refresh the agents' files; agents reload them at once.
3. The next key becomes the signing key, and the scheduler restarts.

The old public half stays trusted for the pods that it signed. ``retire`` removes it once there are
none. Times in seconds.
"""

import base64
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from hami_common.errors import Conflict, NotFound, Unavailable
from hami_common.pods import annotations
from hami_common.pods.signing import Signer, key_id_of
from hami_common.ports import Clock, KubeApi
from hamictl import installation
from hamictl.installation import Document

SIGNING_KEY: Final = "hami-signing-key"
SIGNING: Final = "signing.pem"
NEXT: Final = "next.pem"
SCHEDULER: Final = "hami-scheduler"
TRUSTED: Final = "hami.io/trusted-keys"
SIGNED_BY: Final = "hami.io/signing-key"
"""Annotations of the scheduler's pods: what they have read. A change restarts them."""
ENDED: Final = ("Succeeded", "Failed")
POLL_S: Final = 1.0
_STRATEGIC: Final = "application/strategic-merge-patch+json"


class SignedPod(Struct, frozen=True, kw_only=True):
    """A pod whose allocation an old key signed."""

    namespace: str
    pod: str
    key: str


class Retired(Struct, frozen=True, kw_only=True):
    """The result of ``retire``."""

    removed: tuple[str, ...] = ()
    """Ids of the keys that are no longer trusted."""
    pods: tuple[SignedPod, ...] = ()
    """Pods that still need an old key; nothing was removed."""


class Rotation:
    """Rotates the signing key of one installation."""

    def __init__(
        self,
        kube: KubeApi,
        *,
        namespace: str,
        agents_namespace: str,
        clock: Clock,
        refresh_s: float,
        rollout_s: float,
        report: Callable[[str], None],
    ) -> None:
        """``refresh_s``: time that kubelet may take to refresh the agents' files."""
        self._kube = kube
        self._secret = f"/api/v1/namespaces/{namespace}/secrets/{SIGNING_KEY}"
        self._scheduler = f"/apis/apps/v1/namespaces/{namespace}/deployments/{SCHEDULER}"
        self._maps = tuple(
            f"/api/v1/namespaces/{one}/configmaps/{installation.TRUSTED_KEYS}"
            for one in dict.fromkeys((namespace, agents_namespace))
        )
        self._clock = clock
        self._refresh_s = refresh_s
        self._rollout_s = rollout_s
        self._report = report

    async def run(self) -> str:
        """Sign with a new key; returns its id."""
        secret, keys = await self._keys()
        current = Signer.from_pem(keys[SIGNING])
        if NEXT not in keys and await self._signed_by() not in {"", current.key_id}:
            # An earlier run ended between the change of the key and the restart.
            await self._restart({SIGNED_BY: current.key_id})
            return current.key_id
        if NEXT not in keys:
            keys[NEXT] = Signer.generate().private_pem()
            await self._put(secret, keys)
        following = Signer.from_pem(keys[NEXT])
        begun_s = self._clock.monotonic_s()
        for path in self._maps:
            await self._trust(path, following)
        self._report(f"key {following.key_id} is trusted beside {current.key_id}")
        await self._restart({TRUSTED: following.key_id, SIGNED_BY: current.key_id})
        left_s = begun_s + self._refresh_s - self._clock.monotonic_s()
        if left_s > 0:
            self._report(f"waiting {left_s:.0f} s for kubelet to refresh the agents' files")
            await self._clock.sleep(left_s)
        secret, keys = await self._keys()
        keys[SIGNING] = keys.pop(NEXT)
        await self._put(secret, keys)
        await self._restart({SIGNED_BY: following.key_id})
        return following.key_id

    async def retire(self) -> Retired:
        """Trust the signing key alone, if no pod needs another one.

        ``Conflict`` while a rotation is not finished.
        """
        _, keys = await self._keys()
        if NEXT in keys:
            detail = "a rotation is not finished: repeat it first"
            raise Conflict(what=f"Secret {SIGNING_KEY}", detail=detail)
        current = Signer.from_pem(keys[SIGNING])
        own = _file(current)
        if pods := await self._signed_by_others(current.key_id):
            return Retired(pods=pods)
        removed: set[str] = set()
        for path in self._maps:
            document = await installation.get(self._kube, path)
            data: Mapping[str, str] = document.get("data") or {}
            removed |= {name.removesuffix(".pub") for name in data if name != own}
            document["data"] = {own: current.public_pem().decode()}
            await self._kube.replace(path, msgspec.json.encode(document))
        if removed:
            await self._restart({TRUSTED: current.key_id})
        return Retired(removed=tuple(sorted(removed)))

    async def _keys(self) -> tuple[Document, dict[str, bytes]]:
        secret = await installation.get(self._kube, self._secret)
        data: Mapping[str, str] = secret.get("data") or {}
        if SIGNING not in data:
            raise NotFound(what=f"{SIGNING} in Secret {SIGNING_KEY}")
        return secret, {name: base64.b64decode(text) for name, text in data.items()}

    async def _put(self, secret: Document, keys: Mapping[str, bytes]) -> None:
        """Replace the Secret; ``Conflict`` if another run has changed it."""
        data = {name: base64.b64encode(pem).decode() for name, pem in keys.items()}
        await self._kube.replace(self._secret, msgspec.json.encode({**secret, "data": data}))

    async def _trust(self, path: str, signer: Signer) -> None:
        document = await installation.get(self._kube, path)
        data = {**(document.get("data") or {}), _file(signer): signer.public_pem().decode()}
        if data != document.get("data"):
            await self._kube.replace(path, msgspec.json.encode({**document, "data": data}))

    async def _signed_by(self) -> str:
        deployment = await installation.get(self._kube, self._scheduler)
        metadata = deployment["spec"]["template"].get("metadata") or {}
        return str((metadata.get("annotations") or {}).get(SIGNED_BY, ""))

    async def _restart(self, marks: Mapping[str, str]) -> None:
        """Annotate the scheduler's pods; returns when all of them are new and available."""
        patch: dict[str, Any] = {"spec": {"template": {"metadata": {"annotations": dict(marks)}}}}
        body = msgspec.json.encode(patch)
        await self._kube.patch(self._scheduler, body, content_type=_STRATEGIC)
        self._report("restarting the scheduler")
        until_s = self._clock.monotonic_s() + self._rollout_s
        while not _is_rolled_out(await installation.get(self._kube, self._scheduler)):
            if self._clock.monotonic_s() > until_s:
                detail = f"not all replicas are available after {self._rollout_s:g} s"
                raise Unavailable(peer=f"Deployment {SCHEDULER}", detail=detail)
            await self._clock.sleep(POLL_S)

    async def _signed_by_others(self, key_id: str) -> tuple[SignedPod, ...]:
        pods = await installation.items(
            self._kube, "/api/v1/pods", label_selector=f"{annotations.MANAGED_LABEL}=true"
        )
        found = []
        for pod in pods:
            metadata = pod["metadata"]
            signed = (metadata.get("annotations") or {}).get(annotations.ALLOCATION, "")
            has_ended = (pod.get("status") or {}).get("phase") in ENDED
            if signed and not has_ended and (key := key_id_of(signed)) != key_id:
                found.append(
                    SignedPod(namespace=metadata["namespace"], pod=metadata["name"], key=key)
                )
        return tuple(found)


def _file(signer: Signer) -> str:
    """Name of a public key in the ConfigMap, as ``hamictl bootstrap`` writes it."""
    return f"{signer.key_id}.pub"


def _is_rolled_out(deployment: Document) -> bool:
    status = deployment.get("status") or {}
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return False
    counts = {status.get(key, 0) for key in ("updatedReplicas", "replicas", "availableReplicas")}
    return counts == {deployment["spec"].get("replicas", 1)}
