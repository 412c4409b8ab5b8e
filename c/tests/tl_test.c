/*
 * tl_test.c - the runner behind tl_test.h: registration, checks, isolation, the verdict.
 */
#include "tl_test.h"

#include "tl_count_alloc.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PASSED, FAILED, SKIPPED };

static tl_test_case *g_first;
static char g_context[256];
static uint64_t g_seed;
static int g_has_seed;

/* Where a failed check of the running test goes; only the thread that runs the test may go. */
static jmp_buf g_end;
static _Thread_local int g_in_test;

/* Sorted by file and line: the order of constructors is the linker's business, not ours. */
void tl_test_add(tl_test_case *c) {
    tl_test_case **at = &g_first;
    while (*at) {
        int by_file = strcmp((*at)->file, c->file);
        if (by_file > 0 || (by_file == 0 && (*at)->line > c->line))
            break;
        at = &(*at)->next;
    }
    c->next = *at;
    *at = c;
}

/* ---- checks -------------------------------------------------------------------------------- */

void tl_test_fail(const char *file, int line, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fflush(stdout);
    printf("%s:%d: ", file, line);
    vprintf(fmt, ap);
    printf("\n");
    va_end(ap);
    if (g_context[0])
        printf("    with %s\n", g_context);
    fflush(stdout);
    if (!g_in_test)
        abort(); /* a check in a thread that the test started */
    longjmp(g_end, FAILED);
}

void tl_test_skip(const char *why) {
    printf("    skipped: %s\n", why);
    longjmp(g_end, SKIPPED);
}

void tl_test_eq(const char *file, int line, const char *a_text, const char *b_text, uint64_t a,
                uint64_t b) {
    if (a != b)
        tl_test_fail(file, line, "%s is %llu (0x%llx), but %s is %llu (0x%llx)", a_text,
                     (unsigned long long)a, (unsigned long long)a, b_text, (unsigned long long)b,
                     (unsigned long long)b);
}

void tl_test_status(const char *file, int line, const char *text, tl_status got, tl_status want) {
    if (got != want)
        tl_test_fail(file, line, "%s is %s, but must be %s; error slot: \"%s\"", text,
                     tl_status_str(got), tl_status_str(want), tl_last_error());
}

void tl_test_str(const char *file, int line, const char *text, const char *got, const char *want) {
    if (!got || strcmp(got, want) != 0)
        tl_test_fail(file, line, "%s is \"%s\", but must be \"%s\"", text, got ? got : "(NULL)",
                     want);
}

void tl_test_mem(const char *file, int line, const char *text, const void *got, const void *want,
                 size_t n) {
    const unsigned char *a = got, *b = want;
    for (size_t i = 0; i < n; i++)
        if (a[i] != b[i])
            tl_test_fail(file, line, "%s: byte %zu of %zu is 0x%02x, but must be 0x%02x", text, i,
                         n, (unsigned)a[i], (unsigned)b[i]);
}

void tl_test_context(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(g_context, sizeof g_context, fmt, ap);
    va_end(ap);
}

int tl_test_seed(uint64_t *seed) {
    if (g_has_seed)
        *seed = g_seed;
    return g_has_seed;
}

/* ---- running ------------------------------------------------------------------------------- */

#ifndef TL_TEST_NO_MAIN /* a fuzzer brings its own */

static int run_here(const tl_test_case *c) {
    tl_count_install();
    tl_set_last_error(NULL);
    g_context[0] = 0;
    g_in_test = 1;
    volatile int result = PASSED;
    switch (setjmp(g_end)) {
    case 0:
        c->fn();
        tl_test_context("%s", "");
        if (tl_count_live() != 0)
            tl_test_fail(c->file, c->line, "the test left %zu blocks (%zu bytes) allocated",
                         tl_count_live(), tl_count_live_bytes());
        break;
    case FAILED:
        result = FAILED;
        break;
    default:
        result = SKIPPED;
    }
    g_in_test = 0;
    tl_count_release();
    tl_count_uninstall();
    return result;
}

static int run_isolated(const tl_test_case *c, unsigned timeout_s) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid < 0) {
        perror("fork");
        return FAILED;
    }
    if (pid == 0) {
        alarm(timeout_s);
        int result = run_here(c);
        fflush(stdout);
        _exit(result);
    }
    int status = 0;
    if (waitpid(pid, &status, 0) != pid)
        return FAILED;
    if (WIFEXITED(status) && WEXITSTATUS(status) <= SKIPPED)
        return WEXITSTATUS(status);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        printf("    no end after %u s\n", timeout_s);
    else if (WIFSIGNALED(status))
        printf("    killed by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        printf("    the process ended with code %d\n", WEXITSTATUS(status));
    return FAILED;
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void json_text(const char *s) {
    putchar('"');
    for (; *s; s++) {
        if (*s == '"' || *s == '\\')
            putchar('\\');
        if (*s == '\n')
            fputs("\\n", stdout);
        else
            putchar(*s);
    }
    putchar('"');
}

static void print_catalog(void) {
    printf("[\n");
    for (const tl_test_case *c = g_first; c; c = c->next) {
        const char *const key[] = {"name", "kind", "checks", "why"};
        const char *const text[] = {c->name, c->kind, c->checks, c->why};
        printf("  {");
        for (size_t i = 0; i < 4; i++) {
            printf("\"%s\": ", key[i]);
            json_text(text[i]);
            printf(", ");
        }
        printf("\"catches\": [");
        for (const char *s = c->catches; *s;) {
            size_t n = strcspn(s, " ");
            printf("\"%.*s\"%s", (int)n, s, s[n] ? ", " : "");
            s += n + (s[n] == ' ');
        }
        printf("]}%s\n", c->next ? "," : "");
    }
    printf("]\n");
}

static int usage(const char *prog) {
    fprintf(stderr,
            "usage: %s [--list | --catalog] [--seed N] [--isolate] [--timeout S] [NAME...]\n",
            prog);
    return 2;
}

int main(int argc, char **argv) {
    int isolate = 0, first_name = argc;
    unsigned timeout_s = 60;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--list") == 0) {
            for (const tl_test_case *c = g_first; c; c = c->next)
                printf("%s\n", c->name);
            return 0;
        }
        if (strcmp(argv[i], "--catalog") == 0) {
            print_catalog();
            return 0;
        }
        if (strcmp(argv[i], "--isolate") == 0) {
            isolate = 1;
        } else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
            g_seed = strtoull(argv[++i], NULL, 0);
            g_has_seed = 1;
        } else if (strcmp(argv[i], "--timeout") == 0 && i + 1 < argc) {
            timeout_s = (unsigned)strtoul(argv[++i], NULL, 10);
        } else if (argv[i][0] == '-') {
            return usage(argv[0]);
        } else {
            first_name = i;
            break;
        }
    }
    for (int i = first_name; i < argc; i++) {
        const tl_test_case *c = g_first;
        while (c && strcmp(c->name, argv[i]) != 0)
            c = c->next;
        if (!c) {
            fprintf(stderr, "%s: no test is named %s (see --list)\n", argv[0], argv[i]);
            return 2;
        }
    }
    unsigned n[3] = {0, 0, 0};
    for (const tl_test_case *c = g_first; c; c = c->next) {
        int wanted = first_name == argc;
        for (int i = first_name; i < argc; i++)
            wanted |= strcmp(c->name, argv[i]) == 0;
        if (!wanted)
            continue;
        double start = now_ms();
        int result = isolate ? run_isolated(c, timeout_s) : run_here(c);
        static const char *const word[] = {"ok  ", "FAIL", "skip"};
        printf("%s %s (%.1f ms)\n", word[result], c->name, now_ms() - start);
        fflush(stdout);
        n[result]++;
    }
    if (n[SKIPPED])
        printf("%u skipped\n", n[SKIPPED]);
    printf("%u passed, %u failed\n", n[PASSED], n[FAILED]);
    return n[FAILED] == 0 && n[PASSED] + n[SKIPPED] > 0 ? 0 : 1;
}

#endif /* TL_TEST_NO_MAIN */
