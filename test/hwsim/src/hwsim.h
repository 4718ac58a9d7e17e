// What the parts of the simulated device have of each other. One lock, hw.mu, guards
// all but the contents of completion queues, which have their own.
#ifndef HWSIM_H
#define HWSIM_H

#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shared.h"

// ---- configuration (config.c, profile.c) ----

// What takes a device's or the kernel's time besides bytes: in ns, but for a byte's.
enum cost {
	COST_REG, COST_REG_BYTE_PS, COST_DEREG, COST_BIND, COST_QP, COST_SLOW_QP, COST_WAKE,
	N_COSTS,
};

// What the environment variable HWSIM says, and the profile that it names.
struct config {
	char path[256];
	uint64_t seed;
	const struct profile *profile;
	bool calm; // everything at once and in order
	uint64_t jitter_ns; // pieces, completions and requests are late by up to that
	uint64_t flush_ns; // a broken queue pair flushes within that, and writes until then
	uint64_t kernel_ns; // what the connection manager takes for a message, beyond jitter; 0: nothing
	uint64_t timewait_ns, cm_timeout_ns;
	unsigned cm_retries; // repetitions of the connection manager
	unsigned lost_rtu, cm_loss, dreq_loss; // percent
	unsigned sm_loss; // percent of queries of paths that the subnet manager does not answer
	unsigned loss; // packets per million
	bool silent; // a process that dies takes its host along: nobody says so
	bool timed; // by latency_ns and bytes_per_s
	uint64_t latency_ns, bytes_per_s;
	bool costs; // what follows takes time, in timed mode
	uint64_t cost[N_COSTS]; // the profile's, or another
	bool no_copy; // RDMA writes and reads of 4 KiB and more are not moved: for figures
	int limit[N_OBJECTS]; // of objects; 0: the profile's
	uint64_t max_mr_size, max_msg_sz; // bytes
	int limit_errno; // of what exceeds them; 0: the profile's
	bool fork_needed; // ibv_fork_init is: a kernel before 5.12
	bool grh; // the port demands a global route header, as virtual functions' do
	bool mw_past_end, mw_any_qp, mw_late, mw_returned; // what is not enforced of windows: see the README
};

// A device family: its limits and its habits.
struct profile {
	const char *name;
	enum ibv_transport_type transport;
	uint8_t link_layer;
	uint32_t vendor_id, part_id;
	uint32_t max_inline; // a queue pair gets at most that
	enum { INLINE_EINVAL, INLINE_LESS, INLINE_NULL } too_much_inline;
	bool ignores_inline; // IBV_SEND_INLINE has no effect: memory is read later
	int max_qp, max_qp_wr, max_cq, max_cqe, max_mr, max_pd, max_srq, max_srq_wr, max_mw;
	int max_sge, max_sge_rd, max_rd_atomic;
	uint32_t flags; // device_cap_flags
	int no_rc; // the errno of reliable connections, where there are none
	bool no_mw_library; // alloc_mw fails with EOPNOTSUPP, whatever the flags are
	bool no_last_wqe; // no IBV_EVENT_QP_LAST_WQE_REACHED
	bool no_imm_write; // RDMA write with immediate data fails with EINVAL
	bool sink_needs_remote_write; // of a read (iWARP: the response is a write)
	bool negative_errno; // post_send fails with -errno
	bool complete_when_sent; // of sends and writes (iWARP: TCP has the bytes)
	bool round_up; // queues have more entries than requested: the next power of two
	int full_errno; // of post_send and post_recv
	int limit_errno; // of creating objects
	uint64_t cost[N_COSTS];
};

extern struct config config;
int read_config(void);
const struct profile *find_profile(const char *name);
int limit_of(enum count kind);

// ---- chance and time (chance.c) ----

uint64_t now_ns(void);
uint64_t recent_ns(void); // hw.mu is held
uint64_t chance(uint64_t below); // 0 … below-1; hw.mu is held
uint64_t late(uint64_t most); // a time at most so far from now

// ---- the shared file (shared.c) ----

extern struct shared *shared;
extern int self; // this process's slot

int attach(void);
bool alive(int slot);
bool alive_now(int slot);
void ring_bell(int slot);
void wait_bell(uint32_t seen, uint64_t until);
struct packet *put_begin(int to, uint32_t payload, enum packet_type); // NULL: no room now
void put_end(int to, struct packet *);
bool undelivered(int to);
struct packet *take_begin(int from); // NULL: nothing
void take_end(int from, struct packet *);
void count(enum count what, int n);
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- events behind a descriptor (events.c) ----

struct event {
	struct event *next;
};

// A queue whose descriptor is readable while there are events.
struct events {
	int fd;
	struct event *first, **last;
	atomic_bool closed;
};

int events_open(struct events *);
void events_close(struct events *);
void events_put(struct events *, struct event *); // hw.mu is held
struct event *events_wait(struct events *, int fd, void (*taken)(struct event *)); // hw.mu is not held; NULL and errno
// Takes out each event that match selects.
void events_drop(struct events *, bool (*match)(struct event *, void *), void (*drop)(struct event *), void *arg);

// ---- objects (objects.c) ----

struct hw {
	pthread_mutex_t mu;
	pthread_cond_t acked;
	struct qp *busy; // queue pairs with something to do
	bool again; // one of them has more to do than the engine has seen
	uint64_t now; // when the device last looked at the clock
	uint64_t polled; // when the program last did
	_Atomic int armed; // completion queues that are
	_Atomic uint64_t armed_at; // the last one, in timed mode
};
extern struct hw hw;

struct context {
	struct events async;
	struct context *next;
	struct verbs_context v; // last but for what follows ibv_context
};

struct pd {
	struct ibv_pd pd;
	int users;
};

struct context *context_of(struct ibv_context *);
struct ibv_context *open_context(void); // hw.mu is held
extern struct ibv_device device;
int start(void); // attaches the process, once
bool admit(enum count kind); // counts a new object; false and errno: too many
void async_qp(struct ibv_qp *, enum ibv_event_type);
void async_cq(struct ibv_cq *, enum ibv_event_type);
void async_srq(struct ibv_srq *, enum ibv_event_type);
void async_fatal(void);
void forget_async(struct context *, void *element);

// ---- memory and keys (memory.c, pin.c, window.c) ----

struct mr {
	struct ibv_mr mr;
	int access;
	int windows; // bound to it
};

struct mw {
	struct ibv_mw mw;
	uint32_t key; // while it is bound, or would be next
	struct mr *mr; // NULL: not bound
	struct qp *qp; // that it is bound on
	struct mr *late_mr; // of a window that is used though it was invalidated, and its queue pair
	struct qp *late_qp;
	uint64_t addr, length;
	unsigned access;
};

// What a key gives access to.
struct grant {
	struct mr *mr; // beneath
	struct mw *mw; // or NULL
};

int pin(void *, size_t, int access); // an errno
void unpin(void *, size_t);
uint32_t key_for(struct mr *, struct mw *);
void key_free(uint32_t key);
struct mw *find_mw(uint32_t key);
struct mw *next_window_of(struct qp *, uint32_t *at);
bool local_access(struct ibv_pd *, uint32_t lkey, uint64_t addr, uint64_t n, int access, struct grant *);
bool remote_access(struct qp *, uint32_t rkey, uint64_t addr, uint64_t n, int access, struct grant *);
struct ibv_mw *mw_alloc(struct ibv_pd *, enum ibv_mw_type);
int mw_dealloc(struct ibv_mw *);
enum ibv_wc_status mw_bind(struct qp *, const struct ibv_send_wr *);
enum ibv_wc_status mw_invalidate_local(struct qp *, uint32_t key);
bool mw_invalidate_remote(struct qp *, uint32_t key);
void mw_unbind_all(struct qp *);

// ---- completion (cq.c) ----

struct completion {
	struct ibv_wc wc;
	struct qp *qp; // whose slots it frees
	struct srq *srq;
	bool of_send, solicited;
	uint32_t frees; // send queue: slots up to that; receive queue: one
};

struct cq {
	struct ibv_cq cq;
	pthread_mutex_t mu; // guards what follows; taken below hw.mu
	struct completion *ring;
	uint32_t size, head, tail;
	enum { UNARMED, ARMED_SOLICITED, ARMED } armed;
	bool overrun;
	uint32_t reported, async_events; // that the program has taken; guarded by hw.mu
	int users; // queue pairs
};

int cq_poll(struct ibv_cq *, int, struct ibv_wc *);
int cq_notify(struct ibv_cq *, int);
void cq_put(struct cq *, const struct completion *); // hw.mu is held
void cq_forget(struct cq *, struct qp *);
uint64_t cq_run(uint64_t now); // announces what is due; hw.mu is held

// ---- queue pairs (qp.c) ----

struct send_wqe {
	struct ibv_send_wr wr;
	struct ibv_sge *sge;
	uint8_t *inlined; // NULL: gathered when it is sent
	uint32_t length, msn;
	uint32_t got; // of a read's data
	bool numbered, done;
	enum ibv_wc_status status;
};

struct recv_wqe {
	struct ibv_recv_wr wr;
	struct ibv_sge *sge;
};

// What is on its way into memory, or to the completion queue behind it.
struct landing {
	struct landing *next;
	uint64_t due;
	bool placed;
	bool is_completion;
	struct cq *cq;
	struct completion c;
	struct grant grant;
	uint8_t *to;
	uint32_t bytes;
	uint8_t data[];
};

struct landings {
	struct landing *first, **last;
};

// What the responder owes the requester, in order.
struct owed {
	enum { OWED_ACK, OWED_NAK, OWED_READ } kind;
	enum nak code;
	uint32_t msn;
	uint64_t raddr;
	uint32_t rkey, length, sent;
	uint64_t due;
};

struct qp {
	union {
		struct ibv_qp qp;
		struct ibv_qp_ex ex; // whose beginning that is
	};
	struct builder *builder; // of ex
	struct qp *next; // of all
	struct qp *next_busy;
	bool is_busy, again; // on the list; more came up while the engine was at it
	struct ibv_qp_cap cap;
	bool sig_all;
	struct ibv_qp_attr attr; // as modified
	bool astray; // its packets go where nobody is
	bool communicated; // something has come
	int windows; // bound on it
	struct cm_id *id; // of the connection manager
	uint32_t extensions; // that the two ends have agreed on (ibv_set_ece); 0: none
	uint32_t async_events; // reported

	// requester: positions in sq, counted for ever
	struct send_wqe *sq;
	uint32_t sq_size;
	uint32_t posted, sent, completed; // next to post, to send, to complete
	_Atomic uint32_t freed; // slots up to that are free, once their completion was polled
	uint32_t offset; // of the message at sent
	uint32_t next_msn;
	int reads; // under way
	uint64_t send_at; // not before
	uint64_t busy_until; // in timed mode: with what it has taken to do
	uint64_t progress_at; // when the peer last responded
	int retries, rnr_retries; // left
	bool stopped; // a work request has failed: nothing behind it is sent
	struct landings out; // read data and completions

	// responder
	struct recv_wqe *rq; // NULL: srq
	uint32_t rq_size, rq_posted, rq_taken;
	_Atomic uint32_t rq_freed;
	uint32_t expected, received; // message, and offset in it
	bool gap; // a sequence NAK was sent
	struct recv_wqe current; // of the message that is being received
	bool has_current;
	uint64_t current_got;
	struct owed *owed;
	uint32_t owed_size, owed_first, owed_end;
	int reads_owed;
	bool refused; // a NAK that ends the connection is owed
	struct landings in;

	uint64_t flush_at; // in error: when to flush
	bool want_flush, want_last; // still to be done: flush, last-WQE event
};

extern struct qp *all_qps;
struct qp *find_qp(uint32_t number);
void qp_busy(struct qp *);
void qp_error(struct qp *); // to the error state
void qp_last_wqe(struct qp *);
int modify_qp(struct ibv_qp *, struct ibv_qp_attr *, int mask); // hw.mu is held

// ---- work requests (work.c) ----

int work_post_send(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
int work_post_recv(struct ibv_qp *, struct ibv_recv_wr *, struct ibv_recv_wr **);
bool gather(struct qp *, const struct send_wqe *, uint32_t offset, uint32_t n, uint8_t *to);
bool scatter(struct qp *, struct landings *, const struct ibv_sge *, int nsge, int access, uint32_t offset, const uint8_t *from, uint32_t n);
uint64_t sge_length(const struct ibv_sge *, int n);

// ---- work requests by ibv_wr_* (builder.c) ----

struct ibv_qp *builder_create_qp(struct ibv_context *, struct ibv_qp_init_attr_ex *);
void builder_free(struct builder *);

// ---- shared receive queues (srq.c) ----

struct srq {
	struct ibv_srq srq;
	struct recv_wqe *rq;
	uint32_t size, posted, taken;
	_Atomic uint32_t freed;
	uint32_t max_sge, limit;
	int users;
	uint32_t async_events;
};

int srq_post_recv(struct ibv_srq *, struct ibv_recv_wr *, struct ibv_recv_wr **);
bool srq_take(struct srq *, struct recv_wqe *);

// ---- what lands late (landing.c) ----

void land(struct landings *, const struct grant *, uint8_t *to, const uint8_t *from, uint32_t n);
void land_completion(struct qp *, struct landings *, struct cq *, const struct completion *, uint64_t due); // 0: of its own accord
uint64_t land_due(struct qp *, struct landings *, uint64_t now); // the next time
void land_all(struct landings *); // memory, not completions
void land_drop(struct landings *);
void land_grant(struct mr *, struct mw *); // all that was granted by one of them

// ---- the engine (engine.c, requester.c, responder.c, reset.c) ----

#define NEVER UINT64_MAX
enum { MTU = 4096, PORT_LID = 1 };
uint64_t step(void); // hw.mu is held; the time of the next
void start_engine(void);
void look_for_reset(void); // reset.c; hw.mu is held
void note_resets(void); // those before this process
void wake_engine(void);

uint64_t requester_run(struct qp *, uint64_t now);
void requester_response(struct qp *, const struct packet *, const uint8_t *payload);
void requester_flush(struct qp *);
uint64_t responder_run(struct qp *, uint64_t now);
void responder_request(struct qp *, const struct packet *, const uint8_t *payload);
void responder_flush(struct qp *);

// ---- timed mode (timed.c) ----

enum { UNMOVED_FROM = 4096 };
uint64_t arrival(struct qp *, uint32_t n);
void compute(uint64_t ns); // hw.mu is not held in these two
void idle(uint64_t ns);
bool unmoved(enum packet_type, uint32_t length);
uint32_t packet_bytes(enum packet_type, uint32_t length, uint32_t left);
void timed_engine(void);
void timed_post(struct qp *); // hw.mu is held

// ---- the connection manager (cm.c, cm_wire.c) ----

void cm_packet(const struct packet *, const uint8_t *payload);
uint64_t cm_run(uint64_t now);
void cm_communicated(struct qp *);

#endif
