// The device's reset, or its removal and return (drivers/infiniband/core/uverbs_main.c and
// cma.c: cma_process_remove): whoever raises the word of the shared file has each process's
// device break all queue pairs, and report that it has gone, by both ways. What is made
// afterwards works.
#include "cm.h"

static uint32_t seen;

void note_resets(void) { seen = atomic_load(&shared->resets); }

void look_for_reset(void)
{
	uint32_t now = atomic_load_explicit(&shared->resets, memory_order_relaxed);

	if (now == seen)
		return;
	seen = now;
	for (struct qp *q = all_qps; q; q = q->next)
		qp_error(q);
	async_fatal();
	for (struct cm_id *i = all_ids; i; i = i->next) {
		if (!i->id.verbs || i->listener) // of no device yet; a request that nobody has taken
			continue;
		if (i->listed)
			atomic_store(&i->listed->handle, 0);
		i->listed = NULL;
		report(i, RDMA_CM_EVENT_DEVICE_REMOVAL, 0, NULL);
	}
}
