// The device's reset, or its removal and return (drivers/infiniband/core/uverbs_main.c and
// cma.c: cma_process_remove). When the word in the shared file is raised, each process's
// device breaks all queue pairs, and reports by both kinds of events that it has gone. Objects
// that are made afterwards work.
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
		if (!i->id.verbs || i->listener) // an id without a device yet, or a request that nobody has taken
			continue;
		if (i->listed)
			atomic_store(&i->listed->handle, 0);
		i->listed = NULL;
		report(i, RDMA_CM_EVENT_DEVICE_REMOVAL, 0, NULL);
	}
}
