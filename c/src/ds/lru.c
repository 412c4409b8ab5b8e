/* lru.c (ds.03) - least recently used order over an intrusive circular list; the picture is in
 * ds.h. */
#include "ds/list.h"

void tl_lru_init(tl_lru *l) {
    if (l != NULL) {
        l->head.prev = l->head.next = &l->head;
        l->len = 0;
    }
}

void tl_lru_touch(tl_lru *l, tl_list_node *n) {
    if (l == NULL || n == NULL) {
        return;
    }
    tl_lru_remove(l, n);
    tl_lru_push_newest(l, n);
}

void tl_lru_remove(tl_lru *l, tl_list_node *n) {
    if (l != NULL && n != NULL && n->next != NULL) {
        tl_lru_unlink(l, n);
    }
}

tl_list_node *tl_lru_pop_oldest(tl_lru *l) {
    if (l == NULL || l->len == 0) {
        return NULL;
    }
    tl_list_node *oldest = l->head.next;
    tl_lru_unlink(l, oldest);
    return oldest;
}
