/*
 * policy.c - one trace, one cache size, one order of eviction: how many blocks would have been hit.
 *
 * Three machines, by what the order needs:
 *
 *   a heap of leaves   LRU, LFU, POSITION, OPTIMAL: a block may leave when nothing behind it is
 *                      there; of those, the one with the smallest key
 *   one queue          FIFO
 *   lists              S3-FIFO (small, main), W-TinyLFU (window, probation, protected)
 *
 * A block whose beginning is gone cannot be hit: what counts is the run of blocks at the front of a
 * request that are there. Lists take a request's blocks last one first, so that its beginning
 * leaves after its end.
 */
#include "tinyllm/replay.h"

#include "runtime/internal.h"

#include <string.h>

#define NONE UINT32_MAX

typedef struct {
    uint64_t key;
    uint32_t node, version;
} entry;

typedef struct {
    uint32_t newest, oldest, len;
} list;

typedef struct {
    const tl_trace *t;
    tl_policy policy;
    uint32_t capacity, len;
    uint64_t clock, request;
    /* for each block */
    uint8_t *where;        /* 0: not there; else the list it is in, or 1 */
    uint8_t *count;        /* uses, saturating; TINYLFU and S3FIFO */
    uint32_t *mark;        /* the request that uses it, + 1: not to be evicted by it */
    uint32_t *next, *prev; /* lists: towards the oldest, towards the newest */
    uint32_t *children, *version, *uses;
    uint64_t *key;
    uint64_t *ghost;    /* S3FIFO: when it left for the ghost queue, + 1 */
    uint32_t *next_use; /* OPTIMAL: for each use, the request that uses the block next */
    entry *heap;
    size_t heap_len, heap_cap;
    uint32_t *queue; /* FIFO: a ring of `capacity` blocks */
    uint32_t head;
    list lists[4];
    uint64_t n_ghosts, touches;
} sim;

/* ---- the heap of leaves --------------------------------------------------------------------- */

/* Smallest key first; of equal ones the block that was seen last. */
static int before(const entry *a, const entry *b) {
    return a->key != b->key ? a->key < b->key : a->node > b->node;
}

static void sift_down(entry *h, size_t n, size_t i) {
    const entry x = h[i];
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= n) {
            break;
        }
        if (child + 1 < n && before(&h[child + 1], &h[child])) {
            child++;
        }
        if (!before(&h[child], &x)) {
            break;
        }
        h[i] = h[child];
        i = child;
    }
    h[i] = x;
}

static int is_current(const sim *s, const entry *e) {
    return s->where[e->node] && s->children[e->node] == 0 && s->version[e->node] == e->version;
}

static tl_status push_leaf(sim *s, uint32_t node) {
    if (!s->where[node] || s->children[node] != 0) {
        return TL_OK;
    }
    if (s->heap_len == s->heap_cap) { /* drop what is out of date; there is one entry a block */
        size_t n = 0;
        for (size_t i = 0; i < s->heap_len; i++) {
            if (is_current(s, &s->heap[i])) {
                s->heap[n++] = s->heap[i];
            }
        }
        s->heap_len = n;
        for (size_t i = n / 2; i-- > 0;) {
            sift_down(s->heap, n, i);
        }
        if (n > s->heap_cap / 2) {
            const size_t cap = s->heap_cap * 2;
            entry *heap = tl_alloc_array(cap * sizeof *heap, 0);
            if (heap == NULL) {
                return tl_fail(TL_ENOMEM, "tl_policy_hits: no memory for a heap of %zu", cap);
            }
            memcpy(heap, s->heap, n * sizeof *heap);
            tl_free(s->heap);
            s->heap = heap;
            s->heap_cap = cap;
        }
    }
    const entry x = {s->key[node], node, ++s->version[node]};
    size_t i = s->heap_len++;
    for (; i > 0 && before(&x, &s->heap[(i - 1) / 2]); i = (i - 1) / 2) {
        s->heap[i] = s->heap[(i - 1) / 2];
    }
    s->heap[i] = x;
    return TL_OK;
}

static entry pop_leaf(sim *s) {
    const entry top = s->heap[0];
    s->heap[0] = s->heap[--s->heap_len];
    if (s->heap_len > 0) {
        sift_down(s->heap, s->heap_len, 0);
    }
    return top;
}

static uint64_t key_of(sim *s, uint32_t node, uint64_t use, uint64_t first_use) {
    uint64_t class = 0;
    switch (s->policy) {
    case TL_POLICY_OPTIMAL:
        return UINT32_MAX - (uint64_t)s->next_use[use];
    case TL_POLICY_LFU:
        class = s->uses[node] < 1 << 20 ? s->uses[node] : 1 << 20;
        break;
    case TL_POLICY_POSITION:
        for (class = 32; (use - first_use + 1) >> (33 - class) != 0; class --) {
        }
        break;
    default:
        break;
    }
    return class << 42 | ++s->clock;
}

/* Evicts a leaf that the running request does not use. 0 when there is none, or, for OPTIMAL, none
 * that is needed later than the block that wants in, whose key is `wanting`. */
static int evict_leaf(sim *s, uint64_t wanting) {
    entry own = {0, NONE, 0}; /* a request is one chain: at most one of its blocks is a leaf */
    uint32_t victim = NONE;
    while (s->heap_len > 0 && victim == NONE) {
        const entry top = pop_leaf(s);
        if (!is_current(s, &top)) {
            continue;
        }
        if (s->mark[top.node] == s->request + 1) {
            own = top;
        } else if (s->policy == TL_POLICY_OPTIMAL && top.key >= wanting) {
            (void)push_leaf(s, top.node); /* there is room: it was just popped */
            break;
        } else {
            victim = top.node;
        }
    }
    if (own.node != NONE) {
        (void)push_leaf(s, own.node);
    }
    if (victim == NONE) {
        return 0;
    }
    s->where[victim] = 0;
    s->len--;
    const uint32_t parent = s->t->parents[victim];
    if (parent != NONE && --s->children[parent] == 0) {
        (void)push_leaf(s, parent); /* the victim's entry made room */
    }
    return 1;
}

static tl_status serve_heap(sim *s, uint64_t first, uint64_t n, uint64_t hits) {
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t node = s->t->blocks[first + i];
        if (i >= hits) {
            const uint64_t wanting = s->policy == TL_POLICY_OPTIMAL
                                         ? UINT32_MAX - (uint64_t)s->next_use[first + i]
                                         : UINT64_MAX;
            if (s->len == s->capacity && !evict_leaf(s, wanting)) {
                return TL_OK;
            }
            s->where[node] = 1;
            s->uses[node] = 0;
            s->len++;
            if (s->t->parents[node] != NONE) {
                s->children[s->t->parents[node]]++;
            }
        }
        s->uses[node]++;
        s->key[node] = key_of(s, node, first + i, first);
        const tl_status st = push_leaf(s, node);
        if (st != TL_OK) {
            return st;
        }
    }
    return TL_OK;
}

/* ---- one queue ------------------------------------------------------------------------------ */

/* The oldest leaves, even if the running request uses it: that is what makes FIFO what it is. */
static void serve_fifo(sim *s, uint64_t first, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t node = s->t->blocks[first + i];
        if (s->where[node]) {
            continue;
        }
        if (s->len == s->capacity) {
            s->where[s->queue[s->head]] = 0;
            s->len--;
        }
        s->queue[s->head] = node; /* the ring is full, or was never around: head is free */
        s->head = s->head + 1 == s->capacity ? 0 : s->head + 1;
        s->where[node] = 1;
        s->len++;
    }
}

/* ---- lists ---------------------------------------------------------------------------------- */

enum { SMALL = 1, MAIN = 2, WINDOW = 1, PROBATION = 2, PROTECTED = 3 };

static void put(sim *s, uint32_t node, uint8_t where) {
    list *l = &s->lists[where];
    s->where[node] = where;
    s->prev[node] = NONE;
    s->next[node] = l->newest;
    if (l->newest != NONE) {
        s->prev[l->newest] = node;
    } else {
        l->oldest = node;
    }
    l->newest = node;
    l->len++;
}

static void take(sim *s, uint32_t node) {
    list *l = &s->lists[s->where[node]];
    const uint32_t newer = s->prev[node], older = s->next[node];
    if (newer != NONE) {
        s->next[newer] = older;
    } else {
        l->newest = older;
    }
    if (older != NONE) {
        s->prev[older] = newer;
    } else {
        l->oldest = newer;
    }
    l->len--;
    s->where[node] = 0;
}

static void move(sim *s, uint32_t node, uint8_t where) {
    take(s, node);
    put(s, node, where);
}

/* The oldest of a list that the running request does not use, or NONE. */
static uint32_t oldest_other(const sim *s, uint8_t where) {
    uint32_t node = s->lists[where].oldest;
    while (node != NONE && s->mark[node] == s->request + 1) {
        node = s->prev[node];
    }
    return node;
}

/* From the small queue, where it is at its share: what was used twice moves on, the rest leaves and
 * is remembered. From the main queue: what was used goes round once more. */
static int evict_s3fifo(sim *s) {
    const uint32_t share = s->capacity / 10 > 0 ? s->capacity / 10 : 1;
    for (;;) {
        const uint32_t small = oldest_other(s, SMALL), main = oldest_other(s, MAIN);
        if (small != NONE && (s->lists[SMALL].len >= share || main == NONE)) {
            if (s->count[small] > 1) {
                s->count[small] = 0;
                move(s, small, MAIN);
                continue;
            }
            take(s, small);
            s->ghost[small] = ++s->n_ghosts;
            return 1;
        }
        if (main == NONE) {
            return 0;
        }
        if (s->count[main] == 0) {
            take(s, main);
            return 1;
        }
        s->count[main]--;
        move(s, main, MAIN);
    }
}

/* The window's oldest against the main part's: who was used more often stays. */
static int evict_tinylfu(sim *s, uint32_t window_cap) {
    const uint32_t in = s->lists[WINDOW].len >= window_cap ? oldest_other(s, WINDOW) : NONE;
    uint32_t out = oldest_other(s, PROBATION);
    out = out != NONE ? out : oldest_other(s, PROTECTED);
    if (in != NONE && out != NONE && s->count[in] > s->count[out]) {
        take(s, out);
        move(s, in, PROBATION);
        return 1;
    }
    uint32_t victim = in != NONE ? in : out;
    victim = victim != NONE ? victim : oldest_other(s, WINDOW);
    if (victim != NONE) {
        take(s, victim);
    }
    return victim != NONE;
}

/* Frequencies halve every ten uses of the cache's size, so that what was hot once can leave. */
static void count_use(sim *s, uint32_t node) {
    s->count[node] = (uint8_t)(s->count[node] + (s->count[node] < 15));
    if (++s->touches >= 10 * (uint64_t)s->capacity) {
        s->touches = 0;
        for (uint32_t i = 0; i < s->t->n_blocks; i++) {
            s->count[i] /= 2;
        }
    }
}

static void serve_lists(sim *s, uint64_t first, uint64_t n, uint64_t hits) {
    const int tiny = s->policy == TL_POLICY_TINYLFU;
    const uint32_t window_cap = s->capacity / 100 > 0 ? s->capacity / 100 : 1;
    const uint32_t main_cap = s->capacity - window_cap;
    for (uint64_t i = n; i-- > 0;) {
        const uint32_t node = s->t->blocks[first + i];
        if (tiny) {
            count_use(s, node);
        }
        if (s->where[node]) {
            if (i >= hits) {
                continue; /* there, but its beginning is not: of no use to this request */
            }
            if (!tiny) {
                s->count[node] = (uint8_t)(s->count[node] + (s->count[node] < 3));
            } else if (s->where[node] == WINDOW) {
                move(s, node, WINDOW);
            } else {
                move(s, node, PROTECTED);
                if (s->lists[PROTECTED].len > main_cap / 5 * 4) {
                    move(s, s->lists[PROTECTED].oldest, PROBATION);
                }
            }
            continue;
        }
        const uint32_t len = s->lists[1].len + s->lists[2].len + s->lists[3].len;
        if (len == s->capacity && !(tiny ? evict_tinylfu(s, window_cap) : evict_s3fifo(s))) {
            continue;
        }
        if (tiny) {
            put(s, node, WINDOW);
            if (len < s->capacity && s->lists[WINDOW].len > window_cap) {
                move(s, s->lists[WINDOW].oldest, PROBATION); /* while the cache fills */
            }
        } else {
            const uint64_t ghosts = s->capacity - s->capacity / 10;
            const int came_back = s->ghost[node] != 0 && s->n_ghosts - s->ghost[node] < ghosts;
            s->ghost[node] = 0;
            s->count[node] = 0;
            put(s, node, came_back ? MAIN : SMALL);
        }
    }
}

/* ---- the trace ------------------------------------------------------------------------------ */

static tl_status check_trace(const tl_trace *t) {
    if (t->blocks == NULL || t->starts == NULL || t->parents == NULL) {
        return tl_fail(TL_EINVAL, "tl_policy_hits: trace: %s is NULL",
                       t->blocks == NULL   ? "blocks"
                       : t->starts == NULL ? "starts"
                                           : "parents");
    }
    if (t->n_requests >= UINT32_MAX - 1 || t->starts[0] != 0) {
        return tl_fail(TL_EINVAL, "tl_policy_hits: trace: %llu requests from use %llu on",
                       (unsigned long long)t->n_requests, (unsigned long long)t->starts[0]);
    }
    /* All of them before any block is read: only the last one says how many blocks there are. */
    for (uint64_t r = 0; r < t->n_requests; r++) {
        if (t->starts[r + 1] < t->starts[r]) {
            return tl_fail(TL_EINVAL, "tl_policy_hits: trace: starts[%llu] falls",
                           (unsigned long long)r + 1);
        }
    }
    for (uint64_t r = 0; r < t->n_requests; r++) {
        uint32_t parent = NONE;
        for (uint64_t i = t->starts[r]; i < t->starts[r + 1]; i++) {
            const uint32_t node = t->blocks[i];
            if (node >= t->n_blocks || t->parents[node] != parent) {
                return tl_fail(TL_EINVAL,
                               "tl_policy_hits: trace: blocks[%llu] is %lu, of %lu, "
                               "and must follow its parent",
                               (unsigned long long)i, (unsigned long)node,
                               (unsigned long)t->n_blocks);
            }
            parent = node;
        }
    }
    return TL_OK;
}

/* For each use, the next request that uses the block; n_requests for none. */
static void find_next_uses(sim *s, uint32_t *soonest) {
    const tl_trace *t = s->t;
    for (uint32_t i = 0; i < t->n_blocks; i++) {
        soonest[i] = (uint32_t)t->n_requests;
    }
    for (uint64_t r = t->n_requests; r-- > 0;) {
        for (uint64_t i = t->starts[r]; i < t->starts[r + 1]; i++) {
            s->next_use[i] = soonest[t->blocks[i]];
            soonest[t->blocks[i]] = (uint32_t)r;
        }
    }
}

static int new_array(void *out, uint64_t n, size_t size) {
    size_t n_bytes;
    void *p = n > SIZE_MAX || !tl_mul_size((size_t)n + 1, size, &n_bytes)
                  ? NULL
                  : tl_alloc_array(n_bytes, 0);
    if (p != NULL) {
        memset(p, 0, n_bytes);
        memcpy(out, &p, sizeof p);
    }
    return p != NULL;
}

static int make(sim *s) {
    const uint64_t n = s->t->n_blocks;
    int ok = new_array(&s->where, n, 1) && new_array(&s->mark, n, sizeof *s->mark);
    switch (s->policy) {
    case TL_POLICY_FIFO:
        return ok && new_array(&s->queue, s->capacity, sizeof *s->queue);
    case TL_POLICY_S3FIFO:
    case TL_POLICY_TINYLFU:
        for (int i = 0; i < 4; i++) {
            s->lists[i] = (list){NONE, NONE, 0};
        }
        return ok && new_array(&s->count, n, 1) && new_array(&s->next, n, sizeof *s->next) &&
               new_array(&s->prev, n, sizeof *s->prev) && new_array(&s->ghost, n, sizeof *s->ghost);
    default:
        s->heap_cap = 1024;
        ok = ok && new_array(&s->children, n, sizeof *s->children) &&
             new_array(&s->version, n, sizeof *s->version) &&
             new_array(&s->uses, n, sizeof *s->uses) && new_array(&s->key, n, sizeof *s->key) &&
             new_array(&s->heap, s->heap_cap, sizeof *s->heap);
        if (!ok || s->policy != TL_POLICY_OPTIMAL) {
            return ok;
        }
        ok = new_array(&s->next_use, s->t->starts[s->t->n_requests], sizeof *s->next_use);
        if (ok) {
            find_next_uses(s, s->version); /* as scratch: filled with zeros again */
            memset(s->version, 0, (size_t)n * sizeof *s->version);
        }
        return ok;
    }
}

tl_status tl_policy_hits(tl_policy policy, const tl_trace *trace, uint32_t capacity,
                         uint64_t first_counted, int match_last, uint64_t *hits) {
    if (trace == NULL || hits == NULL) {
        return tl_fail(TL_EINVAL, "tl_policy_hits: %s is NULL", trace == NULL ? "trace" : "hits");
    }
    *hits = 0;
    if (policy < 0 || policy >= TL_N_POLICIES || capacity == 0) {
        return tl_fail(TL_EINVAL, "tl_policy_hits: policy %d, capacity %lu", (int)policy,
                       (unsigned long)capacity);
    }
    tl_status st = check_trace(trace);
    if (st != TL_OK) {
        return st;
    }
    sim s;
    memset(&s, 0, sizeof s);
    s.t = trace;
    s.policy = policy;
    s.capacity = capacity;
    st = make(&s) ? TL_OK : tl_fail(TL_ENOMEM, "tl_policy_hits: no memory for the cache");
    for (uint64_t r = 0; st == TL_OK && r < trace->n_requests; r++) {
        const uint64_t first = trace->starts[r];
        uint64_t n = trace->starts[r + 1] - first, n_hits = 0;
        while (n_hits < n && s.where[trace->blocks[first + n_hits]]) {
            n_hits++;
        }
        *hits += r < first_counted ? 0 : n_hits - (n_hits == n && n > 0 && !match_last);
        s.request = r;
        for (uint64_t i = 0; i < n; i++) {
            s.mark[trace->blocks[first + i]] = (uint32_t)(r + 1);
        }
        if (policy == TL_POLICY_FIFO) {
            serve_fifo(&s, first, n);
        } else if (policy == TL_POLICY_S3FIFO || policy == TL_POLICY_TINYLFU) {
            serve_lists(&s, first, n < capacity ? n : capacity, n_hits);
        } else {
            st = serve_heap(&s, first, n, n_hits);
        }
    }
    void *const arrays[] = {s.where, s.count, s.mark,  s.next,     s.prev, s.children, s.version,
                            s.uses,  s.key,   s.ghost, s.next_use, s.heap, s.queue};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        tl_free(arrays[i]);
    }
    if (st != TL_OK) {
        *hits = 0;
    }
    return st;
}
