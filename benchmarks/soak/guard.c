/* An allocator that gives each allocation pages of its own, between pages that may not be touched.

   A write beyond an allocation, or one into freed memory, ends the process at the instruction that
   writes; a system call that writes there fails with EFAULT. That holds for code that a compiler
   made at run time (oneDNN, FBGEMM), which sanitizers do not see, and for all threads at full speed.
   Freed addresses are never used again.

     cc -O2 -shared -fPIC -o guard.so guard.c -ldl
     LD_PRELOAD=./guard.so python ...

   It begins when gloo opens its first event loop, after the libraries are loaded: until then glibc
   allocates. GUARD_LEAST: bytes of the smallest allocation that it takes (default 32). Needs
   vm.max_map_count above twice the number of live allocations, else it stops taking new ones. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void __libc_free(void *);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

#define PAGE 4096UL
#define REGION (16UL << 40)
#define CANARY 0xA5

typedef struct {
    size_t size, pages, offset;
    int is_live;
} Block;

static char *region;
static Block **blocks; /* by the first page of a block */
static _Atomic size_t cursor = PAGE;
static _Atomic int is_on;
static size_t least = 32;
static __thread int is_inside;

static int is_ours(const void *p) {
    return region && (const char *)p >= region && (const char *)p < region + REGION;
}

static Block **slot_of(const void *p) { return &blocks[((const char *)p - region) / PAGE]; }

static void say(const char *what, const void *address, const Block *block) {
    char line[256];
    int n = snprintf(line, sizeof line, "guard: process %d: %s at %p, an allocation of %zu bytes%s\n",
                     getpid(), what, address, block ? block->size : 0,
                     block && !block->is_live ? " that was freed" : "");
    if (write(2, line, n) < 0) return;
    void *frames[48];
    backtrace_symbols_fd(frames, backtrace(frames, 48), 2);
}

static Block *block_around(const void *p) {
    for (Block **slot = slot_of(p); slot > blocks; slot--)
        if (*slot) return *slot;
    return NULL;
}

static struct sigaction previous;

static void on_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    is_inside++;
    if (is_ours(info->si_addr)) say("access outside of a live allocation", info->si_addr, block_around(info->si_addr));
    sigaction(number, &previous, NULL); /* the instruction faults again, and the process ends */
}

static void begin(void) {
    const char *text = getenv("GUARD_LEAST");
    void *frames[2];
    if (text) least = strtoul(text, NULL, 10);
    backtrace(frames, 2); /* loads libgcc now, not in a fault */
    region = mmap(NULL, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    blocks = mmap(NULL, REGION / PAGE * sizeof *blocks, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED || blocks == MAP_FAILED) abort();
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, &previous);
    if (write(2, "guard: on\n", 10) < 0) abort();
    is_on = 1;
}

/* gloo opens its event loops by this. */
int epoll_create(int size) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "epoll_create");
    static _Atomic int has_begun;
    if (!atomic_exchange(&has_begun, 1)) begin();
    return real(size);
}

static void *guarded(size_t size, size_t alignment) {
    if (!is_on || is_inside || size < least || alignment > PAGE) return NULL;
    size_t pages = size ? (size + PAGE - 1) / PAGE : 1;
    size_t at = atomic_fetch_add(&cursor, (pages + 1) * PAGE);
    if (at + (pages + 1) * PAGE > REGION) return NULL;
    char *first = region + at;
    if (mprotect(first, pages * PAGE, PROT_READ | PROT_WRITE)) {
        is_on = 0;
        if (write(2, "guard: off, no more mappings\n", 29) < 0) abort();
        return NULL;
    }
    is_inside++;
    Block *block = __libc_malloc(sizeof *block);
    is_inside--;
    if (alignment < 16) alignment = 16;
    /* Three of four end at the page that may not be touched, one begins at the one before. */
    size_t offset = at / PAGE % 4 ? (pages * PAGE - size) & ~(alignment - 1) : 0;
    *block = (Block){size, pages, offset, 1};
    memset(first, CANARY, pages * PAGE);
    *slot_of(first) = block;
    return first + offset;
}

static void release(void *p) {
    char *first = (char *)((uintptr_t)p & ~(PAGE - 1));
    Block *block = *slot_of(first);
    if (!block || !block->is_live || first + block->offset != p) {
        say("free of what is not a live allocation", p, block);
        abort();
    }
    for (size_t i = 0; i < block->pages * PAGE; i++)
        if ((i < block->offset || i >= block->offset + block->size) && (unsigned char)first[i] != CANARY) {
            say("write beside an allocation", first + i, block);
            abort();
        }
    block->is_live = 0;
    mmap(first, block->pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void *malloc(size_t size) {
    void *p = guarded(size, 16);
    return p ? p : __libc_malloc(size);
}

void free(void *p) {
    if (is_ours(p))
        release(p);
    else
        __libc_free(p);
}

void *calloc(size_t count, size_t each) {
    size_t size;
    if (__builtin_mul_overflow(count, each, &size)) return errno = ENOMEM, NULL;
    void *p = guarded(size, 16);
    return p ? memset(p, 0, size) : __libc_calloc(count, each);
}

void *realloc(void *p, size_t size) {
    if (!p) return malloc(size);
    if (!is_ours(p)) return __libc_realloc(p, size);
    if (!size) return free(p), NULL;
    size_t before = (*slot_of((void *)((uintptr_t)p & ~(PAGE - 1))))->size;
    void *moved = malloc(size);
    if (!moved) return NULL;
    memcpy(moved, p, before < size ? before : size);
    free(p);
    return moved;
}

void *memalign(size_t alignment, size_t size) {
    void *p = guarded(size, alignment);
    return p ? p : __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    void *p = memalign(alignment, size);
    if (!p && size) return ENOMEM;
    *out = p;
    return 0;
}

size_t malloc_usable_size(void *p) {
    if (is_ours(p)) return (*slot_of((void *)((uintptr_t)p & ~(PAGE - 1))))->size;
    size_t (*real)(void *) = (size_t(*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
    return real(p);
}
