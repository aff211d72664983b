/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much device memory an image of code can take, from what it says of itself before the driver is asked.
 *
 * Known of ELF images and of fat binaries of uncompressed ELF images: no more than the file and its zero-filled sections.
 * Not known of what the driver still compiles (PTX) or unpacks. Reads no further than it can: a pointer to nothing, a
 * header of garbage and a file that is not there are answered by "not known", and the driver says what is wrong with them.
 */
#ifndef VGPU_MODULE_IMAGE_H
#define VGPU_MODULE_IMAGE_H

#include <stdbool.h>
#include <stdint.h>

/* `is_lazy`: code comes later, when it is first called, so only data counts. false: not known. */
bool module_image_bound(const void *image, bool is_lazy, uint64_t *bytes);
bool module_file_bound(const char *path, bool is_lazy, uint64_t *bytes);

#endif
