// In timed mode nothing arrives before its time, and what has arrived is correct. It prints a
// line for each case with another result than expected, and then fails. To be later is no
// fault, because the machine may be busy.
enum { SIZE = 1 << 20 };

#include "rig.h"

static double latency, speed; // seconds, and bytes/s, as the device is set
static int moved;
static int costs; // operations take time

// From profile.c, except for the last two, which the test sets to more than its own operations
// take.
enum { REG_NS = 16000, REG_PS = 60, DEREG_NS = 10000, QP_NS = 1000000, BIND_NS = 1000000, WAKE_NS = 1000000 };

#define NOT_BEFORE(start, want) do { double took_ = now() - (start); if (took_ < (want)) { printf("%s: after %g s, not %g\n", name, took_, (double)(want)); failures++; } } while (0)

static struct ibv_send_wr of_memory(int op, uint32_t n)
{
	memset(r.mem, 1, SIZE);
	memset(r.mem + SIZE, 2, SIZE);
	return request(op, n);
}

static void write_takes(uint32_t n)
{
	struct ibv_send_wr wr = of_memory(IBV_WR_RDMA_WRITE, n);
	double start = now();

	post(r.a, wr);
	IS(status(r.a), IBV_WC_SUCCESS);
	NOT_BEFORE(start, 2 * latency + n / speed);
	IS(r.mem[SIZE], moved || n < 4096 ? 1 : 2);
	IS(memcmp(r.mem + SIZE, r.mem + SIZE + 1, n - 1), 0);
}

static void long_write(void) { write_takes(SIZE); }
static void short_write(void) { write_takes(64); }

static void read_takes(void)
{
	struct ibv_send_wr wr = of_memory(IBV_WR_RDMA_READ, SIZE);
	double start = now();

	post(r.a, wr);
	IS(status(r.a), IBV_WC_SUCCESS);
	NOT_BEFORE(start, 2 * latency + SIZE / speed);
	IS(r.mem[0], moved ? 2 : 1);
	IS(memcmp(r.mem, r.mem + 1, SIZE - 1), 0);
}

// Messages are always moved.
static void message(void)
{
	struct ibv_send_wr wr = of_memory(IBV_WR_SEND, SIZE);
	double start = now();

	post_recv(SIZE);
	post(r.a, wr);
	IS(status(r.b), IBV_WC_SUCCESS);
	NOT_BEFORE(start, latency + SIZE / speed);
	IS(status(r.a), IBV_WC_SUCCESS);
	NOT_BEFORE(start, 2 * latency + SIZE / speed);
	IS(memcmp(r.mem, r.mem + SIZE, SIZE), 0);
}

static void one_after_the_other(void)
{
	struct ibv_send_wr wr = of_memory(IBV_WR_RDMA_WRITE, SIZE);
	double start = now();

	for (int i = 0; i < DEPTH; i++)
		post(r.a, wr);
	for (int i = 0; i < DEPTH; i++) {
		IS(status(r.a), IBV_WC_SUCCESS);
		NOT_BEFORE(start, 2 * latency + (i + 1) * (SIZE / speed));
	}
}

// least returns the least time that something takes, without what others take of the
// processor.
static double least(void (*run)(void))
{
	double best = 1;

	for (int i = 0; i < 50; i++) {
		double start = now(), took;

		run();
		took = now() - start;
		if (took < best)
			best = took;
	}
	return best;
}

// TAKES checks that something takes its cost, or less than half of it if costs are switched
// off.
#define TAKES(run, ns) do { double took_ = least(run), want_ = (ns) / 1e9; if (costs ? took_ < want_ : took_ > want_ / 2) { printf("%s: " #run " takes %g s, of %g\n", name, took_, want_); failures++; } } while (0)

static struct ibv_mr *mr;
static struct ibv_qp *qp;
static void registering(void) { mr = ibv_reg_mr(r.pd, r.mem, SIZE, IBV_ACCESS_LOCAL_WRITE); }
static void making_and_ending(void) { registering(); ibv_dereg_mr(mr); }
static void making_a_queue_pair(void) { qp = new_qp(NULL); ibv_destroy_qp(qp); }

static void memory_costs(void)
{
	TAKES(making_and_ending, REG_NS + SIZE / 1000 * REG_PS + DEREG_NS);
	TAKES(making_a_queue_pair, QP_NS);
}

// A window's bind and invalidation delay what their queue pair sends after them.
static void window_costs(void)
{
	struct ibv_mw *w = ibv_alloc_mw(r.pd, IBV_MW_TYPE_2);
	struct ibv_send_wr bind = {.opcode = IBV_WR_BIND_MW}, end = {.opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED},
		wr = of_memory(IBV_WR_RDMA_WRITE, 64);
	int bound = costs ? BIND_NS : 0;
	double start;

	NEED(w);
	bind.bind_mw.mw = w;
	bind.bind_mw.rkey = ibv_inc_rkey(w->rkey);
	bind.bind_mw.bind_info = (struct ibv_mw_bind_info){.mr = r.to, .addr = (uintptr_t)r.to->addr, .length = SIZE, .mw_access_flags = IBV_ACCESS_REMOTE_READ};
	end.invalidate_rkey = bind.bind_mw.rkey;
	start = now();
	post(r.a, bind);
	post(r.a, end);
	IS(status(r.a), IBV_WC_SUCCESS);
	NOT_BEFORE(start, 2 * bound / 1e9);
	bind.bind_mw.rkey = ibv_inc_rkey(bind.bind_mw.rkey);
	end.invalidate_rkey = bind.bind_mw.rkey;
	start = now();
	post(r.a, bind);
	post(r.a, wr);
	IS(status(r.a), IBV_WC_SUCCESS);
	NOT_BEFORE(start, bound / 1e9 + 2 * latency + 64 / speed);
	post(r.a, end);
	IS(status(r.a), IBV_WC_SUCCESS);
	IS(ibv_dealloc_mw(w), 0);
}

// A thread that sleeps until its completion queue reports something is woken, even if nobody
// polls.
static void woken(void)
{
	struct ibv_send_wr wr = of_memory(IBV_WR_RDMA_WRITE, SIZE);
	struct ibv_comp_channel *ch;
	struct ibv_cq *cq, *which;
	struct ibv_qp_init_attr i = {.recv_cq = r.cq, .qp_type = IBV_QPT_RC, .cap = {DEPTH, DEPTH, 1, 1, 64}};
	struct ibv_wc wc;
	void *context;
	double start;

	NEED(ch = ibv_create_comp_channel(r.ctx));
	NEED(cq = ibv_create_cq(r.ctx, 64, NULL, ch, 0));
	ibv_destroy_qp(r.a);
	ibv_destroy_qp(r.b);
	r.b = new_qp(NULL);
	i.send_cq = cq;
	NEED(r.a = ibv_create_qp(r.pd, &i));
	connect_both();
	ibv_req_notify_cq(cq, 0);
	start = now();
	post(r.a, wr);
	NEED(!ibv_get_cq_event(ch, &which, &context));
	NOT_BEFORE(start, 2 * latency + SIZE / speed + (costs ? WAKE_NS / 1e9 : 0));
	IS(ibv_poll_cq(cq, 1, &wc), 1);
	ibv_ack_cq_events(cq, 1);
	ibv_destroy_qp(r.a);
	r.a = NULL;
	ibv_destroy_cq(cq);
	ibv_destroy_comp_channel(ch);
}

static void beyond_the_key(void)
{
	struct ibv_send_wr wr = of_memory(IBV_WR_RDMA_WRITE, SIZE);

	wr.wr.rdma.remote_addr++;
	post(r.a, wr);
	IS(status(r.a), IBV_WC_REM_ACCESS_ERR);
}

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
	{"write", long_write}, {"short write", short_write}, {"read", read_takes}, {"message", message},
	{"one after the other", one_after_the_other}, {"woken", woken},
	{"memory costs", memory_costs}, {"window costs", window_costs}, {"beyond the key", beyond_the_key},
};

int main(int argc, char **argv)
{
	latency = atof(argv[1]) / 1e9;
	speed = atof(argv[2]);
	moved = atoi(argv[3]);
	costs = atoi(argv[4]);
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		name = cases[i].name;
		completion(NULL);
		make(64, 0);
		cases[i].run();
		unmake();
	}
	return failures != 0;
}
