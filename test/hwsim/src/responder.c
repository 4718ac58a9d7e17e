// The responder's half of a queue pair: it executes requests in order, and answers in order
// (IBTA specification volume 1, sections 9.7.3, 9.7.4 and 9.7.5.2).
#include "hwsim.h"

enum { RING_FULL_NS = 10000 };

static uint64_t min(uint64_t a, uint64_t b) { return a < b ? a : b; }

// ---- what is owed ----

static struct owed *owe(struct qp *q, int kind, uint32_t msn)
{
	struct owed *o = &q->owed[(q->owed_end - 1) % q->owed_size];

	if (kind == OWED_ACK && q->owed_end != q->owed_first && o->kind == OWED_ACK && o->sent == 0) {
		o->msn = msn; // acknowledgements are cumulative (9.7.5.1.2)
		return o;
	}
	if (q->owed_end - q->owed_first == q->owed_size)
		return NULL;
	o = &q->owed[q->owed_end++ % q->owed_size];
	*o = (struct owed){.kind = kind, .msn = msn, .due = kind == OWED_READ ? late(config.jitter_ns) : 0};
	return o;
}

// refuse queues a NAK of the expected message. All except RNR and sequence NAKs end the
// connection.
static void refuse(struct qp *q, enum nak code)
{
	struct owed *o = owe(q, OWED_NAK, q->expected);

	if (o)
		o->code = code;
	q->gap = true;
	q->refused = code >= NAK_REQUEST || config.profile->transport == IBV_TRANSPORT_IWARP;
}

static bool send_owed(struct qp *q, const struct owed *o, enum packet_type type, uint32_t n, const uint8_t *from)
{
	int to = slot_of(q->attr.dest_qp_num);
	struct packet *p;
	bool skip = n && unmoved(type, o->length);

	if (q->astray || !alive(to))
		return true;
	p = put_begin(to, skip ? 0 : n, type);
	if (!p)
		return false;
	p->to = q->attr.dest_qp_num;
	p->from = q->qp.qp_num;
	p->msn = o->msn;
	p->code = o->code;
	p->timer = q->attr.min_rnr_timer;
	p->offset = o->sent;
	p->bytes = n;
	p->flags = (o->sent + n == o->length ? F_LAST : 0) | (skip ? F_UNMOVED : 0);
	if (n && !skip)
		memcpy(p + 1, from, n);
	p->due = arrival(q, n);
	if (!(config.loss && chance(1000000) < config.loss))
		put_end(to, p);
	return true;
}

// serve_read reads memory when the response is sent, packet by packet. Earlier writes by this
// queue pair are visible (9.7.3, table 79), and the key may have become invalid.
static bool serve_read(struct qp *q, struct owed *o)
{
	struct grant g;

	land_all(&q->in);
	do {
		uint32_t n = packet_bytes(P_RESPONSE, o->length, o->length - o->sent);
		uint64_t at = o->raddr + o->sent;

		if (!remote_access(q, o->rkey, at, n, IBV_ACCESS_REMOTE_READ, &g)) {
			o->kind = OWED_NAK;
			o->code = NAK_ACCESS;
			o->sent = o->length = 0;
			q->refused = true;
			q->reads_owed--;
			return true;
		}
		if (!send_owed(q, o, P_RESPONSE, n, (const uint8_t *)(uintptr_t)at))
			return false;
		o->sent += n;
	} while (o->sent < o->length);
	return true;
}

// broken ends the connection at this end, after its NAK (9.9.3, class C errors).
static void broken(struct qp *q, enum nak code)
{
	async_qp(&q->qp, code == NAK_ACCESS ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR);
	qp_error(q);
}

static uint64_t pay(struct qp *q, uint64_t now)
{
	while (q->owed_first != q->owed_end) {
		struct owed *o = &q->owed[q->owed_first % q->owed_size];

		if (now < o->due)
			return o->due;
		if (o->kind == OWED_READ) {
			if (!serve_read(q, o))
				return now + RING_FULL_NS;
			if (o->kind != OWED_READ)
				continue;
			q->reads_owed--;
		} else if (!send_owed(q, o, o->kind == OWED_ACK ? P_ACK : P_NAK, 0, NULL)) {
			return now + RING_FULL_NS;
		}
		q->owed_first++;
		if (o->kind == OWED_NAK && q->refused) {
			broken(q, o->code);
			return NEVER;
		}
	}
	return NEVER;
}

// ---- requests ----

static bool take_receive(struct qp *q)
{
	struct recv_wqe *from;

	if (q->has_current)
		return true;
	if (q->qp.srq) {
		if (!srq_take((struct srq *)q->qp.srq, &q->current))
			return false;
	} else {
		if (q->rq_taken == q->rq_posted)
			return false;
		from = &q->rq[q->rq_taken++ % q->rq_size];
		q->current.wr = from->wr;
		memcpy(q->current.sge, from->sge, from->wr.num_sge * sizeof *from->sge);
	}
	return q->has_current = true;
}

static void complete_receive(struct qp *q, const struct packet *p, enum ibv_wc_status status)
{
	struct completion c = {
		.wc = {.wr_id = q->current.wr.wr_id, .status = status, .opcode = IBV_WC_RECV, .qp_num = q->qp.qp_num},
		.qp = q, .srq = (struct srq *)q->qp.srq,
	};

	q->has_current = false;
	if (status) {
		c.wc.opcode = config.calm ? 0 : chance(256);
		c.wc.vendor_err = 0x50 + status;
	} else {
		c.wc.byte_len = p->length;
		c.wc.src_qp = p->from;
		c.solicited = p->flags & F_SOLICITED;
		if (p->type == P_WRITE)
			c.wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
		if (p->flags & F_IMM) {
			c.wc.wc_flags |= IBV_WC_WITH_IMM;
			c.wc.imm_data = p->imm;
		}
		if (p->flags & F_INV) {
			c.wc.wc_flags |= IBV_WC_WITH_INV;
			c.wc.invalidated_rkey = p->imm;
		}
	}
	land_completion(q, &q->in, (struct cq *)q->qp.recv_cq, &c, 0);
}

// finished is called after a message's last packet.
static void finished(struct qp *q, const struct packet *p)
{
	owe(q, OWED_ACK, p->msn);
	q->expected = p->msn + 1;
	q->received = 0;
}

static void take_send(struct qp *q, const struct packet *p, const uint8_t *payload)
{
	if (!take_receive(q)) {
		count(N_RNR, 1);
		refuse(q, NAK_RNR);
		return;
	}
	if (p->length > sge_length(q->current.sge, q->current.wr.num_sge)) { // 9.7.4.1.6
		complete_receive(q, p, IBV_WC_LOC_LEN_ERR);
		refuse(q, NAK_REQUEST);
		return;
	}
	if (!scatter(q, &q->in, q->current.sge, q->current.wr.num_sge, IBV_ACCESS_LOCAL_WRITE, p->offset, payload, p->bytes)) {
		complete_receive(q, p, IBV_WC_LOC_PROT_ERR);
		refuse(q, NAK_OPERATION);
		return;
	}
	q->received += p->bytes;
	if (!(p->flags & F_LAST))
		return;
	if (p->flags & F_INV && !mw_invalidate_remote(q, p->imm)) { // 9.4.1.1.3
		complete_receive(q, p, IBV_WC_LOC_PROT_ERR);
		refuse(q, NAK_ACCESS);
		return;
	}
	complete_receive(q, p, IBV_WC_SUCCESS);
	finished(q, p);
}

static void take_write(struct qp *q, const struct packet *p, const uint8_t *payload)
{
	struct grant g;
	// The first packet has the length of the message (9.3.3); the key may become invalid at
	// any time.
	uint64_t at = p->raddr + p->offset, n = p->offset ? p->bytes : p->length;

	if (!remote_access(q, p->rkey, at, n, IBV_ACCESS_REMOTE_WRITE, &g)) {
		refuse(q, NAK_ACCESS);
		return;
	}
	if (p->flags & F_IMM && !take_receive(q)) {
		count(N_RNR, 1);
		q->received = 0;
		refuse(q, NAK_RNR);
		return;
	}
	if (p->bytes && payload)
		land(&q->in, &g, (uint8_t *)(uintptr_t)at, payload, p->bytes);
	q->received += p->bytes;
	if (!(p->flags & F_LAST))
		return;
	if (p->flags & F_IMM)
		complete_receive(q, p, IBV_WC_SUCCESS);
	finished(q, p);
}

static void take_read(struct qp *q, const struct packet *p, bool again)
{
	struct grant g;
	struct owed *o;

	bool allowed = remote_access(q, p->rkey, p->raddr, p->length, IBV_ACCESS_REMOTE_READ, &g);

	if (again && (!allowed || q->reads_owed >= q->attr.max_dest_rd_atomic))
		return; // it is still being read, or must not be read
	if (!allowed) {
		refuse(q, NAK_ACCESS);
		return;
	}
	if (q->reads_owed >= q->attr.max_dest_rd_atomic) { // 9.7.4.1.4
		refuse(q, NAK_REQUEST);
		return;
	}
	o = owe(q, OWED_READ, p->msn);
	o->raddr = p->raddr;
	o->rkey = p->rkey;
	o->length = p->length;
	q->reads_owed++;
	if (!again)
		q->expected = p->msn + 1;
}

// in_order reports whether a packet is the next expected one (9.7.4.1.2). A message that was
// executed already is acknowledged again, and a read is answered again.
static bool in_order(struct qp *q, const struct packet *p)
{
	int32_t ahead = p->msn - q->expected;

	if (ahead < 0) {
		if (p->type == P_READ)
			take_read(q, p, true);
		else if (p->flags & F_LAST)
			owe(q, OWED_ACK, q->expected - 1);
		return false;
	}
	if (ahead > 0 || p->offset > q->received) {
		if (!q->gap)
			refuse(q, NAK_SEQUENCE);
		return false;
	}
	return p->offset == q->received;
}

// fits reports whether a message's packets have the same length at both ends: all except the
// last have the path's MTU (9.7.4.1.6). The packets in this fabric's rings have another
// length.
static bool fits(const struct qp *q, const struct packet *p)
{
	return p->code == q->attr.path_mtu || p->length <= 128u << min(p->code, q->attr.path_mtu);
}

void responder_request(struct qp *q, const struct packet *p, const uint8_t *payload)
{
	if (p->from != q->attr.dest_qp_num || q->refused || (q->qp.state != IBV_QPS_RTR && q->qp.state != IBV_QPS_RTS))
		return; // silently dropped (9.6.1.1.1)
	qp_busy(q);
	if (!q->communicated) {
		q->communicated = true;
		cm_communicated(q);
	}
	if (!in_order(q, p))
		return;
	q->gap = false;
	if (!fits(q, p)) {
		refuse(q, NAK_REQUEST);
		return;
	}
	switch (p->type) {
	case P_SEND:
		take_send(q, p, payload);
		break;
	case P_WRITE:
		take_write(q, p, payload);
		break;
	default:
		take_read(q, p, false);
	}
}

// ---- the end ----

// responder_flush completes the remaining receives. Those of a shared queue stay there, except
// one that a message had taken.
void responder_flush(struct qp *q)
{
	static const struct packet none;

	if (q->has_current)
		complete_receive(q, &none, IBV_WC_WR_FLUSH_ERR);
	while (!q->qp.srq && q->rq_taken != q->rq_posted) {
		take_receive(q);
		complete_receive(q, &none, IBV_WC_WR_FLUSH_ERR);
	}
}

static uint64_t run_broken(struct qp *q, uint64_t now)
{
	if (q->want_flush && now < q->flush_at)
		return min(q->flush_at, land_due(q, &q->in, now));
	if (q->want_flush) {
		land_all(&q->in);
		land_all(&q->out);
	}
	q->want_flush = false;
	requester_flush(q);
	responder_flush(q);
	now = min(land_due(q, &q->in, now), land_due(q, &q->out, now));
	if (now == NEVER && q->want_last) {
		q->want_last = false;
		qp_last_wqe(q);
	}
	return now;
}

uint64_t responder_run(struct qp *q, uint64_t now)
{
	if (q->qp.state == IBV_QPS_ERR)
		return run_broken(q, now);
	return min(pay(q, now), land_due(q, &q->in, now));
}
