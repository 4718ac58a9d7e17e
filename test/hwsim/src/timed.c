// Timed mode: messages arrive by the clock, at the link's speed and after its latency. Threads
// that post or poll do the device's work, so that no thread of the device takes a processor
// from the programs. The engine's thread does what nobody polls for.
#include "hwsim.h"

#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

enum {
	US = 1000, MS = 1000 * US,
	TICK = 1 * MS, // the engine's period while the program polls
	QUIET = 2 * MS, // after this time without a poll, the program counts as not polling
	NEGLECTED = 200 * US, // a packet that is due for so long counts as not polled for
	STAY = 20 * MS, // for how long the engine then works
	IDLE = 50 * MS, // a work request may have started a timer unnoticed
	SOON = 10 * US, // shorter than sleeping and waking take
	AWAKE = 500 * US, // after a queue was armed, in place of an interrupt
};

// arrival returns when n bytes arrive that are sent now: after all that was sent before, and
// after what their queue pair has to do first, which does not delay other queue pairs on the
// link.
uint64_t arrival(struct qp *q, uint32_t n)
{
	static uint64_t link_free;
	uint64_t took = n * 1000000000ull / config.bytes_per_s;

	if (!config.timed)
		return 0;
	if (link_free < hw.now)
		link_free = hw.now;
	link_free += took;
	q->busy_until += took;
	if (q->busy_until < link_free)
		q->busy_until = link_free;
	return q->busy_until + config.latency_ns;
}

// compute takes processor time, as the kernel does when it pins pages.
void compute(uint64_t ns)
{
	uint64_t until;

	if (!ns)
		return;
	for (until = now_ns() + ns; now_ns() < until; )
		;
}

// idle takes only time, as the kernel does when it waits for a device's command.
void idle(uint64_t ns)
{
	struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};

	if (ns)
		while (nanosleep(&t, &t))
			;
}

// unmoved reports whether a message's payload is not moved. Messages are always moved, because
// the programs need their content. So are writes and reads that are as short as those by which
// a device is probed.
bool unmoved(enum packet_type type, uint32_t length)
{
	return config.no_copy && type != P_SEND && length >= UNMOVED_FROM;
}

// packet_bytes returns how much of the rest of a message goes into one packet.
uint32_t packet_bytes(enum packet_type type, uint32_t length, uint32_t left)
{
	return left < MTU || unmoved(type, length) ? left : MTU;
}

static bool neglected(uint64_t now)
{
	for (int from = 0; from < PROCS; from++) {
		const struct packet *p = take_begin(from);

		if (p && p->due && p->due + NEGLECTED < now)
			return true;
	}
	return false;
}

// While the engine listens, each packet rings its bell: when a completion queue is armed, and
// when the program does not poll, or does not poll for what has come.
void timed_engine(void)
{
	struct proc *me = &shared->procs[self];
	uint64_t listen_until = 0;

	prctl(PR_SET_TIMERSLACK, 1);
	for (;;) {
		uint32_t seen = atomic_load(&me->bell);
		uint64_t now = now_ns(), next;
		bool listens;

		pthread_mutex_lock(&hw.mu);
		if (now > hw.polled + QUIET || neglected(now))
			listen_until = now + STAY;
		listens = atomic_load(&hw.armed) || now < listen_until;
		atomic_store(&me->listens, listens);
		next = step();
		pthread_mutex_unlock(&hw.mu);
		now = now_ns();
		if (next < now + SOON || (listens && now < atomic_load(&hw.armed_at) + AWAKE))
			sched_yield();
		else if (listens)
			wait_bell(seen, next < now + IDLE ? next : now + IDLE);
		else
			wait_bell(seen, now + TICK);
	}
}

// timed_post is called for requests that were posted to a queue pair, which are sent at once.
void timed_post(struct qp *q)
{
	uint64_t next;
	bool reports;

	hw.now = now_ns();
	next = requester_run(q, hw.now);
	reports = q->out.first && next == q->out.first->due; // to a thread that polls, if no queue is armed
	if (next < hw.now + TICK && (!reports || atomic_load(&hw.armed)))
		wake_engine(); // a ring is full, or a timer runs for which there may be no poll
}
