// Declarations that the parts of the simulated device share. One lock, hw.mu, guards
// everything except the contents of completion queues, which have their own lock.
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

// Costs in time of a device or the kernel, beyond those of bytes on the link. In ns, except
// for that of a byte.
enum cost {
	COST_REG, COST_REG_BYTE_PS, COST_DEREG, COST_BIND, COST_QP, COST_SLOW_QP, COST_WAKE,
	N_COSTS,
};

// The values of the environment variable HWSIM, and the profile that it names.
struct config {
	char path[256];
	uint64_t seed;
	const struct profile *profile;
	bool calm; // everything happens at once and in order
	uint64_t jitter_ns; // pieces, completions and requests are late by up to this
	uint64_t flush_ns; // a broken queue pair is flushed within this time, and writes until then
	uint64_t kernel_ns; // the time that the connection manager takes for a message, beyond jitter; 0: no time
	uint64_t timewait_ns, cm_timeout_ns;
	unsigned cm_retries; // how often the connection manager repeats a message
	unsigned lost_rtu, cm_loss, dreq_loss; // percent
	unsigned sm_loss; // percent of queries of paths that the subnet manager does not answer
	unsigned loss; // packets per million
	bool silent; // when a process dies, its host dies with it, and nobody reports it
	bool timed; // uses latency_ns and bytes_per_s
	uint64_t latency_ns, bytes_per_s;
	bool costs; // operations take the times below, in timed mode
	uint64_t cost[N_COSTS]; // from the profile or the settings
	bool no_copy; // RDMA writes and reads of 4 KiB and more do not move payload: for figures
	int limit[N_OBJECTS]; // limits of objects; 0: the profile's
	uint64_t max_mr_size, max_msg_sz; // bytes
	int limit_errno; // the error when they are exceeded; 0: the profile's
	bool fork_needed; // ibv_fork_init is needed: a kernel before 5.12
	bool grh; // the port requires a global route header, as virtual functions' do
	bool mw_past_end, mw_any_qp, mw_late, mw_returned; // rules of windows that are not enforced: see the README
};

// A device family: its limits and its behaviour.
struct profile {
	const char *name;
	enum ibv_transport_type transport;
	uint8_t link_layer;
	uint32_t vendor_id, part_id;
	uint32_t max_inline; // the most that a queue pair gets
	enum { INLINE_EINVAL, INLINE_LESS, INLINE_NULL } too_much_inline;
	bool ignores_inline; // IBV_SEND_INLINE has no effect: memory is read later
	int max_qp, max_qp_wr, max_cq, max_cqe, max_mr, max_pd, max_srq, max_srq_wr, max_mw;
	int max_sge, max_sge_rd, max_rd_atomic;
	uint32_t flags; // device_cap_flags
	int no_rc; // the errno when a reliable connection is made, if there are none
	bool no_mw_library; // alloc_mw fails with EOPNOTSUPP, whatever flags says
	bool no_last_wqe; // no IBV_EVENT_QP_LAST_WQE_REACHED
	bool no_imm_write; // RDMA write with immediate data fails with EINVAL
	bool sink_needs_remote_write; // the sink of a read does (iWARP: the response is a write)
	bool negative_errno; // post_send fails with -errno
	bool complete_when_sent; // sends and writes do (iWARP: when TCP has the bytes)
	bool round_up; // queues have more entries than requested: the next power of two
	int full_errno; // of post_send and post_recv
	int limit_errno; // of creating objects
	uint64_t cost[N_COSTS];
};

extern struct config config;
int read_config(void);
const struct profile *find_profile(const char *name);
int limit_of(enum count kind);

// ---- random numbers and time (chance.c) ----

uint64_t now_ns(void);
uint64_t recent_ns(void); // hw.mu is held
uint64_t chance(uint64_t below); // 0 … below-1; hw.mu is held
uint64_t late(uint64_t most); // a time from now on, at most so far away

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

// ---- events with a descriptor (events.c) ----

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
// Removes each event that match selects.
void events_drop(struct events *, bool (*match)(struct event *, void *), void (*drop)(struct event *), void *arg);

// ---- objects (objects.c) ----

struct hw {
	pthread_mutex_t mu;
	pthread_cond_t acked;
	struct qp *busy; // queue pairs with something to do
	bool again; // one of them got more to do after the engine has looked
	uint64_t now; // when the device last looked at the clock
	uint64_t polled; // when the program last polled
	_Atomic int armed; // number of armed completion queues
	_Atomic uint64_t armed_at; // when the last one was armed, in timed mode
};
extern struct hw hw;

struct context {
	struct events async;
	struct context *next;
	struct verbs_context v; // last, except for the fields that follow in ibv_context
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
	int windows; // number bound to it
};

struct mw {
	struct ibv_mw mw;
	uint32_t key; // the present key, or the next one if it is not bound
	struct mr *mr; // NULL: not bound
	struct qp *qp; // on which it is bound
	struct mr *late_mr; // of a window that works although it was invalidated; and its queue pair
	struct qp *late_qp;
	uint64_t addr, length;
	unsigned access;
};

// What a key gives access to.
struct grant {
	struct mr *mr; // the region beneath
	struct mw *mw; // the window, or NULL
};

int pin(void *, size_t, int access); // returns an errno
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
	struct qp *qp; // the queue pair whose slots it frees
	struct srq *srq;
	bool of_send, solicited;
	uint32_t frees; // send queue: slots up to this one; receive queue: one slot
};

struct cq {
	struct ibv_cq cq;
	pthread_mutex_t mu; // guards the fields below; locked after hw.mu
	struct completion *ring;
	uint32_t size, head, tail;
	enum { UNARMED, ARMED_SOLICITED, ARMED } armed;
	bool overrun;
	uint32_t reported, async_events; // events that the program has taken; guarded by hw.mu
	int users; // number of queue pairs
};

int cq_poll(struct ibv_cq *, int, struct ibv_wc *);
int cq_notify(struct ibv_cq *, int);
void cq_put(struct cq *, const struct completion *); // hw.mu is held
void cq_forget(struct cq *, struct qp *);
uint64_t cq_run(uint64_t now); // reports what is due; hw.mu is held

// ---- queue pairs (qp.c) ----

struct send_wqe {
	struct ibv_send_wr wr;
	struct ibv_sge *sge;
	uint8_t *inlined; // NULL: gathered when it is sent
	uint32_t length, msn;
	uint32_t got; // bytes of a read's data
	bool numbered, done;
	enum ibv_wc_status status;
};

struct recv_wqe {
	struct ibv_recv_wr wr;
	struct ibv_sge *sge;
};

// Bytes that are to be written to memory, or a completion to be reported after them.
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

// A response that the responder has still to send, in order.
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
		struct ibv_qp_ex ex; // which begins with that
	};
	struct builder *builder; // for ex
	struct qp *next; // in the list of all queue pairs
	struct qp *next_busy;
	bool is_busy, again; // in the list of busy ones; more to do has come while the engine worked on it
	struct ibv_qp_cap cap;
	bool sig_all;
	struct ibv_qp_attr attr; // as modified
	bool astray; // its packets reach nobody
	bool communicated; // a packet has come
	int windows; // number bound on it
	struct cm_id *id; // the connection manager's
	uint32_t extensions; // that the two ends have negotiated (ibv_set_ece); 0: none
	uint32_t async_events; // number reported

	// requester: positions in sq, counted for ever
	struct send_wqe *sq;
	uint32_t sq_size;
	uint32_t posted, sent, completed; // next to post, to send, to complete
	_Atomic uint32_t freed; // slots before this one are free, as their completions were polled
	uint32_t offset; // in the message at sent
	uint32_t next_msn;
	int reads; // number in progress
	uint64_t send_at; // does not send before
	uint64_t busy_until; // in timed mode: when its present operations end
	uint64_t progress_at; // when the peer last responded
	int retries, rnr_retries; // left
	bool stopped; // a work request has failed: none after it is sent
	struct landings out; // read data and completions

	// responder
	struct recv_wqe *rq; // NULL: it has an srq
	uint32_t rq_size, rq_posted, rq_taken;
	_Atomic uint32_t rq_freed;
	uint32_t expected, received; // number of the expected message, and the bytes of it that have come
	bool gap; // a sequence NAK was sent
	struct recv_wqe current; // for the message that is being received
	bool has_current;
	uint64_t current_got;
	struct owed *owed;
	uint32_t owed_size, owed_first, owed_end;
	int reads_owed;
	bool refused; // a NAK that ends the connection has still to be sent
	struct landings in;

	uint64_t flush_at; // in error: when to flush
	bool want_flush, want_last; // still to do: the flush, the last-WQE event
};

extern struct qp *all_qps;
struct qp *find_qp(uint32_t number);
void qp_busy(struct qp *);
void qp_error(struct qp *); // puts it into the error state
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

// ---- writes and completions that come late (landing.c) ----

void land(struct landings *, const struct grant *, uint8_t *to, const uint8_t *from, uint32_t n);
void land_completion(struct qp *, struct landings *, struct cq *, const struct completion *, uint64_t due); // due 0: right after what it covers
uint64_t land_due(struct qp *, struct landings *, uint64_t now); // returns the next time
void land_all(struct landings *); // writes memory, but reports no completions
void land_drop(struct landings *);
void land_grant(struct mr *, struct mw *); // writes all that one of them has admitted

// ---- the engine (engine.c, requester.c, responder.c, reset.c) ----

#define NEVER UINT64_MAX
enum { MTU = 4096, PORT_LID = 1 };
uint64_t step(void); // hw.mu is held; returns the time of the next step
void start_engine(void);
void look_for_reset(void); // reset.c; hw.mu is held
void note_resets(void); // those before this process has started
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
