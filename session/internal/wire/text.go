package wire

import "fmt"

// names are the names of the types in docs/PROTOCOL.md.
var names = map[Type]string{
	typeNegotiate: "Negotiate", TypeData: "Data", TypeCredit: "Credit", TypeOfferRead: "OfferRead",
	TypeReadDone: "ReadDone", TypeCancelRead: "CancelRead", TypeShutdown: "Shutdown", TypeClose: "Close",
	TypeCloseAck: "CloseAck", TypeAbort: "Abort", TypePing: "Ping", TypePong: "Pong", TypeUrgent: "Urgent",
	TypeRefuse: "Refuse", TypeAskInbox: "AskInbox", TypeInbox: "Inbox", TypeFill: "Fill",
	TypeEmptied: "Emptied", TypeLeaveInbox: "LeaveInbox", TypeNote: "Note", TypeNearDone: "NearDone",
}

// String returns the type's name.
func (t Type) String() string {
	if name, ok := names[t]; ok {
		return name
	}
	return fmt.Sprintf("type-%d", uint8(t))
}

// Text describes a message for people, without its payload: its type, length and credit, and its
// fields. It accepts any bytes.
func Text(m []byte) string {
	h, err := ParseHeader(m)
	if err != nil {
		return err.Error()
	}
	b := fmt.Appendf(nil, "%v len=%d credit=%d", h.Type, len(m), h.Credit)
	switch h.Type {
	case typeNegotiate:
		p, e := ParseParams(m)
		b, err = fmt.Appendf(b, " version=%d credits=%d maxmessage=%d caps=%#x", p.Version, p.Credits, p.MaxMessage, p.Caps), e
	case TypeOfferRead:
		o, e := ParseOfferRead(m)
		b, err = fmt.Appendf(b, " id=%d %s", o.ID, o.Memory.text()), e
	case TypeReadDone:
		d, e := ParseReadDone(m)
		b, err = fmt.Appendf(b, " id=%d count=%d", d.ID, d.Count), e
	case TypeCancelRead, TypeRefuse:
		id, e := ParseCancel(m)
		b, err = fmt.Appendf(b, " id=%d", id), e
	case TypeInbox:
		d, e := ParseInbox(m)
		b, err = fmt.Appendf(b, " %s", d.text()), e
	case TypeFill:
		n, e := ParseFill(m)
		b, err = fmt.Appendf(b, " bytes=%d", n), e
	case TypeEmptied:
		n, e := ParseEmptied(m)
		b, err = fmt.Appendf(b, " upto=%d", n), e
	}
	switch {
	case err != nil:
		b = fmt.Appendf(b, " (%v)", err)
	case h.Type == TypeReadDone && h.Flags&FlagGone != 0:
		b = append(b, " gone"...)
	case h.Type != TypeReadDone && h.Flags&FlagMore != 0:
		b = append(b, " more"...)
	}
	return string(b)
}

func (d Descriptor) text() string {
	s := fmt.Sprintf("memory=%d key=%#x", d.Len, d.Key)
	if d.Returnable {
		s += " returnable"
	}
	return s
}

// Stream returns how many bytes a message brings a stream forward: the stream of its sender or, if
// back, the other one, as for a ReadDone.
func Stream(m []byte) (n int64, back bool) {
	if len(m) < HeaderLen {
		return 0, false
	}
	switch TypeOf(m) {
	case TypeData:
		return int64(len(m) - HeaderLen), false
	case TypeOfferRead:
		return int64(max(len(m)-OfferReadLen, 0)), false
	case TypeFill:
		n, _ := ParseFill(m)
		return int64(n), false
	case TypeReadDone:
		d, _ := ParseReadDone(m)
		return int64(d.Count), true
	}
	return 0, false
}
