/* Plays an event log on torch's caching allocator, as `allocator.py` does, event for event.
 *
 * The rules and their source stand at the top of `allocator.py`, and
 * `tests/memory/test_allocator_compiled.py` compares the two. This file is optional: it is compiled
 * when the package is installed if there is a C compiler, and saves about a third of a search.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

enum { PLAYED = 0, OUT_OF_MEMORY = 1, NO_HOST_MEMORY = 2 };

const unsigned meshplan_source = SOURCE; /* CRC-32 of this file, defined by the compiler's call. */

static const i64 ROUND = 512, SMALL = 1 << 20, SMALL_SEGMENT = 2 << 20, LARGE_SEGMENT = 20 << 20,
                 LEAST_OF_ITS_OWN = 10 << 20, ROUND_SEGMENT = 2 << 20;
static const i64 APART = (i64)1 << 48; /* Addresses between two segments that grow. */

/* A part of a segment, in use or free, between its neighbours in the segment. */
typedef struct Block {
    i64 address, size, requested;
    struct Block *before, *after;
    struct Pool *pool;
    int is_free;
} Block;

/* The free blocks of one stream and size class, by (size, address). */
typedef struct Pool {
    Block **free;
    i64 count, room;
    Block *last; /* The last block of the segment that grows; NULL without one. */
    i64 begin;   /* Where that segment would begin if it were empty; -1 if it never grew. */
    int is_small;
} Pool;

typedef struct {
    i64 limit, reserved, most_reserved, retries, next_address;
    i64 refused; /* Bytes that could not be reserved; 0 if all could. */
    int is_expandable, is_broken;
    Pool *pools; /* [streams][large, small] */
    i64 num_pools;
    Block *unused; /* Blocks to use again, linked by `after`. */
    Block **chunks; /* Arrays of blocks, to be released at the end. */
    i64 num_chunks;
} Allocator;

static Block *new_block(Allocator *a) {
    enum { MANY = 4096 };
    if (!a->unused) {
        Block **chunks = realloc(a->chunks, (size_t)(a->num_chunks + 1) * sizeof *chunks);
        if (!chunks) { a->is_broken = 1; return NULL; }
        a->chunks = chunks;
        Block *some = malloc(MANY * sizeof *some);
        if (!some) { a->is_broken = 1; return NULL; }
        a->chunks[a->num_chunks++] = some;
        for (int i = 0; i < MANY; i++) some[i].after = i + 1 < MANY ? some + i + 1 : NULL;
        a->unused = some;
    }
    Block *block = a->unused;
    a->unused = block->after;
    memset(block, 0, sizeof *block);
    return block;
}

static void drop_block(Allocator *a, Block *block) {
    block->after = a->unused;
    a->unused = block;
}

/* The index of the first free block that is not below (size, address). */
static i64 find(const Pool *pool, i64 size, i64 address) {
    i64 low = 0, high = pool->count;
    while (low < high) {
        i64 middle = (low + high) / 2;
        const Block *block = pool->free[middle];
        if (block->size < size || (block->size == size && block->address < address))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void take_out(Pool *pool, i64 at) {
    pool->free[at]->is_free = 0;
    pool->count--;
    memmove(pool->free + at, pool->free + at + 1, (size_t)(pool->count - at) * sizeof *pool->free);
}

static void put_in(Allocator *a, Block *block) {
    Pool *pool = block->pool;
    if (pool->count == pool->room) {
        i64 room = pool->room ? 2 * pool->room : 64;
        Block **more = realloc(pool->free, (size_t)room * sizeof *more);
        if (!more) { a->is_broken = 1; return; }
        pool->free = more;
        pool->room = room;
    }
    i64 at = find(pool, block->size, block->address);
    memmove(pool->free + at + 1, pool->free + at, (size_t)(pool->count - at) * sizeof *pool->free);
    pool->free[at] = block;
    pool->count++;
    block->is_free = 1;
}

static void remove_free(Block *block) {
    take_out(block->pool, find(block->pool, block->size, block->address));
}

static i64 round_up(i64 size, i64 unit) { return (size + unit - 1) / unit * unit; }

static int has_room(const Allocator *a, i64 size) {
    return a->limit < 0 || a->reserved + size <= a->limit;
}

/* The bytes of free memory at the end of the segment that grows. */
static i64 tail(const Pool *pool) {
    return pool->last && pool->last->is_free ? pool->last->size : 0;
}

static i64 page_of(const Pool *pool) { return pool->is_small ? SMALL_SEGMENT : LARGE_SEGMENT; }

static i64 missing(const Pool *pool, i64 size) {
    return round_up(size - tail(pool), page_of(pool));
}

static void unlink_block(Allocator *a, Block *block) {
    if (block->before) block->before->after = block->after;
    if (block->after) block->after->before = block->before;
    if (block->pool->last == block) block->pool->last = block->before;
    drop_block(a, block);
}

/* Release to the driver all free segments and the free last pages of those that grow. */
static void give_back(Allocator *a) {
    a->retries++;
    for (Pool *pool = a->pools; pool < a->pools + a->num_pools; pool++) {
        i64 pages = tail(pool) / page_of(pool);
        if (pages) {
            Block *last = pool->last;
            i64 size = pages * page_of(pool);
            remove_free(last);
            last->size -= size;
            if (last->size)
                put_in(a, last);
            else
                unlink_block(a, last);
            a->reserved -= size;
        }
        if (a->is_expandable) continue;
        i64 kept = 0;
        for (i64 at = 0; at < pool->count; at++) {
            Block *block = pool->free[at];
            if (block->before || block->after) {
                pool->free[kept++] = block;
            } else {
                a->reserved -= block->size;
                drop_block(a, block);
            }
        }
        pool->count = kept;
    }
}

static int reserve(Allocator *a, i64 size) {
    if (!has_room(a, size)) {
        a->refused = size;
        return 0;
    }
    a->reserved += size;
    if (a->reserved > a->most_reserved) a->most_reserved = a->reserved;
    return 1;
}

/* A new segment for a request that no free block fits; NULL if there is no room for it. */
static Block *segment(Allocator *a, Pool *pool, i64 size) {
    i64 length = pool->is_small ? SMALL_SEGMENT
                 : size < LEAST_OF_ITS_OWN ? LARGE_SEGMENT
                                           : round_up(size, ROUND_SEGMENT);
    if (!has_room(a, length)) give_back(a);
    if (!reserve(a, length)) return NULL;
    Block *block = new_block(a);
    if (!block) return NULL;
    block->address = a->next_address;
    block->size = length;
    block->pool = pool;
    a->next_address += length + ROUND;
    return block;
}

/* The last free block of the segment that grows, once it is large enough; NULL if there is no room. */
static Block *grow(Allocator *a, Pool *pool, i64 size) {
    if (pool->begin < 0) {
        pool->begin = a->next_address;
        a->next_address += APART;
    }
    if (!has_room(a, missing(pool, size))) give_back(a);
    i64 more = missing(pool, size);
    if (!reserve(a, more)) return NULL;
    Block *block = pool->last;
    if (block && block->is_free) {
        remove_free(block);
    } else {
        block = new_block(a);
        if (!block) return NULL;
        block->pool = pool;
        block->before = pool->last;
        block->address = pool->last ? pool->last->address + pool->last->size : pool->begin;
        if (pool->last) pool->last->after = block;
        pool->last = block;
    }
    block->size += more;
    return block;
}

static Block *take(Allocator *a, Pool *pool, i64 size) {
    i64 least = pool->is_small || a->is_expandable ? ROUND : SMALL + 1;
    i64 at = find(pool, size, -1);
    Block *block;
    if (at < pool->count) {
        block = pool->free[at];
        take_out(pool, at);
    } else {
        block = a->is_expandable ? grow(a, pool, size) : segment(a, pool, size);
        if (!block) return NULL;
    }
    if (block->size - size >= least) {
        Block *rest = new_block(a);
        if (!rest) return NULL;
        rest->address = block->address + size;
        rest->size = block->size - size;
        rest->pool = pool;
        rest->before = block;
        rest->after = block->after;
        if (rest->after) rest->after->before = rest;
        if (pool->last == block) pool->last = rest;
        block->after = rest;
        block->size = size;
        put_in(a, rest);
    }
    return block;
}

static void give(Allocator *a, Block *block) {
    Block *after = block->after, *before = block->before;
    if (after && after->is_free) {
        remove_free(after);
        block->size += after->size;
        unlink_block(a, after);
    }
    if (before && before->is_free) {
        remove_free(before);
        before->size += block->size;
        unlink_block(a, block);
        block = before;
    }
    put_in(a, block);
}

/* Play `count` events and write the figures.
 *
 * deltas, storages: Change in bytes and index of the storage, of each event.
 * stream_of: Number of the stream of each storage, less than `num_streams`.
 * limit: Bytes that may be reserved; -1 for no limit.
 * figures: Set to the most allocated bytes, the most reserved bytes, the number of retries, the
 *     bytes reserved at the end, and the bytes that could not be reserved.
 */
int meshplan_play(i64 count, const i64 *deltas, const i64 *storages, i64 num_storages,
                  const i64 *stream_of, i64 num_streams, i64 limit, int is_expandable,
                  i64 *figures) {
    Allocator a = {.limit = limit, .is_expandable = is_expandable, .num_pools = 2 * num_streams};
    a.pools = calloc((size_t)(a.num_pools ? a.num_pools : 1), sizeof *a.pools);
    Block **taken = calloc((size_t)(num_storages ? num_storages : 1), sizeof *taken);
    i64 allocated = 0, most_allocated = 0;
    int status = a.pools && taken ? PLAYED : NO_HOST_MEMORY;
    if (a.pools)
        for (i64 number = 0; number < a.num_pools; number++) {
            a.pools[number].is_small = number & 1;
            a.pools[number].begin = -1;
        }
    for (i64 at = 0; at < count && status == PLAYED; at++) {
        i64 delta = deltas[at], storage = storages[at];
        Block *block = taken[storage];
        if (block) { /* A change of size is a free and a new allocation. */
            delta += block->requested;
            allocated -= block->size;
            give(&a, block);
            taken[storage] = NULL;
        }
        if (delta) {
            i64 size = round_up(delta, ROUND);
            block = take(&a, a.pools + 2 * stream_of[storage] + (size <= SMALL), size);
            if (block) {
                block->requested = delta;
                taken[storage] = block;
                allocated += block->size;
                if (allocated > most_allocated) most_allocated = allocated;
            } else {
                status = OUT_OF_MEMORY;
            }
        }
        if (a.is_broken) status = NO_HOST_MEMORY;
    }
    figures[0] = most_allocated;
    figures[1] = a.most_reserved;
    figures[2] = a.retries;
    figures[3] = a.reserved;
    figures[4] = a.refused;
    for (i64 number = 0; a.pools && number < a.num_pools; number++) free(a.pools[number].free);
    for (i64 number = 0; number < a.num_chunks; number++) free(a.chunks[number]);
    free(a.chunks);
    free(a.pools);
    free(taken);
    return status;
}
