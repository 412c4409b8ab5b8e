/* outside.c - what a user writes: include, create, allocate, register, find, export. It is C and
 * C++ at the same time, for the package test builds it as both. */
#include <tinyllm.h>

#include <stdio.h>

int main(void) {
    if (tl_abi_version() != TL_ABI_VERSION) {
        printf("header and library disagree\n");
        return 1;
    }
    tl_kv_cfg cfg = {8, 2, 1, 1, 2, TL_F16, TL_KV_FORMAT_V1};
    tl_kv_pool *pool;
    if (tl_kv_pool_create(&cfg, &pool) != TL_OK) {
        printf("%s\n", tl_last_error());
        return 1;
    }
    const uint32_t tokens[2] = {1, 2};
    const uint64_t hash = tl_kv_block_hash(0, tokens, 2);
    uint32_t id, hit;
    uint8_t envelope[60];
    size_t written;
    const float k[4] = {1, 2, 3, 4};
    int failed = tl_kv_alloc(pool, 1, &id);
    tl_f32_to_f16_n((uint16_t *)tl_kv_block_ptr(pool, id, 0, 0), k, 4);
    tl_f32_to_f16_n((uint16_t *)tl_kv_block_ptr(pool, id, 0, 1), k, 4);
    failed |= tl_kv_set_fill(pool, id, 2);
    failed |= tl_kv_register(pool, id, hash);
    failed |= tl_kv_lookup(pool, hash, &hit) | (hit != id);
    failed |= tl_kv_export(pool, &id, 1, envelope, sizeof envelope, &written) | (written != 60);
    failed |= tl_kv_check(pool);
    tl_kv_pool_destroy(pool);
    printf(failed ? "failed: %s\n" : "ok\n", tl_last_error());
    return failed;
}
