// The device, its contexts, protection domains and asynchronous events.
#include "hwsim.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

struct hw hw = {PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP, PTHREAD_COND_INITIALIZER};

struct ibv_device device = {
	.node_type = IBV_NODE_CA, .name = "hwsim0", .dev_name = "uverbs0",
	.dev_path = "/sys/class/infiniband_verbs/uverbs0", .ibdev_path = "/sys/class/infiniband/hwsim0",
};

static struct context *contexts;

// start attaches this process to the fabric. It returns an errno if there is none.
int start(void)
{
	static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
	static bool started;
	static int failed;

	pthread_mutex_lock(&once);
	if (!started) {
		started = true;
		failed = read_config();
		if (!failed)
			failed = attach();
		if (!failed) {
			device.transport_type = config.profile->transport;
			device.node_type = config.profile->transport == IBV_TRANSPORT_IWARP ? IBV_NODE_RNIC : IBV_NODE_CA;
			note_resets();
			start_engine();
		} else {
			fprintf(stderr, "hwsim: HWSIM: %s\n", strerror(failed));
		}
	}
	pthread_mutex_unlock(&once);
	return failed;
}

bool admit(enum count kind)
{
	if (atomic_load(&shared->counts[self][kind]) >= limit_of(kind)) {
		errno = config.limit_errno ? config.limit_errno : config.profile->limit_errno;
		return false;
	}
	count(kind, 1);
	return true;
}

// ---- devices and contexts ----

struct ibv_device **ibv_get_device_list(int *n)
{
	struct ibv_device **list = calloc(2, sizeof *list);

	if (!start())
		list[0] = &device;
	if (n)
		*n = list[0] != NULL;
	return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }
int ibv_get_device_index(struct ibv_device *d) { return 0; }
__be64 ibv_get_device_guid(struct ibv_device *d) { return htonl(0x48575349); }

struct context *context_of(struct ibv_context *c)
{
	return (struct context *)((char *)c - offsetof(struct context, v.context));
}

struct ibv_context *open_context(void)
{
	struct context *c = calloc(1, sizeof *c);
	struct ibv_context *v = &c->v.context;

	if (events_open(&c->async)) {
		free(c);
		return NULL;
	}
	v->abi_compat = __VERBS_ABI_IS_EXTENDED;
	c->v.sz = sizeof c->v;
	v->device = &device;
	v->async_fd = c->async.fd;
	v->cmd_fd = -1;
	v->num_comp_vectors = 4;
	pthread_mutex_init(&v->mutex, NULL);
	v->ops.poll_cq = cq_poll;
	v->ops.req_notify_cq = cq_notify;
	v->ops.post_send = work_post_send;
	v->ops.post_recv = work_post_recv;
	v->ops.post_srq_recv = srq_post_recv;
	v->ops.alloc_mw = mw_alloc;
	v->ops.dealloc_mw = mw_dealloc;
	c->v.create_qp_ex = builder_create_qp;
	c->next = contexts;
	contexts = c;
	count(N_CONTEXT, 1);
	return v;
}

struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	struct ibv_context *c;

	pthread_mutex_lock(&hw.mu);
	c = open_context();
	pthread_mutex_unlock(&hw.mu);
	return c;
}

int ibv_close_device(struct ibv_context *v)
{
	struct context *c = context_of(v), **at;

	pthread_mutex_lock(&hw.mu);
	for (at = &contexts; *at != c; at = &(*at)->next)
		;
	*at = c->next;
	events_close(&c->async);
	count(N_CONTEXT, -1);
	pthread_mutex_unlock(&hw.mu);
	free(c);
	return 0;
}

int ibv_query_device(struct ibv_context *v, struct ibv_device_attr *a)
{
	const struct profile *p = config.profile;

	memset(a, 0, sizeof *a);
	strcpy(a->fw_ver, "hwsim");
	a->node_guid = a->sys_image_guid = ibv_get_device_guid(v->device);
	a->max_mr_size = config.max_mr_size;
	a->page_size_cap = 0xfffff000;
	a->vendor_id = p->vendor_id;
	a->vendor_part_id = p->part_id;
	a->max_qp = limit_of(N_QP);
	a->max_qp_wr = p->max_qp_wr;
	a->device_cap_flags = p->flags | IBV_DEVICE_RC_RNR_NAK_GEN;
	a->max_sge = p->max_sge;
	a->max_sge_rd = p->max_sge_rd;
	a->max_cq = limit_of(N_CQ);
	a->max_cqe = p->max_cqe;
	a->max_mr = limit_of(N_MR);
	a->max_pd = limit_of(N_PD);
	a->max_qp_rd_atom = a->max_qp_init_rd_atom = p->max_rd_atomic;
	a->max_res_rd_atom = p->max_rd_atomic * p->max_qp;
	a->atomic_cap = IBV_ATOMIC_NONE;
	a->max_mw = limit_of(N_MW);
	a->max_srq = limit_of(N_SRQ);
	a->max_srq_wr = p->max_srq_wr;
	a->max_srq_sge = a->max_srq ? 1 : 0;
	a->max_pkeys = 1;
	a->phys_port_cnt = 1;
	return 0;
}

int ibv_query_port(struct ibv_context *v, uint8_t port, struct _compat_ibv_port_attr *compat)
{
	struct ibv_port_attr *a = (void *)compat; // has the same fields, up to flags
	struct ibv_gid_entry e[64];

	if (port != 1)
		return EINVAL;
	a->state = IBV_PORT_ACTIVE;
	a->max_mtu = a->active_mtu = IBV_MTU_4096;
	a->gid_tbl_len = ibv_query_gid_table(v, e, 64, 0);
	a->port_cap_flags = 0;
	a->max_msg_sz = config.max_msg_sz;
	a->bad_pkey_cntr = a->qkey_viol_cntr = 0;
	a->pkey_tbl_len = 1;
	a->lid = a->sm_lid = config.profile->link_layer == IBV_LINK_LAYER_INFINIBAND ? PORT_LID : 0;
	a->lmc = a->sm_sl = a->subnet_timeout = a->init_type_reply = 0;
	a->max_vl_num = 1;
	a->active_width = 2; // 4X
	a->active_speed = 128; // NDR: 400 Gbit/s in all
	a->phys_state = 5; // LinkUp
	a->link_layer = config.profile->link_layer;
	a->flags = config.grh ? IBV_QPF_GRH_REQUIRED : 0;
	return 0;
}

// The table has an entry for each address of this host's interfaces, as on RoCE. On InfiniBand
// it has only the port's own.
ssize_t _ibv_query_gid_table(struct ibv_context *v, struct ibv_gid_entry *e, size_t max, uint32_t flags, size_t size)
{
	struct ifaddrs *all, *i;
	size_t n = 0;

	if (config.profile->link_layer == IBV_LINK_LAYER_INFINIBAND) {
		e[0] = (struct ibv_gid_entry){.gid.raw = {0xfe, 0x80, [15] = 1}, .port_num = 1, .gid_type = IBV_GID_TYPE_IB};
		return 1;
	}
	if (getifaddrs(&all))
		return -errno;
	for (i = all; i && n < max; i = i->ifa_next) {
		struct ibv_gid_entry g = {.gid_index = n, .port_num = 1, .gid_type = IBV_GID_TYPE_ROCE_V2};

		if (!i->ifa_addr)
			continue;
		if (i->ifa_addr->sa_family == AF_INET) {
			g.gid.raw[10] = g.gid.raw[11] = 0xff;
			memcpy(g.gid.raw + 12, &((struct sockaddr_in *)i->ifa_addr)->sin_addr, 4);
		} else if (i->ifa_addr->sa_family == AF_INET6) {
			memcpy(g.gid.raw, &((struct sockaddr_in6 *)i->ifa_addr)->sin6_addr, 16);
		} else {
			continue;
		}
		g.ndev_ifindex = if_nametoindex(i->ifa_name);
		e[n++] = g;
	}
	freeifaddrs(all);
	return n;
}

int _ibv_query_gid_ex(struct ibv_context *v, uint32_t port, uint32_t index, struct ibv_gid_entry *e, uint32_t flags, size_t size)
{
	struct ibv_gid_entry all[64];
	ssize_t n = _ibv_query_gid_table(v, all, 64, 0, sizeof *all);

	if (port != 1 || n < 0 || index >= n)
		return EINVAL;
	*e = all[index];
	return 0;
}

int ibv_query_gid(struct ibv_context *v, uint8_t port, int index, union ibv_gid *gid)
{
	struct ibv_gid_entry e;

	errno = _ibv_query_gid_ex(v, port, index, &e, 0, sizeof e);
	if (errno)
		return -1;
	*gid = e.gid;
	return 0;
}

int ibv_query_pkey(struct ibv_context *v, uint8_t port, int index, __be16 *pkey)
{
	*pkey = 0xffff;
	return index ? -1 : 0;
}

// ---- protection domains ----

struct ibv_pd *ibv_alloc_pd(struct ibv_context *v)
{
	struct pd *p;

	if (!admit(N_PD))
		return NULL;
	p = calloc(1, sizeof *p);
	p->pd.context = v;
	return &p->pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	if (((struct pd *)pd)->users)
		return EBUSY;
	count(N_PD, -1);
	free(pd);
	return 0;
}

// ---- asynchronous events ----

struct async {
	struct event e;
	struct ibv_async_event ev;
};

static void async_put(struct ibv_context *v, struct ibv_async_event ev)
{
	struct async *a = calloc(1, sizeof *a);

	a->ev = ev;
	events_put(&context_of(v)->async, &a->e);
}

void async_qp(struct ibv_qp *q, enum ibv_event_type type)
{
	async_put(q->context, (struct ibv_async_event){.element.qp = q, .event_type = type});
}

void async_cq(struct ibv_cq *cq, enum ibv_event_type type)
{
	async_put(cq->context, (struct ibv_async_event){.element.cq = cq, .event_type = type});
}

void async_srq(struct ibv_srq *srq, enum ibv_event_type type)
{
	async_put(srq->context, (struct ibv_async_event){.element.srq = srq, .event_type = type});
}

void async_fatal(void)
{
	for (struct context *c = contexts; c; c = c->next)
		async_put(&c->v.context, (struct ibv_async_event){.event_type = IBV_EVENT_DEVICE_FATAL});
}

static bool concerns(struct event *e, void *element)
{
	struct ibv_async_event *ev = &((struct async *)e)->ev;

	return ev->event_type != IBV_EVENT_DEVICE_FATAL && ev->element.qp == element;
}

static void drop(struct event *e) { free(e); }

// forget_async drops the events of an object that is being destroyed, as the kernel does.
void forget_async(struct context *c, void *element)
{
	events_drop(&c->async, concerns, drop, element);
}

// reported returns the count of events of an object that the program has taken.
static uint32_t *reported(struct ibv_async_event *ev)
{
	switch (ev->event_type) {
	case IBV_EVENT_QP_FATAL: case IBV_EVENT_QP_REQ_ERR: case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST: case IBV_EVENT_QP_LAST_WQE_REACHED:
		return &((struct qp *)ev->element.qp)->async_events;
	case IBV_EVENT_CQ_ERR:
		return &((struct cq *)ev->element.cq)->async_events;
	case IBV_EVENT_SRQ_ERR: case IBV_EVENT_SRQ_LIMIT_REACHED:
		return &((struct srq *)ev->element.srq)->async_events;
	default:
		return NULL;
	}
}

static void taken(struct event *e)
{
	uint32_t *n = reported(&((struct async *)e)->ev);

	if (n)
		++*n;
}

int ibv_get_async_event(struct ibv_context *v, struct ibv_async_event *ev)
{
	struct async *a = (struct async *)events_wait(&context_of(v)->async, v->async_fd, taken);

	if (!a)
		return -1;
	*ev = a->ev;
	free(a);
	return 0;
}

void ibv_ack_async_event(struct ibv_async_event *ev)
{
	uint32_t *n;

	pthread_mutex_lock(&hw.mu);
	n = reported(ev);
	if (n)
		--*n;
	pthread_cond_broadcast(&hw.acked);
	pthread_mutex_unlock(&hw.mu);
}
