/*
 * kv_wire.c - an envelope in parts, and in pieces: the same bytes as tl_kv_export, for those who
 * have no use for one large buffer; and an envelope without a pool. What the bytes are, and the
 * reader rules, is in kv_pool.c and formats/kv-block.md.
 */
#include "runtime/kv_wire.h"

#include "numerics/copy_crc.h"
#include "numerics/crc32c_shift.h"
#include "runtime/internal.h"
#include "runtime/kv_pool_impl.h"
#include "tinyllm/kv_pool_ext.h"

#include <inttypes.h>

uint32_t tl_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t n_bytes_b) {
    /* Both inversions of a reach b's end, where they meet those of b and cancel. */
    return tl_crc32c_mul(tl_crc32c_xpow(n_bytes_b % TL_CRC32C_ORDER * 8), crc_a) ^ crc_b;
}

/* ---- parts --------------------------------------------------------------------------------- */

/* The size of a part that is known to fit an envelope whose size fits. */
static size_t part_bytes(const tl_kv_pool *p, uint32_t n, uint32_t first, uint32_t count) {
    return (first == 0 ? TL_KV_ENVELOPE_HEADER : 0) + count * (TL_KV_RECORD + p->block_bytes) +
           (first + count == n ? TL_KV_TRAILER : 0);
}

tl_status tl_kv_export_part(const tl_kv_pool *p, const uint32_t *ids, uint32_t n, uint32_t first,
                            uint32_t count, void *buf, size_t cap, size_t *written, uint32_t *crc) {
    static const char who[] = "tl_kv_export_part";
    if (written == NULL || crc == NULL) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who, written == NULL ? "written" : "crc");
    }
    *written = 0;
    if (buf == NULL && cap > 0) {
        return tl_fail(TL_EINVAL, "%s: buf is NULL", who);
    }
    if (first > n || count > n - first) {
        return tl_fail(TL_EINVAL,
                       "%s: blocks %" PRIu32 " to %" PRIu64 ", the envelope has %" PRIu32, who,
                       first, (uint64_t)first + count, n);
    }
    if (p == NULL || (ids == NULL && count > 0)) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who, p == NULL ? "p" : "ids");
    }
    if (tl_kv_envelope_bytes(n, p->block_bytes) == SIZE_MAX) {
        return tl_fail(TL_EINVAL, "%s: an envelope of %" PRIu32 " blocks overflows", who, n);
    }
    const uint32_t *const mine = ids == NULL ? NULL : ids + first;
    size_t unused;
    const tl_status status = tl_kv_export_check(p, mine, count, who, &unused);
    if (status != TL_OK) {
        return status;
    }
    const size_t size = part_bytes(p, n, first, count);
    if (size == 0) {
        return TL_OK; /* no blocks, neither the first nor the last of some */
    }
    if (buf == NULL || cap < size) {
        *written = size;
        return tl_fail(TL_EFULL, "%s: %zu bytes needed, the buffer has %zu", who, size, cap);
    }
    uint8_t *out = buf;
    uint32_t sum = *crc;
    if (first == 0) {
        sum = tl_kv_put_header(p, n, out);
        out += TL_KV_ENVELOPE_HEADER;
    }
    sum = tl_kv_put_blocks(p, mine, count, out, sum, tl_copy_streams(size));
    if (first + count == n) {
        put_u32((uint8_t *)buf + size - TL_KV_TRAILER, sum);
    }
    *crc = sum;
    *written = size;
    return TL_OK;
}

/* ---- pieces -------------------------------------------------------------------------------- */

/* Whether a block's payload can be sent as it lies in the slab. */
static int is_as_on_the_wire(const tl_kv_pool *p, uint32_t id) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    (void)p, (void)id;
    return 0;
#else
    return p->blocks[id].fill == p->cfg.block_tokens;
#endif
}

tl_status tl_kv_export_pieces(const tl_kv_pool *p, const uint32_t *ids, uint32_t n, void *scratch,
                              size_t scratch_cap, tl_kv_piece *pieces, size_t pieces_cap,
                              size_t *scratch_bytes, size_t *n_pieces) {
    static const char who[] = "tl_kv_export_pieces";
    if (scratch_bytes == NULL || n_pieces == NULL) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who,
                       scratch_bytes == NULL ? "scratch_bytes" : "n_pieces");
    }
    *scratch_bytes = *n_pieces = 0;
    size_t size;
    const tl_status status = tl_kv_export_check(p, ids, n, who, &size);
    if (status != TL_OK) {
        return status;
    }
    size_t n_direct = 0;
    for (uint32_t i = 0; i < n; i++) {
        n_direct += (size_t)is_as_on_the_wire(p, ids[i]);
    }
    const size_t scratch_need = size - n_direct * p->block_bytes, need = 2 * n_direct + 1;
    if ((scratch == NULL && scratch_cap > 0) || (pieces == NULL && pieces_cap > 0)) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who, scratch == NULL ? "scratch" : "pieces");
    }
    *scratch_bytes = scratch_need;
    *n_pieces = need;
    if (scratch == NULL || pieces == NULL || scratch_cap < scratch_need || pieces_cap < need) {
        return tl_fail(TL_EFULL,
                       "%s: %zu bytes of scratch and %zu pieces needed, there are %zu and %zu", who,
                       scratch_need, need, scratch_cap, pieces_cap);
    }
    /* Everything that is not a payload in the slab goes to scratch, in order; `from` is where the
     * piece of it that is being made begins. */
    uint8_t *out = scratch, *from = out;
    uint32_t crc = tl_kv_put_header(p, n, out);
    out += TL_KV_ENVELOPE_HEADER;
    for (uint32_t i = 0; i < n; i++) {
        if (!is_as_on_the_wire(p, ids[i])) {
            crc = tl_kv_put_blocks(p, &ids[i], 1, out, crc, 0);
            out += TL_KV_RECORD + p->block_bytes;
            continue;
        }
        crc = tl_kv_put_record(p, ids[i], out, crc);
        out += TL_KV_RECORD;
        const uint8_t *payload = p->slab + ids[i] * p->block_bytes;
        crc = tl_crc32c(payload, p->block_bytes, crc);
        *pieces++ = (tl_kv_piece){from, (size_t)(out - from)};
        *pieces++ = (tl_kv_piece){payload, p->block_bytes};
        from = out;
    }
    put_u32(out, crc);
    out += TL_KV_TRAILER;
    *pieces = (tl_kv_piece){from, (size_t)(out - from)};
    return TL_OK;
}

/* ---- without a pool ------------------------------------------------------------------------ */

tl_status tl_kv_envelope_check(const void *buf, size_t len, const tl_kv_cfg *shape,
                               tl_kv_envelope *out) {
    static const char who[] = "tl_kv_envelope_check";
    if (buf == NULL || out == NULL) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who, buf == NULL ? "buf" : "out");
    }
    return tl_kv_validate(shape, buf, len, who, out);
}

tl_status tl_kv_envelope_open(const void *header, size_t len, tl_kv_envelope *out) {
    static const char who[] = "tl_kv_envelope_open";
    if (header == NULL || out == NULL) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who, header == NULL ? "header" : "out");
    }
    return tl_kv_rules_header(header, len, who, out);
}

tl_status tl_kv_envelope_accept(const tl_kv_envelope *e, const tl_kv_cfg *shape) {
    static const char who[] = "tl_kv_envelope_accept";
    return e == NULL ? tl_fail(TL_EINVAL, "%s: e is NULL", who) : tl_kv_rules_kind(e, shape, who);
}

tl_status tl_kv_envelope_records(const tl_kv_envelope *e, uint32_t first, uint32_t count,
                                 const void *records, size_t stride) {
    static const char who[] = "tl_kv_envelope_records";
    if (e == NULL || (records == NULL && count > 0)) {
        return tl_fail(TL_EINVAL, "%s: %s is NULL", who, e == NULL ? "e" : "records");
    }
    if (first > e->n_blocks || count > e->n_blocks - first) {
        return tl_fail(TL_EINVAL,
                       "%s: blocks %" PRIu32 " to %" PRIu64 ", the envelope has %" PRIu32, who,
                       first, (uint64_t)first + count, e->n_blocks);
    }
    return count == 0 ? TL_OK : tl_kv_rule_records(e, first, count, records, stride, who);
}

tl_status tl_kv_envelope_crc(const tl_kv_envelope *e, uint32_t stored, uint32_t crc) {
    static const char who[] = "tl_kv_envelope_crc";
    return e == NULL ? tl_fail(TL_EINVAL, "%s: e is NULL", who)
                     : tl_kv_rule_crc(e, stored, crc, who);
}
