// The shared file: attaching to it, the slots of processes, the rings between them.
#include "hwsim.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

struct shared *shared;
int self;

static int file = -1;

// While a process lives, it holds the lock of a byte beyond the file's end. The kernel
// releases the lock when the process dies, in whatever way. The lock belongs to the open file,
// so the program may open and close the file without effect on it.
static struct flock slot_lock(int slot)
{
	return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = sizeof *shared + slot, .l_len = 1};
}

int attach(void)
{
	struct flock l;

	file = open(config.path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (file < 0 || ftruncate(file, sizeof *shared))
		return errno;
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (shared == MAP_FAILED)
		return errno;
	for (self = 0; self < PROCS; self++) {
		l = slot_lock(self);
		if (!fcntl(file, F_OFD_SETLK, &l))
			break;
	}
	if (self == PROCS)
		return EBUSY;
	for (int i = 0; i < N_OBJECTS; i++)
		shared->counts[self][i] = 0;
	for (int i = 0; i < LISTENERS; i++)
		shared->procs[self].listeners[i].handle = 0;
	for (int from = 0; from < PROCS; from++) { // messages to the slot's last process
		struct ring *r = &shared->rings[from][self];
		r->tail = r->head;
	}
	count(N_ATTACHED, 1);
	return 0;
}

static struct { uint64_t at; bool alive; } known[PROCS];

// alive keeps the answer for a while, because it takes a system call.
bool alive(int slot)
{
	const uint64_t valid = 2000000; // ns

	if (slot >= 0 && slot < PROCS && known[slot].at && recent_ns() - known[slot].at < valid)
		return known[slot].alive;
	return alive_now(slot);
}

// alive_now also finds a process that has just started.
bool alive_now(int slot)
{
	struct flock l;

	if (slot == self)
		return true;
	if (slot < 0 || slot >= PROCS)
		return false;
	l = slot_lock(slot);
	known[slot].alive = !fcntl(file, F_OFD_GETLK, &l) && l.l_type != F_UNLCK;
	known[slot].at = recent_ns();
	return known[slot].alive;
}

// ---- bells ----

static long futex(_Atomic uint32_t *word, int op, uint32_t val, const struct timespec *t)
{
	return syscall(SYS_futex, word, op, val, t, NULL, FUTEX_BITSET_MATCH_ANY);
}

void ring_bell(int slot)
{
	struct proc *p = &shared->procs[slot];

	atomic_fetch_add(&p->bell, 1);
	if (atomic_load(&p->asleep) && atomic_exchange(&p->asleep, 0)) // one ring is enough
		futex(&p->bell, FUTEX_WAKE, INT_MAX, NULL);
}

// wait_bell sleeps until a time of the clock, unless the bell has rung since it was last
// looked at.
void wait_bell(uint32_t seen, uint64_t until)
{
	struct proc *p = &shared->procs[self];
	struct timespec t = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};

	atomic_store(&p->asleep, 1);
	if (atomic_load(&p->bell) == seen)
		futex(&p->bell, FUTEX_WAIT_BITSET, seen, until == NEVER ? NULL : &t);
	atomic_store(&p->asleep, 0);
}

// ---- rings ----

enum { CM_BYTES = 128 << 10 };

static uint32_t packet_size(uint32_t payload) { return (sizeof(struct packet) + payload + 63) & ~63u; }

// put_begin finds room for a packet, which put_end publishes. A packet does not wrap: the rest
// at the ring's end is padded. A part of the ring is reserved for the connection manager,
// whose messages take another way than data.
struct packet *put_begin(int to, uint32_t payload, enum packet_type type)
{
	static uint64_t tails[PROCS]; // as last seen, because a look takes the cache line from its writer
	struct ring *r = &shared->rings[self][to];
	uint64_t head = r->head, most = RING_BYTES - (type == P_CM ? 0 : CM_BYTES);
	uint32_t size = packet_size(payload), at = head % RING_BYTES, pad = 0;
	struct packet *p;

	if (at + size > RING_BYTES)
		pad = RING_BYTES - at;
	if (head + pad + size - tails[to] > most)
		tails[to] = atomic_load(&r->tail);
	if (head + pad + size - tails[to] > most)
		return NULL;
	if (pad) {
		p = (struct packet *)(r->data + at);
		p->size = pad;
		p->type = P_PAD;
		atomic_store(&r->head, head + pad);
		at = 0;
	}
	p = (struct packet *)(r->data + at);
	*p = (struct packet){.size = size, .type = type, .bytes = payload};
	return p;
}

void put_end(int to, struct packet *p)
{
	struct ring *r = &shared->rings[self][to];

	atomic_fetch_add(&r->head, p->size);
	if (!config.timed || p->type == P_CM || atomic_load(&shared->procs[to].listens))
		ring_bell(to);
}

// undelivered reports whether the other engine has not yet looked at what was sent. Time that
// passes until then is due to the processor, not to the network.
bool undelivered(int to)
{
	struct ring *r = &shared->rings[self][to];

	return atomic_load(&r->head) != atomic_load(&r->tail);
}

struct packet *take_begin(int from)
{
	static uint64_t heads[PROCS];
	struct ring *r = &shared->rings[from][self];

	for (;;) {
		uint64_t tail = r->tail;
		struct packet *p = (struct packet *)(r->data + tail % RING_BYTES);

		if (tail >= heads[from])
			heads[from] = atomic_load(&r->head);
		if (tail == heads[from])
			return NULL;
		if (p->type != P_PAD)
			return p;
		take_end(from, p);
	}
}

void take_end(int from, struct packet *p)
{
	struct ring *r = &shared->rings[from][self];

	atomic_store_explicit(&r->tail, r->tail + p->size, memory_order_release);
}

// ---- counters ----

void count(enum count what, int n)
{
	if (shared)
		atomic_fetch_add(&shared->counts[self][what], n);
}

// complain reports that the program broke a rule. The program goes on, because devices differ
// in what happens then.
void complain(const char *format, ...)
{
	va_list args;

	count(N_COMPLAINTS, 1);
	fprintf(stderr, "hwsim: ");
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fprintf(stderr, "\n");
}
