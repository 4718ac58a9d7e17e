package wire

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// Each type has the name in the table of docs/PROTOCOL.md, and no other number has a name.
func TestTypesAreNamedAsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../../docs/PROTOCOL.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(doc), "\n## Messages\n")
	table, _, _ := strings.Cut(rest, "\n#")
	documented := make(map[Type]string)
	for _, row := range regexp.MustCompile(`(?m)^\| (\d+) \| ([A-Z]\w+) \|`).FindAllStringSubmatch(table, -1) {
		n, _ := strconv.Atoi(row[1])
		documented[Type(n)] = row[2]
	}
	for n := range 256 {
		want, ok := documented[Type(n)]
		if !ok {
			want = fmt.Sprintf("type-%d", n)
		}
		if got := Type(n).String(); got != want {
			t.Errorf("%d is %q, documented as %q", n, got, want)
		}
	}
	if len(documented) != 21 {
		t.Errorf("the table has %d types", len(documented))
	}
}

// Text describes a message's content, and Stream which stream it continues, and how far.
func TestTextAndStream(t *testing.T) {
	d := Descriptor{Addr: 9, Key: 0x1f07, Len: 1000}
	h := func(t Type, flags uint8) Header { return Header{Type: t, Flags: flags, Credit: 7} }
	credited := func(c Control) []byte {
		b := make([]byte, c.Len())
		c.Put(b, 7)
		return b
	}
	negotiate := make([]byte, NegotiateLen)
	Params{Version: Version, Credits: 24, MaxMessage: 4096, Caps: 3}.Put(negotiate)
	for _, tt := range []struct {
		m    []byte
		text string
		n    int64
		back bool
	}{
		{negotiate, "Negotiate len=48 credit=0 version=9 credits=24 maxmessage=4096 caps=0x3", 0, false},
		{withHeader(h(TypeData, 0), HeaderLen+5, func([]byte) {}), "Data len=13 credit=7", 5, false},
		{withHeader(h(TypeData, FlagMore), HeaderLen, func([]byte) {}), "Data len=8 credit=7 more", 0, false},
		{withHeader(h(TypeOfferRead, 0), OfferReadLen+3, OfferRead{12, d}.Put), "OfferRead len=43 credit=7 id=12 memory=1000 key=0x1f07", 3, false},
		{withHeader(h(TypeOfferRead, FlagMore), OfferReadLen, OfferRead{12, d}.Put), "OfferRead len=40 credit=7 id=12 memory=1000 key=0x1f07 more", 0, false},
		{withHeader(h(TypeOfferRead, FlagMore|flagReturnable), OfferReadLen, OfferRead{12, d}.Put), "OfferRead len=40 credit=7 id=12 memory=1000 key=0x1f07 returnable more", 0, false},
		{credited(ReadDone{ID: 12, Flags: 0, Count: 900}.Control()), "ReadDone len=24 credit=7 id=12 count=900", 900, true},
		{credited(ReadDone{ID: 12, Flags: FlagGone, Count: 0}.Control()), "ReadDone len=24 credit=7 id=12 count=0 gone", 0, true},
		{credited(Cancel(TypeCancelRead, 12)), "CancelRead len=16 credit=7 id=12", 0, false},
		{credited(Cancel(TypeRefuse, 12)), "Refuse len=16 credit=7 id=12", 0, false},
		{credited(Inbox(d)), "Inbox len=40 credit=7 memory=1000 key=0x1f07", 0, false},
		{withHeader(h(TypeFill, FlagMore), FillLen, fill(600)), "Fill len=16 credit=7 bytes=600 more", 600, false},
		{credited(Emptied(500)), "Emptied len=24 credit=7 upto=500", 0, false},
		{credited(Plain(TypeNearDone)), "NearDone len=8 credit=7", 0, false},
		{credited(Bytes(TypeNote, []byte("abc"))), "Note len=11 credit=7", 0, false},
	} {
		if got := Text(tt.m); got != tt.text {
			t.Errorf("%q instead of %q", got, tt.text)
		}
		if n, back := Stream(tt.m); n != tt.n || back != tt.back {
			t.Errorf("%s: it brings %d bytes, back %v", tt.text, n, back)
		}
	}
}
