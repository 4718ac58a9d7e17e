// Posting work requests, and moving bytes between messages and scatter/gather lists
// (IBTA specification volume 1, sections 10.7 and 11.4.1; ibv_post_send(3)).
#include "hwsim.h"

uint64_t sge_length(const struct ibv_sge *s, int n)
{
	uint64_t sum = 0;

	while (n--)
		sum += s[n].length;
	return sum;
}

// ---- checks that the library makes when a request is posted ----

static int check_send(struct qp *q, const struct ibv_send_wr *wr)
{
	const struct profile *p = config.profile;
	uint64_t length = sge_length(wr->sg_list, wr->num_sge);

	if (q->qp.state != IBV_QPS_RTS && q->qp.state != IBV_QPS_ERR)
		return EINVAL; // 10.3.1: posting is an immediate error before RTS
	if (q->posted - atomic_load(&q->freed) == q->sq_size)
		return p->full_errno;
	if (wr->num_sge > (int)q->cap.max_send_sge || length > config.max_msg_sz)
		return EINVAL; // 9.4: a port has a maximum message size
	switch (wr->opcode) {
	case IBV_WR_RDMA_READ:
		if (wr->num_sge > p->max_sge_rd || wr->send_flags & IBV_SEND_INLINE)
			return EINVAL;
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		if (p->no_imm_write)
			return EINVAL;
		break;
	case IBV_WR_SEND: case IBV_WR_SEND_WITH_IMM: case IBV_WR_SEND_WITH_INV: case IBV_WR_RDMA_WRITE:
		break;
	case IBV_WR_BIND_MW:
		if (!wr->bind_mw.mw || !wr->bind_mw.bind_info.mr)
			return EINVAL;
		return 0;
	case IBV_WR_LOCAL_INV:
		return 0;
	default:
		return EINVAL;
	}
	if (wr->send_flags & IBV_SEND_INLINE && length > q->cap.max_inline_data && !p->ignores_inline)
		return p->full_errno; // as the libraries of mlx5 and others do
	return 0;
}

static void copy_inline(struct send_wqe *w)
{
	uint8_t *to = w->inlined = malloc(w->length + 1);

	for (int i = 0; i < w->wr.num_sge; i++) { // only addresses: keys are not checked here (10.7.2.2)
		memcpy(to, (void *)(uintptr_t)w->sge[i].addr, w->sge[i].length);
		to += w->sge[i].length;
	}
	count(N_INLINE, 1);
}

static void enter_send(struct qp *q, const struct ibv_send_wr *wr)
{
	struct send_wqe *w = &q->sq[q->posted % q->sq_size];
	struct ibv_sge *sge = w->sge;
	bool moves = wr->opcode != IBV_WR_BIND_MW && wr->opcode != IBV_WR_LOCAL_INV;

	*w = (struct send_wqe){.wr = *wr, .sge = sge};
	if (moves) {
		memcpy(sge, wr->sg_list, wr->num_sge * sizeof *sge);
		w->length = sge_length(sge, wr->num_sge);
		if (wr->send_flags & IBV_SEND_INLINE && !config.profile->ignores_inline)
			copy_inline(w);
	}
	if (q->sent == q->posted && q->send_at == 0)
		q->send_at = late(config.jitter_ns); // the doorbell takes its time
	q->posted++;
}

int work_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct qp *q = (struct qp *)qp;
	int failed = 0;

	pthread_mutex_lock(&hw.mu);
	for (; wr; wr = wr->next) {
		failed = check_send(q, wr);
		if (failed) {
			*bad = wr;
			break;
		}
		enter_send(q, wr);
	}
	qp_busy(q);
	if (config.timed)
		timed_post(q);
	pthread_mutex_unlock(&hw.mu);
	if (!config.timed)
		wake_engine();
	return config.profile->negative_errno ? -failed : failed;
}

int work_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct qp *q = (struct qp *)qp;
	int failed = 0;

	pthread_mutex_lock(&hw.mu);
	for (; wr && !failed; wr = failed ? wr : wr->next) {
		struct recv_wqe *w;

		*bad = wr;
		if (qp->srq || qp->state == IBV_QPS_RESET || wr->num_sge > (int)q->cap.max_recv_sge) {
			failed = EINVAL;
		} else if (q->rq_posted - atomic_load(&q->rq_freed) == q->rq_size) {
			failed = config.profile->full_errno;
		} else {
			w = &q->rq[q->rq_posted++ % q->rq_size];
			w->wr = *wr;
			memcpy(w->sge, wr->sg_list, wr->num_sge * sizeof *w->sge);
		}
	}
	if (qp->state == IBV_QPS_ERR) // to be flushed
		qp_busy(q);
	pthread_mutex_unlock(&hw.mu);
	if (qp->state == IBV_QPS_ERR)
		wake_engine();
	return failed;
}

// ---- memory of work requests ----

// gather reads n bytes of a message from the memory that its work request names: when the
// device sends them, and again when they are repeated. It returns false if a key does not
// permit it. to is NULL if the bytes are not moved.
bool gather(struct qp *q, const struct send_wqe *w, uint32_t offset, uint32_t n, uint8_t *to)
{
	struct grant g;

	if (w->inlined) {
		memcpy(to, w->inlined + offset, n);
		return true;
	}
	for (int i = 0; i < w->wr.num_sge; i++) {
		const struct ibv_sge *s = &w->sge[i];
		uint32_t part;

		if (!local_access(q->qp.pd, s->lkey, s->addr, s->length, 0, &g))
			return false;
		if (offset >= s->length) {
			offset -= s->length;
			continue;
		}
		part = s->length - offset < n ? s->length - offset : n;
		if (to) {
			memcpy(to, (void *)(uintptr_t)(s->addr + offset), part);
			to += part;
		}
		n -= part;
		offset = 0;
	}
	return true;
}

// scatter writes n bytes of a message to memory, or from NULL if they are not moved.
bool scatter(struct qp *q, struct landings *l, const struct ibv_sge *sge, int nsge, int access, uint32_t offset, const uint8_t *from, uint32_t n)
{
	struct grant g;

	for (int i = 0; i < nsge && n; i++) {
		const struct ibv_sge *s = &sge[i];
		uint32_t part;

		if (offset >= s->length) {
			offset -= s->length;
			continue;
		}
		part = s->length - offset < n ? s->length - offset : n;
		if (!local_access(q->qp.pd, s->lkey, s->addr + offset, part, access, &g))
			return false;
		if (from) {
			land(l, &g, (void *)(uintptr_t)(s->addr + offset), from, part);
			from += part;
		}
		n -= part;
		offset = 0;
	}
	return true;
}
