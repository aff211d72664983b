/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays and mipmapped arrays. */
#ifndef VGPU_MEMORY_ARRAY_H
#define VGPU_MEMORY_ARRAY_H

#include "hook.h"

void memory_array_reset(void);
void memory_array_forget_context(const struct hook_context *ended);

#endif
