/* SPDX-License-Identifier: Apache-2.0 */
#include "object.h"

#include <elf.h>
#include <stddef.h>
#include <sys/auxv.h>

static bool is_same(const char *left, const char *right)
{
    return object_compare(left, right) == 0;
}

static const void *at(uintptr_t base, ElfW(Addr) value)
{
    /* The loader has added the base already; not so in objects that it did not map itself. */
    return (const void *)(value < base ? base + value : value);
}

static bool object_read(uintptr_t base, const char *path, const ElfW(Dyn) * dynamic, struct object *object)
{
    *object = (struct object){.base = base, .path = path};
    if (!dynamic) return false;
    ElfW(Addr) soname = 0;
    for (const ElfW(Dyn) *entry = dynamic; entry->d_tag != DT_NULL; entry++) {
        switch (entry->d_tag) {
        case DT_SYMTAB:
            object->symbols = at(object->base, entry->d_un.d_ptr);
            break;
        case DT_STRTAB:
            object->strings = at(object->base, entry->d_un.d_ptr);
            break;
        case DT_GNU_HASH:
            object->gnu_hash = at(object->base, entry->d_un.d_ptr);
            break;
        case DT_HASH:
            object->hash = at(object->base, entry->d_un.d_ptr);
            break;
        case DT_VERSYM:
            object->versions = at(object->base, entry->d_un.d_ptr);
            break;
        case DT_SONAME:
            soname = entry->d_un.d_val;
            break;
        default:
            break;
        }
    }
    if (!object->symbols || !object->strings) return false;
    object->soname = soname ? object->strings + soname : "";
    return true;
}

static bool object_of(const struct dl_phdr_info *info, struct object *object)
{
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    }
    return object_read(info->dlpi_addr, info->dlpi_name, dynamic, object);
}

static bool is_code(const struct object *object, uint32_t index, const char *name)
{
    const ElfW(Sym) *symbol = &object->symbols[index];
    int type = symbol->st_info & 0xf;
    if (symbol->st_shndx == SHN_UNDEF || (type != STT_FUNC && type != STT_GNU_IFUNC && type != STT_NOTYPE))
        return false;
    if (object->versions && (object->versions[index] & 0x8000)) return false; /* not the default version */
    return is_same(object->strings + symbol->st_name, name);
}

static uint32_t gnu_hash_of(const char *name)
{
    uint32_t hash = 5381;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        hash = hash * 33 + *c;
    return hash;
}

static uint32_t object_index(const struct object *object, const char *name)
{
    if (object->gnu_hash) {
        const uint32_t *table = object->gnu_hash;
        uint32_t bucket_count = table[0], first = table[1], bloom_words = table[2];
        const uint32_t *buckets = table + 4 + bloom_words * (sizeof(ElfW(Addr)) / 4);
        const uint32_t *chain = buckets + bucket_count;
        uint32_t hash = gnu_hash_of(name);
        uint32_t index = bucket_count ? buckets[hash % bucket_count] : 0;
        if (index < first) return 0;
        for (;; index++) {
            uint32_t word = chain[index - first];
            if ((word | 1) == (hash | 1) && is_code(object, index, name)) return index;
            if (word & 1) return 0;
        }
    }
    if (object->hash) {
        for (uint32_t index = 1; index < object->hash[1]; index++)
            if (is_code(object, index, name)) return index;
    }
    return 0;
}

void *object_function(const struct object *object, const char *name)
{
    uint32_t index = object_index(object, name);
    if (!index) return NULL;
    const ElfW(Sym) *symbol = &object->symbols[index];
    void *address = (void *)(object->base + symbol->st_value);
    if ((symbol->st_info & 0xf) == STT_GNU_IFUNC) return ((void *(*)(void))address)();
    return address;
}

static bool holds(const struct dl_phdr_info *info, uintptr_t address)
{
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        if (segment->p_type == PT_LOAD && address - info->dlpi_addr - segment->p_vaddr < segment->p_memsz) return true;
    }
    return false;
}

struct search {
    const char *soname;   /* the object of this name, or */
    uintptr_t address;    /* the one that holds this address, or */
    const char *function; /* (with `address`) the first after it that defines this */
    bool passed;
    bool found;
    struct object object;
    void *answer;
};

static int visit_named(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    struct search *search = data;
    if (!object_of(info, &search->object)) return 0;
    if (search->soname && !is_same(search->object.soname, search->soname)) return 0;
    if (search->address && !holds(info, search->address)) return 0;
    search->found = true;
    return 1;
}

static int visit_next(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    struct search *search = data;
    if (!search->passed) {
        search->passed = holds(info, search->address);
        return 0;
    }
    if (!object_of(info, &search->object)) return 0;
    search->answer = object_function(&search->object, search->function);
    return search->answer != NULL;
}

bool object_find(const char *soname, struct object *object)
{
    struct search search = {.soname = soname};
    dl_iterate_phdr(visit_named, &search);
    *object = search.object;
    return search.found;
}

bool object_holds(const char *soname, const void *address)
{
    struct search search = {.soname = soname, .address = (uintptr_t)address};
    dl_iterate_phdr(visit_named, &search);
    return search.found;
}

void *object_next(const void *caller, const char *name)
{
    struct search search = {.address = (uintptr_t)caller, .function = name};
    dl_iterate_phdr(visit_next, &search);
    return search.answer;
}

/* Head of the loader's list, as debuggers find it; NULL if this program was started in an unusual way. */
static const struct link_map *loaded_objects(void)
{
    const ElfW(Phdr) *headers = (const ElfW(Phdr) *)getauxval(AT_PHDR);
    uintptr_t count = getauxval(AT_PHNUM);
    uintptr_t base = 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (uintptr_t i = 0; headers && i < count; i++)
        if (headers[i].p_type == PT_PHDR) base = (uintptr_t)headers - headers[i].p_vaddr;
    for (uintptr_t i = 0; headers && i < count; i++)
        if (headers[i].p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn) *)(base + headers[i].p_vaddr);
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++)
        if (dynamic->d_tag == DT_DEBUG && dynamic->d_un.d_ptr)
            return ((const struct r_debug *)dynamic->d_un.d_ptr)->r_map;
    return NULL;
}

/* One that was loaded with the program and stays: it stands before all that comes and goes, so no lock is needed. */
static bool find_lasting(const char *soname, struct object *object)
{
    for (const struct link_map *map = loaded_objects(); map; map = map->l_next)
        if (object_read(map->l_addr, map->l_name, map->l_ld, object) && is_same(object->soname, soname)) return true;
    return false;
}

void *object_libc(const char *name)
{
    static const char *const homes[] = {"libc.so.6", "libdl.so.2", "libpthread.so.0"};
    for (size_t i = 0; i < sizeof homes / sizeof homes[0]; i++) {
        struct object object;
        bool found = find_lasting(homes[i], &object) || object_find(homes[i], &object);
        void *function = found ? object_function(&object, name) : NULL;
        if (function) return function;
    }
    return NULL;
}
