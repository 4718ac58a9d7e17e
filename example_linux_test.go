package san_test

import (
	"context"
	"encoding/json"
	"expvar"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanconn"
)

// echo starts a server that echoes, and returns its address.
func echo() (address string, stop func() error) {
	l, err := san.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(c, c); c.Close() }()
		}
	}()
	return l.Addr().String(), l.Close
}

// A client: as with net.Dial.
func ExampleDial() {
	address, stop := echo()
	defer stop()

	c, err := san.Dial("tcp", address) // was net.Dial
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintln(c, "hello")
	var line string
	fmt.Fscanln(c, &line)
	fmt.Println(line)
	// Output: hello
}

// A server: as with net.Listen. Plain clients connect to the same port, and stay on TCP.
func ExampleListen() {
	l, err := san.Listen("tcp", "127.0.0.1:0") // was net.Listen
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	go func() {
		require := san.Dialer{Policy: san.Require} // no byte may go by TCP
		for _, dial := range []func(network, address string) (net.Conn, error){require.Dial, net.Dial} {
			c, err := dial("tcp", l.Addr().String())
			if err != nil {
				log.Fatal(err)
			}
			fmt.Fprintln(c, "hello")
			io.Copy(io.Discard, c)
			c.Close()
		}
	}()
	for range 2 {
		c, err := l.Accept()
		if err != nil {
			log.Fatal(err)
		}
		var line string
		fmt.Fscanln(c, &line)
		fmt.Println(line, "by", san.InfoOf(c).Provider)
		c.Close()
	}
	// Output:
	// hello by shm
	// hello by tcp
}

// With net/http, the server gets another listener and the client another DialContext.
func Example_http() {
	l, err := san.Listen("tcp", "127.0.0.1:0") // was net.Listen
	if err != nil {
		log.Fatal(err)
	}
	type key struct{}
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintln(w, "you came by", san.InfoOf(r.Context().Value(key{}).(net.Conn)).Provider)
		}),
		// Only to know what carries a client's connection; a server does not need it.
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, key{}, c)
		},
	}
	go server.Serve(l)
	defer server.Close()

	client := &http.Client{Transport: &http.Transport{
		// Was new(net.Dialer).DialContext. With the default policy a connection moves once it
		// has been used a while.
		DialContext: (&san.Dialer{Policy: san.Require}).DialContext,
	}}
	defer client.CloseIdleConnections()
	resp, err := client.Get("http://" + l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(string(text))
	// Output: you came by shm
}

// What carries a connection, and for TCP why it is not a SAN.
func ExampleInfoOf() {
	plain, err := net.Listen("tcp", "127.0.0.1:0") // a server without package san
	if err != nil {
		log.Fatal(err)
	}
	defer plain.Close()
	address, stop := echo() // one with it
	defer stop()

	dialer := san.Dialer{Options: sanconn.Options{MoveAtOnce: true}} // at once, instead of when it pays
	for _, address := range []string{address, plain.Addr().String()} {
		c, err := dialer.Dial("tcp", address)
		if err != nil {
			log.Fatal(err)
		}
		for san.InfoOf(c).Fallback == san.ReasonUnused { // it moves in the background, and no event reports that
			time.Sleep(time.Millisecond)
		}
		info := san.InfoOf(c)
		fmt.Printf("%s, fallback: %v\n", info.Provider, info.Fallback)
		c.Close()
	}
	// Output:
	// shm, fallback: none
	// tcp, fallback: no SAN listener
}

// The counters of the process, and those of one connection over a SAN.
func ExampleStats() {
	address, stop := echo()
	defer stop()
	before := san.Stats()
	c, err := (&san.Dialer{Policy: san.Require}).Dial("tcp", address)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	fmt.Fprint(c, "four")
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		log.Fatal(err)
	}

	after := san.Stats()
	fmt.Println("moved to shm:", after.Dialed["shm"]-before.Dialed["shm"])
	if s, ok := c.(*sanconn.Conn); ok { // it could also be a connection of net's own
		fmt.Println("sent:", s.Stats().BytesSent, "by TCP:", s.Stats().TCPBytesSent)
	}
	// Output:
	// moved to shm: 1
	// sent: 4 by TCP: 0
}

// What would carry a connection to a destination, and why other providers would not.
func ExampleDialer_Explain() {
	plain, err := net.Listen("tcp", "127.0.0.1:0") // a server without package san
	if err != nil {
		log.Fatal(err)
	}
	defer plain.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	dialer := san.Dialer{Providers: []string{"shm"}}
	outcomes, err := dialer.Explain(ctx, "tcp", plain.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	for _, o := range outcomes {
		why := "connects"
		if u, ok := o.Err.(*san.Unavailable); ok {
			why = u.Reason.String()
		}
		fmt.Printf("%s: %s, chosen: %v\n", o.Provider, why, o.Chosen)
	}
	// Output:
	// shm: no SAN listener, chosen: false
	// verbs: disabled, chosen: false
	// tcp: connects, chosen: true
}

// The counters of the process in /debug/vars, where net/http serves them.
func ExampleStats_expvar() {
	expvar.Publish("san", expvar.Func(func() any { return san.Stats() }))

	address, stop := echo()
	defer stop()
	c, err := (&san.Dialer{Policy: san.Require}).Dial("tcp", address)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	// {"Dialed":{"shm":1,"tcp":1},"Accepted":{"shm":1,"tcp":1},"Open":{"shm":2},"Fallbacks":{},"Listeners":{},"Refused":0}
	var published struct{ Dialed map[string]uint64 }
	if err := json.Unmarshal([]byte(expvar.Get("san").String()), &published); err != nil {
		log.Fatal(err)
	}
	fmt.Println(published.Dialed["shm"] > 0)
	// Output: true
}
