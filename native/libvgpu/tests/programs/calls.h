/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver calls that test programs make, and the three ways in which real programs reach them.
 *
 * X(symbol, name for cuGetProcAddress, its version, parameters). `calls_resolve` fills `cu` with pointers: those the
 * program was linked to, those dlsym finds, or those cuGetProcAddress hands out.
 */
#ifndef PROGRAMS_CALLS_H
#define PROGRAMS_CALLS_H

#include "../fakedrv/driver_abi.h"

#include <stdbool.h>

/* clang-format off */
#define CALLS(X) \
    X(cuInit, cuInit, 2000, (unsigned int flags)) \
    X(cuDriverGetVersion, cuDriverGetVersion, 2020, (int *version)) \
    X(cuDeviceGetCount, cuDeviceGetCount, 2000, (int *count)) \
    X(cuDeviceGet, cuDeviceGet, 2000, (CUdevice *device, int ordinal)) \
    X(cuDeviceTotalMem_v2, cuDeviceTotalMem, 3020, (size_t *bytes, CUdevice device)) \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, (CUcontext *out, CUdevice device)) \
    X(cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRelease, 11000, (CUdevice device)) \
    X(cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxReset, 11000, (CUdevice device)) \
    X(cuCtxCreate_v2, cuCtxCreate, 3020, (CUcontext *out, unsigned int flags, CUdevice device)) \
    X(cuCtxDestroy_v2, cuCtxDestroy, 4000, (CUcontext context)) \
    X(cuCtxSetCurrent, cuCtxSetCurrent, 4000, (CUcontext context)) \
    X(cuCtxSynchronize, cuCtxSynchronize, 2000, (void)) \
    X(cuMemGetInfo_v2, cuMemGetInfo, 3020, (size_t *free_bytes, size_t *total)) \
    X(cuMemAlloc_v2, cuMemAlloc, 3020, (CUdeviceptr *out, size_t bytes)) \
    X(cuMemAllocManaged, cuMemAllocManaged, 6000, (CUdeviceptr *out, size_t bytes, unsigned int flags)) \
    X(cuMemAllocPitch_v2, cuMemAllocPitch, 3020, (CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element)) \
    X(cuMemFree_v2, cuMemFree, 3020, (CUdeviceptr pointer)) \
    X(cuMemcpyHtoD_v2, cuMemcpyHtoD, 3020, (CUdeviceptr to, const void *from, size_t bytes)) \
    X(cuMemcpyDtoH_v2, cuMemcpyDtoH, 3020, (void *to, CUdeviceptr from, size_t bytes)) \
    X(cuIpcGetMemHandle, cuIpcGetMemHandle, 4010, (CUipcHandle *handle, CUdeviceptr pointer)) \
    X(cuMemAllocAsync, cuMemAllocAsync, 11020, (CUdeviceptr *out, size_t bytes, CUstream stream)) \
    X(cuMemFreeAsync, cuMemFreeAsync, 11020, (CUdeviceptr pointer, CUstream stream)) \
    X(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, 11020, (CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)) \
    X(cuMemPoolCreate, cuMemPoolCreate, 11020, (CUmemoryPool *out, const CUmemPoolProps *properties)) \
    X(cuMemPoolDestroy, cuMemPoolDestroy, 11020, (CUmemoryPool pool)) \
    X(cuMemPoolTrimTo, cuMemPoolTrimTo, 11020, (CUmemoryPool pool, size_t keep)) \
    X(cuMemPoolSetAttribute, cuMemPoolSetAttribute, 11020, (CUmemoryPool pool, int attribute, void *value)) \
    X(cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, 11020, (CUmemoryPool *out, CUdevice device)) \
    X(cuMemCreate, cuMemCreate, 10020, (CUmemHandle *out, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags)) \
    X(cuMemRelease, cuMemRelease, 10020, (CUmemHandle handle)) \
    X(cuMemAddressReserve, cuMemAddressReserve, 10020, (CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags)) \
    X(cuMemAddressFree, cuMemAddressFree, 10020, (CUdeviceptr pointer, size_t bytes)) \
    X(cuMemMap, cuMemMap, 10020, (CUdeviceptr pointer, size_t bytes, size_t offset, CUmemHandle handle, unsigned long long flags)) \
    X(cuMemUnmap, cuMemUnmap, 10020, (CUdeviceptr pointer, size_t bytes)) \
    X(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000, (CUmemHandle *out, void *address)) \
    X(cuArray3DCreate_v2, cuArray3DCreate, 3020, (CUarray *out, const CUarray3dDescriptor *descriptor)) \
    X(cuArrayDestroy, cuArrayDestroy, 2000, (CUarray array)) \
    X(cuMipmappedArrayCreate, cuMipmappedArrayCreate, 5000, (CUmipmappedArray *out, const CUarray3dDescriptor *descriptor, unsigned int levels)) \
    X(cuMipmappedArrayDestroy, cuMipmappedArrayDestroy, 5000, (CUmipmappedArray array)) \
    X(cuModuleLoadData, cuModuleLoadData, 2000, (CUmodule *out, const void *image)) \
    X(cuModuleUnload, cuModuleUnload, 2000, (CUmodule module)) \
    X(cuModuleGetFunction, cuModuleGetFunction, 2000, (CUfunction *out, CUmodule module, const char *name)) \
    X(cuStreamCreate, cuStreamCreate, 2000, (CUstream *out, unsigned int flags)) \
    X(cuStreamDestroy_v2, cuStreamDestroy, 4000, (CUstream stream)) \
    X(cuStreamSynchronize, cuStreamSynchronize, 2000, (CUstream stream)) \
    X(cuStreamBeginCapture_v2, cuStreamBeginCapture, 10010, (CUstream stream, int mode)) \
    X(cuStreamEndCapture, cuStreamEndCapture, 10000, (CUstream stream, CUgraph *out)) \
    X(cuEventCreate, cuEventCreate, 2000, (CUevent *out, unsigned int flags)) \
    X(cuEventRecord, cuEventRecord, 2000, (CUevent event, CUstream stream)) \
    X(cuEventSynchronize, cuEventSynchronize, 2000, (CUevent event)) \
    X(cuEventElapsedTime, cuEventElapsedTime, 2000, (float *ms, CUevent start, CUevent end)) \
    X(cuLaunchKernel, cuLaunchKernel, 4000, (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared_bytes, CUstream stream, void **params, void **extra)) \
    X(cuLaunchKernelEx, cuLaunchKernelEx, 11060, (const CUlaunchConfig *config, CUfunction function, void **params, void **extra)) \
    X(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel, 9000, (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared_bytes, CUstream stream, void **params)) \
    X(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, 11040, (CUgraphExec *out, CUgraph graph, unsigned long long flags)) \
    X(cuGraphLaunch, cuGraphLaunch, 10000, (CUgraphExec exec, CUstream stream)) \
    X(cuGraphExecDestroy, cuGraphExecDestroy, 10000, (CUgraphExec exec)) \
    X(cuGraphDestroy, cuGraphDestroy, 10000, (CUgraph graph)) \
    X(cuGraphCreate, cuGraphCreate, 10000, (CUgraph *out, unsigned int flags)) \
    X(cuGraphAddMemAllocNode, cuGraphAddMemAllocNode, 11040, (CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUmemAllocNodeParams *params)) \
    X(cuGraphAddMemFreeNode, cuGraphAddMemFreeNode, 11040, (CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUdeviceptr pointer)) \
    X(cuDeviceGraphMemTrim, cuDeviceGraphMemTrim, 11040, (CUdevice device))
/* clang-format on */

struct calls {
#define FIELD(symbol, name, version, parameters) CUresult(*symbol) parameters;
    CALLS(FIELD)
#undef FIELD
};

extern struct calls cu;

/* `way`: "link", "dlsym" or "proc". false: the name of what was not found is on stderr. */
bool calls_resolve(const char *way);

#endif
