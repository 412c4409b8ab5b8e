/*
 * replay.c - a fuzz target without libFuzzer: runs every file of the given folders, then mutates
 * them at random with the target's own mutator. Any compiler builds it, so the default tests do.
 *
 *     replay [--rounds N] [--seed S] FOLDER_OR_FILE...
 */
#include "tl_test.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

enum { MAX_FILES = 4096, MAX_SIZE = 4096 };

static struct {
    uint8_t *data;
    size_t size;
} g_file[MAX_FILES];
static uint32_t g_n_files;
static uint64_t g_rng = 1;

/* Some changes of the kinds that libFuzzer makes: flip, set, insert, erase, copy. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size) {
    for (uint32_t k = 1 + tl_test_below(&g_rng, 3); k > 0; k--) {
        static const uint8_t edges[] = {0, 1, 2, 0x7F, 0x80, 0xFF};
        const uint32_t at = size ? tl_test_below(&g_rng, (uint32_t)size) : 0;
        switch (tl_test_below(&g_rng, 5)) {
        case 0:
            if (size)
                data[at] ^= (uint8_t)(1u << tl_test_below(&g_rng, 8));
            break;
        case 1:
            if (size)
                data[at] = edges[tl_test_below(&g_rng, 6)];
            break;
        case 2:
            if (size < max_size) {
                memmove(data + at + 1, data + at, size - at);
                data[at] = (uint8_t)tl_test_rand(&g_rng);
                size++;
            }
            break;
        case 3:
            if (size) {
                const uint32_t n = 1 + tl_test_below(&g_rng, (uint32_t)size - at);
                memmove(data + at, data + at + n, size - at - n);
                size -= n;
            }
            break;
        default:
            if (size) {
                const uint32_t from = tl_test_below(&g_rng, (uint32_t)size);
                const size_t room = size - (at > from ? at : from);
                memmove(data + at, data + from, room < 8 ? room : 8);
            }
        }
    }
    return size;
}

static void load_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f || g_n_files == MAX_FILES) {
        fprintf(stderr, "replay: cannot read %s\n", path);
        exit(2);
    }
    uint8_t *data = malloc(MAX_SIZE);
    g_file[g_n_files].data = data;
    g_file[g_n_files++].size = fread(data, 1, MAX_SIZE, f);
    fclose(f);
}

static void load(const char *path) {
    DIR *d = opendir(path);
    if (!d) {
        load_file(path);
        return;
    }
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        char name[4096];
        if (e->d_name[0] == '.')
            continue;
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        load_file(name);
    }
    closedir(d);
}

int main(int argc, char **argv) {
    unsigned long rounds = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            rounds = strtoul(argv[++i], NULL, 0);
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            g_rng = strtoull(argv[++i], NULL, 0);
        else
            load(argv[i]);
    }
    if (g_n_files == 0) {
        fprintf(stderr, "usage: %s [--rounds N] [--seed S] FOLDER_OR_FILE...\n", argv[0]);
        return 2;
    }
    for (uint32_t i = 0; i < g_n_files; i++) {
        /* A copy that ends where the input ends, for the sanitizer. */
        uint8_t *exact = malloc(g_file[i].size ? g_file[i].size : 1);
        memcpy(exact, g_file[i].data, g_file[i].size);
        LLVMFuzzerTestOneInput(exact, g_file[i].size);
        free(exact);
    }
    for (unsigned long r = 0; r < rounds; r++) {
        const uint32_t i = tl_test_below(&g_rng, g_n_files);
        uint8_t buf[MAX_SIZE];
        size_t size = g_file[i].size;
        memcpy(buf, g_file[i].data, size);
        for (uint32_t k = 1 + tl_test_below(&g_rng, 3); k > 0; k--)
            size = LLVMFuzzerCustomMutator(buf, size, MAX_SIZE, (unsigned)tl_test_rand(&g_rng));
        uint8_t *exact = malloc(size ? size : 1);
        memcpy(exact, buf, size);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    printf("%u files, %lu mutations\n", g_n_files, rounds);
    for (uint32_t i = 0; i < g_n_files; i++)
        free(g_file[i].data);
    return 0;
}
