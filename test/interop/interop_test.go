package interop

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"github.com/sanconn/san"
	"github.com/sanconn/san/sanconn"
	"golang.org/x/crypto/ssh"
)

// patience is how long a test waits for what must happen.
const patience = 60 * time.Second

// lanes are the ways for bytes to go.
var lanes = []struct {
	name, provider string
	policy         san.Policy
	options        sanconn.Options
}{
	{name: "shm", provider: "shm", policy: san.Require},
	{name: "shm, RDMA", provider: "shm", policy: san.Require, options: sanconn.Options{Threshold: 32 << 10}},
	{name: "tcp", provider: "tcp", policy: san.Never},
}

// eachPipe runs a test on a connection of each lane.
func eachPipe(t *testing.T, test func(t *testing.T, client, server net.Conn)) {
	for _, lane := range lanes {
		t.Run(lane.name, func(t *testing.T) {
			lc := &san.ListenConfig{Policy: lane.policy, Options: lane.options}
			l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			d := &san.Dialer{Policy: lane.policy, Options: lane.options}
			client, err := d.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			server, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			for _, c := range []net.Conn{client, server} {
				if got := san.InfoOf(c).Provider; got != lane.provider {
					t.Fatalf("the connection is on %s", got)
				}
				c.SetDeadline(time.Now().Add(patience))
			}
			test(t, client, server)
		})
	}
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

// Commands with input and output side by side on one SSH connection.
func TestSSH(t *testing.T) {
	eachPipe(t, func(t *testing.T, client, server net.Conn) {
		_, key, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		signer, err := ssh.NewSignerFromKey(key)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		defer wg.Wait()
		wg.Go(func() { serveSSH(t, server, signer) })

		conn, chans, reqs, err := ssh.NewClientConn(client, "host", &ssh.ClientConfig{
			User:            "user",
			HostKeyCallback: ssh.FixedHostKey(signer.PublicKey()),
		})
		if err != nil {
			t.Fatal(err)
		}
		c := ssh.NewClient(conn, chans, reqs)
		defer c.Close()
		var sessions sync.WaitGroup
		for range 8 {
			sessions.Go(func() {
				s, err := c.NewSession()
				if err != nil {
					t.Error(err)
					return
				}
				defer s.Close()
				data := randomBytes(1<<20 + 7)
				s.Stdin = bytes.NewReader(data)
				got, err := s.Output("cat")
				if err != nil || !bytes.Equal(got, data) {
					t.Errorf("%d of %d bytes came back: %v", len(got), len(data), err)
				}
			})
		}
		sessions.Wait()
	})
}

// serveSSH answers every command with its own input.
func serveSSH(t *testing.T, c net.Conn, signer ssh.Signer) {
	config := &ssh.ServerConfig{NoClientAuth: true}
	config.AddHostKey(signer)
	_, chans, reqs, err := ssh.NewServerConn(c, config)
	if err != nil {
		t.Error(err)
		return
	}
	go ssh.DiscardRequests(reqs)
	var wg sync.WaitGroup
	defer wg.Wait()
	for ch := range chans {
		channel, requests, err := ch.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		wg.Go(func() {
			for r := range requests {
				r.Reply(r.Type == "exec", nil)
				if r.Type != "exec" {
					continue
				}
				wg.Go(func() {
					defer channel.Close()
					if _, err := io.Copy(channel, channel); err != nil {
						t.Error(err)
					}
					channel.CloseWrite()
					channel.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{0}))
				})
			}
		})
	}
}

// Many streams that yamux multiplexes, both ways.
func TestYamux(t *testing.T) {
	eachPipe(t, func(t *testing.T, client, server net.Conn) {
		config := yamux.DefaultConfig()
		config.LogOutput = io.Discard
		a, err := yamux.Client(client, config)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		b, err := yamux.Server(server, config)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		var echoes sync.WaitGroup
		echoes.Go(func() {
			for {
				s, err := b.Accept()
				if err != nil {
					return
				}
				echoes.Go(func() {
					defer s.Close()
					if _, err := io.Copy(s, s); err != nil {
						t.Error(err)
					}
				})
			}
		})
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				s, err := a.OpenStream()
				if err != nil {
					t.Error(err)
					return
				}
				data := randomBytes(300_000)
				go func() {
					s.Write(data)
					s.Close() // half of it: the echo still comes
				}()
				got, err := io.ReadAll(s)
				if err != nil || !bytes.Equal(got, data) {
					t.Errorf("%d of %d bytes came back: %v", len(got), len(data), err)
				}
			})
		}
		wg.Wait()
		a.Close()
		b.Close()
		echoes.Wait()
	})
}

// curl talks TCP to the very port that SAN clients use.
func TestCurl(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Fatal("this test needs curl: ", err)
	}
	l, err := san.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	providers := make(chan string, 16)
	srv := &http.Server{
		ConnState: func(c net.Conn, s http.ConnState) {
			if s == http.StateNew {
				providers <- san.InfoOf(c).Provider
			}
		},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h := sha256.New()
			io.Copy(h, r.Body)
			fmt.Fprintf(w, "%x", h.Sum(nil))
		}),
	}
	var serving sync.WaitGroup
	serving.Go(func() { srv.Serve(l) })
	defer serving.Wait()
	defer srv.Close()

	body := randomBytes(5 << 20)
	file := filepath.Join(t.TempDir(), "body")
	if err := os.WriteFile(file, body, 0o600); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("%x", sha256.Sum256(body))
	url := "http://" + l.Addr().String()

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, curl, "--silent", "--show-error", "--noproxy", "*", "--data-binary", "@"+file, url).CombinedOutput()
	if err != nil || string(out) != want {
		t.Errorf("curl: %v: %s, want %s", err, out, want)
	}
	if p := <-providers; p != "tcp" {
		t.Errorf("curl came by %s", p)
	}

	d := &san.Dialer{Policy: san.Require}
	client := &http.Client{Transport: &http.Transport{DialContext: d.DialContext}}
	defer client.CloseIdleConnections()
	resp, err := client.Post(url, "application/octet-stream", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); err != nil || string(got) != want {
		t.Errorf("over the SAN: %v: %s, want %s", err, got, want)
	}
	if p := <-providers; p != "shm" {
		t.Errorf("our client came by %s", p)
	}
}
