// Memory windows of type 2B: they belong to the queue pair on which they are bound (IBTA
// specification volume 1, sections 10.6.7.2, 10.6.7.2.7 and 11.2.8.10; ibv_bind_mw(3)).
#include "hwsim.h"

struct ibv_mw *mw_alloc(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct mw *w;

	if (config.profile->no_mw_library || !config.profile->max_mw || type != IBV_MW_TYPE_2) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	if (!admit(N_MW))
		return NULL;
	w = calloc(1, sizeof *w);
	pthread_mutex_lock(&hw.mu);
	w->key = key_for(NULL, w);
	w->mw = (struct ibv_mw){.context = pd->context, .pd = pd, .rkey = w->key, .type = type};
	((struct pd *)pd)->users++;
	pthread_mutex_unlock(&hw.mu);
	return &w->mw;
}

static void unbind(struct mw *w)
{
	if (!w->mr)
		return;
	land_grant(NULL, w);
	w->mr->windows--;
	w->qp->windows--;
	w->mr = NULL;
	w->qp = NULL;
}

// invalidate unbinds a window. With stays, the peer can still use it, as on a device that does
// not enforce invalidation.
static void invalidate(struct mw *w, bool stays)
{
	struct mr *mr = w->mr;
	struct qp *qp = w->qp;

	unbind(w);
	if (stays) {
		w->late_mr = mr;
		w->late_qp = qp;
	}
}

// A window may be deallocated while it is bound (11.2.8.9).
int mw_dealloc(struct ibv_mw *mw)
{
	struct mw *w = (struct mw *)mw;

	pthread_mutex_lock(&hw.mu);
	unbind(w);
	key_free(w->key);
	((struct pd *)mw->pd)->users--;
	pthread_mutex_unlock(&hw.mu);
	count(N_MW, -1);
	memset(w, 0x5a, sizeof *w);
	free(w);
	return 0;
}

// mw_bind executes IBV_WR_BIND_MW. Each failure of o10-37.2.* is a memory management operation
// error.
enum ibv_wc_status mw_bind(struct qp *q, const struct ibv_send_wr *wr)
{
	struct mw *w = (struct mw *)wr->bind_mw.mw;
	const struct ibv_mw_bind_info *b = &wr->bind_mw.bind_info;
	struct mr *m = (struct mr *)b->mr;
	uint64_t begin = (uintptr_t)m->mr.addr;
	int writes = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

	if (find_mw(wr->bind_mw.rkey) != w || // the program cannot choose the index
	    w->mr || // it is bound: type 2 has to be invalidated first
	    w->mw.pd != q->qp.pd || m->mr.pd != q->qp.pd ||
	    !(m->access & IBV_ACCESS_MW_BIND) ||
	    (b->mw_access_flags & writes && !(m->access & IBV_ACCESS_LOCAL_WRITE)) ||
	    !b->length || b->addr < begin || b->length > m->mr.length || b->addr - begin > m->mr.length - b->length)
		return IBV_WC_MW_BIND_ERR;
	w->key = wr->bind_mw.rkey;
	w->mr = m;
	w->qp = q;
	w->late_mr = NULL;
	w->addr = b->addr;
	w->length = b->length;
	w->access = b->mw_access_flags;
	m->windows++;
	q->windows++;
	count(N_BINDS, 1);
	return IBV_WC_SUCCESS;
}

// valid returns the window that a key may invalidate on a queue pair.
static struct mw *valid(struct qp *q, uint32_t key)
{
	struct mw *w = find_mw(key);

	return w && w->mr && w->key == key && w->qp == q ? w : NULL;
}

// mw_invalidate_local executes IBV_WR_LOCAL_INV. Operations that the peer has begun are
// completed before it completes.
enum ibv_wc_status mw_invalidate_local(struct qp *q, uint32_t key)
{
	struct mw *w = valid(q, key);

	if (!w) {
		complain("queue pair %#x invalidates key %#x, which no window of it has", q->qp.qp_num, key);
		return IBV_WC_LOC_QP_OP_ERR; // rxe's kernel would panic
	}
	invalidate(w, config.mw_late);
	count(N_INVALIDATES, 1);
	return IBV_WC_SUCCESS;
}

// mw_invalidate_remote executes the invalidation of a send with invalidate.
bool mw_invalidate_remote(struct qp *q, uint32_t key)
{
	struct mw *w = valid(q, key);

	if (w)
		invalidate(w, config.mw_returned);
	return w != NULL;
}

// mw_unbind_all unbinds the windows of a queue pair that is destroyed. rxe's kernel then waits
// for a minute, so it counts as a fault of the program.
void mw_unbind_all(struct qp *q)
{
	uint32_t at = 0;
	struct mw *w;

	if (q->windows)
		complain("queue pair %#x is destroyed under %d windows", q->qp.qp_num, q->windows);
	while (q->windows && (w = next_window_of(q, &at)))
		unbind(w);
}
