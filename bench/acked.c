/* Closed-loop load for a broker: publishers that each send the next message when the last is acknowledged.
 *
 * In: flags. Out: one line of JSON: messages acknowledged in the measured time, its length, the broker's processor time
 * in it, and percentiles of the time from a send to its acknowledgement. One thread, one core, no subscriber.
 *
 * NSQ answers a PUB with OK. JetStream answers on a reply subject, so each publisher subscribes to one of its own.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
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

struct publisher {
    int fd;
    size_t held; /* bytes of an answer that is not complete */
    int64_t sent_ns;
    char in[4096];
    char request[512];
    size_t request_size;
};

static int nats, port, publishers = 1, body = 100, pid = 0, epoll_fd;
static double seconds = 2, warm_up = 0.5;
static const char *topic = "bench";
static struct publisher *all;
static int64_t *latency_ns, room, count, begin_ns, end_ns;

static void die(const char *what) {
    fprintf(stderr, "acked: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(clockid_t clock) {
    struct timespec t;
    if (clock_gettime(clock, &t)) return 0;
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t broker_cpu_ns(void) { return pid ? now_ns((clockid_t)((~(unsigned)pid << 3) | 2)) : 0; }

static void put(int fd, const char *data, size_t size) { /* small: it always fits */
    ssize_t n = send(fd, data, size, MSG_NOSIGNAL);
    if (n != (ssize_t)size) die("send");
}

static void await(int fd, const char *word) {
    char data[8192];
    size_t size = 0;
    for (;;) {
        ssize_t n = recv(fd, data + size, sizeof data - size, 0);
        if (n <= 0) die(word);
        size += n;
        if (memmem(data, size, word, strlen(word))) return;
    }
}

static void open_publisher(struct publisher *p, int number) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int one = 1;
    char text[256];
    p->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (p->fd < 0) die("socket");
    if (connect(p->fd, (struct sockaddr *)&to, sizeof to)) die("connect");
    setsockopt(p->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    char *at = p->request;
    if (nats) {
        int size = snprintf(text, sizeof text, "CONNECT {\"verbose\":false}\r\nSUB _INBOX.acked.%d 1\r\nPING\r\n", number);
        put(p->fd, text, size);
        await(p->fd, "PONG");
        at += sprintf(at, "PUB %s _INBOX.acked.%d %d\r\n", topic, number, body);
    } else {
        put(p->fd, "  V2", 4);
        at += sprintf(at, "PUB %s\n", topic);
        uint32_t size = htonl(body);
        memcpy(at, &size, 4);
        at += 4;
    }
    memset(at, 'x', body);
    at += body;
    if (nats) *at++ = '\r', *at++ = '\n';
    p->request_size = at - p->request;
    fcntl(p->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = p};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, p->fd, &event);
}

static void publish(struct publisher *p) {
    p->sent_ns = now_ns(CLOCK_MONOTONIC);
    put(p->fd, p->request, p->request_size);
}

static void acknowledged(struct publisher *p) {
    int64_t now = now_ns(CLOCK_MONOTONIC);
    if (now >= begin_ns && now < end_ns && count < room) latency_ns[count++] = now - p->sent_ns;
    if (now < end_ns) publish(p);
}

static size_t nsq_answer(struct publisher *p, size_t at) { /* [size 4][type 4][data]; the bytes of one, or 0 */
    uint32_t size, type;
    if (p->held - at < 8) return 0;
    memcpy(&size, p->in + at, 4);
    memcpy(&type, p->in + at + 4, 4);
    size = ntohl(size);
    if (p->held - at < 4 + size) return 0;
    if (ntohl(type) == 1) {
        fprintf(stderr, "acked: the broker says %.*s\n", (int)size - 4, p->in + at + 8);
        exit(1);
    }
    if (!memcmp(p->in + at + 8, "_heartbeat_", 11)) put(p->fd, "NOP\n", 4);
    else acknowledged(p);
    return 4 + size;
}

static size_t nats_answer(struct publisher *p, size_t at) {
    char *line = p->in + at, *end = memchr(line, '\n', p->held - at);
    if (!end) return 0;
    size_t size = end + 1 - line;
    if (!memcmp(line, "MSG ", 4)) { /* MSG subject sid bytes, then {"stream":…,"seq":…} or {"error":…} */
        char *number = end - 1;
        while (number[-1] != ' ') number--;
        size_t more = strtoul(number, NULL, 10) + 2;
        if (p->held - at < size + more) return 0;
        if (memmem(end + 1, more, "\"error\"", 7)) {
            fprintf(stderr, "acked: JetStream says %.*s\n", (int)more, end + 1);
            exit(1);
        }
        acknowledged(p);
        return size + more;
    }
    if (!memcmp(line, "PING", 4)) put(p->fd, "PONG\r\n", 6);
    if (!memcmp(line, "-ERR", 4) || !memcmp(line, "HMSG", 4)) { /* HMSG: no stream has the subject */
        fprintf(stderr, "acked: NATS says %.*s\n", (int)size, line);
        exit(1);
    }
    return size;
}

static void readable(struct publisher *p) {
    ssize_t n = recv(p->fd, p->in + p->held, sizeof p->in - p->held, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) die("a publisher was disconnected");
    p->held += n;
    size_t at = 0, taken;
    while (at < p->held && (taken = nats ? nats_answer(p, at) : nsq_answer(p, at))) at += taken;
    memmove(p->in, p->in + at, p->held -= at);
}

static int by_value(const void *a, const void *b) {
    int64_t x = *(int64_t *)a, y = *(int64_t *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *flag = argv[i], *value = argv[i + 1];
        if (!strcmp(flag, "--nats")) nats = atoi(value);
        else if (!strcmp(flag, "--port")) port = atoi(value);
        else if (!strcmp(flag, "--pid")) pid = atoi(value);
        else if (!strcmp(flag, "--publishers")) publishers = atoi(value);
        else if (!strcmp(flag, "--seconds")) seconds = atof(value);
        else if (!strcmp(flag, "--warm-up")) warm_up = atof(value);
        else if (!strcmp(flag, "--topic")) topic = value;
        else if (!strcmp(flag, "--body")) body = atoi(value);
        else return fprintf(stderr, "acked: unknown flag %s\n", flag), 2;
    }
    if (body < 1 || body > 256) return fprintf(stderr, "acked: --body must be 1 to 256, not %d\n", body), 2;
    room = (int64_t)(seconds * 1000000);
    latency_ns = malloc(room * sizeof *latency_ns);
    all = calloc(publishers, sizeof *all);
    epoll_fd = epoll_create1(0);
    for (int i = 0; i < publishers; i++) open_publisher(&all[i], i);
    int64_t start = now_ns(CLOCK_MONOTONIC), cpu = -1;
    begin_ns = start + (int64_t)(warm_up * 1e9), end_ns = begin_ns + (int64_t)(seconds * 1e9);
    for (int i = 0; i < publishers; i++) publish(&all[i]);
    struct epoll_event ready[256];
    for (;;) {
        int n = epoll_wait(epoll_fd, ready, 256, 100);
        for (int i = 0; i < n; i++) readable(ready[i].data.ptr);
        int64_t now = now_ns(CLOCK_MONOTONIC);
        if (cpu < 0 && now >= begin_ns) cpu = broker_cpu_ns();
        if (now >= end_ns) break;
    }
    cpu = broker_cpu_ns() - cpu;
    qsort(latency_ns, count, sizeof *latency_ns, by_value);
    printf("{\"messages\":%ld,\"wall_s\":%.6f,\"cpu_ns\":%ld,\"p50_ns\":%ld,\"p99_ns\":%ld}\n", count, seconds, cpu,
           count ? latency_ns[count / 2] : 0, count ? latency_ns[(int64_t)(0.99 * count)] : 0);
    return 0;
}
