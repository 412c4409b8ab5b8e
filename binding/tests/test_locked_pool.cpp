// What tests/test_threads.py does through Python, without it: eight threads on one LockedPool, with
// every operation the module makes, views that outlive it, and close() in the middle. Meant for
// ThreadSanitizer, which cannot look into an interpreter that was not built with it.
#include "locked_pool.hpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

using kvpool::Failure;
using kvpool::LockedPool;
using kvpool::Memory;

namespace {

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                   \
            std::abort();                                                                          \
        }                                                                                          \
    } while (0)

constexpr uint32_t n_blocks = 64, block_tokens = 4;
constexpr int n_threads = 8;

std::shared_ptr<Memory> make_memory() {
    tl_kv_cfg cfg = {n_blocks, block_tokens, 2, 2, 16, TL_F16, TL_KV_FORMAT_V1};
    tl_kv_pool *pool = nullptr;
    CHECK(tl_kv_pool_create(&cfg, &pool) == TL_OK);
    return std::make_shared<Memory>(pool);
}

// As Pool::call does: at once when the mutex is free, else waiting for it.
template <class Op> tl_status call(LockedPool &pool, Op &&op, Failure &failure) {
    if (pool.try_run(op, failure)) {
        return failure.status;
    }
    return pool.run(op, failure);
}

template <class Body> void run_threads(Body &&body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; i++) {
        threads.emplace_back(body, i);
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

// One thread's life: takes, shares, writes, registers, moves and returns blocks until `steps` are
// done or the pool is closed.
void work(LockedPool &pool, int me, int steps) {
    std::mt19937 random(static_cast<unsigned>(me));
    std::vector<uint32_t> held;
    std::vector<uint8_t> envelope;
    for (int step = 0; step < steps; step++) {
        Failure failure;
        auto op = [&](tl_kv_pool *p) -> tl_status {
            uint32_t ids[4], block;
            size_t size;
            tl_status st;
            switch (random() % 7) {
            case 0:
                st = tl_kv_alloc(p, 4, ids);
                if (st == TL_OK) {
                    held.insert(held.end(), ids, ids + 4);
                }
                return st;
            case 1: {
                uint64_t hash = 1 + random() % 16;
                st = tl_kv_lookup(p, hash, &block);
                if (st == TL_OK) {
                    held.push_back(block);
                }
                return st == TL_ENOTFOUND ? TL_OK : st;
            }
            case 2:
                if (!held.empty() && tl_kv_hash(p, held.back()) == 0) {
                    st = tl_kv_set_fill(p, held.back(), block_tokens);
                    return st != TL_OK ? st : tl_kv_register(p, held.back(), 1 + random() % 16);
                }
                return TL_OK;
            case 3:
                if (!held.empty()) {
                    st = tl_kv_cow(p, held.back(), &block);
                    if (st == TL_OK) {
                        held.back() = block;
                    }
                    return st;
                }
                return TL_OK;
            case 4:
                if (!held.empty() && tl_kv_fill(p, held.front()) > 0) {
                    envelope.resize(tl_kv_export_bytes(p, 1));
                    return tl_kv_export(p, held.data(), 1, envelope.data(), envelope.size(), &size);
                }
                return TL_OK;
            case 5:
                if (!envelope.empty()) {
                    st = tl_kv_import(p, envelope.data(), envelope.size(), &block);
                    if (st == TL_OK) {
                        held.push_back(block);
                    }
                    return st;
                }
                return TL_OK;
            default:
                st = tl_kv_unref_many(p, held.data(), held.size());
                held.clear();
                return st;
            }
        };
        tl_status st = call(pool, op, failure);
        if (st == TL_EINVAL && std::strcmp(failure.text, "the pool is closed") == 0) {
            return;
        }
        CHECK(st == TL_OK || st == TL_EFULL || st == TL_EBUSY);
        CHECK(st == TL_OK || std::strncmp(failure.text, "tl_kv_", 6) == 0);
    }
    Failure failure;
    const tl_status st = call(
        pool, [&](tl_kv_pool *p) { return tl_kv_unref_many(p, held.data(), held.size()); },
        failure);
    CHECK(st == TL_OK || std::strcmp(failure.text, "the pool is closed") == 0);
}

void eight_threads_hammer_one_pool() {
    LockedPool pool(make_memory());
    run_threads([&](int me) { work(pool, me, 3000); });
    Failure failure;
    tl_kv_stats stats;
    CHECK(pool.run(
              [&](tl_kv_pool *p) {
                  tl_kv_stats_get(p, &stats);
                  return tl_kv_check(p);
              },
              failure) == TL_OK);
    CHECK(stats.used == 0 && stats.free + stats.cached == n_blocks);
}

// A view is a share of the memory: it is written while others work, and after close().
void close_while_others_work() {
    for (int round = 0; round < 50; round++) {
        std::shared_ptr<Memory> memory = make_memory();
        LockedPool pool(memory);
        auto *view = static_cast<uint16_t *>(tl_kv_block_ptr(memory->get(), 63, 1, 1));
        std::atomic<int> closed{0};
        run_threads([&](int me) {
            if (me < n_threads - 1) {
                work(pool, me, 200);
                return;
            }
            std::shared_ptr<Memory> last = pool.close();
            closed += last != nullptr;
            CHECK(pool.closed() && pool.close() == nullptr);
        });
        CHECK(closed == 1 && memory.use_count() == 1);
        view[0] = 0x3C00;
    }
}

// Every thread keeps its own text: the slot belongs to a thread.
void texts_do_not_mix() {
    LockedPool pool(make_memory());
    run_threads([&](int me) {
        char expected[64];
        std::snprintf(expected, sizeof expected, "tl_kv_unref: nobody holds block %d", me);
        for (int i = 0; i < 2000; i++) {
            Failure failure;
            uint32_t id = static_cast<uint32_t>(me);
            CHECK(call(
                      pool, [=](tl_kv_pool *p) { return tl_kv_unref(p, id); }, failure) ==
                  TL_EINVAL);
            CHECK(std::strcmp(failure.text, expected) == 0);
        }
    });
}

// A request after the other on the pool's manager, as ManagerCore runs them, until it is gone.
void serve(LockedPool &pool, tl_kv_mgr *const &mgr, int me, int steps) {
    std::mt19937 random(static_cast<unsigned>(me));
    for (int step = 0; step < steps; step++) {
        Failure failure;
        auto op = [&](tl_kv_pool *) -> tl_status {
            if (mgr == nullptr) { // guarded by the mutex, like all that op does
                tl_set_last_error("the manager is closed");
                return TL_EINVAL;
            }
            uint32_t tokens[3 * block_tokens];
            const uint32_t n = 1 + static_cast<uint32_t>(random() % (3 * block_tokens));
            for (uint32_t i = 0; i < n; i++) {
                tokens[i] = static_cast<uint32_t>(random() % 2);
            }
            tl_kv_seq seq;
            tl_status st = tl_kv_seq_allocate(mgr, tokens, n, nullptr, &seq);
            if (st == TL_OK) {
                CHECK(tl_kv_seq_commit(mgr, seq, n) == TL_OK);
                CHECK(random() % 64 != 0 || tl_kv_mgr_reset(mgr, nullptr) == TL_OK);
                st = random() % 8 == 0 ? TL_OK : tl_kv_seq_free(mgr, seq); // some stay alive
            }
            return st;
        };
        const tl_status st = call(pool, op, failure);
        if (st == TL_EINVAL) {
            CHECK(std::strstr(failure.text, "is closed") != nullptr);
            return;
        }
        CHECK(st == TL_OK || st == TL_EFULL);
    }
}

// One manager at a time, which ends by drop_manager, by close() or with the pool.
void a_manager_ends_while_others_use_it() {
    const tl_kv_mgr_options options = {0,
                                       0,
                                       tl_kv_evict,
                                       tl_kv_find,
                                       tl_kv_refs,
                                       tl_kv_prefetch,
                                       tl_kv_import_private,
                                       tl_kv_copy_block};
    for (int round = 0; round < 60; round++) {
        LockedPool pool(make_memory());
        tl_kv_mgr *mgr = nullptr, *second = nullptr;
        Failure failure;
        CHECK(pool.make_manager(options, &mgr, failure) == TL_OK);
        CHECK(pool.make_manager(options, &second, failure) == TL_EBUSY && second == nullptr);
        run_threads([&](int me) {
            if (me < n_threads - 1) {
                serve(pool, mgr, me, 200);
            } else if (round % 3 == 0) {
                pool.drop_manager(mgr);
            } else if (round % 3 == 1) {
                pool.close();
            }
        });
        if (round % 3 == 0) {
            CHECK(pool.make_manager(options, &second, failure) == TL_OK);
            pool.drop_manager(mgr); // again: nothing of the second one's
            serve(pool, second, 1, 50);
        }
    }
}

} // namespace

int main() {
    eight_threads_hammer_one_pool();
    close_while_others_work();
    texts_do_not_mix();
    a_manager_ends_while_others_use_it();
    std::puts("4 tests passed");
    return 0;
}
