/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every name of versions.def: what cuGetProcAddress hands out, and a body for those that nothing else defines.
 *
 * Locks taken here: none. Called with hooks active: no.
 */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

#define BODY(symbol)                                                                                                   \
    CUDA_API __attribute__((weak)) CUresult symbol(void);                                                              \
    CUDA_API __attribute__((weak)) CUresult symbol(void)                                                               \
    {                                                                                                                  \
        ENTER();                                                                                                       \
        return CUDA_ERROR_NOT_SUPPORTED;                                                                               \
    }

#define ONE(name, version, symbol) BODY(symbol)
#define TWO(name, version, symbol, per_thread) BODY(symbol) BODY(per_thread)
#define ALSO(name, version, symbol)
#include "versions.def"

struct form {
    const char *name;
    int version;
    CUresult (*symbol)(void);
    CUresult (*per_thread)(void);
};

static const struct form forms[] = {
#define ONE(name, version, symbol) {#name, version, symbol, NULL},
#define TWO(name, version, symbol, per_thread) {#name, version, symbol, per_thread},
#define ALSO(name, version, symbol) {#name, version, symbol, NULL},
#include "versions.def"
};

#define FORMS (sizeof forms / sizeof forms[0])

enum { FOUND = 0, NO_SYMBOL = 1, TOO_OLD = 2 };
enum { FLAG_LEGACY = 1, FLAG_PER_THREAD = 2 };

static bool find_symbol(const char *name, size_t length, void **out)
{
    static const struct {
        const char *name;
        CUresult (*symbol)(void);
    } symbols[] = {
#define ONE(name, version, symbol) {#symbol, symbol},
#define TWO(name, version, symbol, per_thread) {#symbol, symbol}, {#per_thread, per_thread},
#define ALSO(name, version, symbol)
#include "versions.def"
    };
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        if (strlen(symbols[i].name) == length && strncmp(symbols[i].name, name, length) == 0) {
            memcpy(out, &symbols[i].symbol, sizeof symbols[i].symbol);
            return true;
        }
    }
    return false;
}

static bool find_alias(const char *name, void **out)
{
    const char *at = getenv("FAKE_CUDA_ALIAS");
    size_t length = strlen(name);
    while (at != NULL && *at != '\0') {
        size_t word = strcspn(at, " ");
        if (word > length && strncmp(at, name, length) == 0 && at[length] == '=') {
            return find_symbol(at + length + 1, word - length - 1, out);
        }
        at += word + strspn(at + word, " ");
    }
    return false;
}

/* The first that is not before this name: versions.def is in the order of the names. */
static size_t first_form(const char *name)
{
    size_t low = 0;
    size_t high = FORMS;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (strcmp(forms[middle].name, name) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

CUresult fake_find_symbol(const char *name, void **out, int version, uint64_t flags, int *status)
{
    const struct form *best = NULL;
    bool exists = false;
    if (name == NULL || out == NULL || flags > FLAG_PER_THREAD) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = NULL;
    if (find_alias(name, out)) {
        return CUDA_SUCCESS;
    }
    for (size_t i = first_form(name); i < FORMS && strcmp(forms[i].name, name) == 0; i++) {
        if (forms[i].version <= fake.state.cuda_version) {
            exists = true;
            best = forms[i].version <= version ? &forms[i] : best;
        }
    }
    if (status != NULL) {
        *status = best != NULL ? FOUND : exists ? TOO_OLD : NO_SYMBOL;
    }
    if (best == NULL) {
        return CUDA_ERROR_NOT_FOUND;
    }
    CUresult (*symbol)(void) =
        (flags & FLAG_PER_THREAD) != 0 && best->per_thread != NULL ? best->per_thread : best->symbol;
    memcpy(out, &symbol, sizeof symbol); /* a function pointer as an object pointer, as this interface wants it */
    return CUDA_SUCCESS;
}
