/* SPDX-License-Identifier: Apache-2.0 */
/* Physical memory behind handles, and memory imported from graphics. */
#ifndef VGPU_VMM_H
#define VGPU_VMM_H

void vmm_reset(void);

#endif
