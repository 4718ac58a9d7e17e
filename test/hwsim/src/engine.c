// The engine takes packets from the rings, and lets each queue pair that has something to do
// work. It runs in a thread of its own, and in timed mode also in threads that poll.
#include "hwsim.h"

#include <sched.h>
#include <signal.h>

enum {
	PACKETS = 512, // from one process in a step
	LOOK = 50000000, // ns: how long the engine may sleep, as no event reports a reset
};

static uint64_t min(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void dispatch(const struct packet *p)
{
	const uint8_t *payload = p->flags & F_UNMOVED ? NULL : (const uint8_t *)(p + 1);
	struct qp *q;

	if (p->type == P_CM) {
		cm_packet(p, payload);
		return;
	}
	q = find_qp(p->to);
	if (!q)
		return;
	if (p->type >= P_RESPONSE)
		requester_response(q, p, payload);
	else
		responder_request(q, p, payload);
}

static uint64_t receive(int from, uint64_t now)
{
	for (int i = 0; i < PACKETS; i++) {
		struct packet *p = take_begin(from);

		if (!p)
			return NEVER;
		if (p->due > now)
			return p->due;
		dispatch(p);
		take_end(from, p);
	}
	return now;
}

// The work of a queue pair may add others to the list, at its head.
static uint64_t run_busy(uint64_t now)
{
	struct qp **at = &hw.busy, *q;
	uint64_t next = NEVER;

	while ((q = *at)) {
		uint64_t due;

		q->again = false;
		due = min(requester_run(q, now), responder_run(q, now));
		while (*at != q)
			at = &(*at)->next_busy;
		if (due == NEVER && !q->again) {
			*at = q->next_busy;
			q->is_busy = false;
		} else {
			at = &q->next_busy;
			next = min(next, due);
		}
	}
	return next;
}

uint64_t step(void)
{
	uint64_t now = hw.now = now_ns(), next = NEVER;

	look_for_reset();
	for (int from = 0; from < PROCS; from++)
		next = min(next, receive(from, now));
	hw.again = false;
	next = min(next, run_busy(now));
	next = min(next, cm_run(now));
	next = min(next, cq_run(now));
	return hw.again ? now : next;
}

static void *engine(void *unused)
{
	if (config.timed)
		timed_engine();
	for (;;) {
		uint32_t seen = atomic_load(&shared->procs[self].bell);
		uint64_t next;

		pthread_mutex_lock(&hw.mu);
		next = step();
		pthread_mutex_unlock(&hw.mu);
		if (next > now_ns())
			wait_bell(seen, min(next, now_ns() + LOOK));
		else
			sched_yield(); // other threads wait for the lock
	}
	return NULL;
}

void start_engine(void)
{
	sigset_t all, before;
	pthread_t t;

	sigfillset(&all); // the program's signal handlers must not run in this thread
	pthread_sigmask(SIG_SETMASK, &all, &before);
	if (pthread_create(&t, NULL, engine, NULL))
		abort();
	pthread_detach(t);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void wake_engine(void) { ring_bell(self); }
