// connections.c: tells a file about every attempt of a process to reach another machine.
//
// Preloaded into a dynamically linked program on Linux (LD_PRELOAD). Name look-ups and
// connections of internet sockets are written to the file that LILY_CONNECTIONS names, one a
// line, and refused. It knows nothing of the program.
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static void tell(const char *what, const char *whom) {
    const char *path = getenv("LILY_CONNECTIONS");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) abort();
    fprintf(file, "%s %s\n", what, whom);
    fclose(file);
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
    (void)service, (void)hints, (void)found;
    tell("getaddrinfo", node ? node : "");
    return EAI_FAIL;
}

int connect(int fd, const struct sockaddr *to, socklen_t length) {
    (void)fd, (void)length;
    char whom[32];
    snprintf(whom, sizeof whom, "family %d", to->sa_family);
    if (to->sa_family == AF_INET || to->sa_family == AF_INET6) tell("connect", whom);
    errno = ECONNREFUSED;
    return -1;
}

ssize_t sendto(int fd, const void *data, size_t length, int flags, const struct sockaddr *to,
               socklen_t to_length) {
    (void)to_length;
    if (!to) return send(fd, data, length, flags);
    tell("sendto", "");
    errno = ECONNREFUSED;
    return -1;
}
