# SPDX-License-Identifier: Apache-2.0
# The part of nvidia-ml-py that hami_nodeagent.drivers.nvidia.{nvml,mig} use; it ships no types.
# ruff: noqa: N801, N802, N803, N815, N816 -- names are the library's

import ctypes

class NVMLError(Exception):
    value: int

class c_nvmlDevice_t(ctypes.c_void_p): ...
class c_nvmlEventSet_t(ctypes.c_void_p): ...
class c_nvmlGpuInstance_t(ctypes.c_void_p): ...
class c_nvmlComputeInstance_t(ctypes.c_void_p): ...
class c_nvmlGpmSample_t(ctypes.c_void_p): ...

class _GpmSupport:
    isSupportedDevice: int

class _GpmMetric:
    metricId: int
    nvmlReturn: int
    value: float

class c_nvmlGpmMetricsGet_t:
    version: int
    numMetrics: int
    sample1: c_nvmlGpmSample_t
    sample2: c_nvmlGpmSample_t
    metrics: list[_GpmMetric]

class c_nvmlGpuInstancePlacement_t(ctypes.Structure):
    start: int
    size: int
    def __init__(self, *, start: int = ..., size: int = ...) -> None: ...

class _GpuInstanceProfileInfo:
    id: int
    sliceCount: int
    instanceCount: int
    multiprocessorCount: int
    decoderCount: int
    encoderCount: int
    jpegCount: int
    ofaCount: int
    memorySizeMB: int
    name: str

class _ComputeInstanceProfileInfo:
    id: int
    sliceCount: int
    instanceCount: int

class _GpuInstanceInfo:
    id: int
    profileId: int
    placement: c_nvmlGpuInstancePlacement_t

class _ComputeInstanceInfo:
    id: int
    profileId: int

class _PciInfo:
    busId: str
    domain: int
    bus: int
    device: int
    pciDeviceId: int

class _Memory:
    total: int
    free: int
    used: int
    reserved: int

class _Utilization:
    gpu: int
    memory: int

class _Process:
    pid: int
    usedGpuMemory: int | None
    gpuInstanceId: int

class _ProcessSample:
    pid: int
    timeStamp: int
    smUtil: int

class _EventData:
    device: c_nvmlDevice_t
    eventType: int
    eventData: int
    gpuInstanceId: int

class c_nvmlSetMemoryLimits_v1_t:
    nameSpace: bytes
    softLimit: int
    hardLimit: int

class c_nvmlGetMemoryLimits_v1_t:
    nameSpace: bytes
    softLimit: int
    hardLimit: int
    currentUsed: int

class _Attributes:
    multiprocessorCount: int

NVML_DEVICE_MEMORY_LIMIT_MAX: int
NVML_NVLINK_MAX_LINKS: int
NVML_NVLINK_DEVICE_TYPE_GPU: int
NVML_NVLINK_DEVICE_TYPE_SWITCH: int
NVML_TEMPERATURE_GPU: int
NVML_SUCCESS: int
NVML_ERROR_UNINITIALIZED: int
NVML_ERROR_INVALID_ARGUMENT: int
NVML_ERROR_NOT_SUPPORTED: int
NVML_ERROR_NO_PERMISSION: int
NVML_ERROR_NOT_FOUND: int
NVML_ERROR_DRIVER_NOT_LOADED: int
NVML_ERROR_TIMEOUT: int
NVML_ERROR_IN_USE: int
NVML_ERROR_INSUFFICIENT_RESOURCES: int
NVML_GPU_INSTANCE_PROFILE_COUNT: int
NVML_COMPUTE_INSTANCE_PROFILE_COUNT: int
NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED: int
NVML_ERROR_LIBRARY_NOT_FOUND: int
NVML_ERROR_FUNCTION_NOT_FOUND: int
NVML_ERROR_GPU_IS_LOST: int
NVML_ERROR_RESET_REQUIRED: int
NVML_ERROR_LIB_RM_VERSION_MISMATCH: int
NVML_ERROR_GPU_NOT_FOUND: int
NVML_TOPOLOGY_INTERNAL: int
NVML_TOPOLOGY_SINGLE: int
NVML_TOPOLOGY_MULTIPLE: int
NVML_TOPOLOGY_HOSTBRIDGE: int
NVML_TOPOLOGY_NODE: int
NVML_TOPOLOGY_SYSTEM: int
nvmlMemory_v2: int
nvmlEventTypeXidCriticalError: int
nvmlEventTypeDoubleBitEccError: int
nvmlEventTypeSingleBitEccError: int

def nvmlInit() -> None: ...
def nvmlShutdown() -> None: ...
def nvmlErrorString(result: int) -> str: ...
def nvmlSystemGetDriverVersion() -> str: ...
def nvmlDeviceGetCount() -> int: ...
def nvmlDeviceGetHandleByIndex(index: int) -> c_nvmlDevice_t: ...
def nvmlDeviceGetHandleByUUID(uuid: bytes) -> c_nvmlDevice_t: ...
def nvmlDeviceGetUUID(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetName(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetSerial(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetMinorNumber(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetPciInfo(handle: c_nvmlDevice_t) -> _PciInfo: ...
def nvmlDeviceGetMemoryInfo(handle: c_nvmlDevice_t, version: int | None = ...) -> _Memory: ...
def nvmlDeviceGetCudaComputeCapability(handle: c_nvmlDevice_t) -> tuple[int, int]: ...
def nvmlDeviceGetAttributes(device: c_nvmlDevice_t) -> _Attributes: ...
def nvmlDeviceSetMemoryLimits_v1(
    device: c_nvmlDevice_t, limits: c_nvmlSetMemoryLimits_v1_t
) -> None: ...
def nvmlDeviceGetMemoryLimits_v1(
    device: c_nvmlDevice_t, limits: c_nvmlGetMemoryLimits_v1_t
) -> None: ...
def nvmlDeviceGetMigMode(device: c_nvmlDevice_t) -> list[int]: ...
def nvmlDeviceSetMigMode(device: c_nvmlDevice_t, mode: int) -> int: ...
def nvmlDeviceGetRemappedRows(device: c_nvmlDevice_t) -> tuple[int, int, int, int]: ...
def nvmlDeviceGetUtilizationRates(handle: c_nvmlDevice_t) -> _Utilization: ...
def nvmlDeviceGetTemperature(handle: c_nvmlDevice_t, sensor: int) -> int: ...
def nvmlDeviceGetPowerUsage(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetComputeRunningProcesses(handle: c_nvmlDevice_t) -> list[_Process]: ...
def nvmlDeviceGetGraphicsRunningProcesses_v3(handle: c_nvmlDevice_t) -> list[_Process]: ...
def nvmlDeviceGetProcessUtilization(
    handle: c_nvmlDevice_t,
    timeStamp: int,
) -> list[_ProcessSample]: ...
def nvmlDeviceGetTopologyCommonAncestor(
    device1: c_nvmlDevice_t, device2: c_nvmlDevice_t
) -> int: ...
def nvmlDeviceGetNvLinkState(device: c_nvmlDevice_t, link: int) -> int: ...
def nvmlDeviceGetNvLinkRemotePciInfo(device: c_nvmlDevice_t, link: int) -> _PciInfo: ...
def nvmlDeviceGetNvLinkRemoteDeviceType(handle: c_nvmlDevice_t, link: int) -> int: ...
def nvmlEventSetCreate() -> c_nvmlEventSet_t: ...
def nvmlDeviceGetSupportedEventTypes(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceRegisterEvents(
    handle: c_nvmlDevice_t,
    eventTypes: int,
    eventSet: c_nvmlEventSet_t,
) -> None: ...
def nvmlEventSetWait_v2(eventSet: c_nvmlEventSet_t, timeoutms: int) -> _EventData: ...
def nvmlEventSetFree(eventSet: c_nvmlEventSet_t) -> None: ...
def nvmlDeviceGetMaxMigDeviceCount(device: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetMigDeviceHandleByIndex(device: c_nvmlDevice_t, index: int) -> c_nvmlDevice_t: ...
def nvmlDeviceGetGpuInstanceId(device: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetComputeInstanceId(device: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetGpuInstanceProfileInfo(
    device: c_nvmlDevice_t, profile: int, version: int = ...
) -> _GpuInstanceProfileInfo: ...
def nvmlDeviceGetGpuInstancePossiblePlacements(
    device: c_nvmlDevice_t,
    profileId: int,
    placementsRef: ctypes.Array[c_nvmlGpuInstancePlacement_t],
    countRef: object,
) -> int: ...
def nvmlDeviceGetGpuInstances(
    device: c_nvmlDevice_t,
    profileId: int,
    gpuInstancesRef: ctypes.Array[c_nvmlGpuInstance_t],
    countRef: object,
) -> int: ...
def nvmlDeviceCreateGpuInstanceWithPlacement(
    device: c_nvmlDevice_t, profileId: int, placement: object
) -> c_nvmlGpuInstance_t: ...
def nvmlGpuInstanceGetInfo(gpuInstance: c_nvmlGpuInstance_t) -> _GpuInstanceInfo: ...
def nvmlGpuInstanceDestroy(gpuInstance: c_nvmlGpuInstance_t) -> int: ...
def nvmlGpuInstanceGetComputeInstanceProfileInfo(
    device: c_nvmlGpuInstance_t, profile: int, engProfile: int, version: int = ...
) -> _ComputeInstanceProfileInfo: ...
def nvmlGpuInstanceCreateComputeInstance(
    gpuInstance: c_nvmlGpuInstance_t, profileId: int
) -> c_nvmlComputeInstance_t: ...
def nvmlGpuInstanceGetComputeInstances(
    gpuInstance: c_nvmlGpuInstance_t,
    profileId: int,
    computeInstancesRef: ctypes.Array[c_nvmlComputeInstance_t],
    countRef: object,
) -> int: ...
def nvmlComputeInstanceGetInfo(
    computeInstance: c_nvmlComputeInstance_t,
) -> _ComputeInstanceInfo: ...
def nvmlComputeInstanceDestroy(computeInstance: c_nvmlComputeInstance_t) -> int: ...
def nvmlDeviceGetGpuInstanceRemainingCapacity(device: c_nvmlDevice_t, profileId: int) -> int: ...
def nvmlDeviceGetGpuInstanceById(
    device: c_nvmlDevice_t, gpuInstanceId: int
) -> c_nvmlGpuInstance_t: ...

NVML_GPM_METRICS_GET_VERSION: int
NVML_GPM_METRIC_GRAPHICS_UTIL: int
NVML_GPM_METRIC_DRAM_BW_UTIL: int
NVML_GPM_METRIC_PCIE_TX_PER_SEC: int
NVML_GPM_METRIC_PCIE_RX_PER_SEC: int

def nvmlGpmQueryDeviceSupport(device: c_nvmlDevice_t) -> _GpmSupport: ...
def nvmlGpmSampleAlloc() -> c_nvmlGpmSample_t: ...
def nvmlGpmSampleFree(gpmSample: c_nvmlGpmSample_t) -> None: ...
def nvmlGpmSampleGet(device: c_nvmlDevice_t, gpmSample: c_nvmlGpmSample_t) -> c_nvmlGpmSample_t: ...
def nvmlGpmMigSampleGet(
    device: c_nvmlDevice_t, gpuInstanceId: int, gpmSample: c_nvmlGpmSample_t
) -> c_nvmlGpmSample_t: ...
def nvmlGpmMetricsGet(metricsGet: c_nvmlGpmMetricsGet_t) -> c_nvmlGpmMetricsGet_t: ...
