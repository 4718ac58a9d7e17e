// The connection manager's own declarations.
#ifndef HWSIM_CM_H
#define HWSIM_CM_H

#include "hwsim.h"

#include <netinet/in.h>

// The sizes of private data in the messages. Those of a request are without the 36 bytes that
// carry the addresses (IBTA specification volume 1, 12.6 and annex A11; rdma_connect(3)).
enum { REQ_DATA = 56, REP_DATA = 196, REJ_DATA = 148, MPA_DATA = 512, DATA = 255 };

// Reasons of REJ (IBTA 12.6.7.2).
enum { REJ_TIMEOUT = 4, REJ_NO_LISTENER = 8, REJ_CONSUMER = 28 };

struct addr {
	uint16_t family, port; // port in host order
	uint8_t ip[16];
};

struct cm_message {
	enum { REQ, REP, RTU, REJ, DREQ, DREP } type;
	uint32_t from, to; // handles
	uint32_t qpn;
	uint16_t reason;
	uint8_t served, issued; // reads: responder resources, initiator depth
	uint8_t retry, rnr_retry, srq;
	uint32_t ece_vendor, ece_options;
	struct addr src, dst;
	uint8_t data_len;
	uint8_t data[DATA];
};

enum cm_state {
	IDLE, BOUND, LISTENING, ADDR_RESOLVED, ROUTE_RESOLVED,
	REQ_SENT, REP_RECEIVED, // active
	REQ_RECEIVED, REP_SENT, // passive
	ESTABLISHED, DREQ_SENT, DREQ_RECEIVED, TIMEWAIT, ENDED,
};

struct cm_id {
	struct rdma_cm_id id;
	struct cm_id *next, *next_timer;
	uint32_t handle;
	enum cm_state state;
	struct addr src, dst;
	int peer; // its slot
	int64_t peer_attached; // tells which process of the slot it is
	uint32_t peer_handle;
	struct listener *listed; // of a listener
	int backlog, pending; // requests that were not accepted yet
	struct cm_id *listener; // of a passive id, until accepted
	struct cm_message sent; // the last message that may have to be repeated
	struct cm_message request; // of a passive id
	uint64_t timer_at; // 0: none
	bool on_timers;
	unsigned tries;
	uint8_t ack_timeout;
	struct rdma_conn_param param; // own
	struct ibv_ece own_ece, peer_ece;
	uint32_t reported, acknowledged; // events
};

struct cm_channel {
	struct rdma_event_channel c;
	struct events events;
	int ids;
};

struct cm_event {
	struct event e;
	struct rdma_cm_event ev;
	struct cm_id *to; // the id whose end waits for the acknowledgement
	uint8_t data[256];
};

extern struct cm_id *all_ids;
struct cm_id *new_id(struct rdma_event_channel *, void *owner, enum rdma_port_space);
struct cm_id *find_id(uint32_t handle);
void free_id(struct cm_id *); // one without any event left
struct ibv_context *cm_context(void);
void report(struct cm_id *, enum rdma_cm_event_type, int status, const struct cm_message *);
bool from_sockaddr(const struct sockaddr *, struct addr *);
void to_sockaddr(const struct addr *, struct sockaddr_storage *);
bool is_local(const struct addr *);
int qp_to_init(struct cm_id *);
int qp_to_rts(struct cm_id *, const struct cm_message *peer);

void set_timer(struct cm_id *, uint64_t after);
void clear_timer(struct cm_id *);
void transmit(struct cm_id *, struct cm_message *, bool repeat);
void answer(int slot, uint32_t to, int type);
void end_connection(struct cm_id *); // sends what destroying an id sends
struct listener *find_listener(const struct addr *, int *slot);
void enter_timewait(struct cm_id *);

#endif
