//go:build cgo

// The shim: opens the libraries, calls them, and translates between their
// structs (abi_linux.h) and ours (shim_linux.h). It keeps no state but the
// table of functions and one word per memory window.

#define _GNU_SOURCE
#include "abi_linux.h"
#include "shim_linux.h"

#include <arpa/inet.h>
#include <elf.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

// ---- loading ----

// Weak, because musl has no dlvsym, and because a static link may do without
// them all: it must not load anything.
extern void *dlopen(const char *, int) __attribute__((weak));
extern void *dlsym(void *, const char *) __attribute__((weak));
extern void *dlvsym(void *, const char *, const char *) __attribute__((weak));
extern char *dlerror(void) __attribute__((weak));
#define LOAD_NOW 2 // RTLD_NOW

static struct {
	// libibverbs. The version matters: IBVERBS_1.0 has the same names with other structs.
	struct abi_device **(*get_device_list)(int *);
	void (*free_device_list)(struct abi_device **);
	uint64_t (*get_device_guid)(struct abi_device *);
	struct abi_context *(*open_device)(struct abi_device *);
	int (*close_device)(struct abi_context *);
	int (*query_device)(struct abi_context *, struct abi_device_attr *);
	int (*query_port)(struct abi_context *, uint8_t, struct abi_port_attr *);
	int (*query_gid)(struct abi_context *, uint8_t, int, void *);
	int (*get_async_event)(struct abi_context *, struct abi_async_event *);
	void (*ack_async_event)(struct abi_async_event *);
	struct abi_pd *(*alloc_pd)(struct abi_context *);
	int (*dealloc_pd)(struct abi_pd *);
	struct abi_mr *(*reg_mr)(struct abi_pd *, void *, size_t, int);
	int (*dereg_mr)(struct abi_mr *);
	struct abi_comp_channel *(*create_comp_channel)(struct abi_context *);
	int (*destroy_comp_channel)(struct abi_comp_channel *);
	struct abi_cq *(*create_cq)(struct abi_context *, int, void *, struct abi_comp_channel *, int);
	int (*destroy_cq)(struct abi_cq *);
	int (*get_cq_event)(struct abi_comp_channel *, struct abi_cq **, void **);
	void (*ack_cq_events)(struct abi_cq *, unsigned int);
	struct abi_qp *(*create_qp)(struct abi_pd *, struct abi_qp_init_attr *);
	int (*modify_qp)(struct abi_qp *, struct abi_qp_attr *, int);
	int (*query_qp)(struct abi_qp *, struct abi_qp_attr *, int, struct abi_qp_init_attr *);
	int (*destroy_qp)(struct abi_qp *);
	// librdmacm
	struct abi_event_channel *(*cm_create_event_channel)(void);
	void (*cm_destroy_event_channel)(struct abi_event_channel *);
	int (*cm_create_id)(struct abi_event_channel *, struct abi_cm_id **, void *, int);
	int (*cm_destroy_id)(struct abi_cm_id *);
	int (*cm_bind_addr)(struct abi_cm_id *, struct sockaddr *);
	int (*cm_resolve_addr)(struct abi_cm_id *, struct sockaddr *, struct sockaddr *, int);
	int (*cm_resolve_route)(struct abi_cm_id *, int);
	int (*cm_listen)(struct abi_cm_id *, int);
	int (*cm_connect)(struct abi_cm_id *, struct abi_conn_param *);
	int (*cm_accept)(struct abi_cm_id *, struct abi_conn_param *);
	int (*cm_reject)(struct abi_cm_id *, const void *, uint8_t);
	int (*cm_disconnect)(struct abi_cm_id *);
	int (*cm_notify)(struct abi_cm_id *, int event);
	int (*cm_get_event)(struct abi_event_channel *, struct abi_cm_event **);
	int (*cm_ack_event)(struct abi_cm_event *);
	int (*cm_set_option)(struct abi_cm_id *, int, int, void *, size_t);
	// optional
	int (*is_fork_initialized)(void);
	struct abi_mr *(*reg_mr_iova2)(struct abi_pd *, void *, size_t, uint64_t, unsigned int);
	int (*get_device_index)(struct abi_device *);
	long (*query_gid_table)(struct abi_context *, struct abi_gid_entry *, size_t, uint32_t, size_t);
	int (*query_ece)(struct abi_qp *, struct abi_ece *);
	int (*set_ece)(struct abi_qp *, struct abi_ece *);
	int (*cm_get_remote_ece)(struct abi_cm_id *, struct abi_ece *);
	int (*cm_set_local_ece)(struct abi_cm_id *, struct abi_ece *); // the last of the four to come
} f;

enum { VERBS, CM, LIBS };

static const struct {
	void *slot;
	int lib, optional;
	const char *name, *version;
} symbols[] = {
#define V(slot) {&f.slot, VERBS, 0, "ibv_" #slot, "IBVERBS_1.1"}
#define V0(slot) {&f.slot, VERBS, 0, "ibv_" #slot, "IBVERBS_1.0"} // has one version only
#define C(slot) {&f.cm_##slot, CM, 0, "rdma_" #slot, "RDMACM_1.0"}
	V(get_device_list), V(free_device_list), V(get_device_guid), V(open_device), V(close_device),
	V(query_device), V(query_port), V(query_gid), V(get_async_event), V(ack_async_event),
	V(alloc_pd), V(dealloc_pd), V(reg_mr), V(dereg_mr),
	V0(create_comp_channel), V0(destroy_comp_channel), V(create_cq), V(destroy_cq), V(get_cq_event), V(ack_cq_events),
	V(create_qp), V(modify_qp), V(query_qp), V(destroy_qp),
	C(create_event_channel), C(destroy_event_channel), C(create_id), C(destroy_id), C(bind_addr),
	C(resolve_addr), C(resolve_route), C(listen), C(connect), C(accept), C(reject),
	C(disconnect), C(notify), C(set_option),
	{&f.cm_get_event, CM, 0, "rdma_get_cm_event", "RDMACM_1.0"},
	{&f.cm_ack_event, CM, 0, "rdma_ack_cm_event", "RDMACM_1.0"},
	{&f.is_fork_initialized, VERBS, 1, "ibv_is_fork_initialized", "IBVERBS_1.13"},
	{&f.reg_mr_iova2, VERBS, 1, "ibv_reg_mr_iova2", "IBVERBS_1.8"},
	{&f.get_device_index, VERBS, 1, "ibv_get_device_index", "IBVERBS_1.9"},
	{&f.query_gid_table, VERBS, 1, "_ibv_query_gid_table", "IBVERBS_1.11"},
	{&f.query_ece, VERBS, 1, "ibv_query_ece", "IBVERBS_1.10"},
	{&f.set_ece, VERBS, 1, "ibv_set_ece", "IBVERBS_1.10"},
	{&f.cm_get_remote_ece, CM, 1, "rdma_get_remote_ece", "RDMACM_1.3"},
	{&f.cm_set_local_ece, CM, 1, "rdma_set_local_ece", "RDMACM_1.3"},
};

// A dynamically linked program names its dynamic loader in PT_INTERP.
static int is_static(void)
{
	const ElfW(Phdr) *ph = (const void *)getauxval(AT_PHDR);
	unsigned long n = getauxval(AT_PHNUM);

	for (unsigned long i = 0; ph && i < n; i++)
		if (ph[i].p_type == PT_INTERP)
			return 0;
	return 1;
}

// Otherwise nothing of a device that was removed can be destroyed: the kernel has done so,
// and answers with EIO (rdma-core, libibverbs/driver.h: verbs_is_destroy_err). Set before
// there are threads, which may read the environment.
__attribute__((constructor)) static void allow_destroy(void)
{
	setenv("RDMAV_ALLOW_DISASSOC_DESTROY", "1", 0);
}

const char *san_load(void)
{
	static const char *const names[LIBS] = {"libibverbs.so.1", "librdmacm.so.1"};
	static char why[512];
	void *libs[LIBS];

	if (is_static())
		return "the program is statically linked, so it cannot load libibverbs.so.1";
	if (!dlopen || !dlsym || !dlerror)
		return "this C library has no dlopen to load libibverbs.so.1 with";
	for (int i = 0; i < LIBS; i++) {
		libs[i] = dlopen(names[i], LOAD_NOW);
		if (!libs[i]) {
			snprintf(why, sizeof why, "%s (is rdma-core installed?)", dlerror());
			return why;
		}
	}
	for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
		void *p = dlvsym ? dlvsym(libs[symbols[i].lib], symbols[i].name, symbols[i].version)
		                 : dlsym(libs[symbols[i].lib], symbols[i].name);
		if (!p && !symbols[i].optional) {
			snprintf(why, sizeof why, "%s has no %s@%s (is rdma-core too old?)",
			         names[symbols[i].lib], symbols[i].name, symbols[i].version);
			return why;
		}
		memcpy(symbols[i].slot, &p, sizeof p);
	}
	return NULL;
}

int san_fork_safe(void)
{
	return f.is_fork_initialized && f.is_fork_initialized() == 2; // IBV_FORK_UNNEEDED
}

// ---- errors ----

// The libraries report how a call failed in four ways: errno with -1 or NULL, a
// positive errno, and, from siw's post_send, a negative errno. All of them end
// here as a positive one.
static int failed(int rc)
{
	if (rc == 0)
		return 0;
	if (rc == -1 && errno)
		return errno;
	return rc < 0 ? -rc : rc;
}

static int no_object(void)
{
	return errno ? errno : ENOMEM;
}

// A signal may interrupt any command on its way into the kernel; nothing has
// been done then, so it is sent again.
#define CALL(expr) ({ int rc_; do { errno = 0; rc_ = failed(expr); } while (rc_ == EINTR); rc_; })
#define MAKE(p, expr) ({ do { errno = 0; (p) = (expr); } while (!(p) && errno == EINTR); (p) ? 0 : no_object(); })

static void *token_pointer(uint64_t token) { return (void *)(uintptr_t)token; }
static uint64_t pointer_token(void *p) { return (uint64_t)(uintptr_t)p; }

// ---- devices ----

static void describe(struct abi_device *d, struct san_device *out)
{
	memset(out, 0, sizeof *out);
	snprintf(out->name, sizeof out->name, "%s", d->name);
	snprintf(out->sysfs, sizeof out->sysfs, "%s", d->ibdev_path);
	out->guid = be64toh(f.get_device_guid(d));
	out->transport = d->transport_type;
	out->index = f.get_device_index ? f.get_device_index(d) : -1;
}

int san_devices(struct san_device *out, int max, int *n)
{
	int count = 0, rc;
	struct abi_device **list;

	*n = 0;
	rc = MAKE(list, f.get_device_list(&count));
	if (rc)
		return rc == ENOSYS ? 0 : rc; // no module ib_uverbs: no devices
	for (int i = 0; i < count && i < max; i++)
		describe(list[i], &out[i]);
	*n = count;
	f.free_device_list(list);
	return 0;
}

int san_open(const char *name, san_h *ctx)
{
	int count = 0, rc;
	struct abi_device **list;
	struct abi_context *c = NULL;

	*ctx = 0;
	rc = MAKE(list, f.get_device_list(&count));
	if (rc)
		return rc == ENOSYS ? ENODEV : rc; // no module ib_uverbs
	rc = ENODEV;
	for (int i = 0; i < count; i++) {
		if (strcmp(list[i]->name, name) == 0) {
			rc = MAKE(c, f.open_device(list[i]));
			break;
		}
	}
	f.free_device_list(list);
	*ctx = (san_h)c;
	return rc;
}

int san_close(san_h ctx)
{
	return CALL(f.close_device((struct abi_context *)ctx));
}

void san_context(san_h ctx, struct san_device *out, int *async_fd, int *vectors)
{
	struct abi_context *c = (void *)ctx;

	describe(c->device, out);
	*async_fd = c->async_fd;
	*vectors = c->num_comp_vectors;
}

int san_query_device(san_h ctx, struct san_caps *out)
{
	struct abi_device_attr a;
	int rc;

	memset(&a, 0, sizeof a);
	memset(out, 0, sizeof *out);
	rc = CALL(f.query_device((struct abi_context *)ctx, &a));
	if (rc)
		return rc;
	memcpy(out->firmware, a.fw_ver, sizeof out->firmware);
	out->max_mr_size = a.max_mr_size;
	out->vendor_id = a.vendor_id;
	out->flags = a.device_cap_flags;
	out->max_qp = a.max_qp;
	out->max_qp_wr = a.max_qp_wr;
	out->max_sge = a.max_sge;
	out->max_sge_rd = a.max_sge_rd;
	out->max_cqe = a.max_cqe;
	out->max_mr = a.max_mr;
	out->max_qp_rd_atomic = a.max_qp_rd_atom;
	out->max_qp_init_rd_atomic = a.max_qp_init_rd_atom;
	out->max_mw = a.max_mw;
	out->ports = a.phys_port_cnt;
	return 0;
}

int san_query_port(san_h ctx, int port, struct san_port *out)
{
	// Room to spare, should a library fill more than the struct of the old entry point.
	union { struct abi_port_attr a; char room[256]; } u;
	int rc;

	memset(&u, 0, sizeof u);
	memset(out, 0, sizeof *out);
	rc = CALL(f.query_port((struct abi_context *)ctx, port, &u.a));
	if (rc)
		return rc;
	out->state = u.a.state;
	out->active_mtu = u.a.active_mtu;
	out->gids = u.a.gid_tbl_len;
	out->max_msg_sz = u.a.max_msg_sz;
	out->lid = u.a.lid;
	out->link_layer = u.a.link_layer;
	out->flags = u.a.flags;
	return 0;
}

// Fills the valid entries of port's table; index -1 in type means unknown.
int san_query_gids(san_h ctx, int port, struct san_gid *out, int max, int *n)
{
	struct abi_context *c = (void *)ctx;

	*n = 0;
	if (f.query_gid_table) {
		struct abi_gid_entry *e = calloc(max, sizeof *e);
		long got;
		int rc;

		if (!e)
			return ENOMEM;
		do {
			got = f.query_gid_table(c, e, max, 0, sizeof *e);
		} while (got == -EINTR);
		rc = got < 0 ? (int)-got : 0;
		for (long i = 0; i < got; i++) {
			if (e[i].port_num != (uint32_t)port)
				continue;
			struct san_gid *g = &out[(*n)++];
			memcpy(g->gid, e[i].gid, sizeof g->gid);
			g->index = e[i].gid_index;
			g->type = e[i].gid_type;
			g->netdev = e[i].ndev_ifindex;
		}
		free(e);
		return rc;
	}
	for (int i = 0; i < max; i++) {
		static const uint8_t none[16];
		uint8_t gid[16] __attribute__((aligned(8)));

		if (CALL(f.query_gid(c, port, i, gid)) || memcmp(gid, none, sizeof gid) == 0)
			continue;
		struct san_gid *g = &out[(*n)++];
		memcpy(g->gid, gid, sizeof gid);
		g->index = i;
		g->type = UINT32_MAX;
	}
	return 0;
}

int san_get_async(san_h ctx, struct san_async *out)
{
	struct abi_async_event ev;
	int rc = CALL(f.get_async_event((struct abi_context *)ctx, &ev));

	if (rc)
		return rc;
	memset(out, 0, sizeof *out);
	out->type = ev.event_type;
	// The object lives until its events are acknowledged.
	switch (ev.event_type) {
	case 0: // IBV_EVENT_CQ_ERR
		out->token = pointer_token(ev.element.cq->cq_context);
		break;
	case 1: case 2: case 3: case 4: case 5: case 6: case 7: // IBV_EVENT_QP_*, COMM_EST, SQ_DRAINED, PATH_*
		out->token = pointer_token(ev.element.qp->qp_context);
		break;
	}
	f.ack_async_event(&ev);
	return 0;
}

int san_pollable(int fd, int *dup)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return errno;
	*dup = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	return *dup < 0 ? errno : 0;
}

// ---- protection domains, memory ----

int san_alloc_pd(san_h ctx, san_h *pd)
{
	struct abi_pd *p;
	int rc = MAKE(p, f.alloc_pd((struct abi_context *)ctx));

	*pd = (san_h)p;
	return rc;
}

int san_dealloc_pd(san_h pd)
{
	return CALL(f.dealloc_pd((struct abi_pd *)pd));
}

int san_reg_mr(san_h pd, uintptr_t addr, size_t length, uint32_t access, san_h *mr, uint32_t *lkey, uint32_t *rkey)
{
	// enum ib_uverbs_access_flags. Those in the range go to an entry point that takes out
	// what the kernel does not know, which the old one sends on, for EINVAL.
	const uint32_t optional = 0x3ff00000;
	struct abi_mr *m;
	int rc;

	if (access & optional && f.reg_mr_iova2)
		rc = MAKE(m, f.reg_mr_iova2((struct abi_pd *)pd, (void *)addr, length, addr, access));
	else
		rc = MAKE(m, f.reg_mr((struct abi_pd *)pd, (void *)addr, length, access & ~optional));
	*mr = (san_h)m;
	if (m) {
		*lkey = m->lkey;
		*rkey = m->rkey;
	}
	return rc;
}

int san_dereg_mr(san_h mr)
{
	return CALL(f.dereg_mr((struct abi_mr *)mr));
}

// A memory window and whether it is bound, as far as what was posted shows.
// Invalidating an unbound window panics some kernels (rxe, 6.12), so it must
// not be possible.
struct window {
	struct abi_mw *mw;
	int bound;
};

int san_alloc_mw(san_h pd, san_h *mw)
{
	struct abi_pd *p = (void *)pd;
	struct window *w;
	int rc;

	*mw = 0;
	if (!p->context->ops.alloc_mw)
		return EOPNOTSUPP;
	w = calloc(1, sizeof *w);
	if (!w)
		return ENOMEM;
	rc = MAKE(w->mw, p->context->ops.alloc_mw(p, 2)); // IBV_MW_TYPE_2
	if (rc) {
		free(w);
		return rc;
	}
	*mw = (san_h)w;
	return 0;
}

int san_dealloc_mw(san_h mw)
{
	struct window *w = (void *)mw;
	int rc = CALL(w->mw->context->ops.dealloc_mw(w->mw));

	if (!rc)
		free(w);
	return rc;
}

uint32_t san_mw_key(san_h mw) { return ((struct window *)mw)->mw->rkey; }

// ---- completion ----

int san_create_channel(san_h ctx, san_h *ch, int *fd)
{
	struct abi_comp_channel *c;
	int rc = MAKE(c, f.create_comp_channel((struct abi_context *)ctx));

	*ch = (san_h)c;
	*fd = c ? c->fd : -1;
	return rc;
}

int san_destroy_channel(san_h ch)
{
	return CALL(f.destroy_comp_channel((struct abi_comp_channel *)ch));
}

int san_get_cq_events(san_h ch, uint64_t *tokens, int max, int *n)
{
	for (*n = 0; *n < max; ++*n) {
		struct abi_cq *cq;
		void *token;
		int rc = CALL(f.get_cq_event((struct abi_comp_channel *)ch, &cq, &token));

		if (rc)
			return *n ? 0 : rc;
		tokens[*n] = pointer_token(token);
		// At once: ibv_destroy_cq waits for the acknowledgement.
		f.ack_cq_events(cq, 1);
	}
	return 0;
}

int san_create_cq(san_h ctx, int cqe, uint64_t token, san_h ch, int vector, san_h *cq)
{
	struct abi_cq *c;
	int rc = MAKE(c, f.create_cq((struct abi_context *)ctx, cqe, token_pointer(token),
	                             (struct abi_comp_channel *)ch, vector));

	*cq = (san_h)c;
	return rc;
}

int san_destroy_cq(san_h cq)
{
	return CALL(f.destroy_cq((struct abi_cq *)cq));
}

int san_req_notify(san_h h)
{
	struct abi_cq *cq = (void *)h;

	if (!cq)
		return EBADF;
	return CALL(cq->context->ops.req_notify_cq(cq, 0)); // of any completion, not of solicited ones alone
}

// Completions are not translated: the two have one layout.
#define SAME(field, abi) _Static_assert(offsetof(struct san_wc, field) == offsetof(struct abi_wc, abi), #abi)
SAME(id, wr_id);
SAME(status, status);
SAME(opcode, opcode);
SAME(vendor_err, vendor_err);
SAME(byte_len, byte_len);
SAME(imm, imm_data);
SAME(qp_num, qp_num);
SAME(flags, wc_flags);
_Static_assert(sizeof(struct san_wc) == sizeof(struct abi_wc), "abi_wc");

int san_poll_cq(san_h h, struct san_wc *out, int n, int times)
{
	struct abi_cq *cq = (void *)h;
	int got;

	if (!cq)
		return -EBADF;
	do {
		errno = 0;
		got = cq->context->ops.poll_cq(cq, n, (struct abi_wc *)out);
	} while (got == 0 ? --times > 0 : got < 0 && failed(got) == EINTR);
	return got < 0 ? -failed(got) : got;
}

#define BATCH 32 // work requests translated at a time, on the stack

// ---- receiving ----

static void link_recv(struct abi_recv_wr *wr, const struct san_recv_wr *in, int n)
{
	for (int i = 0; i < n; i++) {
		wr[i] = (struct abi_recv_wr){
			.wr_id = in[i].id,
			.next = i + 1 < n ? &wr[i + 1] : NULL,
			.sg_list = (struct abi_sge *)&in[i].sge, // the same layout; only read
			.num_sge = in[i].sge.length > 0,
		};
	}
}

struct san_posted san_post_recv(san_h h, const struct san_recv_wr *in, int n)
{
	struct abi_qp *qp = (void *)h;
	struct abi_recv_wr wr[BATCH], *bad;
	int posted = 0;

	if (!qp)
		return (struct san_posted){0, EBADF};
	while (posted < n) {
		int k = n - posted < BATCH ? n - posted : BATCH, rc;

		link_recv(wr, in + posted, k);
		bad = NULL;
		errno = 0;
		rc = failed(qp->context->ops.post_recv(qp, wr, &bad));
		if (rc)
			k = bad >= wr && bad < wr + k ? (int)(bad - wr) : 0;
		posted += k;
		if (rc && rc != EINTR)
			return (struct san_posted){posted, rc};
	}
	return (struct san_posted){posted, 0};
}

// ---- queue pairs ----

int san_create_qp(san_h pd, uint64_t token, san_h send_cq, san_h recv_cq,
                  struct san_qp_cap *cap, san_h *qp, uint32_t *num)
{
	struct abi_qp_init_attr a = {
		.qp_context = token_pointer(token),
		.send_cq = (struct abi_cq *)send_cq,
		.recv_cq = (struct abi_cq *)recv_cq,
		.cap = {cap->send_wr, cap->recv_wr, 1, 1, cap->inline_data},
		.qp_type = 2, // IBV_QPT_RC
	};
	struct abi_qp *q;
	int rc = MAKE(q, f.create_qp((struct abi_pd *)pd, &a));

	*qp = (san_h)q;
	*num = q ? q->qp_num : 0;
	if (q)
		*cap = (struct san_qp_cap){a.cap.max_send_wr, a.cap.max_recv_wr, a.cap.max_inline_data};
	return rc;
}

int san_destroy_qp(san_h qp) { return CALL(f.destroy_qp((struct abi_qp *)qp)); }

// What rdma_create_qp does with the queue pair that it makes (librdmacm/cma.c: init_ece,
// ucma_init_conn_qp, set_local_ece): the two ends' libraries agree on extensions, and it goes to
// INIT. Which partition it is of, ucma_modify_qp_rtr sets ahead of RTR.
int san_cm_use_qp(san_h id, san_h qp)
{
	const struct san_qp_attr init = {.state = 1, .port = ((struct abi_cm_id *)id)->port_num, .access = 2 | 4}; // IBV_ACCESS_REMOTE_*
	struct abi_cm_id *i = (void *)id;
	struct abi_qp *q = (void *)qp;
	struct abi_ece own = {0}, peer = {0};
	int rc;

	if (f.cm_set_local_ece && !f.query_ece(q, &own) && !f.cm_get_remote_ece(i, &peer) && peer.vendor_id) {
		if (peer.vendor_id != own.vendor_id)
			peer = (struct abi_ece){own.vendor_id};
		f.set_ece(q, &peer);
	}
	rc = san_modify_qp(qp, &init, 1 << 0 | 1 << 3 | 1 << 4 | 1 << 5); // IBV_QP_STATE, ACCESS_FLAGS, PKEY_INDEX, PORT
	if (rc)
		return rc;
	if (peer.vendor_id)
		f.query_ece(q, &own);
	if (own.vendor_id)
		f.cm_set_local_ece(i, &own);
	i->qp = q;
	return 0;
}

// The first half of rdma_destroy_qp; for queues that it did not make itself the
// rest is ibv_destroy_qp.
void san_cm_forget_qp(san_h id) { ((struct abi_cm_id *)id)->qp = NULL; }

int san_modify_qp(san_h qp, const struct san_qp_attr *in, uint32_t mask)
{
	struct abi_qp_attr a;

	if (!qp)
		return EBADF;
	memset(&a, 0, sizeof a);
	a.qp_state = in->state;
	a.path_mtu = in->path_mtu;
	a.rq_psn = in->rq_psn;
	a.sq_psn = in->sq_psn;
	a.dest_qp_num = in->dest_qpn;
	a.qp_access_flags = in->access;
	a.ah_attr.is_global = in->global;
	memcpy(a.ah_attr.grh.dgid, in->dgid, sizeof in->dgid);
	a.ah_attr.grh.sgid_index = in->sgid_index;
	a.ah_attr.grh.hop_limit = in->hop_limit;
	a.ah_attr.grh.traffic_class = in->traffic_class;
	a.ah_attr.sl = in->sl;
	a.ah_attr.dlid = in->dlid;
	a.ah_attr.port_num = in->port;
	a.port_num = in->port;
	a.pkey_index = in->pkey_index;
	a.max_rd_atomic = in->max_rd_atomic;
	a.max_dest_rd_atomic = in->max_dest_rd_atomic;
	a.min_rnr_timer = in->min_rnr_timer;
	a.timeout = in->timeout;
	a.retry_cnt = in->retry_count;
	a.rnr_retry = in->rnr_retry;
	return CALL(f.modify_qp((struct abi_qp *)qp, &a, mask));
}

int san_query_qp(san_h qp, struct san_qp_attr *out, uint32_t mask)
{
	struct abi_qp_attr a;
	struct abi_qp_init_attr i;
	int rc;

	if (!qp)
		return EBADF;
	memset(&a, 0, sizeof a);
	memset(&i, 0, sizeof i);
	memset(out, 0, sizeof *out);
	rc = CALL(f.query_qp((struct abi_qp *)qp, &a, mask, &i));
	if (rc)
		return rc;
	out->state = a.qp_state;
	out->path_mtu = a.path_mtu;
	out->rq_psn = a.rq_psn;
	out->sq_psn = a.sq_psn;
	out->dest_qpn = a.dest_qp_num;
	out->access = a.qp_access_flags;
	out->global = a.ah_attr.is_global;
	memcpy(out->dgid, a.ah_attr.grh.dgid, sizeof out->dgid);
	out->sgid_index = a.ah_attr.grh.sgid_index;
	out->hop_limit = a.ah_attr.grh.hop_limit;
	out->traffic_class = a.ah_attr.grh.traffic_class;
	out->sl = a.ah_attr.sl;
	out->dlid = a.ah_attr.dlid;
	out->port = a.port_num;
	out->pkey_index = a.pkey_index;
	out->max_rd_atomic = a.max_rd_atomic;
	out->max_dest_rd_atomic = a.max_dest_rd_atomic;
	out->min_rnr_timer = a.min_rnr_timer;
	out->timeout = a.timeout;
	out->retry_count = a.retry_cnt;
	out->rnr_retry = a.rnr_retry;
	return 0;
}

enum { WR_LOCAL_INV = 7, WR_BIND_MW = 8, WR_SEND_WITH_INV = 9 };

static int link_send(struct abi_send_wr *wr, const struct san_send_wr *in, int n)
{
	for (int i = 0; i < n; i++) {
		const struct san_send_wr *s = &in[i];
		struct window *w = (void *)(uintptr_t)s->mw;

		if (s->opcode >= WR_LOCAL_INV) // libraries check more of these
			wr[i] = (struct abi_send_wr){0};
		wr[i].wr_id = s->id;
		wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
		wr[i].sg_list = (struct abi_sge *)&s->sge; // the same layout; only read
		wr[i].num_sge = s->sge.length > 0;
		wr[i].opcode = s->opcode;
		wr[i].send_flags = s->flags;
		switch (s->opcode) {
		case WR_SEND_WITH_INV:
			wr[i].imm_data = s->inv_key;
			break;
		case WR_LOCAL_INV:
			if (!w)
				return EINVAL;
			wr[i].imm_data = s->inv_key;
			break;
		case WR_BIND_MW:
			if (!w || !s->mr)
				return EINVAL;
			wr[i].bind_mw.mw = w->mw;
			wr[i].bind_mw.rkey = s->remote_key;
			wr[i].bind_mw.bind_info = (struct abi_mw_bind_info){
				(struct abi_mr *)(uintptr_t)s->mr, s->remote_addr, s->bind_length, s->bind_access};
			break;
		default:
			wr[i].imm_data = 0;
			wr[i].wr.rdma.remote_addr = s->remote_addr;
			wr[i].wr.rdma.rkey = s->remote_key;
		}
	}
	return 0;
}

// Whether each invalidation among the n requests finds its window bound under
// that key. Goes by the order of the list: {bind, invalidate} is right,
// {invalidate, invalidate} is not.
static int check_windows(const struct san_send_wr *in, int n)
{
	for (int i = 0; i < n; i++) {
		struct window *w = (void *)(uintptr_t)in[i].mw;
		int bound, j;

		if (in[i].opcode != WR_LOCAL_INV || !w)
			continue;
		bound = w->bound && w->mw->rkey == in[i].inv_key;
		for (j = 0; j < i; j++) {
			if (in[j].mw != in[i].mw)
				continue;
			if (in[j].opcode == WR_BIND_MW)
				bound = in[j].remote_key == in[i].inv_key;
			else if (in[j].opcode == WR_LOCAL_INV)
				bound = 0;
		}
		if (!bound)
			return 0;
	}
	return 1;
}

// After posting: the library needs the new key in the window before the next bind.
static void note_windows(const struct san_send_wr *in, int n)
{
	for (int i = 0; i < n; i++) {
		struct window *w = (void *)(uintptr_t)in[i].mw;

		if (in[i].opcode == WR_BIND_MW) {
			w->mw->rkey = in[i].remote_key;
			w->bound = 1;
		} else if (in[i].opcode == WR_LOCAL_INV) {
			w->bound = 0;
		}
	}
}

struct san_posted san_post_send(san_h h, const struct san_send_wr *in, int n)
{
	struct abi_qp *qp = (void *)h;
	struct abi_send_wr wr[BATCH], *bad;
	int posted = 0;

	if (!qp)
		return (struct san_posted){0, EBADF};
	while (posted < n) {
		const struct san_send_wr *s = in + posted;
		int k = n - posted < BATCH ? n - posted : BATCH, rc;

		if (!check_windows(s, k))
			return (struct san_posted){posted, EINVAL};
		rc = link_send(wr, s, k);
		if (rc)
			return (struct san_posted){posted, rc};
		bad = NULL;
		errno = 0;
		rc = failed(qp->context->ops.post_send(qp, wr, &bad));
		if (rc && !bad) // all were taken and the doorbell failed: not to be posted again
			rc = EIO;
		else if (rc)
			k = bad >= wr && bad < wr + k ? (int)(bad - wr) : 0;
		note_windows(s, k);
		posted += k;
		if (rc && rc != EINTR)
			return (struct san_posted){posted, rc};
	}
	return (struct san_posted){posted, 0};
}

// ---- connection manager ----

enum { PS_TCP = 0x0106, EVENT_CONNECT_REQUEST = 4, EVENT_CONNECT_RESPONSE = 5, EVENT_REJECTED = 8, EVENT_ESTABLISHED = 9 };

int san_cm_create_channel(san_h *ch, int *fd)
{
	struct abi_event_channel *c;
	int rc = MAKE(c, f.cm_create_event_channel());

	*ch = (san_h)c;
	*fd = c ? c->fd : -1;
	return rc;
}

void san_cm_destroy_channel(san_h ch)
{
	f.cm_destroy_event_channel((struct abi_event_channel *)ch);
}

int san_cm_get_event(san_h ch, uint64_t child_token, struct san_cm_event *out)
{
	struct abi_cm_event *ev;
	int rc = CALL(f.cm_get_event((struct abi_event_channel *)ch, &ev));
	int own = errno;

	if (rc)
		return rc;
	memset(out, 0, sizeof *out);
	out->type = ev->event;
	// -1: a step that librdmacm itself took within the call has failed, and
	// errno has the reason (ucma_process_conn_resp).
	out->status = ev->status == -1 ? -own : ev->status;
	out->token = pointer_token(ev->id->context);
	switch (ev->event) {
	case EVENT_CONNECT_REQUEST:
		// The new id inherited the listener's token.
		out->listen_token = out->token;
		out->token = child_token;
		out->child = (san_h)ev->id;
		ev->id->context = token_pointer(child_token);
		// fall through
	case EVENT_CONNECT_RESPONSE:
	case EVENT_REJECTED:
	case EVENT_ESTABLISHED:
		out->param.qp_num = ev->conn.qp_num;
		out->param.responder_resources = ev->conn.responder_resources;
		out->param.initiator_depth = ev->conn.initiator_depth;
		out->param.retry_count = ev->conn.retry_count;
		out->param.rnr_retry_count = ev->conn.rnr_retry_count;
		if (ev->conn.private_data && ev->conn.private_data_len) {
			out->param.private_len = ev->conn.private_data_len;
			memcpy(out->param.private_data, ev->conn.private_data, ev->conn.private_data_len);
		}
	}
	// At once, everything is copied: rdma_destroy_id waits for the acknowledgement.
	f.cm_ack_event(ev);
	return 0;
}

int san_cm_create_id(san_h ch, uint64_t token, san_h *id)
{
	struct abi_cm_id *i = NULL;
	int rc = CALL(f.cm_create_id((struct abi_event_channel *)ch, &i, token_pointer(token), PS_TCP));

	*id = (san_h)i;
	return rc;
}

int san_cm_destroy_id(san_h id)
{
	return CALL(f.cm_destroy_id((struct abi_cm_id *)id));
}

static struct sockaddr *to_sockaddr(const struct san_addr *a, struct sockaddr_storage *s)
{
	memset(s, 0, sizeof *s);
	if (a->family == 4) {
		struct sockaddr_in *in = (void *)s;
		in->sin_family = AF_INET;
		in->sin_port = htons(a->port);
		memcpy(&in->sin_addr, a->ip, 4);
	} else if (a->family == 6) {
		struct sockaddr_in6 *in6 = (void *)s;
		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons(a->port);
		in6->sin6_scope_id = a->scope;
		memcpy(&in6->sin6_addr, a->ip, 16);
	} else {
		return NULL;
	}
	return (struct sockaddr *)s;
}

static void from_sockaddr(const struct sockaddr_storage *s, struct san_addr *a)
{
	memset(a, 0, sizeof *a);
	if (s->ss_family == AF_INET) {
		const struct sockaddr_in *in = (const void *)s;
		a->family = 4;
		a->port = ntohs(in->sin_port);
		memcpy(a->ip, &in->sin_addr, 4);
	} else if (s->ss_family == AF_INET6) {
		const struct sockaddr_in6 *in6 = (const void *)s;
		a->family = 6;
		a->port = ntohs(in6->sin6_port);
		a->scope = in6->sin6_scope_id;
		memcpy(a->ip, &in6->sin6_addr, 16);
	}
}

int san_cm_bind(san_h id, const struct san_addr *addr)
{
	struct sockaddr_storage s;

	return CALL(f.cm_bind_addr((struct abi_cm_id *)id, to_sockaddr(addr, &s)));
}

int san_cm_resolve_addr(san_h id, const struct san_addr *src, const struct san_addr *dst, int timeout_ms)
{
	struct sockaddr_storage s, d;

	return CALL(f.cm_resolve_addr((struct abi_cm_id *)id, to_sockaddr(src, &s), to_sockaddr(dst, &d), timeout_ms));
}

int san_cm_resolve_route(san_h id, int timeout_ms)
{
	return CALL(f.cm_resolve_route((struct abi_cm_id *)id, timeout_ms));
}

int san_cm_listen(san_h id, int backlog)
{
	return CALL(f.cm_listen((struct abi_cm_id *)id, backlog));
}

static struct abi_conn_param conn_param(const struct san_conn_param *p)
{
	return (struct abi_conn_param){
		.private_data = p->private_len ? p->private_data : NULL,
		.private_data_len = p->private_len,
		.responder_resources = p->responder_resources,
		.initiator_depth = p->initiator_depth,
		.retry_count = p->retry_count,
		.rnr_retry_count = p->rnr_retry_count,
		.qp_num = p->qp_num,
	};
}

// siw connects its TCP socket within the call. A signal would interrupt that and
// make the kernel start the call again (ERESTARTSYS), from the same port, which
// the first attempt then holds still: EADDRNOTAVAIL, or ECONNREFUSED once the
// listener has seen that one go. Go's runtime signals its threads at any time.
int san_cm_connect(san_h id, const struct san_conn_param *p)
{
	static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS};
	struct abi_conn_param c = conn_param(p);
	sigset_t all, before;
	int err;

	sigfillset(&all);
	for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
		sigdelset(&all, faults[i]);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	err = CALL(f.cm_connect((struct abi_cm_id *)id, &c));
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return err;
}

int san_cm_accept(san_h id, const struct san_conn_param *p)
{
	struct abi_conn_param c = conn_param(p);

	return CALL(f.cm_accept((struct abi_cm_id *)id, &c));
}

int san_cm_reject(san_h id, const uint8_t *data, int len)
{
	return CALL(f.cm_reject((struct abi_cm_id *)id, len ? data : NULL, len));
}

int san_cm_disconnect(san_h id)
{
	return CALL(f.cm_disconnect((struct abi_cm_id *)id));
}

int san_cm_notify(san_h id)
{
	return CALL(f.cm_notify((struct abi_cm_id *)id, 4)); // IBV_EVENT_COMM_EST
}

int san_cm_set_option(san_h id, int option, const void *value, size_t len)
{
	return CALL(f.cm_set_option((struct abi_cm_id *)id, 0, option, (void *)value, len)); // RDMA_OPTION_ID
}

void san_cm_info(san_h h, san_h *ctx, struct san_addr *src, struct san_addr *dst)
{
	struct abi_cm_id *id = (void *)h;

	*ctx = (san_h)id->verbs;
	from_sockaddr(&id->route.src, src);
	from_sockaddr(&id->route.dst, dst);
}
