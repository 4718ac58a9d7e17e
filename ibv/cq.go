package ibv

// CQ is a completion queue. It must hold as many completions as all the queues
// that use it together, or it overruns, and all of them fail.
type CQ struct {
	Context *Context
	// Owner is for the caller, which gets it back from [CompChannel.Events] and [AsyncChannel.Event].
	// Set it before the queue is used.
	Owner any

	h     cObject
	token uint64
}

// CreateCQ makes a completion queue for at least size completions. With a nil
// channel it can only be polled. Vector is below [Context.CompVectors].
func (c *Context) CreateCQ(size int, ch *CompChannel, vector int) (*CQ, error) {
	cq := &CQ{Context: c}
	var chh cObject
	if ch != nil {
		chh = ch.h
	}
	cq.token = objects.add(cq)
	var errno int
	cq.h, errno = sysCreateCQ(c.h, size, cq.token, chh, vector)
	if errno != 0 {
		objects.remove(cq.token)
		return nil, verbError("ibv_create_cq", c.Name, errno)
	}
	return cq, nil
}

// Poll takes completions from the queue, up to the length of wcs, without blocking. It returns 0 if
// there are none. It does not allocate, but wcs escapes to the heap: reuse it.
func (cq *CQ) Poll(wcs []WC) (int, error) { return cq.Spin(wcs, 1) }

// Spin is Poll, tried up to times times in one call into C until there are completions.
func (cq *CQ) Spin(wcs []WC, times int) (int, error) {
	n := sysPollCQ(cq.h, wcs, times)
	if n < 0 {
		return 0, verbError("ibv_poll_cq", cq.Context.Name, -n)
	}
	return n, nil
}

// Notify requests one event on the queue's channel at the next completion. A completion between the
// last Poll and Notify makes no event: poll once more afterwards.
func (cq *CQ) Notify() error {
	return verbError("ibv_req_notify_cq", cq.Context.Name, sysReqNotify(cq.h))
}

// Close frees the queue. EBUSY: a queue pair still uses it.
func (cq *CQ) Close() error {
	return cq.h.closeObject("ibv_destroy_cq", cq.Context.Name, sysDestroyCQ, cq.token)
}
