// Memory regions, and what their keys permit (IBTA specification volume 1, sections 10.6 and
// 11.2.8; ibv_reg_mr(3)).
#include "hwsim.h"

// A key is an index, with a generation in its lower bits that differs each time the index is
// used: so a stale key finds nothing.
enum { KEY_BITS = 8 };

static struct keyed {
	struct mr *mr;
	struct mw *mw;
	uint8_t generation;
} *table;
static uint32_t table_size, next_index;

static uint32_t new_index(void)
{
	for (;;) {
		for (uint32_t i = 0; i < table_size; i++) {
			uint32_t at = (next_index + i) % table_size;
			if (at && !table[at].mr && !table[at].mw) {
				next_index = at + 1;
				return at;
			}
		}
		next_index = table_size;
		table_size = table_size ? 2 * table_size : 1024;
		table = realloc(table, table_size * sizeof *table);
		memset(table + next_index, 0, (table_size - next_index) * sizeof *table);
	}
}

uint32_t key_for(struct mr *mr, struct mw *mw)
{
	uint32_t i = new_index();

	table[i].mr = mr;
	table[i].mw = mw;
	return i << KEY_BITS | ++table[i].generation;
}

void key_free(uint32_t key)
{
	struct keyed *k = &table[key >> KEY_BITS];

	k->mr = NULL;
	k->mw = NULL;
	next_index = key >> KEY_BITS; // used again at once, so that stale keys are detected
}

static struct keyed *lookup(uint32_t key)
{
	uint32_t i = key >> KEY_BITS;

	return i < table_size ? &table[i] : NULL;
}

// find_mw returns the window with an index, whatever the low byte of its key is now.
struct mw *find_mw(uint32_t key)
{
	struct keyed *k = lookup(key);

	return k ? k->mw : NULL;
}

static int relaxed(const struct mr *m) { return !!(m->access & IBV_ACCESS_RELAXED_ORDERING); }

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t n, int access)
{
	uint64_t cost = config.cost[COST_REG] + n * config.cost[COST_REG_BYTE_PS] / 1000, start = now_ns(), took;
	struct mr *m;

	// ibv_reg_mr(3): remote writing and atomics need local writing.
	if (!n || n > config.max_mr_size || (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) && !(access & IBV_ACCESS_LOCAL_WRITE))) {
		errno = EINVAL;
		return NULL;
	}
	if (!admit(N_MR))
		return NULL;
	errno = pin(addr, n, access);
	if (errno) {
		count(N_MR, -1);
		return NULL;
	}
	took = now_ns() - start; // pinning is a part of the cost
	compute(took < cost ? cost - took : 0);
	m = calloc(1, sizeof *m);
	m->access = access;
	count(N_RELAXED, relaxed(m));
	m->mr = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = addr, .length = n};
	pthread_mutex_lock(&hw.mu);
	m->mr.lkey = key_for(m, NULL);
	m->mr.rkey = key_for(m, NULL); // many devices have the same key for both; programs must not rely on that (10.6.3.3)
	((struct pd *)pd)->users++;
	pthread_mutex_unlock(&hw.mu);
	return &m->mr;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t n, uint64_t iova, unsigned access)
{
	if (iova != (uintptr_t)addr) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	return ibv_reg_mr(pd, addr, n, access);
}

struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t n, uint64_t iova, int access)
{
	return ibv_reg_mr_iova2(pd, addr, n, iova, access);
}

// When it returns, the device no longer accesses the memory: operations that were accepted are
// completed first.
int ibv_dereg_mr(struct ibv_mr *mr)
{
	struct mr *m = (struct mr *)mr;

	pthread_mutex_lock(&hw.mu);
	if (m->windows) { // C10-76: a region with windows cannot be deregistered
		pthread_mutex_unlock(&hw.mu);
		return EINVAL;
	}
	land_grant(m, NULL);
	key_free(mr->lkey);
	key_free(mr->rkey);
	((struct pd *)mr->pd)->users--;
	pthread_mutex_unlock(&hw.mu);
	unpin(mr->addr, mr->length);
	count(N_MR, -1);
	count(N_RELAXED, -relaxed(m));
	compute(config.cost[COST_DEREG]);
	memset(m, 0x5a, sizeof *m);
	free(m);
	return 0;
}

static bool inside(uint64_t addr, uint64_t n, uint64_t from, uint64_t length)
{
	return addr >= from && n <= length && addr - from <= length - n;
}

// local_access checks an entry of a scatter/gather list (10.6.3.1). An entry without bytes
// needs no key.
bool local_access(struct ibv_pd *pd, uint32_t lkey, uint64_t addr, uint64_t n, int access, struct grant *g)
{
	struct keyed *k = lookup(lkey);
	struct mr *m = k ? k->mr : NULL;

	*g = (struct grant){m, NULL};
	if (!n)
		return true;
	return m && m->mr.lkey == lkey && m->mr.pd == pd && !(access & ~m->access) &&
		inside(addr, n, (uintptr_t)m->mr.addr, m->mr.length);
}

// remote_access checks a peer's access to this process's memory (10.6.3.3, 9.4.1): the queue
// pair's rights, the key with its generation, the domain or queue pair, rights and bounds.
bool remote_access(struct qp *q, uint32_t rkey, uint64_t addr, uint64_t n, int access, struct grant *g)
{
	struct keyed *k = lookup(rkey);

	*g = (struct grant){0};
	if (access & ~q->attr.qp_access_flags)
		return false;
	if (!n)
		return true; // C9-88: without bytes the key is not checked
	if (k && k->mw) { // type 2B: it belongs to the queue pair on which it is bound
		struct mw *w = k->mw;
		struct mr *m = w->mr ? w->mr : w->late_mr;
		struct qp *of = w->mr ? w->qp : w->late_qp;
		*g = (struct grant){m, w};
		return m && w->key == rkey && (of == q || config.mw_any_qp) && !(access & ~w->access) &&
			(inside(addr, n, w->addr, w->length) || (config.mw_past_end && inside(addr, n, (uintptr_t)m->mr.addr, m->mr.length)));
	}
	if (!k || !k->mr)
		return false;
	g->mr = k->mr;
	return k->mr->mr.rkey == rkey && k->mr->mr.pd == q->qp.pd && !(access & ~k->mr->access) &&
		inside(addr, n, (uintptr_t)k->mr->mr.addr, k->mr->mr.length);
}

// next_window_of finds the windows that are bound on a queue pair.
struct mw *next_window_of(struct qp *q, uint32_t *at)
{
	for (; *at < table_size; ++*at)
		if (table[*at].mw && table[*at].mw->qp == q)
			return table[*at].mw;
	return NULL;
}
