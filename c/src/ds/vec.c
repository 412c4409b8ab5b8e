/* vec.c (ds.01) - a growing array of equal elements; the picture is in ds.h. */
#include "tinyllm/ds.h"

#include "runtime/internal.h"

#include <string.h>

tl_status tl_vec_init(tl_vec *v, size_t elem) {
    if (v == NULL || elem == 0) {
        return tl_fail(TL_EINVAL, "tl_vec_init: %s", v == NULL ? "v is NULL" : "elem is 0");
    }
    *v = (tl_vec){NULL, 0, 0, elem};
    return TL_OK;
}

tl_status tl_vec_reserve(tl_vec *v, size_t cap_min) {
    if (v == NULL || v->elem == 0) {
        return tl_fail(TL_EINVAL, "tl_vec_reserve: %s", v == NULL ? "v is NULL" : "elem is 0");
    }
    if (cap_min <= v->cap) {
        return TL_OK;
    }
    size_t n_bytes;
    if (!tl_mul_size(cap_min, v->elem, &n_bytes)) {
        return tl_fail(TL_EINVAL, "tl_vec_reserve: %zu elements of %zu bytes overflow", cap_min,
                       v->elem);
    }
    void *data = tl_alloc_array(n_bytes, 1);
    if (data == NULL) {
        return tl_fail(TL_ENOMEM, "tl_vec_reserve: no memory for %zu bytes", n_bytes);
    }
    if (v->len > 0) {
        memcpy(data, v->data, v->len * v->elem);
    }
    tl_free(v->data);
    v->data = data;
    v->cap = cap_min;
    return TL_OK;
}

tl_status tl_vec_push(tl_vec *v, const void *x) {
    if (v == NULL || x == NULL || v->elem == 0) {
        return tl_fail(TL_EINVAL, "tl_vec_push: %s",
                       v == NULL   ? "v is NULL"
                       : x == NULL ? "x is NULL"
                                   : "elem is 0");
    }
    if (v->len < v->cap) {
        memmove((char *)v->data + v->len * v->elem, x, v->elem);
        v->len++;
        return TL_OK;
    }
    if (v->cap > SIZE_MAX / 2) {
        return tl_fail(TL_EINVAL, "tl_vec_push: %zu elements cannot double", v->cap);
    }
    /* x may point into the array that is about to move: remember where, not the address. */
    const uintptr_t at = (uintptr_t)x, begin = (uintptr_t)v->data;
    const int inside = v->len > 0 && at >= begin && at < begin + v->len * v->elem;
    const size_t offset = inside ? (size_t)(at - begin) : 0;
    tl_status s = tl_vec_reserve(v, v->cap == 0 ? 8 : v->cap * 2);
    if (s != TL_OK) {
        return s;
    }
    memcpy((char *)v->data + v->len * v->elem, inside ? (char *)v->data + offset : x, v->elem);
    v->len++;
    return TL_OK;
}

void *tl_vec_at(const tl_vec *v, size_t i) {
    if (v == NULL || i >= v->len) {
        tl_errorf("tl_vec_at: index %zu of %zu elements", i, v ? v->len : 0);
        return NULL;
    }
    return (char *)v->data + i * v->elem;
}

void tl_vec_free(tl_vec *v) {
    if (v != NULL) {
        tl_free(v->data);
        v->data = NULL;
        v->len = v->cap = 0;
    }
}
