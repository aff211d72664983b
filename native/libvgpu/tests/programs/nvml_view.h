/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVML's view of the n-th device that CUDA_VISIBLE_DEVICES names (by UUID) or, without it, of device n.
 *
 * NVML is loaded at the first call, as nvidia-smi does. Results are nvmlReturn_t; 12: there is no NVML.
 */
#ifndef PROGRAMS_NVML_VIEW_H
#define PROGRAMS_NVML_VIEW_H

struct view_memory {
    unsigned long long total, used, free;       /* version 1 */
    unsigned long long total_2, used_2, free_2; /* version 2 */
};

struct view_process {
    unsigned int pid;
    unsigned long long bytes;
    unsigned int gpu_instance;
    unsigned int compute_instance;
};

int view_memory(int device, struct view_memory *out);
int view_processes(int device, struct view_process *list, unsigned int *count);

#endif
