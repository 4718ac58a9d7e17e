package interop

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanconn"
)

// curl uses plain TCP on the same port as SAN clients.
func TestCurl(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Fatal("this test needs curl: ", err)
	}
	l, err := san.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var accepted record
	stop := serveHTTP(accepted.listener(l))
	url := "http://" + l.Addr().String()

	body := randomBytes(5 << 20)
	file := filepath.Join(t.TempDir(), "body")
	if err := os.WriteFile(file, body, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	got, err := exec.CommandContext(ctx, curl, "--silent", "--show-error", "--noproxy", "*", "--data-binary", "@"+file, url).Output()
	if err != nil {
		t.Error("curl: ", err)
	}
	wantBytes(t, got, body)
	wantCarriers(t, "accepted", accepted.carriers(), byTCP(san.ReasonPeerPlain))

	useHTTP(t, (&san.Dialer{Policy: san.Require, Options: sanconn.Options{AttemptTimeout: patience}}).DialContext, l.Addr().String())
	if err := stop(); err != nil {
		t.Error(err)
	}
	wantSome(t, "accepted", accepted.carriers(), moved, "shm") // a connection may have moved before the record looks at it
}
