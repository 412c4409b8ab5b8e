/*
 * driver.c - the parity driver over libtinyllm, through its public headers only; any other
 * implementation of tinyllm/kv_pool.h can be linked under it.
 *
 *     driver          one JSON case a line in, one {"hex": envelope} a line out
 *     driver --read   one JSON envelope a line in, one {"status": name} a line out
 *
 * The protocol is in conformance/README.md. A case is built as an engine builds a sequence: blocks
 * are taken, written through tl_kv_block_ptr, filled, the full ones registered under their chained
 * hash; then exported, imported into a second pool, and what that pool exports is the answer. Both
 * pools are dirty when they start: what earlier owners left must not show.
 *
 * The JSON reader takes what the protocol needs and nothing else: one flat object a line, strings
 * without escapes, unsigned integers, arrays of those. Anything else is an error, and the error
 * ends the program with exit code 2 and the column.
 */
#include "tinyllm/kv_pool.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- failing ------------------------------------------------------------------------------- */

static const char *g_text; /* the line being read */
static const char *g_at;   /* where in it */

_Noreturn static void die(const char *what) {
    fprintf(stderr, "driver: %s", what);
    if (g_at != NULL) {
        fprintf(stderr, " (column %td: %.20s)", g_at - g_text + 1, g_at);
    }
    fprintf(stderr, "\n");
    exit(2);
}

static void must(tl_status status, const char *call) {
    if (status != TL_OK) {
        fprintf(stderr, "driver: %s: %s (%s)\n", call, tl_status_str(status), tl_last_error());
        exit(1);
    }
}
#define MUST(call) must((call), #call)

static void *allocate(size_t n, size_t size) {
    void *p = calloc(n == 0 ? 1 : n, size);
    if (p == NULL) {
        die("out of memory");
    }
    return p;
}

/* ---- JSON ---------------------------------------------------------------------------------- */

static void skip_space(void) {
    while (*g_at == ' ' || *g_at == '\t' || *g_at == '\r' || *g_at == '\n') {
        g_at++;
    }
}

static int accept(char c) {
    skip_space();
    if (*g_at != c) {
        return 0;
    }
    g_at++;
    return 1;
}

static void expect(char c, const char *what) {
    if (!accept(c)) {
        die(what);
    }
}

/* A string of printable characters without escapes; *n is its length. */
static const char *parse_string(size_t *n) {
    expect('"', "expected a string");
    const char *start = g_at;
    while (*g_at != '"') {
        if (*g_at == '\\' || (unsigned char)*g_at < ' ') {
            die("expected a string without escapes");
        }
        g_at++;
    }
    *n = (size_t)(g_at++ - start);
    return start;
}

static uint64_t parse_uint(uint64_t max) {
    skip_space();
    if (!isdigit((unsigned char)*g_at) || (g_at[0] == '0' && isdigit((unsigned char)g_at[1]))) {
        die("expected an unsigned integer");
    }
    uint64_t x = 0;
    for (; isdigit((unsigned char)*g_at); g_at++) {
        const uint64_t digit = (uint64_t)(*g_at - '0');
        if (x > (max - digit) / 10) {
            die("the integer is too large here");
        }
        x = x * 10 + digit;
    }
    if (*g_at == '.' || *g_at == 'e' || *g_at == 'E') {
        die("expected an integer");
    }
    return x;
}

/* An array of integers 0..max, stored as uint32_t; freed by the caller. */
static uint32_t *parse_array(uint64_t max, size_t *n) {
    expect('[', "expected an array");
    size_t cap = 64;
    uint32_t *items = allocate(cap, sizeof *items);
    *n = 0;
    if (accept(']')) {
        return items;
    }
    do {
        if (*n == cap) {
            uint32_t *more = realloc(items, (cap *= 2) * sizeof *items);
            if (more == NULL) {
                die("out of memory");
            }
            items = more;
        }
        items[(*n)++] = (uint32_t)parse_uint(max);
    } while (accept(','));
    expect(']', "expected , or ]");
    return items;
}

static uint8_t *parse_hex(size_t *n_bytes) {
    size_t n;
    const char *s = parse_string(&n);
    if (n % 2 != 0) {
        die("hex digits come in pairs");
    }
    uint8_t *bytes = allocate(n / 2, 1);
    for (size_t i = 0; i < n; i++) {
        const char c = s[i];
        const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0) {
            die("expected lower-case hex digits");
        }
        bytes[i / 2] = (uint8_t)(bytes[i / 2] << 4 | digit);
    }
    *n_bytes = n / 2;
    return bytes;
}

enum {
    NAME = 1,
    BLOCK_TOKENS = 2,
    N_LAYERS = 4,
    N_KV_HEADS = 8,
    HEAD_DIM = 16,
    TOKENS = 32,
    VALUES = 64,
    N_BLOCKS = 128,
    HEX = 256
};
enum { SHAPE = BLOCK_TOKENS | N_LAYERS | N_KV_HEADS | HEAD_DIM };

typedef struct {
    int seen; /* the keys above */
    tl_kv_cfg cfg;
    uint32_t *tokens, *values;
    size_t n_tokens, n_values;
    uint8_t *envelope;
    size_t n_bytes;
} request;

static void parse_member(request *r) {
    static const struct {
        const char *key;
        int bit;
    } keys[] = {{"name", NAME},
                {"block_tokens", BLOCK_TOKENS},
                {"n_layers", N_LAYERS},
                {"n_kv_heads", N_KV_HEADS},
                {"head_dim", HEAD_DIM},
                {"tokens", TOKENS},
                {"values", VALUES},
                {"n_blocks", N_BLOCKS},
                {"hex", HEX}};
    size_t n;
    const char *key = parse_string(&n);
    int bit = 0;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (strlen(keys[i].key) == n && memcmp(keys[i].key, key, n) == 0) {
            bit = keys[i].bit;
        }
    }
    if (bit == 0 || (r->seen & bit) != 0) {
        die(bit == 0 ? "a key that no request has" : "a key for the second time");
    }
    r->seen |= bit;
    expect(':', "expected :");
    switch (bit) {
    case NAME:
        (void)parse_string(&n);
        break;
    case BLOCK_TOKENS:
        r->cfg.block_tokens = (uint32_t)parse_uint(UINT32_MAX);
        break;
    case N_LAYERS:
        r->cfg.n_layers = (uint32_t)parse_uint(UINT32_MAX);
        break;
    case N_KV_HEADS:
        r->cfg.n_kv_heads = (uint32_t)parse_uint(UINT32_MAX);
        break;
    case HEAD_DIM:
        r->cfg.head_dim = (uint32_t)parse_uint(UINT32_MAX);
        break;
    case N_BLOCKS:
        r->cfg.n_blocks = (uint32_t)parse_uint(UINT32_MAX);
        break;
    case TOKENS:
        r->tokens = parse_array(UINT32_MAX, &r->n_tokens);
        break;
    case VALUES:
        r->values = parse_array(UINT16_MAX, &r->n_values);
        break;
    default:
        r->envelope = parse_hex(&r->n_bytes);
    }
}

static request parse_request(const char *line, int need) {
    request r = {.cfg = {.dtype = TL_F16, .format = TL_KV_FORMAT_V1}};
    g_text = g_at = line;
    expect('{', "expected an object");
    do {
        parse_member(&r);
    } while (accept(','));
    expect('}', "expected , or }");
    skip_space();
    if (*g_at != '\0') {
        die("something after the object");
    }
    g_at = NULL;
    if ((r.seen & need) != need) {
        die("the request lacks a key");
    }
    return r;
}

/* ---- a case -------------------------------------------------------------------------------- */

/* A pool whose every byte was used before. */
static tl_kv_pool *dirty_pool(const tl_kv_cfg *cfg) {
    tl_kv_pool *p;
    MUST(tl_kv_pool_create(cfg, &p));
    uint32_t *ids = allocate(cfg->n_blocks, sizeof *ids);
    MUST(tl_kv_alloc(p, cfg->n_blocks, ids));
    for (uint32_t i = 0; i < cfg->n_blocks; i++) {
        memset(tl_kv_block_ptr(p, ids[i], 0, 0), 0xFF, tl_kv_block_bytes(p));
        MUST(tl_kv_unref(p, ids[i]));
    }
    free(ids);
    return p;
}

/* Writes position t of the sequence: its values are [layer][K, V][head][dim]. */
static void write_position(tl_kv_pool *p, const tl_kv_cfg *c, uint32_t id, uint32_t position,
                           const uint32_t *values) {
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        for (int is_v = 0; is_v < 2; is_v++) {
            uint16_t *plane = tl_kv_block_ptr(p, id, layer, is_v);
            if (plane == NULL) {
                die("tl_kv_block_ptr answered NULL");
            }
            for (uint32_t head = 0; head < c->n_kv_heads; head++) {
                uint16_t *row = plane + ((size_t)head * c->block_tokens + position) * c->head_dim;
                for (uint32_t d = 0; d < c->head_dim; d++) {
                    row[d] = (uint16_t)*values++;
                }
            }
        }
    }
}

static uint8_t *export_all(const tl_kv_pool *p, const uint32_t *ids, uint32_t n, size_t *size) {
    const size_t need = tl_kv_export_bytes(p, n);
    uint8_t *env = allocate(need, 1);
    MUST(tl_kv_export(p, ids, n, env, need, size));
    if (*size != need) {
        die("tl_kv_export_bytes and tl_kv_export disagree");
    }
    return env;
}

static void answer_case(const char *line) {
    request r = parse_request(line, SHAPE | TOKENS | VALUES);
    tl_kv_cfg *c = &r.cfg;
    const uint64_t limit = (uint64_t)1 << 20; /* of each dimension: a case is small */
    if (c->block_tokens == 0 || c->block_tokens > limit || c->n_layers > limit ||
        c->n_kv_heads > limit || c->head_dim > limit || r.n_tokens > limit) {
        die("a dimension is out of range");
    }
    const uint64_t rows = (uint64_t)c->n_layers * 2 * c->n_kv_heads; /* of head_dim values */
    if (rows > limit || r.n_values != r.n_tokens * rows * c->head_dim) {
        die("the number of values does not fit the tokens");
    }
    const uint32_t B = c->block_tokens, n = (uint32_t)((r.n_tokens + B - 1) / B);
    c->n_blocks = n + 1;
    tl_kv_pool *p = dirty_pool(c), *second = dirty_pool(c);
    uint32_t *ids = allocate(n, sizeof *ids), *got = allocate(n, sizeof *got);
    MUST(tl_kv_alloc(p, n, ids));
    uint64_t parent = 0;
    for (uint32_t i = 0; i < n; i++) {
        const size_t first = (size_t)i * B, left = r.n_tokens - first;
        const uint32_t fill = left < B ? (uint32_t)left : B;
        for (uint32_t t = 0; t < fill; t++) {
            write_position(p, c, ids[i], t, r.values + (first + t) * rows * c->head_dim);
        }
        MUST(tl_kv_set_fill(p, ids[i], fill));
        if (fill == B) {
            parent = tl_kv_block_hash(parent, r.tokens + first, B);
            MUST(tl_kv_register(p, ids[i], parent));
        }
    }
    size_t size, again;
    uint8_t *env = export_all(p, ids, n, &size);
    MUST(tl_kv_import(second, env, size, got));
    uint8_t *env2 = export_all(second, got, n, &again);
    printf("{\"hex\": \"");
    for (size_t i = 0; i < again; i++) {
        printf("%02x", env2[i]);
    }
    printf("\"}\n");
    free(env2);
    free(env);
    free(got);
    free(ids);
    tl_kv_pool_destroy(second);
    tl_kv_pool_destroy(p);
    free(r.values);
    free(r.tokens);
}

/* ---- an envelope to read ------------------------------------------------------------------- */

static void answer_read(const char *line) {
    request r = parse_request(line, SHAPE | N_BLOCKS | HEX);
    tl_kv_pool *p;
    MUST(tl_kv_pool_create(&r.cfg, &p));
    uint32_t *ids = allocate(r.cfg.n_blocks, sizeof *ids);
    /* In memory of exactly its size, so that a sanitizer sees a read past its end. */
    uint8_t *env = malloc(r.n_bytes == 0 ? 1 : r.n_bytes);
    if (env == NULL) {
        die("out of memory");
    }
    memcpy(env, r.envelope, r.n_bytes);
    const tl_status status = tl_kv_import(p, env, r.n_bytes, ids);
    tl_kv_stats s;
    tl_kv_stats_get(p, &s);
    if (status != TL_OK && s.free != r.cfg.n_blocks) {
        die("a refused import took blocks");
    }
    printf("{\"status\": \"%s\"}\n", tl_status_str(status));
    free(env);
    free(ids);
    tl_kv_pool_destroy(p);
    free(r.envelope);
}

int main(int argc, char **argv) {
    const int reads = argc == 2 && strcmp(argv[1], "--read") == 0;
    if (argc > 1 && !reads) {
        fprintf(stderr, "usage: %s [--read]\n", argv[0]);
        return 2;
    }
    char *line = NULL;
    size_t cap = 0;
    while (getline(&line, &cap, stdin) > 0) {
        if (strspn(line, " \t\r\n") == strlen(line)) {
            continue;
        }
        if (reads) {
            answer_read(line);
        } else {
            answer_case(line);
        }
        fflush(stdout);
    }
    free(line);
    return 0;
}
