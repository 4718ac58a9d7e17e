package ibv

// CompChannel is a completion channel. Completion queues made with it announce
// there that they have completions, once for each [CQ.Notify].
type CompChannel struct {
	Context *Context
	h       cObject
	poller  *poller

	// Used between Events and take. take is bound once, so that Events does not allocate.
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

// Events sleeps in the runtime's poller until there are events, takes as many as fit, and fills cqs
// with the completion queues that they came from. A queue may be empty, and may appear twice. The
// events are acknowledged already; for the next one, arm the queue with [CQ.Notify] and then poll it
// once more.
//
// The error wraps os.ErrClosed after Close. One goroutine at a time may call Events.
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
			// A queue that was closed meanwhile is not found any more.
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

// Close wakes Events and frees the channel. Its completion queues must be closed before: otherwise it
// fails with EBUSY, and only ends the waiting.
func (ch *CompChannel) Close() error {
	ch.poller.close()
	return ch.h.close("ibv_destroy_comp_channel", ch.Context.Name, sysDestroyChannel)
}
