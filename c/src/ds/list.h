/* list.h - linking and unlinking a node of a circular list; shared by list.c's users in ds/. */
#ifndef TL_DS_LIST_H
#define TL_DS_LIST_H

#include "tinyllm/ds.h"

/* Links n, which is in no list, just before `at`. */
void tl_list_insert_before(tl_list_node *at, tl_list_node *n);

/* Unlinks n, which is in a list, and marks it as being in none. */
void tl_list_unlink(tl_list_node *n);

#endif /* TL_DS_LIST_H */
