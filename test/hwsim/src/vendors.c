// perftest's programs are also linked with libraries of two vendors, which need internals of
// libibverbs. Here these libraries are empty.
#include "hwsim.h"

#define NONE(name) void *name(void) { errno = EOPNOTSUPP; return NULL; }
NONE(mlx5dv_create_mkey)
NONE(mlx5dv_create_qp)
NONE(mlx5dv_crypto_login)
NONE(mlx5dv_dek_create)
NONE(mlx5dv_dek_destroy)
NONE(mlx5dv_destroy_mkey)
NONE(mlx5dv_devx_general_cmd)
NONE(mlx5dv_open_device)
NONE(mlx5dv_qp_ex_from_ibv_qp_ex)
NONE(efadv_create_qp_ex)
NONE(efadv_query_device)
