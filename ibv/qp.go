package ibv

import "syscall"

// QPCap is the size of a queue pair (struct ibv_qp_cap).
type QPCap struct {
	SendWR     uint32 // work requests in the send queue, including binds and invalidations
	RecvWR     uint32
	InlineData uint32 // bytes
}

// QPConfig configures a queue pair. Both queues may share a CQ.
type QPConfig struct {
	PD     *PD
	SendCQ *CQ
	RecvCQ *CQ
	Cap    QPCap
}

// QP is a reliable-connected queue pair.
type QP struct {
	PD    *PD
	Num   uint32
	Cap   QPCap // as granted; on some devices InlineData is less than requested
	Owner any   // for the caller, see CQ.Owner

	h     cObject
	cm    *ID // the id that has the queue pair, or nil
	token uint64
}

// CreateQP makes a queue pair in state RESET. The connection manager can connect it, see [ID.UseQP], or
// the caller, see [QP.Init].
func CreateQP(cfg QPConfig) (*QP, error) {
	const verb = "ibv_create_qp"
	if cfg.PD == nil || cfg.SendCQ == nil || cfg.RecvCQ == nil {
		return nil, verbError(verb, "without PD or CQ", int(syscall.EINVAL))
	}
	q := &QP{PD: cfg.PD, Cap: cfg.Cap}
	q.token = objects.add(q)
	var errno int
	q.h, q.Num, errno = sysCreateQP(cfg.PD.h, q.token, cfg.SendCQ.h, cfg.RecvCQ.h, &q.Cap)
	if errno != 0 {
		objects.remove(q.token)
		return nil, verbError(verb, cfg.PD.Context.Name, errno)
	}
	return q, nil
}

// PostSend posts work requests in order, as one list for up to 32 of them, and returns how many were
// posted. After an error the rest were not posted; after EIO perhaps none of them will be carried out.
// ENOMEM: the send queue is full. EINVAL: the request is wrong (see for example [MW.Invalidate]).
// Requests for one window must not be posted concurrently. It does not allocate, but wrs escapes to the
// heap: reuse it.
func (q *QP) PostSend(wrs []SendWR) (int, error) {
	n, errno := sysPostSend(q.h, wrs)
	return n, verbError("ibv_post_send", q.PD.Context.Name, errno)
}

// PostRecv posts receives in order and returns how many were posted; after an error the rest were not.
// Errors and memory are as for PostSend.
func (q *QP) PostRecv(wrs []RecvWR) (int, error) {
	n, errno := sysPostRecv(q.h, wrs)
	return n, verbError("ibv_post_recv", q.PD.Context.Name, errno)
}

// Close destroys the queue pair. Completions that were not polled are lost. When Close returns, the
// queue pair does not access memory any more. Windows that were bound on it must be closed before. An
// id's queue pair must not be closed while a method of the id runs, but events may be taken meanwhile.
func (q *QP) Close() error {
	if q.h != 0 && q.cm != nil {
		q.cm.forgetQP()
	}
	return q.h.closeObject("ibv_destroy_qp", q.PD.Context.Name, sysDestroyQP, q.token)
}
