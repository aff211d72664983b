/* SPDX-License-Identifier: Apache-2.0 */
/* See pointer.h. Locks taken here: those of the table. */
#include "pointer.h"

#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "gate.h"

struct table pointer_table;

void pointer_reset(void)
{
    table_reset(&pointer_table);
}

static bool is_of_context(const struct held *held, const void *tag)
{
    return held->kind != POINTER_POOLED && held->tag == *(const uint8_t *)tag;
}

static void refund(uint64_t key, const struct held *held, void *into)
{
    (void)key;
    (void)into;
    account_refund((int)held->device, held->bytes);
}

/* Memory of pools outlives a context; see pool_forget_context. */
void pointer_forget_context(const struct hook_context *ended)
{
    table_take_if(&pointer_table, is_of_context, &ended->tag, refund, NULL);
}

/* A tenant who sets the variable gains only slow memory: the limit does not change. Read only when the card is full. */
static bool is_oversubscribed(void)
{
    const char *wanted = getenv("CUDA_OVERSUBSCRIBE");
    return wanted && (strcmp(wanted, "true") == 0 || strcmp(wanted, "1") == 0);
}

/* Where it does not, managed memory takes device memory in full. */
static bool moves_pages(CUdevice cuda)
{
    int concurrent = 0;
    return DRIVER(cuDeviceGetAttribute)(&concurrent, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, cuda) ==
               CUDA_SUCCESS &&
           concurrent;
}

bool pointer_may_spill(int device, CUdevice cuda, uint64_t bytes)
{
    return device >= 0 && is_oversubscribed() && bytes <= account_limit(device) / 2 && moves_pages(cuda);
}

bool pointer_may_exceed(int device)
{
    int count = 0;
    if (!is_oversubscribed()) return false;
    if (DRIVER(cuDeviceGetCount)(&count) != CUDA_SUCCESS) return true;
    for (CUdevice cuda = 0; cuda < count; cuda++)
        if (device_limits(cuda) == device) return moves_pages(cuda);
    return true;
}

CUresult pointer_spill(CUdeviceptr *pointer, uint64_t bytes, const struct context_here *here, CUresult result,
                       enum pointer_kind *kind)
{
    if (result != CUDA_ERROR_OUT_OF_MEMORY || !pointer_may_spill(here->device, here->cuda, bytes)) return result;
    gate_bind();
    result = DRIVER(cuMemAllocManaged)(pointer, bytes, CU_MEM_ATTACH_GLOBAL);
    if (result == CUDA_SUCCESS) *kind = POINTER_MANAGED;
    return result;
}
