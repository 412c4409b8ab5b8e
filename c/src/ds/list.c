/* list.c (ds.03) - the intrusive circular list under tl_lru. */
#include "ds/list.h"

void tl_list_insert_before(tl_list_node *at, tl_list_node *n) {
    n->prev = at->prev;
    n->next = at;
    at->prev->next = n;
    at->prev = n;
}

void tl_list_unlink(tl_list_node *n) {
    n->prev->next = n->next;
    n->next->prev = n->prev;
    n->prev = n->next = NULL;
}
