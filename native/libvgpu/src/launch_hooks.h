/* SPDX-License-Identifier: Apache-2.0 */
/* Whether launches of this process are held to anything: a compute limit, or a priority below the highest. */
#ifndef VGPU_LAUNCH_HOOKS_H
#define VGPU_LAUNCH_HOOKS_H

#include <stdbool.h>

bool launch_is_limited(void);

/* The driver has waited for the device: see what samples have ended. */
void launch_settle(void);

/* A new process image: see again whether there is a priority page. */
void launch_reset(void);

#endif
