/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks: arrays and mipmapped arrays. The driver says nothing of their size, so it is computed from the descriptor.
 *
 * Rows and tiles are rounded up by the driver in ways that it does not describe; what is charged is the texels, whole
 * blocks of compressed formats, all planes of video formats, all layers, faces and levels.
 * Sparse and deferred arrays hold no memory of their own: theirs is made by cuMemCreate.
 */
#include "memory_array.h"

#include <stddef.h>

#include "context.h"
#include "hook.h"

static struct table arrays;

/* Texels of `width` x `height` take `bytes`; `per_channel`: times the descriptor's number of channels. */
struct format {
    uint16_t value;
    uint8_t bytes;
    uint8_t width;
    uint8_t height;
    bool per_channel;
};

static const struct format formats[] = {
    {0x01, 1, 1, 1, true}, /* unsigned, signed, half, float */
    {0x02, 2, 1, 1, true},   {0x03, 4, 1, 1, true},   {0x08, 1, 1, 1, true},
    {0x09, 2, 1, 1, true},   {0x0a, 4, 1, 1, true},   {0x10, 2, 1, 1, true},
    {0x20, 4, 1, 1, true},   {0x50, 4, 1, 1, false}, /* 10:10:10:2 */
    {0x51, 2, 1, 1, false},                          /* packed 4:2:2, 4:4:4 */
    {0x52, 4, 1, 1, false},  {0x53, 6, 2, 2, false}, /* semi-planar 4:2:0, 4:2:2, 4:4:4, of 8 and 16 bits */
    {0x54, 12, 2, 2, false}, {0x55, 4, 2, 1, false},  {0x56, 8, 2, 1, false},
    {0x57, 3, 1, 1, false},  {0x58, 6, 1, 1, false},  {0x59, 6, 2, 2, false}, /* planar, likewise */
    {0x5a, 12, 2, 2, false}, {0x5b, 4, 2, 1, false},  {0x5c, 8, 2, 1, false},
    {0x5d, 3, 1, 1, false},  {0x5e, 6, 1, 1, false},  {0x91, 8, 4, 4, false}, /* BC1 */
    {0x92, 8, 4, 4, false},  {0x93, 16, 4, 4, false},                         /* BC2, BC3 */
    {0x94, 16, 4, 4, false}, {0x95, 16, 4, 4, false}, {0x96, 16, 4, 4, false},
    {0x97, 8, 4, 4, false},                           /* BC4 */
    {0x98, 8, 4, 4, false},  {0x99, 16, 4, 4, false}, /* BC5, BC6H, BC7 */
    {0x9a, 16, 4, 4, false}, {0x9b, 16, 4, 4, false}, {0x9c, 16, 4, 4, false},
    {0x9d, 16, 4, 4, false}, {0x9e, 16, 4, 4, false}, {0x9f, 12, 2, 2, false}, /* P010, P016 */
    {0xa1, 12, 2, 2, false}, {0xa2, 4, 2, 1, false},                           /* NV16, P210, P216 */
    {0xa3, 8, 2, 1, false},  {0xa4, 8, 2, 1, false},  {0xa5, 2, 1, 1, false},  /* YUY2, Y210, Y216 */
    {0xa6, 4, 1, 1, false},  {0xa7, 4, 1, 1, false},  {0xa8, 4, 1, 1, false},  /* AYUV, Y410 */
    {0xa9, 4, 1, 1, false},  {0xb0, 6, 2, 2, false},                           /* NV12 */
    {0xb1, 8, 1, 1, false},                                                    /* Y416 */
    {0xb2, 3, 1, 1, false},                                                    /* planar and semi-planar 4:4:4 */
    {0xb3, 6, 1, 1, false},  {0xb4, 3, 1, 1, false},  {0xb5, 6, 1, 1, false},
    {0xc0, 1, 1, 1, false}, /* normalised, number of channels in the format */
    {0xc1, 2, 1, 1, false},  {0xc2, 4, 1, 1, false},  {0xc3, 2, 1, 1, false},
    {0xc4, 4, 1, 1, false},  {0xc5, 8, 1, 1, false},  {0xc6, 1, 1, 1, false},
    {0xc7, 2, 1, 1, false},  {0xc8, 4, 1, 1, false},  {0xc9, 2, 1, 1, false},
    {0xca, 4, 1, 1, false},  {0xcb, 8, 1, 1, false},
};

/* A format of a later CUDA is taken for the widest that there is. */
static const struct format unknown_format = {0, 4, 1, 1, true};

static const struct format *format_of(CUarray_format value)
{
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (formats[i].value == (unsigned int)value) return &formats[i];
    return &unknown_format;
}

static uint64_t at_least_one(uint64_t extent)
{
    return extent ? extent : 1;
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels)
{
    if (descriptor->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) return 0;
    const struct format *format = format_of(descriptor->Format);
    uint64_t texel = format->bytes * (format->per_channel ? (uint64_t)descriptor->NumChannels : 1);
    uint64_t width = descriptor->Width, height = at_least_one(descriptor->Height);
    uint64_t depth = at_least_one(descriptor->Depth);
    bool layered = descriptor->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    uint64_t total = 0;
    for (unsigned int level = 0; level < at_least_one(levels) && level < 64; level++) {
        uint64_t columns = (width + format->width - 1) / format->width;
        uint64_t rows = (height + format->height - 1) / format->height;
        uint64_t bytes;
        if (__builtin_mul_overflow(columns, rows, &bytes) || __builtin_mul_overflow(bytes, depth, &bytes) ||
            __builtin_mul_overflow(bytes, texel, &bytes) || __builtin_add_overflow(total, bytes, &total))
            return UINT64_MAX;
        width = at_least_one(width / 2);
        height = at_least_one(height / 2);
        if (!layered) depth = at_least_one(depth / 2);
    }
    return total;
}

/* Charge before the driver is asked; device -1: nothing to charge. */
static CUresult charge(uint64_t bytes, struct context_here *here)
{
    hook_enter();
    here->device = -1;
    if (!bytes || bytes > TABLE_BYTES_MAX || !context_here(here) || here->device < 0) {
        here->device = -1;
        return CUDA_SUCCESS;
    }
    return hook_charge(here->device, bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult settle(CUresult result, const void *array, uint64_t bytes, const struct context_here *here)
{
    if (here->device < 0) return result;
    if (result != CUDA_SUCCESS) {
        account_refund(here->device, bytes);
        return result;
    }
    struct held held = {.bytes = bytes & TABLE_BYTES_MAX, .device = (uint64_t)here->device & 0x3f, .tag = here->tag};
    hook_remember(&arrays, (uintptr_t)array, held);
    return result;
}

static uint64_t bytes_of(const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels, const void *out)
{
    return descriptor && out ? array_bytes(descriptor, levels) : 0;
}

static uint64_t bytes_of_flat(size_t width, size_t height, CUarray_format format, unsigned int channels)
{
    return array_bytes(
        &(CUDA_ARRAY3D_DESCRIPTOR){.Width = width, .Height = height, .Format = format, .NumChannels = channels}, 1);
}

HOOK_EXPORT CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *descriptor)
{
    struct context_here here;
    uint64_t bytes = descriptor && array ? bytes_of_flat(descriptor->Width, descriptor->Height, descriptor->Format,
                                                         descriptor->NumChannels)
                                         : 0;
    if (charge(bytes, &here) != CUDA_SUCCESS) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuArrayCreate_v2)(array, descriptor);
    return settle(result, result == CUDA_SUCCESS ? *array : NULL, bytes, &here);
}

HOOK_EXPORT CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *descriptor)
{
    struct context_here here;
    uint64_t bytes = descriptor && array ? bytes_of_flat(descriptor->Width, descriptor->Height, descriptor->Format,
                                                         descriptor->NumChannels)
                                         : 0;
    if (charge(bytes, &here) != CUDA_SUCCESS) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuArrayCreate)(array, descriptor);
    return settle(result, result == CUDA_SUCCESS ? *array : NULL, bytes, &here);
}

HOOK_EXPORT CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
    struct context_here here;
    uint64_t bytes = bytes_of(descriptor, 1, (const void *)array);
    if (charge(bytes, &here) != CUDA_SUCCESS) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuArray3DCreate_v2)(array, descriptor);
    return settle(result, result == CUDA_SUCCESS ? *array : NULL, bytes, &here);
}

HOOK_EXPORT CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor)
{
    struct context_here here;
    uint64_t bytes = 0;
    if (descriptor && array)
        bytes = array_bytes(&(CUDA_ARRAY3D_DESCRIPTOR){.Width = descriptor->Width,
                                                       .Height = descriptor->Height,
                                                       .Depth = descriptor->Depth,
                                                       .Format = descriptor->Format,
                                                       .NumChannels = descriptor->NumChannels,
                                                       .Flags = descriptor->Flags},
                            1);
    if (charge(bytes, &here) != CUDA_SUCCESS) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuArray3DCreate)(array, descriptor);
    return settle(result, result == CUDA_SUCCESS ? *array : NULL, bytes, &here);
}

HOOK_EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor,
                                            unsigned int levels)
{
    struct context_here here;
    uint64_t bytes = bytes_of(descriptor, levels, (const void *)array);
    if (charge(bytes, &here) != CUDA_SUCCESS) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = DRIVER(cuMipmappedArrayCreate)(array, descriptor, levels);
    return settle(result, result == CUDA_SUCCESS ? *array : NULL, bytes, &here);
}

static void freed(CUresult result, const void *array, bool known, struct held held)
{
    if (!known) return;
    if (result == CUDA_SUCCESS)
        account_refund((int)held.device, held.bytes);
    else
        hook_remember(&arrays, (uintptr_t)array, held);
}

HOOK_EXPORT CUresult cuArrayDestroy(CUarray array)
{
    struct held held = {0};
    hook_enter();
    bool known = table_take(&arrays, (uintptr_t)array, &held);
    CUresult result = DRIVER(cuArrayDestroy)(array);
    freed(result, array, known, held);
    return result;
}

HOOK_EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    struct held held = {0};
    hook_enter();
    bool known = table_take(&arrays, (uintptr_t)array, &held);
    CUresult result = DRIVER(cuMipmappedArrayDestroy)(array);
    freed(result, array, known, held);
    return result;
}

void memory_array_forget_context(const struct hook_context *ended)
{
    hook_forget_tag(&arrays, ended->tag, NULL);
}

void memory_array_reset(void)
{
    table_reset(&arrays);
}
