/* SPDX-License-Identifier: Apache-2.0 */
#include "module_image.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define SIZE_MOST (UINT64_C(1) << 40)
#define SECTIONS_MOST 65535u
#define ENTRIES_MOST 4096u
#define WRAPPER_MAGIC 0x466243b1u /* what the compiler puts around a fat binary */
#define FAT_MAGIC 0xba55ed50u
#define FAT_ELF 2u

struct wrapper {
    uint32_t magic;
    uint32_t version;
    uint64_t content;
};

struct fat_header {
    uint32_t magic;
    uint16_t version;
    uint16_t header_bytes;
    uint64_t content_bytes;
};

struct fat_entry {
    uint16_t kind;
    uint16_t attributes;
    uint32_t header_bytes;
    uint64_t content_bytes;
    uint32_t packed_bytes;
    uint8_t between[36];
    uint64_t unpacked_bytes;
};

_Static_assert(sizeof(struct fat_header) == 16, "header of a fat binary");
_Static_assert(offsetof(struct fat_entry, packed_bytes) == 16, "packed size");
_Static_assert(offsetof(struct fat_entry, unpacked_bytes) == 56, "unpacked size");

/* Where an image is: in this process's memory, or in a file. */
struct source {
    uint64_t base;
    int file; /* -1: memory */
};

struct size {
    uint64_t length; /* of the image itself */
    uint64_t zeros;  /* sections that take memory but nothing in the image */
    uint64_t data;   /* sections that are no code, zeros included */
};

static bool read_at(const struct source *source, uint64_t at, void *into, size_t bytes)
{
    if (source->file >= 0) return pread(source->file, into, bytes, (off_t)(source->base + at)) == (ssize_t)bytes;
    struct iovec to = {into, bytes};
    struct iovec from = {(void *)(uintptr_t)(source->base + at), bytes};
    return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == (ssize_t)bytes;
}

static void extend(uint64_t *length, uint64_t end)
{
    if (end > *length) *length = end;
}

static bool add_section(struct size *size, const Elf64_Shdr *section)
{
    if (section->sh_size > SIZE_MOST || section->sh_offset > SIZE_MOST || section->sh_addralign > SIZE_MOST)
        return false;
    if (section->sh_type != SHT_NOBITS) extend(&size->length, section->sh_offset + section->sh_size);
    if (!(section->sh_flags & SHF_ALLOC)) return true;
    uint64_t bytes = section->sh_size + section->sh_addralign;
    if (section->sh_type == SHT_NOBITS)
        size->zeros += bytes;
    else
        size->zeros += section->sh_addralign;
    if (!(section->sh_flags & SHF_EXECINSTR)) size->data += bytes;
    return true;
}

static bool elf_size(const struct source *source, uint64_t at, struct size *size)
{
    Elf64_Ehdr header;
    *size = (struct size){0};
    if (!read_at(source, at, &header, sizeof header) || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_shoff > SIZE_MOST || header.e_phoff > SIZE_MOST ||
        (header.e_shnum && header.e_shentsize != sizeof(Elf64_Shdr)))
        return false;
    size->length = header.e_shoff + (uint64_t)header.e_shnum * sizeof(Elf64_Shdr);
    extend(&size->length, header.e_phoff + (uint64_t)header.e_phnum * header.e_phentsize);
    for (unsigned int i = 0; i < header.e_shnum && i < SECTIONS_MOST; i++) {
        Elf64_Shdr section;
        if (!read_at(source, at + header.e_shoff + i * sizeof section, &section, sizeof section) ||
            !add_section(size, &section))
            return false;
    }
    return size->zeros <= SIZE_MOST;
}

/* Which of its images the driver takes is its own affair: the dearest counts, and the whole for its length. */
static bool fat_size(const struct source *source, struct size *size)
{
    struct fat_header header;
    if (!read_at(source, 0, &header, sizeof header) || header.content_bytes > SIZE_MOST) return false;
    uint64_t end = header.header_bytes + header.content_bytes;
    uint64_t at = header.header_bytes;
    *size = (struct size){.length = end};
    for (unsigned int i = 0; at + sizeof(struct fat_entry) <= end; i++) {
        struct fat_entry entry;
        struct size one;
        if (i == ENTRIES_MOST || !read_at(source, at, &entry, sizeof entry) || entry.kind != FAT_ELF ||
            entry.packed_bytes || entry.unpacked_bytes || entry.header_bytes < sizeof entry ||
            entry.content_bytes > end || !elf_size(source, at + entry.header_bytes, &one))
            return false;
        if (one.zeros > size->zeros) size->zeros = one.zeros;
        if (one.data > size->data) size->data = one.data;
        at += entry.header_bytes + entry.content_bytes;
    }
    return true;
}

static bool bound_of(struct source source, bool is_lazy, uint64_t *bytes)
{
    uint32_t magic;
    struct wrapper wrapper;
    struct size size;
    if (!read_at(&source, 0, &magic, sizeof magic)) return false;
    if (magic == WRAPPER_MAGIC && source.file < 0) {
        if (!read_at(&source, 0, &wrapper, sizeof wrapper)) return false;
        source.base = wrapper.content;
        if (!read_at(&source, 0, &magic, sizeof magic)) return false;
    }
    if (!(magic == FAT_MAGIC ? fat_size(&source, &size) : elf_size(&source, 0, &size))) return false;
    *bytes = is_lazy ? size.data : size.length + size.zeros;
    return true;
}

bool module_image_bound(const void *image, bool is_lazy, uint64_t *bytes)
{
    int saved = errno;
    bool known = image && bound_of((struct source){.base = (uintptr_t)image, .file = -1}, is_lazy, bytes);
    errno = saved;
    return known;
}

bool module_file_bound(const char *path, bool is_lazy, uint64_t *bytes)
{
    int saved = errno;
    int file = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    bool known = file >= 0 && bound_of((struct source){.base = 0, .file = file}, is_lazy, bytes);
    if (file >= 0) close(file);
    errno = saved;
    return known;
}
