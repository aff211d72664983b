/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of modules and libraries of code. */
#ifndef VGPU_MEMORY_MODULE_H
#define VGPU_MEMORY_MODULE_H

#include "hook.h"

void memory_module_reset(void);
void memory_module_forget_context(const struct hook_context *ended);

#endif
