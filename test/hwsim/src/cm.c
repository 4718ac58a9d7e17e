// The connection manager's interface (rdma_cm(7); IBTA specification volume 1, chapter 12).
// Steps that librdmacm takes in the caller's thread are taken there here as well, for example
// bringing a queue pair to RTS when the reply's event is taken.
#include "cm.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>

struct cm_id *all_ids;

enum { FIRST_PORT = 49152, PORTS = 65536 - FIRST_PORT }; // ephemeral

static struct cm_id *of(struct rdma_cm_id *id) { return (struct cm_id *)id; }

// fail reports an error as librdmacm does.
static int fail(int error)
{
	if (!error)
		return 0;
	errno = error;
	return -1;
}

#define LOCKED(expr) ({ int rc_; pthread_mutex_lock(&hw.mu); rc_ = (expr); pthread_mutex_unlock(&hw.mu); wake_engine(); fail(rc_); })

// cm_context returns librdmacm's own context of the device, which stays open.
struct ibv_context *cm_context(void)
{
	static struct ibv_context *context;

	if (!context)
		context = open_context();
	return context;
}

// ---- addresses ----

bool from_sockaddr(const struct sockaddr *s, struct addr *a)
{
	memset(a, 0, sizeof *a);
	if (!s)
		return false;
	a->family = s->sa_family;
	if (s->sa_family == AF_INET) {
		a->port = ntohs(((struct sockaddr_in *)s)->sin_port);
		memcpy(a->ip, &((struct sockaddr_in *)s)->sin_addr, 4);
		return true;
	}
	a->port = ntohs(((struct sockaddr_in6 *)s)->sin6_port);
	memcpy(a->ip, &((struct sockaddr_in6 *)s)->sin6_addr, 16);
	return s->sa_family == AF_INET6;
}

void to_sockaddr(const struct addr *a, struct sockaddr_storage *s)
{
	memset(s, 0, sizeof *s);
	s->ss_family = a->family;
	if (a->family == AF_INET) {
		((struct sockaddr_in *)s)->sin_port = htons(a->port);
		memcpy(&((struct sockaddr_in *)s)->sin_addr, a->ip, 4);
	} else {
		((struct sockaddr_in6 *)s)->sin6_port = htons(a->port);
		memcpy(&((struct sockaddr_in6 *)s)->sin6_addr, a->ip, 16);
	}
}

static bool is_any(const struct addr *a)
{
	static const uint8_t none[16];

	return !memcmp(a->ip, none, sizeof none);
}

bool is_local(const struct addr *a)
{
	struct addr copy = *a;
	struct sockaddr_storage s;
	int fd = socket(a->family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool local;

	copy.port = 0;
	to_sockaddr(&copy, &s);
	if (a->family == AF_INET6 && a->ip[0] == 0xfe) // link-local: the interface is not known here
		((struct sockaddr_in6 *)&s)->sin6_scope_id = 1;
	local = fd >= 0 && !bind(fd, (struct sockaddr *)&s, sizeof s);
	if (fd >= 0)
		close(fd);
	return local;
}

// route finds the address from which a packet to dst is sent.
static int route(const struct sockaddr *dst, struct addr *src)
{
	struct sockaddr_storage s;
	socklen_t n = sizeof s;
	int fd = socket(dst->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0), error = 0;

	if (fd < 0)
		return errno;
	if (connect(fd, dst, dst->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6)) ||
	    getsockname(fd, (struct sockaddr *)&s, &n))
		error = errno;
	close(fd);
	if (!error)
		from_sockaddr((struct sockaddr *)&s, src);
	return error;
}

static bool overlap(const struct addr *a, const struct addr *b)
{
	return a->port == b->port && a->family == b->family && (is_any(a) || is_any(b) || !memcmp(a->ip, b->ip, 16));
}

// port_taken checks this process's ids and the listeners of all processes.
static bool port_taken(const struct addr *a)
{
	for (struct cm_id *i = all_ids; i; i = i->next)
		if ((i->state == BOUND || i->state == LISTENING) && overlap(&i->src, a))
			return true;
	for (int slot = 0; slot < PROCS; slot++) {
		if (slot == self || !alive_now(slot))
			continue;
		for (int i = 0; i < LISTENERS; i++) {
			struct listener *l = &shared->procs[slot].listeners[i];
			struct addr b = {l->family, l->port};

			memcpy(b.ip, l->ip, 16);
			if (atomic_load(&l->handle) && overlap(&b, a))
				return true;
		}
	}
	return false;
}

static uint16_t new_port(void)
{
	uint32_t n = atomic_fetch_add(&shared->procs[self].next_port, 1);

	return FIRST_PORT + (n * PROCS + self) % PORTS; // no two processes choose the same
}

static void set_addresses(struct cm_id *i)
{
	to_sockaddr(&i->src, &i->id.route.addr.src_storage);
	if (i->dst.family)
		to_sockaddr(&i->dst, &i->id.route.addr.dst_storage);
}

static int to_device(struct cm_id *i)
{
	i->id.verbs = cm_context();
	i->id.port_num = 1;
	return i->id.verbs ? 0 : ENOMEM;
}

// ---- channels and ids ----

struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct cm_channel *c;

	if (start())
		return errno = ENODEV, NULL;
	c = calloc(1, sizeof *c);
	errno = events_open(&c->events);
	if (errno)
		return NULL;
	c->c.fd = c->events.fd;
	count(N_EVENT_CHANNEL, 1);
	return &c->c;
}

void rdma_destroy_event_channel(struct rdma_event_channel *c)
{
	struct cm_channel *ch = (struct cm_channel *)c;

	if (ch->ids)
		complain("an event channel is destroyed under %d ids", ch->ids);
	events_close(&ch->events);
	count(N_EVENT_CHANNEL, -1);
	// ch is not freed: rping of rdma-core 44 has a thread that is in rdma_get_cm_event, or
	// about to call it.
}

static struct cm_id *handles[1 << SLOT_SHIFT];

struct cm_id *find_id(uint32_t handle)
{
	return slot_of(handle) == self ? handles[handle & ((1 << SLOT_SHIFT) - 1)] : NULL;
}

struct cm_id *new_id(struct rdma_event_channel *c, void *owner, enum rdma_port_space ps)
{
	struct cm_id *i = calloc(1, sizeof *i);
	const uint32_t mask = (1 << SLOT_SHIFT) - 1;
	uint32_t n;

	do
		n = atomic_fetch_add(&shared->procs[self].next_handle, 1) & mask;
	while (!n || handles[n]);
	handles[n] = i;
	i->handle = self << SLOT_SHIFT | n;
	i->id.channel = c;
	i->id.context = owner;
	i->id.ps = ps;
	i->id.qp_type = IBV_QPT_RC;
	i->ack_timeout = 18; // about a second; the CM computes it from the path (IBTA 12.7.34)
	i->next = all_ids;
	all_ids = i;
	((struct cm_channel *)c)->ids++;
	count(N_ID, 1);
	return i;
}

int rdma_create_id(struct rdma_event_channel *c, struct rdma_cm_id **id, void *owner, enum rdma_port_space ps)
{
	if (!c || ps != RDMA_PS_TCP)
		return fail(EOPNOTSUPP);
	pthread_mutex_lock(&hw.mu);
	*id = &new_id(c, owner, ps)->id;
	pthread_mutex_unlock(&hw.mu);
	return 0;
}

void free_id(struct cm_id *i)
{
	struct cm_id **at;

	for (at = &all_ids; *at != i; at = &(*at)->next)
		;
	*at = i->next;
	handles[i->handle & ((1 << SLOT_SHIFT) - 1)] = NULL;
	clear_timer(i);
	((struct cm_channel *)i->id.channel)->ids--;
	count(N_ID, -1);
}

static bool is_of(struct event *e, void *id)
{
	struct cm_event *v = (struct cm_event *)e;

	return v->to == id || v->ev.id == id;
}

// Requests that nobody has taken are freed with their listener.
static struct cm_id *orphans;

static void drop(struct event *e)
{
	struct cm_event *v = (struct cm_event *)e;
	struct cm_id *child = of(v->ev.id);

	if (v->ev.event == RDMA_CM_EVENT_CONNECT_REQUEST && v->to != child) {
		clear_timer(child);
		child->next_timer = orphans;
		orphans = child;
	}
	free(v);
}

static void destroy(struct cm_id *i)
{
	struct events *q = &((struct cm_channel *)i->id.channel)->events;

	end_connection(i);
	clear_timer(i);
	if (i->listed)
		atomic_store(&i->listed->handle, 0);
	for (struct cm_id *o = all_ids; o; o = o->next)
		if (o->listener == i)
			o->listener = NULL;
	if (i->listener)
		i->listener->pending--;
	events_drop(q, is_of, drop, i);
	while (i->acknowledged < i->reported)
		pthread_cond_wait(&hw.acked, &hw.mu);
	free_id(i);
	free(i);
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	pthread_mutex_lock(&hw.mu);
	for (struct qp *q = all_qps; q; q = q->next)
		if (&q->qp == id->qp)
			complain("an id is destroyed before its queue pair");
	destroy(of(id));
	while (orphans) {
		struct cm_id *o = orphans;

		orphans = o->next_timer;
		o->next_timer = NULL;
		destroy(o);
	}
	pthread_mutex_unlock(&hw.mu);
	return 0;
}

static bool of_id(struct event *e, void *id) { return ((struct cm_event *)e)->ev.id == id; }

static struct events *moving_to;
static void move(struct event *e) { events_put(moving_to, e); }

int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *c)
{
	if (!c)
		return fail(EOPNOTSUPP);
	pthread_mutex_lock(&hw.mu);
	moving_to = &((struct cm_channel *)c)->events;
	events_drop(&((struct cm_channel *)id->channel)->events, of_id, move, id);
	((struct cm_channel *)id->channel)->ids--;
	((struct cm_channel *)c)->ids++;
	id->channel = c;
	pthread_mutex_unlock(&hw.mu);
	return 0;
}

enum { OPTION_TOS = 0, OPTION_ACK_TIMEOUT = 3 };

int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t n)
{
	if (level != RDMA_OPTION_ID)
		return fail(ENOSYS);
	if (name == OPTION_ACK_TIMEOUT) {
		if (n != 1 || *(uint8_t *)value > 31)
			return fail(EINVAL);
		of(id)->ack_timeout = *(uint8_t *)value;
	}
	return 0;
}

// ---- binding, resolving, listening ----

static int bind_id(struct cm_id *i, struct sockaddr *s)
{
	struct addr a;

	if (i->state != IDLE || !from_sockaddr(s, &a))
		return EINVAL;
	if (!is_any(&a) && !is_local(&a))
		return ENODEV; // cma.c: no device has the address
	if (!a.port)
		a.port = new_port();
	else if (port_taken(&a))
		return EADDRINUSE;
	i->src = a;
	i->state = BOUND;
	set_addresses(i);
	return is_any(&a) ? 0 : to_device(i);
}

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *a) { return LOCKED(bind_id(of(id), a)); }

static int resolve_addr(struct cm_id *i, struct sockaddr *from, struct sockaddr *to)
{
	struct addr src;
	int error;

	if ((i->state != IDLE && i->state != BOUND) || !from_sockaddr(to, &i->dst))
		return EINVAL;
	error = route(to, &src);
	if (error)
		return error;
	src.port = i->state == BOUND ? i->src.port : 0;
	if (i->state == BOUND && !is_any(&i->src))
		src = i->src;
	if (from && from_sockaddr(from, &i->src)) {
		if (!is_any(&i->src) && !is_local(&i->src))
			return ENODEV;
		src.port = i->src.port;
		if (!is_any(&i->src))
			src = i->src;
		if (src.port && port_taken(&src))
			return EADDRINUSE;
	}
	if (!src.port)
		src.port = new_port();
	i->src = src;
	set_addresses(i);
	error = to_device(i);
	if (error)
		return error;
	i->state = ADDR_RESOLVED;
	report(i, RDMA_CM_EVENT_ADDR_RESOLVED, 0, NULL);
	return 0;
}

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int ms)
{
	return LOCKED(resolve_addr(of(id), from, to));
}

static int resolve_route(struct cm_id *i)
{
	if (i->state != ADDR_RESOLVED)
		return EINVAL;
	if (chance(100) < config.sm_loss) { // cma.c, cma_query_handler: the program may try again
		report(i, RDMA_CM_EVENT_ROUTE_ERROR, -ETIMEDOUT, NULL);
		return 0;
	}
	i->state = ROUTE_RESOLVED;
	report(i, RDMA_CM_EVENT_ROUTE_RESOLVED, 0, NULL);
	return 0;
}

int rdma_resolve_route(struct rdma_cm_id *id, int ms) { return LOCKED(resolve_route(of(id))); }

static int listen_id(struct cm_id *i, int backlog)
{
	struct listener *l;

	if (i->state == IDLE) { // rdma_listen(3): binds to a port of the system's choice
		i->src = (struct addr){.family = AF_INET, .port = new_port()};
		set_addresses(i);
	} else if (i->state != BOUND) {
		return EINVAL;
	}
	for (l = shared->procs[self].listeners; l < shared->procs[self].listeners + LISTENERS; l++)
		if (!atomic_load(&l->handle))
			break;
	if (l == shared->procs[self].listeners + LISTENERS)
		return ENOMEM;
	l->family = i->src.family;
	l->port = i->src.port;
	memcpy(l->ip, i->src.ip, 16);
	i->listed = l;
	i->backlog = backlog > 0 ? backlog : 128;
	i->state = LISTENING;
	atomic_store(&l->handle, i->handle);
	return 0;
}

int rdma_listen(struct rdma_cm_id *id, int backlog) { return LOCKED(listen_id(of(id), backlog)); }

__be16 rdma_get_src_port(struct rdma_cm_id *id) { return htons(of(id)->src.port); }
__be16 rdma_get_dst_port(struct rdma_cm_id *id) { return htons(of(id)->dst.port); }

// ---- queue pairs ----

static int access_of(const struct cm_id *i)
{
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE; // drivers/infiniband/core/cm.c: cm_init_qp_init_attr

	if (i->param.responder_resources || config.profile->transport == IBV_TRANSPORT_IWARP)
		access |= IBV_ACCESS_REMOTE_READ;
	return access;
}

int qp_to_init(struct cm_id *i)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = access_of(i)};

	return modify_qp(i->id.qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

// qp_to_rts connects the queue pair to the one that the peer's REQ or REP names, whoever has
// made it, from INIT or RESET (librdmacm/cma.c: ucma_modify_qp_rtr). The RNR retry count is
// the peer's; the RNR timer stays at 0, which means 655 ms (cm_init_qp_rtr_attr).
int qp_to_rts(struct cm_id *i, const struct cm_message *peer)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = peer->qpn,
		.max_dest_rd_atomic = i->param.responder_resources, .qp_access_flags = access_of(i),
		.ah_attr = {.is_global = 1, .dlid = 1, .port_num = 1},
	};
	int error = qp_to_init(i);
	struct ibv_ece ece;

	if (!error)
		error = modify_qp(i->id.qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS);

	if (error)
		return error;
	if (!ibv_query_ece(i->id.qp, &ece) && !((struct qp *)i->id.qp)->extensions &&
	    (i->peer_ece.vendor_id || i->state != REQ_RECEIVED)) // a dialer need not offer extensions
		complain("a queue pair is connected without the extensions of its family");
	a = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS, .timeout = i->ack_timeout, .max_rd_atomic = i->param.initiator_depth,
		.retry_cnt = i->state == REQ_RECEIVED ? peer->retry : i->param.retry_count, .rnr_retry = peer->rnr_retry,
	};
	((struct qp *)i->id.qp)->id = i;
	return modify_qp(i->id.qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

int rdma_get_remote_ece(struct rdma_cm_id *id, struct ibv_ece *e)
{
	if (id->qp)
		return fail(EINVAL);
	*e = of(id)->peer_ece;
	return 0;
}

int rdma_set_local_ece(struct rdma_cm_id *id, struct ibv_ece *e)
{
	if (id->qp || !e->vendor_id || e->comp_mask)
		return fail(EINVAL);
	of(id)->own_ece = *e;
	return 0;
}

static int own_qp(struct rdma_cm_id *id, struct ibv_qp *qp)
{
	int error;

	if (!qp)
		return -1; // errno is the library's, if it has set it
	pthread_mutex_lock(&hw.mu);
	ibv_query_ece(qp, &of(id)->own_ece);
	if (of(id)->peer_ece.vendor_id) // init_ece; all devices of the fabric are of one family
		ibv_set_ece(qp, &of(id)->peer_ece);
	id->qp = qp;
	((struct qp *)qp)->id = of(id);
	error = qp_to_init(of(id));
	pthread_mutex_unlock(&hw.mu);
	id->pd = qp->pd;
	id->send_cq = qp->send_cq;
	id->recv_cq = qp->recv_cq;
	return fail(error);
}

int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
	if (!id->verbs || id->qp || !pd || pd->context != id->verbs)
		return fail(EINVAL);
	return own_qp(id, ibv_create_qp(pd, a));
}

int rdma_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *a)
{
	if (!id->verbs || id->qp || !a->pd || a->pd->context != id->verbs)
		return fail(EINVAL);
	return own_qp(id, ibv_create_qp_ex(id->verbs, a));
}

void rdma_destroy_qp(struct rdma_cm_id *id)
{
	ibv_destroy_qp(id->qp);
	id->qp = NULL;
}

int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *a, int *mask) { return fail(EOPNOTSUPP); }

// ---- connecting ----

static struct cm_message message(struct cm_id *i, int type, const void *data, int n)
{
	struct cm_message m = {
		.type = type, .from = i->handle, .to = i->peer_handle, .src = i->src, .dst = i->dst,
		.qpn = i->id.qp ? i->id.qp->qp_num : i->param.qp_num, .data_len = n,
		.served = i->param.responder_resources, .issued = i->param.initiator_depth,
		.retry = i->param.retry_count, .rnr_retry = i->param.rnr_retry_count, .srq = i->id.qp ? i->id.qp->srq != NULL : i->param.srq,
	};

	if (data)
		memcpy(m.data, data, n);
	return m;
}

static uint8_t at_most(uint8_t n, int most) { return n < most ? n : most; }

static int take_param(struct cm_id *i, const struct rdma_conn_param *p, int most_data)
{
	if (config.profile->transport == IBV_TRANSPORT_IWARP)
		most_data = DATA;
	if (p && p->private_data_len > most_data)
		return EINVAL;
	// librdmacm/cma.c, ucma_valid_param; 255 means the maximum
	if (p && ((p->responder_resources != 255 && p->responder_resources > config.profile->max_rd_atomic) ||
		  (p->initiator_depth != 255 && p->initiator_depth > config.profile->max_rd_atomic)))
		return EINVAL;
	i->param = p ? *p : (struct rdma_conn_param){.responder_resources = 255, .initiator_depth = 255, .retry_count = 7, .rnr_retry_count = 7};
	i->param.responder_resources = at_most(i->param.responder_resources, config.profile->max_rd_atomic);
	i->param.initiator_depth = at_most(i->param.initiator_depth, config.profile->max_rd_atomic);
	i->param.retry_count &= 7;
	i->param.rnr_retry_count &= 7;
	return 0;
}

static int connect_id(struct cm_id *i, const struct rdma_conn_param *p)
{
	struct cm_message m;
	int error;

	if (i->state != ROUTE_RESOLVED)
		return EINVAL;
	error = take_param(i, p, REQ_DATA);
	if (error)
		return error;
	m = message(i, REQ, p ? p->private_data : NULL, p ? p->private_data_len : 0);
	m.ece_vendor = i->own_ece.vendor_id;
	m.ece_options = i->own_ece.options;
	i->state = REQ_SENT;
	transmit(i, &m, true);
	return 0;
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *p) { return LOCKED(connect_id(of(id), p)); }

static int accept_id(struct cm_id *i, const struct rdma_conn_param *p)
{
	struct cm_message m;
	int error;

	if (i->state != REQ_RECEIVED)
		return EINVAL;
	error = take_param(i, p, REP_DATA);
	if (!p || p->responder_resources == 255) // librdmacm/cma.c, rdma_accept: as many as in the request
		i->param.responder_resources = at_most(i->param.responder_resources, i->request.issued);
	if (!p || p->initiator_depth == 255)
		i->param.initiator_depth = at_most(i->param.initiator_depth, i->request.served);
	if (!error && i->id.qp)
		error = qp_to_rts(i, &i->request);
	if (error)
		return error;
	if (i->listener)
		i->listener->pending--;
	i->listener = NULL;
	m = message(i, REP, p ? p->private_data : NULL, p ? p->private_data_len : 0);
	m.ece_vendor = i->peer_ece.vendor_id; // as received (ucma_copy_ece_param_to_kern_rep)
	m.ece_options = i->own_ece.options;
	i->state = REP_SENT;
	transmit(i, &m, true);
	return 0;
}

int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *p) { return LOCKED(accept_id(of(id), p)); }

static int reject_id(struct cm_id *i, const void *data, uint8_t n)
{
	struct cm_message m = message(i, REJ, data, n > REJ_DATA ? 0 : n);

	if (n > REJ_DATA || (i->state != REQ_RECEIVED && i->state != REP_RECEIVED))
		return EINVAL;
	m.reason = REJ_CONSUMER;
	transmit(i, &m, false);
	i->state = ENDED;
	return 0;
}

int rdma_reject(struct rdma_cm_id *id, const void *data, uint8_t n) { return LOCKED(reject_id(of(id), data, n)); }

static int establish(struct cm_id *i)
{
	struct cm_message m = message(i, RTU, NULL, 0);

	if (i->state != REP_RECEIVED)
		return EINVAL;
	i->state = ESTABLISHED;
	transmit(i, &m, false);
	return 0;
}

int rdma_establish(struct rdma_cm_id *id) { return LOCKED(establish(of(id))); }

// notify: the first message takes the place of the RTU (IBTA 12.9.6; rdma_notify(3)).
static int notify(struct cm_id *i, enum ibv_event_type event)
{
	if (event != IBV_EVENT_COMM_EST)
		return EINVAL;
	if (i->state == REP_SENT) {
		clear_timer(i);
		i->state = ESTABLISHED;
		report(i, RDMA_CM_EVENT_ESTABLISHED, 0, NULL);
	}
	return 0;
}

int rdma_notify(struct rdma_cm_id *id, enum ibv_event_type event) { return LOCKED(notify(of(id), event)); }

// disconnect has librdmacm's order: first the queue pair goes to the error state, even if the
// rest fails, and then the messages are sent.
static int disconnect(struct cm_id *i)
{
	struct cm_message m = message(i, DREQ, NULL, 0);

	if (i->id.qp)
		qp_error((struct qp *)i->id.qp);
	switch (i->state) {
	case ESTABLISHED: case REP_SENT: case REP_RECEIVED:
		i->state = DREQ_SENT;
		transmit(i, &m, true);
		return 0;
	case DREQ_RECEIVED:
		m.type = DREP;
		transmit(i, &m, false);
		enter_timewait(i);
		return 0;
	case DREQ_SENT: case TIMEWAIT:
		return 0;
	default:
		return EINVAL;
	}
}

int rdma_disconnect(struct rdma_cm_id *id) { return LOCKED(disconnect(of(id))); }

// ---- events ----

void report(struct cm_id *i, enum rdma_cm_event_type type, int status, const struct cm_message *m)
{
	struct cm_event *v = calloc(1, sizeof *v);

	v->to = i;
	v->ev.id = &i->id;
	v->ev.event = type;
	v->ev.status = status;
	if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
		v->to = i->listener;
		v->ev.listen_id = &i->listener->id;
	}
	if (m) { // rdma_get_cm_event(3): the peer's values, seen from here
		v->ev.param.conn = (struct rdma_conn_param){
			.responder_resources = m->issued, .initiator_depth = m->served, .retry_count = m->retry,
			.rnr_retry_count = m->rnr_retry, .srq = m->srq, .qp_num = m->qpn, .flow_control = 1,
			.private_data = v->data, .private_data_len = m->data_len,
		};
		memcpy(v->data, m->data, m->data_len);
		if (config.profile->transport == IBV_TRANSPORT_IB) // the field as a whole, padded
			v->ev.param.conn.private_data_len = type == RDMA_CM_EVENT_CONNECT_REQUEST ? REQ_DATA :
				type == RDMA_CM_EVENT_REJECTED ? REJ_DATA : REP_DATA;
	}
	events_put(&((struct cm_channel *)i->id.channel)->events, &v->e);
}

// take_response does what librdmacm does with a reply before the program gets it.
static void take_response(struct cm_id *i, struct rdma_cm_event *ev)
{
	struct cm_message peer = {.qpn = ev->param.conn.qp_num, .rnr_retry = ev->param.conn.rnr_retry_count}, rej;
	int error;

	if (i->state != REP_RECEIVED || !i->id.qp)
		return;
	if (config.profile->transport == IBV_TRANSPORT_IB) { // core/cm.c, cm_rep_handler: the reply limits what was requested
		i->param.responder_resources = ev->param.conn.responder_resources;
		i->param.initiator_depth = ev->param.conn.initiator_depth;
	}
	error = i->peer_ece.vendor_id && i->peer_ece.vendor_id != i->own_ece.vendor_id ? EINVAL : 0;
	ibv_set_ece(i->id.qp, &i->peer_ece); // ucma_process_conn_resp_ece
	if (!error)
		error = qp_to_rts(i, &peer);
	if (!error) {
		ev->event = RDMA_CM_EVENT_ESTABLISHED;
		establish(i);
		return;
	}
	rej = message(i, REJ, NULL, 0);
	rej.reason = REJ_CONSUMER;
	transmit(i, &rej, false);
	i->state = ENDED;
	ev->event = RDMA_CM_EVENT_CONNECT_ERROR;
	ev->status = -1;
	errno = error;
}

static void taken(struct event *e)
{
	struct cm_event *v = (struct cm_event *)e;

	v->to->reported++;
	if (v->ev.event == RDMA_CM_EVENT_CONNECT_RESPONSE)
		take_response(v->to, &v->ev);
}

int rdma_get_cm_event(struct rdma_event_channel *c, struct rdma_cm_event **out)
{
	struct cm_event *v = (struct cm_event *)events_wait(&((struct cm_channel *)c)->events, c->fd, taken);

	if (!v)
		return -1;
	wake_engine();
	*out = &v->ev;
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *ev)
{
	struct cm_event *v = (struct cm_event *)((char *)ev - offsetof(struct cm_event, ev));

	pthread_mutex_lock(&hw.mu);
	v->to->acknowledged++;
	pthread_cond_broadcast(&hw.acked);
	pthread_mutex_unlock(&hw.mu);
	free(v);
	return 0;
}
