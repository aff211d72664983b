# SPDX-License-Identifier: Apache-2.0
"""Provides a pod's volumes as directories, laid out as below /var/lib/kubelet/pods/UID/volumes.

Served: emptyDir, downwardAPI, configMap, secret, projected (of these and a service account token),
hostPath to what exists. Any other kind is refused with kubelet's event, and the pod waits. Times in
Unix seconds.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio

from hami_sim.apiserver.quantity import parse_quantity
from hami_sim.kubelet import atomicwriter
from hami_sim.kubelet.environ import FieldError, NodeFacts, field_value, resource_value
from hami_sim.kubelet.objects import Obj, key_of

_PLUGINS: Final = {
    "emptyDir": "kubernetes.io~empty-dir",
    "downwardAPI": "kubernetes.io~downward-api",
    "configMap": "kubernetes.io~configmap",
    "secret": "kubernetes.io~secret",
    "projected": "kubernetes.io~projected",
}
_LIVE: Final = ("downwardAPI", "configMap", "secret", "projected")
_MODE: Final = 0o644
_TOKEN_S: Final = 3600
_BLOCK: Final = 512

Fetch = Callable[[str, str, str], Awaitable[Mapping[str, bytes] | None]]
"""(kind, namespace, name) → data of a ConfigMap or Secret, None when there is none."""
IssueToken = Callable[[Obj, str, str, int], Awaitable[bytes]]
"""(pod, service account, audience, seconds) → token."""


class VolumeError(Exception):
    """Failure to provide a pod's volumes; the text goes into the FailedMount event."""


class Volumes:
    """The volumes of one pod."""

    def __init__(
        self,
        directory: Path,
        *,
        facts: Callable[[], NodeFacts],
        fetch: Fetch,
        issue_token: IssueToken,
        now_s: Callable[[], float],
        mounts_tmpfs: bool = False,
    ) -> None:
        self._directory = directory
        self._facts = facts
        self._fetch = fetch
        self._issue_token = issue_token
        self._now_s = now_s
        self._mounts_tmpfs = mounts_tmpfs
        self._tokens: dict[str, tuple[float, bytes]] = {}

    def path_of(self, pod: Obj, name: str) -> Path:
        """Return where a volume lies on the host."""
        for volume in pod["spec"].get("volumes") or []:
            if volume["name"] == name:
                if "hostPath" in volume:
                    return Path(volume["hostPath"]["path"])
                return self._directory / _PLUGINS[_kind(volume)] / name
        raise VolumeError(f'cannot find volume "{name}"')

    async def set_up(self, pod: Obj) -> None:
        """Provide every volume; called again it refreshes."""
        for volume in pod["spec"].get("volumes") or []:
            try:
                await self._provide(pod, volume)
            except (FieldError, ValueError, OSError) as error:
                raise VolumeError(
                    f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error}'
                ) from error

    async def refresh(self, pod: Obj) -> None:
        """Bring volumes that show the pod or API objects up to date."""
        for volume in pod["spec"].get("volumes") or []:
            if _kind(volume) in _LIVE:
                await self._provide(pod, volume)

    def overfull(self, pod: Obj) -> str | None:
        """Return kubelet's message about an emptyDir above its limit, or ``None``."""
        for volume in pod["spec"].get("volumes") or []:
            limit = (volume.get("emptyDir") or {}).get("sizeLimit")
            if limit is None:
                continue
            used = _size_of(self.path_of(pod, volume["name"]))
            if used > parse_quantity(limit).amount:
                return f'Usage of EmptyDir volume "{volume["name"]}" exceeds the limit "{limit}". '
        return None

    async def tear_down(self) -> None:
        """Remove every volume."""
        await unmount_below(self._directory)
        await anyio.to_thread.run_sync(_remove, self._directory)

    async def _provide(self, pod: Obj, volume: Obj) -> None:
        kind = _kind(volume)
        path = self.path_of(pod, volume["name"])
        if kind == "emptyDir":
            path.mkdir(parents=True, exist_ok=True)
            is_memory = volume["emptyDir"].get("medium") == "Memory"
            if self._mounts_tmpfs and is_memory and not path.is_mount():
                limit = volume["emptyDir"].get("sizeLimit")
                options = f"size={int(parse_quantity(limit).amount)}" if limit else "size=50%"
                command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
                done = await anyio.run_process(command, check=False)
                if done.returncode != 0:
                    raise FieldError(f"mount failed: {done.stderr.decode().strip()}")
            path.chmod(0o777)
        elif kind == "hostPath":
            if not path.exists():
                raise FieldError(f"hostPath {path} does not exist, and a simulation makes none")
        else:
            files = await self._files(pod, kind, volume[kind])
            atomicwriter.write(path, files, now_s=self._now_s())

    async def _files(self, pod: Obj, kind: str, source: Obj) -> dict[str, atomicwriter.File]:
        mode = source.get("defaultMode", _MODE)
        if kind == "downwardAPI":
            return self._downward(pod, source, mode)
        if kind in ("configMap", "secret"):
            return await self._object(pod, kind, source, mode)
        if kind == "serviceAccountToken":
            return await self._token(pod, source, mode)
        files: dict[str, atomicwriter.File] = {}
        for part in source.get("sources") or []:
            for inner, value in part.items():
                if inner not in ("downwardAPI", "configMap", "secret", "serviceAccountToken"):
                    raise FieldError(f"projected source {inner} is not simulated")
                files |= await self._files(pod, inner, {"defaultMode": mode, **value})
        return files

    def _downward(self, pod: Obj, source: Obj, mode: int) -> dict[str, atomicwriter.File]:
        files = {}
        for item in source.get("items") or []:
            if "fieldRef" in item:
                text = field_value(pod, item["fieldRef"]["fieldPath"])
            else:
                text = resource_value(pod, {}, item["resourceFieldRef"], facts=self._facts())
            files[item["path"]] = atomicwriter.File(text.encode(), item.get("mode") or mode)
        return files

    async def _object(
        self, pod: Obj, kind: str, source: Obj, mode: int
    ) -> dict[str, atomicwriter.File]:
        name = source.get("secretName") or source.get("name", "")
        data = await self._fetch(kind, key_of(pod)[0], name)
        if data is None:
            if source.get("optional"):
                return {}
            raise FieldError(f'{kind.lower()} "{name}" not found')
        items = source.get("items")
        if not items:
            return {key: atomicwriter.File(value, mode) for key, value in data.items()}
        files = {}
        for item in items:
            if item["key"] in data:
                value = data[item["key"]]
                files[item["path"]] = atomicwriter.File(value, item.get("mode") or mode)
            elif not source.get("optional"):
                raise FieldError(f"references non-existent {kind.lower()} key: {item['key']}")
        return files

    async def _token(self, pod: Obj, source: Obj, mode: int) -> dict[str, atomicwriter.File]:
        length_s = int(source.get("expirationSeconds") or _TOKEN_S)
        audience = str(source.get("audience", ""))
        issued_s, token = self._tokens.get(audience, (0.0, b""))
        if not token or self._now_s() - issued_s > length_s * 0.8:
            account = pod["spec"].get("serviceAccountName") or "default"
            token = await self._issue_token(pod, account, audience, length_s)
            self._tokens[audience] = (self._now_s(), token)
        return {source["path"]: atomicwriter.File(token, mode)}


def _kind(volume: Obj) -> str:
    kind = next(key for key in volume if key != "name")
    if kind not in _PLUGINS and kind != "hostPath":
        raise VolumeError(f'volume "{volume["name"]}" is of kind {kind}, which is not simulated')
    return kind


def _size_of(directory: Path) -> int:
    """Bytes in use below a directory; files that vanish meanwhile count nothing."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(Path(parent) / name).st_blocks * _BLOCK
    return total


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


async def unmount_below(directory: Path) -> None:
    """Unmount whatever is mounted on the host below a directory."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    points = [line.split()[4].replace("\\040", " ") for line in mounts]
    for point in sorted(points, reverse=True):
        if Path(point).is_relative_to(directory):
            await anyio.run_process(["umount", "-l", point], check=False)


def decode_data(obj: Obj, *, is_secret: bool) -> dict[str, bytes]:
    """Read the data of a ConfigMap or Secret."""
    plain = obj.get("data") or {}
    if is_secret:
        return {key: base64.b64decode(value) for key, value in plain.items()}
    binary = obj.get("binaryData") or {}
    return {key: value.encode() for key, value in plain.items()} | {
        key: base64.b64decode(value) for key, value in binary.items()
    }
