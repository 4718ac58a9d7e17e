//go:build linux

package overlay

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/sanconn/san/test/overlay/internal/build"
)

// caddy starts a caddy with a site, and returns its address and the page of its counters.
func caddy(t *testing.T, file, site string) (address, counters string) {
	t.Helper()
	t.Setenv("XDG_DATA_HOME", t.TempDir()) // where it keeps its files
	address, admin := freeAddress(t), freeAddress(t)
	args, err := build.CaddyArguments(t.TempDir(), address, admin, site)
	if err != nil {
		t.Fatal(err)
	}
	start(t, file, args...)
	counters = "http://" + admin + "/debug/vars"
	until(t, counters)
	return address, counters
}

// TestCaddy runs caddy as a file server, and as a proxy before such a caddy.
func TestCaddy(t *testing.T) {
	file := others(t, san, "caddy")
	plainWeb := own(t, "go", "web")
	loaders := [2]string{own(t, "go", "load"), own(t, san, "load")}
	dir := t.TempDir()
	content := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	if err := os.WriteFile(filepath.Join(dir, "file"), content, 0o666); err != nil {
		t.Fatal(err)
	}

	files, filesVars := caddy(t, file, "root "+dir+"\n\tfile_server")
	dialed := loads(t, loaders[0], "http", "http://"+files+"/file", 2, 0)
	report(t, "caddy's files, a plain client", dialed, vars(t, filesVars).Accepted, 0, 0)
	dialed = loads(t, loaders[1], "http", "http://"+files+"/file", 2, 2)
	report(t, "caddy's files", dialed, moved(2, func() counters { return vars(t, filesVars) }), 2, 2)

	proxy, proxyVars := caddy(t, file, "reverse_proxy "+files)
	behind := func() counters { return vars(t, proxyVars) }
	dialed = loads(t, loaders[1], "http", "http://"+proxy+"/file", 1, 1)
	report(t, "caddy's proxy", dialed, moved(1, behind), 1, 1)
	if dialed = behind().Dialed; dialed["shm"] == 0 {
		t.Errorf("what the proxy has dialed has not moved: %v", dialed)
	}
	if out, err := exec.Command("curl", "-sS", "http://"+proxy+"/file").Output(); err != nil || !bytes.Equal(out, content) {
		t.Errorf("curl by the proxy: %v, %d bytes", err, len(out))
	}

	_, backend := begin(t, plainWeb)
	proxy, proxyVars = caddy(t, file, "reverse_proxy "+backend)
	dialed = loads(t, loaders[1], "http", "http://"+proxy+"/", 1, 1)
	report(t, "caddy's proxy, a plain backend", dialed, moved(1, behind), 1, 1)
	if dialed = behind().Dialed; dialed["shm"] != 0 || dialed["tcp"] == 0 {
		t.Errorf("to a plain backend: %v", dialed)
	}
}
