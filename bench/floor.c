/* The floor: what a broker on one core costs that makes the same system calls and does nothing else.
 *
 * Reads with recvmsg and the kernel's time stamp, finds where commands end, hands each body to every subscriber in a
 * message frame, answers OK, passes over FIN and RDY. At the end of a turn: one write per connection. No channels,
 * time-outs, limits, statistics or checks; bodies must come from a friend. Prints its port.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define READ_SIZE (256 << 10)
#define MOST 65536

struct connection {
    int fd, subscribed, to_flush, writing;
    char *in, *out;
    size_t in_size, in_room, out_size, out_room;
};

static struct connection *all[MOST], *subscribers[64], *to_flush[MOST];
static int many_subscribers, many_to_flush, epoll_fd;
static uint64_t next_id;
static char scratch[READ_SIZE];

static char *room(struct connection *c, size_t size) {
    if (!c->to_flush) c->to_flush = 1, to_flush[many_to_flush++] = c;
    if (c->out_size + size > c->out_room) c->out = realloc(c->out, c->out_room = 2 * (c->out_size + size));
    char *at = c->out + c->out_size;
    c->out_size += size;
    return at;
}

static void respond(struct connection *c, const char *text) {
    uint32_t size = strlen(text), head[2] = {htonl(size + 4), 0};
    char *at = room(c, 8 + size);
    memcpy(at, head, 8);
    memcpy(at + 8, text, size);
}

static void message(const char *body, uint32_t size, int64_t arrival_ns) {
    static const char hex[] = "0123456789abcdef";
    uint64_t id = next_id++, stamp = htobe64(arrival_ns);
    uint32_t head[2] = {htonl(size + 30), htonl(2)};
    for (int i = 0; i < many_subscribers; i++) {
        char *at = room(subscribers[i], 34 + size);
        memcpy(at, head, 8);
        memcpy(at + 8, &stamp, 8);
        at[16] = 0, at[17] = 1;
        for (int digit = 0; digit < 16; digit++) at[18 + digit] = hex[id >> (60 - 4 * digit) & 15];
        memcpy(at + 34, body, size);
    }
}

static uint32_t number(const char *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return ntohl(value);
}

/* Carries out what is complete; gives how much that was. */
static size_t commands(struct connection *c, const char *data, size_t size, int64_t arrival_ns) {
    size_t pos = 0;
    while (pos < size) {
        if (!memcmp(data + pos, "  V2", 4)) {
            pos += 4;
            continue;
        }
        const char *newline = memchr(data + pos, '\n', size - pos);
        if (!newline) break;
        size_t after = newline + 1 - data;
        char verb = data[pos];
        if (verb == 'P' || verb == 'M' || verb == 'I') { /* PUB, MPUB, IDENTIFY have a body */
            if (after + 4 > size) break;
            uint32_t length = number(data + after);
            const char *body = data + after + 4;
            after += 4 + length;
            if (after > size) break;
            if (verb == 'P')
                message(body, length, arrival_ns);
            else if (verb == 'M')
                for (uint32_t left = number(body), at = 4; left; left--, at += 4 + number(body + at))
                    message(body + at + 4, number(body + at), arrival_ns);
            respond(c, verb == 'I' ? "{\"version\":\"floor\"}" : "OK");
        } else if (verb == 'S') {
            c->subscribed = 1;
            subscribers[many_subscribers++] = c;
            respond(c, "OK");
        }
        pos = after;
    }
    return pos;
}

static void forget(struct connection *c) {
    for (int i = 0; i < many_subscribers; i++)
        if (subscribers[i] == c) subscribers[i--] = subscribers[--many_subscribers];
    for (int i = 0; i < many_to_flush; i++)
        if (to_flush[i] == c) to_flush[i--] = to_flush[--many_to_flush];
    all[c->fd] = NULL;
    close(c->fd);
    free(c->in), free(c->out), free(c);
}

static void readable(struct connection *c) {
    char ancillary[CMSG_SPACE(sizeof(struct timespec))];
    struct iovec into = {scratch, READ_SIZE};
    struct msghdr head = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = ancillary, .msg_controllen = sizeof ancillary};
    ssize_t n = recvmsg(c->fd, &head, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return forget(c);
    struct timespec stamp = {0, 0};
    struct cmsghdr *found = CMSG_FIRSTHDR(&head);
    if (found) memcpy(&stamp, CMSG_DATA(found), sizeof stamp);
    int64_t arrival_ns = stamp.tv_sec * 1000000000LL + stamp.tv_nsec;
    const char *data = scratch;
    size_t size = n;
    if (c->in_size) {
        if (c->in_size + n > c->in_room) c->in = realloc(c->in, c->in_room = 2 * (c->in_size + n));
        memcpy(c->in + c->in_size, scratch, n);
        data = c->in, size = c->in_size + n;
    }
    size_t done = commands(c, data, size, arrival_ns), left = size - done;
    if (left > c->in_room) c->in = realloc(c->in, c->in_room = 2 * left);
    if (left) memmove(c->in, data + done, left);
    c->in_size = left;
}

static void watch(struct connection *c, uint32_t events) {
    struct epoll_event event = {.events = events, .data.fd = c->fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

static void flush(struct connection *c) {
    ssize_t n = send(c->fd, c->out, c->out_size, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) return forget(c);
    if (n < 0) n = 0;
    memmove(c->out, c->out + n, c->out_size -= n);
    if (c->out_size && !c->writing) c->writing = 1, watch(c, EPOLLIN | EPOLLOUT);
    if (!c->out_size && c->writing) c->writing = 0, watch(c, EPOLLIN);
}

int main(void) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof here;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&here, length) || listen(listener, 1024)) return perror("floor"), 1;
    getsockname(listener, (struct sockaddr *)&here, &length);
    printf("floor: TCP 127.0.0.1:%d\n", ntohs(here.sin_port));
    fflush(stdout);
    epoll_fd = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, ready[1024];
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int n = epoll_wait(epoll_fd, ready, 1024, -1);
        for (int i = 0; i < n; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) {
                while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    if (fd >= MOST) return fprintf(stderr, "floor: too many connections\n"), 1;
                    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    all[fd] = calloc(1, sizeof **all);
                    all[fd]->fd = fd;
                    event = (struct epoll_event){.events = EPOLLIN, .data.fd = fd};
                    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
                }
                continue;
            }
            if (all[fd] && ready[i].events & EPOLLOUT) flush(all[fd]);
            if (all[fd] && ready[i].events & ~EPOLLOUT) readable(all[fd]);
        }
        while (many_to_flush) {
            struct connection *c = to_flush[--many_to_flush];
            c->to_flush = 0;
            if (c->out_size && !c->writing) flush(c);
        }
    }
}
