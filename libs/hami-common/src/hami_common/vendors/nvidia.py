# SPDX-License-Identifier: Apache-2.0
"""NVIDIA: resource names, admission, request parsing, selection and rendering of shares.

A device in MIG mode gives a share a MIG instance: the requested size decides its profile, or the
pod requests the profile by name (``nvidia.com/mig-<profile>``, names listed in the settings). The
instance itself limits the share; no library is preloaded and no limits are set.

A share has two sets of names: HAMi's, and those of the dialects in the settings. A container uses
one of them.

Rules follow HAMi v2.10's pod interface for NVIDIA with these deliberate differences:

- a quantity that HAMi would silently treat as "no GPU" (not an integer, negative, too large) is
  refused with the fix;
- ``nvidia.com/gpucore`` is accepted as another spelling of ``gpucores``;
- a percentage is taken of physical, not of scaled memory;
- each device has its own compute limit.

Memory in MiB, compute in percent of one device.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from hami_common.errors import NotFound, RequestInvalid, SettingsInvalid
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import MPS_MODE, DeviceRequest, DeviceSelector
from hami_common.pods.mounts import MPS_DIRECTORY
from hami_common.pods.podview import ContainerView
from hami_common.units import INT32_MAX, parse_count, parse_percent, shown
from hami_common.vendors.handles import handle_of, handles_of, needs_instance
from hami_common.vendors.protocol import (
    NO_ANNOTATIONS,
    BindMount,
    Capability,
    ContainerChanges,
    ContainerEdits,
    DeviceNode,
    RenderContext,
    ResourceNames,
)
from hami_common.vendors.sharing import both_memories, clamped, without_count, words_of

NAME = "nvidia"
MAX_PRIORITY = 7
DEFAULT_PRIORITY = 1
"""Task priority of a container that asks for none."""
MAX_DEVICES = 64
FULL_PCT = 100

USE_TYPE = "nvidia.com/use-gputype"
NO_USE_TYPE = "nvidia.com/nouse-gputype"
USE_UUID = "nvidia.com/use-gpuuuid"
NO_USE_UUID = "nvidia.com/nouse-gpuuuid"
NUMA_BIND = "nvidia.com/numa-bind"
MODE = "nvidia.com/vgpu-mode"
VOLCANO_MODE = "volcano.sh/vgpu-mode"
_MODE_WORDS = {
    "hami-core": "soft",
    "soft": "soft",
    "mig": "mig",
    "timeslice": "timeslice",
    "mps": MPS_MODE,
}

_NODE_ENV = frozenset({"NVIDIA_VISIBLE_DEVICES", "CUDA_OVERSUBSCRIBE"})
_NODE_ENV_PREFIXES = (
    "CUDA_DEVICE_MEMORY_LIMIT",
    "CUDA_DEVICE_SM_LIMIT",
    "CUDA_DEVICE_MEMORY_SHARED_CACHE",
)
_MPS_ENV_PREFIX = "CUDA_MPS_"
"""Variables of the Multi-Process Service; only a container with a whole device has a service of its
own."""
_MPS_SHM = "/dev/shm"  # noqa: S108 - where the service and its clients share memory
_MIG_PROFILE = re.compile(r"[1-9]\d*g\.[1-9]\d*gb([+-][a-z]+(\.[a-z]+)*)?")
_OPT_OUT_ENV = "CUDA_DISABLE_CONTROL"
_PRIORITY_ENV = "CUDA_TASK_PRIORITY"
_TRUE_WORDS = frozenset({"1", "t", "true"})

_OPTIONAL_NODES = frozenset({"/dev/nvidia-modeset", "/dev/nvidia-uvm-tools"})
"""Nodes of kernel modules that a compute node may lack."""
_CONTROL_NODES = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)


Feature = Literal["gdrcopy", "gds", "mofed"]
FEATURE_NODES: Final[Mapping[Feature, tuple[str, ...]]] = {
    "gdrcopy": ("/dev/gdrdrv",),
    "gds": tuple(f"/dev/nvidia-fs{number}" for number in range(16)),
    "mofed": (
        "/dev/infiniband/rdma_cm",
        *(f"/dev/infiniband/uverbs{number}" for number in range(16)),
    ),
}
"""Device nodes by feature; those that a node lacks are left out."""


Dialect = Literal["volcano"]
_DIALECTS: Final[Mapping[Dialect, ResourceNames]] = {
    # Names of Volcano's plugin deviceshare and of its device plugin (volcano-vgpu-device-plugin).
    "volcano": ResourceNames(
        count="volcano.sh/vgpu-number",
        memory="volcano.sh/vgpu-memory",
        memory_percentage="volcano.sh/vgpu-memory-percentage",
        cores="volcano.sh/vgpu-cores",
    ),
}


class NvidiaSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``nvidia`` of the vendor configuration."""

    resource_count_name: str = "nvidia.com/gpu"
    resource_memory_name: str = "nvidia.com/gpumem"
    resource_memory_percentage_name: str = "nvidia.com/gpumem-percentage"
    resource_core_name: str = "nvidia.com/gpucores"
    resource_priority_name: str = "nvidia.com/priority"
    resource_aliases: dict[str, str] = field(
        default_factory=lambda: {"nvidia.com/gpucore": "nvidia.com/gpucores"}
    )
    dialects: tuple[Dialect, ...] = ()
    """Further names of the same shares, which keep their names at admission.

    ``volcano``: ``volcano.sh/vgpu-number`` and its like; agents then describe their devices in the
    annotations that Volcano reads.
    """
    default_count: int = 1
    """Devices for a container that asks only for memory or compute.

    0: such containers are refused.
    """
    default_memory_mib: int = 0
    """Memory where the user gives none; 0 means the whole device."""
    default_core_pct: int = 0
    memory_factor: int = 1
    """Multiplies the number the user writes for memory."""
    mig_profiles: tuple[str, ...] = ()
    """MIG profiles that pods may ask for by name, as NVML writes them: ``1g.10gb``, ``1g.10gb+me``.

    Each is a resource of its own; sizes that no pod requests by name need not be listed.
    """
    mig_resource_prefix: str = "nvidia.com/mig-"
    """Prefix of the name of a profile, in which ``+`` is written ``.``."""
    core_policy: str = "default"
    """``GPU_CORE_UTILIZATION_POLICY`` for containers that ask for a device.

    ``default``, ``force`` or ``disable``.
    """
    runtime_class: str = ""
    """Runtime class for pods that have none; empty leaves the pod alone."""
    cdi_kind: str = "nvidia.com/gpu"
    """CDI vendor and class under which the vendor's toolkit publishes devices."""
    features: tuple[Feature, ...] = ()
    """Devices that every container with a share gets besides its cards.

    ``gdrcopy``, ``gds`` (GPUDirect Storage) or ``mofed`` (RDMA): as the CDI device
    ``nvidia.com/<feature>=all``, as device nodes, or as ``NVIDIA_<FEATURE>=enabled``, by the node
    agent's setting ``injection``.
    """


def _limits_env(
    shares: ContainerShares, own: Sequence[Share], context: RenderContext
) -> dict[str, str]:
    """Variables for the in-container limiter, and for tools that use its names."""
    env: dict[str, str] = {}
    soft = [(i, share) for i, share in enumerate(own) if not share.profile]
    if not soft:
        return env
    for i, share in soft:
        env[f"CUDA_DEVICE_MEMORY_LIMIT_{i}"] = f"{share.memory_mib}m"
        env[f"CUDA_DEVICE_SM_LIMIT_{i}"] = str(0 if share.mode else share.core_pct)
    env["CUDA_DEVICE_SM_LIMIT"] = env[f"CUDA_DEVICE_SM_LIMIT_{soft[0][0]}"]
    if context.region_file:
        env["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = context.region_file
    if context.memory_oversubscribed:
        env["CUDA_OVERSUBSCRIBE"] = "true"
    if context.library_log_level:
        env["LIBCUDA_LOG_LEVEL"] = context.library_log_level
    if context.core_policy:
        env["GPU_CORE_UTILIZATION_POLICY"] = context.core_policy
    if shares.priority is not None:
        env[_PRIORITY_ENV] = str(shares.priority)
    return env


def _mps_env(share: Share) -> dict[str, str]:
    """Variables by which the client of a Multi-Process Service finds it and its limits.

    The percentage is of multiprocessors. The container sees its device as number 0; the service
    drops all limits of memory if one names a device that the client does not see.
    """
    return {
        "CUDA_MPS_PIPE_DIRECTORY": MPS_DIRECTORY,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share.core_pct or FULL_PCT),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={share.memory_mib}M",
    }


def _mps_mounts(share: Share, context: RenderContext) -> tuple[BindMount, ...]:
    """The pipes of the device's service, and the memory that it shares with its clients."""
    places = ((f"{share.uuid}/pipe", MPS_DIRECTORY), ("shm", _MPS_SHM))
    return tuple(
        BindMount(host_path=f"{context.mps_dir}/{host}", container_path=path, read_only=False)
        for host, path in places
    )


class Nvidia:
    """Pure half of the vendor NVIDIA."""

    name = NAME

    def __init__(self, settings: NvidiaSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        self._settings = settings or NvidiaSettings()
        s = self._settings
        self._resources = ResourceNames(
            count=s.resource_count_name,
            memory=s.resource_memory_name,
            memory_percentage=s.resource_memory_percentage_name,
            cores=s.resource_core_name,
            priority=s.resource_priority_name,
            memory_unit_mib=max(1, s.memory_factor),
            aliases=dict(s.resource_aliases),
        )
        self._profile_by_name = _profile_names(s)
        self._shared = (
            self._resources,
            *(
                replace(
                    _DIALECTS[dialect],
                    dialect_of=s.resource_count_name,
                    memory_unit_mib=self._resources.memory_unit_mib,
                )
                for dialect in s.dialects
            ),
        )
        """Names of shares, HAMi's first."""
        self._families = (
            *self._shared,
            *(ResourceNames(count=name) for name in self._profile_by_name),
        )
        dialects = (name for names in self._shared[1:] for name in sorted(names.all()))
        self._resources = replace(self._resources, others=(*self._profile_by_name, *dialects))

    @property
    def resources(self) -> ResourceNames:
        """Names of the resources."""
        return self._resources

    @property
    def families(self) -> tuple[ResourceNames, ...]:
        """The names of shares by dialect, and one name for each MIG profile of the settings."""
        return self._families

    @property
    def capability(self) -> Capability:
        """Limits are enforced by the in-container limiter, or by the MIG instance."""
        return Capability(
            memory_enforced="libvgpu, MIG",
            compute_enforced="libvgpu, MPS, MIG",
            memory_cap="from version 615",
            memory_backed="libvgpu, in CUDA managed memory",
            memory_recalled="hami-recall, with the driver's checkpoint functions",
            partitioned="the agent, through NVML (MIG)",
        )

    def advertised(self, device: Device) -> tuple[str, ...]:
        """Every device under the name of shares; one in MIG mode under its profiles', too."""
        if device.vendor != NAME:
            return ()
        own = {profile.name for profile in device.partitions} if device.mode == "mig" else set()
        names = (name for name, profile in self._profile_by_name.items() if profile in own)
        return (*(names.count for names in self._shared), *names)

    def _names(self, container: ContainerView) -> ResourceNames:
        """The set of names that the container uses; HAMi's if it uses none."""
        if len(self._shared) == 1:
            return self._resources
        used: list[tuple[str, ResourceNames]] = []
        for names in self._shared:
            own = (names.count, names.memory, names.memory_percentage, names.cores)
            found = next((one for one in own if self._value(container, one) is not None), None)
            if found is not None:
                used.append((found, names))
        if len(used) > 1:
            (first, _), (second, _) = used[:2]
            raise RequestInvalid(
                field=self._field(container, second),
                problem=f"a container that uses {first} cannot use it too",
                fix=f"use the names of {first.partition('/')[0]} only, or the others only",
            )
        return used[0][1] if used else self._resources

    def _value(self, container: ContainerView, name: str) -> str | None:
        """Text of a resource: limits first, then requests.

        An alias counts when the true name is absent.
        """
        aliases = self._resources.aliases.items()
        names = (name, *(alias for alias, target in aliases if target == name))
        found = (container.quantity(wanted) for wanted in names)
        return next((text for text in found if text is not None), None)

    def _field(self, container: ContainerView, name: str) -> str:
        return f"container {container.name}: resources.limits[{name}]"

    def _count(self, container: ContainerView) -> int | None:
        """Requested devices: the count, or the default when only memory or compute is written.

        ``None`` when the container requests none of them.
        """
        r = self._names(container)
        text = self._value(container, r.count)
        if text is not None:
            return parse_count(
                text, field=self._field(container, r.count), unit="devices", at_most=MAX_DEVICES
            )
        if self._settings.default_count > 0 and any(
            self._value(container, name) is not None
            for name in (r.memory, r.memory_percentage, r.cores)
        ):
            return self._settings.default_count
        return None

    def _memory_mib(self, container: ContainerView) -> int | None:
        name = self._names(container).memory
        text = self._value(container, name)
        if text is None:
            return None
        factor = max(1, self._settings.memory_factor)
        where = self._field(container, name)
        unit = "MiB" if factor == 1 else f"units of {factor} MiB"
        most = INT32_MAX // factor
        return parse_count(text, field=where, unit=unit, at_most=most, unit_mib=factor) * factor

    def _memory_pct(self, container: ContainerView) -> int | None:
        name = self._names(container).memory_percentage
        text = self._value(container, name)
        return None if text is None else parse_percent(text, field=self._field(container, name))

    def _core_pct(self, container: ContainerView) -> int | None:
        name = self._names(container).cores
        text = self._value(container, name)
        where = self._field(container, name)
        return (
            None if text is None else parse_count(text, field=where, unit="percent of one device")
        )

    def parse_priority(self, container: ContainerView) -> int | None:
        """Task priority 0 (highest) … 7, from the resource or HAMi's variable.

        Conflicting or invalid values are refused. A variable that names the default requests
        nothing, because admission writes it where ``envFrom`` could set another one.
        """
        text = self._value(container, self._resources.priority)
        by_resource = (
            None
            if text is None
            else parse_count(
                text,
                field=self._field(container, self._resources.priority),
                unit="priority levels",
                at_most=MAX_PRIORITY,
            )
        )
        by_variable = self._priority_of_variable(container)
        if by_variable is None or by_variable == by_resource:
            return by_resource
        if by_resource is not None:
            raise RequestInvalid(
                field=f"container {container.name}: env {_PRIORITY_ENV}",
                problem=f"{by_variable} contradicts {by_resource} in "
                f"resources.limits[{self._resources.priority}]",
                fix="remove the variable or write the same level in both",
            )
        return None if by_variable == DEFAULT_PRIORITY else by_variable

    @staticmethod
    def _priority_of_variable(container: ContainerView) -> int | None:
        """Level in the container's literal variable; ``None`` without one."""
        found = [
            variable.value or ""
            for variable in container.env or []
            if variable.name == _PRIORITY_ENV and variable.value_from is None
        ]
        if not found:
            return None
        if set(found) <= {str(level) for level in range(MAX_PRIORITY + 1)} and len(set(found)) == 1:
            return int(found[0])
        written = ", ".join(repr(one) for one in found)
        raise RequestInvalid(
            field=f"container {container.name}: env {_PRIORITY_ENV}",
            problem=f"{written} is not one task priority",
            fix=f"write one number from 0 (highest) to {MAX_PRIORITY}, or remove the variable",
        )

    def parse_request(
        self,
        container: ContainerView,
        annotations: Mapping[str, str] = NO_ANNOTATIONS,  # noqa: ARG002 - the request needs none
    ) -> DeviceRequest | None:
        """Request of the container; see the table in docs/terms.md for defaults."""
        if named := self._named_profile(container):
            return named
        count = self._count(container)
        memory, percent, cores = (
            self._memory_mib(container),
            self._memory_pct(container),
            self._core_pct(container),
        )
        self.parse_priority(container)
        if count is None and (memory or percent or cores):
            raise without_count(container, self._names(container).count)
        if not count:
            return None
        if cores is None:
            whole = percent == FULL_PCT or (percent is None and memory is None)
            cores = FULL_PCT if whole else self._settings.default_core_pct
        cores = min(cores, FULL_PCT)
        if not memory and not percent:
            memory = self._settings.default_memory_mib
            percent = FULL_PCT
        return DeviceRequest(
            vendor=NAME,
            count=count,
            memory_mib=memory or 0,
            memory_pct=0 if memory else percent or 0,
            core_pct=cores,
            exclusive=cores == FULL_PCT,
        )

    def _named_profile(self, container: ContainerView) -> DeviceRequest | None:
        """MIG instances requested by name; a container cannot combine them with shares."""
        named = {
            name: count
            for name in self._profile_by_name
            if (text := self._value(container, name)) is not None
            and (
                count := parse_count(
                    text,
                    field=self._field(container, name),
                    unit="MIG instances",
                    at_most=MAX_DEVICES,
                )
            )
        }
        if not named:
            return None
        own = self._names(container)
        parts = (own.count, own.memory, own.memory_percentage, own.cores)
        others = [name for name in parts if self._value(container, name) is not None]
        first, *more = [*named, *others]
        if more:
            raise RequestInvalid(
                field=self._field(container, more[0]),
                problem=f"a container that asks for {first} cannot ask for it too",
                fix=f"remove one of them, or give {more[0]} to a container of its own",
            )
        return DeviceRequest(
            vendor=NAME,
            count=named[first],
            profile=self._profile_by_name[first],
            modes=("mig",),
        )

    def admit(
        self,
        container: ContainerView,
        annotations: Mapping[str, str] = NO_ANNOTATIONS,
    ) -> ContainerChanges | None:
        """Set defaults, rename aliases.

        Adds environment and warnings for a container that mentions one of our resources.
        """
        s = self._settings
        limits, requests = container.limits(), container.requests()
        if not self._resources.all() & (limits.keys() | requests.keys()):
            return None
        r = self._names(container)
        request = self.parse_request(container)
        where = f"container {container.name}"
        warnings: list[str] = []
        if request is None:
            # Only the priority or zero devices are mentioned: there is no share to place, so warn
            # the user.
            warnings.append(
                f"{where} mentions {r.count} resources but asks for no device, so it gets none"
            )
            return ContainerChanges(warnings=tuple(warnings))
        removed, removals = self._removed_env(container, request)
        removals += self._warnings_of_count(request, annotations, where)
        if request.profile:
            return ContainerChanges(
                remove_env=removed, runtime_class=s.runtime_class, warnings=tuple(removals)
            )
        set_limits: dict[str, str] = {}
        aliases = self._resources.aliases
        renamed = tuple(alias for alias in aliases if alias in limits or alias in requests)
        for alias in renamed:
            target = aliases[alias]
            if target in limits or target in requests:
                warnings.append(f"{where}: {alias} is ignored because {target} is given too")
            else:
                set_limits[target] = limits.get(alias, requests.get(alias, ""))
                warnings.append(f"{where}: {alias} is read as {target}; please write {target}")
        memory, percent, cores = (
            self._memory_mib(container),
            self._memory_pct(container),
            self._core_pct(container),
        )
        if memory and percent is not None:
            warnings.append(both_memories(container, r.memory, r.memory_percentage))
        warnings += clamped(container, r.cores, cores, FULL_PCT)
        if r.count not in limits and r.count not in requests:
            set_limits[r.count] = str(request.count)
        if cores is None and request.exclusive:
            set_limits[r.cores] = str(FULL_PCT)
        env, overruled, remarks = self._task_priority(container)
        removed = (*removed, *overruled)
        set_limits |= self._limit_of_priority(container, env)
        warnings.extend(remarks)
        if s.core_policy not in ("", "default"):
            env["GPU_CORE_UTILIZATION_POLICY"] = s.core_policy
        warnings.extend(removals)
        self._refuse_opt_out(container, request)
        return ContainerChanges(
            set_limits=set_limits,
            remove_env=removed,
            remove_resources=renamed,
            set_env=env,
            runtime_class=s.runtime_class,
            warnings=tuple(warnings),
        )

    def _task_priority(
        self, container: ContainerView
    ) -> tuple[dict[str, str], tuple[str, ...], list[str]]:
        """Decide on the variable of the task priority, which the limiter reads without a limit.

        Returns the variables to set, those to remove (``valueFrom``), and warnings.
        """
        name = self._resources.priority
        where = f"container {container.name}: env {_PRIORITY_ENV}"
        warnings: list[str] = []
        priority = self.parse_priority(container)
        if priority is not None and self._value(container, name) is None:
            warnings.append(f"{where} is read as {name}; please write {name}")
        removed = tuple(
            {
                _PRIORITY_ENV
                for variable in container.env or []
                if variable.name == _PRIORITY_ENV and variable.value_from is not None
            }
        )
        if removed:
            warnings.append(f"{where} was removed; write {name} in resources.limits")
        return {} if priority is None else {_PRIORITY_ENV: str(priority)}, removed, warnings

    def _limit_of_priority(self, container: ContainerView, env: dict[str, str]) -> dict[str, str]:
        """The task priority as a limit, when the user gave it as a variable only."""
        name = self._resources.priority
        if not env or self._value(container, name) is not None:
            return {}
        return {name: env[_PRIORITY_ENV]}

    def _warnings_of_count(
        self, request: DeviceRequest, annotations: Mapping[str, str], where: str
    ) -> list[str]:
        """Warnings for a container that asks for several MIG instances."""
        is_mig = ("mig",) in (request.modes, self.parse_selector(annotations).modes)
        if request.count == 1 or not is_mig:
            return []
        advice = "start a process for each, with its own CUDA_VISIBLE_DEVICES"
        what = f"{request.count} MIG instances"
        return [f"{where}: {what}; one CUDA process uses one of them: {advice}"]

    @staticmethod
    def _removed_env(
        container: ContainerView, request: DeviceRequest
    ) -> tuple[tuple[str, ...], list[str]]:
        """Variables that only the node may set, and a warning for each."""
        prefixes = _NODE_ENV_PREFIXES + (() if request.exclusive else (_MPS_ENV_PREFIX,))
        names = tuple(
            variable.name
            for variable in container.env or []
            if variable.name in _NODE_ENV or variable.name.startswith(prefixes)
        )
        where = f"container {container.name}"
        return names, [f"{where}: env {name} is set by the node and was removed" for name in names]

    def _refuse_opt_out(self, container: ContainerView, request: DeviceRequest) -> None:
        """Refuse a part of a device without the limiter: it could use the whole device."""
        if request.exclusive:
            return
        for variable in container.env or []:
            if variable.name == _OPT_OUT_ENV and (variable.value or "").lower() in _TRUE_WORDS:
                raise RequestInvalid(
                    field=f"container {container.name}: env {_OPT_OUT_ENV}",
                    problem="a container with a share of a device cannot switch its limits off",
                    fix=f"remove it, or ask for a whole device: {self._resources.count} alone",
                )

    def parse_selector(self, annotations: Mapping[str, str]) -> DeviceSelector:
        """Type, UUID, mode and NUMA constraints of the pod."""
        modes: tuple[str, ...] = ()
        key = MODE
        if "volcano" in self._settings.dialects and MODE not in annotations:
            key = VOLCANO_MODE
        if mode_text := annotations.get(key, ""):
            modes = tuple(
                dict.fromkeys(mode for word, mode in _MODE_WORDS.items() if word in mode_text)
            )
            if not modes:
                raise RequestInvalid(
                    field=f"annotation {key}",
                    problem=f"{shown(mode_text)} names no known mode",
                    fix="write hami-core, mig, timeslice or mps, or a list of these",
                )
        numa_text = annotations.get(NUMA_BIND, "false").strip().lower()
        if numa_text not in ("true", "false", "1", "0", "t", "f"):
            raise RequestInvalid(
                field=f"annotation {NUMA_BIND}",
                problem=f"{shown(numa_text)} is not a truth value",
                fix='write "true" or "false"',
            )
        return DeviceSelector(
            allow_types=words_of(annotations, (USE_TYPE,)),
            deny_types=words_of(annotations, (NO_USE_TYPE,)),
            allow_uuids=words_of(annotations, (USE_UUID,)),
            deny_uuids=words_of(annotations, (NO_USE_UUID,)),
            modes=modes,
            numa_bind=numa_text in ("true", "1", "t"),
        )

    def render(
        self, shares: ContainerShares, devices: Sequence[Device], context: RenderContext
    ) -> ContainerEdits:
        """Environment, device nodes, mounts and CDI names.

        The environment is the contract of the in-container limiter, HAMi v2.10; a MIG instance has
        none. ``handles``: ``mig_uuid``, the instance's UUID, ``gi_cap`` and ``ci_cap``, the device
        nodes that let a container into it.
        """
        own = [share for share in shares.shares if share.vendor == NAME]
        pairs = list(zip(own, devices, strict=True))
        names = [
            handle_of(share, device, context, "mig_uuid") or device.uuid for share, device in pairs
        ]
        env = _limits_env(shares, own, context) if context.is_limited else {}
        nodes: tuple[DeviceNode, ...] = ()
        cdi: tuple[str, ...] = ()
        if context.mode == "cdi":
            # The image may set NVIDIA_VISIBLE_DEVICES=all for the legacy hook; CDI injects, so the
            # hook must not.
            env["NVIDIA_VISIBLE_DEVICES"] = "void"
            cdi = tuple(f"{self._settings.cdi_kind}={name}" for name in names)
            cdi += tuple(f"nvidia.com/{feature}=all" for feature in self._settings.features)
        else:
            env["NVIDIA_VISIBLE_DEVICES"] = ",".join(names)
            if context.mode == "devices":
                nodes = _nodes(pairs, context) + tuple(
                    DeviceNode(host_path=path, container_path=path, optional=True)
                    for feature in self._settings.features
                    for path in FEATURE_NODES[feature]
                )
            else:
                env |= {f"NVIDIA_{name.upper()}": "enabled" for name in self._settings.features}
        is_held_from_inside = not own or any(not share.profile for share in own)
        mounts = context.library_mounts if is_held_from_inside else ()
        for share in own:
            if share.mode == MPS_MODE:
                env |= _mps_env(share)
                mounts += _mps_mounts(share, context)
        return ContainerEdits(env=env, devices=nodes, cdi_devices=cdi, mounts=mounts)


def _nodes(pairs: Sequence[tuple[Share, Device]], context: RenderContext) -> tuple[DeviceNode, ...]:
    """The cards' nodes, those of MIG instances, and the driver's own."""
    paths = [f"/dev/nvidia{device.minor}" for _, device in pairs if device.minor is not None]
    for share, device in pairs:
        handles = handles_of(share, device, context)
        if not needs_instance(share, device) or "mig_uuid" not in handles:
            continue
        caps = [handles.get(word, "") for word in ("gi_cap", "ci_cap")]
        if not all(caps):
            raise NotFound(
                what=f"device nodes of {handles['mig_uuid']}: the driver lists none in /proc"
            )
        paths += caps
    return tuple(
        DeviceNode(host_path=path, container_path=path, optional=path in _OPTIONAL_NODES)
        for path in dict.fromkeys([*paths, *_CONTROL_NODES])
    )


def _profile_names(settings: NvidiaSettings) -> dict[str, str]:
    """MIG profile by the resource name under which it is asked for."""
    names: dict[str, str] = {}
    for profile in settings.mig_profiles:
        if _MIG_PROFILE.fullmatch(profile) is None:
            raise SettingsInvalid(
                field="vendors.nvidia.mig_profiles",
                problem=f"{shown(profile)} is not the name of a MIG profile",
                fix="write names as NVML does, such as 1g.10gb or 1g.10gb+me",
            )
        names[settings.mig_resource_prefix + profile.replace("+", ".")] = profile
    return names
