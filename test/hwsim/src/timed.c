// Timed mode: what is sent arrives by the clock, at the link's speed and after its latency,
// and whoever posts or polls does the device's work, so that no thread of the device takes
// a processor from the programs. The engine's thread looks after what nobody polls for.
#include "hwsim.h"

#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

enum {
	US = 1000, MS = 1000 * US,
	TICK = 1 * MS, // how often the engine looks while the program polls
	QUIET = 2 * MS, // without a poll: the program does not
	NEGLECTED = 200 * US, // a packet that has been due for so long is not polled for
	STAY = 20 * MS, // the engine goes on working for so long then
	IDLE = 50 * MS, // what was posted may have started a timer unnoticed
	SOON = 10 * US, // less than sleeping and waking take
	AWAKE = 500 * US, // after a queue was armed, in the place of an interrupt
};

// arrival is when n bytes arrive that leave now: behind all that left before, and behind what
// their queue pair has to do first, which does not keep the link from others.
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

// compute takes a processor's time, as the kernel does that pins pages.
void compute(uint64_t ns)
{
	uint64_t until;

	if (!ns)
		return;
	for (until = now_ns() + ns; now_ns() < until; )
		;
}

// idle takes time alone, as the kernel does that waits for a device's command.
void idle(uint64_t ns)
{
	struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};

	if (ns)
		while (nanosleep(&t, &t))
			;
}

// unmoved reports whether a message's payload stays where it is. Messages are moved, as
// they are what the programs understand each other by; so are writes and reads as short as
// those with which a device is put to the test.
bool unmoved(enum packet_type type, uint32_t length)
{
	return config.no_copy && type != P_SEND && length >= UNMOVED_FROM;
}

// packet_bytes is how much of what is left of a message goes into a packet.
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

// While the engine listens, each packet rings its bell: when a completion queue is armed,
// and when the program does not poll, or not for what comes.
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

// timed_post is for what was posted to a queue pair: it leaves at once.
void timed_post(struct qp *q)
{
	uint64_t next;
	bool reports;

	hw.now = now_ns();
	next = requester_run(q, hw.now);
	reports = q->out.first && next == q->out.first->due; // to who polls, if no queue is armed
	if (next < hw.now + TICK && (!reports || atomic_load(&hw.armed)))
		wake_engine(); // a ring is full, or a timer runs that no poll may be there for
}
