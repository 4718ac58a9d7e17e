// The requester's half of a queue pair: it sends work requests in order, processes the
// responses, and completes in order (IBTA specification volume 1, sections 9.7.2 and 9.7.5).
#include "hwsim.h"

enum { RING_FULL_NS = 10000 }; // when to look again whether a ring has room
enum { INFINITE = 7 }; // rnr_retry (9.7.5.2.8)

static struct send_wqe *wqe(struct qp *q, uint32_t i) { return &q->sq[i % q->sq_size]; }
static int peer_slot(const struct qp *q) { return slot_of(q->attr.dest_qp_num); }
static bool of_window(const struct send_wqe *w) { return w->wr.opcode == IBV_WR_BIND_MW || w->wr.opcode == IBV_WR_LOCAL_INV; }
static bool is_read(const struct send_wqe *w) { return w->wr.opcode == IBV_WR_RDMA_READ; }

static uint64_t min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t max(uint64_t a, uint64_t b) { return a > b ? a : b; }

// ---- completing ----

static enum ibv_wc_opcode opcode(const struct send_wqe *w)
{
	switch (w->wr.opcode) {
	case IBV_WR_RDMA_WRITE: case IBV_WR_RDMA_WRITE_WITH_IMM: return IBV_WC_RDMA_WRITE;
	case IBV_WR_RDMA_READ: return IBV_WC_RDMA_READ;
	case IBV_WR_BIND_MW: return IBV_WC_BIND_MW;
	case IBV_WR_LOCAL_INV: return IBV_WC_LOCAL_INV;
	default: return IBV_WC_SEND;
	}
}

static void complete(struct qp *q, struct send_wqe *w, enum ibv_wc_status status)
{
	struct completion c = {
		.wc = {.wr_id = w->wr.wr_id, .status = status, .opcode = opcode(w), .qp_num = q->qp.qp_num},
		.qp = q, .of_send = true, .frees = q->completed + 1,
	};

	if (status) { // ibv_poll_cq(3): after a failure only these and vendor_err are valid
		c.wc.opcode = config.calm ? 0 : chance(256);
		c.wc.vendor_err = 0x50 + status;
	} else if (is_read(w)) {
		c.wc.byte_len = w->length;
	}
	if (status || q->sig_all || w->wr.send_flags & IBV_SEND_SIGNALED)
		land_completion(q, &q->out, (struct cq *)q->qp.send_cq, &c, of_window(w) && config.cost[COST_BIND] ? q->busy_until : 0);
	free(w->inlined);
	w->inlined = NULL;
}

static void complete_sends(struct qp *q)
{
	while (q->completed != q->sent && wqe(q, q->completed)->done) {
		struct send_wqe *w = wqe(q, q->completed);

		complete(q, w, w->status);
		q->completed++;
		if (w->status) {
			qp_error(q);
			return;
		}
	}
}

// fail ends the queue pair with this work request, after those before it have completed.
static void fail(struct qp *q, uint32_t i, enum ibv_wc_status status)
{
	struct send_wqe *w = wqe(q, i);

	w->status = status;
	w->done = true;
	q->stopped = true;
	if (q->sent == i) {
		q->sent = i + 1;
		q->offset = 0;
	}
	complete_sends(q);
}

// requester_flush completes the remaining work requests with "flushed", signaled or not
// (10.8.3.1, table 90). Bytes in progress have been written before.
void requester_flush(struct qp *q)
{
	for (; q->completed != q->posted; q->completed++) {
		struct send_wqe *w = wqe(q, q->completed);

		complete(q, w, w->status ? w->status : IBV_WC_WR_FLUSH_ERR);
	}
	q->sent = q->posted;
	q->reads = 0;
}

// ---- sending ----

enum progress { SENT, WAITS, RING_FULL, FAILED };

static bool lost(void) { return config.loss && chance(1000000) < config.loss; }

// emit sends one packet of a work request.
static enum progress emit(struct qp *q, struct send_wqe *w, enum packet_type type, uint32_t n)
{
	int to = peer_slot(q);
	struct packet *p;
	bool last = type == P_READ || q->offset + n == w->length, skip = n && unmoved(type, w->length);
	int op = w->wr.opcode;

	if (q->astray || !alive(to)) // the host is gone, so there will be no response
		return SENT;
	p = put_begin(to, skip ? 0 : n, type);
	if (!p)
		return RING_FULL;
	p->bytes = n;
	p->flags = (last ? F_LAST : 0) | (skip ? F_UNMOVED : 0);
	p->to = q->attr.dest_qp_num;
	p->from = q->qp.qp_num;
	p->code = q->attr.path_mtu;
	p->msn = w->msn;
	p->offset = q->offset;
	p->length = w->length;
	p->raddr = w->wr.wr.rdma.remote_addr;
	p->rkey = w->wr.wr.rdma.rkey;
	p->imm = w->wr.imm_data;
	if (op == IBV_WR_SEND_WITH_IMM || op == IBV_WR_RDMA_WRITE_WITH_IMM)
		p->flags |= F_IMM;
	if (op == IBV_WR_SEND_WITH_INV)
		p->flags |= F_INV;
	if (w->wr.send_flags & IBV_SEND_SOLICITED)
		p->flags |= F_SOLICITED;
	if (n && !gather(q, w, q->offset, n, skip ? NULL : (uint8_t *)(p + 1)))
		return FAILED;
	p->due = arrival(q, n);
	if (!lost())
		put_end(to, p);
	return SENT;
}

static enum progress send_message(struct qp *q, struct send_wqe *w, enum packet_type type)
{
	do {
		uint32_t n = packet_bytes(type, w->length, w->length - q->offset);
		enum progress p = emit(q, w, type, n);

		if (p != SENT)
			return p;
		q->offset += n;
	} while (q->offset < w->length);
	count(type == P_SEND ? N_SENDS : N_WRITES, 1);
	w->done = config.profile->complete_when_sent;
	return SENT;
}

static enum progress send_read(struct qp *q, struct send_wqe *w)
{
	enum progress p;

	if (q->reads >= q->attr.max_rd_atomic)
		return q->attr.max_rd_atomic ? WAITS : FAILED;
	p = emit(q, w, P_READ, 0);
	if (p == SENT) {
		w->got = 0;
		q->reads++;
		count(N_READS, 1);
	}
	return p;
}

// change_window executes at once, and delays the requests after it.
static enum ibv_wc_status change_window(struct qp *q, struct send_wqe *w, uint64_t now)
{
	if (config.cost[COST_BIND])
		q->busy_until = max(q->busy_until, now) + config.cost[COST_BIND];
	return w->wr.opcode == IBV_WR_BIND_MW ? mw_bind(q, &w->wr) : mw_invalidate_local(q, w->wr.invalidate_rkey);
}

// send_one executes the work request at q->sent, or a part of it if a ring is full.
static enum progress send_one(struct qp *q, struct send_wqe *w, uint64_t now)
{
	if (w->wr.send_flags & IBV_SEND_FENCE && q->reads)
		return WAITS;
	if (of_window(w)) {
		if (!w->done)
			w->status = change_window(q, w, now);
		w->done = true;
		return w->status ? FAILED : SENT;
	}
	if (!w->numbered) {
		w->numbered = true;
		w->msn = q->next_msn++;
	}
	if (q->completed == q->sent && !q->offset)
		q->progress_at = now;
	if (is_read(w))
		return send_read(q, w);
	return send_message(q, w, w->wr.opcode == IBV_WR_RDMA_WRITE || w->wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? P_WRITE : P_SEND);
}

static enum ibv_wc_status why_failed(const struct send_wqe *w)
{
	if (w->status)
		return w->status;
	return is_read(w) ? IBV_WC_LOC_QP_OP_ERR : IBV_WC_LOC_PROT_ERR;
}

static uint64_t send_all(struct qp *q, uint64_t now)
{
	while (q->sent != q->posted && !q->stopped) {
		struct send_wqe *w = wqe(q, q->sent);

		if (now < q->send_at)
			return q->send_at;
		q->send_at = 0;
		switch (send_one(q, w, now)) {
		case SENT:
			q->sent++;
			q->offset = 0;
			q->send_at = chance(4) ? 0 : late(config.jitter_ns);
			complete_sends(q);
			break;
		case WAITS:
			return NEVER; // the response
		case RING_FULL:
			return now + RING_FULL_NS;
		case FAILED:
			fail(q, q->sent, why_failed(w));
		}
	}
	return NEVER;
}

// ---- repeating ----

// find_msn returns the position of a message in progress, or posted if there is none.
static uint32_t find_msn(struct qp *q, uint32_t msn)
{
	uint32_t end = q->sent + (q->offset || (q->sent != q->posted && wqe(q, q->sent)->numbered));

	for (uint32_t i = q->completed; i != end; i++)
		if (wqe(q, i)->numbered && wqe(q, i)->msn == msn)
			return i;
	return q->posted;
}

// rewind_to makes the message at a position, and all after it, be sent again.
static void rewind_to(struct qp *q, uint32_t to)
{
	q->sent = to;
	q->offset = 0;
	q->reads = 0;
	for (uint32_t i = q->completed; i != to; i++)
		q->reads += is_read(wqe(q, i)) && !wqe(q, i)->done;
}

// oldest returns the position of the oldest message without a response, or sent if there is
// none.
static uint32_t oldest(struct qp *q)
{
	uint32_t i;

	for (i = q->completed; i != q->sent; i++)
		if (!wqe(q, i)->done)
			break;
	return i;
}

// check_timer repeats messages without a response within the timeout, up to retry_cnt times
// (9.7.6.1.3, C9-141: 4.096 µs × 2^timeout).
static uint64_t check_timer(struct qp *q, uint64_t now)
{
	uint64_t due;
	uint32_t i = oldest(q);

	if (!q->attr.timeout || i == q->sent)
		return NEVER;
	due = q->progress_at + (4096ull << q->attr.timeout);
	if (config.timed && now < due)
		return due; // a look at the ring costs too much
	if (undelivered(peer_slot(q)) && alive(peer_slot(q)))
		q->progress_at = now;
	due = q->progress_at + (4096ull << q->attr.timeout);
	if (now < due)
		return due;
	if (q->retries-- == 0) {
		fail(q, i, IBV_WC_RETRY_EXC_ERR);
		return NEVER;
	}
	count(N_RETRIES, 1);
	rewind_to(q, i);
	q->progress_at = now;
	return now + (4096ull << q->attr.timeout);
}

uint64_t requester_run(struct qp *q, uint64_t now)
{
	uint64_t next = NEVER;

	if (q->qp.state == IBV_QPS_RTS) {
		next = check_timer(q, now);
		next = min(next, send_all(q, now));
		next = min(next, check_timer(q, now));
	}
	return min(next, land_due(q, &q->out, now));
}

// ---- responses ----

static void progress(struct qp *q)
{
	q->progress_at = recent_ns();
	q->retries = q->attr.retry_cnt;
	q->rnr_retries = q->attr.rnr_retry;
}

// acknowledge completes the messages up to a number, except reads without all their data.
static void acknowledge(struct qp *q, uint32_t msn)
{
	for (uint32_t i = q->completed; i != q->sent; i++) {
		struct send_wqe *w = wqe(q, i);

		if (w->done || !w->numbered)
			continue;
		if ((int32_t)(w->msn - msn) > 0 || is_read(w))
			break;
		w->done = true;
	}
	complete_sends(q);
}

static void take_read_data(struct qp *q, const struct packet *p, const uint8_t *payload)
{
	uint32_t i = find_msn(q, p->msn);
	struct send_wqe *w = wqe(q, i);
	int access = IBV_ACCESS_LOCAL_WRITE;

	if (i == q->posted || !is_read(w) || w->done || w->got != p->offset || w->status)
		return; // a response to an earlier try
	if (config.profile->sink_needs_remote_write)
		access |= IBV_ACCESS_REMOTE_WRITE;
	if (!scatter(q, &q->out, w->sge, w->wr.num_sge, access, p->offset, payload, p->bytes)) {
		fail(q, i, IBV_WC_LOC_PROT_ERR);
		return;
	}
	w->got += p->bytes;
	if (q->qp.state == IBV_QPS_ERR) // its data is written, but the request is flushed
		return;
	progress(q);
	if (!(p->flags & F_LAST))
		return;
	acknowledge(q, p->msn - 1);
	w->done = true;
	q->reads--;
	complete_sends(q);
}

// The values of the RNR timer (9.7.5.2.8, table 45), in units of 10 µs.
static const uint32_t rnr_time[32] = {
	65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
	256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
};

static void take_nak(struct qp *q, const struct packet *p)
{
	static const enum ibv_wc_status status[] = {
		[NAK_REQUEST] = IBV_WC_REM_INV_REQ_ERR, [NAK_ACCESS] = IBV_WC_REM_ACCESS_ERR, [NAK_OPERATION] = IBV_WC_REM_OP_ERR,
	};
	uint32_t i = find_msn(q, p->msn);

	acknowledge(q, p->msn - 1);
	if (i == q->posted) {
		if (p->code >= NAK_REQUEST && config.profile->complete_when_sent) { // iWARP's terminate message
			async_qp(&q->qp, IBV_EVENT_QP_REQ_ERR);
			qp_error(q);
		}
		return;
	}
	switch (p->code) {
	case NAK_RNR:
		if (q->rnr_retries == 0) {
			fail(q, i, IBV_WC_RNR_RETRY_EXC_ERR);
			return;
		}
		if (q->rnr_retries != INFINITE)
			q->rnr_retries--;
		rewind_to(q, i);
		q->send_at = q->progress_at = now_ns() + rnr_time[p->timer & 31] * 10000ull;
		return;
	case NAK_SEQUENCE:
		rewind_to(q, i);
		return;
	default:
		fail(q, i, status[p->code]);
	}
}

void requester_response(struct qp *q, const struct packet *p, const uint8_t *payload)
{
	bool broken = q->qp.state == IBV_QPS_ERR && q->want_flush;

	if (p->from != q->attr.dest_qp_num || (q->qp.state != IBV_QPS_RTS && !broken))
		return;
	qp_busy(q);
	if (p->type == P_RESPONSE) {
		take_read_data(q, p, payload);
	} else if (!broken && p->type == P_ACK) {
		progress(q);
		acknowledge(q, p->msn);
	} else if (!broken) {
		take_nak(q, p);
	}
}
