/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See resolve.h. Objects are recognised by their SONAME: libcuda.so.1 and libnvidia-ml.so.1, wherever they lie.
 *
 * The driver's functions are known by two addresses each, the one of its symbol table and the one that its
 * cuGetProcAddress hands out, because nothing promises that these are the same.
 * What dlsym needs is written without any function of libc, because sanitizers and other interceptors replace those and
 * look up their originals through dlsym first: comparing text is done here, and libc is found by the loader's own list.
 * Locks taken here: one per library, for the first call only. Called with hooks active: no hook is called from here.
 */
#include "resolve.h"

#include <elf.h>
#include <dlfcn.h>
#include <link.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/auxv.h>

#include "platform.h"

#define CUDA_SONAME "libcuda.so.1"
#define NVML_SONAME "libnvidia-ml.so.1"

/* As in <nvml.h>; not part of what the hooks need. */
#define NVML_ERROR_LIBRARY_NOT_FOUND ((nvmlReturn_t)12)

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

/* Functions that stand in for the driver's until it is found, and for those that it lacks. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define STAND_IN(result, name, parameters, arguments, find, absent, lacking)                                           \
    static result lacking_##name parameters                                                                            \
    {                                                                                                                  \
        return lacking;                                                                                                \
    }                                                                                                                  \
    static result unresolved_##name parameters                                                                         \
    {                                                                                                                  \
        return (find) ? DRIVER(name) arguments : absent;                                                               \
    }
#define CUDA_STAND_IN(result, name, parameters, arguments)                                                             \
    STAND_IN(result, name, parameters, arguments, resolve_driver(), CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,              \
             CUDA_ERROR_NOT_SUPPORTED)
#define NVML_STAND_IN(result, name, parameters, arguments)                                                             \
    STAND_IN(result, name, parameters, arguments, resolve_nvml(true), NVML_ERROR_LIBRARY_NOT_FOUND,                    \
             NVML_ERROR_FUNCTION_NOT_FOUND)
#define CUDA_HOOK(result, name, parameters, arguments, since, class, why)                                              \
    CUDA_STAND_IN(result, name, parameters, arguments)
#define CUDA_CALL(result, name, parameters, arguments, reason) CUDA_STAND_IN(result, name, parameters, arguments)
#define NVML_HOOK(result, name, parameters, arguments, class, why) NVML_STAND_IN(result, name, parameters, arguments)
#define NVML_CALL(result, name, parameters, arguments, reason) NVML_STAND_IN(result, name, parameters, arguments)
#include "symbols.def"
#pragma GCC diagnostic pop

struct row {
    const char *name;
    void *hook;
    void *lacking;
    int since; /* 0: of NVML, or only called */
    bool nvml;
};

static const struct row rows[SYMBOL_COUNT] = {
#define CUDA_HOOK(result, name, parameters, arguments, since, class, why)                                              \
    [SYMBOL_##name] = {#name, (void *)name, (void *)lacking_##name, since, false},
#define CUDA_CALL(result, name, parameters, arguments, reason)                                                         \
    [SYMBOL_##name] = {#name, NULL, (void *)lacking_##name, 0, false},
#define NVML_HOOK(result, name, parameters, arguments, class, why)                                                     \
    [SYMBOL_##name] = {#name, (void *)name, (void *)lacking_##name, 0, true},
#define NVML_CALL(result, name, parameters, arguments, reason)                                                         \
    [SYMBOL_##name] = {#name, NULL, (void *)lacking_##name, 0, true},
#include "symbols.def"
};

_Atomic(void *) symbol_pointers[SYMBOL_COUNT] = {
#define CUDA_HOOK(result, name, parameters, arguments, since, class, why) [SYMBOL_##name] = (void *)unresolved_##name,
#define CUDA_CALL(result, name, parameters, arguments, reason) [SYMBOL_##name] = (void *)unresolved_##name,
#define NVML_HOOK(result, name, parameters, arguments, class, why) [SYMBOL_##name] = (void *)unresolved_##name,
#define NVML_CALL(result, name, parameters, arguments, reason) [SYMBOL_##name] = (void *)unresolved_##name,
#include "symbols.def"
};

static _Atomic(void *) handed_out[SYMBOL_HOOKS]; /* by cuGetProcAddress, where that differs */

enum state { ABSENT, BUSY, READY };
static _Atomic(int) cuda_state;
static _Atomic(int) nvml_state;

/* --- text --- */

static int order_of(const char *left, const char *right)
{
    while (*left && *left == *right) {
        left++;
        right++;
    }
    return (unsigned char)*left - (unsigned char)*right;
}

static bool is_same(const char *left, const char *right)
{
    return order_of(left, right) == 0;
}

/* --- objects and their symbols --- */

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

static void *object_function(const struct object *object, const char *name)
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

static bool find_named(const char *soname, struct object *object)
{
    struct search search = {.soname = soname};
    dl_iterate_phdr(visit_named, &search);
    *object = search.object;
    return search.found;
}

void *resolve_next(const void *caller, const char *name)
{
    struct search search = {.address = (uintptr_t)caller, .function = name};
    dl_iterate_phdr(visit_next, &search);
    return search.answer;
}

/* Head of the loader's list, as it tells debuggers; NULL if this program was started in an unusual way. */
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

void *resolve_libc(const char *name)
{
    static const char *const homes[] = {"libc.so.6", "libdl.so.2", "libpthread.so.0"};
    for (size_t i = 0; i < sizeof homes / sizeof homes[0]; i++) {
        struct object object;
        bool found = find_lasting(homes[i], &object) || find_named(homes[i], &object);
        void *function = found ? object_function(&object, name) : NULL;
        if (function) return function;
    }
    return NULL;
}

/* --- the driver and NVML --- */

static const char *home_of(bool nvml)
{
    return nvml ? NVML_SONAME : CUDA_SONAME;
}

static void *open_object(const char *path, int flags)
{
    void *(*open)(const char *, int) = (void *(*)(const char *, int))resolve_libc("dlopen");
    return open ? open(path, flags) : NULL;
}

/* The object, loaded if that is wanted, and kept loaded from now on. */
static bool hold_object(bool nvml, bool load, struct object *object)
{
    const char *soname = home_of(nvml);
    bool found = find_named(soname, object);
    if (!found && !load) return false;
    void *handle = open_object(found && object->path && *object->path ? object->path : soname,
                               RTLD_LAZY | (found ? RTLD_NOLOAD : 0));
    if (!handle && !found) return false;
    return found || find_named(soname, object);
}

static void fill(const struct object *object, bool nvml)
{
    for (int i = 0; i < SYMBOL_COUNT; i++) {
        if (rows[i].nvml != nvml) continue;
        void *function = object_function(object, rows[i].name);
        atomic_store_explicit(&symbol_pointers[i], function ? function : rows[i].lacking, memory_order_relaxed);
    }
}

/* "cuGraphLaunch_ptsz" asks for cuGraphLaunch of the per-thread stream, "cuMemAlloc_v2" for cuMemAlloc. */
static cuuint64_t base_name(const char *name, char *base, size_t size)
{
    size_t length = strlen(name);
    cuuint64_t flags = CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    if (length > 5 && (strcmp(name + length - 5, "_ptsz") == 0 || strcmp(name + length - 5, "_ptds") == 0)) {
        length -= 5;
        flags = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    }
    if (length > 3 && name[length - 3] == '_' && name[length - 2] == 'v') length -= 3;
    if (length >= size) length = size - 1;
    memcpy(base, name, length);
    base[length] = '\0';
    return flags;
}

static void ask_driver(void)
{
    for (int i = 0; i < SYMBOL_HOOKS; i++) {
        if (!rows[i].since) continue;
        char base[64];
        cuuint64_t flags = base_name(rows[i].name, base, sizeof base);
        void *function = NULL;
        CUdriverProcAddressQueryResult status;
        CUresult result = DRIVER(cuGetProcAddress_v2)(base, &function, rows[i].since, flags, &status);
        if (result == CUDA_ERROR_NOT_SUPPORTED) /* a driver of CUDA 11 */
            result = DRIVER(cuGetProcAddress)(base, &function, rows[i].since, flags);
        if (result == CUDA_SUCCESS && function) atomic_store_explicit(&handed_out[i], function, memory_order_relaxed);
    }
}

/* For the limiter's own thread: as the program would find it, so that tools which watch threads see this one too. */
static void *as_program(const char *name)
{
    void *(*lookup)(void *, const char *) = (void *(*)(void *, const char *))resolve_libc("dlsym");
    void *function = lookup ? lookup(RTLD_DEFAULT, name) : NULL;
    return function ? function : resolve_libc(name);
}

static bool resolve(_Atomic(int) *state, bool nvml, bool load)
{
    int seen = atomic_load_explicit(state, memory_order_acquire);
    while (seen != READY) {
        if (seen == BUSY) {
            sched_yield();
            seen = atomic_load_explicit(state, memory_order_acquire);
            continue;
        }
        if (!atomic_compare_exchange_weak(state, &seen, BUSY)) continue;
        struct object object;
        bool found = hold_object(nvml, load, &object);
        if (found) fill(&object, nvml);
        if (found && !nvml) ask_driver();
        if (found) platform_use_resolver(as_program);
        atomic_store_explicit(state, found ? READY : ABSENT, memory_order_release);
        return found;
    }
    return true;
}

bool resolve_driver(void)
{
    return resolve(&cuda_state, false, true);
}

bool resolve_nvml(bool load)
{
    return resolve(&nvml_state, true, load);
}

/* --- hooks --- */

int resolve_hook_number(const char *name)
{
    if (!name || !((name[0] == 'c' && name[1] == 'u') || (name[0] == 'n' && name[1] == 'v'))) return -1;
    int low = 0, high = SYMBOL_HOOKS - 1;
    while (low <= high) {
        int middle = (low + high) / 2;
        int order = order_of(name, rows[middle].name);
        if (order == 0) return middle;
        if (order < 0)
            high = middle - 1;
        else
            low = middle + 1;
    }
    return -1;
}

void *resolve_hook(int number)
{
    return rows[number].hook;
}

bool resolve_is_native(int number, const void *function)
{
    struct search search = {.soname = home_of(rows[number].nvml), .address = (uintptr_t)function};
    dl_iterate_phdr(visit_named, &search);
    return search.found;
}

bool resolve_is_loaded(int number)
{
    struct object object;
    return find_named(home_of(rows[number].nvml), &object);
}

void *resolve_hook_of(void *function)
{
    for (int i = 0; i < SYMBOL_HOOKS; i++) {
        if (function == atomic_load_explicit(&symbol_pointers[i], memory_order_relaxed) ||
            function == atomic_load_explicit(&handed_out[i], memory_order_relaxed))
            return rows[i].hook;
    }
    return function;
}

HOOK_EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
    CUresult result = DRIVER(cuGetProcAddress)(name, function, version, flags);
    if (result == CUDA_SUCCESS && function && *function) *function = resolve_hook_of(*function);
    return result;
}

HOOK_EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                         CUdriverProcAddressQueryResult *status)
{
    CUresult result = DRIVER(cuGetProcAddress_v2)(name, function, version, flags, status);
    if (result == CUDA_SUCCESS && function && *function) *function = resolve_hook_of(*function);
    return result;
}
