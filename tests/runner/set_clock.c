/* Stands between a program and the wall clock: adds the seconds that the file $CLOCK_OFFSET holds. The monotonic clock
 * is left alone, as the kernel leaves it when a clock is set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    const char *path = getenv("CLOCK_OFFSET");
    long offset = 0;
    FILE *file;

    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(clock, now);
    if (clock == CLOCK_REALTIME && path && (file = fopen(path, "r"))) {
        if (fscanf(file, "%ld", &offset) == 1)
            now->tv_sec += offset;
        fclose(file);
    }
    return answer;
}
