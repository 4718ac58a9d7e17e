// How bytes reach memory. A device writes a message in pieces, in any order and over some
// time. It is only certain that all of it is there when the completion that covers it appears
// (IBTA specification volume 1, sections 9.5 and 10.8.2; PCIe relaxed ordering). An RDMA write
// is covered only by a later completion of the same queue pair. Memory with relaxed ordering
// that is accessed by its region's own key has none of the bytes before that; a window has no
// flag for it.
#include "hwsim.h"

enum { PIECES = 3 }; // at most, for a packet

static void append(struct landings *l, struct landing *x)
{
	x->next = NULL;
	*l->last = x;
	l->last = &x->next;
}

void land(struct landings *l, const struct grant *g, uint8_t *to, const uint8_t *from, uint32_t n)
{
	if (config.calm) {
		memcpy(to, from, n);
		return;
	}
	bool relaxed = g->mr && !g->mw && g->mr->access & IBV_ACCESS_RELAXED_ORDERING;

	for (int i = 1; n; i++) {
		uint32_t part = i == PIECES ? n : 1 + chance(n);
		struct landing *x = malloc(sizeof *x + part);

		*x = (struct landing){.due = relaxed ? NEVER : late(config.jitter_ns), .grant = *g, .to = to, .bytes = part};
		memcpy(x->data, from, part);
		append(l, x);
		to += part;
		from += part;
		n -= part;
	}
}

void land_completion(struct qp *q, struct landings *l, struct cq *cq, const struct completion *c, uint64_t due)
{
	struct landing *x;

	if (config.calm && !l->first && !due) {
		cq_put(cq, c);
		return;
	}
	x = malloc(sizeof *x);
	*x = (struct landing){.is_completion = true, .due = due ? due : late(config.jitter_ns), .cq = cq, .c = *c};
	append(l, x);
	qp_busy(q);
}

static void place(struct landing *x)
{
	if (x->is_completion || x->placed)
		return;
	memcpy(x->to, x->data, x->bytes);
	x->placed = true;
}

// place_relaxed writes the pieces of relaxed ordering that are covered by a completion whose
// time has come.
static void place_relaxed(struct landings *l, struct landing *end)
{
	for (struct landing *x = l->first; x != end; x = x->next)
		if (x->due == NEVER)
			place(x);
}

// land_due writes the pieces whose time has come, and reports completions in their order, each
// after all that it covers.
uint64_t land_due(struct qp *q, struct landings *l, uint64_t now)
{
	uint64_t next = NEVER;
	struct landing *x;

	for (x = l->first; x; x = x->next) {
		if (x->placed)
			continue;
		if (!x->is_completion && x->due <= now) {
			if (q->qp.state == IBV_QPS_ERR)
				count(N_LATE_PIECES, 1);
			place(x);
		} else if (x->due <= now) {
			place_relaxed(l, x);
		} else if (x->due < next) {
			next = x->due;
		}
	}
	while ((x = l->first) && (x->placed || (x->is_completion && x->due <= now))) {
		l->first = x->next;
		if (!l->first)
			l->last = &l->first;
		if (x->is_completion)
			cq_put(x->cq, &x->c);
		free(x);
	}
	return l->first ? next : NEVER;
}

void land_all(struct landings *l)
{
	for (struct landing *x = l->first; x; x = x->next)
		place(x);
}

// land_drop is called when a queue pair is destroyed: receives of a shared queue return to it.
void land_drop(struct landings *l)
{
	struct landing *x;

	while ((x = l->first)) {
		l->first = x->next;
		if (x->is_completion && x->c.srq)
			atomic_fetch_add(&x->c.srq->freed, 1);
		free(x);
	}
	l->last = &l->first;
}

// land_grant writes all pieces that a region or a window has admitted, before it is removed.
void land_grant(struct mr *m, struct mw *w)
{
	for (struct qp *q = all_qps; q; q = q->next) { // one with only relaxed pieces is not busy
		struct landings *both[] = {&q->in, &q->out};

		for (int i = 0; i < 2; i++)
			for (struct landing *x = both[i]->first; x; x = x->next)
				if ((m && x->grant.mr == m) || (w && x->grant.mw == w))
					place(x);
	}
}
