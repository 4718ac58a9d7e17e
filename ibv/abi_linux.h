// The parts of the binary interface of libibverbs.so.1 (symbol versions
// IBVERBS_1.1 and later) and librdmacm.so.1 (RDMACM_1.0) that shim_linux.c
// uses, declared again here so that no header of rdma-core is needed to build.
//
// A struct that we only read through a pointer that the library gave us may be
// a prefix of the library's: it ends where our interest ends. A struct that we
// hand to the library is complete. TestMirroredStructsAreTheSystems compares every size,
// offset and constant below with the system's headers.
#ifndef SAN_IBV_ABI_H
#define SAN_IBV_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

struct abi_device { // prefix of nothing: complete, but only read
	void *ops[2];
	int node_type;
	int transport_type;
	char name[64];
	char dev_name[64];
	char dev_path[256];
	char ibdev_path[256];
};

struct abi_context;
struct abi_pd;
struct abi_mw;
struct abi_cq;
struct abi_qp;
struct abi_wc;
struct abi_send_wr;
struct abi_recv_wr;

// The verbs that the header's inline functions call through the context. The
// slots named unused_ belong to exported functions or to old binaries.
struct abi_context_ops {
	void *unused_a[7];
	struct abi_mw *(*alloc_mw)(struct abi_pd *, int type);
	void *bind_mw; // type 1 windows only
	int (*dealloc_mw)(struct abi_mw *);
	void *unused_b[1];
	int (*poll_cq)(struct abi_cq *, int n, struct abi_wc *);
	int (*req_notify_cq)(struct abi_cq *, int solicited_only);
	void *unused_c[7];
	void *post_srq_recv; // shared receive queues only
	void *unused_d[4];
	int (*post_send)(struct abi_qp *, struct abi_send_wr *, struct abi_send_wr **bad);
	int (*post_recv)(struct abi_qp *, struct abi_recv_wr *, struct abi_recv_wr **bad);
	void *unused_e[5];
};

struct abi_context { // prefix
	struct abi_device *device;
	struct abi_context_ops ops;
	int cmd_fd;
	int async_fd;
	int num_comp_vectors;
};

struct abi_device_attr {
	char fw_ver[64];
	uint64_t node_guid; // network byte order
	uint64_t sys_image_guid;
	uint64_t max_mr_size;
	uint64_t page_size_cap;
	uint32_t vendor_id;
	uint32_t vendor_part_id;
	uint32_t hw_ver;
	int max_qp;
	int max_qp_wr;
	unsigned int device_cap_flags;
	int max_sge;
	int max_sge_rd;
	int max_cq;
	int max_cqe;
	int max_mr;
	int max_pd;
	int max_qp_rd_atom;
	int max_ee_rd_atom;
	int max_res_rd_atom;
	int max_qp_init_rd_atom;
	int max_ee_init_rd_atom;
	int atomic_cap;
	int max_ee;
	int max_rdd;
	int max_mw;
	int max_raw_ipv6_qp;
	int max_raw_ethy_qp;
	int max_mcast_grp;
	int max_mcast_qp_attach;
	int max_total_mcast_qp_attach;
	int max_ah;
	int max_fmr;
	int max_map_per_fmr;
	int max_srq;
	int max_srq_wr;
	int max_srq_sge;
	uint16_t max_pkeys;
	uint8_t local_ca_ack_delay;
	uint8_t phys_port_cnt;
};

struct abi_port_attr { // the exported ibv_query_port fills this much
	int state;
	int max_mtu;
	int active_mtu;
	int gid_tbl_len;
	uint32_t port_cap_flags;
	uint32_t max_msg_sz;
	uint32_t bad_pkey_cntr;
	uint32_t qkey_viol_cntr;
	uint16_t pkey_tbl_len;
	uint16_t lid;
	uint16_t sm_lid;
	uint8_t lmc;
	uint8_t max_vl_num;
	uint8_t sm_sl;
	uint8_t subnet_timeout;
	uint8_t init_type_reply;
	uint8_t active_width;
	uint8_t active_speed;
	uint8_t phys_state;
	uint8_t link_layer;
	uint8_t flags;
};

struct abi_gid_entry {
	uint8_t gid[16];
	uint32_t gid_index;
	uint32_t port_num;
	uint32_t gid_type;
	uint32_t ndev_ifindex;
};

struct abi_pd { // prefix
	struct abi_context *context;
};

struct abi_mr {
	struct abi_context *context;
	struct abi_pd *pd;
	void *addr;
	size_t length;
	uint32_t handle;
	uint32_t lkey;
	uint32_t rkey;
};

struct abi_mw {
	struct abi_context *context;
	struct abi_pd *pd;
	uint32_t rkey;
	uint32_t handle;
	int type;
};

struct abi_comp_channel {
	struct abi_context *context;
	int fd;
	int refcnt;
};

struct abi_cq { // prefix
	struct abi_context *context;
	struct abi_comp_channel *channel;
	void *cq_context;
	uint32_t handle;
	int cqe;
};

struct abi_qp_cap {
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline_data;
};

struct abi_qp_init_attr {
	void *qp_context;
	struct abi_cq *send_cq;
	struct abi_cq *recv_cq;
	void *srq;
	struct abi_qp_cap cap;
	int qp_type;
	int sq_sig_all;
};

struct abi_qp { // prefix
	struct abi_context *context;
	void *qp_context;
	struct abi_pd *pd;
	struct abi_cq *send_cq;
	struct abi_cq *recv_cq;
	void *srq;
	uint32_t handle;
	uint32_t qp_num;
};

struct abi_global_route {
	uint8_t dgid[16] __attribute__((aligned(8)));
	uint32_t flow_label;
	uint8_t sgid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
};

struct abi_ah_attr {
	struct abi_global_route grh;
	uint16_t dlid;
	uint8_t sl;
	uint8_t src_path_bits;
	uint8_t static_rate;
	uint8_t is_global;
	uint8_t port_num;
};

struct abi_qp_attr {
	int qp_state;
	int cur_qp_state;
	int path_mtu;
	int path_mig_state;
	uint32_t qkey;
	uint32_t rq_psn;
	uint32_t sq_psn;
	uint32_t dest_qp_num;
	unsigned int qp_access_flags;
	struct abi_qp_cap cap;
	struct abi_ah_attr ah_attr;
	struct abi_ah_attr alt_ah_attr;
	uint16_t pkey_index;
	uint16_t alt_pkey_index;
	uint8_t en_sqd_async_notify;
	uint8_t sq_draining;
	uint8_t max_rd_atomic;
	uint8_t max_dest_rd_atomic;
	uint8_t min_rnr_timer;
	uint8_t port_num;
	uint8_t timeout;
	uint8_t retry_cnt;
	uint8_t rnr_retry;
	uint8_t alt_port_num;
	uint8_t alt_timeout;
	uint32_t rate_limit;
};

struct abi_ece {
	uint32_t vendor_id;
	uint32_t options;
	uint32_t comp_mask;
};

struct abi_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

struct abi_mw_bind_info {
	struct abi_mr *mr;
	uint64_t addr;
	uint64_t length;
	unsigned int mw_access_flags;
};

struct abi_send_wr {
	uint64_t wr_id;
	struct abi_send_wr *next;
	struct abi_sge *sg_list;
	int num_sge;
	int opcode;
	unsigned int send_flags;
	uint32_t imm_data; // network byte order; or the key to invalidate, as it is
	union {
		struct {
			uint64_t remote_addr;
			uint32_t rkey;
		} rdma;
		struct {
			uint64_t remote_addr;
			uint64_t compare_add;
			uint64_t swap;
			uint32_t rkey;
		} atomic;
	} wr;
	uint32_t remote_srqn;
	struct {
		struct abi_mw *mw;
		uint32_t rkey;
		struct abi_mw_bind_info bind_info;
	} bind_mw;
};

struct abi_recv_wr {
	uint64_t wr_id;
	struct abi_recv_wr *next;
	struct abi_sge *sg_list;
	int num_sge;
};

struct abi_wc {
	uint64_t wr_id;
	int status;
	int opcode;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm_data; // as in abi_send_wr
	uint32_t qp_num;
	uint32_t src_qp;
	unsigned int wc_flags;
	uint16_t pkey_index;
	uint16_t slid;
	uint8_t sl;
	uint8_t dlid_path_bits;
};

struct abi_async_event {
	union {
		struct abi_cq *cq;
		struct abi_qp *qp;
		int port_num;
	} element;
	int event_type;
};

// librdmacm

struct abi_event_channel {
	int fd;
};

struct abi_cm_id { // prefix
	struct abi_context *verbs;
	struct abi_event_channel *channel;
	void *context;
	struct abi_qp *qp;
	struct {
		struct sockaddr_storage src;
		struct sockaddr_storage dst;
		struct {
			uint8_t sgid[16] __attribute__((aligned(8)));
			uint8_t dgid[16] __attribute__((aligned(8)));
			uint16_t pkey;
		} ib;
		void *path_rec;
		int num_paths;
	} route;
	int ps;
	uint8_t port_num;
};

struct abi_conn_param {
	const void *private_data;
	uint8_t private_data_len;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t flow_control;
	uint8_t retry_count;
	uint8_t rnr_retry_count;
	uint8_t srq;
	uint32_t qp_num;
};

struct abi_cm_event { // prefix: what follows param.conn is not ours
	struct abi_cm_id *id;
	struct abi_cm_id *listen_id;
	int event;
	int status;
	struct abi_conn_param conn;
};

#endif
