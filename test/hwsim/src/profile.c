// The device families, as their drivers' sources and manuals describe them. Paths below
// drivers/infiniband are Linux's, those below providers rdma-core's. Round numbers show the
// order of magnitude of such devices, not of one model.
#include "hwsim.h"

// How long operations take on a NIC; the README has the sources. No source distinguishes the
// families.
#define COSTS .cost = {[COST_REG] = 16000, [COST_REG_BYTE_PS] = 60, [COST_DEREG] = 10000, \
	[COST_BIND] = 1000, [COST_QP] = 1000000, [COST_SLOW_QP] = 10000000, [COST_WAKE] = 5000}

enum { WINDOWS_2B = IBV_DEVICE_MEM_WINDOW_TYPE_2B };

static const struct profile profiles[] = {
	{ // the mlx5 for profiles without a name of their own
		.name = "mlx5-roce", .transport = IBV_TRANSPORT_IB, .link_layer = IBV_LINK_LAYER_ETHERNET,
		.vendor_id = 0x02c9, .part_id = 4129, // ConnectX-7
		// hw/mlx5/qp.c, calc_send_wqe: by the size of a send queue's entry. More is EINVAL.
		.max_inline = 828, .too_much_inline = INLINE_EINVAL,
		.max_qp = 1 << 17, .max_qp_wr = 1 << 15, .max_cq = 1 << 24, .max_cqe = (1 << 22) - 1,
		.max_mr = 1 << 24, .max_pd = 1 << 24, .max_srq = 1 << 23, .max_srq_wr = 32767, .max_mw = 1 << 24,
		.max_sge = 30, .max_sge_rd = 30, .max_rd_atomic = 16,
		.flags = WINDOWS_2B, // hw/mlx5/main.c: with imaicl alone
		.round_up = true, // create_cq, calc_sq_size
		.full_errno = ENOMEM, // providers/mlx5/qp.c: mlx5_wq_overflow
		.limit_errno = ENOMEM, COSTS, // cmd.c: BAD_RES_STATE and LIM of firmware commands
	},
	{
		.name = "mlx5-ib", .transport = IBV_TRANSPORT_IB, .link_layer = IBV_LINK_LAYER_INFINIBAND,
		.vendor_id = 0x02c9, .part_id = 4129,
		.max_inline = 828, .too_much_inline = INLINE_EINVAL,
		.max_qp = 1 << 17, .max_qp_wr = 1 << 15, .max_cq = 1 << 24, .max_cqe = (1 << 22) - 1,
		.max_mr = 1 << 24, .max_pd = 1 << 24, .max_srq = 1 << 23, .max_srq_wr = 32767, .max_mw = 1 << 24,
		.max_sge = 30, .max_sge_rd = 30, .max_rd_atomic = 16,
		.flags = WINDOWS_2B, .round_up = true, .full_errno = ENOMEM, .limit_errno = ENOMEM, COSTS,
	},
	{
		.name = "bnxt_re", .transport = IBV_TRANSPORT_IB, .link_layer = IBV_LINK_LAYER_ETHERNET,
		.vendor_id = 0x14e4, .part_id = 0x1750,
		// hw/bnxt_re/qplib_sp.c, max_inline_data; providers/bnxt_re/verbs.c,
		// bnxt_re_check_qp_limits: no queue pair, and errno stays as it was.
		.max_inline = 96, .too_much_inline = INLINE_NULL,
		.max_qp = 64 << 10, .max_qp_wr = 32767, .max_cq = 64 << 10, .max_cqe = 65535,
		.max_mr = 256 << 10, .max_pd = 64 << 10, .max_srq = 4096, .max_srq_wr = 4095, .max_mw = 256 << 10,
		.max_sge = 6, .max_sge_rd = 6, .max_rd_atomic = 126,
		.flags = WINDOWS_2B, .no_mw_library = true, // the kernel's flag; providers/bnxt_re/main.c has no alloc_mw
		.full_errno = ENOMEM, .limit_errno = ENOMEM, COSTS,
	},
	{
		.name = "irdma-roce", .transport = IBV_TRANSPORT_IB, .link_layer = IBV_LINK_LAYER_ETHERNET,
		.vendor_id = 0x8086, .part_id = 0x1592, // E810
		.max_inline = 101, .too_much_inline = INLINE_EINVAL, // hw/irdma/user.h, IRDMA_MAX_INLINE_DATA_SIZE of generation 2
		.max_qp = 16 << 10, .max_qp_wr = 4063, .max_cq = 32 << 10, .max_cqe = (1 << 20) - 1,
		.max_mr = 1 << 20, .max_pd = 256 << 10, .max_srq = 0, .max_srq_wr = 0, .max_mw = 1 << 20, // E810 has no SRQ
		.max_sge = 13, .max_sge_rd = 13, .max_rd_atomic = 127,
		.flags = 0, // it has windows, but not the flag (hw/irdma/verbs.c, irdma_query_device)
		.full_errno = ENOMEM, .limit_errno = ENOMEM, COSTS,
	},
	{
		.name = "irdma-iwarp", .transport = IBV_TRANSPORT_IWARP, .link_layer = IBV_LINK_LAYER_ETHERNET,
		.vendor_id = 0x8086, .part_id = 0x1592,
		.max_inline = 101, .too_much_inline = INLINE_EINVAL,
		.max_qp = 16 << 10, .max_qp_wr = 4063, .max_cq = 32 << 10, .max_cqe = (1 << 20) - 1,
		.max_mr = 1 << 20, .max_pd = 256 << 10, .max_mw = 1 << 20,
		.max_sge = 13, .max_sge_rd = 13, .max_rd_atomic = 127,
		.no_imm_write = true, .no_last_wqe = true, .sink_needs_remote_write = true, .complete_when_sent = true,
		.full_errno = ENOMEM, .limit_errno = ENOMEM, COSTS,
	},
	{
		.name = "cxgb4", .transport = IBV_TRANSPORT_IWARP, .link_layer = IBV_LINK_LAYER_ETHERNET,
		.vendor_id = 0x1425, .part_id = 0x6401, // T6
		.max_inline = 64, .too_much_inline = INLINE_EINVAL, // hw/cxgb4/qp.c: T4_MAX_SEND_INLINE is more, T4_MAX_WRITE_INLINE too
		.max_qp = 1 << 16, .max_qp_wr = 1 << 10, .max_cq = 1 << 16, .max_cqe = 1 << 14,
		.max_mr = 1 << 20, .max_pd = 1 << 15, .max_srq = 1 << 10, .max_srq_wr = 1 << 10, .max_mw = 0,
		.max_sge = 4, .max_sge_rd = 1, .max_rd_atomic = 32, // c4iw_query_device: T4_MAX_RECV_SGE, max_sge_rd 1
		.no_imm_write = true, .no_last_wqe = true, .sink_needs_remote_write = true, .complete_when_sent = true,
		.full_errno = ENOMEM, .limit_errno = ENOMEM, COSTS,
	},
	{
		.name = "mana", .transport = IBV_TRANSPORT_IB, .link_layer = IBV_LINK_LAYER_ETHERNET,
		.vendor_id = 0x1414, .part_id = 0,
		// providers/mana/wr.c uses no send flags except IBV_SEND_SIGNALED and the like
		.max_inline = 1 << 16, .ignores_inline = true,
		.max_qp = 1 << 14, .max_qp_wr = 4096, .max_cq = 1 << 14, .max_cqe = 1 << 14,
		.max_mr = 1 << 14, .max_pd = 1 << 14, .max_mw = 0,
		.max_sge = 30, .max_sge_rd = 1, .max_rd_atomic = 16,
		.full_errno = ENOMEM, .limit_errno = ENOMEM, COSTS,
	},
	{ // before it had reliable connections (hw/mana/qp.c, mana_ib_create_qp)
		.name = "mana-raw", .transport = IBV_TRANSPORT_IB, .link_layer = IBV_LINK_LAYER_ETHERNET,
		.vendor_id = 0x1414, .part_id = 0, .no_rc = EINVAL,
		.max_inline = 1 << 16, .ignores_inline = true,
		.max_qp = 1 << 14, .max_qp_wr = 4096, .max_cq = 1 << 14, .max_cqe = 1 << 14,
		.max_mr = 1 << 14, .max_pd = 1 << 14, .max_mw = 0,
		.max_sge = 30, .max_sge_rd = 1, .max_rd_atomic = 16,
		.full_errno = ENOMEM, .limit_errno = ENOMEM, COSTS,
	},
	{
		// hw/efa/efa_verbs.c, efa_create_qp: EOPNOTSUPP for what is neither SRD nor UD
		.name = "efa", .transport = IBV_TRANSPORT_UNSPECIFIED, .link_layer = IBV_LINK_LAYER_UNSPECIFIED,
		.vendor_id = 0x1d0f, .part_id = 0xefa2, .no_rc = EOPNOTSUPP,
		.max_inline = 32, .max_qp = 1 << 10, .max_qp_wr = 4096, .max_cq = 1 << 10, .max_cqe = 1 << 15,
		.max_mr = 1 << 16, .max_pd = 1 << 10,
		.max_sge = 2, .max_sge_rd = 1,
		.full_errno = ENOMEM, .limit_errno = ENOMEM, COSTS,
	},
};

const struct profile *find_profile(const char *name)
{
	for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++)
		if (!strcmp(name, profiles[i].name))
			return &profiles[i];
	return NULL;
}
