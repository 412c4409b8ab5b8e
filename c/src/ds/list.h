/*
 * list.h - the operations of tl_lru as inline functions. lru.c exports them; the pool, which does
 * one or two for each block that changes hands, uses them directly.
 */
#ifndef TL_DS_LIST_H
#define TL_DS_LIST_H

#include "tinyllm/ds.h"

/* Unlinks n, which is in l, and marks it as being in no list. */
static inline void tl_lru_unlink(tl_lru *l, tl_list_node *n) {
    n->prev->next = n->next; // NOLINT(clang-analyzer-core.NullDereference): it is in l
    n->next->prev = n->prev;
    n->prev = n->next = NULL;
    l->len--;
}

/* Links n, which is in no list, at the newest end: just before the sentinel. */
static inline void tl_lru_push_newest(tl_lru *l, tl_list_node *n) {
    n->prev = l->head.prev;
    n->next = &l->head;
    l->head.prev->next = n;
    l->head.prev = n;
    l->len++;
}

#endif /* TL_DS_LIST_H */
