// Programs that break a rule, each in a case of its own, which the device has to detect. It
// prints a line for each case with another result than expected, and then fails.
enum { SIZE = 4096 };

#include "rig.h"

#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

static int to_error(struct ibv_qp *q)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};

	return ibv_modify_qp(q, &a, IBV_QP_STATE);
}

// outcome posts a request and returns how it completes.
static int outcome(struct ibv_send_wr wr)
{
	int failed = post(r.a, wr);

	if (failed) {
		wrong("ibv_post_send", failed, 0);
		return -1;
	}
	return status(r.a);
}

static int event(void)
{
	struct ibv_async_event e;
	struct pollfd p = {r.ctx->async_fd, POLLIN};

	if (poll(&p, 1, 30000) != 1 || ibv_get_async_event(r.ctx, &e))
		return -1;
	ibv_ack_async_event(&e);
	return e.event_type;
}

static int touched(void)
{
	for (int i = 0; i < SIZE; i++)
		if (r.mem[SIZE + i])
			return 1;
	return 0;
}

// ---- keys ----

static void key_right(void)
{
	memset(r.mem, 1, SIZE);
	IS(outcome(request(IBV_WR_RDMA_WRITE, SIZE)), IBV_WC_SUCCESS);
	IS(outcome(request(IBV_WR_RDMA_READ, SIZE)), IBV_WC_SUCCESS);
	IS(memcmp(r.mem, r.mem + SIZE, SIZE), 0); // the read comes after the write
}

static void key_bounds(void)
{
	struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, SIZE);

	memset(r.mem, 1, SIZE);
	wr.wr.rdma.remote_addr++;
	IS(outcome(wr), IBV_WC_REM_ACCESS_ERR);
	IS(event(), IBV_EVENT_QP_ACCESS_ERR);
	IS(touched(), 0);
}

static void key_generation(void)
{
	struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 16);

	ibv_dereg_mr(r.to);
	r.to = ibv_reg_mr(r.pd, r.mem + SIZE, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	memset(r.mem, 1, SIZE);
	IS(outcome(wr), IBV_WC_REM_ACCESS_ERR);
	IS(touched(), 0);
}

static void key_rights(void)
{
	struct ibv_send_wr wr = request(IBV_WR_RDMA_READ, 16);

	wr.wr.rdma.remote_addr = (uintptr_t)r.mem;
	wr.wr.rdma.rkey = r.from->rkey;
	IS(outcome(wr), IBV_WC_REM_ACCESS_ERR);
}

static void key_domain(void)
{
	struct ibv_mr *foreign = ibv_reg_mr(r.other_pd, r.mem + SIZE, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 16);

	wr.wr.rdma.rkey = foreign->rkey;
	IS(outcome(wr), IBV_WC_REM_ACCESS_ERR);
	IS(ibv_dereg_mr(foreign), 0);
}

static void key_queue_pair_rights(void)
{
	struct ibv_qp_attr a = {.qp_access_flags = IBV_ACCESS_REMOTE_READ};

	IS(ibv_modify_qp(r.b, &a, IBV_QP_ACCESS_FLAGS), 0);
	IS(outcome(request(IBV_WR_RDMA_WRITE, 16)), IBV_WC_REM_ACCESS_ERR);
}

static void key_local(void)
{
	struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, SIZE + 1);

	IS(outcome(wr), IBV_WC_LOC_PROT_ERR);
}

static void key_of_the_other_kind(void) // the key of a peer's memory, used at this end
{
	struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 16);

	wr.sg_list->lkey = r.from->rkey;
	IS(outcome(wr), IBV_WC_LOC_PROT_ERR);
}

static void key_of_this_end(void) // the key of this end's memory, used by a peer
{
	struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 16);

	wr.wr.rdma.rkey = r.to->lkey;
	IS(outcome(wr), IBV_WC_REM_ACCESS_ERR);
}

static void key_local_write(void)
{
	struct ibv_mr *readable = ibv_reg_mr(r.pd, r.mem, SIZE, 0);
	struct ibv_send_wr wr = request(IBV_WR_RDMA_READ, 16);

	wr.sg_list->lkey = readable->lkey;
	IS(outcome(wr), IBV_WC_LOC_PROT_ERR);
	IS(ibv_dereg_mr(readable), 0);
}

// Bytes that arrive in memory of relaxed ordering are visible after a completion of their own
// end, or when the region is deregistered, and not before.
static void relaxed_ordering(void)
{
	int at_once = !strstr(getenv("HWSIM"), "seed"); // calm, or timed
	struct ibv_send_wr behind = request(IBV_WR_SEND, 0);

	behind.num_sge = 0;
	ibv_dereg_mr(r.to);
	NEED(r.to = ibv_reg_mr(r.pd, r.mem + SIZE, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING));
	memset(r.mem, 1, SIZE);
	IS(outcome(request(IBV_WR_RDMA_WRITE, SIZE)), IBV_WC_SUCCESS);
	usleep(1000); // in other memory a piece is written within 30 µs
	IS(touched(), at_once);
	post_recv(16);
	IS(outcome(behind), IBV_WC_SUCCESS);
	IS(status(r.b), IBV_WC_SUCCESS);
	IS(memcmp(r.mem, r.mem + SIZE, SIZE), 0);
	memset(r.mem, 2, SIZE);
	IS(outcome(request(IBV_WR_RDMA_WRITE, SIZE)), IBV_WC_SUCCESS);
	usleep(1000);
	IS(ibv_dereg_mr(r.to), 0);
	IS(memcmp(r.mem, r.mem + SIZE, SIZE), 0);
	r.to = NULL;
}

static void registering(void)
{
	errno = 0;
	IS(ibv_reg_mr(r.pd, r.mem, SIZE, IBV_ACCESS_REMOTE_WRITE) == NULL, 1);
	IS(errno, EINVAL);
}

static void registering_what_is_not_there(void)
{
	uint8_t *m = mmap(NULL, 3 * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr;

	munmap(m + 2 * SIZE, SIZE);
	mprotect(m + SIZE, SIZE, PROT_READ);
	IS(ibv_reg_mr(r.pd, m + SIZE, SIZE + 1, 0) == NULL, 1);
	IS(errno, EFAULT);
	IS(ibv_reg_mr(r.pd, m, SIZE + 1, IBV_ACCESS_LOCAL_WRITE) == NULL, 1);
	IS(errno, EFAULT);
	IS(ibv_reg_mr(r.pd, m + SIZE, 1, IBV_ACCESS_MW_BIND) == NULL, 1);
	IS(errno, EFAULT);
	NEED(mr = ibv_reg_mr(r.pd, m, 2 * SIZE, 0));
	IS(ibv_dereg_mr(mr), 0);
	munmap(m, 2 * SIZE);
}

static void locks(int may) // memory beyond RLIMIT_MEMLOCK
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct caps[2];

	syscall(SYS_capget, &header, caps);
	caps[0].effective &= ~(1 << CAP_IPC_LOCK);
	caps[0].effective |= may << CAP_IPC_LOCK & caps[0].permitted;
	syscall(SYS_capset, &header, caps);
}

static void registering_too_much(void)
{
	enum { PAGES = 16 }; // fewer than that, each of one page, are left, because the rig has some
	struct rlimit before, limit;
	uint8_t *m = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr[PAGES];
	int n = 0;

	getrlimit(RLIMIT_MEMLOCK, &before);
	limit = before;
	limit.rlim_cur = PAGES * sysconf(_SC_PAGESIZE);
	IS(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
	locks(0);
	while (n < PAGES && (mr[n] = ibv_reg_mr(r.pd, m, 1, 0)))
		n++;
	IS(errno, ENOMEM);
	IS(n > 0 && n < PAGES, 1);
	IS(ibv_dereg_mr(mr[0]), 0);
	NEED(mr[0] = ibv_reg_mr(r.pd, m, 1, 0));
	locks(1);
	setrlimit(RLIMIT_MEMLOCK, &before);
	while (n)
		IS(ibv_dereg_mr(mr[--n]), 0);
	munmap(m, SIZE);
}

// ---- messages ----

static void too_long(void)
{
	post_recv(15);
	IS(outcome(request(IBV_WR_SEND, 16)), IBV_WC_REM_INV_REQ_ERR);
	IS(status(r.b), IBV_WC_LOC_LEN_ERR);
}

static void not_ready(void) { IS(outcome(request(IBV_WR_SEND, 16)), IBV_WC_RNR_RETRY_EXC_ERR); }

static void nobody(void)
{
	ibv_destroy_qp(r.b);
	r.b = NULL;
	IS(outcome(request(IBV_WR_SEND, 16)), IBV_WC_RETRY_EXC_ERR);
}

static void inline_is_copied(void)
{
	struct ibv_send_wr wr = request(IBV_WR_SEND, 64);

	post_recv(64);
	wr.send_flags |= IBV_SEND_INLINE;
	memset(r.mem, 1, 64);
	IS(post(r.a, wr), 0);
	memset(r.mem, 2, 64);
	IS(status(r.a), IBV_WC_SUCCESS);
	IS(status(r.b), IBV_WC_SUCCESS);
	IS(r.mem[SIZE], 1);
	IS(r.mem[SIZE + 63], 1);
}

static void inline_too_much(void)
{
	struct ibv_send_wr wr = request(IBV_WR_SEND, 65);

	wr.send_flags |= IBV_SEND_INLINE;
	IS(post(r.a, wr) != 0, 1);
}

static void reads_at_a_time(void)
{
	struct ibv_qp *q = new_qp(NULL);

	to_init(q);
	to_rtr(q, r.b->qp_num);
	IS(to_rts(q, 0), 0);
	IS(post(q, request(IBV_WR_RDMA_READ, 16)), 0);
	IS(status(q), IBV_WC_LOC_QP_OP_ERR);
	ibv_destroy_qp(q);
}

// ---- queues ----

static void send_queue_full(void)
{
	struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 16), last;

	wr.send_flags = 0;
	for (int i = 0; i < DEPTH - 1; i++)
		IS(post(r.a, wr), 0);
	last = request(IBV_WR_RDMA_WRITE, 16);
	IS(post(r.a, last), 0);
	IS(post(r.a, last), ENOMEM); // all may be done, but nobody has polled
	IS(status(r.a), IBV_WC_SUCCESS);
	IS(post(r.a, last), 0);
	IS(status(r.a), IBV_WC_SUCCESS);
}

static void receive_queue_full(void)
{
	for (int i = 0; i < DEPTH; i++)
		IS(post_recv(16), 0);
	IS(post_recv(16), ENOMEM);
}

static void overrun(void) // of a completion queue with two entries
{
	struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, 16);

	for (int i = 0; i < 3; i++)
		IS(post(r.a, wr), 0);
	IS(event(), IBV_EVENT_CQ_ERR);
	IS(event(), IBV_EVENT_QP_FATAL);
	IS(event(), IBV_EVENT_QP_FATAL);
}

static void flush(void)
{
	post_recv(16);
	post_recv(16);
	IS(to_error(r.b), 0);
	IS(status(r.b), IBV_WC_WR_FLUSH_ERR);
	IS(status(r.b), IBV_WC_WR_FLUSH_ERR);
	post_recv(16); // also afterwards
	IS(status(r.b), IBV_WC_WR_FLUSH_ERR);
}

static void last_receive(void) // with a shared queue
{
	post_recv(16);
	IS(to_error(r.b), 0);
	IS(event(), IBV_EVENT_QP_LAST_WQE_REACHED);
	IS(ibv_destroy_srq(r.srq), EBUSY);
}

static void shared_limit(void)
{
	struct ibv_srq_attr a = {.srq_limit = 2};

	for (int i = 0; i < 2; i++)
		post_recv(16);
	IS(ibv_modify_srq(r.srq, &a, IBV_SRQ_LIMIT), 0);
	IS(outcome(request(IBV_WR_SEND, 16)), IBV_WC_SUCCESS);
	IS(event(), IBV_EVENT_SRQ_LIMIT_REACHED);
}

static void states(void)
{
	struct ibv_qp *q = new_qp(NULL);
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTR};
	struct ibv_recv_wr wr = receive(16), *bad;

	IS(ibv_post_recv(q, &wr, &bad), EINVAL); // in RESET
	IS(to_rtr(q, 1), EINVAL);
	IS(to_error(q), EINVAL);
	IS(to_init(q), 0);
	IS(post(q, request(IBV_WR_SEND, 16)), EINVAL); // before RTS
	IS(to_rts(q, 1), EINVAL);
	IS(ibv_modify_qp(q, &a, IBV_QP_STATE), EINVAL); // without a path
	IS(ibv_post_recv(q, &wr, &bad), 0);
	ibv_destroy_qp(q);
}

// Values on which the two ends have to agree, and where a path leads.
static void renew(struct ibv_qp **q) // in INIT
{
	ibv_destroy_qp(*q);
	*q = new_qp(NULL);
	to_init(*q);
}

static void connect_other(struct agreed theirs)
{
	const struct agreed ours = agreed;

	renew(&r.a);
	renew(&r.b);
	IS(to_rtr(r.a, r.b->qp_num), 0);
	IS(to_rts(r.a, 4), 0);
	agreed = theirs;
	IS(to_rtr(r.b, r.a->qp_num), 0);
	IS(to_rts(r.b, 4), 0);
	agreed = ours;
}

static void other_sequence_number(void)
{
	connect_other((struct agreed){agreed.psn - 1, agreed.mtu});
	post_recv(16);
	IS(outcome(request(IBV_WR_SEND, 16)), IBV_WC_RETRY_EXC_ERR);
}

static void other_mtu(void)
{
	connect_other((struct agreed){agreed.psn, IBV_MTU_512});
	IS(outcome(request(IBV_WR_RDMA_WRITE, 512)), IBV_WC_SUCCESS);
	IS(outcome(request(IBV_WR_RDMA_WRITE, 513)), IBV_WC_REM_INV_REQ_ERR);
	IS(touched(), 0);
	renew(&r.a);
	agreed.mtu = 0;
	IS(to_rtr(r.a, r.b->qp_num), EINVAL);
	agreed.mtu = IBV_MTU_1024;
}

static void astray(void)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTR, .path_mtu = agreed.mtu, .dest_qp_num = r.b->qp_num, .rq_psn = agreed.psn,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 1, .ah_attr = {.is_global = 1, .port_num = 1, .grh.dgid.raw = {0xfd}}};

	connect_other(agreed);
	renew(&r.a);
	IS(ibv_modify_qp(r.a, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), 0);
	IS(to_rts(r.a, 4), 0);
	IS(outcome(request(IBV_WR_SEND, 16)), IBV_WC_RETRY_EXC_ERR);
}

static void in_use(void)
{
	IS(ibv_destroy_cq(r.cq), EBUSY);
	IS(ibv_dealloc_pd(r.pd), EBUSY);
}

// ---- windows ----

static struct ibv_mw *mw;

static int bind(struct ibv_mr *mr, uint32_t key, unsigned off, unsigned n, unsigned access)
{
	struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED, .bind_mw = {mw, key, {mr, (uintptr_t)mr->addr + off, n, access}}};

	IS(post(r.b, wr), 0);
	return status(r.b);
}

static uint32_t window(void)
{
	uint32_t key;

	NEED(mw = ibv_alloc_mw(r.pd, IBV_MW_TYPE_2));
	key = ibv_inc_rkey(mw->rkey);
	IS(bind(r.to, key, 64, 64, IBV_ACCESS_REMOTE_WRITE), IBV_WC_SUCCESS);
	memset(r.mem, 1, SIZE);
	return key;
}

static struct ibv_send_wr through(uint32_t key, int op, unsigned off, unsigned n)
{
	struct ibv_send_wr wr = request(op, n);

	wr.wr.rdma.rkey = key;
	wr.wr.rdma.remote_addr += off;
	return wr;
}

static void window_right(void)
{
	IS(outcome(through(window(), IBV_WR_RDMA_WRITE, 64, 64)), IBV_WC_SUCCESS);
	IS(ibv_dereg_mr(r.to), EINVAL); // the region beneath a window
	ibv_dealloc_mw(mw);
}

static void window_past_the_end(void)
{
	IS(outcome(through(window(), IBV_WR_RDMA_WRITE, 65, 64)), IBV_WC_REM_ACCESS_ERR);
	IS(touched(), 0);
	ibv_dealloc_mw(mw);
}

static void window_in_front(void)
{
	IS(outcome(through(window(), IBV_WR_RDMA_WRITE, 63, 64)), IBV_WC_REM_ACCESS_ERR);
	ibv_dealloc_mw(mw);
}

static void window_rights(void)
{
	IS(outcome(through(window(), IBV_WR_RDMA_READ, 64, 64)), IBV_WC_REM_ACCESS_ERR);
	ibv_dealloc_mw(mw);
}

static void window_of_another(void) // b's window, used by b: at the other end a's queue pair is not the window's
{
	uint32_t key = window();

	IS(post(r.b, through(key, IBV_WR_RDMA_WRITE, 64, 64)), 0);
	IS(status(r.b), IBV_WC_REM_ACCESS_ERR);
	ibv_dealloc_mw(mw);
}

static int invalidate(uint32_t key)
{
	struct ibv_send_wr wr = {.wr_id = 2, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = key};

	IS(post(r.b, wr), 0);
	return status(r.b);
}

static void window_invalidated(void)
{
	uint32_t key = window();

	IS(invalidate(key), IBV_WC_SUCCESS);
	IS(outcome(through(key, IBV_WR_RDMA_WRITE, 64, 64)), IBV_WC_REM_ACCESS_ERR);
	IS(touched(), 0);
	ibv_dealloc_mw(mw);
}

static void window_bound_twice(void)
{
	uint32_t key = window();

	IS(bind(r.to, ibv_inc_rkey(key), 64, 64, IBV_ACCESS_REMOTE_WRITE), IBV_WC_MW_BIND_ERR);
	ibv_dealloc_mw(mw);
}

static void window_on_what_is_not_for_it(void)
{
	NEED(mw = ibv_alloc_mw(r.pd, IBV_MW_TYPE_2));
	IS(bind(r.from, ibv_inc_rkey(mw->rkey), 0, 64, IBV_ACCESS_REMOTE_READ), IBV_WC_MW_BIND_ERR);
	ibv_dealloc_mw(mw);
}

static void window_too_large(void)
{
	NEED(mw = ibv_alloc_mw(r.pd, IBV_MW_TYPE_2));
	IS(bind(r.to, ibv_inc_rkey(mw->rkey), 1, SIZE, IBV_ACCESS_REMOTE_READ), IBV_WC_MW_BIND_ERR);
	ibv_dealloc_mw(mw);
}

static void window_invalidated_by_the_peer(void)
{
	struct ibv_send_wr wr = request(IBV_WR_SEND_WITH_INV, 0);
	struct ibv_wc wc;
	uint32_t key = window();

	wr.num_sge = 0;
	wr.invalidate_rkey = key;
	post_recv(16);
	IS(outcome(wr), IBV_WC_SUCCESS);
	wc = completion(r.b);
	IS(wc.wc_flags & IBV_WC_WITH_INV, IBV_WC_WITH_INV);
	IS(wc.invalidated_rkey, key);
	IS(outcome(through(key, IBV_WR_RDMA_WRITE, 64, 64)), IBV_WC_REM_ACCESS_ERR);
	ibv_dealloc_mw(mw);
}

// ---- the end ----

// Memory for which ibv_destroy_qp, ibv_dereg_mr or an invalidation has returned is not
// accessed any more.
static void destroyed(void)
{
	struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, SIZE);

	memset(r.mem, 1, SIZE);
	for (int i = 0; i < 4; i++)
		post(r.a, wr);
	status(r.a); // its bytes may still be in progress
	ibv_destroy_qp(r.b);
	r.b = NULL;
	memset(r.mem + SIZE, 0, SIZE);
	usleep(5000);
	IS(touched(), 0);
}

static void deregistered(void)
{
	struct ibv_send_wr wr = request(IBV_WR_RDMA_WRITE, SIZE);

	memset(r.mem, 1, SIZE);
	for (int i = 0; i < 4; i++)
		post(r.a, wr);
	status(r.a); // its bytes may still be in progress
	IS(ibv_dereg_mr(r.to), 0);
	r.to = NULL;
	memset(r.mem + SIZE, 0, SIZE);
	usleep(5000);
	IS(touched(), 0);
}

static const struct {
	const char *name;
	void (*run)(void);
	int cqe, srq;
} cases[] = {
#define CASE(f, ...) {#f, f, __VA_ARGS__}
	CASE(key_right, 64, 0), CASE(key_bounds, 64, 0), CASE(key_generation, 64, 0), CASE(key_rights, 64, 0),
	CASE(key_domain, 64, 0), CASE(key_queue_pair_rights, 64, 0), CASE(key_local, 64, 0), CASE(key_local_write, 64, 0),
	CASE(key_of_the_other_kind, 64, 0), CASE(key_of_this_end, 64, 0),
	CASE(relaxed_ordering, 64, 0), CASE(registering, 64, 0), CASE(registering_what_is_not_there, 64, 0),
	CASE(registering_too_much, 64, 0), CASE(too_long, 64, 0), CASE(not_ready, 64, 0), CASE(nobody, 64, 0),
	CASE(inline_is_copied, 64, 0), CASE(inline_too_much, 64, 0), CASE(reads_at_a_time, 64, 0),
	CASE(send_queue_full, 64, 0), CASE(receive_queue_full, 64, 0), CASE(overrun, 2, 0), CASE(flush, 64, 0),
	CASE(last_receive, 64, 1), CASE(shared_limit, 64, 1), CASE(states, 64, 0), CASE(in_use, 64, 0),
	CASE(other_sequence_number, 64, 0), CASE(other_mtu, 64, 0), CASE(astray, 64, 0),
	CASE(window_right, 64, 0), CASE(window_past_the_end, 64, 0), CASE(window_in_front, 64, 0), CASE(window_rights, 64, 0),
	CASE(window_of_another, 64, 0), CASE(window_invalidated, 64, 0), CASE(window_bound_twice, 64, 0),
	CASE(window_on_what_is_not_for_it, 64, 0), CASE(window_too_large, 64, 0), CASE(window_invalidated_by_the_peer, 64, 0),
	CASE(destroyed, 64, 0), CASE(deregistered, 64, 0),
};

int main(void)
{
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		name = cases[i].name;
		completion(NULL);
		make(cases[i].cqe, cases[i].srq);
		cases[i].run();
		unmake();
	}
	printf("%zu cases\n", sizeof cases / sizeof *cases);
	return failures != 0;
}
