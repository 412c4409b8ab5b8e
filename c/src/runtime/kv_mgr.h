/*
 * kv_mgr.h - what kv_mgr.c (blocks, index, events) and kv_seq.c (sequences) share.
 *
 *   records[id]    what the manager knows of a block
 *
 *     name 0       not registered by us: free, or private to its holders
 *     name h       registered in the pool under h; proof says what was computed into it
 *       findable   in the index: ns is its namespace
 *       not        ns is NS_NONE: reset or evicted while held, or before a reset
 *
 *   index          the findable blocks by their proofs, which nobody outside can steer
 *
 *   slots[i]       a sequence; its handle is its generation << 32 | i
 */
#ifndef TL_RUNTIME_KV_MGR_H
#define TL_RUNTIME_KV_MGR_H

#include "ds/ids.h"
#include "runtime/proof.h"
#include "tinyllm/ds.h"
#include "tinyllm/kv_seq.h"

#define NO_BLOCK TL_IDS_NONE
#define NS_NONE  UINT32_MAX

typedef struct {
    tl_proof proof;
    uint64_t name;
    uint32_t ns;
    uint32_t holders; /* sequences of this manager that hold the block */
} tl_record;

typedef struct {
    uint64_t root;
    uint32_t epoch; /* one more with each reset: proofs of before lead nowhere */
    tl_proof start;
} tl_namespace;

/* A full block of a sequence: the prefix up to its end, as proof and as name. */
typedef struct {
    tl_proof proof;
    uint64_t name; /* known for the first n_named */
} tl_link;

typedef struct {
    uint32_t generation; /* 0: the slot is free */
    uint32_t ns, epoch;
    uint32_t stamp;   /* of the last batch it was in, to see one that appears twice */
    uint32_t copying; /* in this batch its last block is replaced by a copy */
    uint32_t cut;     /* it was cut into a block that others held: the fill may be theirs */
    size_t n_tokens, n_cached, n_computed, n_blocks;
    size_t n_links, n_named;
    tl_vec tokens; /* uint32_t; len is not used in the three: the counts above are */
    tl_vec blocks; /* uint32_t */
    tl_vec links;  /* tl_link */
} tl_slot;

struct tl_kv_mgr {
    tl_kv_pool *pool;
    tl_kv_mgr_options opt;
    uint32_t n_blocks, block_tokens;
    int far; /* the pool's index is out of the caches, and the options carry a prefetch */
    size_t block_bytes;
    uint32_t evictions; /* of the pool, as far as this manager knows */
    tl_proof_key key;
    tl_record *records;
    tl_ids index;
    tl_vec namespaces; /* tl_namespace */
    tl_map *ns_by_root;
    tl_vec slots;      /* tl_slot */
    tl_vec free_slots; /* uint32_t */
    tl_vec scratch;    /* uint32_t: block ids of a batch */
    uint32_t stamp;
    tl_kv_mgr_stats stats;
    /* events: a ring of EVENT_CAP, and the tokens of each */
    tl_kv_event *events;
    uint32_t *event_tokens;
    size_t event_first, event_len;
    uint64_t event_number;
};

#define EVENT_CAP  ((size_t)65536)
#define FAR_BLOCKS ((uint32_t)1 << 15) /* some MB of index */

static inline tl_slot *mgr_slots(const tl_kv_mgr *m) {
    return m->slots.data;
}

static inline tl_namespace *mgr_namespaces(const tl_kv_mgr *m) {
    return m->namespaces.data;
}

static inline uint32_t *seq_tokens(const tl_slot *s) {
    return s->tokens.data;
}

static inline uint32_t *seq_blocks(const tl_slot *s) {
    return s->blocks.data;
}

static inline tl_link *seq_links(const tl_slot *s) {
    return s->links.data;
}

/* The namespace of a root, made if it is new; NS_NONE, with the slot set, without memory for it. */
uint32_t mgr_namespace(tl_kv_mgr *m, uint64_t root, const char *who);

/* The same, but NS_NONE for a root that no sequence has had. */
uint32_t mgr_known_namespace(const tl_kv_mgr *m, uint64_t root);

/* The findable block of a proof in a namespace, or NO_BLOCK. */
uint32_t mgr_find(const tl_kv_mgr *m, tl_proof proof);
void mgr_prefetch(const tl_kv_mgr *m, tl_proof proof);

/* Puts a block that was just registered under `name` into the index. */
void mgr_store(tl_kv_mgr *m, uint32_t id, uint32_t ns, tl_proof proof, uint64_t name,
               uint64_t parent, const uint32_t *toks);

/* Takes a findable block out of the index; the pool still has its name. */
void mgr_unfind(tl_kv_mgr *m, uint32_t id);

/* If the pool evicted blocks that this manager did not take, forgets every block nobody holds. */
void mgr_notice_evictions(tl_kv_mgr *m);

/* tl_kv_alloc; forgets what was evicted for it. Each block then has one holder. */
tl_status mgr_take(tl_kv_mgr *m, uint32_t n, uint32_t *ids);

/* One holder less: unrefs, and frees what must not stay cached. */
void mgr_drop(tl_kv_mgr *m, uint32_t id);

/* Blocks that could be taken: free and cached ones of the pool. */
size_t mgr_room(const tl_kv_mgr *m);

/* The slot of a handle, or NULL with the error slot set. */
tl_slot *mgr_slot(const tl_kv_mgr *m, tl_kv_seq s, const char *who);

/* Gives a sequence's blocks back and its slot to the next one. */
void seq_release(tl_kv_mgr *m, tl_slot *s);
void seq_dispose(tl_slot *s);

#endif /* TL_RUNTIME_KV_MGR_H */
