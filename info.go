package san

import (
	"net"
	"reflect"
	"runtime"
	"sync"
	"weak"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/sanconn"
)

// Info is what carries a connection.
type Info struct {
	// Provider is "shm", "verbs" or "tcp"; for a connection of another network, the name of the
	// network.
	Provider string
	// Fallback is why the connection is not on a SAN. It is ReasonNone if the connection is on a SAN,
	// and also for TCP connections that this package has not made, and for other networks.
	Fallback Reason
	// Cause has the details of Fallback, or is nil.
	Cause error
	// TCPBytes and SANBytes are how many of the application's bytes have gone over TCP and over a SAN
	// so far, in both directions.
	TCPBytes, SANBytes uint64
}

// providerTCP is what Info and Counters call a connection without a SAN.
const providerTCP = moving.TCP

// maxWrappers bounds how many wrappers InfoOf opens, in case they form a cycle.
const maxWrappers = 16

// InfoOf returns what carries c. It looks through wrappers that have a method NetConn() net.Conn, as
// *tls.Conn has, or that embed the connection in an exported field; and beneath a *net.TCPConn of a
// program that cmd/san has built. For other wrappers Provider is the name of their network, or empty if
// that is TCP, as there may be a SAN inside. It may be called concurrently.
func InfoOf(c net.Conn) Info {
	for range maxWrappers {
		switch known := c.(type) {
		case nil:
			return Info{}
		case *sanconn.Conn:
			return infoOf(known)
		case *net.TCPConn:
			if carrier, ok := undernet.Carrier(known).(*sanconn.Conn); ok {
				return infoOf(carrier)
			}
			info := Info{Provider: providerTCP}
			if why, ok := fallbacks.Load(weak.Make(known)); ok {
				info.Fallback, info.Cause = why.(*Unavailable).Reason, why.(*Unavailable).Err
			}
			return info
		}
		inner := unwrap(c)
		if inner == nil {
			break
		}
		c = inner
	}
	if a := c.LocalAddr(); a != nil && !isTCP(a.Network()) {
		return Info{Provider: a.Network()}
	}
	return Info{}
}

func infoOf(c *sanconn.Conn) Info {
	st := c.Stats()
	info := Info{Provider: c.Provider(), TCPBytes: st.TCPBytesSent + st.TCPBytesReceived}
	info.SANBytes = st.BytesSent + st.BytesReceived - info.TCPBytes
	if info.Provider != providerTCP {
		return info
	}
	why := moving.WhyOnTCP(c)
	info.Fallback, info.Cause = why.Reason, why.Err
	return info
}

// unwrap returns the connection inside c, or nil if it finds none.
func unwrap(c net.Conn) net.Conn {
	if w, ok := c.(interface{ NetConn() net.Conn }); ok {
		return w.NetConn()
	}
	v := reflect.Indirect(reflect.ValueOf(c))
	if v.Kind() != reflect.Struct {
		return nil
	}
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if f.Anonymous && f.IsExported() {
			if inner, ok := v.Field(i).Interface().(net.Conn); ok {
				return inner
			}
		}
	}
	return nil
}

// fallbacks has the reasons for the *net.TCPConns that this package has returned: *Unavailable by
// weak.Pointer[net.TCPConn]. The connection itself has no room for a reason, and a wrapper would
// disable sendfile and splice. An entry is removed when its connection was collected.
var fallbacks sync.Map

// plain counts a connection that is net's own and stays so, and records why.
func plain(c net.Conn, why *Unavailable, dialed bool) net.Conn {
	if tcp, ok := c.(*net.TCPConn); ok {
		key := weak.Make(tcp)
		fallbacks.Store(key, why)
		runtime.AddCleanup(tcp, func(key weak.Pointer[net.TCPConn]) { fallbacks.Delete(key) }, key)
	}
	provider := InfoOf(c).Provider
	moving.Count(func(n *moving.Counters) {
		n.Fallbacks[why.Reason]++
		if dialed {
			n.Dialed[provider]++
		} else {
			n.Accepted[provider]++
		}
	})
	return c
}
