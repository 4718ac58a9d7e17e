// Work requests by ibv_wr_start, ibv_wr_send and so on (ibv_wr_post(3)): they are collected
// here, and ibv_wr_complete posts them.
#include "hwsim.h"

struct part {
	struct ibv_send_wr wr;
	struct ibv_sge *sge;
	uint8_t *inlined;
};

struct builder {
	struct part *parts; // as many as the send queue has slots
	uint32_t n;
	int failed;
};

static struct builder *of(struct ibv_qp_ex *q) { return ((struct qp *)q)->builder; }

static void clear(struct builder *b)
{
	while (b->n) {
		struct part *p = &b->parts[--b->n];

		free(p->sge);
		free(p->inlined);
	}
	b->failed = 0;
}

void builder_free(struct builder *b)
{
	if (!b)
		return;
	clear(b);
	free(b->parts);
	free(b);
}

static void begin(struct ibv_qp_ex *q) { clear(of(q)); }
static void stop(struct ibv_qp_ex *q) { clear(of(q)); }

static int complete(struct ibv_qp_ex *q)
{
	struct builder *b = of(q);
	struct ibv_send_wr *bad;
	int failed = b->failed;

	for (uint32_t i = 0; i < b->n; i++)
		b->parts[i].wr.next = i + 1 < b->n ? &b->parts[i + 1].wr : NULL;
	if (!failed && b->n)
		failed = work_post_send(&q->qp_base, &b->parts[0].wr, &bad);
	clear(b);
	return failed;
}

// add begins a request.
static struct ibv_send_wr *add(struct ibv_qp_ex *q, enum ibv_wr_opcode op)
{
	static struct ibv_send_wr none;
	struct builder *b = of(q);
	struct part *p;

	if (b->n == ((struct qp *)q)->sq_size) {
		b->failed = ENOMEM;
		return &none;
	}
	p = &b->parts[b->n++];
	*p = (struct part){.wr = {.wr_id = q->wr_id, .send_flags = q->wr_flags, .opcode = op}};
	return &p->wr;
}

static void send_plain(struct ibv_qp_ex *q) { add(q, IBV_WR_SEND); }
static void send_imm(struct ibv_qp_ex *q, __be32 imm) { add(q, IBV_WR_SEND_WITH_IMM)->imm_data = imm; }
static void send_inv(struct ibv_qp_ex *q, uint32_t key) { add(q, IBV_WR_SEND_WITH_INV)->invalidate_rkey = key; }
static void local_inv(struct ibv_qp_ex *q, uint32_t key) { add(q, IBV_WR_LOCAL_INV)->invalidate_rkey = key; }

static struct ibv_send_wr *rdma(struct ibv_qp_ex *q, enum ibv_wr_opcode op, uint32_t rkey, uint64_t addr)
{
	struct ibv_send_wr *wr = add(q, op);

	wr->wr.rdma.rkey = rkey;
	wr->wr.rdma.remote_addr = addr;
	return wr;
}

static void rdma_read(struct ibv_qp_ex *q, uint32_t rkey, uint64_t addr) { rdma(q, IBV_WR_RDMA_READ, rkey, addr); }
static void rdma_write(struct ibv_qp_ex *q, uint32_t rkey, uint64_t addr) { rdma(q, IBV_WR_RDMA_WRITE, rkey, addr); }

static void rdma_write_imm(struct ibv_qp_ex *q, uint32_t rkey, uint64_t addr, __be32 imm)
{
	rdma(q, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr)->imm_data = imm;
}

static void bind_mw(struct ibv_qp_ex *q, struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info)
{
	struct ibv_send_wr *wr = add(q, IBV_WR_BIND_MW);

	wr->bind_mw.mw = mw;
	wr->bind_mw.rkey = rkey;
	wr->bind_mw.bind_info = *info;
}

static void set_sge_list(struct ibv_qp_ex *q, size_t n, const struct ibv_sge *list)
{
	struct part *p = &of(q)->parts[of(q)->n - 1];

	if (of(q)->failed)
		return;
	p->sge = malloc(n * sizeof *list);
	memcpy(p->sge, list, n * sizeof *list);
	p->wr.sg_list = p->sge;
	p->wr.num_sge = n;
}

static void set_sge(struct ibv_qp_ex *q, uint32_t lkey, uint64_t addr, uint32_t length)
{
	set_sge_list(q, 1, &(struct ibv_sge){addr, length, lkey});
}

static void set_inline_list(struct ibv_qp_ex *q, size_t n, const struct ibv_data_buf *list)
{
	struct part *p = &of(q)->parts[of(q)->n - 1];
	size_t length = 0, i;

	if (of(q)->failed)
		return;
	for (i = 0; i < n; i++) {
		p->inlined = realloc(p->inlined, length + list[i].length + 1);
		memcpy(p->inlined + length, list[i].addr, list[i].length);
		length += list[i].length;
	}
	set_sge(q, 0, (uintptr_t)p->inlined, length);
	p->wr.send_flags |= IBV_SEND_INLINE;
}

static void set_inline(struct ibv_qp_ex *q, void *addr, size_t length)
{
	set_inline_list(q, 1, &(struct ibv_data_buf){addr, length});
}

struct ibv_qp *builder_create_qp(struct ibv_context *v, struct ibv_qp_init_attr_ex *a)
{
	const uint32_t known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	struct ibv_qp *qp;
	struct qp *q;

	if (a->comp_mask & ~known || !(a->comp_mask & IBV_QP_INIT_ATTR_PD))
		return errno = EOPNOTSUPP, NULL;
	qp = ibv_create_qp(a->pd, (struct ibv_qp_init_attr *)a); // begins with the same fields
	if (!qp)
		return NULL;
	q = (struct qp *)qp;
	q->builder = calloc(1, sizeof *q->builder);
	q->builder->parts = calloc(q->sq_size, sizeof *q->builder->parts);
	q->ex.wr_start = begin;
	q->ex.wr_complete = complete;
	q->ex.wr_abort = stop;
	q->ex.wr_send = send_plain;
	q->ex.wr_send_imm = send_imm;
	q->ex.wr_send_inv = send_inv;
	q->ex.wr_local_inv = local_inv;
	q->ex.wr_bind_mw = bind_mw;
	q->ex.wr_rdma_read = rdma_read;
	q->ex.wr_rdma_write = rdma_write;
	q->ex.wr_rdma_write_imm = rdma_write_imm;
	q->ex.wr_set_sge = set_sge;
	q->ex.wr_set_sge_list = set_sge_list;
	q->ex.wr_set_inline_data = set_inline;
	q->ex.wr_set_inline_data_list = set_inline_list;
	return qp;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	return ((struct qp *)qp)->builder ? &((struct qp *)qp)->ex : NULL;
}
