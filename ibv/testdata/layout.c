// Compares the structs of abi_linux.h with those of rdma-core's headers. It only
// has to compile; TestMirroredStructsAreTheSystems does that.
#include <rdma/rdma_cma.h>

#include "../abi_linux.h"

#define SIZE(ours, theirs) _Static_assert(sizeof(struct ours) == sizeof(theirs), "size of " #ours)
#define PREFIX(ours, theirs) _Static_assert(sizeof(struct ours) <= sizeof(theirs), "prefix " #ours)
#define AS(ours, a, theirs, b)                                                                                \
	_Static_assert(offsetof(struct ours, a) == offsetof(theirs, b), "offset of " #ours "." #a);           \
	_Static_assert(sizeof(((struct ours *)0)->a) == sizeof(((theirs *)0)->b), "size of " #ours "." #a)
#define SAME(ours, theirs, field) AS(ours, field, theirs, field)

#define T struct ibv_device
SIZE(abi_device, T);
SAME(abi_device, T, node_type);
SAME(abi_device, T, transport_type);
SAME(abi_device, T, name);
SAME(abi_device, T, dev_name);
SAME(abi_device, T, dev_path);
SAME(abi_device, T, ibdev_path);
#undef T

#define T struct ibv_context_ops
SIZE(abi_context_ops, T);
SAME(abi_context_ops, T, alloc_mw);
SAME(abi_context_ops, T, bind_mw);
SAME(abi_context_ops, T, dealloc_mw);
SAME(abi_context_ops, T, poll_cq);
SAME(abi_context_ops, T, req_notify_cq);
SAME(abi_context_ops, T, post_srq_recv);
SAME(abi_context_ops, T, post_send);
SAME(abi_context_ops, T, post_recv);
#undef T

#define T struct ibv_context
PREFIX(abi_context, T);
SAME(abi_context, T, device);
SAME(abi_context, T, ops);
SAME(abi_context, T, cmd_fd);
SAME(abi_context, T, async_fd);
SAME(abi_context, T, num_comp_vectors);
#undef T

#define T struct ibv_device_attr
SIZE(abi_device_attr, T);
SAME(abi_device_attr, T, fw_ver);
SAME(abi_device_attr, T, node_guid);
SAME(abi_device_attr, T, max_mr_size);
SAME(abi_device_attr, T, page_size_cap);
SAME(abi_device_attr, T, vendor_id);
SAME(abi_device_attr, T, vendor_part_id);
SAME(abi_device_attr, T, hw_ver);
SAME(abi_device_attr, T, max_qp);
SAME(abi_device_attr, T, max_qp_wr);
SAME(abi_device_attr, T, device_cap_flags);
SAME(abi_device_attr, T, max_sge);
SAME(abi_device_attr, T, max_sge_rd);
SAME(abi_device_attr, T, max_cq);
SAME(abi_device_attr, T, max_cqe);
SAME(abi_device_attr, T, max_mr);
SAME(abi_device_attr, T, max_pd);
SAME(abi_device_attr, T, max_qp_rd_atom);
SAME(abi_device_attr, T, max_qp_init_rd_atom);
SAME(abi_device_attr, T, max_mw);
SAME(abi_device_attr, T, max_srq);
SAME(abi_device_attr, T, max_srq_wr);
SAME(abi_device_attr, T, max_srq_sge);
SAME(abi_device_attr, T, local_ca_ack_delay);
SAME(abi_device_attr, T, phys_port_cnt);
#undef T

#define T struct ibv_port_attr
PREFIX(abi_port_attr, T);
SAME(abi_port_attr, T, state);
SAME(abi_port_attr, T, max_mtu);
SAME(abi_port_attr, T, active_mtu);
SAME(abi_port_attr, T, gid_tbl_len);
SAME(abi_port_attr, T, max_msg_sz);
SAME(abi_port_attr, T, lid);
SAME(abi_port_attr, T, active_width);
SAME(abi_port_attr, T, active_speed);
SAME(abi_port_attr, T, phys_state);
SAME(abi_port_attr, T, link_layer);
SAME(abi_port_attr, T, flags);
#undef T

#define T struct ibv_gid_entry
SIZE(abi_gid_entry, T);
SAME(abi_gid_entry, T, gid);
SAME(abi_gid_entry, T, gid_index);
SAME(abi_gid_entry, T, port_num);
SAME(abi_gid_entry, T, gid_type);
SAME(abi_gid_entry, T, ndev_ifindex);
#undef T

#define T struct ibv_pd
PREFIX(abi_pd, T);
SAME(abi_pd, T, context);
#undef T

#define T struct ibv_mr
SIZE(abi_mr, T);
SAME(abi_mr, T, context);
SAME(abi_mr, T, pd);
SAME(abi_mr, T, addr);
SAME(abi_mr, T, length);
SAME(abi_mr, T, handle);
SAME(abi_mr, T, lkey);
SAME(abi_mr, T, rkey);
#undef T

#define T struct ibv_mw
SIZE(abi_mw, T);
SAME(abi_mw, T, context);
SAME(abi_mw, T, pd);
SAME(abi_mw, T, rkey);
SAME(abi_mw, T, handle);
SAME(abi_mw, T, type);
#undef T

#define T struct ibv_comp_channel
SIZE(abi_comp_channel, T);
SAME(abi_comp_channel, T, context);
SAME(abi_comp_channel, T, fd);
SAME(abi_comp_channel, T, refcnt);
#undef T

#define T struct ibv_cq
PREFIX(abi_cq, T);
SAME(abi_cq, T, context);
SAME(abi_cq, T, channel);
SAME(abi_cq, T, cq_context);
SAME(abi_cq, T, handle);
SAME(abi_cq, T, cqe);
#undef T

#define T struct ibv_qp_cap
SIZE(abi_qp_cap, T);
AS(abi_qp_cap, max_send_wr, T, max_send_wr);
AS(abi_qp_cap, max_recv_wr, T, max_recv_wr);
AS(abi_qp_cap, max_send_sge, T, max_send_sge);
AS(abi_qp_cap, max_recv_sge, T, max_recv_sge);
AS(abi_qp_cap, max_inline_data, T, max_inline_data);
#undef T

#define T struct ibv_qp_init_attr
SIZE(abi_qp_init_attr, T);
SAME(abi_qp_init_attr, T, qp_context);
SAME(abi_qp_init_attr, T, send_cq);
SAME(abi_qp_init_attr, T, recv_cq);
SAME(abi_qp_init_attr, T, srq);
SAME(abi_qp_init_attr, T, cap);
SAME(abi_qp_init_attr, T, qp_type);
SAME(abi_qp_init_attr, T, sq_sig_all);
#undef T

#define T struct ibv_qp
PREFIX(abi_qp, T);
SAME(abi_qp, T, context);
SAME(abi_qp, T, qp_context);
SAME(abi_qp, T, pd);
SAME(abi_qp, T, qp_num);
#undef T

#define T struct ibv_global_route
SIZE(abi_global_route, T);
SAME(abi_global_route, T, dgid);
SAME(abi_global_route, T, flow_label);
SAME(abi_global_route, T, sgid_index);
SAME(abi_global_route, T, hop_limit);
SAME(abi_global_route, T, traffic_class);
#undef T

#define T struct ibv_ah_attr
SIZE(abi_ah_attr, T);
SAME(abi_ah_attr, T, grh);
SAME(abi_ah_attr, T, dlid);
SAME(abi_ah_attr, T, sl);
SAME(abi_ah_attr, T, src_path_bits);
SAME(abi_ah_attr, T, static_rate);
SAME(abi_ah_attr, T, is_global);
SAME(abi_ah_attr, T, port_num);
#undef T

#define T struct ibv_qp_attr
SIZE(abi_qp_attr, T);
SAME(abi_qp_attr, T, qp_state);
SAME(abi_qp_attr, T, path_mtu);
SAME(abi_qp_attr, T, rq_psn);
SAME(abi_qp_attr, T, sq_psn);
SAME(abi_qp_attr, T, dest_qp_num);
SAME(abi_qp_attr, T, qp_access_flags);
SAME(abi_qp_attr, T, cap);
SAME(abi_qp_attr, T, ah_attr);
SAME(abi_qp_attr, T, pkey_index);
SAME(abi_qp_attr, T, max_rd_atomic);
SAME(abi_qp_attr, T, max_dest_rd_atomic);
SAME(abi_qp_attr, T, min_rnr_timer);
SAME(abi_qp_attr, T, port_num);
SAME(abi_qp_attr, T, timeout);
SAME(abi_qp_attr, T, retry_cnt);
SAME(abi_qp_attr, T, rnr_retry);
#undef T

#define T struct ibv_ece
SIZE(abi_ece, T);
SAME(abi_ece, T, vendor_id);
SAME(abi_ece, T, options);
SAME(abi_ece, T, comp_mask);
#undef T

#define T struct ibv_sge
SIZE(abi_sge, T);
SAME(abi_sge, T, addr);
SAME(abi_sge, T, length);
SAME(abi_sge, T, lkey);
#undef T

#define T struct ibv_mw_bind_info
SIZE(abi_mw_bind_info, T);
SAME(abi_mw_bind_info, T, mr);
SAME(abi_mw_bind_info, T, addr);
SAME(abi_mw_bind_info, T, length);
SAME(abi_mw_bind_info, T, mw_access_flags);
#undef T

#define T struct ibv_send_wr
SIZE(abi_send_wr, T);
SAME(abi_send_wr, T, wr_id);
SAME(abi_send_wr, T, next);
SAME(abi_send_wr, T, sg_list);
SAME(abi_send_wr, T, num_sge);
SAME(abi_send_wr, T, opcode);
SAME(abi_send_wr, T, send_flags);
SAME(abi_send_wr, T, imm_data);
AS(abi_send_wr, imm_data, T, invalidate_rkey);
SAME(abi_send_wr, T, wr.rdma.remote_addr);
SAME(abi_send_wr, T, wr.rdma.rkey);
SAME(abi_send_wr, T, bind_mw.mw);
SAME(abi_send_wr, T, bind_mw.rkey);
SAME(abi_send_wr, T, bind_mw.bind_info);
#undef T

#define T struct ibv_recv_wr
SIZE(abi_recv_wr, T);
SAME(abi_recv_wr, T, wr_id);
SAME(abi_recv_wr, T, next);
SAME(abi_recv_wr, T, sg_list);
SAME(abi_recv_wr, T, num_sge);
#undef T

#define T struct ibv_wc
SIZE(abi_wc, T);
SAME(abi_wc, T, wr_id);
SAME(abi_wc, T, status);
SAME(abi_wc, T, opcode);
SAME(abi_wc, T, vendor_err);
SAME(abi_wc, T, byte_len);
SAME(abi_wc, T, imm_data);
AS(abi_wc, imm_data, T, invalidated_rkey);
SAME(abi_wc, T, qp_num);
SAME(abi_wc, T, src_qp);
SAME(abi_wc, T, wc_flags);
#undef T

#define T struct ibv_async_event
SIZE(abi_async_event, T);
SAME(abi_async_event, T, element.cq);
SAME(abi_async_event, T, element.qp);
SAME(abi_async_event, T, element.port_num);
SAME(abi_async_event, T, event_type);
#undef T

SIZE(abi_event_channel, struct rdma_event_channel);
SAME(abi_event_channel, struct rdma_event_channel, fd);

#define T struct rdma_cm_id
PREFIX(abi_cm_id, T);
SAME(abi_cm_id, T, verbs);
SAME(abi_cm_id, T, channel);
SAME(abi_cm_id, T, context);
SAME(abi_cm_id, T, qp);
AS(abi_cm_id, route.src, T, route.addr.src_storage);
AS(abi_cm_id, route.dst, T, route.addr.dst_storage);
AS(abi_cm_id, route.path_rec, T, route.path_rec);
SAME(abi_cm_id, T, ps);
SAME(abi_cm_id, T, port_num);
#undef T

#define T struct rdma_conn_param
SIZE(abi_conn_param, T);
SAME(abi_conn_param, T, private_data);
SAME(abi_conn_param, T, private_data_len);
SAME(abi_conn_param, T, responder_resources);
SAME(abi_conn_param, T, initiator_depth);
SAME(abi_conn_param, T, flow_control);
SAME(abi_conn_param, T, retry_count);
SAME(abi_conn_param, T, rnr_retry_count);
SAME(abi_conn_param, T, srq);
SAME(abi_conn_param, T, qp_num);
#undef T

#define T struct rdma_cm_event
PREFIX(abi_cm_event, T);
SAME(abi_cm_event, T, id);
SAME(abi_cm_event, T, listen_id);
SAME(abi_cm_event, T, event);
SAME(abi_cm_event, T, status);
AS(abi_cm_event, conn, T, param.conn);
#undef T
