package san

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// bodySize returns sizes from 0 to 32 MiB. Large ones are rare.
func bodySize(i int) int {
	switch {
	case i%64 == 63 && !testing.Short():
		return 32 << 20
	case i%16 == 15:
		return 1 << 20
	}
	return []int{0, 1, 100, 4095, 64 << 10, 200_000}[i%6]
}

func TestHTTPConcurrentRequests(t *testing.T) {
	requests := amount(200, 40)
	eachHTTP(t, func(t *testing.T, start func(http.Handler, ...func(*http.Server)) *web) {
		w := start(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			in, _ := strconv.Atoi(r.FormValue("in"))
			out, _ := strconv.Atoi(r.FormValue("out"))
			if err := verify(r.Body, in); err != nil {
				t.Errorf("request: %v", err)
			}
			w.Header().Set("Content-Length", strconv.Itoa(out))
			io.Copy(w, &stream{end: out})
		}))
		// HTTP/2 makes one connection, and puts all streams on it.
		if resp, err := w.client.Post(w.URL+"/?in=0&out=0", "", nil); err != nil {
			t.Fatal(err)
		} else {
			resp.Body.Close()
		}
		var wg sync.WaitGroup
		for i := range requests {
			wg.Go(func() {
				in, out := bodySize(i), bodySize(i+7)
				req, err := http.NewRequest("POST", fmt.Sprintf("%s/?in=%d&out=%d", w.URL, in, out), &stream{end: in})
				if err != nil {
					t.Error(err)
					return
				}
				req.ContentLength = int64(in)
				if in == 0 {
					req.Body = http.NoBody
				}
				resp, err := w.client.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				if err := verify(resp.Body, out); err != nil {
					t.Errorf("response to %d: %v", i, err)
				}
			})
		}
		wg.Wait()
	})
}

func TestHTTPAbortedHandlerAndClientTimeout(t *testing.T) {
	eachHTTP(t, func(t *testing.T, start func(http.Handler, ...func(*http.Server)) *web) {
		left := make(chan struct{}, 100)
		w := start(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/abort":
				w.Header().Set("Content-Length", "1000000")
				w.Write(make([]byte, 100_000))
				w.(http.Flusher).Flush()
				panic(http.ErrAbortHandler)
			case "/hang":
				<-r.Context().Done()
				left <- struct{}{}
			default:
				io.WriteString(w, "fine")
			}
		}))
		for range 5 {
			resp, err := w.client.Get(w.URL + "/abort")
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			if err == nil {
				t.Error("an aborted response looks complete")
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			req, _ := http.NewRequestWithContext(ctx, "GET", w.URL+"/hang", nil)
			if _, err := w.client.Do(req); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("client with a short deadline: %v", err)
			}
			cancel()
			w.wantFine(t)
		}
	})
}

// The server notices that a client goes away while its handler runs. net/http does so by a Read in the
// background, which it later interrupts by a deadline in the past.
func TestHTTPServerSeesTheClientGo(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		seen := make(chan struct{})
		w := startWeb(t, l, "HTTP/1.1", false, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			close(seen)
		}))
		c := mustDial(t, l.dialer(), w.Listener.Addr().String())
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		c.Close()
		select {
		case <-seen:
		case <-time.After(testTimeout):
			t.Error("the handler's context does not end")
		}
	})
}

func TestHTTPServerTimeouts(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		w := startWeb(t, l, "HTTP/1.1", false, http.NotFoundHandler(), func(s *http.Server) {
			s.ReadHeaderTimeout = 300 * time.Millisecond // counts from Accept on, so the request must come sooner
			s.IdleTimeout = 50 * time.Millisecond
		})
		for name, request := range map[string]string{
			"half a header": "GET / HTTP/1.1\r\nHost:",
			"idle":          "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		} {
			c := mustDial(t, l.dialer(), w.Listener.Addr().String())
			if _, err := io.WriteString(c, request); err != nil {
				t.Fatal(err)
			}
			c.SetReadDeadline(time.Now().Add(testTimeout))
			if _, err := io.Copy(io.Discard, c); err != nil {
				t.Errorf("%s: %v, want the server to hang up", name, err)
			}
		}
	})
}

func TestHTTPHijack(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		w := startWeb(t, l, "HTTP/1.1", false, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c, rw, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			l.carries(t, c)
			io.WriteString(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			rw.Flush()
			io.Copy(c, rw)
		}))
		c := mustDial(t, l.dialer(), w.Listener.Addr().String())
		c.SetDeadline(time.Now().Add(testTimeout))
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nearly ")
		br := bufio.NewReader(c)
		resp, err := http.ReadResponse(br, nil)
		if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("%v, %v", resp, err)
		}
		go func() {
			io.Copy(c, &stream{end: 1 << 20})
			c.(interface{ CloseWrite() error }).CloseWrite()
		}()
		early := make([]byte, len("early "))
		if _, err := io.ReadFull(br, early); err != nil || string(early) != "early " {
			t.Fatalf("%q, %v", early, err)
		}
		if err := verify(br, 1<<20); err != nil {
			t.Error(err)
		}
	})
}

// A graceful Shutdown, and the addresses that handlers see.
func TestHTTPRemoteAddrAndShutdown(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		var requests atomic.Int32
		w := startWeb(t, l, "HTTP/1.1", false, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			requests.Add(1)
			if host, port, err := net.SplitHostPort(r.RemoteAddr); l.host == "" && host != "127.0.0.1" || port == "0" || err != nil {
				t.Errorf("RemoteAddr %q", r.RemoteAddr)
			}
			io.WriteString(w, "fine")
		}))
		w.wantFine(t)
		ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
		defer cancel()
		if err := w.Config.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
		if _, err := w.client.Get(w.URL); err == nil {
			t.Error("a request after Shutdown succeeded")
		}
		if requests.Load() != 1 {
			t.Errorf("%d requests", requests.Load())
		}
	})
}

// A file is sent by ReadFrom, as net/http does.
func TestHTTPServesAFile(t *testing.T) {
	eachHTTP(t, func(t *testing.T, start func(http.Handler, ...func(*http.Server)) *web) {
		dir := t.TempDir()
		const length = 3<<20 + 1
		b := make([]byte, length)
		position(b, 0)
		if err := os.WriteFile(dir+"/file", b, 0o600); err != nil {
			t.Fatal(err)
		}
		w := start(http.FileServer(http.Dir(dir)))
		resp, err := w.client.Get(w.URL + "/file")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if err := verify(resp.Body, length); err != nil {
			t.Error(err)
		}
		if !strings.HasPrefix(resp.Status, "200") {
			t.Error(resp.Status)
		}
	})
}
