// What newer C libraries have and the oldest one that wheels run on has not, for libraries that are compiled on a newer
// one. Linked in as glibc's own libc_nonshared.a is, and seen by nobody else. tools/glibc_floor.py tells what is missing.

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// Whether there is one thread alone, for which reference counts need no atomics.
char __libc_single_threaded = 0;

// The kernel's struct is the C library's on 64-bit Linux.
int stat(const char * path, struct stat * found) {
    return (int) syscall(SYS_newfstatat, AT_FDCWD, path, found, 0);
}

int fstat(int descriptor, struct stat * found) {
    return (int) syscall(SYS_fstat, descriptor, found);
}

int getcpu(unsigned * cpu, unsigned * node) {
    return (int) syscall(SYS_getcpu, cpu, node, NULL);
}

// For std::random_device.
int getentropy(void * buffer, size_t size) {
    return syscall(SYS_getrandom, buffer, size, 0) == (long) size ? 0 : -1;
}

uint32_t arc4random(void) {
    uint32_t number = 0;
    while (getentropy(&number, sizeof(number)) != 0) {
    }
    return number;
}

extern void * __dso_handle __attribute__((visibility("hidden")));
int __cxa_atexit(void (*run)(void *), void * object, void * library);

int atexit(void (*run)(void)) {
    return __cxa_atexit((void (*)(void *)) run, NULL, __dso_handle);
}

// Waits by the clock of the day, as far from now: whoever asked looks at his own clock again afterwards.
int pthread_cond_clockwait(pthread_cond_t * condition, pthread_mutex_t * mutex, clockid_t clock,
                           const struct timespec * until) {
    struct timespec now;
    struct timespec today;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &today);
    const long second = 1000000000;
    const long nanoseconds = today.tv_nsec + until->tv_nsec - now.tv_nsec + second;
    today.tv_sec += until->tv_sec - now.tv_sec + nanoseconds / second - 1;
    today.tv_nsec = nanoseconds % second;
    return pthread_cond_timedwait(condition, mutex, &today);
}

// Objects of a thread, which end with it, the youngest first.
struct ending {
    void (*run)(void *);
    void * object;
    struct ending * older;
};

static pthread_key_t endings;
static pthread_once_t endings_once = PTHREAD_ONCE_INIT;

static void end_all(void * youngest) {
    for (struct ending * next = youngest; next != NULL;) {
        struct ending * older = next->older;
        next->run(next->object);
        free(next);
        next = older;
    }
}

static void make_endings(void) {
    pthread_key_create(&endings, end_all);
}

int __cxa_thread_atexit_impl(void (*run)(void *), void * object, void * library) {
    (void) library;
    pthread_once(&endings_once, make_endings);
    struct ending * added = malloc(sizeof(*added));
    if (added == NULL) {
        return -1;
    }
    *added = (struct ending){run, object, pthread_getspecific(endings)};
    return pthread_setspecific(endings, added);
}
