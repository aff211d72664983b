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
#define TEXT_MOST (UINT64_C(64) << 20)
#define TEXT_PIECE 4096u /* a page or a part of one */
#define TEXT_WORD 64u
#define TEXT_HEAD 65536u /* no PTX has so much comment before it says what it is */
#define SECTIONS_MOST 65535u
#define ENTRIES_MOST 4096u
#define WRAPPER_MAGIC 0x466243b1u /* what the compiler puts around a fat binary */
#define FAT_MAGIC 0xba55ed50u
#define FAT_ELF 2u
#define FAT_ELF_TOO 16u

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

/* The driver chooses one of its images: the dearest counts, and the whole for its length. */
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

/* --- PTX: a text --- */

struct text {
    struct source source;
    uint64_t at; /* of the next character in the image */
    char piece[TEXT_PIECE];
    size_t length, next;
    bool has_ended;
};

/* 0: the end. Pieces do not cross pages, so that none is lost with one behind it that cannot be read. */
static int next_character(struct text *text)
{
    if (text->has_ended) return 0;
    if (text->next == text->length) {
        uint64_t place = text->source.file < 0 ? text->source.base + text->at : text->at;
        size_t want = TEXT_PIECE - (size_t)(place % TEXT_PIECE);
        text->next = text->length = 0;
        text->has_ended = text->at >= TEXT_MOST;
        while (want > 0 && !read_at(&text->source, text->at, text->piece, want))
            want = text->source.file < 0 ? 0 : want / 2;
        text->length = want;
        text->has_ended = text->has_ended || want == 0;
        if (text->has_ended) return 0;
    }
    int character = (unsigned char)text->piece[text->next++];
    text->at++;
    text->has_ended = character == 0;
    return character;
}

static bool is_blank(int character)
{
    return character == ' ' || character == '\t' || character == '\n' || character == '\r';
}

/* The next word of a statement: what stands between blanks, or one of the characters that end one. false: the end. */
static bool next_word(struct text *text, int *kept, char word[TEXT_WORD])
{
    size_t length = 0;
    int character = *kept ? *kept : next_character(text);
    *kept = 0;
    while (is_blank(character))
        character = next_character(text);
    for (; character > 0; character = next_character(text)) {
        bool alone = strchr("[]{};=,", character) != NULL;
        if (is_blank(character) || (alone && length > 0)) {
            *kept = character;
            break;
        }
        if (length < TEXT_WORD - 1) word[length++] = (char)character;
        if (alone) break;
    }
    word[length] = '\0';
    return length > 0;
}

/* Bytes of one element of a type such as .b8, .f64, .u32; 0: no type. */
static uint64_t type_bytes(const char *word)
{
    uint64_t bits = 0;
    if (word[0] != '.' || strchr("bsuf", word[1]) == NULL) return 0;
    for (const char *digit = word + 2; *digit >= '0' && *digit <= '9' && bits < 1000; digit++)
        bits = bits * 10 + (uint64_t)(*digit - '0');
    return bits % 8 == 0 && bits <= 128 ? bits / 8 : 0;
}

static uint64_t number_of(const char *word)
{
    uint64_t number = 0;
    for (; *word >= '0' && *word <= '9' && number <= SIZE_MOST; word++)
        number = number * 10 + (uint64_t)(*word - '0');
    return *word == '\0' ? number : 0;
}

/* The text after .global in a declaration, up to its end: `.align 4 .v2 .f32 name[10][20]`. */
static uint64_t variable_bytes(struct text *text, int *kept)
{
    char word[TEXT_WORD];
    uint64_t bytes = 0;
    uint64_t lanes = 1;
    bool in_size = false;
    while (next_word(text, kept, word) && strchr(";=,", word[0]) == NULL) {
        if (strcmp(word, ".v2") == 0) lanes = 2;
        if (strcmp(word, ".v4") == 0) lanes = 4;
        if (type_bytes(word) > 0) bytes = type_bytes(word) * lanes;
        if (in_size && word[0] != ']') bytes *= number_of(word);
        if (bytes > SIZE_MOST) return 0;
        in_size = word[0] == '[';
    }
    return bytes;
}

/* Comments stand for nothing in the words that count, but a declaration within one would: there is none that compilers
   write. */
static bool text_size(const struct source *source, bool is_lazy, struct module_size *size)
{
    struct text text = {.source = *source};
    char word[TEXT_WORD];
    int kept = 0;
    bool is_extern = false;
    bool is_visible = false;
    bool is_ptx = false;
    uint64_t data = 0;
    while (next_word(&text, &kept, word)) {
        is_ptx = is_ptx || strcmp(word, ".version") == 0;
        if (!is_ptx && text.at > TEXT_HEAD) return false;
        if (strcmp(word, ".global") == 0) {
            uint64_t bytes = variable_bytes(&text, &kept);
            if (!is_extern) data += bytes;
            if (!is_extern && is_visible) size->least += bytes;
            if (data > SIZE_MOST) return false;
        }
        if (strchr(";{}", word[0]) != NULL || strcmp(word, ".global") == 0) is_extern = is_visible = false;
        if (strcmp(word, ".extern") == 0) is_extern = true;
        if (strcmp(word, ".visible") == 0) is_visible = true;
    }
    if (!is_ptx) return false;
    size->likely = data + (is_lazy ? 0 : text.at);
    return true;
}

/* Images of which some must be unpacked first: the longest that they say they are then, and, if all are code for a device,
   of which it takes one, the shortest. */
static void packed_size(const struct source *source, struct module_size *size)
{
    struct fat_header header;
    uint64_t shortest = UINT64_MAX;
    if (!read_at(source, 0, &header, sizeof header) || header.content_bytes > SIZE_MOST) return;
    uint64_t end = header.header_bytes + header.content_bytes;
    uint64_t at = header.header_bytes;
    for (unsigned int i = 0; i < ENTRIES_MOST && at + sizeof(struct fat_entry) <= end; i++) {
        struct fat_entry entry;
        if (!read_at(source, at, &entry, sizeof entry) || entry.header_bytes < sizeof entry ||
            entry.content_bytes > end)
            return;
        uint64_t bytes = entry.unpacked_bytes > entry.content_bytes ? entry.unpacked_bytes : entry.content_bytes;
        if (bytes > SIZE_MOST || (entry.kind != FAT_ELF && entry.kind != FAT_ELF_TOO)) shortest = 0;
        if (bytes <= SIZE_MOST && bytes > size->likely) size->likely = bytes;
        if (bytes < shortest) shortest = bytes;
        at += entry.header_bytes + entry.content_bytes;
    }
    if (at == end && size->likely > 0) size->least = shortest;
}

static struct module_size size_of(struct source source, bool is_lazy)
{
    uint32_t magic;
    struct wrapper wrapper;
    struct size size;
    struct module_size found = {0};
    if (!read_at(&source, 0, &magic, sizeof magic)) return found;
    if (magic == WRAPPER_MAGIC && source.file < 0) {
        if (!read_at(&source, 0, &wrapper, sizeof wrapper)) return found;
        source.base = wrapper.content;
        if (!read_at(&source, 0, &magic, sizeof magic)) return found;
    }
    if (magic == FAT_MAGIC ? fat_size(&source, &size) : elf_size(&source, 0, &size)) {
        found.is_bound = true;
        found.likely = is_lazy ? size.data : size.length + size.zeros;
    } else if (magic == FAT_MAGIC) {
        if (!is_lazy) packed_size(&source, &found);
    } else if (!text_size(&source, is_lazy, &found))
        found = (struct module_size){0};
    return found;
}

struct module_size module_image_size(const void *image, bool is_lazy)
{
    int saved = errno;
    struct module_size found = {0};
    if (image) found = size_of((struct source){.base = (uintptr_t)image, .file = -1}, is_lazy);
    errno = saved;
    return found;
}

struct module_size module_file_size(const char *path, bool is_lazy)
{
    int saved = errno;
    struct module_size found = {0};
    int file = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (file >= 0) {
        found = size_of((struct source){.base = 0, .file = file}, is_lazy);
        close(file);
    }
    errno = saved;
    return found;
}
