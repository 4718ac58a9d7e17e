package session

import "time"

// What the box needs of a session: memory, which may have to be waited for, and a timer.

// openBox asks for the peer's inbox if there is none, and allocates a registered box once
// there is one. It gives one back that cannot be registered. wr.op is held.
func (s *Session) openBox() {
	var old []byte
	alloc := false
	s.withSender(func(tx *sender) {
		if tx.box.unusable() && !tx.gone && tx.lent == nil {
			old = tx.leaveInbox()
		} else {
			alloc = tx.wantInbox()
		}
	})
	if old != nil {
		s.mem.Free(old)
	}
	if !alloc {
		return
	}
	buf := allocBox(s.mem, &s.lim, s.cfg.SendBudget)
	s.withSender(func(tx *sender) { tx.openBox(buf) })
}

// restBoxes starts the timer that gives the boxes back once they are idle.
func (s *Session) restBoxes() { s.withSender(s.restBoxesLocked) }

func (s *Session) restBoxesLocked(tx *sender) {
	o := &tx.box
	if o.inbox.Len > 0 && !o.resting && !tx.gone {
		o.resting = true
		at := o.filled
		time.AfterFunc(boxRest, func() { s.leaveIfIdle(at) })
	}
}

// leaveIfIdle gives the boxes back if nothing was written since position at, and
// otherwise checks again after boxRest.
func (s *Session) leaveIfIdle(at int64) {
	if !s.startWorker() {
		return
	}
	defer s.workers.Done()
	alone := s.wr.op.tryLock()
	var buf []byte
	s.withSender(func(tx *sender) {
		tx.box.resting = false
		if alone && tx.box.idle(at) && !tx.gone && tx.lent == nil {
			buf = tx.leaveInbox()
		}
		s.restBoxesLocked(tx)
	})
	s.leftBehind()
	if buf != nil {
		s.mem.Free(buf)
	}
	if alone {
		s.wr.op.Unlock()
	}
}

// freeBox gives the memory back, after the endpoint and all operations have ended.
func (s *Session) freeBox() {
	if buf := s.tx.box.release(); buf != nil {
		s.mem.Free(buf)
	}
}
