/* SPDX-License-Identifier: Apache-2.0 */
#include "request.h"

#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS_LEAST = 3, WORDS_MOST = 4, LOCK_GRACE_MS = 2000 };

/* A copy of 140 GB takes minutes where the host is slow; a state is known only when the operation under way has ended. */
static const struct {
    const char *name;
    uint32_t deadline_ms;
} operations[] = {
    [OPERATION_LOCK] = {"lock", LOCK_GRACE_MS}, /* more than the timeout */
    [OPERATION_CHECKPOINT] = {"checkpoint", 600000}, [OPERATION_RESTORE] = {"restore", 600000},
    [OPERATION_UNLOCK] = {"unlock", 30000},          [OPERATION_STATE] = {"state", 60000},
};

static bool parse_number(const char *word, unsigned long most, unsigned long *number)
{
    char *end;
    if (word[0] < '0' || word[0] > '9') return false;
    errno = 0;
    *number = strtoul(word, &end, 10);
    return errno == 0 && *end == '\0' && *number > 0 && *number <= most;
}

static bool parse_operation(const char *word, enum operation *operation)
{
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        if (strcmp(word, operations[i].name) != 0) continue;
        *operation = (enum operation)i;
        return true;
    }
    return false;
}

bool request_parse(const char *text, struct request *request)
{
    char copy[REQUEST_TEXT];
    char *words[WORDS_MOST + 1] = {NULL};
    char *rest = NULL;
    size_t count = 0;
    unsigned long pid, milliseconds = 0;
    *request = (struct request){.id = "?"};
    if (strlen(text) >= sizeof copy) return false;
    memcpy(copy, text, strlen(text) + 1);
    for (char *word = strtok_r(copy, " \n", &rest); word && count <= WORDS_MOST; word = strtok_r(NULL, " \n", &rest))
        words[count++] = word;
    if (count == 0 || strlen(words[0]) >= sizeof request->id) return false;
    memcpy(request->id, words[0], strlen(words[0]) + 1);
    if (count < WORDS_LEAST || count > WORDS_MOST || !parse_operation(words[1], &request->operation) ||
        !parse_number(words[2], INT_MAX, &pid))
        return false;
    bool has_number = count == WORDS_MOST;
    if (has_number && !parse_number(words[3], UINT32_MAX - LOCK_GRACE_MS, &milliseconds)) return false;
    if (request->operation == OPERATION_LOCK && !has_number) return false;
    request->pid = (int)pid;
    request->deadline_ms = operations[request->operation].deadline_ms;
    if (request->operation == OPERATION_LOCK) {
        request->timeout_ms = (uint32_t)milliseconds;
        request->deadline_ms += request->timeout_ms;
    } else if (has_number) {
        request->deadline_ms = (uint32_t)milliseconds;
    }
    return true;
}
