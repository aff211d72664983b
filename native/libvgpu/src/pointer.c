/* SPDX-License-Identifier: Apache-2.0 */
/* See pointer.h. Locks taken here: those of the table. */
#include "pointer.h"

#include <stdlib.h>
#include <string.h>

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

/* Where the node oversubscribes device memory. A tenant who sets this gains only slow memory: the limit does not change.
   Read only when the card is full. */
bool pointer_may_spill(int device)
{
    const char *wanted = getenv("CUDA_OVERSUBSCRIBE");
    return device >= 0 && wanted && (strcmp(wanted, "true") == 0 || strcmp(wanted, "1") == 0);
}

CUresult pointer_spill(CUdeviceptr *pointer, uint64_t bytes, int device, CUresult result, enum pointer_kind *kind)
{
    if (result != CUDA_ERROR_OUT_OF_MEMORY || !pointer_may_spill(device)) return result;
    result = DRIVER(cuMemAllocManaged)(pointer, bytes, CU_MEM_ATTACH_GLOBAL);
    if (result == CUDA_SUCCESS) *kind = POINTER_MANAGED;
    return result;
}
