/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the CUDA driver's binary interface that the fake serves: numbers, sizes and struct layouts only.
 *
 * Written apart from the limiter's own declarations on purpose: a mistake made on one side does not hide on the other.
 * Names follow the driver's, so that a reader can look them up. Pointers to opaque objects are typed by the fake.
 */
#ifndef FAKEDRV_DRIVER_ABI_H
#define FAKEDRV_DRIVER_ABI_H

#include <stddef.h>
#include <stdint.h>

#define CUDA_API __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemHandle;
typedef struct fake_context *CUcontext;
typedef struct fake_stream *CUstream;
typedef struct fake_mark *CUevent;
typedef struct fake_module *CUmodule;
typedef struct fake_function *CUfunction;
typedef struct fake_array *CUarray;
typedef struct fake_array *CUmipmappedArray;
typedef struct fake_pool *CUmemoryPool;
typedef struct fake_external *CUexternalMemory;
typedef struct fake_graph *CUgraph;
typedef struct fake_node *CUgraphNode;
typedef struct fake_exec *CUgraphExec;
typedef void (*CUhostFn)(void *);
typedef void (*CUstreamCallback)(CUstream stream, CUresult status, void *data);

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_MAP_FAILED = 205,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE = 216,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_FILE_NOT_FOUND = 301,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_UNKNOWN = 999
};

typedef struct {
    char bytes[16];
} CUuuid;

typedef struct {
    int type;
    int id;
} CUmemLocation;

enum { CU_MEM_LOCATION_DEVICE = 1, CU_MEM_LOCATION_HOST = 2, CU_MEM_LOCATION_HOST_NUMA = 3 };

typedef struct {
    int type;
    int handle_types;
    CUmemLocation location;
    void *win32;
    unsigned char flags[8];
} CUmemAllocationProp;
_Static_assert(sizeof(CUmemAllocationProp) == 32, "CUmemAllocationProp layout");

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct {
    int type;
    int handle_types;
    CUmemLocation location;
    void *win32;
    size_t max_size;
    unsigned short usage;
    unsigned char reserved[54];
} CUmemPoolProps;
_Static_assert(sizeof(CUmemPoolProps) == 88, "CUmemPoolProps layout");

enum {
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_USED_MEM_HIGH
};

typedef struct {
    size_t width;
    size_t height;
    int format;
    unsigned int channels;
} CUarrayDescriptor;
_Static_assert(sizeof(CUarrayDescriptor) == 24, "CUDA_ARRAY_DESCRIPTOR layout");

typedef struct {
    size_t width;
    size_t height;
    size_t depth;
    int format;
    unsigned int channels;
    unsigned int flags;
} CUarray3dDescriptor;
_Static_assert(sizeof(CUarray3dDescriptor) == 40, "CUDA_ARRAY3D_DESCRIPTOR layout");

enum { CUDA_ARRAY3D_LAYERED = 1, CUDA_ARRAY3D_CUBEMAP = 4, CUDA_ARRAY3D_SPARSE = 0x40, CUDA_ARRAY3D_DEFERRED = 0x80 };

typedef struct {
    size_t size;
    size_t alignment;
    unsigned int reserved[4];
} CUarrayMemoryRequirements;

typedef struct {
    unsigned int grid[3];
    unsigned int block[3];
    unsigned int shared_bytes;
    CUstream stream;
    void *attributes;
    unsigned int attribute_count;
} CUlaunchConfig;
_Static_assert(sizeof(CUlaunchConfig) == 56, "CUlaunchConfig layout");

typedef struct {
    CUfunction function;
    unsigned int grid[3];
    unsigned int block[3];
    unsigned int shared_bytes;
    CUstream stream;
    void **params;
} CUlaunchParams;
_Static_assert(sizeof(CUlaunchParams) == 56, "CUDA_LAUNCH_PARAMS layout");

/* Version 1 ends before `kernel`. */
typedef struct {
    CUfunction function;
    unsigned int grid[3];
    unsigned int block[3];
    unsigned int shared_bytes;
    void **params;
    void **extra;
    CUfunction kernel;
    CUcontext context;
} CUkernelNodeParams;
_Static_assert(offsetof(CUkernelNodeParams, kernel) == 56, "CUDA_KERNEL_NODE_PARAMS_v1 layout");
_Static_assert(sizeof(CUkernelNodeParams) == 72, "CUDA_KERNEL_NODE_PARAMS_v2 layout");

typedef struct {
    CUmemPoolProps properties;
    const CUmemAccessDesc *access;
    size_t access_count;
    size_t bytes;
    CUdeviceptr pointer;
} CUmemAllocNodeParams;
_Static_assert(sizeof(CUmemAllocNodeParams) == 120, "CUDA_MEM_ALLOC_NODE_PARAMS layout");

typedef struct {
    CUhostFn function;
    void *data;
} CUhostNodeParams;

typedef struct {
    int type;
    int reserved0[3];
    union {
        long long reserved1[29];
        CUkernelNodeParams kernel;
        CUhostNodeParams host;
        CUgraph graph;
        CUmemAllocNodeParams allocation;
        CUdeviceptr pointer;
    } as;
    long long reserved2;
} CUgraphNodeParams;
_Static_assert(sizeof(CUgraphNodeParams) == 256, "CUgraphNodeParams layout");

enum {
    CU_NODE_KERNEL = 0,
    CU_NODE_MEMCPY = 1,
    CU_NODE_MEMSET = 2,
    CU_NODE_HOST = 3,
    CU_NODE_GRAPH = 4,
    CU_NODE_EMPTY = 5,
    CU_NODE_WAIT_EVENT = 6,
    CU_NODE_EVENT_RECORD = 7,
    CU_NODE_MEM_ALLOC = 10,
    CU_NODE_MEM_FREE = 11
};

typedef struct {
    uint64_t flags;
    CUstream upload_stream;
    CUgraphNode error_node;
    int result;
} CUgraphInstantiateParams;

typedef struct {
    int type;
    union {
        int fd;
        struct {
            void *handle;
            const void *name;
        } win32;
    } handle;
    unsigned long long size;
    unsigned int flags;
    unsigned int reserved[16];
} CUexternalMemoryHandleDesc;
_Static_assert(sizeof(CUexternalMemoryHandleDesc) == 104, "CUDA_EXTERNAL_MEMORY_HANDLE_DESC layout");

typedef struct {
    unsigned long long offset;
    unsigned long long size;
    unsigned int flags;
    unsigned int reserved[16];
} CUexternalMemoryBufferDesc;

typedef struct {
    unsigned long long offset;
    CUarray3dDescriptor descriptor;
    unsigned int levels;
    unsigned int reserved[16];
} CUexternalMemoryMipmappedDesc;

typedef struct {
    char reserved[64];
} CUipcHandle;

typedef struct {
    unsigned int devices;
    size_t size;
    unsigned long long handle_types;
    unsigned long long flags;
} CUmulticastProp;

typedef struct {
    unsigned int timeout_ms;
    unsigned int reserved0;
    uint64_t reserved1[7];
} CUcheckpointLockArgs;
_Static_assert(sizeof(CUcheckpointLockArgs) == 64, "CUcheckpointLockArgs layout");

typedef struct {
    void *custom_storage;
    char reserved[56];
} CUcheckpointCheckpointArgs;
_Static_assert(sizeof(CUcheckpointCheckpointArgs) == 64, "CUcheckpointCheckpointArgs layout");

typedef struct {
    const void *pairs;
    unsigned int pair_count;
    unsigned int padding;
    void *custom_storage;
    char reserved[40];
} CUcheckpointRestoreArgs;
_Static_assert(sizeof(CUcheckpointRestoreArgs) == 64, "CUcheckpointRestoreArgs layout");

#define CU_STREAM_LEGACY ((CUstream)1)
#define CU_STREAM_PER_THREAD ((CUstream)2)

#endif
