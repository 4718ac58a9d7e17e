// A stand-in for libibverbs and librdmacm: one device, connections between ids of one process,
// and no data. It counts the objects that exist, lets calls fail as the test requests, and
// removes the device and brings it back. See fake_test.go.
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// The words that the test shares with this library, as in fake_test.go.
enum {
	COUNTDOWN, // calls until the one that fails; below 0: none fails
	ERRNO, // the error with which it fails
	ALL, // 1: all calls after it fail, too
	HITS, // calls that failed
	ORDER, // 1: remove the device, 2: bring it back; 0 when done
	REMOVED, // 1: the device is removed
	UNDER, // objects that existed when their context was closed
	OVERLAPS, // completion channels that were made while there was another
	NOEPOLL, // 1: event channels cannot be waited for
	SLOW, // 1: events are slow
	POLLS, // polls of completion queues
	COMPLETIONS, // how many completions they have; below 0: polls fail
	COMPLETED, // the work request of these completions
	RECVS, // receive buffers posted
	GIDS, // GIDs of the port, all 127.0.0.1: the last is of interface 1, the one before of 2, and so on
	FOREIGN, // bits of the GIDs that belong to another container
	USED, // bits of the GIDs that queue pairs use
	OPCODE, // of the completions
	BROKEN, // how many queue pairs were put into the error state
	NOTIFIES, // how often a completion queue was armed
	INLINE, // bytes that a queue pair gets at most; 0: as requested, below 0: none
	VENDOR, // of the device: BROADCOM's refuses more than INLINE
	STALE, // connects that are still to be rejected for a stale connection
	KEEPS, // 1: deregistering a memory region fails
	TOS, // of the last id for which it was set
	ACKTIMEOUT, // likewise
	RETRY, // of the last connect
	RNRRETRY, // of the last connect
	USES, // how many tests have used this library
	PD = 32, MR, CHANNEL, CQ, QP, EVENTS, ID, // objects that exist
	NAME = 64, // name of the call that failed, in this word and the next ones
	POSTED = 128, // the last work requests, as a ring
	RING = 256, // the size of that ring
	WORDS = 512,
};

enum { BROADCOM = 0x14e4 };

static volatile long *word;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; // guards everything below
static pthread_cond_t acked = PTHREAD_COND_INITIALIZER;
static struct ibv_device *device;
static struct ibv_context *context; // NULL: not open
static int async[2]; // the pipe of its events

static int fault(const char *name)
{
	int fails;

	pthread_mutex_lock(&mu);
	fails = (word[COUNTDOWN] >= 0 && word[COUNTDOWN]-- == 0) || (word[ALL] && word[HITS]);
	if (fails) {
		word[HITS]++;
		snprintf((char *)(word + NAME), 64, "%s", name);
	}
	pthread_mutex_unlock(&mu);
	errno = fails ? word[ERRNO] : 0;
	return errno;
}

#define FAULT() fault(__func__)
#define COUNT(what, n) __atomic_add_fetch((long *)&word[what], n, __ATOMIC_SEQ_CST)
#define MAKE(type, what, o) \
	if (FAULT()) \
		return NULL; \
	struct type *o = calloc(1, sizeof(*o)); \
	COUNT(what, 1)
#define FREE(what, o) (COUNT(what, -1), free(o), 0)
// The result for a removed device, as libibverbs has it.
#define DESTROY(what, o) (word[REMOVED] && !getenv("RDMAV_ALLOW_DISASSOC_DESTROY") ? EIO : FREE(what, o))

static void make_pipe(int p[2])
{
	if (pipe2(p, O_CLOEXEC))
		abort();
}

// ---- verbs ----

static int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	int got = 0;

	COUNT(POLLS, 1);
	if (word[COMPLETIONS] < 0)
		return -1;
	for (; got < n && word[COMPLETIONS] > 0; got++, word[COMPLETIONS]--)
		wc[got] = (struct ibv_wc){ .wr_id = word[COMPLETED], .opcode = word[OPCODE] };
	return got;
}

static int notify(struct ibv_cq *cq, int solicited)
{
	COUNT(NOTIFIES, 1);
	return FAULT();
}

static int post_send(struct ibv_qp *q, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	*bad = wr;
	if (word[INLINE] && wr->send_flags & IBV_SEND_INLINE && (long)wr->sg_list[0].length > word[INLINE])
		return EINVAL;
	return FAULT();
}

static int post_recv(struct ibv_qp *q, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	*bad = wr;
	if (FAULT())
		return errno;
	for (; wr; wr = wr->next)
		word[POSTED + (COUNT(RECVS, 1) - 1) % RING] = wr->wr_id;
	return 0;
}

static void open_context(void) // mu is held
{
	if (context)
		return;
	if (!device) {
		device = calloc(1, sizeof(*device));
		device->node_type = IBV_NODE_CA;
		device->transport_type = IBV_TRANSPORT_IB;
		strcpy(device->name, "fake0");
		strcpy(device->ibdev_path, "/sys/class/infiniband/fake0");
	}
	context = calloc(1, 4096); // more than in any version
	context->device = device;
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = notify;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	make_pipe(async);
	context->async_fd = async[0];
	context->num_comp_vectors = 1;
}

struct ibv_device **ibv_get_device_list(int *n)
{
	struct ibv_device **list = calloc(2, sizeof(*list));

	pthread_mutex_lock(&mu);
	open_context();
	pthread_mutex_unlock(&mu);
	list[0] = device;
	if (n)
		*n = 1;
	return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }
__be64 ibv_get_device_guid(struct ibv_device *d) { return 1; }
struct ibv_context *ibv_open_device(struct ibv_device *d) { return context; }
int ibv_close_device(struct ibv_context *c) { return 0; }

int ibv_query_port(struct ibv_context *c, uint8_t p, struct _compat_ibv_port_attr *compat)
{
	struct ibv_port_attr *a = (void *)compat; // it has all these fields

	a->state = IBV_PORT_ACTIVE;
	a->link_layer = IBV_LINK_LAYER_ETHERNET;
	a->active_mtu = IBV_MTU_1024;
	a->gid_tbl_len = word[GIDS];
	return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *c, struct ibv_gid_entry *e, size_t n, uint32_t flags, size_t size)
{
	static const union ibv_gid local = {.raw = {[10] = 0xff, 0xff, 127, 0, 0, 1}};
	long i;

	for (i = 0; i < word[GIDS] && i < (long)n; i++)
		e[i] = (struct ibv_gid_entry){local, i, 1, IBV_GID_TYPE_ROCE_V2, word[GIDS] - i};
	return i;
}

int ibv_query_gid(struct ibv_context *c, uint8_t p, int i, union ibv_gid *g)
{
	errno = EINVAL;
	return -1;
}

int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a)
{
	if (FAULT())
		return errno;
	memset(a, 0, sizeof(*a));
	a->max_qp_rd_atom = a->max_qp_init_rd_atom = 16;
	a->max_qp_wr = 1 << 15;
	a->phys_port_cnt = 1;
	a->vendor_id = word[VENDOR];
	return 0;
}

int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *e)
{
	char b;

	if (read(c->async_fd, &b, 1) != 1)
		return -1;
	e->event_type = IBV_EVENT_DEVICE_FATAL;
	return 0;
}

void ibv_ack_async_event(struct ibv_async_event *e) {}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *c)
{
	MAKE(ibv_pd, PD, o);
	o->context = c;
	return o;
}

int ibv_dealloc_pd(struct ibv_pd *o) { return DESTROY(PD, o); }

enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }

// There is no ibv_reg_mr_iova2, and so no optional rights, as in rdma-core before 28.
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t n, int access)
{
	if (access & IBV_ACCESS_OPTIONAL_RANGE) {
		errno = EINVAL;
		return NULL;
	}
	MAKE(ibv_mr, MR, o);
	o->context = pd->context;
	o->pd = pd;
	return o;
}

int ibv_dereg_mr(struct ibv_mr *o) { return word[KEEPS] ? EBUSY : DESTROY(MR, o); }

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
	MAKE(ibv_comp_channel, CHANNEL, o);
	int p[2];

	if (word[CHANNEL] > 1)
		COUNT(OVERLAPS, 1);
	make_pipe(p);
	o->context = c;
	o->fd = p[0];
	o->refcnt = p[1]; // the pipe's other end
	return o;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *o)
{
	close(o->fd);
	close(o->refcnt);
	return FREE(CHANNEL, o);
}

int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **owner)
{
	char b;

	if (read(ch->fd, &b, 1) == 1)
		abort(); // nobody writes to it
	return -1;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n) {}

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int n, void *owner, struct ibv_comp_channel *ch, int vector)
{
	MAKE(ibv_cq, CQ, o);
	o->context = c;
	o->channel = ch;
	o->cq_context = owner;
	o->cqe = n;
	return o;
}

int ibv_destroy_cq(struct ibv_cq *o) { return DESTROY(CQ, o); }

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
	if (word[VENDOR] == BROADCOM && (long)a->cap.max_inline_data > word[INLINE])
		return NULL; // errno is unchanged (bnxt_re)
	MAKE(ibv_qp, QP, o);
	o->context = pd->context;
	o->qp_context = a->qp_context;
	o->pd = pd;
	if (word[INLINE] && (long)a->cap.max_inline_data > word[INLINE])
		a->cap.max_inline_data = word[INLINE] > 0 ? word[INLINE] : 0;
	return o;
}


int ibv_modify_qp(struct ibv_qp *q, struct ibv_qp_attr *a, int mask)
{
	if (FAULT())
		return errno;
	if (mask & IBV_QP_AV) {
		if (word[FOREIGN] >> a->ah_attr.grh.sgid_index & 1)
			return EINVAL;
		__atomic_or_fetch((long *)&word[USED], 1L << a->ah_attr.grh.sgid_index, __ATOMIC_SEQ_CST);
	}
	if (mask & IBV_QP_STATE && a->qp_state == IBV_QPS_ERR)
		COUNT(BROKEN, 1);
	return 0;
}

int ibv_query_qp(struct ibv_qp *q, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *i) { return 0; }
int ibv_destroy_qp(struct ibv_qp *o) { return DESTROY(QP, o); }

// ---- connection manager ----

struct event {
	struct rdma_cm_event e;
	struct id *to; // the id whose end waits for the acknowledgement
	struct event *next;
	uint8_t data[256];
};

struct channel {
	struct rdma_event_channel c;
	int write;
	struct event *first;
};

struct id {
	struct rdma_cm_id id;
	struct id *next, *peer;
	enum { IDLE, ASKED, UP } state;
	int listening;
	int reported, acknowledged; // events
};

static struct id *ids;

static void post(struct id *to, int type, int status, struct id *listener, const struct rdma_conn_param *p, const void *data, int n)
{
	struct channel *ch = (struct channel *)to->id.channel;
	struct event *v = calloc(1, sizeof(*v)), **at;

	v->to = listener ? listener : to;
	v->e.id = &to->id;
	v->e.listen_id = listener ? &listener->id : NULL;
	v->e.event = type;
	v->e.status = status;
	if (p)
		v->e.param.conn = *p;
	memcpy(v->data, data, n);
	v->e.param.conn.private_data = v->data;
	v->e.param.conn.private_data_len = n;
	for (at = &ch->first; *at; at = &(*at)->next)
		;
	*at = v;
	if (write(ch->write, "", 1) != 1)
		abort();
}

static void *obey(void *unused)
{
	for (;; usleep(500)) {
		pthread_mutex_lock(&mu);
		switch (word[ORDER]) {
		case 1:
			word[REMOVED] = 1;
			for (struct id *i = ids; i; i = i->next)
				if (i->id.verbs)
					post(i, RDMA_CM_EVENT_DEVICE_REMOVAL, 0, NULL, NULL, "", 0);
			if (context && write(async[1], "", 1) != 1)
				abort();
			break;
		case 2:
			word[REMOVED] = 0;
		}
		word[ORDER] = 0;
		pthread_mutex_unlock(&mu);
	}
	return NULL;
}

__attribute__((constructor)) static void start(void)
{
	const char *file = getenv("SAN_TEST_FAKE");
	pthread_t t;
	int fd = file ? open(file, O_RDWR | O_CLOEXEC) : -1;

	if (fd < 0)
		abort();
	word = mmap(NULL, WORDS * sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (word == MAP_FAILED || pthread_create(&t, NULL, obey, NULL))
		abort();
}

struct rdma_event_channel *rdma_create_event_channel(void)
{
	MAKE(channel, EVENTS, o);
	int p[2];

	make_pipe(p);
	if (word[NOEPOLL]) {
		close(p[0]);
		p[0] = open("/proc/self/exe", O_RDONLY | O_CLOEXEC); // a file that epoll refuses
	}
	o->c.fd = p[0];
	o->write = p[1];
	return &o->c;
}

void rdma_destroy_event_channel(struct rdma_event_channel *c)
{
	struct channel *o = (struct channel *)c;

	pthread_mutex_lock(&mu);
	for (struct id *i = ids; i; i = i->next)
		if (i->id.channel == c)
			word[UNDER]++;
	pthread_mutex_unlock(&mu);
	close(c->fd);
	close(o->write);
	FREE(EVENTS, o);
}

static struct id *new_id(struct rdma_event_channel *c, void *owner) // mu is held
{
	struct id *o = calloc(1, sizeof(*o));

	o->id.channel = c;
	o->id.context = owner;
	o->next = ids;
	ids = o;
	COUNT(ID, 1);
	return o;
}

static void unlist(struct id *o) // mu is held
{
	struct id **at;

	for (at = &ids; *at != o; at = &(*at)->next)
		;
	*at = o->next;
	COUNT(ID, -1);
}

int rdma_create_id(struct rdma_event_channel *c, struct rdma_cm_id **id, void *owner, enum rdma_port_space ps)
{
	if (FAULT())
		return -1;
	pthread_mutex_lock(&mu);
	*id = &new_id(c, owner)->id;
	pthread_mutex_unlock(&mu);
	return 0;
}

static void part(struct id *o, int status, const void *data, int n) // mu is held
{
	struct id *p = o->peer;

	if (!p)
		return;
	if (p->state == ASKED)
		post(p, RDMA_CM_EVENT_REJECTED, status, NULL, NULL, data, n);
	else if (p->state == UP)
		post(p, RDMA_CM_EVENT_DISCONNECTED, 0, NULL, NULL, "", 0);
	o->peer = p->peer = NULL;
}

// librdmacm closes the context of a removed device together with its last id.
static void close_context(void) // mu is held
{
	if (!word[REMOVED] || !context)
		return;
	for (struct id *i = ids; i; i = i->next)
		if (i->id.verbs == context)
			return;
	if (word[PD] || word[MR] || word[CHANNEL] || word[CQ] || word[QP])
		word[UNDER]++;
	close(async[0]);
	close(async[1]);
	memset(context, 0x5a, 4096);
	free(context);
	context = NULL;
}

// forget drops the events of an id that nobody has taken, and connect requests with their ids.
static void forget(struct id *o) // mu is held
{
	struct channel *ch = (struct channel *)o->id.channel;
	struct event **at = &ch->first;

	while (*at) {
		struct event *v = *at;

		if (v->to != o && v->e.id != &o->id) {
			at = &v->next;
			continue;
		}
		*at = v->next;
		if (v->e.event == RDMA_CM_EVENT_CONNECT_REQUEST && v->to == o) {
			struct id *child = (struct id *)v->e.id;

			part(child, 28, "", 0);
			unlist(child);
			forget(child);
			free(child);
			at = &ch->first; // the child's events may have been anywhere in the list
		}
		free(v);
	}
}

int rdma_destroy_id(struct rdma_cm_id *id)
{
	struct id *o = (struct id *)id;

	pthread_mutex_lock(&mu);
	part(o, 28, "", 0);
	unlist(o);
	forget(o);
	close_context();
	while (o->acknowledged < o->reported)
		pthread_cond_wait(&acked, &mu);
	pthread_mutex_unlock(&mu);
	memset(o, 0x5a, sizeof(*o));
	free(o);
	return 0;
}

int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *c) { return 0; }

int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t n)
{
	if (name == RDMA_OPTION_ID_TOS)
		word[TOS] = *(uint8_t *)value;
	if (name == RDMA_OPTION_ID_ACK_TIMEOUT)
		word[ACKTIMEOUT] = *(uint8_t *)value;
	return 0;
}

static int to_device(struct rdma_cm_id *id) // mu is held
{
	if (word[REMOVED]) {
		errno = ENODEV;
		return -1;
	}
	open_context();
	id->verbs = context;
	id->port_num = 1;
	return 0;
}

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *a)
{
	int rc;

	if (FAULT())
		return -1;
	pthread_mutex_lock(&mu);
	memcpy(&id->route.addr.src_storage, a, sizeof(struct sockaddr_in));
	rc = to_device(id);
	pthread_mutex_unlock(&mu);
	return rc;
}

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int ms)
{
	int rc;

	if (FAULT())
		return -1;
	pthread_mutex_lock(&mu);
	memcpy(&id->route.addr.dst_storage, to, sizeof(struct sockaddr_in));
	if (!id->route.addr.src_addr.sa_family)
		memcpy(&id->route.addr.src_storage, to, sizeof(struct sockaddr_in));
	rc = to_device(id);
	if (!rc)
		post((struct id *)id, RDMA_CM_EVENT_ADDR_RESOLVED, 0, NULL, NULL, "", 0);
	pthread_mutex_unlock(&mu);
	return rc;
}

int rdma_resolve_route(struct rdma_cm_id *id, int ms)
{
	if (FAULT())
		return -1;
	pthread_mutex_lock(&mu);
	post((struct id *)id, RDMA_CM_EVENT_ROUTE_RESOLVED, 0, NULL, NULL, "", 0);
	pthread_mutex_unlock(&mu);
	return 0;
}

int rdma_listen(struct rdma_cm_id *id, int backlog)
{
	if (FAULT())
		return -1;
	((struct id *)id)->listening = 1;
	return 0;
}

static in_port_t port(struct sockaddr_storage *a) { return ((struct sockaddr_in *)a)->sin_port; }

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	struct id *o = (struct id *)id, *l, *child;

	if (FAULT())
		return -1;
	pthread_mutex_lock(&mu);
	word[RETRY] = p->retry_count;
	word[RNRRETRY] = p->rnr_retry_count;
	o->state = ASKED;
	if (word[STALE]) {
		word[STALE]--;
		post(o, RDMA_CM_EVENT_REJECTED, 10, NULL, NULL, "", 0);
		pthread_mutex_unlock(&mu);
		return 0;
	}
	for (l = ids; l; l = l->next)
		if (l->listening && !word[REMOVED] && port(&l->id.route.addr.src_storage) == port(&id->route.addr.dst_storage))
			break;
	if (l) {
		child = new_id(l->id.channel, l->id.context);
		child->id.verbs = context;
		child->id.port_num = 1;
		child->id.route.addr = l->id.route.addr;
		memcpy(&child->id.route.addr.dst_storage, &id->route.addr.src_storage, sizeof(struct sockaddr_in));
		child->peer = o;
		o->peer = child;
		child->state = ASKED;
		post(child, RDMA_CM_EVENT_CONNECT_REQUEST, 0, l, p, p->private_data, p->private_data_len);
	} else {
		post(o, RDMA_CM_EVENT_REJECTED, 8, NULL, NULL, "", 0);
	}
	pthread_mutex_unlock(&mu);
	return 0;
}

int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	struct id *o = (struct id *)id;
	int rc = -1;

	if (FAULT())
		return -1;
	pthread_mutex_lock(&mu);
	errno = EINVAL;
	if (o->peer) {
		rc = 0;
		o->state = o->peer->state = UP;
		post(o->peer, RDMA_CM_EVENT_ESTABLISHED, 0, NULL, p, p->private_data, p->private_data_len);
		post(o, RDMA_CM_EVENT_ESTABLISHED, 0, NULL, NULL, "", 0);
	}
	pthread_mutex_unlock(&mu);
	return rc;
}

int rdma_reject(struct rdma_cm_id *id, const void *data, uint8_t n)
{
	if (FAULT())
		return -1;
	pthread_mutex_lock(&mu);
	part((struct id *)id, 28, data, n);
	pthread_mutex_unlock(&mu);
	return 0;
}

int rdma_disconnect(struct rdma_cm_id *id)
{
	if (FAULT())
		return -1;
	pthread_mutex_lock(&mu);
	if (((struct id *)id)->state == UP)
		part((struct id *)id, 0, "", 0);
	pthread_mutex_unlock(&mu);
	return 0;
}

int rdma_notify(struct rdma_cm_id *id, enum ibv_event_type event) { return 0; }

int rdma_get_cm_event(struct rdma_event_channel *c, struct rdma_cm_event **out)
{
	struct channel *ch = (struct channel *)c;
	struct event *v;
	char b;

	if (read(c->fd, &b, 1) != 1)
		return -1;
	pthread_mutex_lock(&mu);
	v = ch->first;
	if (v) {
		ch->first = v->next;
		v->to->reported++;
	}
	pthread_mutex_unlock(&mu);
	if (!v) { // the id was destroyed with its events
		errno = EAGAIN;
		return -1;
	}
	if (word[SLOW])
		usleep(rand() % 300);
	*out = &v->e;
	return 0;
}

int rdma_ack_cm_event(struct rdma_cm_event *e)
{
	struct event *v = (struct event *)e;

	pthread_mutex_lock(&mu);
	v->to->acknowledged++;
	pthread_cond_broadcast(&acked);
	pthread_mutex_unlock(&mu);
	free(v);
	return 0;
}
