// Functions for what programs print, and calls that the simulated device does not support.
#include "cm.h"

#include <netdb.h>
#include <poll.h>

const char *ibv_wc_status_str(enum ibv_wc_status s)
{
	static const char *const names[] = {
		"success", "local length error", "local QP operation error", "local EE context operation error",
		"local protection error", "work request flushed", "memory window bind error", "bad response",
		"local access error", "remote invalid request", "remote access error", "remote operation error",
		"transport retry counter exceeded", "RNR retry counter exceeded",
	};

	return s < sizeof names / sizeof *names ? names[s] : "error";
}

const char *ibv_event_type_str(enum ibv_event_type e)
{
	static char name[32];

	snprintf(name, sizeof name, "event %d", e);
	return name;
}

const char *ibv_node_type_str(enum ibv_node_type t) { return t == IBV_NODE_RNIC ? "iWARP NIC" : "channel adapter"; }
const char *ibv_port_state_str(enum ibv_port_state s) { return s == IBV_PORT_ACTIVE ? "active" : "not active"; }

const char *rdma_event_str(enum rdma_cm_event_type e)
{
	static const char *const names[] = {
		"RDMA_CM_EVENT_ADDR_RESOLVED", "RDMA_CM_EVENT_ADDR_ERROR", "RDMA_CM_EVENT_ROUTE_RESOLVED",
		"RDMA_CM_EVENT_ROUTE_ERROR", "RDMA_CM_EVENT_CONNECT_REQUEST", "RDMA_CM_EVENT_CONNECT_RESPONSE",
		"RDMA_CM_EVENT_CONNECT_ERROR", "RDMA_CM_EVENT_UNREACHABLE", "RDMA_CM_EVENT_REJECTED",
		"RDMA_CM_EVENT_ESTABLISHED", "RDMA_CM_EVENT_DISCONNECTED", "RDMA_CM_EVENT_DEVICE_REMOVAL",
		"RDMA_CM_EVENT_MULTICAST_JOIN", "RDMA_CM_EVENT_MULTICAST_ERROR", "RDMA_CM_EVENT_ADDR_CHANGE",
		"RDMA_CM_EVENT_TIMEWAIT_EXIT",
	};

	return e < sizeof names / sizeof *names ? names[e] : "?";
}

// rdma_getaddrinfo finds addresses by name, for the connected port space.
int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints, struct rdma_addrinfo **res)
{
	struct addrinfo want = {.ai_socktype = SOCK_STREAM}, *found;
	struct rdma_addrinfo *r;
	bool passive = hints && hints->ai_flags & RAI_PASSIVE;
	int error;

	if (hints && hints->ai_flags & RAI_NUMERICHOST)
		want.ai_flags |= AI_NUMERICHOST;
	if (hints && hints->ai_family != AF_IB)
		want.ai_family = hints->ai_family;
	if (passive)
		want.ai_flags |= AI_PASSIVE;
	error = getaddrinfo(node, service, &want, &found);
	if (error)
		return error;
	r = calloc(1, sizeof *r);
	r->ai_flags = hints ? hints->ai_flags : 0;
	r->ai_family = found->ai_family;
	r->ai_qp_type = IBV_QPT_RC;
	r->ai_port_space = RDMA_PS_TCP;
	if (passive) {
		r->ai_src_addr = calloc(1, sizeof(struct sockaddr_storage));
		memcpy(r->ai_src_addr, found->ai_addr, r->ai_src_len = found->ai_addrlen);
	} else {
		r->ai_dst_addr = calloc(1, sizeof(struct sockaddr_storage));
		memcpy(r->ai_dst_addr, found->ai_addr, r->ai_dst_len = found->ai_addrlen);
	}
	freeaddrinfo(found);
	*res = r;
	return 0;
}

void rdma_freeaddrinfo(struct rdma_addrinfo *r)
{
	free(r->ai_src_addr);
	free(r->ai_dst_addr);
	free(r);
}

#define ABSENT(type, name, args, ret) type name args { errno = EOPNOTSUPP; return ret; }
ABSENT(struct ibv_ah *, ibv_create_ah, (struct ibv_pd *pd, struct ibv_ah_attr *a), NULL)
ABSENT(struct ibv_ah *, ibv_create_ah_from_wc, (struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *g, uint8_t port), NULL)
ABSENT(int, ibv_destroy_ah, (struct ibv_ah *ah), EOPNOTSUPP)
ABSENT(int, ibv_attach_mcast, (struct ibv_qp *q, const union ibv_gid *g, uint16_t lid), EOPNOTSUPP)
ABSENT(int, ibv_detach_mcast, (struct ibv_qp *q, const union ibv_gid *g, uint16_t lid), EOPNOTSUPP)
int ibv_fork_init(void) { return 0; }

// Linux before 5.12 shares the pages of registered memory with forked children.
enum ibv_fork_status ibv_is_fork_initialized(void) { return start() || config.fork_needed ? IBV_FORK_DISABLED : IBV_FORK_UNNEEDED; }

// Programs that connect over rsockets need librdmacm's own. The programs here poll descriptors
// that are not rsockets (rping, ucmatose).
int rpoll(struct pollfd *fds, nfds_t n, int timeout) { return poll(fds, n, timeout); }
