/*
 * kv_mgr.c - the manager's blocks: records, the index of findable prefixes, reset and evict,
 * import, events, statistics, the checker. Sequences are in kv_seq.c; the picture is in kv_mgr.h.
 *
 * Of the pool only the functions of kv_pool.h are used (and the evict that the options carry), so
 * the manager keeps for itself what that interface does not tell: who holds a block, and what is
 * findable without touching the pool's LRU order.
 */
#include "runtime/kv_mgr.h"

#include "runtime/internal.h"

#include <inttypes.h>
#include <string.h>

/* ---- life ---------------------------------------------------------------------------------- */

tl_status tl_kv_mgr_create(tl_kv_pool *p, const tl_kv_mgr_options *opt, tl_kv_mgr **out) {
    static const tl_kv_mgr_options defaults = {0};
    if (out == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_create: out is NULL");
    }
    *out = NULL;
    if (p == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_create: p is NULL");
    }
    opt = opt == NULL ? &defaults : opt;
    if (opt->flags & ~TL_KV_MGR_ALL_FLAGS) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_create: unknown flags 0x%" PRIx32,
                       opt->flags & ~TL_KV_MGR_ALL_FLAGS);
    }
    tl_kv_cfg cfg;
    tl_kv_pool_cfg(p, &cfg);
    if (opt->watermark >= cfg.n_blocks) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_create: watermark %" PRIu32 " of %" PRIu32 " blocks",
                       opt->watermark, cfg.n_blocks);
    }
    if (opt->copy == NULL && tl_kv_block_ptr(p, 0, 0, 0) == NULL) {
        return tl_fail(TL_EUNSUPPORTED,
                       "tl_kv_mgr_create: the pool has no slab, and the options no "
                       "copy");
    }
    tl_kv_stats stats;
    tl_kv_stats_get(p, &stats);
    const size_t n = cfg.n_blocks;
    tl_kv_mgr *m = tl_alloc(sizeof *m, _Alignof(tl_kv_mgr));
    if (m == NULL) {
        return tl_fail(TL_ENOMEM, "tl_kv_mgr_create: no memory for the manager");
    }
    *m = (tl_kv_mgr){.pool = p,
                     .opt = *opt,
                     .n_blocks = cfg.n_blocks,
                     .far = opt->prefetch != NULL && cfg.n_blocks >= FAR_BLOCKS,
                     .block_tokens = cfg.block_tokens,
                     .block_bytes = tl_kv_block_bytes(p),
                     .evictions = stats.evictions};
    (void)tl_vec_init(&m->namespaces, sizeof(tl_namespace));
    (void)tl_vec_init(&m->slots, sizeof(tl_slot));
    (void)tl_vec_init(&m->free_slots, sizeof(uint32_t));
    (void)tl_vec_init(&m->scratch, sizeof(uint32_t));

    tl_status status = TL_ENOMEM;
    size_t record_bytes;
    if (!tl_mul_size(n, sizeof(tl_record), &record_bytes)) {
        goto fail;
    }
    m->records = tl_alloc_array(record_bytes, 1);
    if (m->records == NULL || !tl_ids_make(&m->index, n) ||
        tl_map_create(16, &m->ns_by_root) != TL_OK) {
        goto fail;
    }
    status = tl_proof_key_init(&m->key, m->block_tokens);
    if (status != TL_OK) {
        goto fail;
    }
    status = TL_ENOMEM;
    if (opt->flags & TL_KV_MGR_EVENTS) {
        size_t token_bytes;
        if (!tl_mul_size(EVENT_CAP * sizeof(uint32_t), m->block_tokens, &token_bytes)) {
            goto fail;
        }
        m->events = tl_alloc_array(EVENT_CAP * sizeof(tl_kv_event), 1);
        m->event_tokens = m->events == NULL ? NULL : tl_alloc_array(token_bytes, 1);
        if (m->event_tokens == NULL) {
            goto fail;
        }
    }
    for (size_t i = 0; i < n; i++) {
        m->records[i] = (tl_record){.ns = NS_NONE};
    }
    *out = m;
    return TL_OK;

fail:
    tl_kv_mgr_destroy(m);
    if (status == TL_EIO) {
        return tl_fail(TL_EIO, "tl_kv_mgr_create: the system gives no random bytes for a secret");
    }
    return tl_fail(TL_ENOMEM, "tl_kv_mgr_create: no memory for %zu blocks", n);
}

void tl_kv_mgr_destroy(tl_kv_mgr *m) {
    if (m == NULL) {
        return;
    }
    for (size_t i = 0; i < m->slots.len; i++) {
        tl_slot *s = &mgr_slots(m)[i];
        if (s->generation != 0) {
            seq_release(m, s);
        }
        seq_dispose(s);
    }
    tl_free(m->event_tokens);
    tl_free(m->events);
    tl_map_destroy(m->ns_by_root);
    tl_proof_key_free(&m->key);
    tl_ids_free(&m->index);
    tl_free(m->records);
    tl_vec_free(&m->scratch);
    tl_vec_free(&m->free_slots);
    tl_vec_free(&m->slots);
    tl_vec_free(&m->namespaces);
    tl_free(m);
}

size_t tl_kv_mgr_bytes(const tl_kv_mgr *m) {
    if (m == NULL) {
        tl_set_last_error("tl_kv_mgr_bytes: m is NULL");
        return 0;
    }
    const size_t n = m->n_blocks;
    size_t bytes = sizeof *m + n * sizeof(tl_record) + tl_ids_bytes(&m->index) +
                   (size_t)m->block_tokens * sizeof m->key.powers[0];
    for (size_t i = 0; i < m->slots.len; i++) {
        const tl_slot *s = &mgr_slots(m)[i];
        bytes += s->tokens.cap * s->tokens.elem + s->blocks.cap * s->blocks.elem +
                 s->links.cap * s->links.elem;
    }
    bytes += m->slots.cap * m->slots.elem + m->free_slots.cap * m->free_slots.elem +
             m->scratch.cap * m->scratch.elem + m->namespaces.cap * m->namespaces.elem +
             tl_map_len(m->ns_by_root) * 24;
    if (m->events != NULL) {
        bytes += EVENT_CAP * (sizeof(tl_kv_event) + sizeof(uint32_t) * m->block_tokens);
    }
    return bytes;
}

tl_status tl_kv_mgr_stats_get(const tl_kv_mgr *m, tl_kv_mgr_stats *out) {
    if (m == NULL || out == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_stats_get: %s is NULL", m == NULL ? "m" : "out");
    }
    *out = m->stats;
    return TL_OK;
}

/* ---- namespaces ---------------------------------------------------------------------------- */

uint32_t mgr_known_namespace(const tl_kv_mgr *m, uint64_t root) {
    uint64_t at;
    return tl_map_get(m->ns_by_root, root, &at) ? (uint32_t)at : NS_NONE;
}

uint32_t mgr_namespace(tl_kv_mgr *m, uint64_t root, const char *who) {
    uint64_t at = mgr_known_namespace(m, root);
    if (at != NS_NONE) {
        return (uint32_t)at;
    }
    const tl_namespace ns = {root, 0, tl_proof_start(&m->key, root, 0)};
    at = m->namespaces.len;
    if (at >= NS_NONE || tl_vec_push(&m->namespaces, &ns) != TL_OK) {
        tl_errorf("%s: no memory for another namespace", who);
        return NS_NONE;
    }
    if (tl_map_put(m->ns_by_root, root, at) != TL_OK) {
        m->namespaces.len--;
        tl_errorf("%s: no memory for another namespace", who);
        return NS_NONE;
    }
    return (uint32_t)at;
}

/* ---- events -------------------------------------------------------------------------------- */

static void emit(tl_kv_mgr *m, uint32_t type, uint32_t id, uint64_t hash, uint64_t parent,
                 const uint32_t *toks) {
    if (m->events == NULL) {
        return;
    }
    const uint64_t number = m->event_number++;
    if (m->event_len == EVENT_CAP) {
        m->stats.events_lost++;
        return;
    }
    const size_t at = (m->event_first + m->event_len++) % EVENT_CAP;
    m->events[at] = (tl_kv_event){number, hash, parent, type, id};
    uint32_t *kept = m->event_tokens + at * m->block_tokens;
    if (toks != NULL) {
        memcpy(kept, toks, m->block_tokens * sizeof *kept);
    } else {
        memset(kept, 0, m->block_tokens * sizeof *kept);
    }
}

tl_status tl_kv_mgr_events(tl_kv_mgr *m, tl_kv_event *out, size_t cap, uint32_t *tokens,
                           size_t *n) {
    if (m == NULL || n == NULL || (out == NULL && cap > 0)) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_events: %s is NULL",
                       m == NULL   ? "m"
                       : n == NULL ? "n"
                                   : "out");
    }
    if (m->events == NULL) {
        return tl_fail(TL_EUNSUPPORTED, "tl_kv_mgr_events: created without TL_KV_MGR_EVENTS");
    }
    const size_t B = m->block_tokens;
    size_t i = 0;
    for (; i < cap && m->event_len > 0; i++, m->event_len--) {
        out[i] = m->events[m->event_first];
        if (tokens != NULL) {
            memcpy(tokens + i * B, m->event_tokens + m->event_first * B, B * sizeof *tokens);
        }
        m->event_first = (m->event_first + 1) % EVENT_CAP;
    }
    *n = i;
    return TL_OK;
}

/* ---- the index ----------------------------------------------------------------------------- */

/* Group and tag of a proof, from one of its halves. Of prefixes that differ in their last token
 * alone the halves are arithmetic progressions, evenly spread for most secrets, but in lumps for
 * some. Their squares are spread as at random for all of them. */
static inline uint64_t hash_of(const tl_proof *proof) {
    __extension__ typedef unsigned __int128 u128;
    const u128 square = (u128)proof->x[0] * proof->x[0];
    return (uint64_t)square ^ (uint64_t)(square >> 64);
}

static inline int has_proof(const void *mgr, uint32_t id, const void *proof) {
    const tl_kv_mgr *m = mgr;
    return tl_proof_equal(m->records[id].proof, *(const tl_proof *)proof);
}

uint32_t mgr_find(const tl_kv_mgr *m, tl_proof proof) {
    return tl_ids_find(&m->index, hash_of(&proof), has_proof, m, &proof);
}

void mgr_prefetch(const tl_kv_mgr *m, tl_proof proof) {
    tl_ids_prefetch(&m->index, hash_of(&proof));
}

void mgr_store(tl_kv_mgr *m, uint32_t id, uint32_t ns, tl_proof proof, uint64_t name,
               uint64_t parent, const uint32_t *toks) {
    tl_record *r = &m->records[id];
    r->proof = proof;
    r->name = name;
    r->ns = ns;
    tl_ids_add(&m->index, hash_of(&proof), id);
    m->stats.stored++;
    m->stats.n_findable++;
    emit(m, TL_KV_STORED, id, name, parent, toks);
}

/* Takes a findable block out of the index; the caller says what that means. */
static inline void unlink_block(tl_kv_mgr *m, uint32_t id) {
    tl_record *r = &m->records[id];
    tl_ids_remove(&m->index, hash_of(&r->proof), id);
    r->ns = NS_NONE;
    m->stats.n_findable--;
    m->stats.removed++;
}

void mgr_unfind(tl_kv_mgr *m, uint32_t id) {
    unlink_block(m, id);
    emit(m, TL_KV_REMOVED, id, m->records[id].name, 0, NULL);
}

/* A block the pool has just handed out, or freed: whatever it was known for is gone. */
static inline void forget(tl_kv_mgr *m, uint32_t id) {
    if (m->records[id].name != 0) {
        if (m->records[id].ns != NS_NONE) {
            mgr_unfind(m, id);
        }
        m->records[id].name = 0;
    }
}

/* A block that must not stay cached: free it now if nobody holds it and the pool has a way. */
static void free_if_idle(tl_kv_mgr *m, uint32_t id) {
    if (m->records[id].holders == 0 && m->opt.evict != NULL && m->opt.evict(m->pool, id) == TL_OK) {
        m->records[id].name = 0;
    }
}

/* ---- taking and dropping blocks ------------------------------------------------------------ */

size_t mgr_room(const tl_kv_mgr *m) {
    tl_kv_stats stats;
    tl_kv_stats_get(m->pool, &stats);
    return (size_t)stats.free + stats.cached;
}

void mgr_notice_evictions(tl_kv_mgr *m) {
    tl_kv_stats stats;
    tl_kv_stats_get(m->pool, &stats);
    if (TL_LIKELY(stats.evictions == m->evictions)) {
        return;
    }
    /* Somebody took blocks from the pool directly. Which ones were evicted cannot be asked, and a
     * name may already stand for other content, so nothing that nobody holds is trusted. */
    for (uint32_t id = 0; id < m->n_blocks; id++) {
        if (m->records[id].name != 0 && m->records[id].holders == 0) {
            if (m->records[id].ns != NS_NONE) {
                mgr_unfind(m, id);
            }
            free_if_idle(m, id);
            m->records[id].name = 0;
        }
    }
    m->evictions = stats.evictions;
}

#define TAKE_AHEAD ((size_t)4)

/* Blocks the pool has just handed to this manager. */
static void taken(tl_kv_mgr *m, const uint32_t *ids, size_t n) {
    tl_kv_stats stats;
    tl_kv_stats_get(m->pool, &stats);
    m->evictions = stats.evictions;
    if (stats.used > m->stats.peak_used) {
        m->stats.peak_used = stats.used;
    }
    /* Two cache misses in a row for each evicted block: its record, then its group in the index. */
    for (size_t i = 0; i < n; i++) {
        if (i + 2 * TAKE_AHEAD < n) {
            TL_PREFETCH(&m->records[ids[i + 2 * TAKE_AHEAD]]);
        }
        if (i + TAKE_AHEAD < n) {
            mgr_prefetch(m, m->records[ids[i + TAKE_AHEAD]].proof);
        }
        forget(m, ids[i]);
    }
}

tl_status mgr_take(tl_kv_mgr *m, uint32_t n, uint32_t *ids) {
    const tl_status status = tl_kv_alloc(m->pool, n, ids);
    if (status == TL_OK) {
        taken(m, ids, n);
        for (uint32_t i = 0; i < n; i++) {
            m->records[ids[i]].holders = 1;
        }
    }
    return status;
}

void mgr_drop(tl_kv_mgr *m, uint32_t id) {
    tl_record *r = &m->records[id];
    r->holders--;
    (void)tl_kv_unref(m->pool, id);
    if (TL_UNLIKELY(r->name != 0 && m->records[id].ns == NS_NONE)) {
        free_if_idle(m, id);
    }
}

/* ---- reset and evict ----------------------------------------------------------------------- */

tl_status tl_kv_mgr_reset(tl_kv_mgr *m, const uint64_t *root) {
    if (m == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_reset: m is NULL");
    }
    mgr_notice_evictions(m);
    uint64_t only = NS_NONE;
    if (root != NULL && !tl_map_get(m->ns_by_root, *root, &only)) {
        return TL_OK; /* nothing was ever computed under it */
    }
    for (size_t i = 0; i < m->namespaces.len; i++) {
        tl_namespace *ns = &mgr_namespaces(m)[i];
        if (root == NULL || i == only) {
            ns->epoch++;
            ns->start = tl_proof_start(&m->key, ns->root, ns->epoch);
        }
    }
    for (uint32_t id = 0; id < m->n_blocks; id++) {
        if (m->records[id].ns == NS_NONE || (root != NULL && m->records[id].ns != only)) {
            continue;
        }
        if (root == NULL) {
            unlink_block(m, id); /* one CLEARED stands for all */
        } else {
            mgr_unfind(m, id);
        }
        free_if_idle(m, id);
    }
    if (root == NULL) {
        emit(m, TL_KV_CLEARED, NO_BLOCK, 0, 0, NULL);
    }
    return TL_OK;
}

tl_status tl_kv_mgr_evict(tl_kv_mgr *m, const uint32_t *ids, size_t n) {
    if (m == NULL || (ids == NULL && n > 0)) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_evict: %s is NULL", m == NULL ? "m" : "ids");
    }
    if (m->opt.evict == NULL) {
        return tl_fail(TL_EUNSUPPORTED, "tl_kv_mgr_evict: the manager was given no evict function");
    }
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= m->n_blocks) {
            return tl_fail(TL_EINVAL,
                           "tl_kv_mgr_evict: ids[%zu] is block %" PRIu32
                           ", out of range: the pool has %" PRIu32,
                           i, ids[i], m->n_blocks);
        }
    }
    mgr_notice_evictions(m);
    for (size_t i = 0; i < n; i++) {
        if (m->records[ids[i]].ns != NS_NONE) {
            mgr_unfind(m, ids[i]);
            free_if_idle(m, ids[i]);
        }
    }
    return TL_OK;
}

/* ---- import -------------------------------------------------------------------------------- */

static tl_status import_with(tl_kv_mgr *m,
                             tl_status (*import)(tl_kv_pool *, const void *, size_t, uint32_t *),
                             const void *buf, size_t len, uint32_t *ids_out) {
    mgr_notice_evictions(m);
    const tl_status status = import(m->pool, buf, len, ids_out);
    if (status == TL_OK) {
        /* The count follows from the length, which import has compared with the header. The header
         * is not read again: the buffer may be memory that somebody else writes. */
        const size_t record = 12 + m->block_bytes;
        taken(m, ids_out, (len - TL_KV_ENVELOPE_HEADER - 4) / record);
    }
    return status;
}

tl_status tl_kv_mgr_import(tl_kv_mgr *m, const void *buf, size_t len, uint32_t *ids_out) {
    if (m == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_import: m is NULL");
    }
    return import_with(m, tl_kv_import, buf, len, ids_out);
}

tl_status tl_kv_mgr_import_private(tl_kv_mgr *m, const void *buf, size_t len, uint32_t *ids_out) {
    if (m == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_import_private: m is NULL");
    }
    if (m->opt.import_private == NULL) {
        return tl_fail(
            TL_EUNSUPPORTED,
            "tl_kv_mgr_import_private: the manager was given no import_private function");
    }
    return import_with(m, m->opt.import_private, buf, len, ids_out);
}

/* ---- the checker --------------------------------------------------------------------------- */

static tl_status disagree(const char *what, uint64_t id) {
    return tl_fail(TL_EINVAL, "tl_kv_mgr_check: %s (%" PRIu64 ")", what, id);
}

/* One live sequence: counts, arrays, chain, and that its blocks are of this prefix. */
static tl_status check_slot(const tl_kv_mgr *m, size_t at) {
    const tl_slot *s = &mgr_slots(m)[at];
    const size_t B = m->block_tokens;
    const size_t n_full = s->n_tokens / B;
    if (s->n_blocks != n_full + (s->n_tokens % B != 0)) {
        return disagree("a sequence's blocks do not fit its length: slot", at);
    }
    if (s->n_cached > s->n_tokens || s->n_computed > s->n_tokens) {
        return disagree("a sequence has more cached or computed tokens than tokens: slot", at);
    }
    if (s->n_named > s->n_links || s->n_links > n_full || s->tokens.cap < s->n_tokens ||
        s->blocks.cap < s->n_blocks || s->links.cap < s->n_links) {
        return disagree("a sequence's arrays do not fit its counts: slot", at);
    }
    const tl_link *links = s->links.data;
    const uint32_t *toks = s->tokens.data;
    const tl_namespace *ns = &mgr_namespaces(m)[s->ns];
    tl_proof proof = tl_proof_start(&m->key, ns->root, s->epoch);
    uint64_t name = ns->root;
    for (size_t i = 0; i < s->n_links; i++) {
        proof = tl_proof_step(&m->key, proof, toks + i * B);
        if (!tl_proof_equal(proof, links[i].proof)) {
            return disagree("a sequence's proofs do not follow from its tokens: slot", at);
        }
        if (i < s->n_named) {
            name = tl_kv_block_hash(name, toks + i * B, (uint32_t)B);
            if (name != links[i].name) {
                return disagree("a sequence's names do not follow from its tokens: slot", at);
            }
        }
    }
    const uint32_t *ids = s->blocks.data;
    for (size_t i = 0; i < s->n_blocks; i++) {
        if (ids[i] >= m->n_blocks) {
            return disagree("a sequence holds a block out of range: block", ids[i]);
        }
        /* NS_NONE: it was reset while held, so its proof is of an earlier epoch */
        if (i < s->n_links && m->records[ids[i]].ns != NS_NONE &&
            !tl_proof_equal(m->records[ids[i]].proof, links[i].proof)) {
            return disagree("a sequence holds a block of another prefix: block", ids[i]);
        }
    }
    return TL_OK;
}

/* Takes the holds of the live sequences off the records' counts, sees whether that leaves nothing,
 * and puts back exactly what it took. */
static tl_status check_holders(const tl_kv_mgr *m) {
    tl_status status = TL_OK;
    size_t taken_off = 0;
    for (size_t i = 0; i < m->slots.len && status == TL_OK; i++) {
        const tl_slot *s = &mgr_slots(m)[i];
        for (size_t k = 0; s->generation != 0 && k < s->n_blocks && status == TL_OK; k++) {
            tl_record *r = &m->records[seq_blocks(s)[k]];
            if (r->holders == 0) {
                status = disagree("more sequences hold a block than its record says: block",
                                  seq_blocks(s)[k]);
            } else {
                r->holders--;
                taken_off++;
            }
        }
    }
    for (uint32_t id = 0; id < m->n_blocks && status == TL_OK; id++) {
        if (m->records[id].holders != 0) {
            status = disagree("a record counts holders that no sequence is: block", id);
        }
    }
    for (size_t i = 0; i < m->slots.len && taken_off > 0; i++) {
        const tl_slot *s = &mgr_slots(m)[i];
        for (size_t k = 0; s->generation != 0 && k < s->n_blocks && taken_off > 0; k++) {
            m->records[seq_blocks(s)[k]].holders++;
            taken_off--;
        }
    }
    return status;
}

tl_status tl_kv_mgr_check(const tl_kv_mgr *m) {
    if (m == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_mgr_check: m is NULL");
    }
    size_t n_alive = 0;
    for (size_t i = 0; i < m->slots.len; i++) {
        if (mgr_slots(m)[i].generation != 0) {
            n_alive++;
            const tl_status status = check_slot(m, i);
            if (status != TL_OK) {
                return status;
            }
        }
    }
    const tl_status status = check_holders(m);
    if (status != TL_OK) {
        return status;
    }

    size_t n_findable = 0;
    for (uint32_t id = 0; id < m->n_blocks; id++) {
        const tl_record *r = &m->records[id];
        if (m->records[id].ns == NS_NONE) {
            continue;
        }
        n_findable++;
        if (r->name == 0 || m->records[id].ns >= m->namespaces.len) {
            return disagree("findable without a name or a namespace: block", id);
        }
        if (mgr_find(m, r->proof) != id) {
            return disagree("findable, but its proof does not lead to it: block", id);
        }
        if (tl_kv_fill(m->pool, id) != m->block_tokens) {
            return disagree("findable but not full: block", id);
        }
    }
    if (n_findable != m->stats.n_findable || n_alive != m->stats.n_seqs) {
        return disagree("the counts of findable blocks or live sequences are off", n_findable);
    }
    tl_kv_stats stats;
    tl_kv_stats_get(m->pool, &stats);
    size_t n_held = 0;
    for (uint32_t id = 0; id < m->n_blocks; id++) {
        n_held += m->records[id].holders != 0;
    }
    if (n_held > stats.used) {
        return disagree("sequences hold more blocks than the pool has in use", n_held);
    }
    return TL_OK;
}
