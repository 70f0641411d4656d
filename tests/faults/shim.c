/* Loaded before libc: counts the calls that change files below a folder, and makes one of them fail.

   Mode 1 counts. Mode 2 kills the process in the middle of call number N: half of what it was to
   write is there. Mode 3 is a disk that gets full in call N: half is written, and every later call
   that needs room fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[4096];
static int mode;
static long target;
/* Shared with children that are forked after fault_setup, so that a dead one's count is there. */
static long *count;

void fault_setup(void) {
  count = mmap(0, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

void fault_arm(const char *below, int how, long number) {
  strncpy(root, below, sizeof root - 1);
  target = number;
  __atomic_store_n(count, 0, __ATOMIC_SEQ_CST);
  mode = how;
}

long fault_count(void) { return *count; }

static int below(const char *path) {
  return mode && path && strncmp(path, root, strlen(root)) == 0;
}

static int file_below(int fd) {
  char link[64], path[4096];
  if (!mode) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return below(path);
}

enum { GO = 0, HALF = 1, FULL = 2 };

/* What becomes of this call: it goes on, is the one, or comes when the disk is full. */
static int fate(int needs_room) {
  long mine = __atomic_fetch_add(count, 1, __ATOMIC_SEQ_CST);
  if (mode == 2 && mine == target) return HALF;
  if (mode == 3 && mine == target && needs_room) return HALF;
  if (mode == 3 && mine > target && needs_room) return FULL;
  return GO;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static int full(void) {
  errno = ENOSPC;
  return -1;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define WRITES(name, arguments, passed, half)                 \
  ssize_t name arguments {                                    \
    REAL(name);                                               \
    if (!file_below(fd)) return real passed;                  \
    int what = fate(1);                                       \
    if (what == GO) return real passed;                       \
    if (what == FULL) return full();                          \
    if (size < 2) {                                           \
      if (mode == 2) die();                                   \
      return full();                                          \
    }                                                         \
    ssize_t done = real half;                                 \
    if (mode == 2) die();                                     \
    return done;                                              \
  }

WRITES(write, (int fd, const void *data, size_t size), (fd, data, size), (fd, data, size / 2))
WRITES(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at),
       (fd, data, size / 2, at))
WRITES(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at),
       (fd, data, size / 2, at))
WRITES(sendfile, (int fd, int from, off_t *at, size_t size), (fd, from, at, size),
       (fd, from, at, size / 2))
WRITES(sendfile64, (int fd, int from, off64_t *at, size_t size), (fd, from, at, size),
       (fd, from, at, size / 2))
WRITES(copy_file_range,
       (int from, off64_t *low, int fd, off64_t *at, size_t size, unsigned flags),
       (from, low, fd, at, size, flags), (from, low, fd, at, size / 2, flags))

ssize_t writev(int fd, const struct iovec *parts, int number) {
  REAL(writev);
  if (!file_below(fd)) return real(fd, parts, number);
  int what = fate(1);
  if (what == GO) return real(fd, parts, number);
  if (mode == 2) die();
  return full();
}

#define CHANGES(name, arguments, passed, is_below, needs_room) \
  int name arguments {                                         \
    REAL(name);                                                \
    if (!(is_below)) return real passed;                       \
    if (fate(needs_room) == GO) return real passed;            \
    if (mode == 2) die();                                      \
    return full();                                             \
  }

CHANGES(ftruncate, (int fd, off_t size), (fd, size), file_below(fd), 1)
CHANGES(ftruncate64, (int fd, off64_t size), (fd, size), file_below(fd), 1)
CHANGES(fsync, (int fd), (fd), file_below(fd), 1)
CHANGES(mkdir, (const char *path, mode_t bits), (path, bits), below(path), 1)
CHANGES(rename, (const char *path, const char *to), (path, to), below(path), 0)
CHANGES(renameat, (int a, const char *path, int b, const char *to), (a, path, b, to), below(path), 0)
CHANGES(unlink, (const char *path), (path), below(path), 0)
CHANGES(unlinkat, (int a, const char *path, int flags), (a, path, flags), mode && file_below(a), 0)
CHANGES(rmdir, (const char *path), (path), below(path), 0)

#define OPENS(name)                                               \
  int name(const char *path, int flags, ...) {                    \
    REAL(name);                                                   \
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    mode_t bits = flags & O_CREAT ? va_arg(rest, mode_t) : 0;     \
    va_end(rest);                                                 \
    if (!(flags & O_CREAT) || !below(path)) return real(path, flags, bits); \
    if (fate(1) == GO) return real(path, flags, bits);            \
    if (mode == 2) die();                                         \
    return full();                                                \
  }

OPENS(open)
OPENS(open64)
