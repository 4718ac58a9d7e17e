// Shared receive queues (IBTA specification volume 1, section 10.2.9; ibv_create_srq(3),
// ibv_modify_srq(3)).
#include "hwsim.h"

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *a)
{
	struct srq *s;

	if (!config.profile->max_srq) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	if (!a->attr.max_wr || a->attr.max_wr > (uint32_t)config.profile->max_srq_wr || a->attr.max_sge > (uint32_t)config.profile->max_sge) {
		errno = EINVAL;
		return NULL;
	}
	if (!admit(N_SRQ))
		return NULL;
	s = calloc(1, sizeof *s);
	s->srq.context = pd->context;
	s->srq.srq_context = a->srq_context;
	s->srq.pd = pd;
	s->size = a->attr.max_wr;
	s->max_sge = a->attr.max_sge ? a->attr.max_sge : 1;
	s->rq = calloc(s->size, sizeof *s->rq);
	for (uint32_t i = 0; i < s->size; i++)
		s->rq[i].sge = calloc(s->max_sge, sizeof(struct ibv_sge));
	pthread_mutex_lock(&hw.mu);
	((struct pd *)pd)->users++;
	pthread_mutex_unlock(&hw.mu);
	return &s->srq;
}

int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *a, int mask)
{
	if (mask & IBV_SRQ_MAX_WR)
		return EOPNOTSUPP;
	pthread_mutex_lock(&hw.mu);
	if (mask & IBV_SRQ_LIMIT)
		((struct srq *)srq)->limit = a->srq_limit;
	pthread_mutex_unlock(&hw.mu);
	return 0;
}

int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *a)
{
	struct srq *s = (struct srq *)srq;

	*a = (struct ibv_srq_attr){s->size, s->max_sge, s->limit};
	return 0;
}

int ibv_destroy_srq(struct ibv_srq *srq)
{
	struct srq *s = (struct srq *)srq;

	pthread_mutex_lock(&hw.mu);
	if (s->users) {
		pthread_mutex_unlock(&hw.mu);
		return EBUSY;
	}
	forget_async(context_of(srq->context), srq);
	while (s->async_events)
		pthread_cond_wait(&hw.acked, &hw.mu);
	((struct pd *)srq->pd)->users--;
	pthread_mutex_unlock(&hw.mu);
	count(N_SRQ, -1);
	for (uint32_t i = 0; i < s->size; i++)
		free(s->rq[i].sge);
	free(s->rq);
	memset(s, 0x5a, sizeof *s);
	free(s);
	return 0;
}

int srq_post_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct srq *s = (struct srq *)srq;
	int failed = 0;

	pthread_mutex_lock(&hw.mu);
	for (; wr && !failed; wr = failed ? wr : wr->next) {
		struct recv_wqe *w = &s->rq[s->posted % s->size];

		*bad = wr;
		if (wr->num_sge > (int)s->max_sge) {
			failed = EINVAL;
		} else if (s->posted - atomic_load(&s->freed) == s->size) {
			failed = config.profile->full_errno;
		} else {
			w->wr = *wr;
			memcpy(w->sge, wr->sg_list, wr->num_sge * sizeof *w->sge);
			s->posted++;
		}
	}
	pthread_mutex_unlock(&hw.mu);
	return failed;
}

// srq_take takes the oldest receive, and reports once that only few are left (10.2.9.2).
bool srq_take(struct srq *s, struct recv_wqe *w)
{
	struct recv_wqe *from = &s->rq[s->taken % s->size];

	if (s->taken == s->posted)
		return false;
	w->wr = from->wr;
	memcpy(w->sge, from->sge, from->wr.num_sge * sizeof *w->sge);
	s->taken++;
	if (s->limit && s->posted - s->taken < s->limit) {
		s->limit = 0;
		async_srq(&s->srq, IBV_EVENT_SRQ_LIMIT_REACHED);
	}
	return true;
}
