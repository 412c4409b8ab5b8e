/* kv_seq_view.c - reading sequences: lengths, ids, tokens, and the tables that kernels take.
 * Nothing here changes anything. */
#include "runtime/kv_mgr.h"

#include "runtime/internal.h"

#include <inttypes.h>
#include <string.h>

/* ---- reading a sequence -------------------------------------------------------------------- */

tl_status tl_kv_seq_info_get(const tl_kv_mgr *m, tl_kv_seq seq, tl_kv_seq_info *out) {
    const tl_slot *s = mgr_slot(m, seq, "tl_kv_seq_info_get");
    if (s == NULL) {
        return TL_EINVAL;
    }
    if (out == NULL) {
        return tl_fail(TL_EINVAL, "tl_kv_seq_info_get: out is NULL");
    }
    *out = (tl_kv_seq_info){s->n_tokens, s->n_cached, s->n_computed, s->n_blocks};
    return TL_OK;
}

const uint32_t *tl_kv_seq_blocks(const tl_kv_mgr *m, tl_kv_seq seq) {
    const tl_slot *s = mgr_slot(m, seq, "tl_kv_seq_blocks");
    return s == NULL || s->n_blocks == 0 ? NULL : seq_blocks(s);
}

const uint32_t *tl_kv_seq_tokens(const tl_kv_mgr *m, tl_kv_seq seq) {
    const tl_slot *s = mgr_slot(m, seq, "tl_kv_seq_tokens");
    return s == NULL || s->n_tokens == 0 ? NULL : seq_tokens(s);
}

/* ---- for kernels --------------------------------------------------------------------------- */

tl_status tl_kv_seq_block_tables(const tl_kv_mgr *m, const tl_kv_seq *seqs, size_t n_seqs,
                                 uint32_t scale, int32_t *out, size_t stride) {
    static const char who[] = "tl_kv_seq_block_tables";
    if (m == NULL || (n_seqs > 0 && (seqs == NULL || out == NULL)) || scale == 0) {
        return tl_fail(TL_EINVAL, "%s: %s", who,
                       m == NULL      ? "m is NULL"
                       : scale == 0   ? "scale is 0"
                       : seqs == NULL ? "seqs is NULL"
                                      : "out is NULL");
    }
    const int small = (uint64_t)(m->n_blocks - 1) * scale <= INT32_MAX;
    for (size_t i = 0; i < n_seqs; i++, out += stride) {
        const tl_slot *s = mgr_slot(m, seqs[i], who);
        if (s == NULL) {
            return TL_EINVAL;
        }
        if (s->n_blocks > stride) {
            return tl_fail(TL_EINVAL, "%s: seqs[%zu] has %zu blocks, the table %zu columns", who, i,
                           s->n_blocks, stride);
        }
        const uint32_t *ids = seq_blocks(s);
        for (size_t k = 0; k < s->n_blocks && !small; k++) {
            if ((uint64_t)ids[k] * scale > INT32_MAX) {
                return tl_fail(TL_EINVAL, "%s: block %" PRIu32 " times %" PRIu32 " exceeds int32",
                               who, ids[k], scale);
            }
        }
        for (size_t k = 0; k < s->n_blocks; k++) {
            out[k] = (int32_t)(ids[k] * scale);
        }
        memset(out + s->n_blocks, 0xFF, (stride - s->n_blocks) * sizeof *out); /* -1 */
    }
    return TL_OK;
}

tl_status tl_kv_seq_slot_mapping(const tl_kv_mgr *m, tl_kv_seq seq, size_t first, size_t n,
                                 int64_t pad, int64_t *out) {
    const tl_slot *s = mgr_slot(m, seq, "tl_kv_seq_slot_mapping");
    if (s == NULL) {
        return TL_EINVAL;
    }
    if (out == NULL && n > 0) {
        return tl_fail(TL_EINVAL, "tl_kv_seq_slot_mapping: out is NULL");
    }
    const size_t B = m->block_tokens;
    const size_t inside = first >= s->n_tokens      ? 0
                          : n < s->n_tokens - first ? n
                                                    : s->n_tokens - first;
    size_t block = first / B, offset = first % B;
    for (size_t i = 0; i < inside; i++) {
        out[i] = (int64_t)seq_blocks(s)[block] * (int64_t)B + (int64_t)offset;
        if (++offset == B) {
            offset = 0;
            block++;
        }
    }
    for (size_t i = inside; i < n; i++) {
        out[i] = pad;
    }
    return TL_OK;
}
