// Queue pairs: their limits, their states and their end (IBTA specification volume 1, sections
// 10.2.4, 10.3.1 and 11.2.5; ibv_create_qp(3), ibv_modify_qp(3)).
#include "hwsim.h"

struct qp *all_qps;

static void *table[1 << SLOT_SHIFT]; // by the number's lower bits

struct qp *find_qp(uint32_t number)
{
	if (slot_of(number) != self)
		return NULL;
	return table[number & ((1 << SLOT_SHIFT) - 1)];
}

// A number is used again as late as possible, because its predecessor may be in timewait.
static uint32_t new_number(struct qp *q)
{
	const uint32_t mask = (1 << SLOT_SHIFT) - 1, first = 2; // 0 and 1 are reserved for management (9.2.4)
	uint32_t n;

	do
		n = atomic_fetch_add(&shared->procs[self].next_qpn, 1) & mask;
	while (n < first || table[n]);
	table[n] = q;
	return self << SLOT_SHIFT | n;
}

// ---- creating ----

static int check_cap(const struct ibv_qp_init_attr *a)
{
	const struct profile *p = config.profile;
	const struct ibv_qp_cap *c = &a->cap;

	if (a->qp_type != IBV_QPT_RC)
		return EOPNOTSUPP;
	if (p->no_rc)
		return p->no_rc;
	if (!a->send_cq || !a->recv_cq || c->max_send_wr > (uint32_t)p->max_qp_wr || c->max_send_sge > (uint32_t)p->max_sge)
		return EINVAL;
	if (!a->srq && (c->max_recv_wr > (uint32_t)p->max_qp_wr || c->max_recv_sge > (uint32_t)p->max_sge))
		return EINVAL;
	return 0;
}

// fit_inline grants inline data as the device family does.
static bool fit_inline(struct ibv_qp_cap *c)
{
	const struct profile *p = config.profile;

	if (c->max_inline_data <= p->max_inline)
		return true;
	if (p->too_much_inline == INLINE_LESS) {
		c->max_inline_data = p->max_inline;
		return true;
	}
	if (p->too_much_inline == INLINE_EINVAL)
		errno = EINVAL; // INLINE_NULL: it stays as it was
	return false;
}

static void make_queues(struct qp *q)
{
	uint32_t i;

	q->sq_size = q->cap.max_send_wr ? q->cap.max_send_wr : 1;
	q->sq = calloc(q->sq_size, sizeof *q->sq);
	for (i = 0; i < q->sq_size; i++)
		q->sq[i].sge = calloc(q->cap.max_send_sge, sizeof(struct ibv_sge));
	q->current.sge = calloc(64, sizeof(struct ibv_sge));
	if (q->qp.srq)
		return;
	q->rq_size = q->cap.max_recv_wr ? q->cap.max_recv_wr : 1;
	q->rq = calloc(q->rq_size, sizeof *q->rq);
	for (i = 0; i < q->rq_size; i++)
		q->rq[i].sge = calloc(q->cap.max_recv_sge, sizeof(struct ibv_sge));
}

// take_time takes the time of making a queue pair: one in 32 is slow.
static void take_time(void)
{
	enum cost kind = COST_QP;

	if (config.cost[COST_SLOW_QP]) {
		pthread_mutex_lock(&hw.mu);
		kind = chance(32) ? COST_QP : COST_SLOW_QP;
		pthread_mutex_unlock(&hw.mu);
	}
	idle(config.cost[kind]);
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
	int failed = check_cap(a);
	struct qp *q;

	if (failed)
		return errno = failed, NULL;
	if (!fit_inline(&a->cap) || !admit(N_QP))
		return NULL;
	take_time();
	if (!a->cap.max_send_sge)
		a->cap.max_send_sge = 1;
	if (!a->cap.max_recv_sge)
		a->cap.max_recv_sge = 1;
	if (a->srq)
		a->cap.max_recv_wr = 0;
	q = calloc(1, sizeof *q);
	q->qp = (struct ibv_qp){
		.context = pd->context, .qp_context = a->qp_context, .pd = pd, .send_cq = a->send_cq,
		.recv_cq = a->recv_cq, .srq = a->srq, .state = IBV_QPS_RESET, .qp_type = a->qp_type,
	};
	q->cap = a->cap;
	q->sig_all = a->sq_sig_all;
	q->in.last = &q->in.first;
	q->out.last = &q->out.first;
	make_queues(q);
	pthread_mutex_lock(&hw.mu);
	q->qp.qp_num = q->qp.handle = new_number(q);
	q->next = all_qps;
	all_qps = q;
	((struct pd *)pd)->users++;
	((struct cq *)a->send_cq)->users++;
	((struct cq *)a->recv_cq)->users++;
	if (a->srq)
		((struct srq *)a->srq)->users++;
	pthread_mutex_unlock(&hw.mu);
	return &q->qp;
}

// ---- states ----

// The attributes that each transition of an RC queue pair requires and permits (11.2.5.2,
// table 91).
static const struct {
	enum ibv_qp_state from, to;
	int required, allowed;
} transitions[] = {
	{IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
	{IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
	{IBV_QPS_INIT, IBV_QPS_RTR,
	 IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
	 IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
	{IBV_QPS_RTR, IBV_QPS_RTS,
	 IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
	 IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE},
	{IBV_QPS_RTS, IBV_QPS_RTS, 0,
	 IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE | IBV_QP_MIN_RNR_TIMER},
};

static int check_transition(const struct qp *q, enum ibv_qp_state to, int mask)
{
	mask &= ~IBV_QP_STATE;
	if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && q->qp.state != IBV_QPS_RESET))
		return 0;
	for (size_t i = 0; i < sizeof transitions / sizeof *transitions; i++)
		if (transitions[i].from == q->qp.state && transitions[i].to == to)
			return (transitions[i].required & ~mask) || (mask & ~(transitions[i].required | transitions[i].allowed)) ? EINVAL : 0;
	return EINVAL;
}

static int check_path(struct qp *q, const struct ibv_qp_attr *a)
{
	union ibv_gid gid;
	bool infiniband = config.profile->link_layer == IBV_LINK_LAYER_INFINIBAND;

	if (config.profile->transport == IBV_TRANSPORT_IWARP)
		return 0;
	if ((!infiniband || config.grh) && !a->ah_attr.is_global) // RoCE has no other address (annex A16.2.1)
		return EINVAL;
	if (infiniband && !a->ah_attr.dlid)
		return EINVAL;
	if (a->ah_attr.is_global && ibv_query_gid(q->qp.context, 1, a->ah_attr.grh.sgid_index, &gid))
		return EINVAL;
	return a->ah_attr.port_num == 1 ? 0 : EINVAL;
}

// reaches reports whether a path's address is one of this fabric. All its devices have the
// port's address, or the host's.
static bool reaches(struct ibv_context *v, const struct ibv_ah_attr *to)
{
	union ibv_gid gid;

	if (config.profile->link_layer == IBV_LINK_LAYER_INFINIBAND && to->dlid != PORT_LID)
		return false;
	for (int i = 0; to->is_global; i++) {
		if (ibv_query_gid(v, 1, i, &gid))
			return false;
		if (!memcmp(&gid, &to->grh.dgid, sizeof gid))
			break;
	}
	return true;
}

// reset forgets everything that was posted, without completions (10.3.1.1).
static void reset(struct qp *q)
{
	land_drop(&q->in);
	land_drop(&q->out);
	cq_forget((struct cq *)q->qp.send_cq, q);
	cq_forget((struct cq *)q->qp.recv_cq, q);
	for (; q->completed != q->posted; q->completed++) {
		struct send_wqe *w = &q->sq[q->completed % q->sq_size];
		free(w->inlined);
		w->inlined = NULL;
	}
	q->sent = q->posted;
	q->freed = q->posted;
	if (q->has_current && q->qp.srq)
		atomic_fetch_add(&((struct srq *)q->qp.srq)->freed, 1);
	q->rq_taken = q->rq_freed = q->rq_posted;
	q->offset = q->next_msn = 0;
	q->reads = 0;
	q->expected = q->received = 0;
	q->has_current = q->gap = q->refused = q->stopped = q->communicated = false;
	q->owed_first = q->owed_end = q->reads_owed = 0;
	q->want_flush = q->want_last = false;
}

// Messages are numbered from the first packet sequence numbers of the two ends. If these
// differ, no message has the number that the other end expects.
enum { PSN = 0xffffff };

static void copy_attr(struct qp *q, const struct ibv_qp_attr *a, int mask)
{
	struct ibv_qp_attr *to = &q->attr;

	if (mask & IBV_QP_ACCESS_FLAGS)
		to->qp_access_flags = a->qp_access_flags;
	if (mask & IBV_QP_PKEY_INDEX)
		to->pkey_index = a->pkey_index;
	if (mask & IBV_QP_PORT)
		to->port_num = a->port_num;
	if (mask & IBV_QP_AV)
		to->ah_attr = a->ah_attr;
	if (mask & IBV_QP_PATH_MTU)
		to->path_mtu = a->path_mtu;
	if (mask & IBV_QP_TIMEOUT)
		to->timeout = a->timeout;
	if (mask & IBV_QP_RETRY_CNT)
		to->retry_cnt = a->retry_cnt;
	if (mask & IBV_QP_RNR_RETRY)
		to->rnr_retry = a->rnr_retry;
	if (mask & IBV_QP_RQ_PSN)
		to->rq_psn = q->expected = a->rq_psn & PSN;
	if (mask & IBV_QP_SQ_PSN)
		to->sq_psn = q->next_msn = a->sq_psn & PSN;
	if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
		to->max_rd_atomic = a->max_rd_atomic;
	if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
		to->max_dest_rd_atomic = a->max_dest_rd_atomic;
	if (mask & IBV_QP_MIN_RNR_TIMER)
		to->min_rnr_timer = a->min_rnr_timer;
	if (mask & IBV_QP_DEST_QPN)
		to->dest_qp_num = a->dest_qp_num;
}

int modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
	struct qp *q = (struct qp *)qp;
	enum ibv_qp_state to = mask & IBV_QP_STATE ? a->qp_state : qp->state;
	int failed = check_transition(q, to, mask);

	if (!failed && mask & IBV_QP_AV)
		failed = check_path(q, a);
	if (!failed && ((mask & IBV_QP_PORT && a->port_num != 1) ||
			(mask & IBV_QP_PATH_MTU && (a->path_mtu < IBV_MTU_256 || a->path_mtu > IBV_MTU_4096)) ||
			(mask & IBV_QP_TIMEOUT && a->timeout > 31) || (mask & IBV_QP_MIN_RNR_TIMER && a->min_rnr_timer > 31) ||
			(mask & IBV_QP_RETRY_CNT && a->retry_cnt > 7) || (mask & IBV_QP_RNR_RETRY && a->rnr_retry > 7) ||
			(mask & IBV_QP_MAX_QP_RD_ATOMIC && a->max_rd_atomic > config.profile->max_rd_atomic) ||
			(mask & IBV_QP_MAX_DEST_RD_ATOMIC && a->max_dest_rd_atomic > config.profile->max_rd_atomic)))
		failed = EINVAL;
	if (failed)
		return failed;
	copy_attr(q, a, mask);
	if (to == IBV_QPS_RTR && !q->owed) {
		q->owed_size = 2 * q->attr.max_dest_rd_atomic + 4; // reads, and acknowledgements between them
		q->owed = calloc(q->owed_size, sizeof *q->owed);
	}
	if (to == IBV_QPS_ERR) {
		qp_error(q);
		return 0;
	}
	if (to == IBV_QPS_RESET && qp->state != to)
		reset(q);
	if (to == IBV_QPS_RTS && qp->state == IBV_QPS_RTR) {
		q->retries = q->attr.retry_cnt;
		q->rnr_retries = q->attr.rnr_retry;
	}
	qp->state = to;
	qp_busy(q);
	return 0;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
	int failed;

	pthread_mutex_lock(&hw.mu);
	failed = modify_qp(qp, a, mask);
	if (!failed && mask & IBV_QP_AV) // the connection manager's own paths are right
		((struct qp *)qp)->astray = config.profile->transport == IBV_TRANSPORT_IB && !reaches(qp->context, &a->ah_attr);
	pthread_mutex_unlock(&hw.mu);
	wake_engine();
	return failed;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *i)
{
	struct qp *q = (struct qp *)qp;

	pthread_mutex_lock(&hw.mu);
	*a = q->attr;
	a->qp_state = a->cur_qp_state = qp->state;
	a->cap = q->cap;
	*i = (struct ibv_qp_init_attr){
		.qp_context = qp->qp_context, .send_cq = qp->send_cq, .recv_cq = qp->recv_cq,
		.srq = qp->srq, .cap = q->cap, .qp_type = qp->qp_type, .sq_sig_all = q->sig_all,
	};
	pthread_mutex_unlock(&hw.mu);
	return 0;
}

// Extensions beyond the specification, which the libraries of the two ends negotiate while
// they connect (enhanced connection establishment: ibv_query_ece(3)). Only mlx5 has any: those
// with which a queue pair was made, until others are set.
enum { OWN_EXTENSIONS = 0x10000000 };

int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *e)
{
	if (config.profile->vendor_id != 0x02c9)
		return EOPNOTSUPP;
	*e = (struct ibv_ece){.vendor_id = 0x15b3, .options = ((struct qp *)qp)->extensions ?: OWN_EXTENSIONS};
	return 0;
}

int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *e)
{
	if (!e->vendor_id || config.profile->vendor_id != 0x02c9)
		return EOPNOTSUPP;
	if (e->vendor_id != 0x15b3 || e->comp_mask || qp->state > IBV_QPS_INIT)
		return EINVAL;
	((struct qp *)qp)->extensions = e->options;
	return 0;
}

// qp_error begins the end of a queue pair. No further operation is started or accepted, but
// those in progress may still write to memory until the work requests are flushed, which takes
// a while (10.3.1.5).
void qp_error(struct qp *q)
{
	if (q->qp.state == IBV_QPS_ERR || q->qp.state == IBV_QPS_RESET)
		return;
	q->qp.state = IBV_QPS_ERR;
	q->want_flush = q->want_last = true;
	q->flush_at = late(config.flush_ns);
	q->owed_first = q->owed_end; // no further read is served
	q->reads_owed = 0;
	qp_busy(q);
}

// qp_last_wqe reports that a queue pair with a shared queue takes no further receive
// (11.6.3.5: affiliated asynchronous event "Last WQE Reached").
void qp_last_wqe(struct qp *q)
{
	if (q->qp.srq && !config.profile->no_last_wqe)
		async_qp(&q->qp, IBV_EVENT_QP_LAST_WQE_REACHED);
}

void qp_busy(struct qp *q)
{
	hw.again = q->again = true;
	if (q->is_busy)
		return;
	q->is_busy = true;
	q->next_busy = hw.busy;
	hw.busy = q;
}

// ---- the end ----

static void unlist(struct qp *q)
{
	struct qp **at;

	for (at = &all_qps; *at != q; at = &(*at)->next)
		;
	*at = q->next;
	for (at = &hw.busy; *at; at = &(*at)->next_busy)
		if (*at == q) {
			*at = q->next_busy;
			break;
		}
	table[q->qp.qp_num & ((1 << SLOT_SHIFT) - 1)] = NULL;
}

// When it returns, the device no longer accesses memory for this queue pair (11.2.5.5).
int ibv_destroy_qp(struct ibv_qp *qp)
{
	struct qp *q = (struct qp *)qp;
	uint32_t i;

	pthread_mutex_lock(&hw.mu);
	reset(q);
	mw_unbind_all(q);
	unlist(q);
	forget_async(context_of(qp->context), qp);
	while (q->async_events) // ibv_destroy_qp(3) waits until the events are acknowledged
		pthread_cond_wait(&hw.acked, &hw.mu);
	((struct pd *)qp->pd)->users--;
	((struct cq *)qp->send_cq)->users--;
	((struct cq *)qp->recv_cq)->users--;
	if (qp->srq)
		((struct srq *)qp->srq)->users--;
	pthread_mutex_unlock(&hw.mu);
	count(N_QP, -1);
	for (i = 0; i < q->sq_size; i++)
		free(q->sq[i].sge);
	for (i = 0; i < q->rq_size; i++)
		free(q->rq[i].sge);
	free(q->sq);
	free(q->rq);
	free(q->current.sge);
	free(q->owed);
	builder_free(q->builder);
	memset(q, 0x5a, sizeof *q);
	free(q);
	return 0;
}
