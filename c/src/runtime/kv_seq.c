/*
 * kv_seq.c - sequences: allocate, append, fork, commit, truncate, free, and their tables.
 *
 *   tokens   t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9            B = 4, n_tokens 10
 *   blocks   b0          | b1          | b2               ceil(n_tokens / B)
 *   links    proof, name | proof, name |                  floor(n_tokens / B): full blocks only
 *
 * A call first makes room in the sequence's arrays (the only thing that can want memory), then asks
 * the pool for blocks (the only thing that can be refused), then changes things.
 */
#include "runtime/kv_mgr.h"

#include "runtime/internal.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

/* ---- handles and slots --------------------------------------------------------------------- */

static uint32_t new_generation(void) {
    static _Atomic uint32_t last;
    uint32_t g;
    do { /* one count for all managers: a handle of another one is told, too */
        g = atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1;
    } while (g == 0);
    return g;
}

static tl_kv_seq handle_of(const tl_kv_mgr *m, const tl_slot *s) {
    return (uint64_t)s->generation << 32 | (uint64_t)(s - mgr_slots(m));
}

tl_slot *mgr_slot(const tl_kv_mgr *m, tl_kv_seq s, const char *who) {
    if (TL_UNLIKELY(m == NULL)) {
        tl_errorf("%s: m is NULL", who);
        return NULL;
    }
    const size_t at = (uint32_t)s;
    const uint32_t generation = (uint32_t)(s >> 32);
    if (TL_UNLIKELY(generation == 0 || at >= m->slots.len ||
                    mgr_slots(m)[at].generation != generation)) {
        tl_errorf("%s: %016" PRIx64 " is not a live sequence of this manager: freed already, or "
                  "another manager's",
                  who, s);
        return NULL;
    }
    return &mgr_slots(m)[at];
}

static inline size_t blocks_for(const tl_kv_mgr *m, size_t n_tokens) {
    return n_tokens / m->block_tokens + (n_tokens % m->block_tokens != 0);
}

/* Room for n elements in a vector whose len is kept elsewhere; grows by half at least. */
static tl_status make_room(tl_vec *v, size_t used, size_t n) {
    if (n <= v->cap) {
        return TL_OK;
    }
    v->len = used; /* what reserve moves */
    const size_t more = v->cap + v->cap / 2;
    const tl_status status = tl_vec_reserve(v, n > more ? n : more);
    v->len = 0;
    return status;
}

static tl_status slot_room(const tl_kv_mgr *m, tl_slot *s, size_t n_tokens, const char *who) {
    if (make_room(&s->tokens, s->n_tokens, n_tokens) != TL_OK ||
        make_room(&s->blocks, s->n_blocks, blocks_for(m, n_tokens)) != TL_OK ||
        make_room(&s->links, s->n_links, n_tokens / m->block_tokens) != TL_OK) {
        return tl_fail(TL_ENOMEM, "%s: no memory for a sequence of %zu tokens", who, n_tokens);
    }
    return TL_OK;
}

/* A free slot with room for n_tokens, still free (generation 0); NULL without memory. */
static tl_slot *new_slot(tl_kv_mgr *m, size_t n_tokens, const char *who) {
    if (m->free_slots.len == 0) {
        tl_slot fresh = {0};
        (void)tl_vec_init(&fresh.tokens, sizeof(uint32_t));
        (void)tl_vec_init(&fresh.blocks, sizeof(uint32_t));
        (void)tl_vec_init(&fresh.links, sizeof(tl_link));
        const uint32_t at = (uint32_t)m->slots.len;
        /* room to free it again is made now, so that freeing never allocates */
        if (m->slots.len >= UINT32_MAX ||
            make_room(&m->free_slots, m->free_slots.len, m->slots.len + 1) != TL_OK ||
            tl_vec_push(&m->slots, &fresh) != TL_OK) {
            m->free_slots.len = 0;
            tl_errorf("%s: no memory for another sequence", who);
            return NULL;
        }
        m->free_slots.len = 0;
        (void)tl_vec_push(&m->free_slots, &at);
    }
    const uint32_t *free_slots = m->free_slots.data;
    tl_slot *s = &mgr_slots(m)[free_slots[m->free_slots.len - 1]];
    s->n_tokens = s->n_cached = s->n_computed = s->n_blocks = s->n_links = s->n_named = 0;
    s->copying = s->cut = 0;
    return slot_room(m, s, n_tokens, who) == TL_OK ? s : NULL;
}

/* Makes the slot of new_slot a live sequence. */
static tl_kv_seq bring_to_life(tl_kv_mgr *m, tl_slot *s) {
    m->free_slots.len--;
    s->generation = new_generation();
    s->stamp = 0;
    if (++m->stats.n_seqs > m->stats.peak_seqs) {
        m->stats.peak_seqs = m->stats.n_seqs;
    }
    return handle_of(m, s);
}

/* Drops blocks [from, n_blocks), tail first. */
static void drop_blocks(tl_kv_mgr *m, tl_slot *s, size_t from) {
    while (s->n_blocks > from) {
        mgr_drop(m, seq_blocks(s)[--s->n_blocks]);
    }
}

void seq_release(tl_kv_mgr *m, tl_slot *s) {
    drop_blocks(m, s, 0);
    s->generation = 0;
    m->stats.n_seqs--;
    const uint32_t at = (uint32_t)(s - mgr_slots(m));
    (void)tl_vec_push(&m->free_slots, &at); /* has room: new_slot made it */
}

void seq_dispose(tl_slot *s) {
    tl_vec_free(&s->tokens);
    tl_vec_free(&s->blocks);
    tl_vec_free(&s->links);
}

/* ---- names and proofs ---------------------------------------------------------------------- */

static inline int has_prefix_cache(const tl_kv_mgr *m) {
    return (m->opt.flags & TL_KV_MGR_NO_PREFIX_CACHE) == 0;
}

/* Proofs of the full blocks that have none yet. */
static void extend_links(tl_kv_mgr *m, tl_slot *s) {
    const size_t n_full = s->n_tokens / m->block_tokens;
    if (s->n_links >= n_full || !has_prefix_cache(m)) {
        return;
    }
    tl_link *links = seq_links(s);
    tl_proof proof = s->n_links > 0
                         ? links[s->n_links - 1].proof
                         : tl_proof_start(&m->key, mgr_namespaces(m)[s->ns].root, s->epoch);
    for (size_t i = s->n_links; i < n_full; i++) {
        proof = tl_proof_step(&m->key, proof, seq_tokens(s) + i * m->block_tokens);
        links[i].proof = proof;
    }
    s->n_links = n_full;
}

/* The name of full block i; those before it have theirs. */
static uint64_t parent_of(const tl_kv_mgr *m, const tl_slot *s, size_t i) {
    return i > 0 ? seq_links(s)[i - 1].name : mgr_namespaces(m)[s->ns].root;
}

static void extend_names(tl_kv_mgr *m, tl_slot *s, size_t n) {
    if (s->n_named >= n) {
        return;
    }
    const uint32_t B = m->block_tokens;
    tl_link *links = seq_links(s);
    uint64_t name = parent_of(m, s, s->n_named);
    for (size_t i = s->n_named; i < n; i++) {
        name = links[i].name = tl_kv_block_hash(name, seq_tokens(s) + i * B, B);
        if (m->far) {
            m->opt.prefetch(m->pool, name, 0);
        }
    }
    s->n_named = n;
}

/* ---- allocate ------------------------------------------------------------------------------ */

static const tl_kv_request default_request = {0, SIZE_MAX, 0, 0};

/* What an allocation would take, before anything is changed: the sequence is laid out in a slot
 * that is not alive yet, its first n_hits block ids are hits. */
typedef struct {
    tl_slot *slot;
    size_t n_hits, n_hits_cached, n_blocks;
} plan;

#define FIND_CHUNK 16u

/* The longest findable prefix of the slot's links, at most `limit` blocks: their ids. */
static void find_prefix(tl_kv_mgr *m, size_t limit, plan *p) {
    tl_slot *s = p->slot;
    const tl_link *links = seq_links(s);
    uint32_t *ids = seq_blocks(s);
    p->n_hits = p->n_hits_cached = 0;
    for (size_t start = 0; start < limit; start += FIND_CHUNK) {
        const size_t end = limit - start < FIND_CHUNK ? limit : start + FIND_CHUNK;
        for (size_t i = start; i < end; i++) {
            mgr_prefetch(m, links[i].proof);
        }
        for (size_t i = start; i < end; i++) {
            const uint32_t id = mgr_find(m, links[i].proof);
            if (id == NO_BLOCK) {
                return;
            }
            ids[i] = id;
            p->n_hits++;
            p->n_hits_cached += m->records[id].holders == 0;
        }
    }
}

static tl_status make_plan(tl_kv_mgr *m, const uint32_t *toks, size_t n, const tl_kv_request *req,
                           const char *who, plan *p) {
    if (m == NULL || (toks == NULL && n > 0)) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who, m == NULL ? "m" : "toks");
    }
    p->n_blocks = blocks_for(m, n);
    if (p->n_blocks > UINT32_MAX) {
        return tl_fail(TL_EINVAL, "%s: %zu tokens need more than 2^32 blocks", who, n);
    }
    if (p->n_blocks > m->n_blocks) { /* whatever it hits: refused before anything is hashed */
        return tl_fail(TL_EFULL, "%s: %zu blocks needed, the pool has %" PRIu32, who, p->n_blocks,
                       m->n_blocks);
    }
    tl_slot *s = p->slot = new_slot(m, n, who);
    if (s == NULL) {
        return TL_ENOMEM;
    }
    s->ns = mgr_namespace(m, req->root, who);
    if (s->ns == NS_NONE) {
        return TL_ENOMEM;
    }
    mgr_notice_evictions(m);
    s->epoch = mgr_namespaces(m)[s->ns].epoch;
    if (n > 0) {
        memcpy(s->tokens.data, toks, n * sizeof *toks);
    }
    s->n_tokens = n;
    extend_links(m, s);
    const size_t B = m->block_tokens;
    size_t limit = n == 0 ? 0 : (req->match_last ? n : n - 1) / B;
    limit = limit > req->max_cached / B ? req->max_cached / B : limit;
    find_prefix(m, has_prefix_cache(m) ? limit : 0, p);
    return TL_OK;
}

/* TL_OK when the plan fits; cached hits are blocks that leave the free + cached ones, too. */
static tl_status fits(const tl_kv_mgr *m, const plan *p, const char *who) {
    const size_t wanted = p->n_blocks - p->n_hits + p->n_hits_cached + m->opt.watermark;
    const size_t room = mgr_room(m);
    if (wanted > room) {
        return tl_fail(TL_EFULL,
                       "%s: %zu blocks needed (%zu new, %zu cached hits, watermark %" PRIu32
                       "), %zu are free or cached",
                       who, wanted, p->n_blocks - p->n_hits, p->n_hits_cached, m->opt.watermark,
                       room);
    }
    return TL_OK;
}

/* Takes a reference on each hit. A hit that the pool no longer has under its name ends them. */
static void take_hits(tl_kv_mgr *m, plan *p) {
    const uint32_t *ids = seq_blocks(p->slot);
    for (size_t i = 0; i < p->n_hits; i++) {
        tl_record *r = &m->records[ids[i]];
        uint32_t id = ids[i];
        if (r->holders > 0) {
            tl_kv_ref(m->pool, id);
        } else if (TL_UNLIKELY(tl_kv_lookup(m->pool, r->name, &id) != TL_OK || id != ids[i])) {
            if (id != ids[i]) {
                (void)tl_kv_unref(m->pool, id);
            }
            mgr_unfind(m, ids[i]);
            r->name = 0;
            p->n_hits = i;
            return;
        }
        r->holders++;
        seq_links(p->slot)[i].name = r->name;
    }
}

tl_status tl_kv_seq_allocate(tl_kv_mgr *m, const uint32_t *toks, size_t n, const tl_kv_request *req,
                             tl_kv_seq *out) {
    static const char who[] = "tl_kv_seq_allocate";
    if (out == NULL) {
        return tl_fail(TL_EINVAL, "%s: out is NULL", who);
    }
    req = req == NULL ? &default_request : req;
    plan p = {0};
    tl_status status = make_plan(m, toks, n, req, who, &p);
    if (status == TL_OK) {
        status = fits(m, &p, who);
    }
    if (status != TL_OK) {
        m->stats.refused += m != NULL && status == TL_EFULL;
        return status;
    }
    tl_slot *s = p.slot;
    const size_t planned = p.n_hits;
    take_hits(m, &p);
    if (TL_UNLIKELY(p.n_hits <
                    planned)) { /* the pool was changed elsewhere: there is less to take */
        p.n_hits_cached = 0;
        status = fits(m, &p, who);
    }
    if (status == TL_OK) {
        status = mgr_take(m, (uint32_t)(p.n_blocks - p.n_hits), seq_blocks(s) + p.n_hits);
    }
    if (status != TL_OK) {
        s->n_blocks = p.n_hits;
        drop_blocks(m, s, 0);
        m->stats.refused++;
        return status;
    }
    s->n_blocks = p.n_blocks;
    s->n_named = p.n_hits;
    s->n_cached = s->n_computed = p.n_hits * m->block_tokens;
    if (!req->resumed) {
        m->stats.prompt_tokens += n;
        m->stats.hit_tokens += s->n_cached;
        m->stats.hit_blocks += p.n_hits;
    }
    *out = bring_to_life(m, s);
    return TL_OK;
}

tl_status tl_kv_seq_can_allocate(tl_kv_mgr *m, const uint32_t *toks, size_t n,
                                 const tl_kv_request *req, size_t *n_cached, size_t *n_new) {
    static const char who[] = "tl_kv_seq_can_allocate";
    req = req == NULL ? &default_request : req;
    plan p = {0};
    tl_status status;
    if (m != NULL && mgr_known_namespace(m, req->root) == NS_NONE) {
        /* nothing was ever computed under this root, and asking must not make it known */
        p.n_blocks = blocks_for(m, n);
        status = toks == NULL && n > 0 ? tl_fail(TL_EINVAL, "%s: toks is NULL", who) : TL_OK;
    } else {
        status = make_plan(m, toks, n, req, who, &p);
    }
    if (status != TL_OK && status != TL_EFULL) {
        return status;
    }
    if (n_cached != NULL) {
        *n_cached = p.n_hits * m->block_tokens;
    }
    if (n_new != NULL) {
        *n_new = p.n_blocks - p.n_hits;
    }
    return status == TL_OK ? fits(m, &p, who) : status;
}

/* ---- append -------------------------------------------------------------------------------- */

/* Whether the pool has block id, which is held, under a name: then, and only then, its fill cannot
 * be set. */
static int is_registered(tl_kv_mgr *m, uint32_t id) {
    return tl_kv_set_fill(m->pool, id, tl_kv_fill(m->pool, id)) != TL_OK;
}

/* Whether the sequence's last block must be replaced by a copy before position n_tokens is written:
 * it is partial for this sequence, and immutable (registered, by us or by others) or held by
 * another sequence. */
static int tail_needs_copy(tl_kv_mgr *m, const tl_slot *s) {
    if (s->n_tokens % m->block_tokens == 0) {
        return 0;
    }
    const uint32_t id = seq_blocks(s)[s->n_blocks - 1];
    return m->records[id].name != 0 || m->records[id].holders > 1 || is_registered(m, id);
}

/* References on the sequence's last block that no sequence is, if it is partial: an export under
 * way, a user's own. 0 where the pool cannot be asked; own_tail sees to those. */
static uint32_t tail_held_elsewhere(const tl_kv_mgr *m, const tl_slot *s) {
    if (m->opt.refs == NULL || s->n_tokens % m->block_tokens == 0) {
        return 0;
    }
    const uint32_t id = seq_blocks(s)[s->n_blocks - 1];
    return m->opt.refs(m->pool, id) - m->records[id].holders;
}

/* The fill of the last block: what is computed of it, if this sequence alone may say. */
static void set_tail_fill(tl_kv_mgr *m, const tl_slot *s) {
    const size_t B = m->block_tokens;
    if (s->n_tokens % B == 0) {
        return;
    }
    const uint32_t id = seq_blocks(s)[s->n_blocks - 1];
    const size_t begin = (s->n_blocks - 1) * B;
    if (m->records[id].name == 0 && m->records[id].holders == 1) {
        (void)tl_kv_set_fill(m->pool, id,
                             s->n_computed > begin ? (uint32_t)(s->n_computed - begin) : 0);
    }
}

/* Appends one token to a sequence whose slot is writable and whose arrays have room. */
static inline void push_token(tl_kv_mgr *m, tl_slot *s, uint32_t token) {
    seq_tokens(s)[s->n_tokens++] = token;
    if (s->n_tokens % m->block_tokens == 0) {
        extend_links(m, s);
    }
}

/* Puts `fresh` in the place of the last block, with its contents. */
static tl_kv_copy replace_tail(tl_kv_mgr *m, tl_slot *s, uint32_t fresh) {
    uint32_t *last = &seq_blocks(s)[s->n_blocks - 1];
    const tl_kv_copy copy = {*last, fresh};
    if (m->opt.copy != NULL) {
        m->opt.copy(m->pool, copy.src, fresh);
    } else {
        memcpy(tl_kv_block_ptr(m->pool, fresh, 0, 0), tl_kv_block_ptr(m->pool, copy.src, 0, 0),
               m->block_bytes);
    }
    *last = fresh;
    mgr_drop(m, copy.src);
    set_tail_fill(m, s);
    m->stats.copies++;
    return copy;
}

/*
 * The last block is this sequence's alone, as far as sequences go. Where the pool cannot tell its
 * references, its copy on write sees those from elsewhere: TL_EFULL when it had to copy and could
 * not. A copy made here is as good as the original, so it stays if the call then fails.
 */
static tl_status own_tail(tl_kv_mgr *m, tl_slot *s, tl_kv_copy *copies, size_t *n_copies) {
    if (s->n_tokens % m->block_tokens == 0) {
        return TL_OK;
    }
    if (s->cut) {
        s->cut = 0;
        set_tail_fill(m, s);
    }
    if (m->opt.refs != NULL) {
        return TL_OK;
    }
    uint32_t *last = &seq_blocks(s)[s->n_blocks - 1];
    uint32_t mine;
    const tl_status status = tl_kv_cow(m->pool, *last, &mine);
    if (TL_LIKELY(status != TL_OK || mine == *last)) {
        return status;
    }
    const tl_kv_copy copy = {*last, mine};
    mgr_notice_evictions(m); /* cow may have evicted: safe, if blunt, and rare */
    m->records[copy.src].holders--;
    m->records[mine] = (tl_record){.ns = NS_NONE, .holders = 1};
    *last = mine;
    m->stats.copies++;
    if (copies != NULL) {
        copies[*n_copies] = copy;
    }
    (*n_copies)++;
    return TL_OK;
}

static tl_status no_room(tl_kv_mgr *m, size_t wanted, const char *who) {
    m->stats.refused++;
    return tl_fail(TL_EFULL, "%s: %zu blocks needed, %zu are free or cached", who, wanted,
                   mgr_room(m));
}

tl_status tl_kv_seq_append(tl_kv_mgr *m, tl_kv_seq seq, const uint32_t *toks, size_t n,
                           tl_kv_copy *copies, size_t *n_copies) {
    static const char who[] = "tl_kv_seq_append";
    tl_slot *s = mgr_slot(m, seq, who);
    size_t done = 0;
    if (s == NULL) {
        return TL_EINVAL;
    }
    if (toks == NULL && n > 0) {
        return tl_fail(TL_EINVAL, "%s: toks is NULL", who);
    }
    if (n_copies != NULL) {
        *n_copies = 0;
    }
    if (n == 0) {
        return TL_OK;
    }
    if (n > SIZE_MAX - s->n_tokens || blocks_for(m, s->n_tokens + n) > UINT32_MAX) {
        return tl_fail(TL_EINVAL, "%s: more than 2^32 blocks", who);
    }
    const size_t more = blocks_for(m, s->n_tokens + n) - s->n_blocks;
    if (slot_room(m, s, s->n_tokens + n, who) != TL_OK ||
        make_room(&s->blocks, s->n_blocks, s->n_blocks + more + 1) != TL_OK) {
        return TL_ENOMEM;
    }
    mgr_notice_evictions(m);
    const size_t copy = (size_t)(tail_needs_copy(m, s) || tail_held_elsewhere(m, s) > 0);
    if (more + copy > mgr_room(m)) {
        return no_room(m, more + copy, who);
    }
    uint32_t *fresh = seq_blocks(s) + s->n_blocks; /* the new blocks, then the copy's */
    if ((!copy && own_tail(m, s, copies, &done) != TL_OK) ||
        (more + copy > 0 && mgr_take(m, (uint32_t)(more + copy), fresh) != TL_OK)) {
        return no_room(m, more + copy, who);
    }
    if (copy) {
        const tl_kv_copy c = replace_tail(m, s, fresh[more]);
        if (copies != NULL) {
            copies[0] = c;
        }
        done = 1;
    }
    s->n_blocks += more;
    memcpy(seq_tokens(s) + s->n_tokens, toks, n * sizeof *toks);
    s->n_tokens += n;
    extend_links(m, s);
    if (n_copies != NULL) {
        *n_copies = done;
    }
    return TL_OK;
}

/* Validates a batch of handles: alive, and each there once. */
static tl_status check_batch(tl_kv_mgr *m, const tl_kv_seq *seqs, size_t n, const char *who) {
    if (m == NULL || (seqs == NULL && n > 0)) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who, m == NULL ? "m" : "seqs");
    }
    if (++m->stamp == 0) { /* the stamps of 2^32 batches ago must not look like this one's */
        for (size_t i = 0; i < m->slots.len; i++) {
            mgr_slots(m)[i].stamp = 0;
        }
        m->stamp = 1;
    }
    for (size_t i = 0; i < n; i++) {
        tl_slot *s = mgr_slot(m, seqs[i], who);
        if (s == NULL) {
            return TL_EINVAL;
        }
        if (s->stamp == m->stamp) {
            return tl_fail(TL_EINVAL, "%s: seqs[%zu] is in the batch twice", who, i);
        }
        s->stamp = m->stamp;
    }
    return TL_OK;
}

/* The slot of a handle that check_batch has seen. */
static inline tl_slot *known_slot(const tl_kv_mgr *m, tl_kv_seq s) {
    return &mgr_slots(m)[(uint32_t)s];
}

/*
 * Marks the sequences of a batch whose last block is going to be replaced, and counts the blocks
 * that the batch takes. Of h forks that share a last block and are all in the batch, h - 1 copy and
 * the last one keeps it: so each that copies is taken off the holders while we count.
 */
static size_t plan_copies(tl_kv_mgr *m, const tl_kv_seq *seqs, size_t n_seqs) {
    size_t wanted = 0;
    for (size_t i = 0; i < n_seqs; i++) { /* while the holders are what they are */
        tl_slot *s = known_slot(m, seqs[i]);
        s->copying = tail_held_elsewhere(m, s) > 0;
    }
    for (size_t i = 0; i < n_seqs; i++) {
        tl_slot *s = known_slot(m, seqs[i]);
        s->copying = s->copying || tail_needs_copy(m, s);
        if (s->copying) {
            m->records[seq_blocks(s)[s->n_blocks - 1]].holders--;
        }
        wanted += (size_t)(s->copying || s->n_tokens % m->block_tokens == 0);
    }
    for (size_t i = 0; i < n_seqs; i++) {
        tl_slot *s = known_slot(m, seqs[i]);
        if (s->copying) {
            m->records[seq_blocks(s)[s->n_blocks - 1]].holders++;
        }
    }
    return wanted;
}

tl_status tl_kv_seq_append_batch(tl_kv_mgr *m, const tl_kv_seq *seqs, size_t n_seqs,
                                 const uint32_t *toks, tl_kv_copy *copies, size_t *n_copies) {
    static const char who[] = "tl_kv_seq_append_batch";
    tl_status status = check_batch(m, seqs, n_seqs, who);
    if (status != TL_OK) {
        return status;
    }
    if (toks == NULL && n_seqs > 0) {
        return tl_fail(TL_EINVAL, "%s: toks is NULL", who);
    }
    if (n_copies != NULL) {
        *n_copies = 0;
    }
    for (size_t i = 0; i < n_seqs; i++) {
        tl_slot *s = known_slot(m, seqs[i]);
        if ((s->n_blocks == s->blocks.cap || s->n_tokens == s->tokens.cap ||
             s->links.cap < (s->n_tokens + 1) / m->block_tokens) &&
            slot_room(m, s, s->n_tokens + 1, who) != TL_OK) {
            return TL_ENOMEM;
        }
    }
    mgr_notice_evictions(m);
    const size_t wanted = plan_copies(m, seqs, n_seqs);
    if (wanted > mgr_room(m)) {
        return no_room(m, wanted, who);
    }
    if (make_room(&m->scratch, 0, wanted) != TL_OK) {
        return tl_fail(TL_ENOMEM, "%s: no memory for %zu block ids", who, wanted);
    }
    uint32_t *fresh = m->scratch.data;
    if (wanted > 0 && mgr_take(m, (uint32_t)wanted, fresh) != TL_OK) {
        return no_room(m, wanted, who);
    }
    const uint32_t *const fresh_end = wanted > 0 ? fresh + wanted : fresh;
    size_t done = 0;
    for (size_t i = 0; i < n_seqs; i++) {
        tl_slot *s = known_slot(m, seqs[i]);
        if (s->copying) {
            const tl_kv_copy c = replace_tail(m, s, *fresh++);
            if (copies != NULL) {
                copies[done] = c;
            }
            done++;
        }
    }
    for (size_t i = 0; i < n_seqs; i++) {
        tl_slot *s = known_slot(m, seqs[i]);
        if (!s->copying && own_tail(m, s, copies, &done) != TL_OK) {
            while (fresh < fresh_end) {
                mgr_drop(m, *fresh++);
            }
            return no_room(m, wanted + 1, who);
        }
    }
    for (size_t i = 0; i < n_seqs; i++) {
        tl_slot *s = known_slot(m, seqs[i]);
        if (s->n_tokens % m->block_tokens == 0) {
            seq_blocks(s)[s->n_blocks++] = *fresh++;
        }
        push_token(m, s, toks[i]);
    }
    if (n_copies != NULL) {
        *n_copies = done;
    }
    return TL_OK;
}

/* How many blocks ahead a commit makes names and asks for groups of the index. */
#define STORE_AHEAD ((size_t)4)

/* ---- commit -------------------------------------------------------------------------------- */

/* The block that the pool has under a name, or NO_BLOCK. Without `find` the question is a use. */
static uint32_t holder_of(tl_kv_mgr *m, uint64_t name) {
    uint32_t id = NO_BLOCK;
    if (m->opt.find != NULL) {
        return m->opt.find(m->pool, name, &id) ? id : NO_BLOCK;
    }
    if (tl_kv_lookup(m->pool, name, &id) == TL_OK) {
        (void)tl_kv_unref(m->pool, id);
    }
    return id;
}

/*
 * A full, computed block met its name held by another block. TL_OK: the name is free now, try
 * again. Else it stays private, for the reason counted. A holder that is findable keeps the name,
 * forged or not: if the later one took it, a forgery could throw a victim's prefix out of the
 * cache. A cached one that nobody can prove anything about (imported and let go without adopt) has
 * to leave.
 */
static tl_status meet_held_name(tl_kv_mgr *m, const tl_link *link) {
    if (mgr_find(m, link->proof) != NO_BLOCK) {
        m->stats.duplicates++;
        return TL_EBUSY;
    }
    /* Without `find` nobody asks: a lookup would keep the holder in use for ever. */
    const uint32_t holder = m->opt.find != NULL ? holder_of(m, link->name) : NO_BLOCK;
    if (holder != NO_BLOCK && m->records[holder].ns != NS_NONE &&
        m->records[holder].name == link->name) {
        m->stats.collisions++; /* findable, so its proof is known, and it is another one */
        return TL_EBUSY;
    }
    if (holder != NO_BLOCK && m->records[holder].holders == 0 && m->opt.evict != NULL &&
        m->opt.evict(m->pool, holder) == TL_OK) {
        m->records[holder].name = 0;
        return TL_OK;
    }
    m->stats.unproven++;
    return TL_EBUSY;
}

/* Full blocks [first, end) of the sequence are computed: those that have no name get one. */
static void commit_blocks(tl_kv_mgr *m, tl_slot *s, size_t first, size_t end) {
    const int named = has_prefix_cache(m) && s->epoch == mgr_namespaces(m)[s->ns].epoch;
    const tl_link *links = seq_links(s);
    for (size_t i = first; i < end; i++) {
        const uint32_t id = seq_blocks(s)[i];
        if (named) {
            /* A name is a chain of multiplications that waits for the one before: it is made some
             * blocks ahead, and the processor works on it while this block is registered. */
            const size_t ahead = end - i > STORE_AHEAD ? i + STORE_AHEAD : end - 1;
            extend_names(m, s, ahead + 1);
            mgr_prefetch(m, links[ahead].proof);
            if (m->far) {
                m->opt.prefetch(m->pool, links[(i + ahead) / 2].name, 1);
            }
        }
        if (m->records[id].name != 0) {
            continue; /* a hit, or a fork has committed it */
        }
        (void)tl_kv_set_fill(m->pool, id, m->block_tokens);
        if (!named) {
            continue;
        }
        tl_status status = tl_kv_register(m->pool, id, links[i].name);
        if (status == TL_EBUSY && meet_held_name(m, &links[i]) == TL_OK) {
            status = tl_kv_register(m->pool, id, links[i].name);
        }
        if (status == TL_OK) {
            mgr_store(m, id, s->ns, links[i].proof, links[i].name, parent_of(m, s, i),
                      seq_tokens(s) + i * m->block_tokens);
        }
    }
}

static tl_status check_computed(const tl_slot *s, size_t n_computed, const char *who) {
    return n_computed <= s->n_tokens
               ? TL_OK
               : tl_fail(TL_EINVAL, "%s: %zu tokens computed, the sequence has %zu", who,
                         n_computed, s->n_tokens);
}

static void commit(tl_kv_mgr *m, tl_slot *s, size_t n_computed) {
    if (n_computed <= s->n_computed) {
        return;
    }
    const size_t B = m->block_tokens;
    const size_t first = s->n_computed / B, end = n_computed / B;
    s->n_computed = n_computed;
    if (first < end) {
        commit_blocks(m, s, first, end);
    }
    if (n_computed % B != 0 && m->records[seq_blocks(s)[end]].name == 0) {
        /* what is shared is shared with the same content: one holder may speak for all */
        const uint32_t id = seq_blocks(s)[end];
        if (tl_kv_fill(m->pool, id) < n_computed % B) {
            (void)tl_kv_set_fill(m->pool, id, (uint32_t)(n_computed % B));
        }
    }
}

tl_status tl_kv_seq_commit(tl_kv_mgr *m, tl_kv_seq seq, size_t n_computed) {
    tl_slot *s = mgr_slot(m, seq, "tl_kv_seq_commit");
    if (s == NULL || check_computed(s, n_computed, "tl_kv_seq_commit") != TL_OK) {
        return TL_EINVAL;
    }
    mgr_notice_evictions(m);
    commit(m, s, n_computed);
    return TL_OK;
}

tl_status tl_kv_seq_commit_batch(tl_kv_mgr *m, const tl_kv_seq *seqs, size_t n_seqs,
                                 const size_t *n_computed) {
    static const char who[] = "tl_kv_seq_commit_batch";
    tl_status status = check_batch(m, seqs, n_seqs, who);
    for (size_t i = 0; i < n_seqs && status == TL_OK && n_computed != NULL; i++) {
        status = check_computed(known_slot(m, seqs[i]), n_computed[i], who);
    }
    if (status != TL_OK) {
        return status;
    }
    mgr_notice_evictions(m);
    for (size_t i = 0; i < n_seqs; i++) {
        tl_slot *s = known_slot(m, seqs[i]);
        commit(m, s, n_computed == NULL ? s->n_tokens : n_computed[i]);
    }
    return TL_OK;
}

tl_status tl_kv_seq_found(tl_kv_mgr *m, tl_kv_seq seq, size_t n_found, int counted) {
    static const char who[] = "tl_kv_seq_found";
    tl_slot *s = mgr_slot(m, seq, who);
    if (s == NULL || check_computed(s, n_found, who) != TL_OK) {
        return TL_EINVAL;
    }
    if (s->n_computed != s->n_cached) {
        return tl_fail(TL_EINVAL, "%s: %zu tokens are computed, %zu were found by allocate", who,
                       s->n_computed, s->n_cached);
    }
    if (n_found < s->n_cached || n_found % m->block_tokens != 0) {
        return tl_fail(TL_EINVAL, "%s: n_found: expected whole blocks of %u from %zu on, found %zu",
                       who, m->block_tokens, s->n_cached, n_found);
    }
    mgr_notice_evictions(m);
    if (counted) {
        m->stats.hit_tokens += n_found - s->n_cached;
        m->stats.hit_blocks += (n_found - s->n_cached) / m->block_tokens;
    }
    commit(m, s, n_found);
    s->n_cached = n_found;
    return TL_OK;
}

/* ---- fork, truncate, free ------------------------------------------------------------------ */

tl_status tl_kv_seq_fork(tl_kv_mgr *m, tl_kv_seq seq, tl_kv_seq *out) {
    static const char who[] = "tl_kv_seq_fork";
    const tl_slot *s = mgr_slot(m, seq, who);
    if (s == NULL) {
        return TL_EINVAL;
    }
    if (out == NULL) {
        return tl_fail(TL_EINVAL, "%s: out is NULL", who);
    }
    tl_slot *child = new_slot(m, s->n_tokens, who);
    if (child == NULL) {
        return TL_ENOMEM;
    }
    s = mgr_slot(m, seq, who); /* the slots may have moved */
    child->ns = s->ns;
    child->epoch = s->epoch;
    child->n_tokens = s->n_tokens;
    child->n_cached = s->n_cached;
    child->n_computed = s->n_computed;
    child->n_blocks = s->n_blocks;
    child->n_links = s->n_links;
    child->n_named = s->n_named;
    child->cut = s->cut;
    if (s->n_tokens > 0) {
        memcpy(child->tokens.data, s->tokens.data, s->n_tokens * sizeof(uint32_t));
        memcpy(child->blocks.data, s->blocks.data, s->n_blocks * sizeof(uint32_t));
    }
    if (s->n_links > 0) {
        memcpy(child->links.data, s->links.data, s->n_links * sizeof(tl_link));
    }
    for (size_t i = 0; i < s->n_blocks; i++) {
        tl_kv_ref(m->pool, seq_blocks(s)[i]);
        m->records[seq_blocks(s)[i]].holders++;
    }
    *out = bring_to_life(m, child);
    return TL_OK;
}

tl_status tl_kv_seq_truncate(tl_kv_mgr *m, tl_kv_seq seq, size_t n) {
    tl_slot *s = mgr_slot(m, seq, "tl_kv_seq_truncate");
    if (s == NULL) {
        return TL_EINVAL;
    }
    if (n > s->n_tokens) {
        return tl_fail(TL_EINVAL, "tl_kv_seq_truncate: to %zu tokens, the sequence has %zu", n,
                       s->n_tokens);
    }
    drop_blocks(m, s, blocks_for(m, n));
    const size_t n_full = n / m->block_tokens;
    s->n_tokens = n;
    s->n_cached = s->n_cached < n ? s->n_cached : n;
    s->n_computed = s->n_computed < n ? s->n_computed : n;
    s->n_links = s->n_links < n_full ? s->n_links : n_full;
    s->n_named = s->n_named < n_full ? s->n_named : n_full;
    s->cut = 1;
    set_tail_fill(m, s);
    return TL_OK;
}

tl_status tl_kv_seq_free(tl_kv_mgr *m, tl_kv_seq seq) {
    tl_slot *s = mgr_slot(m, seq, "tl_kv_seq_free");
    if (s == NULL) {
        return TL_EINVAL;
    }
    seq_release(m, s);
    return TL_OK;
}

#define SEEN 0x80000000u /* on a record's holders: the id has been in this list */

/* ---- blocks by name ------------------------------------------------------------------------ */

tl_status tl_kv_mgr_find(tl_kv_mgr *m, const uint64_t *hashes, size_t n, int take,
                         int64_t *ids_out) {
    static const char who[] = "tl_kv_mgr_find";
    if (m == NULL || (n > 0 && (hashes == NULL || ids_out == NULL))) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who,
                       m == NULL        ? "m"
                       : hashes == NULL ? "hashes"
                                        : "ids_out");
    }
    mgr_notice_evictions(m);
    for (size_t i = 0; i < n; i++) {
        const uint32_t id = hashes[i] == 0 ? NO_BLOCK : holder_of(m, hashes[i]);
        const int findable =
            id != NO_BLOCK && m->records[id].ns != NS_NONE && m->records[id].name == hashes[i];
        ids_out[i] = findable ? (int64_t)id : -1;
        uint32_t same;
        if (findable && take && tl_kv_lookup(m->pool, hashes[i], &same) != TL_OK) {
            while (i-- > 0) { /* the last reference a block can have is taken: undo */
                if (ids_out[i] >= 0) {
                    (void)tl_kv_unref(m->pool, (uint32_t)ids_out[i]);
                }
            }
            return TL_EINVAL;
        }
    }
    return TL_OK;
}

/* ---- adopt --------------------------------------------------------------------------------- */

/* Whether anybody holds block id: a reference can be added only then, and is taken back. */
static int is_held(tl_kv_mgr *m, uint32_t id) {
    tl_kv_ref(m->pool, id);
    return tl_kv_unref(m->pool, id) == TL_OK;
}

/* Whether block i of an adopted sequence can be what its tokens say, and what is wrong if not. */
static tl_status check_adopted(tl_kv_mgr *m, const tl_slot *s, const uint32_t *ids, size_t i,
                               int proven, const char *who) {
    const size_t B = m->block_tokens;
    const uint32_t id = ids[i];
    const int full = i < s->n_tokens / B;
    const size_t wanted = full ? B : s->n_tokens % B;
    if (id >= m->n_blocks || !is_held(m, id)) {
        return tl_fail(TL_EINVAL, "%s: ids[%zu] is block %" PRIu32 ", which nobody holds", who, i,
                       id);
    }
    if (m->records[id].holders & SEEN) {
        return tl_fail(TL_EINVAL, "%s: ids[%zu] is block %" PRIu32 " once more", who, i, id);
    }
    if (m->opt.refs != NULL && m->opt.refs(m->pool, id) <= m->records[id].holders) {
        return tl_fail(TL_EINVAL,
                       "%s: ids[%zu] is block %" PRIu32
                       ", which sequences hold and the caller does not",
                       who, i, id);
    }
    if (full && has_prefix_cache(m) && m->records[id].ns != NS_NONE &&
        !tl_proof_equal(m->records[id].proof, seq_links(s)[i].proof)) {
        return tl_fail(TL_EFORMAT,
                       "%s: ids[%zu] is block %" PRIu32 ", which was computed from other tokens",
                       who, i, id);
    }
    if (proven && (!full || !has_prefix_cache(m) || m->records[id].ns == NS_NONE)) {
        return tl_fail(TL_EFORMAT,
                       "%s: ids[%zu] is block %" PRIu32 ", which nothing proves to be these tokens",
                       who, i, id);
    }
    if (tl_kv_fill(m->pool, id) < wanted) {
        return tl_fail(TL_EFORMAT,
                       "%s: ids[%zu] is block %" PRIu32 " with %" PRIu32
                       " positions, its tokens are %zu",
                       who, i, id, tl_kv_fill(m->pool, id), wanted);
    }
    if (is_registered(m, id) &&
        (!full || (has_prefix_cache(m) && holder_of(m, seq_links(s)[i].name) != id))) {
        return tl_fail(TL_EFORMAT,
                       "%s: ids[%zu] is block %" PRIu32
                       ", which is registered, but not under the name of these tokens",
                       who, i, id);
    }
    return TL_OK;
}

tl_status tl_kv_mgr_adopt(tl_kv_mgr *m, const uint32_t *toks, size_t n, uint64_t root,
                          const uint32_t *ids, tl_kv_seq *out) {
    return tl_kv_mgr_adopt_proven(m, toks, n, root, ids, NULL, out);
}

tl_status tl_kv_mgr_adopt_proven(tl_kv_mgr *m, const uint32_t *toks, size_t n, uint64_t root,
                                 const uint32_t *ids, const uint8_t *proven, tl_kv_seq *out) {
    static const char who[] = "tl_kv_mgr_adopt";
    if (out == NULL) {
        return tl_fail(TL_EINVAL, "%s: out is NULL", who);
    }
    const tl_kv_request req = {root, 0, 1, 0};
    plan p = {0};
    tl_status status = make_plan(m, toks, n, &req, who, &p);
    if (status != TL_OK) {
        return status;
    }
    if (ids == NULL && p.n_blocks > 0) {
        return tl_fail(TL_EINVAL, "%s: ids is NULL", who);
    }
    tl_slot *s = p.slot;
    const size_t B = m->block_tokens;
    if (has_prefix_cache(m)) {
        extend_names(m, s, n / B);
    }
    size_t ok = 0;
    for (; ok < p.n_blocks && status == TL_OK; ok++) {
        status = check_adopted(m, s, ids, ok, proven != NULL && proven[ok], who);
        if (status != TL_OK) {
            break;
        }
        m->records[ids[ok]].holders |= SEEN;
    }
    while (ok-- > 0) {
        m->records[ids[ok]].holders &= ~SEEN;
    }
    if (status != TL_OK) {
        return status;
    }
    for (size_t i = 0; i < p.n_blocks; i++) {
        seq_blocks(s)[i] = ids[i];
        m->records[ids[i]].holders++;
    }
    s->n_blocks = p.n_blocks;
    *out = bring_to_life(m, s);
    s->cut = 1; /* the last block may hold more positions than these tokens are */
    /* Names that the blocks came with are ours to vouch for now: the tokens are known. */
    for (size_t i = 0; i < s->n_links; i++) {
        const tl_link *link = &seq_links(s)[i];
        const uint32_t id = seq_blocks(s)[i];
        if (m->records[id].name == 0 && mgr_find(m, link->proof) == NO_BLOCK &&
            holder_of(m, link->name) == id) {
            mgr_store(m, id, s->ns, link->proof, link->name, parent_of(m, s, i),
                      seq_tokens(s) + i * B);
        }
    }
    commit(m, s, n);
    set_tail_fill(m, s);
    return TL_OK;
}
