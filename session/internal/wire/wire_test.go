package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// encoded returns the message of a Control as it would be sent.
func encoded(c Control) []byte {
	b := make([]byte, c.Len())
	c.Put(b, 0x01020304)
	return b
}

// withHeader returns a message of n bytes with the header h, whose body put writes.
func withHeader(h Header, n int, put func([]byte)) []byte {
	b := make([]byte, n)
	h.Put(b)
	put(b)
	return b
}

func fill(n uint32) func([]byte) { return func(b []byte) { PutFill(b, n) } }

// The bytes of each message are those of docs/PROTOCOL.md.
func TestMessagesAreEncodedAsDocumented(t *testing.T) {
	d := Descriptor{Addr: 0x1112131415161718, Key: 0x2122232425262728, Len: 0x3132333435363738}
	desc := "\x18\x17\x16\x15\x14\x13\x12\x11" + "\x28\x27\x26\x25\x24\x23\x22\x21" + "\x38\x37\x36\x35\x34\x33\x32\x31"
	id := "\x0d\x0c\x0b\x0a\x00\x00\x00\x00"
	const credit = "\x04\x03\x02\x01"
	count := "\x08\x07\x06\x05\x04\x03\x02\x01"
	h := func(t Type, flags uint8) Header { return Header{Type: t, Flags: flags, Credit: 0x01020304} }
	for _, m := range []struct {
		name string
		got  []byte
		want string
	}{
		{"Shutdown", encoded(Plain(TypeShutdown)), "\x0b\x00\x00\x00" + credit},
		{"OfferRead", withHeader(h(TypeOfferRead, FlagMore), OfferReadLen, OfferRead{0x0a0b0c0d, d}.Put), "\x04\x01\x00\x00" + credit + id + desc},
		{"ReadDone", encoded(ReadDone{ID: 0x0a0b0c0d, Flags: FlagGone, Count: 0x0102030405060708}.Control()), "\x07\x02\x00\x00" + credit + id + count},
		{"CancelRead", encoded(Cancel(TypeCancelRead, 0x0a0b0c0d)), "\x09\x00\x00\x00" + credit + id},
		{"Refuse", encoded(Cancel(TypeRefuse, 0x0a0b0c0d)), "\x12\x00\x00\x00" + credit + id},
		{"Note", encoded(Bytes(TypeNote, []byte("abc"))), "\x18\x00\x00\x00" + credit + "abc"},
		{"Inbox", encoded(Inbox(d)), "\x14\x00\x00\x00" + credit + "\x00\x00\x00\x00\x00\x00\x00\x00" + desc},
		{"Fill", withHeader(h(TypeFill, FlagMore), FillLen, fill(0x0a0b0c0d)), "\x15\x01\x00\x00" + credit + id},
		{"Emptied", encoded(Emptied(0x0102030405060708)), "\x16\x00\x00\x00" + credit + "\x00\x00\x00\x00\x00\x00\x00\x00" + count},
	} {
		if string(m.got) != m.want {
			t.Errorf("%s is % x, not % x", m.name, m.got, m.want)
		}
	}
	p := make([]byte, NegotiateLen)
	Params{Version: 2, Credits: 0x11, MaxMessage: 0x1000, Caps: 3}.Put(p)
	want := "\x01\x00\x00\x00\x00\x00\x00\x00" + "SANc" + "\x02\x00\x00\x00" + "\x11\x00\x00\x00" + "\x00\x10\x00\x00" + "\x03\x00\x00\x00" + string(make([]byte, 20))
	if string(p) != want {
		t.Errorf("Negotiate is % x, not % x", p, want)
	}
}

// parsed decodes m by its type and encodes the result again; ok is false if m is refused.
func parsed(m []byte) (again []byte, ok bool) {
	h, err := ParseHeader(m)
	if err != nil {
		return nil, false
	}
	switch h.Type {
	case typeNegotiate:
		return reparsed(m, NegotiateLen, ParseParams, Params.Put)
	case TypeOfferRead:
		return reparsed(m, OfferReadLen, ParseOfferRead, OfferRead.Put)
	case TypeFill:
		return reparsed(m, FillLen, ParseFill, func(n uint32, b []byte) { PutFill(b, n) })
	}
	c, err := parsedControl(h.Type, m)
	if err != nil {
		return nil, false
	}
	b := make([]byte, c.Len())
	c.Put(b, h.Credit)
	return b, true
}

// reparsed is parsed for a message of n bytes, behind which payload may follow.
func reparsed[T any](m []byte, n int, parse func([]byte) (T, error), put func(T, []byte)) ([]byte, bool) {
	v, err := parse(m)
	if err != nil {
		return nil, false
	}
	b := make([]byte, n)
	put(v, b)
	HeaderOf(m).Put(b)
	return b, true
}

func parsedControl(t Type, m []byte) (Control, error) {
	switch t {
	case TypeReadDone:
		d, err := ParseReadDone(m)
		return d.Control(), err
	case TypeCancelRead, TypeRefuse:
		id, err := ParseCancel(m)
		return Cancel(t, id), err
	case TypeInbox:
		d, err := ParseInbox(m)
		return Inbox(d), err
	case TypeNote:
		n, err := ParseNote(m)
		return Bytes(TypeNote, n), err
	case TypeEmptied:
		n, err := ParseEmptied(m)
		return Emptied(n), err
	}
	return Plain(t), nil
}

// Decoding any bytes does not panic. A decoded message, encoded and decoded again, stays the same.
func FuzzMessage(f *testing.F) {
	f.Fuzz(func(t *testing.T, m []byte) {
		first, ok := parsed(m)
		if !ok {
			return
		}
		if len(first) > len(m) && Type(m[0]) != typeNegotiate {
			t.Fatalf("% x was understood though it is shorter than % x", m, first)
		}
		second, ok := parsed(first)
		if !ok || !bytes.Equal(first, second) {
			t.Fatalf("% x became % x, and that %v % x", m, first, ok, second)
		}
	})
}

func TestShortMessagesAreRefused(t *testing.T) {
	for _, c := range []Control{
		ReadDone{}.Control(), Cancel(TypeCancelRead, 0), Cancel(TypeRefuse, 0), Inbox(Descriptor{}), Emptied(0), Bytes(TypeNote, []byte{1}),
	} {
		m := encoded(c)
		if _, ok := parsed(m); !ok {
			t.Errorf("% x is refused", m)
		}
		if _, ok := parsed(m[:len(m)-1]); ok {
			t.Errorf("% x is not refused", m[:len(m)-1])
		}
	}
	for _, x := range []struct {
		t Type
		n int
	}{{TypeOfferRead, OfferReadLen}, {TypeFill, FillLen}, {TypeShutdown, HeaderLen}} {
		m := withHeader(Header{Type: x.t}, x.n, func([]byte) {})
		if _, ok := parsed(m[:x.n-1]); ok {
			t.Errorf("% x is not refused", m[:x.n-1])
		}
	}
}

func TestParamsOfAnotherVersionAreToldApart(t *testing.T) {
	p := Params{Version: Version, Credits: 16, MaxMessage: 256, Caps: CapInbox}
	b := make([]byte, NegotiateLen)
	p.Put(b)
	got, err := ParseParams(b)
	if diff := cmp.Diff(p, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	binary.LittleEndian.PutUint16(b[HeaderLen+4:], Version+1)
	if _, err := ParseParams(b); !errors.Is(err, ErrVersion) {
		t.Errorf("another version: %v", err)
	}
	b[HeaderLen]++
	if _, err := ParseParams(b); err == nil || errors.Is(err, ErrVersion) {
		t.Errorf("another magic: %v", err)
	}
}
