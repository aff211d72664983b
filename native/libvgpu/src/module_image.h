/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much device memory an image of code can take, from its own headers, before the driver is called.
 *
 * A bound is known of ELF images and of fat binaries of uncompressed ELF images: no more than the file and its zero-filled
 * sections. Of what the driver still compiles (PTX) or unpacks there is none, but what the image declares: PTX the sizes of
 * its variables in global memory, and its text about the size of its code; a packed image its unpacked length, by which an
 * unpacked one is measured, too. Reads no further than it can: a pointer to nothing, a header of garbage and a file that is not there are answered by "not known",
 * and the driver says what is wrong with them.
 */
#ifndef VGPU_MODULE_IMAGE_H
#define VGPU_MODULE_IMAGE_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes of device memory. */
struct module_size {
    bool is_bound;   /* it takes no more than `likely` */
    uint64_t likely; /* 0: nothing is known */
    uint64_t least;  /* of that: variables that it declares for others to see, the shortest of packed images */
};

/* `is_lazy`: code comes later, when it is first called, so only data counts. */
struct module_size module_image_size(const void *image, bool is_lazy);
struct module_size module_file_size(const char *path, bool is_lazy);

#endif
