/* namespaces.c -- see namespaces.h. */
#include "namespaces.h"

int namespace_open(struct core *c, const char *name, uint32_t name_len, uint32_t parts, const char *desc, uint32_t desc_len, bool has_desc, uint32_t *out)
{
    uint32_t gap = NIL;
    for (uint32_t i = 0; i < c->n_namespaces; i++) {       /* <= 256, and only when a namespace is opened */
        struct namespace *n = &c->namespaces[i];
        if (!n->used) { if (gap == NIL) gap = i; continue; }
        if (n->name_len != name_len || memcmp(n->name, name, name_len) != 0) continue;
        *out = i;
        if (parts && parts != n->parts) return SHMC_E_MISMATCH;
        if (!has_desc) return SHMC_OK;
        return n->desc_len == desc_len && !memcmp(n->desc, desc, desc_len) ? SHMC_OK : SHMC_E_MISMATCH;
    }
    if (gap == NIL) return SHMC_E_NAMESPACES;
    struct namespace *n = &c->namespaces[gap];
    tx_begin(c, TX_NAMESPACE);
    char padded[SHMC_DESC_MAX] = {0};                       /* which are the larger ones */
    memcpy(padded, name, name_len);
    store_words(n->name, padded, sizeof n->name);           /* unlogged: unreachable until used */
    memset(padded, 0, sizeof padded);
    if (has_desc && desc_len) memcpy(padded, desc, desc_len);
    store_words(n->desc, padded, sizeof n->desc);           /* unlogged: as above */
    PUT(&n->name_len, name_len);                            /* unlogged: as above */
    PUT(&n->desc_len, has_desc ? desc_len : 0);             /* unlogged: as above */
    tx32(c, &n->parts, parts ? parts : 1);
    tx32(c, &n->gen, n->gen + 1);
    tx32(c, &c->hdr->namespaces, c->hdr->namespaces + 1);
    tx32(c, &n->used, 1);
    *out = gap;
    return tx_commit(c) ? SHMC_OK : SHMC_E_POISONED;
}

uint32_t namespace_bump(struct core *c, uint32_t ns)
{
    struct header *h = c->hdr;
    struct namespace *n = ns_at(c, ns);
    tx_begin(c, TX_BUMP);
    tx32(c, &n->gen, n->gen + 1);
    tx32(c, &h->stale, h->stale + n->chunks);
    tx32(c, &n->chunks, 0);
    tx32(c, &n->complete, 0);
    tx32(c, &n->grans, 0);
    tx_commit(c);
    return n->gen;
}
