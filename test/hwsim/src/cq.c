// Completion queues and completion channels (IBTA specification volume 1, sections 11.2.6
// and 11.4.2; ibv_req_notify_cq(3), ibv_get_cq_event(3)).
#include "hwsim.h"

struct channel {
	struct ibv_comp_channel ch;
	struct events events;
};

struct notice {
	struct event e;
	struct cq *cq;
	struct notice *next;
	uint64_t due;
};

// Interrupts that are due later, in their order; guarded by hw.mu.
static struct notice *interrupts, **last_interrupt = &interrupts;

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *v)
{
	struct channel *c;

	if (!admit(N_CHANNEL))
		return NULL;
	c = calloc(1, sizeof *c);
	events_open(&c->events);
	c->ch.context = v;
	c->ch.fd = c->events.fd;
	return &c->ch;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *ch)
{
	struct channel *c = (struct channel *)ch;

	if (ch->refcnt)
		return EBUSY;
	events_close(&c->events);
	count(N_CHANNEL, -1);
	free(c);
	return 0;
}

static uint32_t round_up(uint32_t n)
{
	uint32_t p = 1;

	while (p < n)
		p *= 2;
	return p;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *v, int n, void *owner, struct ibv_comp_channel *ch, int vector)
{
	struct cq *c;

	if (n < 1 || n > config.profile->max_cqe || vector < 0 || vector >= v->num_comp_vectors) {
		errno = EINVAL;
		return NULL;
	}
	if (!admit(N_CQ))
		return NULL;
	c = calloc(1, sizeof *c);
	c->size = config.profile->round_up && config.calm ? round_up(n) : n; // with exactly n entries, overruns are found
	c->ring = calloc(c->size, sizeof *c->ring);
	pthread_mutex_init(&c->mu, NULL);
	c->cq.context = v;
	c->cq.channel = ch;
	c->cq.cq_context = owner;
	c->cq.cqe = c->size;
	pthread_mutex_lock(&hw.mu);
	if (ch)
		ch->refcnt++;
	pthread_mutex_unlock(&hw.mu);
	return &c->cq;
}

static void forget_interrupts(struct cq *);

static bool is_of(struct event *e, void *cq) { return ((struct notice *)e)->cq == cq; }
static void drop(struct event *e) { free(e); }

static void disarm(struct cq *c)
{
	if (c->armed != UNARMED)
		atomic_fetch_sub(&hw.armed, 1);
	c->armed = UNARMED;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
	struct cq *c = (struct cq *)cq;

	pthread_mutex_lock(&hw.mu);
	if (c->users) {
		pthread_mutex_unlock(&hw.mu);
		return EBUSY;
	}
	if (cq->channel) {
		events_drop(&((struct channel *)cq->channel)->events, is_of, drop, c);
		while (cq->comp_events_completed < c->reported) // ibv_destroy_cq(3)
			pthread_cond_wait(&hw.acked, &hw.mu);
		cq->channel->refcnt--;
	}
	disarm(c);
	forget_interrupts(c);
	forget_async(context_of(cq->context), cq);
	while (c->async_events)
		pthread_cond_wait(&hw.acked, &hw.mu);
	pthread_mutex_unlock(&hw.mu);
	count(N_CQ, -1);
	free(c->ring);
	memset(c, 0x5a, sizeof *c);
	free(c);
	return 0;
}

static void taken(struct event *e) { ((struct notice *)e)->cq->reported++; }

int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **owner)
{
	struct notice *n = (struct notice *)events_wait(&((struct channel *)ch)->events, ch->fd, taken);

	if (!n)
		return -1;
	*cq = &n->cq->cq;
	*owner = n->cq->cq.cq_context;
	free(n);
	return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n)
{
	pthread_mutex_lock(&hw.mu);
	cq->comp_events_completed += n;
	pthread_cond_broadcast(&hw.acked);
	pthread_mutex_unlock(&hw.mu);
}

// An armed queue reports the next completion that is added, not one that is already there
// (11.4.2.2). Therefore a program polls once more after arming.
int cq_notify(struct ibv_cq *cq, int solicited)
{
	struct cq *c = (struct cq *)cq;

	if (!cq->channel)
		complain("a completion queue without a channel is armed");
	pthread_mutex_lock(&c->mu);
	if (c->armed == UNARMED)
		atomic_fetch_add(&hw.armed, 1);
	if (!solicited)
		c->armed = ARMED;
	else if (c->armed == UNARMED)
		c->armed = ARMED_SOLICITED;
	pthread_mutex_unlock(&c->mu);
	if (config.timed)
		atomic_store(&hw.armed_at, now_ns());
	wake_engine(); // in timed mode nobody else may look
	return 0;
}

// announce wakes the program, after the time that an interrupt takes. Until then the engine
// goes on working, as for a queue that is armed.
static void announce(struct cq *c)
{
	struct notice *n;

	c->armed = UNARMED;
	n = calloc(1, sizeof *n);
	n->cq = c;
	n->due = config.cost[COST_WAKE] ? hw.now + config.cost[COST_WAKE] : 0;
	*last_interrupt = n;
	last_interrupt = &n->next;
	if (!n->due)
		cq_run(0);
	else
		wake_engine();
}

uint64_t cq_run(uint64_t now)
{
	struct notice *n;

	while ((n = interrupts) && n->due <= now) {
		interrupts = n->next;
		if (!interrupts)
			last_interrupt = &interrupts;
		atomic_fetch_sub(&hw.armed, 1);
		if (n->cq->cq.channel)
			events_put(&((struct channel *)n->cq->cq.channel)->events, &n->e);
		else
			free(n);
	}
	return n ? n->due : NEVER;
}

// forget_interrupts is called when a queue is destroyed.
static void forget_interrupts(struct cq *c)
{
	struct notice **at = &interrupts, *n;

	while ((n = *at)) {
		if (n->cq != c) {
			at = &n->next;
			continue;
		}
		*at = n->next;
		atomic_fetch_sub(&hw.armed, 1);
		free(n);
	}
	last_interrupt = at;
}

// overrun ends all queue pairs of the queue, because completions are lost (11.6.3.2; C10-...
// of 10.8.3: the queue goes to error).
static void overrun(struct cq *c)
{
	c->overrun = true;
	async_cq(&c->cq, IBV_EVENT_CQ_ERR);
	complain("a completion queue of %u is overrun", c->size);
	for (struct qp *q = all_qps; q; q = q->next)
		if (q->qp.send_cq == &c->cq || q->qp.recv_cq == &c->cq) {
			async_qp(&q->qp, IBV_EVENT_QP_FATAL);
			qp_error(q);
		}
}

void cq_put(struct cq *c, const struct completion *x)
{
	bool full, wanted = false;

	pthread_mutex_lock(&c->mu);
	full = c->head - c->tail == c->size;
	if (!full && !c->overrun) {
		c->ring[c->head % c->size] = *x;
		atomic_store_explicit((_Atomic uint32_t *)&c->head, c->head + 1, memory_order_release);
		wanted = c->armed == ARMED || (c->armed == ARMED_SOLICITED && (x->solicited || x->wc.status));
		if (wanted)
			announce(c);
	}
	pthread_mutex_unlock(&c->mu);
	if (full && !c->overrun)
		overrun(c);
}

// The slot of a send or receive queue is free when its completion has been polled. The slot of
// an unsignaled request is free with the next signaled one (10.8.3.1).
static void free_slot(struct completion *x)
{
	if (x->srq)
		atomic_fetch_add(&x->srq->freed, 1);
	else if (x->of_send)
		atomic_store(&x->qp->freed, x->frees);
	else
		atomic_fetch_add(&x->qp->rq_freed, 1);
}

int cq_poll(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	struct cq *c = (struct cq *)cq;
	int got = 0;

	if (!pthread_mutex_trylock(&hw.mu)) { // a program that polls may keep the engine from a processor
		step();
		hw.polled = hw.now;
		pthread_mutex_unlock(&hw.mu);
	}
	if (atomic_load_explicit((_Atomic uint32_t *)&c->head, memory_order_acquire) ==
	    atomic_load_explicit((_Atomic uint32_t *)&c->tail, memory_order_relaxed))
		return 0;
	pthread_mutex_lock(&c->mu);
	for (; got < n && c->tail != c->head; got++) {
		struct completion *x = &c->ring[c->tail % c->size];

		wc[got] = x->wc;
		free_slot(x);
		atomic_store_explicit((_Atomic uint32_t *)&c->tail, c->tail + 1, memory_order_relaxed);
	}
	pthread_mutex_unlock(&c->mu);
	return got;
}

// cq_forget removes the completions of a queue pair that is destroyed, as mlx5's library does
// (providers/mlx5/cq.c, __mlx5_cq_clean). Programs must not rely on getting them.
void cq_forget(struct cq *c, struct qp *q)
{
	uint32_t to;

	pthread_mutex_lock(&c->mu);
	to = c->tail;
	for (uint32_t i = c->tail; i != c->head; i++) {
		struct completion *x = &c->ring[i % c->size];

		if (x->qp == q && x->srq)
			atomic_fetch_add(&x->srq->freed, 1);
		else if (x->qp != q)
			c->ring[to++ % c->size] = *x;
	}
	c->head = to;
	pthread_mutex_unlock(&c->mu);
}

int ibv_resize_cq(struct ibv_cq *cq, int n) { return EOPNOTSUPP; }
