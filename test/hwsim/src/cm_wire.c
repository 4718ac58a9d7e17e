// The connection manager's messages, their repetition and their loss (IBTA specification
// volume 1, sections 12.6, 12.8 and 12.9; drivers/infiniband/core/cm.c).
#include "cm.h"

static struct cm_id *timers;

static uint64_t min(uint64_t a, uint64_t b) { return a < b ? a : b; }

void set_timer(struct cm_id *i, uint64_t after)
{
	i->timer_at = now_ns() + after;
	if (i->on_timers)
		return;
	i->on_timers = true;
	i->next_timer = timers;
	timers = i;
}

void clear_timer(struct cm_id *i)
{
	i->timer_at = 0;
	for (struct cm_id **at = &timers; i->on_timers; at = &(*at)->next_timer)
		if (*at == i) {
			*at = i->next_timer;
			i->on_timers = false;
		}
}

// ---- sending ----

static void put(int slot, const struct cm_message *m)
{
	struct packet *p;
	unsigned loss = m->type == DREQ || m->type == DREP ? config.dreq_loss : config.cm_loss;

	if (!alive(slot) || chance(100) < loss)
		return;
	p = put_begin(slot, sizeof *m, P_CM);
	if (!p)
		return; // lost
	memcpy(p + 1, m, sizeof *m);
	put_end(slot, p);
}

struct listener *find_listener(const struct addr *a, int *slot)
{
	static const uint8_t any[16];

	for (*slot = 0; *slot < PROCS; ++*slot) {
		if (!alive_now(*slot))
			continue;
		for (int i = 0; i < LISTENERS; i++) {
			struct listener *l = &shared->procs[*slot].listeners[i];
			bool wild = !memcmp(l->ip, any, 16);

			if (atomic_load(&l->handle) && l->port == a->port &&
			    (wild ? l->family == a->family || l->family == AF_INET6 : l->family == a->family && !memcmp(l->ip, a->ip, 16)))
				return l;
		}
	}
	return NULL;
}

// send_request looks for the listener each time. A host of this fabric without one rejects;
// any other host does not answer.
static void send_request(struct cm_id *i)
{
	int slot;
	struct listener *l = find_listener(&i->dst, &slot);
	struct cm_message rej = {.type = REJ, .to = i->handle, .reason = REJ_NO_LISTENER};

	if (l) {
		i->sent.to = atomic_load(&l->handle);
		i->peer = slot;
		i->peer_attached = shared->counts[slot][N_ATTACHED];
		put(slot, &i->sent);
	} else if (is_local(&i->dst)) {
		put(self, &rej);
	}
}

// transmit sends a message and, if repeat is set, sends it again until it is answered.
void transmit(struct cm_id *i, struct cm_message *m, bool repeat)
{
	if (repeat) {
		i->sent = *m;
		i->tries = 0;
		set_timer(i, config.cm_timeout_ns);
	} else if (m->type != RTU) {
		clear_timer(i);
	}
	if (m->type == REQ)
		send_request(i);
	else if (m->type != RTU || chance(100) >= config.lost_rtu)
		put(i->peer, m);
}

void answer(int slot, uint32_t to, int type)
{
	struct cm_message m = {.type = type, .to = to};

	put(slot, &m);
}

void enter_timewait(struct cm_id *i)
{
	i->state = TIMEWAIT;
	set_timer(i, config.timewait_ns);
}

// end_connection sends what the kernel sends when an id is destroyed (cm_destroy_id).
void end_connection(struct cm_id *i)
{
	struct cm_message m = {.from = i->handle, .to = i->peer_handle, .type = REJ, .reason = REJ_CONSUMER};

	switch (i->state) {
	case REQ_SENT:
		m.reason = REJ_TIMEOUT;
		m.to = 0; // the passive end's handle is not known, so it finds the id by ours
		put(i->peer, &m);
		break;
	case REQ_RECEIVED: case REP_RECEIVED: case REP_SENT:
		put(i->peer, &m);
		break;
	case ESTABLISHED:
		m.type = DREQ;
		put(i->peer, &m);
		break;
	case DREQ_RECEIVED:
		m.type = DREP;
		put(i->peer, &m);
		break;
	default:
		break;
	}
	i->state = ENDED;
}

// ---- receiving ----

static struct cm_id *child_of(uint32_t from, enum cm_state last)
{
	for (struct cm_id *i = all_ids; i; i = i->next)
		if (i->peer_handle == from && i->state >= REQ_RECEIVED && i->state <= last)
			return i;
	return NULL;
}

static void take_request(const struct cm_message *m)
{
	struct cm_id *l = find_id(m->to), *i = child_of(m->from, DREQ_RECEIVED);

	// A repeated request: the reply was lost, or was late. It may come after data has already
	// established the connection (cm_dup_req_handler).
	if (i && i->peer_attached == shared->counts[i->peer][N_ATTACHED]) {
		if (i->state == REP_SENT)
			put(i->peer, &i->sent);
		return;
	}
	if (!l || l->state != LISTENING) {
		struct cm_message rej = {.type = REJ, .to = m->from, .reason = REJ_NO_LISTENER};
		put(slot_of(m->from), &rej);
		return;
	}
	if (l->pending >= l->backlog)
		return; // without an answer, as the kernel does
	i = new_id(l->id.channel, l->id.context, l->id.ps);
	i->id.verbs = cm_context();
	i->id.port_num = 1;
	i->listener = l;
	i->src = m->dst;
	i->dst = m->src;
	to_sockaddr(&i->src, &i->id.route.addr.src_storage);
	to_sockaddr(&i->dst, &i->id.route.addr.dst_storage);
	i->peer = slot_of(m->from);
	i->peer_attached = shared->counts[i->peer][N_ATTACHED];
	i->peer_handle = m->from;
	i->request = *m;
	i->peer_ece = (struct ibv_ece){.vendor_id = m->ece_vendor, .options = m->ece_options};
	i->state = REQ_RECEIVED;
	l->pending++;
	report(i, RDMA_CM_EVENT_CONNECT_REQUEST, 0, m);
}

static void take_reply(struct cm_id *i, const struct cm_message *m)
{
	struct cm_message rtu = {.type = RTU, .from = i->handle, .to = m->from};

	if (i->state == REQ_SENT) {
		i->state = REP_RECEIVED;
		i->peer_handle = m->from;
		i->peer_ece = (struct ibv_ece){.vendor_id = m->ece_vendor, .options = m->ece_options};
		clear_timer(i);
		report(i, RDMA_CM_EVENT_CONNECT_RESPONSE, 0, m);
	} else if (i->state == ESTABLISHED) { // a repeated reply: the RTU was lost
		transmit(i, &rtu, false);
	}
}

static void established(struct cm_id *i)
{
	if (i->state != REP_SENT)
		return;
	clear_timer(i);
	i->state = ESTABLISHED;
	report(i, RDMA_CM_EVENT_ESTABLISHED, 0, NULL);
}

static void rejected(struct cm_id *i, const struct cm_message *m)
{
	int status = m->reason;

	if (i->state != REQ_SENT && i->state != REP_SENT && i->state != REP_RECEIVED && i->state != REQ_RECEIVED)
		return;
	// iWARP has an errno in place of a reason (drivers/infiniband/core/iwcm.c)
	if (config.profile->transport == IBV_TRANSPORT_IWARP)
		status = m->reason == REJ_NO_LISTENER ? -ECONNREFUSED : -ECONNRESET;
	clear_timer(i);
	i->state = ENDED;
	report(i, RDMA_CM_EVENT_REJECTED, status, m);
}

static void disconnected(struct cm_id *i)
{
	report(i, RDMA_CM_EVENT_DISCONNECTED, 0, NULL);
}

static void take_dreq(struct cm_id *i, int from)
{
	switch (i->state) {
	case ESTABLISHED: case REP_SENT: case REP_RECEIVED:
		clear_timer(i);
		i->state = DREQ_RECEIVED;
		disconnected(i);
		break;
	case DREQ_SENT: // both ends disconnect at the same time
		answer(i->peer, i->peer_handle, DREP);
		disconnected(i);
		enter_timewait(i);
		break;
	case TIMEWAIT: // a repeated DREQ: the DREP was lost
		answer(i->peer, i->peer_handle, DREP);
	default:
		break;
	}
}

static void take_message(struct cm_message m)
{
	struct cm_id *i;

	if (m.type == REQ) {
		take_request(&m);
		return;
	}
	i = m.to ? find_id(m.to) : child_of(m.from, REP_SENT);
	if (!i) {
		if (m.type == DREQ) // so that the other end does not wait (cm_issue_drep)
			answer(slot_of(m.from), m.from, DREP);
		return;
	}
	switch (m.type) {
	case REP:
		take_reply(i, &m);
		break;
	case RTU:
		established(i);
		break;
	case REJ:
		rejected(i, &m);
		break;
	case DREQ:
		take_dreq(i, slot_of(m.from));
		break;
	case DREP:
		if (i->state == DREQ_SENT) {
			disconnected(i);
			enter_timewait(i);
		}
	default:
		break;
	}
}

// Messages go through the kernels of both ends, which takes longer than operations of queue
// pairs in hardware: a completion has most likely come before the disconnect that was sent
// after it.
static struct arrived {
	struct arrived *next;
	uint64_t due;
	struct cm_message m;
} *arrived, **last_arrived = &arrived;

void cm_packet(const struct packet *p, const uint8_t *payload)
{
	struct arrived *a = calloc(1, sizeof *a);

	memcpy(&a->m, payload, sizeof a->m);
	a->due = config.calm || !config.kernel_ns ? 0 : now_ns() + config.jitter_ns + chance(config.kernel_ns);
	*last_arrived = a;
	last_arrived = &a->next;
}

static uint64_t take_messages(uint64_t now)
{
	struct arrived *a;

	while ((a = arrived) && a->due <= now) {
		arrived = a->next;
		if (!arrived)
			last_arrived = &arrived;
		take_message(a->m);
		free(a);
	}
	return a ? a->due : NEVER;
}

// ---- time ----

static void expired(struct cm_id *i)
{
	clear_timer(i);
	if (i->state == TIMEWAIT) {
		i->state = ENDED;
		report(i, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0, NULL);
		return;
	}
	if (++i->tries < config.cm_retries) {
		set_timer(i, config.cm_timeout_ns);
		if (i->state == REQ_SENT)
			send_request(i);
		else
			put(i->peer, &i->sent);
		return;
	}
	if (i->state == DREQ_SENT) {
		disconnected(i);
		enter_timewait(i);
	} else { // of REQ or REP
		i->state = ENDED;
		report(i, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT, NULL);
	}
}

// When a process dies, its kernel sends what destroying its ids would have sent. If the host
// is gone, too, nobody does.
static void buried(int slot)
{
	static const struct cm_message rej = {.type = REJ, .reason = REJ_CONSUMER};

	for (struct cm_id *i = all_ids; i && !config.silent; i = i->next) {
		if (i->peer != slot || i->state < REQ_SENT || (alive(slot) && shared->counts[slot][N_ATTACHED] == i->peer_attached))
			continue;
		if (i->state == ESTABLISHED || i->state == REP_SENT)
			take_dreq(i, slot);
		else if (i->state == REQ_RECEIVED || i->state == REP_RECEIVED)
			rejected(i, &rej);
	}
}

static uint64_t look_for_dead(uint64_t now)
{
	static int64_t known[PROCS];
	static uint64_t next;
	const uint64_t pause = 10000000; // ns

	if (now < next)
		return all_ids ? next : NEVER;
	next = now + pause;
	for (int slot = 0; slot < PROCS; slot++) {
		bool lives = alive(slot);
		int64_t attached = shared->counts[slot][N_ATTACHED];

		// Also if the process was never seen alive: it may have come and gone between two
		// looks.
		if (attached && (!lives || attached != known[slot]))
			buried(slot);
		known[slot] = attached;
	}
	return all_ids ? next : NEVER;
}

uint64_t cm_run(uint64_t now)
{
	uint64_t next = min(look_for_dead(now), take_messages(now));
	struct cm_id *i, *following;

	for (i = timers; i; i = following) {
		following = i->next_timer;
		if (i->timer_at <= now)
			expired(i);
	}
	for (i = timers; i; i = i->next_timer)
		next = min(next, i->timer_at);
	return next;
}

// cm_communicated is called for the first packet of a connection. If the RTU has not come yet,
// the program may be told (IBTA 11.6.3.3, 12.9.6).
void cm_communicated(struct qp *q)
{
	if (q->id ? q->id->state == REP_SENT : q->qp.state == IBV_QPS_RTR) {
		count(N_COMM_EST, 1);
		async_qp(&q->qp, IBV_EVENT_COMM_EST);
	}
}
