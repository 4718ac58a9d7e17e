package san

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// answering returns a resolver that knows only the given hosts. Its DNS server is at the other end of a
// pipe.
func answering(t testing.TB, hosts map[string][]string) *net.Resolver {
	return &net.Resolver{
		PreferGo: true,
		Dial: func(context.Context, string, string) (net.Conn, error) {
			client, server := net.Pipe()
			go serveDNS(t, server, hosts)
			return client, nil
		},
	}
}

// serveDNS answers queries on c, which has the framing of DNS over TCP.
func serveDNS(t testing.TB, c net.Conn, hosts map[string][]string) {
	defer c.Close()
	for {
		var size [2]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(c, query); err != nil {
			return
		}
		answer, err := answerDNS(query, hosts)
		if err != nil {
			t.Error(err)
			return
		}
		answer = append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)
		if _, err := c.Write(answer); err != nil {
			return
		}
	}
}

func answerDNS(query []byte, hosts map[string][]string) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(query); err != nil {
		return nil, err
	}
	m.Response, m.Authoritative, m.Additionals = true, true, nil
	q := m.Questions[0]
	addrs, known := hosts[q.Name.String()]
	if !known {
		m.RCode = dnsmessage.RCodeNameError
	}
	for _, a := range addrs {
		ip := netip.MustParseAddr(a)
		header := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 60}
		switch {
		case ip.Is4() && q.Type == dnsmessage.TypeA:
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.AResource{A: ip.As4()}})
		case ip.Is6() && q.Type == dnsmessage.TypeAAAA:
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.AAAAResource{AAAA: ip.As16()}})
		}
	}
	return m.Pack()
}
