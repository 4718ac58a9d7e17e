package san

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestResolveKeepsNetsOrder(t *testing.T) {
	r := answering(t, map[string][]string{"two.test.": {"127.0.0.2", "127.0.0.1"}, "both.test.": {"::1", "127.0.0.1"}})
	for network, want := range map[string]string{"tcp": "[::1]:80 127.0.0.1:80", "tcp4": "127.0.0.1:80", "tcp6": "[::1]:80"} {
		got, _, err := resolve(t.Context(), r, network, "both.test:80", nil)
		if err != nil || strings.Trim(fmt.Sprint(got), "[]") != strings.Trim(want, "[]") {
			t.Errorf("%s: %v, %v; want %s", network, got, err, want)
		}
	}
	got, named, err := resolve(t.Context(), r, "tcp4", "two.test:80", nil)
	if err != nil || !named {
		t.Fatal(named, err)
	}
	want := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.2:80"), netip.MustParseAddrPort("127.0.0.1:80")}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestResolveUnspecifiedIsThisHost(t *testing.T) {
	for _, c := range []struct{ network, address, want string }{
		{"tcp", ":80", "127.0.0.1:80"},
		{"tcp6", ":80", "[::1]:80"},
		{"tcp", "0.0.0.0:80", "127.0.0.1:80"},
		{"tcp", "[::]:80", "[::1]:80"},

		{"tcp", "[::ffff:127.0.0.1]:80", "127.0.0.1:80"},
		{"tcp", "127.0.0.1:http", "127.0.0.1:80"},
		{"tcp", "[fe80::1%lo]:80", "[fe80::1%lo]:80"},
		{"tcp6", "[::1%lo]:80", "[::1]:80"},
		{"tcp", "[::1%lo]:80", "[::1]:80"},
	} {
		got, named, err := resolve(t.Context(), nil, c.network, c.address, nil)
		if err != nil || named || len(got) == 0 || got[0].String() != c.want {
			t.Errorf("%s %s: %v, %v, %v; want %s", c.network, c.address, got, named, err, c.want)
		}
	}
}
