package ibv

// SRQ is a shared receive queue: queue pairs of one protection domain take their
// receives from it.
type SRQ struct {
	PD    *PD
	Owner any // the caller's, see CQ.Owner

	h     handle
	token uint64
}

// CreateSRQ makes a shared receive queue of at least maxWR work requests with
// maxSGE elements each.
func (pd *PD) CreateSRQ(maxWR, maxSGE int) (*SRQ, error) {
	s := &SRQ{PD: pd}
	s.token = objects.add(s)
	var errno int
	s.h, errno = sysCreateSRQ(pd.h, s.token, maxWR, maxSGE)
	if errno != 0 {
		objects.remove(s.token)
		return nil, verbError("ibv_create_srq", pd.Context.Name, errno)
	}
	return s, nil
}

// PostRecv posts receives in order and returns how many were posted; on an error
// the rest was not. It does not allocate.
func (s *SRQ) PostRecv(wrs []RecvWR) (int, error) {
	if len(wrs) == 0 {
		return 0, nil
	}
	n, errno := sysPostSRQRecv(s.h, wrs)
	if errno != 0 {
		return n, verbError("ibv_post_srq_recv", s.PD.Context.Name, errno)
	}
	return n, nil
}

// Arm requests one [EventSRQLimit], when fewer than limit receives are left.
func (s *SRQ) Arm(limit int) error {
	return verbError("ibv_modify_srq", s.PD.Context.Name, sysArmSRQ(s.h, limit))
}

// Close frees the queue. EBUSY: a queue pair still uses it.
func (s *SRQ) Close() error {
	if s.h == 0 {
		return nil
	}
	errno := sysDestroySRQ(s.h)
	if errno == 0 {
		s.h = 0
		objects.remove(s.token)
	}
	return verbError("ibv_destroy_srq", s.PD.Context.Name, errno)
}
