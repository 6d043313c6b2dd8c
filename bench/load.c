/* Open-loop load for a broker: many publishers, one subscriber, one thread, one core.
 *
 * In: flags. Out: one line of JSON, and a file of int64 latencies in ns, one a message that was due in the measured time
 * (-1: it came too late or never). A message's latency begins when it was due by the schedule, whether it could be sent then or not,
 * and ends when the subscriber has read it. The schedule is Poisson, drawn before the first message is sent.
 *
 * Publishers' answers are read seldom, so that what a remote client would pay is not charged to the broker's core: on
 * loopback, a sender pays for waking its peer. All of them are counted in the end. The broker's CPU is read from its
 * process clock at the first and the last message of the measured time.
 *
 * With --fill there is no schedule: so many messages are published before the subscriber takes any, and the line says how
 * long it takes to empty the topic.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define READ_SIZE (1 << 20)
#define ANSWERS_EVERY 8 /* sends of one publisher between two looks at its answers */

struct publisher {
    int fd, sends;
    char *unsent; /* what the broker did not take yet */
    size_t unsent_size, unsent_room;
};

static int nats, port, publishers = 1000, batch = 1, body = 100, mpub = 1, ready = 2500, idle = 0, heartbeat_ms = 0;
static int buffer_ms = -1, pid = 0, epoll_fd;
static double rate = 10000, seconds = 2, warm_up = 0.3, grace = 0.5;
static const char *path = "/dev/null", *topic = "bench";
static int64_t fill = 0;
static uint64_t seed = 1, run_id; /* so that what another run left behind is not mistaken for ours */

static struct publisher *all;
static int *idlers;
static char *request; /* one batch as it goes over the wire; indices are filled in */
static size_t request_size;
static size_t *index_at;
static int64_t *due_ns, *latency_ns;
static uint32_t *sender;
static char *in; /* the subscriber's input: at most the beginning of one message is kept */
static size_t in_size;
static char *fins;
static size_t fins_size;
static int subscriber;
static int64_t received, answers, duplicates;

static void die(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(clockid_t clock) {
    struct timespec t;
    if (clock_gettime(clock, &t)) return 0;
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t broker_cpu_ns(void) { return pid ? now_ns((clockid_t)((~(unsigned)pid << 3) | 2)) : 0; }

static double uniform(void) { /* xorshift64*, in (0, 1] */
    seed ^= seed >> 12, seed ^= seed << 25, seed ^= seed >> 27;
    return (double)((seed * 2685821657736338717ULL >> 11) + 1) / 9007199254740992.0;
}

static int dial(void) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0) die("socket");
    if (connect(fd, (struct sockaddr *)&to, sizeof to)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void put(int fd, const char *data, size_t size) { /* blocking; only before the load begins, and FINs */
    while (size) {
        ssize_t n = send(fd, data, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) continue;
        if (n < 0) die("send");
        data += n, size -= n;
    }
}

static void say(int fd, const char *text) { put(fd, text, strlen(text)); }

static void identify(int fd, const char *json) {
    uint32_t size = htonl(strlen(json));
    say(fd, "IDENTIFY\n");
    put(fd, (char *)&size, 4);
    say(fd, json);
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

static void subscribe(void) {
    char text[256];
    subscriber = dial();
    if (nats) {
        snprintf(text, sizeof text, "CONNECT {\"verbose\":false}\r\nSUB %s 1\r\nPING\r\n", topic);
        say(subscriber, text);
        await(subscriber, "PONG");
    } else {
        say(subscriber, "  V2");
        if (buffer_ms < 0) /* every message at once */
            snprintf(text, sizeof text, "{\"feature_negotiation\":true,\"output_buffer_size\":-1}");
        else
            snprintf(text, sizeof text, "{\"feature_negotiation\":true,\"output_buffer_timeout\":%d}", buffer_ms);
        identify(subscriber, text);
        await(subscriber, "version");
        snprintf(text, sizeof text, "SUB %s c\n", topic);
        say(subscriber, text);
        await(subscriber, "OK");
        snprintf(text, sizeof text, "RDY %d\n", ready);
        say(subscriber, text);
    }
    fcntl(subscriber, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = UINT64_MAX};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, subscriber, &event);
}

static void greet(int fd) {
    if (nats) {
        say(fd, "CONNECT {\"verbose\":true}\r\n"); /* answers every PUB, as NSQ does */
        await(fd, "+OK");
    } else
        say(fd, "  V2");
}

static void connect_idle(void) {
    idlers = calloc(idle ? idle : 1, sizeof *idlers);
    for (int i = 0; i < idle; i++) {
        idlers[i] = dial();
        greet(idlers[i]);
        if (heartbeat_ms && !nats) {
            char text[96];
            snprintf(text, sizeof text, "{\"heartbeat_interval\":%d}", heartbeat_ms);
            identify(idlers[i], text);
            await(idlers[i], "OK");
        }
        fcntl(idlers[i], F_SETFL, O_NONBLOCK);
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = 1000000 + i};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, idlers[i], &event);
    }
}

static void connect_publishers(void) {
    all = calloc(publishers, sizeof *all);
    for (int i = 0; i < publishers; i++) {
        all[i].fd = dial();
        greet(all[i].fd);
        fcntl(all[i].fd, F_SETFL, O_NONBLOCK);
        struct epoll_event event = {.events = 0, .data.u64 = i};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, all[i].fd, &event);
    }
}

static void number(char **at, uint32_t value) {
    value = htonl(value);
    memcpy(*at, &value, 4);
    *at += 4;
}

static void prepare(void) {
    request = calloc(1, batch * (body + 64) + 64);
    index_at = calloc(batch, sizeof *index_at);
    char *at = request;
    if (!nats && mpub && batch > 1) {
        at += sprintf(at, "MPUB %s\n", topic);
        number(&at, 4 + batch * (4 + body));
        number(&at, batch);
    }
    for (int i = 0; i < batch; i++) {
        if (nats)
            at += sprintf(at, "PUB %s %d\r\n", topic, body);
        else {
            if (!mpub || batch == 1) at += sprintf(at, "PUB %s\n", topic);
            number(&at, body);
        }
        index_at[i] = at - request;
        memset(at, 'x', body);
        memcpy(at + 8, &run_id, 8);
        at += body;
        if (nats) *at++ = '\r', *at++ = '\n';
    }
    request_size = at - request;
}

static void answers_of(struct publisher *p) {
    char data[4096];
    for (;;) {
        ssize_t n = recv(p->fd, data, sizeof data, MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) die("a publisher was disconnected");
        for (ssize_t i = 0; i < n; i++) answers += data[i] == 'K'; /* OK, +OK; no other frame has one */
        if (n < (ssize_t)sizeof data) return;
    }
}

static void publish(struct publisher *p, uint64_t first) {
    for (int i = 0; i < batch; i++) {
        uint64_t index = first + i;
        memcpy(request + index_at[i], &index, 8);
    }
    if (++p->sends % ANSWERS_EVERY == 0) answers_of(p);
    ssize_t n = p->unsent_size ? 0 : send(p->fd, request, request_size, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) die("send");
    if (n < 0) n = 0;
    size_t left = request_size - n;
    if (!left) return;
    if (p->unsent_size + left > p->unsent_room)
        p->unsent = realloc(p->unsent, p->unsent_room = 2 * (p->unsent_size + left));
    memcpy(p->unsent + p->unsent_size, request + n, left);
    if (!p->unsent_size) {
        struct epoll_event event = {.events = EPOLLOUT, .data.u64 = p - all};
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, p->fd, &event);
    }
    p->unsent_size += left;
}

static void writable(struct publisher *p) {
    answers_of(p);
    ssize_t n = send(p->fd, p->unsent, p->unsent_size, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) die("send");
    if (n < 0) n = 0;
    memmove(p->unsent, p->unsent + n, p->unsent_size -= n);
    if (!p->unsent_size) {
        struct epoll_event event = {.events = 0, .data.u64 = p - all};
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, p->fd, &event);
    }
}

static void got(const char *payload, int64_t now, int64_t messages) {
    uint64_t index, run;
    memcpy(&index, payload, 8);
    memcpy(&run, payload + 8, 8);
    if (run != run_id) return;
    if (index >= (uint64_t)messages || latency_ns[index] >= 0)
        duplicates++;
    else
        latency_ns[index] = now - due_ns[index / batch], received++;
}

static void read_messages(int64_t messages) {
    ssize_t n = recv(subscriber, in + in_size, READ_SIZE - in_size, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) die("the subscriber was disconnected");
    int64_t now = now_ns(CLOCK_MONOTONIC);
    in_size += n;
    size_t pos = 0;
    fins_size = 0;
    if (nats)
        while (pos < in_size) {
            char *end = memchr(in + pos, '\n', in_size - pos);
            if (!end) break;
            size_t after = end + 1 - in;
            if (!memcmp(in + pos, "MSG ", 4)) {
                if (after + body + 2 > in_size) break;
                got(in + after, now, messages);
                after += body + 2;
            } else if (!memcmp(in + pos, "PING", 4))
                say(subscriber, "PONG\r\n");
            pos = after;
        }
    else
        while (pos + 8 <= in_size) { /* [size 4][type 4][timestamp 8][attempts 2][id 16][body] */
            uint32_t size, type;
            memcpy(&size, in + pos, 4);
            memcpy(&type, in + pos + 4, 4);
            size = ntohl(size);
            if (pos + 4 + size > in_size) break;
            if (ntohl(type) == 2) {
                got(in + pos + 34, now, messages);
                memcpy(fins + fins_size, "FIN ", 4);
                memcpy(fins + fins_size + 4, in + pos + 18, 16);
                fins[fins_size + 20] = '\n';
                fins_size += 21;
            } else if (!memcmp(in + pos + 8, "_heartbeat_", 11)) {
                memcpy(fins + fins_size, "NOP\n", 4);
                fins_size += 4;
            } else if (ntohl(type) == 1) {
                fprintf(stderr, "load: the broker says %.*s\n", (int)size - 4, in + pos + 8);
                exit(1);
            }
            pos += 4 + size;
        }
    memmove(in, in + pos, in_size -= pos);
    if (fins_size) put(subscriber, fins, fins_size);
}

static void leave_nothing(int64_t messages, int64_t sent) { /* for the next run */
    for (int64_t quiet = 0; received < sent && quiet < 500; quiet++) {
        int64_t before = received;
        for (int i = 0; i < publishers; i++)
            if (all[i].unsent_size) writable(&all[i]);
        read_messages(messages);
        if (received > before) quiet = 0;
        else usleep(1000);
    }
    usleep(50000);
}

static void empty_full_topic(void) {
    char text[32];
    int wanted = ready;
    fill -= fill % batch;
    publishers = 1, ready = 0;
    due_ns = calloc(fill / batch, sizeof *due_ns);
    latency_ns = malloc(fill * sizeof *latency_ns);
    for (int64_t i = 0; i < fill; i++) latency_ns[i] = -1;
    subscribe(); /* so that the channel has all messages */
    connect_publishers();
    for (int64_t first = 0; first < fill; first += batch) {
        for (int i = 0; i < batch; i++) {
            uint64_t index = first + i;
            memcpy(request + index_at[i], &index, 8);
        }
        put(all[0].fd, request, request_size);
    }
    while (answers < fill / batch) answers_of(&all[0]), usleep(1000);
    usleep(300000);
    fcntl(subscriber, F_SETFL, 0);
    int64_t cpu = broker_cpu_ns(), own_cpu = now_ns(CLOCK_PROCESS_CPUTIME_ID), began = now_ns(CLOCK_MONOTONIC);
    snprintf(text, sizeof text, "RDY %d\n", wanted);
    say(subscriber, text);
    while (received < fill) read_messages(fill);
    double wall = (now_ns(CLOCK_MONOTONIC) - began) / 1e9;
    cpu = broker_cpu_ns() - cpu, own_cpu = now_ns(CLOCK_PROCESS_CPUTIME_ID) - own_cpu;
    usleep(50000); /* it reads the last FINs */
    printf("{\"messages\":%ld,\"duplicates\":%ld,\"cpu_ns\":%ld,\"wall_s\":%.6f,\"own_load\":%.4f}\n", fill, duplicates, cpu,
           wall, own_cpu / 1e9 / wall);
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
        else if (!strcmp(flag, "--rate")) rate = atof(value);
        else if (!strcmp(flag, "--batch")) batch = atoi(value);
        else if (!strcmp(flag, "--mpub")) mpub = atoi(value);
        else if (!strcmp(flag, "--seconds")) seconds = atof(value);
        else if (!strcmp(flag, "--warm-up")) warm_up = atof(value);
        else if (!strcmp(flag, "--buffer-ms")) buffer_ms = atoi(value);
        else if (!strcmp(flag, "--idle")) idle = atoi(value);
        else if (!strcmp(flag, "--heartbeat-ms")) heartbeat_ms = atoi(value);
        else if (!strcmp(flag, "--seed")) seed = strtoull(value, NULL, 10) * 2654435761u + 88172645463325252ULL;
        else if (!strcmp(flag, "--topic")) topic = value;
        else if (!strcmp(flag, "--fill")) fill = atoll(value);
        else if (!strcmp(flag, "--body")) body = atoi(value);
        else if (!strcmp(flag, "--out")) path = value;
        else return fprintf(stderr, "load: what is %s?\n", flag), 2;
    }
    if (fill) {
        in = malloc(READ_SIZE);
        fins = malloc(READ_SIZE);
        epoll_fd = epoll_create1(0);
        run_id = now_ns(CLOCK_REALTIME);
        prepare();
        return empty_full_topic(), 0;
    }
    int64_t events = (int64_t)((seconds + warm_up) * rate / batch), messages = events * batch;
    due_ns = malloc(events * sizeof *due_ns);
    sender = malloc(events * sizeof *sender);
    latency_ns = malloc(messages * sizeof *latency_ns);
    int64_t *lag_ns = malloc(events * sizeof *lag_ns);
    in = malloc(READ_SIZE);
    fins = malloc(READ_SIZE);
    double at = 0, measured = warm_up * 1e9;
    int64_t first = 0;
    for (int64_t i = 0; i < events; i++) {
        at += -log(uniform()) * batch / rate * 1e9;
        if (at < measured) first = i + 1;
        due_ns[i] = (int64_t)at;
        sender[i] = (uint32_t)((uniform() - 1e-12) * publishers);
    }
    for (int64_t i = 0; i < messages; i++) latency_ns[i] = -1;
    epoll_fd = epoll_create1(0);
    run_id = now_ns(CLOCK_REALTIME);
    prepare();
    subscribe();
    connect_idle();
    connect_publishers();
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event ready_now[256], event = {.events = EPOLLIN, .data.u64 = UINT64_MAX - 1};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer, &event);
    usleep(200000); /* the broker has accepted all and is quiet again */
    int64_t begin = now_ns(CLOCK_MONOTONIC) + 20000000, cpu = 0, own_cpu = 0, began = 0, before = 0, ended = 0, after = 0;
    for (int64_t i = 0; i < events; i++) due_ns[i] += begin;
    int64_t next = 0, give_up = due_ns[events - 1] + (int64_t)(grace * 1e9), armed = 0;
    for (;;) {
        int64_t now = now_ns(CLOCK_MONOTONIC);
        for (int many = 0; next < events && due_ns[next] <= now && many < 64; next++, many++) {
            if (next == first) cpu = broker_cpu_ns(), own_cpu = now_ns(CLOCK_PROCESS_CPUTIME_ID), began = now, before = received;
            now = now_ns(CLOCK_MONOTONIC);
            lag_ns[next] = now - due_ns[next];
            publish(&all[sender[next]], (uint64_t)next * batch);
        }
        if (next == events && !ended)
            cpu = broker_cpu_ns() - cpu, own_cpu = now_ns(CLOCK_PROCESS_CPUTIME_ID) - own_cpu, ended = now, after = received;
        if (received == messages || now > give_up) break;
        int64_t wake = next < events ? due_ns[next] : give_up;
        if (wake != armed && wake > now) {
            struct itimerspec spec = {.it_value = {wake / 1000000000, wake % 1000000000}};
            timerfd_settime(timer, TFD_TIMER_ABSTIME, &spec, NULL);
            armed = wake;
        }
        int n = epoll_wait(epoll_fd, ready_now, 256, wake > now ? -1 : 0);
        for (int i = 0; i < n; i++) {
            uint64_t who = ready_now[i].data.u64;
            char data[4096];
            if (who == UINT64_MAX) read_messages(messages);
            else if (who == UINT64_MAX - 1) (void)!read(timer, data, 8);
            else if (who >= 1000000) {
                if (recv(idlers[who - 1000000], data, sizeof data, 0) <= 0) die("an idle client was disconnected");
                if (!nats) say(idlers[who - 1000000], "NOP\n");
            } else writable(&all[who]);
        }
    }
    if (!ended) /* it could not even be sent */
        cpu = broker_cpu_ns() - cpu, own_cpu = now_ns(CLOCK_PROCESS_CPUTIME_ID) - own_cpu, ended = give_up, after = received;
    int64_t in_time = received;
    FILE *out = fopen(path, "wb");
    if (!out) die(path);
    fwrite(latency_ns + first * batch, sizeof *latency_ns, messages - first * batch, out);
    fclose(out);
    leave_nothing(messages, next * batch);
    for (int i = 0; i < publishers; i++) answers_of(&all[i]);
    qsort(lag_ns + first, events - first, sizeof *lag_ns, by_value);
    double wall = (ended - began) / 1e9;
    printf("{\"messages\":%ld,\"received\":%ld,\"answers\":%ld,\"duplicates\":%ld,\"counted\":%ld,\"cpu_ns\":%ld,"
           "\"wall_s\":%.6f,\"own_load\":%.4f,\"lag_p99_ns\":%ld}\n",
           messages, in_time, answers, duplicates, after - before, cpu, wall, own_cpu / 1e9 / wall,
           lag_ns[first + (int64_t)(0.99 * (events - first))]);
    return 0;
}
