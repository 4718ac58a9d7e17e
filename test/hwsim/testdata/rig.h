// Two connected queue pairs of one process, for the programs in this directory. These define
// SIZE, the bytes of memory at each end.
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { DEPTH = 8 };

// Two connected queue pairs, and the objects that they need. a sends, b is its peer.
static struct rig {
	struct ibv_context *ctx;
	struct ibv_pd *pd, *other_pd;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_qp *a, *b;
	struct ibv_mr *from, *to; // of memory
	uint8_t *mem;
} r;

static const char *name;
static int failures;

static void wrong(const char *what, long got, long want)
{
	printf("%s: %s is %ld, want %ld\n", name, what, got, want);
	failures++;
}

#define IS(what, want) do { long got_ = (what), want_ = (want); if (got_ != want_) wrong(#what, got_, want_); } while (0)
#define NEED(p) do { if (!(p)) { printf("%s: %s failed: %s\n", name, #p, strerror(errno)); exit(1); } } while (0)

static int to_init(struct ibv_qp *q)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE};

	return ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

// What the ends agree on before they connect.
static struct agreed { uint32_t psn; enum ibv_mtu mtu; } agreed = {0xfffffe, IBV_MTU_1024};

static int to_rtr(struct ibv_qp *q, uint32_t peer)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTR, .path_mtu = agreed.mtu, .dest_qp_num = peer, .rq_psn = agreed.psn,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 1, .ah_attr = {.is_global = 1, .port_num = 1}};

	ibv_query_gid(r.ctx, 1, 0, &a.ah_attr.grh.dgid);
	return ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static int to_rts(struct ibv_qp *q, int reads)
{
	// 4.096 µs × 2¹², and again once
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTS, .sq_psn = agreed.psn, .timeout = 12, .retry_cnt = 1, .rnr_retry = 0, .max_rd_atomic = reads};

	return ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static struct ibv_qp *new_qp(struct ibv_srq *srq)
{
	struct ibv_qp_init_attr i = {.send_cq = r.cq, .recv_cq = r.cq, .srq = srq, .qp_type = IBV_QPT_RC,
		.cap = {DEPTH, DEPTH, 1, 1, 64}};
	struct ibv_qp *q = ibv_create_qp(r.pd, &i);

	NEED(q);
	return q;
}

static void connect_both(void)
{
	to_init(r.a);
	to_init(r.b);
	NEED(!to_rtr(r.a, r.b->qp_num));
	NEED(!to_rtr(r.b, r.a->qp_num));
	NEED(!to_rts(r.a, 4));
	NEED(!to_rts(r.b, 4));
}

static void make(int cqe, int srq)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_srq_init_attr s = {.attr = {DEPTH, 1}};

	memset(&r, 0, sizeof r);
	NEED(list[0]);
	NEED(r.ctx = ibv_open_device(list[0]));
	ibv_free_device_list(list);
	NEED(r.pd = ibv_alloc_pd(r.ctx));
	NEED(r.other_pd = ibv_alloc_pd(r.ctx));
	NEED(r.cq = ibv_create_cq(r.ctx, cqe, NULL, NULL, 0));
	NEED(r.mem = calloc(2, SIZE));
	NEED(r.from = ibv_reg_mr(r.pd, r.mem, SIZE, IBV_ACCESS_LOCAL_WRITE));
	NEED(r.to = ibv_reg_mr(r.pd, r.mem + SIZE, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND));
	if (srq)
		NEED(r.srq = ibv_create_srq(r.pd, &s));
	r.a = new_qp(NULL);
	r.b = new_qp(r.srq);
	connect_both();
}

static void unmake(void)
{
	if (r.a)
		IS(ibv_destroy_qp(r.a), 0);
	if (r.b)
		IS(ibv_destroy_qp(r.b), 0);
	if (r.srq)
		IS(ibv_destroy_srq(r.srq), 0);
	if (r.from)
		IS(ibv_dereg_mr(r.from), 0);
	if (r.to)
		IS(ibv_dereg_mr(r.to), 0);
	IS(ibv_destroy_cq(r.cq), 0);
	IS(ibv_dealloc_pd(r.pd), 0);
	IS(ibv_dealloc_pd(r.other_pd), 0);
	ibv_close_device(r.ctx);
	free(r.mem);
}

static struct ibv_send_wr request(int op, uint32_t n)
{
	static struct ibv_sge sge;

	sge = (struct ibv_sge){(uintptr_t)r.mem, n, r.from->lkey};
	return (struct ibv_send_wr){.wr_id = op, .opcode = op, .send_flags = IBV_SEND_SIGNALED, .sg_list = &sge, .num_sge = 1,
		.wr.rdma = {(uintptr_t)r.mem + SIZE, r.to ? r.to->rkey : 0}};
}

static int post(struct ibv_qp *q, struct ibv_send_wr wr)
{
	struct ibv_send_wr *bad;

	return ibv_post_send(q, &wr, &bad);
}

static struct ibv_recv_wr receive(uint32_t n)
{
	static struct ibv_sge sge;

	sge = (struct ibv_sge){(uintptr_t)r.mem + SIZE, n, r.to->lkey};
	return (struct ibv_recv_wr){.wr_id = 100, .sg_list = &sge, .num_sge = 1};
}

static int post_recv(uint32_t n)
{
	struct ibv_recv_wr wr = receive(n), *bad;

	return r.srq ? ibv_post_srq_recv(r.srq, &wr, &bad) : ibv_post_recv(r.b, &wr, &bad);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

// completion returns the next completion of a queue pair.
static struct ibv_wc completion(struct ibv_qp *q)
{
	static struct ibv_wc kept[64];
	static int n;
	double end = now() + 30;

	if (!q) { // forget
		n = 0;
		return (struct ibv_wc){0};
	}
	while (now() < end) {
		for (int i = 0; i < n; i++)
			if (kept[i].qp_num == q->qp_num) {
				struct ibv_wc wc = kept[i];
				memmove(kept + i, kept + i + 1, (--n - i) * sizeof *kept);
				return wc;
			}
		n += ibv_poll_cq(r.cq, 64 - n, kept + n);
	}
	printf("%s: no completion\n", name);
	exit(1);
}

static int status(struct ibv_qp *q) { return completion(q).status; }
