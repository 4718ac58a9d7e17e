package ibv

// CompChannel is a completion channel. Completion queues made with it announce
// there that they have completions, once for each [CQ.Notify].
type CompChannel struct {
	Context *Context
	h       handle
	poller  *poller

	// Of Events, between it and take, which is bound once: Events does not allocate.
	tokens     [eventBatch]uint64
	want, got  int
	errno      int
	takeTokens func(uintptr) bool
}

// eventBatch is how many events are taken by one call into C.
const eventBatch = 64

// CreateCompChannel makes a completion channel.
func (c *Context) CreateCompChannel() (*CompChannel, error) {
	h, fd, errno := sysCreateChannel(c.h)
	if errno != 0 {
		return nil, verbError("ibv_create_comp_channel", c.Name, errno)
	}
	p, err := newPoller(fd, "completion channel of "+c.Name)
	if err != nil {
		sysDestroyChannel(h)
		return nil, err
	}
	ch := &CompChannel{Context: c, h: h, poller: p}
	ch.takeTokens = ch.take
	return ch, nil
}

func (ch *CompChannel) take(uintptr) bool {
	ch.got, ch.errno = sysGetCQEvents(ch.h, ch.tokens[:ch.want])
	return ch.errno != errnoAgain
}

// Events sleeps in the runtime's poller until there are events, takes as many as
// fit, and fills cqs with the completion queues that they came from. A queue may
// appear though it is empty, and may appear twice. The events are already
// acknowledged; for the next one, arm the queue with [CQ.Notify] and then poll it once
// more.
//
// The error wraps os.ErrClosed after Close. One goroutine at a time.
func (ch *CompChannel) Events(cqs []*CQ) (int, error) {
	if len(cqs) == 0 {
		return 0, nil
	}
	ch.want = min(len(cqs), eventBatch)
	for {
		if err := ch.poller.wait(ch.takeTokens); err != nil {
			return 0, err
		}
		if ch.errno != 0 {
			return 0, verbError("ibv_get_cq_event", ch.Context.Name, ch.errno)
		}
		n := 0
		for _, token := range ch.tokens[:ch.got] {
			// A queue that was closed meanwhile is not there any more.
			if cq, ok := objects.get(token).(*CQ); ok {
				cqs[n] = cq
				n++
			}
		}
		if n > 0 {
			return n, nil
		}
	}
}

// Close wakes Events and frees the channel. Its completion queues must be closed
// before: otherwise it fails with EBUSY, and only ends the waiting.
func (ch *CompChannel) Close() error {
	ch.poller.close()
	if ch.h == 0 {
		return nil
	}
	errno := sysDestroyChannel(ch.h)
	if errno == 0 {
		ch.h = 0
	}
	return verbError("ibv_destroy_comp_channel", ch.Context.Name, errno)
}

// CQ is a completion queue. It must hold as many completions as all the queues
// that use it together, or it overruns, and all of them fail.
type CQ struct {
	Context *Context
	// Owner is the caller's, to find its way back from [CompChannel.Events] and
	// [AsyncChannel.Event]. Set it before the queue is used.
	Owner any

	h     handle
	token uint64
}

// CreateCQ makes a completion queue for at least size completions. With a nil
// channel it can only be polled. Vector is below [Context.CompVectors].
func (c *Context) CreateCQ(size int, ch *CompChannel, vector int) (*CQ, error) {
	cq := &CQ{Context: c}
	var chh handle
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

// Poll takes completions from the queue, up to the length of wcs, without
// blocking: 0 means that there are none. It does not allocate itself, but wcs escapes
// to the heap: best reuse it.
func (cq *CQ) Poll(wcs []WC) (int, error) { return cq.Spin(wcs, 1) }

// Spin is Poll, tried up to times times in one call into C until there are completions.
func (cq *CQ) Spin(wcs []WC, times int) (int, error) {
	if len(wcs) == 0 {
		return 0, nil
	}
	n := sysPollCQ(cq.h, wcs, times)
	if n < 0 {
		return 0, verbError("ibv_poll_cq", cq.Context.Name, -n)
	}
	return n, nil
}

// Notify asks for one event on the queue's channel at the next completion. A
// completion that came between the last Poll and Notify makes no event: poll
// once more after it. SolicitedOnly: for solicited receives and failures only.
func (cq *CQ) Notify(solicitedOnly bool) error {
	if errno := sysReqNotify(cq.h, solicitedOnly); errno != 0 {
		return verbError("ibv_req_notify_cq", cq.Context.Name, errno)
	}
	return nil
}

// Close frees the queue. EBUSY: a queue pair still uses it.
func (cq *CQ) Close() error {
	if cq.h == 0 {
		return nil
	}
	errno := sysDestroyCQ(cq.h)
	if errno == 0 {
		cq.h = 0
		objects.remove(cq.token)
	}
	return verbError("ibv_destroy_cq", cq.Context.Name, errno)
}
