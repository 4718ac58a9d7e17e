// What Go sees of the shim: functions that return 0 or a positive errno, take
// the libraries' objects as integers, and exchange the structs below, each the
// twin of a Go struct (sizes are compared when sys_linux.go is compiled). None
// of them holds a pointer, so they may live in Go memory for the time of a call.
#ifndef SAN_IBV_SHIM_H
#define SAN_IBV_SHIM_H

#include <stddef.h>
#include <stdint.h>


typedef uintptr_t san_h;

struct san_device {
	char name[64];
	char sysfs[256]; // its folder under /sys/class/infiniband
	uint64_t guid;   // host byte order
	int32_t transport;
	int32_t index; // the kernel's, or -1
};

struct san_caps {
	char firmware[64];
	uint64_t max_mr_size;
	uint32_t vendor_id, flags;
	int32_t max_qp, max_qp_wr, max_sge, max_sge_rd;
	int32_t max_cqe, max_mr, max_mw;
	int32_t max_qp_rd_atomic, max_qp_init_rd_atomic, ports;
};

struct san_port {
	int32_t state, active_mtu, gids;
	uint32_t max_msg_sz;
	uint16_t lid;
	uint8_t link_layer, flags;
};

struct san_gid {
	uint8_t gid[16];
	uint32_t index, type, netdev, pad;
};

struct san_qp_cap {
	uint32_t send_wr, recv_wr, inline_data;
};

struct san_qp_attr {
	uint32_t state, path_mtu;
	uint32_t rq_psn, sq_psn, dest_qpn, access;
	uint8_t dgid[16];
	uint16_t dlid;
	uint8_t global, sgid_index, hop_limit, port;
	uint8_t max_rd_atomic, max_dest_rd_atomic;
	uint8_t min_rnr_timer, timeout, retry_count, rnr_retry;
	uint8_t traffic_class, sl;
	uint16_t pkey_index;
};

struct san_sge {
	uint64_t addr;
	uint32_t length, lkey;
};

struct san_send_wr {
	uint64_t id;
	uint32_t opcode, flags;
	uint64_t remote_addr;
	uint32_t remote_key, inv_key, bind_access, pad;
	uint64_t mw, mr, bind_length; // bind_mw: of remote_addr, under remote_key
	struct san_sge sge;           // of no bytes: none
};

struct san_recv_wr {
	uint64_t id;
	struct san_sge sge;
};

struct san_posted { // how posting a list ended
	int n, error; // work requests that were posted, and errno for the next one or 0
};

struct san_wc { // struct ibv_wc
	uint64_t id;
	uint32_t status, opcode, vendor_err, byte_len;
	uint32_t imm, qp_num, src_qp, flags;
	uint32_t pad[2];
};

struct san_async {
	uint64_t token; // of the CQ or QP, or 0
	uint32_t type, pad;
};

struct san_addr {
	uint8_t ip[16]; // IPv4: the first four
	uint32_t scope;
	uint16_t family; // 4, 6, or 0: none
	uint16_t port;
};

struct san_conn_param {
	uint32_t qp_num;
	uint8_t responder_resources, initiator_depth, retry_count, rnr_retry_count;
	uint8_t private_len, pad[3];
	uint8_t private_data[256];
};

struct san_cm_event {
	uint64_t token;        // of the id that it is about
	uint64_t listen_token; // connect request: of the listener
	san_h child;           // connect request: the new id
	uint32_t type;
	int32_t status;
	struct san_conn_param param;
};

// Returns NULL, or why the libraries cannot be used (static or malloc'ed once).
const char *san_load(void);
int san_fork_safe(void);

int san_devices(struct san_device *out, int max, int *n);
int san_open(const char *name, san_h *ctx);
int san_close(san_h ctx);
void san_context(san_h ctx, struct san_device *out, int *async_fd, int *vectors);
int san_query_device(san_h ctx, struct san_caps *out);
int san_query_port(san_h ctx, int port, struct san_port *out);
int san_query_gids(san_h ctx, int port, struct san_gid *out, int max, int *n);
int san_get_async(san_h ctx, struct san_async *out);

// A duplicate of fd, close-on-exec, both made non-blocking.
int san_pollable(int fd, int *dup);

int san_alloc_pd(san_h ctx, san_h *pd);
int san_dealloc_pd(san_h pd);
int san_reg_mr(san_h pd, uintptr_t addr, size_t length, uint32_t access, san_h *mr, uint32_t *lkey, uint32_t *rkey);
int san_dereg_mr(san_h mr);
int san_alloc_mw(san_h pd, san_h *mw);
int san_dealloc_mw(san_h mw);
uint32_t san_mw_key(san_h mw);

int san_create_channel(san_h ctx, san_h *ch, int *fd);
int san_destroy_channel(san_h ch);
int san_get_cq_events(san_h ch, uint64_t *tokens, int max, int *n);
int san_create_cq(san_h ctx, int cqe, uint64_t token, san_h ch, int vector, san_h *cq);
int san_destroy_cq(san_h cq);
int san_req_notify(san_h cq);
int san_poll_cq(san_h cq, struct san_wc *out, int n, int times); // number, or negative errno

int san_create_qp(san_h pd, uint64_t token, san_h send_cq, san_h recv_cq,
                  struct san_qp_cap *cap, san_h *qp, uint32_t *num);
int san_destroy_qp(san_h qp);
int san_cm_use_qp(san_h id, san_h qp);
void san_cm_forget_qp(san_h id);
int san_modify_qp(san_h qp, const struct san_qp_attr *attr, uint32_t mask);
int san_query_qp(san_h qp, struct san_qp_attr *attr, uint32_t mask);
struct san_posted san_post_send(san_h qp, const struct san_send_wr *wr, int n);
struct san_posted san_post_recv(san_h qp, const struct san_recv_wr *wr, int n);

int san_cm_create_channel(san_h *ch, int *fd);
void san_cm_destroy_channel(san_h ch);
int san_cm_get_event(san_h ch, uint64_t child_token, struct san_cm_event *out);
int san_cm_create_id(san_h ch, uint64_t token, san_h *id);
int san_cm_destroy_id(san_h id);
int san_cm_bind(san_h id, const struct san_addr *addr);
int san_cm_resolve_addr(san_h id, const struct san_addr *src, const struct san_addr *dst, int timeout_ms);
int san_cm_resolve_route(san_h id, int timeout_ms);
int san_cm_listen(san_h id, int backlog);
int san_cm_connect(san_h id, const struct san_conn_param *p);
int san_cm_accept(san_h id, const struct san_conn_param *p);
int san_cm_reject(san_h id, const uint8_t *data, int len);
int san_cm_disconnect(san_h id);
int san_cm_notify(san_h id);
int san_cm_set_option(san_h id, int option, const void *value, size_t len);
void san_cm_info(san_h id, san_h *ctx, struct san_addr *src, struct san_addr *dst);

#endif
