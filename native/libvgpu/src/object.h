/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loaded ELF objects and the functions that they define, read from the loader's list and their symbol tables.
 *
 * Calls neither dlsym, which this library answers itself, nor malloc, which may be setting itself up. Sanitizers and other
 * interceptors replace functions of libc and look up the originals through dlsym first: what dlsym needs is written without
 * any function of libc. Objects are named by their SONAME, in any directory. Locks taken here: the loader's.
 */
#ifndef VGPU_OBJECT_H
#define VGPU_OBJECT_H

#include <link.h>
#include <stdbool.h>
#include <stdint.h>

struct object {
    uintptr_t base;
    const char *path;
    const ElfW(Sym) * symbols;
    const char *strings;
    const uint32_t *gnu_hash;
    const uint32_t *hash;
    const ElfW(Versym) * versions;
    const char *soname;
};

/* strcmp without libc. */
static inline int object_compare(const char *left, const char *right)
{
    while (*left && *left == *right) {
        left++;
        right++;
    }
    return (unsigned char)*left - (unsigned char)*right;
}

/* Find the loaded object of this SONAME. */
bool object_find(const char *soname, struct object *object);

/* The object of this SONAME holds the address. */
bool object_holds(const char *soname, const void *address);

/* The default version of a function that the object defines; NULL if it defines none. */
void *object_function(const struct object *object, const char *name);

/* The function that RTLD_NEXT names for code at `caller`: the first definition in an object after the caller's. */
void *object_next(const void *caller, const char *name);

/* A function of libc, libdl or libpthread by its default version, NULL if none of them has it. */
void *object_libc(const char *name);

#endif
