// Queues of events with a descriptor, as the kernel has for completion channels, asynchronous
// events and the connection manager.
#include "hwsim.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>

int events_open(struct events *q)
{
	q->first = NULL;
	q->last = &q->first;
	q->fd = eventfd(0, EFD_CLOEXEC); // blocks, until the program sets O_NONBLOCK
	return q->fd < 0 ? errno : 0;
}

void events_close(struct events *q)
{
	q->closed = true;
	close(q->fd);
	while (q->first) {
		struct event *e = q->first;
		q->first = e->next;
		free(e);
	}
}

void events_put(struct events *q, struct event *e)
{
	uint64_t one = 1;

	e->next = NULL;
	*q->last = e;
	q->last = &e->next;
	if (write(q->fd, &one, sizeof one) != sizeof one)
		complain("eventfd: %s", strerror(errno));
}

// settle makes the descriptor, which was readable, unreadable if no event is left.
static void settle(struct events *q)
{
	uint64_t n;

	if (!q->first && read(q->fd, &n, sizeof n) != sizeof n)
		complain("eventfd: %s", strerror(errno));
}

static struct event *take(struct events *q)
{
	struct event *e = q->first;

	if (!e)
		return NULL;
	q->first = e->next;
	if (!q->first)
		q->last = &q->first;
	settle(q);
	return e;
}

// events_wait takes the next event. taken is called before any other thread can destroy the
// object that the event is about. fd is the number under which the program has the descriptor.
struct event *events_wait(struct events *q, int fd, void (*taken)(struct event *))
{
	for (;;) {
		struct event *e;
		struct pollfd p = {.fd = fd, .events = POLLIN};
		bool nonblock = fcntl(fd, F_GETFL) & O_NONBLOCK;

		while (q->closed) // as in the kernel, where the call holds the open file
			pause();
		pthread_mutex_lock(&hw.mu);
		e = take(q);
		if (e)
			taken(e);
		pthread_mutex_unlock(&hw.mu);
		if (e)
			return e;
		if (nonblock) {
			errno = EAGAIN;
			return NULL;
		}
		if (poll(&p, 1, -1) < 0)
			return NULL;
	}
}

void events_drop(struct events *q, bool (*match)(struct event *, void *), void (*drop)(struct event *), void *arg)
{
	struct event **at = &q->first;
	bool had = q->first;

	while (*at) {
		struct event *e = *at;

		if (!match(e, arg)) {
			at = &e->next;
			continue;
		}
		*at = e->next;
		drop(e);
	}
	q->last = at;
	if (had)
		settle(q);
}
